//! A pod of the node, as enrolment needs it.

use std::net::IpAddr;
use std::time::Duration;

use cni_core::enablement::{Enablement, NotAmbient};
use cni_core::pod_source::PodName;
use cni_core::sandboxed::SandboxedRuntimes;
use cni_core::selection::Acceptance;
use reasons::PodState;
use redirect_core::accepted::AcceptedRules;
use redirect_core::settings::{Key, RawSettings, Source};
use redirect_core::{AmbientRedirect, Family};
use serde_json::{Map, Value};
use settings_table::parse_duration;
use zds::ZdsWorkload;

use super::decision::Redirection;
use crate::ambient_rules::KEEP_CONNECTIONS;
use crate::settings::AmbientDefaults;

/// A pod of this node that has a network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AmbientPod {
    /// Its namespace and name.
    pub name: PodName,
    /// What ztunnel receives of it.
    pub workload: ZdsWorkload,
    /// All its addresses.
    pub addresses: Vec<IpAddr>,
    /// How it is to be redirected; why it is not in ambient mode.
    pub wanted: Result<AmbientRedirect, NotEnrolled>,
    /// How long connections are kept that are open when it is enrolled.
    pub keep: Duration,
    /// The rules of other programs that are accepted in it.
    pub accepted: AcceptedRules,
    /// What its annotation says.
    pub annotation: Option<Redirection>,
    /// It is being deleted. Its connections go on until its containers have ended.
    pub is_ending: bool,
}

/// Why a pod is not to be enrolled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotEnrolled {
    /// It is not in ambient mode.
    #[error(transparent)]
    NotAmbient(#[from] NotAmbient),
    /// It should be, and its annotations are invalid.
    #[error("{0}; correct the pod's annotations")]
    Settings(String),
    /// It should be, and rules do not bind it.
    #[error("runtimeClassName {class}: {meaning}", meaning = PodState::Sandboxed.meaning())]
    Sandboxed {
        /// The class of its runtime.
        class: String,
    },
}

impl NotEnrolled {
    /// Whether it should be in ambient mode, and cannot. What it has then stays: without rules its traffic would be plain text.
    #[must_use]
    pub const fn is_obstacle(&self) -> bool {
        match self {
            Self::NotAmbient(_) => false,
            Self::Settings(_) | Self::Sandboxed { .. } => true,
        }
    }
}

/// What decides for all pods of a node.
#[derive(Debug, Clone)]
pub struct AmbientRules {
    /// Which pods are in ambient mode.
    pub enablement: Enablement,
    /// How they are redirected.
    pub defaults: AmbientDefaults,
    /// Whose pods rules do not bind.
    pub sandboxed: SandboxedRuntimes,
    /// Which rules of other programs are accepted.
    pub acceptance: Acceptance,
}

impl AmbientPod {
    /// Reads a pod whose namespace has these labels; none if its network namespace is not known to exist, or is the node's.
    #[must_use]
    pub fn read(pod: &Value, namespace_labels: &Map<String, Value>, rules: &AmbientRules) -> Option<Self> {
        let read = Self::starting(pod, namespace_labels, rules)?;
        let phase = pod.pointer("/status/phase").and_then(Value::as_str);
        // The kubelet lists addresses as soon as the sandbox exists, before init containers have run.
        let has_netns = match phase {
            Some("Running") => true,
            Some("Pending") => !read.addresses.is_empty(),
            Some(_) | None => false,
        };
        has_netns.then_some(read)
    }

