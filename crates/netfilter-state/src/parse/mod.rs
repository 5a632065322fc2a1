//! Reads what iptables-save prints back into the types a plan is made of.
//!
//! Other programs' rules are kept as text. The same words a plan is rendered in are understood, so that reading a rendered
//! plan gives the plan.

use crate::state::{Entry, ForeignRule, IptablesTables};
use redirect_core::{
    rule::{Chain, ConnState, Direction, Equality, Match, Protocol, Rule, Table, Target, TcpFlags, Tracked},
    values::{Family, InterfaceName, Mark, MaskedMark, Port, PortRange, PortSyntax, parse_cidr},
};

/// How much of a line an error shows, in characters.
const SHOWN: usize = 200;

/// Text that is not what iptables-save prints for a family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// A line that cannot be part of such output.
    #[error("line {number} is not iptables-save output: {line:?}")]
    Line {
        /// Its number, counted from 1.
        number: usize,
        /// Its text.
        line: String,
    },
    /// A line of the other family's dump.
    #[error("line {number} is not of {family}, as which the dump is read, but of the other family: {line:?}")]
    OtherFamily {
        /// Its number, counted from 1.
        number: usize,
        /// Its text.
        line: String,
        /// The family asked for.
        family: Family,
    },
    /// Not one table.
    #[error(
        "the dump has no table: run iptables-save as root in the network namespace in question; if it prints nothing there, use the variant whose rules those are (iptables-legacy-save or iptables-nft-save)"
    )]
    NoTable,
}

impl SaveError {
    pub(crate) fn line(number: usize, line: &str) -> Self {
        Self::Line { number, line: shown(line) }
    }
}

pub(crate) fn shown(line: &str) -> String {
    line.chars().take(SHOWN).collect()
}

/// Of the output of iptables-save, ip6tables-save, or of a rendered plan, the tables that plans have rules in.
///
/// The others are passed over, and so are policies, counters and comments: it shows what of a plan is in force, not where a packet ends.
/// [`Dump`](crate::saved::Dump) reads everything.
///
/// # Errors
/// A line that cannot be part of such output.
pub fn mesh_tables(text: &str) -> Result<IptablesTables, SaveError> {
    let mut state = IptablesTables::new();
    let mut table = None;
    for (number, line) in (1_usize..).zip(text.lines()) {
        let error = || SaveError::line(number, line);
        let line = line.trim();
        match line.split_at_checked(1) {
            None | Some(("#", _)) => {}
            Some(("*", name)) => table = Some(Table::named(name.trim())),
            Some(_) if line == "COMMIT" => table = None,
            Some((":", chain)) => {
                let name = chain.split_ascii_whitespace().next().ok_or_else(error)?;
                if let Some(table) = table.ok_or_else(error)? {
                    declare(&mut state, table, name);
                }
            }
            Some(_) => {
                if let Some(table) = table.ok_or_else(error)? {
                    rule_line(&mut state, table, line).ok_or_else(error)?;
                }
            }
        }
    }
    Ok(state)
}

/// Built-in chains are always there; only their rules say something.
fn declare(state: &mut IptablesTables, table: Table, name: &str) {
    let chain = Chain::named(name);
    if !matches!(chain, Chain::Hook(_)) {
        state.declare(table, chain);
    }
}

/// `-A CHAIN rule`, or `-I CHAIN number rule` as a rendered plan has it; perhaps with counters in front.
fn rule_line(state: &mut IptablesTables, table: Table, line: &str) -> Option<()> {
    let line = match line.strip_prefix('[') {
        Some(counters) => counters.split_once(']')?.1.trim_start(),
        None => line,
    };
    let (command, rest) = split_word(line);
    let (name, rest) = split_word(rest);
    if name.is_empty() {
        return None;
    }
    let entries = state.declare(table, Chain::named(name));
    match command {
        "-A" => entries.push(entry(rest)),
        "-I" => {
            let (number, rest) = split_word(rest);
            let index = number.parse::<usize>().ok()?.checked_sub(1)?;
            entries.insert(index.min(entries.len()), entry(rest));
        }
        _ => return None,
    }
    Some(())
}

