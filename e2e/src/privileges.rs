//! The table of docs/reference/privileges.md: tests run each of its rows with exactly the capabilities that it names, and with one fewer.

use anyhow::{Context, Result, ensure};

use crate::guides::table;

/// What a program does, and what it needs for that according to the page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// As it is typed.
    pub program: String,
    /// What it does, in the page's words.
    pub does: String,
    /// The capabilities, as setpriv(1) has their names: `net_admin`.
    pub needs: Vec<String>,
}

/// All rows, in the page's order.
///
/// # Errors
/// The table cannot be read.
pub fn rows() -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for cells in table("docs/reference/privileges.md", "| program |")? {
        let [program, does, needs, _] = &cells[..] else { anyhow::bail!("not four cells: {cells:?}") };
        let program = match program.as_str() {
            "" => rows.last().context("the first row has no program")?.program.clone(),
            named => named.to_owned(),
        };
        rows.push(Row { program, does: does.clone(), needs: capabilities(needs)? });
    }
    ensure!(!rows.is_empty(), "docs/reference/privileges.md has no programs in its table");
    Ok(rows)
}

fn capabilities(cell: &str) -> Result<Vec<String>> {
    if cell == "nothing" {
        return Ok(Vec::new());
    }
    let is_name = |name: &&str| name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    let names: Vec<&str> = cell.split(", ").collect();
    ensure!(names.iter().all(is_name), "{cell} is not a list of capabilities");
    Ok(names.into_iter().map(str::to_lowercase).collect())
}

/// What a program needs for something according to the page.
///
/// # Errors
/// The page has no such row.
pub fn needs(program: &str, does: &str) -> Result<Vec<String>> {
    let row = rows()?.into_iter().find(|row| row.program == program && row.does == does);
    Ok(row
        .with_context(|| format!("docs/reference/privileges.md does not list that {program} {does}"))?
        .needs)
}

/// Starts a program as root with these capabilities, and no way to get more: as a container does that drops all and adds some.
#[must_use]
pub fn only<S: AsRef<str>>(capabilities: &[S]) -> Vec<String> {
    let added: String = capabilities.iter().map(|name| format!(",+{}", name.as_ref())).collect();
    let bounds = format!("--bounding-set=-all{added}");
    ["setpriv", &bounds, "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--"]
        .map(str::to_owned)
        .into()
}

/// All ways to leave one out, each with the name of that one.
#[must_use]
pub fn one_fewer(all: &[String]) -> Vec<(Vec<String>, String)> {
    let without = |out: &String| all.iter().filter(|name| *name != out).cloned().collect();
    all.iter().map(|out| (without(out), format!("CAP_{}", out.to_uppercase()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_program_and_something_it_does() {
        let rows = rows().expect("a table");
        assert!(rows.iter().all(|row| !row.program.is_empty() && !row.does.is_empty()), "{rows:#?}");
        assert!(rows.len() >= 14, "{rows:#?}");
        assert!(needs("istio-iptables", "flies").is_err());
    }

    #[test]
    fn a_cell_that_is_no_list_is_not_taken_for_one() {
        assert_eq!(capabilities("nothing").expect("none"), [""; 0]);
        assert_eq!(capabilities("NET_ADMIN, NET_RAW").expect("two"), ["net_admin", "net_raw"]);
        assert!(capabilities("NET_ADMIN (and NET_RAW)").is_err());
    }
}
