//! Running the plugin, as a runtime runs it.

use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::Question;

/// The most of an answer that is read.
const LARGEST: u64 = 1 << 20;
/// How much of an answer that is none is shown.
const SHOWN: usize = 200;

/// What the plugin answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// All is as planned.
    AsPlanned,
    /// It is not, or that cannot be told.
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
pub fn ask(question: &Question, patience: Duration) -> Result<Answer, String> {
    let program = question.program.display();
    let (status, output) =
        run(question, patience).map_err(|error| format!("cannot run {program}: {error}"))?;
    if status.success() {
        return Ok(Answer::AsPlanned);
    }
    let answer: Option<Value> = serde_json::from_str(&output).ok();
    let read = answer.as_ref().and_then(|answer| {
        let text = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        Some(Answer::Refused {
            code: answer.get("code")?.as_u64()?,
            message: text("msg"),
            details: text("details"),
        })
    });
    read.ok_or_else(|| {
        let shown: String = output.chars().take(SHOWN).collect();
        format!("{program} ended with {status} and is no plugin that answers: {shown:?}")
    })
}

fn run(question: &Question, patience: Duration) -> io::Result<(ExitStatus, String)> {
    let mut command = Command::new(&question.program);
    command.env_clear().envs(&question.environment).current_dir("/");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let input = question.input.to_string();
    thread::scope(|scope| {
        // A program that ends without reading everything has its reasons.
        scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input.as_bytes())));
        let output = scope.spawn(move || {
            let mut bytes = Vec::new();
            let _ = stdout.map(|stdout| stdout.take(LARGEST).read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let status = wait(&mut child, patience)?;
        Ok((status, output.join().unwrap_or_default()))
    })
}

/// Waits for the end. Not by the clock: while the machine stands still, no program can end.
fn wait(child: &mut Child, patience: Duration) -> io::Result<ExitStatus> {
    let (mut waited, mut pause) = (Duration::ZERO, Duration::from_millis(1));
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if waited >= patience {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("it has not ended after {patience:?}"),
            ));
        }
        thread::sleep(pause);
        waited += pause;
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::pod_source::PodName;
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn asked(script: &str, patience: Duration) -> Result<Answer, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("istio-cni");
        fs::write(&program, script).expect("writes");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("sets the mode");
        let question = Question {
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
        assert_eq!(asked("#!/bin/sh\ntest $CNI_COMMAND = CHECK\n", long), Ok(Answer::AsPlanned));
        let refuses = "#!/bin/sh\necho '{\"code\": 111, \"msg\": \"m\", \"details\": \"d\"}'\nexit 1\n";
        let refused = Answer::Refused { code: 111, message: "m".into(), details: "d".into() };
        assert_eq!(asked(refuses, long), Ok(refused));
        for (script, told) in [
            ("#!/bin/sh\necho broken\nexit 3\n", "exit status: 3 and is no plugin that answers: \"broken"),
            ("#!/nonexistent\n", "cannot run"),
            ("#!/bin/sh\ncat >/dev/null\nexit 1\n", "no plugin that answers: \"\""),
        ] {
            let error = asked(script, long).expect_err("no answer");
            assert!(error.contains(told), "{error}");
        }
        let error = asked("#!/bin/sh\nexec sleep 1000\n", Duration::from_millis(50)).expect_err("too long");
        assert!(error.contains("has not ended"), "{error}");
    }
}
