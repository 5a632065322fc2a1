//! Many requests at once: kubectl takes them one after the other.

use std::fmt::Write;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::ApiServer;
use test_support::process::{self, SHORT};

/// How many requests are on their way at once.
const AT_ONCE: &str = "16";

/// A request of the admin.
#[derive(Clone, Debug)]
pub struct Sending {
    method: &'static str,
    kind: &'static str,
    path: String,
    body: String,
}

impl Sending {
    /// Creates an object.
    pub fn post(path: &str, object: &Value) -> Self {
        Self { method: "POST", kind: "application/json", path: path.to_owned(), body: object.to_string() }
    }

    /// Changes a part of an object.
    pub fn merge(path: &str, part: &Value) -> Self {
        let kind = "application/merge-patch+json";
        Self { method: "PATCH", kind, path: path.to_owned(), body: part.to_string() }
    }

    /// Deletes an object at once.
    pub fn delete(path: &str) -> Self {
        let body = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}).to_string();
        Self { method: "DELETE", kind: "application/json", path: path.to_owned(), body }
    }
}

impl ApiServer {
    /// Sends requests side by side; an answer that is not one of success is an error.
    pub fn send_all(&self, requests: &[Sending]) -> Result<()> {
        let quoted = |text: &str| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
        let credentials = [
            ("cacert", self.ca_path()),
            ("cert", self.folder.path().join("admin.crt")),
            ("key", self.folder.path().join("admin.key")),
        ];
        let mut config = String::new();
        for (index, Sending { method, kind, path, body }) in requests.iter().enumerate() {
            if index > 0 {
                config.push_str("next\n");
            }
            for (name, file) in &credentials {
                writeln!(config, "{name} = {}", quoted(&file.to_string_lossy()))?;
            }
            writeln!(config, "url = {}", quoted(&format!("{}{path}", self.url())))?;
            writeln!(config, "request = {method}\nheader = \"Content-Type: {kind}\"")?;
            writeln!(config, "data-raw = {}", quoted(body))?;
            writeln!(config, "output = /dev/null\nwrite-out = \"%{{http_code}} \"")?;
        }
        let args = ["--silent", "--show-error", "--parallel", "--parallel-max", AT_ONCE, "--config", "-"];
        let answers = process::run_with_input(&mut process::command("curl", args), &config, SHORT)?.ok()?;
        let good = answers.stdout.split_whitespace().filter(|code| code.starts_with('2')).count();
        ensure!(good == requests.len(), "not all of {} were taken: {}", requests.len(), answers.stdout);
        Ok(())
    }
}
