//! `redirectctl` and a real API server: pods by name, and one clear sentence, with what to do, where the server is away, silent, strange, or
//! refuses.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, ensure};
use e2e::kube::{ApiServer, Sending, fresh};
use e2e::node::{plain_pod, sidecar_pod};
use e2e::redirectctl::redirectctl;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, NetnsDirectory, pod_address};

/// The commands that ask an API server, about a pod and a node.
fn asking<'a>(pod: &'a str, node: &'a str) -> [Vec<&'a str>; 4] {
    [
        vec!["pod", pod],
        vec!["scan", "--node", node],
        vec!["trace", "--to", "198.51.100.1:443", "--pod", pod],
        vec!["plan", "--pod", pod],
    ]
}

/// A pod of a namespace, on a node.
fn placed(mut pod: Value, namespace: &str, node: &str) -> Value {
    pod["metadata"]["namespace"] = json!(namespace);
    pod["spec"]["nodeName"] = json!(node);
    pod
}

/// What is said on standard error: one line, and the exit code is 1.
fn complaint(args: &[&str], kubeconfig: &Path) -> Result<String> {
    let kubeconfig = kubeconfig.display().to_string();
    let nowhere = ["--cni-conf-dir", "/nonexistent"];
    let output = redirectctl(&[args, &["--kubeconfig", &kubeconfig], &nowhere].concat())?;
    ensure!(output.code() == Some(1) && output.stdout.is_empty(), "{args:?}: {output:?}");
    let lines: Vec<&str> = output.stderr.lines().collect();
    ensure!(lines.len() == 1 && lines[0].contains("\terror\t"), "one line: {lines:#?}");
    ensure!(!output.stderr.contains('\u{1b}'), "{lines:?}");
    Ok(output.stderr)
}

/// A kubeconfig for whatever listens at a port.
fn kubeconfig_for(folder: &Path, server: &str, cluster: &Value) -> Result<PathBuf> {
    let mut cluster = cluster.clone();
    cluster["server"] = json!(server);
    let file = folder.join(format!("{}.kubeconfig", server.replace(['/', ':'], "-")));
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]});
    fs::write(&file, config.to_string())?;
    Ok(file)
}

/// Answers every request with these bytes, or never where there are none, until the process ends.
fn stand_in(answer: &'static str) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        let mut held: Vec<TcpStream> = Vec::new();
        for mut stream in listener.incoming().flatten() {
            if !answer.is_empty() {
                let mut asked = [0; 4096];
                let _ = stream.read(&mut asked);
                let _ = stream.write_all(answer.as_bytes());
                continue;
            }
            held.push(stream);
        }
    });
    Ok(format!("http://127.0.0.1:{port}"))
}

