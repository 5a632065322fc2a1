//! An OCI image layout in a tar archive, as `ctr images import`, `podman load` and `skopeo copy oci-archive:` read it. With one architecture alone,
//! `docker load` reads it as well.
//!
//! The members of what is written as JSON are in alphabetical order, and the files have a fixed one.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType};

use super::contents::Image;
use super::layer::header;
use super::program::Architecture;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The default place of programs in a container.
const PATH: &str = "PATH=/usr/local/bin";

/// What is said of the programs' source.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    /// RFC 3339.
    created: Option<String>,
    revision: Option<String>,
}

impl Facts {
    /// From the variables SOURCE_DATE_EPOCH and SOURCE_REVISION; an empty one counts as unset.
    pub(crate) fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let said = |name: &str| variable(name).filter(|text| !text.is_empty());
        let created = said("SOURCE_DATE_EPOCH").map(|text| {
            let seconds = text.parse().with_context(|| format!("SOURCE_DATE_EPOCH: {text}"))?;
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            anyhow::Ok(humantime::format_rfc3339_seconds(time).to_string())
        });
        Ok(Self { created: created.transpose()?, revision: said("SOURCE_REVISION") })
    }

    fn annotations(&self, image: &Image) -> Value {
        let always = [
            ("title", image.title),
            ("description", image.description),
            ("version", env!("CARGO_PKG_VERSION")),
            ("licenses", env!("CARGO_PKG_LICENSE")),
        ];
        let known = [("created", &self.created), ("revision", &self.revision)];
        let known = known.into_iter().filter_map(|(name, text)| Some((name, text.as_deref()?)));
        let named = |(name, text)| (format!("org.opencontainers.image.{name}"), json!(text));
        Value::Object(always.into_iter().chain(known).map(named).collect())
    }
}

/// An archive that is being written.
#[derive(Debug)]
pub(crate) struct Archive {
    reference: String,
    facts: Facts,
    /// By digest.
    blobs: BTreeMap<String, Vec<u8>>,
    /// Their descriptors.
    images: Vec<Value>,
    /// How `docker save` lists what is in an archive.
    saved: Vec<Value>,
}

impl Archive {
    pub(crate) fn new(reference: &str, facts: Facts) -> Result<Self> {
        let named = reference.rsplit_once(':').filter(|(name, tag)| !name.is_empty() && !tag.contains('/'));
        ensure!(named.is_some(), "{reference} has no tag");
        let reference = reference.to_owned();
        Ok(Self { reference, facts, blobs: BTreeMap::new(), images: Vec::new(), saved: Vec::new() })
    }

    /// Adds the image for an architecture, of this layer.
    pub(crate) fn add(
        &mut self,
        image: &Image,
        architecture: Architecture,
        layer: &[u8],
        compress: bool,
    ) -> Result<()> {
        let mut platform = json!({"architecture": architecture.to_string(), "os": "linux"});
        if architecture == Architecture::Arm64 {
            platform["variant"] = json!("v8");
        }
        let labels = self.facts.annotations(image);
        let (_, entrypoint) = image.programs[0];
        let mut history = json!({"created_by": "deploy/build-images.sh"});
        let mut config = platform.clone();
        config["config"] = json!({
            "User": image.user, "Env": [PATH], "Entrypoint": [format!("/{entrypoint}")], "WorkingDir": "/", "Labels": labels,
        });
        config["rootfs"] = json!({"type": "layers", "diff_ids": [digest(layer)]});
        if let Some(created) = &self.facts.created {
            history["created"] = json!(created);
            config["created"] = json!(created);
        }
        config["history"] = json!([history]);
        let config = self.blob(CONFIG, config.to_string().into_bytes());
        let layer = if compress {
            self.blob(&format!("{LAYER}+gzip"), gzip(layer)?)
        } else {
            self.blob(LAYER, layer.to_owned())
        };
        self.saved.push(json!({
            "Config": path_of(&config), "RepoTags": [self.reference], "Layers": [path_of(&layer)],
        }));
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer], "annotations": labels,
        });
        let mut manifest = self.blob(MANIFEST, manifest.to_string().into_bytes());
        manifest["platform"] = platform;
        self.images.push(manifest);
        Ok(())
    }

    /// The archive's bytes.
    pub(crate) fn finish(mut self, image: &Image) -> Result<Vec<u8>> {
        let mut named = match &self.images[..] {
            [only] => only.clone(),
            several => {
                let annotations = self.facts.annotations(image);
                let index = json!({
                    "schemaVersion": 2, "mediaType": INDEX, "manifests": several, "annotations": annotations,
                });
                self.blob(INDEX, index.to_string().into_bytes())
            }
        };
        let tag = self.reference.rsplit_once(':').map(|(_, tag)| tag).unwrap_or_default();
        named["annotations"] =
            json!({"io.containerd.image.name": self.reference, "org.opencontainers.image.ref.name": tag});
        let top = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]});
        let mut archive = Builder::new(Vec::new());
        let mut add = |path: &str, content: &[u8]| {
            let mut header = header(EntryType::Regular, content.len() as u64, 0o644);
            archive.append_data(&mut header, path, content)
        };
        add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        add("index.json", top.to_string().as_bytes())?;
        // What `docker save` writes can describe one architecture only.
        if let [_] = &self.saved[..] {
            add("manifest.json", json!(self.saved).to_string().as_bytes())?;
        }
        for (digest, content) in &self.blobs {
            add(&blob_path(digest), content)?;
        }
        Ok(archive.into_inner()?)
    }

    /// Takes up a blob, and returns its descriptor.
    fn blob(&mut self, media_type: &str, content: Vec<u8>) -> Value {
        let (digest, size) = (digest(&content), content.len());
        self.blobs.insert(digest.clone(), content);
        json!({"mediaType": media_type, "digest": digest, "size": size})
    }
}

/// The path of what a descriptor names.
fn path_of(descriptor: &Value) -> String {
    blob_path(descriptor["digest"].as_str().unwrap_or_default())
}

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

fn digest(content: &[u8]) -> String {
    format!("sha256:{}", hex(content))
}

/// The SHA-256 sum of some bytes as text.
pub(crate) fn hex(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Without a name and a time.
fn gzip(content: &[u8]) -> Result<Vec<u8>> {
    let mut writer = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    writer.write_all(content)?;
    Ok(writer.finish()?)
}
