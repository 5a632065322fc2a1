//! `test`: a short-lived pod on each of two nodes proves by traffic that pods are redirected there. It is the pod of the chart's `helm test`.
//!
//! Pods are deleted whatever becomes of them: also after a signal, and when their time is over.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStatus;
use presentation::Printable;
use presentation::text_writer::{LONGEST_SEEN, TextLayout, TextStyle, TextWriter, short};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::agents::{Agent, Fleet, Reachability};
use crate::cluster::{KubeApi, PODS};
use crate::objects::ClusterPod;
use crate::scan::setup_failures;
use crate::signals::EndSignals;
use crate::terminal::{complain, counted, layout, note, print};
use crate::{CommandFailure, FAILED, FINE, FOUND};

/// What the chart's test and this have in common: all but names, images and places.
const POD: &str = include_str!("../../deploy/charts/istio-cni/files/test-pod.json");
/// How many nodes, unless they are named.
const NODES: usize = 2;
/// How often pods are read.
const PAUSE: Duration = Duration::from_secs(1);
/// The agents' image, and the one of the same build that validates.
const IMAGES: (&str, &str) = ("/install-cni:", "/validator:");
/// The exit code of a validation that failed.
const NOT_REDIRECTED: i32 = 126;
/// The version of the document.
const VERSION: u32 = 1;

/// What to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrialRequest {
    /// The nodes; two with ready agents if none are named.
    pub nodes: Vec<String>,
    /// The image of the validation, in place of the one beside the agents' image.
    pub image: Option<String>,
    /// Whether the user has agreed already.
    pub is_agreed: bool,
    /// Whether the answer is JSON.
    pub is_json: bool,
    /// How long the pods may take.
    pub patience: Duration,
}

/// `test`
///
/// # Errors
/// Nothing was proven.
pub async fn run(cluster: &KubeApi, wanted: &TrialRequest) -> Result<u8, CommandFailure> {
    let plan = Plan::make(cluster, wanted).await?;
    note(&Printable::lines(&plan.words()));
    if !wanted.is_agreed {
        ask()?;
    }
    let mut signals = EndSignals::new()?;
    let tried = plan.carry_out(cluster, &mut signals, wanted.patience).await;
    // Whatever became of them; also those of which it is not known whether they were created.
    let is_clean = plan.delete(cluster).await;
    let ends = tried?;
    let text = if wanted.is_json { Printable::json(&json(&plan, &ends)) } else { text(&ends, layout()) };
    print(&text)?;
    Ok(if is_clean { code(&ends) } else { FAILED })
}

/// Asks the user, on a terminal.
fn ask() -> Result<(), CommandFailure> {
    let nothing = |why: &str| Err(CommandFailure(format!("nothing was created: {why}")));
    if !io::stdin().is_terminal() {
        return nothing("standard input is not a terminal to agree on; --yes agrees");
    }
    note(&Printable::own("Create them? [y/N] "));
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(CommandFailure::of)?;
    if ["y", "yes"].contains(&answer.trim().to_lowercase().as_str()) {
        return Ok(());
    }
    nothing("you did not agree")
}

/// What is going to be created.
struct Plan {
    namespace: String,
    image: String,
    /// Names of pods, and their nodes.
    pods: Vec<(String, String)>,
}

impl Plan {
    async fn make(cluster: &KubeApi, wanted: &TrialRequest) -> Result<Self, CommandFailure> {
        let agents = Fleet::find(cluster).await?.agents(cluster, None).await?;
        let agents = chosen(&agents, &wanted.nodes)?;
        let image = match (&wanted.image, agents.first()) {
            (Some(image), _) => image.clone(),
            (None, Some(agent)) => validator(&agent.image)?,
            (None, None) => return Err(CommandFailure("no node is named".to_owned())),
        };
        // Names that no other run has, so that all of them can be deleted.
        let run = RandomState::new().build_hasher().finish() >> 32;
        let pod = |(number, agent): (usize, &&Agent)| {
            (format!("redirect-test-{run:08x}-{}", number + 1), agent.node.clone())
        };
        let pods = agents.iter().enumerate().map(pod).collect();
        Ok(Self { namespace: cluster.namespace().to_owned(), image, pods })
    }

    /// What it is, before it is done.
    fn words(&self) -> String {
        let Self { namespace, image, pods } = self;
        let mut text = format!(
            "creates {} of image {image} in namespace {namespace}, and deletes what it created:\n",
            counted(pods.len(), "pod")
        );
        for (name, node) in pods {
            text += &format!("  {name} on node {node}\n");
        }
        text
    }

