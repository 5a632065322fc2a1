//! What matches and targets of x_tables mean, in the kernel's form and in that of iptables-save.

use super::{Base, Condition, Selector, SetLookup, Statement};
use redirect_core::rule::{Equality, Hook, Match, Table};

/// Whether a user or group is one of these.
pub fn owned_by(selector: Selector, (first, last): (u32, u32), not: bool) -> Condition {
    if first != last {
        return Condition::Among(Equality {
            value: SetLookup::range(selector, (first.into(), last.into())),
            not,
        });
    }
    let is = Equality { value: first, not };
    Condition::Plain(if selector == Selector::User { Match::OwnerUid(is) } else { Match::OwnerGid(is) })
}

/// Whether a mark has a value in these bits: a packet's, or by the match `connmark` its connection's.
pub fn marked(name: &str, mask: u32, is: Equality<u32>) -> Condition {
    if name == "mark" { Condition::MarkBits { mask, is } } else { Condition::ConnMarkBits { mask, is } }
}

/// What a target of x_tables does; `None` for any other name, which is a chain's, or of an extension that is not known.
pub fn target_named(name: &str) -> Option<Statement> {
    Some(match name {
        "ACCEPT" => Statement::Accept,
        "DROP" => Statement::Drop,
        "REJECT" | "TARPIT" => Statement::Reject,
        "RETURN" => Statement::Return,
        "DNAT" | "REDIRECT" | "NETMAP" => Statement::Translate(name.to_owned()),
        "SNAT" | "MASQUERADE" => Statement::TranslateSource(name.to_owned()),
        "TPROXY" => Statement::Tproxy { port: None, mark: None, ends: true },
        "NOTRACK" => Statement::Untrack,
        // A set of ipset may have marks for packets.
        "MARK" | "HMARK" | "SET" => Statement::SetMark(None),
        "QUEUE" | "NFQUEUE" => Statement::Queue,
        // These return XT_CONTINUE. They report the packet (xt_LOG, xt_NFLOG, xt_AUDIT; xt_TRACE), ...
        "LOG" | "NFLOG" | "TRACE" | "AUDIT"
        // ... measure or show traffic (xt_IDLETIMER, xt_LED, xt_RATEEST), ...
        | "IDLETIMER" | "LED" | "RATEEST"
        // ... choose a queue, or set what security modules read (xt_CLASSIFY, xt_SECMARK, xt_CONNSECMARK), ...
        | "CLASSIFY" | "SECMARK" | "CONNSECMARK"
        // ... or write a checksum or options that no condition is understood to ask (xt_CHECKSUM, xt_TCPMSS, xt_TCPOPTSTRIP).
        | "CHECKSUM" | "TCPMSS" | "TCPOPTSTRIP" => Statement::Harmless(format!("-j {name}")),
        "DSCP" | "TOS" => Statement::SetClass(format!("-j {name}")),
        // A copy may end the connection, flags decide about it, and no router forwards a packet without hops left.
        "CT" | "CONNMARK" | "TEE" | "ECN" | "TTL" | "HL" | "SYNPROXY" | "CLUSTERIP" | "SNPT" | "DNPT" => {
            Statement::Rewrite(format!("-j {name}"))
        }
        _ => return None,
    })
}

/// Where a built-in chain of a table of x_tables hangs (`enum nf_ip_hook_priorities`).
pub fn built_in(table: &str, hook: Hook, drops: bool) -> Option<Base> {
    let priority = match (Table::named(table), table) {
        (Some(table), _) => table.priority(hook),
        (None, "filter") => 0,
        (None, "security") => 50,
        (None, _) => return None,
    };
    let reroutes = table == "mangle" && hook == Hook::Output;
    Some(Base { hook, priority, is_nat: table == "nat", drops, reroutes })
}
