//! A packet in words: who sends it, and where to.

use redirect_core::{AmbientRedirect, Redirect};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use packet_trace::{ConnectionState, Detail, Packet};
use redirect_core::plan::DataPlane;
use redirect_core::{Family, RulePlan};
use serde::{Deserialize, Serialize};

/// A user of the application if unset: not the proxy's, nor root.
const APPLICATION: u32 = 1000;
/// The port that a packet comes from if unset.
const SOURCE_PORT: u16 = 40000;

/// A question about a packet, as text: the flags of `redirectctl trace`, which are fields of the web page. What is empty is not given.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct PacketQuestion {
    /// Who sends it: `app`, `proxy`, `outside`, `UID` or `UID:GID`.
    #[serde(rename = "as")]
    pub sender: String,
    /// Where to: `IP:PORT`, behind it `/udp` or `/tcp`.
    pub to: String,
    /// Where from: `IP` or `IP:PORT`.
    pub from: String,
    /// By which interface.
    pub interface: String,
    /// Its mark.
    pub mark: String,
    /// What connection tracking says of it.
    pub state: String,
    /// Whether rules that are not about it are reported, too.
    pub every: bool,
}

impl PacketQuestion {
    /// Which rules a trace reports.
    #[must_use]
    pub const fn detail(&self) -> Detail {
        if self.every { Detail::Every } else { Detail::Met }
    }
}

/// The words for what connection tracking says.
pub const STATES: &[&str] = &["new", "related", "established", "reply", "invalid"];

/// Makes the packet, for a pod with this plan and these addresses.
///
/// # Errors
/// Everything that is not understood.
pub fn packet(
    said: &PacketQuestion,
    plan: Option<&RulePlan>,
    addresses: &[IpAddr],
) -> Result<Packet, Vec<String>> {
    let mut wrong = Vec::new();
    let to = target(&said.to).map_err(|why| wrong.push(why)).ok();
    let from = given(&said.from).map(source).transpose().map_err(|why| wrong.push(why)).ok().flatten();
    let mark = given(&said.mark).map(number).transpose().map_err(|why| wrong.push(why)).ok().flatten();
    let sender = sender(given(&said.sender).unwrap_or("app"), plan).map_err(|why| wrong.push(why)).ok();
    let (Some((to, is_udp)), Some(sender), true) = (to, sender, wrong.is_empty()) else { return Err(wrong) };
    let family = Family::of(&to.ip());
    let (address, port) = from.unwrap_or((None, None));
    if address.is_some_and(|address| Family::of(&address) != family) {
        return Err(vec!["flags --from and --to: are of two address families".to_owned()]);
    }
    let port = port.unwrap_or(SOURCE_PORT);
    let packet = match sender {
        None => Packet::from_outside(SocketAddr::new(address.unwrap_or(elsewhere(family)), port), to),
        Some((uid, gid)) => {
            let own = addresses.iter().find(|one| Family::of(one) == family && !one.is_loopback());
            let own = if to.ip().is_loopback() { Some(to.ip()) } else { own.copied() };
            Packet::from_pod(
                uid,
                gid,
                SocketAddr::new(address.or(own).unwrap_or(elsewhere(family)), port),
                to,
            )
        }
    };
    let packet = if is_udp { packet.over_udp() } else { packet };
    let mut packet = match given(&said.interface) {
        Some(name) => packet.by(name),
        None => packet,
    };
    let is_ambient = plan.is_some_and(|plan| plan.data_plane() == DataPlane::Ambient);
    let own = if is_ambient && said.sender == "proxy" { AmbientRedirect::ZTUNNEL_MARK.value() } else { 0 };
    packet.mark = mark.unwrap_or(own);
    packet.connection.state = state(&said.state);
    Ok(packet)
}

fn given(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

fn state(word: &str) -> ConnectionState {
    match word {
        "related" => ConnectionState::Related,
        "established" => ConnectionState::Established,
        "reply" => ConnectionState::Reply,
        "invalid" => ConnectionState::Invalid,
        _ => ConnectionState::New,
    }
}

/// An address of the documentation: reserved.
const fn elsewhere(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        Family::V6 => IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    }
}

