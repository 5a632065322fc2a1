//! Rules in force, or to be: tables of chains of rules, of one family.

mod raw;

pub(crate) use raw::{RawRule, comment_in};

use redirect_core::{
    plan::{DataPlane, FamilyRules},
    rule::{Chain, Hook, Match, OurChain, Rule, Table, Target},
    values::{Family, Mark, MaskedMark},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

/// The chain in which Istio's agent lets probes through, in the node's network namespace.
const ISTIO_NODE_CHAIN: &str = "ISTIO_POSTRT";

/// One of each family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PerFamily<T> {
    /// IPv4's.
    pub v4: T,
    /// IPv6's.
    pub v6: T,
}

impl<T> PerFamily<T> {
    /// What is made of each family.
    pub fn each(mut make: impl FnMut(Family) -> T) -> Self {
        Self { v4: make(Family::V4), v6: make(Family::V6) }
    }

    /// That of one family.
    #[must_use]
    pub const fn of(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// The same, to be changed.
    pub const fn of_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}

/// A rule as found: one this library understands, or another's. Closed on purpose: it is one or the other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// Understood, in canonical form.
    Rule(Rule),
    /// Not understood.
    Foreign(ForeignRule),
}

/// A rule of another program's, with everything that is needed to make it again. Printed, it is words for people.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ForeignRule(Box<Form>);

/// What a foreign rule was read from. Boxed, because most rules are not foreign, and a change moves them all.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Form {
    /// What iptables-save prints behind `-A CHAIN `.
    Saved(String),
    /// What the kernel sent.
    Raw(RawRule),
}

impl ForeignRule {
    /// One that iptables-save prints like this behind `-A CHAIN `.
    #[must_use]
    pub fn saved(text: &str) -> Self {
        Self(Form::Saved(text.into()).into())
    }

    /// The chain it jumps or goes to.
    #[must_use]
    pub fn jumps_to(&self) -> Option<Chain> {
        match self.0.as_ref() {
            Form::Saved(text) => {
                let mut words = text.split_ascii_whitespace().skip_while(|word| !["-j", "-g"].contains(word));
                words.nth(1).map(Chain::named)
            }
            Form::Raw(raw) => raw.jumps_to(),
        }
    }

    /// What the kernel sent, where it was read from that.
    pub(crate) fn raw(&self) -> Option<&RawRule> {
        match self.0.as_ref() {
            Form::Saved(_) => None,
            Form::Raw(raw) => Some(raw),
        }
    }
}

impl From<RawRule> for ForeignRule {
    fn from(raw: RawRule) -> Self {
        Self(Form::Raw(raw).into())
    }
}

impl fmt::Display for ForeignRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_ref() {
            Form::Saved(text) => f.write_str(text),
            Form::Raw(raw) => raw.fmt(f),
        }
    }
}

/// In the words of iptables, as far as it has any.
impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => f.write_str(&rule.text()),
            Self::Foreign(rule) => rule.fmt(f),
        }
    }
}

impl From<&Rule> for Entry {
    fn from(rule: &Rule) -> Self {
        Self::Rule(rule.canonical())
    }
}

impl From<Rule> for Entry {
    fn from(rule: Rule) -> Self {
        Self::Rule(rule.canonical())
    }
}

/// The rules of one family, by table and chain. Chains without rules count: a declared chain is there.
///
/// Built-in chains without rules do not: they are always there.
///
/// Two are equal when they hold the same rules; whether those are signed means nothing. A copy costs nothing: rules are
/// shared until one of the copies changes.
#[derive(Debug, Clone, Default)]
pub struct IptablesTables {
    tables: Arc<BTreeMap<Table, BTreeMap<Chain, Vec<Entry>>>>,
    /// Rules of built-in chains that carry this program's signature. Only nf_tables can hold one.
    signed: BTreeMap<Table, BTreeSet<(Chain, Entry)>>,
}

impl PartialEq for IptablesTables {
    fn eq(&self, other: &Self) -> bool {
        self.tables == other.tables
    }
}

impl Eq for IptablesTables {}

