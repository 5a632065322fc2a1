//! Rules, routes and hooks of other programs, put together at random from parts.
//!
//! All constants are among those that packets of [`super::packets::random_packet`] have, or beside them on purpose.

use std::fmt::Write as _;

use test_support::dice::Dice;
use test_support::netns::{client_address, pod_address, remote_address};

use super::mesh::other_address;
use super::packets::STRANGER;
use super::vocabulary;

/// What other programs do.
#[derive(Debug, Default)]
pub struct Foreign {
    /// Shell, for what they do before the plan is put in force, ...
    pub before: String,
    /// ... and for what comes after.
    pub after: String,
}

/// What one to three other programs do in a pod whose legacy tables are in use, or not.
pub fn random(dice: &mut Dice, legacy: bool) -> Foreign {
    let mut foreign = Foreign::default();
    // One program alone: what two do to the same routes fails.
    let mut has_routes = false;
    for number in 0..=dice.below(3) {
        let kind = if has_routes { dice.below(18) } else { dice.below(20) };
        has_routes |= kind >= 18;
        let script = match kind {
            _ if kind < 18 && dice.one_in(RARE) => vocabulary::random(dice, legacy, number),
            0..=7 => {
                let other = dice.one_in(6);
                iptables(dice, legacy ^ other)
            }
            8..=15 => nft(dice, number),
            16 | 17 => devices(dice, number),
            _ => routing(dice),
        };
        // No plan is put in force where another program routes by its mark.
        let is_before = dice.one_in(5) && !script.contains("fwmark 0x539");
        let to = if is_before { &mut foreign.before } else { &mut foreign.after };
        to.push_str(&script);
    }
    foreign
}

/// The effect of these is not known beforehand: a few.
const CHANCE: usize = 60;
/// Most that is known may do anything, to the engine.
const RARE: usize = 6;

const TCP_PORTS: [&str; 9] = ["80", "81", "4443", "53", "8080", "8081", "15008", "15001", "15006"];
const PORTS: [&str; 5] = ["80:81", "8080,8081", "80,4443,9", "15001,15006", "81:8080"];
const MARKS: [u32; 6] = [7, 0x17, 0x8000, 1337, 1338, 1];
const MASKS: [u32; 4] = [0xf, 0xff, 0x8000, 0xffff_ffff];
const IDS: [u32; 5] = [1000, 1337, 0, 7, 2000];

fn address(dice: &mut Dice, v6: bool) -> String {
    let (last, net) = if v6 { ("/128", "/64") } else { ("/32", "/24") };
    let own = if v6 { "::1" } else { "127.0.0.1" };
    let address = match dice.below(6) {
        0 | 1 => remote_address(v6).to_string(),
        2 => other_address(v6).to_string(),
        3 => client_address(v6).to_string(),
        4 => pod_address(v6).to_string(),
        _ => own.to_owned(),
    };
    address.clone() + if dice.one_in(3) && address != own { net } else { last }
}