fn target(text: &str) -> Result<(SocketAddr, bool), String> {
    let (address, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let wrong = || format!("flag --to: {text:?} is not IP:PORT, IP:PORT/udp or [IP]:PORT");
    let is_udp = match protocol {
        "tcp" => false,
        "udp" => true,
        _ => return Err(wrong()),
    };
    address.parse().map(|address| (address, is_udp)).map_err(|_| wrong())
}

fn source(text: &str) -> Result<(Option<IpAddr>, Option<u16>), String> {
    let with_port = text.parse::<SocketAddr>().map(|both| (Some(both.ip()), Some(both.port())));
    let without = || text.parse::<IpAddr>().map(|address| (Some(address), None));
    with_port.or_else(|_| without()).map_err(|_| format!("flag --from: {text:?} is neither IP nor IP:PORT"))
}

fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("flag --mark: {text:?} is not a number such as 1337 or 0x539"))
}

/// The user and group; none for a peer outside.
fn sender(text: &str, plan: Option<&RulePlan>) -> Result<Option<(u32, u32)>, String> {
    let proxies: Vec<u32> = plan.into_iter().flat_map(RulePlan::proxy_users).collect();
    match text {
        "outside" => Ok(None),
        "proxy" => {
            let id = proxies.first().copied().unwrap_or(Redirect::PROXY_ID);
            Ok(Some((id, id)))
        }
        "app" => {
            let id = (APPLICATION..).find(|id| !proxies.contains(id)).unwrap_or(APPLICATION);
            Ok(Some((id, id)))
        }
        ids => {
            let (user, group) = ids.split_once(':').unwrap_or((ids, ids));
            let parsed = user.parse().ok().zip(group.parse().ok());
            parsed.map(Some).ok_or_else(|| {
                format!("flag --as: {text:?} is not one of app, proxy, outside, and no UID or UID:GID")
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use packet_trace::Sender;

    fn made(said: &PacketQuestion) -> Result<Packet, Vec<String>> {
        packet(
            said,
            None,
            &["127.0.0.1".parse().expect("an address"), "10.1.0.2".parse().expect("an address")],
        )
    }

    fn question(sender: &str, to: &str) -> PacketQuestion {
        PacketQuestion { sender: sender.to_owned(), to: to.to_owned(), ..PacketQuestion::default() }
    }

    #[test]
    fn senders_have_names() {
        for (sender, wanted) in [
            ("app", Sender::Local { uid: 1000, gid: 1000 }),
            ("proxy", Sender::Local { uid: 1337, gid: 1337 }),
            ("7:8", Sender::Local { uid: 7, gid: 8 }),
            ("outside", Sender::Outside),
        ] {
            let packet = made(&question(sender, "10.1.0.2:80"));
            assert_eq!(packet.expect("a packet").sender, wanted, "{sender}");
        }
    }

    #[test]
    fn what_ztunnel_sends_has_its_mark_unless_another_is_said() {
        let plan = redirect_core::AmbientRedirect::new(redirect_core::Families::V4).plan();
        let mark = |sender, mark| {
            let said = PacketQuestion { mark: String::from(mark), ..question(sender, "192.0.2.9:80") };
            packet(&said, Some(&plan), &[]).expect("a packet").mark
        };
        assert_eq!([mark("proxy", ""), mark("proxy", "0x7"), mark("app", "")], [0x539, 7, 0]);
    }

    #[test]
    fn a_packet_comes_from_where_it_can() {
        let from = |to| made(&question("", to)).expect("a packet").source.map(|ip| ip.to_string());
        assert_eq!(from("192.0.2.9:53/udp").as_deref(), Some("10.1.0.2"));
        assert_eq!(from("127.0.0.1:80").as_deref(), Some("127.0.0.1"));
        assert_eq!(from("[2001:db8::9]:80").as_deref(), Some("2001:db8::1"));
    }

    #[test]
    fn everything_wrong_is_told_at_once() {
        let wrong =
            made(&PacketQuestion { from: "x".to_owned(), mark: "y".to_owned(), ..question("me", "here") });
        let wrong = wrong.expect_err("nothing is right");
        for flag in ["--to", "--from", "--mark", "--as"] {
            assert!(wrong.iter().any(|one| one.contains(flag)), "{flag}: {wrong:?}");
        }
    }
}
