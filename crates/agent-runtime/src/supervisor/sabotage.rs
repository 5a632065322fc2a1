//! Makes tasks panic, for tests of what follows.

use super::Unneeded;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Makes a task panic.
#[derive(Debug, Default)]
pub struct Sabotage {
    /// The names of all tasks that were started.
    pub started: Mutex<BTreeSet<&'static str>>,
    /// The names of those that returned [`Unneeded`].
    pub unneeded: Mutex<BTreeSet<&'static str>>,
    victim: Mutex<Option<&'static str>>,
    struck: Notify,
}

impl Sabotage {
    pub(crate) async fn of(
        self: Arc<Self>,
        name: &'static str,
        work: impl Future<Output = Unneeded>,
    ) -> Unneeded {
        self.started.lock().expect("names").insert(name);
        let fate = async {
            while *self.victim.lock().expect("a name") != Some(name) {
                self.struck.notified().await;
            }
        };
        tokio::select! {
            biased;
            () = fate => panic!("on purpose"),
            Unneeded = work => {
                self.unneeded.lock().expect("names").insert(name);
                Unneeded
            }
        }
    }

    /// Makes the task of this name panic when it runs next.
    pub fn strike(&self, name: &'static str) {
        *self.victim.lock().expect("a name") = Some(name);
        self.struck.notify_waiters();
    }
}
