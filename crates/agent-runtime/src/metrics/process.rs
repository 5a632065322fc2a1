//! What the kernel knows of this process, under the names that Prometheus' own clients use; read when scraped.

use std::fmt;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::sys::time::TimeVal;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::Described;

/// Every metric of a process.
#[rustfmt::skip]
pub const METRICS: &[Described] = &[
    Described { name: "process_cpu_seconds_total", kind: "counter", labels: "", help: || "Processor time of the process, in user space and in the kernel".to_owned() },
    Described { name: "process_resident_memory_bytes", kind: "gauge", labels: "", help: || "Resident memory of the process".to_owned() },
    Described { name: "process_open_fds", kind: "gauge", labels: "", help: || "File descriptors that the process has open".to_owned() },
    Described { name: "process_max_fds", kind: "gauge", labels: "", help: || "File descriptors that it may have open".to_owned() },
    Described { name: "process_start_time_seconds", kind: "gauge", labels: "", help: || "When the process started, in seconds since 1970".to_owned() },
];

/// Adds the metrics of this process, which must have started just now.
pub fn register(registry: &mut Registry) {
    // Noted once: computed for every scrape it would vary by a second, and each variation would count as a restart.
    let started = SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64());
    registry.register_collector(Box::new(Process { started }));
}

#[derive(Debug)]
struct Process {
    started: Option<f64>,
}

impl Collector for Process {
    /// Unreadable values are omitted: a 0 would seem real.
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let values = [cpu_seconds(), resident_bytes(), open_fds(), max_fds(), self.started];
        for (row, value) in METRICS.iter().zip(values) {
            let Some(value) = value else { continue };
            let metric: &dyn EncodeMetric =
                if row.kind == "counter" { &ConstCounter::new(value) } else { &ConstGauge::new(value) };
            let (name, help) = (row.registered(), format!("{}.", (row.help)()));
            metric.encode(encoder.encode_descriptor(name, &help, None, metric.metric_type())?)?;
        }
        Ok(())
    }
}

fn cpu_seconds() -> Option<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    Some(seconds(usage.user_time()) + seconds(usage.system_time()))
}

#[allow(clippy::cast_precision_loss, reason = "exact for the first 285 million years")]
fn seconds(time: TimeVal) -> f64 {
    time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6
}

fn resident_bytes() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kibibytes =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"))?;
    Some(kibibytes.trim().parse::<f64>().ok()? * 1024.0)
}

/// Without the one that is open to count them.
#[allow(clippy::cast_precision_loss, reason = "no process has that many")]
fn open_fds() -> Option<f64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as f64)
}

#[allow(clippy::cast_precision_loss, reason = "a limit; what is that large is as good as none")]
fn max_fds() -> Option<f64> {
    Some(getrlimit(Resource::RLIMIT_NOFILE).ok()?.0 as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    fn value(name: &str) -> f64 {
        let mut registry = Registry::default();
        register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).expect("writes");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}\n{text}")).parse().expect("a number")
    }

    #[test]
    fn each_metric_is_there_and_plausible() {
        for row in METRICS {
            assert!(value(row.name) > 0.0, "{}", row.name);
        }
        assert!(value("process_open_fds") <= value("process_max_fds"));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64();
        assert!((value("process_start_time_seconds") - now).abs() < 3600.0);
    }

    #[test]
    fn memory_and_processor_time_rise_with_their_use() {
        let (memory, time) = (value("process_resident_memory_bytes"), value("process_cpu_seconds_total"));
        // Far more than other tests of this process free in between.
        let used = std::hint::black_box(vec![1_u8; 256 << 20]);
        let rise = value("process_resident_memory_bytes") - memory;
        assert!((1e8..1e9).contains(&rise), "{rise} of {}", used.len());
        assert!(value("process_cpu_seconds_total") > time);
    }

    #[test]
    fn an_open_file_is_counted() {
        // Other tests of this process open and close files, so the same number twice is waited for.
        let files: Vec<_> = (0..200).map(|_| fs::File::open("/dev/null").expect("opens")).collect();
        assert!(value("process_open_fds") >= 200.0);
        drop(files);
    }
}
