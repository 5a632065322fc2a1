//! A real mesh: pods that Istio's own injector wrote, redirected by our plugin, which speak mTLS through `pilot-agent` and Envoy; and the same under Istio's plugin.
//!
//! `make mesh` runs this. The folder ISTIO holds a release's programs and charts.

mod agent_support;
mod chart_support;
mod mesh_support;

use std::time::Duration;

use agent_support::{POD, wait_rolled_out};
use anyhow::{Context, Result, ensure};
use e2e::netns::Namespace;
use e2e::process::until;
use e2e::segments::Wire;
use e2e::traffic::TcpServer;
use mesh_support::checks::{SERVER_FIRST, Shop, wait_for_endpoints};
use mesh_support::cluster::{Cluster, on_cluster};
use mesh_support::load::{Stream, Verdicts, heard, while_calling};
use mesh_support::pods::{App, create_service, service_address, wait_held_back, wait_ready};
use mesh_support::release::Release;
use mesh_support::table::{column, judge, print};
use mesh_support::{Redirection, helm_agent};
use serde_json::json;

/// How often the rules of each pod are deleted.
const DELETIONS: usize = 10;
/// What a stream says: it is to be read on no wire.
const SECRET: &str = "nobody between the two proxies reads this";
/// What a call comes to that goes through both proxies.
const ANSWERED: &str = "200, client's certificate";

#[test]
#[ignore = "needs a release of Istio: make mesh"]
fn every_check_comes_to_the_same_whoever_redirects() -> Result<()> {
    let release = Release::named()?;
    let columns = Redirection::ALL.map(|redirection| Ok((redirection, column(redirection, &release)?)));
    judge(&release, &columns.into_iter().collect::<Result<Vec<_>>>()?)
}

