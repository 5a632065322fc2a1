//! Connections that were open before a plan's rules came into force, and go on bypassing the proxy.
//!
//! Rules of the nat table decide only about the first packet of a connection. A connection that the kernel already tracks goes on as it began;
//! one that it does not track yet may or may not, depending on which end sends next. So whatever the plan would have captured is ended: TCP
//! connections by aborting the socket (`SOCK_DESTROY`, inet_diag), which notifies both ends at once; datagrams, which have no connection, by making
//! the kernel forget what it tracks of them, so that the next one meets the rules. It keeps what the plan excludes, and what is
//! already translated.
//!
//! With TPROXY nothing is translated, and the proxy runs as root: only the group distinguishes its sockets from the application's. inet_diag does not list
//! groups, so they are read from the processes that have the sockets open.

mod owners;
mod wire;

use crate::{
    netlink::NetlinkError,
    netns::Netns,
    routes::{Addresses, RouteSocket},
    socket::{Ended, NetlinkSocket, code},
    system_error::SystemError,
};
use netlink_sys::protocols::{NETLINK_NETFILTER, NETLINK_SOCK_DIAG};
use nix::errno::Errno;
use packet_trace::interference::{Captures, Opener, Opening, PodTraffic};
use redirect_core::{Family, RulePlan, ambient::ProbeSources, rule::Protocol};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};
use wire::{Flow, Inet};

pub use owners::socket_groups;

/// A connection's own end and its peer's.
type Ends = (SocketAddr, SocketAddr);

/// How many times to list sockets: the second pass finds connections that began while the rules were applied.
const LOOKS: usize = 3;
/// How many times a dump is attempted if it is interrupted.
const DUMP_ATTEMPTS: usize = 10;
const OPEN_DIAG: &str = "open a socket for inet_diag";
const OPEN_TRACKING: &str = "open a socket for netfilter";
/// The most sockets, or tracked connections, that are checked. A pod's limit of open files is lower.
const MOST: usize = 1 << 20;

/// What was ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClosedConnections {
    /// TCP connections that were aborted, and datagram sockets likewise.
    pub sockets: usize,
    /// What connection tracking was made to forget: datagrams, and connections that cannot be aborted.
    pub tracked: usize,
}

/// Why connections may go on bypassing the proxy, or cannot be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloseError {
    /// The kernel does not do what it was asked to.
    #[error("cannot {what}: {cause}")]
    Kernel {
        /// What it was asked to do.
        what: &'static str,
        /// What it answered.
        cause: SystemError,
    },
    /// The namespace's addresses cannot be read.
    #[error("cannot read the network namespace's addresses: {0}")]
    Addresses(String),
    /// The kernel refuses the table of connections that are kept.
    #[error(transparent)]
    Kept(#[from] NetlinkError),
    /// New connections are opened as fast as they are closed.
    #[error("{0} connections that bypass the proxy are open still")]
    Still(usize),
}

fn failed(what: &'static str) -> impl Fn(Errno) -> CloseError {
    move |cause| CloseError::Kernel { what, cause: SystemError(cause) }
}

/// Ends the connections in the calling thread's network namespace that were open before the plan's rules came into force, and that the
/// plan would otherwise have captured. The rules have to be in force.
///
/// `groups_of` maps the inodes of sockets to groups, as [`socket_groups`] does. A socket whose group is unknown counts as the
/// application's.
///
/// # Errors
/// Why some of them may go on.
pub fn sever(
    plan: &RulePlan,
    groups_of: &dyn Fn(&BTreeSet<u32>) -> BTreeMap<u32, u32>,
) -> Result<ClosedConnections, CloseError> {
    let place = CloseScope::here(plan)?;
    let mut severed = ClosedConnections::default();
    let mut diag = QuerySocket::open(NETLINK_SOCK_DIAG, OPEN_DIAG)?;
    let mut tracking = QuerySocket::open(NETLINK_NETFILTER, OPEN_TRACKING)?;
    for _ in 0..LOOKS {
        let beside = place.surely_beside(&mut diag, &mut tracking, groups_of)?;
        let flows = tracking.flows()?;
        // In this order: a datagram's socket is there before it is tracked.
        let forgotten = place.untranslated(&diag.sockets()?, &flows);
        if beside.is_empty() && forgotten.is_empty() {
            return Ok(severed);
        }
        for socket in &beside {
            match diag.abort(socket)? {
                None => severed.sockets += 1,
                // A kernel without INET_DIAG_DESTROY: make the next packet the first that it sees.
                Some(Errno::EOPNOTSUPP) => {
                    let ends = BTreeSet::from([(socket.local, socket.remote)]);
                    severed.tracked += tracking.forget_between(socket.protocol, &ends, &flows)?;
                }
                Some(_) => {}
            }
        }
        severed.tracked += tracking.forget_all(forgotten)?;
    }
    match place.surely_beside(&mut diag, &mut tracking, groups_of)?.len() {
        0 => Ok(severed),
        open => Err(CloseError::Still(open)),
    }
}

