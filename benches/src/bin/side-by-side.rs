//! Whole processes against each other, each in a fresh network namespace, in turn: medians and their ratios.
//!
//! `side-by-side [ROUNDS]`; programs are taken from `BENCH_BIN`, rivals from `REFERENCE_ISTIO_IPTABLES`
//! and `REFERENCE_ISTIO_CNI`. Results go to `BENCH_OUT` (target/bench). Needs root.

#![allow(clippy::print_stdout)] // a table for people is what this program is for

use anyhow::{Context, Result, bail};
use benches::{
    plugin::{Plugin, Pod},
    report, usual_plan,
};
use redirect_core::{Family, options::NativeForm};
use std::{
    env, fs,
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use test_support::netns::{Families, Namespace};

/// What istio-iptables is called with: sidecar defaults for both families.
const ARGS: [&str; 9] = ["-i", "*", "-b", "*", "-d", "15090,15021,15020", "-u", "1337", "--dual-stack"];

fn main() -> Result<()> {
    let rounds: usize = env::args().nth(1).map_or(Ok(40), |text| text.parse()).context("ROUNDS")?;
    let folder = tempfile::tempdir()?;
    let contestants = contestants(folder.path())?;
    let mut times = vec![Vec::new(); contestants.len()];
    for _ in 0..rounds {
        for (contestant, times) in contestants.iter().zip(&mut times) {
            times.push(contestant.time()?);
        }
    }
    let medians: Vec<Duration> = times.into_iter().filter_map(report::median).collect();
    publish(&contestants, &medians, rounds)
}

type Commands = dyn Fn(&Namespace) -> Result<Vec<Command>>;

/// A program, or several one after the other.
struct Contestant {
    name: String,
    /// Makes the commands for a namespace.
    commands: Box<Commands>,
    /// Whether the commands run inside the namespace.
    inside: bool,
}

impl Contestant {
    fn inside(name: &str, commands: impl Fn() -> Result<Vec<Command>> + 'static) -> Self {
        Self { name: name.into(), commands: Box::new(move |_| commands()), inside: true }
    }

    fn outside(name: String, command: impl Fn(&Namespace) -> Result<Command> + 'static) -> Self {
        let commands = Box::new(move |namespace: &Namespace| Ok(vec![command(namespace)?]));
        Self { name, commands, inside: false }
    }

    /// How long it takes in a fresh namespace.
    fn time(&self) -> Result<Duration> {
        let namespace = Namespace::pod(Families::Dual)?;
        let (name, mut commands) = (&self.name, (self.commands)(&namespace)?);
        let mut run = || -> Result<Duration> {
            let start = Instant::now();
            for command in &mut commands {
                if !command.status().with_context(|| format!("cannot run {command:?}"))?.success() {
                    bail!("{name}: {command:?} failed");
                }
            }
            Ok(start.elapsed())
        };
        if self.inside { namespace.enter(run)? } else { run() }
    }
}

fn contestants(folder: &Path) -> Result<Vec<Contestant>> {
    let bin = benches::programs()?;
    let nothing = nothing(folder)?;
    // What istio-iptables makes of `ARGS`.
    let plan = usual_plan();
    let files = [
        write(folder, "v4", &plan.rules(Family::V4).restore_text())?,
        write(folder, "v6", &plan.rules(Family::V6).restore_text())?,
        write(folder, "nft", &plan.nft_text(NativeForm::Plain))?,
    ];
    let [v4, v6, nft] = files;
    let [saved_v4, saved_v6] = saved(folder, &bin.join("istio-iptables"))?;
    let mut all = vec![
        Contestant::inside("nothing (an empty static program)", move || Ok(vec![quiet(&nothing, &[])])),
        istio_iptables("istio-iptables", bin.join("istio-iptables"), &[]),
        istio_iptables(
            "istio-iptables --backend restore",
            bin.join("istio-iptables"),
            &["--backend", "restore"],
        ),
        istio_iptables(
            "istio-iptables --native-nftables",
            bin.join("istio-iptables"),
            &["--native-nftables"],
        ),
        restores("two restores of the plan", v4, v6),
        restores("two restores of what two saves print", saved_v4, saved_v6),
        Contestant::inside("nft -f", move || Ok(vec![fed("nft", &["-f", "-"], &nft)?])),
    ];
    if let Some(reference) = env::var_os("REFERENCE_ISTIO_IPTABLES") {
        all.push(istio_iptables("reference istio-iptables", reference.into(), &[]));
    }
    all.extend(plugins("istio-cni", &bin.join("istio-cni"), folder)?);
    // The reference asks the API server for every pod.
    let given = Plugin::with_agent(&bin.join("istio-cni"), &folder.join("agent"))?;
    let name = "istio-cni ADD, pod from the agent";
    all.push(Contestant::outside(name.to_owned(), move |namespace| given.add(Pod::Injected, namespace)));
    let passed = Plugin::with_annotations(&bin.join("istio-cni"), &folder.join("annotations"))?;
    let name = "istio-cni ADD, pod outside the mesh, annotations passed";
    all.push(Contestant::outside(name.to_owned(), move |namespace| passed.add(Pod::Plain, namespace)));
    if let Some(reference) = env::var_os("REFERENCE_ISTIO_CNI") {
        all.extend(plugins("reference istio-cni", Path::new(&reference), folder)?);
    }
    Ok(all)
}

fn istio_iptables(name: &str, program: PathBuf, more: &'static [&'static str]) -> Contestant {
    Contestant::inside(name, move || Ok(vec![quiet(&program, &[&ARGS, more].concat())]))
}

