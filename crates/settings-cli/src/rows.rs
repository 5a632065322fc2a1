//! The settings of redirect-core's table as rows, each with what becomes of it in a program.

use redirect_core::settings::{Key, Kind, Setting};
use settings_table::{Row, Status, Takes};

const LOOKS: Status = Status::WithoutEffect("istio-validation only looks, and changes nothing");
const NO_LOCK: Status =
    Status::WithoutEffect("no lock of the node is ever taken, only one of the network namespace");

/// What is not in force in `istio-iptables`.
pub const IPTABLES: &[(Key, Status)] = &[
    (Key::CniMode, NO_LOCK),
    (Key::Reconcile, Status::WithoutEffect("another configuration is always replaced")),
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
#[must_use]
pub fn row(setting: &Setting, statuses: &[(Key, Status)]) -> Row {
    let status = statuses.iter().find(|(key, _)| *key == setting.key).map(|(_, status)| *status);
    Row {
        flag: setting.flag,
        short: setting.short,
        env: setting.env,
        default: setting.default,
        status: status.unwrap_or(Status::InForce),
        ..Row::new(takes(setting.kind), setting.meaning)
    }
}

fn takes(kind: Kind) -> Takes {
    match kind {
        Kind::Bool => Takes::Switch,
        Kind::Choice(words) => Takes::Choice(words),
        Kind::Path => Takes::Path,
        Kind::Duration => Takes::Duration,
        Kind::Groups | Kind::Ids | Kind::Interfaces | Kind::Ports | Kind::Ranges => {
            Takes::List(kind.value_name())
        }
        Kind::LoopbackRange | Kind::Mark | Kind::Name | Kind::Port | Kind::RouteTable => {
            Takes::Text(kind.value_name())
        }
        // A kind that this crate does not know yet.
        _ => Takes::Text(kind.value_name()),
    }
}
