//! Proxies that end while they are needed, and that the kubelet starts again.

use anyhow::{Context, Result};
use e2e::node::Pod;
use serde_json::Value;
use test_support::process;

use super::checks::Shop;
use crate::agent_support::POD;

/// curl's exit code where a connection ends without an answer.
const EMPTY_REPLY: i32 = 52;

/// How a proxy ends.
#[derive(Clone, Copy, Debug)]
pub enum Restart {
    /// Envoy is killed.
    Crash,
    /// `pilot-agent` is asked to quit.
    Quit,
}

impl Restart {
    /// Ends a pod's proxy, and waits until the next one runs and the pod is ready.
    pub fn run(self, shop: &Shop<'_>, of: &str) -> Result<()> {
        let (pod, inside) = shop.pod(of)?;
        let before = restarts(pod)?;
        match self {
            Self::Crash => {
                pod.exec("istio-proxy", &["/bin/sh", "-c", "kill -9 $(pidof envoy)"])?;
            }
            Self::Quit => {
                let url = "http://127.0.0.1:15020/quitquitquit";
                let quit =
                    ["--silent", "--show-error", "--fail", "--max-time", "30", "--request", "POST", url];
                let answer = inside.run(&process::command("curl", quit))?;
                // It may be gone before it has answered.
                if answer.code() != Some(EMPTY_REPLY) {
                    answer.ok()?;
                }
            }
        }
        pod.wait("to have another proxy", POD, |object| {
            let proxy = proxy(object)?;
            (proxy["restartCount"].as_u64()? > before && proxy["ready"] == true).then_some(())
        })
    }
}

fn restarts(pod: &Pod<'_>) -> Result<u64> {
    let object = pod.object()?.context("the pod is there")?;
    proxy(&object).and_then(|proxy| proxy["restartCount"].as_u64()).context("the pod has no proxy")
}

/// The status of the proxy as a native sidecar.
fn proxy(pod: &Value) -> Option<&Value> {
    pod["status"]["initContainerStatuses"].as_array()?.iter().find(|status| status["name"] == "istio-proxy")
}
