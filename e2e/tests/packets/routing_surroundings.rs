//! Policy routing among that of other programs: what the proxy opens in a client's name is answered, or what keeps it from that is named;
//! and what worked before a run works after it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::in_parallel;
use e2e::iptables::mesh::any;
use e2e::traffic::listener;
use netns_apply::{ApplyError, ApplyOptions, Mismatch, RollbackOutcome, RunError, apply, cleanup, verify};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, getsockopt, setsockopt, socket,
    sockopt,
};
use redirect_core::settings::{Key, NamespaceFacts, RawSettings, Source};
use redirect_core::{AmbientRedirect, Families as PlanFamilies, Redirect, RulePlan};
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, Topology, client_address, pod_address, remote_address};
use test_support::sample;

const BOTH: [bool; 2] = [false, true];
const THREADS: usize = 3;
/// How many surroundings `make test` takes.
const FEW: usize = 12;
/// How long an answer may take that is on its way within one kernel; and what seems lost a second time, where it should not be.
const PROMPT: Duration = Duration::from_millis(150);
const LONGER: Duration = Duration::from_secs(5);
/// The mark of what the proxy sends, in both data planes.
const PROXY_MARK: u32 = 0x539;
const APP: u16 = 8080;
/// The interface, the network and the address of a second network plugin.
const SECOND: &str = "link add net1 type veth peer name pe1
link set pe1 up
link set net1 up
addr add 192.0.2.10/24 dev net1
addr add fd00:9::10/64 dev net1 nodad
";
/// The tables that other programs use.
const TABLES: [u32; 7] = [52, 100, 101, 133, 200, 220, 15100];

fn second_address(v6: bool) -> IpAddr {
    if v6 { [0xfd00, 9, 0, 0, 0, 0, 0, 0x10].into() } else { [192, 0, 2, 10].into() }
}

/// Clients: a neighbour, one far away, one in the second network, and one whom a default route reaches.
fn clients(v6: bool) -> [IpAddr; 4] {
    let (second, any): (IpAddr, IpAddr) = if v6 {
        ([0xfd00, 9, 0, 0, 0, 0, 0, 0x77].into(), [0x2001, 0xdb8, 0x77, 0, 0, 0, 0, 9].into())
    } else {
        ([192, 0, 2, 77].into(), [203, 0, 113, 9].into())
    };
    [client_address(v6), remote_address(v6), second, any]
}

/// A pod with an application, and listeners of a proxy.
struct Ground {
    topology: Topology,
    _listeners: Vec<TcpListener>,
}

impl Ground {
    fn new() -> Result<Self> {
        let topology = Topology::new(Families::Dual)?;
        topology.pod.ip_batch(SECOND)?;
        let open = || -> Result<Vec<TcpListener>> {
            let ports = [(APP, false), (15001, false), (15006, true)];
            let all =
                BOTH.into_iter().flat_map(|v6| ports.map(|(port, transparent)| (v6, port, transparent)));
            all.map(|(v6, port, transparent)| listener((any(v6), port).into(), transparent)).collect()
        };
        let listeners = topology.pod.enter(open)??;
        Ok(Self { topology, _listeners: listeners })
    }

    fn pod(&self) -> &Namespace {
        &self.topology.pod
    }

    /// Whether the application answers the proxy, which connects in the name of this client.
    fn is_answered(&self, client: SocketAddr, app: SocketAddr, patience: Duration) -> Result<bool> {
        self.pod()
            .enter(|| opens(client, app, PROXY_MARK, patience))?
            .with_context(|| format!("{client} to {app}"))
    }

    /// The answers that are lost, although the pod has a route to the client without the mesh.
    fn lost(&self, calls: &[Call], patience: Duration) -> Result<Vec<Call>> {
        let questions: Vec<String> = calls.iter().map(|call| call.answer(0)).collect();
        let mut lost = Vec::new();
        for (call, route) in calls.iter().zip(routes(self.pod(), &questions)?) {
            if route != NONE && !self.is_answered(call.client(), call.app(), patience)? {
                lost.push(*call);
            }
        }
        Ok(lost)
    }
}

const NONE: &str = "none";

