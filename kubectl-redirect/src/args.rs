//! The command line. Flags that kubectl has too go by its names.

use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches};

use crate::cleanup;
use crate::cluster::KubectlFlags;
use crate::forward::{self, About, ForwardedCommand};
use crate::precheck;
use crate::scan;
use crate::trial;
use crate::wait::{USUAL_WAIT, WaitGoal};
use crate::watch::{self, USUAL_PAUSE};

/// `redirectctl trace` has a flag of this name, too.
const AS: &str = "--as";

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Job {
    Scan(scan::ScanRequest),
    Watch(watch::WatchRequest),
    Test(trial::TrialRequest),
    Forward(forward::ForwardRequest),
    Bundle(forward::WantedBundle),
    Precheck(precheck::PrecheckRequest),
    Cleanup(cleanup::CleanupRequest),
}

/// What a command line asks for.
#[derive(Debug)]
pub(crate) enum RequestedCommand {
    Job(Box<KubectlFlags>, Job),
    /// Help or the version.
    Print(String),
}

/// Reads the words of a command line, without the program's name; an error is for people.
pub(crate) fn read(words: Vec<String>) -> Result<RequestedCommand, String> {
    let (common, mut rest) = split(words);
    let is_forwarded =
        ForwardedCommand::ALL.iter().any(|command| rest.first().is_some_and(|word| word == command.name()));
    if is_forwarded && rest.get(1).is_some_and(|operand| !operand.starts_with('-')) {
        // All behind the operand is redirectctl's, --help included.
        rest.insert(2, "--".to_owned());
    }
    let mut words = rest.into_iter();
    let command: Vec<String> = words.next().into_iter().collect();
    let all = command.into_iter().chain(common).chain(words);
    match parser().no_binary_name(true).try_get_matches_from(all) {
        Ok(matches) => job(&matches),
        Err(error) if error.use_stderr() => Err(error.to_string().trim_end().to_owned()),
        Err(help) => Ok(RequestedCommand::Print(help.to_string())),
    }
}

/// Flags of every command with their values, and the other words: as for kubectl, these flags may stand anywhere.
fn split(words: Vec<String>) -> (Vec<String>, Vec<String>) {
    let flags = with_common(clap::Command::new(""), "");
    let (mut common, mut rest) = (Vec::new(), Vec::new());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let name = word.split('=').next().unwrap_or_default();
        let is_common = flags.get_arguments().any(|flag| {
            flag.get_long().is_some_and(|long| name.strip_prefix("--") == Some(long))
                || flag.get_short().is_some_and(|short| word == format!("-{short}"))
        });
        // Behind its pod, a packet's sender is meant.
        let is_senders = name == AS
            && rest.len() > 1
            && rest.first().is_some_and(|command| command == ForwardedCommand::Trace.name());
        if is_common && !is_senders {
            let value = if name == word { words.next() } else { None };
            common.push(word);
            common.extend(value);
        } else {
            rest.push(word);
        }
    }
    (common, rest)
}

fn text(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).help(help)
}

