//! `install-cni`: installing and removing the plugin, and the agent with what it repairs and heals.

use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cni_core::logs::{CALLED, READER};
use e2e::agent::{CALICO, DIRECTORIES, PLUGIN, exchange, set_mode};
use e2e::faults::Ending;
use e2e::http;
use e2e::plugin::sidecar;
use e2e::pods::{Proc, UID, held_back, hosts};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, NetnsDirectory, POD_V4};
use test_support::port::free_port;

use super::api::Api;
use super::place::{Healing, Place};
use super::plugin::add;
use super::run::{Invoked, Wrapping};
use super::{Operation, SECRET};

/// The node's network configuration, as another program wrote it.
const CONFLIST: (&str, &str) = ("10-calico.conflist", CALICO);
/// The entry beside the list, in the folder of the network's name.
const DROP_IN: &str = "net.d/k8s-pod-network/zz-istio-cni.conf";
/// What the agent keeps of the process that called the plugin by it.
const KNOWN_READER: &str = "run/drop-in-reader";

/// What the agent is for.
#[derive(Clone, Copy)]
struct Work {
    name: &'static str,
    /// Its command. Without one the agent goes on until it has reached its goal.
    command: &'static str,
    goal: Goal,
    /// Its settings beside those of every agent.
    settings: &'static [(&'static str, &'static str)],
    /// What is done on the node before.
    before: Option<&'static Self>,
    files: &'static [&'static str],
    writes_to: &'static [&'static str],
}

/// What an agent is to reach.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Goal {
    Ready,
    /// A runtime has read the entry beside the list, which is as its owner wrote it.
    Beside,
    PodRepaired,
    PodDeleted,
    PodLabelled,
    PodHealed,
}

const NO_REPAIR: (&str, &str) = ("REPAIR_ENABLED", "false");

const AGENT: Work = Work {
    name: "agent: install",
    command: "",
    goal: Goal::Ready,
    settings: &[NO_REPAIR],
    before: None,
    files: &[
        "image/istio-cni",
        "account/token",
        "account/ca.crt",
        "net.d/10-calico.conflist",
        "bin",
        "run",
        "net.d",
    ],
    writes_to: &["", "net.d", "bin", "run"],
};
const ONCE: Work = Work { name: "install --once", command: "install --once", ..AGENT };
/// Its entry into a file beside the network's list.
const BESIDE: Work =
    Work { name: "install --once, beside", settings: &[NO_REPAIR, ("CNI_INSTALL", "drop-in")], ..ONCE };
const UNINSTALL: Work = Work {
    name: "uninstall",
    command: "uninstall",
    before: Some(&ONCE),
    files: &["bin/istio-cni", "run/istio-cni-kubeconfig", "bin", "run"],
    ..AGENT
};
const REPAIR: Work = Work {
    name: "agent: repair",
    goal: Goal::PodRepaired,
    settings: &[("REPAIR_REPAIR_PODS", "true")],
    files: &["account/token"],
    writes_to: &["bin"],
    ..AGENT
};

pub fn operations() -> Vec<Box<dyn Operation>> {
    let all = [
        ONCE,
        BESIDE,
        // From there into the list.
        Work { name: "install --once, back", before: Some(&BESIDE), files: &["net.d"], ..ONCE },
        UNINSTALL,
        Work { name: "uninstall, beside", before: Some(&BESIDE), ..UNINSTALL },
        AGENT,
        Work {
            name: "agent: beside",
            goal: Goal::Beside,
            settings: &[NO_REPAIR, ("CNI_INSTALL", "auto")],
            ..AGENT
        },
        REPAIR,
        Work {
            name: "agent: delete",
            goal: Goal::PodDeleted,
            settings: &[("REPAIR_DELETE_PODS", "true")],
            ..REPAIR
        },
        Work {
            name: "agent: label",
            goal: Goal::PodLabelled,
            settings: &[("REPAIR_LABEL_PODS", "true")],
            ..REPAIR
        },
        Work {
            name: "agent: heal",
            goal: Goal::PodHealed,
            settings: &[NO_REPAIR, ("DRIFT_WATCH_INTERVAL", "1s"), ("DRIFT_HEAL", "true")],
            ..REPAIR
        },
    ];
    all.map(|work| Box::new(work) as Box<dyn Operation>).into()
}

