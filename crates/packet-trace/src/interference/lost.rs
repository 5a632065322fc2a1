//! What keeps packets from where a plan means them to end: the exact sets of packets that it captures, and of those that it leaves alone
//! because they are the proxy's, walked through everything that a network namespace holds. Those that end elsewhere there count as lost,
//! and what decided about them is to blame.
//!
//! It uses the same walk as a trace of one packet, so a verdict over all traffic and the trace of any packet of it cannot
//! disagree.

use super::{
    PodTraffic,
    finding::{Accepted, Certainty, Effect, Finding, RuleRef, Traffic},
    starts::{Start, exempt_ports, starts},
};
use crate::{
    Fate, Listener, Packet,
    conditions::Test,
    difference::Region,
    packets::{Packets, VariedField, number, state},
    routes::{BOUND_TO_LINK, NO_RECEIVER, RouteEnd, words_of},
    rules::{ChainRule, Skipped, TraceRules},
    set::RangeSet,
    walk::{self, Cause, RouteLookup, TracePath, WalkInput, Ways, WorkBudget, routed},
};
use netfilter_state::ruleset::{Statement, TableName};
use redirect_core::{AmbientRedirect, accepted::AcceptedBy, plan::RulePlan, rule::Hook, values::Family};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    rc::Rc,
};

/// How many accepted rules one packet's way is walked without; what is lost to more of them counts as lost.
const MOST_SKIPPED: usize = 32;
/// How many findings are named at most.
const MOST_FINDINGS: usize = 16;
/// How much work a search through the rules of all families is at most: less than a fifth of a second, ...
const MOST_WORK: usize = 1_000_000;
/// ... and what each rule of the plan may add: its own rules never exhaust it.
const WORK_PER_RULE: usize = 200;
/// What a rule costs that is copied, and kept, to be walked without another one.
const WORK_PER_COPY: usize = 16;

