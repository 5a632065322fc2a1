//! From the annotations of a pod to text for iptables-restore.
//!
//! ```console
//! $ cargo run --example annotations_to_restore traffic.sidecar.istio.io/excludeOutboundPorts=3306
//! ```

#![allow(clippy::print_stdout)] // what an example is for

use redirect_core::{
    pod::{Decision, PodFacts},
    settings::NamespaceFacts,
};
use std::{error::Error, net::IpAddr};

fn main() -> Result<(), Box<dyn Error>> {
    let mut annotations = Vec::new();
    for argument in std::env::args().skip(1) {
        let (name, value) = argument.split_once('=').ok_or("write annotations as NAME=VALUE")?;
        annotations.push((name.to_owned(), value.to_owned()));
    }

    // A program would take these from the pod's network namespace.
    let addresses: [IpAddr; 2] = ["10.1.0.2".parse()?, "fd00:10::2".parse()?];
    match PodFacts::sidecar(annotations).decide(&NamespaceFacts::new(&addresses))? {
        Decision::Redirect(redirect) => {
            let plan = redirect.plan();
            for family in plan.families() {
                println!("# {family}");
                print!("{}", plan.rules(*family).restore_text());
            }
        }
        Decision::Skip(reason) => println!("# not redirected: {}", reason.explanation()),
    }
    Ok(())
}