#[test]
#[ignore = "needs a release of Istio: make mesh"]
fn pods_older_than_the_agent_are_held_back_repaired_in_place_and_speak_mtls() -> Result<()> {
    for redirection in [Redirection::OurPlugin, Redirection::IstiosPlugin] {
        on_cluster(redirection, &Release::named()?, |cluster| {
            let Cluster { api, node, istiod, .. } = cluster;
            let pods = [
                App::new("old"),
                App::new("old-tproxy").annotated("sidecar.istio.io/interceptionMode", "TPROXY"),
            ];
            let pods = pods.map(|app| app.start(api, node, &istiod.address));
            let pods = pods.into_iter().collect::<Result<Vec<_>>>()?;
            for pod in &pods {
                wait_held_back(pod)?;
            }
            // Either one's validation is content with what our agent makes of the pods.
            helm_agent("install", Redirection::OurPlugin, cluster.release, api, &json!({}))?;
            wait_rolled_out(api, node, cluster.controllers)?;
            for pod in &pods {
                wait_ready(pod)?;
            }
            let shop = Shop::open(cluster)?;
            wait_for_endpoints(&shop)?;
            for old in ["old", "old-tproxy"] {
                create_service(api, old, None, false)?;
                until(&format!("mTLS to {old}"), POD, &[], || {
                    Ok((shop.call("client", old)? == ANSWERED).then_some(()))
                })?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Deletes what redirects a pod and waits until it is there again.
fn delete_and_wait_healed(pod: &Namespace) -> Result<()> {
    let before = pod.state()?;
    pod.sh("for family in iptables ip6tables; do for table in nat mangle; do $family-nft -t $table -F; done; done")?.ok()?;
    until("the pod to be healed", POD, &[], || Ok((pod.state()? == before).then_some(())))
}

#[test]
#[ignore = "needs a release of Istio: make mesh"]
fn deleted_rules_heal_under_mtls_and_no_stream_is_read_on_the_wire() -> Result<()> {
    on_cluster(Redirection::OurPlugin, &Release::named()?, |cluster| {
        cluster.install_agent(&json!({"driftWatch": {"interval": "2s", "heal": true}}))?;
        let shop = Shop::open(cluster)?;
        wait_for_endpoints(&shop)?;
        let wire = Wire::open(cluster.node.namespace(), false)?;
        let mut results = Vec::new();
        for to in ["server", "tproxy"] {
            let (pod, inside) = shop.pod(to)?;
            let _server = TcpServer::start(inside, "echo", (pod.address(false)?, SERVER_FIRST))?;
            let target = (service_address(cluster.api, to)?.parse::<std::net::IpAddr>()?, SERVER_FIRST);
            let from = shop.pod("client")?.1;
            let mut stream = Stream::open(from, target.into(), SECRET)?;
            let (mut said, mut broken) = (0, 0);
            let call = || shop.call("client", to);
            let outside = || shop.call_from_outside(to, false);
            let (_, verdicts) = while_calling(&[&call, &outside], || {
                for _ in 0..DELETIONS {
                    for pod in [inside, from] {
                        delete_and_wait_healed(pod)?;
                        // The kernel may stop to translate a connection as soon as the rules are deleted; its next segment then resets it.
                        if let Ok(lines) = stream.talk(Duration::from_millis(200)) {
                            said += lines;
                        } else {
                            broken += 1;
                            stream = Stream::open(from, target.into(), SECRET)?;
                        }
                    }
                }
                Ok(())
            })?;
            ensure!(said > 0, "no stream to {to} outlived a deletion");
            ensure!(shop.call("client", to)? == ANSWERED && outside()? == "reset", "{to} is not healed");
            ensure!(
                verdicts[0].keys().all(|verdict| !verdict.starts_with("200") || verdict == ANSWERED),
                "{verdicts:#?}"
            );
            // Healing closes what bypassed the proxy, and nothing of the proxy itself.
            let proxy = pod.log("istio-proxy")?;
            ensure!(!proxy.contains("software caused connection abort"), "{proxy}");
            let plain = heard(&wire, SECRET)?;
            // In TPROXY mode the application answers the client's own address, which nothing but the rules brings back to the proxy.
            ensure!(
                plain == 0 || to == "tproxy",
                "{plain} segments of the stream to {to} are read on the wire"
            );
            results.push(format!(
                "{to}: {said} lines of streams arrived, {plain} segments in plain text, {broken} streams broken; \
                 calls meanwhile {:?}, from outside {:?}",
                verdicts[0], verdicts[1]
            ));
        }
        print(&format!("{} deletions\n{}", 4 * DELETIONS, results.join("\n")));
        Ok(())
    })
}

/// All came through both proxies.
fn ensure_none_lost(step: &str, verdicts: &[Verdicts]) -> Result<usize> {
    ensure!(
        verdicts.iter().all(
            |verdicts| verdicts.len() == 1 && verdicts.keys().all(|verdict| verdict.starts_with("200, "))
        ),
        "{step}: {verdicts:#?}"
    );
    Ok(verdicts.iter().flat_map(Verdicts::values).sum())
}

#[test]
#[ignore = "needs a release of Istio: make mesh"]
fn agents_are_exchanged_under_load_and_no_request_is_lost() -> Result<()> {
    let release = Release::named()?;
    on_cluster(Redirection::IstiosPlugin, &release, |cluster| {
        cluster.install_agent(&json!({}))?;
        let Cluster { api, node, istiod, controllers, .. } = cluster;
        let shop = Shop::open(cluster)?;
        wait_for_endpoints(&shop)?;
        let calls: [&(dyn Fn() -> Result<String> + Sync); 3] =
            [&|| shop.call("client", "server"), &|| shop.call("client", "tproxy"), &|| {
                shop.call("tproxy", "server")
            }];
        let mut figures = String::new();
        let steps = [
            ("to this agent", Redirection::OurPlugin),
            ("back", Redirection::IstiosPlugin),
            ("to this agent again", Redirection::OurPlugin),
        ];
        for (number, (step, agent)) in steps.into_iter().enumerate() {
            let (pods, verdicts) = while_calling(&calls, || {
                helm_agent("upgrade", agent, &release, api, &json!({}))?;
                // One starts in the middle of it, one when it is over.
                let pods = ["during", "after"].map(|when| format!("{when}-{number}"));
                let during = App::new(&pods[0]).start(api, node, &istiod.address)?;
                wait_rolled_out(api, node, controllers)?;
                let after = App::new(&pods[1]).start(api, node, &istiod.address)?;
                wait_ready(&during).and_then(|()| wait_ready(&after))?;
                Ok([during, after])
            })?;
            let count = ensure_none_lost(step, &verdicts)?;
            for pod in pods {
                let outside = mesh_support::pods::request(
                    node.namespace(),
                    &format!("{}:8080", pod.address(false)?),
                    "x",
                )?;
                ensure!(
                    outside.stderr.contains("reset by peer"),
                    "{step}: {} answers plain text: {outside:?}",
                    pod.name()
                );
            }
            figures += &format!("{step}: {count} requests, none lost, none in plain text\n");
        }
        print(&figures);
        Ok(())
    })
    .context("the agents are exchanged")
}
