//! The checks in their order: each is made of facts alone.

use super::facts::{Needs, PORTS};
use super::{CheckResult, ClusterFacts, NamedCheck, nodes, workloads};
use crate::CommandFailure;
use crate::terminal::{counted, names};

/// What decides whether a namespace allows the agent's pod.
const POD_SECURITY: &str = "pod-security.kubernetes.io/enforce";

/// All of them.
#[must_use]
pub fn all(facts: &ClusterFacts) -> Vec<NamedCheck> {
    let server = CheckResult::ok(format!("Kubernetes {} at {}", facts.server.1, facts.server.0));
    let mut all = vec![
        NamedCheck::of("api-server", Ok(server)),
        NamedCheck::of("rights-to-install", rights(facts, Needs::Installing)),
        NamedCheck::of("rights-to-ask", rights(facts, Needs::Asking)),
    ];
    all.extend(nodes::checks(&facts.nodes));
    all.extend(workloads::network(facts));
    all.extend(workloads::ztunnel(facts));
    all.extend([
        NamedCheck::of("existing-agent", workloads::agent(facts)),
        NamedCheck::of("agent-images", images(facts)),
        NamedCheck::of("ports", ports(facts)),
        NamedCheck::of("namespace", namespace(facts)),
        NamedCheck::of("autoscalers", workloads::autoscalers(facts)),
        NamedCheck::of("broken-pods", broken(facts)),
    ]);
    all
}

fn rights(facts: &ClusterFacts, needs: Needs) -> Result<CheckResult, &CommandFailure> {
    let of = facts.rights.iter().filter(|(who, ..)| *who == needs);
    let mut missing = Vec::new();
    for (_, right, may) in of.clone() {
        if !*may.as_ref()? {
            missing.push(right.to_string());
        }
    }
    if missing.is_empty() {
        return Ok(CheckResult::ok(format!("all {}", of.count())));
    }
    let seen = format!("missing: {}", missing.join(", "));
    Ok(match needs {
        Needs::Installing => {
            CheckResult::failed(seen, "install with an account that has these rights, such as cluster-admin")
        }
        Needs::Asking => CheckResult::warning(
            seen,
            "kubectl redirect needs a role with these rights; pods/exec only in this namespace",
        ),
    })
}

fn ports(facts: &ClusterFacts) -> Result<CheckResult, &CommandFailure> {
    let used = &facts.pods.as_ref()?.ports;
    let taken = PORTS.iter().filter_map(|(port, value)| used.get(port).map(|pods| (port, value, pods)));
    let (mut seen, mut remedy) = (Vec::new(), Vec::new());
    for (port, value, pods) in taken {
        seen.push(format!("{port} is used on nodes by {}", names(pods)));
        remedy.push(format!("{value}=PORT"));
    }
    if seen.is_empty() {
        return Ok(CheckResult::ok("8000 and 15014 are free, as far as pods name their ports"));
    }
    let remedy = format!("install with --set {}, or hostNetwork=false", remedy.join(" --set "));
    Ok(CheckResult::failed(seen.join("; "), remedy))
}

fn namespace(facts: &ClusterFacts) -> Result<CheckResult, &CommandFailure> {
    let (name, object) = &facts.namespace;
    let Some(object) = object.as_ref()? else {
        let seen = format!("{name} does not exist");
        return Ok(CheckResult::warning(seen, "create it, or name that of Istio's control plane with -n"));
    };
    Ok(match object.labels.get(POD_SECURITY).map(String::as_str) {
        Some("privileged") => CheckResult::ok(format!("{name} enforces Pod Security level privileged")),
        None => CheckResult::ok(format!("{name} enforces no Pod Security level by a label of its own")),
        Some(level) => CheckResult::failed(
            format!("{name} enforces Pod Security level {level}, which refuses the agent's host directories"),
            format!("kubectl label --overwrite namespace {name} {POD_SECURITY}=privileged"),
        ),
    })
}