/// Which packets iptables rules are about, in a chain of this hook, and the protocol's name where they have one.
fn iptables_match(dice: &mut Dice, hook: &str, v6: bool) -> (String, &'static str) {
    let mut text = String::new();
    let protocol = match dice.below(8) {
        0..=3 => "tcp",
        4 => "udp",
        _ => "",
    };
    if !protocol.is_empty() {
        let _ = write!(text, " -p {protocol}");
    }
    let not = |dice: &mut Dice| if dice.one_in(4) { " !" } else { "" };
    if protocol == "tcp" && dice.one_in(2) {
        match dice.below(4) {
            0..=2 => write!(text, "{} --dport {}", not(dice), dice.pick(&TCP_PORTS)),
            _ => write!(text, " -m multiport{} --dports {}", not(dice), dice.pick(&PORTS)),
        }
        .expect("is text");
    } else if protocol == "udp" && dice.one_in(2) {
        text.push_str(dice.pick(&[" --dport 53", " ! --dport 53", " --dport 5353"]));
    }
    for _ in 0..dice.below(3) {
        let (mark, mask, id) = (dice.pick(&MARKS), dice.pick(&MASKS), dice.pick(&IDS));
        let one = match dice.below(14) {
            0 | 1 => format!(" -m mark{} --mark {:#x}/{mask:#x}", not(dice), mark & mask),
            2 | 3 => format!(" -m connmark{} --mark {:#x}/{mask:#x}", not(dice), mark & mask),
            4 | 5 => {
                let state = dice.pick(&[
                    "NEW",
                    "INVALID",
                    "ESTABLISHED,RELATED",
                    "ESTABLISHED,RELATED,DNAT",
                    "DNAT",
                    "SNAT",
                    "UNTRACKED",
                    "INVALID,NEW",
                ]);
                format!(" -m conntrack{} --ctstate {state}", not(dice))
            }
            6 => format!(" -m state{} --state {}", not(dice), dice.pick(&["NEW", "INVALID", "ESTABLISHED"])),
            7 => format!(" -m conntrack --ctdir {}", dice.pick(&["ORIGINAL", "REPLY"])),
            8 if !text.contains(" -d ") => format!("{} -d {}", not(dice), address(dice, v6)),
            9 if !text.contains(" -s ") => format!("{} -s {}", not(dice), address(dice, v6)),
            10 if matches!(hook, "OUTPUT" | "POSTROUTING") => {
                let what = dice.pick(&["uid", "gid"]);
                format!(" -m owner{} --{what}-owner {id}", not(dice))
            }
            11 => format!(" -m addrtype{} --dst-type LOCAL", not(dice)),
            12 if !text.contains(" -o ") && matches!(hook, "OUTPUT" | "POSTROUTING") => {
                format!("{} -o {}", not(dice), dice.pick(&["lo", "eth0", "et+"]))
            }
            13 if matches!(hook, "PREROUTING" | "INPUT") && !text.contains(" -i ") => {
                format!("{} -i {}", not(dice), dice.pick(&["lo", "eth0", "et+"]))
            }
            _ => String::new(),
        };
        text.push_str(&one);
    }
    if dice.one_in(CHANCE) {
        text.push_str(dice.pick(&[
            " -m statistic --mode random --probability 0.5",
            " -m limit --limit 5/sec",
            " -m quota --quota 500",
        ]));
    }
    (text, protocol)
}

/// What iptables rules do in a table, in chains that a hook leads to.
fn iptables_target(dice: &mut Dice, table: &str, hook: &str, protocol: &str, v6: bool) -> String {
    let (mark, mask) = (dice.pick(&MARKS), dice.pick(&MASKS));
    let marks = |dice: &mut Dice| match dice.below(10) {
        0..=2 => format!("MARK --set-mark {mark:#x}"),
        3 => format!("MARK --set-xmark {mark:#x}/{mask:#x}"),
        4 => format!("MARK --or-mark {mark:#x}"),
        5 => format!("MARK --{}-mark {mark:#x}", dice.pick(&["and", "xor"])),
        6 => format!("CONNMARK --set-mark {mark:#x}/{mask:#x}"),
        7 => format!("CONNMARK --set-xmark {mark:#x}/{mask:#x}"),
        8 => dice
            .pick(&[
                "CONNMARK --save-mark",
                "CONNMARK --save-mark --mask 0xff",
                "CONNMARK --save-mark --nfmask 0xf --ctmask 0xff",
            ])
            .into(),
        _ => dice.pick(&["CONNMARK --restore-mark", "CONNMARK --restore-mark --mask 0xf"]).into(),
    };
    match (table, dice.below(6)) {
        ("raw", 0 | 1) if matches!(hook, "PREROUTING" | "OUTPUT") => {
            dice.pick(&["CT --notrack", "CT --zone 5", "CT --zone 1"]).into()
        }
        ("nat", 0 | 1) if matches!(hook, "PREROUTING" | "OUTPUT") && !protocol.is_empty() => {
            let to = if v6 { format!("[{}]", pod_address(v6)) } else { pod_address(v6).to_string() };
            match dice.below(5) {
                0 => format!("DNAT --to-destination {to}:{STRANGER}"),
                1 => "REDIRECT".into(),
                _ => format!("REDIRECT --to-ports {STRANGER}"),
            }
        }
        ("nat", 0 | 1) if hook == "POSTROUTING" => "MASQUERADE".into(),
        ("nat", 2 | 3) => dice.pick(&["ACCEPT", "RETURN"]).into(),
        ("filter", 0) if protocol == "tcp" && dice.one_in(2) => "REJECT --reject-with tcp-reset".into(),
        ("filter", 0) => "REJECT".into(),
        ("mangle", 3) if dice.one_in(4) => "TOS --set-tos 0x10".into(),
        ("mangle", 0) if hook == "PREROUTING" && protocol == "tcp" => {
            format!(
                "TPROXY --on-port {STRANGER} --tproxy-mark {}",
                dice.pick(&["0x1/0x1", "0x539", "0x7/0xf"])
            )
        }
        (_, 1) if table != "nat" => "DROP".into(),
        (_, 2) => dice.pick(&["ACCEPT", "RETURN"]).into(),
        _ => marks(dice),
    }
}

