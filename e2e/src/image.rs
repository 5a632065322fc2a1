//! Container images from files: no registry, no daemon, no base image.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use test_support::process;

/// The image every test pod can use: busybox under all its names in `/bin`.
pub const BUSYBOX: &str = "docker.io/local/busybox:1";
/// The image of pod sandboxes.
pub(crate) const PAUSE: &str = "docker.io/local/pause:1";

/// What test containers call busybox by.
const BUSYBOX_NAMES: [&str; 16] = [
    "cat", "echo", "env", "grep", "id", "ip", "ls", "nc", "netstat", "nslookup", "ps", "sh", "sleep", "test",
    "true", "wget",
];

/// An image of one layer, in memory.
#[derive(Clone, Debug)]
pub struct Image {
    reference: String,
    entrypoint: Vec<String>,
    layer: Vec<Entry>,
}

#[derive(Clone, Debug)]
enum Entry {
    Folder(String, u32),
    File(String, Vec<u8>, u32),
    Link(String, String),
}

impl Image {
    /// An image with the usual empty folders, and the users root and istio-proxy (1337). The reference has host, name and tag, as in
    /// [`BUSYBOX`].
    pub fn new(reference: &str) -> Self {
        let folders = ["bin", "dev", "etc", "opt", "proc", "run", "sys", "var"].map(|name| (name, 0o755));
        let folders = folders.into_iter().chain([("tmp", 0o1777)]);
        let image = Self {
            reference: reference.to_owned(),
            entrypoint: Vec::new(),
            layer: folders.map(|(name, mode)| Entry::Folder(name.to_owned(), mode)).collect(),
        };
        let users = "root:x:0:0::/:/bin/sh\nistio-proxy:x:1337:1337::/:/bin/sh\n";
        image.file("etc/passwd", users, 0o644).file("etc/group", "root:x:0:\nistio-proxy:x:1337:\n", 0o644)
    }

    /// The image [`BUSYBOX`], from the machine's static busybox.
    pub fn busybox() -> Result<Self> {
        Self::new(BUSYBOX).with_busybox()
    }

    /// The image of pod sandboxes: a process that sleeps.
    pub(crate) fn pause() -> Result<Self> {
        Ok(Self::new(PAUSE).with_busybox()?.entrypoint(&["/bin/sh", "-c", "while :; do sleep 1000000; done"]))
    }

    /// What a container runs when its pod does not say.
    #[must_use]
    pub fn entrypoint(mut self, words: &[&str]) -> Self {
        self.entrypoint = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Adds a file. The path is relative to the root; its folders are made.
    #[must_use]
    pub fn file(mut self, path: &str, content: impl Into<Vec<u8>>, mode: u32) -> Self {
        self.layer.push(Entry::File(path.to_owned(), content.into(), mode));
        self
    }

    /// Adds a folder.
    #[must_use]
    pub fn folder(mut self, path: &str) -> Self {
        self.layer.push(Entry::Folder(path.to_owned(), 0o755));
        self
    }

    /// Adds a symbolic link.
    #[must_use]
    pub fn link(mut self, path: &str, target: &str) -> Self {
        self.layer.push(Entry::Link(path.to_owned(), target.to_owned()));
        self
    }

    /// Adds an executable of the machine. It must be static, or the image must have its libraries.
    pub fn program(self, path: &str, source: &Path) -> Result<Self> {
        let content = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        Ok(self.file(path, content, 0o755))
    }

    /// Adds an executable of the machine with the libraries it is linked against.
    pub fn linked_program(self, path: &str, source: &Path) -> Result<Self> {
        libraries_of(source)?.iter().try_fold(self.program(path, source)?, |image, library| {
            let library = library.to_string_lossy();
            image.program(library.trim_start_matches('/'), Path::new(&*library))
        })
    }

    /// Adds busybox as `/bin/busybox`, and `/bin/sh` and others as names of it.
    pub fn with_busybox(self) -> Result<Self> {
        let places = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new);
        let busybox = places.into_iter().find(|place| place.exists());
        let mut image =
            self.program("bin/busybox", busybox.context("no busybox: run scripts/setup-apt.sh")?)?;
        let links = BUSYBOX_NAMES.iter().map(|name| Entry::Link(format!("bin/{name}"), "busybox".to_owned()));
        image.layer.extend(links);
        Ok(image)
    }

