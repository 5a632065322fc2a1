//! Runs by what they promise: the whole plan or nothing, by whatever backend, whoever comes in between. Needs root.
//!
//! A step is announced in the log before it is taken, so the tests' logger is where another program comes in between, at exactly one place.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{observation, run};
use netfilter_state::netlink::TableObstacle;
use netns_apply::{
    ApplyError, ApplyOptions, ApplyOutcome, Backend, Because, ExecError, LegacyError, Live, LockError,
    Mismatch, Programs, RollbackOutcome, RunError, apply, apply_and_search, cleanup, cleanup_preview,
    netlink::NetlinkError, preflight, verify,
};
use packet_trace::interference::{Certainty, Finding};
use redirect_core::{
    AmbientRedirect, Redirect, RulePlan,
    options::{BackendChoice, Variant},
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
use std::{
    cell::RefCell,
    fs,
    os::unix::fs::PermissionsExt,
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use tempfile::TempDir;
use test_support::netns::{Families, Namespace};

/// For who must not get what is waited for.
const BRIEF: Duration = Duration::from_millis(300);
/// For who must get it, however slow the machine.
const LONG: Duration = Duration::from_secs(600);

const BACKENDS: [BackendChoice; 4] = [
    BackendChoice::Netlink,
    BackendChoice::Restore(Some(Variant::Nft)),
    BackendChoice::Restore(Some(Variant::Legacy)),
    BackendChoice::NativeNft,
];

fn plan(mode: &'static str, excluded: &'static str) -> RulePlan {
    plan_for(mode, excluded, "true")
}

fn plan_for(mode: &'static str, excluded: &'static str, dual_stack: &'static str) -> RulePlan {
    let mut raw = RawSettings::new();
    let settings = [
        (Key::InterceptionMode, mode),
        (Key::InboundPorts, "*"),
        (Key::OutboundRanges, "*"),
        (Key::OutboundExcludePorts, excluded),
        (Key::DualStack, dual_stack),
    ];
    settings.into_iter().for_each(|(key, text)| raw.set(key, text, Source::Flag("x")));
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
}

fn options(backend: BackendChoice) -> ApplyOptions {
    ApplyOptions::default().backend(backend).patience(LONG)
}

fn namespace() -> Namespace {
    Namespace::pod(Families::Dual).unwrap()
}

#[track_caller]
fn assert_in_force(plan: &RulePlan, options: &ApplyOptions) {
    assert_eq!(verify(plan, options).unwrap().map(|mismatch| mismatch.to_string()), None);
}

#[track_caller]
fn assert_as_before(namespace: &Namespace, before: &test_support::netns::Snapshot, what: &str) {
    let changes = namespace.snapshot().unwrap().changes_since(before);
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    assert!(changes.is_empty(), "{what}:\n{}", changes.join("\n"));
}

type Interruption = (&'static str, Box<dyn FnMut()>);

thread_local! {
    /// What another program does just before this thread takes a step with this word.
    static INTERRUPTION: RefCell<Option<Interruption>> = const { RefCell::new(None) };
}

struct Interrupter;

impl log::Log for Interrupter {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if !record.target().starts_with("netns_apply::apply") {
            return;
        }
        // Runs of the one who interrupts are not interrupted.
        if let Some((word, mut act)) = INTERRUPTION.take() {
            if record.args().to_string().contains(word) {
                act();
            }
            INTERRUPTION.set(Some((word, act)));
        }
    }

    fn flush(&self) {}
}

/// Has another program act before each step of this thread that has this word.
fn before_steps(word: &'static str, act: impl FnMut() + 'static) {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        log::set_logger(&Interrupter).unwrap();
        log::set_max_level(log::LevelFilter::Debug);
    });
    INTERRUPTION.set(Some((word, Box::new(act))));
}

/// Has another program act before the first step of this thread that has this word.
fn before_step(word: &'static str, act: impl FnOnce() + 'static) {
    let mut act = Some(act);
    before_steps(word, move || {
        if let Some(act) = act.take() {
            act();
        }
    });
}

/// Programs that stand in for those of the system; `REAL` in a script is the one it stands in for, `FOLDER` where it is.
struct Stubs(TempDir);

impl Stubs {
    fn new() -> Self {
        Self(tempfile::Builder::new().prefix("apply-stubs-").tempdir().unwrap())
    }

