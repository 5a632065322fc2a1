//! The plugin's own token: which one it has, and its renewal.
//!
//! The token of the agent's pod ends with the pod, and an upgrade deletes the pod before the next agent runs: a plugin that used it would fail
//! every pod of the mesh in between. So the plugin has a service account of its own, and the agent asks for tokens of that account.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_runtime::supervisor::Unneeded;
use agent_runtime::{BootTime, SCOPE, lock};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use cluster_client::Backoff;
use reasons::{AgentReason, EventReason};
use serde::Deserialize;
use tokio::sync::{Notify, watch};

use crate::cluster::token::{self, Granted, TokenError};
use crate::cluster::{ApiHandle, warning};
use crate::metrics::Metrics;
use crate::settings::{ControllerIdentity, PluginAccount};

/// How much of its time a token has to have left to be of use where none is requested.
const LEAST_LEFT: Duration = Duration::from_secs(60);
/// A token is renewed when this part of its time has passed: whenever the agent ends, three quarters at least are left.
const RENEWED_AFTER: u32 = 4;
/// The longest interval between checks of a token's age: clocks stand still while a machine sleeps.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// The pauses between attempts: while the API server does not respond, and while it denies access, until an operator changes that.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(10);
const REFUSED_RETRY: Duration = Duration::from_secs(60);
/// The pauses before each time that the API server is asked, at the agent's end, whether it takes the plugin's token.
const WORKS_PAUSES: [Duration; 2] = [Duration::ZERO, Duration::from_secs(1)];

/// Which token the plugin gets; by default the agent's. Shared by its renewer and the installer.
#[derive(Debug, Default)]
pub struct PluginToken {
    /// `system:serviceaccount:NAMESPACE:NAME`; none where the plugin uses the agent's token.
    subject: Option<String>,
    /// Whether the plugin reads namespaces, too.
    reads_namespaces: bool,
    source: Mutex<TokenSource>,
    /// One that an earlier agent wrote, while it is in use.
    inherited: Mutex<Option<String>>,
    /// 0 until the first response, then how often the choice may have become another.
    choices: watch::Sender<u64>,
    /// Wakes the renewer before the token's time.
    rejected: Notify,
}

#[derive(Debug, Default)]
enum TokenSource {
    /// The API server has not responded yet: the token that an earlier agent wrote is as good as any.
    #[default]
    Unknown,
    /// None will be requested: the node's clock decides whether the written one has time left.
    Unasked,
    /// One that was granted.
    Own(Token),
    /// No token exists, and earlier ones are invalid.
    Nothing,
}

struct Token {
    text: String,
    lifetime: Duration,
    came: Moment,
}

/// A moment by the clock that no one sets, and by the one that is corrected after a virtual machine stood still.
#[derive(Clone, Copy)]
struct Moment {
    boot: BootTime,
    wall: SystemTime,
}

impl Moment {
    fn now() -> Self {
        Self { boot: BootTime::now(), wall: SystemTime::now() }
    }

    /// The longer time of both: asking for a token too early costs a request only.
    fn since(self, earlier: Self) -> Duration {
        self.boot.since(earlier.boot).max(self.wall.duration_since(earlier.wall).unwrap_or_default())
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token").field("lifetime", &self.lifetime).finish_non_exhaustive()
    }
}

impl Token {
    /// The node's clock may be wrong, so a token's age counts from its arrival.
    fn new(text: String, asked: Duration, came: Moment) -> Self {
        let claimed = claims(&text).and_then(|claims| claims.exp.checked_sub(claims.iat));
        let lifetime = claimed.map_or(asked, Duration::from_secs);
        Self { text, lifetime, came }
    }

    fn renewed_in(&self, now: Moment) -> Duration {
        (self.lifetime / RENEWED_AFTER).saturating_sub(now.since(self.came))
    }

    fn may_be_over(&self, now: Moment) -> bool {
        now.since(self.came) >= self.lifetime
    }
}

/// The claims of a token.
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

/// Whether a token's time is over at a moment, as far as its claims say.
fn is_over(token: &str, at: SystemTime) -> bool {
    let at = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    claims(token).is_some_and(|claims| Duration::from_secs(claims.exp) <= at)
}

impl PluginToken {
    /// For the plugin's account, if it has one.
    #[must_use]
    pub fn new(account: &PluginAccount, identity: &ControllerIdentity) -> Self {
        let is_known = !account.name.is_empty() && !identity.namespace.is_empty();
        let subject =
            is_known.then(|| format!("system:serviceaccount:{}:{}", identity.namespace, account.name));
        Self { subject, reads_namespaces: account.reads_namespaces, ..Self::default() }
    }

