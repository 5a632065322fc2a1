//! Routing as the kernel has it, read and told as `ip` tells it. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::run;
use netfilter_state::route_tables::{RouteKind, RouteTables};
use netns_apply::{ApplyOptions, Live, netns::DisposableThread, routes::RouteSocket};
use redirect_core::{Family, rule::Hook};
use std::{
    collections::BTreeSet,
    io::ErrorKind,
    net::{IpAddr, TcpStream},
};
use test_support::netns::{Families, Namespace};
use test_support::process::{SHORT, until};

fn pod() -> Namespace {
    Namespace::pod(Families::Dual).unwrap()
}

/// What is read after `ip` has done this.
fn after(batches: [&str; 2]) -> (RouteTables, String) {
    pod()
        .enter(|| {
            run("ip", &["-batch", "-"], batches[0]);
            run("ip", &["-6", "-batch", "-"], batches[1]);
            let told = [["-4", "rule"], ["-6", "rule"]].map(|words| run("ip", &words, "")).concat();
            (RouteSocket::open(usize::MAX).unwrap().tables().unwrap(), told)
        })
        .unwrap()
}

fn routes(tables: &RouteTables) -> Vec<String> {
    tables.routes.iter().map(ToString::to_string).collect()
}

#[test]
fn policy_rules_are_told_as_ip_tells_them() {
    let v4 = "rule add pref 5 not from 10.0.0.0/8 to 192.0.2.0/24 fwmark 0x539/0xff iif eth0 oif pe0 uidrange 0-10 ipproto tcp sport 1-2 dport 80 lookup 133 suppress_prefixlength 0
rule add pref 6 blackhole
rule add pref 7 fwmark 0/0xff unreachable
rule add pref 8 ipproto udp prohibit
rule add pref 9 goto 32766
rule add pref 10 nop
rule add pref 12 from 10.1.0.2 lookup local
rule add pref 13 fwmark 0x7 ipproto udp lookup 70000
rule del pref 0
rule add pref 40 lookup local
";
    let v6 = "rule add pref 5 from fd00::/8 dport 1-9 lookup 77
rule del pref 32766
";
    let (tables, told) = after([v4, v6]);
    let rules: Vec<String> = tables.rules.iter().map(ToString::to_string).collect();
    let wanted: Vec<String> =
        told.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(rules, wanted);
    assert!(tables.complete && rules.len() > 10);
}

#[test]
fn conditions_that_are_not_modelled_are_named() {
    let v4 = "rule add pref 5 tos 0x10 lookup 7
rule add pref 6 l3mdev
rule add pref 7 suppress_ifgroup 3 lookup 5
rule add pref 8 tun_id 5 lookup 5
";
    let (tables, _) = after([v4, ""]);
    let unknown: Vec<_> = tables.rules.iter().filter(|rule| !rule.unknown.is_empty()).collect();
    let told: Vec<String> = unknown.iter().map(|rule| rule.unknown.join(", ")).collect();
    assert_eq!(told, ["tos", "l3mdev", "suppress_ifgroup", "an unknown condition"], "{unknown:?}");
}

#[test]
fn routes_of_all_tables_are_told_as_ip_tells_them() {
    let v4 = "route add default via 10.1.0.1
route add blackhole 192.0.2.0/24 table 133
route add unreachable 198.51.100.0/24 metric 7
route add prohibit 203.0.113.0/24
route add throw 203.0.113.7 table 70000
route add local default dev lo table 133
";
    let v6 = "route add blackhole 2001:db8::/32 metric 5\nroute add local default dev lo table 133\n";
    pod()
        .enter(|| {
            run("ip", &["-batch", "-"], v4);
            run("ip", &["-6", "-batch", "-"], v6);
            // The kernel adds what addresses bring a moment later.
            let told = |flag: &str| -> BTreeSet<String> {
                run("ip", &[flag, "route", "show", "table", "all"], "").lines().map(words_of_route).collect()
            };
            let is_linked = |route: &&String| route.starts_with("local fe80:");
            until("the routes of both link-local addresses, which come last", SHORT, &[], || {
                Ok((told("-6").iter().filter(is_linked).count() == 2).then_some(()))
            })
            .unwrap();
            let tables = RouteSocket::open(usize::MAX).unwrap().tables().unwrap();
            for (family, flag) in [(Family::V4, "-4"), (Family::V6, "-6")] {
                let read = tables.routes.iter().filter(|route| route.family == family);
                let read: BTreeSet<String> = read.map(|route| words_of_route(&route.to_string())).collect();
                assert_eq!(read, told(flag));
                assert!(read.len() > 8, "{read:?}");
            }
            assert!(tables.complete && tables.loopback_is_up);
        })
        .unwrap();
}

/// The words about a route that both tell.
fn words_of_route(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let said =
        |word: &str| words.iter().position(|one| *one == word).and_then(|at| words.get(at + 1)).copied();
    let first =
        words.iter().take_while(|word| !["via", "dev", "table", "metric", "proto", "scope"].contains(*word));
    let first: Vec<&str> = first.copied().collect();
    // `ip` says of no route which is refused that it leaves by lo.
    let device = said("dev").filter(|device| *device != "lo" || first[0] == "local");
    let metric = said("metric").unwrap_or("0");
    format!("{} {device:?} {} {metric}", first.join(" "), said("table").unwrap_or("main"))
}

