//! The network configuration on standard input: today's keys, the older form, and what they mean together.

use crate::{
    enablement::Enablement,
    fields::FieldReader,
    keys::{self, NotInForce},
    pod_name::PodName,
    sandboxed::{SandboxedPods, SandboxedRuntimes},
    selection::{Acceptance, Programming},
    wire::{CniCommand, CniError, Code, PrevResult, RawObject, Version},
};
use logging::Levels;
use redirect_core::{
    accepted::AcceptedBy,
    pod::{PodFacts, SkipReason},
};
use serde_json::Value;
use settings_table::parse_duration;
use std::{path::PathBuf, time::Duration};

/// Where the agent's files are unless the configuration says otherwise.
pub const RUN_DIR: &str = "/var/run/istio-cni";
/// The name of the plugin's kubeconfig in the run directory.
pub const KUBECONFIG_NAME: &str = "istio-cni-kubeconfig";
/// How long an ADD may take unless the configuration says otherwise: less than a runtime waits.
pub const ADD_TIMEOUT: Duration = Duration::from_secs(25);
/// The longest that can be asked for.
const MOST_ADD_TIMEOUT: Duration = Duration::from_secs(600);
/// What the older installer wrote where it had not filled in a path.
const PLACEHOLDER: &str = "__KUBECONFIG_FILEPATH__";
/// How the names of the node agent's own pods begin.
const AGENT_POD_PREFIX: &str = "istio-cni-node-";
/// The capability for which runtimes pass a pod's annotations: containerd since 1.6, CRI-O.
pub const POD_ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";
/// What the kubelet adds to the annotations of every pod: without it they may not be all of the pod's.
const OF_KUBELET: &str = "kubernetes.io/config.source";
/// The most that is read of standard input.
pub const MOST_INPUT: u64 = 16 << 20;

/// A network configuration. Every value of this type is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conf {
    /// The version of the specification it is written in.
    pub version: Version,
    /// The result of the plugins before us.
    pub prev_result: PrevResult,
    /// How much the plugin logs.
    pub levels: Levels,
    /// Where the agent's files are.
    pub run_dir: PathBuf,
    /// Whether the node agent is on the host's network, so that it starts also where the node's network is not ready.
    pub agent_host_network: bool,
    /// Whether the runtime has this from a file beside the network's list, in the folder of its name.
    pub drop_in: bool,
    /// How the API server is reached.
    pub kubeconfig: PathBuf,
    /// Namespaces whose pods are excluded.
    pub exclude_namespaces: Vec<String>,
    /// The agent's own namespace; empty if unset.
    pub pod_namespace: String,
    /// What programs pods' rules, and in which form.
    pub programming: Programming,
    /// Whether pods get strict capture, unless they say otherwise.
    pub strict_capture: bool,
    /// Which rules of other programs are accepted.
    pub acceptance: Acceptance,
    /// Runtimes whose pods rules do not bind.
    pub sandboxed: SandboxedRuntimes,
    /// Whether pods of ambient mode are passed to the agent.
    pub ambient_enabled: bool,
    /// Which pods are in ambient mode.
    pub enablement: Enablement,
    /// Whether the injector has dealt with the pod, by the annotations that the runtime passes; none if it passes none.
    pub is_injected: Option<bool>,
    /// How long an ADD may take.
    pub add_timeout: Duration,
    /// A folder of pod manifests, in place of the API server.
    pub manifest_dir: Option<PathBuf>,
    /// The node's name: what a kubelet appends to the names of static pods.
    pub node_name: Option<String>,
    /// Unknown keys.
    pub unknown_keys: Vec<String>,
    /// What is asked for but not done.
    pub not_in_force: Vec<NotInForce>,
}

/// The part of a configuration that can be relied on even if the rest is wrong.
#[derive(Debug)]
pub struct Envelope<'a> {
    object: RawObject<'a>,
    /// The version of the specification it is written in.
    pub version: Version,
}

