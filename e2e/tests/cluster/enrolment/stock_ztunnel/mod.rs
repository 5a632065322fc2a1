//! The same with a stock ztunnel, and packets between pods. `make ztunnel` runs it.

#![allow(clippy::print_stderr, reason = "figures")]

mod dns;
mod istios_agent;
mod killed;
pub mod open_streams;
mod traffic_between_pods;
mod under_istiod;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use e2e::traffic::{Client, Stream, TcpServer};
use e2e::ztunnel::stock::{Access, Source, Stock, accesses, workload};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::parallel::StopOnDrop;
use test_support::process::Background;

use super::World;
use e2e::agent::Agent;
use e2e::pods::metric;
use istios_agent::IstiosAgent;
use traffic_between_pods::{PATIENCE, Traffic};

/// The port of applications.
const PORT: u16 = 8080;
/// Where ztunnels of other pods are reached.
const HBONE: u16 = 15008;
/// The most that a pod may wait for ztunnel.
const LONGEST_PENDING: Duration = Duration::from_secs(5);
/// How long a ztunnel that ends waits for open connections, as by default.
const GRACE: Duration = Duration::from_secs(5);
/// How long a connection may be under way before it is made.
const IN_FLIGHT: Duration = Duration::from_millis(50);
/// How long a ztunnel that ends takes to close its listeners.
const CLOSING: Duration = Duration::from_millis(300);
/// Whence the node's probes come, in both families.
const PROBES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 7, 127)),
    IpAddr::V6(Ipv6Addr::new(0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff)),
];
/// The node's own addresses.
const NODE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1))];
/// The address of a service whose one endpoint is the pod `db`.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// Its name.
const SERVICE_NAME: &str = "db.shop.svc.cluster.local";
const PENDING: &str = "istio_cni_ambient_pods{state=\"pending\"}";

/// A pod whose address is known before it is created, because ztunnel reads its workloads once.
struct Planned {
    name: String,
    account: &'static str,
    addresses: [IpAddr; 2],
    annotations: Value,
}

impl Planned {
    fn new(name: &str, account: &'static str, number: u16) -> Self {
        let [high, low] = number.to_be_bytes();
        let addresses =
            [Ipv4Addr::new(10, 1, high, low).into(), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number).into()];
        Self { name: name.to_owned(), account, addresses, annotations: json!({}) }
    }

    fn web() -> Self {
        Self::new("web", "buyer", 2)
    }

    fn db() -> Self {
        Self::new("db", "seller", 3)
    }

    /// Whoever has no identity may not talk to it.
    fn vault() -> Self {
        Self::new("vault", "keeper", 4)
    }

    /// One whose DNS queries go where it sends them.
    fn own_dns() -> Self {
        let annotations = json!({"ambient.istio.io/dns-capture": "false"});
        Self { annotations, ..Self::new("own-dns", "buyer", 5) }
    }

    /// One of many that come and go.
    fn guest(number: u16) -> Self {
        Self::new(&format!("guest-{number}"), "guest", 256 + number)
    }

    fn identity(&self) -> String {
        format!("spiffe://cluster.local/ns/shop/sa/{}", self.account)
    }

    fn texts(&self) -> [String; 2] {
        self.addresses.map(|address| address.to_string())
    }

    /// The node's end of its link.
    fn link(&self) -> String {
        format!("to-{}", self.name)
    }
}

/// A pod that runs, with an application on [`PORT`].
struct Running {
    planned: Planned,
    uid: String,
    namespace: Namespace,
    servers: [TcpServer; 2],
}

impl Running {
    fn client(&self) -> Client<'_> {
        Client::new(&self.namespace).user(1000, 1000)
    }
}

/// A node whose pods reach each other through it.
struct Mesh {
    world: World,
    /// The node's own addresses.
    addresses: [IpAddr; 2],
}

