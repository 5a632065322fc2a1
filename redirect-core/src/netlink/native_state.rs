//! What the mesh's native tables hold: compared with what a plan puts there, and complete enough to be made again.

use super::{
    Batch, NativeForm, NativeRules, Observed,
    abi::{self, attribute, family, kind},
    decode,
    wire::{Attribute, Attributes, Message, Messages},
};
use crate::{
    plan::RulePlan,
    render::{NFT_TABLES, nft_table},
    rule::{Hook, OurChain, Table},
    values::Mark,
};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    string::{String, ToString},
    vec::Vec,
};

/// The mesh's native tables, as the kernel holds them or as a plan wants them.
///
/// Two are equal when their tables are awake, their chains hang on the same hooks with the same policy and hold the
/// same rules in the same order; counters, handles, comments and names of anonymous sets mean nothing. Expressions that
/// no plan has are kept as they are, so that a rule of somebody else's equals itself and can be put back.
#[derive(Debug, Clone, Default)]
pub struct NativeState {
    pub(super) tables: BTreeMap<String, TableState>,
}

/// One table.
#[derive(Debug, Clone, Default)]
pub(super) struct TableState {
    /// `NFTA_TABLE_FLAGS`; a dormant table has hooks that are not registered.
    pub(super) flags: u32,
    pub(super) chains: BTreeMap<String, ChainState>,
    pub(super) sets: BTreeMap<SetKey, SetState>,
    /// Stateful objects; a plan has none.
    pub(super) objects: BTreeMap<Vec<u8>, RawAttributes>,
}

/// Attributes as they came: type and value.
pub(super) type RawAttributes = Vec<(u16, Vec<u8>)>;

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
    /// Key, whether an interval ends there, and the value in a map: what a set means.
    meaning: BTreeSet<(Vec<u8>, bool, Option<Vec<u8>>)>,
}

/// One chain.
#[derive(Debug, Clone, Default)]
pub(super) struct ChainState {
    /// Its place among the chains of its table, in the order in which they were made.
    pub(super) place: usize,
    pub(super) hook: Option<NativeHook>,
    pub(super) rules: Vec<NativeRule>,
}

/// Where a base chain hangs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NativeHook {
    pub(super) number: u32,
    pub(super) priority: u32,
    pub(super) kind: String,
    pub(super) policy: u32,
}

/// One rule.
#[derive(Debug, Clone)]
pub(super) struct NativeRule {
    /// The kernel's number of it; none in a plan.
    pub(super) handle: Option<u64>,
    /// Its expressions, as they go over the wire.
    pub(super) expressions: Vec<u8>,
    pub(super) user_data: Option<Vec<u8>>,
    /// For people.
    pub(super) words: String,
    meaning: Vec<Expression>,
}

/// An expression with what it says, in a fixed order.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Expression {
    Plain(String, Vec<Option<Vec<u8>>>),
    Lookup(SetKey, Vec<Option<Vec<u8>>>),
    /// One that no plan has, with all its bytes.
    Other(Vec<u8>),
}

impl NativeState {
    /// What a plan would put there.
    #[must_use]
    pub fn wanted(plan: &RulePlan, form: NativeForm) -> Self {
        let (nothing, rules) = (Observed::default(), NativeRules::new(plan, form));
        let mut batch = Batch::new(&nothing);
        batch.native(&rules);
        let mut state = Self::default();
        if let Ok(batch) = batch.finish() {
            for message in Messages::new(batch.bytes()) {
                let words = || batch.part(message.sequence).map(ToString::to_string);
                state.read(&message, words);
            }
        }
        state
    }

