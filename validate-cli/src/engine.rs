//! One round: every probe at once, and what was seen of each. Driven by events; it ends when all is seen.

use crate::{
    sockets::{Arrival, Incoming, ProbeSocket, StandIn, TOKEN, Token},
    stop::{self, Interrupted, Stop},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags},
};
use redirect_core::rule::Protocol;
use std::{
    fs::File,
    io::{self, Read},
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    time::{Duration, Instant},
};

/// How long a packet that is expected to vanish is watched after everything else was seen. Packets over `lo` are
/// delivered in the order they were sent, so it would have arrived by then.
const WATCH: Duration = Duration::from_millis(2);

/// A round's time is counted in turns: what happens in one takes no more than this off it. So a machine that stood still, or
/// that has other things to do, is not a pod that does not answer.
const TURN: Duration = Duration::from_millis(20);

/// A connection attempt or a datagram.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProbeSpec {
    pub(crate) protocol: Protocol,
    pub(crate) source: Option<IpAddr>,
    pub(crate) destination: SocketAddr,
    /// Whether it should vanish; the run does not wait for it then.
    pub(crate) vanishes: bool,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbeObservation {
    /// It arrived at this stand-in, which received this original destination.
    Arrived { at: SocketAddr, original: Option<SocketAddr> },
    /// Nothing listens where it arrived.
    Refused,
    /// It was not even sent.
    NotSent(Errno),
    /// The network said it cannot be delivered.
    Undelivered(Errno),
    /// Another program took the connection.
    Stranger,
    /// Nothing.
    Silent,
}

/// Random bytes of the kernel.
pub(crate) struct Tokens(File);

impl Tokens {
    pub(crate) fn open() -> io::Result<Self> {
        File::open("/dev/urandom").map(Self)
    }

    fn next(&mut self) -> io::Result<Token> {
        let mut bytes = [0; TOKEN / 2];
        self.0.read_exact(&mut bytes)?;
        let mut token = [0; TOKEN];
        token.copy_from_slice(format!("{:032x}", u128::from_be_bytes(bytes)).as_bytes());
        Ok(token)
    }
}

/// Sends every shot and watches until all are seen, or nothing comes for the rest of `limit`.
pub(crate) fn round(
    shots: &[ProbeSpec],
    stand_ins: &[StandIn],
    limit: Duration,
    tokens: &mut Tokens,
    stop: Option<&Stop>,
) -> Result<Vec<ProbeObservation>, Interrupted> {
    let mut round = Round { stand_ins, flying: Vec::new(), incoming: Vec::new(), exhausted: None };
    for shot in shots {
        round.flying.push(PendingProbe::start(*shot, tokens));
    }
    let mut left = limit;
    let mut watch = None;
    while !left.is_zero() {
        if round.exhausted.is_some() {
            break;
        }
        if round.waits_for_nothing() {
            let all = round.flying.iter().all(|flying| flying.seen.is_some());
            let until = *watch.get_or_insert_with(|| Instant::now() + WATCH);
            if all || Instant::now() >= until {
                break;
            }
        }
        let begun = Instant::now();
        let turn = watch.map_or(left, |watch: Instant| watch.saturating_duration_since(begun)).min(TURN);
        if round.wait(turn, stop)? {
            round.step();
        }
        left = left.saturating_sub(begun.elapsed().min(TURN));
    }
    let exhausted = round.exhausted;
    let verdict = |flying: PendingProbe| match (flying.seen, exhausted) {
        // What became of it could not be checked.
        (None, Some(error)) => ProbeObservation::NotSent(error),
        (_, _) => flying.verdict(),
    };
    Ok(round.flying.into_iter().map(verdict).collect())
}

struct Round<'a> {
    stand_ins: &'a [StandIn],
    flying: Vec<PendingProbe>,
    incoming: Vec<Incoming>,
    /// Why a connection that came in could not be taken, if one could not.
    exhausted: Option<Errno>,
}

