//! Notices about valid settings.

use super::RepairAction;
use super::raw::{Origin, Raw, file_mode};
use super::table::{SETTINGS, Status, Takes};
use redirect_core::settings::meant;
use settings_table::{NotInForce, Row};

/// Prefixes of names that only our settings have.
const OURS: [&str; 7] =
    ["REPAIR_", "ISTIO_OWNED_", "AMBIENT_", "KUBECONFIG_", "TAINT_", "NODE_TAINT", "NODE_CONDITION"];

/// Something about a setting that has less effect than its author hoped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Notice {
    /// The agent does not do what was asked for.
    #[error("{0}")]
    NotInForce(NotInForce),
    /// It was given empty, which means false or 0 and not the default.
    #[error("{origin} is set but empty, which means false or 0; leave it out for the default, {default}")]
    Empty {
        /// The flag or variable.
        origin: String,
        /// What would hold if it were not given.
        default: &'static str,
    },
    /// It was given by another name than its own.
    #[error("{given} is understood as {name}")]
    OtherName {
        /// That name.
        given: String,
        /// Its own.
        name: &'static str,
    },
    /// It has no effect because of another setting.
    #[error("{origin} has no effect: {because}")]
    NoEffect {
        /// The flag or variable.
        origin: String,
        /// Why.
        because: &'static str,
    },
    /// More users than the file's owner and group can read the plugin's token, or more than its owner can write the file.
    #[error(
        "{origin} {mode:04o} lets others than the file's owner and group read the plugin's token, or the group replace it; 0600 or 0640 is enough"
    )]
    Exposed {
        /// The flag or variable.
        origin: String,
        /// The mode it stands for.
        mode: u32,
    },
    /// Words of the command line are ignored.
    #[error("{0}")]
    IgnoredWords(String),
    /// The environment has a name that resembles a setting but is not one.
    #[error("{given} is not a setting and is ignored{}", .meant.map(|meant| format!("; did you mean {meant}?")).unwrap_or_default())]
    Unknown {
        /// The name.
        given: String,
        /// The setting it resembles.
        meant: Option<&'static str>,
    },
}

/// All notices, in the order of the table and then of the environment.
pub(super) fn all(raw: &Raw<'_>, env: &[(String, String)]) -> Vec<Notice> {
    let ignored = raw.ignored_words().map(Notice::IgnoredWords).into_iter();
    let mut notices: Vec<Notice> =
        ignored.chain(raw.not_in_force().into_iter().map(Notice::NotInForce)).collect();
    for (setting, origin, value) in raw.given() {
        let has_value_when_empty = matches!(setting.takes, Takes::Switch | Takes::Number | Takes::Duration)
            && setting.status == Status::InForce;
        if value.is_empty() && has_value_when_empty && !matches!(setting.default, "" | "false" | "0" | "0s") {
            notices.push(Notice::Empty { origin: origin.to_string(), default: setting.default });
        }
        match origin {
            Origin::Env(name) if *name != setting.name() => {
                notices.push(Notice::OtherName { given: (*name).to_owned(), name: setting.name() });
            }
            Origin::Env(_) | Origin::Flag(_) | Origin::Default(_) => {}
        }
    }
    notices.extend(exposed(raw));
    notices.extend(without_effect(raw));
    notices.extend(env.iter().filter_map(|(name, _)| unknown(name)));
    notices
}

/// Whether the mode opens the plugin's token to more than the file's owner and group, or lets the group replace it.
fn exposed(raw: &Raw<'_>) -> Option<Notice> {
    let (_, origin, mode) = raw.given().find(|(setting, _, _)| setting.name() == "KUBECONFIG_MODE")?;
    let mode = file_mode(mode).filter(|mode| mode & 0o027 != 0)?;
    Some(Notice::Exposed { origin: origin.to_string(), mode })
}

