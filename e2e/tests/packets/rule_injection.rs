//! No input makes a rule that the planner did not mean: hostile text in every setting, in `resolv.conf` and in names of interfaces, and the
//! kernel holds exactly the plan's rules, or what it held before and an error that says which setting is wrong.
//!
//! `INJECTIONS` says how many cases there are, `INJECTION_SEED` which ones.

use std::net::IpAddr;

use crate::injection_support::held::{self, Backend};
use crate::injection_support::hostile::{self, CANARY, INTERFACE_NAMES};
use anyhow::{Context, Result, ensure};
use e2e::iptables::{self, in_parallel};
use e2e::plugin::{Invocation, RunDir, sidecar};
use redirect_core::pod::{Decision, PodFacts};
use redirect_core::settings::{InputErrors, NamespaceFacts, Part, RawSettings, Setting, Source};
use redirect_core::{Redirect, RulePlan};
use serde_json::Value;
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, Snapshot};
use test_support::process::{self, Output};

const THREADS: usize = 3;
/// How many cases `make test` takes of each kind.
const CASES: usize = 40;

/// The seeds of the cases; the first one is printed, so that a run can be repeated.
#[allow(clippy::print_stdout, reason = "a run that found something can be repeated")]
fn seeds() -> Result<Vec<u64>> {
    let number = |name: &str| {
        std::env::var(name).ok().map(|text| text.parse::<u64>().context(name.to_owned())).transpose()
    };
    let (first, cases) =
        (number("INJECTION_SEED")?.unwrap_or(1), number("INJECTIONS")?.unwrap_or(CASES as u64));
    println!("{cases} cases from INJECTION_SEED={first} on");
    Ok((first..first.saturating_add(cases)).collect())
}

/// What a case came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    ToRules,
    ToAnError,
}

/// Plays cases; both ends have to be met, or the cases would show little.
#[allow(clippy::print_stdout, reason = "says what the cases came to")]
fn play(case: impl Fn(u64) -> Result<Came> + Sync) -> Result<()> {
    let seeds = seeds()?;
    let ends = std::sync::Mutex::new(Vec::new());
    let problems = in_parallel(THREADS, &seeds, |_, seed| {
        let came = case(*seed).with_context(|| format!("INJECTION_SEED={seed} INJECTIONS=1"))?;
        ends.lock().expect("ends").push(came);
        Ok(Vec::new())
    });
    ensure!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    let ends = ends.into_inner()?;
    let count = |wanted| ends.iter().filter(|came| **came == wanted).count();
    println!("{} came to rules, {} to an error", count(Came::ToRules), count(Came::ToAnError));
    ensure!(
        seeds.len() < CASES || count(Came::ToRules) > 5 && count(Came::ToAnError) > 5,
        "all cases are alike"
    );
    Ok(())
}

/// The settings that rules depend on.
fn settings() -> Vec<&'static Setting> {
    Setting::ALL.iter().filter(|setting| setting.part == Part::Plan).collect()
}

/// A pod's namespace with an interface of a hostile name, and what it holds.
fn namespace(dice: &mut Dice) -> Result<(Namespace, Snapshot)> {
    let namespace = Namespace::pod(Families::Dual)?;
    let add = process::command(
        "ip",
        ["link", "add", "name", dice.pick(INTERFACE_NAMES), "type", "veth", "peer", "name", "other"],
    );
    namespace.run(&add)?.ok()?;
    let before = namespace.snapshot()?;
    Ok((namespace, before))
}

#[test]
fn whatever_a_command_line_says_the_kernel_holds_the_plan_or_what_it_held() -> Result<()> {
    play(|seed| {
        let mut dice = Dice::new(seed);
        let (namespace, before) = namespace(&mut dice)?;
        let (resolv_conf, servers) = hostile::resolv_conf(&mut dice);
        namespace.set_resolv_conf(&resolv_conf)?;
        let backend = dice.pick(&Backend::ALL);
        let said = said(&mut dice);
        let folder = tempfile::tempdir()?;
        let output = run(&namespace, backend, &said, folder.path())?;
        ensure!(!folder.path().join(CANARY).exists(), "something ran a value: {said:?}");
        let wanted = planned(&namespace, &said, &servers)?;
        judge(&namespace, &before, backend, &output, wanted)
            .with_context(|| format!("{backend:?} {}", shown(&said)))
    })
}

