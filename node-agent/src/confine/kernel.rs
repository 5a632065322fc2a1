//! Having it obeyed.

use std::path::{Path, PathBuf};

use anyhow::bail;
use landlock::{
    ABI, Access as _, AccessFs, BitFlags, PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, make_bitflags,
};

use super::{Allowed, PathAccess, watch};

/// What is asked for: of the newest interface that this was tried with. An older kernel obeys what it knows.
const NEWEST: ABI = ABI::V6;

/// How the agent is shut in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Confined {
    /// By everything that was asked for.
    #[error("confined by Landlock to the directories of its settings")]
    Wholly,
    /// By what this kernel knows of it.
    #[error(
        "confined by Landlock to the directories of its settings, as far as this kernel can: a newer one does more"
    )]
    Partly,
    /// Not: the kernel has no Landlock, or it is off, or a seccomp profile keeps it away.
    #[error(
        "not confined by Landlock: this kernel does not have it (5.13 and newer), or it is switched off, or a seccomp profile forbids it"
    )]
    Unsupported,
}

/// Shuts in the calling thread, and those that it makes. Nothing is done where this fails.
///
/// # Errors
/// Something to be written to is not there, or the kernel does not take the rules.
pub fn confine(allowed: &[Allowed]) -> anyhow::Result<Confined> {
    let mut rules = Vec::new();
    let mut written = Vec::new();
    for Allowed { path, access } in allowed {
        for place in places(path, *access)? {
            rules.push(PathBeneath::new(PathFd::new(&place)?, rights(*access)));
        }
        if rights(*access).contains(AccessFs::MakeReg) {
            written.push(path.clone());
        }
    }
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rules(rules.into_iter().map(Ok::<_, RulesetError>))?;
    let RestrictionStatus { ruleset, .. } = ruleset.restrict_self()?;
    let confined = match ruleset {
        RulesetStatus::FullyEnforced => Confined::Wholly,
        RulesetStatus::PartiallyEnforced => Confined::Partly,
        RulesetStatus::NotEnforced => return Ok(Confined::Unsupported),
    };
    watch::remember(&written);
    Ok(confined)
}

fn rights(access: PathAccess) -> BitFlags<AccessFs> {
    let read = make_bitflags!(AccessFs::{ReadFile | ReadDir});
    let write = make_bitflags!(AccessFs::{
        WriteFile | Truncate | MakeReg | MakeDir | MakeSock | RemoveFile | RemoveDir
    });
    match access {
        PathAccess::Read => read,
        PathAccess::Run => read | AccessFs::Execute,
        PathAccess::Write => read | write,
        PathAccess::WriteAndRun => read | write | AccessFs::Execute,
        PathAccess::Device => make_bitflags!(AccessFs::{ReadFile | WriteFile}),
    }
}

/// Where the rules for a path apply: on directories, because files are replaced under their names, and rules follow the file that has the name now. A file
/// that is a link is read where it leads, too. What may be read and is not there yet is where it will be made.
fn places(path: &Path, access: PathAccess) -> anyhow::Result<Vec<PathBuf>> {
    match access {
        PathAccess::Write | PathAccess::WriteAndRun => match path.is_dir() {
            true => Ok(vec![path.to_owned()]),
            false => bail!("{} is not there yet", path.display()),
        },
        PathAccess::Device => Ok(path.exists().then(|| path.to_owned()).into_iter().collect()),
        PathAccess::Read | PathAccess::Run => {
            let real = path.canonicalize().ok();
            let found = [Some(path), real.as_deref()].into_iter().flatten().filter_map(directory_of);
            let mut found: Vec<PathBuf> = found.collect();
            found.dedup();
            Ok(found)
        }
    }
}

/// The directory itself, or the one that contains it; none for the root.
fn directory_of(path: &Path) -> Option<PathBuf> {
    let found = path.ancestors().find(|path| path.is_dir())?;
    (found != Path::new("/")).then(|| found.to_owned())
}