    fn add(&self, name: &str, script: &str) {
        let script = script
            .replace("REAL", &format!("/usr/sbin/{name}"))
            .replace("FOLDER", &self.0.path().display().to_string());
        let path = self.0.path().join(name);
        fs::write(&path, format!("#!/bin/sh\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn programs(&self) -> Programs {
        Programs::in_path(self.0.path().as_os_str())
    }

    /// How often a script has written a line to this file.
    fn lines(&self, file: &str) -> usize {
        fs::read_to_string(self.0.path().join(file)).unwrap_or_default().lines().count()
    }
}

/// What another thread waits for happens also when the test fails before: then nobody waits for ever.
struct Finally<F: FnMut()>(F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[test]
fn a_plan_is_put_in_force_once_replaced_and_removed() {
    for backend in BACKENDS {
        for mode in ["REDIRECT", "TPROXY"] {
            let namespace = namespace();
            let before = namespace.snapshot().unwrap();
            let what = format!("{backend:?} {mode}");
            namespace
                .enter(|| {
                    let (options, first, second) = (options(backend), plan(mode, "80"), plan(mode, "81"));
                    for plan in [&first, &second] {
                        assert!(verify(plan, &options).unwrap().is_some(), "{what}");
                        let outcome = apply(plan, &options).unwrap();
                        assert!(outcome.changed && outcome.warnings.is_empty(), "{what}: {outcome:?}");
                        assert_in_force(plan, &options);
                    }
                    let again = apply(&second, &options).unwrap();
                    assert!(!again.changed && again.warnings.is_empty(), "{what}: {again:?}");
                    let force = options.clone().force(true);
                    assert!(apply(&second, &force).unwrap().changed, "{what}");
                    assert_in_force(&second, &options);
                    assert!(cleanup(&options).unwrap().changed, "{what}");
                    assert!(!cleanup(&options).unwrap().changed, "{what}");
                })
                .unwrap();
            assert_as_before(&namespace, &before, &what);
        }
    }
}

#[test]
fn what_would_program_the_rules_is_told_beforehand() {
    for (choice, expected) in [
        (BackendChoice::Auto, (Backend::Netlink, Because::Supported)),
        (BackendChoice::NativeNft, (Backend::NativeNft, Because::Asked)),
        (BackendChoice::Restore(None), (Backend::Restore(Variant::Nft), Because::Supported)),
    ] {
        let told = namespace().enter(|| preflight(&options(choice))).unwrap().unwrap();
        assert_eq!(told, expected, "{choice:?}");
    }
}

#[test]
fn a_run_that_only_adds_waits_for_nobody_and_others_wait() {
    let stubs = Stubs::new();
    // A run by programs holds the lock; this one until it is told to go on.
    stubs.add(
        "iptables-nft-restore",
        "echo >>FOLDER/started\nuntil [ -e FOLDER/go ]; do sleep 0.05; done\nREAL \"$@\"",
    );
    let namespace = namespace();
    thread::scope(|scope| {
        let holder = scope.spawn(|| {
            let programs = stubs.programs();
            let options = options(BackendChoice::Restore(Some(Variant::Nft))).programs(programs);
            namespace.enter(|| apply(&plan("REDIRECT", "80"), &options)).unwrap()
        });
        let go = Finally(|| fs::write(stubs.0.path().join("go"), "").unwrap());
        let started = || Ok((stubs.lines("started") > 0 || holder.is_finished()).then_some(()));
        test_support::process::until("the lock is held", LONG, &[], started).unwrap();
        namespace
            .enter(|| {
                let impatient = options(BackendChoice::Netlink).patience(BRIEF);
                // Nothing but additions, of routing and in one transaction; then one transaction, of which the kernel sees to it that
                // nobody comes in between.
                for excluded in ["80", "81"] {
                    assert!(apply(&plan("TPROXY", excluded), &impatient).unwrap().changed);
                }
                // Routing goes, too.
                let error = cleanup(&impatient).unwrap_err();
                assert!(matches!(*error.cause, ApplyError::Lock(LockError::Busy(BRIEF))), "{error}");
                assert_eq!(error.aftermath, RollbackOutcome::Untouched);
                assert_in_force(&plan("TPROXY", "81"), &impatient);
            })
            .unwrap();
        drop(go);
        holder.join().unwrap().unwrap();
    });
}

#[test]
fn a_first_run_looks_once_and_one_that_replaces_looks_until_nothing_is_left_to_do() {
    let stubs = Stubs::new();
    stubs.add("iptables-legacy-save", "echo >>FOLDER/looks\nREAL \"$@\"");
    for mode in ["REDIRECT", "TPROXY"] {
        namespace()
            .enter(|| {
                // No plan has such a rule, so each look asks the program for its words.
                run("iptables-legacy", &["-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"], "");
                let options = options(BackendChoice::Netlink).programs(stubs.programs());
                let looks = |plan: &RulePlan| {
                    let before = stubs.lines("looks");
                    apply(plan, &options).unwrap();
                    stubs.lines("looks") - before
                };
                // What a transaction of the kernel has made of nothing needs no second look.
                assert_eq!(looks(&plan(mode, "80")), 1, "{mode}, first");
                assert_eq!(looks(&plan(mode, "80")), 1, "{mode}, again");
                assert_eq!(looks(&plan(mode, "81")), 2, "{mode}, another");
            })
            .unwrap();
    }
}

#[test]
fn routing_that_somebody_removes_meanwhile_is_made_again() {
    namespace()
        .enter(|| {
            let (options, plan) = (options(BackendChoice::Netlink), plan("TPROXY", "80"));
            before_step("(iptables-nft)", || {
                run("ip", &["rule", "del", "fwmark", "1337", "lookup", "133"], "");
            });
            apply(&plan, &options).unwrap();
            assert_in_force(&plan, &options);
        })
        .unwrap();
}

#[test]
fn a_policy_rule_that_does_not_work_gets_one_beside_it() {
    namespace()
        .enter(|| {
            let (options, plan) = (options(BackendChoice::Netlink), plan("TPROXY", "80"));
            // Behind the table main, no packet reaches it.
            run("ip", &["rule", "add", "fwmark", "1337", "lookup", "133", "priority", "40000"], "");
            apply(&plan, &options).unwrap();
            assert_in_force(&plan, &options);
        })
        .unwrap();
}

#[test]
fn a_policy_rule_that_somebody_else_makes_first_does_no_harm_and_goes_with_ours() {
    let namespace = namespace();
    let before = namespace.snapshot().unwrap();
    namespace
        .enter(|| {
            let (options, plan) = (options(BackendChoice::Netlink), plan("TPROXY", "80"));
            // The kernel gives it another priority, so ours is not a second one of it.
            before_step("IPv4 policy rule", || {
                run("ip", &["rule", "add", "fwmark", "1337", "lookup", "133"], "");
            });
            apply(&plan, &options).unwrap();
            assert_in_force(&plan, &options);
            let rules = run("ip", &["-4", "rule", "list", "lookup", "133"], "");
            assert_eq!(rules.lines().count(), 2, "{rules}");
            cleanup(&options).unwrap();
        })
        .unwrap();
    assert_as_before(&namespace, &before, "another program's policy rule");
}

#[test]
fn rules_that_somebody_changes_meanwhile_are_worked_out_anew() {
    for backend in [BackendChoice::Netlink, BackendChoice::NativeNft] {
        namespace()
            .enter(|| {
                let (options, first, second) =
                    (options(backend), plan("REDIRECT", "80"), plan("REDIRECT", "81"));
                // Another run, of another plan, comes first.
                let other = options.clone();
                before_step("nat", move || drop(apply(&first, &other).unwrap()));
                apply(&second, &options).unwrap();
                assert_in_force(&second, &options);
            })
            .unwrap();
    }
}

#[test]
fn a_run_that_somebody_always_comes_before_ends_with_its_patience() {
    let namespace = namespace();
    namespace
        .enter(|| {
            let mut number = 0;
            before_steps("nat", move || {
                number += 1;
                let port = (number % 60_000 + 1).to_string();
                run(
                    "iptables-nft",
                    &["-t", "nat", "-I", "OUTPUT", "-p", "tcp", "--dport", &port, "-j", "ACCEPT"],
                    "",
                );
            });
            let impatient = options(BackendChoice::Netlink).patience(BRIEF);
            let error = apply(&plan("REDIRECT", "80"), &impatient).unwrap_err();
            let (ApplyError::Netlink(cause), aftermath) = (&*error.cause, &error.aftermath) else {
                panic!("{error}")
            };
            // The other comes in between while the rules are read, or while they are sent.
            assert!(matches!(cause, NetlinkError::Changed | NetlinkError::Contended), "{error}");
            assert_eq!(aftermath, &RollbackOutcome::Undone, "the address ::6 was added before");
            let rules = run("iptables-nft-save", &["-t", "nat"], "");
            assert!(rules.contains("--dport 2 ") && !rules.contains("ISTIO"), "{rules}");
        })
        .unwrap();
}

#[test]
fn a_run_whose_second_transaction_somebody_always_comes_before_ends_with_its_patience() {
    namespace()
        .enter(|| {
            let patient = options(BackendChoice::Netlink);
            apply(&plan("REDIRECT", "80"), &patient).unwrap();
            let nat = run("iptables-nft-save", &["-t", "nat"], "");
            let narrower = nat.replace("-A PREROUTING -p tcp", "-A PREROUTING -i eth0 -p tcp");
            assert_ne!(nat, narrower);
            // What is to go is never what was there when the run looked.
            let mut next = [narrower, nat];
            before_steps("wait for packets", move || {
                run("iptables-nft", &["-t", "mangle", "-F"], "");
                run("iptables-nft-restore", &[], &next[0]);
                next.rotate_left(1);
            });
            let impatient = patient.patience(BRIEF);
            let error = apply(&plan("TPROXY", "80"), &impatient).unwrap_err();
            assert!(matches!(&*error.cause, ApplyError::Netlink(NetlinkError::Changed)), "{error}");
        })
        .unwrap();
}

#[test]
fn a_patience_longer_than_any_clock_goes_is_long() {
    let namespace = namespace();
    let options = options(BackendChoice::Netlink).patience(Duration::MAX);
    namespace
        .enter(|| {
            // The second plan takes the place of the first, which takes the lock.
            for from in [plan("REDIRECT", "80"), plan("TPROXY", "80"), RulePlan::empty()] {
                assert!(apply(&from, &options).unwrap().changed);
                assert_eq!(verify(&from, &options).unwrap(), None);
            }
            assert_eq!(cleanup_preview(&options).unwrap(), "");
            assert!(!observation(&options).unwrap().is_redirected());
        })
        .unwrap();
}

#[test]
fn a_helper_program_that_says_yes_and_does_nothing_is_named_as_contention_and_nothing_is_left() {
    let (stubs, namespace) = (Stubs::new(), namespace());
    stubs.add("iptables-nft-restore", "exit 0");
    let before = namespace.snapshot().unwrap();
    let options = options(BackendChoice::Restore(Some(Variant::Nft))).programs(stubs.programs());
    let error = namespace.enter(|| apply(&plan("REDIRECT", "80"), &options)).unwrap().unwrap_err();
    let ApplyError::Contended { attempts, difference } = &*error.cause else { panic!("{error}") };
    assert_eq!((*attempts, &difference[..]), (3, "IPv4 nat (iptables-nft)"));
    assert_eq!(error.aftermath, RollbackOutcome::Undone);
    assert_as_before(&namespace, &before, "it says yes");
}

#[test]
fn what_a_helper_program_would_refuse_is_not_begun() {
    for from in [RulePlan::empty(), plan("TPROXY", "80")] {
        let (stubs, namespace) = (Stubs::new(), namespace());
        stubs
            .add("ip6tables-nft-restore", "case \"$*\" in *--test*) echo no >&2; exit 2;; esac; REAL \"$@\"");
        let options = options(BackendChoice::Restore(Some(Variant::Nft))).programs(stubs.programs());
        namespace.enter(|| apply(&from, &options.clone().programs(Programs::usual()))).unwrap().unwrap();
        let before = namespace.snapshot().unwrap();
        let error = namespace.enter(|| apply(&plan("REDIRECT", "81"), &options)).unwrap().unwrap_err();
        assert!(matches!(*error.cause, ApplyError::Rejected { variant: Variant::Nft, .. }), "{error}");
        assert_eq!(error.aftermath, RollbackOutcome::Untouched);
        assert_as_before(&namespace, &before, "refused");
    }
}

/// A script that does what it is asked once, says that it failed, and works from then on.
const DONE_AND_FAILED: &str = "case \"$*\" in *--test*) exec REAL \"$@\";; esac
echo >>FOLDER/calls
REAL \"$@\" || exit
[ -e FOLDER/failed ] || { >FOLDER/failed; echo failed after all >&2; exit 1; }";

/// A run from one backend to another that the last helper program fails, in a namespace where another program has rules as well.
fn fails_at_the_last_program(
    stubs: &Stubs,
    namespace: &Namespace,
    from: Option<BackendChoice>,
    to: BackendChoice,
    mode: &'static str,
) -> RunError {
    namespace
        .enter(|| {
            run("iptables-nft", &["-t", "nat", "-A", "OUTPUT", "-d", "192.0.2.7", "-j", "ACCEPT"], "");
            if let Some(from) = from {
                apply(&plan(mode, "80"), &options(from)).unwrap();
            }
        })
        .unwrap();
    let before = namespace.snapshot().unwrap();
    let options = options(to).programs(stubs.programs());
    let error = namespace.enter(|| apply(&plan("TPROXY", "81"), &options)).unwrap().unwrap_err();
    assert!(matches!(*error.cause, ApplyError::Exec(_)), "{error}");
    if error.aftermath == RollbackOutcome::Undone {
        assert_as_before(namespace, &before, &format!("{from:?} to {to:?}, {mode}"));
    }
    error
}

#[test]
fn a_run_that_fails_at_its_last_program_is_undone() {
    let (nft, legacy) =
        (BackendChoice::Restore(Some(Variant::Nft)), BackendChoice::Restore(Some(Variant::Legacy)));
    for mode in ["REDIRECT", "TPROXY"] {
        for (from, to, program) in [
            (None, nft, "ip6tables-nft-restore"),
            (Some(nft), nft, "ip6tables-nft-restore"),
            (None, legacy, "ip6tables-legacy-restore"),
            (Some(BackendChoice::Netlink), legacy, "ip6tables-legacy-restore"),
            (Some(BackendChoice::NativeNft), legacy, "ip6tables-legacy-restore"),
            (Some(legacy), BackendChoice::Netlink, "ip6tables-legacy-restore"),
            (Some(legacy), BackendChoice::NativeNft, "ip6tables-legacy-restore"),
        ] {
            let (stubs, namespace) = (Stubs::new(), namespace());
            stubs.add(program, DONE_AND_FAILED);
            if to == BackendChoice::Netlink {
                // Who asks for netlink has the rules in iptables-nft's tables put in and taken out over netlink.
                stubs.add("iptables-nft-restore", "exit 1");
            }
            let error = fails_at_the_last_program(&stubs, &namespace, from, to, mode);
            assert_eq!(error.aftermath, RollbackOutcome::Undone, "{from:?} to {to:?}, {mode}: {error}");
            // And who asks for programs has it done by programs.
            assert_eq!(stubs.lines("calls"), 2, "{from:?} to {to:?}, {mode}");
        }
    }
}

/// The kernel takes the same policy rule any number of times, and removes the first that fits.
#[test]
fn a_failed_run_leaves_every_policy_rule_that_is_like_its_own() {
    let ambient = AmbientRedirect::new(redirect_core::Families::V4).plan();
    let of_ambient = "fwmark 0x111/0xfff lookup 100";
    let of_tproxy = "fwmark 1337 lookup 133";
    for (plan, likes) in [
        // Of an earlier run that was killed, which has marked it.
        (&ambient, vec![format!("{of_ambient} pref 32764 protocol 105")]),
        (&ambient, ["", " iif lo"].map(|also| format!("{of_ambient} pref 32764{also} protocol 105")).into()),
        (&ambient, vec![format!("{of_ambient} pref 32764 protocol boot iif lo")]),
        (&ambient, vec![format!("{of_ambient} pref 40000"), format!("{of_ambient} pref 32764 iif lo")]),
        (
            &plan("TPROXY", "81"),
            ["boot", "static"].map(|by| format!("{of_tproxy} pref 40000 protocol {by}")).into(),
        ),
        (&plan("TPROXY", "81"), vec![format!("{of_tproxy} pref 32765 iif lo"), of_tproxy.to_owned()]),
        (&RulePlan::empty(), vec![of_tproxy.to_owned(), of_tproxy.to_owned()]),
    ] {
        let (stubs, namespace) = (Stubs::new(), namespace());
        stubs.add("iptables-legacy-restore", DONE_AND_FAILED);
        let legacy = options(BackendChoice::Restore(Some(Variant::Legacy)));
        let options = legacy.clone().programs(stubs.programs());
        if plan.families().is_empty() {
            namespace.enter(|| apply(&self::plan("REDIRECT", "80"), &legacy)).unwrap().unwrap();
        }
        for like in &likes {
            namespace.sh(&format!("ip rule add {like}")).unwrap();
        }
        let before = namespace.snapshot().unwrap();
        let error = namespace.enter(|| apply(plan, &options)).unwrap().unwrap_err();
        assert_eq!(error.aftermath, RollbackOutcome::Undone, "{likes:?}: {error}");
        assert_as_before(&namespace, &before, &format!("{likes:?}"));
    }
}

#[test]
fn what_cannot_be_undone_is_named_with_the_reason() {
    let (stubs, namespace) = (Stubs::new(), namespace());
    stubs.add(
        "ip6tables-legacy-restore",
        &format!("[ ! -e FOLDER/failed ] || {{ echo broken >&2; exit 3; }}\n{DONE_AND_FAILED}"),
    );
    let legacy = BackendChoice::Restore(Some(Variant::Legacy));
    let error = fails_at_the_last_program(&stubs, &namespace, None, legacy, "REDIRECT");
    let RollbackOutcome::Left { left, failures } = &error.aftermath else { panic!("{error}") };
    assert_eq!(left, &["IPv6 mangle (iptables-legacy)", "IPv6 nat (iptables-legacy)"], "{error}");
    assert!(failures.len() == 1 && failures[0].contains("broken"), "{error}");
}

#[test]
fn a_run_is_undone_while_somebody_keeps_changing_the_same_tables() {
    let (stubs, namespace) = (Stubs::new(), namespace());
    stubs.add("ip6tables-legacy-restore", DONE_AND_FAILED);
    let done = AtomicBool::new(false);
    let undone = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            namespace.enter(|| {
                while !done.load(Ordering::Relaxed) {
                    for verb in ["-A", "-D"] {
                        run(
                            "iptables-nft",
                            &["-t", "nat", verb, "OUTPUT", "-d", "192.0.2.7", "-j", "ACCEPT"],
                            "",
                        );
                    }
                }
            })
        });
        let ended = Finally(|| done.store(true, Ordering::Relaxed));
        let undone: Vec<RollbackOutcome> = (0..8)
            .map(|_| {
                let legacy = options(BackendChoice::Restore(Some(Variant::Legacy)));
                let netlink = options(BackendChoice::Netlink).programs(stubs.programs());
                let _ = fs::remove_file(stubs.0.path().join("failed"));
                let plan = plan("REDIRECT", "80");
                namespace
                    .enter(|| {
                        apply(&plan, &legacy).unwrap();
                        let error = apply(&plan, &netlink).unwrap_err();
                        assert_in_force(&plan, &legacy);
                        error.aftermath
                    })
                    .unwrap()
            })
            .collect();
        drop(ended);
        writer.join().unwrap().unwrap();
        undone
    });
    assert_eq!(undone, vec![RollbackOutcome::Undone; 8]);
}

