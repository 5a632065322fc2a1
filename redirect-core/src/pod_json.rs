//! [`PodFacts`] from a pod as Kubernetes writes it (feature `pod-json`).
//!
//! Only the fields that a decision depends on are read, wherever the object comes from: the API server, a watch, an
//! admission request or a manifest. Where a pod says who runs a container, the container's `securityContext` wins over
//! the pod's, field by field, as it does in Kubernetes. Init containers count, so a proxy that is a native sidecar (an init
//! container with `restartPolicy: Always`) is found like any other.
//!
//! ```
//! use redirect_core::pod::PodFacts;
//! use serde_json::json;
//!
//! let pod = json!({
//!     "kind": "Pod",
//!     "metadata": {"annotations": {"sidecar.istio.io/status": "{}"}},
//!     "spec": {
//!         "securityContext": {"runAsUser": 2102},
//!         "initContainers": [{"name": "istio-proxy", "args": ["proxy", "sidecar"], "restartPolicy": "Always"}],
//!         "containers": [{"name": "app"}],
//!     },
//! });
//! let facts = PodFacts::from_json(&pod)?;
//! assert_eq!(facts.skip_reason(), None);
//! # Ok::<(), redirect_core::pod_json::PodJsonErrors>(())
//! ```

use crate::{
    pod::{ContainerIdentity, PodFacts, ProxyContainer},
    settings::errors::error_list,
};
use alloc::{
    borrow::ToOwned,
    collections::BTreeMap,
    string::{String, ToString},
    vec::Vec,
};
use core::fmt;
use serde_json::{Map, Value};

impl PodFacts {
    /// Takes from a pod what a decision depends on; everything else may be missing or of any form.
    ///
    /// A field that is null counts as missing. `kind` may be missing, as it is from the items of a list.
    ///
    /// # Errors
    /// Every field of the wrong type among those that count, and required fields that are missing; all of them together.
    pub fn from_json(pod: &Value) -> Result<Self, PodJsonErrors> {
        let mut errors = PodJsonErrors::default();
        let pod = Field::pod(pod);
        let facts = facts(&pod, &mut errors);
        if errors.0.is_empty() { Ok(facts) } else { Err(errors) }
    }

    /// The same from an object as it stands in a repository: a Pod, or anything with a pod template ([`pod_of`](Self::pod_of)), as the injector will
    /// leave it. The proxy need not be among its containers: it gets one with the usual identity. A pod on the host's network gets none, as
    /// from the injector.
    ///
    /// ```
    /// use redirect_core::{pod::PodFacts, settings::NamespaceFacts};
    /// use serde_json::json;
    ///
    /// let deployment = json!({"kind": "Deployment", "spec": {"template": {
    ///     "metadata": {"annotations": {"traffic.sidecar.istio.io/excludeOutboundPorts": "3306"}},
    ///     "spec": {"containers": [{"name": "app"}]},
    /// }}});
    /// let addresses = ["10.1.0.2".parse()?];
    /// let decision = PodFacts::from_manifest(&deployment)?.decide(&NamespaceFacts::new(&addresses))?;
    /// assert!(!decision.plan().planned_rules().is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), about the pod; without a pod in the object, that it is of another kind.
    pub fn from_manifest(object: &Value) -> Result<Self, PodJsonErrors> {
        let pod = Self::pod_of(object.clone());
        let mut facts = Self::from_json(&pod)?;
        if pod.pointer("/spec/hostNetwork") != Some(&Value::Bool(true)) {
            facts.inject();
        }
        Ok(facts)
    }

    /// The pod of an object as it stands in a repository: a workload's template (of a Deployment, a Job, a CronJob, or of another program's kind)
    /// with the workload's name; any other object is itself. An object with a template but no kind, such as an item of a list, is a
    /// workload, too.
    #[must_use]
    pub fn pod_of(mut object: Value) -> Value {
        if object.get("kind").is_some_and(|kind| kind == "Pod") {
            return object;
        }
        let is_template = |path: &&str| {
            object
                .pointer(path)
                .is_some_and(|pod| pod.pointer("/spec/containers").is_some_and(Value::is_array))
        };
        let Some(path) = TEMPLATES.into_iter().find(is_template) else { return object };
        let mut template = object.pointer_mut(path).map(Value::take).unwrap_or_default();
        if let Some(fields) = template.as_object_mut() {
            fields.insert("kind".to_owned(), "Pod".into());
            let metadata = fields.entry("metadata").or_insert(Value::Null);
            if metadata.is_null() {
                *metadata = Value::Object(Map::new());
            }
            if let Some(metadata) = metadata.as_object_mut() {
                for field in ["name", "namespace"] {
                    let of_workload = object.pointer("/metadata").and_then(|metadata| metadata.get(field));
                    metadata.entry(field).or_insert(of_workload.cloned().unwrap_or_default());
                }
            }
        }
        template
    }

