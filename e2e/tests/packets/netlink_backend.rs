//! The default backend runs no helper program and uses nothing of the node, and is never half done.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, ensure};
use e2e::iptables::{self, in_parallel};
use e2e::killing::Moments;
use e2e::plugin::{Invocation, RunDir, sidecar};
use serde_json::json;
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, State};
use test_support::process;
use test_support::sample;

const THREADS: usize = 4;

/// Plans in REDIRECT mode. Nothing stands for a cleanup.
const REDIRECT: [&str; 3] = [
    "--dual-stack -b * -d 15090,15021,15020 -i * --redirect-dns --capture-all-dns --drop-invalid",
    "--dual-stack -b 80,443 -i 10.0.0.0/8,fd00::/8 -o 3306,6379 -x 10.9.0.0/16",
    "--cleanup-only",
];

/// Plans in TPROXY mode, with another mark and table each; and one without.
const TPROXY: [&str; 4] = [
    "--dual-stack -m TPROXY -b * -i * --redirect-dns --capture-all-dns",
    "--dual-stack -m TPROXY -b 80,443 -i 10.0.0.0/8,fd00::/8 -t 0x77 -r 200",
    "--dual-stack -b * -i *",
    "--cleanup-only",
];

/// Where a program would look for helpers.
const PATH: &str = "/of-the-test/sbin:/of-the-test/bin";

/// `strace`, which notes every file a program and what it starts ask for by name, and every connection.
fn strace(trace: &str) -> Vec<String> {
    let path = format!("--env=PATH={PATH}");
    ["/usr/bin/strace", "-f", "-qq", "-e", "trace=%file,connect", &path, "-o", trace]
        .map(str::to_owned)
        .to_vec()
}

/// Nothing is executed but the program itself, nothing is looked for, no lock of the node is opened, nobody is asked for names.
fn assert_nothing_of_the_node(what: &str, trace: &str) {
    let lines = |part: &str| trace.lines().filter(|line| line.contains(part)).collect::<Vec<_>>();
    assert_eq!(lines("execve").len(), 1, "{what} executes {:#?}", lines("execve"));
    assert!(trace.contains("ip_tables_names"), "{what}: nothing is traced:\n{trace}");
    for part in
        ["/of-the-test", "xtables.lock", "nsswitch", "nscd", "/etc/hosts", "libnss", "sin_port", "sin6_port"]
    {
        assert!(lines(part).is_empty(), "{what} uses what is the node's: {:#?}", lines(part));
    }
}

#[test]
fn istio_iptables_uses_nothing_of_the_node() -> Result<()> {
    for args in REDIRECT.iter().chain(&TPROXY) {
        let namespace = Namespace::pod(Families::Dual)?;
        let trace = tempfile::NamedTempFile::new()?;
        let words = strace(&trace.path().to_string_lossy());
        let mut command = process::command(&words[0], &words[1..]);
        command.arg(iptables::istio_iptables()).args(args.split_whitespace());
        namespace.run(&command)?.ok()?;
        assert_nothing_of_the_node(args, &fs::read_to_string(trace.path())?);
    }
    Ok(())
}

#[test]
fn an_add_uses_nothing_of_the_node() -> Result<()> {
    for mode in ["REDIRECT", "TPROXY"] {
        let (run_dir, namespace) = (RunDir::new()?, Namespace::pod(Families::Dual)?);
        let mut pod = sidecar("web", &[("sidecar.istio.io/interceptionMode", mode)]);
        pod["spec"]["containers"][1]["env"] = json!([
            {"name": "ISTIO_DUAL_STACK", "value": "true"},
            {"name": "ISTIO_META_DNS_CAPTURE", "value": "true"},
        ]);
        run_dir.write_manifest("web.json", &pod)?;
        let trace = tempfile::NamedTempFile::new()?;
        let add = Invocation::new("ADD", &run_dir.manifest_conf()).netns(&namespace).pod("default", "web");
        let log = add.under(strace(&trace.path().to_string_lossy())).run()?.log()?;
        assert_eq!(
            (&log[0]["decision"], &log[0]["backend"]),
            (&json!("redirect"), &json!("netlink")),
            "{log:?}"
        );
        let state = namespace.state()?;
        assert_eq!(state.rule4.is_empty(), mode == "REDIRECT", "{state:?}");
        assert!(state.v4.contains_key("nat") && state.v6.contains_key("nat"), "{state:?}");
        assert_nothing_of_the_node(mode, &fs::read_to_string(trace.path())?);
    }
    Ok(())
}

