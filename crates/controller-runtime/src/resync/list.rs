//! Lists, read as they arrive: no list is ever in memory as a whole.

use std::fmt;
use std::io::{self, BufReader, Read};
use std::time::Duration;

use cluster_client::params::ListParams;
use cluster_client::{Built, Request, RequestError};
use hyper::body::Bytes;
use hyper::http::uri::InvalidUri;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokio::sync::mpsc;

use super::ReadError;
use crate::cluster::{Cluster, PATIENCE};

/// How long reading a whole list may take.
const LIST_PATIENCE: Duration = Duration::from_secs(60);
/// How many objects to request at once. From its cache the API server sends all of them.
const PAGE: u32 = 50;
/// The same where every page costs a query of its store.
const LARGE_PAGE: u32 = 500;
/// How many pieces of a response may wait for the parser.
const PIECES: usize = 2;

/// Which objects: selectors as the API server understands them, empty for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Of fields.
    pub fields: String,
    /// Of labels.
    pub labels: String,
}

/// How current a list must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// As the API server has it in its cache, where pods are sorted by node; in its store it would search all pods for a node's. It may be older
    /// than what was read before.
    Remembered,
    /// Newer than everything read before.
    Newest,
}

/// What was kept of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T> {
    /// What was kept.
    pub kept: Vec<T>,
    /// The version that the list shows.
    pub version: String,
}

impl Cluster {
    /// What `keep` keeps of the objects of a collection, by its path.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn list<T: Send + 'static>(
        &self,
        path: &str,
        of: &Selection,
        freshness: Freshness,
        keep: impl Fn(&Value) -> Option<T> + Clone + Send + 'static,
    ) -> Result<Listed<T>, ReadError> {
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
        let slow = || ReadError::failed(format!("the list is not complete within {LIST_PATIENCE:?}"));
        tokio::time::timeout(LIST_PATIENCE, read).await.map_err(|_| slow())?
    }

    async fn page<T: Send + 'static>(
        &self,
        request: Built,
        keep: impl Fn(&Value) -> Option<T> + Send + 'static,
    ) -> Result<Page<T>, ReadError> {
        let mut answer = self.client().open(request, PATIENCE).await?;
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
            // The parser ends early if the response is not a list.
            if send.send(piece).await.is_err() {
                break;
            }
        }
        drop(send);
        let parsed = parser.await.map_err(|error| ReadError::failed(error.to_string()))?;
        parsed.map_err(|error| ReadError::failed(format!("the response is not a list: {error}")))
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
        struct ListMetadata {
            r#continue: Option<String>,
            resource_version: Option<String>,
        }
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "items" => map.next_value_seed(ItemsSeed { kept: &mut self.page.kept, keep: self.keep })?,
                "metadata" => {
                    let metadata = map.next_value::<ListMetadata>()?;
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
        deserializer.deserialize_any(self)
    }
}

impl<'de, T, K: Fn(&Value) -> Option<T>> Visitor<'de> for ItemsSeed<'_, T, K> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    /// The API server writes null for none.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
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
