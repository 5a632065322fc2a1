//! Every step of every kind of change fails once, and is once the last: what is left is what was, or what was wanted, or the error names it; and where the
//! program was killed, the next run ends as wanted.
//!
//! Steps are the system calls that talk to the kernel about the network, take a lock, open a file of the kernel or start a helper program, and the runs of helper
//! programs. They are found in a run without a fault. `make test` takes a part of them in a part of the changes, `make test-all` in all, `make faults`
//! (FAULTS=all) takes all, and prints a table.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use e2e::iptables::told::{errors, not_named};
use e2e::iptables::{self, stubs::Stubs};
use e2e::iptables::{in_parallel, istio_iptables_command};
use e2e::strace::{Call, Strace};
use nix::sys::signal::Signal;
use test_support::netns::{Families, Namespace, Snapshot};
use test_support::process::{self, Output};
use test_support::sample;

/// When a run counts as one that never ends; its own patience is a quarter of it.
const GIVEN_UP: Duration = Duration::from_secs(120);
const THREADS: usize = 3;
/// Of so many steps that matter one is taken, where not all are asked for.
const ONE_OF: usize = 13;
/// But so many at least.
const LEAST: usize = 2;

/// Configurations as unlike each other as possible.
const CONFIGURATIONS: [(&str, &str); 10] = [
    ("nothing", "--cleanup-only"),
    ("redirect", "--dual-stack -b * -d 15090,15021 -i * --redirect-dns --capture-all-dns"),
    ("tproxy", "--dual-stack -m TPROXY -b * -i * -c dummy0"),
    ("other tproxy", "--dual-stack -m TPROXY -b 80 -i 10.0.0.0/8,fd00::/8 -t 0x77 -r 200 -z 16006"),
    ("ipv4", "-b * -i * -p 16001 -z 16006"),
    ("restore", "--backend restore --dual-stack -m TPROXY -b * -i * -z 16006"),
    ("legacy", "--force-iptables-binary legacy --dual-stack -b * -i * -z 16006 --drop-invalid"),
    ("native", "--native-nftables --dual-stack -b * -i *"),
    ("native tproxy", "--native-nftables --dual-stack -m TPROXY -b * -i *"),
    (
        "sets",
        "--native-nftables --nft-sets --dual-stack -b 80,81,82,83 -i 10.0.0.0/8,192.0.2.0/24,198.51.100.0/24,fd00::/8",
    ),
];

/// From one configuration to another.
const CHANGES: [(&str, &str); 22] = [
    ("nothing", "redirect"),
    ("nothing", "tproxy"),
    ("nothing", "restore"),
    ("nothing", "legacy"),
    ("nothing", "native tproxy"),
    ("redirect", "tproxy"),
    ("redirect", "ipv4"),
    ("redirect", "native tproxy"),
    ("tproxy", "redirect"),
    ("tproxy", "other tproxy"),
    ("tproxy", "native"),
    ("tproxy", "legacy"),
    ("restore", "legacy"),
    ("legacy", "tproxy"),
    ("legacy", "sets"),
    ("native", "sets"),
    ("native tproxy", "redirect"),
    ("sets", "restore"),
    ("tproxy", "nothing"),
    ("legacy", "nothing"),
    ("native tproxy", "nothing"),
    ("sets", "nothing"),
];

/// The calls that are steps, and what each may fail with.
const STEPS: [(&str, &str); 17] = [
    ("socket", "EMFILE"),
    ("bind", "ENOMEM"),
    ("connect", "ENOMEM"),
    ("getsockname", "ENOBUFS"),
    ("setsockopt", "ENOMEM"),
    ("sendto", "ENOBUFS"),
    ("sendmsg", "ENOBUFS"),
    ("sendmmsg", "ENOBUFS"),
    ("recvfrom", "ENOBUFS"),
    ("recvmsg", "ENOBUFS"),
    ("recvmmsg", "ENOBUFS"),
    ("flock", "ENOLCK"),
    ("clone", "EAGAIN"),
    ("clone3", "EAGAIN"),
    ("vfork", "EAGAIN"),
    ("pipe2", "EMFILE"),
    ("openat", "EMFILE"),
];