    /// For a program that requests none.
    #[must_use]
    pub fn unasked(account: &PluginAccount, identity: &ControllerIdentity) -> Self {
        Self { source: Mutex::new(TokenSource::Unasked), ..Self::new(account, identity) }
    }

    /// The token to write: the granted one; or the written one, until the API server responds. None means the agent's.
    ///
    /// No clock can take it away, because clocks jump: only the API server, by another token or by a refusal.
    #[must_use]
    pub fn choose(&self, written: Option<String>) -> Option<String> {
        match &*lock(&self.source) {
            TokenSource::Own(token) => Some(token.text.clone()),
            TokenSource::Unknown => {
                let own = written.filter(|token| self.is_own(token));
                own.inspect(|token| *lock(&self.inherited) = Some(token.clone()))
            }
            TokenSource::Unasked => {
                let until = SystemTime::now() + LEAST_LEFT;
                written.filter(|token| self.is_own(token) && !is_over(token, until))
            }
            TokenSource::Nothing => None,
        }
    }

    /// What the plugin does while no new token is granted, for people.
    fn outlook(&self) -> &'static str {
        let is_asked_first = matches!(*lock(&self.source), TokenSource::Unknown);
        match self.in_place(Moment::now()) {
            Some(_) => "the plugin keeps using its token until the API server rejects it",
            None if is_asked_first => {
                "unless an earlier agent left a valid token, the plugin uses the agent's own token, which Kubernetes rejects once this \
                 pod is gone: until the next agent runs, no pod of the mesh will start"
            }
            None => {
                "the plugin uses the agent's own token, which Kubernetes rejects once this pod is gone: until the next agent runs, \
                 no pod of the mesh will start"
            }
        }
    }

    /// Whether a token's claims name the plugin's account.
    fn is_own(&self, token: &str) -> bool {
        claims(token).is_some_and(|claims| self.subject.as_ref() == Some(&claims.sub))
    }

    /// The plugin's token, granted or inherited, and whether its time may be over.
    fn in_place(&self, now: Moment) -> Option<(String, bool)> {
        match &*lock(&self.source) {
            TokenSource::Own(token) => Some((token.text.clone(), token.may_be_over(now))),
            TokenSource::Unknown => {
                let inherited = lock(&self.inherited).clone()?;
                let is_over = is_over(&inherited, now.wall);
                Some((inherited, is_over))
            }
            TokenSource::Unasked | TokenSource::Nothing => None,
        }
    }

    /// Waits for the response to the first request, if any.
    pub async fn first_answer(&self) {
        if self.subject.is_some() {
            let _ = self.choices.subscribe().wait_for(|choices| *choices > 0).await;
        }
    }

    /// Reports each time from now on that [`choose`](Self::choose) may choose another one.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.choices.subscribe()
    }

    /// Has the renewer ask for another token now, if it waits: the API server refuses the one in place.
    pub fn replace(&self) {
        self.rejected.notify_waiters();
    }

    async fn is_accepted(&self, connection: &ApiHandle, token: &str) -> Option<Result<(), String>> {
        token::is_accepted(connection, token, self.reads_namespaces).await
    }

    /// Whether the plugin's own token, granted or inherited, is valid for the API server; none if unknown.
    pub async fn works(&self, connection: &ApiHandle) -> Option<bool> {
        let Some((token, _)) = self.in_place(Moment::now()) else { return Some(false) };
        for pause in WORKS_PAUSES {
            tokio::time::sleep(pause).await;
            if let Some(answer) = self.is_accepted(connection, &token).await {
                return Some(answer.is_ok());
            }
        }
        None
    }

    /// Whether the API server, which granted no other one, rejects the plugin's token: its time is over, or its account gone or recreated.
    async fn is_dead(&self, connection: &ApiHandle, error: &TokenError) -> bool {
        let is_asked = |may_be_over| match error {
            TokenError::Refused(_) => true,
            TokenError::Failed { .. } => may_be_over,
            TokenError::Useless(_) => false,
        };
        match self.in_place(Moment::now()) {
            Some((token, may_be_over)) if is_asked(may_be_over) => {
                matches!(self.is_accepted(connection, &token).await, Some(Err(_)))
            }
            Some(_) | None => false,
        }
    }

    fn set_source(&self, source: TokenSource) {
        *lock(&self.source) = source;
        self.choices.send_modify(|choices| *choices += 1);
    }

    /// The first response counts, also where it leaves the choice as it was: it was waited for.
    fn keep_source(&self) {
        self.choices.send_if_modified(|choices| std::mem::replace(choices, (*choices).max(1)) == 0);
    }
}

