//! Putting a plan in force, wholly or not at all; removing it; comparing it with the kernel.
//!
//! The order of a run: take the namespace's lock; look at everything; choose the backend; work out every change; ask
//! whether all of them would be accepted; only then act. Acting goes routes, rules, leftovers of other backends, stale
//! routes, so that traffic is captured by the old rules, the new ones or both at every moment. Whatever fails undoes
//! what was done.

use crate::{
    ApplyError,
    backend::{self, Backend, Because, Means, NativeTables, Observed},
    exec::Programs,
    lock::NetnsLock,
    netlink::{NativeChange, NetlinkError, Transaction},
    routes::{RouteStep, Routing},
};
use redirect_core::{
    Family, RulePlan, Tproxy,
    change::{Change, Difference},
    netlink::NativeForm,
    options::{BackendChoice, Variant},
    plan::FamilyRules,
};
use std::{
    fmt,
    time::{Duration, Instant},
};

/// How often a run starts over when somebody else changes the same rules.
const ATTEMPTS: usize = 3;
const VARIANTS: [Variant; 2] = [Variant::Legacy, Variant::Nft];

/// How a plan is put in force.
#[derive(Debug, Clone)]
pub struct ApplyOptions {
    /// What programs the rules, as far as the user says.
    pub backend: BackendChoice,
    /// Whether rules are written anew even where they are in force.
    pub force: bool,
    /// How native rules are written; only over netlink there is a choice.
    pub native_form: NativeForm,
    /// Where helper programs are.
    pub programs: Programs,
    /// How long to wait for somebody else who is changing the same namespace.
    pub patience: Duration,
    /// How many bytes of rules [`verify`] reads at most, of whatever is there; none for all of them.
    pub most_read: Option<usize>,
    /// Routing of TPROXY that counts as the mesh's although no rule of the mesh is left: that of the settings.
    pub tproxy: Option<Tproxy>,
}

impl Default for ApplyOptions {
    fn default() -> Self {
        Self {
            backend: BackendChoice::Auto,
            force: false,
            native_form: NativeForm::Plain,
            programs: Programs::usual(),
            patience: Duration::from_secs(30),
            most_read: None,
            tproxy: None,
        }
    }
}

/// What a run did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// What programmed the rules.
    pub backend: Backend,
    /// Why that.
    pub because: Because,
    /// Whether anything was changed.
    pub changed: bool,
    /// What an operator should know although all went well.
    pub warnings: Vec<String>,
}

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
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { family, difference } => write!(f, "{family}: {difference}"),
            Self::Routing(what) => write!(f, "missing: {what}"),
            Self::TwoBackends => f.write_str("the mesh has rules in more than one backend"),
            Self::OtherNativeRules => f.write_str("the native tables inet istio-proxy-* hold other rules"),
            Self::NoNativeTables => f.write_str("the native tables inet istio-proxy-* are missing"),
        }
    }
}

/// Puts a plan in force in the calling thread's network namespace, in place of whatever plan was.
///
/// # Errors
/// Why not; the namespace is then as it was.
pub fn apply(plan: &RulePlan, options: &ApplyOptions) -> Result<Outcome, ApplyError> {
    run(plan, options)
}

/// Removes everything any plan has put into the calling thread's network namespace, whatever the backend.
///
/// # Errors
/// Why not; the namespace is then as it was.
pub fn cleanup(options: &ApplyOptions) -> Result<Outcome, ApplyError> {
    run(&RulePlan::empty(), options)
}

/// The first thing in the calling thread's network namespace that is not as planned, if any. Rules are compared in
/// order; rules of others are passed over.
///
/// # Errors
/// The namespace cannot be looked at.
pub fn verify(plan: &RulePlan, options: &ApplyOptions) -> Result<Option<Mismatch>, ApplyError> {
    let mut means = Means::open(&options.programs, options.backend)?;
    if let (Some(connection), Some(most)) = (&mut means.netlink, options.most_read) {
        connection.limit(most);
    }
    let observed = Observed::now(&mut means)?;
    let (backend, _) = backend::choose(options.backend, &observed, &mut means, plan)?;
    let redirected = VARIANTS.into_iter().filter(|variant| observed.redirected_by(*variant)).count();
    if redirected + usize::from(!observed.native.is_empty()) > 1 {
        return Ok(Some(Mismatch::TwoBackends));
    }
    let rules = match backend {
        Backend::NativeNft if observed.native.is_empty() => Some(Mismatch::NoNativeTables),
        Backend::NativeNft if means.netlink.is_some() && !observed.native.hold(plan, options.native_form) => {
            Some(Mismatch::OtherNativeRules)
        }
        Backend::NativeNft => None,
        Backend::Netlink => different(&observed, Variant::Nft, plan),
        Backend::Restore(variant) => different(&observed, variant, plan),
    };
    let missing = || Routing::of(plan).beyond(&observed.routing).first().map(ToString::to_string);
    Ok(rules.or_else(|| missing().map(Mismatch::Routing)))
}

