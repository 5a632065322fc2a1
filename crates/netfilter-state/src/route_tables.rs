//! Policy rules and routes of a network namespace, of any program: what the kernel asks about every packet.
//!
//! [`routing`](crate::routing) is about what a plan needs; this is about all that is there. Its enums are closed, as those of
//! [`ruleset`](crate::ruleset) are.

use ipnet::IpNet;
use redirect_core::values::Family;
use std::fmt;

/// Policy rules and routes of both families.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct RouteTables {
    /// Its policy rules, each family's in the order in which the kernel asks them.
    pub rules: Vec<PolicyRule>,
    /// Its routes that are in use, as the kernel lists them. A route through an interface that is down is not among them.
    pub routes: Vec<Route>,
    /// Whether the interface `lo` is up. Nothing reaches the namespace's own addresses without it.
    pub loopback_is_up: bool,
    /// Whether everything has been read. If not, the namespace has more routes than were read, and what is not in
    /// [`routes`](Self::routes) may exist all the same.
    pub complete: bool,
}

impl RouteTables {
    /// The number of the table of the namespace's own addresses (`RT_TABLE_LOCAL`).
    pub const LOCAL: u32 = 255;
    /// That of the table that routes belong to unless another is named (`RT_TABLE_MAIN`).
    pub const MAIN: u32 = 254;
    /// The priority of the rule that looks into that table: one of a plan behind it decides nothing once it has a default route
    /// (`ip rule`).
    pub const MAIN_PRIORITY: u32 = 32766;
    /// The number of the table behind it, usually empty (`RT_TABLE_DEFAULT`).
    pub const DEFAULT: u32 = 253;
}

/// A policy rule. A packet that meets all its conditions (or, with `not`, fails one) meets its action.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PolicyRule {
    /// Its family.
    pub family: Family,
    /// The lowest goes first.
    pub priority: u32,
    /// Whether it concerns the packets that do not meet all its conditions.
    pub not: bool,
    /// The packet's mark has this value in the bits of the mask: (value, mask).
    pub mark: Option<(u32, u32)>,
    /// The packet came in through this interface; `lo` stands for packets of the namespace itself.
    pub in_interface: Option<String>,
    /// The packet's socket is bound to this interface.
    pub out_interface: Option<String>,
    /// Its source is in this range.
    pub from: Option<IpNet>,
    /// Its destination is in this range.
    pub to: Option<IpNet>,
    /// The user of its socket is in this range, both ends included.
    pub users: Option<(u32, u32)>,
    /// The number of its transport protocol.
    pub protocol: Option<u8>,
    /// Its source port is in this range, both ends included.
    pub source_ports: Option<(u16, u16)>,
    /// Its destination port is in this range, both ends included.
    pub ports: Option<(u16, u16)>,
    /// Conditions that are not modelled, in the words of `ip rule`: the rule may concern a packet or not.
    pub unknown: Vec<&'static str>,
    /// What it does.
    pub action: RuleAction,
    /// A route that it finds counts only if its prefix is longer than this.
    pub suppress_prefix: Option<u32>,
}

impl PolicyRule {
    /// A rule that sends every packet of a family to a table.
    #[must_use]
    pub const fn lookup(family: Family, priority: u32, table: u32) -> Self {
        Self {
            family,
            priority,
            not: false,
            mark: None,
            in_interface: None,
            out_interface: None,
            from: None,
            to: None,
            users: None,
            protocol: None,
            source_ports: None,
            ports: None,
            unknown: Vec::new(),
            action: RuleAction::Lookup(table),
            suppress_prefix: None,
        }
    }

    /// What it requires besides the mark, in the words of `ip rule`.
    #[must_use]
    pub fn limits(&self) -> Vec<&'static str> {
        let known = [
            (self.from.is_some(), "from"),
            (self.to.is_some(), "to"),
            (self.not, "not"),
            (self.in_interface.is_some(), "iif"),
            (self.out_interface.is_some(), "oif"),
            (self.users.is_some(), "uidrange"),
            (self.protocol.is_some(), "ipproto"),
            (self.source_ports.is_some(), "sport"),
            (self.ports.is_some(), "dport"),
            (self.suppress_prefix.is_some(), "suppress_prefixlength"),
        ];
        let known = known.into_iter().filter_map(|(is_there, name)| is_there.then_some(name));
        known.chain(self.unknown.iter().copied()).collect()
    }

    /// The rule by its priority and what it does.
    #[must_use]
    pub fn named(&self) -> String {
        let Self { priority, action, .. } = self;
        let does = if let RuleAction::Lookup(table) = action {
            format!("table {}", Table(*table))
        } else {
            action.to_string().trim().into()
        };
        format!("the policy rule of priority {priority} ({does})")
    }
}

