//! What commands work on: pods from a file, from standard input, or from the API server.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cluster_client::params::ListParams;
use cluster_client::{Limits, Request, files, kubeconfig};
use cni_core::pod_source::{self, PodName};
use cni_core::yaml;
use serde_json::Value;

use crate::pod::Pod;

/// The most that is read of a manifest: a list of all pods of a node, as kubectl writes it.
const MOST_BYTES: u64 = 64 << 20;
/// How long the API server may take.
const PATIENCE: Duration = Duration::from_secs(15);
/// The plugin's kubeconfig on a node, taken where nobody says which.
const NODE_KUBECONFIG: &str = "/var/run/istio-cni/istio-cni-kubeconfig";

/// Pods that cannot be read: everything that is wrong, a sentence each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble(pub Vec<String>);

impl Trouble {
    /// One thing.
    pub fn of(what: impl std::fmt::Display) -> Self {
        Self(vec![what.to_string()])
    }
}

/// The pods of a file; `-` is standard input. A list, as `kubectl get pods -o json` prints it, counts as its items.
///
/// # Errors
/// Everything wrong with the file, or with the pods in it.
pub fn pods_of_file(path: &str) -> Result<Vec<Pod>, Trouble> {
    of_file(path, pods_of_text)
}

/// The same as Kubernetes writes them.
///
/// # Errors
/// Everything wrong with the file.
pub fn objects_of_file(path: &str) -> Result<Vec<Value>, Trouble> {
    of_file(path, objects_of_text)
}

fn of_file<T>(path: &str, read: impl FnOnce(&str) -> Result<T, Trouble>) -> Result<T, Trouble> {
    let named = if path == "-" { "standard input" } else { path };
    let text = if path == "-" { stdin() } else { files::read_text(Path::new(path), MOST_BYTES) };
    let text = text.map_err(|error| Trouble(vec![format!("cannot read {named}: {error}")]))?;
    read(&text).map_err(|Trouble(all)| Trouble(all.iter().map(|what| format!("{named}: {what}")).collect()))
}

