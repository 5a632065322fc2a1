//! What the tests of `redirectctl` share: the program, and pods that are broken in one way each.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::program::{self, PATH};
use crate::traffic::{PROXY_ID, TcpServer, UdpServer, as_user};
use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Output};

use crate::plugin::{Invocation, RunDir, sidecar};

/// Longer than a look may take on any machine.
const PATIENCE: Duration = Duration::from_secs(900);

/// The program under test: the one REDIRECTCTL names, else the workspace's, built once per test process.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| program::under_test("redirectctl").expect("redirectctl is built"))
}

/// Runs `redirectctl ARGS` to its end, with nothing but a PATH in its environment.
pub fn redirectctl(args: &[&str]) -> Result<Output> {
    process::run(&mut command(args), PATIENCE)
}

/// `redirectctl ARGS`, with nothing but a PATH in its environment.
pub fn command(args: &[&str]) -> Command {
    let mut command = process::command(program(), args);
    command.env_clear().env("PATH", PATH);
    command
}

/// Runs `install-cni ambient WORDS` for a network namespace, unless the words are empty.
fn enrol(namespace: &Namespace, words: &str) -> Result<()> {
    if words.is_empty() {
        return Ok(());
    }
    let mut command = process::command(program::under_test("install-cni")?, ["ambient"]);
    command.args(words.split_whitespace()).arg("--network-namespace").arg(namespace.path());
    process::run(&mut command, PATIENCE)?.ok()?;
    Ok(())
}

/// A pod with a network namespace, redirected by the plugin where that redirects it, and then perhaps broken.
pub struct Patient {
    namespace: Namespace,
    run_dir: RunDir,
    pod: Value,
    events: Vec<Value>,
    _tcp: Vec<TcpServer>,
    _udp: Vec<UdpServer>,
}

impl Patient {
    /// Its network namespace.
    pub const fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The pod, as the API server would have it.
    pub const fn pod(&self) -> &Value {
        &self.pod
    }

    /// The pod and its events, as the API server would have them.
    pub fn objects(&self) -> impl Iterator<Item = &Value> {
        std::iter::once(&self.pod).chain(&self.events)
    }

    /// The file of its manifest, with its events.
    pub fn manifest(&self) -> Result<String> {
        let path = self.run_dir.path().join("pod.json");
        let objects: Vec<&Value> = self.objects().collect();
        fs::write(&path, json!({"kind": "List", "items": objects}).to_string())?;
        Ok(path.display().to_string())
    }
}

/// Who listens in a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
enum Listening {
    /// The proxy.
    #[default]
    Proxy,
    /// The proxy, but not for DNS.
    ProxyWithoutDns,
    /// A process of another user, in the proxy's place.
    Stranger,
    /// No process.
    Nobody,
}

/// A way to be, and what is wrong with it.
#[derive(Clone, Debug, Deserialize)]
pub struct State {
    /// What it is called.
    pub name: String,
    /// The one cause, or two of them with a comma between; empty where nothing is wrong.
    #[serde(default)]
    pub cause: String,
    /// What a user notices, in the words of docs/tasks/troubleshooting.md.
    pub symptom: Option<String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default = "dual_stack")]
    variables: BTreeMap<String, String>,
    /// More of the plugin's configuration.
    #[serde(default)]
    conf: Map<String, Value>,
    #[serde(default)]
    listening: Listening,
    /// Whether the plugin ran.
    #[serde(default = "yes")]
    added: bool,
    /// For a pod of ambient mode, in place of the plugin: with what `install-cni ambient` was run; nothing if it was not.
    ambient: Option<String>,
    /// What breaks it afterwards.
    #[serde(default)]
    script: String,
    /// What the pod says afterwards, that is merged into its spec.
    #[serde(default)]
    spec: Map<String, Value>,
    /// Likewise for its status.
    #[serde(default)]
    status: Map<String, Value>,
    /// What happened to it: events, each with reason and message.
    #[serde(default)]
    events: Vec<(String, String)>,
}

fn dual_stack() -> BTreeMap<String, String> {
    [("ISTIO_DUAL_STACK".to_owned(), "true".to_owned())].into()
}

const fn yes() -> bool {
    true
}

fn states() -> impl Iterator<Item = State> {
    let all: Vec<State> =
        serde_saphyr::from_str(include_str!("../fixtures/pod-states.yaml")).expect("a list of states");
    all.into_iter()
}