impl Round<'_> {
    fn waits_for_nothing(&self) -> bool {
        self.flying.iter().all(|flying| flying.seen.is_some() || flying.shot.vanishes)
    }

    /// Waits for something to happen; false when time is up.
    fn wait(&self, time: Duration, stop: Option<&Stop>) -> Result<bool, Interrupted> {
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        fds.extend(self.stand_ins.iter().map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.incoming.iter().filter_map(|incoming| match incoming {
            Incoming::Partial(stream, _) => Some(PollFd::new(stream.as_fd(), PollFlags::POLLIN)),
            Incoming::Whole(_) => None,
        }));
        fds.extend(self.flying.iter().filter_map(PendingProbe::awaits));
        stop::wait(fds, time, stop)
    }

    /// Does whatever can be done without waiting.
    fn step(&mut self) {
        for flying in &mut self.flying {
            flying.step();
        }
        for stand_in in self.stand_ins {
            loop {
                match stand_in.next() {
                    Ok(Some(incoming)) => self.incoming.push(incoming),
                    Ok(None) => break,
                    Err(error) => {
                        self.exhausted = Some(error);
                        break;
                    }
                }
            }
        }
        let waiting = std::mem::take(&mut self.incoming);
        for incoming in waiting.into_iter().filter_map(Incoming::read) {
            match incoming {
                Incoming::Whole(arrival) => self.arrived(&arrival),
                Incoming::Partial(..) => self.incoming.push(incoming),
            }
        }
    }

    /// Only the flight that knows the token and left from this very address and port has arrived.
    fn arrived(&mut self, arrival: &Arrival) {
        let says = |token: &Token| arrival.token.windows(TOKEN).any(|window| window == token);
        let flight = self.flying.iter_mut().find(|flying| {
            says(&flying.token) && flying.flight.as_ref().is_some_and(|flight| flight.local == arrival.peer)
        });
        if let Some(flying) = flight {
            flying.seen = Some(ProbeObservation::Arrived { at: arrival.at, original: arrival.original });
        }
    }
}

/// A shot on its way.
struct PendingProbe {
    shot: ProbeSpec,
    token: Token,
    flight: Option<ProbeSocket>,
    sent: bool,
    seen: Option<ProbeObservation>,
}

impl PendingProbe {
    fn start(shot: ProbeSpec, tokens: &mut Tokens) -> Self {
        let mut flying = Self { shot, token: [0; TOKEN], flight: None, sent: false, seen: None };
        match tokens.next() {
            Ok(token) => flying.token = token,
            Err(_) => flying.seen = Some(ProbeObservation::NotSent(Errno::EIO)),
        }
        if flying.seen.is_none() {
            match ProbeSocket::start(shot.protocol, shot.source, shot.destination) {
                Ok(flight) => flying.flight = Some(flight),
                Err(Errno::ECONNREFUSED) => flying.seen = Some(ProbeObservation::Refused),
                Err(error) => flying.seen = Some(ProbeObservation::NotSent(error)),
            }
        }
        if shot.protocol == Protocol::Udp {
            flying.send();
        }
        flying
    }