#[test]
fn rules_that_somebody_changes_while_they_are_put_back_are_worked_out_anew() {
    let (stubs, namespace) = (Stubs::new(), namespace());
    stubs.add("ip6tables-legacy-restore", DONE_AND_FAILED);
    let (legacy, netlink) = (
        options(BackendChoice::Restore(Some(Variant::Legacy))),
        options(BackendChoice::Netlink).programs(stubs.programs()),
    );
    namespace
        .enter(|| {
            let plan = plan("REDIRECT", "80");
            apply(&plan, &legacy).unwrap();
            before_step("taking back", || {
                run("iptables-nft", &["-t", "nat", "-F", "ISTIO_OUTPUT"], "");
            });
            let error = apply(&plan, &netlink).unwrap_err();
            assert_eq!(error.aftermath, RollbackOutcome::Undone, "{error}");
            assert_in_force(&plan, &legacy);
        })
        .unwrap();
}

#[test]
fn a_table_that_sleeps_is_an_obstacle_where_the_plan_uses_it() {
    let sleeping = |table: &'static str, backend| -> Result<ApplyOutcome, RunError> {
        namespace()
            .enter(|| {
                let (plan, options) = (plan("REDIRECT", "80"), options(backend));
                if backend == BackendChoice::NativeNft {
                    apply(&plan, &options).unwrap();
                }
                run("nft", &[&format!("add table {table} {{ flags dormant; }}")], "");
                let outcome = apply(&plan, &options)?;
                assert_in_force(&plan, &options);
                Ok(outcome)
            })
            .unwrap()
    };
    for backend in [BackendChoice::Netlink, BackendChoice::Restore(Some(Variant::Nft))] {
        let error = sleeping("ip nat", backend).unwrap_err();
        let ApplyError::Netlink(NetlinkError::Obstacle(TableObstacle::Dormant { table })) = &*error.cause
        else {
            panic!("{error}")
        };
        assert_eq!((&table[..], &error.aftermath), ("ip nat", &RollbackOutcome::Untouched));
        // The plan has no rules in this one.
        assert!(sleeping("ip raw", backend).unwrap().changed);
    }
    // Native tables are the mesh's alone, and woken.
    assert!(sleeping("inet istio-proxy-nat", BackendChoice::NativeNft).unwrap().changed);
}