#[test]
fn a_loopback_interface_that_is_down_shows() {
    let of_tproxy = "route add local default dev lo table 133\n";
    let script = |all: &str| format!("{of_tproxy}{all}");
    let (up, _) = after([&script(""), &script("")]);
    let (down, _) = after([&script("link set lo down\n"), ""]);
    assert!(up.loopback_is_up && !down.loopback_is_up);
    // IPv4 keeps its routes all the same.
    let v4 = |tables: &RouteTables| -> Vec<String> {
        tables.routes.iter().filter(|route| route.family == Family::V4).map(ToString::to_string).collect()
    };
    assert!(v4(&down).contains(&"local 127.0.0.1 dev lo table local".to_owned()), "{down:?}");
    assert!(v4(&down).contains(&"local default dev lo table 133".to_owned()), "{down:?}");
    assert!(routes(&up).contains(&"local ::1 dev lo table local".to_owned()), "{up:?}");
    assert!(!routes(&down).contains(&"local ::1 dev lo table local".to_owned()), "{down:?}");
}

#[test]
fn a_route_that_is_gone_or_refuses_shows() {
    let own = "local 10.1.0.2 dev eth0 table local";
    let (before, _) = after(["", ""]);
    assert!(routes(&before).iter().any(|route| route == own), "{before:?}");
    let refuse = format!("route del {own}\nroute add blackhole 127.0.0.0/9 table local\n");
    let (tables, _) = after([&refuse, ""]);
    assert!(!routes(&tables).iter().any(|route| route == own), "{tables:?}");
    let refusing = tables.routes.iter().find(|route| route.kind == RouteKind::Blackhole).unwrap();
    assert_eq!((refusing.table, refusing.to.to_string().as_str()), (RouteTables::LOCAL, "127.0.0.0/9"));
}

#[test]
fn more_routes_than_are_read_are_said_to_be_more() {
    let many: String = (0..40_000_u32)
        .map(|number| {
            format!(
                "route add blackhole 10.{}.{}.{}/32\n",
                8 + number / 62_500,
                number / 250 % 250,
                number % 250
            )
        })
        .collect();
    pod()
        .enter(|| {
            run("ip", &["-batch", "-"], &many);
            let mut socket = RouteSocket::open(usize::MAX).unwrap();
            let tables = socket.tables().unwrap();
            assert!(!tables.complete && tables.routes.len() > 5_000 && tables.routes.len() < 40_000);
            // The other family is read, and what is asked next is answered.
            assert!(routes(&tables).contains(&"local ::1 dev lo table local".to_owned()));
            assert_eq!(socket.observe().unwrap(), []);
            // What the namespace delivers to itself is read all the same.
            let own = "local 10.1.0.2 dev eth0 table local".to_owned();
            assert_eq!(routes(&tables).iter().filter(|route| **route == own).count(), 1);
            assert!(routes(&socket.tables().unwrap()).contains(&own));
        })
        .unwrap();
}

/// To a new IPv6 address the kernel would route a moment later.
#[test]
fn what_is_for_a_local_route_is_delivered_at_once() {
    let tried = DisposableThread::run(|thread| {
        thread.enter_new().unwrap();
        let mut routes = RouteSocket::open(0).unwrap();
        routes.raise_loopback().unwrap();
        let own = (1..=200).flat_map(|number| [format!("10.96.0.{number}"), format!("fd00:96::{number}")]);
        own.map(|own| {
            let own: IpAddr = own.parse().unwrap();
            routes.add_local_route(own).unwrap();
            (own, TcpStream::connect((own, 443)).unwrap_err().kind())
        })
        .filter(|(_, error)| *error != ErrorKind::ConnectionRefused)
        .collect::<Vec<_>>()
    });
    assert_eq!(tried.unwrap(), []);
}

#[test]
fn filters_of_traffic_control_are_named_and_not_their_room() {
    let live = || Live::now(None, &ApplyOptions::default()).unwrap();
    pod()
        .enter(|| {
            assert_eq!(live().unexamined, Vec::<String>::new());
            run("tc", &["qdisc", "add", "dev", "eth0", "clsact"], "");
            assert_eq!(live().unexamined, Vec::<String>::new());
            let filter = |direction: &str| {
                let words = [
                    "filter", "add", "dev", "eth0", direction, "protocol", "ip", "u32", "match", "ip",
                    "dport", "80", "0xffff", "classid", "1:1",
                ];
                run("tc", &words, "");
            };
            filter("egress");
            assert_eq!(live().unexamined, ["tc filters of eth0, egress (u32)"]);
            filter("ingress");
            assert_eq!(
                live().unexamined,
                ["tc filters of eth0, ingress (u32)", "tc filters of eth0, egress (u32)"]
            );
            assert_eq!(Live::unexamined_here().unwrap(), live().unexamined);
        })
        .unwrap();
}

#[test]
fn a_look_has_the_routing_the_addresses_and_the_order_of_hooks() {
    pod()
        .enter(|| {
            run("nft", &["-f", "-"], "table ip t { chain a { type filter hook input priority 0; }; chain b { type filter hook input priority 0; }; }");
            let live = Live::now(None, &ApplyOptions::default()).unwrap();
            assert_eq!(live.route_tables, RouteSocket::open(usize::MAX).unwrap().tables().unwrap());
            assert!(live.addresses.len() > 2 && live.interfaces.contains(&"eth0".to_owned()), "{live:?}");
            let chains = &live.ruleset.tables.values().next().unwrap().chains;
            assert_eq!(chains.values().map(|chain| chain.handle).collect::<Vec<_>>(), [1, 2]);
            // Not every kernel lists them.
            let lists = live.ruleset.hooks.as_ref().map(|hooks| hooks.on(Family::V4, Hook::Input).len());
            assert!(lists.is_none_or(|length| length >= 2), "{:?}", live.ruleset.hooks);
        })
        .unwrap();
}
