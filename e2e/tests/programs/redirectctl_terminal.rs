//! `redirectctl` on a terminal: nothing is wider than it, colours are there and nowhere else, and `watch` gives it back as it was.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::redirectctl::{self, Patient, command, redirectctl};
use e2e::terminal::{Terminal, plain};
use serde_json::json;
use test_support::netns::NetnsDirectory;
use test_support::process::{self, Background, until};

const PATIENCE: Duration = Duration::from_secs(180);
const WIDTH: u16 = 80;
/// What xterm's control sequences call the alternate screen, and the cursor.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";
const GREEN: &str = "\u{1b}[32m";

/// What a command writes to a terminal of eighty columns.
fn on_a_terminal(args: &[&str], env: &[(&str, &str)]) -> Result<String> {
    let terminal = Terminal::new(WIDTH, 24)?;
    let program = terminal.start(command(args).envs(env.iter().copied()))?;
    program.wait(PATIENCE)?;
    terminal.to_the_end()
}

fn widest(text: &str) -> usize {
    plain(text).lines().map(|line| line.trim_end_matches('\r').chars().count()).max().unwrap_or(0)
}

/// A pod with several things wrong, so that there is much to say, and a name as long as names get.
struct Sick {
    patient: Patient,
    runtime: NetnsDirectory,
    pods: String,
    name: String,
    netns: String,
}

impl Sick {
    fn new(number: u8) -> Result<Self> {
        let patient = redirectctl::patient("foreign drop", number)?;
        patient.namespace().sh("iptables -t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT")?.ok()?;
        let runtime = NetnsDirectory::of([patient.namespace()])?;
        let pods = patient.manifest()?;
        let name = format!("default/web-{number}");
        let netns = patient.namespace().path().display().to_string();
        Ok(Self { patient, runtime, pods, name, netns })
    }

    /// Every command that has text for people, and whether that text has something to colour.
    fn commands(&self) -> Result<Vec<(Vec<String>, bool)>> {
        let (pods, netns) = (self.pods.as_str(), self.netns.as_str());
        let directory = self.runtime.path().display().to_string();
        let mut other = self.patient.pod().clone();
        other["metadata"]["annotations"]["traffic.sidecar.istio.io/excludeOutboundPorts"] =
            "3306,5432:5440".into();
        let changed = format!("{pods}.changed");
        fs::write(&changed, json!({"kind": "List", "items": [other]}).to_string())?;
        let none = "/nonexistent";
        let all: &[(&[&str], bool)] = &[
            (&["pod", &self.name, "-f", pods, "--netns-dir", &directory, "--cni-conf-dir", none], true),
            (&["scan", "-f", pods, "--netns-dir", &directory, "--cni-conf-dir", none], false),
            (&["netns", netns, "-f", pods], true),
            (&["verify", "--netns", netns, "-f", pods], true),
            (&["trace", "-f", pods, "--to", "198.51.100.1:443", "--every"], false),
            (&["trace", "--netns", netns, "-f", pods, "--to", "198.51.100.1:80", "--every"], false),
            (&["plan", "-f", pods], true),
            (&["diff", pods, &changed], true),
            (&["watch", "--netns", netns, "-f", pods, "--cni-conf-dir", none, "--once"], true),
            (&["why", "foreign-rule"], true),
            (&["why"], true),
        ];
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        Ok(all.iter().map(|(words, inked)| (owned(words), *inked)).collect())
    }
}

#[test]
fn nothing_is_wider_than_the_terminal_and_colours_are_there_only() -> Result<()> {
    let sick = Sick::new(51)?;
    for (words, inked) in sick.commands()? {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let shown = on_a_terminal(&words, &[])?;
        ensure!(widest(&shown) <= WIDTH.into(), "{words:?} is {} wide:\n{shown}", widest(&shown));
        ensure!(plain(&shown).lines().count() > 2, "{words:?} says little: {shown}");
        ensure!(shown.contains('\u{1b}') == inked, "{words:?}: colours, or none: {shown:?}");
        let piped = redirectctl(&words)?;
        ensure!(!piped.stdout.contains('\u{1b}') && piped.stderr.is_empty(), "{words:?}: {piped:?}");
        assert_eq!(plain(&shown).replace("\r\n", "\n"), piped.stdout, "{words:?}: the same words");
    }
    Ok(())
}

