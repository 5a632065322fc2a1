//! What comes of a few plans, for review: `tests/dumps`.

mod plans;

use crate::{
    Redirect, RulePlan,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
use std::{format, path::Path};

/// What a text says is what a file of `tests/dumps` says.
pub(crate) fn assert_recorded(name: &str, text: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dumps");
    plans::assert_recorded(&folder.join(name), text);
}

#[test]
fn people_are_told_what_each_rule_is_for() {
    for (name, plan) in plans::plans() {
        assert_recorded(&format!("{name}.explained"), &plan.explain());
    }
}
