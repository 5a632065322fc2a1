//! `redirectctl cni check`: the real plugin is asked about pods that are whole and pods that are broken, with what a runtime remembers and without.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use e2e::program;
use e2e::redirectctl::{self, Patient, redirectctl};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::process::Output;

/// A node's configuration, plugins and cache.
struct Node {
    folder: TempDir,
}

impl Node {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        for part in ["net.d", "bin", "results"] {
            fs::create_dir(folder.path().join(part))?;
        }
        fs::copy(program::under_test("istio-cni")?, folder.path().join("bin/istio-cni"))?;
        let entry = json!({"type": "istio-cni", "cni_agent_run_dir": folder.path().join("run"), "add_timeout": "60s"});
        let list = json!({"cniVersion": "1.0.0", "name": "k8s", "plugins": [{"type": "ptp"}, entry]});
        fs::write(folder.path().join("net.d/10-k8s.conflist"), list.to_string())?;
        Ok(Self { folder })
    }

    fn path(&self, part: &str) -> String {
        self.folder.path().join(part).display().to_string()
    }

    /// What libcni would have written when the pod started.
    fn remember(&self, patient: &Patient, address: &str) -> Result<()> {
        let name = patient.pod()["metadata"]["name"].as_str().context("a name")?;
        let args = [
            ["IgnoreUnknown", "1"],
            ["K8S_POD_NAMESPACE", "default"],
            ["K8S_POD_NAME", name],
            ["K8S_POD_UID", ""],
        ];
        let cached = json!({
            "kind": "cniCacheV1", "containerId": "c0ffee", "ifName": "eth0", "networkName": "k8s", "cniArgs": args,
            "result": {"cniVersion": "1.0.0", "ips": [{"address": format!("{address}/24")}], "interfaces": [{"name": "eth0"}]},
        });
        Ok(fs::write(self.folder.path().join("results/k8s-c0ffee-eth0"), cached.to_string())?)
    }

    fn check(&self, patient: &Patient, more: &[&str]) -> Result<Output> {
        let (netns, manifest) = (patient.namespace().path().display().to_string(), patient.manifest()?);
        let (conf, bin, cache) = (self.path("net.d"), self.path("bin"), self.path("results"));
        let mut args = vec!["cni", "check", "-f", &manifest, "--netns", &netns];
        args.extend(["--cni-conf-dir", &conf, "--cni-bin-dir", &bin, "--cni-cache-dir", &cache]);
        args.extend(more);
        redirectctl(&args)
    }
}

#[test]
fn the_plugin_judges_pods_as_for_a_runtime() -> Result<()> {
    let node = Node::new()?;
    for (number, name, code) in [
        (1, "redirected", 0),
        (2, "outside the mesh", 0),
        (3, "capture removed", 2),
        (4, "plugin never ran", 2),
        (5, "foreign drop", 2),
        (6, "malformed annotation", 2),
    ] {
        let patient = redirectctl::patient(name, number)?;
        let before = patient.namespace().snapshot()?;
        for remembered in [false, true] {
            if remembered {
                node.remember(&patient, &format!("10.1.{number}.2"))?;
            }
            let output = node.check(&patient, &["--output", "json"])?;
            assert_eq!(output.code(), Some(code), "{name}: {output:?}");
            let answer: Value = serde_json::from_str(&output.stdout)?;
            assert_eq!(answer["answer"]["asPlanned"], code == 0, "{name}: {answer:#}");
            let container = if remembered { "c0ffee" } else { "redirectctl" };
            assert_eq!(answer["environment"]["CNI_CONTAINERID"], container, "{name}");
            let wanted = match (code, name) {
                (0, _) => Value::Null,
                (_, "malformed annotation") => 100.into(),
                (..) => 111.into(),
            };
            assert_eq!(
                answer["answer"].get("code").cloned().unwrap_or_default(),
                wanted,
                "{name}: {answer:#}"
            );
        }
        assert_eq!(patient.namespace().snapshot()?, before, "{name}: CHECK changes nothing");
        fs::remove_file(node.folder.path().join("results/k8s-c0ffee-eth0"))?;
    }
    Ok(())
}

#[test]
fn a_dry_run_sends_nothing_and_the_manifest_does_not_stay() -> Result<()> {
    let node = Node::new()?;
    let patient = redirectctl::patient("plugin never ran", 7)?;
    fs::remove_file(node.folder.path().join("bin/istio-cni"))?;
    let output = node.check(&patient, &["--dry-run"])?.ok()?;
    assert!(
        output.stdout.contains("CNI_COMMAND=CHECK") && output.stdout.contains("not sent: --dry-run"),
        "{output:?}"
    );
    assert!(output.stdout.lines().all(|line| line.chars().count() <= 80), "{output:?}");
    let json: Value =
        serde_json::from_str(&node.check(&patient, &["--dry-run", "--output", "json"])?.ok()?.stdout)?;
    assert!(
        json["answer"].is_null() && json["input"]["prevResult"]["ips"][0]["address"] == "10.1.7.2/32",
        "{json:#}"
    );
    let folder = json["input"]["pod_manifest_dir"].as_str().context("a folder")?;
    assert!(!Path::new(folder).exists(), "{folder}");
    let without = node.check(&patient, &[])?;
    assert_eq!(without.code(), Some(1), "{without:?}");
    assert!(without.stderr.contains("cannot run") && without.stderr.contains("bin/istio-cni"), "{without:?}");
    Ok(())
}

#[test]
fn names_that_are_none_go_nowhere() -> Result<()> {
    let node = Node::new()?;
    let patient = redirectctl::patient("plugin never ran", 8)?;
    for name in ["a;K8S_POD_NAME=b", "../x", "$(id)", "a b"] {
        let mut pod = patient.pod().clone();
        pod["metadata"]["name"] = name.into();
        let file = node.folder.path().join("pod.json");
        fs::write(&file, pod.to_string())?;
        let netns = patient.namespace().path().display().to_string();
        let (file, conf) = (file.display().to_string(), node.path("net.d"));
        let output = redirectctl(&["cni", "check", "-f", &file, "--netns", &netns, "--cni-conf-dir", &conf])?;
        assert_eq!(output.code(), Some(1), "{name}: {output:?}");
        assert!(output.stderr.contains("is not a pod"), "{name}: {output:?}");
    }
    for (args, told) in [
        (vec!["cni", "add", "a/b"], "only check"),
        (vec!["cni"], "COMMAND is missing"),
        (
            vec!["cni", "check", "--cni-conf-dir", "/nonexistent"],
            "has no network configuration with the plugin",
        ),
    ] {
        let output = redirectctl(&args)?;
        assert_eq!(output.code(), Some(1), "{output:?}");
        assert!(output.stderr.contains(told), "{told}: {output:?}");
    }
    Ok(())
}
