//! The library depends on nothing that does I/O, with its features neither.

use crate::linked::{SERDE, assert_linked};

const OURS: &[&str] = &["netfilter-state", "redirect-core"];

#[test]
fn nothing_that_does_io_is_linked() {
    assert_linked(&[], OURS, &[]);
}

#[test]
fn features_add_data_formats_and_nothing_else() {
    assert_linked(&["--all-features"], OURS, &SERDE);
}
