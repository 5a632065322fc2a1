//! What a packet pays for long lists: new connections per second through excluded ports and ranges that all have to be passed,
//! as single rules and as sets.
//!
//! `packets [SECONDS]` per measurement. Needs root.

#![allow(clippy::print_stdout)] // a table for people is what this program is for

use anyhow::{Context, Result};
use benches::report::{self, Line};
use netns_apply::{ApplyOptions, apply};
use redirect_core::options::{BackendChoice, NativeForm};
use std::{
    env,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};
use test_support::netns::{Families, Namespace};

/// How many excluded ports, with as many ranges.
const SIZES: [usize; 4] = [0, 10, 100, 1_000];
/// How often each is measured; the best counts, because other programs use the machine, too.
const ROUNDS: usize = 5;

fn main() -> Result<()> {
    let seconds: f64 = env::args().nth(1).map_or(Ok(0.5), |text| text.parse()).context("SECONDS")?;
    let forms = [
        ("iptables rules", BackendChoice::Netlink, NativeForm::Plain),
        ("native rules", BackendChoice::NativeNft, NativeForm::Plain),
        ("native sets", BackendChoice::NativeNft, NativeForm::Sets),
    ];
    let mut lines: Vec<Line> =
        forms.iter().map(|(name, ..)| ((*name).to_owned(), vec![0.0; SIZES.len()])).collect();
    for _ in 0..ROUNDS {
        for ((_, backend, native_form), (_, best)) in forms.iter().zip(&mut lines) {
            for (size, best) in SIZES.iter().zip(best) {
                let options = ApplyOptions::default().backend(*backend).native_form(*native_form);
                *best = best.max(rate(*size, &options, seconds)?);
            }
        }
    }
    publish(&lines)
}

/// New connections per second from a pod's application to its proxy.
fn rate(size: usize, options: &ApplyOptions, seconds: f64) -> Result<f64> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.ip_batch("route add default dev eth0\n")?;
    let plan = benches::plan(size);
    namespace.enter(|| -> Result<f64> {
        apply(&plan, options)?;
        // The proxy's outbound listener.
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 15001))?;
        connect_for(&listener, Duration::from_secs_f64(seconds))
    })?
}

/// The kernel completes a connection before it is accepted: one thread plays both sides, and no scheduler is measured.
fn connect_for(listener: &TcpListener, duration: Duration) -> Result<f64> {
    // No one's port and no one's range: every rule is checked.
    let target = SocketAddr::from((Ipv4Addr::new(198, 51, 100, 1), 60_000));
    let (start, mut count) = (Instant::now(), 0_u32);
    while start.elapsed() < duration {
        let client = TcpStream::connect(target)?;
        drop(listener.accept()?);
        drop(client);
        count += 1;
    }
    Ok(f64::from(count) / start.elapsed().as_secs_f64())
}

fn publish(lines: &[Line]) -> Result<()> {
    let mut text =
        format!("new connections per second through as many excluded ports and ranges, best of {ROUNDS}\n\n");
    text += &format!("| | {} |\n|---|---:|---:|---:|---:|\n", SIZES.map(|size| size.to_string()).join(" | "));
    for (name, rates) in lines {
        let rates: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
        text += &format!("| {name} | {} |\n", rates.join(" | "));
    }
    print!("{text}");
    let places = SIZES.map(|size| size.to_string());
    let folder = report::folder()?;
    report::write(&folder, "packets.md", &text)?;
    let title = "New connections per second, by number of excluded ports and ranges";
    report::write(&folder, "packets.svg", &report::lines(title, "per second", &places, lines))
}
