//! What the kernel holds, read from its answers: rules with their handles, chains with their hooks.

use super::{
    kept::KeptTable,
    native_state::{ChainHook, NativeState},
};
use crate::expressions::{
    abi::{self, attribute, family, kind},
    decode,
    wire::{Attribute, Attributes, Message},
};
use crate::ruleset::{HookedRules, TableFamily};
use crate::state::{Entry, IptablesTables, PerFamily, RawRule};
use redirect_core::{
    plan::DataPlane,
    rule::{Chain, Table},
    values::Family,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
};

/// What this program writes beside its rules in built-in chains, so that they can be determined from others of the same shape: an
/// entry of a type that neither iptables nor nft has a meaning for, and that both pass over (libnftnl's `udata`).
pub(super) const SIGNATURE: &[u8] = b"\x69\x06istio\0";

/// The iptables tables of both families and the mesh's native tables as the kernel holds them at one moment, and what
/// is needed to change them.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    generation: Option<u32>,
    families: PerFamily<FamilyTables>,
    native: NativeState,
    /// Tables that a plan touches and that do not act, or may not be changed.
    obstacles: BTreeSet<TableObstacle>,
    /// Whether any program has a table, of any family.
    has_tables: bool,
    /// Whether connections are kept.
    keeps_connections: bool,
    /// Whether other programs have a table, or a chain in a table of iptables.
    has_others: bool,
    /// What was taken in, as long as it may be all that packets meet, and how many rules are among it.
    messages: Arc<Vec<u8>>,
    rules: usize,
}

/// A table that a plan has rules in, in a state in which those rules would not work or cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum TableObstacle {
    /// Its chains are not on their hooks: no packet meets its rules (`flags dormant`).
    #[error(
        "table {table} is dormant, so the kernel ignores its rules; wake it (nft 'add table {table} {{ flags ; }}') or delete it"
    )]
    Dormant {
        /// Family and name.
        table: String,
    },
    /// It belongs to another program's socket (`flags owner`); no other program may change it.
    #[error(
        "table {table} is owned by another program (flags owner, netlink port {owner}, mostly its process id) and only that program can change it; end it, or make it use a table of its own"
    )]
    Owned {
        /// Family and name.
        table: String,
        /// The port of the owner's netlink socket: mostly the process id.
        owner: u32,
    },
}

/// The tables of a family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct FamilyTables {
    state: IptablesTables,
    tables: BTreeMap<Table, BTreeMap<Chain, ChainFacts>>,
}

/// What a chain has besides its rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ChainFacts {
    /// The handles of its rules, in their order.
    pub(super) handles: Vec<u64>,
    /// Its hook, if it has one.
    pub(super) hook: Option<ChainHook>,
}

impl Observed {
    /// Nothing, at a generation of the ruleset.
    #[must_use]
    pub fn at(generation: u32) -> Self {
        Self { generation: Some(generation), ..Self::default() }
    }

    /// The same, not bound to a generation: for a ruleset that another program changes faster than it can be read. A
    /// transaction based on it names the rules it removes and those it goes before by their handles, and is refused
    /// when one of them is gone.
    #[must_use]
    pub fn of_any_generation(self) -> Self {
        Self { generation: None, ..self }
    }

    /// The generation of the ruleset that was checked. A transaction based on it is refused once it has passed.
    #[must_use]
    pub const fn generation(&self) -> Option<u32> {
        self.generation
    }

    /// The rules of a family in the tables a plan has rules in.
    #[must_use]
    pub const fn state(&self, family: Family) -> &IptablesTables {
        &self.families.of(family).state
    }

    /// The native tables of the mesh, all of family inet.
    #[must_use]
    pub const fn native(&self) -> &NativeState {
        &self.native
    }

    /// Tables that a plan touches and that do not act, or may not be changed.
    pub fn obstacles(&self) -> impl Iterator<Item = &TableObstacle> {
        self.obstacles.iter()
    }

    /// Whether any program has a table of nf_tables, of whatever family.
    #[must_use]
    pub const fn has_tables(&self) -> bool {
        self.has_tables
    }

    /// Whether a table of connections that are kept exists ([`KeptTable`]).
    #[must_use]
    pub const fn keeps_connections(&self) -> bool {
        self.keeps_connections
    }

    /// All that packets meet in nf_tables; `None` if other programs have a table or chain, whose rules were not taken in, or if the rules are more
    /// than this many.
    #[must_use]
    pub fn into_everything(mut self, most_rules: usize) -> Option<HookedRules> {
        if self.has_others || self.rules > most_rules {
            return None;
        }
        let messages = mem::take(&mut self.messages);
        // What was made of them may be as large as a large plan.
        drop(self);
        Some(HookedRules::of_messages(&messages))
    }

    /// Whether a table is there.
    #[must_use]
    pub fn has_table(&self, family: Family, table: Table) -> bool {
        self.families.of(family).tables.contains_key(&table)
    }

    /// Whether the rules and native tables are the same, whatever the generation. Handles may differ, and so may
    /// chains of other programs that a change never touches.
    #[must_use]
    pub fn reads_like(&self, other: &Self) -> bool {
        let same = |family| self.state(family).chains_of_changes() == other.state(family).chains_of_changes();
        Family::BOTH.into_iter().all(same) && self.native == other.native && self.obstacles == other.obstacles
    }

