//! How bad a finding is.

use serde::{Deserialize, Serialize};

use crate::text_writer::TextStyle;

/// How bad it is. A word that is not known, of a newer program, is taken seriously.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know; as it was asked for.
    Note,
    /// It may be wrong, or part of the traffic is concerned.
    Warning,
    /// Traffic bypasses the proxy that should not, or arrives nowhere.
    #[default]
    #[serde(other)]
    Error,
}

impl Severity {
    /// Its word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }

    /// Its colour.
    #[must_use]
    pub const fn style(self) -> TextStyle {
        match self {
            Self::Note => TextStyle::Dim,
            Self::Warning => TextStyle::Yellow,
            Self::Error => TextStyle::Red,
        }
    }
}
