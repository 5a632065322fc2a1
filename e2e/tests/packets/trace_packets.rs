//! A trace says what the kernel does: random packets through random plans, with other programs' rules among theirs, are really sent,
//! and arrive where the trace of the live rules, and that of the plan where nobody else has rules, says.
//!
//! TRACE_PLANS says how many plans are tried (`make trace`: 200), TRACE_SEED with which numbers the tests begin. Each plan gets 25
//! packets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use e2e::iptables::in_parallel;
use e2e::iptables::mesh::other_address;
use e2e::iptables::packets::{Arrived, FORMS, IMPATIENT, World, plan, random_packet, random_settings};
use e2e::traffic::{ANSWER, PROXY_ID};
use netfilter_state::ruleset::{Condition, HookedRules, KernelRule, Statement};
use netns_apply::{ApplyOptions, Live, apply};
use packet_trace::{
    ConnectionState, ConntrackEntry, Detail, Fate, Outcome, Packet, PacketEdit, Sender, Trace, TraceEvent,
    TraceRules,
};
use redirect_core::{Family, RulePlan, rule::TcpFlags, settings::Key};
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, pod_address, remote_address};

const THREADS: usize = 2;
const FEW_PLANS: usize = 20;
const PACKETS: usize = 25;

/// Other programs' rules. `$ipt` is iptables or ip6tables of a variant, `$far` and `$other` services far away, `$pod` the pod. They
/// concern packets that open connections, so that the answer comes back.
const FOREIGN: [&str; 27] = [
    "$ipt -t nat -I OUTPUT 1 -p tcp --dport 81 -j RETURN",
    "$ipt -t nat -I OUTPUT 1 -p tcp -d $other -j ACCEPT",
    "$ipt -t nat -I OUTPUT 1 -p tcp --dport 4443 -j REDIRECT --to-ports 3128",
    "$ipt -t nat -I PREROUTING 1 -p tcp --dport 8081 -j REDIRECT --to-ports 3128",
    "$ipt -t nat -I OUTPUT 1 -m owner --uid-owner 7 -j RETURN",
    "$ipt -t nat -I OUTPUT 1 -m mark --mark 0x7/0xf -j ACCEPT",
    "$ipt -t nat -I OUTPUT 1 -p tcp -m multiport --dports 80,4443 -m owner ! --gid-owner 1337 -j RETURN",
    "$ipt -t filter -A OUTPUT -p tcp -d $other --dport 80 -j DROP",
    "$ipt -t filter -A INPUT -p tcp --dport 15006 -j DROP",
    "$ipt -t filter -A INPUT -p tcp --dport 8080 -j REJECT --reject-with tcp-reset",
    "$ipt -t mangle -I PREROUTING 1 -p tcp --dport 8080 -j MARK --set-mark 1337",
    "$ipt -t mangle -A OUTPUT -p tcp --dport 81 -j DROP",
    "$ipt -t filter -A INPUT -i lo -j ACCEPT; $ipt -t filter -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; \
     $icmp $ipt -t filter -P INPUT DROP",
    "$ipt -t filter -N THEIRS; $ipt -t filter -A THEIRS -p tcp --dport 4443 -j DROP; $ipt -t filter -A OUTPUT -d $far -g THEIRS",
    "nft add table inet theirs; nft add chain inet theirs out '{ type nat hook output priority -110; }'; \
     nft add rule inet theirs out tcp dport 80 redirect to :3128",
    "nft add table inet theirs; nft add chain inet theirs out '{ type filter hook output priority -160; }'; \
     nft add rule inet theirs out tcp dport 80-81 meta mark 7 drop",
    "nft add table inet theirs; nft add chain inet theirs in '{ type filter hook prerouting priority -160; }'; \
     nft add rule inet theirs in tcp dport '{ 8080, 9 }' counter drop",
    // A block list, as plain filters have it.
    "nft add table inet theirs; nft add set inet theirs blocked '{ type ipv4_addr; flags interval; elements = { $other, 203.0.113.0/24 }; }'; \
     nft add chain inet theirs out '{ type filter hook output priority 0; }'; \
     nft add rule inet theirs out ip daddr @blocked tcp dport != 53 drop; \
     nft add rule inet theirs out ip6 daddr '{ 2001:db8::2, 2001:db8:9::/48 }' tcp dport 80-90 drop",
    // Services by address and port, as kube-proxy has them in its nftables mode.
    "nft add table inet theirs; nft add chain inet theirs refuse; nft add rule inet theirs refuse reject; \
     nft add chain inet theirs out '{ type filter hook output priority 0; }'; \
     nft add map inet theirs services '{ type ipv4_addr . inet_proto . inet_service : verdict; }'; \
     nft add element inet theirs services '{ $other . tcp . 80 : drop, $far . tcp . 81 : goto refuse, $far . udp . 4443 : drop }'; \
     nft add rule inet theirs out ip daddr . meta l4proto . th dport vmap @services; \
     nft add rule inet theirs out ip6 daddr . tcp dport vmap '{ 2001:db8::2 . 80-82 : goto refuse, 2001:db8::1 . 4443 : drop }'",
    // What a machine's usual filter lets in.
    "nft add table inet theirs; nft add chain inet theirs in '{ type filter hook input priority 0; policy drop; }'; \
     nft add rule inet theirs in ct state vmap '{ established : accept, related : accept, invalid : drop }'; \
     nft add rule inet theirs in iif lo accept; nft add rule inet theirs in meta l4proto '{ icmp, ipv6-icmp }' accept; \
     nft add rule inet theirs in iifname '{ \"eth0\", \"veth*\" }' tcp dport '{ 15006, 8081 }' accept",
    "nft add table inet theirs; nft add chain inet theirs out '{ type nat hook output priority -110; }'; \
     nft add rule inet theirs out meta skuid '{ 7, 1000-1001 }' tcp dport 4443 redirect to :3128; \
     nft add rule inet theirs out meta mark 1-9 tcp dport 81 accept",
    "nft add table inet theirs; nft add chain inet theirs in '{ type nat hook prerouting priority -110; }'; \
     nft add rule inet theirs in fib daddr type local tcp dport 8081 redirect to :3128",
    // Published ports of the machine itself, as Docker and kube-proxy have them.
    "$ipt -t nat -N DOCKER; $ipt -t nat -A DOCKER -p tcp --dport 8081 -j REDIRECT --to-ports 3128; \
     $ipt -t nat -I OUTPUT 1 -m addrtype --dst-type LOCAL -j DOCKER; $ipt -t nat -I PREROUTING 1 -m addrtype --dst-type LOCAL -j DOCKER; \
     $ipt -t nat -I OUTPUT 1 -p tcp --dport 81 -m addrtype ! --dst-type LOCAL -j RETURN",
    "$ipt -t nat -I OUTPUT 1 -p tcp -m owner --uid-owner 7-9 -j RETURN; $ipt -t filter -A OUTPUT -p tcp --dport 81 -m owner ! --gid-owner 1000-1999 -j DROP",
    "$ipt -t nat -N KUBE-MARK-MASQ; $ipt -t nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000; \
     $ipt -t nat -I OUTPUT 1 -p tcp -d $other --dport 80 -m comment --comment 'a service' -j KUBE-MARK-MASQ; \
     $ipt -t nat -A POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN; $ipt -t nat -A POSTROUTING -j MARK --xor-mark 0x4000; \
     $ipt -t nat -A POSTROUTING -j MASQUERADE --random-fully",
    // Nobody can say beforehand which packets these drop.
    "$ipt -t filter -A OUTPUT -p tcp --dport 4443 -m statistic --mode random --probability 0.5 -j DROP",
    "$ipt -t raw -A PREROUTING -m mark --mark 0x200/0xf00 -m comment --comment 'cilium: notrack' -j CT --notrack; \
     $ipt -t filter -A INPUT -m mark --mark 0x200/0xf00 -j ACCEPT; $ipt -t filter -A INPUT -p tcp --dport 15008 -m mark ! --mark 0xe00/0xf00 -j DROP",
];

