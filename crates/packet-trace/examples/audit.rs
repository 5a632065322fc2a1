//! Is a sidecar's plan in force in what iptables-save printed, and where does a connection of the application end?
//!
//! ```text
//! iptables-save | audit 203.0.113.7:443        ends with 1 if anything differs from the plan
//! ip6tables-save | audit [2001:db8::7]:443 [fd00::2]:40000 eth0        from this address by this interface, where rules ask for them
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)] // a program, unlike the library

use netfilter_state::saved::Dump;
use packet_trace::{Detail, Packet, TraceRules};
use redirect_core::{Families, Family, Redirect};
use std::{env, error::Error, io, net::SocketAddr, process::ExitCode};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let given: Vec<String> = env::args().skip(1).collect();
    let to: SocketAddr =
        given.first().ok_or("usage: iptables-save | audit TO [FROM [INTERFACE]]")?.parse()?;
    let usual = if to.is_ipv4() { "192.0.2.1:40000" } else { "[2001:db8::1]:40000" };
    let mut packet = Packet::from_pod(1000, 1000, given.get(1).map_or(usual, String::as_str).parse()?, to);
    if let Some(interface) = given.get(2) {
        packet = packet.by(interface);
    }
    let plan = Redirect::sidecar(Families::Both).build()?.plan();
    let dump = Dump::read(Family::of(&to.ip()), &io::read_to_string(io::stdin())?)?;
    let differences = dump.differences(&plan);
    differences.iter().for_each(|difference| println!("{difference}"));
    print!("{}", TraceRules::of_dump(&dump, &plan).trace(&packet).text(Detail::Met));
    Ok(ExitCode::from(u8::from(!differences.is_empty())))
}
