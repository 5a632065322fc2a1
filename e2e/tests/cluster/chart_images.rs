//! Which image the chart installs: this project's, never Istio's or a copy of it.

use crate::chart_support::{daemon_set, objects, rendered_with, test_pod, yaml};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

const DIGEST: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
fn an_image_of_istios_is_replaced_or_refused_under_every_name() -> Result<()> {
    let table = include_str!("../../manifests/chart-images.yaml")
        .replace("VERSION", env!("CARGO_PKG_VERSION"))
        .replace("DIGEST", DIGEST);
    let rows = yaml(&table)?;
    let rows = rows.as_array().context("no rows")?;
    ensure!(rows.len() >= 40, "{} rows", rows.len());
    let failed: Vec<String> = rows.iter().filter_map(|row| Some(format!("{:#}", held(row).err()?))).collect();
    ensure!(failed.is_empty(), "{} of {}:\n{}", failed.len(), rows.len(), failed.join("\n"));
    Ok(())
}

/// Holds the chart to a row.
fn held(row: &Value) -> Result<()> {
    let rendered = rendered_with(&row["values"], &["--show-only", "templates/daemonset.yaml"]);
    match (&row["image"], rendered) {
        (Value::String(wanted), rendered) => {
            let objects = objects(&rendered?)?;
            let image = &daemon_set(&objects)?["spec"]["template"]["spec"]["containers"][0]["image"];
            ensure!(image == wanted, "{} instead of {wanted}: {}", image, row["values"]);
        }
        (_, Ok(_)) => anyhow::bail!("rendered: {}", row["values"]),
        (_, Err(refusal)) => {
            let words = row["refused"].as_str().context("neither an image nor a refusal")?;
            ensure!(format!("{refusal:#}").contains(words), "{words}: {refusal:#}");
        }
    }
    Ok(())
}

#[test]
fn the_tests_image_is_beside_the_agents() -> Result<()> {
    let hub = "registry.example.com/mesh";
    for image in
        [format!("{hub}/install-cni@sha256:{DIGEST}"), format!("docker.io/istio/install-cni@sha256:{DIGEST}")]
    {
        let pod = test_pod(&serde_json::json!({"hub": hub, "tag": 7, "image": image}))?;
        for list in ["initContainers", "containers"] {
            let image = &pod["spec"][list][0]["image"];
            ensure!(*image == format!("{hub}/validator:7"), "{image}");
        }
    }
    Ok(())
}
