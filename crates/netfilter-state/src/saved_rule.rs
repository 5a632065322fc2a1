//! One rule in the words of iptables-save, as packets meet it.

use crate::ruleset::{
    Condition, CopiedMark, Endpoint, KernelRule, Selector, StateBits, Statement, marked, owned_by,
    target_named,
};
use redirect_core::{
    rule::{Equality, Match, Protocol},
    values::{Cidrs, PortRange, PortSyntax},
};

impl KernelRule {
    /// A rule in the words of iptables-save, without `-A` and the chain. What of it is not understood is
    /// [`Condition::Unknown`] or [`Statement::Unknown`].
    #[must_use]
    pub fn saved(text: &str) -> Self {
        rule(&words(text))
    }
}

/// The words of a line; what stands between quotation marks is one.
pub(crate) fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted, mut begun) = (Vec::new(), String::new(), false, false);
    let mut characters = line.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' if quoted => word.extend(characters.next()),
            '"' => (quoted, begun) = (!quoted, true),
            ' ' if !quoted => {
                if begun || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            c => word.push(c),
        }
    }
    if begun || !word.is_empty() {
        words.push(word);
    }
    words
}

pub(crate) fn rule(words: &[String]) -> KernelRule {
    let mut rule = KernelRule::default();
    let (mut module, mut words) = ("", words);
    // Where the conditions of the match at hand begin.
    let mut of_match = 0;
    // A match without options; most of those compare something all the same.
    let mut bare = None;
    while let Some((word, rest)) = words.split_first() {
        let (not, word, rest) = match (word.as_str(), rest.split_first()) {
            ("!", Some((word, rest))) => (true, word.as_str(), rest),
            (word, _) => (false, word, rest),
        };
        if word == "-m" || matches!(word, "-j" | "-g") {
            rule.conditions.extend(bare.take().and_then(without_options));
        }
        if let ("-j" | "-g", Some((target, options))) = (word, rest.split_first()) {
            rule.statements = [statement(word, target, options)].into();
            return rule;
        }
        // Its values: everything up to the next option.
        let is_option = |word: &String| word == "!" || word.starts_with('-');
        let count = rest.iter().position(is_option).unwrap_or(rest.len());
        let (values, behind) = rest.split_at_checked(count).unwrap_or((rest, &[]));
        words = behind;
        if word == "-m" {
            module = values.first().map_or("", String::as_str);
            of_match = rule.conditions.len();
            bare = Some(module);
            continue;
        }
        bare = None;
        // One that always holds.
        if (module, word) == ("comment", "--comment") {
            rule.comment = values.join(" ");
            continue;
        }
        let condition = condition(module, word, not, values);
        rule.conditions.push(condition.unwrap_or_else(|| Condition::Unknown(unknown(module, word))));
        join_state_and_direction(&mut rule.conditions, of_match);
    }
    rule.conditions.extend(bare.and_then(without_options));
    rule
}

/// What a match without options compares: of a protocol nothing that `-p` does not say.
fn without_options(module: &str) -> Option<Condition> {
    let is_of_protocol = matches!(module, "tcp" | "udp" | "udplite" | "sctp" | "dccp" | "icmp" | "icmp6");
    (!is_of_protocol).then(|| Condition::Unknown(format!("-m {module}")))
}

/// A single match on state and direction ignores the direction of a packet without a connection.
fn join_state_and_direction(conditions: &mut Vec<Condition>, of_match: usize) {
    let joined = match conditions.get(of_match..) {
        Some(
            [Condition::State(states), Condition::IsReply(is_reply)]
            | [Condition::IsReply(is_reply), Condition::State(states)],
        ) => Condition::StateAndDirection { states: states.clone(), is_reply: *is_reply },
        _ => return,
    };
    conditions.truncate(of_match);
    conditions.push(joined);
}

fn unknown(module: &str, word: &str) -> String {
    if module.is_empty() { word.to_owned() } else { format!("-m {module} {word}") }
}

