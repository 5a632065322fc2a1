//! Everything on the hooks of a network namespace, from any program: tables, chains, rules as far as they are
//! supported. Its enums are closed on purpose: who walks packets through a ruleset has to know every kind.

mod extensions;
mod hooks;
mod lookup;
mod names;
mod sets;

#[doc(hidden)] // for netns-apply, which reads legacy tables
pub use extensions::built_in;
pub(crate) use extensions::{marked, owned_by, target_named};
pub use hooks::{HookEntry, HookList, HookOwner};
pub use lookup::{Selector, SetLookup, VerdictMap};
pub use names::Plain;
#[doc(hidden)] // for packet-trace, which compares names of interfaces
pub use names::{name_bytes, name_of_bytes};
pub(crate) use sets::{Set, SetElement, Sets};

use redirect_core::{
    rule::{Equality, Hook, Match, Rule, Target},
    values::{Family, PortRange},
};
use std::{collections::BTreeMap, fmt};

/// The part of the kernel that holds a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Api {
    /// nf_tables: what nft and iptables-nft program.
    NfTables,
    /// x_tables: what iptables-legacy programs.
    XTables,
    /// None: a program or function hangs on the hook by itself.
    Function,
}

/// The family of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TableFamily {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
    /// Both.
    Inet,
    /// What interfaces receive and send, of any protocol. Its chains hang on no hook of IP.
    Netdev,
}

impl TableFamily {
    /// Its name in nft.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Inet => "inet",
            Self::Netdev => "netdev",
        }
    }

    /// Whether packets of a family meet such a table.
    #[must_use]
    pub const fn covers(self, family: Family) -> bool {
        match (self, family) {
            (Self::Inet | Self::Netdev, _) | (Self::Ip, Family::V4) | (Self::Ip6, Family::V6) => true,
            (Self::Ip, Family::V6) | (Self::Ip6, Family::V4) => false,
        }
    }
}

impl From<Family> for TableFamily {
    fn from(family: Family) -> Self {
        match family {
            Family::V4 => Self::Ip,
            Family::V6 => Self::Ip6,
        }
    }
}

/// The name of a table: unique in a namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// The part of the kernel that holds it.
    pub api: Api,
    /// Its family.
    pub family: TableFamily,
    /// Its name.
    pub name: String,
}

impl TableName {
    /// The name for things outside any table.
    #[must_use]
    pub fn of_family(family: Family) -> Self {
        Self { api: Api::Function, family: family.into(), name: String::new() }
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.api {
            Api::NfTables => write!(f, "{} {}", self.family.name(), Plain(&self.name)),
            Api::XTables => write!(f, "{} {} (legacy)", self.family.name(), Plain(&self.name)),
            Api::Function => write!(f, "of {} ({})", Plain(&self.name), self.family.name()),
        }
    }
}

/// The tables of a network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HookedRules {
    /// Each by its name.
    pub tables: BTreeMap<TableName, TableState>,
    /// What hangs on the hooks, in the order in which the kernel asks it. `None` if the kernel cannot list it (before Linux 5.14,
    /// or without `CONFIG_NETFILTER_NETLINK_HOOK`).
    pub hooks: Option<HookList>,
    /// How many elements of sets rules have looked up.
    pub(crate) looked_up: usize,
}

impl HookedRules {
    /// A table; creates an empty one if missing.
    pub fn table(&mut self, name: TableName) -> &mut TableState {
        self.tables.entry(name).or_default()
    }
}

/// What a table holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableState {
    /// Whether it is switched off: its chains hang on no hook.
    pub dormant: bool,
    /// Its chains, by name.
    pub chains: BTreeMap<String, ChainState>,
    /// Its sets and maps. They are taken in before the rules that look something up in them.
    pub(crate) sets: Sets,
}

