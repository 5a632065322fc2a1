//! Probes of ambient pods whose answers do not come back to the node, by what its connection tracking shows.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use netns_apply::connections::unanswered_probes;
use netns_apply::netns::Netns;
use pod_netns::namespace_of;
use presentation::decision::PodDecision;
use redirect_core::Family;
use redirect_core::ambient::ProbeSources;

use crate::cause::{self, Cause, PodFinding};
use crate::pod::Pod;

/// What keeps answers out that an eBPF program has led to the node through `lo`, if it is 1: the kernel takes the greater one.
const SOURCE_CHECKS: [&str; 2] = ["all", "lo"];

/// The addresses of pods from which no answer came.
#[derive(Debug, Default)]
pub struct LostProbes {
    sources: ProbeSources,
    /// The number of probes to each.
    unanswered: BTreeMap<IpAddr, usize>,
    /// What else the node shows.
    seen: Option<String>,
}

impl LostProbes {
    /// What the node shows whose processes a mounted procfs shows; nothing without the rights to ask its kernel.
    #[must_use]
    pub fn of_node(proc: &Path, sources: ProbeSources) -> Self {
        let read = || Self {
            sources,
            unanswered: unanswered_probes(sources).unwrap_or_default(),
            seen: strict_source_check(|name| {
                fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter")).ok()
            }),
        };
        let host = Netns::open(namespace_of(proc, 1));
        host.ok().and_then(|host| host.run(read).ok()).unwrap_or_default()
    }

    /// Adds to what was found about a pod that its probes get no answer.
    pub fn add(&self, pod: &Pod, decided: &PodDecision, all: &mut Vec<PodFinding>) {
        if !matches!(decided, PodDecision::Ambient(..)) {
            return;
        }
        let lost = |address: &IpAddr| {
            let count = self.unanswered.get(address)?;
            Some(format!("{count} from {} to {address}", self.sources.of(Family::of(address))))
        };
        let mut seen: Vec<String> = pod.addresses.iter().filter_map(lost).collect();
        if !seen.is_empty() {
            seen.extend(self.seen.clone());
        }
        cause::merge(all, Cause::ProbesUnanswered, seen);
    }
}

fn strict_source_check(read: impl Fn(&str) -> Option<String>) -> Option<String> {
    let of = |name: &&&str| read(name).and_then(|text| text.trim().parse::<u8>().ok());
    let values: Vec<(&&str, u8)> = SOURCE_CHECKS.iter().filter_map(|name| Some((name, of(&name)?))).collect();
    let (name, value) = values.into_iter().max_by_key(|(_, value)| *value)?;
    (value == 1).then(|| format!("net.ipv4.conf.{name}.rp_filter is 1 on the node"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::NodeConfiguration;

    const SOURCES: ProbeSources = ProbeSources::USUAL;

    fn seen(labels: &str, lost: LostProbes) -> Vec<String> {
        let pod = serde_json::json!({"metadata": {"namespace": "shop", "name": "cart", "labels": {"istio.io/dataplane-mode": labels}}, "spec": {},
            "status": {"podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]}});
        let pod = Pod::from_json(&pod).expect("a pod");
        let node = NodeConfiguration { lost_probes: lost, ..NodeConfiguration::default() };
        let mut all = Vec::new();
        node.add_findings(&pod, &node.decide_without_namespace(&pod), &mut all);
        all.into_iter().filter(|one| one.cause == Cause::ProbesUnanswered).flat_map(|one| one.seen).collect()
    }

    #[test]
    fn pods_of_ambient_mode_whose_probes_get_no_answer_have_a_finding() {
        let lost = |address: &str| LostProbes {
            sources: SOURCES,
            unanswered: BTreeMap::from([(address.parse().expect("an address"), 2)]),
            seen: Some("net.ipv4.conf.lo.rp_filter is 1 on the node".to_owned()),
        };
        assert_eq!(
            seen("ambient", lost("10.1.0.2")),
            ["2 from 169.254.7.127 to 10.1.0.2", "net.ipv4.conf.lo.rp_filter is 1 on the node"]
        );
        let v6 = format!("2 from {} to fd00::2", SOURCES.of(Family::V6));
        assert_eq!(seen("ambient", lost("fd00::2")).first(), Some(&v6));
        assert!(seen("ambient", lost("10.1.0.3")).is_empty(), "another pod's");
        assert!(seen("none", lost("10.1.0.2")).is_empty());
        assert!(seen("ambient", LostProbes::default()).is_empty());
    }

    #[test]
    fn the_greater_check_of_sources_counts() {
        let of = |all: &str, lo: &str| {
            strict_source_check(|name| Some(if name == "all" { all } else { lo }.to_owned()))
        };
        assert!(of("0\n", "1\n").is_some_and(|words| words.contains("conf.lo.rp_filter is 1")));
        assert!(of("1\n", "0\n").is_some_and(|words| words.contains("conf.all.rp_filter is 1")));
        assert_eq!((of("2\n", "1\n"), of("0\n", "0\n"), of("1\n", "2\n")), (None, None, None));
        assert_eq!(strict_source_check(|_| None), None);
    }
}
