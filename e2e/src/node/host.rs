//! The namespaces a node lives in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::traffic::helper;
use test_support::leftovers::{cgroup_roots, remove_cgroup};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Background, until};

/// The node's own addresses, of its only interface.
const ADDRESSES: [(&str, u8); 2] = [("10.87.0.2", 24), ("fd87::2", 64)];

/// Folders that are empty and private on a node.
const PRIVATE: [&str; 3] = ["/run", "/var/lib", "/var/log"];

/// Kernel settings the kubelet wants. They are the whole machine's, so the node gets to see the values wanted and the machine keeps its own.
const KERNEL_SETTINGS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// A network, mount and process-id namespace and a cgroup. Dropping it kills every process in it.
#[derive(Debug)]
pub(crate) struct Host {
    namespace: Namespace,
    /// `unshare`, which waits for the first process of the process-id namespace.
    keeper: Background,
    first_process: Pid,
    // Last: it can only be removed when it is empty.
    _cgroup: Cgroup,
}

impl Host {
    /// Makes the namespaces. `folder` holds files of the node, under the same path inside and outside.
    pub(crate) fn start(folder: &Path, families: Families) -> Result<Self> {
        let namespace = Namespace::empty(families)?;
        namespace.add_eth0(addresses(families).map(|(address, length)| format!("{address}/{length}")))?;
        let cgroup = Cgroup::new(namespace.name())?;
        let options = "--mount --pid --kill-child=KILL --propagation=private --mount-proc --";
        let mut command = process::command("unshare", options.split(' '));
        command.arg(helper()?).arg("node-init").arg(folder);
        let command = namespace.command(&command);
        let keeper = Background::start("the node's first process", &command, &folder.join("init.log"))?
            .killed_on_drop();
        let first_process = until("the node's namespaces", Duration::from_secs(120), &[&keeper], || {
            Ok(folder.join("ready").exists().then(|| only_child(keeper.id())).flatten())
        })?;
        Ok(Self { namespace, keeper, first_process, _cgroup: cgroup })
    }

    /// A name for the node: that of its network namespace and of its cgroups.
    pub(super) fn name(&self) -> &str {
        self.namespace.name()
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The node's files as this process can open them.
    pub(super) fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.first_process))
    }

    /// A command that runs on the node.
    pub(crate) fn command(&self, command: &Command) -> Command {
        let target = self.first_process.to_string();
        process::prefixed(&["nsenter", "--target", &target, "--mount", "--pid", "--net", "--"], command)
    }

    /// Lets these folders be written to: what is written goes to memory, below `folder`, and is seen on the node alone.
    pub(crate) fn make_writable(&self, folder: &Path, folders: &[&Path]) -> Result<()> {
        let memory = folder.join("memory").display().to_string();
        let script = r#"mkdir "$0" && mount -t tmpfs -o mode=0755 tmpfs "$0" && for folder in "$@"; do
                 mkdir -p "$0/upper$folder" "$0/work$folder" &&
                 mount -t overlay -o "lowerdir=$folder,upperdir=$0/upper$folder,workdir=$0/work$folder" overlay "$folder" || exit
             done"#;
        let mut mount = process::command("sh", ["-ec", script, &memory]);
        mount.args(folders);
        process::run(&mut self.command(&mount), Duration::from_secs(120))?.ok()?;
        Ok(())
    }

    /// Kills every process but the first, and waits until they are gone.
    pub(super) fn kill_all(&self) -> Result<()> {
        // The shell is spared by `kill -1`, which means all others that it sees.
        let mut kill = self.command(&process::command("sh", ["-c", "kill -s KILL -- -1; exit 0"]));
        process::run(&mut kill, Duration::from_secs(120))?.ok()?;
        let mut count = self.command(&process::command("sh", ["-c", "ls -d /proc/[0-9]* | wc -l"]));
        until("the node's processes to be gone", Duration::from_secs(120), &[&self.keeper], || {
            let count = process::run(&mut count, Duration::from_secs(120))?.ok()?;
            // The first process, the shell and its two.
            Ok((count.stdout.trim().parse::<u32>()? <= 4).then_some(()))
        })
    }
}

fn addresses(families: Families) -> impl Iterator<Item = (&'static str, u8)> {
    families.each().map(|v6| ADDRESSES[usize::from(v6)])
}

/// The address that the kubelet announces.
pub(super) fn announced_address(families: Families) -> &'static str {
    addresses(families).map(|(address, _)| address).next().expect("a family")
}

impl Drop for Host {
    fn drop(&mut self) {
        // The kernel kills the rest of the namespace before the first process is gone, and only then the keeper ends.
        let _ = kill(self.first_process, Signal::SIGKILL);
        let _ = self.keeper.wait(Duration::from_secs(120));
    }
}

/// A cgroup in every hierarchy, under the same name.
#[derive(Debug)]
struct Cgroup(String);

impl Cgroup {
    fn new(name: &str) -> Result<Self> {
        // From here on dropping the value cleans up.
        let cgroup = Self(name.to_owned());
        for root in cgroup_roots() {
            make_cgroup(&root, name)?;
        }
        Ok(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for root in cgroup_roots() {
            remove_cgroup(&root.join(&self.0));
        }
    }
}

/// What the helper program does as the first process of a node: it makes the node's files its own and reaps orphans.
#[doc(hidden)]
pub fn init_in_helper(folder: &Path) -> Result<()> {
    let mut children = SigSet::empty();
    children.add(Signal::SIGCHLD);
    children.thread_block()?;
    // Volumes are passed on between the node and its containers, and no further.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SHARED, None::<&str>)?;
    for path in PRIVATE {
        mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
            .with_context(|| format!("cannot mount {path}"))?;
    }
    for (index, (setting, value)) in KERNEL_SETTINGS.iter().enumerate() {
        let file = folder.join(format!("kernel-setting-{index}"));
        fs::write(&file, format!("{value}\n"))?;
        mount(
            Some(&file),
            &Path::new("/proc/sys").join(setting),
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .with_context(|| format!("cannot hide {setting}"))?;
    }
    fs::write(folder.join("ready"), "")?;
    loop {
        children.wait()?;
        reap_all()?;
    }
}

fn reap_all() -> Result<()> {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(nix::sys::wait::WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(()),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn only_child(process: u32) -> Option<Pid> {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok().map(Pid::from_raw)
}

/// A cgroup of the old kind for processors starts with none and takes no process until it has some.
fn make_cgroup(root: &Path, name: &str) -> Result<()> {
    let cgroup = root.join(name);
    fs::create_dir(&cgroup).with_context(|| format!("cannot make {}", cgroup.display()))?;
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if let Ok(value) = fs::read_to_string(root.join(file)) {
            fs::write(cgroup.join(file), value)?;
        }
    }
    Ok(())
}
