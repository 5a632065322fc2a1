//! What happens while `istio-validation` runs: addresses and rules that come late or go, signals; and that it is quick.

use e2e::iptables;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::validation::{
    self, INJECTED, PROXY, ValidationRun, command, command_of, termination_log, validate, validate_with,
};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::NamedTempFile;
use test_support::netns::{Families, Namespace};
use test_support::process::{self, EARLY, Output, SHORT};

/// The program while it runs, as process 1 of a container would: a child of nobody else.
struct Running {
    child: Option<Child>,
    log: NamedTempFile,
    start: Instant,
}

impl Running {
    fn start(namespace: &Namespace, flags: &str) -> Result<Self> {
        let log = termination_log()?;
        let flags = format!("{INJECTED} {flags}");
        let inner = command(PROXY, &flags.split_whitespace().collect::<Vec<_>>(), &[], &log);
        let mut outer: Command = namespace.command(&inner);
        outer.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = Instant::now();
        Ok(Self { child: Some(outer.spawn()?), log, start })
    }

    /// `ip`, `setpriv` and `env` have each become the next: the process is the program itself once it listens.
    fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("it runs")?;
        Ok(kill(Pid::from_raw(child.id().try_into()?), signal)?)
    }

    /// Waits until the program itself runs, and holds signals back.
    fn await_running(&self) -> Result<()> {
        let id = self.child.as_ref().context("it runs")?.id();
        process::until("istio-validation to run", SHORT, &[], || {
            let status = fs::read_to_string(format!("/proc/{id}/status"))?;
            let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap_or_default();
            let blocked = u64::from_str_radix(blocked.trim(), 16)?;
            let term = 1 << (Signal::SIGTERM as i32 - 1);
            Ok((blocked & term != 0).then_some(()))
        })
    }

    /// Waits until the program waits for something, and for longer than this (proc(5)).
    fn await_waiting(&self, longer: Duration) -> Result<()> {
        let id = self.child.as_ref().context("it runs")?.id();
        process::until("istio-validation to wait", SHORT, &[], || {
            let call = fs::read_to_string(format!("/proc/{id}/syscall"))?;
            let mut words = call.split_whitespace();
            let is_poll = words.next() == Some(&POLL.to_string());
            let third = words.nth(2).and_then(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
            let limit = third.filter(|_| is_poll).and_then(|third| limit(id, third));
            Ok(limit.is_some_and(|limit| limit > longer).then_some(()))
        })
    }

    fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.as_mut().context("it runs")?.try_wait()?.is_some())
    }

    /// Its verdict, once it has ended, which it has to do early.
    fn end(mut self) -> Result<ValidationRun> {
        let output = self.child.take().context("it runs")?.wait_with_output()?;
        let took = self.start.elapsed();
        ensure!(took < EARLY, "it took {took:?}");
        let output = Output {
            command: "istio-validation".to_owned(),
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        ValidationRun::of(output, &self.log)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn without_an_address_repair_is_called() -> Result<()> {
    let pod = Namespace::empty(Families::Dual)?;
    let started = Instant::now();
    validate(&pod, PROXY, "--probe-timeout 300ms")?.assert("no-address");
    assert!(started.elapsed() >= Duration::from_millis(300), "an address may still come");
    Ok(())
}

#[test]
fn an_address_that_comes_late_is_waited_for() -> Result<()> {
    let pod = Namespace::pod(Families::V4)?;
    iptables::apply(&pod, INJECTED)?;
    pod.sh("ip addr flush dev eth0")?;
    let running = Running::start(&pod, "--probe-timeout 10m")?;
    running.await_running()?;
    // Whoever tries rounds without an address rests for milliseconds, and never waits like this.
    running.await_waiting(Duration::from_secs(60))?;
    pod.add_address("eth0", "10.1.0.2/24")?;
    let verdict = running.end()?;
    verdict.assert("redirected");
    let rounds = verdict.message["rounds"].as_u64().context("rounds")?;
    assert!(rounds <= 2, "{rounds} rounds: nothing is to be tried before there is an address");
    Ok(())
}

#[test]
fn rules_that_come_late_are_enough() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    let running = Running::start(&pod, "--dual-stack --probe-timeout 10m")?;
    running.await_running()?;
    iptables::apply(&pod, &format!("{INJECTED} --dual-stack"))?;
    running.end()?.assert("redirected");
    Ok(())
}

/// First only IPv4 is redirected, then only IPv6: each was seen at some time, never both.
#[test]
fn rules_that_are_flushed_between_probes_prove_nothing() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, &format!("{INJECTED} --dual-stack"))?;
    let save = pod.sh("ip6tables-nft-save -t nat")?.stdout;
    pod.sh("ip6tables-nft -t nat -F")?;
    // Time for the rules to change, and for rounds before and after that.
    let mut running = Running::start(&pod, "--dual-stack --probe-timeout 6s")?;
    process::until("a probe by IPv4", SHORT, &[], || {
        let rules = pod.sh("iptables-nft-save --counters -t nat")?.stdout;
        let is_met = |rule: &str| rule.contains(" -j REDIRECT") && !rule.starts_with("[0:");
        Ok(rules.lines().any(is_met).then_some(()))
    })?;
    pod.sh("iptables-nft -t nat -F")?;
    let mut restore = pod.command(&process::command("ip6tables-nft-restore", ["-T", "nat"]));
    process::run_with_input(&mut restore, &save, process::SHORT)?.ok()?;
    ensure!(!running.has_ended()?, "ended before the rules were changed");
    let verdict = running.end()?;
    verdict.assert("one-family-only");
    assert_eq!(verdict.check("IPv6", "proxy-to-self"), Some("proven"), "{}", verdict.message);
    assert_eq!(verdict.check("IPv4", "proxy-to-self"), Some("one-family-only"), "{}", verdict.message);
    Ok(())
}

