//! The plugins' log lines: received over a unix socket, counted, and logged again.
//!
//! A plugin sends `POST /log` with a JSON array of strings, each of which is one JSON log line. Size, rate and number of connections are
//! bounded, and the answer is 200 whatever the body was: a plugin has nothing better to do with its lines.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use agent_runtime::lock;
use agent_runtime::serve::{self, BodyError, HttpResponse, handler};
use agent_runtime::supervisor::Supervisor;
use cni_core::logs::{CALLED, PodSource, READER};
use cni_core::wire::Code;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use logging::LogEntry;
use reasons::{AgentReason, EventReason, PodState};
use redirect_core::pod::SkipReason;
use serde_json::Value;

use crate::cluster::events::EventPublisher;
use crate::cluster::{EventMessage, pod_reference};
use crate::install::drop_in_reader::DropInReader;
use crate::install::plugin_health::PluginHealth;
use crate::install::seen_calls::SeenCalls;
use crate::metrics::{AddLabels, Metrics, SourceLabel};
use crate::parts::AgentParts;
use crate::serve::plugin_socket::PluginSocket;

/// The largest body.
const LARGEST: usize = 1024 * 1024;
/// Entries per second in the long run.
const RATE: f64 = 1000.0;
/// Entries at once after a quiet time.
const BURST: f64 = 5000.0;
/// The most combinations of outcome and reason that are counted apart: a faulty plugin must not create labels without limit.
const MOST_REASONS: usize = 64;
/// How an ADD may end.
const OUTCOMES: [AgentReason; 4] =
    [AgentReason::Redirect, AgentReason::Enrol, AgentReason::Skip, AgentReason::Fail];
/// The scope under which plugins' lines are logged.
const SCOPE: &str = "cni-plugin";

/// What is learnt from calls of the plugin.
pub type LearntCalls = (Arc<SeenCalls>, Arc<DropInReader>, Arc<PluginHealth>);

/// What is done with the lines.
pub struct Receiver {
    metrics: Arc<Metrics>,
    emit: Box<dyn Fn(&LogEntry) + Send + Sync>,
    bucket: Mutex<Bucket>,
    reasons: Mutex<BTreeSet<(AgentReason, String)>>,
    calls: Arc<SeenCalls>,
    reader: Arc<DropInReader>,
    plugin: Arc<PluginHealth>,
}

/// How many more entries are taken.
#[derive(Debug)]
struct Bucket {
    left: f64,
    filled: Instant,
}

impl Bucket {
    fn take(&mut self, now: Instant) -> bool {
        self.left = (self.left + now.duration_since(self.filled).as_secs_f64() * RATE).min(BURST);
        self.filled = now;
        let has_one = self.left >= 1.0;
        if has_one {
            self.left -= 1.0;
        }
        has_one
    }
}

impl Receiver {
    /// A receiver that logs with `emit`.
    #[must_use]
    pub fn new(
        metrics: Arc<Metrics>,
        (calls, reader, plugin): LearntCalls,
        emit: Box<dyn Fn(&LogEntry) + Send + Sync>,
    ) -> Self {
        let bucket = Mutex::new(Bucket { left: BURST, filled: Instant::now() });
        Self { metrics, emit, bucket, reasons: Mutex::default(), calls, reader, plugin }
    }

    /// Takes one body. Its lines are logged one after the other, without those of another plugin in between.
    pub fn take(&self, body: &[u8], now: Instant) {
        let Ok(lines) = serde_json::from_slice::<Vec<String>>(body) else {
            self.count(AgentReason::Malformed);
            return;
        };
        let mut bucket = lock(&self.bucket);
        for line in lines {
            match LogEntry::from_json(&line) {
                None => self.count(AgentReason::Malformed),
                Some(entry) if is_call(&entry) => self.note_call(&entry),
                Some(_) if !bucket.take(now) => self.count(AgentReason::OverRate),
                Some(entry) => {
                    self.count(AgentReason::Accepted);
                    self.measure(&entry);
                    (self.emit)(&LogEntry { scope: Some(SCOPE.to_owned()), ..entry });
                }
            }
        }
    }

    fn note_call(&self, entry: &LogEntry) {
        self.calls.see();
        let reader = entry.labels.iter().find(|(name, _)| name == READER);
        if let Some(id) = reader.and_then(|(_, id)| id.as_u64()) {
            self.reader.report(id);
        }
    }