/// Every helper program there is.
const HELPERS: [&str; 11] = [
    "iptables-nft-save",
    "ip6tables-nft-save",
    "iptables-nft-restore",
    "ip6tables-nft-restore",
    "iptables-legacy-save",
    "ip6tables-legacy-save",
    "iptables-legacy-restore",
    "ip6tables-legacy-restore",
    "iptables-legacy",
    "ip6tables-legacy",
    "nft",
];

#[test]
fn whichever_step_fails_or_is_the_last_nothing_is_half_done() -> Result<()> {
    let takes_all = std::env::var("FAULTS").is_ok_and(|value| value == "all");
    let changes = if takes_all { CHANGES.to_vec() } else { sample::part(CHANGES.to_vec(), 3, 0) };
    let stories = changes
        .into_iter()
        .map(|(from, to)| Story::of(from, to).with_context(|| format!("from {from} to {to}")));
    let stories = stories.collect::<Result<Vec<_>>>()?;
    // A namespace is used for as many faults as leave it as it was.
    let mut shares = Vec::new();
    for (number, story) in stories.iter().enumerate() {
        let faults = story.faults(takes_all, number);
        ensure!(faults.len() >= if takes_all { 20 } else { 2 * LEAST }, "{story}: hardly a step: {faults:?}");
        shares.extend(faults.chunks(24).map(|share| (story, share.to_vec())));
    }
    let count: usize = shares.iter().map(|(_, faults)| faults.len()).sum();
    println!("{count} faults in {} kinds of change", stories.len());
    let tally = Mutex::new(Tally::default());
    let problems = in_parallel(THREADS, &shares, |_, (story, faults)| {
        let (mut stage, mut problems) = (None, Vec::new());
        for fault in faults {
            let verdict = story.play(&mut stage, fault);
            let verdict = verdict.unwrap_or_else(|error| Ending::Red(format!("cannot be judged: {error:#}")));
            if let Ending::Red(problem) = &verdict {
                problems.push(format!("{story}: {fault}: {}", problem.replace('\n', " ")));
            }
            tally.lock().map_err(|_| anyhow!("a thread panicked"))?.add(story, fault, &verdict);
        }
        Ok(problems)
    });
    let tally = tally.into_inner()?;
    println!("{tally}");
    tally.holds_enough()?;
    assert!(problems.is_empty(), "{} red:\n{}\n{tally}", problems.len(), problems.join("\n"));
    Ok(())
}

/// One kind of change, and its steps.
struct Story {
    from: &'static str,
    to: &'static str,
    before: Snapshot,
    wanted: Snapshot,
    calls: Vec<Call>,
    /// How many helper programs it runs.
    helpers: usize,
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.from, self.to)
    }
}

/// Words of a command line without quotes.
fn words(args: &str) -> Vec<&str> {
    args.split_whitespace().collect()
}

fn args_of(name: &str) -> Result<&'static str> {
    let found = CONFIGURATIONS.iter().find(|(known, _)| *known == name);
    found.map(|(_, args)| *args).with_context(|| format!("{name} is not a configuration"))
}

/// A namespace in which a configuration is in force.
fn stage(from: &str) -> Result<Namespace> {
    let namespace = Namespace::pod(Families::Dual)?;
    if from != "nothing" {
        iptables::apply(&namespace, args_of(from)?)?;
    }
    Ok(namespace)
}