impl Work {
    /// A pod, and where it is on the node. One that is to be healed was whole when the agent saw it first.
    fn add_pod(self, place: &mut Place) -> Result<()> {
        let namespace = Namespace::pod(Families::V4)?;
        let mut pod = sidecar("web", &[]);
        pod["metadata"]["uid"] = json!(UID);
        pod["metadata"]["resourceVersion"] = json!("7");
        pod["metadata"]["labels"] = json!({"app": "web"});
        pod["spec"]["nodeName"] = json!("node-1");
        pod["status"] = json!({"phase": "Running", "podIP": POD_V4, "podIPs": [{"ip": POD_V4}]});
        if self.goal == Goal::PodHealed {
            add(place, &namespace)?;
        } else {
            pod = held_back(pod);
        }
        place.api.as_ref().context("an API server")?.put(pod);
        let runtime = NetnsDirectory::of([&namespace])?;
        place.runtime = Some(runtime.path().display().to_string());
        place.keeps.push(Box::new(runtime));
        let proc = Proc::on(&hosts());
        proc.add_of(77, UID, &namespace.path());
        place.proc = Some(proc.0.path().display().to_string());
        place.keeps.push(Box::new(proc));
        place.namespace = Some(namespace);
        Ok(())
    }

    /// It has tried to, and then found all as planned twice without another attempt. What it counts attempts as is not asked: where a fault keeps it from
    /// looking at what it has done, it says that this is not verified. And what an attempt does may be undone before it ends.
    fn is_healed(place: &Place) -> bool {
        let Some(since) = place.rule_lost.get() else { return false };
        let now = Healing::now(place);
        if now.attempts > since.attempts {
            place.rule_lost.set(Some(now));
        }
        now.attempts >= 1.0
            && now.attempts <= since.attempts
            && now.found_as_planned >= since.found_as_planned + 2.0
    }
}

/// Waits for an answer for a while only: the agent may stand still.
fn get(port: u16, path: &str) -> Option<(u16, String)> {
    let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    exchange(stream, "GET", path, b"")
}

fn metrics(place: &Place) -> String {
    get(place.ports[1], "/metrics").unwrap_or_default().1
}

fn metric(place: &Place, name: &str) -> f64 {
    http::metric(&metrics(place), name).unwrap_or_default()
}

/// The plugin reports that this process called it by the entry beside the list.
fn report_call(place: &Place) {
    let (time, id) = ("2026-11-21T00:00:00Z", std::process::id());
    let line = json!({"time": time, "level": "info", "msg": "called", CALLED: "STATUS", READER: id});
    let body = json!([line.to_string()]).to_string();
    // The agent may not listen yet, or stand still.
    if let Ok(socket) = UnixStream::connect(place.file("run/log.sock"))
        && socket.set_read_timeout(Some(Duration::from_secs(1))).is_ok()
    {
        let _ = exchange(socket, "POST", "/log", body.as_bytes());
    }
}

impl Healing {
    fn now(place: &Place) -> Self {
        let text = metrics(place);
        let sum = |name: &str| {
            let counted = text.lines().filter(|line| line.starts_with(name));
            counted.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
        };
        Self {
            attempts: sum("istio_cni_heal_attempts_total{"),
            found_as_planned: sum("istio_cni_drift_checks_total{result=\"verified\"}"),
        }
    }
}

fn is_ready(place: &Place) -> bool {
    get(place.ports[0], "/readyz").is_some_and(|(status, _)| status == 200)
}