    /// Reads a pod whose network namespace is being set up, so that its status may not have its addresses yet; none if it is not a pod, or on the node's network.
    #[must_use]
    pub fn starting(
        pod: &Value,
        namespace_labels: &Map<String, Value>,
        rules: &AmbientRules,
    ) -> Option<Self> {
        let text = |pointer: &str| {
            pod.pointer(pointer).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let is_ending = pod.pointer("/metadata/deletionTimestamp").is_some_and(|at| !at.is_null());
        let name = PodName { namespace: text("/metadata/namespace")?, name: text("/metadata/name")? };
        let account = text("/spec/serviceAccountName").unwrap_or_else(|| "default".to_owned());
        let (uid, pod_name, namespace) = (text("/metadata/uid")?, name.name.clone(), name.namespace.clone());
        // Names that Kubernetes accepts fit.
        let workload = ZdsWorkload::new(uid, pod_name, namespace, account)?;
        let listed = pod.pointer("/status/podIPs").and_then(Value::as_array).into_iter().flatten();
        let addresses = listed.filter_map(|item| item.get("ip")?.as_str()?.parse().ok()).collect();
        let annotations = pod.pointer("/metadata/annotations").and_then(Value::as_object);
        let annotation = |key: &str| annotations?.get(key)?.as_str();
        let selected = rules.enablement.selects(pod, namespace_labels);
        if selected == Err(NotAmbient::HostNetwork) {
            return None;
        }
        let class = text("/spec/runtimeClassName").filter(|class| rules.sandboxed.has(class));
        let wanted = match (selected, class) {
            (Err(not), _) => Err(not.into()),
            (Ok(()), Some(class)) => Err(NotEnrolled::Sandboxed { class }),
            (Ok(()), None) => redirect(rules.defaults, annotation),
        };
        let of_namespace = || namespace_labels.get(KEEP_CONNECTIONS)?.as_str();
        let keep = kept(rules.defaults.keep_connections, annotation(KEEP_CONNECTIONS), of_namespace());
        let (keep, wanted) = match (keep, wanted) {
            (Err(why), Ok(_)) => (Duration::ZERO, Err(NotEnrolled::Settings(why))),
            (keep, wanted) => (keep.unwrap_or_default(), wanted),
        };
        let named = annotation(AcceptedRules::ANNOTATION)
            .map(|list| (AcceptedRules::ANNOTATION.to_owned(), list.to_owned()));
        let (accepted, _) = rules.acceptance.of_pod(&named.into_iter().collect());
        let annotation = annotation(Redirection::KEY).and_then(Redirection::of);
        Some(Self { name, workload, addresses, wanted, keep, accepted, annotation, is_ending })
    }
}

impl AmbientPod {
    /// How long open connections are kept when rules are put in force where none are. If it was enrolled before, these began without
    /// its rules, and are not kept.
    #[must_use]
    pub fn keeps(&self) -> Duration {
        if self.annotation == Some(Redirection::Enabled) { Duration::ZERO } else { self.keep }
    }

    /// Whether it should be in ambient mode, even if it cannot be.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.wanted.as_ref().err().is_none_or(NotEnrolled::is_obstacle)
    }
}

/// How long a pod keeps connections: what it says, or else its namespace, and at most this. Where an operator allows no time, neither counts.
fn kept(most: Duration, of_pod: Option<&str>, of_namespace: Option<&str>) -> Result<Duration, String> {
    if most.is_zero() {
        return Ok(Duration::ZERO);
    }
    let said = of_pod.map(|text| ("annotation", text));
    let said = said.or_else(|| of_namespace.map(|text| ("the namespace's label", text)));
    let Some((place, text)) = said else { return Ok(Duration::ZERO) };
    let read =
        parse_duration(text).map_err(|problem| format!("{place} {KEEP_CONNECTIONS}: {text:?} {problem}"));
    Ok(read?.min(most))
}

