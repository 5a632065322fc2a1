//! The programs with exactly the capabilities that docs/privileges.md says they need, and with one fewer: then they name it, and change nothing.

mod common;
mod plugin_support;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use common::{istio_iptables, istio_iptables_command};
use e2e::netns::{Families, Namespace};
use e2e::process::{self, Output, SHORT, prefixed};
use plugin_support::{Invocation, RunDir, sidecar};

const APPLY: [&str; 4] = ["-b", "*", "-i", "*"];
const LEGACY: [&str; 2] = ["net_admin", "net_raw"];

/// Runs a program as root with these capabilities, and no way to get more: as a container does that drops all and adds some.
fn with(capabilities: &[&str]) -> Vec<String> {
    let added: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    let bounds = format!("--bounding-set=-all{added}");
    ["setpriv", &bounds, "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--"]
        .map(str::to_owned)
        .into()
}

/// All ways to leave one out, with the one that is left out.
fn one_fewer<'a>(all: &[&'a str]) -> Vec<(Vec<&'a str>, String)> {
    let without = |out: &&'a str| all.iter().copied().filter(|name| name != out).collect();
    all.iter().map(|out| (without(out), format!("CAP_{}", out.to_uppercase()))).collect()
}

fn confined(capabilities: &[&str], command: &Command) -> Command {
    let words = with(capabilities);
    prefixed(&words.iter().map(String::as_str).collect::<Vec<_>>(), command)
}

fn ensure_names(output: &Output, missing: &str) -> Result<()> {
    ensure!(output.code() == Some(1), "without {missing}: {output:?}");
    let errors: Vec<&str> = output.stderr.lines().filter(|line| line.contains("\terror\t")).collect();
    ensure!(errors.len() == 1 && errors[0].contains(missing), "{missing}: {}", output.stderr);
    Ok(())
}

#[test]
fn istio_iptables_needs_net_admin_in_a_pod() -> Result<()> {
    for backend in [&[][..], &["--native-nftables"]] {
        let namespace = Namespace::pod(Families::Dual)?;
        let args = [&APPLY[..], backend].concat();
        let output = namespace.run(&confined(&[], &istio_iptables_command(&args)))?;
        ensure_names(&output, "CAP_NET_ADMIN")?;
        ensure!(namespace.state_with_nft()?.is_pristine(), "{backend:?}");

        namespace.run(&confined(&["net_admin"], &istio_iptables_command(&args)))?.ok()?;
        let applied = namespace.snapshot()?;
        let cleanup = [&["--cleanup-only"][..], backend].concat();
        let output = namespace.run(&confined(&[], &istio_iptables_command(&cleanup)))?;
        ensure_names(&output, "CAP_NET_ADMIN")?;
        let changes = namespace.snapshot()?.changes_since(&applied);
        ensure!(changes.is_empty(), "{changes:?}");
        namespace.run(&confined(&["net_admin"], &istio_iptables_command(&cleanup)))?.ok()?;
        ensure!(namespace.state_with_nft()?.is_pristine(), "{backend:?}");
    }
    Ok(())
}

#[test]
fn the_legacy_variant_needs_net_raw_as_well() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    for (some, missing) in one_fewer(&LEGACY) {
        let apply = istio_iptables_command(&[&APPLY[..], &["--force-iptables-binary", "legacy"]].concat());
        ensure_names(&namespace.run(&confined(&some, &apply))?, &missing)?;
        let left = namespace.sh("iptables-legacy-save; ip6tables-legacy-save")?;
        ensure!(!left.stdout.contains("ISTIO"), "without {missing}: {}", left.stdout);
        namespace.run(&confined(&LEGACY, &apply))?.ok()?;
        // What is in legacy tables has to be seen by whoever writes others.
        let output =
            namespace.run(&confined(&["net_admin"], &istio_iptables_command(&["--cleanup-only"])))?;
        ensure_names(&output, "CAP_NET_RAW")?;
        namespace.run(&confined(&LEGACY, &istio_iptables_command(&["--cleanup-only"])))?.ok()?;
    }
    ensure!(namespace.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn a_dry_run_needs_nothing() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let command = istio_iptables_command(&[&APPLY[..], &["--dry-run"]].concat());
    let (as_root, as_nobody) =
        (namespace.run(&command)?.ok()?, namespace.run(&confined(&[], &command))?.ok()?);
    ensure!(
        as_root.stdout == as_nobody.stdout && as_root.stdout.contains("ISTIO_REDIRECT"),
        "{}",
        as_nobody.stdout
    );
    Ok(())
}

#[test]
fn another_network_namespace_is_entered_with_sys_admin() -> Result<()> {
    const NEEDED: [&str; 2] = ["net_admin", "sys_admin"];
    let namespace = Namespace::pod(Families::Dual)?;
    let path = namespace.path().display().to_string();
    let mut command = process::command(istio_iptables(), APPLY);
    command.args(["--network-namespace", &path]);
    for (some, missing) in one_fewer(&NEEDED) {
        ensure_names(&process::run(&mut confined(&some, &command), SHORT)?, &missing)?;
        ensure!(namespace.state_with_nft()?.is_pristine(), "without {missing}");
    }
    process::run(&mut confined(&NEEDED, &command), SHORT)?.ok()?;
    ensure!(!namespace.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn the_plugin_needs_net_admin_and_sys_admin() -> Result<()> {
    const NEEDED: [&str; 2] = ["net_admin", "sys_admin"];
    let run_dir = RunDir::new()?;
    run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
    let namespace = Namespace::pod(Families::Dual)?;
    let mut conf = run_dir.manifest_conf();
    conf["prevResult"] = serde_json::json!({"cniVersion": "1.1.0", "interfaces": [], "ips": []});
    let invocation = |command: &str| Invocation::new(command, &conf).netns(&namespace).pod("default", "web");
    for (some, missing) in one_fewer(&NEEDED) {
        let (_, text) = invocation("ADD").under(with(&some)).run()?.error()?;
        ensure!(text.contains(&missing), "ADD without {missing}: {text}");
        ensure!(namespace.state_with_nft()?.is_pristine(), "ADD without {missing}");
    }
    invocation("ADD").under(with(&NEEDED)).run()?.result().context("ADD")?;
    ensure!(!namespace.state_with_nft()?.is_pristine());
    for (some, missing) in one_fewer(&NEEDED) {
        let (_, text) = invocation("CHECK").under(with(&some)).run()?.error()?;
        ensure!(text.contains(&missing), "CHECK without {missing}: {text}");
    }
    invocation("CHECK").under(with(&NEEDED)).run()?.silence().context("CHECK")?;
    // The namespace goes with the pod, and its rules with it.
    invocation("DEL").under(with(&[])).run()?.silence().context("DEL")?;
    invocation("VERSION").under(with(&[])).run()?.result().context("VERSION")?;
    Ok(())
}
