//! What alerts are about, for those who ask the agent instead of Prometheus. Pure: from the agent's own metrics, as they are scraped.

use std::time::{SystemTime, UNIX_EPOCH};

use cni_core::agent_notes::AgentNotes;

/// Metrics that should be 0, with the values of labels of which this is not true.
const COUNTED: [(&str, &[&str]); 15] = [
    ("istio_cni_installs_total", &["SUCCESS"]),
    ("istio_cni_fights_total", &[]),
    ("istio_cni_conflist_obstacles_total", &[]),
    ("istio_cni_polling", &[]),
    ("istio_cni_plugin_token_requests_total", &["granted"]),
    ("istio_cni_plugin_add_total", &["redirect", "enrol", "skip"]),
    ("istio_cni_log_entries_total", &["accepted"]),
    ("istio_cni_log_connections_refused_total", &[]),
    ("istio_cni_drift_rounds_total", &["complete"]),
    ("istio_cni_heal_attempts_total", &["healed"]),
    ("istio_cni_heal_contested_pods", &[]),
    ("istio_cni_heal_unwatched_pods", &[]),
    ("istio_cni_repair_given_up_total", &[]),
    ("istio_cni_node_probes_total", &["redirected"]),
    // Another client was faster, or the API server does not respond.
    ("istio_cni_node_taint_changes_total", &["done", "gone", "changed", "unanswered"]),
];

/// Before the first installation the entry is missing.
const MISSING_ONCE: &str = "{kind=\"missing\"}";

/// The limits of the alerts.
const MOST_MEMORY: f64 = 48.0 * 1024.0 * 1024.0;
const MOST_OPEN: f64 = 0.8;
const LEAST_TOKEN: f64 = 3600.0;
/// Up to how many seconds an ADD is not slow, as a bucket's name.
const SLOW: &str = "1.0";

/// What the metrics show at this moment.
#[must_use]
pub fn of_metrics(text: &str) -> AgentNotes {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let scraped = Scraped { text };
    AgentNotes { limits: scraped.limits(now), counts: scraped.counts() }
}

/// Metrics as Prometheus' text.
struct Scraped<'t> {
    text: &'t str,
}

