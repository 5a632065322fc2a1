//! docs/cni-spec.md names a test for every requirement of the CNI specification: each of them exists.

use std::{fs, path::Path};

/// The rows of the table of requirements: what is asked, what is done, and the test, as `file: name`.
fn rows(text: &str) -> Vec<[&str; 3]> {
    let table = text.split("<!-- requirements -->").nth(1).and_then(|rest| rest.split("<!-- end -->").next());
    table
        .expect("a table of requirements")
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(1)
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            cells.try_into().unwrap_or_else(|_| panic!("not three cells: {line}"))
        })
        .collect()
}

/// The name of the first function in some source.
fn first_function(source: &str) -> Option<&str> {
    source.split_once("fn ")?.1.split('(').next()
}

#[test]
fn every_requirement_is_held_by_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join("docs/cni-spec.md")).expect("docs/cni-spec.md");
    let rows = rows(&text);
    assert!(rows.len() > 25, "{} requirements", rows.len());
    let missing: Vec<&str> = rows
        .iter()
        .filter(|[_, _, test]| {
            let found = test.split_once(": ").is_some_and(|(file, name)| {
                let source = fs::read_to_string(root.join(file)).unwrap_or_default();
                source.split("#[test]").skip(1).any(|after| first_function(after) == Some(name))
            });
            !found
        })
        .map(|[_, _, test]| *test)
        .collect();
    assert_eq!(missing, [""; 0], "no such test");
}
