//! What the node agent publishes: events, the node's condition and taint, reasons in metrics. The agent writes these words;
//! `redirectctl` reads and explains them.

/// A word that others read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasonDoc {
    /// The word.
    pub word: &'static str,
    /// What it means, as a sentence without its full stop.
    pub meaning: &'static str,
    /// The remedy; empty if none is needed.
    pub remedy: &'static str,
}

const fn sign(word: &'static str, meaning: &'static str, remedy: &'static str) -> ReasonDoc {
    ReasonDoc { word, meaning, remedy }
}

/// The label of the agents' pods.
pub const AGENT_LABEL: (&str, &str) = ("k8s-app", "istio-cni-node");
/// Where an agent deployed from the manifest serves `/readyz`, for its own node.
pub const AGENT_HEALTH: &str = "127.0.0.1:8000";
/// The type of the node's condition, unless it is set otherwise.
pub const CONDITION: &str = "cni.istio.io/Ready";
/// The key of the node's taint, unless it is set otherwise.
pub const TAINT: &str = "cni.istio.io/not-ready";
/// A part of the message of an event about a repair that failed.
pub const COULD_NOT_BE: &str = "but it could not be";
/// The reasons of events about broken pods, by what is done with them.
pub const REPAIR_EVENTS: [&str; 3] = ["RepairBrokenPod", "DeleteBrokenPod", "LabelBrokenPod"];

/// How an attempt to repair or heal a pod ended.
pub const REPAIRS: [ReasonDoc; 22] = [
    sign("done", "it is done, and where the pod was redirected also verified", ""),
    sign("healed", "the pod is redirected as planned again", ""),
    sign("had_label", "the pod has the label already", ""),
    sign("gone", "the pod is gone, or another one has its name", ""),
    sign("changed", "the pod changed concurrently; it is tried again", ""),
    sign("unanswered", "the API server gave no answer; it is tried again", "check the API server"),
    sign(
        "refused",
        "the API server does not allow it (401 or 403)",
        "give the agent's service account what the event names",
    ),
    sign(
        "rejected",
        "the API server rejected the change",
        "the event has its words: an admission policy, perhaps",
    ),
    sign(
        "no_capability",
        "the agent's container lacks a capability",
        "switch on all that is marked repair-in-place in its manifest",
    ),
    sign("no_entry", "the plugin's entry cannot be read", "the agent's /readyz says more"),
    sign(
        "ended",
        "the pod does not run any more (restartPolicy: Never)",
        "delete it: only another pod can be redirected",
    ),
    sign(
        "not_meshed",
        "the plugin would leave the pod alone as well",
        "the settings of the validation contradict those of the plugin",
    ),
    sign(
        "not_found",
        "no network namespace is surely the pod's",
        "see that the agent has its mounts and SYS_PTRACE",
    ),
    sign("no_process", "no process of the pod runs now", "wait: it is tried again as soon as one does"),
    sign(
        "ambiguous",
        "several network namespaces may be the pod's",
        "look for a container that has made network namespaces of its own",
    ),
    sign(
        "other_pod",
        "another pod's processes are in the network namespace, and nothing is touched there",
        "delete the pod",
    ),
    sign(
        "not_applied",
        "the rules could not be put in force, and the network namespace is as it was",
        "the event names the cause",
    ),
    sign("not_verified", "the rules are in force, but another rule interferes", "the event names the rule"),
    sign(
        "unverifiable",
        "the rules are in force, but whether other programs' rules interfere cannot be determined",
        "the event names the cause: if the pod has too many rules to be read, remove them or delete the pod",
    ),
    sign("not_severed", "connections opened earlier may still bypass the proxy", "delete the pod"),
    sign(
        "interference",
        "rules of other programs interfere; the agent keeps them",
        "take them away where they are made",
    ),
    sign("failed", "cannot determine whether the pod is redirected", "the agent's log says why"),
];

/// The reasons of the agents' events.
pub const EVENTS: [ReasonDoc; 14] = [
    sign(
        "RepairBrokenPod",
        "the agent redirected a pod whose validation had failed, or could not",
        "where it could not, the message names the cause; docs/concepts/repair.md explains each",
    ),
    sign(
        "DeleteBrokenPod",
        "the agent deleted a pod whose validation had failed, or could not",
        "where it could not, the message names the cause",
    ),
    sign(
        "LabelBrokenPod",
        "the agent labelled a pod whose validation had failed, or could not",
        "handle the labelled pods",
    ),
    sign(
        "RedirectDrift",
        "the drift watch found a pod that is not redirected as planned",
        "redirectctl pod shows what differs and what to do",
    ),
    sign(
        "RedirectHealed",
        "the agent redirected a pod as planned again",
        "find out who changed its rules: the message names the process if the kernel reported it",
    ),
    sign(
        "RedirectContested",
        "another program changes a pod's rules repeatedly; the agent backs off",
        "stop the other program",
    ),
    sign(
        "RedirectNotHealed",
        "a pod is not redirected as planned and could not be repaired",
        "delete it; the message names the cause",
    ),
    sign(
        "NodeTainted",
        "the agent or the controller tainted the node: mesh pods starting on it are not verified to be redirected",
        "the message says why",
    ),
    sign("NodeFreed", "the node's taint was removed: pods starting on it are verified to be redirected", ""),
    sign(
        "NodeTaintContested",
        "another controller removes the node's taint while pods are not verified to be redirected there",
        "switch the other controller off, or the agent's taint",
    ),
    sign(
        "NetworkConfigContested",
        "another program removes the plugin's entry repeatedly",
        "the message says who it probably is, and what to do",
    ),
    sign(
        "NetworkConfigPreempted",
        "another file came to be the one that the runtime uses",
        "the message names it",
    ),
    sign(
        "SettingsRefused",
        "the agent rejected its ConfigMap and keeps the previous settings",
        "correct what the message names",
    ),
    sign(
        "PluginTokenRefused",
        "the agent may not ask for the plugin's own tokens, so the plugin uses the agent's token",
        "give it the right that the message names",
    ),
];

/// The reasons of the node's condition.
pub const VERDICTS: [ReasonDoc; 5] = [
    sign("Verified", "pods that start on the node are verified to be redirected", ""),
    sign("AgentNotReady", "the node agent is not ready", "the message is that of its /readyz"),
    sign(
        "ProbeFailed",
        "a network namespace created as a test could not be redirected; pods would fail too",
        "the message says what the kernel refused",
    ),
    sign(
        "ProbeImpossible",
        "the agent's container is not equipped to redirect a network namespace of its own",
        "give it NET_ADMIN and SYS_ADMIN, or set TAINT_PROBE=false",
    ),
    sign("Removed", "the plugin was removed from the node", ""),
];
