//! Networks of other projects under the chain, on a real node: their daemons and CNI plugins, with the agent and the plugin.
//!
//! `make networks` runs this and prints the columns of docs/reference/compatibility.md. The folders FLANNEL and CILIUM hold the programs: no registry that the
//! tests use has them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use self::agent::Agent;
use self::checks::{SERVICE, THROUGH_ZTUNNEL, checks, verdicts};
use self::cilium::Cilium;
use self::flannel::Flannel;
use self::steps::{OURS, STEPS, Stage, Step};
use super::mesh_support::table::print;
use anyhow::{Context, Result, ensure};
use e2e::envoy::Interception;
use e2e::kube::ApiServer;
use e2e::node::{Node, PRIMARY_CONFLIST, Runtime};
use e2e::tools;
use test_support::process::{self, Background};
use test_support::project;

mod agent;
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
const TRANSLATED: [Exception; 4] = [
    Exception { check: "Envoy, to a service", error: "outbound to 10.96.0.77:80" },
    Exception { check: "outbound to a service", error: "original: Some(10.244." },
    Exception { check: "`redirectctl scan` finds no translation", error: "services-translated" },
    Exception { check: "to itself by its service", error: "hello-from-app" },
];

/// In TPROXY, a rule of Istio's plugin lets first packets of related connections bypass the proxy, and ours does not.
const OF_ISTIO: Exception = Exception { check: "pods are verified", error: "rules-differ" };

/// Every check and its verdicts.
type Column = Vec<(&'static str, Vec<Result<()>>)>;

/// All checks of a network, on a node where the agent was first, and these steps.
fn column<'n>(
    api: &'n ApiServer,
    node: &'n Node<'n>,
    agent: Agent,
    steps: &[Step],
    start: impl FnOnce() -> Result<Box<dyn Network + 'n>>,
) -> Result<Column> {
    fs::remove_file(node.conf_dir().join(PRIMARY_CONFLIST))?;
    let daemon_set = agent.install(api, node)?;
    let agents_pod = agent::start(api, node, &daemon_set, "istio-cni-node-one")?;
    let mut network = start()?;
    network.start()?;
    network.write_list()?;
    agent::wait_installed(node, &agents_pod)?;
    let checks = checks();
    let mut rows: Column = checks.iter().map(|(check, _)| (*check, Vec::new())).collect();
    for mode in Interception::ALL {
        for ((_, row), verdict) in rows.iter_mut().zip(verdicts(api, node, &*network, mode, &checks)?) {
            row.push(verdict);
        }
    }
    let mut stage = Stage { api, node, network: &mut *network, daemon_set: &daemon_set, agent: agents_pod };
    let steps = steps.iter().filter(|(step, _)| matches!(agent, Agent::Ours(_)) || !OURS.contains(step));
    rows.extend(steps.map(|(step, run)| (*step, vec![run(&mut stage)])));
    Ok(rows)
}

fn under_flannel(agent: Agent, exceptions: &[Exception]) -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    let column = column(&api, &node, agent, &STEPS, || Ok(Box::new(Flannel::new(&api, &node)?)))?;
    judge("flannel", agent, &column, exceptions)
}

#[test]
#[ignore = "needs flannel: make networks"]
fn flannels_pods_are_redirected() -> Result<()> {
    under_flannel(Agent::Ours("inline"), &[])
}

#[test]
#[ignore = "needs flannel and a release of Istio: make networks"]
fn flannels_pods_are_redirected_by_istios_plugin() -> Result<()> {
    under_flannel(Agent::Istios, &[])
}

/// Cilium, installed with these values of its chart and so that it allows plugins in its list.
fn under_cilium(
    title: &str,
    agent: Agent,
    values: &[&str],
    steps: &[Step],
    exceptions: &[Exception],
) -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    let values = [&["cni.exclusive=false"], values].concat();
    let column = column(&api, &node, agent, steps, || Ok(Box::new(Cilium::new(&api, &node, &values)?)))?;
    judge(title, agent, &column, exceptions)
}

#[test]
#[ignore = "needs Cilium: make networks"]
fn ciliums_pods_are_redirected() -> Result<()> {
    under_cilium("Cilium", Agent::Ours("inline"), &[], &STEPS, &[NO_HOST_PORT])
}

#[test]
#[ignore = "needs Cilium and a release of Istio: make networks"]
fn ciliums_pods_are_redirected_by_istios_plugin() -> Result<()> {
    under_cilium("Cilium", Agent::Istios, &[], &STEPS, &[NO_HOST_PORT])
}

fn under_replaced_kube_proxy(agent: Agent) -> Result<()> {
    under_cilium("kube-proxy replacement", agent, &["kubeProxyReplacement=true"], &[], &TRANSLATED)
}

#[test]
#[ignore = "needs Cilium: make networks"]
fn cilium_balances_in_pods_where_it_replaces_kube_proxy() -> Result<()> {
    under_replaced_kube_proxy(Agent::Ours("inline"))
}

