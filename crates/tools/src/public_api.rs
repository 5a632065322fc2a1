//! Prints the public interface that a file of rustdoc's JSON describes, an item a line: `public-api target/doc/CRATE.json`.
//!
//! scripts/public-api.sh makes the file and compares the lines with those under docs/public-api. cargo-public-api does the
//! same with a nightly toolchain only; the library behind it reads what the stable one writes.

use anyhow::{Context, bail};
use std::io::Write;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(file), None) = (arguments.next(), arguments.next()) else {
        bail!("usage: public-api FILE, where FILE is rustdoc's JSON for one crate");
    };
    // Derived traits stay: removing one breaks users. Blanket and auto traits follow from the rest.
    let interface = public_api::Builder::from_rustdoc_json(&file)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .build()
        .with_context(|| format!("cannot read {}", file.display()))?;
    std::io::stdout().lock().write_all(interface.to_string().as_bytes()).context("cannot write")
}
