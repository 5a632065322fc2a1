//! Values of settings as somebody writes them who wants a rule that nobody planned.

use std::sync::LazyLock;

use redirect_core::settings::{Setting, SettingKind};
use serde::Deserialize;
use test_support::dice::Dice;

/// The file that a value makes if anything runs it: in the folder that a test works in.
pub const CANARY: &str = "canary";

/// What a kind of setting takes although it looks odd, and what looks right and is not.
#[derive(Deserialize)]
struct Pool {
    odd: Vec<String>,
    wrong: Vec<String>,
}

/// Values by kinds of settings.
#[derive(Deserialize)]
struct Pools {
    /// What is put before, behind or into a value.
    parts: Vec<String>,
    port: Pool,
    ports: Pool,
    ranges: Pool,
    loopback: Pool,
    interfaces: Pool,
    ids: Pool,
    marks: Pool,
    switches: Pool,
    /// Lines, each with the server that resolvers take from it.
    resolv_conf: Vec<(String, Option<String>)>,
}

static POOLS: LazyLock<Pools> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../../fixtures/hostile-values.json")).expect("values")
});

/// A value for a setting: odd, wrong, or with something in it that belongs to another language.
pub fn value(setting: &Setting, dice: &mut Dice) -> String {
    let choice = |words: &[&str]| Pool {
        odd: words.iter().map(|word| (*word).to_owned()).collect(),
        wrong: ["redirect", "TPRОXY", "TPROXY ", "*"].map(str::to_owned).into(),
    };
    let pools = &*POOLS;
    let pool = match setting.kind {
        SettingKind::Bool => &pools.switches,
        SettingKind::Choice(words) => &choice(words),
        SettingKind::Port => &pools.port,
        SettingKind::Ports => &pools.ports,
        SettingKind::LoopbackRange => &pools.loopback,
        SettingKind::Address | SettingKind::Ranges => &pools.ranges,
        SettingKind::Interfaces => &pools.interfaces,
        SettingKind::Mark | SettingKind::RouteTable => &pools.marks,
        SettingKind::Duration
        | SettingKind::Groups
        | SettingKind::Ids
        | SettingKind::Name
        | SettingKind::Path => &pools.ids,
    };
    match dice.below(10) {
        0..=6 => one(&pool.odd, dice).to_owned(),
        7 => one(&pool.wrong, dice).to_owned(),
        _ => broken(one(&pool.odd, dice), dice),
    }
}

fn one<'a>(from: &'a [String], dice: &mut Dice) -> &'a str {
    &from[dice.below(from.len())]
}

/// A value with a part that ends it, for somebody who takes it for more than a value.
fn broken(base: &str, dice: &mut Dice) -> String {
    let part = one(&POOLS.parts, dice);
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
    let mut text = String::new();
    let mut servers = Vec::new();
    for _ in 0..dice.below(5) {
        let (line, server) = &POOLS.resolv_conf[dice.below(POOLS.resolv_conf.len())];
        text.push_str(line);
        text.push('\n');
        servers.extend(server.as_deref().filter(|server| !servers.contains(server)));
    }
    (text, servers)
}

/// Names that the kernel lets an interface have.
pub const INTERFACE_NAMES: &[&str] =
    &["$(id)", "`id`", "a;reboot", "-j", "\"x\"", "a&&b", "+", "*", "{}", "x\\n", "\u{202e}x", "ｅｔｈ０"];
