//! Ports of loopback: for servers that cannot be given a socket, and for stand-ins that get one here.

use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Result, bail};

/// A port nothing listens on, and that no other value of this or any other living test process has. It is below those the kernel gives to
/// clients, so that it stays free until a server listens there, and again while the server is stopped.
pub fn free_port() -> Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    /// The names that say which ports are this process's. They are gone when it ends, however it ends.
    static OWN: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 10_000;

    let own = u16::try_from(std::process::id() % u32::from(COUNT))?;
    for _ in 0..COUNT {
        let offset = (own + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT;
        let port = FIRST + offset;
        let name = SocketAddr::from_abstract_name(format!("e2e-port-{port}"))?;
        let Ok(name) = UnixListener::bind_addr(&name) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() && TcpListener::bind(("::", port)).is_ok() {
            OWN.lock().unwrap_or_else(PoisonError::into_inner).push(name);
            return Ok(port);
        }
    }
    bail!("no free port from {FIRST} to {}", FIRST + COUNT)
}

/// Serves every client of a new port of IPv4's loopback, on a thread for each connection, for as long as the test process lives. Returns the port.
/// Ignores errors of a connection: a client may go away.
pub fn serve<T>(serve: impl Fn(TcpStream) -> T + Send + Sync + 'static) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = Arc::clone(&serve);
            thread::spawn(move || drop(serve(stream)));
        }
    });
    Ok(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_the_same_port() -> Result<()> {
        let first = free_port()?;
        let name = SocketAddr::from_abstract_name(format!("e2e-port-{first}"))?;
        assert!(UnixListener::bind_addr(&name).is_err());
        assert_ne!(first, free_port()?);
        Ok(())
    }
}
