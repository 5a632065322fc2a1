//! What the runtime remembers of its ADDs: a file for each network of each pod, as libcni writes them (kind `cniCacheV1`).
//!
//! Files of pods that are gone may lie there as well, so one counts only if its addresses are those of the namespace.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use cluster_client::files;
use cni_core::pod_source::PodName;
use serde_json::Value;

/// Where libcni keeps results.
pub const CACHE_DIR: &str = "/var/lib/cni/results";
/// The kind of file that is read.
const KIND: &str = "cniCacheV1";
/// The largest file that is read.
const MOST_BYTES: u64 = 1 << 20;
/// The most files that are checked.
const MOST_FILES: usize = 20_000;

/// What is remembered of an ADD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// Its file.
    pub file: PathBuf,
    /// The container's identifier.
    pub container: String,
    /// The name of its interface.
    pub interface: String,
    /// What the runtime said of the pod.
    pub args: Vec<(String, String)>,
    /// The result of all plugins.
    pub result: Value,
}

/// What is remembered of a pod's ADD to a network, whose namespace has these addresses. None where no such directory.
///
/// # Errors
/// The directory cannot be read.
pub fn find(
    directory: &Path,
    network: &str,
    pod: &PodName,
    addresses: &[IpAddr],
) -> io::Result<Option<Cached>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    for entry in entries.take(MOST_FILES) {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !name.starts_with(network) {
            continue;
        }
        // One that disappears during the read, or is half written, does not count.
        let text = files::read_text(&path, MOST_BYTES).ok();
        let document = text.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        let cached = document.as_ref().and_then(|document| read(document, network, pod, &path));
        if let Some(cached) = cached.filter(|cached| fits(&cached.result, addresses)) {
            return Ok(Some(cached));
        }
    }
    Ok(None)
}

fn read(document: &Value, network: &str, pod: &PodName, path: &Path) -> Option<Cached> {
    let text = |key: &str| document.get(key).and_then(Value::as_str);
    if text("kind") != Some(KIND) || text("networkName") != Some(network) {
        return None;
    }
    let pairs = document.get("cniArgs").and_then(Value::as_array)?.iter();
    let args: Vec<(String, String)> = pairs.filter_map(pair).collect();
    let arg = |name: &str| args.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let is_its = arg("K8S_POD_NAMESPACE") == Some(&*pod.namespace) && arg("K8S_POD_NAME") == Some(&*pod.name);
    is_its.then_some(())?;
    Some(Cached {
        file: path.to_owned(),
        container: text("containerId").filter(|text| !text.contains('\0'))?.to_owned(),
        interface: text("ifName").filter(|text| !text.contains('\0'))?.to_owned(),
        result: document.get("result").filter(|result| result.is_object())?.clone(),
        args,
    })
}

/// `["KEY", "VALUE"]`, with nothing in it that would end the pair.
fn pair(pair: &Value) -> Option<(String, String)> {
    let [key, value] = pair.as_array()?.as_slice() else { return None };
    let text = |value: &Value| {
        let text = value.as_str()?;
        let is_plain = !text.contains(|c: char| c == ';' || c == '=' || c.is_control());
        is_plain.then(|| text.to_owned())
    };
    Some((text(key)?, text(value)?))
}

/// Whether a result has addresses, and the namespace has all of them.
fn fits(result: &Value, addresses: &[IpAddr]) -> bool {
    let listed = result.get("ips").and_then(Value::as_array).into_iter().flatten();
    let listed = listed.filter_map(|ip| ip.get("address"));
    let old = ["/ip4/ip", "/ip6/ip"].into_iter().filter_map(|at| result.pointer(at));
    let mut all = listed.chain(old).filter_map(Value::as_str).peekable();
    let is_there = |text: &str| {
        let address = text.split('/').next().unwrap_or_default().parse();
        address.is_ok_and(|address: IpAddr| addresses.contains(&address))
    };
    all.peek().is_some() && all.all(is_there)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn document(name: &str, address: &str) -> Value {
        json!({
            "kind": KIND, "containerId": "abc", "ifName": "eth0", "networkName": "k8s", "config": "e30=",
            "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", "shop"], ["K8S_POD_NAME", name], ["EVIL", "a;K8S_POD_NAME=x"]],
            "result": {"cniVersion": "1.0.0", "ips": [{"address": address}]},
        })
    }

    fn found(files: &[(&str, String)]) -> Option<Cached> {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("writes");
        }
        let pod = PodName { namespace: "shop".into(), name: "cart-0".into() };
        find(folder.path(), "k8s", &pod, &["10.1.0.2".parse().expect("an address")]).expect("is read")
    }

    #[test]
    fn the_result_of_this_pod_is_found_among_others() {
        let good = document("cart-0", "10.1.0.2/24").to_string();
        let cached = found(&[
            ("k8s-1-eth0", document("cart-1", "10.1.0.2/24").to_string()),
            ("k8s-2-eth0", document("cart-0", "10.1.0.7/24").to_string()),
            ("k8s-3-eth0", "{\"kind\"".to_owned()),
            ("k8s-4-eth0", good.clone()),
            ("other-5-eth0", good),
        ]);
        let cached = cached.expect("one fits");
        assert!(cached.file.ends_with("k8s-4-eth0") && cached.container == "abc", "{cached:?}");
        assert!(
            cached.args.iter().all(|(key, _)| key != "EVIL"),
            "a value that ends its pair is left out: {cached:?}"
        );
    }

    #[test]
    fn what_does_not_fit_is_not_taken() {
        assert_eq!(found(&[]), None);
        let without = json!({"result": {"ips": []}});
        let mut empty = document("cart-0", "10.1.0.2/24");
        empty["result"] = without["result"].clone();
        assert_eq!(found(&[("k8s-1-eth0", empty.to_string())]), None);
        let mut other = document("cart-0", "10.1.0.2/24");
        other["networkName"] = "k8s-2".into();
        assert_eq!(found(&[("k8s-2-1-eth0", other.to_string())]), None);
        let pod = PodName { namespace: "shop".into(), name: "cart-0".into() };
        assert_eq!(find(Path::new("/nonexistent"), "k8s", &pod, &[]).expect("lacks a result"), None);
    }
}
