//! `bundle`: gathers what a support ticket needs, and writes it as one file.

use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cni_core::conf::Conf;
use netns_apply::netns::Netns;
use pod_netns::NamespaceIndex;
use redirect_core::pod::SkipReason;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use super::{CommandOutput, Given};
use crate::bundle::{self, Bundle, filter};
use crate::cluster::ClusterObjects;
use crate::error::PodInputError;
use crate::input;
use crate::node::NodeConfiguration;
use crate::pod::Pod;
use crate::printable::Printable;
use crate::scan::Scan;
use crate::text_writer::TextWriter;
use crate::watch::rule_json;
use crate::{FINE, cni, show};

/// The port of the agent's metrics, unless it is reported otherwise.
const METRICS_PORT: u16 = 15014;
/// What stands for standard output.
const STDOUT: &str = "-";
/// The name of the plugin's log in the run directory.
const LOG: &str = "istio-cni.log";

/// `bundle`
pub(super) fn bundle(given: &Given) -> Result<CommandOutput, PodInputError> {
    let agent = given.flag("metrics").map(str::parse::<SocketAddr>).transpose();
    let agent = agent.map_err(|_| PodInputError::of("flag --metrics: is not IP:PORT"))?;
    let folder = format!("redirectctl-{}", stamp());
    let to_stdout = given.operands.first().is_some_and(|file| file == STDOUT);
    let path = given.operands.first().map_or_else(|| format!("{folder}.tar.gz").into(), PathBuf::from);
    // Before anything is gathered, because that takes a while; writing asks again.
    if !to_stdout && path.symlink_metadata().is_ok() {
        return Err(PodInputError::of(format!(
            "{} is there already, and nothing is overwritten",
            path.display()
        )));
    }
    let mut bundle = Bundle::default();
    bundle.add_json("machine.json", &bundle::machine());
    configuration(&mut bundle, given);
    match pods(given) {
        Ok((objects, cluster)) => of_pods(&mut bundle, &objects, &cluster, given, agent),
        Err(PodInputError(all)) => {
            bundle.leave_out("pods", &all.join("; "));
            let agent = agent.unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), METRICS_PORT));
            bundle.try_add("agent/metrics.txt", bundle::metrics(agent));
        }
    }
    let left_out = bundle.left_out().to_vec();
    let entries = bundle.into_entries();
    let bytes = bundle::packed(&folder, &entries).map_err(PodInputError::of)?;
    if to_stdout {
        let text = report(Path::new("standard output"), &entries, bytes.len(), &left_out, given);
        let written = io::stdout().write_all(&bytes).and_then(|()| io::stderr().write_all(text.as_bytes()));
        written.map_err(|error| PodInputError::of(format!("cannot write to standard output: {error}")))?;
        return Ok(CommandOutput { text: Printable::default(), code: FINE });
    }
    written(&path, &bytes)?;
    Ok(CommandOutput { text: report(&path, &entries, bytes.len(), &left_out, given), code: FINE })
}

/// Such as `20261122T041008Z`: every file system takes it as a part of a name.
fn stamp() -> String {
    let time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    time.chars().filter(|c| !matches!(c, '-' | ':')).collect()
}

/// A signal waits until the file is whole: what is half written would stay otherwise.
fn written(path: &Path, bytes: &[u8]) -> Result<(), PodInputError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(PodInputError::of)?;
    let done = runtime.block_on(async {
        let _held = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
        bundle::write_new(path, bytes)
    });
    done.map_err(|error| PodInputError::of(format!("cannot write {}: {error}", path.display())))
}

fn pods(given: &Given) -> Result<(Vec<Value>, ClusterObjects), PodInputError> {
    match given.flag("file") {
        Some(file) => input::objects_of_file(file),
        None => given.objects_of_node(&given.node_name()?),
    }
}