impl<'a> Envelope<'a> {
    /// Checks what comes first: whether the input is JSON, whether we speak its version, and whether that version has the command.
    ///
    /// # Errors
    /// The input is not a JSON object (code 6), or its version does not fit (code 1).
    pub fn read(input: &'a [u8], command: CniCommand) -> Result<Self, CniError> {
        let undecodable = |why: String| CniError::new(Code::Decode, format!("standard input: {why}"));
        let text = std::str::from_utf8(input).map_err(|error| undecodable(error.to_string()))?;
        if text.trim().is_empty() {
            return Err(undecodable("is empty; the network configuration belongs there".to_owned()));
        }
        let object: RawObject<'_> = serde_json::from_str(text)
            .map_err(|error| undecodable(format!("is not a JSON object: {error}")))?;
        let mut reader = FieldReader::default();
        let value = object.value("cniVersion");
        let text = reader.string("cniVersion", value.as_ref()).unwrap_or_default();
        let problems = reader.into_problems();
        if !problems.is_empty() {
            return Err(CniError::of_problems(Code::Decode, &problems));
        }
        let version = Version::parse(text)?;
        version.require(command)?;
        Ok(Self { object, version })
    }

    /// Reads the rest.
    ///
    /// # Errors
    /// Everything that is wrong with it, in one error (code 7).
    pub fn conf(&self) -> Result<Conf, CniError> {
        let mut reader = KeyReader { object: &self.object, fields: FieldReader::default() };
        reader.check_name();
        let conf = self.read_keys(&mut reader);
        let problems = reader.fields.into_problems();
        if problems.is_empty() { Ok(conf) } else { Err(CniError::of_problems(Code::Config, &problems)) }
    }

    /// Reads the keys; wrong ones are noted and count as not given.
    fn read_keys(&self, reader: &mut KeyReader<'_>) -> Conf {
        // As they were written up to 1.22.
        let older = reader.value("kubernetes");
        reader.fields.object("kubernetes", older.as_ref());
        let old_kubeconfig = reader.text("kubernetes.kubeconfig").filter(|path| path != PLACEHOLDER);
        let old_node_name = reader.text("kubernetes.node_name");
        reader.text("kubernetes.cni_bin_dir");
        let old_kubeconfig = reader.absolute("kubernetes.kubeconfig", old_kubeconfig);
        let old_excluded = reader.value("kubernetes.exclude_namespaces");
        let old_excluded = reader.fields.strings("kubernetes.exclude_namespaces", old_excluded.as_ref());
        reader.text("type");
        let (new_level, old_level) = (reader.text("plugin_log_level"), reader.text("log_level"));
        let pod_namespace = reader.text("pod_namespace").unwrap_or_default();
        let (run_dir, manifest_dir) = (reader.text("cni_agent_run_dir"), reader.text("pod_manifest_dir"));
        let node_name = reader.text("node_name").or(old_node_name);
        let run_dir = reader.absolute("cni_agent_run_dir", run_dir);
        let in_run_dir = |run_dir: &PathBuf| run_dir.join(KUBECONFIG_NAME);
        // Today's key wins over that of the older form.
        let kubeconfig = run_dir.as_ref().map(in_run_dir).or(old_kubeconfig);
        let run_dir = run_dir.unwrap_or_else(|| RUN_DIR.into());
        let manifest_dir = reader.absolute("pod_manifest_dir", manifest_dir);
        let levels = match new_level {
            Some(text) => reader.levels("plugin_log_level", &text),
            None => reader.levels("log_level", &old_level.unwrap_or_default()),
        };
        let mut switch = |key: &str| reader.switch(key).unwrap_or_default();
        let (agent_host_network, drop_in) = (switch("agent_host_network"), switch("drop_in"));
        let programming = Programming::new(switch("native_nftables"), switch("nft_sets"));
        let strict_capture = switch("strict_capture");
        let ambient_enabled = switch("ambient_enabled");
        let exclude_namespaces = match reader.value("exclude_namespaces") {
            Some(value) => reader.fields.strings("exclude_namespaces", Some(&value)),
            None => old_excluded,
        };
        let sandboxed = reader.sandboxed();
        let acceptance = reader.acceptance();
        Conf {
            version: self.version,
            prev_result: PrevResult::read(&self.object, &mut reader.fields),
            levels,
            agent_host_network,
            drop_in,
            kubeconfig: kubeconfig.unwrap_or_else(|| in_run_dir(&run_dir)),
            run_dir,
            enablement: reader.enablement(&exclude_namespaces),
            ambient_enabled,
            exclude_namespaces,
            pod_namespace,
            programming,
            strict_capture,
            acceptance,
            sandboxed,
            is_injected: reader.is_injected(),
            add_timeout: reader.add_timeout(),
            manifest_dir,
            node_name,
            unknown_keys: keys::unknown(&self.object),
            not_in_force: keys::not_in_force(&self.object),
        }
    }
}

