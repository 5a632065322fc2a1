//! What the mesh's rules count, look by look.
//!
//! A look and what changed since the one before are values; nothing here reads or waits.

mod view;

use std::collections::BTreeMap;

pub use netfilter_state::ruleset::Counter;
use netfilter_state::ruleset::Plain;
use netns_apply::Live;
use packet_trace::{RuleLocation, RuleOrigin};
use redirect_core::{Family, RulePlan};
use serde_json::{Value, json};

use crate::report::VERSION;

pub use view::{Screen, counted, started, totals};

/// One of the mesh's rules, and what it has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchedRule {
    /// Its position.
    pub place: RuleLocation,
    /// What it says.
    pub text: String,
    /// The settings behind it, where a plan is known: several where one rule stands for several planned ones.
    pub origins: Vec<RuleOrigin>,
    /// Its counter; `None` without one.
    pub counter: Option<Counter>,
}

/// The mesh's rules at a moment, in the order of their tables and chains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CounterSnapshot {
    /// All of them.
    pub rules: Vec<WatchedRule>,
}

/// What is new since the look before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CounterUpdate {
    /// The rules changed, or counters went back: counting begins again.
    OtherRules,
    /// These rules counted, by their index in the look.
    Counted(Vec<(usize, Counter)>),
}

impl CounterSnapshot {
    /// The mesh's rules of a network namespace. With a plan they know the settings behind them.
    #[must_use]
    pub fn of(live: &Live, plan: Option<&RulePlan>) -> Self {
        let mut rules: BTreeMap<RuleLocation, WatchedRule> = BTreeMap::new();
        for family in Family::BOTH {
            for one in live.rules(family, plan).of_mesh() {
                let watched = rules.entry(one.place.clone()).or_insert_with(|| WatchedRule {
                    place: one.place,
                    text: one.rule.to_string(),
                    origins: Vec::new(),
                    counter: one.rule.counter,
                });
                // A rule for both families is met twice here, and may be known by one of them.
                let others = one.origins.into_iter().filter(|origin| !watched.origins.contains(origin));
                watched.origins.extend(others.collect::<Vec<_>>());
            }
        }
        Self { rules: rules.into_values().collect() }
    }

    /// What is new in it since the look before.
    #[must_use]
    pub fn since(&self, before: &Self) -> CounterUpdate {
        let same = |(now, then): (&WatchedRule, &WatchedRule)| {
            let goes_on = match (now.counter, then.counter) {
                (Some(now), Some(then)) => now.packets >= then.packets && now.bytes >= then.bytes,
                (None, None) => true,
                (Some(_), None) | (None, Some(_)) => false,
            };
            goes_on && now.place == then.place && now.text == then.text
        };
        if self.rules.len() != before.rules.len() || !self.rules.iter().zip(&before.rules).all(same) {
            return CounterUpdate::OtherRules;
        }
        let pairs = self.rules.iter().zip(&before.rules).enumerate();
        let counted = pairs.filter_map(|(index, (now, then))| {
            let (now, then) = (now.counter?, then.counter?);
            let added = Counter {
                packets: now.packets.saturating_sub(then.packets),
                bytes: now.bytes.saturating_sub(then.bytes),
            };
            (added != Counter::default()).then_some((index, added))
        });
        CounterUpdate::Counted(counted.collect())
    }

    /// How many of its rules do not count.
    #[must_use]
    pub fn without_counter(&self) -> usize {
        self.rules.iter().filter(|rule| rule.counter.is_none()).count()
    }
}

/// Why watching ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchExit {
    /// A signal asked for it.
    Signal,
    /// The network namespace is gone.
    Gone,
}

impl WatchExit {
    /// Its word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Signal => "signal",
            Self::Gone => "namespace-gone",
        }
    }
}

/// All rules with their totals, for programs: the first line, and again whenever the rules change.
#[must_use]
pub fn rules_json(subject: &str, netns: &str, time: &str, look: &CounterSnapshot) -> Value {
    json!({
        "version": VERSION,
        "event": "rules",
        "time": time,
        "subject": subject,
        "netns": netns,
        "rules": look.rules.iter().map(rule_json).collect::<Vec<_>>(),
    })
}

/// A rule that counted, for programs.
#[must_use]
pub fn counted_json(time: &str, rule: &WatchedRule, added: Counter) -> Value {
    json!({
        "version": VERSION,
        "event": "counted",
        "time": time,
        "rule": rule_json(rule),
        "added": {"packets": added.packets, "bytes": added.bytes},
    })
}

/// The last line, for programs.
#[must_use]
pub fn end_json(time: &str, end: WatchExit) -> Value {
    json!({"version": VERSION, "event": "end", "time": time, "reason": end.word()})
}

/// A rule for programs.
#[must_use]
pub fn rule_json(rule: &WatchedRule) -> Value {
    json!({
        "table": rule.place.table.to_string(),
        "chain": Plain(&rule.place.chain).to_string(),
        "number": rule.place.rule,
        "rule": rule.text,
        "packets": rule.counter.map(|counter| counter.packets),
        "bytes": rule.counter.map(|counter| counter.bytes),
        "origins": rule.origins.iter().map(|origin| json!({
            "purpose": origin.purpose,
            "setting": origin.setting.setting().name(),
            "source": origin.source.to_string(),
        })).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use netfilter_state::ruleset::{Api, TableFamily, TableName};

    pub(super) fn rule(chain: &str, number: usize, packets: Option<u64>) -> WatchedRule {
        let table = TableName { api: Api::NfTables, family: TableFamily::Ip, name: "nat".into() };
        WatchedRule {
            place: RuleLocation { table, chain: chain.into(), rule: Some(number) },
            text: "-p tcp -j ISTIO_REDIRECT".into(),
            origins: Vec::new(),
            counter: packets.map(|packets| Counter { packets, bytes: packets * 60 }),
        }
    }

    pub(super) fn look(packets: &[Option<u64>]) -> CounterSnapshot {
        let rules = (1..).zip(packets).map(|(number, packets)| rule("ISTIO_OUTPUT", number, *packets));
        CounterSnapshot { rules: rules.collect() }
    }

    #[test]
    fn only_what_counted_is_news() {
        let before = look(&[Some(1), Some(5), None]);
        assert_eq!(before.since(&before), CounterUpdate::Counted(Vec::new()));
        let after = look(&[Some(1), Some(7), None]);
        let added = Counter { packets: 2, bytes: 120 };
        assert_eq!(after.since(&before), CounterUpdate::Counted(vec![(1, added)]));
        assert_eq!(after.without_counter(), 1);
    }

    #[test]
    fn counting_begins_anew_with_other_rules_and_with_counters_that_went_back() {
        let before = look(&[Some(1), Some(5)]);
        let mut renamed = before.clone();
        renamed.rules[0].text.push('x');
        for other in [look(&[Some(1), Some(4)]), look(&[Some(1)]), look(&[Some(1), None]), renamed] {
            assert_eq!(other.since(&before), CounterUpdate::OtherRules, "{other:?}");
        }
    }
}
