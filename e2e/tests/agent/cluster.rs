//! The real program and an API server that changes its mind: the plugin's own token, refusals at the end, an agent without a client.

use std::fs;
use std::sync::MutexGuard;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use e2e::agent::{self, CALICO, Node, daemon_set};
use e2e::http::{HttpRequest, StandIn, failure};
use serde_json::{Value, json};

const SUBJECT: &str = "system:serviceaccount:istio-system:istio-cni-plugin";

/// An API server with the agent's DaemonSet, a service account for the plugin, and nonexistent pods.
pub(crate) struct Api(StandIn<State>);

/// What it answers, and what it was asked.
#[derive(Default)]
pub(crate) struct State {
    /// The status of questions for the DaemonSet at the agent's end, one after the other; then 200.
    refusals: Vec<u16>,
    /// How often it was asked for the DaemonSet at the end.
    asked: usize,
    /// The status of questions for tokens; 201 grants them.
    pub(crate) tokens: u16,
    /// Whether it binds tokens to nodes.
    binds: bool,
    /// How many seconds a token lasts.
    lifetime: u64,
    /// The status of questions for pods with the plugin's token, and how often it was asked so.
    pub(crate) pods: u16,
    tried: usize,
    /// The status of the plugin's questions with the agent's token.
    pub(crate) lent: u16,
    /// Tokens that are accepted no more: their account was recreated.
    dead: usize,
    /// The paths of all pods and namespaces that were asked for as the plugin asks.
    paths: Vec<String>,
    /// What tokens were asked for with, and which were given.
    requests: Vec<Value>,
    granted: Vec<String>,
    pub(crate) events: Vec<String>,
    /// How often an agent that starts read the DaemonSet.
    looks: usize,
    /// The status of every question for the DaemonSet, where the agent has no right to ask.
    daemon_sets: Option<u16>,
    /// The answers to questions for the agent's own pod, one after the other, and the last one for ever.
    own_pod: Vec<(u16, String)>,
}

impl Api {
    pub(crate) fn start(node: &mut Node) -> Self {
        let state = State {
            tokens: 201,
            binds: true,
            lifetime: 86400,
            pods: 404,
            lent: 404,
            own_pod: vec![(403, failure(403))],
            ..State::default()
        };
        let api = Self(StandIn::of(state, respond));
        node.set("KUBERNETES_SERVICE_PORT", &api.0.port.to_string());
        api
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state()
    }

    fn last_granted(&self) -> String {
        self.state().granted.last().cloned().unwrap_or_default()
    }
}

fn respond(request: &HttpRequest, state: &mut State) -> (u16, String) {
    let (head, path) = (&request.head, request.path());
    let bearer = |line: &str| line.to_lowercase().starts_with("authorization: bearer ");
    let token = head.lines().find(|line| bearer(line)).map(|line| &line[22..]);
    let granted = token.and_then(|token| state.granted.iter().position(|granted| granted == token));
    if let (true, Some(status)) = (path.contains("/daemonsets"), state.daemon_sets) {
        return (status, failure(status));
    }
    if path.contains("/daemonsets") {
        assert!(!head.contains("watch="), "the status of a DaemonSet changes with each of its pods");
        // An agent that starts reads metadata only.
        if head.contains("PartialObjectMetadata") {
            state.looks += 1;
            return (200, daemon_set(false));
        }
        state.asked += 1;
        let status = if state.refusals.is_empty() { 200 } else { state.refusals.remove(0) };
        return if status == 200 { (200, daemon_set(false)) } else { (status, failure(status)) };
    }
    if path.contains("/serviceaccounts/") {
        let request: Value = serde_json::from_slice(&request.body).expect("JSON");
        let is_bound = request["spec"]["boundObjectRef"].is_object();
        state.requests.push(request);
        return match state.tokens {
            201 if is_bound && !state.binds => (400, failure(400)),
            201 => {
                let token = jwt(state.granted.len(), state.lifetime);
                state.granted.push(token.clone());
                (201, json!({"kind": "TokenRequest", "status": {"token": token}}).to_string())
            }
            status => (status, failure(status)),
        };
    }
    // An agent that ends reads metadata only; what reads the whole object is the plugin, or asks in its place.
    if path.contains("/pods/") && head.contains("PartialObjectMetadata") {
        return if state.own_pod.len() > 1 { state.own_pod.remove(0) } else { state.own_pod[0].clone() };
    }
    if path.contains("/pods/") || path == "/api/v1/namespaces/istio-system" {
        state.paths.push(path.to_owned());
        state.tried += usize::from(granted.is_some());
        let status = match granted {
            Some(number) if number < state.dead => 401,
            Some(_) => state.pods,
            None => state.lent,
        };
        return (status, failure(status));
    }
    if path.contains("/events") {
        let event = String::from_utf8_lossy(&request.body).into_owned();
        state.events.push(event.clone());
        return (201, event);
    }
    (404, failure(404))
}

