//! The node: what its runtime passes to the plugin, and whether it calls it at all.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cluster_client::files;
use cni_core::conf::{Conf, Envelope};
use cni_core::enablement::Enablement;
use cni_core::enrolment_report::EnrolmentReport;
use cni_core::net_dir::{self, Caller, Directory, File, Network, Uncalled};
use cni_core::pod_source::PodName;
use cni_core::sandboxed::SandboxedRuntimes;
use cni_core::selection::{Programming, base_settings};
use cni_core::wire::CniCommand;
use presentation::SOMEWHERE;
use redirect_core::accepted::AcceptedRules;
use redirect_core::ambient::ProbeSources;
use redirect_core::plan::DataPlane;
use redirect_core::pod::SkipReason;
use redirect_core::settings::{Key, NamespaceFacts, RawSettings, Source};
use redirect_core::values::parse_bool;
use redirect_core::{AmbientRedirect, Family};
use serde_json::Value;

use crate::cause::{self, Cause, PodFinding};
use crate::cluster::ClusterObjects;
use crate::cni::PLUGIN;
use crate::diagnosis::PodDecision;
use crate::health;
use crate::lost_probes::LostProbes;
use crate::pod::Pod;
use crate::processes::NodeProcesses;

/// Where runtimes read network configurations, unless they are reported otherwise.
pub const CONF_DIR: &str = "/etc/cni/net.d";
/// The agent's variables about pods of ambient mode: switches, each with its usual value where that is not the setting's, and the sources of probes.
const SWITCHES: [(Key, &str, Option<bool>); 3] = [
    (Key::AmbientCaptureScope, "AMBIENT_CAPTURE_SCOPE", None),
    (Key::AmbientDnsCapture, "AMBIENT_DNS_CAPTURE", Some(true)),
    (Key::AmbientIpv6, "AMBIENT_IPV6", Some(true)),
];
const PROBES: [(Key, Family, &str); 2] = [
    (Key::AmbientProbeV4, Family::V4, "HOST_PROBE_SNAT_IP"),
    (Key::AmbientProbeV6, Family::V6, "HOST_PROBE_SNAT_IPV6"),
];
/// The largest configuration that is read.
const MOST_BYTES: u64 = 4 << 20;
/// Plugins that may stand behind ours: they make nothing in the pod's network namespace that a plan depends on.
const HARMLESS: [&str; 4] = ["portmap", "bandwidth", "tuning", "firewall"];

/// What is found where the files leave open that the runtime calls the plugin.
const OPEN: [Cause; 2] = [Cause::NotSeenCalled, Cause::EntryUnreadable];

/// What the node's configuration says.
#[derive(Debug, Default)]
pub struct NodeConfiguration {
    /// The plugin's entry, where the runtime has one.
    pub conf: Option<Conf>,
    /// The same as the runtime passes it on, with the name and version of its network.
    pub entry: Option<Value>,
    /// The plugins in their order, by their types.
    pub order: Vec<String>,
    /// The file that it is in.
    pub file: Option<PathBuf>,
    /// Whether the files leave open that the runtime calls the plugin: a ready agent has seen it called.
    pub is_open: bool,
    /// What is wrong with that.
    pub findings: Vec<PodFinding>,
    /// Its processes.
    pub processes: NodeProcesses,
    /// How pods of ambient mode are redirected, unless their annotations decide.
    pub ambient: NodeAmbientDefaults,
    /// What the agent knows of these pods, if it was asked.
    pub enrolment: Option<EnrolmentReport>,
    /// Which of these pods do not answer probes.
    pub lost_probes: LostProbes,
}

/// What holds for all pods of ambient mode, unless their annotations decide.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeAmbientDefaults {
    /// What each of [`SWITCHES`] says; none without the variable.
    switches: [Option<bool>; SWITCHES.len()],
    /// The sources of the kubelet's probes; none without the variables, or where the agent refuses these.
    probes: Option<ProbeSources>,
}

