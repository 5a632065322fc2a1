//! Every pod of a node in one pass. Nothing is changed.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use cni_core::enrolment_report::headline;
use pod_netns::{MountedNetns, NamespaceIndex, SurveyError};
use presentation::node_scan::{NodeScan, ScannedPod};
use reasons::PodState;
use redirect_core::plan::DataPlane;
use serde_json::{Value, json};

use crate::cause::{Cause, PodFinding};
use crate::diagnosis::{PodDecision, findings, state};
use crate::inspect::Inspection;
use crate::node::NodeConfiguration;
use crate::packed::{Packed, PackedPods};
use crate::pod::Pod;
use crate::printable::{Printable, harmless};
use crate::report::{self, VERSION};
use crate::show::{read_or_cause, unfound};
use crate::text_writer::{TextLayout, TextStyle, TextWriter};

/// A pod, or a namespace without a pod.
#[derive(Debug)]
pub struct ScanEntry {
    /// Its name; for a namespace without a pod, its file.
    pub subject: String,
    /// How it stands.
    pub state: PodState,
    /// What should have its traffic; none if it is not redirected, or the pod is unknown.
    pub data_plane: Option<DataPlane>,
    /// What that means for traffic, a sentence each.
    pub consequences: Vec<String>,
    /// What is wrong.
    pub findings: Vec<PodFinding>,
}

/// All that was found.
#[derive(Debug)]
pub struct Scan {
    /// What is wrong with the node itself.
    pub node: Vec<PodFinding>,
    /// Its pods in the order of their names, then namespaces without a pod that hold rules of the mesh.
    pub entries: Vec<ScanEntry>,
}

/// What must be known of a pod before it is checked: its addresses, whether it is on the host's network, whether it is over.
type Outline = (Vec<IpAddr>, bool, bool);

impl Scan {
    /// Checks every pod, whose namespaces are those of a directory.
    ///
    /// # Errors
    /// The directory has nothing that can be looked into.
    pub fn of(pods: &[Pod], directory: &Path, node: &NodeConfiguration) -> Result<Self, SurveyError> {
        let outline = |pod: &Pod| (pod.addresses.clone(), pod.host_network, pod.is_over());
        let outlines: Vec<Outline> = pods.iter().map(outline).collect();
        Self::of_each(&outlines, |index| pods.get(index).map(Cow::Borrowed), directory, node)
    }

    /// The same of pods that are packed.
    ///
    /// # Errors
    /// As [`Scan::of`].
    pub fn of_packed(
        packed: &PackedPods,
        directory: &Path,
        node: &NodeConfiguration,
    ) -> Result<Self, SurveyError> {
        let outline = |pod: &Packed| (pod.addresses.clone(), pod.host_network, pod.is_over);
        let outlines: Vec<Outline> = packed.pods.iter().map(outline).collect();
        let pod = |index: usize| packed.pods.get(index)?.unpacked(&packed.cluster).map(Cow::Owned);
        Self::of_each(&outlines, pod, directory, node)
    }

