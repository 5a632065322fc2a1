//! The plugin's scope, and what is logged of libraries: nothing.

use logging::{Level, Levels};

/// The scope of the plugin's lines.
pub const SCOPE: &str = "cni-plugin";

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
    for library in LIBRARIES {
        levels.set(library, Level::None);
    }
    levels
}
