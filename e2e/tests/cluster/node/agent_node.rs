//! The node agent on a real node: as its manifest runs it, also with the drift watch, and under a loop of pod starts while it is restarted,
//! killed and upgraded.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::agent_support::host_agent::HostAgent;
use crate::agent_support::{
    LOOPBACK, MANIFEST, NAMESPACE, PATIENT_ENTRY, POD, agent_pod, apply_manifest, assert_redirected,
    ensure_none_failed_or_bypassed, ensure_redirectctl_works, entries, import_image, is_ready, metric,
    programs, run_dir, wait_loaded,
};
use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, plain_pod, sidecar_pod};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_support::process::{self, until};
use test_support::sample;

#[test]
fn the_manifest_manages_a_node_with_its_roles_and_nothing_more() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let before = entries(&node)?;
    let daemon_set = apply_manifest(&api, &node, MANIFEST)?;

    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    ensure!(entries(&node)?.contains("\"istio-cni\""), "no entry");
    let log = agent.log("install-cni")?;
    ensure!(!log.contains("\twarn\t") && !log.contains("\terror\t"), "{log}");

    let sidecar = node.start_pod(&sidecar_pod("first"))?;
    sidecar.wait_running(POD)?;
    assert_redirected(&node, &sidecar)?;
    until("the plugin's line in the agent's log", Duration::from_secs(30), &[], || {
        let log = agent.log("install-cni")?;
        let is_there = log.lines().any(|log| log.contains("\tcni-plugin\t") && log.contains("redirected"));
        Ok(is_there.then_some(()))
    })?;

    follow_the_config_map(&api, &node)?;

    // The DaemonSet is there, so this is an upgrade.
    agent.delete(POD)?;
    ensure!(entries(&node)?.contains("\"istio-cni\""), "an upgrade took the entry");
    let second = node.start_pod(&sidecar_pod("second"))?;
    second.wait_running(POD)?;
    assert_redirected(&node, &second)?;

    // All of it goes at once, as `kubectl delete -f` does it.
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-two"))?;
    agent.wait("ready", POD, is_ready)?;
    api.kubectl(&["-n", NAMESPACE, "delete", "daemonset", "istio-cni-node", "--cascade=background"])?;
    api.kubectl(&["delete", "clusterrolebinding", "istio-cni", "istio-cni-plugin"])?;
    api.kubectl(&["-n", NAMESPACE, "delete", "rolebinding", "istio-cni"])?;
    agent.delete(POD)?;
    assert_eq!(entries(&node)?, before, "the list is as it was, byte for byte");
    ensure!(!node.bin_dir().join("istio-cni").exists(), "the binary is still there");
    let plain = node.start_pod(&plain_pod("plain"))?;
    plain.wait_running(POD)?;
    Ok(())
}

/// The agent follows the ConfigMap as the kubelet mounts it, and says in an event what it refuses of it.
fn follow_the_config_map(api: &ApiServer, node: &Node<'_>) -> Result<()> {
    let publish = |name: &str, value: &str| {
        let data = json!({"data": {name: value}}).to_string();
        api.kubectl(&["-n", NAMESPACE, "patch", "configmap", "istio-cni-config", "-p", &data])
    };
    let mut touches = 0;
    // The kubelet checks the ConfigMaps of a pod about once a minute, and when the pod changes.
    let mut until = |what: &str, is_so: &dyn Fn() -> Result<bool>| {
        until(what, POD, &[], || {
            touches += 1;
            let touched = format!("touched={touches}");
            api.kubectl(&[
                "-n",
                NAMESPACE,
                "annotate",
                "--overwrite",
                "pod",
                "istio-cni-node-one",
                &touched,
            ])?;
            Ok(is_so()?.then_some(()))
        })
    };
    publish("EXCLUDE_NAMESPACES", "quiet")?;
    until("the exclusion", &|| Ok(entries(node)?.contains("\"quiet\"")))?;
    publish("NATIVE_NFTABLES", "maybe")?;
    until("the event", &|| {
        let events = api.list("events", NAMESPACE)?;
        let mut refused = events.iter().filter(|event| event["reason"] == "SettingsRefused");
        Ok(refused.any(|event| event["message"].as_str().is_some_and(|text| text.contains("maybe"))))
    })?;
    ensure!(entries(node)?.contains("\"quiet\""), "what was before stays");
    publish("NATIVE_NFTABLES", "true")?;
    until("the plugin's key", &|| Ok(entries(node)?.contains("\"native_nftables\": true")))?;
    publish("NATIVE_NFTABLES", "false").map(drop)
}