#[test]
fn rules_that_are_flushed_after_a_success_fail_the_next_run() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, &format!("{INJECTED} --dual-stack"))?;
    let flags = "--dual-stack --probe-timeout 250ms";
    validate(&pod, PROXY, flags)?.assert("redirected");
    pod.sh("nft flush ruleset")?;
    validate(&pod, PROXY, flags)?.assert("no-rules");
    Ok(())
}

#[test]
fn a_signal_ends_it_and_leaves_no_listener() -> Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        for (pod, flags) in [
            (Namespace::pod(Families::V4)?, "--probe-timeout 10m"),
            // Without an address it waits for one, and a signal ends that too.
            (Namespace::empty(Families::V4)?, "--probe-timeout 10m"),
        ] {
            let running = Running::start(&pod, flags)?;
            running.await_running()?;
            running.signal(signal)?;
            assert_eq!(running.end()?.problems("interrupted"), [""; 0], "{signal}");
            assert_eq!(pod.sh("ss -Htuln")?.stdout, "", "{signal}: somebody still listens");
            for port in [15001, 15006, 15002] {
                pod.enter(|| TcpListener::bind(("127.0.0.1", port)))?.context("the port is free again")?;
            }
        }
    }
    Ok(())
}

#[test]
fn the_proxy_can_start_at_once_behind_a_success() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, &format!("{INJECTED} --dual-stack"))?;
    validate(&pod, PROXY, "--dual-stack")?.assert("redirected");
    // Without SO_REUSEADDR: not even a connection in TIME_WAIT may be left on the proxy's ports.
    let listening = pod.sh("ss -Htan | grep -E ':(15001|15006|15053) ' || true")?.stdout;
    ensure!(listening.is_empty(), "left behind: {listening}");
    Ok(())
}

/// Root is neither proxy nor application; its packets would prove nothing.
#[test]
fn root_proves_as_the_proxy() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, &format!("{INJECTED} --dual-stack -u 4321"))?;
    let log = termination_log()?;
    let flags = format!("{INJECTED} --dual-stack -u 4321");
    let mut program = process::command(validation::istio_validation(), flags.split_whitespace());
    program.arg("--termination-log").arg(log.path());
    let output = process::run(&mut pod.command(&program), process::SHORT)?;
    let verdict = ValidationRun::of(output, &log)?;
    verdict.assert("redirected");
    assert_eq!((verdict.message["uid"].as_u64(), verdict.message["gid"].as_u64()), (Some(4321), Some(4321)));
    Ok(())
}

/// The injector's arguments are for an image whose entry point takes the name of a program first.
#[test]
fn the_injectors_arguments_are_understood_as_they_are() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, INJECTED)?;
    let flags = format!("istio-iptables {INJECTED} --run-validation --skip-rule-apply --log_as_json=true");
    let verdict = validate_with(&pod, PROXY, &flags.split_whitespace().collect::<Vec<_>>(), &[])?;
    verdict.assert("redirected");
    let lines = verdict.output.stderr.lines().map(serde_json::from_str::<Value>);
    let lines = lines.collect::<Result<Vec<_>, _>>()?;
    assert!(lines.iter().all(|line| line["level"] == "info"), "{lines:?}");
    Ok(())
}

