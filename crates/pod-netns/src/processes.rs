//! Which processes of the node belong to which pod, and in which network namespaces they are.
//!
//! A container with CAP_NET_ADMIN can give its network namespace any address; into another pod's cgroup no container can get. So the cgroup shows
//! the owner of a namespace, and of a process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use netns_apply::netns::{Netns, NetnsError, NetnsId};

/// The most that is read of one file of a process.
const MOST_BYTES: u64 = 64 << 10;
/// The shortest part of a cgroup's name that is taken for a UID.
const LEAST_UID: usize = 8;

/// The processes in one network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamespaceProcesses {
    /// The UIDs of the pods that they belong to.
    pub pods: BTreeSet<String>,
    /// One of them.
    pub process: u32,
}

/// Which processes are in which network namespace, except the host's.
#[derive(Debug, Default)]
pub struct ProcessIndex {
    /// By namespace.
    pub namespaces: BTreeMap<NetnsId, NamespaceProcesses>,
    /// Processes of pods that cannot be read, by the pod's UID, with the kernel's error.
    pub hidden: BTreeMap<String, String>,
    /// The host's network namespace.
    pub hosts: Option<NetnsId>,
}

impl ProcessIndex {
    /// Reads a mounted procfs, which must be the host's.
    ///
    /// # Errors
    /// It cannot be read, or lacks the host's network namespace.
    pub fn of(proc: &Path) -> io::Result<Self> {
        let unreadable = |path: &Path, error: &dyn std::fmt::Display| {
            io::Error::other(format!("{}: {error}", path.display()))
        };
        let first = namespace_of(proc, 1);
        let hosts = Netns::open(&first).map_err(|error| unreadable(&first, &error))?.id();
        let mut index = Self { hosts: Some(hosts), ..Self::default() };
        for entry in fs::read_dir(proc).map_err(|error| unreadable(proc, &error))? {
            let name = entry?.file_name();
            let Some(process) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            index.count(proc, process);
        }
        Ok(index)
    }

    /// A process that ends concurrently does not count.
    fn count(&mut self, proc: &Path, process: u32) {
        let pod = read_short(&proc.join(process.to_string()).join("cgroup")).ok();
        let pod = pod.and_then(|text| pod_uid(&text));
        let namespace = match Netns::open(namespace_of(proc, process)) {
            Ok(namespace) => namespace.id(),
            Err(NetnsError::Open { cause, .. }) if is_gone(&cause) => return,
            Err(error) => {
                if let Some(pod) = pod {
                    self.hidden.insert(pod, error.to_string());
                }
                return;
            }
        };
        if Some(namespace) == self.hosts {
            return;
        }
        let here = self.namespaces.entry(namespace).or_default();
        // Of a pod's own, rather: it is what the namespace is opened by.
        if pod.is_some() || here.process == 0 {
            here.process = process;
        }
        here.pods.extend(pod);
    }
}

/// A process of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodProcess {
    /// Its number.
    pub id: u32,
    /// Its name, which it chooses itself.
    pub name: String,
    /// The name of its container's cgroup, which contains the container's ID.
    pub container: String,
    /// The user that its sockets belong to, by the number that the pod knows; none if the pod knows none.
    pub user: Option<u32>,
    /// The group, likewise.
    pub group: Option<u32>,
}

/// The processes of pods, by the pods' UIDs, as a mounted procfs shows them. Those that end concurrently, or cannot be read, are left out.
///
/// # Errors
/// The procfs cannot be read.
pub fn processes_of_pods(proc: &Path) -> io::Result<BTreeMap<String, Vec<PodProcess>>> {
    let mut all: BTreeMap<String, Vec<PodProcess>> = BTreeMap::new();
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = |name: &str| read_short(&entry.path().join(name)).ok();
        let Some((uid, container)) = read("cgroup").and_then(|text| pod_and_container(&text)) else {
            continue;
        };
        let Some(status) = read("status") else { continue };
        let inside = |field: &str, map: &str| number_inside(of_sockets(&status, field)?, &read(map)?);
        let (user, group) = (inside("Uid:", "uid_map"), inside("Gid:", "gid_map"));
        let name = status.lines().find_map(|line| line.strip_prefix("Name:")).unwrap_or_default().trim();
        all.entry(uid).or_default().push(PodProcess { id, name: name.to_owned(), container, user, group });
    }
    all.values_mut().for_each(|processes| processes.sort_by_key(|process| process.id));
    Ok(all)
}

/// The fourth of a field's numbers: that of the file system, which sockets get.
fn of_sockets(status: &str, field: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix(field))?.split_whitespace().nth(3)?.parse().ok()
}

/// A number of the reader's user namespace in the process's own (user_namespaces(7)).
fn number_inside(outside: u32, map: &str) -> Option<u32> {
    map.lines().find_map(|line| {
        let numbers: Vec<u32> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let [inside, begin, count] = numbers[..] else { return None };
        let offset = outside.checked_sub(begin).filter(|offset| *offset < count)?;
        inside.checked_add(offset)
    })
}

