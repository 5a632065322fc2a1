//! Every flag and environment variable of the agent, as data. The parser, the documentation and the warnings come from it.

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// The flag without dashes; none where there is only a variable.
    pub flag: &'static str,
    /// The environment variables: the name of the setting, then other names that are understood.
    pub env: &'static [&'static str],
    /// What it takes.
    pub kind: Kind,
    /// The value where nobody says anything.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
    /// Whether the agent does what it says.
    pub status: Status,
}

/// What a setting takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A text.
    Text,
    /// A boolean; the flag alone means true.
    Switch,
    /// A whole number.
    Number,
    /// A list separated by commas.
    List,
    /// A duration with units, such as `1m30s`.
    Duration,
}

/// Whether the agent does what a setting says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// It does.
    Used,
    /// It is checked, and belongs to the repair of pods, which this agent does not have.
    Repair,
    /// It belongs to ambient mode, which this agent does not have.
    Ambient,
    /// Charts set it; nothing depends on it.
    Unused,
}

impl Status {
    /// What help, documentation and log say about such a setting; nothing where the agent does what it says.
    #[must_use]
    pub const fn remark(self) -> &'static str {
        match self {
            Self::Used => "",
            Self::Repair => {
                "Accepted and not implemented: this agent neither repairs nor deletes nor labels pods."
            }
            Self::Ambient => "Accepted and not implemented: this agent has no ambient mode.",
            Self::Unused => "Accepted; nothing depends on it.",
        }
    }
}

impl Setting {
    /// What it does and, where the agent does not do so, that.
    #[must_use]
    pub fn description(&self) -> String {
        [self.meaning, self.status.remark()].join(" ").trim_end().to_owned()
    }

    /// What people know it by: the variable if there is one, else the flag.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.env.first().copied().unwrap_or(self.flag)
    }
}

impl Kind {
    /// The word for it in the documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Switch => "boolean",
            Self::Number => "number",
            Self::List => "list",
            Self::Duration => "duration",
        }
    }
}

const fn used(
    flag: &'static str,
    env: &'static [&'static str],
    kind: Kind,
    default: &'static str,
    meaning: &'static str,
) -> Setting {
    Setting { flag, env, kind, default, meaning, status: Status::Used }
}

const fn repair(
    flag: &'static str,
    env: &'static [&'static str],
    kind: Kind,
    default: &'static str,
    meaning: &'static str,
) -> Setting {
    Setting { flag, env, kind, default, meaning, status: Status::Repair }
}

const fn ambient(flag: &'static str, env: &'static [&'static str], kind: Kind) -> Setting {
    Setting { flag, env, kind, default: "", meaning: "A setting of ambient mode.", status: Status::Ambient }
}

const fn unused(env: &'static [&'static str], meaning: &'static str) -> Setting {
    Setting { flag: "", env, kind: Kind::Text, default: "", meaning, status: Status::Unused }
}

use Kind::{Duration, List, Number, Switch, Text};

