//! What is known of one pod or network namespace, as text and as JSON.

use std::path::PathBuf;

use presentation::node_scan::ReportedFinding;
use reasons::{PodState, ReasonDoc, linked};
use redirect_core::plan::DataPlane;
use redirect_core::pod::Decision;
use redirect_core::settings::{Key, RawSettings, Source};
use redirect_core::{Families, Family};
use serde_json::{Value, json};

use crate::cause::{PodFinding, Severity};
use crate::diagnosis::{PodDecision, state};
use crate::inspect::Inspection;
use crate::printable::Printable;
use crate::text_writer::{TextLayout, TextStyle, TextWriter, short};
use crate::{FINE, FOUND};

pub use presentation::VERSION;

/// The default ports of a proxy, shown without a plan.
const USUAL_PORTS: [u16; 3] = [15001, 15006, 15053];

/// How much of a setting's value text for people shows.
const LONGEST_VALUE: usize = 200;

/// What is known of one pod or network namespace.
#[derive(Debug)]
pub struct Report {
    /// The pod's name, or the namespace's file.
    pub subject: String,
    /// The file of the namespace, where it is known.
    pub netns: Option<PathBuf>,
    /// What is to be done with it.
    pub decided: PodDecision,
    /// The plugins of the node in their order, and their file.
    pub order: Option<(PathBuf, Vec<String>)>,
    /// What was seen.
    pub inspection: Option<Inspection>,
    /// What is wrong.
    pub findings: Vec<PodFinding>,
}

/// The word for a data plane.
#[must_use]
pub const fn data_plane(data_plane: DataPlane) -> &'static str {
    match data_plane {
        DataPlane::Sidecar => "sidecar",
        DataPlane::Ambient => "ambient",
    }
}

/// The exit code for findings: notes are not trouble.
#[must_use]
pub fn code<'a>(findings: impl IntoIterator<Item = &'a PodFinding>) -> u8 {
    let is_bad = findings.into_iter().any(PodFinding::is_trouble);
    if is_bad { FOUND } else { FINE }
}

impl Report {
    /// For people.
    #[must_use]
    pub fn text(&self, layout: TextLayout) -> Printable {
        let mut paper = TextWriter::new(layout);
        let (verdict, style) = self.verdict();
        paper.inked(0, &verdict, style);
        paper.heading(&self.subject);
        self.decision(&mut paper);
        if let Some((file, order)) = &self.order {
            paper.labelled(2, "plugins    ", &format!("{} ({})", order.join(", "), file.display()));
        }
        if let Some(netns) = &self.netns {
            paper.labelled(2, "namespace  ", &netns.display().to_string());
        }
        if let Some(seen) = &self.inspection {
            paper.labelled(2, "addresses  ", &list(&seen.addresses, ", "));
            paper.labelled(2, "rules      ", &in_force(seen));
            paper.labelled(2, "listeners  ", &self.listeners(seen));
        }
        self.settings(&mut paper);
        // What it means comes first, then the causes.
        for consequence in self.consequences() {
            paper.marked(0, "traffic  ", TextStyle::Red, &consequence);
        }
        listed(&self.findings, &mut paper);
        paper.into_text()
    }

    /// How it stands, unless it was compared with nothing.
    fn state(&self) -> Option<PodState> {
        let is_compared = !matches!(self.decided, PodDecision::Unknown);
        is_compared.then(|| state(&self.decided, self.inspection.as_ref(), &self.findings))
    }

    /// How it stands in words, and how many findings follow.
    fn verdict(&self) -> (String, TextStyle) {
        let worst = self.findings.iter().map(|finding| finding.cause.severity()).max();
        let is_trouble = worst.is_some_and(|worst| worst > Severity::Note);
        let words = match self.state() {
            None => "nothing was compared: no pod was given",
            Some(PodState::Verified) => "redirected, verified now",
            Some(PodState::Unverified) => "redirected when it was checked last",
            Some(PodState::LeftAlone) if is_trouble => "not redirected",
            Some(PodState::LeftAlone) => "not redirected, as intended",
            Some(PodState::NotRedirected) => "not redirected",
            Some(PodState::Unexpected) => "redirected, and should not be",
            Some(PodState::Drifted) => "redirected otherwise than planned",
            Some(PodState::Interference) => "redirected, and rules of other programs interfere",
            Some(PodState::Pending) => "rules as planned, the rest not verified",
            Some(PodState::Sandboxed) => "not redirected: its runtime is sandboxed",
            Some(PodState::Unknown) if is_trouble => "cannot determine whether it is redirected",
            Some(PodState::Unknown) => "not checked",
            Some(PodState::Unseen) => "not started, so nothing can be checked",
        };
        let style = match worst {
            Some(Severity::Error) => TextStyle::Red,
            Some(Severity::Warning) => TextStyle::Yellow,
            Some(Severity::Note) | None => TextStyle::Green,
        };
        (words.to_owned() + &self.counted(), style)
    }

