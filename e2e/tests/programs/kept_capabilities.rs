//! Capabilities that a program gives up. Needs root, which has all of them.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::thread;

use privileges::{CapabilitySet, keep_only};

fn sets() -> Vec<u64> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"].map(set).into()
}

/// On a thread of its own, because nothing comes back.
#[test]
fn what_is_not_kept_is_gone_from_every_set() {
    let kept = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
    let done = thread::spawn(move || (keep_only(kept), sets(), keep_only(kept), sets()));
    let (done, first, again, second) = done.join().unwrap();
    let kept = kept.bits();
    assert_eq!((done, again), (Ok(()), Ok(())));
    assert_eq!((first, second), (vec![0, kept, kept, kept, 0], vec![0, kept, kept, kept, 0]));
    let none = thread::spawn(|| (keep_only(CapabilitySet::empty()), sets())).join().unwrap();
    assert_eq!(none, (Ok(()), vec![0; 5]));
}

#[test]
fn what_is_not_held_is_not_kept() {
    let gone = thread::spawn(|| {
        keep_only(CapabilitySet::NET_ADMIN).unwrap();
        (keep_only(CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN), sets())
    });
    let (done, sets) = gone.join().unwrap();
    let left = CapabilitySet::NET_ADMIN.bits();
    assert_eq!((done, sets), (Ok(()), vec![0, left, left, left, 0]));
}