/// Renews the plugin's token.
#[derive(Debug)]
pub struct TokenRenewer {
    pub(crate) account: PluginAccount,
    pub(crate) token: Arc<PluginToken>,
    pub(crate) connection: Arc<ApiHandle>,
    pub(crate) metrics: Arc<Metrics>,
}

impl TokenRenewer {
    /// Keeps the token fresh for as long as the agent lives.
    pub async fn run(&self) -> Unneeded {
        if self.token.subject.is_none() {
            return Unneeded;
        }
        let mut has_complained = false;
        let mut pauses = Backoff::new(FIRST_RETRY, LONGEST_RETRY);
        let mut refusals = Backoff::new(FIRST_RETRY, REFUSED_RETRY);
        loop {
            match self.renew().await {
                Ok(()) => {
                    pauses.reset();
                    refusals.reset();
                    has_complained = false;
                    self.wait().await;
                }
                Err(error) => {
                    self.complain(&error, &mut has_complained).await;
                    let pause = match error {
                        TokenError::Failed { retry_after, .. } => pauses.pause(retry_after),
                        TokenError::Useless(_) | TokenError::Refused(_) => refusals.pause(None),
                    };
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// Requests a token, if the plugin has an account of its own; true if a new one was granted.
    pub async fn renew_if_own(&self) -> bool {
        self.token.subject.is_some() && self.renew().await.is_ok()
    }

    /// Asks for a token and tries it.
    ///
    /// # Errors
    /// Why none was granted. The plugin keeps its token, unless that is known to be invalid.
    pub async fn renew(&self) -> Result<(), TokenError> {
        let renewed = self.ask().await;
        let result = renewed.as_ref().map_or_else(TokenError::reason, |_| AgentReason::Granted);
        self.metrics.plugin_token_requests.get_or_create(&result.into()).inc();
        let source = match &renewed {
            Ok(granted) => {
                let token = Token::new(granted.text.clone(), self.account.lifetime, Moment::now());
                let ends = SystemTime::now() + token.lifetime;
                let ends = ends.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                self.metrics.plugin_token_ends.set(i64::try_from(ends).unwrap_or(i64::MAX));
                log::info!(
                    target: SCOPE, account = self.account.name, hours = token.lifetime.as_secs() / 3600, bound_to_node = granted.of_node;
                    "the plugin has a new token of its own"
                );
                Some(TokenSource::Own(token))
            }
            Err(error) => {
                let is_useless = matches!(error, TokenError::Useless(_))
                    || self.token.is_dead(&self.connection, error).await;
                is_useless.then(|| {
                    self.metrics.plugin_token_ends.set(0);
                    TokenSource::Nothing
                })
            }
        };
        match source {
            Some(source) => self.token.set_source(source),
            None => self.token.keep_source(),
        }
        renewed.map(drop)
    }

    async fn ask(&self) -> Result<Granted, TokenError> {
        let cluster = self.connection.get();
        let cluster =
            cluster.map_err(|error| TokenError::Failed { text: error.to_string(), retry_after: None })?;
        let granted = token::request(&cluster, &self.account.name, self.account.lifetime).await?;
        match self.token.is_accepted(&self.connection, &granted.text).await {
            Some(Err(why)) => Err(TokenError::Useless(format!(
                "the API server does not let service account {} get pods: {why}",
                self.account.name
            ))),
            Some(Ok(())) | None => Ok(granted),
        }
    }

    /// Waits until the token is due for renewal, or refused before.
    async fn wait(&self) {
        // The agents of many nodes start together, and need not all ask together.
        let share = 1.0 - cluster_client::random() / 10.0;
        loop {
            let left = match &*lock(&self.token.source) {
                TokenSource::Own(token) => token.renewed_in(Moment::now()).mul_f64(share),
                TokenSource::Unknown | TokenSource::Unasked | TokenSource::Nothing => return,
            };
            if left.is_zero() {
                return;
            }
            let interval = left.clamp(Duration::from_secs(1), CHECK_INTERVAL);
            if tokio::time::timeout(interval, self.token.rejected.notified()).await.is_ok() {
                return;
            }
        }
    }

    /// One loud line about roles that are missing; an API server that does not answer is complained of elsewhere.
    async fn complain(&self, error: &TokenError, has_complained: &mut bool) {
        if let TokenError::Failed { text, .. } = error {
            log::debug!(target: SCOPE, "no new token for the plugin: {text}");
            return;
        }
        if std::mem::replace(has_complained, true) {
            return;
        }
        let text = format!(
            "{error}; {}. Apply the service account and the roles istio-cni-plugin of deploy/istio-cni-node.yaml",
            self.token.outlook()
        );
        log::warn!(target: SCOPE, "{text}");
        let event = warning(self.connection.own_pod(), EventReason::PluginTokenRefused, text);
        let _ = self.connection.publish(&self.metrics.events, event).await;
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

    const HOUR: Duration = Duration::from_secs(3600);
    const YEARS: Duration = Duration::from_secs(30 * 365 * 86400);

    #[test]
    fn an_earlier_agents_token_counts_until_the_api_server_responds() {
        let token = plugin_token();
        let good = jwt(SUBJECT, 3600);
        assert!(token.outlook().starts_with("unless an earlier agent"), "the written token was not read yet");
        // The node's clock, by which the token has expired, may have jumped.
        for written in [good.clone(), jwt(SUBJECT, -86400)] {
            assert_eq!(token.choose(Some(written.clone())), Some(written));
        }
        for other in [jwt("system:serviceaccount:mesh:istio-cni", 3600), "opaque".to_owned()] {
            assert_eq!(token.choose(Some(other.clone())), None, "{other}");
        }
        assert_eq!(PluginToken::default().choose(Some(good.clone())), None, "without an account");
        assert!(token.outlook().starts_with("the plugin keeps using"), "{}", token.outlook());
        token.set_source(TokenSource::Nothing);
        assert!(token.outlook().starts_with("the plugin uses the agent's own"), "{}", token.outlook());
        assert_eq!(token.choose(Some(good)), None, "the account is gone, and its tokens are");
    }

    #[test]
    fn a_granted_token_stays_in_place_whatever_the_clocks_say() {
        let now = Moment::now();
        let earlier = Moment { wall: now.wall - YEARS, ..now };
        let later = Moment { wall: now.wall + YEARS, ..now };
        // The server's clock is a day behind; the node's stands, has jumped ahead, and back.
        let text = jwt(SUBJECT, -86400);
        for came in [now, earlier, later] {
            let token = plugin_token();
            token.set_source(TokenSource::Own(Token::new(text.clone(), HOUR, came)));
            assert_eq!(token.choose(Some("written".to_owned())), Some(text.clone()));
        }
    }

    #[test]
    fn a_token_is_renewed_when_a_quarter_of_its_time_has_passed_by_any_clock() {
        let came = Moment::now();
        let token = Token::new(jwt(SUBJECT, 3600), Duration::from_secs(60), came);
        let (half, year) = (HOUR / 2, HOUR * 8766);
        assert_eq!(token.renewed_in(came), half);
        let ran = Moment { boot: came.boot + HOUR / 4, wall: came.wall + HOUR / 4 };
        assert_eq!(token.renewed_in(ran), half / 2);
        // The machine slept, and then its clock was set back.
        assert_eq!(
            token.renewed_in(Moment { boot: came.boot + half, wall: came.wall - year }),
            Duration::ZERO
        );
        // The clock was set ahead; or a virtual machine stood still, and cannot know.
        assert_eq!(token.renewed_in(Moment { wall: came.wall + half, ..came }), Duration::ZERO);
    }

    #[test]
    fn whether_a_tokens_time_may_be_over_is_known_of_granted_and_written_ones() {
        let (token, now) = (plugin_token(), Moment::now());
        let is_over = |now: Moment| token.in_place(now).map(|(_, is_over)| is_over);
        assert_eq!(is_over(now), None);
        // It ends in an hour, after two.
        let written = token.choose(Some(jwt(SUBJECT, 3600)));
        assert!(written.is_some());
        assert_eq!(is_over(now), Some(false));
        assert_eq!(is_over(Moment { wall: now.wall + HOUR, ..now }), Some(true));
        token.set_source(TokenSource::Own(Token::new(jwt(SUBJECT, 3600), HOUR, now)));
        assert_eq!(is_over(Moment { boot: now.boot + HOUR, ..now }), Some(false));
        assert_eq!(is_over(Moment { boot: now.boot + HOUR * 2, ..now }), Some(true), "it slept");
        assert_eq!(is_over(Moment { wall: now.wall + YEARS, ..now }), Some(true));
        token.set_source(TokenSource::Nothing);
        assert_eq!(is_over(now), None);
    }

    #[test]
    fn where_no_token_is_requested_the_clock_decides_about_the_written_one() {
        let token = PluginToken { source: Mutex::new(TokenSource::Unasked), ..plugin_token() };
        let good = jwt(SUBJECT, 3600);
        assert_eq!(token.choose(Some(good.clone())), Some(good));
        assert_eq!(token.choose(Some(jwt(SUBJECT, 5))), None);
    }

    #[test]
    fn a_token_without_claims_lasts_as_long_as_requested() {
        let token = Token::new("opaque".to_owned(), Duration::from_secs(600), Moment::now());
        assert_eq!(token.lifetime, Duration::from_secs(600));
        assert!(!format!("{token:?}").contains("opaque"));
    }
}
