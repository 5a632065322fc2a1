//! What is captured is captured whatever earlier connections have left behind.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod generated;
mod walk;

use generated::settings;
use proptest::{prelude::*, sample::select};
use redirect_core::{
    Family, RulePlan,
    rule::{Direction, Hook, TcpFlags},
};
use std::net::{IpAddr, SocketAddr};
use walk::{Segment, State, Verdict, Walk};

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

fn arrives(plan: &RulePlan, (family, segment): &(Family, Segment), state: State, mark: u32) -> Verdict {
    let rules = plan.rules(*family);
    let mut walk = Walk { rules: &rules, segment: segment.clone(), state, connection_mark: mark };
    walk.hook(Hook::Prerouting)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Of an entry that an earlier connection left, nat keeps what it decided about that connection (docs/capture.md
    /// says what that leaves open); the rules of TPROXY decide about every segment anew.
    #[test]
    fn tproxy_captures_what_opens_a_connection_whatever_was_before(
        settings in settings(), segment in from_outside(), state in states(), mark in any::<u32>(),
    ) {
        let plan = settings.plan();
        let (fresh, known) = (arrives(&plan, &segment, State::New, 0), arrives(&plan, &segment, state, mark));
        if plan.policy_routes().is_some() && matches!(fresh, Verdict::Tproxied | Verdict::Dropped) {
            prop_assert!(matches!(known, Verdict::Tproxied | Verdict::Dropped), "{known:?} instead of {fresh:?}");
        }
    }
}
