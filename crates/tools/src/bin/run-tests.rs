//! Runs the tests that cargo has built.

fn main() -> anyhow::Result<std::process::ExitCode> {
    tools::suite::main()
}
