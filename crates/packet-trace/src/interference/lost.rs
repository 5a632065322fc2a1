//! What keeps packets from the proxy: the exact sets of packets that a plan captures, walked through everything that a network
//! namespace holds. Those that end elsewhere there count as lost, and what decided about them is to blame.
//!
//! It uses the same walk as a trace of one packet, so a verdict over all traffic and the trace of any packet of it cannot
//! disagree.

use super::{
    Pod,
    finding::{Accepted, Effect, Finding, RuleRef, Severity, Traffic},
};
use crate::{
    Fate, Listener, Packet,
    difference::Region,
    packets::{Field, Packets, interface, loopback, number, state},
    routes::RouteEnd,
    rules::{ChainRule, Skipped, Test, TraceRules},
    set::Set,
    walk::{self, Cause, Given, Lookup, TracePath, Ways, Work, routed},
};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    string::ToString,
    vec::Vec,
};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use netfilter_state::ruleset::{Statement, TableName};
use redirect_core::{
    accepted::AcceptedBy,
    ambient::ZTUNNEL_MARK,
    plan::{DataPlane, RulePlan},
    rule::{Hook, Protocol, TcpFlags},
    values::{Family, PASSTHROUGH_V4, PASSTHROUGH_V6, is_routable},
};

/// How many accepted rules one packet's way is walked without; what is lost to more of them counts as lost.
const MOST_SKIPPED: usize = 32;
/// How many findings are named at most.
const MOST_FINDINGS: usize = 16;
/// How much work one search is at most: some tenths of a second, ...
const MOST_WORK: usize = 2_000_000;
/// ... and what each rule of the plan may add: its own rules never exhaust it.
const WORK_PER_RULE: usize = 200;
/// What a rule costs that is copied, and kept, to be walked without another one.
const WORK_PER_COPY: usize = 16;
/// The port of DNS.
const DNS: u16 = 53;

/// Findings, each once.
#[derive(Default)]
pub(crate) struct Findings {
    found: BTreeMap<(RuleRef, Effect, Severity), Finding>,
}

impl Findings {
    pub(crate) fn add(&mut self, finding: Finding) {
        let key = (finding.place.clone(), finding.effect, finding.severity);
        let is_full = self.found.len() >= MOST_FINDINGS;
        match self.found.get_mut(&key) {
            Some(known) => known.traffic.extend(finding.traffic),
            None if is_full => {}
            None => {
                self.found.insert(key, finding);
            }
        }
    }

    /// The surest first. Omits a "may" finding for traffic that a certain finding covers.
    pub(crate) fn into_sorted(mut self) -> Vec<Finding> {
        let certain: Vec<_> =
            self.found.iter().filter(|((.., severity), _)| *severity == Severity::Does).collect();
        let certain: Vec<_> = certain
            .into_iter()
            .map(|((place, effect, _), one)| (place.clone(), *effect, one.traffic.clone()))
            .collect();
        for (place, effect, traffic) in certain {
            let key = (place, effect, Severity::May);
            if let Some(uncertain) = self.found.get_mut(&key) {
                uncertain.traffic.retain(|one| !traffic.contains(one));
                if uncertain.traffic.is_empty() {
                    self.found.remove(&key);
                }
            }
        }
        self.explain();
        let mut findings: Vec<Finding> = self.found.into_values().collect();
        findings.sort_by_key(|finding| core::cmp::Reverse(finding.severity));
        findings
    }

    /// Omits what nothing explains of traffic for which another finding does: a certain one, or one about all of it.
    fn explain(&mut self) {
        let explains = |finding: &&Finding| finding.effect != Effect::Unexplained;
        let others = || self.found.values().filter(explains);
        let is_all = others().any(|finding| finding.traffic.is_empty());
        let certain = others().filter(|finding| finding.severity == Severity::Does);
        let certain: Vec<_> = certain.flat_map(|finding| finding.traffic.iter().copied()).collect();
        self.found.retain(|_, finding| {
            if finding.effect == Effect::Unexplained {
                finding.traffic.retain(|one| !is_all && !certain.contains(one));
                return !finding.traffic.is_empty();
            }
            true
        });
    }
}

