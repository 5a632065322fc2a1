//! Changes in a pod's network namespace, as the kernel reports them.

use std::io;
use std::time::Duration;

use netns_apply::netns::Netns;
use netns_apply::notify::{Notification, Subscription};
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::time::{Instant, sleep};

use crate::install::file_watch::to_be_read;

/// How long to wait for the rest of a burst.
const BURST: Duration = Duration::from_millis(5);
/// How many datagrams are read at a time. More of them add nothing.
const MOST_READ: usize = 64;

/// Sockets for changes of rules, and of routing. They keep the namespace alive.
pub type Sockets = [Subscription; 2];

/// Subscribes in a network namespace.
///
/// # Errors
/// What the kernel says.
pub fn subscribe(netns: &Netns) -> Result<Sockets, String> {
    let opened = netns.run(|| Ok([Subscription::to_rules()?, Subscription::to_routing()?]));
    opened.map_err(|error| error.to_string())?.map_err(|error: io::Error| error.to_string())
}

/// What the sockets receive.
pub struct ChangeSubscriptions([AsyncFd<Subscription>; 2]);

impl ChangeSubscriptions {
    /// Needs a tokio run-time.
    ///
    /// # Errors
    /// The sockets cannot be waited for.
    pub fn new([rules, routing]: Sockets) -> io::Result<Self> {
        Ok(Self([to_be_read(rules)?, to_be_read(routing)?]))
    }

    /// Waits for a notification, and for the end of its burst; with its beginning.
    ///
    /// # Errors
    /// Nothing more can be received.
    pub async fn receive(&self) -> io::Result<(Instant, Notification)> {
        let [rules, routing] = &self.0;
        let mut notification = Notification::default();
        while notification.is_nothing() {
            let mut ready: AsyncFdReadyGuard<'_, Subscription> = tokio::select! {
                ready = rules.readable() => ready?,
                ready = routing.readable() => ready?,
            };
            if ready.get_inner().drain(&mut notification, MOST_READ)? {
                ready.clear_ready();
            }
        }
        let since = Instant::now();
        sleep(BURST).await;
        self.drain(&mut notification)?;
        Ok((since, notification))
    }

    fn drain(&self, notification: &mut Notification) -> io::Result<()> {
        self.0.iter().try_for_each(|one| one.get_ref().drain(notification, MOST_READ).map(drop))
    }
}