fn jwt(count: usize, lifetime: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let body = json!({"sub": SUBJECT, "iat": now, "exp": now + lifetime, "count": count}).to_string();
    format!("e30.{}.signature", URL_SAFE_NO_PAD.encode(body))
}

pub(crate) fn node() -> Node {
    Node::new(&[("10-calico.conflist", CALICO)])
}

fn uses(node: &Node, token: &str) -> bool {
    !token.is_empty() && node.kubeconfig().is_some_and(|text| text.contains(&format!("token: \"{token}\"")))
}

#[test]
fn the_plugin_gets_a_token_of_its_own_and_a_fresh_one_when_the_agent_leaves() {
    let mut node = node();
    let api = Api::start(&mut node);
    let agent = node.start_ready();
    agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
    agent.wait_metric("istio_cni_plugin_token_requests_total{result=\"granted\"}", 1.0);
    assert!(agent.metric("istio_cni_plugin_token_expiry_timestamp_seconds") > 1e9);
    let first = api.state().requests[0].clone();
    assert_eq!(
        first["spec"]["boundObjectRef"],
        json!({"apiVersion": "v1", "kind": "Node", "name": "node-1"})
    );
    assert_eq!(first["spec"]["expirationSeconds"], 86400);
    assert!(!node.kubeconfig().expect("a kubeconfig").contains("token-1"), "the agent's token was not lent");

    let before = api.last_granted();
    assert_eq!(agent.end(), Some(0));
    assert!(api.last_granted() != before && uses(&node, &api.last_granted()), "{}", node.log());
    assert!(node.calls_us() && node.has_plugin());
    assert!(!node.log().contains(&before) && !node.log().contains("\twarn\t"), "{}", node.log());
}

#[test]
fn a_server_that_does_not_bind_to_nodes_is_asked_without() {
    let mut node = node();
    node.set("PLUGIN_TOKEN_LIFETIME", "2h");
    let api = Api::start(&mut node);
    api.state().binds = false;
    let agent = node.start_ready();
    agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
    assert_eq!(api.state().requests[1]["spec"], json!({"expirationSeconds": 7200}));
}

/// Neither a missing role to ask, nor a missing account, nor an account that may not read pods leaves the plugin without credentials.
#[test]
fn without_its_account_or_roles_the_plugin_uses_the_agents_token() {
    for (tokens, pods, reason) in [
        (403, 404, "may not request tokens of service account istio-cni-plugin (403)"),
        (404, 404, "service account istio-cni-plugin not found"),
        (201, 403, "does not let service account istio-cni-plugin get pods"),
    ] {
        let mut node = node();
        let api = Api::start(&mut node);
        (api.state().tokens, api.state().pods) = (tokens, pods);
        let agent = node.start_ready();
        assert!(uses(&node, "token-1"), "{reason}");
        agent.wait("the event", || !api.state().events.is_empty());
        assert!(api.state().events[0].contains("PluginTokenRefused"));
        agent.wait_metric("istio_cni_plugin_token_requests_total{result=\"refused\"}", 1.0);
        assert_eq!(agent.metric("istio_cni_plugin_token_expiry_timestamp_seconds"), 0.0);
        let log = node.log();
        assert!(
            log.contains("\twarn\t") && log.contains(reason) && log.contains("agent's own token"),
            "{log}"
        );

        // An operator applies the missing objects.
        (api.state().tokens, api.state().pods) = (201, 404);
        agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
        assert_eq!(node.log().matches(reason).count(), 1, "{}", node.log());
    }
}

/// The roles of Istio's chart over a node that had this project's: the account of the token that an agent before wrote down is gone.
#[test]
fn a_dead_token_of_an_agent_before_is_replaced_also_where_none_may_be_asked_for() {
    let mut node = node();
    let api = Api::start(&mut node);
    let agent = node.start_ready();
    agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
    agent.kill();
    (api.state().tokens, api.state().pods) = (403, 401);
    let agent = node.start_ready();
    agent.wait("the agent's token", || uses(&node, "token-1"));
}

