//! What the next ADD would meet: whether the API server serves the plugin, tried with the credentials that are installed; and how the last ADDs ended.
//!
//! Files and STATUS show neither. A token dies with its service account and a right with its binding, and nothing on the node changes.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_runtime::lock;
use agent_runtime::outage::OutageLog;
use agent_runtime::supervisor::Unneeded;
use cluster_client::{ApiError, Backoff};
use cni_core::pod_name::PodName;
use cni_core::pod_source::{self, PodError};
use cni_core::wire::{CniError, Code};
use tokio::sync::Notify;

use crate::install::installer::Installer;
use crate::install::plugin_token::PluginToken;
use crate::settings::ControllerIdentity;

/// How often the API server is asked although nothing has happened, on average: the agents of many nodes must not all ask together.
pub const INTERVAL: Duration = Duration::from_secs(420);
/// The pauses while it refuses the plugin.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// The least time between two questions: many ADDs may fail at once.
const LEAST_PAUSE: Duration = Duration::from_secs(1);
/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a failed ADD counts: the kubelet tries a pod that exists again within this time, and one that is gone proves nothing about the node.
const FAILURE_HOLDS: Duration = Duration::from_secs(300);
/// How much of an error is kept.
const LONGEST_ERROR: usize = 600;

/// What is known; shared by those that find it out and by readiness.
#[derive(Debug, Default)]
pub struct PluginHealth {
    state: Mutex<State>,
    due: Notify,
}

#[derive(Debug, Default)]
struct State {
    access: Access,
    /// How often the credentials or the entry changed.
    changes: u64,
    /// The pod to ask for, if another than the agent's own: the one whose ADD failed last.
    pod: Option<PodName>,
    failed: Option<FailedAdd>,
}

/// Whether the API server serves the plugin.
#[derive(Debug, Default)]
enum Access {
    /// It was not asked yet.
    #[default]
    Unasked,
    /// It does, or does not respond: pods that start wait for it then, on every node.
    Served,
    /// It does not.
    Refused {
        why: String,
        /// What [`State::changes`] was then: this refusal is not about other credentials.
        changes: u64,
    },
}

/// An ADD that failed for a reason of the node.
#[derive(Debug)]
struct FailedAdd {
    words: String,
    at: Instant,
}

