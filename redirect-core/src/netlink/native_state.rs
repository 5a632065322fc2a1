//! What native tables hold, compared with what a plan would put there.

use super::{
    Batch, NativeForm, NativeRules, Observed,
    abi::{attribute, family, kind},
    decode,
    wire::{Attribute, Attributes, Message, Messages},
};
use crate::{plan::RulePlan, render::NFT_TABLES};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    string::String,
    vec::Vec,
};

/// The mesh's native tables as the kernel holds them.
///
/// Two are equal when their chains hang on the same hooks and hold the same rules in the same order; counters, handles
/// and names of anonymous sets mean nothing. A rule with expressions that ours never have equals none, not even itself.
#[derive(Debug, Clone, Default)]
pub struct NativeState {
    tables: BTreeMap<String, BTreeMap<String, Chain>>,
    sets: BTreeMap<(String, SetKey), Elements>,
}

type Elements = BTreeSet<(Vec<u8>, bool)>;

/// A set is named by the kernel, and numbered in a transaction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum SetKey {
    Name(String),
    Number(u32),
}

#[derive(Debug, Clone, Default)]
struct Chain {
    /// Hook number, priority and type of a base chain.
    hook: Option<(u32, u32, String)>,
    /// The expressions of each rule; `None` for a rule that holds one that ours never do.
    rules: Vec<Option<Vec<Expression>>>,
}

/// An expression with what it says, in a fixed order.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Expression {
    Plain(String, Vec<Option<Vec<u8>>>),
    Lookup(SetKey, Vec<Option<Vec<u8>>>),
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
                state.take(&message);
            }
        }
        state
    }

    /// Whether there is no table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// The names of the anonymous sets seen so far, by table.
    #[must_use]
    pub fn sets(&self) -> Vec<(String, String)> {
        let name = |(table, key): &(String, SetKey)| match key {
            SetKey::Name(name) => Some((table.clone(), name.clone())),
            SetKey::Number(_) => None,
        };
        self.sets.keys().filter_map(name).collect()
    }

    /// Takes in one message of an answer: a table, a chain, a rule, a set or its elements.
    pub fn take(&mut self, message: &Message<'_>) {
        if message.family != family::INET {
            return;
        }
        // What cannot be read makes the states differ, or belongs to others.
        let _ = match message.kind {
            kind::NEW_TABLE => self.table(message),
            kind::NEW_CHAIN => self.chain(message),
            kind::NEW_RULE => self.rule(message),
            kind::NEW_SET => self.set(message),
            kind::NEW_SET_ELEMENT => self.elements(message),
            _ => None,
        };
    }

    fn table(&mut self, message: &Message<'_>) -> Option<()> {
        let name = ours(message.attributes(), attribute::table::NAME)?;
        self.tables.entry(name).or_default();
        Some(())
    }

    fn chain(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::chain::TABLE)?;
        let name = attributes.find(attribute::chain::NAME)?.text()?.into();
        let hook = attributes.find(attribute::chain::HOOK).and_then(|hook| {
            let hook = hook.attributes();
            let number = hook.find(attribute::hook::NUMBER)?.u32()?;
            let kind = attributes.find(attribute::chain::TYPE)?.text()?.into();
            Some((number, hook.find(attribute::hook::PRIORITY)?.u32()?, kind))
        });
        self.tables.entry(table).or_default().entry(name).or_default().hook = hook;
        Some(())
    }

    fn rule(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::rule::TABLE)?;
        let chain = attributes.find(attribute::rule::CHAIN)?.text()?.into();
        let list = attributes.find(attribute::rule::EXPRESSIONS).unwrap_or(Attribute(&[]));
        let rule = list.attributes().map(|(_, element)| expression(element)).collect();
        self.tables.entry(table).or_default().entry(chain).or_default().rules.push(rule);
        Some(())
    }

    fn set(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::set::TABLE)?;
        let key = set_key(attributes, attribute::set::NAME, attribute::set::ID)?;
        self.sets.entry((table, key)).or_default();
        Some(())
    }

    fn elements(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let table = ours(attributes, attribute::elements::TABLE)?;
        let key = set_key(attributes, attribute::elements::SET, attribute::elements::SET_ID)?;
        let set = self.sets.entry((table, key)).or_default();
        for (_, element) in attributes.find(attribute::elements::ELEMENTS)?.attributes() {
            let element = element.attributes();
            let key = value(element.find(attribute::element::KEY)?)?;
            let ends =
                element.find(attribute::element::FLAGS).and_then(Attribute::u32).unwrap_or_default() & 1;
            // An interval's end at 0 is only the begin of what is in no interval.
            if ends == 0 || key.iter().any(|byte| *byte != 0) {
                set.insert((key, ends == 1));
            }
        }
        Some(())
    }

    fn same_rule(&self, other: &Self, table: &str, pair: (&[Expression], &[Expression])) -> bool {
        let elements = |state: &Self, key: &SetKey| state.sets.get(&(table.into(), key.clone())).cloned();
        pair.0.len() == pair.1.len()
            && pair.0.iter().zip(pair.1).all(|(a, b)| match (a, b) {
                (Expression::Lookup(set, says), Expression::Lookup(other_set, other_says)) => {
                    let (one, two) = (elements(self, set), elements(other, other_set));
                    says == other_says && one.is_some() && one == two
                }
                (Expression::Plain(..), Expression::Plain(..)) => a == b,
                (Expression::Plain(..), Expression::Lookup(..))
                | (Expression::Lookup(..), Expression::Plain(..)) => false,
            })
    }

    fn same_chain(&self, other: &Self, table: &str, one: &Chain, two: &Chain) -> bool {
        one.hook == two.hook
            && one.rules.len() == two.rules.len()
            && one.rules.iter().zip(&two.rules).all(|pair| match pair {
                (Some(one), Some(two)) => self.same_rule(other, table, (one, two)),
                (Some(_) | None, None) | (None, Some(_)) => false,
            })
    }
}

impl PartialEq for NativeState {
    fn eq(&self, other: &Self) -> bool {
        self.tables.len() == other.tables.len()
            && self.tables.iter().zip(&other.tables).all(|((table, one), (other_table, two))| {
                table == other_table
                    && one.len() == two.len()
                    && one.iter().zip(two).all(|((name, one), (other_name, two))| {
                        name == other_name && self.same_chain(other, table, one, two)
                    })
            })
    }
}

/// The name of a table, if it is one of the mesh's.
fn ours(attributes: Attributes<'_>, kind: u16) -> Option<String> {
    let name = attributes.find(kind)?.text()?;
    NFT_TABLES.contains(&name).then(|| name.into())
}

/// In a transaction, sets are told apart by their number; the kernel knows names.
fn set_key(attributes: Attributes<'_>, name: u16, number: u16) -> Option<SetKey> {
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

fn expression(element: Attribute<'_>) -> Option<Expression> {
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
        "ct" => plain(&[ct::KEY, ct::DESTINATION, ct::SOURCE]),
        "payload" => plain(&[payload::DESTINATION, payload::BASE, payload::OFFSET, payload::LENGTH]),
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
            let register = data.find(lookup::SOURCE).map(|one| one.0.to_vec());
            return Some(Expression::Lookup(set, [register, Some(flags.to_be_bytes().to_vec())].into()));
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
}
