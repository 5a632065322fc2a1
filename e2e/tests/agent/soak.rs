//! Round after round, network namespaces of pods are programmed, checked, programmed otherwise, damaged, healed and cleaned, while programs are killed at
//! random moments: nothing is lost, nothing is left over, and the agents that stay do not grow. SOAK says how many namespaces, SOAK_ROUNDS how many
//! rounds, SOAK_SEED brings back the chances of another run; `make soak` takes 2,000 and prints its figures. Needs root.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::soak_support::programs::{Call, Count, istio_iptables};
use crate::soak_support::{NODES, Place, Pod, THREADS, files, is_tproxy, sh};
use anyhow::{Context, Result, ensure};
use e2e::agent::{Agent, memory_kib};
use e2e::killing::Moments;
use e2e::pods::{LIMIT, deletions, metric, wait};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_child_subreaper;
use redirect_core::options::BackendChoice;
use test_support::dice::Dice;
use test_support::parallel::{in_parallel, on_a_thread};
use test_support::process::{SHORT, children, until};
use test_support::sample;

/// How many namespaces `make test` takes, two of each node, and how many rounds; at least three are needed to see what grows.
const NAMESPACES: usize = 8;
const ROUNDS: usize = 3;
/// Where programs might leave files.
const FOLDERS: [&str; 2] = ["/tmp", "/run"];
const WATCHED: &str = "istio_cni_heal_watched_pods";

/// What was done.
#[derive(Default)]
struct Tally {
    programmed: Count,
    checked: Count,
    reconciled: Count,
    damaged: Count,
    cleaned: Count,
    kills: Count,
    agents_killed: Count,
}

/// All nodes, and what runs there.
struct Soak<'p> {
    places: &'p [Place],
    /// Each at the place of its node.
    agents: Vec<Agent<'p>>,
    dice: Dice,
    adding: Moments,
    cleaning: Moments,
    istio_iptables: PathBuf,
    tally: Tally,
}

impl<'p> Soak<'p> {
    fn new(places: &'p [Place], agents: Vec<Agent<'p>>, dice: Dice) -> Result<Self> {
        let [first, ..] = places else { anyhow::bail!("no node") };
        let istio_iptables = istio_iptables()?;
        let pod = Pod::new(places.iter().map(|place| place.pods.len()).max().unwrap_or_default())?;
        first.announce(&pod, 0, &[]);
        let adding = Moments::of(|| first.plugin("ADD", &pod)?.run().map(drop))?;
        let cleanup = || Call::of_cleanup(&istio_iptables, &pod.namespace.path()).run().map(drop);
        let cleaning = Moments::of(cleanup)?;
        Ok(Self { places, agents, dice, adding, cleaning, istio_iptables, tally: Tally::default() })
    }

    /// Works on every pod of every node, with chances of its own for each; returns the problems.
    fn everywhere(
        &mut self,
        work: impl Fn(&Self, &Place, &Pod, &mut Dice) -> Result<Vec<String>> + Sync,
    ) -> Vec<String> {
        let pods: Vec<(&Place, &Pod)> =
            self.places.iter().flat_map(|place| place.pods.iter().map(move |pod| (place, pod))).collect();
        self.dice.next();
        let soak = &*self;
        in_parallel(THREADS, &pods, |index, (place, pod)| {
            work(soak, place, pod, &mut soak.dice.branch(index))
                .with_context(|| format!("{} of a node with {:?}", pod.name(), place.form))
        })
    }

    /// Pods start; before they run their annotations are changed, and they are programmed again.
    fn program(&mut self, round: usize) -> Vec<String> {
        self.everywhere(|soak, place, pod, dice| {
            let (later, at_first) = pod.annotations(round);
            for (annotations, count) in [(at_first, &soak.tally.programmed), (later, &soak.tally.reconciled)]
            {
                place.announce(pod, round, annotations);
                place.plugin("ADD", pod)?.insist(dice, &soak.adding, &soak.tally.kills)?;
                count.one_more();
                place.plugin("CHECK", pod)?.run()?;
                soak.tally.checked.one_more();
            }
            Ok(Vec::new())
        })
    }

    /// All pods run, and all agents listen to theirs.
    fn begin(&self, round: usize) -> Result<()> {
        self.places.iter().try_for_each(|place| place.begin(round))?;
        self.wait_watched(|place| place.pods.len());
        Ok(())
    }

