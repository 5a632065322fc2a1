//! Sets and maps of a table, as far as rules look something up in them. What a lookup finds is for who reads rules to say.

use std::collections::BTreeMap;

/// The sets of a table, by name.
pub(crate) type Sets = BTreeMap<String, Set>;

/// A set or map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Set {
    pub(crate) flags: u32,
    pub(crate) key_length: usize,
    /// The lengths of a key's parts, where its intervals are those of each.
    pub(crate) parts: Vec<usize>,
    /// Which kind of objects its elements name, if any.
    pub(crate) object: Option<u32>,
    pub(crate) elements: Vec<SetElement>,
    /// Whether elements are missing here: they are too many, or cannot be read.
    pub(crate) is_partial: bool,
}

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SetElement {
    /// None of the element that stands for all others.
    pub(crate) key: Option<Vec<u8>>,
    /// The last key, where an element is a range of each part.
    pub(crate) last: Option<Vec<u8>>,
    /// Whether an interval ends before it.
    pub(crate) ends: bool,
    pub(crate) verdict: Option<(u32, Option<String>)>,
}