fn hooks_of(table: &str) -> &'static [&'static str] {
    match table {
        "raw" => &["PREROUTING", "OUTPUT"],
        "nat" => &["PREROUTING", "OUTPUT", "OUTPUT", "POSTROUTING"],
        "filter" => &["INPUT", "OUTPUT"],
        _ => &["PREROUTING", "OUTPUT", "INPUT", "POSTROUTING"],
    }
}

/// A program that uses iptables: two to five rules, some in chains of its own that may be nested.
fn iptables(dice: &mut Dice, legacy: bool) -> String {
    let variant = if legacy { "legacy" } else { "nft" };
    let families: &[bool] = dice.pick(&[&[false, true], &[false], &[true]]);
    let (theirs, seed) = (dice.below(1000), dice.next());
    let mut script = String::new();
    for v6 in families {
        // The same for both, as far as the families allow.
        let mut dice = Dice::new(seed);
        let program = if *v6 { "ip6tables" } else { "iptables" };
        for _ in 0..2 + dice.below(4) {
            iptables_rule(&mut dice, &format!("{program}-{variant} -w"), theirs, *v6, &mut script);
        }
        if dice.one_in(12) {
            let chain = dice.pick(&["INPUT", "OUTPUT"]);
            let keep = dice.pick(&[
                "-m conntrack --ctstate NEW",
                "-i lo",
                "-p tcp",
                "-m mark --mark 0x7/0x7",
                "-m connmark ! --mark 7",
            ]);
            let keep = if chain == "OUTPUT" { keep.replace("-i", "-o") } else { keep.to_owned() };
            let _ = writeln!(script, "{program}-{variant} -w -A {chain} {keep} -j ACCEPT");
            let _ = writeln!(script, "{program}-{variant} -w -P {chain} DROP");
        }
    }
    script
}

fn iptables_rule(dice: &mut Dice, program: &str, theirs: usize, v6: bool, script: &mut String) {
    let table = dice.pick(&["raw", "mangle", "mangle", "nat", "nat", "filter", "filter"]);
    let hook = dice.pick(hooks_of(table));
    let (matches, protocol) = iptables_match(dice, hook, v6);
    let target = iptables_target(dice, table, hook, protocol, v6);
    let place = if dice.one_in(2) { "-I" } else { "-A" };
    let call = format!("{program} -t {table}");
    if !dice.one_in(3) {
        let _ = writeln!(script, "{call} {place} {hook}{matches} -j {target}");
        return;
    }
    // A chain of its own, perhaps by way of another. The numbers keep names apart.
    let name = dice.pick(&["T", "T", "ISTIO_T", "\"$(printf '\\377')\"T"]);
    let chain = format!("{name}{theirs}_{}", dice.below(100_000));
    let how = dice.pick(&["-j", "-j", "-g"]);
    let (more, more_protocol) = iptables_match(dice, hook, v6);
    let second = iptables_target(dice, table, hook, more_protocol, v6);
    let _ = writeln!(script, "{call} -N {chain}\n{call} -A {chain}{more} -j {second}");
    let between = if dice.one_in(3) {
        let outer = format!("{chain}_A");
        let _ = writeln!(script, "{call} -N {outer}\n{call} -A {outer} {how} {chain}");
        outer
    } else {
        chain.clone()
    };
    if dice.one_in(3) {
        let (escape, _) = iptables_match(dice, hook, v6);
        let _ = writeln!(script, "{call} -I {chain} 1{escape} -j RETURN");
    }
    let _ = writeln!(
        script,
        "{call} -A {chain} {} -j {target}",
        if protocol.is_empty() { String::new() } else { format!("-p {protocol}") }
    );
    let _ = writeln!(script, "{call} {place} {hook}{matches} {how} {between}");
}

const PRIORITIES: [i32; 24] = [
    -500, -400, -310, -300, -250, -225, -201, -200, -199, -175, -160, -151, -149, -140, -110, -90, -50, -1,
    1, 10, 90, 110, 225, 300,
];
/// Chains that translate hang somewhere after connection tracking.
const NAT_PRIORITIES: [i32; 8] = [-190, -150, -110, -101, -99, -50, 50, 110];

