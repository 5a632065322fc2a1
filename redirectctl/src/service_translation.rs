//! Whether connect(2) to a service gets another destination before any rule of the calling thread's network namespace sees a packet.
//!
//! Network plugins can do so by BPF programs of cgroups (socket load balancing, connect-time load balancing). What such a program does is found by trying:
//! in a new network namespace the only route leads to the service's address, in the namespace itself, which has no listener. So a connection is refused, or
//! finds no route where a program has changed its destination.

use netns_apply::{netns::DisposableThread, routes::RouteSocket};
use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// The namespace itself answers.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether it does so in network namespaces such as pods', for processes in the calling thread's cgroup; false where that cannot be found out, as without
/// CAP_SYS_ADMIN.
pub(crate) fn is_translated(service: SocketAddr) -> bool {
    let tried = DisposableThread::run(|thread| {
        thread.enter_new().ok()?;
        // Of the few routes nothing is read.
        let mut routes = RouteSocket::open(0).ok()?;
        routes.raise_loopback().ok()?;
        routes.add_local_route(service.ip()).ok()?;
        TcpStream::connect_timeout(&service, PATIENCE).err()
    });
    let ended = tried.ok().flatten();
    ended.is_some_and(|error| {
        matches!(error.kind(), ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable)
    })
}
