//! What healing counts. [`crate::metrics::METRICS`] says what each means.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::metrics::ResultLabel;
use crate::repair::action::UNVERIFIABLE;

/// Upper bounds of the histogram, in seconds.
const BUCKETS: [f64; 12] = [0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0];

/// How the mending of a pod may end.
pub const REASONS: [&str; 13] = [
    HEALED,
    INTERFERENCE,
    "no_capability",
    "not_found",
    "no_process",
    "ambiguous",
    "other_pod",
    "not_meshed",
    "not_applied",
    "not_verified",
    UNVERIFIABLE,
    "not_severed",
    "failed",
];
/// It is redirected as planned again.
pub const HEALED: &str = "healed";
/// Rules of others come in the way, and they stay.
pub const INTERFERENCE: &str = "interference";

/// Why it ended so.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// The reason.
    pub reason: &'static str,
}

/// The metrics, in the order of the table.
#[derive(Debug)]
pub struct HealMetrics {
    /// See the table.
    pub watched: Gauge,
    /// See the table.
    pub unwatched: Gauge,
    /// See the table.
    pub looks: Family<ResultLabel, Counter>,
    /// See the table.
    pub attempts: Family<ReasonLabel, Counter>,
    /// See the table.
    pub durations: Histogram,
    /// See the table.
    pub contested: Gauge,
    /// See the table.
    pub lost: Counter,
}

impl Default for HealMetrics {
    fn default() -> Self {
        Self {
            watched: Gauge::default(),
            unwatched: Gauge::default(),
            looks: Family::default(),
            attempts: Family::default(),
            durations: Histogram::new(BUCKETS),
            contested: Gauge::default(),
            lost: Counter::default(),
        }
    }
}

impl HealMetrics {
    /// A counter that is there from the start shows its first rise.
    pub fn start_at_nought(&self) {
        for result in ["as_planned", "drifted", "failed"] {
            drop(self.looks.get_or_create(&ResultLabel { result }));
        }
        for reason in REASONS {
            drop(self.attempts.get_or_create(&ReasonLabel { reason }));
        }
    }
}