/// A table of nf_tables, with base chains at one to three hooks, chains of its own, sets and maps.
fn nft(dice: &mut Dice, number: usize) -> String {
    let family = dice.pick(&["inet", "inet", "ip", "ip6"]);
    let mut table = Table { family, chains: 0, inner: String::new() };
    let mut text = String::new();
    for _ in 0..=dice.below(3) {
        table.base(dice, &mut text);
    }
    // What packets put in is in no set that is read.
    let seen = match family {
        "ip6" => "set seen { type ipv6_addr; flags dynamic; size 64; }",
        _ => "set seen { type ipv4_addr; flags dynamic; size 64; }",
    };
    let sets = match family {
        "ip6" => "set far { type ipv6_addr; flags interval; elements = { 2001:db8::2, 2001:db8:9::/48 }; }",
        _ => "set far { type ipv4_addr; flags interval; elements = { 198.51.100.2, 203.0.113.0/24 }; }",
    };
    format!(
        "nft '\ntable {family} theirs{number} {{\n  {sets}\n  {seen}\n  set ports {{ type inet_service; elements = {{ 80, 8080, 9 }}; }}\n{}{text}}}'\n",
        table.inner
    )
}

struct Table {
    family: &'static str,
    chains: usize,
    inner: String,
}

impl Table {
    fn base(&mut self, dice: &mut Dice, text: &mut String) {
        let hook = dice.pick(&["prerouting", "output", "output", "input", "postrouting"]);
        let kind = match dice.below(8) {
            0 | 1 => "nat",
            2 if hook == "output" => "route",
            _ => "filter",
        };
        let priority = if kind == "nat" { dice.pick(&NAT_PRIORITIES) } else { dice.pick(&PRIORITIES) };
        let drops = kind != "nat" && dice.one_in(12);
        let policy = if drops { "policy drop; " } else { "" };
        let chain = Chain { family: self.family, hook, kind };
        let mut rules = String::new();
        for _ in 0..=dice.below(3) {
            let rule = self.rule(dice, chain, 0);
            let _ = writeln!(rules, "    {rule}");
        }
        if drops {
            let keep = dice.pick(&[
                "ct state new",
                "ct state != invalid",
                "meta l4proto tcp",
                "meta l4proto { udp, tcp } ct mark 0",
                "iif != lo",
            ]);
            let keep = if matches!(hook, "output" | "postrouting") {
                keep.replace("iif ", "oif ")
            } else {
                keep.to_owned()
            };
            let _ = writeln!(rules, "    {keep} accept");
        }
        self.chains += 1;
        // A name proves nothing.
        let name = dice.pick(&["b", "b", "b", "ISTIO_B", "istio-b"]);
        let _ = writeln!(
            text,
            "  chain {name}{} {{ type {kind} hook {hook} priority {priority}; {policy}\n{rules}  }}",
            self.chains
        );
    }

    fn rule(&mut self, dice: &mut Dice, chain: Chain, depth: usize) -> String {
        let (matches, about) = chain.matches(dice);
        let counter = if dice.one_in(3) { " counter" } else { "" };
        if depth < 3 && dice.one_in(4) {
            let to = self.inner_chain(dice, chain, depth);
            let how = dice.pick(&["jump", "jump", "goto"]);
            return format!("{matches}{counter} {how} {to}");
        }
        if depth < 3 && dice.one_in(8) {
            let to = self.inner_chain(dice, chain, depth);
            return format!("{}{counter} {}", matches, chain.verdict_map(dice, about, &to));
        }
        if dice.one_in(5) {
            // Statements and conditions in any order.
            let (first, rest) = (chain.passing(dice, about), chain.statement(dice, about));
            return if dice.one_in(2) {
                format!("{first} {matches}{counter} {rest}")
            } else {
                format!("{matches} {first} {} {rest}", chain.condition(dice, about))
            };
        }
        format!("{matches}{counter} {}", chain.statement(dice, about))
    }

    fn inner_chain(&mut self, dice: &mut Dice, chain: Chain, depth: usize) -> String {
        let mut rules = String::new();
        for _ in 0..=dice.below(2) {
            let rule = self.rule(dice, chain, depth + 1);
            let _ = writeln!(rules, "    {rule}");
        }
        self.chains += 1;
        let name = format!("c{}", self.chains);
        let _ = write!(self.inner, "  chain {name} {{\n{rules}  }}\n");
        name
    }
}

