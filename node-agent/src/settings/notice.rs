//! Notices about valid settings: each about one that has less effect than its author hoped.

use super::raw::{Raw, SettingOrigin, file_mode};
use super::table::{Key, SETTINGS, Status, ValueKind};
use super::{InstallMode, RepairAction};
use redirect_core::settings::Misspelt;

/// Prefixes of names that only our settings have.
const OURS: [&str; 7] =
    ["REPAIR_", "ISTIO_OWNED_", "AMBIENT_", "KUBECONFIG_", "TAINT_", "NODE_TAINT", "NODE_CONDITION"];

/// All notices, in the order of the table and then of the environment.
pub(super) fn all(raw: &Raw<'_>, env: &[(String, String)]) -> Vec<String> {
    let not_in_force = raw.not_in_force();
    let not_in_force = not_in_force.iter().map(ToString::to_string);
    let mut notices: Vec<String> = raw.ignored_words().into_iter().chain(not_in_force).collect();
    for (setting, origin, value) in raw.given() {
        let has_value_when_empty =
            matches!(setting.takes, ValueKind::Switch | ValueKind::Number | ValueKind::Duration)
                && setting.status == Status::InForce;
        if value.is_empty() && has_value_when_empty && !matches!(setting.default, "" | "false" | "0" | "0s") {
            notices.push(format!(
                "{origin} is set but empty, which means false or 0; leave it out for the default, {}",
                setting.default
            ));
        }
        match origin {
            SettingOrigin::Env(name) if name != setting.name() => {
                notices.push(format!("{name} is understood as {}", setting.name()));
            }
            SettingOrigin::Env(_) | SettingOrigin::Flag(_) | SettingOrigin::Default(_) => {}
        }
    }
    notices.extend(exposed(raw));
    notices.extend(without_effect(raw));
    notices.extend(env.iter().filter_map(|(name, _)| unknown(name)));
    notices
}

/// Whether the mode opens the plugin's token to more than the file's owner and group, or lets the group replace it.
fn exposed(raw: &Raw<'_>) -> Option<String> {
    let (origin, mode) = raw.value(Key::KUBECONFIG_MODE);
    let mode = file_mode(mode).filter(|mode| mode & 0o027 != 0)?;
    Some(format!(
        "{origin} {mode:04o} lets others than the file's owner and group read the plugin's token, or the group replace it; 0600 or 0640 is enough"
    ))
}

