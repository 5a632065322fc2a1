//! Matches and targets of x_tables, of which plans have some.

use super::{
    super::{
        abi::PORTS_GIVEN,
        wire::read_array,
        xt::{
            self, CONNTRACK_DIRECTION, ConntrackInfo, MULTIPORT_DESTINATION, OWNER_GID, OWNER_UID,
            RESTORE_MARK, SAVE_MARK, SET_MARK, WRITTEN_AS_STATE,
        },
    },
    LOCAL_TYPE,
};
use crate::ruleset::{
    Condition, CopiedMark, Endpoint, Selector, StateBits, Statement, marked, owned_by, target_named,
};
use redirect_core::rule::{Equality, Match};

/// `XT_CT_NOTRACK`.
const XT_NOTRACK: u8 = 1;
/// `XT_CONNTRACK_STATE_SNAT`, `XT_CONNTRACK_STATE_DNAT`.
const XT_SOURCE_TRANSLATED: u32 = 1 << 6;
const XT_TRANSLATED: u32 = 1 << 7;
/// `XT_CONNTRACK_STATE_UNTRACKED`.
const XT_UNTRACKED: u32 = 1 << 8;
/// `XT_MULTIPORT_SOURCE`.
const MULTIPORT_SOURCE: u8 = 0;

/// `IPSET_INVALID_ID`
const NO_SET: [u8; 2] = [0xff; 2];
/// The set of the type [`LOCAL_TYPE`] alone.
const LOCAL_TYPES: u16 = 1 << LOCAL_TYPE;

/// The conditions an xt match stands for.
pub(crate) fn extension_match(name: &str, revision: u32, info: &[u8]) -> Option<Vec<Condition>> {
    match (name, revision) {
        ("conntrack", 1..=3) => {
            let ConntrackInfo { flags, inverted, states } = ConntrackInfo::read(revision, info)?;
            // These alone, and where revisions have them, those of translated and of untracked connections.
            let known = StateBits::INVALID | StateBits::NEW | StateBits::RELATED | StateBits::ESTABLISHED;
            let others = [
                (XT_SOURCE_TRANSLATED, StateBits::SOURCE_TRANSLATED),
                (XT_TRANSLATED, StateBits::TRANSLATED),
                (XT_UNTRACKED, StateBits::UNTRACKED),
            ];
            let named = others.into_iter().filter(|(bit, _)| states & bit != 0);
            let (bits, named) = named.fold((0, 0), |(bits, all), (bit, own)| (bits | bit, all | own));
            let (rest, states) = (states & !known & !bits, states & known | named);
            let is_translated = states & (StateBits::SOURCE_TRANSLATED | StateBits::TRANSLATED) != 0;
            // The direction is the other one where it is inverted.
            let is_reply = inverted & CONNTRACK_DIRECTION != 0;
            let state = Equality { value: states, not: inverted & 1 != 0 };
            let condition =
                match (flags & !CONNTRACK_DIRECTION & !WRITTEN_AS_STATE, flags & CONNTRACK_DIRECTION != 0) {
                    (1, false) => Condition::State(state),
                    (1, true) if is_translated => return None,
                    (1, true) => Condition::StateAndDirection { states: state, is_reply },
                    (0, true) => Condition::IsReply(is_reply),
                    _ => return None,
                };
            (rest == 0).then(|| [condition].into())
        }
        ("mark" | "connmark", 1) => {
            let (value, mask) = (xt::read_u32(info, 0)?, xt::read_u32(info, 4)?);
            Some([marked(name, mask, Equality { value, not: *info.get(8)? != 0 })].into())
        }
        ("multiport", 1) => match xt::multiport_ports(info)? {
            (MULTIPORT_SOURCE, is) => Some([Condition::SourcePorts(is)].into()),
            (MULTIPORT_DESTINATION, is) => Some([Condition::Plain(Match::DestinationPorts(is))].into()),
            _ => None,
        },
        ("tcp", 0) => xt::tcp(info).map(plain),
        ("udp", 0) => xt::ports(info, *info.get(8)?).map(plain),
        ("owner", 1) => owner(info),
        ("comment", _) => Some(Vec::new()),
        ("addrtype", 0 | 1) => address_type(revision, info),
        _ => None,
    }
}

