//! Commands that `redirectctl` answers on a pod's node: this finds the node's agent, and passes on its answer.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni_core::pod_name::PodName;
use presentation::Printable;
use presentation::node_scan::ReportedFinding;
use presentation::text_writer::TextWriter;
use serde_json::{Value, json};

use crate::agents::{Agent, Fleet, Reachability};
use crate::cluster::{KubeApi, PODS};
use crate::objects::ClusterPod;
use crate::scan::not_started;
use crate::terminal::{complain, layout, note, print};
use crate::{CommandFailure, FAILED, FINE, FOUND, exec};

/// The largest archive: `redirectctl` limits what it packs to as much.
const MOST_ARCHIVE: u64 = 32 << 20;

/// The most of a report on one pod.
const MOST_REPORT: u64 = 4 << 20;

/// A command of `redirectctl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardedCommand {
    /// `pod`: everything about a pod.
    Pod,
    /// `verify`: a pod's network namespace against what it should be.
    Verify,
    /// `trace`: a packet through the rules in force in a pod.
    Trace,
    /// `why`: what a word means, which any agent knows.
    Why,
}

impl ForwardedCommand {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Pod, Self::Verify, Self::Trace, Self::Why];

    /// Its word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Verify => "verify",
            Self::Trace => "trace",
            Self::Why => "why",
        }
    }
}

/// What to pass on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardRequest {
    /// The command.
    pub command: ForwardedCommand,
    /// The pod, or the word that `why` explains.
    pub operand: Option<String>,
    /// Flags of `redirectctl`.
    pub words: Vec<String>,
    /// How long the agent may take.
    pub patience: Duration,
}

/// Archives to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedBundle {
    /// Which nodes they are about.
    pub about: About,
    /// How many nodes at most.
    pub limit: usize,
    /// Where the only one goes.
    pub file: Option<PathBuf>,
    /// How long the agent may take.
    pub patience: Duration,
}

/// Nodes, by their names or by a pod's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum About {
    /// These nodes.
    Nodes(Vec<String>),
    /// All that have an agent.
    AllNodes,
    /// The node of this pod.
    Pod(String),
}