impl Story {
    /// Its steps, as they are without a fault.
    fn of(from: &'static str, to: &'static str) -> Result<Self> {
        let names: Vec<&str> = STEPS.iter().map(|(name, _)| *name).chain(["execve"]).collect();
        let namespace = stage(from)?;
        let before = namespace.snapshot()?;
        let strace = Strace::noting(&names.join(","))?;
        namespace.run(&strace.command(&istio_iptables_command(&words(args_of(to)?))))?.ok()?;
        let wanted = namespace.snapshot()?;
        ensure!(wanted != before, "from {from} to {to}: nothing changes");

        let calls = strace.calls()?;
        let main = calls.first().context("no calls")?.process;
        let programs: Vec<u32> =
            calls.iter().filter(|call| call.name == "execve").map(|call| call.process).collect();
        let by_threads =
            calls.iter().filter(|call| call.process != main && !programs.contains(&call.process));
        // Those are not counted with the others, and would be missed.
        let by_threads: Vec<&Call> = by_threads.filter(|call| call.text.contains("NETLINK")).collect();
        ensure!(
            by_threads.is_empty(),
            "from {from} to {to}: another thread talks to the kernel: {by_threads:?}"
        );
        let is_step = |call: &Call| {
            let of_kernel = call.text.contains("\"/proc/") || call.text.contains("NETLINK");
            call.process == main
                && (of_kernel || !matches!(&*call.name, "openat" | "socket" | "connect" | "execve"))
        };
        let calls: Vec<Call> = calls.into_iter().filter(is_step).collect();

        let (namespace, stubs) = (stage(from)?, Stubs::new()?);
        let helpers = helpers(&stubs, None)?;
        namespace.run(&helpers.command(args_of(to)?))?.ok()?;
        let helpers = stubs.read("count").trim().parse().unwrap_or(0);
        Ok(Self { from, to, before, wanted, calls, helpers })
    }

    /// What may happen in it: all of it, or a part that is the same every time, of which stories with other numbers take other parts.
    fn faults(&self, takes_all: bool, number: usize) -> Vec<Fault> {
        let writes = |call: &Call| {
            ["RTM_NEW", "RTM_DEL", "BATCH_BEGIN"].iter().any(|kind| call.text.contains(kind))
                && call.name.starts_with("send")
        };
        let first_write = self.calls.iter().position(writes).unwrap_or(self.calls.len());
        let weighty = |index: &usize| {
            let call = &self.calls[*index];
            let is_near_a_write = writes(call) || (*index > 0 && writes(&self.calls[*index - 1]));
            is_near_a_write || index.is_multiple_of(if *index < first_write { 17 } else { 7 })
        };
        let mut faults = Vec::new();
        let indices: Vec<usize> = (0..self.calls.len()).filter(|index| takes_all || weighty(index)).collect();
        let every = if takes_all { 1 } else { ONE_OF.min(indices.len() / LEAST).max(1) };
        for index in indices.into_iter().skip(number % every).step_by(every) {
            let Call { name, nth, .. } = self.calls[index].clone();
            faults.push(Fault::Refused { name: name.clone(), nth });
            faults.push(Fault::Killed { name, nth });
        }
        let ways = [HelperFault::Refuses, HelperFault::FailsAfterwards, HelperFault::IsOrphaned];
        for nth in 1..=self.helpers {
            // What writes comes late.
            let skip = !takes_all && nth * 2 < self.helpers;
            let (all, one) = (ways.iter(), ways.iter().skip((nth + number) % ways.len()).take(1));
            let ways: Vec<&HelperFault> = if takes_all { all.collect() } else { one.collect() };
            faults.extend(ways.into_iter().filter(|_| !skip).map(|how| Fault::Helper { nth, how: *how }));
        }
        faults
    }

    /// Runs the change with a fault, in a namespace that is as it was before, and judges what is left. Takes the namespace away where it is not as before.
    fn play(&self, ready: &mut Option<Namespace>, fault: &Fault) -> Result<Ending> {
        let namespace = match ready.take() {
            Some(namespace) => namespace,
            None => {
                let namespace = stage(self.from)?;
                let differs = namespace.snapshot()?.changes_since(&self.before);
                ensure!(differs.is_empty(), "{self} begins differently every time: {differs:?}");
                namespace
            }
        };
        let args = args_of(self.to)?;
        let Some((output, is_met)) = fault.happen(&namespace, args)? else {
            return Ok(Ending::Red("does not end".to_owned()));
        };
        let now = namespace.snapshot()?;
        let is_as_before = now.changes_since(&self.before).is_empty();
        if output.status.signal() == Some(Signal::SIGKILL as i32) && fault.kills() {
            let after = now.changes_since(&self.before).len();
            return self.judge_mending(&namespace, args, after);
        }
        let verdict = self.judge(&output, &now);
        if is_as_before {
            *ready = Some(namespace);
        }
        let is_red = matches!(verdict, Ending::Red(_));
        Ok(if is_met || is_red { verdict } else { Ending::Missed })
    }

