//! Every extension of iptables and every expression of nftables that the kernel and the programs of this machine know, in rules.

use std::collections::BTreeSet;

use test_support::dice::Dice;

/// Rules of iptables: which programs take them (`v4`, `v6` or `both`), a table, a chain and words. Those without a target may have any.
const IPTABLES: &str = include_str!("../../fixtures/vocabulary/iptables.txt");
/// Rules of nft: the family of a table, the type of a chain, its hooks, and words. A drop at the end may be another verdict.
const NFT: &str = include_str!("../../fixtures/vocabulary/nft.txt");
/// Extensions that no rule here has, and why.
pub const NOT_MADE: &str = include_str!("../../fixtures/vocabulary/not-made.txt");
/// The functions with which the kernel evaluates expressions (`nft_…_eval`) and words that lead to each.
pub const EVALUATED: &str = include_str!("../../fixtures/vocabulary/evaluated.txt");
/// Those that no rule here has, and why.
pub const NOT_EVALUATED: &str = include_str!("../../fixtures/vocabulary/not-evaluated.txt");

/// Objects and sets of a table in which rules of [`NFT`] stand.
const OBJECTS: &str = r#"
  counter n { }
  quota q { over 100 bytes }
  limit l { rate 5/second }
  ct helper h { type "ftp" protocol tcp; }
  ct timeout t { protocol tcp; l3proto ip; policy = { syn_sent: 0, established: 0 }
  }
  ct expectation e { protocol tcp; dport 80; timeout 10s; size 8; l3proto ip; }
  synproxy s { mss 1460; wscale 7; timestamp sack-perm; }
  set seen { type ipv4_addr; flags dynamic,timeout; timeout 1m; size 64; }
  set pairs { type ipv4_addr . inet_service; flags interval; elements = { 198.51.100.0-198.51.100.9 . 80-90, 10.0.0.0/8 . 8080 }; }
  set limited { type inet_service; limit rate 1/second burst 1 packets; elements = { 80, 8080 }; }"#;

fn rows(table: &'static str) -> Vec<[&'static str; 4]> {
    let row = |line: &'static str| line.splitn(4, ' ').collect::<Vec<_>>().try_into().expect("four columns");
    table.lines().map(row).collect()
}

/// What a list says of a name.
pub fn listed(list: &'static str, name: &str) -> Option<&'static str> {
    list.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
}

/// The names of extensions that rules here have.
pub fn extensions() -> BTreeSet<&'static str> {
    let words: Vec<&str> = IPTABLES.split_whitespace().collect();
    words.windows(2).filter(|two| matches!(two[0], "-m" | "-j")).map(|two| two[1]).collect()
}

/// Whether a rule of nft here has these words.
pub fn has_words(piece: &str) -> bool {
    rows(NFT).iter().any(|[.., words]| words.contains(piece))
}

/// Commands that make every rule, in a network namespace of their own.
pub fn every_rule() -> Vec<String> {
    let mut dice = Dice::new(1);
    let of_iptables = rows(IPTABLES).into_iter().map(|rule| iptables(&mut dice, rule, "nft"));
    let mut commands: Vec<String> = of_iptables.collect();
    for (number, [family, kind, hooks, words]) in rows(NFT).into_iter().enumerate() {
        for hook in hooks.split(',') {
            let table = format!("every{number}{hook}");
            commands.push(nft(&table, (family, kind, hook, "lo"), -101, words));
        }
    }
    commands
}

/// One rule of either program, somewhere.
pub fn random(dice: &mut Dice, legacy: bool, number: usize) -> String {
    if dice.one_in(2) {
        let rule = dice.pick(&rows(IPTABLES));
        return iptables(dice, rule, if legacy { "legacy" } else { "nft" });
    }
    let [family, kind, hooks, words] = dice.pick(&rows(NFT));
    let hook = dice.pick(&hooks.split(',').collect::<Vec<_>>());
    let priority = if kind == "nat" {
        dice.pick(&[-150, -110, -99, 50, 110])
    } else {
        dice.pick(&[-310, -201, -199, -150, -101, -90, 1, 90, 225])
    };
    let verdict = dice.pick(&["drop", "drop", "accept", "return", "meta mark set 7", "jump a"]);
    let words = words.strip_suffix("drop").map_or(words.to_owned(), |rest| format!("{rest}{verdict}"));
    let before = dice.pick(&[
        "",
        "",
        "counter ",
        "meta mark set 7 ",
        "ct mark set 0x17 ",
        "meta mark 0 ",
        "ct state new ",
        "meta cpu 0-63 ",
    ]);
    let device = dice.pick(&["lo", "eth0"]);
    let rule = |words: &str| nft(&format!("every{number}"), (family, kind, hook, device), priority, words);
    // Not everything may stand behind everything.
    format!("{} 2>/dev/null || {}\n", rule(&format!("{before}{words}")).trim_end(), rule(&words).trim_end())
}

fn iptables(dice: &mut Dice, [programs, table, chain, words]: [&str; 4], variant: &str) -> String {
    let mut script = String::new();
    for (set, made) in [("s4", "hash:ip"), ("s6", "hash:ip family inet6"), ("m4", "hash:ip skbinfo")] {
        if words.contains(set) {
            script.push_str(&format!("ipset -exist create {set} {made}\n"));
        }
    }
    if words.contains("m4") {
        script.push_str("ipset -exist add m4 10.1.0.2 skbmark 0x7\n");
    }
    let target = if words.contains("-j ") {
        ""
    } else {
        dice.pick(&[" -j ACCEPT", " -j RETURN", " -j MARK --set-mark 7"])
    };
    let table = if target.is_empty() || chain != "OUTPUT" {
        table
    } else {
        dice.pick(&["mangle", "raw", "nat", "filter"])
    };
    let place = dice.pick(&["-A", "-I"]);
    let programs: &[&str] = match programs {
        "v4" => &["iptables"],
        "v6" => &["ip6tables"],
        _ => &["iptables", "ip6tables"],
    };
    for program in programs {
        if words.contains("--rateest e") {
            script.push_str(&format!("{program}-{variant} -w -t mangle -A INPUT -p 253 -j RATEEST --rateest-name e --rateest-interval 250ms --rateest-ewmalog 500ms\n"));
        }
        script.push_str(&format!("{program}-{variant} -w -t {table} {place} {chain} {words}{target}\n"));
    }
    script
}

fn nft(
    name: &str,
    (family, kind, hook, device): (&str, &str, &str, &str),
    priority: i32,
    words: &str,
) -> String {
    let (objects, device) =
        if family == "netdev" { ("", format!(" device {device}")) } else { (OBJECTS, String::new()) };
    format!(
        "nft '\ntable {family} {name} {{{objects}\n  chain a {{ counter accept; }}\n  chain c {{ type {kind} hook {hook}{device} priority {priority};\n    {words}\n  }}\n}}'\n"
    )
}
