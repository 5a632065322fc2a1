//! Pods from a folder of manifests, for machines without a cluster.

use super::{PodError, PodName, ReadPod};
use crate::yaml;
use cluster_client::files;
use serde_json::Value;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The largest file that is read.
const MOST_BYTES: u64 = 4 << 20;

/// Finds the manifest of a pod: by namespace and name or, because a kubelet appends the node's name to the names of
/// static pods, by the longest manifest name that the pod's name continues with a dash.
pub fn read(folder: &Path, pod: &PodName, node_name: Option<&str>) -> Result<ReadPod, PodError> {
    let mut unreadable = Vec::new();
    let mut best: Option<(usize, PathBuf, Value)> = None;
    for path in files(folder)? {
        let documents = match documents(&path) {
            Ok(documents) => documents,
            Err(problem) => {
                unreadable.push(format!("{}: {problem}", path.display()));
                continue;
            }
        };
        for document in documents {
            let likeness = likeness(&document, pod, node_name);
            if likeness > best.as_ref().map_or(0, |(likeness, _, _)| *likeness) {
                best = Some((likeness, path.clone(), document));
            }
        }
    }
    let Some((_, path, document)) = best else {
        return Err(PodError::NoManifest { path: folder.to_owned(), pod: pod.clone(), unreadable });
    };
    ReadPod::new(pod, document, &format!("{}: ", path.display()))
}

/// Whether the folder can be read.
pub fn check(folder: &Path) -> Result<(), PodError> {
    files(folder).map(drop)
}

/// The folder's files in the order of their names. As with a kubelet, those that begin with a dot do not count.
fn files(folder: &Path) -> Result<Vec<PathBuf>, PodError> {
    let failed = |error: io::Error| PodError::Folder { path: folder.to_owned(), message: error.to_string() };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The documents of a YAML or JSON file.
fn documents(path: &Path) -> Result<Vec<Value>, String> {
    let text = files::read_text(path, MOST_BYTES).map_err(|error| error.to_string())?;
    yaml::documents(&text)
}

/// 0 if the document is not the pod's manifest; otherwise the higher, the more of the names agrees.
fn likeness(document: &Value, pod: &PodName, node_name: Option<&str>) -> usize {
    let text = |pointer: &str| document.pointer(pointer).and_then(Value::as_str);
    let namespace = text("/metadata/namespace").filter(|text| !text.is_empty()).unwrap_or("default");
    let name = text("/metadata/name").unwrap_or_default();
    if text("/kind") != Some("Pod") || namespace != pod.namespace || name.is_empty() {
        return 0;
    }
    match pod.name.strip_prefix(name) {
        Some("") => usize::MAX,
        Some(rest) => match (rest.strip_prefix('-'), node_name) {
            (Some(node), Some(known)) if node != known => 0,
            (Some(node), _) if !node.is_empty() => name.len(),
            (Some(_) | None, _) => 0,
        },
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn manifest(namespace: &str, name: &str, label: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: {namespace}\n  labels: {{which: {label}}}\n\
             spec:\n  containers:\n  - name: app\n    args: [\"--yes\"]\n"
        )
    }

    fn found(folder: &Path, name: &str, node: Option<&str>) -> Option<String> {
        let pod = PodName { namespace: "default".into(), name: name.into() };
        match read(folder, &pod, node) {
            Ok(read) => read.facts.labels.get("which").cloned(),
            Err(PodError::NoManifest { .. }) => None,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn the_most_alike_manifest_counts() {
        let json = r#"{"kind":"Pod","metadata":{"name":"js","labels":{"which":"json"}},"spec":{}}"#;
        let two = manifest("''", "web", "short") + "---\n" + &manifest("default", "web-a", "long");
        let other = manifest("other", "web-a-n1", "elsewhere");
        let hidden = manifest("default", "web-a-n1", "hidden");
        let folder = folder(&[
            ("two.yaml", &two),
            ("other", &other),
            ("js.json", json),
            (".hidden.yaml", &hidden),
            ("bad", "{"),
        ]);
        fs::create_dir(folder.path().join("folder.yaml")).unwrap();
        let found = |name, node| found(folder.path(), name, node);
        assert_eq!(found("web", None).as_deref(), Some("short"));
        assert_eq!(found("web-n1", None).as_deref(), Some("short"));
        assert_eq!(found("web-a-n1", None).as_deref(), Some("long"));
        assert_eq!(found("web-a-n1", Some("a-n1")).as_deref(), Some("short"));
        assert_eq!(found("web-a-n1", Some("n2")), None);
        assert_eq!(found("js", None).as_deref(), Some("json"));
        assert_eq!((found("we", None), found("web-", None), found("webs", None)), (None, None, None));
    }

    #[test]
    fn errors_name_the_file() {
        let folder = folder(&[
            ("bad.yaml", "a: [\n"),
            ("typed.yaml", "kind: Pod\nmetadata: {name: x, labels: {a: 1}}\nspec: {}"),
        ]);
        let pod = |name: &str| PodName { namespace: "default".into(), name: name.into() };
        let missing = read(folder.path(), &pod("y"), None).unwrap_err().to_string();
        assert!(missing.contains("default/y") && missing.contains("bad.yaml"), "{missing}");
        let typed = read(folder.path(), &pod("x"), None).unwrap_err().to_string();
        assert!(typed.contains("typed.yaml: metadata.labels[\"a\"]: is a number"), "{typed}");
        let folder = read(Path::new("/nonexistent"), &pod("x"), None).unwrap_err();
        assert!(folder.to_string().starts_with("pod_manifest_dir: cannot read /nonexistent"), "{folder}");
    }
}
