//! The real program on real files: installing, watching, serving, leaving.

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use e2e::agent::{self, Agent, CALICO, FakeApi, Node, daemon_set, exchange, get, request};
use e2e::http::failure;
use e2e::pods::Proc;
use e2e::ztunnel::Ztunnel;
use test_support::netns::{Families, Namespace};
use test_support::parallel::StopOnDrop;
use test_support::port::free_port;
use test_support::sample;

const REAL: [(&str, &str); 10] = [
    ("10-calico.conflist", CALICO),
    ("05-cilium.conflist", include_str!("../../fixtures/conflists/05-cilium.conflist")),
    ("10-flannel.conflist", include_str!("../../fixtures/conflists/10-flannel.conflist")),
    ("10-aws.conflist", include_str!("../../fixtures/conflists/10-aws.conflist")),
    ("10-kindnet.conflist", include_str!("../../fixtures/conflists/10-kindnet.conflist")),
    ("10-ovn-kubernetes.conf", include_str!("../../fixtures/conflists/10-ovn-kubernetes.conf")),
    ("10-azure.conflist", include_str!("../../fixtures/conflists/10-azure.conflist")),
    ("10-weave.conflist", include_str!("../../fixtures/conflists/10-weave.conflist")),
    ("10-k3s-flannel.conflist", include_str!("../../fixtures/conflists/10-k3s-flannel.conflist")),
    ("00-multus.conf", include_str!("../../fixtures/conflists/00-multus.conf")),
];

fn identity(path: &Path) -> (u64, i64, i64) {
    let known = fs::metadata(path).expect("is there");
    (known.ino(), known.ctime(), known.ctime_nsec())
}

#[test]
fn real_files_of_ten_network_plugins_go_in_and_out_byte_for_byte() {
    let gone = FakeApi::start(404, &failure(404));
    for (name, text) in REAL {
        let mut node = Node::new(&[(name, text)]);
        gone.serve(&mut node);
        agent::set_mode(&node.path("net.d").join(name), 0o644);
        let before = node.confs();
        let agent = node.start_ready();
        assert!(node.calls_us() && node.has_plugin(), "{name}");
        // Its owner depends on its name: a copy in front has the entry.
        let list = match name {
            "10-ovn-kubernetes.conf" => Path::new("02-istio-cni.conflist").to_owned(),
            _ => Path::new(name).with_extension("conflist"),
        };
        assert_eq!(
            fs::metadata(node.path("net.d").join(list)).expect("a list").mode() & 0o777,
            0o644,
            "{name}"
        );
        assert_eq!(agent.end(), Some(0));
        assert_eq!(node.confs(), before, "{name}");
        assert_eq!(
            fs::metadata(node.path("net.d").join(name)).expect("is back").mode() & 0o777,
            0o644,
            "{name}"
        );
        assert!(!node.path("bin/istio-cni").exists() && node.kubeconfig().is_none(), "{name}");
        assert!(!node.path("run/log.sock").exists());
    }
}

#[test]
fn files_have_the_modes_they_should() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("KUBECONFIG_MODE", "0640");
    let _agent = node.start_ready();
    let mode = |part: &str| fs::metadata(node.path(part)).expect("is there").mode() & 0o777;
    assert_eq!(mode("bin/istio-cni"), 0o755);
    assert_eq!(mode("run/istio-cni-kubeconfig"), 0o640);
    assert_eq!(mode("run/log.sock"), 0o600);
}

#[test]
fn a_missing_network_is_reported_and_waited_for() {
    let node = Node::new(&[]);
    let agent = node.start();
    agent.wait_not_ready("waiting for the network plugin");
    assert_eq!(get(node.health, "/healthz"), Some((200, "ok\n".into())));
    assert!(node.has_plugin() && node.kubeconfig().is_some(), "the rest is there already");
    node.write_conf("10-calico.conflist", CALICO);
    agent.wait_ready();
    assert!(node.calls_us());
    agent.wait_metric("istio_cni_install_ready", 1.0);
}

#[test]
fn a_file_that_comes_to_be_first_is_followed() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let api = FakeApi::start(200, &daemon_set(false));
    api.serve(&mut node);
    let agent = node.start_ready();
    node.write_conf("05-bridge.conf", r#"{"cniVersion":"0.4.0","name":"b","type":"bridge"}"#);
    agent.wait("the entry in the new file", || node.calls_us());
    agent.wait_ready();
    let list = node.conf("05-bridge.conflist").expect("a list");
    assert!(list.contains("\"cniVersion\": \"0.4.0\"") && list.contains("\"name\": \"b\""), "{list}");
    agent.wait_metric("istio_cni_conflist_obstacles_total{kind=\"preempted\"}", 1.0);
    agent.wait("an event", || api.posted().iter().any(|event| event.contains("NetworkConfigPreempted")));
}

