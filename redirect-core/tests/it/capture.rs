//! What is captured is captured whatever earlier connections have left behind.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::generated::settings;
use crate::walk::{Segment, State, Walk, WalkVerdict};
use proptest::{prelude::*, sample::select};
use redirect_core::{
    Family, OwnerGroups, Redirect, RulePlan,
    rule::{Direction, Hook, TcpFlags},
    settings::Key,
};
use std::net::{IpAddr, SocketAddr};

/// Flag sets that make a listener open a connection.
fn opening() -> impl Strategy<Value = u8> {
    any::<u8>().prop_map(|flags| flags & !TcpFlags::OPENING.mask() | TcpFlags::OPENING.set())
}

fn states() -> impl Strategy<Value = State> {
    select(vec![State::Invalid, State::Known(Direction::Original), State::Known(Direction::Reply)])
}

fn interfaces() -> impl Strategy<Value = &'static str> {
    select(vec!["eth0", "eth0", "eth0", "vif1", "a"])
}

fn address(family: Family) -> impl Strategy<Value = IpAddr> {
    let usual = match family {
        Family::V4 => ["10.1.0.2", "10.1.0.1", "198.51.100.1", "127.0.0.6", "127.0.0.1"],
        Family::V6 => ["fd00:10::2", "fd00:10::1", "2001:db8::1", "::6", "::1"],
    };
    let any = match family {
        Family::V4 => any::<[u8; 4]>().prop_map(IpAddr::from).boxed(),
        Family::V6 => any::<[u8; 16]>().prop_map(IpAddr::from).boxed(),
    };
    prop_oneof![3 => select(usual.to_vec()).prop_map(|text| text.parse().unwrap()), 1 => any]
}

fn endpoint(family: Family) -> impl Strategy<Value = SocketAddr> {
    let port = prop_oneof![select(vec![80_u16, 8080, 15_006, 15_008, 53]), any::<u16>()];
    (address(family), port).prop_map(SocketAddr::from)
}

/// A segment that comes from outside and can open a connection.
fn from_outside() -> impl Strategy<Value = (Family, Segment)> {
    select(Family::BOTH.to_vec()).prop_flat_map(|family| {
        let parts = (interfaces(), endpoint(family), endpoint(family), opening());
        parts.prop_map(move |(interface, source, destination, flags)| {
            let interface = interface.to_owned();
            (family, Segment { interface, source, destination, flags, owner: None, mark: 0 })
        })
    })
}

fn arrives(plan: &RulePlan, (family, segment): &(Family, Segment), state: State, mark: u32) -> WalkVerdict {
    let rules = plan.rules(*family);
    let mut walk = Walk::new(&rules, segment.clone(), state, mark);
    walk.hook(Hook::Prerouting)
}

/// The first segments of connections: of anybody in the pod over either interface, and from outside.
fn earlier(family: Family) -> impl Strategy<Value = Segment> {
    let owner = prop_oneof![
        3 => select(vec![(1337, 1337), (1000, 1000), (1000, 1337), (1337, 1000)]),
        1 => (0..3000_u32, 0..3000_u32),
    ];
    let from_inside = (owner, select(vec!["eth0", "lo"]), endpoint(family), endpoint(family)).prop_map(
        |(owner, interface, source, destination)| segment(interface, source, destination, Some(owner)),
    );
    let from_outside = (endpoint(family), endpoint(family))
        .prop_map(|(source, destination)| segment("eth0", source, destination, None));
    prop_oneof![2 => from_inside, 1 => from_outside]
}

fn segment(
    interface: &str,
    source: SocketAddr,
    destination: SocketAddr,
    owner: Option<(u32, u32)>,
) -> Segment {
    let flags = TcpFlags::OPENING.set();
    Segment { interface: interface.to_owned(), source, destination, flags, owner, mark: 0 }
}

/// What becomes of a segment that a process of the pod sends, or that comes from outside.
fn fate(
    plan: &RulePlan,
    family: Family,
    segment: &Segment,
    state: State,
    mark: u32,
) -> (WalkVerdict, u32, u32) {
    let rules = plan.rules(family);
    let mut walk = Walk::new(&rules, segment.clone(), state, mark);
    let hook = if segment.owner.is_some() { Hook::Output } else { Hook::Prerouting };
    let mut verdict = walk.hook(hook);
    if hook == Hook::Output && verdict == WalkVerdict::Passed && segment.interface == "lo" {
        verdict = walk.hook(Hook::Prerouting);
    }
    (verdict, walk.segment.mark, walk.connection_mark)
}

