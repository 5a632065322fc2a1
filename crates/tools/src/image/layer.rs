//! The one layer of an image: nothing of this machine's clock, users or order of files is in it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tar::{Builder, EntryType, Header};

use super::contents::{FILES, Image};
use super::program::{self, Architecture};

enum Entry {
    Folder,
    File(Vec<u8>, u32),
    Link(&'static str),
}

/// The layer as a tar archive. Without a folder of libraries, programs are static.
pub(crate) fn write(
    image: &Image,
    architecture: Architecture,
    programs: &Path,
    libraries: Option<&Path>,
) -> Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    for (path, entry) in entries(image, architecture, programs, libraries)? {
        match entry {
            Entry::Folder => {
                archive.append_data(&mut header(EntryType::Directory, 0, 0o755), path, io::empty())?;
            }
            Entry::File(content, mode) => {
                let mut header = header(EntryType::Regular, content.len() as u64, mode);
                archive.append_data(&mut header, path, &content[..])?;
            }
            Entry::Link(target) => {
                archive.append_link(&mut header(EntryType::Symlink, 0, 0o777), path, target)?;
            }
        }
    }
    Ok(archive.into_inner()?)
}

/// By path, so that every folder is before what is in it.
fn entries(
    image: &Image,
    architecture: Architecture,
    programs: &Path,
    libraries: Option<&Path>,
) -> Result<BTreeMap<String, Entry>> {
    let mut entries = BTreeMap::new();
    for file in libraries.map(files_below).transpose()?.into_iter().flatten() {
        let content = program::read_linked(&file, architecture)?;
        let path = libraries.and_then(|folder| file.strip_prefix(folder).ok()).unwrap_or(&file);
        entries.insert(path.display().to_string(), Entry::File(content, 0o755));
    }
    let read = if libraries.is_some() { program::read_linked } else { program::read };
    for (package, path) in image.programs {
        let content = read(&programs.join(package), architecture)?;
        entries.insert((*path).to_owned(), Entry::File(content, 0o755));
    }
    for (path, content) in FILES {
        entries.insert(path.to_owned(), Entry::File(content.into(), 0o644));
    }
    for (path, target) in image.links {
        entries.insert((*path).to_owned(), Entry::Link(target));
    }
    let folders = image.folders.iter().map(|folder| Path::new(*folder).to_owned());
    let parents = entries.keys().filter_map(|path| Some(Path::new(path).parent()?.to_owned()));
    for folder in folders.chain(parents).collect::<Vec<_>>() {
        for folder in folder.ancestors().filter(|folder| *folder != Path::new("")) {
            // The archive's readers recognize folders by a slash at the end.
            entries.entry(format!("{}/", folder.display())).or_insert(Entry::Folder);
        }
    }
    Ok(entries)
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() { files.extend(files_below(&path)?) } else { files.push(path) }
    }
    Ok(files)
}

pub(crate) fn header(kind: EntryType, size: u64, mode: u32) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}