/// A chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChainState {
    /// Its number in its table. A chain that was made later has a higher one. 0 where the kernel does not say (legacy tables).
    pub handle: u64,
    /// Where it hangs, if it hangs on a hook of IP.
    pub base: Option<Base>,
    /// Where it hangs, if it hangs on interfaces.
    pub device: Option<DeviceBase>,
    /// How many rules and jumps to it the kernel counts, where it says.
    pub uses: u32,
    /// Its rules, in order.
    pub rules: Vec<KernelRule>,
    /// Whether rules are missing here: they are too many to be read.
    pub is_partial: bool,
}

/// Where a base chain hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Base {
    /// On this hook.
    pub hook: Hook,
    /// At this priority: the lowest goes first.
    pub priority: i32,
    /// Whether it translates addresses: only the first packet of a connection meets it.
    pub is_nat: bool,
    /// Whether its policy is to drop.
    pub drops: bool,
    /// Whether a packet of a local process is routed again behind it, where it has another mark or address by then.
    pub reroutes: bool,
}

/// Where a base chain hangs on interfaces: in family netdev, or as `ingress` of family inet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceBase {
    /// Whether it meets what the interfaces receive or send.
    pub direction: InterfaceDirection,
    /// The interfaces, as the chain names them. A name may end in `*`.
    pub devices: Vec<String>,
    /// The lowest goes first.
    pub priority: i32,
    /// Whether its policy is to drop.
    pub drops: bool,
}

/// A direction of an interface. Closed: no third direction exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InterfaceDirection {
    /// What it receives, before prerouting.
    Ingress,
    /// What it sends, behind postrouting.
    Egress,
}

/// A rule, as far as it is understood.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelRule {
    /// The conditions, all of which a packet must fulfil.
    pub conditions: Vec<Condition>,
    /// What then happens, in order.
    pub statements: Vec<Statement>,
    /// Its counter; `None` without one.
    pub counter: Option<Counter>,
    /// Its comment; empty without one.
    pub comment: String,
}

/// What a rule has counted since it was made, or since its last reset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Counter {
    /// Packets that fulfilled its conditions.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// One that plans have, too.
    Plain(Match),
    /// The packet is of this family.
    Family(Equality<Family>),
    /// The number of the transport protocol.
    Protocol(Equality<u8>),
    /// One of these source ports.
    SourcePorts(Equality<Vec<PortRange>>),
    /// The connection is in one of these states, as bits of the kernel.
    State(Equality<u32>),
    /// The connection is in one of these states, and, if the packet belongs to one, answers those that opened it or not.
    StateAndDirection {
        /// The states, as bits of the kernel.
        states: Equality<u32>,
        /// Whether it answers.
        is_reply: bool,
    },
    /// These bits of the packet's mark have this value.
    MarkBits {
        /// The bits.
        mask: u32,
        /// Their value.
        is: Equality<u32>,
    },
    /// These bits of the connection's mark have this value.
    ConnMarkBits {
        /// The bits.
        mask: u32,
        /// Their value.
        is: Equality<u32>,
    },
    /// The packet belongs to a connection, and answers those that opened it or not.
    IsReply(bool),
    /// These TCP flags have this value.
    TcpFlags {
        /// The flags, as bits of the header.
        mask: u8,
        /// Their value.
        is: Equality<u8>,
    },
    /// The address at this end is one of the network namespace's own.
    Local(Equality<Endpoint>),
    /// One of several combinations of values.
    Among(Equality<SetLookup>),
    /// Connection tracking has an entry of its connection.
    Connection,
    /// Connection tracking has one, and this end of the connection is translated.
    Translated(Equality<Endpoint>),
    /// An unsupported one, by name.
    Unknown(String),
}

/// An end of a packet's way. Closed: no third exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Endpoint {
    /// Where it comes from.
    Source,
    /// Where it goes.
    Destination,
}