/// No failure, since it is what the settings say; but nothing to be silent about.
#[test]
fn a_family_that_the_settings_leave_alone_is_told() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    iptables::apply(&pod, INJECTED)?;
    let verdict = validate(&pod, PROXY, "")?;
    verdict.assert("redirected");
    let unproven = verdict.message["unproven"].as_array().context("a list")?;
    let told = unproven
        .iter()
        .filter_map(Value::as_str)
        .any(|text| text.starts_with("IPv6") && text.contains("ISTIO_DUAL_STACK"));
    assert!(told, "{unproven:?}");
    Ok(())
}

#[test]
fn istio_iptables_validates_alike() -> Result<()> {
    let pod = Namespace::pod(Families::Dual)?;
    let flags = format!("{INJECTED} --dual-stack --run-validation --probe-timeout 250ms");
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let only: Vec<&str> = flags.iter().copied().chain(["--skip-rule-apply"]).collect();
    let unprivileged = |args: &[&str]| -> Result<ValidationRun> {
        let log = termination_log()?;
        let mut command = pod.command(&command_of(iptables::istio_iptables(), PROXY, args, &[], &log));
        ValidationRun::of(process::run(&mut command, process::SHORT)?, &log)
    };
    unprivileged(&only)?.assert("no-rules");
    // Programs and validates; as root, in the place of istio-init.
    let log = termination_log()?;
    let mut program = iptables::istio_iptables_command(&flags);
    program.arg("--termination-log").arg(log.path());
    ValidationRun::of(process::run(&mut pod.command(&program), process::SHORT)?, &log)?.assert("redirected");
    unprivileged(&only)?.assert("redirected");
    Ok(())
}

#[test]
fn wrong_settings_are_an_error_of_their_own() -> Result<()> {
    let pod = Namespace::pod(Families::V4)?;
    let log = termination_log()?;
    let flags = ["--iptables-probe-port", "0", "--probe-timeout", "5", "-b", "80,http"];
    let output = process::run(&mut pod.command(&command(PROXY, &flags, &[], &log)), process::SHORT)?;
    assert_eq!(output.code(), Some(1), "{output:?}");
    for flag in ["--iptables-probe-port", "--probe-timeout", "--istio-inbound-ports"] {
        assert!(output.stderr.contains(flag), "{flag} is not named: {}", output.stderr);
    }
    assert!(output.stdout.is_empty());
    Ok(())
}

/// As on a full disk.
#[test]
fn a_verdict_that_cannot_be_written_whole_leaves_no_half() -> Result<()> {
    let namespace = Namespace::pod(Families::V4)?;
    let log = termination_log()?;
    let flags: Vec<&str> = INJECTED.split_whitespace().chain(["--probe-timeout", "100ms"]).collect();
    let inner = command(PROXY, &flags, &[], &log);
    let limited = process::prefixed(&["prlimit", "--fsize=100"], &inner);
    let output = namespace.run(&limited)?;
    assert_eq!(output.code(), Some(126), "{output:?}");
    ensure!(
        output.stderr.contains("cannot write the verdict") && output.stderr.contains("too large"),
        "{output:?}"
    );
    assert_eq!(fs::read_to_string(log.path())?, "");
    Ok(())
}

/// The call that waits. Processors newer than x86-64 have no poll(2).
#[cfg(target_arch = "x86_64")]
const POLL: libc::c_long = libc::SYS_poll;
#[cfg(not(target_arch = "x86_64"))]
const POLL: libc::c_long = libc::SYS_ppoll;

/// The limit of such a call, by its third argument: milliseconds, or where in the process ppoll(2) has them as a timespec. None without a limit.
fn limit(process: u32, third: u64) -> Option<Duration> {
    if cfg!(target_arch = "x86_64") {
        return Some(Duration::from_millis(u32::try_from(third).ok()?.into()));
    }
    let mut timespec = [0; 16];
    fs::File::open(format!("/proc/{process}/mem")).ok()?.read_exact_at(&mut timespec, third).ok()?;
    let [seconds, nanoseconds] = [0, 8].map(|at| timespec[at..at + 8].try_into().map(i64::from_ne_bytes));
    Some(Duration::new(seconds.ok()?.try_into().ok()?, nanoseconds.ok()?.try_into().ok()?))
}
