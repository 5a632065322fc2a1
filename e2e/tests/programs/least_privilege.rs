//! The programs with exactly the capabilities that docs/reference/privileges.md says they need, and with one fewer: then they name it, and change nothing.
//!
//! The agent's part is in `e2e/tests/agent/privileges.rs`, and that of ambient mode in `enrolment.rs` beside it.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::{self, stubs::Stubs};
use e2e::iptables::{istio_iptables, istio_iptables_command, with_environment};
use e2e::plugin::{Invocation, RunDir, istio_cni, plain_kubeconfig, sidecar};
use e2e::privileges::{needs, one_fewer, only, rows};
use e2e::validation::{INJECTED, PROXY, validate};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Killed, LATE, Output, Patience, SHORT, prefixed};

const APPLY: [&str; 4] = ["-b", "*", "-i", "*"];
fn confined<S: AsRef<str>>(capabilities: &[S], command: &Command) -> Command {
    let words = only(capabilities);
    prefixed(&words.iter().map(String::as_str).collect::<Vec<_>>(), command)
}

fn ensure_names(output: &Output, missing: &str) -> Result<()> {
    ensure!(output.code() == Some(1), "without {missing}: {output:?}");
    let errors: Vec<&str> = output.stderr.lines().filter(|line| line.contains("\terror\t")).collect();
    ensure!(errors.len() == 1 && errors[0].contains(missing), "{missing}: {}", output.stderr);
    Ok(())
}

/// A row that is added is red until a test asks for what it needs.
#[test]
fn every_row_of_the_page_is_asked_for_by_a_test() -> Result<()> {
    let tests = [
        include_str!("least_privilege.rs"),
        include_str!("../agent/privileges.rs"),
        include_str!("../cluster/enrolment.rs"),
    ];
    for row in rows()? {
        let asks = format!("needs(\"{}\", \"{}\")", row.program, row.does);
        ensure!(tests.iter().any(|test| test.contains(&asks)), "no test has {asks}");
    }
    Ok(())
}

#[test]
fn istio_iptables_needs_what_the_page_says_in_a_pod() -> Result<()> {
    let needed = needs("istio-iptables", "applies, checks, removes rules in its own network namespace")?;
    ensure!(!needed.is_empty());
    for backend in [&[][..], &["--native-nftables"]] {
        let namespace = Namespace::pod(Families::Dual)?;
        let apply = istio_iptables_command(&[&APPLY[..], backend].concat());
        let cleanup = istio_iptables_command(&[&["--cleanup-only"][..], backend].concat());
        for (some, missing) in one_fewer(&needed) {
            ensure_names(&namespace.run(&confined(&some, &apply))?, &missing)?;
            ensure!(namespace.state_with_nft()?.is_pristine(), "{backend:?}");
            namespace.run(&confined(&needed, &apply))?.ok()?;
            let applied = namespace.snapshot()?;
            ensure_names(&namespace.run(&confined(&some, &cleanup))?, &missing)?;
            let changes = namespace.snapshot()?.changes_since(&applied);
            ensure!(changes.is_empty(), "{changes:?}");
            namespace.run(&confined(&needed, &cleanup))?.ok()?;
            ensure!(namespace.state_with_nft()?.is_pristine(), "{backend:?}");
        }
    }
    Ok(())
}

