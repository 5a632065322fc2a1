//! TCP segments made by hand, and everything that comes back: a peer that keeps to no protocol.
//!
//! A [`Wire`] is one end of a veth pair. Its segments come from unused addresses, so that no kernel answers what a test
//! wants to answer itself.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recv, sendto, setsockopt,
    socket, sockopt,
};

use crate::traffic::ANSWER;
use test_support::netns::Namespace;
use test_support::process::Patience;

/// FIN, by its place in a segment (RFC 9293, section 3.1).
pub const FIN: u8 = 0x01;
/// SYN.
pub const SYN: u8 = 0x02;
/// RST.
pub const RST: u8 = 0x04;
/// ACK.
pub const ACK: u8 = 0x10;

/// One TCP segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it comes from.
    pub source: SocketAddr,
    /// Where it goes.
    pub destination: SocketAddr,
    /// Its sequence number.
    pub sequence: u32,
    /// Its acknowledgement number.
    pub acknowledged: u32,
    /// Its eight flags.
    pub flags: u8,
    /// What it carries.
    pub payload: Vec<u8>,
}

/// How a segment is sent, where it is not in the usual way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// TCP options; a multiple of four bytes, at most 40.
    pub options: Vec<u8>,
    /// Cut into two fragments, at this byte of the TCP header and what follows it: a multiple of eight.
    pub cut: Option<usize>,
    /// Padding without meaning: in an option of IPv4's header, or in an extension header of IPv6 of this number.
    pub padding: Option<u8>,
    /// With a wrong checksum.
    pub is_damaged: bool,
}

/// What stands behind an IP header and any fragment header: the number of its protocol, and its bytes.
type Inner = (u8, Vec<u8>);

/// Hop-by-hop options and destination options of IPv6 (RFC 8200), the extension headers that may hold nothing but padding.
pub const PADDED: [u8; 2] = [0, 60];

impl Segment {
    /// The packets that carry it; fragments have this identification.
    fn packets(&self, delivery: &Delivery, identification: u16) -> Result<Vec<Vec<u8>>> {
        let tcp = self.tcp(delivery)?;
        let is_v6 = self.source.is_ipv6();
        let inner: Inner = match delivery.padding.filter(|_| is_v6) {
            Some(number) => (number, [[6, 0, 1, 4, 0, 0, 0, 0].as_slice(), &tcp].concat()),
            None => (6, tcp),
        };
        let Some(cut) = delivery.cut.filter(|cut| *cut > 0 && *cut < inner.1.len()) else {
            return Ok(vec![self.around(&inner, delivery, None)?]);
        };
        let (number, bytes) = inner;
        let (first, last) = bytes.split_at(cut);
        let place = u16::try_from(cut)?;
        [(first, 0, true), (last, place, false)]
            .into_iter()
            .map(|(part, place, more)| {
                let fragment = Fragment { place, more, identification };
                self.around(&(number, part.to_vec()), delivery, Some(fragment))
            })
            .collect()
    }

