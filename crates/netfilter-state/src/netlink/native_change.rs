//! From the native tables in force to others, rule by rule.
//!
//! Tables, base chains and rules that stay are not touched: a packet between two chains keeps meeting them, and what is
//! another program's keeps its handle. What goes is named by its handle, what comes is placed before the next rule that
//! stays.

use super::{
    Batch,
    native_state::{
        ChainHook, NativeChain, NativeRule, NativeState, NativeTable, RawAttributes, SetKey, SetState,
        set_attributes, set_of,
    },
    part::MessagePart,
};
use crate::expressions::{
    abi::{
        attribute::{self, expression},
        family, flags, kind,
    },
    reading,
    wire::{Attribute, MessageWriter},
};
use redirect_core::plan::DataPlane;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// How many bytes of elements a message carries: their list has a length of 16 bits.
const ELEMENT_BYTES: usize = 48 * 1024;

impl<'a> Batch<'a> {
    /// Adds what turns the native tables `now` in force into `wanted`.
    pub fn native_change(&mut self, now: &'a NativeState, wanted: &'a NativeState) {
        for (name, _) in now.tables.iter().filter(|(name, _)| !wanted.tables.contains_key(*name)) {
            self.remove_native_table(name);
        }
        for name in DataPlane::NFT_TABLES {
            if let Some(wanted) = wanted.tables.get(name) {
                let change = TableChange { name, now: now.tables.get(name).map(Arc::as_ref), wanted };
                if change.can_be_made_in_place() {
                    change.write(self);
                } else {
                    self.remove_native_table(name);
                    TableChange { now: None, ..change }.write(self);
                }
            }
        }
    }

    fn remove_native_table(&mut self, name: &str) {
        self.native_part((kind::DELETE_TABLE, 0), name, "removal of a native table", |_| {});
    }

    fn native_part(
        &mut self,
        head: (u16, u16),
        table: &str,
        words: &'a str,
        body: impl FnOnce(&mut MessageWriter),
    ) {
        self.part(head, family::INET, table, MessagePart::Native(words), body);
    }
}

/// One table, before and after.
struct TableChange<'a> {
    name: &'a str,
    now: Option<&'a NativeTable>,
    wanted: &'a NativeTable,
}

impl<'a> TableChange<'a> {
    /// The kernel takes no base chain into a table whose flags change in the same transaction, and lets none go from it
    /// (`__NFT_TABLE_F_UPDATE` in `nf_tables_api.c`).
    fn can_be_made_in_place(&self) -> bool {
        let Some(now) = self.now else { return true };
        let is_hooked = |chain: &NativeChain| chain.hook.is_some();
        let mut chains = now.chains.iter().chain(&self.wanted.chains);
        now.flags == self.wanted.flags
            || !chains.any(|(name, chain)| is_hooked(chain) && self.kept_chain(name).is_none())
    }

    fn write(&self, batch: &mut Batch<'a>) {
        if self.now.is_none_or(|now| now.flags != self.wanted.flags) {
            batch.native_part((kind::NEW_TABLE, flags::CREATE), self.name, "a native table", |body| {
                if self.now.is_some() || self.wanted.flags != 0 {
                    body.u32(attribute::table::FLAGS, self.wanted.flags);
                }
            });
        }
        self.removals(batch);
        self.chains(batch);
        self.objects(batch);
        let there = |key: &SetKey| self.now.is_some_and(|now| now.sets.contains_key(key));
        for (key, _) in self.wanted.sets.iter().filter(|(key, set)| !set.is_anonymous() && !there(key)) {
            if let SetKey::Name(name) = key {
                self.set(batch, key, name);
            }
        }
        for (name, wanted) in &self.wanted.chains {
            self.rules(batch, name, wanted);
        }
    }

