//! What the answers of all nodes come to. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use cni_core::enrolment_report::headline;
use presentation::node_scan::{NodeScan, ReportedFinding, ScannedPod};
use presentation::text_writer::{LONGEST_SEEN, TextLayout, TextStyle, TextWriter, short};
use presentation::{Printable, Severity};
use reasons::PodState;
use serde_json::{Value, json};

use crate::agents::{Agent, Reachability};
use crate::terminal::{counted, names};
use crate::{FAILED, FINE, FOUND};

/// The version of the documents that this reads and writes.
pub const VERSION: u32 = 1;
/// The code of redirectctl for a pod whose network could not be set up: only the user's own rights show it.
const NOT_SET_UP: &str = "not-set-up";
/// The word of redirectctl for the data plane of ambient mode.
const AMBIENT: &str = "ambient";
/// What follows where no replica of the taint controller is ready, and why one that runs is not.
const NO_LEADER: &str = "no node is tainted or freed; a replica that runs either may not write Lease istio-taint-lock, or gets no response of the API server";
/// How the code of a note about an agent begins.
const OF_AGENTS: &str = "agent-";
/// How many things seen of a cause text shows.
const MOST_SEEN: usize = 5;
/// The same of a note about an agent, which is shown for one node.
const MOST_OF_AGENT: usize = 24;

/// Which pods are asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodFilter {
    /// Those of this namespace.
    pub namespace: Option<String>,
    /// Those of these names, `NAMESPACE/NAME`.
    pub names: Option<BTreeSet<String>>,
}

impl PodFilter {
    pub(crate) fn has(&self, subject: &str) -> bool {
        let namespace = subject.split('/').next();
        self.namespace.as_deref().is_none_or(|wanted| namespace == Some(wanted))
            && self.names.as_ref().is_none_or(|names| names.contains(subject))
    }
}

/// Why a node has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unasked {
    /// It has no agent, and so many pods of the mesh.
    NoAgent(usize),
    /// Its agent does not run.
    NotRunning(String),
    /// It did not answer: why.
    Failed(String),
}

impl std::fmt::Display for Unasked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoAgent(0) => f.write_str("no agent, and no mesh pods"),
            Self::NoAgent(pods) => write!(f, "no agent, and {}", counted(*pods, "mesh pod")),
            Self::NotRunning(why) => write!(f, "agent not running: {why}"),
            Self::Failed(why) => write!(f, "no answer: {why}"),
        }
    }
}

/// What takes answers as they come.
pub trait Audience {
    /// Takes an agent into account, whether it answers or not.
    fn see(&mut self, agent: &Agent);
    /// Takes a node without an answer into account.
    fn miss(&mut self, node: &str, why: Unasked);
    /// Takes a node's answer into account.
    fn add(&mut self, node: &str, scan: NodeScan);
    /// Pods that have no network yet.
    fn unseen(&self) -> &BTreeSet<String>;
    /// Whether what happened to agents is of interest.
    fn wants_history(&self) -> bool {
        false
    }
    /// Takes another finding of such a pod, or a note about a node's agent, into account.
    fn add_finding(&mut self, pod: &str, finding: ReportedFinding);
}

/// What is wrong with a pod whose network could not be set up, with the words of the event.
pub(crate) fn not_set_up(words: &str) -> ReportedFinding {
    ReportedFinding {
        code: NOT_SET_UP.to_owned(),
        severity: Severity::Error,
        meaning: "the runtime cannot set up the pod's network".to_owned(),
        seen: vec![words.to_owned()],
        remedy: format!("kubectl redirect why {NOT_SET_UP} explains the message"),
    }
}

/// What Kubernetes knows of a node's agent. No finding of redirectctl, whose account may not read events.
pub(crate) fn seen_of_agent(seen: Vec<String>) -> ReportedFinding {
    ReportedFinding {
        code: format!("{OF_AGENTS}events"),
        severity: Severity::Note,
        meaning: "what happened to the agent's pod".to_owned(),
        seen,
        remedy: "see docs/tasks/alerts.md; where it is over, nothing is to be done".to_owned(),
    }
}

