//! What the mesh's native tables hold: compared with what a plan puts there, and complete enough to be made again.

use crate::expressions::{
    abi::{self, attribute, family, kind},
    reading::{self, Expression, Field},
    wire::{Attribute, Attributes, Message, MessageWriter},
};
use redirect_core::{
    plan::DataPlane,
    rule::{Chain, Hook, OurChain, Table},
    values::Mark,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// The mesh's native tables, as the kernel holds them or as a plan wants them.
///
/// Two are equal when their tables are awake, their chains hang on the same hooks with the same policy and hold the
/// same rules in the same order; counters, handles, comments and names of anonymous sets mean nothing. Expressions that
/// no plan has are kept as they are, so that a rule of another program's equals itself and can be put back.
///
/// A copy costs nothing: tables are shared until one of the copies changes.
#[derive(Debug, Clone, Default)]
pub struct NativeState {
    pub(super) tables: BTreeMap<&'static str, Arc<NativeTable>>,
}

/// One table.
#[derive(Debug, Clone, Default)]
pub(super) struct NativeTable {
    /// `NFTA_TABLE_FLAGS`; a dormant table has hooks that are not registered.
    pub(super) flags: u32,
    pub(super) chains: BTreeMap<String, NativeChain>,
    pub(super) sets: BTreeMap<SetKey, SetState>,
    /// Stateful objects; a plan has none.
    pub(super) objects: BTreeMap<Vec<u8>, RawAttributes>,
}

/// Attributes as they came.
pub(super) type RawAttributes = Vec<u8>;

/// A set is named by the kernel, and numbered in a transaction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SetKey {
    Name(String),
    Number(u32),
}

/// A set or map with what is in it.
#[derive(Debug, Clone, Default)]
pub(super) struct SetState {
    pub(super) attributes: RawAttributes,
    pub(super) elements: Vec<RawAttributes>,
    meaning: BTreeSet<Meaning>,
}

/// What an element of a set says, which is all that is compared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Meaning {
    /// None of the one that stands for all keys that no other has.
    key: Option<Vec<u8>>,
    /// The last key, where keys of several parts have ranges.
    last_key: Option<Vec<u8>>,
    /// Whether an interval ends before the key.
    ends: bool,
    /// The value, or the name of the object, in a map.
    mapped: Option<Vec<u8>>,
}

/// One chain.
#[derive(Debug, Clone, Default)]
pub(super) struct NativeChain {
    /// Its place among the chains of its table, in the order in which they were made.
    pub(super) place: usize,
    pub(super) hook: Option<ChainHook>,
    pub(super) rules: Vec<NativeRule>,
}

/// Where a base chain hangs, in native tables and in those of iptables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChainHook {
    pub(super) number: u32,
    pub(super) priority: u32,
    pub(super) kind: String,
    pub(super) policy: u32,
}

impl ChainHook {
    /// That of a built-in chain of iptables, and of the same chain of native tables.
    pub(super) fn built_in(table: Table, hook: Hook) -> Self {
        Self {
            number: abi::hook_number(hook),
            priority: table.priority(hook).cast_unsigned(),
            kind: table.chain_type(hook).into(),
            policy: abi::POLICY_ACCEPT,
        }
    }

    /// From the attributes of a chain; none where it hangs on no hook.
    pub(super) fn read(chain: Attributes<'_>) -> Option<Self> {
        let hook = chain.nested(attribute::chain::HOOK)?;
        let policy = chain.u32(attribute::chain::POLICY);
        Some(Self {
            number: hook.u32(attribute::hook::NUMBER)?,
            priority: hook.u32(attribute::hook::PRIORITY)?,
            kind: chain.text(attribute::chain::TYPE)?.into(),
            policy: policy.unwrap_or(abi::POLICY_ACCEPT),
        })
    }

