//! How pods stand: the same words in the agent's metrics and summary and in all that `redirectctl` prints.

use crate::reasons::{INTERFERENCE, ReasonDoc, SANDBOXED, reason};

/// How a pod stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodState {
    /// It is redirected as planned, and other programs' rules do not interfere.
    Verified,
    /// It was verified, and three intervals ago was the last check.
    Unverified,
    /// It is not redirected, as intended.
    LeftAlone,
    /// It should be redirected, and nothing of the mesh is in its network namespace.
    NotRedirected,
    /// It is redirected and should not be.
    Unexpected,
    /// It is redirected otherwise than planned.
    Drifted,
    /// It is redirected as planned, and other programs' rules interfere.
    Interference,
    /// It is redirected as planned, and the rest is not verified: its enrolment in ambient mode, or that istio-validation ends well.
    Pending,
    /// It should be redirected, and its runtime is sandboxed, so that rules do not bind it.
    Sandboxed,
    /// It cannot be determined.
    Unknown,
    /// It was not checked yet.
    Unseen,
}

impl PodState {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Verified,
        Self::Unverified,
        Self::LeftAlone,
        Self::NotRedirected,
        Self::Unexpected,
        Self::Drifted,
        Self::Interference,
        Self::Pending,
        Self::Sandboxed,
        Self::Unknown,
        Self::Unseen,
    ];

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

    /// Its word, what it means and what to do.
    #[must_use]
    pub const fn doc(self) -> ReasonDoc {
        match self {
            Self::Verified => reason(
                "verified",
                "the pod is redirected as planned, and other programs' rules do not interfere",
                "",
            ),
            Self::Unverified => reason(
                "unverified",
                "the pod was verified, and the agent has not checked it for three intervals",
                "the agent's log says what it waits for; restart it if that has no line about it",
            ),
            Self::LeftAlone => reason("left-alone", "the pod is not redirected, as intended", ""),
            Self::NotRedirected => reason(
                "not-redirected",
                "the pod should be redirected, and its network namespace holds no rule of the mesh",
                DETAILS,
            ),
            Self::Unexpected => reason(
                "unexpected",
                "the pod, or a network namespace without one, is redirected and should not be",
                DETAILS,
            ),
            Self::Drifted => reason("drifted", "the pod is redirected otherwise than planned", DETAILS),
            Self::Interference => INTERFERENCE,
            Self::Pending => reason(
                "pending",
                "the pod's rules are as planned, and the rest is not verified: its enrolment in ambient mode, or its validation",
                DETAILS,
            ),
            Self::Sandboxed => SANDBOXED,
            Self::Unknown => reason(
                "unknown",
                "it cannot be determined whether the pod is redirected",
                "the cause beside it says why",
            ),
            Self::Unseen => reason("unseen", "the pod was not checked yet, or has no network yet", "wait"),
        }
    }

    /// Its word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        self.doc().word
    }
}

const DETAILS: &str = "redirectctl pod NAMESPACE/NAME shows what differs and what to do";
