//! Fails where the modules of a crate depend on each other in a circle.
//!
//! A file is a module. A path that begins with `crate`, `self` or `super`, in a `use` or anywhere else, is a dependency on the file that
//! has what it names, re-exports followed. A module may use its parents and its children, so a dependency counts between
//! the two sibling subtrees that it connects: from `heal::monitor` to `drift::round` it goes from `heal` to `drift`. Tests do not count.
//!
//! The file named by `--allow` lists circles that stay, one a line: the crate, then the modules in alphabetical order. A line that fits no
//! circle is an error too.

mod graph;
mod source;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use serde_json::Value;

/// A tool in `main`'s position: its output is for people.
#[allow(clippy::print_stdout, clippy::print_stderr)]
/// The program `modules`.
pub fn main() -> ExitCode {
    match run(&mut std::env::args_os().skip(1).map(PathBuf::from)) {
        Ok(Report { problems, crates }) if problems.is_empty() => {
            println!("no module circles in {crates} crates");
            ExitCode::SUCCESS
        }
        Ok(report) => {
            report.problems.iter().for_each(|problem| eprintln!("{problem}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What was found in a workspace.
struct Report {
    problems: Vec<String>,
    crates: usize,
}

/// Arguments: `--allow FILE`, both optional.
fn run(arguments: &mut dyn Iterator<Item = PathBuf>) -> anyhow::Result<Report> {
    let allowed = match (arguments.next(), arguments.next()) {
        (None, None) => BTreeSet::new(),
        (Some(flag), Some(file)) if flag.as_os_str() == "--allow" => allowed(&file)?,
        _ => bail!("usage: modules [--allow FILE]"),
    };
    let roots = roots()?;
    let mut found = BTreeSet::new();
    let mut problems = Vec::new();
    for (name, root) in &roots {
        let modules = source::read(root).with_context(|| format!("{name}: {}", root.display()))?;
        for circle in graph::circles(&modules) {
            let line = format!("{name} {}", circle.modules.join(" "));
            if !allowed.contains(&line) {
                problems.push(format!("circle: {line}\n{}", circle.reasons.join("\n")));
            }
            found.insert(line);
        }
    }
    problems.extend(allowed.difference(&found).map(|line| format!("allowed, but not a circle: {line}")));
    Ok(Report { problems, crates: roots.len() })
}

/// The lines of a list of circles; what follows a `#` is a comment.
fn allowed(file: &Path) -> anyhow::Result<BTreeSet<String>> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let lines = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    Ok(lines.filter(|line| !line.is_empty()).collect())
}

/// The libraries and programs of the workspace: each by its name and the file it begins with.
fn roots() -> anyhow::Result<Vec<(String, PathBuf)>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).output().context("cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let shipped = targets.filter(|target| {
        let kinds = target["kind"].as_array().into_iter().flatten();
        kinds
            .into_iter()
            .any(|kind| ["lib", "bin", "cdylib", "rlib"].iter().any(|shipped| *kind == **shipped))
    });
    shipped
        .map(|target| {
            let [name, path] = ["name", "src_path"].map(|key| target[key].as_str());
            let (name, path) = (name.context("a target's name")?, path.context("a target's path")?);
            Ok((name.to_owned(), PathBuf::from(path)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The circles of a crate with these files.
    fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("makes folders");
            fs::write(path, text).expect("writes");
        }
        let modules = source::read(&folder.path().join("lib.rs")).expect("modules");
        graph::circles(&modules).into_iter().map(|circle| circle.modules).collect()
    }

    #[test]
    fn two_siblings_that_use_each_other_are_a_circle() {
        let lib = ("lib.rs", "mod a; mod b;");
        let seeded =
            [lib, ("a.rs", "use crate::b::B; pub struct A;"), ("b.rs", "pub struct B(crate::a::A);")];
        assert_eq!(circles(&seeded), [["a", "b"]]);
        let cut = [lib, ("a.rs", "use crate::b::B;"), ("b.rs", "pub struct B;")];
        assert_eq!(circles(&cut), <[Vec<String>; 0]>::default());
    }

    #[test]
    fn a_circle_between_subtrees_is_found_at_their_common_parent() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a/mod.rs", "mod deep;"),
            ("a/deep.rs", "use crate::b::{self, B};"),
            ("b.rs", "pub mod inner; pub struct B;"),
            ("b/inner.rs", "fn f() { crate::c::g() }"),
            ("c.rs", "pub fn g() { log::info!(\"{}\", crate::a::X) }"),
        ];
        assert_eq!(circles(&files), [["a", "b", "c"]]);
        let nested = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod x; mod y;"),
            ("a/x.rs", "use super::y;"),
            ("a/y.rs", "use super::{x::X};"),
        ];
        assert_eq!(circles(&nested), [["a::x", "a::y"]]);
    }

    #[test]
    fn a_re_export_does_not_hide_a_circle() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod x; mod y; pub use x::X; pub use y::{Z as Y};"),
            ("a/x.rs", "use super::Y; pub struct X;"),
            ("a/y.rs", "use crate::a::X; pub struct Z;"),
        ];
        assert_eq!(circles(&files), [["a::x", "a::y"]]);
    }

    #[test]
    fn parents_children_tests_and_files_of_other_crates_are_no_circle() {
        let files = [
            ("lib.rs", "mod a; mod b; #[path = \"../other/c.rs\"] pub mod c;"),
            ("a.rs", "mod x; use x::X; use crate::b::B; pub struct A;"),
            ("a/x.rs", "use super::A; pub struct X;"),
            (
                "b.rs",
                "pub struct B; #[cfg(test)] mod tests { use crate::a::A; } #[cfg(test)] use crate::a::X;",
            ),
        ];
        assert_eq!(circles(&files), <[Vec<String>; 0]>::default());
    }
}
