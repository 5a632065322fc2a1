//! The agent confined by Landlock: its whole life, and what is refused. Needs root, and Linux 6.12, whose Landlock has all that is asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::broken::Api;
use e2e::agent::{self, CALICO, FakeApi, Node, daemon_set};
use e2e::pods::{self, PodApi, Proc, Sandboxes, UID, check, held_back, mesh_pod_of, wait, wait_at_least};
use serde_json::Value;
use test_support::netns::{Families, Topology, pod_address};

fn pod() -> Value {
    mesh_pod_of(UID, "web", &["10.1.0.2"])
}

fn is_confined(node: &Node) -> bool {
    node.log().contains("\tconfined by Landlock to the directories")
}

/// The credentials of a service account as the kubelet mounts them: links to a folder that is exchanged as a whole.
struct Projected {
    account: PathBuf,
    count: u32,
}

impl Projected {
    fn new(node: &Node, token: &str) -> Self {
        let account = node.path("account");
        for name in ["token", "ca.crt"] {
            fs::remove_file(account.join(name)).expect("removes");
            std::os::unix::fs::symlink(Path::new("..data").join(name), account.join(name)).expect("links");
        }
        let mut projected = Self { account, count: 0 };
        projected.exchange(token);
        projected
    }

    fn exchange(&mut self, token: &str) {
        self.count += 1;
        let folder = format!("..2026_{}", self.count);
        fs::create_dir(self.account.join(&folder)).expect("makes");
        fs::write(self.account.join(&folder).join("token"), token).expect("writes");
        fs::write(self.account.join(&folder).join("ca.crt"), "authority\n").expect("writes");
        std::os::unix::fs::symlink(&folder, self.account.join("..data_tmp")).expect("links");
        fs::rename(self.account.join("..data_tmp"), self.account.join("..data")).expect("renames");
    }
}

