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
        let (kind, flags, family) = self.head();
        let mut writer = MessageWriter::default();
        let head = Head { kind, flags: flags | flags::REQUEST, sequence, family, resource: 0 };
        writer.message(head, |body| self.write(body));
        // A question is short; it always fits.
        writer.finish().unwrap_or_default()
    }

    /// Its type, its flags and its family.
    fn head(self) -> (u16, u16, u8) {
        const ALL: u8 = family::UNSPECIFIED;
        match self {
            Self::Generation => (kind::GET_GENERATION, 0, ALL),
            Self::Tables => (kind::GET_TABLE, flags::DUMP, ALL),
            Self::Chains(of) => (kind::GET_CHAIN, flags::DUMP, of.map_or(ALL, table_family_number)),
            Self::Rules => (kind::GET_RULE, flags::DUMP, ALL),
            Self::RulesOfTable(of, _) | Self::RulesOfChain(of, ..) => {
                (kind::GET_RULE, flags::DUMP, table_family_number(of))
            }
            Self::Sets => (kind::GET_SET, flags::DUMP, ALL),
            Self::SetsOfTable(of, _) => (kind::GET_SET, flags::DUMP, table_family_number(of)),
            Self::Elements(of, ..) => (kind::GET_SET_ELEMENT, flags::DUMP, table_family_number(of)),
            Self::Objects(of, _) => (kind::GET_OBJECT, flags::DUMP, table_family_number(of)),
            Self::Hooks(of, _) => (kind::HOOKS, flags::DUMP, of.number()),
            Self::Extension(of, _) => (kind::GET_COMPAT, flags::ACK, of.number()),
        }
    }

    fn write(self, body: &mut MessageWriter) {
        match self {
            Self::Generation | Self::Tables | Self::Chains(_) | Self::Rules | Self::Sets => {}
            Self::RulesOfTable(_, table) => body.text(attribute::TABLE, table),
            Self::RulesOfChain(_, table, chain) => {
                body.text(attribute::TABLE, table);
                body.text(attribute::rule::CHAIN, chain);
            }
            Self::SetsOfTable(_, table) => body.text(attribute::TABLE, table),
            Self::Elements(_, table, set) => {
                body.text(attribute::TABLE, table);
                body.text(attribute::elements::SET, set);
            }
            Self::Objects(_, table) => body.text(attribute::TABLE, table),
            Self::Hooks(_, hook) => body.u32(attribute::hooked::HOOK, hook_number(hook)),
            Self::Extension(_, extension) => {
                body.text(attribute::xt::NAME, extension.name);
                body.u32(attribute::xt::REVISION, extension.revision);
                body.u32(attribute::xt::TYPE, u32::from(extension.is_target));
            }
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
