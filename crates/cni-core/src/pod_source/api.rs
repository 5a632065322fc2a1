//! Pods from the API server, within a deadline.

use super::{PodError, PodName, ReadPod};
use crate::logs::SCOPE;
use crate::sandboxed::RUNTIME_CLASSES;
use cluster_client::{ApiError, Backoff, Built, Request, kubeconfig, params::GetParams};
use serde_json::{Map, Value};
use std::{
    fmt::Display,
    path::Path,
    time::{Duration, Instant},
};

/// The pause before the second try; every further one is twice as long, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A shorter silence, which the deadline ended, does not show what is wrong.
const MEANINGFUL_SILENCE: Duration = Duration::from_secs(1);
/// How long one try may take: a connection that hangs must not use up the whole deadline.
const TRY_PATIENCE: Duration = Duration::from_secs(8);
/// How long refusals, and responses that no API server gives, are worth another try, counted from the first of them. The agent may be renewing
/// the token or the authority at this moment, and a role may be new; but if that does not help soon, it will not help at all, and the runtime
/// should receive the error.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(3);
/// What a kubelet writes on the pod that stands for a static one in the API server. Its UID differs from the static pod's.
const MIRROR: &str = "/metadata/annotations/kubernetes.io~1config.mirror";

/// Reads a pod. The pod has to have this UID, unless that is empty.
pub fn read(kubeconfig: &Path, pod: &PodName, uid: &str, tries: Tries) -> Result<ReadPod, PodError> {
    let pods = Request::new(format!("/api/v1/namespaces/{}/pods", pod.namespace));
    let request = || pods.get(&pod.name, &GetParams::default());
    let object = get(kubeconfig, tries, request, |found, server| {
        let absent = PodError::Absent(format!("pod {pod} (404)"));
        let found =
            found.map_err(|failure| failed(failure, kubeconfig, &format_args!("pod {pod}"), absent))?;
        check(&found, pod, uid, server)?;
        Ok(found)
    })?;
    ReadPod::new(pod, object, "")
}

/// The labels of a namespace.
pub fn namespace_labels(
    kubeconfig: &Path,
    namespace: &str,
    tries: Tries,
) -> Result<Map<String, Value>, PodError> {
    let request = || Request::new("/api/v1/namespaces").get(namespace, &GetParams::default());
    get(kubeconfig, tries, request, |found, server| {
        let found = found.map_err(|failure| {
            let absent = PodError::Absent(format!("namespace {namespace} (404), which the pod is in"));
            let mut error = failed(failure, kubeconfig, &format_args!("namespace {namespace}"), absent);
            if let PodError::Forbidden(words) = error {
                error = PodError::NamespaceForbidden(words);
            }
            error
        })?;
        labels(&found, namespace, server)
    })
}

/// The handler of a runtime class; none if the account may not read it, at once.
pub fn handler(kubeconfig: &Path, class: &str, tries: Tries) -> Result<Option<String>, PodError> {
    let request = || Request::new(RUNTIME_CLASSES).get(class, &GetParams::default());
    get(kubeconfig, tries, request, |found, server| {
        if let Err(ApiError::Forbidden(_)) = found {
            return Ok(None);
        }
        let absent = PodError::Absent(format!("RuntimeClass {class} (404), which the pod names"));
        let wanted = format_args!("RuntimeClass {class}");
        let found = found.map_err(|failure| failed(failure, kubeconfig, &wanted, absent))?;
        let handler = found.get("handler").and_then(Value::as_str).map(str::to_owned);
        handler.map(Some).ok_or_else(|| {
            let what = format!("requested the runtime class {class:?}, received no handler");
            garbled(server, what)
        })
    })
}

/// Requests an object, and has `take` pick from this server's response. Each try reads the kubeconfig
/// again and connects again: the agent may have renewed it, and what failed may be the connection.
fn get<T>(
    kubeconfig: &Path,
    tries: Tries,
    request: impl Fn() -> Built,
    take: impl Fn(Result<Value, ApiError>, &str) -> Result<T, PodError>,
) -> Result<T, PodError> {
    let deadline = tries.deadline;
    block_on(try_until(tries, async || {
        let client = kubeconfig::client(kubeconfig)?;
        let patience = TRY_PATIENCE.min(deadline.saturating_duration_since(Instant::now()));
        take(client.json(request(), patience).await, client.server())
    }))
}