/// What a rule does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Statement {
    /// The base chain is left; what hangs behind it still sees the packet.
    Accept,
    /// The packet is gone.
    Drop,
    /// The packet is gone, and its sender notified.
    Reject,
    /// Back to the calling chain.
    Return,
    /// To another chain and back.
    Jump(String),
    /// To another chain, and back to where this one was called from.
    Goto(String),
    /// The destination is translated to this port of the pod, or to the port that it has.
    Redirect(Option<u16>),
    /// The destination is translated; the name says how (DNAT, REDIRECT with several ports).
    Translate(String),
    /// The source is translated, which ends the chain.
    TranslateSource(String),
    /// The packet is handed to a transparent listener.
    Tproxy {
        /// The listener's port; none where it is the packet's own, or not known.
        port: Option<u16>,
        /// The mark the packet gets: its bits of the mask, and their value.
        mark: Option<(u32, u32)>,
        /// Whether the base chain is left, and a packet without a listener dropped (x_tables). What nf_tables cannot hand
        /// over goes on to the next rule.
        ends: bool,
    },
    /// Connection tracking passes the packet over, and address translation with it.
    Untrack,
    /// Bits of the packet's mark are cleared, and then those of a value flipped; none where they are not known.
    SetMark(Option<(u32, u32)>),
    /// The packet gets the connection's mark.
    RestoreMark(CopiedMark),
    /// The connection gets the packet's mark.
    SaveMark(CopiedMark),
    /// These bits of the connection's mark are cleared, and then those of the value flipped.
    SetConnMark {
        /// What is cleared.
        mask: u32,
        /// What is flipped.
        value: u32,
    },
    /// The packet belongs to this zone of connection tracking.
    Zone(u16),
    /// What happens is looked up. Whatever it is ends the rule.
    Map(VerdictMap),
    /// The rest of the rule is for packets that fulfil this.
    If(Condition),
    /// A set gets an element, or loses one: what a lookup in it finds depends on the packets before.
    Updates(String),
    /// On with the rule: what a map may say.
    Continue,
    /// A process decides.
    Queue,
    /// Another part of the packet is rewritten, or it is sent elsewhere; the name says how.
    Rewrite(String),
    /// The class of its traffic is written, which policy rules and routes alone ask for; the name says how.
    SetClass(String),
    /// Something that does not change the packet's way, by its name.
    Harmless(String),
    /// An unsupported one, by name.
    Unknown(String),
}

/// How a mark is copied to another: bits of that are cleared; then it is combined (exclusive or) with some bits of the first and with a
/// value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopiedMark {
    /// What is cleared of the mark that changes.
    pub cleared: u32,
    /// What counts of the other.
    pub mask: u32,
    /// The value.
    pub flip: u32,
}

impl CopiedMark {
    /// As a whole.
    pub const WHOLE: Self = Self { cleared: u32::MAX, mask: u32::MAX, flip: 0 };
}

/// What a rule of a plan does.
impl From<&Target> for Statement {
    fn from(target: &Target) -> Self {
        match target {
            Target::Accept => Self::Accept,
            Target::Drop => Self::Drop,
            Target::Return => Self::Return,
            Target::Jump(chain) => Self::Jump(chain.name().into()),
            Target::Redirect(port) => Self::Redirect(Some(port.number())),
            Target::Tproxy { port, mark } => {
                Self::Tproxy { port: Some(port.number()), mark: Some((u32::MAX, mark.value())), ends: true }
            }
            Target::SetMark(mark) => Self::SetMark(Some((u32::MAX, mark.value()))),
            Target::SaveMark => Self::SaveMark(CopiedMark::WHOLE),
            Target::RestoreMark => Self::RestoreMark(CopiedMark::WHOLE),
            Target::SetConnMark(mark) => Self::SetConnMark { mask: mark.mask(), value: mark.value() },
            Target::ConntrackZone(zone) => Self::Zone(*zone),
        }
    }
}

/// A rule of a plan, as it is found where it is in force.
impl From<&Rule> for KernelRule {
    fn from(rule: &Rule) -> Self {
        let conditions = rule.effective_matches().cloned().map(Condition::Plain).collect();
        let statements = [Statement::from(&rule.target)].into();
        Self { conditions, statements, counter: None, comment: String::new() }
    }
}