/// Captured traffic to walk: its name, and all packets that may belong to it.
struct Start {
    traffic: Traffic,
    packets: Packets,
    given: Given,
    other_end: OtherEnd,
}

/// Where the other end of traffic is.
#[derive(Clone, Copy)]
enum OtherEnd {
    /// At another host, which this address is then of.
    Host(Field),
    /// In the pod, at whichever of these destinations the pod delivers to itself.
    Resolver,
    /// In the pod.
    Itself,
}

/// Adds what keeps packets of a family, which the planned rules capture, from the proxy in a pod that holds these rules, and what does
/// so because it is meant.
pub(super) fn search(
    planned: &TraceRules,
    live: &TraceRules,
    pod: &Pod<'_>,
    findings: &mut Findings,
    accepted: &mut AcceptedFindings,
) {
    let mut work = most_work(planned);
    each_captured(planned, live, pod, &mut work, accepted, |judge| judge.judge(findings));
    if work.left == 0 {
        findings.add(unfollowed(live, work.ended_in));
    }
}

/// How much work a search through the rules of a pod with this plan is at most.
pub(super) fn most_work(planned: &TraceRules) -> Work {
    let rules: usize = planned.chains.iter().map(|chain| chain.rules.len()).sum();
    Work::of(MOST_WORK.saturating_add(rules.saturating_mul(WORK_PER_RULE)))
}

/// Walks all packets of a family that the planned rules capture through the rules of a pod. Packets that are lost to what is accepted
/// are walked again as if that did nothing.
pub(super) fn each_captured(
    planned: &TraceRules,
    live: &TraceRules,
    pod: &Pod<'_>,
    work: &mut Work,
    accepted: &mut AcceptedFindings,
    mut judge: impl FnMut(&Judge<'_>),
) {
    let mut without = Without::new(live);
    for mut start in starts(planned.family, pod) {
        let of_the_pod = live.routes.as_ref().map(|routes| &routes.of_nobody_else);
        match (start.other_end, of_the_pod) {
            (OtherEnd::Host(field), Some(own)) => {
                let others = start.packets.get(field).without(own);
                start.packets.set(field, others);
            }
            (OtherEnd::Resolver, Some(own)) => {
                let delivered = start.packets.get(Field::Destination).and(own);
                if delivered.is_empty() {
                    continue;
                }
                start.packets.set(Field::Destination, delivered);
            }
            (OtherEnd::Itself, _) | (_, None) => {}
        }
        let captured = walk::all(planned, &start.packets, &start.given, work, false);
        let judged = |way| Some((way, traffic_of(&start, way)?));
        for (wanted, traffic) in captured.ways.iter().filter_map(judged) {
            let found = walk::all(live, &wanted.packets, &start.given, work, false);
            let (traffic, is_sent) = ((live.family, traffic), start.given.is_local);
            let of = |found| Judge { live, wanted, found, traffic, is_sent };
            let settled = if live.accepts_any() {
                without.settled(found, &start.given, &of, &BTreeSet::new(), work, accepted)
            } else {
                found
            };
            judge(&of(&settled));
        }
    }
}

/// What packets are that a plan treats so; none where they are not judged.
fn traffic_of(start: &Start, way: &TracePath) -> Option<Traffic> {
    // The plan leaves the connections out of the pod alone that belong to one user or group.
    let is_of_one = || [Field::User, Field::Group].iter().any(|id| way.packets.get(*id).single().is_some());
    match (way.fate, start.traffic, start.other_end) {
        // What the proxy itself sends to that port of its pod is not a query.
        (Fate::Proxy { listener, .. }, traffic, OtherEnd::Resolver) => {
            (listener == Listener::Dns).then_some(traffic)
        }
        (Fate::Proxy { .. }, traffic, OtherEnd::Host(_) | OtherEnd::Itself) => Some(traffic),
        (Fate::Untouched, Traffic::Outbound, _) if is_of_one() => Some(Traffic::ByProxy),
        _ => None,
    }
}

/// What is lost to what is accepted, by who accepts it.
#[derive(Default)]
pub(super) struct AcceptedFindings(BTreeMap<AcceptedBy, Findings>);

impl AcceptedFindings {
    /// All of them, those of each who accepts one behind the other.
    pub(super) fn into_sorted(self) -> Vec<Accepted> {
        let of = |(by, findings): (AcceptedBy, Findings)| {
            findings.into_sorted().into_iter().map(move |finding| Accepted { finding, by })
        };
        self.0.into_iter().flat_map(of).collect()
    }
}

/// What is in force without some accepted rules: each kept, since the same ones are asked for repeatedly.
struct Without<'a> {
    live: &'a TraceRules,
    known: Vec<(BTreeSet<Skipped>, Rc<TraceRules>)>,
}

