//! `install-cni install --once` and `install-cni uninstall`, as an image's build or a systemd unit runs them.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use cni_core::net_dir::Network;
use e2e::agent::{self, CALICO, Node};

const SERVER: [&str; 4] =
    ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBERNETES_SERVICE_PROTOCOL", "SKIP_TLS_VERIFY"];

/// A node that knows no cluster.
fn bare(confs: &[(&str, &str)]) -> Node {
    let mut node = Node::new(confs);
    for name in SERVER {
        node.env.remove(name);
    }
    node
}

fn run(node: &Node, args: &[&str]) -> Output {
    node.command(args).output().expect("runs")
}

fn said(done: &Output) -> String {
    String::from_utf8_lossy(&done.stderr).into_owned()
}

#[track_caller]
fn assert_ends(done: &Output, code: i32, words: &[&str]) {
    let said = said(done);
    assert_eq!(done.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "{word:?} is not in {said}");
    }
}

/// What the installed plugin answers for a pod, with what the runtime would hand to it.
fn add(node: &Node, namespace: &str) -> (bool, String) {
    let text = node.conf("10-calico.conflist").expect("a list");
    let network = Network::parse("10-calico.conflist", &text).expect("parses");
    let mut conf = network.handed().expect("an entry");
    conf["prevResult"] = serde_json::json!({"cniVersion": "0.3.1", "interfaces": [], "ips": []});
    let mut plugin = Command::new(node.path("bin/istio-cni"))
        .env_clear()
        .envs([
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "once"),
            ("CNI_NETNS", "/proc/self/ns/net"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/"),
            ("CNI_ARGS", &format!("K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=cart-0")),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    plugin.stdin.take().expect("a pipe").write_all(conf.to_string().as_bytes()).expect("writes");
    let done = plugin.wait_with_output().expect("ends");
    (done.status.success(), String::from_utf8_lossy(&done.stdout).into_owned())
}

fn modified(path: &Path) -> std::time::SystemTime {
    fs::metadata(path).and_then(|known| known.modified()).expect("is there")
}

#[test]
fn once_installs_everything_and_uninstall_removes_it_to_the_last_byte() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let before = node.confs();
    assert_ends(&run(&node, &["install", "--once"]), 0, &["wrote a network configuration"]);
    assert!(node.calls_us() && node.has_plugin());
    assert!(node.kubeconfig().is_some_and(|text| text.contains("token-1")));
    let written = ["net.d/10-calico.conflist", "bin/istio-cni", "run/istio-cni-kubeconfig"];
    let times = written.map(|part| modified(&node.path(part)));
    assert_ends(&run(&node, &["install", "--once"]), 0, &["was installed already"]);
    assert_eq!(written.map(|part| modified(&node.path(part))), times, "a second time changes nothing");
    assert_ends(&run(&node, &["uninstall"]), 0, &["the plugin is removed"]);
    assert_eq!(node.confs(), before);
    assert!(!node.path("bin/istio-cni").exists() && node.kubeconfig().is_none());
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
}

#[test]
fn without_a_cluster_the_plugin_is_installed_and_holds_pods_back_until_there_are_credentials() {
    let mut node = bare(&[("10-calico.conflist", CALICO)]);
    node.use_real_plugin();
    node.set("EXCLUDE_NAMESPACES", "kube-system");
    assert_ends(
        &run(&node, &["install", "--once"]),
        0,
        &["no credentials", "KUBERNETES_SERVICE_HOST", "istio-cni-kubeconfig", "held back"],
    );
    assert!(node.calls_us() && node.has_plugin() && node.kubeconfig().is_none());
    let (added, answer) = add(&node, "shop");
    assert!(!added && answer.contains("\"code\":11") && answer.contains("istio-cni-kubeconfig"), "{answer}");
    let (added, answer) = add(&node, "kube-system");
    assert!(added, "what needs no credentials starts: {answer}");

    // Credentials that an operator gave are nothing this run could make better.
    fs::write(node.path("run/istio-cni-kubeconfig"), "apiVersion: v1\n").expect("writes");
    assert_ends(&run(&node, &["install", "--once"]), 1, &["kubeconfig"]);
    assert_eq!(node.kubeconfig().as_deref(), Some("apiVersion: v1\n"));
    fs::remove_file(node.path("run/istio-cni-kubeconfig")).expect("removes");

    // The agent brings them.
    for (name, value) in SERVER.iter().zip(["127.0.0.1", "1", "http", "true"]) {
        node.set(name, value);
    }
    let agent = node.start_ready();
    assert!(node.kubeconfig().is_some());
    agent.kill();
    for name in SERVER {
        node.env.remove(name);
    }
    assert_ends(&run(&node, &["uninstall"]), 0, &["the plugin is removed"]);
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
}

#[test]
fn credentials_that_are_asked_for_and_missing_are_a_failure() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    fs::remove_file(node.path("account/token")).expect("removes");
    assert_ends(&run(&node, &["install", "--once"]), 1, &["cannot write the plugin's kubeconfig", "token"]);
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO), "no entry without what it needs");
}

