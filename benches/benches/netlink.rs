//! What netlink costs without the kernel: changes to bytes, and bytes to rules.
//!
//! Sizes are numbers of excluded ports, with as many excluded ranges, for both families.

#![allow(missing_docs)] // criterion's macros make public items

use benches::plan;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use netfilter_state::{
    change::IptablesChange,
    netlink::{Batch, Messages, NativeState, Observed},
    state::IptablesTables,
};
use redirect_core::{Family, RulePlan, options::NativeForm};
use std::hint::black_box;

const SIZES: [usize; 4] = [0, 100, 1_000, 10_000];

fn changes(plan: &RulePlan) -> Vec<(Family, IptablesChange)> {
    Family::BOTH
        .map(|family| (family, IptablesChange::between(&IptablesTables::new(), &plan.rules(family))))
        .into()
}

fn encoded(changes: &[(Family, IptablesChange)]) -> Vec<u8> {
    let nothing = Observed::at(1);
    let mut batch = Batch::new(&nothing);
    for (family, change) in changes {
        let _ = batch.change(*family, change);
    }
    batch.finish().map(|batch| batch.bytes().to_vec()).unwrap_or_default()
}

/// The same as the kernel lists it: each rule with a handle, for which two words are made up.
fn listed(sent: &[u8]) -> Vec<u8> {
    const NEW_RULE: u16 = 10 << 8 | 6;
    let mut listed = Vec::with_capacity(sent.len());
    let mut rest = sent;
    while let Some((length, _)) = rest.split_first_chunk::<4>() {
        let length = u32::from_ne_bytes(*length);
        let Some((message, behind)) = rest.split_at_checked(length as usize) else { break };
        let is_rule = message.get(4..6) == Some(&NEW_RULE.to_ne_bytes()[..]);
        let handle = [12_u16.to_ne_bytes(), 3_u16.to_ne_bytes(), [0; 2], [0; 2], [0; 2], [7; 2]].concat();
        let more: &[u8] = if is_rule { &handle } else { &[] };
        listed.extend((length + more.len() as u32).to_ne_bytes());
        listed.extend(message.iter().skip(4));
        listed.extend(more);
        rest = behind;
    }
    listed
}

fn encode(c: &mut Criterion) {
    let mut group = c.benchmark_group("netlink encode");
    for size in SIZES {
        let changes = changes(&plan(size));
        group.throughput(Throughput::Bytes(encoded(&changes).len() as u64));
        group.sample_size(if size > 1_000 { 10 } else { 50 });
        group.bench_with_input(BenchmarkId::from_parameter(size), &changes, |b, changes| {
            b.iter(|| encoded(black_box(changes)));
        });
    }
    group.finish();
}

fn observed(bytes: &[u8]) -> Observed {
    let mut observed = Observed::at(1);
    for message in Messages::new(bytes) {
        observed.take(&message);
    }
    observed
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("netlink decode");
    for size in SIZES {
        let plan = plan(size);
        let bytes = listed(&encoded(&changes(&plan)));
        assert_eq!(*observed(&bytes).state(Family::V6), IptablesTables::from(&plan.rules(Family::V6)));
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.sample_size(if size > 1_000 { 10 } else { 50 });
        group.bench_with_input(BenchmarkId::from_parameter(size), &bytes, |b, bytes| {
            b.iter(|| observed(black_box(bytes)));
        });
    }
    group.finish();
}

fn native(c: &mut Criterion) {
    let mut group = c.benchmark_group("netlink native");
    for (name, form) in [("plain", NativeForm::Plain), ("sets", NativeForm::Sets)] {
        for size in SIZES {
            let plan = plan(size);
            group.sample_size(if size > 1_000 { 10 } else { 50 });
            group.bench_with_input(BenchmarkId::new(name, size), &plan, |b, plan| {
                b.iter(|| {
                    let (nothing, wanted) = (Observed::at(1), NativeState::wanted(black_box(plan), form));
                    let mut batch = Batch::new(&nothing);
                    batch.native_change(nothing.native(), &wanted);
                    batch.finish().map(|batch| batch.bytes().len())
                });
            });
        }
    }
    group.finish();
    c.bench_function("netlink native state, 100", |b| {
        let plan = plan(100);
        b.iter(|| NativeState::wanted(black_box(&plan), NativeForm::Sets));
    });
}

criterion_group!(benches, encode, decode, native);
criterion_main!(benches);
