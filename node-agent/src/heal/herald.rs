//! Events about pods, sent one after the other: an API server that is slow holds up no mending.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::SCOPE;
use crate::cluster::{Connection, Telling, pod_reference};
use crate::drift::Candidate;
use crate::metrics::{Metrics, ResultLabel};
use crate::supervisor::{Supervisor, Unneeded};

/// Who sends the events, as people know it.
const COMPONENT: &str = "cni-heal";
/// How many may wait. What does not fit is counted as failed; the log has it all the same.
const MOST_WAITING: usize = 64;

/// What an event says.
#[derive(Debug)]
pub struct News {
    /// About whom.
    pub pod: Arc<Candidate>,
    /// Normal or Warning.
    pub kind: &'static str,
    /// The word that people and programs know it by.
    pub reason: &'static str,
    /// The sentence.
    pub message: String,
}

/// Sends events.
#[derive(Debug)]
pub struct Herald {
    news: mpsc::Sender<News>,
    metrics: Arc<Metrics>,
}

impl Herald {
    /// Sends until it is dropped.
    #[must_use]
    pub fn start(connection: Arc<Connection>, metrics: Arc<Metrics>, tasks: &Supervisor) -> Self {
        let (send, mut news) = mpsc::channel(MOST_WAITING);
        let counted = metrics.clone();
        tasks.spawn("events of healing", async move {
            while let Some(news) = news.recv().await {
                let sent = tell(&connection, &news).await;
                count(&counted, sent.is_ok());
                if let Err(error) = sent {
                    log::debug!(target: SCOPE, pod = news.pod.name.to_string(); "cannot send an event, which needs the verb create on events: {error}");
                }
            }
            Unneeded
        });
        Self { news: send, metrics }
    }

    /// Sends an event, later.
    pub fn send(&self, news: News) {
        if self.news.try_send(news).is_err() {
            count(&self.metrics, false);
        }
    }
}

fn count(metrics: &Metrics, is_sent: bool) {
    let result = if is_sent { "sent" } else { "failed" };
    metrics.events.get_or_create(&ResultLabel { result }).inc();
}

async fn tell(connection: &Connection, news: &News) -> Result<(), String> {
    let cluster = connection.get().map_err(|error| error.to_string())?;
    let pod = &news.pod;
    let about = pod_reference(&pod.name.namespace, &pod.name.name, Some(&pod.uid));
    let News { kind, reason, message, .. } = news;
    cluster.tell(about, &Telling { component: COMPONENT, kind, reason, message }).await
}