/// Makes connection tracking forget those TCP connections from outside that the plan captures, that are not translated, and that no socket of the
/// calling thread's network namespace has any more; returns how many. Once the plan's rules translate and all packets that met other rules have
/// passed, no more of that kind appear, so one pass is enough.
///
/// # Errors
/// Why some may be left.
pub(crate) fn forget_closed(plan: &RulePlan) -> Result<usize, CloseError> {
    let place = CloseScope::here(plan)?;
    let mut tracking = QuerySocket::open(NETLINK_NETFILTER, OPEN_TRACKING)?;
    // In this order: a connection has its socket once it is tracked.
    let flows = tracking.flows()?;
    let sockets = QuerySocket::open(NETLINK_SOCK_DIAG, OPEN_DIAG)?.sockets()?;
    tracking.forget_all(place.over(&sockets, &flows))
}

/// The destinations of those TCP connections that the kernel tracks in the calling thread's network namespace, and that it gives one of the probes'
/// sources, if none of them got beyond its handshake: with their number. In the node's, these are pods whose answers to probes do not come back.
///
/// # Errors
/// The kernel does not report it.
pub fn unanswered_probes(sources: ProbeSources) -> Result<BTreeMap<IpAddr, usize>, CloseError> {
    let sources = Family::BOTH.map(|family| sources.of(family));
    let mut tracking = QuerySocket::open(NETLINK_NETFILTER, OPEN_TRACKING)?;
    let probes = tracking.flows_that(|flow| {
        flow.protocol == Protocol::Tcp && flow.is_translated && sources.contains(&flow.answered_to().ip())
    })?;
    let mut unanswered: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for probe in &probes {
        *unanswered.entry(probe.destination.ip()).or_default() += 1;
    }
    for probe in probes.iter().filter(|probe| !probe.is_opening) {
        unanswered.remove(&probe.destination.ip());
    }
    Ok(unanswered)
}

/// The TCP connections of the calling thread's network namespace with others that are open, or just being opened, and that nothing translates: those
/// that a plan in force would end. What connection tracking translates goes on as it is.
pub(crate) fn kept_when_enrolled() -> Result<BTreeSet<Ends>, CloseError> {
    let flows = QuerySocket::open(NETLINK_NETFILTER, OPEN_TRACKING)?.flows()?;
    let translated = translated(&flows);
    let sockets = QuerySocket::open(NETLINK_SOCK_DIAG, OPEN_DIAG)?.sockets()?;
    let is_kept = |(local, remote): &Ends| {
        !remote.ip().is_loopback() && !translated.contains(&(Protocol::Tcp, *local, *remote))
    };
    Ok(open_over_tcp(&sockets).filter(is_kept).collect())
}

/// Makes connection tracking forget these TCP connections: an entry that it had would let them go on whatever the rules are.
pub(crate) fn forget(ends: &BTreeSet<Ends>) -> Result<(), CloseError> {
    let mut tracking = QuerySocket::open(NETLINK_NETFILTER, OPEN_TRACKING)?;
    let flows = tracking.flows()?;
    tracking.forget_between(Protocol::Tcp, ends, &flows).map(drop)
}

/// The ends, as sockets may see them, of what is translated.
fn translated(flows: &[Flow]) -> BTreeSet<(Protocol, SocketAddr, SocketAddr)> {
    flows.iter().filter(|flow| flow.is_translated).flat_map(Flow::ends_seen).collect()
}

/// The TCP connections of these sockets.
fn open_over_tcp(sockets: &[Inet]) -> impl Iterator<Item = Ends> {
    let open = sockets.iter().filter(|socket| socket.protocol == Protocol::Tcp && socket.is_open());
    open.map(|socket| (socket.local, socket.remote))
}

/// A socket that waits for a peer to send first: a TCP listener, or a UDP socket that is not connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaitingSocket {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its port.
    pub port: u16,
    /// Its user, as the calling process numbers it.
    pub user: u32,
}