impl Mesh {
    fn new(is_native: bool) -> Self {
        let world = World::alone();
        for account in ["buyer", "seller", "keeper", "guest"] {
            world.api.create_service_account("shop", account).expect("an account");
        }
        Self::on(world, is_native, NODE)
    }

    fn on(mut world: World, is_native: bool, addresses: [IpAddr; 2]) -> Self {
        world.node.set("NATIVE_NFTABLES", &is_native.to_string());
        let forward = || {
            fs::write("/proc/sys/net/ipv4/ip_forward", "1")
                .and_then(|()| fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1"))
        };
        world.host.enter(forward).expect("enters").expect("forwards");
        for address in addresses {
            world.host.add_address("lo", &host_route(address)).expect("an address");
        }
        Self { world, addresses }
    }

    fn log(&self) -> PathBuf {
        self.world.node.path("ztunnel.log")
    }

    fn ztunnel(&self) -> Stock {
        self.ztunnel_with(GRACE)
    }

    /// One that drains at most this long.
    fn ztunnel_with(&self, grace: Duration) -> Stock {
        let file = self.world.node.path("workloads.yaml");
        fs::write(&file, workloads()).expect("writes");
        Stock::start(&Source::File(file), &self.world.socket(), &self.log(), grace).expect("a ztunnel")
    }

    fn accesses(&self) -> Vec<Access> {
        accesses(&self.log()).expect("a log")
    }

    fn wait(&self, what: &str, is_so: impl FnMut() -> bool) {
        let asked = std::panic::AssertUnwindSafe(|| self.world.wait(what, is_so));
        if let Err(panic) = std::panic::catch_unwind(asked) {
            eprintln!("{}", fs::read_to_string(self.log()).unwrap_or_default());
            std::panic::resume_unwind(panic);
        }
    }

    /// Waits for the only connection after the first so many that is as this says.
    fn wait_access(&self, since: usize, what: &str, is_it: impl Fn(&Access) -> bool) {
        self.wait(&format!("{what} in ztunnel's access log"), || {
            self.accesses().iter().skip(since).filter(|access| is_it(access)).count() == 1
        });
    }

    fn create(&self, planned: &Planned) -> String {
        let Planned { name, account, annotations, .. } = planned;
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "shop", "annotations": annotations, "labels": {"app": name}},
            "spec": {"nodeName": self.world.node_name, "automountServiceAccountToken": false, "serviceAccountName": account,
                "containers": [{"name": "app", "image": "app"}]}});
        let made = self.world.api.create(&pod).expect("a pod");
        made["metadata"]["uid"].as_str().expect("a UID").to_owned()
    }

    /// Its network namespace, with a link to the node, which forwards.
    fn sandbox(&self, planned: &Planned) -> Namespace {
        let namespace = Namespace::empty(Families::Dual).expect("a namespace");
        let (host, link) = (&self.world.host, planned.link());
        let mut lines =
            format!("link add eth0 type veth peer name {link} netns {}\nlink set eth0 up\n", host.name());
        namespace.ip_batch(&lines).expect("a link");
        let mut of_host = format!(
            "link set {link} up\naddr add 169.254.1.1/32 dev {link}\naddr add fe80::1/64 dev {link} nodad\n"
        );
        lines.clear();
        for (address, node) in planned.addresses.iter().zip(self.addresses) {
            let nodad = if address.is_ipv6() { " nodad" } else { "" };
            writeln!(lines, "addr add {} dev eth0{nodad}", host_route(*address)).expect("memory");
            writeln!(of_host, "route add {} dev {link} src {node}", host_route(*address)).expect("memory");
        }
        lines += "route add 169.254.1.1 dev eth0 scope link\nroute add default via 169.254.1.1 dev eth0\nroute add ::/0 via fe80::1 dev eth0\n";
        host.ip_batch(&of_host).expect("routes");
        namespace.ip_batch(&lines).expect("routes");
        let sandboxes = &self.world.sandboxes;
        sandboxes.lock().expect("not poisoned").mount(&format!("cni-{}", planned.name), &namespace.path());
        namespace
    }

    /// A pod that has run since before the agent looked.
    fn running(&self, planned: Planned) -> Running {
        let uid = self.create(&planned);
        let namespace = self.sandbox(&planned);
        self.run(planned, uid, namespace)
    }

    fn run(&self, planned: Planned, uid: String, namespace: Namespace) -> Running {
        let servers = serve(&planned, &namespace);
        let texts = planned.texts();
        self.world.run(&planned.name, &uid, &namespace, &[&texts[0], &texts[1]]);
        Running { planned, uid, namespace, servers }
    }

    /// What the runtime and the API server do at a pod's end.
    fn delete(&self, pod: Running) {
        let Running { planned: Planned { name, .. }, .. } = pod;
        let args = ["delete", "pod", &name, "-n", "shop", "--force", "--grace-period=0"];
        self.world.api.kubectl(&args).expect("deletes");
        self.world.sandboxes.lock().expect("not poisoned").remove(&format!("cni-{name}"));
    }
}