/// The states with nothing wrong.
pub fn whole() -> Vec<State> {
    states().filter(|state| state.cause.is_empty()).collect()
}

/// Those with something wrong.
pub fn broken() -> Vec<State> {
    states().filter(|state| !state.cause.is_empty()).collect()
}

/// A pod in the state of this name, with addresses of its own.
pub fn patient(name: &str, number: u8) -> Result<Patient> {
    states().find(|state| state.name == name).with_context(|| format!("no state {name}"))?.patient(number)
}

impl State {
    /// Its causes.
    pub fn causes(&self) -> Vec<&str> {
        self.cause.split(',').filter(|cause| !cause.is_empty()).collect()
    }

    /// A pod in this state, with addresses of its own.
    pub fn patient(&self, number: u8) -> Result<Patient> {
        let v4 = Ipv4Addr::new(10, 1, number, 2);
        let v6 = Ipv6Addr::new(0xfd00, 0x10, u16::from(number), 0, 0, 0, 0, 2);
        let namespace = Namespace::empty(Families::Dual)?;
        namespace.add_eth0([format!("{v4}/24"), format!("{v6}/64")])?;
        let name = format!("web-{number}");
        let annotations: Vec<(&str, &str)> =
            self.annotations.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let mut pod = sidecar(&name, &annotations);
        pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 8080}]);
        pod["spec"]["containers"][1]["env"] =
            self.variables.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
        if let Some(words) = &self.ambient {
            pod["metadata"]["labels"] = json!({"istio.io/dataplane-mode": "ambient"});
            pod["metadata"]["annotations"]
                .as_object_mut()
                .context("annotations")?
                .remove("sidecar.istio.io/status");
            pod["spec"]["containers"] = json!([{"name": "app", "ports": [{"containerPort": 8080}]}]);
            // Probes come from an address that only a default route leads to.
            namespace.sh("ip route add default dev eth0; ip -6 route add default dev eth0")?.ok()?;
            enrol(&namespace, words)?;
        }
        let run_dir = RunDir::new()?;
        if self.added {
            self.add(&namespace, &run_dir, &name, &pod)?;
        }
        let (tcp, udp) = self.listeners(&namespace)?;
        if !self.script.is_empty() {
            namespace.sh(&self.script).with_context(|| self.name.clone())?;
        }
        pod["status"] = json!({"phase": "Running", "podIPs": [{"ip": v4}, {"ip": v6}]});
        for (part, more) in [("spec", &self.spec), ("status", &self.status)] {
            pod[part].as_object_mut().context(part)?.extend(more.clone());
        }
        let event = |(number, (reason, message)): (usize, &(String, String))| {
            json!({"kind": "Event", "reason": reason, "message": message, "lastTimestamp": format!("2026-11-22T00:00:0{number}Z"),
                "involvedObject": {"kind": "Pod", "namespace": "default", "name": name}})
        };
        let events = self.events.iter().enumerate().map(event).collect();
        Ok(Patient { namespace, run_dir, pod, events, _tcp: tcp, _udp: udp })
    }

    fn add(&self, namespace: &Namespace, run_dir: &RunDir, name: &str, pod: &Value) -> Result<()> {
        run_dir.write_manifest("pod.json", pod)?;
        let mut conf = run_dir.manifest_conf();
        conf.as_object_mut().context("a configuration")?.extend(self.conf.clone());
        Invocation::new("ADD", &conf).netns(namespace).pod("default", name).run()?.result()?;
        Ok(())
    }

    fn listeners(&self, namespace: &Namespace) -> Result<(Vec<TcpServer>, Vec<UdpServer>)> {
        let any: IpAddr = Ipv6Addr::UNSPECIFIED.into();
        let user = match self.listening {
            Listening::Nobody => return Ok((Vec::new(), Vec::new())),
            Listening::Stranger => 1000,
            Listening::Proxy | Listening::ProxyWithoutDns => PROXY_ID,
        };
        as_user(user, user, || {
            let mut tcp = Vec::new();
            let mut ports = vec![15001, 15006];
            ports.extend((self.listening == Listening::Proxy).then_some(15053));
            for port in ports {
                tcp.push(TcpServer::start(namespace, "proxy", (any, port))?);
            }
            let udp = match self.listening {
                Listening::Proxy => vec![UdpServer::start(namespace, "dns", (any, 15053))?],
                Listening::ProxyWithoutDns | Listening::Stranger | Listening::Nobody => Vec::new(),
            };
            Ok((tcp, udp))
        })
    }
}
