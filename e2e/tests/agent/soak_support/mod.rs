//! A node of the soak: an agent's directories, an API server with its pods, their network namespaces, and the expected rules.

pub mod programs;

use redirect_core::plan::DataPlane;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use redirect_core::options::BackendChoice;
use redirect_core::options::NativeForm;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, NetnsDirectory, Snapshot, SnapshotDiff};
use test_support::parallel::in_parallel;
use test_support::process::{self, SHORT};

use e2e::agent::{CALICO, Node};
use e2e::pods::{self, PodApi, Proc, THEIRS, mesh_pod};
use programs::{Call, result};

/// How many pods are worked on at the same time.
pub const THREADS: usize = 8;

/// Annotations of a pod, beside those of any in the mesh.
pub type Annotations = &'static [(&'static str, &'static str)];

/// How pods are to be redirected: as unlike each other as possible.
pub const KINDS: [Annotations; 5] = [
    &[],
    &[(MODE, "TPROXY")],
    &[
        ("traffic.sidecar.istio.io/includeInboundPorts", "80,443"),
        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.9.0.0/16,192.168.0.0/24,172.16.0.0/12"),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", "3306,6379,5432,9042,27017,11211,2181,9092"),
    ],
    &[(STRICT, "true")],
    &[(MODE, "TPROXY"), (STRICT, "true"), ("traffic.sidecar.istio.io/excludeInboundPorts", "9,10,11")],
];
const MODE: &str = "sidecar.istio.io/interceptionMode";
const STRICT: &str = "traffic.sidecar.istio.io/strictCapture";

pub fn is_tproxy(annotations: Annotations) -> bool {
    annotations.contains(&(MODE, "TPROXY"))
}

/// What all pods of a node have in common.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    pub choice: BackendChoice,
    pub native: NativeForm,
    /// Its agent is killed in every round; otherwise it lives as long as the soak.
    pub is_killed: bool,
}

/// One agent listens to 1,024 pods at most, so the namespaces are spread over four.
pub const NODES: [Form; 4] = [
    Form { choice: BackendChoice::Auto, native: NativeForm::Plain, is_killed: false },
    Form { choice: BackendChoice::NativeNft, native: NativeForm::Plain, is_killed: false },
    Form { choice: BackendChoice::Auto, native: NativeForm::Plain, is_killed: true },
    Form { choice: BackendChoice::NativeNft, native: NativeForm::Sets, is_killed: true },
];

/// A network namespace, which one pod after another has.
pub struct Pod {
    number: usize,
    pub namespace: Namespace,
    before: Snapshot,
}

impl Pod {
    pub fn new(number: usize) -> Result<Self> {
        let namespace = Namespace::empty(Families::Dual)?;
        let addresses = addresses(number);
        namespace.add_eth0(&addresses)?;
        sh(&namespace, THEIRS)?;
        let before = namespace.snapshot()?;
        Ok(Self { number, namespace, before })
    }

    pub fn name(&self) -> String {
        format!("web-{}", self.number)
    }

    pub const fn is_odd(&self) -> bool {
        self.number % 2 == 1
    }

    /// The annotations of its pod of a round, and those it has at first.
    pub fn annotations(&self, round: usize) -> (Annotations, Annotations) {
        let at_first = (self.number + round) % KINDS.len();
        // Every other kind comes after every kind: the distance changes.
        let later = (at_first + 1 + (self.number / KINDS.len() + round) % (KINDS.len() - 1)) % KINDS.len();
        (KINDS[later], KINDS[at_first])
    }

    /// The pod of a round, as the API server has it.
    fn object(&self, round: usize, annotations: Annotations) -> Value {
        let addresses = addresses(self.number);
        let mut pod = mesh_pod(&self.name(), &addresses.each_ref().map(String::as_str));
        (pod["kind"], pod["apiVersion"]) = (json!("Pod"), json!("v1"));
        pod["metadata"]["uid"] = json!(self.uid(round));
        for (key, value) in annotations {
            pod["metadata"]["annotations"][key] = json!(value);
        }
        pod
    }

