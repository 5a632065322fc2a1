//! Which documents the web page has, in which order. A test without the page's dependencies reads this file as well, so that a new document is missed
//! before the page is made.

use std::path::Path;
use std::{fs, io};

/// All pages in their order, under their headings.
pub(crate) const CONTENTS: &[(&str, &[&str])] = &[
    ("Overview", &["README.md", "docs/README.md"]),
    (
        "Get started",
        &[
            "docs/get-started/install.md",
            "docs/get-started/migrate.md",
            "docs/get-started/upgrade.md",
            "docs/get-started/platforms.md",
            "docs/get-started/node-image.md",
            "docs/get-started/comparison.md",
        ],
    ),
    (
        "Tasks",
        &[
            "docs/tasks/troubleshooting.md",
            "docs/tasks/diagnose.md",
            "docs/tasks/ambient.md",
            "docs/tasks/alerts.md",
        ],
    ),
    (
        "Concepts",
        &[
            "docs/concepts/life-of-a-pod.md",
            "docs/concepts/capture.md",
            "docs/concepts/drift.md",
            "docs/concepts/repair.md",
            "docs/concepts/taint.md",
            "docs/concepts/backends.md",
        ],
    ),
    (
        "Reference",
        &[
            "docs/reference/settings.md",
            "docs/reference/agent.md",
            "docs/reference/redirectctl.md",
            "docs/reference/kubectl-redirect.md",
            "docs/reference/cni-plugin.md",
            "docs/reference/validation.md",
            "docs/reference/privileges.md",
            "docs/reference/compatibility.md",
            "docs/reference/images.md",
        ],
    ),
    (
        "For programs",
        &[
            "redirect-core/README.md",
            "crates/netfilter-state/README.md",
            "crates/packet-trace/README.md",
            "crates/xtables-read/README.md",
            "netns-apply/README.md",
        ],
    ),
    (
        "Internals",
        &[
            "ARCHITECTURE.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "docs/internals/cni-spec.md",
            "docs/internals/performance.md",
            "docs/internals/faults.md",
            "docs/internals/testing.md",
            "docs/internals/dependencies.md",
            "docs/internals/releasing.md",
            "docs/internals/page.md",
            "CHANGELOG.md",
        ],
    ),
];

/// The documents that are in no heading's list.
pub(crate) fn without_a_place(project: &Path) -> io::Result<Vec<String>> {
    let mut missing = Vec::new();
    let mut folders = vec!["docs".to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(project.join(&folder))? {
            let entry = entry?;
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                folders.push(name);
            } else if name.ends_with(".md") && !CONTENTS.iter().any(|(_, names)| names.contains(&&*name)) {
                missing.push(name);
            }
        }
    }
    missing.sort();
    Ok(missing)
}