    fn object(&self, name: &str, node: &str) -> Result<Value, CommandFailure> {
        let mut pod: Value = serde_json::from_str(POD).map_err(CommandFailure::of)?;
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["labels"] = json!({"app.kubernetes.io/name": "kubectl-redirect-test"});
        pod["spec"]["nodeName"] = json!(node);
        for list in ["initContainers", "containers"] {
            for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
                container["image"] = json!(self.image);
            }
        }
        Ok(pod)
    }

    /// Creates the pods, and waits for their ends.
    async fn carry_out(
        &self,
        cluster: &KubeApi,
        signals: &mut EndSignals,
        patience: Duration,
    ) -> Result<Vec<Trial>, CommandFailure> {
        for (name, node) in &self.pods {
            cluster.create(PODS, &self.namespace, &self.object(name, node)?).await?;
        }
        tokio::select! {
            ends = self.ends(cluster, patience) => ends,
            () = signals.received() => Err(CommandFailure("interrupted before the pods had ended".to_owned())),
        }
    }

    async fn ends(&self, cluster: &KubeApi, patience: Duration) -> Result<Vec<Trial>, CommandFailure> {
        let late = Instant::now() + patience;
        loop {
            let mut trials = Vec::new();
            for (name, node) in &self.pods {
                let pod: Option<ClusterPod> = cluster.get(PODS, Some(&self.namespace), name).await?;
                let end = pod.as_ref().map_or(End::Lost, End::of);
                trials.push(Trial { pod: format!("{}/{name}", self.namespace), node: node.clone(), end });
            }
            let waits = |trial: &Trial| matches!(trial.end, End::Waits(_));
            if !trials.iter().any(waits) {
                return Ok(trials);
            }
            if Instant::now() >= late {
                self.explain(cluster, &mut trials).await;
                return Ok(trials);
            }
            sleep(PAUSE).await;
        }
    }

    /// Adds why pods did not start, as far as their events say.
    async fn explain(&self, cluster: &KubeApi, trials: &mut [Trial]) {
        let names: BTreeSet<String> = trials.iter().map(|trial| trial.pod.clone()).collect();
        match setup_failures(cluster, Some(&self.namespace), &names).await {
            Ok(mut events) => {
                for trial in trials {
                    if let (End::Waits(why), Some(event)) = (&mut trial.end, events.remove(&trial.pod)) {
                        *why = event.message;
                    }
                }
            }
            Err(failure) => note(&Printable::line(&format!("why is not known: {failure}"))),
        }
    }

    /// Deletes the pods, and reports it; whether all of them are deleted.
    async fn delete(&self, cluster: &KubeApi) -> bool {
        let mut left = Vec::new();
        for (name, _) in &self.pods {
            if let Err(failure) = cluster.delete(PODS, &self.namespace, name).await {
                complain(&failure);
                left.push(name.as_str());
            }
        }
        if left.is_empty() {
            note(&Printable::line(&format!("deleted {}", counted(self.pods.len(), "pod"))));
        } else {
            let command = format!("kubectl -n {} delete pod {}", self.namespace, left.join(" "));
            complain(&CommandFailure(format!("pods may be left; run {command}")));
        }
        left.is_empty()
    }
}

/// The agents of the nodes that are named, or those of the first ones that are ready.
fn chosen<'a>(
    agents: &'a BTreeMap<String, Agent>,
    nodes: &[String],
) -> Result<Vec<&'a Agent>, CommandFailure> {
    let of = |node: &String| {
        agents.get(node).ok_or_else(|| {
            CommandFailure(format!("node {node} has no agent; kubectl redirect scan lists them"))
        })
    };
    if !nodes.is_empty() {
        return nodes.iter().map(of).collect();
    }
    let ready: Vec<&Agent> =
        agents.values().filter(|agent| agent.state == Reachability::Ready).take(NODES).collect();
    if ready.is_empty() {
        return Err(CommandFailure("no agent is ready; kubectl redirect scan shows why".to_owned()));
    }
    Ok(ready)
}

/// The image that validates, beside the agents'.
fn validator(agents: &str) -> Result<String, CommandFailure> {
    let (ours, validators) = IMAGES;
    match agents.rsplit_once(ours) {
        Some((hub, tag)) if !tag.contains('/') => Ok(format!("{hub}{validators}{tag}")),
        Some(_) | None => Err(CommandFailure(format!(
            "agents run {agents}, from which the name of the validator's image does not follow; name that with --image"
        ))),
    }
}

/// A pod, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Trial {
    /// `NAMESPACE/NAME`.
    pod: String,
    node: String,
    end: End,
}

/// What became of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// Both validations succeeded.
    Redirected,
    /// One of them did not: its reason and message.
    NotRedirected(String, String),
    /// It has not ended: why, as far as that is known.
    Waits(String),
    /// It ended in another way.
    Broken(String),
    /// Something deleted it.
    Lost,
}

