//! Who listens on the proxy's ports, as the kernel lists it (proc_pid_net(5)).

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};

use redirect_core::rule::Protocol;

/// The most that is read of a list. Listening sockets come before connections in it.
const MOST_READ: u64 = 1 << 20;
/// The state of a TCP socket that listens.
const LISTEN: &str = "0A";
/// The state of a UDP socket that is not connected.
const UNCONNECTED: &str = "07";

/// A port that somebody listens on, and whose process that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Listener {
    /// Whether it is UDP.
    pub is_udp: bool,
    /// The port.
    pub port: u16,
    /// The user of the process, in the numbers of this machine.
    pub user: u32,
}

impl Listener {
    /// The protocol's word.
    #[must_use]
    pub const fn protocol(&self) -> &'static str {
        if self.is_udp { "udp" } else { "tcp" }
    }

    /// Whether it takes packets of a protocol for a port.
    #[must_use]
    pub fn is_on(&self, protocol: Protocol, port: u16) -> bool {
        self.port == port && self.is_udp == (protocol == Protocol::Udp)
    }
}

/// Who listens in the calling thread's network namespace, on any address.
///
/// # Errors
/// The kernel does not say.
pub fn listeners() -> io::Result<BTreeSet<Listener>> {
    let mut all = BTreeSet::new();
    for (name, is_udp) in [("tcp", false), ("tcp6", false), ("udp", true), ("udp6", true)] {
        let file = match File::open(format!("/proc/thread-self/net/{name}")) {
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(MOST_READ).read_to_end(&mut bytes)?;
        all.extend(read(&String::from_utf8_lossy(&bytes), is_udp));
    }
    Ok(all)
}

/// The listeners in a list: `sl local_address rem_address st tx:rx tr:when retrnsmt uid ...`.
fn read(list: &str, is_udp: bool) -> impl Iterator<Item = Listener> + '_ {
    let wanted = if is_udp { UNCONNECTED } else { LISTEN };
    list.lines().skip(1).filter_map(move |line| {
        let mut words = line.split_ascii_whitespace();
        let (_, port) = words.nth(1)?.rsplit_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        let is_listening = words.nth(1)? == wanted;
        let user = words.nth(3)?.parse().ok()?;
        is_listening.then_some(Listener { is_udp, port, user })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_that_listen_count() {
        let list = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                    0: 00000000:3A99 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1337        0 1 1 0 100 0 0 10 0\n   \
                    1: 0100007F:3A9E 0100007F:1234 01 00000000:00000000 00:00000000 00000000  1337        0 2 1 0 20 4 30 10 -1\n   \
                    2: cut";
        let found: Vec<Listener> = read(list, false).collect();
        assert_eq!(found, [Listener { is_udp: false, port: 15001, user: 1337 }]);
        assert!(found[0].is_on(Protocol::Tcp, 15001) && !found[0].is_on(Protocol::Udp, 15001));
    }
}
