//! A real Envoy as a sidecar: its configuration, and an instance in a network namespace.
//!
//! `scripts/setup-kube.sh envoy` fetches it.

use std::fs::{self, Permissions};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::iptables::mesh::{any, loopback, passthrough};
use crate::tools;
use crate::traffic::{ANSWER, PROXY_ID};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Background, until};

/// The name that its DNS listener knows, and its addresses: those of the service far away.
pub const KNOWN_NAME: &str = "shop.mesh.test";

const INBOUND: u16 = 15006;
const OUTBOUND: u16 = 15001;
const DNS: u16 = 15053;

/// How inbound connections come to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interception {
    /// Rewritten: it asks the kernel where they were going, and calls the application from an address of its own.
    Redirect,
    /// As they are: it calls the application in the client's name.
    Tproxy,
}

impl Interception {
    /// Both ways.
    pub const ALL: [Self; 2] = [Self::Redirect, Self::Tproxy];

    /// What a pod's annotation calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Redirect => "REDIRECT",
            Self::Tproxy => "TPROXY",
        }
    }
}

/// An Envoy that runs.
#[derive(Debug)]
pub struct Envoy {
    process: Background,
    _folder: TempDir,
}

impl Envoy {
    /// As the sidecar of a pod: both ports of a sidecar and a DNS listener, for these families. It runs as the proxy's user; with TPROXY as root with the proxy's
    /// group, because transparent sockets need a capability.
    ///
    /// # Errors
    /// It was not fetched, or ends at once.
    pub fn start(pod: &Namespace, families: Families, interception: Interception) -> Result<Self> {
        let folder = tempfile::Builder::new().permissions(Permissions::from_mode(0o755)).tempdir()?;
        let program = within_reach(&folder)?;
        let user = match interception {
            Interception::Redirect => PROXY_ID,
            Interception::Tproxy => 0,
        };
        let mut command =
            process::command("setpriv", [format!("--reuid={user}"), format!("--regid={PROXY_ID}")]);
        let mut configuration = bootstrap(families, interception);
        let listeners = configuration["static_resources"]["listeners"].as_array_mut().context("listeners")?;
        let tcp = listeners.len();
        listeners.extend(families.each().map(|v6| dns_listener(loopback(v6))));
        command.arg("--clear-groups").arg(program).arg("--config-yaml").arg(configuration.to_string());
        command.args(["--disable-hot-restart", "--concurrency", "1", "--log-level", "warn"]);
        let process = Background::start("Envoy", &pod.command(&command), &folder.path().join("log"))?;
        let envoy = Self { process: process.killed_on_drop(), _folder: folder };
        envoy.wait_listening(pod, tcp)?;
        Ok(envoy)
    }

    fn wait_listening(&self, pod: &Namespace, tcp: usize) -> Result<()> {
        let ports = format!("sport = :{INBOUND} or sport = :{OUTBOUND}");
        let listing = process::command("ss", ["-Hltn", &ports]);
        until("Envoy to listen", ANSWER, &[&self.process], || {
            Ok((pod.run(&listing)?.ok()?.stdout.lines().count() == tcp).then_some(()))
        })
    }

    /// How many connections to this address it has passed on that came in by a listener (`inbound`, `outbound`).
    pub fn passed(&self, listener: &str, to: SocketAddr) -> usize {
        let line = format!("TcpUpstreamConnected {}", logged(listener, to));
        self.process.log().lines().filter(|logged| *logged == line).count()
    }

    /// Waits until it has passed on exactly so many connections to this address.
    ///
    /// # Errors
    /// More arrive, or none.
    pub fn wait_passed(&self, listener: &str, to: SocketAddr, count: usize) -> Result<()> {
        let what = format!("Envoy to pass on {count} connections {}", logged(listener, to));
        until(&what, ANSWER, &[&self.process], || {
            let passed = self.passed(listener, to);
            anyhow::ensure!(passed <= count, "{passed}, and not {count}");
            Ok((passed == count).then_some(()))
        })
    }
}

/// What is logged of a connection, behind the moment.
pub fn logged(listener: &str, to: SocketAddr) -> String {
    format!("{listener} to {to}")
}