/// What has no effect because of other settings, each for the first reason that holds.
fn without_effect(raw: &Raw<'_>) -> Vec<String> {
    let given = |key: Key| {
        let (row, (origin, value)) = (key.row(), raw.value(key));
        // What is off asks for nothing, unless it is on by itself.
        let asks = !row.takes.is_off(value) || row.default == "true";
        (asks && !matches!(origin, SettingOrigin::Default(_))).then_some((origin, value))
    };
    let has_template = given(Key::CNI_NETWORK_CONFIG).or(given(Key::CNI_NETWORK_CONFIG_FILE)).is_some();
    let (is_chained, is_owned) = (raw.is_on(Key::CHAINED_CNI_PLUGIN), raw.is_on(Key::ISTIO_OWNED_CNI_CONFIG));
    let is_watched =
        given(Key::DRIFT_WATCH_INTERVAL).is_some_and(|(_, interval)| !matches!(interval, "0" | "0s"));
    let by_template = (has_template, "the template in CNI_NETWORK_CONFIG replaces it");
    let by_no_template =
        (!has_template, "only a template in CNI_NETWORK_CONFIG uses it; flag --log_output_level sets levels");
    let by_iptables = (
        !raw.is_on(Key::NATIVE_NFTABLES),
        "only native nftables rules have sets, and NATIVE_NFTABLES is false",
    );
    let in_place = raw.is_on(Key::REPAIR_ENABLED) && raw.is_on(Key::REPAIR_REPAIR_PODS);
    let is_ambient = raw.is_on(Key::AMBIENT_ENABLED);
    let is_healed = is_watched && raw.is_on(Key::DRIFT_HEAL);
    let is_probed =
        raw.is_on(Key::TAINT_PROBE) && (raw.is_on(Key::NODE_TAINT) || raw.is_on(Key::NODE_CONDITION));
    let is_inline = InstallMode::parse(raw.value(Key::CNI_INSTALL).1) == Some(InstallMode::Inline);
    let is_beside = is_chained && !is_owned && !is_inline;
    let by_no_plan = (
        !is_watched && !in_place && !is_probed,
        "only the drift watch, repairs in place and the probe of the node's taint use it, and none of them is on",
    );
    let cases = [
        (Key::CNI_INSTALL, (!is_chained, "CHAINED_CNI_PLUGIN is false")),
        (Key::CNI_INSTALL, (is_owned, "ISTIO_OWNED_CNI_CONFIG puts a copy of the list in front")),
        (Key::ISTIO_OWNED_CNI_CONFIG, (!is_chained, "CHAINED_CNI_PLUGIN is false")),
        (Key::ISTIO_OWNED_CNI_CONFIG_FILENAME, (!is_owned, "ISTIO_OWNED_CNI_CONFIG is false")),
        (Key::LOG_OUTPUT_LEVEL, (raw.has_level_flag(), "flag --log_output_level wins")),
        (Key::LOG_LEVEL, by_no_template),
        (Key::EXCLUDE_NAMESPACES, by_template),
        (Key::NATIVE_NFTABLES, by_template),
        (Key::NFT_SETS, by_template),
        (Key::NFT_SETS, by_iptables),
        (Key::STRICT_CAPTURE, by_template),
        (Key::ACCEPTED_RULES, by_template),
        (Key::ACCEPT_RULES_OF_PODS, by_template),
        (Key::SANDBOXED_RUNTIMES, by_template),
        (Key::SANDBOXED_PODS, by_template),
        (
            Key::CNI_NETWORK_CONFIG,
            (given(Key::CNI_NETWORK_CONFIG_FILE).is_some(), "CNI_NETWORK_CONFIG_FILE wins"),
        ),
        (Key::KUBE_CA_FILE, (raw.is_on(Key::SKIP_TLS_VERIFY), "SKIP_TLS_VERIFY is true")),
        (
            Key::MOUNTED_CNI_NETNS_DIR,
            (
                !is_watched && !in_place && !is_ambient,
                "only the drift watch, repairs in place and ambient mode use it, and none of them is on",
            ),
        ),
        (
            Key::MOUNTED_PROC_DIR,
            (
                !in_place && !is_healed && !is_ambient && !is_beside,
                "only repairs in place, healing, ambient mode and CNI_INSTALL=auto (chart: install) or drop-in use it, and none of them is on",
            ),
        ),
        (
            Key::DRIFT_HEAL,
            (!is_watched, "healing needs the drift watch, and DRIFT_WATCH_INTERVAL is not set"),
        ),
        (Key::ISTIO_OUTBOUND_OWNER_GROUPS, by_no_plan),
        (Key::ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE, by_no_plan),
        (Key::ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR, by_no_plan),
    ];
    let mut noticed: Vec<Key> = Vec::new();
    let mut notices = Vec::new();
    for (key, (is_silent, because)) in cases.into_iter().chain(of_repair(raw)).chain(of_taint(raw)) {
        if let Some((origin, _)) = given(key).filter(|_| is_silent && !noticed.contains(&key)) {
            noticed.push(key);
            notices.push(format!("{origin} has no effect: {because}"));
        }
    }
    notices
}

