//! What precheck says of nodes: their kernel, their runtime, their platform.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::{CheckResult, NamedCheck};
use crate::CommandFailure;
use crate::objects::ClusterNode;
use crate::terminal::names;

/// The oldest kernel with nf_tables as the agent needs it, and the oldest on which it was run.
const OLDEST: (u32, u32) = (4, 14);
const OLDEST_RUN: (u32, u32) = (5, 10);
/// Architectures of the images.
const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];

/// All checks of nodes.
pub(super) fn checks(nodes: &Result<Vec<ClusterNode>, CommandFailure>) -> Vec<NamedCheck> {
    let nodes = match nodes {
        Ok(nodes) => nodes,
        Err(why) => return vec![NamedCheck::of("nodes", Err(why))],
    };
    let linux: Vec<&ClusterNode> = nodes.iter().filter(|node| is_linux(node)).collect();
    if linux.is_empty() {
        let seen = format!("{} nodes, none with Linux", nodes.len());
        let found = CheckResult::failed(seen, "the agent needs Linux; add such nodes first");
        return vec![NamedCheck::of("nodes", Ok(found))];
    }
    let mut all = vec![
        NamedCheck::of("system", Ok(system(&linux, nodes.len()))),
        NamedCheck::of("ready", Ok(ready(&linux))),
        NamedCheck::of("kernel", Ok(kernel(&linux))),
        NamedCheck::of("runtime", Ok(runtime(&linux))),
        NamedCheck::of("platform", Ok(platform(&linux))),
        NamedCheck::of("families", Ok(families(&linux))),
    ];
    all.extend(serverless(nodes));
    all
}

fn is_linux(node: &ClusterNode) -> bool {
    node.status.node_info.operating_system == "linux"
}

/// Names of the nodes for which something holds.
fn those(nodes: &[&ClusterNode], is: impl Fn(&ClusterNode) -> bool) -> Vec<String> {
    nodes.iter().filter(|node| is(node)).map(|node| node.metadata.name.clone()).collect()
}

/// The distinct values of something, with how often it occurs.
fn counted(nodes: &[&ClusterNode], value: impl Fn(&ClusterNode) -> String) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for node in nodes {
        *counts.entry(value(node)).or_default() += 1;
    }
    counts.iter().map(|(value, count)| format!("{value} ({count})")).collect::<Vec<_>>().join(", ")
}

fn system(linux: &[&ClusterNode], all: usize) -> CheckResult {
    let strange = those(linux, |node| !ARCHITECTURES.contains(&node.status.node_info.architecture.as_str()));
    if !strange.is_empty() {
        return CheckResult::failed(
            format!("no image for the architecture of {}", names(&strange)),
            "keep the agent and mesh pods off these nodes (affinity), or build the programs for them",
        );
    }
    let others = all - linux.len();
    let beside = if others > 0 { format!("; {others} others get no agent") } else { String::new() };
    CheckResult::ok(format!(
        "Linux, {}{beside}",
        counted(linux, |node| node.status.node_info.architecture.clone())
    ))
}

/// Nodes that the kubelet does not report as ready, or that do not report at all.
fn ready(linux: &[&ClusterNode]) -> CheckResult {
    let is_ready = |node: &ClusterNode| {
        let conditions = &node.status.conditions;
        conditions.iter().find(|one| one.type_ == "Ready").is_none_or(|ready| ready.status == "True")
    };
    let not_ready = those(linux, |node| !is_ready(node));
    let Some(first) = not_ready.first() else { return CheckResult::ok("all") };
    CheckResult::warning(
        format!("NotReady: {}", names(&not_ready)),
        format!(
            "kubectl describe node {first} shows why; until then no agent can be asked there, and no pod starts"
        ),
    )
}