#[test]
fn a_pinned_file_that_is_not_used_is_not_ready() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO), ("05-x.conflist", REAL[2].1)]);
    node.set("CNI_CONF_NAME", "10-calico.conf");
    let agent = node.start();
    agent.wait_not_ready("the runtime uses 05-x.conflist, which comes before 10-calico.conflist");
    agent.wait("the gauge", || agent.metric("istio_cni_preempted") > 0.0);
    fs::remove_file(node.path("net.d/05-x.conflist")).expect("removes");
    agent.wait_ready();
    agent.wait("the gauge", || agent.metric("istio_cni_preempted") == 0.0);
}

#[test]
fn an_entry_is_counted_as_missing_each_time() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    let missing = "istio_cni_conflist_obstacles_total{kind=\"missing\"}";
    let at_first = agent.metric(missing);
    for _ in 0..2 {
        node.write_conf("10-calico.conflist", CALICO);
        agent.wait("the entry restored", || node.calls_us());
        agent.wait_ready();
    }
    assert_eq!(agent.metric(missing).to_string(), (at_first + 2.0).to_string());
}

#[test]
fn an_entry_that_is_removed_edited_or_moved_is_restored() {
    for change in [
        |_: &str| CALICO.to_owned(),
        |with: &str| with.replace("\"native_nftables\":false", "\"native_nftables\":true"),
        |with: &str| with.replace("}]\n}", "},{\"type\":\"tuning\"}]\n}"),
        |_: &str| CALICO.replace("\"mtu\":0", "\"mtu\":1400"),
    ] {
        let node = Node::new(&[("10-calico.conflist", CALICO)]);
        let agent = node.start_ready();
        let with = node.conf("10-calico.conflist").expect("is there");
        let changed = change(&with);
        assert_ne!(changed, with);
        node.write_conf("10-calico.conflist", &changed);
        agent.wait("the entry restored", || {
            let now = node.conf("10-calico.conflist").unwrap_or_default();
            now != changed && node.calls_us()
        });
        agent.wait_ready();
        assert_eq!(agent.metric("istio_cni_fights_total"), 0.0, "once is not a conflict");
    }
}

#[test]
fn a_file_written_in_place_piece_by_piece_is_never_lost() {
    use std::io::Write;
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    let newer = CALICO.replace("\"mtu\":0", "\"mtu\":1450");
    let mut file = fs::File::create(node.path("net.d/10-calico.conflist")).expect("opens");
    for part in newer.as_bytes().chunks(97) {
        file.write_all(part).expect("writes");
        thread::sleep(Duration::from_millis(15));
    }
    drop(file);
    agent.wait("the entry in the new text", || node.calls_us());
    assert!(node.conf("10-calico.conflist").expect("is there").contains("\"mtu\":1450"));
}

#[test]
fn another_writer_who_fights_is_named_and_left_alone_for_a_while() {
    let mut node = Node::new(&[("05-cilium.conflist", REAL[1].1)]);
    let api = FakeApi::start(200, &daemon_set(false));
    api.serve(&mut node);
    let agent = node.start_ready();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                if node.conf("05-cilium.conflist").is_some_and(|text| text.contains("istio-cni")) {
                    node.write_conf("05-cilium.conflist", REAL[1].1);
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        // Also where the test fails: the scope waits for the other writer.
        let _peace = StopOnDrop(&is_over);
        let reason = agent.wait_not_ready("next attempt in");
        assert!(reason.contains("05-cilium.conflist has no istio-cni entry"), "{reason}");
        assert!(reason.contains("probably Cilium") && reason.contains("cni.exclusive=false"), "{reason}");
        let count = agent.metric("istio_cni_installs_total{result=\"SUCCESS\"}");
        // Backoff grow from one second on: this is the fourth, or a later one where the machine stood still.
        let mut tries = 0.0;
        agent.wait("a pause of eight seconds", || {
            tries = agent.metric("istio_cni_installs_total{result=\"SUCCESS\"}") - count;
            tries > 8.0 || announced_pause(&agent) >= 8
        });
        // A few more where the machine stands still so long that the fight seems to be over; every time it would be a hundred.
        assert!((1.0..=8.0).contains(&tries), "{tries} tries without a pause of eight seconds");
        another_file_is_followed_at_once(&node, &agent);
        is_over.store(true, Ordering::Relaxed);
    });
    agent.wait_ready();
    agent.wait_metric("istio_cni_fights_total", 1.0);
    agent.wait("an event", || api.posted().iter().any(|event| event.contains("NetworkConfigContested")));
}

/// For how many seconds the agent says it leaves the file alone.
fn announced_pause(agent: &Agent<'_>) -> u64 {
    let reason = agent.readyz().unwrap_or_default().1;
    let seconds = reason.split("next attempt in ").nth(1).and_then(|rest| rest.split(' ').next());
    seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(0)
}

/// And not at the next attempt at the file that is fought for.
fn another_file_is_followed_at_once(node: &Node, agent: &Agent<'_>) {
    let mut announced = 0;
    agent.wait("seconds of peace", || {
        announced = announced_pause(agent);
        announced >= 7
    });
    node.write_conf("00-first.conflist", REAL[2].1);
    let followed = Instant::now();
    agent.wait_ready();
    let took = followed.elapsed();
    fs::remove_file(node.path("net.d/00-first.conflist")).expect("removes");
    // Announced in whole seconds.
    assert!(took < Duration::from_secs(announced - 1), "{took:?}, next attempt in {announced} s");
}

