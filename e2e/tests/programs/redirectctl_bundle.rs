//! `redirectctl bundle`: everything a ticket needs is in the archive, and no secret of any source is. It is whole or not there.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, ensure};
use e2e::archive;
use e2e::redirectctl::{self, Patient, redirectctl};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::process;

/// Planted wherever something can be; each place adds its own ending.
const SECRET: &str = "pa55w0rd-";

/// A node whose every file holds secrets, and one pod that does.
struct Node {
    folder: TempDir,
    patient: Patient,
}

impl Node {
    fn new(number: u8) -> Result<Self> {
        let patient = redirectctl::patient("foreign accept", number)?;
        patient
            .namespace()
            .sh(&format!(
                "iptables -t nat -I OUTPUT 1 -p tcp -m comment --comment {SECRET}comment -j ACCEPT; \
                 nft add rule ip nat OUTPUT tcp dport 81 counter accept comment '\"{SECRET}nft\"'"
            ))?
            .ok()?;
        let folder = tempfile::tempdir()?;
        let node = Self { folder, patient };
        fs::create_dir(node.path("net.d"))?;
        fs::create_dir(node.path("run"))?;
        let ours = json!({"type": "istio-cni", "cni_agent_run_dir": node.path("run"), "pod_namespace": "istio-system",
            "exclude_namespaces": ["kube-system"], "unheard_of": format!("{SECRET}ours")});
        let theirs = json!({"type": "calico", "datastore_token": format!("{SECRET}theirs"),
            "kubernetes": {"k8s_auth_token": format!("{SECRET}deep")}, (format!("{SECRET}key")): 1});
        let list = json!({"cniVersion": "1.0.0", "name": "k8s", "plugins": [theirs, ours]});
        fs::write(node.path("net.d/10-k8s.conflist"), list.to_string())?;
        fs::write(node.path("net.d/20-broken.conf"), format!("{{ {SECRET}broken"))?;
        fs::write(node.path("net.d/calico-kubeconfig"), format!("token: {SECRET}calico"))?;
        let kubeconfig = format!(
            "users: [{{name: x, user: {{token: {SECRET}token, client-key-data: {SECRET}certificate}}}}]"
        );
        fs::write(node.path("run/istio-cni-kubeconfig"), kubeconfig)?;
        fs::write(node.path("run/istio-cni.log"), log())?;
        fs::write(node.path("pods.json"), node.pods().to_string())?;
        Ok(node)
    }

    fn path(&self, part: &str) -> String {
        self.folder.path().join(part).display().to_string()
    }

    /// The pod and the agent's, with a secret in every field that decides nothing.
    fn pods(&self) -> Value {
        let secret = |place: &str| format!("{SECRET}{place}");
        let mut pod = self.patient.pod().clone();
        pod["metadata"]["annotations"]["vault.example.com/token"] = secret("annotation").into();
        pod["metadata"]["labels"]["key"] = secret("label").into();
        pod["metadata"]["managedFields"] = json!([{"manager": secret("manager")}]);
        pod["spec"]["containers"][0]["command"] = json!(["sh", secret("command")]);
        pod["spec"]["containers"][0]["env"] = json!([{"name": "PASSWORD", "value": secret("env")}]);
        pod["spec"]["containers"][1]["env"] = json!([
            {"name": "ISTIO_DUAL_STACK", "value": "true"}, {"name": "JWT", "value": secret("proxy-env")},
            {"name": "PROXY_CONFIG", "value": format!("{{\"x\": \"{}\"}}", secret("proxy-config"))},
        ]);
        pod["spec"]["volumes"] =
            json!([{"name": "v", "csi": {"volumeAttributes": {"key": secret("volume")}}}]);
        pod["status"]["initContainerStatuses"] = json!([{"name": "istio-validation", "restartCount": 1,
            "state": {"terminated": {"exitCode": 126, "reason": "Error", "message": secret("termination")}}}]);
        pod["status"]["conditions"] =
            json!([{"type": "Ready", "status": "False", "message": secret("message")}]);
        let agent = json!({"kind": "Pod", "metadata": {"name": "istio-cni-node-x", "namespace": "istio-system"}, "spec": {
            "hostNetwork": true,
            "containers": [{"name": "install-cni", "env": [
                {"name": "NATIVE_NFTABLES", "value": "false"},
                {"name": "CNI_NETWORK_CONFIG", "value": secret("network-config")},
                {"name": "HTTPS_PROXY", "value": format!("http://u:{}@proxy", secret("proxy"))},
            ]}],
        }});
        let event = json!({"kind": "Event", "reason": "FailedCreatePodSandBox", "message": secret("event"),
            "lastTimestamp": "2026-01-01T00:00:00Z", "involvedObject": {"kind": "Pod", "namespace": "default", "name": pod["metadata"]["name"]}});
        json!({"kind": "List", "items": [pod, agent, event]})
    }

