//! One look into a network namespace. Nothing is changed by it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni_core::selection::Programming;
use netfilter_state::netlink::kept::KeptTable;
use netfilter_state::state::IptablesTables;
use netfilter_state::steps::Observation;
use netns_apply::connections::WaitingSocket;
use netns_apply::facts;
use netns_apply::netlink::NftConnection;
use netns_apply::netns::Netns;
use netns_apply::{ApplyError, ApplyOptions, Impact, Live, Mismatch, Snapshot, Verdict};
use packet_trace::interference::Accepted;
use pod_netns::{Outside, suitable};
use redirect_core::accepted::AcceptedRules;
use redirect_core::options::{BackendChoice, Variant};
use redirect_core::rule::Table;
use redirect_core::settings::NamespaceFacts;
use redirect_core::{Family, RulePlan};

use crate::cause::{Cause, PodFinding};
use crate::listeners::listeners;

/// What native nftables are called where rules are.
pub(crate) const NATIVE: &str = "native nftables";

/// What a look has shown.
#[derive(Debug)]
pub struct Inspection {
    /// The addresses of the namespace.
    pub addresses: Vec<IpAddr>,
    /// The rules of the mesh, by where they are.
    pub in_force: Vec<InForce>,
    /// Who listens.
    pub listeners: BTreeSet<WaitingSocket>,
    /// What sees its packets besides rules and is not examined.
    pub unexamined: Vec<String>,
    /// How it compares with a plan, if any: what differs, if anything.
    pub mismatch: Option<Mismatch>,
    /// What interferes because it is accepted.
    pub accepted: Vec<Accepted>,
    /// Why the rules that the pod names are not accepted, if so.
    pub not_accepted: Option<String>,
    /// What that means for traffic.
    pub impact: Impact,
    /// What the kernel lacks for the plan.
    pub lacking: Vec<String>,
    /// Connections that are kept past ztunnel, if any.
    pub kept: KeptTable,
    /// Whether it belongs to another user namespace: then users have other numbers there.
    pub foreign: bool,
}

/// Rules of the mesh in a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    /// Where they are, such as `iptables-nft`.
    pub backend: &'static str,
    /// Their number; `None` if not counted.
    pub rules: Option<usize>,
}

impl Inspection {
    /// What it means for traffic that it is not as planned, a sentence each.
    #[must_use]
    pub fn consequences(&self) -> Vec<String> {
        self.impact.consequences.iter().map(ToString::to_string).collect()
    }

    /// Whether rules of the mesh are in force, and are those of the plan.
    pub(crate) fn is_as_planned(&self) -> bool {
        !self.in_force.is_empty() && self.mismatch.is_none()
    }

    /// Where rules of the mesh are.
    pub(crate) fn backends(&self) -> String {
        let backends: Vec<&str> = self.in_force.iter().map(|in_force| in_force.backend).collect();
        format!("rules are in {}", backends.join(" and in "))
    }
}

fn unreadable(error: impl std::fmt::Display) -> PodFinding {
    PodFinding::new(Cause::Unreadable, error.to_string())
}

fn of_rules(error: &ApplyError) -> PodFinding {
    let is_verifiable = !matches!(error, ApplyError::OthersUnread { .. });
    PodFinding::new(if is_verifiable { Cause::Unreadable } else { Cause::Unverifiable }, error.to_string())
}