#[test]
fn a_rotated_token_changes_the_kubeconfig_and_nothing_else() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    // As the kubelet does it: a directory of the files, and a link to it that is replaced.
    let account = node.path("account");
    let fill = |name: &str, token: &str| {
        fs::create_dir(account.join(name)).expect("makes");
        fs::write(account.join(name).join("token"), token).expect("writes");
        std::os::unix::fs::symlink(name, account.join("..data_tmp")).expect("links");
        fs::rename(account.join("..data_tmp"), account.join("..data")).expect("renames");
    };
    fs::remove_file(account.join("token")).expect("removes");
    fill("..one", "token-1");
    std::os::unix::fs::symlink("..data/token", account.join("token")).expect("links");
    let agent = node.start_ready();
    let unchanged = [node.path("net.d/10-calico.conflist"), node.path("bin/istio-cni")];
    let before = unchanged.each_ref().map(|path| identity(path));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut answers = 0;
            while answers < 20 || !done.load(Ordering::Relaxed) {
                assert_eq!(agent.readyz().expect("answers"), (200, "ready\n".into()));
                answers += 1;
            }
            answers
        });
        fill("..two", "token-2");
        agent.wait("the new token", || {
            node.kubeconfig().is_some_and(|text| text.contains("token: \"token-2\""))
        });
        done.store(true, Ordering::Relaxed);
        assert!(watcher.join().expect("always ready") >= 20);
    });
    assert_eq!(unchanged.each_ref().map(|path| identity(path)), before);
    assert!(!node.log().contains("token-"), "no token in the log");
}

#[test]
fn a_token_may_have_a_file_of_its_own() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("KUBECONFIG_TOKEN_FILE", "true");
    let agent = node.start_ready();
    let kubeconfig = identity(&node.path("run/istio-cni-kubeconfig"));
    fs::write(node.path("account/token"), "token-2").expect("writes");
    let token = || fs::read_to_string(node.path("run/istio-cni-token")).unwrap_or_default();
    agent.wait("the new token", || token() == "token-2");
    assert_eq!(identity(&node.path("run/istio-cni-kubeconfig")), kubeconfig);
    assert!(node.kubeconfig().expect("is there").contains("/run/istio-cni-token\""));
}

#[test]
fn deleted_binaries_and_kubeconfigs_come_back() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    fs::remove_file(node.path("bin/istio-cni")).expect("removes");
    agent.wait("the binary", || node.has_plugin());
    fs::remove_file(node.path("run/istio-cni-kubeconfig")).expect("removes");
    agent.wait("the kubeconfig", || node.kubeconfig().is_some());
    fs::write(node.path("bin/istio-cni"), "something else").expect("writes");
    agent.wait("the binary", || node.has_plugin());
    agent.passes_at_rest();
    fs::set_permissions(node.path("bin/istio-cni"), fs::Permissions::from_mode(0o644)).expect("sets");
    agent.wait("the mode", || {
        fs::metadata(node.path("bin/istio-cni")).is_ok_and(|known| known.mode() & 0o777 == 0o755)
    });
    agent.wait_ready();
}

#[test]
fn equal_binaries_are_not_copied_again() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.start_ready().kill();
    let before = [
        node.path("bin/istio-cni"),
        node.path("net.d/10-calico.conflist"),
        node.path("run/istio-cni-kubeconfig"),
    ];
    let identities = before.each_ref().map(|path| identity(path));
    let _agent = node.start_ready();
    assert_eq!(before.each_ref().map(|path| identity(path)), identities);
}

#[test]
fn a_burst_of_events_is_one_pass() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    // Passes for what the agent wrote itself.
    let before = agent.passes_at_rest();
    let start = Instant::now();
    for _ in 0..100 {
        node.write_conf("99-other.conflist", r#"{"name":"a","plugins":[{"type":"b"}]}"#);
    }
    // A burst that takes longer, because the machine does something else, is several.
    let bursts = start.elapsed().as_secs_f64() / 0.1;
    agent.wait("a pass", || agent.metric("istio_cni_passes_total") > before);
    let passes = agent.passes_at_rest() - before;
    assert!(passes <= 3.0 + bursts, "{passes} passes in {bursts:.1} bursts");
    // Files that do not matter cause no pass.
    let before = agent.passes_at_rest();
    for count in 0..100 {
        fs::write(node.path(&format!("net.d/{count}.tmp")), "x").expect("writes");
        fs::write(node.path(&format!("bin/{count}")), "x").expect("writes");
    }
    assert_eq!(agent.passes_at_rest(), before, "{}", node.log());
}

/// The agent asks for the plugin's token again and again; nothing of the node's files changes by that.
#[test]
fn an_api_server_that_stays_away_causes_no_pass() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    let passes = agent.passes_at_rest();
    let requests = || agent.metric("istio_cni_plugin_token_requests_total{result=\"failed\"}");
    let before = requests();
    agent.wait("two further requests", || requests() >= before + 2.0);
    assert_eq!(agent.passes_at_rest(), passes, "{}", node.log());
}

