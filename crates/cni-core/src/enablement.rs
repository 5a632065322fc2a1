//! Which pods are in ambient mode: what plugin and agent decide alike, from labels of the pod and of its namespace.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::selector::{LabelRequirement, LabelSelector, Operator};

/// The label by which pods and namespaces ask for a data plane.
pub const DATAPLANE_LABEL: &str = "istio.io/dataplane-mode";
/// The annotation of pods that have a sidecar.
pub const SIDECAR_ANNOTATION: &str = "sidecar.istio.io/status";

/// The annotation by which the agent says how far a pod of ambient mode is.
pub const REDIRECTION_ANNOTATION: &str = "ambient.istio.io/redirection";

/// Which pods are in ambient mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enablement {
    /// One that selects a pod is enough.
    selectors: Vec<PairedSelector>,
    excluded: BTreeSet<String>,
}

/// Why a pod is not in ambient mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAmbient {
    /// It has no network namespace of its own.
    #[error("the pod is on the node's network, which is never redirected")]
    HostNetwork,
    /// It has a sidecar, and stays with it.
    #[error("the pod has a sidecar (annotation sidecar.istio.io/status)")]
    Sidecar,
    /// Its namespace is excluded.
    #[error("the pod's namespace is in EXCLUDE_NAMESPACES")]
    ExcludedNamespace,
    /// No selector selects it.
    #[error("neither the pod nor its namespace has labels that ask for ambient mode")]
    NotSelected,
}

/// Why selectors cannot be read, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EnablementError(String);

/// A selector of pods by their labels and those of their namespaces. An empty one selects all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PairedSelector {
    #[serde(default)]
    pod_selector: LabelSelector,
    #[serde(default)]
    namespace_selector: LabelSelector,
}

impl Enablement {
    /// The reference's: pods that ask for ambient mode, and those of namespaces that do, unless they ask for none.
    #[must_use]
    pub fn usual(excluded: impl IntoIterator<Item = String>) -> Self {
        let ambient = || LabelSelector {
            match_labels: [(DATAPLANE_LABEL.to_owned(), "ambient".to_owned())].into(),
            ..LabelSelector::default()
        };
        let not_none = LabelRequirement {
            key: DATAPLANE_LABEL.to_owned(),
            operator: Operator::NotIn,
            values: ["none".to_owned()].into(),
        };
        let of_namespace = PairedSelector {
            pod_selector: LabelSelector { match_expressions: vec![not_none], ..LabelSelector::default() },
            namespace_selector: ambient(),
        };
        let of_pod = PairedSelector { pod_selector: ambient(), ..PairedSelector::default() };
        Self { selectors: vec![of_pod, of_namespace], excluded: excluded.into_iter().collect() }
    }

    /// Whether labels of no other name than [`DATAPLANE_LABEL`] decide.
    #[must_use]
    pub fn is_usual(&self) -> bool {
        self.selectors == Self::usual([]).selectors
    }

    /// Reads a list of objects with `podSelector` and `namespaceSelector`. Without any, no pod is selected.
    ///
    /// # Errors
    /// It has another form.
    pub fn read(
        selectors: &Value,
        excluded: impl IntoIterator<Item = String>,
    ) -> Result<Self, EnablementError> {
        let selectors: Vec<PairedSelector> = Vec::deserialize(selectors)
            .map_err(|error| EnablementError(format!("not a list of selectors: {error}")))?;
        let all = selectors.iter().flat_map(|pair| [&pair.pod_selector, &pair.namespace_selector]);
        let checked =
            all.flat_map(|selector| &selector.match_expressions).try_for_each(LabelRequirement::check);
        checked.map_err(EnablementError)?;
        Ok(Self { selectors, excluded: excluded.into_iter().collect() })
    }

    /// Whether a pod, as the API server has it, in a namespace with these labels, is in ambient mode.
    ///
    /// # Errors
    /// Why it is not.
    pub fn selects(&self, pod: &Value, namespace_labels: &Map<String, Value>) -> Result<(), NotAmbient> {
        self.admits(pod)?;
        let mut selectors = self.selectors_of(pod);
        let selects = selectors.any(|selector| selector.selects(|key| namespace_labels.get(key)?.as_str()));
        if selects { Ok(()) } else { Err(NotAmbient::NotSelected) }
    }

    /// The same where the pod alone decides; none if the labels of its namespace do, which cost a request.
    #[must_use]
    pub fn selects_anywhere(&self, pod: &Value) -> Option<Result<(), NotAmbient>> {
        if let Err(why) = self.admits(pod) {
            return Some(Err(why));
        }
        let mut selectors = self.selectors_of(pod).peekable();
        if selectors.peek().is_none() {
            return Some(Err(NotAmbient::NotSelected));
        }
        selectors.any(|selector| *selector == LabelSelector::default()).then_some(Ok(()))
    }

