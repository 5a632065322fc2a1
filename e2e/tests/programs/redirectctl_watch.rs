//! `redirectctl watch`: what rules count is reported while it happens, in every backend; nothing is changed, and no dead namespace is kept.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::redirectctl::{self, program, redirectctl};
use e2e::traffic::TcpServer;
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Background};

const PATIENCE: Duration = Duration::from_secs(180);
const LEGACY: &str = "iptables-legacy -t nat -N ISTIO_REDIRECT; \
    iptables-legacy -t nat -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001; \
    iptables-legacy -t nat -N ISTIO_OUTPUT; iptables-legacy -t nat -A ISTIO_OUTPUT -j ISTIO_REDIRECT; \
    iptables-legacy -t nat -A OUTPUT -p tcp -j ISTIO_OUTPUT";

/// `redirectctl watch` in the background, whose lines are documents.
struct Watching {
    process: Background,
    _folder: TempDir,
}

impl Watching {
    fn start(namespace: &Path, args: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let netns = namespace.display().to_string();
        let mut command = process::command(program(), ["watch", "--netns", &netns, "--output", "json"]);
        command.args(args).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        let process = Background::start("redirectctl watch", &command, &folder.path().join("log"))?;
        let watching = Self { process, _folder: folder };
        watching.wait_for("the rules", |event| event["event"] == "rules")?;
        Ok(watching)
    }

