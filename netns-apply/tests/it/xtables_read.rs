//! `xtables-read`: the tables of legacy iptables as the kernel lays them out. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use nix::libc;
use test_support::netns::{Families, Namespace};
use xtables_read::{HOOKS, XtablesFamily, table};

#[test]
fn an_empty_table_has_an_entry_for_each_policy_and_one_for_its_end() {
    let pod = Namespace::pod(Families::Dual).unwrap();
    for (family, program) in [(XtablesFamily::V4, "iptables-legacy"), (XtablesFamily::V6, "ip6tables-legacy")]
    {
        let count = || pod.enter(|| table(family, "nat", 1 << 20)).unwrap().unwrap().count;
        pod.sh(&format!("{program} -t nat -L")).unwrap();
        assert_eq!(count(), 5);
        // A chain has an entry for its name and one for its end.
        for (change, entries) in [("-N OTHERS", 7), ("-A OTHERS -j RETURN", 8), ("-A OUTPUT -p tcp", 9)] {
            pod.sh(&format!("{program} -t nat {change}")).unwrap();
            assert_eq!(count(), entries, "{program} {change}");
        }
        pod.sh(&format!("{program} -t nat -F; {program} -t nat -X")).unwrap();
        let empty = pod.enter(|| table(family, "nat", 1 << 20)).unwrap().unwrap();
        assert_eq!((empty.count, empty.valid_hooks.count_ones()), (5, 4));
        let offset = |hook: usize| usize::try_from(empty.policies[hook]).unwrap();
        assert!((0..HOOKS).filter(|hook| *hook != 2).all(|hook| offset(hook) < empty.entries.len()));
    }
}

#[test]
fn errors_are_the_kernels() {
    let pod = Namespace::pod(Families::V4).unwrap();
    pod.sh("iptables-legacy -t nat -A OUTPUT -j RETURN").unwrap();
    let code = |name: &str, most| {
        let read = pod.enter(|| table(XtablesFamily::V4, name, most)).unwrap();
        read.map(drop).map_err(|error| error.raw_os_error().unwrap_or_default())
    };
    assert_eq!(code("nat", 1 << 20), Ok(()));
    assert_eq!(code("nat", 100), Err(libc::E2BIG));
    assert_eq!(code("a-name-that-is-longer-than-any-table-has", 100), Err(libc::EINVAL));
    assert_eq!(code("none", 1 << 20), Err(libc::ENOENT));
}