fn split_word(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((text, ""));
    (word, rest.trim_start())
}

/// What stands behind `-A CHAIN`: a rule this library understands, or text of another's.
#[must_use]
pub fn entry(text: &str) -> Entry {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    rule(&words).map_or_else(|| Entry::Foreign(ForeignRule::saved(text)), Entry::from)
}

fn rule(words: &[&str]) -> Option<Rule> {
    let mut reader = WordReader { words, next: 0 };
    let mut matches = Vec::new();
    let mut target = None;
    // The module whose options follow: `--mark` belongs to `-m mark` or `-m connmark`.
    let mut module = "";
    while let Some(word) = reader.take() {
        let (not, word) = if word == "!" { (true, reader.take()?) } else { (false, word) };
        match word {
            "-m" if !not => module = reader.take()?,
            "-j" if !not => target = Some(reader.target()?),
            "--ctdir" if !not && module == "conntrack" => with_direction(&mut matches, reader.take()?)?,
            _ => matches.push(reader.condition(word, not, module)?),
        }
    }
    let has_flags = matches.iter().any(|m| matches!(m, Match::TcpFlags(_)));
    if names_port_module(words) && !has_flags && !matches.iter().any(Match::compares_ports) {
        // iptables-save leaves away a comparison with all ports, and prints only the module that would make it.
        matches.push(Match::DestinationPort(Equality::equals(PortRange::ALL)));
    }
    let rule = Rule { matches, target: target? };
    let protocols = rule.matches.iter().filter(|m| matches!(m, Match::Protocol(_))).count();
    (protocols <= 1 && rule.says_its_protocol()).then_some(rule)
}

fn names_port_module(words: &[&str]) -> bool {
    words.windows(2).any(|pair| matches!(pair, ["-m", "tcp" | "udp"]))
}

/// `--ctdir` behind `--ctstate`.
fn with_direction(matches: &mut [Match], name: &str) -> Option<()> {
    let Some(Match::Tracked(tracked)) = matches.last_mut() else { return None };
    let of_name = [Direction::Original, Direction::Reply].into_iter().find(|one| one.name() == name)?;
    tracked.direction.replace(of_name).is_none().then_some(())
}

/// The words of a rule, read one after the other.
struct WordReader<'a> {
    words: &'a [&'a str],
    next: usize,
}

