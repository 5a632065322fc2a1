//! The example runs on a real namespace and leaves nothing behind. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::running::printed;
use test_support::netns::{Families, Namespace};

/// Everything that a run may touch, but for the built-in chains of iptables, which stay as iptables itself leaves them.
fn all_of(pod: &Namespace) -> String {
    let script = "for save in iptables-nft ip6tables-nft iptables-legacy ip6tables-legacy; do \
                  $save-save | grep -E '^(-A|:[^ ]+ -)' || true; done; nft list ruleset inet; \
                  ip rule; ip -6 rule; ip route show table all; ip -6 route show table all; ip -o address show dev lo";
    pod.sh(script).unwrap().stdout
}

#[test]
fn podman_mesh_redirects_repairs_and_cleans_up() {
    for families in [Families::V4, Families::Dual] {
        let pod = Namespace::pod(families).unwrap();
        let path = pod.path();
        let mesh =
            |action: &[&str]| printed("podman_mesh", &[&[path.to_str().unwrap()], action].concat(), "");
        let empty = all_of(&pod);
        for mode in [&[][..], &["tproxy"]] {
            let first = mesh(mode);
            assert!(first.ends_with("changed: true\nafter: in force\n"), "{first}");
            assert_eq!(mesh(mode), "before: in force\nchanged: false\nafter: in force\n");
            pod.sh("iptables-nft -t nat -F ISTIO_OUTPUT").unwrap();
            let repaired = mesh(mode);
            let wanted = "outbound connections bypass the proxy: IPv4: nat ISTIO_OUTPUT: rule 1 is missing";
            assert!(repaired.starts_with("before: ") && repaired.contains(wanted), "{repaired}");
            assert!(repaired.ends_with("changed: true\nafter: in force\n"), "{repaired}");
        }
        assert_eq!(mesh(&["cleanup"]), "changed: true\n");
        assert_eq!(all_of(&pod), empty);
        assert_eq!(mesh(&["cleanup"]), "changed: false\n");
    }
}
