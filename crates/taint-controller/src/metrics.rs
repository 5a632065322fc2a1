//! The metrics of the taint controller.

use agent_runtime::metrics::{ChangeLabels, ResultLabel, WatchLabel, process, start_at_zero};
use agent_runtime::node::RequestedTaint;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use reasons::AgentReason::{Changed, Conflict, Done, Failed, Gone, Refused, Rejected, Sent, Unanswered};

/// Upper bounds of the histogram, in seconds.
const BUCKETS: [f64; 9] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];

agent_runtime::metrics! {
    /// What the controller counts.
    ControllerMetrics {
        leader: Gauge => "istio_cni_taint_controller_leader", "1 while this replica leads, else 0";
        lease_writes: Family<ResultLabel, Counter> => "istio_cni_taint_controller_lease_writes_total", "Writes of the Lease: {Done}, {Conflict} (another replica was faster), {Failed}";
        nodes: Gauge => "istio_cni_taint_controller_nodes", "Nodes the leader knows";
        tainted: Gauge => "istio_cni_taint_controller_tainted_nodes", "Nodes that have the taint";
        changes: Family<ChangeLabels, Counter> => "istio_cni_taint_controller_changes_total", "Changes of nodes' taints (add, remove) by result: {Done}, {Gone}, {Changed} (another client was faster), {Refused}, {Rejected}, {Unanswered}";
        delays: Histogram = Histogram::new(BUCKETS) => "istio_cni_taint_controller_delay_seconds", "Delay of a change after it was due";
        queued: Gauge => "istio_cni_taint_controller_queue_nodes", "Nodes waiting for a check, now or later";
        overflows: Counter => "istio_cni_taint_controller_queue_overflows_total", "Nodes that did not fit into the queue; they are checked once it is empty";
        watch_restarts: Family<WatchLabel, Counter> => "istio_cni_taint_controller_watch_restarts_total", "Restarts of a watch: nodes, pods";
        events: Family<ResultLabel, Counter> => "istio_cni_taint_controller_events_total", "Events sent to the API server: {Sent}, {Failed}";
    }
}

impl ControllerMetrics {
    /// A registry of these metrics and those of the process.
    #[must_use]
    pub fn registry(&self) -> Registry {
        let mut registry = Registry::default();
        self.register(&mut registry);
        process::register(&mut registry);
        start_at_zero(&self.lease_writes, [Done, Conflict, Failed]);
        for requested in [RequestedTaint::Tainted, RequestedTaint::Free] {
            let labels = ChangeLabels::RESULTS.map(|result| ChangeLabels::of(Some(requested), result));
            start_at_zero(&self.changes, labels);
        }
        start_at_zero(&self.watch_restarts, ["nodes", "pods"].map(|watch| WatchLabel { watch }));
        start_at_zero(&self.events, [Sent, Failed]);
        registry
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_runtime::metrics::exposition::ScrapeFormat;

    #[test]
    fn every_metric_is_scraped_with_its_help_and_kind() {
        let text = ScrapeFormat::Text.write(&ControllerMetrics::default().registry());
        for row in ControllerMetrics::ROWS.iter().chain(process::METRICS) {
            let name = row.name;
            assert!(text.contains(&format!("# HELP {name} {}.\n", (row.help)())), "{name}\n{text}");
            assert!(text.contains(&format!("# TYPE {name} {}\n", row.kind)), "{name}\n{text}");
        }
        let rows = ControllerMetrics::ROWS.len() + process::METRICS.len();
        assert_eq!(text.matches("# HELP").count(), rows);
    }
}
