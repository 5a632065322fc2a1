//! Detection through the `iptables` crate: does a table of the legacy variant hold anything?
//!
//! The crate runs one program per question, searches it in the process's own PATH and reports errors as text. That is
//! enough for a yes or no about a table that exists already, and it is all it is asked; whoever needs the rules
//! themselves reads iptables-save.

use redirect_core::Family;

/// Whether a legacy table holds a rule or a chain of anybody's; `None` where that cannot be told.
///
/// To be asked only about tables the kernel has for this namespace: asking about another one would make it.
pub(super) fn legacy_table_is_used(family: Family, table: &str) -> Option<bool> {
    let cmd = match family {
        Family::V4 => "iptables-legacy",
        Family::V6 => "ip6tables-legacy",
    };
    let program = iptables::IPTables { cmd, has_check: true, has_wait: true, is_numeric: false };
    let lines = program.list_table(table).ok()?;
    // The crate does not look at the exit status; but every table lists the policies of its built-in chains.
    if !lines.iter().any(|line| line.starts_with("-P ")) {
        return None;
    }
    // What is not the policy of a built-in chain is a chain or a rule somebody made.
    Some(lines.iter().any(|line| !line.is_empty() && !line.starts_with("-P ")))
}
