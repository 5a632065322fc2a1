//! The entry beside the network's list: until a runtime is seen to read it there it is in the list as well, and the list is its owner's afterwards.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use e2e::agent::{Agent, CALICO, FakeApi, Node, daemon_set};
use test_support::process::{Killed, Patience};

const LIST: &str = "10-calico.conflist";
/// The name of Calico's network is that of its folder.
const BESIDE: &str = "k8s-pod-network/zz-istio-cni.conf";

/// A node whose agent sees the processes of this machine, and an API server that takes events.
fn node(install: &str) -> (Node, FakeApi) {
    let mut node = Node::new(&[(LIST, CALICO)]);
    let api = FakeApi::start(200, &daemon_set(false));
    api.serve(&mut node);
    node.use_real_plugin();
    node.set("CNI_INSTALL", install);
    node.set("MOUNTED_PROC_DIR", "/proc");
    (node, api)
}

/// A runtime, which lives until it is dropped.
struct Runtime(#[expect(dead_code, reason = "it lives as long as the value")] Killed);

impl Runtime {
    /// Asks the plugin for its STATUS once, with this text of an entry, and lives on.
    fn that_asks(node: &Node, entry: &str) -> Self {
        let mut conf: serde_json::Value = serde_json::from_str(entry).expect("JSON");
        (conf["cniVersion"], conf["name"]) = ("1.1.0".into(), "k8s-pod-network".into());
        let (input, done) = (node.path("asked"), node.path("answered"));
        let _ = fs::remove_file(&done);
        fs::write(&input, conf.to_string()).expect("writes");
        let script = r#""$0" <"$1" >"$2.new" 2>&1; mv "$2.new" "$2"; read -r end"#;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]).arg(node.path("bin/istio-cni")).args([&input, &done]);
        shell.env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/opt/cni/bin").stdin(Stdio::piped());
        let runtime = Self(Killed(shell.spawn().expect("starts")));
        let mut patience = Patience::new(e2e::agent::DEADLINE);
        while !done.exists() {
            assert!(!patience.is_over(), "the plugin does not answer");
            thread::sleep(Duration::from_millis(5));
        }
        runtime
    }

    /// One that has the entry from beside the list.
    fn that_reads(node: &Node) -> Self {
        Self::that_asks(node, &node.conf(BESIDE).expect("beside the list"))
    }
}

fn inode(node: &Node) -> u64 {
    fs::metadata(node.path("net.d").join(LIST)).expect("a list").ino()
}

fn wait_beside(agent: &Agent<'_>) {
    agent.wait("the list as its owner wrote it", || agent.node.conf(LIST).as_deref() == Some(CALICO));
    agent.wait_ready();
}

fn wait_in_list(agent: &Agent<'_>) {
    agent.wait("the entry in the list", || agent.node.calls_us());
    agent.wait_ready();
}

fn told(api: &FakeApi) -> bool {
    api.posted().iter().any(|event| event.contains("NetworkConfigInlined"))
}

#[test]
fn the_list_is_its_owners_while_a_runtime_reads_the_entry_beside_it() {
    let (node, api) = node("auto");
    let agent = node.start_ready();
    assert!(node.calls_us(), "not before it is read");
    let runtime = Runtime::that_reads(&node);
    wait_beside(&agent);
    assert!(!node.path("net.d").join(format!("{LIST}.istio-cni-original")).exists());
    agent.wait_metric("istio_cni_fights_total", 0.0);

    // The list's owner writes it, again and again: nobody else does.
    for round in 0..5 {
        let newer = CALICO.replace("\"mtu\":0", &format!("\"mtu\":{round}"));
        node.write_conf(LIST, &newer);
        let (written, passes) = (inode(&node), agent.metric("istio_cni_passes_total"));
        agent.wait("a pass", || agent.metric("istio_cni_passes_total") > passes);
        assert_eq!((node.conf(LIST), inode(&node)), (Some(newer), written));
    }
    node.write_conf(LIST, CALICO);

    // Another agent knows the runtime that still runs, and need not touch the list.
    let before = inode(&node);
    agent.kill();
    let agent = node.start_ready();
    agent.passes_at_rest();
    assert_eq!((node.conf(LIST).as_deref(), inode(&node)), (Some(CALICO), before));
    assert!(!told(&api), "{}", node.log());

    // The next runtime may be one that reads the list alone.
    drop(runtime);
    wait_in_list(&agent);
    agent.wait("an event", || told(&api));
    let _runtime = Runtime::that_reads(&node);
    wait_beside(&agent);

    // A list may forbid it.
    let only = CALICO.replacen('{', "{\"loadOnlyInlinedPlugins\":true,", 1);
    node.write_conf(LIST, &only);
    wait_in_list(&agent);
    agent.wait("the file to go", || !node.path("net.d").join(BESIDE).exists());
    agent.wait("the reason", || node.log().contains("loadOnlyInlinedPlugins is set there"));
    node.write_conf(LIST, CALICO);
    wait_beside(&agent);
}

/// As containerd 1.6 does it.
#[test]
fn a_runtime_that_reads_the_list_alone_keeps_the_entry_there_and_that_is_said_once() {
    let (node, _api) = node("auto");
    let agent = node.start_ready();
    let network =
        cni_core::net_dir::Network::parse(LIST, &node.conf(LIST).expect("a list")).expect("a network");
    let _runtime = Runtime::that_asks(&node, &network.handed().expect("an entry").to_string());
    for mtu in 1..4 {
        let newer = CALICO.replace("\"mtu\":0", &format!("\"mtu\":{mtu}"));
        node.write_conf(LIST, &newer);
        wait_in_list(&agent);
    }
    let log = node.log();
    assert_eq!(
        log.matches("the entry is in the network's list: until the runtime is seen to read").count(),
        1,
        "{log}"
    );
    // What asks and ends at once is not a runtime.
    drop(Runtime::that_reads(&node));
    wait_in_list(&agent);
}

#[test]
fn where_only_beside_will_do_the_agent_is_not_ready_until_it_is_read() {
    let (node, _api) = node("drop-in");
    let agent = node.start();
    let reason = agent.wait_not_ready("installed, not seen called");
    assert!(reason.contains(BESIDE) && reason.contains("CNI_INSTALL=auto"), "{reason}");
    assert_eq!(node.conf(LIST).as_deref(), Some(CALICO));
    let _runtime = Runtime::that_reads(&node);
    agent.wait_ready();
    assert_eq!(node.conf(LIST).as_deref(), Some(CALICO));
    agent.kill();

    let (node, _api) = self::node("drop-in");
    node.write_conf(LIST, &CALICO.replace("k8s-pod-network", "../etc"));
    let reason = node.start().wait_not_ready("is not one of a folder");
    assert!(reason.contains("CNI_INSTALL=drop-in"), "{reason}");
}

#[test]
fn removal_and_other_settings_leave_no_folder_and_the_list_alone() {
    let (mut node, _api) = node("auto");
    let agent = node.start_ready();
    let _runtime = Runtime::that_reads(&node);
    wait_beside(&agent);
    agent.kill();
    let before = inode(&node);
    let done = node.command(&["uninstall"]).output().expect("runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!((node.conf(LIST).as_deref(), inode(&node)), (Some(CALICO), before));
    assert!(!node.path("net.d/k8s-pod-network").exists() && !node.path("run/drop-in-reader").exists());

    let agent = node.start_ready();
    drop(Runtime::that_reads(&node));
    agent.kill();
    for install in ["inline", "auto", "inline"] {
        node.set("CNI_INSTALL", install);
        node.start_ready().kill();
        assert!(node.calls_us());
        assert_eq!(node.path("net.d/k8s-pod-network").exists(), install == "auto");
    }
}

/// An agent without the setting puts its entry into the list before it takes the file away; one that knows no such file leaves it, and both are called.
#[test]
fn an_older_agent_takes_the_entry_into_the_list_and_a_newer_one_out_of_it_again() {
    let (mut node, _api) = node("auto");
    let agent = node.start_ready();
    let _runtime = Runtime::that_reads(&node);
    wait_beside(&agent);
    agent.kill();
    let beside = node.conf(BESIDE).expect("beside the list");
    for knows_folders in [true, false] {
        node.env.remove("CNI_INSTALL");
        let older = node.start_ready();
        wait_in_list(&older);
        older.wait("the file to go", || node.conf(BESIDE).is_none());
        older.kill();
        if !knows_folders {
            fs::create_dir(node.path("net.d/k8s-pod-network")).expect("makes");
            fs::write(node.path("net.d").join(BESIDE), &beside).expect("writes");
        }
        node.set("CNI_INSTALL", "auto");
        let newer = node.start_ready();
        wait_beside(&newer);
        newer.wait_metric("istio_cni_fights_total", 0.0);
        newer.kill();
        assert_eq!(node.conf(BESIDE).as_ref(), Some(&beside));
        assert_eq!(node.confs().len(), 2, "{:?}", node.confs());
    }
}

/// The next runtime may read the list alone: that it was another, the next agent sees.
#[test]
fn a_runtime_that_was_replaced_while_no_agent_ran_gets_the_entry_from_the_list() {
    let (node, _api) = node("auto");
    let agent = node.start_ready();
    let runtime = Runtime::that_reads(&node);
    wait_beside(&agent);
    agent.kill();
    drop(runtime);
    assert!(!node.calls_us(), "until an agent runs");
    wait_in_list(&node.start());
    assert!(node.conf(BESIDE).is_some(), "also for one that reads it");
}

#[test]
fn a_run_at_boot_puts_the_entry_into_the_list_for_whichever_runtime_starts_next() {
    let (node, _api) = node("auto");
    let agent = node.start_ready();
    let runtime = Runtime::that_reads(&node);
    wait_beside(&agent);
    agent.kill();
    drop(runtime);
    let done = node.command(&["install", "--once"]).output().expect("runs");
    assert!(done.status.success() && node.calls_us(), "{}", String::from_utf8_lossy(&done.stderr));
}
