//! A rule as iptables-nft encodes it: its own tools read it back as the rule it is.

use crate::expressions::{
    abi::{base, meta, verdict},
    expression::{DESTINATION_PORT, Expressions, SOURCE_PORT},
    xt,
};
use crate::ruleset::Endpoint;
use ipnet::IpNet;
use redirect_core::{
    rule::{Chain, Equality, Match, Rule, Target},
    values::{Family, InterfaceName, PortRange},
};

/// Of places of conditions: ports are written together.
const PLACE_OF_PORTS: usize = 6;
const LAST_PLACE: usize = 7;

/// Writes a rule's expressions: conditions in the order of iptables, the counter, the target.
pub(super) fn rule(out: &mut Expressions<'_>, rule: &Rule, family: Family) -> Result<(), &'static str> {
    for at in 0..=LAST_PLACE {
        if at == PLACE_OF_PORTS {
            ports(out, rule)?;
        } else {
            let mut here = rule.matches.iter().filter(|one| place(one) == at);
            here.try_for_each(|one| condition(out, one, family))?;
        }
    }
    out.counter();
    target(out, &rule.target, family);
    Ok(())
}

/// Where iptables-nft writes a condition: before those of higher places.
const fn place(condition: &Match) -> usize {
    match condition {
        Match::InInterface(_) => 0,
        Match::OutInterface(_) => 1,
        Match::Protocol(_) => 2,
        Match::Source(_) => 3,
        Match::Destination(_) => 4,
        Match::TcpFlags(_) => 5,
        Match::SourcePort(_) | Match::DestinationPort(_) => PLACE_OF_PORTS,
        Match::DestinationPorts(_)
        | Match::Tracked(_)
        | Match::OwnerUid(_)
        | Match::OwnerGid(_)
        | Match::Mark(_)
        | Match::ConnMark(_) => LAST_PLACE,
    }
}

fn condition(out: &mut Expressions<'_>, condition: &Match, family: Family) -> Result<(), &'static str> {
    // A whole name is compared with the NUL that ends it.
    let with_nul = |is: &Equality<InterfaceName>| is.value.name().len().saturating_add(1);
    match condition {
        Match::Source(is) => address(out, Endpoint::Source, is, family)?,
        Match::Destination(is) => address(out, Endpoint::Destination, is, family)?,
        Match::InInterface(is) => out.interface(meta::IN_INTERFACE, is, with_nul(is)),
        Match::OutInterface(is) => out.interface(meta::OUT_INTERFACE, is, with_nul(is)),
        Match::Protocol(protocol) => out.protocol(protocol.number()),
        Match::Mark(is) => out.mark(is),
        Match::TcpFlags(is) => out.flags(is),
        Match::SourcePort(_)
        | Match::DestinationPort(_)
        | Match::DestinationPorts(_)
        | Match::Tracked(_)
        | Match::OwnerUid(_)
        | Match::OwnerGid(_)
        | Match::ConnMark(_) => {
            if let Some((extension, info)) = xt::of_match(condition) {
                out.xt(extension, &info.ok_or("it lists more ports than the 15 a multiport match has room for; a range counts as two")?);
            }
        }
    }
    Ok(())
}

fn address(
    out: &mut Expressions<'_>,
    end: Endpoint,
    is: &Equality<IpNet>,
    family: Family,
) -> Result<(), &'static str> {
    if !is.not && is.value.prefix_len() == 0 {
        return Ok(());
    }
    if Family::of(&is.value.addr()) != family {
        return Err("it names an address of the other family");
    }
    out.address(end, is);
    Ok(())
}

/// Source and destination ports: two single ones are compared at once.
fn ports(out: &mut Expressions<'_>, rule: &Rule) -> Result<(), &'static str> {
    let all = || rule.matches.iter().filter_map(port);
    if rule.protocol().is_none() && rule.matches.iter().any(Match::is_of_protocol) {
        return Err("it compares ports or flags, but names no protocol");
    }
    let mut pair = all();
    if let (Some((SOURCE_PORT, source)), Some((DESTINATION_PORT, destination)), None) =
        (pair.next(), pair.next(), pair.next())
        && let (Some([a, b]), Some([c, d])) = (single(source), single(destination))
    {
        out.payload(base::TRANSPORT, SOURCE_PORT, 4);
        out.is(false, &[a, b, c, d]);
        return Ok(());
    }
    for (offset, is) in all() {
        out.payload(base::TRANSPORT, offset, 2);
        out.ports(is.not, is.value);
    }
    Ok(())
}

/// A comparison of ports, and their position.
const fn port(condition: &Match) -> Option<(u32, &Equality<PortRange>)> {
    if let Match::SourcePort(is) = condition {
        Some((SOURCE_PORT, is))
    } else if let Match::DestinationPort(is) = condition {
        Some((DESTINATION_PORT, is))
    } else {
        None
    }
}

fn single(is: &Equality<PortRange>) -> Option<[u8; 2]> {
    let port = is.value.first();
    (!is.not && port != 0 && port == is.value.last()).then(|| port.to_be_bytes())
}

fn target(out: &mut Expressions<'_>, target: &Target, family: Family) {
    if let Some((extension, info)) = xt::of_target(target, family) {
        out.xt(extension, &info);
        return;
    }
    match target {
        Target::Accept => out.verdict(verdict::ACCEPT),
        Target::Drop => out.verdict(verdict::DROP),
        Target::Return => out.verdict(verdict::RETURN),
        Target::Jump(chain) => out.jump(Chain::name(chain)),
        Target::Redirect(_)
        | Target::Tproxy { .. }
        | Target::SetMark(_)
        | Target::SaveMark
        | Target::RestoreMark
        | Target::SetConnMark(_)
        | Target::ConntrackZone(_) => {}
    }
}
