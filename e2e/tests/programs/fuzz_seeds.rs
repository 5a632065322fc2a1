//! What fuzzing begins with, made of the recordings: seeds for every target, the words that a mutation may put in, and the pods that the
//! plugin's target can be asked about. What is committed under `fuzz/` is what is made here; `UPDATE_SEEDS=yes` writes it again.
//!
//! Other seeds are inputs that once found something. They are written by hand, and only have to stay.

#[path = "../../../fuzz/src/kernel.rs"]
#[allow(dead_code)] // one function is enough here
mod kernel;

use redirect_core::settings::Setting;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::iptables::recording::Recording;
use e2e::ztunnel::{ACK, HELLO, NACK};
use netfilter_state::change::IptablesChange;
use netfilter_state::netlink::{Batch, Observed};
use netfilter_state::state::IptablesTables;
use redirect_core::Family;
use serde::Deserialize;
use serde_json::{Value, json};
use test_support::project;

/// How many recordings become seeds: each of so many.
const EVERY_RULES: usize = 24;
const EVERY_POD: usize = 12;
/// What all seeds together may take.
const MOST_BYTES: usize = 1 << 20;
/// How the names of the files begin that are made here.
const RECORDED: &str = "recorded-";

/// Files under `fuzz/` by name.
type Files = BTreeMap<PathBuf, Vec<u8>>;

#[test]
fn seeds_words_and_pods_are_those_of_the_recordings() -> Result<()> {
    let fuzz = project::file("fuzz");
    let (wanted, there) = (files()?, committed(&fuzz)?);
    if std::env::var_os("UPDATE_SEEDS").is_some() {
        for name in there.keys().filter(|name| !wanted.contains_key(*name)) {
            fs::remove_file(fuzz.join(name))?;
        }
        for (name, content) in &wanted {
            let path = fuzz.join(name);
            fs::create_dir_all(path.parent().context("a folder")?)?;
            fs::write(path, content)?;
        }
        return Ok(());
    }
    let differing: Vec<&PathBuf> =
        wanted.keys().chain(there.keys()).filter(|name| wanted.get(*name) != there.get(*name)).collect();
    ensure!(
        differing.is_empty(),
        "run with UPDATE_SEEDS=yes: {differing:?} are not what the recordings make"
    );
    Ok(())
}

#[test]
fn every_target_has_seeds_and_all_of_them_are_small() -> Result<()> {
    let fuzz = project::file("fuzz");
    let mut bytes = 0;
    for target in fs::read_dir(fuzz.join("fuzz_targets"))? {
        let target = target?.path();
        let seeds = fuzz.join("seeds").join(target.file_stem().context("a name")?);
        let mut some = false;
        for seed in fs::read_dir(&seeds).with_context(|| format!("{} has no seeds", target.display()))? {
            bytes += usize::try_from(seed?.metadata()?.len())?;
            some = true;
        }
        ensure!(some, "{} is empty", seeds.display());
    }
    ensure!(bytes < MOST_BYTES, "all seeds together have {bytes} bytes");
    Ok(())
}

/// The files that are there and would be made here.
fn committed(fuzz: &Path) -> Result<Files> {
    let mut files = Files::new();
    let mut folders = vec![fuzz.join("seeds"), fuzz.join("pods"), fuzz.join("words")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(fuzz)?.to_owned();
            let is_made =
                name.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(RECORDED));
            if is_made || !name.starts_with("seeds") {
                files.insert(name, fs::read(&path)?);
            }
        }
    }
    Ok(files)
}

