//! What the end-to-end harness has to do in a process of its own.

use std::process::ExitCode;

use anyhow::{Result, bail};
use e2e::confined::{self, Unlisted};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(answer) => {
            say(&answer);
            ExitCode::SUCCESS
        }
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<String> {
    match words {
        ["connect", attempt] => e2e::traffic::connect_in_helper(attempt),
        ["meddle", orders] => e2e::meddler::meddle_in_helper(orders).map(|()| String::new()),
        ["node-init", folder] => e2e::node::init_in_helper(folder.as_ref()).map(|()| String::new()),
        ["api-server", folder] => e2e::kube::serve_in_helper(folder.as_ref()).map(|()| String::new()),
        ["confined", profile, program @ ..] => {
            confined::become_confined(profile.as_ref(), Unlisted::Fails, program).map(|()| String::new())
        }
        ["confined-or-killed", profile, program @ ..] => {
            confined::become_confined(profile.as_ref(), Unlisted::Kills, program).map(|()| String::new())
        }
        ["forbidden", profile] => confined::try_what_is_forbidden(profile.as_ref()),
        other => bail!("unknown request {other:?}"),
    }
}

#[allow(clippy::print_stdout, reason = "standard output carries the answer to the harness")]
fn say(answer: &str) {
    println!("{answer}");
}

#[allow(clippy::print_stderr, reason = "the harness shows standard error when the helper fails")]
fn complain(error: &anyhow::Error) {
    eprintln!("e2e-helper: {error:#}");
}
