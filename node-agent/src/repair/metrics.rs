//! What the repair controller counts. [`crate::metrics::METRICS`] says what each means.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use super::action::{Action, REASONS};

/// Upper bounds of both histograms, in seconds.
const BUCKETS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];

/// What was done, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RepairedLabels {
    r#type: &'static str,
    result: &'static str,
}

/// What was done, and why it ended so.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AttemptLabels {
    r#type: &'static str,
    reason: &'static str,
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TypeLabel {
    r#type: &'static str,
}

/// The metrics, in the order of the table.
#[derive(Debug, Clone)]
pub struct RepairMetrics {
    /// See the table.
    pub repaired: Family<RepairedLabels, Counter>,
    /// See the table.
    pub attempts: Family<AttemptLabels, Counter>,
    /// See the table.
    pub durations: Family<TypeLabel, Histogram, fn() -> Histogram>,
    /// See the table.
    pub delays: Family<TypeLabel, Histogram, fn() -> Histogram>,
    /// See the table.
    pub given_up: Family<TypeLabel, Counter>,
    /// See the table.
    pub waiting: Gauge,
    /// See the table.
    pub overflows: Counter,
}

impl Default for RepairMetrics {
    fn default() -> Self {
        Self {
            repaired: Family::default(),
            attempts: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            delays: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            given_up: Family::default(),
            waiting: Gauge::default(),
            overflows: Counter::default(),
        }
    }
}

impl RepairMetrics {
    /// A counter that is there from the start shows its first rise. The other actions are never taken, so they are not there.
    pub fn start_at_nought(&self, action: Action) {
        for result in ["success", "skip", "fail"] {
            if result != "skip" || action == Action::Label {
                drop(self.repaired.get_or_create(&repaired(action, result)));
            }
        }
        for reason in REASONS {
            drop(self.attempts.get_or_create(&attempt(action, reason)));
        }
        drop(self.given_up.get_or_create(&of(action)));
        drop(self.durations.get_or_create(&of(action)));
        drop(self.delays.get_or_create(&of(action)));
    }
}

/// Labels of an action's result.
#[must_use]
pub const fn repaired(action: Action, result: &'static str) -> RepairedLabels {
    RepairedLabels { r#type: action.word(), result }
}

/// Labels of an action's try.
#[must_use]
pub const fn attempt(action: Action, reason: &'static str) -> AttemptLabels {
    AttemptLabels { r#type: action.word(), reason }
}

/// The label of an action.
#[must_use]
pub const fn of(action: Action) -> TypeLabel {
    TypeLabel { r#type: action.word() }
}