/// Whether a setting exempts the interface that the tests' connections use.
fn leaves_eth0_alone(redirect: &Redirect) -> bool {
    let mut all = redirect.exclude_interfaces().iter().chain(redirect.virtual_interfaces());
    all.any(|interface| interface.covers("eth0"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Of an entry that an earlier connection left, nat keeps what it decided about that connection (docs/concepts/capture.md
    /// says what that leaves open); the rules of TPROXY decide about every segment again.
    #[test]
    fn tproxy_captures_what_opens_a_connection_whatever_was_before(
        settings in settings(), segment in from_outside(), state in states(), mark in any::<u32>(),
    ) {
        let plan = settings.plan();
        let (fresh, known) = (arrives(&plan, &segment, State::New, 0), arrives(&plan, &segment, state, mark));
        if plan.policy_routes().is_some() && matches!(fresh, WalkVerdict::Tproxied | WalkVerdict::Dropped) {
            prop_assert!(matches!(known, WalkVerdict::Tproxied | WalkVerdict::Dropped), "{known:?} instead of {fresh:?}");
        }
    }

    /// With strict capture no process opens a connection beside the proxy on what an earlier connection left, neither
    /// the same way nor the other, if it would be captured without that.
    #[test]
    fn strict_capture_lets_nobody_use_an_exempt_connection_again(
        mut settings in settings(),
        (family, mut earlier) in select(Family::BOTH.to_vec()).prop_flat_map(|family| (Just(family), earlier(family))),
        (reversed, in_the_name_of_a_client, is_invalid) in any::<(bool, bool, bool)>(), flags in opening(),
        group in any::<prop::sample::Index>(),
    ) {
        settings.said.retain(|(key, _)| *key != Key::StrictCapture);
        settings.said.push((Key::StrictCapture, "true".to_owned()));
        let redirect = settings.redirect();
        let plan = redirect.plan();
        // Sometimes of a group whose traffic is excluded.
        if let (OwnerGroups::AllExcept(groups), Some((1000, gid))) = (redirect.owner_groups(), &mut earlier.owner)
            && !groups.is_empty()
        {
            *gid = *group.get(groups);
        }
        let (first, _, mark) = fate(&plan, family, &earlier, State::New, 0);
        // What nat has sent to the proxy goes there for good, and what is dropped leaves no entry.
        let has_left_an_entry = matches!(first, WalkVerdict::Passed | WalkVerdict::Tproxied);
        if !plan.families().contains(&family) || leaves_eth0_alone(&redirect) || !has_left_an_entry {
            return Ok(());
        }
        // Each side sends from its own address; but a proxy may call its pod over lo in the name of a client.
        let is_ours = earlier.owner.is_some() != reversed;
        let is_the_client = is_ours && !reversed && earlier.interface == "lo" && in_the_name_of_a_client;
        let owner = (is_ours && !is_the_client).then_some((1000, 1000));
        let (from, to) = (earlier.source, earlier.destination);
        let (from, to) = if reversed { (to, from) } else { (from, to) };
        let again = Segment { flags, ..segment("eth0", from, to, owner) };
        let state = match (is_invalid, reversed) {
            (true, _) => State::Invalid,
            (false, false) => State::Known(Direction::Original),
            (false, true) => State::Known(Direction::Reply),
        };
        let (fresh, ..) = fate(&plan, family, &again, State::New, 0);
        let mark = if is_invalid { 0 } else { mark };
        let (verdict, packet_mark, _) = fate(&plan, family, &again, state, mark);
        let is_sent_to_lo = plan.policy_routes().is_some_and(|routes| routes.mark().covers(packet_mark));
        if matches!(fresh, WalkVerdict::Redirected | WalkVerdict::Tproxied) {
            let held = matches!(verdict, WalkVerdict::Dropped | WalkVerdict::Tproxied) || is_sent_to_lo;
            prop_assert!(held, "{again:?} as {state:?} with {mark:#x}: {verdict:?} instead of {fresh:?}");
        }
    }
}