    /// Whether selectors decide about a pod at all.
    fn admits(&self, pod: &Value) -> Result<(), NotAmbient> {
        if pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true)) {
            return Err(NotAmbient::HostNetwork);
        }
        let namespace = pod.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or_default();
        if self.excluded.contains(namespace) {
            return Err(NotAmbient::ExcludedNamespace);
        }
        let annotations = pod.pointer("/metadata/annotations").and_then(Value::as_object);
        if annotations.is_some_and(|all| all.contains_key(SIDECAR_ANNOTATION)) {
            return Err(NotAmbient::Sidecar);
        }
        Ok(())
    }

    /// The selectors of namespaces that remain once the pod's own labels are known.
    fn selectors_of<'a>(&'a self, pod: &'a Value) -> impl Iterator<Item = &'a LabelSelector> {
        let labels = pod.pointer("/metadata/labels").and_then(Value::as_object);
        self.selectors
            .iter()
            .filter(move |pair| pair.pod_selector.selects(|key| labels?.get(key)?.as_str()))
            .map(|pair| &pair.namespace_selector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn labels(mode: Option<&str>) -> Map<String, Value> {
        mode.map(|mode| (DATAPLANE_LABEL.to_owned(), json!(mode))).into_iter().collect()
    }

    fn pod(mode: Option<&str>) -> Value {
        json!({"metadata": {"namespace": "shop", "name": "web", "labels": labels(mode)}, "spec": {}})
    }

    /// What the reference's chart has.
    fn of_chart() -> Value {
        json!([
            {"podSelector": {"matchLabels": {"istio.io/dataplane-mode": "ambient"}}},
            {"podSelector": {"matchExpressions": [
                {"key": "istio.io/dataplane-mode", "operator": "NotIn", "values": ["none"]}]},
             "namespaceSelector": {"matchLabels": {"istio.io/dataplane-mode": "ambient"}}},
        ])
    }

    #[test]
    fn pods_are_selected_by_their_label_or_their_namespaces() {
        let read = Enablement::read(&of_chart(), []).expect("selectors");
        assert_eq!(read, Enablement::usual([]), "the usual ones are the chart's");
        let cases = [
            (Some("ambient"), None, true),
            (None, Some("ambient"), true),
            (Some("none"), Some("ambient"), false),
            (Some("other"), Some("ambient"), true),
            (None, None, false),
            (None, Some("other"), false),
        ];
        for (of_pod, of_namespace, selected) in cases {
            let selects = read.selects(&pod(of_pod), &labels(of_namespace));
            assert_eq!(selects.is_ok(), selected, "{of_pod:?} {of_namespace:?}");
        }
    }

    #[test]
    fn some_pods_are_never_in_ambient_mode() {
        let usual = Enablement::usual(["kube-system".to_owned()]);
        let because = |pointer: &str, value: Value| {
            let mut pod = pod(Some("ambient"));
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            pod.pointer_mut(parent).expect("a parent")[key] = value;
            usual.selects(&pod, &Map::new())
        };
        assert_eq!(because("/spec/hostNetwork", json!(false)), Ok(()));
        assert_eq!(because("/spec/hostNetwork", json!(true)), Err(NotAmbient::HostNetwork));
        assert_eq!(because("/metadata/namespace", json!("kube-system")), Err(NotAmbient::ExcludedNamespace));
        let sidecar = json!({"sidecar.istio.io/status": ""});
        assert_eq!(because("/metadata/annotations", sidecar), Err(NotAmbient::Sidecar));
        assert_eq!(usual.selects(&json!(7), &Map::new()), Err(NotAmbient::NotSelected));
    }

    #[test]
    fn selectors_mean_what_they_mean_to_the_api_server() {
        let selects = |condition: Value| {
            let selectors = json!([{"podSelector": {"matchExpressions": [condition]}}]);
            Enablement::read(&selectors, [])
                .map(|read| read.selects(&pod(Some("ambient")), &Map::new()).is_ok())
        };
        let condition = |operator: &str, key: &str, values: &[&str]| {
            selects(json!({"key": key, "operator": operator, "values": values}))
        };
        assert_eq!(condition("In", DATAPLANE_LABEL, &["ambient", "x"]), Ok(true));
        assert_eq!(condition("In", "app", &["x"]), Ok(false));
        assert_eq!(condition("NotIn", "app", &["x"]), Ok(true));
        assert_eq!(condition("Exists", DATAPLANE_LABEL, &[]), Ok(true));
        assert_eq!(condition("DoesNotExist", DATAPLANE_LABEL, &[]), Ok(false));
        for (operator, values) in [("In", &[][..]), ("Exists", &["x"])] {
            let error = condition(operator, "app", values).expect_err("not a condition").to_string();
            assert!(error.contains("\"app\""), "{error}");
        }
        let error = condition("Like", "app", &[]).expect_err("no operator").to_string();
        assert!(error.starts_with("not a list of selectors: "), "{error}");
        assert!(
            Enablement::read(&json!({}), []).is_err()
                && Enablement::read(&json!([{"podselector": {}}]), []).is_err()
        );
        let all = Enablement::read(&json!([{}]), []).expect("selects all");
        assert_eq!(all.selects(&pod(None), &Map::new()), Ok(()));
        let none = Enablement::read(&json!([]), []).expect("selects none");
        assert_eq!(none.selects(&pod(Some("ambient")), &Map::new()), Err(NotAmbient::NotSelected));
    }

    #[test]
    fn the_labels_of_the_namespace_are_needed_only_where_they_decide() {
        let usual = Enablement::usual(["kube-system".to_owned()]);
        let mut meshed = pod(None);
        meshed["metadata"]["annotations"] = json!({SIDECAR_ANNOTATION: "{}"});
        let mut excluded = pod(None);
        excluded["metadata"]["namespace"] = json!("kube-system");
        assert_eq!(usual.selects_anywhere(&pod(None)), None);
        assert_eq!(usual.selects_anywhere(&pod(Some("other"))), None);
        assert_eq!(usual.selects_anywhere(&pod(Some("ambient"))), Some(Ok(())));
        assert_eq!(usual.selects_anywhere(&pod(Some("none"))), Some(Err(NotAmbient::NotSelected)));
        assert_eq!(usual.selects_anywhere(&meshed), Some(Err(NotAmbient::Sidecar)));
        assert_eq!(usual.selects_anywhere(&excluded), Some(Err(NotAmbient::ExcludedNamespace)));
    }

    /// Labels, some with a value.
    fn some_labels() -> impl Strategy<Value = Map<String, Value>> {
        let label = prop::option::of(prop::sample::select(vec!["ambient", "none", "x"]));
        (label.clone(), label).prop_map(|(mode, app)| {
            let all = [(DATAPLANE_LABEL, mode), ("app", app)];
            all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), json!(value?)))).collect()
        })
    }

    fn some_selector() -> impl Strategy<Value = Value> {
        let condition = (
            prop::sample::select(vec![DATAPLANE_LABEL, "app"]),
            prop::sample::select(vec!["In", "NotIn", "Exists", "DoesNotExist"]),
            prop::sample::select(vec!["ambient", "none", "x"]),
        );
        let condition = condition.prop_map(|(key, operator, value)| {
            let values = if operator.ends_with("In") { json!([value]) } else { json!([]) };
            json!({"key": key, "operator": operator, "values": values})
        });
        (some_labels(), prop::collection::vec(condition, 0..2), any::<bool>()).prop_map(
            |(labels, conditions, is_empty)| match is_empty {
                true => json!({}),
                false => json!({"matchLabels": labels, "matchExpressions": conditions}),
            },
        )
    }

    fn some_pod() -> impl Strategy<Value = Value> {
        let namespace = prop::sample::select(vec!["shop", "kube-system"]);
        (some_labels(), namespace, any::<bool>(), any::<bool>()).prop_map(
            |(labels, namespace, on_host, has_sidecar)| {
                let annotations = if has_sidecar { json!({SIDECAR_ANNOTATION: "{}"}) } else { json!(null) };
                json!({"metadata": {"namespace": namespace, "labels": labels, "annotations": annotations},
                    "spec": {"hostNetwork": on_host}})
            },
        )
    }

    proptest! {
        #[test]
        fn what_the_pod_alone_decides_no_namespace_changes(
            pairs in prop::collection::vec((some_selector(), some_selector()), 0..3),
            pod in some_pod(),
            namespaces in prop::collection::vec(some_labels(), 1..20),
        ) {
            let pairs: Vec<Value> = pairs
                .iter()
                .map(|(of_pod, of_namespace)| json!({"podSelector": of_pod, "namespaceSelector": of_namespace}))
                .collect();
            let read = Enablement::read(&json!(pairs), ["kube-system".to_owned()]).expect("selectors");
            if let Some(decided) = read.selects_anywhere(&pod) {
                for labels in &namespaces {
                    prop_assert_eq!(read.selects(&pod, labels), decided, "{:?}", labels);
                }
            }
        }

        /// With the usual selectors, labels are asked for only if an answer depends on them.
        #[test]
        fn no_namespace_is_asked_for_in_vain(pod in some_pod()) {
            let usual = Enablement::usual(["kube-system".to_owned()]);
            let differs = usual.selects(&pod, &labels(Some("ambient"))) != usual.selects(&pod, &labels(None));
            prop_assert_eq!(usual.selects_anywhere(&pod).is_none(), differs);
        }
    }
}
