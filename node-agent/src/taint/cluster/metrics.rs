//! What the cluster's taint controller counts: a table of its own, because it is a process of its own.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::metrics::{Described, ResultLabel, WatchLabel, register_in_order};
use crate::process_metrics;
use crate::taint::metrics::{ChangeLabels, RESULTS, change};
use crate::taint::node::Wanted;

/// Upper bounds of the histogram, in seconds.
const BUCKETS: [f64; 9] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];

/// Every metric, but for those of any process ([`process_metrics::METRICS`]).
#[rustfmt::skip]
pub const METRICS: &[Described] = &[
    Described { name: "istio_cni_taint_controller_leader", kind: "gauge", labels: "", help: "1 while this replica leads, else 0" },
    Described { name: "istio_cni_taint_controller_lease_writes_total", kind: "counter", labels: "result", help: "Times the Lease was written: done, conflict (another replica was faster), failed" },
    Described { name: "istio_cni_taint_controller_nodes", kind: "gauge", labels: "", help: "Nodes the leader knows" },
    Described { name: "istio_cni_taint_controller_tainted_nodes", kind: "gauge", labels: "", help: "Those of them that have the taint" },
    Described { name: "istio_cni_taint_controller_changes_total", kind: "counter", labels: "change,result", help: "Changes of nodes' taints (add, remove), by how each ended: done, gone, changed (somebody else was faster), refused, rejected, unanswered" },
    Described { name: "istio_cni_taint_controller_delay_seconds", kind: "histogram", labels: "", help: "How long after it was due a change was done" },
    Described { name: "istio_cni_taint_controller_queue_nodes", kind: "gauge", labels: "", help: "Nodes that wait to be looked at, now or later" },
    Described { name: "istio_cni_taint_controller_queue_overflows_total", kind: "counter", labels: "", help: "Nodes that did not fit into the queue; they are looked at when it is empty" },
    Described { name: "istio_cni_taint_controller_watch_restarts_total", kind: "counter", labels: "watch", help: "Times a watch had to be made anew: nodes, pods" },
    Described { name: "istio_cni_taint_controller_events_total", kind: "counter", labels: "result", help: "Events sent to the API server: sent, failed" },
];

/// The metrics, in the order of the table.
#[derive(Debug)]
pub struct ControllerMetrics {
    registry: Registry,
    /// See the table.
    pub leader: Gauge,
    /// See the table.
    pub lease_writes: Family<ResultLabel, Counter>,
    /// See the table.
    pub nodes: Gauge,
    /// See the table.
    pub tainted: Gauge,
    /// See the table.
    pub changes: Family<ChangeLabels, Counter>,
    /// See the table.
    pub delays: Histogram,
    /// See the table.
    pub queued: Gauge,
    /// See the table.
    pub overflows: Counter,
    /// See the table.
    pub watch_restarts: Family<WatchLabel, Counter>,
    /// See the table.
    pub events: Family<ResultLabel, Counter>,
}

impl Default for ControllerMetrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            leader: Gauge::default(),
            lease_writes: Family::default(),
            nodes: Gauge::default(),
            tainted: Gauge::default(),
            changes: Family::default(),
            delays: Histogram::new(BUCKETS),
            queued: Gauge::default(),
            overflows: Counter::<u64, AtomicU64>::default(),
            watch_restarts: Family::default(),
            events: Family::default(),
        };
        metrics.register();
        process_metrics::register(&mut metrics.registry);
        metrics.start_at_nought();
        metrics
    }
}

impl ControllerMetrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        register_in_order!(
            registry,
            METRICS,
            self.leader.clone(),
            self.lease_writes.clone(),
            self.nodes.clone(),
            self.tainted.clone(),
            self.changes.clone(),
            self.delays.clone(),
            self.queued.clone(),
            self.overflows.clone(),
            self.watch_restarts.clone(),
            self.events.clone(),
        );
    }

    /// A counter that is there from the start shows its first rise.
    fn start_at_nought(&self) {
        for result in ["done", "conflict", "failed"] {
            drop(self.lease_writes.get_or_create(&ResultLabel { result }));
        }
        for result in RESULTS {
            for wanted in [Wanted::Tainted, Wanted::Free] {
                drop(self.changes.get_or_create(&change(Some(wanted), result)));
            }
        }
        for watch in ["nodes", "pods"] {
            drop(self.watch_restarts.get_or_create(&WatchLabel { watch }));
        }
        for result in ["sent", "failed"] {
            drop(self.events.get_or_create(&ResultLabel { result }));
        }
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_scraped_with_its_help_and_kind() {
        let text = ControllerMetrics::default().text();
        for row in METRICS.iter().chain(process_metrics::METRICS) {
            let name = row.name.trim_end_matches("_total");
            assert!(text.contains(&format!("# HELP {name} {}.\n", row.help)), "{name}\n{text}");
            assert!(text.contains(&format!("# TYPE {name} {}\n", row.kind)), "{name}\n{text}");
        }
        assert_eq!(text.matches("# HELP").count(), METRICS.len() + process_metrics::METRICS.len());
    }
}
