//! Istio's chart of ztunnel, twice, on a real node under a real istiod: open streams survive that their namespace gets its label, and that ztunnel is exchanged.
//!
//! `make mesh` runs this where it is given a ztunnel.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::guides::worlds::{blocks_for, typed};
use e2e::node::{Node, Pod, plain_pod};
use e2e::traffic::{Client, TcpServer};
use e2e::ztunnel::stock;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::netns::Namespace;
use test_support::process::{self, Output, until};

use super::mesh_support::cluster::{Cluster, on_cluster};
use super::mesh_support::release::Release;
use super::mesh_support::table::print;
use super::mesh_support::{Redirection, ZTUNNELS};
use crate::agent_support::{NAMESPACE, POD, metric};
use crate::enrolment::stock_ztunnel::open_streams::{Streams, count};
use e2e::tools;

/// The namespace of pods, as in the document.
const SHOP: &str = "shop";
/// The port of streams.
const STREAMS: u16 = 9000;
/// For longer than a ztunnel drains that is not given more time.
const DRAINING: Duration = Duration::from_secs(40);

/// Where the commands of the document are typed.
struct Station<'a> {
    cluster: &'a Cluster<'a>,
    folder: TempDir,
}

impl<'a> Station<'a> {
    fn new(cluster: &'a Cluster<'a>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        // No name server knows istiod, whose certificate is for this name.
        let istiod = format!("{}:15012", cluster.istiod.address);
        let values = json!({
            "image": cluster.release.image("ztunnel"), "imagePullPolicy": "Never", "logAsJson": true,
            "caAddress": istiod, "xdsAddress": istiod, "terminationGracePeriodSeconds": 600,
            "env": {"ALT_CA_HOSTNAME": "localhost", "ALT_XDS_HOSTNAME": "localhost"},
            "resources": {"requests": {"cpu": "10m", "memory": "40Mi"}},
        });
        fs::write(folder.path().join("values"), values.to_string())?;
        Ok(Self { cluster, folder })
    }

    fn run(&self, script: &str) -> Result<Output> {
        let chart = self.cluster.release.chart("ztunnel");
        let chart = format!("{} --values {}", chart.display(), self.folder.path().join("values").display());
        let mut shell = process::command("sh", ["-c", &script.replace("istio/ztunnel", &chart)]);
        let [helm, kubectl] = [tools::built("helm")?, tools::built("kubectl")?];
        let folders = [&helm, &kubectl].map(|program| program.parent().unwrap_or(Path::new("/")));
        let usual = std::env::var_os("PATH").unwrap_or_default();
        let path = folders.map(Path::to_owned).into_iter().chain(std::env::split_paths(&usual));
        shell.env("PATH", std::env::join_paths(path)?).env("HOME", self.folder.path());
        shell.env("KUBECONFIG", self.cluster.api.admin_kubeconfig());
        process::run(&mut shell, POD)
    }

    /// The pod of a DaemonSet of ztunnel, and its network namespace.
    fn ztunnel(&self, account: &str) -> Result<(Pod<'a>, Namespace)> {
        let pods = self.cluster.api.list("pods", NAMESPACE)?;
        let pod = pods.iter().find(|pod| pod["spec"]["serviceAccountName"] == account);
        let name = pod.and_then(|pod| pod["metadata"]["name"].as_str()).context("no such ztunnel")?;
        let pod = self.cluster.node.pod(NAMESPACE, name);
        let namespace = pod.namespace()?;
        Ok((pod, namespace))
    }
}

/// A pod with servers, by which the agent and ztunnel know it.
struct Shop<'a> {
    pod: Pod<'a>,
    uid: String,
    namespace: Namespace,
    addresses: [IpAddr; 2],
    servers: [TcpServer; 2],
}

impl<'a> Shop<'a> {
    fn start(node: &'a Node<'a>, name: &str) -> Result<Self> {
        let mut pod = plain_pod(name);
        pod["metadata"]["namespace"] = json!(SHOP);
        let pod = node.start_pod(&pod)?;
        pod.wait_running(POD)?;
        let object = pod.object()?.context("the pod is there")?;
        let uid = object["metadata"]["uid"].as_str().context("a UID")?.to_owned();
        let namespace = pod.namespace()?;
        let addresses = [pod.address(false)?, pod.address(true)?];
        let [v4, v6] = addresses.map(|address| TcpServer::start(&namespace, name, (address, STREAMS)));
        Ok(Self { uid, addresses, servers: [v4?, v6?], pod, namespace })
    }