impl IptablesTables {
    /// No rule at all.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a chain, empty unless it is there already.
    pub fn declare(&mut self, table: Table, chain: Chain) -> &mut Vec<Entry> {
        Arc::make_mut(&mut self.tables).entry(table).or_default().entry(chain).or_default()
    }

    /// Notes that a rule of a built-in chain carries this program's signature.
    #[doc(hidden)] // for the tests' model of a kernel
    pub fn sign(&mut self, table: Table, chain: Chain, entry: Entry) {
        self.signed.entry(table).or_default().insert((chain, entry));
    }

    /// The chains of a table, by name, each with its rules in order.
    pub fn chains(&self, table: Table) -> impl Iterator<Item = (&Chain, &[Entry])> {
        self.tables.get(&table).into_iter().flatten().map(|(chain, entries)| (chain, entries.as_slice()))
    }

    /// The chains that a change may touch: those of the mesh, and built-in ones with rules.
    pub(crate) fn chains_of_changes(&self) -> BTreeMap<(Table, &Chain), &[Entry]> {
        let all = Table::ALL
            .iter()
            .copied()
            .flat_map(|table| self.chains(table).map(move |(chain, rules)| (table, chain, rules)));
        let touched = all.filter(|(_, chain, rules)| {
            chain.belongs_to_mesh() || matches!(chain, Chain::Hook(_)) && !rules.is_empty()
        });
        touched.map(|(table, chain, rules)| ((table, chain), rules)).collect()
    }

    /// The rules of a chain; none where no such chain.
    #[must_use]
    pub fn rules(&self, table: Table, chain: &Chain) -> &[Entry] {
        self.tables.get(&table).and_then(|chains| chains.get(chain)).map_or(&[], Vec::as_slice)
    }

    /// Whether a chain is declared.
    #[must_use]
    pub fn has(&self, table: Table, chain: &Chain) -> bool {
        self.tables.get(&table).is_some_and(|chains| chains.contains_key(chain))
    }

