//! Every document has its place on the web page, which is made with dependencies that `make test` does without.

use std::fs;

#[test]
fn every_document_has_a_place_on_the_web_page() {
    let project = test_support::project::file("");
    let missing = crate::contents::without_a_place(&project).expect("the documents");
    assert!(missing.is_empty(), "crates/tools/src/page/contents.rs has no place for {missing:?}");
    for name in crate::contents::CONTENTS.iter().flat_map(|(_, names)| *names) {
        assert!(project.join(name).is_file(), "{name} is missing");
    }
}

#[test]
fn a_document_without_a_place_is_told() {
    let project = tempfile::tempdir().expect("a folder");
    fs::create_dir_all(project.path().join("docs/get-started")).expect("folders");
    for name in ["docs/get-started/install.md", "docs/get-started/new.md", "docs/sizes.txt"] {
        fs::write(project.path().join(name), "").expect("writes");
    }
    assert_eq!(crate::contents::without_a_place(project.path()).expect("lists"), ["docs/get-started/new.md"]);
}