impl NodeAmbientDefaults {
    /// As the agent's variables say, which are there in its container.
    #[must_use]
    pub fn of_agent(env: impl Fn(&str) -> Option<String>) -> Self {
        // Set but empty means false, as for the agent.
        let is_on = |name: &str| env(name).map(|text| parse_bool(&text).unwrap_or(false));
        let probes = PROBES.iter().fold(None, |sources: Option<ProbeSources>, (_, family, name)| {
            let with = env(name).and_then(|text| sources.unwrap_or_default().with(*family, &text).ok());
            with.or(sources)
        });
        Self { switches: SWITCHES.map(|(_, name, _)| is_on(name)), probes }
    }

    /// What is not said is as it is for an agent to which nothing is said.
    fn settings(self) -> RawSettings {
        let mut raw = RawSettings::for_pod();
        for ((key, variable, usual), said) in SWITCHES.into_iter().zip(self.switches) {
            let source = if said.is_some() { Source::Environment(variable) } else { Source::Default };
            if let Some(is_on) = said.or(usual) {
                raw.set(key, is_on.to_string(), source);
            }
        }
        for (key, family, variable) in PROBES {
            if let Some(sources) = self.probes {
                raw.set(key, sources.of(family).to_string(), Source::Environment(variable));
            }
        }
        raw
    }
}

impl NodeConfiguration {
    /// Reads the configuration that a runtime would use from a directory. Where no such directory nothing is said.
    ///
    /// # Errors
    /// The directory is there and cannot be read.
    pub fn read(directory: &Path) -> io::Result<Self> {
        match read_directory(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            files => Ok(Self::of_directory(directory, &files?)),
        }
    }

    /// What the files of a directory make the runtime run.
    fn of_directory(directory: &Path, files: &Directory) -> Self {
        let verdict = files.verdict();
        let of_caller = |caller: Caller<'_>| Self::of_network(&caller.network, directory.join(caller.file));
        let mut node = verdict.caller.map(of_caller).unwrap_or_default();
        let Some(uncalled) = verdict.uncalled else { return node };
        node.is_open = uncalled.is_open();
        let cause = match &uncalled {
            Uncalled::NoNetwork { unloadable } if unloadable.is_empty() => Cause::NoEntry,
            Uncalled::NoNetwork { .. } | Uncalled::Broken { .. } | Uncalled::Unreadable { .. } => {
                Cause::EntryUnreadable
            }
            Uncalled::Without { .. } | Uncalled::Loopback(_) | Uncalled::Multus { .. } => Cause::NoEntry,
            Uncalled::MultusElsewhere { .. } | Uncalled::Standalone(_) => Cause::NotSeenCalled,
        };
        let mut finding = PodFinding::new(cause, format!("{}: {uncalled}", directory.display()));
        if let Uncalled::Without { file, .. } = &uncalled {
            let mut networks = files.read().filter_map(|(name, network)| Some((name, network.ok()?)));
            let beside = networks.find(|(_, network)| network.has_ours()).map(|(name, _)| name);
            finding
                .seen
                .extend(beside.map(|beside| format!("{beside} has the entry, and {file} sorts before it")));
        }
        node.findings.push(finding);
        node
    }

    /// The name of a pod's runtime class, with its handler's where that is known, if rules do not bind it: by what the plugin's entry says, else by what
    /// it says usually.
    #[must_use]
    pub fn sandbox(&self, pod: &Pod) -> Option<String> {
        let class = pod.facts.runtime_class.as_ref()?;
        let usual = SandboxedRuntimes::default();
        let known = self.conf.as_ref().map_or(&usual, |conf| &conf.sandboxed);
        let handler = pod.handler.iter().map(|handler| format!(", whose handler is {handler}"));
        let is_sandboxed = known.has(class) || pod.handler.as_ref().is_some_and(|handler| known.has(handler));
        is_sandboxed.then(|| format!("runtimeClassName: {class}{}", handler.collect::<String>()))
    }

