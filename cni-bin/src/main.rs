//! The executable a container runtime runs for every pod; see the library of the same package.

use std::process::ExitCode;

fn main() -> ExitCode {
    istio_cni::main()
}