    /// Takes in one message of an answer: a table, a chain or a rule. Other messages are ignored.
    ///
    /// Chains are asked for before their rules, so that a rule's chain is known.
    pub fn take(&mut self, message: &Message<'_>) {
        self.native.take(message);
        let attributes = message.attributes();
        // What cannot be read is passed over: it belongs to nothing that a plan touches.
        let _ = match message.kind {
            kind::NEW_TABLE => {
                self.has_tables = true;
                let planned = self.table(message.family, attributes);
                self.has_others |= planned.is_none();
                planned
            }
            kind::NEW_CHAIN => self.chain(message.family, attributes),
            kind::NEW_RULE => {
                self.rules = self.rules.saturating_add(1);
                self.rule(message.family, attributes)
            }
            _ => None,
        };
        if self.has_others {
            self.messages = Arc::default();
        } else {
            message.append_to(Arc::make_mut(&mut self.messages));
        }
    }

    /// The chains of a table whose rules are worth reading where others have chains, too: those that a change may touch.
    /// `None` if no other program has any.
    #[must_use]
    pub fn chains_to_read(&self, family: Family, table: Table) -> Option<Vec<Chain>> {
        let of_table = self.families.of(family).tables.get(&table);
        let chains: Vec<&Chain> = of_table.into_iter().flat_map(BTreeMap::keys).collect();
        let have_others = chains.iter().copied().any(is_others_chain);
        have_others.then(|| chains.into_iter().filter(|chain| !is_others_chain(chain)).cloned().collect())
    }

    /// The facts about a chain, if it is there.
    pub(super) fn chain_facts(&self, family: Family, table: Table, chain: &Chain) -> Option<&ChainFacts> {
        self.families.of(family).tables.get(&table)?.get(chain)
    }

    /// Takes in a table; none where no plan has one of this name.
    fn table(&mut self, family: u8, attributes: Attributes<'_>) -> Option<()> {
        let name = attributes.text(attribute::TABLE)?;
        let of = if family == family::INET {
            self.keeps_connections |= name == KeptTable::NAME;
            DataPlane::NFT_TABLES.contains(&name).then_some(TableFamily::Inet)?
        } else {
            let (family, table) = (abi::family_of(family)?, Table::named(name)?);
            self.families.of_mut(family).tables.entry(table).or_default();
            family.into()
        };
        self.obstacles_in(attributes, format!("{} {name}", of.name()));
        Some(())
    }

    fn obstacles_in(&mut self, attributes: Attributes<'_>, table: String) {
        if attributes.u32(attribute::table::FLAGS).unwrap_or_default() & abi::DORMANT != 0 {
            self.obstacles.insert(TableObstacle::Dormant { table: table.clone() });
        }
        let owner = attributes.u32(attribute::table::OWNER);
        self.obstacles.extend(owner.map(|owner| TableObstacle::Owned { table, owner }));
    }

    fn chain(&mut self, family: u8, attributes: Attributes<'_>) -> Option<()> {
        if family == family::INET {
            return None;
        }
        let chain = attributes.text(attribute::chain::NAME).map(Chain::named);
        self.has_others |= chain.as_ref().is_none_or(is_others_chain);
        let (table, chain) = (Table::named(attributes.text(attribute::TABLE)?)?, chain?);
        let tables = self.families.of_mut(abi::family_of(family)?);
        // Built-in chains without rules do not count as declared: with the other backends they are always there.
        if !matches!(chain, Chain::Hook(_)) {
            tables.state.declare(table, chain.clone());
        }
        tables.tables.entry(table).or_default().entry(chain).or_default().hook = ChainHook::read(attributes);
        Some(())
    }

    fn rule(&mut self, family: u8, attributes: Attributes<'_>) -> Option<()> {
        let family = abi::family_of(family)?;
        let table = Table::named(attributes.text(attribute::TABLE)?)?;
        let chain = Chain::named(attributes.text(attribute::rule::CHAIN)?);
        let handle = attributes.u64(attribute::rule::HANDLE)?;
        let expressions = attributes.find(attribute::rule::EXPRESSIONS).unwrap_or(Attribute(&[]));
        let user_data = attributes.find(attribute::rule::USER_DATA);
        let is_signed = user_data.is_some_and(|data| data.0 == SIGNATURE);
        let entry = entry(expressions, user_data.filter(|_| !is_signed), family);
        let tables = self.families.of_mut(family);
        if is_signed {
            tables.state.sign(table, chain.clone(), entry.clone());
        }
        tables.state.declare(table, chain.clone()).push(entry);
        tables.tables.entry(table).or_default().entry(chain).or_default().handles.push(handle);
        Some(())
    }
}

/// Whether a chain of a table of iptables belongs to another program.
fn is_others_chain(chain: &Chain) -> bool {
    matches!(chain, Chain::Other(_)) && !chain.belongs_to_mesh()
}

/// A rule with a comment is another's: ours have none.
fn entry(expressions: Attribute<'_>, user_data: Option<Attribute<'_>>, family: Family) -> Entry {
    let understood = if user_data.is_none() { decode::rule(expressions.attributes(), family) } else { None };
    match understood {
        Some(rule) => Entry::Rule(rule),
        None => Entry::Foreign(RawRule::new(expressions.attributes(), user_data).into()),
    }
}