/// A finding of several pods or nodes.
#[derive(Debug, Clone, Default)]
struct Cause {
    meaning: String,
    remedy: String,
    /// Pods or nodes that have it, with what was seen of each.
    subjects: BTreeMap<String, Vec<String>>,
}

/// By severity, the worst first, then by code.
type Causes = BTreeMap<(Reverse<Severity>, String), Cause>;

/// How many pods are as they should be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    expected: usize,
    verified: usize,
}

impl Counts {
    const fn is_whole(self) -> bool {
        self.verified == self.expected
    }
}

/// What is known of the cluster.
#[derive(Debug, Default)]
pub struct ClusterVerdict {
    filter: PodFilter,
    /// Pods that are to be redirected to their proxies.
    sidecars: Counts,
    /// Pods of ambient mode.
    ambient: Counts,
    outside: usize,
    /// Pods that have no network yet.
    unseen: BTreeSet<String>,
    consequences: BTreeMap<String, BTreeSet<String>>,
    of_pods: Causes,
    of_nodes: Causes,
    /// Findings of both that need no action.
    notes: Causes,
    asked: usize,
    unasked: BTreeMap<String, Unasked>,
    not_ready: Vec<String>,
    /// Replicas of the taint controller, none of which is ready.
    controllers: Vec<String>,
    images: BTreeMap<String, usize>,
    /// Whether warnings are shown, and do not count as problems.
    pub(crate) ignores_warnings: bool,
    /// Whether notes about agents are shown whole, as for one node.
    pub(crate) shows_agents: bool,
}

impl ClusterVerdict {
    /// Nothing yet, about these pods.
    #[must_use]
    pub fn new(filter: PodFilter) -> Self {
        Self { filter, ..Self::default() }
    }

    /// A state that is not known, of a newer agent, is not a good one.
    fn count(&mut self, pod: &ScannedPod) {
        match PodState::of(&pod.state) {
            Some(PodState::LeftAlone | PodState::Unexpected) => self.outside += 1,
            Some(PodState::Unseen) => drop(self.unseen.insert(pod.subject.clone())),
            known @ (Some(
                PodState::Verified
                | PodState::Unverified
                | PodState::NotRedirected
                | PodState::Drifted
                | PodState::Interference
                | PodState::Pending
                | PodState::Sandboxed
                | PodState::Unknown,
            )
            | None) => {
                let counts = if pod.data_plane.as_deref() == Some(AMBIENT) {
                    &mut self.ambient
                } else {
                    &mut self.sidecars
                };
                counts.expected += 1;
                counts.verified += usize::from(known == Some(PodState::Verified));
            }
        }
    }

    /// The exit code: what was found counts more than what could not be asked.
    #[must_use]
    pub fn code(&self) -> u8 {
        let is_bad = |why: &Unasked| match why {
            Unasked::NoAgent(pods) => *pods > 0,
            Unasked::NotRunning(_) => true,
            Unasked::Failed(_) => false,
        };
        let least = if self.ignores_warnings { Severity::Error } else { Severity::Warning };
        let mut causes = self.of_pods.keys().chain(self.of_nodes.keys());
        let found = causes.any(|(Reverse(severity), _)| *severity >= least) || !self.not_ready.is_empty();
        let found = found || !self.controllers.is_empty();
        let is_whole = self.sidecars.is_whole() && self.ambient.is_whole();
        if found || !is_whole || self.unasked.values().any(is_bad) {
            FOUND
        } else if self.asked == 0 || self.unasked.values().any(|why| matches!(why, Unasked::Failed(_))) {
            FAILED
        } else {
            FINE
        }
    }

    /// How many pods are redirected, if any agent answered.
    #[must_use]
    pub fn headline(&self) -> String {
        let Counts { expected, verified } = self.sidecars;
        if self.asked == 0 {
            return "no agent answered, so nothing is known of any pod".to_owned();
        }
        format!("{verified} of {expected} pods redirected, verified")
    }

