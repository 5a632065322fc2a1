//! Long-lived tasks: none of them ends unnoticed.
//!
//! A task can end in two ways only. It returns [`Unneeded`], as its type requires, or it panics; then the supervisor reports that from the same
//! moment on, and the process ends with an error that names the task.

#[cfg(feature = "sabotage")]
pub mod sabotage;

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;

use tokio::sync::watch;
use tokio::task::AbortHandle;

/// The result of a task without work: its feature is off, or its clients have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unneeded;

/// A task that has ended unexpectedly.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the task {name:?} has ended: it panicked: {cause}")]
pub struct DeadTask {
    /// Its name.
    pub name: &'static str,
    /// What it panicked with.
    pub cause: String,
}

/// Starts tasks, and knows which one ended unexpectedly first, if any. All clones are one.
#[derive(Debug, Clone, Default)]
pub struct Supervisor {
    dead: Arc<watch::Sender<Option<DeadTask>>>,
    /// Makes tasks panic. No program has this.
    #[cfg(feature = "sabotage")]
    pub sabotage: Arc<sabotage::Sabotage>,
}

/// A task that ends when this is dropped.
#[derive(Debug)]
pub struct OwnedTask(pub AbortHandle);

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Supervisor {
    /// Starts a task. Aborting it is not an unexpected end. Needs a tokio run-time.
    #[expect(clippy::disallowed_methods, reason = "this is where it is allowed")]
    pub fn spawn(
        &self,
        name: &'static str,
        work: impl Future<Output = Unneeded> + Send + 'static,
    ) -> AbortHandle {
        #[cfg(feature = "sabotage")]
        let work = self.sabotage.clone().of(name, work);
        let dead = self.dead.clone();
        let mut work = Box::pin(work);
        // Caught here and not where the task is joined: no other task runs before it is known.
        let watched = poll_fn(move |context| {
            let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context)));
            polled.map_or_else(
                |panic| {
                    let death = DeadTask { name, cause: words(&*panic) };
                    dead.send_if_modified(|dead| dead.is_none() && dead.replace(death).is_none());
                    Poll::Ready(())
                },
                |polled| polled.map(|Unneeded| ()),
            )
        });
        tokio::spawn(watched).abort_handle()
    }

    /// The task that ended unexpectedly, if any.
    #[must_use]
    pub fn dead(&self) -> Option<DeadTask> {
        self.dead.borrow().clone()
    }

    /// Waits until a task ends unexpectedly.
    pub async fn death(&self) -> DeadTask {
        let mut dead = self.dead.subscribe();
        loop {
            if let Some(dead) = self.dead() {
                return dead;
            }
            // The sender lives as long as this does.
            let _ = dead.changed().await;
        }
    }
}

/// The message of a panic.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "the panic has no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_is_named_and_the_first_one_counts() {
        let supervisor = Supervisor::default();
        assert_eq!(supervisor.dead(), None);
        supervisor.spawn("one", async { panic!("no {}", 7) });
        let dead = supervisor.death().await;
        assert_eq!(dead.to_string(), "the task \"one\" has ended: it panicked: no 7");
        let two = supervisor.spawn("two", async { panic!("later") });
        while !two.is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(supervisor.dead(), Some(dead));
    }

    #[tokio::test]
    async fn an_unneeded_or_aborted_task_is_not_a_death() {
        let supervisor = Supervisor::default();
        let done = supervisor.spawn("done", async { Unneeded });
        let given_up = supervisor.spawn("given up", std::future::pending());
        given_up.abort();
        while !(done.is_finished() && given_up.is_finished()) {
            tokio::task::yield_now().await;
        }
        assert_eq!(supervisor.dead(), None);
    }
}