    fn wait_watched(&self, wanted: impl Fn(&Place) -> usize) {
        for place in self.places {
            let wanted = f64::from(u32::try_from(wanted(place)).expect("few"));
            wait(&place.node, &format!("{WATCHED} to be {wanted}"), || {
                metric(&place.node, WATCHED) == Some(wanted)
            });
        }
    }

    /// Another program deletes a part of every pod's rules. Half-way some agents are killed; they start again when it is done.
    fn damage(&mut self, round: usize) -> Vec<String> {
        let half = |is_second: bool| {
            move |soak: &Self, place: &Place, pod: &Pod, dice: &mut Dice| {
                if pod.is_odd() == is_second {
                    let is_native = place.form.choice == BackendChoice::NativeNft;
                    let deletions = deletions(is_native, is_tproxy(pod.annotations(round).0));
                    sh(&pod.namespace, dice.pick(deletions))?;
                    soak.tally.damaged.one_more();
                }
                Ok(Vec::new())
            }
        };
        let mut problems = self.everywhere(half(false));
        let killed: Vec<usize> =
            (0..self.places.len()).filter(|at| self.places[*at].form.is_killed).collect();
        for at in &killed {
            self.agents[*at].kill_now();
            self.tally.agents_killed.one_more();
        }
        problems.extend(self.everywhere(half(true)));
        for at in killed {
            self.agents[at] = self.places[at].node.start_ready();
        }
        problems
    }

    /// Waits until every pod is as planned again; what was lost for ever, or came beside it.
    fn healed(&mut self, round: usize) -> Vec<String> {
        self.everywhere(|_, place, pod, _| {
            let (wanted, _) = pod.annotations(round);
            // A run holds its lock for a moment longer than its last transaction takes.
            until("the pod to be as planned, and not locked", LIMIT, &[], || {
                Ok((place.mismatch(pod, wanted).is_none() && !pod.is_locked()?).then_some(()))
            })?;
            place.lost(pod, wanted)
        })
    }

    /// Pods end.
    fn end(&self) -> Result<()> {
        self.places.iter().try_for_each(Place::end)?;
        self.wait_watched(|_| 0);
        Ok(())
    }

    /// Takes all redirection away; what is left over.
    fn clean(&mut self) -> Vec<String> {
        self.everywhere(|soak, place, pod, dice| {
            place.plugin("DEL", pod)?.run()?;
            let mut cleanup = Call::of_cleanup(&soak.istio_iptables, &pod.namespace.path());
            cleanup.insist(dice, &soak.cleaning, &soak.tally.kills)?;
            soak.tally.cleaned.one_more();
            let left = pod.difference()?;
            Ok(left.into_iter().map(|left| format!("{}: {left}", pod.name())).collect())
        })
    }

    fn sample(&self) -> Vec<Sample> {
        self.agents.iter().map(|agent| Sample::of(agent.id())).collect()
    }
}

/// What a process has at a moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    memory_kib: u64,
    descriptors: u64,
}

impl Sample {
    fn of(process: u32) -> Self {
        let descriptors = fs::read_dir(format!("/proc/{process}/fd")).expect("a process").count();
        Self { memory_kib: memory_kib(process, "VmRSS:"), descriptors: descriptors as u64 }
    }
}

/// How far a later round goes beyond the first two, in which everything happens for the first time; none if that is at most a tenth, or
/// `slack`.
fn growth(series: &[u64], slack: u64) -> Option<u64> {
    let (first, later) = series.split_at(series.len().min(2));
    let plateau = first.iter().copied().max().unwrap_or_default();
    let grown = later.iter().copied().max().unwrap_or_default().saturating_sub(plateau);
    (grown > slack.max(plateau / 10)).then_some(grown)
}

/// All that programs could leave on the machine: files, mounts, processes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Belongings(BTreeSet<String>);

impl Belongings {
    fn now() -> Result<Self> {
        let mut all: BTreeSet<String> = BTreeSet::new();
        for folder in FOLDERS {
            all.extend(files(Path::new(folder))?.into_iter().map(|name| format!("file {name}")));
        }
        // With their numbers: one may lie over another that looks the same.
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
        all.extend(mounts.lines().map(|line| format!("mount {line}")));
        Ok(Self(all))
    }

    fn beyond(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }
}