fn switch(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

fn output() -> Arg {
    text("output", "FORMAT", "text or json").short('o').value_parser(["text", "json"]).default_value("text")
}

/// Flags about which pods are asked for.
fn of_pods(command: clap::Command) -> clap::Command {
    let everywhere = switch("all-namespaces", "Pods of all namespaces, as without -n").short('A');
    command
        .arg(text("node", "NAME", "Only this node"))
        .arg(everywhere.conflicts_with("namespace"))
        .arg(text("selector", "LABELS", "Only pods with these labels").short('l'))
        .arg(output())
}

/// Flags about what is good enough.
fn goal(command: clap::Command) -> clap::Command {
    let wait = text("wait", "TIME", "Tries again until nothing is wrong, for 5m unless a time is said")
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value(USUAL_WAIT);
    command.arg(wait).arg(switch("ignore-warnings", "Warnings are shown, and do not make the exit code 2"))
}

fn with_common(command: clap::Command, patience: &'static str) -> clap::Command {
    command
        .arg(text("kubeconfig", "FILE", "The kubeconfig; by default KUBECONFIG's, then ~/.kube/config"))
        .arg(text("context", "NAME", "A context of it in place of the current one"))
        .arg(text("namespace", "NAME", "A namespace").short('n'))
        .arg(text(
            "agent-namespace",
            "NAME",
            "The namespace of the agents; by default the one that the chart's ClusterRoleBinding names",
        ))
        .arg(
            text("timeout", "TIME", "How long an agent may take, or the pods of test")
                .default_value(patience),
        )
        .arg(
            text("as", "USER", "Asks the API server as this user; for trace, before the pod")
                .value_parser(clap::builder::NonEmptyStringValueParser::new()),
        )
        .arg(
            text("as-group", "GROUP", "With --as: as a member of this group; may be repeated")
                .action(ArgAction::Append)
                .requires("as"),
        )
}

/// The whole command line.
fn parser() -> clap::Command {
    let scan = clap::Command::new("scan")
        .about("Asks every node's agent, and shows how many pods are redirected, and why others are not");
    let watch = clap::Command::new("watch")
        .about("Asks every node's agent repeatedly, and shows what changes of pods, nodes and agents, until Ctrl-C")
        .arg(text("interval", "TIME", "How long it pauses between two times").default_value(USUAL_PAUSE));
    let test = clap::Command::new("test")
        .about(
            "Proves by traffic that pods are redirected: creates a short-lived pod on each of two nodes, in the namespace of -n or the context, and deletes it",
        )
        .arg(text("node", "NAME", "A node, in place of the first two with ready agents; may be repeated").action(ArgAction::Append))
        .arg(text("image", "IMAGE", "The validator's image, in place of the one beside the agents' image"))
        .arg(switch("yes", "Agrees that they are created, without asking").short('y'))
        .arg(output());
    let bundle = clap::Command::new("bundle")
        .about("Saves the archive for a support ticket that redirectctl makes of a node; it holds no secrets")
        .arg(
            Arg::new("POD")
                .required_unless_present_any(["node", "all-nodes"])
                .help("A pod of the node, as NAMESPACE/NAME"),
        )
        .arg(
            text("node", "NAME", "The node, in place of one of its pods; may be repeated")
                .action(ArgAction::Append)
                .conflicts_with("POD"),
        )
        .arg(switch("all-nodes", "All nodes that have an agent").conflicts_with_all(["POD", "node"]))
        .arg(
            text("limit", "COUNT", "How many nodes at most; more are refused")
                .value_parser(clap::value_parser!(usize))
                .default_value("10"),
        )
        .arg(text("file", "FILE", "Where the only one goes; by default redirectctl-NODE.tar.gz").short('f'));
    let precheck = clap::Command::new("precheck")
        .about("Shows whether this cluster can run the agent; changes nothing. -n names its namespace, by default istio-system")
        .arg(output());
    let cleanup = clap::Command::new("cleanup")
        .about(
            "Removes the condition and the taints that agents left on nodes, once their DaemonSet is deleted",
        )
        .arg(text(
            "condition-type",
            "TYPE",
            "The condition, if NODE_CONDITION_TYPE named another than the usual one",
        ))
        .arg(text("taint-key", "KEY", "The taint, if TAINT_KEY named another than the documented ones"));
    clap::Command::new("kubectl-redirect")
        .bin_name("kubectl redirect")
        .about("Asks the agents of all nodes whether pods are redirected. Only cleanup and test change anything.")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .subcommand(with_common(goal(of_pods(scan)), "20s"))
        .subcommand(with_common(of_pods(watch), "20s"))
        .subcommand(with_common(test, "2m"))
        .subcommands(ForwardedCommand::ALL.map(|command| with_common(forwarded(command), "1m")))
        .subcommand(with_common(bundle, "5m"))
        .subcommand(with_common(goal(precheck), "1m"))
        .subcommand(with_common(cleanup, "1m"))
        .after_help("Exit codes: 0 nothing is wrong, 1 bad input or not possible, 2 problems found.")
}

fn forwarded(command: ForwardedCommand) -> clap::Command {
    let about = match command {
        ForwardedCommand::Pod => "Shows one pod: the decision, its settings, what is wrong, and what to do",
        ForwardedCommand::Verify => "Compares what is in force in a pod with what it should have",
        ForwardedCommand::Trace => "Follows a packet through the rules in force in a pod: --to IP:PORT",
        ForwardedCommand::Why => "Explains a reason or code, such as foreign-rule; without one, lists them",
    };
    let takes_pod = command != ForwardedCommand::Why;
    let (operand, help) = if takes_pod { ("POD", POD) } else { ("REASON", "The code") };
    clap::Command::new(command.name())
        .about(about)
        .arg(Arg::new("operand").value_name(operand).required(takes_pod).help(help))
        .arg(
            Arg::new("words")
                .value_name("FLAGS")
                .num_args(0..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .help("Flags of redirectctl's command of this name, behind the pod; --help among them lists all"),
        )
}

const POD: &str = "The pod, as NAMESPACE/NAME, or its name in the namespace of -n or the context";

fn job(matches: &ArgMatches) -> Result<RequestedCommand, String> {
    let (name, line) = matches.subcommand().ok_or("a command is missing")?;
    let text = |name: &str| line.get_one::<String>(name).cloned();
    let access = KubectlFlags {
        kubeconfig: text("kubeconfig"),
        context: text("context"),
        namespace: text("namespace"),
        agents: text("agent-namespace"),
        user: text("as"),
        groups: line.get_many("as-group").unwrap_or_default().cloned().collect(),
    };
    let patience = duration("timeout", &text("timeout").unwrap_or_default())?;
    let goal = || {
        let wait = text("wait").map(|wait| duration("wait", &wait)).transpose()?;
        Ok::<_, String>(WaitGoal { wait, ignores_warnings: line.get_flag("ignore-warnings") })
    };
    let scan = |goal| scan::ScanRequest {
        namespace: access.namespace.clone(),
        node: text("node"),
        selector: text("selector"),
        is_json: is_json(line),
        patience,
        goal,
    };
    let all = |name: &str| line.get_many(name).unwrap_or_default().cloned().collect::<Vec<String>>();
    let job = match name {
        "scan" => Job::Scan(scan(goal()?)),
        "watch" => Job::Watch(watch::WatchRequest {
            scan: scan(WaitGoal::default()),
            pause: duration("interval", &text("interval").unwrap_or_default())?,
        }),
        "test" => Job::Test(trial::TrialRequest {
            nodes: all("node"),
            image: text("image"),
            is_agreed: line.get_flag("yes"),
            is_json: is_json(line),
            patience,
        }),
        "bundle" => Job::Bundle(forward::WantedBundle {
            about: match (text("POD"), line.get_flag("all-nodes")) {
                (Some(pod), _) => About::Pod(pod),
                (None, true) => About::AllNodes,
                (None, false) => About::Nodes(all("node")),
            },
            limit: line.get_one("limit").copied().unwrap_or_default(),
            file: text("file").map(Into::into),
            patience,
        }),
        "precheck" => Job::Precheck(precheck::PrecheckRequest { is_json: is_json(line), goal: goal()? }),
        "cleanup" => Job::Cleanup(cleanup::CleanupRequest::of(text("condition-type"), text("taint-key"))),
        _ => {
            let command = ForwardedCommand::ALL.into_iter().find(|command| command.name() == name);
            let words = line.get_many::<String>("words").unwrap_or_default().map(|word| long(word)).collect();
            let command = command.ok_or("this command does not exist")?;
            Job::Forward(forward::ForwardRequest { command, operand: text("operand"), words, patience })
        }
    };
    Ok(RequestedCommand::Job(Box::new(access), job))
}

fn is_json(line: &ArgMatches) -> bool {
    line.get_one::<String>("output").is_some_and(|word| word == "json")
}

fn duration(flag: &str, text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| format!("--{flag}: {text:?} is not a time; write 20s or 2m"))
}

/// As `redirectctl` calls the flag that kubectl shortens to -o.
fn long(word: &str) -> String {
    if word == "-o" { "--output".to_owned() } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job_of(line: &str) -> (KubectlFlags, Job) {
        match read(line.split(' ').map(str::to_owned).collect()) {
            Ok(RequestedCommand::Job(access, job)) => (*access, job),
            other => panic!("{other:?}"),
        }
    }

    fn error_of(line: &str) -> String {
        read(line.split(' ').map(str::to_owned).collect()).expect_err("an error")
    }

    #[test]
    fn the_command_line_is_sound() {
        parser().debug_assert();
    }

    #[test]
    fn flags_of_kubectl_may_stand_anywhere_and_others_go_to_redirectctl() {
        let job = job_of(
            "--context test trace cart-0 --to 10.0.0.1:80 -n shop -o json --as app --kubeconfig=/k --timeout 2m --agent-namespace mesh",
        );
        let access = KubectlFlags {
            kubeconfig: Some("/k".to_owned()),
            context: Some("test".to_owned()),
            namespace: Some("shop".to_owned()),
            agents: Some("mesh".to_owned()),
            ..KubectlFlags::default()
        };
        let words = ["--to", "10.0.0.1:80", "--output", "json", "--as", "app"].map(str::to_owned).to_vec();
        let operand = Some("cart-0".to_owned());
        let wanted = forward::ForwardRequest {
            command: ForwardedCommand::Trace,
            operand,
            words,
            patience: Duration::from_secs(120),
        };
        assert_eq!(job, (access, Job::Forward(wanted)));
    }

    #[test]
    fn a_user_to_ask_as_is_not_the_sender_of_a_traced_packet() {
        let of = |line: &str| {
            let (access, job) = job_of(line);
            let words = if let Job::Forward(wanted) = job { wanted.words } else { Vec::new() };
            (access.user.unwrap_or_default(), access.groups, words)
        };
        let sam = |groups: &[&str], words: &[&str]| {
            let owned = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
            ("sam".to_owned(), owned(groups), owned(words))
        };
        assert_eq!(of("scan --as sam --as-group a --as-group=b"), sam(&["a", "b"], &[]));
        assert_eq!(of("pod shop/cart --as=sam --output json"), sam(&[], &["--output", "json"]));
        let traced = sam(&["a"], &["--to", "10.0.0.1:80", "--as", "app"]);
        assert_eq!(of("trace --as sam shop/cart --to 10.0.0.1:80 --as app --as-group a"), traced);
        assert_eq!(of("--as=sam trace shop/cart --as=7"), sam(&[], &["--as=7"]));
        // A group alone would be asked for with the user's own name, which the API server refuses late.
        let refused = error_of("scan --as-group a");
        assert!(refused.contains("--as <USER>"), "{refused}");
        assert!(error_of("scan --as=").contains("--as"));
    }

    #[test]
    fn waiting_takes_its_time_behind_an_equals_sign() {
        let goal = |line: &str| match job_of(line).1 {
            Job::Scan(wanted) => wanted.goal,
            Job::Precheck(wanted) => wanted.goal,
            Job::Watch(_) | Job::Test(_) | Job::Forward(_) | Job::Bundle(_) | Job::Cleanup(_) => {
                panic!("{line}")
            }
        };
        assert_eq!(goal("scan"), WaitGoal::default());
        let for_seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(goal("scan --wait -o json").wait, for_seconds(300));
        assert_eq!(goal("precheck --wait=90s").wait, for_seconds(90));
        assert!(goal("precheck --ignore-warnings").ignores_warnings);
        assert!(error_of("scan --wait=soon").contains("--wait: \"soon\" is not a time"));
    }

    #[test]
    fn help_behind_the_pod_is_that_of_redirectctl() {
        let (_, Job::Forward(wanted)) = job_of("pod shop/cart --help") else { panic!("no command") };
        assert_eq!(wanted.words, ["--help"]);
        assert!(matches!(read(vec!["pod".to_owned(), "--help".to_owned()]), Ok(RequestedCommand::Print(_))));
    }

    #[test]
    fn a_scan_is_of_all_namespaces_unless_one_is_named() {
        let (_, Job::Scan(all)) = job_of("scan -A --timeout 1m -o json") else { panic!("no scan") };
        assert!(all.is_json && all.namespace.is_none() && all.patience == Duration::from_secs(60));
        let (_, Job::Scan(one)) = job_of("scan -n shop -l app=cart --node n1") else { panic!("no scan") };
        assert_eq!(
            (one.namespace.as_deref(), one.selector.as_deref(), one.node.as_deref()),
            (Some("shop"), Some("app=cart"), Some("n1"))
        );
        let (_, Job::Watch(watch)) = job_of("watch --node n1 --interval 1m") else { panic!("no watch") };
        assert_eq!((watch.scan.node.as_deref(), watch.pause), (Some("n1"), Duration::from_secs(60)));
        assert!(error_of("scan -n shop -A").contains("cannot be used with"));
        assert!(error_of("scan --timeout soon").contains("--timeout"));
        assert!(error_of("scan --output yaml").contains("yaml"));
    }

    #[test]
    fn what_is_missing_is_named() {
        assert!(error_of("pod").contains("POD"));
        assert!(error_of("bundle").contains("POD"));
        assert!(error_of("cleanup n1").contains("n1"));
        assert!(error_of("repair").contains("repair"));
    }
}
