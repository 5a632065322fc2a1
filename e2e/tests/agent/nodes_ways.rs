//! What nodes do to an agent: directories recreated under its mounts, inotify instances exhausted, two agents at once.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use e2e::agent::{self, CALICO, Node};
use test_support::parallel::StopOnDrop;

/// A container sees the node's directory through a bind mount, which keeps showing the old one when the node recreates it.
#[test]
fn a_directory_recreated_under_the_mount_ends_the_agent() {
    for part in ["net.d", "bin", "run"] {
        let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
        let (source, mounted) = (node.path(part), node.path("mounted"));
        fs::create_dir(&mounted).expect("makes");
        let variable = match part {
            "net.d" => "MOUNTED_CNI_NET_DIR",
            "bin" => "MOUNTED_CNI_BIN_DIR",
            _ => "CNI_AGENT_RUN_DIR",
        };
        node.set(variable, &mounted.display().to_string());
        let script = format!("mount --bind {} {}; exec \"$@\"", source.display(), mounted.display());
        let in_a_container = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", &script, "sh"];
        let agent = node.start_as(&in_a_container);
        agent.wait_ready();
        // The agent puts back what is missing for as long as the directory is there.
        agent.wait("the directory to be removed", || match fs::remove_dir_all(&source) {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => false,
            Err(error) => panic!("{error}"),
        });
        fs::create_dir(&source).expect("makes");
        assert_eq!(agent.wait_end(), Some(1), "{part}: {}", node.log());
        assert!(node.log().contains("was recreated"), "{part}: {}", node.log());
        if part != "bin" {
            assert!(node.has_plugin(), "what is still there stays");
        }
        if part == "net.d" {
            node.write_conf("10-calico.conflist", CALICO);
        }
        node.start_as(&in_a_container).wait_ready();
        assert!(node.calls_us() && node.has_plugin(), "{part}: {}", node.log());
    }
}

#[test]
fn without_inotify_it_looks_every_few_seconds() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let script = "echo 0 > /proc/sys/user/max_inotify_instances; exec \"$@\"";
    let agent = node.start_as(&["unshare", "--user", "--map-root-user", "sh", "-ec", script, "sh"]);
    agent.wait_ready();
    agent.wait_metric("istio_cni_polling", 1.0);
    assert!(node.log().contains("no inotify instance left"), "{}", node.log());
    node.write_conf("05-other.conflist", r#"{"name":"a","plugins":[{"type":"b"}]}"#);
    agent.wait("the entry in the new file", || node.calls_us());
    agent.wait_ready();
    assert_eq!(node.log().matches("no inotify instance left").count(), 1, "said once: {}", node.log());
}

/// A read that has failed once, or the target of a link: the kernel does not report when that is over.
#[test]
fn an_unloadable_configuration_is_read_again_without_an_event() {
    let mut node = Node::new(&[]);
    node.set("LANDLOCK", "false");
    // Other tokens would make it look as well.
    node.set("PLUGIN_SERVICE_ACCOUNT", "");
    let elsewhere = node.path("elsewhere");
    fs::write(&elsewhere, "{").expect("writes");
    std::os::unix::fs::symlink(&elsewhere, node.path("net.d/10-calico.conflist")).expect("links");
    let agent = node.start();
    agent.wait("the file to be refused", || node.log().contains("cannot be loaded"));
    // What it wrote itself wakes it as well.
    agent.passes_at_rest();
    fs::write(&elsewhere, CALICO).expect("writes");
    agent.wait("the entry", || node.calls_us());
}

#[test]
fn an_agent_with_inotify_does_not_poll() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    assert_eq!(node.start_ready().metric("istio_cni_polling"), 0.0);
}

#[test]
fn a_template_that_changes_is_read_again() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    fs::create_dir(node.path("template")).expect("makes");
    let file = node.path("template/entry");
    fs::write(&file, r#"{"name":"x","type":"istio-cni","cni_agent_run_dir":"__CNI_AGENT_RUN_DIR__"}"#)
        .expect("writes");
    node.set("CNI_NETWORK_CONFIG_FILE", &file.display().to_string());
    let agent = node.start_ready();
    // What it wrote itself wakes it as well.
    agent.passes_at_rest();
    let newer = r#"{"name":"x","type":"istio-cni","cni_agent_run_dir":"__CNI_AGENT_RUN_DIR__","exclude_namespaces":["shop"]}"#;
    fs::write(&file, newer).expect("writes");
    agent.wait("the new entry", || node.conf("10-calico.conflist").is_some_and(|text| text.contains("shop")));
}

#[test]
fn another_process_on_the_nodes_directories_is_waited_for() {
    for part in ["net.d", "bin", "run"] {
        let node = Node::new(&[("10-calico.conflist", CALICO)]);
        let held = File::open(node.path(part)).expect("opens");
        held.lock().expect("locks");
        let agent = node.start();
        agent.wait_not_ready("another agent is at work");
        assert_eq!(node.confs().len(), 1);
        assert!(!node.path("bin/istio-cni").exists() && node.kubeconfig().is_none(), "{part}");
        held.unlock().expect("unlocks");
        agent.wait_ready();
        if part == "bin" {
            held.lock().expect("locks");
            let done = node.command(&["cleanup"]).output().expect("runs");
            assert_eq!(done.status.code(), Some(1));
            assert!(node.calls_us() && node.has_plugin() && node.kubeconfig().is_some());
        }
    }
}

/// An entry that is there before and after one looks for what it needs, and was not written in between, was there all the time.
fn assert_sound(node: &Node, round: usize) {
    let path = node.path("net.d/10-calico.conflist");
    let entry = || {
        let known = fs::metadata(&path).ok()?;
        let text = fs::read_to_string(&path).ok()?;
        text.contains("\"istio-cni\"").then_some((known.ino(), known.ctime(), known.ctime_nsec()))
    };
    let before = entry();
    let has_all = node.path("bin/istio-cni").exists() && node.kubeconfig().is_some();
    if before.is_some() && before == entry() {
        assert!(has_all, "round {round}: an entry without what it needs");
    }
}

#[test]
fn an_agent_that_comes_while_another_cleans_up_leaves_no_entry_without_its_binary() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    // Large, so that writing it takes a while.
    let large = [agent::PLUGIN.as_bytes(), &vec![b'#'; 8 << 20]].concat();
    fs::write(node.path("image/istio-cni"), large).expect("writes");
    node.start_ready().kill();
    for round in 0..20_usize {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let sampler = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert_sound(&node, round);
                }
            });
            let ended = StopOnDrop(&done);
            let mut cleanup = node.command(&["cleanup"]);
            let cleanup = cleanup.stderr(std::process::Stdio::piped()).spawn().expect("starts");
            thread::sleep(std::time::Duration::from_micros(round as u64 * 500));
            let agent = node.start();
            let cleanup = cleanup.wait_with_output().expect("ends");
            let said = String::from_utf8_lossy(&cleanup.stderr).into_owned();
            assert!(
                cleanup.status.success() || said.contains("an agent runs on this node"),
                "round {round}: {said}"
            );
            agent.wait("the entry", || node.calls_us() && node.has_plugin());
            agent.wait_ready();
            agent.kill();
            drop(ended);
            sampler.join().expect("sound all the time");
        });
    }
}
