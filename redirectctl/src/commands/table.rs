//! The commands and their help.

use presentation::flags;
use reasons::AGENT_HEALTH;
use settings_cli::{CommandLine, Pages};
use settings_table::{SettingSpec, ValueKind};

use super::{CommandOutput, Given, NETNS_DIR, in_force, planned};
use crate::error::PodInputError;
use crate::node::CONF_DIR;
use crate::plan::PlanLanguage;
use crate::processes::PROC;
use crate::text_writer::ColorChoice;

/// A command.
pub struct Definition {
    /// Its name behind the program's, as help shows it.
    pub full_name: &'static str,
    /// Another word for it.
    pub alias: Option<&'static str>,
    /// What it does, in a sentence.
    pub about: &'static str,
    /// What it works on, and how many of that have to be given.
    pub operands: &'static [(&'static str, &'static str)],
    /// How many operands have to be given.
    pub needs: usize,
    /// Its flags.
    pub rows: &'static [SettingSpec],
    /// Whether it takes the settings of a redirection as well.
    pub takes_settings: bool,
    /// What help says besides the flags.
    pub pages: Pages,
    /// What it does.
    pub run: fn(&Given) -> Result<CommandOutput, PodInputError>,
}

impl Definition {
    /// Its word.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.full_name.strip_prefix("redirectctl ").unwrap_or(self.full_name)
    }

    /// Its command line.
    #[must_use]
    pub fn line(&self) -> CommandLine {
        let settings = flags::rows().filter(|_| self.takes_settings);
        CommandLine {
            name: self.full_name,
            rows: self.rows.iter().copied().chain(settings).collect(),
            operands: self.operands,
            ignores_rest: false,
            ..self.program().command_line()
        }
    }

    /// What it lacks of its operands.
    pub(super) fn missing(&self, given: &[String]) -> Vec<String> {
        let needed = self.operands.iter().take(self.needs).enumerate();
        let lacking = needed.filter(|(index, _)| given.get(*index).is_none_or(String::is_empty));
        lacking.map(|(_, (name, what))| format!("{name} is missing: {what}")).collect()
    }

    /// Words of a closed set that are none of it.
    pub(super) fn wrong_words(&self, given: &Given) -> Vec<String> {
        let rows = self.rows.iter().filter_map(|row| Some((row.flag?, row.takes.words()?)));
        let wrong = rows.filter_map(|(flag, words)| {
            let text = given.flags.get(flag)?;
            (!words.contains(&text.as_str()))
                .then(|| format!("flag --{flag}: {text:?} is not one of {}", words.join(", ")))
        });
        wrong.chain(self.empty_paths(given)).chain(given.addresses().err()).collect()
    }

    /// Flags that name no file: a script's variable that is not set must not mean something else.
    fn empty_paths(&self, given: &Given) -> Vec<String> {
        let paths = self.rows.iter().filter(|row| matches!(row.takes, ValueKind::Path));
        let empty = paths
            .filter_map(|row| row.flag)
            .filter(|flag| given.flags.get(*flag).is_some_and(String::is_empty));
        empty.map(|flag| format!("flag --{flag}: is empty; name a path, or leave the flag out")).collect()
    }
}

const EXIT_STATUS: &[(u8, &str)] = &[
    (0, "Done, and nothing is wrong. Notes are not trouble."),
    (1, "Bad input, or it could not be done. Standard error says all that is wrong."),
    (2, "Done, and something is wrong: at least one warning or error was found."),
];
const FILES: &[(&str, &str)] = &[
    ("/etc/cni/net.d", "The network configurations of the node's runtime; the first by name counts."),
    ("/var/run/netns", "The network namespaces of the node's pods."),
    (
        "/var/run/istio-cni/istio-cni-kubeconfig",
        "The plugin's kubeconfig, the default. It may get single pods.",
    ),
    (
        "/etc/kubernetes/kubelet.conf, /var/lib/kubelet/kubeconfig",
        "The kubelet's, used where the plugin's is refused. It may list the pods of its node. That of k3s, RKE2, MicroK8s and k0s is found too.",
    ),
];
const SEE_ALSO: &[&str] =
    &["istio-iptables(8)", "istio-validation(8)", "istio-cni(8)", "iptables(8)", "nft(8)", "ip-netns(8)"];

