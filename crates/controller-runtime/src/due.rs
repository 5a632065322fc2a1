//! Waiting for work that falls due.

use std::time::Instant;

use tokio::sync::Notify;

/// Waits until something is added to a queue, or until the next of what it holds is due.
pub async fn added_or_due(added: &Notify, next: Option<Instant>) {
    let Some(at) = next else { return added.notified().await };
    tokio::select! {
        () = added.notified() => {}
        () = tokio::time::sleep_until(at.into()) => {}
    }
}
