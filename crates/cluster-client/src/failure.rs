//! Why the API server did not do what it was asked.

use std::{error::Error, io, time::Duration};

/// What a server says with a refusal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatusMessage {
    /// Its text, shortened.
    pub text: String,
    /// Whether it speaks as API servers do. What merely stands in front of one does not, and does not know what it speaks of.
    pub by_api: bool,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The request cannot be made: it has a name that no object has.
    #[error("invalid API request: {0}")]
    Impossible(String),
    /// 401: it does not take our credentials.
    #[error("the API server does not accept the credentials (401): {}", .0.text)]
    Unauthorized(StatusMessage),
    /// 403: it takes them, and does not allow the request.
    #[error("the API server does not allow it (403): {}", .0.text)]
    Forbidden(StatusMessage),
    /// 404: no such thing.
    #[error("the API server has no such thing (404): {}", .0.text)]
    NotFound(StatusMessage),
    /// Another status than one of success.
    #[error("the API server answers {code}: {}", .words.text)]
    Busy {
        /// The HTTP status.
        code: u16,
        /// What it says.
        words: StatusMessage,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// Success, and something that no API server says.
    #[error("unexpected response from {server}; is this the API server? {what}")]
    Garbled {
        /// Its address.
        server: String,
        /// What it says instead.
        what: String,
    },
    /// Its certificate cannot be verified, or it does not speak TLS.
    #[error("no trustworthy connection to the API server at {server}: {message}")]
    Untrusted {
        /// Its address.
        server: String,
        /// What is wrong.
        message: String,
    },
    /// It is unreachable, or the connection broke.
    #[error("the API server at {server} is unreachable: {message}")]
    Unreachable {
        /// Its address.
        server: String,
        /// What happens instead.
        message: String,
    },
    /// It does not answer in time, or not all of it.
    #[error("the API server at {server} did not respond within {patience:?}")]
    Silent {
        /// Its address.
        server: String,
        /// How long it was given.
        patience: Duration,
    },
}

impl ApiError {
    /// The server's requested delay before a retry, if any.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if let Self::Busy { retry_after, .. } = self { *retry_after } else { None }
    }

    /// Whether an API server said that the credentials, or their roles, do not suffice.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        matches!(self, Self::Unauthorized(words) | Self::Forbidden(words) if words.by_api)
    }

    /// The failure, where silence lasted for all of a longer time than the last wait.
    pub(crate) fn within(self, patience: Duration) -> Self {
        if let Self::Silent { server, .. } = self { Self::Silent { server, patience } } else { self }
    }

    /// From an error of sending or reading.
    pub(crate) fn of_transport(error: &(dyn Error + 'static), server: &str) -> Self {
        let mut causes = vec![];
        let mut cause = Some(error);
        while let Some(one) = cause {
            causes.push(one);
            // An io::Error hides what it carries from `source`.
            let inside = one.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
            cause = inside.map(|inside| inside as &(dyn Error + 'static)).or_else(|| one.source());
        }
        let message = short(&causes.last().map(ToString::to_string).unwrap_or_default());
        let server = server.to_owned();
        if causes.iter().any(|cause| cause.is::<rustls::Error>()) {
            return Self::Untrusted { server, message };
        }
        Self::Unreachable { server, message }
    }
}

/// A server may say anything, at any length.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(300).collect()
}
