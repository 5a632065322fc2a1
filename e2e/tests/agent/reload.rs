//! Settings that change while the agent runs: the real program and a folder that changes as a kubelet changes a mounted ConfigMap.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use e2e::agent::{Agent, CALICO, FakeApi, Node, daemon_set, request};
use serde_json::Value;

/// A ConfigMap as the kubelet mounts it: names are links into `..data`, which is a link to a folder that is replaced as a whole.
struct ConfigMap {
    folder: PathBuf,
    versions: AtomicUsize,
}

impl ConfigMap {
    fn mounted(node: &mut Node, data: &[(&str, &str)]) -> Self {
        let folder = node.path("settings");
        fs::create_dir(&folder).expect("makes");
        node.set("SETTINGS_DIR", &folder.display().to_string());
        let map = Self { folder, versions: AtomicUsize::new(0) };
        map.publish(data);
        map
    }

    fn publish(&self, data: &[(&str, &str)]) {
        let version = format!("..2026_11_21_{}", self.versions.fetch_add(1, Ordering::Relaxed));
        let (folder, new) = (&self.folder, self.folder.join(&version));
        fs::create_dir(&new).expect("makes");
        for (name, value) in data {
            fs::write(new.join(name), value).expect("writes");
        }
        let old = fs::read_link(folder.join("..data"));
        symlink(&version, folder.join("..data_tmp")).expect("links");
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).expect("renames");
        for (name, _) in data {
            let _ = symlink(format!("..data/{name}"), folder.join(name));
        }
        for entry in fs::read_dir(folder).expect("lists").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.starts_with("..") && data.iter().all(|(kept, _)| *kept != name) {
                fs::remove_file(entry.path()).expect("removes");
            }
        }
        if let Ok(old) = old {
            fs::remove_dir_all(folder.join(old)).expect("removes");
        }
    }
}

fn node() -> Node {
    Node::new(&[("10-calico.conflist", CALICO)])
}

/// The plugin's entry as it is on the node.
fn entry(node: &Node) -> Value {
    let text = node.conf("10-calico.conflist").unwrap_or_default();
    let list: Value = serde_json::from_str(&text).unwrap_or_default();
    let plugins = list["plugins"].as_array().cloned().unwrap_or_default();
    plugins.into_iter().find(|plugin| plugin["type"] == "istio-cni").unwrap_or_default()
}

fn wait_excluded(agent: &Agent<'_>, namespaces: &[&str]) {
    agent.wait(&format!("exclusion of {namespaces:?}"), || {
        entry(agent.node)["exclude_namespaces"].as_array().is_some_and(|found| found == namespaces)
    });
}

const REFUSED: &str = "istio_cni_settings_refused";

#[test]
fn the_plugins_keys_follow_the_folder() {
    let mut node = node();
    // As envFrom leaves it: what the ConfigMap said when the container started.
    node.set("EXCLUDE_NAMESPACES", "of-the-environment");
    let map = ConfigMap::mounted(&mut node, &[("EXCLUDE_NAMESPACES", "first")]);
    let agent = node.start_ready();
    wait_excluded(&agent, &["first"]);
    // More often than the agent would revert another program's changes within a minute.
    for round in 0..6 {
        let namespace = format!("round-{round}");
        let on = if round % 2 == 0 { "true" } else { "false" };
        let keys = ["NATIVE_NFTABLES", "NFT_SETS", "STRICT_CAPTURE"].map(|name| (name, on));
        map.publish(&[&keys[..], &[("EXCLUDE_NAMESPACES", namespace.as_str())]].concat());
        wait_excluded(&agent, &[&namespace]);
        let (entry, on) = (entry(&node), round % 2 == 0);
        for key in ["native_nftables", "nft_sets", "strict_capture"] {
            assert_eq!(entry[key].as_bool().unwrap_or_default(), on, "{key}: {entry}");
        }
    }
    assert_eq!(agent.metric("istio_cni_fights_total"), 0.0);
    agent.wait_metric("istio_cni_settings_reloads_total{result=\"applied\"}", 6.0);
    agent.wait_ready();

    // What is not said any more has its default, whatever the environment says.
    map.publish(&[]);
    wait_excluded(&agent, &[]);
    assert_eq!(agent.end(), Some(0));
    assert!(!node.log().contains("\terror\t"), "{}", node.log());
}