/// The plugin's configuration and what it leaves behind.
fn configuration(bundle: &mut Bundle, given: &Given) {
    let listed = bundle::conflists(&given.conf_dir()).map(|all| format!("{all:#}\n").into_bytes());
    bundle.try_add("node/network-configurations.json", listed);
    let node = given.node().unwrap_or_default();
    let run_dir =
        node.conf.as_ref().map_or_else(|| cni_core::conf::RUN_DIR.into(), |conf| conf.run_dir.clone());
    let program = given.bin_dir().join(cni::PLUGIN);
    let kubeconfig = node.conf.as_ref().map(|conf: &Conf| conf.kubeconfig.clone());
    let kubeconfig = kubeconfig.unwrap_or_else(|| run_dir.join(cni_core::conf::KUBECONFIG_NAME));
    let files = [program, kubeconfig, run_dir.join("log.sock"), run_dir.join(LOG)];
    bundle.add_json("node/files.json", &files.iter().map(|path| bundle::facts_of(path)).collect());
    bundle.try_add("node/plugin-log.jsonl", bundle::log(&run_dir.join(LOG)));
}

/// The scan, a report and the rules of each pod, and the agent as one of them.
fn of_pods(
    bundle: &mut Bundle,
    objects: &[Value],
    cluster: &ClusterObjects,
    given: &Given,
    agent: Option<SocketAddr>,
) {
    let (mut pods, mut written) = (Vec::new(), Vec::new());
    for object in objects {
        match Pod::from_json(object) {
            Ok(pod) => {
                pods.push(pod);
                written.push(object);
            }
            Err(_) => bundle.leave_out("pods", "one is missing"),
        }
    }
    cluster.tell(&mut pods);
    let node = &given.node_in(cluster, &pods).unwrap_or_default();
    let is_agent = |(pod, _): &(&Pod, _)| node.skips(&pod.name) == Some(SkipReason::AgentPod);
    let of_agent = pods.iter().zip(written).find(is_agent);
    if let Some((_, object)) = of_agent {
        bundle.add_json("agent/environment.json", &filter::agent(object));
    }
    let found = of_agent.and_then(|(pod, _)| pod.addresses.first().copied());
    let agent =
        agent.unwrap_or(SocketAddr::new(found.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), METRICS_PORT));
    bundle.try_add("agent/metrics.txt", bundle::metrics(agent));
    let directory = given.netns_dir();
    match Scan::of(&pods, &directory, node) {
        Ok(scan) => bundle.add_json("scan.json", &filter::findings(scan.json())),
        Err(error) => bundle.leave_out("scan.json", &error.to_string()),
    }
    // One look for addresses: one for each pod would be as many as the square of their number.
    let wanted = pods.iter().flat_map(|pod| pod.addresses.iter().copied()).collect();
    let survey = NamespaceIndex::of(&directory, &wanted);
    for (number, pod) in pods.iter().enumerate() {
        // Names come from pods; what cannot be one is not a part of a path.
        let name = pod.name.to_string();
        let name = if input::pod_name(&name).is_ok() { name } else { format!("unnamed/{number}") };
        let report = show::pod_among(pod, survey.as_ref(), node);
        if let Some(netns) = &report.netns {
            let rules = rules(netns, pod, node).map(|rules| format!("{rules:#}\n").into_bytes());
            bundle.try_add(&format!("pods/{name}/rules.json"), rules);
        }
        bundle.add_json(&format!("pods/{name}/report.json"), &filter::findings(report.json()));
    }
}

/// The mesh's rules in force in a pod's namespace.
fn rules(netns: &Path, pod: &Pod, node: &NodeConfiguration) -> Result<Value, String> {
    let netns = Netns::open(netns).map_err(|error| error.to_string())?;
    Ok(show::counters(&netns, Some(pod), node)?.rules.iter().map(rule_json).collect())
}

fn report(
    path: &Path,
    entries: &[(String, Vec<u8>)],
    size: usize,
    left_out: &[(String, String)],
    given: &Given,
) -> Printable {
    if given.is_json() {
        return Printable::json(&bundle::written_json(path, size, entries, left_out));
    }
    let mut paper = TextWriter::new(given.layout);
    paper.line(0, &format!("{} has {} entries, {size} bytes", path.display(), entries.len()));
    for (name, why) in left_out {
        paper.labelled(2, "left out: ", &format!("{name}: {why}"));
    }
    paper
        .line(0, "only fields that are known to hold no secret are in it; look through it before it is sent");
    paper.into_text()
}
