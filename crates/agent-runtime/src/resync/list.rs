//! Lists, read as they arrive: no list is ever in memory as a whole.

use std::io::{self, Read};
use std::time::Duration;

use api_lists::{Keep, ListError, ListLimits, Listing, Page};
use cluster_client::params::ListParams;
use cluster_client::{Built, Request, RequestError};
use hyper::body::Bytes;
use hyper::http::uri::InvalidUri;
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
pub struct ListContent<T> {
    /// What was kept.
    pub kept: Vec<T>,
    /// The version that the list shows.
    pub version: String,
}

/// A collection of the API, and what its lists are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListSource {
    /// The path of the collection.
    pub path: String,
    /// The kind of its lists, such as `PodList`.
    pub kind: &'static str,
    /// How much a list may have.
    pub limits: ListLimits,
}

impl Cluster {
    /// What `keep` keeps of the objects of a collection, decided on another thread.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn list<K>(
        &self,
        source: &ListSource,
        of: &Selection,
        freshness: Freshness,
        keep: K,
    ) -> Result<ListContent<K::Kept>, ReadError>
    where
        K: Keep<Kept: Send> + Clone + Send + 'static,
    {
        let read = async {
            let mut listing = Listing::new(source.kind, source.limits);
            let (mut kept, mut rest) = (Vec::new(), None);
            loop {
                let request = page_request(&source.path, of, freshness, rest.take());
                let page;
                (page, listing) = self.page(request, listing, keep.clone()).await?;
                kept.extend(page.kept);
                match page.rest {
                    Some(token) => rest = Some(token),
                    None => return Ok(ListContent { kept, version: page.version }),
                }
            }
        };
        let slow = || ReadError::failed(format!("the list is not complete within {LIST_PATIENCE:?}"));
        tokio::time::timeout(LIST_PATIENCE, read).await.map_err(|_| slow())?
    }

    async fn page<K>(
        &self,
        request: Built,
        mut listing: Listing,
        keep: K,
    ) -> Result<(Page<K::Kept>, Listing), ReadError>
    where
        K: Keep<Kept: Send> + Send + 'static,
    {
        let mut answer = self.client().open(request, PATIENCE).await?;
        let (send, pieces) = mpsc::channel(PIECES);
        let parser = tokio::task::spawn_blocking(move || {
            let text = Pieces { pieces, piece: io::Cursor::default() };
            listing.page(text, &keep).map(|page| (page, listing))
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
        parsed.map_err(|error: ListError| ReadError::failed(error.to_string()))
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
