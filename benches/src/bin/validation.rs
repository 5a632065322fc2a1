//! Times `istio-validation` as a whole process, as the proxy's user, in a programmed pod; beside its own start-up.
//!
//! `cargo run -p benches --bin validation [RUNS]`, as root. The programs are those that ISTIO_VALIDATION and
//! ISTIO_IPTABLES name, else the release ones beside this program's target folder, built on demand. Fails when the
//! median is not below 50 ms.

use std::{
    env,
    error::Error,
    io,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

/// What a run may take.
const LIMIT: Duration = Duration::from_millis(50);
const RUNS: usize = 200;
/// The user and group of the proxy.
const PROXY: u32 = 1337;
const INJECTED: &str = "-p 15001 -z 15006 -u 1337 -i * -b * -d 15090,15021,15020 --dual-stack";
/// How a pod is programmed and validated: a name, and flags behind [`INJECTED`].
const MODES: [(&str, &str); 4] = [
    ("REDIRECT, both families", "-m REDIRECT"),
    ("REDIRECT, both families, DNS", "-m REDIRECT --redirect-dns --capture-all-dns"),
    ("TPROXY, both families", "-m TPROXY"),
    ("REDIRECT, both families, native nftables", "-m REDIRECT --native-nftables"),
];

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["inside", name, flags, runs] => inside(name, flags, runs),
        [] => every_mode(RUNS),
        [runs] => runs.parse().map_err(Into::into).and_then(every_mode),
        _ => Err("usage: validation [RUNS]".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("validation: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// One namespace per mode; this program runs itself inside.
fn every_mode(runs: usize) -> Result<(), Box<dyn Error>> {
    let iptables = program("ISTIO_IPTABLES", "istio-iptables")?;
    let validation = program("ISTIO_VALIDATION", "istio-validation")?;
    say(&format!("{runs} runs each, milliseconds{:>38} {:>9} {:>9}", "median", "p95", "longest"));
    for (name, flags) in MODES {
        let pod = Pod::new()?;
        let all = format!("{INJECTED} {flags}");
        succeed(pod.command(&iptables).args(all.split_whitespace()))?;
        let mut inside = pod.command(&env::current_exe()?);
        inside.args(["inside", name, flags, &runs.to_string()]).env("ISTIO_VALIDATION", &validation);
        if !inside.status()?.success() {
            return Err(format!("{name}: failed, or too slow").into());
        }
    }
    Ok(())
}

fn inside(name: &str, flags: &str, runs: &str) -> Result<(), Box<dyn Error>> {
    let (program, runs) = (program("ISTIO_VALIDATION", "istio-validation")?, runs.parse()?);
    let flags = format!("{INJECTED} {flags} --termination-log=");
    let validation = times(&program, &flags, runs)?;
    let start_up = times(&program, "--version", runs)?;
    let validated = row(name, &validation)?;
    row("  of that, start-up (--version)", &start_up)?;
    if validated < LIMIT { Ok(()) } else { Err(format!("the median is not below {LIMIT:?}").into()) }
}

/// Wall time of each run, from before the fork to after the wait.
fn times(program: &PathBuf, flags: &str, runs: usize) -> Result<Vec<Duration>, Box<dyn Error>> {
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let mut command = Command::new(program);
        // Leaving root drops every capability.
        command.args(flags.split_whitespace()).env_clear().uid(PROXY).gid(PROXY);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let start = Instant::now();
        let status = command.status()?;
        times.push(start.elapsed());
        if !status.success() {
            return Err(format!("istio-validation {flags}: {status}").into());
        }
    }
    times.sort();
    Ok(times)
}

/// Prints a row and returns the median.
fn row(name: &str, sorted: &[Duration]) -> Result<Duration, Box<dyn Error>> {
    let at = |part: usize| sorted.get((sorted.len() - 1) * part / 100).copied().ok_or("no runs");
    let (median, p95, longest) = (at(50)?, at(95)?, at(100)?);
    let millis = |time: Duration| time.as_secs_f64() * 1000.0;
    say(&format!("{name:50} {:>9.2} {:>9.2} {:>9.2}", millis(median), millis(p95), millis(longest)));
    Ok(median)
}

/// A network namespace that looks like a pod's, gone when dropped.
struct Pod(String);

impl Pod {
    fn new() -> io::Result<Self> {
        let pod = Self(format!("bench-validation-{}", std::process::id()));
        succeed(Command::new("ip").args(["netns", "add", &pod.0]))?;
        for line in [
            "link set lo up",
            "link add eth0 type veth peer name pe0",
            "link set eth0 up",
            "link set pe0 up",
            "addr add 10.1.0.2/24 dev eth0",
            "addr add fd00:10::2/64 dev eth0 nodad",
        ] {
            succeed(Command::new("ip").args(["-n", &pod.0]).args(line.split_whitespace()))?;
        }
        Ok(pod)
    }

    fn command(&self, program: &PathBuf) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0]).arg(program);
        command
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = succeed(Command::new("ip").args(["netns", "del", &self.0]));
    }
}

/// The program that a variable names, or that cargo builds for release.
fn program(variable: &str, package: &str) -> Result<PathBuf, Box<dyn Error>> {
    if let Some(path) = env::var_os(variable) {
        return Ok(path.into());
    }
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    succeed(Command::new(cargo).args([
        "build",
        "--quiet",
        "--release",
        "-p",
        package,
        "--manifest-path",
        manifest,
    ]))?;
    let own = env::current_exe()?;
    let target = own.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    Ok(target.ok_or("this program is in no target folder")?.join("release").join(package))
}

fn succeed(command: &mut Command) -> io::Result<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{command:?}: {}: {text}", output.status)))
}

#[allow(clippy::print_stdout, reason = "the figures are what the user asked for")]
fn say(line: &str) {
    println!("{line}");
}

#[allow(clippy::print_stderr, reason = "the figures go to standard output")]
fn complain(line: &str) {
    eprintln!("{line}");
}
