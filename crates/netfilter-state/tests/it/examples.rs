//! The examples run and print what they promise.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::running::{printed, run};
use redirect_core::{Families, Family, Redirect};

#[test]
fn a_change_of_mode_is_told_in_steps_and_rules() {
    let text = printed("compare_configurations", &[], "");
    let (steps, rules) = text.split_once("rules:\n").unwrap();
    assert_eq!(
        steps.lines().collect::<Vec<_>>(),
        [
            "steps:",
            "  add IPv4 route: local default dev lo table 133",
            "  add IPv4 policy rule: fwmark 0x539 lookup 133",
            "  IPv4 mangle (iptables-nft)",
            "  wait for packets on their way",
            "  IPv4 nat (iptables-nft)",
        ]
    );
    let (gone, come): (Vec<&str>, Vec<&str>) = rules.lines().partition(|line| line.starts_with("- "));
    assert!(gone.contains(&"- nat ISTIO_OUTPUT: -p tcp -m tcp --dport 3306 -j RETURN"), "{rules}");
    assert!(gone.contains(&"- nat PREROUTING: -p tcp -j ISTIO_INBOUND"), "{rules}");
    assert!(come.contains(&"+ mangle PREROUTING: -p tcp -j ISTIO_INBOUND"), "{rules}");
    assert!(come.iter().all(|line| line.starts_with("+ ")), "{rules}");
}

#[test]
fn the_output_of_iptables_save_is_checked() {
    let wanted = Redirect::sidecar(Families::V4).build().unwrap().plan().rules(Family::V4);
    let saved = wanted.restore_text();
    assert_eq!(printed("check_iptables_save", &[], &saved), "as planned\n");
    // As iptables-save prints it, beside a rule of somebody else's.
    let theirs = "*filter\n:INPUT ACCEPT [0:0]\n[7:420] -A INPUT -p icmp -j ACCEPT\nCOMMIT\n";
    assert_eq!(printed("check_iptables_save", &[], &format!("{theirs}{saved}")), "as planned\n");

    let damaged = saved.replace("-A PREROUTING -p tcp -j ISTIO_INBOUND\n", "");
    let damaged = damaged.replace("--to-ports 15006\n", "--to-ports 15007\n");
    assert_ne!(damaged, saved);
    let output = run("check_iptables_save", &[], &damaged);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stdout).unwrap();
    let wanted = [
        "nat PREROUTING: rule 1 is missing: -p tcp -j ISTIO_INBOUND",
        "nat ISTIO_IN_REDIRECT: rule 1 is -p tcp -j REDIRECT --to-ports 15007, not -p tcp -j REDIRECT --to-ports 15006",
    ];
    assert_eq!(told.lines().collect::<Vec<_>>(), wanted);
}