#[test]
fn a_directory_that_is_replaced_is_watched_again() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    // One that is confined ends instead, because it may not write there (landlock.rs).
    node.set("LANDLOCK", "false");
    let agent = node.start_ready();
    fs::rename(node.path("net.d"), node.path("old.d")).expect("renames");
    agent.wait_not_ready("net.d");
    fs::create_dir(node.path("net.d")).expect("makes");
    node.write_conf("10-flannel.conflist", REAL[2].1);
    agent.wait_ready();
    agent.wait_metric("istio_cni_watch_restarts_total{watch=\"files\"}", 1.0);
    node.write_conf("10-flannel.conflist", REAL[2].1);
    agent.wait("the entry again", || node.calls_us());
}

#[test]
fn an_upgrade_leaves_the_plugin_and_removal_takes_it() {
    for (status, object, stays) in [
        (200, daemon_set(false), true),
        (200, daemon_set(true), false),
        (404, failure(404), false),
        (403, failure(403), false),
        (401, failure(401), false),
        (500, failure(500), true),
    ] {
        let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
        FakeApi::start(status, &object).serve(&mut node);
        let agent = node.start_ready();
        assert_eq!(agent.end(), Some(0), "{status}");
        assert_eq!((node.calls_us(), node.has_plugin()), (stays, stays), "{status}\n{}", node.log());
        // Istio's agent may follow, which would leave others behind.
        assert_eq!(node.confs().into_keys().collect::<Vec<_>>(), ["10-calico.conflist"], "{status}");
    }
}

#[test]
fn an_api_server_that_does_not_answer_leaves_the_plugin() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    assert_eq!(agent.end(), Some(0));
    assert!(node.calls_us() && node.has_plugin() && node.kubeconfig().is_some());
}

#[test]
fn a_failed_start_removes_nothing_and_reports_the_cause() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.start_ready().kill();
    let before = node.confs();
    fs::remove_file(node.path("account/token")).expect("removes");
    let agent = node.start();
    // Until the first pass is done, the missing token is reported as a missing client.
    let reason = agent.wait_not_ready("cannot write the plugin's kubeconfig");
    assert!(reason.contains("account/token"), "{reason}");
    agent.wait_metric("istio_cni_installs_total{result=\"CREATE_KUBECONFIG_FAILURE\"}", 1.0);
    assert_eq!((node.confs(), node.has_plugin(), node.kubeconfig().is_some()), (before.clone(), true, true));
    fs::write(node.path("account/token"), "token-2").expect("writes");
    agent.wait_ready();
    drop(agent);

    let mut wrong = node;
    wrong.set("KUBECONFIG_MODE", "7");
    let done = wrong.command(&[]).output().expect("runs");
    assert_eq!(done.status.code(), Some(1));
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(error.contains("KUBECONFIG_MODE: \"7\"") && !error.contains("panic"), "{error}");
    assert_eq!((wrong.confs(), wrong.has_plugin()), (before, true));
}

#[test]
fn an_image_without_the_plugin_is_reported() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    fs::remove_file(node.path("image/istio-cni")).expect("removes");
    let agent = node.start();
    agent.wait_not_ready("the image lacks it");
    assert!(!node.calls_us(), "no entry without its binary");
    agent.wait_metric("istio_cni_installs_total{result=\"COPY_BINARIES_FAILURE\"}", 1.0);
}

#[test]
fn cleanup_takes_everything_out() {
    let node = Node::new(&[("10-ovn-kubernetes.conf", REAL[5].1)]);
    let before = node.confs();
    node.start_ready().kill();
    assert_ne!(node.confs(), before);
    let done = node.command(&["cleanup"]).output().expect("runs");
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(node.confs(), before);
    assert!(!node.path("bin/istio-cni").exists() && node.kubeconfig().is_none());
    assert_eq!(node.command(&["cleanup"]).status().expect("runs").code(), Some(0), "a second time as well");
}

#[test]
fn cleanup_goes_on_past_a_corrupt_file() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.start_ready().kill();
    let with = node.conf("10-calico.conflist").expect("is there");
    node.write_conf("10-calico.conflist", &with[..with.len() - 3]);
    let done = node.command(&["cleanup"]).output().expect("runs");
    let error = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1));
    assert!(error.contains("10-calico.conflist names istio-cni and cannot be edited"), "{error}");
    assert!(error.contains("10-calico.conflist.istio-cni-original"), "{error}");
    assert!(!node.path("bin/istio-cni").exists() && node.kubeconfig().is_none());
    assert_eq!(node.conf("10-calico.conflist.istio-cni-original").as_deref(), Some(CALICO));
}

