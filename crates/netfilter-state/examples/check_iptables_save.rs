//! Whether what iptables-save prints is what a pod should have. Fails where it is not.
//!
//! ```console
//! # nsenter --net=/proc/PID/ns/net iptables-save | cargo run --example check_iptables_save
//! ```

#![allow(clippy::disallowed_methods, clippy::print_stdout)] // what an example is for

use netfilter_state::{change::RuleDifference, state::IptablesTables};
use redirect_core::{Families, Family, Redirect};
use std::{
    error::Error,
    io::{self, Read},
    process::ExitCode,
};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut saved = String::new();
    io::stdin().read_to_string(&mut saved)?;

    let wanted = Redirect::sidecar(Families::V4).build()?.plan().rules(Family::V4);
    let differences = RuleDifference::all(&IptablesTables::saved(&saved)?, &wanted);
    if differences.is_empty() {
        println!("as planned");
        return Ok(ExitCode::SUCCESS);
    }
    for difference in differences {
        println!("{difference}");
    }
    Ok(ExitCode::FAILURE)
}
