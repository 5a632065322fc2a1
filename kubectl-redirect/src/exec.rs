//! `redirectctl`, run in the container of an agent by the API server's `exec`.

use std::io;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::Api;
use kube::api::{AttachParams, AttachedProcess};
use presentation::printable::Passage;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::agents::Agent;
use crate::cluster::{AskError, KubeApi, PATIENCE, shown};

/// The program. The image has it where its `PATH` leads.
const PROGRAM: &str = "redirectctl";
/// The most that is kept of what is logged beside an answer.
const MOST_LOG: u64 = 64 << 10;

/// How much of an answer waits for its reader: between the two, each kilobyte of the library's default costs a switch of tasks.
const MOST_WAITING: usize = 64 << 10;
/// The most that is passed on of an answer.
const MOST_TEXT: u64 = 64 << 20;

/// Why an agent does not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AgentExecError {
    /// The user may not do this.
    #[error("missing right: get and create pods/exec in namespace {namespace}: {message}")]
    Forbidden {
        /// Where.
        namespace: String,
        /// The server's words.
        message: String,
    },
    /// The agent's image lacks the program.
    #[error("image {0} has no redirectctl; is it Istio's, or older than kubectl-redirect?")]
    NoProgram(String),
    /// It takes too long.
    #[error("no response within {}; --timeout gives it longer", humantime::format_duration(*.0))]
    Late(Duration),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// What the program answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// Its answer.
    pub stdout: Vec<u8>,
    /// What it logged.
    pub stderr: String,
    /// Its exit code.
    pub code: u8,
}

impl ExecOutput {
    /// What it complained of last, without time and level, which tabs separate.
    #[must_use]
    pub fn complaint(&self) -> String {
        let last = self.stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no reason given");
        let message = last.trim().splitn(3, '\t').nth(2).unwrap_or(last.trim());
        message.replace('\t', " ")
    }
}

/// Runs the program with these words, and waits for its end: for so long, and for so many bytes.
///
/// # Errors
/// It did not run to its end.
pub async fn output(
    cluster: &KubeApi,
    agent: &Agent,
    words: &[&str],
    patience: Duration,
    most: u64,
) -> Result<ExecOutput, AgentExecError> {
    within(patience, async {
        let mut process = start(cluster, agent, words).await?;
        let (stdout, stderr) = (process.stdout(), process.stderr());
        let end = end(&mut process, agent);
        // The first failure ends it: after it, nothing may come any more.
        let (stdout, stderr, code) = tokio::try_join!(whole(stdout, most), whole(stderr, MOST_LOG), end)?;
        Ok(ExecOutput { stdout, stderr: String::from_utf8_lossy(&stderr).into_owned(), code })
    })
    .await
}

async fn within<T>(
    patience: Duration,
    work: impl Future<Output = Result<T, AgentExecError>>,
) -> Result<T, AgentExecError> {
    tokio::time::timeout(patience, work).await.unwrap_or(Err(AgentExecError::Late(patience)))
}

/// The same, while its outputs are shown on these. The result is its exit code.
///
/// # Errors
/// As [`output`].
pub async fn forward(
    cluster: &KubeApi,
    agent: &Agent,
    words: &[&str],
    patience: Duration,
    mut stdout: impl AsyncWrite + Unpin,
    mut stderr: impl AsyncWrite + Unpin,
) -> Result<u8, AgentExecError> {
    let has_colours = words.windows(2).any(|pair| pair == ["--color", "always"]);
    within(patience, async {
        let mut process = start(cluster, agent, words).await?;
        let (from_stdout, from_stderr) = (process.stdout(), process.stderr());
        let end = end(&mut process, agent);
        let passage = || Passage::new(has_colours);
        let ((), (), code) = tokio::try_join!(
            show(from_stdout, passage(), &mut stdout),
            show(from_stderr, passage(), &mut stderr),
            end
        )?;
        Ok(code)
    })
    .await
}

/// Shows what comes, made harmless: the terminal is the user's, and the text that of a node.
async fn show(
    from: Option<impl AsyncRead + Unpin>,
    mut passage: Passage,
    to: &mut (impl AsyncWrite + Unpin),
) -> Result<(), AgentExecError> {
    let Some(from) = from else { return Ok(()) };
    let lost = |error: io::Error| AgentExecError::Other(format!("cannot pass on the answer: {error}"));
    let mut from = from.take(MOST_TEXT + 1);
    // A reader that ends early has enough of it; the program's exit code still counts.
    let mut is_read = true;
    let mut buffer = [0; 8 << 10];
    loop {
        let count = from.read(&mut buffer).await.map_err(|error| broken(&error))?;
        if from.limit() == 0 {
            return Err(too_long(MOST_TEXT));
        }
        let text =
            if count == 0 { std::mem::take(&mut passage).end() } else { passage.pass(&buffer[..count]) };
        if is_read {
            let shown = async {
                to.write_all(text.as_bytes()).await?;
                to.flush().await
            };
            match shown.await {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => is_read = false,
                done => done.map_err(lost)?,
            }
        }
        if count == 0 {
            return Ok(());
        }
    }
}