/// In the words of iptables where it has any.
impl fmt::Display for KernelRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut plain, mut others) = (Vec::new(), Vec::new());
        for condition in &self.conditions {
            if let Condition::Plain(condition) = condition {
                plain.push(condition.clone());
            } else {
                others.push(condition.to_string());
            }
        }
        let text = Some(plain_text(plain)).filter(|text| !text.is_empty());
        let does = self.statements.iter().map(ToString::to_string);
        let words: Vec<String> = text.into_iter().chain(others).chain(does).collect();
        if words.is_empty() {
            f.write_str("no condition, no statement")
        } else {
            f.write_str(&words.join(" "))
        }
    }
}

/// Conditions that plans have, too, in the words of iptables.
fn plain_text(matches: Vec<Match>) -> String {
    // A rule needs a target to be written; this one is taken away again.
    let text = Rule { matches, target: Target::Return }.text();
    text.strip_suffix("-j RETURN").unwrap_or(&text).trim_end().into()
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let not = |not: bool| if not { "! " } else { "" };
        match self {
            Self::Plain(condition) => f.write_str(&plain_text([condition.clone()].into())),
            Self::Family(is) => write!(f, "{}nfproto {}", not(is.not), is.value),
            Self::Protocol(is) => write!(f, "{}-p {}", not(is.not), is.value),
            Self::SourcePorts(is) => {
                let ports: Vec<String> = is.value.iter().map(ToString::to_string).collect();
                write!(f, "-m multiport {}--sports {}", not(is.not), ports.join(","))
            }
            Self::State(is) => {
                write!(f, "-m conntrack {}--ctstate ", not(is.not))?;
                StateBits(is.value).fmt(f)
            }
            Self::StateAndDirection { states, is_reply } => {
                let direction = if *is_reply { "REPLY" } else { "ORIGINAL" };
                write!(f, "-m conntrack --ctdir {direction} {}--ctstate ", not(states.not))?;
                StateBits(states.value).fmt(f)
            }
            Self::MarkBits { mask, is } => {
                write!(f, "-m mark {}--mark {:#x}/{mask:#x}", not(is.not), is.value)
            }
            Self::ConnMarkBits { mask, is } => {
                write!(f, "-m connmark {}--mark {:#x}/{mask:#x}", not(is.not), is.value)
            }
            Self::IsReply(false) => f.write_str("-m conntrack --ctdir ORIGINAL"),
            Self::IsReply(true) => f.write_str("-m conntrack --ctdir REPLY"),
            Self::TcpFlags { mask, is } => {
                write!(f, "{}--tcp-flags {mask:#04x} {:#04x}", not(is.not), is.value)
            }
            Self::Local(is) => {
                let end = if is.value == Endpoint::Source { "src" } else { "dst" };
                write!(f, "-m addrtype {}--{end}-type LOCAL", not(is.not))
            }
            Self::Among(is) => is.value.write(f, if is.not { "!= " } else { "" }, |_| String::new()),
            Self::Connection => f.write_str("ct id"),
            Self::Translated(is) => {
                let end = if is.value == Endpoint::Source { "snat" } else { "dnat" };
                write!(f, "ct status {}{end}", not(is.not))
            }
            Self::Unknown(name) => write!(f, "[{}]", Plain(name)),
        }
    }
}

