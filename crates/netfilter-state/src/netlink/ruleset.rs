//! All tables of a namespace, of any program, read from the kernel's answers.

use super::native_state::ChainHook;
use crate::expressions::{
    abi::{self, attribute, device_hook, family, kind},
    reading::sets,
    seen,
    wire::{Attribute, Attributes, Message, Messages},
};
use crate::ruleset::{
    Api, Base, ChainState, DeviceBase, HookedRules, InterfaceDirection, Set, TableFamily, TableName,
    TableState,
};
use crate::state::comment_in;
use redirect_core::{
    plan::DataPlane,
    rule::{Chain, Table},
    values::Family,
};

/// The policy to drop (`NF_DROP`).
const POLICY_DROP: u32 = 0;

impl HookedRules {
    /// The rules in a whole dump, or in a transaction that was the first.
    #[must_use]
    pub fn of_messages(bytes: &[u8]) -> Self {
        let mut ruleset = Self::default();
        let (rules, others): (Vec<_>, Vec<_>) =
            Messages::new(bytes).partition(|message| message.kind == kind::NEW_RULE);
        // Sets come before the rules that look something up in them.
        others.iter().chain(&rules).for_each(|message| ruleset.take(message));
        ruleset.forget_elements();
        ruleset
    }

    /// Takes in one message of an answer: a table, a set or its elements, a chain or a rule of a family that packets of IP meet. Sets come
    /// before the rules that look something up in them; what is not known by then is not understood.
    pub fn take(&mut self, message: &Message<'_>) {
        // What cannot be read is of no table, or of none that packets of IP meet.
        let _ = match message.kind {
            kind::NEW_TABLE => self.in_table(message, TableState::take_table),
            kind::NEW_SET => self.in_table(message, TableState::take_set),
            kind::NEW_SET_ELEMENT => self.in_table(message, TableState::take_elements),
            kind::NEW_CHAIN => self.in_table(message, |table, chain| table.take_chain(chain, message.family)),
            kind::NEW_RULE => {
                let (mut looked_up, family) = (self.looked_up, abi::family_of(message.family));
                self.in_table(message, |table, rule| table.take_rule(rule, family, &mut looked_up))
                    .map(|()| self.looked_up = looked_up)
            }
            _ => None,
        };
    }

    /// Lets the table that a message is about take in its attributes.
    fn in_table(
        &mut self,
        message: &Message<'_>,
        take: impl FnOnce(&mut TableState, Attributes<'_>) -> Option<()>,
    ) -> Option<()> {
        let (family, attributes) = (abi::table_family(message.family)?, message.attributes());
        let name = attributes.name(attribute::TABLE)?;
        take(self.table(TableName { api: Api::NfTables, family, name }), attributes)
    }

    /// The sets taken in so far: family, table and name of each.
    #[must_use]
    pub fn sets(&self) -> Vec<(TableFamily, String, String)> {
        let tables = self.tables.iter().filter(|(name, _)| name.api == Api::NfTables);
        let sets = tables.flat_map(|(name, table)| table.sets.keys().map(move |set| (name, set)));
        sets.map(|(name, set)| (name.family, name.name.clone(), set.clone())).collect()
    }

    /// Whether a set that was taken in holds intervals.
    #[must_use]
    pub fn has_intervals(&self, family: TableFamily, table: &str, set: &str) -> bool {
        let name = TableName { api: Api::NfTables, family, name: table.to_owned() };
        let set = self.tables.get(&name).and_then(|table| table.sets.get(set));
        set.is_some_and(Set::has_intervals)
    }

    /// Does without the elements of a set: they are too many to be read.
    pub fn leave_unread(&mut self, family: TableFamily, table: &str, set: &str) {
        let table = self.table(TableName { api: Api::NfTables, family, name: table.to_owned() });
        if let Some(set) = table.sets.get_mut(set) {
            set.is_partial = true;
        }
    }

    /// The chains of nf_tables taken in so far that have rules: the mesh's first, and then the shortest.
    #[must_use]
    pub fn chains_to_read(&self) -> Vec<ChainToRead> {
        let tables = self.tables.iter().filter(|(name, _)| name.api == Api::NfTables);
        let of_table = |(name, table): (&TableName, &TableState)| {
            let of_one = |(chain, state): (&String, &ChainState)| ChainToRead {
                family: name.family,
                table: name.name.clone(),
                chain: chain.clone(),
                rules: usize::try_from(state.uses).unwrap_or(usize::MAX),
                may_be_planned: may_be_planned(&name.name, chain, state),
            };
            table.chains.iter().map(of_one).collect::<Vec<_>>()
        };
        let mut chains: Vec<ChainToRead> = tables.flat_map(of_table).filter(|one| one.rules > 0).collect();
        chains.sort_by_key(|one| (!one.may_be_planned, one.rules));
        chains
    }

    /// Forgets the elements of sets, once the rules that look something up in them were taken in.
    pub fn forget_elements(&mut self) {
        self.tables.values_mut().for_each(|table| table.sets.clear());
    }

    /// Forgets the rules of all chains, to read them one chain after the other.
    pub fn forget_rules(&mut self) {
        self.tables
            .values_mut()
            .flat_map(|table| table.chains.values_mut())
            .for_each(|chain| chain.rules.clear());
        self.looked_up = 0;
    }

    /// Does without the rules of a chain: they are too many to be read.
    pub fn leave_chain_unread(&mut self, of: &ChainToRead) {
        let table = self.table(TableName { api: Api::NfTables, family: of.family, name: of.table.clone() });
        if let Some(chain) = table.chains.get_mut(&of.chain) {
            (chain.rules, chain.is_partial) = (Vec::new(), true);
        }
    }
}

impl TableState {
    fn take_table(&mut self, table: Attributes<'_>) -> Option<()> {
        self.dormant = table.u32(attribute::table::FLAGS).unwrap_or_default() & abi::DORMANT != 0;
        Some(())
    }

