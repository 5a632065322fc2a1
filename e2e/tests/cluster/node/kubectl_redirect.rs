//! `kubectl redirect` on a real node, by way of a real kubelet.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, plain_pod, sidecar_pod};
use e2e::validation::{IMAGE as VALIDATION_IMAGE, image};
use serde_json::{Value, json};
use test_support::process::{self, Output};

use crate::agent_support::{
    LOOPBACK, MANIFEST, NAMESPACE, POD, agent_pod, apply_manifest, import_image, is_ready, wait_loaded,
};
use crate::kubectl_redirect::{command, scan};
use crate::kubectl_support::kubelet::{LIMIT, reach_kubelet, through_kubelet};
use crate::kubectl_support::{Reply, make_fleet};

/// What runs the program as the admin, while the API server reaches a real node's kubelet.
pub fn reached<'a>(
    api: &'a ApiServer,
    node: &'a Node<'a>,
) -> Result<impl Fn(&[&str]) -> Result<Output> + use<'a>> {
    let kubelet = reach_kubelet(node)?;
    Ok(move |words: &[&str]| {
        through_kubelet(api, node, &kubelet, || {
            process::run(&mut command(&api.admin_kubeconfig(), words)?, LIMIT)
        })
    })
}

/// What stands for `redirectctl` in a container of a real node.
const PROGRAM: &str = r#"#!/bin/sh
case "$1" in
scan) cat "${0%/*}/scan.json"; exit 2 ;;
bundle) cat "${0%/*}/archive" ;;
*) echo "asked for $*"; echo "not ready" >&2; exit 2 ;;
esac
"#;

/// The words of a real runtime, real streams, and a real program's exit code.
#[test]
fn a_real_kubelet_runs_the_program_in_the_agents_container() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    let programs = node.state_dir().join("programs");
    fs::create_dir(&programs)?;
    let mut pod = plain_pod("agent");
    pod["metadata"]["labels"] = json!({"k8s-app": "istio-cni-node"});
    pod["metadata"]["ownerReferences"] = make_fleet(&api, "default")?;
    let container = &mut pod["spec"]["containers"][0];
    container["name"] = json!("install-cni");
    container["env"] = json!([{"name": "PATH", "value": "/usr/local/bin:/bin"}]);
    container["volumeMounts"] = json!([{"name": "programs", "mountPath": "/usr/local/bin"}]);
    pod["spec"]["volumes"] = json!([{"name": "programs", "hostPath": {"path": programs}}]);
    node.start_pod(&pod)?.wait_running(LIMIT)?;
    let run = reached(&api, &node)?;
    let output = run(&["scan"])?;
    ensure!(output.code() == Some(1) && output.stdout.contains("has no redirectctl"), "{output:?}");

    let Reply::Ended { stdout, .. } = scan(node.name(), 3, 1) else { unreachable!("a scan ends") };
    fs::write(programs.join("scan.json"), stdout)?;
    let archive: Vec<u8> =
        (0..3_000_000_u32).map(|number| (number.wrapping_mul(number) / 7).to_le_bytes()[1]).collect();
    fs::write(programs.join("archive"), &archive)?;
    fs::write(programs.join("redirectctl"), PROGRAM)?;
    fs::set_permissions(programs.join("redirectctl"), fs::Permissions::from_mode(0o755))?;
    let output = run(&["scan"])?;
    ensure!(
        output.code() == Some(2) && output.stdout.starts_with("2 of 3 pods redirected, verified"),
        "{output:?}"
    );
    let output = run(&["pod", "agent", "--agent", "[::1]:8000"])?;
    let wanted = ("asked for pod default/agent --agent [::1]:8000\n", "not ready\n", Some(2));
    ensure!((output.stdout.as_str(), output.stderr.as_str(), output.code()) == wanted, "{output:?}");
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("archive").display().to_string();
    run(&["bundle", "--node", node.name(), "--file", &file])?.ok()?;
    ensure!(fs::read(&file)? == archive, "the archive is not as it was sent");
    Ok(())
}

/// The agent of the image, on a real node, asked as its users ask it.
#[test]
fn the_agent_of_a_real_node_answers_every_command() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    node.import(&image()?)?;
    let daemon_set = apply_manifest(&api, &node, &MANIFEST.replace("# drift-watch: ", ""))?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    node.start_pod(&sidecar_pod("web"))?.wait_running(POD)?;
    let run = reached(&api, &node)?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("archive").display().to_string();
    // No proxy listens in the pod.
    for (words, code, wanted) in [
        (
            &["scan"][..],
            2,
            &["1 of 1 pods redirected, verified", "nobody-listens: 1 pod:", "default/web"][..],
        ),
        (&["pod", "default/web"], 2, &["nobody-listens", "/host/var/run/netns/"]),
        (&["verify", "default/web"], 2, &["/host/var/run/netns/", "to be redirected: REDIRECT"]),
        (
            &["trace", "default/web", "--to", "198.51.100.1:443"],
            0,
            &["ends at: proxy, outbound listener (port 15001)"],
        ),
        (&["why", "foreign-rule"], 0, &["a finding of redirectctl"]),
        (&["bundle", "default/web", "--file", &file], 0, &["of node"]),
        (&["precheck", "-n", NAMESPACE], 0, &["this project's", "0 failed, 0 warnings"]),
        (
            &["test", "--yes", "--image", VALIDATION_IMAGE],
            0,
            &["redirected: what the application sends, and what comes to the proxy"],
        ),
    ] {
        let output = run(words)?;
        // Lines are broken between words, where the name of the node is long as well.
        let said = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        let is_said = |words: &&str| said.contains(*words);
        ensure!(output.code() == Some(code) && wanted.iter().all(is_said), "{words:?}: {output:?}");
    }
    let tested = api.list("pods", "default")?;
    ensure!(!tested.iter().any(is_left), "{tested:#?}");
    let listed = process::run(&mut process::command("tar", ["-tzf", &file]), LIMIT)?.ok()?.stdout;
    ensure!(
        ["/scan.json", "/pods/default/web/rules.json", "/agent/metrics.txt"]
            .iter()
            .all(|end| listed.contains(end)),
        "{listed}"
    );
    Ok(())
}

/// Whether a pod of `test` is not even being deleted.
fn is_left(pod: &Value) -> bool {
    let is_tests = pod["metadata"]["labels"]["app.kubernetes.io/name"] == "kubectl-redirect-test";
    is_tests && pod["metadata"]["deletionTimestamp"].is_null()
}
