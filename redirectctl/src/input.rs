//! What commands work on: pods, and what is around them, from a file or from standard input.

use std::io::{self, BufReader, Read};
use std::path::Path;

use cluster_client::files;
use cni_core::pod_source::PodName;
use presentation::manifest;
use serde_json::Value;

use crate::cluster::ClusterObjects;
use crate::error::PodInputError;
use crate::packed::PackedPods;
use crate::pod::Pod;

/// The most that is read of a manifest: a list of all pods of a node, as kubectl writes it.
const MOST_BYTES: u64 = 64 << 20;
/// How much of a file is read at once.
const BUFFER: usize = 128 << 10;

/// The pods of a file; `-` is standard input. A list, as `kubectl get pods -o json` prints it, counts as its items. Nodes, events and
/// runtime classes may be among them, and say more about the pods.
///
/// # Errors
/// Everything wrong with the file, or with the pods in it.
pub fn pods_of_file(path: &str) -> Result<(Vec<Pod>, ClusterObjects), PodInputError> {
    packed_pods_of_file(path, None).map(PackedPods::unpacked)
}

/// The same as Kubernetes writes them.
///
/// # Errors
/// Everything wrong with the file.
pub fn objects_of_file(path: &str) -> Result<(Vec<Value>, ClusterObjects), PodInputError> {
    let gathered = of_file(path, <(Vec<Value>, ClusterObjects)>::default, |(objects, cluster), object| {
        if !cluster.take(&object) {
            objects.push(object);
        }
    })?;
    let has_pods = !gathered.0.is_empty();
    named(path, if has_pods { Ok(gathered) } else { Err(PodInputError::of("has no pod")) })
}

/// The pods of a file that may be on a node, packed.
///
/// # Errors
/// As [`pods_of_file`].
pub fn packed_pods_of_file(path: &str, node: Option<&str>) -> Result<PackedPods, PodInputError> {
    let gathered = of_file(path, || PackedPods::of_node(node), PackedPods::take)?;
    named(path, gathered.whole())
}

/// What the file of a path is called.
fn name_of(path: &str) -> &str {
    if path == "-" { "standard input" } else { path }
}

/// Each trouble with the name of its file.
fn named<T>(path: &str, read: Result<T, PodInputError>) -> Result<T, PodInputError> {
    let name = name_of(path);
    read.map_err(|PodInputError(all)| {
        PodInputError(all.iter().map(|what| format!("{name}: {what}")).collect())
    })
}

/// What `take` gathers of a file, whose objects come one by one. JSON is never in memory as a whole, unless it comes by standard input, which
/// cannot be read twice.
fn of_file<G>(path: &str, none: impl Fn() -> G, take: fn(&mut G, Value)) -> Result<G, PodInputError> {
    let unread = |error: io::Error| PodInputError::of(format!("cannot read {}: {error}", name_of(path)));
    if path == "-" {
        let text = stdin().map_err(unread)?;
        let gathered = of_json(text.as_bytes(), none(), take);
        return gathered.map_or_else(|| named(path, of_text(&text, none(), take)), Ok);
    }
    let file = files::open(Path::new(path)).map_err(unread)?;
    // What is longer is refused below.
    let reader = BufReader::with_capacity(BUFFER, file.take(MOST_BYTES));
    if let Some(gathered) = of_json(reader, none(), take) {
        return Ok(gathered);
    }
    let text = files::read_text(Path::new(path), MOST_BYTES).map_err(unread)?;
    named(path, of_text(&text, none(), take))
}

/// What is gathered of JSON; none where it is not JSON, or cannot be read.
fn of_json<G>(reader: impl Read, mut gathered: G, take: fn(&mut G, Value)) -> Option<G> {
    manifest::each_of_json(reader, |object| take(&mut gathered, object)).ok()?;
    Some(gathered)
}

fn of_text<G>(text: &str, mut gathered: G, take: fn(&mut G, Value)) -> Result<G, PodInputError> {
    let objects = manifest::objects(text).map_err(PodInputError::of)?;
    objects.into_iter().for_each(|object| take(&mut gathered, object));
    Ok(gathered)
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
pub fn pods_of_text(text: &str) -> Result<Vec<Pod>, PodInputError> {
    of_text(text, PackedPods::default(), PackedPods::take)?.whole().map(|packed| packed.unpacked().0)
}

/// Pods from their objects, with their context.
///
/// # Errors
/// Everything wrong with them.
pub fn pods_of(objects: &[Value], cluster: &ClusterObjects) -> Result<Vec<Pod>, PodInputError> {
    let (mut pods, mut wrong) = (Vec::new(), Vec::new());
    for object in objects {
        match Pod::from_json(object) {
            Ok(pod) => pods.push(pod),
            Err(errors) => wrong.extend(manifest::faults(object, &errors)),
        }
    }
    if !wrong.is_empty() {
        return Err(PodInputError(wrong));
    }
    cluster.tell(&mut pods);
    Ok(pods)
}

/// The one pod of a file.
///
/// # Errors
/// None is given, or more than one, or it cannot be read.
pub fn pod_of_file(path: &str) -> Result<Pod, PodInputError> {
    let (mut pods, _) = pods_of_file(path)?;
    match (pods.pop(), pods.len()) {
        (Some(pod), 0) => Ok(pod),
        (_, others) => Err(PodInputError::of(format!("{path}: has {} pods; one is wanted", others + 1))),
    }
}

/// `NAMESPACE/NAME`, or a name in namespace default.
///
/// # Errors
/// It cannot be a pod's name.
pub fn pod_name(text: &str) -> Result<PodName, String> {
    PodName::parse(text, "default")
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
        let PodInputError(all) = pods_of_text(text).expect_err("both are wrong");
        assert_eq!(all.len(), 3, "{all:?}");
        assert!(all[0].starts_with("a: kind:") && all[2].starts_with("b: metadata.labels"), "{all:?}");
        assert_eq!(pods_of_text("").expect_err("nothing"), PodInputError::of("has no pod"));
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