#[test]
fn a_killed_run_leaves_the_old_rules_or_the_new_ones() -> Result<()> {
    kill_runs(sample::times(50, 500), &REDIRECT)
}

#[test]
fn a_killed_run_leaves_no_tproxy_rules_without_their_routes() -> Result<()> {
    kill_runs(sample::times(30, 300), &TPROXY)
}

/// Kills runs that put one plan in the place of another, and has each completed by the next run.
fn kill_runs(kills: usize, plans: &[&str]) -> Result<()> {
    let states = plans.iter().map(|args| -> Result<State> {
        let namespace = Namespace::pod(Families::Dual)?;
        run(&namespace, args)?;
        namespace.state()
    });
    let states = states.collect::<Result<Vec<_>>>()?;
    let moments = Moments::of(|| run(&Namespace::pod(Families::Dual)?, plans[0]))?;
    let dice = Dice::of_this_run("REDIRECT_SEED");
    let (old, new) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let walks: Vec<usize> = (0..THREADS).collect();
    let problems = in_parallel(THREADS, &walks, |walk, _| {
        let namespace = Namespace::pod(Families::Dual)?;
        let (mut dice, mut now) = (dice.branch(walk), plans.len() - 1);
        for kill in 0..kills / THREADS {
            let next = (now + 1 + kill % (plans.len() - 1)) % plans.len();
            let step = || format!("from {:?} to {:?}, {dice:?}", plans[now], plans[next]);
            let mut numbers = dice.clone();
            let mut has_ended = false;
            moments.kill_one(&mut numbers, || {
                if std::mem::replace(&mut has_ended, true) {
                    run(&namespace, plans[now])?;
                }
                Ok((start(&namespace, plans[next])?, ()))
            })?;
            match left(&states[now], &states[next], &namespace.state()?) {
                Ok(false) => old.fetch_add(1, Ordering::Relaxed),
                Ok(true) => new.fetch_add(1, Ordering::Relaxed),
                Err(problem) => return Ok(vec![format!("{}: {problem}", step())]),
            };
            run(&namespace, plans[next])?;
            let differences = namespace.state()?.differences(&states[next]);
            if !differences.is_empty() {
                return Ok(vec![format!("{}, completed: {}", step(), differences.join("\n"))]);
            }
            (dice, now) = (numbers, next);
        }
        Ok(Vec::new())
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    let counts = (old.into_inner(), new.into_inner());
    ensure!(counts.0 > 0 && counts.1 > 0, "the moments are not spread over the run: {counts:?} old and new");
    Ok(())
}

/// What a killed run may leave: the rules of both families are one batch, so they are wholly the old ones or wholly the new ones;
/// where capture moves to another table, both stand for a while, table by table. Routes, ip rules and the address of `lo` are
/// messages beside it, sent before the rules that need them and taken away after them: all that the rules need is there, and
/// nothing that neither plan needs. Returns whether the rules are the new ones, or what is wrong.
fn left(old: &State, new: &State, found: &State) -> Result<bool, String> {
    let has_rules = |of: &State| (&found.v4, &found.v6) == (&of.v4, &of.v6);
    let in_force: &[&State] = match (has_rules(new), has_rules(old), has_both(old, new, found)) {
        (true, ..) => &[new],
        (false, true, _) => &[old],
        (false, false, true) => &[old, new],
        (false, false, false) => {
            return Err(format!(
                "neither the old rules nor the new ones: {}",
                found.differences(new).join("\n")
            ));
        }
    };
    let is_new = has_rules(new);
    for (index, found) in routing(found).into_iter().enumerate() {
        // A policy rule that is about to be removed is marked as that.
        let found: Vec<&str> = found.iter().map(|line| line.trim_end_matches(" proto 105")).collect();
        let needed = in_force.iter().flat_map(|state| routing(state)[index]);
        let missing: Vec<_> = needed.filter(|line| !found.contains(&line.as_str())).collect();
        let known = |line: &&&str| {
            [old, new].iter().any(|state| routing(state)[index].iter().any(|one| one == *line))
        };
        let foreign: Vec<_> = found.iter().filter(|line| !known(line)).collect();
        if !missing.is_empty() || !foreign.is_empty() {
            return Err(format!("missing {missing:?}, nobody's {foreign:?}, new rules {is_new}"));
        }
    }
    Ok(is_new)
}

/// Whether every table is the old one or the new one, of both families alike, and both capture inbound connections.
fn has_both(old: &State, new: &State, found: &State) -> bool {
    let names: BTreeSet<&String> =
        [old, new, found].into_iter().flat_map(|state| state.v4.keys().chain(state.v6.keys())).collect();
    let table = |state: &State, name: &String| (state.v4.get(name).cloned(), state.v6.get(name).cloned());
    let captures = |state: &State, name: &str| {
        let rules = state.v4.get(name).and_then(|chains| chains.get("PREROUTING"));
        rules.is_some_and(|rules| rules.iter().any(|rule| rule.contains("ISTIO_INBOUND")))
    };
    names.iter().all(|name| [old, new].iter().any(|state| table(state, name) == table(found, name)))
        && captures(found, "nat")
        && captures(found, "mangle")
}

/// What belongs to a plan beside its rules.
fn routing(state: &State) -> [&Vec<String>; 5] {
    [&state.rule4, &state.rule6, &state.route4, &state.route6, &state.lo]
}

#[test]
fn what_a_killed_run_may_not_leave_is_noticed() {
    let rules = |name: &str| [("nat".to_owned(), [(name.to_owned(), vec![])].into())].into();
    let tproxy = State {
        v4: rules("T"),
        rule4: vec!["mark".into()],
        route4: vec!["local".into()],
        ..State::default()
    };
    let none = State::default();
    assert_eq!(left(&none, &tproxy, &none), Ok(false));
    assert_eq!(left(&none, &tproxy, &tproxy), Ok(true));
    let routed = State { v4: none.v4.clone(), ..tproxy.clone() };
    assert_eq!(left(&none, &tproxy, &routed), Ok(false), "routes come first");
    assert_eq!(left(&tproxy, &none, &routed), Ok(true), "and go last");
    let capturing = |name: &str| -> State {
        let chains = [("PREROUTING".to_owned(), vec!["-A PREROUTING -j ISTIO_INBOUND".to_owned()])].into();
        State { v4: [(name.to_owned(), chains)].into(), ..State::default() }
    };
    let (in_nat, in_mangle) = (capturing("nat"), capturing("mangle"));
    let both =
        State { v4: in_nat.v4.clone().into_iter().chain(in_mangle.v4.clone()).collect(), ..State::default() };
    assert_eq!(left(&in_nat, &in_mangle, &both), Ok(false), "both stand");
    assert!(left(&in_nat, &in_mangle, &State::default()).is_err(), "none stands");
    let marked = State { route4: vec![], ..tproxy.clone() };
    assert!(left(&none, &tproxy, &marked).is_err(), "marks without a route");
    assert!(
        left(&none, &tproxy, &State { v6: rules("T"), ..none.clone() }).is_err(),
        "rules of another plan"
    );
    assert!(
        left(&none, &tproxy, &State { route6: vec!["local".into()], ..none.clone() }).is_err(),
        "a foreign route"
    );
}

fn run(namespace: &Namespace, args: &str) -> Result<()> {
    let status = start(namespace, args)?.wait()?;
    ensure!(status.success(), "{args:?} ended with {status}");
    Ok(())
}

/// Starts the program itself, with nothing between it and the kill.
fn start(namespace: &Namespace, args: &str) -> Result<Child> {
    let mut command = Command::new(iptables::istio_iptables());
    command.env_clear().env("PATH", e2e::program::PATH).args(args.split_whitespace());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(namespace.enter(|| command.spawn())??)
}
