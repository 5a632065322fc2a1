//! An archive for a support ticket: what this program sees of a node, and what decides about its pods.
//!
//! What goes in is listed ([`filter`]), not what stays out: of every source, fields that are known to hold no secret are copied,
//! and everything else is left behind, whatever it is called. Nothing of the cluster or the node is changed.

mod archive;
pub mod filter;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use cluster_client::files;
use serde_json::{Value, json};

use crate::health;
use crate::report::VERSION;
pub use archive::{packed, write_new};

/// The most that an archive holds, before it is packed.
pub const MOST_BYTES: usize = 32 << 20;
/// The most of one entry; of a log, its end.
const MOST_ENTRY: usize = 1 << 20;
/// The largest file of which the end is read.
const MOST_LOG: u64 = 64 << 20;
/// How long the agent may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What an archive will hold.
#[derive(Debug, Default)]
pub struct Bundle {
    entries: Vec<(String, Vec<u8>)>,
    bytes: usize,
    left_out: Vec<(String, String)>,
}

impl Bundle {
    /// Adds an entry, unless that is too much.
    pub fn add(&mut self, name: &str, bytes: Vec<u8>) {
        if bytes.len() > MOST_ENTRY || self.bytes.saturating_add(bytes.len()) > MOST_BYTES {
            let why = format!("its {} bytes are more than fit", bytes.len());
            self.leave_out(name, &why);
            return;
        }
        self.bytes = self.bytes.saturating_add(bytes.len());
        self.entries.push((name.to_owned(), bytes));
    }

    /// Adds a document.
    pub fn add_json(&mut self, name: &str, document: &Value) {
        self.add(name, format!("{document:#}\n").into_bytes());
    }

    /// Adds an entry, or notes why it is missing.
    pub fn try_add(&mut self, name: &str, bytes: Result<Vec<u8>, String>) {
        match bytes {
            Ok(bytes) => self.add(name, bytes),
            Err(why) => self.leave_out(name, &why),
        }
    }

    /// Notes a missing entry.
    pub fn leave_out(&mut self, name: &str, why: &str) {
        self.left_out.push((name.to_owned(), why.to_owned()));
    }

    /// A missing entry, and why.
    #[must_use]
    pub fn left_out(&self) -> &[(String, String)] {
        &self.left_out
    }

    /// All entries, the first of which says what the others are.
    #[must_use]
    pub fn into_entries(self) -> Vec<(String, Vec<u8>)> {
        let contents = json!({
            "version": VERSION,
            "redirectctl": env!("CARGO_PKG_VERSION"),
            "entries": self.entries.iter().map(|(name, bytes)| json!({"name": name, "bytes": bytes.len()})).collect::<Vec<_>>(),
            "leftOut": left_out_json(&self.left_out),
        });
        let mut entries = vec![("contents.json".to_owned(), format!("{contents:#}\n").into_bytes())];
        entries.extend(self.entries);
        entries
    }
}

fn left_out_json(left_out: &[(String, String)]) -> Value {
    left_out.iter().map(|(name, why)| json!({"name": name, "why": why})).collect()
}

/// What was written, for programs: the archive, its entries and the missing ones.
#[must_use]
pub fn written_json(
    file: &Path,
    bytes: usize,
    entries: &[(String, Vec<u8>)],
    left_out: &[(String, String)],
) -> Value {
    json!({
        "version": VERSION,
        "file": file,
        "bytes": bytes,
        "entries": entries.iter().map(|(name, _)| name).collect::<Vec<_>>(),
        "leftOut": left_out_json(left_out),
    })
}

/// The machine: its kernel, its distribution, and the modules that rules need.
#[must_use]
pub fn machine() -> Value {
    let line = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).ok();
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let modules = fs::read_to_string("/proc/modules").unwrap_or_default();
    json!({
        "kernel": line("/proc/sys/kernel/osrelease"),
        "architecture": std::env::consts::ARCH,
        "distribution": filter::os_release(&release),
        "modules": filter::modules(&modules),
    })
}

/// A file that is not copied: whether it is there, who may read it, and how large it is.
#[must_use]
pub fn facts_of(path: &Path) -> Value {
    match fs::symlink_metadata(path) {
        Ok(facts) => json!({
            "path": path,
            "bytes": facts.len(),
            "mode": format!("{:o}", facts.permissions().mode() & 0o7777),
            "modified": facts.modified().ok().map(|time| humantime::format_rfc3339_seconds(time).to_string()),
        }),
        Err(error) => json!({"path": path, "error": error.kind().to_string()}),
    }
}

/// The network configurations of a directory, filtered.
///
/// # Errors
/// The directory cannot be read.
pub fn conflists(directory: &Path) -> Result<Value, String> {
    let entries = fs::read_dir(directory).map_err(|error| error.to_string())?;
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let mut facts = facts_of(path);
        let text = files::read_text(path, MOST_ENTRY as u64).ok();
        let parsed = text.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        facts["configuration"] = parsed.as_ref().map_or(Value::Null, filter::network);
        facts
    };
    Ok(paths.iter().map(read).collect())
}

/// The last lines of the plugin's log, filtered.
///
/// # Errors
/// It cannot be read.
pub fn log(path: &Path) -> Result<Vec<u8>, String> {
    let bytes = files::read(path, MOST_LOG).map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&bytes);
    let mut kept: Vec<String> = Vec::new();
    let mut length: usize = 0;
    for line in text.lines().rev().filter_map(filter::log_line) {
        length = length.saturating_add(line.len() + 1);
        if length > MOST_ENTRY {
            break;
        }
        kept.push(line);
    }
    kept.reverse();
    Ok(kept.into_iter().map(|line| line + "\n").collect::<String>().into_bytes())
}

/// The agent's metrics, filtered.
///
/// # Errors
/// It does not answer.
pub fn metrics(agent: SocketAddr) -> Result<Vec<u8>, String> {
    let answer = health::get(agent, "/metrics", PATIENCE, MOST_ENTRY as u64)
        .map_err(|error| format!("{agent}: {error}"))?;
    let kept: String = answer.lines().filter_map(filter::metric).map(|line| line + "\n").collect();
    if kept.is_empty() { Err(format!("{agent}: no metrics of the agent")) } else { Ok(kept.into_bytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_limit_to_everything() {
        let mut bundle = Bundle::default();
        bundle.add("large", vec![0; MOST_ENTRY + 1]);
        for number in 0..40 {
            bundle.add(&number.to_string(), vec![0; MOST_ENTRY]);
        }
        assert_eq!(bundle.left_out().len(), 1 + 40 - MOST_BYTES / MOST_ENTRY);
        let entries = bundle.into_entries();
        assert_eq!(entries.len(), 1 + MOST_BYTES / MOST_ENTRY);
        assert!(
            entries[0].0 == "contents.json"
                && String::from_utf8_lossy(&entries[0].1).contains("more than fit")
        );
    }
}