#[test]
fn half_an_api_server_is_refused() {
    let mut node = bare(&[("10-calico.conflist", CALICO)]);
    node.set("KUBERNETES_SERVICE_HOST", "10.0.0.1");
    assert_ends(&run(&node, &["install", "--once"]), 1, &["KUBERNETES_SERVICE_PORT: missing"]);
    assert!(!node.has_plugin());
}

#[test]
fn without_a_network_configuration_it_fails_and_reports_that() {
    let node = bare(&[]);
    assert_ends(
        &run(&node, &["install", "--once"]),
        1,
        &["no network configuration that the runtime can load", "run it again"],
    );
    assert!(node.has_plugin(), "what can be done is done");
    node.write_conf("10-calico.conflist", CALICO);
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
    assert!(node.calls_us());
}

/// Runs it while one of its system calls on a file fails, in the words of strace.
fn run_while(node: &Node, args: &[&str], file: &Path, fault: &str) -> Output {
    let (path, trace) = (file.display().to_string(), node.path("trace").display().to_string());
    let (call, _) = fault.split_once(':').expect("a call and its fault");
    let agent = node.command(args);
    let mut strace = Command::new("strace");
    strace.args(["-D", "-f", "-qq", "-o", &trace, "-P", &path, "-e", &format!("trace={call}")]);
    strace
        .args(["-e", &format!("inject={fault}")])
        .arg(agent.get_program())
        .args(agent.get_args())
        .env_clear();
    strace.envs(agent.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let done = strace.output().expect("runs");
    assert!(fs::read_to_string(&trace).expect("a trace").contains("INJECTED"), "{fault} was not met");
    done
}

#[test]
fn a_configuration_that_cannot_be_read_is_named_with_the_reason() {
    let node = bare(&[("10-calico.conflist", CALICO)]);
    let file = node.path("net.d/10-calico.conflist");
    let done = run_while(&node, &["install", "--once"], &file, "read:error=ENOMEM:when=1");
    assert_ends(
        &done,
        1,
        &["10-calico.conflist comes first and cannot be read (Cannot allocate memory", "run it again"],
    );
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
}

#[test]
fn a_directory_in_the_place_of_a_configuration_is_named_and_not_taken_for_another_writer() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.env.insert("CHAINED_CNI_PLUGIN".into(), "false".into());
    // What a container runtime makes of a mount whose file is not there yet.
    fs::create_dir(node.path("net.d/YYY-istio-cni.conf")).expect("a directory");
    let done = run(&node, &["install", "--once"]);
    assert_ends(&done, 1, &["YYY-istio-cni.conf", "is not a regular file"]);
    assert!(!said(&done).contains("another program changed it"), "{}", said(&done));
}

