//! Watching a collection, one event after the other: no more than one object is in memory.
//!
//! The library's watcher does not fit: it brings a client whose responses have limits neither in time nor in size, and whose token
//! is the one that the watch began with.

use std::time::{Duration, Instant};

use cluster_client::params::WatchParams;
use cluster_client::{Request, WatchEvent, random};
use serde_json::Value;

use super::{ReadError, Replica, Selection};
use crate::cluster::{Cluster, PATIENCE};

/// How long a watch may last. The API server is asked to end it earlier, so a watch that lasts longer is dead.
pub const WATCH_PATIENCE: Duration = Duration::from_secs(300);
/// When the API server is to end it, in seconds: of many that began together, each at another time.
const WATCH_SECONDS: std::ops::Range<u32> = 180..240;

/// How the API server ended a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchEnd {
    /// When it was asked to.
    AsAsked,
    /// Earlier, as one that shuts down does.
    Early,
}

impl Cluster {
    /// Watches a collection from a version on, which is kept current as the replica is, until the API server ends the watch. `watching` is called
    /// when it has begun.
    ///
    /// # Errors
    /// Why it broke.
    pub async fn watch(
        &self,
        path: &str,
        of: &Selection,
        version: &mut String,
        replica: &impl Replica,
        watching: impl FnOnce(),
    ) -> Result<WatchEnd, ReadError> {
        let seconds = random_of(WATCH_SECONDS);
        let params = WatchParams::default().fields(&of.fields).timeout(seconds);
        let params = if of.labels.is_empty() { params } else { params.labels(&of.labels) };
        let start = Instant::now();
        let mut answer = self.client().open(Request::new(path).watch(&params, version), PATIENCE).await?;
        watching();
        loop {
            let left = WATCH_PATIENCE.saturating_sub(start.elapsed());
            let Some(event) = answer.line::<WatchEvent<Value>>(left).await? else {
                let is_early = start.elapsed() < Duration::from_secs(seconds.into());
                return Ok(if is_early { WatchEnd::Early } else { WatchEnd::AsAsked });
            };
            replica.followed(true);
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    advance(version, &object);
                    replica.changed(&object);
                }
                WatchEvent::Deleted(object) => {
                    advance(version, &object);
                    replica.removed(&object);
                }
                WatchEvent::Bookmark(mark) => *version = mark.metadata.resource_version,
                WatchEvent::Error(status) if status.code == 410 => return Err(ReadError::Expired),
                WatchEvent::Error(status) => {
                    let text = format!("the API server reports {}: {}", status.code, status.message);
                    return Err(ReadError::failed(text));
                }
            }
        }
    }
}

/// A number of a range, each as likely.
fn random_of(range: std::ops::Range<u32>) -> u32 {
    let width = f64::from(range.end - range.start);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the range")]
    let above = (random() * width) as u32;
    range.start + above
}

fn advance(version: &mut String, object: &Value) {
    if let Some(newer) = object.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
        newer.clone_into(version);
    }
}
