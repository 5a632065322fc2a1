//! The xt matches and targets that iptables-nft uses where nf_tables' own expressions would not be read back: structures of
//! `linux/netfilter/xt_*.h`, in the machine's byte order but for ports and addresses, padded to eight bytes.

use super::wire::{read_array, write_at};
use crate::ruleset::StateBits;
use redirect_core::{
    rule::{ConnState, Direction, Equality, Match, Rule, Target, TcpFlags, Tracked},
    values::{Family, PortRange},
};

/// An xt match or target, in the revision a rule needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extension {
    /// Its name: small letters for a match, capitals for a target.
    pub name: &'static str,
    /// Its revision.
    pub revision: u32,
    /// Whether it is a target.
    pub is_target: bool,
}

impl Extension {
    const OWNER: Self = Self::matches("owner", 1);
    const MULTIPORT: Self = Self::matches("multiport", 1);
    const CONNTRACK: Self = Self::matches("conntrack", 3);
    const CONNMARK_MATCH: Self = Self::matches("connmark", 1);
    const REDIRECT: Self = Self::target("REDIRECT", 0);
    const TPROXY: Self = Self::target("TPROXY", 1);
    const MARK: Self = Self::target("MARK", 2);
    const CONNMARK: Self = Self::target("CONNMARK", 2);
    const CT: Self = Self::target("CT", 2);

    const fn matches(name: &'static str, revision: u32) -> Self {
        Self { name, revision, is_target: false }
    }

    const fn target(name: &'static str, revision: u32) -> Self {
        Self { name, revision, is_target: true }
    }

    /// Those that a rule needs.
    pub fn of_rule(rule: &Rule) -> impl Iterator<Item = Self> + '_ {
        let of_matches = rule.effective_matches().filter_map(of_match).map(|(extension, _)| extension);
        // It is the same for both families.
        of_matches.chain(of_target(&rule.target, Family::V4).map(|(extension, _)| extension))
    }

    /// The kernel module that has it.
    #[must_use]
    pub const fn module(self) -> &'static str {
        match self.name.as_bytes() {
            b"owner" => "xt_owner",
            b"multiport" => "xt_multiport",
            b"conntrack" => "xt_conntrack",
            b"connmark" | b"CONNMARK" => "xt_connmark",
            b"MARK" => "xt_mark",
            b"REDIRECT" => "xt_REDIRECT",
            b"TPROXY" => "xt_TPROXY",
            b"CT" => "xt_CT",
            _ => "x_tables",
        }
    }
}

/// Sizes, padding included.
pub(crate) mod size {
    pub(crate) const OWNER: usize = 24;
    pub(crate) const MULTIPORT: usize = 48;
    pub(crate) const CONNTRACK: usize = 168;
    pub(crate) const MARK_MATCH: usize = 16;
    pub(crate) const REDIRECT_V4: usize = 24;
    pub(crate) const REDIRECT_V6: usize = 40;
    pub(crate) const TPROXY: usize = 32;
    pub(crate) const MARK: usize = 8;
    pub(crate) const CONNMARK: usize = 16;
    pub(crate) const CT: usize = 72;
}

/// Bits of `xt_owner_match_info.match` and `.invert`.
pub(crate) const OWNER_UID: u8 = 1;
pub(crate) const OWNER_GID: u8 = 2;
/// `XT_MULTIPORT_DESTINATION`.
pub(crate) const MULTIPORT_DESTINATION: u8 = 1;
/// How many ports a multiport match has room for; a range takes two.
pub(crate) const MULTIPORT_ROOM: usize = 15;
/// Where in `xt_conntrack_mtinfo3` the flags, the inverted flags and the states stand.
const CONNTRACK_FLAGS: usize = 146;
const CONNTRACK_STATES: usize = 150;
/// `XT_CONNTRACK_STATE`.
const CONNTRACK_STATE: u16 = 1;
/// `XT_CONNTRACK_DIRECTION`: the original direction; inverted, the other.
pub(crate) const CONNTRACK_DIRECTION: u16 = 1 << 12;
/// `XT_CONNTRACK_STATE_ALIAS`: it was written as `-m state`, which asks the same.
pub(crate) const WRITTEN_AS_STATE: u16 = 1 << 13;
/// `XT_TCP_INV_FLAGS`.
const TCP_INVERTED_FLAGS: u8 = 4;
/// Modes of CONNMARK.
pub(crate) const SET_MARK: u8 = 0;
pub(crate) const SAVE_MARK: u8 = 1;
pub(crate) const RESTORE_MARK: u8 = 2;
const ALL_BITS: [u8; 4] = [0xff; 4];

