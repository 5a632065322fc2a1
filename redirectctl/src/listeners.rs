//! Who listens on the proxy's ports, as the kernel lists it: by inet_diag (sock_diag(7)), or where it has none, in proc_pid_net(5).

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};

use netns_apply::connections::{self, WaitingSocket};
use redirect_core::rule::Protocol;

/// The most that is read of a list. Listening sockets come before connections in it.
const MOST_READ: u64 = 1 << 20;
/// The state of a TCP socket that listens.
const LISTEN: &str = "0A";
/// The state of a UDP socket that is not connected.
const UNCONNECTED: &str = "07";

/// The listeners in the calling thread's network namespace, on any address.
///
/// # Errors
/// The kernel does not report it.
pub fn listeners() -> io::Result<BTreeSet<WaitingSocket>> {
    connections::listeners().or_else(|_| in_proc())
}

/// The same from the lists in /proc. To write them the kernel walks through the connections of all network namespaces.
fn in_proc() -> io::Result<BTreeSet<WaitingSocket>> {
    let mut all = BTreeSet::new();
    let lists =
        [("tcp", Protocol::Tcp), ("tcp6", Protocol::Tcp), ("udp", Protocol::Udp), ("udp6", Protocol::Udp)];
    for (name, protocol) in lists {
        let file = match File::open(format!("/proc/thread-self/net/{name}")) {
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(MOST_READ).read_to_end(&mut bytes)?;
        all.extend(read(&String::from_utf8_lossy(&bytes), protocol));
    }
    Ok(all)
}

/// The listeners in a list: `sl local_address rem_address st tx:rx tr:when retrnsmt uid ...`.
fn read(list: &str, protocol: Protocol) -> impl Iterator<Item = WaitingSocket> + '_ {
    let wanted = match protocol {
        Protocol::Tcp => LISTEN,
        Protocol::Udp => UNCONNECTED,
    };
    list.lines().skip(1).filter_map(move |line| {
        let mut words = line.split_ascii_whitespace();
        let (_, port) = words.nth(1)?.rsplit_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        let is_listening = words.nth(1)? == wanted;
        let user = words.nth(3)?.parse().ok()?;
        is_listening.then_some(WaitingSocket { protocol, port, user })
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
        let found: Vec<WaitingSocket> = read(list, Protocol::Tcp).collect();
        assert_eq!(found, [WaitingSocket { protocol: Protocol::Tcp, port: 15001, user: 1337 }]);
    }
}