    fn awaits(&self) -> Option<PollFd<'_>> {
        let flight = self.flight.as_ref().filter(|_| self.seen.is_none())?;
        // A TCP connection is writable when made; then only its end, or a datagram's refusal, is news.
        let events = if self.sent { PollFlags::empty() } else { PollFlags::POLLOUT };
        // Once the token is sent, a hang-up means nothing new: the stand-in reports the result.
        (!self.sent || self.shot.protocol == Protocol::Udp).then(|| PollFd::new(flight.as_fd(), events))
    }

    fn step(&mut self) {
        if self.seen.is_some() {
            return;
        }
        let Some(flight) = &self.flight else { return };
        if self.sent && self.shot.protocol == Protocol::Tcp {
            return;
        }
        match flight.connected() {
            Ok(()) if !self.sent => self.send(),
            Ok(()) => {}
            Err(Errno::ECONNREFUSED) => self.seen = Some(ProbeObservation::Refused),
            Err(error) => self.seen = Some(ProbeObservation::Undelivered(error)),
        }
    }

    fn send(&mut self) {
        let Some(flight) = &self.flight else { return };
        let sent = match self.shot.protocol {
            Protocol::Tcp => flight.send(&self.token),
            Protocol::Udp => flight.send(&dns_query(&self.token)),
        };
        match sent {
            Ok(()) => self.sent = true,
            // Not connected yet.
            Err(Errno::EAGAIN | Errno::ENOTCONN) => {}
            Err(Errno::ECONNREFUSED) => self.seen = Some(ProbeObservation::Refused),
            Err(error) => self.seen = Some(ProbeObservation::Undelivered(error)),
        }
    }

    fn verdict(self) -> ProbeObservation {
        match self.seen {
            Some(seen) => seen,
            // It was taken, but not by a stand-in with the token.
            None if self.sent && self.shot.protocol == Protocol::Tcp => ProbeObservation::Stranger,
            None => ProbeObservation::Silent,
        }
    }
}

/// A well-formed question for the address of `TOKEN.invalid`: a real name server that gets it knows what to do.
fn dns_query(token: &Token) -> Vec<u8> {
    let [first, second, ..] = *token;
    // Identifier, recursion desired, one question.
    let mut query = vec![first, second, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, TOKEN as u8];
    query.extend_from_slice(token);
    query.extend_from_slice(b"\x07invalid\x00");
    // Type A, class IN.
    query.extend_from_slice(&[0, 1, 0, 1]);
    query
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a panic is how a test fails
    use super::*;

    fn tcp(destination: SocketAddr) -> ProbeSpec {
        ProbeSpec { protocol: Protocol::Tcp, source: None, destination, vanishes: false }
    }

    fn listen(protocol: Protocol) -> StandIn {
        StandIn::listen(protocol, "127.0.0.1:0".parse().unwrap()).unwrap()
    }

    fn send_probe(shots: &[ProbeSpec], stand_ins: &[StandIn]) -> Vec<ProbeObservation> {
        round(shots, stand_ins, Duration::from_millis(200), &mut Tokens::open().unwrap(), None).unwrap()
    }

    #[test]
    fn every_probe_is_recognised_by_its_token() {
        let stand_ins = [listen(Protocol::Tcp), listen(Protocol::Udp)];
        let [at, udp] = [stand_ins[0].address().unwrap(), stand_ins[1].address().unwrap()];
        let seen =
            send_probe(&[tcp(at), tcp(at), ProbeSpec { protocol: Protocol::Udp, ..tcp(udp) }], &stand_ins);
        for (seen, want) in seen.iter().zip([at, at, udp]) {
            assert!(matches!(seen, ProbeObservation::Arrived { at, .. } if *at == want), "{seen:?}");
        }
    }

    #[test]
    fn a_stranger_proves_nothing() {
        let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let free = listen(Protocol::Tcp).address().unwrap();
        let seen = send_probe(&[tcp(stranger.local_addr().unwrap()), tcp(free)], &[]);
        assert_eq!(seen, [ProbeObservation::Stranger, ProbeObservation::Refused]);
    }

    #[test]
    fn a_strangers_connection_does_not_disturb() {
        let stand_in = [listen(Protocol::Tcp)];
        let at = stand_in[0].address().unwrap();
        let mut stranger = std::net::TcpStream::connect(at).unwrap();
        io::Write::write_all(&mut stranger, &[b'0'; TOKEN]).unwrap();
        let silent = std::net::TcpStream::connect(at).unwrap();
        // One probe that arrives, and one that does not although a stranger did.
        let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let seen = send_probe(&[tcp(elsewhere.local_addr().unwrap()), tcp(at)], &stand_in);
        assert!(
            matches!(seen[..], [ProbeObservation::Stranger, ProbeObservation::Arrived { .. }]),
            "{seen:?}"
        );
        drop(silent);
    }
}
