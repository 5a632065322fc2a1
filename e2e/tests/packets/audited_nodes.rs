//! What the example `audit` says of real nodes and pods by what iptables-save printed there, against what [`verify`] and connections say of a
//! namespace with their rules.

use crate::running::run_of;
use anyhow::{Context, Result, ensure};
use e2e::iptables::mesh::fix_neighbours;
use e2e::traffic::{Client, Outcome, TcpServer};
use netfilter_state::differences::Difference;
use netns_apply::{ApplyOptions, Mismatch, verify};
use redirect_core::{
    Families as PlanFamilies, Family, Redirect, RulePlan,
    options::{BackendChoice, Variant},
};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Output,
    time::Duration,
};
use test_support::project;
use test_support::{
    netns::{Families, Topology, pod_address, remote_address},
    saved_rules::SavedRules,
};

/// The ports of the pod to which the rules of meshes and of sshuttle lead.
const PROXIES: [u16; 3] = [4140, 12300, 15001];
/// Where the application connects to; Linkerd's rules leave the second alone.
const TARGETS: [u16; 2] = [443, 4567];
/// Nothing comes back where rules drop a packet.
const SILENCE: Duration = Duration::from_millis(700);

/// A pod with these rules, which reaches a server at each of the targets, and has one at each proxy's port.
struct Restored {
    topology: Topology,
    _servers: Vec<TcpServer>,
}

impl Restored {
    fn new(saved: &[SavedRules]) -> Result<Self> {
        let topology = Topology::new(Families::Dual)?;
        fix_neighbours(&topology)?;
        saved.iter().try_for_each(|rules| rules.restore(&topology.pod))?;
        // What Istio's program does besides.
        topology.pod.sh("ip -6 address add ::6/128 dev lo")?.ok()?;
        let mut servers = Vec::new();
        for any in [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()] {
            for port in PROXIES {
                servers.push(TcpServer::start(&topology.pod, &port.to_string(), (any, port))?);
            }
            for port in TARGETS {
                servers.push(TcpServer::start(&topology.client, "remote", (any, port))?);
            }
        }
        Ok(Self { topology, _servers: servers })
    }

    fn verify(&self, plan: &RulePlan, is_nft: bool) -> Result<Option<Mismatch>> {
        let variant = if is_nft { Variant::Nft } else { Variant::Legacy };
        let options = ApplyOptions::default().backend(BackendChoice::Restore(Some(variant)));
        Ok(self.topology.pod.enter(|| verify(plan, &options))??)
    }

    fn connect(&self, to: SocketAddr) -> Result<Outcome> {
        Client::new(&self.topology.pod).user(1000, 1000).patience(SILENCE).tcp(to)
    }
}

/// The rules of a family that are not as planned; of routing nothing.
fn rules_of(wanted: Family, mismatch: Option<&Mismatch>) -> Vec<String> {
    let Some(Mismatch::Different(all)) = mismatch else { return Vec::new() };
    let of_family = all.iter().filter_map(|one| match one {
        Difference::Rule { family, difference } if *family == wanted => Some(difference.to_string()),
        Difference::Rule { .. }
        | Difference::NoNativeTables
        | Difference::Native(_)
        | Difference::MissingRouting(_)
        | Difference::BrokenRouting(_) => None,
    });
    of_family.collect()
}

/// What an audit said.
struct Audit {
    differences: Vec<String>,
    end: String,
}

fn audit(text: &str, to: SocketAddr) -> Result<Audit> {
    let from = SocketAddr::new(pod_address(to.is_ipv6()), 40_000);
    let given = [to.to_string(), from.to_string(), "eth0".to_owned()];
    let Output { status, stdout, stderr } =
        run_of(&project::file("crates/packet-trace"), "audit", &given.each_ref().map(String::as_str), text);
    let (stdout, stderr) = (String::from_utf8(stdout)?, String::from_utf8(stderr)?);
    ensure!(stderr.is_empty(), "{stderr}");
    let differences: Vec<_> =
        stdout.lines().take_while(|line| !line.starts_with("TCP ")).map(str::to_owned).collect();
    ensure!(status.code() == Some(i32::from(!differences.is_empty())), "{status}: {stdout}");
    let end = stdout.lines().find_map(|line| line.strip_prefix("ends at: ")).context(stdout.clone())?;
    Ok(Audit { differences, end: end.to_owned() })
}

/// Whether a connection that ended so is one of which the audit says this; `None` where it says that it does not know.
fn agrees(end: &str, outcome: &Outcome) -> Option<bool> {
    if end.starts_with("unknown") {
        return None;
    }
    Some(match outcome {
        Outcome::Answered(report) if report.server == "remote" => end.starts_with("untouched"),
        Outcome::Answered(report) => end.contains(&format!("port {}", report.server)),
        Outcome::NoAnswer => end == "dropped",
        Outcome::Refused | Outcome::Unreachable(_) => end == "rejected",
        Outcome::Foreign(_) | Outcome::Reset => false,
    })
}

#[test]
fn what_is_audited_of_real_nodes_and_pods_is_what_the_kernel_does() -> Result<()> {
    let plan = Redirect::sidecar(PlanFamilies::Both).build()?.plan();
    let nodes = SavedRules::of_nodes()?;
    let (mut in_force, mut ends, mut unknown) = (Vec::new(), BTreeMap::new(), 0);
    for (name, saved) in &nodes {
        let restored = Restored::new(saved).with_context(|| name.clone())?;
        let mismatch = restored.verify(&plan, saved[0].is_nft).with_context(|| name.clone())?;
        for SavedRules { is_v6, text, .. } in saved {
            let family = if *is_v6 { Family::V6 } else { Family::V4 };
            for port in TARGETS {
                let to = SocketAddr::new(remote_address(*is_v6), port);
                let Audit { differences, end } = audit(text, to).with_context(|| name.clone())?;
                assert_eq!(differences, rules_of(family, mismatch.as_ref()), "{name}, {family}");
                let outcome = restored.connect(to)?;
                match agrees(&end, &outcome) {
                    Some(agrees) => assert!(agrees, "{name}, {to}: '{end}', but {outcome:?}"),
                    None => unknown += 1,
                }
                *ends.entry(end).or_insert(0) += 1;
            }
        }
        match mismatch {
            None => in_force.push(format!("{name}: in force")),
            Some(Mismatch::Interference(..)) => in_force.push(format!("{name}: in force, with interference")),
            Some(_) => {}
        }
    }
    assert!(nodes.len() >= 20, "{} nodes and pods", nodes.len());
    // In the form of Istio's CNI plugin; with TPROXY and DNS capture the rules are other ones. A published port or a service is translated before
    // the mesh's rules where both are in one namespace, which are other connections than those tried here.
    assert_eq!(
        in_force,
        [
            "docker-istio: in force, with interference",
            "istio: in force",
            "kube-proxy-istio: in force, with interference",
            "linkerd-istio: in force, with interference",
            "ufw-istio: in force, with interference"
        ]
    );
    assert!(ends.len() >= 5 && unknown <= 3, "{unknown} unknown of {ends:?}");
    Ok(())
}