/// The listeners in the calling thread's network namespace, on any address, as inet_diag lists it. Unlike the lists under /proc/net,
/// this costs nothing for connections elsewhere on the machine. No privilege is needed.
///
/// # Errors
/// The kernel has no inet_diag for TCP or UDP.
pub fn listeners() -> Result<BTreeSet<WaitingSocket>, CloseError> {
    let mut diag = QuerySocket::open(NETLINK_SOCK_DIAG, OPEN_DIAG)?;
    let listener = |socket: Inet| WaitingSocket {
        protocol: socket.protocol,
        port: socket.local.port(),
        user: socket.user,
    };
    Ok(diag.list(wire::waiting)?.into_iter().map(listener).collect())
}

/// A plan and its pod.
struct CloseScope {
    captures: Captures,
    addresses: Addresses,
    proxies: BTreeSet<u32>,
    proxy_groups: BTreeSet<u32>,
    /// Which user the pod's root is out here.
    root: u32,
}

impl CloseScope {
    /// The calling thread's network namespace.
    fn here(plan: &RulePlan) -> Result<Self, CloseError> {
        let routes = RouteSocket::open(usize::MAX);
        let addresses = routes.and_then(|mut routes| routes.addresses_and_interfaces());
        let addresses = addresses.map_err(|cause| CloseError::Addresses(cause.to_string()))?;
        Ok(Self {
            captures: Captures::of(plan),
            addresses,
            proxies: plan.proxy_users().collect(),
            proxy_groups: plan.proxy_groups().collect(),
            root: Netns::owner_here().unwrap_or_default(),
        })
    }

    fn pod(&self) -> PodTraffic<'_> {
        let Addresses { all, by_interface, interfaces } = &self.addresses;
        PodTraffic { addresses: all, interfaces, by_interface: Some(by_interface), ..PodTraffic::default() }
    }

    /// The sockets whose connections bypass the proxy both times they are listed: one that is just being opened has a socket a moment
    /// before it is tracked.
    fn surely_beside(
        &self,
        diag: &mut QuerySocket,
        tracking: &mut QuerySocket,
        groups_of: &dyn Fn(&BTreeSet<u32>) -> BTreeMap<u32, u32>,
    ) -> Result<Vec<Inet>, CloseError> {
        let mut look = || -> Result<Vec<Inet>, CloseError> {
            let sockets = diag.sockets()?;
            Ok(self.beside(&sockets, &tracking.flows()?).into_iter().cloned().collect())
        };
        let first = look()?;
        if first.is_empty() {
            return Ok(first);
        }
        let mut second = look()?;
        let first: BTreeSet<[u8; 48]> = first.iter().map(Inet::id).collect();
        second.retain(|socket| first.contains(&socket.id()));
        Ok(self.without_proxys(second, groups_of))
    }

    /// The sockets whose connections bypass the proxy.
    fn beside<'s>(&self, sockets: &'s [Inet], flows: &[Flow]) -> Vec<&'s Inet> {
        let translated = translated(flows);
        let listeners: BTreeSet<u16> =
            sockets.iter().filter(|socket| socket.is_listener()).map(|socket| socket.local.port()).collect();
        let ends: BTreeSet<(Protocol, SocketAddr, SocketAddr)> =
            sockets.iter().map(|socket| (socket.protocol, socket.local, socket.remote)).collect();
        let is_beside = |socket: &&Inet| {
            // Both ends are here: one is the proxy's, which opened it in a client's name.
            let is_inner = ends.contains(&(socket.protocol, socket.remote, socket.local));
            if is_inner
                || !socket.is_open()
                || translated.contains(&(socket.protocol, socket.local, socket.remote))
            {
                return false;
            }
            let opening = self.opening(socket, listeners.contains(&socket.local.port()));
            opening.is_some_and(|opening| self.captures.captures(&self.pod(), &opening))
        };
        sockets.iter().filter(is_beside).collect()
    }

    /// Those that no process of the proxy's group has open.
    fn without_proxys(
        &self,
        mut beside: Vec<Inet>,
        groups_of: &dyn Fn(&BTreeSet<u32>) -> BTreeMap<u32, u32>,
    ) -> Vec<Inet> {
        if beside.is_empty() || self.proxy_groups.is_empty() {
            return beside;
        }
        let groups = groups_of(&beside.iter().map(|socket| socket.inode).collect());
        beside.retain(|socket| !self.is_proxys(socket, &groups));
        beside
    }

    fn is_proxys(&self, socket: &Inet, groups: &BTreeMap<u32, u32>) -> bool {
        let group = groups.get(&socket.inode).map(|group| group.checked_sub(self.root).unwrap_or(*group));
        group.is_some_and(|group| self.proxy_groups.contains(&group))
    }

    /// How a socket's connection was opened; `None` if that is not this socket's concern.
    fn opening(&self, socket: &Inet, listens: bool) -> Option<Opening> {
        let user = self.user(socket);
        let Inet { protocol, local, remote, .. } = *socket;
        let is_outbound = protocol == Protocol::Udp || !listens;
        if is_outbound {
            return Some(Opening {
                protocol,
                source: local,
                destination: remote,
                by: Opener::Socket { user, group: None },
            });
        }
        // A connection the pod opened to itself is the other socket's concern, and one that the proxy accepted has reached it.
        let is_anothers = self.pod().owns(&remote.ip()) || self.proxies.contains(&user);
        let opening = Opening { protocol, source: remote, destination: local, by: Opener::Outside };
        (!is_anothers).then_some(opening)
    }

    /// Datagrams that are still tracked as before the rules, except those of the proxy, which the rules let pass.
    fn untranslated<'f>(&self, sockets: &[Inet], flows: &'f [Flow]) -> Vec<&'f Flow> {
        let is_proxys =
            |socket: &&Inet| socket.protocol == Protocol::Udp && self.proxies.contains(&self.user(socket));
        let proxys: BTreeSet<u16> =
            sockets.iter().filter(is_proxys).map(|socket| socket.local.port()).collect();
        let is_captured = |flow: &&Flow| {
            let Flow { protocol, source, destination, .. } = **flow;
            let opening = Opening { protocol, source, destination, by: Opener::UnknownUser };
            protocol == Protocol::Udp
                && !flow.is_translated
                && self.pod().owns(&source.ip())
                && !proxys.contains(&source.port())
                && self.captures.captures(&self.pod(), &opening)
        };
        flows.iter().filter(is_captured).collect()
    }

    /// TCP connections from outside that are tracked untranslated, and that no socket has.
    fn over<'f>(&self, sockets: &[Inet], flows: &'f [Flow]) -> Vec<&'f Flow> {
        let alive: BTreeSet<Ends> = open_over_tcp(sockets).collect();
        let is_over = |flow: &&Flow| {
            let Flow { protocol, source, destination, .. } = **flow;
            let opening = Opening { protocol, source, destination, by: Opener::Outside };
            protocol == Protocol::Tcp
                && !flow.is_translated
                && self.pod().owns(&destination.ip())
                && !alive.contains(&(destination, source))
                && self.captures.captures(&self.pod(), &opening)
        };
        flows.iter().filter(is_over).collect()
    }

    /// Which user a socket belongs to, as the pod numbers it.
    fn user(&self, socket: &Inet) -> u32 {
        socket.user.checked_sub(self.root).unwrap_or(socket.user)
    }
}

