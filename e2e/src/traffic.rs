//! Stand-ins for the application, the sidecar proxy and their peers: servers that report to every client what they saw, and clients of any user.
//!
//! Servers are threads of the test process (user root). Clients are processes, because the kernel's owner match checks the user of a
//! process and a thread cannot safely have one of its own.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use serde::{Deserialize, Serialize};

use test_support::netns::Namespace;
use test_support::parallel::on_a_thread;
use test_support::process;

mod client;
mod flood;
mod relay;
mod server;
mod stream;

pub(crate) use client::over_tcp;
pub use flood::{Flood, Turnstile};
pub use relay::Relay;
pub use server::{GREETING, TcpServer, UdpServer, listener};
pub use stream::Stream;

/// How long an answer may take on a busy machine.
pub const ANSWER: Duration = Duration::from_secs(60);

/// The user and group of a sidecar proxy.
pub const PROXY_ID: u32 = 1337;

/// What a server saw of one connection or datagram. It is the first line a TCP server sends and the reply of a UDP server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Which server it was, as the test named it.
    pub server: String,
    /// Where the connection comes from.
    pub peer: SocketAddr,
    /// The address the connection was accepted on. With TPROXY this is the one the client asked for.
    pub local: SocketAddr,
    /// SO_ORIGINAL_DST: the address before REDIRECT or DNAT. None where connection tracking does not know the connection, and for UDP.
    pub original: Option<SocketAddr>,
}

/// How an attempt to reach a server ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Something answered, and this is what it saw.
    Answered(Report),
    /// Something answered that is not a server of this module: its first bytes.
    Foreign(String),
    /// Nothing listens: connection refused, or an ICMP port unreachable for UDP.
    Refused,
    /// The connection was broken off after it had been made.
    Reset,
    /// Nothing came back in time: the packets were dropped.
    NoAnswer,
    /// The kernel could not even try, such as without a route.
    Unreachable(String),
}

impl Outcome {
    /// The report of the server that answered; an error for any other outcome.
    pub fn report(self) -> Result<Report> {
        match self {
            Self::Answered(report) => Ok(report),
            other @ (Self::Foreign(_)
            | Self::Refused
            | Self::Reset
            | Self::NoAnswer
            | Self::Unreachable(_)) => Err(anyhow!("no server answered: {other:?}")),
        }
    }

    /// The name of the server that answered, if one did.
    pub fn server(&self) -> Option<&str> {
        match self {
            Self::Answered(report) => Some(&report.server),
            Self::Foreign(_) | Self::Refused | Self::Reset | Self::NoAnswer | Self::Unreachable(_) => None,
        }
    }

    fn of_error(error: &io::Error) -> Self {
        if matches!(error.kind(), io::ErrorKind::ConnectionRefused) {
            Self::Refused
        } else if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) {
            Self::Reset
        } else if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) {
            Self::NoAnswer
        } else {
            Self::Unreachable(error.to_string())
        }
    }
}

/// The transport of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// A connection; the client sends its message and reads the report.
    Tcp,
    /// One datagram each way. A reply from another address than the one asked is not seen.
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// A client process in a namespace, of a user and from an address the test chooses.
#[derive(Clone, Debug)]
pub struct Client<'a> {
    namespace: &'a Namespace,
    attempt: Attempt,
}

/// One attempt, as the helper process gets it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Attempt {
    user: u32,
    group: u32,
    source: Option<SocketAddr>,
    transparent: bool,
    mark: Option<u32>,
    patience: Duration,
    protocol: Protocol,
    target: SocketAddr,
}

impl<'a> Client<'a> {
    /// A client of user and group root.
    pub fn new(namespace: &'a Namespace) -> Self {
        let attempt = Attempt {
            user: 0,
            group: 0,
            source: None,
            transparent: false,
            mark: None,
            patience: ANSWER,
            protocol: Protocol::Tcp,
            target: SocketAddr::from(([0, 0, 0, 0], 0)),
        };
        Self { namespace, attempt }
    }

    /// The client has this user and group, and no other groups.
    #[must_use]
    pub fn user(mut self, user: u32, group: u32) -> Self {
        (self.attempt.user, self.attempt.group) = (user, group);
        self
    }

    /// The client has the user and group of the sidecar proxy.
    #[must_use]
    pub fn as_proxy(self) -> Self {
        self.user(PROXY_ID, PROXY_ID)
    }

    /// Packets come from this address, which must be one of the namespace.
    #[must_use]
    pub fn from(mut self, source: impl Into<IpAddr>) -> Self {
        self.attempt.source = Some(SocketAddr::new(source.into(), 0));
        self
    }

    /// Packets come from this address, whosever it is (IP_TRANSPARENT).
    #[must_use]
    pub fn in_the_name_of(mut self, source: impl Into<IpAddr>) -> Self {
        self.attempt.transparent = true;
        self.from(source)
    }

    /// Packets carry this firewall mark (SO_MARK).
    #[must_use]
    pub fn mark(mut self, mark: u32) -> Self {
        self.attempt.mark = Some(mark);
        self
    }

    /// How long to wait for the connection and again for the answer. [`ANSWER`] if not set, for who expects an answer; who expects
    /// none sets a short one.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.attempt.patience = patience;
        self
    }

    /// Connects and reads the server's report.
    pub fn tcp(&self, target: impl Into<SocketAddr>) -> Result<Outcome> {
        self.attempt(Protocol::Tcp, target.into())
    }

    /// Sends one datagram and reads the server's report.
    pub fn udp(&self, target: impl Into<SocketAddr>) -> Result<Outcome> {
        self.attempt(Protocol::Udp, target.into())
    }

    fn attempt(&self, protocol: Protocol, target: SocketAddr) -> Result<Outcome> {
        let attempt = Attempt { protocol, target, ..self.attempt.clone() };
        let request = serde_json::to_string(&attempt)?;
        let output = self.namespace.run(&process::command(helper()?, ["connect", &request]))?.ok()?;
        serde_json::from_str(&output.stdout)
            .with_context(|| format!("{} printed {}", output.command, output.stdout))
    }
}

/// What the helper program does for [`Client`]: `attempt` is what the client passed, the answer goes to standard output.
#[doc(hidden)]
pub fn connect_in_helper(attempt: &str) -> Result<String> {
    let attempt: Attempt = serde_json::from_str(attempt)?;
    Ok(serde_json::to_string(&client::run(&attempt)?)?)
}

/// The helper program of this crate. Cargo builds it beside the tests of this crate.
pub(crate) fn helper() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("the test program has no folder")?;
    let folder = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    let helper = folder.join("e2e-helper");
    anyhow::ensure!(helper.exists(), "{} is missing: build the package e2e", helper.display());
    Ok(helper)
}

/// Runs a closure on a thread whose new sockets belong to this user and group, in the eyes of the owner match. Threads
/// it starts inherit that. The thread keeps the capabilities of root.
pub fn as_user<T: Send>(user: u32, group: u32, action: impl FnOnce() -> T + Send) -> T {
    on_a_thread(|| {
        // The user last: a thread that is not root's may not choose its group.
        setfsgid(Gid::from_raw(group));
        setfsuid(Uid::from_raw(user));
        action()
    })
}