impl<'t> Scraped<'t> {
    /// The samples of a metric: labels as they are written, and the value.
    fn samples<'a>(&self, metric: &'a str) -> impl Iterator<Item = (&'t str, f64)> + use<'a, 't> {
        self.text.lines().filter_map(move |line| {
            let (series, value) = line.rsplit_once(' ')?;
            let labels = series.strip_prefix(metric)?;
            (labels.is_empty() || labels.starts_with('{')).then_some((labels, value.parse().ok()?))
        })
    }

    /// The sum of a metric's samples with this label.
    fn sum(&self, metric: &str, label: &str) -> f64 {
        self.samples(metric).filter(|(labels, _)| labels.contains(label)).map(|(_, value)| value).sum()
    }

    /// What a metric counts, without the list of its labels.
    fn help(&self, metric: &str) -> &'t str {
        let help = self
            .text
            .lines()
            .find_map(|line| line.strip_prefix("# HELP ")?.strip_prefix(metric)?.strip_prefix(' '));
        help.and_then(|help| help.split([':', ';', ',']).next()).unwrap_or_default().trim_end_matches('.')
    }

    fn limits(&self, now: f64) -> Vec<String> {
        let value = |metric: &str| self.sum(metric, "");
        let mut all = Vec::new();
        if value("istio_cni_settings_refused") > 0.0 {
            all.push("the settings of its ConfigMap are refused, and those before stay in force".to_owned());
        }
        let ends = value("istio_cni_plugin_token_expiry_timestamp_seconds");
        let requests = "istio_cni_plugin_token_requests_total";
        let is_denied = self.sum(requests, "") > self.sum(requests, "\"granted\"");
        if is_denied && ends > 0.0 && ends - now < LEAST_TOKEN {
            all.push(format!(
                "the plugin's token ends in {:.0} min, and requests for another fail",
                (ends - now) / 60.0
            ));
        }
        let rounds = |result: &str| self.sum("istio_cni_drift_rounds_total", result);
        if rounds("") > 0.0 && rounds("\"complete\"") == 0.0 {
            all.push("the drift watch has completed no round".to_owned());
        }
        let memory = value("process_resident_memory_bytes");
        if memory > MOST_MEMORY {
            all.push(format!("it uses {:.0} MiB of memory", memory / 1024.0 / 1024.0));
        }
        let (open, most) = (value("process_open_fds"), value("process_max_fds"));
        if open > most * MOST_OPEN {
            all.push(format!("{open} of {most} file descriptors are open"));
        }
        all
    }

    fn counts(&self) -> Vec<String> {
        let counted = COUNTED.iter().flat_map(|(metric, well)| {
            let is_bad = |(labels, value): &(&str, f64)| {
                let expected = if *labels == MISSING_ONCE { 1.0 } else { 0.0 };
                *value > expected && !well.iter().any(|word| labels.contains(&format!("\"{word}\"")))
            };
            self.samples(metric)
                .filter(is_bad)
                .map(move |(labels, value)| format!("{metric}{labels} {value}: {}", self.help(metric)))
        });
        let mut all: Vec<String> = counted.chain(self.rewrites()).chain(self.slow()).collect();
        // Series of one metric come in any order.
        all.sort();
        all
    }

    /// Passes that changed something and renewed no credentials.
    fn rewrites(&self) -> Option<String> {
        let count = self.sum("istio_cni_installs_total", "\"SUCCESS\"")
            - self.sum("istio_cni_token_refreshes_total", "");
        // The first installs.
        (count > 1.0).then(|| format!("{count} passes changed something on the node beside credentials"))
    }

    fn slow(&self) -> Option<String> {
        let all = self.sum("istio_cni_plugin_add_duration_seconds_count", "");
        let slow = all - self.sum("istio_cni_plugin_add_duration_seconds_bucket", &format!("le=\"{SLOW}\""));
        (slow > 0.0)
            .then(|| format!("{slow} of {all} ADDs took more than a second: the log's ms= has the phases"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use agent_runtime::metrics::exposition::ScrapeFormat;
    use prometheus_client::registry::Registry;
    use reasons::AgentReason::{Granted, Refused};
    use reasons::ObstacleKind;

    /// Without what is about this process, which runs other tests as well.
    fn scraped(registry: &Registry) -> String {
        let text = ScrapeFormat::Text.write(registry);
        text.lines().filter(|line| !line.starts_with("process_")).map(|line| format!("{line}\n")).collect()
    }

    #[test]
    fn a_healthy_agent_has_nothing_to_note() {
        let (metrics, registry) = Metrics::new();
        metrics.start_taint();
        metrics.plugin_token_requests.get_or_create(&Granted.into()).inc();
        metrics.plugin_token_ends.set(1);
        metrics.obstacles.get_or_create(&ObstacleKind::Missing.into()).inc();
        assert_eq!(of_metrics(&scraped(&registry)), AgentNotes::default());
    }

    #[test]
    fn what_should_be_0_is_counted_in_the_words_of_the_reference() {
        let (metrics, registry) = Metrics::new();
        metrics.obstacles.get_or_create(&ObstacleKind::Edited.into()).inc_by(3);
        metrics.obstacles.get_or_create(&ObstacleKind::Missing.into()).inc_by(2);
        metrics.plugin_token_requests.get_or_create(&Refused.into()).inc();
        metrics.conflicts.inc();
        let AgentNotes { limits, counts } = of_metrics(&scraped(&registry));
        assert_eq!(limits, [""; 0]);
        assert_eq!(
            counts,
            [
                "istio_cni_conflist_obstacles_total{kind=\"edited\"} 3: Times the network configuration was found out of sync",
                "istio_cni_conflist_obstacles_total{kind=\"missing\"} 2: Times the network configuration was found out of sync",
                "istio_cni_fights_total 1: Times the agent backed off from another program that writes the network configuration",
                "istio_cni_plugin_token_requests_total{result=\"refused\"} 1: Requests for a plugin token",
            ]
        );
    }

    #[test]
    fn limits_are_those_of_the_alerts() {
        let limits = |text: &str| Scraped { text }.limits(10_000.0);
        for (text, words) in [
            ("istio_cni_settings_refused 1", "refused"),
            ("process_resident_memory_bytes 62914560", "60 MiB"),
            ("process_open_fds 81\nprocess_max_fds 100", "81 of 100"),
            ("istio_cni_drift_rounds_total{result=\"no_pods\"} 1", "no round"),
            (
                "istio_cni_plugin_token_expiry_timestamp_seconds 10600\nistio_cni_plugin_token_requests_total{result=\"failed\"} 1",
                "in 10 min",
            ),
        ] {
            let found = limits(text);
            assert!(found.len() == 1 && found[0].contains(words), "{text}: {found:?}");
        }
        for text in [
            "process_open_fds 79\nprocess_max_fds 100",
            "istio_cni_drift_rounds_total{result=\"no_pods\"} 1\nistio_cni_drift_rounds_total{result=\"complete\"} 1",
            "istio_cni_plugin_token_expiry_timestamp_seconds 10600\nistio_cni_plugin_token_requests_total{result=\"granted\"} 1",
        ] {
            assert_eq!(limits(text), [""; 0], "{text}");
        }
    }

    /// Metrics are named as they are declared.
    #[test]
    fn only_metrics_that_exist_are_asked_for() {
        for (metric, _) in COUNTED {
            assert!(Metrics::ROWS.iter().any(|row| row.name == metric), "{metric}");
        }
    }
}
