//! STATUS: whether an ADD could succeed now.

use super::attachment::Attachment;
use crate::{
    conf::Conf,
    pod_source,
    wire::{CniError, Code},
};
use nix::unistd::{AccessFlags, access};
use std::path::Path;

/// Checks the kubeconfig or the manifest folder, at the run directory and, if nothing is wrong with these, at the kernel. Contacts
/// no server and changes nothing.
///
/// What the node agent provides counts only where the agent can provide it: a runtime that receives "not available" starts no pod on the
/// pods' network, so an agent that is such a pod would wait for itself for ever.
///
/// # Errors
/// Code 50 with everything that is missing; code 51 if the kernel lacks something, because running pods may lack it too.
pub fn status(job: &Attachment<'_>) -> Result<(), CniError> {
    let agent_can_come = job.conf.agent_host_network;
    if agent_can_come || job.conf.manifest_dir.is_some() {
        check_files(job.conf)?;
    }
    let kernel = job.kernel.preflight(job.conf.programming);
    kernel.map_err(|error| CniError::new(Code::LimitedConnectivity, error.to_string()))
}

fn check_files(conf: &Conf) -> Result<(), CniError> {
    let mut problems = Vec::new();
    let mut remedy = "";
    if let Err(error) = pod_source::check(conf) {
        problems.push(error.to_string());
        remedy = error.advice().1;
    }
    problems.extend(check_run_dir(&conf.run_dir).err());
    if problems.is_empty() {
        return Ok(());
    }
    Err(CniError::of_problems(Code::NotAvailable, &problems).with_details(remedy))
}

fn check_run_dir(path: &Path) -> Result<(), String> {
    let problem = |why: &str| format!("cni_agent_run_dir: {} {why}", path.display());
    if !path.is_dir() {
        return Err(problem("is not a folder"));
    }
    access(path, AccessFlags::W_OK | AccessFlags::X_OK)
        .map_err(|error| problem(&format!("is not writable: {error}")))
}
