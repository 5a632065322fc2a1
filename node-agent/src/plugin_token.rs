//! The plugin's own token: which one it has, and its renewal.
//!
//! The token of the agent's pod ends with the pod, and an upgrade deletes the pod before the next agent runs: a plugin that used it would fail
//! every pod of the mesh in between. So the plugin has a service account of its own, and the agent asks for tokens of that account.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use cluster_client::{Backoff, Outage};
use serde::Deserialize;
use tokio::sync::watch;

use crate::cluster::{Connection, Granted, TokenError};
use crate::metrics::{Metrics, ResultLabel};
use crate::settings::{Identity, PluginAccount};
use crate::supervisor::Unneeded;

/// The scope of the agent's lines.
const SCOPE: &str = "cni-agent";
/// How much of its time a token has to have left to be of use.
const LEAST_LEFT: Duration = Duration::from_secs(60);
/// A token is renewed when this part of its time has passed: whenever the agent ends, three quarters at least are left.
const RENEWED_AFTER: u32 = 4;
/// How often it is looked whether a token is to be renewed, at least: clocks stand still while a machine sleeps.
const LOOK: Duration = Duration::from_secs(60);
/// The pauses between tries: while nobody answers, and while the agent is refused, which somebody has to change.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(10);
const REFUSED_RETRY: Duration = Duration::from_secs(60);
/// The pauses before each time that the API server is asked, at the agent's end, whether it takes the plugin's token.
const WORKS_PAUSES: [Duration; 2] = [Duration::ZERO, Duration::from_secs(1)];

/// Which token the plugin is given. Shared by who asks for it and who writes it down.
#[derive(Debug)]
pub struct PluginToken {
    /// `system:serviceaccount:NAMESPACE:NAME`; none where the plugin uses the agent's token.
    subject: Option<String>,
    held: Mutex<Held>,
    /// One that an agent before wrote down, while it is in use.
    inherited: Mutex<Option<String>>,
    /// How often the answer changed; 0 until there is one.
    answers: watch::Sender<u64>,
}

#[derive(Debug)]
enum Held {
    /// Nobody has answered yet: one that an agent before wrote down is as good as any.
    Unknown,
    /// One that was granted.
    Own(Token),
    /// There is none, and those of before are dead.
    Nothing,
}

struct Token {
    text: String,
    lifetime: Duration,
    /// When it came, by the clock that no one sets and by the one that a machine's sleep does not stop.
    came: (Instant, SystemTime),
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token").field("lifetime", &self.lifetime).finish_non_exhaustive()
    }
}

impl Token {
    /// The node's clock may be wrong, so a token's age counts from its arrival.
    fn new(text: String, asked: Duration) -> Self {
        let said = claims(&text).and_then(|claims| claims.exp.checked_sub(claims.iat));
        let lifetime = said.map_or(asked, Duration::from_secs);
        Self { text, lifetime, came: (Instant::now(), SystemTime::now()) }
    }

    fn age(&self) -> Duration {
        self.came.0.elapsed().max(self.came.1.elapsed().unwrap_or_default())
    }

    fn renewed_in(&self) -> Duration {
        (self.lifetime / RENEWED_AFTER).saturating_sub(self.age())
    }

    fn left(&self) -> Duration {
        self.lifetime.saturating_sub(self.age())
    }
}

/// What a token says about itself.
#[derive(Deserialize)]
struct Claims {
    sub: String,
    iat: u64,
    exp: u64,
}

fn claims(token: &str) -> Option<Claims> {
    let body = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    serde_json::from_slice(&body).ok()
}

impl Default for PluginToken {
    /// The agent's own is used.
    fn default() -> Self {
        Self {
            subject: None,
            held: Mutex::new(Held::Unknown),
            inherited: Mutex::default(),
            answers: watch::Sender::new(0),
        }
    }
}

impl PluginToken {
    /// For the plugin's account, if it has one.
    #[must_use]
    pub fn new(account: &PluginAccount, identity: &Identity) -> Self {
        let is_known = !account.name.is_empty() && !identity.namespace.is_empty();
        let subject =
            is_known.then(|| format!("system:serviceaccount:{}:{}", identity.namespace, account.name));
        Self { subject, ..Self::default() }
    }

    /// The token to write down: the granted one; or the one that is written down, while nobody has answered. None means the agent's.
    #[must_use]
    pub fn choose(&self, written: Option<String>) -> Option<String> {
        match &*self.held() {
            Held::Own(token) => (token.left() >= LEAST_LEFT).then(|| token.text.clone()),
            Held::Unknown => {
                let good = written.filter(|token| self.is_good(token));
                good.inspect(|token| *self.inherited() = Some(token.clone()))
            }
            Held::Nothing => None,
        }
    }

