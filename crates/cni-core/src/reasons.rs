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

/// A word with its meaning and remedy.
pub(crate) const fn reason(word: &'static str, meaning: &'static str, remedy: &'static str) -> ReasonDoc {
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
/// The keys that the documents name, by what autoscalers ignore: the usual one first.
pub const TAINT_KEYS: [&str; 3] = [
    TAINT,
    "startup-taint.cluster-autoscaler.kubernetes.io/istio-cni-not-ready",
    "readiness.k8s.io/istio-cni-not-ready",
];
/// A part of the message of an event about a repair that failed.
pub const COULD_NOT_BE: &str = "but it could not be";
/// The reasons of events about broken pods, by what is done with them.
pub const REPAIR_EVENTS: [&str; 3] = ["RepairBrokenPod", "DeleteBrokenPod", "LabelBrokenPod"];

/// The reason of events about an agent's own pod that became unready, and of the node's condition while it is.
pub const AGENT_NOT_READY: &str = "AgentNotReady";
/// The reason of events about an agent's own pod that is ready again.
pub const AGENT_READY: &str = "AgentReady";
/// The reason of events about pods of ambient mode that stay pending.
pub const AMBIENT_PENDING: &str = "AmbientPending";
/// The reason of events about pods that rules do not bind.
pub const SANDBOXED_EVENT: &str = "SandboxedRuntime";
/// Rules of other programs interfere with a pod that is redirected as planned.
pub const INTERFERENCE: ReasonDoc = reason(
    "interference",
    "the pod is redirected as planned, and rules of other programs interfere; the agent keeps them",
    "take them away where they are made",
);
/// Rules do not bind a pod.
pub const SANDBOXED: ReasonDoc = reason(
    "sandboxed",
    "the pod's runtime is sandboxed: rules do not bind it, and its traffic bypasses the proxy",
    "take runtimeClassName, or the proxy, from the pod; a sandbox that obeys the node's rules does not belong into SANDBOXED_RUNTIMES",
);
/// Why the state of a pod is unknown: no network namespace is surely the pod's.
pub const NOT_FOUND: ReasonDoc = reason(
    "namespace-not-found",
    "the pod's network namespace is not found on this machine",
    "redirectctl: run it on the pod's node, as root, with --netns-dir naming the runtime's directory of network namespaces; the agent needs its mounts and SYS_PTRACE",
);
/// Likewise: several may be.
pub const AMBIGUOUS: ReasonDoc = reason(
    "namespace-ambiguous",
    "several network namespaces may be the pod's",
    "look for a container that has made network namespaces of its own",
);
/// Likewise: the mesh's rules are in force, other rules cannot be read.
pub const UNVERIFIABLE: ReasonDoc = reason(
    "unverifiable",
    "the rules are in force, but whether other programs' rules interfere cannot be determined",
    "the message names the cause: if the pod has too many rules to be read, remove them or delete the pod; if its plan is too large for the agent, list ranges in the annotation, or raise the memory limit",
);
/// Likewise: the network namespace, or the pod's settings, cannot be read.
pub const UNREADABLE: ReasonDoc = reason(
    "cannot-look",
    "cannot determine whether the pod is redirected",
    "the message, or the agent's log, says why; redirectctl has to run as root on the node",
);

/// How an attempt to repair or heal a pod ended.
pub const REPAIRS: [ReasonDoc; 24] = [
    reason("done", "it is done, and where the pod was redirected also verified", ""),
    reason("healed", "the pod is redirected as planned again", ""),
    reason("had_label", "the pod has the label already", ""),
    reason("gone", "the pod is gone, or another one has its name", ""),
    reason("changed", "the pod changed concurrently; it is tried again", ""),
    reason("unanswered", "the API server gave no answer; it is tried again", "check the API server"),
    reason(
        "refused",
        "the API server does not allow it (401 or 403)",
        "give the agent's service account what the event names",
    ),
    reason(
        "rejected",
        "the API server rejected the change",
        "the event has its words: an admission policy, perhaps",
    ),
    reason(
        "no_capability",
        "the agent's container lacks a capability",
        "switch on all that is marked repair-in-place in its manifest",
    ),
    reason("no_entry", "the plugin's entry cannot be read", "the agent's /readyz says more"),
    reason(
        "ended",
        "the pod does not run any more (restartPolicy: Never)",
        "delete it: only another pod can be redirected",
    ),
    reason(
        "not_meshed",
        "the plugin would leave the pod alone as well",
        "the settings of the validation contradict those of the plugin",
    ),
    SANDBOXED,
    NOT_FOUND,
    reason(
        "throttled",
        "pods were deleted, and their replacements failed as well, or many pods of the node were deleted; it is tried again later",
        "find out why pods start without being redirected: the agent's /readyz, and redirectctl pod for one of them",
    ),
    reason("no_process", "no process of the pod runs now", "wait: it is tried again as soon as one does"),
    AMBIGUOUS,
    reason(
        "other_pod",
        "another pod's processes are in the network namespace, and nothing is touched there",
        "delete the pod",
    ),
    reason(
        "not_applied",
        "the rules could not be put in force, and the network namespace is as it was",
        "the event names the cause",
    ),
    reason("not_verified", "the rules are in force, but another rule interferes", "the event names the rule"),
    UNVERIFIABLE,
    reason("not_severed", "connections opened earlier may still bypass the proxy", "delete the pod"),
    INTERFERENCE,
    UNREADABLE,
];

/// The reasons of the agents' events.
pub const EVENTS: [ReasonDoc; 18] = [
    reason(
        AGENT_NOT_READY,
        "the agent is not ready: pods of the mesh that start on its node may fail or miss the proxy",
        "the message is that of its /readyz",
    ),
    reason(AGENT_READY, "the agent is ready again", ""),
    reason(
        "RepairBrokenPod",
        "the agent redirected a pod whose validation had failed, or could not",
        "where it could not, the message names the cause; docs/concepts/repair.md explains each",
    ),
    reason(
        "DeleteBrokenPod",
        "the agent deleted a pod whose validation had failed, or could not",
        "where it could not, the message names the cause",
    ),
    reason(
        "LabelBrokenPod",
        "the agent labelled a pod whose validation had failed, or could not",
        "handle the labelled pods",
    ),
    reason(
        "RedirectDrift",
        "the drift watch found a pod that is not redirected as planned",
        "redirectctl pod shows what differs and what to do",
    ),
    reason(
        SANDBOXED_EVENT,
        "a pod of the mesh runs in a sandboxed runtime, which rules do not bind: its traffic bypasses the proxy",
        "take runtimeClassName, or the proxy, from the pod",
    ),
    reason(
        "RedirectHealed",
        "the agent redirected a pod as planned again",
        "find out who changed its rules: the message names the process if the kernel reported it",
    ),
    reason(
        "RedirectContested",
        "another program changes a pod's rules repeatedly; the agent backs off",
        "stop the other program",
    ),
    reason(
        "RedirectNotHealed",
        "a pod is not redirected as planned and could not be repaired",
        "delete it; the message names the cause",
    ),
    reason(
        AMBIENT_PENDING,
        "a pod is not as its settings for ambient mode want it",
        "the message has the reason; the agent tries again until the pod is enrolled",
    ),
    reason(
        "NodeTainted",
        "the agent or the controller tainted the node: mesh pods starting on it are not verified to be redirected",
        "the message says why",
    ),
    reason(
        "NodeFreed",
        "the node's taint was removed: pods starting on it are verified to be redirected",
        "",
    ),
    reason(
        "NodeTaintContested",
        "another controller removes the node's taint while pods are not verified to be redirected there",
        "switch the other controller off, or the agent's taint",
    ),
    reason(
        "NetworkConfigContested",
        "another program removes the plugin's entry repeatedly",
        "the message says who it probably is, and what to do",
    ),
    reason(
        "NetworkConfigPreempted",
        "another file came to be the one that the runtime uses",
        "the message names it",
    ),
    reason(
        "SettingsRefused",
        "the agent rejected its ConfigMap and keeps the previous settings",
        "correct what the message names",
    ),
    reason(
        "PluginTokenRefused",
        "the agent may not ask for the plugin's own tokens, so the plugin uses the agent's token",
        "give it the right that the message names",
    ),
];

/// The reasons of the node's condition.
pub const VERDICTS: [ReasonDoc; 5] = [
    reason("Verified", "pods that start on the node are verified to be redirected", ""),
    reason(AGENT_NOT_READY, "the node agent is not ready", "the message is that of its /readyz"),
    reason(
        "ProbeFailed",
        "a network namespace created as a test could not be redirected; pods would fail too",
        "the message says what the kernel refused",
    ),
    reason(
        "ProbeImpossible",
        "the agent's container is not equipped to redirect a network namespace of its own",
        "give it NET_ADMIN and SYS_ADMIN, or set TAINT_PROBE=false",
    ),
    reason("Removed", "the plugin was removed from the node", ""),
];

/// Why the runtime does not call the plugin as it should (`istio_cni_conflist_obstacles_total`).
pub const OBSTACLES: [ReasonDoc; 15] = [
    reason(
        "no_network",
        "the directory has no network configuration that the runtime can load",
        "wait for the primary network plugin, or see its log",
    ),
    reason(
        "no_pinned",
        "the file of CNI_CONF_NAME (chart: cniConfFileName) is missing or cannot be loaded",
        "name the file that the runtime uses",
    ),
    reason(
        "no_original",
        "the file of which the agent's own list is a copy is gone",
        "wait for the primary network plugin to write it",
    ),
    reason(
        "foreign",
        "the file of the agent's settings belongs to another program",
        "give the agent an unused file name",
    ),
    reason(
        "preempted",
        "the runtime uses another file than the one with the entry",
        "remove the file that comes first, or have the agent follow it",
    ),
    reason("missing", "the istio-cni entry is missing, and the agent adds it", FIND_WRITER),
    reason("edited", "the istio-cni entry was edited, and the agent restores it", FIND_WRITER),
    reason("repeated", "the file has several istio-cni entries, and the agent keeps one", FIND_WRITER),
    reason("followed", "a plugin comes after istio-cni", FIND_WRITER),
    reason(
        "stale",
        "the agent's own list is not the copy that it should be, and is written again",
        FIND_WRITER,
    ),
    reason(
        "loopback",
        "the runtime's file has the plugin loopback alone: pods get no network",
        "remove the file, or rename it to sort last",
    ),
    reason(
        "multus",
        "Multus runs networks without istio-cni: its inlined delegates, or what clusterNetwork names",
        "name that network's file with CNI_CONF_NAME (chart: cniConfFileName), or leave it empty to chain behind Multus",
    ),
    reason(
        "not_seen_called",
        "the plugin is installed, the files do not show whether the runtime calls it, and no call was seen",
        "start a pod that tolerates the node's taint, or set READY_BEFORE_CALLED (chart: readyBeforeCalled)",
    ),
    reason(
        "broken",
        "a file in front cannot be loaded, and containerd loads none after it",
        "remove or repair the file that the message names",
    ),
    reason(
        "unreadable",
        "the agent cannot read the runtime's first file, such as a symbolic link whose target it does not see",
        "mount what the message names, or put a copy in the link's place",
    ),
];

const FIND_WRITER: &str = "where it recurs, find the program that writes the file: the agent's log names it";

/// Other results that the metrics of agent and taint controller count.
pub const RESULTS: [ReasonDoc; 27] = [
    reason("SUCCESS", "the node's files were changed as expected", ""),
    reason("COPY_BINARIES_FAILURE", "the plugin could not be copied to the node", LOG),
    reason("CREATE_KUBECONFIG_FAILURE", "the plugin's kubeconfig could not be written", LOG),
    reason("CREATE_CNI_CONFIG_FAILURE", "the network configuration could not be written", LOG),
    reason("complete", "a round of the drift watch checked every pod", ""),
    reason(
        "no_pods",
        "the drift watch could not read the node's pods",
        "check the API server and the agent's role",
    ),
    reason("no_namespaces", "the drift watch could not read the directory of network namespaces", LOG),
    reason("granted", "the API server granted a plugin token", ""),
    reason("failed", "the request, event, write or probe failed", LOG),
    reason("conflict", "another replica of the taint controller was faster", ""),
    reason("accepted", "a log entry of the plugin was received", ""),
    reason(
        "malformed",
        "a log entry was not the plugin's",
        "find out what else writes to the agent's log socket",
    ),
    reason("over_rate", "log entries were too many", ""),
    reason("over_size", "a log entry was too large", ""),
    reason("sent", "the API server accepted an event", ""),
    reason("applied", "changed settings are in force", ""),
    reason("redirect", "an ADD redirected the pod", ""),
    reason("enrol", "an ADD had the agent enrol the pod in ambient mode", ""),
    reason("skip", "an ADD or a repair left the pod alone, as its reason says", ""),
    reason("fail", "an ADD or a repair failed", "its reason says why"),
    reason("success", "a repair succeeded", ""),
    reason("redirected", "a network namespace created as a test was redirected", ""),
    reason(
        "impossible",
        "the agent's container is not equipped to redirect a network namespace created as a test",
        "give it NET_ADMIN and SYS_ADMIN, or set TAINT_PROBE=false",
    ),
    reason("repair", "the repair action that redirects broken pods in place", ""),
    reason("delete", "the repair action that deletes broken pods", ""),
    reason("label", "the repair action that labels broken pods", ""),
    reason("condition", "a change of the node's condition", ""),
];

const LOG: &str = "the agent's log says why";
