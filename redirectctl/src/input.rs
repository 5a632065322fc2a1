//! What commands work on: pods, and what is around them, from a file or from standard input.

use std::io::{self, Read as _};
use std::path::Path;

use cluster_client::files;
use cni_core::pod_source::PodName;
use explain::manifest;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::pod::Pod;

/// The most that is read of a manifest: a list of all pods of a node, as kubectl writes it.
const MOST_BYTES: u64 = 64 << 20;

/// Pods that cannot be read: everything that is wrong, a sentence each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble(pub Vec<String>);

impl Trouble {
    /// One thing.
    pub fn of(what: impl std::fmt::Display) -> Self {
        Self(vec![what.to_string()])
    }
}

/// The pods of a file; `-` is standard input. A list, as `kubectl get pods -o json` prints it, counts as its items. Nodes, events and
/// runtime classes may be among them, and say more about the pods.
///
/// # Errors
/// Everything wrong with the file, or with the pods in it.
pub fn pods_of_file(path: &str) -> Result<(Vec<Pod>, Cluster), Trouble> {
    of_file(path, pods_of_text)
}

/// The same as Kubernetes writes them.
///
/// # Errors
/// Everything wrong with the file.
pub fn objects_of_file(path: &str) -> Result<(Vec<Value>, Cluster), Trouble> {
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

/// The pods of a text in YAML or JSON, and what is around them.
///
/// # Errors
/// Everything wrong with it.
pub fn pods_of_text(text: &str) -> Result<(Vec<Pod>, Cluster), Trouble> {
    let (objects, cluster) = objects_of_text(text)?;
    Ok((pods_of(&objects, &cluster)?, cluster))
}

fn objects_of_text(text: &str) -> Result<(Vec<Value>, Cluster), Trouble> {
    let mut objects = manifest::objects(text).map_err(Trouble::of)?;
    let mut cluster = Cluster::default();
    objects.retain(|object| !cluster.take(object));
    if objects.is_empty() {
        return Err(Trouble::of("has no pod"));
    }
    Ok((objects, cluster))
}

/// Pods from their objects, and told what is around them.
///
/// # Errors
/// Everything wrong with them.
pub fn pods_of(objects: &[Value], cluster: &Cluster) -> Result<Vec<Pod>, Trouble> {
    let (mut pods, mut wrong) = (Vec::new(), Vec::new());
    for object in objects {
        match Pod::from_json(object) {
            Ok(pod) => pods.push(pod),
            Err(errors) => wrong.extend(manifest::faults(object, &errors)),
        }
    }
    if !wrong.is_empty() {
        return Err(Trouble(wrong));
    }
    cluster.tell(&mut pods);
    Ok(pods)
}

/// The one pod of a file.
///
/// # Errors
/// There is none, or more than one, or it cannot be read.
pub fn pod_of_file(path: &str) -> Result<Pod, Trouble> {
    let (mut pods, _) = pods_of_file(path)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_documents_are_pods() {
        let list = r#"{"kind":"List","items":[{"kind":"Pod","metadata":{"name":"a"},"spec":{}},{"kind":"Pod","metadata":{"name":"b"},"spec":{}}]}"#;
        let two = "kind: Pod\nmetadata: {name: a}\nspec: {}\n---\nkind: Pod\nmetadata: {name: b}\nspec: {}\n";
        for text in [list, two] {
            let names: Vec<String> =
                pods_of_text(text).expect("pods").0.iter().map(|pod| pod.name.to_string()).collect();
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
