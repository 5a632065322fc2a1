//! The text of iptables-save as other tests read it: its words, and what targets do.

#[path = "../saved/mod.rs"]
mod saved;

use netfilter_state::ruleset::{Condition, Statement, target_named};
use saved::{connection_marked, statement, tcp_flags, words};

#[test]
fn only_one_port_and_nothing_else_is_a_redirection_to_that_port() {
    let does = |options: &str| statement("-j", "REDIRECT", &words(options));
    assert_eq!(does("--to-ports 15001"), Statement::Redirect(15001));
    assert_eq!(does(""), Statement::RedirectHere);
    for options in ["--to-ports 15001 --random", "--random --to-ports 15001", "--to-ports 15001-15002"] {
        assert_eq!(does(options), Statement::Translate("REDIRECT".into()), "{options}");
    }
}

#[test]
fn targets_are_known_by_their_names() {
    let words = |name: &str| format!("-j {name}");
    for (name, does) in [
        ("ACCEPT", Statement::Accept),
        ("DROP", Statement::Drop),
        ("TARPIT", Statement::Reject),
        ("RETURN", Statement::Return),
        ("NETMAP", Statement::Translate("NETMAP".into())),
        ("MASQUERADE", Statement::TranslateSource("MASQUERADE".into())),
        ("TPROXY", Statement::Tproxy { port: None, mark: None, ends: true }),
        ("NOTRACK", Statement::Untrack),
        ("MARK", Statement::SetMark(None)),
        ("NFQUEUE", Statement::Queue),
        ("NFLOG", Statement::Harmless(words("NFLOG"))),
        ("TEE", Statement::Rewrite(words("TEE"))),
        ("HMARK", Statement::SetMark(None)),
        ("SYNPROXY", Statement::Rewrite(words("SYNPROXY"))),
    ] {
        assert_eq!(target_named(name), Some(does));
    }
    assert_eq!(target_named("KUBE-SERVICES"), None);
}

#[test]
fn flags_are_a_set_however_often_one_is_named() {
    let flags = |mask: &str, set: &str| match tcp_flags(mask, set, false) {
        Some(Condition::TcpFlags { mask, is }) => Some((mask, is.value)),
        _ => None,
    };
    assert_eq!(flags("SYN,FIN,SYN", "SYN,SYN"), Some((3, 2)));
    assert_eq!(flags("ALL,FIN", "NONE"), Some((63, 0)));
    assert_eq!(flags("SYN,ECE", "SYN"), None);
}

#[test]
fn what_stands_between_quotation_marks_is_one_word() {
    for (line, all) in [
        ("-p tcp  -j DROP", &["-p", "tcp", "-j", "DROP"][..]),
        (r#"--comment "a -j ACCEPT" -j DROP"#, &["--comment", "a -j ACCEPT", "-j", "DROP"]),
        (r#"--comment "" -j DROP"#, &["--comment", "", "-j", "DROP"]),
        (r#"--comment "a \"b\" c\\" -j DROP"#, &["--comment", r#"a "b" c\"#, "-j", "DROP"]),
        (r#"-j DROP --comment "a b"#, &["-j", "DROP", "--comment", "a b"]),
        (r"-j DROP\", &["-j", r"DROP\"]),
        ("-j DROP \"\"", &["-j", "DROP", ""]),
    ] {
        assert_eq!(words(line), all, "{line}");
    }
}

#[test]
fn marks_that_are_saved_or_restored_in_part_are_not_taken_for_whole_ones() {
    let unknown = || Statement::Unknown("-j CONNMARK".into());
    for (options, does) in [
        ("--save-mark", Statement::SaveMark),
        ("--save-mark --nfmask 0xffffffff --ctmask 0xffffffff", Statement::SaveMark),
        ("--save-mark --mask 0xff", Statement::SaveMarkBits { cleared: 0xff, mask: 0xff, flip: 0 }),
        (
            "--save-mark --nfmask 0xffffffff --ctmask 0xff",
            Statement::SaveMarkBits { cleared: 0xff, mask: u32::MAX, flip: 0 },
        ),
        ("--save-mark --left-shift-mark 2", unknown()),
        ("--restore-mark", Statement::RestoreMark),
        ("--restore-mark --nfmask 0xffffffff --ctmask 0xffffffff", Statement::RestoreMark),
        (
            "--restore-mark --nfmask 0xff --ctmask 0xffffffff",
            Statement::RestoreMarkBits { cleared: 0xff, mask: u32::MAX, flip: 0 },
        ),
        ("--restore-mark --right-shift-mark 2", Statement::SetMark(None)),
        ("--set-xmark 0x7/0xff", Statement::SetConnMark { mask: 0xff, value: 7 }),
        ("--set-xmark 0x7/0xff --left-shift-mark 2", unknown()),
        ("--and-mark 0xff", unknown()),
    ] {
        assert_eq!(connection_marked(&words(options)), does, "{options}");
    }
}
