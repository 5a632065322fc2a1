//! What `netfilter-state`'s tests have a kernel answer, and how they read what iptables-save prints.

use netfilter_state::{netlink::Messages, ruleset::HookedRules};
use redirect_core::{
    Family, Redirect, RulePlan,
    options::NativeForm,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};

#[path = "../../../../crates/netfilter-state/src/netlink/recorded/dumps.rs"]
pub mod kernel_dumps;
