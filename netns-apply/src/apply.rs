//! Putting a plan in force, wholly or not at all, and removing it.
//!
//! A run reads everything, chooses the backend, derives the steps from the state it read to the goal
//! ([`netfilter_state::steps`]), asks whether the steps that can be refused would be accepted, and only then takes them,
//! one by one, noting how to undo each. If anything fails, it works through the notes from last to first, so that the
//! namespace is as it was before the run's first step.

mod undo;

use crate::{
    backend::{self, Backend, Because},
    connections::{self, CloseError},
    error::{ApplyError, RollbackOutcome, RunError},
    handles::Handles,
    live::{self, Live},
    lock::{LockError, NetnsLock},
    netlink::NetlinkError,
    observe::NamespaceState,
    options::ApplyOptions,
    pause::{deadline, grace},
    routes::Placed,
};
use netfilter_state::{
    netlink::{self, BatchError},
    routing::{FoundRouting, RoutingItem},
    steps::{Goal, Inverse, Observation, Step, Transaction},
};
use redirect_core::{RulePlan, options::Variant, plan::PolicyRoutes};
use std::time::Instant;

/// How many times a run may take all its steps successfully and still find something left to do.
const PASSES: usize = 3;

/// What a run did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ApplyOutcome {
    /// What programmed the rules.
    pub backend: Backend,
    /// Why that backend.
    pub because: Because,
    /// Whether anything was changed.
    pub changed: bool,
    /// What an operator should know even though all went well.
    pub warnings: Vec<String>,
}

/// Puts a plan in force in the calling thread's network namespace, replacing any plan that was in force there.
///
/// # Errors
/// Why the plan could not be put in force, and what state the namespace is in.
pub fn apply(plan: &RulePlan, options: &ApplyOptions) -> Result<ApplyOutcome, RunError> {
    let mut run = Run::new(plan, options).map_err(RunError::untouched)?;
    Ok(run.finish()?.outcome)
}

/// The same, from a look that was just taken.
pub(crate) fn apply_from<'a>(
    handles: Handles<'a>,
    seen: NamespaceState,
    plan: &'a RulePlan,
    options: &'a ApplyOptions,
) -> Result<ApplyOutcome, RunError> {
    let mut run = Run { seen: Some(seen), ..Run::with(handles, plan, options) };
    Ok(run.finish()?.outcome)
}

/// The same, and warns of other programs' rules that interfere with the plan, unless they are accepted. These are not a reason to fail a run, nor
/// to hold it up: nothing is worse than it was before. What the run has read and changed is not read again to find them.
///
/// # Errors
/// As [`apply`](apply()).
pub fn apply_and_search(plan: &RulePlan, options: &ApplyOptions) -> Result<ApplyOutcome, RunError> {
    let mut run = Run::new(plan, options).map_err(RunError::untouched)?;
    let Done { mut outcome, seen } = run.finish()?;
    // The lock is a table, and others may be waiting for it.
    run.lock = None;
    let live = Live::from_look(seen, run.made.take(), plan, &mut run.handles);
    outcome.warnings.extend(live::warnings(live, plan, options));
    Ok(outcome)
}

/// Removes everything any plan has put into the calling thread's network namespace, whatever the backend.
///
/// # Errors
/// Why not everything could be removed, and what state the namespace is in.
pub fn cleanup(options: &ApplyOptions) -> Result<ApplyOutcome, RunError> {
    apply(&RulePlan::empty(), options)
}

/// Which backend would program rules in an empty network namespace on this kernel, and why; an error names the missing support. Changes
/// nothing. What the calling thread's namespace holds does not count, and is read only where the kernel has no nf_tables.
///
/// # Errors
/// What is required to put a plan in force, and missing.
pub fn preflight(options: &ApplyOptions) -> Result<(Backend, Because), ApplyError> {
    let mut handles = Handles::open(options, &RulePlan::empty())?;
    let seen = match &handles.netlink {
        Some(_) => NamespaceState::default(),
        None => NamespaceState::now(&mut handles, deadline(options.patience))?,
    };
    backend::choose(options.backend, &seen, &mut handles, &RulePlan::empty())
}