fn block_on<T>(work: impl Future<Output = Result<T, PodError>>) -> Result<T, PodError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
        ApiError::Unreachable { server: "?".to_owned(), message: format!("no event loop: {error}") }
    })?;
    let read = runtime.block_on(work);
    // A look-up of the server's name may still be under way on a thread; it is not waited for.
    runtime.shutdown_background();
    read
}

/// Tries until a try succeeds; returns the last meaningful error if the deadline passes first, or sooner if trying again is of no use.
async fn try_until<T>(
    mut tries: Tries,
    one_try: impl AsyncFn() -> Result<T, PodError>,
) -> Result<T, PodError> {
    let start = Instant::now();
    let mut before = None;
    loop {
        let failed = match one_try().await {
            Ok(done) => return Ok(done),
            Err(failed) => failed,
        };
        let Some(pause) = tries.failed(&failed, Instant::now()) else {
            return Err(before.filter(|_| was_cut_short(&failed)).unwrap_or(failed));
        };
        log::debug!(target: SCOPE, milliseconds = start.elapsed().as_millis() as u64; "{failed}; trying again");
        before = Some(failed);
        tokio::time::sleep(pause).await;
    }
}

/// Whether the try had so little time left that its failure would only hide why the one before failed.
fn was_cut_short(failed: &PodError) -> bool {
    matches!(failed, PodError::Api(ApiError::Silent { patience, .. }) if *patience < MEANINGFUL_SILENCE)
}

/// When to try again.
pub struct Tries {
    deadline: Instant,
    is_once: bool,
    pauses: Backoff,
    /// When the present run of refusals began: the first that no other failure came after.
    refused: Option<Instant>,
}

impl Tries {
    /// Until the deadline.
    pub fn until(deadline: Instant) -> Self {
        Self::new(deadline, Backoff::new(FIRST_PAUSE, LONGEST_PAUSE))
    }

    /// One, which ends at the deadline.
    pub fn once(deadline: Instant) -> Self {
        Self { is_once: true, ..Self::until(deadline) }
    }

    const fn new(deadline: Instant, pauses: Backoff) -> Self {
        Self { deadline, is_once: false, pauses, refused: None }
    }

    /// The pause before the next try, if any.
    fn failed(&mut self, failed: &PodError, now: Instant) -> Option<Duration> {
        if self.is_once {
            return None;
        }
        let last = match failed {
            PodError::Unauthorized { .. }
            | PodError::Forbidden(_)
            | PodError::NamespaceForbidden(_)
            | PodError::Api(ApiError::Untrusted { .. } | ApiError::Garbled { .. })
            | PodError::Another { .. } => {
                self.deadline.min(*self.refused.get_or_insert(now) + REFUSAL_PATIENCE)
            }
            PodError::Absent(_) | PodError::Api(_) | PodError::Busy { .. } => {
                self.refused = None;
                self.deadline
            }
            PodError::Kubeconfig(_)
            | PodError::Unreadable { .. }
            | PodError::Folder { .. }
            | PodError::NoManifest { .. } => return None,
        };
        let retry_after = if let PodError::Busy { retry_after, .. } = failed { *retry_after } else { None };
        let pause = self.pauses.pause(retry_after);
        (now + pause < last).then_some(pause)
    }
}

/// The labels of the namespace, if it is the requested one.
fn labels(found: &Value, namespace: &str, server: &str) -> Result<Map<String, Value>, PodError> {
    let text = |pointer: &str| found.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let labels = found.pointer("/metadata/labels").filter(|labels| !labels.is_null());
    let is_it = text("/kind") == "Namespace" && text("/metadata/name") == namespace;
    match labels {
        None if is_it => Ok(Map::new()),
        Some(Value::Object(labels)) if is_it => Ok(labels.clone()),
        None | Some(_) => {
            let (kind, name) = (text("/kind"), text("/metadata/name"));
            let what = format!("requested namespace {namespace}, received {kind:?} {name:?}");
            Err(garbled(server, what.chars().take(300).collect()))
        }
    }
}

