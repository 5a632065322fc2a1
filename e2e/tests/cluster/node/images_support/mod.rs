//! A real Envoy as the sidecar, and pods as Istio's injector writes them, with this project's images.

use std::path::PathBuf;

use anyhow::{Context, Result};
use e2e::envoy::{Interception, bootstrap};
use e2e::image::Image;
use e2e::node::Node;
use e2e::tools;
use serde_json::{Value, json};
use test_support::netns::Families;
use test_support::project;

/// A pod as the injector writes it where `pilot.cni.enabled` is set.
const INJECTED: &str = include_str!("../../../../manifests/validated-pod.yaml");
const ENVOY: &str = "docker.io/local/envoy:1";

/// Gives the node an image of what `deploy/build-images.sh` wrote into the folder that IMAGES names, and returns its reference.
pub fn import(node: &Node<'_>, image: &str) -> Result<String> {
    let folder = std::env::var_os("IMAGES").context("IMAGES names no folder: run make images")?;
    // Relative to the workspace, where make runs, and not to this package, where cargo runs tests.
    let archive = project::file(folder).join(format!("{image}.tar"));
    node.ctr(&["images", "import", &archive.to_string_lossy()])?;
    Ok(format!("localhost/{image}:{}", env!("CARGO_PKG_VERSION")))
}

/// Gives the node Envoy, configured as a sidecar that lets every connection go on to where it was going.
pub fn import_envoy(node: &Node<'_>) -> Result<()> {
    let envoy: PathBuf = tools::built("envoy")?;
    let configuration = bootstrap(Families::V4, Interception::Redirect);
    let image = Image::new(ENVOY).with_busybox()?.linked_program("bin/envoy", &envoy)?;
    node.import(&image.file("etc/envoy.json", configuration.to_string(), 0o644))
}

/// The container that the injector puts before the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// With the node's plugin: it only looks.
    Validation,
    /// Without: it programs the pod.
    Init,
}

/// A pod as the injector writes it, with these images in the places of Istio's.
pub fn injected_pod(name: &str, first: First, image: &str) -> Result<Value> {
    let mut pod: Value = serde_saphyr::from_str(INJECTED)?;
    pod["metadata"]["name"] = json!(name);
    let init = &mut pod["spec"]["initContainers"][0];
    init["image"] = json!(image);
    if first == First::Init {
        init["name"] = json!("istio-init");
        let args = init["args"].as_array_mut().context("arguments")?;
        args.retain(|word| word != "--run-validation" && word != "--skip-rule-apply");
        // What the injector asks for, but for the root file system, which it leaves writable.
        init["securityContext"] = json!({
            "runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": false, "readOnlyRootFilesystem": true,
            "allowPrivilegeEscalation": false, "privileged": false,
            "capabilities": {"add": ["NET_ADMIN", "NET_RAW"], "drop": ["ALL"]},
        });
    }
    let proxy = &mut pod["spec"]["initContainers"][1];
    proxy["image"] = json!(ENVOY);
    proxy["command"] = json!([
        "/bin/sh",
        "-c",
        "exec /bin/envoy --config-path /etc/envoy.json --disable-hot-restart --concurrency 1 --log-level warn",
    ]);
    Ok(pod)
}
