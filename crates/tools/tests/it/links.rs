//! Links between the project's Markdown files: each leads to a file that is there, and to a heading of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use test_support::project;

#[test]
fn every_link_leads_somewhere() {
    let files = documents();
    assert!(files.len() >= 20, "{}", files.len());
    let mut links = 0;
    let mut broken = Vec::new();
    let mut anchors_of = BTreeMap::new();
    for file in &files {
        for link in links_of(&read(file)) {
            links += 1;
            if let Some(what) = fault(file, &link, &mut anchors_of) {
                broken.push(format!("{}: {link}: {what}", file.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(links >= 100, "only {links} links were found");
}

/// The Markdown files that belong to the project.
fn documents() -> Vec<PathBuf> {
    project::names(&["*.md"]).expect("git").into_iter().map(project::file).collect()
}

fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Where links of a text lead to: `[words](here)`, outside of code.
fn links_of(text: &str) -> Vec<String> {
    let prose = without_code(text);
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.map(|target| target.split(' ').next().unwrap_or(target).to_owned()).collect()
}

/// The lines outside of fenced blocks, without code spans.
fn without_code(text: &str) -> String {
    let mut is_code = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            prose.extend(line.split('`').step_by(2));
            prose.push('\n');
        }
    }
    prose
}

/// What is wrong with a link, if anything. Links to other machines are not followed.
fn fault(
    file: &Path,
    link: &str,
    anchors_of: &mut BTreeMap<PathBuf, BTreeSet<String>>,
) -> Option<&'static str> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let target = if path.is_empty() { file.to_owned() } else { file.parent()?.join(path) };
    if !target.exists() {
        return Some("no such file");
    }
    let anchor = anchor?;
    let anchors = anchors_of.entry(target.clone()).or_insert_with(|| anchors(&read(&target)));
    (!anchors.contains(anchor)).then_some("no such heading")
}

/// The anchors that GitHub makes of a text's headings: lower case, without punctuation, `-` for each space, and a number where a heading comes again.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut is_code = false;
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let level = line.chars().take_while(|letter| *letter == '#').count();
        let Some(heading) = line[level..].strip_prefix(' ').filter(|_| !is_code && (1..=6).contains(&level))
        else {
            continue;
        };
        let kept =
            heading.trim().chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        let anchor: String = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let mut name = anchor.clone();
        let mut number = 0;
        while !anchors.insert(name) {
            number += 1;
            name = format!("{anchor}-{number}");
        }
    }
    anchors
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let here = project::file("README.md");
    let fault = |link: &str| fault(&here, link, &mut BTreeMap::new());
    assert_eq!(fault("docs/reference/agent.md#metrics"), None);
    assert_eq!(fault("docs/reference/agent.md#no-such-heading"), Some("no such heading"));
    assert_eq!(fault("docs/nothing.md"), Some("no such file"));
    assert_eq!(fault("#no-such-heading"), Some("no such heading"));
    let text = "[a](b.md) `[no](c.md)`\n```sh\n[no](d.md)\n```\n[e](f.md#g \"title\")";
    assert_eq!(links_of(text), ["b.md", "f.md#g"]);
    let expected = ["a-b", "a-b-1", "cs-d_e--f"].map(str::to_owned);
    assert_eq!(anchors("# A b\n## A, b?\n### `C`'s d_e & f\n```\n# no\n```\n"), expected.into());
}