/// Looks into a namespace. `plan` makes the plan that it is compared with, from the facts of the namespace; whatever else it makes is
/// handed back. Without a named backend, rules are compared by the backend they were found in. Some rules of other programs are accepted.
///
/// # Errors
/// The namespace cannot be looked into.
pub fn inspect<T: Send>(
    netns: &Netns,
    programming: Option<Programming>,
    (accepted, not_accepted): (AcceptedRules, Option<String>),
    plan: impl FnOnce(&NamespaceFacts<'_>) -> (Option<RulePlan>, T) + Send,
) -> Result<(Inspection, T), PodFinding> {
    let outside = Outside::of_this_process();
    let looked = netns.run(|| {
        let addresses = facts::addresses().map_err(unreadable)?;
        let (plan, more) = plan(&facts::of_namespace(&addresses));
        let foreign = outside.finds_this_foreign();
        let options = |programming: Programming| {
            ApplyOptions::default()
                .backend(suitable(programming.backend, foreign))
                .native_form(programming.native_form)
                .most_read(Some(ApplyOptions::MOST_READ))
                .accepted(accepted.clone())
        };
        let usual = programming.unwrap_or_else(|| Programming::new(false, false));
        let looking = options(usual);
        let snapshot = Snapshot::take(plan.as_ref().unwrap_or(&RulePlan::empty()), &looking);
        let snapshot = snapshot.map_err(|error| of_rules(&error))?;
        let observed = snapshot.observation();
        let kept = if snapshot.keeps_connections() {
            NftConnection::open()
                .and_then(|mut connection| connection.kept_connections())
                .map_err(unreadable)?
        } else {
            KeptTable::default()
        };
        let candidates = programming.map_or_else(|| found(observed), |programming| vec![programming]);
        let options = options(candidates.first().copied().unwrap_or(usual));
        let unexamined = Live::unexamined_here().map_err(|error| of_rules(&error))?;
        let in_force = in_force(observed);
        let compare = |plan| compare(snapshot, plan, &candidates, &options);
        let compared = plan.as_ref().map(compare).transpose().map_err(|error| of_rules(&error))?;
        let (Verdict { mismatch, accepted, .. }, impact) = compared.unwrap_or_default();
        let lacking = match &plan {
            Some(plan) if in_force.is_empty() => lacking(plan, options.backend),
            Some(_) | None => Vec::new(),
        };
        let listeners = listeners().map_err(unreadable)?;
        let inspection = Inspection {
            addresses,
            in_force,
            listeners,
            unexamined,
            mismatch,
            accepted,
            impact,
            lacking,
            kept,
            foreign,
            not_accepted,
        };
        Ok((inspection, more))
    });
    looked.map_err(unreadable)?
}

/// What may have programmed the rules that are there, the likeliest first.
fn found(observed: &Observation) -> Vec<Programming> {
    if observed.native.is_empty() {
        vec![Programming::new(false, false)]
    } else {
        vec![Programming::new(true, false), Programming::new(true, true)]
    }
}

/// Compares with the plan as each of these would have programmed it. Differences common to all are reported by the first.
fn compare(
    mut snapshot: Snapshot<'_>,
    plan: &RulePlan,
    candidates: &[Programming],
    options: &ApplyOptions,
) -> Result<(Verdict, Impact), ApplyError> {
    let mut first = None;
    for programming in candidates {
        let options = options.clone().native_form(programming.native_form);
        match snapshot.differences(plan, &options)? {
            Some(different @ Mismatch::Different(_)) => first = first.or(Some(different)),
            other => {
                first = other;
                break;
            }
        }
    }
    snapshot.explained(first, plan, options)
}

fn in_force(observed: &Observation) -> Vec<InForce> {
    let mut all = Vec::new();
    for (variant, backend) in [(Variant::Nft, "iptables-nft"), (Variant::Legacy, "iptables-legacy")] {
        if observed.redirected_by(variant) {
            let rules =
                Family::BOTH.into_iter().map(|family| count(observed.rules(variant).of(family))).sum();
            all.push(InForce { backend, rules: Some(rules) });
        }
    }
    if !observed.native.is_empty() {
        all.push(InForce { backend: NATIVE, rules: None });
    }
    all
}

fn count(state: &IptablesTables) -> usize {
    let chains = Table::ALL.iter().flat_map(|table| state.chains(*table).map(move |of| (*table, of)));
    chains
        .map(|(table, (chain, entries))| {
            entries.iter().filter(|entry| state.owns(table, chain, entry)).count()
        })
        .sum()
}

/// What the kernel lacks of what a plan needs; nothing where it cannot be asked.
pub(crate) fn lacking(plan: &RulePlan, backend: BackendChoice) -> Vec<String> {
    if matches!(backend, BackendChoice::NativeNft | BackendChoice::Restore(_)) {
        return Vec::new();
    }
    let asked = NftConnection::open().and_then(|mut connection| connection.missing_for(plan));
    asked.map(|missing| missing.iter().map(ToString::to_string).collect()).unwrap_or_default()
}
