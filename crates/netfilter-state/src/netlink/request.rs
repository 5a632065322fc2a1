//! Questions to the kernel; none of them changes anything.

use crate::expressions::{
    abi::{self, attribute, family, flags, kind},
    wire::{Head, Message, Writer},
    xt::Extension,
};
use crate::ruleset::TableFamily;
use redirect_core::{
    rule::{Chain, Hook, Table},
    values::Family,
};

/// Which generation the ruleset is at. Answered only where the kernel has nf_tables.
#[must_use]
pub fn generation(sequence: u32) -> Vec<u8> {
    question(kind::GET_GENERATION, 0, sequence, family::UNSPECIFIED, |_| {})
}

/// The generation in an answer to [`generation`].
#[must_use]
pub fn generation_in(message: &Message<'_>) -> Option<u32> {
    (message.kind == kind::NEW_GENERATION)
        .then(|| message.attributes().find(attribute::generation::ID)?.u32())?
}

/// Who made a generation, if a message announces one: the process (strictly, its thread) as the initial pid namespace numbers it, and
/// its name, which it gives itself.
#[must_use]
pub fn writer_in<'a>(message: &Message<'a>) -> Option<(u32, &'a str)> {
    if message.kind != kind::NEW_GENERATION {
        return None;
    }
    let process = message.attributes().find(attribute::generation::PROCESS)?.u32()?;
    let name = message.attributes().find(attribute::generation::PROCESS_NAME)?.text()?;
    Some((process, name))
}

/// All tables of all families.
#[must_use]
pub fn tables(sequence: u32) -> Vec<u8> {
    question(kind::GET_TABLE, flags::DUMP, sequence, family::UNSPECIFIED, |_| {})
}

/// All chains of a family.
#[must_use]
pub fn chains(sequence: u32, of: Family) -> Vec<u8> {
    question(kind::GET_CHAIN, flags::DUMP, sequence, abi::family_number(of), |_| {})
}

/// All chains of all families.
#[must_use]
pub fn all_chains(sequence: u32) -> Vec<u8> {
    question(kind::GET_CHAIN, flags::DUMP, sequence, family::UNSPECIFIED, |_| {})
}

/// All rules of all tables of all families.
#[must_use]
pub fn all_rules(sequence: u32) -> Vec<u8> {
    question(kind::GET_RULE, flags::DUMP, sequence, family::UNSPECIFIED, |_| {})
}

/// The rules of a chain of any table.
#[must_use]
pub fn rules_of(sequence: u32, of: TableFamily, table: &str, chain: &str) -> Vec<u8> {
    question(kind::GET_RULE, flags::DUMP, sequence, abi::table_family_number(of), |body| {
        body.text(attribute::rule::TABLE, table);
        body.text(attribute::rule::CHAIN, chain);
    })
}

/// All sets of all tables of all families, without their elements.
#[must_use]
pub fn all_sets(sequence: u32) -> Vec<u8> {
    question(kind::GET_SET, flags::DUMP, sequence, family::UNSPECIFIED, |_| {})
}

/// The elements of a set.
#[must_use]
pub fn elements(sequence: u32, of: TableFamily, table: &str, set: &str) -> Vec<u8> {
    question(kind::GET_SET_ELEMENT, flags::DUMP, sequence, abi::table_family_number(of), |body| {
        body.text(attribute::elements::TABLE, table);
        body.text(attribute::elements::SET, set);
    })
}

/// What hangs on a hook of IP. Answered only where the kernel can list it (`CONFIG_NETFILTER_NETLINK_HOOK`, Linux 5.14).
#[must_use]
pub fn hooks(sequence: u32, of: Family, hook: Hook) -> Vec<u8> {
    question(kind::HOOKS, flags::DUMP, sequence, abi::family_number(of), |body| {
        body.u32(attribute::hooked::HOOK, abi::hook_number(hook));
    })
}

/// The rules of a table.
#[must_use]
pub fn rules(sequence: u32, of: Family, table: Table) -> Vec<u8> {
    question(kind::GET_RULE, flags::DUMP, sequence, abi::family_number(of), |body| {
        body.text(attribute::rule::TABLE, table.name());
    })
}

/// The rules of one chain of a table.
#[must_use]
pub fn rules_of_chain(sequence: u32, of: Family, table: Table, chain: &Chain) -> Vec<u8> {
    question(kind::GET_RULE, flags::DUMP, sequence, abi::family_number(of), |body| {
        body.text(attribute::rule::TABLE, table.name());
        body.text(attribute::rule::CHAIN, chain.name());
    })
}