    fn take_set(&mut self, set: Attributes<'_>) -> Option<()> {
        let name = sets::name_of(set, attribute::set::NAME, attribute::set::ID)?;
        self.sets.entry(name).or_default().declare(set);
        Some(())
    }

    fn take_elements(&mut self, of_set: Attributes<'_>) -> Option<()> {
        let name = sets::name_of(of_set, attribute::elements::SET, attribute::elements::SET_ID)?;
        let elements = of_set.nested(attribute::elements::ELEMENTS)?;
        self.sets.get_mut(&name)?.take(elements);
        Some(())
    }

    fn take_chain(&mut self, attributes: Attributes<'_>, family: u8) -> Option<()> {
        let chain = self.chains.entry(attributes.name(attribute::chain::NAME)?).or_default();
        chain.handle = attributes.u64(attribute::chain::HANDLE).unwrap_or_default();
        chain.base = base(family, attributes);
        chain.device = device_base(family, attributes);
        chain.uses = attributes.u32(attribute::chain::USE).unwrap_or_default();
        Some(())
    }

    fn take_rule(
        &mut self,
        attributes: Attributes<'_>,
        family: Option<Family>,
        looked_up: &mut usize,
    ) -> Option<()> {
        let chain = self.chains.entry(attributes.name(attribute::rule::CHAIN)?).or_default();
        let list = attributes.find(attribute::rule::EXPRESSIONS).unwrap_or(Attribute(&[]));
        let mut rule = seen::rule_with(list.attributes(), family, &self.sets, looked_up);
        let user_data = attributes.find(attribute::rule::USER_DATA);
        if let Some(comment) = user_data.and_then(|data| comment_in(data.0)) {
            rule.comment = comment.to_owned();
        }
        chain.rules.push(rule);
        Some(())
    }
}

/// A chain whose rules are to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainToRead {
    /// The family of its table.
    pub family: TableFamily,
    /// Its table.
    pub table: String,
    /// Its name.
    pub chain: String,
    /// How many rules it has at most.
    pub rules: usize,
    may_be_planned: bool,
}

/// Whether a plan may have rules in a chain. Any program may use its names, too.
fn may_be_planned(table: &str, chain: &str, state: &ChainState) -> bool {
    let is_plans = Table::ALL.iter().any(|one| one.name() == table);
    DataPlane::NFT_TABLES.contains(&table)
        || is_plans && (state.base.is_some() || Chain::named(chain).belongs_to_mesh())
}

/// Where a chain hangs on a hook of IP, if it does.
fn base(family: u8, chain: Attributes<'_>) -> Option<Base> {
    let hung = ChainHook::read(chain).filter(|_| family != family::NETDEV)?;
    Some(Base {
        hook: abi::hook_of(hung.number)?,
        priority: hung.priority.cast_signed(),
        is_nat: hung.kind == "nat",
        drops: hung.policy == POLICY_DROP,
        reroutes: hung.kind == "route",
    })
}