    /// Writes it as the attributes of a new chain.
    pub(super) fn write(&self, chain: &mut MessageWriter) {
        chain.nested(attribute::chain::HOOK, |hook| {
            hook.u32(attribute::hook::NUMBER, self.number);
            hook.u32(attribute::hook::PRIORITY, self.priority);
        });
        chain.u32(attribute::chain::POLICY, self.policy);
        chain.text(attribute::chain::TYPE, &self.kind);
    }

    /// All but its policy, which alone can change.
    pub(super) const fn place(&self) -> (u32, u32, &str) {
        (self.number, self.priority, self.kind.as_str())
    }
}

/// One rule.
#[derive(Debug, Clone)]
pub(super) struct NativeRule {
    /// The kernel's number of it; none in a plan.
    pub(super) handle: Option<u64>,
    /// Its expressions, as they go over the wire.
    pub(super) expressions: Vec<u8>,
    pub(super) user_data: Option<Vec<u8>>,
}

impl NativeRule {
    fn elements(&self) -> impl Iterator<Item = Attribute<'_>> + Clone {
        Attribute(&self.expressions).attributes().map(|(_, element)| element)
    }

    fn read(&self) -> impl Iterator<Item = Expression<'_>> + Clone {
        self.elements().filter_map(Expression::read)
    }
}

impl NativeState {
    /// Whether no table exists.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// The names of the mesh's tables that are there.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().copied()
    }

    /// The data planes that have tables.
    pub fn data_planes(&self) -> impl Iterator<Item = DataPlane> {
        let has_any = |data_plane: &DataPlane| {
            Table::ALL.iter().any(|table| self.tables.contains_key(data_plane.nft_table(*table)))
        };
        DataPlane::BOTH.into_iter().filter(has_any)
    }

    /// The names of the sets seen so far, by table.
    #[must_use]
    pub fn sets(&self) -> Vec<(String, String)> {
        let sets =
            self.tables.iter().flat_map(|(table, state)| state.sets.keys().map(move |key| (table, key)));
        let named = sets.filter_map(|(table, key)| match key {
            SetKey::Name(name) => Some((String::from(*table), name.clone())),
            SetKey::Number(_) => None,
        });
        named.collect()
    }

    /// Whether a table hands inbound connections to the proxy of either data plane.
    #[must_use]
    pub fn captures_inbound(&self, table: Table) -> bool {
        DataPlane::BOTH.into_iter().any(|data_plane| self.captures_inbound_in(data_plane.nft_table(table)))
    }

    /// Whether the table of this name does: a packet that arrives jumps to `istio-inbound`, or in nat to `istio-prert`.
    #[must_use]
    pub fn captures_inbound_in(&self, table: &str) -> bool {
        let to = if table == DataPlane::Ambient.nft_table(Table::Nat) {
            OurChain::Prerouting
        } else {
            OurChain::Inbound
        };
        let (prerouting, to) = (Chain::from(Hook::Prerouting).nft_name(), Chain::from(to).nft_name());
        let jumps = |rule: &NativeRule| {
            reading::jump_of(Attribute(&rule.expressions).attributes()) == Some(to.as_str())
        };
        let chain = self.tables.get(table).and_then(|state| state.chains.get(&prerouting));
        chain.is_some_and(|chain| chain.rules.iter().any(jumps))
    }

    /// Whether rules of the table of this name look something up in a set.
    #[must_use]
    pub fn looks_up(&self, table: &str) -> bool {
        let looks_up =
            |rule: &NativeRule| rule.read().any(|expression| matches!(expression, Expression::Lookup(_)));
        self.tables
            .get(table)
            .is_some_and(|state| state.chains.values().flat_map(|chain| &chain.rules).any(looks_up))
    }

    /// Whether the table of this name is the same in both.
    #[must_use]
    pub fn agrees_in(&self, other: &Self, table: &str) -> bool {
        match (self.tables.get(table), other.tables.get(table)) {
            (None, None) => true,
            (Some(one), Some(two)) => one.same(two),
            (Some(_), None) | (None, Some(_)) => false,
        }
    }

    /// The same, with the table of this name as it is in `other`.
    #[must_use]
    pub fn with_table_of(mut self, other: &Self, table: &'static str) -> Self {
        self.tables.remove(table);
        self.tables.extend(other.tables.get(table).map(|state| (table, Arc::clone(state))));
        self
    }

    /// The same, with the rules that the table of this name has in `old` behind those it has here, chain by chain. All sets
    /// of both are there.
    #[must_use]
    pub fn before_rules_of(mut self, old: &Self, table: &'static str) -> Self {
        let Some(from) = old.tables.get(table) else { return self };
        let to = Arc::make_mut(self.tables.entry(table).or_default());
        for (chain, from) in &from.chains {
            let to = to.chain(chain);
            to.hook = to.hook.take().or_else(|| from.hook.clone());
            to.rules.extend(from.rules.iter().cloned());
        }
        to.sets.extend(from.sets.iter().map(|(key, set)| (key.clone(), set.clone())));
        to.objects.extend(from.objects.iter().map(|(key, object)| (key.clone(), object.clone())));
        self
    }

    /// The marks that rules give to packets.
    #[must_use]
    pub fn marks(&self) -> BTreeSet<Mark> {
        let rules =
            self.tables.values().flat_map(|table| table.chains.values()).flat_map(|chain| &chain.rules);
        rules.flat_map(marks_given).collect()
    }

    /// Takes in one message of an answer: a table, a chain, a rule, a set, its elements or an object.
    pub fn take(&mut self, message: &Message<'_>) {
        if message.family != family::INET {
            return;
        }
        let take: fn(&mut NativeTable, Attributes<'_>) -> Option<()> = match message.kind {
            kind::NEW_TABLE => NativeTable::take_table,
            kind::NEW_CHAIN => NativeTable::take_chain,
            kind::NEW_RULE => NativeTable::take_rule,
            kind::NEW_SET => NativeTable::take_set,
            kind::NEW_SET_ELEMENT => NativeTable::take_elements,
            kind::NEW_OBJECT => NativeTable::take_object,
            _ => return,
        };
        let attributes = message.attributes();
        let given = attributes.text(attribute::TABLE);
        if let Some(name) = DataPlane::NFT_TABLES.into_iter().find(|name| Some(*name) == given) {
            // What cannot be read makes the states differ.
            let _ = take(Arc::make_mut(self.tables.entry(name).or_default()), attributes);
        }
    }
}

