//! What tests take.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

/// Time that passed, and time that processors worked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// From start to end.
    pub wall: Duration,
    /// Of the process, and of all its children that it waited for: in steps of the kernel's clock, 10 ms.
    pub processor: Duration,
}

impl Cost {
    /// What a process took that has ended and was not waited for: `utime`, `stime`, `cutime`, `cstime` of proc_pid_stat(5).
    pub fn of(process: u32) -> Result<Self> {
        let path = format!("/proc/{process}/stat");
        let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        ticks(&stat)
            .map(|ticks| Self { wall: Duration::ZERO, processor: Duration::from_millis(ticks * 10) })
            .with_context(|| format!("{path} is {stat:?}"))
    }
}

/// Fields 14 to 17. The second, a name, may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<u64> =
        rest.split(' ').skip(11).take(4).map(|field| field.parse().ok()).collect::<Option<_>>()?;
    (fields.len() == 4).then(|| fields.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_anything_in_it_is_no_obstacle() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 10 20 300 4000 20 0 1 0 5 6 7";
        assert_eq!(ticks(stat), Some(4330));
        assert_eq!(ticks("7 (a) S 1"), None);
    }
}