/// Processes that live, except our agents.
fn strays(agents: &[Agent<'_>]) -> Result<Vec<String>> {
    let is_agent = |child: &str| agents.iter().any(|agent| child.starts_with(&format!("{} (", agent.id())));
    // What a killed program has started may still be on its way out.
    let mut strays = Vec::new();
    let gone = until("the last processes to end", SHORT, &[], || {
        strays = children()?;
        strays.retain(|child| !is_agent(child));
        Ok(strays.is_empty().then_some(()))
    });
    Ok(gone.map_or_else(|_| strays.iter().map(|stray| format!("process {stray}")).collect(), |()| Vec::new()))
}

/// Works where other programs do not write files or mount anything: in mounts of its own, with empty folders in the place of the machine's, which go with
/// the thread.
fn alone<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    // Cargo writes where it likes.
    let programs = e2e::program::built()?;
    // What a program leaves running becomes this process's child.
    set_child_subreaper(true)?;
    on_a_thread(|| {
        unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)?;
        let none = None::<&Path>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        let kept = fs::File::open(&programs)?;
        for folder in FOLDERS {
            mount(Some("none"), folder, Some("tmpfs"), MsFlags::empty(), none)?;
        }
        // The programs stay where they are, also if that is below one of these.
        if FOLDERS.iter().any(|folder| programs.starts_with(folder)) {
            fs::create_dir_all(&programs)?;
            let open = format!("/proc/thread-self/fd/{}", kept.as_raw_fd());
            mount(Some(open.as_str()), &programs, none, MsFlags::MS_BIND, none)?;
        }
        work()
    })
}

fn places(namespaces: usize) -> Result<Vec<Place>> {
    let of_place = |at: usize| namespaces / NODES.len() + usize::from(at < namespaces % NODES.len());
    (0..).zip(NODES).map(|(at, form)| Place::new(form, of_place(at))).collect()
}

/// Only an agent makes the plugin's configuration; but what is learnt with it is not for an agent to see.
fn learn(places: &mut [Place]) -> Result<()> {
    for place in places {
        place.node.start_ready().kill();
        place.learn()?;
    }
    Ok(())
}

fn start(places: &[Place]) -> Vec<Agent<'_>> {
    places.iter().map(|place| place.node.start_ready()).collect()
}

#[expect(clippy::print_stdout, reason = "the figures are what `make soak` is for")]
fn soak(namespaces: usize, rounds: usize) -> Result<()> {
    let begun = Instant::now();
    let dice = Dice::of_this_run("SOAK_SEED");
    println!("SOAK_SEED={}: {namespaces} namespaces, {rounds} rounds", dice.seed());
    let mut places = places(namespaces)?;
    learn(&mut places)?;
    let mut soak = Soak::new(&places, start(&places), dice)?;
    let at_first = Belongings::now()?;
    println!("{:?}: all namespaces and agents are there; kernel: {}", begun.elapsed(), kernel_memory());
    let (mut lost, mut left) = (Vec::new(), Vec::new());
    let (mut busy, mut idle) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        lost.extend(soak.program(round));
        soak.begin(round)?;
        lost.extend(soak.damage(round));
        lost.extend(soak.healed(round));
        soak.wait_watched(|place| place.pods.len());
        busy.push(soak.sample());
        soak.end()?;
        left.extend(soak.clean());
        left.extend(strays(&soak.agents)?);
        left.extend(Belongings::now()?.beyond(&at_first));
        idle.push(soak.sample());
        println!(
            "{:?}: round {}: {} lost, {} left over; kernel: {}",
            begun.elapsed(),
            round + 1,
            lost.len(),
            left.len(),
            kernel_memory()
        );
    }
    let grown = report(&soak, &[("at work", busy), ("at rest", idle)]);
    println!("in {:?}: {} lost, {} left over", begun.elapsed(), lost.len(), left.len());
    ensure!(
        lost.is_empty() && left.is_empty(),
        "lost:\n{}\nleft over:\n{}",
        lost.join("\n"),
        left.join("\n")
    );
    ensure!(grown.is_empty(), "{}", grown.join("\n"));
    let tally = &soak.tally;
    ensure!(tally.damaged.get() == namespaces * rounds, "not every namespace was damaged");
    ensure!(tally.kills.get() > 0 && tally.agents_killed.get() > 0, "nothing was killed");
    Ok(())
}