fn plain(matches: Vec<Match>) -> Vec<Condition> {
    matches.into_iter().map(Condition::Plain).collect()
}

/// Whether a match gives packets the mark of their socket (`XT_SOCKET_RESTORESKMARK`). No other match changes a packet: all
/// others are handed one that they cannot write to.
pub(crate) fn matched_socket_marks(name: &str, info: &[u8]) -> bool {
    const RESTORES_MARK: u8 = 4;
    name == "socket" && info.first().is_some_and(|flags| flags & RESTORES_MARK != 0)
}

/// `xt_owner_match_info`: first and last user, first and last group, what is asked, and what of that is inverted.
fn owner(info: &[u8]) -> Option<Vec<Condition>> {
    let (asked, inverted) = (*info.get(16)?, *info.get(17)?);
    let each = [(OWNER_UID, Selector::User, 0), (OWNER_GID, Selector::Group, 8)];
    if asked & !(OWNER_UID | OWNER_GID) != 0 {
        return None;
    }
    let of_one = |(bit, selector, at): (u8, Selector, usize)| {
        let range = (xt::read_u32(info, at)?, xt::read_u32(info, at.checked_add(4)?)?);
        Some(owned_by(selector, range, inverted & bit != 0))
    };
    each.into_iter().filter(|(bit, ..)| asked & bit != 0).map(of_one).collect()
}

/// `xt_addrtype_info` and `xt_addrtype_info_v1`: types of the source and of the destination, and what of that is inverted.
fn address_type(revision: u32, info: &[u8]) -> Option<Vec<Condition>> {
    let types = [(Endpoint::Source, xt::read_u16(info, 0)?), (Endpoint::Destination, xt::read_u16(info, 2)?)];
    let inverted = match revision {
        0 => [xt::read_u32(info, 4)? != 0, xt::read_u32(info, 8)? != 0],
        _ => match xt::read_u32(info, 4)? {
            // Anything beyond limits the question to an interface.
            flags @ 0..=3 => [flags & 1 != 0, flags & 2 != 0],
            _ => return None,
        },
    };
    let asked = types.into_iter().zip(inverted).filter(|((_, types), _)| *types != 0);
    let condition =
        |((value, types), not)| (types == LOCAL_TYPES).then_some(Condition::Local(Equality { value, not }));
    asked.map(condition).collect()
}

/// What CONNMARK does, without shifts.
fn connection_marked(revision: u32, info: &[u8]) -> Option<Statement> {
    let [value, mask, from] = [xt::read_u32(info, 0)?, xt::read_u32(info, 4)?, xt::read_u32(info, 8)?];
    let mode = *info.get(if revision == 1 { 12 } else { 14 })?;
    let is_shifted = revision != 1 && info.get(12..14)? != [0, 0];
    Some(match mode {
        SET_MARK if !is_shifted => Statement::SetConnMark { mask, value },
        RESTORE_MARK if !is_shifted => Statement::RestoreMark(CopiedMark { cleared: from, mask, flip: 0 }),
        RESTORE_MARK => Statement::SetMark(None),
        SAVE_MARK if !is_shifted => Statement::SaveMark(CopiedMark { cleared: mask, mask: from, flip: 0 }),
        _ => Statement::Unknown("-j CONNMARK".to_owned()),
    })
}

/// `xt_tproxy_target_info` and `xt_tproxy_target_info_v1`: bits of the mark and their value, an address of the family or of any, a port.
fn handed_over(revision: u32, info: &[u8]) -> Option<Statement> {
    let mark = (xt::read_u32(info, 0)?, xt::read_u32(info, 4)?);
    let port = info.get(if revision == 0 { 12..14 } else { 24..26 })?;
    let port = Some(u16::from_be_bytes(port.try_into().ok()?)).filter(|port| *port != 0);
    Some(Statement::Tproxy { port, mark: Some(mark), ends: true })
}

/// `nf_nat_ipv4_multi_range_compat` of one range, or of IPv6 the longer `nf_nat_range`: to one port, or to the one that the packet has.
fn redirected(info: &[u8]) -> Option<Statement> {
    let (ranges, flags, ports) = match info.len() {
        xt::size::REDIRECT_V6.. => (1, xt::read_u32(info, 0)?, 36),
        _ => (xt::read_u32(info, 0)?, xt::read_u32(info, 4)?, 16),
    };
    let [a, b, c, d] = read_array(info, ports)?;
    let port = match (flags, u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])) {
        (0, ..) => None,
        (PORTS_GIVEN, first, last) if first == last && first != 0 => Some(first),
        _ => return None,
    };
    (ranges == 1).then_some(Statement::Redirect(port))
}

