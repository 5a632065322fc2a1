//! Open streams, through what else resets them: a pod's enrolment, and the exchange of ztunnel.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::Signal;
use test_support::netns::Namespace;
use test_support::process::SHORT;

use super::super::label;
use super::traffic_between_pods::PATIENCE;
use super::{GRACE, Mesh, PORT, Planned, Running};
use e2e::pods::metric;
use e2e::traffic::Stream;
use e2e::ztunnel::stock::{Access, Stock};

/// How long a ztunnel may drain: longer than any test.
const LONG_GRACE: Duration = Duration::from_secs(600);

/// How many streams are open; `STREAMS` sets it.
pub fn count() -> usize {
    test_support::sample::number("STREAMS", 1000)
}

/// Streams from one pod to another, over both families in turn.
pub struct Streams(Vec<Stream>);

impl Streams {
    pub fn open(from: &Namespace, to: [IpAddr; 2], port: u16) -> Result<Self> {
        let open = |number: usize| Stream::connect(SocketAddr::new(to[number % 2], port), PATIENCE);
        Ok(Self(from.enter(|| (0..count()).map(open).collect::<io::Result<_>>())??))
    }

    fn between(from: &Running, to: &Running) -> Self {
        Self::open(&from.namespace, to.planned.addresses, PORT).expect("streams")
    }

    /// How many do not go on.
    pub fn broken(&mut self) -> usize {
        self.0.iter_mut().filter_map(|stream| stream.echo("still there?").err()).count()
    }
}

