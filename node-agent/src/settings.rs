//! The agent's settings: flags before environment before defaults.
//!
//! The environment is a parameter, every error is found before any is reported, and what is unknown, unused or has no effect is a
//! notice, not silence.

mod ambient;
mod notice;
mod raw;
mod repair;
pub mod table;
mod taint;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use agent_runtime::serve::Address;
use cluster_client::server_url;
use cni_core::sandboxed::{SandboxedPods, SandboxedRuntimes};
use cni_core::selection::PROCESS_WIDE;
use redirect_core::accepted::{AcceptedBy, AcceptedRules};
use serde_json::Value;

use crate::conflist::{EntryContent, EntryError, PluginEntry};

pub use agent_runtime::cluster::ControllerIdentity;
pub use ambient::{AmbientDefaults, AmbientSettings};
pub use cluster_client::Trust;
pub use raw::{AgentCommand, SettingProblem, command_line};
use raw::{LOCALHOST, Raw};
pub use repair::{BrokenPodFilter, RepairAction, RepairSettings};
use table::Key;
pub use taint::TaintSettings;

/// All settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where files are.
    pub paths: Paths,
    /// Where the entry goes.
    pub placement: EntryPlacement,
    /// Whether the entry is in the list that it is chained into, or beside it.
    pub install: InstallMode,
    /// The plugin's entry.
    pub entry: EntrySettings,
    /// How the plugin reaches the API server.
    pub kubeconfig: KubeconfigSettings,
    /// Who the plugin is there.
    pub plugin: PluginAccount,
    /// Whether files of ours in the configuration directory may be read by their group.
    pub conf_group_read: bool,
    /// Whether the agent is ready where the node's files leave open that the plugin is called, and no call was seen.
    pub ready_before_called: bool,
    /// Where the agent serves.
    pub serve: ServeSettings,
    /// Who the agent is in the cluster.
    pub identity: ControllerIdentity,
    /// The drift watch.
    pub drift: DriftSettings,
    /// The repair controller.
    pub repair: RepairSettings,
    /// The taint controllers.
    pub taint: TaintSettings,
    /// Ambient mode, if it is on.
    pub ambient: Option<AmbientSettings>,
    /// Whether the agent confines itself to its directories.
    pub landlock: bool,
    /// How the agent logs.
    pub logging: logging::Config,
}

/// Where files are, as the agent sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// The image's plugin binaries.
    pub source_bin: PathBuf,
    /// The node's plugin binaries.
    pub bin: PathBuf,
    /// The node's network configurations.
    pub net: PathBuf,
    /// The node's network namespaces.
    pub netns: PathBuf,
    /// The node's processes.
    pub proc: PathBuf,
    /// Sockets and the plugin's kubeconfig.
    pub run: PathBuf,
    /// The service account's files.
    pub service_account: PathBuf,
}

/// The name of the plugin's kubeconfig in the run directory.
pub const KUBECONFIG: &str = "istio-cni-kubeconfig";
/// The name of its token's file there, if the token has one.
pub const TOKEN_FILE: &str = "istio-cni-token";

impl Paths {
    /// The plugin's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.run.join(KUBECONFIG)
    }

    /// The file of its token.
    #[must_use]
    pub fn token_file(&self) -> PathBuf {
        self.run.join(TOKEN_FILE)
    }
}

/// Where the entry goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryPlacement {
    /// Into the list of another plugin: the one of this name, or the one the runtime uses.
    Chained {
        /// The file the user named.
        pinned: Option<String>,
    },
    /// Into a copy of that list, in front of it.
    Owned {
        /// The copy's name.
        file: String,
        /// The file the user named as the original.
        pinned: Option<String>,
    },
    /// Into a file of its own.
    Standalone {
        /// Its name.
        file: String,
    },
}