    /// Its reference.
    pub fn reference(&self) -> &str {
        &self.reference
    }

    /// Writes it in the format of `docker save`, which `ctr images import` reads.
    pub fn write(&self, to: impl Write) -> Result<()> {
        let layer = self.layer()?;
        let layer_digest = hex_digest(&layer);
        let config = json!({
            "architecture": architecture(), "os": "linux", "created": "2026-01-01T00:00:00Z",
            "config": {"Entrypoint": self.entrypoint, "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]},
            "history": [{"created": "2026-01-01T00:00:00Z"}],
        })
        .to_string();
        let config_name = format!("{}.json", hex_digest(config.as_bytes()));
        let layer_name = format!("{layer_digest}/layer.tar");
        let manifest = json!([{"Config": config_name, "RepoTags": [self.reference], "Layers": [layer_name]}]);

        let mut archive = Builder::new(to);
        append_file(&mut archive, &config_name, config.as_bytes(), 0o644)?;
        append_file(&mut archive, &layer_name, &layer, 0o644)?;
        append_file(&mut archive, "manifest.json", manifest.to_string().as_bytes(), 0o644)?;
        archive.finish()?;
        Ok(())
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let (mut layer, mut folders) = (Builder::new(Vec::new()), BTreeSet::new());
        for entry in &self.layer {
            let (Entry::Folder(path, _) | Entry::File(path, ..) | Entry::Link(path, _)) = entry;
            let parents: Vec<&Path> = Path::new(path).ancestors().skip(1).collect();
            for folder in parents.into_iter().rev().skip(1).filter(|folder| folders.insert(folder.to_owned()))
            {
                append_folder(&mut layer, folder, 0o755)?;
            }
            match entry {
                Entry::Folder(path, mode) => {
                    if folders.insert(Path::new(path)) {
                        append_folder(&mut layer, Path::new(path), *mode)?;
                    }
                }
                Entry::File(path, content, mode) => append_file(&mut layer, path, content, *mode)?,
                Entry::Link(path, target) => {
                    layer.append_link(&mut header(EntryType::Symlink, 0, 0o777), path, target)?;
                }
            }
        }
        Ok(layer.into_inner()?)
    }
}

/// The loader and the libraries that a program of this machine is linked against.
///
/// # Errors
/// It is static, or no program.
pub fn libraries_of(program: &Path) -> Result<Vec<PathBuf>> {
    let told = process::run(&mut process::command("ldd", [program]), process::SHORT)?.ok()?.stdout;
    Ok(told.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

fn append_folder(archive: &mut Builder<impl Write>, path: &Path, mode: u32) -> Result<()> {
    Ok(archive.append_data(&mut header(EntryType::Directory, 0, mode), path, std::io::empty())?)
}

fn append_file(archive: &mut Builder<impl Write>, path: &str, content: &[u8], mode: u32) -> Result<()> {
    let mut header = header(EntryType::Regular, content.len() as u64, mode);
    archive.append_data(&mut header, path, content).with_context(|| format!("cannot add {path}"))
}

fn header(kind: EntryType, size: u64, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn hex_digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of this machine's architecture in images.
fn architecture() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_comes_behind_its_folders_and_each_of_them_once() -> Result<()> {
        let image = Image::new(BUSYBOX).folder("opt/a/b").file("opt/a/c/d", "", 0o644).link("opt/a/e", "b");
        let layer = image.layer()?;
        let mut paths = Vec::new();
        for entry in tar::Archive::new(layer.as_slice()).entries()? {
            paths.push(entry?.path()?.display().to_string());
        }
        let ours: Vec<&str> =
            paths.iter().map(String::as_str).filter(|path| path.starts_with("opt")).collect();
        assert_eq!(ours, ["opt", "opt/a", "opt/a/b", "opt/a/c", "opt/a/c/d", "opt/a/e"]);
        Ok(())
    }
}
