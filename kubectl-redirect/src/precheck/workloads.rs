//! What precheck says of what runs in the cluster: network plugins, an agent of the mesh, autoscalers.

use std::collections::BTreeMap;

use super::facts::{AGENT, SYSTEM, named};
use super::{CheckResult, ClusterFacts, NamedCheck};
use crate::CommandFailure;
use crate::objects::{ConfigMap, DaemonSet};
use k8s_openapi::api::core::v1::Container;
use redirect_core::values::parse_bool;

/// A variable that only this project's agent is given.
const OURS: &str = "SETTINGS_DIR";
/// Variables of Istio's agent that this project's agent takes and does not use, as docs/reference/agent.md lists them.
const UNUSED: [&str; 9] = [
    "ALLOW_SWITCH_TO_HOST_NS",
    "AMBIENT_DISABLE_SAFE_UPGRADE",
    "AMBIENT_RECONCILE_POD_RULES_ON_STARTUP",
    "CURRENT_AGENT_VERSION",
    "ENABLE_AMBIENT_DETECTION_RETRY",
    "FORCE_IPTABLES_BINARY",
    "GOMAXPROCS",
    "GOMEMLIMIT",
    "REPAIR_RUN_AS_DAEMON",
];
/// Network plugins by their DaemonSets, and what to know of them.
const PLUGINS: [(&str, &str); 16] = [
    ("calico-node", "Calico"),
    ("canal", "Calico with Flannel"),
    ("cilium", "Cilium"),
    ("anetd", "GKE Dataplane V2, which is Cilium"),
    ("kube-flannel-ds", "Flannel"),
    ("kube-flannel", "Flannel"),
    ("aws-node", "Amazon VPC CNI, which rewrites its list at each start; the agent restores its entry"),
    ("azure-cns", "Azure CNI"),
    ("azure-cni", "Azure CNI"),
    ("netd", "GKE's plugin"),
    ("kindnet", "kindnet"),
    ("antrea-agent", "Antrea"),
    ("kube-router", "kube-router"),
    ("weave-net", "Weave Net"),
    ("ovnkube-node", "OVN-Kubernetes"),
    ("kube-multus-ds", "Multus, which reads its own directory (docs/get-started/platforms.md)"),
];
/// The label of ztunnel's DaemonSet, in Istio's chart and others.
const ZTUNNEL: (&str, &str) = ("app", "ztunnel");
/// Autoscalers by their Deployments, and the setting that announces a taint which the agent removes.
const AUTOSCALERS: [(&str, &str); 2] = [
    (
        "cluster-autoscaler",
        "--startup-taint=cni.istio.io/not-ready, or nodeTaint.key=startup-taint.cluster-autoscaler.kubernetes.io/istio-cni-not-ready",
    ),
    ("karpenter", "startupTaints of each NodePool"),
];

/// The network plugin.
pub(super) fn network(facts: &ClusterFacts) -> Vec<NamedCheck> {
    let sets = match &facts.daemon_sets {
        Ok(sets) => sets,
        Err(why) => return vec![NamedCheck::of("network-plugin", Err(why))],
    };
    let known = PLUGINS.iter().filter(|(name, _)| sets.iter().any(|set| set.metadata.name == *name));
    let known: Vec<&str> = known.map(|(_, words)| *words).collect();
    let known = if known.is_empty() {
        "none that is known by its DaemonSet; the agent edits any valid configuration list".to_owned()
    } else {
        known.join("; ")
    };
    let mut all = vec![NamedCheck::of("network-plugin", Ok(CheckResult::ok(known)))];
    if sets.iter().any(|set| set.metadata.name == "cilium") {
        all.push(NamedCheck::of("cilium", cilium(&facts.cilium)));
    }
    let agent = named(sets, AGENT, &facts.namespace.0);
    let agent = agent.map(|set| settings(set, facts.agent.as_ref().ok())).unwrap_or_default();
    all.extend(named(sets, "aws-node", SYSTEM).and_then(|set| amazon(set, &agent)));
    all
}

fn cilium(config: &Result<Option<ConfigMap>, CommandFailure>) -> Result<CheckResult, &CommandFailure> {
    let Some(config) = config.as_ref()? else {
        return Ok(CheckResult::warning("no ConfigMap cilium-config", ADVICE));
    };
    let is = |key: &str, value: &str| config.data.get(key).is_some_and(|text| text == value);
    let mut wrong = Vec::new();
    if !is("cni-exclusive", "false") {
        wrong.push("cni-exclusive is not \"false\": Cilium removes other plugins from its configuration");
    }
    let balances_sockets = !is("kube-proxy-replacement", "false") || !is("bpf-lb-sock", "false");
    if balances_sockets && !is("bpf-lb-sock-hostns-only", "true") {
        wrong.push("bpf-lb-sock-hostns-only is not \"true\": with socket load balancing, rules of pods see rewritten destinations");
    }
    Ok(match wrong.first() {
        None => CheckResult::ok("allows chained plugins, and keeps socket load balancing out of pods"),
        Some(first) if first.starts_with("cni-exclusive") => CheckResult::failed(wrong.join("; "), ADVICE),
        Some(_) => CheckResult::warning(wrong.join("; "), ADVICE),
    })
}