/// Whether the entry is in the list that it is chained into, or in a file beside it, in the folder of the network's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InstallMode {
    /// In both, and beside the list alone while a runtime is seen to read it there.
    Auto,
    /// In the list.
    #[default]
    Inline,
    /// Beside the list; without a runtime that reads it there, the agent is not ready.
    DropIn,
}

impl InstallMode {
    /// The words of the setting.
    pub const WORDS: [&str; 3] = ["auto", "inline", "drop-in"];

    fn parse(word: &str) -> Option<Self> {
        let modes = [Self::Auto, Self::Inline, Self::DropIn];
        Self::WORDS.iter().zip(modes).find_map(|(known, mode)| (*known == word).then_some(mode))
    }
}

/// The content of the plugin's entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntrySettings {
    /// The built-in entry.
    pub facts: EntryContent,
    /// A template instead of it.
    pub template: Option<TemplateSource>,
    /// What `__LOG_LEVEL__` stands for.
    pub template_log_level: String,
}

/// Where a template comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateSource {
    /// The setting itself.
    Text(String),
    /// A file.
    File(PathBuf),
}

/// How the plugin and the agent reach the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeconfigSettings {
    /// `https://host:port`; empty if not given, which only short-lived commands allow. Then no kubeconfig is written.
    pub server: String,
    /// The host alone.
    pub host: String,
    /// The port alone.
    pub port: String,
    /// How the server is trusted.
    pub trust: Trust,
    /// Whether the token has a file of its own.
    pub token_file: bool,
    /// The file's mode.
    pub mode: u32,
}

/// The plugin's service account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginAccount {
    /// Its name, in the agent's namespace; empty where the plugin uses the agent's.
    pub name: String,
    /// How long its tokens last.
    pub lifetime: Duration,
    /// Whether the plugin reads namespaces, too: in ambient mode.
    pub reads_namespaces: bool,
}

/// Where the agent serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeSettings {
    /// Health: its address, none for all of them, and its port.
    pub health: Address,
    /// Metrics, if at all, likewise.
    pub monitoring: Option<Address>,
    /// Run-time control, if at all.
    pub control: Option<(IpAddr, u16)>,
}

/// Settings of the drift watch, and of all that plans pods as the plugin does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriftSettings {
    /// Its interval, if it is on.
    pub interval: Option<Duration>,
    /// Whether drifted pods are healed.
    pub heal: bool,
    /// The container runtime's environment, which counts for all pods: variables and values.
    pub environment: Vec<(&'static str, String)>,
}

/// The folder whose files are settings that are reread when they change, if one is set.
#[must_use]
pub fn folder(given: &settings_cli::ParsedArgs, env: &[(String, String)]) -> Option<PathBuf> {
    let folder = Raw::new(given, env).text(Key::SETTINGS_DIR);
    (!folder.is_empty()).then(|| folder.into())
}

impl Settings {
    /// Reads the settings of a command line and an environment; with notices about settings that have less effect than their author hoped.
    ///
    /// # Errors
    /// Everything wrong with them, together.
    pub fn read(
        given: &settings_cli::ParsedArgs,
        env: &[(String, String)],
    ) -> Result<(Self, Vec<String>), Vec<SettingProblem>> {
        let mut raw = Raw::new(given, env);
        let logging = raw.logging();
        let ambient = ambient::read(&mut raw);
        let settings = Self {
            paths: paths(&raw),
            placement: placement(&mut raw),
            install: install(&mut raw),
            entry: entry(&mut raw, &logging, ambient.as_ref()),
            kubeconfig: kubeconfig(&mut raw),
            plugin: plugin_account(&mut raw, ambient.is_some()),
            conf_group_read: raw.switch(Key::CNI_CONF_GROUP_READ),
            ready_before_called: raw.switch(Key::READY_BEFORE_CALLED),
            serve: serve(&mut raw),
            identity: ControllerIdentity {
                namespace: raw.text(Key::POD_NAMESPACE),
                pod: raw.text(Key::POD_NAME),
                node: first(&raw, &[Key::NODE_NAME, Key::KUBERNETES_NODE_NAME]),
                daemon_set: raw.text(Key::DAEMONSET_NAME),
            },
            drift: drift(&mut raw),
            repair: repair::read(&mut raw),
            taint: taint::read(&mut raw),
            ambient,
            landlock: raw.switch(Key::LANDLOCK),
            logging,
        };
        let notices = notice::all(&raw, env);
        raw.finish().map(|()| (settings, notices))
    }
}

