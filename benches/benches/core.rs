//! What planning costs: reading settings, making a plan, rendering it, reading rules back, finding differences, walking packets
//! through rules.
//!
//! Sizes are numbers of excluded ports, with as many excluded ranges. The cost per entry must not grow with the size.

#![allow(missing_docs)] // criterion's macros make public items

use benches::{plan, redirect, settings};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use netfilter_state::{change::IptablesChange, ruleset::HookedRules, state::IptablesTables};
use packet_trace::{TrafficDifference, interference::PodTraffic};
use redirect_core::{Family, RulePlan, options::NativeForm};
use std::hint::black_box;

const SIZES: [usize; 4] = [0, 100, 1_000, 10_000];

/// Measures one step for every size. What the step works on is made beforehand.
fn step<T>(c: &mut Criterion, name: &str, prepare: impl Fn(usize) -> T, run: impl Fn(&T)) {
    let mut group = c.benchmark_group(name);
    for size in SIZES {
        let input = prepare(size);
        group.throughput(Throughput::Elements(size.max(1) as u64));
        group.sample_size(if size > 1_000 { 10 } else { 50 });
        group.bench_with_input(BenchmarkId::from_parameter(size), &input, |b, input| b.iter(|| run(input)));
    }
    group.finish();
}

fn planning(c: &mut Criterion) {
    step(c, "parse settings", settings, |raw| {
        black_box(redirect(black_box(raw)));
    });
    step(
        c,
        "plan",
        |size| redirect(&settings(size)),
        |redirect| {
            black_box(black_box(redirect).plan());
        },
    );
    step(c, "settings to text", settings, |raw| {
        let plan = redirect(black_box(raw)).plan();
        for family in Family::BOTH {
            black_box(plan.rules(family).restore_text());
        }
    });
}

fn rendering(c: &mut Criterion) {
    step(c, "fold into family", plan, |plan| {
        black_box(black_box(plan).rules(Family::V4));
    });
    step(
        c,
        "render restore text",
        |size| plan(size).rules(Family::V4),
        |rules| {
            black_box(black_box(rules).restore_text());
        },
    );
    step(c, "render nft text", plan, |plan| {
        black_box(black_box(plan).nft_text(NativeForm::Plain));
    });
    step(c, "explain", plan, |plan| {
        black_box(black_box(plan).explain());
    });
}

fn comparing(c: &mut Criterion) {
    step(
        c,
        "read saved text",
        |size| plan(size).rules(Family::V4).restore_text(),
        |text| {
            black_box(IptablesTables::saved(black_box(text)).ok());
        },
    );
    let same = |size| {
        let rules = plan(size).rules(Family::V4);
        (IptablesTables::from(&rules), rules)
    };
    step(c, "diff, nothing to do", same, |(observed, wanted)| {
        black_box(IptablesChange::between(black_box(observed), black_box(wanted)));
    });
    let from_nothing = |size| (IptablesTables::new(), plan(size).rules(Family::V4));
    step(c, "diff, everything to do", from_nothing, |(observed, wanted)| {
        black_box(IptablesChange::between(black_box(observed), black_box(wanted)));
    });
}

/// A plan's rules in force beside those that a node's programs leave in many pods.
fn in_force(plan: &RulePlan) -> HookedRules {
    let others = "*filter\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:KUBE-FIREWALL -\n-A INPUT -j KUBE-FIREWALL\n-A OUTPUT -j KUBE-FIREWALL\n\
        -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP\n-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\nCOMMIT\n\
        *nat\n:PREROUTING ACCEPT\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\n-A POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
        -A POSTROUTING -j MASQUERADE\nCOMMIT\n*raw\n:PREROUTING ACCEPT\n:OUTPUT ACCEPT\nCOMMIT\n\
        *mangle\n:PREROUTING ACCEPT\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\nCOMMIT\n";
    let mut ruleset = HookedRules::default();
    for family in Family::BOTH {
        let own = plan.rules(family).restore_text().replace("-I PREROUTING 1", "-A PREROUTING");
        for text in [others, &own] {
            ruleset.add_saved(family, text).expect("saved text");
        }
    }
    ruleset
}

fn walking(c: &mut Criterion) {
    let addresses = ["10.1.0.2", "fd00:10::2"].map(|address| address.parse().expect("an address"));
    let interfaces = ["eth0".to_owned()];
    let pod = PodTraffic { addresses: &addresses, interfaces: &interfaces, ..PodTraffic::default() };
    let prepare = |size| {
        let plan = plan(size);
        (in_force(&plan), plan)
    };
    step(c, "what keeps packets from the proxy", prepare, |(ruleset, plan)| {
        black_box(pod.judge(black_box(ruleset), plan));
    });
    step(
        c,
        "traffic that two plans treat differently",
        |size| (plan(0), plan(size)),
        |(before, after)| {
            black_box(TrafficDifference::of_plans(black_box(before), black_box(after)));
        },
    );
}

criterion_group!(benches, planning, rendering, comparing, walking);
criterion_main!(benches);