const fn pages(examples: &'static [(&'static str, &'static str)]) -> Pages {
    Pages { examples, exit_status: EXIT_STATUS, files: FILES, see_also: SEE_ALSO }
}

/// What help of the program itself says.
pub const PROGRAM: Pages = pages(&[
    ("Every pod of this node that is not as it should be", "redirectctl scan"),
    ("One of them, with what was seen and what to do", "redirectctl pod shop/cart-0"),
    ("What a reason or code means", "redirectctl why foreign-rule"),
    ("The rules a pod will have, each with who asked for it", "redirectctl plan -f pod.yaml"),
]);

/// What is read in place of asking the API server.
const fn file(meaning: &'static str) -> SettingSpec {
    SettingSpec { short: Some('f'), ..SettingSpec::new(ValueKind::Path, meaning).flag("file") }
}

const OUTPUT: SettingSpec =
    SettingSpec::new(ValueKind::Choice(&["text", "json"]), "How the answer is written.")
        .flag("output")
        .default("text");
const COLOR: SettingSpec = SettingSpec::new(
    ValueKind::Choice(ColorChoice::WORDS),
    "Whether text is coloured; auto colours it on a terminal, unless NO_COLOR is set or TERM is dumb.",
)
.flag("color")
.default("auto");
const FILE: SettingSpec = file("The pod's manifest, or a workload's, in YAML or JSON; - is standard input.");
const PODS_FILE: SettingSpec = file(
    "The node's pods in YAML or JSON, as kubectl get pods -o json prints them; - is standard input. Nodes, namespaces, events and runtime classes may be among them.",
);
const POD: SettingSpec =
    SettingSpec::new(ValueKind::Text("NAMESPACE/NAME"), "A pod, as the API server has it.").flag("pod");
const KUBECONFIG: SettingSpec = SettingSpec::new(
    ValueKind::Path,
    "How the API server is reached. Without it KUBECONFIG counts, then in a pod its service account, on a node the plugin's kubeconfig and the kubelet's, then the user's.",
)
.flag("kubeconfig");
const CONF: SettingSpec = SettingSpec::new(
    ValueKind::Path,
    "The network configurations of the node's runtime, whose entry of istio-cni says how pods are programmed.",
)
.flag("cni-conf-dir");
const ADDRESS: SettingSpec = SettingSpec::new(
    ValueKind::List("ADDRESSES"),
    "The pod's addresses, which decide about address families. Without them those of the pod's status count, or of the network namespace.",
)
.flag("address");
const NODE_CONF: SettingSpec = SettingSpec { default: CONF_DIR, ..CONF };
const AGENT: SettingSpec = SettingSpec::new(
    ValueKind::Text("IP:PORT"),
    "Where this node's agent says whether it is ready. Its manifest has it here; Istio's chart has it at the address of its pod.",
)
.flag("agent")
.default(AGENT_HEALTH);
const NETNS_FOLDER: SettingSpec =
    SettingSpec::new(ValueKind::Path, "Where the node's runtime keeps network namespaces.")
        .flag("netns-dir")
        .default(NETNS_DIR);

const PROC_FOLDER: SettingSpec =
    SettingSpec::new(ValueKind::Path, "Where the node's processes are shown.").flag("proc-dir").default(PROC);

