//! `watch`: what changes of pods, nodes and agents, line by line. [`Sight`] and its changes are pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use presentation::node_scan::{NodeScan, ReportedFinding};
use presentation::{Printable, Severity};
use reasons::PodState;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::agents::{Agent, Reachability};
use crate::cluster::KubeApi;
use crate::scan;
use crate::signals::EndSignals;
use crate::terminal::{counted, note, pass};
use crate::verdict::{Audience, PodFilter, Unasked, VERSION};
use crate::{CommandFailure, FINE};

/// How long to pause, where that is not said.
pub(crate) const USUAL_PAUSE: &str = "10s";

/// What to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchRequest {
    /// What is asked each time.
    pub scan: scan::ScanRequest,
    /// How long to pause between two times.
    pub pause: Duration,
}

/// `watch`, until a signal comes or its reader ends.
///
/// # Errors
/// The first look is not possible; later ones may fail, as where an API server restarts.
pub async fn run(cluster: &KubeApi, wanted: &WatchRequest) -> Result<u8, CommandFailure> {
    let mut signals = EndSignals::new()?;
    let (mut before, mut told) = (None, String::new());
    loop {
        let looked = tokio::select! {
            looked = look(cluster, &wanted.scan) => looked,
            () = signals.received() => return Ok(FINE),
        };
        match looked {
            Ok(mut sight) => {
                let text = match &before {
                    None => sight.begun(&now(), wanted.scan.is_json),
                    Some(before) => {
                        sight.remember(before);
                        sight.news(before, &now(), wanted.scan.is_json)
                    }
                };
                if !pass(&text)? {
                    return Ok(FINE);
                }
                (before, told) = (Some(sight), String::new());
            }
            Err(failure) if before.is_none() => return Err(failure),
            Err(failure) => {
                if failure.0 != told {
                    note(&Printable::line(&format!("still watching: {failure}")));
                }
                told = failure.0;
            }
        }
        tokio::select! {
            () = sleep(wanted.pause) => {}
            () = signals.received() => return Ok(FINE),
        }
    }
}

async fn look(cluster: &KubeApi, wanted: &scan::ScanRequest) -> Result<Sight, CommandFailure> {
    let mut sight = Sight::new(scan::filter(cluster, wanted).await?);
    scan::ask_agents(cluster, wanted, &mut sight).await??;
    Ok(sight)
}

fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// A node with its agent, or a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Node(String),
    Pod { name: String, node: String },
}

impl Subject {
    /// What it is, its name, and its node.
    fn parts(&self) -> (&'static str, &str, &str) {
        match self {
            Self::Node(name) => ("node", name, name),
            Self::Pod { name, node } => ("pod", name, node),
        }
    }
}

/// How a subject is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Status {
    /// The word of its state.
    state: String,
    /// What is wrong: meanings by their codes.
    causes: BTreeMap<String, String>,
}

impl Status {
    fn of(state: &impl ToString) -> Self {
        Self { state: state.to_string(), causes: BTreeMap::new() }
    }

    fn add(&mut self, finding: ReportedFinding) {
        if finding.severity != Severity::Note {
            self.causes.insert(finding.code, finding.meaning);
        }
    }