/// Asks for a list until nothing has changed while the kernel made it: otherwise a connection may be missing in it.
fn until_whole(what: &'static str, mut ask: impl FnMut() -> Result<Ended, Errno>) -> Result<(), CloseError> {
    for _ in 0..DUMP_ATTEMPTS {
        match ask().map_err(failed(what))? {
            Ended::Whole => return Ok(()),
            Ended::Interrupted => {}
            Ended::Refused(answer) => return Err(failed(what)(code(&answer))),
        }
    }
    Err(failed(what)(Errno::EINTR))
}

/// A netlink socket to ask questions on.
struct QuerySocket(NetlinkSocket);

impl QuerySocket {
    fn open(protocol: isize, what: &'static str) -> Result<Self, CloseError> {
        NetlinkSocket::open(protocol).map(Self).map_err(failed(what))
    }

    /// All sockets of TCP and UDP.
    fn sockets(&mut self) -> Result<Vec<Inet>, CloseError> {
        self.list(|_| wire::ALL_STATES)
    }

    /// Sockets of TCP and UDP in these states. A kernel that cannot list one kind of them has no diag module for it, and that is
    /// reported as an error.
    fn list(&mut self, states: fn(Protocol) -> u32) -> Result<Vec<Inet>, CloseError> {
        let mut all = Vec::new();
        for family in Family::BOTH {
            for protocol in Protocol::ALL {
                let question = |sequence| wire::list_sockets(sequence, family, *protocol, states(*protocol));
                self.dump("list sockets (inet_diag)", question, &mut all, |message| {
                    Inet::read(message.payload(), *protocol)
                })?;
            }
        }
        Ok(all)
    }