fn stdin() -> io::Result<String> {
    let mut text = String::new();
    io::stdin().lock().take(MOST_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// The pods of a text in YAML or JSON.
///
/// # Errors
/// Everything wrong with it.
pub fn pods_of_text(text: &str) -> Result<Vec<Pod>, Trouble> {
    pods_of(&objects_of_text(text)?)
}

fn objects_of_text(text: &str) -> Result<Vec<Value>, Trouble> {
    let documents = yaml::documents(text).map_err(Trouble::of)?;
    let mut objects = Vec::new();
    for document in documents.into_iter().filter(|document| !document.is_null()) {
        match document.get("items").and_then(Value::as_array) {
            Some(items) => objects.extend(items.iter().cloned()),
            None => objects.push(document),
        }
    }
    if objects.is_empty() {
        return Err(Trouble::of("has no pod"));
    }
    Ok(objects)
}

fn pods_of(objects: &[Value]) -> Result<Vec<Pod>, Trouble> {
    let (mut pods, mut wrong) = (Vec::new(), Vec::new());
    for object in objects {
        match Pod::from_json(object) {
            Ok(pod) => pods.push(pod),
            Err(errors) => {
                let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("?");
                wrong.extend(errors.iter().map(|error| format!("{name}: {error}")));
            }
        }
    }
    if wrong.is_empty() { Ok(pods) } else { Err(Trouble(wrong)) }
}

/// The one pod of a file.
///
/// # Errors
/// There is none, or more than one, or it cannot be read.
pub fn pod_of_file(path: &str) -> Result<Pod, Trouble> {
    let mut pods = pods_of_file(path)?;
    match (pods.pop(), pods.len()) {
        (Some(pod), 0) => Ok(pod),
        (_, others) => Err(Trouble(vec![format!("{path}: has {} pods; one is wanted", others + 1)])),
    }
}

/// `NAMESPACE/NAME`, or a name in namespace default.
///
/// # Errors
/// It cannot be a pod's name. Names become part of a path at the API server.
pub fn pod_name(text: &str) -> Result<PodName, String> {
    let (namespace, name) = text.split_once('/').unwrap_or(("default", text));
    let is_name = |text: &str| {
        let of_name =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.';
        let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let (first, last) = (text.as_bytes().first(), text.as_bytes().last());
        is_end(first) && is_end(last) && text.len() <= 253 && text.bytes().all(of_name)
    };
    if is_name(namespace) && is_name(name) {
        Ok(PodName { namespace: namespace.to_owned(), name: name.to_owned() })
    } else {
        Err(format!("{text:?} is no pod; write NAMESPACE/NAME"))
    }
}

/// Which kubeconfig to use: the one that is named, else that of the environment, else the plugin's on a node, else the user's.
///
/// # Errors
/// There is none.
pub fn kubeconfig(named: Option<&str>, env: impl Fn(&str) -> Option<String>) -> Result<PathBuf, Trouble> {
    let from_env = || env("KUBECONFIG").filter(|path| !path.is_empty());
    if let Some(path) = named.map(str::to_owned).or_else(from_env) {
        return Ok(path.into());
    }
    let home = env("HOME").map(|home| Path::new(&home).join(".kube/config"));
    let candidates = [Some(PathBuf::from(NODE_KUBECONFIG)), home];
    candidates.into_iter().flatten().find(|path| fs::metadata(path).is_ok()).ok_or_else(|| {
        Trouble::of(
            "there is no kubeconfig: name one with --kubeconfig or KUBECONFIG, or give pods with --file",
        )
    })
}

/// A pod as the API server has it.
///
/// # Errors
/// It cannot be read.
pub fn live_pod(kubeconfig: &Path, name: &PodName) -> Result<Pod, Trouble> {
    let object = pod_source::object(kubeconfig, name, Instant::now() + PATIENCE).map_err(|error| {
        let (_, advice) = error.advice();
        Trouble(vec![if advice.is_empty() { error.to_string() } else { format!("{error}; {advice}") }])
    })?;
    Pod::from_json(&object).map_err(Trouble::of)
}

/// The pods of a node as the API server has them.
///
/// # Errors
/// They cannot be read.
pub fn live_pods(kubeconfig: &Path, node: &str) -> Result<Vec<Pod>, Trouble> {
    pods_of(&live_objects(kubeconfig, node)?)
}

/// The same as Kubernetes writes them.
///
/// # Errors
/// They cannot be read.
pub fn live_objects(kubeconfig: &Path, node: &str) -> Result<Vec<Value>, Trouble> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Trouble::of)?;
    let list = runtime.block_on(async {
        let client = kubeconfig::client(kubeconfig).map_err(Trouble::of)?;
        let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let limits = Limits { patience: PATIENCE, most: usize::try_from(MOST_BYTES).unwrap_or(usize::MAX) };
        let request = Request::new("/api/v1/pods").list(&params);
        client.json::<Value>(request, limits).await.map_err(Trouble::of)
    });
    // A look-up of the server's name may still be under way on a thread; it is not waited for.
    runtime.shutdown_background();
    Ok(list?.get("items").and_then(Value::as_array).cloned().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_documents_are_pods() {
        let list = r#"{"kind":"List","items":[{"kind":"Pod","metadata":{"name":"a"},"spec":{}},{"kind":"Pod","metadata":{"name":"b"},"spec":{}}]}"#;
        let two = "kind: Pod\nmetadata: {name: a}\nspec: {}\n---\nkind: Pod\nmetadata: {name: b}\nspec: {}\n";
        for text in [list, two] {
            let names: Vec<String> =
                pods_of_text(text).expect("pods").iter().map(|pod| pod.name.to_string()).collect();
            assert_eq!(names, ["default/a", "default/b"]);
        }
    }

    #[test]
    fn everything_wrong_is_told_at_once() {
        let text = "kind: Job\nmetadata: {name: a, labels: {x: 1}}\nspec: {}\n---\nkind: Pod\nmetadata: {name: b, labels: {y: 2}}\nspec: {}\n";
        let Trouble(all) = pods_of_text(text).expect_err("both are wrong");
        assert_eq!(all.len(), 3, "{all:?}");
        assert!(all[0].starts_with("a: kind:") && all[2].starts_with("b: metadata.labels"), "{all:?}");
        assert_eq!(pods_of_text("").expect_err("nothing"), Trouble::of("has no pod"));
    }

    #[test]
    fn names_never_leave_their_place_in_a_path() {
        assert_eq!(pod_name("shop/cart-0").map(|name| name.to_string()), Ok("shop/cart-0".to_owned()));
        assert_eq!(pod_name("cart-0").map(|name| name.to_string()), Ok("default/cart-0".to_owned()));
        for bad in ["", "/", "a/", "../x/y", "a/b/c", "a/b?c", "A/b", "../x", "a/..", ".", "a/-b"] {
            assert!(pod_name(bad).is_err(), "{bad}");
        }
    }
}
