//! Pods from the API server, within a deadline.

use super::{PodError, PodName, kubeconfig, pod_facts};
use crate::logs::SCOPE;
use kube::core::{Request, params::GetParams};
use redirect_core::pod::PodFacts;
use serde_json::Value;
use std::{
    error::Error,
    io,
    path::Path,
    time::{Duration, Instant},
};

/// The pause before the second try; every further one is twice as long, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long one try may take: a connection that hangs must not use up the whole deadline.
const TRY_PATIENCE: Duration = Duration::from_secs(8);
/// How long refusals are worth another try. The agent may be renewing the token or the authority this moment, and a
/// role may be new; but when that does not help soon it will not help at all, and the runtime should hear of it.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(3);

/// Reads a pod, trying until the deadline.
pub fn read(kubeconfig: &Path, pod: &PodName, deadline: Instant) -> Result<PodFacts, PodError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
        PodError::Unreachable { server: "?".to_owned(), message: format!("no event loop: {error}") }
    })?;
    let read = runtime.block_on(try_until(deadline, || one_try(kubeconfig, pod, deadline)));
    // A look-up of the server's name may still be under way on a thread; it is not waited for.
    runtime.shutdown_background();
    pod_facts(&read?).map_err(|problems| PodError::Unreadable { pod: pod.clone(), problems })
}

/// The last error when the deadline passes before a try succeeds, or sooner where trying is of no use.
async fn try_until<T>(
    deadline: Instant,
    one_try: impl AsyncFn() -> Result<T, PodError>,
) -> Result<T, PodError> {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match one_try().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let last = match error {
            PodError::Unauthorized { .. } | PodError::Forbidden(_) | PodError::Untrusted { .. } => {
                deadline.min(start + REFUSAL_PATIENCE)
            }
            PodError::NotFound(_)
            | PodError::Unreachable { .. }
            | PodError::Silent { .. }
            | PodError::Busy { .. } => deadline,
            PodError::Kubeconfig(_)
            | PodError::Unreadable { .. }
            | PodError::Folder { .. }
            | PodError::NoManifest { .. } => return Err(error),
        };
        if Instant::now() + pause >= last {
            return Err(error);
        }
        log::debug!(target: SCOPE, milliseconds = start.elapsed().as_millis() as u64; "{error}; trying again");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Each try reads the kubeconfig anew and connects anew: the agent may have renewed it, and what failed may be the
/// connection.
async fn one_try(kubeconfig: &Path, pod: &PodName, deadline: Instant) -> Result<Value, PodError> {
    let (client, server) = kubeconfig::client(kubeconfig).await?;
    let patience = TRY_PATIENCE.min(deadline.saturating_duration_since(Instant::now()));
    let request = Request::new(format!("/api/v1/namespaces/{}/pods", pod.namespace));
    let unreadable = |problem: String| PodError::Unreadable { pod: pod.clone(), problems: vec![problem] };
    let request =
        request.get(&pod.name, &GetParams::default()).map_err(|error| unreadable(error.to_string()))?;
    let text = match tokio::time::timeout(patience, client.request_text(request)).await {
        Ok(Ok(text)) => text,
        Ok(Err(error)) => return Err(classify(error, kubeconfig, pod, server)),
        Err(_) => return Err(PodError::Silent { server, patience }),
    };
    serde_json::from_str(&text).map_err(|error| unreadable(format!("is no JSON: {error}")))
}

fn classify(error: kube::Error, kubeconfig: &Path, pod: &PodName, server: String) -> PodError {
    if let kube::Error::Api(status) = error {
        let message = cut(&status.message);
        return match status.code {
            401 => PodError::Unauthorized { kubeconfig: kubeconfig.to_owned(), message },
            403 => PodError::Forbidden(message),
            404 => PodError::NotFound(pod.clone()),
            code => PodError::Busy { code, message },
        };
    }
    let mut causes = vec![];
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(one) = cause {
        causes.push(one);
        // An io::Error hides what it carries from `source`.
        let inside = one.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause = inside.map(|inside| inside as &(dyn Error + 'static)).or_else(|| one.source());
    }
    let message = cut(&causes.last().map(ToString::to_string).unwrap_or_default());
    if causes.iter().any(|cause| cause.is::<rustls::Error>()) {
        return PodError::Untrusted { server, message };
    }
    PodError::Unreachable { server, message }
}

/// A server may say anything, at any length.
fn cut(message: &str) -> String {
    message.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn tries(error: &PodError, deadline: Duration) -> (Duration, u32) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let (start, count) = (Instant::now(), Cell::new(0));
        let result: Result<(), PodError> = runtime.block_on(try_until(start + deadline, async || {
            count.set(count.get() + 1);
            Err(error.clone())
        }));
        assert_eq!(result.as_ref(), Err(error));
        (start.elapsed(), count.get())
    }

    #[test]
    fn tries_go_on_until_the_deadline_and_no_longer() {
        let busy = PodError::Busy { code: 503, message: String::new() };
        let (time, count) = tries(&busy, Duration::from_millis(400));
        assert!(time < Duration::from_millis(400) && time > Duration::from_millis(300), "{time:?}");
        assert_eq!(count, 4, "at 0, 50, 150 and 350 ms");
    }

    #[test]
    fn what_trying_does_not_mend_is_tried_once() {
        let error = PodError::Kubeconfig(kubeconfig::KubeconfigError::Missing { path: "/x".into() });
        assert_eq!(tries(&error, Duration::from_secs(10)).1, 1);
    }

    #[test]
    fn refusals_are_tried_for_a_while() {
        let (time, _) = tries(&PodError::Forbidden(String::new()), Duration::from_secs(10));
        assert!(time < REFUSAL_PATIENCE && time > REFUSAL_PATIENCE / 2, "{time:?}");
    }
}
