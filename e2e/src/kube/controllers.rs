//! Kubernetes' own controllers: those that make, schedule and remove the pods of a DaemonSet, and others that a test asks for.

use anyhow::Result;
use tempfile::TempDir;

use super::{ApiServer, START};
use crate::tools;
use test_support::leftovers::temp_dir;
use test_support::process::{self, Background, until};

/// The controllers that always run: those of DaemonSets, and the one that removes what a deleted object owned.
const CONTROLLERS: [&str; 2] = ["daemonset-controller", "garbage-collector-controller"];

/// A controller manager and a scheduler beside an API server. Both end when the value is dropped.
#[derive(Debug)]
pub struct Controllers {
    // Dropped in this order.
    manager: Background,
    scheduler: Background,
    _folder: TempDir,
}

impl Controllers {
    /// Starts them and waits until they work.
    pub fn start(api: &ApiServer) -> Result<Self> {
        Self::start_with(api, &[])
    }

    /// The same with more controllers, by their names in the controller manager.
    pub fn start_with(api: &ApiServer, more: &[&str]) -> Result<Self> {
        let controllers = format!("--controllers={}", [&CONTROLLERS, more].concat().join(","));
        let folder = temp_dir()?;
        let start = |name: &str, more: &[&str]| -> Result<Background> {
            let mut command = process::command(tools::built(name)?, ["--leader-elect=false"]);
            command.arg("--kubeconfig").arg(api.admin_kubeconfig()).args(more);
            let log = folder.path().join(format!("{name}.log"));
            Ok(Background::start(name, &command, &log)?.killed_on_drop())
        };
        let manager = start("kube-controller-manager", &[&controllers, "--secure-port=0"])?;
        let scheduler = start("kube-scheduler", &["--secure-port=0"])?;
        let controllers = Self { manager, scheduler, _folder: folder };
        until("the DaemonSet controller", START, &controllers.processes(), || {
            Ok(controllers.manager.log().contains("Starting daemon sets controller").then_some(()))
        })?;
        Ok(controllers)
    }

    /// The processes, for who waits for what they do.
    pub fn processes(&self) -> [&Background; 2] {
        [&self.manager, &self.scheduler]
    }
}