/// The network namespace of a process, as a mounted procfs shows it.
#[must_use]
pub fn namespace_of(proc: &Path, process: u32) -> PathBuf {
    proc.join(process.to_string()).join("ns/net")
}

/// Not there, or no such process: both mean that it has ended.
fn is_gone(error: &io::Error) -> bool {
    const ESRCH: i32 = 3;
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH)
}

fn read_short(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MOST_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// The UID of the pod whose cgroup a process is in, from `/proc/PID/cgroup`: the part of a path that is named `podUID`, or
/// `kubepods-CLASS-podUID.slice`, where systemd's names have underscores for the UID's dashes.
///
/// Paths begin at the reader's own cgroup, so they may begin with `..`; what a container makes below its own cgroup
/// comes behind its pod's name.
#[must_use]
pub fn pod_uid(cgroups: &str) -> Option<String> {
    pod_and_container(cgroups).map(|(uid, _)| uid)
}

/// The same, and the part of the path below it, which is the container's.
fn pod_and_container(cgroups: &str) -> Option<(String, String)> {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.into_iter().find_map(|path| {
        let mut parts = path.split('/');
        let uid = parts.find_map(uid_in)?;
        Some((uid, parts.next().unwrap_or_default().to_owned()))
    })
}

fn uid_in(part: &str) -> Option<String> {
    let uid = match part.strip_suffix(".slice") {
        Some(slice) if slice.contains("kubepods-") => slice.rsplit_once("-pod")?.1,
        Some(_) => return None,
        None => part.strip_prefix("pod")?,
    };
    let uid = uid.replace('_', "-");
    let is_uid = uid.len() >= LEAST_UID && uid.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    is_uid.then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";

    #[test]
    fn cgroups_of_all_runtimes_name_the_pod() {
        let slice = UID.replace('-', "_");
        let texts = [
            // containerd, cgroup v2, systemd driver
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-ab12.scope\n"
            ),
            // the same, seen from a container with a cgroup namespace of its own
            format!("0::/../../kubepods-besteffort-pod{slice}.slice/cri-containerd-ab12.scope\n"),
            // a guaranteed pod has no class in its name
            format!("0::/kubepods.slice/kubepods-pod{slice}.slice/crio-ab12.scope\n"),
            // a cluster in a container, which puts all pods below one slice
            format!(
                "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{slice}.slice/cri-containerd-ab12.scope\n"
            ),
            // CRI-O, and what the container makes below
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/crio-ab12.scope/container/pod00000000\n"
            ),
            // cgroupfs driver
            format!("0::/kubepods/burstable/pod{UID}/ab12\n"),
            format!("0::/kubepods/pod{UID}/ab12\n"),
            // cgroup v1
            format!(
                "12:pids:/kubepods/besteffort/pod{UID}/ab12\n11:memory:/kubepods/besteffort/pod{UID}/ab12\n1:name=systemd:/system.slice\n"
            ),
            format!("9:name=systemd:/\n0::/kubepods/besteffort/pod{UID}/ab12\n"),
        ];
        for text in texts {
            assert_eq!(pod_uid(&text).as_deref(), Some(UID), "{text}");
        }
    }

    #[test]
    fn users_are_those_that_the_pod_knows() {
        let whole = "         0          0 4294967295\n";
        let apart = "         0     100000      65536\n     70000       5000         10\n";
        assert_eq!((number_inside(1337, whole), number_inside(101_337, apart)), (Some(1337), Some(1337)));
        assert_eq!((number_inside(5009, apart), number_inside(5010, apart)), (Some(70009), None));
        assert_eq!((number_inside(1337, apart), number_inside(1, "x y z\n4294967295 0 2")), (None, None));
        let status = "Name:\tcurl\nUid:\t1\t2\t3\t1337\nGid:\t5\t6\t7\n";
        assert_eq!((of_sockets(status, "Uid:"), of_sockets(status, "Gid:")), (Some(1337), None));
    }

    #[test]
    fn what_belongs_to_no_pod_has_no_uid() {
        for text in [
            "",
            "0::/\n",
            "0::/system.slice/containerd.service\n",
            "0::/system.slice/podman.service\n",
            "0::/machine.slice/libpod-0f1e2d3c.scope\n",
            "0::/user.slice/pod-0f1e2d3c_x.slice/y\n",
            "0::/kubepods.slice/kubepods-burstable.slice\n",
            "garbage pod0f1e2d3c\n",
        ] {
            assert_eq!(pod_uid(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn nobody_below_a_pod_can_claim_another(below in "(/[a-z0-9_.-]{1,12}){0,3}", text in "\\PC{0,60}") {
            let path = format!("0::/kubepods/burstable/pod{UID}{below}/pod11111111-2222\n");
            prop_assert!(pod_uid(&path).as_deref() == Some(UID), "{path}");
            let _ = pod_uid(&text);
        }
    }
}
