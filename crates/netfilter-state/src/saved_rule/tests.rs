//! Words of iptables-save: what targets do, and what conditions compare.

use super::*;

#[test]
fn only_one_port_and_nothing_else_is_a_redirection_to_that_port() {
    let does = |options: &str| statement("-j", "REDIRECT", &words(options));
    assert_eq!(does("--to-ports 15001"), Statement::Redirect(Some(15001)));
    assert_eq!(does(""), Statement::Redirect(None));
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
        ("--save-mark", Statement::SaveMark(CopiedMark::WHOLE)),
        ("--save-mark --nfmask 0xffffffff --ctmask 0xffffffff", Statement::SaveMark(CopiedMark::WHOLE)),
        ("--save-mark --mask 0xff", Statement::SaveMark(CopiedMark { cleared: 0xff, mask: 0xff, flip: 0 })),
        (
            "--save-mark --nfmask 0xffffffff --ctmask 0xff",
            Statement::SaveMark(CopiedMark { cleared: 0xff, mask: u32::MAX, flip: 0 }),
        ),
        ("--save-mark --left-shift-mark 2", unknown()),
        ("--restore-mark", Statement::RestoreMark(CopiedMark::WHOLE)),
        ("--restore-mark --nfmask 0xffffffff --ctmask 0xffffffff", Statement::RestoreMark(CopiedMark::WHOLE)),
        (
            "--restore-mark --nfmask 0xff --ctmask 0xffffffff",
            Statement::RestoreMark(CopiedMark { cleared: 0xff, mask: u32::MAX, flip: 0 }),
        ),
        ("--restore-mark --right-shift-mark 2", Statement::SetMark(None)),
        ("--set-xmark 0x7/0xff", Statement::SetConnMark { mask: 0xff, value: 7 }),
        ("--set-xmark 0x7/0xff --left-shift-mark 2", unknown()),
        ("--and-mark 0xff", unknown()),
    ] {
        assert_eq!(connection_marked(&words(options)), does, "{options}");
    }
}

#[test]
fn a_match_without_options_is_known_or_unknown() {
    let conditions = |rule: &str| KernelRule::saved(rule).conditions;
    assert_eq!(conditions("-p tcp -m tcp -j DROP").len(), 1);
    for rule in ["-m socket -j DROP", "-p tcp -m socket -m tcp --dport 80 -j DROP", "-m rpfilter"] {
        let is_unknown = |condition: &Condition| matches!(condition, Condition::Unknown(_));
        assert_eq!(conditions(rule).iter().filter(|one| is_unknown(one)).count(), 1, "{rule}");
    }
}

#[test]
fn tproxy_to_an_address_of_its_own_is_unknown() {
    let does = |on: &str| {
        statement("-j", "TPROXY", &words(&format!("--on-port 15006 {on} --tproxy-mark 0x539/0xffffffff")))
    };
    let known = does("");
    assert!(matches!(known, Statement::Tproxy { port: Some(15006), .. }), "{known:?}");
    assert_eq!(does("--on-ip 0.0.0.0"), known);
    assert!(matches!(does("--on-ip 127.0.0.9"), Statement::Unknown(_)));
}