/// An agent that gets no other token cannot be sure of its clock: it asks the API server whether the one in place has expired.
#[test]
fn a_token_whose_time_is_over_stays_until_the_api_server_rejects_it() {
    for failing in [403, 500] {
        let mut node = node();
        let api = Api::start(&mut node);
        api.state().lifetime = 4;
        let agent = node.start_ready();
        agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
        let token = {
            let mut state = api.state();
            (state.tokens, state.tried) = (failing, 0);
            state.granted.last().cloned().unwrap_or_default()
        };
        agent.wait("two questions about the token", || api.state().tried >= 2);
        agent.wait("the last token", || uses(&node, &token));
        api.state().pods = 401;
        agent.wait("the agent's token", || uses(&node, "token-1"));
        agent.wait_metric("istio_cni_plugin_token_expiry_timestamp_seconds", 0.0);
    }
}

/// Tokens end with their service account, whatever their time; an account of the same name gets others.
#[test]
fn a_rejected_token_is_replaced_at_once() {
    for known_by in ["a pod that fails", "the next question"] {
        let mut node = node();
        let api = Api::start(&mut node);
        let agent = node.start_ready();
        agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
        agent.wait("a try of what was installed", || api.state().tried >= 2);
        api.state().dead = 1;
        if known_by == "a pod that fails" {
            report(&node, "fail", 11, "the API server does not accept the credentials");
        } else {
            fs::remove_file(node.path("run/istio-cni-kubeconfig")).expect("removes");
        }
        agent.wait("another token", || {
            let granted = api.state().granted.len();
            granted == 2 && uses(&node, &api.last_granted())
        });
        agent.wait_ready();
    }
}

/// Neither a missing right of the plugin's account nor one of the agent's, whose token it then uses, is guessed from files.
#[test]
fn an_agent_is_ready_if_the_api_server_serves_the_plugin() {
    let mut node = node();
    let api = Api::start(&mut node);
    (api.state().tokens, api.state().lent) = (403, 403);
    let agent = node.start();
    let reason = agent.wait_not_ready("403");
    for part in ["no pod of the mesh can start", "verb get on pods", "ClusterRoleBinding istio-cni-plugin"] {
        assert!(reason.contains(part), "{part}: {reason}");
    }
    agent.wait("the gauge", || agent.metric("istio_cni_install_ready") == 0.0);
    assert_eq!(node.log().matches("the API server refuses the plugin").count(), 1, "{}", node.log());
    api.state().lent = 404;
    agent.wait_ready();

    // The right is lost while the agent runs, and a pod meets that first.
    api.state().lent = 403;
    report(&node, "fail", 101, "the API server does not let this plugin read pods (403)");
    agent.wait_not_ready("verb get on pods");
    assert!(api.state().paths.iter().any(|path| path == "/api/v1/namespaces/shop/pods/cart"));
    api.state().lent = 404;
    agent.wait_ready();
}

/// It would be so on every node, and their controllers would take the whole cluster from the scheduler.
#[test]
fn an_agent_stays_ready_while_the_api_server_is_away() {
    let mut node = node();
    let api = Api::start(&mut node);
    api.state().lent = 503;
    api.state().tokens = 503;
    let agent = node.start_ready();
    report(&node, "fail", 11, "the API server cannot serve the pod now");
    let asked = api.state().paths.len();
    agent.wait("another question", || api.state().paths.len() > asked);
    agent.passes_at_rest();
    agent.wait_ready();
}

