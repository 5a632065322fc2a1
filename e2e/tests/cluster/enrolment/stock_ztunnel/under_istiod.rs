//! Two nodes under a real istiod: its authority, workloads and policies, a stock ztunnel on each node, and the agents: both ours, or one of them Istio's.
//!
//! `make mesh` runs this where it is given a ztunnel.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;

use e2e::traffic::Client;
use e2e::ztunnel::stock::{Access, Source, Stock, UnderIstiod};
use serde_json::{Value, json};

use super::super::SYSTEM;
use super::istios_agent::{self, IstiosAgent};
use super::{GRACE, HBONE, Mesh, PORT, PROBES, Planned, Running};
use crate::node::mesh_support::istiod::Istiod;
use crate::node::mesh_support::release::Release;
use crate::node::mesh_support::{Redirection, require_mutual_tls};

/// Where a node has its end of the link to the other one.
const LINK: [[&str; 2]; 2] = [["172.31.0.1", "fd31::1"], ["172.31.0.2", "fd31::2"]];
/// Whose pods have which addresses.
const PODS: [[&str; 2]; 2] = [["10.1.0.0/24", "fd00::/120"], ["10.1.2.0/24", "fd00::200/120"]];
/// The second node's own addresses.
const SECOND: [&str; 2] = ["10.9.0.2", "fd09::2"];

/// Whoever the seller does not name may not talk to it; all but the buyer may talk to the keeper.
const POLICIES: &str = r#"
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: db, namespace: shop}
spec:
  selector: {matchLabels: {app: db}}
  action: ALLOW
  rules: [{from: [{source: {principals: [cluster.local/ns/shop/sa/buyer]}}]}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: vault, namespace: shop}
spec:
  selector: {matchLabels: {app: vault}}
  action: DENY
  rules: [{from: [{source: {principals: [cluster.local/ns/shop/sa/buyer]}}]}]
"#;
/// What ztunnel says of whom these refuse, and of plain text where mTLS is required.
const NOT_ALLOWED: &str = "allow policies exist, but none allowed";
const DENIED: &str = "explicitly denied by: shop/vault";
const PLAIN_TEXT: &str = "explicitly denied by: istio-system/istio_converted_static_strict";

/// A pod and its node.
type On<'a> = (&'a Mesh, &'a Running);

#[test]
#[ignore = "needs a ztunnel and a release of Istio: make mesh"]
fn pods_of_two_nodes_under_istiod_know_and_refuse_each_other_under_native_rules() {
    pods_know_and_refuse_each_other(true, false);
}

#[test]
#[ignore = "needs a ztunnel and a release of Istio: make mesh"]
fn pods_of_two_nodes_under_istiod_know_and_refuse_each_other_under_rules_of_iptables() {
    pods_know_and_refuse_each_other(false, false);
}

#[test]
#[ignore = "needs a ztunnel and a release of Istio: make mesh"]
fn a_node_with_istios_agent_and_one_with_ours_are_one_mesh_under_native_rules() {
    pods_know_and_refuse_each_other(true, true);
}

#[test]
#[ignore = "needs a ztunnel and a release of Istio: make mesh"]
fn a_node_with_istios_agent_and_one_with_ours_are_one_mesh_under_rules_of_iptables() {
    pods_know_and_refuse_each_other(false, true);
}