/// The token that the kubelet gave the agent's pod, which is bound to that pod.
fn projected_token(node: &Node<'_>, api: &ApiServer, pod: &str) -> Result<String> {
    let uid = api.get("pod", NAMESPACE, pod)?["metadata"]["uid"].as_str().context("no UID")?.to_owned();
    let folder = node.state_dir().join("../kubelet/pods").join(uid);
    let script = format!("cat {}/volumes/kubernetes.io~projected/*/token", folder.display());
    Ok(node.run(&process::command("sh", ["-ec", &script]))?.ok()?.stdout.trim().to_owned())
}

/// What time changes here is how long the API server goes on taking a token that it has taken before: ten seconds, for which there is no flag.
/// So the test waits for the refusal itself, however long that takes, and then for nothing more: minutes later all is as it is then.
#[test]
fn pods_of_the_mesh_start_while_no_agent_runs_and_the_agents_token_is_refused() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let daemon_set = apply_manifest(&api, &node, MANIFEST)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    let token = projected_token(&node, &api, "istio-cni-node-one")?;
    let kubeconfig = || fs::read_to_string(run_dir(&node).join("istio-cni-kubeconfig"));
    ensure!(!kubeconfig()?.contains(&token), "the plugin has the agent's token");

    let of_agent = api.token_kubeconfig("agent", &token)?;
    let ask = || api.kubectl_as(&of_agent, &["-n", NAMESPACE, "get", "daemonset", "istio-cni-node"]);
    ensure!(ask()?.status.success(), "the agent's token is taken while its pod is there");
    agent.delete(POD)?;
    until("the agent's token to be refused", POD, &[], || {
        Ok(ask()?.stderr.contains("Unauthorized").then_some(()))
    })?;

    // containerd passes the annotations of a pod outside the mesh, for which nobody is asked.
    let (there, away) = (run_dir(&node).join("istio-cni-kubeconfig"), run_dir(&node).join("away"));
    fs::rename(&there, &away)?;
    node.start_pod(&plain_pod("plain"))?.wait_running(POD)?;
    fs::rename(&away, &there)?;

    let alone = node.start_pod(&sidecar_pod("alone"))?;
    alone.wait_running(POD)?;
    assert_redirected(&node, &alone)?;

    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-two"))?;
    agent.wait("ready", POD, is_ready)?;
    ensure!(!kubeconfig()?.contains(&token), "the old token is back");
    let after = node.start_pod(&sidecar_pod("after"))?;
    after.wait_running(POD)?;
    assert_redirected(&node, &after)
}

/// A pod whose sandbox dies needs the plugin again, and the kubelet needs no API server for that. `make outage` has more pods, for longer.
#[test]
fn pods_that_the_agent_holds_start_redirected_while_the_api_server_is_away() -> Result<()> {
    let (count, length) =
        (sample::number("OUTAGE_PODS", 3), Duration::from_secs(60 * sample::number("OUTAGE_MINUTES", 0)));
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    apply_manifest(&api, &node, &MANIFEST.replace("# repair-label: ", ""))?;
    let mut agent = HostAgent::new(&node, &api, &programs()?)?;
    agent.env.push(("REPAIR_LABEL_PODS", "true".to_owned()));
    agent.start()?;
    agent.wait_ready()?;
    let name = |kind: &str, number: u64| format!("{kind}-{number}");
    let started: Vec<_> = (1..=count)
        .flat_map(|number| [sidecar_pod(&name("meshed", number)), plain_pod(&name("plain", number))])
        .map(|pod| node.start_pod(&pod))
        .collect::<Result<_>>()?;
    started.iter().try_for_each(|pod| pod.wait_running(POD).map(drop))?;
    refuse_the_plugins_token(&api, &node)?;
    let tokenless = node.start_pod(&sidecar_pod("tokenless"))?;
    tokenless.wait_running(POD)?;
    assert_redirected(&node, &tokenless)?;
    ensure!(ended(&node, "tokenless", "agent")? > 0, "the API server was asked");

    let least = (2 * count + 1) as f64;
    until("the agent to hold the pods", POD, &[], || {
        Ok(metric(&node, "istio_cni_held_pods")?.filter(|held| *held >= least).map(drop))
    })?;
    api.stop();
    let (start, mut rounds) = (Instant::now(), 0);
    while rounds == 0 || start.elapsed() < length {
        let all = started.iter().map(|pod| {
            let source = if pod.name().starts_with("plain") { "annotations" } else { "agent" };
            Ok((pod, source, ended(&node, pod.name(), source)?))
        });
        let all: Vec<_> = all.collect::<Result<_>>()?;
        for (pod, ..) in &all {
            until("the sandbox to be killed", POD, &[], || Ok(pod.kill_sandbox().ok()))?;
        }
        for (pod, source, before) in all {
            until("the plugin to be called again", POD, &[], || {
                Ok((ended(&node, pod.name(), source)? > before).then_some(()))
            })?;
        }
        rounds += 1;
    }
    println!("{rounds} times {count} pods of the mesh and {count} others in {:?}", start.elapsed());
    // Without the agent nobody has the pod, and it waits: nothing bypasses.
    agent.stop(Signal::SIGKILL)?;
    let first = &started[0];
    until("the new sandbox", POD, &[], || Ok(first.kill_sandbox().ok()))?;
    let why = first.wait_sandbox_failure(POD)?;
    ensure!(why.contains("istio-cni"), "{why}");
    // Another agent brings another token.
    api.start_again()?;
    apply_manifest(&api, &node, &MANIFEST.replace("# repair-label: ", ""))?;
    agent.start()?;
    agent.wait_ready()?;
    // The kubelet shows the new addresses now; a connection that gets by fails the test at once.
    started.iter().filter(|pod| pod.name().starts_with("meshed")).try_for_each(|pod| {
        until("the pod to answer again", POD, &[], || Ok(assert_redirected(&node, pod).ok()))
    })
}

