//! The settings of redirect-core's table as rows, each with what becomes of it in a program.

use redirect_core::settings::{Key, Setting, SettingKind};
use settings_table::{SettingSpec, Status, ValueKind};

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

/// The flags of logging, which every program has.
pub const LOG_ROWS: &[SettingSpec] = &[
    SettingSpec::new(
        ValueKind::Levels,
        "Minimum log level, as a list of scope:level separated by commas; a bare level is that of the scope default, all:level that of every scope. Levels: none, fatal, error, warn, info, debug.",
    )
    .flag("log_output_level")
    .default("default:info"),
    SettingSpec::new(ValueKind::Switch, "Whether each line is a JSON object.").flag("log_as_json").default("false"),
    SettingSpec::new(ValueKind::List("LIST"), "Where lines go: stderr, stdout or the path of a file.")
        .flag("log_target")
        .default("stderr"),
    SettingSpec::new(ValueKind::Text("VALUE"), "Whether lines name their place in the source: any text but none enables it.")
        .flag("log_caller"),
    SettingSpec::new(
        ValueKind::Levels,
        "Accepted as a list of scope:level for compatibility with existing command lines; stack traces are never logged.",
    )
    .flag("log_stacktrace_level")
    .default("default:none")
    .status(Status::WithoutEffect("stack traces are never logged")),
];

/// A setting as a row of a program.
#[must_use]
pub fn row(setting: &Setting, statuses: &[(Key, Status)]) -> SettingSpec {
    let status = statuses.iter().find(|(key, _)| *key == setting.key).map(|(_, status)| *status);
    SettingSpec {
        flag: setting.flag,
        short: setting.short,
        env: setting.env,
        default: setting.default,
        status: status.unwrap_or(Status::InForce),
        ..SettingSpec::new(takes(setting.kind), setting.meaning)
    }
}

fn takes(kind: SettingKind) -> ValueKind {
    match kind {
        SettingKind::Bool => ValueKind::Switch,
        SettingKind::Choice(words) => ValueKind::Choice(words),
        SettingKind::Path => ValueKind::Path,
        SettingKind::Duration => ValueKind::Duration,
        SettingKind::Groups
        | SettingKind::Ids
        | SettingKind::Interfaces
        | SettingKind::Ports
        | SettingKind::Ranges => ValueKind::List(kind.value_name()),
        SettingKind::Address
        | SettingKind::LoopbackRange
        | SettingKind::Mark
        | SettingKind::Name
        | SettingKind::Port
        | SettingKind::RouteTable => ValueKind::Text(kind.value_name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use logging::{Config, Levels};

    #[test]
    fn the_defaults_of_logging_are_those_of_its_flags() {
        let default = |name: &str| {
            let row = LOG_ROWS.iter().find(|row| row.flag == Some(name))?;
            Some(row.default.to_owned())
        };
        let (from_rows, from_nothing) =
            (Config::from_flags(default).unwrap(), Config::from_flags(|_| None).unwrap());
        assert_eq!(from_nothing, Config::default());
        assert_eq!(from_rows.levels.of("default"), Levels::default().of("default"));
        assert_eq!(Config { levels: Levels::default(), ..from_rows }, Config::default());
    }
}