/// Where packets go, by the kernel's word: the first line of each `ip route get`.
fn routes(namespace: &Namespace, questions: &[String]) -> Result<Vec<String>> {
    // One program answers all of them; what comes before each answer tells them apart.
    let batch: String =
        questions.iter().map(|question| format!("link show dev lo\nroute get {question}\n")).collect();
    let script = format!("ip -force -batch - 2>/dev/null <<'END' || true\n{batch}END");
    let told = namespace.sh(&script)?.ok()?.stdout;
    let answers: Vec<String> = told
        .split("1: lo:")
        .skip(1)
        .map(|answer| {
            // Two lines are about `lo`.
            let line = answer.lines().skip(2).find(|line| !line.trim().is_empty()).unwrap_or(NONE);
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        })
        .collect();
    ensure!(answers.len() == questions.len(), "{told}");
    Ok(answers)
}

/// A connection that the proxy opens to the application in a client's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Call {
    client: IpAddr,
    /// A port of the client is one below 1024, or a high one.
    is_low: bool,
    app: IpAddr,
    app_port: u16,
}

impl Call {
    fn client(&self) -> SocketAddr {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        SocketAddr::new(self.client, if self.is_low { 100 + next % 900 } else { 20_000 + next % 30_000 })
    }

    fn app(&self) -> SocketAddr {
        SocketAddr::new(self.app, self.app_port)
    }

    /// What asks where the answer goes with this mark.
    fn answer(&self, mark: u32) -> String {
        let Self { client, is_low, app, app_port } = self;
        let port = if *is_low { 500 } else { 30_000 };
        format!("{client} from {app} mark {mark} ipproto tcp sport {app_port} dport {port} uid 0")
    }
}

fn calls() -> Vec<Call> {
    let mut all = Vec::new();
    for v6 in BOTH {
        for (number, client) in clients(v6).into_iter().enumerate() {
            for app in [pod_address(v6), second_address(v6)] {
                all.push(Call { client, is_low: number % 2 == 1, app, app_port: APP });
            }
            all.push(Call { client, is_low: number % 2 == 0, app: pod_address(v6), app_port: APP });
        }
    }
    all
}

/// Connects within the calling thread's namespace from an address that is not its own; whether the other end answers.
fn opens(client: SocketAddr, app: SocketAddr, mark: u32, patience: Duration) -> Result<bool> {
    let family = if app.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd: OwnedFd = socket(family, SockType::Stream, flags, None)?;
    setsockopt(&fd, sockopt::IpTransparent, &true)?;
    setsockopt(&fd, sockopt::Mark, &mark)?;
    // What it opened is forgotten at once.
    setsockopt(&fd, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(client))?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(app)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(_) => return Ok(false),
    }
    let timeout = PollTimeout::try_from(patience)?;
    let answered = poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)], timeout)? == 1;
    Ok(answered && getsockopt(&fd, sockopt::SocketError)? == 0)
}

fn tproxy() -> Result<RulePlan> {
    let mut raw = RawSettings::new();
    let settings = [
        (Key::InterceptionMode, "TPROXY"),
        (Key::InboundPorts, "*"),
        (Key::OutboundRanges, "*"),
        (Key::DualStack, "true"),
    ];
    settings.into_iter().for_each(|(key, text)| raw.set(key, text, Source::Flag("x")));
    let addresses = BOTH.map(pod_address);
    let redirect = Redirect::parse(&raw, &NamespaceFacts::new(&addresses))
        .map_err(|wrong| anyhow::anyhow!("{wrong}"))?;
    Ok(redirect.plan())
}

/// What other programs route: lines of `ip` for both families.
fn random_routing(dice: &mut Dice, most: usize) -> String {
    let mut lines = String::new();
    for _ in 0..dice.below(most + 1) {
        for v6 in BOTH {
            if dice.one_in(5) {
                continue;
            }
            let family = if v6 { "-6" } else { "-4" };
            let table = dice.pick(&TABLES);
            // The kernel may refuse what is there already.
            lines += &format!("ip {family} rule add {} || true\n", random_rule(dice, v6, table));
            for _ in 0..dice.below(3) {
                // Beside the plan's, and in IPv6 before it.
                let (verb, metric) = if v6 { ("add", "metric 512") } else { ("append", "") };
                let route = random_route(dice, v6);
                lines += &format!("ip {family} route {verb} {route} {metric} table {table} || true\n");
            }
        }
    }
    lines
}

