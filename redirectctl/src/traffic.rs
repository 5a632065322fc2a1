//! Commands about packets: what becomes of one, and which ones two plans treat differently.

use std::collections::BTreeMap;
use std::net::IpAddr;

use redirect_core::render::restore_text;
use redirect_core::trace::{Change, Detail, Difference, Outcome, Step, Trace, difference};
use redirect_core::{Family, RulePlan};
use serde_json::{Value, json};

use crate::paper::{Ink, Layout, Paper, harmless};
use crate::report::VERSION;

/// A trace for people. What others call their rules is made harmless.
#[must_use]
pub fn told(trace: &Trace, detail: Detail) -> String {
    trace.text(detail).lines().map(|line| harmless(line) + "\n").collect()
}

/// A trace for programs.
#[must_use]
pub fn trace_json(trace: &Trace) -> Value {
    let steps: Vec<Value> = trace.steps.iter().map(step).collect();
    json!({
        "version": VERSION,
        "packet": trace.packet.to_string(),
        "steps": steps,
        "decidedBy": trace.decided,
        "fate": trace.fate().to_string(),
        "may": trace.may.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn step(step: &Step) -> Value {
    match step {
        Step::Hook { hook, interface } => json!({"hook": hook.name(), "interface": interface}),
        Step::Chain { place, priority } => {
            json!({"table": place.table.to_string(), "chain": place.chain, "priority": priority})
        }
        Step::Rule { place, rule, outcome, is_own, origin, .. } => json!({
            "table": place.table.to_string(),
            "chain": place.chain,
            "number": place.rule,
            "rule": rule,
            "matches": match outcome {
                Outcome::Matched => json!(true),
                Outcome::Unmatched(_) => json!(false),
                Outcome::Unknown(_) => Value::Null,
            },
            "own": is_own,
            "setting": origin.map(|origin| origin.setting.setting().name()),
            "source": origin.map(|origin| origin.source.to_string()),
            "purpose": origin.map(|origin| origin.purpose),
        }),
        Step::Policy { place } => {
            json!({"table": place.table.to_string(), "chain": place.chain, "policy": "drop"})
        }
        Step::Changed(change) => json!({"changed": changed(change)}),
        // A kind that this program does not know yet.
        other => json!({"other": format!("{other:?}")}),
    }
}

fn changed(change: &Change) -> Value {
    match change {
        Change::Mark(mark) => json!({"mark": mark}),
        Change::ConnectionMark(mark) => json!({"connectionMark": mark}),
        Change::Destination(to) => json!({"destination": to}),
        Change::Zone(zone) => json!({"zone": zone}),
        Change::Rerouted(interface) => json!({"interface": interface}),
        // A kind that this program does not know yet.
        other => json!(format!("{other:?}")),
    }
}

/// What two plans differ in.
#[derive(Debug)]
pub struct Compared {
    /// Rules that only the first has, then those that only the second has, with their families.
    pub rules: [Vec<(Family, String)>; 2],
    /// Traffic that they treat differently.
    pub traffic: Vec<Difference>,
}

impl Compared {
    /// Compares two plans.
    #[must_use]
    pub fn of(before: &RulePlan, after: &RulePlan) -> Self {
        let [gone, new] = [only_in(before, after), only_in(after, before)];
        Self { rules: [gone, new], traffic: difference(before, after) }
    }

    /// For people.
    #[must_use]
    pub fn text(&self, layout: Layout) -> String {
        let mut paper = Paper::new(layout);
        let [gone, new] = &self.rules;
        if gone.is_empty() && new.is_empty() {
            paper.line(0, "the rules are the same");
        } else {
            paper.heading("rules");
        }
        for (sign, ink, rules) in [("- ", Ink::Red, gone), ("+ ", Ink::Green, new)] {
            for (family, rule) in rules {
                paper.marked(2, sign, ink, &format!("{family} {rule}"));
            }
        }
        if self.traffic.is_empty() {
            paper.line(0, "no packet changes its fate: both mean the same");
            return paper.into_text();
        }
        paper.heading("traffic that changes its fate");
        for one in &self.traffic {
            paper.labelled(2, "", &one.region.to_string());
            paper.labelled(6, "before: ", &one.before.to_string());
            paper.labelled(6, "after:  ", &one.after.to_string());
        }
        paper.into_text()
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        let [gone, new] = self.rules.each_ref().map(|rules| {
            rules
                .iter()
                .map(|(family, rule)| json!({"family": family.to_string(), "rule": rule}))
                .collect::<Vec<_>>()
        });
        let ranges = |ranges: Option<Vec<(IpAddr, IpAddr)>>| ranges.map(|all| json!(all));
        let traffic: Vec<Value> = self
            .traffic
            .iter()
            .map(|one| {
                json!({
                    "text": one.region.to_string(),
                    "family": one.region.family().to_string(),
                    "fromPod": one.region.is_local(),
                    "protocols": one.region.protocols().iter().map(|protocol| protocol.name()).collect::<Vec<_>>(),
                    "interfaces": one.region.interfaces(),
                    "sources": ranges(one.region.sources()),
                    "destinations": ranges(one.region.destinations()),
                    "ports": one.region.ports(),
                    "users": one.region.users(),
                    "groups": one.region.groups(),
                    "before": one.before.to_string(),
                    "after": one.after.to_string(),
                })
            })
            .collect();
        json!({"version": VERSION, "rules": {"removed": gone, "added": new}, "traffic": traffic})
    }
}

/// The rules of a plan that another has not, in order; one that it has less often counts as often as that.
fn only_in(plan: &RulePlan, other: &RulePlan) -> Vec<(Family, String)> {
    let mut only = Vec::new();
    for family in Family::BOTH {
        let lines = |plan: &RulePlan| -> Vec<String> {
            let mut table = String::new();
            let text = restore_text(&plan.rules(family));
            let line = |line: &str| match line.strip_prefix('*') {
                Some(name) => {
                    name.clone_into(&mut table);
                    None
                }
                None => line.starts_with('-').then(|| format!("{table} {line}")),
            };
            text.lines().filter_map(line).collect()
        };
        let mut there: BTreeMap<String, usize> = BTreeMap::new();
        for line in lines(other) {
            *there.entry(line).or_default() += 1;
        }
        for line in lines(plan) {
            match there.get_mut(&line).filter(|count| **count > 0) {
                Some(count) => *count -= 1,
                None => only.push((family, line)),
            }
        }
    }
    only
}