    fn is_fine(&self) -> bool {
        let is_known = [PodState::Verified, PodState::LeftAlone].iter().any(|one| one.word() == self.state);
        self.causes.is_empty() && (is_known || self.state == READY)
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.state)?;
        for (at, (code, meaning)) in self.causes.iter().enumerate() {
            write!(f, "{} {meaning} ({code})", if at == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}

/// The word for an agent that is.
const READY: &str = "ready";

/// All that is watched, at a moment.
#[derive(Debug, Default)]
pub struct Sight {
    filter: PodFilter,
    all: BTreeMap<Subject, Status>,
    /// Nodes without an answer.
    silent: BTreeSet<String>,
    unseen: BTreeSet<String>,
}

impl Sight {
    /// Nothing yet, about these pods.
    #[must_use]
    pub fn new(filter: PodFilter) -> Self {
        Self { filter, ..Self::default() }
    }

    /// How many subjects it begins with, and those that are not as they should be.
    #[must_use]
    pub fn begun(&self, time: &str, is_json: bool) -> Printable {
        let is_node = |subject: &&Subject| matches!(subject, Subject::Node(_));
        let nodes = self.all.keys().filter(is_node).count();
        let pods = self.all.len() - nodes;
        let is_verified = |status: &&Status| status.state == PodState::Verified.word();
        let verified = self.all.values().filter(is_verified).count();
        let mut text = if is_json {
            Printable::json_line(&json!({"version": VERSION, "event": "begun", "time": time,
                "nodes": nodes, "pods": pods, "verified": verified}))
        } else {
            let (nodes, pods) = (counted(nodes, "node"), counted(pods, "pod"));
            Printable::line(&format!("{time} watching {nodes} and {pods}, {verified} verified"))
        };
        for (subject, after) in self.all.iter().filter(|(_, status)| !status.is_fine()) {
            let change = Change { subject, before: None, after: Some(after) };
            text.push(&change.written(time, is_json, ""));
        }
        text
    }

    /// Keeps what is known of the pods of nodes that do not answer now.
    pub fn remember(&mut self, before: &Self) {
        for (subject, status) in &before.all {
            let (_, _, node) = subject.parts();
            if self.silent.contains(node) {
                self.all.entry(subject.clone()).or_insert_with(|| status.clone());
            }
        }
    }

    /// What is new since before.
    #[must_use]
    pub fn news(&self, before: &Self, time: &str, is_json: bool) -> Printable {
        let subjects: BTreeSet<&Subject> = before.all.keys().chain(self.all.keys()).collect();
        let mut text = Printable::default();
        for subject in subjects {
            let (before, after) = (before.all.get(subject), self.all.get(subject));
            if before != after {
                text.push(&Change { subject, before, after }.written(time, is_json, "new, "));
            }
        }
        text
    }

    fn node(&mut self, node: &str) -> &mut Status {
        self.all.entry(Subject::Node(node.to_owned())).or_default()
    }
}

impl Audience for Sight {
    fn see(&mut self, agent: &Agent) {
        let state = if agent.state == Reachability::Ready { READY } else { "not-ready" };
        *self.node(&agent.node) = Status::of(&state);
    }

    fn miss(&mut self, node: &str, why: Unasked) {
        self.silent.insert(node.to_owned());
        *self.node(node) = Status::of(&why);
    }

    fn add(&mut self, node: &str, scan: NodeScan) {
        for finding in scan.node {
            self.node(node).add(finding);
        }
        for pod in scan.pods {
            // A namespace without a pod has a file for a name.
            if !self.filter.has(&pod.subject) || pod.subject.starts_with('/') {
                continue;
            }
            if PodState::of(&pod.state) == Some(PodState::Unseen) {
                self.unseen.insert(pod.subject.clone());
            }
            let mut status = Status::of(&pod.state);
            pod.findings.into_iter().for_each(|finding| status.add(finding));
            self.all.insert(Subject::Pod { name: pod.subject, node: node.to_owned() }, status);
        }
    }

    fn unseen(&self) -> &BTreeSet<String> {
        &self.unseen
    }

    fn add_finding(&mut self, pod: &str, finding: ReportedFinding) {
        let is_pod = |subject: &Subject| matches!(subject, Subject::Pod { name, .. } if name == pod);
        if let Some((_, status)) = self.all.iter_mut().find(|(subject, _)| is_pod(subject)) {
            status.add(finding);
        }
    }
}

/// What became of a subject.
struct Change<'a> {
    subject: &'a Subject,
    before: Option<&'a Status>,
    after: Option<&'a Status>,
}

impl Change<'_> {
    /// For programs or for people; for these, `new` precedes the state of a subject that was not there before.
    fn written(&self, time: &str, is_json: bool, new: &str) -> Printable {
        if is_json { Printable::json_line(&self.json(time)) } else { self.line(time, new) }
    }

