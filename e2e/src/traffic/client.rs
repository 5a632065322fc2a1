//! The client's side, which runs in the helper process.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, getsockopt, setsockopt, socket,
    sockopt,
};
use nix::unistd::{Gid, Uid, setegid, seteuid, setgroups};

use super::{Attempt, Outcome, Protocol};
use test_support::process::Patience;

/// Longest answer that is read.
const ANSWER: usize = 4096;

pub(super) fn run(attempt: &Attempt) -> Result<Outcome> {
    let fd = socket_of_user(attempt)?;
    if let Some(mark) = attempt.mark {
        setsockopt(&fd, sockopt::Mark, &mark).context("cannot set the mark")?;
    }
    setsockopt(&fd, sockopt::IpTransparent, &attempt.transparent).context("cannot be transparent")?;
    if let Some(source) = attempt.source {
        bind(fd.as_raw_fd(), &SockaddrStorage::from(source))
            .with_context(|| format!("cannot bind to {source}"))?;
    }
    let result = match attempt.protocol {
        Protocol::Tcp => over_tcp(fd, attempt.target, attempt.patience),
        Protocol::Udp => over_udp(fd, attempt.target, attempt.patience),
    };
    Ok(result.unwrap_or_else(|error| Outcome::of_error(&error)))
}

/// A packet belongs to the user who made its socket. Everything else, such as setting the mark, needs root.
fn socket_of_user(attempt: &Attempt) -> Result<OwnedFd> {
    let family = if attempt.target.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let kind = match attempt.protocol {
        Protocol::Tcp => SockType::Stream,
        Protocol::Udp => SockType::Datagram,
    };
    setgroups(&[])?;
    setegid(Gid::from_raw(attempt.group)).context("cannot change the group")?;
    seteuid(Uid::from_raw(attempt.user)).context("cannot change the user")?;
    let fd = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).context("cannot make a socket");
    seteuid(Uid::from_raw(0))?;
    setegid(Gid::from_raw(0))?;
    fd
}

/// Connects, and reads the server's answer.
pub(crate) fn over_tcp(fd: OwnedFd, target: SocketAddr, patience: Duration) -> io::Result<Outcome> {
    let stream = TcpStream::from(fd);
    stream.set_nonblocking(true)?;
    match connect(stream.as_raw_fd(), &SockaddrStorage::from(target)) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS) => wait_until_connected(&stream, patience)?,
        Err(error) => return Err(error.into()),
    }
    stream.set_nonblocking(false)?;
    read_answer(&stream, patience)
}

fn wait_until_connected(stream: &TcpStream, patience: Duration) -> io::Result<()> {
    Patience::new(patience).wait_for(stream, PollFlags::POLLOUT)?;
    match getsockopt(stream, sockopt::SocketError)? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Reads one line, or its beginning when the server closes.
fn read_answer(mut stream: &TcpStream, patience: Duration) -> io::Result<Outcome> {
    let mut patience = Patience::new(patience);
    let mut answer = Vec::new();
    let mut buffer = [0; 512];
    while !answer.contains(&b'\n') && answer.len() < ANSWER {
        patience.wait_for(&stream, PollFlags::POLLIN)?;
        match stream.read(&mut buffer)? {
            0 => break,
            length => answer.extend_from_slice(&buffer[..length]),
        }
    }
    Ok(understand(&answer))
}

fn over_udp(fd: OwnedFd, target: SocketAddr, patience: Duration) -> io::Result<Outcome> {
    let socket = UdpSocket::from(fd);
    socket.connect(target)?;
    socket.send(b"hello\n")?;
    Patience::new(patience).wait_for(&socket, PollFlags::POLLIN)?;
    let mut buffer = [0; ANSWER];
    let length = socket.recv(&mut buffer)?;
    Ok(understand(&buffer[..length]))
}

fn understand(answer: &[u8]) -> Outcome {
    match serde_json::from_slice(answer) {
        Ok(report) => Outcome::Answered(report),
        Err(_) => Outcome::Foreign(String::from_utf8_lossy(answer).into_owned()),
    }
}
