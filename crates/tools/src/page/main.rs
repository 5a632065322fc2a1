//! Makes the web page: the documentation as HTML, and the page that answers questions with its program. Plain files: no server of ours, nothing from
//! another machine, nothing written into a page as script or style.

mod contents;
mod markdown;
mod site;

use std::env;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use wasm_bindgen_cli_support::Bindgen;

const USAGE: &str = "usage: page PROJECT PROGRAM FOLDER

Writes the web page of the PROJECT's folder into FOLDER, which is made again; PROGRAM is its program as the compiler left it (web.wasm).";

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [project, program, folder] = args.as_slice() else { bail!(USAGE) };
    let (project, folder) = (Path::new(project), Path::new(folder));
    if folder.exists() {
        // A folder's files that are not pages belong to someone else.
        if !folder.join("plan.html").exists() && folder.read_dir()?.next().is_some() {
            bail!("{} is not a page of an earlier run, and not empty", folder.display());
        }
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    copied(&project.join("crates/web/static"), folder)?;
    let mut bindgen = Bindgen::new();
    bindgen.input_path(program).web(true)?.typescript(false).omit_default_module_path(false);
    bindgen.remove_name_section(true).remove_producers_section(true);
    bindgen.generate(folder.join("program")).context("cannot make the JavaScript of the program")?;
    site::write(project, folder)
}

/// Copies the files of a folder.
fn copied(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        let name = path.file_name().context("a file without a name")?;
        fs::copy(&path, to.join(name)).with_context(|| format!("cannot copy {}", path.display()))?;
    }
    Ok(())
}
