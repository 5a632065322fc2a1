//! Commands about packets: what becomes of one, and which ones two plans treat differently.

use std::collections::BTreeMap;

use packet_trace::{Detail, Trace, TraceRules, TrafficDifference};
use redirect_core::options::BackendChoice;
use redirect_core::{Family, RulePlan};
use serde_json::{Value, json};

use crate::VERSION;
use crate::printable::Printable;
use crate::text_writer::{TextLayout, TextStyle, TextWriter};

/// A trace for people. What others call their rules is made harmless.
#[must_use]
pub fn report(trace: &Trace, detail: Detail) -> Printable {
    Printable::lines(&trace.text(detail))
}

/// A plan, and what programs its rules: native nftables are about both families, whatever families the plan is for.
#[derive(Debug, Clone)]
pub struct Programmed {
    /// The plan.
    pub plan: RulePlan,
    /// What programs it.
    pub backend: BackendChoice,
}

impl Programmed {
    /// The rules that packets of a family meet.
    #[must_use]
    pub fn rules(&self, family: Family) -> TraceRules {
        TraceRules::of_plan_in(&self.plan, family, self.backend)
    }
}

/// What sees a packet besides the rules of a trace, for people: a line each, behind the trace.
#[must_use]
pub fn not_examined(unexamined: &[String]) -> Printable {
    unexamined.iter().map(|one| Printable::line(&format!("note: not examined: {one}"))).collect()
}

/// What two plans differ in.
#[derive(Debug)]
pub struct PlanComparison {
    /// TraceRules that only the first has, then those that only the second has, with their families.
    pub rules: [Vec<(Family, String)>; 2],
    /// Traffic that they treat differently.
    pub traffic: Vec<TrafficDifference>,
}

impl PlanComparison {
    /// Compares two plans.
    #[must_use]
    pub fn of(before: &Programmed, after: &Programmed) -> Self {
        let [gone, new] = [only_in(&before.plan, &after.plan), only_in(&after.plan, &before.plan)];
        let differ = |family| TrafficDifference::between(&before.rules(family), &after.rules(family));
        Self { rules: [gone, new], traffic: Family::BOTH.into_iter().flat_map(differ).collect() }
    }

    /// For people.
    #[must_use]
    pub fn text(&self, layout: TextLayout) -> Printable {
        let mut paper = TextWriter::new(layout);
        let [gone, new] = &self.rules;
        if gone.is_empty() && new.is_empty() {
            paper.line(0, "the rules are the same");
        } else {
            paper.heading("rules");
        }
        for (sign, ink, rules) in [("- ", TextStyle::Red, gone), ("+ ", TextStyle::Green, new)] {
            for (family, rule) in rules {
                paper.marked(2, sign, ink, &format!("{family} {rule}"));
            }
        }
        if self.traffic.is_empty() {
            paper.line(0, "no packet changes its fate: both mean the same");
            return paper.into_text();
        }
        paper.heading("traffic treated differently");
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
        json!({"version": VERSION, "rules": {"removed": gone, "added": new}, "traffic": self.traffic})
    }
}

/// The rules of a plan that another has not, in order; one that it has less often counts as often as that.
fn only_in(plan: &RulePlan, other: &RulePlan) -> Vec<(Family, String)> {
    let mut only = Vec::new();
    for family in Family::BOTH {
        let lines = |plan: &RulePlan| -> Vec<String> {
            let mut table = String::new();
            let text = plan.rules(family).restore_text();
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