/// The kernel takes no base chain into a table that wakes, and lets none go from it, within the same transaction.
#[test]
fn a_native_table_that_sleeps_is_woken_whatever_base_chains_it_has() {
    let options = options(BackendChoice::NativeNft);
    let hook = "type nat hook prerouting priority -100; policy accept;";
    for chains in [
        String::new(),
        format!("chain istio-prerouting {{ {hook} }}"),
        format!("chain of-somebody-else {{ {hook} }}"),
        "chain istio-inbound {\n return\n }".to_owned(),
    ] {
        for table in ["istio-proxy-nat", "istio-proxy-mangle"] {
            let namespace = namespace();
            let outcome = namespace.enter(|| {
                run("nft", &["-f", "-"], &format!("table inet {table} {{\n flags dormant\n {chains}\n}}"));
                let outcome = apply(&plan("TPROXY", "80"), &options)?;
                assert_in_force(&plan("TPROXY", "80"), &options);
                cleanup(&options)?;
                Ok::<ApplyOutcome, RunError>(outcome)
            });
            let outcome = outcome.unwrap().unwrap_or_else(|error| panic!("{table} {{ {chains} }}: {error}"));
            assert!(outcome.changed);
            assert!(namespace.state_with_nft().unwrap().is_pristine());
        }
    }
}

