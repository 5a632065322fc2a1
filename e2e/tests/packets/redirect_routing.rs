//! Policy rules, routes and the conversation about them: what is the mesh's goes, what is another program's stays, and what does not lead marked packets to the
//! proxy is not taken for what does.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::{
    self,
    told::{assert_unchanged, changes, errors},
};
use e2e::iptables::{apply, istio_iptables_command, run};
use e2e::plugin::{Invocation, RunDir, sidecar};
use e2e::strace::{Call, Strace};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Output};

const TPROXY: &str = "--dual-stack -m TPROXY -b * -i *";

/// When a run counts as one that never ends; its own patience is a quarter of it.
const GIVEN_UP: Duration = Duration::from_secs(120);

/// Words of a command line without quotes.
fn words(args: &str) -> Vec<&str> {
    args.split_whitespace().collect()
}

/// Whether packets with TPROXY's mark, and packets without it, are delivered locally although they are for another program; for each family.
fn delivered_locally(namespace: &Namespace) -> Result<Vec<(bool, bool)>> {
    let local = |arguments: &str| -> Result<bool> {
        let found = namespace.run(&process::command("ip", arguments.split(' ')))?;
        Ok(found.stdout.starts_with("local "))
    };
    let mut answers = Vec::new();
    for way in [
        "-4 route get 198.51.100.9 from 10.1.0.9 iif eth0",
        "-6 route get 2001:db8::9 from fd00:10::9 iif eth0",
    ] {
        answers.push((local(&format!("{way} mark 0x539"))?, local(way)?));
    }
    Ok(answers)
}

/// As it should be: the marked ones, and no others.
const ONLY_MARKED: [(bool, bool); 2] = [(true, false), (true, false)];

/// What several runs of the reference, or somebody's repairs by hand, leave.
#[test]
fn duplicates_and_those_of_another_protocol_are_removed_in_one_run() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let others = "for family in -4 -6; do
            ip $family rule add fwmark 0x9 lookup 77; ip $family rule add iif eth0 lookup 78
            ip $family rule add fwmark 0x539/0xffff lookup 79
            ip $family route add local default dev lo table 77; ip $family route add default dev eth0 table 78
        done";
    namespace.sh(others)?;
    let before = namespace.snapshot()?;
    apply(&namespace, TPROXY)?;
    namespace.sh("for family in -4 -6; do
            for again in 1 2 3; do ip $family rule add fwmark 0x539 lookup 133; done
            ip $family rule add fwmark 0x539 lookup 133 protocol static
            ip $family rule add fwmark 0x539 lookup 133 priority 40
            ip $family route add local default dev lo table 133 proto static metric 7
        done
        ip -4 route append local default dev lo table 133 proto static")?;
    let output = run(&namespace, &["--cleanup-only"])?.ok()?;
    let left = changes(&namespace, &before)?;
    assert!(left.is_empty(), "after {:?}:\n{}", output.stderr, left.join("\n"));
    assert!(output.stderr.contains("removed all redirection"), "{}", output.stderr);
    let again = run(&namespace, &["--cleanup-only"])?.ok()?;
    assert!(again.stderr.contains("nothing to remove"), "{}", again.stderr);
    assert_unchanged(&namespace, &before, "a second cleanup");
    Ok(())
}

/// The same for the only route, put there by another program's hand.
#[test]
fn a_route_of_another_protocol_is_removed() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let before = namespace.snapshot()?;
    apply(&namespace, TPROXY)?;
    namespace.sh(
        "for family in -4 -6; do
            ip $family route flush table 133; ip $family route add local default dev lo table 133 proto static
            ip $family rule del fwmark 0x539 lookup 133; ip $family rule add fwmark 0x539 lookup 133 protocol static
        done",
    )?;
    apply(&namespace, "--cleanup-only")?;
    assert_unchanged(&namespace, &before, "cleanup");
    Ok(())
}

