//! Whether connect(2) to a service gets another destination before any rule of the calling thread's network namespace sees a packet.
//!
//! Network plugins can do so by BPF programs of cgroups (socket load balancing, connect-time load balancing). What such a program does is found by trying:
//! in a new network namespace the service's address is its own, with no listener, and nothing else can be reached. So a connection is refused, or finds no
//! route where a program has changed its destination.

use netns_apply::{
    SystemError,
    netns::DisposableThread,
    routes::{RouteError, RouteSocket},
};
use std::{
    io::{self, ErrorKind},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// The namespace itself answers.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why that cannot be found out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TranslationError {
    /// No thread, or it panicked.
    #[error("cannot try to connect in a new network namespace: {0}")]
    Thread(String),
    /// No network namespace.
    #[error("cannot make a network namespace: {0}; CAP_SYS_ADMIN is needed")]
    Namespace(SystemError),
    /// Its network.
    #[error(transparent)]
    Network(#[from] RouteError),
    /// Another answer.
    #[error("a connection to {0} in a new network namespace ended otherwise: {1}")]
    Connection(SocketAddr, String),
}

/// Whether it does so in network namespaces such as pods', for processes in the calling thread's cgroup.
///
/// # Errors
/// That cannot be found out.
pub(crate) fn is_translated(service: SocketAddr) -> Result<bool, TranslationError> {
    let tried = DisposableThread::run(|thread| {
        thread.enter_new().map_err(TranslationError::Namespace)?;
        // Of the few addresses of lo nothing is read.
        let mut routes = RouteSocket::open(0)?;
        routes.raise_loopback()?;
        routes.add_own_address(service.ip())?;
        judge(service, TcpStream::connect_timeout(&service, PATIENCE))
    });
    tried.map_err(TranslationError::Thread)?
}

fn judge(service: SocketAddr, connected: io::Result<TcpStream>) -> Result<bool, TranslationError> {
    let Err(error) = connected else {
        return Err(TranslationError::Connection(service, "something listens there".to_owned()));
    };
    if error.kind() == ErrorKind::ConnectionRefused {
        return Ok(false);
    }
    if matches!(error.kind(), ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable) {
        return Ok(true);
    }
    Err(TranslationError::Connection(service, error.to_string()))
}