    fn count(&self, result: AgentReason) {
        self.metrics.log_entries.get_or_create(&result.into()).inc();
    }

    /// Takes the line that a plugin logs at the end of each ADD.
    fn measure(&self, entry: &LogEntry) {
        let label = |key: &str| entry.labels.iter().find(|(name, _)| name == key).map(|(_, value)| value);
        let text = |key: &str| label(key).and_then(Value::as_str).unwrap_or_default();
        let seconds = text("ms").split(' ').find_map(|part| part.strip_prefix("total:")?.parse::<f64>().ok());
        let seconds = seconds.filter(|ms| (0.0..1e7).contains(ms)).map(|ms| ms / 1000.0);
        if !text("decision").is_empty() {
            self.calls.see();
        }
        // Those of an older plugin have none.
        if let Some(source) =
            PodSource::ALL.map(PodSource::word).into_iter().find(|word| *word == text("source"))
        {
            self.metrics.pod_sources.get_or_create(&SourceLabel { source }).inc();
        }
        let Some(outcome) = AgentReason::of(text("decision")).filter(|reason| OUTCOMES.contains(reason))
        else {
            return;
        };
        if [AgentReason::Redirect, AgentReason::Enrol].contains(&outcome) {
            self.plugin.add_succeeded();
            self.add(outcome, "", seconds);
        } else if outcome == AgentReason::Skip {
            self.add(outcome, text("reason"), seconds);
        } else {
            let number = label("code").and_then(Value::as_u64);
            let code = number.and_then(Code::of);
            self.plugin.add_failed(text("pod"), code, &entry.message, Instant::now());
            self.add(outcome, &number.map(|number| number.to_string()).unwrap_or_default(), seconds);
        }
    }

    fn add(&self, outcome: AgentReason, reason: &str, seconds: Option<f64>) {
        let mut reasons = lock(&self.reasons);
        let key = (outcome, reason.to_owned());
        let is_kept = reasons.contains(&key) || (reasons.len() < MOST_REASONS && is_word(reason));
        let reason = if is_kept { reason } else { "other" };
        if is_kept {
            reasons.insert(key);
        }
        drop(reasons);
        self.metrics
            .adds
            .get_or_create(&AddLabels { outcome: outcome.into(), reason: reason.to_owned() })
            .inc();
        if let Some(seconds) = seconds {
            self.metrics.add_durations.get_or_create(&outcome.into()).observe(seconds);
        }
    }

    /// Answers one request.
    pub async fn answer(self: Arc<Self>, request: Request<Incoming>) -> HttpResponse {
        if request.uri().path() != "/log" {
            return serve::text(StatusCode::NOT_FOUND, "only /log is here\n");
        }
        if request.method() != Method::POST {
            return serve::text(StatusCode::METHOD_NOT_ALLOWED, "only POST\n");
        }
        match serve::body(request, LARGEST).await {
            Ok(body) => self.take(&body, Instant::now()),
            Err(BodyError::Unreadable(_)) => self.count(AgentReason::OverSize),
            Err(BodyError::Slow) => self.count(AgentReason::Malformed),
        }
        serve::text(StatusCode::OK, "")
    }
}

/// Whether a line is nothing but the plugin's notice that a runtime calls it.
fn is_call(entry: &LogEntry) -> bool {
    entry.labels.iter().any(|(name, _)| name == CALLED)
}