impl NativeTable {
    fn take_table(&mut self, table: Attributes<'_>) -> Option<()> {
        self.flags = table.u32(attribute::table::FLAGS).unwrap_or_default();
        Some(())
    }

    fn take_chain(&mut self, chain: Attributes<'_>) -> Option<()> {
        self.chain(chain.text(attribute::chain::NAME)?).hook = ChainHook::read(chain);
        Some(())
    }

    fn take_rule(&mut self, rule: Attributes<'_>) -> Option<()> {
        let chain = self.chain(rule.text(attribute::rule::CHAIN)?);
        let list = rule.find(attribute::rule::EXPRESSIONS).unwrap_or(Attribute(&[]));
        chain.rules.push(NativeRule {
            handle: rule.u64(attribute::rule::HANDLE),
            expressions: list.0.into(),
            user_data: rule.find(attribute::rule::USER_DATA).map(|data| data.0.into()),
        });
        Some(())
    }

    fn take_set(&mut self, set: Attributes<'_>) -> Option<()> {
        let key = set_key(set, attribute::set::NAME, attribute::set::ID)?;
        self.sets.entry(key).or_default().attributes = set.raw().into();
        Some(())
    }

    fn take_elements(&mut self, elements: Attributes<'_>) -> Option<()> {
        let key = set_key(elements, attribute::elements::SET, attribute::elements::SET_ID)?;
        let set = self.sets.entry(key).or_default();
        for (_, element) in elements.nested(attribute::elements::ELEMENTS)? {
            set.add(element.attributes());
        }
        Some(())
    }

