//! What the tests of `redirectctl` share: the program, and pods that are broken in one way each.

use std::fs::{self};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::program;
use crate::traffic::{PROXY_ID, TcpServer, UdpServer, as_user};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Output};

use crate::plugin::{Invocation, RunDir, sidecar};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listening {
    /// The proxy.
    Proxy,
    /// The proxy, but not for DNS.
    ProxyWithoutDns,
    /// A process of another user, in the proxy's place.
    Stranger,
    /// No process.
    Nobody,
}

/// A way to be, and what is wrong with it.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// What it is called.
    pub name: &'static str,
    /// The one cause, or two of them with a comma between; empty where nothing is wrong.
    pub cause: &'static str,
    annotations: &'static [(&'static str, &'static str)],
    variables: &'static [(&'static str, &'static str)],
    conf: &'static str,
    listening: Listening,
    /// Whether the plugin ran.
    added: bool,
    /// For a pod of ambient mode, in place of the plugin: with what `install-cni ambient` was run; nothing if it was not.
    ambient: Option<&'static str>,
    /// What breaks it afterwards.
    script: &'static str,
    /// What the pod says afterwards, that is merged into its spec.
    spec: &'static str,
    /// Likewise for its status.
    status: &'static str,
    /// What happened to it: events, each with reason and message.
    events: &'static [(&'static str, &'static str)],
}

const WHOLE: State = State {
    name: "redirected",
    cause: "",
    annotations: &[],
    variables: &[("ISTIO_DUAL_STACK", "true")],
    conf: "{}",
    listening: Listening::Proxy,
    added: true,
    ambient: None,
    script: "",
    spec: "{}",
    status: "{}",
    events: &[],
};
const ENROLLED: State = State {
    name: "enrolled in ambient mode",
    annotations: &[("ambient.istio.io/redirection", "enabled")],
    added: false,
    ambient: Some("apply --redirect-dns"),
    ..WHOLE
};
/// What a status says while the validation holds the pod back, for what rules do not show.
const HELD: &str = r#"{"phase": "Pending", "initContainerStatuses": [{"name": "istio-validation",
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 126, "message": "{\"reason\":\"nothing-proven\"}"}}}]}"#;
/// What it says of a pod that was repaired, until the kubelet runs the validation again.
const REPAIRED: &str = r#"{"phase": "Pending", "initContainerStatuses": [{"name": "istio-validation",
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 126, "message": "{\"reason\":\"rules-not-in-effect\"}"}}}]}"#;
const DNS: &[(&str, &str)] = &[("ISTIO_DUAL_STACK", "true"), ("ISTIO_META_DNS_CAPTURE", "true")];
const TPROXY: &[(&str, &str)] = &[("sidecar.istio.io/interceptionMode", "TPROXY")];
const NATIVE: &str = r#"{"native_nftables": true}"#;

/// All states.
pub struct States;

