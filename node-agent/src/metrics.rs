//! The metrics of the agent: each line declares one, the docs are generated from it.

use std::fmt;
use std::sync::Arc;

use agent_runtime::metrics::{ChangeLabels, ResultLabel, WatchLabel, Word, process, start_at_zero};
use agent_runtime::node::RequestedTaint;
use agent_runtime::{labels, metrics};
use cni_core::logs::PodSource;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use reasons::AgentReason::{
    self, Accepted, Ambiguous, Applied, Changed, Complete, Condition, CopyBinariesFailure,
    CreateCniConfigFailure, CreateKubeconfigFailure, Done, Enrol, Fail, Failed, Gone, Granted, Healed,
    Impossible, Installed, Malformed, NoCapability, NoEntry, NoNamespaces, NoPods, NoProcess, NotApplied,
    NotFound, NotMeshed, NotSevered, NotVerified, OtherPod, OverRate, OverSize, Redirect, Redirected,
    Refused, Rejected, Sent, Skip, Success, Unanswered, Unreadable, Unverifiable,
};
use reasons::ObstacleKind;
use reasons::PodState::{
    Drifted, Interference, NotRedirected, Sandboxed, Unknown, Unseen, Unverified, Verified,
};

use crate::settings::RepairAction;

labels! {
    /// The kind of an obstacle.
    KindLabel = "kind" { kind: Word }
    /// How an ADD ended.
    OutcomeLabel = "outcome" { outcome: Word }
    /// How an ADD ended, and why.
    AddLabels = "outcome,reason" { outcome: Word, reason: String }
    /// Where a plugin has a pod from.
    SourceLabel = "source" { source: &'static str }
    /// An answer to a plugin.
    CodeLabel = "response_code" { response_code: u16 }
    /// The agent's version.
    VersionLabel = "version" { version: &'static str }
    /// The state of a pod.
    StateLabel = "state" { state: Word }
    /// Whether a pod of ambient mode is enrolled.
    EnrolmentLabel = "state" { state: &'static str }
    /// Why something ended so.
    ReasonLabel = "reason" { reason: Word }
    /// A repair action.
    TypeLabel = "type" { r#type: Word }
    /// A repair action and its result.
    RepairedLabels = "type,result" { r#type: Word, result: Word }
    /// A repair action and why it ended so.
    AttemptLabels = "type,reason" { r#type: Word, reason: Word }
}

/// Histograms by a label.
type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// Upper bounds of the ADD histogram, in seconds.
const ADD_BUCKETS: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
/// Upper bounds of the histograms of repair, in seconds.
const REPAIR_BUCKETS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];
/// Upper bounds of the histogram of healing, in seconds.
const HEAL_BUCKETS: [f64; 12] = [0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0];

/// All kinds of obstacles, as the help of a metric lists them.
struct Obstacles;

impl fmt::Display for Obstacles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = ObstacleKind::ALL.iter().map(|kind| kind.word()).collect();
        f.write_str(&words.join(", "))
    }
}

metrics! {
    /// What the agent counts.
    Metrics {
        ready: Gauge => "istio_cni_install_ready", "1 while the runtime calls the plugin and the plugin can work, else 0; determined when scraped";
        installs: Family<ResultLabel, Counter> => "istio_cni_installs_total", "Passes that changed something or failed: {Installed}, {CopyBinariesFailure}, {CreateKubeconfigFailure}, {CreateCniConfigFailure}";
        passes: Counter => "istio_cni_passes_total", "Comparisons of the node's files with the expected ones";
        obstacles: Family<KindLabel, Counter> => "istio_cni_conflist_obstacles_total", "Times the network configuration was found out of sync: {Obstacles}";
        preempted: Gauge => "istio_cni_preempted", "1 while the runtime uses another file than the one with the entry";
        conflicts: Counter => "istio_cni_fights_total", "Times the agent backed off from another program that writes the network configuration";
        token_refreshes: Counter => "istio_cni_token_refreshes_total", "Rewrites of the plugin's kubeconfig";
        plugin_token_requests: Family<ResultLabel, Counter> => "istio_cni_plugin_token_requests_total", "Requests for a plugin token: {Granted}, {Refused} (a service account or role is missing), {Failed} (no response)";
        plugin_token_ends: Gauge => "istio_cni_plugin_token_expiry_timestamp_seconds", "When the plugin's own token ends, in seconds since 1970; 0 while this agent has none, and the plugin may use the agent's, which ends with the agent's pod";
        watch_restarts: Family<WatchLabel, Counter> => "istio_cni_watch_restarts_total", "Restarts of a watch: files, pods";
        polling: Gauge => "istio_cni_polling", "1 while the node's files are polled because they cannot be watched";
        adds: Family<AddLabels, Counter> => "istio_cni_plugin_add_total", "ADD calls the plugin reported, by outcome ({Redirect}, {Enrol}, {Skip}, {Fail}) and the reason of a skip or the error code of a failure";
        add_durations: Histograms<OutcomeLabel> = Family::new_with_constructor(|| Histogram::new(ADD_BUCKETS)) => "istio_cni_plugin_add_duration_seconds", "Duration of ADD in the plugin";
        log_entries: Family<ResultLabel, Counter> => "istio_cni_log_entries_total", "Log entries received from plugins: {Accepted}, {Malformed}, {OverRate}, {OverSize}";
        log_refused: Counter => "istio_cni_log_connections_refused_total", "Connections to the sockets for plugins refused because the peer is neither root nor the agent's user";
        events: Family<ResultLabel, Counter> => "istio_cni_events_total", "Events sent to the API server: {Sent}, {Failed}";
        drifted: Gauge => "istio_cni_drifted_pods", "Pods of the node that were not redirected as planned when last compared: {NotRedirected}, {Drifted} and {Interference} of istio_cni_meshed_pods, also while they are {Unknown}; 0 while the drift watch is off";
        drift_checks: Family<ResultLabel, Counter> => "istio_cni_drift_checks_total", "Pods the drift watch compared with their plan, by state: {Verified}, {NotRedirected}, {Drifted}, {Interference} (other programs' rules), {Sandboxed} (rules do not bind its runtime); or why it is {Unknown}: {Changed} (the pod ended or changed concurrently), {NotFound}, {Ambiguous}, {Unverifiable} (its rules are in force, but other rules cannot be read), {Unreadable}";
        drift_unread: Counter => "istio_cni_drift_unread_total", "Drift checks that skipped reading rules of an unchanged namespace";
        drift_rounds: Family<ResultLabel, Counter> => "istio_cni_drift_rounds_total", "Rounds of the drift watch: {Complete}, or why not: {NoCapability}, {NoPods}, {NoNamespaces}, {NoEntry}";
        reloads: Family<ResultLabel, Counter> => "istio_cni_settings_reloads_total", "Changes of the settings folder: {Applied}, {Refused} (the previous settings stay in force)";
        settings_refused: Gauge => "istio_cni_settings_refused", "1 while the settings in the settings folder are refused";
        repaired: Family<RepairedLabels, Counter> => "istio_cni_repair_pods_repaired_total", "Repair attempts by action and result: {Success}, {Fail}, {Skip} (the label existed already)";
        repair_attempts: Family<AttemptLabels, Counter> => "istio_cni_repair_attempts_total", "The same attempts, and those without a result, by reason; docs/concepts/repair.md has the reasons";
        repair_durations: Histograms<TypeLabel> = Family::new_with_constructor(|| Histogram::new(REPAIR_BUCKETS)) => "istio_cni_repair_duration_seconds", "Duration of one attempt";
        repair_delays: Histograms<TypeLabel> = Family::new_with_constructor(|| Histogram::new(REPAIR_BUCKETS)) => "istio_cni_repair_delay_seconds", "Delay of a repair after the agent noticed the failure";
        repair_given_up: Family<TypeLabel, Counter> => "istio_cni_repair_given_up_total", "Broken pods that were given up, after ten attempts that count";
        repair_waiting: Gauge => "istio_cni_repair_waiting_pods", "Broken pods waiting for repair, now or later";
        repair_overflows: Counter => "istio_cni_repair_queue_overflows_total", "Broken pods that did not fit into the queue and wait for the next list";
        meshed_pods: Family<StateLabel, Gauge> => "istio_cni_meshed_pods", "Pods of the node that should be redirected, by state: {Verified}, {Unverified} (not checked for three intervals), {NotRedirected}, {Drifted}, {Interference} (other programs' rules), {Sandboxed} (rules do not bind its runtime), {Unknown} (cannot be determined), {Unseen} (not yet checked); all 0 while the drift watch is off";
        heal_watched: Gauge => "istio_cni_heal_watched_pods", "Pods whose network namespace the agent monitors for changes";
        heal_unwatched: Gauge => "istio_cni_heal_unwatched_pods", "Pods that are not monitored: they are too many, and only the drift watch checks them, or their network namespace is not known";
        heal_checks: Family<ResultLabel, Counter> => "istio_cni_heal_looks_total", "Checks of a pod after a change in its network namespace, by state: {Verified}, {Drifted}, {Interference}, {Unknown}";
        heal_attempts: Family<ReasonLabel, Counter> => "istio_cni_heal_attempts_total", "Attempts to heal a drifted pod, by result; docs/reference/agent.md has the reasons";
        heal_durations: Histogram = Histogram::new(HEAL_BUCKETS) => "istio_cni_heal_duration_seconds", "Delay from kernel notification to verified redirection";
        heal_contested: Gauge => "istio_cni_heal_contested_pods", "Pods whose rules another program removes repeatedly, so the agent backs off";
        heal_lost: Counter => "istio_cni_heal_lost_notifications_total", "Times the kernel dropped notifications about a network namespace; the agent checks it all the same";
        node_verified: Gauge => "istio_cni_node_verified", "1 while mesh pods that start on the node are verified to be redirected; 0 otherwise, and if neither NODE_TAINT nor NODE_CONDITION is set";
        node_probes: Family<ResultLabel, Counter> => "istio_cni_node_probes_total", "Redirections of a network namespace created as a test: {Redirected}, {Failed}, {Impossible} (the agent's container is not equipped for it)";
        node_taint_changes: Family<ChangeLabels, Counter> => "istio_cni_node_taint_changes_total", "Changes of the node's taint (add, remove) and condition ({Condition}), by result: {Done}, {Gone}, {Changed} (another client was faster), {Refused}, {Rejected}, {Unanswered}";
        ambient_pods: Family<EnrolmentLabel, Gauge> => "istio_cni_ambient_pods", "Pods of the node that should be in ambient mode, by state: enrolled (rules, ztunnel and probes are verified), pending; all 0 while ambient mode is off";
        ambient_limited: Gauge => "istio_cni_ambient_limited_pods", "Pods of ambient mode that limit what is captured of their traffic, by annotations of traffic.istio.io";
        ztunnels: Gauge => "ztunnel_connected", "Connections of ztunnels; 2 while one is replaced";
        pod_sources: Family<SourceLabel, Counter> => "istio_cni_plugin_pods_total", "Pods of ADDs, by what the plugin decided from: the agent's copy (agent), the API server (api), a manifest (manifest), annotations from the runtime (annotations), the pod's name (name)";
        held_pods: Gauge => "istio_cni_held_pods", "Pods of the node that the agent holds for plugins";
        held_pods_age: Gauge => "istio_cni_held_pods_age_seconds", "Seconds since the watch of the node's pods last brought an event or a bookmark; -1 without such a watch";
        plugin_requests: Family<CodeLabel, Counter> => "istio_cni_plugin_requests_total", "Answers to plugins that asked to enrol a pod, by HTTP status";
        annotations: Family<ResultLabel, Counter> => "istio_cni_ambient_annotations_total", "Changes of pods' annotation ambient.istio.io/redirection: {Done}, {Gone} (the pod ended), {Failed}";
        build_info: Family<VersionLabel, Gauge> => "istio_cni_build_info", "Always 1; its label is the agent's version";
    }
}

impl Metrics {
    /// Metrics that count from 0, and the registry that shows them.
    #[must_use]
    pub fn new() -> (Arc<Self>, Registry) {
        let (metrics, mut registry) = (Self::default(), Registry::default());
        metrics.build_info.get_or_create(&VersionLabel { version: env!("CARGO_PKG_VERSION") }).set(1);
        metrics.register(&mut registry);
        process::register(&mut registry);
        metrics.start();
        (Arc::new(metrics), registry)
    }

    /// The labels of what every agent has. Other parts add theirs when they start.
    fn start(&self) {
        let installs = [Installed, CopyBinariesFailure, CreateKubeconfigFailure, CreateCniConfigFailure];
        start_at_zero(&self.installs, installs);
        start_at_zero(&self.obstacles, ObstacleKind::ALL.iter().copied());
        start_at_zero(&self.plugin_token_requests, [Granted, Refused, Failed]);
        start_at_zero(&self.watch_restarts, ["files", "pods"].map(|watch| WatchLabel { watch }));
        start_at_zero(&self.adds, [AddLabels { outcome: Redirect.into(), reason: String::new() }]);
        start_at_zero(&self.add_durations, [Redirect]);
        start_at_zero(&self.log_entries, [Accepted, Malformed, OverRate, OverSize]);
        start_at_zero(&self.events, [Sent, Failed]);
        start_at_zero(&self.reloads, [Applied, Refused]);
        start_at_zero(&self.drift_checks, [Verified, NotRedirected, Drifted, Interference, Sandboxed]);
        start_at_zero(&self.drift_checks, [Changed, NotFound, Ambiguous, Unverifiable, Unreadable]);
        start_at_zero(&self.drift_rounds, [Complete, NoCapability, NoPods, NoNamespaces, NoEntry]);
        start_at_zero(&self.heal_checks, [Verified, Drifted, Interference, Unknown]);
        start_at_zero(
            &self.heal_attempts,
            [Healed, AgentReason::Interference, NoCapability, NotFound, NoProcess],
        );
        start_at_zero(&self.heal_attempts, [Ambiguous, OtherPod, NotMeshed, NotApplied, NotVerified]);
        start_at_zero(&self.heal_attempts, [Unverifiable, NotSevered, Unreadable]);
        start_at_zero(&self.pod_sources, PodSource::ALL.map(|source| SourceLabel { source: source.word() }));
    }

    /// The labels of a repair action.
    pub fn start_repair(&self, action: RepairAction, reasons: impl Iterator<Item = AgentReason>) {
        let (label, r#type) = (action.label(), action.label().into());
        let repaired = |result: &AgentReason| RepairedLabels { r#type, result: (*result).into() };
        start_at_zero(&self.repaired, action.results().iter().map(repaired));
        let attempted = |reason: AgentReason| AttemptLabels { r#type, reason: reason.into() };
        start_at_zero(&self.repair_attempts, reasons.map(attempted));
        start_at_zero(&self.repair_given_up, [label]);
        start_at_zero(&self.repair_durations, [label]);
        start_at_zero(&self.repair_delays, [label]);
    }

    /// The labels of the node's taint and condition.
    pub fn start_taint(&self) {
        start_at_zero(&self.node_probes, [Redirected, Failed, Impossible]);
        for requested in [Some(RequestedTaint::Tainted), Some(RequestedTaint::Free), None] {
            let labels = ChangeLabels::RESULTS.map(|result| ChangeLabels::of(requested, result));
            start_at_zero(&self.node_taint_changes, labels);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_runtime::metrics::exposition::ScrapeFormat;

    #[test]
    fn every_metric_is_scraped_with_its_help_and_kind() {
        let (metrics, registry) = Metrics::new();
        // A family without members is not scraped.
        metrics.start_repair(RepairAction::Label, [Done].into_iter());
        metrics.start_taint();
        start_at_zero(&metrics.heal_attempts, [Done]);
        start_at_zero(&metrics.drift_checks, [Verified]);
        start_at_zero(&metrics.drift_rounds, [Complete]);
        start_at_zero(&metrics.heal_checks, [Verified]);
        start_at_zero(&metrics.meshed_pods, [Verified]);
        start_at_zero(&metrics.ambient_pods, [EnrolmentLabel { state: "enrolled" }]);
        start_at_zero(&metrics.plugin_requests, [CodeLabel { response_code: 200 }]);
        start_at_zero(&metrics.pod_sources, [SourceLabel { source: "agent" }]);
        start_at_zero(&metrics.annotations, [Done]);
        let text = ScrapeFormat::Text.write(&registry);
        for row in Metrics::ROWS.iter().chain(process::METRICS) {
            let name = row.name;
            assert!(text.contains(&format!("# HELP {name} {}.\n", (row.help)())), "{name}\n{text}");
            assert!(text.contains(&format!("# TYPE {name} {}\n", row.kind)), "{name}\n{text}");
        }
        assert_eq!(text.matches("# HELP").count(), Metrics::ROWS.len() + process::METRICS.len());
    }
}
