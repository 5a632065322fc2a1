//! What the agent may do: as little as its settings ask for.

use privileges::CapabilitySet;

use crate::settings::{AgentCommand, RepairAction, Settings};

/// The capabilities that an agent with these settings needs, of those that it is given. `reloads`: whether settings are reread while it runs; what they may
/// switch on then counts.
#[must_use]
pub fn needed(action: AgentCommand, settings: &Settings, reloads: bool) -> CapabilitySet {
    // The node's directories, and files in them, may belong to other users, and keep their owner.
    let files = CapabilitySet::DAC_OVERRIDE | CapabilitySet::CHOWN | CapabilitySet::FOWNER;
    match action {
        AgentCommand::Run => files | of_ports(settings) | of_pods(settings, reloads),
        AgentCommand::Once | AgentCommand::Uninstall => files,
        AgentCommand::TaintController => of_ports(settings),
        AgentCommand::CleanNodes => CapabilitySet::empty(),
    }
}

/// Whether the agent reads the node's processes to find a namespace's owner, or may have to.
#[must_use]
pub const fn reads_processes(settings: &Settings, reloads: bool) -> bool {
    let in_place = matches!(settings.repair.action, Some(RepairAction::Repair));
    in_place || settings.ambient.is_some() || settings.drift.heal || reloads
}

/// Entering pods, reading and writing rules there, with the raw socket of iptables' legacy variant; and reading their processes.
fn of_pods(settings: &Settings, reloads: bool) -> CapabilitySet {
    let judges = settings.taint.keeps_taint || settings.taint.keeps_condition;
    let reads_processes = reads_processes(settings, reloads);
    let mut needed = CapabilitySet::empty();
    if reads_processes || judges || settings.drift.interval.is_some() {
        needed |= CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN | CapabilitySet::NET_RAW;
    }
    if reads_processes {
        needed |= CapabilitySet::SYS_PTRACE;
    }
    needed
}

/// The first unprivileged port (ip(7)).
const FIRST_FREE_PORT: u16 = 1024;

fn of_ports(settings: &Settings) -> CapabilitySet {
    let serve = &settings.serve;
    let ports =
        [Some(serve.health.1), serve.monitoring.map(|(_, port)| port), serve.control.map(|(_, port)| port)];
    if ports.into_iter().flatten().any(|port| port < FIRST_FREE_PORT) {
        CapabilitySet::NET_BIND_SERVICE
    } else {
        CapabilitySet::empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use settings_cli::LineRequest;

    const FILES: CapabilitySet =
        CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::CHOWN).union(CapabilitySet::FOWNER);
    const RULES: CapabilitySet =
        CapabilitySet::NET_ADMIN.union(CapabilitySet::SYS_ADMIN).union(CapabilitySet::NET_RAW);

    type Environment<'a> = &'a [(&'a str, &'a str)];

    fn of(action: AgentCommand, env: Environment<'_>, reloads: bool) -> CapabilitySet {
        let required = [("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("KUBERNETES_SERVICE_PORT", "443")];
        let env = required.iter().chain(env).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let Ok(LineRequest::Work(words)) = crate::settings::command_line().read([]) else {
            panic!("a command line")
        };
        let settings = Settings::read(&words, &env.collect::<Vec<_>>()).expect("settings").0;
        needed(action, &settings, reloads)
    }

    #[test]
    fn an_agent_keeps_what_is_switched_on_or_may_be() {
        let processes = FILES | RULES | CapabilitySet::SYS_PTRACE;
        let cases: [(Environment<'_>, bool, CapabilitySet); 9] = [
            (&[], false, FILES),
            (&[("REPAIR_DELETE_PODS", "true")], false, FILES),
            (&[("DRIFT_WATCH_INTERVAL", "5m")], false, FILES | RULES),
            (&[("NODE_TAINT", "true")], false, FILES | RULES),
            (&[("DRIFT_WATCH_INTERVAL", "5m"), ("DRIFT_HEAL", "true")], false, processes),
            (&[("REPAIR_REPAIR_PODS", "true")], false, processes),
            (&[("AMBIENT_ENABLED", "true")], false, processes),
            // Its folder of settings may switch healing on.
            (&[], true, processes),
            (&[("HEALTH_PORT", "80")], false, FILES | CapabilitySet::NET_BIND_SERVICE),
        ];
        for (env, reloads, wanted) in cases {
            assert_eq!(of(AgentCommand::Run, env, reloads), wanted, "{env:?} {reloads}");
        }
    }

    #[test]
    fn what_only_installs_keeps_no_more_than_files_take() {
        for action in [AgentCommand::Once, AgentCommand::Uninstall] {
            assert_eq!(of(action, &[("DRIFT_WATCH_INTERVAL", "5m")], true), FILES);
        }
        assert_eq!(of(AgentCommand::TaintController, &[], true), CapabilitySet::empty());
    }
}