    /// Whether there is no table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// The names of the mesh's tables that are there.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(String::as_str)
    }

    /// The names of the sets seen so far, by table.
    #[must_use]
    pub fn sets(&self) -> Vec<(String, String)> {
        let sets =
            self.tables.iter().flat_map(|(table, state)| state.sets.keys().map(move |key| (table, key)));
        let named = sets.filter_map(|(table, key)| match key {
            SetKey::Name(name) => Some((table.clone(), name.clone())),
            SetKey::Number(_) => None,
        });
        named.collect()
    }

    /// Whether a table hands inbound connections to the proxy: a packet that arrives jumps to `istio-inbound`.
    #[must_use]
    pub fn captures_inbound(&self, table: Table) -> bool {
        let prerouting = self
            .tables
            .get(nft_table(table))
            .and_then(|state| state.chains.get(&crate::render::nft_chain_name(&Hook::Prerouting.into())));
        let inbound = crate::render::nft_chain_name(&OurChain::Inbound.into());
        prerouting.is_some_and(|chain| {
            let jumps = |rule: &NativeRule| {
                decode::jump_of(Attribute(&rule.expressions).attributes()) == Some(&inbound)
            };
            chain.rules.iter().any(jumps)
        })
    }

    /// Whether rules of a table look something up in a set.
    #[must_use]
    pub fn looks_up(&self, table: Table) -> bool {
        let is_lookup = |one: &Expression| matches!(one, Expression::Lookup(..));
        self.tables.get(nft_table(table)).is_some_and(|state| {
            state
                .chains
                .values()
                .flat_map(|chain| &chain.rules)
                .any(|rule| rule.meaning.iter().any(is_lookup))
        })
    }

    /// Whether a table is the same in both.
    #[must_use]
    pub fn agrees_in(&self, other: &Self, table: Table) -> bool {
        let name = nft_table(table);
        match (self.tables.get(name), other.tables.get(name)) {
            (None, None) => true,
            (Some(one), Some(two)) => one.same(two),
            (Some(_), None) | (None, Some(_)) => false,
        }
    }

    /// The same, with one table as it is in `other`.
    #[must_use]
    pub fn with_table_of(mut self, other: &Self, table: Table) -> Self {
        let name = nft_table(table);
        self.tables.remove(name);
        self.tables.extend(other.tables.get(name).map(|state| (name.to_string(), state.clone())));
        self
    }

    /// The same, with the rules that a table has in `old` behind those it has here, chain by chain. All sets of both
    /// are there.
    #[must_use]
    pub fn before_rules_of(mut self, old: &Self, table: Table) -> Self {
        let name = nft_table(table);
        let Some(from) = old.tables.get(name) else { return self };
        let to = self.tables.entry(name.to_string()).or_default();
        for (chain, from) in &from.chains {
            let place = to.chains.len();
            let new = || ChainState { place, ..ChainState::default() };
            let to = to.chains.entry(chain.clone()).or_insert_with(new);
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
        rules.flat_map(|rule| marks_given(&rule.meaning)).collect()
    }

    /// Takes in one message of an answer: a table, a chain, a rule, a set, its elements or an object.
    pub fn take(&mut self, message: &Message<'_>) {
        self.read(message, || None);
    }

    fn read(&mut self, message: &Message<'_>, words: impl FnOnce() -> Option<String>) {
        if message.family != family::INET {
            return;
        }
        // What cannot be read makes the states differ, or belongs to others.
        let _ = match message.kind {
            kind::NEW_TABLE => self.table(message),
            kind::NEW_CHAIN => self.chain(message),
            kind::NEW_RULE => self.rule(message, words()),
            kind::NEW_SET => self.set(message),
            kind::NEW_SET_ELEMENT => self.elements(message),
            kind::NEW_OBJECT => self.object(message),
            _ => None,
        };
    }

    fn table(&mut self, message: &Message<'_>) -> Option<()> {
        let name = ours(message.attributes(), attribute::table::NAME)?;
        let flags = message.attributes().find(attribute::table::FLAGS).and_then(Attribute::u32);
        self.tables.entry(name).or_default().flags = flags.unwrap_or_default();
        Some(())
    }

    fn chain(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::chain::TABLE)?;
        let name = attributes.find(attribute::chain::NAME)?.text()?.into();
        let hook = attributes.find(attribute::chain::HOOK).and_then(|hook| {
            let hook = hook.attributes();
            Some(NativeHook {
                number: hook.find(attribute::hook::NUMBER)?.u32()?,
                priority: hook.find(attribute::hook::PRIORITY)?.u32()?,
                kind: attributes.find(attribute::chain::TYPE)?.text()?.into(),
                policy: attributes
                    .find(attribute::chain::POLICY)
                    .and_then(Attribute::u32)
                    .unwrap_or(abi::POLICY_ACCEPT),
            })
        });
        let chains = &mut self.tables.entry(table).or_default().chains;
        let place = chains.len();
        let chain = chains.entry(name).or_insert_with(|| ChainState { place, ..ChainState::default() });
        chain.hook = hook;
        Some(())
    }

    fn rule(&mut self, message: &Message<'_>, words: Option<String>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::rule::TABLE)?;
        let chain = attributes.find(attribute::rule::CHAIN)?.text()?.into();
        let list = attributes.find(attribute::rule::EXPRESSIONS).unwrap_or(Attribute(&[]));
        let rule = NativeRule {
            handle: attributes.find(attribute::rule::HANDLE).and_then(Attribute::u64),
            expressions: list.0.into(),
            user_data: attributes.find(attribute::rule::USER_DATA).map(|data| data.0.into()),
            words: words.unwrap_or_else(|| decode::description(list.attributes())),
            meaning: list.attributes().map(|(_, element)| expression(element)).collect(),
        };
        self.tables.entry(table).or_default().chains.entry(chain).or_default().rules.push(rule);
        Some(())
    }

    fn set(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::set::TABLE)?;
        let key = set_key(attributes, attribute::set::NAME, attribute::set::ID)?;
        self.tables.entry(table).or_default().sets.entry(key).or_default().attributes = raw(attributes);
        Some(())
    }

    fn elements(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::elements::TABLE)?;
        let key = set_key(attributes, attribute::elements::SET, attribute::elements::SET_ID)?;
        let set = self.tables.entry(table).or_default().sets.entry(key).or_default();
        for (_, element) in attributes.find(attribute::elements::ELEMENTS)?.attributes() {
            let element = element.attributes();
            set.elements.push(raw(element));
            let key = value(element.find(attribute::element::KEY)?)?;
            let ends =
                element.find(attribute::element::FLAGS).and_then(Attribute::u32).unwrap_or_default() & 1 == 1;
            // An interval's end at 0 is only the begin of what is in no interval.
            if !ends || key.iter().any(|byte| *byte != 0) {
                let mapped = element.find(attribute::element::DATA).map(|data| data.0.into());
                set.meaning.insert((key, ends, mapped));
            }
        }
        Some(())
    }

    fn object(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::object::TABLE)?;
        let part = |kind| attributes.find(kind).map(|one| one.0).unwrap_or_default();
        let name = [part(attribute::object::TYPE), part(attribute::object::NAME)].concat();
        self.tables.entry(table).or_default().objects.insert(name, raw(attributes));
        Some(())
    }
}