/// `kubectl describe` shows events that have the pod's UID.
#[test]
fn the_agents_pod_has_one_event_for_each_change_of_readiness() {
    let mut node = node();
    let api = Api::start(&mut node);
    let pod = json!({"metadata": {"name": "istio-cni-node-x", "namespace": "istio-system", "uid": "uid-1"}});
    api.state().own_pod = vec![(200, pod.to_string())];
    let agent = node.start_ready();
    let reasons = || {
        let state = api.state();
        let events = state.events.iter().map(|event| serde_json::from_str::<Value>(event).expect("JSON"));
        events.map(|event| event["reason"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(reasons(), [""; 0], "a start is no event");
    fs::remove_file(node.path("net.d/10-calico.conflist")).expect("removes");
    let reason = agent.wait_not_ready("no network configuration");
    agent.wait("the event", || !reasons().is_empty());
    (0..20).for_each(|_| assert_eq!(agent.readyz().expect("answers").0, 503));
    node.write_conf("10-calico.conflist", CALICO);
    agent.wait_ready();
    agent.wait("the other event", || reasons().len() > 1);
    assert_eq!(reasons(), ["AgentNotReady", "AgentReady"]);
    let event: Value = serde_json::from_str(&api.state().events[0]).expect("JSON");
    assert_eq!(event["message"], reason.trim_end());
    let about = &event["involvedObject"];
    assert_eq!((&about["name"], &about["uid"]), (&json!("istio-cni-node-x"), &json!("uid-1")));
    assert_eq!(event["type"], "Warning");
}

#[test]
fn an_add_that_fails_for_the_nodes_sake_counts_until_one_succeeds() {
    let mut node = node();
    let _api = Api::start(&mut node);
    let agent = node.start_ready();
    report(&node, "fail", 100, "annotation x");
    agent.wait_metric("istio_cni_plugin_add_total{outcome=\"fail\",reason=\"100\"}", 1.0);
    report(&node, "fail", 110, "a pod may ask for what this node lacks");
    agent.wait_metric("istio_cni_plugin_add_total{outcome=\"fail\",reason=\"110\"}", 1.0);
    agent.wait_ready();
    report(&node, "fail", 50, "iptables-restore: not found");
    let reason = agent.wait_not_ready("the ADD of pod shop/cart failed");
    assert!(reason.contains("iptables-restore: not found"), "{reason}");
    agent.wait("the gauge", || agent.metric("istio_cni_install_ready") == 0.0);
    report(&node, "skip", 0, "no proxy");
    agent.wait_metric("istio_cni_plugin_add_total{outcome=\"skip\",reason=\"no_proxy\"}", 1.0);
    agent.wait_not_ready("shop/cart");
    report(&node, "redirect", 0, "redirected");
    agent.wait_ready();
}

/// Sends the line that a plugin logs at the end of an ADD.
pub(crate) fn report(node: &Node, decision: &str, code: u32, message: &str) {
    let line = json!({
        "level": "info", "time": "2026-11-21T07:26:50.000001Z", "scope": "x", "msg": message,
        "pod": "shop/cart", "decision": decision, "code": code, "reason": "no_proxy", "ms": "total:1.0",
    });
    let body = json!([line.to_string()]).to_string();
    let socket = node.path("run/log.sock");
    let mut curl = test_support::process::command(
        "curl",
        ["--silent", "--fail", "--data-binary", &body, "http://x/log"],
    );
    curl.arg("--unix-socket").arg(&socket);
    test_support::process::run(&mut curl, agent::DEADLINE).expect("runs").ok().expect("is received");
}

#[test]
fn an_account_may_be_declined() {
    let mut node = node();
    node.set("PLUGIN_SERVICE_ACCOUNT", "");
    let api = Api::start(&mut node);
    let agent = node.start_ready();
    assert!(uses(&node, "token-1"));
    assert_eq!(agent.end(), Some(0));
    assert!(api.state().requests.is_empty() && uses(&node, "token-1"));
}

/// All that is written of the plugin's credentials.
fn credentials(node: &Node) -> String {
    let token = fs::read_to_string(node.path("run/istio-cni-token")).unwrap_or_default();
    node.kubeconfig().unwrap_or_default() + &token
}

#[test]
fn an_agent_without_an_api_server_keeps_the_plugins_token() {
    for token_file in ["false", "true"] {
        let mut node = node();
        node.set("KUBECONFIG_TOKEN_FILE", token_file);
        let api = Api::start(&mut node);
        let agent = node.start_ready();
        agent.wait("the plugin's own token", || {
            let token = api.last_granted();
            !token.is_empty() && credentials(&node).contains(&token)
        });
        agent.kill();
        // Port 1 has no listener.
        node.set("KUBERNETES_SERVICE_PORT", "1");
        let agent = node.start_ready();
        agent.wait_metric("istio_cni_plugin_token_requests_total{result=\"failed\"}", 1.0);
        agent.wait("the new server's address", || credentials(&node).contains(":1\""));
        assert!(credentials(&node).contains(&api.last_granted()), "{}", node.log());
        // And an outage is one line.
        assert_eq!(node.log().matches("cannot read the agent's DaemonSet").count(), 1, "{}", node.log());
    }
}

#[test]
fn one_refusal_at_the_end_does_not_uninstall() {
    for status in [401, 403] {
        let mut node = node();
        let api = Api::start(&mut node);
        let agent = node.start_ready();
        wait_looked(&node, &api);
        api.state().refusals = vec![status];
        assert_eq!(agent.end(), Some(0));
        assert!(node.calls_us() && node.has_plugin() && node.kubeconfig().is_some(), "{}", node.log());
        assert_eq!(api.state().asked, 2);
    }
}

/// After a forced deletion the agent's pod, and so its token, is gone before the agent; everything else is there.
#[test]
fn refusals_without_end_uninstall_only_where_the_plugin_is_refused_as_well() {
    for (pods, stays) in [(404, true), (503, true), (401, false)] {
        let mut node = node();
        let api = Api::start(&mut node);
        let agent = node.start_ready();
        wait_looked(&node, &api);
        agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
        api.state().refusals = vec![401; 10_000];
        api.state().pods = pods;
        assert_eq!(agent.end(), Some(0));
        assert_eq!((node.calls_us(), node.has_plugin()), (stays, stays), "{pods}: {}", node.log());
        assert!(api.state().asked > 1);
    }
}

/// The agent's own pod, as the API server has it.
fn own_pod(is_deleted: bool, is_owned: bool) -> (u16, String) {
    let mut metadata = json!({"name": "istio-cni-node-x", "namespace": "istio-system", "uid": "u"});
    if is_deleted {
        metadata["deletionTimestamp"] = json!("2026-11-21T00:00:00Z");
    }
    if is_owned {
        let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "istio-cni-node", "uid": "d", "controller": true});
        metadata["ownerReferences"] = json!([owner]);
    }
    (200, json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata}).to_string())
}

