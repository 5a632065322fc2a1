//! docs/reference/agent.md says what the code says. With UPDATE_DOCS=1 the tables are written instead of compared.

use std::fs;

use agent_runtime::metrics::{Described, process};
use install_cni::install::reload::RELOADED;
use install_cni::metrics::Metrics;
use install_cni::pods::repair::action::possible_reasons;
use install_cni::settings::table::SETTINGS;
use reasons::{AgentReason, EventReason};
use settings_cli::LOG_ROWS;
use settings_table::{Status, markdown, wrapped};
use taint_controller::metrics::ControllerMetrics;
use test_support::project;

fn metrics(rows: &[Described]) -> String {
    let item = |row: &Described| {
        let labels = if row.labels.is_empty() { String::new() } else { format!("{{{}}}", row.labels) };
        let is_named_counter = row.kind == "counter" && row.name.ends_with("_total");
        let kind = if is_named_counter { String::new() } else { format!(" ({})", row.kind) };
        wrapped(&format!("- `{}{labels}`{kind}: {}", row.name, (row.help)()), "  ")
    };
    rows.iter().map(item).collect()
}

/// The list of settings; those that are not in force come behind it, together by the reason.
fn settings() -> String {
    let (others, in_force): (Vec<_>, Vec<_>) = SETTINGS
        .iter()
        .copied()
        .partition(|row| matches!(row.status, Status::WithoutEffect(_) | Status::NotImplemented(_)));
    let mut text = markdown(&in_force) + "\nNot in force:\n\n";
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for row in &others {
        let (description, name) = (row.description(), row.env.first().copied().unwrap_or(row.name()));
        match reasons.iter_mut().find(|(known, _)| *known == description) {
            Some((_, names)) => names.push(name),
            None => reasons.push((description, vec![name])),
        }
    }
    for (description, names) in reasons {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        text += &wrapped(&format!("- {}: {description}", names.join(", ")), "  ");
    }
    text
}

#[test]
fn the_reference_matches_the_code() {
    let tables = [
        ("metrics", metrics(&[Metrics::ROWS, process::METRICS].concat())),
        ("settings", settings()),
        ("logging", markdown(LOG_ROWS)),
    ];
    compare("reference/agent.md", &tables);
    compare("concepts/taint.md", &[("taint-metrics", metrics(ControllerMetrics::ROWS))]);
}

fn compare(file: &str, tables: &[(&str, String)]) {
    let path = project::file("docs").join(file);
    let mut text = fs::read_to_string(&path).expect(file);
    for (name, table) in tables {
        let begin = format!("<!-- {name} -->\n");
        let start = text.find(&begin).expect("a place for the table") + begin.len();
        let end = start + text[start..].find("<!-- end -->").expect("an end of the table");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            text.replace_range(start..end, table);
        } else {
            assert_eq!(&text[start..end], table, "run UPDATE_DOCS=1 cargo test -p e2e --test agent docs::");
        }
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path, text).expect("writes");
    }
}

#[test]
fn the_reference_shows_every_placeholder() {
    let text = fs::read_to_string(project::file("docs/reference/agent.md")).expect("docs");
    assert!(
        install_cni::conflist::PluginEntry::from_template("__X__", &[]).is_err(),
        "unknown ones are refused"
    );
    let source = include_str!("../../../node-agent/src/settings.rs");
    let names = source.lines().filter_map(|line| {
        let name = line.trim().strip_prefix("(\"")?.split('"').next()?;
        name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_').then_some(name)
    });
    let names: Vec<&str> = names.collect();
    assert!(names.len() >= 10, "{names:?}");
    assert!(names.iter().all(|name| text.contains(&format!("`__{name}__`"))), "{names:?}");
}

#[test]
fn the_reference_lists_what_is_reloaded() {
    let text = fs::read_to_string(project::file("docs/reference/agent.md")).expect("docs");
    let (_, section) = text.split_once("### Settings that are reloaded").expect("a section");
    let (list, _) = section.split_once("- **Precedence**").expect("a list");
    let reloaded = RELOADED.map(|key| key.row().name());
    let listed: Vec<&str> = list.split('`').filter(|word| reloaded.contains(word)).collect();
    assert_eq!(listed, reloaded);
}

#[test]
fn the_page_about_repair_lists_every_reason() {
    let text = fs::read_to_string(project::file("docs/concepts/repair.md")).expect("docs");
    let (_, list) =
        text.split_once("`istio_cni_repair_attempts_total` has these reasons:\n\n").expect("a list");
    let (list, _) = list.split_once("\n\n").expect("an end");
    let listed: Vec<&str> =
        list.lines().filter_map(|line| line.strip_prefix("- `")?.split('`').next()).collect();
    let possible: Vec<&str> = possible_reasons().map(AgentReason::word).collect();
    assert_eq!(listed, possible);
}

#[test]
fn every_event_is_in_a_document() {
    let docs = project::file("docs");
    let pages = ["reference/agent.md", "tasks/ambient.md"].map(|page| docs.join(page));
    let concepts =
        fs::read_dir(docs.join("concepts")).expect("pages").map(|page| page.expect("a page").path());
    let texts = pages.into_iter().chain(concepts).map(|page| fs::read_to_string(page).expect("a page"));
    let text: String = texts.collect();
    for reason in EventReason::ALL {
        assert!(text.contains(&format!("`{reason}`")), "{reason}");
    }
}
