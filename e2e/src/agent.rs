//! What every agent that a test starts outside of a pod needs.

/// The variables that name an agent's directories, and what tests call these below a folder of theirs.
pub const DIRECTORIES: [(&str, &str); 5] = [
    ("MOUNTED_CNI_NET_DIR", "net.d"),
    ("MOUNTED_CNI_BIN_DIR", "bin"),
    ("SOURCE_CNI_BIN_DIR", "image"),
    ("CNI_AGENT_RUN_DIR", "run"),
    ("SERVICE_ACCOUNT_DIR", "account"),
];
