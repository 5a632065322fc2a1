//! The way of a packet through everything that hangs on its hooks.

use super::{
    Effect, Finding, Place, Pod, Severity, Traffic,
    packet::{Act, Capture, DEEPEST, Packet},
    ruleset::{
        Base, ChainState, Condition, Ruleset, SeenRule, Statement, TableFamily, TableName, TableState,
    },
    traffic::Flow,
};
use crate::{
    plan::FamilyRules,
    render::{NFT_TABLES, nft_chain_name, nft_table},
    rule::{Chain, Hook},
    values::Family,
};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    string::{String, ToString},
    vec::Vec,
};
use core::{
    cmp::Ordering,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// How many findings are told at most.
const MOST_FINDINGS: usize = 16;
/// How many packets of one kind of traffic are tried at most.
const MOST_PACKETS: usize = 256;
/// How many rules are met at most, by all packets together; a tenth of a second's work.
const MOST_STEPS: usize = 1_000_000;
/// Where the kernel translates destinations, whatever the priority of the chains it asks for that (`NF_IP_PRI_NAT_DST`).
const TRANSLATION: i32 = -100;
/// Where connection tracking begins (`NF_IP_PRI_CONNTRACK`).
const TRACKING: i32 = -200;

/// Findings, each once.
#[derive(Default)]
pub(super) struct Findings {
    found: BTreeMap<(Place, Effect), Finding>,
}

impl Findings {
    fn is_full(&self) -> bool {
        self.found.len() >= MOST_FINDINGS
    }

    fn add(&mut self, finding: Finding) {
        let key = (finding.place.clone(), finding.effect);
        let is_full = self.is_full();
        match self.found.get_mut(&key) {
            Some(known) => {
                known.severity = known.severity.max(finding.severity);
                known.traffic.extend(finding.traffic);
            }
            None if is_full => {}
            None => {
                self.found.insert(key, finding);
            }
        }
    }

    pub(super) fn into_sorted(self) -> Vec<Finding> {
        let mut findings: Vec<Finding> = self.found.into_values().collect();
        findings.sort_by_key(|finding| core::cmp::Reverse(finding.severity));
        findings
    }
}

/// What is wrong with the tables of the mesh themselves: dormant, or a policy that drops what the rules leave alone.
pub(super) fn own_tables(ruleset: &Ruleset, findings: &mut Findings) {
    for (name, table) in &ruleset.tables {
        let about = |place: Place, effect| Finding {
            severity: Severity::Does,
            place,
            rule: String::new(),
            effect,
            traffic: BTreeSet::new(),
        };
        let whole = Place {
            table: name.clone(),
            base_chain: String::new(),
            hook: None,
            chain: String::new(),
            rule: None,
        };
        let mut own = table.chains.iter().filter(|(_, chain)| is_own(name, chain)).peekable();
        if table.dormant && own.peek().is_some() {
            findings.add(about(whole.clone(), Effect::Dormant));
            continue;
        }
        for (chain_name, chain) in own {
            if let Some(base) = chain.base.filter(|base| base.drops) {
                let hook = Some((base.hook, base.priority));
                let (base_chain, chain) = (chain_name.clone(), chain_name.clone());
                findings.add(about(Place { base_chain, hook, chain, ..whole.clone() }, Effect::PolicyDrops));
            }
        }
    }
}

/// Whether a chain is the mesh's, or holds jumps to the mesh's.
fn is_own(table: &TableName, chain: &ChainState) -> bool {
    is_native(table) || chain.rules.iter().flat_map(|rule| &rule.statements).any(jumps_to_the_mesh)
}

fn is_native(table: &TableName) -> bool {
    table.family == TableFamily::Inet && NFT_TABLES.contains(&table.name.as_str())
}

fn jumps_to_the_mesh(statement: &Statement) -> bool {
    matches!(statement, Statement::Jump(to) | Statement::Goto(to) if Chain::named(to).is_the_meshs())
}

/// Sends captured packets of one family on their way, and notes what they meet.
pub(super) fn search(
    ruleset: &Ruleset,
    rules: &FamilyRules,
    family: Family,
    pod: &Pod<'_>,
    findings: &mut Findings,
) {
    let mut steps = MOST_STEPS;
    for flow in Flow::all(rules, family, pod) {
        let mut search = Search { ruleset, family, flow: &flow, findings, steps: &mut steps };
        search.run();
    }
}

struct Search<'a, 's> {
    ruleset: &'a Ruleset,
    family: Family,
    flow: &'s Flow<'a>,
    findings: &'s mut Findings,
    /// How many rules may still be met.
    steps: &'s mut usize,
}

/// A base chain on a packet's way.
#[derive(Clone, Copy)]
struct Hooked<'a> {
    table_name: &'a TableName,
    table: &'a TableState,
    name: &'a str,
    chain: &'a ChainState,
    base: Base,
}