impl<'a> Without<'a> {
    const fn new(live: &'a TraceRules) -> Self {
        Self { live, known: Vec::new() }
    }

    fn rules(&mut self, skipped: &BTreeSet<Skipped>, work: &mut Work) -> Rc<TraceRules> {
        if let Some((_, rules)) = self.known.iter().find(|(known, _)| known == skipped) {
            return rules.clone();
        }
        let copied: usize = self.live.chains.iter().map(|chain| chain.rules.len()).sum();
        work.spend(copied.saturating_mul(WORK_PER_COPY));
        let rules = Rc::new(self.live.without(skipped));
        self.known.push((skipped.clone(), rules.clone()));
        rules
    }

    /// The ways of packets where those that are lost to accepted rules are walked again without these rules, until they are lost to
    /// another, or to none.
    fn settled<'j>(
        &mut self,
        found: Ways,
        given: &Given,
        of: &impl Fn(&'j Ways) -> Judge<'j>,
        skipped: &BTreeSet<Skipped>,
        work: &mut Work,
        accepted: &mut AcceptedFindings,
    ) -> Ways {
        let Ways { ways, are_all, are_doubtful, unknown } = found;
        let mut settled = Ways { ways: Vec::new(), are_all, are_doubtful, unknown };
        let judge = of(NO_WAYS);
        for way in ways {
            let met = judge.accepted(&way);
            if met.is_empty() || skipped.len() >= MOST_SKIPPED {
                settled.ways.push(way);
                continue;
            }
            let mut without = skipped.clone();
            for (effect, cause, by) in met {
                let is_sure = !are_doubtful && !are_related(&way.packets);
                let severity = if is_sure { Severity::Does } else { Severity::May };
                let example = Some(example(judge.is_sent, &way.packets));
                let finding = Finding { example, ..judge.finding(severity, effect, cause) };
                accepted.0.entry(by).or_default().add(finding);
                without.extend(skipped_for(cause));
            }
            let rules = self.rules(&without, work);
            let again = walk::all(&rules, &way.packets, given, work, false);
            let again = self.settled(again, given, of, &without, work, accepted);
            settled.are_all &= again.are_all;
            settled.are_doubtful |= again.are_doubtful;
            settled.unknown.extend(again.unknown);
            settled.ways.extend(again.ways);
        }
        settled
    }
}

/// For a judge of one way.
const NO_WAYS: &Ways =
    &Ways { ways: Vec::new(), are_all: true, are_doubtful: false, unknown: BTreeSet::new() };

/// What a cause is skipped as.
const fn skipped_for(cause: Cause) -> Option<Skipped> {
    match cause {
        Cause::Rule(rule) => Some(rule.skipped()),
        Cause::Policy(base) => Some((base, None)),
        Cause::Route(_) | Cause::Nothing => None,
    }
}

/// The search stopped at its limit. No single chain is to blame, but there it came to an end.
fn unfollowed(live: &TraceRules, ended_in: Option<usize>) -> Finding {
    let longest = || live.chains.iter().max_by_key(|chain| chain.rules.len());
    let place = ended_in.and_then(|chain| live.chains.get(chain)).or_else(longest).map_or_else(
        || RuleRef::table(TableName::of_family(live.family)),
        |chain| RuleRef { base_chain: chain.name.clone(), ..RuleRef::table(chain.table.clone()) },
    );
    Finding::of_place(Severity::May, Effect::Unfollowed, place)
}

