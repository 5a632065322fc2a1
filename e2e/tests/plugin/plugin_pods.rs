//! Where the plugin has a pod from: the agent, if that holds it, otherwise the API server.

use std::time::Instant;

use anyhow::{Result, ensure};
use e2e::plugin::fake_agent::{Does, FakeAgent, http, ok};
use e2e::plugin::{Answer, Invocation, PodApi, RunDir, plain_kubeconfig, sidecar};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{EARLY, LATE};

const PATH: &str = "/api/v1/namespaces/default/pods/web";

/// The pod `web` with a UID, as the agent and the API server have it.
fn web(uid: &str) -> Value {
    let mut pod = sidecar("web", &[("traffic.sidecar.istio.io/excludeInboundPorts", "7777")]);
    pod["metadata"]["uid"] = json!(uid);
    pod
}

/// The answer with a pod.
fn gives(pod: &Value) -> Does {
    http("200 OK", &json!({"pod": pod}).to_string())
}

/// A node and a namespace for the pod.
struct Node {
    run_dir: RunDir,
    netns: Namespace,
    conf: Value,
}

impl Node {
    fn new() -> Result<Self> {
        let run_dir = RunDir::new()?;
        let mut conf = run_dir.conf();
        conf["add_timeout"] = json!(LATE);
        Ok(Self { run_dir, netns: Namespace::pod(Families::Dual)?, conf })
    }

    /// With an API server that has the pod of this UID.
    fn with_api(uid: &str) -> Result<(Self, PodApi)> {
        let (node, api) = (Self::new()?, PodApi::start());
        api.add("default", "web", &web(uid));
        node.run_dir.write_kubeconfig(&plain_kubeconfig(api.port))?;
        Ok((node, api))
    }

    fn run(&self, command: &str, uid: &str) -> Result<Answer> {
        let mut conf = self.conf.clone();
        conf["prevResult"] = json!({"cniVersion": "1.1.0"});
        let call = Invocation::new(command, &conf).netns(&self.netns);
        let call =
            if uid.is_empty() { call.pod("default", "web") } else { call.pod_of_uid("default", "web", uid) };
        call.run()
    }

    fn excludes_the_port(&self) -> Result<bool> {
        Ok(format!("{:?}", self.netns.state()?).contains("7777"))
    }
}

/// The log line at the end of an ADD.
fn end(answer: &Answer) -> Result<Value> {
    Ok(answer.log()?.into_iter().find(|line| line["decision"].is_string()).unwrap_or_default())
}

#[test]
fn a_pod_that_the_agent_holds_needs_neither_api_server_nor_kubeconfig() -> Result<()> {
    let node = Node::new()?;
    let agent = FakeAgent::of_pods(&node.run_dir, gives(&web("u-1")))?;
    let answer = node.run("ADD", "u-1")?;
    let end = end(&answer)?;
    answer.result()?;
    ensure!(end["decision"] == "redirect" && end["source"] == "agent", "{end}");
    ensure!(node.excludes_the_port()?);
    let asked = json!({"namespace": "default", "name": "web", "uid": "u-1"});
    ensure!(agent.take_events() == [("POST /v1/pod HTTP/1.0".to_owned(), asked)]);
    Ok(())
}

#[test]
fn whatever_the_agent_answers_instead_the_api_server_is_asked() -> Result<()> {
    let renamed = |pointer: &str, text: &str| {
        let mut pod = web("u-1");
        *pod.pointer_mut(pointer).expect("a field") = json!(text);
        gives(&pod)
    };
    let whole = json!({"pod": web("u-1")}).to_string();
    let cut = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", whole.len(), &whole[..40]);
    let cases: [(Option<Does>, &str); 12] = [
        (Some(http("503 No", "the API server is away\x1b[2J")), "(503): the API server is away"),
        (Some(http("404 Not Found", "")), ""),
        (Some(renamed("/metadata/uid", "u-2")), ""),
        (Some(renamed("/metadata/name", "other")), ""),
        (Some(renamed("/metadata/namespace", "other")), ""),
        (Some(renamed("/kind", "Job")), ""),
        (Some(http("200 OK", "")), "unexpected response"),
        (Some(http("200 OK", &web("u-1").to_string())), "unexpected response"),
        (Some(Does::Answers(cut)), "unexpected response"),
        (Some(Does::Hangs("HTTP/1.1 2")), "did not respond"),
        (Some(Does::Closes), "unexpected response"),
        (None, ""),
    ];
    for (does, words) in cases {
        let (node, api) = Node::with_api("u-1")?;
        let _agent = does.map(|does| FakeAgent::of_pods(&node.run_dir, does)).transpose()?;
        let start = Instant::now();
        let answer = node.run("ADD", "u-1")?;
        ensure!(start.elapsed() < EARLY, "it took {:?}: {answer:?}", start.elapsed());
        let (end, told) = (end(&answer)?, answer.0.stderr.clone());
        answer.result()?;
        ensure!(end["decision"] == "redirect" && end["source"] == "api", "{words}: {told}");
        ensure!(told.contains(words) && !told.contains('\x1b'), "{words}: {told}");
        ensure!(words.is_empty() || told.contains("asking the API server"), "{told}");
        ensure!(node.excludes_the_port()? && api.take_requests() == [PATH], "{words}");
    }
    Ok(())
}

