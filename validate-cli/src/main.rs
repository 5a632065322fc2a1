//! `istio-validation`: the init container that holds a pod back while its traffic would bypass the proxy.

use istio_validation::{Verdict, report, run};
use redirect_core::settings::Key;
use settings_cli::{Asked, Program};
use std::{env, process::ExitCode};

const PROGRAM: Program = Program {
    name: "istio-validation",
    about: "Proves by traffic that this pod is redirected to its sidecar proxy. Exit code 0: it is; 126: it is not, \
            and the termination message says why; 1: the settings cannot be understood.",
    version: env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    // The injector writes arguments for an image whose entry point takes the program's name first.
    let mut args = env::args_os().skip(1).peekable();
    let _ = args.next_if(|first| first == "istio-iptables");
    let input = match PROGRAM.read(args, |name| env::var(name).ok()) {
        Ok(Asked::Run(input)) => input,
        Ok(Asked::Print(text)) => {
            print(&text);
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(&error),
    };
    let logs = match logging::init(input.log) {
        Ok(logs) => logs,
        Err(error) => return fail(&error),
    };
    let code = match run(&input.settings) {
        Ok(verdict) => tell(&verdict, input.settings.get(Key::TerminationLog).0),
        Err(error) => {
            log::error!(target: logging::DEFAULT_SCOPE, "{error}");
            ExitCode::FAILURE
        }
    };
    logs.flush();
    code
}

fn tell(verdict: &Verdict, termination_log: &str) -> ExitCode {
    report(verdict, Some(termination_log).filter(|path| !path.is_empty()));
    verdict.exit_code().into()
}

#[allow(clippy::print_stdout, reason = "help and completions are what the user asked for")]
fn print(text: &str) {
    print!("{text}");
}

#[allow(clippy::print_stderr, reason = "logging is not set up yet")]
fn fail(error: &impl std::fmt::Display) -> ExitCode {
    eprintln!("{error}");
    ExitCode::FAILURE
}
