//! The pasted text: a pod's manifest, a pod's annotations, or flags.

use std::net::IpAddr;

use cni_core::pod_name::PodName;
use presentation::decision::{PodDecision, left_alone};
use presentation::plan::{PlanLanguage, written};
use presentation::text_writer::TextLayout;
use presentation::traffic::Programmed;
use presentation::{NO_ADDRESS, SOMEWHERE, flags, manifest};
use redirect_core::options::BackendChoice;
use redirect_core::options::NativeForm;
use redirect_core::pod::SkipReason;
use redirect_core::settings::{InputErrors, NameLookup, NamespaceFacts, RawSettings};
use redirect_core::{AmbientRedirect, Redirect, RulePlan};
use serde::Serialize;
use serde_json::{Value, json};
use settings_cli::RunOptions;

use crate::rules::{PageTable, tables};

/// What a text is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// A pod, as Kubernetes writes it.
    #[default]
    Pod,
    /// Annotations of an injected pod.
    Annotations,
    /// A command line.
    Flags,
}

/// What becomes of a text.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Side {
    /// What it is.
    pub form: Form,
    /// Everything wrong with it. Where something is, nothing else is said.
    pub errors: Vec<String>,
    /// What is worth knowing besides.
    pub notices: Vec<String>,
    /// Why the pod is not redirected, if so.
    pub left_alone: Option<String>,
    /// The rules, table by table.
    pub tables: Vec<PageTable>,
    /// What `redirectctl plan` writes.
    pub written: String,
    #[serde(skip)]
    pub(crate) plan: Option<Programmed>,
}

/// What is known besides the text.
#[derive(Debug)]
pub(crate) struct Around<'a> {
    pub(crate) addresses: &'a [IpAddr],
    pub(crate) nameservers: &'a [IpAddr],
    pub(crate) format: PlanLanguage,
}

/// The names of users and groups that every image has.
struct RootOnly;

impl NameLookup for RootOnly {
    fn user(&self, name: &str) -> Option<u32> {
        (name == "root").then_some(0)
    }

    fn group(&self, name: &str) -> Option<u32> {
        self.user(name)
    }
}

impl Side {
    /// Reads a text.
    pub(crate) fn of(text: &str, around: &Around<'_>) -> Self {
        let mut notices = Vec::new();
        let (form, understood) = if flags::looks_typed(text) {
            (Form::Flags, of_flags(text, around, &mut notices))
        } else {
            match manifest::objects(text) {
                Ok(objects) => of_objects(objects, around, &mut notices),
                Err(error) => (Form::Pod, Err(vec![error])),
            }
        };
        match understood {
            Ok(side) => Self { form, notices, ..side },
            Err(errors) => Self { form, errors, ..Self::default() },
        }
    }

    fn planned(plan: RulePlan, backend: BackendChoice, native: NativeForm, format: PlanLanguage) -> Self {
        let written = written(&plan, format, native, TextLayout::default()).into();
        Self { tables: tables(&plan), written, plan: Some(Programmed { plan, backend }), ..Self::default() }
    }

    /// Of a pod that is not redirected: nothing is captured.
    fn left_alone(name: &PodName, reason: SkipReason, format: PlanLanguage) -> Self {
        Self {
            left_alone: Some(reason.explanation().to_owned()),
            written: left_alone(name, reason, format == PlanLanguage::Json).into(),
            plan: Some(Programmed { plan: RulePlan::empty(), backend: BackendChoice::Auto }),
            ..Self::default()
        }
    }
}

fn of_flags(text: &str, around: &Around<'_>, notices: &mut Vec<String>) -> Result<Side, Vec<String>> {
    let input = flags::typed(text).and_then(flags::input).map_err(|error| vec![error])?;
    let settings = &input.settings;
    let mut wrong = flags::refused(settings);
    wrong.extend(flags::wrong(settings, &RootOnly));
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let told = |errors: InputErrors| errors.iter().map(ToString::to_string).collect::<Vec<_>>();
    let RunOptions { backend, native_form: native, .. } = RunOptions::parse(settings).map_err(told)?;
    let plan = if flags::is_ambient(settings) {
        AmbientRedirect::parse(settings).map_err(told)?.plan()
    } else {
        let addresses = with_one(around.addresses, notices);
        let facts =
            NamespaceFacts::new(&addresses).with_nameservers(around.nameservers).with_names(&RootOnly);
        let redirect = Redirect::parse(settings, &facts).map_err(told)?;
        notices.extend(redirect.notices().iter().map(ToString::to_string));
        redirect.plan()
    };
    notices.extend(input.notices());
    Ok(Side::planned(plan, backend, native, around.format))
}

/// The addresses, or one where none is known.
fn with_one(addresses: &[IpAddr], notices: &mut Vec<String>) -> Vec<IpAddr> {
    if addresses.is_empty() {
        notices.push(NO_ADDRESS.to_owned());
        return vec![SOMEWHERE];
    }
    addresses.to_vec()
}

type OfObjects = (Form, Result<Side, Vec<String>>);

fn of_objects(mut objects: Vec<Value>, around: &Around<'_>, notices: &mut Vec<String>) -> OfObjects {
    let (Some(object), 0) = (objects.pop(), objects.len()) else {
        let many = objects.len() + 1;
        let told = if objects.is_empty() {
            "has no pod".to_owned()
        } else {
            format!("has {many} pods; one is wanted")
        };
        return (Form::Pod, Err(vec![told]));
    };
    let (form, object) = match annotations(&object) {
        Some(annotations) => (Form::Annotations, injected(annotations)),
        None => (Form::Pod, object),
    };
    (form, of_object(&object, around, notices))
}

/// The annotations, where a text has nothing else: as they stand in a manifest, with or without what is around them.
fn annotations(object: &Value) -> Option<&Value> {
    let fields = object.as_object()?;
    let is_about = |name: &str| fields.len() == 1 && fields.contains_key(name);
    if is_about("metadata") || is_about("annotations") {
        let inner = object.pointer("/metadata/annotations").or_else(|| object.get("annotations"));
        return inner.filter(|inner| inner.is_object());
    }
    // Names of annotations have a slash; fields of objects have none.
    fields.keys().any(|name| name.contains('/')).then_some(object)
}

/// A pod with these annotations, as the sidecar injector leaves it.
fn injected(annotations: &Value) -> Value {
    let mut annotations = annotations.clone();
    if let Some(fields) = annotations.as_object_mut() {
        fields.entry("sidecar.istio.io/status").or_insert_with(|| "{}".into());
    }
    json!({
        "kind": "Pod",
        "metadata": {"annotations": annotations},
        "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
    })
}

fn of_object(object: &Value, around: &Around<'_>, notices: &mut Vec<String>) -> Result<Side, Vec<String>> {
    let pod = manifest::PodManifest::from_json(object).map_err(|errors| manifest::faults(object, &errors))?;
    let known = if around.addresses.is_empty() { &pod.addresses } else { around.addresses };
    let addresses = with_one(known, notices);
    let decided = if pod.host_network {
        PodDecision::HostNetwork
    } else {
        PodDecision::of(&pod.facts, RawSettings::for_pod(), &NamespaceFacts::new(&addresses))
    };
    if let PodDecision::Redirect(redirect, _) = &decided {
        notices.extend(redirect.notices().iter().map(ToString::to_string));
    } else {
        notices.extend(pod.facts.notices().map(|notice| notice.to_string()));
    }
    Ok(match decided.settled()? {
        Ok(plan) => Side::planned(plan, BackendChoice::Auto, NativeForm::Plain, around.format),
        Err(reason) => Side::left_alone(&pod.name, reason, around.format),
    })
}
