//! The way from the API server to a real node's kubelet, which has a network of its own.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use e2e::kube::{ApiServer, Sending};
use e2e::node::Node;
use serde_json::json;
use test_support::netns;
use test_support::process::{Output, until};

/// How long a run may take on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Makes the kubelet of a real node reachable at a port of this machine's loopback, until the test ends.
pub fn reach_kubelet(node: &Node<'_>) -> Result<u16> {
    let namespace = node.namespace().path();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for outside in listener.incoming().flatten() {
            // Without the kubelet the connection is closed, which the API server reports.
            let Ok(Ok(inside)) = netns::enter(&namespace, || TcpStream::connect(("127.0.0.1", 10250))) else {
                continue;
            };
            for (from, to) in [(&outside, &inside), (&inside, &outside)] {
                if let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) {
                    thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        }
    });
    Ok(port)
}

/// Runs something that asks a node's kubelet through the API server, which reaches it at this port of loopback.
pub fn through_kubelet(
    api: &ApiServer,
    node: &Node<'_>,
    port: u16,
    run: impl Fn() -> Result<Output>,
) -> Result<Output> {
    let here = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}});
    let status = [Sending::merge(&format!("/api/v1/nodes/{}/status", node.name()), &here)];
    until("the API server to reach the kubelet", LIMIT, &[], || {
        // The kubelet restores its own address, which only the node knows, every few seconds.
        api.send_all(&status)?;
        let output = run()?;
        let said = format!("{}{}", output.stdout, output.stderr);
        Ok((!said.contains("no such host")).then_some(output))
    })
}
