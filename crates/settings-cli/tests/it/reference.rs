//! The reference documentation of the settings, from the table.

use redirect_core::settings::{Key, Setting, SettingKind};
use settings_cli::{IPTABLES, VALIDATION};
use settings_table::wrapped;
use std::fmt::Write;

/// A page in Markdown: every setting with its flag, variables, annotation, default and meaning.
pub(crate) fn reference() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Settings of `istio-iptables`, of `istio-validation` and, through annotations, of `istio-cni`,\n\
         generated from the settings table in `redirect-core`.\n\n\
         In brackets: the short flag, environment variables, annotations, and the default unless it is empty or `false`.\n\
         A flag overrides the environment, which overrides the default; a pod's annotation overrides the default for pods.\n\
         Of several variables the last one listed counts, of several annotations the first.\n\
         A boolean is `true` or `false`, `1` or `0`, `t` or `f`. Commas separate the items of a list.\n\
         Unreadable values are errors, reported together.\n\
         One exception: a variable of a pod's container `istio-proxy` that is not a boolean counts as false with a warning,\n\
         as in the reference; `istio-validation` in that pod refuses it.\n\
         A misspelt name (`ISTIO_INBOUND_PORT`) and a setting without effect cause a warning.\n",
    );
    for setting in Setting::ALL {
        section(setting, &mut page);
    }
    page
}

fn section(setting: &Setting, page: &mut String) {
    // Writing to a string cannot fail.
    let _ = write!(page, "\n## `{}`\n\n{}", setting.name(), wrapped(setting.meaning, ""));
    let mut facts = Vec::new();
    if let Some(short) = setting.short {
        facts.push(format!("`-{short}`"));
    }
    if !setting.env.is_empty() && setting.env != [setting.name()] {
        facts.push(code(setting.env));
    }
    if !setting.annotations.is_empty() {
        facts.push(format!("annotation {}", code(setting.annotations)));
    }
    if let Some(name) = setting.proxy_env {
        facts.push(format!("variable `{name}` of container `istio-proxy`"));
    }
    if let SettingKind::Choice(words) = setting.kind {
        facts.push(format!("one of {}", code(words)));
    }
    if !["", "false"].contains(&setting.default) || setting.pod_default.is_some() {
        facts.push(format!("default {}", value(setting.default)));
    }
    if let Some(default) = setting.pod_default {
        facts.push(format!("for pods {}", value(default)));
    }
    if !facts.is_empty() {
        *page += &wrapped(&format!("({})", facts.join("; ")), "");
    }
    for (programs, status) in statuses(setting.key) {
        *page += &wrapped(&format!("In {}: {status}", code(&programs)), "");
    }
}

/// How far programs obey a setting where they do not do so wholly; programs that do the same are together.
fn statuses(key: Key) -> Vec<(Vec<&'static str>, String)> {
    let mut all: Vec<(Vec<&'static str>, String)> = Vec::new();
    for (program, statuses) in [("istio-iptables", IPTABLES), ("istio-validation", VALIDATION)] {
        let Some((_, status)) = statuses.iter().find(|(of, _)| *of == key) else { continue };
        let status = status.to_string();
        match all.iter_mut().find(|(_, known)| *known == status) {
            Some((programs, _)) => programs.push(program),
            None => all.push((vec![program], status)),
        }
    }
    all
}

fn code(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn value(text: &str) -> String {
    if text.is_empty() { "empty".to_owned() } else { format!("`{text}`") }
}
