//! The plugin and pods of ambient mode: which the agent is asked to enrol, and what becomes of its answers.

use std::os::unix::net::UnixListener;
use std::time::Instant;

use anyhow::{Result, ensure};
use e2e::plugin::fake_agent::{Does, FakeAgent, http, ok};
use e2e::plugin::{Answer, Invocation, PodApi, RunDir, plain_kubeconfig, sidecar};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{EARLY, LATE};

const POD: &str = "/api/v1/namespaces/shop/pods/web";
const NAMESPACE: &str = "/api/v1/namespaces/shop";
const PREVIOUS: &str = r#"{"cniVersion":"1.1.0", "ips":[{"address":"10.1.0.2/24","gateway":"10.1.0.1","interface":2},{"address":"fd00::2/64"}]}"#;

/// A node with an API server whose namespace `shop` has these labels, and a pod there.
struct Node {
    api: PodApi,
    run_dir: RunDir,
    netns: Namespace,
    conf: Value,
}

impl Node {
    fn new(pod: &Value, namespace_labels: &Value) -> Result<Self> {
        let (api, run_dir) = (PodApi::start(), RunDir::new()?);
        api.add("shop", "web", pod);
        api.add_namespace("shop", namespace_labels);
        run_dir.write_kubeconfig(&plain_kubeconfig(api.port))?;
        let mut conf = run_dir.conf();
        conf["ambient_enabled"] = json!(true);
        conf["add_timeout"] = json!(LATE);
        Ok(Self { api, run_dir, netns: Namespace::pod(Families::Dual)?, conf })
    }

    fn run(&self, command: &str) -> Result<Answer> {
        let conf = self.conf.to_string().replacen('{', &format!("{{\"prevResult\": {PREVIOUS},"), 1);
        let call = Invocation::new(command, &self.conf).input(&conf);
        call.netns(&self.netns).pod("shop", "web").run()
    }

    fn is_pristine(&self) -> Result<bool> {
        Ok(self.netns.state_with_nft()?.is_pristine())
    }
}

/// The pod `web`, with these labels and without a sidecar.
fn pod(labels: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "shop", "labels": labels},
        "spec": {"containers": [{"name": "app", "image": "app"}]}})
}

fn ambient() -> Value {
    json!({"istio.io/dataplane-mode": "ambient"})
}

#[test]
fn an_ambient_pod_is_the_agents_and_its_namespace_is_read_only_where_it_decides() -> Result<()> {
    for (of_pod, of_namespace, requests) in
        [(ambient(), json!({}), &[POD][..]), (json!({"app": "web"}), ambient(), &[POD, NAMESPACE])]
    {
        let node = Node::new(&pod(&of_pod), &of_namespace)?;
        let agent = FakeAgent::start(&node.run_dir, ok())?;
        let answer = node.run("ADD")?;
        assert_eq!(answer.0.stdout, format!("{PREVIOUS}\n"), "{answer:?}");
        let log = answer.log()?;
        assert_eq!((&log[0]["decision"], &log[0]["pod"]), (&json!("enrol"), &json!("shop/web")), "{log:?}");
        assert!(log[0]["ms"].as_str().is_some_and(|ms| ms.contains("enrol:")), "{log:?}");
        assert_eq!(node.api.take_requests(), requests);
        let event = json!({"Netns": node.netns.path(), "PodName": "web", "PodNamespace": "shop", "IPs": [
            {"Interface": 2, "Address": {"IP": "10.1.0.2", "Mask": "////AA=="}, "Gateway": "10.1.0.1"},
            {"Interface": null, "Address": {"IP": "fd00::2", "Mask": "//////////8AAAAAAAAAAA=="}, "Gateway": ""},
        ]});
        assert_eq!(agent.take_events(), [("POST /cmdadd HTTP/1.0".to_owned(), event)]);
        assert!(node.is_pristine()?, "the rules are the agent's");
        // Later commands neither need the agent nor ask for the namespace.
        node.run("CHECK")?.silence()?;
        assert_eq!(node.api.take_requests(), [POD]);
        node.run("DEL")?.silence()?;
        assert!(agent.take_events().is_empty() && node.api.take_requests().is_empty());
    }
    Ok(())
}

#[test]
fn other_pods_go_the_way_they_went() -> Result<()> {
    let mut meshed = sidecar("web", &[]);
    meshed["metadata"]["namespace"] = json!("shop");
    meshed["metadata"]["labels"] = ambient();
    let node = Node::new(&meshed, &ambient())?;
    let agent = FakeAgent::start(&node.run_dir, http("500 No", "not asked"))?;
    node.run("ADD")?.result()?;
    assert!(!node.is_pristine()?, "a sidecar stays a sidecar");
    assert_eq!(node.api.take_requests(), [POD]);
    node.run("CHECK")?.silence()?;
    assert!(agent.take_events().is_empty());

    let opted_out = json!({"istio.io/dataplane-mode": "none"});
    let both = [POD, NAMESPACE];
    for (of_pod, of_namespace, is_on, requests) in [
        (opted_out, ambient(), true, &both[..1]),
        (json!({}), json!({}), true, &both),
        (ambient(), ambient(), false, &both[..1]),
    ] {
        let mut node = Node::new(&pod(&of_pod), &of_namespace)?;
        node.conf["ambient_enabled"] = json!(is_on);
        let agent = FakeAgent::start(&node.run_dir, http("500 No", "not asked"))?;
        let answer = node.run("ADD")?;
        let log = answer.log()?;
        assert_eq!((&log[0]["decision"], &log[0]["reason"]), (&json!("skip"), &json!("no_proxy")), "{log:?}");
        answer.result()?;
        assert_eq!(node.api.take_requests(), requests);
        assert!(agent.take_events().is_empty() && node.is_pristine()?);
    }
    Ok(())
}