/// `pod`, `verify`, `trace`, `why`: the exit code is `redirectctl`'s.
///
/// # Errors
/// No agent can be asked.
pub async fn run(cluster: &KubeApi, wanted: &ForwardRequest) -> Result<u8, CommandFailure> {
    let (mut words, mut unstarted) = (vec![wanted.command.name().to_owned()], None);
    let agent = match (wanted.command, &wanted.operand) {
        (ForwardedCommand::Why, reason) => {
            words.extend(reason.clone());
            any_agent(cluster).await?
        }
        (command, Some(pod)) => {
            let pod = pod_name(pod, cluster.namespace())?;
            let object = pod_of(cluster, &pod).await?;
            let agent = agent_of(cluster, &object.spec.node_name).await?;
            if command == ForwardedCommand::Pod {
                unstarted = (object.status.phase == "Pending" && object.status.address.is_empty())
                    .then(|| pod.clone());
            } else {
                words.push("--pod".to_owned());
            }
            words.push(pod.to_string());
            agent
        }
        (_, None) => return Err(CommandFailure("POD is missing: the pod, as NAMESPACE/NAME".to_owned())),
    };
    words.extend(wanted.words.iter().cloned());
    let has = |flag: &str| words.iter().any(|word| word.split('=').next() == Some(flag));
    if io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() && !has("--color") {
        words.extend(["--color".to_owned(), "always".to_owned()]);
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let Some(pod) = unstarted
        && let Some(finding) = why_not_started(cluster, &pod).await
    {
        return with_finding(cluster, &agent, &words, wanted.patience, &finding).await;
    }
    let (stdout, stderr) = (tokio::io::stdout(), tokio::io::stderr());
    let done = exec::forward(cluster, &agent, &words, wanted.patience, stdout, stderr).await;
    done.map_err(|error| about(&agent, &error))
}

/// Why a pod has no network yet, as far as its events say: the agents may not read events, and the user may.
async fn why_not_started(cluster: &KubeApi, pod: &PodName) -> Option<ReportedFinding> {
    let found = not_started(cluster, Some(&pod.namespace), &BTreeSet::from([pod.to_string()])).await;
    found.into_iter().next().map(|(_, finding)| finding)
}

/// The answer of `redirectctl`, and a finding that it cannot know.
async fn with_finding(
    cluster: &KubeApi,
    agent: &Agent,
    words: &[&str],
    patience: Duration,
    finding: &ReportedFinding,
) -> Result<u8, CommandFailure> {
    let output = exec::output(cluster, agent, words, patience, MOST_REPORT)
        .await
        .map_err(|error| about(agent, &error))?;
    note(&Printable::lines(&output.stderr));
    if let Ok(mut report) = serde_json::from_slice::<Value>(&output.stdout) {
        if let Some(findings) = report["findings"].as_array_mut() {
            findings.push(json!(finding));
        }
        print(&Printable::json(&report))?;
    } else {
        print(&Printable::lines(&String::from_utf8_lossy(&output.stdout)))?;
        let mut paper = TextWriter::new(layout());
        finding.write(&mut paper);
        print(&paper.into_text())?;
    }
    Ok(if output.code == FINE { FOUND } else { output.code })
}

/// `bundle`: each `redirectctl` writes the archive of its node, which is saved here. A node that does not answer costs only its own.
///
/// # Errors
/// The nodes are too many, or none of them can be asked.
pub async fn bundle(cluster: &KubeApi, wanted: &WantedBundle) -> Result<u8, CommandFailure> {
    let nodes = match &wanted.about {
        About::Nodes(nodes) => nodes.clone(),
        About::AllNodes => Fleet::find(cluster).await?.agents(cluster, None).await?.into_keys().collect(),
        About::Pod(pod) => {
            vec![pod_of(cluster, &pod_name(pod, cluster.namespace())?).await?.spec.node_name]
        }
    };
    if let [node] = nodes.as_slice() {
        return bundle_of(cluster, node, wanted).await;
    }
    if nodes.len() > wanted.limit {
        let (count, limit) = (nodes.len(), wanted.limit);
        return Err(CommandFailure(format!(
            "{count} nodes, more than --limit {limit}; name some with --node, or raise it"
        )));
    }
    if let Some(file) = &wanted.file {
        let file = file.display();
        return Err(CommandFailure(format!(
            "{file} cannot hold the archives of {} nodes; leave out --file",
            nodes.len()
        )));
    }
    let mut worst = FINE;
    for node in nodes {
        let code = bundle_of(cluster, &node, wanted).await.unwrap_or_else(|failure| {
            complain(&failure);
            FAILED
        });
        worst = worst.max(code);
    }
    Ok(worst)
}

async fn bundle_of(cluster: &KubeApi, node: &str, wanted: &WantedBundle) -> Result<u8, CommandFailure> {
    let file = wanted.file.clone().unwrap_or_else(|| format!("redirectctl-{node}.tar.gz").into());
    // Before anything is gathered, because that takes a while; writing asks again.
    if file.symlink_metadata().is_ok() {
        return Err(CommandFailure(format!(
            "{} exists, and nothing is overwritten; name another file",
            file.display()
        )));
    }
    let agent = agent_of(cluster, node).await?;
    let output = exec::output(cluster, &agent, &["bundle", "-"], wanted.patience, MOST_ARCHIVE)
        .await
        .map_err(|error| about(&agent, &error))?;
    note(&Printable::lines(&output.stderr));
    if output.code != FINE {
        return Ok(output.code);
    }
    write_new(&file, &output.stdout)
        .map_err(|error| CommandFailure(format!("cannot write {}: {error}", file.display())))?;
    print(&Printable::line(&format!(
        "{} has {} bytes, of node {node}",
        file.display(),
        output.stdout.len()
    )))?;
    Ok(FINE)
}

fn about(agent: &Agent, error: &exec::AgentExecError) -> CommandFailure {
    CommandFailure(format!("agent {} on node {}: {error}", agent.pod(), agent.node))
}

/// A file that appears whole or not at all, and that only its owner may read.
fn write_new(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(file)?.write_all(bytes);
    if written.is_err() {
        // The first error counts.
        let _ = std::fs::remove_file(file);
    }
    written
}

/// Namespace and name of a pod: `NAMESPACE/NAME`, or a name in the usual namespace.
fn pod_name(text: &str, usual: &str) -> Result<PodName, CommandFailure> {
    let text = text.strip_prefix("pod/").or_else(|| text.strip_prefix("pods/")).unwrap_or(text);
    PodName::parse(text, usual).map_err(CommandFailure)
}

/// A pod that has a node.
async fn pod_of(cluster: &KubeApi, name: &PodName) -> Result<ClusterPod, CommandFailure> {
    let found: Option<ClusterPod> = cluster.get(PODS, Some(&name.namespace), &name.name).await?;
    let pod = found.ok_or_else(|| {
        CommandFailure(format!(
            "the API server has no pod {name}; kubectl get pods -n {} lists its pods",
            name.namespace
        ))
    })?;
    if pod.spec.node_name.is_empty() {
        return Err(CommandFailure(format!("pod {name} has no node yet; kubectl describe pod shows why")));
    }
    Ok(pod)
}

/// The agent of a node, if it can be asked.
async fn agent_of(cluster: &KubeApi, node: &str) -> Result<Agent, CommandFailure> {
    let fleet = Fleet::find(cluster).await?;
    let agent = fleet.agents(cluster, Some(node)).await?.remove(node).ok_or_else(|| {
        CommandFailure(format!(
            "node {node} has no agent: no pod of {fleet}; does it tolerate the node's taints?"
        ))
    })?;
    match &agent.state {
        Reachability::NotRunning(why) => Err(CommandFailure(format!(
            "agent {} on node {node} does not run ({why}); kubectl -n {} describe pod {} shows why",
            agent.pod(),
            agent.namespace,
            agent.name
        ))),
        Reachability::NotReady | Reachability::Ready => Ok(agent),
    }
}

async fn any_agent(cluster: &KubeApi) -> Result<Agent, CommandFailure> {
    let fleet = Fleet::find(cluster).await?;
    let agents = fleet.agents(cluster, None).await?.into_values();
    agents.max_by(|one, other| one.state.cmp(&other.state)).ok_or_else(|| {
        CommandFailure(format!("no agent found: no pod of {fleet}; redirectctl why answers anywhere"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_named_as_for_kubectl() {
        let name = |text: &str| pod_name(text, "usual").ok().map(|name| name.to_string());
        let is = |namespace: &str, name: &str| Some(format!("{namespace}/{name}"));
        assert_eq!(name("shop/cart-0"), is("shop", "cart-0"));
        assert_eq!(name("pod/cart-0"), is("usual", "cart-0"));
        assert_eq!(name("cart-0"), is("usual", "cart-0"));
        for wrong in ["", "/", "shop/", "a/b/c", "--to", "Shop/cart"] {
            assert_eq!(name(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn an_archive_replaces_nothing() -> io::Result<()> {
        let file = std::env::temp_dir().join(format!("kubectl-redirect-{}.tar.gz", std::process::id()));
        write_new(&file, b"archive")?;
        let again = write_new(&file, b"another");
        let kept = std::fs::read(&file)?;
        std::fs::remove_file(&file)?;
        assert!(again.is_err() && kept == b"archive");
        Ok(())
    }
}
