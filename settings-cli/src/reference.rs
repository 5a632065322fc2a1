//! The reference documentation of the settings, from the table.

use crate::rows::{IPTABLES, VALIDATION};
use redirect_core::settings::{Kind, SETTINGS, Setting};
use std::fmt::Write;

/// A page in Markdown: every setting with its flag, variables, annotation, default and meaning.
#[must_use]
pub fn reference() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Every setting of `istio-iptables`, `istio-validation` and, through annotations, of `istio-cni`. This page is\n\
         made from the settings table in `redirect-core`; a test keeps the two the same.\n\n\
         What holds: default, then environment, then flag; for a pod: default for pods, then annotation. Of several\n\
         variables the last one given here wins, of several annotations the first. A boolean is `true` or `false`,\n\
         `1` or `0`, `t` or `f`. Lists are separated by commas. What cannot be read in a flag, a variable or an\n\
         annotation is an error, and all errors are told together. Only a variable of a pod's container `istio-proxy` that\n\
         is no boolean counts as false, with a warning, as in the reference; `istio-validation` in that pod refuses it.\n\
         A name that is nearly one of these (`ISTIO_INBOUND_PORT`) is warned of, with the one that is meant; so is a\n\
         setting that is given and not in force, in the words that stand here.\n",
    );
    for setting in SETTINGS {
        section(setting, &mut page);
    }
    page
}

fn section(setting: &Setting, page: &mut String) {
    // Writing to a string cannot fail.
    let _ = write!(page, "\n## `{}`\n\n{}\n\n", setting.name(), setting.meaning);
    let mut row = |what: &str, value: String| {
        let _ = writeln!(page, "- {what}: {value}");
    };
    if let Some(short) = setting.short {
        row("short flag", format!("`-{short}`"));
    }
    if !setting.env.is_empty() {
        row("environment", code(setting.env));
    }
    if !setting.annotations.is_empty() {
        row("annotation", code(setting.annotations));
    }
    if let Some(name) = setting.proxy_env {
        row("variable of container `istio-proxy`", format!("`{name}`"));
    }
    if let Kind::Choice(words) = setting.kind {
        row("one of", code(words));
    }
    row("default", value(setting.default));
    if let Some(default) = setting.pod_default {
        row("default for pods", value(default));
    }
    for (program, statuses) in [("istio-iptables", IPTABLES), ("istio-validation", VALIDATION)] {
        if let Some((_, status)) = statuses.iter().find(|(key, _)| *key == setting.key) {
            row(&format!("in `{program}`"), status.to_string());
        }
    }
}

fn code(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn value(text: &str) -> String {
    if text.is_empty() { "empty".to_owned() } else { format!("`{text}`") }
}