const ADVICE: &str = "install Cilium with cni.exclusive=false and socketLB.hostNamespaceOnly=true";

/// Security groups of pods: where they give pods branch interfaces, probes need the way through the pods' veth interfaces.
fn amazon(set: &DaemonSet, agent: &BTreeMap<&str, &str>) -> Option<NamedCheck> {
    let mut variables = variables(set);
    variables.extend(variables_of(&set.spec.template.spec.init_containers));
    let is = |name: &str, value: &str| variables.get(name).is_some_and(|text| *text == value);
    if !is("ENABLE_POD_ENI", "true") || is("POD_SECURITY_GROUP_ENFORCING_MODE", "standard") {
        return None;
    }
    let routes = agent.get("AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE").and_then(|text| parse_bool(text).ok());
    let found = if !is("DISABLE_TCP_EARLY_DEMUX", "true") {
        CheckResult::warning(
            "pods may have branch interfaces, and DISABLE_TCP_EARLY_DEMUX is not true: the kubelet's probes do not reach them",
            "set DISABLE_TCP_EARLY_DEMUX=true in init container aws-vpc-cni-init of DaemonSet aws-node, as Amazon documents",
        )
    } else if is_ambient(agent) && routes == Some(false) {
        CheckResult::warning(
            "pods may have branch interfaces, and AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE is false: the kubelet's probes do not reach those in ambient mode",
            "omit AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE, or set POD_SECURITY_GROUP_ENFORCING_MODE=standard in DaemonSet aws-node",
        )
    } else {
        CheckResult::ok(
            "pods may have branch interfaces, which the agent gives routes for probes in ambient mode",
        )
    };
    Some(NamedCheck::of("security-groups", Ok(found)))
}

fn variables(set: &DaemonSet) -> BTreeMap<&str, &str> {
    variables_of(set.containers()).collect()
}

fn variables_of(containers: &[Container]) -> impl Iterator<Item = (&str, &str)> {
    let all = containers.iter().flat_map(|container| container.env.iter().flatten());
    all.map(|variable| (variable.name.as_str(), variable.value.as_deref().unwrap_or_default()))
}

/// Whether a DaemonSet is this project's agents.
pub(crate) fn is_ours(set: &DaemonSet) -> bool {
    variables(set).contains_key(OURS)
}

/// Whether an image is from Istio's own registries, as the chart recognizes them.
fn is_istios(image: &str) -> bool {
    let image = image.to_lowercase();
    let on_docker = ["registry-1.docker.io/", "index.docker.io/", "docker.io/"];
    let path = on_docker.into_iter().find_map(|host| image.strip_prefix(host)).unwrap_or(&image);
    let begins = ["istio/", "registry.istio.io/"].iter().any(|begin| path.starts_with(begin));
    begins || image.strip_prefix("gcr.io/istio-").is_some_and(|rest| rest.contains('/'))
}

/// ztunnel, by the label of its chart, in any namespace and by any name: for a cluster that has it, or an agent that needs it.
pub(super) fn ztunnel(facts: &ClusterFacts) -> Option<NamedCheck> {
    let (key, value) = ZTUNNEL;
    // If they cannot be listed, the check of the network plugin reports it.
    let sets = facts.daemon_sets.as_ref().ok()?;
    let found = sets.iter().map(|set| &set.metadata).filter(|set| set.has_label(ZTUNNEL));
    let found: Vec<String> = found.map(|set| format!("DaemonSet {}", set.full_name())).collect();
    let agent = named(sets, AGENT, &facts.namespace.0);
    let is_ambient = agent.is_some_and(|set| is_ambient(&settings(set, facts.agent.as_ref().ok())));
    let seen = found.join(", ");
    let found = match (found.is_empty(), is_ambient, agent) {
        (true, false, _) => return None,
        (true, true, _) => CheckResult::failed(
            format!("the agent is in ambient mode, and no DaemonSet has the label {key}={value}"),
            "install ztunnel, in any namespace: without it pods of ambient mode stay pending",
        ),
        (false, false, Some(_)) => CheckResult::warning(
            format!("{seen}; the agent is not in ambient mode, so pods of ambient mode are not enrolled"),
            "set ambient.enabled=true",
        ),
        (false, true, _) => CheckResult::ok(seen),
        (false, false, None) => {
            CheckResult::ok(format!("{seen}; set ambient.enabled=true for pods of ambient mode"))
        }
    };
    Some(NamedCheck::of("ztunnel", Ok(found)))
}

