//! What the agent counts. One table says each metric's name and meaning; the documentation is compared with it.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::drift::pod_state::WholeNode;
use crate::heal::metrics::HealMetrics;
use crate::process_metrics;
use crate::repair::action::UNVERIFIABLE;
use crate::repair::metrics::RepairMetrics;
use crate::taint::metrics::TaintMetrics;

/// Registers metrics under the names and words of a table's rows, in their order.
macro_rules! register_in_order {
    ($registry:expr, $rows:expr, $($metric:expr),* $(,)?) => {{
        let mut rows = $rows.iter();
        // The library appends `_total` to the names of counters.
        let mut next = || rows.next().map_or(("", ""), |row| (row.name.trim_end_matches("_total"), row.help));
        $({ let (name, help) = next(); $registry.register(name, help, $metric); })*
    }};
}
pub(crate) use register_in_order;

/// A metric as the documentation shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Described {
    /// Its name as it is scraped.
    pub name: &'static str,
    /// Counter, gauge or histogram.
    pub kind: &'static str,
    /// Its labels.
    pub labels: &'static str,
    /// What it says.
    pub help: &'static str,
}

const fn described(
    name: &'static str,
    kind: &'static str,
    labels: &'static str,
    help: &'static str,
) -> Described {
    Described { name, kind, labels, help }
}

/// Every metric, but for those of any process ([`process_metrics::METRICS`]).
#[rustfmt::skip]
pub const METRICS: &[Described] = &[
    described("istio_cni_install_ready", "gauge", "", "1 while the runtime calls the plugin and the plugin can work, else 0; looked up when scraped"),
    described("istio_cni_installs_total", "counter", "result", "Passes that changed something or failed: SUCCESS, COPY_BINARIES_FAILURE, CREATE_KUBECONFIG_FAILURE, CREATE_CNI_CONFIG_FAILURE"),
    described("istio_cni_passes_total", "counter", "", "Times the node's files were compared with what they should be"),
    described("istio_cni_conflist_obstacles_total", "counter", "kind", "Times the network configuration was found other than it should be: no_network, no_pinned, no_original, foreign, preempted, missing, edited, repeated, followed, stale"),
    described("istio_cni_preempted", "gauge", "", "1 while the runtime uses another file than the one with the entry"),
    described("istio_cni_fights_total", "counter", "", "Times the agent stopped answering another writer of the network configuration for a while"),
    described("istio_cni_token_refreshes_total", "counter", "", "Times the plugin's kubeconfig was written anew"),
    described("istio_cni_plugin_token_requests_total", "counter", "result", "Times a token of the plugin's own was asked for: granted, refused (a service account or role is missing), failed (no answer)"),
    described("istio_cni_plugin_token_expiry_timestamp_seconds", "gauge", "", "When the plugin's own token ends, in seconds since 1970; 0 while this agent has got none, and the plugin may use the agent's, which ends with the agent's pod"),
    described("istio_cni_watch_restarts_total", "counter", "watch", "Times a watch had to be made anew: files, daemonset, pods"),
    described("istio_cni_polling", "gauge", "", "1 while the node's files are looked at every few seconds, because they cannot be watched"),
    described("istio_cni_plugin_add_total", "counter", "outcome,reason", "ADD calls the plugin reported, by outcome (redirect, skip, fail) and the reason of a skip or the error code of a failure"),
    described("istio_cni_plugin_add_duration_seconds", "histogram", "outcome", "How long the plugin took for ADD"),
    described("istio_cni_log_entries_total", "counter", "result", "Log entries received from plugins: accepted, malformed, over_rate, over_size"),
    described("istio_cni_log_connections_refused_total", "counter", "", "Connections to the log socket that were refused because neither root nor the agent's own user made them"),
    described("istio_cni_events_total", "counter", "result", "Events sent to the API server: sent, failed"),
    described("istio_cni_drifted_pods", "gauge", "", "Pods of the node that were not redirected as planned when last looked at; 0 where the drift watch is off"),
    described("istio_cni_drift_checks_total", "counter", "result", "Pods the drift watch compared with their plan: as_planned, drifted, changed (the pod ended or changed meanwhile), not_found, ambiguous (its network namespace), unverifiable (its rules are in force, but other rules cannot be read), failed"),
    described("istio_cni_drift_unread_total", "counter", "", "Those of these looks that read no rules, because nothing had changed in the pod's network namespace since they were read and as planned"),
    described("istio_cni_drift_rounds_total", "counter", "result", "Times the drift watch went round the node: complete, or why not: no_capability, no_pods, no_namespaces, no_entry"),
    described("istio_cni_settings_reloads_total", "counter", "result", "Times the settings folder said something else: applied, refused (the settings before stay in force)"),
    described("istio_cni_settings_refused", "gauge", "", "1 while what the settings folder says is refused"),
    described("istio_cni_repair_pods_repaired_total", "counter", "type,result", "Tries to deal with a broken pod, by what is done (repair, delete, label) and how it went: success, fail, skip (the label was there already)"),
    described("istio_cni_repair_attempts_total", "counter", "type,reason", "The same tries, and those that decided nothing, by why each ended so; docs/concepts/repair.md has the reasons"),
    described("istio_cni_repair_duration_seconds", "histogram", "type", "How long one try took"),
    described("istio_cni_repair_delay_seconds", "histogram", "type", "How long after a failure was seen first it was dealt with"),
    described("istio_cni_repair_given_up_total", "counter", "type", "Broken pods that were given up, after ten tries that count"),
    described("istio_cni_repair_waiting_pods", "gauge", "", "Broken pods that wait to be dealt with, now or later"),
    described("istio_cni_repair_queue_overflows_total", "counter", "", "Broken pods that did not fit into the queue and were left to the next list"),
    described("istio_cni_meshed_pods", "gauge", "state", "Pods of the node that are to be redirected, by what the drift watch knows of them: verified, not_redirected, drifted, unknown (it cannot be told), unseen (not yet looked at); all 0 where the drift watch is off"),
    described("istio_cni_heal_watched_pods", "gauge", "", "Pods in whose network namespace the agent listens for changes"),
    described("istio_cni_heal_unwatched_pods", "gauge", "", "Pods that it would listen to as well, but there are too many, or their network namespace cannot be listened to; only the drift watch looks at them"),
    described("istio_cni_heal_looks_total", "counter", "result", "Times a pod was looked at because something changed in its network namespace: as_planned, drifted, failed"),
    described("istio_cni_heal_attempts_total", "counter", "reason", "Times a pod that had drifted was to be redirected as planned again, by how that ended; docs/concepts/drift.md has the reasons"),
    described("istio_cni_heal_duration_seconds", "histogram", "", "How long after the kernel told of a change the pod was redirected as planned again, verified"),
    described("istio_cni_heal_contested_pods", "gauge", "", "Pods whose rules another writer removes again and again, so that the agent waits before it answers"),
    described("istio_cni_heal_lost_notifications_total", "counter", "", "Times the kernel had more to tell of a network namespace than could wait; it is then looked at all the same"),
    described("istio_cni_node_verified", "gauge", "", "1 while pods of the mesh that start on the node are verified to be redirected; 0 otherwise, and where neither NODE_TAINT nor NODE_CONDITION is set"),
    described("istio_cni_node_probes_total", "counter", "result", "Times a network namespace was made to be redirected: redirected, failed, impossible (the agent's container is not equipped for it)"),
    described("istio_cni_node_taint_changes_total", "counter", "change,result", "Changes of the node's taint (add, remove) and condition (condition), by how each ended: done, gone, changed (somebody else was faster), refused, rejected, unanswered"),
    described("istio_cni_build_info", "gauge", "version", "Always 1; its label is the agent's version"),
];

