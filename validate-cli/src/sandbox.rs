//! Whether this container runs in a sandbox with a kernel of its own: rules of the node do not bind it, whatever they are.

use std::fs::File;
use std::io::Read as _;

/// The most that is read of a file.
const MOST_BYTES: u64 = 64 << 10;

/// The sandbox that this process runs in, by what its kernel says of itself; none if it is not known for one.
#[must_use]
pub fn of_this_process() -> Option<&'static str> {
    recognized(&read("/proc/version"), &read("/proc/self/mounts"))
}

fn read(path: &str) -> String {
    let mut text = String::new();
    // What cannot be read shows nothing.
    let _ = File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text));
    text
}

/// gVisor's kernel always calls itself the same; Kata's machine gets the container's files from the node by a share of this name.
fn recognized(version: &str, mounts: &str) -> Option<&'static str> {
    if version.starts_with("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016") {
        return Some("gVisor");
    }
    mounts.lines().any(|line| line.split(' ').next() == Some("kataShared")).then_some("Kata Containers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_are_known_by_what_they_say_of_themselves() {
        let gvisor = "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n";
        let node = "Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org) #1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1\n";
        let kata = "kataShared / virtiofs rw,relatime 0 0\nproc /proc proc rw 0 0\n";
        let runc = "overlay / overlay rw,relatime 0 0\ntmpfs /kataShared tmpfs rw 0 0\n";
        assert_eq!(recognized(gvisor, runc), Some("gVisor"));
        assert_eq!(recognized(node, kata), Some("Kata Containers"));
        assert_eq!(recognized(node, runc), None);
        assert_eq!(recognized("", ""), None);
        assert_eq!(of_this_process(), None, "tests run on a node");
    }
}