fn is_word(reason: &str) -> bool {
    reason.len() <= 40
        && reason.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// The event about a pod that a plugin did not redirect because rules do not bind it.
fn event_about_sandboxed(entry: &LogEntry) -> Option<EventMessage> {
    let label = |key: &str| entry.labels.iter().find(|(name, _)| name == key)?.1.as_str();
    if label("reason") != Some(SkipReason::SandboxedRuntime.word())
        || label("decision").and_then(AgentReason::of) != Some(AgentReason::Skip)
    {
        return None;
    }
    let (namespace, name) = label("pod")?.split_once('/')?;
    Some(EventMessage {
        about: pod_reference(namespace, name, label("uid")),
        component: SCOPE,
        kind: "Warning",
        reason: EventReason::SandboxedRuntime,
        message: format!("{}; {}", SkipReason::SandboxedRuntime.explanation(), PodState::Sandboxed.remedy()),
    })
}

/// Serves the socket in the run directory. Needs a tokio run-time.
///
/// # Errors
/// When directory or socket cannot be made.
pub fn start(
    run: &Path,
    AgentParts { connection, installer, metrics, .. }: &AgentParts,
    plugin: Arc<PluginHealth>,
    logs: Option<logging::LogHandle>,
    tasks: Supervisor,
) -> anyhow::Result<PluginSocket> {
    let events = EventPublisher::start("events of plugins", connection.clone(), metrics.clone(), &tasks);
    let emit = move |entry: &LogEntry| {
        if let Some(logs) = &logs {
            logs.emit(entry);
        }
        if let Some(event) = event_about_sandboxed(entry) {
            events.send(event);
        }
    };
    let learnt = (installer.calls.clone(), installer.reader.clone(), plugin);
    let receiver = Arc::new(Receiver::new(metrics.clone(), learnt, Box::new(emit)));
    let answer = handler(&receiver, Receiver::answer);
    PluginSocket::start("log socket", (run, logging::SOCKET_NAME), metrics.clone(), tasks, answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::conflist_edits::EntryObstacle;
    use crate::install::disk::Real;
    use agent_runtime::metrics::exposition::ScrapeFormat;
    use cni_core::net_dir::Uncalled;
    use prometheus_client::registry::Registry;
    use std::path::PathBuf;
    use std::time::Duration;

    fn receiver() -> (Receiver, Registry, Arc<Mutex<Vec<String>>>) {
        let ((metrics, registry), lines) = (Metrics::new(), Arc::new(Mutex::new(Vec::new())));
        let kept = lines.clone();
        let emit = move |entry: &LogEntry| kept.lock().expect("lines").push(entry.console());
        (Receiver::new(metrics, (calls(), reader(), Arc::default()), Box::new(emit)), registry, lines)
    }

    fn reader() -> Arc<DropInReader> {
        Arc::new(DropInReader::new(Arc::new(Real), "/proc".into(), PathBuf::new()))
    }

    fn calls() -> Arc<SeenCalls> {
        Arc::new(SeenCalls::new(Arc::new(Real), PathBuf::new()))
    }

    fn body(lines: &[&str]) -> Vec<u8> {
        serde_json::to_vec(lines).expect("JSON")
    }

    const ADD: &str = r#"{"level":"info","time":"2026-11-21T07:26:50.000001Z","scope":"x","msg":"redirected","pod":"a/b","decision":"redirect","source":"agent","ms":"pod:4.2 total:10.6"}"#;

    #[test]
    fn lines_keep_their_time_and_labels_and_get_the_plugins_scope() {
        let (receiver, registry, lines) = receiver();
        receiver.take(&body(&[ADD, "{}", "no JSON"]), Instant::now());
        let lines = lines.lock().expect("lines");
        assert_eq!(
            *lines,
            [
                "2026-11-21T07:26:50.000001Z\tinfo\tcni-plugin\tredirected\tdecision=redirect ms=\"pod:4.2 total:10.6\" pod=a/b source=agent"
            ]
        );
        let text = ScrapeFormat::Text.write(&registry);
        assert!(text.contains("istio_cni_log_entries_total{result=\"malformed\"} 2\n"), "{text}");
        assert!(text.contains("istio_cni_plugin_add_total{outcome=\"redirect\",reason=\"\"} 1\n"), "{text}");
        assert!(text.contains("istio_cni_plugin_pods_total{source=\"agent\"} 1\n"), "{text}");
        assert!(
            text.contains("istio_cni_plugin_add_duration_seconds_sum{outcome=\"redirect\"} 0.0106\n"),
            "{text}"
        );
    }

    #[test]
    fn skips_and_failures_are_counted_by_reason_and_code() {
        let (receiver, registry, _) = receiver();
        let skip = ADD.replace("\"redirect\"", "\"skip\",\"reason\":\"no_proxy\"");
        let fail = ADD.replace("\"redirect\"", "\"fail\",\"code\":110").replace("total:10.6", "total:nan");
        let enrol = ADD.replace("\"redirect\"", "\"enrol\"");
        receiver.take(&body(&[&skip, &fail, &enrol]), Instant::now());
        let text = ScrapeFormat::Text.write(&registry);
        assert!(text.contains("{outcome=\"skip\",reason=\"no_proxy\"} 1\n"), "{text}");
        assert!(text.contains("{outcome=\"fail\",reason=\"110\"} 1\n"), "{text}");
        assert!(text.contains("{outcome=\"enrol\",reason=\"\"} 1\n"), "{text}");
        assert!(!text.contains("duration_seconds_count{outcome=\"fail\"}"), "{text}");
    }

    #[test]
    fn calls_are_seen_and_not_logged() {
        let (metrics, _) = Metrics::new();
        let calls = calls();
        let receiver = Receiver::new(
            metrics,
            (calls.clone(), reader(), Arc::default()),
            Box::new(|entry| assert_ne!(entry.message, "called")),
        );
        let open = |file: &str| EntryObstacle::Uncalled(Uncalled::Standalone(file.to_owned()));
        let called =
            ADD.replace("redirected", "called").replace("\"decision\":\"redirect\"", "\"called\":\"STATUS\"");
        let other = ADD.replace("\"decision\":\"redirect\",", "");
        for (line, is_seen) in [(ADD, true), (&called, true), (&other, false), ("{}", false)] {
            let note = |obstacle: Option<&EntryObstacle>| calls.note(obstacle, None);
            note(Some(&open("a.conf")));
            note(None);
            assert!(!note(Some(&open("a.conf"))), "it counts from when the files left it open");
            receiver.take(&body(&[line]), Instant::now());
            assert_eq!(note(Some(&open("a.conf"))), is_seen, "{line}");
            let missing = EntryObstacle::Missing("a.conf".to_owned());
            assert_eq!(note(Some(&missing)), is_seen, "the agent restores its entry");
            assert!(!note(Some(&open("b.conf"))), "of another file nothing was seen");
        }
    }

    #[test]
    fn a_call_by_the_entry_beside_the_list_names_the_process_that_reads_it() {
        let own = std::process::id();
        for (label, is_there) in [
            (String::new(), false),
            (format!(",\"drop_in_reader\":\"{own}\""), false),
            (",\"drop_in_reader\":-1".to_owned(), false),
            (format!(",\"drop_in_reader\":{own}"), true),
        ] {
            let ((metrics, _), reader) = (Metrics::new(), reader());
            let receiver =
                Receiver::new(metrics, (calls(), reader.clone(), Arc::default()), Box::new(|_| {}));
            let line = format!(
                r#"{{"level":"info","time":"2026-11-21T07:26:50.000001Z","msg":"called","called":"ADD"{label}}}"#
            );
            receiver.take(&body(&[&line]), Instant::now());
            assert_eq!(reader.is_there(), is_there, "{label}");
        }
    }

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (receiver, registry, lines) = receiver();
        let now = Instant::now();
        receiver.take(&body(&[ADD; 6000]), now);
        assert_eq!(lines.lock().expect("lines").len(), 5000);
        assert!(ScrapeFormat::Text.write(&registry).contains("{result=\"over_rate\"} 1000\n"));
        receiver.take(&body(&[ADD; 1500]), now + Duration::from_secs(1));
        assert_eq!(lines.lock().expect("lines").len(), 6000);
    }

    #[test]
    fn adds_are_counted_by_reason_and_labels_have_a_limit() {
        let (receiver, registry, _) = receiver();
        receiver.add(AgentReason::Skip, "no_proxy", Some(0.003));
        receiver.add(AgentReason::Skip, "no_proxy", Some(0.004));
        receiver.add(AgentReason::Fail, "a\nb{}", None);
        for count in 0..1000 {
            receiver.add(AgentReason::Fail, &format!("x{count}"), None);
        }
        let text = ScrapeFormat::Text.write(&registry);
        assert!(
            text.contains("istio_cni_plugin_add_total{outcome=\"skip\",reason=\"no_proxy\"} 2\n"),
            "{text}"
        );
        assert!(text.contains("istio_cni_plugin_add_duration_seconds_count{outcome=\"skip\"} 2\n"), "{text}");
        assert!(text.contains("istio_cni_plugin_add_total{outcome=\"fail\",reason=\"other\"}"), "{text}");
        assert!(text.matches("istio_cni_plugin_add_total{").count() <= MOST_REASONS + 2, "{text}");
    }
}
