//! Documents that name a test for everything they claim, as `file: name` in the last column of a table behind the mark
//! `<!-- named tests -->`: each of these tests exists.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use test_support::project;

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
    for (document, claims) in DOCUMENTS {
        let text = fs::read_to_string(project::file(document)).expect(document);
        let named = named_tests(&text);
        assert!(named.len() >= claims, "{document} names {} tests", named.len());
        let missing: Vec<&&str> = named.iter().filter(|test| !exists(test)).collect();
        assert!(missing.is_empty(), "{document} names tests that do not exist: {missing:#?}");
    }
}

/// A filter that no test has runs none, and cargo is content.
#[test]
fn every_test_that_a_command_names_exists() {
    let folders = packages();
    let mut wrong = Vec::new();
    let mut count = 0;
    for file in project::names(&["Makefile", "*.md", "*.sh"]).expect("git") {
        let text = fs::read_to_string(project::file(&file)).expect("a text").replace("\\\n", " ");
        for command in text.lines().flat_map(commands) {
            let Command { package, program, filters } = &command;
            let tests = folders.get(*package).map(|folder| tests_of(&folder.join("tests").join(program)));
            let tests = tests.unwrap_or_default();
            let unknown: Vec<&&str> =
                filters.iter().filter(|filter| !tests.iter().any(|test| test.contains(**filter))).collect();
            if tests.is_empty() || !unknown.is_empty() {
                wrong.push(format!("{file}: -p {package} --test {program}: {unknown:?}"));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "commands run no test: {wrong:#?}");
    assert!(count >= 50, "{count} commands");
}

/// The functions that an annotation passes: each line of ARCHITECTURE.md's list begins with one, and the file that has it.
#[test]
fn every_function_on_an_annotations_way_exists() {
    let text = fs::read_to_string(project::file("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let steps = text.lines().filter_map(|line| {
        let (number, rest) = line.split_once(". `")?;
        number.parse::<usize>().ok()?;
        let (function, rest) = rest.split_once("` (")?;
        Some((function, rest.split_once("):")?.0))
    });
    let steps: Vec<_> = steps.collect();
    assert!((12..=15).contains(&steps.len()), "{steps:?}");
    for (function, file) in steps {
        let source =
            fs::read_to_string(project::file(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let defines = |after: &str| source.contains(&format!("fn {function}{after}"));
        assert!(defines("(") || defines("<"), "{file} has no function {function}");
    }
}

/// A command that runs a test program.
struct Command<'t> {
    package: &'t str,
    program: &'t str,
    /// Parts of tests' names: of those it runs, and of those it leaves out.
    filters: Vec<&'t str>,
}

/// The commands of a line that name a test program, and those that it begins with `$$test`, where it has put one that does.
fn commands(line: &str) -> Vec<Command<'_>> {
    let mut found: Vec<Command<'_>> = Vec::new();
    let mut package = "";
    let mut is_open = false;
    let mut words = line.split_whitespace();
    while let Some(word) = words.next() {
        match (word, found.last_mut()) {
            ("-p" | "--package", _) => package = words.next().unwrap_or_default(),
            ("--test", _) => {
                let program = words.next().unwrap_or_default().trim_end_matches('`');
                found.push(Command { package, program, filters: Vec::new() });
                is_open = true;
            }
            ("$$test", Some(_)) => is_open = true,
            ("&&" | "||" | "|", _) => is_open = false,
            (_, Some(command)) if is_open => {
                let filter = word.split(['$', '"', '`', ';', ')']).next().unwrap_or_default();
                if !filter.is_empty() && !filter.starts_with('-') {
                    command.filters.push(filter);
                }
                is_open = !word.contains(['"', '`', ';']);
            }
            _ => {}
        }
    }
    found
}

/// The folder of each package of the workspace.
fn packages() -> BTreeMap<String, PathBuf> {
    let manifests = project::names(&["*Cargo.toml"]).expect("git");
    let named = manifests.into_iter().map(project::file).filter_map(|manifest| {
        let text = fs::read_to_string(&manifest).expect("a manifest");
        let name = text.split_once("[package]\nname = \"")?.1.split('"').next()?.to_owned();
        Some((name, manifest.parent()?.to_owned()))
    });
    named.collect()
}

/// The names of a program's tests: their modules, and their functions.
fn tests_of(program: &Path) -> Vec<String> {
    let mut tests = Vec::new();
    let mut folders = vec![(program.to_owned(), String::new())];
    while let Some((folder, modules)) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let file = entry.expect("an entry").path();
            let stem = file.file_stem().and_then(|name| name.to_str()).expect("UTF-8");
            let module =
                if stem == "main" || stem == "mod" { modules.clone() } else { format!("{modules}{stem}::") };
            if file.is_dir() {
                folders.push((file, module));
            } else if let Ok(source) = fs::read_to_string(&file) {
                tests.extend(functions_of_tests(&source).map(|name| format!("{module}{name}")));
            }
        }
    }
    tests
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

fn exists(test: &str) -> bool {
    test.split_once(": ").is_some_and(|(file, name)| {
        let source = fs::read_to_string(project::file(file)).unwrap_or_default();
        functions_of_tests(&source).any(|function| function == name)
    })
}

/// The functions of some source that are tests.
fn functions_of_tests(source: &str) -> impl Iterator<Item = &str> {
    let tests = source.split("#[test]").skip(1).chain(source.split("#[tokio::test").skip(1));
    tests.filter_map(|after| after.split_once("fn ")?.1.split('(').next())
}