    fn bundle(&self, file: &str, metrics: &str) -> Result<process::Output> {
        let (pods, conf, netns) = (self.path("pods.json"), self.path("net.d"), self.path("netns"));
        redirectctl(&[
            "bundle",
            file,
            "-f",
            &pods,
            "--cni-conf-dir",
            &conf,
            "--netns-dir",
            &netns,
            "--metrics",
            metrics,
        ])
    }
}

fn log() -> String {
    let line = |more: Value| {
        let mut line = json!({"time": "2026-01-01T00:00:00Z", "level": "info", "scope": "cni-plugin", "msg": format!("{SECRET}msg")});
        for (key, value) in more.as_object().into_iter().flatten() {
            line[key] = value.clone();
        }
        format!("{line}\n")
    };
    line(json!({"pod": "shop/cart-0", "decision": "skip", "reason": "no_proxy"}))
        + &line(
            json!({"level": "error", "code": 11, "token": format!("{SECRET}label"), "pod": format!("{SECRET}pod name")}),
        )
        + SECRET
}

/// Answers one request as the agent does, and says more than that.
fn metrics() -> Result<(String, thread::JoinHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let serve = move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let mut request = [0; 1024];
        let _ = stream.read(&mut request);
        let body = format!(
            "# HELP istio_cni_install_ready {SECRET}help\nistio_cni_install_ready 1\nother{{token=\"{SECRET}metric\"}} 1\n"
        );
        let _ = write!(stream, "HTTP/1.0 200 OK\r\nX-Secret: {SECRET}header\r\n\r\n{body}");
    };
    Ok((address, thread::spawn(serve)))
}

/// The namespaces of a runtime: that of the pod.
fn runtime(node: &Node) -> Result<Mount> {
    let folder = node.path("netns");
    fs::create_dir(&folder)?;
    let file = format!("{folder}/{}", node.patient.namespace().name());
    fs::write(&file, "")?;
    let mut mount = process::command("mount", ["--bind"]);
    process::run(mount.arg(node.patient.namespace().path()).arg(&file), process::SHORT)?.ok()?;
    Ok(Mount(file))
}

struct Mount(String);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = process::run(&mut process::command("umount", [&self.0]), process::SHORT);
    }
}