/// `iptables-nft-restore`, then `ip6tables-nft-restore`.
fn restores(name: &str, v4: PathBuf, v6: PathBuf) -> Contestant {
    Contestant::inside(name, move || {
        Ok(vec![
            fed("iptables-nft-restore", &["--noflush"], &v4)?,
            fed("ip6tables-nft-restore", &["--noflush"], &v6)?,
        ])
    })
}

/// The same rules as an operator has them: saved from a namespace they are in force in. Unlike the plan, this text declares the
/// kernel's own chains as well, which costs iptables a good deal.
fn saved(folder: &Path, istio_iptables: &Path) -> Result<[PathBuf; 2]> {
    let namespace = Namespace::pod(Families::Dual)?;
    let save = |program: &str| {
        let output = Command::new(program).output().with_context(|| format!("cannot run {program}"))?;
        write(folder, program, &String::from_utf8_lossy(&output.stdout))
    };
    namespace.enter(|| {
        if !quiet(istio_iptables, &ARGS).status()?.success() {
            bail!("{} failed", istio_iptables.display());
        }
        Ok([save("iptables-nft-save")?, save("ip6tables-nft-save")?])
    })?
}

fn plugins(name: &str, program: &Path, folder: &Path) -> Result<[Contestant; 4]> {
    let plugin = || Plugin::new(program, folder);
    let (version, skip, add) = (plugin()?, plugin()?, plugin()?);
    let remote = Plugin::with_server(program, &folder.join(format!("{name} with a server")))?;
    Ok([
        Contestant::outside(format!("{name} VERSION"), move |_| version.version()),
        Contestant::outside(format!("{name} ADD, pod without sidecar"), move |namespace| {
            skip.add(Pod::Plain, namespace)
        }),
        Contestant::outside(format!("{name} ADD, pod from a manifest"), move |namespace| {
            add.add(Pod::Injected, namespace)
        }),
        Contestant::outside(format!("{name} ADD, pod from an API server over TLS"), move |namespace| {
            remote.add(Pod::Injected, namespace)
        }),
    ])
}

fn quiet(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn fed(program: &str, args: &[&str], input: &Path) -> Result<Command> {
    let mut command = quiet(Path::new(program), args);
    command.stdin(File::open(input)?);
    Ok(command)
}

fn write(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    fs::write(&path, text)?;
    Ok(path)
}

/// Builds the program that does nothing: what starting and ending a process costs.
fn nothing(folder: &Path) -> Result<PathBuf> {
    let (source, program) = (write(folder, "nothing.rs", "fn main() {}\n")?, folder.join("nothing"));
    let flags = ["--edition=2024", "-Copt-level=s", "-Ctarget-feature=+crt-static", "-Cpanic=abort", "-o"];
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if !Command::new(rustc).args(flags).arg(&program).arg(source).status()?.success() {
        bail!("cannot build the empty program");
    }
    Ok(program)
}

fn publish(contestants: &[Contestant], medians: &[Duration], rounds: usize) -> Result<()> {
    let of = |name: &str| {
        let index = contestants.iter().position(|contestant| contestant.name.starts_with(name));
        index.and_then(|index| medians.get(index)).map_or(f64::NAN, Duration::as_secs_f64)
    };
    let bases = [of("nothing"), of("two restores of the plan"), of("two restores of what")];
    let mut text = format!("medians of {rounds} rounds, whole processes, fresh network namespaces\n\n");
    text += "| program | median | x nothing | x restores of the plan | x restores of saves |\n|---|---:|---:|---:|---:|\n";
    let mut values = Vec::new();
    for (contestant, median) in contestants.iter().zip(medians) {
        let seconds = median.as_secs_f64();
        let [nothing, planned, saved] = bases.map(|base| seconds / base);
        let milliseconds = seconds * 1e3;
        text += &format!(
            "| {} | {milliseconds:.2} ms | {nothing:.2} | {planned:.2} | {saved:.3} |\n",
            contestant.name
        );
        values.push((contestant.name.clone(), seconds * 1e3));
    }
    print!("{text}");
    let folder = report::folder()?;
    report::write(&folder, "side-by-side.md", &text)?;
    report::write(&folder, "side-by-side.svg", &report::bars("Whole processes, median", "ms", &values))
}