    fn uid(&self, round: usize) -> String {
        format!("0f1e2d3c-4b5a-6978-{round:04x}-a5b4c3d2{:04x}", self.number)
    }

    fn process(&self) -> u32 {
        100 + u32::try_from(self.number).expect("few")
    }

    /// Whether a run is changing the namespace's rules.
    pub fn is_locked(&self) -> Result<bool> {
        let list = || process::run(&mut process::command("nft", ["list", "tables"]), SHORT);
        Ok(self.namespace.enter(list)??.ok()?.stdout.contains(DataPlane::NFT_LOCK_TABLE))
    }

    /// The difference between the namespace now and before its redirection.
    pub fn difference(&self) -> Result<Vec<String>> {
        difference(&self.namespace, &self.before)
    }
}

/// Runs a script in a namespace. It has no mounts of its own, unlike what [`Namespace::sh`] runs: where thousands of namespaces are mounted, to copy
/// those takes the kernel longer than all else.
pub fn sh(namespace: &Namespace, script: &str) -> Result<()> {
    let run = || process::run(&mut process::command("sh", ["-euc", script]), SHORT);
    namespace.enter(run)??.ok().map(drop)
}

/// Order counts. The numbers do not that the kernel gives to policy rules: those depend on what was there when the rule came.
fn difference(namespace: &Namespace, before: &Snapshot) -> Result<Vec<String>> {
    let shown = |change: SnapshotDiff| match change.line.split_once(':') {
        Some((number, rule)) if number.parse::<u32>().is_ok() => {
            format!("{} {}:{rule}", if change.is_lost { '-' } else { '+' }, change.section)
        }
        _ => change.to_string(),
    };
    Ok(namespace.snapshot()?.changes_since(before).into_iter().map(shown).collect())
}

fn addresses(number: usize) -> [String; 2] {
    [format!("10.1.{}.{}", number / 250, number % 250 + 1), format!("fd00:10::{:x}", number + 1)]
}

/// An agent's node.
pub struct Place {
    pub form: Form,
    pub node: Node,
    pub api: PodApi,
    pub pods: Vec<Pod>,
    proc: Proc,
    mounted: NetnsDirectory,
    /// What each of [`KINDS`] adds to a namespace, once the agent has made the plugin's configuration.
    wanted: Vec<Vec<String>>,
}

impl Place {
    pub fn new(form: Form, pods: usize) -> Result<Self> {
        // CHECK came with 0.4.0.
        let mut node = Node::new(&[("10-calico.conflist", &CALICO.replace("0.3.1", "1.0.0"))]);
        node.use_real_plugin();
        let switch = |is_on| if is_on { "true" } else { "false" };
        node.set("DRIFT_WATCH_INTERVAL", "1h");
        node.set("DRIFT_HEAL", "true");
        node.set("NATIVE_NFTABLES", switch(form.choice == BackendChoice::NativeNft));
        node.set("NFT_SETS", switch(form.native == NativeForm::Sets));
        let proc = Proc::new(&mut node);
        let mounted = NetnsDirectory::new()?;
        node.set("MOUNTED_CNI_NETNS_DIR", &mounted.path().display().to_string());
        let api = PodApi::start(&mut node, Vec::new());
        let made = Mutex::new(Vec::new());
        let numbers: Vec<usize> = (0..pods).collect();
        let problems = in_parallel(THREADS, &numbers, |_, number| {
            let pod = Pod::new(*number)?;
            made.lock().unwrap_or_else(PoisonError::into_inner).push(pod);
            Ok(Vec::new())
        });
        ensure!(problems.is_empty(), "{}", problems.join("\n"));
        let mut pods = made.into_inner().unwrap_or_else(PoisonError::into_inner);
        pods.sort_by_key(|pod| pod.number);
        Ok(Self { form, node, api, pods, proc, mounted, wanted: Vec::new() })
    }