    /// With headers around it.
    fn around(
        &self,
        (number, bytes): &Inner,
        delivery: &Delivery,
        fragment: Option<Fragment>,
    ) -> Result<Vec<u8>> {
        let mut packet = Vec::new();
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                // One option: no operation, four times.
                let options: &[u8] = if delivery.padding.is_some() { &[1; 4] } else { &[] };
                let header = 20 + options.len();
                packet.extend([0x40 | u8::try_from(header / 4)?, 0]);
                packet.extend(u16::try_from(header + bytes.len())?.to_be_bytes());
                packet.extend(fragment.map_or([0; 4], Fragment::v4));
                // A TTL; the kernel puts the checksum in.
                packet.extend([64, *number, 0, 0]);
                packet.extend(from.octets());
                packet.extend(to.octets());
                packet.extend(options);
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let header = fragment.map(|fragment| fragment.v6(*number));
                let header = header.as_ref().map_or([].as_slice(), |header| header.as_slice());
                packet.extend([0x60, 0, 0, 0]);
                packet.extend(u16::try_from(header.len() + bytes.len())?.to_be_bytes());
                packet.extend([if fragment.is_some() { FRAGMENT } else { *number }, 64]);
                packet.extend(from.octets());
                packet.extend(to.octets());
                packet.extend(header);
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => {
                anyhow::bail!("from {} to {}", self.source, self.destination)
            }
        }
        packet.extend(bytes);
        Ok(packet)
    }

    fn tcp(&self, delivery: &Delivery) -> Result<Vec<u8>> {
        let mut tcp = Vec::new();
        tcp.extend(self.source.port().to_be_bytes());
        tcp.extend(self.destination.port().to_be_bytes());
        tcp.extend(self.sequence.to_be_bytes());
        tcp.extend(self.acknowledged.to_be_bytes());
        tcp.extend([u8::try_from(5 + delivery.options.len() / 4)? << 4, self.flags]);
        tcp.extend(65_535_u16.to_be_bytes());
        // The checksum's place, and no urgent data.
        tcp.extend([0; 4]);
        tcp.extend(&delivery.options);
        tcp.extend(&self.payload);
        let sum = self.checksum(&tcp)?.wrapping_add(u16::from(delivery.is_damaged)).to_be_bytes();
        tcp[16..18].copy_from_slice(&sum);
        Ok(tcp)
    }

    /// RFC 9293, section 3.1: over addresses, protocol and length too.
    fn checksum(&self, tcp: &[u8]) -> Result<u16> {
        let mut bytes = Vec::new();
        for address in [self.source.ip(), self.destination.ip()] {
            match address {
                IpAddr::V4(address) => bytes.extend(address.octets()),
                IpAddr::V6(address) => bytes.extend(address.octets()),
            }
        }
        bytes.extend([0, 6]);
        bytes.extend(u16::try_from(tcp.len())?.to_be_bytes());
        bytes.extend(tcp);
        let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        let mut sum: u32 = bytes.chunks(2).map(word).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        Ok(!u16::try_from(sum)?)
    }

    /// Reads a packet from its IP header on; `None` for anything but a TCP segment.
    fn read(packet: &[u8]) -> Option<Self> {
        let address = |from: usize, length: usize| -> Option<IpAddr> {
            let bytes = packet.get(from..from + length)?;
            match length {
                4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
                _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
            }
        };
        let (header, protocol, end, source, destination) = match packet.first()? >> 4 {
            4 => {
                let length = u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]);
                let header = usize::from(packet[0] & 0xf) * 4;
                (header, *packet.get(9)?, usize::from(length), address(12, 4)?, address(16, 4)?)
            }
            6 => {
                let length = u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?]);
                (40, *packet.get(6)?, 40 + usize::from(length), address(8, 16)?, address(24, 16)?)
            }
            _ => return None,
        };
        let tcp = packet.get(header..end).filter(|_| protocol == 6)?;
        let number = |at: usize| tcp.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let port = |at: usize| tcp.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes);
        Some(Self {
            source: SocketAddr::new(source, port(0)?),
            destination: SocketAddr::new(destination, port(2)?),
            sequence: number(4)?,
            acknowledged: number(8)?,
            flags: *tcp.get(13)?,
            payload: tcp.get(usize::from(tcp.get(12)? >> 4) * 4..)?.to_vec(),
        })
    }
}

/// The number of IPv6's fragment header.
const FRAGMENT: u8 = 44;

/// A part of a packet.
#[derive(Clone, Copy)]
struct Fragment {
    /// Where it belongs, in bytes.
    place: u16,
    /// Whether others follow.
    more: bool,
    identification: u16,
}

impl Fragment {
    /// Identification, flags and offset of IPv4's header (RFC 791).
    fn v4(self) -> [u8; 4] {
        let [high, low] = self.identification.to_be_bytes();
        let [flags, offset] = ((u16::from(self.more) << 13) | (self.place / 8)).to_be_bytes();
        [high, low, flags, offset]
    }

    /// The fragment header of IPv6 (RFC 8200), before something of this number.
    fn v6(self, number: u8) -> [u8; 8] {
        let [high, low] = self.identification.to_be_bytes();
        let [offset, flags] = (self.place | u16::from(self.more)).to_be_bytes();
        [number, 0, offset, flags, 0, 0, high, low]
    }
}

/// One end of a link: sends packets with any header, and sees all that pass.
#[derive(Debug)]
pub struct Wire {
    out: OwnedFd,
    seen: OwnedFd,
}

