//! Ready means that a pod would be redirected: with the real plugin.

use std::fs;

use e2e::agent::{self, Agent, CALICO, Node};

fn node(env: &[(&str, &str)]) -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.use_real_plugin();
    for (name, value) in env {
        node.set(name, value);
    }
    node
}

/// Waits for the reason, and expects no entry: with one, every pod would fail.
fn refused<'n>(node: &'n Node, reason: &str) -> Agent<'n> {
    let agent = node.start();
    agent.wait_not_ready(reason);
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO), "{reason}");
    agent
}

#[test]
fn a_template_that_the_plugin_refuses_is_not_written() {
    for (template, reason) in [
        (r#"{"name":"x","type":"istio-cni","plugin_log_level":"trace"}"#, "plugin_log_level"),
        (r#"{"name":"x","type":"istio-cni","exclude_namespaces":"kube-system"}"#, "exclude_namespaces"),
        (
            r#"{"name":"x","type":"istio-cni","cni_agent_run_dir":"/var/run/other"}"#,
            "/var/run/other/istio-cni-kubeconfig",
        ),
        (r#"{"name":"x","type":"istio-cni","cni_agent_run_dir":"run"}"#, "not an absolute path"),
    ] {
        let node = node(&[("CNI_NETWORK_CONFIG", template)]);
        let agent = refused(&node, reason);
        let said = agent.wait_not_ready("10-calico.conflist");
        assert!(said.contains("the plugin would reject its entry"), "{said}");
        agent.wait_metric("istio_cni_installs_total{result=\"CREATE_CNI_CONFIG_FAILURE\"}", 1.0);
    }
}

#[test]
fn a_list_in_a_version_that_the_plugin_does_not_speak_gets_no_entry() {
    let future = CALICO.replace("\"cniVersion\": \"0.3.1\"", "\"cniVersion\": \"7.0.0\"");
    assert_ne!(future, CALICO);
    let node = node(&[]);
    node.write_conf("10-calico.conflist", &future);
    node.start().wait_not_ready("7.0.0");
    assert_eq!(node.conf("10-calico.conflist"), Some(future));
}

#[test]
fn an_image_whose_plugin_does_not_work_replaces_none_that_does() {
    let node = node(&[]);
    node.start_ready().kill();
    let (good, with_entry) = (fs::read(node.path("bin/istio-cni")).expect("a plugin"), node.confs());
    for (broken, reason) in
        [(&b""[..], "Exec format error"), (&b"#!/bin/sh\nexit 1\n"[..], "ended with exit status: 1")]
    {
        fs::write(node.path("image/istio-cni"), broken).expect("writes");
        let agent = node.start();
        let said = agent.wait_not_ready("cannot be run as a plugin");
        assert!(said.contains(reason), "{said}");
        agent.wait_metric("istio_cni_installs_total{result=\"COPY_BINARIES_FAILURE\"}", 1.0);
        assert!(fs::read(node.path("bin/istio-cni")).expect("a plugin") == good);
        assert_eq!(node.confs(), with_entry);
        // It tries again now and then, and what it writes for that is there for a moment.
        let count = || fs::read_dir(node.path("bin")).expect("lists").count();
        agent.wait("nothing half-written to stay", || count() == 1);
    }
}

#[test]
fn credentials_that_the_plugin_cannot_use_are_not_ready() {
    let bad_authority = node(&[("SKIP_TLS_VERIFY", "false"), ("KUBERNETES_SERVICE_PROTOCOL", "https")]);
    let said = bad_authority.start().wait_not_ready("the installed plugin refuses to work");
    assert!(said.contains("istio-cni-kubeconfig") && said.contains("certificate"), "{said}");

    let bad_token = node(&[]);
    fs::write(bad_token.path("account/token"), "one\ntwo").expect("writes");
    let agent = bad_token.start();
    let said = agent.wait_not_ready("the installed plugin refuses to work");
    assert!(said.contains("characters that no token has"), "{said}");
    assert!(!said.contains("two"), "{said}");
    // As soon as they are right it is ready.
    fs::write(bad_token.path("account/token"), "one").expect("writes");
    agent.wait_ready();
}

#[test]
fn the_answer_of_the_plugin_is_not_asked_for_at_every_probe() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    // There the plugin may write, as the agent may.
    let counted = agent::PLUGIN.replace("exit 0", &format!("echo x >> {}", node.path("run/asked").display()));
    fs::write(node.path("image/istio-cni"), counted).expect("writes");
    let agent = node.start_ready();
    let asked = || fs::read_to_string(node.path("run/asked")).expect("asked").len();
    let before = asked();
    (0..20).for_each(|_| assert_eq!(agent.readyz().expect("answers").0, 200));
    assert!(asked() <= before + 2, "{} times", asked() - before);
    // But as soon as something new has to be asked.
    let before = asked();
    fs::write(node.path("account/token"), "token-2").expect("writes");
    agent.wait("another question", || agent.readyz().is_some() && asked() > before);
}
