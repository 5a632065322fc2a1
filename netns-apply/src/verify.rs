//! Comparing a plan with what is in force.

use crate::{
    ApplyError, ApplyOptions,
    backend::{self, Backend, Handles},
    exec::Programs,
    foreign::interference,
    observe::{self, Seen},
};
use redirect_core::{
    Family, RulePlan,
    change::Difference,
    interference::Finding,
    netlink::NativeState,
    options::Variant,
    routing::{self, FoundRouting},
    steps::{Observation, VARIANTS},
};
use std::{fmt, time::Instant};

/// The first thing in a namespace that is not as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// A rule or chain.
    Rule {
        /// Of this family.
        family: Family,
        /// What is different.
        difference: Difference,
    },
    /// A policy rule, route or address is missing.
    Routing(String),
    /// There are rules in both variants of iptables, or in iptables and native tables.
    TwoBackends,
    /// The native tables are missing.
    NoNativeTables,
    /// The native tables hold other rules.
    OtherNativeRules,
    /// A table is there and does not act.
    Asleep(String),
    /// All is as planned, but something of others comes in its way; the surest first, at least one.
    Interference(Vec<Finding>),
}

/// How many rules of others are named in one text.
const MOST_NAMED: usize = 3;

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { family, difference } => write!(f, "{family}: {difference}"),
            Self::Routing(what) | Self::Asleep(what) => f.write_str(what),
            Self::TwoBackends => f.write_str("the mesh has rules in more than one backend"),
            Self::OtherNativeRules => f.write_str("the native tables inet istio-proxy-* hold other rules"),
            Self::NoNativeTables => f.write_str("the native tables inet istio-proxy-* are missing"),
            Self::Interference(findings) => {
                f.write_str("all rules are in force, but others interfere: ")?;
                for (index, finding) in findings.iter().take(MOST_NAMED).enumerate() {
                    write!(f, "{}{finding}", if index == 0 { "" } else { "; " })?;
                }
                match findings.len().saturating_sub(MOST_NAMED) {
                    0 => Ok(()),
                    more => write!(f, "; and {more} more"),
                }
            }
        }
    }
}

/// The first thing in the calling thread's network namespace that is not as planned, if any. Rules are compared in
/// order; then it is asked what of others comes in their way.
///
/// # Errors
/// The namespace cannot be looked at.
pub fn verify(plan: &RulePlan, options: &ApplyOptions) -> Result<Option<Mismatch>, ApplyError> {
    let mut handles = Handles::open(&options.programs, options.backend)?;
    if let (Some(connection), Some(most)) = (&mut handles.netlink, options.most_read) {
        connection.limit(most);
    }
    let seen = Seen::now(&mut handles, Instant::now() + options.patience)?;
    let observed = &seen.state;
    let (backend, _) = backend::choose(options.backend, &seen, &mut handles, plan)?;
    let redirected = VARIANTS.into_iter().filter(|variant| observed.redirected_by(*variant)).count();
    if redirected + usize::from(!observed.native.is_empty()) > 1 {
        return Ok(Some(Mismatch::TwoBackends));
    }
    let names = backend::tables(plan, backend);
    if let Some(asleep) = seen.asleep(|table| names.iter().any(|name| name == table)) {
        return Ok(Some(Mismatch::Asleep(asleep.to_string())));
    }
    let rules = match backend {
        Backend::NativeNft if observed.native.is_empty() => Some(Mismatch::NoNativeTables),
        Backend::NativeNft if observed.native != NativeState::wanted(plan, options.native_form) => {
            Some(Mismatch::OtherNativeRules)
        }
        Backend::NativeNft => None,
        Backend::Netlink => different(observed, Variant::Nft, plan),
        Backend::Restore(variant) => different(observed, variant, plan),
    };
    if let Some(mismatch) = rules.or_else(|| missing_routing(plan, &observed.routing).map(Mismatch::Routing))
    {
        return Ok(Some(mismatch));
    }
    let findings = interference(plan, options)?;
    Ok(if findings.is_empty() { None } else { Some(Mismatch::Interference(findings)) })
}

/// The first thing a plan needs besides rules that is missing, or that does not work.
#[must_use]
fn missing_routing(plan: &RulePlan, found: &[FoundRouting]) -> Option<String> {
    let item = routing::missing(plan, found).into_iter().next()?;
    let flawed = found.iter().find(|found| found.item == item);
    Some(flawed.map_or_else(|| format!("missing: {item}"), |found| format!("does not work: {found}")))
}

/// The tables of legacy iptables in the calling thread's network namespace that cannot be read, because no program for it is
/// installed here. Where there are some, rules that [`verify`] misses may be in them.
#[must_use]
pub fn unreadable_tables(programs: &Programs) -> Vec<String> {
    // Where it cannot even be asked for the program, none of them can be read.
    let all = |_| {
        Family::BOTH
            .into_iter()
            .flat_map(|family| observe::legacy_tables(family).into_iter().map(move |table| (family, table)))
            .collect()
    };
    let tables = observe::unreadable(programs).unwrap_or_else(all).into_iter();
    tables.map(|(family, table)| format!("{family} {table}")).collect()
}

/// The first rule of either family that is not as planned.
fn different(observed: &Observation, variant: Variant, plan: &RulePlan) -> Option<Mismatch> {
    Family::BOTH.into_iter().find_map(|family| {
        let difference = Difference::find(observed.rules(variant).of(family), &plan.rules(family))?;
        Some(Mismatch::Rule { family, difference })
    })
}
