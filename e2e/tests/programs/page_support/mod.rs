//! What the tests of the web page share: questions, and what `redirectctl` says to each.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::program;
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Output};

use e2e::iptables::recording::Recording;

/// Longer than an answer may take on any machine.
const PATIENCE: Duration = Duration::from_secs(900);

/// Packets, as flags of `redirectctl trace`: some that are captured, some that are not, of both families, and one that is none.
pub const PACKETS: &[&[(&str, &str)]] = &[
    &[("as", "app"), ("to", "198.51.100.1:443")],
    &[("to", "[2001:db8::9]:443")],
    &[("as", "proxy"), ("to", "198.51.100.1:443")],
    &[("as", "outside"), ("to", "10.1.0.2:8080")],
    &[("as", "app"), ("to", "10.96.0.10:53/udp")],
    &[("as", "7:8"), ("to", "127.0.0.1:15001")],
    &[("as", "outside"), ("to", "[fd00:10::2]:22"), ("interface", "eth0")],
    &[("as", "app"), ("to", "198.51.100.1:3306"), ("mark", "0x539")],
    &[("as", "outside"), ("to", "10.1.0.2:80"), ("state", "established"), ("interface", "eth0")],
    &[("as", "0"), ("to", "10.1.0.2:15008"), ("from", "10.1.0.2:4000")],
    &[("as", "me"), ("to", "<b>here</b>"), ("from", "x"), ("mark", "y")],
];

/// A recorded command line as a question.
#[derive(Clone)]
pub struct Case {
    /// The recording's name.
    pub name: String,
    /// The command line as somebody types it.
    pub text: String,
    /// The pod's addresses.
    pub address: String,
    /// The pod's name servers.
    pub nameservers: Vec<String>,
    args: Vec<String>,
    env: Vec<(String, String)>,
}

impl Case {
    /// All recorded command lines, with the families and name servers of their namespaces.
    pub fn all() -> Result<Vec<Self>> {
        Ok(Recording::all()?.into_iter().map(Self::of).collect())
    }

    fn of(recording: Recording) -> Self {
        let Recording { name, args, env, families, nameservers, .. } = recording;
        let variables = env.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        let words: Vec<String> = variables
            .chain(["istio-iptables".to_owned()])
            .chain(args.iter().map(|word| quoted(word)))
            .collect();
        let mut address = vec!["127.0.0.1", "::1"];
        address.extend(families.each().map(|v6| if v6 { "fd00:10::2" } else { "10.1.0.2" }));
        Self { name, text: words.join(" "), address: address.join(","), nameservers, args, env }
    }

    /// What `redirectctl COMMAND` says to it, with more words.
    pub fn redirectctl(&self, machines: &Machines, command: &str, more: &[&str]) -> Result<Output> {
        let mut words = vec![command, "--address", &self.address];
        words.extend(self.args.iter().map(String::as_str));
        words.extend(more);
        machines.run(&self.nameservers, &words, &self.env)
    }

    /// What `redirectctl diff` says to its difference from another.
    pub fn difference(&self, other: &Self, machines: &Machines, more: &[&str]) -> Result<Output> {
        let (before, after) = (format!("flags:{}", self.text), format!("flags:{}", other.text));
        let mut words = vec!["diff", &before, &after, "--address", &self.address];
        words.extend(more);
        machines.run(&self.nameservers, &words, &[])
    }
}

/// A word as a shell is told it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Machines to run `redirectctl` on: one for each set of name servers.
pub struct Machines(BTreeMap<Vec<String>, Namespace>);

impl Machines {
    /// Those that these cases need.
    pub fn of(cases: &[Case]) -> Result<Self> {
        let mut all = BTreeMap::new();
        for servers in cases.iter().map(|case| &case.nameservers) {
            if !all.contains_key(servers) {
                let namespace = Namespace::empty(Families::Dual)?;
                namespace.set_nameservers(servers)?;
                // The page knows no machine's users.
                namespace.set_no_users()?;
                all.insert(servers.clone(), namespace);
            }
        }
        Ok(Self(all))
    }

    fn run(&self, servers: &[String], words: &[&str], env: &[(String, String)]) -> Result<Output> {
        let namespace = self.0.get(servers).context("no machine has these name servers")?;
        let mut command = process::command(program::under_test("redirectctl")?, words);
        command.env_clear().envs(env.iter().map(|(name, value)| (name, value)));
        process::run(&mut namespace.command(&command), PATIENCE)
    }
}

/// What `redirectctl` says of a manifest.
pub fn of_manifest(command: &str, manifest: &Path, more: &[&str]) -> Result<Output> {
    let file = manifest.to_str().context("a path in UTF-8")?;
    let mut words = vec![command, "-f", file];
    words.extend(more);
    let mut command = process::command(program::under_test("redirectctl")?, words);
    command.env_clear();
    process::run(&mut command, PATIENCE)
}

/// The errors that a run has logged, without what is told of the file they are in.
pub fn errors(run: &Output) -> Vec<String> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, '\t').skip(1);
        (parts.next() == Some("error")).then(|| parts.next().unwrap_or_default().to_owned())
    };
    run.stderr.lines().filter_map(of_line).collect()
}