/// The traffic of a pod that a plan may capture: first packets of connections, and datagrams to servers of DNS.
fn starts(family: Family, pod: &Pod<'_>) -> Vec<Start> {
    let is_own = |address: &&IpAddr| Family::of(address) == family && is_routable(address);
    let own: Vec<IpAddr> = pod.addresses.iter().filter(is_own).copied().collect();
    if own.is_empty() {
        return Vec::new();
    }
    let most = Field::Destination.most(family);
    let passthrough = passthrough(family);
    let localhost = match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    let own_set = Set::of(own.iter().map(|address| (number(*address), number(*address))).collect());
    // No connection to others goes to these.
    let all_own = pod.addresses.iter().filter(|address| Family::of(address) == family);
    let all_own = Set::of(all_own.map(|address| (number(*address), number(*address))).collect());
    let nobody = loopback(family).or(&all_own).or(&Set::one(number(passthrough))).or(&multicast(family));
    let far = nobody.complement(most);
    let lo = Set::one(interface("lo"));
    let interfaces = match pod.interfaces {
        [] => lo.complement(u128::MAX),
        names => Set::of(names.iter().map(|name| (interface(name), interface(name))).collect()),
    };
    let first = |protocol: Protocol| {
        let mut packets = Packets::all(family);
        packets.set_one(Field::Protocol, protocol.number());
        packets.set(Field::Flags, if protocol == Protocol::Tcp { opening_flags() } else { Set::one(0) });
        packets.set_one(Field::State, state::NEW);
        packets.set_one(Field::Mark, 0_u32);
        packets.set_one(Field::ConnMark, 0_u32);
        packets
    };
    let between = |packets: Packets, source: Set, destination: Set, by: &Set| {
        packets
            .with(Field::Source, source)
            .with(Field::Destination, destination)
            .with(Field::Interface, by.clone())
    };
    let one = |address: IpAddr| Set::one(number(address));
    let sent = || Given { is_local: true, asks_route: true, ..Given::default() };
    let mut starts = Vec::new();
    for address in &own {
        // Others may open what a connection of the pod asked for.
        let packets =
            between(first(Protocol::Tcp), far.clone(), one(*address), &reached_by(family, pod, &interfaces))
                .with(Field::State, Set::range(state::NEW, state::RELATED));
        let (given, other_end) =
            (Given { own: Some(*address), ..Given::default() }, OtherEnd::Host(Field::Source));
        starts.push(Start { traffic: Traffic::Inbound, packets, given, other_end });
    }
    let mut add = |traffic: Traffic, packets: Packets, other_end: OtherEnd| {
        starts.push(Start { traffic, packets, given: sent(), other_end });
    };
    let to_others = OtherEnd::Host(Field::Destination);
    let packets = between(first(Protocol::Tcp), own_set.clone(), far.clone(), &interfaces);
    add(Traffic::Outbound, packets, to_others);
    let itself = own.iter().map(|address| (*address, *address)).chain([(localhost, passthrough)]);
    for (from, to) in itself {
        add(Traffic::ProxyToSelf, between(first(Protocol::Tcp), one(from), one(to), &lo), OtherEnd::Itself);
    }
    let queries = |packets: Packets| packets.with(Field::Port, Set::one(DNS.into()));
    add(Traffic::Dns, queries(between(first(Protocol::Udp), own_set, far, &interfaces)), to_others);
    // A resolver in the pod, such as one at 127.0.0.53. What goes elsewhere over TCP was added above.
    let mut to_resolvers = |protocol: Protocol, from: IpAddr, to: Set| {
        add(Traffic::Dns, queries(between(first(protocol), one(from), to, &lo)), OtherEnd::Resolver);
    };
    to_resolvers(Protocol::Tcp, localhost, loopback(family));
    to_resolvers(Protocol::Udp, localhost, loopback(family));
    own.iter().for_each(|address| to_resolvers(Protocol::Udp, *address, one(*address)));
    starts
}

