//! A pod as `kubectl get pod NAME -o json` prints it becomes a decision and, where it is redirected, a plan, both as JSON.
//!
//! ```console
//! $ kubectl get pod NAME -o json | cargo run --example plan_as_json --features pod-json,serde
//! ```

#![allow(clippy::print_stdout)] // what an example is for

use redirect_core::{
    pod::{Decision, PodFacts},
    settings::NamespaceFacts,
};
use serde_json::Value;
use std::{error::Error, io, net::IpAddr};

fn main() -> Result<(), Box<dyn Error>> {
    let pod: Value = serde_json::from_reader(io::stdin())?;
    let mut addresses: Vec<IpAddr> = Vec::new();
    for item in pod["status"]["podIPs"].as_array().into_iter().flatten() {
        addresses.push(item["ip"].as_str().ok_or("status.podIPs: an item without ip")?.parse()?);
    }

    let decision = PodFacts::from_json(&pod)?.decide(&NamespaceFacts::new(&addresses))?;
    println!("{}", serde_json::to_string(&decision)?);
    if let Decision::Redirect(redirect) = &decision {
        println!("{}", serde_json::to_string(&redirect.plan())?);
    }
    Ok(())
}
