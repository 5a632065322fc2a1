//! The command line: the commands, and what each does with its words.

mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, Command};
use clap_complete::Shell;
use cni_core::selection::Programming;
use logging::DEFAULT_SCOPE;
use netns_apply::facts::{self, NameFiles};
use netns_apply::netns::Netns;
use netns_apply::{ApplyOptions, Live};
use redirect_core::pod::SkipReason;
use redirect_core::settings::{InputErrors, Key, NamespaceFacts, Notice, RawSettings, Source};
use redirect_core::trace::{Detail, Packet, Rules};
use redirect_core::{Redirect, RulePlan, json};
use settings_cli::{Input, Line, Program, RunOptions};

use crate::cause::Finding;
use crate::diagnosis::{Decided, findings};
use crate::input::{self, Trouble};
use crate::inspect::inspect;
use crate::node::Node;
use crate::packet::{Said, packet};
use crate::paper::Layout;
use crate::plan::{self, Format};
use crate::pod::Pod;
use crate::report::{self, Report};
use crate::scan::Scan;
use crate::traffic::{self, Compared};
use crate::{FAILED, FINE, FOUND, show, why};
pub use table::{COMMANDS, Definition, PROGRAM};

/// Where runtimes keep pods' network namespaces.
pub(crate) const NETNS_DIR: &str = "/var/run/netns";

/// What flags begin with where a manifest could stand.
const FLAGS: &str = "flags:";
/// The address of a pod that has none yet: one of the documentation.
const SOMEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// What a command answers: text for standard output, and the exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// For standard output.
    pub text: String,
    /// The exit code.
    pub code: u8,
}

/// What a command works with.
pub struct Given {
    operands: Vec<String>,
    flags: BTreeMap<String, String>,
    input: Input,
    env: BTreeMap<String, String>,
    layout: Layout,
}

/// Runs the program.
pub(crate) fn run(words: Vec<OsString>, env: Vec<(OsString, OsString)>) -> ExitCode {
    let mut words = words.into_iter();
    let first = words.next().and_then(|word| word.into_string().ok()).unwrap_or_default();
    if let Some(command) =
        COMMANDS.iter().find(|command| command.name == first || command.alias == Some(&*first))
    {
        return run_command(command, words.collect(), env);
    }
    let rest: Vec<String> = words.filter_map(|word| word.into_string().ok()).collect();
    match general(&first, &rest) {
        Ok(text) => settings_cli::print(&text),
        Err(text) => settings_cli::complain(&text),
    }
}

/// The subcommands that all programs have.
fn general(first: &str, rest: &[String]) -> Result<String, String> {
    match (first, rest) {
        ("help" | "--help" | "-h", []) => Ok(whole().render_long_help().to_string()),
        ("version" | "--version" | "-V", []) => Ok(format!("redirectctl {}\n", env!("CARGO_PKG_VERSION"))),
        ("man", []) => Ok(PROGRAM.manual(whole())),
        ("completion", [shell]) => {
            let shell: Shell =
                shell.parse().map_err(|_| format!("{shell:?} is no shell that is known: bash, zsh, fish"))?;
            Ok(settings_cli::completions(shell, whole(), "redirectctl"))
        }
        ("completion", _) => Err("completion needs a shell: bash, zsh or fish".to_owned()),
        ("", _) => Err(whole().render_help().to_string()),
        (word, _) => {
            let names: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
            Err(format!("redirectctl: {word:?} is not one of {}; see redirectctl --help", names.join(", ")))
        }
    }
}

/// The whole command line, for help, manual and completions.
#[must_use]
pub fn whole() -> Command {
    let shell = Arg::new("shell").required(true).value_parser(clap::value_parser!(Shell)).help("The shell");
    let commands = COMMANDS.iter().map(|command| command.line().completed().name(command.name));
    Command::new("redirectctl")
        .about("Shows what is planned, in force and wrong in pods' network namespaces. It never changes anything.")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .subcommands(commands)
        .subcommand(Command::new("help").about("Print this"))
        .subcommand(Command::new("version").about("Print the version"))
        .subcommand(Command::new("man").about("Print the manual page (man 8 form)"))
        .subcommand(Command::new("completion").about("Print completions for a shell").arg(shell))
        .after_help(PROGRAM.examples_text() + "redirectctl COMMAND --help shows the flags and examples of a command.\n")
}

