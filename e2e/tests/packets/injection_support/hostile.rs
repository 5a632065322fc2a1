//! Values of settings as somebody writes them who wants a rule that nobody planned.

use redirect_core::settings::{Kind, Setting};
use test_support::dice::Dice;

/// The file that a value makes if anything runs it: in the folder that a test works in.
pub const CANARY: &str = "canary";

/// What is put before, behind or into a value.
const PARTS: &[&str] = &[
    "\n-A OUTPUT -j ACCEPT",
    "\nCOMMIT\n*nat\n-A PREROUTING -j ACCEPT\n",
    "\r\n",
    "\t",
    "\0",
    "\0-j ACCEPT",
    " -j ACCEPT",
    " ! -d 0.0.0.0/0",
    "; flush ruleset",
    "; add rule inet istio-proxy-nat output accept",
    "} accept",
    "\"",
    "\" accept comment \"",
    "'",
    "\\",
    "#",
    "%s%n%x",
    "{}",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "| touch canary",
    "&& touch canary #",
    "../../../etc/passwd",
    "\u{202e}",
    "\u{2066}",
    "\u{2028}",
    "\u{200b}",
    "\u{feff}",
    "\u{a0}",
    "\u{1b}[2J\u{1b}]0;owned\u{7}",
    "\u{7f}",
    "-",
    "--",
    "+",
    ",",
    ",,",
    ":",
    "!",
    "*",
    " ",
    "/",
    "@",
];

/// What a kind of setting takes although it looks odd, and what looks right and is not.
struct Pool {
    odd: &'static [&'static str],
    wrong: &'static [&'static str],
}

const PORT: Pool = Pool { odd: &["1", "65535", "16001", "4711"], wrong: &["80,443", "*", "1:2"] };
const PORTS: Pool = Pool {
    odd: &["80", "*", "8000:8099", "1:65535", "443,80,443", "15006", "53", "22,100:200,65535", ""],
    wrong: &[
        "0",
        "65536",
        "4294967376",
        "18446744073709551696",
        "0x50",
        "1e3",
        "80:",
        ":80",
        "90:80",
        "８０",
        "٨٠",
        "8\u{200b}0",
        "http",
        "80,,443",
        "-80",
        "+80",
    ],
};
const RANGES: Pool = Pool {
    odd: &[
        "10.1.2.3/8",
        "10.0.0.0/8,fd00::/7",
        "FD00::1/64",
        "::/0",
        "0.0.0.0/0",
        "127.0.0.1/32",
        "224.0.0.0/4",
        "*",
        "::ffff:10.0.0.1/104",
        "10.9.0.1/32,10.9.0.1/32",
        "fe80::/10",
        "",
    ],
    wrong: &[
        "010.0.0.0/8",
        "10/8",
        "10.0.0.0/33",
        "10.0.0.0/8/8",
        "10.0.0.0/-1",
        "10.0.0.0/+8",
        "0x0a.0.0.0/8",
        "167772160/8",
        "10.0.0.0/255.0.0.0",
        "１０.0.0.0/8",
        "fe80::1%eth0/64",
        "fd00::/129",
        "[fd00::]/8",
        "10.0.0.0/8,*",
        "10.0.0.1",
    ],
};
const LOOPBACK: Pool = Pool {
    odd: &["127.0.0.1/32", "127.0.0.0/8", "127.9.0.0/16"],
    wrong: &["10.0.0.0/8", "127.0.0.0/7", "::1/128", "*"],
};
const INTERFACES: Pool = Pool {
    odd: &["eth0", "tap+", "veth1.5", "eth0+", "lo", "a12345678901234", "eth0,tap+", "e-_.0", ""],
    wrong: &[
        "+",
        "eth/0",
        "eth0 ",
        "-o",
        "a123456789012345",
        "eth*",
        "\"eth0\"",
        "$eth",
        "еth0",
        "eth0,",
        "!eth0",
    ],
};
const IDS: Pool = Pool {
    odd: &["1", "1337", "1337,1338", "root", "4294967294", "7,7", "00012"],
    wrong: &["4294967295", "4294967296", "-1", "ROOT", "no such user", "1337:1337", "٣"],
};
const MARKS: Pool = Pool {
    odd: &["1339", "0x539", "0xffffffff", "77"],
    wrong: &["0", "1338", "4294967296", "0x1/0xff", "-1", "254", "0x", "0x1G"],
};
const SWITCHES: Pool =
    Pool { odd: &["true", "false", "TRUE", "1", "f"], wrong: &["yes", "tRuE", "truе", "2"] };

