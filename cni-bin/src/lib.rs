//! The chained CNI plugin that bends a pod's traffic through its sidecar proxy.
//!
//! A container runtime executes it for every pod. The environment and standard input describe the request ([`wire`], [`conf`]); the
//! plugin reads the pod ([`pod_source`]), programs its network namespace ([`commands`], through [`kernel`]), or has the node agent enrol it in
//! ambient mode ([`agent`]), and hands on the result of the plugins before it. Standard output carries that result, or what VERSION asks for, or an error object, and never anything else.

pub mod agent;
pub mod commands;
pub mod kernel;
pub mod logs;
mod usage;

pub use cni_core::{conf, fields, pod_source, sandboxed, selection, wire};

use commands::Attachment;
use conf::{Conf, Envelope, MOST_INPUT};
use kernel::{Linux, MachineNamespaces};
use pod_netns::remember_hosts;
use privileges::{CapabilitySet, NotGivenUp, keep_only};
use redirect_core::settings::Misspelt;
use std::{
    ffi::OsString,
    io::{self, IsTerminal, Read, Write},
    panic::{self, AssertUnwindSafe, PanicHookInfo},
    process::ExitCode,
    sync::{Mutex, PoisonError},
    time::Instant,
};
use wire::{CniCommand, CniError, Code, Invocation, Version};

/// What the runtime is reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeReply {
    /// What goes to standard output: a result, an error object, or nothing.
    pub output: String,
    /// Whether the command succeeded.
    pub success: bool,
}

