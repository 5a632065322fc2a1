//! What the agent reports of itself beside its readiness, and others read: a line each in the answer to `/readyz?verbose`.

use std::fmt;

/// How the line of a limit begins.
const LIMIT: &str = "limited: ";
/// How the line of a count begins.
const COUNT: &str = "counted: ";
/// How many counts have a line: labels may be many.
const MOST_COUNTS: usize = 24;

/// What an agent reports of itself that leaves it ready.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AgentNotes {
    /// What limits it now.
    pub limits: Vec<String>,
    /// What it has counted since its start, or counts now, that should be 0.
    pub counts: Vec<String>,
}

impl AgentNotes {
    /// The notes in a longer text.
    #[must_use]
    pub fn find(text: &str) -> Self {
        let all = |prefix: &str| {
            text.lines().filter_map(|line| line.strip_prefix(prefix)).map(str::to_owned).collect()
        };
        Self { limits: all(LIMIT), counts: all(COUNT) }
    }
}

impl fmt::Display for AgentNotes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = self.limits.iter().map(|text| (LIMIT, text));
        let counts = self.counts.iter().take(MOST_COUNTS).map(|text| (COUNT, text));
        limits.chain(counts).try_for_each(|(prefix, text)| writeln!(f, "{prefix}{text}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_found_among_other_lines_and_are_not_without_limit() {
        let counts = (0..30).map(|number| format!("x {number}")).collect();
        let notes = AgentNotes { limits: vec!["its settings are refused".to_owned()], counts };
        let found = AgentNotes::find(&format!(
            "ready\n5 of 5 meshed pods verified\n{notes}held for plugins: 2 pods\n"
        ));
        assert_eq!((found.limits, found.counts.len()), (notes.limits, MOST_COUNTS));
        assert_eq!(AgentNotes::find("ready\n"), AgentNotes::default());
    }
}
