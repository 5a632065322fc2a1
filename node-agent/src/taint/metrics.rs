//! What the agent's taint controller counts. [`crate::metrics::METRICS`] says what each means.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::node::Wanted;
use crate::metrics::ResultLabel;

/// What was to be changed, and how that ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ChangeLabels {
    change: &'static str,
    result: &'static str,
}

/// The metrics, in the order of the table.
#[derive(Debug, Clone, Default)]
pub struct TaintMetrics {
    /// See the table.
    pub verified: Gauge,
    /// See the table.
    pub probes: Family<ResultLabel, Counter>,
    /// See the table.
    pub changes: Family<ChangeLabels, Counter>,
}

/// Every way a change may end.
pub const RESULTS: [&str; 6] = ["done", "gone", "changed", "refused", "rejected", "unanswered"];

impl TaintMetrics {
    /// A counter that is there from the start shows its first rise.
    pub fn start_at_nought(&self) {
        for result in ["redirected", "failed", "impossible"] {
            drop(self.probes.get_or_create(&ResultLabel { result }));
        }
        for result in RESULTS {
            for wanted in [Some(Wanted::Tainted), Some(Wanted::Free), None] {
                drop(self.changes.get_or_create(&change(wanted, result)));
            }
        }
    }
}

/// Labels of a change: of the taint, or, where nothing is wanted of that, of the condition.
#[must_use]
pub const fn change(wanted: Option<Wanted>, result: &'static str) -> ChangeLabels {
    let change = match wanted {
        Some(Wanted::Tainted) => "add",
        Some(Wanted::Free) => "remove",
        None => "condition",
    };
    ChangeLabels { change, result }
}
