//! Questions to the kernel, none of which changes anything.

use crate::expressions::{
    abi::{attribute, family, flags, hook_number, kind, table_family_number},
    wire::{Head, Message, MessageWriter},
    xt::Extension,
};
use crate::ruleset::TableFamily;
use redirect_core::{rule::Hook, values::Family};

/// What the kernel is asked. A table, a chain and a set are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question<'a> {
    /// Which generation the ruleset is at ([`Message::generation`]). Answered only where the kernel has nf_tables.
    Generation,
    /// All tables of all families.
    Tables,
    /// All chains of a family, or of all.
    Chains(Option<TableFamily>),
    /// All rules of all tables of all families.
    Rules,
    /// The rules of a table.
    RulesOfTable(TableFamily, &'a str),
    /// The rules of a chain of a table.
    RulesOfChain(TableFamily, &'a str, &'a str),
    /// All sets of all tables of all families, without their elements.
    Sets,
    /// The sets of a table, without their elements.
    SetsOfTable(TableFamily, &'a str),
    /// The elements of a set of a table.
    Elements(TableFamily, &'a str, &'a str),
    /// The stateful objects of a table.
    Objects(TableFamily, &'a str),
    /// What hangs on a hook of IP. Answered only where the kernel can list it (`CONFIG_NETFILTER_NETLINK_HOOK`, Linux 5.14).
    Hooks(Family, Hook),
    /// Whether an xt match or target exists. The kernel loads its module if it can, and answers with an error if not.
    Extension(Family, Extension),
}

impl Question<'_> {
    /// The message that asks it, with this number.
    #[must_use]
    pub fn message(self, sequence: u32) -> Vec<u8> {
        let ask = |kind: u16, flags: u16, family: u8, body: &dyn Fn(&mut MessageWriter)| {
            let mut writer = MessageWriter::default();
            let head = Head { kind, flags: flags | flags::REQUEST, sequence, family, resource: 0 };
            writer.message(head, body);
            // A question is short; it always fits.
            writer.finish().unwrap_or_default()
        };
        // All of a family, or of all, that have these names.
        let list = |kind: u16, of: Option<TableFamily>, names: &[(u16, &str)]| {
            let family = of.map_or(family::UNSPECIFIED, table_family_number);
            ask(kind, flags::DUMP, family, &|body| {
                names.iter().for_each(|(kind, name)| body.text(*kind, name));
            })
        };
        match self {
            Self::Generation => ask(kind::GET_GENERATION, 0, family::UNSPECIFIED, &|_| {}),
            Self::Tables => list(kind::GET_TABLE, None, &[]),
            Self::Chains(of) => list(kind::GET_CHAIN, of, &[]),
            Self::Rules => list(kind::GET_RULE, None, &[]),
            Self::RulesOfTable(of, table) => list(kind::GET_RULE, Some(of), &[(attribute::TABLE, table)]),
            Self::RulesOfChain(of, table, chain) => {
                list(kind::GET_RULE, Some(of), &[(attribute::TABLE, table), (attribute::rule::CHAIN, chain)])
            }
            Self::Sets => list(kind::GET_SET, None, &[]),
            Self::SetsOfTable(of, table) => list(kind::GET_SET, Some(of), &[(attribute::TABLE, table)]),
            Self::Elements(of, table, set) => {
                let names = [(attribute::TABLE, table), (attribute::elements::SET, set)];
                list(kind::GET_SET_ELEMENT, Some(of), &names)
            }
            Self::Objects(of, table) => list(kind::GET_OBJECT, Some(of), &[(attribute::TABLE, table)]),
            Self::Hooks(of, hook) => ask(kind::HOOKS, flags::DUMP, of.number(), &|body| {
                body.u32(attribute::hooked::HOOK, hook_number(hook));
            }),
            Self::Extension(of, extension) => ask(kind::GET_COMPAT, flags::ACK, of.number(), &|body| {
                body.text(attribute::xt::NAME, extension.name);
                body.u32(attribute::xt::REVISION, extension.revision);
                body.u32(attribute::xt::TYPE, u32::from(extension.is_target));
            }),
        }
    }
}

impl<'a> Message<'a> {
    /// The generation of the ruleset that the message announces.
    #[must_use]
    pub fn generation(&self) -> Option<u32> {
        (self.kind == kind::NEW_GENERATION).then(|| self.attributes().u32(attribute::generation::ID))?
    }

    /// Who made a generation, if the message announces one: the process (strictly, its thread) as the initial pid namespace numbers it,
    /// and its name, which it gives itself.
    #[must_use]
    pub fn writer(&self) -> Option<(u32, &'a str)> {
        if self.kind != kind::NEW_GENERATION {
            return None;
        }
        let process = self.attributes().u32(attribute::generation::PROCESS)?;
        let name = self.attributes().text(attribute::generation::PROCESS_NAME)?;
        Some((process, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{Messages, Observed};

    #[test]
    fn a_generation_names_its_number_and_who_made_it() {
        let told = |kind: u16, has_process: bool, has_name: bool| {
            let head = Head { kind, flags: 0, sequence: 1, family: family::UNSPECIFIED, resource: 0 };
            let mut writer = MessageWriter::default();
            writer.message(head, |body| {
                body.u32(attribute::generation::ID, 7);
                if has_process {
                    body.u32(attribute::generation::PROCESS, 4711);
                }
                if has_name {
                    body.text(attribute::generation::PROCESS_NAME, "nft");
                }
            });
            let bytes = writer.finish().unwrap();
            let message = Messages::new(&bytes).next().unwrap();
            let (process, name) = message.writer().unzip();
            (message.generation(), process, name.map(String::from))
        };
        assert_eq!(told(kind::NEW_GENERATION, true, true), (Some(7), Some(4711), Some("nft".into())));
        assert_eq!(told(kind::NEW_GENERATION, false, true), (Some(7), None, None));
        assert_eq!(told(kind::NEW_GENERATION, true, false), (Some(7), None, None));
        assert_eq!(told(kind::NEW_TABLE, true, true), (None, None, None));
        assert_eq!(Observed::at(7).generation(), Some(7));
        assert_eq!(Observed::at(7).of_any_generation().generation(), None);
    }
}