    /// Adds to what was found about a pod what only the node shows: that its runtime is sandboxed, and processes that run as its proxy.
    pub fn add_findings(&self, pod: &Pod, decided: &PodDecision, all: &mut Vec<PodFinding>) {
        let is_wanted = matches!(decided, PodDecision::Redirect(..) | PodDecision::Ambient(..));
        let sandbox = is_wanted.then(|| self.sandbox(pod)).flatten();
        all.extend(sandbox.map(|seen| PodFinding::new(Cause::Sandboxed, seen)));
        self.processes.add_collisions(pod, decided, all);
        self.add_reason(pod, decided, all);
        self.lost_probes.add(pod, decided, all);
        cause::sort(all);
    }

    /// Adds the reason that the agent gives for a pod that is pending.
    fn add_reason(&self, pod: &Pod, decided: &PodDecision, all: &mut Vec<PodFinding>) {
        let reason = self.enrolment.as_ref().and_then(|report| report.reason(&pod.name.to_string()));
        if let (PodDecision::Ambient(..), Some(reason)) = (decided, reason) {
            cause::merge(all, Cause::NotEnrolled, vec![format!("the node agent: {reason}")]);
        }
    }

    /// With what is wrong with its agent, its kernel, its way to a service, and its object. Where no runtime is configured, this is not a node.
    #[must_use]
    pub fn with_health(
        mut self,
        agent: SocketAddr,
        service: Option<SocketAddr>,
        cluster: &ClusterObjects,
        pods: &[Pod],
    ) -> Self {
        let Self { findings: found, conf, enrolment, is_open, processes, ambient, lost_probes, .. } =
            &mut self;
        // Of a whole cluster's objects those of the pods' nodes count.
        let is_theirs =
            |name: &str| pods.iter().all(|pod| pod.node.as_deref().is_none_or(|node| node == name));
        found.extend(cluster.nodes.iter().filter(|node| is_theirs(&node.name)).flat_map(health::of_object));
        let health::AgentReport { answer, enrolment: report, notes } = health::ask(agent);
        *enrolment = report;
        found.extend(health::of_notes(notes));
        if *is_open && answer == health::AgentAnswer::Ready {
            found.retain(|finding| !OPEN.contains(&finding.cause));
        }
        found.extend(health::of_agent(answer, conf.as_ref(), pods));
        if let Some(conf) = conf {
            found.extend(health::of_credentials(conf));
            found.extend(health::of_kernel(conf));
            found.extend(service.and_then(health::of_services));
            if let Some(proc) = processes.proc().filter(|_| conf.ambient_enabled) {
                *lost_probes = LostProbes::of_node(proc, ambient.probes.unwrap_or_default());
            }
        }
        found.extend(PodFinding::some(Cause::Untold, cluster.untold.clone()));
        cause::sort(found);
        self
    }

    fn of_network(network: &Network, file: PathBuf) -> Self {
        let shown = file.display().to_string();
        let order: Vec<String> = network.types().map(str::to_owned).collect();
        let mut node = Self { order, file: Some(file), ..Self::default() };
        let behind = node.order.iter().skip_while(|plugin| *plugin != PLUGIN).skip(1);
        let behind: Vec<&str> = behind
            .map(String::as_str)
            .filter(|plugin| *plugin != PLUGIN && !HARMLESS.contains(plugin))
            .collect();
        if !behind.is_empty() {
            let told = format!("{shown}: {} after {PLUGIN}", behind.join(", "));
            node.findings.push(PodFinding::new(Cause::PluginOrder, told));
        }
        let mut entry = network.handed().unwrap_or_default();
        if network.disable_check {
            entry["disableCheck"] = true.into();
        }
        let text = entry.to_string();
        match Envelope::read(text.as_bytes(), CniCommand::Add).and_then(|envelope| envelope.conf()) {
            Ok(conf) => Self { conf: Some(conf), entry: Some(entry), ..node },
            Err(error) => {
                let told = format!("{shown}: the plugin refuses its entry: {error}");
                node.findings.push(PodFinding::new(Cause::EntryUnreadable, told));
                node
            }
        }
    }

