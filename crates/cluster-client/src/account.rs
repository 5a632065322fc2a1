//! A service account's files, and the client that is made of them, and made again when they change.

use crate::{Access, AccessError, Client, files};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use kube::config::{AuthInfo, Cluster, Context, Kubeconfig, NamedAuthInfo, NamedCluster, NamedContext};
use std::{
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// The address of a server that variables name by its parts: an IPv6 address gets brackets.
#[must_use]
pub fn server_url(protocol: &str, host: &str, port: &str) -> String {
    if host.contains(':') {
        format!("{protocol}://[{host}]:{port}")
    } else {
        format!("{protocol}://{host}:{port}")
    }
}

/// How a server is trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// By the authority in this file.
    Authority(PathBuf),
    /// Blindly.
    Unverified,
}

/// A server, and a service account's files.
pub struct Account {
    server: String,
    trust: Trust,
    token: PathBuf,
    made: Mutex<Option<Made>>,
}

/// A client, and the texts it was made of.
struct Made {
    texts: Texts,
    client: Client,
}

#[derive(PartialEq, Eq)]
struct Texts {
    token: String,
    authority: Option<Vec<u8>>,
}

impl std::fmt::Debug for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Account").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Account {
    /// Nothing is read yet.
    #[must_use]
    pub const fn new(server: String, trust: Trust, token: PathBuf) -> Self {
        Self { server, trust, token, made: Mutex::new(None) }
    }

    /// A client with token and authority as they are at this moment. Needs a tokio runtime.
    ///
    /// Where the files cannot be read any more, the client made of them before goes on.
    ///
    /// # Errors
    /// The files cannot be read, or no client can be made of them.
    pub fn client(&self) -> Result<Client, AccessError> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let texts = match (self.texts(), &*made) {
            (Ok(texts), Some(made)) if texts == made.texts => return Ok(made.client.clone()),
            (Ok(texts), _) => texts,
            (Err(_), Some(made)) => return Ok(made.client.clone()),
            (Err(error), None) => return Err(error),
        };
        let client = client_for(&self.server, texts.authority.as_deref(), &texts.token)?;
        *made = Some(Made { texts, client: client.clone() });
        Ok(client)
    }

    /// A client of the same server, trusted in the same way, for another program.
    ///
    /// # Errors
    /// The authority cannot be read, or no client can be made of it.
    pub fn client_with(&self, token: &str) -> Result<Client, AccessError> {
        client_for(&self.server, self.authority()?.as_deref(), token)
    }

    fn texts(&self) -> Result<Texts, AccessError> {
        let token = files::read_text(&self.token, files::TOKEN)
            .map_err(|error| unreadable("token", &self.token, &error))?;
        Ok(Texts { token: token.trim().to_owned(), authority: self.authority()? })
    }

    fn authority(&self) -> Result<Option<Vec<u8>>, AccessError> {
        match &self.trust {
            Trust::Authority(path) => files::read(path, files::CERTIFICATES)
                .map(Some)
                .map_err(|error| unreadable("certificate authority", path, &error)),
            Trust::Unverified => Ok(None),
        }
    }
}

fn unreadable(what: &str, path: &Path, error: &std::io::Error) -> AccessError {
    AccessError(format!("cannot use the {what} in {}: {error}", path.display()))
}

fn client_for(server: &str, authority: Option<&[u8]>, token: &str) -> Result<Client, AccessError> {
    if token.is_empty() || token.contains(|c: char| !c.is_ascii_graphic()) {
        return Err(AccessError("the token is empty or has characters that no token has".to_owned()));
    }
    let name = || "local".to_owned();
    let cluster = Cluster {
        server: Some(server.to_owned()),
        certificate_authority_data: authority.map(|pem| STANDARD.encode(pem)),
        insecure_skip_tls_verify: Some(authority.is_none()),
        ..Cluster::default()
    };
    let user = AuthInfo { token: Some(token.to_owned().into()), ..AuthInfo::default() };
    let context = Context { cluster: name(), user: Some(name()), ..Context::default() };
    let access = Access::of(Kubeconfig {
        clusters: vec![NamedCluster { name: name(), cluster: Some(cluster), ..NamedCluster::default() }],
        auth_infos: vec![NamedAuthInfo { name: name(), auth_info: Some(user), ..NamedAuthInfo::default() }],
        contexts: vec![NamedContext { name: name(), context: Some(context), ..NamedContext::default() }],
        current_context: Some(name()),
        ..Kubeconfig::default()
    });
    access.map_err(|error| AccessError(error.to_string()))?.client()
}
