//! The document of `redirectctl scan`, which `kubectl redirect` reads: one type for both, so that none forgets what the other has.

use serde::{Deserialize, Serialize};

use crate::Severity;
use crate::text_writer::{LONGEST_SEEN, TextWriter, short};

/// How much of a finding text for people shows.
const MOST_SEEN: usize = 12;

/// What `redirectctl scan --output json` prints. Older agents may lack what has a default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeScan {
    /// The version of the document.
    #[serde(default)]
    pub version: u32,
    /// What is wrong with the node itself.
    #[serde(default)]
    pub node: Vec<ReportedFinding>,
    /// Its pods.
    #[serde(default)]
    pub pods: Vec<ScannedPod>,
}

/// A pod, or a network namespace without a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScannedPod {
    /// `NAMESPACE/NAME`, or a file.
    pub subject: String,
    /// Its state: the word of a `PodState`, or one of a newer agent.
    pub state: String,
    /// What should have its traffic: the word of a data plane.
    #[serde(default)]
    pub data_plane: Option<String>,
    /// What becomes of traffic that should come to its proxy and does not.
    #[serde(default)]
    pub consequences: Vec<String>,
    /// What is wrong.
    #[serde(default)]
    pub findings: Vec<ReportedFinding>,
}

/// Something wrong, or worth knowing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedFinding {
    /// What it is.
    pub code: String,
    /// How bad.
    #[serde(default)]
    pub severity: Severity,
    /// What that means.
    #[serde(default)]
    pub meaning: String,
    /// What was seen.
    #[serde(default)]
    pub seen: Vec<String>,
    /// What to do about it.
    #[serde(default)]
    pub remedy: String,
}

impl ReportedFinding {
    /// Writes it for people.
    pub fn write(&self, paper: &mut TextWriter) {
        let problem = format!("{}: {}", self.code, self.meaning);
        paper.marked(0, &format!("{:9}", self.severity.word()), self.severity.style(), &problem);
        for seen in self.seen.iter().take(MOST_SEEN) {
            paper.labelled(9, "- ", &short(seen, LONGEST_SEEN));
        }
        if let Some(more) = self.seen.len().checked_sub(MOST_SEEN).filter(|more| *more > 0) {
            paper.labelled(9, "- ", &format!("and {more} more, which --output json has"));
        }
        if self.severity > Severity::Note {
            paper.labelled(9, "what to do: ", &self.remedy);
        }
    }
}
