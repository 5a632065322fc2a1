//! What a command is given: its words, the settings among them, and the pods and the node they name.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use netns_apply::facts::NameFiles;
use presentation::Printable;
use presentation::flags;
use reasons::AGENT_HEALTH;
use redirect_core::settings::Source;
use serde_json::Value;
use settings_cli::ProgramInput;

use super::{CommandOutput, NETNS_DIR};
use crate::api::{self, ApiServer};
use crate::cluster::ClusterObjects;
use crate::error::PodInputError;
use crate::health;
use crate::input;
use crate::node::{NodeAmbientDefaults, NodeConfiguration};
use crate::pod::Pod;
use crate::processes::{NodeProcesses, PROC};
use crate::report::{self, Report};
use crate::text_writer::{ColorChoice, TextLayout};

/// Where the agent's container has the node's folders.
const HOST: &str = "/host";

/// What a command works with.
pub struct Given {
    pub(super) operands: Vec<String>,
    pub(super) flags: BTreeMap<String, String>,
    pub(super) input: ProgramInput,
    pub(super) env: BTreeMap<String, String>,
    pub(super) layout: TextLayout,
}

/// How text on standard output is laid out at this moment. An invalid word for colours is reported elsewhere.
pub(super) fn layout(flags: &BTreeMap<String, String>, env: &BTreeMap<String, String>) -> TextLayout {
    let colour = flags.get("color").and_then(|word| ColorChoice::named(word)).unwrap_or_default();
    let terminal = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    TextLayout::new(io::stdout().is_terminal(), terminal, colour, |name| env.get(name).cloned())
}

