//! Whether a pod is redirected, and how: decided from the pod alone.

use crate::{
    accepted::AcceptedRules,
    plan::RulePlan,
    redirect::Redirect,
    settings::{
        IdentityCollision, InputErrors, Key, Misspelt, NamespaceFacts, Notice, RawSettings, Setting, Source,
        misspelt_annotation, misspelt_proxy_variable,
    },
    values::parse_bool,
};
use alloc::{
    borrow::ToOwned,
    boxed::Box,
    collections::{BTreeMap, BTreeSet},
    string::{String, ToString},
    vec::Vec,
};
use core::fmt;

/// The init container that programs rules itself.
const INIT_CONTAINER: &str = "istio-init";
/// The label, or annotation, that keeps a pod out of the mesh.
const INJECT: &str = "sidecar.istio.io/inject";
/// The proxy's variable that switches it off.
const DISABLE_ENVOY: &str = "DISABLE_ENVOY";

/// What a decision depends on, taken from a pod. Made from [`PodFacts::default`] or [`PodFacts::sidecar`] and filled in
/// field by field: fields may come.
///
/// ```
/// use redirect_core::pod::{PodFacts, SkipReason};
///
/// let mut pod = PodFacts::sidecar([("sidecar.istio.io/interceptionMode", "TPROXY")]);
/// assert_eq!(pod.skip_reason(), None);
/// pod.containers.insert("istio-init".to_owned());
/// assert_eq!(pod.skip_reason(), Some(SkipReason::HasInitContainer));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PodFacts {
    /// The pod's labels.
    pub labels: BTreeMap<String, String>,
    /// The pod's annotations.
    pub annotations: BTreeMap<String, String>,
    /// The names of its containers, init containers included.
    pub containers: BTreeSet<String>,
    /// The container named istio-proxy; the last one of several.
    pub proxy: Option<ProxyContainer>,
    /// The class of its runtime (`spec.runtimeClassName`); none for the node's usual one.
    pub runtime_class: Option<String>,
    /// The containers that run beside the proxy: the others, without init containers that end before it.
    pub beside_proxy: Vec<ContainerIdentity>,
}

/// Whom a container runs as, as far as the pod says; its image may say something else. Made from its default and filled in
/// field by field: fields may come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContainerIdentity {
    /// The container's name.
    pub name: String,
    /// `securityContext.runAsUser` of the container; if unset, of the pod.
    pub run_as_user: Option<i64>,
    /// `securityContext.runAsGroup` of the container; if unset, of the pod.
    pub run_as_group: Option<i64>,
}

/// The proxy's container. Made from its default and filled in field by field: fields may come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProxyContainer {
    /// Its arguments.
    pub args: Vec<String>,
    /// Its variables with a literal value; others are empty.
    pub env: BTreeMap<String, String>,
    /// `securityContext.runAsUser` of the container; if unset, of the pod.
    pub run_as_user: Option<i64>,
    /// `securityContext.runAsGroup` of the container; if unset, of the pod.
    pub run_as_group: Option<i64>,
}

impl ProxyContainer {
    /// The kind of proxy: the word behind `proxy` in its arguments.
    fn kind(&self) -> Option<&str> {
        match self.args.as_slice() {
            [proxy, kind, ..] if proxy == "proxy" && !kind.is_empty() => Some(kind),
            _ => None,
        }
    }

    fn says_true(&self, variable: &str) -> bool {
        self.env.get(variable).is_some_and(|text| parse_bool(text) == Ok(true))
    }
}

/// Whether, and how, a pod is redirected. No third outcome exists, so a match covers all. What its author should know besides,
/// [`Redirect::notices`] says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The pod is redirected, like this.
    Redirect(Box<Redirect>),
    /// The pod is skipped, for this reason.
    Skip(SkipReason),
}