#[test]
fn a_server_that_does_not_serve_is_one_sentence_that_says_what_to_do() -> Result<()> {
    let folder = tempfile::Builder::new().prefix(&format!("e2e-{}-ctl", std::process::id())).tempdir()?;
    let free = format!("http://127.0.0.1:{}", test_support::port::free_port()?);
    let html = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 12\r\n\r\n<h1>\u{1b}[2J</h1>";
    let busy = "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 60\r\nContent-Length: 4\r\n\r\nlate";
    let other = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 29\r\n\r\n{\"kind\": \"Pod\", \"items\": \"x\"}";
    for (server, words) in [
        (free, ["is unreachable", "--file"]),
        (stand_in("")?, ["did not respond within 5s", "--file"]),
        (stand_in(html)?, ["is this the API server?", "proxy or load balancer"]),
        (stand_in(busy)?, ["answers 503", "--file"]),
        (stand_in(other)?, ["is this the API server?", "proxy or load balancer"]),
    ] {
        let kubeconfig = kubeconfig_for(folder.path(), &server, &json!({}))?;
        // Each of them waits for the silent one: so two ways of asking are enough here.
        for args in &asking("default/web", "n1")[..2] {
            let said = complaint(args, &kubeconfig)?;
            ensure!(words.iter().all(|word| said.contains(word)), "{server} {args:?}: {said}");
        }
    }
    for (kubeconfig, word) in
        [(folder.path().join("none"), "is missing"), (folder.path().to_owned(), "kubeconfig")]
    {
        let said = complaint(&["pod", "default/web"], &kubeconfig)?;
        ensure!(said.contains(word) && said.contains("--kubeconfig"), "{said}");
    }
    Ok(())
}

#[test]
fn refusals_of_a_real_server_say_which_right_is_missing() -> Result<()> {
    let api = ApiServer::shared()?;
    let (shop, node) = (api.fresh_namespace("shop")?, fresh("n1"));
    for pod in [sidecar_pod("web"), plain_pod("plain")] {
        api.create(&placed(pod, &shop, &node))?;
    }
    api.create_service_account(&shop, "nobody")?;
    let nobody = api.token_kubeconfig("nobody", &api.token(&shop, "nobody")?)?;
    let web = format!("{shop}/web");
    for args in asking(&web, &node) {
        let said = complaint(&args, &nobody)?;
        let verb = if args[0] == "scan" { "verb list on pods" } else { "verb get on pods" };
        ensure!(said.contains("(403)") && said.contains(verb) && said.contains("--kubeconfig"), "{said}");
    }
    let expired = api.token_kubeconfig("expired", &api.expired_token(&shop, "nobody")?)?;
    let said = complaint(&["pod", &web], &expired)?;
    ensure!(
        said.contains("(401)") && said.contains("expired.kubeconfig") && said.contains("--kubeconfig"),
        "{said}"
    );
    let cart = format!("{shop}/cart");
    let said = complaint(&["pod", &cart], &api.admin_kubeconfig())?;
    ensure!(
        said.contains(&format!("has no pod {cart} (404)"))
            && said.contains(&format!("kubectl get pods -n {shop}")),
        "{said}"
    );
    let stranger = ApiServer::start()?;
    let config: Value = serde_json::from_str(&fs::read_to_string(api.admin_kubeconfig())?)?;
    let mut cluster = config["clusters"][0]["cluster"].clone();
    cluster["server"] = json!(stranger.url());
    let untrusted = kubeconfig_for(api.ca_path().parent().context("a folder")?, &stranger.url(), &cluster)?;
    let said = complaint(&["pod", &web], &untrusted)?;
    ensure!(said.contains("no trustworthy connection") && said.contains("certificate authority"), "{said}");
    Ok(())
}

/// By its addresses, as for `pod`; the rules in force count, also for a trace.
#[test]
fn the_namespace_of_a_named_pod_is_found_for_verify_and_trace() -> Result<()> {
    let api = ApiServer::shared()?;
    let shop = api.fresh_namespace("shop")?;
    let namespace = Namespace::pod(Families::Dual)?;
    api.create(&placed(sidecar_pod("web"), &shop, &fresh("n1")))?;
    let addresses = [false, true].map(|is_v6| json!({"ip": pod_address(is_v6)}));
    let status = json!({"status": {"phase": "Running", "podIP": addresses[0]["ip"], "podIPs": addresses}});
    api.send_all(&[Sending::merge(&format!("/api/v1/namespaces/{shop}/pods/web/status"), &status)])?;
    let (pod, kubeconfig) = (format!("{shop}/web"), api.admin_kubeconfig().display().to_string());
    let run = |words: &[&str], directory: &NetnsDirectory| {
        let directory = directory.path().display().to_string();
        let place = ["--pod", &pod, "--kubeconfig", &kubeconfig, "--netns-dir", &directory];
        redirectctl(&[words, &place].concat())
    };
    let directory = NetnsDirectory::of([&namespace])?;
    let verified = run(&["verify", "--output", "json"], &directory)?;
    let report: Value = serde_json::from_str(&verified.stdout).with_context(|| format!("{verified:?}"))?;
    let netns = report["netns"].as_str().context("netns")?;
    ensure!(Path::new(netns).starts_with(directory.path()), "{report:#}");
    ensure!(report["state"] == "not-redirected" && verified.code() == Some(2), "{report:#}");
    let trace = ["trace", "--to", "10.1.0.9:80"];
    let traced = run(&trace, &directory)?.ok()?.stdout;
    ensure!(traced.contains("ends at: untouched"), "no rule is in force: {traced}");
    for words in [&["verify"][..], &trace] {
        let missing = run(words, &NetnsDirectory::of([])?)?;
        ensure!(missing.code() == Some(1) && missing.stderr.contains("is not found"), "{missing:?}");
    }
    Ok(())
}

/// A kubelet with `--hostname-override` has another name than its machine, and another node's pods are not here.
#[test]
fn a_machine_with_another_name_than_its_node_is_asked_for_the_nodes_name() -> Result<()> {
    let api = ApiServer::shared()?;
    let (shop, [n1, n2]) = (api.fresh_namespace("shop")?, ["n1", "n2"].map(fresh));
    let namespace = Namespace::pod(Families::Dual)?;
    namespace
        .sh("iptables -t nat -N ISTIO_OUTPUT; iptables -t nat -A OUTPUT -p tcp -j ISTIO_OUTPUT")?
        .ok()?;
    let here = [pod_address(false).to_string(), pod_address(true).to_string()];
    for (node, name, addresses) in
        [(&n1, "web", here), (&n2, "other", ["192.0.2.9".to_owned(), "2001:db8::9".to_owned()])]
    {
        api.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}))?;
        api.create(&placed(sidecar_pod(name), &shop, node))?;
        let addresses: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
        let status =
            json!({"status": {"phase": "Running", "podIP": addresses[0]["ip"], "podIPs": addresses}});
        api.send_all(&[Sending::merge(&format!("/api/v1/namespaces/{shop}/pods/{name}/status"), &status)])?;
    }
    let directory = NetnsDirectory::of([&namespace])?;
    let path = directory.path().display().to_string();
    let scan = ["scan", "--netns-dir", &path];
    let said = complaint(&scan, &api.admin_kubeconfig())?;
    let machine = fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_lowercase();
    ensure!(
        said.contains(&format!("the API server has no node {machine}")) && said.contains("--node"),
        "{said}"
    );
    let said = complaint(&[&scan[..], &["--node", &n2]].concat(), &api.admin_kubeconfig())?;
    ensure!(
        said.contains(&format!("no pod of node {n2} is on this machine")) && said.contains("--node"),
        "{said}"
    );
    let kubeconfig = api.admin_kubeconfig().display().to_string();
    let words = ["--node", &n1, "--kubeconfig", &kubeconfig, "--cni-conf-dir", "/nonexistent"];
    let output = redirectctl(&[&scan[..], &words].concat())?;
    ensure!(output.code() == Some(2) && output.stdout.contains(&format!("{shop}/web")), "{output:?}");
    Ok(())
}

