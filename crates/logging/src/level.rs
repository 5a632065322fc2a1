//! Levels, and which of them each scope logs.

use crate::DEFAULT_SCOPE;
use std::{collections::BTreeMap, fmt, str::FromStr};

/// How grave an entry is; as a limit, the least grave that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// As a limit: nothing is logged.
    None,
    /// The program ends because of it.
    Fatal,
    /// Something failed.
    Error,
    /// Something may be wrong.
    Warn,
    /// Worth knowing.
    Info,
    /// For those who look closely.
    Debug,
}

impl Level {
    /// All of them, from the fewest lines to the most.
    pub const ALL: [Self; 6] = [Self::None, Self::Fatal, Self::Error, Self::Warn, Self::Info, Self::Debug];

    /// Its name in lines and settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Fatal => "fatal",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }

    const fn filter(self) -> log::LevelFilter {
        match self {
            Self::None | Self::Fatal => log::LevelFilter::Off,
            Self::Error => log::LevelFilter::Error,
            Self::Warn => log::LevelFilter::Warn,
            Self::Info => log::LevelFilter::Info,
            Self::Debug => log::LevelFilter::Debug,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Level {
    type Err = LevelError;

    fn from_str(text: &str) -> Result<Self, LevelError> {
        let named = |level: &Self| level.name() == text;
        Self::ALL.into_iter().find(named).ok_or_else(|| LevelError(text.to_owned()))
    }
}

impl From<log::Level> for Level {
    fn from(level: log::Level) -> Self {
        match level {
            log::Level::Error => Self::Error,
            log::Level::Warn => Self::Warn,
            log::Level::Info => Self::Info,
            log::Level::Debug | log::Level::Trace => Self::Debug,
        }
    }
}

/// A word that is not a level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a log level; levels are none, fatal, error, warn, info, debug, each alone or as scope:level"
)]
pub struct LevelError(pub String);

/// The limit of each scope.
///
/// Written as a list separated by commas: `scope:level` sets the scope (and those below it: `kube` covers
/// `kube::client`), a bare level the scope `default`, `all:level` every scope, overriding all others. Scopes that no one
/// mentions log at info.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Levels {
    scopes: BTreeMap<String, Level>,
    all: Option<Level>,
}

impl Levels {
    /// Every scope at one level.
    #[must_use]
    pub const fn all(level: Level) -> Self {
        Self { scopes: BTreeMap::new(), all: Some(level) }
    }

    /// Sets the limit of a scope; `all` means every scope.
    pub fn set(&mut self, scope: &str, level: Level) {
        if scope == "all" {
            self.all = Some(level);
        } else {
            self.scopes.insert(scope.to_owned(), level);
        }
    }

    /// Sets the limit of a scope without a limit of its own.
    pub fn set_default(&mut self, scope: &str, level: Level) {
        self.scopes.entry(scope.to_owned()).or_insert(level);
    }

    /// The limit of a scope.
    #[must_use]
    pub fn of(&self, scope: &str) -> Level {
        if let Some(all) = self.all {
            return all;
        }
        let mut name = if scope.is_empty() { DEFAULT_SCOPE } else { scope };
        loop {
            if let Some(level) = self.scopes.get(name) {
                return *level;
            }
            match name.rsplit_once("::") {
                Some((above, _)) => name = above,
                None => return Level::Info,
            }
        }
    }

    /// Whether a scope logs entries of a level.
    #[must_use]
    pub fn allow(&self, scope: &str, level: Level) -> bool {
        level != Level::None && level <= self.of(scope)
    }

    /// The most any scope logs.
    pub(crate) fn max_filter(&self) -> log::LevelFilter {
        let most = self.scopes.values().copied().chain([Level::Info]).max();
        self.all.or(most).unwrap_or(Level::Info).filter()
    }
}

impl FromStr for Levels {
    type Err = LevelError;

    fn from_str(text: &str) -> Result<Self, LevelError> {
        let mut levels = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (scope, level) = part.rsplit_once(':').unwrap_or((DEFAULT_SCOPE, part));
            match level.trim().parse() {
                Ok(level) if !scope.trim().is_empty() => levels.set(scope.trim(), level),
                Ok(_) | Err(_) => return Err(LevelError(part.to_owned())),
            }
        }
        Ok(levels)
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.all.map(|level| format!("all:{level}"));
        let scopes = self.scopes.iter().map(|(scope, level)| format!("{scope}:{level}"));
        f.write_str(&all.into_iter().chain(scopes).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels(text: &str) -> Levels {
        text.parse().unwrap()
    }

    #[test]
    fn a_bare_level_is_the_default_scopes() {
        let levels = levels("debug, cni-plugin:warn ,kube:none");
        assert_eq!(levels.of(DEFAULT_SCOPE), Level::Debug);
        assert_eq!(levels.of(""), Level::Debug);
        assert_eq!(levels.of("cni-plugin"), Level::Warn);
        assert_eq!(levels.of("cni-agent"), Level::Info);
        assert_eq!(levels.of("kube::client::builder"), Level::None);
        assert_eq!(levels.of("kubert"), Level::Info);
        assert_eq!(levels.to_string(), "cni-plugin:warn,default:debug,kube:none");
        assert_eq!(levels.max_filter(), log::LevelFilter::Debug);
    }

    #[test]
    fn all_beats_every_scope() {
        let levels = levels("all:error,cni-plugin:debug");
        assert!(levels.allow("cni-plugin", Level::Error) && !levels.allow("cni-plugin", Level::Warn));
        assert_eq!(levels.max_filter(), log::LevelFilter::Error);
    }

    #[test]
    fn nothing_means_info() {
        assert_eq!(levels("").of("x"), Level::Info);
        assert!(!levels("").allow("x", Level::Debug));
        assert!(!levels("none").allow(DEFAULT_SCOPE, Level::Fatal));
    }

    #[test]
    fn bad_levels_are_named() {
        for (text, part) in [
            ("loud", "loud"),
            ("a:b:c", "a:b:c"),
            ("info,x:INFO", "x:INFO"),
            (":info", ":info"),
            ("x:", "x:"),
        ] {
            assert_eq!(text.parse::<Levels>(), Err(LevelError(part.to_owned())), "{text}");
        }
    }
}