    fn of_each<'a>(
        outlines: &[Outline],
        pod: impl Fn(usize) -> Option<Cow<'a, Pod>> + Sync,
        directory: &Path,
        node: &NodeConfiguration,
    ) -> Result<Self, SurveyError> {
        let here: Vec<(usize, &[IpAddr])> = outlines
            .iter()
            .enumerate()
            .filter(|(_, (_, host_network, is_over))| !host_network && !is_over)
            .map(|(index, (addresses, ..))| (index, addresses.as_slice()))
            .collect();
        let wanted: BTreeSet<IpAddr> =
            here.iter().flat_map(|(_, addresses)| addresses.iter().copied()).collect();
        let survey = NamespaceIndex::of(directory, &wanted)?;
        let looked = in_parallel(&here, |(index, _)| pod(*index).map(|pod| of_pod(&pod, &survey, node)));
        let mut entries: Vec<ScanEntry> = looked.into_iter().flatten().collect();
        // One that belongs to a pod, or may belong to one of two, is reported there.
        let known: BTreeSet<PathBuf> = here
            .iter()
            .filter_map(|(_, addresses)| survey.find(addresses).ok())
            .map(|one| one.path().to_owned())
            .collect();
        let others: Vec<&MountedNetns> = survey
            .sandboxes()
            .iter()
            .filter(|one| !known.contains(one.path()) && one.addresses().is_empty())
            .collect();
        let strangers = in_parallel(&others, |sandbox| of_nobody(sandbox, node)).into_iter().flatten();
        let beside = outlines.iter().enumerate().filter(|(_, (_, host_network, _))| *host_network);
        let beside = beside.filter_map(|(index, _)| pod(index)).filter(|pod| pod.proxy().is_some());
        entries.extend(beside.map(|pod| {
            let decided = node.decide_without_namespace(&pod);
            let all = findings(Some(&pod), &decided, None);
            entry(pod.name.to_string(), None, &decided, None, all)
        }));
        entries.sort_by(|one, other| one.subject.cmp(&other.subject));
        entries.extend(strangers);
        let mut of_node = node.findings.clone();
        of_node.extend(beside_capture(&mut entries));
        Ok(Self { node: of_node, entries })
    }

    /// All findings.
    pub fn findings(&self) -> impl Iterator<Item = &PodFinding> {
        self.node.iter().chain(self.entries.iter().flat_map(|entry| &entry.findings))
    }

    fn counts(&self) -> BTreeMap<PodState, usize> {
        let mut counts: BTreeMap<PodState, usize> = PodState::ALL.iter().map(|state| (*state, 0)).collect();
        for entry in &self.entries {
            *counts.entry(entry.state).or_default() += 1;
        }
        counts
    }

    /// How many pods of ambient mode are enrolled, and how many have a network.
    fn enrolled(&self) -> (usize, usize) {
        let of_ambient = |entry: &&ScanEntry| entry.data_plane == Some(DataPlane::Ambient);
        let started = self.entries.iter().filter(of_ambient).filter(|one| one.state != PodState::Unseen);
        let states: Vec<PodState> = started.map(|entry| entry.state).collect();
        (states.iter().filter(|state| **state == PodState::Verified).count(), states.len())
    }

    /// How many pods of ambient mode limit what is captured.
    fn limited(&self) -> usize {
        let is_limited = |entry: &&ScanEntry| {
            entry.data_plane == Some(DataPlane::Ambient)
                && entry.findings.iter().any(|finding| finding.cause == Cause::Excluded)
        };
        self.entries.iter().filter(is_limited).count()
    }

    /// For people: what is wrong, and how many are as they should be.
    #[must_use]
    pub fn text(&self, layout: TextLayout) -> Printable {
        let mut paper = TextWriter::new(layout);
        report::listed(&self.node, &mut paper);
        let is_troubled = |entry: &&ScanEntry| entry.findings.iter().any(PodFinding::is_trouble);
        let row = |entry: &ScanEntry| {
            let told = entry.findings.iter().filter(|one| one.is_trouble());
            let causes: Vec<&str> = told.map(|finding| finding.cause.code()).collect();
            vec![entry.state.word().to_owned(), entry.subject.clone(), causes.join(", ")]
        };
        let rows: Vec<Vec<String>> = self.entries.iter().filter(is_troubled).map(row).collect();
        if !rows.is_empty() {
            paper.table(&["STATE", "POD", "CAUSE"], &rows);
        }
        let counts = self.counts();
        let told = counts.iter().filter(|(_, count)| **count > 0);
        let told: Vec<String> = told.map(|(state, count)| format!("{count} {}", state.word())).collect();
        let told = if told.is_empty() { String::new() } else { format!(": {}", told.join(", ")) };
        paper.line(0, &format!("{} pods{told}", self.entries.len()));
        let (enrolled, wanted) = self.enrolled();
        if wanted > 0 {
            paper.line(0, &headline(enrolled, wanted));
        }
        let limited = self.limited();
        if limited > 0 {
            paper.line(0, &format!("ambient pods that limit what is captured, by annotation: {limited}"));
        }
        if !rows.is_empty() {
            paper.line(
                0,
                "redirectctl why CAUSE explains a cause, redirectctl pod NAMESPACE/NAME shows what was seen",
            );
        } else if self.findings().any(PodFinding::is_trouble) {
            paper.line(0, "redirectctl why CAUSE explains a cause");
        } else {
            paper.inked(0, "nothing is wrong", TextStyle::Green);
        }
        paper.into_text()
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!(self.document())
    }

    fn document(&self) -> NodeScan {
        let reported = |findings: &[PodFinding]| findings.iter().map(report::reported).collect();
        let pod = |entry: &ScanEntry| ScannedPod {
            subject: entry.subject.clone(),
            state: entry.state.word().to_owned(),
            data_plane: entry.data_plane.map(|of| report::data_plane(of).to_owned()),
            consequences: entry.consequences.clone(),
            findings: reported(&entry.findings),
        };
        NodeScan {
            version: VERSION,
            node: reported(&self.node),
            pods: self.entries.iter().map(pod).collect(),
        }
    }

    /// For Prometheus, as text.
    #[must_use]
    pub fn prometheus(&self) -> Printable {
        let mut text = String::from(
            "# HELP redirectctl_pods Pods of the node by how they stand.\n# TYPE redirectctl_pods gauge\n",
        );
        for (state, count) in self.counts() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "redirectctl_pods{{state=\"{}\"}} {count}", state.word());
        }
        let (enrolled, wanted) = self.enrolled();
        text.push_str(
            "# HELP redirectctl_ambient_pods Pods of the node in ambient mode, by whether they are enrolled.\n# TYPE redirectctl_ambient_pods gauge\n",
        );
        for (state, count) in [("enrolled", enrolled), ("pending", wanted - enrolled)] {
            let _ = writeln!(text, "redirectctl_ambient_pods{{state=\"{state}\"}} {count}");
        }
        text.push_str(
            "# HELP redirectctl_finding Something wrong, or worth knowing, about a pod.\n# TYPE redirectctl_finding gauge\n",
        );
        let of_node = self.node.iter().map(|finding| ("", finding));
        let of_pods = self
            .entries
            .iter()
            .flat_map(|entry| entry.findings.iter().map(|one| (entry.subject.as_str(), one)));
        for (subject, finding) in of_node.chain(of_pods) {
            let (code, severity) = (finding.cause.code(), finding.cause.severity().word());
            let subject = harmless(subject).replace('\\', "\\\\").replace('"', "\\\"");
            let _ = writeln!(
                text,
                "redirectctl_finding{{pod=\"{subject}\",code=\"{code}\",severity=\"{severity}\"}} 1"
            );
        }
        Printable::lines(&text)
    }
}

