//! A real mesh: pods that Istio's own injector wrote, redirected by our plugin, which speak mTLS through `pilot-agent` and Envoy; and the same under Istio's plugin.
//!
//! `make mesh` runs this. The folder ISTIO holds a release's programs and charts.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use super::mesh_support::checks::{SERVER_FIRST, Shop, wait_for_endpoints};
use super::mesh_support::cluster::{Cluster, on_cluster};
use super::mesh_support::load::{Verdicts, heard, talk, while_calling};
use super::mesh_support::pods::{App, create_service, service_address, wait_held_back, wait_ready};
use super::mesh_support::release::Release;
use super::mesh_support::restart::Restart;
use super::mesh_support::same_port::{SAME_PORT, or_same_port};
use super::mesh_support::table::{column, judge, print};
use super::mesh_support::{Redirection, helm_agent, import_images};
use crate::agent_support::{POD, wait_rolled_out};
use anyhow::{Context, Result, ensure};
use e2e::segments::Wire;
use e2e::traffic::{ANSWER, Stream, TcpServer};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, socket};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, POD_V4};
use test_support::process::until;

/// How often the rules of each pod are deleted.
const DELETIONS: usize = 10;
/// What a stream says: it is to be read on no wire.
const SECRET: &str = "nobody between the two proxies reads this";
/// What a call comes to that goes through both proxies.
const ANSWERED: &str = "200, client's certificate";
/// How long there is no istiod.
const WITHOUT_ISTIOD: Duration = Duration::from_secs(5);
/// At most one of so many calls is lost by chance.
const RARE: usize = 50;
/// How long no request may be lost any more once a proxy answers again.
const AFTER_A_RESTART: Duration = Duration::from_secs(5);
/// The key of the node's taint.
const TAINT: &str = "cni.istio.io/not-ready";

