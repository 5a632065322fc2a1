//! A network namespace in memory, to test against.
//!
//! [`Kernel`] takes the steps that [`Goal::steps_from`] plans, refuses what Linux would refuse, is read back as the
//! [`Observation`] that a real run makes, and can be damaged: rules deleted, other programs' rules inserted, routing lost.
//!
//! What it does not do: it sends no packets, has no sets besides those of native rules, and knows no chains but those of
//! iptables' tables and of the mesh's native ones. It takes native rules as they are wanted and never refuses one.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how a test fails; not every package uses everything

mod tables;

use netfilter_state::{
    change::IptablesChange,
    netlink::{Batch, MessagePart, Messages, NativeState, Observed},
    routing::{FoundRouting, RoutingItem, TakingBack},
    state::{IptablesTables, PerFamily},
    steps::{Goal, Inverse, Observation, Step, Transaction},
};
use redirect_core::{
    Family,
    options::Variant,
    plan::DataPlane,
    rule::{Chain, Table},
};
use std::fmt;

pub use tables::{Refusal, Tables, Writer};

/// A network namespace, as far as redirection is concerned.
///
/// Two are equal when a run would observe the same.
#[derive(Debug, Clone, Default)]
pub struct Kernel {
    legacy: PerFamily<Tables>,
    nft: PerFamily<Tables>,
    native: NativeState,
    routing: Vec<FoundRouting>,
}

/// A step that the kernel refuses; nothing of it has happened, but for the tables before `what` of a [`Step::Restore`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Which part of the step: a table with its family, or what is added or removed.
    pub what: String,
    /// Why.
    pub why: Refusal,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.what, self.why)
    }
}

impl Kernel {
    /// A namespace without any rules.
    pub fn new() -> Self {
        Self::default()
    }

    /// A namespace that holds what was observed somewhere.
    pub fn holding(observed: &Observation) -> Self {
        let both =
            |found: &PerFamily<IptablesTables>| PerFamily::each(|family| Tables::holding(found.of(family)));
        Self {
            legacy: both(&observed.legacy),
            nft: both(&observed.nft),
            native: observed.native.clone(),
            routing: observed.routing.clone(),
        }
    }

    /// What a run finds when it looks.
    pub fn observe(&self) -> Observation {
        let both = |both: &PerFamily<Tables>| PerFamily::each(|family| both.of(family).observe());
        Observation {
            legacy: both(&self.legacy),
            nft: both(&self.nft),
            native: self.native.clone(),
            routing: self.routing.clone(),
        }
    }

    /// Looks, plans and takes every step, as a run does; the steps taken. Where one is refused, those before it have happened:
    /// a run would then take them back ([`Step::inverse`], [`Kernel::take_back`]).
    ///
    /// # Errors
    /// The step that was refused.
    pub fn run(&mut self, goal: &Goal<'_>) -> Result<Vec<Step>, Refused> {
        let steps = goal.steps_from(&self.observe());
        steps.iter().try_for_each(|step| self.take(step))?;
        Ok(steps)
    }

    /// Takes one step: wholly or not at all, but for [`Step::Restore`], which happens table by table.
    ///
    /// # Errors
    /// What Linux would refuse.
    pub fn take(&mut self, step: &Step) -> Result<(), Refused> {
        match step {
            Step::AddRouting(item) => self.add_routing(*item),
            Step::MarkForRemoval(found) => self.replace_routing(found, found.mark_for_removal()),
            Step::Transaction(transaction) => self.commit(transaction),
            Step::Restore(variant, family, change) => self.restore(*variant, *family, change),
            Step::Grace | Step::ForgetClosed => Ok(()),
            Step::RemoveRouting(found) => self.remove_routing(found),
        }
    }

    /// Takes a step back.
    ///
    /// # Errors
    /// What Linux would refuse.
    pub fn take_back(&mut self, inverse: &Inverse) -> Result<(), Refused> {
        match inverse {
            Inverse::Routing { change, before } => {
                let TakingBack { make, remove } = change.taking_back(&self.routing, before);
                self.routing.extend(make);
                remove.map_or(Ok(()), |found| self.remove_routing(&found))
            }
            Inverse::Rules { iptables, native } => {
                for (variant, family, done, before) in iptables {
                    let now = self.tables(*variant, *family).observe();
                    self.restore(*variant, *family, &IptablesChange::back(&now, before, done))?;
                }
                if let Some(native) = native {
                    self.native = native.clone();
                }
                Ok(())
            }
            Inverse::Grace | Inverse::Nothing => Ok(()),
        }
    }

