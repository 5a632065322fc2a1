//! What `strace -f -o` writes.

use std::collections::{BTreeSet, HashMap};

/// The system calls that programs of these names made. What they started under other names is not theirs.
///
/// The first process counts as one of them from the beginning, so that a trace that was begun after its start is read as well.
pub(crate) fn calls_of(programs: &[&str], trace: &str) -> BTreeSet<String> {
    let mut is_ours: HashMap<&str, bool> = HashMap::new();
    let mut calls = BTreeSet::new();
    // Who is about to have a child: that may speak before the call that made it returns.
    let mut parents: Vec<&str> = Vec::new();
    for line in trace.lines() {
        let Some((process, text)) = line.split_once(' ') else { continue };
        let text = text.trim_start();
        let of_parent = parents.last().and_then(|parent| is_ours.get(parent)).copied();
        let ours = *is_ours.entry(process).or_insert(of_parent.unwrap_or(true));
        // `clone(...` begins a call, `<... clone resumed>` ends it.
        let name = text
            .strip_prefix("<... ")
            .map_or_else(|| text.split('('), |rest| rest.split(' '))
            .next()
            .unwrap_or_default();
        let is_name = !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        if !is_name {
            continue;
        }
        if ours {
            calls.insert(name.to_owned());
        }
        let result = text.rsplit_once(" = ").map(|(_, result)| result);
        match (name, result) {
            ("clone" | "clone3" | "fork" | "vfork", None) => parents.push(process),
            ("clone" | "clone3" | "fork" | "vfork", Some(child)) => {
                parents.retain(|parent| *parent != process);
                let child = child.split(' ').next().unwrap_or_default();
                is_ours.insert(child, ours);
            }
            ("execve", Some("0")) => {
                if let Some(path) = text.split('"').nth(1) {
                    let program = path.rsplit('/').next().unwrap_or_default();
                    is_ours.insert(process, programs.contains(&program));
                }
            }
            _ => {}
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "10  execve(\"/x/install-cni\", [\"install-cni\"], 0x1 /* 2 vars */) = 0
10  openat(AT_FDCWD, \"/dev/null\", O_RDONLY) = 3
10  clone(child_stack=NULL, flags=CLONE_VM <unfinished ...>
11  rt_sigprocmask(SIG_BLOCK, NULL, [], 8) = 0
10  <... clone resumed>) = 11
11  execve(\"/bin/sh\", [\"sh\"], 0x1 /* 2 vars */) = 0
11  ptrace(PTRACE_TRACEME) = 0
10  --- SIGCHLD {si_signo=SIGCHLD} ---
11  execve(\"/x/istio-cni\", [\"istio-cni\"], 0x1 /* 2 vars */) = 0
11  statx(3, \"\") = 0
11  +++ exited with 0 +++
";

    #[test]
    fn calls_are_told_by_the_program_that_makes_them() {
        let found = |programs: &[&str]| calls_of(programs, TRACE).into_iter().collect::<Vec<_>>().join(" ");
        assert_eq!(found(&["install-cni"]), "clone execve openat rt_sigprocmask");
        assert_eq!(found(&["install-cni", "istio-cni"]), "clone execve openat rt_sigprocmask statx");
        assert!(found(&["sh"]).contains("ptrace"));
    }
}