impl PluginHealth {
    /// Whether the next ADD would succeed, as far as is known.
    ///
    /// # Errors
    /// Why it would not, for people.
    pub fn verdict(&self, now: Instant) -> Result<(), String> {
        let state = lock(&self.state);
        match &state.access {
            Access::Unasked => {
                return Err("starting: the API server was not yet asked for a pod as the plugin asks for it"
                    .to_owned());
            }
            Access::Refused { why, .. } => {
                return Err(format!("the plugin cannot read pods, so no pod of the mesh can start: {why}"));
            }
            Access::Served => {}
        }
        match &state.failed {
            Some(failed) if now.duration_since(failed.at) < FAILURE_HOLDS => Err(failed.words.clone()),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether the API server was asked, so that the verdict is more than that the agent starts.
    #[must_use]
    pub fn was_asked(&self) -> bool {
        !matches!(lock(&self.state).access, Access::Unasked)
    }

    /// Has the API server asked if the plugin's credentials or its entry changed, and at the start.
    pub fn note_pass(&self, has_changed: bool) {
        let mut state = lock(&self.state);
        state.changes += u64::from(has_changed);
        if has_changed || matches!(state.access, Access::Unasked) {
            self.due.notify_one();
        }
    }

    /// Notes that a pod was redirected or enrolled.
    pub fn add_succeeded(&self) {
        lock(&self.state).failed = None;
    }

    /// Notes that the ADD of `namespace/name` failed, with the code and the words of its error. Has the API server asked for the same pod, unless the
    /// pod was read: rights may differ by namespace.
    pub fn add_failed(&self, pod: &str, code: Option<Code>, error: &str, now: Instant) {
        let mut state = lock(&self.state);
        match code {
            Some(code) if code.is_of_node() => {
                let error: String = error.chars().filter(|c| !c.is_control()).take(LONGEST_ERROR).collect();
                let words = format!("the ADD of pod {pod} failed, and none has succeeded since: {error}");
                state.failed = Some(FailedAdd { words, at: now });
            }
            Some(Code::TryAgain | Code::Forbidden | Code::Untrusted | Code::Kubeconfig) => {
                let pod = pod.split_once('/');
                state.pod =
                    pod.map(|(namespace, name)| PodName { namespace: namespace.into(), name: name.into() });
                self.due.notify_one();
            }
            Some(_) | None => {}
        }
    }

    /// The pod to ask for, and how often the credentials changed before.
    fn question(&self, identity: &ControllerIdentity) -> (PodName, u64) {
        let state = lock(&self.state);
        (state.pod.clone().unwrap_or_else(|| own_pod(identity)), state.changes)
    }

    /// Notes what the API server answered to the credentials after so many changes.
    fn note(&self, answer: &Answer, changes: u64) {
        let mut state = lock(&self.state);
        let is_refusal_of_these =
            matches!(state.access, Access::Refused { changes: refused, .. } if refused == changes);
        match answer {
            Answer::Served => (state.access, state.pod) = (Access::Served, None),
            Answer::Refused { words, .. } => state.access = Access::Refused { why: words.clone(), changes },
            Answer::Unknown if is_refusal_of_these => {}
            Answer::Unknown => state.access = Access::Served,
        }
    }
}

#[cfg(test)]
impl PluginHealth {
    /// As if the API server had served the plugin.
    pub(crate) fn note_served(&self) {
        self.note(&Answer::Served, 0);
    }
}

/// The agent's own pod; where it does not know it, one that need not exist.
fn own_pod(identity: &ControllerIdentity) -> PodName {
    let or =
        |text: &str, otherwise: &str| if text.is_empty() { otherwise.to_owned() } else { text.to_owned() };
    PodName { namespace: or(&identity.namespace, "default"), name: or(&identity.pod, &identity.daemon_set) }
}

/// What the API server answered to the plugin's credentials.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Served,
    Refused {
        words: String,
        /// Whether another token may help.
        is_of_token: bool,
    },
    /// None, or one of another server.
    Unknown,
}

impl From<Result<(), PodError>> for Answer {
    fn from(tried: Result<(), PodError>) -> Self {
        let Err(error) = tried else { return Self::Served };
        let is_of_token = match error {
            PodError::Unauthorized { .. } | PodError::Forbidden(_) | PodError::NamespaceForbidden(_) => true,
            PodError::Kubeconfig(_) | PodError::Api(ApiError::Untrusted { .. }) => false,
            PodError::Absent(_)
            | PodError::Api(_)
            | PodError::Busy { .. }
            | PodError::Another { .. }
            | PodError::Unreadable { .. }
            | PodError::Folder { .. }
            | PodError::NoManifest { .. } => return Self::Unknown,
        };
        Self::Refused { words: CniError::from(error).to_string(), is_of_token }
    }
}

/// Asks the API server as the plugin would.
pub struct AccessChecker {
    pub(crate) health: Arc<PluginHealth>,
    pub(crate) installer: Arc<Installer>,
    pub(crate) identity: ControllerIdentity,
    pub(crate) token: Arc<PluginToken>,
}

impl AccessChecker {
    /// Asks for ever, from the first request to do so on.
    pub async fn run(self) -> Unneeded {
        let mut log =
            OutageLog::new("the API server refuses the plugin", "the API server serves the plugin again");
        let mut refusals = Backoff::new(FIRST_RETRY, LONGEST_RETRY);
        self.health.due.notified().await;
        loop {
            let (pod, changes) = self.health.question(&self.identity);
            let answer = self.check(pod).await;
            self.health.note(&answer, changes);
            let pause = match &answer {
                Answer::Refused { words, is_of_token } => {
                    log.failed(words, &[]);
                    if *is_of_token {
                        self.token.replace();
                    }
                    refusals.pause(None)
                }
                Answer::Served => {
                    log.worked();
                    refusals.reset();
                    INTERVAL.mul_f64(0.5 + cluster_client::random())
                }
                Answer::Unknown => INTERVAL.mul_f64(0.5 + cluster_client::random()),
            };
            tokio::time::sleep(LEAST_PAUSE).await;
            let _ = tokio::time::timeout(pause, self.health.due.notified()).await;
        }
    }