const BROKEN: &[State] = &[
    State { name: "plugin never ran", cause: "not-redirected", added: false, ..WHOLE },
    State {
        name: "foreign accept",
        cause: "foreign-rule",
        script: "iptables -t nat -I OUTPUT 1 -j ACCEPT",
        ..WHOLE
    },
    State {
        name: "foreign nat chain",
        cause: "foreign-rule",
        script: "nft 'add table ip other; add chain ip other in { type nat hook prerouting priority -150; }; \
                 add rule ip other in tcp dport 8080 redirect to :3128'",
        ..WHOLE
    },
    State {
        name: "foreign drop",
        cause: "foreign-rule",
        script: "nft 'add table inet other; add chain inet other out { type filter hook output priority -300; }; \
                 add rule inet other out meta l4proto tcp tcp dport 80 drop'",
        ..WHOLE
    },
    State {
        name: "port excluded",
        cause: "port-not-captured",
        annotations: &[("traffic.sidecar.istio.io/excludeInboundPorts", "8080")],
        ..WHOLE
    },
    State {
        name: "no answer to DNS",
        cause: "dns-nobody-listens",
        variables: DNS,
        listening: Listening::ProxyWithoutDns,
        ..WHOLE
    },
    State { name: "no proxy yet", cause: "nobody-listens", listening: Listening::Nobody, ..WHOLE },
    State {
        name: "stranger on the port",
        cause: "stranger-listens",
        listening: Listening::Stranger,
        ..WHOLE
    },
    State {
        name: "capture removed",
        cause: "rules-differ",
        script: "iptables -t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT",
        ..WHOLE
    },
    State {
        name: "hook removed",
        cause: "rules-differ",
        script: "iptables -t nat -D PREROUTING -p tcp -j ISTIO_INBOUND",
        ..WHOLE
    },
    State {
        name: "one family removed",
        cause: "one-family-missing",
        script: "nft delete table ip6 nat",
        ..WHOLE
    },
    State {
        name: "policy rule removed",
        cause: "routing-missing",
        annotations: TPROXY,
        script: "ip rule del fwmark 0x539",
        ..WHOLE
    },
    State {
        name: "mark taken",
        cause: "routing-taken",
        annotations: TPROXY,
        script: "ip rule add pref 9 fwmark 0x539 prohibit",
        ..WHOLE
    },
    State {
        name: "passthrough address removed",
        cause: "passthrough-address-missing",
        script: "ip addr del ::6/128 dev lo",
        ..WHOLE
    },
    State {
        name: "legacy rules beside",
        cause: "two-backends",
        script: "iptables-legacy -t nat -N ISTIO_OUTPUT; iptables-legacy -t nat -A OUTPUT -p tcp -j ISTIO_OUTPUT; \
                 iptables-legacy -t nat -A ISTIO_OUTPUT -j RETURN",
        ..WHOLE
    },
    State {
        name: "table asleep",
        cause: "table-dormant",
        conf: NATIVE,
        script: "nft 'add table inet istio-proxy-nat { flags dormant; }'",
        ..WHOLE
    },
    State {
        name: "lo without address",
        cause: "loopback-down",
        script: "ip addr flush dev lo scope host",
        ..WHOLE
    },
    State {
        name: "malformed annotation",
        cause: "bad-settings",
        annotations: &[("traffic.sidecar.istio.io/excludeOutboundPorts", "http")],
        added: false,
        ..WHOLE
    },
    State {
        name: "annotation that is misspelt",
        cause: "misspelt-setting",
        annotations: &[("traffic.sidecar.istio.io/excludeOutboundPort", "80")],
        ..WHOLE
    },
    State {
        name: "application with the proxy's user",
        cause: "uid-collision",
        spec: r#"{"containers": [{"name": "app", "securityContext": {"runAsUser": 1337}}, {"name": "istio-proxy", "args": ["proxy", "sidecar"], "env": [{"name": "ISTIO_DUAL_STACK", "value": "true"}]}]}"#,
        ..WHOLE
    },
    State {
        name: "init container before the proxy",
        cause: "init-without-network",
        spec: r#"{"initContainers": [{"name": "migrate"}]}"#,
        ..WHOLE
    },
    State {
        name: "proxy taken away afterwards",
        cause: "unexpected-rules",
        spec: r#"{"containers": [{"name": "app"}]}"#,
        ..WHOLE
    },
    State {
        name: "sandboxed runtime",
        cause: "sandboxed-runtime",
        spec: r#"{"runtimeClassName": "gvisor"}"#,
        ..WHOLE
    },
    State { name: "held back", cause: "held-back", status: HELD, ..WHOLE },
    State { name: "repaired", cause: "awaits-validation", status: REPAIRED, ..WHOLE },
    State {
        name: "validation killed",
        cause: "validation-ended",
        status: r#"{"phase": "Pending", "initContainerStatuses": [{"name": "istio-validation",
            "state": {"terminated": {"exitCode": 137, "message": ""}}}]}"#,
        ..WHOLE
    },
    State {
        name: "repair failed",
        cause: "held-back,not-repaired",
        status: HELD,
        events: &[(
            "RepairBrokenPod",
            "pod detected as broken (container istio-validation, exit code 126), but it could not be redirected: the agent's \
             container lacks CAP_SYS_PTRACE; given up after 10 tries",
        )],
        ..WHOLE
    },
    State {
        name: "rules fought over",
        cause: "not-healed",
        events: &[
            ("RedirectHealed", "restored the pod's redirection"),
            (
                "RedirectContested",
                "another program keeps changing the pod's rules (iptables, process 4711); backing off 1 s (at most 60 s); traffic \
                 may bypass the proxy",
            ),
        ],
        ..WHOLE
    },
    State {
        name: "network not set up",
        cause: "not-set-up",
        added: false,
        spec: r#"{"containers": [{"name": "app"}]}"#,
        status: r#"{"phase": "Pending", "podIPs": []}"#,
        events: &[(
            "FailedCreatePodSandBox",
            "plugin type=\"istio-cni\" failed (add): the API server does not let this plugin read pods (403)",
        )],
        ..WHOLE
    },
    State {
        name: "node rebooted in ambient mode",
        cause: "not-enrolled",
        ambient: Some(""),
        listening: Listening::Nobody,
        ..ENROLLED
    },
    State {
        name: "no ztunnel",
        cause: "not-enrolled",
        annotations: &[("ambient.istio.io/redirection", "pending")],
        listening: Listening::Nobody,
        events: &[("AmbientPending", "no ztunnel is connected; start one on this node")],
        ..ENROLLED
    },
    State {
        name: "ambient capture removed",
        cause: "rules-differ",
        script: "iptables -t nat -F ISTIO_OUTPUT",
        ..ENROLLED
    },
];