impl<'a> WordReader<'a> {
    fn take(&mut self) -> Option<&'a str> {
        let word = self.words.get(self.next).copied()?;
        self.next = self.next.checked_add(1)?;
        Some(word)
    }

    /// Takes the word if it is the next one.
    fn take_if(&mut self, expected: &str) -> bool {
        let found = self.words.get(self.next).is_some_and(|word| *word == expected);
        if found {
            self.next = self.next.saturating_add(1);
        }
        found
    }

    /// Takes the word's value if the word is the next one.
    fn value_of(&mut self, expected: &str) -> Option<&'a str> {
        if self.take_if(expected) { self.take() } else { None }
    }

    fn condition(&mut self, word: &str, not: bool, module: &str) -> Option<Match> {
        let value = self.take()?;
        let interface =
            |value: &str| value.parse::<InterfaceName>().ok().map(|value| Equality { value, not });
        let net = |value: &str| parse_cidr(value).ok().map(|value| Equality { value, not });
        let port = |value: &str| {
            PortRange::parse(value, PortSyntax::Saved).ok().map(|value| Equality { value, not })
        };
        let id = |value: &str| value.parse::<u32>().ok().map(|value| Equality { value, not });
        let mark = |value: &str| MaskedMark::parse(value).map(|value| Equality { value, not });
        Some(match (module, word) {
            (_, "-s") => Match::Source(net(value)?),
            (_, "-d") => Match::Destination(net(value)?),
            (_, "-i") => Match::InInterface(interface(value)?),
            (_, "-o") => Match::OutInterface(interface(value)?),
            (_, "-p") if !not => Match::Protocol(protocol(value)?),
            ("tcp" | "udp", "--sport") => Match::SourcePort(port(value)?),
            ("tcp" | "udp", "--dport") => Match::DestinationPort(port(value)?),
            ("multiport", "--dports") => Match::DestinationPorts(Equality { value: ports(value)?, not }),
            ("tcp", "--tcp-flags") => {
                let value = TcpFlags::new(flags(value)?, flags(self.take()?)?)?;
                Match::TcpFlags(Equality { value, not })
            }
            ("conntrack", "--ctstate") if !not => {
                Match::Tracked(Tracked { state: conn_state(value)?, direction: None })
            }
            ("owner", "--uid-owner") => Match::OwnerUid(id(value)?),
            ("owner", "--gid-owner") => Match::OwnerGid(id(value)?),
            ("mark", "--mark") => Match::Mark(mark(value)?),
            ("connmark", "--mark") => Match::ConnMark(mark(value)?),
            _ => return None,
        })
    }

    /// The target's name and its options, up to the end.
    fn target(&mut self) -> Option<Target> {
        const ALL_BITS: &str = "0xffffffff";
        let target = match self.take()? {
            "ACCEPT" => Target::Accept,
            "DROP" => Target::Drop,
            "RETURN" => Target::Return,
            "REDIRECT" => Target::Redirect(self.value_of("--to-ports")?.parse().ok()?),
            "TPROXY" => self.tproxy()?,
            "MARK" => Target::SetMark(whole_mark(self.value_of("--set-xmark")?)?),
            "CONNMARK" => {
                let target = match self.take()? {
                    "--set-xmark" => {
                        let mark = MaskedMark::parse(self.take()?)?;
                        return self.at_end(Target::SetConnMark(mark));
                    }
                    "--save-mark" => Target::SaveMark,
                    "--restore-mark" => Target::RestoreMark,
                    _ => return None,
                };
                (self.value_of("--nfmask")? == ALL_BITS && self.value_of("--ctmask")? == ALL_BITS)
                    .then_some(target)?
            }
            "CT" => Target::ConntrackZone(self.value_of("--zone")?.parse().ok()?),
            name => Target::Jump(jump(name)?),
        };
        self.at_end(target)
    }

    fn at_end(&self, target: Target) -> Option<Target> {
        (self.next == self.words.len()).then_some(target)
    }

    /// `--on-port P [--on-ip unspecified] --tproxy-mark M/0xffffffff`
    fn tproxy(&mut self) -> Option<Target> {
        let port: Port = self.value_of("--on-port")?.parse().ok()?;
        if let Some(address) = self.value_of("--on-ip") {
            let address: std::net::IpAddr = address.parse().ok()?;
            if !address.is_unspecified() {
                return None;
            }
        }
        Some(Target::Tproxy { port, mark: whole_mark(self.value_of("--tproxy-mark")?)? })
    }
}

/// A chain a rule jumps to: the mesh's own. Jumps of other programs, and targets of other extensions, are not understood.
fn jump(name: &str) -> Option<Chain> {
    let chain = Chain::named(name);
    chain.belongs_to_mesh().then_some(chain)
}

fn protocol(name: &str) -> Option<Protocol> {
    match name {
        "tcp" | "6" => Some(Protocol::Tcp),
        "udp" | "17" => Some(Protocol::Udp),
        _ => None,
    }
}

fn ports(list: &str) -> Option<Vec<PortRange>> {
    list.split(',').map(|port| PortRange::parse(port, PortSyntax::Saved).ok()).collect()
}

/// `FIN,SYN`, `NONE` or `ALL`.
fn flags(list: &str) -> Option<u8> {
    match list {
        "NONE" => Some(0),
        "ALL" => Some(TcpFlags::NAMED.iter().copied().fold(0, |all, (flag, _)| all | flag)),
        _ => list.split(',').try_fold(0, |flags, word| {
            TcpFlags::NAMED.iter().copied().find(|(_, name)| *name == word).map(|(flag, _)| flags | flag)
        }),
    }
}