impl TableState {
    /// Whether two tables do the same to packets.
    fn same(&self, other: &Self) -> bool {
        self.flags & abi::DORMANT == other.flags & abi::DORMANT
            && self.chains.len() == other.chains.len()
            && self.chains.iter().zip(&other.chains).all(|((name, one), (other_name, two))| {
                name == other_name && self.same_chain(one, other, two)
            })
    }

    fn same_chain(&self, one: &ChainState, other: &Self, two: &ChainState) -> bool {
        one.hook == two.hook
            && one.rules.len() == two.rules.len()
            && one.rules.iter().zip(&two.rules).all(|(one, two)| self.same_rule(one, other, two))
    }

    /// Whether a rule of this table says the same as one of another.
    pub(super) fn same_rule(&self, one: &NativeRule, other: &Self, two: &NativeRule) -> bool {
        one.meaning.len() == two.meaning.len()
            && one.meaning.iter().zip(&two.meaning).all(|pair| match pair {
                (Expression::Lookup(set, says), Expression::Lookup(other_set, other_says)) => {
                    let (found, wanted) = (self.sets.get(set), other.sets.get(other_set));
                    let meanings = found.zip(wanted).map(|(a, b)| a.meaning == b.meaning);
                    says == other_says && meanings == Some(true)
                }
                (one, two) => one == two,
            })
    }
}

