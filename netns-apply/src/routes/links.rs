//! The interfaces of a network namespace, as far as routing and hooks depend on them.

use super::{LOOPBACK, RouteError, RouteSocket};
use crate::socket::attributes;
use netfilter_state::netlink::Message;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use std::collections::BTreeMap;

/// `RTM_GETLINK`.
const GET_LINK: u16 = 18;
/// Size of `ifinfomsg`.
const HEADER: usize = 16;
/// The interface is up (`IFF_UP`).
const UP: u32 = 1;

/// Attributes of interfaces (`linux/if_link.h`).
mod attribute {
    pub(super) const NAME: u16 = 3;
    pub(super) const MASK: u16 = 29;
    pub(super) const XDP: u16 = 43;
    pub(super) const XDP_ATTACHED: u16 = 2;
    pub(super) const XDP_PROGRAM: u16 = 4;
}

/// Interfaces by their indices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Links(pub(super) BTreeMap<u32, Link>);

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) name: String,
    pub(super) is_up: bool,
    /// The number of the XDP program that sees what it receives; 0 if the kernel does not say which.
    pub(super) xdp: Option<u32>,
}

impl Links {
    /// The name of the interface with this index.
    pub(super) fn name(&self, index: u32) -> Option<&str> {
        self.0.get(&index).map(|link| &*link.name)
    }

    pub(super) fn loopback_is_up(&self) -> bool {
        self.0.get(&LOOPBACK).is_some_and(|link| link.is_up)
    }
}

impl RouteSocket {
    /// The interfaces of the namespace.
    pub(crate) fn links(&mut self) -> Result<Links, RouteError> {
        let ask = |socket: &mut Self| socket.question(GET_LINK, NLM_F_REQUEST | NLM_F_DUMP, &request());
        let take = |links: &mut Links, message: &Message<'_>| {
            links.0.extend(link(message.payload()));
            Ok(())
        };
        Ok(self.gather(ask, "list interfaces", take)?.0)
    }
}

/// All interfaces, without what IPv6 has counted there: that is much of the answer.
fn request() -> Vec<u8> {
    /// `RTEXT_FILTER_SKIP_STATS`.
    const WITHOUT_COUNTERS: u32 = 8;
    let mut payload = vec![0; HEADER];
    payload.extend(8_u16.to_ne_bytes());
    payload.extend(attribute::MASK.to_ne_bytes());
    payload.extend(WITHOUT_COUNTERS.to_ne_bytes());
    payload
}

/// An interface with its index, as a message has it.
fn link(payload: &[u8]) -> Option<(u32, Link)> {
    let index = number(payload, 4)?;
    let mut link = Link { is_up: number(payload, 8)? & UP != 0, ..Link::default() };
    for one in attributes(payload.get(HEADER..)?) {
        match one.kind() {
            attribute::NAME => link.name = text(one.value()),
            attribute::XDP => link.xdp = xdp(one.value()),
            _ => {}
        }
    }
    Some((index, link))
}

/// The number of the program that is attached, if one is.
fn xdp(nested: &[u8]) -> Option<u32> {
    let value = |kind| attributes(nested).find(|one| one.kind() == kind);
    let mode = value(attribute::XDP_ATTACHED).and_then(|mode| mode.value().first().copied())?;
    let program = value(attribute::XDP_PROGRAM).and_then(|id| number(id.value(), 0)).unwrap_or_default();
    (mode != 0).then_some(program)
}

/// The number in the machine's order that stands at an offset.
pub(super) fn number(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

/// A text, up to its NUL.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface as Linux 6.18 lists it, its attributes cut down to these.
    fn message(attributes: &[&[u8]]) -> Vec<u8> {
        let header: [u8; HEADER] = [0, 0, 1, 0, 3, 0, 0, 0, 3, 0x10, 0, 0, 0, 0, 0, 0];
        let name = [9, 0, 3, 0, b'e', b't', b'h', b'0', 0, 0, 0, 0];
        [&header[..], &name, &attributes.concat()].concat()
    }

    #[test]
    fn an_xdp_program_is_seen_and_none_is_none() {
        let attached =
            [28, 0, 43, 0, 8, 0, 6, 0, 97, 0, 0, 0, 5, 0, 2, 0, 2, 0, 0, 0, 8, 0, 4, 0, 97, 0, 0, 0];
        let none = [12, 0, 43, 0, 5, 0, 2, 0, 0, 0, 0, 0];
        // Several at once have numbers of their own.
        let several = [12, 0, 43, 0, 5, 0, 2, 0, 4, 0, 0, 0];
        for (xdp, wanted) in [(&attached[..], Some(97)), (&none, None), (&several, Some(0)), (&[], None)] {
            let (index, link) = link(&message(&[xdp])).unwrap();
            assert_eq!((index, &*link.name, link.is_up, link.xdp), (3, "eth0", true, wanted));
        }
    }

    #[test]
    fn any_bytes_can_be_read() {
        let whole = message(&[&[
            28, 0, 43, 0, 8, 0, 6, 0, 97, 0, 0, 0, 5, 0, 2, 0, 2, 0, 0, 0, 8, 0, 4, 0, 97, 0, 0, 0,
        ]]);
        for end in 0..whole.len() {
            let _ = link(&whole[..end]);
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            let _ = link(&damaged);
        }
    }
}
