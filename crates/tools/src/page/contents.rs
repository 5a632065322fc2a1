//! Which documents the web page has, in which order. A test without the page's dependencies reads this file as well, so that a new document is missed
//! before the page is made.

use std::path::Path;
use std::{fs, io};

/// All pages in their order, under their headings.
pub(crate) const CONTENTS: &[(&str, &[&str])] = &[
    (
        "Begin",
        &["README.md", "docs/install.md", "docs/comparison.md", "docs/compatibility.md", "docs/faq.md"],
    ),
    (
        "By task",
        &[
            "docs/migrate.md",
            "docs/platforms.md",
            "docs/upgrade.md",
            "docs/uninstall.md",
            "docs/node-image.md",
        ],
    ),
    (
        "When something is wrong",
        &[
            "docs/troubleshooting.md",
            "docs/redirectctl.md",
            "docs/page.md",
            "docs/validation.md",
            "docs/alerts.md",
        ],
    ),
    (
        "How it works",
        &[
            "docs/life.md",
            "docs/capture.md",
            "docs/cni-plugin.md",
            "docs/agent.md",
            "docs/repair.md",
            "docs/taint.md",
            "docs/backends.md",
        ],
    ),
    (
        "Reference",
        &[
            "docs/settings.md",
            "docs/privileges.md",
            "docs/images.md",
            "docs/performance.md",
            "docs/cni-spec.md",
            "docs/dependencies.md",
        ],
    ),
    (
        "For programs",
        &[
            "redirect-core/README.md",
            "crates/netfilter-state/README.md",
            "crates/packet-trace/README.md",
            "netns-apply/README.md",
        ],
    ),
    (
        "The project",
        &[
            "ARCHITECTURE.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "docs/releasing.md",
            "docs/faults.md",
            "docs/fuzzing.md",
            "docs/mutants.md",
            "CHANGELOG.md",
        ],
    ),
];

/// The documents that are in no heading's list.
pub(crate) fn without_a_place(project: &Path) -> io::Result<Vec<String>> {
    let mut missing = Vec::new();
    for entry in fs::read_dir(project.join("docs"))? {
        let name = format!("docs/{}", entry?.file_name().to_string_lossy());
        if name.ends_with(".md") && !CONTENTS.iter().any(|(_, names)| names.contains(&name.as_str())) {
            missing.push(name);
        }
    }
    Ok(missing)
}