/// What has no effect because of other settings, each for the first reason that holds.
fn without_effect(raw: &Raw<'_>) -> Vec<Notice> {
    let given = |name: &str| {
        // What is off asks for nothing, unless it is on by itself.
        let asks = |setting: &Row, value: &str| !setting.takes.is_off(value) || setting.default == "true";
        raw.given().find(|(setting, _, value)| setting.name() == name && asks(setting, value))
    };
    let has_template = given("CNI_NETWORK_CONFIG").or(given("CNI_NETWORK_CONFIG_FILE")).is_some();
    let (is_chained, is_owned) = (raw.is_on("CHAINED_CNI_PLUGIN"), raw.is_on("ISTIO_OWNED_CNI_CONFIG"));
    let is_watched =
        given("DRIFT_WATCH_INTERVAL").is_some_and(|(_, _, interval)| !matches!(interval, "0" | "0s"));
    let by_template = (has_template, "the template in CNI_NETWORK_CONFIG replaces it");
    let in_place = raw.is_on("REPAIR_ENABLED") && raw.is_on("REPAIR_REPAIR_PODS");
    let is_ambient = raw.is_on("AMBIENT_ENABLED");
    let is_healed = is_watched && raw.is_on("DRIFT_HEAL");
    let is_probed = raw.is_on("TAINT_PROBE") && (raw.is_on("NODE_TAINT") || raw.is_on("NODE_CONDITION"));
    let by_no_plan = (
        !is_watched && !in_place && !is_probed,
        "only the drift watch, repairs in place and the probe of the node's taint use it, and none of them is on",
    );
    let cases = [
        ("ISTIO_OWNED_CNI_CONFIG", (!is_chained, "CHAINED_CNI_PLUGIN is false")),
        ("ISTIO_OWNED_CNI_CONFIG_FILENAME", (!is_owned, "ISTIO_OWNED_CNI_CONFIG is false")),
        ("LOG_OUTPUT_LEVEL", (raw.has_level_flag(), "flag --log_output_level wins")),
        (
            "LOG_LEVEL",
            (
                !has_template,
                "only a template in CNI_NETWORK_CONFIG uses it; flag --log_output_level sets levels",
            ),
        ),
        ("EXCLUDE_NAMESPACES", by_template),
        ("NATIVE_NFTABLES", by_template),
        ("NFT_SETS", by_template),
        (
            "NFT_SETS",
            (
                !raw.is_on("NATIVE_NFTABLES"),
                "only native nftables rules have sets, and NATIVE_NFTABLES is false",
            ),
        ),
        ("STRICT_CAPTURE", by_template),
        ("ACCEPTED_RULES", by_template),
        ("ACCEPT_RULES_OF_PODS", by_template),
        ("SANDBOXED_RUNTIMES", by_template),
        ("SANDBOXED_PODS", by_template),
        ("CNI_NETWORK_CONFIG", (given("CNI_NETWORK_CONFIG_FILE").is_some(), "CNI_NETWORK_CONFIG_FILE wins")),
        ("KUBE_CA_FILE", (raw.is_on("SKIP_TLS_VERIFY"), "SKIP_TLS_VERIFY is true")),
        (
            "MOUNTED_CNI_NETNS_DIR",
            (
                !is_watched && !in_place && !is_ambient,
                "only the drift watch, repairs in place and ambient mode use it, and none of them is on",
            ),
        ),
        (
            "MOUNTED_PROC_DIR",
            (
                !in_place && !is_healed && !is_ambient,
                "only repairs in place, healing and ambient mode use it, and none of them is on",
            ),
        ),
        ("DRIFT_HEAL", (!is_watched, "healing needs the drift watch, and DRIFT_WATCH_INTERVAL is not set")),
        ("ISTIO_OUTBOUND_OWNER_GROUPS", by_no_plan),
        ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", by_no_plan),
        ("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", by_no_plan),
    ];
    let mut noticed: Vec<&str> = Vec::new();
    let mut notices = Vec::new();
    for (name, (is_silent, because)) in cases.into_iter().chain(of_repair(raw)).chain(of_taint(raw)) {
        if let Some((_, origin, _)) = given(name).filter(|_| is_silent && !noticed.contains(&name)) {
            noticed.push(name);
            notices.push(Notice::NoEffect { origin: origin.to_string(), because });
        }
    }
    notices
}