/// Prints what was done, and what the agents had; what grew.
#[expect(clippy::print_stdout, reason = "the figures are what `make soak` is for")]
fn report(soak: &Soak<'_>, moments: &[(&str, Vec<Vec<Sample>>)]) -> Vec<String> {
    let tally = &soak.tally;
    println!(
        "{} programmed, {} programmed otherwise, {} checked, {} damaged and healed, {} cleaned; {} runs and {} agents killed",
        tally.programmed.get(),
        tally.reconciled.get(),
        tally.checked.get(),
        tally.damaged.get(),
        tally.cleaned.get(),
        tally.kills.get(),
        tally.agents_killed.get()
    );
    let mut grown = Vec::new();
    for (at, place) in soak.places.iter().enumerate() {
        for (moment, samples) in moments {
            let memory: Vec<u64> = samples.iter().map(|round| round[at].memory_kib).collect();
            let descriptors: Vec<u64> = samples.iter().map(|round| round[at].descriptors).collect();
            let whose = format!("agent {at} ({:?}), {} pods, {moment}", place.form, place.pods.len());
            println!("{whose}: resident KiB {memory:?}, descriptors {descriptors:?}");
            let beyond = [
                growth(&memory, 2048).map(|kib| format!("{kib} KiB")),
                // At work, a sample may meet pods that are being healed.
                growth(&descriptors, 4)
                    .filter(|_| *moment == "at rest")
                    .map(|more| format!("{more} descriptors")),
            ];
            grown.extend(beyond.into_iter().flatten().map(|more| format!("{whose} grew by {more}")));
        }
    }
    grown
}

/// What the kernel has for itself. Others on the machine have their share in it.
fn kernel_memory() -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let is_kernels =
        |line: &&str| ["Slab:", "Percpu:", "MemAvailable:"].iter().any(|name| line.starts_with(name));
    let lines =
        text.lines().filter(is_kernels).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join(", ")
}

#[test]
fn nothing_is_lost_or_left_over_and_memory_stays() -> Result<()> {
    let (namespaces, rounds) = (sample::number("SOAK", NAMESPACES), sample::number("SOAK_ROUNDS", ROUNDS));
    ensure!(rounds >= 3, "what grows is seen from the third round on");
    alone(|| soak(namespaces, rounds))
}

/// A soak without findings proves something only if it finds seeded faults.
#[test]
fn the_soak_sees_what_is_lost_and_what_is_left_over() -> Result<()> {
    alone(|| {
        let mut places = [Place::new(NODES[0], 2)?];
        learn(&mut places)?;
        let mut soak = Soak::new(&places, start(&places), Dice::new(1))?;
        let at_first = Belongings::now()?;
        assert_eq!(soak.program(0), [""; 0]);
        let place = &places[0];
        let lost = |pod: &Pod| place.lost(pod, pod.annotations(0).0);
        let [one, other] = &place.pods[..] else { anyhow::bail!("two pods") };
        assert_eq!(lost(one)?, [""; 0]);
        one.namespace.sh("iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT")?;
        assert!(lost(one)?.concat().contains("-A OUTPUT -j ISTIO_OUTPUT"), "{:?}", lost(one)?);
        other.namespace.sh("iptables-nft -t filter -D FORWARD -p tcp --dport 7 -j ACCEPT")?;
        assert!(lost(other)?.concat().contains("beside: - "), "{:?}", lost(other)?);

        assert!(!other.is_locked()?);
        other.namespace.sh("nft add table inet istio-proxy-lock")?;
        assert!(other.is_locked()?);
        other.namespace.sh("nft delete table inet istio-proxy-lock")?;

        other.namespace.sh("iptables-nft -t filter -A FORWARD -p tcp --dport 7 -j ACCEPT")?;
        assert_eq!(soak.clean(), [""; 0]);
        one.namespace
            .sh("ip rule add fwmark 0x539 lookup 133; nft add set ip nat left '{ type inet_service; }'")?;
        let left = one.difference()?;
        assert!(
            left.len() == 3 && left[0].contains("lookup 133") && left[1].contains("set left"),
            "{left:?}"
        );

        assert_eq!(Belongings::now()?.beyond(&at_first), [""; 0]);
        fs::write("/run/left.lock", "")?;
        mount(Some("none"), "/tmp", Some("tmpfs"), MsFlags::empty(), None::<&Path>)?;
        let beyond = Belongings::now()?.beyond(&at_first);
        assert_eq!(beyond.len(), 2, "{beyond:?}");
        nix::mount::umount("/tmp")?;
        Ok(())
    })
}

#[test]
fn growth_is_what_goes_on_after_the_second_round() {
    assert_eq!(growth(&[10_000, 12_000, 12_100], 50), None, "a tenth");
    assert_eq!(growth(&[10_000, 12_000, 12_100, 13_300], 50), Some(1_300));
    assert_eq!(growth(&[30, 30, 34], 4), None);
    assert_eq!(growth(&[30, 30, 35], 4), Some(5));
    assert_eq!(growth(&[30, 40], 0), None);
}
