//! One connection or datagram: made, shown in one line, and compared with what it should have reached.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use e2e::traffic::{Client, Outcome, Protocol, Report};

use crate::screen::Screen;

/// Who connects to what.
#[derive(Clone, Debug)]
pub(crate) struct Connection<'a> {
    /// Who connects, for the reader.
    pub from: &'a str,
    /// The address it connects from.
    pub source: IpAddr,
    /// The process that connects.
    pub client: Client<'a>,
    /// What it asks for, for the reader.
    pub to: &'a str,
    /// What it asks for.
    pub target: SocketAddr,
    /// How.
    pub protocol: Protocol,
}

/// Which server a connection should reach, and what that server should see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The server that was asked for; nothing is rewritten.
    Directly(&'static str),
    /// The proxy, which learns from connection tracking where the connection was going.
    Redirected(&'static str),
    /// The proxy, on the address that was asked for: nothing is rewritten, the packets only went to another socket.
    Transparently(&'static str),
    /// The proxy, by a datagram whose answer comes from the server that was asked.
    Answering(&'static str),
}

impl Reach {
    fn server(self) -> &'static str {
        match self {
            Self::Directly(name)
            | Self::Redirected(name)
            | Self::Transparently(name)
            | Self::Answering(name) => name,
        }
    }
}

impl Connection<'_> {
    /// Connects, prints where that went, and notes whether it is where it should go.
    pub(crate) fn show(&self, screen: &mut Screen, wanted: Reach) -> Result<()> {
        let outcome = match self.protocol {
            Protocol::Tcp => self.client.tcp(self.target)?,
            Protocol::Udp => self.client.udp(self.target)?,
        };
        let protocol = match self.protocol {
            Protocol::Tcp => "",
            Protocol::Udp => " (udp)",
        };
        let what = format!("{} {} → {} {}{protocol}", self.from, self.source, self.to, self.target);
        let found = match &outcome {
            Outcome::Answered(report) => format!("reached: {}{}", report.server, self.seen(report, wanted)),
            Outcome::Foreign(_)
            | Outcome::Refused
            | Outcome::Reset
            | Outcome::NoAnswer
            | Outcome::Unreachable(_) => format!("reached nothing: {outcome:?}"),
        };
        screen.check(&what, &found, self.is_as_wanted(&outcome, wanted), &self.wish(wanted))
    }

    /// What the server saw that is worth a word.
    fn seen(&self, report: &Report, wanted: Reach) -> String {
        if report.server != wanted.server() {
            return String::new();
        }
        match wanted {
            Reach::Directly(_) => String::new(),
            Reach::Redirected(_) => match report.original {
                Some(original) => format!(" (was going to {original})"),
                None => " (was going to: unknown)".to_owned(),
            },
            Reach::Transparently(_) => format!(" (sees {} → {})", report.peer.ip(), report.local),
            // The client is a connected socket: the kernel gives it no other peer's datagram.
            Reach::Answering(_) => format!(" (answered as {})", self.target),
        }
    }

    fn is_as_wanted(&self, outcome: &Outcome, wanted: Reach) -> bool {
        let Outcome::Answered(report) = outcome else { return false };
        let rewritten = match wanted {
            Reach::Directly(_) | Reach::Transparently(_) => report.local == self.target,
            Reach::Redirected(_) => report.original == Some(self.target) && report.local != self.target,
            Reach::Answering(_) => report.local != self.target,
        };
        report.server == wanted.server() && report.peer.ip() == self.source && rewritten
    }

    fn wish(&self, wanted: Reach) -> String {
        match wanted {
            Reach::Directly(name) => format!("{name}, untouched, from {}", self.source),
            Reach::Redirected(name) => format!("{name}, which was going to {}", self.target),
            Reach::Transparently(name) => format!("{name}, which sees {} → {}", self.source, self.target),
            Reach::Answering(name) => format!("{name}, answering as {}", self.target),
        }
    }
}