fn files() -> Result<Files> {
    let mut seeds = Seeds::default();
    for recording in Recording::all()?.iter().filter(|recording| recording.succeeded()).step_by(EVERY_RULES) {
        seeds.run(recording)?;
    }
    let pods: Vec<Value> = serde_json::from_str(include_str!("../../fixtures/plugin.json"))?;
    for (number, recorded) in pods.iter().step_by(EVERY_POD).enumerate() {
        seeds.pod(number, recorded)?;
    }
    seeds.dumps()?;
    seeds.texts();
    let Words { settings, http } = serde_json::from_str(include_str!("../../fixtures/fuzz-words.json"))?;
    seeds.0.insert("words/settings.dict".into(), dictionary(&words(settings)?));
    seeds.0.insert("words/http.dict".into(), dictionary(&http));
    Ok(seeds.0)
}

#[derive(Default)]
struct Seeds(Files);

impl Seeds {
    fn add(&mut self, target: &str, name: &str, content: impl Into<Vec<u8>>) {
        self.0.insert(format!("seeds/{target}/{RECORDED}{name}").into(), content.into());
    }

    /// What a kernel answered about other programs' rules, in pieces of whole messages: a piece may name what another one tells of.
    fn dumps(&mut self) -> Result<()> {
        const PIECE: usize = 8 << 10;
        let folder = project::file("crates/netfilter-state/tests/dumps");
        for name in ["extended", "others"] {
            let dump = fs::read(folder.join(name).with_extension("dump"))?;
            let (mut pieces, mut rest) = (vec![Vec::new()], dump.as_slice());
            while let Some(length) = rest.first_chunk().copied().map(u32::from_ne_bytes) {
                let (message, behind) = rest.split_at(usize::try_from(length)?.next_multiple_of(4));
                if pieces.last().is_some_and(|piece: &Vec<u8>| piece.len() + message.len() > PIECE) {
                    pieces.push(Vec::new());
                }
                pieces.last_mut().context("a piece")?.extend(message);
                rest = behind;
            }
            for (number, piece) in pieces.into_iter().enumerate() {
                self.add("netlink_answers", &format!("dump-{name}-{number}"), piece);
            }
        }
        Ok(())
    }

    /// A run of the program: its command line, its settings, and what the kernel held afterwards.
    fn run(&mut self, recording: &Recording) -> Result<()> {
        let name = &recording.name;
        let env: Vec<String> = recording.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let line = format!("{}\0{}", recording.args.join("\n"), env.join("\n"));
        self.add("command_lines", name, line.clone());
        self.add("command_lines", &format!("{name}-validation"), format!("v\n{line}"));
        let settings = format!("f\n{}", settings(&recording.args));
        self.add(
            "packets",
            name,
            format!("10.1.0.2:80/tcp\noutside\n192.0.2.9:4711\neth0\n1337\nnew\0{settings}\0f\n"),
        );
        self.add(
            "packets",
            &format!("{name}-out"),
            format!("[2001:db8::1]:53/udp\n1337:1337\n\n\n\n\0{settings}\0{settings}"),
        );
        self.add("settings_to_text", name, settings);
        let mut transactions = Vec::new();
        for (family, key) in [(Family::V4, "state_v4"), (Family::V6, "state_v6")] {
            let text = saved(&recording.recorded[key])?;
            if !text.is_empty() {
                transactions.extend(dump(family, &text)?);
                self.add("netlink_round_trip", &format!("{name}-{family}"), text.clone());
                self.add("iptables_save", &format!("{name}-{family}"), text);
            }
        }
        if !transactions.is_empty() {
            self.add("netlink_answers", name, transactions);
        }
        Ok(())
    }