    fn events(&self) -> Vec<Value> {
        self.process.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    fn wait_for(&self, what: &str, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        process::until(what, PATIENCE, &[&self.process], || {
            Ok(self.events().into_iter().find(|event| is_it(event)))
        })
    }

    /// Waits for its end, and says why it ended.
    fn end(&self) -> Result<Value> {
        let status = self.process.wait(PATIENCE)?;
        ensure!(status.success(), "{}", self.process.tail());
        self.events().pop().context("a last line")
    }
}

/// A try to connect to an address where nobody is. The first packet meets the rules, whoever answers it.
fn connect(namespace: &Namespace, to: &str) -> Result<()> {
    namespace.sh(&format!("timeout 60 bash -c '</dev/tcp/{to}/80' 2>/dev/null || true"))?.ok().map(drop)
}

fn counts(event: &Value, rule: &str) -> bool {
    let text = event["rule"]["rule"].as_str().unwrap_or_default();
    event["event"] == "counted" && text.contains(rule) && event["added"]["packets"].as_u64() > Some(0)
}

#[test]
fn the_rule_that_traffic_meets_is_told_in_every_backend() -> Result<()> {
    for (number, name) in [(1, "redirected"), (2, "redirected by native nftables")] {
        let patient = redirectctl::patient(name, number)?;
        let before = patient.namespace().snapshot()?;
        let manifest = patient.manifest()?;
        let watching = Watching::start(
            &patient.namespace().path(),
            &["--interval", "100ms", "-f", &manifest, "--cni-conf-dir", "/nonexistent"],
        )?;
        connect(patient.namespace(), &format!("10.1.{number}.9"))?;
        let counted = watching.wait_for("a rule that counts", |event| counts(event, "--to-ports 15001"))?;
        assert_eq!(
            counted["rule"]["origins"][0]["purpose"], "to the proxy's outbound listener",
            "{name}: {counted}"
        );
        let events = watching.events();
        let inbound = events.iter().find(|event| counts(event, "--to-ports 15006"));
        assert!(inbound.is_none(), "{name}: nobody called the pod: {inbound:?}");
        watching.process.signal(Signal::SIGTERM)?;
        assert_eq!(watching.end()?["reason"], "signal", "{name}");
        assert_eq!(patient.namespace().snapshot()?, before, "{name}: watching changes nothing");
    }
    let namespace = Namespace::pod(Families::V4)?;
    namespace.sh(LEGACY)?.ok()?;
    let _proxy = TcpServer::start(&namespace, "proxy", ([0, 0, 0, 0], 15001))?;
    let watching = Watching::start(&namespace.path(), &["--interval", "100ms"])?;
    connect(&namespace, "127.0.0.9")?;
    let counted = watching.wait_for("a rule that counts", |event| counts(event, "--to-ports 15001"))?;
    assert_eq!(counted["rule"]["table"], "ip nat (legacy)");
    watching.process.signal(Signal::SIGINT)?;
    assert_eq!(watching.end()?["reason"], "signal");
    Ok(())
}

#[test]
fn totals_are_told_once_in_eighty_columns() -> Result<()> {
    let patient = redirectctl::patient("redirected with DNS", 3)?;
    connect(patient.namespace(), "10.1.3.9")?;
    let (netns, manifest) = (patient.namespace().path().display().to_string(), patient.manifest()?);
    let output = redirectctl(&[
        "watch",
        "--netns",
        &netns,
        "-f",
        &manifest,
        "--cni-conf-dir",
        "/nonexistent",
        "--once",
    ])?
    .ok()?;
    let text = &output.stdout;
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let rule = text.lines().find(|line| line.contains("--to-ports 15001")).context("the rule")?;
    let packets: u64 = rule.split_whitespace().next().context("a number")?.parse()?;
    assert!(packets > 0, "{text}");
    assert!(text.contains("# to the proxy's outbound listener"), "{text}");
    let bare = redirectctl(&["watch", "--netns", &netns, "--once", "--output", "json"])?.ok()?;
    let rules: Value = serde_json::from_str(&bare.stdout)?;
    let counting =
        rules["rules"].as_array().context("rules")?.iter().filter(|rule| rule["packets"].is_u64()).count();
    assert!(counting >= 20, "{rules:#}");
    Ok(())
}

#[test]
fn a_namespace_that_goes_is_not_kept_and_ends_the_watch() -> Result<()> {
    let namespace = Namespace::pod(Families::V4)?;
    let watching = Watching::start(&namespace.path(), &["--interval", "100ms"])?;
    let idle = Watching::start(&namespace.path(), &["--interval", "1h"])?;
    // Between two looks no file of it is open, by whatever path.
    let id = |path: &Path| fs::metadata(path).map(|facts| (facts.dev(), facts.ino()));
    let there = id(&namespace.path())?;
    let mut open = fs::read_dir(format!("/proc/{}/fd", idle.process.id()))?;
    assert!(open.all(|entry| entry.is_ok_and(|entry| id(&entry.path()).ok() != Some(there))));
    drop(namespace);
    assert_eq!(watching.end()?["reason"], "namespace-gone");
    Ok(())
}

#[test]
fn other_rules_begin_the_counting_anew() -> Result<()> {
    let namespace = Namespace::pod(Families::V4)?;
    let watching = Watching::start(&namespace.path(), &["--interval", "100ms"])?;
    namespace.sh(&LEGACY.replace("legacy", "nft"))?.ok()?;
    let rules = watching
        .wait_for("the new rules", |event| event["rules"].as_array().is_some_and(|all| all.len() == 3))?;
    assert_eq!(rules["event"], "rules");
    Ok(())
}

#[test]
fn who_closes_the_pipe_ends_the_watch_quietly() -> Result<()> {
    let namespace = Namespace::pod(Families::V4)?;
    namespace.sh(LEGACY)?.ok()?;
    let script = format!(
        "set -o pipefail; {} watch --netns {} --interval 100ms --output json | head -n 1",
        program().display(),
        namespace.path().display()
    );
    let mut command = process::command("bash", ["-c", &script]);
    let child = Background::start(
        "watch | head",
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        &tempfile::NamedTempFile::new()?.into_temp_path(),
    )?;
    // The watch only meets the closed pipe when it has something to say.
    let ended = process::until("the end of the watch", PATIENCE, &[], || {
        namespace.sh("timeout 60 bash -c '</dev/tcp/127.0.0.9/80' || true")?;
        Ok(child.ended())
    })?;
    ensure!(ended.success(), "{}", child.tail());
    Ok(())
}

#[test]
fn what_cannot_be_watched_is_told() -> Result<()> {
    for (args, told) in [
        (vec!["watch", "--netns", "/nonexistent"], "cannot open network namespace /nonexistent"),
        (vec!["watch", "--interval", "0"], "flag --interval: \"0\" is not a duration"),
        (vec!["watch", "../x", "--kubeconfig", "/nonexistent"], "is not a pod"),
    ] {
        let output = redirectctl(&args)?;
        assert_eq!(output.code(), Some(1), "{output:?}");
        assert!(output.stderr.contains(told), "{told}: {output:?}");
    }
    Ok(())
}