    /// What programs pods' rules, where the configuration is known.
    #[must_use]
    pub fn programming(&self) -> Option<Programming> {
        self.conf.as_ref().map(|conf| conf.programming)
    }

    /// Why a pod's name excludes it, if it does.
    #[must_use]
    pub fn skips(&self, pod: &PodName) -> Option<SkipReason> {
        self.conf.as_ref().and_then(|conf| conf.skips(pod))
    }

    /// What is to be done with a pod whose namespace cannot be looked into. One that has no address yet is taken for one with IPv4.
    #[must_use]
    pub fn decide_without_namespace(&self, pod: &Pod) -> PodDecision {
        let addresses = if pod.addresses.is_empty() { &[SOMEWHERE][..] } else { &pod.addresses };
        self.decide(pod, &NamespaceFacts::new(addresses))
    }

    /// Whether a pod is in ambient mode, by labels as the plugin and the agent decide. Where those of its namespace would decide and are not known, it is
    /// if the agent has annotated it.
    #[must_use]
    pub fn has_ambient(&self, pod: &Pod) -> bool {
        let usual = Enablement::usual([]);
        let enablement = match &self.conf {
            Some(conf) if conf.ambient_enabled => &conf.enablement,
            Some(_) => return false,
            None => &usual,
        };
        let object = pod.for_selectors();
        let selected = match &pod.namespace_labels {
            Some(labels) => Some(enablement.selects(&object, labels)),
            None => enablement.selects_anywhere(&object),
        };
        selected.map_or_else(|| pod.ambient_annotation().is_some(), |selected| selected.is_ok())
    }

    /// The data plane that should have a pod's traffic; none for a pod that is not redirected.
    #[must_use]
    pub fn data_plane(&self, pod: &Pod) -> Option<DataPlane> {
        if pod.host_network || self.skips(&pod.name).is_some() {
            return None;
        }
        if self.has_ambient(pod) {
            return Some(DataPlane::Ambient);
        }
        let is_sidecars = matches!(pod.facts.skip_reason(), None | Some(SkipReason::HasInitContainer));
        is_sidecars.then_some(DataPlane::Sidecar)
    }

    fn decide_ambient(&self, pod: &Pod) -> PodDecision {
        let mut settings = self.ambient.settings();
        settings.read_ambient_annotations(|name| pod.facts.annotations.get(name).map(String::as_str));
        match AmbientRedirect::parse(&settings) {
            Ok(redirect) => PodDecision::Ambient(Box::new(redirect), Box::new(settings)),
            Err(errors) => PodDecision::Wrong(errors),
        }
    }

    /// The rules of other programs that are accepted in a pod, and why those that it names are not, if so.
    #[must_use]
    pub fn accepted(&self, pod: Option<&Pod>) -> (AcceptedRules, Option<String>) {
        let acceptance = self.conf.as_ref().map(|conf| conf.acceptance.clone()).unwrap_or_default();
        pod.map_or_else(
            || (acceptance.of_node.clone(), None),
            |pod| acceptance.of_pod(&pod.facts.annotations),
        )
    }

    /// What is to be done with a pod, in a namespace with these facts. Variables of the runtime's environment are not known here.
    #[must_use]
    pub fn decide(&self, pod: &Pod, facts: &NamespaceFacts<'_>) -> PodDecision {
        if pod.host_network {
            return PodDecision::HostNetwork;
        }
        if let Some(reason) = self.skips(&pod.name) {
            return PodDecision::Skip(reason);
        }
        if self.has_ambient(pod) {
            return self.decide_ambient(pod);
        }
        let strict = self.conf.as_ref().is_some_and(|conf| conf.strict_capture);
        PodDecision::of(&pod.facts, base_settings(strict, |_| None), facts)
    }
}

