//! The agent and a real API server, with TLS and the roles of the manifest, on a machine that does not help: no certificate store, proxy
//! variables, a token file that ends in a newline, an authority that changes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::agent::DIRECTORIES;
use e2e::kube::{ApiServer, fresh};
use e2e::program;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::port::free_port;
use test_support::process::{self, Background, SHORT, until};

use crate::agent_support::{MANIFEST, apply_in};

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);
const CONFLIST: &str = r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}"#;

/// An API server with the manifest in a namespace, and a node.
struct Cluster {
    api: ApiServer,
    namespace: String,
    node: String,
}

impl Cluster {
    fn new() -> Result<Self> {
        let api = ApiServer::shared()?;
        let cluster = Self { namespace: api.fresh_namespace("istio-system")?, node: fresh("node-1"), api };
        apply_in(&cluster.api, &cluster.namespace, MANIFEST)?;
        cluster.api.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": cluster.node, "labels": {"kubernetes.io/os": "linux"}}}))?;
        Ok(cluster)
    }
}

/// A node's directories, and an agent on them with the token of its service account.
struct Agent {
    folder: TempDir,
    program: PathBuf,
    env: Vec<(String, String)>,
}

impl Agent {
    fn new(Cluster { api, namespace, node }: &Cluster) -> Result<Self> {
        let prefix = format!("e2e-{}-agent", std::process::id());
        let agent = Self {
            folder: tempfile::Builder::new().prefix(&prefix).tempdir()?,
            program: program::under_test("install-cni")?,
            env: Vec::new(),
        };
        for (_, part) in DIRECTORIES {
            fs::create_dir(agent.path(part))?;
        }
        fs::copy(program::under_test("istio-cni")?, agent.path("image/istio-cni"))?;
        fs::write(agent.path("net.d/10-net.conflist"), CONFLIST)?;
        fs::copy(api.ca_path(), agent.path("account/ca.crt"))?;
        // As people write files.
        fs::write(agent.path("account/token"), api.token(namespace, "istio-cni")? + "\n")?;
        let text = |path: PathBuf| path.display().to_string();
        let agent = DIRECTORIES.into_iter().fold(agent, |agent, (name, part)| agent.with(name, part));
        Ok(agent
            .map_env(|agent, value| text(agent.path(value)))
            .with("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            .with("KUBERNETES_SERVICE_PORT", &api.port().to_string())
            .with("POD_NAMESPACE", namespace)
            .with("POD_NAME", "istio-cni-node-x")
            .with("NODE_NAME", node)
            .with("HEALTH_PORT", &free_port()?.to_string())
            .with("MONITORING_PORT", "0"))
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    fn map_env(mut self, change: impl Fn(&Self, &str) -> String) -> Self {
        self.env = self.env.iter().map(|(name, value)| (name.clone(), change(&self, value))).collect();
        self
    }

    /// Neither a store of certificates nor a way out but through a proxy that is not there.
    fn unhelped(self) -> Self {
        ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "ALL_PROXY"]
            .into_iter()
            .fold(self, |agent, name| agent.with(name, "http://127.0.0.1:1"))
            .with("SSL_CERT_FILE", "/nonexistent/store")
            .with("SSL_CERT_DIR", "/nonexistent")
    }

    fn path(&self, part: &str) -> PathBuf {
        self.folder.path().join(part)
    }

    fn start(&self) -> Result<Background> {
        let mut command = Command::new(&self.program);
        command.args(["--log_output_level=info", "--ctrlz_port=0"]).env_clear();
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        Ok(Background::start("install-cni", &command, &self.path("log"))?.killed_on_drop())
    }

    /// What the plugin's own token says about itself, once it has one.
    fn wait_own_token(&self, cluster: &Cluster, running: &Background) -> Result<Value> {
        let own = format!("system:serviceaccount:{}:istio-cni-plugin", cluster.namespace);
        until("the plugin's own token", LIMIT, &[running], || {
            let Ok(text) = fs::read_to_string(self.path("run/istio-cni-kubeconfig")) else { return Ok(None) };
            let token = text.lines().find_map(|line| line.trim().strip_prefix("token: "));
            let claims = claims(token.context("no token")?.trim_matches('"'))?;
            Ok((claims["sub"] == own).then_some(claims))
        })
    }
}

fn claims(token: &str) -> Result<Value> {
    let body = token.split('.').nth(1).context("no JSON web token")?;
    let padded = body.replace('-', "+").replace('_', "/") + &"=".repeat((4 - body.len() % 4) % 4);
    let decoded = process::run_with_input(&mut process::command("base64", ["-d"]), &padded, SHORT)?.ok()?;
    Ok(serde_json::from_str(&decoded.stdout)?)
}

#[test]
fn a_machine_that_does_not_help_is_not_needed() -> Result<()> {
    let cluster = Cluster::new()?;
    for skip in ["false", "true"] {
        let agent = Agent::new(&cluster)?.unhelped().with("SKIP_TLS_VERIFY", skip);
        let running = agent.start()?;
        let claims = agent.wait_own_token(&cluster, &running)?;
        assert_eq!(claims["kubernetes.io"]["node"]["name"], cluster.node, "{claims}");
        assert_eq!(claims["kubernetes.io"]["pod"], Value::Null, "{claims}");
        let lasts = claims["exp"].as_u64().zip(claims["iat"].as_u64()).map(|(end, begin)| end - begin);
        assert_eq!(lasts, Some(86400));
        ensure!(!running.log().contains("\twarn\t"), "{}", running.log());
        running.signal(Signal::SIGTERM)?;
        running.wait(LIMIT)?;
        ensure!(agent.path("bin/istio-cni").exists(), "the DaemonSet is there: {}", running.log());
    }
    Ok(())
}

#[test]
fn the_plugins_account_may_get_pods_and_runtime_classes_and_nothing_else() -> Result<()> {
    let Cluster { api, namespace, .. } = &Cluster::new()?;
    let kubeconfig = |name: &str, account: &str| api.token_kubeconfig(name, &api.token(namespace, account)?);
    let (plugin, agent) = (kubeconfig("plugin", "istio-cni-plugin")?, kubeconfig("agent", "istio-cni")?);
    // With --subresource: behind a slash kubectl expects a name, so `serviceaccounts/token` is an account that is called token.
    let asked = |who: &Path, verb: &str, what: &str, part: &str, scope: &[&str]| -> Result<bool> {
        let part = format!("--subresource={part}");
        let answer = api.kubectl_as(who, &[&["auth", "can-i", verb, what, &part], scope].concat())?;
        Ok(answer.stdout.trim() == "yes")
    };
    let may = |verb: &str, what: &str, part: &str| asked(&plugin, verb, what, part, &["--all-namespaces"]);
    until("the role to count", SHORT, &[], || Ok(may("get", "pods", "")?.then_some(())))?;
    // The question about tokens is one that is answered with yes where somebody may have them.
    let tokens =
        |who: &Path| asked(who, "create", "serviceaccounts/istio-cni-plugin", "token", &["-n", namespace]);
    until("the agent's role to count", SHORT, &[], || Ok(tokens(&agent)?.then_some(())))?;
    ensure!(!tokens(&plugin)?, "it may make tokens of its own account");
    ensure!(may("get", "runtimeclasses.node.k8s.io", "")?);
    for (verb, what, part) in [
        ("list", "runtimeclasses.node.k8s.io", ""),
        ("list", "pods", ""),
        ("watch", "pods", ""),
        ("create", "events", ""),
        ("get", "nodes", ""),
        ("get", "daemonsets.apps", ""),
        ("create", "serviceaccounts", "token"),
    ] {
        ensure!(!may(verb, what, part)?, "it may {verb} {what} {part}");
    }
    Ok(())
}

#[test]
fn a_new_authority_is_noticed() -> Result<()> {
    let cluster = Cluster::new()?;
    let agent = Agent::new(&cluster)?;
    fs::write(agent.path("account/ca.crt"), other_authority(&agent.path("other"))?)?;
    let running = agent.start()?;
    until("the complaint", LIMIT, &[&running], || {
        Ok(running.log().contains("no trustworthy connection to the API server").then_some(()))
    })?;
    fs::copy(cluster.api.ca_path(), agent.path("account/ca.new"))?;
    fs::rename(agent.path("account/ca.new"), agent.path("account/ca.crt"))?;
    agent.wait_own_token(&cluster, &running)?;
    let complaints = running.log().matches("no trustworthy connection").count();
    ensure!(complaints == 1, "an outage is one line: {}", running.log());
    Ok(())
}

/// The certificate of an authority that has nothing to do with the API server's.
fn other_authority(folder: &Path) -> Result<String> {
    fs::create_dir(folder)?;
    let request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=other -days 2 -keyout key -out ca";
    let mut openssl = process::command("sh", ["-ec", request]);
    process::run(openssl.current_dir(folder), SHORT)?.ok()?;
    Ok(fs::read_to_string(folder.join("ca"))?)
}