fn broken(error: &io::Error) -> AgentExecError {
    AgentExecError::Other(format!("the connection broke: {error}"))
}

fn too_long(most: u64) -> AgentExecError {
    AgentExecError::Other(format!("the answer has more than {most} bytes"))
}

/// All of it; more than `most` is an error.
async fn whole(from: Option<impl AsyncRead + Unpin>, most: u64) -> Result<Vec<u8>, AgentExecError> {
    let mut bytes = Vec::new();
    let Some(from) = from else { return Ok(bytes) };
    from.take(most + 1).read_to_end(&mut bytes).await.map_err(|error| broken(&error))?;
    if bytes.len() as u64 > most {
        return Err(too_long(most));
    }
    Ok(bytes)
}

async fn start(cluster: &KubeApi, agent: &Agent, words: &[&str]) -> Result<AttachedProcess, AgentExecError> {
    let pods: Api<Pod> = Api::namespaced(cluster.client().clone(), &agent.namespace);
    let params = AttachParams::default().stdin(false).stdout(true).stderr(true).container(&agent.container);
    let params = params.max_stdout_buf_size(MOST_WAITING);
    let command = std::iter::once(PROGRAM).chain(words.iter().copied());
    let started = tokio::time::timeout(PATIENCE, pods.exec(&agent.name, command, &params)).await;
    started.map_err(|_| AgentExecError::Late(PATIENCE))?.map_err(|error| match AskError::from(error) {
        AskError::Api(status) if status.is_forbidden() => {
            AgentExecError::Forbidden { namespace: agent.namespace.clone(), message: shown(&status.message) }
        }
        error @ (AskError::Api(_) | AskError::Other(_)) => {
            AgentExecError::Other(error.about("exec redirectctl", cluster.url()).0)
        }
    })
}

/// Its exit code, once it has ended.
fn end(
    process: &mut AttachedProcess,
    agent: &Agent,
) -> impl Future<Output = Result<u8, AgentExecError>> + use<> {
    let (status, image) = (process.take_status(), agent.image.clone());
    async move {
        let ended = match status {
            Some(status) => status.await,
            None => None,
        };
        let cut = || AgentExecError::Other("the connection ended before redirectctl did".to_owned());
        code_of(&ended.ok_or_else(cut)?, &image)
    }
}

/// The exit code in the status that ends an `exec`.
fn code_of(status: &Status, image: &str) -> Result<u8, AgentExecError> {
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let message = shown(status.message.as_deref().unwrap_or_default());
    let causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    let mut codes = causes.filter(|cause| cause.reason.as_deref() == Some("ExitCode"));
    let code = codes.find_map(|cause| cause.message.as_deref()?.parse::<u8>().ok());
    let is_missing =
        ["executable file not found", "no such file or directory"].iter().any(|w| message.contains(w));
    match code {
        // What runtimes answer for a program that they do not find.
        Some(126 | 127) => Err(AgentExecError::NoProgram(image.to_owned())),
        Some(code) => Ok(code),
        None if is_missing => Err(AgentExecError::NoProgram(image.to_owned())),
        None => Err(AgentExecError::Other(message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn code(status: Value) -> Result<u8, AgentExecError> {
        code_of(&serde_json::from_value(status).expect("a status"), "hub/install-cni:1.30")
    }

    fn exited(code: &str) -> Value {
        json!({"status": "Failure", "reason": "NonZeroExitCode", "message": "command terminated",
            "details": {"causes": [{"reason": "ExitCode", "message": code}]}})
    }

    #[test]
    fn the_last_message_has_the_exit_code() {
        assert_eq!(code(json!({"status": "Success"})), Ok(0));
        assert_eq!(code(exited("2")), Ok(2));
    }

    #[test]
    fn an_image_without_the_program_is_named() {
        let failed = json!({"status": "Failure", "reason": "InternalError",
            "message": "OCI runtime exec failed: exec: \"redirectctl\": executable file not found in $PATH: unknown"});
        for status in [failed, exited("127")] {
            assert_eq!(code(status), Err(AgentExecError::NoProgram("hub/install-cni:1.30".to_owned())));
        }
        let failed = json!({"status": "Failure", "message": "error dialing backend: dial tcp: i/o timeout"});
        assert_eq!(code(failed).unwrap_err().to_string(), "error dialing backend: dial tcp: i/o timeout");
    }
}
