//! Waiting for the pod to get an address.

use crate::stop::{Interrupted, Stop, wait};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::poll::{PollFd, PollFlags};
use std::{io, os::fd::AsFd, time::Instant};

/// Groups of rtnetlink(7): addresses of both families that come and go.
const RTMGRP_IPV4_IFADDR: u32 = 0x10;
const RTMGRP_IPV6_IFADDR: u32 = 0x100;

/// Reports when an address comes or goes in the network namespace it was made in.
pub(crate) struct AddressWatch(Socket);

impl AddressWatch {
    pub(crate) fn start() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR))?;
        socket.set_non_blocking(true)?;
        Ok(Self(socket))
    }

    /// Waits for the next change; false when time is up.
    pub(crate) fn wait(&self, until: Instant, stop: Option<&Stop>) -> Result<bool, Interrupted> {
        let left = until.saturating_duration_since(Instant::now());
        let is_changed = wait(vec![PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], left, stop)?;
        // What changed does not matter: the addresses are read again.
        while self.0.recv_from_full().is_ok() {}
        Ok(is_changed)
    }
}