/// A condition; `None` if unsupported.
fn condition(module: &str, word: &str, not: bool, values: &[String]) -> Option<Condition> {
    let (value, second) = (values.first(), values.get(1));
    let port = || Some(Equality { value: PortRange::parse(value?, PortSyntax::Saved).ok()?, not });
    let net = || Some(Equality { value: Cidrs::parse_one(value?).ok()?, not });
    let interface = || Some(Equality { value: value?.parse().ok()?, not });
    let plain = |condition: Match| Some(Condition::Plain(condition));
    match (module, word) {
        (_, "-s") => plain(Match::Source(net()?)),
        (_, "-d") => plain(Match::Destination(net()?)),
        (_, "-i") => plain(Match::InInterface(interface()?)),
        (_, "-o") => plain(Match::OutInterface(interface()?)),
        (_, "-p") => protocol(value?, not),
        ("tcp" | "udp", "--sport") => plain(Match::SourcePort(port()?)),
        ("tcp" | "udp", "--dport") => plain(Match::DestinationPort(port()?)),
        ("tcp", "--tcp-flags") => tcp_flags(value?, second?, not),
        ("multiport", "--dports") => plain(Match::DestinationPorts(Equality { value: ports(value?)?, not })),
        ("multiport", "--sports") => Some(Condition::SourcePorts(Equality { value: ports(value?)?, not })),
        ("conntrack", "--ctstate") | ("state", "--state") => {
            Some(Condition::State(Equality { value: states(value?)?, not }))
        }
        ("conntrack", "--ctdir") => Some(Condition::IsReply(match value?.as_str() {
            "REPLY" => !not,
            "ORIGINAL" => not,
            _ => return None,
        })),
        ("owner", "--uid-owner") => owner(Selector::User, value?, not),
        ("owner", "--gid-owner") => owner(Selector::Group, value?, not),
        ("addrtype", "--src-type") if value? == "LOCAL" => {
            Some(Condition::Local(Equality { value: Endpoint::Source, not }))
        }
        ("addrtype", "--dst-type") if value? == "LOCAL" => {
            Some(Condition::Local(Equality { value: Endpoint::Destination, not }))
        }
        ("mark" | "connmark", "--mark") => {
            let (mask, value) = bits(value?)?;
            Some(marked(module, mask, Equality { value, not }))
        }
        _ => None,
    }
}

fn protocol(name: &str, not: bool) -> Option<Condition> {
    let is_it = |protocol: &Protocol| protocol.name() == name || protocol.number().to_string() == name;
    let known = [Protocol::Tcp, Protocol::Udp].into_iter().find(is_it);
    if let (Some(protocol), false) = (known, not) {
        return Some(Condition::Plain(Match::Protocol(protocol)));
    }
    // IANA's numbers, by the names of Debian's /etc/protocols and of iptables itself.
    let number = match name {
        "icmp" => 1,
        "igmp" => 2,
        "ipencap" => 4,
        "dccp" => 33,
        "ipv6" => 41,
        "gre" => 47,
        "esp" => 50,
        "ah" => 51,
        "ipv6-icmp" | "icmpv6" => 58,
        "ospf" => 89,
        "pim" => 103,
        "vrrp" => 112,
        "sctp" => 132,
        "mobility-header" | "ipv6-mh" => 135,
        "udplite" => 136,
        _ => known.map(Protocol::number).or_else(|| name.parse().ok())?,
    };
    Some(Condition::Protocol(Equality { value: number, not }))
}

/// `ID` or `FIRST-LAST`.
fn owner(selector: Selector, text: &str, not: bool) -> Option<Condition> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(owned_by(selector, (first.parse().ok()?, last.parse().ok()?), not))
}

fn ports(list: &str) -> Option<Vec<PortRange>> {
    list.split(',').map(|port| PortRange::parse(port, PortSyntax::Saved).ok()).collect()
}

fn states(list: &str) -> Option<u32> {
    list.split(',').try_fold(0, |bits, name| {
        let (bit, _) = StateBits::NAMES.into_iter().find(|(_, known)| *known == name)?;
        Some(bits | bit)
    })
}