/// Every setting, in the order of the documentation.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    used("cni-conf-name", &["CNI_CONF_NAME"], Text, "", "File to chain into, with either extension; empty: the one the runtime uses. Without chaining: the file to write."),
    used("chained-cni-plugin", &["CHAINED_CNI_PLUGIN"], Switch, "true", "Whether the entry goes into another plugin's list; otherwise it gets a file of its own, as Multus wants it."),
    used("cni-network-config", &["CNI_NETWORK_CONFIG"], Text, "", "Template of the entry, with placeholders, instead of the built-in one."),
    used("cni-network-config-file", &["CNI_NETWORK_CONFIG_FILE"], Text, "", "File with such a template; wins over the text."),
    used("log-level", &["LOG_LEVEL"], Text, "warn", "What __LOG_LEVEL__ stands for in a template."),
    used("istio-owned-cni-config", &["ISTIO_OWNED_CNI_CONFIG"], Switch, "false", "Whether a copy of the runtime's list, with the entry, is put in front of it; the list itself stays untouched. Needs chaining."),
    used("istio-owned-cni-config-filename", &["ISTIO_OWNED_CNI_CONFIG_FILENAME", "ISTIO_OWNED_CNI_CONF_FILENAME"], Text, "02-istio-cni.conflist", "Name of that copy."),
    used("mounted-cni-net-dir", &["MOUNTED_CNI_NET_DIR"], Text, "/host/etc/cni/net.d", "Where the node's network configuration directory is mounted."),
    used("mounted-cni-bin-dir", &["MOUNTED_CNI_BIN_DIR"], Text, "/host/opt/cni/bin", "Where the node's plugin directory is mounted."),
    used("mounted-cni-netns-dir", &["MOUNTED_CNI_NETNS_DIR"], Text, "/host/var/run/netns", "Where the directory is mounted in which the node's container runtime keeps network namespaces; for the drift watch."),
    used("source-cni-bin-dir", &["SOURCE_CNI_BIN_DIR"], Text, "/opt/cni/bin", "Directory of the image whose files are copied to the plugin directory."),
    used("cni-agent-run-dir", &["CNI_AGENT_RUN_DIR"], Text, "/var/run/istio-cni", "Directory of the plugin's kubeconfig and of the sockets; the same path on the node and in the container."),
    used("service-account-dir", &["SERVICE_ACCOUNT_DIR"], Text, "/var/run/secrets/kubernetes.io/serviceaccount", "Directory of the service account's token and authority."),
    used("kubeconfig-mode", &["KUBECONFIG_MODE"], Number, "0600", "File mode of the plugin's kubeconfig: octal with a leading 0, otherwise decimal."),
    used("kubeconfig-token-file", &["KUBECONFIG_TOKEN_FILE"], Switch, "false", "Whether the kubeconfig names a token file beside it; otherwise it holds the token."),
    used("plugin-service-account", &["PLUGIN_SERVICE_ACCOUNT"], Text, "istio-cni-plugin", "The plugin's own service account, in the agent's namespace; empty: the plugin uses the agent's token, which ends with the agent's pod."),
    used("plugin-token-lifetime", &["PLUGIN_TOKEN_LIFETIME"], Duration, "24h", "How long a token of that account lasts, 1h at least; it is renewed when a quarter of that has passed, and when the agent ends."),
    used("cni-conf-group-read", &["CNI_CONF_GROUP_READ"], Switch, "false", "Whether files of ours in the configuration directory have mode 0640; otherwise 0600."),
    used("kube-ca-file", &["KUBE_CA_FILE"], Text, "", "File of the API server's authority; empty: that of the service account."),
    used("skip-tls-verify", &["SKIP_TLS_VERIFY"], Switch, "false", "Whether the API server's certificate is not checked."),
    used("monitoring-port", &["MONITORING_PORT"], Number, "15014", "Port of the metrics; 0 or less: none."),
    used("health-port", &["HEALTH_PORT"], Number, "8000", "Port of /healthz and /readyz."),
    used("monitoring-address", &["MONITORING_ADDRESS"], Text, "", "Address of the metrics: an IP address or localhost; empty: every address."),
    used("health-address", &["HEALTH_ADDRESS"], Text, "", "Address of /healthz and /readyz: an IP address or localhost; empty: every address, for a kubelet that probes the pod's."),
    used("ctrlz_port", &[], Number, "9876", "Port of run-time control; 0: none."),
    used("ctrlz_address", &[], Text, "localhost", "Address of run-time control."),
    used("daemonset-name", &["DAEMONSET_NAME"], Text, "istio-cni-node", "The agent's own DaemonSet, which tells an upgrade from removal."),
    used("settings-dir", &["SETTINGS_DIR"], Text, "", "Folder of a mounted ConfigMap, from which some settings are read again whenever it changes; empty: none."),
    used("", &["LOG_OUTPUT_LEVEL"], Text, "", "What flag --log_output_level says, where that is not given."),
    used("", &["EXCLUDE_NAMESPACES"], List, "", "Namespaces whose pods are left alone."),
    used("", &["POD_NAMESPACE"], Text, "", "The agent's namespace."),
    used("", &["POD_NAME"], Text, "", "The agent's pod, which its events are about."),
    used("", &["POD_IP"], Text, "", "The agent's own address. If it is the node's, the plugin's STATUS may wait for the agent."),
    used("", &["HOST_IP"], Text, "", "The node's address."),
    used("", &["NODE_NAME"], Text, "", "The node's name."),
    used("", &["KUBERNETES_NODE_NAME"], Text, "", "The node's name, where NODE_NAME is not given."),
    used("", &["NATIVE_NFTABLES"], Switch, "false", "Whether the plugin writes native nftables rules."),
    used("", &["NFT_SETS"], Switch, "false", "Whether native nftables rules gather long lists of ports and ranges in sets."),
    used("", &["STRICT_CAPTURE"], Switch, "false", "Whether pods get strict capture, unless their annotation says otherwise (docs/capture.md)."),
    used("", &["KUBERNETES_SERVICE_HOST"], Text, "", "The API server's host. Required."),
    used("", &["KUBERNETES_SERVICE_PORT"], Text, "", "The API server's port. Required."),
    used("", &["KUBERNETES_SERVICE_PROTOCOL"], Text, "https", "The API server's protocol."),
    used("drift-watch-interval", &["DRIFT_WATCH_INTERVAL"], Duration, "0s", "How often every pod of the node is compared with what the plugin made of it; 0s: never, else 1s at least. Changes nothing."),
    used("", &["ISTIO_OUTBOUND_OWNER_GROUPS"], Text, "", "What the container runtime's environment, which the plugin obeys, says; for the drift watch."),
    used("", &["ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE"], Text, "", "Likewise."),
    used("", &["ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"], Text, "", "Likewise."),
    repair("repair-enabled", &["REPAIR_ENABLED"], Switch, "true", "Whether broken pods are dealt with."),
    repair("", &["REPAIR_REPAIR_PODS"], Switch, "false", "Whether broken pods are repaired in place."),
    repair("repair-delete-pods", &["REPAIR_DELETE_PODS"], Switch, "false", "Whether broken pods are deleted."),
    repair("repair-label-pods", &["REPAIR_LABEL_PODS"], Switch, "false", "Whether broken pods are labelled."),
    repair("repair-broken-pod-label-key", &["REPAIR_BROKEN_POD_LABEL_KEY"], Text, "cni.istio.io/uninitialized", "The label's key."),
    repair("repair-broken-pod-label-value", &["REPAIR_BROKEN_POD_LABEL_VALUE"], Text, "true", "The label's value."),
    repair("repair-node-name", &["REPAIR_NODE_NAME"], Text, "", "The node whose pods are watched."),
    repair("repair-sidecar-annotation", &["REPAIR_SIDECAR_ANNOTATION"], Text, "sidecar.istio.io/status", "Annotation of the pods that are watched; empty: any pod."),
    repair("repair-init-container-name", &["REPAIR_INIT_CONTAINER_NAME"], Text, "istio-validation", "Container whose end shows a broken pod."),
    repair("repair-init-container-termination-message", &["REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE"], Text, "", "Its message; empty: any."),
    repair("repair-init-container-exit-code", &["REPAIR_INIT_CONTAINER_EXIT_CODE"], Number, "126", "Its exit code; 0: any."),
    repair("repair-label-selectors", &["REPAIR_LABEL_SELECTORS"], Text, "", "Label selectors of the pods."),
    repair("repair-field-selectors", &["REPAIR_FIELD_SELECTORS"], Text, "", "Field selectors of the pods."),
    repair("", &["FORCE_IPTABLES_BINARY"], Text, "", "Rule variant for repairs: legacy or nft."),
    repair("", &["ALLOW_SWITCH_TO_HOST_NS"], Switch, "false", "Whether repairs look for namespaces from the node's own."),
    ambient("ambient-enabled", &["AMBIENT_ENABLED"], Switch),
    ambient("ztunnel-uds-address", &["ZTUNNEL_UDS_ADDRESS"], Text),
    ambient("enable-ambient-detection-retry", &["ENABLE_AMBIENT_DETECTION_RETRY"], Switch),
    ambient("", &["AMBIENT_ENABLEMENT_SELECTOR"], Text),
    ambient("", &["AMBIENT_DNS_CAPTURE"], Switch),
    ambient("", &["AMBIENT_IPV6"], Switch),
    ambient("", &["AMBIENT_DISABLE_SAFE_UPGRADE"], Switch),
    ambient("", &["AMBIENT_RECONCILE_POD_RULES_ON_STARTUP"], Switch),
    unused(&["CURRENT_AGENT_VERSION"], "Set by charts."),
    unused(&["REPAIR_RUN_AS_DAEMON"], "Set by charts."),
    unused(&["GOMEMLIMIT"], "A limit for another run-time."),
    unused(&["GOMAXPROCS"], "A limit for another run-time."),
];
