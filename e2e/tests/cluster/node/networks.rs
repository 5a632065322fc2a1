//! Networks of other projects under the chain, on a real node: their daemons and CNI plugins, with the agent and the plugin.
//!
//! `make networks` runs this and prints the columns of docs/reference/compatibility.md. The folders FLANNEL and CILIUM hold the programs: no registry that the
//! tests use has them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use self::checks::{CHECKS, Mode, SERVICE, verdicts};
use self::cilium::Cilium;
use self::flannel::Flannel;
use self::steps::{STEPS, Stage, Step};
use super::mesh_support::table::print;
use crate::agent_support::{LOOPBACK, POD, agent_pod, apply_manifest, import_image, is_ready, wait_loaded};
use crate::chart_support::rendered_without_tests;
use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, PRIMARY_CONFLIST, Runtime};
use e2e::tools;
use serde_json::json;
use test_support::process::{self, Background};

mod checks;
mod cilium;
mod flannel;
mod steps;

/// A network of another project on a node.
trait Network {
    /// Its list, a file in the folder of configurations.
    fn list(&self) -> &'static str;
    /// Starts its daemon.
    fn start(&mut self) -> Result<()>;
    /// Kills its daemon.
    fn kill(&mut self) -> Result<()>;
    /// Writes its list again, as an upgrade does, whatever has become of it.
    fn write_list(&mut self) -> Result<()>;
    /// Whether pods start without the daemon.
    fn starts_pods_alone(&self) -> bool;
    /// Whether a service leads to this pod.
    fn serves(&self, pod: SocketAddr) -> Result<bool>;
}

/// What a cluster brings besides its network: kube-proxy.
pub fn start_kube_proxy(api: &ApiServer, node: &Node<'_>, pods: &str) -> Result<Background> {
    let mut command = process::command(tools::built("kube-proxy")?, ["--proxy-mode=iptables"]);
    command.arg(format!("--kubeconfig={}", api.admin_kubeconfig().display()));
    command.arg(format!("--hostname-override={}", node.name()));
    command.arg(format!("--cluster-cidr={pods}"));
    // Limits of connection tracking are the whole machine's.
    command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s"]);
    command.arg("--conntrack-tcp-timeout-close-wait=0s");
    let log = node.state_dir().join("kube-proxy.log");
    Ok(Background::start("kube-proxy", &node.command(&command), &log)?.killed_on_drop())
}

/// Whether kube-proxy has a rule that leads to a pod, and none any more that rejects its service for lack of pods: that is in another table, written later.
fn kube_proxy_serves(node: &Node<'_>, pod: SocketAddr) -> Result<bool> {
    let rules = node.run(&Command::new("iptables-save"))?.ok()?.stdout;
    Ok(rules.contains(&format!("--to-destination {pod}"))
        && !rules.contains(&format!("default/{SERVICE} has no endpoints")))
}

/// A check that fails on a network by what the network is.
struct Exception {
    check: &'static str,
    /// Part of the error.
    error: &'static str,
}

/// The plugin that maps ports of the node is not in Cilium's list, and kube-proxy does not know them.
const NO_HOST_PORT: Exception = Exception { check: "inbound by `hostPort`", error: "Refused" };

/// What the rules and the proxy see of a service is one of its pods.
const TRANSLATED: [Exception; 3] = [
    Exception { check: "outbound to a service", error: "original: Some(10.244." },
    Exception { check: "`redirectctl scan` finds no translation", error: "services-translated" },
    Exception { check: "to itself by its service", error: "hello-from-app" },
];

/// Every check and its verdicts.
type Column = Vec<(&'static str, Vec<Result<()>>)>;

/// All checks of a network, on a node where the agent was first, with ambient mode and its entry where `install` says.
fn column<'n>(
    api: &'n ApiServer,
    node: &'n Node<'n>,
    install: &str,
    steps: &[Step],
    start: impl FnOnce() -> Result<Box<dyn Network + 'n>>,
) -> Result<Column> {
    import_image(node)?;
    fs::remove_file(node.conf_dir().join(PRIMARY_CONFLIST))?;
    let daemon_set = apply_manifest(
        api,
        node,
        &rendered_without_tests(&json!({"install": install, "ambient": {"enabled": true}}))?,
    )?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, api, "istio-cni-node-one"))?;
    let mut network = start()?;
    network.start()?;
    network.write_list()?;
    // Beside a list of an older version, only a pod shows that the runtime reads the entry.
    wait_loaded(node)?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    let mut rows: Column = CHECKS.iter().map(|(check, _)| (*check, Vec::new())).collect();
    for mode in Mode::ALL {
        for ((_, row), verdict) in rows.iter_mut().zip(verdicts(api, node, &agent, &*network, mode)?) {
            row.push(verdict);
        }
    }
    let mut stage = Stage { api, node, network: &mut *network, agent: &agent };
    rows.extend(steps.iter().map(|(step, run)| (*step, vec![run(&mut stage)])));
    Ok(rows)
}