/// Waits until the client's calls to a service go through both proxies.
fn wait_answered(shop: &Shop<'_>, to: &str) -> Result<()> {
    until(&format!("mTLS to {to}"), POD, &[], || Ok((shop.call("client", to)? == ANSWERED).then_some(())))
}

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
                wait_answered(&shop, old)?;
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
            let mut stream = Stream::open(from, target.into(), ANSWER)?;
            let (mut said, mut broken) = (0, 0);
            let call = || shop.call("client", to);
            let outside = || shop.call_from_outside(to, false);
            let (_, verdicts) = while_calling(&[&call, &outside], || {
                for _ in 0..DELETIONS {
                    for pod in [inside, from] {
                        delete_and_wait_healed(pod)?;
                        // The kernel may stop to translate a connection as soon as the rules are deleted; its next segment then resets it.
                        if let Ok(lines) = talk(&mut stream, SECRET, Duration::from_millis(200)) {
                            said += lines;
                        } else {
                            broken += 1;
                            stream = Stream::open(from, target.into(), ANSWER)?;
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

#[test]
#[ignore = "needs a release of Istio: make mesh"]
fn an_init_image_by_its_name_is_ours_since_1_31_and_the_proxys_before() -> Result<()> {
    on_cluster(Redirection::InitByName, &Release::named()?, |cluster| {
        let Cluster { api, node, istiod, .. } = cluster;
        let mut shop = Shop::empty(cluster);
        for name in ["server", "client"] {
            create_service(api, name, None, false)?;
            shop.add(name, App::new(name).start(api, node, &istiod.address)?)?;
        }
        let first = shop.first_init()?;
        ensure!(first == "as set, exit code 0", "{first}");
        wait_answered(&shop, "server")?;
        ensure!(shop.call_from_outside("server", false)? == "reset", "plain text is answered");
        Ok(())
    })
}

#[test]
#[ignore = "needs a release of Istio: make mesh"]
fn pods_wait_for_a_node_that_is_freed_of_its_taint_and_then_speak_mtls() -> Result<()> {
    on_cluster(Redirection::OurPlugin, &Release::named()?, |cluster| {
        let Cluster { api, node, istiod, .. } = cluster;
        let taints =
            || Ok::<_, anyhow::Error>(api.get("node", "", node.name())?["spec"]["taints"].to_string());
        api.kubectl(&["taint", "node", node.name(), &format!("{TAINT}:NoSchedule")])?;
        let mut pods = Vec::new();
        for name in ["server", "client"] {
            create_service(api, name, None, false)?;
            pods.push((name, App::new(name).schedule(api, node, &istiod.address)?));
        }
        for (name, _) in &pods {
            let mut last = Value::Null;
            until(&format!("{name} to be kept off the node"), POD, &cluster.controllers.processes(), || {
                last = api.get("pod", super::mesh_support::APPS, name)?;
                let conditions = last["status"]["conditions"].as_array().cloned().unwrap_or_default();
                Ok(conditions.iter().any(|of| of["reason"] == "Unschedulable").then_some(()))
            })
            .with_context(|| format!("{last:#}"))?;
        }
        ensure!(taints()?.contains(TAINT), "{}", taints()?);
        helm_agent(
            "install",
            Redirection::OurPlugin,
            cluster.release,
            api,
            &json!({"nodeTaint": {"enabled": true}}),
        )?;
        wait_rolled_out(api, node, cluster.controllers)?;
        let mut shop = Shop::empty(cluster);
        for (name, pod) in pods {
            shop.add(name, pod)?;
        }
        ensure!(!taints()?.contains(TAINT), "{}", taints()?);
        let first = shop.first_init()?;
        ensure!(first == "as set, exit code 0", "{first}");
        wait_answered(&shop, "server")?;
        ensure!(shop.call_from_outside("server", false)? == "reset", "plain text is answered");
        Ok(())
    })
}

/// All came through both proxies, but for what TPROXY loses by chance: that is printed, and is rare.
fn ensure_none_lost(step: &str, verdicts: &[Verdicts]) -> Result<usize> {
    let mut count = 0;
    for verdicts in verdicts {
        let mut others = verdicts.clone();
        let by_chance = others.remove(SAME_PORT).unwrap_or_default();
        let all: usize = others.values().sum();
        ensure!(
            others.len() == 1
                && others.keys().all(|verdict| verdict.starts_with("200, "))
                && by_chance * RARE <= all,
            "{step}: {verdicts:#?}"
        );
        if by_chance > 0 {
            print(&format!("{step}: {SAME_PORT}: {by_chance} of {all}"));
        }
        count += all;
    }
    Ok(count)
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
                let outside = super::mesh_support::pods::request(
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

#[test]
#[ignore = "needs a release of Istio: make mesh"]
fn istiod_and_proxies_restart_under_load_and_nothing_goes_in_plain_text() -> Result<()> {
    let release = Release::named()?;
    // It looks at the pods and heals them meanwhile.
    let healing = json!({"driftWatch": {"interval": "2s", "heal": true}});
    let ours = restarts(Redirection::OurPlugin, &release, &healing)?;
    let theirs = restarts(Redirection::IstiosPlugin, &release, &json!({}))?;
    for ours in &ours {
        // Whether istiod has withdrawn an endpoint by the time of a request (503), or a connection to it waits, is chance: so a server's
        // proxy is compared with all of theirs.
        let same = theirs.iter().filter(|theirs| theirs.is_clients == ours.is_clients);
        let theirs: BTreeSet<&str> = same.flat_map(Restarted::kinds).collect();
        ensure!(ours.kinds().is_subset(&theirs), "{ours:?} beside {theirs:?}");
    }
    print(&format!("this plugin: {ours:#.1?}\nIstio's plugin: {theirs:#.1?}"));
    Ok(())
}

/// A proxy that was started again: what was lost, and how long it took.
#[derive(Debug)]
struct Restarted {
    #[expect(dead_code, reason = "printed")]
    step: String,
    is_clients: bool,
    #[expect(dead_code, reason = "printed")]
    ready: Duration,
    #[expect(dead_code, reason = "printed")]
    answered_once_ready: Duration,
    #[expect(dead_code, reason = "printed")]
    answered: usize,
    lost: Verdicts,
}

impl Restarted {
    /// The statuses of what was lost.
    fn kinds(&self) -> BTreeSet<&str> {
        self.lost.keys().filter_map(|verdict| verdict.split(',').next()).collect()
    }
}

/// Restarts istiod and proxies under one kind of redirection.
fn restarts(redirection: Redirection, release: &Release, agent: &Value) -> Result<Vec<Restarted>> {
    let restarts = on_cluster(redirection, release, |cluster| {
        cluster.install_agent(agent)?;
        let shop = Shop::open(cluster)?;
        wait_for_endpoints(&shop)?;
        restart_istiod(cluster, &shop)?;
        [
            ("server", Restart::Crash),
            ("tproxy", Restart::Crash),
            ("client", Restart::Crash),
            ("server", Restart::Quit),
        ]
        .into_iter()
        .map(|(of, how)| restart_proxy(&shop, of, how))
        .collect()
    });
    restarts.with_context(|| redirection.title())
}

/// istiod is gone for a while: nothing of what runs notices.
fn restart_istiod(cluster: &Cluster<'_>, shop: &Shop<'_>) -> Result<()> {
    let Cluster { api, node, istiod, .. } = cluster;
    let calls: [&(dyn Fn() -> Result<String> + Sync); 2] =
        [&|| shop.call("client", "server"), &|| shop.call("client", "tproxy")];
    let ((), verdicts) = while_calling(&calls, || {
        istiod.kill()?;
        thread::sleep(WITHOUT_ISTIOD);
        istiod.start_again(cluster.release, api)?;
        wait_ready(&App::new("later").start(api, node, &istiod.address)?)
    })?;
    let count = ensure_none_lost("istiod restarts", &verdicts)?;
    print(&format!("istiod killed, back after {WITHOUT_ISTIOD:?}: {count} requests, none lost"));
    Ok(())
}

/// A proxy ends and the kubelet starts it again: what it cannot serve meanwhile is lost, and not sent or answered past it.
fn restart_proxy(shop: &Shop<'_>, of: &str, how: Restart) -> Result<Restarted> {
    let to = if of == "client" { "server" } else { of };
    let call = || shop.call("client", to);
    let outside = || shop.call_from_outside(to, false);
    let ((ready, answered_once_ready), mut verdicts) = while_calling(&[&call, &outside], || {
        let begin = Instant::now();
        how.run(shop, of)?;
        let ready = begin.elapsed();
        wait_answered(shop, to)?;
        Ok((ready, begin.elapsed() - ready))
    })?;
    let step = format!("{of}'s proxy, {how:?}");
    ensure!(
        verdicts[0].keys().all(|verdict| !verdict.starts_with("200") || verdict == ANSWERED)
            && verdicts[1].keys().all(|verdict| !verdict.contains("status=200")),
        "{step}: {verdicts:#?}"
    );
    let ((), after) = while_calling(&[&call], || {
        thread::sleep(AFTER_A_RESTART);
        Ok(())
    })?;
    ensure_none_lost(&step, &after)?;
    let mut lost = verdicts.swap_remove(0);
    let answered = lost.remove(ANSWERED).unwrap_or_default();
    lost.remove(SAME_PORT);
    Ok(Restarted { step, is_clients: of == "client", ready, answered_once_ready, answered, lost })
}

#[test]
#[ignore = "needs two releases of Istio: make mesh"]
fn sidecars_are_upgraded_under_load_and_no_request_is_lost() -> Result<()> {
    let (old, new) = (Release::named()?, Release::next()?);
    let mut figures = format!("from {} to {}\n", old.version(), new.version());
    for redirection in [Redirection::OurPlugin, Redirection::IstiosPlugin] {
        let count = on_cluster(redirection, &old, |cluster| {
            let Cluster { api, node, istiod, .. } = cluster;
            import_images(node, &new)?;
            cluster.install_agent(&json!({}))?;
            let shop = Shop::open(cluster)?;
            wait_for_endpoints(&shop)?;
            let calls: [&(dyn Fn() -> Result<String> + Sync); 2] =
                [&|| shop.call("client", "server"), &|| shop.call("client", "tproxy")];
            let (pods, verdicts) = while_calling(&calls, || {
                istiod.upgrade(&new, api, &redirection.values())?;
                let tproxy = App::new("tproxy").annotated("sidecar.istio.io/interceptionMode", "TPROXY");
                let mut pods = Vec::new();
                for (of, name, app) in
                    [("server", "server-new", App::new("server")), ("tproxy", "tproxy-new", tproxy)]
                {
                    let pod = app.named(name).start(api, node, &istiod.address)?;
                    wait_ready(&pod)?;
                    shop.pod(of)?.0.delete(POD)?;
                    pods.push(pod);
                }
                Ok(pods)
            })?;
            let count = ensure_none_lost("sidecars of servers", &verdicts)?;
            for pod in &pods {
                let image = pod.object()?.context("the pod is there")?["spec"].to_string();
                ensure!(image.contains(&new.proxy_image()), "{}: {image}", pod.name());
            }
            // One that is new on both sides.
            let mut shop = Shop::empty(cluster);
            shop.add("client", App::new("client").named("client-new").start(api, node, &istiod.address)?)?;
            for to in ["server", "tproxy"] {
                wait_answered(&shop, to)?;
            }
            for pod in &pods {
                let address = format!("{}:8080", pod.address(false)?);
                let outside = super::mesh_support::pods::request(node.namespace(), &address, "x")?;
                ensure!(outside.stderr.contains("reset by peer"), "{} answers: {outside:?}", pod.name());
            }
            Ok(count)
        })
        .with_context(|| redirection.title())?;
        figures += &format!("{}: {count} requests, none lost, none in plain text\n", redirection.title());
    }
    print(&figures);
    Ok(())
}

/// A connection of a pod to itself, from this port of its address.
fn connection(pod: &Namespace, port: u16) -> Result<(TcpListener, TcpStream)> {
    pod.enter(|| {
        let listener = TcpListener::bind((POD_V4, 8080))?;
        let client = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(client.as_raw_fd(), &SockaddrStorage::from(SocketAddr::from((POD_V4, port))))?;
        connect(client.as_raw_fd(), &SockaddrStorage::from(listener.local_addr()?))?;
        Ok((listener, client.into()))
    })?
}

#[test]
fn a_call_that_fails_while_a_port_is_taken_twice_is_lost_by_chance() -> Result<()> {
    let [client, server] = [Namespace::pod(Families::V4)?, Namespace::pod(Families::V4)?];
    let _clients = connection(&client, 40_001)?;
    let call = |verdict: &str| {
        or_same_port(&client, || {
            thread::sleep(Duration::from_secs(4));
            Ok(verdict.to_owned())
        })
    };
    let other = connection(&server, 40_002)?;
    assert_eq!(call("000")?, "000");
    drop(other);
    let _same = connection(&server, 40_001)?;
    assert_eq!(call("000")?, SAME_PORT);
    assert_eq!(call("200")?, "200");
    Ok(())
}