    /// How many findings of each severity follow, the worst first.
    fn counted(&self) -> String {
        let count = |severity: Severity| {
            let count = self.findings.iter().filter(|one| one.cause.severity() == severity).count();
            let plural = if count == 1 { "" } else { "s" };
            (count > 0).then(|| format!("{count} {}{plural}", severity.word()))
        };
        let all = [Severity::Error, Severity::Warning, Severity::Note].into_iter().filter_map(count);
        let all = all.collect::<Vec<_>>().join(", ");
        if all.is_empty() { all } else { format!("; {all}") }
    }

    fn consequences(&self) -> Vec<String> {
        self.inspection.as_ref().map(Inspection::consequences).unwrap_or_default()
    }

    fn decision(&self, paper: &mut TextWriter) {
        let told = match &self.decided {
            PodDecision::Redirect(redirect, _) => {
                format!("to be redirected: {}, {}", redirect.mode().word(), families(redirect.families()))
            }
            PodDecision::Ambient(redirect, _) => {
                format!("to be redirected to the node's ztunnel: {}", families(redirect.families()))
            }
            PodDecision::Skip(reason) => {
                format!("not to be redirected: {} ({})", reason.explanation(), reason.word())
            }
            PodDecision::HostNetwork => {
                "none: the pod is on the host's network, and no plugin is asked about it".to_owned()
            }
            PodDecision::Wrong(_) => "none: its settings cannot be understood".to_owned(),
            PodDecision::Unknown => {
                "unknown: give the pod with --file, and rules are compared with its plan".to_owned()
            }
        };
        paper.labelled(2, "decision   ", &told);
    }

    fn settings(&self, paper: &mut TextWriter) {
        let settings = self.decided.settings().into_iter().flat_map(RawSettings::said);
        let line = |(key, value, source): (Key, &str, Source)| {
            let value = if value.is_empty() { "(none)".to_owned() } else { short(value, LONGEST_VALUE) };
            format!("{} = {value}  [{source}]", key.setting().name())
        };
        paper.listed(2, "settings   ", settings.map(line));
    }

    /// Who listens on the ports that the plan redirects to.
    fn listeners(&self, seen: &Inspection) -> String {
        let ports: Vec<u16> = match self.decided.plan() {
            Some(plan) => crate::diagnosis::served_ports(&plan).into_keys().collect(),
            None => USUAL_PORTS.to_vec(),
        };
        let of = |port: u16| {
            let on = seen.listeners.iter().filter(|listener| listener.port == port);
            let who: Vec<String> =
                on.map(|listener| format!("{} user {}", listener.protocol.name(), listener.user)).collect();
            format!("{port}: {}", if who.is_empty() { "no one".to_owned() } else { who.join(", ") })
        };
        ports.into_iter().map(of).collect::<Vec<_>>().join("; ")
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        let decision = match &self.decided {
            PodDecision::Redirect(redirect, _) => {
                serde_json::to_value(Decision::Redirect(redirect.clone())).ok()
            }
            PodDecision::Skip(reason) => serde_json::to_value(Decision::Skip(*reason)).ok(),
            PodDecision::Ambient(..)
            | PodDecision::HostNetwork
            | PodDecision::Wrong(_)
            | PodDecision::Unknown => None,
        };
        let settings = self.decided.settings().into_iter().flat_map(RawSettings::said);
        let settings: Vec<Value> = settings
            .map(|(key, value, source)| {
                json!({"setting": key.setting().name(), "value": value, "source": source.to_string()})
            })
            .collect();
        let seen = self.inspection.as_ref();
        json!({
            "version": VERSION,
            "subject": self.subject,
            "state": self.state().map(PodState::word),
            "netns": self.netns,
            "decision": decision,
            "dataPlane": self.decided.plan().map(|plan| data_plane(plan.data_plane())),
            "settings": settings,
            "plugins": self.order.as_ref().map(|(file, order)| json!({"file": file, "order": order})),
            "addresses": seen.map(|seen| &seen.addresses),
            "rules": seen.map(|seen| seen.in_force.iter()
                .map(|one| json!({"backend": one.backend, "count": one.rules})).collect::<Vec<_>>()),
            "listeners": seen.map(|seen| seen.listeners.iter()
                .map(|one| json!({"protocol": one.protocol.name(), "port": one.port, "user": one.user})).collect::<Vec<_>>()),
            "unexamined": seen.map(|seen| &seen.unexamined),
            "accepted": seen.map(|seen| seen.accepted.iter()
                .map(|one| json!({"by": one.by.word(), "rule": one.finding.to_string()})).collect::<Vec<_>>()),
            "consequences": self.consequences(),
            "findings": self.findings.iter().map(reported).collect::<Vec<_>>(),
        })
    }
}