/// The tables of legacy iptables in the calling thread's network namespace that cannot be read, because no program for it is
/// installed here. Where there are some, rules that [`verify`] misses may be in them.
#[must_use]
pub fn unreadable_tables(programs: &Programs) -> Vec<String> {
    let tables = backend::unreadable(programs).into_iter();
    tables.map(|(family, table)| format!("{family} {table}")).collect()
}

/// The first rule of either family that is not as planned.
fn different(observed: &Observed, variant: Variant, plan: &RulePlan) -> Option<Mismatch> {
    Family::BOTH.into_iter().find_map(|family| {
        let difference = Difference::find(observed.rules(variant).of(family), &plan.rules(family))?;
        Some(Mismatch::Rule { family, difference })
    })
}

/// What would program rules in an empty network namespace of this kernel, and why; an error says what is missing for that. Looks, and
/// changes nothing; what the calling thread's namespace holds does not count, and is read only where the kernel has no nf_tables.
///
/// # Errors
/// What a plan could not be put in force without.
pub fn preflight(options: &ApplyOptions) -> Result<(Backend, Because), ApplyError> {
    let mut means = Means::open(&options.programs, options.backend)?;
    let observed = match &means.netlink {
        Some(_) => Observed::default(),
        None => Observed::now(&mut means)?,
    };
    backend::choose(options.backend, &observed, &mut means, &RulePlan::empty())
}

fn run(plan: &RulePlan, options: &ApplyOptions) -> Result<Outcome, ApplyError> {
    let lock = NetnsLock::take(options.patience)?;
    let means = Means::open(&options.programs, options.backend)?;
    let mut run = Run { plan, options, lock, means, native_before: None };
    let mut changed = false;
    let mut before = Observed::now(&mut run.means)?;
    let (backend, because) = backend::choose(options.backend, &before, &mut run.means, plan)?;
    for _ in 0..ATTEMPTS {
        let mut work = run.work(&before, backend, options.force && !changed);
        if changed && work.native == Some(NativeStep::Write) {
            // Written a moment ago: this nft lists them in other words than we know.
            work.native = None;
        }
        if work.is_empty() {
            let warnings = warnings(&before, backend);
            return Ok(Outcome { backend, because, changed, warnings });
        }
        run.test(&work)?;
        match run.act(&work, &before) {
            // The kernel took it at the generation it was worked out on, and says so: there is nothing to look at again.
            Ok(()) if work.is_one_transaction(&run.means) => {
                return Ok(Outcome { backend, because, changed: true, warnings: warnings(&before, backend) });
            }
            Ok(()) => changed = true,
            // Nothing was committed; it is worked out anew on what there is now.
            Err(ApplyError::Netlink(NetlinkError::Changed)) => run.undo_routing(&work)?,
            Err(cause) => return Err(run.undo(&before, cause)),
        }
        before = Observed::now(&mut run.means)?;
    }
    let difference = run.work(&before, backend, false).describe();
    Err(ApplyError::Contended { attempts: ATTEMPTS, difference })
}

fn warnings(observed: &Observed, backend: Backend) -> Vec<String> {
    let other = match backend {
        Backend::Netlink | Backend::Restore(Variant::Nft) => Variant::Legacy,
        Backend::Restore(Variant::Legacy) => Variant::Nft,
        Backend::NativeNft => return Vec::new(),
    };
    if !observed.in_use(other) {
        return Vec::new();
    }
    let name = other.name();
    vec![format!(
        "another program has iptables-{name} rules in this network namespace; the kernel obeys both variants"
    )]
}

/// A run: what is wanted, and the means.
struct Run<'a> {
    plan: &'a RulePlan,
    options: &'a ApplyOptions,
    lock: NetnsLock,
    means: Means<'a>,
    /// The native tables before they were changed over netlink, as `nft` lists them.
    native_before: Option<NativeTables>,
}

