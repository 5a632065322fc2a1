//! Ambient mode's rules in one network namespace: put in force, verified, removed, by the code of the sidecar's.
//!
//! Everything acts on the calling thread's network namespace, which must be the pod's.

use std::time::Duration;

use netns_apply::connections::CloseError;
use netns_apply::facts::Ipv6;
use netns_apply::netlink::{NetlinkError, NftConnection};
use netns_apply::{ApplyError, ApplyOptions, ApplyOutcome, Mismatch, Snapshot, verify};
use redirect_core::plan::DataPlane;
use redirect_core::{AmbientRedirect, RulePlan};

/// How long connections are kept that are open when the pod is enrolled: an annotation of the pod, or a label of its namespace.
pub const KEEP_CONNECTIONS: &str = "cni.istio.io/keepConnections";

/// Whether one condition of a pod's enrolment holds, verified. Otherwise why that cannot be determined, or, after a try that failed, why the
/// next one is not due yet.
pub type RulesCheck = Result<bool, String>;

/// Why a namespace with rules of a sidecar is left as it is.
pub const HAS_SIDECAR: &str = "the network namespace has rules of a sidecar; remove them with istio-iptables --cleanup-only if the pod has none any more";

/// Reads a namespace that may have this plan. Fails if it has rules of a sidecar: a pod stays with it, and they are not ambient mode's to replace
/// or remove.
fn read<'a>(plan: &RulePlan, options: &'a ApplyOptions) -> Result<Snapshot<'a>, String> {
    let snapshot = Snapshot::take(plan, options).map_err(|error| error.to_string())?;
    if snapshot.observation().data_planes().contains(&DataPlane::Sidecar) {
        return Err(HAS_SIDECAR.to_owned());
    }
    Ok(snapshot)
}

/// What was verified of a plan. What other programs' rules or routing do to it is a reason: writing ours again would not change that.
fn condition(verified: Result<Option<Mismatch>, ApplyError>) -> RulesCheck {
    match verified.map_err(|error| error.to_string())? {
        None => Ok(true),
        Some(mismatch @ (Mismatch::Interference(..) | Mismatch::DoesNotConverge(_))) => {
            Err(mismatch.to_string())
        }
        Some(_) => Ok(false),
    }
}

/// Whether the plan of this redirection is in force.
///
/// # Errors
/// That cannot be determined, and why; or what other programs' rules or routing do to it: writing ours again would not change that.
pub fn are_in_force(redirect: &AmbientRedirect, options: &ApplyOptions) -> RulesCheck {
    let plan = Ipv6::here().limit(redirect.clone()).plan();
    let snapshot = read(&plan, options)?;
    // One that is still being made, or that another program has changed, lets new connections past ztunnel.
    if snapshot.keeps_connections() {
        let kept = NftConnection::open().and_then(|mut connection| connection.kept_connections());
        if !kept.map_err(|error| error.to_string())?.is_settled() {
            return Ok(false);
        }
    }
    let verdict = snapshot.verify(&plan, options);
    condition(verdict.map(|verdict| verdict.mismatch))
}

/// Puts the plan of this redirection in force where it lacks, and returns whether it is in force then, as [`are_in_force`]. If the namespace had no rules
/// of ambient mode, connections that are open are kept for this time.
///
/// # Errors
/// Why it could not be put in force.
pub fn ensure_in_force(
    redirect: &AmbientRedirect,
    keep: Duration,
    options: &ApplyOptions,
) -> Result<RulesCheck, String> {
    let plan = Ipv6::here().limit(redirect.clone()).plan();
    let mut snapshot = match read(&plan, options) {
        Ok(snapshot) => snapshot,
        Err(why) => return Ok(Err(why)),
    };
    let verified = match snapshot.differences(&plan, options) {
        Ok(mismatch @ Some(Mismatch::DoesNotConverge(_))) => Ok(mismatch),
        Ok(Some(_)) => {
            apply_keeping(snapshot, &plan, keep, options)?;
            verify(&plan, options)
        }
        Ok(None) if snapshot.keeps_connections() => {
            conclude_keeping()?;
            verify(&plan, options)
        }
        Ok(None) => snapshot.interference(&plan, options).map(|verdict| verdict.mismatch),
        Err(error) => Err(error),
    };
    Ok(condition(verified))
}

/// Whether the namespace has any rules of ambient mode.
///
/// # Errors
/// They cannot be read.
pub fn exist(options: &ApplyOptions) -> RulesCheck {
    let snapshot = Snapshot::take(&RulePlan::empty(), options).map_err(|error| error.to_string())?;
    Ok(has_rules(&snapshot) || snapshot.keeps_connections())
}

fn has_rules(snapshot: &Snapshot<'_>) -> bool {
    snapshot.observation().data_planes().contains(&DataPlane::Ambient)
}

