//! A process without any privilege that does with sockets whatever comes to its mind, from few ports and to few peers, so that each connection
//! meets other processes' sockets.
//!
//! The process is the helper program: it makes as many moves as it is reported on a line of standard input, and answers with a [`Tally`] of all it has done.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::libc;
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrAny, SocketFlags, SocketType, accept_with, bind,
    connect, connect_unspec, getpeername, getsockname, ipproto, listen, recv, send, sendto, shutdown,
    socket_with,
};
use serde::{Deserialize, Serialize};

use crate::iptables::mesh::{any, loopback};
use crate::traffic::{Report, helper};
use test_support::dice::Dice;
use test_support::netns::Namespace;
use test_support::process::{self, Killed};

/// How many sockets it keeps before it lets go of the oldest.
const KEPT: usize = 12;

/// Who it is, and what it may choose from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Its user and group.
    pub user: u32,
    /// The same moves for the same seed, as far as the kernel lets them come out the same.
    pub seed: u64,
    /// The pod's own address; its family is that of all connections.
    pub own: IpAddr,
    /// Whom it calls.
    pub targets: Vec<SocketAddr>,
    /// Ports it uses, with the interfaces that its sockets may be tied to there. None is the kernel's choice.
    pub ports: Vec<(u16, Vec<Option<String>>)>,
    /// Whether it listens, too.
    pub listens: bool,
}

/// What it has done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// How often it tried each kind of move.
    pub moves: BTreeMap<String, usize>,
    /// How often it tried to open a connection.
    pub calls: usize,
    /// Where it was when it was greeted by a server, by the server's name: its own address and the peer's.
    pub greeted: BTreeMap<String, Vec<(SocketAddr, SocketAddr)>>,
    /// Connections that its own listeners accepted from others' addresses: its own address and the peer's.
    pub accepted: Vec<(SocketAddr, SocketAddr)>,
}

/// The process. It ends with the value.
#[derive(Debug)]
pub struct Meddler {
    _child: Killed,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Meddler {
    /// Starts in a namespace.
    pub fn start(namespace: &Namespace, orders: &Orders) -> Result<Self> {
        let mut command = namespace
            .command(&process::command(helper()?, ["meddle".to_owned(), serde_json::to_string(orders)?]));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Command::spawn(&mut command)?;
        let orders = child.stdin.take().context("standard input")?;
        let answers = BufReader::new(child.stdout.take().context("standard output")?);
        Ok(Self { _child: Killed(child), orders, answers })
    }

    /// Has it make some moves; what it has done up to then.
    pub fn moves(&mut self, moves: usize) -> Result<Tally> {
        writeln!(self.orders, "{moves}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("the meddler says {line:?}"))
    }
}

/// Meddles as ordered until standard input ends: for the helper program.
///
/// # Errors
/// It cannot give up its privileges, or nothing listens to its answers.
pub fn meddle_in_helper(orders: &str) -> Result<()> {
    let orders: Orders = serde_json::from_str(orders)?;
    give_up_privileges(orders.user)?;
    let mut acting = Acting::new(orders);
    for line in std::io::stdin().lines() {
        (0..line?.parse()?).for_each(|_| acting.move_once());
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &acting.tally)?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}

fn give_up_privileges(user: u32) -> Result<()> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    nix::sys::prctl::set_no_new_privs()?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let has_none = ["CapEff:", "CapPrm:", "CapAmb:"]
        .iter()
        .all(|set| status.contains(&format!("{set}\t0000000000000000")));
    ensure!(has_none, "capabilities are left:\n{status}");
    Ok(())
}

struct Acting {
    orders: Orders,
    dice: Dice,
    sockets: VecDeque<OwnedFd>,
    listeners: VecDeque<OwnedFd>,
    tally: Tally,
}

impl Acting {
    fn new(orders: Orders) -> Self {
        let dice = Dice::new(orders.seed);
        Self { orders, dice, sockets: VecDeque::new(), listeners: VecDeque::new(), tally: Tally::default() }
    }

    /// Refusals by the kernel are expected and ignored.
    fn move_once(&mut self) {
        match self.dice.below(20) {
            0..=7 => self.call(),
            8 => self.call_at_once(),
            9..=10 => self.call_again(),
            11 => self.tie(),
            12 => self.say(),
            13..=15 => self.end(),
            _ => self.listen(),
        }
        while self.sockets.len() > KEPT {
            self.sockets.pop_front();
        }
        while self.listeners.len() > KEPT / 2 {
            self.listeners.pop_front();
        }
        self.accept();
        self.read();
    }

    fn note(&mut self, what: &str) {
        *self.tally.moves.entry(what.to_owned()).or_default() += 1;
    }

    /// A socket tied to an interface or not, and bound to a port or not.
    fn bound(&mut self) -> Option<OwnedFd> {
        let is_mapped = self.orders.own.is_ipv4() && self.dice.one_in(8);
        let family =
            if self.orders.own.is_ipv6() || is_mapped { AddressFamily::INET6 } else { AddressFamily::INET };
        let protocol = self.dice.one_in(8).then_some(ipproto::MPTCP);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(family, SocketType::STREAM, flags, protocol).ok()?;
        setsockopt(&fd, sockopt::ReuseAddr, &true).ok()?;
        if self.dice.one_in(4) {
            let _ = setsockopt(&fd, sockopt::ReusePort, &true);
        }
        let at = self.dice.below(self.orders.ports.len());
        let (port, interfaces) = self.orders.ports[at].clone();
        let at = self.dice.below(interfaces.len());
        if let Some(interface) = &interfaces[at] {
            self.note("tied to an interface, then bound");
            setsockopt(&fd, sockopt::BindToDevice, &interface.into()).ok()?;
        }
        let from = match self.dice.below(8) {
            0 => any(self.orders.own.is_ipv6()),
            1 => loopback(self.orders.own.is_ipv6()),
            _ => self.orders.own,
        };
        bind(&fd, &SocketAddr::new(mapped(from, is_mapped), port)).ok()?;
        Some(fd)
    }

