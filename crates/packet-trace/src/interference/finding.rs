//! What interferes with captured traffic, where, and how sure that is.

use crate::Packet;
use netfilter_state::ruleset::{Plain, TableName};
use redirect_core::{accepted::AcceptedBy, rule::Hook, values::Family};
use std::{collections::BTreeSet, fmt};

/// How sure it is. Closed: a finding is sure, or it is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Certainty {
    /// It may: something about the rule, or about what goes before it, is not understood.
    May,
    /// It does.
    Does,
}

/// A kind of captured traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Traffic {
    /// Connections from outside the pod.
    Inbound,
    /// Connections of the application to the outside.
    Outbound,
    /// Connections of the proxy to its own pod.
    ProxyToSelf,
    /// DNS queries of the application: in datagrams, and over TCP to a resolver in the pod.
    Dns,
    /// Connections and DNS queries of the proxy to the outside, which the plan leaves alone.
    ByProxy,
    /// Connections from outside to ports that the plan leaves alone, such as the proxy's own.
    ToProxy,
    /// Connections of the proxy to the application, which the plan leaves alone.
    ToApplication,
}

impl Traffic {
    /// What it is called in a sentence.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inbound => "inbound connections",
            Self::Outbound => "outbound connections",
            Self::ProxyToSelf => "the proxy's connections to its own pod",
            Self::Dns => "DNS queries",
            Self::ByProxy => "the proxy's connections to others",
            Self::ToProxy => "inbound connections to exempt ports",
            Self::ToApplication => "the proxy's connections to the application",
        }
    }
}

/// What happens to captured traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Effect {
    /// The chain ends before the mesh's rules.
    EndsChain,
    /// Its destination is translated first; the kernel translates a connection once.
    Translates,
    /// It is dropped or rejected.
    Drops,
    /// A chain's policy drops it.
    PolicyDrops,
    /// Connection tracking passes it over, so REDIRECT does not see it.
    Untracks,
    /// It gets another mark than TPROXY's routing needs.
    Remarks,
    /// Another transparent proxy gets it.
    Tproxies,
    /// A process decides about it.
    Queues,
    /// It is rewritten.
    Rewrites,
    /// A statement that is not understood meets it.
    Unknown,
    /// The table of the mesh's rules is dormant: none of them is in effect.
    Dormant,
    /// Routing leads it elsewhere, or nowhere.
    Routes,
    /// No single rule of other programs explains it.
    Unexplained,
    /// The ruleset has more rules than the search follows.
    Unfollowed,
}

impl Effect {
    /// The end of a sentence that begins with the rule.
    const fn words(self, severity: Certainty) -> &'static str {
        match (self, severity) {
            (Self::EndsChain, Certainty::Does) => "ends the chain before the mesh's rules",
            (Self::EndsChain, Certainty::May) => "may end the chain before the mesh's rules",
            (Self::Translates, Certainty::Does) => "translates the destination before the mesh's rules",
            (Self::Translates, Certainty::May) => "may translate the destination before the mesh's rules",
            (Self::Drops, Certainty::Does) => "drops packets that the mesh captures or exempts",
            (Self::Drops, Certainty::May) => "may drop packets that the mesh captures or exempts",
            (Self::PolicyDrops, Certainty::Does) => {
                "the chain's policy drops packets that the mesh captures or exempts"
            }
            (Self::PolicyDrops, Certainty::May) => {
                "the chain's policy may drop packets that the mesh captures or exempts"
            }
            (Self::Untracks, Certainty::Does) => {
                "disables connection tracking, and thus REDIRECT, for packets"
            }
            (Self::Untracks, Certainty::May) => {
                "may keep connection tracking, and REDIRECT with it, from packets"
            }
            (Self::Remarks, Certainty::Does) => {
                "changes a mark that the mesh's rules, or TPROXY's routing, match"
            }
            (Self::Remarks, Certainty::May) => {
                "may change a mark that the mesh's rules, or TPROXY's routing, match"
            }
            (Self::Tproxies, Certainty::Does) => "hands packets to another transparent proxy",
            (Self::Tproxies, Certainty::May) => "may hand packets to another transparent proxy",
            (Self::Queues, _) => "hands packets to a process, which may do anything with them",
            (Self::Rewrites, Certainty::Does) => "rewrites or diverts packets",
            (Self::Rewrites, Certainty::May) => "may rewrite or divert packets",
            (Self::Unknown, _) => "is unsupported and may hide packets from the mesh's rules",
            (Self::Dormant, _) => "the table is dormant: its rules are not in effect",
            (Self::Routes, Certainty::Does) => "keeps packets from the proxy",
            (Self::Routes, Certainty::May) => "may keep packets from the proxy",
            (Self::Unexplained, _) => "packets do not come to the proxy, for a reason that is not known",
            (Self::Unfollowed, _) => "the ruleset has more rules than are followed; the rest may interfere",
        }
    }
}

