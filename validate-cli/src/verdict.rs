//! What was proven, what was not, and what it means: for people, and for machines.

use crate::{reason::Reason, walk::ProcessIdentity};
use netfilter_state::ruleset::Plain;
use packet_trace::{Packet, TraceEvent, TraceRules};
use redirect_core::Family;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fmt, net::SocketAddr, time::Duration};

/// Kubernetes keeps this many bytes of a termination message.
const MESSAGE_LIMIT: usize = 4096;

/// A way that packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// From loopback to 127.0.0.6 or `::6`: what the proxy sends itself counts as inbound.
    ProxyToSelf,
    /// To the pod's own address: an inbound call when it is the proxy's, not captured when the application's.
    OwnAddress,
    /// From 127.0.0.6 or `::6` to the pod: the proxy handing an inbound connection to the application.
    Passthrough,
    /// From loopback to loopback: the application talking to itself.
    Loopback,
    /// To somewhere far away.
    Outbound,
    /// A DNS query in a datagram.
    DnsUdp,
    /// A DNS query over TCP.
    DnsTcp,
    /// Inbound connections handed over unchanged.
    Tproxy,
    /// Policy routing of TPROXY's packets.
    PolicyRoute,
    /// Inbound connections from other machines.
    Inbound,
}

impl Path {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ProxyToSelf => "proxy-to-self",
            Self::OwnAddress => "own-address",
            Self::Passthrough => "passthrough",
            Self::Loopback => "loopback",
            Self::Outbound => "outbound",
            Self::DnsUdp => "dns-udp",
            Self::DnsTcp => "dns-tcp",
            Self::Tproxy => "tproxy",
            Self::PolicyRoute => "policy-route",
            Self::Inbound => "inbound",
        }
    }
}

/// What was found about one path of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathCheck {
    /// The family.
    pub family: Family,
    /// The path.
    pub path: Path,
    /// Where the probe was sent.
    pub target: Option<SocketAddr>,
    /// The packet, if one was sent.
    pub sent: Option<Packet>,
    /// Whether a redirection was expected on this path, rather than an exemption.
    pub captures: bool,
    /// `Ok` when it is as planned.
    pub result: Result<(), Reason>,
    /// What was seen.
    pub detail: String,
}

/// A path about which nothing can be said from here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unproven {
    /// The family.
    pub family: Family,
    /// The path.
    pub path: Path,
    /// Why not.
    pub why: &'static str,
}

/// The outcome of a validation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidationReport {
    /// In one word.
    pub reason: Reason,
    /// What was found, path by path.
    pub checks: Vec<PathCheck>,
    /// What cannot be proven from here.
    pub unproven: Vec<Unproven>,
    /// The rules beside the plan's that decide about what failed, each in words. Only a privileged process can read them:
    /// [`name_rules`](Self::name_rules).
    pub rules: Vec<String>,
    /// Who asked.
    pub who: ProcessIdentity,
    /// How often everything was tried.
    pub rounds: u32,
    /// How long it took.
    pub elapsed: Duration,
}

impl ValidationReport {
    /// A verdict without anything checked.
    pub(crate) const fn new(reason: Reason, who: ProcessIdentity) -> Self {
        Self {
            reason,
            checks: Vec::new(),
            unproven: Vec::new(),
            rules: Vec::new(),
            who,
            rounds: 0,
            elapsed: Duration::ZERO,
        }
    }

    /// Names the rules beside the plan's that decide about what failed, from everything that packets of a family meet in
    /// the network namespace. The plan's own rules must know the settings behind them.
    pub fn name_rules(&mut self, live: impl Fn(Family) -> TraceRules) {
        let mut named: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for check in self.checks.iter().filter(|check| check.result.is_err()) {
            let Some(packet) = &check.sent else { continue };
            let trace = live(check.family).trace(packet);
            let Some(TraceEvent::Rule { place, rule, origin: None, .. }) = trace.deciding() else { continue };
            let number = place.rule.unwrap_or_default();
            let text =
                format!("table {}, chain {}, rule {number} ({rule})", place.table, Plain(&place.chain));
            let path = format!("{} {}", check.family, check.path.name());
            named.entry(text).or_default().push(path);
        }
        let words =
            |(rule, paths): (String, Vec<String>)| format!("{rule} decides about {}", paths.join(", "));
        self.rules = named.into_iter().map(words).collect();
    }

    /// Whether the pod may start.
    #[must_use]
    pub fn is_redirected(&self) -> bool {
        self.reason == Reason::Redirected
    }