    fn ensure_reaches(&self, other: &Self) -> Result<()> {
        for address in other.addresses {
            let answer = Client::new(&self.namespace).user(1000, 1000).tcp((address, STREAMS))?;
            ensure!(answer.server() == Some(other.pod.name()), "{answer:?}");
        }
        Ok(())
    }
}

fn wait_served(what: &str, home: &Namespace, pods: &[&Shop<'_>]) -> Result<()> {
    let uids: BTreeSet<_> = pods.iter().map(|pod| pod.uid.clone()).collect();
    until(what, POD, &[], || Ok((stock::served(home).ok().as_ref() == Some(&uids)).then_some(())))
        .with_context(|| format!("{:?}, not {uids:?}", stock::served(home)))
}

#[test]
#[ignore = "needs a ztunnel and a release of Istio: make mesh"]
fn streams_survive_the_label_and_the_exchange_of_ztunnel_by_two_daemon_sets() -> Result<()> {
    let release = Release::named()?;
    on_cluster(Redirection::Ambient, &release, |cluster| {
        let ambient = json!({"enabled": true, "ztunnelCanary": true, "keepConnections": "1h"});
        cluster.install_agent(&json!({"ambient": ambient}))?;
        let Cluster { api, node, .. } = cluster;
        let blocks = blocks_for("ambient")?;
        let [label, install, remove] = blocks.as_slice() else { bail!("{blocks:#?}") };
        let station = Station::new(cluster)?;
        station.run("set -e; helm install ztunnel istio/ztunnel -n istio-system; kubectl -n istio-system rollout status daemonset/ztunnel")?.ok()?;
        let (old, old_home) = station.ztunnel(ZTUNNELS[0])?;
        api.create_namespace(SHOP)?;
        let [web, db] = ["web", "db"].map(|name| Shop::start(node, name));
        let (web, db) = (web?, db?);

        let mut before = Streams::open(&web.namespace, db.addresses, STREAMS)?;
        typed(label, |script| station.run(script))?;
        wait_served("ztunnel to serve both", &old_home, &[&web, &db])?;
        let is_enabled = |name: &str| -> Result<bool> {
            let pod = api.get("pod", SHOP, name)?;
            Ok(pod["metadata"]["annotations"]["ambient.istio.io/redirection"] == "enabled")
        };
        until("both to be enrolled", POD, &[], || {
            Ok((is_enabled("web")? && is_enabled("db")?).then_some(()))
        })?;
        let at_enrolment = before.broken();
        drop(before);

        let mut streams = Streams::open(&web.namespace, db.addresses, STREAMS)?;
        typed(install, |script| station.run(script))?;
        let (_, new_home) = station.ztunnel(ZTUNNELS[1])?;
        ensure!(metric(node, "ztunnel_connected")? == Some(2.0), "not both are connected");
        let guest = Shop::start(node, "guest")?;
        wait_served("the canary to serve the new pod alone", &new_home, &[&guest])?;
        wait_served("the old one to serve the others", &old_home, &[&web, &db])?;
        guest.ensure_reaches(&db)?;
        web.ensure_reaches(&guest)?;
        let beside = streams.broken();

        typed(remove, |script| station.run(script))?;
        let removed = Instant::now();
        wait_served("the canary to serve all", &new_home, &[&web, &db, &guest])?;
        let mut broken = 0;
        while broken == 0 && removed.elapsed() < DRAINING {
            broken = streams.broken();
            web.ensure_reaches(&db)?;
        }
        let is_draining = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_string();
        ensure!(old.object()?.as_ref().is_some_and(is_draining), "the old ztunnel does not drain");
        drop(streams);
        [&web, &db, &guest].iter().flat_map(|pod| &pod.servers).for_each(TcpServer::hang_up);
        until("the old ztunnel to end with its last stream", POD, &[], || {
            Ok(old.object()?.is_none().then_some(()))
        })?;
        guest.ensure_reaches(&web)?;
        print(&format!(
            "Istio {}: of {} streams, {at_enrolment} were reset by the label, {beside} by the second DaemonSet, {broken} by the end of the first",
            release.version(),
            count()
        ));
        ensure!((at_enrolment, beside, broken) == (0, 0, 0), "streams were reset");
        Ok(())
    })
}