fn images(facts: &ClusterFacts) -> Result<CheckResult, &CommandFailure> {
    let unpulled = &facts.pods.as_ref()?.unpulled;
    let Some((first, why)) = unpulled.iter().next() else {
        return Ok(CheckResult::ok("no agent waits for its image"));
    };
    let all: Vec<String> = unpulled.keys().cloned().collect();
    let count = counted(all.len(), "agent");
    let seen = format!("the image of {count} cannot be pulled: {}: {why}", names(&all));
    let (namespace, name) = first.split_once('/').unwrap_or_default();
    let remedy = format!(
        "correct hub, tag and imagePullSecrets; kubectl -n {namespace} describe pod {name} has the registry's words"
    );
    Ok(CheckResult::failed(seen, remedy))
}

fn broken(facts: &ClusterFacts) -> Result<CheckResult, &CommandFailure> {
    let pods = facts.pods.as_ref()?;
    let (broken, mesh) = (&pods.broken, pods.mesh);
    Ok(if broken.is_empty() {
        CheckResult::ok(format!("{mesh} mesh pods, none of which waits for its redirection"))
    } else {
        CheckResult::warning(
            format!("the validation of {} of {mesh} mesh pods failed: {}", broken.len(), names(broken)),
            "the agent repairs them in place (repair.repairPods, the default); kubectl redirect scan shows the rest",
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{CheckOutcome, PodCounts};
    use super::*;
    use crate::cluster::Right;
    use crate::objects::{DaemonSet, Meta};

    fn right(verb: &'static str, resource: &'static str) -> Right {
        Right { verb, group: "", resource, namespace: None }
    }

    fn sound() -> ClusterFacts {
        let node = json!({"metadata": {"name": "a"}, "status": {"nodeInfo": {"kernelVersion": "6.1.0", "operatingSystem": "linux",
            "architecture": "amd64", "containerRuntimeVersion": "containerd://2.1.9", "kubeletVersion": "v1.34.4"}}});
        ClusterFacts {
            server: ("https://api".to_owned(), "v1.34.4".to_owned()),
            namespace: ("istio-system".to_owned(), Ok(Some(Meta::default()))),
            rights: vec![
                (Needs::Installing, right("create", "configmaps"), Ok(true)),
                (Needs::Asking, right("list", "nodes"), Ok(true)),
            ],
            nodes: Ok(vec![serde_json::from_value(node).expect("a node")]),
            daemon_sets: Ok(Vec::new()),
            deployments: Ok(Vec::new()),
            pods: Ok(PodCounts { mesh: 7, ..PodCounts::default() }),
            cilium: Ok(None),
            agent: Ok(None),
        }
    }

    fn workloads<T: serde::de::DeserializeOwned>(all: Value) -> Vec<T> {
        serde_json::from_value(all).expect("workloads")
    }

    fn agent(image: &str, labels: &Value, env: &Value) -> Vec<DaemonSet> {
        let metadata = json!({"name": "istio-cni-node", "namespace": "istio-system", "labels": labels});
        workloads(
            json!([{"metadata": metadata, "spec": {"template": {"spec": {"containers": [{"image": image, "env": env}]}}}}]),
        )
    }

    /// What a check comes to in a cluster that is sound but for a change.
    fn outcome(name: &str, change: impl FnOnce(&mut ClusterFacts)) -> (CheckOutcome, String) {
        let mut facts = sound();
        change(&mut facts);
        let all = all(&facts);
        let check = all.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("{name}: {all:#?}"));
        assert_eq!(check.remedy.is_none(), check.outcome == CheckOutcome::Ok, "{check:?}");
        (check.outcome, check.seen.clone())
    }

    #[test]
    fn a_sound_cluster_passes_every_check() {
        let all = all(&sound());
        assert!(
            all.iter().all(|check| check.outcome == CheckOutcome::Ok && check.remedy.is_none()),
            "{all:#?}"
        );
        let text = super::super::text(&all, presentation::text_writer::TextLayout::default());
        assert!(text.ends_with("\nthe agent can be installed: 0 failed, 0 warnings, 16 ok\n"), "{text}");
    }

    #[test]
    fn a_missing_right_is_named() {
        let without = |needs: Needs| {
            move |facts: &mut ClusterFacts| {
                for (who, _, may) in &mut facts.rights {
                    *may = Ok(*who != needs);
                }
            }
        };
        assert_eq!(
            outcome("rights-to-install", without(Needs::Installing)),
            (CheckOutcome::Failed, "missing: create configmaps".to_owned())
        );
        assert_eq!(
            outcome("rights-to-ask", without(Needs::Asking)),
            (CheckOutcome::Warning, "missing: list nodes".to_owned())
        );
    }

    #[test]
    fn what_cannot_be_asked_is_a_warning_with_the_reason() {
        let refused = || CommandFailure::of("missing right: list pods");
        let (verdict, seen) = outcome("ports", |facts| facts.pods = Err(refused()));
        assert_eq!(
            (verdict, seen.as_str()),
            (CheckOutcome::Warning, "not checked: missing right: list pods")
        );
        for name in ["network-plugin", "existing-agent"] {
            assert_eq!(outcome(name, |facts| facts.daemon_sets = Err(refused())).0, CheckOutcome::Warning);
        }
        assert_eq!(
            outcome("autoscalers", |facts| facts.deployments = Err(refused())).0,
            CheckOutcome::Warning
        );
        assert_eq!(outcome("namespace", |facts| facts.namespace.1 = Err(refused())).0, CheckOutcome::Warning);
    }

    #[test]
    fn the_namespace_must_allow_the_agent() {
        let level = |level: &'static str| {
            move |facts: &mut ClusterFacts| {
                let labels = [(POD_SECURITY.to_owned(), level.to_owned())].into_iter().collect();
                facts.namespace.1 = Ok(Some(Meta { labels, ..Meta::default() }));
            }
        };
        assert_eq!(outcome("namespace", level("privileged")).0, CheckOutcome::Ok);
        assert_eq!(outcome("namespace", level("baseline")).0, CheckOutcome::Failed);
        assert_eq!(outcome("namespace", |facts| facts.namespace.1 = Ok(None)).0, CheckOutcome::Warning);
    }

    #[test]
    fn ports_of_other_pods_and_broken_pods_are_named() {
        let pods = || vec!["monitoring/exporter".to_owned()];
        let (verdict, seen) = outcome("ports", |facts| {
            facts.pods =
                Ok(PodCounts { ports: [(15014, pods())].into_iter().collect(), ..PodCounts::default() });
        });
        assert_eq!(
            (verdict, seen.as_str()),
            (CheckOutcome::Failed, "15014 is used on nodes by monitoring/exporter")
        );
        let (verdict, seen) = outcome("broken-pods", |facts| {
            facts.pods = Ok(PodCounts { mesh: 3, broken: pods(), ..PodCounts::default() });
        });
        assert!(verdict == CheckOutcome::Warning && seen.contains("1 of 3 mesh pods"), "{seen}");
    }

    #[test]
    fn images_that_cannot_be_pulled_fail() {
        let (verdict, seen) = outcome("agent-images", |facts| {
            let why = "ImagePullBackOff: not found".to_owned();
            let unpulled = [("mesh/b".to_owned(), String::new()), ("mesh/a".to_owned(), why)].into();
            facts.pods = Ok(PodCounts { unpulled, ..PodCounts::default() });
        });
        let wanted = "the image of 2 agents cannot be pulled: mesh/a, mesh/b: ImagePullBackOff: not found";
        assert_eq!((verdict, seen.as_str()), (CheckOutcome::Failed, wanted));
    }

    #[test]
    fn ztunnel_is_known_by_its_label_in_any_namespace() {
        let with = |labels: Value, ambient: &'static str| {
            move |facts: &mut ClusterFacts| {
                let name = json!({"name": "mesh-ztunnel-v2", "namespace": "anywhere", "labels": labels});
                let mut sets: Vec<DaemonSet> = workloads(json!([{"metadata": name}]));
                sets.extend(agent("hub/install-cni:0.1.0", &json!({}), &json!([{"name": "SETTINGS_DIR"}])));
                facts.daemon_sets = Ok(sets);
                facts.agent = Ok(serde_json::from_value(json!({"data": {"AMBIENT_ENABLED": ambient}})).ok());
            }
        };
        let label = || json!({"app": "ztunnel"});
        assert_eq!(
            outcome("ztunnel", with(label(), "true")),
            (CheckOutcome::Ok, "DaemonSet anywhere/mesh-ztunnel-v2".to_owned())
        );
        assert_eq!(outcome("ztunnel", with(label(), "false")).0, CheckOutcome::Warning);
        let (verdict, seen) = outcome("ztunnel", with(json!({"app": "other"}), "true"));
        assert!(verdict == CheckOutcome::Failed && seen.contains("app=ztunnel"), "{seen}");
        let mut facts = sound();
        with(json!({}), "false")(&mut facts);
        assert!(all(&facts).iter().all(|check| check.name != "ztunnel"), "nothing needs it");
    }

    #[test]
    fn ciliums_settings_decide() {
        let with = |data: Value| {
            move |facts: &mut ClusterFacts| {
                facts.daemon_sets =
                    Ok(workloads(json!([{"metadata": {"name": "cilium", "namespace": "kube-system"}}])));
                facts.cilium = Ok(serde_json::from_value(json!({"data": data})).ok());
            }
        };
        for (data, wanted) in [
            (json!({"cni-exclusive": "false", "bpf-lb-sock-hostns-only": "true"}), CheckOutcome::Ok),
            (json!({"cni-exclusive": "false"}), CheckOutcome::Warning),
            // The defaults of its chart: kube-proxy is there, and nothing of sockets is balanced.
            (
                json!({"cni-exclusive": "false", "kube-proxy-replacement": "false", "bpf-lb-sock": "false"}),
                CheckOutcome::Ok,
            ),
            (json!({"cni-exclusive": "false", "kube-proxy-replacement": "false"}), CheckOutcome::Warning),
            (
                json!({"cni-exclusive": "false", "kube-proxy-replacement": "true", "bpf-lb-sock": "false"}),
                CheckOutcome::Warning,
            ),
            (
                json!({"cni-exclusive": "false", "kube-proxy-replacement": "false", "bpf-lb-sock": "true"}),
                CheckOutcome::Warning,
            ),
            (json!({"cni-exclusive": "true", "bpf-lb-sock-hostns-only": "true"}), CheckOutcome::Failed),
            (json!({}), CheckOutcome::Failed),
        ] {
            assert_eq!(outcome("cilium", with(data.clone())).0, wanted, "{data}");
        }
    }

    #[test]
    fn branch_interfaces_need_what_leads_probes_to_them() {
        let with = |mode: &str, early_demux: &str, routes: &str| {
            let env = json!([{"name": "ENABLE_POD_ENI", "value": "true"}, {"name": "POD_SECURITY_GROUP_ENFORCING_MODE", "value": mode}]);
            let mut facts = sound();
            let name = &facts.namespace.0;
            facts.daemon_sets = Ok(workloads(json!([
                {"metadata": {"name": "aws-node"}, "spec": {"template": {"spec": {"containers": [{"env": env}],
                    "initContainers": [{"env": [{"name": "DISABLE_TCP_EARLY_DEMUX", "value": early_demux}]}]}}}},
                {"metadata": {"name": "istio-cni-node", "namespace": name}, "spec": {"template": {"spec": {"containers": [
                    {"env": [{"name": "AMBIENT_ENABLED", "value": "true"}, {"name": "AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE", "value": routes}]}]}}}},
            ])));
            let found = all(&facts).into_iter().find(|check| check.name == "security-groups");
            found.map(|check| (check.outcome, check.remedy.unwrap_or_default()))
        };
        let remedy = |found: Option<(CheckOutcome, String)>| {
            let (outcome, remedy) = found.expect("a check");
            assert_eq!(outcome, CheckOutcome::Warning);
            remedy
        };
        assert_eq!(with("standard", "false", "false"), None);
        assert_eq!(with("strict", "true", "true").map(|found| found.0), Some(CheckOutcome::Ok));
        assert!(remedy(with("strict", "false", "true")).contains("DISABLE_TCP_EARLY_DEMUX=true"));
        assert!(remedy(with("strict", "true", "false")).contains("AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE"));
    }

    #[test]
    fn istios_agent_is_told_from_ours() {
        let with = |sets: Vec<DaemonSet>, data: Value| {
            move |facts: &mut ClusterFacts| {
                facts.daemon_sets = Ok(sets);
                facts.agent = Ok(serde_json::from_value(json!({"data": data})).ok());
            }
        };
        let ours_with = |image: &str| {
            let ours = agent(image, &json!({}), &json!([{"name": "SETTINGS_DIR"}]));
            outcome("existing-agent", with(ours, json!({}))).0
        };
        for image in [
            "istio/install-cni",
            "docker.io/istio/install-cni:1.30.3",
            "gcr.io/istio-release/install-cni:1.30.3",
            "registry.istio.io/release/install-cni@sha256:0",
        ] {
            assert_eq!(ours_with(image), CheckOutcome::Failed, "{image}");
        }
        for image in ["hub.example.com/istio/install-cni:1", "gcr.io/istio/install-cni:1", "istiox/a"] {
            assert_eq!(ours_with(image), CheckOutcome::Ok, "{image}");
        }
        let of_helm = json!({"app.kubernetes.io/managed-by": "Helm"});
        let istio = "docker.io/istio/install-cni:1.30.3";
        let ours = agent("hub/install-cni:0.1.0", &of_helm, &json!([{"name": "SETTINGS_DIR"}]));
        let (verdict, seen) = outcome("existing-agent", with(ours, json!({})));
        assert!(verdict == CheckOutcome::Ok && seen.starts_with("this project's"), "{seen}");
        let (verdict, seen) = outcome(
            "existing-agent",
            with(
                agent(istio, &of_helm, &json!([{"name": "GOMEMLIMIT"}])),
                json!({"AMBIENT_ENABLED": "false", "EXCLUDE_NAMESPACES": "kube-system"}),
            ),
        );
        assert!(
            verdict == CheckOutcome::Ok && seen.contains("but not GOMEMLIMIT;") && !seen.contains("ambient"),
            "{seen}"
        );
        let advice = |sets: Vec<DaemonSet>, data: Value| {
            let mut facts = sound();
            with(sets, data)(&mut facts);
            let check =
                all(&facts).into_iter().find(|check| check.name == "existing-agent").expect("is there");
            assert_eq!(check.outcome, CheckOutcome::Warning, "{check:?}");
            format!("{} {}", check.seen, check.remedy.unwrap_or_default())
        };
        let alone = agent(istio, &json!({}), &json!([]));
        let told = advice(alone.clone(), json!({}));
        assert!(told.contains("hand its objects over first") && !told.contains("ambient"), "{told}");
        let ambient = json!({"AMBIENT_ENABLED": "true", "AMBIENT_RECONCILE_POD_RULES_ON_STARTUP": "true"});
        let told = advice(agent(istio, &of_helm, &json!([])), ambient.clone());
        assert!(told.contains("in ambient mode") && told.contains("set ambient.enabled=true"), "{told}");
        assert!(told.contains("but not AMBIENT_RECONCILE_POD_RULES_ON_STARTUP;"), "{told}");
        assert!(!told.contains("hand its objects over"), "{told}");
        let told = advice(alone, ambient);
        assert!(
            told.contains("hand its objects over first, or remove it; set ambient.enabled=true"),
            "{told}"
        );
        let mut elsewhere = agent(istio, &of_helm, &json!([]));
        elsewhere.iter_mut().for_each(|set| set.metadata.namespace = "kube-system".to_owned());
        assert_eq!(outcome("existing-agent", with(elsewhere, json!({}))).0, CheckOutcome::Failed);
    }

    #[test]
    fn autoscalers_learn_of_the_taint() {
        let with = |facts: &mut ClusterFacts| {
            facts.deployments = Ok(workloads(json!([{"metadata": {"name": "prod-cluster-autoscaler"}}])));
        };
        assert!(outcome("autoscalers", with).1.contains("--startup-taint=cni.istio.io/not-ready"));
    }
}