    /// For people.
    #[must_use]
    pub fn text(&self, layout: TextLayout) -> Printable {
        let mut paper = TextWriter::new(layout);
        let nodes = self.asked + self.unasked.len();
        let style = |is_good: bool| if is_good { TextStyle::Green } else { TextStyle::Red };
        paper.inked(0, &self.headline(), style(self.asked > 0 && self.sidecars.is_whole()));
        if self.ambient.expected > 0 {
            let Counts { expected, verified } = self.ambient;
            paper.inked(0, &headline(verified, expected), style(self.ambient.is_whole()));
        }
        let unseen = self.unseen.len();
        let unseen = if unseen > 0 { format!(", {unseen} not started") } else { String::new() };
        let outside = format!("{} outside the mesh or excluded", counted(self.outside, "pod"));
        let answered = format!("{} of {} answered", self.asked, counted(nodes, "node"));
        paper.line(0, &format!("{outside}{unseen}; {answered}"));
        // What it means comes first, then the causes.
        for (text, subjects) in &self.consequences {
            paper.gap();
            let count = counted(subjects.len(), "pod");
            paper.marked(0, "traffic: ", TextStyle::Red, &format!("{count}: {text}"));
            paper.line(2, &names(subjects));
        }
        causes(&self.of_pods, "pod", &mut paper);
        causes(&self.of_nodes, "node", &mut paper);
        let is_shown = |code: &str| self.shows_agents && code.starts_with(OF_AGENTS);
        let (of_agents, others) = self.notes.iter().partition::<Vec<_>, _>(|((_, code), _)| is_shown(code));
        for (key, cause) in of_agents {
            write_cause(key, cause, "node", MOST_OF_AGENT, &mut paper);
        }
        if !self.unasked.is_empty() || !self.not_ready.is_empty() || !self.controllers.is_empty() {
            paper.gap();
        }
        self.unasked_text(&mut paper);
        if !self.not_ready.is_empty() {
            paper.marked(0, "agents not ready: ", TextStyle::Yellow, &names(&self.not_ready));
        }
        if !self.controllers.is_empty() {
            let replicas = names(&self.controllers);
            let label = "taint controller not ready: ";
            paper.marked(0, label, TextStyle::Yellow, &format!("{NO_LEADER}: {replicas}"));
        }
        paper.gap();
        let images = self.images.iter().map(|(image, count)| format!("{count} of {image}"));
        paper.labelled(0, "agents: ", &images.collect::<Vec<_>>().join(", "));
        notes(&others, &mut paper);
        if !self.of_pods.is_empty() {
            paper.line(0, "kubectl redirect pod NAMESPACE/NAME shows what was seen of a pod");
        }
        paper.into_text()
    }

    /// Nodes without an answer, those with the same reason together.
    fn unasked_text(&self, paper: &mut TextWriter) {
        let mut by_reason: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (node, why) in &self.unasked {
            by_reason.entry(why.to_string()).or_default().push(node.clone());
        }
        for (why, nodes) in by_reason {
            let label = format!("{}: ", counted(nodes.len(), "node"));
            paper.marked(0, &label, TextStyle::Yellow, &format!("{why}: {}", names(&nodes)));
        }
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "version": VERSION,
            "redirected": self.sidecars.verified,
            "expected": self.sidecars.expected,
            "ambient": {"enrolled": self.ambient.verified, "expected": self.ambient.expected},
            "outside": self.outside,
            "unseen": self.unseen.len(),
            "consequences": self.consequences.iter()
                .map(|(text, subjects)| json!({"text": text, "subjects": subjects})).collect::<Vec<_>>(),
            "pods": causes_json(&self.of_pods),
            "nodes": causes_json(&self.of_nodes),
            "notes": causes_json(&self.notes),
            "answered": self.asked,
            "unanswered": self.unasked.iter()
                .map(|(node, why)| json!({"node": node, "why": why.to_string()})).collect::<Vec<_>>(),
            "notReady": self.not_ready,
            "taintControllersNotReady": self.controllers,
            "images": self.images,
        })
    }

    /// Takes a replica of the taint controller into account, none of which is ready.
    pub fn see_controller(&mut self, replica: &Agent) {
        let state = match &replica.state {
            Reachability::NotRunning(why) => format!(" (not running: {why})"),
            Reachability::NotReady | Reachability::Ready => String::new(),
        };
        self.controllers.push(format!("{} on {}{state}", replica.pod(), replica.node));
    }
}

