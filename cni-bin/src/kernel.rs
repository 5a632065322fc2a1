//! What the plugin asks of network namespaces, kept apart so that decisions can be tested without any.

use crate::selection::Programming;
use netns_apply::{
    ApplyOptions, Capability, Mismatch, Programs, RollbackOutcome, RunError, Snapshot,
    netns::{Netns, NetnsError},
};
use pod_netns::{FOREIGN, Outside, hosts, suitable};
use redirect_core::{RulePlan, accepted::AcceptedRules};
use std::{error::Error, net::IpAddr, path::Path, time::Duration};

/// The network namespaces of this machine.
pub trait MachineNamespaces: Sync {
    /// Does some work, once, inside the namespace a runtime names.
    ///
    /// # Errors
    /// It is not a network namespace, or one the plugin must not touch; then nothing is done.
    fn inside(&self, path: &Path, work: &mut NamespaceWork<'_>) -> Result<(), KernelError>;

    /// Whether plans of this kind can be put in force here at all. Changes nothing.
    ///
    /// # Errors
    /// What the kernel or the machine lacks.
    fn preflight(&self, programming: Programming) -> Result<(), KernelError>;
}

/// What is done inside a namespace. It may be done on another thread.
pub type NamespaceWork<'a> = dyn FnMut(&dyn Namespace) + Send + 'a;

/// The network namespace that the calling thread is in.
pub trait Namespace {
    /// Its addresses, in the kernel's order.
    ///
    /// # Errors
    /// The namespace cannot be entered, or its addresses cannot be read.
    fn addresses(&self) -> Result<Vec<IpAddr>, KernelError>;

    /// Whether IPv6 is switched on there.
    fn has_ipv6(&self) -> bool;

    /// Puts a plan in force, wholly or not at all, waiting at most `patience` for other programs at work there. Warns of other programs'
    /// rules that interfere, unless they are accepted.
    ///
    /// # Errors
    /// Why the plan could not be put in force. The namespace is then as it was, unless the error is [`KernelError::Left`].
    fn apply(&self, wanted: &WantedRules<'_>, patience: Duration) -> Result<Applied, KernelError>;

    /// What is not as planned, or which of other programs' rules interfere with the plan; and which of them do because that is accepted.
    ///
    /// # Errors
    /// The namespace cannot be inspected.
    fn compare(&self, wanted: &WantedRules<'_>) -> Result<NamespaceComparison, KernelError>;
}

/// What a pod should have.
#[derive(Debug, Clone, Copy)]
pub struct WantedRules<'a> {
    /// Its rules.
    pub plan: &'a RulePlan,
    /// What programs them, and in which form.
    pub programming: Programming,
    /// Which of other programs' rules may interfere.
    pub accepted: &'a AcceptedRules,
}

/// How a network namespace compares with a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamespaceComparison {
    /// What is not as planned, if anything.
    pub difference: Option<PlanMismatch>,
    /// Other programs' rules that interfere, which is accepted: each in words.
    pub accepted: Vec<String>,
}

/// What is not as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanMismatch {
    /// What, in words.
    pub text: String,
    /// Where it may come from.
    pub origin: &'static str,
}

/// What applying did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// What programmed the rules.
    pub backend: String,
    /// Why that backend.
    pub because: String,
    /// Whether anything was changed.
    pub changed: bool,
    /// What an operator should know even though all went well.
    pub warnings: Vec<String>,
}

/// Why something could not be done in a namespace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// It is not a network namespace, or one the plugin must not touch.
    #[error("CNI_NETNS: {0}")]
    Namespace(String),
    /// The kernel or a helper program refused or failed; the namespace is as it was.
    #[error("{0}")]
    Failed(String),
    /// The kernel or a helper program refused or failed, and not everything could be undone.
    #[error("{0}")]
    Left(String),
}

/// The kernel this process runs on.
#[derive(Debug, Clone, Copy, Default)]
pub struct Linux;

impl MachineNamespaces for Linux {
    fn inside(&self, path: &Path, work: &mut NamespaceWork<'_>) -> Result<(), KernelError> {
        let namespace = Netns::open(path).map_err(|error| KernelError::Namespace(error.to_string()))?;
        if let Some(hosts) = hosts(&namespace).map_err(|error| failed(&error))? {
            let refusal = format!("refusing to change {}: it is {hosts}", path.display());
            return Err(KernelError::Namespace(refusal));
        }
        let outside = Outside::of_this_process();
        namespace.run(|| work(&Pod { is_foreign: outside.finds_this_foreign() })).map_err(|error| {
            // The file of a namespace of another kind looks the same, so that is noticed only now.
            let refused = matches!(error, NetnsError::Enter { .. } | NetnsError::NotANamespace { .. });
            let kind = if refused { KernelError::Namespace } else { KernelError::Failed };
            kind(error.to_string())
        })
    }