/// A pod with a plan and other programs' rules.
struct Pod {
    world: World,
    words: String,
    plan: RulePlan,
    foreign: Vec<String>,
    live: [TraceRules; 2],
}

impl Pod {
    fn new(dice: &mut Dice) -> Result<Self> {
        let world = World::new()?;
        let (form, backend, native_form) = dice.pick(&FORMS);
        let said = random_settings(dice);
        let (plan, words) = (plan(&said)?, format!("{said:?} by {form}"));
        let options = ApplyOptions::default().backend(backend).native_form(native_form);
        world.pod().enter(|| apply(&plan, &options))?.with_context(|| words.clone())?;
        let foreign = if dice.one_in(2) { random_rules(dice, form) } else { Vec::new() };
        for script in &foreign {
            world.pod().sh(script).with_context(|| words.clone())?;
        }
        let live = world.pod().enter(|| Live::now(None, &ApplyOptions::default()))??;
        let live = Family::BOTH.map(|family| live.rules(family, Some(&plan)));
        Ok(Self { world, words, plan, foreign, live })
    }

    /// What the trace says against what the kernel does; nothing where they agree.
    fn judge(&self, packet: &Packet, seen: &Arrived, tally: &mut Tally) -> Option<String> {
        let live = &self.live[usize::from(packet.family() == Family::V6)];
        let trace = live.trace(packet);
        tally.count(&trace);
        let agrees = trace.may.iter().any(|fate| seen.is(*fate, packet))
            || *seen == Arrived::Nothing && packet.sender == Sender::Outside && stays(&trace, live);
        // Where nobody else has rules every rule is understood, and the plan alone says the same.
        let planned = TraceRules::of_plan(&self.plan, packet.family()).fate(packet);
        let says_the_same = trace.fate() == planned && seen.is(planned, packet);
        if agrees && (!self.foreign.is_empty() || says_the_same) {
            return None;
        }
        Some(format!(
            "{seen:?} instead of {:?} (by the plan {planned:?})\n{}\n{}\n{}",
            trace.may,
            self.words,
            self.foreign.join("\n"),
            trace.text(Detail::Every)
        ))
    }
}