/// Without its plugin no pod of the runtime would start that reads the file beside the list.
#[test]
fn an_unreadable_file_or_folder_beside_the_list_does_not_count_as_gone() {
    const FOLDER: &str = "net.d/k8s-pod-network";
    let mut node = bare(&[("10-calico.conflist", CALICO)]);
    node.set("CNI_INSTALL", "drop-in");
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
    for (name, call) in [("/zz-istio-cni.conf", "openat"), ("/zz-istio-cni.conf", "read"), ("", "getdents64")]
    {
        let file = node.path(&format!("{FOLDER}{name}"));
        let done = run_while(&node, &["uninstall"], &file, &format!("{call}:error=EIO:when=1"));
        assert_ends(&done, 1, &["k8s-pod-network", "nput/output error"]);
        assert!(node.has_plugin() && file.exists(), "{name}: an entry is left that needs it");
    }
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
    assert!(!node.path(FOLDER).exists() && !node.has_plugin());

    // What is behind a link the agent did not write.
    std::os::unix::fs::symlink("/nonexistent/folder", node.path(FOLDER)).expect("links");
    assert_ends(&run(&node, &["install", "--once"]), 1, &["symbolic link to /nonexistent/folder"]);
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
    fs::remove_file(node.path(FOLDER)).expect("removes");
    fs::create_dir(node.path("elsewhere")).expect("makes");
    std::os::unix::fs::symlink(node.path("elsewhere"), node.path(FOLDER)).expect("links");
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
}

#[test]
fn an_unreadable_file_does_not_count_as_gone() {
    let node = bare(&[("10-calico.conflist", CALICO)]);
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
    for name in ["10-calico.conflist", "10-calico.conflist.istio-cni-original"] {
        let done =
            run_while(&node, &["uninstall"], &node.path("net.d").join(name), "statx:error=EACCES:when=1");
        assert_ends(&done, 1, &[name, "ermission denied"]);
        assert!(node.has_plugin(), "{name}: an entry may be left that needs it");
    }
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
    assert_eq!(node.confs().len(), 1, "{:?}", node.confs());
}

#[test]
fn a_directory_behind_a_link_to_nowhere_is_not_taken_for_clean() {
    let node = bare(&[("10-calico.conflist", CALICO)]);
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
    for name in ["bin", "net.d"] {
        let (there, away) = (node.path(name), node.path("away"));
        fs::rename(&there, &away).expect("renames");
        std::os::unix::fs::symlink("/nowhere", &there).expect("links");
        assert_ends(
            &run(&node, &["uninstall"]),
            1,
            &[&there.display().to_string(), "the target of this link does not exist"],
        );
        fs::remove_file(&there).expect("removes");
        fs::rename(&away, &there).expect("renames");
    }
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
    assert!(!node.has_plugin());
}

#[test]
fn another_programs_file_stays_as_it_is() {
    let mut node = bare(&[("10-calico.conflist", CALICO)]);
    let before = node.confs();
    node.set("ISTIO_OWNED_CNI_CONFIG", "true");
    node.set("ISTIO_OWNED_CNI_CONFIG_FILENAME", "10-calico.conflist");
    assert_ends(&run(&node, &["install", "--once"]), 1, &["10-calico.conflist belongs to another program"]);
    assert_eq!(node.confs(), before);
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
    assert_eq!(node.confs(), before);
}

#[test]
fn a_directory_is_not_installed_into_itself_nor_emptied() {
    let mut node = bare(&[("10-calico.conflist", CALICO)]);
    fs::write(node.path("image/bridge"), agent::PLUGIN).expect("writes");
    let image = node.path("image").display().to_string();
    node.set("MOUNTED_CNI_BIN_DIR", &image);
    assert_ends(
        &run(&node, &["install", "--once"]),
        1,
        &["SOURCE_CNI_BIN_DIR and MOUNTED_CNI_BIN_DIR are the same directory"],
    );
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
    assert!(node.path("image/bridge").exists(), "the node's other plugins are not ours");
}