/// That settings leave a family alone is advice about the node, where many pods have the same settings, and no fault of each.
fn beside_capture(entries: &mut [ScanEntry]) -> Option<PodFinding> {
    let mut pods = Vec::new();
    for entry in entries {
        let had = entry.findings.len();
        entry.findings.retain(|finding| finding.cause != Cause::FamilyNotCaptured);
        if entry.findings.len() < had {
            pods.push(entry.subject.as_str());
        }
    }
    let first = pods.first()?;
    let seen = match pods.len() - 1 {
        0 => format!("pod {first}"),
        others => format!("pod {first} and {others} more"),
    };
    Some(PodFinding::new(Cause::FamilyNotCaptured, seen))
}

fn entry(
    subject: String,
    data_plane: Option<DataPlane>,
    decided: &PodDecision,
    seen: Option<&Inspection>,
    findings: Vec<PodFinding>,
) -> ScanEntry {
    let consequences = seen.map(Inspection::consequences).unwrap_or_default();
    ScanEntry { subject, data_plane, state: state(decided, seen, &findings), consequences, findings }
}

fn of_pod(pod: &Pod, survey: &NamespaceIndex, node: &NodeConfiguration) -> ScanEntry {
    let looked = match node.processes.find(pod, survey) {
        Ok(sandbox) => sandbox.open().map_err(|error| PodFinding::new(Cause::Unreadable, error.to_string())),
        Err(error) => Err(unfound(pod, &error)),
    };
    let (seen, decided, unknown) = match looked.and_then(|netns| read_or_cause(&netns, Some(pod), node)) {
        Ok((seen, decided)) => (Some(seen), decided, None),
        Err(unknown) => (None, node.decide_without_namespace(pod), Some(unknown)),
    };
    let mut found = findings(Some(pod), &decided, seen.as_ref());
    node.add_findings(pod, &decided, &mut found);
    let mut one = entry(pod.name.to_string(), node.data_plane(pod), &decided, seen.as_ref(), found);
    // A pod that is not redirected, or has no address yet, needs no namespace for that.
    if let (PodState::Unknown, Some(unknown)) = (one.state, unknown) {
        one.findings.insert(0, unknown);
    }
    one
}

