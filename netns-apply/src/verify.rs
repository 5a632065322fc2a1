//! Compares a plan with the rules in force.

use crate::{
    ApplyError, ApplyOptions, ApplyOutcome, Fingerprint, Impact, RunError,
    apply::apply_from,
    backend,
    handles::Handles,
    live::{Live, judged},
    mismatch::Mismatch,
    observe::NamespaceState,
    pause::deadline,
    routes::Placed,
};
use netfilter_state::{
    differences::{Difference, Differences},
    steps::Observation,
};
use packet_trace::interference::{Accepted, Effect, Judgement};
use redirect_core::{RulePlan, options::Variant};
use std::{fmt, hash::RandomState, mem};

/// What a network namespace holds, read once: every question about it is asked of the same reading.
pub struct Snapshot<'a> {
    handles: Handles<'a>,
    seen: NamespaceState,
}

impl fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("state", &self.seen.state).finish_non_exhaustive()
    }
}

impl<'a> Snapshot<'a> {
    /// Reads the calling thread's network namespace, which may hold this plan, whose own rules are always readable. Nothing is changed.
    ///
    /// # Errors
    /// The namespace cannot be inspected.
    pub fn take(plan: &RulePlan, options: &'a ApplyOptions) -> Result<Self, ApplyError> {
        let mut handles = Handles::open(options, plan)?;
        let seen = NamespaceState::now(&mut handles, deadline(options.patience))?;
        Ok(Self { handles, seen })
    }

    /// What concerns the mesh, from any program.
    #[must_use]
    pub const fn observation(&self) -> &Observation {
        &self.seen.state
    }

    /// Whether it has a table of connections that are kept ([`NftConnection::keep_connections`](crate::netlink::NftConnection::keep_connections)).
    #[must_use]
    pub fn keeps_connections(&self) -> bool {
        self.seen.keeps_connections()
    }

    /// The differences from the plan, whatever other programs' rules do (that is asked by [`interference`](Self::interference)). The backend of `options` is the one to compare
    /// with; it may differ from the one the snapshot was taken for.
    ///
    /// # Errors
    /// As [`verify`](verify()).
    pub fn differences(
        &mut self,
        plan: &RulePlan,
        options: &ApplyOptions,
    ) -> Result<Option<Mismatch>, ApplyError> {
        let observed = &self.seen.state;
        let (backend, _) = backend::choose(options.backend, &self.seen, &mut self.handles, plan)?;
        let redirected = Variant::ALL.into_iter().filter(|variant| observed.redirected_by(*variant)).count();
        if redirected + usize::from(!observed.native.is_empty()) > 1 {
            return Ok(Some(Mismatch::TwoBackends));
        }
        let names = backend::tables(plan, backend);
        if let Some(asleep) = self.seen.asleep(|table| names.iter().any(|name| name == table)) {
            return Ok(Some(Mismatch::Asleep(asleep.to_string())));
        }
        let Placed { placement, found } = self.handles.routes.place(plan, observed.routing.clone())?;
        // The rest may be as large as the plan: it is not copied.
        let seen = mem::replace(&mut self.seen.state.routing, found);
        let differences =
            Differences::between(&self.seen.state, &placement.plan, backend.rules_in(options.native_form));
        self.seen.state.routing = seen;
        // What a run would repair, if it could, comes first.
        if let Some(obstacle) = placement.obstacle.filter(|_| differences.iter().all(Difference::is_routing))
        {
            return Ok(Some(Mismatch::DoesNotConverge(Box::new(obstacle))));
        }
        Ok(if differences.is_empty() { None } else { Some(Mismatch::Different(differences)) })
    }

    /// Its fingerprint, if it has one: what was read is not older.
    #[must_use]
    pub fn fingerprint(&self, keys: &RandomState) -> Option<Fingerprint> {
        let (rules, surroundings) = (self.seen.nf_tables.as_ref()?, self.seen.surroundings.as_ref()?);
        Fingerprint::of(keys, rules.generation()?, &surroundings.survey)
    }

    /// Everything that is not as planned.
    ///
    /// # Errors
    /// As [`verify`](verify()).
    pub fn verify(mut self, plan: &RulePlan, options: &ApplyOptions) -> Result<Verdict, ApplyError> {
        match self.differences(plan, options)? {
            None => self.interference(plan, options),
            Some(mismatch) => {
                let is_redirected = self.observation().is_redirected();
                Ok(Verdict { mismatch: Some(mismatch), accepted: Vec::new(), is_redirected })
            }
        }
    }