#[test]
fn a_confined_agent_installs_follows_tokens_and_leaves() {
    let mut node = Node::with_the_real_plugin();
    node.set("PLUGIN_SERVICE_ACCOUNT", "");
    let api = FakeApi::start(200, &daemon_set(true));
    api.serve(&mut node);
    let mut account = Projected::new(&node, "token-1");
    let agent = node.start_ready();
    assert!(is_confined(&node), "{}", node.log());
    let has = |token: &str| node.kubeconfig().is_some_and(|text| text.contains(token));
    assert!(has("token-1") && node.has_plugin() && node.calls_us());
    account.exchange("token-2");
    agent.wait("the new token", || has("token-2"));
    // Another program, a socket that is removed, a plugin that is damaged.
    node.write_conf("05-other.conflist", r#"{"name":"a","cniVersion":"0.3.1","plugins":[{"type":"b"}]}"#);
    agent.wait("the entry in the new file", || node.calls_us());
    fs::remove_file(node.path("run/log.sock")).expect("removes");
    agent.wait("the socket", || node.path("run/log.sock").exists());
    fs::write(node.path("bin/istio-cni"), "damaged").expect("writes");
    agent.wait("the plugin", || node.has_plugin());
    // Its DaemonSet is being deleted: it takes everything out.
    assert_eq!(agent.end(), Some(0), "{}", node.log());
    assert!(!node.calls_us() && !node.has_plugin() && node.kubeconfig().is_none(), "{}", node.log());
    assert!(!node.log().contains("denied"), "{}", node.log());
}

#[test]
fn a_confined_agent_watches_heals_and_probes() {
    let mut node = Node::with_the_real_plugin();
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    node.set("DRIFT_HEAL", "true");
    node.set("NODE_TAINT", "true");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    proc.add_of(71, UID, &web.path());
    pods::redirect(&web);
    let _api = PodApi::start(&mut node, vec![pod()]);
    let _agent = node.start_ready();
    assert!(is_confined(&node), "{}", node.log());
    wait_at_least(&node, &check("verified"), 1.0);
    wait_at_least(&node, "istio_cni_heal_watched_pods", 1.0);
    wait_at_least(&node, "istio_cni_node_probes_total{result=\"redirected\"}", 1.0);
    // A pod that starts later: its namespace is mounted while the agent runs.
    let shop = sandboxes.add("cni-shop", &["10.1.0.9"]);
    drop(shop);
    web.sh("iptables-nft -t nat -F OUTPUT").expect("deletes").ok().expect("deletes");
    wait_at_least(&node, "istio_cni_heal_attempts_total{reason=\"healed\"}", 1.0);
}

/// The one unconfined thread reads the pod's processes, which the kernel forbids to confined ones.
#[test]
fn a_confined_agent_repairs_a_pod_where_it_stands() {
    let mut node = Node::with_the_real_plugin();
    node.set("REPAIR_REPAIR_PODS", "true");
    let topology = Topology::new(Families::Dual).expect("namespaces");
    let mut sandboxes = Sandboxes::new(&mut node);
    sandboxes.mount("cni-web", &topology.pod.path());
    // A real process in the real /proc, as on a node. Only its cgroup is made up: the test's own machine has no pods.
    let mut sleeper = Command::new("sleep");
    let mut sleeper = topology.pod.enter(|| sleeper.arg("10000").spawn()).expect("enters").expect("starts");
    let proc = Proc::new(&mut node);
    proc.add_of(77, UID, Path::new(&format!("/proc/{}/ns/net", sleeper.id())));
    let addresses = [pod_address(false), pod_address(true)].map(|address| address.to_string());
    let api = Api::start(&mut node);
    api.put(held_back(mesh_pod_of(UID, "web", &addresses.each_ref().map(String::as_str))));
    let agent = node.start_ready();
    assert!(is_confined(&node), "{}", node.log());
    wait_at_least(&node, "istio_cni_repair_pods_repaired_total{type=\"repair\",result=\"success\"}", 1.0);
    wait(&node, "the event", || !api.events_about("web").is_empty());
    // The test can fail: a confined thread of this agent may not do it, the one outside may.
    let task = format!("/proc/{}/task", agent.id());
    let names = fs::read_dir(&task)
        .expect("lists")
        .filter_map(|entry| fs::read_to_string(entry.expect("an entry").path().join("comm")).ok());
    assert!(names.into_iter().any(|name| name.trim() == "outside"));
    drop(agent);
    let _ = sleeper.kill().and_then(|()| sleeper.wait());
}

#[test]
fn one_shot_modes_work_confined() {
    let node = Node::with_the_real_plugin();
    // As after each boot.
    fs::remove_dir(node.path("run")).expect("removes");
    for (args, is_there) in [(&["install", "--once"][..], true), (&["uninstall"], false)] {
        let mut command = node.command(args);
        let done = command.args(["--log_output_level", "cni-agent:debug"]).output().expect("runs");
        let log = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{args:?}: {log}");
        assert!(log.contains("\tconfined by Landlock to the directories"), "{args:?}: {log}");
        assert_eq!(node.has_plugin(), is_there, "{args:?}");
    }
}

/// A plugin that succeeds, and tries everything forbidden to confined processes: the agent starts it, so the same rules hold for it. It notes what worked.
const NOSY: &str = r#"#!/bin/sh
[ "$CNI_COMMAND" != VERSION ] || echo '{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}'
exec >/dev/null 2>&1
could() { echo "$1" >>FOLDER/run/could; }
echo x >>FOLDER/elsewhere/file && could "write"
cat FOLDER/elsewhere/file && could "read"
ls FOLDER/elsewhere && could "list"
FOLDER/elsewhere/program && could "run"
rm FOLDER/account/old && could "remove"
echo x >>FOLDER/image/new && could "write to the image"
cp /bin/true FOLDER/net.d/true && FOLDER/net.d/true && could "run what is among configurations"
mkfifo FOLDER/bin/pipe && could "make a pipe"
ln -s / FOLDER/run/link && could "make a link"
readlink /proc/TEST/ns/net && could "read a process"
kill -0 TEST && could "signal a process"
could "all was tried"
exit 0
"#;

/// The kernel alone keeps the agent and what it starts from other files: permissions do not, because it is root.
#[test]
fn what_is_beyond_its_directories_is_refused() {
    const ALL: [&str; 11] = [
        "write",
        "read",
        "list",
        "run",
        "remove",
        "write to the image",
        "run what is among configurations",
        "make a pipe",
        "make a link",
        "read a process",
        "signal a process",
    ];
    for (is_on, wanted) in [("false", &ALL[..]), ("true", &[])] {
        let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
        node.set("LANDLOCK", is_on);
        // So that the agent keeps the capability that looking at processes takes.
        node.set("REPAIR_REPAIR_PODS", "true");
        fs::create_dir(node.path("elsewhere")).expect("makes");
        for (file, text) in
            [("elsewhere/file", "x"), ("elsewhere/program", "#!/bin/sh\n"), ("account/old", "x")]
        {
            fs::write(node.path(file), text).expect("writes");
            agent::set_mode(&node.path(file), 0o755);
        }
        let folder = node.path("").display().to_string();
        let script = NOSY.replace("FOLDER", folder.trim_end_matches('/'));
        let script = script.replace("TEST", &std::process::id().to_string());
        fs::write(node.path("image/istio-cni"), script).expect("writes");
        let agent = node.start();
        let could = || fs::read_to_string(node.path("run/could")).unwrap_or_default();
        agent.wait("the plugin", || could().contains("all was tried\n"));
        assert_eq!(is_confined(&node), is_on == "true", "{}", node.log());
        let could = could();
        let first: Vec<&str> = could.lines().take_while(|line| *line != "all was tried").collect();
        assert_eq!(first, wanted, "LANDLOCK={is_on}\n{}", node.log());
    }
}

/// The kernel's rules are about directories, not about names.
#[test]
fn an_agent_whose_directory_is_exchanged_ends_and_the_next_one_works() {
    let node = Node::with_the_real_plugin();
    // The name that the settings have is a link, as on nodes where `/opt` is read-only.
    fs::rename(node.path("net.d"), node.path("real")).expect("renames");
    std::os::unix::fs::symlink(node.path("real"), node.path("net.d")).expect("links");
    let agent = node.start_ready();
    assert!(is_confined(&node) && node.calls_us(), "{}", node.log());
    fs::create_dir(node.path("other")).expect("makes");
    fs::write(node.path("other/10-calico.conflist"), CALICO).expect("writes");
    std::os::unix::fs::symlink(node.path("other"), node.path("next")).expect("links");
    fs::rename(node.path("next"), node.path("net.d")).expect("renames");
    assert_eq!(agent.wait_end(), Some(1), "{}", node.log());
    assert!(node.log().contains("net.d is another directory than the one"), "{}", node.log());
    assert!(!node.calls_us(), "the test can fail");
    let _next = node.start_ready();
    assert!(node.calls_us(), "{}", node.log());
}

#[test]
fn an_agent_with_a_missing_directory_is_unconfined_and_reports_that() {
    let node = Node::with_the_real_plugin();
    fs::rename(node.path("net.d"), node.path("later")).expect("renames");
    let agent = node.start();
    agent.wait("the line", || node.log().contains("not confined by Landlock: "));
    assert!(node.log().contains("net.d is not there yet"), "{}", node.log());
    fs::rename(node.path("later"), node.path("net.d")).expect("renames");
    agent.wait_ready();
    assert!(node.calls_us());
}

/// The test itself may do everything, as root on a node. In a container an agent has less to begin with.
#[test]
fn an_agent_keeps_the_capabilities_of_what_is_switched_on() {
    // CHOWN, DAC_OVERRIDE, FOWNER; NET_ADMIN, NET_RAW, SYS_ADMIN; SYS_PTRACE.
    let (files, rules, processes) = (0b1011_u64, 1 << 12 | 1 << 13 | 1 << 21, 1 << 19);
    for (switch, wanted) in [
        (("REPAIR_DELETE_PODS", "true"), files),
        (("DRIFT_WATCH_INTERVAL", "1m"), files | rules),
        (("REPAIR_REPAIR_PODS", "true"), files | rules | processes),
    ] {
        let mut node = Node::with_the_real_plugin();
        node.set(switch.0, switch.1);
        let agent = node.start_ready();
        let status = fs::read_to_string(format!("/proc/{}/status", agent.id())).expect("reads");
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            assert!(status.contains(&format!("{set}:\t{wanted:016x}\n")), "{switch:?} {set}: {status}");
        }
        assert!(status.contains("NoNewPrivs:\t1\n"), "{switch:?}: {status}");
    }
}