    fn line(&self, time: &str, new: &str) -> Printable {
        let (kind, name, node) = self.subject.parts();
        let place = if kind == "pod" { format!(" on {node}") } else { String::new() };
        let change = match (self.before, self.after) {
            (Some(before), Some(after)) if before.state == after.state && after.is_fine() => {
                format!("{after}, and nothing is wrong with it now")
            }
            (Some(before), Some(after)) if before.state == after.state => after.to_string(),
            (Some(before), Some(after)) => format!("{} -> {after}", before.state),
            (None, Some(after)) => format!("{new}{after}"),
            (Some(before), None) => format!("gone, was {}", before.state),
            (None, None) => String::new(),
        };
        Printable::line(&format!("{time} {kind} {name}{place}: {change}"))
    }

    fn json(&self, time: &str) -> Value {
        let (kind, name, node) = self.subject.parts();
        let status = |status: &Status| {
            let causes = status.causes.iter();
            let causes: Vec<Value> =
                causes.map(|(code, meaning)| json!({"code": code, "meaning": meaning})).collect();
            json!({"state": status.state, "causes": causes})
        };
        json!({"version": VERSION, "event": "changed", "time": time, "kind": kind, "subject": name, "node": node,
            "before": self.before.map(status), "after": self.after.map(status)})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(pods: &[(&str, &str, &[&str])]) -> NodeScan {
        let finding =
            |code: &&str| json!({"code": code, "severity": "error", "meaning": format!("{code} it is")});
        let pods: Vec<Value> = pods
            .iter()
            .map(|(subject, state, codes)| {
                let findings: Vec<Value> = codes.iter().map(finding).collect();
                json!({"subject": subject, "state": state, "findings": findings})
            })
            .collect();
        serde_json::from_value(json!({"version": 1, "pods": pods})).expect("a scan")
    }

    fn agent(state: Reachability) -> Agent {
        let text = |text: &str| text.to_owned();
        Agent {
            namespace: text("mesh"),
            name: text("a"),
            node: text("n"),
            container: text("install-cni"),
            image: text("i"),
            state,
            restarts: None,
        }
    }

    fn sight(state: Reachability, pods: &[(&str, &str, &[&str])]) -> Sight {
        let mut sight = Sight::default();
        sight.see(&agent(state));
        sight.add("n", scan(pods));
        sight
    }

    fn text(printable: &Printable) -> String {
        String::from_utf8_lossy(printable.as_bytes()).into_owned()
    }

    #[test]
    fn only_what_changed_is_news() {
        let before = sight(
            Reachability::Ready,
            &[
                ("shop/a", "verified", &[]),
                ("shop/b", "verified", &["not-healed"]),
                ("shop/c", "unknown", &[]),
            ],
        );
        assert_eq!(
            text(&before.begun("T", false)),
            "T watching 1 node and 3 pods, 2 verified\n\
             T pod shop/b on n: verified: not-healed it is (not-healed)\nT pod shop/c on n: unknown\n"
        );
        assert_eq!(text(&before.news(&before, "T", false)), "");
        let after = sight(
            Reachability::NotReady,
            &[
                ("shop/a", "drifted", &["rules-differ"]),
                ("shop/b", "verified", &[]),
                ("shop/d", "verified", &[]),
            ],
        );
        assert_eq!(
            text(&after.news(&before, "T", false)),
            "T node n: ready -> not-ready\n\
             T pod shop/a on n: verified -> drifted: rules-differ it is (rules-differ)\n\
             T pod shop/b on n: verified, and nothing is wrong with it now\n\
             T pod shop/c on n: gone, was unknown\nT pod shop/d on n: new, verified\n"
        );
    }

    #[test]
    fn pods_of_a_node_that_does_not_answer_are_as_they_were() {
        let before = sight(Reachability::Ready, &[("shop/a", "verified", &[])]);
        let mut after = Sight::default();
        after.see(&agent(Reachability::Ready));
        after.miss("n", Unasked::Failed("late".to_owned()));
        after.remember(&before);
        assert_eq!(text(&after.news(&before, "T", false)), "T node n: ready -> no answer: late\n");
    }
}
