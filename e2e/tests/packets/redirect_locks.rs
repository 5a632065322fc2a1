//! Nobody can hold a run up: not the node's xtables lock, not a process of the pod; and no call that the kernel refuses makes it panic.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::iptables::{
    self,
    told::{errors, not_named},
};
use e2e::iptables::{apply, istio_iptables_command};
use e2e::plugin::{Invocation, RunDir, istio_cni, sidecar};
use e2e::strace::{Call, Strace};
use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Background, Output, prefixed, until};

/// When a run counts as one that never ends. A run waits for others for half a minute at most, and then fails.
const GIVEN_UP: Duration = Duration::from_secs(120);

/// Words of a command line without quotes.
fn words(args: &str) -> Vec<&str> {
    args.split_whitespace().collect()
}

/// A namespace with legacy tables of other programs.
fn with_legacy_tables() -> Result<Namespace> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.sh(
        "iptables-legacy -t nat -A OUTPUT -d 192.0.2.7 -j ACCEPT; iptables-legacy -t mangle -L >/dev/null
         ip6tables-legacy -t nat -A OUTPUT -d 2001:db8::7 -j ACCEPT",
    )?;
    Ok(namespace)
}

/// The configurations that a run may find, want, or both.
const RUNS: [&str; 6] = [
    "--dual-stack -b * -i *",
    "--dual-stack -m TPROXY -b * -i * --native-nftables",
    "--dual-stack -b * -i * --backend restore",
    "--dual-stack -b * -i * --backend netlink",
    "--dual-stack -m TPROXY -b * -i * --force-iptables-binary legacy",
    "--cleanup-only",
];

