//! What a kernel answered, for tests that need none: `tests/dumps` holds dumps as Linux 6.18 gives them. That a kernel answers so today is what
//! `netns-apply/tests/dumps.rs` checks.

pub(crate) mod dumps;
// The dumps are those of a machine that puts the low byte first.
#[cfg(target_endian = "little")]
mod damaged;
#[cfg(target_endian = "little")]
mod tests;

use super::{Messages, NativeForm};
use crate::{
    Family, Redirect, RulePlan,
    interference::{add_saved, ruleset::Ruleset},
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
use std::fs;

/// The tables that iptables-legacy saved.
pub(crate) fn read_saved(what: &str) -> Ruleset {
    let mut ruleset = Ruleset::default();
    for family in Family::BOTH {
        let saved = fs::read_to_string(dumps::file(&dumps::saved(what, family))).unwrap();
        add_saved(&mut ruleset, family, &saved).unwrap();
    }
    ruleset
}