/// Reads what a runtime reads in a directory.
fn read_directory(directory: &Path) -> io::Result<Directory> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.extend(entry?.file_name().into_string().ok());
    }
    let file = |name: String| {
        let path = directory.join(&name);
        // A folder is not read; a link is, wherever it leads.
        let is_folder = fs::symlink_metadata(&path).is_ok_and(|known| known.is_dir());
        let link = fs::read_link(&path).map(|target| format!("a symbolic link to {}: ", target.display()));
        let text = files::read_text(&path, MOST_BYTES)
            .map_err(|error| format!("{}{error}", link.unwrap_or_default()));
        (!is_folder).then_some(File { name, text })
    };
    let mut read: Vec<File> =
        names.into_iter().filter(|name| net_dir::is_loaded(name)).filter_map(file).collect();
    for folder in Directory::new(read.clone()).folders() {
        let names = fs::read_dir(directory.join(&folder)).into_iter().flatten().filter_map(Result::ok);
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        let names = names.map(|name| format!("{folder}/{name}"));
        read.extend(names.filter(|name| net_dir::is_in_folder(name, &folder)).filter_map(file));
    }
    Ok(Directory::new(read).at(directory.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_or_its_handler_shows_a_sandbox() {
        let seen = |class: &str, handler: Option<&str>| {
            let pod = serde_json::json!({"metadata": {"namespace": "a", "name": "b"}, "spec": {"runtimeClassName": class}});
            let pod = Pod::from_json(&pod).expect("a pod");
            NodeConfiguration::default().sandbox(&Pod { handler: handler.map(str::to_owned), ..pod })
        };
        let detail = "runtimeClassName: secure, whose handler is runsc";
        assert_eq!(seen("secure", Some("runsc")).as_deref(), Some(detail));
        assert_eq!(seen("kata-qemu", None).as_deref(), Some("runtimeClassName: kata-qemu"));
        assert_eq!((seen("secure", None), seen("nvidia", Some("nvidia"))), (None, None));
    }

    fn node(files: &[(&str, &str)]) -> NodeConfiguration {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("writes");
        }
        NodeConfiguration::read(folder.path()).expect("is read")
    }

    fn codes(node: &NodeConfiguration) -> Vec<&'static str> {
        node.findings.iter().map(|finding| finding.cause.code()).collect()
    }

    const LIST: &str = r#"{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"ptp"},{"type":"istio-cni","native_nftables":true,
        "exclude_namespaces":["kube-system"]}]}"#;

    #[test]
    fn a_pod_that_has_no_address_yet_has_no_wrong_settings() {
        let pod = serde_json::json!({"metadata": {"annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"containers": [{"name": "istio-proxy"}]}});
        let pod = Pod::from_json(&pod).expect("a pod");
        assert!(matches!(
            NodeConfiguration::default().decide_without_namespace(&pod),
            PodDecision::Redirect(..)
        ));
    }

    #[test]
    fn the_first_file_counts_as_it_does_for_runtimes() {
        let good = node(&[("10-a.conflist", LIST), ("20-b.conf", "{"), ("00-readme.txt", "")]);
        assert_eq!(
            (codes(&good), good.order.as_slice()),
            (vec![], &["ptp".to_owned(), PLUGIN.to_owned()][..])
        );
        assert_eq!(good.programming(), Some(Programming::new(true, false)));
        let pod = |namespace: &str| PodName { namespace: namespace.into(), name: "x".into() };
        assert_eq!(good.skips(&pod("kube-system")), Some(SkipReason::NamespaceExcluded));
        assert_eq!(good.skips(&pod("shop")), None);
        assert_eq!(
            codes(&node(&[("05-other.conf", r#"{"type":"ptp"}"#), ("10-a.conflist", LIST)])),
            ["no-plugin-entry"]
        );
        assert_eq!(codes(&node(&[("10-a.conflist", "{")])), ["entry-unreadable"]);
        let refused = LIST.replace("true", "7");
        assert_eq!(codes(&node(&[("10-a.conflist", &refused)])), ["entry-unreadable"]);
        assert_eq!(codes(&node(&[])), ["no-plugin-entry"]);
        assert!(
            NodeConfiguration::read(Path::new("/nonexistent")).expect("names no plugin").findings.is_empty()
        );
    }
}