fn redirect<'a>(
    defaults: AmbientDefaults,
    annotation: impl Fn(&'static str) -> Option<&'a str>,
) -> Result<AmbientRedirect, NotEnrolled> {
    let mut raw = RawSettings::for_pod();
    let of_node = [
        (Key::AmbientCaptureScope, "AMBIENT_CAPTURE_SCOPE", defaults.capture_scope.to_string()),
        (Key::AmbientDnsCapture, "AMBIENT_DNS_CAPTURE", defaults.dns_capture.to_string()),
        (Key::AmbientIpv6, "AMBIENT_IPV6", defaults.ipv6.to_string()),
        (Key::AmbientProbeV4, "HOST_PROBE_SNAT_IP", defaults.probes.of(Family::V4).to_string()),
        (Key::AmbientProbeV6, "HOST_PROBE_SNAT_IPV6", defaults.probes.of(Family::V6).to_string()),
    ];
    for (key, variable, text) in of_node {
        raw.set(key, text, Source::Environment(variable));
    }
    raw.read_ambient_annotations(annotation);
    AmbientRedirect::parse(&raw).map_err(|errors| {
        let problems: Vec<String> = errors.iter().map(ToString::to_string).collect();
        NotEnrolled::Settings(problems.join("; "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::Families;
    use redirect_core::ambient::ProbeSources;
    use serde_json::json;

    const DEFAULTS: AmbientDefaults = AmbientDefaults {
        dns_capture: true,
        ipv6: true,
        capture_scope: false,
        keep_connections: Duration::ZERO,
        probes: ProbeSources::USUAL,
    };

    fn pod() -> Value {
        json!({"metadata": {"namespace": "shop", "name": "web", "uid": "u-1",
                "labels": {"istio.io/dataplane-mode": "ambient"},
                "annotations": {"ambient.istio.io/redirection": "enabled"}},
            "spec": {"serviceAccountName": "seller"},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]}})
    }

    fn read(pod: &Value, defaults: AmbientDefaults) -> Option<AmbientPod> {
        let rules = AmbientRules {
            enablement: Enablement::usual([]),
            defaults,
            sandboxed: SandboxedRuntimes::default(),
            acceptance: Acceptance::default(),
        };
        AmbientPod::read(pod, &Map::new(), &rules)
    }

    #[test]
    fn a_pod_is_read_with_its_identity_addresses_and_settings() {
        let web = read(&pod(), DEFAULTS).expect("a pod");
        let workload = ZdsWorkload::new("u-1".into(), "web".into(), "shop".into(), "seller".into());
        assert_eq!(Some(web.workload), workload);
        assert_eq!(web.addresses, ["10.1.0.2", "fd00::2"].map(|ip| ip.parse::<IpAddr>().expect("one")));
        assert_eq!(web.annotation, Some(Redirection::Enabled));
        let redirect = web.wanted.expect("in ambient mode");
        assert_eq!(redirect, AmbientRedirect::new(Families::Both).with_dns_capture(true));
        let probes = ProbeSources::USUAL.with(Family::V4, "169.254.8.1").expect("an address");
        let narrow = AmbientDefaults { dns_capture: false, ipv6: false, probes, ..DEFAULTS };
        let narrow = read(&pod(), narrow).expect("a pod");
        let narrow = narrow.wanted.expect("in ambient mode");
        assert_eq!((narrow.families(), narrow.captures_dns()), (Families::V4, false));
        assert_eq!(narrow.probe_sources(), probes);
    }

    #[test]
    fn a_pods_annotations_decide_and_wrong_ones_are_told() {
        let with = |annotation: &str, value: &str| {
            let mut pod = pod();
            pod["metadata"]["annotations"][annotation] = json!(value);
            read(&pod, DEFAULTS).expect("a pod").wanted
        };
        let bypassing = with("ambient.istio.io/bypass-inbound-capture", "true").expect("valid");
        assert!(!bypassing.captures_inbound());
        assert!(!with("ambient.istio.io/dns-capture", "false").expect("valid").captures_dns());
        let wrong = with("ambient.istio.io/dns-capture", "perhaps").expect_err("invalid").to_string();
        assert!(wrong.contains("ambient.istio.io/dns-capture") && wrong.contains("correct"), "{wrong}");
    }

    #[test]
    fn a_pod_limits_what_is_captured_only_where_that_is_allowed_and_not_by_half() {
        let with = |is_allowed: bool, ports: &str| {
            let mut pod = pod();
            pod["metadata"]["annotations"]["traffic.istio.io/excludeInboundPorts"] = json!(ports);
            let defaults = AmbientDefaults { capture_scope: is_allowed, ..DEFAULTS };
            read(&pod, defaults).expect("a pod").wanted
        };
        let all = read(&pod(), DEFAULTS).expect("a pod").wanted;
        assert_eq!(with(false, "9090"), all);
        assert_eq!(with(false, "metrics"), all);
        assert!(!with(true, "9090").expect("valid").captures_everything());
        let why = with(true, "9090,metrics").expect_err("invalid");
        assert!(why.is_obstacle());
        let told = why.to_string();
        assert!(told.starts_with("annotation traffic.istio.io/excludeInboundPorts: \"metrics\""), "{told}");
        let many = vec!["80"; 20_000].join(",");
        assert!(with(true, &many).expect_err("too many").to_string().contains("are 20000 values"));
    }

    #[test]
    fn a_pod_or_its_namespace_asks_for_its_connections_and_an_operator_limits_that() {
        let hour = AmbientDefaults { keep_connections: Duration::from_secs(3600), ..DEFAULTS };
        let with = |defaults: AmbientDefaults, of_pod: Option<&str>, of_namespace: Option<&str>| {
            let mut pod = pod();
            pod["metadata"]["annotations"] = json!(of_pod.map(|text| json!({KEEP_CONNECTIONS: text})));
            let rules = AmbientRules {
                enablement: Enablement::usual([]),
                defaults,
                sandboxed: SandboxedRuntimes::default(),
                acceptance: Acceptance::default(),
            };
            let labels = of_namespace.map(|text| (KEEP_CONNECTIONS.to_owned(), json!(text)));
            AmbientPod::read(&pod, &labels.into_iter().collect(), &rules).expect("a pod")
        };
        for (defaults, of_pod, of_namespace, seconds) in [
            (DEFAULTS, Some("10m"), Some("10m"), 0),
            (hour, None, None, 0),
            (hour, Some("10m"), None, 600),
            (hour, None, Some("10m"), 600),
            (hour, Some("1m"), Some("10m"), 60),
            (hour, Some("0s"), Some("10m"), 0),
            (hour, Some("2h"), None, 3600),
        ] {
            let keeps = with(defaults, of_pod, of_namespace).keeps();
            assert_eq!(keeps.as_secs(), seconds, "{of_pod:?} {of_namespace:?}");
        }
        for (of_pod, of_namespace, begins) in [
            (Some("soon"), None, "annotation cni.istio.io/keepConnections: \"soon\" is not a duration"),
            (
                None,
                Some("10"),
                "the namespace's label cni.istio.io/keepConnections: \"10\" is not a duration",
            ),
        ] {
            let why = with(hour, of_pod, of_namespace).wanted.expect_err("wrong");
            assert!(why.is_obstacle() && why.to_string().starts_with(begins), "{why}");
            assert!(
                with(DEFAULTS, of_pod, of_namespace).wanted.is_ok(),
                "what does not count cannot be wrong"
            );
        }
        let mut enrolled = with(hour, Some("10m"), None);
        enrolled.annotation = Some(Redirection::Enabled);
        assert_eq!(enrolled.keeps(), Duration::ZERO, "it has been enrolled, so its rules are only repaired");
    }

    #[test]
    fn pods_without_a_network_namespace_do_not_count_and_others_may_have_to_leave() {
        let with = |pointer: &str, value: Value| {
            let mut pod = pod();
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            pod.pointer_mut(parent).expect("a parent")[key] = value;
            pod
        };
        for (pointer, value) in [
            ("/status/phase", json!("Succeeded")),
            ("/status/phase", json!("Failed")),
            ("/status", json!({"phase": "Pending"})),
            ("/metadata/uid", json!("")),
            ("/spec/hostNetwork", json!(true)),
        ] {
            assert_eq!(read(&with(pointer, value), DEFAULTS), None, "{pointer}");
        }
        let in_init = read(&with("/status/phase", json!("Pending")), DEFAULTS).expect("it has a namespace");
        assert!(in_init.wanted.is_ok() && !in_init.is_ending);
        let ending = with("/metadata/deletionTimestamp", json!("2026-11-21T00:00:00Z"));
        assert!(read(&ending, DEFAULTS).expect("its containers run").is_ending);
        let sandboxed = read(&with("/spec/runtimeClassName", json!("gvisor")), DEFAULTS).expect("it runs");
        let why = sandboxed.wanted.expect_err("rules do not bind it");
        assert!(why.is_obstacle() && why.to_string().starts_with("runtimeClassName gvisor: "), "{why}");
        let mut left = pod();
        left["metadata"]["labels"] = json!({});
        let left = read(&left, DEFAULTS).expect("it runs");
        assert_eq!(left.wanted, Err(NotEnrolled::NotAmbient(NotAmbient::NotSelected)));
        assert_eq!(left.annotation, Some(Redirection::Enabled));
        assert_eq!(read(&json!([]), DEFAULTS), None);
    }
}