/// Everything a run will do.
struct Work {
    backend: Backend,
    /// Changes to iptables rules, the chosen backend's first.
    rules: Vec<(Variant, Family, Change)>,
    /// Whether the native tables are to be written, or removed.
    native: Option<NativeStep>,
    add: Vec<RouteStep>,
    remove: Vec<RouteStep>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NativeStep {
    Write,
    Remove,
}

impl Work {
    fn is_empty(&self) -> bool {
        self.rules.iter().all(|(_, _, change)| change.is_empty())
            && self.native.is_none()
            && self.add.is_empty()
            && self.remove.is_empty()
    }

    /// Whether something is left to do, and may fail, once nf_tables is as wanted.
    fn goes_on_after_the_transaction(&self) -> bool {
        let legacy = |(variant, _, change): &(Variant, Family, Change)| {
            *variant == Variant::Legacy && !change.is_empty()
        };
        self.native.is_some() && (!self.remove.is_empty() || self.rules.iter().any(legacy))
    }

    /// Whether all rules, native ones too, change in one transaction of the kernel.
    fn is_one_transaction(&self, means: &Means<'_>) -> bool {
        means.netlink.is_some() && self.rules_by_programs(means).all(|(_, _, change)| change.is_empty())
    }

    /// The changes that helper programs make.
    fn rules_by_programs<'a>(
        &'a self,
        means: &Means<'_>,
    ) -> impl Iterator<Item = &'a (Variant, Family, Change)> {
        let nft_by_netlink = means.serves(Variant::Nft);
        self.rules.iter().filter(move |(variant, ..)| !(nft_by_netlink && *variant == Variant::Nft))
    }

    /// What is still to be done, in a few words.
    fn describe(&self) -> String {
        let rules = self.rules.iter().filter(|(_, _, change)| !change.is_empty());
        let tables = rules.flat_map(|(variant, family, change)| {
            change.tables.iter().map(move |t| format!("{family} {} ({})", t.table.name(), variant.name()))
        });
        let routes = self.add.iter().map(ToString::to_string);
        tables
            .chain(routes)
            .chain(self.remove.iter().map(|step| format!("stray {step}")))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl Run<'_> {
    fn work(&self, before: &Observed, backend: Backend, force: bool) -> Work {
        let wanted_routing = Routing::of(self.plan);
        let mut rules = Vec::new();
        let mut others = Vec::new();
        for variant in VARIANTS {
            for family in Family::BOTH {
                let observed = before.rules(variant).of(family);
                if backend.variant() == Some(variant) {
                    let wanted = self.plan.rules(family);
                    let change = if force { Change::rewriting } else { Change::between };
                    rules.push((variant, family, change(observed, &wanted)));
                } else {
                    others.push((variant, family, Change::between(observed, &FamilyRules::default())));
                }
            }
        }
        rules.extend(others);
        let native = match backend {
            Backend::NativeNft if self.plan.families().is_empty() && before.native.is_empty() => None,
            Backend::NativeNft if self.plan.families().is_empty() => Some(NativeStep::Remove),
            Backend::NativeNft if before.native.hold(self.plan, self.options.native_form) && !force => None,
            Backend::NativeNft => Some(NativeStep::Write),
            Backend::Netlink | Backend::Restore(_) => {
                (!before.native.is_empty()).then_some(NativeStep::Remove)
            }
        };
        let add = wanted_routing.beyond(&before.routing);
        let mut remove = self.stale_routing(before).beyond(&wanted_routing);
        // Rules go before the routes they use.
        remove.reverse();
        Work { backend, rules, native, add, remove }
    }

    /// The routing found that is the mesh's. Others do transparent proxying, too: their routing looks the same, so it
    /// counts as ours only where the mesh has rules, or where the settings name it.
    fn stale_routing(&self, before: &Observed) -> Routing {
        let mut ours = before.routing.clone();
        if !before.is_redirected() {
            let named = self.options.tproxy;
            ours.rules.retain(|(_, mark, table)| named.is_some_and(|t| (t.mark, t.table) == (*mark, *table)));
            ours.routes.retain(|(_, table)| named.is_some_and(|t| t.table == *table));
        }
        ours
    }

    /// Asks whether every change would be accepted.
    fn test(&self, work: &Work) -> Result<(), ApplyError> {
        for (variant, family, change) in work.rules_by_programs(&self.means) {
            backend::restore::test(&self.options.programs, *variant, *family, change, &self.lock)?;
        }
        if work.native == Some(NativeStep::Write) && self.means.netlink.is_none() {
            backend::native::test(&self.options.programs, self.plan, &self.lock)?;
        }
        Ok(())
    }

    fn act(&mut self, work: &Work, before: &Observed) -> Result<(), ApplyError> {
        for step in &work.add {
            self.means.routes.add(*step)?;
        }
        if self.means.netlink.is_some() && work.goes_on_after_the_transaction() && !before.native.is_empty() {
            // The transaction cannot be half done, but what follows may fail.
            self.native_before = Some(NativeTables::observe(&self.options.programs)?);
        }
        self.transact(work, before)?;
        let programs = &self.options.programs;
        let by_programs = self.means.netlink.is_none();
        if by_programs && work.backend == Backend::NativeNft && work.native == Some(NativeStep::Write) {
            backend::native::commit(programs, self.plan, &self.lock)?;
        }
        for (variant, family, change) in work.rules_by_programs(&self.means) {
            backend::restore::commit(programs, *variant, *family, change, &self.lock)?;
        }
        if by_programs && work.native == Some(NativeStep::Remove) {
            backend::native::remove(programs, &self.lock)?;
        }
        for step in &work.remove {
            self.means.routes.remove(*step)?;
        }
        Ok(())
    }

    /// Everything that concerns nf_tables, at one instant.
    fn transact(&mut self, work: &Work, before: &Observed) -> Result<(), ApplyError> {
        let native = match work.native {
            None => NativeChange::Keep,
            Some(NativeStep::Remove) => NativeChange::Remove,
            Some(NativeStep::Write) => NativeChange::Write(self.plan, self.options.native_form),
        };
        let of_nft = work.rules.iter().filter(|(variant, ..)| *variant == Variant::Nft);
        let rules: Vec<(Family, Change)> =
            of_nft.map(|(_, family, change)| (*family, change.clone())).collect();
        self.commit(&Transaction { rules: &rules, native }, before)
    }

    fn commit(&mut self, transaction: &Transaction<'_>, base: &Observed) -> Result<(), ApplyError> {
        if let (Some(connection), Some(dump)) = (&mut self.means.netlink, &base.dump) {
            connection.commit(transaction, dump, Instant::now() + self.options.patience)?;
        }
        Ok(())
    }

    /// Takes back the routing that was added for rules that were not.
    fn undo_routing(&self, work: &Work) -> Result<(), ApplyError> {
        Ok(work.add.iter().rev().try_for_each(|step| self.means.routes.remove(*step))?)
    }

    /// Brings the namespace back to what it was, and returns the cause, or both where that fails.
    fn undo(&mut self, before: &Observed, cause: ApplyError) -> ApplyError {
        match self.restore(before) {
            Ok(()) => cause,
            Err(undo) => ApplyError::Rollback { cause: Box::new(cause), undo: Box::new(undo) },
        }
    }

    fn restore(&mut self, before: &Observed) -> Result<(), ApplyError> {
        let programs = &self.options.programs;
        let now = Observed::now(&mut self.means)?;
        for step in before.routing.beyond(&now.routing) {
            self.means.routes.add(step)?;
        }
        let back = |variant, family| {
            let (now, before) = (now.rules(variant).of(family), before.rules(variant).of(family));
            (variant, family, Change::back(now, before))
        };
        let by_programs = VARIANTS.into_iter().filter(|variant| !self.means.serves(*variant));
        for (variant, family, change) in
            by_programs.flat_map(|variant| Family::BOTH.map(|family| back(variant, family)))
        {
            backend::restore::commit(programs, variant, family, &change, &self.lock)?;
        }
        let rules = Family::BOTH.map(|family| (family, back(Variant::Nft, family).2));
        let remove_native = self.means.netlink.is_some() && before.native.is_empty();
        let native = if remove_native { NativeChange::Remove } else { NativeChange::Keep };
        self.commit(&Transaction { rules: &rules, native }, &now)?;
        if !remove_native && now.native != before.native {
            let native = self.native_before.as_ref().unwrap_or(&before.native);
            native.put_back(programs, &self.lock)?;
        }
        for step in now.routing.beyond(&before.routing).into_iter().rev() {
            self.means.routes.remove(step)?;
        }
        Ok(())
    }
}
