//! What a run that failed must have said, and left.

use crate::faults::is_named;
use anyhow::Result;
use test_support::netns::{Namespace, Snapshot, SnapshotDiff};
use test_support::process::Output;

/// The error lines of a run.
pub fn errors(output: &Output) -> String {
    let lines = output.stderr.lines().filter(|line| line.contains("\terror\t"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Asserts that a run failed, by exit code 1 and an error message that has all these words.
#[track_caller]
pub fn assert_refused(output: &Output, words: &[&str]) {
    assert_eq!(output.code(), Some(1), "{output:?}");
    let errors = errors(output);
    assert!(!errors.is_empty(), "no error message: {}", output.stderr);
    for word in words {
        assert!(errors.contains(word), "{word:?} is not in {errors}");
    }
}

/// Asserts that a namespace is what it was.
#[track_caller]
pub fn assert_unchanged(namespace: &Namespace, before: &Snapshot, what: &str) {
    let changes = changes(namespace, before).expect("can be checked");
    assert!(changes.is_empty(), "{what}:\n{}", changes.join("\n"));
}

/// How a namespace differs from what it was, a line each.
pub fn changes(namespace: &Namespace, before: &Snapshot) -> Result<Vec<String>> {
    Ok(namespace.snapshot()?.changes_since(before).iter().map(ToString::to_string).collect())
}

/// The changes that an error message does not name.
pub fn not_named(changes: &[SnapshotDiff], message: &str) -> Vec<String> {
    let is_silent = |change: &&SnapshotDiff| !is_named(change.section, &change.line, message);
    changes.iter().filter(is_silent).map(ToString::to_string).collect()
}
