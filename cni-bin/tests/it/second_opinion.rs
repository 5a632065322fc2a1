//! What another implementation of the specification makes of our answers: the types of the `cni-plugin` crate.
//!
//! It knows versions 0.4.0 and 1.0.0 only, and reads results into types, which is why it stays out of the plugin itself:
//! there every version counts, and a result comes back to the last byte.

use std::{
    ffi::OsString,
    net::IpAddr,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use cni_plugin::{
    config::NetworkConfig,
    reply::{ErrorReply, SuccessReply, VersionReply},
};
use istio_cni::{
    RuntimeReply,
    kernel::{
        Applied, KernelError, MachineNamespaces, Namespace, NamespaceComparison, NamespaceWork, WantedRules,
    },
    selection::Programming,
};
use serde_json::{Value, json};

/// The versions the other implementation knows.
const ITS_VERSIONS: [&str; 2] = ["0.4.0", "1.0.0"];

/// A kernel that does everything it is asked, and counts how often that is.
#[derive(Default)]
struct Willing {
    asked: AtomicUsize,
}

impl MachineNamespaces for Willing {
    fn inside(&self, _: &Path, work: &mut NamespaceWork<'_>) -> Result<(), KernelError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        work(&Pod);
        Ok(())
    }

    fn preflight(&self, _: Programming) -> Result<(), KernelError> {
        Ok(())
    }
}

struct Pod;

impl Namespace for Pod {
    fn addresses(&self) -> Result<Vec<IpAddr>, KernelError> {
        Ok(vec![IpAddr::from([10, 1, 0, 2])])
    }

    fn has_ipv6(&self) -> bool {
        false
    }

    fn apply(&self, _: &WantedRules<'_>, _: Duration) -> Result<Applied, KernelError> {
        Ok(Applied { backend: "none".into(), because: "a test".into(), changed: true, warnings: Vec::new() })
    }

    fn compare(&self, _: &WantedRules<'_>) -> Result<NamespaceComparison, KernelError> {
        Ok(NamespaceComparison::default())
    }
}

fn answer(command: &str, conf: &Value, args: &str) -> (RuntimeReply, usize) {
    let env = |name: &str| {
        let value = match name {
            "CNI_COMMAND" => command,
            "CNI_CONTAINERID" => "abc",
            "CNI_NETNS" => "/run/netns/x",
            "CNI_IFNAME" => "eth0",
            "CNI_PATH" => "/opt/cni/bin",
            "CNI_ARGS" => args,
            _ => return None,
        };
        Some(OsString::from(value))
    };
    let kernel = Willing::default();
    let answer = istio_cni::answer(&env, &mut conf.to_string().as_bytes(), &kernel, &|_| ());
    (answer, kernel.asked.load(Ordering::Relaxed))
}

fn conf(version: &str) -> Value {
    let mut address = json!({"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 0});
    if version == "0.4.0" {
        address["version"] = json!("4");
    }
    json!({"cniVersion": version, "name": "net", "type": "istio-cni", "exclude_namespaces": ["shop"], "prevResult": {
        "cniVersion": version, "ips": [address], "dns": {"nameservers": ["10.96.0.10"]},
        "interfaces": [{"name": "eth0", "mac": "0a:58:0a:01:00:02", "sandbox": "/run/netns/x"}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}], "vendor.example/extra": {"n": 1}}})
}

#[test]
fn both_read_the_same_configuration() {
    for version in ITS_VERSIONS {
        let theirs: NetworkConfig = serde_json::from_value(conf(version)).expect("they read it");
        assert_eq!(theirs.cni_version.to_string(), version);
        assert_eq!(theirs.prev_result, Some(conf(version)["prevResult"].clone()));
        let (ours, _) = answer("ADD", &conf(version), "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart");
        assert!(ours.success, "{}", ours.output);
    }
}

#[test]
fn they_read_our_result_as_the_one_before_us() {
    for version in ITS_VERSIONS {
        let (ours, asked) = answer("ADD", &conf(version), "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart");
        assert_eq!((ours.success, asked), (true, 0), "{}", ours.output);
        let read = |text: &str| -> SuccessReply { serde_json::from_str(text).expect("they read it") };
        let (before, after) = (read(&conf(version)["prevResult"].to_string()), read(&ours.output));
        assert_eq!(format!("{before:?}"), format!("{after:?}"));
        assert_eq!(after.ips[0].address.to_string(), "10.1.0.2/24");
        assert!(after.specific.contains_key("vendor.example/extra"));
    }
}

#[test]
fn they_read_our_errors() {
    let mut bad = conf("1.0.0");
    bad["native_nftables"] = json!("yes");
    let (ours, asked) = answer("ADD", &bad, "");
    assert_eq!((ours.success, asked), (false, 0));
    // Theirs wants details in every error; the specification does not.
    let mut object: Value = serde_json::from_str(&ours.output).expect("an object");
    object["details"] = json!("");
    let text = object.to_string();
    let theirs: ErrorReply<'_> = serde_json::from_str(&text).expect("they read it");
    assert_eq!((theirs.code, theirs.cni_version.to_string().as_str()), (7, "1.0.0"));
    assert!(theirs.msg.contains("native_nftables"));
}

#[test]
fn they_read_our_versions() {
    let (ours, _) = answer("VERSION", &json!({}), "");
    let theirs: VersionReply = serde_json::from_str(&ours.output).expect("they read it");
    let versions: Vec<String> = theirs.supported_versions.iter().map(ToString::to_string).collect();
    assert!(ITS_VERSIONS.iter().all(|version| versions.iter().any(|ours| ours == version)), "{versions:?}");
}