    /// A pod without the fields that no decision depends on: for one who keeps the pods of a node. Name, namespace, UID and version stay.
    ///
    /// [`from_json`](Self::from_json) takes the same from it as from the whole pod, or reports the same errors.
    #[must_use]
    pub fn decisive_part(pod: &Value) -> Value {
        let mut part = picked(pod, &["kind", "metadata", "spec"]);
        let of_metadata = ["namespace", "name", "uid", "resourceVersion", "labels", "annotations"];
        edit(&mut part, "metadata", |metadata| *metadata = picked(metadata, &of_metadata));
        edit(&mut part, "spec", |spec| {
            *spec = picked(spec, &["initContainers", "containers", "runtimeClassName", "securityContext"]);
            edit(spec, "securityContext", only_ids);
            for list in ["initContainers", "containers"] {
                edit_items(spec, list, decisive_part_of_container);
            }
        });
        part
    }
}

/// Where a pod template is: in a workload, such as a Deployment, in a CronJob, and in a PodTemplate.
const TEMPLATES: [&str; 3] = ["/spec/template", "/spec/jobTemplate/spec/template", "/template"];

/// A field of a pod that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
#[non_exhaustive]
pub struct PodJsonError {
    /// The path of the field, such as `spec.containers[0].name`.
    pub field: String,
    /// What is wrong with it.
    pub problem: FieldProblem,
}

/// What is wrong with a field. Values of the wrong type are not shown: they may be anything, also secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FieldProblem {
    /// A required field is not there.
    #[error("missing")]
    Missing,
    /// The value has another type.
    #[error("is {found}, not {wanted}")]
    WrongType {
        /// The value found, such as "a number".
        found: &'static str,
        /// What belongs there, such as "a string".
        wanted: &'static str,
    },
    /// The object is of another kind.
    #[error("{0:?} is not Pod")]
    NotAPod(String),
}

/// Everything wrong with a pod, in the order of its fields; never empty when returned as an error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodJsonErrors(Vec<PodJsonError>);

error_list!(PodJsonErrors of PodJsonError, "The errors, in the order of the pod's fields.");

fn decisive_part_of_container(container: &mut Value) {
    let is_proxy = container.get("name").and_then(Value::as_str) == Some(PodFacts::PROXY_CONTAINER);
    let of_proxy: &[&str] = if is_proxy { &["args", "env"] } else { &[] };
    *container = picked(container, &[&["name", "restartPolicy", "securityContext"], of_proxy].concat());
    edit(container, "securityContext", only_ids);
    edit_items(container, "env", |variable| *variable = picked(variable, &["name", "value"]));
}

fn only_ids(context: &mut Value) {
    *context = picked(context, &["runAsUser", "runAsGroup"]);
}

/// An object with these fields alone; a value that is not an object as it is.
fn picked(value: &Value, names: &[&str]) -> Value {
    let Value::Object(fields) = value else { return value.clone() };
    let picked = names.iter().filter_map(|name| Some(((*name).to_owned(), fields.get(*name)?.clone())));
    Value::Object(picked.collect())
}

fn edit(object: &mut Value, name: &str, edit: impl FnOnce(&mut Value)) {
    if let Some(value) = object.get_mut(name) {
        edit(value);
    }
}

fn edit_items(object: &mut Value, name: &str, each: impl FnMut(&mut Value)) {
    edit(object, name, |list| list.as_array_mut().into_iter().flatten().for_each(each));
}

