//! The reference documentation of the settings, from the table.

use crate::rows::{IPTABLES, VALIDATION};
use redirect_core::settings::{Kind, SETTINGS, Setting};
use std::fmt::Write;

/// A page in Markdown: every setting with its flag, variables, annotation, default and meaning.
#[must_use]
pub fn reference() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Every setting of `istio-iptables`, of `istio-validation` and, through annotations, of `istio-cni`. This page is\n\
         generated from the settings table in `redirect-core`; a test keeps the two the same.\n\n\
         A flag overrides the environment, and the environment overrides the default; for a pod, an annotation overrides the\n\
         default for pods. If several variables are given, the last one listed here wins; of several annotations, the first. A\n\
         boolean is `true` or `false`, `1` or `0`, `t` or `f`. Lists are separated by commas. A flag, variable or annotation that\n\
         cannot be read is an error, and all errors are reported together. One exception: a variable of a pod's container\n\
         `istio-proxy` that is not a boolean counts as false, with a warning, as in the reference; `istio-validation` in that pod refuses it.\n\
         A name that is nearly one of these (`ISTIO_INBOUND_PORT`) causes a warning that names the one that is meant; so does a\n\
         setting that is given and has no effect, in the words used here.\n",
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
