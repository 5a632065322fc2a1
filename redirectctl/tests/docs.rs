//! docs/reference/redirectctl.md says what the code says. With UPDATE_DOCS=1 the tables are written instead of compared.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fmt::Write;
use std::fs;
use std::path::Path;

use redirectctl::cause::Cause;
use redirectctl::commands::COMMANDS;
use settings_table::markdown;

fn causes() -> String {
    let mut table = "| code | weight | means | what to do |\n|---|---|---|---|\n".to_owned();
    for cause in Cause::ALL {
        let (code, weight) = (cause.code(), cause.severity().word());
        writeln!(table, "| `{code}` | {weight} | {} | {} |", cause.meaning(), cause.remedy()).unwrap();
    }
    table
}

fn commands() -> String {
    let mut text = String::new();
    for command in COMMANDS {
        writeln!(text, "### {}\n\n{}\n", command.name, command.about).unwrap();
        if let Some(alias) = command.alias {
            writeln!(text, "`{alias}` is the same.\n").unwrap();
        }
        for (name, what) in command.operands {
            writeln!(text, "`{name}`: {what}\n").unwrap();
        }
        // Who runs them: e2e/tests/guides_mesh.rs.
        text.push_str("```sh mesh\n");
        for (what, line) in command.pages.examples {
            writeln!(text, "# {what}\n{line}").unwrap();
        }
        text.push_str("```\n\n");
        if !command.rows.is_empty() {
            text += &markdown(command.rows);
            text.push('\n');
        }
        if command.takes_settings {
            text.push_str("Besides these it takes the flags and variables of `istio-iptables` ([settings](settings.md)).\n\n");
        }
    }
    text
}

#[test]
fn the_reference_says_what_the_code_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/redirectctl.md");
    let mut text = fs::read_to_string(&path).unwrap();
    for (name, wanted) in [("commands", commands()), ("causes", causes())] {
        let begin = format!("<!-- {name} -->\n");
        let start = text.find(&begin).expect("a place for it") + begin.len();
        let end = start + text[start..].find("<!-- end -->").expect("an end of it");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            text.replace_range(start..end, &wanted);
        } else {
            assert_eq!(&text[start..end], wanted, "run UPDATE_DOCS=1 cargo test -p redirectctl --test docs");
        }
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path, text).unwrap();
    }
}