/// Istio's own chart gives the agent no right to get its DaemonSet, and none to ask for tokens.
#[test]
fn with_istios_roles_an_upgrade_leaves_the_plugin_and_removal_takes_it() {
    let (replaced, gone, refused) = (own_pod(true, true), (404, failure(404)), (403, failure(403)));
    for (what, answers, stays) in [
        ("a rollout deletes the pod", vec![replaced.clone()], true),
        ("only the container ends", vec![own_pod(false, true)], true),
        ("the pod was deleted by force", vec![gone], true),
        ("the roles are applied again", vec![replaced.clone(), refused.clone(), replaced.clone()], true),
        ("the roles go with the DaemonSet", vec![replaced, refused.clone()], false),
        ("the roles are gone already", vec![refused], false),
        ("the API server does not respond about the pod", vec![(503, failure(503))], true),
        ("the pod has no owner", vec![own_pod(true, false)], false),
    ] {
        let mut node = node();
        let api = Api::start(&mut node);
        (api.state().daemon_sets, api.state().tokens, api.state().own_pod) = (Some(403), 403, answers);
        let agent = node.start_ready();
        agent.wait("the warning", || node.log().contains("may not get DaemonSet istio-cni-node"));
        assert!(uses(&node, "token-1"), "{what}");
        assert_eq!(agent.end(), Some(0));
        assert_eq!((node.calls_us(), node.has_plugin()), (stays, stays), "{what}: {}", node.log());
    }
}

/// The roles of Istio's chart over a node that had this project's, and the plugin's account is still there.
#[test]
fn a_token_that_an_agent_before_was_granted_counts_as_the_plugins_at_the_end() {
    let mut node = node();
    let api = Api::start(&mut node);
    let agent = node.start_ready();
    agent.wait("the plugin's own token", || uses(&node, &api.last_granted()));
    agent.kill();
    (api.state().daemon_sets, api.state().tokens) = (Some(403), 403);
    let agent = node.start_ready();
    agent.wait("the warning", || node.log().contains("may not get DaemonSet istio-cni-node"));
    assert!(uses(&node, &api.last_granted()));
    assert_eq!(agent.end(), Some(0));
    assert!(node.calls_us() && node.has_plugin(), "{}", node.log());
}

/// Waits until the agent has seen its DaemonSet, as it does when it starts.
fn wait_looked(node: &Node, api: &Api) {
    test_support::process::until("the lookup", agent::DEADLINE, &[], || {
        Ok((api.state().looks > 0).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", node.log()));
}

#[test]
fn an_agent_without_a_working_client_reports_that() {
    let mut node = node();
    node.set("KUBERNETES_SERVICE_PROTOCOL", "https");
    node.set("SKIP_TLS_VERIFY", "false");
    fs::write(node.path("account/ca.crt"), "no certificate").expect("writes");
    let agent = node.start();
    let reason = agent.wait_not_ready("the agent has no working API client");
    assert!(reason.contains("certificate"), "{reason}");
    assert_eq!(node.log().matches("the agent has no working API client").count(), 1, "{}", node.log());
}
