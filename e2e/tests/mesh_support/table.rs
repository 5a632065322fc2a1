//! The table of checks, one column for each way in which pods are redirected.

use std::fmt::Write;

use anyhow::{Result, ensure};
use serde_json::json;

use super::Redirection;
use super::checks::{CHECKS, Check, Shop, wait_for_endpoints};
use super::cluster::on_cluster;
use super::release::Release;

/// What a check comes to under Istio's own redirection where that differs, and why.
struct Difference {
    check: &'static str,
    istios: &'static str,
    why: &'static str,
}

const EXPLAINED: [Difference; 0] = [];

/// What every check comes to.
pub fn column(redirection: Redirection, release: &Release) -> Result<Vec<String>> {
    on_cluster(redirection, release, |cluster| {
        cluster.install_agent(&json!({}))?;
        let shop = Shop::open(cluster)?;
        wait_for_endpoints(&shop)?;
        let verdict = |check: &Check| (check.run)(&shop).unwrap_or_else(|error| format!("failed: {error:#}"));
        Ok(CHECKS.iter().map(verdict).collect())
    })
}

/// Prints the table; an error lists every check that came to something else than it has to.
pub fn judge(release: &Release, columns: &[(Redirection, Vec<String>)]) -> Result<()> {
    let titles: Vec<&str> = columns.iter().map(|(redirection, _)| redirection.title()).collect();
    let rule = "|---".repeat(titles.len() + 1);
    let mut table = format!("\nIstio {}\n\n| check | {} |\n{rule}|\n", release.version(), titles.join(" | "));
    let mut wrong = String::new();
    for (row, check) in CHECKS.iter().enumerate() {
        write!(table, "| {} |", check.name)?;
        for (redirection, verdicts) in columns {
            let (is, wanted) = (&verdicts[row], wanted(*redirection, check));
            write!(table, " {} |", one_line(is))?;
            if is != wanted {
                writeln!(wrong, "{}, {}: {is}, not {wanted}", check.name, redirection.title())?;
            }
        }
        table.push('\n');
    }
    for Difference { check, why, .. } in &EXPLAINED {
        writeln!(table, "{check}: {why}")?;
    }
    print(&table);
    ensure!(wrong.is_empty(), "{wrong}");
    Ok(())
}

fn wanted(redirection: Redirection, check: &Check) -> &'static str {
    match redirection {
        Redirection::OurPlugin | Redirection::OurInit => check.wanted,
        Redirection::IstiosPlugin | Redirection::IstiosInit => {
            let explained = EXPLAINED.iter().find(|difference| difference.check == check.name);
            explained.map_or(check.wanted, |difference| difference.istios)
        }
    }
}

fn one_line(verdict: &str) -> String {
    verdict.chars().map(|character| if character.is_control() { ' ' } else { character }).take(120).collect()
}

/// For who runs the tests.
#[allow(clippy::print_stdout, reason = "the figures are for who runs the tests")]
pub fn print(text: &str) {
    println!("{text}");
}