/// A value for a setting: odd, wrong, or with something in it that belongs to another language.
pub fn value(setting: &Setting, dice: &mut Dice) -> String {
    let pool = match setting.kind {
        Kind::Bool => SWITCHES,
        Kind::Choice(words) => Pool { odd: words, wrong: &["redirect", "TPRОXY", "TPROXY ", "*"] },
        Kind::Port => PORT,
        Kind::Ports => PORTS,
        Kind::LoopbackRange => LOOPBACK,
        Kind::Address | Kind::Ranges => RANGES,
        Kind::Interfaces => INTERFACES,
        Kind::Mark | Kind::RouteTable => MARKS,
        Kind::Duration | Kind::Groups | Kind::Ids | Kind::Name | Kind::Path => IDS,
    };
    match dice.below(10) {
        0..=6 => dice.pick(pool.odd).to_owned(),
        7 => dice.pick(pool.wrong).to_owned(),
        _ => broken(dice.pick(pool.odd), dice),
    }
}

/// A value with a part that ends it, for somebody who takes it for more than a value.
fn broken(base: &str, dice: &mut Dice) -> String {
    let part = dice.pick(PARTS);
    match dice.below(5) {
        0 => format!("{part}{base}"),
        1 => {
            let at: Vec<usize> = base.char_indices().map(|(at, _)| at).chain([base.len()]).collect();
            let (before, behind) = base.split_at(dice.pick(&at));
            format!("{before}{part}{behind}")
        }
        2 => part.to_owned(),
        3 => format!("{base}{}", part.repeat(1 + dice.below(3000))),
        _ => format!("{base}{part}"),
    }
}

/// A `resolv.conf`, and the servers that resolvers take from it.
pub fn resolv_conf(dice: &mut Dice) -> (String, Vec<&'static str>) {
    const LINES: &[(&str, Option<&str>)] = &[
        ("nameserver 10.96.0.10", Some("10.96.0.10")),
        ("nameserver\t10.96.0.11\t# -j ACCEPT", Some("10.96.0.11")),
        ("nameserver fd00:10::a", Some("fd00:10::a")),
        ("nameserver FD00:10:0::B", Some("fd00:10::b")),
        ("nameserver fe80::1%$(touch canary)", Some("fe80::1")),
        ("nameserver 10.96.0.12;flush ruleset", None),
        ("nameserver 10.96.0.12/0", None),
        ("nameserver 0x0a600001", None),
        ("nameserver 10.96.12", None),
        ("nameserver 010.096.000.012", None),
        ("nameserver １０.96.0.10", None),
        ("nameserver -A OUTPUT -j ACCEPT", None),
        ("nameserver", None),
        ("nameservers 10.96.0.13", None),
        ("NAMESERVER 10.96.0.13", None),
        ("#nameserver 10.96.0.13", None),
        ("search $(touch canary) `touch canary` 10.96.0.13", None),
        ("options ndots:5\u{0} nameserver 10.96.0.13", None),
        ("\u{1b}[2Jnameserver 10.96.0.13", None),
    ];
    let mut text = String::new();
    let mut servers = Vec::new();
    for _ in 0..dice.below(5) {
        let (line, server) = dice.pick(LINES);
        text.push_str(line);
        text.push('\n');
        servers.extend(server.filter(|server| !servers.contains(server)));
    }
    (text, servers)
}

/// Names that the kernel lets an interface have.
pub const INTERFACE_NAMES: &[&str] =
    &["$(id)", "`id`", "a;reboot", "-j", "\"x\"", "a&&b", "+", "*", "{}", "x\\n", "\u{202e}x", "ｅｔｈ０"];
