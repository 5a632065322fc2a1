//! Every flag and environment variable of the agent, as data. The parser, the documentation and the warnings come from it.

use cni_core::sandboxed;
pub use settings_table::{Row, Status, Takes};

use Takes::{Duration, Number, Path, Switch};

const TEXT: Takes = Takes::Text("VALUE");
const LIST: Takes = Takes::List("LIST");
/// Charts set it for the reference's own programs.
const UNUSED: Status = Status::WithoutEffect("it is not used");

const fn used(
    flag: &'static str,
    env: &'static [&'static str],
    takes: Takes,
    default: &'static str,
    meaning: &'static str,
) -> Row {
    let row = Row::new(takes, meaning).env(env).default(default);
    if flag.is_empty() { row } else { row.flag(flag) }
}

const fn unused(env: &'static [&'static str], meaning: &'static str) -> Row {
    used("", env, TEXT, "", meaning).status(UNUSED)
}

/// Every setting, in the order of the documentation.
#[rustfmt::skip]
pub const SETTINGS: &[Row] = &[
    used("cni-conf-name", &["CNI_CONF_NAME"], TEXT, "", "File to chain into, with either extension; empty: the one the runtime uses. Without chaining: the file to write."),
    used("chained-cni-plugin", &["CHAINED_CNI_PLUGIN"], Switch, "true", "Put the entry into another plugin's list; otherwise write a standalone file, as for Multus."),
    used("cni-network-config", &["CNI_NETWORK_CONFIG"], TEXT, "", "Template of the entry, with placeholders, instead of the built-in one."),
    used("cni-network-config-file", &["CNI_NETWORK_CONFIG_FILE"], Path, "", "File with such a template; wins over the text."),
    used("log-level", &["LOG_LEVEL"], TEXT, "warn", "Value of __LOG_LEVEL__ in a template."),
    used("istio-owned-cni-config", &["ISTIO_OWNED_CNI_CONFIG"], Switch, "false", "Put a copy of the runtime's list, with the entry, in front of it; the list itself stays untouched. Needs chaining."),
    used("istio-owned-cni-config-filename", &["ISTIO_OWNED_CNI_CONFIG_FILENAME", "ISTIO_OWNED_CNI_CONF_FILENAME"], TEXT, "02-istio-cni.conflist", "Name of that copy."),
    used("mounted-cni-net-dir", &["MOUNTED_CNI_NET_DIR"], Path, "/host/etc/cni/net.d", "Where the node's network configuration directory is mounted."),
    used("mounted-cni-bin-dir", &["MOUNTED_CNI_BIN_DIR"], Path, "/host/opt/cni/bin", "Where the node's plugin directory is mounted."),
    used("mounted-cni-netns-dir", &["MOUNTED_CNI_NETNS_DIR"], Path, "/host/var/run/netns", "Mount point of the container runtime's directory of network namespaces."),
    used("mounted-proc-dir", &["MOUNTED_PROC_DIR"], Path, "/host/proc", "Mount point of the host's /proc, used to find a namespace's owner."),
    used("source-cni-bin-dir", &["SOURCE_CNI_BIN_DIR"], Path, "/opt/cni/bin", "Directory of the image whose files are copied to the plugin directory."),
    used("cni-agent-run-dir", &["CNI_AGENT_RUN_DIR"], Path, "/var/run/istio-cni", "Directory of the plugin's kubeconfig and of the sockets; the same path on the node and in the container."),
    used("service-account-dir", &["SERVICE_ACCOUNT_DIR"], Path, "/var/run/secrets/kubernetes.io/serviceaccount", "Directory of the service account's token and authority."),
    used("kubeconfig-mode", &["KUBECONFIG_MODE"], Number, "0600", "File mode of the plugin's kubeconfig: octal with a leading 0, otherwise decimal."),
    used("kubeconfig-token-file", &["KUBECONFIG_TOKEN_FILE"], Switch, "false", "Write the token to a file beside the kubeconfig, which names it; otherwise the kubeconfig holds the token."),
    used("plugin-service-account", &["PLUGIN_SERVICE_ACCOUNT"], TEXT, "istio-cni-plugin", "The plugin's own service account, in the agent's namespace; empty: the plugin uses the agent's token, which ends with the agent's pod."),
    used("plugin-token-lifetime", &["PLUGIN_TOKEN_LIFETIME"], Duration, "24h", "Lifetime of a token of that account, minimum 1h; the agent renews it after a quarter of that, and at shutdown."),
    used("cni-conf-group-read", &["CNI_CONF_GROUP_READ"], Switch, "false", "Give the agent's files in the configuration directory mode 0640 instead of 0600."),
    used("ready-before-called", &["READY_BEFORE_CALLED"], Switch, "false", "Be ready also where the node's files leave open whether the runtime calls the plugin, and no call was seen (docs/reference/agent.md)."),
    used("kube-ca-file", &["KUBE_CA_FILE"], Path, "", "File of the API server's authority; empty: that of the service account."),
    used("skip-tls-verify", &["SKIP_TLS_VERIFY"], Switch, "false", "Skip verification of the API server's certificate."),
    used("monitoring-port", &["MONITORING_PORT"], Number, "15014", "Port of the metrics; 0 or less: none."),
    used("health-port", &["HEALTH_PORT"], Number, "8000", "Port of /healthz and /readyz."),
    used("monitoring-address", &["MONITORING_ADDRESS"], TEXT, "", "Address of the metrics: an IP address or localhost; empty: every address."),
    used("health-address", &["HEALTH_ADDRESS"], TEXT, "", "Address of /healthz and /readyz: an IP address or localhost; empty: every address, for a kubelet that probes the pod's."),
    used("ctrlz_port", &[], Number, "9876", "Port of run-time control; 0: none."),
    used("ctrlz_address", &[], TEXT, "localhost", "Address of run-time control."),
    used("daemonset-name", &["DAEMONSET_NAME"], TEXT, "istio-cni-node", "The agent's own DaemonSet, used to distinguish an upgrade from removal."),
    used("settings-dir", &["SETTINGS_DIR"], Path, "", "Folder of a mounted ConfigMap; the agent rereads some settings from it whenever it changes; empty: none."),
    used("landlock", &["LANDLOCK"], Switch, "true", "Where the kernel has Landlock, the agent confines itself to the directories of these settings (docs/reference/privileges.md)."),
    used("", &["LOG_OUTPUT_LEVEL"], Takes::Levels, "", "Log levels, if flag --log_output_level is not given."),
    used("", &["EXCLUDE_NAMESPACES"], LIST, "", "Namespaces whose pods are skipped."),
    used("", &["POD_NAMESPACE"], TEXT, "", "The agent's namespace."),
    used("", &["POD_NAME"], TEXT, "", "The agent's pod, which its events are about."),
    used("", &["POD_IP"], TEXT, "", "The agent's own address. If it is the node's, the plugin's STATUS may wait for the agent."),
    used("", &["HOST_IP"], TEXT, "", "The node's address."),
    used("", &["NODE_NAME"], TEXT, "", "The node's name."),
    used("", &["KUBERNETES_NODE_NAME"], TEXT, "", "The node's name, if NODE_NAME is not given."),
    used("", &["NATIVE_NFTABLES"], Switch, "false", "Let the plugin write native nftables rules."),
    used("", &["NFT_SETS"], Switch, "false", "Gather long lists of ports and ranges in sets of native nftables."),
    used("", &["STRICT_CAPTURE"], Switch, "false", "Give pods strict capture, unless their annotation says otherwise (docs/concepts/capture.md)."),
    used("", &["ACCEPTED_RULES"], TEXT, "", "Rules of other programs that are accepted in pods' network namespaces though they interfere (docs/concepts/capture.md): comment=TEXT, chain=CHAIN, chain=TABLE/CHAIN or table=TABLE, separated by semicolons."),
    used("", &["ACCEPT_RULES_OF_PODS"], Switch, "true", "Whether pods may name such rules themselves, by annotation cni.istio.io/acceptedRules."),
    used("", &["SANDBOXED_RUNTIMES"], LIST, sandboxed::USUAL, "Names of runtime classes, or of their handlers, whose pods rules do not bind (docs/concepts/capture.md); * at the end stands for anything."),
    used("", &["SANDBOXED_PODS"], Takes::Choice(&["refuse", "skip"]), "refuse", "What is done with pods of the mesh there: refuse (they are not created) or skip (they are not redirected, with an event)."),
    used("", &["KUBERNETES_SERVICE_HOST"], TEXT, "", "The API server's host. Required."),
    used("", &["KUBERNETES_SERVICE_PORT"], TEXT, "", "The API server's port. Required."),
    used("", &["KUBERNETES_SERVICE_PROTOCOL"], TEXT, "https", "The API server's protocol."),
    used("drift-watch-interval", &["DRIFT_WATCH_INTERVAL"], Duration, "0s", "Interval of drift checks: 0s disables them, minimum 1s. Read-only."),
    used("drift-heal", &["DRIFT_HEAL"], Switch, "false", "Repair drifted pods in place within a second of a kernel notification (docs/concepts/drift.md)."),
    used("", &["ISTIO_OUTBOUND_OWNER_GROUPS"], TEXT, "", "The value in the container runtime's environment, which the plugin inherits; for the drift watch, repairs in place and the probe of the node's taint."),
    used("", &["ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE"], TEXT, "", "Likewise."),
    used("", &["ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"], TEXT, "", "Likewise."),
    used("repair-enabled", &["REPAIR_ENABLED"], Switch, "true", "Enable repair by one of the next three actions (docs/concepts/repair.md)."),
    used("", &["REPAIR_REPAIR_PODS"], Switch, "false", "Redirect broken pods in place; wins over the other two."),
    used("repair-delete-pods", &["REPAIR_DELETE_PODS"], Switch, "false", "Delete broken pods; wins over labelling them."),
    used("repair-label-pods", &["REPAIR_LABEL_PODS"], Switch, "false", "Label broken pods."),
    used("repair-broken-pod-label-key", &["REPAIR_BROKEN_POD_LABEL_KEY"], TEXT, "cni.istio.io/uninitialized", "The label's key."),
    used("repair-broken-pod-label-value", &["REPAIR_BROKEN_POD_LABEL_VALUE"], TEXT, "true", "The label's value."),
    used("repair-node-name", &["REPAIR_NODE_NAME"], TEXT, "", "The node whose pods are watched; empty: NODE_NAME."),
    used("repair-sidecar-annotation", &["REPAIR_SIDECAR_ANNOTATION"], TEXT, "sidecar.istio.io/status", "Annotation that a broken pod has, with any value; empty: not required."),
    used("repair-init-container-name", &["REPAIR_INIT_CONTAINER_NAME"], TEXT, "istio-validation", "Init container whose failure shows a broken pod; empty: any."),
    used("repair-init-container-termination-message", &["REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE"], TEXT, "", "That container's termination message, without surrounding white space; empty: any."),
    used("repair-init-container-exit-code", &["REPAIR_INIT_CONTAINER_EXIT_CODE"], Number, "126", "Its exit code; 0: any but success."),
    used("repair-label-selectors", &["REPAIR_LABEL_SELECTORS"], TEXT, "", "Label selectors of the pods, separated by commas; empty: any pod."),
    used("repair-field-selectors", &["REPAIR_FIELD_SELECTORS"], TEXT, "", "Field selectors of the pods, separated by commas, beside the one for the node; empty: any pod."),
    used("node-taint", &["NODE_TAINT"], Switch, "false", "Remove the node's taint once new pods are verified to be redirected, and restore it when that ends (docs/concepts/taint.md). Implies the node's condition."),
    used("node-condition", &["NODE_CONDITION"], Switch, "false", "Publish this state as a node condition."),
    used("node-condition-type", &["NODE_CONDITION_TYPE"], TEXT, reasons::CONDITION, "The condition's type."),
    used("taint-key", &["TAINT_KEY", "PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME"], TEXT, reasons::TAINT, "The taint's key."),
    used("taint-value", &["TAINT_VALUE"], TEXT, "", "Its value; a taint of any value counts as the taint."),
    used("taint-effect", &["TAINT_EFFECT"], TEXT, "NoSchedule", "Its effect: NoSchedule, PreferNoSchedule or NoExecute. The agent removes the key with any effect."),
    used("taint-old-keys", &["TAINT_OLD_KEYS"], LIST, "", "Keys of other taints to remove and never add, such as NodeReadiness of Istio's first taint controller."),
    used("taint-after", &["TAINT_AFTER"], Duration, "30s", "Grace period before a verified node is tainted."),
    used("taint-probe", &["TAINT_PROBE"], Switch, "true", "Redirect a network namespace created as a test before a node counts as verified; needs NET_ADMIN and SYS_ADMIN."),
    used("taint-configmap-name", &["TAINT_CONFIGMAP_NAME", "TAINT_CONFIGMAP-NAME"], TEXT, "", "For taint-controller: ConfigMap that lists the pods a node needs; empty: those of the agent's DaemonSet."),
    used("taint-configmap-namespace", &["TAINT_CONFIGMAP_NAMESPACE", "TAINT_CONFIGMAP-NAMESPACE"], TEXT, "kube-system", "For taint-controller: that ConfigMap's namespace."),
    unused(&["TAINT_RUN-AS-DAEMON"], "Set by charts of Istio's first taint controller; this one keeps running."),
    unused(&["FORCE_IPTABLES_BINARY"], "Repairs choose the backend as the plugin does."),
    unused(&["ALLOW_SWITCH_TO_HOST_NS"], "Repairs do not enter the node's network namespace."),
    used("ambient-enabled", &["AMBIENT_ENABLED"], Switch, "false", "Enable ambient mode: pods without a sidecar are redirected to the node's ztunnel (docs/tasks/ambient.md)."),
    used("ztunnel-uds-address", &["ZTUNNEL_UDS_ADDRESS"], Path, "/var/run/ztunnel/ztunnel.sock", "Socket at which ztunnel receives pods; its directory is mounted from the node."),
    used("", &["AMBIENT_ENABLEMENT_SELECTOR"], TEXT, "", "Which pods are in ambient mode: a list, as JSON or YAML, of objects with podSelector and namespaceSelector, of which one that selects is enough; empty: by label istio.io/dataplane-mode."),
    used("", &["AMBIENT_DNS_CAPTURE"], Switch, "true", "Redirect DNS queries of these pods to ztunnel, unless their annotation says otherwise."),
    used("", &["AMBIENT_IPV6"], Switch, "true", "Redirect IPv6 of these pods, too."),
    used("enable-ambient-detection-retry", &["ENABLE_AMBIENT_DETECTION_RETRY"], Switch, "", "Whether the plugin reads a pod again.").status(Status::NotImplemented("a pod that cannot be read does not start, and the kubelet tries again")),
    used("", &["AMBIENT_DISABLE_SAFE_UPGRADE"], Switch, "", "Whether an agent that is replaced removes the plugin.").status(Status::WithoutEffect("the plugin stays while another agent follows")),
    used("", &["AMBIENT_RECONCILE_POD_RULES_ON_STARTUP"], Switch, "", "Whether rules of running pods are corrected at the start.").status(Status::WithoutEffect("they always are, also later")),
    unused(&["CURRENT_AGENT_VERSION"], "Set by charts."),
    unused(&["REPAIR_RUN_AS_DAEMON"], "Set by charts."),
    unused(&["GOMEMLIMIT"], "A limit for another run-time."),
    unused(&["GOMAXPROCS"], "A limit for another run-time."),
];