    /// 0 when the pod may start, else 126: the code that repair controllers look for.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        if self.is_redirected() { 0 } else { 126 }
    }

    /// One JSON object for the container's termination message; never more than Kubernetes keeps.
    #[must_use]
    pub fn json(&self) -> String {
        let failed = || self.checks.iter().filter(|check| check.result.is_err());
        let all = self.value(self.checks.iter(), true).to_string();
        if all.len() <= MESSAGE_LIMIT {
            return all;
        }
        let short = self.value(failed(), false).to_string();
        if short.len() <= MESSAGE_LIMIT {
            return short;
        }
        self.value(failed().take(4), false).to_string()
    }

    /// The first of the rules, each shortened: another program may make any number, of any length.
    fn some_rules(&self) -> impl Iterator<Item = String> {
        const MOST: usize = 3;
        const LONGEST: usize = 300;
        self.rules.iter().take(MOST).map(|rule| rule.chars().take(LONGEST).collect())
    }

    /// What the headline has to say of paths that cannot be tested from here.
    fn untested(&self) -> String {
        if self.unproven.is_empty() || !self.is_redirected() {
            return String::new();
        }
        let paths =
            self.unproven.iter().map(|unproven| format!("{} {}", unproven.family, unproven.path.name()));
        format!("; not tested: {}", paths.collect::<Vec<_>>().join(", "))
    }

    /// The verdict for people, line by line: what it means, what was seen, what could not be proven, what to do; each with
    /// whether it is about something wrong.
    #[must_use]
    pub fn lines(&self) -> Vec<(bool, String)> {
        let wrong = !self.is_redirected();
        let ProcessIdentity { uid, gid } = self.who;
        let headline = format!(
            "{}: {}{} (user {uid}, group {gid}, {} ms)",
            self.reason,
            self.reason.doc().meaning,
            self.untested(),
            self.elapsed.as_millis()
        );
        let mut lines = vec![(wrong, headline)];
        for check in &self.checks {
            let word = if check.result.is_ok() { "proven" } else { "FAILED" };
            lines.push((check.result.is_err(), format!("{word:8} {check}")));
        }
        lines.extend(self.unproven.iter().map(|unproven| (false, format!("{:8} {unproven}", "unproven"))));
        if wrong {
            lines.extend(self.some_rules().map(|rule| (true, format!("rule: {rule}"))));
            lines.push((true, format!("owner: {}", self.reason.agent())));
            lines.push((true, format!("check: {}", self.reason.doc().remedy)));
            lines.push((true, format!("read on: {}", self.reason.document())));
        }
        lines
    }

    fn value<'a>(&'a self, checks: impl Iterator<Item = &'a PathCheck>, unproven: bool) -> Value {
        let Self { reason, .. } = self;
        let unproven = self.unproven.iter().filter(|_| unproven);
        json!({
            "reason": reason.code(),
            "message": format!("{}{}", reason.doc().meaning, self.untested()),
            // Unknown is neither true nor false.
            "redirected": reason.is_redirected(),
            "exitCode": self.exit_code(),
            "remedy": {"agent": reason.agent(), "setting": reason.doc().remedy, "document": reason.document()},
            "uid": self.who.uid,
            "gid": self.who.gid,
            "rounds": self.rounds,
            "milliseconds": u64::try_from(self.elapsed.as_millis()).unwrap_or(u64::MAX),
            "checks": checks.map(PathCheck::value).collect::<Vec<_>>(),
            "rules": self.some_rules().collect::<Vec<_>>(),
            "unproven": unproven.map(ToString::to_string).collect::<Vec<_>>(),
        })
    }
}

impl PathCheck {
    /// What is known of a path to which nothing was sent.
    pub(crate) const fn without_probe(
        family: Family,
        path: Path,
        result: Result<(), Reason>,
        detail: String,
    ) -> Self {
        Self { family, path, target: None, sent: None, captures: false, result, detail }
    }

    /// Its result in one word.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self.result {
            Ok(()) => "proven",
            Err(reason) => reason.code(),
        }
    }

    fn value(&self) -> Value {
        let mut value = json!({
            "family": self.family.to_string(),
            "path": self.path.name(),
            "result": self.code(),
        });
        if let Some(target) = self.target {
            value["target"] = target.to_string().into();
        }
        if self.result.is_err() {
            value["detail"] = self.detail.as_str().into();
        }
        value
    }
}

impl fmt::Display for PathCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.family, self.path.name(), self.detail)
    }
}

impl fmt::Display for Unproven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.family, self.path.name(), self.why)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a panic is how a test fails
    use super::*;

    fn verdict(reason: Reason, checks: usize) -> ValidationReport {
        let check = PathCheck {
            family: Family::V6,
            path: Path::ProxyToSelf,
            sent: None,
            target: Some("[fd00:1234:5678:9abc:def0:1234:5678:9abc]:65535".parse().unwrap()),
            captures: true,
            result: Err(reason),
            detail: "sent to [fd00:1234:5678:9abc:def0:1234:5678:9abc]:65535 ".repeat(3),
        };
        ValidationReport {
            reason,
            checks: vec![check; checks],
            unproven: Vec::new(),
            rules: vec!["table ip nat, chain OTHER, rule 1 (-p tcp -j REDIRECT)".repeat(20); 16],
            who: ProcessIdentity { uid: u32::MAX, gid: u32::MAX },
            rounds: u32::MAX,
            elapsed: Duration::MAX,
        }
    }

    #[test]
    fn the_message_is_one_json_object_that_kubernetes_keeps_whole() {
        for reason in Reason::ALL {
            for checks in [0, 5, 16, 100] {
                let text = verdict(reason, checks).json();
                assert!(text.len() <= MESSAGE_LIMIT, "{reason} {checks}: {}", text.len());
                let value: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(value["reason"], reason.code());
            }
        }
    }

    #[test]
    fn people_read_what_was_seen_and_what_to_do() {
        let lines = verdict(Reason::NoRules, 1).lines();
        let text = lines.iter().map(|(_, line)| line.as_str()).collect::<Vec<_>>().join("\n");
        for expected in [
            "no-rules: nothing",
            "FAILED   IPv6 proxy-to-self",
            "owner: the istio-cni agent",
            "docs/reference/validation.md#no-rules",
        ] {
            assert!(text.contains(expected), "{expected} is missing in {text}");
        }
    }
}
