//! The report of a run: one line on success, one line for each error.

use logging::DEFAULT_SCOPE;
use netns_apply::ApplyOutcome;
use redirect_core::{Family, Redirect, RulePlan, settings::InputErrors};
use std::{fmt::Display, process::ExitCode};

/// Logs why a run failed. Input errors get a line each.
pub(crate) fn failure(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<InputErrors>() {
        Some(errors) => settings_cli::report(errors),
        None => log::error!(target: DEFAULT_SCOPE, "{error:#}"),
    }
    ExitCode::FAILURE
}

/// Warns: of settings that do less, or more, than their author may think, and of what came to light in a run.
pub(crate) fn warn<T: Display>(all: impl IntoIterator<Item = T>) {
    for warning in all {
        log::warn!(target: DEFAULT_SCOPE, "{warning}");
    }
}

/// Logs the plan at debug, a line a rule: a log line is one line.
pub(crate) fn planned(plan: &RulePlan) {
    if log::log_enabled!(target: DEFAULT_SCOPE, log::Level::Debug) {
        for line in plan.explain().lines() {
            log::debug!(target: DEFAULT_SCOPE, "{line}");
        }
    }
}

/// Logs what programming did, in one line.
pub(crate) fn done(plan: &RulePlan, redirect: &Redirect, outcome: &ApplyOutcome, captures: bool) {
    warn(&outcome.warnings);
    let count = |family| {
        let rules = plan.planned_rules().iter().filter(|rule| rule.scope().covers(family));
        if plan.families().contains(&family) { rules.count() } else { 0 }
    };
    let what = match (captures, outcome.changed) {
        (true, true) => "redirection is in force",
        (true, false) => "redirection was in force already",
        (false, true) => "the rules are in force, and capture nothing",
        (false, false) => "the rules were in force already, and capture nothing",
    };
    let mode = redirect.mode().word();
    log::info!(
        target: DEFAULT_SCOPE,
        backend:% = outcome.backend, because:% = outcome.because, mode,
        ipv4_rules = count(Family::V4), ipv6_rules = count(Family::V6);
        "{what}"
    );
}

/// Logs what cleaning up did, in one line.
pub(crate) fn cleaned(outcome: &ApplyOutcome) {
    warn(&outcome.warnings);
    let what = if outcome.changed { "removed all redirection" } else { "nothing to remove" };
    log::info!(target: DEFAULT_SCOPE, "{what}");
}