#[test]
fn everything_is_there_but_secrets() -> Result<()> {
    let node = Node::new(31)?;
    let _mount = runtime(&node)?;
    let (agent, served) = metrics()?;
    let file = node.path("ticket.tar.gz");
    let output = node.bundle(&file, &agent)?.ok()?;
    served.join().map_err(|_| anyhow::anyhow!("the agent's stand-in failed"))?;
    assert_eq!(fs::metadata(&file)?.permissions().mode() & 0o777, 0o600);
    let entries = archive::entries(Path::new(&file))?;
    for (name, text) in &entries {
        ensure!(!text.contains(SECRET) && !name.contains(SECRET), "{name} has a secret:\n{text}");
    }
    ensure!(!output.stdout.contains(SECRET), "{output:?}");
    assert!(
        output.stdout.lines().all(|line| line.chars().count() <= 80 || !line.contains(' ')),
        "{output:?}"
    );
    // What is needed is there, or the test would pass with an empty archive.
    for (name, has) in [
        ("contents.json", "\"redirectctl\""),
        ("machine.json", "\"kernel\""),
        ("scan.json", "foreign-rule"),
        ("pods/default/web-31/report.json", "foreign-rule"),
        ("pods/default/web-31/rules.json", "to the proxy's outbound listener"),
        ("node/network-configurations.json", "kube-system"),
        ("node/files.json", "istio-cni-kubeconfig"),
        ("node/plugin-log.jsonl", "no_proxy"),
        ("agent/environment.json", "NATIVE_NFTABLES"),
        ("agent/metrics.txt", "istio_cni_install_ready 1"),
    ] {
        let text = entries.get(name).with_context(|| format!("{name} is missing: {:?}", entries.keys()))?;
        ensure!(text.contains(has), "{name} lacks {has}:\n{text}");
    }
    let again = node.bundle(&file, &agent)?;
    assert_eq!(again.code(), Some(1), "{again:?}");
    assert!(again.stderr.contains("nothing is overwritten"), "{again:?}");
    Ok(())
}

/// A bundle of a machine that has nothing of what goes into one.
fn without_anything(file: &str) -> Vec<&str> {
    let nothing =
        ["--kubeconfig", "/nonexistent", "--cni-conf-dir", "/nonexistent", "--metrics", "127.0.0.1:1"];
    [&["bundle", file], nothing.as_slice()].concat()
}

#[test]
fn what_cannot_be_read_is_left_out_and_said() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("ticket.tar.gz").display().to_string();
    let args = without_anything(&file);
    let mut all = args.clone();
    all.extend(["--output", "json"]);
    let told: Value = serde_json::from_str(&redirectctl(&all)?.ok()?.stdout)?;
    let missing: Vec<&str> =
        told["leftOut"].as_array().context("a list")?.iter().filter_map(|one| one["name"].as_str()).collect();
    for name in ["pods", "node/network-configurations.json", "agent/metrics.txt"] {
        assert!(missing.contains(&name), "{missing:?}");
    }
    Ok(())
}

#[test]
fn an_archive_goes_to_standard_output_and_its_report_beside() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("ticket.tar.gz").display().to_string();
    let line = process::command_line(&redirectctl::command(&without_anything("-")));
    let output =
        process::run(&mut process::command("sh", ["-c", &format!("{line} >{file}")]), process::SHORT)?
            .ok()?;
    assert!(output.stderr.contains("standard output has 3 entries"), "{output:?}");
    let listed = process::run(&mut process::command("tar", ["-tzf", &file]), process::SHORT)?.ok()?.stdout;
    assert!(listed.lines().any(|entry| entry.ends_with("/contents.json")), "{listed}");
    Ok(())
}

#[test]
fn a_full_disk_leaves_nothing_behind() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk").display().to_string();
    fs::create_dir(&disk)?;
    process::run(
        &mut process::command("mount", ["-t", "tmpfs", "-o", "size=4k", "ops", &disk]),
        process::SHORT,
    )?
    .ok()?;
    let _mount = Mount(disk.clone());
    fs::write(format!("{disk}/filler"), vec![0; 4096])?;
    let file = format!("{disk}/ticket.tar.gz");
    let output = redirectctl(&without_anything(&file))?;
    assert_eq!(output.code(), Some(1), "{output:?}");
    assert!(output.stderr.contains("cannot write") && output.stderr.contains("No space left"), "{output:?}");
    let left: Vec<_> = fs::read_dir(&disk)?.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
    assert_eq!(left, ["filler"], "nothing half-written stays");
    Ok(())
}
