//! The programs with exactly the capabilities that docs/privileges.md says they need, and with one fewer: then they name it, and change nothing.

mod common;
mod plugin_support;

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use common::stubs::Stubs;
use common::{istio_iptables, istio_iptables_command, with_environment};
use e2e::netns::{Families, Namespace};
use e2e::process::{self, LATE, Output, Patience, SHORT, prefixed};
use plugin_support::{Invocation, RunDir, istio_cni, plain_kubeconfig, sidecar};

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

/// What a process may do: its permitted, effective, bounding and ambient sets, and whether programs that it starts may get more.
fn rights(status: &str) -> Result<String> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        line.map(str::trim).with_context(|| format!("no {name} in {status:?}"))
    };
    let set = |name| anyhow::Ok(u64::from_str_radix(field(name)?, 16)?);
    let sets = [set("CapPrm")?, set("CapEff")?, set("CapBnd")?, set("CapAmb")?];
    Ok(format!("{sets:x?} {}", field("NoNewPrivs")?))
}

/// Exactly these, in the words of [`rights`].
fn exactly(bits: &[u32]) -> String {
    let set: u64 = bits.iter().map(|bit| 1 << bit).sum();
    format!("[{set:x}, {set:x}, {set:x}, 0] 1")
}

const DAC_OVERRIDE: u32 = 1;
const SETGID: u32 = 6;
const SETUID: u32 = 7;
const NET_ADMIN: u32 = 12;
const NET_RAW: u32 = 13;
const SYS_MODULE: u32 = 16;
const SYS_ADMIN: u32 = 21;

/// A program in the middle of its work. It is killed when dropped.
struct Running(Child);

impl Running {
    fn rights(&self) -> Result<String> {
        rights(&fs::read_to_string(format!("/proc/{}/status", self.0.id()))?)
    }

    /// Waits until it may do exactly this.
    fn wait_for(&self, wanted: &str) -> Result<()> {
        let mut patience = Patience::new(SHORT);
        loop {
            let now = self.rights()?;
            if now == wanted {
                return Ok(());
            }
            ensure!(!patience.is_over(), "{now} instead of {wanted}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The test itself may do everything, as a container runtime and as root on a node.
#[test]
fn the_plugin_keeps_what_it_needs_of_all_that_a_runtime_gives_it() -> Result<()> {
    let all = rights(&fs::read_to_string("/proc/self/status")?)?;
    let ours = exactly(&[NET_ADMIN, NET_RAW, SYS_ADMIN]);
    ensure!(all != ours, "the test cannot tell: {all}");
    let run_dir = RunDir::new()?;
    // A server that takes the question and does not answer: there the plugin is in the middle of its work.
    let server = TcpListener::bind("127.0.0.1:0")?;
    run_dir.write_kubeconfig(&plain_kubeconfig(server.local_addr()?.port()))?;
    let namespace = Namespace::pod(Families::Dual)?;
    let mut conf = run_dir.conf();
    conf["prevResult"] = serde_json::json!({"cniVersion": "1.1.0", "interfaces": [], "ips": []});
    let mut command = process::command(istio_cni(), [""; 0]);
    command.env_clear().envs([
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "abc"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin"),
        ("CNI_NETNS", &namespace.path().display().to_string()),
        ("CNI_ARGS", "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web"),
    ]);
    let mut plugin =
        Running(command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    plugin.0.stdin.take().context("standard input")?.write_all(conf.to_string().as_bytes())?;
    let _asked = server.accept()?;
    let now = plugin.rights()?;
    ensure!(now == ours, "{now} instead of {ours}");
    Ok(())
}

/// A program of iptables that notes what it, and who started it, may do.
const NOTES: &str = "cat /proc/$PPID/status >FOLDER/parent; cat /proc/self/status >FOLDER/own; exit 1";

#[test]
fn istio_iptables_and_its_helpers_keep_what_the_run_needs() -> Result<()> {
    let stubs = Stubs::new()?;
    for name in ["iptables-legacy-restore", "ip6tables-legacy-restore"] {
        stubs.add(name, NOTES)?;
    }
    let namespace = Namespace::pod(Families::Dual)?;
    let output = namespace.run(&stubs.command("-b * -i * --force-iptables-binary legacy"))?;
    ensure!(output.code() == Some(1), "the helper fails: {output:?}");
    let ours = exactly(&[NET_ADMIN, NET_RAW, SYS_MODULE]);
    for who in ["parent", "own"] {
        let noted = rights(&stubs.read(who))?;
        ensure!(noted == ours, "{who}: {noted} instead of {ours}");
    }

    // A dry run waits here for somebody who reads what it writes.
    let folder = tempfile::tempdir()?;
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU)?;
    let file = ("DRY_RUN_FILE_PATH".to_owned(), pipe.display().to_string());
    let mut command = with_environment(istio_iptables(), &[&APPLY[..], &["--dry-run"]].concat(), &[file]);
    let dry = Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    dry.wait_for(&exactly(&[DAC_OVERRIDE]))
}

#[test]
fn the_validation_keeps_no_more_than_it_takes_to_be_the_proxy() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let program = e2e::program::under_test("istio-validation")?;
    // Nothing is redirected there, so it waits for rules.
    let args = ["-b", "*", "-i", "*", "--probe-timeout", LATE];
    let mut command = process::command(&program, args);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let waiting = Running(namespace.enter(|| command.spawn())??);
    waiting.wait_for(&exactly(&[SETUID, SETGID]))?;
    let mut command = process::command(&program, args);
    command.args(["--network-namespace", &namespace.path().display().to_string()]);
    let waiting = Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    waiting.wait_for(&exactly(&[SETUID, SETGID, SYS_ADMIN]))
}