    fn take_object(&mut self, object: Attributes<'_>) -> Option<()> {
        let part = |kind| object.find(kind).map(|one| one.0).unwrap_or_default();
        let name = [part(attribute::object::TYPE), part(attribute::object::NAME)].concat();
        self.objects.insert(name, object.raw().into());
        Some(())
    }

    /// The chain of this name, which takes its place behind the others if it is new.
    pub(super) fn chain(&mut self, name: &str) -> &mut NativeChain {
        let place = self.chains.len();
        self.chains.entry(name.into()).or_insert_with(|| NativeChain { place, ..NativeChain::default() })
    }

    /// Whether its chains are not on their hooks.
    pub(super) const fn is_dormant(&self) -> bool {
        self.flags & abi::DORMANT != 0
    }

    /// Whether two tables do the same to packets.
    fn same(&self, other: &Self) -> bool {
        self.is_dormant() == other.is_dormant()
            && self.chains.len() == other.chains.len()
            && self.chains.iter().zip(&other.chains).all(|((name, one), (other_name, two))| {
                let mut rules = one.rules.iter().zip(&two.rules);
                (name, &one.hook, one.rules.len()) == (other_name, &two.hook, two.rules.len())
                    && rules.all(|(one, two)| self.same_rule(one, other, two))
            })
    }

    /// Whether a rule of this table says the same as one of another.
    pub(super) fn same_rule(&self, one: &NativeRule, other: &Self, two: &NativeRule) -> bool {
        let (mut of_one, mut of_two) = (one.elements(), two.elements());
        loop {
            match (of_one.next(), of_two.next()) {
                (None, None) => return true,
                (Some(one), Some(two)) if self.same_expression(one, other, two) => {}
                (_, _) => return false,
            }
        }
    }

    /// Whether an expression says the same as one of another table. One that no plan has says what its bytes are.
    fn same_expression(&self, one: Attribute<'_>, other: &Self, two: Attribute<'_>) -> bool {
        match (Expression::read(one), Expression::read(two)) {
            (Some(Expression::Lookup(found)), Some(Expression::Lookup(wanted))) => {
                found == wanted
                    && match (self.set_of(one), other.set_of(two)) {
                        (Some(found), Some(wanted)) => found.meaning == wanted.meaning,
                        // Of a set that neither knows, only the name is known.
                        (None, None) => one == two,
                        (Some(_), None) | (None, Some(_)) => false,
                    }
            }
            (Some(found), Some(wanted)) => {
                self.same_object_map(one, other, two).unwrap_or_else(|| found == wanted)
            }
            (_, _) => one == two,
        }
    }

    /// Whether two references choose the same objects for the same packets; none where they are not references by known maps.
    fn same_object_map(&self, one: Attribute<'_>, other: &Self, two: Attribute<'_>) -> Option<bool> {
        use attribute::object_reference::{SET, SET_ID};
        // The map's name is the kernel's, or its number a transaction's.
        let all_but_the_map = |element| match reading::name_and_data(element)? {
            ("objref", data) => Some(data.filter(|(kind, _)| ![SET, SET_ID].contains(kind))),
            _ => None,
        };
        let (found, wanted) = (self.set_of(one)?, other.set_of(two)?);
        let is_same_kind = found.object_type() == wanted.object_type();
        let is_same_choice = all_but_the_map(one)?.eq(all_but_the_map(two)?);
        Some(is_same_choice && is_same_kind && found.meaning == wanted.meaning)
    }

    /// The set that an expression uses.
    fn set_of(&self, element: Attribute<'_>) -> Option<&SetState> {
        self.sets.get(&set_of(element)?)
    }
}

