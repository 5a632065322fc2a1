//! Which versions of the specification and which commands the plugin supports.

use super::version::NAMES;
use super::{CniCommand, CniError, Code, Version};

impl Version {
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
    pub fn require(self, command: CniCommand) -> Result<(), CniError> {
        let since = match command {
            CniCommand::Add | CniCommand::Del | CniCommand::Version => Self::OLDEST,
            CniCommand::Check => Self::WITH_CHECK,
            CniCommand::Gc | CniCommand::Status => Self::NEWEST,
        };
        if self >= since {
            return Ok(());
        }
        let message = format!("cniVersion {self} does not define {}; use {since} or later", command.word());
        Err(CniError::new(Code::IncompatibleVersion, message))
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
        assert!(Version::parse("0.3.1").unwrap().require(CniCommand::Check).is_err());
        assert!(Version::WITH_CHECK.require(CniCommand::Check).is_ok());
        assert!(Version::parse("1.0.0").unwrap().require(CniCommand::Status).is_err());
        assert!(Version::NEWEST.require(CniCommand::Gc).is_ok());
    }
}
