//! `kubectl redirect`: the answers of `redirectctl`, of every node at once or of a pod's node, with a user's own kubeconfig.
//!
//! Nothing is changed in the cluster. Answers come from `redirectctl` in each agent's container, run by the API server's `exec`:
//! the agents listen for nothing more, and who may use `pods/exec` there may ask. [`verdict`] and [`precheck`]'s
//! judgements are pure; [`cluster`] and [`exec`] ask.

pub mod agents;
mod args;
pub mod cluster;
pub mod exec;
mod forward;
pub mod objects;
pub mod precheck;
pub mod scan;
pub mod verdict;

use std::io::{self, ErrorKind, Write as _};
use std::process::ExitCode;

use explain::text_writer::harmless;
pub use explain::{FAILED, FINE, FOUND};

use crate::args::{Job, Line};
use crate::cluster::{Access, Cluster};

/// Why a command cannot be carried out, and what to do, in a sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub String);

impl Failure {
    /// One of this text.
    pub fn of(what: impl std::fmt::Display) -> Self {
        Self(what.to_string())
    }
}

/// Runs the program with these words, without its name.
#[must_use]
pub fn run(words: Vec<String>) -> ExitCode {
    let (access, job) = match args::read(words) {
        Ok(Line::Job(access, job)) => (access, job),
        Ok(Line::Print(text)) => {
            return ExitCode::from(print(&text).map_or_else(|error| complain(&error), |()| FINE));
        }
        Err(usage) => return ExitCode::from(complain(&Failure(usage))),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let code = match runtime {
        Ok(runtime) => {
            let done = runtime.block_on(execute(&access, job));
            // A credential helper or a look-up of a name may still be under way on a thread.
            runtime.shutdown_background();
            done
        }
        Err(error) => Err(Failure::of(error)),
    };
    ExitCode::from(code.unwrap_or_else(|failure| complain(&failure)))
}

async fn execute(access: &Access, job: Job) -> Result<u8, Failure> {
    let cluster = Cluster::new(access).await?;
    match job {
        Job::Scan(wanted) => scan::run(&cluster, &wanted).await,
        Job::Forward(wanted) => forward::run(&cluster, &wanted).await,
        Job::Bundle(wanted) => forward::bundle(&cluster, &wanted).await,
        Job::Precheck { is_json } => precheck::run(&cluster, access.namespace.as_deref(), is_json).await,
    }
}

/// Writes the answer. A reader that ends early has enough of it.
fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure(format!("cannot write to standard output: {error}")))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn complain(failure: &Failure) -> u8 {
    let text: Vec<String> = failure.0.split('\n').map(harmless).collect();
    // Nothing is left to report to.
    let _ = writeln!(io::stderr(), "kubectl-redirect: {}", text.join("\n"));
    FAILED
}

/// How text on standard output is laid out.
fn layout() -> explain::text_writer::Layout {
    use std::io::IsTerminal as _;
    let terminal = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    let colour = explain::text_writer::ColorChoice::Auto;
    explain::text_writer::Layout::new(io::stdout().is_terminal(), terminal, colour, |name| {
        std::env::var(name).ok()
    })
}