/// A run: the goal, the means, and how to roll back.
struct Run<'a> {
    plan: &'a RulePlan,
    /// The plan with its policy routing where it fits.
    placed: RulePlan,
    options: &'a ApplyOptions,
    handles: Handles<'a>,
    /// Held by runs of more than one transaction.
    lock: Option<NetnsLock>,
    deadline: Instant,
    /// Why closed connections may still be tracked.
    unforgotten: Option<CloseError>,
    /// The first look, if it was taken before.
    seen: Option<NamespaceState>,
    /// What the run saw before its first step.
    start: Option<Observation>,
    /// How to undo each step, in the order of the steps.
    done: Vec<Inverse>,
    /// The messages of the run's one transaction, if the look before it has shown no table of any program.
    made: Option<Vec<u8>>,
}

/// What a run that succeeded has done, and what its last look has shown.
struct Done {
    outcome: ApplyOutcome,
    seen: NamespaceState,
}

impl<'a> Run<'a> {
    fn new(plan: &'a RulePlan, options: &'a ApplyOptions) -> Result<Self, ApplyError> {
        Ok(Self::with(Handles::open(options, plan)?, plan, options))
    }

    fn with(handles: Handles<'a>, plan: &'a RulePlan, options: &'a ApplyOptions) -> Self {
        Self {
            plan,
            placed: plan.clone(),
            options,
            handles,
            lock: None,
            deadline: deadline(options.patience),
            unforgotten: None,
            seen: None,
            start: None,
            done: Vec::new(),
            made: None,
        }
    }

    /// The outcome; on failure, the namespace is rolled back.
    fn finish(&mut self) -> Result<Done, RunError> {
        match self.passes().and_then(|done| self.without_kept(done)) {
            Ok(done) => Ok(done),
            Err(cause) if self.done.is_empty() => Err(RunError::untouched(cause)),
            Err(cause) => {
                let aftermath = self.undo();
                Err(RunError { cause: Box::new(cause), aftermath })
            }
        }
    }

    /// After the rules: before, these connections would be captured.
    fn without_kept(&mut self, mut done: Done) -> Result<Done, ApplyError> {
        let keeps = done.seen.keeps_connections();
        if let Some(connection) =
            self.handles.netlink.as_mut().filter(|_| keeps && self.plan.planned_rules().is_empty())
        {
            connection.remove_kept()?;
            done.outcome.changed = true;
        }
        Ok(done)
    }

    fn passes(&mut self) -> Result<Done, ApplyError> {
        let mut chosen = None;
        let mut passes = 0;
        loop {
            let mut seen = self.look()?;
            let (backend, because) = match chosen {
                Some(choice) => choice,
                None => backend::choose(self.options.backend, &seen, &mut self.handles, self.plan)?,
            };
            chosen = Some((backend, because));
            let mut steps = self.steps(&seen, backend);
            self.obstacles(&seen, backend)?;
            let done = |run: &Self, seen: NamespaceState| {
                let (changed, warnings) = (!run.done.is_empty(), run.warnings(&seen, backend));
                Ok(Done { outcome: ApplyOutcome { backend, because, changed, warnings }, seen })
            };
            if steps.is_empty() {
                return done(self, seen);
            }
            if passes == PASSES {
                return Err(self.contended(&steps));
            }
            if self.lock.is_none() && !only_adds(&steps) {
                self.lock = Some(NetnsLock::take(self.options.patience)?);
                // Taking the lock has moved the generation, and another program may have been at work before that.
                seen = self.look()?;
                steps = self.steps(&seen, backend);
            }
            self.test(&steps)?;
            let adds = only_adds(&steps);
            match self.take(steps, &seen) {
                // The kernel has confirmed the rules at the generation they were worked out from. Routing has no generation.
                Ok(()) if adds && !seen.state.is_redirected() && self.has_routing(&mut seen)? => {
                    return done(self, seen);
                }
                Ok(()) => passes += 1,
                Err(ApplyError::Netlink(NetlinkError::Changed)) if Instant::now() < self.deadline => {}
                Err(cause) => return Err(cause),
            }
        }
    }

