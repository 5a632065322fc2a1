//! Redirections of any size, for measuring what they cost; and what the programs that measure share.

pub mod api;
pub mod plugin;
pub mod report;
pub mod rulesets;

use anyhow::{Context, Result};
use redirect_core::{
    Redirect, RulePlan,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
use std::{env, fmt::Write, fs, net::IpAddr, path::PathBuf};

/// The folder of the programs that are measured: what the variable `BENCH_BIN` says, which `make bench` sets.
///
/// # Errors
/// It is unset, or does not name a folder.
pub fn programs() -> Result<PathBuf> {
    let folder = env::var_os("BENCH_BIN").context("BENCH_BIN: missing; `make bench` sets it")?;
    fs::canonicalize(&folder).with_context(|| format!("BENCH_BIN: no folder {}", folder.display()))
}

/// Settings with this many excluded outbound ports and as many excluded ranges, half of them IPv6, for both families.
#[must_use]
pub fn settings(entries: usize) -> RawSettings {
    let (mut ports, mut ranges) = (String::new(), String::new());
    for entry in 0..entries {
        let comma = if entry == 0 { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = write!(ports, "{comma}{}", 1 + entry % 14_000);
        let (high, low) = (entry / 2 / 256 % 256, entry / 2 % 256);
        let _ = match entry % 2 {
            0 => write!(ranges, "{comma}10.{high}.{low}.0/24"),
            _ => write!(ranges, "{comma}fd00:{high:x}:{low:x}::/48"),
        };
    }
    let mut raw = RawSettings::new();
    let mut flag = |key: Key, text: String| raw.set(key, text, Source::Flag("bench"));
    flag(Key::InboundPorts, "*".into());
    flag(Key::OutboundRanges, "*".into());
    flag(Key::DualStack, "true".into());
    flag(Key::OutboundExcludePorts, ports);
    flag(Key::OutboundExcludeRanges, ranges);
    raw
}

/// The redirection of settings, in a namespace with an address of each family.
///
/// # Panics
/// When the settings are invalid.
#[must_use]
#[allow(clippy::expect_used)] // a bench of invalid settings must not go on
pub fn redirect(raw: &RawSettings) -> Redirect {
    let addresses: [IpAddr; 2] =
        [IpAddr::from([10, 1, 0, 2]), IpAddr::from([0xfd00, 0x10, 0, 0, 0, 0, 0, 2])];
    Redirect::parse(raw, &NamespaceFacts::new(&addresses)).expect("the settings of a bench are valid")
}

/// The plan of a usual pod: everything but some ports, both families.
#[must_use]
pub fn usual_plan() -> RulePlan {
    let mut raw = RawSettings::new();
    for (key, text) in [
        (Key::OutboundRanges, "*"),
        (Key::InboundPorts, "*"),
        (Key::InboundExcludePorts, "15090,15021,15020"),
        (Key::ProxyUid, "1337"),
        (Key::DualStack, "true"),
    ] {
        raw.set(key, text, Source::Flag("bench"));
    }
    redirect(&raw).plan()
}

/// The plan of [`settings`] with this many entries.
#[must_use]
pub fn plan(entries: usize) -> RulePlan {
    redirect(&settings(entries)).plan()
}