impl EntrySettings {
    /// The entry; `read` gives the text of a template file.
    ///
    /// # Errors
    /// The template is invalid; with its origin.
    pub fn entry(
        &self,
        paths: &Paths,
        kube: &KubeconfigSettings,
        node: &str,
        file: Option<&str>,
    ) -> Result<PluginEntry, EntryError> {
        let text = match (&self.template, file) {
            (None, _) => return Ok(PluginEntry::of(&self.facts)),
            (Some(TemplateSource::Text(text)), _) => text.as_str(),
            (Some(TemplateSource::File(_)), file) => file.unwrap_or_default(),
        };
        let kubeconfig = PathBuf::from(&self.facts.run_dir).join(KUBECONFIG);
        let values = [
            ("KUBECONFIG_FILEPATH", kubeconfig.display().to_string()),
            ("KUBECONFIG_FILENAME", KUBECONFIG.to_owned()),
            ("CNI_BIN_DIR", on_node(&paths.bin)),
            ("CNI_NET_DIR", on_node(&paths.net)),
            ("CNI_AGENT_RUN_DIR", self.facts.run_dir.clone()),
            ("LOG_LEVEL", self.template_log_level.clone()),
            ("LOG_UDS_ADDRESS", paths.run.join(logging::SOCKET_NAME).display().to_string()),
            ("KUBERNETES_SERVICE_HOST", kube.host.clone()),
            ("KUBERNETES_SERVICE_PORT", kube.port.clone()),
            ("KUBERNETES_NODE_NAME", node.to_owned()),
            ("POD_NAMESPACE", self.facts.pod_namespace.clone()),
        ];
        PluginEntry::from_template(text, &values)
    }
}

/// A mounted directory by its path on the node, which is the same without the mount point `/host`.
fn on_node(mounted: &std::path::Path) -> String {
    let path = mounted.display().to_string();
    path.strip_prefix("/host").filter(|rest| rest.starts_with('/')).unwrap_or(&path).to_owned()
}

fn paths(raw: &Raw<'_>) -> Paths {
    Paths {
        source_bin: raw.text(Key::SOURCE_CNI_BIN_DIR).into(),
        bin: raw.text(Key::MOUNTED_CNI_BIN_DIR).into(),
        net: raw.text(Key::MOUNTED_CNI_NET_DIR).into(),
        netns: raw.text(Key::MOUNTED_CNI_NETNS_DIR).into(),
        proc: raw.text(Key::MOUNTED_PROC_DIR).into(),
        run: raw.text(Key::CNI_AGENT_RUN_DIR).into(),
        service_account: raw.text(Key::SERVICE_ACCOUNT_DIR).into(),
    }
}

fn placement(raw: &mut Raw<'_>) -> EntryPlacement {
    let named = raw.file_name(Key::CNI_CONF_NAME);
    let owned = raw.switch(Key::ISTIO_OWNED_CNI_CONFIG);
    // Charts pass the variable also where the user left the value empty.
    let owned_file =
        raw.file_name(Key::ISTIO_OWNED_CNI_CONFIG_FILENAME).unwrap_or_else(|| OWNED_FILE.to_owned());
    if owned && !owned_file.ends_with(".conflist") {
        raw.reject(
            Key::ISTIO_OWNED_CNI_CONFIG_FILENAME,
            "the name must end in .conflist, because the file is a list",
        );
    }
    if owned && named.as_ref() == Some(&owned_file) {
        raw.reject(Key::CNI_CONF_NAME, "this is the copy in front, which cannot be a copy of itself");
    }
    match (raw.switch(Key::CHAINED_CNI_PLUGIN), owned) {
        (true, false) => EntryPlacement::Chained { pinned: named },
        (true, true) => EntryPlacement::Owned { file: owned_file, pinned: named },
        (false, _) => {
            let file = named.unwrap_or_else(|| STANDALONE_FILE.to_owned());
            if file.ends_with(".conflist") {
                raw.reject(
                    Key::CNI_CONF_NAME,
                    "without chaining the file holds one plugin, so its name must end in .conf",
                );
            }
            EntryPlacement::Standalone { file }
        }
    }
}