/// The plugin's `main`.
#[must_use]
pub fn main() -> ExitCode {
    let env = |name: &str| std::env::var_os(name);
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let has_command = env("CNI_COMMAND").is_some_and(|command| !command.is_empty());
    if let Some(code) = usage::for_people(&words, has_command, io::stdin().is_terminal()) {
        return code;
    }
    let given_up = give_up_privileges();
    let logs = logs::start();
    if let Err(error) = given_up {
        log::warn!(target: logs::SCOPE, "{error}");
    }
    let configure = |conf: &Conf| {
        if let Some(logs) = &logs {
            logs::configure(logs, conf, logs::called(&env));
        }
        // Once per pod, like every other warning.
        if env("CNI_COMMAND").is_some_and(|command| command == "ADD") {
            warn_of_misspelt_variables();
        }
    };
    let answer = guarded(|| answer(&env, &mut io::stdin().lock(), &Linux, &configure));
    let printed = print(&answer.output);
    if let Some(logs) = &logs {
        logs.flush();
    }
    if answer.success && printed.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Keeps only what ADD and CHECK need: entering a namespace, reading and writing rules, and the raw socket of iptables' legacy variant. The runtime gives a
/// plugin everything. This happens before any thread is made, and before anything is read.
fn give_up_privileges() -> Result<(), NotGivenUp> {
    remember_hosts();
    keep_only(CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN | CapabilitySet::NET_RAW)
}

/// The runtime's environment may set something for all pods; a name that is only nearly right has no effect.
fn warn_of_misspelt_variables() {
    let names: Vec<String> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    let wanted = |key| selection::PROCESS_WIDE.contains(&key);
    for misspelt in Misspelt::variables(names.iter().map(String::as_str), wanted) {
        log::warn!(target: logs::SCOPE, "{misspelt}");
    }
}

fn warn_of_configuration(conf: &Conf) {
    if !conf.unknown_keys.is_empty() {
        log::warn!(target: logs::SCOPE, keys = format!("{:?}", conf.unknown_keys); "unknown keys in the network configuration");
    }
    for notice in &conf.not_in_force {
        log::warn!(target: logs::SCOPE, "network configuration: {notice}");
    }
}

/// Answers one invocation. `configure` is called as soon as the configuration is known.
pub fn answer(
    env: &(dyn Fn(&str) -> Option<OsString> + Sync),
    input: &mut dyn Read,
    kernel: &dyn MachineNamespaces,
    configure: &dyn Fn(&Conf),
) -> RuntimeReply {
    let start = Instant::now();
    let mut version = None;
    let done = Invocation::read(env).and_then(|invocation| {
        if invocation.command == CniCommand::Version {
            return Ok(versions());
        }
        let input = read_input(input)?;
        let envelope = Envelope::read(&input, invocation.command)?;
        version = Some(envelope.version);
        let conf = match (envelope.conf(), invocation.command) {
            (Ok(conf), _) => conf,
            // A wrong configuration must not keep a pod from being removed.
            (Err(error), CniCommand::Del) => {
                log::warn!(target: logs::SCOPE, "{error}");
                return Ok(String::new());
            }
            (Err(error), _) => return Err(error),
        };
        configure(&conf);
        // Once per pod, like every other warning.
        if invocation.command == CniCommand::Add {
            warn_of_configuration(&conf);
        }
        carry_out(&Attachment { invocation: &invocation, conf: &conf, env, kernel, start })
    });
    match done {
        Ok(output) => RuntimeReply { output, success: true },
        Err(error) => {
            log::debug!(target: logs::SCOPE, code = error.code.number(); "{error}");
            RuntimeReply { output: error.json(version), success: false }
        }
    }
}

fn carry_out(job: &Attachment<'_>) -> Result<String, CniError> {
    match job.invocation.command {
        CniCommand::Add => commands::add(job).map(|()| job.conf.prev_result.json(job.conf.version)),
        CniCommand::Check => commands::check(job).map(|()| String::new()),
        CniCommand::Status => commands::status(job).map(|()| String::new()),
        // Nothing is kept outside the pod's network namespace.
        CniCommand::Del | CniCommand::Gc => Ok(String::new()),
        CniCommand::Version => Ok(versions()),
    }
}

fn versions() -> String {
    let supported: Vec<&str> = Version::all().map(Version::name).collect();
    serde_json::json!({"cniVersion": Version::NEWEST.name(), "supportedVersions": supported}).to_string()
}

fn read_input(input: &mut dyn Read) -> Result<Vec<u8>, CniError> {
    let mut bytes = Vec::new();
    let read = input.take(MOST_INPUT + 1).read_to_end(&mut bytes);
    let problem = match read {
        Ok(_) if bytes.len() as u64 <= MOST_INPUT => return Ok(bytes),
        Ok(_) => format!("is longer than {MOST_INPUT} bytes"),
        Err(error) => format!("cannot be read: {error}"),
    };
    Err(CniError::new(Code::Io, format!("standard input: {problem}")))
}

fn print(output: &str) -> io::Result<()> {
    if output.is_empty() {
        return Ok(());
    }
    let mut stdout = io::stdout().lock();
    stdout.write_all(output.as_bytes())?;
    stdout.write_all(b"\n")?;
    stdout.flush()
}

/// The first panic of the process: what and where.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Turns a panic into an error object: a runtime that gets no answer can only guess.
fn guarded(work: impl FnOnce() -> RuntimeReply) -> RuntimeReply {
    panic::set_hook(Box::new(note_panic));
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        let text = PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
        let message = format!("istio-cni internal error: {}", text.unwrap_or_default());
        log::error!(target: logs::SCOPE, "{message}");
        let error = CniError::new(Code::Internal, message).with_details("please report this");
        RuntimeReply { output: error.json(None), success: false }
    })
}

fn note_panic(info: &PanicHookInfo<'_>) {
    let payload = info.payload();
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("?");
    let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line()));
    let noted = format!("{text}{}", place.unwrap_or_default());
    PANIC.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(noted);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_object() {
        let answer = guarded(|| panic!("a bug: {}", 7));
        assert!(!answer.success);
        let object: serde_json::Value = serde_json::from_str(&answer.output).unwrap();
        assert_eq!(object["code"], 199);
        let message = object["msg"].as_str().unwrap();
        assert!(message.contains("a bug: 7 at ") && message.contains("lib.rs:"), "{message}");
        let _ = panic::take_hook();
    }
}
