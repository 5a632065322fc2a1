//! Finds circles of modules.

fn main() -> std::process::ExitCode {
    tools::modules::main()
}
