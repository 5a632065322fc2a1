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
use serde_json::{Map, Value};
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

/// Decides what is kept of the objects of a list, on another thread.
pub trait Keep: Clone + Send + 'static {
    /// What is kept of one.
    type Kept: Send + 'static;

    /// What is kept of an object according to its metadata alone, which come first: the rest is passed over then.
    fn by_metadata(&self, _metadata: &Value) -> Option<Self::Kept> {
        None
    }

    /// What is kept of an object.
    fn of(&self, object: &Value) -> Option<Self::Kept>;
}

impl<T: Send + 'static, F: Fn(&Value) -> Option<T> + Clone + Send + 'static> Keep for F {
    type Kept = T;

    fn of(&self, object: &Value) -> Option<T> {
        self(object)
    }
}

impl Cluster {
    /// What `keep` keeps of the objects of a collection, by its path.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn list<K: Keep>(
        &self,
        path: &str,
        of: &Selection,
        freshness: Freshness,
        keep: K,
    ) -> Result<Listed<K::Kept>, ReadError> {
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

    async fn page<K: Keep>(&self, request: Built, keep: K) -> Result<Page<K::Kept>, ReadError> {
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
struct PageSeed<'a, K: Keep> {
    page: &'a mut Page<K::Kept>,
    keep: &'a K,
}

impl<'de, K: Keep> DeserializeSeed<'de> for PageSeed<'_, K> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for PageSeed<'_, K> {
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

struct ItemsSeed<'a, K: Keep> {
    kept: &'a mut Vec<K::Kept>,
    keep: &'a K,
}

impl<'de, K: Keep> DeserializeSeed<'de> for ItemsSeed<'_, K> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for ItemsSeed<'_, K> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    /// The API server writes null for none.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(kept) = items.next_element_seed(ObjectSeed(self.keep))? {
            self.kept.extend(kept);
        }
        Ok(())
    }
}

/// Reads what is kept of an object.
struct ObjectSeed<'a, K>(&'a K);

impl<'de, K: Keep> DeserializeSeed<'de> for ObjectSeed<'_, K> {
    type Value = Option<K::Kept>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for ObjectSeed<'_, K> {
    type Value = Option<K::Kept>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let is_metadata = key == "metadata";
            let value = if is_metadata { map.next_value_seed(MetadataSeed)? } else { map.next_value()? };
            if is_metadata && let Some(kept) = self.0.by_metadata(&value) {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                return Ok(Some(kept));
            }
            fields.insert(key, value);
        }
        Ok(self.0.of(&Value::Object(fields)))
    }
}

/// Reads metadata without the `managedFields`: no controller reads them, and they are a third of many objects.
struct MetadataSeed;

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metadata")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == "managedFields" {
                map.next_value::<IgnoredAny>()?;
            } else {
                fields.insert(key, map.next_value()?);
            }
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
    fn objects_are_whole_but_for_their_managed_fields() {
        let read = |object: &str| {
            let whole = |object: &Value| Some(object.clone());
            ObjectSeed(&whole).deserialize(&mut serde_json::Deserializer::from_str(object))
        };
        let object = r#"{"metadata":{"name":"a","managedFields":[{"f":{"b":["}"]}}],"labels":{"managedFields":"x"}},"spec":{"managedFields":[1]}}"#;
        let wanted = json!({"metadata": {"name": "a", "labels": {"managedFields": "x"}}, "spec": {"managedFields": [1]}});
        assert_eq!(read(object).expect("JSON"), Some(wanted));
        for invalid in ["7", r#"{"metadata":7}"#, r#"{"metadata":{"managedFields":[}}"#] {
            assert!(read(invalid).is_err(), "{invalid}");
        }
    }

    /// Keeps names, of known objects according to the metadata alone.
    #[derive(Clone)]
    struct Names;

    impl Keep for Names {
        type Kept = String;

        fn by_metadata(&self, metadata: &Value) -> Option<String> {
            (metadata["name"] == "known").then(|| "known, by its metadata".to_owned())
        }

        fn of(&self, object: &Value) -> Option<String> {
            Some(format!("{} {}", object["metadata"]["name"], object["spec"]))
        }
    }

    #[test]
    fn the_rest_of_a_known_object_is_passed_over() {
        let list = r#"{"items":[{"metadata":{"name":"known"},"spec":{"a":[1,{"b":"}"}]},"status":{}},{"spec":1,"metadata":{"name":"known"}},
            {"metadata":{"name":"new"},"spec":2}]}"#;
        let mut page = Page { kept: Vec::new(), rest: None, version: String::new() };
        let seed = PageSeed { page: &mut page, keep: &Names };
        seed.deserialize(&mut serde_json::Deserializer::from_str(list)).expect("a list");
        assert_eq!(page.kept, ["known, by its metadata", "known, by its metadata", "\"new\" 2"]);
    }

    #[test]
    fn half_a_list_is_an_error() {
        assert!(read(r#"{"items":[{"metadata":{"name":"a"}},"#).is_err());
        assert!(read("[]").is_err());
        assert!(read("").is_err());
    }
}