/// Settings with hostile values, some as flags and some as variables. No argument can have a zero byte.
struct Said {
    setting: &'static Setting,
    value: String,
    is_flag: bool,
}

impl std::fmt::Debug for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown: String = self.value.chars().take(80).collect();
        write!(f, "{:?}={shown:?}", self.setting.key)
    }
}

fn shown(said: &[Said]) -> String {
    format!("{said:?}")
}

fn said(dice: &mut Dice) -> Vec<Said> {
    let (settings, mut said) = (settings(), Vec::<Said>::new());
    for _ in 0..=dice.below(3) {
        let setting = dice.pick(&settings);
        let value = hostile::value(setting, dice).replace('\0', "\n");
        let is_flag = setting.flag.is_some() && (setting.env.is_empty() || !dice.one_in(3));
        if (is_flag || !setting.env.is_empty()) && said.iter().all(|one| one.setting.key != setting.key) {
            said.push(Said { setting, value, is_flag });
        }
    }
    said
}

fn run(namespace: &Namespace, backend: Backend, said: &[Said], folder: &std::path::Path) -> Result<Output> {
    let flag =
        |one: &Said| one.setting.flag.filter(|_| one.is_flag).map(|flag| format!("--{flag}={}", one.value));
    let mut args: Vec<String> = said.iter().filter_map(flag).collect();
    args.extend(backend.flags().iter().map(|flag| (*flag).to_owned()));
    let env = said.iter().filter(|one| !one.is_flag);
    let env: Vec<(String, String)> =
        env.filter_map(|one| Some(((*one.setting.env.last()?).to_owned(), one.value.clone()))).collect();
    let mut command = iptables::with_environment(iptables::istio_iptables(), &args, &env);
    command.current_dir(folder);
    let mut command = namespace.command(&command);
    command.current_dir(folder);
    process::run(&mut command, process::SHORT)
}

/// The plan that the library makes of the same words, or what is wrong with them.
fn planned(namespace: &Namespace, said: &[Said], servers: &[&str]) -> Result<Result<RulePlan, InputErrors>> {
    let mut raw = RawSettings::new();
    raw.read_environment(
        |_| true,
        |name| {
            said.iter()
                .find(|one| !one.is_flag && one.setting.env.last() == Some(&name))
                .map(|one| one.value.clone())
        },
    );
    for one in said.iter().filter(|one| one.is_flag) {
        raw.set(one.setting.key, one.value.clone(), Source::Flag(one.setting.flag.unwrap_or_default()));
    }
    let addresses = namespace.enter(netns_apply::facts::addresses)??;
    let servers: Vec<IpAddr> = servers.iter().map(|server| server.parse()).collect::<Result<_, _>>()?;
    let facts =
        NamespaceFacts::new(&addresses).with_nameservers(&servers).with_names(&netns_apply::facts::NameFiles);
    Ok(Redirect::parse(&raw, &facts).map(|redirect| redirect.plan()))
}

fn judge(
    namespace: &Namespace,
    before: &Snapshot,
    backend: Backend,
    output: &Output,
    wanted: Result<RulePlan, InputErrors>,
) -> Result<Came> {
    is_safe(&output.stderr)?;
    match wanted {
        Ok(plan) => {
            ensure!(output.status.success(), "refused what the library takes: {}", output.stderr);
            held::is_exactly(namespace, &plan, backend)?;
            Ok(Came::ToRules)
        }
        Err(errors) => {
            ensure!(output.code() == Some(1), "{}: {}", output.status, output.stderr);
            for error in &errors {
                ensure!(
                    output.stderr.contains(&error.to_string()),
                    "{error} is not told:\n{}",
                    output.stderr
                );
            }
            unchanged(namespace, before)?;
            Ok(Came::ToAnError)
        }
    }
}

fn unchanged(namespace: &Namespace, before: &Snapshot) -> Result<()> {
    let changes = namespace.snapshot()?.changes_since(before);
    ensure!(changes.is_empty(), "refused, and yet changed: {changes:?}");
    Ok(())
}

