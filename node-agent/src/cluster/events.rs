//! Events, sent one after the other: a slow API server does not delay who has something to report.

use std::sync::Arc;

use agent_runtime::supervisor::{Supervisor, Unneeded};
use reasons::AgentReason;
use tokio::sync::mpsc;

use super::{ApiHandle, EventMessage};
use crate::metrics::Metrics;

/// How many may wait. An event that does not fit counts as failed; the log has it in any case.
const MOST_WAITING: usize = 64;

/// Sends events.
#[derive(Debug)]
pub struct EventPublisher {
    queue: mpsc::Sender<EventMessage>,
    metrics: Arc<Metrics>,
}

impl EventPublisher {
    /// Sends until it is dropped, by a task of this name.
    #[must_use]
    pub fn start(
        name: &'static str,
        connection: Arc<ApiHandle>,
        metrics: Arc<Metrics>,
        tasks: &Supervisor,
    ) -> Self {
        let (queue, mut waiting) = mpsc::channel::<EventMessage>(MOST_WAITING);
        let counted = metrics.clone();
        tasks.spawn(name, async move {
            while let Some(event) = waiting.recv().await {
                let _ = connection.publish(&counted.events, event).await;
            }
            Unneeded
        });
        Self { queue, metrics }
    }

    /// Sends an event, later.
    pub fn send(&self, event: EventMessage) {
        if self.queue.try_send(event).is_err() {
            self.metrics.events.get_or_create(&AgentReason::Failed.into()).inc();
        }
    }
}
