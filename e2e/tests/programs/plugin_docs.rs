//! docs/reference/cni-plugin.md says what the table of keys says. With UPDATE_DOCS=1 the table is written instead of compared.

use cni_core::keys::KEYS;
use std::{env, fs};
use test_support::project;

#[test]
fn the_reference_says_what_the_code_says() {
    let path = project::file("docs/reference/cni-plugin.md");
    let mut text = fs::read_to_string(&path).expect("docs/reference/cni-plugin.md");
    let begin = "<!-- keys -->\n";
    let start = text.find(begin).expect("a place for the table") + begin.len();
    let end = start + text[start..].find("<!-- end -->").expect("an end of the table");
    let table = settings_table::markdown(KEYS);
    if env::var_os("UPDATE_DOCS").is_some() {
        text.replace_range(start..end, &table);
        fs::write(&path, &text).expect("writes");
    } else {
        assert_eq!(
            &text[start..end],
            table,
            "run UPDATE_DOCS=1 cargo test -p e2e --test programs plugin_docs::"
        );
    }
}
