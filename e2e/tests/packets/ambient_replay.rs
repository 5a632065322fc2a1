//! The recorded runs of the reference in ambient mode, played back to `install-cni ambient` in fresh namespaces: the kernel must
//! end in the recorded state, a second run must change nothing, and removal must leave nothing, whatever the reference or
//! another program had there before.

use std::process::Child;

use crate::ambient_support::{Case, in_our_words, run, start};
use anyhow::{Context, Result, ensure};
use e2e::iptables::told::{assert_refused, assert_unchanged, changes};
use e2e::iptables::{self, in_parallel};
use e2e::killing::Moments;
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, State};
use test_support::sample;

const THREADS: usize = 3;
/// Runs that have to be killed before they end, at least, which is each of them over each state once, and where all is asked for.
const KILLS: [usize; 2] = [12, 80];

fn differences(case: &Case, what: &str, state: &State, wanted: &State) -> Vec<String> {
    let named = |difference| format!("{}: {what}{difference}", case.name);
    state.differences(wanted).into_iter().map(named).collect()
}

/// Routes and the addresses of `lo` are not among what was recorded.
fn rules(namespace: &Namespace) -> Result<State> {
    Ok(namespace.state_with_nft()?.without_routes_and_addresses())
}

#[test]
fn every_recording_is_reproduced_kept_and_removed() -> Result<()> {
    let cases = sample::part(Case::all()?, 2, 0);
    let problems = in_parallel(THREADS, &cases, |_, case| {
        let namespace = Namespace::pod(Families::Dual)?;
        let before = namespace.state_with_nft()?;
        let words = case.words();
        run(&namespace, &format!("apply {words}"))?.ok().with_context(|| case.name.clone())?;
        let mut problems = differences(case, "", &rules(&namespace)?, &case.state);
        let first = namespace.state_with_nft()?;
        let routes = usize::from(case.has_v6());
        if (first.route4.len(), first.route6.len()) != (1, routes) || first.lo != before.lo {
            problems.push(format!("{}: {:?}, {:?}, {:?}", case.name, first.route4, first.route6, first.lo));
        }
        let again = run(&namespace, &format!("apply {words}"))?.ok()?;
        if !again.stderr.contains("in force already") {
            problems.push(format!("{}: written again: {}", case.name, again.stderr));
        }
        problems.extend(differences(case, "run twice: ", &namespace.state_with_nft()?, &first));
        run(&namespace, "remove")?.ok()?;
        problems.extend(differences(case, "removed: ", &namespace.state_with_nft()?, &before));
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn every_recording_replaces_the_one_before_it() -> Result<()> {
    let cases = sample::part(Case::all()?, 3, 1);
    let pairs: Vec<&[Case]> = cases.windows(2).collect();
    let problems = in_parallel(THREADS, &pairs, |_, pair| {
        let [before, case] = pair else { return Ok(Vec::new()) };
        let namespace = Namespace::pod(Families::Dual)?;
        run(&namespace, &format!("apply {}", before.words()))?.ok()?;
        run(&namespace, &format!("apply {}", case.words()))?.ok()?;
        Ok(differences(case, &format!("over {}: ", before.name), &rules(&namespace)?, &case.state))
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// In iptables-nft, iptables-legacy or native tables; with the same backend and with another one.
#[test]
fn what_the_reference_left_is_taken_over_and_removed() -> Result<()> {
    let cases = sample::part(Case::all()?, 3, 0);
    let problems = in_parallel(THREADS, &cases, |index, case| {
        let namespace = Namespace::pod(Families::Dual)?;
        let before = namespace.state_with_nft()?;
        case.leave(&namespace, if index % 3 == 0 { "legacy" } else { "nft" })?;
        let left = namespace.state_with_nft()?;
        ensure!(left != before && left.rule4 == case.state.rule4, "{}: nothing is left: {left:?}", case.name);
        let mut problems = Vec::new();
        if index % 2 == 0 {
            let backend = if index % 4 == 0 { "netlink" } else { "native" };
            let words = case.words_in(backend);
            run(&namespace, &format!("apply {words}"))?.ok().with_context(|| case.name.clone())?;
            let fresh = Namespace::pod(Families::Dual)?;
            run(&fresh, &format!("apply {words}"))?.ok()?;
            let wanted = fresh.state_with_nft()?;
            let found = in_our_words(namespace.state_with_nft()?)?;
            problems.extend(differences(case, "taken over: ", &found, &wanted));
        }
        run(&namespace, "remove")?.ok()?;
        problems.extend(differences(case, "removed: ", &namespace.state_with_nft()?, &before));
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// Rules of the shapes that a sidecar's have, and routing in the very table.
const OTHERS: &str = "
iptables-nft -t nat -A PREROUTING -i eth9 -j RETURN
iptables-nft -t nat -N THEIRS
iptables-nft -t nat -I OUTPUT 1 -p tcp --dport 81 -j THEIRS
iptables-nft -t mangle -A PREROUTING -p tcp -m mark --mark 0x7 -j CONNMARK --save-mark
ip6tables-nft -t mangle -A OUTPUT -p tcp -m connmark --mark 0x7 -j CONNMARK --restore-mark
nft 'add table inet theirs; add chain inet theirs out { type nat hook output priority -110; }'
nft 'add rule inet theirs out tcp dport 82 meta mark & 0xfff == 0x539 accept'
ip -4 rule add fwmark 0x1 lookup 100
ip -4 route add local default dev lo table 100
ip -6 rule add fwmark 0x1/0xff lookup 101
";

#[test]
fn what_others_have_stays_to_the_byte() -> Result<()> {
    for backend in ["netlink", "native"] {
        let namespace = Namespace::pod(Families::Dual)?;
        // The tables of iptables-nft stay once they are there; so they are here before.
        namespace.sh("for ipt in iptables ip6tables; do for table in raw mangle nat; do $ipt-nft -t $table -L >/dev/null; done; done")?;
        namespace.sh(OTHERS)?;
        let before = namespace.snapshot()?;
        run(&namespace, &format!("apply --redirect-dns --virtual-interfaces eth1 --backend {backend}"))?
            .ok()?;
        ensure!(!changes(&namespace, &before)?.is_empty(), "{backend}: nothing was applied");
        run(&namespace, "remove")?.ok()?;
        assert_unchanged(&namespace, &before, backend);
    }
    Ok(())
}

/// Apply and removal, over the other backend's rules and over the reference's.
#[test]
fn a_run_killed_at_any_moment_is_mended_by_the_next_one() -> Result<()> {
    let cases = Case::all()?;
    let reference = cases.iter().find(|case| !case.is_native && case.has_v6()).context("a case")?;
    let kinds = ["apply --redirect-dns", "apply --redirect-dns --backend native", "remove"];
    let states: Vec<State> = kinds.iter().map(|words| state_after(words)).collect::<Result<_>>()?;
    let moments = Moments::of(|| {
        let namespace = Namespace::pod(Families::Dual)?;
        finish(start(&namespace, kinds[1])?)
    })?;
    let dice = Dice::of_this_run("AMBIENT_SEED");
    let kills = sample::times(KILLS[0], KILLS[1]);
    let attempts: Vec<usize> = (0..kills).collect();
    let problems = in_parallel(THREADS, &attempts, |index, _| {
        let mut dice = dice.branch(index);
        let (before, which) = (index % 4, index / 4 % 3);
        let (after, namespace) = moments.kill_one(&mut dice, || {
            let namespace = Namespace::pod(Families::Dual)?;
            match before {
                0 => {}
                1 | 2 => finish(start(&namespace, kinds[before - 1])?)?,
                _ => reference.leave(&namespace, "legacy")?,
            }
            Ok((start(&namespace, kinds[which])?, namespace))
        })?;
        let when = format!("{dice:?}: {} over {before}, killed after {after:?}", kinds[which]);
        finish(start(&namespace, kinds[which])?).with_context(|| when.clone())?;
        let found = namespace.state_with_nft()?.differences(&states[which]);
        let mut problems: Vec<String> = found.iter().map(|found| format!("{when}: {found}")).collect();
        // Killed at anything, removal alone has to mend as well.
        finish(start(&namespace, "remove")?).with_context(|| when.clone())?;
        let found = namespace.state_with_nft()?.differences(&states[2]);
        problems.extend(found.iter().map(|found| format!("{when}, removed: {found}")));
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} of {kills}:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

fn state_after(words: &str) -> Result<State> {
    let namespace = Namespace::pod(Families::Dual)?;
    run(&namespace, words)?.ok()?;
    namespace.state_with_nft()
}

fn finish(child: Child) -> Result<()> {
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Only removal, without a new plan before it.
#[test]
fn an_apply_killed_at_any_moment_is_removed() -> Result<()> {
    let nothing = Namespace::pod(Families::Dual)?.state_with_nft()?;
    let kinds = ["apply --redirect-dns", "apply --redirect-dns --backend native"];
    let moments = Moments::of(|| {
        let namespace = Namespace::pod(Families::Dual)?;
        finish(start(&namespace, kinds[0])?)
    })?;
    let dice = Dice::of_this_run("AMBIENT_SEED");
    let attempts: Vec<usize> = (0..sample::times(KILLS[0], KILLS[1]) / 2).collect();
    let problems = in_parallel(THREADS, &attempts, |index, _| {
        let mut dice = dice.branch(index);
        let words = kinds[index % 2];
        let (after, namespace) = moments.kill_one(&mut dice, || {
            let namespace = Namespace::pod(Families::Dual)?;
            Ok((start(&namespace, words)?, namespace))
        })?;
        finish(start(&namespace, "remove")?)?;
        let found = namespace.state_with_nft()?.differences(&nothing);
        Ok(found.iter().map(|found| format!("{dice:?}: {words}, killed after {after:?}: {found}")).collect())
    });
    assert!(problems.is_empty(), "{}:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn a_sidecars_rules_are_neither_replaced_nor_removed() -> Result<()> {
    for args in
        ["-b * -i * --dual-stack", "-b * -i * --native-nftables", "-m TPROXY -b * -i * --backend restore"]
    {
        let namespace = Namespace::pod(Families::Dual)?;
        iptables::apply(&namespace, args)?;
        let before = namespace.snapshot()?;
        for words in ["apply", "apply --backend native", "remove"] {
            let output = run(&namespace, words)?;
            assert_refused(&output, &["rules of a sidecar", "istio-iptables --cleanup-only"]);
            assert_unchanged(&namespace, &before, args);
        }
        // The other way round the sidecar's own program decides.
        iptables::run(&namespace, &["--cleanup-only"])?.ok()?;
        run(&namespace, "apply --backend native")?.ok()?;
        iptables::run(&namespace, &["--cleanup-only"])?.ok()?;
        ensure!(namespace.state_with_nft()?.is_pristine(), "{args}");
    }
    Ok(())
}

#[test]
fn everything_wrong_is_told_before_anything_is_done() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let before = namespace.snapshot()?;
    let output = run(&namespace, "apply --backend nft --ipv6=perhaps --virtual-interfaces a/b")?;
    assert_refused(&output, &["--backend", "netlink, native", "--ipv6", "perhaps", "\"a/b\""]);
    assert_refused(&run(&namespace, "")?, &["install-cni ambient apply or remove"]);
    let output = run(&namespace, "apply --proxy-uid 7")?;
    ensure!(output.code() == Some(1) && output.stderr.contains("'--proxy-uid'"), "{output:?}");
    assert_unchanged(&namespace, &before, "refused");
    // As the agent would be: outside, in a namespace that is no pod's.
    for path in ["/proc/self/ns/net", "/nowhere", "/etc/hostname"] {
        let mut command = crate::ambient_support::command(&namespace, "apply");
        command.args(["--network-namespace", path]);
        let output = test_support::process::run(&mut command, test_support::process::SHORT)?;
        assert_refused(&output, &["flag --network-namespace", path]);
    }
    Ok(())
}

/// Where IPv6 is off on `lo` alone, its rules stay, and no route can be made. Where it is off altogether, nothing of it is there.
#[test]
fn routes_are_made_where_lo_has_the_family() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.sh("echo 1 >/proc/sys/net/ipv6/conf/lo/disable_ipv6")?;
    run(&namespace, "apply")?.ok()?;
    let state = namespace.state_with_nft()?;
    ensure!(!state.v6.is_empty() && state.rule6.is_empty() && state.route6.is_empty(), "{state:?}");
    ensure!(state.rule4.len() == 1 && state.route4.len() == 1, "{state:?}");
    run(&namespace, "remove")?.ok()?;
    ensure!(namespace.state_with_nft()?.is_pristine());
    Ok(())
}