    /// A run of the plugin: its pod, and what it was reported.
    fn pod(&mut self, number: usize, recorded: &Value) -> Result<()> {
        let name = recorded["name"].as_str().context("a name")?;
        let (mut pod, conf) = (recorded["pod"].clone(), &recorded["conf"]);
        self.add("pod_objects", name, serde_json::to_string(&pod)?);
        pod["metadata"]["name"] = json!(format!("p{number}"));
        pod["metadata"]["namespace"] = json!("default");
        self.0.insert(format!("pods/p{number}.json").into(), serde_json::to_vec_pretty(&pod)?);
        for command in ["ADD", "CHECK"] {
            let env = format!(
                "CNI_COMMAND={command}\nCNI_CONTAINERID=c{number}\nCNI_NETNS=/run/netns/x\nCNI_IFNAME=eth0\nCNI_PATH=/opt/cni/bin\n\
                 CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=p{number}"
            );
            self.add("network_configuration", &format!("{name}-{command}"), format!("{env}\0{conf}"));
        }
        let plugin = json!({"type": "calico", "ipam": {"type": "host-local"}, "mtu": 1500});
        let list = json!({"cniVersion": conf["cniVersion"], "name": "k8s", "plugins": [plugin, conf]});
        self.add("conflist", &format!("{name}-list"), format!("l\n{list:#}\0"));
        self.add("conflist", &format!("{name}-single"), format!("s\n{plugin}\0{conf}"));
        Ok(())
    }

