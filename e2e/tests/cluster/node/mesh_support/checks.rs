//! What is tried on a mesh, one check after the other, and what each has to come to.

use std::fmt::Write;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use e2e::node::Pod;
use e2e::traffic::{Client, TcpServer};
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::{self, until};

use super::cluster::Cluster;
use super::pods::{App, HTTP, create_service, request, service_address, wait_ready};
use super::same_port::or_same_port;
use super::{APPS, TAGGED};
use crate::agent_support::{GATEWAY, POD};

/// The port of a protocol in which the server speaks first.
pub const SERVER_FIRST: u16 = 9000;
/// A port of the server that is excluded from capture.
const EXCLUDED: u16 = 9100;
/// A port that only a pod with `includeInboundPorts` leaves alone.
const NOT_INCLUDED: u16 = 9101;
/// A port to which the client's connections pass the proxy by.
const OUT_EXCLUDED: u16 = 9200;
/// An address that nothing has, of a service outside of the mesh.
const OUTSIDE: (Ipv4Addr, u16) = (Ipv4Addr::new(240, 1, 1, 1), 7000);
/// The port of merged metrics.
const MERGED_METRICS: u16 = 15020;
/// Where the client's proxy keeps its certificate.
const CERTIFICATE: &str = "/etc/istio/proxy";
/// A port of metrics behind mTLS, as release 1.31 has them.
const SECURE_METRICS: u16 = 15091;
/// What answers a scrape of the application's own metrics.
const METRICS: &str = "exec nc -ll -p 8080 -e /bin/sh -c 'while read -r line; do line=${line%?}; [ -n \"$line\" ] || break; done; \
                       printf \"HTTP/1.1 200 OK\\r\\nContent-Type: text/plain\\r\\nConnection: close\\r\\nContent-Length: 13\\r\\n\\r\\nshop_sales 7\\n\"'";

