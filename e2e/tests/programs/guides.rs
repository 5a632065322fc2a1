//! The commands that the documents show are run: here on a copy of this machine, in `guides_node.rs` on a cluster.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::guides::worlds::{WORLDS, blocks_for, typed};
use e2e::guides::{NOT_RUN, blocks};
use e2e::machine::Machine;
use e2e::program;
use serde_json::Value;
use test_support::process::{self, SHORT};
use test_support::project;

#[test]
#[allow(clippy::print_stdout, reason = "tells what no test runs")]
fn every_command_of_the_documents_is_run_or_says_that_it_is_not() -> Result<()> {
    let all = blocks()?;
    ensure!(all.len() >= 20, "only {} blocks of commands were found", all.len());
    let mut problems = Vec::new();
    let mut not_run = Vec::new();
    for block in &all {
        let is_run = WORLDS
            .iter()
            .any(|world| world.name == block.world && world.documents.contains(&&*block.document));
        match (is_run, block.before.contains(NOT_RUN)) {
            (true, false) => {}
            (false, true) if block.world.is_empty() => not_run.push(block),
            (true, true) => problems.push(format!("{} is run, and says that it is not", block.place())),
            (false, _) => {
                problems.push(format!(
                    "nobody runs {} ({:?}): {:?}",
                    block.place(),
                    block.world,
                    block.commands()
                ));
            }
        }
    }
    ensure!(problems.is_empty(), "{problems:#?}");
    for world in WORLDS {
        println!("{}: {} blocks, by {}", world.name, blocks_for(world.name)?.len(), world.test);
    }
    println!("{} blocks of commands, {} of them not run:", all.len(), not_run.len());
    for block in &not_run {
        println!("{}: {}", block.place(), block.before);
    }
    Ok(())
}

/// What a network plugin leaves on a machine.
const NETWORK: &str = r#"set -e
mkdir -p /opt/cni/bin /etc/cni/net.d
echo '{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge"}]}' >/etc/cni/net.d/10-net.conflist"#;

const ENTRY: &str = "grep -q istio-cni /etc/cni/net.d/10-net.conflist && [ -x /opt/cni/bin/istio-cni ]";

/// They take minutes, and are what runs these tests: that there are such targets is all that is seen here.
#[test]
fn every_target_of_make_that_is_named_exists() -> Result<()> {
    for block in blocks_for("make")? {
        for line in block.commands() {
            let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            ensure!(words.first() == Some(&"make"), "{}: {line}", block.place());
            let mut make = Command::new("make");
            make.arg("--dry-run").args(&words[1..]).current_dir(project::file(""));
            process::run(&mut make, SHORT)?.ok()?;
        }
    }
    Ok(())
}

/// Each document from the beginning, on a machine of its own.
#[test]
fn what_is_typed_on_a_machine_prints_what_is_shown() -> Result<()> {
    let programs = program::built()?;
    let mut at: Option<(String, Machine)> = None;
    let mut installed = 0;
    for block in blocks_for("machine")? {
        if at.as_ref().is_none_or(|(document, _)| *document != block.document) {
            let machine = Machine::start(&[&programs], &[])?;
            machine.run(NETWORK, &[])?.ok()?;
            at = Some((block.document.clone(), machine));
        }
        let machine = &at.as_ref().expect("just started").1;
        // Where the programs as shipped would be; these are the same, not optimized.
        typed(&block, |script| machine.run(script, &[("PROGRAMS", &programs.to_string_lossy())]))?;
        let is_installed = machine.run(ENTRY, &[])?.status.success();
        ensure!(!(is_installed && block.text.contains("uninstall")), "{} leaves the entry", block.place());
        installed += usize::from(is_installed);
    }
    ensure!(installed > 0, "no command of docs/get-started/node-image.md installs the plugin");
    Ok(())
}

/// The table of docs/get-started/platforms.md has what the chart has.
#[test]
fn the_platforms_are_those_of_the_chart() -> Result<()> {
    let chart: BTreeMap<String, Value> = serde_saphyr::from_str(&fs::read_to_string(project::file(
        "deploy/charts/istio-cni/files/platforms.yaml",
    ))?)?;
    let text = fs::read_to_string(project::file("docs/get-started/platforms.md"))?;
    let table = text.split("<!-- platforms -->").nth(1).and_then(|rest| rest.split("<!-- end -->").next());
    let rows: BTreeMap<&str, &str> = table
        .context("no table")?
        .lines()
        .filter_map(|row| Some((row.strip_prefix("| `")?.split('`').next()?, row)))
        .filter(|(name, _)| *name != "platform")
        .collect();
    ensure!(rows.keys().copied().eq(chart.keys().map(String::as_str)), "{:?}", rows.keys());
    for (platform, values) in &chart {
        let row = rows[platform.as_str()];
        let mut missing = Vec::new();
        strings(values, &mut |value| {
            if !row.contains(&format!("`{value}`")) && value != "multus" {
                missing.push(value.to_owned());
            }
        });
        ensure!(missing.is_empty(), "{platform} has {missing:?}, which is not in {row}");
    }
    Ok(())
}

fn strings(value: &Value, found: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => found(text),
        Value::Object(fields) => fields.values().for_each(|inner| strings(inner, found)),
        Value::Array(items) => items.iter().for_each(|inner| strings(inner, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
