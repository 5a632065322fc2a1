//! The way of a packet through everything that hangs on its hooks.

use super::{
    Effect, Finding, Place, Pod, Severity, Traffic,
    packet::{Act, Capture, Packet, tried_map},
    ruleset::{
        Base, ChainState, Condition, Ruleset, Statement, TableFamily, TableName, TableState, VerdictMap,
    },
    traffic::Flow,
    visit::{End, Visit},
};
use crate::{
    plan::FamilyRules,
    render::{NFT_TABLES, nft_chain_name, nft_table},
    rule::{Chain, Hook, Is},
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
    slice,
};

/// How many findings are told at most.
const MOST_FINDINGS: usize = 16;
/// How many packets of one kind of traffic are tried at most.
const MOST_PACKETS: usize = 256;
/// How many chains deep a ruleset is followed; the kernel allows 16.
pub(super) const DEEPEST: usize = 16;
/// How many rules are met at most, by all packets together; a tenth of a second's work.
const MOST_STEPS: usize = 1_000_000;
/// Where the kernel translates destinations, whatever the priority of the chains it asks for that (`NF_IP_PRI_NAT_DST`).
const TRANSLATION: i32 = -100;

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

pub(super) fn is_native(table: &TableName) -> bool {
    table.family == TableFamily::Inet && NFT_TABLES.contains(&table.name.as_str())
}

fn jumps_to_the_mesh(statement: &Statement) -> bool {
    matches!(statement, Statement::Jump(to) | Statement::Goto(to) if Chain::named(to).belongs_to_mesh())
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
        let mut search = Search { ruleset, family, flow: &flow, findings, steps: &mut steps, cut: false };
        search.run();
    }
}

pub(super) struct Search<'a, 's> {
    pub(super) ruleset: &'a Ruleset,
    pub(super) family: Family,
    pub(super) flow: &'s Flow<'a>,
    pub(super) findings: &'s mut Findings,
    /// How many rules may still be met.
    pub(super) steps: &'s mut usize,
    /// Whether there are rules that no packet was made for.
    cut: bool,
}

/// A base chain on a packet's way.
#[derive(Clone, Copy)]
pub(super) struct Hooked<'a> {
    pub(super) table_name: &'a TableName,
    pub(super) table: &'a TableState,
    pub(super) name: &'a str,
    pub(super) chain: &'a ChainState,
    pub(super) base: Base,
}

impl Hooked<'_> {
    /// Its place among the chains of a hook: chains that translate are asked together, in the order of their priorities.
    fn order(&self) -> (i32, i32) {
        if self.base.is_nat { (TRANSLATION, self.base.priority) } else { (self.base.priority, 0) }
    }
}

/// Where a base chain stands, compared with the mesh's that captures.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Position {
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
pub(super) struct Station<'a> {
    pub(super) hooked: Hooked<'a>,
    pub(super) position: Position,
    /// How the packet is changed by then.
    pub(super) stage: Stage,
}

/// How far a packet has come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
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
            if tried.insert(packet.clone()) {
                self.send(&packet, &stations);
            }
        }
        if self.cut || *self.steps == 0 {
            self.unfollowed(&stations);
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
                let passed_over = hooked.base.is_nat && translates || is_native(hooked.table_name);
                if !passed_over {
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
        self.aim_at(station, station.hooked.chain, &[], 0, packets);
    }

    fn aim_at(
        &mut self,
        station: &Station<'a>,
        chain: &'a ChainState,
        path: &[&Condition],
        depth: usize,
        packets: &mut Vec<Packet>,
    ) {
        // The kernel refuses loops, and chains that go deeper.
        if depth > DEEPEST {
            return;
        }
        for rule in &chain.rules {
            if *self.steps == 0 || packets.len() >= MOST_PACKETS {
                self.cut = true;
                return;
            }
            *self.steps = self.steps.saturating_sub(1);
            let path: Vec<&Condition> = path.iter().copied().chain(&rule.conditions).collect();
            self.aim_along(station, &rule.statements, &path, depth, packets);
            for (among, verdict) in rule.statements.iter().filter_map(tried_map).flat_map(VerdictMap::each) {
                let found = Condition::Among(Is { value: among, not: false });
                let path: Vec<&Condition> = path.iter().copied().chain([&found]).collect();
                self.aim_along(station, slice::from_ref(verdict), &path, depth, packets);
            }
        }
    }

    /// What happens to packets that fulfil all conditions of a path.
    fn aim_along(
        &mut self,
        station: &Station<'a>,
        statements: &'a [Statement],
        path: &[&Condition],
        depth: usize,
        packets: &mut Vec<Packet>,
    ) {
        for statement in statements {
            if let Statement::Jump(to) | Statement::Goto(to) = statement {
                let chain = station.hooked.table.chains.get(to);
                if let Some(chain) = chain.filter(|_| !jumps_to_the_mesh(statement)) {
                    self.aim_at(station, chain, path, depth.saturating_add(1), packets);
                }
            }
        }
        let interferes = statements.iter().any(|one| station.is_worth_a_try(one));
        // Without a condition any packet will do.
        if interferes && !path.is_empty() {
            let view = |packet: &Packet, capture| station.stage.view(packet, capture);
            for packet in self.flow.aimed(path, &view) {
                if !packets.contains(&packet) {
                    packets.push(packet);
                }
            }
            *self.steps = self.steps.saturating_sub(50);
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

    pub(super) fn note(&mut self, severity: Severity, place: Place, rule: String, effect: Effect) {
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

pub(super) fn leads_to(statement: &Statement, chain: &Chain, native: bool) -> bool {
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
    pub(super) fn hook(&self) -> Hook {
        self.hooked.base.hook
    }

    pub(super) fn place(&self, chain: &str, rule: Option<usize>) -> Place {
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
            | Statement::Redirect(_)
            | Statement::Translate(_)
            | Statement::Tproxy { .. }
            | Statement::Untrack
            | Statement::SetMark(_)
            | Statement::SetMarkBits { .. }
            | Statement::RestoreMark
            | Statement::Queue
            | Statement::Rewrite(_)
            | Statement::Unknown(_) => true,
            // What a small one says is tried by itself.
            Statement::Map(_) => tried_map(statement).is_none(),
            Statement::Jump(_)
            | Statement::Continue
            | Statement::SaveMark
            | Statement::SetConnMark { .. }
            | Statement::Zone(_)
            | Statement::Harmless(_) => false,
        }
    }
}