    fn judge(&self, output: &Output, now: &Snapshot) -> Ending {
        let said = errors(output);
        let differs_from_wanted = now.changes_since(&self.wanted);
        let differs_from_before = now.changes_since(&self.before);
        match output.code() {
            Some(0) if differs_from_wanted.is_empty() => Ending::Wanted,
            Some(0) => Ending::Red(format!("says it succeeded: {}", few(&differs_from_wanted))),
            Some(1) if said.is_empty() => Ending::Red(format!("fails without a word: {}", output.stderr)),
            Some(1) if differs_from_before.is_empty() => Ending::AsBefore,
            Some(1) => {
                let silent = not_named(&differs_from_before, &said);
                if silent.is_empty() {
                    return Ending::Told;
                }
                Ending::Red(format!("left and not named: {}; it said {said}", few(&silent)))
            }
            _ => Ending::Red(format!("{:?}: {}", output.status, output.stderr)),
        }
    }

    /// One more run, without a fault, has to end as wanted.
    fn judge_mending(&self, namespace: &Namespace, args: &str, after: usize) -> Result<Ending> {
        let mut command = namespace.command(&istio_iptables_command(&words(args)));
        let output = process::run(&mut command, GIVEN_UP)?;
        let differs = namespace.snapshot()?.changes_since(&self.wanted);
        Ok(if output.code() != Some(0) {
            Ending::Red(format!(
                "the next run fails, after {after} changes: {:?} {}",
                output.status, output.stderr
            ))
        } else if differs.is_empty() {
            Ending::Mended
        } else {
            Ending::Red(format!("the next run leaves {}", few(&differs)))
        })
    }
}

/// A few lines stand for all.
fn few(lines: &[impl fmt::Display]) -> String {
    let shown: Vec<String> = lines.iter().take(3).map(ToString::to_string).collect();
    format!("{} lines differ: {}", lines.len(), shown.join("; "))
}

/// What happens at a step.
#[derive(Clone, Debug)]
enum Fault {
    /// The call fails, and is not carried out.
    Refused { name: String, nth: usize },
    /// The program is killed before the call is carried out.
    Killed { name: String, nth: usize },
    /// A helper program does not do what it should.
    Helper { nth: usize, how: HelperFault },
}

#[derive(Clone, Copy, Debug)]
enum HelperFault {
    /// It fails, and does nothing.
    Refuses,
    /// It does everything, and says that it failed.
    FailsAfterwards,
    /// Who started it is killed; it goes on.
    IsOrphaned,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { name, nth } => write!(f, "{name} {nth} fails"),
            Self::Killed { name, nth } => write!(f, "killed at {name} {nth}"),
            Self::Helper { nth, how: HelperFault::Refuses } => write!(f, "helper {nth} refuses"),
            Self::Helper { nth, how: HelperFault::FailsAfterwards } => {
                write!(f, "helper {nth} fails afterwards")
            }
            Self::Helper { nth, how: HelperFault::IsOrphaned } => write!(f, "killed while helper {nth} runs"),
        }
    }
}

impl Fault {
    fn kills(&self) -> bool {
        matches!(self, Self::Killed { .. } | Self::Helper { how: HelperFault::IsOrphaned, .. })
    }

