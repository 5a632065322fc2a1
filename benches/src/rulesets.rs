//! Rules of other programs that cost most to read and to follow.

use std::fmt::Write as _;

/// Which program loads a text.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// `nft -f`.
    Nft,
    /// `iptables-nft-restore`.
    Iptables,
    /// `iptables-legacy-restore`.
    Legacy,
    /// `ip -batch`.
    Routes,
}

/// Rules of another program.
#[derive(Debug)]
pub struct Rules {
    /// In words.
    pub name: &'static str,
    /// What to load, in this order.
    pub texts: Vec<(Place, String)>,
}

/// The number of an address of many.
fn address(number: usize) -> String {
    format!("192.{}.{}.{}", 2 + number / 65_536, number / 256 % 256, number % 256)
}

/// Lines of numbers.
fn lines(count: usize, line: impl Fn(usize) -> String) -> String {
    let mut text = String::new();
    for number in 0..count {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", line(number));
    }
    text
}

/// A text of nft with one table and a base chain in it.
fn chain(hook: &str, priority: i32, before: &str, rules: &str) -> (Place, String) {
    let text = format!(
        "table ip hostile {{\n{before}\nchain c {{\ntype filter hook {hook} priority {priority}; policy accept;\n{rules}\n}}\n}}\n"
    );
    (Place::Nft, text)
}

/// Elements of a set of nft, none beside another: addresses, each with something behind it.
fn elements(count: usize, behind: impl Fn(usize) -> String) -> String {
    let mut text = String::new();
    for number in 0..count {
        let _ =
            write!(text, "{}{}{}", if number == 0 { "" } else { ", " }, address(2 * number), behind(number));
    }
    text
}

/// All of them.
#[must_use]
pub fn all() -> Vec<Rules> {
    let mut all = vec![Rules { name: "none", texts: Vec::new() }];
    all.extend(maps_and_sets());
    all.extend(rules_and_routes());
    all
}

fn one(name: &'static str, text: (Place, String)) -> Rules {
    Rules { name, texts: vec![text] }
}

fn maps_and_sets() -> Vec<Rules> {
    let verdict = |number: usize| if number.is_multiple_of(2) { " : drop" } else { " : accept" }.to_owned();
    let vmap = |count, hook, priority| {
        chain(hook, priority, "", &format!("ip saddr vmap {{ {} }}", elements(count, verdict)))
    };
    let banned = |count| {
        let set = format!(
            "set banned {{\ntype ipv4_addr;\nelements = {{ {} }}\n}}",
            elements(count, |_| String::new())
        );
        chain("input", 0, &set, "ip saddr @banned drop")
    };
    vec![
        one("verdict map of 10,000 addresses, before prerouting", vmap(10_000, "prerouting", -300)),
        one("verdict map of 10,000 addresses, input", vmap(10_000, "input", 0)),
        one("verdict map of 60,000 addresses, before prerouting", vmap(60_000, "prerouting", -300)),
        one("verdict map of 10,000 pairs of address and port", pairs(10_000)),
        one("ban list of 25,000 addresses, input", banned(25_000)),
        one("ban list of 40,000 addresses, input", banned(40_000)),
        one(
            "ban list of 40,000 intervals, input",
            chain(
                "input",
                0,
                &format!(
                    "set banned {{\ntype ipv4_addr; flags interval;\nelements = {{ {} }}\n}}",
                    elements(40_000, |_| String::new())
                ),
                "ip saddr @banned drop",
            ),
        ),
        one("ban list of 400,000 addresses, input", banned(400_000)),
    ]
}

fn rules_and_routes() -> Vec<Rules> {
    vec![
        one("1,000 policy rules by 1,000 routes", (Place::Routes, routes(1_000, 1_000, false))),
        one("1,000 policy rules that take half by 1,000 routes", (Place::Routes, routes(1_000, 1_000, true))),
        one("100,000 rules of iptables-nft", (Place::Iptables, iptables(100_000))),
        one(
            "100,000 rules of nft",
            chain(
                "input",
                0,
                "",
                &lines(100_000, |number| {
                    format!("ip saddr {} tcp dport {} drop", address(number), 1 + number % 60_000)
                }),
            ),
        ),
        one("2,500 rules of iptables-legacy", (Place::Legacy, iptables(2_500))),
        one("100,000 rules of iptables-legacy", (Place::Legacy, iptables(100_000))),
        one(
            "10,000 rules that mark, before prerouting",
            chain(
                "prerouting",
                -300,
                "",
                &lines(10_000, |number| format!("ip saddr {} meta mark set {}", address(number), 1 + number)),
            ),
        ),
        one("jumps, 15 deep, two in each chain", doubling(15)),
        one(
            "10,000 chains",
            chain(
                "input",
                0,
                &lines(10_000, |number| format!("chain c{number} {{ ip saddr {} drop; }}", address(number))),
                "",
            ),
        ),
        one(
            "5,000 sets",
            chain(
                "input",
                0,
                &lines(5_000, |number| {
                    format!("set s{number} {{ type ipv4_addr; elements = {{ {} }}; }}", address(number))
                }),
                "",
            ),
        ),
        one(
            "10,000 addresses",
            (Place::Routes, lines(10_000, |number| format!("addr add {}/32 dev eth0", address(number)))),
        ),
        one("kube-proxy, 100 services by 3 endpoints", (Place::Iptables, kube_proxy(100, 3))),
        one("kube-proxy, 300 services by 3 endpoints", (Place::Iptables, kube_proxy(300, 3))),
    ]
}

