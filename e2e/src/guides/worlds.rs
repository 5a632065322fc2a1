//! Who runs the commands of the documents.

use std::process::Command;

use crate::guides::{Block, blocks, compare};
use anyhow::{Context, Result, ensure};
use test_support::process::{self, Output, SHORT};

/// The word that a block has behind its language, and the documents that have such blocks.
pub struct World {
    /// The word.
    pub name: &'static str,
    /// The documents, in the order in which the test runs their commands.
    pub documents: &'static [&'static str],
    /// The test that runs them all.
    pub test: &'static str,
}

/// Documents whose commands are run one after the other, on one cluster: from Istio's agent to ours and back, upgraded, removed, and installed again.
pub const STORY: &[&str] = &[
    "README.md",
    "docs/get-started/migrate.md",
    "docs/get-started/upgrade.md",
    "docs/get-started/install.md",
    "docs/reference/kubectl-redirect.md",
    "docs/reference/images.md",
];
const STORY_TEST: &str =
    "e2e/tests/cluster/node/guides_node.rs: the_guides_lead_from_istios_agent_to_verified_pods_and_back";

/// Who runs what.
pub const WORLDS: [World; 8] = [
    World {
        name: "make",
        documents: &["README.md", "docs/get-started/node-image.md"],
        test: "e2e/tests/programs/guides.rs: every_target_of_make_that_is_named_exists",
    },
    World {
        name: "machine",
        documents: &[
            "docs/tasks/diagnose.md",
            "docs/get-started/node-image.md",
            "docs/reference/privileges.md",
        ],
        test: "e2e/tests/programs/guides.rs: what_is_typed_on_a_machine_prints_what_is_shown",
    },
    World {
        name: "mesh",
        documents: &[
            "README.md",
            "docs/tasks/diagnose.md",
            "docs/tasks/troubleshooting.md",
            "docs/tasks/alerts.md",
        ],
        test: "e2e/tests/cluster/guides_mesh.rs: what_is_typed_on_a_node_of_a_mesh_is_understood",
    },
    World {
        name: "handed-over",
        documents: &["docs/get-started/migrate.md"],
        test: "e2e/tests/cluster/node/guides_node.rs: an_agent_that_a_manifest_installed_is_handed_over_to_helm",
    },
    World {
        name: "ambient",
        documents: &["docs/tasks/ambient.md"],
        test: "e2e/tests/cluster/node/ambient_mesh.rs: streams_survive_the_label_and_the_exchange_of_ztunnel_by_two_daemon_sets",
    },
    // The three of one test: typed where the engineer is, by a user with few rights, and on a node.
    World { name: "cluster", documents: STORY, test: STORY_TEST },
    World { name: "sam", documents: &["docs/reference/kubectl-redirect.md"], test: STORY_TEST },
    World { name: "node", documents: &["README.md", "docs/get-started/upgrade.md"], test: STORY_TEST },
];

/// A world by its name.
pub fn world(name: &str) -> Result<&'static World> {
    WORLDS.iter().find(|world| world.name == name).with_context(|| format!("no test runs {name}"))
}

/// The commands that a test runs, in the order of its documents. Each document has at least one.
pub fn blocks_for(name: &str) -> Result<Vec<Block>> {
    let (all, world) = (blocks()?, world(name)?);
    let mut found = Vec::new();
    for document in world.documents {
        let before = found.len();
        found.extend(all.iter().filter(|block| block.world == name && block.document == *document).cloned());
        ensure!(found.len() > before, "{document} has no commands for {name}");
    }
    Ok(found)
}

/// Types what a block shows, and compares what is printed with what is shown. `run` is given what a shell gets.
pub fn typed(block: &Block, mut run: impl FnMut(&str) -> Result<Output>) -> Result<()> {
    if !block.is_console {
        run(&format!("set -ex\n{}", block.text))?.ok().with_context(|| block.place())?;
        return Ok(());
    }
    let steps = block.steps();
    ensure!(!steps.is_empty(), "{} has no prompt", block.place());
    for step in steps {
        let place = || format!("{}: {}", block.place(), step.command);
        let output = run(&format!("{{ {}\n}} 2>&1", step.command))?;
        // What fails on purpose shows with what words.
        ensure!(output.status.success() || !step.output.is_empty(), "{}\n{}", place(), output.stdout);
        compare(&step.output, &output.stdout).with_context(place)?;
    }
    Ok(())
}

/// Runs a shell's script by a command that leads to where it runs.
pub fn shell(lead: impl Fn(&Command) -> Command, script: &str) -> Result<Output> {
    process::run(&mut lead(&process::command("sh", ["-c", script])), SHORT)
}
