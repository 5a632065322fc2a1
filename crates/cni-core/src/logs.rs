//! The plugin's scope, and what plugin and agent log of libraries: nothing.

use logging::{Level, Levels};

/// The scope of the plugin's lines.
pub const SCOPE: &str = "cni-plugin";

/// The label of the line by which the agent learns that a runtime calls the plugin, whatever is logged; its value is the command. It is
/// for the agent alone.
pub const CALLED: &str = "called";
/// The label of that line by which the agent learns that the runtime has the plugin's entry from its drop-in; its value is the id of the
/// process that called the plugin.
pub const READER: &str = "drop_in_reader";
/// The variable by which the agent marks its own questions, which prove nothing about runtimes.
pub const ASKED_BY_AGENT: &str = "ISTIO_CNI_ASKED_BY_AGENT";

/// What the plugin decides about a pod from, as the line at the end of each ADD says under `source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodSource {
    /// The pod's name, or its namespace's.
    Name,
    /// The annotations that the runtime passes.
    Annotations,
    /// The object, as the node agent has it.
    Agent,
    /// The object, from the API server.
    Api,
    /// A manifest.
    Manifest,
}

impl PodSource {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Name, Self::Annotations, Self::Agent, Self::Api, Self::Manifest];

    /// As lines and metrics have it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Annotations => "annotations",
            Self::Agent => "agent",
            Self::Api => "api",
            Self::Manifest => "manifest",
        }
    }
}

/// Libraries that log; they say in many lines what an error says in one, and none of it is meant for an operator.
const LIBRARIES: [&str; 9] = [
    "kube_client",
    "hyper",
    "hyper_util",
    "hyper_rustls",
    "rustls",
    "tokio",
    "tower",
    "tower_http",
    "tracing",
];

/// This level for the plugin's own lines, nothing of libraries.
#[must_use]
pub fn levels(level: Level) -> Levels {
    let mut levels = Levels::default();
    levels.set(SCOPE, level);
    levels.set(logging::DEFAULT_SCOPE, level);
    quiet(levels)
}

/// These levels, with nothing from libraries that they do not mention.
#[must_use]
pub fn quiet(mut levels: Levels) -> Levels {
    for library in LIBRARIES {
        levels.set_default(library, Level::None);
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_quiet_unless_somebody_mentions_them() {
        let levels = quiet("cni-agent:debug,hyper:info".parse().unwrap());
        let named = ["cni-agent", "kube_client::client::tls", "hyper::proto"].map(|scope| levels.of(scope));
        assert_eq!(named, [Level::Debug, Level::None, Level::Info]);
    }
}