fn install(raw: &mut Raw<'_>) -> InstallMode {
    let parse = |word: &str| InstallMode::parse(word).ok_or("not auto, inline or drop-in");
    raw.read(Key::CNI_INSTALL, InstallMode::default(), parse)
}

/// The name of the file of our own without chaining.
pub const STANDALONE_FILE: &str = "YYY-istio-cni.conf";
/// The name of the copy in front.
pub const OWNED_FILE: &str = "02-istio-cni.conflist";

fn entry(raw: &mut Raw<'_>, logging: &logging::Config, ambient: Option<&AmbientSettings>) -> EntrySettings {
    let file = raw.text(Key::CNI_NETWORK_CONFIG_FILE);
    let text = raw.text(Key::CNI_NETWORK_CONFIG);
    let template = match (file.is_empty(), text.is_empty()) {
        (false, _) => Some(TemplateSource::File(file.into())),
        (true, false) => Some(TemplateSource::Text(text)),
        (true, true) => None,
    };
    let selectors = ambient.and_then(|ambient| ambient.selectors.as_ref());
    EntrySettings {
        facts: EntryContent {
            log_level: logging.levels.of("cni-plugin").name().to_owned(),
            run_dir: raw.text(Key::CNI_AGENT_RUN_DIR),
            ambient_enabled: ambient.is_some(),
            enablement_selectors: selectors.cloned().unwrap_or_else(|| Value::Array(Vec::new())),
            exclude_namespaces: raw.list(Key::EXCLUDE_NAMESPACES),
            pod_namespace: raw.text(Key::POD_NAMESPACE),
            agent_host_network: host_network(raw),
            native_nftables: raw.switch(Key::NATIVE_NFTABLES),
            nft_sets: raw.switch(Key::NFT_SETS),
            strict_capture: raw.switch(Key::STRICT_CAPTURE),
            accepted_rules: accepted_rules(raw),
            accept_rules_of_pods: raw.switch(Key::ACCEPT_RULES_OF_PODS),
            sandboxed: sandboxed(raw),
        },
        template,
        template_log_level: raw.text(Key::LOG_LEVEL),
    }
}

/// The list, as the plugin reads it.
fn accepted_rules(raw: &mut Raw<'_>) -> String {
    let list = raw.text(Key::ACCEPTED_RULES);
    if let Err(problem) = AcceptedRules::default().add(&list, AcceptedBy::Node) {
        raw.reject(Key::ACCEPTED_RULES, &problem.to_string());
    }
    list
}

fn sandboxed(raw: &mut Raw<'_>) -> SandboxedRuntimes {
    let parse = |word: &str| SandboxedPods::parse(word).ok_or("not refuse or skip");
    let pods = raw.read(Key::SANDBOXED_PODS, SandboxedPods::default(), parse);
    SandboxedRuntimes { names: raw.list(Key::SANDBOXED_RUNTIMES), pods }
}

/// Whether the agent's pod has the node's address, and so the node's network. If unknown, it does not: a runtime that waited for an agent on
/// the pods' network would wait for ever.
fn host_network(raw: &Raw<'_>) -> bool {
    let (pod, host) = (raw.text(Key::POD_IP), raw.text(Key::HOST_IP));
    !pod.is_empty() && pod == host
}