/// Labels of namespaces are asked for where ambient mode is on, in one request; without the right to list them a note names what is missing.
#[test]
fn labels_of_namespaces_are_asked_for_in_ambient_mode() -> Result<()> {
    let api = ApiServer::shared()?;
    let (shop, node, role) = (api.fresh_namespace("shop")?, fresh("n1"), fresh("reader"));
    let web = format!("{shop}/web");
    api.kubectl(&["label", "namespace", &shop, "istio.io/dataplane-mode=ambient"])?;
    api.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}))?;
    let namespace = Namespace::pod(Families::Dual)?;
    api.create(&placed(plain_pod("web"), &shop, &node))?;
    let addresses = [false, true].map(|is_v6| json!({"ip": pod_address(is_v6)}));
    let status = json!({"status": {"phase": "Running", "podIP": addresses[0]["ip"], "podIPs": addresses}});
    api.send_all(&[Sending::merge(&format!("/api/v1/namespaces/{shop}/pods/web/status"), &status)])?;

    let folder = tempfile::Builder::new().prefix(&format!("e2e-{}-ctl", std::process::id())).tempdir()?;
    let plugins = json!([{"type": "istio-cni", "ambient_enabled": true}]);
    let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": plugins});
    fs::write(folder.path().join("10-net.conflist"), list.to_string())?;
    let conf = folder.path().display().to_string();
    let runtime = NetnsDirectory::of([&namespace])?;
    let directory = runtime.path().display().to_string();
    let json_of = |kubeconfig: &Path, words: &[&str]| -> Result<Value> {
        let kubeconfig = kubeconfig.display().to_string();
        let place = ["--netns-dir", &directory, "--cni-conf-dir", &conf, "--agent", "127.0.0.1:1"];
        let more = ["--kubeconfig", &kubeconfig, "--output", "json"];
        let output = redirectctl(&[words, &place, &more].concat())?;
        serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))
    };
    let scan = json_of(&api.admin_kubeconfig(), &["scan", "--node", &node])?;
    ensure!(
        scan["pods"][0]["dataPlane"] == "ambient" && scan["pods"][0]["state"] == "not-redirected",
        "{scan:#}"
    );
    let report = json_of(&api.admin_kubeconfig(), &["pod", &web])?;
    ensure!(report["dataPlane"] == "ambient", "{report:#}");

    let rules = [("nodes", "get"), ("pods", "list"), ("pods", "get")]
        .map(|(resource, verb)| json!({"apiGroups": [""], "resources": [resource], "verbs": [verb]}));
    api.create_service_account(&shop, "reader")?;
    api.apply(
        &json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": role}, "rules": rules},
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": role},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": shop}]},
        ]})
        .to_string(),
    )?;
    let reader = api.token_kubeconfig("reader", &api.token(&shop, "reader")?)?;
    for (words, untold, found) in [
        (&["scan", "--node", &node][..], "\"namespaces: ", "/node"),
        (&["pod", &web], "\"the pod's namespace: ", "/findings"),
    ] {
        let told = json_of(&reader, words)?;
        let note = told.pointer(found).and_then(Value::as_array).context("findings")?.iter();
        let note = note.filter(|finding| finding["code"] == "not-told").collect::<Vec<_>>();
        ensure!(format!("{}", json!(note)).contains(untold), "{told:#}");
    }
    Ok(())
}