#[test]
fn a_directory_that_is_missing_is_named_with_what_to_do() {
    let mut node = bare(&[]);
    node.set("MOUNTED_CNI_NET_DIR", "/host/etc/cni/net.d-that-is-nowhere");
    assert_ends(
        &run(&node, &["install", "--once"]),
        1,
        &["/host/etc/cni/net.d-that-is-nowhere", "MOUNTED_CNI_NET_DIR"],
    );
}

#[test]
fn an_agent_that_runs_keeps_its_own_installation() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("EXCLUDE_NAMESPACES", "of-the-agent");
    let agent = node.start_ready();
    let installed = node.confs();
    let mut other = node.command(&["install", "--once"]);
    let done = other.env("EXCLUDE_NAMESPACES", "of-the-unit").output().expect("runs");
    assert_ends(&done, 0, &["an agent runs on this node"]);
    assert_eq!(node.confs(), installed);
    // It would put back what is removed, and pods that start in between would start outside the mesh.
    assert_ends(&run(&node, &["uninstall"]), 1, &["an agent runs on this node", "delete its DaemonSet"]);
    assert_eq!(node.confs(), installed);
    assert_eq!(agent.metric("istio_cni_fights_total"), 0.0);
    agent.kill();
    // Its socket stays behind and means nothing.
    assert_ends(&run(&node, &["uninstall"]), 0, &["the plugin is removed"]);
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
}

/// As a child does that an agent had not quite started when it was killed.
#[test]
fn a_socket_that_ends_without_an_answer_is_no_agent() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
    let listener = UnixListener::bind(node.path("run/log.sock")).expect("listens");
    let mut uninstall = node.command(&["uninstall"]);
    let uninstall = uninstall.stderr(Stdio::piped()).spawn().expect("starts");
    drop(listener.accept().expect("is asked"));
    drop(listener);
    assert_ends(&uninstall.wait_with_output().expect("ends"), 0, &["the plugin is removed"]);
}

#[test]
fn an_agent_that_comes_later_takes_over() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
    node.set("EXCLUDE_NAMESPACES", "of-the-agent");
    let agent = node.start_ready();
    let list = node.conf("10-calico.conflist").expect("a list");
    assert!(list.contains("of-the-agent") && list.matches("\"type\":\"istio-cni\"").count() == 1, "{list}");
    agent.kill();
    assert_ends(&run(&node, &["uninstall"]), 0, &[]);
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
}

#[test]
fn several_at_once_are_as_one() {
    let node = Node::new(&[("10-single.conf", r#"{"cniVersion":"0.4.0","name":"single","type":"ptp"}"#)]);
    let before = node.confs();
    let once = || {
        let mut command = node.command(&["install", "--once"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts")
    };
    assert_ends(&run(&node, &["install", "--once"]), 0, &[]);
    let goal = node.confs();
    for round in 0..10 {
        assert_ends(&run(&node, &["uninstall"]), 0, &[]);
        assert_eq!(node.confs(), before, "round {round}");
        let all = [(); 6].map(|()| once());
        for done in all.map(|child| child.wait_with_output().expect("ends")) {
            assert_ends(&done, 0, &[]);
        }
        assert_eq!(node.confs(), goal, "round {round}");
        assert!(node.has_plugin() && node.kubeconfig().is_some());
        let left = fs::read_dir(node.path("bin")).expect("lists").count();
        assert_eq!(left, 1, "round {round}: temporary files");
    }
}

#[test]
fn a_plugin_that_reads_manifests_needs_no_credentials() {
    let mut node = bare(&[("10-calico.conflist", CALICO)]);
    node.use_real_plugin();
    let template = serde_json::json!({
        "type": "istio-cni", "cni_agent_run_dir": node.path("run"), "pod_manifest_dir": node.path("manifests"),
    });
    node.set("CNI_NETWORK_CONFIG", &template.to_string());
    assert_ends(&run(&node, &["install", "--once"]), 1, &["manifests"]);
    fs::create_dir(node.path("manifests")).expect("makes");
    let done = run(&node, &["install", "--once"]);
    assert_ends(&done, 0, &["was installed already"]);
    assert!(!said(&done).contains("credentials"), "{}", said(&done));
}
