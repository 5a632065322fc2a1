//! The connections that a server has open: a bounded number, in which an idle connection makes room for a new one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::lock;

/// The open connections of one server.
#[derive(Debug)]
pub(super) struct Slots {
    most: usize,
    open: Mutex<Open>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Open {
    /// How often a connection became idle or was opened: the order of idleness.
    moments: u64,
    connections: BTreeMap<u64, OpenConnection>,
}

#[derive(Debug)]
struct OpenConnection {
    /// Since when it has waited for a request; none while one is answered.
    idle_since: Option<u64>,
    task: Option<AbortHandle>,
}

/// The place of a connection, given back when this is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    pub(super) number: u64,
}

impl Slots {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::default(), freed: Notify::new() })
    }

    /// A place for a connection that was accepted. If all are taken, the connection that has been idle for longest is closed; if none is
    /// idle, this waits until one is.
    pub(super) async fn take(self: &Arc<Self>) -> Slot {
        loop {
            let freed = self.freed.notified();
            if let Some(slot) = self.try_take() {
                return slot;
            }
            freed.await;
        }
    }

    fn try_take(self: &Arc<Self>) -> Option<Slot> {
        let mut open = lock(&self.open);
        if open.connections.len() >= self.most {
            let idle = open.connections.iter();
            let idle = idle.filter_map(|(number, connection)| Some((connection.idle_since?, *number)));
            let (_, oldest) = idle.min()?;
            let closed = open.connections.remove(&oldest);
            if let Some(task) = closed.and_then(|connection| connection.task) {
                task.abort();
            }
        }
        open.moments += 1;
        let number = open.moments;
        open.connections.insert(number, OpenConnection { idle_since: Some(number), task: None });
        Some(Slot { slots: self.clone(), number })
    }

    fn change(&self, number: u64, change: impl FnOnce(u64, &mut OpenConnection)) {
        let mut open = lock(&self.open);
        open.moments += 1;
        let moment = open.moments;
        if let Some(connection) = open.connections.get_mut(&number) {
            change(moment, connection);
        }
    }

    /// Remembers the task that serves a connection, so that it can be ended.
    pub(super) fn served_by(&self, number: u64, task: AbortHandle) {
        self.change(number, |_, connection| connection.task = Some(task));
    }

    /// Notes that a request is answered from now on.
    pub(super) fn begin(&self, number: u64) {
        self.change(number, |_, connection| connection.idle_since = None);
    }

    /// Notes that a request was answered.
    pub(super) fn end(&self, number: u64) {
        self.change(number, |moment, connection| connection.idle_since = Some(moment));
        self.freed.notify_one();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.slots.open).connections.remove(&self.number);
        self.slots.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(slots: &Slots) -> Vec<u64> {
        lock(&slots.open).connections.keys().copied().collect()
    }

    #[test]
    fn the_connection_idle_for_longest_makes_room() {
        let slots = Slots::new(3);
        let [first, second, third] = [(); 3].map(|()| slots.try_take().expect("a place"));
        // The first one has asked and was answered, so the second is the one that has waited for longest.
        slots.begin(first.number);
        slots.end(first.number);
        let fourth = slots.try_take().expect("a place");
        assert_eq!(numbers(&slots), [first.number, third.number, fourth.number]);
        // It is gone already; its end changes nothing.
        drop(second);
        assert_eq!(numbers(&slots).len(), 3);
    }

    #[test]
    fn who_is_being_answered_is_not_interrupted() {
        let slots = Slots::new(2);
        let [first, second] = [(); 2].map(|()| slots.try_take().expect("a place"));
        slots.begin(first.number);
        slots.begin(second.number);
        assert!(slots.try_take().is_none());
        slots.end(second.number);
        let third = slots.try_take().expect("a place");
        assert_eq!(numbers(&slots), [first.number, third.number]);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_new_connection_waits_for_an_idle_one() {
        let slots = Slots::new(1);
        let busy = slots.take().await;
        slots.begin(busy.number);
        #[expect(clippy::disallowed_methods, reason = "the test waits for it")]
        let waiting = tokio::spawn({
            let slots = slots.clone();
            async move { slots.take().await.number }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(busy);
        assert_eq!(waiting.await.expect("a place"), 3);
    }
}