impl Audience for ClusterVerdict {
    fn see(&mut self, agent: &Agent) {
        *self.images.entry(agent.image.clone()).or_default() += 1;
        if agent.state == Reachability::NotReady {
            self.not_ready.push(format!("{} on {}", agent.pod(), agent.node));
        }
    }

    fn miss(&mut self, node: &str, why: Unasked) {
        self.unasked.insert(node.to_owned(), why);
    }

    fn add(&mut self, node: &str, scan: NodeScan) {
        self.asked += 1;
        let NodeScan { version: _, node: findings, pods } = scan;
        collect(&mut self.of_nodes, &mut self.notes, node, findings);
        for pod in pods {
            if !self.filter.has(&pod.subject) {
                continue;
            }
            // A namespace without a pod has a file for a name.
            let is_pod = !pod.subject.starts_with('/');
            if is_pod {
                self.count(&pod);
            }
            let ScannedPod { subject, state: _, data_plane: _, consequences, findings } = pod;
            let subject = if is_pod { subject } else { format!("{node}:{subject}") };
            for consequence in consequences {
                self.consequences.entry(consequence).or_default().insert(subject.clone());
            }
            collect(&mut self.of_pods, &mut self.notes, &subject, findings);
        }
    }

    fn unseen(&self) -> &BTreeSet<String> {
        &self.unseen
    }

    fn wants_history(&self) -> bool {
        self.shows_agents
    }

    fn add_finding(&mut self, pod: &str, finding: ReportedFinding) {
        collect(&mut self.of_pods, &mut self.notes, pod, vec![finding]);
    }
}

/// Sorts findings into trouble and notes.
fn collect(trouble: &mut Causes, notes: &mut Causes, subject: &str, findings: Vec<ReportedFinding>) {
    for ReportedFinding { code, severity, meaning, seen, remedy } in findings {
        let causes = if severity == Severity::Note { &mut *notes } else { &mut *trouble };
        let cause = causes.entry((Reverse(severity), code)).or_default();
        // The text is the same for all.
        if cause.subjects.is_empty() {
            (cause.meaning, cause.remedy) = (meaning, remedy);
        }
        cause.subjects.entry(subject.to_owned()).or_default().extend(seen);
    }
}

fn causes(causes: &Causes, what: &str, paper: &mut TextWriter) {
    for (key, cause) in causes {
        write_cause(key, cause, what, MOST_SEEN, paper);
    }
}

fn write_cause(
    (Reverse(severity), code): &(Reverse<Severity>, String),
    cause: &Cause,
    what: &str,
    most: usize,
    paper: &mut TextWriter,
) {
    paper.gap();
    let count = counted(cause.subjects.len(), what);
    paper.marked(0, &format!("{code}: "), severity.style(), &format!("{count}: {}", cause.meaning));
    paper.line(2, &names(cause.subjects.keys()));
    seen(cause, most, paper);
    paper.labelled(2, "what to do: ", &cause.remedy);
}

/// What was seen of a cause's subjects: what most have first, and once for all that have it.
fn seen(cause: &Cause, most: usize, paper: &mut TextWriter) {
    let mut by_text: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (subject, seen) in &cause.subjects {
        for text in seen {
            by_text.entry(text).or_default().push(subject.clone());
        }
    }
    let mut all: Vec<(&str, Vec<String>)> = by_text.into_iter().collect();
    all.sort_by_key(|(_, subjects)| Reverse(subjects.len()));
    for (text, subjects) in all.iter().take(most) {
        let text = short(text, LONGEST_SEEN);
        let is_of_all = subjects.len() == cause.subjects.len();
        let text = if is_of_all { text } else { format!("{}: {text}", names(subjects)) };
        paper.labelled(2, "- ", &text);
    }
    if let Some(more) = all.len().checked_sub(most).filter(|more| *more > 0) {
        paper.labelled(2, "- ", &format!("and {more} more, which -o json has"));
    }
}