/// A map from addresses and ports at once.
fn pairs(count: usize) -> (Place, String) {
    let mut text = String::new();
    for number in 0..count {
        let _ = write!(
            text,
            "{}{} . {} : {}",
            if number == 0 { "" } else { ", " },
            address(number),
            1 + number,
            if number.is_multiple_of(2) { "drop" } else { "accept" }
        );
    }
    chain("prerouting", -300, "", &format!("ip saddr . tcp dport vmap {{ {text} }}"))
}

/// Chains each of which leads twice to the next one.
fn doubling(deep: usize) -> (Place, String) {
    let of = |number: usize| match number {
        0 => "chain d0 { ip saddr 192.0.2.1 drop; }".to_owned(),
        _ => format!("chain d{number} {{ ip saddr 192.0.2.{number} jump d{0}; jump d{0}; }}", number - 1),
    };
    chain("prerouting", -300, &lines(deep, of), &format!("jump d{}", deep - 1))
}

/// Policy rules, all of which lead to one table; they take packets from a few addresses each, or many.
fn routes(rules: usize, routes: usize, are_wide: bool) -> String {
    let from = |number: usize| match are_wide {
        true => format!("ipproto tcp dport {}-60000", 1 + number),
        false => format!("from 10.200.{}.{}", number / 256, number % 256),
    };
    let rules =
        lines(rules, |number| format!("rule add pref {} {} lookup 200", 1_000 + number, from(number)));
    let routes = lines(routes, |number| {
        format!(
            "route add 172.{}.{}.0/24 dev {} table 200",
            16 + number / 256,
            number % 256,
            if number % 2 == 0 { "eth0" } else { "lo" }
        )
    });
    routes + &rules
}

fn iptables(count: usize) -> String {
    let rules = lines(count, |number| {
        format!("-A INPUT -s {} -p tcp --dport {} -j DROP", address(number), 1 + number % 60_000)
    });
    format!("*filter\n:INPUT ACCEPT\n{rules}COMMIT\n")
}

/// What kube-proxy makes of services, each with these endpoints.
fn kube_proxy(services: usize, endpoints: usize) -> String {
    let mut text = String::from("*nat\n:KUBE-SERVICES -\n:KUBE-MARK-MASQ -\n:KUBE-POSTROUTING -\n");
    let (mut rules, mut of_services) = (String::new(), String::new());
    for service in 0..services {
        let ip = format!("10.96.{}.{}", service / 256, service % 256);
        let _ = writeln!(text, ":KUBE-SVC-{service:016} -");
        let _ = writeln!(
            of_services,
            "-A KUBE-SERVICES -d {ip}/32 -p tcp -m comment --comment \"shop/service-{service}:http cluster IP\" -m tcp --dport 80 -j KUBE-SVC-{service:016}"
        );
        let _ = writeln!(
            rules,
            "-A KUBE-SVC-{service:016} ! -s 10.244.0.0/16 -d {ip}/32 -p tcp -m comment --comment \"shop/service-{service}:http cluster IP\" -m tcp --dport 80 -j KUBE-MARK-MASQ"
        );
        for endpoint in 0..endpoints {
            let (name, to) = (
                format!("KUBE-SEP-{service:010}{endpoint:06}"),
                format!("10.244.{}.{}", service / 64, service % 64 * endpoints + endpoint),
            );
            let _ = writeln!(text, ":{name} -");
            let left = endpoints - endpoint;
            let chance = if left == 1 {
                String::new()
            } else {
                format!("-m statistic --mode random --probability {:.8} ", 1.0 / left as f64)
            };
            let _ = writeln!(
                rules,
                "-A KUBE-SVC-{service:016} -m comment --comment \"shop/service-{service}:http -> {to}:8080\" {chance}-j {name}"
            );
            let _ = writeln!(
                rules,
                "-A {name} -s {to}/32 -m comment --comment \"shop/service-{service}:http\" -j KUBE-MARK-MASQ"
            );
            let _ = writeln!(
                rules,
                "-A {name} -p tcp -m comment --comment \"shop/service-{service}:http\" -m tcp -j DNAT --to-destination {to}:8080"
            );
        }
    }
    text += "-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n";
    text += "-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n";
    text += "-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\n";
    text += &of_services;
    text += "-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports\" -m addrtype --dst-type LOCAL -j RETURN\n";
    text += "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n";
    text + &rules + "COMMIT\n"
}