    /// The chain as it is, unless it must be made again because it hangs elsewhere.
    fn kept_chain(&self, name: &str) -> Option<&'a NativeChain> {
        let found = self.now?.chains.get(name)?;
        let wanted = self.wanted.chains.get(name)?;
        let place = |chain: &'a NativeChain| chain.hook.as_ref().map(ChainHook::place);
        (place(found) == place(wanted)).then_some(found)
    }

    /// Rules that go, then chains that go: by then nothing jumps to them.
    fn removals(&self, batch: &mut Batch<'a>) {
        let Some(now) = self.now else { return };
        for (name, chain) in &now.chains {
            let staying: BTreeSet<u64> = self.kept_rules(name).into_values().collect();
            for rule in
                chain.rules.iter().filter(|rule| !rule.handle.is_some_and(|handle| staying.contains(&handle)))
            {
                let words = "removal of a rule of a native table";
                batch.native_part((kind::DELETE_RULE, 0), self.name, words, |body| {
                    body.text(attribute::rule::CHAIN, name);
                    if let Some(handle) = rule.handle {
                        body.u64(attribute::rule::HANDLE, handle);
                    }
                });
            }
        }
        for name in now.chains.keys().filter(|name| self.kept_chain(name).is_none()) {
            let words = "removal of a chain of a native table";
            batch.native_part((kind::DELETE_CHAIN, 0), self.name, words, |body| {
                body.text(attribute::chain::NAME, name);
            });
        }
    }

    /// Which rules of a chain stay: the position of each wanted one, with its handle. A rule whose handle exists is that
    /// very rule; any other is matched to the next equal one.
    fn kept_rules(&self, name: &str) -> BTreeMap<usize, u64> {
        let mut kept = BTreeMap::new();
        let (Some(found), Some(NativeChain { rules: wanted, .. })) =
            (self.kept_chain(name), self.wanted.chains.get(name))
        else {
            return kept;
        };
        let there: BTreeSet<u64> = found.rules.iter().filter_map(|rule| rule.handle).collect();
        let claim = |rule: &NativeRule| rule.handle.filter(|handle| there.contains(handle));
        let claimed: BTreeSet<u64> = wanted.iter().filter_map(claim).collect();
        let mut rest = found.rules.as_slice();
        for (index, rule) in wanted.iter().enumerate() {
            let is_it = |candidate: &NativeRule| match (claim(rule), candidate.handle) {
                (Some(wanted), Some(found)) => wanted == found,
                (None, Some(found)) => !claimed.contains(&found) && self.reads_like(candidate, rule),
                (_, None) => false,
            };
            if let Some((_, [candidate, behind @ ..])) =
                rest.iter().position(is_it).and_then(|place| rest.split_at_checked(place))
            {
                kept.extend(candidate.handle.map(|handle| (index, handle)));
                rest = behind;
            }
        }
        kept
    }

    fn reads_like(&self, found: &NativeRule, wanted: &NativeRule) -> bool {
        found.user_data == wanted.user_data
            && self.now.is_some_and(|now| now.same_rule(found, self.wanted, wanted))
    }

    /// Chains that come, and base chains whose policy changes.
    fn chains(&self, batch: &mut Batch<'a>) {
        let mut chains: Vec<_> = self.wanted.chains.iter().collect();
        chains.sort_by_key(|(_, chain)| chain.place);
        for (name, wanted) in chains {
            let kept = self.kept_chain(name);
            if kept.is_some_and(|kept| kept.hook == wanted.hook) {
                continue;
            }
            let words = "a chain of a native table";
            batch.native_part((kind::NEW_CHAIN, flags::CREATE), self.name, words, |body| {
                body.text(attribute::chain::NAME, name);
                match (&wanted.hook, kept) {
                    (Some(hook), None) => hook.write(body),
                    // Only the policy of one that is there can change.
                    (Some(hook), Some(_)) => body.u32(attribute::chain::POLICY, hook.policy),
                    (None, _) => {}
                }
            });
        }
    }

    fn objects(&self, batch: &mut Batch<'a>) {
        let there = |key: &Vec<u8>| self.now.is_some_and(|now| now.objects.contains_key(key));
        for (_, object) in self.wanted.objects.iter().filter(|(key, _)| !there(key)) {
            let words = "an object of a native table";
            batch.native_part((kind::NEW_OBJECT, flags::CREATE), self.name, words, |body| {
                copy(body, object, &attribute::object::WRITABLE);
            });
        }
    }

    /// Rules that come, each before the next one that stays.
    fn rules(&self, batch: &mut Batch<'a>, chain: &'a str, wanted: &'a NativeChain) {
        let kept = self.kept_rules(chain);
        for (index, rule) in wanted.rules.iter().enumerate().filter(|(index, _)| !kept.contains_key(index)) {
            let before = kept.range(index..).next().map(|(_, handle)| *handle);
            self.rule(batch, chain, rule, before);
        }
    }

    fn rule(&self, batch: &mut Batch<'a>, chain: &'a str, rule: &'a NativeRule, before: Option<u64>) {
        let numbers = self.own_sets(batch, rule);
        let flags = flags::CREATE | if before.is_some() { 0 } else { flags::APPEND };
        let part = MessagePart::NativeRule { table: self.name, chain, expressions: &rule.expressions };
        batch.part((kind::NEW_RULE, flags), family::INET, self.name, part, |body| {
            body.text(attribute::rule::CHAIN, chain);
            body.nested(attribute::rule::EXPRESSIONS, |list| {
                if numbers.is_empty() {
                    list.raw(&rule.expressions);
                    return;
                }
                for (kind, element) in Attribute(&rule.expressions).attributes() {
                    write_expression(list, kind, element, &numbers);
                }
            });
            if let Some(user_data) = &rule.user_data {
                body.bytes(attribute::rule::USER_DATA, user_data);
            }
            if let Some(handle) = before {
                body.u64(attribute::rule::POSITION, handle);
            }
        });
    }

    /// Makes the sets that only this rule has; their numbers in this transaction.
    fn own_sets(&self, batch: &mut Batch<'a>, rule: &'a NativeRule) -> BTreeMap<SetKey, u32> {
        let mut numbers = BTreeMap::new();
        if self.wanted.sets.is_empty() {
            return numbers;
        }
        for (_, element) in Attribute(&rule.expressions).attributes() {
            let Some(key) = set_of(element) else { continue };
            if self.wanted.sets.get(&key).is_some_and(SetState::is_anonymous) && !numbers.contains_key(&key) {
                let number = self.set(batch, &key, crate::expressions::abi::ANONYMOUS_SET);
                numbers.insert(key, number);
            }
        }
        numbers
    }

    /// Makes a set and fills it; its number in this transaction.
    fn set(&self, batch: &mut Batch<'a>, key: &SetKey, name: &str) -> u32 {
        const WORDS: &str = "a set of a native table";
        batch.sets = batch.sets.saturating_add(1);
        let number = batch.sets;
        let Some(set) = self.wanted.sets.get(key) else { return number };
        batch.native_part((kind::NEW_SET, flags::CREATE), self.name, WORDS, |body| {
            body.text(attribute::set::NAME, name);
            body.u32(attribute::set::ID, number);
            copy(body, &set.attributes, &attribute::set::WRITABLE);
        });
        for elements in messages(&set.elements) {
            batch.native_part((kind::NEW_SET_ELEMENT, flags::CREATE), self.name, WORDS, |body| {
                body.text(attribute::elements::SET, name);
                body.u32(attribute::elements::SET_ID, number);
                body.nested(attribute::elements::ELEMENTS, |list| {
                    for element in elements {
                        list.nested(attribute::ELEMENT, |out| {
                            copy(out, element, &attribute::element::WRITABLE);
                        });
                    }
                });
            });
        }
        number
    }
}