/// The program where every user may start it: a home is closed to others.
fn within_reach(folder: &TempDir) -> Result<PathBuf> {
    let (fetched, reachable) = (tools::built("envoy")?, folder.path().join("envoy"));
    fs::hard_link(&fetched, &reachable).or_else(|_| fs::copy(&fetched, &reachable).map(drop))?;
    Ok(reachable)
}

/// What a sidecar's Envoy starts with: both its ports, whence every connection goes on to where it was going. Each is logged, with that address, once that has accepted it and when it ends.
pub fn bootstrap(families: Families, interception: Interception) -> Value {
    let mut listeners = Vec::new();
    let mut clusters = Vec::new();
    for v6 in families.each() {
        let (any, family) = (any(v6), if v6 { "6" } else { "4" });
        listeners.push(listener("outbound", family, SocketAddr::new(any, OUTBOUND), json!({})));
        clusters.push(cluster(&format!("outbound{family}")));
        let mut inbound = cluster(&format!("inbound{family}"));
        let transparent = match interception {
            // The user by which the rules recognize the proxy's own connections to the application.
            Interception::Redirect => {
                let own = passthrough(v6);
                inbound["upstream_bind_config"] =
                    json!({"source_address": {"address": own, "port_value": 0}});
                json!({})
            }
            Interception::Tproxy => json!({"transparent": true}),
        };
        listeners.push(listener("inbound", family, SocketAddr::new(any, INBOUND), transparent));
        clusters.push(inbound);
    }
    json!({"static_resources": {"listeners": listeners, "clusters": clusters}})
}

fn socket_address(at: SocketAddr) -> Value {
    json!({"socket_address": {"address": at.ip(), "port_value": at.port()}})
}

fn cluster(name: &str) -> Value {
    json!({"name": name, "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "connect_timeout": "5s"})
}

/// A listener of this name for one family; `more` is added to it.
fn listener(name: &str, family: &str, at: SocketAddr, more: Value) -> Value {
    let filter = |name: &str, kind: &str, more: Value| {
        let mut config =
            json!({"@type": format!("type.googleapis.com/envoy.extensions.filters.listener.{kind}")});
        merge(&mut config, more);
        json!({"name": format!("envoy.filters.listener.{name}"), "typed_config": config})
    };
    let mut filters = vec![filter("original_dst", "original_dst.v3.OriginalDst", json!({}))];
    if more["transparent"] == true {
        filters.push(filter("original_src", "original_src.v3.OriginalSrc", json!({"mark": PROXY_ID})));
    }
    let mut listener = json!({
        "name": format!("{name}{family}"),
        "address": socket_address(at),
        "listener_filters": filters,
        "filter_chains": [{"filters": [{
            "name": "envoy.filters.network.tcp_proxy",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                "stat_prefix": name, "cluster": format!("{name}{family}"),
                "access_log_options": {"flush_access_log_on_connected": true},
                "access_log": [{
                    "name": "envoy.access_loggers.stdout",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
                        "log_format": {"text_format_source": {
                            "inline_string": format!("%ACCESS_LOG_TYPE% {name} to %DOWNSTREAM_LOCAL_ADDRESS%\n"),
                        }},
                    },
                }],
            },
        }]}],
    });
    merge(&mut listener, more);
    listener
}

/// A listener that answers queries by itself.
fn dns_listener(at: IpAddr) -> Value {
    let mut address = socket_address(SocketAddr::new(at, DNS));
    address["socket_address"]["protocol"] = json!("UDP");
    let addresses = json!([test_support::netns::REMOTE_V4, test_support::netns::REMOTE_V6]);
    json!({
        "name": format!("dns on {at}"),
        "address": address,
        "udp_listener_config": {},
        "listener_filters": [{
            "name": "envoy.filters.udp.dns_filter",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.udp.dns_filter.v3.DnsFilterConfig",
                "stat_prefix": "dns",
                "server_config": {"inline_dns_table": {"virtual_domains": [
                    {"name": KNOWN_NAME, "endpoint": {"address_list": {"address": addresses}}},
                ]}},
            },
        }],
    })
}

fn merge(object: &mut Value, more: Value) {
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
}
