//! Why the API server did not change an object.

use std::time::Duration;

use cluster_client::{AccessError, ApiError};
use reasons::AgentReason;

/// Why an object was not changed, or not read for that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It does not exist, or another one has its name.
    #[error("the object is gone")]
    Gone,
    /// Another client wrote it at the same time (409).
    #[error("the object changed concurrently: {0}")]
    Changed(String),
    /// A test of the patch fails, or the API server rejects the change: its status is 422 in both cases.
    #[error("the object changed since it was read, or the change is not allowed: {0}")]
    Untrue(String),
    /// The API server denies access (401, 403).
    #[error("{0}")]
    Refused(String),
    /// The API server rejects it, now and later.
    #[error("{0}")]
    Rejected(String),
    /// No response, or none that shows whether the change was made.
    #[error("{text}")]
    Unanswered {
        /// What happened.
        text: String,
        /// When the API server wants the next request.
        retry_after: Option<Duration>,
    },
}

impl ChangeError {
    /// The reason for metrics.
    #[must_use]
    pub const fn reason(&self) -> AgentReason {
        match self {
            Self::Gone => AgentReason::Gone,
            Self::Changed(_) | Self::Untrue(_) => AgentReason::Changed,
            Self::Refused(_) => AgentReason::Refused,
            Self::Rejected(_) => AgentReason::Rejected,
            Self::Unanswered { .. } => AgentReason::Unanswered,
        }
    }

    /// When the API server wants the next request, if it said so.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if let Self::Unanswered { retry_after, .. } = self { *retry_after } else { None }
    }
}

impl From<AccessError> for ChangeError {
    fn from(error: AccessError) -> Self {
        Self::Unanswered { text: error.to_string(), retry_after: None }
    }
}

impl From<ApiError> for ChangeError {
    fn from(failure: ApiError) -> Self {
        let text = failure.to_string();
        match &failure {
            ApiError::NotFound(words) if words.by_api => Self::Gone,
            ApiError::Busy { code: 409, .. } => Self::Changed(text),
            ApiError::Busy { code: 422, .. } => Self::Untrue(text),
            ApiError::Unauthorized(_) | ApiError::Forbidden(_) => Self::Refused(text),
            ApiError::Busy { code: 408 | 429 | 500..=599, .. }
            | ApiError::NotFound(_)
            | ApiError::Garbled { .. }
            | ApiError::Untrusted { .. }
            | ApiError::Unreachable { .. }
            | ApiError::Silent { .. } => Self::Unanswered { retry_after: failure.retry_after(), text },
            ApiError::Busy { .. } | ApiError::Impossible(_) => Self::Rejected(text),
        }
    }
}