impl SetState {
    /// Takes in an element.
    pub(super) fn add(&mut self, element: Attributes<'_>) {
        self.elements.push(element.raw().into());
        let key = |kind| element.find(kind).map(key_bytes);
        let (key, last_key) = (key(attribute::element::KEY), key(attribute::element::KEY_END));
        let flags = element.u32(attribute::element::FLAGS).unwrap_or_default();
        let ends = flags & abi::set::END_OF_INTERVAL != 0;
        // An interval's end at 0 is only the begin of what is in no interval.
        if !ends || key.iter().flatten().any(|byte| *byte != 0) {
            let mapped = element.find(attribute::element::DATA);
            let mapped = mapped.or_else(|| element.find(attribute::element::OBJECT));
            let mapped = mapped.map(|data| data.0.into());
            self.meaning.insert(Meaning { key, last_key, ends, mapped });
        }
    }

    /// Whether it belongs to one rule and goes with it.
    pub(super) fn is_anonymous(&self) -> bool {
        let flags = Attribute(&self.attributes).attributes().u32(attribute::set::FLAGS);
        flags.is_some_and(|flags| flags & abi::set::ANONYMOUS != 0)
    }

    /// The type of the objects that it maps to, if it does.
    fn object_type(&self) -> Option<u32> {
        Attribute(&self.attributes).attributes().u32(attribute::set::OBJECT_TYPE)
    }
}

impl PartialEq for NativeState {
    fn eq(&self, other: &Self) -> bool {
        DataPlane::NFT_TABLES.into_iter().all(|table| self.agrees_in(other, table))
    }
}

impl Eq for NativeState {}

/// The marks that a rule gives: a value, stored as the packet's mark.
fn marks_given(rule: &NativeRule) -> impl Iterator<Item = Mark> + '_ {
    let behind = rule.read().skip(1);
    rule.read().zip(behind).filter_map(|(first, second)| {
        let Expression::Store { field: Field::Meta(abi::meta::MARK), .. } = second else { return None };
        let Expression::Value { value, .. } = first else { return None };
        Mark::new(crate::expressions::wire::number(value)?)
    })
}

/// In a transaction, sets are distinguished by their number; the kernel knows names.
fn set_key(attributes: Attributes<'_>, name: u16, number: u16) -> Option<SetKey> {
    let name = attributes.text(name)?;
    if name == crate::expressions::abi::ANONYMOUS_SET {
        return attributes.u32(number).map(SetKey::Number);
    }
    Some(SetKey::Name(name.into()))
}

/// The attributes of an expression that name a set, and that number it.
pub(super) fn set_attributes(name: &str) -> Option<(u16, u16)> {
    match name {
        "lookup" => Some((attribute::lookup::SET, attribute::lookup::SET_ID)),
        "objref" => Some((attribute::object_reference::SET, attribute::object_reference::SET_ID)),
        _ => None,
    }
}

/// The key of the set that an expression uses.
pub(super) fn set_of(element: Attribute<'_>) -> Option<SetKey> {
    let (name, data) = reading::name_and_data(element)?;
    let (by_name, by_number) = set_attributes(name)?;
    set_key(data, by_name, by_number)
}

