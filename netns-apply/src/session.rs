//! A network namespace, and what is done with plans in it.

use crate::{
    ApplyError, ApplyOptions, ApplyOutcome, Live, Mismatch, RunError, Snapshot, apply, facts,
    netns::{Netns, NetnsError},
    routes::RouteError,
    verify,
};
use packet_trace::{Packet, Trace};
use redirect_core::{Families, RulePlan};
use std::path::Path;

/// A network namespace, and what is done with plans in it: every call enters it on a thread of its own and returns outside.
///
/// ```no_run
/// use netns_apply::Session;
/// use redirect_core::Redirect;
///
/// let pod = Session::open("/run/netns/demo")?;
/// let plan = Redirect::sidecar(pod.families()?).build()?.plan();
/// pod.apply(&plan)?;
/// assert_eq!(pod.verify(&plan)?, None);
/// pod.cleanup()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session {
    netns: Netns,
    options: ApplyOptions,
}

/// Why something could not be done in a network namespace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// It cannot be opened or entered.
    #[error(transparent)]
    Namespace(#[from] NetnsError),
    /// It cannot be inspected.
    #[error(transparent)]
    Look(#[from] ApplyError),
    /// A run failed; the error says in which state it left the namespace.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Its addresses cannot be listed.
    #[error("network namespace: {0}")]
    Addresses(RouteError),
    /// It has no address by which others reach it yet, so the families are not known.
    #[error("the network namespace has no address yet, but for loopback and link-local ones")]
    NoAddress,
}

impl Session {
    /// Opens the namespace behind a path, such as `/run/netns/demo` or `/proc/1234/ns/net`, with default options.
    ///
    /// # Errors
    /// [`SessionError::Namespace`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, SessionError> {
        Ok(Self { netns: Netns::open(path)?, options: ApplyOptions::default() })
    }

    /// The same with these options.
    #[must_use]
    pub fn with_options(self, options: ApplyOptions) -> Self {
        Self { options, ..self }
    }

    /// The families that its addresses are of, whichever comes first.
    ///
    /// # Errors
    /// [`SessionError::Addresses`], [`SessionError::NoAddress`], or those of entering it.
    pub fn families(&self) -> Result<Families, SessionError> {
        let addresses = self.netns.run(facts::addresses)?.map_err(SessionError::Addresses)?;
        Families::of(&addresses, true).ok_or(SessionError::NoAddress)
    }

    /// Puts a plan in force, replacing any that was in force there, wholly or not at all. The outcome warns of other programs' rules that
    /// interfere.
    ///
    /// # Errors
    /// [`SessionError::Run`], or those of entering it.
    pub fn apply(&self, plan: &RulePlan) -> Result<ApplyOutcome, SessionError> {
        Ok(self.netns.run(|| apply::apply_and_search(plan, &self.options))??)
    }

    /// What is not as planned, if anything: rules, routing, and other programs' rules that interfere.
    ///
    /// # Errors
    /// [`SessionError::Look`], or those of entering it.
    pub fn verify(&self, plan: &RulePlan) -> Result<Option<Mismatch>, SessionError> {
        Ok(self.netns.run(|| verify::verify(plan, &self.options))??)
    }

    /// The same in a sentence that says what it means for the traffic.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn verify_in_words(&self, plan: &RulePlan) -> Result<Option<String>, SessionError> {
        let look = || Snapshot::take(plan, &self.options)?.verify_in_words(plan, &self.options);
        Ok(self.netns.run(look)??.1)
    }

    /// Where a packet ends by everything that the namespace holds. The plan's own rules know the settings behind them.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn trace(&self, plan: &RulePlan, packet: &Packet) -> Result<Trace, SessionError> {
        let live = self.netns.run(|| Live::now(Some(plan), &self.options))??;
        Ok(live.rules(packet.family(), Some(plan)).trace(packet))
    }

    /// Removes everything that any plan has put there, whatever the backend.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn cleanup(&self) -> Result<ApplyOutcome, SessionError> {
        Ok(self.netns.run(|| apply::cleanup(&self.options))??)
    }
}