fn facts(pod: &Field<'_, '_>, errors: &mut PodJsonErrors) -> PodFacts {
    let mut facts = PodFacts::default();
    if pod.required_object(errors).is_none() {
        return facts;
    }
    let kind = pod.at("kind");
    if let Some(other) = kind.string(errors).filter(|kind| *kind != "Pod") {
        kind.note(FieldProblem::NotAPod(other.to_owned()), errors);
    }
    let metadata = pod.at("metadata");
    if metadata.object(errors).is_some() {
        facts.labels = metadata.at("labels").strings_by_key(errors);
        facts.annotations = metadata.at("annotations").strings_by_key(errors);
    }
    let spec = pod.at("spec");
    if spec.required_object(errors).is_some() {
        // In this order, because a later istio-proxy wins over an earlier one.
        containers(&spec.at("initContainers"), true, &mut facts, errors);
        containers(&spec.at("containers"), false, &mut facts, errors);
        let class = spec.at("runtimeClassName").string(errors);
        facts.runtime_class = class.filter(|class| !class.is_empty()).map(str::to_owned);
        // What the container's securityContext does not say, the pod's does.
        let (user, group) = ids(&spec, errors);
        for one in &mut facts.beside_proxy {
            one.run_as_user = one.run_as_user.or(user);
            one.run_as_group = one.run_as_group.or(group);
        }
        if let Some(proxy) = &mut facts.proxy {
            proxy.run_as_user = proxy.run_as_user.or(user);
            proxy.run_as_group = proxy.run_as_group.or(group);
        }
    }
    facts
}

fn containers(list: &Field<'_, '_>, are_init: bool, facts: &mut PodFacts, errors: &mut PodJsonErrors) {
    // Init containers run one after the other, but those behind a proxy that stays run beside it.
    let mut are_beside = !are_init;
    for index in list.indices(errors) {
        let container = list.item(index);
        if container.required_object(errors).is_none() {
            continue;
        }
        if let Some(name) = container.at("name").required_string(errors) {
            facts.containers.insert(name.to_owned());
            let stays = are_init && container.at("restartPolicy").string(errors) == Some("Always");
            if name == PodFacts::PROXY_CONTAINER {
                facts.proxy = Some(proxy(&container, errors));
                are_beside |= stays;
            } else if are_beside || stays {
                let (run_as_user, run_as_group) = ids(&container, errors);
                facts.beside_proxy.push(ContainerIdentity {
                    name: name.to_owned(),
                    run_as_user,
                    run_as_group,
                });
            }
        }
    }
}

fn proxy(container: &Field<'_, '_>, errors: &mut PodJsonErrors) -> ProxyContainer {
    let (run_as_user, run_as_group) = ids(container, errors);
    let args = container.at("args");
    let words = args.indices(errors).filter_map(|index| args.item(index).required_string(errors));
    let words = words.map(str::to_owned).collect();
    let env = environment(&container.at("env"), errors);
    ProxyContainer { args: words, env, run_as_user, run_as_group }
}

/// Variables with their literal values; those that take theirs from elsewhere are empty.
fn environment(list: &Field<'_, '_>, errors: &mut PodJsonErrors) -> BTreeMap<String, String> {
    let mut variables = BTreeMap::new();
    for index in list.indices(errors) {
        let variable = list.item(index);
        if variable.required_object(errors).is_none() {
            continue;
        }
        let value = variable.at("value").string(errors).unwrap_or_default();
        if let Some(name) = variable.at("name").string(errors) {
            variables.insert(name.to_owned(), value.to_owned());
        }
    }
    variables
}

/// `runAsUser` and `runAsGroup` of the securityContext of a pod's spec or of a container.
fn ids(of: &Field<'_, '_>, errors: &mut PodJsonErrors) -> (Option<i64>, Option<i64>) {
    let context = of.at("securityContext");
    context.object(errors);
    (context.at("runAsUser").integer(errors), context.at("runAsGroup").integer(errors))
}

/// A value and its path in the pod. Paths become text only for a message.
#[derive(Clone, Copy)]
struct Field<'p, 'v> {
    place: JsonPath<'p, 'v>,
    value: Option<&'v Value>,
}