/// What a pod's owner may write: steering sequences, and as much as the API server takes.
#[test]
fn hostile_pods_are_told_in_a_few_lines_that_do_nothing_to_a_terminal() -> Result<()> {
    let api = ApiServer::shared()?;
    let (shop, node) = (api.fresh_namespace("shop")?, fresh("n1"));
    let name = "traffic.sidecar.istio.io/excludeOutboundPorts";
    let many = (1..=32_000).step_by(2).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
    for (pod, value, command, code) in [
        ("steers", "\u{1b}[2J\u{202e}\r\n".to_owned(), "pod", 2),
        ("shouts", "\u{1b}]0;x\u{7},".repeat(25_000), "pod", 2),
        ("shouts-at-plans", "\u{1b}]0;x\u{7},".repeat(25_000), "plan", 1),
        ("goes-on", many, "pod", 0),
    ] {
        let mut object = placed(sidecar_pod(pod), &shop, &node);
        object["metadata"]["annotations"][name] = json!(value);
        api.create(&object)?;
        let kubeconfig = api.admin_kubeconfig().display().to_string();
        let full_name = format!("{shop}/{pod}");
        let args: &[&str] =
            if command == "pod" { &["pod", &full_name] } else { &["plan", "--pod", &full_name] };
        let output =
            redirectctl(&[args, &["--kubeconfig", &kubeconfig, "--cni-conf-dir", "/nonexistent"]].concat())?;
        ensure!(output.code() == Some(code), "{pod}: {output:?}");
        let told = output.stdout.clone() + &output.stderr;
        ensure!(told.len() < 20_000, "{pod}: {} bytes", told.len());
        ensure!(is_harmless(&told), "{pod}: {told:?}");
        ensure!(output.stdout.lines().all(|line| line.chars().count() <= 80), "{pod}: {told}");
    }

    // No API server has such a name; a file may.
    let folder = tempfile::Builder::new().prefix(&format!("e2e-{}-ctl", std::process::id())).tempdir()?;
    let file = folder.path().join("pods.json");
    let mut pod = sidecar_pod("\u{1b}[31m\"} 1\nevil");
    pod["status"] = json!({"podIPs": [{"ip": "192.0.2.7"}], "phase": "Running"});
    fs::write(&file, pod.to_string())?;
    for output in ["text", "json"] {
        let file = file.display().to_string();
        let told = redirectctl(&["netns", "/proc/self/ns/net", "-f", &file, "--output", output])?;
        ensure!(told.stdout.contains("evil") && is_harmless(&told.stdout), "{told:?}");
    }
    Ok(())
}

fn is_harmless(text: &str) -> bool {
    !text.contains(|character: char| {
        (character.is_control() && !"\n\t".contains(character)) || character == '\u{202e}'
    })
}