/// The interfaces by which others reach a pod over a family: those with an address of it, if any has one. Another may belong to
/// a network that knows the family as little.
fn reached_by(family: Family, pod: &Pod<'_>, interfaces: &Set) -> Set {
    let of_family = pod.by_interface.unwrap_or_default().iter().filter(|(_, at)| Family::of(at) == family);
    let with_address = Set::of(of_family.map(|(name, _)| (interface(name), interface(name))).collect());
    match interfaces.and(&with_address) {
        none if none.is_empty() => interfaces.clone(),
        some => some,
    }
}

/// The sets of flags of a segment that opens a connection: a sender that offers ECN sets two more, and data one.
fn opening_flags() -> Set {
    let opens = (0..=u8::MAX).filter(|flags| TcpFlags::OPENING.covers(*flags));
    Set::of(opens.map(|flags| (flags.into(), flags.into())).collect())
}

/// Whether they only open connections that others asked for, of which a pod has hardly any.
pub(super) fn are_related(packets: &Packets) -> bool {
    !packets.get(Field::State).contains(state::NEW)
}

/// Addresses of many hosts, and of none.
pub(crate) fn multicast(family: Family) -> Set {
    match family {
        // 0.0.0.0, 224.0.0.0/4 and beyond.
        Family::V4 => Set::of([(0, 0), (0xe000_0000, 0xffff_ffff)].into()),
        // ::, ff00::/8.
        Family::V6 => Set::of([(0, 0), (0xff << 120, u128::MAX)].into()),
    }
}

/// What becomes of packets that a plan captures in one way.
pub(super) struct Judge<'a> {
    live: &'a TraceRules,
    pub(super) wanted: &'a TracePath,
    pub(super) found: &'a Ways,
    pub(super) traffic: (Family, Traffic),
    /// Whether the pod sends them.
    pub(super) is_sent: bool,
}