#[test]
fn rules_of_others_in_the_other_variant_are_warned_of() {
    for (backend, other) in [
        (BackendChoice::Netlink, "legacy"),
        (BackendChoice::Restore(Some(Variant::Nft)), "legacy"),
        (BackendChoice::Restore(Some(Variant::Legacy)), "nft"),
    ] {
        let outcome = namespace().enter(|| {
            let program = format!("iptables-{other}");
            run(&program, &["-t", "nat", "-A", "OUTPUT", "-d", "192.0.2.7", "-j", "ACCEPT"], "");
            apply(&plan("REDIRECT", "80"), &options(backend)).unwrap()
        });
        let expected = format!(
            "another program has iptables-{other} rules in this network namespace; the kernel obeys both variants"
        );
        assert_eq!(outcome.unwrap().warnings, [expected], "{backend:?}");
    }
}

/// What another program does while a run is at work, and how a warning of it begins.
const MEANWHILE: [(&str, &str); 3] = [
    (
        "nft 'table ip theirs { chain out { type nat hook output priority -150; tcp dport 80 redirect to :3128; }; }'",
        "a rule of another program: table ip theirs, chain out",
    ),
    (
        "iptables-legacy -t raw -I PREROUTING -p tcp -s 10.1.0.0/24 -j DROP",
        "a rule of another program: table ip raw (legacy), chain PREROUTING",
    ),
    (
        "ip rule add priority 5 iif eth0 blackhole; ip rule add priority 10 lookup local; ip rule del priority 0",
        "policy rule 5",
    ),
];

