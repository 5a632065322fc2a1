//! What `istio-validation` cannot see it says, and does not guess: untested paths, ports that the running proxy has, limits of its
//! own process.

use anyhow::{Result, ensure};
use e2e::iptables;
use e2e::traffic::TcpServer;
use e2e::validation::{APP, INJECTED, PROXY, ValidationRun, command, termination_log, validate};
use serde_json::Value;
use test_support::netns::{Families, Namespace, Topology};
use test_support::process::{self, SHORT};

const SOON: &str = "--probe-timeout 250ms";

/// The level of the line that begins with these words.
fn level<'a>(verdict: &'a ValidationRun, words: &str) -> Option<&'a str> {
    let line = verdict.output.stderr.lines().find(|line| line.contains(&format!("\t{words}")))?;
    line.split('\t').nth(1)
}

fn headline(verdict: &ValidationRun) -> &str {
    let line = verdict.output.stderr.lines().find(|line| line.contains(" (user "));
    line.and_then(|line| line.split('\t').nth(2)).unwrap_or("no headline")
}

#[test]
fn green_names_what_was_not_tested() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, &format!("{INJECTED} --dual-stack"))?;
    let verdict = validate(&pod, PROXY, "--dual-stack")?;
    verdict.assert("redirected");
    let words = "every path that can be proven from inside the pod is redirected to the proxy; not tested: \
                 IPv4 outbound, IPv4 inbound, IPv6 outbound, IPv6 inbound";
    ensure!(headline(&verdict).contains(words), "{}", verdict.output.stderr);
    ensure!(verdict.message["message"].as_str() == Some(words), "{}", verdict.message);
    ensure!(verdict.message["redirected"] == true, "{}", verdict.message);
    Ok(())
}

#[test]
fn a_rule_that_the_proxys_user_cannot_see_is_missed_only_with_a_word_about_it() -> Result<()> {
    for (rule, path) in [
        ("iptables-nft -t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT", "IPv4 outbound"),
        ("iptables-nft -t nat -D PREROUTING -p tcp -j ISTIO_INBOUND", "IPv4 inbound"),
    ] {
        let topology = Topology::new(Families::V4)?;
        iptables::apply(&topology.pod, INJECTED)?;
        topology.pod.sh(rule)?;
        let verdict = validate(&topology.pod, PROXY, SOON)?;
        verdict.assert("redirected");
        let (_, untested) = headline(&verdict).split_once("not tested: ").unwrap_or_default();
        ensure!(untested.contains(path), "{rule}: {}", verdict.output.stderr);
    }
    Ok(())
}

#[test]
fn the_applications_user_sees_the_same_and_names_the_right_cause() -> Result<()> {
    // One family has all its rules but the last: that is not a matter of families.
    for family in ["iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"] {
        let topology = Topology::new(Families::Dual)?;
        let backend = if family.ends_with("legacy") { "--force-iptables-binary legacy" } else { "" };
        iptables::apply(&topology.pod, &format!("{INJECTED} --dual-stack {backend}"))?;
        topology.pod.sh(&format!("{family} -t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT"))?;
        let verdict = validate(&topology.pod, APP, &format!("--dual-stack {SOON}"))?;
        ensure!(verdict.problems("rules-not-in-effect").is_empty(), "{family}: {verdict:?}");
    }
    // Where a family has none at all, it is.
    let topology = Topology::new(Families::Dual)?;
    iptables::apply(&topology.pod, INJECTED)?;
    validate(&topology.pod, APP, &format!("--dual-stack {SOON}"))?.assert("one-family-only");
    Ok(())
}

#[test]
fn beside_the_running_proxy_it_is_unknown() -> Result<()> {
    let pod = Namespace::pod(Families::V4)?;
    iptables::apply(&pod, INJECTED)?;
    let _outbound = TcpServer::start(&pod, "outbound", ([0, 0, 0, 0], 15001))?;
    let _inbound = TcpServer::start(&pod, "inbound", ([0, 0, 0, 0], 15006))?;
    let verdict = validate(&pod, PROXY, SOON)?;
    verdict.assert("ports-busy");
    ensure!(verdict.message["redirected"] == Value::Null, "{}", verdict.message);
    ensure!(headline(&verdict).contains("unknown: another process, the proxy if it runs"), "{verdict:?}");
    Ok(())
}

#[test]
fn what_is_proven_is_no_error() -> Result<()> {
    let pod = Namespace::pod(Families::V4)?;
    iptables::apply(&pod, INJECTED)?;
    pod.sh("iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT")?;
    let verdict = validate(&pod, PROXY, SOON)?;
    verdict.assert("rules-not-in-effect");
    for (words, wanted) in [
        ("rules-not-in-effect: ", "error"),
        ("FAILED   ", "error"),
        ("proven   ", "info"),
        ("unproven ", "info"),
        ("owner: ", "error"),
    ] {
        ensure!(level(&verdict, words) == Some(wanted), "{words}: {}", verdict.output.stderr);
    }
    Ok(())
}

#[test]
fn too_few_descriptors_are_named() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, &format!("{INJECTED} --dual-stack"))?;
    for most in 12..=24 {
        let log = termination_log()?;
        let flags = format!("{INJECTED} --dual-stack {SOON}");
        let program = command(PROXY, &flags.split_whitespace().collect::<Vec<_>>(), &[], &log);
        let script = format!("ulimit -n {most}; exec \"$0\" \"$@\"");
        let mut limited = process::command("sh", ["-c", &script]);
        limited.arg(program.get_program()).args(program.get_args());
        let verdict = ValidationRun::of(process::run(&mut pod.command(&limited), SHORT)?, &log)?;
        ensure!(verdict.problems("out-of-resources").is_empty(), "{most}: {verdict:?}");
        ensure!(verdict.message["redirected"] == Value::Null, "{}", verdict.message);
    }
    Ok(())
}

#[test]
fn too_few_ports_are_named() -> Result<()> {
    for families in [Families::V4, Families::V6] {
        let pod = Namespace::pod(families)?;
        iptables::apply(&pod, INJECTED)?;
        pod.enter(|| std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40001"))??;
        validate(&pod, PROXY, SOON)?.assert("out-of-resources");
    }
    Ok(())
}