/// Whether it is the requested pod.
pub(super) fn check(found: &Value, pod: &PodName, uid: &str, server: &str) -> Result<(), PodError> {
    let text = |pointer: &str| found.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (kind, namespace, name) = (text("/kind"), text("/metadata/namespace"), text("/metadata/name"));
    if kind != "Pod" || namespace != pod.namespace || name != pod.name {
        let what = format!("requested pod {pod}, received {kind:?} {name:?} in namespace {namespace:?}");
        return Err(garbled(server, what.chars().take(300).collect()));
    }
    let found_uid = text("/metadata/uid");
    if uid.is_empty() || uid == found_uid || found.pointer(MIRROR).is_some() {
        return Ok(());
    }
    Err(PodError::Another {
        pod: pod.clone(),
        found: found_uid.chars().take(64).collect(),
        wanted: uid.chars().take(64).collect(),
    })
}

fn garbled(server: &str, what: String) -> PodError {
    ApiError::Garbled { server: server.to_owned(), what }.into()
}

/// `absent`: that the server has no such object.
fn failed(failure: ApiError, kubeconfig: &Path, wanted: &dyn Display, absent: PodError) -> PodError {
    match failure {
        ApiError::Impossible(problem) => {
            PodError::Unreadable { what: wanted.to_string(), problems: vec![problem] }
        }
        ApiError::Unauthorized(words) => {
            PodError::Unauthorized { kubeconfig: kubeconfig.to_owned(), message: words.text }
        }
        ApiError::Forbidden(words) => PodError::Forbidden(words.text),
        ApiError::NotFound(words) if words.by_api => absent,
        ApiError::NotFound(words) => PodError::Busy { code: 404, message: words.text, retry_after: None },
        ApiError::Busy { code, words, retry_after } => {
            PodError::Busy { code, message: words.text, retry_after }
        }
        ApiError::Garbled { .. }
        | ApiError::Untrusted { .. }
        | ApiError::Unreachable { .. }
        | ApiError::Silent { .. } => failure.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::cell::Cell;

    const SECOND: Duration = Duration::from_secs(1);

    /// When the tries begin that fail with these errors, the last of them repeatedly, where each takes this long.
    fn tries(errors: &[PodError], deadline: Duration, each: Duration) -> Vec<Duration> {
        let start = Instant::now();
        let pauses = Backoff::with_random(FIRST_PAUSE, LONGEST_PAUSE, || 0.0);
        let mut tries = Tries::new(start + deadline, pauses);
        let mut begun = vec![Duration::ZERO];
        loop {
            let (last, error) = (begun[begun.len() - 1], &errors[begun.len().min(errors.len()) - 1]);
            match tries.failed(error, start + last + each) {
                Some(pause) => begun.push(last + each + pause),
                None => return begun,
            }
        }
    }

    fn busy(retry_after: Option<Duration>) -> PodError {
        PodError::Busy { code: 503, message: String::new(), retry_after }
    }

    fn forbidden() -> PodError {
        PodError::Forbidden(String::new())
    }

    #[test]
    fn tries_go_on_until_the_deadline_and_no_longer() {
        let begun = [0, 50, 150, 350].map(Duration::from_millis);
        assert_eq!(tries(&[busy(None)], Duration::from_millis(750), Duration::ZERO), begun);
        assert!(
            tries(&[busy(None)], 600 * SECOND, Duration::ZERO).len() > 600,
            "the pauses do not grow for ever"
        );
    }

    /// The error after a try that fails with `first`, and a second one that is silent until the deadline, for this long.
    fn error_after(first: &PodError, silence: Duration) -> PodError {
        let pauses = Backoff::with_random(FIRST_PAUSE, LONGEST_PAUSE, || 0.0);
        let tries = Tries::new(Instant::now() + FIRST_PAUSE + Duration::from_millis(1), pauses);
        let begun = Cell::new(0);
        let failed = block_on(try_until(tries, async || {
            begun.set(begun.get() + 1);
            if begun.get() == 1 {
                return Err::<(), _>(first.clone());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
            Err(silent(silence))
        }));
        failed.unwrap_err()
    }

    fn silent(patience: Duration) -> PodError {
        ApiError::Silent { server: "https://10.0.0.1".to_owned(), patience }.into()
    }

    #[test]
    fn a_try_that_is_cut_short_does_not_hide_why_the_one_before_failed() {
        assert_eq!(error_after(&busy(None), SECOND - Duration::from_millis(1)), busy(None));
        assert_eq!(
            error_after(&silent(8 * SECOND), Duration::ZERO),
            silent(8 * SECOND),
            "the longer silence"
        );
        assert!(!was_cut_short(&silent(SECOND)), "a second of silence is a sign");
    }

    #[test]
    fn one_try_is_one_whatever_it_meets() {
        for error in [busy(None), forbidden()] {
            assert_eq!(Tries::once(Instant::now() + SECOND).failed(&error, Instant::now()), None);
        }
    }

    #[test]
    fn a_server_that_asks_for_time_gets_it() {
        let later = busy(Some(2 * SECOND));
        let begun = tries(&[later], 5 * SECOND, Duration::ZERO);
        assert_eq!(begun, [Duration::ZERO, 2 * SECOND, 4 * SECOND]);
    }

    #[test]
    fn what_trying_does_not_mend_is_tried_once() {
        let error = kubeconfig::KubeconfigError::Missing { path: "/x".into() };
        let error = PodError::Kubeconfig(error);
        assert_eq!(tries(&[error], 10 * SECOND, Duration::ZERO).len(), 1);
    }

    #[test]
    fn refusals_are_tried_for_a_while() {
        for error in [forbidden(), garbled("https://10.0.0.1", "a page to sign in".to_owned())] {
            let begun = tries(&[error], 600 * SECOND, Duration::ZERO);
            let last = begun[begun.len() - 1];
            assert!(last < REFUSAL_PATIENCE && last > REFUSAL_PATIENCE / 2, "{begun:?}");
        }
    }

    /// A server that has just come back may refuse for a moment, however long it was away.
    #[test]
    fn the_first_refusal_begins_the_while() {
        let mut errors: Vec<PodError> = (0..20).map(|_| busy(None)).collect();
        errors.push(forbidden());
        let begun = tries(&errors, 600 * SECOND, Duration::ZERO);
        assert!(begun[20] > REFUSAL_PATIENCE && begun.len() > 22, "{begun:?}");
    }

    #[test]
    fn a_refusal_is_tried_again_on_a_machine_that_stands_still() {
        assert_eq!(tries(&[forbidden()], 600 * SECOND, 60 * SECOND).len(), 2);
    }

    #[test]
    fn only_the_pod_that_was_asked_for_is_taken() {
        let pod = PodName { namespace: "shop".into(), name: "cart".into() };
        let object = |kind: &str, namespace: &str, name: &str| json!({"kind": kind, "metadata": {"namespace": namespace, "name": name, "uid": "u-1"}});
        let checked = |found: &Value, uid: &str| check(found, &pod, uid, "https://x");
        assert_eq!(checked(&object("Pod", "shop", "cart"), ""), Ok(()));
        assert_eq!(checked(&object("Pod", "shop", "cart"), "u-1"), Ok(()));
        for other in [
            object("Pod", "shop", "till"),
            object("Pod", "bank", "cart"),
            object("Job", "shop", "cart"),
            json!([]),
        ] {
            let error = checked(&other, "").unwrap_err();
            assert!(matches!(error, PodError::Api(ApiError::Garbled { .. })), "{error}");
        }
        let error = checked(&object("Pod", "shop", "cart"), "u-2").unwrap_err();
        assert!(error.to_string().ends_with("its UID is u-1, not u-2"), "{error}");
        let mut mirror = object("Pod", "shop", "cart");
        mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "u-2"});
        assert_eq!(checked(&mirror, "u-2"), Ok(()));
    }

    #[test]
    fn only_the_namespace_that_was_asked_for_is_taken() {
        let namespace = |kind: &str, name: &str, labels: Value| json!({"kind": kind, "metadata": {"name": name, "labels": labels}});
        let read = |found: &Value| labels(found, "shop", "https://x").map(|labels| labels.len());
        assert_eq!(read(&namespace("Namespace", "shop", json!({"a": "b"}))), Ok(1));
        assert_eq!(read(&namespace("Namespace", "shop", json!(null))), Ok(0));
        for other in [
            namespace("Namespace", "bank", json!({})),
            namespace("Pod", "shop", json!({})),
            namespace("Namespace", "shop", json!([])),
            json!(7),
        ] {
            let error = read(&other).unwrap_err();
            assert!(matches!(error, PodError::Api(ApiError::Garbled { .. })), "{error}");
        }
    }
}