/// How many notes exist: their texts are seldom of interest, and many pods may have them.
fn notes(notes: &[(&(Reverse<Severity>, String), &Cause)], paper: &mut TextWriter) {
    let count: usize = notes.iter().map(|(_, cause)| cause.subjects.len()).sum();
    if count > 0 {
        let each = notes.iter().map(|((_, code), cause)| format!("{code} ({})", cause.subjects.len()));
        let each = each.collect::<Vec<_>>().join(", ");
        paper.line(0, &format!("{}, which -o json has: {each}", counted(count, "note")));
    }
}

fn causes_json(causes: &Causes) -> Vec<Value> {
    let one = |((Reverse(severity), code), cause): (&(Reverse<Severity>, String), &Cause)| {
        json!({
            "code": code,
            "severity": severity,
            "meaning": cause.meaning,
            "seen": cause.subjects,
            "remedy": cause.remedy,
            "subjects": cause.subjects.keys().collect::<Vec<_>>(),
        })
    };
    causes.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(node: &str, image: &str, state: Reachability) -> Agent {
        Agent {
            namespace: "mesh".to_owned(),
            name: format!("istio-cni-node-{node}"),
            node: node.to_owned(),
            container: "install-cni".to_owned(),
            image: image.to_owned(),
            state,
            restarts: None,
        }
    }

    /// A pod's name, its state, and codes with their severities.
    type Row<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);

    fn scan(pods: &[Row<'_>]) -> NodeScan {
        let pods: Vec<Value> = pods
            .iter()
            .map(|(subject, state, findings)| {
                let finding = |(code, severity): &(&str, &str)| {
                    json!({"code": code, "severity": severity, "meaning": format!("{code} means this"), "seen": [], "remedy": "do that"})
                };
                json!({"subject": subject, "state": state, "findings": findings.iter().map(finding).collect::<Vec<_>>()})
            })
            .collect();
        serde_json::from_value(json!({"version": 1, "node": [], "pods": pods})).expect("a scan")
    }

    #[test]
    fn a_sound_cluster_is_fine() {
        let mut verdict = ClusterVerdict::default();
        verdict.see(&agent("a", "hub/install-cni:0.1.0", Reachability::Ready));
        verdict.add(
            "a",
            scan(&[
                ("shop/cart", "verified", &[("dns-captured", "note")]),
                ("kube-system/dns", "left-alone", &[]),
            ]),
        );
        verdict.miss("gpu", Unasked::NoAgent(0));
        assert_eq!(verdict.code(), FINE);
        let text = verdict.text(TextLayout::default());
        assert!(text.starts_with("1 of 1 pods redirected, verified\n1 pod outside the mesh or excluded; 1 of 2 nodes answered\n"), "{text}");
        assert!(text.contains("1 node: no agent, and no mesh pods: gpu\n"), "{text}");
        assert!(
            text.contains(
                "agents: 1 of hub/install-cni:0.1.0\n1 note, which -o json has: dns-captured (1)\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn the_rest_is_listed_by_cause_with_the_first_names() {
        let mut verdict = ClusterVerdict::default();
        let names: Vec<String> = (0..42).map(|number| format!("shop/cart-{number:02}")).collect();
        let bad: &[(&str, &str)] = &[("not-redirected", "error"), ("misspelt-setting", "warning")];
        let pods: Vec<_> = names.iter().map(|name| (name.as_str(), "not-redirected", bad)).collect();
        verdict.add("a", scan(&pods));
        verdict.add(
            "b",
            scan(&[
                ("shop/web", "verified", &[]),
                ("/run/netns/x", "unexpected", &[("unowned-rules", "warning")]),
            ]),
        );
        assert_eq!(verdict.code(), FOUND);
        let text = verdict.text(TextLayout::default());
        assert!(text.starts_with("1 of 43 pods redirected, verified\n"), "{text}");
        let unwrapped = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(unwrapped.contains("shop/cart-03, shop/cart-04 and 37 more"), "{text}");
        assert!(text.contains("not-redirected: 42 pods: not-redirected means this\n"), "{text}");
        assert!(text.find("not-redirected:") < text.find("misspelt-setting:"), "{text}");
        assert!(text.contains("b:/run/netns/x\n"), "{text}");
        assert_eq!(verdict.json()["pods"][0]["subjects"].as_array().map(Vec::len), Some(42));
    }

    #[test]
    fn a_cause_shows_what_was_seen_of_whom() {
        let finding = |code: &str, severity: &str, seen: &[&str]| json!({"code": code, "severity": severity, "meaning": "m", "seen": seen, "remedy": "r"});
        let node = |findings: Vec<Value>| {
            serde_json::from_value(json!({"version": 1, "node": findings, "pods": []})).expect("a scan")
        };
        let mut verdict = ClusterVerdict::default();
        for name in ["a", "b"] {
            verdict
                .add(name, node(vec![finding("agent-not-ready", "error", &["no entry in 10-a.conflist"])]));
        }
        verdict.add("c", node(vec![finding("entry-unreadable", "error", &["05-new.conflist is cut off"])]));
        verdict.add("d", node(vec![finding("family-not-captured", "note", &["IPv6"])]));
        // An older agent has no such list.
        verdict.add(
            "e",
            node(vec![
                json!({"code": "agent-not-ready", "severity": "error", "meaning": "m", "remedy": "r"}),
            ]),
        );
        let text = verdict.text(TextLayout::default());
        assert!(
            text.contains("\n  a, b, e\n  - a, b: no entry in 10-a.conflist\n  what to do: r\n"),
            "{text}"
        );
        assert!(text.contains("\n  c\n  - 05-new.conflist is cut off\n  what to do: r\n"), "{text}");
        assert!(text.contains("\n1 note, which -o json has: family-not-captured (1)\n"), "{text}");
        let json = verdict.json();
        assert_eq!(
            json["nodes"][0]["seen"],
            json!({"a": ["no entry in 10-a.conflist"], "b": ["no entry in 10-a.conflist"], "e": []})
        );
        assert_eq!(json["nodes"][1]["seen"], json!({"c": ["05-new.conflist is cut off"]}));
        assert_eq!(json["notes"][0]["seen"], json!({"d": ["IPv6"]}));
    }

    #[test]
    fn notes_about_an_agent_are_shown_where_one_node_is_asked() {
        let of = |shows_agents: bool| {
            let mut verdict = ClusterVerdict::default();
            if shows_agents {
                verdict.shows_agents = true;
            }
            verdict.add("a", scan(&[("shop/cart", "verified", &[("dns-captured", "note")])]));
            verdict.add_finding("a", seen_of_agent(vec!["restarted 4 times".to_owned()]));
            assert_eq!(verdict.code(), FINE);
            assert_eq!(verdict.json()["notes"][0]["seen"], json!({"a": ["restarted 4 times"]}));
            verdict.text(TextLayout::default())
        };
        let (whole, counted) = (of(true), of(false));
        assert!(whole.contains("\n  a\n  - restarted 4 times\n"), "{whole}");
        assert!(whole.contains("\n1 note, which -o json has: dns-captured (1)\n"), "{whole}");
        assert!(
            counted.contains("2 notes, which -o json has: agent-events (1), dns-captured (1)"),
            "{counted}"
        );
    }

    #[test]
    fn what_was_seen_of_many_is_cut_short_for_people_and_whole_for_programs() {
        let pods: Vec<Value> = (0..1000)
            .map(|number| json!({"subject": format!("shop/cart-{number:03}"), "state": "drifted", "findings": [
                {"code": "rules-differ", "severity": "error", "meaning": "m", "seen": [format!("{number}: {}", "x".repeat(5000))], "remedy": "r"}]}))
            .collect();
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", serde_json::from_value(json!({"version": 1, "pods": pods})).expect("a scan"));
        let text = verdict.text(TextLayout { width: 40, colour: false });
        assert!(text.len() < 8_000 && text.contains("- and 995 more, which -o json has"), "{text}");
        assert_eq!(verdict.json()["pods"][0]["seen"].as_object().map(serde_json::Map::len), Some(1000));
    }

    #[test]
    fn what_could_not_be_asked_is_told_with_its_reason() {
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", scan(&[("shop/cart", "verified", &[])]));
        verdict.miss("b", Unasked::Failed("no response within 20s".to_owned()));
        assert_eq!(verdict.code(), FAILED);
        verdict.miss("c", Unasked::NotRunning("CrashLoopBackOff".to_owned()));
        assert_eq!(verdict.code(), FOUND);
        verdict.see(&agent("d", "hub/install-cni:0.0.9", Reachability::NotReady));
        let text = verdict.text(TextLayout::default());
        assert!(text.contains("1 node: agent not running: CrashLoopBackOff: c\n"), "{text}");
        assert!(text.contains("1 node: no answer: no response within 20s: b\n"), "{text}");
        assert!(text.contains("agents not ready: mesh/istio-cni-node-d on d\n"), "{text}");
        assert_eq!(ClusterVerdict::default().code(), FAILED);
    }

    #[test]
    fn without_any_answer_no_pod_is_called_redirected() {
        let mut verdict = ClusterVerdict::default();
        verdict.miss("a", Unasked::Failed("no response within 20s".to_owned()));
        assert_eq!(verdict.code(), FAILED);
        let text = verdict.text(TextLayout::default());
        assert!(text.starts_with("no agent answered, so nothing is known of any pod\n"), "{text}");
        assert!(text.contains("0 of 1 node answered") && !text.contains("verified"), "{text}");
        // That agents do not run is found out without their answers.
        verdict.miss("b", Unasked::NotRunning("CrashLoopBackOff".to_owned()));
        assert_eq!(verdict.code(), FOUND);
    }

    #[test]
    fn warnings_can_be_ignored_and_pods_that_are_not_redirected_cannot() {
        let of = |state: &str, severity: &str| {
            let mut verdict = ClusterVerdict::default();
            verdict.add("a", scan(&[("shop/cart", state, &[("some-cause", severity)])]));
            let strict = verdict.code();
            verdict.ignores_warnings = true;
            assert!(verdict.text(TextLayout::default()).contains("some-cause"), "it is shown all the same");
            (strict, verdict.code())
        };
        assert_eq!(of("verified", "note"), (FINE, FINE));
        assert_eq!(of("verified", "warning"), (FOUND, FINE));
        assert_eq!(of("verified", "error"), (FOUND, FOUND));
        assert_eq!(of("pending", "warning"), (FOUND, FOUND));
    }

    #[test]
    fn mesh_pods_on_a_node_without_an_agent_are_a_problem() {
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", scan(&[]));
        assert_eq!(verdict.code(), FINE);
        verdict.miss("b", Unasked::NoAgent(1));
        assert_eq!(verdict.code(), FOUND);
    }

    #[test]
    fn an_agent_that_is_not_ready_is_a_problem() {
        let mut verdict = ClusterVerdict::default();
        verdict.see(&agent("a", "i", Reachability::NotReady));
        verdict.add("a", scan(&[]));
        assert_eq!(verdict.code(), FOUND);
    }

    #[test]
    fn a_taint_controller_of_which_no_replica_is_ready_is_a_problem() {
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", scan(&[]));
        verdict.see_controller(&agent("a", "i", Reachability::NotReady));
        verdict.see_controller(&agent("b", "i", Reachability::NotRunning("CrashLoopBackOff".to_owned())));
        assert_eq!(verdict.code(), FOUND);
        let replicas =
            ["mesh/istio-cni-node-a on a", "mesh/istio-cni-node-b on b (not running: CrashLoopBackOff)"];
        assert_eq!(verdict.json()["taintControllersNotReady"], json!(replicas));
        let text = verdict.text(TextLayout::default());
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(&format!("{NO_LEADER}: {}", replicas.join(", "))), "{text}");
    }

    #[test]
    fn what_becomes_of_traffic_comes_first_and_pods_without_a_network_do_not_count() {
        let mut bad =
            scan(&[("shop/cart", "drifted", &[("rules-differ", "error")]), ("shop/new", "unseen", &[])]);
        bad.pods[0].consequences = vec!["all outbound traffic bypasses the proxy".to_owned()];
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", bad);
        let text = verdict.text(TextLayout::default());
        assert!(
            text.starts_with(
                "0 of 1 pods redirected, verified\n0 pods outside the mesh or excluded, 1 not started;"
            ),
            "{text}"
        );
        assert!(
            text.contains("traffic: 1 pod: all outbound traffic bypasses the proxy\n  shop/cart\n"),
            "{text}"
        );
        assert!(text.find("traffic:") < text.find("rules-differ:"), "{text}");
    }

    #[test]
    fn a_pod_that_cannot_start_is_a_problem_and_one_that_has_not_yet_is_none() {
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", scan(&[("shop/new", "unseen", &[]), ("shop/next", "unseen", &[])]));
        assert_eq!((verdict.code(), verdict.unseen().len()), (FINE, 2));
        verdict.add_finding("shop/new", not_set_up("403"));
        assert_eq!(verdict.code(), FOUND);
        assert_eq!(verdict.json()["pods"][0]["subjects"], json!(["shop/new"]));
    }

    #[test]
    fn a_state_of_a_newer_agent_is_no_good_one() {
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", scan(&[("shop/cart", "enchanted", &[])]));
        assert_eq!((verdict.sidecars, verdict.code()), (Counts { expected: 1, verified: 0 }, FOUND));
    }

    #[test]
    fn pods_of_ambient_mode_have_a_line_of_their_own() {
        let mut mixed = scan(&[
            ("shop/cart", "verified", &[]),
            ("shop/web", "verified", &[]),
            ("shop/api", "pending", &[("not-enrolled", "error")]),
            ("shop/new", "unseen", &[]),
        ]);
        for pod in &mut mixed.pods[1..] {
            pod.data_plane = Some(AMBIENT.to_owned());
        }
        let mut verdict = ClusterVerdict::default();
        verdict.add("a", mixed);
        let text = verdict.text(TextLayout::default());
        let lines =
            "1 of 1 pods redirected, verified\n1 of 2 ambient pods enrolled, verified\n0 pods outside";
        assert!(text.starts_with(lines) && text.contains("not-enrolled: 1 pod: "), "{text}");
        assert_eq!(verdict.code(), FOUND);
        assert_eq!(verdict.json()["ambient"], json!({"enrolled": 1, "expected": 2}));
        assert_eq!((&verdict.json()["redirected"], &verdict.json()["expected"]), (&json!(1), &json!(1)));
    }

    #[test]
    fn only_the_pods_that_are_asked_for_count() {
        let pods = scan(&[
            ("shop/cart", "verified", &[]),
            ("shop/web", "unknown", &[("bad-settings", "error")]),
            ("pay/web", "verified", &[]),
        ]);
        let of = |namespace: Option<&str>, names: Option<&[&str]>| {
            let names = names.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
            let mut verdict =
                ClusterVerdict::new(PodFilter { namespace: namespace.map(str::to_owned), names });
            verdict.add("a", pods.clone());
            (verdict.sidecars.verified, verdict.sidecars.expected, verdict.code())
        };
        assert_eq!(of(None, None), (2, 3, FOUND));
        assert_eq!(of(Some("pay"), None), (1, 1, FINE));
        assert_eq!(of(Some("shop"), Some(&["shop/cart"])), (1, 1, FINE));
    }
}
