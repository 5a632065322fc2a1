//! Redirecting a pod in place: what the plugin does for ADD, then what it does for CHECK; then it ends the connections that were open before.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use agent_runtime::SCOPE;
use netns_apply::Capability;
use netns_apply::connections::{ClosedConnections, sever, socket_groups};
use netns_apply::facts::addresses;
use netns_apply::netns::Netns;
use netns_apply::{ApplyError, ApplyOutcome, Mismatch, Programs, RunError, apply, verify};
use pod_netns::{MountedNetns, Outside};
use reasons::AgentReason;
use redirect_core::plan::RulePlan;
use redirect_core::pod::{Decision, PodFacts};

use super::namespace;
use super::room::{require_room, turn_of};
use super::{ExpectedRules, MeshPod, PodProblem, require};
use crate::confine::outside;
use crate::settings::Paths;

/// How long another program may hold the lock of a pod's network namespace.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a repair did.
#[derive(Debug)]
pub struct RepairReport {
    backend: String,
    changed: bool,
    severed: ClosedConnections,
}

/// Redirects a pod after finding its network namespace. Takes milliseconds: not for an async thread.
///
/// # Errors
/// Why it is not redirected, or not verified.
pub fn repair(pod: &MeshPod, rules: &ExpectedRules, paths: &Paths) -> Result<RepairReport, PodProblem> {
    repair_in(&namespace::open(pod, paths)?, pod, rules, &paths.proc)
}

/// Redirects a pod in a network namespace that has its addresses. Any process with CAP_NET_ADMIN can add an address, but none can enter
/// the pod's cgroup: so unless `netns_proven`, the pod's processes have to be in that namespace.
///
/// # Errors
/// Why it is not redirected, or not verified.
pub fn repair_known(
    pod: &MeshPod,
    rules: &ExpectedRules,
    paths: &Paths,
    sandbox: &MountedNetns,
    netns_proven: bool,
) -> Result<RepairReport, PodProblem> {
    if netns_proven {
        let netns = sandbox.open().map_err(|error| PodProblem::new(AgentReason::NotFound, error))?;
        return repair_in(&netns, pod, rules, &paths.proc);
    }
    if let Err(missing) = require([Capability::SYS_PTRACE]) {
        let text = format!(
            "the agent's container lacks {missing}, so it cannot determine a network namespace's owner"
        );
        return Err(PodProblem::new(AgentReason::NoCapability, text));
    }
    let netns = namespace::open(pod, paths)?;
    if netns.id() != sandbox.id() {
        let text = format!(
            "{} has the pod's addresses, but its processes are in another network namespace",
            sandbox.path().display()
        );
        return Err(PodProblem::new(AgentReason::Ambiguous, text));
    }
    repair_in(&netns, pod, rules, &paths.proc)
}

fn repair_in(
    netns: &Netns,
    pod: &MeshPod,
    rules: &ExpectedRules,
    proc: &Path,
) -> Result<RepairReport, PodProblem> {
    let outside = Outside::of_this_process();
    let groups_of = |inodes: &BTreeSet<u32>| {
        let (proc, namespace, inodes) = (proc.to_owned(), netns.id(), inodes.clone());
        // A confined thread sees no processes.
        outside::run(move || socket_groups(&proc, namespace, &inodes)).unwrap_or_default()
    };
    let done = netns.run(|| repair_here(pod, rules, outside.finds_this_foreign(), &groups_of));
    done.map_err(|error| PodProblem::new(AgentReason::NotApplied, error))?
}

/// Redirects the pod of the calling thread's network namespace, and ends connections that were open before, even if other programs' rules
/// prevent verification.
fn repair_here(
    pod: &MeshPod,
    rules: &ExpectedRules,
    is_foreign: bool,
    groups_of: &dyn Fn(&BTreeSet<u32>) -> BTreeMap<u32, u32>,
) -> Result<RepairReport, PodProblem> {
    let there = addresses().map_err(|error| PodProblem::new(AgentReason::NotApplied, error))?;
    let Redirected { plan, applied, verified } = redirect_here(&pod.facts, rules, &there, is_foreign)?;
    for warning in &applied.warnings {
        log::warn!(target: SCOPE, pod = pod.uid; "{warning}");
    }
    if let Ok(Some(mismatch)) = verified {
        return Err(PodProblem::new(AgentReason::NotVerified, mismatch));
    }
    let severed = sever(&plan, groups_of).map_err(|error| {
        let text =
            format!("the rules are in force, but connections opened earlier may bypass the proxy: {error}");
        PodProblem::new(AgentReason::NotSevered, text)
    })?;
    let report = RepairReport { backend: applied.backend.to_string(), changed: applied.changed, severed };
    let why = match verified {
        Ok(_) => return Ok(report),
        Err(error @ ApplyError::OthersUnread { .. }) => error.to_string(),
        Err(error) => format!("the rules are in force, but cannot be verified: {error}"),
    };
    Err(PodProblem::new(AgentReason::Unverifiable, why + &report.closed()))
}

/// What was done to a network namespace.
#[derive(Debug)]
pub struct Redirected {
    plan: RulePlan,
    applied: ApplyOutcome,
    /// What keeps the plan from its effect, if that could be verified.
    pub verified: Result<Option<Mismatch>, ApplyError>,
}

/// Why a network namespace is not redirected.
#[derive(Debug, thiserror::Error)]
pub enum ApplyFailure {
    /// No plan was made: the settings are invalid, the plugin would skip the pod, or the agent lacks the memory.
    #[error(transparent)]
    NoPlan(#[from] PodProblem),
    /// The plan is not in force.
    #[error(transparent)]
    Apply(RunError),
}

impl From<ApplyFailure> for PodProblem {
    fn from(failure: ApplyFailure) -> Self {
        match failure {
            ApplyFailure::NoPlan(problem) => problem,
            ApplyFailure::Apply(error) => Self::new(AgentReason::NotApplied, error),
        }
    }
}

/// Puts a pod's plan in force in the calling thread's network namespace, and verifies it. The plan depends on all addresses that are there, as for
/// ADD, and not only on the pod's.
///
/// # Errors
/// Why the namespace is not redirected.
pub fn redirect_here(
    facts: &PodFacts,
    rules: &ExpectedRules,
    there: &[IpAddr],
    is_foreign: bool,
) -> Result<Redirected, ApplyFailure> {
    let _turn = turn_of(facts);
    let decided = rules.decide(facts, there);
    let plan = match decided.map_err(|errors| PodProblem::new(AgentReason::NotMeshed, errors))? {
        Decision::Redirect(redirect) => redirect.plan(),
        Decision::Skip(reason) => {
            return Err(PodProblem::new(AgentReason::NotMeshed, reason.explanation()).into());
        }
    };
    require_room(&plan)?;
    let options = rules
        .options(&facts.annotations, is_foreign)
        .programs(Programs::in_path(&std::env::var_os("PATH").unwrap_or_default()))
        .patience(PATIENCE);
    let applied = apply(&plan, &options).map_err(ApplyFailure::Apply)?;
    let verified = verify(&plan, &options);
    Ok(Redirected { plan, applied, verified })
}

impl RepairReport {
    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        let rules =
            if self.changed { "its rules are in force now" } else { "its rules were in force already" };
        format!("{rules} and verified ({}){}", self.backend, self.closed())
    }

    /// How many connections were closed, if any.
    fn closed(&self) -> String {
        match self.severed.sockets + self.severed.tracked {
            0 => String::new(),
            count => format!("; {count} connections that bypassed the proxy were ended"),
        }
    }
}