impl Wire {
    /// The wire of a namespace, for one address family.
    pub fn open(namespace: &Namespace, v6: bool) -> Result<Self> {
        let family = if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        namespace.enter(|| {
            let out = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Raw)?;
            // Packets without the header of the link.
            let seen = socket(
                AddressFamily::Packet,
                SockType::Datagram,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::EthAll,
            )?;
            setsockopt(&seen, sockopt::RcvBufForce, &(64 << 20))?;
            Ok(Self { out, seen })
        })?
    }

    /// Sends a segment.
    pub fn send(&self, segment: &Segment) -> Result<()> {
        self.send_as(segment, &Delivery::default(), 0, false)
    }

    /// Sends a segment in an unusual way; its fragments, where it has any, in this order, with this identification.
    pub fn send_as(
        &self,
        segment: &Segment,
        delivery: &Delivery,
        identification: u16,
        backwards: bool,
    ) -> Result<()> {
        let to = SockaddrStorage::from(SocketAddr::new(segment.destination.ip(), 0));
        let mut packets = segment.packets(delivery, identification)?;
        if backwards {
            packets.reverse();
        }
        for packet in packets {
            sendto(self.out.as_raw_fd(), &packet, &to, MsgFlags::empty())
                .with_context(|| format!("cannot send {segment:?}, {delivery:?}"))?;
        }
        Ok(())
    }

    /// Waits for a segment that `wanted` finds something in; passes over the others.
    pub fn wait_for<T>(&self, what: &str, mut wanted: impl FnMut(&Segment) -> Option<T>) -> Result<T> {
        let mut patience = Patience::new(ANSWER);
        loop {
            patience.wait_for(&self.seen, PollFlags::POLLIN).with_context(|| format!("no {what}"))?;
            if let Some(found) = self.next()?.as_ref().and_then(&mut wanted) {
                return Ok(found);
            }
        }
    }

    /// Passes over everything that has been seen so far.
    pub fn forget(&self) -> Result<Vec<Segment>> {
        let mut passed = Vec::new();
        loop {
            let mut buffer = [0; 65_536];
            match recv(self.seen.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(length) => passed.extend(Segment::read(&buffer[..length])),
                Err(nix::errno::Errno::EAGAIN) => return Ok(passed),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// What has been seen since the last call, as soon as anything was, or at the timeout.
    pub fn seen_within(&self, time: Duration) -> Result<Vec<Segment>> {
        let time = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.seen.as_fd(), PollFlags::POLLIN)], time) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => self.forget(),
            Err(error) => Err(error.into()),
        }
    }

    fn next(&self) -> Result<Option<Segment>> {
        let mut buffer = [0; 65_536];
        let length = recv(self.seen.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        Ok(Segment::read(&buffer[..length]))
    }
}

/// One end of a connection, played by hand.
#[derive(Debug)]
pub struct Peer<'a> {
    wire: &'a Wire,
    /// Our address.
    pub source: SocketAddr,
    /// The other side's address.
    pub destination: SocketAddr,
    /// What we send next.
    pub sequence: u32,
    /// What we expect next.
    pub expected: u32,
}

impl<'a> Peer<'a> {
    /// Nothing sent yet.
    pub const fn new(wire: &'a Wire, source: SocketAddr, destination: SocketAddr, sequence: u32) -> Self {
        Self { wire, source, destination, sequence, expected: 0 }
    }

    /// Sends a segment with these flags.
    pub fn send(&self, flags: u8) -> Result<()> {
        self.send_with(flags, b"")
    }

    fn send_with(&self, flags: u8, payload: &[u8]) -> Result<()> {
        self.wire.send(&Segment {
            source: self.source,
            destination: self.destination,
            sequence: self.sequence,
            acknowledged: if flags & ACK == 0 { 0 } else { self.expected },
            flags,
            payload: payload.to_vec(),
        })
    }

    /// Sends a SYN and waits until it is answered.
    pub fn open(&mut self) -> Result<()> {
        self.send(SYN)?;
        self.answered()
    }

    /// Waits for the answer to a SYN that was sent.
    pub fn answered(&mut self) -> Result<()> {
        let answer = self.wait_for("SYN-ACK", |segment| segment.flags & SYN != 0)?;
        self.take_answer(&answer)
    }