fn run_command(command: &Definition, words: Vec<OsString>, env: Vec<(OsString, OsString)>) -> ExitCode {
    let line = match command.line().read(words) {
        Ok(Line::Work(line)) => line,
        Ok(Line::Print(text)) => return settings_cli::print(&text),
        Err(usage) => return settings_cli::complain(&usage.to_string()),
    };
    let (operands, flags) = (line.operands.clone(), line.flags.clone());
    let text_env: BTreeMap<String, String> = env
        .iter()
        .filter_map(|(name, value)| {
            Some((name.clone().into_string().ok()?, value.clone().into_string().ok()?))
        })
        .collect();
    let input = command.program().input(line, env);
    let logs = match logging::init(input.log.clone()) {
        Ok(logs) => logs,
        Err(error) => return settings_cli::complain(&error.to_string()),
    };
    if command.takes_settings {
        for notice in input
            .misspelt
            .iter()
            .map(ToString::to_string)
            .chain(input.not_in_force.iter().map(ToString::to_string))
        {
            log::warn!(target: DEFAULT_SCOPE, "{notice}");
        }
    }
    let layout = Layout::of_stdout(|name| text_env.get(name).cloned());
    let given = Given { operands, flags, input, env: text_env, layout };
    let code = match answer(command, &given) {
        Ok(answer) => {
            settings_cli::print(&answer.text);
            answer.code
        }
        Err(Trouble(all)) => {
            for error in all {
                log::error!(target: DEFAULT_SCOPE, "{error}");
            }
            FAILED
        }
    };
    logs.flush();
    ExitCode::from(code)
}

/// What a command answers.
///
/// # Errors
/// Everything wrong with its words, or why it could not be done.
fn answer(command: &Definition, given: &Given) -> Result<Answer, Trouble> {
    let mut wrong: Vec<String> = given.input.settings.refused().iter().map(ToString::to_string).collect();
    wrong.extend(command.missing(&given.operands));
    wrong.extend(given.wrong_words(command));
    if command.takes_settings {
        wrong.extend(given.wrong_settings());
    }
    if !wrong.is_empty() {
        return Err(Trouble(wrong));
    }
    (command.run)(given)
}

