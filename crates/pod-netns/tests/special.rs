//! Whose a pod's network namespace is. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use netns_apply::netns::Netns;
use pod_netns::Outside;
use test_support::netns::{Families, Namespace};

#[test]
fn a_namespace_of_ours_has_our_owner() {
    let outside = Outside::of_this_process();
    let there = Namespace::empty(Families::V4).unwrap();
    let is_foreign = Netns::open(there.path()).unwrap().run(|| outside.finds_this_foreign());
    assert!(!is_foreign.unwrap(), "{outside:?}");
}
