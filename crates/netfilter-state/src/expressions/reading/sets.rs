//! Sets and maps of nf_tables: their elements as the kernel sends them, and what a lookup finds in them.

use super::{
    super::{
        abi::{attribute, set},
        wire::{Attribute, Attributes},
    },
    key_part::{ALIGNMENT, KeyPart},
};
use crate::ruleset::{Set, SetElement, SetLookup};

/// How many elements of one set are kept at most.
const MOST_ELEMENTS: usize = 1 << 17;

/// What a lookup finds: which combinations of values are in the set, and the verdict of each in a verdict map.
pub(crate) struct FoundElements {
    pub(crate) among: SetLookup,
    pub(crate) verdicts: Vec<(u32, Option<String>)>,
}

/// Why a lookup cannot be followed.
pub(crate) type Why = &'static str;

/// The name of a set; in a transaction those without one are numbered.
pub(crate) fn name_of(attributes: Attributes<'_>, name: u16, number: u16) -> Option<String> {
    let name = attributes.name(name)?;
    if name != super::super::abi::ANONYMOUS_SET {
        return Some(name);
    }
    let number = attributes.u32(number)?;
    Some(name.replace("%d", &number.to_string()))
}

impl Set {
    /// Takes in what a set is.
    pub(crate) fn declare(&mut self, attributes: Attributes<'_>) {
        let length = |of: Attributes<'_>, kind| usize::try_from(of.u32(kind)?).ok();
        self.flags = attributes.u32(attribute::set::FLAGS).unwrap_or_default();
        self.key_length = length(attributes, attribute::set::KEY_LENGTH).unwrap_or_default();
        self.object = attributes.u32(attribute::set::OBJECT_TYPE);
        let description = attributes.nested(attribute::set::DESCRIPTION);
        let parts = description.and_then(|one| one.nested(attribute::set_description::PARTS));
        let lengths =
            parts.into_iter().flatten().map(|(_, part)| length(part.attributes(), attribute::PART_LENGTH));
        self.parts = lengths.flatten().collect();
    }

    /// Takes in elements.
    pub(crate) fn take(&mut self, elements: Attributes<'_>) {
        for (_, element) in elements {
            let has_room = self.elements.len() < MOST_ELEMENTS;
            match has_room.then(|| SetElement::read(element.attributes())).flatten() {
                Some(element) => self.elements.push(element),
                None => self.is_partial = true,
            }
        }
    }

    /// Whether its elements begin and end intervals.
    pub(crate) const fn has_intervals(&self) -> bool {
        self.flags & set::INTERVAL != 0
    }

    /// What a lookup of what registers hold finds.
    pub(crate) fn look_up(&self, name: &str, parts: &[KeyPart]) -> Result<FoundElements, Why> {
        if self.is_partial {
            return Err("a set that was not read whole");
        }
        if parts.iter().map(KeyPart::room).sum::<usize>() != self.key_length.next_multiple_of(ALIGNMENT) {
            return Err("a set of another type");
        }
        let mut found = FoundElements {
            among: SetLookup {
                selectors: parts.iter().map(|part| part.selector).collect(),
                name: (self.flags & set::ANONYMOUS == 0).then(|| name.to_owned()),
                values: Vec::with_capacity(self.elements.len()),
            },
            verdicts: Vec::new(),
        };
        let is_range =
            self.has_intervals() && parts.len() == 1 && self.elements.iter().all(|one| one.last.is_none());
        // Without parts that are compared each by itself, an interval is one of whole keys.
        let are_of_parts = self.flags & set::OF_PARTS != 0
            && parts.iter().map(KeyPart::length).eq(self.parts.iter().copied());
        if self.has_intervals() && !is_range && !are_of_parts {
            return Err("a set whose intervals are not understood");
        }
        let elements = if is_range { self.intervals(parts)? } else { self.combinations(parts)? };
        for (values, element) in elements {
            found.among.values.push(values);
            found.verdicts.extend(element.verdict.clone());
        }
        // Only the elements of a map of verdicts have some.
        if !found.verdicts.is_empty() && found.verdicts.len() != found.among.values.len() {
            return Err("a map with an element without a verdict");
        }
        Ok(found)
    }

