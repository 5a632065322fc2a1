//! What a kernel answered, as the tests of netfilter-state have it.

#[allow(dead_code)] // not every test uses everything
#[path = "../../netfilter-state/src/netlink/recorded/dumps.rs"]
pub(crate) mod dumps;

use netfilter_state::{netlink::Messages, ruleset::HookedRules};
use redirect_core::{
    Family, Redirect, RulePlan,
    options::NativeForm,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
use std::path::Path;

/// What a text says is what a file of `tests/dumps` says.
pub(crate) fn assert_recorded(name: &str, text: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dumps");
    dumps::plans::assert_recorded(&folder.join(name), text);
}