impl Given {
    pub(super) fn flag(&self, name: &str) -> Option<&str> {
        self.flags.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    /// How text is laid out at this moment: a terminal may have changed its width.
    pub(super) fn layout_now(&self) -> TextLayout {
        layout(&self.flags, &self.env)
    }

    pub(super) fn operand(&self) -> &str {
        self.operands.first().map_or("", String::as_str)
    }

    pub(super) fn is_json(&self) -> bool {
        self.flag("output") == Some("json")
    }

    /// Whether a plan of ambient mode is asked for.
    pub(super) fn is_ambient(&self) -> bool {
        flags::is_ambient(&self.input.settings)
    }

    /// Settings that cannot be understood; or that have no effect beside a pod.
    pub(super) fn wrong_settings(&self) -> Vec<String> {
        let mut wrong = flags::wrong(&self.input.settings, &NameFiles);
        let has_pod = self.flag("file").is_some() || self.flag("pod").is_some();
        if has_pod {
            let flags = self.input.settings.said().filter_map(|(key, _, source)| {
                let Source::Flag(flag) = source else { return None };
                // Of ambient mode, the node decides about what no annotation does.
                let is_nodes = self.is_ambient() && key.setting().annotations.is_empty();
                (!is_nodes).then_some(flag)
            });
            wrong.extend(flags.map(|flag| {
                format!(
                    "flag --{flag}: has no effect beside a pod, whose annotations decide; omit it or the pod"
                )
            }));
        }
        if self.flag("file").is_some() && self.flag("pod").is_some() {
            wrong.push("flags --file and --pod name a pod each; leave one out".to_owned());
        }
        wrong
    }

    pub(super) fn addresses(&self) -> Result<Vec<IpAddr>, String> {
        self.flag("address").map_or(Ok(Vec::new()), |text| presentation::addresses("flag --address", text))
    }

    /// The pod that is named, if one is.
    pub(super) fn pod(&self) -> Result<Option<Pod>, PodInputError> {
        match (self.flag("file"), self.flag("pod")) {
            (Some(file), _) => input::pod_of_file(file).map(Some),
            (None, Some(name)) => self.live_pod(name).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn live_pod(&self, name: &str) -> Result<Pod, PodInputError> {
        let name = input::pod_name(name).map_err(PodInputError::of)?;
        let object = self.api_server()?.pod(&name)?;
        Pod::from_json(&object).map_err(PodInputError::of)
    }

    /// A pod of this name: from the file where one is given, else as the API server has it.
    pub(super) fn pod_named(&self, name: &str) -> Result<Pod, PodInputError> {
        let Some(file) = self.flag("file") else { return self.live_pod(name) };
        let name = input::pod_name(name).map_err(PodInputError::of)?;
        let pod = input::pods_of_file(file)?.0.into_iter().find(|pod| pod.name == name);
        pod.ok_or_else(|| PodInputError::of(format!("{file}: has no pod {name}")))
    }

    pub(super) fn api_server(&self) -> Result<ApiServer, PodInputError> {
        let env = |name: &str| self.env.get(name).cloned();
        ApiServer::new(&api::credentials(self.flag("kubeconfig"), env)?)
    }

    pub(super) fn node(&self) -> Result<NodeConfiguration, PodInputError> {
        let directory = self.conf_dir();
        let ambient = NodeAmbientDefaults::of_agent(|name| self.env.get(name).cloned());
        NodeConfiguration::read(&directory)
            .map(|node| NodeConfiguration { processes: self.processes(), ambient, ..node })
            .map_err(|error| PodInputError::of(format!("cannot read {}: {error}", directory.display())))
    }

    /// The node whose configuration is named, or one about which nothing is known.
    pub(super) fn node_if_named(&self) -> Result<NodeConfiguration, PodInputError> {
        if self.flag("cni-conf-dir").is_some() { self.node() } else { Ok(NodeConfiguration::default()) }
    }

    /// The node, and whether it serves pods that start there now.
    pub(super) fn node_in(
        &self,
        cluster: &ClusterObjects,
        pods: &[Pod],
    ) -> Result<NodeConfiguration, PodInputError> {
        let address = self.agent()?;
        Ok(self.node()?.with_health(address, self.api_service(), cluster, pods))
    }

    /// Where the node's agent says whether it is ready.
    fn agent(&self) -> Result<SocketAddr, PodInputError> {
        // In the agent's container, its own settings say where it serves.
        let port = self.env.get("HEALTH_PORT").and_then(|port| port.parse().ok());
        let local = port.map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port).to_string());
        let address = self.flag("agent").map(str::to_owned).or(local);
        let address = address.unwrap_or_else(|| AGENT_HEALTH.to_owned());
        address.parse().map_err(|_| {
            PodInputError::of(format!("flag --agent: {address:?} is not an IP address with a port"))
        })
    }

    /// What could be read of pods. Where that is refused, the agent may be refused as well, and says why it is not ready.
    pub(super) fn with_agents_reason<T>(&self, read: Result<T, PodInputError>) -> Result<T, PodInputError> {
        read.map_err(|PodInputError(mut messages)| {
            let answer = self.agent().map(|address| health::ask(address).answer);
            if let (Ok(health::AgentAnswer::NotReady(why)), Some(last)) = (answer, messages.last_mut()) {
                last.push_str(&format!("; the node agent is {why}"));
            }
            PodInputError(messages)
        })
    }

    /// The API server's service, as a pod's environment has it.
    fn api_service(&self) -> Option<SocketAddr> {
        let said = |name: &str| self.env.get(&format!("KUBERNETES_SERVICE_{name}"));
        Some(SocketAddr::new(said("HOST")?.parse().ok()?, said("PORT")?.parse().ok()?))
    }

    /// The name of the node this runs on: that of its machine, unless it is said.
    pub(super) fn node_name(&self) -> Result<String, PodInputError> {
        let said = self.flag("node").map(str::to_owned).or_else(|| self.env.get("NODE_NAME").cloned());
        if let Some(name) = said.filter(|name| !name.is_empty()) {
            return Ok(name);
        }
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(PodInputError::of)?;
        Ok(name.trim().to_lowercase())
    }

    /// What the API server knows of a node's pods, and what is around them.
    pub(super) fn objects_of_node(&self, node: &str) -> Result<(Vec<Value>, ClusterObjects), PodInputError> {
        let api = self.api_server()?;
        let objects = api.pods(node)?;
        let mut cluster = api.around_node(node, &objects)?;
        api.namespaces(self.node().unwrap_or_default().conf.as_ref(), &mut cluster);
        Ok((objects, cluster))
    }

    pub(super) fn netns_dir(&self) -> PathBuf {
        self.folder_of_node("netns-dir", "MOUNTED_CNI_NETNS_DIR", NETNS_DIR)
    }

    pub(super) fn processes(&self) -> NodeProcesses {
        NodeProcesses::in_proc(&self.folder_of_node("proc-dir", "MOUNTED_PROC_DIR", PROC))
    }

    pub(super) fn conf_dir(&self) -> PathBuf {
        self.folder_of_node("cni-conf-dir", "MOUNTED_CNI_NET_DIR", crate::node::CONF_DIR)
    }

    pub(super) fn bin_dir(&self) -> PathBuf {
        self.folder_of_node("cni-bin-dir", "MOUNTED_CNI_BIN_DIR", crate::cni::BIN_DIR)
    }

    /// A folder of the node: the one that is named; in the agent's container the one that its settings name, or where the chart mounts
    /// it; else its usual place.
    fn folder_of_node(&self, flag: &str, setting: &str, usual: &str) -> PathBuf {
        let named = self.flag(flag).or_else(|| self.env.get(setting).map(String::as_str));
        if let Some(path) = named.filter(|path| !path.is_empty()) {
            return path.into();
        }
        let mounted = PathBuf::from(format!("{HOST}{usual}"));
        if mounted.is_dir() { mounted } else { usual.into() }
    }

    pub(super) fn answer(&self, report: &Report) -> CommandOutput {
        let text = if self.is_json() { Printable::json(&report.json()) } else { report.text(self.layout) };
        CommandOutput { text, code: report::code(&report.findings) }
    }
}