fn copy(body: &mut MessageWriter, attributes: &RawAttributes, allowed: &[u16]) {
    for (kind, value) in Attribute(attributes).attributes().filter(|(kind, _)| allowed.contains(kind)) {
        body.bytes(kind, value.0);
    }
}

/// Elements by message.
fn messages(elements: &[RawAttributes]) -> Vec<&[RawAttributes]> {
    // With a header for each attribute and one for the element, and padding.
    let size = |element: &RawAttributes| {
        let attributes = Attribute(element).attributes();
        attributes.map(|(_, value)| value.0.len().saturating_add(8)).sum::<usize>().saturating_add(8)
    };
    let (mut parts, mut start, mut bytes) = (Vec::new(), 0, 0_usize);
    for (index, element) in elements.iter().enumerate() {
        bytes = bytes.saturating_add(size(element));
        if bytes > ELEMENT_BYTES {
            parts.extend(elements.get(start..index));
            (start, bytes) = (index, size(element));
        }
    }
    parts.extend(elements.get(start..).filter(|rest| !rest.is_empty()));
    parts
}

/// An expression as it was, but for the number of a set that this transaction makes.
fn write_expression(
    list: &mut MessageWriter,
    kind: u16,
    element: Attribute<'_>,
    numbers: &BTreeMap<SetKey, u32>,
) {
    let number = set_of(element).and_then(|key| numbers.get(&key));
    let (Some(number), Some((name, data))) = (number, reading::name_and_data(element)) else {
        list.nested(kind, |out| out.raw(element.0));
        return;
    };
    let Some((by_name, by_number)) = set_attributes(name) else { return };
    list.nested(kind, |out| {
        out.text(expression::NAME, name);
        out.nested(expression::DATA, |out| {
            for (kind, value) in data.filter(|(kind, _)| ![by_name, by_number].contains(kind)) {
                out.bytes(kind, value.0);
            }
            out.text(by_name, crate::expressions::abi::ANONYMOUS_SET);
            out.u32(by_number, *number);
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expressions::abi::DORMANT;
    use redirect_core::{Families, Redirect, options::NativeForm};

    #[test]
    fn a_table_that_sleeps_is_woken_where_it_stands_while_its_base_chains_stay() {
        let plan = Redirect::sidecar(Families::Both).build().unwrap().plan();
        let state = NativeState::wanted(&plan, NativeForm::Plain);
        let [name] = state.tables.keys().collect::<Vec<_>>()[..] else { panic!("one table") };
        let wanted = &*state.tables[name];
        let without = |is_base: bool| {
            let mut asleep = NativeTable { flags: DORMANT, ..wanted.clone() };
            let chain = asleep.chains.iter().find(|(_, chain)| chain.hook.is_some() == is_base);
            let chain = chain.map(|(name, _)| name.clone()).unwrap();
            asleep.chains.remove(&chain);
            asleep
        };
        for (now, in_place) in [
            (NativeTable { flags: DORMANT, ..wanted.clone() }, true),
            (without(false), true),
            (without(true), false),
            (NativeTable { flags: wanted.flags, ..without(true) }, true),
        ] {
            let change = TableChange { name, now: Some(&now), wanted };
            assert_eq!(change.can_be_made_in_place(), in_place, "{:?}", now.chains.keys());
            let back = TableChange { name, now: Some(wanted), wanted: &now };
            assert_eq!(back.can_be_made_in_place(), in_place, "{:?}", now.chains.keys());
        }
        assert!(TableChange { name, now: None, wanted }.can_be_made_in_place());
    }

    #[test]
    fn expressions_that_use_a_set_or_a_map_of_objects_name_it_by_its_new_number() {
        use attribute::{lookup, object_reference};
        let using = |name: &str, by: (u16, u16), set: &str, number: u32| {
            let mut list = MessageWriter::default();
            list.nested(attribute::ELEMENT, |out| {
                out.text(expression::NAME, name);
                out.nested(expression::DATA, |out| {
                    out.text(by.0, set);
                    out.u32(by.1, number);
                });
            });
            list.take().unwrap()
        };
        let numbers = BTreeMap::from([(SetKey::Name("__objmap4".into()), 7)]);
        for (name, by) in [
            ("lookup", (lookup::SET, lookup::SET_ID)),
            ("objref", (object_reference::SET, object_reference::SET_ID)),
        ] {
            for (set, wanted) in [
                ("__objmap4", using(name, by, crate::expressions::abi::ANONYMOUS_SET, 7)),
                ("of_others", using(name, by, "of_others", 4)),
            ] {
                let was = using(name, by, set, 4);
                let mut written = MessageWriter::default();
                for (kind, element) in Attribute(&was).attributes() {
                    write_expression(&mut written, kind, element, &numbers);
                }
                assert_eq!(written.take().unwrap(), wanted, "{name} {set}");
            }
        }
    }

    #[test]
    fn elements_go_into_as_few_messages_as_hold_them() {
        // With its headers a quarter of a message, and one byte more.
        let element = |more: usize| {
            let mut element = MessageWriter::default();
            element.bytes(attribute::element::KEY, &vec![0; ELEMENT_BYTES / 4 - 16 + more]);
            element.take().unwrap()
        };
        for (more, numbers) in [(0, &[4, 4, 1][..]), (1, &[3, 3, 3])] {
            let elements = vec![element(more); 9];
            let parts = messages(&elements);
            assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), numbers);
        }
        assert!(messages(&[]).is_empty());
        assert!(ELEMENT_BYTES > 32 * 1024 && ELEMENT_BYTES < usize::from(u16::MAX) - 1024);
    }
}
