//! What a caller chooses for a run.

use crate::exec::Programs;
use redirect_core::{
    Tproxy,
    options::{BackendChoice, NativeForm},
};
use std::time::Duration;

/// How a plan is put in force.
#[derive(Debug, Clone)]
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
    /// Limit in bytes on the rules that one reading takes in, of any program; `None` for no limit. Beyond it, the run or the
    /// look fails with [`NetlinkError::TooMuch`](crate::netlink::NetlinkError::TooMuch), [`LegacyError::TooMuch`](crate::LegacyError::TooMuch) or
    /// [`ExecError::TooMuch`](crate::ExecError::TooMuch). The same limit holds for routing.
    pub most_read: Option<usize>,
    /// TPROXY routing that counts as the mesh's even though no rule uses its mark: that of the settings.
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

impl ApplyOptions {
    /// [`most_read`](Self::most_read) as a number.
    pub(crate) fn most_read(&self) -> usize {
        self.most_read.unwrap_or(usize::MAX)
    }
}
