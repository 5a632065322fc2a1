//! Redirects the traffic of a network namespace, such as that of a podman container, to a proxy that runs in it.
//!
//! ```text
//! podman_mesh NETNS             REDIRECT; also repairs what is not as planned
//! podman_mesh NETNS tproxy      the same with TPROXY, which keeps the clients' addresses
//! podman_mesh NETNS cleanup     removes all of it
//! ```
//!
//! `podman inspect --format '{{.NetworkSettings.SandboxKey}}' NAME` names the namespace of a container.

#![allow(clippy::print_stdout)] // its output

use netns_apply::Session;
use redirect_core::{Redirect, Tproxy};
use std::{env, error::Error};

fn main() -> Result<(), Box<dyn Error>> {
    let path = env::args().nth(1).ok_or("usage: podman_mesh NETNS [tproxy|cleanup]")?;
    let pod = Session::open(path)?;
    let plan = match env::args().nth(2).as_deref() {
        None => Redirect::sidecar(pod.families()?).build()?.plan(),
        Some("tproxy") => Redirect::sidecar(pod.families()?).tproxy(Tproxy::default()).build()?.plan(),
        Some("cleanup") => {
            println!("changed: {}", pod.cleanup()?.changed);
            return Ok(());
        }
        Some(other) => return Err(format!("{other:?} is neither tproxy nor cleanup").into()),
    };
    println!("before: {}", pod.verify_in_words(&plan)?.unwrap_or("in force".into()));
    println!("changed: {}", pod.apply(&plan)?.changed);
    println!("after: {}", pod.verify_in_words(&plan)?.unwrap_or("in force".into()));
    Ok(())
}