    /// What the plugin does while no new token is granted, for people.
    fn outlook(&self) -> &'static str {
        let inherited = self.inherited().clone();
        let is_asked_first = matches!(*self.held(), Held::Unknown);
        match self.choose(inherited) {
            Some(_) => "the plugin goes on with the token it has, which will end",
            None if is_asked_first => {
                "unless an agent before has left one that works, the plugin uses the agent's own token, which Kubernetes rejects once this \
                 pod is gone: until the next agent runs, no pod of the mesh will start"
            }
            None => {
                "the plugin uses the agent's own token, which Kubernetes rejects once this pod is gone: until the next agent runs, \
                 no pod of the mesh will start"
            }
        }
    }

    /// Whether a token says that it is of the plugin's account and has time left.
    fn is_good(&self, token: &str) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        claims(token).is_some_and(|claims| {
            self.subject.as_ref() == Some(&claims.sub) && Duration::from_secs(claims.exp) > now + LEAST_LEFT
        })
    }

    /// Waits until the first question was answered, if there is to be one.
    pub async fn first_answer(&self) {
        if self.subject.is_some() {
            let _ = self.answers.subscribe().wait_for(|answers| *answers > 0).await;
        }
    }

    /// Tells of every further answer.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.answers.subscribe()
    }

    /// Whether the plugin's own token, granted or inherited, is one that the API server takes; none where it does not say.
    pub async fn works(&self, connection: &Connection) -> Option<bool> {
        let inherited = self.inherited().clone();
        let Some(token) = self.choose(inherited) else { return Some(false) };
        for pause in WORKS_PAUSES {
            tokio::time::sleep(pause).await;
            if let Some(answer) = connection.takes(&token).await {
                return Some(answer.is_ok());
            }
        }
        None
    }

    /// Whether nothing is used but what an agent before wrote down, and the API server does not take it: its account is gone, or was made anew.
    async fn inherited_is_dead(&self, connection: &Connection) -> bool {
        if !matches!(*self.held(), Held::Unknown) {
            return false;
        }
        let Some(token) = self.inherited().clone() else { return false };
        matches!(connection.takes(&token).await, Some(Err(_)))
    }

    fn inherited(&self) -> MutexGuard<'_, Option<String>> {
        self.inherited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, held: Held) {
        *self.held() = held;
        self.answers.send_modify(|answers| *answers += 1);
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Renews the plugin's token.
#[derive(Debug)]
pub struct Keeper {
    account: PluginAccount,
    token: Arc<PluginToken>,
    connection: Arc<Connection>,
    metrics: Arc<Metrics>,
}

impl Keeper {
    /// Nothing is asked yet.
    #[must_use]
    pub const fn new(
        account: PluginAccount,
        token: Arc<PluginToken>,
        connection: Arc<Connection>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { account, token, connection, metrics }
    }

    /// Keeps the token fresh for as long as the agent lives.
    pub async fn keep(&self) -> Unneeded {
        if self.token.subject.is_none() {
            return Unneeded;
        }
        let mut refusal = Outage::default();
        let mut pauses = Backoff::new(FIRST_RETRY, LONGEST_RETRY);
        let mut refusals = Backoff::new(FIRST_RETRY, REFUSED_RETRY);
        loop {
            match self.renew().await {
                Ok(()) => {
                    pauses.reset();
                    refusals.reset();
                    refusal.ends(Instant::now());
                    self.wait().await;
                }
                Err(error) => {
                    self.complain(&error, &mut refusal).await;
                    let pause = match error {
                        TokenError::Failed { retry_after, .. } => pauses.pause(retry_after),
                        TokenError::Useless(_) | TokenError::Refused(_) => refusals.pause(None),
                    };
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// Asks for a token, if the plugin has an account of its own; whether there is a new one.
    pub async fn renew_if_own(&self) -> bool {
        self.token.subject.is_some() && self.renew().await.is_ok()
    }

    /// Asks for a token and tries it.
    ///
    /// # Errors
    /// Why there is none. What the plugin has stays, unless it is known to be dead.
    pub async fn renew(&self) -> Result<(), TokenError> {
        let renewed = self.ask().await;
        let result = renewed.as_ref().map_or_else(TokenError::word, |_| "granted");
        self.metrics.plugin_token_requests.get_or_create(&ResultLabel { result }).inc();
        let held = match &renewed {
            Ok(granted) => {
                let token = Token::new(granted.text.clone(), self.account.lifetime);
                let ends = SystemTime::now() + token.lifetime;
                let ends = ends.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                self.metrics.plugin_token_ends.set(i64::try_from(ends).unwrap_or(i64::MAX));
                log::info!(
                    target: SCOPE, account = self.account.name, hours = token.lifetime.as_secs() / 3600, bound_to_node = granted.of_node;
                    "the plugin has a new token of its own"
                );
                Some(Held::Own(token))
            }
            Err(TokenError::Useless(_)) => {
                self.metrics.plugin_token_ends.set(0);
                Some(Held::Nothing)
            }
            Err(TokenError::Refused(_)) if self.token.inherited_is_dead(&self.connection).await => {
                Some(Held::Nothing)
            }
            Err(TokenError::Refused(_) | TokenError::Failed { .. }) => None,
        };
        match held {
            Some(held) => self.token.hold(held),
            None => self.token.answers.send_modify(|answers| *answers += 1),
        }
        renewed.map(drop)
    }

    async fn ask(&self) -> Result<Granted, TokenError> {
        let cluster = self.connection.get();
        let cluster =
            cluster.map_err(|error| TokenError::Failed { text: error.to_string(), retry_after: None })?;
        let granted = cluster.token(&self.account.name, self.account.lifetime).await?;
        match self.connection.takes(&granted.text).await {
            Some(Err(why)) => Err(TokenError::Useless(format!(
                "the API server does not let service account {} get pods: {why}",
                self.account.name
            ))),
            Some(Ok(())) | None => Ok(granted),
        }
    }

    /// Waits until the token is to be renewed.
    async fn wait(&self) {
        // The agents of many nodes start together, and need not all ask together.
        let share = 1.0 - cluster_client::random() / 10.0;
        loop {
            let left = match &*self.token.held() {
                Held::Own(token) => token.renewed_in().mul_f64(share),
                Held::Unknown | Held::Nothing => return,
            };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.clamp(Duration::from_secs(1), LOOK)).await;
        }
    }

    /// One loud line about roles that are missing; an API server that does not answer is complained of elsewhere.
    async fn complain(&self, error: &TokenError, refusal: &mut Outage) {
        if let TokenError::Failed { text, .. } = error {
            log::debug!(target: SCOPE, "no new token for the plugin: {text}");
            return;
        }
        if !refusal.begins(Instant::now()) {
            return;
        }
        let text = format!(
            "{error}; {}. Apply the service account and the roles istio-cni-plugin of deploy/istio-cni-node.yaml",
            self.token.outlook()
        );
        log::warn!(target: SCOPE, "{text}");
        if let Ok(cluster) = self.connection.get() {
            let sent = cluster.warn("PluginTokenRefused", &text).await;
            let result = if sent.is_ok() { "sent" } else { "failed" };
            self.metrics.events.get_or_create(&ResultLabel { result }).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const SUBJECT: &str = "system:serviceaccount:mesh:plugin";

    fn jwt(sub: &str, ends_in: i64) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let exp = now.checked_add_signed(ends_in).expect("a time");
        let body = json!({"sub": sub, "iat": exp - 7200, "exp": exp}).to_string();
        format!("e30.{}.x", URL_SAFE_NO_PAD.encode(body))
    }

    fn plugin_token() -> PluginToken {
        PluginToken { subject: Some(SUBJECT.to_owned()), ..PluginToken::default() }
    }

    #[test]
    fn what_an_agent_before_wrote_goes_on_while_nobody_answers() {
        let token = plugin_token();
        let good = jwt(SUBJECT, 3600);
        assert!(token.outlook().starts_with("unless an agent before"), "nobody has read what is written");
        assert_eq!(token.choose(Some(good.clone())), Some(good.clone()));
        for other in [jwt(SUBJECT, 5), jwt("system:serviceaccount:mesh:istio-cni", 3600), "opaque".to_owned()]
        {
            assert_eq!(token.choose(Some(other.clone())), None, "{other}");
        }
        assert_eq!(PluginToken::default().choose(Some(good.clone())), None, "without an account");
        assert!(token.outlook().starts_with("the plugin goes on with"), "{}", token.outlook());
        token.hold(Held::Nothing);
        assert!(token.outlook().starts_with("the plugin uses the agent's own"), "{}", token.outlook());
        assert_eq!(token.choose(Some(good)), None, "the account is gone, and its tokens are");
    }

    #[test]
    fn a_granted_token_counts_until_it_ends_by_its_own_measure() {
        let token = plugin_token();
        // The server's clock is a day behind.
        let text = jwt(SUBJECT, -86400);
        token.hold(Held::Own(Token::new(text.clone(), Duration::from_secs(60))));
        assert_eq!(token.choose(Some("written".to_owned())), Some(text.clone()));
        let mut old = Token::new(text, Duration::from_secs(60));
        old.came.1 -= Duration::from_secs(7200);
        token.hold(Held::Own(old));
        assert_eq!(token.choose(None), None);
    }

    #[test]
    fn a_token_is_renewed_when_a_quarter_of_its_time_has_passed() {
        let mut token = Token::new(jwt(SUBJECT, 3600), Duration::from_secs(60));
        let left = token.renewed_in();
        assert!(left <= Duration::from_secs(1800) && left > Duration::from_secs(1700), "{left:?}");
        // A machine that slept, which only one of the clocks shows.
        token.came.1 -= Duration::from_secs(1801);
        assert_eq!(token.renewed_in(), Duration::ZERO);
    }

    #[test]
    fn a_token_that_says_nothing_lasts_as_long_as_was_asked_for() {
        let token = Token::new("opaque".to_owned(), Duration::from_secs(600));
        assert_eq!(token.lifetime, Duration::from_secs(600));
        assert!(!format!("{token:?}").contains("opaque"));
    }
}