impl SetState {
    /// Whether it belongs to one rule and goes with it.
    pub(super) fn is_anonymous(&self) -> bool {
        let flags = self.attributes.iter().find(|(kind, _)| *kind == attribute::set::FLAGS);
        flags
            .and_then(|(_, value)| Attribute(value).u32())
            .is_some_and(|flags| flags & abi::set::ANONYMOUS != 0)
    }
}

impl PartialEq for NativeState {
    fn eq(&self, other: &Self) -> bool {
        self.tables.len() == other.tables.len()
            && self
                .tables
                .iter()
                .zip(&other.tables)
                .all(|((name, one), (other_name, two))| name == other_name && one.same(two))
    }
}

impl Eq for NativeState {}

/// The marks that a rule gives: a value, stored as the packet's mark.
fn marks_given(meaning: &[Expression]) -> impl Iterator<Item = Mark> + '_ {
    let stores_mark = |one: &Expression| match one {
        Expression::Plain(name, says) if name == "meta" => {
            let [key, destination, source] = says.as_slice() else { return false };
            key.as_deref() == Some(&abi::meta::MARK.to_be_bytes())
                && destination.is_none()
                && source.is_some()
        }
        Expression::Plain(..) | Expression::Lookup(..) | Expression::Other(_) => false,
    };
    meaning.iter().zip(meaning.iter().skip(1)).filter_map(move |(value, store)| match value {
        Expression::Plain(name, says) if name == "immediate" && stores_mark(store) => {
            let bytes = says.last()?.as_deref()?;
            Mark::new(u32::from_ne_bytes(bytes.try_into().ok()?))
        }
        Expression::Plain(..) | Expression::Lookup(..) | Expression::Other(_) => None,
    })
}

/// The name of a table, if it is one of the mesh's.
fn ours(attributes: Attributes<'_>, kind: u16) -> Option<String> {
    let name = attributes.find(kind)?.text()?;
    NFT_TABLES.contains(&name).then(|| name.into())
}

fn raw(attributes: Attributes<'_>) -> RawAttributes {
    attributes.map(|(kind, value)| (kind, value.0.into())).collect()
}

/// In a transaction, sets are told apart by their number; the kernel knows names.
pub(super) fn set_key(attributes: Attributes<'_>, name: u16, number: u16) -> Option<SetKey> {
    let name = attributes.find(name)?.text()?;
    if name == super::sets::ANONYMOUS_NAME {
        return attributes.find(number)?.u32().map(SetKey::Number);
    }
    Some(SetKey::Name(name.into()))
}

/// The bytes of a value, or of a verdict: its code and chain.
fn value(data: Attribute<'_>) -> Option<Vec<u8>> {
    let data = data.attributes();
    if let Some(value) = data.find(attribute::data::VALUE) {
        return Some(value.0.into());
    }
    let verdict = data.find(attribute::data::VERDICT)?.attributes();
    let mut bytes: Vec<u8> = verdict.find(attribute::verdict::CODE)?.0.into();
    bytes.extend(verdict.find(attribute::verdict::CHAIN).map(|chain| chain.0).unwrap_or_default());
    Some(bytes)
}

fn expression(element: Attribute<'_>) -> Expression {
    known_expression(element).unwrap_or_else(|| Expression::Other(element.0.into()))
}