/// A structure of this size with these fields, each at its offset; the rest is zero.
fn structure(size: usize, fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut structure = vec![0; size];
    for (at, field) in fields {
        write_at(&mut structure, *at, field);
    }
    structure
}

/// The extension that a condition needs, if it is not one of nf_tables' own expressions, and its structure, if that has room.
pub(crate) fn of_match(condition: &Match) -> Option<(Extension, Option<Vec<u8>>)> {
    match condition {
        Match::OwnerUid(is) => Some((Extension::OWNER, Some(owner(OWNER_UID, is)))),
        Match::OwnerGid(is) => Some((Extension::OWNER, Some(owner(OWNER_GID, is)))),
        Match::DestinationPorts(is) => Some((Extension::MULTIPORT, multiport(is))),
        Match::Tracked(tracked) => Some((Extension::CONNTRACK, Some(conntrack(*tracked)))),
        Match::ConnMark(is) => {
            let (value, mask) = (is.value.value().to_ne_bytes(), is.value.mask().to_ne_bytes());
            let fields: [(usize, &[u8]); 3] = [(0, &value), (4, &mask), (8, &[u8::from(is.not)])];
            Some((Extension::CONNMARK_MATCH, Some(structure(size::MARK_MATCH, &fields))))
        }
        Match::Source(_)
        | Match::Destination(_)
        | Match::InInterface(_)
        | Match::OutInterface(_)
        | Match::Protocol(_)
        | Match::SourcePort(_)
        | Match::DestinationPort(_)
        | Match::TcpFlags(_)
        | Match::Mark(_) => None,
    }
}

fn conntrack(Tracked { state, direction }: Tracked) -> Vec<u8> {
    let bits = state_bits(state);
    let (flags, inverted) = match direction {
        None => (CONNTRACK_STATE, 0),
        Some(Direction::Original) => (CONNTRACK_STATE | CONNTRACK_DIRECTION, 0),
        Some(Direction::Reply) => (CONNTRACK_STATE | CONNTRACK_DIRECTION, CONNTRACK_DIRECTION),
    };
    let flags = [flags.to_ne_bytes(), inverted.to_ne_bytes()].concat();
    let states = u16::try_from(bits).unwrap_or_default().to_ne_bytes();
    structure(size::CONNTRACK, &[(CONNTRACK_FLAGS, &flags), (CONNTRACK_STATES, &states)])
}

fn owner(which: u8, is: &Equality<u32>) -> Vec<u8> {
    let range = [is.value.to_ne_bytes(); 2].concat();
    let at = if which == OWNER_UID { 0 } else { 8 };
    structure(size::OWNER, &[(at, &range), (16, &[which, if is.not { which } else { 0 }])])
}

fn multiport(is: &Equality<Vec<PortRange>>) -> Option<Vec<u8>> {
    let (mut ports, mut flags) = (Vec::new(), Vec::new());
    for range in &is.value {
        ports.extend(range.first().to_ne_bytes());
        let is_range = range.first() != range.last();
        flags.push(u8::from(is_range));
        if is_range {
            ports.extend(range.last().to_ne_bytes());
            flags.push(0);
        }
    }
    let count = u8::try_from(flags.len()).ok().filter(|_| flags.len() <= MULTIPORT_ROOM)?;
    let (head, not) = ([MULTIPORT_DESTINATION, count], [u8::from(is.not)]);
    Some(structure(size::MULTIPORT, &[(0, &head), (2, &ports), (32, &flags), (47, &not)]))
}