#[test]
#[ignore = "needs flannel: make networks"]
fn flannels_pods_are_redirected() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    let column = column(&api, &node, "inline", &STEPS, || Ok(Box::new(Flannel::new(&api, &node)?)))?;
    judge("flannel", &column, &[])
}

/// Cilium, installed with these values of its chart and so that it allows plugins in its list.
fn under_cilium(title: &str, values: &[&str], steps: &[Step], exceptions: &[Exception]) -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    let values = [&["cni.exclusive=false"], values].concat();
    let column = column(&api, &node, "inline", steps, || Ok(Box::new(Cilium::new(&api, &node, &values)?)))?;
    judge(title, &column, exceptions)
}

#[test]
#[ignore = "needs Cilium: make networks"]
fn ciliums_pods_are_redirected() -> Result<()> {
    under_cilium("Cilium", &[], &STEPS, &[NO_HOST_PORT])
}

#[test]
#[ignore = "needs Cilium: make networks"]
fn cilium_balances_in_pods_where_it_replaces_kube_proxy() -> Result<()> {
    under_cilium("kube-proxy replacement", &["kubeProxyReplacement=true"], &[], &TRANSLATED)
}

#[test]
#[ignore = "needs Cilium: make networks"]
fn cilium_forwards_past_the_nodes_rules() -> Result<()> {
    under_cilium(
        "eBPF host routing",
        &["kubeProxyReplacement=true", "socketLB.hostNamespaceOnly=true", "bpf.masquerade=true"],
        &[],
        &[],
    )
}

/// With the entry in its list, the agent says what is wrong; beside the list, nothing is.
#[test]
#[ignore = "needs Cilium and containerd 2: make networks"]
fn cilium_that_allows_no_other_plugin_leaves_the_entry_beside_its_list() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined_with(Runtime::Containerd2, &api)?;
    let start = || Ok(Box::new(Cilium::new(&api, &node, &["cni.exclusive=true"])?) as Box<dyn Network>);
    judge("`cni.exclusive=true`", &column(&api, &node, "auto", &STEPS, start)?, &[NO_HOST_PORT])
}

/// Prints a network's column. An error lists what is not as the documents say.
fn judge(title: &str, column: &Column, exceptions: &[Exception]) -> Result<()> {
    let (mut table, mut wrong) =
        (format!("\n| check, REDIRECT and TPROXY | {title} |\n|---|---|\n"), String::new());
    let mut cells = BTreeMap::new();
    for (check, verdicts) in column {
        let errors: Vec<String> =
            verdicts.iter().filter_map(|verdict| Some(format!("{:#}", verdict.as_ref().err()?))).collect();
        let cell = if errors.is_empty() { "✓" } else { "no" };
        writeln!(table, "| {check} | {cell} |")?;
        cells.insert((*check).to_owned(), cell.to_owned());
        let exception = exceptions.iter().find(|exception| exception.check == *check);
        let is_expected = |error: &String| exception.is_some_and(|exception| error.contains(exception.error));
        for error in errors.iter().filter(|error| !is_expected(error)) {
            writeln!(wrong, "{check}: {error}")?;
        }
        if exception.is_some() && errors.len() != verdicts.len() {
            writeln!(wrong, "{check}: passes, and is listed as one that does not")?;
        }
    }
    print(&table);
    ensure!(wrong.is_empty(), "{wrong}");
    let documented = documented(title)?;
    ensure!(documented == cells, "docs/reference/compatibility.md says of {title}: {documented:#?}");
    Ok(())
}

/// What the table of the documents says of a network: a cell for each check.
fn documented(title: &str) -> Result<BTreeMap<String, String>> {
    let page = include_str!("../../../../docs/reference/compatibility.md");
    let cells = |row: &str| -> Vec<String> { row.split('|').map(|cell| cell.trim().to_owned()).collect() };
    let mut rows = page.lines().skip_while(|line| !line.starts_with("| check, REDIRECT and TPROXY |"));
    let titles = cells(rows.next().context("no table")?);
    let place = titles.iter().position(|cell| cell == title).with_context(|| format!("no column {title}"))?;
    let rows = rows.skip(1).take_while(|line| line.starts_with('|')).map(cells);
    let rows = rows.filter(|row| row.get(place).is_some_and(|cell| !cell.is_empty()));
    rows.map(|row| Ok((row.get(1).context("a check")?.clone(), row.get(place).context("a cell")?.clone())))
        .collect()
}