fn in_force(seen: &Inspection) -> String {
    if seen.in_force.is_empty() {
        return "none of the mesh".to_owned();
    }
    let told = seen.in_force.iter().map(|one| match one.rules {
        Some(count) => format!("{} ({count} rules)", one.backend),
        None => one.backend.to_owned(),
    });
    told.collect::<Vec<_>>().join(" and ")
}

/// A finding for programs.
#[must_use]
pub fn reported(finding: &PodFinding) -> ReportedFinding {
    let ReasonDoc { word, meaning, remedy } = finding.cause.doc();
    ReportedFinding {
        code: word.to_owned(),
        severity: finding.cause.severity(),
        meaning: meaning.to_owned(),
        seen: finding.seen.clone(),
        remedy: linked(remedy),
    }
}

/// Findings for people.
pub fn listed(findings: &[PodFinding], paper: &mut TextWriter) {
    for finding in findings {
        reported(finding).write(paper);
    }
}

fn families(families: Families) -> String {
    list(&families.iter().collect::<Vec<Family>>(), " and ")
}

fn list<T: ToString>(values: &[T], between: &str) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cause::Cause;

    #[test]
    fn what_is_endless_is_cut_short_for_people_and_whole_for_programs() {
        let many = (0..1000).map(|number| format!("{number} {}", "\u{e9}".repeat(5000))).collect();
        let finding = PodFinding { cause: Cause::BadSettings, seen: many };
        let mut paper = TextWriter::new(TextLayout::default());
        listed(std::slice::from_ref(&finding), &mut paper);
        let text = paper.into_text();
        assert!(text.len() < 40_000 && text.contains("and 988 more"), "{}", text.len());
        assert!(text.contains("... (10002 bytes)"), "{text}");
        assert_eq!(reported(&finding).seen.len(), 1000);
    }

    #[test]
    fn the_verdict_comes_first_and_counts_what_follows() {
        let pod = |causes: &[Cause]| Report {
            subject: "pod shop/cart".to_owned(),
            netns: None,
            decided: PodDecision::HostNetwork,
            order: None,
            inspection: None,
            findings: causes.iter().map(|cause| PodFinding::new(*cause, "seen")).collect(),
        };
        let first = |report: Report| report.text(TextLayout::default()).lines().next().map(str::to_owned);
        let note = Cause::FamilyNotCaptured;
        let begins = "not redirected";
        assert_eq!(first(pod(&[])), Some(format!("{begins}, as intended")));
        assert_eq!(first(pod(&[note])), Some(format!("{begins}, as intended; 1 note")));
        assert_eq!(first(pod(&[note, note])), Some(format!("{begins}, as intended; 2 notes")));
        let bad = pod(&[note, Cause::HostNetwork, Cause::BadSettings, Cause::NoEntry]);
        assert_eq!(bad.json()["state"], "left-alone");
        assert_eq!(first(bad), Some(format!("{begins}; 2 errors, 1 warning, 1 note")));
        let unknown = Report { decided: PodDecision::Unknown, ..pod(&[Cause::NoAddress]) };
        let compared = "nothing was compared: no pod was given; 1 error";
        assert_eq!(first(unknown).as_deref(), Some(compared));
    }
}