impl End {
    fn of(pod: &ClusterPod) -> Self {
        let status = &pod.status;
        let all = || status.init_container_statuses.iter().chain(&status.container_statuses);
        let ended = |one: &ContainerStatus| one.state.clone().unwrap_or_default().terminated;
        if let Some(end) = all().filter_map(ended).find(|end| end.exit_code != 0) {
            let message = end.message.unwrap_or_default();
            if end.exit_code == NOT_REDIRECTED {
                return Self::of_validation(&message);
            }
            let reason = end.reason.unwrap_or_default();
            return Self::Broken(format!("{reason}, exit code {}: {message}", end.exit_code));
        }
        match status.phase.as_str() {
            "Succeeded" => Self::Redirected,
            "Failed" => Self::Broken("the pod failed".to_owned()),
            _ => {
                let waiting = |one: &ContainerStatus| one.state.clone().unwrap_or_default().waiting;
                let words = all().filter_map(waiting).find_map(|why| why.message.or(why.reason));
                Self::Waits(words.unwrap_or_else(|| status.phase.to_lowercase()))
            }
        }
    }

    /// From a validation's termination message.
    fn of_validation(message: &str) -> Self {
        let verdict: Value = serde_json::from_str(message).unwrap_or_default();
        let text = |name: &str| verdict[name].as_str().map(str::to_owned);
        match (text("reason"), text("message")) {
            (Some(reason), Some(message)) => Self::NotRedirected(reason, message),
            _ => Self::NotRedirected("unknown".to_owned(), message.to_owned()),
        }
    }

    const fn word(&self) -> &'static str {
        match self {
            Self::Redirected => "redirected",
            Self::NotRedirected(..) => "not-redirected",
            Self::Waits(_) => "late",
            Self::Broken(_) => "broken",
            Self::Lost => "lost",
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redirected => {
                f.write_str("redirected: what the application sends, and what comes to the proxy")
            }
            Self::NotRedirected(reason, message) => write!(f, "not redirected: {message} ({reason})"),
            Self::Waits(why) => write!(f, "has not ended in time: {why}"),
            Self::Broken(why) => write!(f, "nothing was proven: {why}"),
            Self::Lost => f.write_str("nothing was proven: something else deleted the pod"),
        }
    }
}

fn code(trials: &[Trial]) -> u8 {
    if trials.iter().all(|trial| trial.end == End::Redirected) {
        return FINE;
    }
    let is_found = |trial: &Trial| matches!(trial.end, End::NotRedirected(..) | End::Waits(_));
    if trials.iter().any(is_found) { FOUND } else { FAILED }
}

fn text(trials: &[Trial], layout: TextLayout) -> Printable {
    let mut paper = TextWriter::new(layout);
    for Trial { node, end, .. } in trials {
        let style = if *end == End::Redirected { TextStyle::Green } else { TextStyle::Red };
        paper.marked(0, &format!("{node}: "), style, &short(&end.to_string(), LONGEST_SEEN));
        if *end != End::Redirected {
            paper.labelled(
                2,
                "what to do: ",
                &format!("kubectl redirect scan --node {node} shows what is wrong there"),
            );
        }
    }
    paper.into_text()
}

fn json(plan: &Plan, trials: &[Trial]) -> Value {
    let trials = trials.iter().map(|Trial { pod, node, end }| {
        json!({"pod": pod, "node": node, "outcome": end.word(), "text": end.to_string()})
    });
    json!({"version": VERSION, "image": plan.image, "tested": trials.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(init: &Value, main: &Value, phase: &str) -> End {
        let status = |name: &str, state: &Value| json!([{"name": name, "image": "i", "imageID": "i", "ready": false, "restartCount": 0, "state": state}]);
        let pod = json!({"status": {"phase": phase, "initContainerStatuses": status("application", init),
            "containerStatuses": status("istio-proxy", main)}});
        End::of(&serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn a_pod_is_redirected_if_both_validations_say_so() {
        let end = |code: i32, message: &str| json!({"terminated": {"exitCode": code, "message": message}});
        let fine = end(0, r#"{"reason": "redirected"}"#);
        let bad = end(126, r#"{"reason": "no-rules", "message": "nothing redirects"}"#);
        let waits = json!({"waiting": {"reason": "PodInitializing"}});
        let not = || End::NotRedirected("no-rules".to_owned(), "nothing redirects".to_owned());
        assert_eq!(ended(&fine, &fine, "Succeeded"), End::Redirected);
        assert_eq!(ended(&bad, &waits, "Failed"), not());
        assert_eq!(ended(&fine, &bad, "Failed"), not());
        assert_eq!(ended(&waits, &waits, "Pending"), End::Waits("PodInitializing".to_owned()));
        assert!(matches!(ended(&end(1, "bad flag"), &waits, "Failed"), End::Broken(_)));
    }

    #[test]
    fn the_validators_image_is_beside_the_agents() {
        let of = |image: &str| validator(image).map_err(|failure| failure.0.contains("--image"));
        assert_eq!(of("hub:5000/a/install-cni:0.1.0"), Ok("hub:5000/a/validator:0.1.0".to_owned()));
        for other in ["hub/install-cni@sha256:00", "install-cni", "hub/mirrored-cni:1"] {
            assert_eq!(of(other), Err(true), "{other}");
        }
    }
}
