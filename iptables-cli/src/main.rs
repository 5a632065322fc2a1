//! `istio-iptables`: plans redirection from flags and environment, and programs the network namespace it runs in.
//!
//! Exit codes: 0 done; 1 bad input, or failed; 126 the validation found the pod not redirected.

mod report;
mod run;

use settings_cli::{Asked, Program};
use std::{
    env,
    io::{self, Write},
    process::ExitCode,
};

const PROGRAM: Program = Program {
    name: "istio-iptables",
    about: "Redirects a pod's traffic to its sidecar proxy: programs iptables or nftables rules in the network namespace it runs in.",
    version: env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    let variable = |name| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    match PROGRAM.read(env::args_os().skip(1), variable) {
        Ok(Asked::Print(text)) => print(&text),
        Ok(Asked::Run(input)) => match logging::init(input.log) {
            Ok(handle) => {
                let code = run::run(&input.settings).unwrap_or_else(|error| report::failure(&error));
                handle.flush();
                code
            }
            Err(error) => complain(&format!("{error}")),
        },
        Err(usage) => complain(&usage.to_string()),
    }
}

/// Standard output belongs to what the user asked for. A reader that has gone away is no failure.
fn print(text: &str) -> ExitCode {
    let _ = io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// What goes wrong before there is a log goes to standard error as it is.
fn complain(text: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "{text}");
    ExitCode::FAILURE
}