fn serve(planned: &Planned, namespace: &Namespace) -> [TcpServer; 2] {
    planned
        .addresses
        .map(|address| TcpServer::start(namespace, &planned.name, (address, PORT)).expect("a server"))
}

/// The address alone.
fn host_route(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

/// The workloads in ztunnel's format: all pods that any of these tests creates.
fn workloads() -> String {
    let mut text = String::from("workloads:\n");
    let guests = (0..guests()).map(Planned::guest);
    for pod in [Planned::web(), Planned::db(), Planned::vault(), Planned::own_dns()].into_iter().chain(guests)
    {
        let Planned { name, account, .. } = &pod;
        let services =
            if name == "db" { format!("shop/{SERVICE_NAME}: {{80: {PORT}}}") } else { String::new() };
        let policies = if name == "vault" { "shop/encrypted" } else { "" };
        let more = format!("authorizationPolicies: [{policies}], services: {{{services}}}");
        text += &workload("shop", name, account, &pod.texts(), &more);
    }
    text + &format!(
        "services:\n- {{name: db, namespace: shop, hostname: {SERVICE_NAME}, vips: [/{SERVICE}], ports: {{80: {PORT}}}, canonical: true}}\n\
         policies:\n- {{name: encrypted, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{{notPrincipals: [!Presence []]}}]]]}}\n"
    )
}

/// How many pods come and go; `GUESTS` plays more.
fn guests() -> u16 {
    test_support::sample::number("GUESTS", 20)
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn pods_talk_through_a_stock_ztunnel_under_native_rules() {
    pods_talk(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn pods_talk_through_a_stock_ztunnel_under_rules_of_iptables() {
    pods_talk(false);
}

fn pods_talk(is_native: bool) {
    let mesh = Mesh::new(is_native);
    let [web, db, vault] = [Planned::web(), Planned::db(), Planned::vault()].map(|pod| mesh.running(pod));
    let outsider = Planned::new("outsider", "none", 9);
    let outside = mesh.sandbox(&outsider);
    let _ztunnel = mesh.ztunnel();
    let _agent = mesh.world.start();
    mesh.world.wait_enrolled(3.0);
    for (family, of_probes) in PROBES.into_iter().enumerate() {
        let at = |pod: &Running, port| SocketAddr::new(pod.planned.addresses[family], port);
        let [from, to] = [web.planned.addresses[family], db.planned.addresses[family]];

        let before = mesh.accesses().len();
        let report = web.client().tcp(at(&db, PORT)).expect("runs").report().expect("an answer");
        assert_eq!((report.server.as_str(), report.peer.ip()), ("db", from));
        let is_encrypted = |access: &Access| {
            access.source.starts_with(SocketAddr::new(from, 0).to_string().trim_end_matches('0'))
                && access.source_identity == web.planned.identity()
                && access.target_identity == db.planned.identity()
                && access.error.is_empty()
        };
        mesh.wait_access(before, "a connection by HBONE", |access| {
            is_encrypted(access)
                && access.direction == "outbound"
                && access.target == SocketAddr::new(to, HBONE).to_string()
                && access.tunnelled == at(&db, PORT).to_string()
        });
        mesh.wait_access(before, "its other end", |access| {
            is_encrypted(access) && access.direction == "inbound"
        });

        let before = mesh.accesses().len();
        let client = Client::new(&outside);
        let report = client.tcp(at(&db, PORT)).expect("runs").report().expect("an answer");
        assert_eq!(report.peer.ip(), outsider.addresses[family]);
        mesh.wait_access(before, "a connection in plain text", |access| {
            access.direction == "inbound" && access.source_identity.is_empty() && access.error.is_empty()
        });
        let refused = client.tcp(at(&vault, PORT)).expect("runs");
        assert_eq!(refused.server(), None, "{refused:?}");
        mesh.wait_access(before, "what a policy refused", |access| !access.error.is_empty());
        let known = web.client().tcp(at(&vault, PORT)).expect("runs");
        assert_eq!(known.server(), Some("vault"));
        mesh.wait_access(before, "what it allowed", |access| {
            access.direction == "inbound"
                && access.target_identity == vault.planned.identity()
                && access.error.is_empty()
        });

        let before = mesh.accesses().len();
        for pod in [&db, &vault] {
            let probe = Client::new(&mesh.world.host).tcp(at(pod, PORT)).expect("runs");
            let report = probe.report().expect("an answer");
            assert_eq!((report.peer.ip(), report.local), (of_probes, at(pod, PORT)));
        }
        assert_eq!(&mesh.accesses()[before..], [], "probes went through ztunnel");
    }
    let service = web.client().tcp((SERVICE, 80)).expect("runs");
    assert_eq!(service.server(), Some("db"));
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn dns_queries_reach_a_stock_ztunnel_under_native_rules() {
    dns_queries_reach_ztunnel(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn dns_queries_reach_a_stock_ztunnel_under_rules_of_iptables() {
    dns_queries_reach_ztunnel(false);
}

/// Nobody serves DNS at the node's addresses.
fn dns_queries_reach_ztunnel(is_native: bool) {
    let mesh = Mesh::new(is_native);
    let [web, own] = [Planned::web(), Planned::own_dns()].map(|pod| mesh.running(pod));
    let _ztunnel = mesh.ztunnel();
    let _agent = mesh.world.start();
    mesh.world.wait_enrolled(2.0);
    // Without capture a connection still goes through ztunnel, which accepts it before it knows. How that ends depends on whether it has read the query.
    let asking: [(Ask, &[ErrorKind]); 2] = [
        (dns::by_udp, &[ErrorKind::ConnectionRefused]),
        (dns::by_tcp, &[ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof]),
    ];
    for server in NODE {
        for (ask, uncaptured) in asking {
            let asked = |pod: &Running| pod.namespace.enter(|| ask(server, SERVICE_NAME)).expect("enters");
            assert_eq!(asked(&web).expect("an answer"), [SERVICE], "from {server}");
            let kind = asked(&own).expect_err("nobody serves").kind();
            assert!(uncaptured.contains(&kind), "{kind:?} from {server}");
        }
    }
}

type Ask = fn(IpAddr, &str) -> io::Result<Vec<Ipv4Addr>>;

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn a_stock_ztunnel_is_killed_and_replaced_under_native_rules() {
    ztunnel_is_replaced(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn a_stock_ztunnel_is_killed_and_replaced_under_rules_of_iptables() {
    ztunnel_is_replaced(false);
}

fn ztunnel_is_replaced(is_native: bool) {
    let mesh = Mesh::new(is_native);
    let [web, db] = [Planned::web(), Planned::db()].map(|pod| mesh.running(pod));
    let uids = BTreeSet::from([web.uid.clone(), db.uid.clone()]);
    let agent = mesh.world.start();
    let mut ztunnel = mesh.ztunnel();
    mesh.world.wait_enrolled(2.0);
    let targets = db.planned.addresses.map(|address| SocketAddr::new(address, PORT));
    let is_served = |ztunnel: &Stock| ztunnel.served().is_ok_and(|served| served == uids);

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| longest_pending(&mesh, &stop));
        let _stop = StopOnDrop(&stop);
        for _ in 0..5 {
            drop(ztunnel);
            let killed = Instant::now();
            ztunnel = mesh.ztunnel();
            mesh.wait("the new ztunnel to serve", || is_served(&ztunnel));
            let enrolled = killed.elapsed();
            mesh.wait("connections", || {
                web.client().patience(Duration::from_secs(1)).tcp(targets[0]).expect("runs").server()
                    == Some("db")
            });
            eprintln!(
                "ztunnel was killed: pods served after {enrolled:?}, connected after {:?}",
                killed.elapsed()
            );
            assert!(killed.elapsed() < LONGEST_PENDING, "{:?}", killed.elapsed());
        }
        mesh.world.wait_enrolled(2.0);

        for round in 0..3 {
            let before = Traffic::begin(&web.namespace, &targets);
            let mut stream = Stream::open(&web.namespace, targets[round % 2], PATIENCE).expect("a stream");
            let new = mesh.ztunnel();
            mesh.wait("the new ztunnel to serve", || is_served(&new));
            stream.echo("still there?").expect("it goes on while two are connected");
            let begin = Instant::now();
            let old = std::mem::replace(&mut ztunnel, new);
            old.process().signal(nix::sys::signal::Signal::SIGTERM).expect("a signal");
            stream.echo("still there?").expect("it goes on while the old one drains");
            old.process().wait(test_support::process::SHORT).expect("it ends");
            eprintln!("the old ztunnel ended after {:?}; {} connections", begin.elapsed(), before.count());
            // What the old one accepts in the millisecond of its end it does not answer: with Istio's agent in the place of ours, too, 3 of 12 exchanges
            // lost a connection. What waits at its listener when that is closed, the kernel resets.
            let closing = begin - IN_FLIGHT..begin + CLOSING;
            let (at_the_end, other): (Vec<_>, Vec<_>) =
                before.end().into_iter().partition(|(at, _)| closing.contains(at));
            eprintln!("lost while its listeners were closed: {at_the_end:?}");
            assert!(at_the_end.len() <= 2, "{at_the_end:?}");
            assert_eq!(other, [], "{}", fs::read_to_string(mesh.log()).unwrap_or_default());
            mesh.world.wait_enrolled(2.0);
            for pod in [&web, &db] {
                assert_eq!(mesh.world.annotation(&pod.planned.name).as_deref(), Some("enabled"));
            }
        }
        stop.store(true, Ordering::Relaxed);
        let pending = watch.join().expect("watches");
        eprintln!("pods were pending for {pending:?} at most");
        assert!(pending < LONGEST_PENDING, "{pending:?}");
    });
    assert_eq!(agent.end(), Some(0));
}

#[test]
#[ignore = "needs a ztunnel and a release of Istio: make ztunnel"]
fn istios_agent_is_replaced_by_ours_and_back_under_native_rules() {
    agents_are_exchanged(true);
}

#[test]
#[ignore = "needs a ztunnel and a release of Istio: make ztunnel"]
fn istios_agent_is_replaced_by_ours_and_back_under_rules_of_iptables() {
    agents_are_exchanged(false);
}

fn agents_are_exchanged(is_native: bool) {
    let mesh = Mesh::new(is_native);
    mesh.world.api.apply(istios_agent::RIGHTS).expect("rights");
    let [web, db] = [Planned::web(), Planned::db()].map(|pod| mesh.running(pod));
    let uids = BTreeSet::from([web.uid.clone(), db.uid.clone()]);
    let ztunnel = mesh.ztunnel();
    let wait_served =
        || mesh.wait("ztunnel to serve both", || ztunnel.served().is_ok_and(|served| served == uids));
    let theirs = IstiosAgent::start(&mesh.world, is_native);
    wait_served();
    mesh.world.wait_annotation("db", Some("enabled"));

    let targets = db.planned.addresses.map(|address| SocketAddr::new(address, PORT));
    let since = mesh.accesses().len();
    let (between, probing) =
        (Traffic::begin(&web.namespace, &targets), Traffic::begin(&mesh.world.host, &targets));
    let mut streams = targets.map(|target| Stream::open(&web.namespace, target, PATIENCE).expect("a stream"));
    let mut go_on = |when: &str| {
        for stream in &mut streams {
            stream.echo("still there?").unwrap_or_else(|error| panic!("{when}: {error}"));
        }
    };
    let exchanged = Instant::now();
    theirs.end();
    go_on("no agent runs");
    let ours = mesh.world.start();
    mesh.world.wait_enrolled(2.0);
    mesh.wait("Istio's rules for probes to go", || istios_on(&mesh.world.host).is_empty());
    wait_served();
    go_on("the agent is ours");
    eprintln!("Istio's agent was replaced in {:?}", exchanged.elapsed());

    let exchanged = Instant::now();
    assert_eq!(ours.end(), Some(0));
    go_on("no agent runs");
    let theirs = IstiosAgent::start(&mesh.world, is_native);
    wait_served();
    assert!(!istios_on(&mesh.world.host).is_empty());
    go_on("the agent is Istio's again");
    eprintln!("ours was replaced by Istio's in {:?}", exchanged.elapsed());

    eprintln!("{} connections between pods, {} of the node", between.count(), probing.count());
    assert_eq!(
        (between.end(), probing.end()),
        (Vec::new(), Vec::new()),
        "{}\n{}",
        mesh.world.node.log(),
        theirs.log()
    );
    for name in ["web", "db"] {
        assert_eq!(mesh.world.annotation(name).as_deref(), Some("enabled"), "{name}");
    }
    // What the node opens goes past ztunnel; all else is encrypted.
    let plain = |access: &Access| access.target_identity.is_empty() || access.source_identity.is_empty();
    let accesses = mesh.accesses().split_off(since);
    assert_eq!(accesses.iter().find(|access| plain(access)), None);
    assert!(!accesses.is_empty());
    theirs.end();
}

/// What Istio's agent has on the node to let probes through.
fn istios_on(host: &Namespace) -> String {
    let script = "{ iptables-nft -t nat -S; iptables-legacy -t nat -S; nft list table inet istio-ambient-nat; ipset list -n; } 2>/dev/null | grep -i istio || true";
    host.sh(script).expect("lists").stdout
}

/// How long any pod counted as pending, at most, until this stops.
fn longest_pending(mesh: &Mesh, stop: &AtomicBool) -> Duration {
    let (mut since, mut longest) = (None, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        match metric(&mesh.world.node, PENDING) {
            Some(count) if count > 0.0 => {
                let begin: Instant = *since.get_or_insert_with(Instant::now);
                longest = longest.max(begin.elapsed());
            }
            Some(_) | None => since = None,
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    longest
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn pods_come_and_go_behind_a_stock_ztunnel_under_native_rules() {
    pods_come_and_go(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn pods_come_and_go_behind_a_stock_ztunnel_under_rules_of_iptables() {
    pods_come_and_go(false);
}

fn pods_come_and_go(is_native: bool) {
    let mesh = Mesh::new(is_native);
    let web = mesh.running(Planned::web());
    let ztunnel = mesh.ztunnel();
    let agent = mesh.world.start();
    mesh.world.wait_enrolled(1.0);
    mesh.wait("one pod at ztunnel", || ztunnel.served().is_ok_and(|served| served.len() == 1));
    let before = Held::of(&agent, ztunnel.process());
    let (begin, mut slowest) = (Instant::now(), Duration::ZERO);
    for number in 0..guests() {
        let planned = Planned::guest(number);
        let uid = mesh.create(&planned);
        let namespace = mesh.sandbox(&planned);
        let (called, texts) = (Instant::now(), planned.texts());
        let added = mesh.world.add(&planned.name, &[&texts[0], &texts[1]]);
        slowest = slowest.max(called.elapsed());
        assert!(
            added.status.success(),
            "{}\n{}",
            String::from_utf8_lossy(&added.stdout),
            mesh.world.node.log()
        );
        assert!(ztunnel.served().expect("answers").contains(&uid), "ztunnel does not serve {}", planned.name);
        let guest = mesh.run(planned, uid.clone(), namespace);
        let since = mesh.accesses().len();
        let target = SocketAddr::new(guest.planned.addresses[usize::from(number % 2)], PORT);
        let answer = web.client().tcp(target).expect("runs");
        assert_eq!(answer.server(), Some(guest.planned.name.as_str()), "{answer:?}");
        mesh.wait_access(since, "a connection by HBONE", |access| {
            access.direction == "outbound" && access.target_identity == guest.planned.identity()
        });
        mesh.delete(guest);
        mesh.wait("ztunnel to drop it", || ztunnel.served().is_ok_and(|served| !served.contains(&uid)));
    }
    eprintln!("{} pods came and went in {:?}; the slowest ADD took {slowest:?}", guests(), begin.elapsed());
    mesh.wait("network namespaces to end with their pods", || links(&mesh) == [web.planned.link()]);
    mesh.wait("no more descriptors than before", || {
        Held::of(&agent, ztunnel.process()).is_within(&before, usize::from(guests()))
    });
    assert_eq!(mesh.world.probes().len(), 2);
    mesh.world.wait_enrolled(1.0);
    assert_eq!(agent.end(), Some(0));
}

/// The node's ends of links, which are gone with the pods' network namespaces.
fn links(mesh: &Mesh) -> Vec<String> {
    let listing = mesh.world.host.sh("cat /proc/net/dev").expect("lists").stdout;
    let names = listing.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    names.filter(|name| name.starts_with("to-")).map(str::to_owned).collect()
}

/// What two processes hold: descriptors of the agent, and network namespaces of both.
#[derive(Debug)]
struct Held {
    descriptors: usize,
    namespaces: [BTreeSet<String>; 2],
}

impl Held {
    fn of(agent: &Agent<'_>, ztunnel: &Background) -> Self {
        Self {
            descriptors: open_files(agent.id()).len(),
            namespaces: [agent.id(), ztunnel.id()].map(namespaces),
        }
    }

    /// Whether nothing of these pods, which came and went, is left. What leaks is at least one for each; what differs otherwise is that the agent opens files
    /// and connections all the time, now and before.
    fn is_within(&self, before: &Self, pods: usize) -> bool {
        self.descriptors <= before.descriptors + pods / 2
            && self.namespaces.iter().zip(&before.namespaces).all(|(now, before)| now.is_subset(before))
    }
}

/// The network namespaces of a process: its threads' and those that it has open.
fn namespaces(process: u32) -> BTreeSet<String> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("a process");
    let own = threads.filter_map(|thread| fs::read_link(thread.ok()?.path().join("ns/net")).ok());
    let all = open_files(process).into_iter().chain(own.map(|link| link.display().to_string()));
    all.filter(|link| link.starts_with("net:")).collect()
}

fn open_files(process: u32) -> Vec<String> {
    let files = fs::read_dir(format!("/proc/{process}/fd")).expect("a process");
    files.filter_map(|file| Some(fs::read_link(file.ok()?.path()).ok()?.display().to_string())).collect()
}