#[derive(Clone, Copy)]
enum JsonPath<'p, 'v> {
    Pod,
    Field(&'p Field<'p, 'v>, &'static str),
    Item(&'p Field<'p, 'v>, usize),
    Key(&'p Field<'p, 'v>, &'p str),
}

impl<'v> Field<'_, 'v> {
    const fn pod(pod: &'v Value) -> Self {
        Self { place: JsonPath::Pod, value: Some(pod) }
    }

    fn at<'p>(&'p self, name: &'static str) -> Field<'p, 'v> {
        Field { place: JsonPath::Field(self, name), value: self.value.and_then(|value| value.get(name)) }
    }

    fn item<'p>(&'p self, index: usize) -> Field<'p, 'v> {
        Field { place: JsonPath::Item(self, index), value: self.value.and_then(|value| value.get(index)) }
    }

    fn string(&self, errors: &mut PodJsonErrors) -> Option<&'v str> {
        self.typed("a string", Value::as_str, errors)
    }

    fn integer(&self, errors: &mut PodJsonErrors) -> Option<i64> {
        self.typed("a whole number", Value::as_i64, errors)
    }

    fn object(&self, errors: &mut PodJsonErrors) -> Option<&'v Map<String, Value>> {
        self.typed("an object", Value::as_object, errors)
    }

    fn required_string(&self, errors: &mut PodJsonErrors) -> Option<&'v str> {
        self.require(errors)?;
        self.string(errors)
    }

    fn required_object(&self, errors: &mut PodJsonErrors) -> Option<&'v Map<String, Value>> {
        self.require(errors)?;
        self.object(errors)
    }

    /// The indices of a list; empty without a list.
    fn indices(&self, errors: &mut PodJsonErrors) -> core::ops::Range<usize> {
        0..self.typed("a list", Value::as_array, errors).map_or(0, Vec::len)
    }

    /// The strings of an object, by key.
    fn strings_by_key(&self, errors: &mut PodJsonErrors) -> BTreeMap<String, String> {
        let mut strings = BTreeMap::new();
        for (key, value) in self.object(errors).into_iter().flatten() {
            // The API server never says null here; a manifest may, and means an empty text.
            let text = match value {
                Value::Null => Some(""),
                Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
                    Field { place: JsonPath::Key(self, key), value: Some(value) }.string(errors)
                }
            };
            strings.extend(text.map(|text| (key.clone(), text.to_owned())));
        }
        strings
    }

    fn require(&self, errors: &mut PodJsonErrors) -> Option<()> {
        if self.value.is_none_or(Value::is_null) {
            self.note(FieldProblem::Missing, errors);
            return None;
        }
        Some(())
    }

    fn typed<T>(
        &self,
        wanted: &'static str,
        read: impl FnOnce(&'v Value) -> Option<T>,
        errors: &mut PodJsonErrors,
    ) -> Option<T> {
        let value = self.value.filter(|value| !value.is_null())?;
        let typed = read(value);
        if typed.is_none() {
            self.note(FieldProblem::WrongType { found: kind(value), wanted }, errors);
        }
        typed
    }

    fn note(&self, problem: FieldProblem, errors: &mut PodJsonErrors) {
        errors.0.push(PodJsonError { field: self.to_string(), problem });
    }
}

impl fmt::Display for Field<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            JsonPath::Pod => f.write_str("pod"),
            JsonPath::Field(Field { place: JsonPath::Pod, .. }, name) => f.write_str(name),
            JsonPath::Field(parent, name) => write!(f, "{parent}.{name}"),
            JsonPath::Item(parent, index) => write!(f, "{parent}[{index}]"),
            JsonPath::Key(parent, key) => write!(f, "{parent}[{key:?}]"),
        }
    }
}