/// The same of what concerns broken pods. Charts write defaults out, which ask for nothing.
fn of_repair(raw: &Raw<'_>) -> Vec<(Key, (bool, &'static str))> {
    let is_off = !raw.is_on(Key::REPAIR_ENABLED);
    let first = RepairAction::ALL.into_iter().find(|action| raw.is_on(action.switch()));
    let action = first.filter(|_| !is_off);
    let is_other = |key: Key| raw.value(key).1 != key.row().default;
    let if_idle = |key| (key, (action.is_none() && is_other(key), "repair is off"));
    let if_no_label =
        |key| (key, (action != Some(RepairAction::Label) && is_other(key), "broken pods are not labelled"));
    let switches = RepairAction::ALL.map(|action| (action.switch(), (is_off, "REPAIR_ENABLED is false")));
    let after = |first| RepairAction::ALL.into_iter().filter(move |action| first < *action);
    let losers = first
        .into_iter()
        .flat_map(|first| after(first).map(move |action| (action.switch(), (true, first.wins()))));
    let others = [
        if_no_label(Key::REPAIR_BROKEN_POD_LABEL_KEY),
        if_no_label(Key::REPAIR_BROKEN_POD_LABEL_VALUE),
        if_idle(Key::REPAIR_SIDECAR_ANNOTATION),
        if_idle(Key::REPAIR_INIT_CONTAINER_NAME),
        if_idle(Key::REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE),
        if_idle(Key::REPAIR_INIT_CONTAINER_EXIT_CODE),
        if_idle(Key::REPAIR_LABEL_SELECTORS),
        if_idle(Key::REPAIR_FIELD_SELECTORS),
    ];
    switches.into_iter().chain(losers).chain(others).collect()
}

/// The same of what concerns nodes' taints.
fn of_taint(raw: &Raw<'_>) -> [(Key, (bool, &'static str)); 13] {
    let is_cluster = raw.is_for_cluster();
    let keeps_taint = raw.is_on(Key::NODE_TAINT);
    let by_no_taint =
        (!is_cluster && !keeps_taint, "the agent does not manage the taint: NODE_TAINT is not set");
    let by_no_condition = (
        !is_cluster && !keeps_taint && !raw.is_on(Key::NODE_CONDITION),
        "no condition is published: neither NODE_TAINT nor NODE_CONDITION is set",
    );
    let by_cluster = (is_cluster, "only agents use it, and this is the cluster's taint controller");
    let by_agent = (!is_cluster, "only install-cni taint-controller uses it");
    [
        (Key::NODE_TAINT, by_cluster),
        (Key::NODE_CONDITION, by_cluster),
        (Key::NODE_CONDITION, (keeps_taint, "NODE_TAINT brings the condition")),
        (Key::NODE_CONDITION_TYPE, by_no_condition),
        (Key::TAINT_PROBE, by_cluster),
        (Key::TAINT_PROBE, by_no_condition),
        (Key::TAINT_KEY, by_no_taint),
        (Key::TAINT_VALUE, by_no_taint),
        (Key::TAINT_EFFECT, by_no_taint),
        (Key::TAINT_OLD_KEYS, by_no_taint),
        (Key::TAINT_AFTER, by_no_condition),
        (Key::TAINT_CONFIGMAP_NAME, by_agent),
        (Key::TAINT_CONFIGMAP_NAMESPACE, by_agent),
    ]
}

/// Whether a variable resembles a setting of ours without being one. The kubelet puts the names of services into the environment, so
/// most names mean nothing.
fn unknown(given: &str) -> Option<String> {
    let names = || SETTINGS.iter().flat_map(|setting| setting.env.iter().copied());
    if names().any(|name| name == given) {
        return None;
    }
    let upper = given.to_ascii_uppercase().replace(['-', '.'], "_");
    let meant = Misspelt::nearest(given, names());
    let is_ours = OURS.iter().any(|beginning| upper.starts_with(beginning));
    let hint = meant.map(|meant| format!("; did you mean {meant}?")).unwrap_or_default();
    (meant.is_some() || is_ours).then(|| format!("{given} is not a setting and is ignored{hint}"))
}