fn is_served(ztunnel: &Stock, pods: &[&Running]) -> bool {
    let uids: BTreeSet<_> = pods.iter().map(|pod| pod.uid.clone()).collect();
    ztunnel.served().is_ok_and(|served| served == uids)
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn streams_survive_enrolment_if_the_namespace_asks_for_it_under_native_rules() {
    enrolment_with_open_streams(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn streams_survive_enrolment_if_the_namespace_asks_for_it_under_rules_of_iptables() {
    enrolment_with_open_streams(false);
}

fn enrolment_with_open_streams(is_native: bool) {
    let mut mesh = Mesh::new(is_native);
    mesh.world.node.set("AMBIENT_KEEP_CONNECTIONS", "1h");
    let [web, db] = [Planned::web(), Planned::db()].map(|pod| mesh.running(pod));
    let ztunnel = mesh.ztunnel();
    label(&mesh.world, "-");
    let agent = mesh.world.start();
    let asks = |value: &str| {
        let label = format!("cni.istio.io/keepConnections{value}");
        mesh.world.api.kubectl(&["label", "namespace", "shop", &label, "--overwrite"]).expect("labels");
    };
    for (asked, expected) in [("=10m", 0), ("-", count())] {
        mesh.wait("no pod at ztunnel", || is_served(&ztunnel, &[]));
        mesh.world.wait_enrolled(0.0);
        let mut streams = Streams::between(&web, &db);
        asks(asked);
        label(&mesh.world, "=ambient");
        mesh.world.wait_enrolled(2.0);
        let broken = streams.broken();
        eprintln!("{asked}: {broken} of {} streams were reset when their pods were enrolled", count());
        assert_eq!(broken, expected, "{asked}");

        let since = mesh.accesses().len();
        let target = SocketAddr::new(db.planned.addresses[0], PORT);
        assert_eq!(web.client().tcp(target).expect("runs").server(), Some("db"));
        mesh.wait_access(since, "a new connection by HBONE", |access| {
            access.direction == "outbound" && access.target_identity == db.planned.identity()
        });
        label(&mesh.world, "-");
    }
    assert_eq!(agent.end(), Some(0));
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn streams_survive_the_exchange_of_a_stock_ztunnel_under_native_rules() {
    exchange_with_open_streams(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn streams_survive_the_exchange_of_a_stock_ztunnel_under_rules_of_iptables() {
    exchange_with_open_streams(false);
}

/// Both receive all pods; the old one drains.
fn exchange_with_open_streams(is_native: bool) {
    let mesh = Mesh::new(is_native);
    let pods = [Planned::web(), Planned::db()].map(|pod| mesh.running(pod));
    let [web, db] = &pods;
    let agent = mesh.world.start();
    let (old, mut streams) = old_with_streams(&mesh, web, db);
    let new = mesh.ztunnel();
    mesh.wait("the new ztunnel to serve", || is_served(&new, &[web, db]));

    // The next agent does not know which of them has which pod.
    assert_eq!(agent.end(), Some(0));
    let agent = mesh.world.start();
    mesh.wait("both to come back", || metric(&mesh.world.node, "ztunnel_connected") == Some(2.0));
    mesh.world.wait_enrolled(2.0);
    assert_eq!(streams.broken(), 0, "after a restart of the agent");
    drain(&mesh, &old, streams, web, db);
    mesh.world.wait_enrolled(2.0);
    assert_eq!(agent.end(), Some(0));
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn a_stock_ztunnel_as_canary_serves_new_pods_alone_under_native_rules() {
    canary_with_open_streams(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn a_stock_ztunnel_as_canary_serves_new_pods_alone_under_rules_of_iptables() {
    canary_with_open_streams(false);
}

fn canary_with_open_streams(is_native: bool) {
    let mut mesh = Mesh::new(is_native);
    mesh.world.node.set("AMBIENT_ZTUNNEL_CANARY", "true");
    let pods = [Planned::web(), Planned::db()].map(|pod| mesh.running(pod));
    let [web, db] = &pods;
    let agent = mesh.world.start();
    let (old, mut streams) = old_with_streams(&mesh, web, db);

    let new = mesh.ztunnel();
    mesh.wait("both to be connected", || metric(&mesh.world.node, "ztunnel_connected") == Some(2.0));
    let planned = Planned::guest(0);
    let (uid, namespace, texts) = (mesh.create(&planned), mesh.sandbox(&planned), planned.texts());
    let added = mesh.world.add(&planned.name, &[&texts[0], &texts[1]]);
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stdout));
    let guest = mesh.run(planned, uid, namespace);
    assert!(is_served(&old, &[web, db]) && is_served(&new, &[&guest]), "{:?}", new.served());
    for target in db.planned.addresses {
        let answer = guest.client().tcp((target, PORT)).expect("runs");
        assert_eq!(answer.server(), Some("db"), "from a pod of one to a pod of the other");
    }
    assert_eq!(streams.broken(), 0, "while two are connected");

    drain(&mesh, &old, streams, web, db);
    mesh.wait("the canary to serve all", || is_served(&new, &[web, db, &guest]));
    mesh.world.wait_enrolled(3.0);
    assert_eq!(agent.end(), Some(0));
}

/// A ztunnel that may drain for long, and streams between pods that it serves.
fn old_with_streams(mesh: &Mesh, web: &Running, db: &Running) -> (Stock, Streams) {
    let old = mesh.ztunnel_with(LONG_GRACE);
    mesh.wait("the old ztunnel to serve", || is_served(&old, &[web, db]));
    mesh.world.wait_enrolled(2.0);
    (old, Streams::between(web, db))
}

/// Ends the old ztunnel while streams are open, which it carries until they are closed, and connects through the other one.
fn drain(mesh: &Mesh, old: &Stock, mut streams: Streams, web: &Running, db: &Running) {
    let since = mesh.accesses().len();
    old.process().signal(Signal::SIGTERM).expect("a signal");
    let begin = Instant::now();
    let target = SocketAddr::new(db.planned.addresses[0], PORT);
    mesh.wait("new connections", || web.client().tcp(target).expect("runs").server() == Some("db"));
    eprintln!("a new connection was made within {:?} of the old ztunnel's end", begin.elapsed());
    // For longer than it drains by default.
    let mut broken = 0;
    while broken == 0 && begin.elapsed() < 2 * GRACE {
        broken = streams.broken();
    }
    eprintln!("{broken} of {} streams were reset", count());
    assert_eq!(broken, 0, "while the old one drains");
    assert!(old.process().ended().is_none(), "it carries the streams");
    let is_plain = |access: &Access| access.source_identity.is_empty() || access.target_identity.is_empty();
    assert_eq!(mesh.accesses()[since..].iter().find(|access| is_plain(access)), None);
    drop(streams);
    for server in &db.servers {
        server.hang_up();
    }
    old.process().wait(SHORT).expect("it ends with its last stream");
}
