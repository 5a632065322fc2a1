//! An OCI image layout in a tar archive, as `ctr images import`, `podman load` and `skopeo copy oci-archive:` read it. With one architecture alone,
//! `docker load` reads it as well.
//!
//! The members of what is written as JSON have a fixed order, and so have the files.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use flate2::{Compression, GzBuilder};
use serde::Serialize;
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

    fn annotations(&self, image: &Image) -> Annotations {
        let always = [
            ("title", image.title),
            ("description", image.description),
            ("version", env!("CARGO_PKG_VERSION")),
            ("licenses", env!("CARGO_PKG_LICENSE")),
        ];
        let known = [("created", &self.created), ("revision", &self.revision)];
        let known = known.into_iter().filter_map(|(name, text)| Some((name, text.as_deref()?)));
        always
            .into_iter()
            .chain(known)
            .map(|(name, text)| (format!("org.opencontainers.image.{name}"), text.to_owned()))
            .collect()
    }
}

type Annotations = BTreeMap<String, String>;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<Platform>,
    #[serde(skip_serializing_if = "Annotations::is_empty")]
    annotations: Annotations,
}

#[derive(Clone, Debug, Serialize)]
struct Platform {
    architecture: String,
    os: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    variant: Option<&'static str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Index<'a> {
    schema_version: u8,
    media_type: &'static str,
    manifests: &'a [Descriptor],
    #[serde(skip_serializing_if = "Annotations::is_empty")]
    annotations: Annotations,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u8,
    media_type: &'static str,
    config: Descriptor,
    layers: [Descriptor; 1],
    annotations: Annotations,
}

#[derive(Debug, Serialize)]
struct Config<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<&'a str>,
    #[serde(flatten)]
    platform: &'a Platform,
    config: Runs<'a>,
    rootfs: Rootfs,
    history: [History<'a>; 1],
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Runs<'a> {
    user: &'a str,
    env: [&'a str; 1],
    entrypoint: [String; 1],
    working_dir: &'a str,
    labels: Annotations,
}

#[derive(Debug, Serialize)]
struct Rootfs {
    r#type: &'static str,
    diff_ids: [String; 1],
}

#[derive(Debug, Serialize)]
struct History<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<&'a str>,
    created_by: &'a str,
}

/// How `docker save` lists what is in an archive.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    repo_tags: [String; 1],
    layers: [String; 1],
}

/// An archive that is being written.
#[derive(Debug)]
pub(crate) struct Archive {
    reference: String,
    facts: Facts,
    /// By digest.
    blobs: BTreeMap<String, Vec<u8>>,
    images: Vec<Descriptor>,
    saved: Vec<Saved>,
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
        let variant = (architecture == Architecture::Arm64).then_some("v8");
        let platform = Platform { architecture: architecture.to_string(), os: "linux", variant };
        let labels = self.facts.annotations(image);
        let created = self.facts.created.clone();
        let (_, entrypoint) = image.programs[0];
        let config = Config {
            created: created.as_deref(),
            platform: &platform,
            config: Runs {
                user: image.user,
                env: [PATH],
                entrypoint: [format!("/{entrypoint}")],
                working_dir: "/",
                labels: labels.clone(),
            },
            rootfs: Rootfs { r#type: "layers", diff_ids: [digest(layer)] },
            history: [History { created: created.as_deref(), created_by: "deploy/build-images.sh" }],
        };
        let config = self.blob(CONFIG, serde_json::to_vec(&config)?);
        let layer = if compress {
            self.blob(&format!("{LAYER}+gzip"), gzip(layer)?)
        } else {
            self.blob(LAYER, layer.to_owned())
        };
        self.saved.push(Saved {
            config: blob_path(&config.digest),
            repo_tags: [self.reference.clone()],
            layers: [blob_path(&layer.digest)],
        });
        let manifest = Manifest {
            schema_version: 2,
            media_type: MANIFEST,
            config,
            layers: [layer],
            annotations: labels,
        };
        let manifest = self.blob(MANIFEST, serde_json::to_vec(&manifest)?);
        self.images.push(Descriptor { platform: Some(platform), ..manifest });
        Ok(())
    }

    /// The archive's bytes.
    pub(crate) fn finish(mut self, image: &Image) -> Result<Vec<u8>> {
        let named = match &self.images[..] {
            [only] => only.clone(),
            several => {
                let annotations = self.facts.annotations(image);
                let index = Index { schema_version: 2, media_type: INDEX, manifests: several, annotations };
                let index = serde_json::to_vec(&index)?;
                self.blob(INDEX, index)
            }
        };
        let tag = self.reference.rsplit_once(':').map(|(_, tag)| tag).unwrap_or_default();
        let names =
            [("io.containerd.image.name", &*self.reference), ("org.opencontainers.image.ref.name", tag)];
        let annotations = names.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        let manifests = &[Descriptor { annotations, ..named }];
        let top = Index { schema_version: 2, media_type: INDEX, manifests, annotations: Annotations::new() };

        let mut archive = Builder::new(Vec::new());
        let mut add = |path: &str, content: &[u8]| {
            let mut header = header(EntryType::Regular, content.len() as u64, 0o644);
            archive.append_data(&mut header, path, content)
        };
        add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        add("index.json", &serde_json::to_vec(&top)?)?;
        // What `docker save` writes can describe one architecture only.
        if let [_] = &self.saved[..] {
            add("manifest.json", &serde_json::to_vec(&self.saved)?)?;
        }
        for (digest, content) in &self.blobs {
            add(&blob_path(digest), content)?;
        }
        Ok(archive.into_inner()?)
    }

    fn blob(&mut self, media_type: &str, content: Vec<u8>) -> Descriptor {
        let (digest, size) = (digest(&content), content.len());
        self.blobs.insert(digest.clone(), content);
        let media_type = media_type.to_owned();
        Descriptor { media_type, digest, size, platform: None, annotations: Annotations::new() }
    }
}

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

pub(crate) fn digest(content: &[u8]) -> String {
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