/// Nothing that steers a terminal, and nothing that turns the direction of writing.
fn is_safe(log: &str) -> Result<()> {
    let is_harmful = |c: &char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let harmful: Vec<char> = log.chars().filter(is_harmful).collect();
    ensure!(harmful.is_empty(), "the log has {harmful:?}: {log:?}");
    Ok(())
}

#[test]
fn whatever_a_pod_says_the_kernel_holds_the_plan_or_what_it_held() -> Result<()> {
    play(|seed| {
        let mut dice = Dice::new(seed);
        let (namespace, before) = namespace(&mut dice)?;
        let annotated: Vec<&Setting> =
            Setting::ALL.iter().filter(|setting| !setting.annotations.is_empty()).collect();
        let mut annotations = Vec::new();
        for _ in 0..=dice.below(3) {
            let setting = dice.pick(&annotated);
            annotations.push((dice.pick(setting.annotations), hostile::value(setting, &mut dice)));
        }
        let words: Vec<(&str, &str)> =
            annotations.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let pod = sidecar("web", &words);
        let (run_dir, backend) =
            (RunDir::new()?, dice.pick(&[Backend::Netlink, Backend::Native, Backend::Sets]));
        run_dir.write_manifest("web.json", &pod)?;
        let mut conf = run_dir.manifest_conf();
        conf["native_nftables"] = Value::from(backend != Backend::Netlink);
        conf["nft_sets"] = Value::from(backend == Backend::Sets);
        let answer = Invocation::new("ADD", &conf).netns(&namespace).pod("default", "web").run()?;
        let shown = || format!("{backend:?} {:.300}", format!("{words:?}"));
        added(&namespace, &before, backend, &words, &answer.0).with_context(shown)
    })
}

fn added(
    namespace: &Namespace,
    before: &Snapshot,
    backend: Backend,
    words: &[(&str, &str)],
    output: &Output,
) -> Result<Came> {
    is_safe(&output.stderr)?;
    is_safe(&output.stdout)?;
    let addresses = namespace.enter(netns_apply::facts::addresses)??;
    let facts = NamespaceFacts::new(&addresses).with_names(&netns_apply::facts::NameFiles);
    match PodFacts::sidecar(words.iter().copied()).decide(&facts) {
        Ok(Decision::Redirect(redirect)) => {
            ensure!(output.status.success(), "refused what the library takes: {}", output.stdout);
            held::is_exactly(namespace, &redirect.plan(), backend)?;
            Ok(Came::ToRules)
        }
        Ok(_) => {
            ensure!(output.status.success(), "a pod to be left alone is refused: {}", output.stdout);
            unchanged(namespace, before)?;
            Ok(Came::ToAnError)
        }
        Err(errors) => {
            let answer: Value = serde_json::from_str(&output.stdout)?;
            let message = answer["msg"].as_str().context("a message")?;
            for error in &errors {
                ensure!(message.contains(&error.to_string()), "{error} is not told: {message}");
            }
            unchanged(namespace, before)?;
            Ok(Came::ToAnError)
        }
    }
}

#[test]
fn one_rule_more_is_noticed_whatever_the_backend() -> Result<()> {
    for backend in Backend::ALL {
        let namespace = Namespace::pod(Families::Dual)?;
        let folder = tempfile::tempdir()?;
        run(&namespace, backend, &[], folder.path())?.ok()?;
        let plan = planned(&namespace, &[], &[])?.map_err(|errors| anyhow::anyhow!("{errors}"))?;
        held::is_exactly(&namespace, &plan, backend)?;
        let more = match backend {
            Backend::Netlink | Backend::RestoreNft => "iptables-nft -t nat -A OUTPUT -p tcp -j ACCEPT",
            Backend::RestoreLegacy => "iptables-legacy -t nat -A OUTPUT -p tcp -j ACCEPT",
            Backend::Native | Backend::Sets => "nft add rule inet istio-proxy-nat output accept",
        };
        namespace.sh(more)?;
        ensure!(held::is_exactly(&namespace, &plan, backend).is_err(), "{backend:?}: {more} is not noticed");
    }
    Ok(())
}
