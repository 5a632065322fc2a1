//! `kubectl redirect`: asks the agents of all nodes whether their pods are redirected.

use std::process::ExitCode;

fn main() -> ExitCode {
    kubectl_redirect::run(std::env::args().skip(1).collect())
}
