//! Events about pods, sent one after the other: a slow API server does not delay who has something to report.

use std::sync::Arc;

use controller_runtime::metrics::ResultLabel;
use controller_runtime::supervisor::{Supervisor, Unneeded};
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::mpsc;

use super::{Connection, EventBody};
use crate::metrics::Metrics;

/// How many may wait. An event that does not fit counts as failed; the log has it in any case.
const MOST_WAITING: usize = 64;

/// An event about a pod.
#[derive(Debug)]
pub struct EventMessage {
    /// The pod.
    pub about: ObjectReference,
    /// What reports it.
    pub component: &'static str,
    /// Normal or Warning.
    pub kind: &'static str,
    /// Its reason, for people and programs.
    pub reason: &'static str,
    /// Its message.
    pub message: String,
}

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
        connection: Arc<Connection>,
        metrics: Arc<Metrics>,
        tasks: &Supervisor,
    ) -> Self {
        let (queue, mut waiting) = mpsc::channel::<EventMessage>(MOST_WAITING);
        let counted = metrics.clone();
        tasks.spawn(name, async move {
            while let Some(EventMessage { about, component, kind, reason, message }) = waiting.recv().await {
                let event = EventBody { component, kind, reason, message: &message };
                let _ = connection.publish(&counted.events, about, &event).await;
            }
            Unneeded
        });
        Self { queue, metrics }
    }

    /// Sends an event, later.
    pub fn send(&self, event: EventMessage) {
        if self.queue.try_send(event).is_err() {
            self.metrics.events.get_or_create(&ResultLabel { result: "failed" }).inc();
        }
    }
}
