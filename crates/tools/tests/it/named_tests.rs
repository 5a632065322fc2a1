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

/// The files whose commands name tests: a name that is not one runs no test, and cargo is content.
const COMMANDS: [&str; 4] = ["Makefile", "CONTRIBUTING.md", "scripts/recipe.sh", "scripts/sanitize.sh"];

#[test]
fn every_test_that_a_command_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut count = 0;
    for file in COMMANDS {
        let text = fs::read_to_string(root.join(file)).expect(file);
        for (program, test) in commands(&text) {
            let folders = ["e2e/tests", "redirect-core/tests", "netns-apply/tests", "redirectctl/tests"];
            let crates = ["netfilter-state", "packet-trace", "settings-cli", "tools"]
                .map(|name| format!("crates/{name}/tests"));
            let mut folders = folders.map(str::to_owned).into_iter().chain(crates);
            let exists = folders.any(|folder| has_test(&root.join(folder).join(program), test));
            assert!(exists, "{file} names --test {program} {test}, which does not exist");
            count += 1;
        }
    }
    assert!(count >= 25, "{count} commands");
}

/// The functions that an annotation passes: each line of ARCHITECTURE.md's list begins with one, and the file that has it.
#[test]
fn every_function_on_an_annotations_way_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let steps = text.lines().filter_map(|line| {
        let (number, rest) = line.split_once(". `")?;
        number.parse::<usize>().ok()?;
        let (function, rest) = rest.split_once("` (")?;
        Some((function, rest.split_once("):")?.0))
    });
    let steps: Vec<_> = steps.collect();
    assert!((12..=15).contains(&steps.len()), "{steps:?}");
    for (function, file) in steps {
        let source = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let defines = |after: &str| source.contains(&format!("fn {function}{after}"));
        assert!(defines("(") || defines("<"), "{file} has no function {function}");
    }
}

/// The test programs that commands name, each with the beginning of its tests' names.
fn commands(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("--test ").skip(1).filter_map(|rest| {
        let mut words = rest.split([' ', '\n', '`', '"']);
        let program = words.next()?;
        let test = words.find(|word| !matches!(*word, "--" | "--nocapture" | "--ignored"))?;
        test.contains("::").then_some((program, test))
    })
}

/// Whether a program has a module of this path, and in it a function whose name begins so.
fn has_test(program: &Path, test: &str) -> bool {
    let Some((module, name)) = test.rsplit_once("::") else { return false };
    let file = program.join(module.replace("::", "/")).with_extension("rs");
    fs::read_to_string(file).is_ok_and(|source| source.contains(&format!("\nfn {name}")))
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