    /// What the namespace holds, and where the plan's policy routing fits into it.
    fn look(&mut self) -> Result<NamespaceState, ApplyError> {
        self.made = None;
        let mut seen = match self.seen.take() {
            Some(seen) => seen,
            None => NamespaceState::now(&mut self.handles, self.deadline)?,
        };
        seen.state.routing = self.place(std::mem::take(&mut seen.state.routing))?;
        Ok(seen)
    }

    fn place(&mut self, found: Vec<FoundRouting>) -> Result<Vec<FoundRouting>, ApplyError> {
        let Placed { placement, found } = self.handles.routes.place(self.plan, found)?;
        if let Some(obstacle) = placement.obstacle {
            return Err(ApplyError::DoesNotConverge(Box::new(obstacle)));
        }
        self.placed = placement.plan;
        Ok(found)
    }

    /// Whether the routing that the rules need is there, which a look from before it was added does not show.
    fn has_routing(&mut self, seen: &mut NamespaceState) -> Result<bool, ApplyError> {
        if RoutingItem::wanted(self.plan).is_empty() {
            return Ok(true);
        }
        let (found, surroundings) = self.handles.observe_routing()?;
        seen.surroundings = surroundings;
        seen.state.routing = self.place(found)?;
        Ok(RoutingItem::missing(&self.placed, &seen.state.routing).is_empty())
    }

    fn steps(&self, seen: &NamespaceState, backend: Backend) -> Vec<Step> {
        let goal = Goal {
            plan: &self.placed,
            rules_in: backend.rules_in(self.options.native_form),
            force: self.options.force && self.done.is_empty(),
            tproxy: self.options.tproxy,
            nft_in_transaction: self.handles.nft_in_transaction,
        };
        goal.steps_from(&seen.state)
    }

    /// An error if something would keep the plan's rules from taking effect, or hide rules of the mesh from us.
    fn obstacles(&self, seen: &NamespaceState, backend: Backend) -> Result<(), ApplyError> {
        // Native tables are ours alone: a run wakes them. Which tables a plan uses is worth finding out only if one is dormant.
        if backend != Backend::NativeNft && seen.asleep(|_| true).is_some() {
            let names = backend::tables(self.plan, backend);
            if let Some(asleep) = seen.asleep(|table| names.iter().any(|name| name == table)) {
                return Err(asleep.into());
            }
        }
        Ok(())
    }

    fn warnings(&self, seen: &NamespaceState, backend: Backend) -> Vec<String> {
        let mut warnings: Vec<String> =
            self.lock.as_ref().and_then(NetnsLock::warning).map(str::to_owned).into_iter().collect();
        // The rules are in force, and what is left behind goes by itself: no reason to undo anything.
        warnings.extend(self.unforgotten.as_ref().map(|cause| {
            format!(
                "{cause}: until a lost connection's conntrack entry expires (at most five days), a new one from its address and port bypasses the proxy"
            )
        }));
        let other = match backend {
            Backend::Netlink | Backend::Restore(Variant::Nft) => Some(Variant::Legacy),
            Backend::Restore(Variant::Legacy) => Some(Variant::Nft),
            Backend::NativeNft => None,
        };
        if let Some(other) = other.filter(|other| seen.state.in_use(*other)) {
            let name = other.name();
            warnings.push(format!(
                "another program has iptables-{name} rules in this network namespace; the kernel obeys both variants"
            ));
        }
        warnings
    }

    /// Asks the helper programs whether they would accept their changes.
    fn test(&self, steps: &[Step]) -> Result<(), ApplyError> {
        for step in steps {
            if let Step::Restore(variant, family, change) = step {
                let lock = self.lock.as_ref().ok_or(LockError::NotHeld)?;
                self.handles.programs.iptables(*variant, *family).test(change, lock)?;
            }
        }
        Ok(())
    }

