//! What hangs on the hooks of IP, as the kernel lists it (nfnetlink_hook).
//!
//! Functions are known by the names that they have in the kernel's sources. For legacy tables the kernel lists only the function that reads them
//! and its priority. A newer kernel lists the chains of type nat in the place of the function that asks them, all with that
//! function's priority; an older one only the function.

use crate::expressions::{
    abi::{self, attribute, hooked, kind},
    wire::{Attributes, Message},
};
use crate::ruleset::{Api, HookEntry, HookList, HookOwner, TableName};

impl HookList {
    /// Takes in one message of an answer about a hook.
    pub fn take(&mut self, message: &Message<'_>) {
        // An unreadable entry is not on a hook of IP.
        let _ = self.take_entry(message);
    }

    fn take_entry(&mut self, message: &Message<'_>) -> Option<()> {
        if message.kind != kind::HOOKS {
            return None;
        }
        let attributes = message.attributes();
        let family = abi::family_of(message.family)?;
        let hook = abi::hook_of(attributes.u32(attribute::hooked::HOOK)?)?;
        let priority = attributes.u32(attribute::hooked::PRIORITY)?.cast_signed();
        let (owner, is_asked_by_nat) = owner(attributes, priority);
        let entries = self.entries.entry((family, hook)).or_default();
        // Readers of the list find address translation in it, whichever kernel this is.
        if is_asked_by_nat && !entries.iter().any(|entry| entry.owner == HookOwner::Nat) {
            entries.push(HookEntry { priority, owner: HookOwner::Nat });
        }
        entries.push(HookEntry { priority, owner });
        Some(())
    }
}

/// An entry's owner, and whether address translation runs it.
fn owner(entry: Attributes<'_>, priority: i32) -> (HookOwner, bool) {
    let text = |kind| entry.text(kind).unwrap_or_default();
    let (function, module) = (text(attribute::hooked::FUNCTION), text(attribute::hooked::MODULE));
    if let Some(owner) = entry.find(attribute::hooked::INFO).and_then(|info| described(info.attributes())) {
        return (owner, function == NAT_CHAIN);
    }
    if let Some(table) = legacy_table(function, priority) {
        return (HookOwner::Legacy(table.to_owned()), table == "nat");
    }
    let owner = match function {
        function if TRACKING.contains(&function) => HookOwner::Tracking,
        function if function.starts_with(NAT) => HookOwner::Nat,
        function if is_harmless(function) => HookOwner::Harmless(function.to_owned()),
        _ => HookOwner::Unknown(named(function, module)),
    };
    (owner, false)
}

/// The function that runs a chain of type nat.
const NAT_CHAIN: &str = "nft_nat_do_chain";
/// Functions with which connection tracking begins.
const TRACKING: [&str; 4] =
    ["ipv4_conntrack_in", "ipv4_conntrack_local", "ipv6_conntrack_in", "ipv6_conntrack_local"];
/// What the functions of address translation begin with.
const NAT: &str = "nf_nat_ipv";
/// Functions that never divert a packet: they reassemble fragments, finish connection tracking, and skip
/// packets that a bridge has already filtered.
const HARMLESS: [&str; 8] = [
    "ipv4_conntrack_defrag",
    "ipv6_defrag",
    "nf_confirm",
    "ipv4_confirm",
    "ipv6_confirm",
    "ipv4_helper",
    "ipv6_helper",
    "ip_sabotage_in",
];
/// What the functions of security modules begin with. They ask for labels, which a pod's packets carry only if configured.
const SECURITY_MODULES: [&str; 3] = ["apparmor_ip", "selinux_ip", "smack_ip"];

fn is_harmless(function: &str) -> bool {
    HARMLESS.contains(&function) || SECURITY_MODULES.iter().any(|begin| function.starts_with(begin))
}

/// A chain or program that an entry describes.
fn described(info: Attributes<'_>) -> Option<HookOwner> {
    let description = info.nested(attribute::hooked_info::DESCRIPTION)?;
    match info.u32(attribute::hooked_info::TYPE)? {
        hooked::CHAIN => chain(description),
        hooked::PROGRAM => {
            let id = description.u32(attribute::HOOKED_PROGRAM)?;
            Some(HookOwner::Unknown(format!("BPF program {id}")))
        }
        _ => None,
    }
}

fn chain(description: Attributes<'_>) -> Option<HookOwner> {
    let family = *description.find(attribute::hooked_chain::FAMILY)?.0.first()?;
    let table = TableName {
        api: Api::NfTables,
        family: abi::table_family(family)?,
        name: description.name(attribute::hooked_chain::TABLE)?,
    };
    Some(HookOwner::Chain(table, description.name(attribute::hooked_chain::NAME)?))
}

/// The legacy table that a function reads at a priority.
fn legacy_table(function: &str, priority: i32) -> Option<&'static str> {
    const NAMES: [&str; 5] = ["raw", "mangle", "nat", "filter", "security"];
    if matches!(function, "ipt_do_table" | "ip6t_do_table") {
        return Some(match priority {
            // Before fragments are put together, if the module is configured so.
            -450 | -300 => "raw",
            -150 => "mangle",
            -100 | 100 => "nat",
            0 => "filter",
            50 => "security",
            _ => return None,
        });
    }
    // The mangle table has a function of its own; before Linux 5.16 or so all had.
    let of_table = function.strip_prefix("iptable_").or_else(|| function.strip_prefix("ip6table_"))?;
    NAMES
        .into_iter()
        .find(|name| of_table.strip_prefix(name).is_some_and(|rest| rest == "_hook" || rest == "_do_chain"))
}

fn named(function: &str, module: &str) -> String {
    match (function, module) {
        ("", "") => "a function without a name".to_owned(),
        (function, "") => function.to_owned(),
        ("", module) => format!("a function of {module}"),
        (function, module) => format!("{function} of {module}"),
    }
}