    /// Runs `istio-iptables` with the fault: what came of it, and whether the fault was met; nothing if it does not end.
    fn happen(&self, namespace: &Namespace, args: &str) -> Result<Option<(Output, bool)>> {
        let of_call = |name: &str, nth: usize, fault: &str| -> Result<_> {
            let strace = Strace::noting(name)?.alone().tampering(&format!("{name}:{fault}:when={nth}"));
            let command = strace.command(&istio_iptables_command(&words(args)));
            let Ok(output) = process::run(&mut namespace.command(&command), GIVEN_UP) else {
                return Ok(None);
            };
            let is_met = strace.trace()?.contains("INJECTED") || output.status.signal().is_some();
            Ok(Some((output, is_met)))
        };
        match self {
            Self::Refused { name, nth } => {
                let found = STEPS.iter().find(|(known, _)| known == name);
                let (_, error) = found.with_context(|| format!("{name} is not a step"))?;
                of_call(name, *nth, &format!("error={error}"))
            }
            Self::Killed { name, nth } => of_call(name, *nth, "signal=KILL"),
            Self::Helper { nth, how } => {
                let stubs = Stubs::new()?;
                let command = helpers(&stubs, Some((*nth, *how)))?.command(args);
                let Ok(output) = process::run(&mut namespace.command(&command), GIVEN_UP) else {
                    return Ok(None);
                };
                Ok(Some((output, stubs.read("met") == "met\n")))
            }
        }
    }
}

/// Helper programs that count themselves in the file `count`; one of them has a fault, and leaves the file `met`.
fn helpers(stubs: &Stubs, fault: Option<(usize, HelperFault)>) -> Result<&Stubs> {
    let (nth, then) = match fault {
        None => (0, ":"),
        Some((nth, HelperFault::Refuses)) => (nth, "echo refused >&2; exit 4"),
        Some((nth, HelperFault::FailsAfterwards)) => (nth, "REAL \"$@\"; echo failed afterwards >&2; exit 4"),
        Some((nth, HelperFault::IsOrphaned)) => (nth, "kill -KILL $PPID; exec REAL \"$@\""),
    };
    for program in HELPERS {
        let script = format!(
            "number=1; [ -e FOLDER/count ] && read -r number < FOLDER/count && number=$((number + 1))
            echo $number > FOLDER/count
            if [ $number = {nth} ]; then echo met > FOLDER/met; {then}; fi
            exec REAL \"$@\""
        );
        stubs.add(program, &script)?;
    }
    Ok(stubs)
}

/// What was left.
#[derive(Debug)]
enum Ending {
    /// It failed, and the namespace is as it was.
    AsBefore,
    /// It succeeded, fault or not.
    Wanted,
    /// It failed and named what is left.
    Told,
    /// It was killed, and the next run ended as wanted.
    Mended,
    /// This time there was no such step.
    Missed,
    Red(String),
}

/// How many of each, by change and kind of fault.
#[derive(Default)]
struct Tally(BTreeMap<(String, &'static str), [usize; 6]>);

const VERDICTS: [&str; 6] = ["as before", "as wanted", "told", "mended", "missed", "RED"];

impl Tally {
    fn add(&mut self, story: &Story, fault: &Fault, verdict: &Ending) {
        let kind = match fault {
            Fault::Refused { .. } => "call fails",
            Fault::Killed { .. } => "killed",
            Fault::Helper { .. } => "helper",
        };
        let column = match verdict {
            Ending::AsBefore => 0,
            Ending::Wanted => 1,
            Ending::Told => 2,
            Ending::Mended => 3,
            Ending::Missed => 4,
            Ending::Red(_) => 5,
        };
        self.0.entry((story.to_string(), kind)).or_default()[column] += 1;
    }

    /// Faults that were never met show nothing, nor does a program that always names what is left instead of undoing it.
    fn holds_enough(&self) -> Result<()> {
        let sum = |column: usize| self.0.values().map(|counts| counts[column]).sum::<usize>();
        let (all, missed, told) = ((0..6).map(sum).sum::<usize>(), sum(4), sum(2));
        if missed * 10 > all || told * 10 > all {
            bail!("of {all} faults {missed} were not met, {told} were not undone:\n{self}");
        }
        Ok(())
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, change: &str, kind: &str, cells: [String; 6]| {
            write!(f, "{change:32}{kind:12}")?;
            cells.iter().try_for_each(|cell| write!(f, "{cell:>10}"))?;
            writeln!(f)
        };
        row(f, "change", "fault", VERDICTS.map(str::to_owned))?;
        let mut sums = [0; 6];
        for ((change, kind), counts) in &self.0 {
            row(f, change, kind, counts.map(|count| count.to_string()))?;
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        row(f, "all", "", sums.map(|sum| sum.to_string()))
    }
}
