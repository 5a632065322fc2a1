//! The interfaces of a network namespace and their addresses, as far as routing, hooks and packets depend on them.

use super::{LOOPBACK, ListRequest, RouteError, RouteSocket, found};
use crate::socket::{attributes, number_attribute};
use netfilter_state::{
    netlink::Message,
    routing::{FoundRouting, RoutingItem},
};
use redirect_core::Family;
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// `RTM_GETLINK`.
const GET_LINK: u16 = 18;
/// Size of `ifinfomsg`.
const HEADER: usize = 16;
/// The interface is up, is loopback, is a tunnel (`IFF_UP`, `IFF_LOOPBACK`, `IFF_POINTOPOINT`).
const UP: u32 = 1;
const IS_LOOPBACK: u32 = 1 << 3;
const POINT_TO_POINT: u32 = 1 << 4;

/// `RTM_GETADDR`.
const GET_ADDRESS: u16 = 22;
/// Size of `ifaddrmsg`.
const ADDRESS_HEADER: usize = 8;

/// No process may use an address yet, or the kernel uses it all the same (`IFA_F_TENTATIVE`, `IFA_F_OPTIMISTIC`).
const TENTATIVE: u8 = 0x40;
const OPTIMISTIC: u8 = 0x04;

/// Attributes of interfaces (`linux/if_link.h`), and of their addresses (`linux/if_addr.h`).
mod attribute {
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const LOCAL_ADDRESS: u16 = 2;
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
    is_loopback: bool,
    is_tunnel: bool,
    /// The number of the XDP program that sees what it receives; 0 if the kernel does not say which.
    pub(super) xdp: Option<u32>,
}

/// The addresses of a namespace, and how it reaches others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Addresses {
    /// All of them.
    pub(crate) all: Vec<IpAddr>,
    /// Those in use, each with its interface, in the kernel's order.
    pub(crate) by_interface: Vec<(String, IpAddr)>,
    /// The interfaces through which it may reach other hosts.
    pub(crate) interfaces: Vec<String>,
}

/// An address of an interface.
pub(crate) struct Assigned {
    index: u32,
    address: IpAddr,
    is_tentative: bool,
    /// What it is to the mesh.
    pub(super) of_mesh: Option<FoundRouting>,
}

impl Links {
    /// The name of the interface with this index.
    pub(super) fn name(&self, index: u32) -> Option<&str> {
        self.0.get(&index).map(|link| &*link.name)
    }

    /// The index of the interface with this name.
    pub(super) fn index(&self, name: &str) -> Option<u32> {
        self.0.iter().find(|(_, link)| link.name == name).map(|(index, _)| *index)
    }

    pub(super) fn loopback_is_up(&self) -> bool {
        self.0.get(&LOOPBACK).is_some_and(|link| link.is_up)
    }

    /// The interfaces through which a namespace may reach other hosts, as [`RouteSocket::interfaces`] has them: what
    /// leaves by a tunnel is wrapped in other packets, which no rule about it meets again, and an interface without an address sends
    /// with that of another.
    fn to_others(&self, addresses: &[Assigned]) -> Vec<String> {
        let is_usual =
            |index: &u32, link: &Link| !link.is_tunnel && addresses.iter().any(|one| one.index == *index);
        let mut links: Vec<_> = self.0.iter().filter(|(_, link)| link.is_up && !link.is_loopback).collect();
        links.sort_by_key(|(index, link)| !is_usual(index, link));
        links.into_iter().map(|(_, link)| link.name.clone()).collect()
    }

    /// These addresses of the namespace, and how it reaches others.
    pub(super) fn addresses(&self, all: &[Assigned]) -> Addresses {
        let usable = all.iter().filter(|one| !one.is_tentative);
        let named = usable.filter_map(|one| Some((self.name(one.index)?.to_owned(), one.address)));
        let (by_interface, interfaces) = (named.collect(), self.to_others(all));
        Addresses { all: all.iter().map(|one| one.address).collect(), by_interface, interfaces }
    }
}