fn kubeconfig(raw: &mut Raw<'_>) -> KubeconfigSettings {
    let [host, port] = raw.server();
    let protocol = raw.text(Key::KUBERNETES_SERVICE_PROTOCOL);
    if !matches!(protocol.as_str(), "http" | "https") {
        raw.reject(Key::KUBERNETES_SERVICE_PROTOCOL, "neither http nor https");
    }
    if !port.is_empty() && port.parse::<u16>().ok().is_none_or(|port| port == 0) {
        raw.reject(Key::KUBERNETES_SERVICE_PORT, "not a port: a number from 1 to 65535");
    }
    if host.contains(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '.' | '-' | ':' | '_')) {
        raw.reject(Key::KUBERNETES_SERVICE_HOST, "no host name and no address");
    }
    let authority = match raw.text(Key::KUBE_CA_FILE) {
        file if file.is_empty() => PathBuf::from(raw.text(Key::SERVICE_ACCOUNT_DIR)).join("ca.crt"),
        file => file.into(),
    };
    let trust =
        if raw.switch(Key::SKIP_TLS_VERIFY) { Trust::Unverified } else { Trust::Authority(authority) };
    KubeconfigSettings {
        server: if host.is_empty() { String::new() } else { server_url(&protocol, &host, &port) },
        host,
        port,
        trust,
        token_file: raw.switch(Key::KUBECONFIG_TOKEN_FILE),
        mode: raw.file_mode(Key::KUBECONFIG_MODE),
    }
}

fn plugin_account(raw: &mut Raw<'_>, reads_namespaces: bool) -> PluginAccount {
    let lifetime = raw.duration(Key::PLUGIN_TOKEN_LIFETIME);
    if lifetime < LEAST_LIFETIME {
        raw.reject(
            Key::PLUGIN_TOKEN_LIFETIME,
            "too short: 1h at least, because it has to outlast an upgrade",
        );
    }
    PluginAccount { name: raw.text(Key::PLUGIN_SERVICE_ACCOUNT), lifetime, reads_namespaces }
}

/// The shortest time a token of the plugin's may last.
const LEAST_LIFETIME: Duration = Duration::from_secs(3600);

fn serve(raw: &mut Raw<'_>) -> ServeSettings {
    let control = raw.address(Key::CTRLZ_ADDRESS).unwrap_or(LOCALHOST);
    let control = raw.port(Key::CTRLZ_PORT).map(|port| (control, port));
    let health = (raw.address(Key::HEALTH_ADDRESS), raw.port(Key::HEALTH_PORT).unwrap_or(0));
    let monitoring = raw.address(Key::MONITORING_ADDRESS);
    let monitoring = raw.port(Key::MONITORING_PORT).map(|port| (monitoring, port));
    ServeSettings { health, monitoring, control }
}

fn drift(raw: &mut Raw<'_>) -> DriftSettings {
    let interval = raw.duration(Key::DRIFT_WATCH_INTERVAL);
    if !interval.is_zero() && interval < LEAST_INTERVAL {
        raw.reject(Key::DRIFT_WATCH_INTERVAL, "too short: 1s at least, or 0s for never");
    }
    let is_wide = |name: &str| PROCESS_WIDE.iter().any(|key| key.setting().env.contains(&name));
    let given = raw.given().filter(|(setting, _, _)| is_wide(setting.name()));
    let environment = given.map(|(setting, _, value)| (setting.name(), value.to_owned())).collect();
    let heal = raw.switch(Key::DRIFT_HEAL);
    DriftSettings { interval: (!interval.is_zero()).then_some(interval), heal, environment }
}

/// The shortest time between two checks of a pod.
const LEAST_INTERVAL: Duration = Duration::from_secs(1);

/// The first non-empty one.
fn first(raw: &Raw<'_>, keys: &[Key]) -> String {
    keys.iter().map(|key| raw.text(*key)).find(|text| !text.is_empty()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