/// A namespace without a pod is reported only if it holds rules of the mesh.
fn of_nobody(sandbox: &MountedNetns, node: &NodeConfiguration) -> Option<ScanEntry> {
    let netns = sandbox.open().ok()?;
    let (seen, decided) = read_or_cause(&netns, None, node).ok()?;
    if seen.in_force.is_empty() {
        return None;
    }
    let found = vec![PodFinding::new(Cause::Unowned, seen.backends())];
    Some(entry(sandbox.path().display().to_string(), None, &decided, Some(&seen), found))
}

/// Does something with every item, with one thread per processor; the answers are in the order of the items.
fn in_parallel<T: Sync, U: Send>(items: &[T], work: impl Fn(&T) -> U + Sync) -> Vec<U> {
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(8);
    let next = AtomicUsize::new(0);
    let mut done: Vec<(usize, U)> = thread::scope(|scope| {
        let worker = || {
            let mut mine = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(index) else { return mine };
                mine.push((index, work(item)));
            }
        };
        // Where no thread can be made, this one does it all.
        let more = (1..threads).map_while(|_| thread::Builder::new().spawn_scoped(scope, worker).ok());
        let workers: Vec<_> = more.collect();
        let mut done = worker();
        for worker in workers {
            done.extend(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, answer)| answer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::NodeAmbientDefaults;

    #[test]
    fn trouble_of_the_node_alone_is_trouble() {
        let text = |node: Vec<PodFinding>| Scan { node, entries: Vec::new() }.text(TextLayout::default());
        let found = |cause| vec![PodFinding::new(cause, "seen")];
        let trouble = text(found(Cause::EntryUnreadable));
        assert!(
            !trouble.contains("nothing is wrong") && trouble.contains("redirectctl why CAUSE"),
            "{trouble}"
        );
        let note = text(found(Cause::FamilyNotCaptured));
        assert_eq!(note.matches("nothing is wrong").count(), 1, "{note}");
    }

    #[test]
    fn pods_of_ambient_mode_that_limit_what_is_captured_are_counted_where_that_counts() {
        let pod = json!({"metadata": {"namespace": "shop", "name": "web", "labels": {"istio.io/dataplane-mode": "ambient"},
            "annotations": {"traffic.istio.io/excludeOutboundPorts": "3306"}}, "spec": {"containers": []}});
        let pod = Pod::from_json(&pod).expect("a pod");
        let text = |scope: &str| {
            let env = |name: &str| (name == "AMBIENT_CAPTURE_SCOPE").then(|| scope.to_owned());
            let node = NodeConfiguration {
                ambient: NodeAmbientDefaults::of_agent(env),
                ..NodeConfiguration::default()
            };
            let decided = node.decide_without_namespace(&pod);
            let found = findings(Some(&pod), &decided, None);
            let entry = entry(pod.name.to_string(), node.data_plane(&pod), &decided, None, found);
            let told: Vec<String> = entry.findings.iter().map(|one| one.seen.join(", ")).collect();
            (Scan { node: Vec::new(), entries: vec![entry] }.text(TextLayout::default()), told.join("; "))
        };
        let (all, told) = text("true");
        assert!(all.contains("ambient pods that limit what is captured, by annotation: 1"), "{all}");
        assert!(told.contains("traffic.istio.io/excludeOutboundPorts: \"3306\""), "{told}");
        let (all, told) = text("false");
        assert!(!all.contains("limit") && !told.contains("3306"), "{all} {told}");
    }

    #[test]
    fn a_name_cannot_make_a_sample_of_its_own() {
        let decided = PodDecision::Unknown;
        let name = "\u{1b}[31m\"} 1\nredirectctl_pods{state=\"x\"} 9\\";
        let found = vec![PodFinding::new(Cause::NotRedirected, "")];
        let scan =
            Scan { node: Vec::new(), entries: vec![entry(name.to_owned(), None, &decided, None, found)] };
        let text = scan.prometheus();
        let samples: Vec<&str> =
            text.lines().filter(|line| line.starts_with("redirectctl_finding{")).collect();
        assert_eq!(samples.len(), 1, "{text}");
        assert!(!text.contains('\u{1b}') && !text.lines().any(|line| line.ends_with(" 9\\")), "{text}");
        assert!(samples[0].ends_with("\\\\\",code=\"not-redirected\",severity=\"error\"} 1"), "{text}");
    }
}