    /// Takes the steps, one after the other.
    fn take(&mut self, steps: Vec<Step>, seen: &NamespaceState) -> Result<(), ApplyError> {
        self.start.get_or_insert_with(|| seen.state.clone());
        let mut native = seen.state.native.clone();
        // What a transaction is based on; each transaction makes it stale for the next.
        let mut base = seen.nf_tables.clone();
        for step in steps {
            log::debug!("{step}");
            let taken = self.step(&step, &mut base);
            let native_before = if let Step::Transaction(Transaction { native: Some(to), .. }) = &step {
                std::mem::replace(&mut native, to.clone())
            } else {
                native.clone()
            };
            // A step that reports a failure may have been done all the same.
            let may_be_done = match &taken {
                Ok(is_done) => *is_done,
                Err(error) => !error.says_that_nothing_was_done(),
            };
            if may_be_done {
                self.done.push(step.inverse(&seen.state, &native_before));
            }
            taken?;
        }
        Ok(())
    }

    /// The priority that the plan has for its policy rules, if it has one.
    fn rule_priority(&self) -> Option<u32> {
        self.placed.policy_routes().and_then(PolicyRoutes::priority)
    }

    /// Takes one step; `false` if it changed nothing.
    fn step(&mut self, step: &Step, base: &mut Option<netlink::Observed>) -> Result<bool, ApplyError> {
        match step {
            Step::AddRouting(item) => return Ok(self.handles.routes.add(*item, self.rule_priority())?),
            Step::RemoveRouting(found) => self.handles.routes.remove(found)?,
            Step::MarkForRemoval(found) => self.handles.routes.mark_for_removal(found)?,
            Step::Grace => grace(),
            Step::ForgetClosed => self.unforgotten = connections::forget_closed(self.plan).err(),
            Step::Restore(variant, family, change) => {
                let lock = self.lock.as_ref().ok_or(LockError::NotHeld)?;
                self.handles.programs.iptables(*variant, *family).commit(change, lock)?;
            }
            Step::Transaction(transaction) => {
                let connection = self.handles.netlink.as_mut().ok_or(NetlinkError::NoNfTables)?;
                let now = match base.take() {
                    Some(observed) => observed,
                    None => connection.observe(self.deadline)?,
                };
                self.made = connection.commit_and_tell(transaction, &now, self.deadline).map_err(changed)?;
            }
        }
        Ok(true)
    }

    fn contended(&self, steps: &[Step]) -> ApplyError {
        let difference = steps.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let is_routing = |step: &Step| {
            matches!(step, Step::AddRouting(_) | Step::RemoveRouting(_) | Step::MarkForRemoval(_))
        };
        if steps.iter().all(is_routing) {
            return ApplyError::RoutingNotKept { attempts: PASSES, difference };
        }
        ApplyError::Contended { attempts: PASSES, difference }
    }
}

/// A change that no longer fits was derived from an older state.
fn changed(error: NetlinkError) -> ApplyError {
    let stale =
        matches!(&error, NetlinkError::Batch(BatchError::NoSuchChain(_) | BatchError::NoSuchRule { .. }));
    if stale { NetlinkError::Changed.into() } else { error.into() }
}

/// Whether the steps only add what rules need, and change rules at a single instant: then the kernel itself keeps others
/// from coming in between, without a lock.
fn only_adds(steps: &[Step]) -> bool {
    let transactions = steps.iter().filter(|step| matches!(step, Step::Transaction(_))).count();
    let additions = steps.iter().filter(|step| matches!(step, Step::AddRouting(_))).count();
    transactions <= 1 && transactions + additions == steps.len()
}

impl RunError {
    fn untouched(cause: ApplyError) -> Self {
        Self { cause: Box::new(cause), aftermath: RollbackOutcome::Untouched }
    }
}