/// The extension that a target needs, if it is not a verdict, and its structure.
pub(crate) fn of_target(target: &Target, family: Family) -> Option<(Extension, Vec<u8>)> {
    Some(match target {
        Target::Accept | Target::Drop | Target::Return | Target::Jump(_) => return None,
        Target::Redirect(port) => {
            let ports = [port.number().to_be_bytes(); 2].concat();
            let (ranges, flags) = (1_u32.to_ne_bytes(), super::abi::PORTS_GIVEN.to_ne_bytes());
            let info = match family {
                // One range of a `nf_nat_ipv4_multi_range_compat`: flags, two addresses, two ports.
                Family::V4 => structure(size::REDIRECT_V4, &[(0, &ranges), (4, &flags), (16, &ports)]),
                Family::V6 => structure(size::REDIRECT_V6, &[(0, &flags), (36, &ports)]),
            };
            (Extension::REDIRECT, info)
        }
        Target::Tproxy { port, mark } => {
            let (value, port) = (mark.value().to_ne_bytes(), port.number().to_be_bytes());
            (Extension::TPROXY, structure(size::TPROXY, &[(0, &ALL_BITS), (4, &value), (24, &port)]))
        }
        Target::SetMark(mark) => {
            (Extension::MARK, structure(size::MARK, &[(0, &mark.value().to_ne_bytes()), (4, &ALL_BITS)]))
        }
        Target::SaveMark => (Extension::CONNMARK, connmark([0; 4], ALL_BITS, SAVE_MARK)),
        Target::RestoreMark => (Extension::CONNMARK, connmark([0; 4], ALL_BITS, RESTORE_MARK)),
        Target::SetConnMark(mark) => {
            let (value, mask) = (mark.value().to_ne_bytes(), mark.mask().to_ne_bytes());
            (Extension::CONNMARK, connmark(value, mask, SET_MARK))
        }
        Target::ConntrackZone(zone) => (Extension::CT, structure(size::CT, &[(2, &zone.to_ne_bytes())])),
    })
}

/// The connection's mark and its bits, all bits of the packet's, no shift.
fn connmark(mark: [u8; 4], bits: [u8; 4], mode: u8) -> Vec<u8> {
    structure(size::CONNMARK, &[(0, &mark), (4, &bits), (8, &ALL_BITS), (14, &[mode])])
}

/// Which ports a multiport match checks (`enum xt_multiport_flags`), and for what.
pub(crate) fn multiport_ports(info: &[u8]) -> Option<(u8, Equality<Vec<PortRange>>)> {
    let [direction, count] = read_array(info, 0)?;
    let count = usize::from(count);
    if count > MULTIPORT_ROOM {
        return None;
    }
    let ports = info.get(2..32)?.chunks_exact(2).filter_map(|port| read_u16(port, 0));
    let mut entries = ports.zip(info.get(32..47)?).take(count);
    let mut value = Vec::new();
    while let Some((first, is_range)) = entries.next() {
        let last = if *is_range == 0 { first } else { entries.next()?.0 };
        value.push(PortRange::new(first, last)?);
    }
    let [not] = read_array(info, 47)?;
    Some((direction, Equality { value, not: not != 0 }))
}

/// What a conntrack match asks.
pub(crate) struct ConntrackInfo {
    /// Which questions (`XT_CONNTRACK_*`).
    pub(crate) flags: u16,
    /// Which of them are inverted.
    pub(crate) inverted: u16,
    /// The states.
    pub(crate) states: u32,
}

impl ConntrackInfo {
    /// Reads it, of revision 1 to 3.
    pub(crate) fn read(revision: u32, info: &[u8]) -> Option<Self> {
        let states = match revision {
            1 => u16::from(*info.get(CONNTRACK_STATES)?),
            _ => read_u16(info, CONNTRACK_STATES)?,
        };
        Some(Self {
            flags: read_u16(info, CONNTRACK_FLAGS)?,
            inverted: read_u16(info, CONNTRACK_FLAGS.checked_add(2)?)?,
            states: u32::from(states),
        })
    }
}

/// The bits of a state of connections.
pub(crate) const fn state_bits(state: ConnState) -> u32 {
    match state {
        ConnState::Invalid => StateBits::INVALID,
        ConnState::RelatedOrEstablished => StateBits::RELATED | StateBits::ESTABLISHED,
    }
}

