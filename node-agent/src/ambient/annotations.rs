//! Writing pods' annotations, without holding up enrolment: an API server that is slow delays what people read, not what pods do.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use agent_runtime::{ChangeError, lock};
use cni_core::pod_source::PodName;
use reasons::AgentReason;
use tokio::sync::{Notify, mpsc};

use super::decision::Redirection;
use super::pod::AmbientPod;
use crate::cluster::ApiHandle;
use crate::cluster::pods;
use crate::metrics::Metrics;

/// How many are written at the same time.
const AT_ONCE: usize = 4;

/// An annotation that could not be written: the pod's UID, and why.
pub type AnnotationFailure = (String, String);

/// What is to be written, by UID. Of several for a pod, the last one counts.
#[derive(Debug, Default)]
pub struct AnnotationQueue {
    waiting: Mutex<BTreeMap<String, (PodName, Option<Redirection>)>>,
    added: Notify,
}

impl AnnotationQueue {
    /// This annotation of a pod is to be written, or removed.
    pub fn add(&self, pod: &AmbientPod, annotation: Option<Redirection>) {
        lock(&self.waiting).insert(pod.workload.uid().to_owned(), (pod.name.clone(), annotation));
        self.added.notify_one();
    }

    /// What is to be written next: the pod's UID and name, and the annotation.
    pub fn take(&self) -> Option<(String, (PodName, Option<Redirection>))> {
        lock(&self.waiting).pop_first()
    }

    async fn next(&self) -> (String, (PodName, Option<Redirection>)) {
        loop {
            if let Some(next) = self.take() {
                // The next task takes the next one.
                self.added.notify_one();
                return next;
            }
            self.added.notified().await;
        }
    }
}

/// Writes annotations for ever, several at the same time.
pub async fn write(
    queue: Arc<AnnotationQueue>,
    connection: Arc<ApiHandle>,
    metrics: Arc<Metrics>,
    failures: mpsc::UnboundedSender<AnnotationFailure>,
) -> Infallible {
    let writer = || write_one_by_one(&queue, &connection, &metrics, &failures);
    const { assert!(AT_ONCE == 4, "one task for each") };
    let (never, ..) = tokio::join!(writer(), writer(), writer(), writer());
    never
}

async fn write_one_by_one(
    queue: &AnnotationQueue,
    connection: &ApiHandle,
    metrics: &Metrics,
    failures: &mpsc::UnboundedSender<AnnotationFailure>,
) -> Infallible {
    loop {
        let (uid, (name, annotation)) = queue.next().await;
        let result = match write_annotation(connection, (&name.namespace, &name.name, &uid), annotation).await
        {
            Ok(()) => AgentReason::Done,
            // Whatever has its name now is not this pod.
            Err(ChangeError::Gone | ChangeError::Changed(_)) => AgentReason::Gone,
            Err(error) => {
                let why = format!(
                    "the annotation {} cannot be written: {error}; the agent's service account needs the verb patch on pods/status",
                    Redirection::KEY
                );
                // The controller ends with the agent.
                let _ = failures.send((uid, why));
                AgentReason::Failed
            }
        };
        metrics.annotations.get_or_create(&result.into()).inc();
    }
}

async fn write_annotation(
    connection: &ApiHandle,
    pod: (&str, &str, &str),
    annotation: Option<Redirection>,
) -> Result<(), ChangeError> {
    pods::annotate(&connection.get()?, pod, Redirection::KEY, annotation.map(Redirection::value)).await
}
