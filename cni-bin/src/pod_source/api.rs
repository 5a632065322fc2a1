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
/// How long refusals are worth another try, from the first of them. The agent may be renewing the token or the authority this moment, and a
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
    let mut tries = Tries { deadline, pause: FIRST_PAUSE, refused: None };
    loop {
        let error = match one_try().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let Some(pause) = tries.failed(&error, Instant::now()) else { return Err(error) };
        log::debug!(target: SCOPE, milliseconds = start.elapsed().as_millis() as u64; "{error}; trying again");
        tokio::time::sleep(pause).await;
        // On a machine that stood still the pause was longer; a try that has no time could only say that it had none.
        if Instant::now() >= deadline {
            return Err(error);
        }
    }
}

/// When to try again.
struct Tries {
    deadline: Instant,
    pause: Duration,
    /// The first of the refusals that no other failure came after.
    refused: Option<Instant>,
}

impl Tries {
    /// The pause before the next try, if there is to be one.
    fn failed(&mut self, error: &PodError, now: Instant) -> Option<Duration> {
        let last = match error {
            PodError::Unauthorized { .. } | PodError::Forbidden(_) | PodError::Untrusted { .. } => {
                self.deadline.min(*self.refused.get_or_insert(now) + REFUSAL_PATIENCE)
            }
            PodError::NotFound(_)
            | PodError::Unreachable { .. }
            | PodError::Silent { .. }
            | PodError::Busy { .. } => {
                self.refused = None;
                self.deadline
            }
            PodError::Kubeconfig(_)
            | PodError::Unreadable { .. }
            | PodError::Folder { .. }
            | PodError::NoManifest { .. } => return None,
        };
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        (now + pause < last).then_some(pause)
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

    const SECOND: Duration = Duration::from_secs(1);

    /// When the tries begin that fail with these errors, the last of them again and again, where each takes this long.
    fn tries(errors: &[PodError], deadline: Duration, each: Duration) -> Vec<Duration> {
        let start = Instant::now();
        let mut tries = Tries { deadline: start + deadline, pause: FIRST_PAUSE, refused: None };
        let mut begun = vec![Duration::ZERO];
        loop {
            let (last, error) = (begun[begun.len() - 1], &errors[begun.len().min(errors.len()) - 1]);
            match tries.failed(error, start + last + each) {
                Some(pause) => begun.push(last + each + pause),
                None => return begun,
            }
        }
    }

    fn busy() -> PodError {
        PodError::Busy { code: 503, message: String::new() }
    }

    fn forbidden() -> PodError {
        PodError::Forbidden(String::new())
    }

    #[test]
    fn tries_go_on_until_the_deadline_and_no_longer() {
        let begun = [0, 50, 150, 350].map(Duration::from_millis);
        assert_eq!(tries(&[busy()], Duration::from_millis(750), Duration::ZERO), begun);
        assert!(
            tries(&[busy()], 600 * SECOND, Duration::ZERO).len() > 600,
            "the pauses do not grow for ever"
        );
    }

    #[test]
    fn what_trying_does_not_mend_is_tried_once() {
        let error = PodError::Kubeconfig(kubeconfig::KubeconfigError::Missing { path: "/x".into() });
        assert_eq!(tries(&[error], 10 * SECOND, Duration::ZERO).len(), 1);
    }

    #[test]
    fn refusals_are_tried_for_a_while() {
        let begun = tries(&[forbidden()], 600 * SECOND, Duration::ZERO);
        let last = begun[begun.len() - 1];
        assert!(last < REFUSAL_PATIENCE && last > REFUSAL_PATIENCE / 2, "{begun:?}");
    }

    /// A server that has just come back may refuse for a moment, however long it was away.
    #[test]
    fn the_first_refusal_begins_the_while() {
        let mut errors = vec![busy(); 20];
        errors.push(forbidden());
        let begun = tries(&errors, 600 * SECOND, Duration::ZERO);
        assert!(begun[20] > REFUSAL_PATIENCE && begun.len() > 22, "{begun:?}");
    }

    #[test]
    fn a_refusal_is_tried_again_on_a_machine_that_stands_still() {
        assert_eq!(tries(&[forbidden()], 600 * SECOND, 60 * SECOND).len(), 2);
    }
}