/// As the runtime's own JSON parser loads them: it takes any bytes in a text, and any size.
#[test]
fn cleanup_continues_past_unreadable_files_of_other_programs() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.start_ready().kill();
    let foreign = [
        ("20-latin.conflist", b"{\"name\":\"caf\xe9\",\"plugins\":[{\"type\":\"bridge\"}]}".to_vec()),
        ("30-large.conflist", [b"{\"name\":\"n\"}".to_vec(), vec![b' '; 5 << 20]].concat()),
    ];
    for (name, content) in &foreign {
        fs::write(node.path("net.d").join(name), content).expect("writes");
    }
    let done = node.command(&["cleanup"]).output().expect("runs");
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(!node.path("bin/istio-cni").exists() && node.kubeconfig().is_none());
    assert!(!node.path("net.d/10-calico.conflist.istio-cni-original").exists());
    for (name, content) in &foreign {
        assert!(fs::read(node.path("net.d").join(name)).expect("is there") == *content, "{name}");
    }
}

/// Only Istio's agent can have put it there, and a runtime loads it.
#[test]
fn cleanup_keeps_what_an_unreadable_file_with_the_entry_needs() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.start_ready().kill();
    // The name spans two of the pieces in which a file is read.
    let mut content = b"{\"name\":\"caf\xe9\",\"x\":\"".to_vec();
    content.resize((64 << 10) - 30, b'x');
    content.extend(b"\",\"plugins\":[{\"type\":\"istio-cni\"}]}");
    fs::write(node.path("net.d/20-latin.conflist"), content).expect("writes");
    let done = node.command(&["cleanup"]).output().expect("runs");
    let error = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{error}");
    assert!(error.contains("20-latin.conflist cannot be read (not UTF-8)"), "{error}");
    assert!(node.has_plugin() && node.kubeconfig().is_some());
}

#[test]
fn a_copy_in_front_and_a_file_alone_come_and_go() {
    let gone = FakeApi::start(404, &failure(404));
    for (env, file) in [
        (("ISTIO_OWNED_CNI_CONFIG", "true"), "02-istio-cni.conflist"),
        (("CHAINED_CNI_PLUGIN", "false"), "YYY-istio-cni.conf"),
    ] {
        let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
        gone.serve(&mut node);
        node.set(env.0, env.1);
        node.set("READY_BEFORE_CALLED", "true");
        let agent = node.start_ready();
        assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
        assert!(node.conf(file).expect("is there").contains("\"istio-cni\""));
        fs::remove_file(node.path("net.d").join(file)).expect("removes");
        agent.wait("the file again", || node.conf(file).is_some());
        agent.wait_ready();
        agent.end();
        assert_eq!(node.confs().len(), 1);
    }
}

#[test]
fn a_template_of_an_older_chart_is_what_is_inserted() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let template = node.path("template");
    fs::write(&template, r#"{"cniVersion":"0.3.1","name":"istio-cni","type":"istio-cni","log_level":"__LOG_LEVEL__","kubernetes":{"kubeconfig":"__KUBECONFIG_FILEPATH__","cni_bin_dir":"/opt/cni/bin"}}"#).expect("writes");
    node.set("CNI_NETWORK_CONFIG_FILE", template.to_str().expect("text"));
    let agent = node.start_ready();
    let list: serde_json::Value =
        serde_json::from_str(&node.conf("10-calico.conflist").expect("is there")).expect("JSON");
    let kubeconfig = node.path("run/istio-cni-kubeconfig").display().to_string();
    let expected = serde_json::json!({"name": "istio-cni", "type": "istio-cni", "log_level": "warn",
        "kubernetes": {"kubeconfig": kubeconfig, "cni_bin_dir": "/opt/cni/bin"}});
    assert_eq!(list["plugins"][3], expected);

    let newer = fs::read_to_string(&template).expect("reads").replace("__LOG_LEVEL__", "error");
    fs::write(&template, newer).expect("writes");
    agent.wait("the new template", || {
        node.conf("10-calico.conflist").is_some_and(|list| list.contains("\"log_level\":\"error\""))
    });
}

#[test]
fn what_a_killed_agent_left_half_written_is_swept() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let halves = [
        "net.d/10-calico.conflist.1.istio-cni-tmp",
        "bin/istio-cni.2.istio-cni-tmp",
        "run/x.3.istio-cni-tmp",
    ];
    for half in halves {
        fs::write(node.path(half), "half").expect("writes");
    }
    let _agent = node.start_ready();
    assert!(halves.iter().all(|half| !node.path(half).exists()));
}

