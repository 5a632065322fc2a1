//! One configuration in the place of another while connections come without a pause: not one reaches the application beside the proxy.
//!
//! A packet passes base chain after base chain, and a change may come into force while it is between two. Rules of another program make that way long here, so
//! that in a thousand changes there are hundreds of packets on it. SWAPS says how often each configuration takes the place of each other (`make swap`: 50),
//! SWAP_ONLY leaves out what does not contain it (`redirect, netlink | tproxy`).

use e2e::iptables;
use std::fmt::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use e2e::traffic::{Flood, Turnstile};
use test_support::netns::{Families, Namespace, Topology};
use test_support::process::{SHORT, until};
use test_support::sample;

/// The application's port.
const APP: u16 = 8080;
/// The proxy's port.
const INBOUND: u16 = 15006;
const CLIENTS: usize = 2;
/// Chains between mangle and nat, on the way in, each of which leads to the next twice: a packet meets the last one's rule a thousand times, and a program that
/// reads them reads twenty rules.
const FOREIGN_CHAINS: usize = 10;
/// How often each takes the place of each other, where nobody says: a way past the proxy that every change opens shows at the first one.
const FEW: [usize; 2] = [1, 5];
/// Of so many pairs one is taken where not all are asked for, from the second on: so that each configuration is in one at least.
const PAIRS: usize = 6;
/// Connections that have to arrive after a change before the next.
const BETWEEN: usize = 16;

/// Both modes, by each way of writing rules.
const CONFIGURATIONS: [(&str, &str); 10] = [
    ("redirect, netlink", "-b * -i *"),
    ("tproxy, netlink", "-m TPROXY -b * -i *"),
    ("redirect, restore", "--force-iptables-binary nft -b * -i *"),
    ("tproxy, restore", "--force-iptables-binary nft -m TPROXY -b * -i *"),
    ("redirect, legacy", "--force-iptables-binary legacy -b * -i *"),
    ("tproxy, legacy", "--force-iptables-binary legacy -m TPROXY -b * -i *"),
    ("redirect, native", "--native-nftables -b * -i *"),
    ("tproxy, native", "--native-nftables -m TPROXY -b * -i *"),
    ("redirect, sets", "--native-nftables --nft-sets -b 80,81,82,8080 -i *"),
    ("tproxy, sets", "--native-nftables --nft-sets -m TPROXY -b 80,81,82,8080 -i *"),
];

/// Other sets in the place of sets: the same chains on the same hooks, other elements.
const SETS: [[(&str, &str); 2]; 2] = [
    [
        ("redirect, sets", "--native-nftables --nft-sets -b 80,81,82,8080 -i *"),
        ("redirect, other sets", "--native-nftables --nft-sets -b 90,91,92,93,8080 -i *"),
    ],
    [
        ("tproxy, sets", "--native-nftables --nft-sets -m TPROXY -b 80,81,82,8080 -i *"),
        ("tproxy, other sets", "--native-nftables --nft-sets -m TPROXY -b 90,91,92,93,8080 -i *"),
    ],
];

/// How many times as often sets take the place of sets: where nobody says, and else. Changes of one transaction are quick, and what is to be shown is rare.
const SETS_FACTORS: [usize; 2] = [3, 10];

#[test]
fn no_connection_gets_by_while_every_configuration_takes_the_place_of_every_other() -> Result<()> {
    let (swaps, only) = (swaps(), std::env::var("SWAP_ONLY").unwrap_or_default());
    let pairs = CONFIGURATIONS.iter().enumerate();
    let pairs = pairs.flat_map(|(index, one)| CONFIGURATIONS[index + 1..].iter().map(|other| [*one, *other]));
    let pairs = pairs.filter(|[one, other]| format!("{} | {}", one.0, other.0).contains(&only)).collect();
    // Whoever says how often, or which, means all of them.
    let pairs: Vec<_> = if is_asked() || !only.is_empty() { pairs } else { sample::part(pairs, PAIRS, 1) };
    let is_swapped = |one: &(&str, &str)| pairs.iter().any(|pair| pair.contains(one));
    ensure!(!only.is_empty() || CONFIGURATIONS.iter().all(is_swapped), "not every configuration is taken");
    let counts = pairs.into_iter().map(|pair| swap(pair, swaps)).collect::<Result<Vec<_>>>()?.concat();
    println!("{}", judge(&counts)?);
    Ok(())
}

#[test]
fn no_connection_gets_by_while_sets_take_the_place_of_other_sets() -> Result<()> {
    let factor = SETS_FACTORS[usize::from(is_asked() || sample::is_whole())];
    let swaps = swaps() * factor;
    let counts = SETS.map(|pair| swap(pair, swaps)).into_iter().collect::<Result<Vec<_>>>()?.concat();
    println!("{}", judge(&counts)?);
    Ok(())
}

