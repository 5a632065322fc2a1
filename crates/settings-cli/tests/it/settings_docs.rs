//! The settings page is what the settings table says.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::reference::reference;
use std::{env, fs, path::Path};

#[test]
fn the_settings_page_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/settings.md");
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, reference()).unwrap();
    }
    let page = fs::read_to_string(&path).unwrap();
    assert!(page == reference(), "run: UPDATE_DOCS=1 cargo test -p settings-cli --test it settings_docs::");
}
