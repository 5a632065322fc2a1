//! Whether pods that start on a node now are served: by its agent, its plugin and its kernel, and what its object says of it.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::service_translation::is_translated;
use cni_core::agent_notes::AgentNotes;
use cni_core::conf::Conf;
use cni_core::enrolment_report::EnrolmentReport;
use cni_core::pod_source;
use netns_apply::{ApplyOptions, preflight};
use reasons::{CONDITION, TAINT_KEYS};
use redirect_core::pod::{Decision, PodFacts};
use redirect_core::settings::NamespaceFacts;

use crate::cause::{Cause, PodFinding};
use crate::cluster::NodeObject;
use crate::inspect::lacking;
use crate::pod::Pod;

/// How long the agent may take for an answer. It checks files, and asks the plugin.
const PATIENCE: Duration = Duration::from_secs(3);
/// The most that is read of its answer.
const MOST_BYTES: u64 = 16 << 10;
/// Conditions of a node that say whether it takes pods: Kubernetes' own, and the agent's.
const READY: &str = "Ready";

/// What the agent of this node answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentAnswer {
    /// That it is ready.
    Ready,
    /// That it is not, and why.
    NotReady(String),
    /// Nothing that an agent would say.
    Unexpected(String),
    /// Nothing listens, or nothing answers.
    Unreachable(String),
}

/// All that the agent answers.
#[derive(Debug)]
pub struct AgentReport {
    /// Whether it is ready.
    pub answer: AgentAnswer,
    /// What it knows of pods in ambient mode, if that is on.
    pub enrolment: Option<EnrolmentReport>,
    /// What it reports of itself besides.
    pub notes: AgentNotes,
}

/// Asks the agent whether it is ready, and what it knows of pods in ambient mode and itself.
#[must_use]
pub fn ask(address: SocketAddr) -> AgentReport {
    let answer = match get(address, "/readyz?verbose", PATIENCE, MOST_BYTES) {
        Ok(answer) => answer,
        Err(error) => {
            let answer = AgentAnswer::Unreachable(format!("{address}: {error}"));
            return AgentReport { answer, enrolment: None, notes: AgentNotes::default() };
        }
    };
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let (verdict, more) = body.split_once('\n').unwrap_or((body, ""));
    let verdict = match (head.split_whitespace().nth(1), verdict.trim()) {
        (Some("200"), "ready") => AgentAnswer::Ready,
        (Some("503"), why) if why.starts_with("not ready: ") => AgentAnswer::NotReady(why.to_owned()),
        _ => AgentAnswer::Unexpected(format!(
            "{address} answers {:?}",
            head.lines().next().unwrap_or_default()
        )),
    };
    AgentReport { answer: verdict, enrolment: EnrolmentReport::find(more), notes: AgentNotes::find(more) }
}