impl Judge<'_> {
    fn judge(&self, findings: &mut Findings) {
        let blamed: Vec<Option<(Effect, Cause)>> =
            self.found.ways.iter().map(|way| self.blame(way)).collect();
        // A mark or a zone alone takes nothing from the proxy.
        let ways = self.found.ways.iter().zip(&blamed);
        let lost: Vec<Option<(Effect, Cause)>> =
            ways.map(|(way, blamed)| blamed.filter(|_| self.is_lost(way))).collect();
        for (number, (way, blamed)) in self.found.ways.iter().zip(&blamed).enumerate() {
            let Some((effect, cause)) = blamed else { continue };
            let severity =
                if self.is_lost(way) { self.severity(number, &lost, *effect) } else { Severity::May };
            for cause in self.each(way, *cause) {
                let example = Some(example(self.is_sent, &way.packets));
                findings.add(Finding { example, ..self.finding(severity, *effect, cause) });
            }
        }
    }

    /// The accepted rules and policies that take packets of a way from the proxy, how, and who accepts each.
    fn accepted(&self, way: &TracePath) -> Vec<(Effect, Cause, AcceptedBy)> {
        let Some((effect, cause)) = self.blame(way) else { return Vec::new() };
        let of = |cause: Cause| Some((effect, cause, self.live.accepts(skipped_for(cause)?)?));
        self.each(way, cause).into_iter().filter_map(of).collect()
    }

    /// Whether packets do not come to the proxy. A packet with another mark, or in another zone, does come to it.
    pub(super) fn is_lost(&self, way: &TracePath) -> bool {
        // Where a service leads the proxy's own connections is its business, and so is what a firewall does not let pass of those that
        // other connections asked for.
        let is_led = way.fate == Fate::Translated && self.traffic.1 == Traffic::ByProxy;
        let is_refused = matches!(way.fate, Fate::Dropped | Fate::Rejected) && are_related(&way.packets);
        let is_meant = is_led || is_refused;
        way.fate != self.wanted.fate && !is_meant && !self.is_for_the_listener(way)
    }

    /// Whether untouched packets go to the listener's own port in this pod, and so reach it.
    fn is_for_the_listener(&self, way: &TracePath) -> bool {
        let Fate::Proxy { port, .. } = self.wanted.fate else { return false };
        matches!(self.traffic.1, Traffic::Inbound | Traffic::ProxyToSelf)
            && way.fate == Fate::Untouched
            && way.packets.get(Field::Port).single() == Some(port.into())
    }

    /// What takes packets of a way from the proxy, and how; `None` if they reach it as planned, or if only the mesh
    /// decides.
    fn blame(&self, way: &TracePath) -> Option<(Effect, Cause)> {
        let causes = &way.causes;
        let of = |effect: Effect, rule: Option<ChainRule>| Some((effect, Cause::Rule(rule?)));
        // Packets that are never sent cannot be lost.
        if way.is_unsent || way.fate != self.wanted.fate && !self.is_lost(way) {
            return None;
        }
        if way.fate == self.wanted.fate {
            let is_handed_over = matches!(way.fate, Fate::Proxy { rewritten: false, .. });
            if way.zone != self.wanted.zone {
                return of(Effect::EndsChain, causes.left_early);
            }
            // Routing checks TPROXY's mark; what is for an address of the pod arrives without it, and so does what comes over lo.
            let differs = is_handed_over && !self.is_sent && way.mark != self.wanted.mark;
            return of(Effect::Remarks, causes.marked.filter(|_| differs));
        }
        if let Some(words) = causes.kept {
            return Some((Effect::Routes, Cause::Route(words)));
        }
        match (way.fate, causes.last) {
            (_, Some(Cause::Rule(rule))) if self.live.is_own(rule) && !self.is_lost_before(way) => {
                self.never_captured(way)
            }
            (Fate::Dropped | Fate::Rejected, Some(Cause::Policy(base))) => {
                Some((Effect::PolicyDrops, Cause::Policy(base)))
            }
            (_, Some(Cause::Route(words))) => Some((Effect::Routes, Cause::Route(words))),
            (Fate::Dropped | Fate::Rejected, Some(Cause::Rule(rule))) => of(Effect::Drops, Some(rule)),
            (
                Fate::Redirected { .. } | Fate::Translated | Fate::Broken | Fate::Proxy { .. },
                Some(Cause::Rule(rule)),
            ) => {
                let hands_over = self.does(rule, |one| matches!(one, Statement::Tproxy { .. }));
                of(if hands_over { Effect::Tproxies } else { Effect::Translates }, Some(rule))
            }
            (Fate::Unknown, Some(Cause::Rule(rule))) => {
                let effect = if self.does(rule, |one| matches!(one, Statement::Queue)) {
                    Effect::Queues
                } else if self.does(rule, |one| matches!(one, Statement::Rewrite(_))) {
                    Effect::Rewrites
                } else {
                    Effect::Unknown
                };
                of(effect, Some(rule))
            }
            _ => self.never_captured(way),
        }
    }

    /// Whether another rule than the mesh's own is the reason that its rules were not met.
    const fn is_lost_before(&self, way: &TracePath) -> bool {
        matches!(way.fate, Fate::Untouched)
            && (way.causes.left_early.is_some() || way.causes.untracked.is_some())
    }

    fn never_captured(&self, way: &TracePath) -> Option<(Effect, Cause)> {
        let causes = &way.causes;
        let is_rewritten = matches!(self.wanted.fate, Fate::Proxy { rewritten: true, .. });
        let of = |effect: Effect, rule: Option<ChainRule>| Some((effect, Cause::Rule(rule?)));
        of(Effect::Untracks, causes.untracked.filter(|_| is_rewritten))
            .or_else(|| of(Effect::Translates, causes.bound))
            .or_else(|| of(Effect::EndsChain, causes.left_early))
            .or_else(|| of(Effect::Remarks, causes.marked))
            .or(Some((Effect::Unexplained, causes.last.unwrap_or(Cause::Nothing))))
    }

    fn does(&self, rule: ChainRule, what: impl Fn(&Statement) -> bool) -> bool {
        self.live.rule(rule).is_some_and(|rule| rule.seen.statements.iter().any(what))
    }

    /// Its certainty. If the packets' path is unknown, they are lost for certain if they are lost on each; the last of
    /// what may lose them then does.
    fn severity(&self, number: usize, lost: &[Option<(Effect, Cause)>], effect: Effect) -> Severity {
        let may = matches!(effect, Effect::Queues | Effect::Unknown | Effect::Rewrites | Effect::Unfollowed);
        let is_unknown = self.found.ways.get(number).is_none_or(|way| way.fate == Fate::Unknown);
        let is_related = self.found.ways.get(number).is_none_or(|way| are_related(&way.packets));
        if may || is_unknown || is_related {
            return Severity::May;
        }
        if !self.found.are_doubtful {
            return Severity::Does;
        }
        let (Some(way), Some(Some((_, cause)))) = (self.found.ways.get(number), lost.get(number)) else {
            return Severity::May;
        };
        let place = self.order(*cause);
        let is_certain = self.found.ways.iter().zip(lost).enumerate().all(|(other, (another, blamed))| {
            other == number
                || !overlap(&way.packets, &another.packets)
                || blamed.is_some_and(|(_, cause)| self.order(cause) <= place)
        });
        if is_certain { Severity::Does } else { Severity::May }
    }

    /// The position of a cause on a packet's path.
    fn order(&self, cause: Cause) -> (u8, usize, usize, usize) {
        let of_base = |base: usize| {
            let hook = self.live.base(base).map_or(Hook::Output, |(_, base)| base.hook);
            let place = self.live.hooked(hook).iter().position(|chain| *chain == base);
            (passed(hook), place.unwrap_or(usize::MAX))
        };
        match cause {
            Cause::Rule(rule) => {
                let (hook, place) = of_base(rule.base);
                (hook, place, rule.chain, rule.rule)
            }
            Cause::Policy(base) => {
                let (hook, place) = of_base(base);
                (hook, place, usize::MAX, usize::MAX)
            }
            Cause::Route(words) => (passed(Hook::Output), usize::MAX, words, 0),
            Cause::Nothing => (passed(Hook::Forward), usize::MAX, 0, 0),
        }
    }

    /// The rules that a cause stands for, as far as they are about packets of the way.
    fn each(&self, way: &TracePath, cause: Cause) -> Vec<Cause> {
        let Cause::Rule(rule) = cause else { return [cause].into() };
        if self.live.is_own(rule) {
            return [Cause::Rule(ChainRule { count: 1, ..rule })].into();
        }
        let all = (rule.rule..rule.rule.saturating_add(rule.count)).map(|number| ChainRule {
            rule: number,
            count: 1,
            ..rule
        });
        let is_about = |one: &ChainRule| {
            let tests = self.live.rule(*one).map_or(&[][..], |rule| &rule.tests);
            let is_out_of = |test: &Test| matches!(test, Test::In(field, set) if way.packets.get(*field).and(set).is_empty());
            !tests.iter().any(is_out_of)
        };
        let mut about: Vec<Cause> = all.filter(is_about).take(MOST_FINDINGS).map(Cause::Rule).collect();
        if about.is_empty() {
            // Of packets that were translated by then.
            about.push(Cause::Rule(ChainRule { count: 1, ..rule }));
        }
        about
    }

    fn finding(&self, severity: Severity, effect: Effect, cause: Cause) -> Finding {
        let (place, rule) = match cause {
            Cause::Rule(rule) => {
                (self.place(rule.base, Some(rule)), self.live.rule(rule).map(|rule| rule.seen.to_string()))
            }
            Cause::Policy(base) => (self.place(base, None), None),
            Cause::Nothing => (RuleRef::table(TableName::of_family(self.live.family)), None),
            Cause::Route(words) => return of_route(self.live, severity, words, self.traffic),
        };
        Finding {
            rule: rule.unwrap_or_default(),
            traffic: [self.traffic].into(),
            ..Finding::of_place(severity, effect, place)
        }
    }

    fn place(&self, base: usize, rule: Option<ChainRule>) -> RuleRef {
        let base_chain = self.live.base(base);
        let is_hooked = base_chain.is_some_and(|(_, hooked)| self.live.hooked(hooked.hook).contains(&base));
        let chain =
            rule.and_then(|rule| self.live.chains.get(rule.chain)).or(base_chain.map(|(chain, _)| chain));
        RuleRef {
            table: chain.map_or_else(|| TableName::of_family(self.live.family), |chain| chain.table.clone()),
            base_chain: base_chain.map(|(chain, _)| chain.name.clone()).unwrap_or_default(),
            hook: base_chain.filter(|_| is_hooked).map(|(_, base)| (base.hook, base.priority)),
            chain: chain.map(|chain| chain.name.clone()).unwrap_or_default(),
            rule: rule.map(|rule| rule.rule.saturating_add(1)),
        }
    }
}