fn known_expression(element: Attribute<'_>) -> Option<Expression> {
    let (name, data) = decode::expression(element)?;
    let plain = |kinds: &[u16]| kinds.iter().map(|kind| data.find(*kind).map(|one| one.0.to_vec())).collect();
    let with_values = |kinds: &[u16], values: &[u16]| -> Vec<Option<Vec<u8>>> {
        let mut says: Vec<Option<Vec<u8>>> = plain(kinds);
        says.extend(values.iter().map(|kind| data.find(*kind).and_then(value)));
        says
    };
    use attribute::{bitwise, cmp, ct, immediate, lookup, meta, payload, range, redir, tproxy};
    let says = match name {
        "counter" => Vec::new(),
        "meta" => plain(&[meta::KEY, meta::DESTINATION, meta::SOURCE]),
        "ct" => plain(&[ct::KEY, ct::DESTINATION, ct::SOURCE, ct::DIRECTION]),
        // One that writes to the packet is none of ours.
        "payload" if data.find(payload::SOURCE).is_none() => {
            plain(&[payload::DESTINATION, payload::BASE, payload::OFFSET, payload::LENGTH])
        }
        "bitwise" => with_values(
            &[bitwise::SOURCE, bitwise::DESTINATION, bitwise::LENGTH],
            &[bitwise::MASK, bitwise::XOR],
        ),
        "cmp" => with_values(&[cmp::REGISTER, cmp::OPERATOR], &[cmp::DATA]),
        "range" => with_values(&[range::REGISTER, range::OPERATOR], &[range::FROM, range::TO]),
        "immediate" => with_values(&[immediate::REGISTER], &[immediate::DATA]),
        "redir" => plain(&[redir::FIRST_PORT, redir::LAST_PORT, redir::FLAGS]),
        "tproxy" => plain(&[tproxy::FAMILY, tproxy::PORT]),
        "lookup" => {
            let set = set_key(data, lookup::SET, lookup::SET_ID)?;
            let flags = data.find(lookup::FLAGS).and_then(Attribute::u32).unwrap_or_default();
            let mut says: Vec<Option<Vec<u8>>> = plain(&[lookup::SOURCE, lookup::DESTINATION]);
            says.push(Some(flags.to_be_bytes().to_vec()));
            return Some(Expression::Lookup(set, says));
        }
        _ => return None,
    };
    Some(Expression::Plain(name.into(), says))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Key, NamespaceFacts, RawSettings, Source};

    fn plan(ports: &'static str) -> RulePlan {
        let mut raw = RawSettings::new();
        raw.set(Key::OutboundExcludePorts, ports, Source::Flag("x"));
        let addresses = ["10.1.0.2".parse().unwrap()];
        crate::Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
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
    fn a_sleeping_table_and_another_policy_are_differences() {
        let wanted = NativeState::wanted(&plan("1"), NativeForm::Plain);
        for table in NFT_TABLES.into_iter().filter(|name| wanted.tables.contains_key(*name)) {
            let mut asleep = wanted.clone();
            asleep.tables.get_mut(table).unwrap().flags = abi::DORMANT;
            assert_ne!(asleep, wanted, "{table}");
            let mut dropping = wanted.clone();
            let chains = dropping.tables.get_mut(table).unwrap().chains.values_mut();
            let hooks: Vec<&mut NativeHook> = chains.filter_map(|chain| chain.hook.as_mut()).collect();
            assert!(!hooks.is_empty(), "{table}");
            hooks.into_iter().for_each(|hook| hook.policy = 0);
            assert_ne!(dropping, wanted, "{table}");
        }
    }

    #[test]
    fn an_expression_of_somebody_elses_equals_itself() {
        let mut state = NativeState::wanted(&plan("1"), NativeForm::Plain);
        let chains = state.tables.values_mut().flat_map(|table| table.chains.values_mut());
        for rule in chains.flat_map(|chain| &mut chain.rules) {
            rule.meaning.push(Expression::Other([1, 2, 3].into()));
        }
        assert_eq!(state, state.clone());
    }
}