/// Puts the plan in force, and verifies it; keeps connections as [`ensure_in_force`] does. What other programs' rules do to it, only [`are_in_force`] shows.
///
/// # Errors
/// Why it is not in force, or not verified.
pub fn put_in_force(
    redirect: &AmbientRedirect,
    keep: Duration,
    options: &ApplyOptions,
) -> Result<(), String> {
    let plan = Ipv6::here().limit(redirect.clone()).plan();
    apply_keeping(read(&plan, options)?, &plan, keep, options)?;
    verify_applied(&plan, options).map(drop)
}

/// Puts a plan in force in a namespace of which this was read. If it had no rules of ambient mode, connections that are open are kept for this time.
///
/// A process that ends in between leaves the namespace without the plan, or with a table to be concluded: both are found by [`are_in_force`].
fn apply_keeping(
    snapshot: Snapshot<'_>,
    plan: &RulePlan,
    keep: Duration,
    options: &ApplyOptions,
) -> Result<ApplyOutcome, String> {
    if keep.is_zero() || has_rules(&snapshot) {
        let keeps = snapshot.keeps_connections();
        let outcome = snapshot.apply(plan, options).map_err(|error| error.to_string())?;
        return if keeps { conclude_keeping().map(|()| outcome) } else { Ok(outcome) };
    }
    let begun = NftConnection::open()
        .map_err(CloseError::from)
        .and_then(|mut connection| connection.keep_connections(keep));
    let begun = begun.map_err(|error| {
        format!("connections cannot be kept, as {KEEP_CONNECTIONS} asks: {error}; remove it to enrol the pod without")
    });
    let applied = begun.and_then(|_| {
        // What was read is older than the table.
        read(plan, options)?.apply(plan, options).map_err(|error| error.to_string())
    });
    match applied {
        Ok(outcome) => conclude_keeping().map(|()| outcome),
        Err(why) => {
            // A pod without rules keeps nothing. If this fails, too, the next try replaces it.
            let _ = NftConnection::open().and_then(|mut connection| connection.end_keeping());
            Err(why)
        }
    }
}

/// Ends adding connections that are kept, now that rules are in force. A table that keeps none, or that another program has changed, goes.
fn conclude_keeping() -> Result<(), String> {
    let conclude = || -> Result<(), NetlinkError> {
        let mut connection = NftConnection::open()?;
        let table = connection.kept_connections()?;
        if table.connections().is_empty() || !(table.is_settled() || table.is_being_made()) {
            return if table.exists() { connection.end_keeping() } else { Ok(()) };
        }
        if table.is_settled() { Ok(()) } else { connection.settle_kept() }
    };
    conclude().map_err(|error| format!("the table of connections that are kept: {error}"))
}

/// Puts the plan in force; returns it.
///
/// # Errors
/// Why it is not in force.
pub fn apply_here(
    redirect: &AmbientRedirect,
    options: &ApplyOptions,
) -> Result<(RulePlan, ApplyOutcome), String> {
    let plan = Ipv6::here().limit(redirect.clone()).plan();
    let outcome = read(&plan, options)?.apply(&plan, options).map_err(|error| error.to_string())?;
    Ok((plan, outcome))
}

/// Verifies a plan that was just put in force; returns what other programs' rules do to it, each in a line for a log.
///
/// # Errors
/// The plan is not in force any more, or that cannot be determined.
pub fn verify_applied(plan: &RulePlan, options: &ApplyOptions) -> Result<Vec<String>, String> {
    match verify(plan, options) {
        Ok(None) => Ok(Vec::new()),
        // They are there; what others do is not undone by giving up.
        Ok(Some(mismatch @ Mismatch::Interference(..))) => Ok(mismatch.log_lines()),
        Ok(Some(mismatch)) => Err(format!("the rules have been changed since: {mismatch}; run it again")),
        Err(error) => Err(format!("the rules are in force, but cannot be verified: {error}")),
    }
}

/// Removes all rules of ambient mode.
///
/// # Errors
/// Why they are not removed.
pub fn remove(options: &ApplyOptions) -> Result<ApplyOutcome, String> {
    let nothing = RulePlan::empty();
    read(&nothing, options)?.apply(&nothing, options).map_err(|error| error.to_string())
}

/// Removes the rules and ipsets by which Istio's agent lets probes through, from the calling thread's network namespace, which must be the node's. Returns
/// whether any existed.
///
/// # Errors
/// Why it is not removed.
pub fn remove_istios_of_node(options: &ApplyOptions) -> Result<bool, String> {
    let has_rules = exist(options)?;
    if has_rules {
        remove(options)?;
    }
    let had_sets = NftConnection::open()
        .and_then(|mut connection| connection.destroy_probe_ipsets())
        .map_err(|error| error.to_string())?;
    Ok(has_rules || had_sets)
}