/// What leads to a rule.
#[derive(Clone, Copy)]
struct Chain {
    family: &'static str,
    hook: &'static str,
    kind: &'static str,
}

/// What the conditions of a rule say of packets: statements have to fit.
#[derive(Clone, Copy)]
struct About {
    is_tcp: bool,
    is_udp: bool,
    v6: bool,
}

impl Chain {
    fn goes_out(self) -> bool {
        matches!(self.hook, "output" | "postrouting")
    }

    /// The conditions of a rule, and what it is about by them.
    fn matches(self, dice: &mut Dice) -> (String, About) {
        let not = |dice: &mut Dice| if dice.one_in(4) { "!= " } else { "" };
        let v6 = self.family == "ip6" || self.family == "inet" && dice.one_in(2);
        let mut parts: Vec<String> = Vec::new();
        let protocol = match dice.below(9) {
            0..=4 => "tcp",
            5 => "udp",
            _ => "",
        };
        let (is_tcp, is_udp) = (protocol == "tcp", protocol == "udp");
        if is_tcp {
            parts.push(match dice.below(5) {
                0..=2 => format!("tcp dport {}{}", not(dice), dice.pick(&TCP_PORTS)),
                3 => dice
                    .pick(&[
                        "tcp dport { 80, 4443, 9 }",
                        "tcp dport 80-81",
                        "tcp dport @ports",
                        "tcp dport { 53, 8080-8081 }",
                    ])
                    .into(),
                _ => "meta l4proto tcp".into(),
            });
        } else if is_udp {
            parts.push(dice.pick(&["udp dport 53", "meta l4proto udp", "udp dport { 53, 81 }"]).into());
        }
        let about = About { is_tcp, is_udp, v6 };
        for _ in 0..dice.below(3) {
            let one = self.condition(dice, about);
            if !one.is_empty() {
                parts.push(one);
            }
        }
        if dice.one_in(CHANCE) {
            parts
                .push(dice.pick(&["limit rate 5/second", "quota 500 bytes", "numgen random mod 2 0"]).into());
        }
        (parts.join(" "), about)
    }

    /// One more condition, or none.
    fn condition(self, dice: &mut Dice, about: About) -> String {
        let not = |dice: &mut Dice| if dice.one_in(4) { "!= " } else { "" };
        let ip = if about.v6 { "ip6" } else { "ip" };
        let (mark, mask, id) = (dice.pick(&MARKS), dice.pick(&MASKS), dice.pick(&IDS));
        let masked = |what: &str, dice: &mut Dice| {
            let how = if dice.one_in(3) { "!=" } else { "==" };
            format!("{what} & {mask:#x} {how} {:#x}", mark & mask)
        };
        let address = address(dice, about.v6);
        match dice.below(20) {
            17 => dice.pick(&["ct status dnat", "ct status != dnat", "ct status snat"]).into(),
            18 if !about.v6 => dice.pick(&["@nh,96,8 10", "@nh,128,8 10", "ip daddr @seen"]).into(),
            18 => dice.pick(&["ip6 nexthdr tcp", "ip6 nexthdr != tcp"]).into(),
            19 if about.is_tcp => {
                dice.pick(&["tcp flags syn", "tcp flags & syn == syn", "tcp flags != syn"]).into()
            }
            0 => format!("meta mark {}{mark:#x}", not(dice)),
            1 => masked("meta mark", dice),
            2 => format!("ct mark {}{mark:#x}", not(dice)),
            3 => masked("ct mark", dice),
            4 => format!(
                "ct state {}",
                dice.pick(&["new", "established,related", "invalid", "untracked", "!= new", "!= invalid"])
            ),
            5 => format!("ct direction {}", dice.pick(&["original", "reply"])),
            6 => format!("{ip} daddr {}{address}", not(dice)),
            7 => format!("{ip} saddr {}{address}", not(dice)),
            8 if self.goes_out() => format!("meta sk{} {}{id}", dice.pick(&["uid", "gid"]), not(dice)),
            9 => {
                let way = if self.goes_out() { "oifname" } else { "iifname" };
                let names = ["\"lo\"", "\"eth0\"", "{ \"eth0\", \"tun0\" }", "!= \"lo\""];
                format!("{way} {}", dice.pick(&names))
            }
            10 if self.hook != "postrouting" => format!("fib daddr type {}local", not(dice)),
            11 => dice
                .pick(&["meta mark { 0x7, 0x17, 0x539 }", "ct mark { 0x0, 0x7 }", "meta mark 1-0x20"])
                .into(),
            12 => format!("ct state . ct mark {{ new . {:#x}, invalid . 0x0 }}", dice.pick(&[0, 7])),
            13 if self.family == "ip6" => dice.pick(&["ip6 daddr @far", "ip6 daddr != @far"]).into(),
            13 if !about.v6 => dice.pick(&["ip daddr @far", "ip daddr != @far"]).into(),
            14 if about.v6 && !about.is_udp => {
                "ip6 daddr . tcp dport { 2001:db8::1 . 80, fd00:10::2 . 8080 }".into()
            }
            14 if !about.is_udp => "ip daddr . tcp dport { 198.51.100.1 . 80, 10.1.0.2 . 8080 }".into(),
            15 if !about.is_tcp && !about.is_udp => {
                "meta l4proto . th dport { tcp . 80, udp . 53, tcp . 8080 }".into()
            }
            16 => "ct zone 0".into(),
            _ => String::new(),
        }
    }