fn kernel(linux: &[&ClusterNode]) -> CheckResult {
    let is_below = |than: (u32, u32)| {
        move |node: &ClusterNode| version(&node.status.node_info.kernel_version).is_none_or(|v| v < than)
    };
    let too_old = those(linux, is_below(OLDEST));
    if !too_old.is_empty() {
        return CheckResult::failed(
            format!("older than {}.{}: {}", OLDEST.0, OLDEST.1, names(&too_old)),
            "update these nodes, or keep mesh pods off them: their kernel lacks the nf_tables that rules need",
        );
    }
    let not_run = those(linux, is_below(OLDEST_RUN));
    if !not_run.is_empty() {
        return CheckResult::warning(
            format!(
                "older than {}.{}, the oldest that was tested: {}",
                OLDEST_RUN.0,
                OLDEST_RUN.1,
                names(&not_run)
            ),
            "install on one such node first; docs/concepts/backends.md lists what the kernel needs",
        );
    }
    let oldest = linux.iter().min_by_key(|node| version(&node.status.node_info.kernel_version));
    let oldest = oldest.map_or("", |node| node.status.node_info.kernel_version.as_str());
    CheckResult::ok(format!("{oldest} or newer"))
}

/// The first two numbers of a version.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim_start_matches('v').split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn runtime(linux: &[&ClusterNode]) -> CheckResult {
    let of = |node: &ClusterNode| node.status.node_info.container_runtime_version.clone();
    let seen = counted(linux, of);
    let is = |name: &'static str| move |node: &ClusterNode| of(node).starts_with(name);
    let docker = those(linux, is("docker://"));
    if !docker.is_empty() {
        return CheckResult::warning(
            format!("{seen}: Docker keeps network namespaces elsewhere"),
            "set cniNetnsDir=/var/run/docker/netns, which platform=minikube does",
        );
    }
    let old = those(linux, |node| {
        let text = of(node);
        text.strip_prefix("containerd://").and_then(version).is_some_and(|version| version < (1, 6))
    });
    if !old.is_empty() {
        let seen = format!("containerd older than 1.6, the oldest that was tested: {}", names(&old));
        return CheckResult::warning(seen, "install on one such node first, then run kubectl redirect scan");
    }
    let untested = those(linux, |node| !of(node).starts_with("containerd://"));
    let note = if untested.is_empty() {
        ""
    } else {
        "; only containerd was tested (docs/reference/compatibility.md)"
    };
    CheckResult::ok(format!("{seen}{note}"))
}

fn has_label(node: &ClusterNode, label: &str) -> bool {
    node.metadata.labels.contains_key(label)
}

fn kubelet(node: &ClusterNode, part: &str) -> bool {
    node.status.node_info.kubelet_version.contains(part)
}

/// A platform: its name, the chart's value, and how its nodes are recognized.
type Platform = (&'static str, Option<&'static str>, fn(&ClusterNode) -> bool);

const PLATFORMS: [Platform; 9] = [
    ("GKE", Some("gke"), |node| kubelet(node, "-gke.")),
    ("OpenShift", Some("openshift"), |node| has_label(node, "node.openshift.io/os_id")),
    ("MicroK8s", Some("microk8s"), |node| has_label(node, "microk8s.io/cluster")),
    ("minikube", Some("minikube"), |node| has_label(node, "minikube.k8s.io/name")),
    // k3d's nodes are containers with k3s in them, and so called.
    ("k3d", Some("k3d"), |node| kubelet(node, "+k3s") && node.metadata.name.starts_with("k3d-")),
    ("k3s", Some("k3s"), |node| kubelet(node, "+k3s")),
    ("RKE2", None, |node| kubelet(node, "+rke2")),
    ("EKS", None, |node| kubelet(node, "-eks-")),
    ("AKS", None, |node| has_label(node, "kubernetes.azure.com/cluster")),
];

