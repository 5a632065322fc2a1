//! What the agent changes about pods: only one that is as it was seen.

use cluster_client::params::{DeleteParams, Patch, PatchParams, Preconditions};
use cluster_client::{ApiError, Built, Limits, Request};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Value, json};

use super::{Cluster, PATIENCE, pod_reference};

/// A pod as it was seen.
#[derive(Debug, Clone, Copy)]
pub struct SeenPod<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Which of all pods that ever had this name.
    pub uid: &'a str,
    /// Which version of it.
    pub version: &'a str,
}

/// Why a pod was not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It is gone, or another one has its name.
    #[error("the pod is gone")]
    Gone,
    /// It is not as it was seen any more.
    #[error("the pod changed meanwhile")]
    Changed,
    /// The server refuses (401, 403).
    #[error("{0}")]
    Refused(String),
    /// The server does not want it, whenever it is asked.
    #[error("{0}")]
    Rejected(String),
    /// No answer, or none that says whether it was done.
    #[error("{0}")]
    Unanswered(ApiError),
}

impl From<ApiError> for ChangeError {
    fn from(failure: ApiError) -> Self {
        match &failure {
            ApiError::NotFound(words) if words.by_api => Self::Gone,
            ApiError::Busy { code: 409, .. } => Self::Changed,
            ApiError::Unauthorized(_) | ApiError::Forbidden(_) => Self::Refused(failure.to_string()),
            ApiError::Busy { code: 400..=499, .. } if !is_for_later(&failure) => {
                Self::Rejected(failure.to_string())
            }
            ApiError::Impossible(_) => Self::Rejected(failure.to_string()),
            ApiError::NotFound(_)
            | ApiError::Busy { .. }
            | ApiError::Garbled { .. }
            | ApiError::Untrusted { .. }
            | ApiError::Unreachable { .. }
            | ApiError::Silent { .. } => Self::Unanswered(failure),
        }
    }
}

/// 408 and 429 are about the moment, not about the request.
const fn is_for_later(failure: &ApiError) -> bool {
    matches!(failure, ApiError::Busy { code: 408 | 429, .. })
}

impl SeenPod<'_> {
    /// For events about it.
    #[must_use]
    pub fn reference(&self) -> ObjectReference {
        pod_reference(self.namespace, self.name, Some(self.uid))
    }

    fn collection(&self) -> Request {
        Request::new(format!("/api/v1/namespaces/{}/pods", self.namespace))
    }

    /// The version is tested first: a patch is applied to the pod as it is, and what it says was worked out on what was seen.
    fn label_request(&self, has_labels: bool, (key, value): (&str, &str)) -> Built {
        let add = if has_labels {
            // RFC 6901
            let key = key.replace('~', "~0").replace('/', "~1");
            json!({"op": "add", "path": format!("/metadata/labels/{key}"), "value": value})
        } else {
            json!({"op": "add", "path": "/metadata/labels", "value": {key: value}})
        };
        let patch = Patch::Merge(json!([
            {"op": "test", "path": "/metadata/uid", "value": self.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": self.version},
            add,
        ]));
        let pods = self.collection();
        let mut request = pods.patch_subresource("status", self.name, &PatchParams::default(), &patch)?;
        // The library's own JSON patches need two more crates, and are the same bytes.
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json-patch+json"));
        Ok(request)
    }
}

impl Cluster {
    /// Deletes a pod, with the grace period it asks for, if it is as it was seen.
    ///
    /// # Errors
    /// Why it was not deleted.
    pub async fn delete_pod(&self, pod: &SeenPod<'_>) -> Result<(), ChangeError> {
        let seen =
            Preconditions { uid: Some(pod.uid.to_owned()), resource_version: Some(pod.version.to_owned()) };
        let request = pod.collection().delete(pod.name, &DeleteParams::default().preconditions(seen));
        let done = self.client.json::<Value>(request, Limits::object(PATIENCE)).await;
        Ok(done.map(drop)?)
    }

    /// Gives a pod a label, if it is as it was seen; `has_labels` says whether it then had a field of labels.
    ///
    /// # Errors
    /// Why it was not labelled.
    pub async fn label_pod(
        &self,
        pod: &SeenPod<'_>,
        has_labels: bool,
        (key, value): (&str, &str),
    ) -> Result<(), ChangeError> {
        let request = pod.label_request(has_labels, (key, value));
        let done = self.client.json::<Value>(request, Limits::object(PATIENCE)).await;
        match done.map_err(ChangeError::from) {
            Ok(_) => Ok(()),
            // A test that fails is answered as a patch that is wrong: only the pod can tell.
            Err(ChangeError::Rejected(why)) => match self.pod(pod.namespace, pod.name).await {
                Ok(Some(now)) if now["metadata"]["uid"] != pod.uid => Err(ChangeError::Gone),
                Ok(None) => Err(ChangeError::Gone),
                Ok(Some(now)) if now["metadata"]["resourceVersion"] != pod.version => {
                    Err(ChangeError::Changed)
                }
                Ok(Some(_)) | Err(_) => Err(ChangeError::Rejected(why)),
            },
            Err(error) => Err(error),
        }
    }
}
