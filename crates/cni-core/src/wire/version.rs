//! Versions of the specification.

use std::fmt;

/// A version of the specification this plugin speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub(super) usize);

pub(super) const NAMES: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

impl Version {
    /// 0.1.0, which is what a configuration without a version means.
    pub const OLDEST: Self = Self(0);
    /// 0.4.0, the first with CHECK.
    pub const WITH_CHECK: Self = Self(4);
    /// 1.1.0, the first with GC and STATUS.
    pub const NEWEST: Self = Self(NAMES.len() - 1);

    /// All of them, oldest first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..NAMES.len()).map(Self)
    }

    /// The version as configurations write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        NAMES[self.0]
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
