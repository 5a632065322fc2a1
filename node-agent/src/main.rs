//! `install-cni`: reads its settings, starts logging, runs what was asked for.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use install_cni::agent;
use install_cni::reload::{Reading, Reloader, Sources};
use install_cni::settings::{Action, Problem, Settings, command, completions, manual};

fn main() -> ExitCode {
    let given = match command().try_get_matches() {
        Ok(given) => given,
        // Wrong input ends with the same exit code here as everywhere.
        Err(error) if error.use_stderr() => return complain(error.to_string().trim_end()),
        Err(help) => return say(help.to_string().trim_end()),
    };
    let env: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let action = Action::of(&given);
    match action {
        Action::Version => return say(concat!("install-cni ", env!("CARGO_PKG_VERSION"))),
        Action::Help => return say(command().render_long_help().to_string().trim_end()),
        Action::Man => return say(manual().trim_end()),
        Action::Completion(shell) => return say(completions(shell).trim_end()),
        Action::Run | Action::Cleanup => {}
    }
    let Reading { settings, notices, reloader } = match Sources::new(given, env).read() {
        Ok(read) => read,
        Err(problems) => return refuse(&problems),
    };
    let logs = match logging::init(settings.logging.clone()) {
        Ok(logs) => logs,
        Err(error) => return complain(&error.to_string()),
    };
    for notice in notices {
        log::warn!(target: "cni-agent", "{notice}");
    }
    let done = match action {
        Action::Run => run(settings, reloader, &logs),
        Action::Cleanup => cleanup(settings),
        Action::Version | Action::Help | Action::Man | Action::Completion(_) => ExitCode::SUCCESS,
    };
    logs.flush();
    done
}

/// One thread does the work; up to three more, which end when idle, wait for the disk or look into pods.
fn run(settings: Settings, reloader: Option<Reloader>, logs: &logging::Handle) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(3).build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(agent::run(settings, reloader, Some(logs.clone()))),
        Err(error) => Err(error.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error!(target: "cni-agent", "{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn cleanup(settings: Settings) -> ExitCode {
    match agent::cleanup(settings) {
        Ok(()) => {
            log::info!(target: "cni-agent", "the plugin is removed");
            ExitCode::SUCCESS
        }
        Err(errors) => {
            for error in errors {
                log::error!(target: "cni-agent", "removal: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

fn refuse(problems: &[Problem]) -> ExitCode {
    let lines: Vec<String> = problems.iter().map(|problem| format!("install-cni: {problem}")).collect();
    complain(&lines.join("\n"))
}

#[expect(clippy::print_stderr, reason = "there is no log yet")]
fn complain(text: &str) -> ExitCode {
    eprintln!("{text}");
    ExitCode::FAILURE
}

/// The answer to a question. A reader that has gone away is no failure.
fn say(text: &str) -> ExitCode {
    match writeln!(io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => complain(&error.to_string()),
        Ok(()) | Err(_) => ExitCode::SUCCESS,
    }
}