    /// Takes in the answer to a SYN.
    pub fn take_answer(&mut self, answer: &Segment) -> Result<()> {
        ensure!(answer.flags & (SYN | ACK | RST) == SYN | ACK, "{answer:?} is not an answer");
        self.sequence = self.sequence.wrapping_add(1);
        self.expected = answer.sequence.wrapping_add(1);
        Ok(())
    }

    /// Whether a segment answers this one's SYN, and agrees.
    pub fn is_answer(&self, segment: &Segment) -> bool {
        self.is_mine(segment)
            && segment.flags & (SYN | ACK | RST) == SYN | ACK
            && segment.acknowledged == self.sequence.wrapping_add(1)
    }

    /// Connects by hand to a port that is not captured, where a server of this name greets: then all that was sent before has been dealt with. Returns
    /// what came until then.
    pub fn settle(mut self, server: &str) -> Result<Vec<Segment>> {
        self.send(SYN)?;
        let mut seen = Vec::new();
        let answer = self.wire.wait_for("answer of the port that is not captured", |segment| {
            seen.push(segment.clone());
            self.is_answer(segment).then(|| segment.clone())
        })?;
        self.take_answer(&answer)?;
        let greeting = self.greeted()?;
        ensure!(greeting.contains(server), "the port that is not captured is answered by {greeting}");
        self.send(RST)?;
        Ok(seen)
    }

    /// Acknowledges, waits for what the server says first, and acknowledges that.
    pub fn greeted(&mut self) -> Result<String> {
        self.send(ACK)?;
        let greeting = self.wait_for("greeting", |segment| !segment.payload.is_empty())?;
        self.expected = greeting.sequence.wrapping_add(u32::try_from(greeting.payload.len())?);
        self.send(ACK)?;
        Ok(String::from_utf8_lossy(&greeting.payload).into_owned())
    }

    /// Sends something.
    pub fn say(&mut self, payload: &[u8]) -> Result<()> {
        self.send_with(ACK, payload)?;
        self.sequence = self.sequence.wrapping_add(u32::try_from(payload.len())?);
        Ok(())
    }

    /// Sends something, or nothing, with a FIN.
    pub fn say_and_finish(&mut self, payload: &[u8]) -> Result<()> {
        self.send_with(FIN | ACK, payload)?;
        self.sequence = self.sequence.wrapping_add(u32::try_from(payload.len())? + 1);
        Ok(())
    }

    /// Waits until all that was sent is acknowledged.
    pub fn acknowledged(&self) -> Result<()> {
        self.wait_for("acknowledgement", |segment| segment.acknowledged == self.sequence).map(drop)
    }

    /// Waits for a segment of the other side with one of these flags, and takes in a FIN.
    pub fn wait_for_flags(&mut self, flags: u8) -> Result<()> {
        let found = self.wait_for("flags", |segment| segment.flags & flags != 0)?;
        let length = u32::try_from(found.payload.len())? + u32::from(found.flags & FIN != 0);
        self.expected = found.sequence.wrapping_add(length);
        Ok(())
    }

    fn wait_for(&self, what: &str, wanted: impl Fn(&Segment) -> bool) -> Result<Segment> {
        let mine = |segment: &Segment| (self.is_mine(segment) && wanted(segment)).then(|| segment.clone());
        self.wire.wait_for(&format!("{what} for {} from {}", self.source, self.destination), mine)
    }

    fn is_mine(&self, segment: &Segment) -> bool {
        (segment.source, segment.destination) == (self.destination, self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_read_back() {
        for (source, destination) in
            [("192.0.2.1:80", "10.1.0.2:8080"), ("[2001:db8::1]:80", "[fd00::2]:8080")]
        {
            let segment = Segment {
                source: source.parse().expect("an address"),
                destination: destination.parse().expect("an address"),
                sequence: 7,
                acknowledged: u32::MAX,
                flags: SYN | ACK,
                payload: b"odd".to_vec(),
            };
            assert_eq!(
                Segment::read(&segment.packets(&Delivery::default(), 0).expect("a packet")[0]),
                Some(segment)
            );
        }
    }
}