impl RouteSocket {
    /// The interfaces through which its network namespace may talk to others: all that are up but loopback, those first that
    /// have an address and are not point to point, as tunnels are.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn interfaces(&mut self) -> Result<Vec<String>, RouteError> {
        Ok(self.addresses_and_interfaces()?.interfaces)
    }

    /// The interfaces of the namespace.
    pub(crate) fn links(&mut self) -> Result<Links, RouteError> {
        let read = |message: &Message<'_>| link(message.payload());
        Ok(Links(self.list_links(read)?.into_iter().collect()))
    }

    /// What is found in the messages about interfaces, in the kernel's order.
    fn list_links<T>(&mut self, find: impl Fn(&Message<'_>) -> Option<T>) -> Result<Vec<T>, RouteError> {
        self.kept(&link_request(), "list interfaces", |_| true, find)
    }

    /// The addresses of the namespace, interface by interface in the kernel's order, which is that of their numbers in newer kernels alone; of one interface as the kernel lists
    /// them, IPv4 first.
    pub(crate) fn addresses_by_interface(&mut self) -> Result<Vec<IpAddr>, RouteError> {
        let indices = self.list_links(|message| number(message.payload(), 4))?;
        let places: BTreeMap<u32, usize> = indices.into_iter().zip(0..).collect();
        let mut all = self.assigned()?;
        // An interface that came after the list was made is the last one.
        all.sort_by_key(|one| places.get(&one.index).copied().unwrap_or(usize::MAX));
        Ok(all.into_iter().map(|one| one.address).collect())
    }

    /// The addresses of the namespace, and the interfaces through which it reaches other hosts.
    pub(crate) fn addresses_and_interfaces(&mut self) -> Result<Addresses, RouteError> {
        Ok(self.links()?.addresses(&self.assigned()?))
    }

    /// The addresses of the namespace. No privilege is needed.
    ///
    /// # Errors
    /// The kernel does not report them, or they exceed what is kept.
    pub fn addresses(&mut self) -> Result<Vec<IpAddr>, RouteError> {
        Ok(self.assigned()?.into_iter().map(|one| one.address).collect())
    }

    pub(crate) fn assigned(&mut self) -> Result<Vec<Assigned>, RouteError> {
        self.kept(&address_request(0), "list addresses", |_| true, |message| address(message.payload()))
    }
}

/// The addresses of the family of this number, or of all.
pub(super) fn address_request(family: u8) -> ListRequest {
    ListRequest::of(GET_ADDRESS, family, ADDRESS_HEADER)
}

/// All interfaces, without what IPv6 has counted there: that is much of the answer.
fn link_request() -> ListRequest {
    /// `RTEXT_FILTER_SKIP_STATS`.
    const WITHOUT_COUNTERS: u32 = 8;
    let mut request = ListRequest::of(GET_LINK, 0, HEADER);
    request.payload.extend(number_attribute(attribute::MASK, WITHOUT_COUNTERS));
    request
}

/// An interface with its index, as a message has it.
fn link(payload: &[u8]) -> Option<(u32, Link)> {
    let index = number(payload, 4)?;
    let is = |flag| number(payload, 8).is_some_and(|flags| flags & flag != 0);
    let (is_up, is_loopback, is_tunnel) = (is(UP), is(IS_LOOPBACK), is(POINT_TO_POINT));
    let mut link = Link { is_up, is_loopback, is_tunnel, ..Link::default() };
    for one in attributes(payload.get(HEADER..)?) {
        match one.kind() {
            attribute::NAME => link.name = text(one.value()),
            attribute::XDP => link.xdp = xdp(one.value()),
            _ => {}
        }
    }
    Some((index, link))
}

/// An address, as a message has it. A tunnel's `IFA_ADDRESS` is that of the other end.
pub(super) fn address(payload: &[u8]) -> Option<Assigned> {
    let value = |kind| {
        attributes(payload.get(ADDRESS_HEADER..)?)
            .find(|one| one.kind() == kind)
            .map(|one| ip(one.value()))?
    };
    let address = value(attribute::LOCAL_ADDRESS).or_else(|| value(attribute::ADDRESS))?;
    let is_tentative = payload.get(2).is_some_and(|flags| flags & TENTATIVE != 0 && flags & OPTIMISTIC == 0);
    let index = number(payload, 4)?;
    let is_passthrough = index == LOOPBACK && address == Family::PASSTHROUGH_V6;
    let of_mesh = is_passthrough.then(|| found(RoutingItem::LoopbackAddress, payload));
    Some(Assigned { index, address, is_tentative, of_mesh })
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(|bytes| Ipv4Addr::from(bytes).into());
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(|bytes| Ipv6Addr::from(bytes).into())).ok()
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
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
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