fn random_rule(dice: &mut Dice, v6: bool, table: u32) -> String {
    let clients = clients(v6);
    let net = if v6 { "2001:db8::/32" } else { "192.0.2.0/24" };
    let mut selectors = vec![
        format!("from {}", pod_address(v6)),
        format!("from {}", second_address(v6)),
        format!("to {}", dice.pick(&clients)),
        format!("to {net}"),
        "fwmark 0x1/0x1".to_owned(),
        "fwmark 0x7".to_owned(),
        format!("fwmark {PROXY_MARK}"),
        "fwmark 0x111/0xfff".to_owned(),
        "iif lo".to_owned(),
        "iif eth0".to_owned(),
        "oif net1".to_owned(),
        "uidrange 0-10".to_owned(),
        "uidrange 1000-2000".to_owned(),
        "ipproto tcp".to_owned(),
        "ipproto udp".to_owned(),
        "sport 8080".to_owned(),
        "dport 1-1023".to_owned(),
        "tos 0x10".to_owned(),
    ];
    let count = dice.pick(&[0, 1, 1, 1, 1, 2]);
    let mut rule = String::new();
    let is_inverted = count > 0 && dice.one_in(8);
    for _ in 0..count {
        let place = dice.below(selectors.len());
        let word = selectors.swap_remove(place);
        let kind = word.split(' ').next().unwrap_or_default().to_owned();
        selectors.retain(|other| !other.starts_with(&kind));
        rule += &word;
        rule.push(' ');
    }
    // With these marks, some tables are the mesh's by definition.
    let table = if rule.contains("0x111") || rule.contains(&PROXY_MARK.to_string()) { 200 } else { table };
    let priority = dice.pick(&[0, 1, 7, 50, 100, 220, 5270, 32000, 32763, 32764, 32765, 32766, 40_000]);
    let action = match dice.below(12) {
        0 => "prohibit".to_owned(),
        1 => "unreachable".to_owned(),
        2 => "blackhole".to_owned(),
        3 => "goto 32766".to_owned(),
        4 => "nop".to_owned(),
        5 => "lookup main".to_owned(),
        6 => format!("lookup {table} suppress_prefixlength 0"),
        _ => format!("lookup {table}"),
    };
    let not = if is_inverted { "not " } else { "" };
    format!("{not}{rule}pref {priority} {action}")
}

fn random_route(dice: &mut Dice, v6: bool) -> String {
    let net = if v6 { "2001:db8::/32" } else { "192.0.2.0/24" };
    let gateway = client_address(v6);
    match dice.below(8) {
        0 | 1 => format!("default via {gateway} dev eth0"),
        2 => "default dev net1".to_owned(),
        3 => format!("{net} dev net1"),
        4 => format!("blackhole {net}"),
        5 => format!("throw {net}"),
        6 => "local default dev lo".to_owned(),
        _ => format!("{} dev eth0", dice.pick(&clients(v6))),
    }
}

/// What is counted, by its words.
type Tally = BTreeMap<&'static str, usize>;

/// A pod in ambient mode or with TPROXY among other programs' policy routing.
struct Surrounding {
    ground: Ground,
    plan: RulePlan,
    options: ApplyOptions,
    first: String,
    second: String,
    seed: u64,
    tally: Tally,
    problems: Vec<String>,
}

