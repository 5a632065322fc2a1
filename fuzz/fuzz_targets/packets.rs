//! Any packet in words, and any two settings: the packet's trace ends where its fate says, in words and pictures that can be printed; and
//! what two plans differ in is nothing where they are the same, and the same traffic whichever comes first.
//!
//! The packet is lines, one for each flag; the settings are behind the first and the second zero byte.

#![no_main]

use libfuzzer_sys::fuzz_target;
use packet_trace::{Detail, TraceRules};
use redirect_core::{Redirect, RulePlan, options::BackendChoice};
use redirect_core_fuzz::{parts, plan, text};
use redirectctl::{
    packet::{PacketQuestion, packet},
    picture::of_trace,
    text_writer::TextLayout,
    traffic::{PlanComparison, Programmed, report},
};

/// How many rules a plan has at most whose traffic is compared: the work grows faster than their number.
const MOST_RULES: usize = 60;

fuzz_target!(|input: &str| {
    let (said, settings) = parts::halves(input);
    let (one, other) = parts::halves(settings);
    let (one, other) = (planned(one), planned(other));
    let mut lines = said.lines();
    let mut line = || lines.next().unwrap_or_default().to_owned();
    let (to, sender, from) = (line(), line(), line());
    let (interface, mark, state) = (line(), line(), line());
    let said = PacketQuestion { to, sender, from, interface, mark, state, every: false };
    trace(&said, &one);
    if one.planned_rules().len().max(other.planned_rules().len()) <= MOST_RULES {
        compare(&one, &other);
    }
});

/// The plan of some settings; those that are wrong say nothing.
fn planned(settings: &str) -> RulePlan {
    let addresses = parts::addresses();
    Redirect::parse(&parts::settings(settings), &parts::facts(&addresses))
        .map_or_else(|_| RulePlan::empty(), |redirect| redirect.plan())
}

fn trace(said: &PacketQuestion, plan: &RulePlan) {
    let packet = match packet(said, Some(plan), &parts::addresses()) {
        Ok(packet) => packet,
        Err(wrong) => {
            assert!(!wrong.is_empty());
            return wrong.iter().for_each(|one| text::is_one_safe_line(one));
        }
    };
    let rules = TraceRules::of_plan(plan, packet.family());
    let trace = rules.trace(&packet);
    assert_eq!(trace.fate(), rules.fate(&packet));
    assert!(serde_json::to_value(&trace).is_ok());
    for detail in [Detail::Met, Detail::Every] {
        text::is_safe(&report(&trace, detail));
        let picture = of_trace(&trace, detail);
        text::is_safe(&picture);
        plan::svg(&picture);
    }
}

fn compare(one: &RulePlan, other: &RulePlan) {
    // Native nftables are about both families; the rules in words are the same.
    for backend in [BackendChoice::NativeNft, BackendChoice::Auto] {
        let of = |plan: &RulePlan| Programmed { plan: plan.clone(), backend };
        compare_programmed(
            &of(one),
            &of(other),
            one.policy_routes().is_some() == other.policy_routes().is_some(),
        );
    }
}

fn compare_programmed(one: &Programmed, other: &Programmed, are_routed_alike: bool) {
    let same = PlanComparison::of(one, one);
    assert!(same.traffic.is_empty() && same.rules.iter().all(Vec::is_empty));
    let (there, back) = (PlanComparison::of(one, other), PlanComparison::of(other, one));
    text::is_safe(&there.text(TextLayout { width: 100, colour: false }));
    assert_eq!(there.traffic.is_empty(), back.traffic.is_empty());
    let [gone, new] = &there.rules;
    assert_eq!([new, gone], [&back.rules[0], &back.rules[1]]);
    if gone.is_empty() && new.is_empty() && are_routed_alike {
        assert!(there.traffic.is_empty(), "the same rules, and other traffic: {:?}", there.traffic);
    }
}