/// Routes and rules of kinds that this program has no words for. What this kernel lacks it refuses itself: the test goes on with what it took.
#[test]
fn routes_and_rules_of_odd_kinds_fail_no_run() -> Result<()> {
    let certain = [
        "ip route add 203.0.113.0/28 nexthop via 10.1.0.7 weight 3 nexthop via 10.1.0.8",
        "ip route add 203.0.113.16/28 via inet6 fd00:10::9 dev eth0",
        "ip route add blackhole 203.0.113.32/28",
        "ip route add unreachable 203.0.113.48/28 table 500",
        "ip -6 route add 2001:db8:1::/48 nexthop via fd00:10::7 nexthop via fd00:10::8",
        "ip -6 route add prohibit 2001:db8:2::/48 table 100000",
        "ip rule add iif eth0 tos 0x10 suppress_prefixlength 0 lookup 77",
        "ip rule add ipproto tcp dport 8000-8100 lookup 78",
        "ip rule add uidrange 5-7 lookup 79",
        "ip rule add pref 200 goto 32766",
        "ip -6 rule add from 2001:db8::/32 prohibit",
    ];
    let perhaps = [
        "ip route add 203.0.113.64/28 encap ip id 100 dst 192.0.2.1 dev eth0",
        "ip route add 203.0.113.80/28 encap mpls 100 via 10.1.0.9",
        "ip -6 route add 2001:db8:3::/48 encap seg6 mode encap segs fd00::1 dev eth0",
        "ip -6 route add 2001:db8:4::/48 encap rpl segs fd00::1 dev eth0",
        "ip -6 route add 2001:db8:5::/48 encap ioam6 trace prealloc type 0x800000 ns 0 size 4 dev eth0",
        "ip nexthop add id 1 via 10.1.0.7 dev eth0 && ip nexthop add id 10 group 1 && ip route add 203.0.113.96/28 nhid 10",
        "ip -f mpls route add 100 via inet 10.1.0.9",
        "ip rule add fwmark 0x5 l3mdev",
    ];
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.sh(&certain.join("\n"))?;
    for line in perhaps {
        namespace.run(&process::command("sh", ["-c", line]))?;
    }
    let before = namespace.snapshot()?;
    apply(&namespace, TPROXY)?;
    apply(&namespace, "--dual-stack -b * -i *")?;
    apply(&namespace, "--cleanup-only")?;
    assert_unchanged(&namespace, &before, "cleanup");
    Ok(())
}

/// `istio-iptables` of TPROXY in a namespace of its own, perhaps with one fault.
fn traced(fault: Option<&str>) -> Result<(Output, Strace, Namespace)> {
    let namespace = Namespace::pod(Families::Dual)?;
    let mut strace = Strace::noting("%net")?;
    if let Some(fault) = fault {
        strace = strace.tampering(fault);
    }
    let command = strace.command(&istio_iptables_command(&words(TPROXY)));
    let output = process::run(&mut namespace.command(&command), GIVEN_UP)?;
    Ok((output, strace, namespace))
}

#[test]
fn an_interrupted_receive_is_repeated() -> Result<()> {
    let (output, clean, _) = traced(None)?;
    output.ok()?;
    let receives: Vec<Call> =
        clean.calls()?.into_iter().filter(|call| matches!(&*call.name, "recvfrom" | "recvmsg")).collect();
    ensure!(receives.len() > 10, "{receives:?}");
    let problems = iptables::in_parallel(2, &receives, |_, Call { name, nth, .. }| {
        let (output, strace, _) = traced(Some(&format!("{name}:error=EINTR:when={nth}")))?;
        // How many are made depends on how much of an answer is there when it is read.
        let is_made = strace.calls()?.iter().any(|made| made.name == *name && made.nth == *nth);
        ensure!(!is_made || strace.trace()?.contains("INJECTED"), "{name} {nth} was not met");
        let is_fine = output.code() == Some(0);
        Ok(if is_fine { Vec::new() } else { vec![format!("{name} {nth}: {:?}", output.stderr)] })
    });
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), receives.len(), problems.join("\n"));
    Ok(())
}

