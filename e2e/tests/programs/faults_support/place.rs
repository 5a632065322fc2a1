//! Where an operation happens: a folder on a file system of its own, a network namespace, an API server; and what there is of them afterwards.

use std::any::Any;
use std::cell::Cell;
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use e2e::faults::Facts;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::sys::statvfs::statvfs;
use nix::unistd::mkfifo;
use tempfile::TempDir;
use test_support::netns::Namespace;

use super::api::Api;

/// What takes the rest of a disk.
const FILLER: &str = "filler";
/// Where what was replaced waits.
const ASIDE: &str = "aside";

/// What an agent has done about drift so far.
#[derive(Clone, Copy, Debug)]
pub struct Healing {
    pub attempts: f64,
    pub found_as_planned: f64,
}

/// A stage for one injection. All of it is gone when the value is dropped.
pub struct Place {
    folder: TempDir,
    pub namespace: Option<Namespace>,
    pub api: Option<Api>,
    /// What has to live as long as the place.
    pub keeps: Vec<Box<dyn Any + Send>>,
    /// Network configurations of other programs: name and content.
    pub foreign: Option<(&'static str, &'static str)>,
    /// Files whose content is another one in every run; that it is whole JSON is all that counts.
    pub unlike: &'static [&'static str],
    /// Files whose absence is what is wanted.
    pub removed: &'static [&'static str],
    /// Where a runtime has its network namespaces.
    pub runtime: Option<String>,
    /// The node's processes, as the agent sees them.
    pub proc: Option<String>,
    /// The agent's ports: health, metrics, control.
    pub ports: [u16; 3],
    /// Where a rule was taken away, to be healed: what the agent had done until then, or until its last attempt.
    pub rule_lost: Cell<Option<Healing>>,
}

/// What a file is replaced by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instead {
    Nothing,
    Directory,
    Pipe,
    DanglingLink,
    Endless,
    Empty,
    Garbage,
}

pub const INSTEAD: [Instead; 7] = [
    Instead::Nothing,
    Instead::Directory,
    Instead::Pipe,
    Instead::DanglingLink,
    Instead::Endless,
    Instead::Empty,
    Instead::Garbage,
];

/// What is a folder.
pub const FOLDERS: [&str; 4] = ["bin", "net.d", "run", "run/manifests"];