    fn statement(self, dice: &mut Dice, about: About) -> String {
        let is_tcp = about.is_tcp;
        let (mark, mask) = (dice.pick(&MARKS), dice.pick(&MASKS));
        let translates = self.kind == "nat" && matches!(self.hook, "prerouting" | "output");
        match dice.below(14) {
            0 if self.kind == "filter" && matches!(self.hook, "prerouting" | "output") => {
                dice.pick(&["notrack", "ct zone set 5", "ct zone set 5 notrack"]).into()
            }
            0..=2 if translates && is_tcp => {
                let to = match self.family {
                    "ip" => format!("dnat to {}:{STRANGER}", pod_address(false)),
                    "ip6" => format!("dnat to [{}]:{STRANGER}", pod_address(true)),
                    _ => format!("redirect to :{STRANGER}"),
                };
                if dice.one_in(3) { to } else { format!("redirect to :{STRANGER}") }
            }
            0 if translates => "redirect".into(),
            0..=2 if self.kind == "nat" && self.hook == "postrouting" => "masquerade".into(),
            1 if is_tcp && matches!(self.hook, "input" | "output") => "reject with tcp reset".into(),
            2 if matches!(self.hook, "input" | "output") => "reject".into(),
            1 if is_tcp && self.kind == "filter" && self.hook == "prerouting" => {
                let family = if about.v6 { "ip6" } else { "ip" };
                format!("tproxy {family} to :{STRANGER} meta mark set {mark:#x} accept")
            }
            3 | 4 => "drop".into(),
            5 => "accept".into(),
            6 => "return".into(),
            7 => format!("meta mark set {mark:#x}"),
            8 => format!("ct mark set {mark:#x}"),
            9 => format!("meta mark set meta mark & {mask:#x} | {mark:#x}"),
            10 => dice.pick(&["ct mark set meta mark", "ct mark set meta mark & 0xff"]).into(),
            11 => dice
                .pick(&[
                    "meta mark set ct mark",
                    "meta mark set ct mark & 0xf",
                    "meta mark set ct mark | 0x10",
                ])
                .into(),
            12 => format!("ct mark set ct mark | {mark:#x}"),
            _ if dice.one_in(3) && !about.is_udp => {
                "meta mark set tcp dport map { 80 : 0x7, 8080 : 0x17, 443 : 0x8 }".into()
            }
            _ => format!("meta mark set {mark:#x} ct mark set meta mark"),
        }
    }

    /// A statement with which a rule goes on, or does not if a packet lacks what it loads.
    fn passing(self, dice: &mut Dice, about: About) -> String {
        let ip = if about.v6 { "ip6" } else { "ip" };
        let mark = dice.pick(&MARKS);
        match dice.below(10) {
            0 => format!("meta mark set {mark:#x}"),
            1 => format!("ct mark set {mark:#x}"),
            2 => "meta mark set ct id".into(),
            3 if self.goes_out() => "meta mark set ct mark".into(),
            4 if about.v6 == (self.family == "ip6") => format!("add @seen {{ {ip} daddr }}"),
            5 => "meta priority set 1:1".into(),
            6 if self.kind == "filter" && matches!(self.hook, "prerouting" | "output") => "notrack".into(),
            7 => format!("{ip} dscp set cs1"),
            8 => "meta nftrace set 0".into(),
            _ => "counter".into(),
        }
    }