const WITHOUT_LINK_LOCAL: &str =
    "ip link set eth0 addrgenmode none; ip link set pe0 addrgenmode none; ip -6 addr flush scope link";

#[test]
fn what_somebody_does_between_the_look_and_the_transaction_is_warned_of() {
    for (script, warning) in MEANWHILE {
        for backend in [BackendChoice::Netlink, BackendChoice::NativeNft] {
            // The plan of both families has an address of its own, so routing is read again behind the transaction.
            for (mode, dual_stack) in [("REDIRECT", "false"), ("REDIRECT", "true"), ("TPROXY", "true")] {
                let (plan, options) = (plan_for(mode, "81", dual_stack), options(backend));
                let scene = || {
                    // Routing counts only once all addresses are in use, and the kernel takes a second for such ones.
                    run("sh", &["-c", WITHOUT_LINK_LOCAL], "");
                    before_step("nat", move || drop(run("sh", &["-c", script], "")));
                    let warnings = apply_and_search(&plan, &options).unwrap().warnings;
                    (
                        warnings,
                        Live::interference(&plan, &options)
                            .unwrap()
                            .iter()
                            .map(Finding::log_line)
                            .collect::<Vec<_>>(),
                    )
                };
                let (warnings, found) = namespace().enter(scene).unwrap();
                assert_eq!(warnings, found, "{script} {backend:?} {mode} {dual_stack}");
                // Packets with TPROXY's mark pass this policy rule.
                let is_warned = warnings.iter().any(|one| one.starts_with(warning));
                assert!(is_warned || mode == "TPROXY" && script.starts_with("ip"), "{script}: {warnings:?}");
            }
        }
    }
}

