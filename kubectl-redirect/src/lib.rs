//! `kubectl redirect`: the answers of `redirectctl`, of every node at once or of a pod's node, with a user's own kubeconfig.
//!
//! Only [`cleanup`] changes anything in the cluster for good; [`trial`] creates pods, and deletes them. Answers come from `redirectctl` in each agent's container, run by the API server's `exec`:
//! the agents listen for nothing more, and who may use `pods/exec` there may ask. [`verdict`] and [`precheck`]'s
//! judgements are pure; [`cluster`] and [`exec`] ask.

pub mod agents;
mod args;
pub mod cleanup;
pub mod cluster;
pub mod exec;
mod forward;
pub mod objects;
pub mod precheck;
pub mod scan;
mod signals;
mod terminal;
pub mod trial;
pub mod verdict;
pub mod wait;
pub mod watch;

use std::process::ExitCode;

use presentation::Printable;
pub use presentation::{FAILED, FINE, FOUND};

use crate::args::{Job, RequestedCommand};
use crate::cluster::{KubeApi, KubectlFlags};
use crate::terminal::{complain, note, print};

/// Why a command cannot be carried out, and what to do, in a sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CommandFailure(pub String);

impl CommandFailure {
    /// One of this text.
    pub fn of(what: impl std::fmt::Display) -> Self {
        Self(what.to_string())
    }
}

/// Runs the program with these words, without its name.
#[must_use]
pub fn run(words: Vec<String>) -> ExitCode {
    let (access, job) = match args::read(words) {
        Ok(RequestedCommand::Job(access, job)) => (access, job),
        Ok(RequestedCommand::Print(text)) => return exit(print(&Printable::lines(&text)).map(|()| FINE)),
        Err(usage) => {
            note(&Printable::lines(&format!("kubectl-redirect: {usage}\n")));
            return ExitCode::from(FAILED);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    exit(match runtime {
        Ok(runtime) => {
            let done = runtime.block_on(execute(&access, job));
            // A credential helper or a look-up of a name may still be under way on a thread.
            runtime.shutdown_background();
            done
        }
        Err(error) => Err(CommandFailure::of(error)),
    })
}

fn exit(done: Result<u8, CommandFailure>) -> ExitCode {
    ExitCode::from(done.unwrap_or_else(|failure| {
        complain(&failure);
        FAILED
    }))
}

async fn execute(access: &KubectlFlags, job: Job) -> Result<u8, CommandFailure> {
    let cluster = KubeApi::new(access).await?;
    match job {
        Job::Scan(wanted) => scan::run(&cluster, &wanted).await,
        Job::Watch(wanted) => watch::run(&cluster, &wanted).await,
        Job::Test(wanted) => trial::run(&cluster, &wanted).await,
        Job::Forward(wanted) => forward::run(&cluster, &wanted).await,
        Job::Bundle(wanted) => forward::bundle(&cluster, &wanted).await,
        Job::Cleanup(wanted) => cleanup::run(&cluster, &wanted).await,
        Job::Precheck(wanted) => precheck::run(&cluster, access.namespace.as_deref(), &wanted).await,
    }
}
