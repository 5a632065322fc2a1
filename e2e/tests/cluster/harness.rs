//! What the suite is made of: a CNI client and an API server that are real.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use e2e::cnitool::{self, CniTool};
use e2e::kube::ApiServer;
use e2e::traffic::{Client, TcpServer};
use serde_json::json;
use test_support::netns::{Families, Namespace};
use test_support::process;

#[test]
fn cnitool_adds_a_bridge_network_and_deletes_it() -> Result<()> {
    let mut tool = CniTool::new()?;
    tool.configure(
        "10-plain.conflist",
        &json!({"cniVersion": "1.0.0", "name": "plain", "plugins": [{
        "type": "bridge", "bridge": "br0", "isGateway": true, "ipam": {
            "type": "host-local", "dataDir": tool.state_dir(), "ranges": [[{"subnet": "10.89.0.0/24"}]]
        }}]}),
    )?;
    tool.set_pod("default", "plain", "u-1");
    let pod = Namespace::empty(Families::Dual)?;

    let result = tool.added("plain", &pod)?;
    let address: SocketAddr = format!("{}:80", cnitool::addresses(&result)[0]).parse()?;
    let _server = TcpServer::start(&pod, "app", address)?;
    assert_eq!(Client::new(tool.node()).tcp(address)?.server(), Some("app"));
    tool.check("plain", &pod)?.ok()?;
    tool.del("plain", &pod)?.ok()?;
    assert!(!pod.sh("ip -o link")?.stdout.contains("eth0"));

    let unknown = tool.add("unknown", &pod)?;
    assert!(!unknown.status.success());
    Ok(())
}

#[test]
fn an_api_server_knows_roles_and_tokens() -> Result<()> {
    let api = ApiServer::start()?;
    api.create_service_account("default", "reader")?;
    let file = api.token_kubeconfig("reader", &api.token("default", "reader")?)?;
    let get_pods = ["get", "pods", "-n", "default", "-o", "name"];

    let refused = api.kubectl_as(&file, &get_pods)?;
    assert!(!refused.status.success());
    assert!(refused.stderr.contains("Forbidden"), "{}", refused.stderr);

    api.kubectl(&[
        "create",
        "clusterrolebinding",
        "reader",
        "--clusterrole=system:aggregate-to-view",
        "--serviceaccount=default:reader",
    ])?;
    process::until("the role to be seen", process::SHORT, &[], || {
        Ok(api.kubectl_as(&file, &get_pods)?.status.success().then_some(()))
    })?;

    let signed = api.signed_token(
        "default",
        "reader",
        SystemTime::now(),
        SystemTime::now() + Duration::from_secs(3600),
    )?;
    api.kubectl_as(&api.token_kubeconfig("signed", &signed)?, &get_pods)?.ok()?;
    let file = api.token_kubeconfig("expired", &api.expired_token("default", "reader")?)?;
    let expired = api.kubectl_as(&file, &get_pods)?;
    assert!(
        expired.stderr.contains("Unauthorized") || expired.stderr.contains("logged in"),
        "{}",
        expired.stderr
    );

    api.create_namespace("kept")?;
    api.stop();
    assert!(TcpStream::connect(("127.0.0.1", api.port())).is_err());
    api.start_again()?;
    assert_eq!(api.get("serviceaccount", "kept", "default")?["metadata"]["name"], "default");
    Ok(())
}
