//! The library depends on nothing that does I/O, with its features neither.

use crate::linked::{SERDE, assert_linked};

#[test]
fn nothing_that_does_io_is_linked() {
    assert_linked(&[], &["redirect-core"], &[]);
}

#[test]
fn features_add_data_formats_and_nothing_else() {
    let formats = [&SERDE[..], &["itoa", "memchr", "serde_json", "zmij"]].concat();
    assert_linked(&["--all-features"], &["redirect-core"], &formats);
}
