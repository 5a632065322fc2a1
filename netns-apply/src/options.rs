//! What a caller chooses for a run.

use crate::exec::Programs;
use redirect_core::{
    RulePlan, Tproxy,
    accepted::AcceptedRules,
    options::{BackendChoice, NativeForm},
};
use std::time::Duration;

/// How many bytes the kernel says of a rule at most, in any backend, and of each of its matches; measured, with a third to spare.
const OF_RULE: usize = 256;
const OF_MATCH: usize = 128;
/// While one plan replaces another, the namespace holds both.
const PLANS_AT_ONCE: usize = 2;

/// How a plan is put in force.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ApplyOptions {
    /// Which backend programs the rules, as far as the user has chosen one.
    pub backend: BackendChoice,
    /// Whether rules are rewritten even where they are in force.
    pub force: bool,
    /// How native rules are written.
    pub native_form: NativeForm,
    /// Where helper programs are.
    pub programs: Programs,
    /// How long to wait for another program who is changing the same namespace, or the same rules.
    pub patience: Duration,
    /// Limit in bytes on the rules that one reading takes in, of any program, besides what the rules of the plan may take; `None` for no
    /// limit. Beyond it, the run or the look fails with [`NetlinkError::TooMuch`](crate::netlink::NetlinkError::TooMuch),
    /// [`LegacyError::TooMuch`](crate::LegacyError::TooMuch) or [`ExecError::TooMuch`](crate::ExecError::TooMuch). Without the plan's
    /// part, the same limit holds for routing.
    pub most_read: Option<usize>,
    /// TPROXY routing that counts as the mesh's even though no rule uses its mark: that of the settings.
    pub tproxy: Option<Tproxy>,
    /// The rules of other programs whose effect on capture is meant. KubeVirt's are always among them.
    pub accepted: AcceptedRules,
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
            accepted: AcceptedRules::default(),
        }
    }
}

/// Each returns the same options but for one.
impl ApplyOptions {
    /// With this backend: [`backend`](field@Self::backend).
    #[must_use]
    pub fn backend(self, backend: BackendChoice) -> Self {
        Self { backend, ..self }
    }

    /// Rewriting rules even where they are in force, or not: [`force`](field@Self::force).
    #[must_use]
    pub fn force(self, force: bool) -> Self {
        Self { force, ..self }
    }

    /// With native rules written like this: [`native_form`](field@Self::native_form).
    #[must_use]
    pub fn native_form(self, native_form: NativeForm) -> Self {
        Self { native_form, ..self }
    }

    /// With helper programs found like this: [`programs`](field@Self::programs).
    #[must_use]
    pub fn programs(self, programs: Programs) -> Self {
        Self { programs, ..self }
    }

    /// Waiting this long for other programs: [`patience`](field@Self::patience).
    #[must_use]
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Reading this many bytes at most: [`most_read`](field@Self::most_read).
    #[must_use]
    pub fn most_read(self, most_read: Option<usize>) -> Self {
        Self { most_read, ..self }
    }

    /// With this TPROXY routing as the mesh's own: [`tproxy`](field@Self::tproxy).
    #[must_use]
    pub fn tproxy(self, tproxy: Option<Tproxy>) -> Self {
        Self { tproxy, ..self }
    }

    /// With these rules of other programs accepted: [`accepted`](field@Self::accepted).
    #[must_use]
    pub fn accepted(self, accepted: AcceptedRules) -> Self {
        Self { accepted, ..self }
    }
}

impl ApplyOptions {
    /// How many bytes of rules the programs of this project read that no plan asks for: all the same, so that none can judge a namespace that is
    /// too much for another. A container with CAP_NET_ADMIN may make as many as it likes; a byte takes up to seven of memory.
    pub const MOST_READ: usize = 4 << 20;

    /// How many bytes of routing are read.
    pub(crate) fn most_routing(&self) -> usize {
        self.most_read.unwrap_or(usize::MAX)
    }

    /// How many bytes of rules are read of a namespace that may hold a plan: its own rules are always readable.
    pub(crate) fn most_read_with(&self, plan: &RulePlan) -> usize {
        self.most_read.map_or(usize::MAX, |most| most.saturating_add(room_for(plan)))
    }
}

/// How many bytes the rules of a plan take at most where they are read.
fn room_for(plan: &RulePlan) -> usize {
    let of_one = |family| {
        let rules = plan.planned_rules().iter().filter(move |planned| planned.scope().covers(family));
        rules.map(|planned| OF_RULE.saturating_add(planned.rule().matches.len().saturating_mul(OF_MATCH)))
    };
    let bytes: usize = plan.families().iter().copied().flat_map(of_one).sum();
    bytes.saturating_mul(PLANS_AT_ONCE)
}