/// A policy rule or route keeps packets from the pod: the one with these words.
fn of_route(live: &TraceRules, severity: Severity, words: usize, traffic: (Family, Traffic)) -> Finding {
    let place = RuleRef { rule: Some(words), ..RuleRef::table(TableName::of_family(live.family)) };
    let rule = live.routes.as_ref().and_then(|routes| routes.words.get(words)).cloned();
    Finding {
        rule: rule.unwrap_or_default(),
        traffic: [traffic].into(),
        ..Finding::of_place(severity, Effect::Routes, place)
    }
}

/// Adds what routes the proxy's connections to its own pod elsewhere. They come from the address that is kept for that or, where the plan
/// marks packets, in the name of the client.
pub(super) fn search_proxy(plan: &RulePlan, live: &TraceRules, pod: &Pod<'_>, findings: &mut Findings) {
    let family = live.family;
    let traffic = (family, Traffic::ProxyToSelf);
    for mut start in starts(family, pod).into_iter().filter(|start| start.traffic == Traffic::Inbound) {
        let (source, mark) = match (plan.policy_routes(), plan.data_plane()) {
            (None, _) => (Set::one(number(passthrough(family))), 0),
            (Some(routes), DataPlane::Sidecar) => {
                (start.packets.get(Field::Source).clone(), routes.mark().value())
            }
            (Some(_), DataPlane::Ambient) => (start.packets.get(Field::Source).clone(), ZTUNNEL_MARK.value()),
        };
        start.packets.set(Field::Source, source);
        start.packets.set_one(Field::Mark, mark);
        for way in routed(live, start.packets, Lookup::Sent) {
            let severity = if way.is_certain { Severity::Does } else { Severity::May };
            // What has no route at all is for an address that is just coming or going.
            let is_taken = matches!(way.end, RouteEnd::Out(_) | RouteEnd::Lost) && way.rule.is_some();
            if is_taken {
                let example = Some(example(true, &way.packets));
                findings.add(Finding { example, ..of_route(live, severity, way.words, traffic) });
            }
        }
    }
}

