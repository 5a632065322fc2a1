//! Running the plugin, as a runtime runs it.

use std::process::Command;
use std::time::Duration;

use cni_core::invoke::invoke;
use serde_json::Value;

use super::PluginRequest;

/// How much of an invalid answer to show.
const SHOWN: usize = 200;

/// What the plugin answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginReply {
    /// All is as planned.
    AsPlanned,
    /// It is not, or the check failed.
    Refused {
        /// The code of the error object.
        code: u64,
        /// What is wrong.
        message: String,
        /// What to do about it.
        details: String,
    },
}

/// Asks the plugin, which gets this long for its answer. What it logs goes to standard error.
///
/// # Errors
/// It cannot be run, takes too long, or does not answer as a plugin does.
pub fn ask(question: &PluginRequest, patience: Duration) -> Result<PluginReply, String> {
    let program = question.program.display();
    let mut command = Command::new(&question.program);
    command.env_clear().envs(&question.environment).current_dir("/");
    let (status, output) = invoke(&mut command, &question.input.to_string(), patience)
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    if status.success() {
        return Ok(PluginReply::AsPlanned);
    }
    let answer: Option<Value> = serde_json::from_str(&output).ok();
    let read = answer.as_ref().and_then(|answer| {
        let text = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        Some(PluginReply::Refused {
            code: answer.get("code")?.as_u64()?,
            message: text("msg"),
            details: text("details"),
        })
    });
    read.ok_or_else(|| {
        let shown: String = output.chars().take(SHOWN).collect();
        format!("{program} ended with {status} and is not a plugin that answers: {shown:?}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::pod_source::PodName;
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn asked(script: &str, patience: Duration) -> Result<PluginReply, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("istio-cni");
        fs::write(&program, script).expect("writes");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("sets the mode");
        let question = PluginRequest {
            pod: PodName { namespace: "a".into(), name: "b".into() },
            program,
            environment: BTreeMap::from([("CNI_COMMAND".to_owned(), "CHECK".to_owned())]),
            input: serde_json::json!({"x": "$(touch /tmp/never)"}),
            previous: String::new(),
            notes: Vec::new(),
        };
        ask(&question, patience)
    }

    #[test]
    fn what_a_plugin_answers_is_told_from_what_is_no_answer() {
        let long = Duration::from_secs(600);
        assert_eq!(asked("#!/bin/sh\ntest $CNI_COMMAND = CHECK\n", long), Ok(PluginReply::AsPlanned));
        let refuses = "#!/bin/sh\necho '{\"code\": 111, \"msg\": \"m\", \"details\": \"d\"}'\nexit 1\n";
        let refused = PluginReply::Refused { code: 111, message: "m".into(), details: "d".into() };
        assert_eq!(asked(refuses, long), Ok(refused));
        for (script, told) in [
            ("#!/bin/sh\necho broken\nexit 3\n", "exit status: 3 and is not a plugin that answers: \"broken"),
            ("#!/nonexistent\n", "cannot run"),
            ("#!/bin/sh\ncat >/dev/null\nexit 1\n", "not a plugin that answers: \"\""),
        ] {
            let error = asked(script, long).expect_err("no answer");
            assert!(error.contains(told), "{error}");
        }
        let error = asked("#!/bin/sh\nexec sleep 1000\n", Duration::from_millis(50)).expect_err("too long");
        assert!(error.contains("did not exit"), "{error}");
    }
}