fn is_asked() -> bool {
    std::env::var_os("SWAPS").is_some()
}

fn swaps() -> usize {
    sample::number("SWAPS", sample::times(FEW[0], FEW[1]))
}

/// What came of all the changes from one configuration to another.
#[derive(Clone, Debug)]
struct Count {
    from: &'static str,
    to: &'static str,
    changes: usize,
    /// Changes during which somebody reached the application, and how many that were.
    leaky: usize,
    escaped: usize,
    connections: u64,
}

/// The table of them, which is an error where somebody got by.
fn judge(counts: &[Count]) -> Result<String> {
    let mut table = format!(
        "{:28}{:28}{:>10}{:>10}{:>10}{:>14}\n",
        "from", "to", "changes", "leaky", "escaped", "connections"
    );
    for Count { from, to, changes, leaky, escaped, connections } in counts {
        writeln!(table, "{from:28}{to:28}{changes:>10}{leaky:>10}{escaped:>10}{connections:>14}")?;
    }
    let sum = |of: fn(&Count) -> usize| counts.iter().map(of).sum::<usize>();
    let (changes, leaky) = (sum(|count| count.changes), sum(|count| count.leaky));
    writeln!(table, "{leaky} of {changes} changes let {} connections by", sum(|count| count.escaped))?;
    ensure!(
        counts.iter().all(|count| count.connections > count.changes as u64 * 10),
        "hardly a connection:\n{table}"
    );
    ensure!(leaky == 0, "{table}");
    Ok(table)
}

/// Lets two configurations take each other's place repeatedly.
fn swap(pair: [(&'static str, &'static str); 2], swaps: usize) -> Result<Vec<Count>> {
    let topology = Topology::new(Families::Dual)?;
    let pod = &topology.pod;
    stretch_the_way(pod)?;
    apply(pod, pair[0].1)?;
    let (app, proxy) = (Turnstile::open(pod, APP)?, Turnstile::open(pod, INBOUND)?);
    let flood = Flood::start(&topology, APP, CLIENTS)?;
    let mut counts = [(0, 1), (1, 0)].map(|(from, to)| Count {
        from: pair[from].0,
        to: pair[to].0,
        changes: 0,
        leaky: 0,
        escaped: 0,
        connections: 0,
    });
    settle(&proxy).with_context(|| pair[0].0)?;
    for (index, (to, count)) in (0..swaps).flat_map(|_| [(1, 0), (0, 1)]).enumerate() {
        let (before, begun) = (app.passed(), flood.begun());
        apply(pod, pair[to].1)?;
        settle(&proxy).with_context(|| format!("change {index}, to {}", pair[to].0))?;
        let escaped = app.passed() - before;
        let count = &mut counts[count];
        count.changes += 1;
        count.leaky += usize::from(escaped > 0);
        count.escaped += escaped;
        count.connections += flood.begun() - begun;
    }
    Ok(counts.to_vec())
}

/// Waits until connections that were begun after this call have arrived at the proxy.
fn settle(proxy: &Turnstile) -> Result<()> {
    let passed = proxy.passed();
    until("connections to arrive at the proxy", SHORT, &[], || {
        Ok((proxy.passed() >= passed + BETWEEN).then_some(()))
    })
}

/// Rules of another program that match no packet, but every first packet of a connection passes.
fn stretch_the_way(pod: &Namespace) -> Result<()> {
    let mut text = String::from("table inet others {\nchain c0 { tcp sport 9 tcp dport 1 counter drop; }\n");
    for number in 1..=FOREIGN_CHAINS {
        let next = number - 1;
        writeln!(text, "chain c{number} {{ jump c{next}; jump c{next}; }}")?;
    }
    for hook in ["prerouting", "input"] {
        writeln!(text, "chain {hook} {{ type filter hook {hook} priority -120;")?;
        writeln!(text, "tcp flags & (syn | ack) == syn jump c{FOREIGN_CHAINS}; }}")?;
    }
    text.push_str("}\n");
    let mut nft = pod.command(&test_support::process::command("nft", ["-f", "-"]));
    test_support::process::run_with_input(&mut nft, &text, SHORT)?.ok()?;
    Ok(())
}

/// Runs the program itself, with nothing around it that takes time.
fn apply(pod: &Namespace, args: &str) -> Result<()> {
    let mut command = Command::new(iptables::istio_iptables());
    command.env_clear().env("PATH", e2e::program::PATH).arg("--dual-stack").args(args.split(' '));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = pod.enter(|| command.output())??;
    ensure!(output.status.success(), "{args}: {} {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}