    /// What no recording has.
    fn texts(&mut self) {
        let answered = |answers: &[&[u8]]| {
            let datagrams = [&[HELLO], answers].concat();
            let with_length = |datagram: &&[u8]| [&[datagram.len() as u8], *datagram].concat();
            datagrams.iter().flat_map(with_length).collect::<Vec<u8>>()
        };
        self.add("ztunnel", "served", answered(&[ACK, ACK, ACK, ACK]));
        self.add("ztunnel", "refused", answered(&[NACK, ACK, NACK, ACK]));
        let v4 =
            json!({"Interface": 0, "Address": {"IP": "10.1.0.2", "Mask": "////AA=="}, "Gateway": "10.1.0.1"});
        let v6 = json!({"Interface": null, "Address": {"IP": "fd00::2", "Mask": "//////////8AAAAAAAAAAA=="}, "Gateway": ""});
        for (name, ips) in
            [("two-families", json!([v4, v6])), ("one-address", json!([v4])), ("none", json!(null))]
        {
            let event =
                json!({"Netns": "/run/netns/cni-1", "PodName": "web-0", "PodNamespace": "shop", "IPs": ips});
            self.add("add_event", name, event.to_string());
        }
        let cluster = "server: 'https://[fd00::1]:6443', insecure-skip-tls-verify: true";
        for (name, user) in [
            ("token", "token: s3cr3tt0k3n"),
            ("file", "tokenFile: token, token: s3cr3tt0k3n"),
            ("certificate", "client-certificate-data: YWJj, client-key-data: czNjcjN0dDBrM24="),
            ("exec", "exec: {command: x, apiVersion: y}"),
        ] {
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{{name: c, cluster: {{{cluster}}}}}]\n\
                 users: [{{name: u, user: {{{user}}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n"
            );
            self.add("kubeconfig", name, text);
        }
        let line = |decision: &str| {
            json!({"level": "info", "time": "2026-11-21T07:26:50.000001Z", "scope": "cni-plugin", "msg": "redirected", "pod": "a/b",
                "decision": decision, "reason": "no_proxy", "code": 110, "ms": "pod:4.2 total:10.6"})
            .to_string()
        };
        let lines = json!(["redirect", "enrol", "skip", "fail"].map(line)).to_string();
        self.add("log_socket", "lines", lines.clone());
        let post = format!("POST /log HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{lines}", lines.len());
        self.add("agent_http", "log", format!("\u{3}{post}"));
        for (name, server, request) in [
            (
                "health",
                0,
                "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /readyz?verbose HTTP/1.1\r\nhost: x\r\n\r\n",
            ),
            ("metrics", 1, "GET /metrics HTTP/1.1\r\nhost: x\r\naccept: text/plain\r\n\r\n"),
            (
                "levels",
                2,
                "PUT /logging HTTP/1.1\r\nhost: x\r\ncontent-length: 17\r\n\r\ncni-agent:debug\r\n",
            ),
            (
                "chunks",
                2,
                "PUT /logging HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\ninfo\r\n0\r\n\r\n",
            ),
        ] {
            self.add("agent_http", name, [&[server], request.as_bytes()].concat());
        }
    }
}

/// The lines of the target's settings: a letter that chooses the setting, and the value.
fn settings(args: &[String]) -> String {
    let mut lines = String::new();
    let mut args = args.iter().peekable();
    while let Some(arg) = args.next() {
        let (flag, value) =
            arg.split_once('=').map_or((arg.as_str(), None), |(flag, value)| (flag, Some(value)));
        let is_it = |row: &redirect_core::settings::Setting| {
            row.flag.is_some_and(|name| flag == format!("--{name}"))
                || row.short.is_some_and(|short| flag == format!("-{short}"))
        };
        let Some(index) = Setting::ALL.iter().position(is_it) else { continue };
        let is_value = |next: &&String| !next.starts_with('-');
        let value = value.or_else(|| args.next_if(is_value).map(String::as_str)).unwrap_or("true");
        let letter = ('!'..).find(|letter| *letter as usize % Setting::ALL.len() == index).unwrap_or('!');
        lines.push(letter);
        lines.push_str(value);
        lines.push('\n');
    }
    lines
}

/// What was recorded of a family, as iptables-save printed it.
fn saved(tables: &Value) -> Result<String> {
    let mut text = String::new();
    for (table, lines) in tables.as_object().into_iter().flatten() {
        writeln!(text, "*{table}")?;
        for line in lines.as_array().context("lines")? {
            let line = line.as_str().context("a line")?;
            writeln!(text, "{line}{}", if line.starts_with(':') { " [0:0]" } else { "" })?;
        }
        writeln!(text, "COMMIT")?;
    }
    Ok(text)
}

/// The same as the kernel's answer over netlink.
fn dump(family: Family, text: &str) -> Result<Vec<u8>> {
    let (state, nothing) = (IptablesTables::saved(text)?, Observed::at(1));
    ensure!(state != IptablesTables::new(), "nothing is recorded");
    let change = IptablesChange::back(&IptablesTables::new(), &state, &IptablesChange::default());
    let mut batch = Batch::new(&nothing);
    batch.change(family, &change)?;
    Ok(kernel::dumped(batch.finish()?.bytes()))
}

/// Words that no table of the program has.
#[derive(Deserialize)]
struct Words {
    /// Keys of configurations, pods and kubeconfigs, and values that something is made of.
    settings: BTreeSet<String>,
    /// What requests are made of.
    http: BTreeSet<String>,
}

/// These words, and those of settings and rules.
fn words(mut words: BTreeSet<String>) -> Result<BTreeSet<String>> {
    for row in Setting::ALL {
        let names = row.flag.iter().chain(row.env).chain(row.annotations).chain(&row.proxy_env);
        words.extend(names.map(|name| (*name).to_owned()));
        words.extend(row.short.map(|short| format!("-{short}")));
    }
    for recording in Recording::all()? {
        for key in ["state_v4", "state_v6"] {
            let text = saved(&recording.recorded[key])?;
            let is_fixed = |word: &&str| {
                word.starts_with("--")
                    || word.starts_with("ISTIO_")
                    || word.chars().all(|c| c.is_ascii_uppercase())
            };
            words.extend(text.split_whitespace().filter(is_fixed).map(str::to_owned));
        }
    }
    Ok(words)
}

/// In libFuzzer's form: a word a line, in quotes, bytes that are not plain letters by their number.
fn dictionary(words: &BTreeSet<String>) -> Vec<u8> {
    let mut text = String::from("# Made by e2e/tests/programs/fuzz_seeds.rs.\n");
    for word in words {
        let bytes = word.bytes().map(|byte| match byte {
            b'"' | b'\\' => format!("\\x{byte:02x}"),
            b' '..=b'~' => char::from(byte).to_string(),
            _ => format!("\\x{byte:02x}"),
        });
        text.push_str(&format!("\"{}\"\n", bytes.collect::<String>()));
    }
    text.into_bytes()
}