/// All chains of family inet.
#[must_use]
pub fn native_chains(sequence: u32) -> Vec<u8> {
    question(kind::GET_CHAIN, flags::DUMP, sequence, family::INET, |_| {})
}

/// The rules of a native table.
#[must_use]
pub fn native_rules(sequence: u32, table: &str) -> Vec<u8> {
    question(kind::GET_RULE, flags::DUMP, sequence, family::INET, |body| {
        body.text(attribute::rule::TABLE, table);
    })
}

/// The sets of a native table.
#[must_use]
pub fn native_sets(sequence: u32, table: &str) -> Vec<u8> {
    question(kind::GET_SET, flags::DUMP, sequence, family::INET, |body| {
        body.text(attribute::set::TABLE, table);
    })
}

/// The stateful objects of a native table.
#[must_use]
pub fn native_objects(sequence: u32, table: &str) -> Vec<u8> {
    question(kind::GET_OBJECT, flags::DUMP, sequence, family::INET, |body| {
        body.text(attribute::object::TABLE, table);
    })
}

/// A transaction that makes the table that is this network namespace's lock: it belongs to the socket that sends it and
/// ends with that socket. Refused with EEXIST while another socket has it.
///
/// The message about the table has a number of its own, so that a refusal of the table can be determined from one of the whole
/// transaction. `None` if a length does not fit, which cannot happen.
#[must_use]
pub fn take_lock(transaction: u32, table: u32) -> Option<Vec<u8>> {
    lock_transaction(kind::NEW_TABLE, flags::CREATE | flags::EXCLUSIVE, transaction, table)
}

/// A transaction that ends the lock's table.
#[must_use]
pub fn release_lock(transaction: u32) -> Option<Vec<u8>> {
    lock_transaction(kind::DELETE_TABLE, 0, transaction, transaction)
}

fn lock_transaction(kind: u16, table_flags: u16, transaction: u32, table: u32) -> Option<Vec<u8>> {
    let mut writer = Writer::default();
    writer.message(Head::of_transaction(kind::BATCH_BEGIN, transaction), |_| {});
    let flags = table_flags | flags::REQUEST | flags::ACK;
    writer.message(Head { kind, flags, sequence: table, family: family::INET, resource: 0 }, |body| {
        body.text(attribute::table::NAME, redirect_core::render::NFT_LOCK_TABLE);
        if kind == kind::NEW_TABLE {
            body.u32(attribute::table::FLAGS, abi::OWNED_BY_SOCKET);
        }
    });
    writer.message(Head::of_transaction(kind::BATCH_END, transaction), |_| {});
    writer.finish()
}

/// The elements of a set of a native table.
#[must_use]
pub fn native_elements(sequence: u32, table: &str, set: &str) -> Vec<u8> {
    elements(sequence, TableFamily::Inet, table, set)
}

/// Asks whether an xt match or target exists. The kernel loads its module if it can, and answers with an error if not.
#[must_use]
pub fn extension(sequence: u32, of: Family, extension: Extension) -> Vec<u8> {
    question(kind::GET_COMPAT, flags::ACK, sequence, abi::family_number(of), |body| {
        body.text(attribute::xt::NAME, extension.name);
        body.u32(attribute::xt::REVISION, extension.revision);
        body.u32(attribute::xt::TYPE, u32::from(extension.is_target));
    })
}

fn question(kind: u16, flags: u16, sequence: u32, family: u8, body: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::default();
    let flags = flags | abi::flags::REQUEST;
    writer.message(Head { kind, flags, sequence, family, resource: 0 }, body);
    // A question is short; it always fits.
    writer.finish().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{Messages, Observed};

    #[test]
    fn a_generation_names_its_number_and_who_made_it() {
        let told = |kind: u16, has_process: bool, has_name: bool| {
            let head = Head { kind, flags: 0, sequence: 1, family: family::UNSPECIFIED, resource: 0 };
            let mut writer = Writer::default();
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
            let (process, name) = writer_in(&message).unzip();
            (generation_in(&message), process, name.map(String::from))
        };
        assert_eq!(told(kind::NEW_GENERATION, true, true), (Some(7), Some(4711), Some("nft".into())));
        assert_eq!(told(kind::NEW_GENERATION, false, true), (Some(7), None, None));
        assert_eq!(told(kind::NEW_GENERATION, true, false), (Some(7), None, None));
        assert_eq!(told(kind::NEW_TABLE, true, true), (None, None, None));
        assert_eq!(Observed::at(7).generation(), Some(7));
        assert_eq!(Observed::at(7).of_any_generation().generation(), None);
    }
}