/// What a value is, in words.
const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use serde_json::json;

    #[test]
    fn a_pod_is_read() {
        let pod = json!({"kind": "Pod", "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}, "uid": 5},
            "spec": {"initContainers": [{"name": "istio-proxy", "args": ["x"]}], "containers": [{"name": "app", "env": 7},
            {"name": "istio-proxy", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1338},
             "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}]}]}});
        let facts = PodFacts::from_json(&pod).unwrap();
        assert_eq!(facts.containers.iter().collect::<Vec<_>>(), ["app", "istio-proxy"]);
        let proxy = facts.proxy.unwrap();
        assert_eq!(
            (proxy.args, proxy.run_as_user, proxy.run_as_group),
            (["proxy".into(), "sidecar".into()].into(), Some(1338), None)
        );
        assert_eq!(proxy.env, BTreeMap::from([("A".into(), "1".into()), ("B".into(), String::new())]));
        assert_eq!((&facts.labels["a"], &facts.annotations["c"]), (&"b".to_owned(), &"d".to_owned()));
    }

    #[test]
    fn all_that_is_wrong_is_told_in_one_line() {
        let pod = json!({"kind": "Node", "metadata": 5, "spec": {"containers": [{}]}});
        let errors = PodFacts::from_json(&pod).unwrap_err();
        assert_eq!((&errors).into_iter().count(), errors.iter().len());
        let told = errors.to_string();
        let wrong = [
            r#"kind: "Node" is not Pod"#,
            "metadata: is a number, not an object",
            "spec.containers[0].name: missing",
        ];
        assert_eq!(told, wrong.join("; "));
    }

    #[test]
    fn a_native_sidecar_is_the_proxy() {
        let proxy = json!({"name": "istio-proxy", "args": ["proxy", "sidecar"], "restartPolicy": "Always",
            "securityContext": {"runAsUser": 2102}});
        let pod = json!({"metadata": {"annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"initContainers": [proxy], "containers": [{"name": "app"}]}});
        let facts = PodFacts::from_json(&pod).unwrap();
        assert_eq!(facts.skip_reason(), None);
        assert_eq!(facts.proxy.unwrap().run_as_user, Some(2102));
    }

    #[test]
    fn init_containers_behind_a_native_sidecar_run_beside_it() {
        let beside = |restarts: &str| {
            let early = |name: &str| json!({"name": name, "securityContext": {"runAsUser": 1337}});
            let proxy = json!({"name": "istio-proxy", "restartPolicy": restarts});
            let pod = json!({"spec": {"initContainers": [early("first"), proxy, early("second")],
                "containers": [{"name": "app"}]}});
            let facts = PodFacts::from_json(&pod).unwrap();
            facts.beside_proxy.into_iter().map(|one| one.name).collect::<Vec<_>>()
        };
        assert_eq!(beside("Always"), ["second", "app"]);
        // An init container of this name that ends is not beside anything.
        assert_eq!(beside("OnFailure"), ["app"]);
    }

    #[test]
    fn who_runs_the_proxy_is_said_by_its_container_else_by_the_pod() {
        let read = |pod: Value, container: Value| {
            let proxy = json!({"name": "istio-proxy", "securityContext": container});
            let pod = json!({"spec": {"securityContext": pod, "containers": [proxy]}});
            let proxy = PodFacts::from_json(&pod).unwrap().proxy.unwrap();
            (proxy.run_as_user, proxy.run_as_group)
        };
        let pod = json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3});
        assert_eq!(read(pod.clone(), json!(null)), (Some(1), Some(2)));
        assert_eq!(read(pod.clone(), json!({"runAsUser": 7})), (Some(7), Some(2)));
        // 0 is said as well; it counts as unset later on.
        assert_eq!(read(pod, json!({"runAsUser": 0, "runAsGroup": 8})), (Some(0), Some(8)));
        assert_eq!(read(json!(null), json!({"runAsGroup": 8})), (None, Some(8)));
    }

    #[test]
    fn every_error_names_its_field() {
        let pod = json!({"kind": "Job", "metadata": {"labels": ["a"], "annotations": {"x\n": 5}},
            "spec": {"securityContext": {"runAsUser": "x"}, "containers": [{"name": "istio-proxy", "args": "proxy", "env": [{"name": 1}, 2],
            "securityContext": {"runAsUser": "root", "runAsGroup": 1.5}}, {}, "x"], "initContainers": {}}});
        let told: Vec<String> =
            PodFacts::from_json(&pod).unwrap_err().iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "kind: \"Job\" is not Pod",
                "metadata.labels: is a list, not an object",
                "metadata.annotations[\"x\\n\"]: is a number, not a string",
                "spec.initContainers: is an object, not a list",
                "spec.containers[0].securityContext.runAsUser: is a string, not a whole number",
                "spec.containers[0].securityContext.runAsGroup: is a number, not a whole number",
                "spec.containers[0].args: is a string, not a list",
                "spec.containers[0].env[0].name: is a number, not a string",
                "spec.containers[0].env[1]: is a number, not an object",
                "spec.containers[1].name: missing",
                "spec.containers[2]: is a string, not an object",
                "spec.securityContext.runAsUser: is a string, not a whole number",
            ]
        );
    }

    #[test]
    fn the_decisive_part_of_a_pod_decides_the_same_and_has_nothing_else() {
        let pod = json!({"kind": "Pod", "apiVersion": "v1", "status": {"phase": "Running"},
            "metadata": {"name": "n", "namespace": "s", "uid": "u", "resourceVersion": "7", "labels": {"a": "b"},
                "annotations": {"c": "d"}, "managedFields": [{}]},
            "spec": {"volumes": [{}], "runtimeClassName": "kata", "securityContext": {"runAsUser": 7, "fsGroup": 8},
                "initContainers": [{"name": "i", "image": "x", "env": [{"name": "A", "value": "1"}]}],
                "containers": [{"name": "istio-proxy", "args": ["proxy"], "ports": [{}], "restartPolicy": "Always",
                    "securityContext": {"runAsGroup": 9, "privileged": false},
                    "env": [{"name": "B", "value": "2"}, {"name": "C", "valueFrom": {"fieldRef": {}}}]}]}});
        let part = PodFacts::decisive_part(&pod);
        assert_eq!(
            part,
            json!({"kind": "Pod",
                "metadata": {"name": "n", "namespace": "s", "uid": "u", "resourceVersion": "7", "labels": {"a": "b"},
                    "annotations": {"c": "d"}},
                "spec": {"runtimeClassName": "kata", "securityContext": {"runAsUser": 7},
                    "initContainers": [{"name": "i"}],
                    "containers": [{"name": "istio-proxy", "args": ["proxy"], "restartPolicy": "Always",
                        "securityContext": {"runAsGroup": 9}, "env": [{"name": "B", "value": "2"}, {"name": "C"}]}]}})
        );
        assert_eq!(PodFacts::from_json(&part), PodFacts::from_json(&pod));
    }

    /// Every field of a pod takes every form in turn: what is read of the part is what is read of the whole, errors included.
    #[test]
    fn the_decisive_part_of_a_damaged_pod_is_refused_as_the_pod_is() {
        let container = json!({"name": "istio-proxy", "args": ["a"], "restartPolicy": "Always", "image": "x",
            "securityContext": {"runAsUser": 1, "runAsGroup": 2}, "env": [{"name": "A", "value": "1"}]});
        let sound = json!({"kind": "Pod", "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
            "spec": {"runtimeClassName": "kata", "securityContext": {"runAsUser": 7, "runAsGroup": 8},
                "initContainers": [container.clone()], "containers": [{"name": "app"}, container]}});
        let mut places = Vec::new();
        pointers(&sound, "", &mut places);
        assert!(places.len() > 35, "{places:?}");
        let forms =
            [json!(null), json!(true), json!(5), json!("text"), json!([]), json!([5]), json!({"name": 5})];
        for (place, form) in places.iter().flat_map(|place| forms.iter().map(move |form| (place, form))) {
            let mut pod = sound.clone();
            *pod.pointer_mut(place).expect("a place") = form.clone();
            assert_eq!(
                PodFacts::from_json(&PodFacts::decisive_part(&pod)),
                PodFacts::from_json(&pod),
                "{place}: {form}"
            );
        }
    }

    fn pointers(value: &Value, at: &str, places: &mut Vec<String>) {
        places.push(at.to_owned());
        match value {
            Value::Object(fields) => {
                fields.iter().for_each(|(name, value)| pointers(value, &format!("{at}/{name}"), places));
            }
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(n, value)| pointers(value, &format!("{at}/{n}"), places));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    #[test]
    fn what_is_no_pod_is_refused() {
        let told = |pod: Value| PodFacts::from_json(&pod).unwrap_err().to_string();
        assert_eq!(told(json!({})), "spec: missing");
        assert_eq!(told(json!({"spec": null})), "spec: missing");
        assert_eq!(told(json!([])), "pod: is a list, not an object");
        assert_eq!(told(json!(null)), "pod: missing");
    }
}