/// The second node has our agent, too, or Istio's.
fn pods_know_and_refuse_each_other(is_native: bool, is_istios: bool) {
    let first = Mesh::new(is_native);
    let own = SECOND.map(|address| address.parse().expect("an address"));
    let second = Mesh::on(first.world.beside("node-2"), is_native, own);
    link([&first, &second]);
    let api = &first.world.api;
    let release = Release::named().expect("a release");
    let istiod = Istiod::start(&release, api, &Redirection::Ambient.values()).expect("istiod");
    require_mutual_tls(api).expect("a policy");
    api.apply(POLICIES).expect("policies");
    api.create_service_account(SYSTEM, "ztunnel").expect("an account");

    let [web, guest] = [Planned::web(), Planned::new("guest", "guest", 6)].map(|pod| first.running(pod));
    let [db, vault] = [Planned::new("db", "seller", 0x203), Planned::new("vault", "keeper", 0x204)]
        .map(|pod| second.running(pod));
    let outsider = first.sandbox(&Planned::new("outsider", "none", 9));
    let ztunnels = [&first, &second].map(|mesh| ztunnel(mesh, &istiod));
    let _first = first.world.start();
    let _ours = (!is_istios).then(|| second.world.start());
    let _istios = is_istios.then(|| {
        api.apply(&istios_agent::RIGHTS.replace("node-1", "node-2")).expect("rights");
        IstiosAgent::start(&second.world, is_native)
    });
    for (mesh, ztunnel) in [&first, &second].into_iter().zip(&ztunnels) {
        mesh.wait("istiod to tell of pods and policies", || {
            let config = ztunnel.config().expect("answers");
            let names = |list: &str, is_it: fn(&Value) -> bool| -> BTreeSet<String> {
                let of_list = config[list].as_array().into_iter().flatten().filter(|one| is_it(one));
                of_list.filter_map(|one| one["name"].as_str().map(str::to_owned)).collect()
            };
            names("workloads", |workload| workload["protocol"] == "HBONE")
                == names_of(["web", "guest", "db", "vault"])
                && names("policies", |_| true).is_superset(&names_of(["db", "vault"]))
        });
    }

    let [web, guest] = [&web, &guest].map(|pod| (&first, pod));
    let [db, vault] = [&db, &vault].map(|pod| (&second, pod));
    call(web, db, None);
    call(guest, db, Some(NOT_ALLOWED));
    call(guest, vault, None);
    call(web, vault, Some(DENIED));
    for from in [db, vault] {
        call(from, web, None);
    }
    for (family, target) in db.1.planned.addresses.into_iter().enumerate() {
        let since = second.accesses().len();
        let refused = Client::new(&outsider).tcp((target, PORT)).expect("runs");
        assert_eq!(refused.server(), None, "{refused:?}");
        second.wait_access(since, "plain text that was refused", |access| {
            access.source_identity.is_empty() && access.error.contains(PLAIN_TEXT)
        });
        for (mesh, pod) in [web, db] {
            let target = (pod.planned.addresses[family], PORT);
            let probe = Client::new(&mesh.world.host).tcp(target).expect("runs").report().expect("an answer");
            assert_eq!(probe.peer.ip(), PROBES[family], "a probe of {target:?}");
        }
    }
}

/// Links two nodes, which then forward to each other's pods.
fn link(meshes: [&Mesh; 2]) {
    let hosts = meshes.map(|mesh| &mesh.world.host);
    let pair = format!("link add between type veth peer name between netns {}\n", hosts[1].name());
    hosts[0].ip_batch(&pair).expect("a link");
    for (number, host) in hosts.into_iter().enumerate() {
        let ([own, own6], [other, other6]) = (LINK[number], LINK[1 - number]);
        let [pods, pods6] = PODS[1 - number];
        let lines = format!(
            "link set between up\naddr add {own}/30 dev between\naddr add {own6}/64 dev between nodad\n\
             route add {pods} via {other}\nroute add {pods6} via {other6}\n"
        );
        host.ip_batch(&lines).expect("routes");
    }
}

/// A node's ztunnel, with what the kubelet gives its pod.
fn ztunnel(mesh: &Mesh, istiod: &Istiod) -> Stock {
    let (api, node) = (&mesh.world.api, &mesh.world.node_name);
    let pod = format!("ztunnel-{node}");
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "namespace": SYSTEM},
        "spec": {"nodeName": node, "serviceAccountName": "ztunnel", "automountServiceAccountToken": false,
            "containers": [{"name": "istio-proxy", "image": "ztunnel"}]}});
    api.create(&object).expect("a pod");
    let [root, token] = ["mesh-root.pem", "ztunnel-token"].map(|name| mesh.world.node.path(name));
    let certificate = istiod.root_certificate(api).expect("the mesh's authority");
    fs::write(&root, certificate).expect("writes");
    fs::write(&token, api.pod_token(SYSTEM, &pod, "ztunnel", "istio-ca").expect("a token")).expect("writes");
    let source = Source::Istiod(UnderIstiod { port: istiod.port(), root, token, pod, node: node.clone() });
    Stock::start(&source, &mesh.world.socket(), &mesh.log(), GRACE).expect("a ztunnel")
}

/// Calls a pod of the other node over both families. Both ztunnels know both pods by their certificates; the server's one allows the call or says this.
fn call((from_mesh, from): On<'_>, (to_mesh, to): On<'_>, refusal: Option<&str>) {
    for target in to.planned.addresses {
        let [here, there] = [from_mesh, to_mesh].map(|mesh| mesh.accesses().len());
        let answer = from.client().tcp((target, PORT)).expect("runs");
        let wanted = refusal.is_none().then_some(to.planned.name.as_str());
        assert_eq!(answer.server(), wanted, "from {} to {}: {answer:?}", from.planned.name, to.planned.name);
        let is_between = |access: &Access, direction: &str| {
            access.direction == direction
                && access.source_identity == from.planned.identity()
                && access.target_identity == to.planned.identity()
                && access.error.is_empty() == refusal.is_none()
        };
        from_mesh.wait_access(here, "the client's end", |access| {
            is_between(access, "outbound") && access.target == SocketAddr::new(target, HBONE).to_string()
        });
        to_mesh.wait_access(there, "the server's end", |access| {
            is_between(access, "inbound") && access.error.contains(refusal.unwrap_or_default())
        });
    }
}

fn names_of<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}