/// The state of connections that these bits stand for.
pub(crate) fn conn_state(bits: u32) -> Option<ConnState> {
    let known = [ConnState::Invalid, ConnState::RelatedOrEstablished];
    known.into_iter().find(|state| state_bits(*state) == bits)
}

/// Ports and flags of older versions of iptables-nft.
pub(crate) fn tcp(info: &[u8]) -> Option<Vec<Match>> {
    let [option, mask, set, inverted] = read_array(info, 8)?;
    (option == 0).then_some(())?;
    let mut found = ports(info, inverted & !TCP_INVERTED_FLAGS)?;
    let not = inverted & TCP_INVERTED_FLAGS != 0;
    if mask != 0 || set != 0 || not {
        found.push(Match::TcpFlags(Equality { value: TcpFlags::new(mask, set)?, not }));
    }
    Some(found)
}

/// Ports of older versions of iptables-nft. Without ports it is a bare `-m tcp`, which matches everything.
pub(crate) fn ports(info: &[u8], inverted: u8) -> Option<Vec<Match>> {
    let range =
        |offset| PortRange::new(read_u16(info, offset)?, read_u16(info, usize::checked_add(offset, 2)?)?);
    let (source, destination) = (range(0)?, range(4)?);
    if inverted & !3 != 0 {
        return None;
    }
    let said = |range: PortRange, bit: u8| {
        let not = inverted & bit != 0;
        (not || range.first() != 0 || range.last() != u16::MAX).then_some(Equality { value: range, not })
    };
    let ports = [said(source, 1).map(Match::SourcePort), said(destination, 2).map(Match::DestinationPort)];
    Some(ports.into_iter().flatten().collect())
}

pub(crate) fn read_u32(bytes: &[u8], offset: usize) -> Option<u32> {
    read_array(bytes, offset).map(u32::from_ne_bytes)
}

