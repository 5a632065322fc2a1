//! The plugin as a runtime meets it: a program that is given a command and a network configuration, and answers.
//!
//! The agent asks it twice: for its VERSION before it becomes the node's, and for its STATUS with the installed entry when a probe
//! asks whether the agent is ready.

use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use cni_core::invoke::invoke;
use cni_core::logs::ASKED_BY_AGENT;
use cni_core::wire::Code;
use serde_json::{Value, json};

/// How long an answer may take. It takes milliseconds, unless the machine stands still.
const PATIENCE: Duration = Duration::from_secs(10);
/// The first version of the specification that has STATUS.
const STATUS_VERSION: &str = "1.1.0";

/// What the plugin is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginQuestion<'a> {
    /// Which versions of the specification it speaks.
    Version,
    /// Whether it could serve pods with this configuration.
    Status(&'a str),
}

/// Why the plugin would not serve a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PluginRefusal {
    /// It cannot be run, or does not answer as a plugin does.
    #[error("{path} cannot be run as a plugin: {why}", path = .path.display())]
    NoPlugin {
        /// Which program.
        path: std::path::PathBuf,
        /// What happens instead.
        why: String,
    },
    /// It refuses.
    #[error("the installed plugin refuses to work (code {code}): {message}")]
    Refused {
        /// The code of its error object.
        code: u64,
        /// Its message.
        message: String,
    },
}

/// Asks plugins.
pub trait Ask: Send + Sync {
    /// Asks the plugin of this path.
    ///
    /// # Errors
    /// It would not serve a pod.
    fn ask(&self, path: &Path, question: PluginQuestion<'_>) -> Result<(), PluginRefusal>;
}

/// The plugin as a program of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct PluginProgram;

impl Ask for PluginProgram {
    fn ask(&self, path: &Path, question: PluginQuestion<'_>) -> Result<(), PluginRefusal> {
        let (command, input) = match question {
            PluginQuestion::Version => ("VERSION", json!({"cniVersion": STATUS_VERSION}).to_string()),
            PluginQuestion::Status(conf) => ("STATUS", status_input(conf)),
        };
        let no_plugin = |why: String| PluginRefusal::NoPlugin { path: path.to_owned(), why };
        let (status, output) = run(path, command, &input).map_err(|error| no_plugin(error.to_string()))?;
        let answer: Option<Value> = serde_json::from_str(&output).ok();
        if !status.success() {
            let Some(error) = answer.filter(|answer| answer["code"].is_u64()) else {
                return Err(no_plugin(format!("{command} ended with {status}")));
            };
            return judge(&error);
        }
        let speaks = || answer.as_ref().and_then(|answer| answer["supportedVersions"].as_array());
        match question {
            PluginQuestion::Version if speaks().is_none_or(Vec::is_empty) => {
                Err(no_plugin("VERSION names no version of the specification".to_owned()))
            }
            PluginQuestion::Version | PluginQuestion::Status(_) => Ok(()),
        }
    }
}

/// What the plugin is asked with. The runtime may know an older version of the specification, which has no STATUS. What the agent brings has to
/// be there, whether or not the runtime's own question waits for it.
fn status_input(conf: &str) -> String {
    let mut conf: Value = serde_json::from_str(conf).unwrap_or_default();
    if let Some(keys) = conf.as_object_mut() {
        keys.insert("cniVersion".to_owned(), STATUS_VERSION.into());
        keys.insert("agent_host_network".to_owned(), true.into());
    }
    conf.to_string()
}

/// An error object, unless it is about the kernel: what this container may do, and which programs it has, is not what the runtime's
/// plugin may do.
fn judge(error: &Value) -> Result<(), PluginRefusal> {
    let code = error["code"].as_u64().unwrap_or_default();
    if code == u64::from(Code::LimitedConnectivity.number()) {
        return Ok(());
    }
    let text = |key: &str| error[key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let message = [text("msg"), text("details")].into_iter().flatten().collect::<Vec<_>>().join("; ");
    Err(PluginRefusal::Refused { code, message })
}

/// Runs a program with nothing in its environment but the command and that the agent asks, and returns how it ended and what it printed.
fn run(path: &Path, command: &str, input: &str) -> io::Result<(ExitStatus, String)> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let mut program = Command::new(path);
    program.env_clear().env("CNI_COMMAND", command).env("CNI_PATH", directory).current_dir("/");
    program.env(ASKED_BY_AGENT, "1");
    invoke(program.stderr(Stdio::null()), input, PATIENCE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn asked(script: &str, question: PluginQuestion<'_>) -> Result<(), String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("istio-cni");
        fs::write(&path, script).expect("writes");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("sets the mode");
        PluginProgram.ask(&path, question).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn a_program_that_is_not_a_plugin_is_rejected() {
        let speaks = "#!/bin/sh\necho '{\"supportedVersions\":[\"1.1.0\"]}'\n";
        assert_eq!(asked(speaks, PluginQuestion::Version), Ok(()));
        for (other, why) in [
            ("", "Exec format error"),
            ("#!/bin/sh\n", "names no version"),
            ("#!/bin/sh\necho '{\"supportedVersions\":[]}'\n", "names no version"),
            ("#!/bin/sh\nexit 3\n", "VERSION ended with exit status: 3"),
            ("#!/nonexistent\n", "No such file"),
        ] {
            let error = asked(other, PluginQuestion::Version).expect_err("no plugin");
            assert!(error.contains(why) && error.contains("/istio-cni cannot be run as a plugin"), "{error}");
        }
    }

    #[test]
    fn a_refusal_is_passed_on_unless_it_is_about_the_kernel() {
        let answers = |code: u32| {
            format!("#!/bin/sh\necho '{{\"code\":{code},\"msg\":\"no\",\"details\":\"do\"}}'\nexit 1\n")
        };
        assert_eq!(
            asked(&answers(50), PluginQuestion::Status("{}")),
            Err("the installed plugin refuses to work (code 50): no; do".to_owned())
        );
        assert_eq!(asked(&answers(51), PluginQuestion::Status("{}")), Ok(()));
    }

    #[test]
    fn it_is_asked_as_a_runtime_asks() {
        let echo = "#!/bin/sh\nread conf\nprintf '{\"code\":7,\"msg\":\"%s %s\"}' \"$(env | grep -c .)\" \"$CNI_COMMAND $(echo \"$conf\" | tr -d '\"')\"\nexit 1\n";
        let said =
            asked(echo, PluginQuestion::Status(r#"{"cniVersion":"0.3.1","name":"n"}"#)).expect_err("says it");
        assert!(said.contains("STATUS {agent_host_network:true,cniVersion:1.1.0,name:n}"), "{said}");
    }

    #[test]
    fn an_endless_answer_is_cut_off() {
        let error = asked("#!/bin/sh\nexec yes\n", PluginQuestion::Version).expect_err("no plugin");
        assert!(error.contains("cannot be run as a plugin"), "{error}");
    }
}
