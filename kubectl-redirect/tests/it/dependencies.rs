//! It is for laptops: on a Mac it is linked with nothing that only Linux has, and on no system with what works on a node.

use std::process::Command;

/// Crates that need Linux, or that do a node's work.
const OF_NODES: [&str; 8] = [
    "cluster-client",
    "istio-validation",
    "landlock",
    "netlink-sys",
    "netns-apply",
    "pod-netns",
    "redirectctl",
    "xtables-read",
];

/// Downloads what was not: a build here does without the crates of other systems.
fn linked(target: &str) -> Vec<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--locked", "--package", env!("CARGO_PKG_NAME"), "--edges", "normal"])
        .args(["--prefix", "none", "--target", target])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn laptops_need_nothing_of_a_node() {
    for target in ["aarch64-apple-darwin", "x86_64-apple-darwin", "x86_64-unknown-linux-musl"] {
        let crates = linked(target);
        assert!(crates.iter().any(|name| name == "kube"), "{crates:?}");
        let wrong: Vec<&String> = crates.iter().filter(|name| OF_NODES.contains(&name.as_str())).collect();
        assert!(wrong.is_empty(), "{target}: {wrong:?}");
    }
}
