//! The seccomp profile in `deploy/seccomp` is what its list says, and lets nothing through that is a way out of a container.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

const LIST: &str = "install-cni.calls";
/// Other namespaces, other processes, kernel code, devices, keys, clocks, and what was a way from a container into the kernel before.
const FORBIDDEN: &str = "acct add_key adjtimex bpf chroot clock_adjtime clock_settime create_module delete_module fanotify_init finit_module fsconfig \
    fsmount fsopen fspick get_mempolicy init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl \
    lookup_dcookie mbind migrate_pages mknod mknodat modify_ldt mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at \
    open_tree perf_event_open personality pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev ptrace quotactl reboot request_key \
    seccomp set_mempolicy setdomainname setgid setgroups sethostname setreuid setresuid settimeofday setuid swapoff swapon sysfs syslog umount \
    umount2 uselib userfaultfd ustat vhangup vm86 vm86old vmsplice";

fn folder() -> PathBuf {
    test_support::project::file("deploy/seccomp")
}

fn written(what: &str) -> String {
    let done = Command::new(env!("CARGO_BIN_EXE_seccomp"))
        .arg(what)
        .arg(folder().join(LIST))
        .output()
        .expect("runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text")
}

fn profile() -> Value {
    serde_json::from_str(&written("profile")).expect("JSON")
}

fn names(rule: &Value) -> Vec<&str> {
    rule["names"].as_array().expect("names").iter().filter_map(Value::as_str).collect()
}

#[test]
fn both_files_are_made_of_the_list() {
    for (what, file) in [("profile", "install-cni.json"), ("object", "security-profiles-operator.json")] {
        let there = fs::read_to_string(folder().join(file)).expect(file);
        assert!(there == written(what), "{file} is not what its list says: make manifests");
    }
    let object: Value = serde_json::from_str(&written("object")).expect("JSON");
    assert_eq!(object["spec"], profile());
}

#[test]
fn what_is_not_listed_is_refused_and_no_way_out_is_listed() {
    let profile = profile();
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    let rules = profile["syscalls"].as_array().expect("rules");
    let forbidden: Vec<&str> = FORBIDDEN.split_whitespace().collect();
    for rule in rules {
        let listed: Vec<&str> = names(rule).into_iter().filter(|name| forbidden.contains(name)).collect();
        assert!(listed.is_empty(), "{listed:?}");
    }
    // A call by which more could be had than is needed is never let through whatever its arguments are.
    for name in ["clone", "clone3", "ioctl", "prctl", "setns", "socket", "unshare"] {
        let mut of_name = rules.iter().filter(|rule| names(rule).contains(&name)).peekable();
        assert!(of_name.peek().is_some(), "{name} is not listed");
        assert!(
            of_name.all(|rule| rule["action"] == "SCMP_ACT_ERRNO"
                || rule["args"].as_array().is_some_and(|args| !args.is_empty())),
            "{name}"
        );
    }
}

#[test]
fn the_page_tells_how_many_calls_are_let_through() {
    let profile = profile();
    let rules = profile["syscalls"].as_array().expect("rules");
    let allowing = rules.iter().filter(|rule| rule["action"] == "SCMP_ACT_ALLOW");
    let calls: BTreeSet<&str> = allowing.flat_map(names).collect();
    let page = include_str!("../../../../docs/reference/privileges.md")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    assert!(page.contains(&format!("is the agent's own: {} calls", calls.len())), "{} calls", calls.len());
}
