//! Where values came from.

use super::Key;
use alloc::collections::BTreeMap;
use core::fmt;

/// Where a value came from. Errors, warnings and explanations name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Source {
    /// Nobody said anything; the table's default holds.
    Default,
    /// This environment variable.
    Environment(&'static str),
    /// This flag, without dashes.
    Flag(&'static str),
    /// The command line, where no flag is concerned.
    CommandLine,
    /// This key of the plugin's configuration.
    Configuration(&'static str),
    /// This annotation of the pod.
    Annotation(&'static str),
    /// This variable of the pod's proxy container.
    ProxyEnvironment(&'static str),
    /// This field of the pod's proxy container.
    ProxyField(&'static str),
    /// The addresses of the network namespace.
    Namespace,
    /// A program that uses this library, in its own words: `field spec.excludedPorts`. The setters of
    /// [`RedirectBuilder`](crate::RedirectBuilder) name themselves, where the program says nothing else.
    Caller(&'static str),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::Flag(name) => write!(f, "flag --{name}"),
            Self::CommandLine => f.write_str("command line"),
            Self::Configuration(key) => write!(f, "configuration key {key}"),
            Self::Annotation(name) => write!(f, "annotation {name}"),
            Self::ProxyEnvironment(name) => write!(f, "variable {name} of container istio-proxy"),
            Self::ProxyField(name) => write!(f, "{name} of container istio-proxy"),
            Self::Namespace => f.write_str("network namespace"),
            Self::Caller(words) => f.write_str(words),
        }
    }
}

/// Where something came from, kept beside it. It is no part of what the thing is: any two compare as equal, so that the
/// same redirection asked for by a flag and by an annotation is the same redirection.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Provenance<T>(pub(crate) T);

impl<T> PartialEq for Provenance<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for Provenance<T> {}

/// Who asked for each setting that anybody said anything about.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources(BTreeMap<Key, Source>);

impl Sources {
    pub(crate) fn of(&self, key: Key) -> Source {
        self.0.get(&key).copied().unwrap_or(Source::Default)
    }

    pub(crate) fn set(&mut self, key: Key, source: Source) {
        self.0.insert(key, source);
    }
}

impl FromIterator<(Key, Source)> for Sources {
    fn from_iter<I: IntoIterator<Item = (Key, Source)>>(sources: I) -> Self {
        Self(sources.into_iter().collect())
    }
}
