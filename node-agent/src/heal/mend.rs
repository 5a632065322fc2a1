//! One look into a pod's network namespace, and what is done where it is not as planned. Takes milliseconds: not for an async thread.

use std::path::PathBuf;
use std::sync::Arc;

use netns_apply::capabilities::{self, SYS_PTRACE};
use netns_apply::pod::Outside;

use super::metrics::{HEALED, INTERFERENCE};
use crate::drift::{self, Candidate, Comparison, Rules, compare_here};
use crate::repair::action::{Trouble, UNVERIFIABLE};
use crate::repair::in_place::redirect_here;
use crate::repair::sandbox::{self, Wanted};
use pod_netns::Sandbox;

/// What is to be looked at, and how it is to be.
#[derive(Debug, Clone)]
pub struct Job {
    /// The pod.
    pub pod: Arc<Candidate>,
    /// What holds beside what it says.
    pub rules: Arc<Rules>,
    /// Its network namespace.
    pub sandbox: Sandbox,
    /// Whether it is known from the pod's processes that it is the pod's.
    pub is_sure: bool,
    /// The rules are in force, but connections may go on beside the proxy.
    pub is_unfinished: bool,
    /// Where the host's processes are.
    pub proc: PathBuf,
    /// Where the runtime's network namespaces are.
    pub mounted: PathBuf,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All is as planned.
    AsPlanned,
    /// It was not, and is again, verified.
    Healed {
        /// The first thing that was not.
        difference: String,
        /// What was done.
        words: String,
    },
    /// The mesh's rules are in force, but rules of others come in their way.
    Interference(String),
    /// It is not as planned, or that cannot be told, and nothing could be done about it.
    Failed(Trouble),
    /// The namespace is gone.
    Gone,
}

impl Outcome {
    /// The word for metrics, one of [`REASONS`](super::metrics::REASONS), if there was anything to mend.
    #[must_use]
    pub const fn reason(&self) -> Option<&'static str> {
        match self {
            Self::AsPlanned | Self::Gone => None,
            Self::Healed { .. } => Some(HEALED),
            Self::Interference(_) => Some(INTERFERENCE),
            Self::Failed(trouble) => Some(trouble.reason),
        }
    }
}

/// Does it. The pod's network namespace is known by device and inode, and its file is opened anew each time.
#[must_use]
pub fn look_and_mend(job: &Job) -> Outcome {
    let Ok(netns) = job.sandbox.open() else { return Outcome::Gone };
    let outside = Outside::of_this_process();
    let failed = |error: &dyn std::fmt::Display| Outcome::Failed(Trouble::new("failed", error.to_string()));
    let seen = match netns.run(|| compare_here(&job.pod, &job.rules, outside.finds_this_foreign())) {
        Ok(Ok(seen)) => seen,
        Ok(Err(trouble)) => Comparison::Trouble(trouble),
        Err(error) => return failed(&error),
    };
    let difference = match seen {
        Comparison::AsPlanned | Comparison::Trouble(drift::Trouble::Unverifiable(_)) if job.is_unfinished => {
            "connections may go on beside the proxy".to_owned()
        }
        Comparison::AsPlanned => return Outcome::AsPlanned,
        Comparison::Interference(findings) => return Outcome::Interference(findings),
        Comparison::Trouble(drift::Trouble::Unverifiable(text)) => {
            return Outcome::Failed(Trouble::new(UNVERIFIABLE, text));
        }
        Comparison::Trouble(trouble) => return failed(&trouble),
        Comparison::Different(difference) | Comparison::NotRedirected(difference) => difference,
    };
    match mend(job) {
        Ok(words) => Outcome::Healed { difference, words },
        Err(trouble) if trouble.reason == UNVERIFIABLE => {
            Outcome::Failed(Trouble::new(UNVERIFIABLE, format!("{}; before: {difference}", trouble.text)))
        }
        Err(trouble) => {
            Outcome::Failed(Trouble::new(trouble.reason, format!("{difference}; {}", trouble.text)))
        }
    }
}

/// The way of a repair: the namespace that is surely the pod's, ADD's decision and plan, verified; then an end for connections beside the proxy.
fn mend(job: &Job) -> Result<String, Trouble> {
    let netns = if job.is_sure {
        job.sandbox.open().map_err(|error| Trouble::new("not_found", error))?
    } else {
        surely_the_pods(job)?
    };
    let outside = Outside::of_this_process();
    let done =
        netns.run(|| redirect_here(&job.pod.uid, &job.pod.facts, &job.rules, outside.finds_this_foreign()));
    Ok(done.map_err(|error| Trouble::new("not_applied", error))??.words())
}

/// An address can be taken by anybody with CAP_NET_ADMIN; into the pod's cgroup nobody gets.
fn surely_the_pods(job: &Job) -> Result<netns_apply::netns::Netns, Trouble> {
    if capabilities::has(SYS_PTRACE) == Some(false) {
        let text = format!(
            "the agent's container lacks {}, so it cannot tell whose network namespace it is",
            SYS_PTRACE.name
        );
        return Err(Trouble::new("no_capability", text));
    }
    let wanted = Wanted { uid: &job.pod.uid, addresses: &job.pod.addresses };
    let netns = sandbox::open(&wanted, &job.mounted, &job.proc)?;
    if netns.id() != job.sandbox.id() {
        let text = format!(
            "{} has the pod's addresses, but its processes are in another network namespace",
            job.sandbox.path().display()
        );
        return Err(Trouble::new("ambiguous", text));
    }
    Ok(netns)
}