impl Hooked<'_> {
    /// Its place among the chains of a hook: chains that translate are asked together, in the order of their priorities.
    fn order(&self) -> (i32, i32) {
        if self.base.is_nat { (TRANSLATION, self.base.priority) } else { (self.base.priority, 0) }
    }
}

/// Where a base chain stands, compared with the mesh's that captures.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    /// It goes first.
    Before,
    /// It has the same priority: whichever was made last goes first.
    Unsure,
    /// It is the mesh's.
    Own,
    /// It comes after the capture, on the same hook or a later one.
    After,
}

/// A base chain together with what a packet looks like there.
#[derive(Clone, Copy)]
struct Station<'a> {
    hooked: Hooked<'a>,
    position: Position,
    /// How the packet is changed by then.
    stage: Stage,
}

/// How far a packet has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Before its capture.
    Original,
    /// Behind its capture, on the same hook.
    Captured,
    /// On a later hook.
    Later(Hook),
}

impl<'a> Search<'a, '_> {
    fn run(&mut self) {
        let Some((packet, acts)) = self.example() else { return };
        let Some(stations) = self.stations(&packet, &acts) else { return };
        let mut packets: Vec<Packet> = Vec::new();
        let mut tried: BTreeSet<Packet> = BTreeSet::new();
        packets.extend(self.flow.usual.iter().rev().cloned());
        for station in &stations {
            self.aim(station, &mut packets);
        }
        while let Some(packet) = packets.pop() {
            if self.findings.is_full() {
                return;
            }
            if tried.len() >= MOST_PACKETS || *self.steps == 0 {
                return self.unfollowed(&stations);
            }
            if tried.insert(packet.clone()) {
                self.send(&packet, &stations);
            }
        }
    }

    /// One packet that is captured, and what the plan does with it.
    fn example(&self) -> Option<(Packet, Vec<Act<'a>>)> {
        let packet = self.flow.usual.first()?;
        Some((packet.clone(), self.flow.acts(packet)))
    }

    /// The base chains on the way, in their order. `None` where the mesh's own is missing or dormant, which is told otherwise.
    fn stations(&self, packet: &Packet, acts: &[Act<'a>]) -> Option<Vec<Station<'a>>> {
        let capturing = acts.iter().find(|act| act.capture.is_some())?;
        let here = self.hooked_on(self.flow.hook);
        let own = *here.iter().find(|hooked| holds(hooked, capturing))?;
        let mut stations = Vec::new();
        for hooked in here {
            let is_own = acts.iter().any(|act| holds(&hooked, act));
            let position = match hooked.order().cmp(&own.order()) {
                _ if is_own => Position::Own,
                Ordering::Less => Position::Before,
                Ordering::Equal => Position::Unsure,
                Ordering::Greater => Position::After,
            };
            let stage = if position == Position::After { Stage::Captured } else { Stage::Original };
            // Once a connection is translated, nobody is asked again.
            let bound = own.base.is_nat && hooked.base.is_nat && position == Position::After;
            if !bound {
                stations.push(Station { hooked, position, stage });
            }
        }
        let later: &[Hook] = match self.flow.hook {
            Hook::Output => &[Hook::Postrouting, Hook::Prerouting, Hook::Input],
            Hook::Prerouting => &[Hook::Input],
            Hook::Input | Hook::Forward | Hook::Postrouting => &[],
        };
        for hook in later {
            let translates = matches!(hook, Hook::Prerouting) && packet.owner.is_some();
            for hooked in self.hooked_on(*hook) {
                if !(hooked.base.is_nat && translates) && !is_native(hooked.table_name) {
                    let stage = Stage::Later(*hook);
                    stations.push(Station { hooked, position: Position::After, stage });
                }
            }
        }
        Some(stations)
    }

    fn hooked_on(&self, hook: Hook) -> Vec<Hooked<'a>> {
        let tables = self.ruleset.tables.iter();
        let awake = tables.filter(|(name, table)| name.family.covers(self.family) && !table.dormant);
        let chains = awake.flat_map(|(table_name, table)| {
            table.chains.iter().filter_map(move |(name, chain)| {
                let base = chain.base.filter(|base| base.hook == hook)?;
                Some(Hooked { table_name, table, name, chain, base })
            })
        });
        let mut chains: Vec<Hooked<'a>> = chains.collect();
        chains.sort_by_key(Hooked::order);
        chains
    }

    /// Adds packets that the rules of a station are about.
    fn aim(&mut self, station: &Station<'a>, packets: &mut Vec<Packet>) {
        let mut path = Vec::new();
        self.aim_at(station, station.hooked.chain, &mut path, 0, packets);
    }

    fn aim_at(
        &mut self,
        station: &Station<'a>,
        chain: &'a ChainState,
        path: &mut Vec<&'a Condition>,
        depth: usize,
        packets: &mut Vec<Packet>,
    ) {
        for rule in &chain.rules {
            if *self.steps == 0 || packets.len() >= MOST_PACKETS || depth > DEEPEST {
                return;
            }
            *self.steps = self.steps.saturating_sub(1);
            let before = path.len();
            path.extend(&rule.conditions);
            for statement in &rule.statements {
                if let Statement::Jump(to) | Statement::Goto(to) = statement {
                    let chain = station.hooked.table.chains.get(to);
                    if let Some(chain) = chain.filter(|_| !jumps_to_the_mesh(statement)) {
                        self.aim_at(station, chain, path, depth.saturating_add(1), packets);
                    }
                }
            }
            let interferes = rule.statements.iter().any(|one| station.is_worth_a_try(one));
            // Without a condition any packet will do.
            if interferes && !path.is_empty() {
                let view = |packet: &Packet, capture| station.stage.view(packet, capture);
                packets.extend(self.flow.aimed(path, &view));
                *self.steps = self.steps.saturating_sub(50);
            }
            path.truncate(before);
        }
    }

    fn send(&mut self, packet: &Packet, stations: &[Station<'a>]) {
        let acts = self.flow.acts(packet);
        let Some(capture) = acts.iter().find_map(|act| act.capture) else { return };
        let mut mark = packet.mark;
        for station in stations {
            let mut packet = station.stage.view(packet, capture);
            if station.stage == Stage::Original {
                packet.mark = mark;
            }
            let act = acts.iter().find(|act| holds(&station.hooked, act));
            let to = act.map(|act| (act.to, is_native(station.hooked.table_name)));
            let mut visit =
                Visit { search: self, station, packet, capture, to, sure: true, conditional: false };
            let end = visit.base();
            mark = visit.packet.mark;
            if end == End::Gone || to.is_some() && end != End::Own {
                return;
            }
        }
    }

    fn unfollowed(&mut self, stations: &[Station<'a>]) {
        if let Some(station) = stations.first() {
            let place =
                Place { chain: String::new(), hook: None, ..station.place(station.hooked.name, None) };
            self.note(Severity::May, place, String::new(), Effect::Unfollowed);
        }
    }

    fn note(&mut self, severity: Severity, place: Place, rule: String, effect: Effect) {
        let traffic: BTreeSet<(Family, Traffic)> = [(self.family, self.flow.traffic)].into();
        self.findings.add(Finding { severity, place, rule, effect, traffic });
    }
}

/// Whether a base chain is the one of the mesh that begins what an act says.
fn holds(hooked: &Hooked<'_>, act: &Act<'_>) -> bool {
    let native = is_native(hooked.table_name);
    let name = if native { nft_table(act.table) } else { act.table.name() };
    let mut statements = hooked.chain.rules.iter().flat_map(|rule| &rule.statements);
    let inet = hooked.table_name.family == TableFamily::Inet;
    hooked.table_name.name == name && inet == native && statements.any(|one| leads_to(one, act.to, native))
}

fn leads_to(statement: &Statement, chain: &Chain, native: bool) -> bool {
    let Statement::Jump(to) = statement else { return false };
    if native { *to == nft_chain_name(chain) } else { to == chain.name() }
}

impl Stage {
    /// What a captured packet looks like by then.
    fn view(self, packet: &Packet, capture: Capture) -> Packet {
        let mut packet = packet.clone();
        match (self, capture) {
            (Self::Original, _) => return packet,
            (Self::Captured | Self::Later(_), Capture::Tproxy(mark)) => packet.mark = Some(mark),
            (Self::Captured | Self::Later(_), Capture::Redirect(port)) => {
                packet.port = port;
                if packet.came_in.is_none() {
                    // What the pod itself sends is redirected to the loopback address.
                    packet.destination = match packet.family() {
                        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
                        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
                    };
                }
            }
        }
        if let Self::Later(hook) = self {
            let lo = || Some(String::from("lo"));
            match hook {
                Hook::Postrouting => packet.goes_out = lo(),
                Hook::Prerouting | Hook::Input => {
                    packet.came_in = packet.came_in.or_else(lo);
                    (packet.goes_out, packet.owner) = (None, None);
                }
                Hook::Forward | Hook::Output => {}
            }
        }
        packet
    }
}

impl<'a> Station<'a> {
    fn hook(&self) -> Hook {
        self.hooked.base.hook
    }

    fn place(&self, chain: &str, rule: Option<usize>) -> Place {
        let Hooked { table_name, name, base, .. } = &self.hooked;
        Place {
            table: (*table_name).clone(),
            base_chain: (*name).to_string(),
            hook: Some((base.hook, base.priority)),
            chain: chain.to_string(),
            rule,
        }
    }

    /// Whether a statement may interfere here.
    fn is_worth_a_try(&self, statement: &Statement) -> bool {
        match statement {
            Statement::Accept | Statement::Return | Statement::Goto(_) | Statement::TranslateSource(_) => {
                self.position == Position::Own
            }
            Statement::Drop
            | Statement::Reject
            | Statement::Translate(_)
            | Statement::Tproxy
            | Statement::Untrack
            | Statement::SetMark(_)
            | Statement::Queue
            | Statement::Rewrite(_)
            | Statement::Unknown(_) => true,
            Statement::Jump(_) | Statement::Harmless(_) => false,
        }
    }
}

/// Where a packet goes from a rule or chain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// To the next rule.
    Next,
    /// Back to the calling chain.
    Returned,
    /// Out of the base chain.
    Left,
    /// To the mesh's rules.
    Own,
    /// Nowhere, or to somebody else.
    Gone,
}

/// One packet in one base chain.
struct Visit<'v, 'a, 's> {
    search: &'v mut Search<'a, 's>,
    station: &'v Station<'a>,
    packet: Packet,
    capture: Capture,
    /// The mesh's chain that the packet is sent to here, and whether the table is a native one.
    to: Option<(&'a Chain, bool)>,
    /// Whether the packet comes here for sure.
    sure: bool,
    /// Whether the rule at hand, or one that led to it, is only perhaps met.
    conditional: bool,
}

impl<'a> Visit<'_, 'a, '_> {
    fn base(&mut self) -> End {
        let Hooked { name, chain, base, .. } = self.station.hooked;
        let end = self.chain(name, chain, 0);
        match end {
            End::Next | End::Returned if base.drops => {
                let severity = self.severity();
                self.search.note(
                    severity,
                    self.station.place(name, None),
                    String::new(),
                    Effect::PolicyDrops,
                );
                if self.sure { End::Gone } else { End::Left }
            }
            End::Gone if !self.sure => End::Left,
            End::Next | End::Returned | End::Left | End::Own | End::Gone => end,
        }
    }

    fn severity(&self) -> Severity {
        let sure = self.is_certain() && self.station.position != Position::Unsure;
        if sure { Severity::Does } else { Severity::May }
    }

    const fn is_certain(&self) -> bool {
        self.sure && !self.conditional
    }

    fn chain(&mut self, name: &str, chain: &'a ChainState, depth: usize) -> End {
        if depth > DEEPEST {
            return End::Next;
        }
        for (number, rule) in (1_usize..).zip(&chain.rules) {
            if *self.search.steps == 0 {
                return End::Gone;
            }
            *self.search.steps = self.search.steps.saturating_sub(1);
            let met = self.packet.fulfils_all(&rule.conditions);
            if met == Some(false) {
                continue;
            }
            let conditional = self.conditional;
            self.conditional |= met.is_none();
            let end = self.rule(name, number, rule, depth);
            self.conditional = conditional;
            match (end, met) {
                (End::Next, _) => {}
                // Whether it was met is not known; everything behind it is reached only perhaps.
                (End::Returned | End::Left | End::Own | End::Gone, None) => self.sure = false,
                (End::Returned, Some(_)) => return if depth == 0 { End::Returned } else { End::Next },
                (End::Left | End::Own | End::Gone, Some(_)) => return end,
            }
        }
        End::Next
    }

    fn rule(&mut self, chain: &str, number: usize, rule: &'a SeenRule, depth: usize) -> End {
        for statement in &rule.statements {
            let place = self.station.place(chain, Some(number));
            let end = match statement {
                Statement::Jump(to) => self.jump(to, rule, depth),
                Statement::Goto(to) => match self.jump(to, rule, depth) {
                    End::Next => {
                        if depth == 0 {
                            self.ends(place, rule);
                        }
                        End::Returned
                    }
                    end @ (End::Returned | End::Left | End::Own | End::Gone) => end,
                },
                Statement::Accept | Statement::TranslateSource(_) => {
                    self.ends(place, rule);
                    End::Left
                }
                Statement::Return => {
                    if depth == 0 {
                        self.ends(place, rule);
                    }
                    End::Returned
                }
                Statement::Translate(_) if self.is_translated_here() => {
                    self.note(place, rule, Effect::Translates);
                    // Which of two chains of the same priority is asked first is not known.
                    if self.station.position == Position::Unsure { End::Left } else { End::Gone }
                }
                Statement::Translate(_) => End::Left,
                Statement::Drop | Statement::Reject => {
                    self.note(place, rule, Effect::Drops);
                    End::Gone
                }
                Statement::Tproxy | Statement::Untrack | Statement::SetMark(_) => {
                    self.alter(statement, place, rule);
                    End::Next
                }
                Statement::Queue => {
                    self.search.note(Severity::May, place, rule.to_string(), Effect::Queues);
                    End::Left
                }
                Statement::Rewrite(_) => {
                    self.note(place, rule, Effect::Rewrites);
                    End::Next
                }
                Statement::Unknown(_) => {
                    self.search.note(Severity::May, place, rule.to_string(), Effect::Unknown);
                    End::Next
                }
                Statement::Harmless(_) => End::Next,
            };
            if end != End::Next {
                return end;
            }
        }
        End::Next
    }

    fn jump(&mut self, to: &str, rule: &SeenRule, depth: usize) -> End {
        if let Some((chain, native)) = self.to
            && rule.statements.iter().any(|statement| leads_to(statement, chain, native))
        {
            return End::Own;
        }
        // Others of the mesh's chains leave the packet alone.
        if Chain::named(to).is_the_meshs() || is_native(self.station.hooked.table_name) {
            return End::Next;
        }
        match self.station.hooked.table.chains.get_key_value(to) {
            Some((name, chain)) => self.chain(name, chain, depth.saturating_add(1)),
            None => End::Next,
        }
    }

    /// A rule that ends the chain the mesh's rules are in.
    fn ends(&mut self, place: Place, rule: &SeenRule) {
        if self.station.position == Position::Own {
            self.note(place, rule, Effect::EndsChain);
        }
    }

    /// Whether destinations are translated here, before the mesh does or after TPROXY.
    fn is_translated_here(&self) -> bool {
        self.station.hooked.base.is_nat && matches!(self.station.hook(), Hook::Prerouting | Hook::Output)
    }

    /// What changes how a packet is treated further on.
    fn alter(&mut self, statement: &Statement, place: Place, rule: &SeenRule) {
        let on_arrival = self.station.hook() == Hook::Prerouting && self.search.flow.hook == Hook::Prerouting;
        let before = self.station.stage == Stage::Original;
        match (statement, self.capture) {
            (Statement::Tproxy, _) if on_arrival => self.note(place, rule, Effect::Tproxies),
            (Statement::Untrack, Capture::Redirect(_))
                if before && self.station.hooked.base.priority < TRACKING =>
            {
                self.note(place, rule, Effect::Untracks);
            }
            (Statement::SetMark(mark), capture) => {
                if let (Capture::Tproxy(wanted), true) = (capture, on_arrival) {
                    // The mesh's rules leave alone what has the mark already; behind them it may have no other.
                    match (before, *mark) {
                        (_, None) => {
                            self.search.note(Severity::May, place, rule.to_string(), Effect::Remarks)
                        }
                        (before, Some(mark)) if before == (mark == wanted) => {
                            self.note(place, rule, Effect::Remarks);
                        }
                        (_, Some(_)) => {}
                    }
                }
                self.packet.mark = mark.filter(|_| self.is_certain());
            }
            (_, Capture::Redirect(_) | Capture::Tproxy(_)) => {}
        }
    }

    fn note(&mut self, place: Place, rule: &SeenRule, effect: Effect) {
        let severity = self.severity();
        self.search.note(severity, place, rule.to_string(), effect);
    }
}