    fn verdict_map(self, dice: &mut Dice, about: About, to: &str) -> String {
        let end = if self.kind == "nat" { "accept" } else { dice.pick(&["drop", "accept", "return"]) };
        match dice.below(5) {
            0 => format!("ct state vmap {{ invalid : {end}, new : jump {to}, established : accept }}"),
            1 if !about.is_udp => {
                format!("tcp dport vmap {{ 80 : jump {to}, 8080 : {end}, 4443-4444 : goto {to} }}")
            }
            2 => format!("meta mark vmap {{ 0x0 : jump {to}, 0x7 : {end} }}"),
            3 => format!("meta l4proto . th dport vmap {{ tcp . 81 : goto {to}, udp . 53 : {end} }}"),
            _ => format!("ct mark vmap {{ 0x0 : goto {to}, 0x7 : {end} }}"),
        }
    }
}

/// Hooks below IP.
fn devices(dice: &mut Dice, number: usize) -> String {
    let device = dice.pick(&["eth0", "eth0", "lo"]);
    let (family, hook) = dice.pick(&[("netdev", "ingress"), ("netdev", "egress"), ("inet", "ingress")]);
    let port = dice.pick(&TCP_PORTS);
    let matches = match dice.below(5) {
        0 | 1 => format!("tcp dport {port}"),
        2 => format!("ip daddr {}", address(dice, false)),
        3 => format!("ip6 saddr {} tcp dport {port}", address(dice, true)),
        _ => "meta l4proto tcp meta mark 7".to_owned(),
    };
    let act = dice.pick(&["drop", "drop", "meta mark set 7", "accept"]);
    let policy = if dice.one_in(10) { "policy drop; " } else { "" };
    let accept = if policy.is_empty() { "" } else { "ip protocol tcp accept" };
    format!(
        "nft '\ntable {family} below{number} {{\n  chain c {{ type filter hook {hook} device {device} priority 0; {policy}\n    {matches} {act}\n    {accept}\n  }}\n}}'\n"
    )
}

/// Policy rules and routes.
fn routing(dice: &mut Dice) -> String {
    let v6 = dice.one_in(2);
    let ip = if v6 { "ip -6" } else { "ip" };
    let (all, bits) = if v6 { ("::/0", 128) } else { ("0.0.0.0/0", 32) };
    let table = 200 + dice.below(50);
    let gateway = client_address(v6);
    let mut script = String::new();
    let route = match dice.below(5) {
        0 => format!("blackhole {all}"),
        1 => format!("unreachable {all}"),
        2 => format!("local {all} dev lo"),
        3 => format!("{}/{bits} via {gateway} dev eth0", remote_address(v6)),
        _ => format!("{all} via {gateway} dev eth0"),
    };
    let _ = writeln!(script, "{ip} route add {route} table {table}");
    // Before the local table too, where that is not the first.
    let preference = dice.pick(&[10, 20_000, 32_000, 32_765]);
    if dice.one_in(4) {
        let _ = writeln!(script, "{ip} rule add pref 15 lookup local\n{ip} rule del pref 0");
    }
    let (mark, mask) = (dice.pick(&MARKS), dice.pick(&MASKS));
    let selector = match dice.below(8) {
        0..=2 => format!("fwmark {mark:#x}"),
        3 => format!("fwmark {:#x}/{mask:#x}", mark & mask),
        4 => format!("to {}", address(dice, v6)),
        5 => format!("from {}", address(dice, v6)),
        6 => "iif lo".to_owned(),
        _ => format!("uidrange {0}-{0}", dice.pick(&IDS)),
    };
    let action = match dice.below(6) {
        0 => "blackhole".to_owned(),
        1 => dice.pick(&["unreachable", "prohibit"]).to_owned(),
        _ => format!("lookup {table}"),
    };
    let _ = writeln!(script, "{ip} rule add pref {preference} {selector} {action}");
    match dice.below(8) {
        0 => {
            let _ = writeln!(script, "{ip} route add blackhole {}/{bits}", other_address(v6));
        }
        1 => {
            let _ = writeln!(script, "{ip} route del local {} table local", pod_address(v6));
        }
        _ => {}
    }
    script
}