impl Decision {
    /// The plan of the pod: empty where it is skipped.
    #[must_use]
    pub fn plan(&self) -> RulePlan {
        match self {
            Self::Redirect(redirect) => redirect.plan(),
            Self::Skip(_) => RulePlan::empty(),
        }
    }

    /// What the pod's author should know although nothing is wrong.
    #[must_use]
    pub fn notices(&self) -> &[Notice] {
        match self {
            Self::Redirect(redirect) => redirect.notices(),
            Self::Skip(_) => &[],
        }
    }
}

/// Makes the enum, the list of all and their texts, so that none of them can lack one.
macro_rules! skip_reasons {
    ($(#[doc = $doc:literal] $name:ident: $word:literal, $explanation:literal;)+) => {
        /// Why a pod is not redirected. Logs, metrics, events and explanations use the same words.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum SkipReason {
            $(#[doc = $doc] $name,)+
        }

        impl SkipReason {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The word for logs and metrics.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)+
                }
            }

            /// The reason in a sentence.
            #[must_use]
            pub const fn explanation(self) -> &'static str {
                match self {
                    $(Self::$name => $explanation,)+
                }
            }
        }
    };
}

skip_reasons! {
    /// The runtime named no pod.
    NotAPod: "not_a_pod", "the runtime named no pod (K8S_POD_NAME and K8S_POD_NAMESPACE in CNI_ARGS)";
    /// It is the node agent itself, which must start without itself.
    AgentPod: "agent_pod", "the pod is the node agent itself";
    /// Its namespace is excluded.
    NamespaceExcluded: "namespace_excluded", "the namespace is listed in exclude_namespaces";
    /// It has an init container that programs rules.
    HasInitContainer: "has_init_container", "the init container istio-init programs the rules itself";
    /// Its proxy is switched off (DISABLE_ENVOY).
    ProxyDisabled: "proxy_disabled", "container istio-proxy has DISABLE_ENVOY=true";
    /// It has no proxy.
    NoProxy: "no_proxy", "the pod has no container istio-proxy";
    /// Its proxy is not a sidecar: a gateway or a waypoint.
    NotASidecar: "not_a_sidecar", "the proxy is not a sidecar (its arguments do not begin with 'proxy sidecar')";
    /// It is labelled or annotated not to be injected.
    InjectionDisabled: "injection_disabled", "label or annotation sidecar.istio.io/inject is false";
    /// The injector has not dealt with it.
    NotInjected: "not_injected",
        "annotation sidecar.istio.io/status is missing: the injector has not processed the pod";
    /// It asks for no interception.
    InterceptionNone: "interception_none", "annotation sidecar.istio.io/interceptionMode is NONE";
    /// Its runtime is sandboxed: rules do not bind it.
    SandboxedRuntime: "sandboxed_runtime",
        "the pod's runtime is sandboxed: rules do not bind it, and its traffic bypasses the proxy";
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl PodFacts {
    /// The container that is the proxy.
    pub const PROXY_CONTAINER: &str = "istio-proxy";
    /// The annotation the injector leaves on a pod it has given a proxy.
    pub const STATUS_ANNOTATION: &str = "sidecar.istio.io/status";

    /// A pod with an application and an injected sidecar, and these annotations.
    pub fn sidecar<K: ToString, V: ToString>(annotations: impl IntoIterator<Item = (K, V)>) -> Self {
        let annotations = annotations.into_iter().map(|(key, value)| (key.to_string(), value.to_string()));
        let mut pod = Self {
            annotations: annotations.collect(),
            containers: ["app".to_owned()].into(),
            ..Self::default()
        };
        pod.inject();
        pod
    }

    /// Adds what the injector adds, where it is missing: its annotation and a proxy.
    pub(crate) fn inject(&mut self) {
        self.annotations.entry(PodFacts::STATUS_ANNOTATION.to_owned()).or_default();
        self.containers.insert(PodFacts::PROXY_CONTAINER.to_owned());
        let args = || ["proxy", "sidecar"].map(ToOwned::to_owned).into();
        self.proxy.get_or_insert_with(|| ProxyContainer { args: args(), ..ProxyContainer::default() });
    }

    /// Decides, for a network namespace with these facts.
    ///
    /// # Errors
    /// Everything wrong with the pod's annotations, together.
    pub fn decide(&self, facts: &NamespaceFacts<'_>) -> Result<Decision, InputErrors> {
        self.decide_with(RawSettings::for_pod(), facts)
    }

    /// Decides, starting from settings that hold for every pod: what the plugin's own environment says.
    ///
    /// # Errors
    /// Everything wrong with the settings and annotations, together.
    pub fn decide_with(
        &self,
        base: RawSettings,
        facts: &NamespaceFacts<'_>,
    ) -> Result<Decision, InputErrors> {
        match self.skip_reason() {
            Some(reason) => Ok(Decision::Skip(reason)),
            None => {
                let mut redirect = Redirect::parse(&self.settings(base), facts)?;
                let collisions = self.collisions(&redirect).map(Notice::RunsAsTheProxy);
                let notices = self.notices().chain(collisions).collect::<Vec<_>>();
                redirect.notices.0.splice(..0, notices);
                Ok(Decision::Redirect(Box::new(redirect)))
            }
        }
    }

    /// What of the pod has no effect and looks as if it should, also where the pod is skipped or its settings are wrong;
    /// [`Decision::notices`] has these and more.
    pub fn notices(&self) -> impl Iterator<Item = Notice> {
        let misspelt = self.misspelt().map(Notice::Misspelt);
        self.unreadable_switches().chain(misspelt)
    }

    /// Annotations of a pod, and variables of its proxy, that look like ours and are none.
    fn misspelt(&self) -> impl Iterator<Item = Misspelt> {
        let annotations = self.annotations.keys().filter_map(|name| misspelt_annotation(name));
        let variables = self.proxy.iter().flat_map(|proxy| proxy.env.keys());
        annotations.chain(variables.filter_map(|name| misspelt_proxy_variable(name)))
    }

    /// Variables of the proxy that should be booleans and are not.
    fn unreadable_switches(&self) -> impl Iterator<Item = Notice> {
        let switches = Setting::ALL.iter().filter_map(|setting| setting.proxy_env);
        let said = switches.filter_map(|name| Some((name, self.proxy.as_ref()?.env.get(name)?)));
        said.filter(|(_, text)| !text.is_empty() && parse_bool(text).is_err())
            .map(|(name, text)| Notice::UnreadableSwitch { name, value: text.clone() })
    }

    /// Which of its containers run as the proxy does, by what the pod says. The kernel's owner match asks for a socket's user and primary
    /// group alone, so `fsGroup` and `supplementalGroups` do not count.
    fn collisions(&self, redirect: &Redirect) -> impl Iterator<Item = IdentityCollision> {
        let shared = |id: Option<i64>, ids: &[u32], what| {
            let id = id.and_then(|id| u32::try_from(id).ok()).filter(|id| ids.contains(id))?;
            Some((what, id))
        };
        self.beside_proxy.iter().filter_map(move |one| {
            let user = shared(one.run_as_user, redirect.proxy_uids(), "user");
            let (what, id) = user.or_else(|| shared(one.run_as_group, redirect.proxy_gids(), "group"))?;
            Some(IdentityCollision { container: one.name.clone(), what, id })
        })
    }

    /// Why this pod is not redirected, if so; the first reason that holds.
    #[must_use]
    pub fn skip_reason(&self) -> Option<SkipReason> {
        if self.containers.contains(INIT_CONTAINER) {
            return Some(SkipReason::HasInitContainer);
        }
        let Some(proxy) = &self.proxy else { return Some(SkipReason::NoProxy) };
        if proxy.says_true(DISABLE_ENVOY) {
            return Some(SkipReason::ProxyDisabled);
        }
        if proxy.kind().is_some_and(|kind| kind != "sidecar") {
            return Some(SkipReason::NotASidecar);
        }
        if self.injection_is_off() {
            return Some(SkipReason::InjectionDisabled);
        }
        if !self.annotations.contains_key(PodFacts::STATUS_ANNOTATION) {
            return Some(SkipReason::NotInjected);
        }
        let mode =
            Key::InterceptionMode.setting().annotations.iter().find_map(|name| self.annotations.get(*name));
        mode.is_some_and(|mode| mode == "NONE").then_some(SkipReason::InterceptionNone)
    }

    /// The same without what no decision depends on, for callers that keep the facts of many pods: their annotations and
    /// variables may be long.
    #[must_use]
    pub fn condensed(mut self) -> Self {
        let is_setting = |name: &str| Setting::ALL.iter().any(|setting| setting.annotations.contains(&name));
        self.labels.retain(|name, _| name == INJECT);
        let is_accepting = |name: &str, list: &str| {
            name == AcceptedRules::ANNOTATION && list.len() <= AcceptedRules::LONGEST_LIST
        };
        self.annotations.retain(|name, text| {
            [INJECT, PodFacts::STATUS_ANNOTATION].contains(&&**name)
                || is_setting(name)
                || is_accepting(name, text)
        });
        // Of this one only counts that it is there.
        if let Some(status) = self.annotations.get_mut(PodFacts::STATUS_ANNOTATION) {
            *status = String::new();
        }
        (self.runtime_class, self.beside_proxy) = (None, Vec::new());
        self.containers.retain(|name| [INIT_CONTAINER, PodFacts::PROXY_CONTAINER].contains(&&**name));
        if let Some(proxy) = &mut self.proxy {
            let is_setting = |name: &str| Setting::ALL.iter().any(|setting| setting.proxy_env == Some(name));
            proxy.args.truncate(2);
            proxy.env.retain(|name, _| name == DISABLE_ENVOY || is_setting(name));
        }
        self
    }

    /// The label takes precedence over the annotation; a value that is not a boolean is ignored.
    fn injection_is_off(&self) -> bool {
        let said = self.labels.get(INJECT).or_else(|| self.annotations.get(INJECT));
        said.is_some_and(|text| parse_bool(text) == Ok(false))
    }

    /// What the pod says, over what holds for every pod.
    #[must_use]
    pub fn settings(&self, base: RawSettings) -> RawSettings {
        let mut raw = base;
        raw.read_annotations(Setting::ALL.iter(), |name| self.annotations.get(name).map(String::as_str));
        if let Some(proxy) = &self.proxy {
            proxy_settings(proxy, &mut raw);
        }
        raw
    }
}

/// Variables that are not boolean are ignored, as in the reference. Ids of 0 or less count as unset.
fn proxy_settings(proxy: &ProxyContainer, raw: &mut RawSettings) {
    for setting in Setting::ALL {
        let Some(name) = setting.proxy_env else { continue };
        if let Some(Ok(on)) = proxy.env.get(name).map(|text| parse_bool(text)) {
            raw.set(setting.key, if on { "true" } else { "false" }, Source::ProxyEnvironment(name));
        }
    }
    let ids = [
        (Key::ProxyUid, proxy.run_as_user, "securityContext.runAsUser"),
        (Key::ProxyGid, proxy.run_as_group, "securityContext.runAsGroup"),
    ];
    for (key, id, field) in ids {
        let id = id.filter(|id| *id > 0).unwrap_or_else(|| i64::from(Redirect::PROXY_ID));
        raw.set(key, id.to_string(), Source::ProxyField(field));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::PortRange;
    use crate::{InboundPorts, InterceptionMode};
    use core::net::IpAddr;

    fn decide(pod: &PodFacts) -> Result<Decision, InputErrors> {
        let addresses: [IpAddr; 1] = ["10.1.0.2".parse().unwrap()];
        pod.decide(&NamespaceFacts::new(&addresses))
    }

    fn redirect(pod: &PodFacts) -> Redirect {
        match decide(pod) {
            Ok(Decision::Redirect(redirect)) => *redirect,
            other => panic!("{other:?}"),
        }
    }

    const NOTHING: [(&str, &str); 0] = [];

    #[test]
    fn each_reason_has_a_word_and_a_sentence_of_its_own() {
        let words: BTreeSet<&str> = SkipReason::ALL.iter().map(|reason| reason.word()).collect();
        assert!(SkipReason::ALL.iter().all(|reason| reason.to_string() == reason.word()));
        let sentences: BTreeSet<&str> = SkipReason::ALL.iter().map(|reason| reason.explanation()).collect();
        assert_eq!((words.len(), sentences.len()), (SkipReason::ALL.len(), SkipReason::ALL.len()));
        assert!(
            words.iter().all(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '_')),
            "{words:?}"
        );
        assert!(sentences.iter().all(|sentence| sentence.split(' ').count() > 3), "{sentences:?}");
    }

    #[test]
    fn reasons_have_an_order() {
        let mut pod = PodFacts::sidecar(NOTHING);
        assert_eq!(pod.skip_reason(), None);
        pod.annotations.insert("sidecar.istio.io/interceptionMode".into(), "NONE".into());
        assert_eq!(pod.skip_reason(), Some(SkipReason::InterceptionNone));
        pod.annotations.remove(PodFacts::STATUS_ANNOTATION);
        assert_eq!(pod.skip_reason(), Some(SkipReason::NotInjected));
        pod.annotations.insert(INJECT.into(), "f".into());
        assert_eq!(pod.skip_reason(), Some(SkipReason::InjectionDisabled));
        pod.proxy.as_mut().unwrap().args = ["proxy".to_owned(), "router".to_owned()].into();
        assert_eq!(pod.skip_reason(), Some(SkipReason::NotASidecar));
        pod.proxy.as_mut().unwrap().env.insert("DISABLE_ENVOY".into(), "1".into());
        assert_eq!(pod.skip_reason(), Some(SkipReason::ProxyDisabled));
        pod.containers.insert(INIT_CONTAINER.into());
        assert_eq!(pod.skip_reason(), Some(SkipReason::HasInitContainer));
    }

    #[test]
    fn condensed_facts_name_rules_unless_the_list_is_too_long_to_count() {
        for (length, is_kept) in
            [(AcceptedRules::LONGEST_LIST, true), (AcceptedRules::LONGEST_LIST + 1, false)]
        {
            let list = "x".repeat(length);
            let condensed = PodFacts::sidecar([(AcceptedRules::ANNOTATION, &*list)]).condensed();
            assert_eq!(condensed.annotations.contains_key(AcceptedRules::ANNOTATION), is_kept, "{length}");
        }
    }

    #[test]
    fn condensed_facts_decide_alike() {
        let mut pods = Vec::new();
        for setting in Setting::ALL {
            for name in setting.annotations {
                pods.extend(
                    ["NONE", "80", "*", "10.0.0.0/8", "false", "x"]
                        .map(|text| PodFacts::sidecar([(*name, text)])),
                );
            }
            for text in ["true", "false", "x"] {
                let mut pod = PodFacts::sidecar(NOTHING);
                let name = setting.proxy_env.unwrap_or("DISABLE_ENVOY").to_owned();
                pod.proxy.as_mut().unwrap().env.insert(name, text.to_owned());
                pods.push(pod);
            }
        }
        let all = pods.len();
        for index in 0..all {
            let mut pod = pods[index].clone();
            pod.labels.insert(INJECT.into(), "false".into());
            pods.push(pod);
            let mut pod = pods[index].clone();
            pod.containers.insert(INIT_CONTAINER.into());
            pods.push(pod);
            let mut pod = pods[index].clone();
            pod.proxy.as_mut().unwrap().args[1] = "router".into();
            pods.push(pod);
            let mut pod = pods[index].clone();
            pod.annotations.remove(PodFacts::STATUS_ANNOTATION);
            pods.push(pod);
        }
        for mut pod in pods {
            pod.annotations.insert("long".into(), "text".repeat(1000));
            pod.proxy.as_mut().unwrap().env.insert("PROXY_CONFIG".into(), "text".repeat(1000));
            pod.proxy.as_mut().unwrap().args.push("--log".into());
            let condensed = pod.clone().condensed();
            assert_eq!(decide(&condensed), decide(&pod), "{pod:?}");
            assert!(alloc::format!("{condensed:?}").len() < 1000, "{condensed:?}");
        }
    }

    #[test]
    fn what_stands_behind_proxy_is_its_kind_and_nothing_else() {
        let kind = |args: &[&str]| {
            let args = args.iter().map(|&word| word.to_owned()).collect();
            ProxyContainer { args, ..ProxyContainer::default() }.kind().map(ToOwned::to_owned)
        };
        assert_eq!(kind(&["proxy", "router", "--log"]).as_deref(), Some("router"));
        for none in [&[][..], &["proxy"], &["proxy", ""], &["serve", "router"], &["router", "proxy"]] {
            assert_eq!(kind(none), None, "{none:?}");
        }
    }

    #[test]
    fn the_label_speaks_before_the_annotation() {
        let mut pod = PodFacts::sidecar([(INJECT, "false")]);
        pod.labels.insert(INJECT.into(), "true".into());
        assert_eq!(pod.skip_reason(), None);
    }

    #[test]
    fn the_proxys_own_ports_are_always_excluded() {
        let pod = PodFacts::sidecar([("traffic.sidecar.istio.io/excludeInboundPorts", "15090, 22,22")]);
        let ports = [15090, 22, 22, 15020, 15021].map(PortRange::single);
        assert_eq!(*redirect(&pod).inbound(), InboundPorts::AllExcept(ports.into()));
    }

    #[test]
    fn ranges_are_possible_in_annotations() {
        let pod = PodFacts::sidecar([("traffic.sidecar.istio.io/excludeOutboundPorts", "80,8000-8099")]);
        let wanted = [PortRange::single(80), PortRange::new(8000, 8099).unwrap()];
        assert_eq!(redirect(&pod).outbound_ports_exclude(), wanted);
    }

    #[test]
    fn the_proxys_container_says_who_it_is() {
        let mut pod = PodFacts::sidecar([("sidecar.istio.io/interceptionMode", "TPROXY")]);
        let proxy = pod.proxy.as_mut().unwrap();
        (proxy.run_as_user, proxy.run_as_group) = (Some(2102), Some(0));
        proxy.env.insert("ISTIO_META_DNS_CAPTURE".into(), "yes".into());
        let redirect = redirect(&pod);
        assert_eq!((redirect.proxy_uids(), redirect.proxy_gids()), (&[2102][..], &[1337][..]));
        assert!(matches!(redirect.mode(), InterceptionMode::Tproxy(_)));
        assert_eq!(*redirect.dns(), crate::DnsCapture::Off);
        let unreadable = Notice::UnreadableSwitch { name: "ISTIO_META_DNS_CAPTURE", value: "yes".to_owned() };
        assert_eq!(redirect.notices(), [unreadable]);
        for readable in ["", "true", "0"] {
            pod.proxy.as_mut().unwrap().env.insert("ISTIO_META_DNS_CAPTURE".into(), readable.into());
            assert_eq!(decide(&pod).unwrap().notices(), [], "{readable:?}");
        }
    }

    #[test]
    fn misspelt_names_are_found_in_annotations_and_variables() {
        let mut pod = PodFacts::sidecar([("traffic.sidecar.istio.io/excludeOutboundPort", "1")]);
        let proxy = pod.proxy.as_mut().unwrap();
        for name in ["ISTIO_DUALSTACK", "ISTIO_META_DNS_CAPTURE", "DROP_INVALID", "ISTIO_META_MESH_ID"] {
            proxy.env.insert(name.into(), "true".into());
        }
        let decision = decide(&pod).unwrap();
        let told: Vec<String> = decision.notices().iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "annotation traffic.sidecar.istio.io/excludeOutboundPort is not a setting and is ignored; did you mean traffic.sidecar.istio.io/excludeOutboundPorts?",
                "variable ISTIO_DUALSTACK of container istio-proxy is not a setting and is ignored; did you mean ISTIO_DUAL_STACK?",
            ]
        );
    }

    #[test]
    fn what_the_decision_leaves_open_comes_with_it() {
        let mut pod = PodFacts::sidecar(NOTHING);
        let container = |name: &str, user, group| ContainerIdentity {
            name: name.into(),
            run_as_user: user,
            run_as_group: group,
        };
        pod.beside_proxy =
            [container("app", Some(1000), Some(1000)), container("helper", None, Some(1337))].into();
        let addresses = ["10.1.0.2", "fd00::2"].map(|text| text.parse().unwrap());
        let told = |pod: &PodFacts| -> Vec<String> {
            let decision = pod.decide(&NamespaceFacts::new(&addresses)).unwrap();
            decision.notices().iter().map(ToString::to_string).collect()
        };
        let [collision, left_out] = told(&pod).try_into().unwrap();
        assert!(
            collision.starts_with("container helper runs as group 1337, as the proxy does"),
            "{collision}"
        );
        assert!(left_out.contains("IPv6 (fd00::2) is not captured; ISTIO_DUAL_STACK=true"), "{left_out}");
        pod.proxy.as_mut().unwrap().env.insert("ISTIO_DUAL_STACK".into(), "true".into());
        assert_eq!(told(&pod).len(), 1);
    }

    #[test]
    fn the_plan_of_a_skipped_pod_is_empty() {
        let pod = PodFacts::default();
        assert_eq!(decide(&pod).unwrap().plan(), RulePlan::empty());
        assert_eq!(
            decide(&PodFacts::sidecar(NOTHING)).unwrap().plan(),
            redirect(&PodFacts::sidecar(NOTHING)).plan()
        );
    }

    #[test]
    fn a_mode_in_small_letters_is_told_how_to_be_written() {
        for (text, meant) in [("none", "NONE"), ("tproxy", "TPROXY"), ("Redirect", "REDIRECT")] {
            let pod = PodFacts::sidecar([("sidecar.istio.io/interceptionMode", text)]);
            let told = decide(&pod).unwrap_err().to_string();
            assert!(
                told.ends_with(&alloc::format!("is not one of REDIRECT, TPROXY, NONE; write {meant}")),
                "{told}"
            );
        }
    }

    #[test]
    fn all_annotation_errors_are_reported_by_name() {
        let pod = PodFacts::sidecar([
            ("sidecar.istio.io/interceptionMode", ""),
            ("traffic.sidecar.istio.io/includeInboundPorts", "80,"),
            ("traffic.sidecar.istio.io/excludeInboundPorts", "*"),
            ("traffic.sidecar.istio.io/includeOutboundIPRanges", "10.0.0.0/8,"),
            ("traffic.sidecar.istio.io/excludeInterfaces", "eth+"),
        ]);
        let text = decide(&pod).unwrap_err().to_string();
        for name in [
            "interceptionMode",
            "includeInboundPorts",
            "excludeInboundPorts",
            "includeOutboundIPRanges",
            "excludeInterfaces",
        ] {
            assert!(text.contains(name), "{name} is missing in {text}");
        }
    }
}