#[test]
fn help_is_as_wide_as_the_terminal() -> Result<()> {
    for words in [&["--help"][..], &["scan", "--help"], &["plan", "--help"], &["bundle", "--help"]] {
        let shown = on_a_terminal(words, &[])?;
        // An example is one line, because it is copied.
        let broken =
            shown.lines().filter(|line| widest(line) > WIDTH.into() && !line.starts_with("  kubectl"));
        let broken: Vec<&str> = broken.filter(|line| !line.starts_with("  redirectctl")).collect();
        ensure!(broken.is_empty() && shown.contains("redirectctl"), "{words:?}: {broken:#?}");
    }
    Ok(())
}

#[test]
fn who_says_what_is_coloured_is_obeyed() -> Result<()> {
    fn coloured<'a>(args: &[&'a str]) -> Vec<&'a str> {
        [&["why", "foreign-rule"], args].concat()
    }
    for (args, env, inked) in [
        (vec![], vec![], true),
        (vec![], vec![("NO_COLOR", "1")], false),
        (vec![], vec![("TERM", "dumb")], false),
        (vec!["--color", "never"], vec![], false),
        (vec!["--color", "always"], vec![("NO_COLOR", "1")], true),
    ] {
        let shown = on_a_terminal(&coloured(&args), &env)?;
        ensure!(shown.contains('\u{1b}') == inked, "{args:?} {env:?}: {shown:?}");
    }
    ensure!(redirectctl(&coloured(&["--color", "always"]))?.ok()?.stdout.contains('\u{1b}'));
    let wrong = redirectctl(&coloured(&["--color", "pink"]))?;
    ensure!(wrong.code() == Some(1) && wrong.stderr.contains("--color"), "{wrong:?}");
    Ok(())
}

/// `watch` on a terminal, which draws again only when it is told to: the next look is an hour away.
fn watching(terminal: &Terminal, patient: &Patient, interval: &str) -> Result<e2e::terminal::Program> {
    let netns = patient.namespace().path().display().to_string();
    let manifest = patient.manifest()?;
    let args = [
        "watch",
        "--netns",
        &netns,
        "-f",
        &manifest,
        "--cni-conf-dir",
        "/nonexistent",
        "--interval",
        interval,
    ];
    let program = terminal.start(&command(&args))?;
    wait_for(terminal, "the rules", |text| text.ends_with("\u{1b}[J"))?;
    Ok(program)
}

fn wait_for(terminal: &Terminal, what: &str, is_there: impl Fn(&str) -> bool) -> Result<String> {
    until(what, PATIENCE, &[], || Ok(Some(terminal.written()).filter(|text| is_there(text))))
        .with_context(|| format!("{:?}", terminal.written()))
}

#[test]
fn a_watch_draws_in_colour_and_leaves_the_terminal_as_it_was() -> Result<()> {
    let patient = redirectctl::patient("redirected", 52)?;
    let terminal = Terminal::new(WIDTH, 24)?;
    let before = terminal.settings()?;
    let program = watching(&terminal, &patient, "100ms")?;
    let drawn = terminal.written();
    ensure!(drawn.starts_with(ENTER) && drawn.contains("ISTIO_OUTPUT"), "{drawn:?}");
    patient.namespace().sh("timeout 60 bash -c '</dev/tcp/10.1.52.9/80' 2>/dev/null || true")?.ok()?;
    wait_for(&terminal, "a rule that counts, in green", |text| {
        text.split(GREEN).skip(1).any(|line| line.contains("--to-ports 15001"))
    })?;
    terminal.press("\u{3}")?;
    ensure!(program.wait(PATIENCE)?.success());
    let written = wait_for(&terminal, "the end", |text| text.ends_with(LEAVE))?;
    for screen in written.split("\u{1b}[H") {
        ensure!(widest(screen) <= WIDTH.into(), "{screen:?}");
        ensure!(screen.matches("\r\n").count() < 24, "{screen:?}");
    }
    assert_eq!(terminal.settings()?, before);
    Ok(())
}