/// How many ADDs of a pod ended well whose pod came from there.
fn ended(node: &Node<'_>, pod: &str, source: &str) -> Result<usize> {
    let log = fs::read_to_string(run_dir(node).join("istio-cni.log"))?;
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let of_pod = lines.filter(|line| line["pod"] == format!("default/{pod}") && line["source"] == source);
    Ok(of_pod.filter(|line| line["decision"] == "redirect" || line["decision"] == "skip").count())
}

/// Takes the plugin's account away, and waits until the API server refuses its token.
fn refuse_the_plugins_token(api: &ApiServer, node: &Node<'_>) -> Result<()> {
    let kubeconfig = run_dir(node).join("istio-cni-kubeconfig");
    let ask = || api.kubectl_as(&kubeconfig, &["-n", "default", "get", "pod", "meshed-1"]);
    ensure!(ask()?.status.success(), "the token is taken while its account is there");
    api.kubectl(&["-n", NAMESPACE, "delete", "serviceaccount", "istio-cni-plugin"])?;
    until("the plugin's token to be refused", POD, &[], || {
        Ok(ask()?.stderr.contains("Unauthorized").then_some(()))
    })
}

#[test]
fn the_manifests_drift_watch_sees_what_happens_in_pods() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let manifest = MANIFEST.replace("# drift-watch: ", "").replace("INTERVAL: 5m", "INTERVAL: 2s");
    let daemon_set = apply_manifest(&api, &node, &manifest)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;

    // These start after the agent: their namespaces have to come through to it.
    let pods = ["good", "bad"].map(|name| node.start_pod(&sidecar_pod(name)));
    let plain = node.start_pod(&plain_pod("plain"))?;
    let [good, bad] = pods;
    let (good, bad) = (good?, bad?);
    for pod in [&good, &bad, &plain] {
        pod.wait_running(POD)?;
    }
    assert_redirected(&node, &good)?;
    let log = || agent.log("install-cni").unwrap_or_default();
    let wait = |what: &str, name: &str, least: f64| {
        let waited =
            until(what, POD, &[], || Ok(metric(&node, name)?.filter(|value| *value >= least).map(drop)));
        waited.with_context(log)
    };
    wait("looks", "istio_cni_drift_checks_total{result=\"verified\"}", 4.0)?;
    assert_eq!(metric(&node, "istio_cni_drifted_pods")?, Some(0.0), "{}", log());

    bad.namespace()?.sh("iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT")?;
    wait("the gauge", "istio_cni_drifted_pods", 1.0)?;
    let events = until("the event", POD, &[], || {
        let events = api.list("events", "default")?;
        let events: Vec<Value> =
            events.into_iter().filter(|event| event["reason"] == "RedirectDrift").collect();
        Ok((!events.is_empty()).then_some(events))
    })
    .with_context(log)?;
    let about = api.get("pod", "default", "bad")?;
    assert_eq!(events.len(), 1, "{events:#?}");
    assert_eq!(events[0]["involvedObject"]["uid"], about["metadata"]["uid"]);
    ensure!(events[0]["message"].as_str().is_some_and(|text| text.contains("ISTIO_OUTPUT")), "{events:#?}");
    agent.wait("still ready", POD, is_ready)?;
    ensure!(!log().contains("cannot check pods"), "{}", log());
    ensure_redirectctl_works(&agent, &[("good", "verified"), ("bad", "drifted")])?;

    bad.delete(POD)?;
    until("the gauge to go down", POD, &[], || {
        Ok(metric(&node, "istio_cni_drifted_pods")?.filter(|value| *value == 0.0).map(drop))
    })
    .with_context(log)
}

