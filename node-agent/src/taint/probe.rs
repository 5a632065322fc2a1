//! A network namespace made to be redirected: what the plugin does for a pod at ADD is done to it, verified, and gone with it.
//!
//! It has no name and no file: it belongs to the thread that made it and ends with that, also when the agent is killed.

use std::net::{IpAddr, Ipv4Addr};

use netns_apply::ApplyError;
use netns_apply::Capability;
use netns_apply::facts::addresses;
use netns_apply::netns::DisposableThread;
use redirect_core::pod::PodFacts;

use crate::pods::check::{ApplyFailure, ExpectedRules, redirect_here, require};

/// Why a probe namespace is not redirected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The agent's container is not equipped for it, so the result for pods is unknown.
    #[error("cannot try a redirection: {0}; or set TAINT_PROBE=false")]
    Impossible(String),
    /// A pod would fail too.
    #[error("a network namespace created as a test could not be redirected: {0}")]
    Failed(String),
}

/// Redirects a new network namespace as the plugin does a pod's by these rules, and verifies it. Takes milliseconds: not for an async
/// thread.
///
/// # Errors
/// Why it is not redirected.
pub fn probe(rules: &ExpectedRules) -> Result<(), ProbeError> {
    if let Err(missing) = require([Capability::NET_ADMIN, Capability::SYS_ADMIN]) {
        return Err(ProbeError::Impossible(format!("the agent's container lacks {missing}")));
    }
    // Of the families that the node has, pods have addresses.
    let mut there = addresses().map_err(|error| ProbeError::Impossible(error.to_string()))?;
    there.retain(|address| !address.is_loopback() && !is_link_local(address));
    if there.is_empty() {
        there.push(Ipv4Addr::new(192, 0, 2, 1).into());
    }
    // The namespace goes with the thread.
    let done = DisposableThread::run(|thread| {
        thread
            .enter_new()
            .map_err(|error| ProbeError::Impossible(format!("no network namespace can be made: {error}")))?;
        redirect(rules, &there)
    });
    done.unwrap_or_else(|why| Err(ProbeError::Failed(why)))
}

const fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

fn redirect(rules: &ExpectedRules, there: &[IpAddr]) -> Result<(), ProbeError> {
    match redirect_here(&PodFacts::sidecar([("", ""); 0]), rules, there, false) {
        Ok(done) => match done.verified.map_err(|error| of_apply(&error))? {
            Some(mismatch) => Err(ProbeError::Failed(mismatch.to_string())),
            None => Ok(()),
        },
        Err(ApplyFailure::Apply(error)) => Err(of_apply(&error.cause)),
        Err(ApplyFailure::NoPlan(problem)) => Err(ProbeError::Failed(problem.text)),
    }
}

/// Helper programs that are missing here may be there on the node, where the plugin runs.
fn of_apply(error: &ApplyError) -> ProbeError {
    if matches!(error, ApplyError::NoIptables { .. }) {
        return ProbeError::Impossible(format!(
            "the node's iptables is needed for it, which the agent's container does not see: {error}"
        ));
    }
    ProbeError::Failed(error.to_string())
}