impl Operation for Work {
    fn name(&self) -> &'static str {
        self.name
    }

    fn goes_on(&self) -> bool {
        self.command.is_empty()
    }

    fn asks_api(&self) -> bool {
        self.goes_on()
    }

    fn files(&self) -> &'static [&'static str] {
        self.files
    }

    fn writes_to(&self) -> &'static [&'static str] {
        self.writes_to
    }

    fn stage(&self) -> Result<Place> {
        let mut place = Place::new()?;
        for (_, part) in DIRECTORIES {
            fs::create_dir(place.file(part))?;
        }
        fs::write(place.file("image/istio-cni"), PLUGIN)?;
        set_mode(&place.file("image/istio-cni"), 0o755);
        fs::write(place.file("account/ca.crt"), "authority\n")?;
        fs::write(place.file("account/token"), SECRET)?;
        fs::write(place.file("net.d").join(CONFLIST.0), CONFLIST.1)?;
        place.foreign = Some(CONFLIST);
        place.ports = [free_port()?, free_port()?, free_port()?];
        place.api = Some(Api::start()?);
        if !matches!(self.goal, Goal::Ready | Goal::Beside) {
            self.add_pod(&mut place)?;
        }
        if self.command == UNINSTALL.command {
            place.removed = &["bin/istio-cni", "run/istio-cni-kubeconfig", DROP_IN];
        }
        if let Some(before) = self.before {
            let ended = before.invoked(&place)?.run(&Wrapping::default(), None)?;
            ensure!(ended.ending == Ending::Code(0), "{ended:?}");
        }
        Ok(place)
    }

    fn invoked(&self, place: &Place) -> Result<Invoked> {
        let control = format!("--ctrlz_port={}", place.ports[2]);
        let mut invoked = Invoked::of("install-cni", if self.goes_on() { &control } else { self.command })?;
        let mut set = |name: &str, value: &str| invoked.env.push((name.to_owned(), value.to_owned()));
        for (name, part) in DIRECTORIES {
            set(name, &place.text(part));
        }
        let api = place.api.as_ref().context("an API server")?;
        for (name, value) in [
            ("KUBERNETES_SERVICE_HOST", "127.0.0.1"),
            ("KUBERNETES_SERVICE_PORT", &*api.port().to_string()),
            ("KUBERNETES_SERVICE_PROTOCOL", "http"),
            ("SKIP_TLS_VERIFY", "true"),
            ("PLUGIN_SERVICE_ACCOUNT", ""),
            ("POD_NAMESPACE", "istio-system"),
            ("POD_NAME", "istio-cni-node-x"),
            ("NODE_NAME", "node-1"),
            ("HEALTH_PORT", &*place.ports[0].to_string()),
            ("MONITORING_PORT", &*place.ports[1].to_string()),
            ("MOUNTED_CNI_NETNS_DIR", place.runtime.as_deref().unwrap_or_default()),
            ("MOUNTED_PROC_DIR", place.proc.as_deref().unwrap_or("/proc")),
        ] {
            set(name, value);
        }
        for (name, value) in self.settings {
            set(name, value);
        }
        Ok(invoked)
    }

    fn is_reached(&self, place: &Place) -> bool {
        if !is_ready(place) {
            return false;
        }
        let pod = || place.api.as_ref().and_then(|api| api.pod("web"));
        let repaired = |kind: &str| {
            metric(
                place,
                &format!("istio_cni_repair_pods_repaired_total{{type=\"{kind}\",result=\"success\"}}"),
            ) >= 1.0
        };
        match self.goal {
            Goal::Ready => true,
            Goal::Beside => {
                let is_owners = fs::read_to_string(place.file("net.d").join(CONFLIST.0))
                    .is_ok_and(|list| list == CONFLIST.1);
                if !is_owners {
                    report_call(place);
                }
                is_owners && place.file(KNOWN_READER).exists()
            }
            Goal::PodRepaired => repaired("repair"),
            Goal::PodDeleted => pod().is_none(),
            Goal::PodLabelled => pod()
                .is_some_and(|pod: Value| !pod["metadata"]["labels"]["cni.istio.io/uninitialized"].is_null()),
            Goal::PodHealed => {
                if place.rule_lost.get().is_none() && metric(place, "istio_cni_heal_watched_pods") >= 1.0 {
                    // It may be lost from an earlier run.
                    let delete = "iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT || true";
                    let lost = place.network().and_then(|pod| pod.sh(delete));
                    place.rule_lost.set(lost.is_ok().then(|| Healing::now(place)));
                }
                Self::is_healed(place)
            }
        }
    }
}
