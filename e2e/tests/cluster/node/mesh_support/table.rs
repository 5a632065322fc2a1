//! The table of checks, one column for each way in which pods are redirected.

use std::fmt::Write;

use anyhow::{Result, ensure};
use serde_json::json;

use super::Redirection;
use super::checks::{CHECKS, Check, Shop, wait_for_endpoints};
use super::cluster::on_cluster;
use super::release::Release;

/// What a check comes to instead under some circumstances, and why.
struct Difference {
    check: &'static str,
    is: &'static str,
    why: &'static str,
}

/// What a check comes to before Istio 1.31, whoever redirects, and why.
const BEFORE_1_31: [Difference; 1] = [Difference {
    check: "the same, port excluded",
    is: "not captured, not scraped",
    why: "Istio has had that listener since 1.31",
}];

/// What every check comes to.
pub fn column(redirection: Redirection, release: &Release) -> Result<Vec<String>> {
    on_cluster(redirection, release, |cluster| {
        cluster.install_agent(&json!({}))?;
        let shop = Shop::open(cluster)?;
        wait_for_endpoints(&shop)?;
        let verdict = |(_, _, run): &Check| run(&shop).unwrap_or_else(|error| format!("failed: {error:#}"));
        Ok(CHECKS.iter().map(verdict).collect())
    })
}

/// Prints the table; an error lists every check that came to something else than it has to.
pub fn judge(release: &Release, columns: &[(Redirection, Vec<String>)]) -> Result<()> {
    let titles: Vec<&str> = columns.iter().map(|(redirection, _)| redirection.title()).collect();
    let rule = "|---".repeat(titles.len() + 1);
    let mut table = format!("\nIstio {}\n\n| check | {} |\n{rule}|\n", release.version(), titles.join(" | "));
    let mut wrong = String::new();
    for (row, (check, usual, _)) in CHECKS.iter().enumerate() {
        write!(table, "| {check} |")?;
        for (redirection, verdicts) in columns {
            let (is, wanted) = (&verdicts[row], wanted(release, check, usual));
            write!(table, " {} |", one_line(is))?;
            if is != wanted {
                writeln!(wrong, "{check}, {}: {is}, not {wanted}", redirection.title())?;
            }
        }
        table.push('\n');
    }
    for Difference { check, why, .. } in differences(release) {
        writeln!(table, "{check}: {why}")?;
    }
    let verdicts: usize = columns.iter().map(|(_, verdicts)| verdicts.len()).sum();
    writeln!(table, "{} checks, {verdicts} verdicts, {} wrong", CHECKS.len(), wrong.lines().count())?;
    print(&table);
    ensure!(wrong.is_empty(), "{wrong}");
    Ok(())
}

fn differences(release: &Release) -> &'static [Difference] {
    if release.is_1_31_or_newer() { &[] } else { &BEFORE_1_31 }
}

fn wanted(release: &Release, check: &str, usual: &'static str) -> &'static str {
    differences(release).iter().find(|difference| difference.check == check).map_or(usual, |found| found.is)
}

fn one_line(verdict: &str) -> String {
    verdict.chars().map(|character| if character.is_control() { ' ' } else { character }).take(120).collect()
}

/// For who runs the tests.
#[allow(clippy::print_stdout, reason = "the figures are for who runs the tests")]
pub fn print(text: &str) {
    println!("{text}");
}
