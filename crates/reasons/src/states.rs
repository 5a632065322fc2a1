//! How pods stand: the same words in the agent's metrics and summary and in all that `redirectctl` prints.

words! {
    /// How a pod stands.
    PodState
    /// All of them.
    ALL {
        Verified: "verified", "the pod is redirected as planned, and other programs' rules do not interfere", "";
        Unverified: "unverified",
            "the pod was verified, and the agent has not checked it for three intervals",
            "the agent's log says what it waits for; restart it if that has no line about it";
        LeftAlone: "left-alone", "the pod is not redirected, as intended", "";
        NotRedirected: "not-redirected",
            "the pod should be redirected, and its network namespace holds no rule of the mesh",
            DETAILS;
        Unexpected: "unexpected",
            "the pod, or a network namespace without one, is redirected and should not be",
            DETAILS;
        Drifted: "drifted", "the pod is redirected otherwise than planned", DETAILS;
        Interference: "interference",
            "the pod is redirected as planned, and rules of other programs interfere; the agent keeps them",
            "take them away where they are made";
        Pending: "pending",
            "the pod's rules are as planned, and the rest is not verified: its enrolment in ambient mode, or its validation",
            DETAILS;
        Sandboxed: "sandboxed",
            "the pod's runtime is sandboxed: rules do not bind it, and its traffic bypasses the proxy",
            "take runtimeClassName, or the proxy, from the pod; a sandbox that obeys the node's rules does not belong into SANDBOXED_RUNTIMES";
        Unknown: "unknown", "it cannot be determined whether the pod is redirected", "the cause beside it says why";
        Unseen: "unseen", "the pod was not checked yet, or has no network yet", "wait";
    }
}

impl PodState {
    /// Those of pods that should be redirected to a proxy of their own.
    pub const MESHED: [Self; 8] = [
        Self::Verified,
        Self::Unverified,
        Self::NotRedirected,
        Self::Drifted,
        Self::Interference,
        Self::Sandboxed,
        Self::Unknown,
        Self::Unseen,
    ];
}

const DETAILS: &str = "redirectctl pod NAMESPACE/NAME shows what differs and what to do";
