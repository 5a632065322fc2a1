//! Redirections made with the builder, from values of their types: valid ones and others.

use proptest::{collection::vec, option, prelude::*, sample::select};
use redirect_core::{
    DnsCapture, Families, InboundPorts, OutboundRanges, OwnerGroups, Redirect, RedirectBuilder, Tproxy,
    ipnet::{IpNet, Ipv4Net},
    values::{InterfaceName, Mark, Port, PortRange, RouteTable},
};
use std::net::IpAddr;

/// A builder on which any of the setters were called.
pub fn builders() -> impl Strategy<Value = RedirectBuilder> {
    let steps = vec![
        step(tproxy(), RedirectBuilder::tproxy),
        step(port(), RedirectBuilder::proxy_port),
        step(port(), RedirectBuilder::inbound_port),
        step(port(), RedirectBuilder::tunnel_port),
        step(vec(id(), 0..4), RedirectBuilder::proxy_uids),
        step(vec(id(), 0..4), RedirectBuilder::proxy_gids),
        step(inbound(), RedirectBuilder::inbound),
        step(outbound(), RedirectBuilder::outbound),
        step(vec(range(), 0..6), RedirectBuilder::outbound_exclude),
        step(vec(ports(), 0..6), RedirectBuilder::outbound_ports),
        step(vec(ports(), 0..6), RedirectBuilder::replace_outbound_exclusions),
        step(owner_groups(), RedirectBuilder::owner_groups),
        step(dns(), RedirectBuilder::dns),
        step(vec(interface(), 0..3), RedirectBuilder::exclude_interfaces),
        step(vec(interface(), 0..3), RedirectBuilder::virtual_interfaces),
        step(any::<bool>(), RedirectBuilder::drop_invalid),
        step(any::<bool>(), RedirectBuilder::strict_capture),
        step(loopback(), RedirectBuilder::loopback),
    ];
    let families = select(vec![Families::V4, Families::Both]);
    (families, steps).prop_map(|(families, steps)| {
        steps.into_iter().flatten().fold(Redirect::sidecar(families), |builder, step| step.0(builder))
    })
}

/// A call of a setter.
#[derive(Clone)]
struct Call(std::sync::Arc<dyn Fn(RedirectBuilder) -> RedirectBuilder>);

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a call of a setter")
    }
}

fn step<T: Clone + std::fmt::Debug + 'static>(
    value: impl Strategy<Value = T> + 'static,
    set: impl Fn(RedirectBuilder, T) -> RedirectBuilder + Copy + 'static,
) -> BoxedStrategy<Option<Call>> {
    let call = move |value: T| Call(std::sync::Arc::new(move |builder| set(builder, value.clone())));
    option::of(value.prop_map(call)).boxed()
}

/// Few, so that two listeners meet on one.
fn port() -> impl Strategy<Value = Port> {
    let few = select(vec![15001_u16, 15006, 15008, 15053, 1]);
    prop_oneof![1 => few, 8 => 1_u16..].prop_map(|port| Port::new(port).unwrap())
}

fn tproxy() -> impl Strategy<Value = Tproxy> {
    let mark = prop_oneof![1 => Just(Mark::PROXY.value()), 8 => 1_u32..0x1_0000, 2 => 1_u32..];
    let table = any::<u32>().prop_filter_map("the kernel's own", RouteTable::new);
    (mark, table).prop_map(|(mark, table)| Tproxy::new(Mark::new(mark).unwrap(), table))
}

fn id() -> impl Strategy<Value = u32> {
    prop_oneof![10 => 0_u32..3000, 10 => any::<u32>(), 1 => Just(u32::MAX)]
}

fn ports() -> impl Strategy<Value = PortRange> {
    (any::<u16>(), any::<u16>(), any::<bool>()).prop_map(|(a, b, single)| {
        if single { PortRange::single(a) } else { PortRange::new(a.min(b), a.max(b)).unwrap() }
    })
}

fn inbound() -> impl Strategy<Value = InboundPorts> {
    prop_oneof![
        Just(InboundPorts::None),
        vec(ports(), 0..5).prop_map(InboundPorts::AllExcept),
        vec(ports(), 0..5).prop_map(InboundPorts::Only),
    ]
}

/// Host bits and all.
fn range() -> impl Strategy<Value = IpNet> {
    let v4 = (any::<[u8; 4]>(), 0_u8..=32).prop_map(|(bytes, bits)| (IpAddr::from(bytes), bits));
    let v6 = (any::<[u8; 16]>(), 0_u8..=128).prop_map(|(bytes, bits)| (IpAddr::from(bytes), bits));
    prop_oneof![v4, v6].prop_map(|(address, bits)| IpNet::new(address, bits).unwrap())
}

fn outbound() -> impl Strategy<Value = OutboundRanges> {
    prop_oneof![
        Just(OutboundRanges::All),
        vec(range(), 0..5).prop_map(|ranges| OutboundRanges::Only(ranges.into_iter().collect())),
    ]
}

fn owner_groups() -> impl Strategy<Value = OwnerGroups> {
    prop_oneof![
        4 => vec(id(), 0..5).prop_map(OwnerGroups::AllExcept),
        4 => vec(id(), 0..5).prop_map(OwnerGroups::Only),
        1 => vec(0_u32..3000, 60..70).prop_map(OwnerGroups::Only),
    ]
}

fn dns() -> impl Strategy<Value = DnsCapture> {
    let server =
        prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), any::<[u8; 16]>().prop_map(IpAddr::from)];
    prop_oneof![
        1 => Just(DnsCapture::Off),
        2 => Just(DnsCapture::All),
        4 => vec(server, 0..4).prop_map(DnsCapture::Servers),
    ]
}

fn interface() -> impl Strategy<Value = InterfaceName> {
    "[a-z][a-z0-9_.-]{0,12}\\+?".prop_map(|name| name.parse().unwrap())
}

fn loopback() -> impl Strategy<Value = Ipv4Net> {
    let range = (any::<[u8; 3]>(), 8_u8..=32);
    let inside = range.prop_map(|([a, b, c], bits)| Ipv4Net::new([127, a, b, c].into(), bits).unwrap());
    let anywhere = (any::<[u8; 4]>(), 0_u8..=32);
    prop_oneof![
        8 => inside,
        1 => anywhere.prop_map(|(address, bits)| Ipv4Net::new(address.into(), bits).unwrap()),
    ]
}
