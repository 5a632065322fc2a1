//! Starts the agent's servers.

use std::sync::Arc;

use anyhow::Context as _;
use hyper::Request;
use hyper::body::Incoming;
use tokio::task::AbortHandle;

use super::{Answer, Listener, Served, connections, listen};
use crate::log_socket::LogServer;
use crate::settings::Settings;
use crate::supervisor::Supervisor;

/// Starts the servers. Only health and the log socket are necessary.
///
/// # Errors
/// When one of these two cannot be opened.
pub async fn start(settings: &Settings, served: &Arc<Served>) -> anyhow::Result<LogServer> {
    let tasks = &served.tasks.clone();
    if let Some((address, port)) = settings.serve.monitoring {
        match listen(address, port).await {
            Ok(listener) => {
                let served = served.clone();
                spawn(tasks, "metrics server", listener, move |request| {
                    let served = served.clone();
                    async move { served.metrics(request).await }
                });
            }
            Err(error) => log::error!(target: "cni-agent", port = port; "no metrics: cannot listen: {error}"),
        }
    }
    if let Some((address, port)) = settings.serve.control {
        match listen(Some(address), port).await {
            Ok(listener) => {
                let served = served.clone();
                spawn(tasks, "run-time control", listener, move |request| {
                    let served = served.clone();
                    async move { served.control(request).await }
                });
            }
            Err(error) => {
                log::warn!(target: "cni-agent", port = port; "no run-time control: cannot listen: {error}");
            }
        }
    }
    let logs = LogServer::start(&settings.paths.run, served)?;
    let (address, port) = settings.serve.health;
    let listener =
        listen(address, port).await.with_context(|| format!("cannot serve health on port {port}"))?;
    let served = served.clone();
    spawn(tasks, "health server", listener, move |request| {
        let served = served.clone();
        async move { served.health(request).await }
    });
    Ok(logs)
}

/// Starts one of them.
pub fn spawn<L, A, F>(tasks: &Supervisor, name: &'static str, listener: L, answer: A) -> AbortHandle
where
    L: Listener + Send + Sync + 'static,
    A: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    tasks.spawn(name, async move { match connections(listener, answer).await {} })
}