    /// The same, and the mismatch in words ([`Impact::describe`]).
    ///
    /// # Errors
    /// As [`verify`](verify()).
    pub fn verify_in_words(
        mut self,
        plan: &RulePlan,
        options: &ApplyOptions,
    ) -> Result<(Verdict, Option<String>), ApplyError> {
        let mismatch = self.differences(plan, options)?;
        let (verdict, impact) = self.explained(mismatch, plan, options)?;
        let words = verdict.mismatch.as_ref().map(|mismatch| impact.describe(mismatch));
        Ok((verdict, words))
    }

    /// The verdict about these differences from the plan, and what it means for traffic; without any, about other programs' rules that
    /// interfere with it.
    ///
    /// # Errors
    /// As [`interference`](Self::interference).
    pub fn explained(
        self,
        mismatch: Option<Mismatch>,
        plan: &RulePlan,
        options: &ApplyOptions,
    ) -> Result<(Verdict, Impact), ApplyError> {
        let Some(mismatch) = mismatch else {
            let verdict = self.interference(plan, options)?;
            let impact = verdict.mismatch.as_ref().map(Impact::of_interference);
            return Ok((verdict, impact.unwrap_or_default()));
        };
        let is_redirected = self.observation().is_redirected();
        // The mismatch stands by itself, even if other rules are too many to be read.
        let impact = self.impact(&mismatch, plan, options).unwrap_or_default();
        Ok((Verdict { mismatch: Some(mismatch), accepted: Vec::new(), is_redirected }, impact))
    }

    /// The verdict where all rules are as planned: which of other programs' rules interfere.
    ///
    /// # Errors
    /// [`ApplyError::OthersUnread`].
    pub fn interference(self, plan: &RulePlan, options: &ApplyOptions) -> Result<Verdict, ApplyError> {
        let is_redirected = self.observation().is_redirected();
        let Judgement { findings, accepted, consequences } = judged(self.into_live(plan), plan, options)
            .map_err(|cause| ApplyError::OthersUnread { cause: Box::new(cause) })?;
        let mismatch = (!findings.is_empty()).then_some(Mismatch::Interference(findings, consequences));
        Ok(Verdict { mismatch, accepted, is_redirected })
    }

    /// What a mismatch means for traffic, whatever of the plan is in force.
    ///
    /// # Errors
    /// The namespace cannot be inspected.
    pub fn impact(
        self,
        mismatch: &Mismatch,
        plan: &RulePlan,
        options: &ApplyOptions,
    ) -> Result<Impact, ApplyError> {
        if matches!(mismatch, Mismatch::Interference(..)) {
            return Ok(Impact::of_interference(mismatch));
        }
        let live = match self.into_live(plan) {
            Some(live) => live,
            None => Live::examined(plan, options)?,
        };
        let pod = live.pod(options);
        let consequences = pod.consequences(&live.ruleset, &live.routing, plan);
        let mut foreign = pod.judge(&live.ruleset, plan).findings;
        // What the mismatch says already.
        foreign.retain(|finding| match (mismatch, finding.effect) {
            (Mismatch::Asleep(_), Effect::Dormant) => false,
            (Mismatch::Different(differences), Effect::Routes) => {
                !differences.iter().any(Difference::is_routing)
            }
            (_, Effect::Unexplained) => false,
            _ => true,
        });
        Ok(Impact { consequences, foreign })
    }

    /// Puts a plan in force, based on this reading while nothing has changed since.
    ///
    /// # Errors
    /// As [`apply`](crate::apply()).
    pub fn apply(self, plan: &'a RulePlan, options: &'a ApplyOptions) -> Result<ApplyOutcome, RunError> {
        apply_from(self.handles, self.seen, plan, options)
    }

    /// What packets meet, where the reading shows all of it.
    pub(crate) fn into_live(self, plan: &RulePlan) -> Option<Live> {
        let Self { mut handles, seen } = self;
        Live::from_look(seen, None, plan, &mut handles)
    }
}

/// What in the calling thread's network namespace is not as planned, if anything. Rules are compared in order; if all are as
/// planned, this also searches for other programs' rules that interfere.
///
/// # Errors
/// The namespace cannot be inspected. With [`ApplyError::OthersUnread`], all rules of the plan are in force.
pub fn verify(plan: &RulePlan, options: &ApplyOptions) -> Result<Option<Mismatch>, ApplyError> {
    Ok(Snapshot::take(plan, options)?.verify(plan, options)?.mismatch)
}

/// What in a network namespace is not as planned, and what is not because that is meant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// What is not as planned, if anything.
    pub mismatch: Option<Mismatch>,
    /// Other programs' rules that interfere, which is accepted.
    pub accepted: Vec<Accepted>,
    /// Whether any rules of the mesh are there.
    pub is_redirected: bool,
}