fn platform(linux: &[&ClusterNode]) -> CheckResult {
    let found = PLATFORMS.iter().find(|(.., is)| linux.iter().any(|node| is(node)));
    CheckResult::ok(match found {
        Some((name, Some(value), _)) => format!("{name}: install with --set platform={value}"),
        Some((name, None, _)) => {
            format!("{name}: needs no platform value; docs/get-started/platforms.md has notes")
        }
        None => "none that needs a platform value".to_owned(),
    })
}

/// Pods have addresses of the families that nodes have. Where that is IPv4 alone, their IPv6 is open, as under Istio's plugin.
fn families(linux: &[&ClusterNode]) -> CheckResult {
    let has_v6 = |node: &ClusterNode| {
        let internal = node.status.addresses.iter().filter(|address| address.type_ == "InternalIP");
        internal.filter_map(|address| address.address.parse::<IpAddr>().ok()).any(|address| address.is_ipv6())
    };
    let without = those(linux, |node| !has_v6(node));
    if without.is_empty() {
        return CheckResult::ok(
            "nodes with IPv6: settings decide whether a pod's is captured (ISTIO_DUAL_STACK, strictCapture)",
        );
    }
    CheckResult::ok(format!(
        "no IPv6 on {}: pods keep link-local IPv6 past the proxy unless it is off (net.ipv6.conf.all.disable_ipv6=1) or strictCapture is on",
        names(&without)
    ))
}

/// Nodes that run no DaemonSet.
fn serverless(nodes: &[ClusterNode]) -> Option<NamedCheck> {
    let all: Vec<&ClusterNode> = nodes.iter().collect();
    let labels = [("eks.amazonaws.com/compute-type", "fargate"), ("type", "virtual-kubelet")];
    let found = those(&all, |node| labels.into_iter().any(|label| node.metadata.has_label(label)));
    (!found.is_empty()).then(|| {
        let found = CheckResult::warning(
            format!("nodes that run no agent: {}", names(&found)),
            "mesh pods there need istio-init, with the image proxy-init (docs/reference/images.md)",
        );
        NamedCheck::of("serverless", Ok(found))
    })
}

#[cfg(test)]
mod tests {
    use super::super::CheckOutcome;
    use super::*;
    use serde_json::json;

    fn node(name: &str, kernel: &str, runtime: &str, architecture: &str) -> ClusterNode {
        let node = json!({"metadata": {"name": name}, "status": {"nodeInfo": {"kernelVersion": kernel, "operatingSystem": "linux",
            "architecture": architecture, "containerRuntimeVersion": runtime, "kubeletVersion": "v1.34.4"}}});
        serde_json::from_value(node).expect("a node")
    }

    fn outcome(nodes: Vec<ClusterNode>, name: &str) -> (CheckOutcome, String) {
        let all = checks(&Ok(nodes));
        let check = all.iter().find(|check| check.name == name).expect("this check");
        (check.outcome, check.seen.clone())
    }

    #[test]
    fn kernels_are_judged_by_what_was_run() {
        let with = |kernel: &str| {
            outcome(
                vec![
                    node("a", "6.1.0", "containerd://1.7", "amd64"),
                    node("b", kernel, "containerd://1.7", "amd64"),
                ],
                "kernel",
            )
        };
        assert_eq!(with("5.10.0-46-amd64"), (CheckOutcome::Ok, "5.10.0-46-amd64 or newer".to_owned()));
        assert_eq!(with("4.18.0-553.el8").0, CheckOutcome::Warning);
        let (verdict, seen) = with("3.10.0-1160.el7");
        assert!(verdict == CheckOutcome::Failed && seen.ends_with(": b"), "{seen}");
        assert_eq!(with("?").0, CheckOutcome::Failed);
    }

