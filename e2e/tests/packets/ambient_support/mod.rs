//! What the tests of ambient mode share: `install-cni ambient`, and the recorded runs of the reference.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, Error, Result};
use e2e::program;
use serde_json::{Map, Value, json};
use test_support::netns::{Namespace, State};
use test_support::process::{self, Output, SHORT};
use test_support::rewrites::{Printed, Rewrites, without_counts};

/// Recorded runs; so that a lost fixture does not look like success.
const RECORDINGS: usize = 96;

/// `install-cni ambient WORDS`, for a network namespace.
pub fn command(namespace: &Namespace, words: &str) -> Command {
    let mut command = Command::new(program::under_test("install-cni").expect("install-cni is built"));
    command.env_clear().arg("ambient").args(words.split_whitespace());
    command.arg("--network-namespace").arg(namespace.path());
    command
}

/// Runs it to its end, whatever that is.
pub fn run(namespace: &Namespace, words: &str) -> Result<Output> {
    process::run(&mut command(namespace, words), SHORT)
}

/// The program itself, without anything between it and a kill.
pub fn start(namespace: &Namespace, words: &str) -> Result<Child> {
    let mut command = command(namespace, words);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command.spawn()?)
}

/// A recorded run of the reference.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// Whether it is of native nftables.
    pub is_native: bool,
    /// What it ended in.
    pub state: State,
    /// What was recorded, in the form of a sidecar's recordings.
    recorded: Value,
    asked: Value,
}

impl Case {
    /// All of them.
    pub fn all() -> Result<Vec<Self>> {
        let recorded: Value = serde_json::from_str(include_str!("../../../fixtures/ambient.json"))?;
        let cases = recorded["cases"].as_array().context("a list of cases")?;
        assert_eq!(cases.len(), RECORDINGS);
        cases.iter().map(Self::read).collect()
    }

    fn read(case: &Value) -> Result<Self> {
        let state = &case["state"];
        let nft: Vec<String> =
            lines(&state["nft"]).iter().map(|line| without_counts(line).into_owned()).collect();
        let recorded = json!({
            "state_v4": tables(&state["iptables"]),
            "state_v6": tables(&state["ip6tables"]),
            "ip_rule_v4": state["rule4"],
            "ip_rule_v6": state["rule6"],
            "nft": nft,
        });
        let mut wanted = State::recorded(&recorded)?;
        // Our chains have the names that they have in iptables.
        let named = |(chain, rules): (String, _)| (chain.replace("istio-prerouting", "istio-prert"), rules);
        wanted.nft = wanted.nft.into_iter().map(named).collect();
        let name = case["name"].as_str().context("a case without a name")?.to_owned();
        let is_native = case["in"]["backend"] == "nft";
        Ok(Self { name, is_native, state: wanted, recorded, asked: case["in"].clone() })
    }

    /// The flags that ask for it, in its backend.
    pub fn words(&self) -> String {
        self.words_in(if self.is_native { "native" } else { "netlink" })
    }

    /// The flags that ask for it, in a backend.
    pub fn words_in(&self, backend: &str) -> String {
        let mut words = format!("--backend {backend}");
        for (name, flag) in [
            ("ipv6", "ipv6"),
            ("dns_global", "redirect-dns"),
            ("dns_pod", "dns-proxy"),
            ("ingress", "ingress"),
        ] {
            if let Some(is_on) = self.asked[name].as_bool() {
                words += &format!(" --{flag}={is_on}");
            }
        }
        let interfaces = lines(&self.asked["virtual_interfaces"]);
        if !interfaces.is_empty() {
            words += &format!(" --virtual-interfaces {}", interfaces.join(","));
        }
        words
    }

    /// Whether it captures IPv6.
    pub fn has_v6(&self) -> bool {
        self.asked["ipv6"] == true
    }

    /// Writes what the reference has left, with the field's own tools.
    pub fn leave(&self, namespace: &Namespace, variant: &str) -> Result<()> {
        let feed = |program: &str, args: &[&str], text: &str| -> Result<()> {
            let mut command = namespace.command(&process::command(program, args));
            process::run_with_input(&mut command, text, SHORT)?.ok()?;
            Ok(())
        };
        for (key, family) in [("state_v4", "iptables"), ("state_v6", "ip6tables")] {
            for (table, rules) in self.recorded[key].as_object().into_iter().flatten() {
                let text = format!("*{table}\n{}\nCOMMIT\n", lines(rules).join("\n"));
                feed(&format!("{family}-{variant}-restore"), &["--noflush"], &text)?;
            }
        }
        if self.is_native {
            feed("nft", &["-f", "-"], &lines(&self.recorded["nft"]).join("\n"))?;
        }
        for family in if self.has_v6() { &["-4", "-6"][..] } else { &["-4"] } {
            namespace.sh(&format!(
                "ip {family} rule add fwmark 0x111/0xfff pref 32764 lookup 100
                 ip {family} route replace local default dev lo table 100"
            ))?;
        }
        Ok(())
    }
}

/// A state in which rules that are written otherwise and mean the same are written as ours.
pub fn in_our_words(mut state: State) -> Result<State> {
    let rewrites = Rewrites::named().map_err(Error::msg)?;
    for (tables, printed) in [(&mut state.v4, Printed::V4), (&mut state.v6, Printed::V6)] {
        for (chain, lines) in tables.values_mut().flatten() {
            *lines = lines.iter().flat_map(|line| rewrites.of(printed, chain, line)).collect();
        }
    }
    Ok(state)
}

/// The tables of what `iptables-save` has printed, each with its lines; those without a rule are left out.
fn tables(saved: &Value) -> Value {
    let (mut tables, mut table) = (Map::new(), String::new());
    for line in lines(saved) {
        if let Some(name) = line.strip_prefix('*') {
            table = name.to_owned();
        } else if line.starts_with(':') && !line.contains(" ACCEPT ") || line.starts_with("-A") {
            let lines = tables.entry(table.clone()).or_insert_with(|| json!([]));
            lines.as_array_mut().into_iter().for_each(|lines| lines.push(line.clone().into()));
        }
    }
    tables.into()
}

fn lines(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}