    /// Whether it has neither rules nor chains.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let holds =
            |(chain, rules): (&Chain, &[Entry])| !matches!(chain, Chain::Hook(_)) || !rules.is_empty();
        !Table::ALL.iter().copied().any(|table| self.chains(table).any(holds))
    }

    /// Whether a table holds a chain of the mesh.
    #[must_use]
    pub fn has_mesh_chain(&self, table: Table) -> bool {
        self.chains(table).any(|(chain, _)| chain.belongs_to_mesh())
    }

    /// Whether any table holds a chain of the mesh.
    #[must_use]
    pub fn is_redirected(&self) -> bool {
        Table::ALL.iter().copied().any(|table| self.has_mesh_chain(table))
    }

    /// Whether an entry of a chain is the mesh's.
    ///
    /// Every rule of a chain of the mesh is. In built-in chains, a jump to such a chain is. Others have rules of the shapes
    /// that a plan puts there besides, and keep them: where a table has rules with this program's signature, only those
    /// are the mesh's. Where it has none (iptables' own programs write none), a rule of such a shape counts as long as the
    /// table has a chain of the mesh: one that leaves an interface alone, or one with a mark that these chains use.
    #[must_use]
    pub fn owns(&self, table: Table, chain: &Chain, entry: &Entry) -> bool {
        self.owns_beside(&Self::new(), table, chain, entry)
    }

    /// The same, while `wanted` is being put in force: what it wants counts as being there, too.
    #[must_use]
    pub fn owns_beside(&self, wanted: &Self, table: Table, chain: &Chain, entry: &Entry) -> bool {
        match (chain, entry) {
            (Chain::Ours(_), _) => true,
            (Chain::Other(_), _) => chain.belongs_to_mesh(),
            (Chain::Hook(_), Entry::Foreign(rule)) => {
                rule.jumps_to().is_some_and(|chain| chain.belongs_to_mesh())
            }
            (Chain::Hook(hook), Entry::Rule(rule)) => {
                matches!(&rule.target, Target::Jump(to) if to.belongs_to_mesh())
                    || wanted.rules(table, chain).contains(entry)
                    || match self.signed.get(&table) {
                        Some(signed) => signed.contains(&(chain.clone(), entry.clone())),
                        None => {
                            // In ambient mode a plan has only jumps there.
                            self.has_mesh_chain(table)
                                && !self.has(table, &OurChain::Prerouting.into())
                                && self.has_planned_shape(wanted, table, *hook, rule)
                        }
                    }
            }
        }
    }

    /// Whether a rule of a built-in chain that is not a jump has a shape that a plan gives to rules there, with a mark that
    /// chains of the mesh use. Where these have lost theirs, any mark may be it.
    fn has_planned_shape(&self, wanted: &Self, table: Table, hook: Hook, rule: &Rule) -> bool {
        match planned_shape(table, hook, rule) {
            None => false,
            Some(Shape::Interface) => true,
            Some(Shape::Mark(mark)) => {
                let own = self.marks();
                let has_lost_its_own = own.iter().all(|mark| *mark == Mark::PROXY);
                has_lost_its_own || own.contains(&mark) || wanted.marks().contains(&mark)
            }
        }
    }

    /// The packet marks that the chains of the mesh give or ask for, and the proxy's own if any.
    #[must_use]
    pub fn marks(&self) -> BTreeSet<Mark> {
        let chains = self.chains(Table::Mangle).filter(|(chain, _)| chain.belongs_to_mesh());
        let rules = chains.flat_map(|(_, entries)| entries).filter_map(Entry::understood);
        let mut marks: BTreeSet<Mark> = rules.flat_map(marks_of).collect();
        if !marks.is_empty() {
            marks.insert(Mark::PROXY);
        }
        marks
    }

    /// The data planes whose chains are here. Of ambient mode each table of a pod has `ISTIO_PRERT`, and the node has Istio's
    /// chain for probes; a table with another chain of the mesh is a sidecar's.
    #[must_use]
    pub fn data_planes(&self) -> BTreeSet<DataPlane> {
        let mut found = BTreeSet::new();
        for table in Table::ALL.iter().copied() {
            let has_prerouting = self.has(table, &OurChain::Prerouting.into());
            let of_node = Chain::Other(ISTIO_NODE_CHAIN.into());
            let is_of_sidecar = |chain: &Chain| match chain {
                Chain::Ours(OurChain::Prerouting) => false,
                Chain::Ours(OurChain::Output) => !has_prerouting,
                Chain::Hook(_) | Chain::Ours(_) | Chain::Other(_) => {
                    chain.belongs_to_mesh() && *chain != of_node
                }
            };
            found.extend((has_prerouting || self.has(table, &of_node)).then_some(DataPlane::Ambient));
            found.extend(
                self.chains(table).any(|(chain, _)| is_of_sidecar(chain)).then_some(DataPlane::Sidecar),
            );
        }
        found
    }

    /// Whether a table hands inbound connections to the proxy: a packet that arrives jumps to `ISTIO_INBOUND`, or in nat to
    /// `ISTIO_PRERT`.
    #[must_use]
    pub fn captures_inbound(&self, table: Table) -> bool {
        let jumps = |rule: &Rule| {
            rule.target == Target::Jump(OurChain::Inbound.into())
                || table == Table::Nat && rule.target == Target::Jump(OurChain::Prerouting.into())
        };
        table != Table::Raw
            && self
                .rules(table, &Chain::Hook(Hook::Prerouting))
                .iter()
                .filter_map(Entry::understood)
                .any(jumps)
    }
}

impl Entry {
    /// The rule, where it is understood.
    #[must_use]
    pub const fn understood(&self) -> Option<&Rule> {
        match self {
            Self::Rule(rule) => Some(rule),
            Self::Foreign(_) => None,
        }
    }
}

/// The name of a chain in a table, as an operator would point at it: `nat OUTPUT`.
pub(crate) fn place(table: Table, chain: &Chain) -> String {
    format!("{} {chain}", table.name())
}

/// The rules of a plan, as if no other program had any.
impl From<&FamilyRules> for IptablesTables {
    fn from(rules: &FamilyRules) -> Self {
        let mut state = Self::new();
        for table in Table::ALL.iter().copied() {
            for (chain, planned) in rules.chains(table) {
                // They are canonical already.
                *state.declare(table, chain.clone()) = planned.iter().cloned().map(Entry::Rule).collect();
            }
        }
        state
    }
}