/// One request over plain HTTP, whose server closes the connection.
pub(crate) fn get(address: SocketAddr, path: &str, patience: Duration, most: u64) -> io::Result<String> {
    let deadline = Instant::now() + patience;
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    while (answer.len() as u64) < most {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => break,
            read => answer.extend_from_slice(piece.get(..read).unwrap_or_default()),
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// What is wrong with the agent: its own words are more than what the kubelet has of its pod. Silence is only wrong if an agent ran there: a node
/// may be set up without one, and without the plugin's entry another program may be asked.
#[must_use]
pub fn of_agent(answer: AgentAnswer, conf: Option<&Conf>, pods: &[Pod]) -> Option<PodFinding> {
    let not_ready = |why: String| PodFinding::new(Cause::AgentNotReady, why);
    match (answer, of_agent_pods(pods), conf) {
        (AgentAnswer::NotReady(why), ..) => Some(not_ready(why)),
        (_, Some(of_pods), _) => Some(of_pods),
        (AgentAnswer::Ready, None, _) | (_, None, None) => None,
        (AgentAnswer::Unexpected(why), None, Some(_)) => Some(not_ready(why)),
        (AgentAnswer::Unreachable(why), None, Some(conf)) => {
            let socket = conf.run_dir.join("log.sock");
            let was_there = format!("{} is an agent's", socket.display());
            socket.exists().then(|| PodFinding { cause: Cause::AgentSilent, seen: vec![why, was_there] })
        }
    }
}

/// What the agent reports of itself beside readiness.
pub fn of_notes(notes: AgentNotes) -> impl Iterator<Item = PodFinding> {
    let all = [(Cause::AgentLimited, notes.limits), (Cause::AgentCounts, notes.counts)];
    all.into_iter().filter_map(|(cause, seen)| PodFinding::some(cause, seen))
}

/// What is wrong with the agent's pod on the node, as the kubelet sees it.
fn of_agent_pods(pods: &[Pod]) -> Option<PodFinding> {
    let agents: Vec<&Pod> = pods.iter().filter(|pod| pod.is_agent).collect();
    let is_ready = |pod: &Pod| pod.conditions.iter().any(|one| one.kind == READY && one.status == "True");
    if agents.is_empty() || agents.iter().any(|pod| is_ready(pod)) {
        return None;
    }
    let seen = agents.iter().map(|pod| {
        let why = pod.conditions.iter().find(|one| one.kind == READY).map_or("", |one| &one.message);
        let waits = pod.waits.iter().map(String::as_str);
        let all: Vec<&str> = waits.chain((!why.is_empty()).then_some(why)).collect();
        format!(
            "pod {} is not ready: {}",
            pod.name,
            if all.is_empty() { "it does not run".to_owned() } else { all.join("; ") }
        )
    });
    Some(PodFinding { cause: Cause::AgentNotReady, seen: seen.collect() })
}

/// Whether the plugin could read pods, judging by this machine alone.
#[must_use]
pub fn of_credentials(conf: &Conf) -> Option<PodFinding> {
    let error = pod_source::check(conf).err()?;
    Some(PodFinding::new(Cause::NoCredentials, error.to_string()))
}

/// Whether connections to services have other destinations before rules of pods see them: by trying it with one service.
#[must_use]
pub fn of_services(service: SocketAddr) -> Option<PodFinding> {
    let seen = format!("connect(2) to {service} in a new network namespace gets another destination");
    is_translated(service).then(|| PodFinding::new(Cause::ServicesTranslated, seen))
}

/// What the kernel lacks of what a sidecar needs.
#[must_use]
pub fn of_kernel(conf: &Conf) -> Option<PodFinding> {
    let options = ApplyOptions::default().backend(conf.programming.backend);
    if let Err(error) = preflight(&options) {
        return Some(PodFinding::new(Cause::KernelLacks, error.to_string()));
    }
    let sidecar = PodFacts::sidecar(std::iter::empty::<(&str, &str)>());
    let Ok(Decision::Redirect(redirect)) =
        sidecar.decide(&NamespaceFacts::new(&["192.0.2.1".parse().ok()?]))
    else {
        return None;
    };
    PodFinding::some(Cause::KernelLacks, lacking(&redirect.plan(), options.backend))
}

/// What the node's object says.
#[must_use]
pub fn of_object(node: &NodeObject) -> Vec<PodFinding> {
    let mut all = Vec::new();
    let condition = |cause: Cause, kind: &str, is_bad: fn(&str) -> bool| {
        let found = node.conditions.iter().find(|one| one.kind == kind && is_bad(&one.status))?;
        let seen =
            format!("node {}: {kind} is {} ({}): {}", node.name, found.status, found.reason, found.message);
        Some(PodFinding::new(cause, seen))
    };
    all.extend(condition(Cause::NodeNotVerified, CONDITION, |status| status == "False"));
    all.extend(condition(Cause::NodeNotReady, READY, |status| status != "True"));
    let taints = node.taints.iter().filter(|(key, _)| TAINT_KEYS.contains(&key.as_str()));
    let taints = taints.map(|(_, taint)| format!("node {} has taint {taint}", node.name));
    all.extend(PodFinding::some(Cause::NodeTainted, taints.collect()));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ClusterObjects;
    use serde_json::{Value, json};
    use std::net::TcpListener;
    use std::thread;

    /// What is made of an answer that is sent as it is.
    fn answered(answer: &'static str) -> AgentAnswer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut asked = [0; 512];
            let read = stream.read(&mut asked).expect("a question");
            assert!(asked[..read].starts_with(b"GET /readyz?verbose HTTP/1.0\r\n"));
            stream.write_all(answer.as_bytes()).expect("is sent");
        });
        let AgentReport { answer, .. } = ask(address);
        server.join().expect("the server ends well");
        answer
    }

    #[test]
    fn the_agents_answer_is_understood_and_no_other() {
        assert_eq!(answered("HTTP/1.0 200 OK\r\nx: y\r\n\r\nready\n"), AgentAnswer::Ready);
        let verbose = "HTTP/1.0 200 OK\r\n\r\nready\n1 of 1 meshed pods verified\n";
        assert_eq!(answered(verbose), AgentAnswer::Ready);
        let why = "not ready: 10-a.conflist has no istio-cni entry";
        let sent =
            "HTTP/1.0 503 Service Unavailable\r\n\r\nnot ready: 10-a.conflist has no istio-cni entry\n";
        assert_eq!(answered(sent), AgentAnswer::NotReady(why.to_owned()));
        assert!(matches!(answered("HTTP/1.0 200 OK\r\n\r\n<html>"), AgentAnswer::Unexpected(_)));
        assert!(matches!(answered(""), AgentAnswer::Unexpected(_)));
        let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        assert!(matches!(ask(free).answer, AgentAnswer::Unreachable(_)));
    }

    #[test]
    fn the_agents_own_words_count_before_those_of_the_kubelet_also_without_an_entry() {
        let pod = json!({"metadata": {"namespace": "mesh", "name": "agent"}, "spec": {"containers": []},
            "status": {"conditions": [{"type": "Ready", "status": "False", "message": "unready containers"}]}});
        let pods = [Pod { is_agent: true, ..Pod::from_json(&pod).expect("a pod") }];
        let seen =
            |answer: AgentAnswer, pods: &[Pod]| of_agent(answer, None, pods).map(|finding| finding.seen);
        let not_ready = || AgentAnswer::NotReady("not ready: no network".to_owned());
        let why = Some(vec!["not ready: no network".to_owned()]);
        assert_eq!((seen(not_ready(), &pods), seen(not_ready(), &[])), (why.clone(), why));
        let of_kubelet = Some(vec!["pod mesh/agent is not ready: unready containers".to_owned()]);
        assert_eq!(seen(AgentAnswer::Unreachable("refused".to_owned()), &pods), of_kubelet);
        assert_eq!(
            seen(AgentAnswer::Unexpected("<html>".to_owned()), &[]),
            None,
            "another program of this machine"
        );
    }

    #[test]
    fn what_limits_an_agent_is_trouble_and_what_it_counted_is_a_note() {
        let notes = |text: &str| of_notes(AgentNotes::find(text)).collect::<Vec<PodFinding>>();
        assert_eq!(notes("5 of 5 meshed pods verified\n"), []);
        let found = notes("limited: its settings are refused\ncounted: x 1\ncounted: y 2\n");
        let [limits, counts] = &found[..] else { panic!("{found:?}") };
        assert!(limits.is_trouble() && limits.seen == ["its settings are refused"], "{limits:?}");
        assert!(!counts.is_trouble() && counts.seen == ["x 1", "y 2"], "{counts:?}");
    }

    fn node(status: &str, taints: &Value) -> Vec<&'static str> {
        let mut cluster = ClusterObjects::default();
        cluster.take(&json!({"kind": "Node", "metadata": {"name": "n1"}, "spec": {"taints": taints},
            "status": {"conditions": [{"type": "cni.istio.io/Ready", "status": status}, {"type": "Ready", "status": "True"}]}}));
        of_object(&cluster.nodes[0]).iter().map(|finding| finding.cause.code()).collect()
    }

    #[test]
    fn only_bad_news_of_the_node_is_told() {
        assert_eq!(node("True", &json!([])), Vec::<&str>::new());
        assert_eq!(node("Unknown", &json!([{"key": "other"}])), Vec::<&str>::new());
        assert_eq!(node("False", &json!([])), ["node-not-verified"]);
        for key in TAINT_KEYS {
            assert_eq!(node("True", &json!([{"key": key, "effect": "NoExecute"}])), ["node-tainted"]);
        }
    }
}
