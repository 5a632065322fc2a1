//! Commands about what is in force: `verify`, `netns`, `pod` and `scan`.

use std::path::Path;

use cni_core::selection::Programming;
use netns_apply::netns::Netns;
use pod_netns::NamespaceIndex;
use settings_cli::RunOptions;

use super::planned::{ambient, of_settings};
use super::{CommandOutput, Given, target};
use crate::api::NAME_IT;
use crate::cause::Cause;
use crate::diagnosis::{PodDecision, findings};
use crate::error::PodInputError;
use crate::input;
use crate::inspect::inspect;
use crate::pod::Pod;
use crate::printable::Printable;
use crate::report::{self, Report};
use crate::scan::Scan;
use crate::show;

/// What can be scanned.
const NODE: &str = "node";

/// `verify`
pub(super) fn verify(given: &Given) -> Result<CommandOutput, PodInputError> {
    let pod = given.pod()?;
    let path = target::named(given, pod.as_ref())?.unwrap_or_else(|| target::OWN.into());
    // The node's configuration counts where it is named: the rules may be those of another machine.
    let node = given.node_if_named()?;
    if let Some(pod) = pod.as_ref().filter(|_| !given.is_ambient()) {
        return Ok(given.answer(&show::netns(&path, Some(pod), &node)));
    }
    let options = RunOptions::parse(&given.input.settings)?;
    let programming = Programming { backend: options.backend, native_form: options.native_form };
    let netns = Netns::open(&path).map_err(PodInputError::of)?;
    let ambient = if given.is_ambient() { Some(ambient(given, pod.as_ref())?) } else { None };
    let accepted = node.accepted(pod.as_ref());
    let looked = inspect(&netns, Some(programming), accepted, |facts| {
        let wanted = match ambient {
            Some((redirect, settings)) => {
                Ok(show::here(PodDecision::Ambient(Box::new(redirect), Box::new(settings))))
            }
            None => of_settings(&given.input.settings, facts)
                .map(|redirect| PodDecision::Redirect(redirect, Box::new(given.input.settings.clone()))),
        };
        (wanted.as_ref().ok().and_then(PodDecision::plan), wanted)
    });
    let (seen, wanted) = looked.map_err(|unknown| PodInputError(unknown.seen))?;
    let decided = wanted?;
    let all = findings(None, &decided, Some(&seen));
    let report = Report {
        subject: path.display().to_string(),
        netns: Some(path),
        decided,
        order: None,
        inspection: Some(seen),
        findings: all,
    };
    Ok(given.answer(&report))
}

/// `netns`
pub(super) fn netns(given: &Given) -> Result<CommandOutput, PodInputError> {
    let pod = given.pod()?;
    let node = given.node_if_named()?;
    Ok(given.answer(&show::netns(Path::new(given.operand()), pod.as_ref(), &node)))
}

/// `pod`
pub(super) fn pod(given: &Given) -> Result<CommandOutput, PodInputError> {
    let name = input::pod_name(given.operand()).map_err(PodInputError::of)?;
    let (pods, cluster) = match given.flag("file") {
        Some(file) => input::pods_of_file(file)?,
        None => {
            let api = given.api_server()?;
            let object = given.with_agents_reason(api.pod(&name))?;
            let mut cluster = api.around_pod(&name, &object);
            api.namespace(&name.namespace, given.node()?.conf.as_ref(), &mut cluster);
            (input::pods_of(&[object], &cluster)?, cluster)
        }
    };
    let pod = pods.iter().find(|pod| pod.name == name).cloned().ok_or_else(|| {
        PodInputError::of(format!("{}: has no pod {name}", given.flag("file").unwrap_or_default()))
    })?;
    let node = given.node_in(&cluster, &of_node(pods, pod.node.as_deref()))?;
    Ok(given.answer(&show::pod(&pod, &given.netns_dir(), &node)))
}

/// `scan`
pub(super) fn scan(given: &Given) -> Result<CommandOutput, PodInputError> {
    if let Some(what) = given.operands.first().filter(|what| *what != NODE) {
        return Err(PodInputError::of(format!(
            "{what:?} cannot be scanned: only the {NODE}, which need not be said"
        )));
    }
    let scan = match given.flag("file") {
        Some(file) => {
            let packed = input::packed_pods_of_file(file, given.flag("node"))?;
            let node = given.node_in(&packed.cluster, &packed.of_nodes)?;
            Scan::of_packed(&packed, &given.netns_dir(), &node)
        }
        None => {
            let node = given.node_name()?;
            let (objects, cluster) = given.with_agents_reason(given.objects_of_node(&node))?;
            let pods = input::pods_of(&objects, &cluster)?;
            let directory = given.netns_dir();
            let scan = Scan::of(&pods, &directory, &given.node_in(&cluster, &pods)?);
            // Rules of the mesh in namespaces of no known pod may be of pods of a node with another name.
            let has_unowned = |scan: &Scan| scan.findings().any(|finding| finding.cause == Cause::Unowned);
            if scan.as_ref().is_ok_and(has_unowned) && !is_any_here(&pods, &directory) {
                return Err(PodInputError::of(format!(
                    "no pod of node {node} is on this machine; {NAME_IT}"
                )));
            }
            scan
        }
    };
    let scan = scan.map_err(PodInputError::of)?;
    let text = match given.flag("output") {
        Some("json") => Printable::json(&scan.json()),
        Some("prometheus") => scan.prometheus(),
        Some(_) | None => scan.text(given.layout),
    };
    Ok(CommandOutput { text, code: report::code(scan.findings()) })
}

/// Whether the network namespace of a pod is here, if any pod has one.
fn is_any_here(pods: &[Pod], directory: &Path) -> bool {
    let has_own = |pod: &&Pod| !pod.host_network && !pod.is_over() && !pod.addresses.is_empty();
    let pods: Vec<&Pod> = pods.iter().filter(has_own).collect();
    let wanted = pods.iter().flat_map(|pod| pod.addresses.iter().copied()).collect();
    let index = NamespaceIndex::of(directory, &wanted);
    pods.is_empty() || index.is_ok_and(|index| pods.iter().any(|pod| index.find(&pod.addresses).is_ok()))
}

/// The pods that may be on a node, where one is named.
fn of_node(mut pods: Vec<Pod>, node: Option<&str>) -> Vec<Pod> {
    pods.retain(|pod| node.is_none() || pod.node.is_none() || pod.node.as_deref() == node);
    pods
}
