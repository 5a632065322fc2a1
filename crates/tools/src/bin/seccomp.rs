//! Writes seccomp profiles.

fn main() -> anyhow::Result<()> {
    tools::seccomp::main()
}
