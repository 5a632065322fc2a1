//! What the generators of the other tests reach: a setting, a match, a target, a chain that none of them makes is not
//! tested by any property.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::generated::{settings, typed::builders};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use redirect_core::{
    AmbientRedirect, RedirectBuilder, RulePlan,
    rule::{Chain, Match, OurChain, Table, Target},
    settings::{Key, Part, RawSettings, Setting, Source},
};
use std::collections::BTreeSet;

/// Gives each variant the word of iptables for it, and lists the words: from one list, so that none can be missing.
macro_rules! words {
    ($type:ident, $words:ident, $word:ident { $($variant:ident $fields:tt => $text:literal,)+ }) => {
        const $words: &[&str] = &[$($text),+];

        /// How iptables writes it, without its value.
        const fn $word(of: &$type) -> &'static str {
            match of {
                $($type::$variant $fields => $text,)+
            }
        }
    };
}

words!(Match, MATCHES, match_word {
    Source(_) => "-s",
    Destination(_) => "-d",
    InInterface(_) => "-i",
    OutInterface(_) => "-o",
    Protocol(_) => "-p",
    SourcePort(_) => "--sport",
    DestinationPort(_) => "--dport",
    DestinationPorts(_) => "--dports",
    TcpFlags(_) => "--tcp-flags",
    Tracked(_) => "--ctstate",
    OwnerUid(_) => "--uid-owner",
    OwnerGid(_) => "--gid-owner",
    Mark(_) => "-m mark",
    ConnMark(_) => "-m connmark",
});

words!(Target, TARGETS, target_word {
    Accept {} => "ACCEPT",
    Drop {} => "DROP",
    Return {} => "RETURN",
    Jump(_) => "-j CHAIN",
    Redirect(_) => "REDIRECT",
    Tproxy { .. } => "TPROXY",
    SetMark(_) => "MARK",
    SaveMark {} => "CONNMARK --save-mark",
    RestoreMark {} => "CONNMARK --restore-mark",
    SetConnMark(_) => "CONNMARK --set-xmark",
    ConntrackZone(_) => "CT --zone",
});

/// How many values are made: each of the rarest things below is in one of twenty.
const MADE: usize = 1000;

/// The same values in every run.
fn values<T>(strategy: &impl Strategy<Value = T>) -> impl Iterator<Item = T> {
    let mut runner = TestRunner::deterministic();
    (0..MADE).map(move |_| strategy.new_tree(&mut runner).unwrap().current())
}

fn of_a_plan() -> BTreeSet<Key> {
    Setting::ALL.iter().filter(|setting| setting.part == Part::Plan).map(|setting| setting.key).collect()
}

/// That everything there is occurs in these plans.
fn assert_reached(plans: &[RulePlan]) {
    let rules = || plans.iter().flat_map(RulePlan::planned_rules);
    let matches: BTreeSet<&str> =
        rules().flat_map(|planned| &planned.rule().matches).map(match_word).collect();
    assert_eq!(matches, MATCHES.iter().copied().collect(), "matches");
    let targets: BTreeSet<&str> = rules().map(|planned| target_word(&planned.rule().target)).collect();
    assert_eq!(targets, TARGETS.iter().copied().collect::<BTreeSet<_>>(), "targets");
    let chains: BTreeSet<OurChain> = rules()
        .filter_map(|planned| if let Chain::Ours(chain) = planned.chain() { Some(*chain) } else { None })
        .collect();
    let of_ambient_mode_alone = |chain: &OurChain| *chain == OurChain::Prerouting;
    let wanted = OurChain::ALL.iter().copied().filter(|chain| !of_ambient_mode_alone(chain));
    assert_eq!(chains, wanted.collect(), "chains");
    let tables: BTreeSet<Table> = rules().map(redirect_core::plan::PlannedRule::table).collect();
    assert_eq!(tables, Table::ALL.iter().copied().collect(), "tables");
}

#[test]
fn generated_settings_reach_everything() {
    let made: Vec<_> = values(&settings()).collect();
    let said: BTreeSet<Key> = made.iter().flat_map(|settings| &settings.said).map(|(key, _)| *key).collect();
    assert_eq!(said, of_a_plan());
    assert_reached(&made.iter().map(crate::generated::Settings::plan).collect::<Vec<_>>());
}

#[test]
fn every_setting_of_ambient_mode_is_behind_a_rule_or_a_family() {
    let plan = |said: &[(Key, &'static str)]| {
        let mut raw = RawSettings::new();
        said.iter().for_each(|(key, text)| raw.set(*key, *text, Source::Default));
        AmbientRedirect::parse(&raw).unwrap().plan()
    };
    let all = [
        plan(&[(Key::AmbientDnsCapture, "true"), (Key::AmbientVirtualInterfaces, "eth1")]),
        plan(&[(Key::AmbientDnsOverride, "true")]),
        plan(&[
            (Key::AmbientCaptureScope, "true"),
            (Key::AmbientOutboundRanges, "10.0.0.0/8"),
            (Key::AmbientOutboundExcludeRanges, "10.1.0.0/16"),
            (Key::AmbientOutboundPorts, "80"),
            (Key::AmbientOutboundExcludePorts, "3306"),
            (Key::AmbientInboundPorts, "*"),
            (Key::AmbientInboundExcludePorts, "22"),
            (Key::AmbientExcludeInterfaces, "eth2"),
        ]),
        plan(&[(Key::AmbientCaptureScope, "true"), (Key::AmbientInboundPorts, "80")]),
    ];
    let rules = || all.iter().flat_map(RulePlan::planned_rules);
    let behind: BTreeSet<Key> = rules().map(redirect_core::plan::PlannedRule::setting).collect();
    // Whether owners of pods may limit what is captured stands behind no rule of its own.
    let without_rule = [Key::AmbientIpv6, Key::AmbientCaptureScope];
    let wanted = Setting::AMBIENT.iter().map(|setting| setting.key).filter(|key| !without_rule.contains(key));
    assert_eq!(behind, wanted.collect());
    let tables: BTreeSet<Table> = rules().map(redirect_core::plan::PlannedRule::table).collect();
    assert_eq!(tables, Table::ALL.iter().copied().collect());
    let families = [plan(&[]), plan(&[(Key::AmbientIpv6, "false")])].map(|plan| plan.families().len());
    assert_eq!(families, [2, 1]);
}

#[test]
fn generated_builders_reach_everything() {
    let built: Vec<_> = values(&builders()).map(RedirectBuilder::build).collect();
    let valid: Vec<_> = built.iter().filter_map(|built| built.as_ref().ok()).collect();
    assert!(valid.len() > MADE / 4 && valid.len() < MADE, "{} are valid", valid.len());
    let set: BTreeSet<Key> = Key::ALL
        .iter()
        .copied()
        .filter(|key| valid.iter().any(|redirect| redirect.source(*key) != Source::Default))
        .collect();
    // Families and ids are given as such: nothing is left to look up. What has a setter of the usual making is reached by
    // its text, above; a setter written by hand takes more than text can say.
    let looked_up = [Key::DualStack, Key::ProxyUser];
    let exempt = |key: &Key| looked_up.contains(key) || RedirectBuilder::PLAIN.contains(key);
    let wanted: BTreeSet<Key> = of_a_plan().into_iter().filter(|key| !exempt(key)).collect();
    assert!(set.is_superset(&wanted), "{:?} are not set", wanted.difference(&set));
    assert!(RedirectBuilder::PLAIN.len() + looked_up.len() + wanted.len() == of_a_plan().len());
    assert_reached(&valid.iter().map(|redirect| redirect.plan()).collect::<Vec<_>>());
}