    /// All that is tracked of TCP and UDP; nothing where the kernel tracks nothing.
    fn flows(&mut self) -> Result<Vec<Flow>, CloseError> {
        self.flows_that(|_| true)
    }

    /// The same, of which only these are kept.
    fn flows_that(&mut self, are_wanted: impl Fn(&Flow) -> bool) -> Result<Vec<Flow>, CloseError> {
        let mut all = Vec::new();
        for family in Family::BOTH {
            let question = |sequence| wire::list_flows(sequence, family);
            let dumped = self.dump("list tracked connections (ctnetlink)", question, &mut all, |message| {
                Flow::read(message.payload()).filter(&are_wanted)
            });
            match dumped {
                // Without connection tracking no translation is remembered.
                Err(CloseError::Kernel { cause: SystemError(Errno::EINVAL | Errno::EOPNOTSUPP), .. }) => {
                    return Ok(Vec::new());
                }
                dumped => dumped?,
            }
        }
        Ok(all)
    }

    fn dump<T>(
        &mut self,
        what: &'static str,
        question: impl Fn(u32) -> Vec<u8>,
        all: &mut Vec<T>,
        read: impl Fn(&netfilter_state::netlink::Message<'_>) -> Option<T>,
    ) -> Result<(), CloseError> {
        let before = all.len();
        until_whole(what, || {
            all.truncate(before);
            let sequence = self.0.next_sequence();
            self.0.ask(&question(sequence), sequence, |message| {
                all.extend(read(message));
                if all.len() > MOST { Err(Errno::EOVERFLOW) } else { Ok(()) }
            })
        })
    }

    /// Has the kernel do something; returns its reason, one of the `expected`, if it did not.
    fn order(
        &mut self,
        what: &'static str,
        expected: &[Errno],
        bytes: impl Fn(u32) -> Vec<u8>,
    ) -> Result<Option<Errno>, CloseError> {
        let sequence = self.0.next_sequence();
        let ended = self.0.ask(&bytes(sequence), sequence, |_| Ok::<(), Errno>(())).map_err(failed(what))?;
        match ended {
            Ended::Whole | Ended::Interrupted => Ok(None),
            Ended::Refused(answer) if expected.contains(&code(&answer)) => Ok(Some(code(&answer))),
            Ended::Refused(answer) => Err(failed(what)(code(&answer))),
        }
    }

    /// Aborts a socket's connection; if not, it is gone, or this kernel cannot.
    fn abort(&mut self, socket: &Inet) -> Result<Option<Errno>, CloseError> {
        let expected = [Errno::ENOENT, Errno::EOPNOTSUPP];
        self.order("abort a connection (SOCK_DESTROY)", &expected, |sequence| wire::abort(sequence, socket))
    }

    /// Makes the kernel forget what it tracks of connections with these ends, whichever opened them; returns how many entries that was.
    fn forget_between(
        &mut self,
        protocol: Protocol,
        ends: &BTreeSet<Ends>,
        flows: &[Flow],
    ) -> Result<usize, CloseError> {
        let is_one = |flow: &&Flow| {
            let Flow { source, destination, .. } = **flow;
            let is_theirs = ends.contains(&(source, destination)) || ends.contains(&(destination, source));
            flow.protocol == protocol && is_theirs
        };
        self.forget_all(flows.iter().filter(is_one))
    }

    /// Makes the kernel forget these; returns how many it still knew.
    fn forget_all<'f>(&mut self, flows: impl IntoIterator<Item = &'f Flow>) -> Result<usize, CloseError> {
        const WHAT: &str = "forget a tracked connection (ctnetlink)";
        let mut forgotten = 0;
        for flow in flows {
            let refused = self.order(WHAT, &[Errno::ENOENT], |sequence| wire::forget(sequence, flow))?;
            forgotten += usize::from(refused.is_none());
        }
        Ok(forgotten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_changes_each_time_it_is_made_is_an_error() {
        let asked = |whole: Option<usize>| {
            let mut times = 0;
            let result = until_whole("list", || {
                times += 1;
                Ok(if whole == Some(times) { Ended::Whole } else { Ended::Interrupted })
            });
            (times, result)
        };
        assert_eq!(asked(Some(1)), (1, Ok(())));
        assert_eq!(asked(Some(DUMP_ATTEMPTS)), (DUMP_ATTEMPTS, Ok(())));
        let interrupted = CloseError::Kernel { what: "list", cause: SystemError(Errno::EINTR) };
        assert_eq!(asked(None), (DUMP_ATTEMPTS, Err(interrupted)));
    }
}