/// All commands.
pub const COMMANDS: &[Definition] = &[
    Definition {
        full_name: "redirectctl plan",
        alias: Some("explain"),
        about: "Shows the rules that settings or a pod ask for, each with its purpose and who asked for it.",
        operands: &[],
        needs: 0,
        rows: &[
            FILE,
            POD,
            KUBECONFIG,
            CONF,
            ADDRESS,
            SettingSpec::new(ValueKind::Choice(PlanLanguage::WORDS), "The language of the plan; svg is a picture of the chains.")
                .flag("format")
                .default("text"),
            OUTPUT,
            COLOR,
        ],
        takes_settings: true,
        pages: pages(&[
            ("What a sidecar gets", "redirectctl plan -b '*' -i '*' -d 15090,15021,15020 --address 10.1.0.2"),
            ("A pod, before it is created", "redirectctl plan -f pod.yaml"),
            ("A pod of the cluster, as input for iptables-restore", "redirectctl plan --pod shop/cart-0 --format restore"),
            ("A picture of the chains", "redirectctl plan -f pod.yaml --format svg >chains.svg"),
        ]),
        run: planned::plan,
    },
    Definition {
        full_name: "redirectctl verify",
        alias: Some("check"),
        about: "Compares a network namespace with what a pod or settings ask for, and explains every difference.",
        operands: &[],
        needs: 0,
        rows: &[
            SettingSpec::new(
                ValueKind::Path,
                "The network namespace. Without it, that of --pod, found by its addresses, else the one this runs in.",
            )
            .flag("netns"),
            FILE,
            POD,
            KUBECONFIG,
            CONF,
            NETNS_FOLDER,
            PROC_FOLDER,
            OUTPUT,
            COLOR,
        ],
        takes_settings: true,
        pages: pages(&[
            ("A pod of this node, as root", "redirectctl verify --pod shop/cart-0"),
            ("A pod's namespace against its manifest", "redirectctl verify --netns /run/netns/cni-1234 -f pod.yaml"),
            ("A namespace that istio-iptables has programmed", "redirectctl verify --netns /run/netns/demo -b '*' -i '*'"),
            ("For scripts", "redirectctl verify --netns /run/netns/demo -f pod.yaml --output json || echo broken"),
        ]),
        run: in_force::verify,
    },
    Definition {
        full_name: "redirectctl netns",
        alias: None,
        about: "Shows what a network namespace holds: rules and their backend, who listens, and, where the pod is given, what is wrong.",
        operands: &[("PATH", "the network namespace, such as /run/netns/cni-1234 or /proc/4711/ns/net")],
        needs: 1,
        rows: &[FILE, POD, KUBECONFIG, CONF, OUTPUT, COLOR],
        takes_settings: false,
        pages: pages(&[
            ("What is in force", "redirectctl netns /run/netns/cni-1234"),
            ("And whether it is right", "redirectctl netns /proc/4711/ns/net --pod shop/cart-0"),
        ]),
        run: in_force::netns,
    },
    Definition {
        full_name: "redirectctl pod",
        alias: None,
        about: "Shows one pod of this node: the decision and its reason, every setting with who said it, what is in force, what is wrong and what to do.",
        operands: &[("POD", "the pod, as NAMESPACE/NAME")],
        needs: 1,
        rows: &[FILE, KUBECONFIG, NODE_CONF, NETNS_FOLDER, PROC_FOLDER, AGENT, OUTPUT, COLOR],
        takes_settings: false,
        pages: pages(&[
            ("On the pod's node, as root", "redirectctl pod shop/cart-0"),
            ("Without the API server", "redirectctl pod shop/cart-0 -f pods.json"),
        ]),
        run: in_force::pod,
    },
    Definition {
        full_name: "redirectctl scan",
        alias: None,
        about: "Checks every pod of this node in one pass, and lists those with problems.",
        operands: &[("WHAT", "may be the word node: nothing else can be scanned")],
        needs: 0,
        rows: &[
            PODS_FILE,
            KUBECONFIG,
            SettingSpec::new(ValueKind::Text("NAME"), "The node's name: pods of other nodes do not count. Without it NODE_NAME counts for the API server, then the machine's name.").flag("node"),
            NODE_CONF,
            NETNS_FOLDER,
            PROC_FOLDER,
            AGENT,
            SettingSpec::new(ValueKind::Choice(&["text", "json", "prometheus"]), "How the answer is written.")
                .flag("output")
                .default("text"),
            COLOR,
        ],
        takes_settings: false,
        pages: pages(&[
            ("On a node, as root", "redirectctl scan"),
            ("With pods from elsewhere", "kubectl get pods -A -o json --field-selector spec.nodeName=n1 | redirectctl scan -f -"),
            (
                "For the textfile collector of Prometheus' node exporter",
                "redirectctl scan --output prometheus >/var/lib/node_exporter/redirectctl.prom",
            ),
        ]),
        run: in_force::scan,
    },
    Definition {
        full_name: "redirectctl watch",
        alias: None,
        about: "Shows what the mesh's rules count, live, to show which rules match traffic. On a terminal all rules are drawn repeatedly, elsewhere each rule that counted is a line.",
        operands: &[("POD", "the pod, as NAMESPACE/NAME; without it --file or --netns names what is watched, or it is the network namespace this runs in")],
        needs: 0,
        rows: &[
            FILE,
            SettingSpec::new(ValueKind::Path, "The network namespace. Without it, the pod's, which is found by its addresses.").flag("netns"),
            KUBECONFIG,
            NODE_CONF,
            NETNS_FOLDER,
            PROC_FOLDER,
            SettingSpec::new(ValueKind::Switch, "Shows what was counted until now, and ends.").flag("once").default("false"),
            SettingSpec::new(ValueKind::Duration, "How long it waits between two looks: 100ms to 1h.").flag("interval").default("1s"),
            SettingSpec::new(ValueKind::Choice(&["text", "json"]), "How it is written; json is a document on each line.").flag("output").default("text"),
            COLOR,
        ],
        takes_settings: false,
        pages: pages(&[
            ("Which rule does the traffic of a pod meet?", "redirectctl watch shop/cart-0"),
            ("What was counted until now", "redirectctl watch --netns /run/netns/cni-1234 --once"),
            ("Each rule with what it is for, without the API server", "redirectctl watch -f pod.yaml --netns /run/netns/cni-1234 --once"),
            ("For programs", "redirectctl watch shop/cart-0 --interval 10s --output json"),
        ]),
        run: super::watch::watch,
    },
    Definition {
        full_name: "redirectctl cni",
        alias: None,
        about: "Asks the installed plugin whether a pod is redirected as planned, as the node's runtime would: CHECK, which changes nothing.",
        operands: &[
            ("COMMAND", "check: no other command of plugins is sent"),
            ("POD", "the pod, as NAMESPACE/NAME; not needed where --file has one pod"),
        ],
        needs: 1,
        rows: &[
            file("The pod's manifest in YAML or JSON, which the plugin then reads in place of the API server's; - is standard input."),
            SettingSpec::new(ValueKind::Path, "The pod's network namespace. Without it, the one that has the pod's addresses.").flag("netns"),
            KUBECONFIG,
            NODE_CONF,
            NETNS_FOLDER,
            PROC_FOLDER,
            SettingSpec::new(ValueKind::Path, "Where the node's plugins are.").flag("cni-bin-dir").default(crate::cni::BIN_DIR),
            SettingSpec::new(ValueKind::Path, "Where the node's runtime remembers results of plugins.")
                .flag("cni-cache-dir")
                .default(crate::cni::cache::CACHE_DIR),
            SettingSpec::new(ValueKind::Switch, "Shows what would be sent, and sends nothing.").flag("dry-run").default("false"),
            OUTPUT,
            COLOR,
        ],
        takes_settings: false,
        pages: pages(&[
            ("Would CHECK fail for a pod of this node?", "redirectctl cni check shop/cart-0"),
            ("What a runtime would send", "redirectctl cni check shop/cart-0 --dry-run"),
            ("Without the API server", "redirectctl cni check -f pod.yaml --netns /run/netns/cni-1234"),
        ]),
        run: super::cni::cni,
    },
    Definition {
        full_name: "redirectctl trace",
        alias: None,
        about: "Follows one packet through the rules of a plan, or of a network namespace with all other programs' rules: every rule that is about it, the one that decides, and where it ends.",
        operands: &[],
        needs: 0,
        rows: &[
            SettingSpec::new(
                ValueKind::Text("WHO"),
                "Who sends the packet: app, proxy, outside, or a user of the pod as UID or UID:GID.",
            )
            .flag("as")
            .default("app"),
            SettingSpec::new(ValueKind::Text("IP:PORT"), "Where the packet goes; with /udp behind it, a datagram.").flag("to"),
            SettingSpec::new(ValueKind::Text("IP"), "Where the packet comes from, with or without a port.").flag("from"),
            SettingSpec::new(ValueKind::Text("NAME"), "By which interface it comes in or goes out.").flag("interface"),
            SettingSpec::new(ValueKind::Text("MARK"), "Its mark.").flag("mark"),
            SettingSpec::new(ValueKind::Choice(crate::packet::STATES), "What connection tracking says of it.").flag("state").default("new"),
            SettingSpec::new(ValueKind::Switch, "Shows also the rules that are not about it, and why not.").flag("every").default("false"),
            SettingSpec::new(
                ValueKind::Path,
                "A network namespace, whose rules are followed in place of a plan's. Without it, that of --pod, found by its addresses.",
            )
            .flag("netns"),
            FILE,
            POD,
            KUBECONFIG,
            CONF,
            NETNS_FOLDER,
            PROC_FOLDER,
            ADDRESS,
            SettingSpec::new(ValueKind::Choice(&["text", "svg"]), "Text, or a picture of the packet's way.")
                .flag("format")
                .default("text"),
            OUTPUT,
            COLOR,
        ],
        takes_settings: true,
        pages: pages(&[
            ("Where does a call of the application go?", "redirectctl trace -f pod.yaml --as app --to 198.51.100.1:443"),
            (
                "A client calls the pod; with all rules that are in force there",
                "redirectctl trace --netns /run/netns/cni-1234 --as outside --to 10.1.0.2:8080",
            ),
            ("The same as a picture", "redirectctl trace -f pod.yaml --to 198.51.100.1:443 --format svg >way.svg"),
            ("A DNS query, with every rule it meets", "redirectctl trace -f pod.yaml --to 10.96.0.10:53/udp --every"),
        ]),
        run: planned::trace,
    },
    Definition {
        full_name: "redirectctl diff",
        alias: None,
        about: "Compares two pods or configurations: the rules that change, and exactly the traffic treated differently.",
        operands: &[
            ("BEFORE", "a pod's manifest, or flags:WORDS for flags of istio-iptables"),
            ("AFTER", "likewise, what takes its place"),
        ],
        needs: 2,
        rows: &[ADDRESS, CONF, OUTPUT, COLOR],
        takes_settings: false,
        pages: pages(&[
            ("What an annotation changes", "redirectctl diff before.yaml after.yaml"),
            (
                "What a flag changes",
                "redirectctl diff 'flags:-b * -i *' 'flags:-b * -i * -o 3306' --address 10.1.0.2,fd00::2",
            ),
        ]),
        run: planned::diff,
    },
    Definition {
        full_name: "redirectctl bundle",
        alias: None,
        about: "Writes an archive for a support ticket: the scan, reports and rules of the node's pods, configuration, metrics, what the plugin decided, the machine. Only fields that are known to hold no secret are copied.",
        operands: &[("FILE", "the archive, which must not be there; - is standard output; without it redirectctl-TIME.tar.gz in this folder")],
        needs: 0,
        rows: &[
            PODS_FILE,
            KUBECONFIG,
            SettingSpec::new(ValueKind::Text("NAME"), "The node's name. Without it NODE_NAME counts, then the machine's name.").flag("node"),
            NODE_CONF,
            NETNS_FOLDER,
            PROC_FOLDER,
            SettingSpec::new(ValueKind::Path, "Where the node's plugins are.").flag("cni-bin-dir").default(crate::cni::BIN_DIR),
            AGENT,
            SettingSpec::new(ValueKind::Text("IP:PORT"), "Where the agent serves metrics. Without it, port 15014 of its pod, or of this machine.")
                .flag("metrics"),
            OUTPUT,
            COLOR,
        ],
        takes_settings: false,
        pages: pages(&[
            ("On a node, as root", "redirectctl bundle"),
            ("Into a file of this name, without the API server", "redirectctl bundle /tmp/ticket-7.tar.gz -f pods.json"),
        ]),
        run: super::bundle::bundle,
    },
    Definition {
        full_name: "redirectctl why",
        alias: None,
        about: "Explains a reason or code: findings, reasons of skipped pods, of the validation and of repairs, the agent's events, codes of the plugin's errors, exit codes.",
        operands: &[("REASON", "such as foreign-rule, no_proxy, rules-not-in-effect, RepairBrokenPod, cni-11 or exit-126; without it, all are listed")],
        needs: 0,
        rows: &[COLOR],
        takes_settings: false,
        pages: pages(&[
            ("A finding", "redirectctl why nobody-listens"),
            ("A reason in the plugin's log", "redirectctl why not_injected"),
            ("All of them", "redirectctl why"),
        ]),
        run: super::explain,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_definition_is_sound() {
        for command in COMMANDS {
            command.line().parser().debug_assert();
        }
        super::super::whole().debug_assert();
    }

    #[test]
    fn every_command_has_examples_of_itself() {
        for command in COMMANDS {
            let examples = command.pages.examples;
            assert!(examples.iter().all(|(_, line)| line.contains(command.full_name)), "{}", command.name());
        }
    }
}