/// The same of what concerns broken pods. Charts write defaults out, which ask for nothing.
fn of_repair(raw: &Raw<'_>) -> Vec<(&'static str, (bool, &'static str))> {
    let is_off = !raw.is_on("REPAIR_ENABLED");
    let first = RepairAction::ALL.into_iter().find(|action| raw.is_on(action.switch()));
    let action = first.filter(|_| !is_off);
    let is_other = |name: &str| raw.given().any(|(row, _, value)| row.name() == name && row.default != value);
    let if_idle = |name| (name, (action.is_none() && is_other(name), "repair is off"));
    let if_no_label = |name| {
        (name, (action != Some(RepairAction::Label) && is_other(name), "broken pods are not labelled"))
    };
    let switches = RepairAction::ALL.map(|action| (action.switch(), (is_off, "REPAIR_ENABLED is false")));
    let after = |first| RepairAction::ALL.into_iter().filter(move |action| first < *action);
    let losers = first
        .into_iter()
        .flat_map(|first| after(first).map(move |action| (action.switch(), (true, first.wins()))));
    let others = [
        if_no_label("REPAIR_BROKEN_POD_LABEL_KEY"),
        if_no_label("REPAIR_BROKEN_POD_LABEL_VALUE"),
        if_idle("REPAIR_SIDECAR_ANNOTATION"),
        if_idle("REPAIR_INIT_CONTAINER_NAME"),
        if_idle("REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE"),
        if_idle("REPAIR_INIT_CONTAINER_EXIT_CODE"),
        if_idle("REPAIR_LABEL_SELECTORS"),
        if_idle("REPAIR_FIELD_SELECTORS"),
    ];
    switches.into_iter().chain(losers).chain(others).collect()
}

/// The same of what concerns nodes' taints.
fn of_taint(raw: &Raw<'_>) -> [(&'static str, (bool, &'static str)); 13] {
    let is_cluster = raw.is_for_cluster();
    let keeps_taint = raw.is_on("NODE_TAINT");
    let by_no_taint =
        (!is_cluster && !keeps_taint, "the agent does not manage the taint: NODE_TAINT is not set");
    let by_no_condition = (
        !is_cluster && !keeps_taint && !raw.is_on("NODE_CONDITION"),
        "no condition is published: neither NODE_TAINT nor NODE_CONDITION is set",
    );
    let by_cluster = (is_cluster, "only agents use it, and this is the cluster's taint controller");
    let by_agent = (!is_cluster, "only install-cni taint-controller uses it");
    [
        ("NODE_TAINT", by_cluster),
        ("NODE_CONDITION", by_cluster),
        ("NODE_CONDITION", (keeps_taint, "NODE_TAINT brings the condition")),
        ("NODE_CONDITION_TYPE", by_no_condition),
        ("TAINT_PROBE", by_cluster),
        ("TAINT_PROBE", by_no_condition),
        ("TAINT_KEY", by_no_taint),
        ("TAINT_VALUE", by_no_taint),
        ("TAINT_EFFECT", by_no_taint),
        ("TAINT_OLD_KEYS", by_no_taint),
        ("TAINT_AFTER", by_no_condition),
        ("TAINT_CONFIGMAP_NAME", by_agent),
        ("TAINT_CONFIGMAP_NAMESPACE", by_agent),
    ]
}

/// Whether a variable resembles a setting of ours without being one. The kubelet puts the names of services into the environment, so
/// most names mean nothing.
fn unknown(given: &str) -> Option<Notice> {
    let names = || SETTINGS.iter().flat_map(|setting| setting.env.iter().copied());
    if names().any(|name| name == given) {
        return None;
    }
    let upper = given.to_ascii_uppercase().replace(['-', '.'], "_");
    let meant = meant(given, names());
    let is_ours = OURS.iter().any(|beginning| upper.starts_with(beginning));
    (meant.is_some() || is_ours).then(|| Notice::Unknown { given: given.to_owned(), meant })
}