#[test]
fn selectors_of_the_configuration_replace_the_usual_ones() -> Result<()> {
    let mut node = Node::new(&pod(&json!({"team": "a"})), &json!({"mesh": "yes"}))?;
    node.conf["enablement_selectors"] = json!([{"podSelector": {"matchLabels": {"team": "a"}},
        "namespaceSelector": {"matchExpressions": [{"key": "mesh", "operator": "Exists"}]}}]);
    let agent = FakeAgent::start(&node.run_dir, ok())?;
    node.run("ADD")?.result()?;
    assert_eq!(agent.take_events().len(), 1);
    node.conf["exclude_namespaces"] = json!(["shop"]);
    node.run("ADD")?.result()?;
    assert!(agent.take_events().is_empty());
    node.conf["enablement_selectors"] = json!([{"podSelektor": {}}]);
    let (code, text) = node.run("ADD")?.error()?;
    assert!(
        code == 7 && text.contains("enablement_selectors") && text.contains("podSelektor"),
        "{code} {text}"
    );
    Ok(())
}

#[test]
fn whatever_the_agent_answers_instead_the_pod_is_not_started_and_the_reason_is_told() -> Result<()> {
    let long = "x".repeat(1 << 20);
    let promises = "HTTP/1.1 500 No\r\nContent-Length: 9000\r\n\r\nthe disk is full";
    let without_length = "HTTP/1.0 503 Wait\r\n\r\nstarting";
    let cases: [(Option<Does>, u64, &[&str]); 10] = [
        (
            Some(http("500 No", "no ztunnel\n\x1b[2J\"quoted\"")),
            105,
            &["(500): no ztunnel", "install-cni's pod"],
        ),
        (Some(http("500 No", "")), 105, &["(500): no reason given"]),
        (Some(http("500 No", &long)), 105, &["(500): xxx"]),
        (Some(Does::Answers(without_length.to_owned())), 105, &["(503): starting"]),
        (Some(Does::Hangs(promises)), 105, &["(500): the disk is full"]),
        (Some(Does::Hangs("")), 11, &["did not respond", "pluginevent.sock"]),
        (Some(Does::Hangs("HTTP/1.1 2")), 11, &["did not respond"]),
        (
            Some(Does::Answers("SSH-2.0-OpenSSH_9\r\n\r\n".to_owned())),
            11,
            &["unexpected response", "pluginevent.sock"],
        ),
        (Some(Does::Closes), 11, &["unexpected response"]),
        (None, 11, &["unreachable", "pluginevent.sock", "install-cni's pod", "AMBIENT_ENABLED"]),
    ];
    for (does, code, words) in cases {
        let node = Node::new(&pod(&ambient()), &json!({}))?;
        let _agent = does.map(|does| FakeAgent::start(&node.run_dir, does)).transpose()?;
        let start = Instant::now();
        let answer = node.run("ADD")?;
        ensure!(start.elapsed() < EARLY, "it took {:?}: {answer:?}", start.elapsed());
        let (found, text) = answer.error()?;
        ensure!(found == code && words.iter().all(|word| text.contains(word)), "{words:?}: {found} {text}");
        ensure!(text.contains("pod shop/web is in ambient mode: "), "{text}");
        ensure!(text.len() < 2048 && !text.contains(['\n', '\x1b']), "{text}");
        let log = answer.log()?;
        ensure!(log[0]["decision"] == "fail" && log[0]["code"] == code, "{log:?}");
        ensure!(node.is_pristine()?);
    }
    // A file of an agent that ended.
    let node = Node::new(&pod(&ambient()), &json!({}))?;
    drop(UnixListener::bind(node.run_dir.path().join("pluginevent.sock"))?);
    let (code, text) = node.run("ADD")?.error()?;
    ensure!(code == 11 && text.contains("Connection refused"), "{code} {text}");
    Ok(())
}

#[test]
fn a_long_answer_of_success_is_one() -> Result<()> {
    let node = Node::new(&pod(&ambient()), &json!({}))?;
    let _agent = FakeAgent::start(&node.run_dir, http("200 OK", &"x".repeat(1 << 20)))?;
    node.run("ADD")?.result().map(drop)
}

#[test]
fn an_ambient_pod_in_a_sandbox_is_refused_or_left_alone_and_never_enrolled() -> Result<()> {
    let mut boxed = pod(&ambient());
    boxed["spec"]["runtimeClassName"] = json!("gvisor");
    let mut node = Node::new(&boxed, &json!({}))?;
    let agent = FakeAgent::start(&node.run_dir, ok())?;
    let (code, text) = node.run("ADD")?.error()?;
    assert!(code == 104 && text.contains("gvisor") && text.contains("dataplane-mode: none"), "{code} {text}");
    node.conf["sandboxed_pods"] = json!("skip");
    let answer = node.run("ADD")?;
    assert_eq!(answer.log()?[0]["reason"], "sandboxed_runtime");
    answer.result()?;
    assert!(agent.take_events().is_empty());
    node.conf["sandboxed_runtimes"] = json!([]);
    node.run("ADD")?.result()?;
    assert_eq!(agent.take_events().len(), 1);
    Ok(())
}