/// An agent's settings: its variables, and those of its ConfigMap.
fn settings<'a>(set: &'a DaemonSet, config: Option<&'a Option<ConfigMap>>) -> BTreeMap<&'a str, &'a str> {
    let mut all = variables(set);
    let data = config.and_then(Option::as_ref).into_iter().flat_map(|config| &config.data);
    all.extend(data.map(|(name, value)| (name.as_str(), value.as_str())));
    all
}

fn is_ambient(settings: &BTreeMap<&str, &str>) -> bool {
    settings.get("AMBIENT_ENABLED").is_some_and(|value| *value == "true")
}

/// An agent of the mesh that exists.
pub(super) fn agent(facts: &ClusterFacts) -> Result<CheckResult, &CommandFailure> {
    let sets = facts.daemon_sets.as_ref()?;
    let Some(set) = named(sets, AGENT, &facts.namespace.0) else {
        return Ok(CheckResult::ok("none"));
    };
    let image = set.containers().first().and_then(|container| container.image.as_deref()).unwrap_or("?");
    let place = format!("{}/{AGENT}, image {image}", set.metadata.namespace);
    if is_ours(set) && is_istios(image) {
        let seen = format!("this project's, with an image of Istio's, which is another program: {place}");
        return Ok(CheckResult::failed(
            seen,
            "set hub and tag to this project's images (docs/reference/images.md)",
        ));
    }
    if is_ours(set) {
        return Ok(CheckResult::ok(format!("this project's: {place}")));
    }
    let settings = settings(set, Some(facts.agent.as_ref()?));
    if set.metadata.namespace != facts.namespace.0 {
        let remedy = format!(
            "two agents would edit the same files: name its namespace with -n {}",
            set.metadata.namespace
        );
        return Ok(CheckResult::failed(format!("Istio's, in another namespace: {place}"), remedy));
    }
    let is_ambient = is_ambient(&settings);
    let unused: Vec<&str> = settings.keys().copied().filter(|name| UNUSED.contains(name)).collect();
    let mode = if is_ambient { ", in ambient mode" } else { "" };
    let seen = format!("Istio's{mode}: {place}; the agent takes its settings");
    let beside = if unused.is_empty() { String::new() } else { format!(", but not {}", unused.join(", ")) };
    let is_of_helm = set.metadata.has_label(("app.kubernetes.io/managed-by", "Helm"));
    let release =
        if is_of_helm { "helm upgrade replaces it node by node" } else { "it belongs to no Helm release" };
    let seen = format!("{seen}{beside}; {release}");
    let hand_over = (!is_of_helm).then_some("hand its objects over first, or remove it");
    let keep_ambient = is_ambient.then_some(
        "set ambient.enabled=true, without which the chart is refused; the agent then takes over the rules of enrolled pods",
    );
    let advice: Vec<&str> = [hand_over, keep_ambient].into_iter().flatten().collect();
    if advice.is_empty() {
        return Ok(CheckResult::ok(seen));
    }
    Ok(CheckResult::warning(seen, format!("{} (docs/get-started/migrate.md)", advice.join("; "))))
}

/// Programs that add nodes, which need to know of a taint that goes.
pub(super) fn autoscalers(facts: &ClusterFacts) -> Result<CheckResult, &CommandFailure> {
    let deployments = facts.deployments.as_ref()?;
    let has = |name: &str| deployments.iter().any(|one| one.metadata.name.contains(name));
    let found: Vec<_> = AUTOSCALERS.iter().filter(|(name, _)| has(name)).collect();
    if found.is_empty() {
        return Ok(CheckResult::ok("none among the Deployments; a provider's own may run elsewhere"));
    }
    let how: Vec<String> = found.iter().map(|(name, how)| format!("{name}: {how}")).collect();
    Ok(CheckResult::ok(format!(
        "to keep pods off new nodes until the agent runs (nodeTaint.enabled=true): {}",
        how.join("; ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_own_manifest_is_recognized() {
        let manifest = include_str!("../../../deploy/istio-cni-node.yaml");
        let (key, value) = reasons::AGENT_LABEL;
        for words in [format!("name: {OURS},"), format!("name: {AGENT}\n"), format!("{key}: {value}")] {
            assert!(manifest.contains(&words), "{words}");
        }
        for (port, _) in super::super::facts::PORTS {
            assert!(manifest.contains(&format!("containerPort: {port}")), "{port}");
        }
    }

    #[test]
    fn unused_settings_are_those_of_the_reference() {
        let page = include_str!("../../../docs/reference/agent.md");
        for name in UNUSED {
            let described = page.split("\n- ").find(|entry| entry.contains(&format!("`{name}`")));
            let is_unused =
                |entry: &str| ["Has no effect", "not implemented"].iter().any(|words| entry.contains(words));
            assert!(described.is_some_and(is_unused), "{name}");
        }
    }
}
