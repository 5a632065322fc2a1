//! Waiting: for work that falls due, for what may not exist, for another thread.

use std::future::pending;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;
use tokio::time::sleep_until;

/// Waits until something is added to a queue, or until the next of what it holds is due.
pub async fn added_or_due(added: &Notify, next: Option<Instant>) {
    tokio::select! {
        () = added.notified() => {}
        () = or_never(next.map(|at| sleep_until(at.into()))) => {}
    }
}

/// What a future returns; without a future, never anything.
pub async fn or_never<T>(future: Option<impl Future<Output = T>>) -> T {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}

/// Locks what a thread that panicked leaves as it should be.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