/// What happens to the folder before the program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// This much is left, in pages.
    Full { pages: u64 },
    /// All of it, or a folder in it, cannot be written to.
    ReadOnly { part: &'static str },
    /// A file or folder is something else.
    Replaced { part: &'static str, instead: Instead },
}

impl Place {
    pub fn new() -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix(&format!("e2e-{}-faults-", std::process::id())).tempdir()?;
        let place = Self {
            folder,
            namespace: None,
            api: None,
            keeps: Vec::new(),
            foreign: None,
            unlike: &[],
            removed: &[],
            runtime: None,
            proc: None,
            ports: [0; 3],
            rule_lost: Cell::new(None),
        };
        let options = "size=8m,mode=755";
        mount(Some("none"), place.path(), Some("tmpfs"), MsFlags::empty(), Some(options))
            .context("a tmpfs")?;
        fs::create_dir(place.file(ASIDE))?;
        Ok(place)
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn file(&self, part: &str) -> PathBuf {
        self.path().join(part)
    }

    /// The path of a part, as text.
    pub fn text(&self, part: &str) -> String {
        self.file(part).display().to_string()
    }

    pub fn network(&self) -> Result<&Namespace> {
        self.namespace.as_ref().context("a namespace")
    }

    /// Lets something happen to the folder.
    pub fn suffer(&self, happening: Happening) -> Result<()> {
        match happening {
            Happening::Full { pages } => {
                let free = statvfs(self.path())?;
                let length = (free.blocks_available().saturating_sub(pages)) * free.fragment_size();
                fs::write(self.file(FILLER), vec![0; usize::try_from(length)?])?;
            }
            Happening::ReadOnly { part: "" } => self.remount(MsFlags::MS_RDONLY)?,
            Happening::ReadOnly { part } => {
                let path = self.file(part);
                mount(Some(&path), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
                let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(None::<&str>, &path, None::<&str>, flags, None::<&str>)?;
            }
            Happening::Replaced { part, instead } => {
                let path = self.file(part);
                fs::rename(&path, self.file(ASIDE).join("was")).with_context(|| format!("no {part}"))?;
                put(&path, instead)?;
            }
        }
        Ok(())
    }

    /// Takes back what happened, as far as the program has not put something in its place.
    pub fn recover(&self, happening: Happening) -> Result<()> {
        match happening {
            Happening::Full { .. } => fs::remove_file(self.file(FILLER))?,
            Happening::ReadOnly { part: "" } => self.remount(MsFlags::empty())?,
            Happening::ReadOnly { part } => umount2(&self.file(part), MntFlags::MNT_DETACH)?,
            Happening::Replaced { part, instead } => {
                let (path, was) = (self.file(part), self.file(ASIDE).join("was"));
                let is_done = instead == Instead::Nothing && self.removed.contains(&part);
                if is_still(&path, instead) && !is_done {
                    match instead {
                        Instead::Nothing => {}
                        Instead::Directory => fs::remove_dir(&path)?,
                        Instead::Pipe
                        | Instead::DanglingLink
                        | Instead::Endless
                        | Instead::Empty
                        | Instead::Garbage => fs::remove_file(&path)?,
                    }
                    fs::rename(was, path)?;
                } else if was.is_dir() {
                    fs::remove_dir_all(was)?;
                } else {
                    fs::remove_file(was)?;
                }
            }
        }
        Ok(())
    }

    fn remount(&self, flags: MsFlags) -> Result<()> {
        Ok(mount(None::<&str>, self.path(), None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>)?)
    }

    /// What there is now.
    pub fn facts(&self) -> Result<Facts> {
        let mut facts = Facts::default();
        if let Some(namespace) = &self.namespace {
            facts.together = namespace.snapshot()?.lines().into_iter().collect();
        }
        self.walk(self.path(), &mut facts)?;
        if let Some(api) = &self.api {
            facts.each.extend(api.facts());
        }
        if let Some((name, content)) = self.foreign {
            facts.broken.extend(broken_list(&self.file("net.d").join(name), content));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let own = mounts.lines().filter(|line| line.contains(&self.text("")));
        facts.broken.extend(own.map(|line| format!("a mount is left: {line}")));
        Ok(facts)
    }

    fn walk(&self, folder: &Path, facts: &mut Facts) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            let name = path.strip_prefix(self.path())?.display().to_string();
            // What the plugin logs where no agent listens is added to by each run.
            if name == FILLER || name == ASIDE || name == "run/istio-cni.log" {
                continue;
            }
            let kind = entry.file_type()?;
            let what = if kind.is_dir() {
                self.walk(&path, facts)?;
                "a directory".to_owned()
            } else if kind.is_file() {
                self.content(&name, &String::from_utf8_lossy(&fs::read(&path)?))
            } else if kind.is_symlink() {
                format!("a link to {}", fs::read_link(&path)?.display())
            } else if kind.is_socket() {
                // Whoever dies leaves it behind, and nobody hears there.
                continue;
            } else {
                format!("{kind:?}")
            };
            facts.each.insert(name, what);
        }
        Ok(())
    }

    fn content(&self, name: &str, text: &str) -> String {
        let is_whole = || text.is_empty() || serde_json::from_str::<serde_json::Value>(text).is_ok();
        if self.unlike.contains(&name) && is_whole() { "whole".to_owned() } else { self.normal(text) }
    }

    /// A text without what is another one in every place.
    fn normal(&self, text: &str) -> String {
        let text = text.replace(&self.path().display().to_string(), "FOLDER");
        match &self.api {
            Some(api) => text.replace(&api.port().to_string(), "PORT"),
            None => text,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        while umount2(self.path(), MntFlags::MNT_DETACH).is_ok() {}
    }
}

fn put(path: &Path, instead: Instead) -> Result<()> {
    match instead {
        Instead::Nothing => {}
        Instead::Directory => fs::create_dir(path)?,
        Instead::Pipe => mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?,
        Instead::DanglingLink => symlink("/nonexistent/faults", path)?,
        Instead::Endless => symlink("/dev/zero", path)?,
        Instead::Empty => fs::write(path, "")?,
        Instead::Garbage => fs::write(path, [0xff, 0, b'{', 0xfe])?,
    }
    Ok(())
}

fn is_still(path: &Path, instead: Instead) -> bool {
    let Ok(known) = fs::symlink_metadata(path) else { return instead == Instead::Nothing };
    match instead {
        Instead::Nothing => false,
        Instead::Directory => {
            known.is_dir() && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
        }
        Instead::Pipe => known.file_type().is_fifo(),
        Instead::DanglingLink => fs::read_link(path).is_ok_and(|to| to == Path::new("/nonexistent/faults")),
        Instead::Endless => fs::read_link(path).is_ok_and(|to| to == Path::new("/dev/zero")),
        Instead::Empty => known.is_file() && known.len() == 0,
        Instead::Garbage => {
            known.is_file() && fs::read(path).is_ok_and(|bytes| bytes == [0xff, 0, b'{', 0xfe])
        }
    }
}

/// What is wrong with a list of plugins that a runtime reads: it must be JSON at any moment, and what is others' in it must be as it was.
fn broken_list(path: &Path, original: &str) -> Option<String> {
    checked_list(path, original).err().map(|error| format!("{}: {error:#}", path.display()))
}

fn checked_list(path: &Path, original: &str) -> Result<()> {
    let text = fs::read_to_string(path).context("the runtime cannot read it")?;
    let list: serde_json::Value = serde_json::from_str(&text).context("the runtime cannot load it")?;
    let mut without = list.clone();
    let plugins = without["plugins"].as_array_mut().context("no plugins")?;
    let ours = plugins.iter().filter(|plugin| plugin["type"] == "istio-cni").count();
    ensure!(ours <= 1, "{ours} entries");
    plugins.retain(|plugin| plugin["type"] != "istio-cni");
    ensure!(
        without == serde_json::from_str::<serde_json::Value>(original)?,
        "what is others' has changed: {text}"
    );
    if ours == 0 && text != original {
        bail!("other bytes than before, without our entry: {text}");
    }
    Ok(())
}
