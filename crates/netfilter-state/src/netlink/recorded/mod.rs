//! What a kernel answered, for tests that need none: `tests/dumps` holds dumps as Linux 6.18 gives them. That a kernel answers so today is what
//! `netns-apply/tests/it/dumps.rs` checks.

pub(crate) mod dumps;
// The dumps are those of a machine that puts the low byte first.
#[cfg(target_endian = "little")]
mod damaged;
#[cfg(target_endian = "little")]
mod tests;

use super::Messages;
use crate::ruleset::HookedRules;
use redirect_core::options::NativeForm;
use redirect_core::{
    Family, Redirect, RulePlan,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
