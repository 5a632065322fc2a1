//! Why a command cannot be carried out.

use redirect_core::settings::InputErrors;

/// Pods that cannot be read: everything that is wrong, a sentence each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInputError(pub Vec<String>);

impl PodInputError {
    /// One thing.
    pub fn of(what: impl std::fmt::Display) -> Self {
        Self(vec![what.to_string()])
    }
}

impl From<InputErrors> for PodInputError {
    fn from(errors: InputErrors) -> Self {
        Self(errors.iter().map(ToString::to_string).collect())
    }
}
