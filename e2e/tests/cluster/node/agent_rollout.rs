//! The agent's DaemonSet under Kubernetes' own controllers, on a real node: as Istio's chart starts it, and while it rolls under load.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::agent_support::{
    DAEMON_SET, GATEWAY, IMAGE, LOOPBACK, MANIFEST, NAMESPACE, PATIENT_ENTRY, POD, apply_manifest,
    assert_redirected, chart, current_agent, ensure_none_failed_or_bypassed, entries, import_image,
    import_image_as, run_dir, wait_loaded, wait_rolled_out, with_server,
};
use anyhow::{Context, Result, ensure};
use e2e::kube::{ApiServer, Controllers};
use e2e::node::{Node, plain_pod, sidecar_pod};
use serde_json::json;
use test_support::process::until;
use test_support::sample;

/// Runs `change` and meanwhile looks all the time whether the plugin and its entry are there.
fn while_plugin_stays<T>(node: &Node<'_>, change: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let looks = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                ensure!(entries(node)?.contains("\"istio-cni\""), "the entry went");
                ensure!(node.bin_dir().join("istio-cni").exists(), "the plugin went");
                ensure!(run_dir(node).join("istio-cni-kubeconfig").exists(), "the kubeconfig went");
                thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        });
        let changed = change();
        done.store(true, Ordering::Relaxed);
        looks.join().map_err(|_| anyhow::anyhow!("the looks panicked"))??;
        changed
    })
}

/// How the mesh is taken out of the cluster.
#[derive(Clone, Copy, PartialEq)]
enum Removal {
    /// As Helm does it: the DaemonSet first, then bindings and roles, then the rest, without waiting.
    AsHelm,
    /// The DaemonSet without its pods, then these: nobody makes others.
    Orphans,
}

fn remove(api: &ApiServer, removal: Removal) -> Result<()> {
    let kubectl = |words: &[&str]| api.kubectl(&[words, &["--wait=false"]].concat()).map(drop);
    match removal {
        Removal::AsHelm => {
            kubectl(&["-n", NAMESPACE, "delete", "daemonset", DAEMON_SET])?;
            let names = ["istio-cni", "istio-cni-repair-rolebinding"];
            kubectl(&[&["delete", "clusterrolebinding"], &names[..]].concat())?;
            kubectl(&["delete", "clusterrole", "istio-cni", "istio-cni-repair-role"])?;
            kubectl(&["-n", NAMESPACE, "delete", "configmap", "istio-cni-config"])?;
            kubectl(&["-n", NAMESPACE, "delete", "serviceaccount", "istio-cni"])
        }
        Removal::Orphans => {
            kubectl(&["-n", NAMESPACE, "delete", "daemonset", DAEMON_SET, "--cascade=orphan"])?;
            until("the pod to be an orphan", POD, &[], || {
                let pods = api.list("pods", NAMESPACE)?;
                Ok(pods.iter().all(|pod| pod["metadata"]["ownerReferences"].is_null()).then_some(()))
            })?;
            kubectl(&["-n", NAMESPACE, "delete", "pods", "--all"])
        }
    }
}

#[test]
fn under_istios_chart_the_agent_is_ready_redirects_upgrades_and_uninstalls() -> Result<()> {
    let api = ApiServer::start()?;
    let controllers = Controllers::start(&api)?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let before = entries(&node)?;
    for (name, host_network, removal) in [("pods", false, Removal::AsHelm), ("host", true, Removal::Orphans)]
    {
        let server = if host_network { LOOPBACK } else { GATEWAY };
        if !host_network {
            // The gateway's address is there as soon as a pod is.
            node.start_pod(&plain_pod("first"))?.wait_running(POD)?;
        }
        apply_manifest(&api, &node, &with_server(&chart(host_network), server, api.port()))?;
        let pod = wait_rolled_out(&api, &node, &controllers)?;
        let agent = pod["metadata"]["name"].as_str().context("no name")?;
        let log = node.pod(NAMESPACE, agent).log("install-cni")?;
        for part in ["may not get DaemonSet istio-cni-node", "the plugin uses the agent's own token"] {
            ensure!(log.contains(part), "{part}\n{log}");
        }
        let meshed = node.start_pod(&sidecar_pod(&format!("{name}-meshed")))?;
        meshed.wait_running(POD)?;
        assert_redirected(&node, &meshed)?;

        let rolled = while_plugin_stays(&node, || {
            api.kubectl(&["-n", NAMESPACE, "rollout", "restart", "daemonset", DAEMON_SET])?;
            until("the agent to be gone", POD, &controllers.processes(), || {
                let pods = api.list("pods", NAMESPACE)?;
                Ok(pods.iter().all(|pod| pod["metadata"]["name"] != *agent).then_some(()))
            })?;
            node.start_pod(&sidecar_pod(&format!("{name}-between")))?;
            wait_rolled_out(&api, &node, &controllers)
        })?;
        // The plugin has the agent's token, so this pod may have had to wait, but not to bypass the proxy.
        let between = node.pod("default", &format!("{name}-between"));
        between.wait_running(POD)?;
        assert_redirected(&node, &between)?;
        ensure!(rolled["metadata"]["name"] != *agent, "nothing rolled");
        let after = node.start_pod(&sidecar_pod(&format!("{name}-after")))?;
        after.wait_running(POD)?;
        assert_redirected(&node, &after)?;

        remove(&api, removal)?;
        until("the agent to end", POD, &controllers.processes(), || {
            Ok(api.list("pods", NAMESPACE)?.is_empty().then_some(()))
        })?;
        assert_eq!(entries(&node)?, before, "the list is as it was, byte for byte");
        ensure!(!node.bin_dir().join("istio-cni").exists(), "the binary is still there");
        ensure!(!run_dir(&node).join("istio-cni-kubeconfig").exists(), "the credentials are still there");
        node.start_pod(&plain_pod(&format!("{name}-plain")))?.wait_running(POD)?;
    }
    Ok(())
}

