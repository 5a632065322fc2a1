//! Requests within limits.

use crate::failure::{ApiError, StatusMessage, short};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Request, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, LOCATION, RETRY_AFTER},
};
use kube::{client::Body, core::request};
use serde::{Deserialize, de::DeserializeOwned};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How long a connection may take to come about.
pub(crate) const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// The most that is read of what a server says about a failure.
const MOST_WORDS: usize = 64 << 10;
/// The most an object may have. The store behind an API server takes 1.5 MiB.
const MOST_OBJECT: usize = 8 << 20;

/// A request, unless it has a name that no object has.
pub type Built = Result<Request<Vec<u8>>, request::Error>;

/// A client of one API server. Clones share connections.
#[derive(Clone)]
pub struct Client {
    inner: kube::Client,
    server: Arc<str>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Client {
    pub(crate) fn new(inner: kube::Client, server: String) -> Self {
        Self { inner, server: server.into() }
    }

    /// The server's address, for messages.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Sends a request and reads the whole answer, which is to be one object, as JSON of a type. `patience`: from the request to the last byte.
    ///
    /// # Errors
    /// Why none is available.
    pub async fn json<T: DeserializeOwned>(&self, request: Built, patience: Duration) -> Result<T, ApiError> {
        let deadline = Instant::now() + patience;
        let mut answer = self.open(request, patience).await?;
        let bytes = answer.whole(MOST_OBJECT, deadline).await;
        let bytes = bytes.map_err(|failure| failure.within(patience))?;
        serde_json::from_slice(&bytes).map_err(|error| answer.no_json(&bytes, &error))
    }

    /// The same for an object that may not exist; none if the API server reports that it does not.
    ///
    /// # Errors
    /// As [`Client::json`].
    pub async fn find<T: DeserializeOwned>(
        &self,
        request: Built,
        patience: Duration,
    ) -> Result<Option<T>, ApiError> {
        match self.json(request, patience).await {
            Err(ApiError::NotFound(words)) if words.by_api => Ok(None),
            found => found.map(Some),
        }
    }

    /// Sends a request and waits for the beginning of the answer, which must be one of success.
    ///
    /// # Errors
    /// Why none arrived.
    pub async fn open(&self, request: Built, patience: Duration) -> Result<ApiResponse, ApiError> {
        let request = request.map_err(|error| ApiError::Impossible(error.to_string()))?;
        let deadline = Instant::now() + patience;
        let sent = tokio::time::timeout(patience, self.inner.send(request.map(Body::from))).await;
        let response = match sent {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(ApiError::of_transport(&error, &self.server)),
            Err(_) => return Err(ApiError::Silent { server: self.server.to_string(), patience }),
        };
        let (head, body) = response.into_parts();
        let kind = text_of(&head.headers, CONTENT_TYPE);
        let mut answer = ApiResponse { body, rest: Vec::new(), kind, server: self.server.clone() };
        if head.status.is_success() {
            return Ok(answer);
        }
        if head.status.is_redirection() || head.status.is_informational() {
            let to = text_of(&head.headers, LOCATION);
            return Err(answer.garbled(format!("it answers {}, to {to:?}", head.status)));
        }
        // The status says enough where the words do not come.
        let text = answer.whole(MOST_WORDS, deadline).await.unwrap_or_default();
        Err(refusal(head.status, &head.headers, words(&text, &answer.kind)))
    }
}

/// An answer whose body has not been read yet.
#[derive(Debug)]
pub struct ApiResponse {
    body: Body,
    /// The beginning of a line that has not ended yet.
    rest: Vec<u8>,
    kind: String,
    server: Arc<str>,
}

impl ApiResponse {
    /// The next piece of the body; none at its end.
    ///
    /// # Errors
    /// The connection broke, or nothing came for so long.
    pub async fn piece(&mut self, patience: Duration) -> Result<Option<Bytes>, ApiError> {
        loop {
            let Ok(frame) = tokio::time::timeout(patience, self.body.frame()).await else {
                return Err(ApiError::Silent { server: self.server.to_string(), patience });
            };
            match frame {
                None => return Ok(None),
                // Skip trailers.
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => return Err(ApiError::of_transport(&error, &self.server)),
            }
        }
    }

