//! The documents say what the code says: the commands in docs/reference/redirectctl.md, their examples in docs/tasks/diagnose.md, and the findings in
//! docs/tasks/troubleshooting.md. With UPDATE_DOCS=1 these parts are written instead of compared.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fmt::Write;
use std::fs;

use redirectctl::cause::Cause;
use redirectctl::commands::COMMANDS;
use settings_table::{SettingSpec, markdown, wrapped};
use test_support::project;

fn causes() -> String {
    let mut text = String::new();
    for cause in Cause::ALL {
        let (code, weight) = (cause.code(), cause.severity().word());
        text += &format!("### {code}\n{}", wrapped(&format!("{weight}: {}.", cause.doc().meaning), ""));
        text += &wrapped(&format!("**Remedy**: {}.", cause.doc().remedy), "");
        text.push('\n');
    }
    text
}

/// Flags with one meaning in this many commands are shown once.
const SHARED: usize = 3;

fn is_shared(row: &SettingSpec) -> bool {
    let rows = COMMANDS.iter().flat_map(|command| command.rows);
    rows.filter(|other| (other.flag, other.meaning) == (row.flag, row.meaning)).count() >= SHARED
}

fn commands() -> String {
    let (mut shared, mut own_rows) = (Vec::<SettingSpec>::new(), String::new());
    for command in COMMANDS {
        let mut names = Vec::new();
        let mut own = Vec::new();
        for row in command.rows {
            if !is_shared(row) {
                own.push(*row);
                continue;
            }
            let flag = row.flag.unwrap_or_default();
            if !shared.iter().any(|other| (other.flag, other.meaning) == (row.flag, row.meaning)) {
                shared.push(SettingSpec { default: "", ..*row });
            }
            // All commands that write text have these.
            if ["output", "color"].contains(&flag) {
                continue;
            }
            let value = if row.default.is_empty() { String::new() } else { format!("={}", row.default) };
            names.push(format!("`--{flag}{value}`"));
        }
        writeln!(own_rows, "### {}\n\n{}", command.name(), wrapped(command.about, "")).unwrap();
        if let Some(alias) = command.alias {
            writeln!(own_rows, "Also: `{alias}`.\n").unwrap();
        }
        for (name, what) in command.operands {
            writeln!(own_rows, "{}", wrapped(&format!("`{name}`: {what}"), "")).unwrap();
        }
        if command.takes_settings {
            names.push("those of [istio-iptables](settings.md)".to_owned());
        }
        if !names.is_empty() {
            writeln!(own_rows, "{}", wrapped(&format!("Shared flags: {}.", names.join(", ")), "")).unwrap();
        }
        if !own.is_empty() {
            writeln!(own_rows, "{}", markdown(&own)).unwrap();
        }
    }
    format!(
        "Shared flags; each command lists its own, except --output and --color, with defaults:\n\n{}\n{own_rows}",
        markdown(&shared)
    )
}

fn examples() -> String {
    // Who runs them: e2e/tests/cluster/guides_mesh.rs.
    let mut text = "```sh mesh\n".to_owned();
    for (what, line) in COMMANDS.iter().flat_map(|command| command.pages.examples) {
        writeln!(text, "# {what}\n{line}").unwrap();
    }
    text + "```\n"
}

#[test]
fn the_documents_say_what_the_code_says() {
    let parts = [
        ("reference/redirectctl.md", "commands", commands()),
        ("tasks/diagnose.md", "examples", examples()),
        ("tasks/troubleshooting.md", "causes", causes()),
    ];
    for (file, name, wanted) in parts {
        let path = project::file("docs").join(file);
        let mut text = fs::read_to_string(&path).unwrap();
        let begin = format!("<!-- {name} -->\n");
        let start = text.find(&begin).expect("a place for it") + begin.len();
        let end = start + text[start..].find("<!-- end -->").expect("an end of it");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            text.replace_range(start..end, &wanted);
            fs::write(path, text).unwrap();
        } else {
            assert_eq!(
                &text[start..end],
                wanted,
                "run UPDATE_DOCS=1 cargo test -p redirectctl --test it docs::"
            );
        }
    }
}