/// Istio's agent writes `NAME.tmp.NUMBER` first; killed, it leaves that, some of them with a token.
#[test]
fn what_istios_agent_left_half_written_is_swept_and_nothing_else() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let with_entry = r#"{"name":"n","plugins":[{"type":"calico"},{"type":"istio-cni"}]}"#;
    let theirs = [
        ("bin/istio-cni.tmp.2481", "half"),
        ("run/istio-cni-kubeconfig.tmp.77", "half"),
        ("net.d/ZZZ-istio-cni-kubeconfig.tmp.1", "half"),
        ("net.d/02-istio-cni.conflist.tmp.9", "half"),
        ("net.d/YYY-istio-cni.conf.tmp.12", ""),
        ("net.d/10-calico.conflist.tmp.3", with_entry),
    ];
    let others = [
        ("bin/calico.tmp.5", "x"),
        ("bin/istio-cni.tmp.5x", "x"),
        ("bin/istio-cni.tmp.", "x"),
        ("run/other.tmp.5", "x"),
        ("net.d/10-calico.conflist.tmp.4", CALICO),
        ("net.d/05-x.conflist.tmp.6", "half"),
    ];
    for (name, text) in theirs.iter().chain(&others) {
        fs::write(node.path(name), text).expect("writes");
    }
    let _agent = node.start_ready();
    let left = theirs.iter().filter(|(name, _)| node.path(name).exists()).collect::<Vec<_>>();
    assert!(left.is_empty(), "{left:?}");
    assert!(
        others.iter().all(|(name, text)| fs::read_to_string(node.path(name)).is_ok_and(|now| now == *text))
    );
}

#[test]
fn plugins_lines_are_logged_and_counted() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    // What is hung up on, because the machine stood still, was not counted.
    let post = |body: &[u8]| {
        let connect = || UnixStream::connect(node.path("run/log.sock")).expect("connects");
        (0..5).find_map(|_| exchange(connect(), "POST", "/log", body))
    };
    let line = r#"{"level":"info","time":"2026-11-21T07:26:50.000001Z","scope":"x","msg":"redirected","pod":"shop/cart-0","decision":"redirect","ms":"total:9.5"}"#;
    let body = serde_json::to_vec(&[line, "rubbish"]).expect("JSON");
    assert_eq!(post(&body), Some((200, String::new())));
    assert_eq!(post(b"rubbish"), Some((200, String::new())));
    let forged = line.replace("redirected", "x\\n2026\\terror\\tforged");
    post(&serde_json::to_vec(&[forged]).expect("JSON"));
    assert!(
        node.log().contains("2026-11-21T07:26:50.000001Z\tinfo\tcni-plugin\tredirected\t"),
        "{}",
        node.log()
    );
    assert!(!node.log().contains("\n2026\terror"), "{}", node.log());
    assert_eq!(agent.metric("istio_cni_plugin_add_total{outcome=\"redirect\",reason=\"\"}"), 2.0);
    assert_eq!(agent.metric("istio_cni_plugin_add_duration_seconds_count{outcome=\"redirect\"}"), 2.0);
    assert_eq!(agent.metric("istio_cni_log_entries_total{result=\"malformed\"}"), 2.0);
    post(&vec![b'['; 3 << 20]);
    // The answer may be lost when the agent hangs up on the rest.
    agent.wait_metric("istio_cni_log_entries_total{result=\"over_size\"}", 1.0);
    let over_size = agent.metric("istio_cni_log_entries_total{result=\"over_size\"}");
    assert!((1.0..=5.0).contains(&over_size), "{over_size}");
    let connect = || UnixStream::connect(node.path("run/log.sock")).expect("connects");
    let other = (0..5).find_map(|_| exchange(connect(), "GET", "/x", b""));
    assert_eq!(other.expect("answers").0, 404);
}

/// A process that may write there can forge log lines about pods, and use up the connections of real plugins.
#[test]
fn the_log_socket_hears_root_and_nobody_else() {
    use std::os::unix::process::CommandExt;
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    for part in ["", "run"] {
        agent::set_mode(&node.path(part), 0o755);
    }
    let socket = node.path("run/log.sock");
    let forged = r#"["{\"level\":\"info\",\"time\":\"2026-11-21T07:26:50.000001Z\",\"msg\":\"forged\"}"]"#;
    let send = |user: u32| {
        let mut curl = std::process::Command::new("curl");
        curl.args(["--silent", "--show-error", "--max-time", "60", "--unix-socket"]).arg(&socket);
        curl.args(["-d", forged, "http://x/log"]).uid(user).gid(user).output().expect("curl").status.success()
    };
    assert!(!send(65534), "the mode keeps it out");
    // Also if the mode was changed.
    agent::set_mode(&socket, 0o666);
    assert!(!send(65534), "its user keeps it out");
    assert!(!node.log().contains("forged"), "{}", node.log());
    agent.wait_metric("istio_cni_log_connections_refused_total", 1.0);
    assert!(send(0));
    agent.wait("root's line", || node.log().contains("\tforged"));
}

#[test]
fn a_log_socket_that_is_removed_comes_back() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    fs::remove_file(node.path("run/log.sock")).expect("removes");
    agent.wait("the socket", || {
        UnixStream::connect(node.path("run/log.sock")).is_ok_and(|stream| {
            exchange(stream, "POST", "/log", b"[]").is_some_and(|(status, _)| status == 200)
        })
    });
}