/// The most combinations of outcome and reason that are kept apart. Lines of a plugin gone wrong must not make labels without end.
const MOST_REASONS: usize = 64;
/// Upper bounds of the ADD histogram, in seconds.
const ADD_BUCKETS: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// One label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    /// How it went.
    pub result: &'static str,
}

/// One label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabel {
    /// Of which kind.
    pub kind: &'static str,
}

/// One label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WatchLabel {
    /// Which watch.
    pub watch: &'static str,
}

/// One label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AddLabels {
    outcome: &'static str,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VersionLabel {
    version: &'static str,
}

/// The metrics. Fields are in the order of [`METRICS`].
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    ready: Gauge,
    /// See [`METRICS`].
    pub installs: Family<ResultLabel, Counter>,
    /// See [`METRICS`].
    pub passes: Counter,
    /// See [`METRICS`].
    pub obstacles: Family<KindLabel, Counter>,
    /// See [`METRICS`].
    pub preempted: Gauge,
    /// See [`METRICS`].
    pub fights: Counter,
    /// See [`METRICS`].
    pub token_refreshes: Counter,
    /// See [`METRICS`].
    pub plugin_token_requests: Family<ResultLabel, Counter>,
    /// See [`METRICS`].
    pub plugin_token_ends: Gauge,
    /// See [`METRICS`].
    pub watch_restarts: Family<WatchLabel, Counter>,
    /// See [`METRICS`].
    pub polling: Gauge,
    adds: Family<AddLabels, Counter>,
    add_durations: Family<OutcomeLabel, Histogram, fn() -> Histogram>,
    /// See [`METRICS`].
    pub log_entries: Family<ResultLabel, Counter>,
    /// See [`METRICS`].
    pub log_refused: Counter,
    /// See [`METRICS`].
    pub events: Family<ResultLabel, Counter>,
    /// See [`METRICS`].
    pub drifted: Gauge,
    /// See [`METRICS`].
    pub drift_checks: Family<ResultLabel, Counter>,
    /// See [`METRICS`].
    pub drift_unread: Counter,
    /// See [`METRICS`].
    pub drift_rounds: Family<ResultLabel, Counter>,
    /// See [`METRICS`].
    pub reloads: Family<ResultLabel, Counter>,
    /// See [`METRICS`].
    pub settings_refused: Gauge,
    /// See [`METRICS`].
    pub repair: RepairMetrics,
    /// See [`METRICS`].
    pub whole_node: WholeNode,
    /// See [`METRICS`].
    pub heal: HealMetrics,
    /// See [`METRICS`].
    pub taint: TaintMetrics,
    reasons: Mutex<BTreeSet<(&'static str, String)>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics that count from 0.
    #[must_use]
    pub fn new() -> Self {
        let build: Family<VersionLabel, Gauge<i64, std::sync::atomic::AtomicI64>> = Family::default();
        build.get_or_create(&VersionLabel { version: env!("CARGO_PKG_VERSION") }).set(1);
        let mut metrics = Self {
            registry: Registry::default(),
            ready: Gauge::default(),
            installs: Family::default(),
            passes: Counter::<u64, AtomicU64>::default(),
            obstacles: Family::default(),
            preempted: Gauge::default(),
            fights: Counter::default(),
            token_refreshes: Counter::default(),
            plugin_token_requests: Family::default(),
            plugin_token_ends: Gauge::default(),
            watch_restarts: Family::default(),
            polling: Gauge::default(),
            adds: Family::default(),
            add_durations: Family::new_with_constructor(|| Histogram::new(ADD_BUCKETS)),
            log_entries: Family::default(),
            log_refused: Counter::default(),
            events: Family::default(),
            drifted: Gauge::default(),
            drift_checks: Family::default(),
            drift_unread: Counter::default(),
            drift_rounds: Family::default(),
            reloads: Family::default(),
            settings_refused: Gauge::default(),
            repair: RepairMetrics::default(),
            whole_node: WholeNode::default(),
            heal: HealMetrics::default(),
            taint: TaintMetrics::default(),
            reasons: Mutex::default(),
        };
        metrics.register(build);
        process_metrics::register(&mut metrics.registry);
        metrics.start_at_nought();
        metrics
    }

    /// A counter that is there from the start shows its first rise.
    fn start_at_nought(&self) {
        for result in
            ["SUCCESS", "COPY_BINARIES_FAILURE", "CREATE_KUBECONFIG_FAILURE", "CREATE_CNI_CONFIG_FAILURE"]
        {
            drop(self.installs.get_or_create(&ResultLabel { result }));
        }
        for kind in [
            "no_network",
            "no_pinned",
            "no_original",
            "foreign",
            "preempted",
            "missing",
            "edited",
            "repeated",
            "followed",
            "stale",
        ] {
            drop(self.obstacles.get_or_create(&KindLabel { kind }));
        }
        for result in ["granted", "refused", "failed"] {
            drop(self.plugin_token_requests.get_or_create(&ResultLabel { result }));
        }
        for watch in ["files", "daemonset", "pods"] {
            drop(self.watch_restarts.get_or_create(&WatchLabel { watch }));
        }
        for result in ["accepted", "malformed", "over_rate", "over_size"] {
            drop(self.log_entries.get_or_create(&ResultLabel { result }));
        }
        for result in ["sent", "failed"] {
            drop(self.events.get_or_create(&ResultLabel { result }));
        }
        for result in ["as_planned", "drifted", "changed", "not_found", "ambiguous", UNVERIFIABLE, "failed"] {
            drop(self.drift_checks.get_or_create(&ResultLabel { result }));
        }
        for result in ["complete", "no_capability", "no_pods", "no_namespaces", "no_entry"] {
            drop(self.drift_rounds.get_or_create(&ResultLabel { result }));
        }
        for result in ["applied", "refused"] {
            drop(self.reloads.get_or_create(&ResultLabel { result }));
        }
        self.heal.start_at_nought();
        drop(self.adds.get_or_create(&AddLabels { outcome: "redirect", reason: String::new() }));
        drop(self.add_durations.get_or_create(&OutcomeLabel { outcome: "redirect" }));
    }

    fn register(&mut self, build: Family<VersionLabel, Gauge<i64, std::sync::atomic::AtomicI64>>) {
        let registry = &mut self.registry;
        register_in_order!(
            registry,
            METRICS,
            self.ready.clone(),
            self.installs.clone(),
            self.passes.clone(),
            self.obstacles.clone(),
            self.preempted.clone(),
            self.fights.clone(),
            self.token_refreshes.clone(),
            self.plugin_token_requests.clone(),
            self.plugin_token_ends.clone(),
            self.watch_restarts.clone(),
            self.polling.clone(),
            self.adds.clone(),
            self.add_durations.clone(),
            self.log_entries.clone(),
            self.log_refused.clone(),
            self.events.clone(),
            self.drifted.clone(),
            self.drift_checks.clone(),
            self.drift_unread.clone(),
            self.drift_rounds.clone(),
            self.reloads.clone(),
            self.settings_refused.clone(),
            self.repair.repaired.clone(),
            self.repair.attempts.clone(),
            self.repair.durations.clone(),
            self.repair.delays.clone(),
            self.repair.given_up.clone(),
            self.repair.waiting.clone(),
            self.repair.overflows.clone(),
            self.whole_node.pods.clone(),
            self.heal.watched.clone(),
            self.heal.unwatched.clone(),
            self.heal.looks.clone(),
            self.heal.attempts.clone(),
            self.heal.durations.clone(),
            self.heal.contested.clone(),
            self.heal.lost.clone(),
            self.taint.verified.clone(),
            self.taint.probes.clone(),
            self.taint.changes.clone(),
            build,
        );
    }

    /// Counts one ADD that a plugin reported.
    pub fn add(&self, outcome: &'static str, reason: &str, seconds: Option<f64>) {
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (outcome, reason.to_owned());
        let is_kept = reasons.contains(&key) || (reasons.len() < MOST_REASONS && is_word(reason));
        let reason = if is_kept { reason } else { "other" };
        if is_kept {
            reasons.insert(key);
        }
        drop(reasons);
        self.adds.get_or_create(&AddLabels { outcome, reason: reason.to_owned() }).inc();
        if let Some(seconds) = seconds {
            self.add_durations.get_or_create(&OutcomeLabel { outcome }).observe(seconds);
        }
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn text(&self, ready: bool) -> String {
        self.ready.set(i64::from(ready));
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

fn is_word(reason: &str) -> bool {
    reason.len() <= 40
        && reason.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_scraped_with_its_help_and_kind() {
        let metrics = Metrics::new();
        // Without an action there are no counters of one.
        metrics.repair.start_at_nought(crate::repair::action::Action::Label);
        metrics.taint.start_at_nought();
        let text = metrics.text(true);
        for row in METRICS.iter().chain(process_metrics::METRICS) {
            let name = row.name.trim_end_matches("_total");
            assert!(text.contains(&format!("# HELP {name} {}.\n", row.help)), "{name}\n{text}");
            assert!(text.contains(&format!("# TYPE {name} {}\n", row.kind)), "{name}\n{text}");
        }
        assert_eq!(text.matches("# HELP").count(), METRICS.len() + process_metrics::METRICS.len());
        assert!(text.contains("istio_cni_install_ready 1\n"), "{text}");
    }

    #[test]
    fn adds_are_counted_by_reason_and_strangers_cannot_make_labels_without_end() {
        let metrics = Metrics::new();
        metrics.add("skip", "no_proxy", Some(0.003));
        metrics.add("skip", "no_proxy", Some(0.004));
        metrics.add("fail", "a\nb{}", None);
        for count in 0..1000 {
            metrics.add("fail", &format!("x{count}"), None);
        }
        let text = metrics.text(false);
        assert!(
            text.contains("istio_cni_plugin_add_total{outcome=\"skip\",reason=\"no_proxy\"} 2\n"),
            "{text}"
        );
        assert!(text.contains("istio_cni_plugin_add_duration_seconds_count{outcome=\"skip\"} 2\n"), "{text}");
        assert!(text.contains("istio_cni_plugin_add_total{outcome=\"fail\",reason=\"other\"}"), "{text}");
        assert!(text.matches("istio_cni_plugin_add_total{").count() <= MOST_REASONS + 2, "{text}");
    }
}