impl Statement {
    /// Whether no packet's way changes by it.
    #[must_use]
    pub const fn leaves_all(&self) -> bool {
        matches!(self, Self::Harmless(_) | Self::Updates(_) | Self::Continue)
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => f.write_str("-j ACCEPT"),
            Self::Drop => f.write_str("-j DROP"),
            Self::Reject => f.write_str("-j REJECT"),
            Self::Return => f.write_str("-j RETURN"),
            Self::Jump(chain) => write!(f, "-j {}", Plain(chain)),
            Self::Goto(chain) => write!(f, "-g {}", Plain(chain)),
            Self::Redirect(Some(port)) => write!(f, "-j REDIRECT --to-ports {port}"),
            Self::Redirect(None) => f.write_str("-j REDIRECT"),
            Self::Translate(name) | Self::TranslateSource(name) => write!(f, "-j {}", Plain(name)),
            Self::Tproxy { port, mark, ends: _ } => {
                f.write_str("-j TPROXY")?;
                port.map_or(Ok(()), |port| write!(f, " --on-port {port}"))?;
                mark.map_or(Ok(()), |(mask, value)| write!(f, " --tproxy-mark {value:#x}/{mask:#x}"))
            }
            Self::Untrack => f.write_str("-j NOTRACK"),
            Self::SetMark(Some((u32::MAX, mark))) => write!(f, "-j MARK --set-mark {mark:#x}"),
            Self::SetMark(Some((mask, value))) => write!(f, "-j MARK --set-xmark {value:#x}/{mask:#x}"),
            Self::SetMark(None) => f.write_str("-j MARK"),
            Self::RestoreMark(CopiedMark::WHOLE) => f.write_str("-j CONNMARK --restore-mark"),
            Self::RestoreMark(CopiedMark { cleared, mask, flip: 0 }) => {
                write!(f, "-j CONNMARK --restore-mark --nfmask {cleared:#x} --ctmask {mask:#x}")
            }
            Self::RestoreMark(CopiedMark { cleared: _, mask, flip }) => {
                write!(f, "meta mark set ct mark & {mask:#x} ^ {flip:#x}")
            }
            Self::SaveMark(CopiedMark::WHOLE) => f.write_str("-j CONNMARK --save-mark"),
            Self::SaveMark(CopiedMark { cleared, mask, flip: 0 }) => {
                write!(f, "-j CONNMARK --save-mark --nfmask {mask:#x} --ctmask {cleared:#x}")
            }
            Self::SaveMark(CopiedMark { cleared: _, mask, flip }) => {
                write!(f, "ct mark set meta mark & {mask:#x} ^ {flip:#x}")
            }
            Self::SetConnMark { mask, value } => write!(f, "-j CONNMARK --set-xmark {value:#x}/{mask:#x}"),
            Self::Zone(zone) => write!(f, "-j CT --zone {zone}"),
            Self::Map(map) => map.fmt(f),
            Self::If(condition) => condition.fmt(f),
            Self::Updates(set) => write!(f, "add @{}", Plain(set)),
            Self::Continue => f.write_str("continue"),
            Self::Queue => f.write_str("-j NFQUEUE"),
            Self::Rewrite(name) | Self::SetClass(name) | Self::Harmless(name) => {
                f.write_str(&Plain(name).text())
            }
            Self::Unknown(name) => write!(f, "[{}]", Plain(name)),
        }
    }
}

/// Bits of a connection's state (`NF_CT_STATE_BIT`). Printed, they are the words of `--ctstate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateBits(pub u32);

impl StateBits {
    /// Of no connection.
    pub const INVALID: u32 = 1;
    /// Of a connection seen in both directions.
    pub const ESTABLISHED: u32 = 2;
    /// The first of a connection that another one asked for.
    pub const RELATED: u32 = 4;
    /// The first of a connection.
    pub const NEW: u32 = 8;
    /// Passed over by connection tracking.
    pub const UNTRACKED: u32 = 64;
    /// Of a connection whose source is translated (not a bit of the kernel's states).
    pub const SOURCE_TRANSLATED: u32 = 1 << 30;
    /// Of one whose destination is.
    pub const TRANSLATED: u32 = 1 << 31;

    /// Their names.
    pub const NAMES: [(u32, &'static str); 7] = [
        (Self::INVALID, "INVALID"),
        (Self::NEW, "NEW"),
        (Self::RELATED, "RELATED"),
        (Self::ESTABLISHED, "ESTABLISHED"),
        (Self::UNTRACKED, "UNTRACKED"),
        (Self::SOURCE_TRANSLATED, "SNAT"),
        (Self::TRANSLATED, "DNAT"),
    ];
}

impl fmt::Display for StateBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMES.into_iter().filter(|(bit, _)| self.0 & bit != 0).map(|(_, name)| name);
        f.write_str(&named.collect::<Vec<_>>().join(","))
    }
}
