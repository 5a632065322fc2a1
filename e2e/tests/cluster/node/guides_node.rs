//! The commands of the guides, typed one after the other on a cluster with a real node.
//!
//! `make guides` builds what they need and runs this.

use std::time::Instant;

use crate::agent_support::{
    NAMESPACE, POD, assert_redirected, entries, import_packed, is_ready, wait_loaded, wait_rolled_out,
};
use crate::guides_cluster::{Registry, Workstation, ensure_capabilities, on_node};
use crate::kubectl_support::kubelet::{reach_kubelet, through_kubelet};
use anyhow::{Context, Result, ensure};
use e2e::guides::Block;
use e2e::guides::worlds::{STORY, blocks_for, typed};
use e2e::kube::{ApiServer, Controllers};
use e2e::node::{Node, sidecar_pod};
use e2e::traffic::Relay;
use serde_json::json;
use test_support::process::{Output, until};

/// What stands for Istio's own agent under Istio's chart; its program cannot be had here.
const STAND_IN: &str = crate::agent_support::IMAGE;
const ISTIOS: [&str; 5] = ["NET_ADMIN", "NET_RAW", "SYS_PTRACE", "SYS_ADMIN", "DAC_OVERRIDE"];

/// Something to restart. There is no controller that would start its pods.
const DEPLOYMENT: &str = r#"{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "default"},
    "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": {"metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "web", "image": "web"}]}}}}"#;

struct Story<'a> {
    api: &'a ApiServer,
    node: &'a Node<'a>,
    controllers: &'a Controllers,
    station: &'a Workstation,
    /// Where the API server reaches the node's kubelet.
    kubelet: Relay,
}

/// What a document shows for a cluster or a node, in its order.
fn shown(document: &str) -> Result<Vec<Block>> {
    let mut blocks = blocks_for("cluster")?;
    blocks.extend(blocks_for("node")?);
    blocks.extend(blocks_for("sam")?);
    blocks.retain(|block| block.document == document);
    blocks.sort_by_key(|block| block.line);
    Ok(blocks)
}