#[test]
fn the_legacy_variant_needs_net_raw_as_well() -> Result<()> {
    let needed =
        needs("istio-iptables", "the same with the legacy variant of iptables, or beside rules of that")?;
    let few = needs("istio-iptables", "applies, checks, removes rules in its own network namespace")?;
    let namespace = Namespace::pod(Families::Dual)?;
    for (some, missing) in one_fewer(&needed) {
        let apply = istio_iptables_command(&[&APPLY[..], &["--force-iptables-binary", "legacy"]].concat());
        ensure_names(&namespace.run(&confined(&some, &apply))?, &missing)?;
        let left = namespace.sh("iptables-legacy-save; ip6tables-legacy-save")?;
        ensure!(!left.stdout.contains("ISTIO"), "without {missing}: {}", left.stdout);
        namespace.run(&confined(&needed, &apply))?.ok()?;
        // What is in legacy tables must be seen by whoever writes others.
        let cleanup = istio_iptables_command(&["--cleanup-only"]);
        ensure_names(&namespace.run(&confined(&few, &cleanup))?, "CAP_NET_RAW")?;
        namespace.run(&confined(&needed, &cleanup))?.ok()?;
    }
    ensure!(namespace.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn a_dry_run_is_for_anybody() -> Result<()> {
    let needed = needs("istio-iptables", "--dry-run")?;
    ensure!(needed.is_empty());
    let namespace = Namespace::pod(Families::Dual)?;
    let command = istio_iptables_command(&[&APPLY[..], &["--dry-run"]].concat());
    let as_root = namespace.run(&command)?.ok()?;
    ensure!(as_root.stdout.contains("ISTIO_REDIRECT"), "{}", as_root.stdout);
    let somebody = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"];
    for command in [confined(&needed, &command), prefixed(&somebody, &confined(&needed, &command))] {
        let output = namespace.run(&command)?.ok()?;
        ensure!(output.stdout == as_root.stdout, "{}", output.stdout);
    }
    Ok(())
}

#[test]
fn another_network_namespace_is_entered_with_sys_admin() -> Result<()> {
    let needed = needs("istio-iptables", "--network-namespace")?;
    let namespace = Namespace::pod(Families::Dual)?;
    let path = namespace.path().display().to_string();
    let mut command = process::command(istio_iptables(), APPLY);
    command.args(["--network-namespace", &path]);
    for (some, missing) in one_fewer(&needed) {
        ensure_names(&process::run(&mut confined(&some, &command), SHORT)?, &missing)?;
        ensure!(namespace.state_with_nft()?.is_pristine(), "without {missing}");
    }
    process::run(&mut confined(&needed, &command), SHORT)?.ok()?;
    ensure!(!namespace.state_with_nft()?.is_pristine());
    Ok(())
}

/// The harness runs it as the proxy's user without any capability, whatever it validates.
#[test]
fn the_validation_needs_nothing() -> Result<()> {
    ensure!(needs("istio-validation", "proves that the pod is redirected")?.is_empty());
    let namespace = Namespace::pod(Families::Dual)?;
    iptables::apply(&namespace, INJECTED)?;
    let problems = validate(&namespace, PROXY, "--probe-timeout 5s")?.problems("redirected");
    ensure!(problems.is_empty(), "{problems:?}");
    Ok(())
}

/// A pod in a folder of manifests, and its namespace.
struct Plugin {
    run_dir: RunDir,
    namespace: Namespace,
}

impl Plugin {
    fn new() -> Result<Self> {
        let run_dir = RunDir::new()?;
        run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
        Ok(Self { run_dir, namespace: Namespace::pod(Families::Dual)? })
    }

    fn invocation(&self, command: &str) -> Invocation {
        let mut conf = self.run_dir.manifest_conf();
        conf["prevResult"] = serde_json::json!({"cniVersion": "1.1.0", "interfaces": [], "ips": []});
        Invocation::new(command, &conf).netns(&self.namespace).pod("default", "web")
    }

    /// ADD and CHECK: with all of their capabilities they succeed, and with one fewer name it and change nothing.
    fn ensure_needs(&self, needed: &[String], needed_by_check: &[String]) -> Result<()> {
        let run =
            |command: &str, capabilities: &[String]| self.invocation(command).under(only(capabilities)).run();
        let before = self.namespace.snapshot()?;
        for (some, missing) in one_fewer(needed) {
            let (_, text) = run("ADD", &some)?.error()?;
            ensure!(text.contains(&missing), "ADD without {missing}: {text}");
            let changes = self.namespace.snapshot()?.changes_since(&before);
            ensure!(changes.is_empty(), "ADD without {missing}: {changes:?}");
        }
        run("ADD", needed)?.result().context("ADD")?;
        let after = self.namespace.snapshot()?;
        ensure!(!after.changes_since(&before).is_empty(), "ADD changes nothing");
        for (some, missing) in one_fewer(needed_by_check) {
            let (_, text) = run("CHECK", &some)?.error()?;
            ensure!(text.contains(&missing), "CHECK without {missing}: {text}");
        }
        run("CHECK", needed_by_check)?.silence().context("CHECK")?;
        ensure!(self.namespace.snapshot()?.changes_since(&after).is_empty(), "CHECK changes something");
        Ok(())
    }
}

#[test]
fn the_plugin_needs_net_admin_and_sys_admin() -> Result<()> {
    let plugin = Plugin::new()?;
    let both = needs("istio-cni", "ADD, CHECK")?;
    plugin.ensure_needs(&both, &both)?;
    // The namespace goes with the pod, and its rules with it.
    let few = needs("istio-cni", "DEL, VERSION")?;
    plugin.invocation("DEL").under(only(&few)).run()?.silence().context("DEL")?;
    plugin.invocation("VERSION").under(only(&few)).run()?.result().context("VERSION")?;
    Ok(())
}

#[test]
fn the_plugin_needs_net_raw_as_well_to_add_with_the_legacy_variant() -> Result<()> {
    let plugin = Plugin::new()?;
    // Rules of that variant are what makes it choose that one.
    plugin.namespace.sh("iptables-legacy -t nat -A PREROUTING -p udp --dport 7 -j RETURN")?.ok()?;
    let adding = needs("istio-cni", "ADD with the legacy variant of iptables")?;
    plugin.ensure_needs(&adding, &needs("istio-cni", "ADD, CHECK")?)?;
    let rules = plugin.namespace.sh("iptables-legacy-save -t nat")?.ok()?.stdout;
    ensure!(rules.contains("ISTIO_REDIRECT"), "{rules}");
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
struct Running(Killed);

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
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut plugin = Running(Killed(command.spawn()?));
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
    let dry = Running(Killed(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?));
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
    let waiting = Running(Killed(namespace.enter(|| command.spawn())??));
    waiting.wait_for(&exactly(&[SETUID, SETGID]))?;
    let mut command = process::command(&program, args);
    command.args(["--network-namespace", &namespace.path().display().to_string()]);
    let waiting = Running(Killed(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?));
    waiting.wait_for(&exactly(&[SETUID, SETGID, SYS_ADMIN]))
}
