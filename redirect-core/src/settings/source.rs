//! Where values came from.

use super::Key;
use alloc::vec::Vec;
use core::fmt;

/// Where a value came from. Errors, warnings and explanations name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(tag = "kind", content = "name", rename_all = "camelCase")
)]
#[non_exhaustive]
pub enum Source {
    /// Unset; the table's default holds.
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
    /// [`RedirectBuilder`](crate::RedirectBuilder) name themselves, unless the program sets another name.
    Caller(&'static str),
}

impl Source {
    /// Whether a pod's annotation said it.
    pub(crate) const fn is_annotation(self) -> bool {
        matches!(self, Self::Annotation(_))
    }
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

/// Where something came from, kept beside it. It is not a part of what the thing is: any two compare as equal, so that the
/// same redirection asked for by a flag and by an annotation is the same redirection.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Provenance<T>(pub(crate) T);

impl<T> PartialEq for Provenance<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for Provenance<T> {}

/// Who asked for each setting that was set, in the order of the keys.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    said: Vec<(Key, Source)>,
    /// How many of the excluded inbound ports were listed, where those follow that every pod excludes.
    listed_inbound: Option<usize>,
}

impl Sources {
    pub(crate) fn of(&self, key: Key) -> Source {
        self.find(key)
            .ok()
            .and_then(|place| self.said.get(place))
            .map_or(Source::Default, |(_, source)| *source)
    }

    pub(crate) fn set(&mut self, key: Key, source: Source) {
        match self.find(key) {
            Ok(place) => {
                if let Some(said) = self.said.get_mut(place) {
                    said.1 = source;
                }
            }
            Err(place) => self.said.insert(place, (key, source)),
        }
    }

    /// Notes how many of the excluded inbound ports were listed; the others need no source.
    pub(crate) const fn list_inbound(&mut self, listed: usize) {
        self.listed_inbound = Some(listed);
    }

    /// Who asked for the excluded inbound port at this place.
    pub(crate) fn of_excluded_inbound(&self, place: usize) -> Source {
        match self.listed_inbound {
            Some(listed) if place >= listed => Source::Default,
            Some(_) | None => self.of(Key::InboundExcludePorts),
        }
    }

    /// Those that are said in the order of the keys.
    pub(crate) fn in_order(said: impl ExactSizeIterator<Item = (Key, Source)>) -> Self {
        // Who is the proxy's user may be said by other settings, and so may its group.
        let mut sources = Vec::with_capacity(said.len().saturating_add(2));
        sources.extend(said);
        Self { said: sources, listed_inbound: None }
    }

    /// The place of a key, or the one where it belongs.
    fn find(&self, key: Key) -> Result<usize, usize> {
        self.said.binary_search_by_key(&key, |(key, _)| *key)
    }
}