/// `xt_ct_target_info` and `xt_ct_target_info_v1` that choose a zone and nothing else.
fn zone(info: &[u8]) -> Option<Statement> {
    let (flags, zone) = (xt::read_u16(info, 0)?, xt::read_u16(info, 2)?);
    let rest = info.get(4..60)?.iter().all(|byte| *byte == 0);
    (flags == 0 && rest).then_some(Statement::Zone(zone))
}

/// What an xt target does.
pub(crate) fn extension_target(name: &str, revision: u32, info: &[u8]) -> Option<Statement> {
    match (name, revision) {
        ("CT", 0..=2) if info.first().is_some_and(|flags| flags & XT_NOTRACK != 0) => {
            Some(Statement::Untrack)
        }
        // The mask comes behind the value.
        ("MARK", 2) => Some(Statement::SetMark(xt::read_u32(info, 4).zip(xt::read_u32(info, 0)))),
        ("CONNMARK", 1 | 2) => connection_marked(revision, info),
        // Without a map, packets are kept in a set, which no condition is understood to ask (xt_set).
        ("SET", 0..=2) => Some(Statement::Harmless("-j SET".to_owned())),
        ("SET", 3) if info.get(8..10) == Some(&NO_SET) => Some(Statement::Harmless("-j SET".to_owned())),
        ("TPROXY", 0 | 1) => handed_over(revision, info).or_else(|| target_named(name)),
        ("REDIRECT", 0) => redirected(info).or_else(|| target_named(name)),
        ("CT", 1 | 2) => zone(info).or_else(|| target_named(name)),
        _ => target_named(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_states_are_where_the_revision_has_them() {
        let seen = |revision: u32, states: [u8; 2], flags: u16, inverted: u16| {
            let mut info = [0; 156];
            info[146..148].copy_from_slice(&flags.to_ne_bytes());
            info[148..150].copy_from_slice(&inverted.to_ne_bytes());
            info[150..152].copy_from_slice(&states);
            extension_match("conntrack", revision, &info)
        };
        let state =
            |not: bool| Condition::State(Equality { value: StateBits::INVALID | StateBits::NEW, not });
        let states = u8::try_from(StateBits::INVALID | StateBits::NEW).unwrap();
        let wide = u16::from(states).to_ne_bytes();
        assert_eq!(seen(1, [states, 0xff], 1, 0), Some([state(false)].into()));
        for revision in [2, 3] {
            assert_eq!(seen(revision, wide, 1, 0), Some([state(false)].into()));
            assert_eq!(seen(revision, wide, 1, 1), Some([state(true)].into()));
        }
        assert_eq!(seen(3, wide, 1 | 2, 0), None, "the protocol is compared, too");
        let translated = StateBits::SOURCE_TRANSLATED | StateBits::TRANSLATED;
        let translated = Condition::State(Equality { value: translated, not: false });
        assert_eq!(seen(3, 0xc0_u16.to_ne_bytes(), 1, 0), Some([translated].into()));
        assert_eq!(seen(3, 0x40_u16.to_ne_bytes(), 1 | CONNTRACK_DIRECTION, 0), None, "of one direction");
        let untracked = Condition::State(Equality { value: StateBits::UNTRACKED, not: true });
        assert_eq!(seen(3, 0x100_u16.to_ne_bytes(), 1, 1), Some([untracked].into()));
        for (inverted, is_reply) in [(0, false), (CONNTRACK_DIRECTION, true)] {
            let direction = Condition::IsReply(is_reply);
            assert_eq!(seen(3, wide, CONNTRACK_DIRECTION, inverted), Some([direction].into()));
            let states = Equality { value: StateBits::INVALID | StateBits::NEW, not: false };
            let both = Condition::StateAndDirection { states, is_reply };
            assert_eq!(seen(3, wide, 1 | CONNTRACK_DIRECTION, inverted), Some([both].into()));
        }
    }
    /// The info of an extension: numbers of 32 bits, one after the other.
    fn words(numbers: &[u32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
    }

    #[test]
    fn types_of_addresses_are_asked_of_either_end() {
        let local = |value, not| Condition::Local(Equality { value, not });
        let seen = |revision: u32, source: u16, destination: u16, rest: &[u32]| {
            let types = [source.to_ne_bytes(), destination.to_ne_bytes()].concat();
            extension_match("addrtype", revision, &[types, words(rest)].concat())
        };
        let (from, to) = (|not| local(Endpoint::Source, not), |not| local(Endpoint::Destination, not));
        assert_eq!(seen(0, LOCAL_TYPES, 0, &[0, 0]), Some([from(false)].into()));
        assert_eq!(seen(0, LOCAL_TYPES, 0, &[1, 0]), Some([from(true)].into()));
        assert_eq!(seen(0, LOCAL_TYPES, LOCAL_TYPES, &[0, 1]), Some([from(false), to(true)].into()));
        assert_eq!(seen(0, LOCAL_TYPES | 1, 0, &[0, 0]), None, "one of two types");
        for (flags, source, destination) in
            [(0, false, false), (1, true, false), (2, false, true), (3, true, true)]
        {
            let both = Some([from(source), to(destination)].into());
            assert_eq!(seen(1, LOCAL_TYPES, LOCAL_TYPES, &[flags]), both);
            assert_eq!(seen(1, 0, LOCAL_TYPES, &[flags]), Some([to(destination)].into()));
        }
        assert_eq!(seen(1, LOCAL_TYPES, 0, &[4]), None, "of the interface it came in by");
    }

    #[test]
    fn owners_marks_and_source_ports_are_seen() {
        let owner = |asked: u8, inverted: u8| {
            let info = [words(&[1000, 1000, 7, 9]), [asked, inverted].into()].concat();
            let seen = extension_match("owner", 1, &info)?;
            Some(seen.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
        };
        for (asked, inverted, text) in [
            (1, 0, "-m owner --uid-owner 1000"),
            (1, 1, "-m owner ! --uid-owner 1000"),
            (2, 1, "meta skgid { 7-9 }"),
            (2, 2, "meta skgid != { 7-9 }"),
            (3, 2, "-m owner --uid-owner 1000 meta skgid != { 7-9 }"),
        ] {
            assert_eq!(owner(asked, inverted).as_deref(), Some(text));
        }
        assert_eq!(owner(4, 0), None, "whether a socket exists");
        for not in [false, true] {
            let info = [words(&[5, 7]), [u8::from(not), 0, 0, 0].into()].concat();
            let is = Equality { value: 5, not };
            assert_eq!(
                extension_match("mark", 1, &info),
                Some([Condition::MarkBits { mask: 7, is: is.clone() }].into())
            );
            let connection = Condition::ConnMarkBits { mask: 7, is };
            assert_eq!(extension_match("connmark", 1, &info), Some([connection].into()));
        }
        let ports = |direction: u8| {
            let mut info = [0; 48];
            (info[0], info[1]) = (direction, 1);
            info[2..4].copy_from_slice(&80_u16.to_ne_bytes());
            let seen = extension_match("multiport", 1, &info)?;
            seen.first().map(ToString::to_string)
        };
        assert_eq!(ports(0).as_deref(), Some("-m multiport --sports 80"));
        assert_eq!(ports(1).as_deref(), Some("-m multiport --dports 80"));
        assert_eq!(ports(2), None, "of either end");
    }

    #[test]
    fn marks_of_connections_are_set_saved_and_restored() {
        const ALL: u32 = u32::MAX;
        let unknown = || Statement::Unknown("-j CONNMARK".to_owned());
        let first = |mode: u8, words_of: [u32; 3]| {
            extension_target("CONNMARK", 1, &[words(&words_of), [mode, 0, 0, 0].into()].concat())
        };
        let second = |mode: u8, words_of: [u32; 3], shift: [u8; 2]| {
            let rest = [shift[0], shift[1], mode, 0].into();
            extension_target("CONNMARK", 2, &[words(&words_of), rest].concat())
        };
        let set = Some(Statement::SetConnMark { mask: 0xff, value: 7 });
        assert_eq!((first(0, [7, 0xff, ALL]), second(0, [7, 0xff, ALL], [0, 0])), (set.clone(), set));
        assert_eq!(second(0, [7, 0xff, ALL], [1, 0]), Some(unknown()), "shifted to the other side");
        assert_eq!(second(0, [7, 0xff, ALL], [0, 3]), Some(unknown()), "shifted by three");
        let saved = |ct: u32, nf: u32| Statement::SaveMark(CopiedMark { cleared: ct, mask: nf, flip: 0 });
        let restored =
            |ct: u32, nf: u32| Statement::RestoreMark(CopiedMark { cleared: nf, mask: ct, flip: 0 });
        type Part<'a> = &'a dyn Fn(u32, u32) -> Statement;
        let modes: [(u8, Statement, Part<'_>, Statement); 2] = [
            (1, Statement::SaveMark(CopiedMark::WHOLE), &saved, unknown()),
            (2, Statement::RestoreMark(CopiedMark::WHOLE), &restored, Statement::SetMark(None)),
        ];
        for (mode, whole, part, shifted) in modes {
            assert_eq!(first(mode, [0, ALL, ALL]), Some(whole.clone()));
            assert_eq!(second(mode, [0, ALL, ALL], [0, 0]), Some(whole));
            for (ct, nf) in [(0xff, ALL), (ALL, 0xff)] {
                assert_eq!(first(mode, [0, ct, nf]), Some(part(ct, nf)));
                assert_eq!(second(mode, [0, ct, nf], [0, 0]), Some(part(ct, nf)));
            }
            assert_eq!(second(mode, [0, ALL, ALL], [0, 1]), Some(shifted));
        }
    }

    #[test]
    fn a_proxy_is_handed_packets_by_its_port() {
        let first = [words(&[0xff, 1, 0]), 15006_u16.to_be_bytes().into(), [0, 0].into()].concat();
        let second =
            |port: u16| [words(&[0xff, 1, 0, 0, 0, 0]), port.to_be_bytes().into(), [0, 0].into()].concat();
        let to = |port| Some(Statement::Tproxy { port, mark: Some((0xff, 1)), ends: true });
        assert_eq!(extension_target("TPROXY", 0, &first), to(Some(15006)));
        assert_eq!(extension_target("TPROXY", 1, &second(15001)), to(Some(15001)));
        assert_eq!(extension_target("TPROXY", 1, &second(0)), to(None), "the port the packet goes to");
        // Too short, or of an unknown revision.
        let some = Statement::Tproxy { port: None, mark: None, ends: true };
        for (revision, info) in [(1, &first[..]), (0, &first[..8]), (2, &second(15001)[..])] {
            assert_eq!(extension_target("TPROXY", revision, info), Some(some.clone()), "{revision}");
        }
    }

    #[test]
    fn a_set_of_ipset_may_give_packets_its_marks() {
        let sets = |map: [u8; 2]| [[0; 8].as_slice(), &map, &[0; 38]].concat();
        assert_eq!(extension_target("SET", 3, &sets([0, 0])), Some(Statement::SetMark(None)));
        assert_eq!(extension_target("SET", 4, &sets(NO_SET)), Some(Statement::SetMark(None)));
        for (revision, info) in [(3, sets(NO_SET)), (2, sets([0, 0]))] {
            assert!(
                extension_target("SET", revision, &info).is_some_and(|one| one.leaves_all()),
                "{revision}"
            );
        }
    }

    #[test]
    fn connection_tracking_is_left_out_or_divided() {
        let info = |flags: u16, zone: u16| {
            let mut info = [0; 64];
            info[0..2].copy_from_slice(&flags.to_ne_bytes());
            info[2..4].copy_from_slice(&zone.to_ne_bytes());
            info
        };
        for revision in [0, 1, 2] {
            let seen = extension_target("CT", revision, &info(u16::from(XT_NOTRACK), 0));
            assert_eq!(seen, Some(Statement::Untrack));
        }
        assert_eq!(extension_target("CT", 2, &info(0, 2)), Some(Statement::Zone(2)));
        assert_eq!(extension_target("CT", 2, &info(8, 2)), target_named("CT"), "of one direction");
        let set = Some(Statement::SetMark(Some((0xff, 5))));
        assert_eq!(extension_target("MARK", 2, &words(&[5, 0xff])), set);
    }
}