#[test]
fn settings_that_are_wrong_are_refused_as_a_whole() {
    let mut node = node();
    let api = FakeApi::start(200, &daemon_set(false));
    api.serve(&mut node);
    node.set("PLUGIN_SERVICE_ACCOUNT", "");
    let map = ConfigMap::mounted(&mut node, &[("EXCLUDE_NAMESPACES", "first")]);
    let agent = node.start_ready();
    let template = r#"{"name":"x","type":"istio-cni","plugin_log_level":"loud"}"#;
    for (count, (name, value, reason)) in [
        ("NATIVE_NFTABLES", "maybe", "NATIVE_NFTABLES: \"maybe\": neither true nor false"),
        ("DRIFT_WATCH_INTERVAL", "1ms", "DRIFT_WATCH_INTERVAL: \"1ms\": too short"),
        ("LOG_OUTPUT_LEVEL", "loud", "LOG_OUTPUT_LEVEL"),
        ("CNI_NETWORK_CONFIG", "{", "template of the istio-cni entry"),
        ("CNI_NETWORK_CONFIG", template, "plugin_log_level"),
    ]
    .into_iter()
    .enumerate()
    {
        map.publish(&[("EXCLUDE_NAMESPACES", "second"), (name, value), ("NFT_SETS", "true")]);
        agent.wait(reason, || node.log().contains(reason));
        agent.wait_metric("istio_cni_settings_reloads_total{result=\"refused\"}", count as f64 + 1.0);
        assert_eq!(agent.metric(REFUSED), 1.0);
        assert_eq!(agent.readyz().expect("answers").0, 200, "what was before works on");
    }
    assert_eq!(entry(&node)["exclude_namespaces"][0], "first", "{}", node.log());
    assert_ne!(entry(&node)["nft_sets"], true);
    agent.wait("the event", || !api.posted().is_empty());
    let events = api.posted();
    assert_eq!(events.len(), 1, "a minute apart at least: {events:?}");
    assert!(events[0].contains("SettingsRefused") && events[0].contains("NATIVE_NFTABLES"), "{}", events[0]);
    assert!(events[0].contains("istio-cni-node-x"), "{}", events[0]);

    map.publish(&[("EXCLUDE_NAMESPACES", "third")]);
    wait_excluded(&agent, &["third"]);
    agent.wait("no refusal", || agent.metric(REFUSED) == 0.0);

    // Back to what is in force: nothing to do, and nothing refused.
    map.publish(&[("NFT_SETS", "maybe")]);
    agent.wait_metric(REFUSED, 1.0);
    map.publish(&[("EXCLUDE_NAMESPACES", "third")]);
    agent.wait("no refusal", || agent.metric(REFUSED) == 0.0);
    assert_eq!(agent.metric("istio_cni_settings_reloads_total{result=\"applied\"}"), 1.0);
}

#[test]
fn log_levels_follow_the_folder_and_the_flag_wins() {
    let mut node = node();
    let map = ConfigMap::mounted(&mut node, &[("LOG_OUTPUT_LEVEL", "default:info,cni-plugin:warn")]);
    let levels = |agent: &Agent<'_>| request(agent.node.control, "GET", "/logging", "").unwrap_or_default().1;
    let agent = node.start_ready();
    assert_eq!(entry(&node)["plugin_log_level"], "warn");
    map.publish(&[("LOG_OUTPUT_LEVEL", "cni-agent:debug,cni-plugin:error")]);
    agent.wait("the agent's level", || levels(&agent).contains("cni-agent:debug"));
    agent.wait("the plugin's level", || entry(&node)["plugin_log_level"] == "error");
    // Levels set at run time stay until the folder's levels change.
    request(node.control, "PUT", "/logging", "cni-agent:info").expect("answers");
    map.publish(&[("LOG_OUTPUT_LEVEL", "cni-agent:debug,cni-plugin:error"), ("EXCLUDE_NAMESPACES", "x")]);
    wait_excluded(&agent, &["x"]);
    assert!(levels(&agent).contains("cni-agent:info"), "{}", levels(&agent));
    agent.kill();

    let agent = node.start_with(&["--log_output_level=info"]);
    agent.wait_ready();
    agent.wait("the notice", || {
        node.log().contains("LOG_OUTPUT_LEVEL has no effect: flag --log_output_level wins")
    });
    assert!(levels(&agent).contains("cni-agent:info"), "{}", levels(&agent));
}