#[test]
fn a_refusal_before_the_first_step_leaves_nothing_to_undo() {
    let error = namespace().enter(|| {
        fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "1").unwrap();
        cleanup(&options(BackendChoice::Netlink)).unwrap();
        apply(&plan("REDIRECT", "80"), &options(BackendChoice::Netlink)).unwrap_err()
    });
    let error = error.unwrap();
    assert!(matches!(*error.cause, ApplyError::Route(_)), "{error}");
    assert_eq!(error.aftermath, RollbackOutcome::Untouched);
}

/// Fills a chain of a table with rules of a few MiB, as iptables prints them.
fn flood(backend: BackendChoice, table: &str, chain: &str) {
    let rule = |number: u32| format!("-A {chain} -p tcp -m tcp --dport {} -j RETURN\n", 1 + number % 65_535);
    let rules: String = (0..30_000).map(rule).collect();
    let is_legacy = backend == BackendChoice::Restore(Some(Variant::Legacy));
    let restore = if is_legacy { "iptables-legacy-restore" } else { "iptables-nft-restore" };
    run(restore, &["--noflush"], &format!("*{table}\n{rules}COMMIT\n"));
}

fn is_too_much(error: &ApplyError) -> bool {
    // Of a plan that is known, its own part may be read besides.
    matches!(
        error,
        ApplyError::Netlink(NetlinkError::TooMuch(most))
            | ApplyError::Legacy(LegacyError::TooMuch { most, .. })
            | ApplyError::Exec(ExecError::TooMuch { most, .. })
            if (MOST_READ..MOST_READ + (64 << 10)).contains(most)
    )
}