/// One check: what it is of, what it has to come to, and how it is made.
pub type Check = (&'static str, &'static str, fn(&Shop<'_>) -> Result<String>);

/// All checks, in the order of the table.
pub const CHECKS: [Check; 28] = [
    ("first init container", "as set, exit code 0", |shop| shop.first_init()),
    ("mTLS, REDIRECT", "200, client's certificate", |shop| shop.call("client", "server")),
    ("mTLS, to a TPROXY pod", "200, client's certificate", |shop| shop.call("client", "tproxy")),
    ("mTLS, from a TPROXY pod", "200, tproxy's certificate", |shop| shop.call("tproxy", "server")),
    ("mTLS, classic sidecars", "200, classic's certificate", |shop| shop.call("classic", "server")),
    ("mTLS, headless service", "200, client's certificate", |shop| shop.call_headless()),
    ("mTLS, by a revision tag", "200, tagged's certificate", |shop| shop.call("tagged", "server")),
    ("its own service", "200, server's certificate", |shop| shop.call("server", "server")),
    ("its own service, TPROXY", "200, tproxy's certificate", |shop| shop.call("tproxy", "tproxy")),
    ("its own loopback", "200, no proxy", |shop| shop.call_loopback()),
    ("plain text from outside", "reset", |shop| shop.call_from_outside("server", false)),
    ("the same, TPROXY", "reset", |shop| shop.call_from_outside("tproxy", false)),
    ("the same, classic sidecar", "reset", |shop| shop.call_from_outside("classic", false)),
    ("the same, IPv6 with dual stack", "reset", |shop| shop.call_from_outside("names", true)),
    ("server speaks first", "answered, from 127.0.0.6", |shop| shop.server_first("server")),
    ("the same, TPROXY", "answered, from client", |shop| shop.server_first("tproxy")),
    ("probes", "rewritten, ready", |shop| shop.probes()),
    ("first request, native sidecar", "answered through proxies", |shop| shop.first_request("early")),
    ("first request, held", "answered through proxies", |shop| shop.first_request("classic")),
    ("passthrough", "answered, PassthroughCluster", |shop| shop.passthrough()),
    ("ServiceEntry", "answered by its endpoint", |shop| shop.service_entry()),
    ("DNS capture", "the service's address", |shop| shop.dns()),
    ("excluded inbound port", "answered, no proxy", |shop| shop.plain_port("server", EXCLUDED)),
    ("port not included", "answered, no proxy", |shop| shop.plain_port("tproxy", NOT_INCLUDED)),
    ("excluded outbound port", "answered, no proxy", |shop| shop.excluded_outbound()),
    ("merged metrics", "the application's and the proxy's", |shop| shop.merged_metrics()),
    ("metrics behind mTLS", "captured, not scraped", |shop| shop.secure_metrics("metrics")),
    ("the same, port excluded", "not captured, scraped", |shop| shop.secure_metrics("scraped")),
];

/// The pods that the checks are made with.
pub struct Shop<'a> {
    cluster: &'a Cluster<'a>,
    pods: Vec<(&'static str, Pod<'a>, Namespace)>,
}

impl<'a> Shop<'a> {
    /// Starts them all and waits until they are ready.
    pub fn open(cluster: &'a Cluster<'a>) -> Result<Self> {
        let api = cluster.api;
        for name in ["server", "tproxy", "client", "classic"] {
            create_service(api, name, Some(SERVER_FIRST), false)?;
        }
        create_service(api, "server", None, true)?;
        create_service_entry(cluster)?;
        let server = App::new("server")
            .port(SERVER_FIRST)
            .annotated("traffic.sidecar.istio.io/excludeInboundPorts", &EXCLUDED.to_string());
        let mut shop = Self::empty(cluster);
        // Others call it as soon as they start.
        shop.start(&[("server", server)])?;
        // A proxy takes the end of what is sent for the end of the client.
        let call = format!(
            "{{ printf 'GET / HTTP/1.1\\r\\nHost: server.{APPS}\\r\\nConnection: close\\r\\n\\r\\n'; sleep 3; }} | nc -w 60 {} 80 2>&1; ",
            service_address(api, "server")?
        );
        let mirror = format!("exec nc -ll -p {HTTP} -e /bin/sh -c \"$MIRROR\"");
        let included = format!("{HTTP},{SERVER_FIRST}");
        let secure =
            format!("{{\"proxyMetadata\": {{\"ENVOY_SECURE_MERGED_METRICS_PORT\": \"{SECURE_METRICS}\"}}}}");
        let keeping_certificate = format!("{{\"proxyMetadata\": {{\"OUTPUT_CERTS\": \"{CERTIFICATE}\"}}}}");
        let names = r#"{"proxyMetadata": {"ISTIO_META_DNS_CAPTURE": "true", "ISTIO_DUAL_STACK": "true"}}"#;
        shop.start(&[
            (
                "client",
                App::new("client")
                    .annotated("proxy.istio.io/config", &keeping_certificate)
                    .annotated("traffic.sidecar.istio.io/excludeOutboundPorts", &OUT_EXCLUDED.to_string()),
            ),
            (
                "tproxy",
                App::new("tproxy")
                    .port(SERVER_FIRST)
                    .annotated("sidecar.istio.io/interceptionMode", "TPROXY")
                    .annotated("traffic.sidecar.istio.io/includeInboundPorts", &included),
            ),
            (
                "classic",
                App::new("classic")
                    .runs(&format!("{call}{mirror}"))
                    .annotated("sidecar.istio.io/nativeSidecar", "false")
                    .annotated("proxy.istio.io/config", r#"{"holdApplicationUntilProxyStarts": true}"#),
            ),
            ("tagged", App::new("tagged").within(TAGGED)),
            ("early", App::new("early").runs(&format!("{call}{mirror}"))),
            ("names", App::new("names").annotated("proxy.istio.io/config", names)),
            (
                "metrics",
                App::new("metrics")
                    .runs(METRICS)
                    .annotated("prometheus.io/scrape", "true")
                    .annotated("prometheus.io/port", "8080")
                    .annotated("proxy.istio.io/config", &secure),
            ),
            (
                "scraped",
                App::new("scraped")
                    .annotated("proxy.istio.io/config", &secure)
                    .annotated("traffic.sidecar.istio.io/excludeInboundPorts", &SECURE_METRICS.to_string()),
            ),
        ])?;
        Ok(shop)
    }

    fn start(&mut self, apps: &[(&'static str, App)]) -> Result<()> {
        let Cluster { api, node, istiod, .. } = self.cluster;
        let pods = apps.iter().map(|(name, app)| Ok((*name, app.start(api, node, &istiod.address)?)));
        pods.collect::<Result<Vec<_>>>()?.into_iter().try_for_each(|(name, pod)| self.add(name, pod))
    }

    /// One with no pods yet.
    pub const fn empty(cluster: &'a Cluster<'a>) -> Self {
        Self { cluster, pods: Vec::new() }
    }

    /// Adds a pod as soon as it is ready.
    pub fn add(&mut self, name: &'static str, pod: Pod<'a>) -> Result<()> {
        wait_ready(&pod)?;
        let namespace = pod.namespace()?;
        self.pods.push((name, pod, namespace));
        Ok(())
    }

    pub fn pod(&self, name: &str) -> Result<(&Pod<'a>, &Namespace)> {
        let found = self.pods.iter().find(|(of, ..)| *of == name);
        found.map(|(_, pod, namespace)| (pod, namespace)).with_context(|| format!("no pod {name}"))
    }

    /// The one that redirects the pod or looks whether it is: its image is the one that istiod's value says.
    pub fn first_init(&self) -> Result<String> {
        let Cluster { redirection, release, .. } = self.cluster;
        let wanted = redirection.first_image(release);
        for (name, pod, _) in &self.pods {
            let object = pod.object()?.context("the pod is there")?;
            let image = &object["spec"]["initContainers"][0]["image"];
            let end = &object["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"];
            if *image != *wanted || *end != 0 {
                return Ok(format!("{name}: {image}, exit code {end}"));
            }
        }
        Ok("as set, exit code 0".to_owned())
    }

    /// A request to a service: what came back, and whose certificate the server's proxy saw.
    pub fn call(&self, from: &str, to: &str) -> Result<String> {
        let (address, (_, inside)) = (service_address(self.cluster.api, to)?, self.pod(from)?);
        or_same_port(inside, || answer_of(&request(inside, &address, &format!("{to}.{APPS}"))?))
    }

    pub fn call_headless(&self) -> Result<String> {
        let address = format!("{}:{HTTP}", self.pod("server")?.0.address(false)?);
        let name = format!("server-headless.{APPS}:{HTTP}");
        answer_of(&request(self.pod("client")?.1, &address, &name)?)
    }

    fn call_loopback(&self) -> Result<String> {
        let answer = request(self.pod("server")?.1, &format!("127.0.0.1:{HTTP}"), "anybody")?;
        let through = if answer.stdout.contains("x-request-id") { "a proxy" } else { "no proxy" };
        Ok(format!("{}, {through}", status_of(&answer)))
    }

    /// Plain text, by who is not in the mesh.
    pub fn call_from_outside(&self, to: &str, v6: bool) -> Result<String> {
        let address = SocketAddr::new(self.pod(to)?.0.address(v6)?, HTTP);
        let answer = request(self.cluster.node.namespace(), &address.to_string(), &format!("{to}.{APPS}"))?;
        Ok(if answer.stderr.contains("reset by peer") { "reset".to_owned() } else { format!("{answer:?}") })
    }

    /// The application's side of a TCP service sends the first byte. Which address it sees depends on the mode.
    fn server_first(&self, to: &str) -> Result<String> {
        let (pod, inside) = self.pod(to)?;
        let _server = TcpServer::start(inside, "first", SocketAddr::new(pod.address(false)?, SERVER_FIRST))?;
        let (client, from) = self.pod("client")?;
        let service: IpAddr = service_address(self.cluster.api, to)?.parse()?;
        let peer = Client::new(from).tcp((service, SERVER_FIRST))?.report()?.peer.ip();
        let peer = if peer == client.address(false)? { "client".to_owned() } else { peer.to_string() };
        Ok(format!("answered, from {peer}"))
    }

    fn probes(&self) -> Result<String> {
        let object = self.pod("server")?.0.object()?.context("the pod is there")?;
        let probe = &object["spec"]["containers"][0]["readinessProbe"]["httpGet"];
        let rewritten = probe["port"] == MERGED_METRICS && probe["path"] == "/app-health/app/readyz";
        // It was waited for.
        Ok(if rewritten { "rewritten, ready".to_owned() } else { format!("{probe}") })
    }

    /// What the application got when it called before it did anything else.
    fn first_request(&self, name: &str) -> Result<String> {
        let log = self.pod(name)?.0.log("app")?;
        let seen = log.contains(&format!("URI=spiffe://cluster.local/ns/{APPS}/sa/{name}"));
        Ok(if seen { "answered through proxies".to_owned() } else { log })
    }

    fn passthrough(&self) -> Result<String> {
        let peer = TcpServer::start(self.cluster.node.namespace(), "beyond", (Ipv4Addr::UNSPECIFIED, 0))?;
        let target = SocketAddr::new(GATEWAY.parse()?, peer.address().port());
        self.followed_call(target)
    }

    fn excluded_outbound(&self) -> Result<String> {
        let _peer =
            TcpServer::start(self.cluster.node.namespace(), "beyond", (Ipv4Addr::UNSPECIFIED, OUT_EXCLUDED))?;
        self.followed_call(SocketAddr::new(GATEWAY.parse()?, OUT_EXCLUDED))
    }

    /// A connection from the client, and whether its proxy made it.
    fn followed_call(&self, target: SocketAddr) -> Result<String> {
        let from = self.pod("client")?.1;
        let report = Client::new(from).tcp(target)?.report()?;
        ensure!(report.server == "beyond", "{report:?}");
        let by = if passes_through(from, "PassthroughCluster", target)? {
            "PassthroughCluster"
        } else {
            "no proxy"
        };
        Ok(format!("answered, {by}"))
    }

    fn service_entry(&self) -> Result<String> {
        let port = self.cluster.endpoint_outside;
        let _peer =
            TcpServer::start(self.cluster.node.namespace(), "endpoint", (Ipv4Addr::UNSPECIFIED, port))?;
        let report = Client::new(self.pod("client")?.1).tcp(OUTSIDE)?.report()?;
        Ok(if report.server == "endpoint" {
            "answered by its endpoint".to_owned()
        } else {
            format!("{report:?}")
        })
    }

    fn dns(&self) -> Result<String> {
        let name = format!("server.{APPS}.svc.cluster.local");
        let answer = self.pod("names")?.0.try_exec("app", &["nslookup", &name])?;
        let address = service_address(self.cluster.api, "server")?;
        Ok(if answer.stdout.contains(&address) {
            "the service's address".to_owned()
        } else {
            format!("{answer:?}")
        })
    }

    /// A connection from outside, without TLS, to a port that the proxy does not get.
    fn plain_port(&self, to: &str, port: u16) -> Result<String> {
        let (pod, inside) = self.pod(to)?;
        let target = SocketAddr::new(pod.address(false)?, port);
        let _server = TcpServer::start(inside, "plain", target)?;
        let report = Client::new(self.cluster.node.namespace()).tcp(target)?.report()?;
        let is_direct = report.peer.ip() == GATEWAY.parse::<IpAddr>()?;
        Ok(if is_direct { "answered, no proxy".to_owned() } else { format!("{report:?}") })
    }

    fn merged_metrics(&self) -> Result<String> {
        let url =
            format!("http://{}:{MERGED_METRICS}/stats/prometheus", self.pod("metrics")?.0.address(false)?);
        let scrape = process::command("curl", ["--silent", "--show-error", "--max-time", "30", &url]);
        let answer = self.cluster.node.namespace().run(&scrape)?;
        let mut verdict = Vec::new();
        for (metric, whose) in [("shop_sales 7", "the application's"), ("envoy_", "the proxy's")] {
            if answer.stdout.contains(metric) {
                verdict.push(whose);
            }
        }
        Ok(verdict.join(" and "))
    }

    /// A scrape with the client's certificate. The static listener's port is in no exclusion: who calls it comes to the inbound port instead.
    fn secure_metrics(&self, of: &str) -> Result<String> {
        let (pod, inside) = self.pod(of)?;
        let target = SocketAddr::new(pod.address(false)?, SECURE_METRICS);
        let folder = tempfile::tempdir()?;
        for file in ["cert-chain.pem", "key.pem"] {
            let kept =
                self.pod("client")?.0.exec("istio-proxy", &["cat", &format!("{CERTIFICATE}/{file}")])?;
            fs::write(folder.path().join(file), kept.stdout)?;
        }
        let mut scrape = process::command("curl", ["--silent", "--insecure", "--max-time", "20"]);
        scrape.arg("--cert").arg(folder.path().join("cert-chain.pem"));
        scrape.arg("--key").arg(folder.path().join("key.pem"));
        let answer =
            self.cluster.node.namespace().run(scrape.arg(format!("https://{target}/stats/prometheus")))?;
        let captured = passes_through(inside, "InboundPassthroughCluster", target)?;
        let scraped = answer.stdout.contains("envoy_");
        let not = |is: bool| if is { "" } else { "not " };
        Ok(format!("{}captured, {}scraped", not(captured), not(scraped)))
    }
}

/// Whether a pod's proxy has passed on a connection to this address, of late, by one of the clusters that keep the original destination.
fn passes_through(pod: &Namespace, cluster: &str, target: SocketAddr) -> Result<bool> {
    let clusters = process::command(
        "curl",
        ["--silent", "--fail", "--max-time", "30", "http://127.0.0.1:15000/clusters"],
    );
    let host = format!("{cluster}::{target}::");
    Ok(pod.run(&clusters)?.ok()?.stdout.lines().any(|line| line.starts_with(&host)))
}

/// The status, and whose certificate is in the header that the server's proxy adds.
fn answer_of(answer: &process::Output) -> Result<String> {
    let mut verdict = status_of(answer);
    let seen = answer.stdout.split_once("URI=spiffe://cluster.local/ns/");
    let seen = seen.and_then(|(_, identity)| identity.split_once("/sa/"));
    let seen = seen.and_then(|(_, name)| name.split(|of: char| !of.is_alphanumeric()).next());
    match seen {
        Some(name) => write!(verdict, ", {name}'s certificate")?,
        None => write!(verdict, ", no certificate {}", answer.stderr.trim())?,
    }
    Ok(verdict)
}

fn status_of(answer: &process::Output) -> String {
    answer.stdout.rsplit("status=").next().unwrap_or_default().to_owned()
}

/// A service outside of the mesh, with an address of its own, which the node's gateway serves.
fn create_service_entry(cluster: &Cluster<'_>) -> Result<()> {
    let (address, port) = OUTSIDE;
    let endpoint = json!({"address": GATEWAY, "ports": {"tcp": cluster.endpoint_outside}});
    let entry: Value = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": {"name": "outside", "namespace": APPS},
        "spec": {
            "hosts": ["outside.example.com"], "addresses": [address], "location": "MESH_EXTERNAL", "resolution": "STATIC",
            "ports": [{"number": port, "name": "tcp", "protocol": "TCP"}], "endpoints": [endpoint],
        },
    });
    cluster.api.apply(&entry.to_string())
}

/// Waits for what the proxies are still to be told of: endpoints that were ready a moment ago.
pub fn wait_for_endpoints(shop: &Shop<'_>) -> Result<()> {
    for (from, to) in [
        ("client", "server"),
        ("client", "tproxy"),
        ("tproxy", "tproxy"),
        ("classic", "server"),
        ("server", "server"),
    ] {
        until(&format!("{from} to know the endpoints of {to}"), POD, &[], || {
            Ok(shop.call(from, to)?.starts_with("200").then_some(()))
        })?;
    }
    Ok(())
}
