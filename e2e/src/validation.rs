//! What the tests of `istio-validation` share: the program, running it as a user without privilege, and its verdict.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::image::Image;
use crate::program;
use crate::traffic::PROXY_ID;
use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::NamedTempFile;
use test_support::netns::Namespace;
use test_support::process::{self, Output, SHORT};

/// A pod as the injector writes it, validated before it may start.
pub const MANIFEST: &str = include_str!("../manifests/validated-pod.yaml");

/// Flags as the injector writes them.
pub const INJECTED: &str =
    "-p 15001 -z 15006 -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020 --log_output_level=default:info";

/// The user and group of a proxy.
pub const PROXY: (u32, u32) = (PROXY_ID, PROXY_ID);
/// The user and group of an application.
pub const APP: (u32, u32) = (1000, 1000);

/// The program under test: the one ISTIO_VALIDATION names, else the workspace's, built once per test process.
pub fn istio_validation() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| program::under_test("istio-validation").expect("istio-validation is built"))
}

/// The name of the image of [`MANIFEST`].
pub const IMAGE: &str = "docker.io/local/istio-validation:1";

/// The image of [`MANIFEST`]: the program alone, with the libraries it is linked against.
pub fn image() -> Result<Image> {
    let image = Image::new(IMAGE);
    let image = image.linked_program("bin/istio-validation", istio_validation())?;
    Ok(image.entrypoint(&["/bin/istio-validation"]))
}

/// A run of the program: how it ended, and the termination message it left.
#[derive(Debug)]
pub struct ValidationRun {
    /// How it ended and what it printed.
    pub output: Output,
    /// The termination message.
    pub message: Value,
}

impl ValidationRun {
    /// The verdict of a run that left its termination message in a file.
    pub fn of(output: Output, log: &NamedTempFile) -> Result<Self> {
        let text = fs::read_to_string(log.path())?;
        let message =
            serde_json::from_str(&text).with_context(|| format!("no verdict: {text:?}\n{output:?}"))?;
        Ok(Self { output, message })
    }

    /// The reason code.
    pub fn reason(&self) -> &str {
        self.message["reason"].as_str().unwrap_or("no reason given")
    }

    /// The result of one path of one family.
    pub fn check(&self, family: &str, path: &str) -> Option<&str> {
        let mut checks = self.message["checks"].as_array().into_iter().flatten();
        checks.find(|check| check["family"] == family && check["path"] == path)?["result"].as_str()
    }

    /// Asserts that this is the reason, reported as it should be.
    #[track_caller]
    pub fn assert(&self, expected: &str) {
        assert_eq!(self.problems(expected), [""; 0]);
    }

    /// What is wrong with this verdict if this reason is expected.
    pub fn problems(&self, expected: &str) -> Vec<String> {
        let code = if expected == "redirected" { 0 } else { 126 };
        let mut problems = Vec::new();
        if self.reason() != expected {
            problems.push(format!("wants {expected}, got {}\n{}", self.reason(), self.output.stderr));
        }
        if self.output.code() != Some(code) {
            problems.push(format!("wants exit code {code}, got {}", self.output.status));
        }
        if !self.output.stdout.is_empty() {
            problems.push(format!("standard output: {}", self.output.stdout));
        }
        problems
    }
}

/// A file for the termination message that any user may write to, as the kubelet makes one.
pub fn termination_log() -> Result<NamedTempFile> {
    let file = NamedTempFile::new()?;
    fs::set_permissions(file.path(), Permissions::from_mode(0o666))?;
    Ok(file)
}

/// `istio-validation ARGS` of this user and group, without any capability, and no way to get one.
pub fn command(who: (u32, u32), args: &[&str], env: &[(String, String)], log: &NamedTempFile) -> Command {
    command_of(istio_validation(), who, args, env, log)
}

/// The same of another program.
pub fn command_of(
    program: &Path,
    who: (u32, u32),
    args: &[&str],
    env: &[(String, String)],
    log: &NamedTempFile,
) -> Command {
    let mut command = process::command("setpriv", ["--clear-groups", "--no-new-privs"]);
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]);
    command.args([format!("--reuid={}", who.0), format!("--regid={}", who.1)]);
    command.args(["env".to_owned(), "-i".to_owned()]);
    command.args(env.iter().map(|(name, value)| format!("{name}={value}")));
    command.arg(program).args(args).arg("--termination-log").arg(log.path());
    command
}

/// Runs the program in a namespace to its end, with the injector's flags and more, as on a command line without quotes.
pub fn validate(namespace: &Namespace, who: (u32, u32), more: &str) -> Result<ValidationRun> {
    let flags = format!("{INJECTED} {more}");
    validate_with(namespace, who, &flags.split_whitespace().collect::<Vec<_>>(), &[])
}

/// Runs the program in a namespace to its end, with these variables and no others.
pub fn validate_with(
    namespace: &Namespace,
    who: (u32, u32),
    args: &[&str],
    env: &[(String, String)],
) -> Result<ValidationRun> {
    let log = termination_log()?;
    let mut command = namespace.command(&command(who, args, env, &log));
    ValidationRun::of(process::run(&mut command, SHORT)?, &log)
}