#[test]
fn no_run_opens_the_nodes_xtables_lock() -> Result<()> {
    let namespace = with_legacy_tables()?;
    let mut problems = Vec::new();
    for args in RUNS {
        for time in ["first", "again"] {
            let strace = Strace::noting("%file,flock")?;
            let command = strace.command(&istio_iptables_command(&words(args)));
            namespace.run(&command)?.ok()?;
            let trace = strace.trace()?;
            ensure!(trace.contains("execve("), "nothing is traced: {trace}");
            let mut opened = trace.lines().filter(|line| line.contains("xtables.lock"));
            if let Some(first) = opened.next() {
                problems.push(format!("{args}, {time}: {} times, first {first}", 1 + opened.count()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn nobody_waits_for_the_nodes_xtables_lock() -> Result<()> {
    let namespace = with_legacy_tables()?;
    let folder = TempDir::new()?;
    let lock = folder.path().join("xtables.lock");
    // In the place of the node's, for which others of this machine would wait.
    let _held = Flock::lock(File::create(&lock)?, FlockArg::LockExclusive)
        .map_err(|(_, error)| anyhow::anyhow!("cannot lock: {error}"))?;
    let script = ": >> /run/xtables.lock; mount --bind \"$0\" /run/xtables.lock; exec \"$@\"";
    let lock = lock.display().to_string();
    let with_lock =
        |command: &Command| prefixed(&["unshare", "--mount", "sh", "-euc", script, &lock], command);
    // It is held: iptables itself waits for it.
    let probe = process::command("timeout", ["2", "iptables-legacy", "-t", "nat", "-S"]);
    let waited = namespace.run(&with_lock(&probe))?;
    ensure!([Some(4), Some(124)].contains(&waited.code()), "the lock is not held: {waited:?}");
    for args in RUNS {
        for time in ["first", "again"] {
            let command = with_lock(&istio_iptables_command(&words(args)));
            let output = process::run(&mut namespace.command(&command), GIVEN_UP)?;
            ensure!(output.code() == Some(0), "{args}, {time}: {output:?}");
        }
    }
    Ok(())
}

/// An unprivileged process of a pod that holds whatever locks on its namespace it can get, for as long as this lives.
struct Holder(#[expect(dead_code, reason = "ends when it is dropped")] Background);

impl Holder {
    fn start(namespace: &Namespace, folder: &TempDir) -> Result<Self> {
        // Every name under which it sees its namespace, in every way that flock(2) and fcntl(2) know.
        let script = "use Fcntl qw(:flock);
            for my $name (\"/proc/self/ns/net\", \"/proc/thread-self/ns/net\", \"/proc/$$/ns/net\", @ARGV) {
                open(my $file, '<', $name) or next; flock($file, LOCK_EX | LOCK_NB) and push @held, $file;
            }
            print scalar(@held), \" held\\n\"; $| = 1; print \"ready\\n\"; sleep 100000;";
        let holder = process::command("perl", ["-e", script, &namespace.path().display().to_string()]);
        let nobody =
            ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set", "-all"];
        let command =
            namespace.command(&prefixed(&[&nobody[..], &["--inh-caps", "-all", "--"]].concat(), &holder));
        let process = Background::start("the holder", &command, &folder.path().join("holder.log"))?;
        let process = process.killed_on_drop();
        until("the holder", process::SHORT, &[&process], || {
            Ok(process.log().contains("ready").then_some(()))
        })?;
        ensure!(!process.log().contains("0 held"), "it holds nothing: {}", process.log());
        Ok(Self(process))
    }
}

#[test]
fn a_process_of_the_pod_cannot_hold_a_run_up() -> Result<()> {
    for args in ["-m TPROXY -b * -i *", "--native-nftables -b * -i *", "--backend restore -b * -i *"] {
        let (namespace, folder) = (Namespace::pod(Families::Dual)?, TempDir::new()?);
        let _holder = Holder::start(&namespace, &folder)?;
        for args in [&format!("--dual-stack {args}"), &format!("--dual-stack {args}"), "--cleanup-only"] {
            let strace = Strace::noting("flock,nanosleep,clock_nanosleep")?.alone();
            let command = strace.command(&istio_iptables_command(&words(args)));
            let output = process::run(&mut namespace.command(&command), GIVEN_UP)?;
            ensure!(output.code() == Some(0), "{args}: {}", output.stderr);
            // Without a helper program there is nothing to wait for.
            let waits = strace.trace()?.matches("nanosleep(").count();
            ensure!(
                waits == 0 || args.contains("restore") || args.contains("cleanup"),
                "{args}: {waits} waits"
            );
        }
    }
    Ok(())
}

#[test]
fn a_process_of_the_pod_cannot_hold_add_and_check_up() -> Result<()> {
    let (namespace, folder, run_dir) = (Namespace::pod(Families::Dual)?, TempDir::new()?, RunDir::new()?);
    run_dir
        .write_manifest("web.json", &sidecar("web", &[("sidecar.istio.io/interceptionMode", "TPROXY")]))?;
    let _holder = Holder::start(&namespace, &folder)?;
    let call = |verb: &str| {
        Invocation::new(verb, &run_dir.manifest_conf()).netns(&namespace).pod("default", "web").run()
    };
    ensure!(istio_cni().exists());
    call("ADD")?.result()?;
    call("CHECK")?.silence()?;
    call("ADD")?.result()?;
    Ok(())
}

/// Two runs at once are one after the other all the same.
#[test]
fn runs_at_once_end_in_one_of_their_plans() -> Result<()> {
    let plans = [
        "--dual-stack -b * -i *",
        "--dual-stack -m TPROXY -b 80 -i 10.0.0.0/8",
        "--dual-stack --native-nftables -b * -i *",
    ];
    let states = plans.map(|args| -> Result<_> {
        let namespace = Namespace::pod(Families::Dual)?;
        apply(&namespace, args)?;
        namespace.state_with_nft()
    });
    let states: Vec<_> = states.into_iter().collect::<Result<_>>()?;
    for round in 0..5 {
        let namespace = Namespace::pod(Families::Dual)?;
        let problems = iptables::in_parallel(6, &[0, 1, 2, 0, 1, 2], |_, plan| {
            apply(&namespace, plans[*plan]).map(|_| Vec::new())
        });
        assert!(problems.is_empty(), "round {round}: {}", problems.join("\n"));
        let state = namespace.state_with_nft()?;
        assert!(states.contains(&state), "round {round}: half of this, half of that: {state:?}");
    }
    Ok(())
}

/// The calls whose failure the standard library takes for impossible, and what they may fail with.
const REFUSALS: [(&str, &str); 7] = [
    ("flock", "ENOLCK"),
    ("clone", "EAGAIN"),
    ("clone3", "EAGAIN"),
    ("vfork", "EAGAIN"),
    ("clock_nanosleep", "EINVAL"),
    ("nanosleep", "EINVAL"),
    ("pipe2", "EMFILE"),
];

#[test]
fn no_refused_call_makes_a_run_panic() -> Result<()> {
    let traced = "flock,clone,clone3,vfork,clock_nanosleep,nanosleep,pipe2";
    let mut stories = Vec::new();
    let runs = ["--dual-stack -m TPROXY -b * -i *", "--dual-stack -m TPROXY -b * -i * --backend restore"];
    for args in runs {
        let (namespace, strace) = (Namespace::pod(Families::Dual)?, Strace::noting(traced)?.alone());
        namespace.run(&strace.command(&istio_iptables_command(&words(args))))?.ok()?;
        let calls = strace.calls()?;
        let helpers = calls.iter().filter(|call| call.name == "pipe2").count();
        ensure!(helpers > 0 || !args.contains("restore"), "nothing is traced: {calls:?}");
        // Naps are many and all the same: the first few tell it.
        stories.extend(calls.into_iter().filter(|call| call.nth <= 24).map(|call| (args, call)));
    }
    let problems = iptables::in_parallel(2, &stories, |_, (args, Call { name, nth, .. })| {
        let error = REFUSALS.iter().find(|(call, _)| call == name).map_or("EIO", |(_, error)| error);
        let (namespace, before) = pod_and_snapshot()?;
        let strace = Strace::noting(traced)?.alone().tampering(&format!("{name}:error={error}:when={nth}"));
        let command = strace.command(&istio_iptables_command(&words(args)));
        let output = process::run(&mut namespace.command(&command), GIVEN_UP)?;
        Ok(problem_of(&namespace, &before, &output)?
            .map(|problem| format!("{name} {nth} of {args}: {problem}"))
            .into_iter()
            .collect())
    });
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), stories.len(), problems.join("\n"));
    Ok(())
}

fn pod_and_snapshot() -> Result<(Namespace, test_support::netns::Snapshot)> {
    let namespace = Namespace::pod(Families::Dual)?;
    let before = namespace.snapshot()?;
    Ok((namespace, before))
}

/// What is wrong with how a run ended, if anything.
fn problem_of(
    namespace: &Namespace,
    before: &test_support::netns::Snapshot,
    output: &Output,
) -> Result<Option<String>> {
    let said = output.stderr.lines().find(|line| !line.is_empty()).unwrap_or_default();
    match output.code() {
        Some(0) => Ok(None),
        Some(1) if errors(output).is_empty() => Ok(Some("fails without a word".to_owned())),
        Some(1) => {
            let left = not_named(&namespace.snapshot()?.changes_since(before), &errors(output));
            let first = left.first().cloned();
            Ok(first.map(|first| format!("{} lines left and not named, first {first}; {said}", left.len())))
        }
        _ => Ok(Some(format!("{:?}: {said}", output.status))),
    }
}