#[test]
#[ignore = "needs Cilium and a release of Istio: make networks"]
fn cilium_balances_in_pods_of_istios_plugin_where_it_replaces_kube_proxy() -> Result<()> {
    under_replaced_kube_proxy(Agent::Istios)
}

fn under_host_routing(agent: Agent) -> Result<()> {
    let values = ["kubeProxyReplacement=true", "socketLB.hostNamespaceOnly=true", "bpf.masquerade=true"];
    under_cilium("eBPF host routing", agent, &values, &[], &[])
}

#[test]
#[ignore = "needs Cilium: make networks"]
fn cilium_forwards_past_the_nodes_rules() -> Result<()> {
    under_host_routing(Agent::Ours("inline"))
}

#[test]
#[ignore = "needs Cilium and a release of Istio: make networks"]
fn cilium_forwards_past_the_nodes_rules_with_istios_plugin() -> Result<()> {
    under_host_routing(Agent::Istios)
}

/// With the entry in its list, the agent says what is wrong; beside the list, nothing is.
#[test]
#[ignore = "needs Cilium and containerd 2: make networks"]
fn cilium_that_allows_no_other_plugin_leaves_the_entry_beside_its_list() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined_with(Runtime::Containerd2, &api)?;
    let start = || Ok(Box::new(Cilium::new(&api, &node, &["cni.exclusive=true"])?) as Box<dyn Network>);
    let agent = Agent::Ours("auto");
    judge("`cni.exclusive=true`", agent, &column(&api, &node, agent, &STEPS, start)?, &[NO_HOST_PORT])
}

/// Prints a network's column. An error lists what is not as the documents say; with UPDATE_DOCS=1 they are written instead of compared.
fn judge(title: &str, agent: Agent, column: &Column, exceptions: &[Exception]) -> Result<()> {
    let (mut table, mut wrong) = (format!("\n| check | {title}, {agent:?} |\n|---|---|\n"), String::new());
    let mut cells = BTreeMap::new();
    for (check, verdicts) in column {
        let errors: Vec<String> =
            verdicts.iter().filter_map(|verdict| Some(format!("{:#}", verdict.as_ref().err()?))).collect();
        let cell = if errors.is_empty() { "✓" } else { "no" };
        writeln!(table, "| {check} | {cell} |")?;
        cells.insert(*check, cell);
        let of_istio = (agent == Agent::Istios).then_some(&OF_ISTIO);
        let exception = exceptions.iter().chain(of_istio).find(|exception| exception.check == *check);
        let is_expected = |error: &String| exception.is_some_and(|exception| error.contains(exception.error));
        for error in errors.iter().filter(|error| !is_expected(error)) {
            writeln!(wrong, "{check}: {error}")?;
        }
        if exception.is_some() && errors.is_empty() {
            writeln!(wrong, "{check}: passes, and is listed as one that does not")?;
        }
    }
    print(&table);
    ensure!(wrong.is_empty(), "{wrong}");
    let path = project::file("docs/reference/compatibility.md");
    let page = fs::read_to_string(&path)?;
    let written = with_cells(&page, title, agent, &cells)?;
    if std::env::var_os("UPDATE_DOCS").is_some() {
        return Ok(fs::write(path, written)?);
    }
    ensure!(page == written, "docs/reference/compatibility.md says otherwise: UPDATE_DOCS=1 make networks");
    Ok(())
}

/// The page with these cells in the column of a network. A cell has two parts: ours, and that of Istio's plugin.
fn with_cells(page: &str, title: &str, agent: Agent, cells: &BTreeMap<&str, &str>) -> Result<String> {
    let columns = |row: &str| -> Vec<String> { row.split('|').map(|cell| cell.trim().to_owned()).collect() };
    let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
    let head = lines.iter().position(|line| line.starts_with("| check: ours, Istio's |"));
    let head = head.context("no table")?;
    let place = columns(&lines[head]).iter().position(|cell| cell == title);
    let place = place.with_context(|| format!("no column {title}"))?;
    let mut seen = 0;
    for line in lines[head + 2..].iter_mut().take_while(|line| line.starts_with('|')) {
        let mut row = columns(line);
        let check = row[1].clone();
        // Nothing is known of what could not be checked.
        if check == THROUGH_ZTUNNEL.0 && !cells.contains_key(&*check) {
            continue;
        }
        let verdict = cells.get(&*check).copied().unwrap_or("–");
        seen += usize::from(cells.contains_key(&*check));
        let mut parts: Vec<&str> = row[place].split_whitespace().collect();
        parts.resize(2, "–");
        parts[agent.place()] = verdict;
        row[place] = parts.join(" ");
        *line = row.join(" | ").trim().to_owned();
    }
    ensure!(seen == cells.len(), "the table has not all of {cells:?}");
    Ok(lines.join("\n") + "\n")
}