const fn passthrough(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(PASSTHROUGH_V4),
        Family::V6 => IpAddr::V6(PASSTHROUGH_V6),
    }
}

/// One of these packets: if possible, one with addresses that other hosts use.
pub(crate) fn example(is_sent: bool, packets: &Packets) -> Packet {
    let far = match packets.family {
        Family::V4 => number(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 77))),
        Family::V6 => number(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x77, 0, 0, 0, 0, 0x77))),
    };
    let usual: [(Field, &[u128]); 6] = [
        (Field::Source, &[far]),
        (Field::Destination, &[far]),
        (Field::SourcePort, &[43_210, 1]),
        (Field::Port, &[80, 8080, 1]),
        (Field::User, &[1000, 1337]),
        (Field::Group, &[1000, 1337]),
    ];
    let mut packets = packets.clone();
    for (field, values) in usual {
        if let Some(value) = values.iter().find(|value| packets.get(field).contains(**value)) {
            packets.set_one(field, *value);
        }
    }
    Region::new(is_sent, packets).example()
}

/// How many hooks what the pod sends to itself has passed before this one.
const fn passed(hook: Hook) -> u8 {
    match hook {
        Hook::Output => 0,
        Hook::Postrouting => 1,
        Hook::Prerouting => 2,
        Hook::Input => 3,
        Hook::Forward => 4,
    }
}

/// Whether there may be packets of both.
fn overlap(one: &Packets, other: &Packets) -> bool {
    Field::ALL.iter().all(|field| !one.get(*field).and(other.get(*field)).is_empty())
}