/// Of two agents of a node the newer has the sockets. When it is killed, its files stay, and nobody is behind them.
#[test]
fn the_sockets_of_a_newer_agent_that_is_killed_come_back() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let host = Namespace::empty(Families::V4).expect("a namespace");
    let _proc = Proc::of(&mut node, &host.path());
    node.set("AMBIENT_ENABLED", "true");
    let ztunnel = node.path("ztunnel/ztunnel.sock");
    node.set("ZTUNNEL_UDS_ADDRESS", &ztunnel.display().to_string());
    let sockets = || [node.path("run/log.sock"), node.path("run/pluginevent.sock"), ztunnel.clone()];
    let files = || sockets().map(|path| fs::metadata(path).ok().map(|file| file.ino()));
    let older = node.start();
    older.wait("sockets", || files().iter().all(Option::is_some));
    let before = files();
    let mut command = node.command(&[&format!("--ctrlz_port={}", free_port().expect("a port"))]);
    for name in ["HEALTH_PORT", "MONITORING_PORT"] {
        command.env(name, free_port().expect("a port").to_string());
    }
    let log = fs::File::options().append(true).open(node.path("log")).expect("a log");
    let mut newer = command.stdout(Stdio::null()).stderr(log).spawn().expect("starts");
    older.wait("a newer agent's sockets", || {
        files().iter().zip(&before).all(|(now, before)| now.is_some() && now != before)
    });
    newer.kill().expect("kills");
    newer.wait().expect("ends");
    let [streams @ .., packets] = sockets();
    for path in &streams {
        older.wait("the plugin's socket", || UnixStream::connect(path).is_ok());
    }
    older.wait("ztunnel's socket", || Ztunnel::connect(&packets).is_ok());
}

#[test]
fn ten_thousand_events_keep_it_ready_and_small() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    let line = r#"{"level":"info","time":"2026-11-21T07:26:50.000001Z","msg":"redirected","pod":"shop/cart-0","decision":"redirect","ms":"total:9.5"}"#;
    let body = serde_json::to_vec(&[line; 10]).expect("JSON");
    let (mut largest, mut answered) = (0, 0.0);
    for count in 0..1000 {
        let stream = UnixStream::connect(node.path("run/log.sock")).expect("connects");
        // Without an answer where the machine stood still and the agent hung up.
        if let Some((status, _)) = exchange(stream, "POST", "/log", &body) {
            assert_eq!(status, 200);
            answered += 10.0;
        }
        node.write_conf("98-other.conflist", r#"{"name":"a","plugins":[{"type":"b"}]}"#);
        if count % 10 == 0 {
            node.write_conf("99-other.conflist", r#"{"name":"a","plugins":[{"type":"b"}]}"#);
            assert_eq!(agent.readyz().expect("answers").0, 200);
        }
        if count == 200 {
            largest = resident_kib(agent.id());
        }
    }
    let now = resident_kib(agent.id());
    assert!(now <= largest + 2048, "{largest} KiB grew to {now} KiB");
    let counted: f64 = ["accepted", "over_rate"]
        .iter()
        .map(|result| agent.metric(&format!("istio_cni_log_entries_total{{result=\"{result}\"}}")))
        .sum();
    assert!(answered > 9_000.0 && (answered..=10_000.0).contains(&counted), "{counted} of {answered}");
}

fn resident_kib(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn clients_that_hang_do_not_hold_up_others() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    let idle = (0..300).map(|_| TcpStream::connect(("127.0.0.1", node.health)));
    let _idle = idle.collect::<Result<Vec<_>, _>>().expect("connects");
    for _ in 0..8 {
        assert_eq!(agent.readyz().expect("answers").0, 200);
        assert_eq!(get(node.health, "/healthz").expect("answers").0, 200);
    }
}

/// On the node's network, every pod of the cluster can reach what listens on the node's address.
#[test]
fn health_can_be_kept_from_the_network() {
    let elsewhere = ("127.0.0.2", "127.0.0.3");
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("HEALTH_ADDRESS", "localhost");
    node.set("MONITORING_ADDRESS", elsewhere.0);
    let _agent = node.start_ready();
    let connects = |address: &str, port: u16| TcpStream::connect((address, port)).is_ok();
    assert!(!connects(elsewhere.0, node.health) && !connects(elsewhere.1, node.health));
    assert!(connects(elsewhere.0, node.monitoring) && !connects(elsewhere.1, node.monitoring));
}

#[test]
fn log_levels_change_at_run_time() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let _agent = node.start_ready();
    let default = (200, "default:info,cni-agent:info,cni-plugin:info\n".into());
    assert_eq!(get(node.control, "/logging"), Some(default));
    let changed = (200, "default:info,cni-agent:debug,cni-plugin:info\n".into());
    assert_eq!(request(node.control, "PUT", "/logging", "cni-agent:debug\n"), Some(changed));
    assert_eq!(request(node.control, "PUT", "/logging", "loud").expect("answers").0, 400);
    assert_eq!(request(node.control, "POST", "/logging", "").expect("answers").0, 405);
    assert_eq!(get(node.control, "/x").expect("answers").0, 404);
}

#[test]
fn logs_may_be_json() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_with(&["--log_as_json"]);
    agent.wait_ready();
    let log = node.log();
    assert!(log.lines().count() >= 3);
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        assert!(line["msg"].is_string() && line["level"].is_string(), "{line}");
    }
}