    /// The plugin's configuration, as a runtime takes it from what the agent wrote; and where the agent put the plugin.
    fn conf(&self) -> Result<Value> {
        let list: Value = serde_json::from_str(&self.node.conf("10-calico.conflist").context("a conflist")?)?;
        let last = list["plugins"].as_array().and_then(|plugins| plugins.last()).context("plugins")?;
        ensure!(last["type"] == "istio-cni", "the agent's entry is not there: {last}");
        let mut conf = last.clone();
        conf["name"] = list["name"].clone();
        conf["cniVersion"] = list["cniVersion"].clone();
        conf["plugin"] = json!(self.node.path("bin/istio-cni"));
        Ok(conf)
    }

    /// A call of the plugin.
    pub fn plugin(&self, verb: &str, pod: &Pod) -> Result<Call> {
        let result = result(&addresses(pod.number));
        Ok(Call::of_plugin(verb, &self.conf()?, &pod.name(), &pod.namespace.path(), Some(&result)))
    }

    /// The API server knows a pod that starts, and now has these annotations.
    pub fn announce(&self, pod: &Pod, round: usize, annotations: Annotations) {
        let mut object = pod.object(round, annotations);
        object["status"]["phase"] = json!("Pending");
        self.api.state().newer.insert(pod.name(), object);
    }

    /// All pods run, and the agent finds them.
    pub fn begin(&self, round: usize) -> Result<()> {
        let running: Vec<Value> =
            self.pods.iter().map(|pod| pod.object(round, pod.annotations(round).0)).collect();
        {
            let mut api = self.api.state();
            api.newer.clear();
            api.pods = running;
        }
        for pod in &self.pods {
            self.proc.add_of(pod.process(), &pod.uid(round), &pod.namespace.path());
            self.mounted.mount(&pod.name(), &pod.namespace.path())?;
        }
        Ok(())
    }

    /// All pods are gone, as far as the API server and the runtime are concerned.
    pub fn end(&self) -> Result<()> {
        {
            let mut api = self.api.state();
            api.pods.clear();
            api.events.clear();
        }
        for pod in &self.pods {
            self.mounted.remove(&pod.name())?;
            fs::remove_dir_all(self.proc.0.path().join(pod.process().to_string()))?;
        }
        Ok(())
    }

    /// Learns what each kind comes to, from runs in namespaces that nothing else happens to.
    pub fn learn(&mut self) -> Result<()> {
        for kind in KINDS {
            let pod = Pod::new(self.pods.len())?;
            self.announce(&pod, 0, kind);
            self.plugin("ADD", &pod)?.run()?;
            let mismatch = self.mismatch(&pod, kind);
            ensure!(mismatch.is_none(), "{kind:?}: {mismatch:?}");
            self.wanted.push(pod.difference()?);
        }
        self.api.state().newer.clear();
        Ok(())
    }

    /// What is not as planned in a pod.
    pub fn mismatch(&self, pod: &Pod, annotations: Annotations) -> Option<String> {
        pods::mismatch_in(&pod.namespace, annotations, self.form.choice, self.form.native)
    }

    /// What is lost of a pod's redirection, or of what others have there, or has come beside it.
    pub fn lost(&self, pod: &Pod, annotations: Annotations) -> Result<Vec<String>> {
        let kind = KINDS.iter().position(|kind| *kind == annotations).context("a kind")?;
        let (wanted, found) = (&self.wanted[kind], pod.difference()?);
        let missing =
            wanted.iter().filter(|line| !found.contains(line)).map(|line| format!("missing: {line}"));
        let new = found.iter().filter(|line| !wanted.contains(line)).map(|line| format!("beside: {line}"));
        let mut problems: Vec<String> = missing.chain(new).collect();
        problems.extend(self.mismatch(pod, annotations));
        Ok(problems.into_iter().map(|problem| format!("{}: {problem}", pod.name())).collect())
    }
}

/// The names of all files below a folder, and of what is mounted there only those names.
pub fn files(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        names.push(entry.path().display().to_string());
        if entry.file_type()?.is_dir() {
            names.extend(files(&entry.path())?);
        }
    }
    names.sort();
    Ok(names)
}