#[test]
fn a_terminal_of_another_size_is_drawn_at_once() -> Result<()> {
    let patient = redirectctl::patient("redirected", 53)?;
    let terminal = Terminal::new(WIDTH, 24)?;
    let program = watching(&terminal, &patient, "1h")?;
    let drawn = terminal.written().len();
    terminal.resize(50, 10)?;
    wait_for(&terminal, "a smaller screen", |text| {
        let drawings: Vec<&str> = text[drawn..].split_inclusive("\u{1b}[J").collect();
        drawings.last().is_some_and(|screen| {
            screen.ends_with("\u{1b}[J") && widest(screen) <= 50 && screen.matches("\r\n").count() < 10
        })
    })?;
    terminal.press("\u{3}")?;
    ensure!(program.wait(PATIENCE)?.success());
    Ok(())
}

#[test]
fn a_watch_that_is_suspended_gives_the_terminal_back_meanwhile() -> Result<()> {
    let patient = redirectctl::patient("redirected", 54)?;
    let terminal = Terminal::new(WIDTH, 24)?;
    let program = watching(&terminal, &patient, "1h")?;
    terminal.press("\u{1a}")?;
    wait_for(&terminal, "the terminal as it was", |text| text.ends_with(LEAVE))?;
    let stat = format!("/proc/{}/stat", program.id());
    until("the process to stop", PATIENCE, &[], || {
        Ok(fs::read_to_string(&stat)?.contains(") T ").then_some(()))
    })?;
    process::run(&mut process::command("kill", ["-CONT", &program.id().to_string()]), PATIENCE)?.ok()?;
    let again = wait_for(&terminal, "the rules again", |text| text.ends_with("\u{1b}[J"))?;
    ensure!(again.matches(ENTER).count() == 2, "{again:?}");
    process::run(&mut process::command("kill", [program.id().to_string()]), PATIENCE)?.ok()?;
    ensure!(program.wait(PATIENCE)?.success());
    wait_for(&terminal, "the end", |text| text.ends_with(LEAVE)).map(drop)
}

#[test]
fn a_watch_whose_namespace_goes_says_so_where_one_sees_it() -> Result<()> {
    let patient = redirectctl::patient("plugin never ran", 55)?;
    let terminal = Terminal::new(WIDTH, 24)?;
    let program = watching(&terminal, &patient, "100ms")?;
    drop(patient);
    ensure!(program.wait(PATIENCE)?.success());
    let end = format!("{LEAVE}the network namespace is gone\r\n");
    wait_for(&terminal, "the reason", |text| text.ends_with(&end)).map(drop)
}

#[test]
fn a_watch_into_a_pipe_is_plain() -> Result<()> {
    let patient = redirectctl::patient("redirected", 56)?;
    let netns = patient.namespace().path().display().to_string();
    let log = tempfile::NamedTempFile::new()?;
    let process = Background::start(
        "watch",
        &command(&["watch", "--netns", &netns, "--interval", "100ms"]),
        log.path(),
    )?;
    until("the first line", PATIENCE, &[&process], || Ok(process.log().contains("rules of").then_some(())))?;
    patient.namespace().sh("timeout 60 bash -c '</dev/tcp/10.1.56.9/80' 2>/dev/null || true")?.ok()?;
    let counted = until("a rule that counts", PATIENCE, &[&process], || {
        Ok(Some(process.log()).filter(|log| log.contains("ISTIO_REDIRECT 1: ")))
    })?;
    ensure!(!counted.contains('\u{1b}') && !counted.contains('\r'), "{counted:?}");
    Ok(())
}