#[test]
fn with_both_away_nothing_bypasses_and_both_reasons_are_told() -> Result<()> {
    let node = Node::new()?;
    let _agent = FakeAgent::of_pods(&node.run_dir, http("503 No", "the watch broke"))?;
    let answer = node.run("ADD", "u-1")?;
    let (code, text) = answer.error()?;
    ensure!(code == 11 && text.contains("istio-cni-kubeconfig is missing"), "{code} {text}");
    ensure!(answer.0.stderr.contains("the watch broke"), "{answer:?}");
    ensure!(end(&answer)?["source"] == "api" && node.netns.state()?.is_pristine());
    Ok(())
}

/// A runtime that does not pass the UID could start another pod of the name.
#[test]
fn only_an_add_with_a_uid_is_answered_by_the_agent() -> Result<()> {
    let (node, api) = Node::with_api("u-1")?;
    let agent = FakeAgent::of_pods(&node.run_dir, gives(&web("u-1")))?;
    node.run("ADD", "")?.result()?;
    ensure!(agent.take_events().is_empty() && api.take_requests() == [PATH]);
    // CHECK compares with the newest, which may have other annotations.
    node.run("CHECK", "u-1")?.silence()?;
    ensure!(agent.take_events().is_empty() && api.take_requests() == [PATH]);
    Ok(())
}

#[test]
fn a_pod_that_cannot_be_read_is_refused_without_asking_twice() -> Result<()> {
    let (node, api) = Node::with_api("u-1")?;
    let mut pod = web("u-1");
    pod["spec"]["containers"][1]["args"] = json!(5);
    let _agent = FakeAgent::of_pods(&node.run_dir, gives(&pod))?;
    let (code, text) = node.run("ADD", "u-1")?.error()?;
    ensure!(code == 100 && text.contains("spec.containers[1].args"), "{code} {text}");
    ensure!(api.take_requests().is_empty());
    Ok(())
}

/// A pod without a sidecar, with what else the agent gives.
fn plain(more: &Value) -> Does {
    let mut given = json!({"pod": {"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "default", "uid": "u-1", "labels": {"team": "a"}},
        "spec": {"containers": [{"name": "app", "image": "app"}]}}});
    given.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    http("200 OK", &given.to_string())
}

#[test]
fn labels_of_the_namespace_that_the_agent_gives_decide_without_the_api_server() -> Result<()> {
    for (labels, decision) in [(json!({"istio.io/dataplane-mode": "ambient"}), "enrol"), (json!({}), "skip")]
    {
        let mut node = Node::new()?;
        node.conf["ambient_enabled"] = json!(true);
        let agent = FakeAgent::of_both(&node.run_dir, plain(&json!({"namespaceLabels": labels})), ok())?;
        let answer = node.run("ADD", "u-1")?;
        let end = end(&answer)?;
        answer.result()?;
        ensure!(end["decision"] == decision && end["source"] == "agent", "{end}");
        let enrolled = agent.take_events().into_iter().find(|(line, _)| line.contains("/cmdadd"));
        let uid = enrolled.map(|(_, event)| event["PodUID"].clone());
        ensure!(uid == (decision == "enrol").then(|| json!("u-1")), "{uid:?}");
    }
    Ok(())
}

/// With its own selectors the plugin cannot tell what the label by which the agent watches leaves out.
#[test]
fn a_namespace_that_the_agents_watch_leaves_out_is_read_where_other_labels_decide() -> Result<()> {
    let (mut node, api) = Node::with_api("u-1")?;
    api.add_namespace("default", &json!({"mesh": "yes"}));
    node.conf["ambient_enabled"] = json!(true);
    node.conf["enablement_selectors"] = json!([{"namespaceSelector": {"matchLabels": {"mesh": "yes"}}}]);
    for (more, requests) in [
        (json!({"namespaceLabels": {}}), &["/api/v1/namespaces/default"][..]),
        (json!({}), &["/api/v1/namespaces/default"]),
        (json!({"namespaceLabels": {"mesh": "yes"}}), &[]),
    ] {
        let _agent = FakeAgent::of_both(&node.run_dir, plain(&more), ok())?;
        let answer = node.run("ADD", "u-1")?;
        ensure!(end(&answer)?["decision"] == "enrol", "{more}: {answer:?}");
        ensure!(api.take_requests() == requests, "{more}");
    }
    Ok(())
}

#[test]
fn a_runtime_whose_handler_the_agent_gives_is_known_without_the_api_server() -> Result<()> {
    for (handler, is_refused) in [("runsc", true), ("nvidia", false)] {
        let node = Node::new()?;
        let mut pod = web("u-1");
        pod["spec"]["runtimeClassName"] = json!("secure");
        let given = json!({"pod": pod, "runtimeHandler": handler}).to_string();
        let _agent = FakeAgent::of_pods(&node.run_dir, http("200 OK", &given))?;
        let answer = node.run("ADD", "u-1")?;
        if is_refused {
            let (code, text) = answer.error()?;
            ensure!(code == 104 && text.contains("secure"), "{code} {text}");
        } else {
            answer.result()?;
        }
        ensure!(node.excludes_the_port()? != is_refused);
    }
    Ok(())
}