/// Pods of the mesh, started without a pause until `done`.
struct Load<'n> {
    node: &'n Node<'n>,
    done: AtomicBool,
    started: AtomicUsize,
}

impl Load<'_> {
    /// Two at a time; looks into the namespace of each. Returns their names.
    fn run(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for round in 0.. {
            if self.done.load(Ordering::Relaxed) {
                break;
            }
            let pair = [format!("load-{round}-a"), format!("load-{round}-b")];
            let pods = pair
                .iter()
                .map(|name| self.node.start_pod(&sidecar_pod(name)))
                .collect::<Result<Vec<_>>>()?;
            for pod in &pods {
                pod.wait_running(POD)?;
                ensure!(
                    !pod.namespace()?.state_with_nft()?.is_pristine(),
                    "{} bypasses the proxy",
                    pod.name()
                );
            }
            self.started.fetch_add(pods.len(), Ordering::Relaxed);
            for pod in pods {
                pod.delete(POD)?;
            }
            names.extend(pair);
        }
        Ok(names)
    }

    /// Waits until as many more have started.
    fn more(&self, count: usize) -> Result<()> {
        let enough = self.started.load(Ordering::Relaxed) + count;
        until("more pods to start", POD, &[], || {
            ensure!(!self.done.load(Ordering::Relaxed), "the load has ended");
            Ok((self.started.load(Ordering::Relaxed) >= enough).then_some(()))
        })
    }
}

/// One rollout to an image that the node gets when pods have started without any agent. Returns for how long there was none that was ready.
fn roll(api: &ApiServer, load: &Load<'_>, controllers: &Controllers, round: usize) -> Result<Duration> {
    let image = format!("localhost/install-cni:roll-{round}");
    let container = json!({"name": "install-cni", "image": image});
    let patch = json!({"spec": {"template": {"spec": {"containers": [container]}}}}).to_string();
    let start = Instant::now();
    api.kubectl(&["-n", NAMESPACE, "patch", "daemonset", DAEMON_SET, "-p", &patch])?;
    until("the new agent to wait for its image", POD, &controllers.processes(), || {
        let pod = current_agent(api)?.unwrap_or_default();
        let container = &pod["status"]["containerStatuses"][0];
        let reason = container["state"]["waiting"]["reason"].as_str().unwrap_or_default();
        Ok((container["image"] == image && reason.contains("Pull")).then_some(()))
    })?;
    load.more(4)?;
    load.node.ctr(&["images", "tag", &format!("{IMAGE}-{}", round % 2), &image])?;
    wait_rolled_out(api, load.node, controllers)?;
    let without = start.elapsed();
    load.more(2)?;
    Ok(without)
}

#[test]
fn a_daemon_set_that_rolls_under_load_fails_no_pod_and_lets_none_bypass() -> Result<()> {
    let api = ApiServer::start()?;
    let controllers = Controllers::start(&api)?;
    let node = Node::joined(&api)?;
    for version in ["0", "1"] {
        import_image_as(&node, &format!("{IMAGE}-{version}"), version)?;
    }
    node.ctr(&["images", "tag", &format!("{IMAGE}-1"), IMAGE])?;
    let manifest = with_server(MANIFEST, LOOPBACK, api.port());
    let template = format!("  CHAINED_CNI_PLUGIN: \"true\"\n  CNI_NETWORK_CONFIG: '{PATIENT_ENTRY}'\n");
    apply_manifest(&api, &node, &manifest.replace("  CHAINED_CNI_PLUGIN: \"true\"\n", &template))?;
    wait_rolled_out(&api, &node, &controllers)?;
    wait_loaded(&node)?;

    let load = Load { node: &node, done: AtomicBool::new(false), started: AtomicUsize::new(0) };
    let (names, gaps) = thread::scope(|scope| -> Result<(Vec<String>, Vec<Duration>)> {
        let pods = scope.spawn(|| {
            let names = load.run();
            load.done.store(true, Ordering::Relaxed);
            names
        });
        let rolled = while_plugin_stays(&node, || {
            (0..sample::number("ROLLOUTS", 2))
                .map(|round| roll(&api, &load, &controllers, round))
                .collect::<Result<Vec<_>>>()
        });
        load.done.store(true, Ordering::Relaxed);
        let names = pods.join().map_err(|_| anyhow::anyhow!("the load panicked"))??;
        Ok((names, rolled?))
    })?;

    ensure_none_failed_or_bypassed(&api, &node, &names)?;
    println!(
        "{} rollouts, {} pods started, no ADD failed, none bypassed; from a rollout to the next ready agent {gaps:.1?}",
        gaps.len(),
        names.len()
    );
    Ok(())
}