pub(crate) fn read_u16(bytes: &[u8], offset: usize) -> Option<u16> {
    read_array(bytes, offset).map(u16::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::{super::decode, *};
    use redirect_core::values::{Mark, MaskedMark, Port, PortSyntax};

    fn info(condition: &Match) -> Option<Vec<u8>> {
        of_match(condition)?.1
    }

    /// As iptables-nft 1.8.9 on x86-64 sends them.
    #[test]
    #[cfg(target_endian = "little")]
    fn structures_are_those_of_iptables() {
        let guard = MaskedMark::new(0x53b0_0000, 0xfff0_0000).unwrap();
        let ports = ["53", "15008", "100:200"].map(|port| PortRange::parse(port, PortSyntax::Saved).unwrap());
        for (condition, start) in [
            (Match::OwnerUid(Equality::equals(1337)), "3905000039050000000000000000000001000000"),
            (Match::OwnerGid(Equality::not_equals(1337)), "00000000000000003905000039050000020200"),
            (Match::DestinationPorts(Equality::not_equals(ports.into())), "01043500a03a6400c800000000"),
            (Match::ConnMark(Equality::equals(Mark::new(0x539).unwrap().into())), "39050000ffffffff00"),
            (Match::ConnMark(Equality::equals(guard)), "0000b0530000f0ff0000000000000000"),
        ] {
            assert_eq!(hex(&info(&condition).unwrap(), start.len()), start, "{condition:?}");
        }
        let replies = |direction| {
            let tracked = Tracked { state: ConnState::RelatedOrEstablished, direction };
            hex(&info(&Match::Tracked(tracked)).unwrap(), 168 * 2).split_off(CONNTRACK_FLAGS * 2)
        };
        for (direction, start) in [
            (None, "010000000600"),
            (Some(Direction::Original), "011000000600"),
            (Some(Direction::Reply), "011000100600"),
        ] {
            assert!(replies(direction).starts_with(start), "{direction:?}: {}", replies(direction));
        }
        let tproxy = Target::Tproxy { port: Port::new(15006).unwrap(), mark: Mark::new(0x539).unwrap() };
        for (target, family, start) in [
            (
                Target::Redirect(Port::new(15001).unwrap()),
                Family::V4,
                "010000000200000000000000000000003a993a9900",
            ),
            (Target::SetConnMark(guard), Family::V4, "0000b0530000f0ffffffffff00000000"),
            (Target::SaveMark, Family::V6, "00000000ffffffffffffffff00000100"),
            (Target::RestoreMark, Family::V4, "00000000ffffffffffffffff00000200"),
            (Target::ConntrackZone(2), Family::V4, "0000020000000000"),
            (tproxy, Family::V4, "ffffffff39050000000000000000000000000000000000003a9e0000"),
            (Target::SetMark(Mark::new(0x539).unwrap()), Family::V6, "39050000ffffffff"),
        ] {
            assert_eq!(hex(&of_target(&target, family).unwrap().1, start.len()), start, "{target:?}");
        }
    }

    fn hex(bytes: &[u8], digits: usize) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()[..digits].into()
    }

    #[test]
    fn older_structures_are_read() {
        let mut info = [0; 16];
        info[2..4].fill(0xff);
        info[4..8].copy_from_slice(&[80_u16.to_ne_bytes(), 90_u16.to_ne_bytes()].concat());
        let range = PortRange::new(80, 90).unwrap();
        assert_eq!(tcp(&info), Some([Match::DestinationPort(Equality::equals(range))].into()));
        info[11] = 2;
        assert_eq!(tcp(&info), Some([Match::DestinationPort(Equality::not_equals(range))].into()));
        info[9..11].copy_from_slice(&[0x17, 0x02]);
        let flags = |not| Match::TcpFlags(Equality { value: TcpFlags::OPENING, not });
        let port = Match::DestinationPort(Equality::not_equals(range));
        assert_eq!(tcp(&info), Some([port.clone(), flags(false)].into()));
        info[11] |= 4;
        assert_eq!(tcp(&info), Some([port, flags(true)].into()));
        info[8] = 1;
        assert_eq!(tcp(&info), None, "an option is compared");
        // Up to the last port, from the first, and any.
        for (first, last, told) in [(80_u16, u16::MAX, true), (0, 90, true), (0, u16::MAX, false)] {
            let mut ports = [0; 16];
            ports[2..4].fill(0xff);
            ports[4..8].copy_from_slice(&[first.to_ne_bytes(), last.to_ne_bytes()].concat());
            let range = Match::DestinationPort(Equality::equals(PortRange::new(first, last).unwrap()));
            assert_eq!(tcp(&ports), Some(told.then_some(range).into_iter().collect()));
        }
        // A flag that is to be set and is not checked, and flags that are not none.
        for (set, inverted) in [(2, 0), (0, 8), (2, 8)] {
            let mut flags = [0; 16];
            (flags[10], flags[11]) = (set, inverted);
            assert_eq!(tcp(&flags), None, "{set} {inverted}");
        }
    }

    #[test]
    fn a_list_of_ports_is_as_long_as_its_structure_has_room() {
        let ranges = |ports: u16| (1..=ports).map(PortRange::single).collect::<Vec<_>>();
        let list = |ports: u16| Match::DestinationPorts(Equality::equals(ranges(ports)));
        let mut full = info(&list(15)).unwrap();
        assert_eq!(multiport_ports(&full), Some((MULTIPORT_DESTINATION, Equality::equals(ranges(15)))));
        assert_eq!(info(&list(16)), None);
        full[1] = 16;
        assert_eq!(multiport_ports(&full), None, "it claims more than fits");
    }

    #[test]
    fn a_redirection_that_no_plan_makes_is_somebody_elses() {
        let redirect = |count: u32, flags: u32, first: u16, last: u16| {
            let mut info = [0; 24];
            info[0..4].copy_from_slice(&count.to_ne_bytes());
            info[4..8].copy_from_slice(&flags.to_ne_bytes());
            info[16..18].copy_from_slice(&first.to_be_bytes());
            info[18..20].copy_from_slice(&last.to_be_bytes());
            decode::targeted("REDIRECT", 0, &info)
        };
        assert_eq!(redirect(1, 2, 15001, 15001), Some(Target::Redirect(Port::new(15001).unwrap())));
        assert_eq!(redirect(1, 2, 15001, 15002), None, "one port of several");
        assert_eq!(redirect(1, 2 | 4, 15001, 15001), None, "chosen at random");
        assert_eq!(redirect(2, 2, 15001, 15001), None, "more than one range");
    }
}