/// The commands of other programs' rules, for a family and a variant of iptables.
fn script(rules: &str, ipt: &str, v6: bool) -> String {
    let icmp = if v6 { "$ipt -t filter -A INPUT -p icmpv6 -j ACCEPT;" } else { "" };
    rules
        .replace("$icmp", icmp)
        .replace("$ipt", &format!("{}-{ipt} -w", if v6 { "ip6tables" } else { "iptables" }))
        .replace("$far", &remote_address(v6).to_string())
        .replace("$other", &other_address(v6).to_string())
}

fn random_rules(dice: &mut Dice, form: &str) -> Vec<String> {
    let ipt = if form == "iptables-legacy" { "legacy" } else { "nft" };
    let mut chosen = BTreeSet::new();
    for _ in 0..=dice.below(3) {
        chosen.insert(dice.below(FOREIGN.len()));
    }
    let both = |index: usize| {
        let each = if FOREIGN[index].starts_with("nft") { 1 } else { 2 };
        [false, true].into_iter().take(each).map(move |v6| script(FOREIGN[index], ipt, v6))
    };
    // Only one table can have the name.
    let mut nft = chosen.iter().copied().filter(|index| FOREIGN[*index].starts_with("nft"));
    let kept = nft.next();
    chosen
        .iter()
        .copied()
        .filter(|index| !FOREIGN[*index].starts_with("nft") || Some(*index) == kept)
        .flat_map(both)
        .collect()
}

/// Whether what the pod answers never leaves it, so that nobody sees where the packet has come to: a rule of other programs gave the packet
/// TPROXY's mark, and the answer gets the connection's.
fn stays(trace: &Trace, live: &TraceRules) -> bool {
    let mark = trace.steps.iter().rev().find_map(|step| {
        if let TraceEvent::Changed(PacketEdit::ConnectionMark { mark }) = step { *mark } else { None }
    });
    let Some((mark, source)) = mark.zip(trace.packet.source) else { return false };
    let to = SocketAddr::new(source, trace.packet.source_port.unwrap_or_default());
    let mut answer = Packet::from_pod(0, 0, trace.packet.destination, to).by("eth0");
    let connection = ConntrackEntry { state: ConnectionState::Reply, mark, translated_to: None };
    (answer.connection, answer.flags) = (connection, TcpFlags::SYN | TcpFlags::ACK);
    let answer = live.trace(&answer);
    answer.steps.contains(&TraceEvent::Changed(PacketEdit::Rerouted { interface: Some("lo".into()) }))
}

/// How many packets had which fate, and what was not understood on the way of those whose fate is unknown.
#[derive(Default)]
struct Tally {
    fates: BTreeMap<String, usize>,
    causes: BTreeMap<String, usize>,
}

impl Tally {
    fn count(&mut self, trace: &Trace) {
        *self.fates.entry(trace.fate().to_string()).or_default() += 1;
        if trace.fate() != Fate::Unknown {
            return;
        }
        for step in &trace.steps {
            if let TraceEvent::Rule { rule, outcome: Outcome::Unknown(_), .. } = step {
                *self.causes.entry(rule.clone()).or_default() += 1;
            }
        }
    }

    fn add(&mut self, other: Self) {
        for (all, more) in [(&mut self.fates, other.fates), (&mut self.causes, other.causes)] {
            for (name, count) in more {
                *all.entry(name).or_default() += count;
            }
        }
    }
}

