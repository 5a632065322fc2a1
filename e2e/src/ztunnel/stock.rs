//! A stock ztunnel in a network namespace of its own, under a real istiod, or without a control plane: then workloads come from a file, and certificates from
//! its own test authority.
//!
//! `make ztunnel` and `make mesh` name the program.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::http;
use crate::traffic::Relay;
use test_support::netns::{Families, Namespace};
use test_support::process::{Background, SHORT};

/// The variable that names the program.
const PROGRAM: &str = "ZTUNNEL";
/// Its node, and that of its workloads.
const NODE: &str = "node-1";
/// Where it answers administrators.
const ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 15000);

/// Whence a ztunnel has its workloads and certificates.
#[derive(Debug)]
pub enum Source {
    /// A file of workloads in its own format, as those of the node `node-1`; its own test authority.
    File(PathBuf),
    /// istiod.
    Istiod(UnderIstiod),
}

/// What connects a ztunnel with istiod.
#[derive(Debug)]
pub struct UnderIstiod {
    /// istiod's port of this machine's loopback. Its certificate is for `localhost`.
    pub port: u16,
    /// The mesh's authority.
    pub root: PathBuf,
    /// The token of ztunnel's pod.
    pub token: PathBuf,
    /// The pod's name.
    pub pod: String,
    /// The pod's node.
    pub node: String,
}

/// A ztunnel that runs.
#[derive(Debug)]
pub struct Stock {
    process: Background,
    home: Namespace,
    _istiod: Option<Relay>,
}

/// One end of a connection, as ztunnel's access log has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// `inbound` or `outbound`.
    pub direction: String,
    /// The client's address.
    pub source: String,
    /// The client's identity, if the connection was encrypted.
    pub source_identity: String,
    /// Where the connection goes on the wire.
    pub target: String,
    /// Where it goes inside a tunnel.
    pub tunnelled: String,
    /// The server's identity, if the connection was encrypted.
    pub target_identity: String,
    /// What went wrong.
    pub error: String,
}

impl Source {
    /// Sets the variables of a ztunnel, and lets it reach istiod from its namespace as long as the value lives.
    fn connect(&self, home: &Namespace, command: &mut Command) -> Result<Option<Relay>> {
        match self {
            Self::File(workloads) => {
                command.envs([("FAKE_CA", "true"), ("XDS_ADDRESS", ""), ("NODE_NAME", NODE)]);
                command.env("LOCAL_XDS_PATH", workloads);
                Ok(None)
            }
            Self::Istiod(UnderIstiod { port, root, token, pod, node }) => {
                let address = format!("https://localhost:{port}");
                command.env("CA_ADDRESS", &address).env("XDS_ADDRESS", address);
                command.env("CA_ROOT_CA", root).env("XDS_ROOT_CA", root).env("AUTH_TOKEN", token);
                command.env("NODE_NAME", node).env("POD_NAME", pod);
                command.env("POD_NAMESPACE", "istio-system").env("SERVICE_ACCOUNT", "ztunnel");
                Relay::start(home, *port).map(Some)
            }
        }
    }
}

impl Stock {
    /// Starts it for the agent at this socket. Its log goes to the end of a file. When it ends, it waits so long for open connections.
    ///
    /// # Errors
    /// No program is named, or it does not start.
    pub fn start(source: &Source, socket: &Path, log: &Path, grace: Duration) -> Result<Self> {
        let program = program()?;
        let home = Namespace::empty(Families::Dual)?;
        // Nothing answers there: what a pod learns, ztunnel knows itself.
        home.set_nameservers(&["192.0.2.53"])?;
        let mut command = Command::new(program);
        command.envs([("LOG_FORMAT", "json"), ("RUST_LOG", "info,access=debug")]);
        let istiod = source.connect(&home, &mut command)?;
        command
            .env("INPOD_UDS", socket)
            .env("CONNECTION_TERMINATION_DEADLINE", format!("{}s", grace.as_secs()));
        let process = Background::start("ztunnel", &home.command(&command), log)?.killed_on_drop();
        Ok(Self { process, home, _istiod: istiod })
    }

    /// Its process.
    pub fn process(&self) -> &Background {
        &self.process
    }

    /// The UIDs of the pods that it serves.
    ///
    /// # Errors
    /// It does not answer.
    pub fn served(&self) -> Result<BTreeSet<String>> {
        served(&self.home)
    }

    /// What it knows, as it says itself.
    ///
    /// # Errors
    /// It does not answer.
    pub fn config(&self) -> Result<Value> {
        config(&self.home)
    }

    /// Ends it as the kubelet does, and waits until its connections are drained.
    ///
    /// # Errors
    /// It does not end.
    pub fn end(self) -> Result<()> {
        self.process.signal(Signal::SIGTERM)?;
        self.process.wait(Duration::from_secs(60))?;
        Ok(())
    }
}

/// The ztunnel that is to be run.
///
/// # Errors
/// No program is named.
pub fn program() -> Result<OsString> {
    std::env::var_os(PROGRAM)
        .with_context(|| format!("{PROGRAM} is not set: run make ztunnel with the program"))
}

/// The UIDs of the pods that the ztunnel of this network namespace serves.
///
/// # Errors
/// It does not answer.
pub fn served(home: &Namespace) -> Result<BTreeSet<String>> {
    let dump = config(home)?;
    let states = dump["workloadState"].as_object().context("no states of workloads")?;
    Ok(states.iter().filter(|(_, pod)| pod["state"] == "Up").map(|(uid, _)| uid.clone()).collect())
}

/// What a ztunnel knows, as it says to its administrator.
fn config(home: &Namespace) -> Result<Value> {
    let (status, body) = home.enter(|| http::get(ADMIN, "/config_dump", SHORT))??;
    ensure!(status == 200, "{status}: {body}");
    Ok(serde_json::from_str(&body)?)
}

/// A line of the list `workloads` in ztunnel's own format: a pod that speaks HBONE, with its `services` and whatever else it has.
pub fn workload(namespace: &str, name: &str, account: &str, addresses: &[String], more: &str) -> String {
    format!(
        "- {{uid: Kubernetes//Pod/{namespace}/{name}, name: {name}, namespace: {namespace}, serviceAccount: {account}, trustDomain: cluster.local, workloadIps: {addresses:?}, protocol: HBONE, node: {NODE}, {more}}}\n"
    )
}

/// What ztunnel's log at this path has of connections that began, and of those that failed.
///
/// # Errors
/// The log cannot be read.
pub fn accesses(log: &Path) -> Result<Vec<Access>> {
    let text = fs::read_to_string(log)?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let counts = |line: &Value| {
        line["scope"] == "access" && (line["message"] == "connection opened" || line["error"].is_string())
    };
    Ok(lines.filter(counts).map(|line| Access::of(&line)).collect())
}

impl Access {
    fn of(line: &Value) -> Self {
        let text = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
        Self {
            direction: text("direction"),
            source: text("src.addr"),
            source_identity: text("src.identity"),
            target: text("dst.addr"),
            tunnelled: text("dst.hbone_addr"),
            target_identity: text("dst.identity"),
            error: text("error"),
        }
    }
}