/// Reads the keys of a configuration by their paths, and notes what is wrong with them.
struct KeyReader<'a> {
    object: &'a RawObject<'a>,
    fields: FieldReader,
}

impl KeyReader<'_> {
    fn value(&self, path: &str) -> Option<Value> {
        self.object.at(path)
    }

    /// A text, unless it is empty.
    fn text(&mut self, path: &str) -> Option<String> {
        let value = self.value(path);
        let text = self.fields.string(path, value.as_ref());
        text.filter(|text| !text.is_empty()).map(str::to_owned)
    }

    fn switch(&mut self, path: &str) -> Option<bool> {
        let value = self.value(path);
        self.fields.bool(path, value.as_ref())
    }

    fn absolute(&mut self, path: &str, text: Option<String>) -> Option<PathBuf> {
        let text = text?;
        if !text.starts_with('/') || text.contains('\0') {
            self.fields.problem(format!("{path}: {text:?} is not an absolute path"));
            return None;
        }
        Some(text.into())
    }

    fn check_name(&mut self) {
        let value = self.value("name");
        match self.fields.string("name", value.as_ref()) {
            Some(name) if !name.is_empty() && !crate::wire::is_plain_name(name) => self.fields.problem(
                format!("name: {name:?} has characters other than letters, digits, '_', '.' and '-'"),
            ),
            None if value.is_some() => {}
            Some("") | None => self.fields.problem("name: missing; every network has one".to_owned()),
            Some(_) => {}
        }
    }

    /// A level applies to the plugin's own lines; libraries stay silent, whatever the level.
    fn levels(&mut self, path: &str, text: &str) -> Levels {
        let text = if text.is_empty() { "info" } else { text };
        let level = match text.parse::<Levels>() {
            Ok(levels) => levels.of(logging::DEFAULT_SCOPE),
            Err(error) => {
                self.fields.problem(format!("{path}: {error}"));
                logging::Level::Info
            }
        };
        crate::logs::levels(level)
    }

    /// Seconds as a number, or a duration such as `25s`.
    fn add_timeout(&mut self) -> Duration {
        let Some(value) = self.value("add_timeout") else { return ADD_TIMEOUT };
        let timeout = match &value {
            Value::String(text) => parse_duration(text).ok(),
            Value::Number(number) => {
                number.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            }
            Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
        };
        timeout.filter(|timeout| !timeout.is_zero() && *timeout <= MOST_ADD_TIMEOUT).unwrap_or_else(|| {
            self.fields.problem(format!(
                "add_timeout: {value} is not a duration such as \"25s\", more than 0 and at most {}s",
                MOST_ADD_TIMEOUT.as_secs()
            ));
            ADD_TIMEOUT
        })
    }

    fn sandboxed(&mut self) -> SandboxedRuntimes {
        let mut sandboxed = SandboxedRuntimes::default();
        if let Some(names) = self.value("sandboxed_runtimes") {
            sandboxed.names = self.fields.strings("sandboxed_runtimes", Some(&names));
        }
        if let Some(word) = self.text("sandboxed_pods") {
            match SandboxedPods::parse(&word) {
                Some(pods) => sandboxed.pods = pods,
                None => self.fields.problem(format!("sandboxed_pods: {word:?} is not refuse or skip")),
            }
        }
        sandboxed
    }

    fn is_injected(&self) -> Option<bool> {
        let passed = self.value("runtimeConfig")?;
        let annotations = passed.get(POD_ANNOTATIONS)?.as_object()?;
        annotations.contains_key(OF_KUBELET).then(|| annotations.contains_key(PodFacts::STATUS_ANNOTATION))
    }

    fn acceptance(&mut self) -> Acceptance {
        let mut acceptance = Acceptance::default();
        let list = self.text("accepted_rules").unwrap_or_default();
        if let Err(problem) = acceptance.of_node.add(&list, AcceptedBy::Node) {
            self.fields.problem(format!("accepted_rules: {problem}"));
        }
        acceptance.of_pods = self.switch("accept_rules_of_pods").unwrap_or(acceptance.of_pods);
        acceptance
    }

    fn enablement(&mut self, excluded: &[String]) -> Enablement {
        let usual = || Enablement::usual(excluded.iter().cloned());
        let value = self.value("enablement_selectors");
        if self.fields.list("enablement_selectors", value.as_ref()).is_empty() {
            return usual();
        }
        let read = Enablement::read(&value.unwrap_or_default(), excluded.iter().cloned());
        read.unwrap_or_else(|error| {
            self.fields.problem(format!("enablement_selectors: {error}"));
            usual()
        })
    }
}