    /// Elements that are a value, or a range, of each part. What stands for all others comes last.
    fn combinations(&self, parts: &[KeyPart]) -> Result<Vec<Combination<'_>>, Why> {
        let (mut all, mut rest) = (Vec::with_capacity(self.elements.len()), None);
        for element in self.elements.iter().filter(|element| !element.ends) {
            let Some(first) = &element.key else {
                rest = Some((parts.iter().map(KeyPart::every).collect(), element));
                continue;
            };
            let last = element.last.as_ref().unwrap_or(first);
            let values = combination(parts, first, last).ok_or("a set whose elements are not understood")?;
            all.push((values, element));
        }
        all.extend(rest);
        Ok(all)
    }

    /// Elements that are the begin of an interval, up to the next element.
    fn intervals(&self, parts: &[KeyPart]) -> Result<Vec<Combination<'_>>, Why> {
        const NOT_UNDERSTOOD: Why = "a set whose intervals are not understood";
        let [part] = parts else { return Err(NOT_UNDERSTOOD) };
        // The kernel compares the bytes of keys: their order is that of numbers only in this order of bytes.
        if part.is_host_order() {
            return Err(NOT_UNDERSTOOD);
        }
        let mut keys: Vec<(u128, bool, &SetElement)> = Vec::with_capacity(self.elements.len());
        let mut rest = None;
        for element in &self.elements {
            match &element.key {
                Some(key) => {
                    let (key, _) = part.range(key, key).ok_or(NOT_UNDERSTOOD)?;
                    keys.push((key, !element.ends, element));
                }
                None => rest = Some((Vec::from([part.every()]), element)),
            }
        }
        keys.sort_by_key(|(key, begins, _)| (*key, *begins));
        let nexts = keys.iter().skip(1).map(|(key, ..)| Some(*key)).chain([None]);
        let mut all = Vec::with_capacity(keys.len());
        for ((first, begins, element), next) in keys.iter().zip(nexts) {
            let last = next.map_or_else(|| Some(part.every().1), |next| next.checked_sub(1));
            if let Some(last) = last.filter(|last| *begins && first <= last) {
                all.push(([(*first, last)].into(), *element));
            }
        }
        all.extend(rest);
        Ok(all)
    }
}

type Combination<'a> = (Vec<(u128, u128)>, &'a SetElement);

impl SetElement {
    fn read(attributes: Attributes<'_>) -> Option<Self> {
        let flags = attributes.u32(attribute::element::FLAGS).unwrap_or_default();
        let key = attributes.value(attribute::element::KEY).map(Vec::from);
        if key.is_none() && flags & set::CATCH_ALL == 0 || !attributes.clone().all(only_counts) {
            return None;
        }
        let data = attributes.nested(attribute::element::DATA);
        let verdict = match data.and_then(|data| data.nested(attribute::data::VERDICT)) {
            Some(verdict) => {
                Some((verdict.u32(attribute::verdict::CODE)?, verdict.name(attribute::verdict::CHAIN)))
            }
            None => None,
        };
        Some(Self {
            key,
            last: attributes.value(attribute::element::KEY_END).map(Vec::from),
            ends: flags & set::END_OF_INTERVAL != 0,
            verdict,
        })
    }
}

/// Whether an attribute of an element describes it alone, and lets no packet through or not.
fn only_counts((kind, value): (u16, Attribute<'_>)) -> bool {
    let counts = |one: Attribute<'_>| {
        let name = one.attributes().find(attribute::expression::NAME).map(Attribute::text_bytes);
        matches!(name, Some(b"counter" | b"last"))
    };
    match kind {
        attribute::element::EXPRESSION => counts(value),
        attribute::element::EXPRESSIONS => value.attributes().all(|(_, one)| counts(one)),
        _ => true,
    }
}