/// The bytes of a key, or of what is not a key.
fn key_bytes(data: Attribute<'_>) -> Vec<u8> {
    data.attributes().find(attribute::data::VALUE).unwrap_or(data).0.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::{
        options::NativeForm,
        plan::RulePlan,
        settings::{Key, NamespaceFacts, RawSettings, Source},
    };

    fn plan(ports: &'static str) -> RulePlan {
        let mut raw = RawSettings::new();
        raw.set(Key::OutboundExcludePorts, ports, Source::Flag("x"));
        let addresses = ["10.1.0.2".parse().unwrap()];
        redirect_core::Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
    }

    #[test]
    fn plans_differ_in_their_rules_and_sets() {
        for form in [NativeForm::Plain, NativeForm::Sets] {
            let one = NativeState::wanted(&plan("1,2,3"), form);
            assert!(!one.is_empty());
            assert_eq!(one, NativeState::wanted(&plan("1,2,3"), form));
            assert_ne!(one, NativeState::wanted(&plan("1,2,4"), form));
            assert_ne!(one, NativeState::wanted(&plan("1,2"), form));
        }
    }

    #[test]
    fn states_agree_in_the_tables_that_are_the_same() {
        let [one, other] = ["1,2", "3"].map(|ports| NativeState::wanted(&plan(ports), NativeForm::Sets));
        let agree = |one: &NativeState, other: &NativeState| {
            let tables = Table::ALL.iter().copied();
            let agrees = |table: &Table| one.agrees_in(other, DataPlane::Sidecar.nft_table(*table));
            tables.filter(agrees).collect::<Vec<_>>()
        };
        assert_eq!(agree(&one, &one), Table::ALL);
        assert_eq!(agree(&one, &other), [Table::Raw, Table::Mangle]);
        assert_eq!(agree(&one, &NativeState::default()), [Table::Raw, Table::Mangle]);
        assert_eq!(agree(&NativeState::default(), &one), [Table::Raw, Table::Mangle]);
    }

    #[test]
    fn chains_of_old_rules_come_behind_those_that_are_there() {
        let [old, new] = ["1", "2"].map(|ports| NativeState::wanted(&plan(ports), NativeForm::Plain));
        let nat = DataPlane::Sidecar.nft_table(Table::Nat);
        let chains = |state: &NativeState| state.tables[nat].chains.clone();
        let number = chains(&old).len();
        assert!(number > 4);
        for from in [NativeState::default(), new] {
            let all = chains(&from.before_rules_of(&old, nat));
            let mut places: Vec<_> = all.values().map(|chain| chain.place).collect();
            places.sort_unstable();
            assert_eq!(places, (0..number).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_end_of_no_interval_is_no_element() {
        let with = |port: u16, flags: u32| {
            let mut element = crate::expressions::wire::MessageWriter::default();
            element.nested(attribute::element::KEY, |key| {
                key.bytes(attribute::data::VALUE, &port.to_be_bytes());
            });
            element.u32(attribute::element::FLAGS, flags);
            let mut set = SetState::default();
            set.add(element.attributes());
            set.meaning
        };
        let end = abi::set::END_OF_INTERVAL;
        assert!(with(0, end).is_empty());
        let others = [with(0, 0), with(80, 0), with(80, end)];
        assert!(others.iter().all(|meaning| meaning.len() == 1));
        assert!(others[0] != others[1] && others[1] != others[2]);
    }

    #[test]
    fn a_sleeping_table_and_another_policy_are_differences() {
        let wanted = NativeState::wanted(&plan("1"), NativeForm::Plain);
        for table in DataPlane::NFT_TABLES.into_iter().filter(|name| wanted.tables.contains_key(*name)) {
            let mut asleep = wanted.clone();
            Arc::make_mut(asleep.tables.get_mut(table).unwrap()).flags = abi::DORMANT;
            assert_ne!(asleep, wanted, "{table}");
            assert!(asleep.tables[table].is_dormant() && !wanted.tables[table].is_dormant(), "{table}");
            let mut dropping = wanted.clone();
            let chains = Arc::make_mut(dropping.tables.get_mut(table).unwrap()).chains.values_mut();
            let hooks: Vec<&mut ChainHook> = chains.filter_map(|chain| chain.hook.as_mut()).collect();
            assert!(!hooks.is_empty(), "{table}");
            hooks.into_iter().for_each(|hook| hook.policy = 0);
            assert_ne!(dropping, wanted, "{table}");
        }
    }

    #[test]
    fn an_expression_of_somebody_elses_equals_itself() {
        let mut state = NativeState::wanted(&plan("1"), NativeForm::Plain);
        let plain = state.clone();
        let tables = state.tables.values_mut().map(Arc::make_mut);
        for rule in tables.flat_map(|table| table.chains.values_mut()).flat_map(|chain| &mut chain.rules) {
            // A list with one element of three bytes, which is not an expression.
            rule.expressions.extend([7, 0, 1, 0, 1, 2, 3, 0]);
        }
        assert_eq!(state, state.clone());
        assert_ne!(state, plain);
    }
}
