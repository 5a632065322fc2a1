//! Any body at the agent's log socket: each of its lines is counted once at most, and what is logged of it is one line under the plugin's name.

#![no_main]

use agent_runtime::metrics::exposition::ScrapeFormat;
use install_cni::{
    install::{disk::Real, drop_in_reader::DropInReader, seen_calls::SeenCalls},
    metrics::Metrics,
    serve::log_socket::Receiver,
};
use libfuzzer_sys::fuzz_target;
use logging::LogEntry;
use redirect_core_fuzz::text;
use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Instant,
};

fuzz_target!(|body: &[u8]| {
    let ((counters, registry), logged) = (Metrics::new(), Arc::new(Mutex::new(0_u64)));
    let count = logged.clone();
    let emit = move |entry: &LogEntry| {
        *count.lock().expect("a count") += 1;
        check(entry);
    };
    // Taking a body writes no file: calls that it reports are kept when readiness is judged.
    let calls = Arc::new(SeenCalls::new(Arc::new(Real), PathBuf::new()));
    let reader = Arc::new(DropInReader::new(Arc::new(Real), PathBuf::new(), PathBuf::new()));
    Receiver::new(counters, (calls, reader, Arc::default()), Box::new(emit)).take(body, Instant::now());
    let lines = serde_json::from_slice::<Vec<String>>(body).map_or(1, |lines| lines.len() as u64);
    let counted = |result: &str| {
        let text = ScrapeFormat::Text.write(&registry);
        text::is_safe(&text);
        let name = format!("istio_cni_log_entries_total{{result=\"{result}\"}} ");
        text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok()).unwrap_or(0)
    };
    assert_eq!(counted("accepted"), *logged.lock().expect("a count"));
    // A line that reports a call of the plugin is for the agent alone.
    assert!(["accepted", "malformed", "over_rate"].map(counted).iter().sum::<u64>() <= lines);
});

fn check(entry: &LogEntry) {
    assert_eq!(entry.scope.as_deref(), Some("cni-plugin"));
    let console = entry.console();
    // Tabs end the fields, and nothing else may.
    assert!(console.matches('\t').count() <= 5, "{console:?}");
    text::is_one_safe_line(&console.replace('\t', " "));
    let json = entry.json();
    text::is_one_safe_line(&json);
    let again = LogEntry::from_json(&json).expect("what was written can be read");
    assert_eq!((&again.level, &again.scope, &again.message), (&entry.level, &entry.scope, &entry.message));
}