impl States {
    /// Those with nothing wrong.
    pub fn whole() -> Vec<State> {
        vec![
            WHOLE,
            State { name: "redirected with DNS", variables: DNS, ..WHOLE },
            State { name: "redirected by TPROXY", annotations: TPROXY, ..WHOLE },
            State { name: "redirected by native nftables", conf: NATIVE, variables: DNS, ..WHOLE },
            State {
                name: "redirected in the family that Istio captures by default",
                variables: &[],
                ..WHOLE
            },
            ENROLLED,
            State {
                name: "outside the mesh",
                added: false,
                spec: r#"{"containers": [{"name": "app"}]}"#,
                ..WHOLE
            },
        ]
    }

    /// Those with one thing wrong.
    pub fn broken() -> &'static [State] {
        BROKEN
    }

    /// One of them by its name.
    pub fn named(name: &str) -> Option<State> {
        let mut all = BROKEN.iter().copied().chain(Self::whole());
        all.find(|state| state.name == name)
    }
}

impl State {
    /// Its causes.
    pub fn causes(&self) -> Vec<&'static str> {
        self.cause.split(',').filter(|cause| !cause.is_empty()).collect()
    }

    /// A pod in this state, with addresses of its own.
    pub fn patient(&self, number: u8) -> Result<Patient> {
        let v4 = Ipv4Addr::new(10, 1, number, 2);
        let v6 = Ipv6Addr::new(0xfd00, 0x10, u16::from(number), 0, 0, 0, 0, 2);
        let namespace = Namespace::empty(Families::Dual)?;
        namespace.ip_batch(&format!(
            "link add eth0 type veth peer name pe0\nlink set pe0 up\nlink set eth0 up\n\
             addr add {v4}/24 dev eth0\naddr add {v6}/64 dev eth0 nodad\n"
        ))?;
        let name = format!("web-{number}");
        let mut pod = sidecar(&name, self.annotations);
        pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 8080}]);
        pod["spec"]["containers"][1]["env"] =
            self.variables.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
        if let Some(words) = self.ambient {
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
            namespace.sh(self.script).with_context(|| self.name)?;
        }
        pod["status"] = json!({"phase": "Running", "podIPs": [{"ip": v4}, {"ip": v6}]});
        for (part, more) in [("spec", self.spec), ("status", self.status)] {
            let more: Value = serde_json::from_str(more)?;
            for (key, value) in more.as_object().into_iter().flatten() {
                pod[part][key] = value.clone();
            }
        }
        let event = |(number, (reason, message)): (usize, &(&str, &str))| {
            json!({"kind": "Event", "reason": reason, "message": message, "lastTimestamp": format!("2026-11-22T00:00:0{number}Z"),
                "involvedObject": {"kind": "Pod", "namespace": "default", "name": name}})
        };
        let events = self.events.iter().enumerate().map(event).collect();
        Ok(Patient { namespace, run_dir, pod, events, _tcp: tcp, _udp: udp })
    }

    fn add(&self, namespace: &Namespace, run_dir: &RunDir, name: &str, pod: &Value) -> Result<()> {
        run_dir.write_manifest("pod.json", pod)?;
        let mut conf = run_dir.manifest_conf();
        let more: Value = serde_json::from_str(self.conf)?;
        for (key, value) in more.as_object().into_iter().flatten() {
            conf[key] = value.clone();
        }
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
