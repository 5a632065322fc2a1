//! `istio-validation` in a pod of a real kubelet, as the injector writes it (`manifests/validated-pod.yaml`): it holds
//! the pod back, says why in the termination message, and lets it start once it is programmed.

mod common;
mod validation_support;

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::image::Image;
use e2e::node::Node;
use e2e::process;
use serde_json::Value;
use validation_support::{INJECTED, istio_validation};

const MANIFEST: &str = include_str!("../manifests/validated-pod.yaml");
/// How long the kubelet may take to start, or start again, a container on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// The program alone, with the libraries it is linked against.
fn image() -> Result<Image> {
    let program = istio_validation();
    let mut image =
        Image::new("docker.io/local/istio-validation:1").program("bin/istio-validation", program)?;
    let libraries = process::run(&mut process::command("ldd", [program]), process::SHORT)?.ok()?.stdout;
    let paths = libraries.split_whitespace().filter(|word| word.starts_with('/'));
    for path in paths {
        let relative = path.trim_start_matches('/');
        let folders = Path::new(relative).ancestors().skip(1).filter(|folder| *folder != Path::new(""));
        for folder in folders.collect::<Vec<_>>().into_iter().rev() {
            image = image.folder(&folder.to_string_lossy());
        }
        image = image.program(relative, Path::new(path))?;
    }
    Ok(image.entrypoint(&["/bin/istio-validation"]))
}

/// How the container has ended, now or before it was started again, if that was with this exit code.
fn ended(pod: &Value, code: i64) -> Option<Value> {
    let mut statuses = pod["status"]["initContainerStatuses"].as_array()?.iter();
    let status = statuses.find(|status| status["name"] == "istio-validation")?;
    let ends = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
    let message = ends.into_iter().find(|end| end["exitCode"] == code)?["message"].as_str()?;
    serde_json::from_str(message).ok()
}

#[test]
fn a_pod_is_held_back_until_it_is_programmed() -> Result<()> {
    let node = Node::standalone()?;
    node.import(&image()?)?;
    let waiting = node.manifest_dir().join("validated.yaml");
    fs::write(&waiting, MANIFEST)?;
    let pod = node.pod("default", &format!("validated-{}", node.name()));

    // It is started again and again; the machine may have stood still while one of them looked for an address.
    let verdict = pod.wait("to be held back without rules", PATIENCE, |pod| {
        ended(pod, 126).filter(|verdict| verdict["reason"] == "no-rules")
    })?;
    assert_eq!((verdict["uid"].as_u64(), verdict["gid"].as_u64()), (Some(1337), Some(1337)));
    let families: Vec<&Value> =
        verdict["checks"].as_array().context("checks")?.iter().map(|c| &c["family"]).collect();
    assert!(families.contains(&&"IPv4".into()) && families.contains(&&"IPv6".into()), "{verdict:#}");

    // What repair does.
    let namespace = pod.namespace()?;
    common::apply(&namespace, &format!("{INJECTED} --dual-stack --redirect-dns --capture-all-dns"))?;
    pod.wait_running(PATIENCE)?;
    let object = pod.object()?.context("the pod is there")?;
    let verdict = ended(&object, 0).with_context(|| format!("{:#}", object["status"]))?;
    assert_eq!(verdict["reason"], "redirected", "{verdict:#}");
    fs::remove_file(waiting)?;
    Ok(())
}
