//! Tokens for the plugin's own service account.

use std::time::Duration;

use cluster_client::params::{GetParams, PostParams};
use cluster_client::{ApiError, Built, Request, RequestError};
use reasons::AgentReason;
use serde::Deserialize;
use serde_json::{Value, json};

use super::pods::of_namespace;
use super::{ApiHandle, Cluster};

/// A token that the API server granted.
#[derive(Clone, PartialEq, Eq)]
pub struct Granted {
    /// The token.
    pub text: String,
    /// Whether it ends with the node as well.
    pub of_node: bool,
}

impl std::fmt::Debug for Granted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Granted").field("of_node", &self.of_node).finish_non_exhaustive()
    }
}

/// Why no token was granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The service account does not exist, or lacks the plugin's rights: its tokens are useless.
    #[error("{0}")]
    Useless(String),
    /// The agent may not request one. Earlier tokens stay valid.
    #[error("{0}")]
    Refused(String),
    /// It may work later.
    #[error("{text}")]
    Failed {
        /// What happened.
        text: String,
        /// When the API server wants the next request.
        retry_after: Option<Duration>,
    },
}

impl TokenError {
    /// The reason for it in metrics.
    #[must_use]
    pub const fn reason(&self) -> AgentReason {
        match self {
            Self::Useless(_) | Self::Refused(_) => AgentReason::Refused,
            Self::Failed { .. } => AgentReason::Failed,
        }
    }
}

impl From<ApiError> for TokenError {
    fn from(failure: ApiError) -> Self {
        Self::Failed { retry_after: failure.retry_after(), text: failure.to_string() }
    }
}

/// The part of the response that counts.
#[derive(Deserialize)]
struct TokenRequest {
    status: Status,
}

#[derive(Deserialize)]
struct Status {
    token: String,
}

/// A token of a service account in the agent's namespace. It is not bound to a pod, so it outlasts the agent; it is bound to the node if the
/// API server supports that (Kubernetes 1.31 and later), so it ends with the node.
///
/// # Errors
/// Why the API server did not grant one.
pub async fn request(cluster: &Cluster, account: &str, lifetime: Duration) -> Result<Granted, TokenError> {
    let node = &cluster.identity().node;
    if !node.is_empty() {
        let reference = json!({"apiVersion": "v1", "kind": "Node", "name": node});
        match request_bound(cluster, account, lifetime, Some(&reference)).await {
            Ok(text) => return Ok(Granted { text, of_node: true }),
            // The API server does not bind to nodes, or does not know this one.
            Err(ApiError::Busy { code: 400 | 409 | 422, .. } | ApiError::NotFound(_)) => {}
            Err(failure) => return Err(refused(failure, account)),
        }
    }
    match request_bound(cluster, account, lifetime, None).await {
        Ok(text) => Ok(Granted { text, of_node: false }),
        Err(failure) => Err(refused(failure, account)),
    }
}

async fn request_bound(
    cluster: &Cluster,
    account: &str,
    lifetime: Duration,
    bound: Option<&Value>,
) -> Result<String, ApiError> {
    let request = token_request(&cluster.identity().namespace, account, lifetime, bound);
    let response: TokenRequest = cluster.json(request).await?;
    Ok(response.status.token)
}

fn token_request(namespace: &str, account: &str, lifetime: Duration, bound: Option<&Value>) -> Built {
    let mut object = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": {"expirationSeconds": lifetime.as_secs()},
    });
    if let Some(bound) = bound {
        object["spec"]["boundObjectRef"] = bound.clone();
    }
    let data = serde_json::to_vec(&object).map_err(RequestError::SerializeBody)?;
    let accounts = Request::new(format!("/api/v1/namespaces/{namespace}/serviceaccounts"));
    accounts.create_subresource("token", account, &PostParams::default(), data)
}

fn refused(failure: ApiError, account: &str) -> TokenError {
    match failure {
        ApiError::NotFound(words) if words.by_api => {
            TokenError::Useless(format!("service account {account} not found"))
        }
        ApiError::Forbidden(words) if words.by_api => TokenError::Refused(format!(
            "the agent may not request tokens of service account {account} (403): {}",
            words.text
        )),
        ApiError::Impossible(_)
        | ApiError::Unauthorized(_)
        | ApiError::Forbidden(_)
        | ApiError::NotFound(_)
        | ApiError::Busy { .. }
        | ApiError::Garbled { .. }
        | ApiError::Untrusted { .. }
        | ApiError::Unreachable { .. }
        | ApiError::Silent { .. } => failure.into(),
    }
}

/// Whether the plugin could read with a token what it needs: pods, and in ambient mode their namespaces; none if that cannot be determined now.
pub async fn is_accepted(
    connection: &ApiHandle,
    token: &str,
    reads_namespaces: bool,
) -> Option<Result<(), String>> {
    let cluster = connection.with_token(token).ok()?;
    let (namespace, pod) = (&cluster.identity().namespace, &cluster.identity().pod);
    let pods = of_namespace(namespace).get(pod, &GetParams::default());
    let namespaces =
        reads_namespaces.then(|| Request::new("/api/v1/namespaces").get(namespace, &GetParams::default()));
    for request in [Some(pods), namespaces].into_iter().flatten() {
        match cluster.find::<Value>(request).await {
            Ok(Some(_) | None) => {}
            Err(failure) if failure.is_refusal() => return Some(Err(failure.to_string())),
            Err(_) => return None,
        }
    }
    Some(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_account_time_and_node() {
        let node = json!({"apiVersion": "v1", "kind": "Node", "name": "node-1"});
        let request =
            token_request("mesh", "plugin", Duration::from_secs(3600), Some(&node)).expect("a request");
        assert_eq!(request.uri().path(), "/api/v1/namespaces/mesh/serviceaccounts/plugin/token");
        let body: Value = serde_json::from_slice(request.body()).expect("JSON");
        assert_eq!(body["spec"], json!({"expirationSeconds": 3600, "boundObjectRef": node}));
    }

    #[test]
    fn a_granted_token_is_not_shown() {
        let granted = Granted { text: "s3cret".to_owned(), of_node: true };
        assert!(!format!("{granted:?}").contains("s3cret"));
    }
}
