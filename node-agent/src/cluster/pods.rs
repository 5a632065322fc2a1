//! The pods of a node, read as they come: no list of theirs is ever in memory as a whole.

use std::fmt;
use std::io::{self, BufReader, Read};
use std::time::Duration;

use cluster_client::params::{GetParams, ListParams};
use cluster_client::{ApiError, Built, Limits, Request, RequestError};
use hyper::body::Bytes;
use hyper::http::uri::InvalidUri;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokio::sync::mpsc;

use super::{Cluster, PATIENCE};

/// How long reading all pods of a node may take.
const LIST_PATIENCE: Duration = Duration::from_secs(60);
/// How many pods the server is asked for at once. Where it answers from memory it sends all of them.
const PAGE: u32 = 50;
/// The same where every page costs a look into its store.
const LARGE_PAGE: u32 = 500;
/// How many pieces of an answer may wait for the parser.
const PIECES: usize = 2;

/// All pods of all namespaces.
pub(super) const PODS: &str = "/api/v1/pods";

/// Which pods: selectors as the server understands them, empty for any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Of fields.
    pub fields: String,
    /// Of labels.
    pub labels: String,
}

/// How new a list has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// As the server has it in its memory, where pods are sorted by node: its store would be searched for a node's from end to end. It may be older than
    /// what was seen before.
    Remembered,
    /// Newer than all that was seen before.
    Newest,
}

/// What was kept of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T> {
    /// What was kept.
    pub kept: Vec<T>,
    /// Which version of all pods the list shows.
    pub version: String,
}

/// Why pods cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodsError {
    /// The agent does not know its node.
    #[error("NODE_NAME is not set, so the agent does not know which pods are those of its node")]
    NoNode,
    /// The server refuses (401, 403).
    #[error(
        "the agent may not read pods ({code}): {message}; give its service account the verbs get and list on pods (ClusterRole istio-cni)"
    )]
    Denied {
        /// The status.
        code: u16,
        /// What the server says.
        message: String,
    },
    /// Not now: the server says when to come back.
    #[error("cannot read the node's pods: {text}")]
    Later {
        /// What else it says.
        text: String,
        /// When.
        after: Duration,
    },
    /// No answer, or another one.
    #[error("cannot read the node's pods: {0}")]
    Unreachable(String),
}

impl From<ApiError> for PodsError {
    fn from(failure: ApiError) -> Self {
        match failure {
            ApiError::Unauthorized(words) => Self::Denied { code: 401, message: words.text },
            ApiError::Forbidden(words) => Self::Denied { code: 403, message: words.text },
            ApiError::Busy { retry_after: Some(after), .. } => {
                Self::Later { text: failure.to_string(), after }
            }
            ApiError::Impossible(_)
            | ApiError::NotFound(_)
            | ApiError::Busy { retry_after: None, .. }
            | ApiError::Garbled { .. }
            | ApiError::Untrusted { .. }
            | ApiError::Unreachable { .. }
            | ApiError::Silent { .. } => Self::Unreachable(failure.to_string()),
        }
    }
}

impl Cluster {
    /// What `keep` keeps of the pods of the agent's node. Pods may be as they were a moment ago: the server need not ask its store.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub async fn pods_of_node<T: Send + 'static>(
        &self,
        keep: impl Fn(&Value) -> Option<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>, PodsError> {
        if self.identity.node.is_empty() {
            return Err(PodsError::NoNode);
        }
        let of_node =
            Selection { fields: format!("spec.nodeName={}", self.identity.node), labels: String::new() };
        Ok(self.list_pods(&of_node, keep).await?.kept)
    }

    /// What `keep` keeps of the pods that a selection selects, and the version to watch them from.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub async fn list_pods<T: Send + 'static>(
        &self,
        of: &Selection,
        keep: impl Fn(&Value) -> Option<T> + Clone + Send + 'static,
    ) -> Result<Listed<T>, PodsError> {
        self.list_of(PODS, of, Freshness::Remembered, keep).await
    }

    /// The same of any collection, by its path.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn list_of<T: Send + 'static>(
        &self,
        path: &str,
        of: &Selection,
        freshness: Freshness,
        keep: impl Fn(&Value) -> Option<T> + Clone + Send + 'static,
    ) -> Result<Listed<T>, PodsError> {
        let read = async {
            let (mut kept, mut rest) = (Vec::new(), None);
            loop {
                let request = page_request(path, of, freshness, rest.take());
                let page = self.page(request, keep.clone()).await?;
                kept.extend(page.kept);
                match page.rest {
                    Some(token) => rest = Some(token),
                    None => return Ok(Listed { kept, version: page.version }),
                }
            }
        };
        let slow = || PodsError::Unreachable(format!("not all of them came within {LIST_PATIENCE:?}"));
        tokio::time::timeout(LIST_PATIENCE, read).await.map_err(|_| slow())?
    }

    /// A pod as it is now; none if there is no such pod.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Value>, PodsError> {
        let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
        let request = pods.get(name, &GetParams::default());
        match self.client.json(request, Limits::object(PATIENCE)).await {
            Ok(pod) => Ok(Some(pod)),
            Err(ApiError::NotFound(words)) if words.by_api => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }

    async fn page<T: Send + 'static>(
        &self,
        request: Built,
        keep: impl Fn(&Value) -> Option<T> + Send + 'static,
    ) -> Result<Page<T>, PodsError> {
        let mut answer = self.client.open(request, PATIENCE).await?;
        let (send, pieces) = mpsc::channel(PIECES);
        let parser = tokio::task::spawn_blocking(move || {
            let mut page = Page { kept: Vec::new(), rest: None, version: String::new() };
            let text = BufReader::new(Pieces { pieces, piece: io::Cursor::default() });
            let reader = PageSeed { page: &mut page, keep: &keep };
            reader.deserialize(&mut serde_json::Deserializer::from_reader(text)).map(|()| page)
        });
        loop {
            // The whole list has its own limit.
            let Some(piece) = answer.piece(LIST_PATIENCE).await? else { break };
            // The parser ends early where it finds that this is no list.
            if send.send(piece).await.is_err() {
                break;
            }
        }
        drop(send);
        let parsed = parser.await.map_err(|error| PodsError::Unreachable(error.to_string()))?;
        parsed.map_err(|error| PodsError::Unreachable(format!("the answer is no list of pods: {error}")))
    }
}

