//! The keys that the documents name for each autoscaler are keys that it ignores: its rule, as a fact, is applied to each row of the table.

use std::collections::BTreeSet;

use reasons::{TAINT, TAINT_KEYS};

const PAGE: &str = include_str!("../../../docs/concepts/taint.md");

/// Which taints an autoscaler leaves out when it simulates whether a pod fits on a new node.
struct Rule {
    /// As the table names it.
    autoscaler: &'static str,
    prefixes: &'static [&'static str],
    /// What stands before, and behind, a key that its own settings name; none where its users have no such setting.
    setting: Option<(&'static str, &'static str)>,
}

/// From kubernetes/autoscaler (`utils/taints`) and kubernetes-sigs/karpenter (`scheduling/taints`, `state/statenode`). Karpenter ignores taints
/// only of nodes that it has not yet called initialized, and of `startupTaints` those with the same effect.
const RULES: [Rule; 4] = [
    Rule {
        autoscaler: "Cluster Autoscaler",
        prefixes: OF_CLUSTER_AUTOSCALER,
        setting: Some(("--startup-taint=", "")),
    },
    Rule { autoscaler: "GKE, AKS", prefixes: OF_CLUSTER_AUTOSCALER, setting: None },
    Rule {
        autoscaler: "Karpenter",
        prefixes: &[],
        setting: Some(("startupTaints: [{key: ", ", effect: NoSchedule}]")),
    },
    Rule {
        autoscaler: "Karpenter after 1.12",
        prefixes: &["readiness.k8s.io/"],
        setting: Some(("startupTaints: [{key: ", ", effect: NoSchedule}]")),
    },
];
const OF_CLUSTER_AUTOSCALER: &[&str] = &[
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
    "status-taint.cluster-autoscaler.kubernetes.io/",
];

impl Rule {
    fn ignores(&self, key: &str, settings: &[String]) -> bool {
        let is_set = |(before, behind): (&str, &str)| {
            let named =
                |setting: &String| setting.strip_prefix(before)?.strip_suffix(behind).map(str::to_owned);
            settings.iter().filter_map(named).any(|named| named == key)
        };
        self.prefixes.iter().any(|prefix| key.starts_with(prefix)) || self.setting.is_some_and(is_set)
    }
}

/// The texts between backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The table's rows: autoscaler, key, settings.
fn rows() -> Vec<(String, String, Vec<String>)> {
    let (_, rest) = PAGE.split_once("<!-- taint-keys -->").expect("the table");
    let (table, _) = rest.split_once("<!-- end -->").expect("its end");
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [autoscaler, key, known_by] = cells[..] else { panic!("{line}") };
        let key = quoted(key).pop().expect("a key");
        (autoscaler.to_owned(), key, quoted(known_by))
    };
    rows.map(row).collect()
}

#[test]
fn every_documented_key_is_one_that_its_autoscaler_ignores() {
    let rows = rows();
    for (autoscaler, key, settings) in &rows {
        let rule = RULES.iter().find(|rule| rule.autoscaler == autoscaler).expect(autoscaler);
        assert!(rule.ignores(key, settings), "{autoscaler}: {key} with {settings:?}");
        // What the row says about settings is needed.
        assert_eq!(rule.ignores(key, &[]), settings.is_empty(), "{autoscaler}: {key}");
    }
    let names = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    let documented: BTreeSet<String> = rows.iter().map(|(autoscaler, ..)| autoscaler.clone()).collect();
    assert_eq!(documented, names(RULES.iter().map(|rule| rule.autoscaler).collect()));
    let keys: BTreeSet<String> = rows.into_iter().map(|(_, key, _)| key).collect();
    assert_eq!(keys, names(TAINT_KEYS.to_vec()));
}

/// Why there is a table at all.
#[test]
fn the_usual_key_needs_a_setting_everywhere() {
    for rule in RULES {
        assert!(!rule.ignores(TAINT, &[]), "{}", rule.autoscaler);
    }
}
