//! `redirectctl`, run in the container of an agent by the API server's `exec`.

use std::io;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::Api;
use kube::api::{AttachParams, AttachedProcess};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};

use crate::agents::Agent;
use crate::cluster::{AskError, Cluster};

/// The program. The image has it where its `PATH` leads.
const PROGRAM: &str = "redirectctl";
/// The most that is kept of what is logged beside an answer.
const MOST_LOG: u64 = 64 << 10;

/// Why an agent does not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
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
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// What the program answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its answer.
    pub stdout: Vec<u8>,
    /// What it logged.
    pub stderr: String,
    /// Its exit code.
    pub code: u8,
}

/// Runs the program with these words, and waits for its end. An answer has at most so many bytes.
///
/// # Errors
/// It did not run to its end.
pub async fn output(
    cluster: &Cluster,
    agent: &Agent,
    words: &[&str],
    most: u64,
) -> Result<Output, ExecError> {
    let mut process = start(cluster, agent, words).await?;
    let (stdout, stderr) = (process.stdout(), process.stderr());
    let end = end(&mut process, agent);
    let (stdout, stderr, code) = tokio::join!(whole(stdout, most), whole(stderr, MOST_LOG), end);
    let broken = |error: io::Error| ExecError::Other(format!("the connection broke: {error}"));
    let stderr = String::from_utf8_lossy(&stderr.map_err(broken)?).into_owned();
    Ok(Output { stdout: stdout.map_err(broken)?, stderr, code: code? })
}

/// The same, while its outputs go to these. The result is its exit code.
///
/// # Errors
/// As [`output`].
pub async fn forward(
    cluster: &Cluster,
    agent: &Agent,
    words: &[&str],
    mut stdout: impl AsyncWrite + Unpin,
    mut stderr: impl AsyncWrite + Unpin,
) -> Result<u8, ExecError> {
    let mut process = start(cluster, agent, words).await?;
    let (from_stdout, from_stderr) = (process.stdout(), process.stderr());
    let end = end(&mut process, agent);
    let (answered, logged, code) =
        tokio::join!(copy(from_stdout, &mut stdout), copy(from_stderr, &mut stderr), end,);
    let lost = |error: io::Error| ExecError::Other(format!("cannot pass on the answer: {error}"));
    answered.map_err(lost)?;
    logged.map_err(lost)?;
    code
}

async fn copy(from: Option<impl AsyncRead + Unpin>, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    use tokio::io::AsyncWriteExt as _;
    let Some(mut from) = from else { return Ok(()) };
    match tokio::io::copy(&mut from, to).await {
        // A reader that ends early has enough of it.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            tokio::io::copy(&mut from, &mut tokio::io::sink()).await.map(drop)
        }
        Err(error) => Err(error),
        Ok(_) => to.flush().await,
    }
}

/// All of it; more than `most` is an error, after which the process is not waited for.
async fn whole(from: Option<impl AsyncRead + Unpin>, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let Some(from) = from else { return Ok(bytes) };
    from.take(most + 1).read_to_end(&mut bytes).await?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("the answer has more than {most} bytes")));
    }
    Ok(bytes)
}

async fn start(cluster: &Cluster, agent: &Agent, words: &[&str]) -> Result<AttachedProcess, ExecError> {
    let pods: Api<Pod> = Api::namespaced(cluster.client().clone(), &agent.namespace);
    let params = AttachParams::default().stdin(false).stdout(true).stderr(true).container(&agent.container);
    let command = std::iter::once(PROGRAM).chain(words.iter().copied());
    let started = pods.exec(&agent.name, command, &params).await;
    started.map_err(|error| match AskError::from(error) {
        AskError::Api(status) if status.is_forbidden() => {
            ExecError::Forbidden { namespace: agent.namespace.clone(), message: status.message.clone() }
        }
        error @ (AskError::Api(_) | AskError::Other(_)) => {
            ExecError::Other(error.about("exec redirectctl", cluster.url()).0)
        }
    })
}

/// Its exit code, once it has ended.
fn end(process: &mut AttachedProcess, agent: &Agent) -> impl Future<Output = Result<u8, ExecError>> + use<> {
    let (status, image) = (process.take_status(), agent.image.clone());
    async move {
        let status = match status {
            Some(status) => status.await,
            None => None,
        };
        match status {
            Some(status) => code_of(&status, &image),
            None => Err(ExecError::Other("the connection ended before redirectctl did".to_owned())),
        }
    }
}

/// The exit code in the status that ends an `exec`.
fn code_of(status: &Status, image: &str) -> Result<u8, ExecError> {
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let message = status.message.clone().unwrap_or_default();
    let causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    let mut codes = causes.filter(|cause| cause.reason.as_deref() == Some("ExitCode"));
    let code = codes.find_map(|cause| cause.message.as_deref()?.parse::<u8>().ok());
    let is_missing =
        ["executable file not found", "no such file or directory"].iter().any(|w| message.contains(w));
    match code {
        // What runtimes answer for a program that they do not find.
        Some(126 | 127) => Err(ExecError::NoProgram(image.to_owned())),
        Some(code) => Ok(code),
        None if is_missing => Err(ExecError::NoProgram(image.to_owned())),
        None => Err(ExecError::Other(message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn code(status: Value) -> Result<u8, ExecError> {
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
            assert_eq!(code(status), Err(ExecError::NoProgram("hub/install-cni:1.30".to_owned())));
        }
        let failed = json!({"status": "Failure", "message": "error dialing backend: dial tcp: i/o timeout"});
        assert_eq!(code(failed).unwrap_err().to_string(), "error dialing backend: dial tcp: i/o timeout");
    }
}