impl Given {
    fn flag(&self, name: &str) -> Option<&str> {
        self.flags.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    fn operand(&self) -> &str {
        self.operands.first().map_or("", String::as_str)
    }

    fn is_json(&self) -> bool {
        self.flag("output") == Some("json")
    }

    /// Words of a closed set that are none of it.
    fn wrong_words(&self, command: &Definition) -> Vec<String> {
        let rows = command.rows.iter().filter_map(|row| Some((row.flag?, row.takes.words()?)));
        let wrong = rows.filter_map(|(flag, words)| {
            let text = self.flags.get(flag)?;
            (!words.contains(&text.as_str()))
                .then(|| format!("flag --{flag}: {text:?} is not one of {}", words.join(", ")))
        });
        wrong.chain(self.addresses().err()).collect()
    }

    /// Settings that cannot be understood; or that say nothing, because a pod says all.
    fn wrong_settings(&self) -> Vec<String> {
        let options = RunOptions::parse(&self.input.settings).err().unwrap_or_default();
        let facts = NamespaceFacts::new(&[]).with_names(&NameFiles);
        let redirect =
            Redirect::parse(&self.input.settings, &facts).err().unwrap_or_default().without_namespace();
        let refused: Vec<String> = self.input.settings.refused().iter().map(ToString::to_string).collect();
        let of_values = options.iter().chain(redirect.iter()).map(ToString::to_string);
        let mut wrong: Vec<String> = Vec::new();
        for error in of_values.filter(|error| !refused.contains(error)) {
            if !wrong.contains(&error) {
                wrong.push(error);
            }
        }
        let has_pod = self.flag("file").is_some() || self.flag("pod").is_some();
        if has_pod {
            let flags =
                self.input.settings.said().filter_map(|(_, _, source)| {
                    if let Source::Flag(flag) = source { Some(flag) } else { None }
                });
            wrong.extend(flags.map(|flag| {
                format!("flag --{flag}: says nothing beside a pod, whose annotations say all; leave it or the pod out")
            }));
        }
        if self.flag("file").is_some() && self.flag("pod").is_some() {
            wrong.push("flags --file and --pod name a pod each; leave one out".to_owned());
        }
        wrong
    }

    fn addresses(&self) -> Result<Vec<IpAddr>, String> {
        let Some(text) = self.flag("address") else { return Ok(Vec::new()) };
        let parse =
            |word: &str| word.trim().parse().map_err(|_| format!("flag --address: {word:?} is no address"));
        text.split(',').map(parse).collect()
    }

    /// The pod that is named, if one is.
    fn pod(&self) -> Result<Option<Pod>, Trouble> {
        match (self.flag("file"), self.flag("pod")) {
            (Some(file), _) => input::pod_of_file(file).map(Some),
            (None, Some(name)) => self.live_pod(name).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn live_pod(&self, name: &str) -> Result<Pod, Trouble> {
        let name = input::pod_name(name).map_err(Trouble::of)?;
        input::live_pod(&self.kubeconfig()?, &name)
    }

    fn kubeconfig(&self) -> Result<PathBuf, Trouble> {
        input::kubeconfig(self.flag("kubeconfig"), |name| self.env.get(name).cloned())
    }

    fn node(&self) -> Result<Node, Trouble> {
        let directory = self.flag("cni-conf-dir").unwrap_or(crate::node::CONF_DIR);
        Node::read(Path::new(directory))
            .map_err(|error| Trouble(vec![format!("cannot read {directory}: {error}")]))
    }

    fn netns_dir(&self) -> PathBuf {
        self.flag("netns-dir").unwrap_or(NETNS_DIR).into()
    }

    fn answer(&self, report: &Report) -> Answer {
        let text = if self.is_json() { pretty(&report.json()) } else { report.text(self.layout) };
        Answer { text, code: report::code(&report.findings) }
    }
}

fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

fn errors(errors: &InputErrors) -> Trouble {
    Trouble(errors.iter().map(ToString::to_string).collect())
}

/// `plan`
fn plan(given: &Given) -> Result<Answer, Trouble> {
    let format = if given.is_json() { "json" } else { given.flag("format").unwrap_or("text") };
    let format = Format::named(format).unwrap_or(Format::Text);
    let native = RunOptions::parse(&given.input.settings).map_err(|all| errors(&all))?.native_form;
    let redirect = match given.pod()? {
        Some(pod) => match decide(&pod, given)? {
            Ok(redirect) => redirect,
            Err(reason) => return Ok(skipped(&pod, reason, given)),
        },
        None => settings_here(given)?,
    };
    let text = plan::written(&redirect.plan(), format, native, given.layout);
    Ok(Answer { text, code: FINE })
}

/// How a pod is redirected, or why not.
fn decide(pod: &Pod, given: &Given) -> Result<Result<Box<Redirect>, SkipReason>, Trouble> {
    let mut addresses = given.addresses().map_err(Trouble::of)?;
    if addresses.is_empty() {
        addresses.clone_from(&pod.addresses);
    }
    if addresses.is_empty() {
        log::warn!(target: DEFAULT_SCOPE, "the pod has no address yet; the plan is made for an IPv4 address; --address says others");
        addresses.push(SOMEWHERE);
    }
    let node = if given.flag("cni-conf-dir").is_some() { given.node()? } else { Node::default() };
    match node.decide(pod, &NamespaceFacts::new(&addresses)) {
        Decided::Redirect(redirect, _) => Ok(Ok(redirect)),
        Decided::Skip(reason) => Ok(Err(reason)),
        Decided::Wrong(all) => Err(errors(&all)),
        Decided::Unknown => Err(Trouble::of("nothing is decided about the pod")),
    }
}

fn skipped(pod: &Pod, reason: SkipReason, given: &Given) -> Answer {
    let text = if given.is_json() || given.flag("format") == Some("json") {
        let decision = redirect_core::pod::Decision::Skip(reason);
        pretty(&serde_json::to_value(json::Decision::from(&decision)).unwrap_or_default())
    } else {
        format!("# pod {} is left alone: {} ({})\n", pod.name, reason.explanation(), reason.word())
    };
    Answer { text, code: FINE }
}

/// What the settings ask for in the network namespace that they name, or this runs in.
fn settings_here(given: &Given) -> Result<Box<Redirect>, Trouble> {
    let settings = &given.input.settings;
    let said = given.addresses().map_err(Trouble::of)?;
    let addresses = if said.is_empty() {
        let (path, source) = settings.get(Key::NetworkNamespace);
        let there = Netns::run_in(path, facts::addresses)
            .map_err(|error| Trouble(vec![format!("{source}: {error}")]))?;
        there.map_err(|error| {
            Trouble(vec![format!("cannot list the addresses of the network namespace: {error}")])
        })?
    } else {
        said
    };
    let redirect = of_settings(settings, &NamespaceFacts::new(&addresses))?;
    for notice in Notice::about(settings, &redirect) {
        log::warn!(target: DEFAULT_SCOPE, "{notice}");
    }
    Ok(redirect)
}

/// What settings ask for, with the name servers and the names of this machine's files.
fn of_settings(settings: &RawSettings, facts: &NamespaceFacts<'_>) -> Result<Box<Redirect>, Trouble> {
    let servers = settings.needs_nameservers().then(facts::dns_servers).transpose();
    let servers = servers.map_err(|error| Trouble(vec![format!("cannot read /etc/resolv.conf: {error}")]))?;
    let servers = servers.unwrap_or_default();
    let facts = facts.with_nameservers(&servers).with_names(&NameFiles);
    Redirect::parse(settings, &facts).map(Box::new).map_err(|all| errors(&all))
}

/// `verify`
fn verify(given: &Given) -> Result<Answer, Trouble> {
    let path = given.flag("netns").unwrap_or("/proc/self/ns/net").to_owned();
    if let Some(pod) = given.pod()? {
        // The node's configuration counts where it is named: the rules may be those of another machine.
        let node = if given.flag("cni-conf-dir").is_some() { given.node()? } else { Node::default() };
        return Ok(given.answer(&show::netns(Path::new(&path), Some(&pod), &node)));
    }
    let options = RunOptions::parse(&given.input.settings).map_err(|all| errors(&all))?;
    let programming = Programming { backend: options.backend, native_form: options.native_form };
    let netns = Netns::open(&path).map_err(Trouble::of)?;
    let looked = inspect(&netns, Some(programming), |facts| {
        let wanted = of_settings(&given.input.settings, facts);
        (wanted.as_ref().ok().map(|redirect| redirect.plan()), wanted)
    });
    let (seen, wanted) = looked.map_err(Trouble::of)?;
    let decided = Decided::Redirect(wanted?, Box::new(given.input.settings.clone()));
    let all = findings(None, &decided, Some(&seen));
    let report = Report {
        subject: path.clone(),
        netns: Some(path.into()),
        decided,
        order: None,
        inspection: Some(seen),
        findings: all,
    };
    Ok(given.answer(&report))
}

/// `netns`
fn netns(given: &Given) -> Result<Answer, Trouble> {
    let pod = given.pod()?;
    let node = if given.flag("cni-conf-dir").is_some() { given.node()? } else { Node::default() };
    Ok(given.answer(&show::netns(Path::new(given.operand()), pod.as_ref(), &node)))
}

/// `pod`
fn pod(given: &Given) -> Result<Answer, Trouble> {
    let name = input::pod_name(given.operand()).map_err(Trouble::of)?;
    let pod = match given.flag("file") {
        Some(file) => {
            let pods = input::pods_of_file(file)?.into_iter();
            pods.into_iter()
                .find(|pod| pod.name == name)
                .ok_or_else(|| Trouble(vec![format!("{file}: has no pod {name}")]))?
        }
        None => given.live_pod(given.operand())?,
    };
    Ok(given.answer(&show::pod(&pod, &given.netns_dir(), &given.node()?)))
}

/// `scan`
fn scan(given: &Given) -> Result<Answer, Trouble> {
    let pods = match given.flag("file") {
        Some(file) => input::pods_of_file(file)?,
        None => input::live_pods(&given.kubeconfig()?, &node_name(given)?)?,
    };
    let scan = Scan::of(&pods, &given.netns_dir(), &given.node()?).map_err(Trouble::of)?;
    let text = match given.flag("output") {
        Some("json") => pretty(&scan.json()),
        Some("prometheus") => scan.prometheus(),
        Some(_) | None => scan.text(given.layout),
    };
    let all: Vec<Finding> = scan.findings().cloned().collect();
    Ok(Answer { text, code: report::code(&all) })
}

/// The name of the node this runs on: that of its machine, unless it is said.
fn node_name(given: &Given) -> Result<String, Trouble> {
    let said = given.flag("node").map(str::to_owned).or_else(|| given.env.get("NODE_NAME").cloned());
    if let Some(name) = said.filter(|name| !name.is_empty()) {
        return Ok(name);
    }
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(Trouble::of)?;
    Ok(name.trim().to_lowercase())
}

/// `trace`
fn trace(given: &Given) -> Result<Answer, Trouble> {
    let said = Said {
        sender: given.flag("as"),
        to: given
            .flag("to")
            .ok_or_else(|| Trouble::of("flag --to: is missing; write --to IP:PORT, or --to IP:PORT/udp"))?,
        from: given.flag("from"),
        interface: given.flag("interface"),
        mark: given.flag("mark"),
        state: given.flag("state"),
    };
    let (rules, packet) = match given.flag("netns") {
        Some(path) => in_namespace(path, &said, given)?,
        None => {
            let redirect = match given.pod()? {
                Some(pod) => match decide(&pod, given)? {
                    Ok(redirect) => redirect,
                    Err(reason) => return Ok(skipped(&pod, reason, given)),
                },
                None => settings_here(given)?,
            };
            let plan = redirect.plan();
            let packet =
                packet(&said, Some(&plan), &given.addresses().map_err(Trouble::of)?).map_err(Trouble)?;
            (Rules::of_plan(&plan, packet.family()), packet)
        }
    };
    let trace = rules.trace(&packet);
    let detail = if given.flag("every") == Some("true") { Detail::Every } else { Detail::Met };
    let text = if given.is_json() {
        pretty(&serde_json::to_value(json::Trace::from(&trace)).unwrap_or_default())
    } else {
        traffic::told(&trace, detail)
    };
    Ok(Answer { text, code: FINE })
}

/// All rules of a network namespace, whoever's; those of the pod that is given know their settings.
fn in_namespace(path: &str, said: &Said<'_>, given: &Given) -> Result<(Rules, Packet), Trouble> {
    let pod = given.pod()?;
    let netns = Netns::open(path).map_err(Trouble::of)?;
    let read = netns.run(|| {
        let live = Live::now(&ApplyOptions::default()).map_err(Trouble::of)?;
        let plan = pod.as_ref().and_then(|pod| {
            let facts = NamespaceFacts::new(&live.addresses).with_names(&NameFiles);
            Node::default().decide(pod, &facts).plan()
        });
        let packet = packet(said, plan.as_ref(), &live.addresses).map_err(Trouble)?;
        Ok((live.rules(packet.family(), plan.as_ref()), packet))
    });
    read.map_err(Trouble::of)?
}

/// `diff`
fn diff(given: &Given) -> Result<Answer, Trouble> {
    let (mut plans, mut wrong) = (Vec::new(), Vec::new());
    for operand in &given.operands {
        match side(operand, given) {
            Ok(plan) => plans.push(plan),
            Err(Trouble(all)) => wrong.extend(all.into_iter().map(|what| format!("{operand}: {what}"))),
        }
    }
    let [before, after] = plans.as_slice() else { return Err(Trouble(wrong)) };
    let compared = Compared::of(before, after);
    let text = if given.is_json() { pretty(&compared.json()) } else { compared.text(given.layout) };
    Ok(Answer { text, code: if compared.traffic.is_empty() { FINE } else { FOUND } })
}

/// The plan of one side: of a manifest, or of flags. A pod that is left alone has the plan of nothing.
fn side(operand: &str, given: &Given) -> Result<RulePlan, Trouble> {
    let Some(words) = operand.strip_prefix(FLAGS) else {
        return Ok(match decide(&input::pod_of_file(operand)?, given)? {
            Ok(redirect) => redirect.plan(),
            Err(_) => RulePlan::empty(),
        });
    };
    let words = words.split_whitespace().map(|word| OsString::from(word.trim_matches('\'')));
    let plan = COMMANDS
        .iter()
        .find(|command| command.takes_settings)
        .ok_or_else(|| Trouble::of("no flags are known"))?;
    let line = match plan.line().read(words) {
        Ok(Line::Work(line)) => line,
        Ok(Line::Print(_)) => return Err(Trouble::of("asks for help, not for rules")),
        Err(usage) => return Err(Trouble::of(usage)),
    };
    let settings = plan.program().input(line, []).settings;
    let refused: Vec<String> = settings.refused().iter().map(ToString::to_string).collect();
    if !refused.is_empty() {
        return Err(Trouble(refused));
    }
    let mut addresses = given.addresses().map_err(Trouble::of)?;
    if addresses.is_empty() {
        addresses.push(SOMEWHERE);
    }
    Ok(of_settings(&settings, &NamespaceFacts::new(&addresses))?.plan())
}

/// `why`
fn explain(given: &Given) -> Result<Answer, Trouble> {
    let text = match given.operands.first() {
        Some(word) => why::explain(word, given.layout).map_err(Trouble::of)?,
        None => why::list(given.layout),
    };
    Ok(Answer { text, code: FINE })
}

impl Definition {
    /// The program that reads its settings.
    #[must_use]
    pub fn program(&self) -> Program {
        Program {
            name: self.name,
            about: self.about,
            version: env!("CARGO_PKG_VERSION"),
            pages: self.pages,
            statuses: table::STATUSES,
        }
    }
}
