//! What the kernel reports about changes in a network namespace without being asked.
//!
//! nf_tables notifies its listeners of every transaction, and routing of every policy rule, route and address. Nothing reports changes to the tables
//! of legacy iptables.
//!
//! An open socket keeps its network namespace alive, as a process in it would. A subscriber must drop the subscription
//! when the pod ends.

use netfilter_state::netlink::Messages;
use netlink_sys::{
    Socket, SocketAddr,
    protocols::{NETLINK_NETFILTER, NETLINK_ROUTE},
};
use nix::{errno::Errno, sys::socket::MsgFlags};
use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

/// `NFNLGRP_NFTABLES` (linux/netfilter/nfnetlink.h), as a bit.
const NFTABLES: u32 = 0x40;
/// `RTMGRP_IPV4_IFADDR`, `_IPV4_ROUTE`, `_IPV4_RULE`, `_IPV6_IFADDR`, `_IPV6_ROUTE`, and the bit of `RTNLGRP_IPV6_RULE` (linux/rtnetlink.h).
const ROUTING: u32 = 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 0x4_0000;
/// `RTMGRP_LINK`.
const INTERFACES: u32 = 1;
/// How much may wait to be read, in bytes of kernel memory; the kernel takes twice that. What does not fit is lost; the loss is reported, and says
/// just as much.
const WAITING: i32 = 16 * 1024;
/// The largest message that is read whole. Of longer ones the beginning is enough.
const LARGEST: usize = 16 * 1024;
/// How many writers are named.
const MOST_NAMED: usize = 3;

/// A socket that receives changes of the network namespace it was opened in. It is readable when a notification waits.
#[derive(Debug)]
pub struct Subscription(Socket);

/// What was received.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notification {
    /// How many messages.
    pub messages: usize,
    /// Whether some were lost, so that anything may have changed.
    pub lost: bool,
    /// Some of those who changed nf_tables: processes (strictly, threads) as the initial pid namespace numbers them, with the names that they give
    /// themselves.
    pub writers: BTreeSet<(u32, String)>,
}

impl Subscription {
    /// Receives changes of nf_tables in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or CAP_NET_ADMIN is missing there.
    pub fn to_rules() -> io::Result<Self> {
        Self::open(NETLINK_NETFILTER, NFTABLES)
    }

    /// Receives changes of policy rules, routes and addresses in the calling thread's network namespace.
    ///
    /// # Errors
    /// No socket can be opened.
    pub fn to_routing() -> io::Result<Self> {
        Self::open(NETLINK_ROUTE, ROUTING)
    }

    /// The same, and changes of interfaces.
    pub(crate) fn to_surroundings() -> io::Result<Self> {
        Self::open(NETLINK_ROUTE, ROUTING | INTERFACES)
    }

    fn open(protocol: isize, groups: u32) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.set_rx_buf_sz(WAITING)?;
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, groups))?;
        Ok(Self(socket))
    }

    /// Whether certainly nothing has changed since it was opened.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut heard = Notification::default();
        self.drain(&mut heard, 1).is_ok_and(|all| all && heard.is_nothing())
    }

    /// Adds the notifications that have arrived, up to `most` datagrams; returns whether that was all.
    ///
    /// # Errors
    /// The socket failed.
    pub fn drain(&self, heard: &mut Notification, most: usize) -> io::Result<bool> {
        let mut buffer = Vec::with_capacity(LARGEST);
        for _ in 0..most {
            buffer.clear();
            match self.0.recv(&mut buffer, MsgFlags::MSG_DONTWAIT.bits()) {
                Ok(_) => heard.take(&buffer),
                Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EAGAIN) => return Ok(true),
                    Some(Errno::EINTR) => {}
                    Some(Errno::ENOBUFS) => heard.lost = true,
                    Some(_) | None => return Err(error),
                },
            }
        }
        Ok(false)
    }
}

impl Notification {
    /// Whether nothing arrived.
    #[must_use]
    pub const fn is_nothing(&self) -> bool {
        self.messages == 0 && !self.lost
    }

    fn take(&mut self, datagram: &[u8]) {
        for message in Messages::new(datagram) {
            self.messages = self.messages.saturating_add(1);
            if let Some((process, name)) = message.writer()
                && self.writers.len() < MOST_NAMED
            {
                self.writers.insert((process, name.to_owned()));
            }
        }
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Subscription {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