const MOST_READ: usize = 1 << 20;

#[test]
fn a_run_reads_no_more_rules_than_it_may_and_ends() {
    for backend in &BACKENDS[..3] {
        let options = options(*backend).most_read(Some(MOST_READ));
        let scene = || {
            apply(&plan("REDIRECT", "80"), &options).unwrap();
            flood(*backend, "nat", "ISTIO_OUTPUT");
            let error = apply(&plan("REDIRECT", "81"), &options).unwrap_err();
            assert!(is_too_much(&error.cause), "{backend:?}: {error}");
            assert_eq!(error.aftermath, RollbackOutcome::Untouched);
            assert!(is_too_much(&observation(&options).unwrap_err()));
            assert!(is_too_much(&cleanup_preview(&options).unwrap_err()));
        };
        namespace().enter(scene).unwrap();
    }
}

#[test]
fn tables_that_the_mesh_does_not_use_may_hold_any_number_of_rules() {
    // iptables-nft-save lists all tables, so where it is asked for, it is killed whatever table is full.
    for backend in
        BACKENDS.into_iter().filter(|backend| *backend != BackendChoice::Restore(Some(Variant::Nft)))
    {
        let options = options(backend).most_read(Some(MOST_READ));
        let scene = || {
            flood(backend, "filter", "FORWARD");
            let plan = plan("REDIRECT", "80");
            assert!(apply(&plan, &options).unwrap().changed);
            assert!(!apply(&plan, &options).unwrap().changed, "all is in force");
            // No captured packet meets these; a legacy table is read as a whole, or not at all.
            let is_legacy = backend == BackendChoice::Restore(Some(Variant::Legacy));
            let table = if is_legacy { "table ip filter (legacy)" } else { "table ip filter, chain INPUT" };
            if !is_legacy {
                assert_eq!(verify(&plan, &options).unwrap(), None, "{backend:?}");
                flood(backend, "filter", "INPUT");
            }
            let mismatch = verify(&plan, &options).unwrap().unwrap();
            let Mismatch::Interference(findings, _) = &mismatch else { panic!("{backend:?}: {mismatch}") };
            assert!(findings.iter().all(|one| one.severity == Certainty::May), "{backend:?}: {mismatch}");
            assert!(mismatch.to_string().contains(table), "{backend:?}: {mismatch}");
        };
        namespace().enter(scene).unwrap();
    }
}

#[test]
fn a_run_reads_no_more_policy_rules_than_it_may_and_ends() {
    let options = options(BackendChoice::Netlink).most_read(Some(MOST_READ));
    let scene = || {
        // Long ones: the kernel compares each with all before it.
        let long = "from 192.0.2.0/24 to 192.0.2.0/24 iif an-interface-15 oif another-iface15 uidrange 1-2 ipproto 6 sport 1-2 dport 1-2";
        let rule = |number: u32| format!("rule add priority 100 fwmark {number} lookup {number} {long}\n");
        run("ip", &["-batch", "-"], &(1..8000).map(rule).collect::<String>());
        let error = apply(&plan("TPROXY", "80"), &options).unwrap_err();
        let words =
            "cannot list policy rules: File too large; this network namespace has more of them than are read";
        assert_eq!(error.to_string(), format!("{words}; nothing was changed"));
    };
    namespace().enter(scene).unwrap();
}