fn page_request(path: &str, of: &Selection, freshness: Freshness, rest: Option<String>) -> Built {
    let most = match freshness {
        Freshness::Remembered => PAGE,
        Freshness::Newest => LARGE_PAGE,
    };
    let params = ListParams { continue_token: rest, ..ListParams::default().fields(&of.fields).limit(most) };
    let params = if of.labels.is_empty() { params } else { params.labels(&of.labels) };
    let mut request = Request::new(path).list(&params)?;
    if params.continue_token.is_none() && freshness == Freshness::Remembered {
        let uri = format!("{}&resourceVersion=0", request.uri());
        *request.uri_mut() =
            uri.parse().map_err(|error: InvalidUri| RequestError::BuildRequest(error.into()))?;
    }
    Ok(request)
}

/// Bytes that come from elsewhere, for a parser on a thread that may wait.
struct Pieces {
    pieces: mpsc::Receiver<Bytes>,
    piece: io::Cursor<Bytes>,
}

impl Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.piece.read(into)?;
            if count > 0 {
                return Ok(count);
            }
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = io::Cursor::new(piece),
                None => return Ok(0),
            }
        }
    }
}

/// What was kept of a page, what continues it, and which version it shows.
#[derive(Debug)]
struct Page<T> {
    kept: Vec<T>,
    rest: Option<String>,
    version: String,
}

/// Reads a list, one item after the other.
struct PageSeed<'a, T, K> {
    page: &'a mut Page<T>,
    keep: &'a K,
}

impl<'de, T, K: Fn(&Value) -> Option<T>> DeserializeSeed<'de> for PageSeed<'_, T, K> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, T, K: Fn(&Value) -> Option<T>> Visitor<'de> for PageSeed<'_, T, K> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Metadata {
            r#continue: Option<String>,
            resource_version: Option<String>,
        }
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "items" => map.next_value_seed(ItemsSeed { kept: &mut self.page.kept, keep: self.keep })?,
                "metadata" => {
                    let metadata = map.next_value::<Metadata>()?;
                    self.page.rest = metadata.r#continue.filter(|token| !token.is_empty());
                    self.page.version = metadata.resource_version.unwrap_or_default();
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

struct ItemsSeed<'a, T, K> {
    kept: &'a mut Vec<T>,
    keep: &'a K,
}

impl<'de, T, K: Fn(&Value) -> Option<T>> DeserializeSeed<'de> for ItemsSeed<'_, T, K> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        // The server says null for none.
        deserializer.deserialize_option(self)
    }
}

impl<'de, T, K: Fn(&Value) -> Option<T>> Visitor<'de> for ItemsSeed<'_, T, K> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of pods")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(pod) = items.next_element::<Value>()? {
            self.kept.extend((self.keep)(&pod));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(Vec<String>, Option<String>), String> {
        let mut page = Page { kept: Vec::new(), rest: None, version: String::new() };
        let keep = |pod: &Value| pod["metadata"]["name"].as_str().map(str::to_owned);
        let (send, pieces) = mpsc::channel(text.len().max(1));
        for piece in text.as_bytes().chunks(7) {
            send.blocking_send(Bytes::copy_from_slice(piece)).expect("room for it");
        }
        drop(send);
        let text = BufReader::new(Pieces { pieces, piece: io::Cursor::default() });
        let seed = PageSeed { page: &mut page, keep: &keep };
        let read = seed.deserialize(&mut serde_json::Deserializer::from_reader(text));
        read.map(|()| (page.kept, page.rest)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_list_is_read_item_by_item_in_pieces_of_any_size() {
        let list = r#"{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"abc"},
            "items":[{"metadata":{"name":"a"}},{"metadata":{}},{"metadata":{"name":"\u00fc b"}}],"more":[{}]}"#;
        assert_eq!(read(list), Ok((vec!["a".into(), "ü b".into()], Some("abc".into()))));
        assert_eq!(read(r#"{"items":null,"metadata":{"continue":""}}"#), Ok((vec![], None)));
    }

    #[test]
    fn half_a_list_is_an_error() {
        assert!(read(r#"{"items":[{"metadata":{"name":"a"}},"#).is_err());
        assert!(read("[]").is_err());
        assert!(read("").is_err());
    }
}