/// The marks a rule gives or asks for.
fn marks_of(rule: &Rule) -> impl Iterator<Item = Mark> + '_ {
    let asked =
        rule.matches.iter().filter_map(|one| if let Match::Mark(is) = one { is.value.whole() } else { None });
    let given = if let Target::SetMark(mark) | Target::Tproxy { mark, .. } = &rule.target {
        Some(*mark)
    } else {
        None
    };
    asked.chain(given)
}

/// What a rule of a plan in a built-in chain that is not a jump is about.
enum Shape {
    /// An excluded interface.
    Interface,
    /// TPROXY's mark.
    Mark(Mark),
}

/// The shape of a rule, if a plan puts such rules into this built-in chain.
fn planned_shape(table: Table, hook: Hook, rule: &Rule) -> Option<Shape> {
    let mark = match (hook, rule.matches.as_slice(), &rule.target) {
        (Hook::Prerouting, [Match::InInterface(is)], Target::Return)
        | (Hook::Output, [Match::OutInterface(is)], Target::Return) => {
            return (table != Table::Raw && !is.not).then_some(Shape::Interface);
        }
        (Hook::Prerouting, [Match::Protocol(_), Match::Mark(is)], Target::SaveMark)
        | (Hook::Output, [Match::OutInterface(_), Match::Protocol(_), Match::Mark(is)], Target::Return)
        | (Hook::Output, [Match::Protocol(_), Match::ConnMark(is)], Target::RestoreMark) => {
            is.value.whole().filter(|_| !is.not)
        }
        // With strict capture the guard's mark stands beside it.
        (Hook::Prerouting, [Match::Protocol(_), Match::Mark(is)], Target::SetConnMark(set)) => {
            let mark = is.value.whole().filter(|_| !is.not)?;
            (MaskedMark::GUARD.beside(mark) == Some(*set)).then_some(mark)
        }
        (Hook::Output, [Match::Protocol(_), Match::ConnMark(is)], Target::SetMark(set)) => {
            (!is.not && MaskedMark::GUARD.beside(*set) == Some(is.value)).then_some(*set)
        }
        (
            Hook::Output,
            [
                Match::Destination(to),
                Match::OutInterface(_),
                Match::Protocol(_),
                Match::OwnerUid(_) | Match::OwnerGid(_),
            ],
            Target::SetMark(mark),
        ) => (to.not && *mark == Mark::PROXY).then_some(*mark),
        _ => None,
    };
    mark.filter(|_| table == Table::Mangle).map(Shape::Mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    use redirect_core::rule::Hook;

    fn nat(lines: &str) -> IptablesTables {
        IptablesTables::saved(&["*nat\n", lines, "COMMIT\n"].concat()).unwrap()
    }

    #[test]
    fn a_saved_rule_jumps_where_its_target_says() {
        for (text, to) in [
            ("-p tcp -m tcp --dport 80 -j ISTIO_OUTPUT", Some("ISTIO_OUTPUT")),
            ("-i eth0 -g THEIRS", Some("THEIRS")),
            ("-j CT --zone 1", Some("CT")),
            ("-p tcp", None),
        ] {
            assert_eq!(ForeignRule::saved(text).jumps_to(), to.map(Chain::named), "{text}");
        }
    }

    #[test]
    fn a_chain_is_something_even_without_a_rule_and_a_built_in_one_is_not() {
        let mut state = IptablesTables::new();
        assert!(state.is_empty());
        state.declare(Table::Nat, Chain::Hook(Hook::Output));
        assert!(state.is_empty());
        assert!(!nat("-A OUTPUT -p tcp -j RETURN\n").is_empty());
        assert!(!nat(":ISTIO_OUTPUT - [0:0]\n").is_empty());
        assert!(!nat(":DOCKER - [0:0]\n").is_empty());
    }

    #[test]
    fn whose_a_chain_is_says_the_data_plane() {
        for (chain, expected) in [
            ("ISTIO_POSTRT", Some(DataPlane::Ambient)),
            ("ISTIO_PRERT", Some(DataPlane::Ambient)),
            ("ISTIO_INBOUND", Some(DataPlane::Sidecar)),
            ("ISTIO_OUTPUT", Some(DataPlane::Sidecar)),
            ("DOCKER", None),
        ] {
            let found = nat(&format!(":{chain} - [0:0]\n")).data_planes();
            assert_eq!(found, expected.into_iter().collect(), "{chain}");
        }
    }

    #[test]
    fn an_interface_that_is_left_alone_is_the_meshs_only_as_a_plan_says_it() {
        let owns = |table: &str, rule: &str| {
            let chain = ":ISTIO_INBOUND - [0:0]\n-A ISTIO_INBOUND -p tcp -j RETURN\n";
            let state =
                IptablesTables::saved(&format!("*{table}\n{chain}-A PREROUTING {rule}\nCOMMIT\n")).unwrap();
            let table = Table::named(table).unwrap();
            let prerouting = Chain::Hook(Hook::Prerouting);
            let [entry] = state.rules(table, &prerouting) else { panic!("one rule") };
            state.owns(table, &prerouting, entry)
        };
        assert!(owns("nat", "-i eth9 -j RETURN"));
        assert!(owns("mangle", "-i eth9 -j RETURN"));
        // No plan puts one into raw, inverts it, or checks the other end.
        assert!(!owns("raw", "-i eth9 -j RETURN"));
        assert!(!owns("mangle", "! -i eth9 -j RETURN"));
        assert!(!owns("mangle", "-o eth9 -j RETURN"));
        assert!(!owns("mangle", "-i eth9 -j ACCEPT"));
    }

    #[test]
    fn a_rule_that_marks_what_the_proxy_sends_is_the_meshs_only_as_a_plan_says_it() {
        let owns = |to: &str, mark: &str| {
            let rule =
                format!("{to} -o lo -p tcp -m owner --uid-owner 1337 -j MARK --set-xmark {mark}/0xffffffff");
            let text = format!("*mangle\n:ISTIO_INBOUND - [0:0]\n-A OUTPUT {rule}\nCOMMIT\n");
            let (state, output) = (IptablesTables::saved(&text).unwrap(), Chain::Hook(Hook::Output));
            let [entry] = state.rules(Table::Mangle, &output) else { panic!("one rule") };
            assert!(entry.understood().is_some(), "{rule}");
            state.owns(Table::Mangle, &output, entry)
        };
        assert!(owns("! -d 127.0.0.1/32", "0x53a"));
        assert!(!owns("-d 127.0.0.1/32", "0x53a"));
        assert!(!owns("! -d 127.0.0.1/32", "0x539"));
    }

    #[test]
    fn chains_that_have_lost_their_mark_may_have_had_any() {
        let owns = |rules: &str, mark: &str| {
            let saves = "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff";
            let text = format!(
                "*mangle\n:ISTIO_INBOUND - [0:0]\n{rules}-A PREROUTING -p tcp -m mark --mark {mark} {saves}\nCOMMIT\n"
            );
            let (state, prerouting) = (IptablesTables::saved(&text).unwrap(), Chain::Hook(Hook::Prerouting));
            let [entry] = state.rules(Table::Mangle, &prerouting) else { panic!("one rule") };
            state.owns(Table::Mangle, &prerouting, entry)
        };
        let gives = |mark: &str| format!("-A ISTIO_INBOUND -p tcp -j MARK --set-xmark {mark}/0xffffffff\n");
        let (own, of_proxy) = (gives("0x539"), gives("0x53a"));
        assert!(owns("", "0x77") && owns(&of_proxy, "0x77"));
        assert!(!owns(&own, "0x77") && !owns(&[of_proxy, own.clone()].concat(), "0x77"));
        assert!(owns(&own, "0x539") && owns(&own, "0x53a"));
    }

    #[test]
    fn chains_of_the_mesh_and_jumps_to_them_are_the_meshs_and_no_others() {
        let mesh = ":ISTIO_OUTPUT - [0:0]\n-A ISTIO_OUTPUT -p tcp -j RETURN\n-A OUTPUT -j ISTIO_OUTPUT\n";
        let others = ":DOCKER - [0:0]\n-A DOCKER -p tcp -j RETURN\n-A PREROUTING -j DOCKER\n-A OUTPUT -p udp -j RETURN\n";
        let state = nat(&[mesh, others].concat());
        let rules =
            state.chains(Table::Nat).flat_map(|(chain, rules)| rules.iter().map(move |rule| (chain, rule)));
        let owned = rules.filter(|(chain, rule)| state.owns(Table::Nat, chain, rule));
        let owned: Vec<String> = owned.map(|(chain, rule)| format!("{chain} {rule}")).collect();
        assert_eq!(owned, ["OUTPUT -j ISTIO_OUTPUT", "ISTIO_OUTPUT -p tcp -j RETURN"]);
    }

    #[test]
    fn a_rule_that_keeps_the_mark_beside_the_guards_is_the_meshs_only_as_a_plan_says_it() {
        let owns = |chain: Hook, rule: &str| {
            let text = format!("*mangle\n:ISTIO_INBOUND - [0:0]\n-A {} {rule}\nCOMMIT\n", chain.name());
            let (state, chain) = (IptablesTables::saved(&text).unwrap(), Chain::Hook(chain));
            let [entry] = state.rules(Table::Mangle, &chain) else { panic!("one rule") };
            assert!(entry.understood().is_some(), "{rule}");
            state.owns(Table::Mangle, &chain, entry)
        };
        let beside = MaskedMark::GUARD.beside(Mark::new(0x539).unwrap()).unwrap();
        for (hook, of_packet, of_connection) in [
            (Hook::Prerouting, "-m mark --mark 0x539", "-j CONNMARK --set-xmark"),
            (Hook::Output, "-j MARK --set-xmark 0x539/0xffffffff", "-m connmark --mark"),
        ] {
            let rule = |of_packet: &str, of_connection: &str| {
                if hook == Hook::Prerouting {
                    format!("-p tcp {of_packet} {of_connection}")
                } else {
                    format!("-p tcp {of_connection} {of_packet}")
                }
            };
            let right = format!("{of_connection} {beside}");
            assert!(owns(hook, &rule(of_packet, &right)), "{hook:?}");
            // Another part of the connection's mark, and every mark but one.
            let other = format!("{of_connection} 0x539/0xffff");
            assert!(!owns(hook, &rule(of_packet, &other)), "{hook:?}");
            let inverted = rule(of_packet, &right)
                .replace("-m mark --mark", "-m mark ! --mark")
                .replace("-m connmark --mark", "-m connmark ! --mark");
            assert!(!owns(hook, &inverted), "{hook:?}");
        }
    }

    #[test]
    fn a_change_may_touch_chains_of_the_mesh_and_built_in_ones_that_have_rules() {
        let mut state = nat(
            ":ISTIO_OUTPUT - [0:0]\n:DOCKER - [0:0]\n-A DOCKER -p tcp -j RETURN\n-A OUTPUT -j ISTIO_OUTPUT\n",
        );
        state.declare(Table::Nat, Chain::Hook(Hook::Input));
        let touched: Vec<String> =
            state.chains_of_changes().keys().map(|(_, chain)| chain.to_string()).collect();
        assert_eq!(touched, ["OUTPUT", "ISTIO_OUTPUT"]);
    }

    #[test]
    fn inbound_connections_are_handed_over_where_packets_that_arrive_jump_to_the_chain_for_it() {
        const JUMP: &str = ":ISTIO_INBOUND - [0:0]\n-A PREROUTING -p tcp -j ISTIO_INBOUND\n";
        assert!(nat(JUMP).captures_inbound(Table::Nat));
        assert!(!nat(JUMP).captures_inbound(Table::Mangle));
        assert!(!nat("-A PREROUTING -p tcp -j RETURN\n").captures_inbound(Table::Nat));
        assert!(
            !nat(":ISTIO_INBOUND - [0:0]\n-A OUTPUT -p tcp -j ISTIO_INBOUND\n").captures_inbound(Table::Nat)
        );
        // What stands in raw is about conntrack zones.
        let raw = IptablesTables::saved(&["*raw\n", JUMP, "COMMIT\n"].concat()).unwrap();
        assert!(raw.has(Table::Raw, &OurChain::Inbound.into()));
        assert!(!raw.captures_inbound(Table::Raw));
    }
}
