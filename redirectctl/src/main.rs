//! `redirectctl`: shows what is planned, in force and wrong in pods' network namespaces.

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    redirectctl::run(env::args_os().skip(1), env::vars_os())
}
