//! Finding the programs that `scripts/setup-kube.sh` builds.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// A program that `scripts/setup-kube.sh` built. KUBEBUILDER_ASSETS comes first for those it may hold.
///
/// # Errors
/// It is not built.
pub fn built(name: &str) -> Result<PathBuf> {
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    let places = assets.into_iter().chain([cache()?.join("bin")]);
    for place in places {
        if place.join(name).exists() {
            return Ok(place.join(name));
        }
    }
    bail!("{name} is not built: run scripts/setup-kube.sh")
}

fn cache() -> Result<PathBuf> {
    if let Some(cache) = std::env::var_os("E2E_CACHE") {
        return Ok(PathBuf::from(cache));
    }
    let home = std::env::var_os("HOME").context("neither E2E_CACHE nor HOME is set")?;
    Ok(Path::new(&home).join(".cache/sidecar-cni-e2e"))
}