impl Conf {
    /// Why a pod is excluded, if what the runtime passes shows that.
    #[must_use]
    pub fn skips(&self, pod: &PodName) -> Option<SkipReason> {
        // This comes first: without its agent a node never gets better.
        if pod.name.starts_with(AGENT_POD_PREFIX) && pod.namespace == self.pod_namespace {
            return Some(SkipReason::AgentPod);
        }
        if self.exclude_namespaces.contains(&pod.namespace) {
            return Some(SkipReason::NamespaceExcluded);
        }
        // Labels decide about ambient mode.
        (!self.ambient_enabled && self.is_injected == Some(false)).then_some(SkipReason::NotInjected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use logging::Level;

    fn conf(text: &str) -> Result<Conf, CniError> {
        Envelope::read(text.as_bytes(), CniCommand::Add)?.conf()
    }

    #[test]
    fn todays_form_is_read() {
        let conf = conf(
            r#"{"cniVersion":"1.0.0","name":"n","type":"istio-cni","plugin_log_level":"debug","cni_agent_run_dir":"/run/x",
            "exclude_namespaces":["kube-system"],"pod_namespace":"istio-system","native_nftables":true,"add_timeout":"1.5s",
            "agent_host_network":true,"ambient_enabled":false,"enablement_selectors":[],"pod_manifest_dir":"/m","strict_capture":true,
            "sandboxed_runtimes":["vm"],"sandboxed_pods":"skip",
            "surprise":1}"#,
        )
        .unwrap();
        assert_eq!(conf.kubeconfig, PathBuf::from("/run/x/istio-cni-kubeconfig"));
        assert_eq!(conf.levels.of(crate::logs::SCOPE), Level::Debug);
        assert_eq!(conf.exclude_namespaces, ["kube-system"]);
        assert_eq!(
            (conf.pod_namespace.as_str(), conf.programming),
            ("istio-system", Programming::new(true, false))
        );
        assert_eq!((conf.add_timeout, conf.manifest_dir), (Duration::from_millis(1500), Some("/m".into())));
        assert!(conf.agent_host_network && conf.strict_capture);
        assert!(conf.sandboxed.has("vm") && !conf.sandboxed.has("kata"));
        assert_eq!(conf.sandboxed.pods, SandboxedPods::Skip);
        assert_eq!(conf.unknown_keys, ["surprise"]);
    }

    #[test]
    fn a_pod_whose_annotations_are_passed_and_lack_the_injectors_is_skipped() {
        let skips = |keys: &str, passed: &str| {
            let text = format!(r#"{{"cniVersion":"1.0.0","name":"n"{keys},"runtimeConfig":{passed}}}"#);
            let pod = PodName { namespace: "shop".to_owned(), name: "web".to_owned() };
            conf(&text).unwrap().skips(&pod)
        };
        let annotations = |all: &str| format!(r#"{{"io.kubernetes.cri.pod-annotations":{all}}}"#);
        let outside = annotations(r#"{"kubernetes.io/config.source":"api","a":"b"}"#);
        assert_eq!(skips("", &outside), Some(SkipReason::NotInjected));
        // The labels decide about ambient mode, and only the API server has them.
        assert_eq!(skips(r#","ambient_enabled":true"#, &outside), None);
        let injected = r#"{"kubernetes.io/config.source":"api","sidecar.istio.io/status":""}"#;
        assert_eq!(skips("", &annotations(injected)), None);
        // What may not be all of them proves nothing.
        for passed in ["{}", "null", "[]", "\"x\"", r#"{"a":"b"}"#, "7"] {
            assert_eq!(skips("", &annotations(passed)), None, "{passed}");
        }
        for none in ["{}", "null", "7", r#"{"portMappings":[]}"#] {
            assert_eq!(skips("", none), None, "{none}");
        }
    }

    #[test]
    fn pods_of_ambient_mode_are_the_usual_ones_unless_selectors_say_otherwise() {
        let read = |keys: &str| conf(&format!(r#"{{"name":"n","exclude_namespaces":["a"]{keys}}}"#));
        let usual = Enablement::usual(["a".to_owned()]);
        let off = read("").unwrap();
        assert_eq!((off.ambient_enabled, off.enablement), (false, usual.clone()));
        for keys in ["", r#","enablement_selectors":[]"#, r#","enablement_selectors":null"#] {
            let on = read(&format!(r#","ambient_enabled":true{keys}"#)).unwrap();
            assert_eq!((on.ambient_enabled, on.enablement), (true, usual.clone()), "{keys}");
        }
        let own = r#","enablement_selectors":[{"podSelector":{"matchLabels":{"team":"a"}}}]"#;
        assert_ne!(read(own).unwrap().enablement, usual);
        let wrong = [
            ("[1]", "not a list of selectors"),
            (r#"[{"podSelector":{"matchExpressions":[{"key":"k","operator":"In"}]}}]"#, "\"k\""),
            ("{}", "is an object, not a list"),
        ];
        for (selectors, problem) in wrong {
            let error = read(&format!(r#","enablement_selectors":{selectors}"#)).unwrap_err();
            assert_eq!(error.code, Code::Config);
            let message = error.message;
            assert!(message.starts_with("enablement_selectors: ") && message.contains(problem), "{message}");
        }
    }

    #[test]
    fn the_older_form_is_read_and_todays_wins() {
        let older = r#""log_level":"warn","kubernetes":{"kubeconfig":"/etc/cni/net.d/ZZZ","cni_bin_dir":"/opt/cni/bin",
            "exclude_namespaces":["a","b"],"node_name":"n1"}"#;
        let read = conf(&format!(r#"{{"name":"n",{older}}}"#)).unwrap();
        assert_eq!((read.version, read.kubeconfig), (Version::OLDEST, "/etc/cni/net.d/ZZZ".into()));
        assert_eq!(
            (read.exclude_namespaces, read.node_name),
            (vec!["a".into(), "b".into()], Some("n1".into()))
        );
        assert_eq!(read.levels.of(crate::logs::SCOPE), Level::Warn);
        assert!(read.unknown_keys.is_empty());
        let both =
            conf(&format!(r#"{{"name":"n","exclude_namespaces":[],"plugin_log_level":"error",{older}}}"#));
        let both = both.unwrap();
        assert_eq!(both.levels.of(crate::logs::SCOPE), Level::Error);
        assert!(both.exclude_namespaces.is_empty());
        let both = conf(&format!(r#"{{"name":"n","cni_agent_run_dir":"/run/x",{older}}}"#)).unwrap();
        assert_eq!(both.kubeconfig, PathBuf::from("/run/x/istio-cni-kubeconfig"));
        let placeholder =
            conf(r#"{"name":"n","kubernetes":{"kubeconfig":"__KUBECONFIG_FILEPATH__"}}"#).unwrap();
        assert_eq!(placeholder.kubeconfig, PathBuf::from("/var/run/istio-cni/istio-cni-kubeconfig"));
    }

    #[test]
    fn nothing_said_means_the_defaults() {
        let conf =
            conf(r#"{"name":"n","plugin_log_level":"","exclude_namespaces":null,"add_timeout":30}"#).unwrap();
        assert_eq!(conf.levels.of(crate::logs::SCOPE), Level::Info);
        assert!(!conf.agent_host_network && conf.sandboxed == SandboxedRuntimes::default());
        assert_eq!(conf.add_timeout, Duration::from_secs(30));
        assert_eq!(conf.prev_result.json(conf.version), r#"{"cniVersion":"0.1.0"}"#);
    }

    #[test]
    fn all_problems_come_together() {
        let error = conf(
            r#"{"cniVersion":"1.0.0","name":"a/b","plugin_log_level":"loud","cni_agent_run_dir":"run","native_nftables":"yes","nft_sets":1,"strict_capture":"on","sandboxed_runtimes":"kata","sandboxed_pods":"ignore",
            "exclude_namespaces":["a",1],"pod_namespace":[],"add_timeout":0,"pod_manifest_dir":7,"kubernetes":{"kubeconfig":"x"},
            "prevResult":5}"#,
        )
        .unwrap_err();
        assert_eq!(error.code, Code::Config);
        let keys = [
            "name:",
            "plugin_log_level:",
            "cni_agent_run_dir:",
            "native_nftables:",
            "nft_sets:",
            "strict_capture:",
            "sandboxed_runtimes:",
            "sandboxed_pods:",
            "exclude_namespaces[1]:",
            "pod_namespace:",
            "add_timeout:",
            "pod_manifest_dir:",
            "kubernetes.kubeconfig:",
            "prevResult:",
        ];
        for key in keys {
            assert!(error.message.contains(key), "{key} is missing in {error}");
        }
        assert_eq!(error.message.matches("; ").count(), keys.len(), "{error}");
    }
}
