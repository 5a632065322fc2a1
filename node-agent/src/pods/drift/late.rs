//! Checks that others do not wait for: one that takes long counts when it has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet, spawn_blocking};
use tokio::time::timeout;

/// Checks that have not ended in time, by the UIDs of their pods. `C` is what a check was made for, `T` its result.
#[derive(Debug)]
pub(super) struct LateChecks<C, T> {
    patience: Duration,
    running: BTreeMap<String, C>,
    ended: JoinSet<(String, Result<T, JoinError>)>,
}

impl<C, T: Send + 'static> LateChecks<C, T> {
    /// None yet; each check is waited for this long.
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, running: BTreeMap::new(), ended: JoinSet::new() }
    }

    /// Runs the check of a pod. Nothing is returned if it does not end in time, or if an earlier one still runs: [`next`](Self::next) has
    /// its result.
    pub(super) async fn run(
        &mut self,
        uid: &str,
        made_for: C,
        check: impl FnOnce() -> T + Send + 'static,
    ) -> Option<Result<T, JoinError>> {
        if self.running.contains_key(uid) {
            return None;
        }
        let mut running = spawn_blocking(check);
        if let Ok(ended) = timeout(self.patience, &mut running).await {
            return Some(ended);
        }
        let uid = uid.to_owned();
        self.running.insert(uid.clone(), made_for);
        #[expect(clippy::disallowed_methods, reason = "it ends with the check, and `next` receives it")]
        self.ended.spawn(async move { (uid, running.await) });
        None
    }

    /// The next of them that ends, with what it was made for. Waits for ever if none runs.
    pub(super) async fn next(&mut self) -> (C, Result<T, JoinError>) {
        loop {
            match self.ended.join_next().await {
                Some(Ok((uid, ended))) => {
                    if let Some(made_for) = self.running.remove(&uid) {
                        return (made_for, ended);
                    }
                }
                // A task that only waits neither panics nor is aborted.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    type Checks = LateChecks<&'static str, u8>;

    #[tokio::test]
    async fn a_check_that_ends_late_counts_and_holds_up_no_other() {
        let mut checks = Checks::new(Duration::from_millis(20));
        let (end, ended) = mpsc::channel();
        assert!(checks.run("a", "plan of a", move || ended.recv().unwrap_or(0)).await.is_none());
        // Longer than any patience: this one ends at once.
        checks.patience = Duration::from_secs(600);
        assert_eq!(checks.run("b", "plan of b", || 2).await.map(|ended| ended.expect("ends")), Some(2));
        // No second one beside it.
        assert!(checks.run("a", "a newer plan of a", || 3).await.is_none());
        end.send(1).expect("it waits");
        let (made_for, ended) = checks.next().await;
        assert_eq!((made_for, ended.expect("ends")), ("plan of a", 1));
        assert_eq!(
            checks.run("a", "a newer plan of a", || 4).await.map(|ended| ended.expect("ends")),
            Some(4)
        );
        assert!(timeout(Duration::from_millis(20), checks.next()).await.is_err(), "none is left");
    }

    #[tokio::test]
    async fn a_late_check_that_panics_ends_too() {
        let mut checks = Checks::new(Duration::ZERO);
        let (end, ended) = mpsc::channel::<()>();
        let check = move || {
            let _ = ended.recv();
            panic!("broken");
        };
        assert!(checks.run("a", "plan", check).await.is_none());
        drop(end);
        assert!(checks.next().await.1.is_err());
    }
}