fn tcp_flags(mask: &str, set: &str, not: bool) -> Option<Condition> {
    const NAMES: [(&str, u8); 8] =
        [("FIN", 1), ("SYN", 2), ("RST", 4), ("PSH", 8), ("ACK", 16), ("URG", 32), ("ALL", 63), ("NONE", 0)];
    let bits = |list: &str| {
        list.split(',').try_fold(0, |bits, name| {
            let (_, bit) = NAMES.into_iter().find(|(known, _)| *known == name)?;
            Some(bits | bit)
        })
    };
    Some(Condition::TcpFlags { mask: bits(mask)?, is: Equality { value: bits(set)?, not } })
}

/// `VALUE` or `VALUE/MASK`, in hexadecimal digits; the mask comes first.
fn bits(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    match text.split_once('/') {
        Some((value, mask)) => Some((number(mask)?, number(value)?)),
        None => Some((u32::MAX, number(text)?)),
    }
}

fn statement(word: &str, target: &str, options: &[String]) -> Statement {
    if word == "-g" {
        return Statement::Goto(target.to_owned());
    }
    let option = |name: &str| option(options, name);
    match target {
        "CT" if has(options, "--notrack") => Statement::Untrack,
        "CT" if has(options, "--zone") => option("--zone")
            .and_then(|zone| zone.parse().ok())
            .map_or_else(|| Statement::Harmless("-j CT".into()), Statement::Zone),
        "MARK" => Statement::SetMark(option("--set-xmark").and_then(bits)),
        "CONNMARK" => connection_marked(options),
        "REDIRECT" => match option("--to-ports").and_then(|port| port.parse().ok()) {
            None if options.is_empty() => Statement::Redirect(None),
            port @ Some(_) if options.len() == 2 => Statement::Redirect(port),
            _ => Statement::Translate(target.to_owned()),
        },
        "TPROXY" if option("--on-ip").is_some_and(|ip| !is_unspecified(ip)) => {
            Statement::Unknown("-j TPROXY --on-ip".into())
        }
        "TPROXY" => Statement::Tproxy {
            port: option("--on-port").and_then(|port| port.parse().ok()).filter(|port| *port != 0),
            mark: option("--tproxy-mark").and_then(bits),
            ends: true,
        },
        name => target_named(name).unwrap_or_else(|| Statement::Jump(name.to_owned())),
    }
}

fn has(options: &[String], name: &str) -> bool {
    options.iter().any(|word| word == name)
}

/// The word behind this one.
fn option<'a>(options: &'a [String], name: &str) -> Option<&'a str> {
    options.iter().skip_while(|word| *word != name).nth(1).map(String::as_str)
}

/// `-j CONNMARK` without shifts.
fn connection_marked(options: &[String]) -> Statement {
    let has = |name: &str| has(options, name);
    let is_shifted = has("--left-shift-mark") || has("--right-shift-mark");
    // A whole mask may be printed, and so may none; `--mask` is both of them.
    let mask_of = |name: &str| match option(options, name).or_else(|| option(options, "--mask")) {
        Some(text) => bits(text).map(|(_, value)| value),
        None => Some(u32::MAX),
    };
    let masks = mask_of("--nfmask").zip(mask_of("--ctmask")).filter(|_| !is_shifted);
    let set = option(options, "--set-xmark").and_then(bits);
    match (set, masks) {
        (Some((mask, value)), Some(_)) => Statement::SetConnMark { mask, value },
        (None, Some((cleared, mask))) if has("--restore-mark") => {
            Statement::RestoreMark(CopiedMark { cleared, mask, flip: 0 })
        }
        (None, None) if has("--restore-mark") => Statement::SetMark(None),
        (None, Some((mask, cleared))) if has("--save-mark") => {
            Statement::SaveMark(CopiedMark { cleared, mask, flip: 0 })
        }
        _ => Statement::Unknown("-j CONNMARK".into()),
    }
}

/// Whether an address is the packet's own destination to TPROXY.
fn is_unspecified(text: &str) -> bool {
    text.parse().is_ok_and(|address: std::net::IpAddr| address.is_unspecified())
}

#[cfg(test)]
mod tests;