fn conn_state(states: &str) -> Option<ConnState> {
    match states {
        "INVALID" => Some(ConnState::Invalid),
        "RELATED,ESTABLISHED" => Some(ConnState::RelatedOrEstablished),
        _ => None,
    }
}

/// A mark set in all its bits.
fn whole_mark(text: &str) -> Option<Mark> {
    text.strip_suffix("/0xffffffff")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::rule::{Hook, OurChain};

    #[test]
    fn rules_of_others_are_kept_as_text() {
        for text in [
            "-p tcp -m comment --comment \"a b\" -j ISTIO_OUTPUT",
            "-m addrtype --dst-type LOCAL -j DOCKER",
            "-p icmp -j ACCEPT",
            "-j CNI-HOSTPORT-DNAT",
            "-m mark --mark 0x0/0xff -j RETURN",
            "! -p tcp -j RETURN",
            "-j",
            "",
            "-p tcp",
            "-m tcp --dport 80 -j RETURN",
            "-p tcp -p udp -j RETURN",
            "-p tcp ! -j RETURN",
            "! -m mark --mark 0x1 -j RETURN",
            "-m conntrack --ctstate RELATED,ESTABLISHED ! --ctdir REPLY -j RETURN",
            "-m conntrack ! --ctstate RELATED,ESTABLISHED -j RETURN",
            "-j REDIRECT --to-ports 80-90",
            "-j REDIRECT --to-ports 80 --random",
        ] {
            assert_eq!(entry(text), Entry::Foreign(ForeignRule::saved(text)));
        }
    }

    #[test]
    fn a_comparison_with_all_ports_is_read_back() {
        let all = entry("-p tcp -m tcp --dport 0:65535 -j RETURN");
        assert!(matches!(all, Entry::Rule(_)));
        assert_eq!(entry("-p tcp -m tcp -j RETURN"), all);
    }

    #[test]
    fn saved_tables_are_read() {
        let state = mesh_tables(
            "# Generated by iptables-save\n*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j DROP\nCOMMIT\n*nat\n:PREROUTING ACCEPT [0:0]\n:ISTIO_INBOUND - [0:0]\n[3:180] -A PREROUTING -p tcp -j ISTIO_INBOUND\nCOMMIT\n",
        )
        .unwrap();
        assert!(state.has(Table::Nat, &OurChain::Inbound.into()));
        let rule = Rule {
            matches: [Match::Protocol(Protocol::Tcp)].into(),
            target: Target::Jump(OurChain::Inbound.into()),
        };
        assert_eq!(state.rules(Table::Nat, &Hook::Prerouting.into()), [Entry::Rule(rule)]);
    }

    #[test]
    fn flags_have_names_and_words_for_all_and_none() {
        let read = |words: &str| match entry(&format!("-p tcp -m tcp --tcp-flags {words} -j DROP")) {
            Entry::Rule(rule) => rule.matches.into_iter().find_map(|condition| {
                if let Match::TcpFlags(is) = condition {
                    Some((is.value.mask(), is.value.set()))
                } else {
                    None
                }
            }),
            Entry::Foreign(_) => None,
        };
        assert_eq!(read("ALL NONE"), Some((0x3f, 0)));
        assert_eq!(read("ALL ALL"), Some((0x3f, 0x3f)));
        assert_eq!(read("FIN,ACK ACK"), Some((TcpFlags::FIN | TcpFlags::ACK, TcpFlags::ACK)));
        assert_eq!(read("SYN,FIN,SYN SYN,SYN"), Some((TcpFlags::FIN | TcpFlags::SYN, TcpFlags::SYN)));
        assert_eq!(read("FIN,ECE FIN"), None);
    }

    #[test]
    fn anything_else_is_an_error_with_its_line() {
        for (text, number) in [("hello", 1), ("*nat\n:X - [0:0]\n-Z X", 3), ("*nat\n-A", 2), ("-A X -j Y", 1)]
        {
            assert_eq!(
                mesh_tables(text).err(),
                Some(SaveError::line(number, text.lines().nth(number - 1).unwrap())),
                "{text:?}"
            );
        }
    }
}
