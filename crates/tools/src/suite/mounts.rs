//! What is mounted: what a test leaves there, those behind it meet, and programs of the machine as well.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

/// Names of network namespaces that killed tests leave: the next test takes them away.
const OF_TESTS: &str = "/run/netns";

/// How often something is mounted at each place.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Mounts(BTreeMap<String, usize>);

impl Mounts {
    /// Those of this process's mount namespace.
    pub fn now() -> Result<Self> {
        fs::read_to_string("/proc/self/mountinfo").context("what is mounted?").map(|table| Self::of(&table))
    }

    /// Of a table as in proc_pid_mountinfo(5).
    fn of(table: &str) -> Self {
        let mut mounts = Self::default();
        for place in table.lines().filter_map(|line| line.split(' ').nth(4)) {
            if !place.starts_with(OF_TESTS) {
                *mounts.0.entry(place.to_owned()).or_default() += 1;
            }
        }
        mounts
    }

    /// The places where more is mounted than before.
    pub fn more_than(&self, before: &Self) -> Vec<String> {
        let is_more = |(place, count): &(&String, &usize)| before.0.get(*place).is_none_or(|was| was < count);
        self.0.iter().filter(is_more).map(|(place, _)| place.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Mounts;

    #[test]
    fn what_is_mounted_once_more_is_left_and_names_of_namespaces_are_not() {
        let line = |place: &str| format!("36 35 98:0 / {place} rw,noatime master:1 - ext3 /dev/root rw\n");
        let before = Mounts::of(&[line("/"), line("/run")].concat());
        assert_eq!(before.more_than(&before), [""; 0]);
        let places = ["/", "/run", "/run", "/run/netns", "/run/netns/e2e-1-2", "/sys/fs/bpf"];
        let after = Mounts::of(&places.map(line).concat());
        assert_eq!(after.more_than(&before), ["/run", "/sys/fs/bpf"]);
        assert_eq!(before.more_than(&after), [""; 0]);
    }
}