    /// The next line that is JSON of a type, as watches send them; none at the end.
    ///
    /// # Errors
    /// As [`ApiResponse::piece`], or it is too long or something else.
    pub async fn line<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<Option<T>, ApiError> {
        let deadline = Instant::now() + patience;
        let mut searched = 0;
        loop {
            let end = self.rest[searched..].iter().position(|byte| *byte == b'\n');
            if let Some(end) = end.map(|end| searched + end) {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                searched = 0;
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let read = serde_json::from_slice(&line).map(Some);
                return read.map_err(|error| self.no_json(line.trim_ascii(), &error));
            }
            searched = self.rest.len();
            let left = deadline.saturating_duration_since(Instant::now());
            match self.piece(left).await {
                Ok(Some(piece)) if self.rest.len() + piece.len() <= MOST_OBJECT => {
                    self.rest.extend_from_slice(&piece);
                }
                Ok(Some(_)) => {
                    return Err(self.garbled(format!("a line of more than {MOST_OBJECT} bytes")));
                }
                Ok(None) if self.rest.trim_ascii().is_empty() => return Ok(None),
                Ok(None) => return Err(self.garbled("the response ends mid-line".to_owned())),
                Err(failure) => return Err(failure.within(patience)),
            }
        }
    }

    /// All of the body.
    ///
    /// # Errors
    /// As [`ApiResponse::piece`], or it is too large.
    pub async fn whole(&mut self, most: usize, deadline: Instant) -> Result<Vec<u8>, ApiError> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece(deadline.saturating_duration_since(Instant::now())).await? {
            if all.len() + piece.len() > most {
                return Err(self.garbled(format!("its answer has more than {most} bytes")));
            }
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }

    fn garbled(&self, what: String) -> ApiError {
        ApiError::Garbled { server: self.server.to_string(), what }
    }

    fn no_json(&self, bytes: &[u8], error: &serde_json::Error) -> ApiError {
        self.garbled(what_is_wrong(bytes, &self.kind, error))
    }
}

fn refusal(status: StatusCode, headers: &HeaderMap, words: StatusMessage) -> ApiError {
    match status.as_u16() {
        401 => ApiError::Unauthorized(words),
        403 => ApiError::Forbidden(words),
        404 => ApiError::NotFound(words),
        code => {
            // A date is also allowed; API servers say seconds.
            let seconds = text_of(headers, RETRY_AFTER).trim().parse().ok();
            ApiError::Busy { code, words, retry_after: seconds.map(Duration::from_secs) }
        }
    }
}

/// What a server says about a failure: the message of a Status, else the beginning of whatever it is.
fn words(text: &[u8], kind: &str) -> StatusMessage {
    #[derive(Deserialize)]
    struct Status {
        kind: String,
        #[serde(default)]
        message: String,
    }
    match serde_json::from_slice::<Status>(text) {
        Ok(status) if status.kind == "Status" => StatusMessage { text: short(&status.message), by_api: true },
        Ok(_) | Err(_) => {
            let line = String::from_utf8_lossy(text);
            let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
            let text = format!("not in the words of an API server ({}): {line}", named(kind));
            StatusMessage { text: short(&text), by_api: false }
        }
    }
}

fn what_is_wrong(bytes: &[u8], kind: &str, error: &serde_json::Error) -> String {
    match error.classify() {
        _ if bytes.is_empty() => "its answer is empty".to_owned(),
        serde_json::error::Category::Eof => format!("its answer is cut off after {} bytes", bytes.len()),
        serde_json::error::Category::Data => format!("cannot decode the response: {error}"),
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => {
            format!("the response is not JSON ({})", named(kind))
        }
    }
}

fn named(kind: &str) -> String {
    if kind.is_empty() { "of no stated type".to_owned() } else { short(kind) }
}

fn text_of(headers: &HeaderMap, name: hyper::header::HeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).map(short).unwrap_or_default()
}
