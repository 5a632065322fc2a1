//! Input errors: what was wrong, where, and with which value; all errors of an input together.

use super::{Key, Source};
use crate::values::Problem;
use alloc::{string::String, vec::Vec};
use core::fmt;

/// The longest piece of a value shown in an error; values may come from a pod and be of any length.
const SHOWN: usize = 80;

/// One thing wrong with one value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct InputError {
    /// The setting it is about, if it is one's.
    pub key: Option<Key>,
    /// Who said it.
    pub source: Source,
    /// The piece that is wrong: a whole value, or one element of a list.
    pub value: String,
    /// What is wrong with it.
    pub problem: Problem,
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.source == Source::Namespace {
            return write!(f, "{}: {}", self.source, self.problem);
        }
        // Escaped, because the value may hold newlines or terminal sequences.
        let shown: String = self.value.chars().take(SHOWN).collect();
        let more = if shown.len() < self.value.len() { "…" } else { "" };
        let is_quote = |c: char| c == '"' || c == '\'';
        // In a list, the first element has the first one and the last element the other.
        let is_quoted = self.value.starts_with(is_quote) || self.value.ends_with(is_quote);
        let hint = if is_quoted { "; the quotes are part of the value: omit them" } else { "" };
        write!(f, "{}: {shown:?}{more} {}{hint}", self.source, self.problem)
    }
}

impl core::error::Error for InputError {}

/// Every error of an input; never empty when returned as an error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InputErrors(Vec<InputError>);

impl InputErrors {
    /// Notes an error that is about no setting.
    pub fn push(&mut self, source: Source, value: &str, problem: Problem) {
        self.0.push(InputError { key: None, source, value: value.into(), problem });
    }

    /// Notes an error of a setting.
    pub fn push_for(&mut self, key: Key, source: Source, value: &str, problem: Problem) {
        self.0.push(InputError { key: Some(key), source, value: value.into(), problem });
    }

    /// Keeps the value, or notes the error.
    pub(crate) fn keep<T>(
        &mut self,
        key: Key,
        source: Source,
        value: &str,
        parsed: Result<T, Problem>,
    ) -> Option<T> {
        parsed.map_err(|problem| self.push_for(key, source, value, problem)).ok()
    }

    /// Whether anything is wrong with a setting.
    pub(crate) fn concern(&self, key: Key) -> bool {
        self.0.iter().any(|error| error.key == Some(key))
    }

    /// `Ok` with the value without an error.
    ///
    /// # Errors
    /// The errors noted so far.
    pub fn into_result<T>(self, value: T) -> Result<T, Self> {
        if self.0.is_empty() { Ok(value) } else { Err(self) }
    }

    /// Takes over the errors of another input.
    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// Those that concern the input alone, not the network namespace it was read for.
    #[must_use]
    pub fn without_namespace(self) -> Self {
        Self(self.0.into_iter().filter(|error| error.source != Source::Namespace).collect())
    }
}

/// A list of errors prints them one behind the other.
macro_rules! error_list {
    ($errors:ident of $error:ident, $iter:literal) => {
        impl $errors {
            #[doc = $iter]
            pub fn iter(&self) -> core::slice::Iter<'_, $error> {
                self.0.iter()
            }
        }

        impl<'a> IntoIterator for &'a $errors {
            type Item = &'a $error;
            type IntoIter = core::slice::Iter<'a, $error>;

            fn into_iter(self) -> Self::IntoIter {
                self.iter()
            }
        }

        impl fmt::Display for $errors {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                for (index, error) in self.iter().enumerate() {
                    write!(f, "{}{error}", if index == 0 { "" } else { "; " })?;
                }
                Ok(())
            }
        }

        impl core::error::Error for $errors {}
    };
}

#[cfg(feature = "pod-json")]
pub(crate) use error_list;

error_list!(InputErrors of InputError, "The errors, in the order in which they were found.");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{NamespaceFacts, RawSettings};
    use alloc::string::ToString;

    #[test]
    fn hostile_values_are_shown_escaped_and_cut() {
        let error = InputError {
            key: Some(Key::InterceptionMode),
            source: Source::Annotation("sidecar.istio.io/interceptionMode"),
            value: "\u{1b}[2J\n".repeat(100),
            problem: Problem::NotOneOf("REDIRECT, TPROXY"),
        };
        let text = error.to_string();
        assert!(text.starts_with("annotation sidecar.istio.io/interceptionMode: \"\\u{1b}[2J\\n"));
        assert!(!text.contains('\n') && text.len() < 1000);
    }

    #[test]
    fn kept_quotes_are_named_in_every_element_that_has_one() {
        for (given, quoted) in
            [("\"80,81,443\"", 2), ("'80'", 1), ("\"*\"", 1), ("80,'81x,9", 1), ("x\"y", 0), ("http", 0)]
        {
            let mut raw = RawSettings::new();
            raw.set(Key::InboundPorts, given, Source::Environment("ISTIO_INBOUND_PORTS"));
            let told =
                crate::Redirect::parse(&raw, &NamespaceFacts::new(&[])).unwrap_err().without_namespace();
            let told = told.to_string();
            assert!(told.starts_with("environment variable ISTIO_INBOUND_PORTS: "), "{told}");
            assert_eq!(
                told.matches("; the quotes are part of the value: omit them").count(),
                quoted,
                "{told}"
            );
        }
    }

    #[test]
    fn a_value_that_is_cut_ends_in_an_ellipsis() {
        let shown = |length: usize| {
            let mut errors = InputErrors::default();
            errors.push(Source::Flag("x"), &"x".repeat(length), Problem::NotOneOf("y"));
            errors.to_string().contains('…')
        };
        assert!(!shown(SHOWN));
        assert!(shown(SHOWN + 1));
    }
}
