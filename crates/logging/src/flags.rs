//! What the command-line flags of logging say.

use crate::{Config, LevelError, LineFormat, LogTarget};

/// A flag whose value is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No level.
    #[error("flag --{flag}: {error}")]
    Level {
        /// The flag.
        flag: &'static str,
        /// What is wrong.
        error: LevelError,
    },
    /// No boolean.
    #[error("flag --{flag}: {value:?} is neither true nor false")]
    Bool {
        /// The flag.
        flag: &'static str,
        /// Its value.
        value: String,
    },
}

impl Config {
    /// Reads the flags; `get` answers what was given for one, values of a repeated flag joined by commas.
    ///
    /// # Errors
    /// Everything wrong with them, together.
    pub fn from_flags(get: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<ConfigError>> {
        let mut errors = Vec::new();
        let given = |name: &str| get(name).unwrap_or_default();
        let mut levels = |flag: &'static str| {
            let parsed = given(flag).parse();
            parsed.map_err(|error| errors.push(ConfigError::Level { flag, error })).unwrap_or_default()
        };
        let wanted = levels("log_output_level");
        let _ = levels("log_stacktrace_level");
        let format = match given("log_as_json").as_str() {
            "true" => LineFormat::Json,
            "" | "false" => LineFormat::Console,
            value => {
                errors.push(ConfigError::Bool { flag: "log_as_json", value: value.to_owned() });
                LineFormat::Console
            }
        };
        let target = get("log_target").unwrap_or_else(|| "stderr".to_owned());
        let targets = target.split(',').map(str::trim).filter(|target| !target.is_empty());
        let caller = !matches!(given("log_caller").as_str(), "" | "none");
        let config = Self { levels: wanted, format, targets: targets.map(LogTarget::from).collect(), caller };
        if errors.is_empty() { Ok(config) } else { Err(errors) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(flags: &[(&str, &str)]) -> Result<Config, Vec<ConfigError>> {
        Config::from_flags(|name| {
            flags.iter().find(|(flag, _)| *flag == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn targets_are_a_list() {
        let config = config(&[("log_target", "stdout, /var/log/x.log"), ("log_as_json", "true")]).unwrap();
        assert_eq!(config.targets, [LogTarget::Stdout, LogTarget::File("/var/log/x.log".into())]);
        assert_eq!(config.format, LineFormat::Json);
    }

    #[test]
    fn errors_come_together() {
        let flags = [("log_output_level", "loud"), ("log_as_json", "maybe"), ("log_stacktrace_level", "x:y")];
        let errors: Vec<String> = config(&flags).unwrap_err().iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), 3);
        assert!(errors[0].starts_with("flag --log_output_level: \"loud\" is not a log level"), "{errors:?}");
    }
}
