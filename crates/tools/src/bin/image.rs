//! Writes the project's container images.

fn main() -> anyhow::Result<()> {
    tools::image::main()
}