#[test]
fn restarts_kills_and_upgrades_fail_no_pod_and_let_none_bypass() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    apply_manifest(&api, &node, MANIFEST)?;
    let mut agent = HostAgent::new(&node, &api, &programs()?)?;
    agent.template = Some(PATIENT_ENTRY);
    agent.start()?;
    agent.wait_ready()?;
    wait_loaded(&node)?;

    let (done, disturbances) = (AtomicBool::new(false), AtomicUsize::new(0));
    let names = thread::scope(|scope| -> Result<Vec<String>> {
        let pods = scope.spawn(|| -> Result<Vec<String>> {
            let mut names = Vec::new();
            let started = start_pods(&node, &disturbances, &mut names);
            done.store(true, Ordering::Relaxed);
            started.map(|()| names)
        });
        let disturbed = disturb(&mut agent, &done, &disturbances);
        // Whatever became of it, the starter need not wait for more.
        disturbances.store(DISTURBANCES, Ordering::Relaxed);
        let names = pods.join().map_err(|_| anyhow::anyhow!("the starter panicked"))??;
        disturbed.map(|()| names)
    })?;

    ensure_none_failed_or_bypassed(&api, &node, &names)
}

/// How often the agent is disturbed at least while pods start.
const DISTURBANCES: usize = 6;

/// Starts sidecar pods one after the other, two at a time, and looks into the namespace of each.
fn start_pods(node: &Node<'_>, disturbances: &AtomicUsize, names: &mut Vec<String>) -> Result<()> {
    for round in 0.. {
        if round >= 10 && disturbances.load(Ordering::Relaxed) >= DISTURBANCES {
            break;
        }
        let pair = [format!("loop-{round}-a"), format!("loop-{round}-b")];
        let pods = pair.iter().map(|name| node.start_pod(&sidecar_pod(name))).collect::<Result<Vec<_>>>()?;
        for pod in &pods {
            pod.wait_running(POD)?;
            ensure!(!pod.namespace()?.state_with_nft()?.is_pristine(), "{} bypasses the proxy", pod.name());
        }
        for pod in pods {
            pod.delete(POD)?;
        }
        names.extend(pair);
    }
    Ok(())
}

fn disturb(agent: &mut HostAgent<'_>, done: &AtomicBool, disturbances: &AtomicUsize) -> Result<()> {
    while !done.load(Ordering::Relaxed) {
        let count = disturbances.load(Ordering::Relaxed);
        match count % 3 {
            0 => agent.stop(Signal::SIGTERM)?,
            1 => agent.stop(Signal::SIGKILL)?,
            _ => {
                agent.new_version(count)?;
                agent.stop(Signal::SIGTERM)?;
            }
        }
        agent.start()?;
        agent.wait_ready()?;
        disturbances.fetch_add(1, Ordering::Relaxed);
        // Part of the time the agent is there.
        thread::sleep(Duration::from_millis(300));
    }
    Ok(())
}

#[test]
fn a_rotated_token_serves_the_next_pod_without_a_flap() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    apply_manifest(&api, &node, MANIFEST)?;
    let mut agent = HostAgent::new(&node, &api, &programs()?)?;
    // The plugin is lent the agent's token.
    agent.plugin_account = "";
    agent.start()?;
    agent.wait_ready()?;
    let kubeconfig = run_dir(&node).join("istio-cni-kubeconfig");
    let done = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let flaps = scope.spawn(|| -> Result<()> {
            let mut answers = 0;
            while answers <= 10 || !done.load(Ordering::Relaxed) {
                agent.wait_ready_now()?;
                answers += 1;
            }
            Ok(())
        });
        let rotated = (0..3).try_for_each(|_| -> Result<()> {
            let token = api.token(NAMESPACE, "istio-cni")?;
            fs::write(agent.account.join("token.new"), &token)?;
            fs::rename(agent.account.join("token.new"), agent.account.join("token"))?;
            until("the new token in the kubeconfig", POD, &[], || {
                Ok(fs::read_to_string(&kubeconfig)?.contains(&token).then_some(()))
            })
        });
        done.store(true, Ordering::Relaxed);
        flaps.join().map_err(|_| anyhow::anyhow!("the prober panicked"))??;
        rotated
    })?;
    let pod = node.start_pod(&sidecar_pod("after"))?;
    pod.wait_running(POD)?;
    assert_redirected(&node, &pod)
}
