//! Copies of collections of the API server, kept current: a list, then a watch, with growing pauses and one log line for each outage.

mod list;
mod watch;

use std::convert::Infallible;
use std::future::{Future, pending};
use std::time::{Duration, Instant};

use cluster_client::{AccessError, ApiError, random};
use serde_json::Value;

use crate::SCOPE;
use crate::cluster::ApiHandle;
use crate::outage::{LONGEST_RETRY, OutageRetry};
pub use api_lists::{Keep, ListLimits};
pub use list::{Freshness, ListContent, ListSource, Selection};
pub use watch::{WATCH_PATIENCE, WatchEnd};

/// Why a collection cannot be read or watched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// A client cannot be made.
    #[error("no working API client: {0}")]
    NoClient(String),
    /// The API server refuses (401, 403).
    #[error("the API server denies access ({code}): {message}")]
    Denied {
        /// The status.
        code: u16,
        /// Its message.
        message: String,
    },
    /// The API server has forgotten the version to watch from (410).
    #[error("the version to watch from is too old (410)")]
    Expired,
    /// No response, or an unexpected one.
    #[error("{text}")]
    Failed {
        /// What happened.
        text: String,
        /// When the API server wants the next request.
        retry_after: Option<Duration>,
    },
}

impl ReadError {
    pub(crate) const fn failed(text: String) -> Self {
        Self::Failed { text, retry_after: None }
    }

    /// When the API server wants the next request, if it said so.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if let Self::Failed { retry_after, .. } = self { *retry_after } else { None }
    }
}

impl From<AccessError> for ReadError {
    fn from(error: AccessError) -> Self {
        Self::NoClient(error.to_string())
    }
}

impl From<ApiError> for ReadError {
    fn from(failure: ApiError) -> Self {
        match failure {
            ApiError::Unauthorized(words) => Self::Denied { code: 401, message: words.text },
            ApiError::Forbidden(words) => Self::Denied { code: 403, message: words.text },
            ApiError::Busy { code: 410, .. } => Self::Expired,
            ApiError::Impossible(_)
            | ApiError::NotFound(_)
            | ApiError::Busy { .. }
            | ApiError::Garbled { .. }
            | ApiError::Untrusted { .. }
            | ApiError::Unreachable { .. }
            | ApiError::Silent { .. } => {
                Self::Failed { retry_after: failure.retry_after(), text: failure.to_string() }
            }
        }
    }
}

/// What to follow.
#[derive(Debug, Clone)]
pub struct Collection {
    /// What it contains, as log lines name it.
    pub what: &'static str,
    /// Where it comes from.
    pub source: ListSource,
    /// Which of its objects.
    pub selection: Selection,
    /// How current its list must be.
    pub freshness: Freshness,
    /// The rights that a controller needs, for one that is denied them.
    pub remedy: &'static str,
    /// How long it takes, at most, until all who follow such a collection follow it again after the API server was gone for a moment; and the
    /// longest pause while it is. Zero for a program that runs once in a cluster.
    pub spread: Duration,
}

/// A copy of a collection.
pub trait Replica: Sync {
    /// What is kept of an object.
    type Item: Send + 'static;

    /// What to keep of an object of the list, decided on another thread.
    fn parser(&self) -> impl Fn(&Value) -> Option<Self::Item> + Clone + Send + Sync + 'static;
    /// These are all objects.
    fn replace(&self, items: Vec<Self::Item>);
    /// An object is new, or changed.
    fn changed(&self, object: &Value);
    /// An object is gone.
    fn removed(&self, object: &Value);
    /// Whether a watch keeps the copy current from now on: it began, or brought something; or it broke.
    fn followed(&self, _is_followed: bool) {}
    /// The watch broke; true if the copy may be stale until the next list.
    fn interrupted(&self) -> bool;
    /// Whether to list again although no watch broke.
    fn is_incomplete(&self) -> bool {
        false
    }
    /// Waits until the copy became incomplete and a list is worthwhile.
    fn wants_list(&self) -> impl Future<Output = ()> + Send {
        pending()
    }
}

/// The longest silence of a sound watch: the API server sends a bookmark each minute.
const LONGEST_SILENCE: Duration = Duration::from_secs(150);

/// When the watch of a copy last brought something; nothing while none keeps it current.
#[derive(Debug, Clone, Copy, Default)]
pub struct Followed(Option<Instant>);

impl Followed {
    /// What [`Replica::followed`] receives.
    pub fn set(&mut self, is_followed: bool) {
        self.0 = is_followed.then(Instant::now);
    }

    /// Whether a watch keeps the copy current.
    #[must_use]
    pub const fn is_followed(self) -> bool {
        self.0.is_some()
    }

    /// The same, and it is not silent for too long.
    #[must_use]
    pub fn is_sound(self) -> bool {
        self.silence().is_some_and(|silence| silence < LONGEST_SILENCE)
    }

    /// How long ago the watch last brought something.
    #[must_use]
    pub fn silence(self) -> Option<Duration> {
        self.0.map(|updated| updated.elapsed())
    }
}

/// Keeps a copy current for ever.
pub async fn run(connection: &ApiHandle, collection: &Collection, replica: &impl Replica) -> Infallible {
    let what = collection.what;
    let mut retry = OutageRetry::new(format!("cannot watch {what}"), format!("watching {what} again"))
        .longest(collection.spread.max(LONGEST_RETRY));
    let mut version = None;
    loop {
        let (start, mut was_watching) = (Instant::now(), false);
        let ended = watch_once(connection, collection, replica, &mut version, || {
            was_watching = true;
            replica.followed(true);
            retry.worked();
        })
        .await;
        let is_lost = was_watching && matches!(ended, Ok(WatchEnd::Early) | Err(ReadError::Failed { .. }));
        if is_lost || ended.is_err() {
            replica.followed(false);
        }
        let pause = match ended {
            Ok(_) => retry.after_success(),
            Err(error) => {
                if replica.interrupted() || error == ReadError::Expired {
                    version = None;
                }
                if start.elapsed() >= LONGEST_RETRY {
                    retry.reset();
                }
                match &error {
                    ReadError::Expired => {
                        log::debug!(target: SCOPE, "listing {what} again: {error}");
                        retry.quiet_pause()
                    }
                    ReadError::Denied { .. } => {
                        let text = format!("{error}; {}", collection.remedy);
                        retry.after_failure(&text, None)
                    }
                    ReadError::NoClient(_) | ReadError::Failed { .. } => {
                        retry.after_failure(&error, error.retry_after())
                    }
                }
            }
        };
        // All watches end together when an API server restarts, and are not to come back together.
        let share = if is_lost { collection.spread.mul_f64(random()) } else { Duration::ZERO };
        tokio::time::sleep(pause.max(share)).await;
    }
}

/// Watches until the API server ends the watch. The next watch begins where this one ended.
async fn watch_once(
    connection: &ApiHandle,
    collection: &Collection,
    replica: &impl Replica,
    version: &mut Option<String>,
    watching: impl FnOnce(),
) -> Result<WatchEnd, ReadError> {
    let cluster = connection.get()?;
    let Collection { source, selection, freshness, .. } = collection;
    if replica.is_incomplete() {
        *version = None;
    }
    let from = match version {
        Some(from) => from,
        None => {
            let listed = cluster.list(source, selection, *freshness, replica.parser()).await?;
            replica.replace(listed.kept);
            version.insert(listed.version)
        }
    };
    tokio::select! {
        done = cluster.watch(&source.path, selection, from, replica, watching) => done,
        () = replica.wants_list() => Ok(WatchEnd::AsAsked),
    }
}
