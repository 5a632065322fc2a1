//! Documents that name a test for everything they claim, as `file: name` in the last column of a table behind the mark
//! `<!-- named tests -->`: each of these tests exists.

use std::{fs, path::Path};

/// The documents, and the fewest claims each of them makes.
const DOCUMENTS: [(&str, usize); 5] = [
    ("docs/internals/cni-spec.md", 30),
    ("SECURITY.md", 25),
    ("docs/reference/compatibility.md", 20),
    ("docs/concepts/life-of-a-pod.md", 6),
    ("ARCHITECTURE.md", 11),
];

#[test]
fn every_test_that_a_document_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (document, claims) in DOCUMENTS {
        let text = fs::read_to_string(root.join(document)).expect(document);
        let named = named_tests(&text);
        assert!(named.len() >= claims, "{document} names {} tests", named.len());
        let missing: Vec<&&str> = named.iter().filter(|test| !exists(&root, test)).collect();
        assert!(missing.is_empty(), "{document} names tests that do not exist: {missing:#?}");
    }
}

/// The last cells of all rows of the marked tables.
fn named_tests(text: &str) -> Vec<&str> {
    let tables = text.split("<!-- named tests -->").skip(1);
    let tables = tables.map(|rest| rest.split("<!-- end -->").next().unwrap_or(rest));
    tables
        .flat_map(|table| table.lines().filter(|line| line.starts_with("| ")).skip(1))
        .map(|row| row.trim_end_matches('|').rsplit(" | ").next().unwrap_or(row).trim())
        .collect()
}

fn exists(root: &Path, test: &str) -> bool {
    test.split_once(": ").is_some_and(|(file, name)| {
        let source = fs::read_to_string(root.join(file)).unwrap_or_default();
        let mut tests = source.split("#[test]").skip(1).chain(source.split("#[tokio::test").skip(1));
        tests.any(|after| first_function(after) == Some(name))
    })
}

/// The name of the first function in some source.
fn first_function(source: &str) -> Option<&str> {
    source.split_once("fn ")?.1.split('(').next()
}
