//! What an image is made of, as a CycloneDX document: the programs with their sums, the crates that are linked into each with those that ask for
//! them, and what the compiler adds.
//!
//! Cargo is asked for one program at a time, as they are built: together, each would get the library features of the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::contents::Image;
use super::layout::hex;
use super::program::{self, Architecture};

#[derive(Clone, Debug, Serialize)]
struct Component {
    r#type: &'static str,
    #[serde(rename = "bom-ref")]
    bom_ref: String,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hashes: Vec<Hash>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    licenses: Vec<License>,
    #[serde(skip_serializing_if = "Option::is_none")]
    purl: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
struct Hash {
    alg: &'static str,
    content: String,
}

#[derive(Clone, Debug, Serialize)]
struct License {
    expression: String,
}

/// What is asked of `Cargo.lock`.
#[derive(Debug, Deserialize)]
struct Lockfile {
    package: Vec<LockedPackage>,
}

#[derive(Debug, Deserialize)]
struct LockedPackage {
    name: String,
    version: String,
    /// Of the registry's archive, SHA-256; the project's own crates have none.
    checksum: Option<String>,
}

impl Lockfile {
    fn read(text: &str) -> Result<Self> {
        toml::from_str(text).context("Cargo.lock")
    }

    fn checksum(&self, name: &str, version: &str) -> Option<&str> {
        let package = self.package.iter().find(|one| one.name == name && one.version == version);
        package?.checksum.as_deref()
    }
}

/// The document for an image, of the programs in a folder.
pub(crate) fn describe(image: &Image, architecture: Architecture, folder: &Path) -> Result<String> {
    let lock = fs::read_to_string(project().join("Cargo.lock")).context("Cargo.lock")?;
    let lock = Lockfile::read(&lock)?;
    let mut parts = Parts::default();
    let added = [standard_library()?, musl()];
    for (package, path) in image.programs {
        let tree = cargo_tree(package, architecture)?;
        let root = parts.add_tree(&tree, &lock)?;
        let content = program::read(&folder.join(package), architecture)?;
        let program = Component {
            r#type: "application",
            hashes: vec![sha256(hex(&content))],
            ..component(&format!("/{path}"), None)
        };
        parts.depend(&program.bom_ref, root);
        for part in &added {
            parts.depend(&program.bom_ref, part.bom_ref.clone());
        }
        parts.depend(&whole(image, architecture).bom_ref, program.bom_ref.clone());
        parts.add(program);
    }
    for part in added {
        parts.add(part);
    }
    let dependency = |(part, needs): (&String, &BTreeSet<String>)| json!({"ref": part, "dependsOn": needs});
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": whole(image, architecture)},
        "components": parts.components.values().collect::<Vec<_>>(),
        "dependencies": parts.edges.iter().map(dependency).collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// Components and who needs which, by reference.
#[derive(Debug, Default)]
struct Parts {
    components: BTreeMap<String, Component>,
    edges: BTreeMap<String, BTreeSet<String>>,
}

impl Parts {
    fn add(&mut self, component: Component) {
        self.edges.entry(component.bom_ref.clone()).or_default();
        self.components.insert(component.bom_ref.clone(), component);
    }

    fn depend(&mut self, from: &str, on: String) {
        self.edges.entry(from.to_owned()).or_default().insert(on);
    }

    /// Adds the crates of one program, and returns the reference of its own.
    fn add_tree(&mut self, tree: &str, lock: &Lockfile) -> Result<String> {
        // The references from the program's own crate to the one of this line.
        let mut path: Vec<String> = Vec::new();
        for line in tree.lines() {
            let line = Line::parse(line).with_context(|| format!("cargo tree says: {line}"))?;
            let component = line.component(lock);
            path.truncate(line.depth);
            ensure!(path.len() == line.depth, "cargo tree leaves a depth out before {}", line.name);
            if let Some(parent) = path.last() {
                self.depend(&parent.clone(), component.bom_ref.clone());
            }
            path.push(component.bom_ref.clone());
            self.add(component);
        }
        path.into_iter().next().context("cargo tree prints nothing")
    }
}

/// A line of `cargo tree --prefix depth` in the format of [`cargo_tree`].
#[derive(Debug, PartialEq)]
struct Line<'a> {
    depth: usize,
    name: &'a str,
    version: &'a str,
    license: &'a str,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (package, license) = line.split_once('\t')?;
        let start = package.find(|character: char| !character.is_ascii_digit())?;
        let (depth, package) = package.split_at(start);
        let (name, rest) = package.split_once(" v")?;
        let version = rest.split_whitespace().next()?;
        // Behind the licence of a crate whose own crates were listed before.
        let license = license.trim_end_matches("(*)").trim();
        Some(Self { depth: depth.parse().ok()?, name, version, license })
    }

