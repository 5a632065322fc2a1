//! The settings of redirect-core's table as rows, each with what becomes of it in a program.

use redirect_core::settings::{Key, Kind, Setting};
use settings_table::{Row, Status, Takes};

const LOOKS: Status = Status::WithoutEffect("istio-validation only looks, and changes nothing");
const NO_LOCK: Status = Status::WithoutEffect("no lock of the node is ever taken");

/// What is not in force in `istio-iptables`.
pub const IPTABLES: &[(Key, Status)] = &[
    (Key::CniMode, NO_LOCK),
    (Key::Reconcile, Status::WithoutEffect("rules of another configuration are always replaced")),
];

/// What is not in force in `istio-validation`.
pub const VALIDATION: &[(Key, Status)] = &[
    (Key::CniMode, NO_LOCK),
    (Key::Reconcile, LOOKS),
    (Key::DryRun, LOOKS),
    (Key::DryRunFile, LOOKS),
    (Key::ForceApply, LOOKS),
    (
        Key::CleanupOnly,
        Status::Refused(
            "asks to remove rules, which istio-validation never does; use istio-iptables --cleanup-only",
        ),
    ),
];

/// A setting as a row of a program.
pub(crate) fn row(setting: &Setting, statuses: &[(Key, Status)]) -> Row {
    let status = statuses.iter().find(|(key, _)| *key == setting.key).map(|(_, status)| *status);
    Row {
        flag: setting.flag,
        short: setting.short,
        env: setting.env,
        takes: takes(setting),
        default: setting.default,
        status: status.unwrap_or(Status::InForce),
        ..Row::new(Takes::Switch, setting.meaning)
    }
}

fn takes(setting: &Setting) -> Takes {
    match setting.kind {
        Kind::Bool => Takes::Switch,
        Kind::Choice(words) => Takes::Choice(words),
        Kind::Path => Takes::Path,
        Kind::Text => Takes::Text(value_name(setting.key)),
    }
}

/// What the value is called in the help text.
pub(crate) fn value_name(key: Key) -> &'static str {
    let names: [(&[Key], &str); 5] = [
        (&[Key::ProxyPort, Key::InboundCapturePort, Key::InboundTunnelPort, Key::ProbePort], "PORT"),
        (
            &[Key::InboundPorts, Key::InboundExcludePorts, Key::OutboundPorts, Key::OutboundExcludePorts],
            "PORTS",
        ),
        (&[Key::OutboundRanges, Key::OutboundExcludeRanges], "RANGES"),
        (&[Key::ProxyUid, Key::ProxyGid], "IDS"),
        (&[Key::ExcludeInterfaces, Key::VirtualInterfaces], "INTERFACES"),
    ];
    names.iter().find(|(keys, _)| keys.contains(&key)).map_or("VALUE", |(_, name)| name)
}