impl Story<'_> {
    /// Types all that a document shows, in its order.
    fn type_all(&self, document: &str) -> Result<Vec<Block>> {
        let blocks = shown(document)?;
        self.type_blocks(&blocks)?;
        Ok(blocks)
    }

    #[allow(clippy::print_stdout, reason = "tells how long a reader's steps take")]
    fn type_blocks(&self, blocks: &[Block]) -> Result<()> {
        for block in blocks {
            let start = Instant::now();
            if block.world == "cluster" {
                typed(block, |script| self.station.run(&script.replace("NODE", self.node.name())))?;
            } else if block.world == "sam" {
                typed(block, |script| self.as_sam(script))?;
            } else {
                // A reader types it again until it is so: pods are checked one after the other.
                let mut last = None;
                until(&block.text, POD, &self.controllers.processes(), || {
                    last = typed(block, |script| on_node(self.node, script)).err();
                    Ok(last.is_none().then_some(()))
                })
                .with_context(|| format!("{last:?}"))?;
            }
            println!("{}, {}: {:.0} s", block.place(), block.world, start.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// Types what asks agents through the API server and a kubelet, and takes away one right after the other.
    fn ask_from_outside(&self, document: &str) -> Result<()> {
        let mut pod = sidecar_pod("cart-0");
        let listens = "nc -ll -p 15001 -e true & exec nc -ll -p 15006 -e true";
        pod["spec"]["containers"][1]["command"] = json!(["/bin/sh", "-c", listens]);
        self.node.start_pod(&pod)?.wait_running(POD)?;
        self.type_all(document)?;
        let release = "daemonsets.apps,clusterrolebindings.rbac.authorization.k8s.io";
        for (role, rights, missing) in [
            ("role", "--verb=create --resource=pods/exec".to_owned(), "cannot get resource \"pods/exec\""),
            ("clusterrole", format!("--verb=get,list --resource=nodes,{release}"), "list pods"),
            ("clusterrole", format!("--verb=get,list --resource=pods,{release}"), "list nodes"),
            ("clusterrole", "--verb=get,list --resource=nodes,pods".to_owned(), "list clusterrolebindings"),
        ] {
            let place = if role == "role" { "-n istio-system" } else { "" };
            let change = format!(
                "kubectl {place} create {role} redirect {rights} --dry-run=client -o yaml | kubectl {place} replace -f -"
            );
            self.station.run(&change)?.ok()?;
            let output = self.as_sam("kubectl redirect scan")?;
            ensure!(
                !output.status.success() && format!("{}{}", output.stdout, output.stderr).contains(missing),
                "without {missing}: {output:?}"
            );
        }
        Ok(())
    }

    fn as_sam(&self, script: &str) -> Result<Output> {
        through_kubelet(self.api, self.node, &self.kubelet, || self.station.run_as_sam(script))
    }

    /// A pod that starts now is redirected.
    fn ensure_redirects(&self, name: &str) -> Result<()> {
        let pod = self.node.start_pod(&sidecar_pod(name))?;
        pod.wait_running(POD)?;
        assert_redirected(self.node, &pod)
    }

    fn is_rolled_out(&self) -> Result<()> {
        let agent = wait_rolled_out(self.api, self.node, self.controllers)?;
        is_ready(&agent).context("the agent is not ready")
    }
}

#[test]
#[ignore = "needs helm, skopeo, a registry and the programs as shipped: make guides"]
#[allow(clippy::print_stdout, reason = "tells how long a reader's steps take")]
fn the_guides_lead_from_istios_agent_to_verified_pods_and_back() -> Result<()> {
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    let (registry, node) = (Registry::start()?, Node::joined(&api)?);
    let _service = node.as_usual()?;
    let _registry_on_node = node.reach(registry.port)?;
    let controllers = Controllers::start_with(&api, &["job-controller"])?;
    import_packed(&node, "install-cni", STAND_IN, crate::guides_cluster::programs()?.as_ref())?;
    let station = Workstation::start(&api, &registry)?;
    station.install_istio()?;
    let kubelet = reach_kubelet(&node)?;
    let story = Story { api: &api, node: &node, controllers: &controllers, station: &station, kubelet };
    story.is_rolled_out()?;
    wait_loaded(&node)?;
    for name in ["before-a", "before-b", "before-c"] {
        story.ensure_redirects(name)?;
    }
    api.apply(DEPLOYMENT)?;

    // The first page: to a line that says that all pods of the mesh are verified.
    let [readme, migrate, upgrade, install, kubectl, images] = STORY else { unreachable!("six documents") };
    let start = Instant::now();
    let typed = story.type_all(readme)?;
    println!("README.md, to verified pods: {:.0} s", start.elapsed().as_secs_f64());
    let commands: usize = typed
        .iter()
        .map(|block| if block.is_console { block.steps().len() } else { block.commands().len() })
        .sum();
    ensure!(commands <= 10, "{commands} commands");
    ensure_capabilities(&api, &["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"])?;
    story.ensure_redirects("after")?;

    // Back, which is Istio's chart as it was, and on to this one again, which is what the upgrade's guide begins with.
    story.type_all(migrate)?;
    story.is_rolled_out()?;
    ensure_capabilities(&api, &ISTIOS)?;
    story.ensure_redirects("back")?;
    station.run("helm rollback istio-cni 2 --namespace istio-system --wait")?.ok()?;
    let upgrade = shown(upgrade)?;
    let removal = upgrade.iter().position(|block| block.text.contains("helm uninstall"));
    let (upgrade, removal) = upgrade.split_at(removal.context("the guide does not remove the agent")?);
    story.type_blocks(upgrade)?;
    story.is_rolled_out()?;
    story.ensure_redirects("upgraded")?;

    story.type_blocks(removal)?;
    ensure!(!entries(&node)?.contains("istio-cni"), "{}", entries(&node)?);
    let left = api.list("daemonsets,configmaps,serviceaccounts,roles,rolebindings", NAMESPACE)?;
    let left: Vec<_> = left.iter().map(|object| object["metadata"]["name"].clone()).collect();
    ensure!(
        !left.iter().any(|name| name.as_str().is_some_and(|name| name.starts_with("istio-cni"))),
        "{left:?}"
    );

    // Again, where no agent was.
    story.type_all(install)?;
    story.is_rolled_out()?;
    wait_loaded(&node)?;
    story.ensure_redirects("fresh")?;
    for name in ["before-a", "before-b", "before-c", "after", "back", "upgraded", "fresh"] {
        api.kubectl(&["delete", "pod", name, "--now", "--wait"])?;
    }
    story.ask_from_outside(kubectl)?;
    story.type_all(images).map(drop)
}

#[test]
#[ignore = "needs helm, skopeo, a registry and the programs as shipped: make guides"]
fn an_agent_that_a_manifest_installed_is_handed_over_to_helm() -> Result<()> {
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    let registry = Registry::start()?;
    let station = Workstation::start(&api, &registry)?;
    api.apply(&crate::agent_support::chart(false))?;
    for block in blocks_for("handed-over")? {
        typed(&block, |script| station.run(script))?;
    }
    let set = api.get("daemonset", NAMESPACE, "istio-cni-node")?;
    let image = &set["spec"]["template"]["spec"]["containers"][0]["image"];
    ensure!(image.as_str().is_some_and(|image| image.starts_with(&registry.name())), "{image}");
    Ok(())
}