#[test]
fn other_paths_and_methods_are_refused() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let _agent = node.start_ready();
    assert_eq!(get(node.health, "/").expect("answers").0, 404);
    assert_eq!(request(node.health, "POST", "/readyz", "").expect("answers").0, 405);
    assert_eq!(get(node.monitoring, "/debug/pprof").expect("answers").0, 404);
    assert_eq!(request(node.monitoring, "DELETE", "/metrics", "").expect("answers").0, 405);
}

#[test]
fn metrics_come_in_the_format_that_is_asked_for() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let _agent = node.start_ready();
    for (accept, kind, described) in [
        ("", "text/plain; version=0.0.4", "istio_cni_passes_total"),
        ("Accept: text/plain\r\n", "text/plain; version=0.0.4", "istio_cni_passes_total"),
        (
            "Accept: application/openmetrics-text\r\n",
            "application/openmetrics-text; version=1.0.0",
            "istio_cni_passes",
        ),
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", node.monitoring)).expect("connects");
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{accept}\r\n")
            .expect("asks");
        let answer = std::io::read_to_string(stream).expect("is answered");
        assert!(
            answer.contains(&format!("\r\ncontent-type: {kind}; charset=utf-8\r\n")),
            "{accept}\n{answer}"
        );
        assert!(
            answer.contains(&format!("\n# TYPE {described} counter\nistio_cni_passes_total ")),
            "{accept}\n{answer}"
        );
        assert_eq!(answer.ends_with("# EOF\n"), kind.starts_with("application"), "{accept}");
    }
}

#[test]
fn warnings_about_settings_come_at_the_start() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("EXCLUDE_NAMESPACE", "a");
    node.set("AMBIENT_DISABLE_SAFE_UPGRADE", "true");
    let _agent = node.start_ready();
    let log = node.log();
    assert!(log.contains("did you mean EXCLUDE_NAMESPACES?"), "{log}");
    assert!(log.contains("AMBIENT_DISABLE_SAFE_UPGRADE has no effect"), "{log}");
}

#[test]
fn the_version_is_on_standard_output() {
    let done = Node::new(&[]).command(&["version"]).output().expect("runs");
    assert_eq!(String::from_utf8_lossy(&done.stdout), format!("install-cni {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_port_that_is_taken_ends_the_start_and_removes_nothing() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let _taken = std::net::TcpListener::bind(("::", node.health)).expect("binds");
    let done = node.command(&["--ctrlz_port=0"]).output().expect("runs");
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("cannot serve health on port"));
}

#[test]
fn killed_at_any_of_many_moments_the_node_is_always_sound() {
    let rounds = sample::times(100, 200);
    let mut node = Node::new(&[("10-ovn-kubernetes.conf", REAL[5].1)]);
    let original = node.confs();
    let large = [agent::PLUGIN.as_bytes(), &vec![b'#'; 2 << 20]].concat();
    fs::write(node.path("image/istio-cni"), large).expect("writes");
    agent::set_mode(&node.path("image/istio-cni"), 0o755);
    let starts = [(); 3].map(|()| {
        let start = Instant::now();
        node.start_ready().kill();
        start.elapsed()
    });
    // How long a start takes depends on what else the machine does, so this follows what is seen.
    let mut whole = starts.into_iter().min().unwrap_or_default();
    let mut cut_short = 0;
    for round in 0..rounds {
        // From the beginning, with a half of the rounds on top of what the last one left.
        if round % 2 == 0 {
            let done = node.command(&["uninstall"]).output().expect("runs");
            assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
            assert_eq!(node.confs(), original, "round {round}");
        }
        node.set("EXCLUDE_NAMESPACES", &format!("round-{round}"));
        let agent = node.start();
        thread::sleep(whole.mul_f64((round * 37 % 100) as f64 / 100.0));
        agent.kill();
        let mark = format!("\"round-{round}\"");
        let is_cut_short = !node.calls_us() || !node.confs().values().any(|text| text.contains(&mark));
        cut_short += usize::from(is_cut_short);
        whole = if is_cut_short { whole * 105 / 100 } else { whole * 95 / 100 };
        let has_entry = node.confs().iter().any(|(name, text)| {
            let is_loaded = [".conf", ".conflist", ".json"].iter().any(|end| name.ends_with(end));
            if !is_loaded {
                return false;
            }
            let conf = install_cni::conflist::NetConf::parse(name, text);
            conf.unwrap_or_else(|error| panic!("round {round}: {name}: {error}: {text:?}")).network.has_ours()
        });
        if has_entry {
            assert!(node.has_plugin(), "round {round}: an entry without its binary");
            assert!(node.kubeconfig().is_some_and(|text| text.ends_with("\"\n")), "round {round}");
        }
    }
    assert!(cut_short * 7 >= rounds, "only {cut_short} of {rounds} were cut short; too slow a killer");
    node.start_ready().kill();
    assert!(node.calls_us());
    assert_eq!(
        node.command(&["cleanup"]).stderr(std::process::Stdio::null()).status().expect("runs").code(),
        Some(0)
    );
    assert_eq!(node.confs(), original);
}
