//! What node agent and taint controller publish: events, the node's condition and taint, reasons in metrics. Each word is a variant of a type here, with its
//! meaning and remedy; labels, events, the help of metrics and `redirectctl why` show these.

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

/// What labels of metrics may show: each has a meaning and a remedy.
pub trait Explained {
    /// Its word, what it means and what to do.
    fn doc(&self) -> ReasonDoc;
}

/// Makes an enum of words, its lists and its table, so that none of them can lack a row. A row is a word, its meaning and its remedy, or what another type says.
macro_rules! words {
    (
        $(#[$about:meta])* $name:ident
        $($(#[$of_list:meta])* $list:ident { $($variant:ident: $word:expr $(, $meaning:literal, $remedy:expr)?;)+ })+
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[expect(missing_docs, reason = "the meanings are the documentation")]
        pub enum $name { $($($variant,)+)+ }

        impl $name {
            $($(#[$of_list])* pub const $list: &'static [Self] = &[$(Self::$variant),+];)+

            /// The one of this word.
            #[must_use]
            pub fn of(word: &str) -> Option<Self> {
                [$(Self::$list),+].into_iter().flatten().copied().find(|known| known.word() == word)
            }

            /// Its word, what it means and what to do.
            #[must_use]
            pub const fn doc(self) -> crate::ReasonDoc {
                match self { $($(Self::$variant => words!(@doc $word $(, $meaning, $remedy)?),)+)+ }
            }

            /// Its word.
            #[must_use]
            pub const fn word(self) -> &'static str {
                self.doc().word
            }

            /// What it means, as a sentence without its full stop.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                self.doc().meaning
            }

            /// The remedy; empty if none is needed.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                self.doc().remedy
            }
        }

        impl crate::Explained for $name {
            fn doc(&self) -> crate::ReasonDoc {
                (*self).doc()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.word())
            }
        }
    };
    (@doc $word:expr, $meaning:literal, $remedy:expr) => {
        crate::ReasonDoc { word: $word, meaning: $meaning, remedy: $remedy }
    };
    (@doc $other:expr) => { $other.doc() };
}
mod documents;
mod states;

pub use documents::linked;
pub use states::PodState;

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

words! {
    /// How something ended that the agent or the taint controller did.
    AgentReason
    /// How an attempt to repair or heal a pod ended.
    REPAIRS {
        Done: "done", "it is done, and where the pod was redirected also verified", "";
        Healed: "healed", "the pod is redirected as planned again", "";
        HadLabel: "had_label", "the pod has the label already", "";
        Gone: "gone", "the pod is gone, or another one has its name", "";
        Changed: "changed", "the pod changed concurrently; it is tried again", "";
        Unanswered: "unanswered", "the API server gave no answer; it is tried again", "check the API server";
        Refused: "refused",
            "the API server does not allow it (401 or 403)",
            "give the agent's service account what the event names";
        Rejected: "rejected",
            "the API server rejected the change",
            "the event has its words: an admission policy, perhaps";
        NoCapability: "no_capability",
            "the agent's container lacks a capability",
            "switch on all that is marked repair-in-place in its manifest";
        NoEntry: "no_entry", "the plugin's entry cannot be read", "the agent's /readyz says more";
        Ended: "ended",
            "the pod does not run any more (restartPolicy: Never)",
            "delete it: only another pod can be redirected";
        NotMeshed: "not_meshed",
            "the plugin would leave the pod alone as well",
            "the settings of the validation contradict those of the plugin";
        Sandboxed: PodState::Sandboxed;
        NotFound: "namespace-not-found",
            "the pod's network namespace is not found on this machine",
            "redirectctl: run it on the pod's node, as root, with --netns-dir naming the runtime's directory of network namespaces; the agent needs its mounts and SYS_PTRACE";
        Throttled: "throttled",
            "pods were deleted, and their replacements failed as well, or many pods of the node were deleted; it is tried again later",
            "find out why pods start without being redirected: the agent's /readyz, and redirectctl pod for one of them";
        NoProcess: "no_process",
            "no process of the pod runs now",
            "wait: it is tried again as soon as one does";
        Ambiguous: "namespace-ambiguous",
            "several network namespaces may be the pod's",
            "look for a container that has made network namespaces of its own";
        OtherPod: "other_pod",
            "another pod's processes are in the network namespace, and nothing is touched there",
            "delete the pod";
        NotApplied: "not_applied",
            "the rules could not be put in force, and the network namespace is as it was",
            "the event names the cause";
        NotVerified: "not_verified",
            "the rules are in force, but another rule interferes",
            "the event names the rule";
        Unverifiable: "unverifiable",
            "the rules are in force, but whether other programs' rules interfere cannot be determined",
            "the message names the cause: if the pod has too many rules to be read, remove them or delete the pod; if its plan is too large for the agent, list ranges in the annotation, or raise the memory limit";
        NotSevered: "not_severed", "connections opened earlier may still bypass the proxy", "delete the pod";
        Interference: PodState::Interference;
        Unreadable: "cannot-look",
            "cannot determine whether the pod is redirected",
            "the message, or the agent's log, says why; redirectctl has to run as root on the node";
    }
    /// Other results that the metrics of agent and taint controller count.
    RESULTS {
        Installed: "SUCCESS", "the node's files were changed as expected", "";
        CopyBinariesFailure: "COPY_BINARIES_FAILURE", "the plugin could not be copied to the node", LOG;
        CreateKubeconfigFailure: "CREATE_KUBECONFIG_FAILURE",
            "the plugin's kubeconfig could not be written",
            LOG;
        CreateCniConfigFailure: "CREATE_CNI_CONFIG_FAILURE",
            "the network configuration could not be written",
            LOG;
        Complete: "complete", "a round of the drift watch checked every pod", "";
        NoPods: "no_pods",
            "the drift watch could not read the node's pods",
            "check the API server and the agent's role";
        NoNamespaces: "no_namespaces",
            "the drift watch could not read the directory of network namespaces",
            LOG;
        Granted: "granted", "the API server granted a plugin token", "";
        Failed: "failed", "the request, event, write or probe failed", LOG;
        Conflict: "conflict", "another replica of the taint controller was faster", "";
        Accepted: "accepted", "a log entry of the plugin was received", "";
        Malformed: "malformed",
            "a log entry was not the plugin's",
            "find out what else writes to the agent's log socket";
        OverRate: "over_rate", "log entries were too many", "";
        OverSize: "over_size", "a log entry was too large", "";
        Sent: "sent", "the API server accepted an event", "";
        Applied: "applied", "changed settings are in force", "";
        Redirect: "redirect", "an ADD redirected the pod", "";
        Enrol: "enrol", "an ADD had the agent enrol the pod in ambient mode", "";
        Skip: "skip", "an ADD or a repair left the pod alone, as its reason says", "";
        Fail: "fail", "an ADD or a repair failed", "its reason says why";
        Success: "success", "a repair succeeded", "";
        Redirected: "redirected", "a network namespace created as a test was redirected", "";
        Impossible: "impossible",
            "the agent's container is not equipped to redirect a network namespace created as a test",
            "give it NET_ADMIN and SYS_ADMIN, or set TAINT_PROBE=false";
        Repair: "repair", "the repair action that redirects broken pods in place", "";
        Delete: "delete", "the repair action that deletes broken pods", "";
        Label: "label", "the repair action that labels broken pods", "";
        Condition: "condition", "a change of the node's condition", "";
    }
}

words! {
    /// The reasons of the agents' events.
    EventReason
    /// All of them.
    ALL {
        AgentNotReady: "AgentNotReady",
            "the agent is not ready: pods of the mesh that start on its node may fail or miss the proxy",
            "the message is that of its /readyz";
        AgentReady: "AgentReady", "the agent is ready again", "";
        RepairBrokenPod: "RepairBrokenPod",
            "the agent redirected a pod whose validation had failed, or could not",
            "where it could not, the message names the cause; docs/concepts/repair.md explains each";
        DeleteBrokenPod: "DeleteBrokenPod",
            "the agent deleted a pod whose validation had failed, or could not",
            "where it could not, the message names the cause";
        LabelBrokenPod: "LabelBrokenPod",
            "the agent labelled a pod whose validation had failed, or could not",
            "handle the labelled pods";
        RedirectDrift: "RedirectDrift",
            "the drift watch found a pod that is not redirected as planned",
            "redirectctl pod shows what differs and what to do";
        SandboxedRuntime: "SandboxedRuntime",
            "a pod of the mesh runs in a sandboxed runtime, which rules do not bind: its traffic bypasses the proxy",
            "take runtimeClassName, or the proxy, from the pod";
        RedirectHealed: "RedirectHealed",
            "the agent redirected a pod as planned again",
            "find out who changed its rules: the message names the process if the kernel reported it";
        RedirectContested: "RedirectContested",
            "another program changes a pod's rules repeatedly; the agent backs off",
            "stop the other program";
        RedirectNotHealed: "RedirectNotHealed",
            "a pod is not redirected as planned and could not be repaired",
            "delete it; the message names the cause";
        AmbientPending: "AmbientPending",
            "a pod is not as its settings for ambient mode want it",
            "the message has the reason; the agent tries again until the pod is enrolled";
        NodeTainted: "NodeTainted",
            "the agent or the controller tainted the node: mesh pods starting on it are not verified to be redirected",
            "the message says why";
        NodeFreed: "NodeFreed",
            "the node's taint was removed: pods starting on it are verified to be redirected",
            "";
        NodeTaintContested: "NodeTaintContested",
            "another controller removes the node's taint while pods are not verified to be redirected there",
            "switch the other controller off, or the agent's taint";
        NetworkConfigContested: "NetworkConfigContested",
            "another program removes the plugin's entry repeatedly",
            "the message says who it probably is, and what to do";
        NetworkConfigPreempted: "NetworkConfigPreempted",
            "another file came to be the one that the runtime uses",
            "the message names it";
        NetworkConfigInlined: "NetworkConfigInlined",
            "the plugin's entry is in the network's list again, because nothing is seen to read the file beside the list any more",
            "where a runtime was replaced by an older one, validate the pods that started since";
        SettingsRefused: "SettingsRefused",
            "the agent rejected its ConfigMap and keeps the previous settings",
            "correct what the message names";
        PluginTokenRefused: "PluginTokenRefused",
            "the agent may not ask for the plugin's own tokens, so the plugin uses the agent's token",
            "give it the right that the message names";
    }
}

impl EventReason {
    /// Those of events about broken pods, by what is done with them.
    pub const OF_REPAIR: [Self; 3] = [Self::RepairBrokenPod, Self::DeleteBrokenPod, Self::LabelBrokenPod];
}

words! {
    /// The reasons of the node's condition.
    ConditionReason
    /// All of them.
    ALL {
        Verified: "Verified", "pods that start on the node are verified to be redirected", "";
        AgentNotReady: EventReason::AgentNotReady.word(),
            "the node agent is not ready",
            "the message is that of its /readyz";
        ProbeFailed: "ProbeFailed",
            "a network namespace created as a test could not be redirected; pods would fail too",
            "the message says what the kernel refused";
        ProbeImpossible: "ProbeImpossible",
            "the agent's container is not equipped to redirect a network namespace of its own",
            "give it NET_ADMIN and SYS_ADMIN, or set TAINT_PROBE=false";
        Removed: "Removed", "the plugin was removed from the node", "";
    }
}

words! {
    /// Why the runtime does not call the plugin as it should (`istio_cni_conflist_obstacles_total`).
    ObstacleKind
    /// All of them.
    ALL {
        NoNetwork: "no_network",
            "the directory has no network configuration that the runtime can load",
            "wait for the primary network plugin, or see its log";
        NoPinned: "no_pinned",
            "the file of CNI_CONF_NAME (chart: cniConfFileName) is missing or cannot be loaded",
            "name the file that the runtime uses";
        NoOriginal: "no_original",
            "the file of which the agent's own list is a copy is gone",
            "wait for the primary network plugin to write it";
        Foreign: "foreign",
            "the file of the agent's settings belongs to another program",
            "give the agent an unused file name";
        Preempted: "preempted",
            "the runtime uses another file than the one with the entry",
            "remove the file that comes first, or have the agent follow it";
        Missing: "missing", "the istio-cni entry is missing, and the agent adds it", FIND_WRITER;
        Edited: "edited", "the istio-cni entry was edited, and the agent restores it", FIND_WRITER;
        Repeated: "repeated", "the file has several istio-cni entries, and the agent keeps one", FIND_WRITER;
        Followed: "followed", "a plugin comes after istio-cni", FIND_WRITER;
        Stale: "stale",
            "the agent's own list is not the copy that it should be, and is written again",
            FIND_WRITER;
        Loopback: "loopback",
            "the runtime's file has the plugin loopback alone: pods get no network",
            "remove the file, or rename it to sort last";
        Multus: "multus",
            "Multus runs networks without istio-cni: its inlined delegates, or what clusterNetwork names",
            "name that network's file with CNI_CONF_NAME (chart: cniConfFileName), or leave it empty to chain behind Multus";
        NotSeenCalled: "not_seen_called",
            "the plugin is installed, the files do not show whether the runtime calls it, and no call was seen",
            "start a pod that tolerates the node's taint, or set READY_BEFORE_CALLED (chart: readyBeforeCalled)";
        Broken: "broken",
            "a file in front cannot be loaded, and containerd loads none after it",
            "remove or repair the file that the message names";
        NoDropIn: "no_drop_in",
            "CNI_INSTALL=drop-in (chart: install) wants the entry beside the network's list, and it cannot be there",
            "see the message, or set it to auto";
        Unreadable: "unreadable",
            "the agent cannot read the runtime's first file, such as a symbolic link whose target it does not see",
            "mount what the message names, or put a copy in the link's place";
    }
}

const FIND_WRITER: &str = "where it recurs, find the program that writes the file: the agent's log names it";
const LOG: &str = "the agent's log says why";

#[cfg(test)]
mod tests {
    use super::*;

    fn docs<R: Explained>(reasons: &[R]) -> Vec<ReasonDoc> {
        reasons.iter().map(Explained::doc).collect()
    }

    #[test]
    fn every_word_has_one_meaning_in_a_type_and_can_be_read() {
        let results = [AgentReason::REPAIRS, AgentReason::RESULTS].concat();
        for docs in [
            docs(PodState::ALL),
            docs(&results),
            docs(EventReason::ALL),
            docs(ConditionReason::ALL),
            docs(ObstacleKind::ALL),
        ] {
            for doc in &docs {
                assert_eq!(docs.iter().filter(|other| other.word == doc.word).count(), 1, "{}", doc.word);
                assert!(!doc.meaning.is_empty() && !doc.meaning.ends_with('.'), "{}", doc.word);
                assert!(!doc.remedy.ends_with('.'), "{}", doc.word);
                assert!(doc.word.bytes().all(|byte| byte.is_ascii_alphabetic() || b"_-".contains(&byte)));
            }
        }
        for reason in results {
            assert_eq!(AgentReason::of(reason.word()), Some(reason));
        }
        assert_eq!(AgentReason::of("none"), None);
    }

    /// A word of two types has its meaning from one of them, except the agent's own: a condition lasts, an event does not.
    #[test]
    fn a_word_is_written_once() {
        let all = [
            docs(PodState::ALL),
            docs(AgentReason::REPAIRS),
            docs(AgentReason::RESULTS),
            docs(EventReason::ALL),
            docs(ConditionReason::ALL),
            docs(ObstacleKind::ALL),
        ]
        .concat();
        let differs = |doc: &&ReasonDoc| all.iter().any(|other| other.word == doc.word && other != *doc);
        let twice: Vec<&str> = all.iter().filter(differs).map(|doc| doc.word).collect();
        assert_eq!(twice, [EventReason::AgentNotReady.word(); 2]);
    }
}
