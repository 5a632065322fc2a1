//! Programs that can be in an image: static ones for the image's architecture.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use elf::ElfBytes;
use elf::abi::{EM_AARCH64, EM_X86_64, PT_DYNAMIC, PT_INTERP};
use elf::endian::AnyEndian;

/// An architecture that images are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    Amd64,
    Arm64,
}

impl Architecture {
    pub(crate) const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// The one with this name in images.
    pub(crate) fn named(name: &str) -> Result<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|one| one.to_string() == name)
            .with_context(|| format!("{name} is not an architecture of ours: amd64, arm64"))
    }

    /// The target of Rust's compiler that programs are shipped for.
    pub(crate) fn triple(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-musl",
            Self::Arm64 => "aarch64-unknown-linux-musl",
        }
    }

    fn machine(self) -> u16 {
        match self {
            Self::Amd64 => EM_X86_64,
            Self::Arm64 => EM_AARCH64,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        })
    }
}

/// Reads a program. An image has no loader and no library, so one that needs any is refused, as is one for another machine.
pub(crate) fn read(file: &Path, architecture: Architecture) -> Result<Vec<u8>> {
    let content = read_linked(file, architecture)?;
    check_static(&content).with_context(|| file.display().to_string())?;
    Ok(content)
}

/// Reads a program or a library for this machine.
pub(crate) fn read_linked(file: &Path, architecture: Architecture) -> Result<Vec<u8>> {
    let content = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let machine = ElfBytes::<AnyEndian>::minimal_parse(&content).map(|elf| elf.ehdr.e_machine);
    let machine = machine.with_context(|| format!("{}: not a program", file.display()))?;
    ensure!(machine == architecture.machine(), "{}: not for {architecture}", file.display());
    Ok(content)
}

fn check_static(content: &[u8]) -> Result<()> {
    let elf = ElfBytes::<AnyEndian>::minimal_parse(content).context("not a program")?;
    let segments = elf.segments().context("not a program")?;
    if segments.iter().any(|segment| segment.p_type == PT_INTERP) {
        bail!("not static: it needs a loader");
    }
    // A static program that can be at any address has such a segment, too; it names no library.
    if segments.iter().any(|segment| segment.p_type == PT_DYNAMIC) {
        let names_library = elf
            .dynamic()?
            .is_some_and(|entries| entries.iter().any(|entry| entry.d_tag == elf::abi::DT_NEEDED));
        ensure!(!names_library, "not static: it needs libraries");
    }
    Ok(())
}