/// Where a chain hangs on interfaces, if it does.
fn device_base(family: u8, chain: Attributes<'_>) -> Option<DeviceBase> {
    let hook = chain.nested(attribute::chain::HOOK)?;
    let direction = match (family, hook.u32(attribute::hook::NUMBER)?) {
        (family::NETDEV, device_hook::INGRESS) | (family::INET, device_hook::INET_INGRESS) => {
            InterfaceDirection::Ingress
        }
        (family::NETDEV, device_hook::EGRESS) => InterfaceDirection::Egress,
        _ => return None,
    };
    let named = |(kind, name): (u16, Attribute<'_>)| match kind {
        attribute::device::NAME => Some(name.name()),
        attribute::device::PREFIX => Some(format!("{}*", name.name())),
        _ => None,
    };
    // Of several interfaces the first may be said on its own, too.
    let mut devices: Vec<String> = match hook.find(attribute::hook::DEVICES) {
        Some(devices) => devices.attributes().filter_map(named).collect(),
        None => hook.name(attribute::hook::DEVICE).into_iter().collect(),
    };
    devices.sort_unstable();
    let priority = hook.u32(attribute::hook::PRIORITY)?.cast_signed();
    let drops = chain.u32(attribute::chain::POLICY) == Some(POLICY_DROP);
    Some(DeviceBase { direction, devices, priority, drops })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        netlink::{
            Batch, NativeState, Observed,
            recorded::dumps::{dumped, plans},
        },
        ruleset::Counter,
    };
    use redirect_core::{RulePlan, options::NativeForm};
    use std::collections::BTreeSet;

    fn native(plan: &RulePlan, form: NativeForm) -> HookedRules {
        let (observed, wanted) = (Observed::default(), NativeState::wanted(plan, form));
        let mut batch = Batch::new(&observed);
        batch.native_change(observed.native(), &wanted);
        dumped(batch.finish().unwrap().bytes())
    }

    #[test]
    fn the_sets_of_nf_tables_are_listed() {
        let [(_, plan), ..] = plans();
        let mut ruleset = native(&plan, NativeForm::Sets);
        let sets = ruleset.sets();
        let names: BTreeSet<&str> = sets.iter().map(|(_, table, _)| table.as_str()).collect();
        assert!(names.contains("istio-proxy-nat"), "{sets:?}");
        assert!(
            sets.iter().all(|(family, _, set)| *family == TableFamily::Inet && !set.is_empty()),
            "{sets:?}"
        );
        // The other kind of tables has none: what its rules name is in ipset.
        for (mut name, table) in std::mem::take(&mut ruleset.tables) {
            name.api = Api::XTables;
            ruleset.tables.insert(name, table);
        }
        assert_eq!(ruleset.sets(), []);
    }

    /// Names that are not UTF-8 stay distinct, and lead to one another.
    #[test]
    fn names_of_any_bytes_are_read() {
        let mut writer = crate::expressions::wire::MessageWriter::default();
        let head = |kind: u16| crate::expressions::wire::Head {
            kind,
            flags: 0,
            sequence: 1,
            family: family::INET,
            resource: 0,
        };
        for chain in [b"\xff\0", b"\xfe\0"] {
            writer.message(head(kind::NEW_CHAIN), |body| {
                body.bytes(attribute::TABLE, b"t\xc3\0");
                body.bytes(attribute::chain::NAME, chain);
            });
        }
        let ruleset = dumped(&writer.finish().unwrap());
        let (name, table) = ruleset.tables.iter().next().unwrap();
        let names: Vec<Vec<u8>> =
            table.chains.keys().map(|name| crate::ruleset::name_bytes(name).collect()).collect();
        assert_eq!((name.to_string(), names), (r"inet t\xc3".into(), [[0xfe].into(), [0xff].into()].into()));
    }

    #[test]
    fn what_the_kernel_counted_is_read() {
        let mut writer = crate::expressions::wire::MessageWriter::default();
        writer.nested(attribute::ELEMENT, |element| {
            element.text(attribute::expression::NAME, "counter");
            element.nested(attribute::expression::DATA, |data| {
                data.u64(attribute::counter::BYTES, 180);
                data.u64(attribute::counter::PACKETS, 3);
            });
        });
        assert_eq!(seen::rule(writer.attributes()).counter, Some(Counter { packets: 3, bytes: 180 }));
        assert_eq!(seen::rule(crate::expressions::wire::MessageWriter::default().attributes()).counter, None);
    }
}