fn try_plan(seed: u64) -> Result<(Vec<String>, Tally)> {
    let mut dice = Dice::new(seed);
    let pod = Pod::new(&mut dice)?;
    let (mut problems, mut tally) = (Vec::new(), Tally::default());
    for _ in 0..PACKETS {
        let packet = random_packet(&mut dice);
        let live = &pod.live[usize::from(packet.family() == Family::V6)];
        // Who expects no answer need not wait long for it.
        let trace = live.trace(&packet);
        let may_be_lost =
            trace.may.contains(&Fate::Dropped) || packet.sender == Sender::Outside && stays(&trace, live);
        let patience = if may_be_lost { IMPATIENT } else { ANSWER };
        let (packet, seen) = pod.world.play(&packet, patience)?;
        problems
            .extend(pod.judge(&packet, &seen, &mut tally).map(|problem| format!("seed {seed}: {problem}")));
    }
    Ok((problems, tally))
}

#[test]
fn the_kernel_does_with_every_packet_what_its_trace_says() -> Result<()> {
    let number = |name: &str, usual: usize| -> Result<usize> {
        std::env::var(name)
            .map_or(Ok(usual), |text| text.parse().with_context(|| format!("{name} is a number")))
    };
    let (first, plans) = (number("TRACE_SEED", 1)?, number("TRACE_PLANS", FEW_PLANS)?);
    let seeds: Vec<u64> = (first..first + plans).map(|seed| seed as u64).collect();
    let all = std::sync::Mutex::new(Tally::default());
    let problems = in_parallel(THREADS, &seeds, |_, seed| {
        let (problems, tally) = try_plan(*seed).with_context(|| format!("seed {seed}"))?;
        all.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(tally);
        Ok(problems)
    });
    let Tally { fates: tally, causes } = all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let packets: usize = tally.values().sum();
    println!("{packets} packets over {plans} plans: {tally:#?}, unknown because of {causes:#?}");
    ensure!(problems.is_empty(), "{} disagree\n{}", problems.len(), problems.join("\n\n"));
    ensure!(packets == plans * PACKETS, "only {packets} packets were sent");
    let fates = [Fate::Untouched, Fate::Dropped].map(|fate| fate.to_string());
    ensure!(
        fates.iter().all(|fate| tally.contains_key(fate)) && tally.len() >= 6,
        "hardly a variety: {tally:?}"
    );
    Ok(())
}

/// Also where the kernel has a single port to choose: the proxy's query would be taken for the application's, which was captured.
#[test]
fn no_packet_is_taken_for_an_earlier_one() -> Result<()> {
    let world = World::new()?;
    let plan = plan(&[(Key::DualStack, "true"), (Key::RedirectDns, "true")].into())?;
    world.pod().enter(|| apply(&plan, &ApplyOptions::default()))??;
    world.pod().enter(|| fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40000"))??;
    for v6 in [false, true] {
        let resolver = SocketAddr::new(remote_address(v6), 53);
        for (user, server) in [(1000, "dns"), (PROXY_ID, "resolver"), (1000, "dns")] {
            let query = Packet::from_pod(user, user, SocketAddr::new(pod_address(v6), 0), resolver);
            let (query, seen) = world.play(&query.by("eth0").over_udp(), ANSWER)?;
            ensure!(matches!(&seen, Arrived::At(name, _) if name == server), "{query}: {seen:?}");
        }
    }
    Ok(())
}

/// What is not understood in all rules of a namespace.
fn not_understood(ruleset: &HookedRules) -> Vec<String> {
    let chains = ruleset.tables.values().flat_map(|table| table.chains.values());
    let is_unknown = |rule: &&KernelRule| {
        rule.conditions.iter().any(|one| matches!(one, Condition::Unknown(_)))
            || rule.statements.iter().any(|one| matches!(one, Statement::Unknown(_)))
    };
    chains.flat_map(|chain| &chain.rules).filter(is_unknown).map(ToString::to_string).collect()
}

#[test]
fn rules_that_peers_write_are_understood_in_either_variant() -> Result<()> {
    for rules in FOREIGN {
        let variants: &[&str] = if rules.starts_with("nft") { &[""] } else { &["nft", "legacy"] };
        for ipt in variants {
            let pod = Namespace::pod(Families::Dual)?;
            for v6 in [false, true].into_iter().take(if rules.starts_with("nft") { 1 } else { 2 }) {
                pod.sh(&script(rules, ipt, v6))?;
            }
            let live = pod.enter(|| Live::now(None, &ApplyOptions::default()))??;
            let unknown = not_understood(&live.ruleset);
            let by_chance = unknown.iter().all(|rule| rule.contains("[-m statistic"));
            let wanted = if rules.contains("statistic") { 2 } else { 0 };
            ensure!(by_chance && unknown.len() == wanted, "{ipt} {rules}: {unknown:#?}");
        }
    }
    Ok(())
}
