//! Writes the project's container images: OCI image layouts in an archive, from static programs and nothing else. Needs no daemon, no registry and
//! no base image, and the same programs give the same bytes.

mod contents;
mod layer;
mod layout;
mod program;
mod sbom;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use contents::Image;
use layout::{Archive, Facts};
use program::Architecture;

const USAGE: &str = "usage: image pack [--plain | --linked LIBRARIES] IMAGE ARCHIVE REFERENCE ARCHITECTURE=FOLDER...
       image sbom IMAGE ARCHITECTURE=FOLDER FILE
       image list
       image programs IMAGE...

pack  writes an archive with an image for each ARCHITECTURE (amd64, arm64), of the static programs in its FOLDER. --plain leaves the layers uncompressed.
      --linked does so as well, takes programs that are not static, and adds the files of the folder LIBRARIES, where a loader and libraries are as in /: for tests.
sbom  writes what the image for one architecture is made of, as CycloneDX.
list  prints the names of all images.
programs  prints the programs that are in these images.

SOURCE_DATE_EPOCH and SOURCE_REVISION, where they are set, say from when and from which revision the programs are.";

/// The program `image`.
pub fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["pack", "--plain", image, archive, reference, ref platforms @ ..] => {
            pack(image, Path::new(archive), reference, platforms, Form::Plain)
        }
        ["pack", "--linked", libraries, image, archive, reference, ref platforms @ ..] => {
            pack(image, Path::new(archive), reference, platforms, Form::Linked(Path::new(libraries)))
        }
        ["pack", image, archive, reference, ref platforms @ ..] => {
            pack(image, Path::new(archive), reference, platforms, Form::Compressed)
        }
        ["sbom", image, platform, file] => write_sbom(image, platform, Path::new(file)),
        ["programs", ref images @ ..] if !images.is_empty() => say_programs(images),
        ["list"] => {
            say(&Image::ALL.map(|image| image.name).join("\n"));
            Ok(())
        }
        _ => bail!("{USAGE}"),
    }
}

/// How an image is packed.
#[derive(Clone, Copy)]
enum Form<'a> {
    Compressed,
    Plain,
    /// Uncompressed, with the loader and the libraries of this folder.
    Linked(&'a Path),
}

fn pack(image: &str, file: &Path, reference: &str, platforms: &[&str], form: Form<'_>) -> Result<()> {
    let image = Image::named(image)?;
    ensure!(!platforms.is_empty(), "no ARCHITECTURE=FOLDER\n{USAGE}");
    let facts = Facts::from_variables(|name| env::var(name).ok())?;
    let mut archive = Archive::new(reference, facts)?;
    for platform in platforms {
        let (architecture, folder) = parse_platform(platform)?;
        let libraries = if let Form::Linked(libraries) = form { Some(libraries) } else { None };
        let layer = layer::write(image, architecture, &folder, libraries)?;
        archive.add(image, architecture, &layer, matches!(form, Form::Compressed))?;
    }
    let bytes = archive.finish(image)?;
    replace(file, &bytes)?;
    say(&format!("{}: {reference}, {} bytes", file.display(), bytes.len()));
    Ok(())
}

/// Each once, in the order of the images.
fn say_programs(images: &[&str]) -> Result<()> {
    let mut packages: Vec<&str> = Vec::new();
    for name in images {
        let programs = Image::named(name)?.programs.iter().map(|(package, _)| *package);
        let more: Vec<&str> = programs.filter(|package| !packages.contains(package)).collect();
        packages.extend(more);
    }
    say(&packages.join("\n"));
    Ok(())
}

fn write_sbom(image: &str, platform: &str, file: &Path) -> Result<()> {
    let image = Image::named(image)?;
    let (architecture, folder) = parse_platform(platform)?;
    let text = sbom::describe(image, architecture, &folder)?;
    replace(file, text.as_bytes())
}

fn parse_platform(text: &str) -> Result<(Architecture, PathBuf)> {
    let (architecture, folder) =
        text.split_once('=').with_context(|| format!("{text} is not ARCHITECTURE=FOLDER"))?;
    Ok((Architecture::named(architecture)?, folder.into()))
}

/// Atomically: a reader finds the file complete or not at all, even if this process is killed.
fn replace(file: &Path, bytes: &[u8]) -> Result<()> {
    let folder = match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let temporary = tempfile::NamedTempFile::new_in(folder)
        .with_context(|| format!("cannot write into {}", folder.display()))?;
    fs::write(temporary.path(), bytes)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(temporary.path(), mode)?;
    temporary.persist(file).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(())
}

#[allow(clippy::print_stdout, reason = "what was written is what the caller asks for")]
fn say(text: &str) {
    println!("{text}");
}