/// A request that gets lost: the kernel never answers. The longest wait is the patience of a run, which is half a minute.
#[test]
fn a_kernel_that_never_answers_about_routes_is_given_up() -> Result<()> {
    let (output, clean, _) = traced(None)?;
    output.ok()?;
    let calls = clean.calls()?;
    let request = |kind: &str| {
        let asks = |call: &&Call| matches!(&*call.name, "sendto" | "sendmsg") && call.text.contains(kind);
        let call = calls.iter().find(asks).with_context(|| format!("no {kind} in {calls:?}"))?;
        let length = call.text.split("nlmsg_len=").nth(1).and_then(|rest| rest.split(',').next());
        Ok((call.clone(), length.context("no length")?.to_owned()))
    };
    let lost: Result<Vec<_>> =
        ["RTM_GETRULE", "RTM_NEWADDR", "RTM_NEWRULE"].into_iter().map(request).collect();
    let problems = iptables::in_parallel(3, &lost?, |_, (Call { name, nth, .. }, length)| {
        let (output, strace, namespace) = traced(Some(&format!("{name}:retval={length}:when={nth}")))?;
        ensure!(strace.trace()?.contains("INJECTED"), "{name} {nth} was not met");
        ensure!(output.code() == Some(1) && !errors(&output).is_empty(), "{output:?}");
        ensure!(namespace.state_with_nft()?.is_pristine(), "{:?}", namespace.state_with_nft()?);
        Ok(Vec::new())
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// A change of routing that does not succeed, because its request cannot be sent or the kernel's answer cannot be read: then nobody says whether
/// it was made.
#[test]
fn a_change_of_routing_that_fails_or_whose_answer_is_lost_is_undone() -> Result<()> {
    for (earlier, args, fewest) in [("", TPROXY, 10), (TPROXY, "--cleanup-only", 14)] {
        let prepared = || -> Result<Namespace> {
            let namespace = Namespace::pod(Families::Dual)?;
            if !earlier.is_empty() {
                apply(&namespace, earlier)?;
            }
            Ok(namespace)
        };
        let clean = Strace::noting("sendto,recvfrom")?;
        prepared()?.run(&clean.command(&istio_iptables_command(&words(args))))?.ok()?;
        let is_change = |call: &Call| {
            let of_change = ["RTM_NEW", "RTM_DEL"].iter().any(|kind| call.text.contains(kind));
            call.text.contains("NETLINK:[ROUTE")
                && if call.name == "sendto" {
                    of_change
                } else {
                    call.text.contains("nlmsg_type=NLMSG_ERROR")
                }
        };
        let calls: Vec<Call> = clean.calls()?.into_iter().filter(is_change).collect();
        ensure!(calls.len() >= fewest, "{args}: {calls:?}");
        let problems = iptables::in_parallel(2, &calls, |_, Call { name, nth, .. }| {
            let namespace = prepared()?;
            let before = namespace.snapshot()?;
            let strace =
                Strace::noting("sendto,recvfrom")?.tampering(&format!("{name}:error=EPERM:when={nth}"));
            let output = namespace.run(&strace.command(&istio_iptables_command(&words(args))))?;
            ensure!(strace.trace()?.contains("INJECTED"), "{name} {nth} was not met");
            let left = changes(&namespace, &before)?;
            let is_fine = output.code() == Some(1) && left.is_empty();
            Ok(if is_fine {
                Vec::new()
            } else {
                vec![format!("{name} {nth}: {left:?}: {}", errors(&output))]
            })
        });
        assert!(
            problems.is_empty(),
            "{args}: {} of {}:\n{}",
            problems.len(),
            calls.len(),
            problems.join("\n")
        );
    }
    Ok(())
}

/// What may stand in the place of TPROXY's policy rule. Each is one argument list of `ip rule add`.
const IN_ITS_PLACE: [&str; 6] = [
    "not fwmark 0x539 lookup 133",
    "fwmark 0x539 lookup 133 suppress_prefixlength 0",
    "fwmark 0x539 tos 0x10 lookup 133",
    "fwmark 0x539 lookup 133 priority 40000",
    "fwmark 0x539 iif lo lookup 133",
    "fwmark 0x539 uidrange 5-6 lookup 133",
];

/// What may stand before it.
const BEFORE_IT: [&str; 3] = [
    "fwmark 0x539 lookup main priority 5",
    "fwmark 0x539 prohibit priority 6",
    "iif eth0 unreachable priority 7",
];

fn replace_the_policy_rule(namespace: &Namespace, by: &str) -> Result<()> {
    // Another program's routes; and with a route for everything, a lookup at a late priority is never reached.
    namespace.sh(&format!(
        "for family in -4 -6; do
            ip $family route replace default dev eth0
            ip $family rule del fwmark 0x539 lookup 133; ip $family rule add {by}
        done"
    ))?;
    Ok(())
}

#[test]
fn a_policy_rule_that_is_not_as_planned_is_mended_by_the_next_run() -> Result<()> {
    let mut problems = Vec::new();
    for by in IN_ITS_PLACE {
        let namespace = Namespace::pod(Families::Dual)?;
        apply(&namespace, TPROXY)?;
        ensure!(delivered_locally(&namespace)? == ONLY_MARKED, "{by}: the question is wrong");
        replace_the_policy_rule(&namespace, by)?;
        let output = run(&namespace, &words(TPROXY))?;
        let ways = delivered_locally(&namespace)?;
        if output.code() != Some(0) || ways != ONLY_MARKED || output.stderr.contains("in force already") {
            problems.push(format!("{by}: marked and unmarked packets {ways:?}, {}", output.stderr));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn a_policy_rule_in_the_shadow_of_another_is_mended_or_told() -> Result<()> {
    let mut problems = Vec::new();
    for before in BEFORE_IT {
        let namespace = Namespace::pod(Families::Dual)?;
        apply(&namespace, TPROXY)?;
        namespace.sh(&format!("for family in -4 -6; do ip $family route replace default dev eth0; ip $family rule add {before}; done"))?;
        ensure!(delivered_locally(&namespace)? != ONLY_MARKED, "{before}: no shadow");
        let output = run(&namespace, &words(TPROXY))?;
        let is_mended = output.code() == Some(0) && delivered_locally(&namespace)? == ONLY_MARKED;
        let is_told = output.code() == Some(1) && errors(&output).contains("policy rule");
        if !is_mended && !is_told {
            problems.push(format!("{before}: {}", output.stderr));
        }
        // Whoever put it there keeps it.
        let rules = namespace.sh("ip -4 rule; ip -6 rule")?.stdout;
        let kept = before.split(" priority").next().unwrap_or_default();
        if rules.matches(kept).count() != 2 {
            problems.push(format!("{before}: is gone: {rules}"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn check_sees_a_policy_rule_that_is_not_as_planned() -> Result<()> {
    let run_dir = RunDir::new()?;
    run_dir
        .write_manifest("web.json", &sidecar("web", &[("sidecar.istio.io/interceptionMode", "TPROXY")]))?;
    let mut problems = Vec::new();
    let stories = IN_ITS_PLACE.map(|by| (by, true)).into_iter().chain(BEFORE_IT.map(|by| (by, false)));
    for (line, in_its_place) in stories {
        let namespace = Namespace::pod(Families::V4)?;
        let call = |verb: &str| {
            Invocation::new(verb, &run_dir.manifest_conf()).netns(&namespace).pod("default", "web").run()
        };
        call("ADD")?.result()?;
        call("CHECK")?.silence()?;
        if in_its_place {
            namespace.sh(&format!("ip rule del fwmark 0x539 lookup 133; ip rule add {line}"))?;
        } else {
            namespace.sh(&format!("ip rule add {line}"))?;
        }
        let checked = call("CHECK")?;
        match checked.error() {
            Ok((_, text)) if text.contains("policy rule") => {}
            other => problems.push(format!("{line}: {other:?}")),
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// Whoever does transparent proxying beside the mesh.
#[test]
fn the_same_run_again_takes_nobodys_rules_away() -> Result<()> {
    let others = "iptables -t mangle -A PREROUTING -p tcp -m mark --mark 0x9 -j CONNMARK --save-mark
        iptables -t mangle -A PREROUTING -j CONNMARK --save-mark
        iptables -t mangle -A OUTPUT -p tcp -m connmark --mark 0x9 -j CONNMARK --restore-mark
        iptables -t mangle -A OUTPUT -o lo -p tcp -m mark --mark 0x9 -j RETURN
        for family in -4 -6; do
            ip $family rule add fwmark 9 lookup 77; ip $family route add local default dev lo table 77
        done";
    // Where iptables' own programs write the rules, none of them is signed, and one that leaves an interface alone looks like
    // any other.
    let left_alone = "
        iptables -t nat -A PREROUTING -i tun0 -j RETURN
        iptables -t nat -A OUTPUT -o tun0 -j RETURN";
    for (mode, variant) in [
        ("-m TPROXY", "nft"),
        ("", "nft"),
        ("-m TPROXY --backend restore", "nft"),
        ("-m TPROXY --force-iptables-binary legacy", "legacy"),
        ("-m TPROXY --native-nftables", "nft"),
    ] {
        let namespace = Namespace::pod(Families::Dual)?;
        let is_signed = !mode.contains("restore") && !mode.contains("legacy");
        let others = if is_signed { [others, left_alone].concat() } else { others.to_owned() };
        namespace.sh(&others.replace("iptables", &format!("iptables-{variant}")))?;
        let before = namespace.snapshot()?;
        let args = format!("--dual-stack -b * -i * {mode}");
        apply(&namespace, &args)?;
        let first = namespace.snapshot()?;
        let lost = first.changes_since(&before).into_iter().filter(|change| change.is_lost);
        assert_eq!(lost.map(|change| change.to_string()).collect::<Vec<_>>(), [""; 0], "{args}");
        let again = run(&namespace, &words(&args))?.ok()?;
        assert_unchanged(&namespace, &first, &format!("{args} again: {}", again.stderr));
        assert!(again.stderr.contains("in force already"), "{args}: {}", again.stderr);
        apply(&namespace, "--cleanup-only")?;
        let left = namespace.snapshot()?.changes_since(&before);
        let routing = left.iter().filter(|change| change.section.starts_with("ip "));
        assert_eq!(routing.map(ToString::to_string).collect::<Vec<_>>(), [""; 0], "cleanup after {args}");
    }
    Ok(())
}

#[test]
fn check_right_after_add_is_green_beside_others() -> Result<()> {
    let run_dir = RunDir::new()?;
    for mode in ["REDIRECT", "TPROXY"] {
        run_dir
            .write_manifest("web.json", &sidecar("web", &[("sidecar.istio.io/interceptionMode", mode)]))?;
        let namespace = Namespace::pod(Families::Dual)?;
        namespace.sh("iptables-nft -t nat -A PREROUTING -i tun0 -j RETURN
             iptables-nft -t mangle -A PREROUTING -p tcp -m mark --mark 0x9 -j CONNMARK --save-mark
             iptables-nft -t mangle -A PREROUTING -j CONNMARK --save-mark
             ip rule add fwmark 9 iif tun0 lookup 77; ip route add local default dev lo table 77")?;
        let call = |verb: &str| {
            Invocation::new(verb, &run_dir.manifest_conf()).netns(&namespace).pod("default", "web").run()
        };
        call("ADD")?.result()?;
        let after = namespace.snapshot()?;
        call("CHECK")?.silence()?;
        call("ADD")?.result()?;
        assert_unchanged(&namespace, &after, mode);
        // What the application could mark would stay in the pod.
        namespace.sh("ip rule add fwmark 9 lookup 77")?;
        let (code, words) = call("CHECK")?.error()?;
        assert!(code == 111 && words.contains("from all fwmark 0x9 lookup 77"), "{mode}: {code} {words}");
    }
    Ok(())
}

/// Without rules of the mesh, routing that only looks like the mesh's is another program's.
#[test]
fn routing_that_only_looks_like_the_meshs_is_left_alone() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.sh("ip rule add fwmark 9 lookup 77; ip route add local default dev lo table 77")?;
    let before = namespace.snapshot()?;
    for args in ["--cleanup-only", "--dual-stack -b * -i *", "--cleanup-only"] {
        apply(&namespace, args)?;
    }
    assert_unchanged(&namespace, &before, "cleanup");
    Ok(())
}