/// Where a rule stands.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleRef {
    /// The table.
    pub table: TableName,
    /// The base chain by which packets come to it; empty for a whole table.
    pub base_chain: String,
    /// The hook and priority of that.
    pub hook: Option<(Hook, i32)>,
    /// The chain of the rule.
    pub chain: String,
    /// The rule's number in the chain, counted from 1; none for a policy or a whole table.
    pub rule: Option<usize>,
}

impl RuleRef {
    /// A table as a whole.
    pub(super) const fn table(table: TableName) -> Self {
        Self { table, base_chain: String::new(), hook: None, chain: String::new(), rule: None }
    }
}

/// A rule, policy or table that interferes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How sure it is.
    pub severity: Certainty,
    /// Where.
    pub place: RuleRef,
    /// The rule in words; empty for anything else.
    pub rule: String,
    /// What it does.
    pub effect: Effect,
    /// To which traffic, of which family; empty where it is about a whole table.
    pub traffic: BTreeSet<(Family, Traffic)>,
    /// A packet of that traffic, whose trace shows it; none where it is about a whole table.
    pub example: Option<Packet>,
}

impl Finding {
    /// One that is about no rule, and no traffic of its own.
    pub(super) const fn of_place(severity: Certainty, effect: Effect, place: RuleRef) -> Self {
        Self { severity, place, rule: String::new(), effect, traffic: BTreeSet::new(), example: None }
    }

    /// What interferes, in a line for a log.
    #[must_use]
    pub fn log_line(&self) -> String {
        // What routing does may be for the lack of a route, or of an interface.
        let by_a_rule = if self.effect == Effect::Routes { "" } else { "a rule of another program: " };
        format!("{by_a_rule}{self}")
    }
}

/// In one line: `table ip nat, chain OUTPUT (hook output, priority -100), rule 1 (-j ACCEPT) ends the chain before the mesh's
/// rules: IPv4 outbound connections`.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.effect == Effect::Routes {
            write!(f, "{} ", Shortened(&self.rule))?;
        } else if !self.place.table.name.is_empty() {
            self.write_place(f)?;
        }
        f.write_str(self.effect.words(self.severity))?;
        for (index, (family, traffic)) in self.traffic.iter().enumerate() {
            write!(f, "{}{family} {}", if index == 0 { ": " } else { ", " }, traffic.name())?;
        }
        Ok(())
    }
}

impl Finding {
    fn write_place(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RuleRef { table, base_chain, hook, chain, rule } = &self.place;
        write!(f, "table {table}")?;
        if !chain.is_empty() {
            write!(f, ", chain {}", Plain(chain))?;
        }
        if let Some((hook, priority)) = hook {
            let from =
                if base_chain == chain { String::new() } else { format!("from {}, ", Plain(base_chain)) };
            let hook = hook.name().to_ascii_lowercase();
            write!(f, " ({from}hook {hook}, priority {priority})")?;
        }
        match rule {
            Some(number) => write!(f, ", rule {number} ({}) ", Shortened(&self.rule)),
            None => f.write_str(": "),
        }
    }
}

/// A finding whose effect is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// What is found.
    pub finding: Finding,
    /// Who accepts it.
    pub by: AcceptedBy,
}

/// `table ip nat, chain BACKUP … translates the destination before the mesh's rules: IPv4 outbound connections (accepted by the
/// node's setting ACCEPTED_RULES)`.
impl fmt::Display for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (accepted by {})", self.finding, self.by)
    }
}

/// A rule of other programs may have any length.
struct Shortened<'a>(&'a str);

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 200;
        match self.0.char_indices().nth(LONGEST) {
            Some((end, _)) => write!(f, "{}…", self.0.get(..end).unwrap_or_default()),
            None => f.write_str(self.0),
        }
    }
}