#[test]
fn the_drift_watch_is_switched_on_and_off_by_the_folder() {
    let mut node = node();
    let map = ConfigMap::mounted(&mut node, &[]);
    let agent = node.start_ready();
    for _ in 0..2 {
        map.publish(&[("DRIFT_WATCH_INTERVAL", "1s")]);
        agent.wait("rounds", || node.log().contains("cannot check pods"));
        map.publish(&[]);
        agent.wait("the end", || node.log().contains("the drift watch is off"));
        fs::write(node.path("log"), "").expect("empties");
    }
}

#[test]
fn what_cannot_be_reloaded_is_said_to_need_a_restart() {
    let mut node = node();
    node.set("NATIVE_NFTABLES", "true");
    let map = ConfigMap::mounted(&mut node, &[("CHAINED_CNI_PLUGIN", "true")]);
    let agent = node.start_ready();
    assert!(node.log().contains("\tNATIVE_NFTABLES: no effect in the environment"), "{}", node.log());
    assert_eq!(entry(&node)["native_nftables"], false);
    assert!(!node.log().contains("the environment counts"), "{}", node.log());
    let changed = [("CHAINED_CNI_PLUGIN", "false"), ("HEALTH_PORT", "1"), ("EXCLUDE_NAMESPACE", "x")];
    map.publish(&changed);
    agent.wait("the warning", || {
        node.log().contains("CHAINED_CNI_PLUGIN, HEALTH_PORT: the environment counts for these")
    });
    let meant = "EXCLUDE_NAMESPACE is not a setting and is ignored; did you mean EXCLUDE_NAMESPACES?";
    agent.wait("the misspelt one", || node.log().contains(meant));
    map.publish(&[&changed[..], &[("EXCLUDE_NAMESPACES", "x")]].concat());
    wait_excluded(&agent, &["x"]);
    assert_eq!(node.log().matches("CHAINED_CNI_PLUGIN, HEALTH_PORT").count(), 1, "{}", node.log());
    assert_eq!(node.log().matches(meant).count(), 1, "{}", node.log());
    // At the next start as well: the folder is not where it is read from.
    agent.kill();
    map.publish(&[("HEALTH_PORT", "no number")]);
    let _agent = node.start_ready();
    assert!(node.log().contains("\tHEALTH_PORT: the environment counts for these"), "{}", node.log());
}

#[test]
fn a_folder_that_is_written_file_by_file_is_read_when_it_is_whole() {
    let mut node = node();
    let folder = node.path("settings");
    fs::create_dir(&folder).expect("makes");
    node.set("SETTINGS_DIR", &folder.display().to_string());
    fs::write(folder.join("EXCLUDE_NAMESPACES"), "first\n").expect("writes");
    let agent = node.start_ready();
    wait_excluded(&agent, &["first"]);
    fs::write(folder.join("NATIVE_NFTABLES"), "tr").expect("writes");
    fs::write(folder.join(".EXCLUDE_NAMESPACES.swp"), "an editor's").expect("writes");
    agent.wait_metric(REFUSED, 1.0);
    fs::write(folder.join("NATIVE_NFTABLES"), "true\n").expect("writes");
    agent.wait("the key", || entry(&node)["native_nftables"] == true);
    agent.wait("no refusal", || agent.metric(REFUSED) == 0.0);
    // Neither what cannot be read as a text, nor what never ends, nor the folder's end changes anything.
    fs::write(folder.join("EXCLUDE_NAMESPACES"), b"\xff\xfe").expect("writes");
    agent.wait_metric(REFUSED, 1.0);
    // In one step: without the file, the setting would be its default.
    symlink("/dev/zero", folder.join(".new")).expect("links");
    fs::rename(folder.join(".new"), folder.join("EXCLUDE_NAMESPACES")).expect("replaces");
    agent.wait("the device", || node.log().contains("is not a regular file"));
    fs::rename(&folder, node.path("gone")).expect("renames");
    agent.wait("the folder", || node.log().matches("are invalid; keeping").count() >= 4);
    assert_eq!(entry(&node)["exclude_namespaces"][0], "first");
    agent.wait_ready();
}

#[test]
fn settings_that_are_wrong_at_the_start_start_nothing() {
    for (data, reason) in [
        (Some([("NATIVE_NFTABLES", "maybe")]), "NATIVE_NFTABLES: \"maybe\": neither true nor false"),
        (None, "SETTINGS_DIR"),
    ] {
        let mut node = node();
        match data {
            Some(data) => drop(ConfigMap::mounted(&mut node, &data)),
            None => node.set("SETTINGS_DIR", "/nonexistent"),
        }
        assert_eq!(node.start().wait_end(), Some(1));
        assert!(node.log().contains(reason), "{}", node.log());
        assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
    }
}