fn combination(parts: &[KeyPart], first: &[u8], last: &[u8]) -> Option<Vec<(u128, u128)>> {
    let mut offset = 0_usize;
    let mut values = Vec::with_capacity(parts.len());
    for part in parts {
        values.push(part.range(first.get(offset..)?, last.get(offset..)?)?);
        offset = offset.checked_add(part.room())?;
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expressions::{
        abi::{base, meta},
        reading::{Field, Loaded, ValueOrigin},
        wire::MessageWriter,
    };

    fn part(field: Field) -> KeyPart {
        KeyPart::of(&Loaded::whole(ValueOrigin::Field(field))).unwrap()
    }

    /// What is found of a port, behind other parts, in a set with these flags whose parts have these lengths.
    fn found(
        flags: u32,
        before: &[Field],
        lengths: &[u32],
        elements: &[(&[u8], &[u8])],
    ) -> Result<usize, Why> {
        let port = Field::Payload { base: base::TRANSPORT, offset: 2, length: 2 };
        let parts: Vec<KeyPart> = before.iter().chain([&port]).map(|field| part(*field)).collect();
        let mut declared = MessageWriter::default();
        declared.u32(attribute::set::FLAGS, flags);
        declared.u32(attribute::set::KEY_LENGTH, u32::try_from(elements[0].0.len()).unwrap());
        declared.nested(attribute::set::DESCRIPTION, |description| {
            description.nested(attribute::set_description::PARTS, |parts| {
                for length in lengths {
                    parts.nested(attribute::ELEMENT, |part| {
                        part.u32(attribute::PART_LENGTH, *length);
                    });
                }
            });
        });
        let mut set = Set::default();
        set.declare(declared.attributes());
        for (first, last) in elements {
            let mut list = MessageWriter::default();
            list.nested(attribute::ELEMENT, |element| {
                element.nested(attribute::element::KEY, |key| key.bytes(attribute::data::VALUE, first));
                if first != last {
                    element
                        .nested(attribute::element::KEY_END, |key| key.bytes(attribute::data::VALUE, last));
                }
            });
            set.take(list.attributes());
        }
        set.look_up("s", &parts).map(|found| found.among.values.len())
    }

    #[test]
    fn a_key_that_no_packet_has_is_not_taken_for_another() {
        assert_eq!(found(0, &[], &[], &[(&[0, 80], &[0, 80])]), Ok(1));
        assert_eq!(found(0, &[], &[], &[(&[0, 80, 0, 0], &[0, 80, 0, 0])]), Ok(1));
        let beyond = &[0, 80, 0, 1];
        assert!(found(0, &[], &[], &[(beyond, beyond)]).is_err(), "behind a port registers hold 0");
        assert!(found(set::INTERVAL, &[], &[], &[(beyond, beyond)]).is_err());
    }

    #[test]
    fn intervals_of_several_parts_are_those_that_the_kernel_compares() {
        let mark = [Field::Meta(meta::MARK)];
        let (first, last): (&[u8], &[u8]) = (&[7, 0, 0, 0, 0, 80, 0, 0], &[7, 0, 0, 0, 0, 90, 0, 0]);
        let each = set::INTERVAL | set::OF_PARTS;
        assert_eq!(found(each, &mark, &[4, 2], &[(first, last)]), Ok(1));
        assert!(found(each, &mark, &[4, 1], &[(first, last)]).is_err(), "a part of the port");
        assert!(found(each, &mark, &[8], &[(first, last)]).is_err(), "one behind the other");
        assert!(found(set::INTERVAL, &mark, &[], &[(first, first)]).is_err(), "between whole keys");
        assert_eq!(found(0, &mark, &[], &[(first, first)]), Ok(1));
    }

    #[test]
    fn an_element_with_conditions_of_its_own_is_not_understood() {
        let with = |kind: u16, name: &str| {
            let mut list = MessageWriter::default();
            list.nested(attribute::ELEMENT, |element| {
                element.nested(attribute::element::KEY, |key| key.bytes(attribute::data::VALUE, &[0, 80]));
                let expression = |data: &mut MessageWriter| data.text(attribute::expression::NAME, name);
                if kind == attribute::element::EXPRESSION {
                    element.nested(kind, expression);
                } else {
                    element.nested(kind, |all| all.nested(attribute::ELEMENT, expression));
                }
            });
            let mut set = Set::default();
            set.take(list.attributes());
            set.is_partial
        };
        for kind in [attribute::element::EXPRESSION, attribute::element::EXPRESSIONS] {
            assert!(!with(kind, "counter") && !with(kind, "last"));
            assert!(with(kind, "limit") && with(kind, "quota") && with(kind, "connlimit"));
        }
    }

    #[test]
    fn so_many_elements_are_kept_and_no_more() {
        let mut one = MessageWriter::default();
        one.nested(attribute::ELEMENT, |element| {
            element.nested(attribute::element::KEY, |key| key.bytes(attribute::data::VALUE, &[0, 80]));
        });
        let mut set = Set::default();
        for _ in 0..MOST_ELEMENTS {
            set.take(one.attributes());
        }
        assert_eq!((set.elements.len(), set.is_partial), (MOST_ELEMENTS, false));
        set.take(one.attributes());
        assert_eq!((set.elements.len(), set.is_partial), (MOST_ELEMENTS, true));
    }
}
