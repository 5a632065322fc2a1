//! `cni check`: asks the installed plugin, as the node's runtime would.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni_core::selection::PROCESS_WIDE;
use netns_apply::facts;
use netns_apply::netns::Netns;
use netns_apply::routes::RouteSocket;
use presentation::manifest;
use redirect_core::values::is_routable;
use serde_json::Value;
use tempfile::TempDir;

use super::target::NamespaceTarget;
use super::{CommandOutput, Given};
use crate::cni::{self, AttachedPod, PluginRequest, cache};
use crate::error::PodInputError;
use crate::input;
use crate::node::NodeConfiguration;
use crate::pod::Pod;
use crate::printable::Printable;
use crate::{FINE, FOUND};

/// The only command that is sent.
const CHECK: &str = "check";
/// How much longer than the plugin's own limit is waited.
const GRACE: Duration = Duration::from_secs(30);
/// The PATH of a plugin where this program has none.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// `cni`
pub(super) fn cni(given: &Given) -> Result<CommandOutput, PodInputError> {
    if given.operand() != CHECK {
        return Err(PodInputError::of(format!(
            "{:?} is not asked of plugins here: only {CHECK}, which changes nothing",
            given.operand()
        )));
    }
    let node = given.node()?;
    let (Some(entry), Some(conf)) = (node.entry.clone(), node.conf.as_ref()) else {
        return Err(no_entry(&node, given));
    };
    let manifest = given.flag("file").map(|file| Manifest::read(file, given.operands.get(1))).transpose()?;
    let target = match &manifest {
        Some(manifest) => NamespaceTarget::of_pod(manifest.pod()?, given)?,
        None if given.operands.len() < 2 => {
            return Err(PodInputError::of(
                "POD is missing: name the pod as NAMESPACE/NAME, or give it with --file",
            ));
        }
        None => NamespaceTarget::of(given, given.operands.get(1).map(String::as_str))?,
    };
    let attachment = attachment(target, &entry, given)?;
    let program = given.bin_dir().join(cni::PLUGIN);
    let mut entry = entry;
    if let Some(manifest) = &manifest {
        // The plugin shall judge the pod that was given, and needs no API server for it.
        entry["pod_manifest_dir"] = manifest.folder.path().display().to_string().into();
    }
    let question = PluginRequest::check(&attachment, entry, program, environment(given));
    let answer = if given.flag("dry-run") == Some("true") {
        None
    } else {
        Some(cni::ask(&question, conf.add_timeout + GRACE).map_err(PodInputError::of)?)
    };
    let code = match &answer {
        None | Some(cni::PluginReply::AsPlanned) => FINE,
        Some(cni::PluginReply::Refused { .. }) => FOUND,
    };
    let shown = answer.as_ref();
    let text = if given.is_json() {
        Printable::json(&question.json(shown))
    } else {
        question.text(shown, given.layout)
    };
    Ok(CommandOutput { text, code })
}

fn no_entry(node: &NodeConfiguration, given: &Given) -> PodInputError {
    let mut told: Vec<String> = node
        .findings
        .iter()
        .flat_map(|finding| finding.seen.iter().map(|seen| format!("{}: {seen}", finding.cause.code())))
        .collect();
    if told.is_empty() {
        told.push(format!(
            "{} has no network configuration with the plugin; name it with --cni-conf-dir",
            given.conf_dir().display()
        ));
    }
    PodInputError(told)
}

/// What the plugin's environment has besides: nothing of this program's but what a runtime may say for all pods.
fn environment(given: &Given) -> BTreeMap<String, String> {
    let path = given.env.get("PATH").cloned().unwrap_or_else(|| USUAL_PATH.to_owned());
    let of_runtime = PROCESS_WIDE.iter().flat_map(|key| key.setting().env);
    let said = of_runtime.filter_map(|name| Some(((*name).to_owned(), given.env.get(*name)?.clone())));
    said.chain([("PATH".to_owned(), path)]).collect()
}

/// What is known of the pod's network. The namespace is entered to read its addresses.
fn attachment(target: NamespaceTarget, entry: &Value, given: &Given) -> Result<AttachedPod, PodInputError> {
    let netns = Netns::open(&target.path).map_err(PodInputError::of)?;
    let read = netns
        .run(|| {
            (facts::addresses(), RouteSocket::open(usize::MAX).and_then(|mut routes| routes.interfaces()))
        })
        .map_err(PodInputError::of)?;
    let (addresses, interfaces) = (read.0.map_err(PodInputError::of)?, read.1.map_err(PodInputError::of)?);
    let pod = target.pod.ok_or_else(|| PodInputError::of("POD is missing"))?.name;
    // A manifest may hold anything; what goes into the environment may not.
    let pod = input::pod_name(&pod.to_string()).map_err(PodInputError::of)?;
    let directory = given.flag("cni-cache-dir").unwrap_or(cache::CACHE_DIR);
    let network = entry.get("name").and_then(Value::as_str).unwrap_or_default();
    let cached = cache::find(Path::new(directory), network, &pod, &addresses)
        .map_err(|error| PodInputError::of(format!("cannot read {directory}: {error}")))?;
    Ok(AttachedPod {
        pod,
        netns: target.path,
        addresses: addresses.into_iter().filter(is_routable).collect(),
        interface: interfaces.into_iter().next(),
        cached,
    })
}

/// A pod's manifest in a folder of its own, which only this user may look into and which goes with the value.
struct Manifest {
    object: Value,
    folder: TempDir,
}

impl Manifest {
    fn read(file: &str, name: Option<&String>) -> Result<Self, PodInputError> {
        let (mut objects, _) = input::objects_of_file(file)?;
        let wanted = name.map(|name| input::pod_name(name)).transpose().map_err(PodInputError::of)?;
        if let Some(wanted) = &wanted {
            objects.retain(|object| Pod::from_json(object).is_ok_and(|pod| pod.name == *wanted));
        }
        let (object, others) = (objects.pop(), objects.len());
        let (Some(object), 0) = (object, others) else {
            return Err(PodInputError::of(match &wanted {
                Some(wanted) => format!("{file}: does not have pod {wanted} once"),
                None => format!("{file}: does not have one pod; name one as NAMESPACE/NAME"),
            }));
        };
        let folder = tempfile::Builder::new().prefix("redirectctl-").tempdir().map_err(PodInputError::of)?;
        let path: PathBuf = folder.path().join("pod.json");
        fs::write(&path, object.to_string()).map_err(PodInputError::of)?;
        Ok(Self { object, folder })
    }

    fn pod(&self) -> Result<Pod, PodInputError> {
        Pod::from_json(&self.object).map_err(|errors| PodInputError(manifest::faults(&self.object, &errors)))
    }
}