    #[test]
    fn nodes_that_are_not_ready_are_named() {
        let with = |status: &str| {
            let json = json!({"metadata": {"name": "b"}, "status": {"nodeInfo": {"operatingSystem": "linux"},
                "conditions": [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": status}]}});
            let other = serde_json::from_value(json).expect("a node");
            outcome(vec![node("a", "6.1.0", "containerd://2.0", "amd64"), other], "ready")
        };
        assert_eq!(with("True").0, CheckOutcome::Ok);
        for status in ["False", "Unknown"] {
            assert_eq!(with(status), (CheckOutcome::Warning, "NotReady: b".to_owned()));
        }
    }

    #[test]
    fn runtimes_and_architectures_are_judged() {
        let with = |runtime: &str| outcome(vec![node("a", "6.1.0", runtime, "amd64")], "runtime").0;
        assert_eq!(with("containerd://2.1.9"), CheckOutcome::Ok);
        assert_eq!(with("cri-o://1.31.0"), CheckOutcome::Ok);
        assert_eq!(with("containerd://1.5.0"), CheckOutcome::Warning);
        assert_eq!(with("docker://27.0.0"), CheckOutcome::Warning);
        let of = |architecture: &str| {
            outcome(vec![node("a", "6.1.0", "containerd://2.0", architecture)], "system").0
        };
        assert_eq!((of("arm64"), of("s390x")), (CheckOutcome::Ok, CheckOutcome::Failed));
    }

    #[test]
    fn platforms_are_recognized() {
        let with = |change: fn(&mut ClusterNode)| {
            let mut node = node("a", "6.1.0", "containerd://2.0", "amd64");
            change(&mut node);
            outcome(vec![node], "platform").1
        };
        let kubelet = |node: &mut ClusterNode, version: &str| {
            node.status.node_info.kubelet_version = version.to_owned();
        };
        assert!(with(|_| {}).starts_with("none"));
        let k3s = node_with(kubelet, "v1.33.1+k3s1");
        assert!(outcome(vec![k3s], "platform").1.contains("platform=k3s"));
        assert!(
            with(|node| {
                node.metadata.labels.insert("microk8s.io/cluster".to_owned(), "true".to_owned());
            })
            .contains("platform=microk8s")
        );
    }

    fn node_with(change: impl Fn(&mut ClusterNode, &str), value: &str) -> ClusterNode {
        let mut node = node("a", "6.1.0", "containerd://2.0", "amd64");
        change(&mut node, value);
        node
    }

    #[test]
    fn pods_of_nodes_without_ipv6_have_it_nevertheless() {
        let with = |address: &str| {
            let node = json!({"metadata": {"name": "a"}, "status": {"nodeInfo": {"operatingSystem": "linux"}, "addresses": [
                {"type": "Hostname", "address": "fd00::1"}, {"type": "InternalIP", "address": "10.0.0.1"},
                {"type": "InternalIP", "address": address}]}});
            outcome(vec![serde_json::from_value(node).expect("a node")], "families")
        };
        assert!(with("10.0.0.2").1.starts_with("no IPv6 on a: pods keep"), "{:?}", with("10.0.0.2"));
        assert!(with("fd00::2").1.starts_with("nodes with IPv6"), "{:?}", with("fd00::2"));
        assert_eq!(with("").0, CheckOutcome::Ok);
    }

    #[test]
    fn windows_and_fargate_get_no_agent() {
        let mut windows = node("w", "10.0", "containerd://2.0", "amd64");
        windows.status.node_info.operating_system = "windows".to_owned();
        assert_eq!(checks(&Ok(vec![windows.clone()]))[0].outcome, CheckOutcome::Failed);
        let linux = node("a", "6.1.0", "containerd://2.0", "amd64");
        assert_eq!(
            outcome(vec![windows, linux.clone()], "system"),
            (CheckOutcome::Ok, "Linux, amd64 (1); 1 others get no agent".to_owned())
        );
        let mut fargate = linux;
        fargate.metadata.labels.insert("eks.amazonaws.com/compute-type".to_owned(), "fargate".to_owned());
        assert_eq!(outcome(vec![fargate], "serverless").0, CheckOutcome::Warning);
        assert_eq!(checks(&Err(CommandFailure::of("missing right")))[0].outcome, CheckOutcome::Warning);
    }
}