impl Surrounding {
    fn new(seed: u64) -> Result<Self> {
        let mut dice = Dice::new(seed);
        let plan = if dice.one_in(2) { AmbientRedirect::new(PlanFamilies::Both).plan() } else { tproxy()? };
        let (first, second) = (random_routing(&mut dice, 2), random_routing(&mut dice, 2));
        Ok(Self {
            ground: Ground::new()?,
            plan,
            options: ApplyOptions::default(),
            first,
            second,
            seed,
            tally: Tally::new(),
            problems: Vec::new(),
        })
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    fn problem(&mut self, kind: &'static str, text: &str) {
        self.count(kind);
        let Self { plan, first, second, seed, .. } = self;
        let rules = self.ground.pod().sh("ip -4 rule; ip -6 rule; ip -4 route show table all | grep table; ip -6 route show table all | grep table").map(|told| told.stdout);
        self.problems.push(format!(
            "seed {seed}: {kind}: {text}\n{:?}\n{first}-- then the plan, then\n{second}-- now\n{}",
            plan.data_plane(),
            rules.unwrap_or_default()
        ));
    }

    /// What other programs send goes the same way as before.
    fn others(&self) -> Result<Vec<String>> {
        let mut questions = Vec::new();
        for v6 in BOTH {
            for client in clients(v6) {
                for from in [pod_address(v6), second_address(v6)] {
                    for mark in [0, 1, 7] {
                        questions.push(format!(
                            "{client} from {from} mark {mark} ipproto tcp sport 9 dport 99 uid 0"
                        ));
                    }
                }
            }
        }
        let told = routes(self.ground.pod(), &questions)?;
        Ok(questions.into_iter().zip(told).map(|(question, route)| format!("{question}: {route}")).collect())
    }

    fn run(&self) -> Result<Result<(), RunError>> {
        self.ground.pod().enter(|| apply(&self.plan, &self.options).map(drop))
    }

    /// What the check of the plan says, against what is lost.
    fn judge(&mut self, when: &str) -> Result<Vec<Call>> {
        let seen = self.ground.pod().enter(|| verify(&self.plan, &self.options))??;
        let mut lost = self.ground.lost(&calls(), PROMPT)?;
        match seen {
            None => {
                // Somebody may have been late.
                lost = self.ground.lost(&lost, LONGER)?;
                self.count("verified");
                if !lost.is_empty() {
                    self.problem("verified and lost", &format!("{when}: {lost:?}"));
                }
            }
            Some(Mismatch::Interference(..)) => self.count("interference"),
            Some(mismatch) => {
                self.count("named");
                let text = mismatch.to_string();
                if lost.is_empty() && !self.is_lost_as_named(&text)? {
                    self.problem("named in vain", &format!("{when}: {text}"));
                }
            }
        }
        Ok(lost)
    }

    /// Whether the packet that a message has as an example is lost.
    fn is_lost_as_named(&self, text: &str) -> Result<bool> {
        let Some((from, to)) =
            text.split_once("(such as ").and_then(|(_, rest)| rest.split_once(')')?.0.split_once(" to "))
        else {
            // It has none: routing is missing.
            return Ok(true);
        };
        let (from, to): (SocketAddr, SocketAddr) = (from.parse()?, to.parse()?);
        if text.contains("inbound connections") {
            let ports = format!("ipproto tcp sport {} dport {}", from.port(), to.port());
            let question = format!("{} from {} iif eth0 mark {PROXY_MARK} {ports}", to.ip(), from.ip());
            return Ok(routes(self.ground.pod(), &[question])?
                .iter()
                .any(|route| !route.starts_with("local ")));
        }
        let call = Call { client: to.ip(), is_low: to.port() < 1024, app: from.ip(), app_port: APP };
        Ok(!self.ground.lost(&[call], PROMPT)?.is_empty())
    }

    /// What a run left that failed.
    fn judge_failure(&mut self, error: &RunError, when: &str) {
        let is_truly = matches!(*error.cause, ApplyError::DoesNotConverge(_));
        if !is_truly || matches!(error.aftermath, RollbackOutcome::Left { .. }) {
            self.problem("failed otherwise", &format!("{when}: {error}"));
        } else {
            self.count("refused");
        }
    }

    fn play(&mut self) -> Result<()> {
        self.ground.pod().sh(&self.first)?;
        let (before, others) = (self.ground.pod().snapshot()?, self.others()?);
        let mut left = match self.run()? {
            Ok(()) => {
                self.compare(&others, "the first run")?;
                Some(self.judge("after the first run")?)
            }
            Err(error) => {
                self.judge_failure(&error, "the first run");
                let changes = self.ground.pod().snapshot()?.changes_since(&before);
                if !changes.is_empty() {
                    self.problem("broken", &format!("the first run has changed {changes:?}"));
                }
                None
            }
        };
        self.ground.pod().sh(&self.second)?;
        let others = self.others()?;
        if left.is_some() {
            left = Some(self.judge("after what others did")?);
        }
        let done = self.run()?;
        if let Err(error) = &done {
            self.judge_failure(error, "the second run");
        }
        self.compare(&others, "the second run")?;
        if let Some(lost) = left {
            let worked: Vec<Call> = calls().into_iter().filter(|call| !lost.contains(call)).collect();
            let broken = self.ground.lost(&worked, LONGER)?;
            if !broken.is_empty() {
                self.problem("broken", &format!("by the second run ({done:?}): {broken:?}"));
            }
        }
        if done.is_ok() {
            self.judge("after the second run")?;
        }
        self.ground.pod().enter(|| cleanup(&self.options))??;
        self.compare_with_control()
    }

    fn compare(&mut self, before: &[String], when: &str) -> Result<()> {
        let now = self.others()?;
        // What another program's rule has led into our table, we may take out of it again.
        let was_ours = |before: &str| before.contains(": local ") && before.contains(" dev lo table ");
        let differ = |(now, before): &(&String, &String)| now != before && !was_ours(before);
        let changed: Vec<_> = now.iter().zip(before).filter(differ).collect();
        if !changed.is_empty() {
            self.problem("broken", &format!("{when} sends elsewhere what is another program's: {changed:?}"));
        }
        Ok(())
    }

    /// What is left is what other programs have made, in a namespace without the mesh.
    fn compare_with_control(&mut self) -> Result<()> {
        let control = Ground::new()?;
        control.pod().sh(&self.first)?;
        control.pod().sh(&self.second)?;
        let tables = TABLES.iter().flat_map(|table| ["-4", "-6"].map(|family| (family, table)));
        let tables: String = tables
            .map(|(family, table)| {
                format!("ip {family} route show table {table} 2>/dev/null | sed 's/^/{table} /' || true\n")
            })
            .collect();
        let told = |ground: &Ground| -> Result<Vec<String>> {
            let told = ground.pod().sh(&format!("ip -4 rule; ip -6 rule\n{tables}"))?.stdout;
            Ok(told.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect())
        };
        let (now, wanted) = (told(&self.ground)?, told(&control)?);
        // In the data planes' own tables nobody can tell whose the route is if nobody's rule, or more than one, leads there.
        let certain = |told: &[String]| -> Vec<String> {
            let is_ambiguous = |line: &&String| {
                ["100 local default", "133 local default", "15100 local default"]
                    .iter()
                    .any(|own| line.starts_with(own))
            };
            told.iter().filter(|line| !is_ambiguous(line)).cloned().collect()
        };
        if certain(&now) != certain(&wanted) {
            let more: Vec<_> = now.iter().filter(|line| !wanted.contains(line)).collect();
            let less: Vec<_> = wanted.iter().filter(|line| !now.contains(line)).collect();
            self.problem(
                "left or taken by cleanup",
                &format!("left {more:?}, taken {less:?}\n{now:#?}\n-- not\n{wanted:#?}"),
            );
        } else if now != wanted {
            self.count("whose is unknown");
        }
        Ok(())
    }
}

fn try_seed(seed: u64) -> Result<(Vec<String>, Tally)> {
    let mut surrounding = Surrounding::new(seed)?;
    surrounding
        .play()
        .with_context(|| format!("{}-- then the plan, then\n{}", surrounding.first, surrounding.second))?;
    Ok((surrounding.problems, surrounding.tally))
}

#[test]
fn marked_packets_reach_the_proxy_or_what_takes_them_is_named_and_nothing_is_broken() -> Result<()> {
    let (first, count) = (sample::number("SURROUNDINGS_SEED", 1), sample::number("SURROUNDINGS", FEW));
    let seeds: Vec<u64> = (first..first + count).map(|seed| seed as u64).collect();
    let all = Mutex::new(Tally::new());
    let problems = in_parallel(THREADS, &seeds, |_, seed| {
        let (problems, tally) = try_seed(*seed).with_context(|| format!("seed {seed}"))?;
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        tally.into_iter().for_each(|(what, times)| *all.entry(what).or_default() += times);
        Ok(problems)
    });
    let tally = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let of = |what: &str| tally.get(what).copied().unwrap_or_default();
    println!("{count} surroundings: {tally:?}");
    let in_vain = of("named in vain");
    let is_named_in_vain = |problem: &String| problem.contains(": named in vain: ");
    let grave: Vec<&String> = problems.iter().filter(|problem| !is_named_in_vain(problem)).collect();
    ensure!(grave.is_empty(), "{} problems, {tally:?}\n{}", grave.len(), problems.join("\n\n"));
    let judged = of("named") + of("verified");
    ensure!(in_vain * 100 <= judged * 2, "{in_vain} of {judged} named in vain\n{}", problems.join("\n\n"));
    ensure!(count < FEW || of("verified") * 4 > count && of("refused") > 0, "hardly a variety: {tally:?}");
    Ok(())
}