/// Findings, each once.
#[derive(Default)]
pub(crate) struct Findings {
    found: BTreeMap<(RuleRef, Effect, Certainty), Finding>,
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
        let certain = self.found.values().filter(|finding| finding.severity == Certainty::Does);
        let certain: Vec<_> = certain
            .map(|one| ((one.place.clone(), one.effect, Certainty::May), one.traffic.clone()))
            .collect();
        for (key, traffic) in certain {
            if let Some(uncertain) = self.found.get_mut(&key) {
                uncertain.traffic.retain(|one| !traffic.contains(one));
                if uncertain.traffic.is_empty() {
                    self.found.remove(&key);
                }
            }
        }
        self.explain();
        let mut findings: Vec<Finding> = self.found.into_values().collect();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        findings
    }

    /// Omits what nothing explains of traffic for which another finding does: a certain one, or one about all of it.
    fn explain(&mut self) {
        let explains = |finding: &&Finding| finding.effect != Effect::Unexplained;
        let others = || self.found.values().filter(explains);
        let is_all = others().any(|finding| finding.traffic.is_empty());
        let certain = others().filter(|finding| finding.severity == Certainty::Does);
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

/// Adds what keeps packets of a family from where a plan means them to end, in a pod that holds these rules, and what does so because it is
/// meant. Each judgement is also passed on.
pub(super) fn search(
    plan: &RulePlan,
    rules: &Compared,
    pod: &PodTraffic<'_>,
    work: &mut WorkBudget,
    (findings, accepted): (&mut Findings, &mut AcceptedFindings),
    mut pass_on: impl FnMut(&Judge<'_>),
) {
    let live = &rules.live;
    let starts = starts(plan, live, pod);
    each_start(plan, &starts, rules, work, accepted, |judge| {
        judge.judge(findings);
        pass_on(judge);
    });
    if work.left == 0 {
        findings.add(unfollowed(live, work.ended_in));
    }
    search_routes(&starts, live, findings);
}

/// The rules whose effects on packets are compared.
pub(super) struct Compared {
    /// Those of a plan alone.
    pub(super) planned: TraceRules,
    /// All that a pod holds.
    pub(super) live: TraceRules,
}

/// How much work a search through all rules of a pod is at most, besides what those of its plan add.
pub(super) const fn most_work() -> WorkBudget {
    WorkBudget::of(MOST_WORK)
}

/// Adds what the rules of a plan may take.
fn add_for_plan(work: &mut WorkBudget, planned: &TraceRules) {
    let rules: usize = planned.chains.iter().map(|chain| chain.rules.len()).sum();
    work.left = work.left.saturating_add(rules.saturating_mul(WORK_PER_RULE));
}

/// Walks all packets that the planned rules capture, or leave alone because they are the proxy's, through the rules of a pod. Packets that
/// are lost to what is accepted are walked again as if that did nothing.
pub(super) fn each_start(
    plan: &RulePlan,
    starts: &[Start],
    Compared { planned, live }: &Compared,
    work: &mut WorkBudget,
    accepted: &mut AcceptedFindings,
    mut judge: impl FnMut(&Judge<'_>),
) {
    add_for_plan(work, planned);
    let (mut without, exempt_ports) = (Without { live, known: Vec::new() }, exempt_ports(plan));
    // Of what stays in the pod, queries are judged only where they come to the listener of DNS.
    let captures_dns = planned.captures_dns();
    let may_be_judged =
        |start: &&Start| captures_dns || start.traffic != Traffic::Dns || !start.is_within_pod();
    for start in starts.iter().filter(may_be_judged) {
        let meant = walk::all(planned, &start.packets, &start.given, work, false);
        let judged = |way| Some((way, traffic_of(start, way, &exempt_ports)?));
        for (wanted, traffic) in meant.ways.iter().filter_map(judged) {
            let found = walk::all(live, &wanted.packets, &start.given, work, false);
            let (traffic, is_sent) = ((live.family, traffic), start.given.is_local);
            let of = |found| Judge { live, wanted, found, traffic, is_sent, marked: &start.marked };
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
fn traffic_of(start: &Start, way: &TracePath, exempt_ports: &RangeSet) -> Option<Traffic> {
    let single = |field| way.packets.get(field).single();
    // The plan leaves what leaves the pod alone that belongs to one user or group, or has ztunnel's mark.
    let is_by_proxy = || {
        let is_ztunnels = !are_marked(&way.packets, &start.marked)
            && single(VariedField::Mark) == Some(AmbientRedirect::ZTUNNEL_MARK.value().into());
        let is_groups = start.traffic == Traffic::Outbound && single(VariedField::Group).is_some();
        is_ztunnels || is_groups || single(VariedField::User).is_some()
    };
    match (way.fate, start.traffic) {
        // What the proxy itself sends to that port of its pod is not a query.
        (Fate::Proxy { listener, .. }, Traffic::Dns) if start.is_within_pod() => {
            (listener == Listener::Dns).then_some(Traffic::Dns)
        }
        (Fate::Proxy { .. }, Traffic::ToApplication) => None,
        (Fate::Proxy { .. }, traffic) => Some(traffic),
        (Fate::Untouched, Traffic::ToApplication) => Some(Traffic::ToApplication),
        (Fate::Untouched, Traffic::Inbound) => {
            let is_exempt = way.packets.get(VariedField::Port).without(exempt_ports).is_empty();
            is_exempt.then_some(Traffic::ToProxy)
        }
        (Fate::Untouched, Traffic::Outbound | Traffic::Dns) if !start.is_within_pod() && is_by_proxy() => {
            Some(Traffic::ByProxy)
        }
        // So nothing of it comes past the proxy.
        (Fate::Dropped, traffic) if way.causes.last == Some(Cause::Route(BOUND_TO_LINK)) => Some(traffic),
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

impl Without<'_> {
    fn rules(&mut self, skipped: &BTreeSet<Skipped>, work: &mut WorkBudget) -> Rc<TraceRules> {
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
        given: &WalkInput,
        of: &impl Fn(&'j Ways) -> Judge<'j>,
        skipped: &BTreeSet<Skipped>,
        work: &mut WorkBudget,
        accepted: &mut AcceptedFindings,
    ) -> Ways {
        let Ways { ways, are_doubtful, unknown } = found;
        let mut settled = Ways { ways: Vec::new(), are_doubtful, unknown };
        let judge = of(NO_WAYS);
        for way in ways {
            let met = judge.accepted(&way);
            if met.is_empty() || skipped.len() >= MOST_SKIPPED {
                settled.ways.push(way);
                continue;
            }
            let mut without = skipped.clone();
            for (effect, cause, by) in met {
                let is_sure = !are_doubtful && !judge.is_marked(&way) && !are_related(&way.packets);
                let severity = if is_sure { Certainty::Does } else { Certainty::May };
                accepted.0.entry(by).or_default().add(judge.finding(&way, severity, effect, cause));
                without.extend(skipped_for(cause));
            }
            let rules = self.rules(&without, work);
            let again = walk::all(&rules, &way.packets, given, work, false);
            let again = self.settled(again, given, of, &without, work, accepted);
            settled.are_doubtful |= again.are_doubtful;
            settled.unknown.extend(again.unknown);
            settled.ways.extend(again.ways);
        }
        settled
    }
}

/// For a judge of one way.
const NO_WAYS: &Ways = &Ways { ways: Vec::new(), are_doubtful: false, unknown: BTreeSet::new() };

/// What a cause is skipped as.
const fn skipped_for(cause: Cause) -> Option<Skipped> {
    match cause {
        Cause::Rule(rule) => Some((rule.chain, Some(rule.rule))),
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
    Finding::of_place(Certainty::May, Effect::Unfollowed, place)
}

/// Whether they only open connections that others asked for, of which a pod has hardly any.
pub(super) fn are_related(packets: &Packets) -> bool {
    !packets.get(VariedField::State).contains(state::NEW)
}

/// Whether all of them have marks that the application has set.
fn are_marked(packets: &Packets, marked: &RangeSet) -> bool {
    !marked.is_empty() && packets.get(VariedField::Mark).without(marked).is_empty()
}

/// What becomes of packets that a plan captures in one way.
pub(super) struct Judge<'a> {
    live: &'a TraceRules,
    pub(super) wanted: &'a TracePath,
    pub(super) found: &'a Ways,
    pub(super) traffic: (Family, Traffic),
    /// Whether the pod sends them.
    pub(super) is_sent: bool,
    /// The marks that the application has set.
    marked: &'a RangeSet,
}

impl Judge<'_> {
    /// Whether the application has marked all packets of a way.
    pub(super) fn is_marked(&self, way: &TracePath) -> bool {
        are_marked(&way.packets, self.marked)
    }

    /// The packets of a way that the application has not marked; none where it has marked all.
    pub(super) fn unmarked(&self, way: &TracePath) -> Option<Packets> {
        if self.is_marked(way) {
            return None;
        }
        let mut packets = way.packets.clone();
        if !self.marked.is_empty() {
            packets.set(VariedField::Mark, way.packets.get(VariedField::Mark).without(self.marked));
        }
        Some(packets)
    }

    fn judge(&self, findings: &mut Findings) {
        let blamed: Vec<Option<(Effect, Cause)>> =
            self.found.ways.iter().map(|way| self.blame(way)).collect();
        if blamed.iter().all(Option::is_none) {
            return;
        }
        // A mark or a zone alone takes nothing from the proxy.
        let ways = self.found.ways.iter().zip(&blamed);
        let lost: Vec<Option<(Effect, Cause)>> =
            ways.map(|(way, blamed)| blamed.filter(|_| self.is_lost(way))).collect();
        for (number, (way, blamed)) in self.found.ways.iter().zip(&blamed).enumerate() {
            let Some((effect, cause)) = blamed else { continue };
            let severity = self.severity(number, &lost, *effect);
            for cause in self.each(way, *cause) {
                findings.add(self.finding(way, severity, *effect, cause));
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
        // Where a service leads what the plan leaves alone is its business, and so is what a firewall does not let pass of what other
        // connections asked for, or of what the application has marked.
        let is_led = way.fate == Fate::Translated
            && self.wanted.fate == Fate::Untouched
            && self.is_led_to_servers(way);
        let is_refused = matches!(way.fate, Fate::Dropped | Fate::Rejected | Fate::Broken)
            && (self.is_marked(way) || are_related(&way.packets));
        let is_meant = is_led || is_refused || self.reaches_nobody(way) || self.is_sent_by_nobody(way);
        way.fate != self.wanted.fate
            && !is_meant
            && !self.is_for_the_listener(way)
            && !self.is_redirected_there(way)
    }

    /// Whether they reach a server: where another program's DNAT leads them, or in the pod, if they are for the pod. REDIRECT,
    /// or a mark, keeps the proxy's connections to others in the pod, at the ports that they have.
    fn is_led_to_servers(&self, way: &TracePath) -> bool {
        if self.traffic.1 != Traffic::ByProxy {
            return true;
        }
        let Some(Cause::Rule(rule)) = way.causes.last else { return false };
        self.does(rule, |one| matches!(one, Statement::Translate(_)))
    }

    /// Whether another program's REDIRECT brings packets to the same port.
    fn is_redirected_there(&self, way: &TracePath) -> bool {
        let (Fate::Redirected { port }, Some(Cause::Rule(rule))) = (way.fate, way.causes.last) else {
            return false;
        };
        matches!(self.wanted.fate, Fate::Proxy { port: wanted, rewritten: true, .. } if wanted == port)
            && self.does(rule, |one| matches!(one, Statement::Redirect(Some(_))))
    }

    /// Whether they come from outside and from the very address that they go to.
    fn is_sent_by_nobody(&self, way: &TracePath) -> bool {
        let single = |field| way.packets.get(field).single();
        !self.is_sent
            && single(VariedField::Source).is_some_and(|from| single(VariedField::Destination) == Some(from))
    }

    /// Whether REDIRECT drops them because they come by an interface without an address, although others have one.
    fn reaches_nobody(&self, way: &TracePath) -> bool {
        way.causes.last == Some(Cause::Route(NO_RECEIVER)) && self.live.has_receiver()
    }

    /// Whether packets go to the listener's own port in this pod, and come to that port, whatever has kept or handed them there.
    fn is_for_the_listener(&self, way: &TracePath) -> bool {
        let Some(Fate::Proxy { port, .. }) = self.wanted.captured else { return false };
        let comes_there = match way.fate {
            Fate::Untouched => true,
            Fate::Proxy { port: at, .. } | Fate::Redirected { port: at } => at == port,
            Fate::Translated | Fate::Broken | Fate::Dropped | Fate::Rejected | Fate::Unknown => false,
        };
        matches!(self.traffic.1, Traffic::Inbound | Traffic::ProxyToSelf)
            && comes_there
            && way.packets.get(VariedField::Port).single() == Some(port.into())
    }

    /// What takes packets of a way from the proxy, and how; `None` if they reach it as planned, or if only the mesh
    /// decides.
    fn blame(&self, way: &TracePath) -> Option<(Effect, Cause)> {
        let causes = &way.causes;
        // Packets that are never sent cannot be lost.
        if way.is_unsent || way.fate != self.wanted.fate && !self.is_lost(way) {
            return None;
        }
        if way.fate == self.wanted.fate {
            let is_handed_over = matches!(way.fate, Fate::Proxy { rewritten: false, .. });
            if way.zone != self.wanted.zone {
                // Answers need the entry that says how they are translated back.
                let is_translated = matches!(way.fate, Fate::Proxy { rewritten: true, .. });
                let zoned = causes.zoned.filter(|_| is_translated);
                return done_by(Effect::EndsChain, causes.left_early)
                    .or_else(|| done_by(Effect::Untracks, zoned));
            }
            // Routing checks TPROXY's mark; what is for an address of the pod arrives without it, and so does what comes over lo.
            let differs = is_handed_over && !self.is_sent && way.mark != self.wanted.mark;
            return done_by(Effect::Remarks, causes.marked.filter(|_| differs));
        }
        if let Some(words) = causes.kept {
            return Some((Effect::Routes, Cause::Route(words)));
        }
        let hands_over = |rule| self.does(rule, |one| matches!(one, Statement::Tproxy { .. }));
        match (way.fate, causes.last) {
            (_, Some(Cause::Rule(rule))) if self.live.is_own(rule) && !self.is_lost_before(way) => {
                self.never_captured(way)
            }
            (Fate::Dropped | Fate::Rejected, Some(Cause::Policy(base))) => {
                Some((Effect::PolicyDrops, Cause::Policy(base)))
            }
            (_, Some(Cause::Route(words))) => Some((Effect::Routes, Cause::Route(words))),
            (Fate::Dropped | Fate::Rejected, Some(Cause::Rule(rule))) => {
                done_by(if hands_over(rule) { Effect::Tproxies } else { Effect::Drops }, Some(rule))
            }
            (
                Fate::Redirected { .. } | Fate::Translated | Fate::Broken | Fate::Proxy { .. },
                Some(Cause::Rule(rule)),
            ) => done_by(if hands_over(rule) { Effect::Tproxies } else { Effect::Translates }, Some(rule)),
            (Fate::Unknown, Some(Cause::Rule(rule))) => {
                let effect = if self.does(rule, |one| matches!(one, Statement::Queue)) {
                    Effect::Queues
                } else if self.does(rule, |one| matches!(one, Statement::Rewrite(_))) {
                    Effect::Rewrites
                } else {
                    Effect::Unknown
                };
                done_by(effect, Some(rule))
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
        done_by(Effect::Untracks, causes.untracked.filter(|_| is_rewritten))
            .or_else(|| done_by(Effect::Translates, causes.bound))
            .or_else(|| done_by(Effect::EndsChain, causes.left_early))
            .or_else(|| done_by(Effect::Remarks, causes.marked))
            .or(Some((Effect::Unexplained, causes.last.unwrap_or(Cause::Nothing))))
    }

    fn does(&self, rule: ChainRule, what: impl Fn(&Statement) -> bool) -> bool {
        self.live.rule(rule).is_some_and(|rule| rule.seen.statements.iter().any(what))
    }

    /// Its certainty. If the packets' path is unknown, they are lost for certain if they are lost on each; the last of
    /// what may lose them then does.
    fn severity(&self, number: usize, lost: &[Option<(Effect, Cause)>], effect: Effect) -> Certainty {
        let may = matches!(effect, Effect::Queues | Effect::Unknown | Effect::Rewrites | Effect::Unfollowed);
        let (Some(way), Some(Some((_, cause)))) = (self.found.ways.get(number), lost.get(number)) else {
            return Certainty::May;
        };
        let is_unusual = are_related(&way.packets) || self.is_marked(way);
        if may || way.fate == Fate::Unknown || is_unusual {
            return Certainty::May;
        }
        if !self.found.are_doubtful {
            return Certainty::Does;
        }
        let place = self.order(*cause);
        let is_certain = self.found.ways.iter().zip(lost).enumerate().all(|(other, (another, blamed))| {
            other == number
                || !overlap(&way.packets, &another.packets)
                || blamed.is_some_and(|(_, cause)| self.order(cause) <= place)
        });
        if is_certain { Certainty::Does } else { Certainty::May }
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

    fn finding(&self, way: &TracePath, severity: Certainty, effect: Effect, cause: Cause) -> Finding {
        let example = example(self.is_sent, &way.packets);
        let (place, rule) = match cause {
            Cause::Rule(rule) => {
                (self.place(rule.base, Some(rule)), self.live.rule(rule).map(|rule| rule.seen.to_string()))
            }
            Cause::Policy(base) => (self.place(base, None), None),
            Cause::Nothing => (RuleRef::table(TableName::of_family(self.live.family)), None),
            Cause::Route(words) => return of_route(self.live, severity, words, (self.traffic, example)),
        };
        Finding {
            rule: rule.unwrap_or_default(),
            traffic: [self.traffic].into(),
            example: Some(example),
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

/// An effect, and the rule that has it, if one does.
fn done_by(effect: Effect, rule: Option<ChainRule>) -> Option<(Effect, Cause)> {
    Some((effect, Cause::Rule(rule?)))
}

/// A policy rule or route keeps packets of this traffic from the pod: the one with these words.
fn of_route(
    live: &TraceRules,
    severity: Certainty,
    words: usize,
    (traffic, example): ((Family, Traffic), Packet),
) -> Finding {
    let place = RuleRef { rule: Some(words), ..RuleRef::table(TableName::of_family(live.family)) };
    Finding {
        rule: words_of(live.routes.as_ref(), words).unwrap_or_default(),
        traffic: [traffic].into(),
        example: Some(example),
        ..Finding::of_place(severity, Effect::Routes, place)
    }
}

/// Adds what routes the proxy's connections to the application elsewhere, whatever the rules.
fn search_routes(starts: &[Start], live: &TraceRules, findings: &mut Findings) {
    let traffic = (live.family, Traffic::ToApplication);
    for start in starts.iter().filter(|start| start.traffic == Traffic::ToApplication) {
        for way in routed(live, start.packets.clone(), RouteLookup::Sent) {
            let severity = if way.is_certain { Certainty::Does } else { Certainty::May };
            // What has no route at all is for an address that is just coming or going.
            let is_taken = matches!(way.end, RouteEnd::Out(_) | RouteEnd::Lost) && way.rule.is_some();
            if is_taken {
                let lost = (traffic, example(true, &way.packets));
                findings.add(of_route(live, severity, way.words, lost));
            }
        }
    }
}

/// One of these packets: if possible, one with addresses that other hosts use.
pub(crate) fn example(is_sent: bool, packets: &Packets) -> Packet {
    let far = match packets.family {
        Family::V4 => number(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 77))),
        Family::V6 => number(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x77, 0, 0, 0, 0, 0x77))),
    };
    let usual: [(VariedField, &[u128]); 6] = [
        (VariedField::Source, &[far]),
        (VariedField::Destination, &[far]),
        (VariedField::SourcePort, &[43_210, 1]),
        (VariedField::Port, &[80, 8080, 1]),
        (VariedField::User, &[1000, 1337]),
        (VariedField::Group, &[1000, 1337]),
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
    VariedField::ALL.iter().all(|field| !one.get(*field).and(other.get(*field)).is_empty())
}