    fn preflight(&self, programming: Programming) -> Result<(), KernelError> {
        // What ADD needs to enter a namespace.
        if Capability::SYS_ADMIN.is_held() == Some(false) {
            return Err(KernelError::Failed(format!(
                "{} is needed to enter network namespaces",
                Capability::SYS_ADMIN.name
            )));
        }
        netns_apply::preflight(&options(programming, false)).map(drop).map_err(|error| failed(&error))
    }
}

/// The network namespace of a pod, which the calling thread is in.
struct Pod {
    /// Whether it belongs to a user namespace other than the host's.
    is_foreign: bool,
}

fn failed(error: &dyn Error) -> KernelError {
    KernelError::Failed(error.to_string())
}

impl From<RunError> for KernelError {
    fn from(error: RunError) -> Self {
        match error.aftermath {
            RollbackOutcome::Untouched | RollbackOutcome::Undone => Self::Failed(error.to_string()),
            RollbackOutcome::Left { .. } => Self::Left(error.to_string()),
        }
    }
}

impl Pod {
    fn options(&self, wanted: &WantedRules<'_>) -> ApplyOptions {
        options(wanted.programming, self.is_foreign).accepted(wanted.accepted.clone())
    }
}

impl Namespace for Pod {
    fn addresses(&self) -> Result<Vec<IpAddr>, KernelError> {
        netns_apply::facts::addresses().map_err(|error| failed(&error))
    }

    fn has_ipv6(&self) -> bool {
        netns_apply::facts::Ipv6::here().is_everywhere()
    }

    fn apply(&self, wanted: &WantedRules<'_>, patience: Duration) -> Result<Applied, KernelError> {
        let options = self.options(wanted).patience(patience);
        let outcome = netns_apply::apply_and_search(wanted.plan, &options)?;
        Ok(Applied {
            backend: outcome.backend.to_string(),
            because: if self.is_foreign { FOREIGN.to_owned() } else { outcome.because.to_string() },
            changed: outcome.changed,
            warnings: outcome.warnings,
        })
    }

    fn compare(&self, wanted: &WantedRules<'_>) -> Result<NamespaceComparison, KernelError> {
        let options = self.options(wanted).most_read(Some(ApplyOptions::MOST_READ));
        let snapshot = Snapshot::take(wanted.plan, &options);
        let verified = snapshot.and_then(|snapshot| snapshot.verify_in_words(wanted.plan, &options));
        let (verdict, text) = verified.map_err(|error| failed(&error))?;
        let different = verdict.mismatch.as_ref().zip(text);
        let difference = different.map(|(mismatch, text)| PlanMismatch { text, origin: origin(mismatch) });
        Ok(NamespaceComparison {
            difference,
            accepted: verdict.accepted.iter().map(ToString::to_string).collect(),
        })
    }
}

fn origin(mismatch: &Mismatch) -> &'static str {
    if matches!(mismatch, Mismatch::Interference(..) | Mismatch::DoesNotConverge(_)) {
        "another program has rules in the pod's network namespace that packets meet, too"
    } else {
        "the rules or the pod's annotations changed after ADD"
    }
}

/// Helper programs, if any are needed, are looked up in the runtime's PATH, then in the usual folders.
fn options(programming: Programming, is_foreign: bool) -> ApplyOptions {
    let programs = Programs::in_path(&std::env::var_os("PATH").unwrap_or_default());
    let Programming { backend, native_form } = programming;
    ApplyOptions::default().backend(suitable(backend, is_foreign)).native_form(native_form).programs(programs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::wire::{CniError, Code};
    use netns_apply::ApplyError;

    /// Code and details of the answer to a run that left this.
    fn report(aftermath: RollbackOutcome) -> (Code, String) {
        let run = RunError { cause: Box::new(ApplyError::NotPermitted), aftermath };
        let error = CniError::from(KernelError::from(run));
        assert!(error.message.starts_with("CAP_NET_ADMIN is missing"), "{}", error.message);
        (error.code, error.details)
    }

    #[test]
    fn only_a_namespace_that_is_as_it_was_is_said_to_be() {
        let as_before = (Code::NotProgrammed, "the pod's network namespace is as it was before".to_owned());
        assert_eq!(report(RollbackOutcome::Untouched), as_before);
        assert_eq!(report(RollbackOutcome::Undone), as_before);
        let left = vec!["ip -4 rule: 32765: from all fwmark 0x539 lookup 133".to_owned()];
        for left in [left, Vec::new()] {
            let (code, details) = report(RollbackOutcome::Left { left, failures: Vec::new() });
            assert_eq!(code, Code::NotProgrammed);
            assert!(details.contains("was not restored"), "{details}");
            assert!(details.contains("deletes it"), "{details}");
        }
    }
}