/// What a policy rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RuleAction {
    /// It looks for a route in this table; without one for the packet, the kernel tries the next rule.
    Lookup(u32),
    /// The next rule is the first one of at least this priority; without one, this rule does nothing.
    Goto(u32),
    /// Nothing.
    Nop,
    /// The packet is dropped; a local process gets EINVAL.
    Blackhole,
    /// The packet is refused: no route to host.
    Unreachable,
    /// The packet is refused: permission denied.
    Prohibit,
    /// Something else.
    Other,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Route {
    /// Its family.
    pub family: Family,
    /// Its table.
    pub table: u32,
    /// The destinations it is for.
    pub to: IpNet,
    /// What happens to packets.
    pub kind: RouteKind,
    /// The interface they leave through; none if they leave through several, or through none.
    pub interface: Option<String>,
    /// Of routes with the same prefix, the one with the lowest metric counts.
    pub metric: u32,
    /// Whether it has a condition that is not modelled (a source range, a type of service): it may concern a packet or not.
    pub unknown: bool,
}

/// What happens to packets that take a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteKind {
    /// They leave through an interface.
    Unicast,
    /// They are delivered in the namespace.
    Local,
    /// They go to everybody on the link, and are delivered in the namespace.
    Broadcast,
    /// They are delivered in the namespace; the address is another program's, too.
    Anycast,
    /// They go to those who have asked for them.
    Multicast,
    /// They are dropped; a local process gets EINVAL.
    Blackhole,
    /// They are refused: no route to host.
    Unreachable,
    /// They are refused: permission denied.
    Prohibit,
    /// The table has no route for them; the next policy rule is asked.
    Throw,
    /// Something else.
    Other,
}

impl RouteKind {
    /// Its name in `ip route`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unicast => "unicast",
            Self::Local => "local",
            Self::Broadcast => "broadcast",
            Self::Anycast => "anycast",
            Self::Multicast => "multicast",
            Self::Blackhole => "blackhole",
            Self::Unreachable => "unreachable",
            Self::Prohibit => "prohibit",
            Self::Throw => "throw",
            Self::Other => "[unknown type]",
        }
    }
}

/// A table, by the name that `ip` has for it.
struct Table(u32);

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            RouteTables::LOCAL => f.write_str("local"),
            RouteTables::MAIN => f.write_str("main"),
            RouteTables::DEFAULT => f.write_str("default"),
            number => write!(f, "{number}"),
        }
    }
}

/// A range of addresses, or the only one in it.
struct Addresses<'a>(&'a IpNet);

impl fmt::Display for Addresses<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.prefix_len() == self.0.max_prefix_len() { self.0.addr().fmt(f) } else { self.0.fmt(f) }
    }
}

/// In the words of `ip rule`.
impl fmt::Display for PolicyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses =
            |word: &str, net: &Option<IpNet>| net.as_ref().map(|net| format!(" {word} {}", Addresses(net)));
        let ports = |word: &str, ends: Option<(u16, u16)>| match ends? {
            (first, last) if first == last => Some(format!(" {word} {first}")),
            (first, last) => Some(format!(" {word} {first}-{last}")),
        };
        let mark = |mark: (u32, u32)| match mark {
            (0, mask) => format!(" fwmark 0/{mask:#x}"),
            (value, u32::MAX) => format!(" fwmark {value:#x}"),
            (value, mask) => format!(" fwmark {value:#x}/{mask:#x}"),
        };
        let protocol = |number: u8| match number {
            6 => " ipproto tcp".to_string(),
            17 => " ipproto udp".to_string(),
            number => format!(" ipproto {number}"),
        };
        let conditions = [
            addresses("from", &self.from).or_else(|| Some(" from all".to_string())),
            addresses("to", &self.to),
            self.mark.map(mark),
            self.in_interface.as_ref().map(|name| format!(" iif {name}")),
            self.out_interface.as_ref().map(|name| format!(" oif {name}")),
            self.users.map(|(first, last)| format!(" uidrange {first}-{last}")),
            self.protocol.map(protocol),
            ports("sport", self.source_ports),
            ports("dport", self.ports),
        ];
        write!(f, "{}:{}", self.priority, if self.not { " not" } else { "" })?;
        conditions.into_iter().flatten().try_for_each(|condition| f.write_str(&condition))?;
        self.unknown.iter().try_for_each(|condition| write!(f, " [{condition}]"))?;
        self.action.fmt(f)?;
        self.suppress_prefix.map_or(Ok(()), |length| write!(f, " suppress_prefixlength {length}"))
    }
}