    fn component(&self, lock: &Lockfile) -> Component {
        let sum = lock.checksum(self.name, self.version).map(str::to_owned);
        let purl = format!("pkg:cargo/{}@{}", self.name, self.version);
        Component {
            bom_ref: purl.clone(),
            hashes: sum.into_iter().map(sha256).collect(),
            licenses: license(self.license),
            purl: Some(purl),
            ..component(self.name, Some(self.version))
        }
    }
}

fn license(text: &str) -> Vec<License> {
    // As crates wrote "or" before expressions existed.
    let expression = text.replace('/', " OR ");
    (!expression.is_empty()).then_some(License { expression }).into_iter().collect()
}

fn component(name: &str, version: Option<&str>) -> Component {
    Component {
        r#type: "library",
        bom_ref: name.to_owned(),
        name: name.to_owned(),
        version: version.map(str::to_owned),
        description: None,
        hashes: Vec::new(),
        licenses: Vec::new(),
        purl: None,
    }
}

fn sha256(content: String) -> Hash {
    Hash { alg: "SHA-256", content }
}

fn whole(image: &Image, architecture: Architecture) -> Component {
    Component {
        r#type: "container",
        bom_ref: format!("image:{}:{architecture}", image.name),
        description: Some(image.description.to_owned()),
        licenses: license(env!("CARGO_PKG_LICENSE")),
        ..component(image.name, Some(env!("CARGO_PKG_VERSION")))
    }
}

/// Rust's standard library, of the compiler that is asked here.
fn standard_library() -> Result<Component> {
    let version = output(Command::new("rustc").arg("--version"))?;
    let version = version.split_whitespace().nth(1).context("rustc prints no version")?.to_owned();
    let licenses = license("MIT OR Apache-2.0");
    Ok(Component { licenses, ..component("rust-std", Some(&version)) })
}

fn musl() -> Component {
    let description =
        "The C library that comes with rust-std, linked statically; rust-std does not report its version.";
    Component {
        description: Some(description.to_owned()),
        licenses: license("MIT"),
        ..component("musl", None)
    }
}

/// The crates that are linked into a program, each line with its depth. Macros run when it is built and are not in it.
fn cargo_tree(package: &str, architecture: Architecture) -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["tree", "--locked", "--quiet", "--edges", "normal,no-proc-macro"]);
    command.args(["--package", package, "--target", architecture.triple()]);
    command.args(["--prefix", "depth", "--format", "{p}\t{l}"]);
    output(command.current_dir(project()))
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0program v0.1.0 (/project/program)\tApache-2.0\n\
                        1left v1.2.3 (registry)\tMIT/Apache-2.0\n\
                        2shared v4.5.6\t\n\
                        1right v7.8.9\tMIT\n\
                        2shared v4.5.6\t (*)\n";

    #[test]
    fn lines_of_the_tree_are_read() {
        let lines: Vec<_> = TREE.lines().filter_map(Line::parse).collect();
        assert_eq!(lines[1], Line { depth: 1, name: "left", version: "1.2.3", license: "MIT/Apache-2.0" });
        assert_eq!(lines[4], Line { depth: 2, name: "shared", version: "4.5.6", license: "" });
        assert_eq!(lines.len(), 5);
        assert_eq!(Line::parse("no tree"), None);
    }

    #[test]
    fn who_needs_which_crate_follows_the_depths() {
        let lock = Lockfile::read(
            "version = 4\n[[package]]\nname = \"left\"\nversion = \"1.2.3\"\nchecksum = \"0a1b\"\n\
             [[package]]\nname = \"shared\"\nversion = \"4.5.6\"\n",
        );
        let mut parts = Parts::default();
        let root = parts.add_tree(TREE, &lock.expect("a lock file")).expect("a tree");
        assert_eq!(root, "pkg:cargo/program@0.1.0");
        let edges = |from: &str| parts.edges[from].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(edges(&root), ["pkg:cargo/left@1.2.3", "pkg:cargo/right@7.8.9"]);
        assert_eq!(edges("pkg:cargo/right@7.8.9"), ["pkg:cargo/shared@4.5.6"]);
        assert_eq!(edges("pkg:cargo/shared@4.5.6"), [""; 0]);
        assert_eq!(parts.components["pkg:cargo/left@1.2.3"].licenses[0].expression, "MIT OR Apache-2.0");
        assert!(parts.components["pkg:cargo/shared@4.5.6"].licenses.is_empty());
        let sums = |part: &str| {
            parts.components[part].hashes.iter().map(|one| one.content.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(sums("pkg:cargo/left@1.2.3"), ["0a1b"]);
        assert_eq!(sums("pkg:cargo/shared@4.5.6"), [""; 0]);
    }
}
