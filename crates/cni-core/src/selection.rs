//! What decides about a pod besides the pod itself: its name, the configuration, the runtime's environment. The node agent asks the same.

use redirect_core::{
    accepted::{AcceptedBy, AcceptedRules},
    options::{BackendChoice, NativeForm},
    settings::{Key, RawSettings, Source},
};

use std::collections::BTreeMap;

/// What the environment of the container runtime may say for all pods.
pub const PROCESS_WIDE: [Key; 3] = [Key::OwnerGroups, Key::OwnerGroupsExclude, Key::LoopbackRange];

/// What programs pods' rules, and in which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Programming {
    /// What programs them, unless the pod needs something else.
    pub backend: BackendChoice,
    /// How native nftables rules are written.
    pub native_form: NativeForm,
}

impl Programming {
    /// As the keys `native_nftables` and `nft_sets` say.
    #[must_use]
    pub const fn new(native_nftables: bool, nft_sets: bool) -> Self {
        Self {
            backend: if native_nftables { BackendChoice::NativeNft } else { BackendChoice::Auto },
            native_form: if nft_sets { NativeForm::Sets } else { NativeForm::Plain },
        }
    }
}

/// Which rules of other programs a node accepts in pods' network namespaces though they interfere, and whether its pods may name more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acceptance {
    /// Those that the node's operator names.
    pub of_node: AcceptedRules,
    /// Whether pods may name rules, by annotation.
    pub of_pods: bool,
}

/// None but KubeVirt's, and what pods name.
impl Default for Acceptance {
    fn default() -> Self {
        Self { of_node: AcceptedRules::default(), of_pods: true }
    }
}

impl Acceptance {
    /// The rules that are accepted in a pod with these annotations, and why those that it names are not, if so.
    #[must_use]
    pub fn of_pod(&self, annotations: &BTreeMap<String, String>) -> (AcceptedRules, Option<String>) {
        let mut accepted = self.of_node.clone();
        let Some(list) = annotations.get(AcceptedRules::ANNOTATION) else { return (accepted, None) };
        let problem = if self.of_pods {
            accepted.add(list, AcceptedBy::Pod).err().map(|problem| format!("it {problem}"))
        } else {
            Some("this node's pods may not name rules (ACCEPT_RULES_OF_PODS)".to_owned())
        };
        let annotation = AcceptedRules::ANNOTATION;
        (accepted, problem.map(|why| format!("annotation {annotation} counts for nothing: {why}")))
    }
}

/// The settings every pod starts from: what the configuration says about strict capture, and what the runtime's
/// environment, looked up with `env`, says about others.
pub fn base_settings(strict_capture: bool, env: impl FnMut(&'static str) -> Option<String>) -> RawSettings {
    let mut base = RawSettings::for_pod();
    base.read_environment(|key| PROCESS_WIDE.contains(&key), env);
    if strict_capture {
        base.set(Key::StrictCapture, "true", Source::Configuration("strict_capture"));
    }
    base
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{conf::Envelope, pod_name::PodName, wire::CniCommand};
    use redirect_core::{
        pod::{Decision, PodFacts, SkipReason},
        settings::NamespaceFacts,
    };

    #[test]
    fn names_are_left_alone_for_two_reasons() {
        let text =
            br#"{"cniVersion":"1.0.0","name":"n","type":"istio-cni","exclude_namespaces":["kube-system"],
            "pod_namespace":"istio-system","native_nftables":true,"nft_sets":true}"#;
        let conf = Envelope::read(text, CniCommand::Add).unwrap().conf().unwrap();
        let skips = |namespace: &str, name: &str| {
            conf.skips(&PodName { namespace: namespace.into(), name: name.into() })
        };
        assert_eq!(skips("istio-system", "istio-cni-node-x"), Some(SkipReason::AgentPod));
        assert_eq!(skips("kube-system", "web"), Some(SkipReason::NamespaceExcluded));
        assert_eq!((skips("shop", "istio-cni-node-x"), skips("istio-system", "istiod-x")), (None, None));
        assert_eq!(
            conf.programming,
            Programming { backend: BackendChoice::NativeNft, native_form: NativeForm::Sets }
        );
    }

    #[test]
    fn a_pod_names_rules_where_the_node_lets_it() {
        let annotated =
            |list: &str| BTreeMap::from([(AcceptedRules::ANNOTATION.to_owned(), list.to_owned())]);
        let mut acceptance = Acceptance::default();
        acceptance.of_node.add("chain=BACKUP", AcceptedBy::Node).unwrap();
        let (accepted, why_not) = acceptance.of_pod(&annotated("comment=mine"));
        assert_eq!((accepted.names().len(), why_not), (2, None));
        for (of_pods, list, why) in
            [(true, "table=nat", "table=nat"), (false, "comment=mine", "ACCEPT_RULES_OF_PODS")]
        {
            let acceptance = Acceptance { of_pods, ..acceptance.clone() };
            let (accepted, why_not) = acceptance.of_pod(&annotated(list));
            let why_not = why_not.unwrap();
            assert!(
                accepted == acceptance.of_node
                    && why_not.contains(why)
                    && why_not.contains(AcceptedRules::ANNOTATION),
                "{why_not}"
            );
            assert_eq!(acceptance.of_pod(&BTreeMap::new()), (acceptance.of_node.clone(), None));
        }
    }

    #[test]
    fn only_three_variables_of_the_runtime_count() {
        let base = base_settings(false, |name| Some(name.to_lowercase()));
        assert_eq!(base.get(Key::OwnerGroups).0, "istio_outbound_owner_groups");
        assert_eq!(base.get(Key::InboundPorts).0, RawSettings::for_pod().get(Key::InboundPorts).0);
    }

    #[test]
    fn strict_capture_is_the_configurations_unless_the_pod_says_otherwise() {
        let strict = |configured, annotations: &[(&str, &str)]| {
            let facts = PodFacts::sidecar(annotations.iter().copied());
            let addresses = ["10.1.0.2".parse().unwrap()];
            match facts.decide_with(base_settings(configured, |_| None), &NamespaceFacts::new(&addresses)) {
                Ok(Decision::Redirect(redirect)) => redirect.strict_capture(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((strict(true, &[]), strict(false, &[])), (true, false));
        let annotation = |text| [("traffic.sidecar.istio.io/strictCapture", text)];
        assert_eq!((strict(true, &annotation("false")), strict(false, &annotation("true"))), (false, true));
    }
}
