//! STATUS: whether an ADD could succeed at present.

use super::attachment::Job;
use crate::{
    pod_source,
    wire::{CniError, Code},
};
use nix::unistd::{AccessFlags, access};
use std::path::Path;

/// Looks at the kubeconfig or the manifest folder, the run directory and the kernel; nobody is contacted, nothing changed.
///
/// # Errors
/// Code 50 with everything that is missing; code 51 where it is the kernel, because pods that run may lack it too.
pub fn status(job: &Job<'_>) -> Result<(), CniError> {
    let mut problems = Vec::new();
    let mut remedy = "";
    if let Err(error) = pod_source::check(job.conf) {
        problems.push(error.to_string());
        remedy = error.advice().1;
    }
    problems.extend(check_run_dir(&job.conf.run_dir).err());
    let kernel = job.kernel.preflight(job.conf.programming).err();
    let code = if kernel.is_some() { Code::LimitedConnectivity } else { Code::NotAvailable };
    problems.extend(kernel.map(|error| error.to_string()));
    if problems.is_empty() {
        return Ok(());
    }
    Err(CniError::of_problems(code, &problems).with_details(remedy))
}

fn check_run_dir(path: &Path) -> Result<(), String> {
    let problem = |why: &str| format!("cni_agent_run_dir: {} {why}", path.display());
    if !path.is_dir() {
        return Err(problem("is no folder"));
    }
    access(path, AccessFlags::W_OK | AccessFlags::X_OK)
        .map_err(|error| problem(&format!("is not writable: {error}")))
}