    /// The tables of a variant of iptables and a family.
    pub const fn tables(&self, variant: Variant, family: Family) -> &Tables {
        match variant {
            Variant::Legacy => self.legacy.of(family),
            Variant::Nft => self.nft.of(family),
        }
    }

    /// The same, to be changed as another program would.
    pub const fn tables_mut(&mut self, variant: Variant, family: Family) -> &mut Tables {
        match variant {
            Variant::Legacy => self.legacy.of_mut(family),
            Variant::Nft => self.nft.of_mut(family),
        }
    }

    /// The native tables.
    pub const fn native(&self) -> &NativeState {
        &self.native
    }

    /// Deletes a sidecar's rule of a native table, by its number in the chain, counted from 1; whether it was there.
    pub fn delete_native_rule(&mut self, table: Table, chain: &Chain, number: usize) -> bool {
        let (nothing, whole) = (Observed::default(), std::mem::take(&mut self.native));
        let mut batch = Batch::new(&nothing);
        batch.native_change(nothing.native(), &whole);
        let batch = batch.finish().unwrap();
        let place = (DataPlane::Sidecar.nft_table(table), chain.nft_name());
        let mut met = 0;
        for message in Messages::new(batch.bytes()) {
            let is_of_chain = matches!(
                batch.part(message.sequence),
                Some(MessagePart::NativeRule { table, chain, .. }) if (*table, *chain) == (place.0, &*place.1)
            );
            met += usize::from(is_of_chain);
            if !(is_of_chain && met == number) {
                self.native.take(&message);
            }
        }
        (1..=met).contains(&number)
    }

    /// Policy rules, routes and addresses, of any owner.
    pub fn routing(&self) -> &[FoundRouting] {
        &self.routing
    }

    /// Adds a policy rule, route or address as another program would, whether or not an equal one exists.
    pub fn insert_routing(&mut self, found: FoundRouting) {
        self.routing.push(found);
    }

    /// Removes all policy rules, routes and addresses, as `ip rule flush` and its like do.
    pub fn lose_routing(&mut self) {
        self.routing.clear();
    }

    /// One transaction of nf_tables: all of it or nothing.
    fn commit(&mut self, Transaction { iptables, native }: &Transaction) -> Result<(), Refused> {
        let mut nft = self.nft.clone();
        for (family, change) in iptables {
            apply(nft.of_mut(*family), *family, change, Writer::Netlink)?;
        }
        self.nft = nft;
        if let Some(native) = native {
            self.native = native.clone();
        }
        Ok(())
    }

    /// A run of `iptables-restore`.
    fn restore(&mut self, variant: Variant, family: Family, change: &IptablesChange) -> Result<(), Refused> {
        apply(self.tables_mut(variant, family), family, change, Writer::Iptables)
    }

    /// The kernel refuses a second route or address that is the same in everything, and takes any number of the same policy rule.
    fn add_routing(&mut self, item: RoutingItem) -> Result<(), Refused> {
        let found = FoundRouting::working(item);
        if !matches!(item, RoutingItem::Rule(..)) && self.routing.contains(&found) {
            return Err(Refused { what: item.to_string(), why: Refusal::Exists });
        }
        self.routing.push(found);
        Ok(())
    }

    fn remove_routing(&mut self, found: &FoundRouting) -> Result<(), Refused> {
        let place = self.place_of(found)?;
        self.routing.remove(place);
        Ok(())
    }

    fn replace_routing(&mut self, found: &FoundRouting, with: FoundRouting) -> Result<(), Refused> {
        let place = self.place_of(found)?;
        self.routing[place] = with;
        Ok(())
    }

    fn place_of(&self, found: &FoundRouting) -> Result<usize, Refused> {
        // Of several that are the same, the first one.
        let place = self.routing.iter().position(|one| one.is_same_as(found));
        place.ok_or_else(|| Refused { what: found.to_string(), why: Refusal::NotThere })
    }
}

impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        self.observe() == other.observe()
    }
}

impl Eq for Kernel {}

fn apply(
    tables: &mut Tables,
    family: Family,
    change: &IptablesChange,
    writer: Writer,
) -> Result<(), Refused> {
    tables.apply(change, writer).map_err(|mut refused| {
        refused.what = format!("{family} {}", refused.what);
        refused
    })
}
