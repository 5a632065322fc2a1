//! Versions of the specification.

use super::{CniError, Code, Command};
use std::fmt;

/// A version of the specification this plugin speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(usize);

const NAMES: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

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

    /// Reads the `cniVersion` of a configuration; empty means the oldest.
    ///
    /// # Errors
    /// A version this plugin does not speak.
    pub fn parse(text: &str) -> Result<Self, CniError> {
        if text.is_empty() {
            return Ok(Self::OLDEST);
        }
        let position = NAMES.iter().position(|name| *name == text);
        position.map(Self).ok_or_else(|| {
            let message =
                format!("cniVersion {text:?} is not supported; this plugin speaks {}", NAMES.join(", "));
            CniError::new(Code::IncompatibleVersion, message)
        })
    }

    /// Whether the version has a command.
    ///
    /// # Errors
    /// The version does not have it.
    pub fn require(self, command: Command) -> Result<(), CniError> {
        let since = match command {
            Command::Add | Command::Del | Command::Version => Self::OLDEST,
            Command::Check => Self::WITH_CHECK,
            Command::Gc | Command::Status => Self::NEWEST,
        };
        if self >= since {
            return Ok(());
        }
        let message = format!("cniVersion {self} does not define {}; use {since} or later", command.word());
        Err(CniError::new(Code::IncompatibleVersion, message))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for version in Version::all() {
            assert_eq!(Version::parse(version.name()), Ok(version));
        }
        assert_eq!(Version::parse(""), Ok(Version::OLDEST));
        for bad in ["9.9.9", "1.0", "1.0.0 ", "v1.0.0"] {
            assert_eq!(Version::parse(bad).unwrap_err().code, Code::IncompatibleVersion, "{bad}");
        }
    }

    #[test]
    fn commands_came_with_versions() {
        assert_eq!(Version::WITH_CHECK.name(), "0.4.0");
        assert!(Version::parse("0.3.1").unwrap().require(Command::Check).is_err());
        assert!(Version::WITH_CHECK.require(Command::Check).is_ok());
        assert!(Version::parse("1.0.0").unwrap().require(Command::Status).is_err());
        assert!(Version::NEWEST.require(Command::Gc).is_ok());
    }
}