    fn target(&mut self, fd: &OwnedFd) -> SocketAddr {
        let at = self.dice.below(self.orders.targets.len());
        let target = self.orders.targets[at];
        let is_v6 = getsockname(fd).is_ok_and(|name| name.address_family() == AddressFamily::INET6);
        SocketAddr::new(mapped(target.ip(), is_v6), target.port())
    }

    /// An ordinary call, as far as its socket is ordinary.
    fn call(&mut self) {
        self.note("call");
        if let Some(fd) = self.bound() {
            self.connect(fd);
        }
    }

    fn connect(&mut self, fd: OwnedFd) {
        let to = self.target(&fd);
        self.tally.calls += 1;
        let _ = connect(&fd, &to);
        self.sockets.push_back(fd);
    }

    /// A call with the first bytes in its SYN, where the kernel knows the peer (TCP Fast Open).
    fn call_at_once(&mut self) {
        self.note("call with data (fast open)");
        let Some(fd) = self.bound() else { return };
        let to = self.target(&fd);
        self.tally.calls += 1;
        let fast = SendFlags::from_bits_retain(libc::MSG_FASTOPEN.unsigned_abs());
        let _ = sendto(&fd, b"fast", fast | SendFlags::NOSIGNAL, &to);
        self.sockets.push_back(fd);
    }

    /// Takes a socket back from its peer (`connect` to AF_UNSPEC), and calls with it again.
    fn call_again(&mut self) {
        self.note("call again with the same socket");
        let Some(fd) = self.take() else { return };
        let _ = connect_unspec(&fd);
        self.connect(fd);
    }

    /// Ties a socket that is in use to an interface, or lets go of that.
    fn tie(&mut self) {
        self.note("tied while in use");
        let Some(fd) = self.take() else { return };
        let port = getsockname(&fd).ok().and_then(address).map_or(0, |own| own.port());
        if let Some((_, interfaces)) = self.orders.ports.iter().find(|(known, _)| *known == port) {
            let interface = interfaces[self.dice.below(interfaces.len())].clone().unwrap_or_default();
            let _ = setsockopt(&fd, sockopt::BindToDevice, &interface.into());
        }
        self.sockets.push_back(fd);
    }

    fn say(&mut self) {
        self.note("say something");
        let Some(fd) = self.take() else { return };
        let _ = send(&fd, b"meddle\n", SendFlags::NOSIGNAL);
        self.sockets.push_back(fd);
    }

    fn end(&mut self) {
        let Some(fd) = self.take() else { return };
        let (what, how) = match self.dice.below(5) {
            0 => return self.note("close"),
            1 => {
                self.note("close with a reset (SO_LINGER 0)");
                let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
                let _ = setsockopt(&fd, sockopt::Linger, &at_once);
                return;
            }
            2 => ("half close: no more is written", Shutdown::Write),
            3 => ("half close: no more is read", Shutdown::Read),
            _ => ("shut down", Shutdown::Both),
        };
        self.note(what);
        let _ = shutdown(&fd, how);
        self.sockets.push_back(fd);
    }

    fn listen(&mut self) {
        if !self.orders.listens {
            return;
        }
        self.note("listen");
        let Some(fd) = self.bound() else { return };
        if listen(&fd, 8).is_ok() {
            self.listeners.push_back(fd);
        }
    }

    fn accept(&mut self) {
        for listener in &self.listeners {
            while let Ok(fd) = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                let is_others = |peer: IpAddr| self.orders.targets.iter().any(|target| target.ip() == peer);
                self.tally.accepted.extend(ends(&fd).filter(|(_, peer)| is_others(peer.ip())));
                self.sockets.push_back(fd);
            }
        }
    }

    /// Reads who has greeted it.
    fn read(&mut self) {
        for fd in &self.sockets {
            let mut buffer = [0; 512];
            let Ok((length, _)) = recv(fd, &mut buffer, RecvFlags::DONTWAIT) else { continue };
            let line = buffer[..length].split(|byte| *byte == b'\n').next().unwrap_or_default();
            let Ok(report) = serde_json::from_slice::<Report>(line) else { continue };
            self.tally.greeted.entry(report.server).or_default().extend(ends(fd));
        }
    }

    fn take(&mut self) -> Option<OwnedFd> {
        let at = self.dice.below(self.sockets.len().max(1));
        self.sockets.remove(at)
    }
}

/// Its own address and the peer's.
fn ends(fd: &OwnedFd) -> Option<(SocketAddr, SocketAddr)> {
    Some((address(getsockname(fd).ok()?)?, address(getpeername(fd).ok()??)?))
}

/// An address of IPv4 is one, however the socket writes it.
fn address(name: SocketAddrAny) -> Option<SocketAddr> {
    let name = SocketAddr::try_from(name).ok()?;
    Some(SocketAddr::new(name.ip().to_canonical(), name.port()))
}

/// As a socket of IPv6 writes an address of IPv4.
const fn mapped(address: IpAddr, is_v6: bool) -> IpAddr {
    match address {
        IpAddr::V4(v4) if is_v6 => IpAddr::V6(v4.to_ipv6_mapped()),
        IpAddr::V4(_) | IpAddr::V6(_) => address,
    }
}