    async fn check(&self, pod: PodName) -> Answer {
        let installer = self.installer.clone();
        let tried = tokio::task::spawn_blocking(move || {
            installer.plugin_conf().map(|conf| pod_source::try_access(&conf, &pod, PATIENCE))
        });
        // An entry that cannot be made is the installer's to report.
        tried.await.ok().and_then(Result::ok).map_or(Answer::Unknown, Answer::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(words: &str) -> Answer {
        Answer::Refused { words: words.to_owned(), is_of_token: true }
    }

    #[test]
    fn an_api_server_that_is_away_changes_nothing_but_that_it_was_asked() {
        let (health, now) = (PluginHealth::default(), Instant::now());
        assert!(health.verdict(now).is_err_and(|why| why.starts_with("starting")));
        health.note(&Answer::Unknown, 0);
        assert_eq!(health.verdict(now), Ok(()));
        health.note(&refused("403"), 0);
        health.note(&Answer::Unknown, 0);
        assert!(health.verdict(now).is_err_and(|why| why.ends_with("start: 403")));
        health.note(&Answer::Served, 0);
        assert_eq!(health.verdict(now), Ok(()));
        // The refusal was not about other credentials.
        health.note(&refused("401"), 0);
        health.note_pass(true);
        assert!(health.verdict(now).is_err());
        health.note(&Answer::Unknown, 1);
        assert_eq!(health.verdict(now), Ok(()));
    }

    #[test]
    fn an_add_that_fails_for_a_reason_of_the_node_counts_until_one_succeeds() {
        let (health, now) = (PluginHealth::default(), Instant::now());
        health.note(&Answer::Served, 0);
        for (code, counts) in [
            (7, true),
            (50, true),
            (110, false),
            (199, false),
            (100, false),
            (104, false),
            (11, false),
            (4, false),
        ] {
            health.add_failed("shop/cart", Code::of(code), "no\nroom", now);
            let verdict = health.verdict(now);
            assert_eq!(verdict.is_err(), counts, "{code}: {verdict:?}");
            if counts {
                assert!(verdict.is_err_and(|why| why.contains("shop/cart") && why.ends_with(": noroom")));
            }
            health.add_succeeded();
            assert_eq!(health.verdict(now), Ok(()));
        }
        health.add_failed("shop/cart", Code::of(7), "", now);
        assert_eq!(health.verdict(now + FAILURE_HOLDS), Ok(()), "the pod is gone");
    }

    #[test]
    fn the_pod_that_could_not_be_read_is_asked_for_until_it_can() {
        let health = PluginHealth::default();
        let identity = ControllerIdentity {
            namespace: "mesh".into(),
            pod: "agent".into(),
            node: String::new(),
            daemon_set: "agents".into(),
        };
        let asked_for = || {
            let (PodName { namespace, name }, _) = health.question(&identity);
            format!("{namespace}/{name}")
        };
        assert_eq!(asked_for(), "mesh/agent");
        health.add_failed("shop/cart", Some(Code::Forbidden), "", Instant::now());
        assert_eq!(asked_for(), "shop/cart");
        health.note(&refused("403"), 0);
        assert_eq!(asked_for(), "shop/cart");
        health.note(&Answer::Served, 0);
        assert_eq!(asked_for(), "mesh/agent");
        let unknown = ControllerIdentity { namespace: String::new(), pod: String::new(), ..identity };
        assert_eq!(own_pod(&unknown), PodName { namespace: "default".into(), name: "agents".into() });
    }

    #[test]
    fn what_is_no_answer_of_the_api_server_refuses_nobody() {
        let server = || "https://x".to_owned();
        let unreachable = ApiError::Unreachable { server: server(), message: String::new() };
        let untrusted = ApiError::Untrusted { server: server(), message: String::new() };
        let busy = PodError::Busy { code: 503, message: String::new(), retry_after: None };
        assert_eq!(Answer::from(Err(unreachable.into())), Answer::Unknown);
        assert_eq!(Answer::from(Err(busy)), Answer::Unknown);
        assert!(matches!(Answer::from(Err(untrusted.into())), Answer::Refused { is_of_token: false, .. }));
        let forbidden = Answer::from(Err(PodError::Forbidden("User x".to_owned())));
        let Answer::Refused { words, is_of_token: true } = forbidden else { panic!("{forbidden:?}") };
        for part in ["403", "User x", "verb get on pods", "ClusterRoleBinding istio-cni-plugin"] {
            assert!(words.contains(part), "{part}: {words}");
        }
    }
}
