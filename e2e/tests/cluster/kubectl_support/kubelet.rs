//! The way from the API server to a real node's kubelet, which has a network of its own.

use std::time::Duration;

use anyhow::Result;
use e2e::kube::{ApiServer, Sending};
use e2e::node::Node;
use e2e::traffic::Relay;
use serde_json::json;
use test_support::process::{Output, until};

/// How long a run may take on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Makes the kubelet of a real node reachable at a port of this machine's loopback, as long as the value lives.
pub fn reach_kubelet(node: &Node<'_>) -> Result<Relay> {
    Relay::into_namespace(node.namespace(), 10250)
}

/// Runs something that asks a node's kubelet through the API server, which reaches it by this way.
pub fn through_kubelet(
    api: &ApiServer,
    node: &Node<'_>,
    kubelet: &Relay,
    run: impl Fn() -> Result<Output>,
) -> Result<Output> {
    let here = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.address().port()}}}});
    let status = [Sending::merge(&format!("/api/v1/nodes/{}/status", node.name()), &here)];
    until("the API server to reach the kubelet", LIMIT, &[], || {
        // The kubelet restores its own address, which only the node knows, every few seconds.
        api.send_all(&status)?;
        let output = run()?;
        let said = format!("{}{}", output.stdout, output.stderr);
        Ok((!said.contains("no such host")).then_some(output))
    })
}
