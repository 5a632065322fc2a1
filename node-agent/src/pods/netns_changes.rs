//! Changes in a pod's network namespace, as the kernel reports them.

use std::io;
use std::mem;
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
pub struct ChangeSubscriptions {
    sockets: [AsyncFd<Subscription>; 2],
    /// What has arrived of the burst that goes on, and when it began.
    arrived: Notification,
    since: Instant,
}

impl ChangeSubscriptions {
    /// Needs a tokio run-time.
    ///
    /// # Errors
    /// The sockets cannot be waited for.
    pub fn new([rules, routing]: Sockets) -> io::Result<Self> {
        let sockets = [to_be_read(rules)?, to_be_read(routing)?];
        Ok(Self { sockets, arrived: Notification::default(), since: Instant::now() })
    }

    /// Waits for a notification, and for the end of its burst; with its beginning. May be dropped and called again.
    ///
    /// # Errors
    /// Nothing more can be received.
    pub async fn receive(&mut self) -> io::Result<(Instant, Notification)> {
        while self.arrived.is_nothing() {
            self.since = self.next().await?;
        }
        sleep(BURST).await;
        for socket in &self.sockets {
            socket.get_ref().drain(&mut self.arrived, MOST_READ)?;
        }
        Ok((self.since, mem::take(&mut self.arrived)))
    }

    /// Waits until something can be read, and reads it; when that was.
    async fn next(&mut self) -> io::Result<Instant> {
        let [rules, routing] = &self.sockets;
        let mut ready: AsyncFdReadyGuard<'_, Subscription> = tokio::select! {
            ready = rules.readable() => ready?,
            ready = routing.readable() => ready?,
        };
        if ready.get_inner().drain(&mut self.arrived, MOST_READ)? {
            ready.clear_ready();
        }
        Ok(Instant::now())
    }
}
