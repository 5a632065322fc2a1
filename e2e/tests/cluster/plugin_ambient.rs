//! The plugin and pods of ambient mode, with a real API server and its authorization.

use anyhow::{Result, ensure};
use e2e::kube::{ApiServer, fresh};
use e2e::plugin::fake_agent::{FakeAgent, ok};
use e2e::plugin::{Invocation, RunDir};
use serde_json::json;
use test_support::netns::{Families, Namespace};
use test_support::process::{SHORT, until};

#[test]
fn without_the_right_to_read_its_namespace_a_pod_is_not_started() -> Result<()> {
    let (api, run_dir) = (ApiServer::shared()?, RunDir::new()?);
    let shop = api.fresh_namespace("shop")?;
    api.kubectl(&["label", "namespace", &shop, "istio.io/dataplane-mode=ambient"])?;
    api.create_service_account(&shop, "cni")?;
    api.create(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": shop},
        "spec": {"nodeName": "nowhere", "containers": [{"name": "app", "image": "app"}]}}))?;
    let allow = |resource: &str| -> Result<()> {
        let name = fresh(resource);
        api.kubectl(&["create", "clusterrole", &name, "--verb=get", &format!("--resource={resource}")])?;
        let (role, account) = (format!("--clusterrole={name}"), format!("--serviceaccount={shop}:cni"));
        api.kubectl(&["create", "clusterrolebinding", &name, &role, &account]).map(drop)
    };
    allow("pods")?;
    run_dir.write_kubeconfig(&api.kubeconfig(&json!({"token": api.token(&shop, "cni")?}))?)?;
    let agent = FakeAgent::start(&run_dir, ok())?;
    let netns = Namespace::pod(Families::V4)?;
    let mut conf = run_dir.conf();
    conf["ambient_enabled"] = json!(true);
    let add = || Invocation::new("ADD", &conf).netns(&netns).pod(&shop, "web").run();
    // The role counts a moment later.
    until("the pod to be read", SHORT, &[], || {
        Ok(add()?.error()?.1.contains("read namespaces (403)").then_some(()))
    })?;
    let (code, text) = add()?.error()?;
    ensure!(code == 101 && text.contains("verb get on namespaces"), "{code} {text}");
    ensure!(agent.take_events().is_empty());
    allow("namespaces")?;
    until("the namespace to be read", SHORT, &[], || Ok(add()?.0.status.success().then_some(())))?;
    ensure!(agent.take_events().len() == 1);
    Ok(())
}