impl fmt::Display for RuleAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lookup(table) => write!(f, " lookup {}", Table(*table)),
            Self::Goto(priority) => write!(f, " goto {priority}"),
            Self::Nop => f.write_str(" nop"),
            Self::Blackhole => f.write_str(" blackhole"),
            Self::Unreachable => f.write_str(" unreachable"),
            Self::Prohibit => f.write_str(" prohibit"),
            Self::Other => f.write_str(" [unknown action]"),
        }
    }
}

/// In the words of `ip route`, always with its table.
impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind != RouteKind::Unicast {
            write!(f, "{} ", self.kind.name())?;
        }
        if self.to.prefix_len() == 0 {
            f.write_str("default")?;
        } else {
            Addresses(&self.to).fmt(f)?;
        }
        if let Some(interface) = &self.interface {
            write!(f, " dev {interface}")?;
        }
        write!(f, " table {}", Table(self.table))?;
        if self.metric != 0 {
            write!(f, " metric {}", self.metric)?;
        }
        if self.unknown { f.write_str(" [another condition]") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_routes_are_told_in_the_words_of_ip() {
        let rule = PolicyRule {
            not: true,
            mark: Some((0x539, 0xff)),
            in_interface: Some("eth0".into()),
            out_interface: Some("eth1".into()),
            from: "10.1.0.2/32".parse().ok(),
            to: "192.0.2.0/24".parse().ok(),
            users: Some((0, 10)),
            protocol: Some(6),
            source_ports: Some((1, 2)),
            ports: Some((80, 80)),
            unknown: ["tos"].into(),
            suppress_prefix: Some(0),
            ..PolicyRule::lookup(Family::V4, 5, 133)
        };
        assert_eq!(
            rule.to_string(),
            "5: not from 10.1.0.2 to 192.0.2.0/24 fwmark 0x539/0xff iif eth0 oif eth1 uidrange 0-10 ipproto tcp sport 1-2 \
             dport 80 [tos] lookup 133 suppress_prefixlength 0"
        );
        let marked = |mark| {
            PolicyRule { mark: Some(mark), ..PolicyRule::lookup(Family::V6, 0, RouteTables::LOCAL) }
                .to_string()
        };
        assert_eq!(marked((0x539, u32::MAX)), "0: from all fwmark 0x539 lookup local");
        assert_eq!(marked((0, 0xff)), "0: from all fwmark 0/0xff lookup local");
        let route = |to: &str, kind, interface: Option<&str>, table| Route {
            family: Family::V4,
            table,
            to: to.parse().unwrap(),
            kind,
            interface: interface.map(Into::into),
            metric: 0,
            unknown: false,
        };
        let local = route("10.1.0.2/32", RouteKind::Local, Some("eth0"), RouteTables::LOCAL);
        assert_eq!(local.to_string(), "local 10.1.0.2 dev eth0 table local");
        let blackhole =
            Route { metric: 5, ..route("127.0.0.0/8", RouteKind::Blackhole, None, RouteTables::LOCAL) };
        assert_eq!(blackhole.to_string(), "blackhole 127.0.0.0/8 table local metric 5");
        let default = Route {
            unknown: true,
            ..route("0.0.0.0/0", RouteKind::Unicast, Some("eth0"), RouteTables::MAIN)
        };
        assert_eq!(default.to_string(), "default dev eth0 table main [another condition]");
    }
}
