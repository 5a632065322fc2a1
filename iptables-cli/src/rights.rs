//! What this run may do: as little as its settings ask for.

use privileges::{CapabilitySet, keep_only};
use redirect_core::{
    options::BackendChoice,
    settings::{Key, RawSettings},
};
use settings_cli::{Action, RunOptions};

/// Gives up what this run does not need. Its caller may have more rights than a pod's init container.
pub(crate) fn give_up(settings: &RawSettings) {
    if let Err(error) = keep_only(needed(settings)) {
        log::warn!(target: logging::DEFAULT_SCOPE, "{error}");
    }
}

/// The capabilities that a run with these settings needs. One whose settings are wrong does nothing, but may look for what else is wrong.
fn needed(settings: &RawSettings) -> CapabilitySet {
    let mut needed = CapabilitySet::empty();
    if !settings.get(Key::NetworkNamespace).0.is_empty() {
        needed |= CapabilitySet::SYS_ADMIN;
    }
    let Ok(options) = RunOptions::parse(settings) else { return needed };
    // What a cleanup would remove is seen in the rules; a plan is made without looking.
    let cleans_up = options.action == Action::Cleanup;
    if cleans_up || options.action != Action::Nothing && !options.dry_run {
        // The programs of the legacy variant need the second.
        needed |= CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW;
        // The programs of iptables load what the kernel lacks of theirs, where they may. The kernel loads nf_tables itself.
        if matches!(options.backend, BackendChoice::Restore(_)) {
            needed |= CapabilitySet::SYS_MODULE;
        }
    }
    if options.validation.is_some() && !options.dry_run && !cleans_up {
        // One that fails names the rules that are the reason, which only this lets it read.
        needed |= istio_validation::needed(settings) | CapabilitySet::NET_ADMIN;
    }
    // A file of the caller's choice may be in another program's directory.
    if options.dry_run && options.dry_run_file.is_some() {
        needed |= CapabilitySet::DAC_OVERRIDE;
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::settings::Source;

    fn of(given: &[(Key, &'static str)]) -> CapabilitySet {
        let mut settings = RawSettings::new();
        for (key, value) in given {
            settings.set(*key, *value, Source::CommandLine);
        }
        needed(&settings)
    }

    #[test]
    fn a_run_keeps_what_its_settings_ask_for() {
        let rules = CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW;
        let cases: [(&[(Key, &'static str)], CapabilitySet); 9] = [
            (&[], rules),
            (&[(Key::NetworkNamespace, "/run/netns/x"), (Key::DryRun, "true")], CapabilitySet::SYS_ADMIN),
            (&[(Key::DryRun, "true")], CapabilitySet::empty()),
            (&[(Key::DryRun, "true"), (Key::DryRunFile, "/tmp/x")], CapabilitySet::DAC_OVERRIDE),
            (&[(Key::DryRun, "true"), (Key::CleanupOnly, "true")], rules),
            (&[(Key::ForceIptablesBinary, "legacy")], rules | CapabilitySet::SYS_MODULE),
            (&[(Key::RunValidation, "true")], rules | CapabilitySet::SETUID | CapabilitySet::SETGID),
            (
                &[(Key::RunValidation, "true"), (Key::SkipRuleApply, "true")],
                CapabilitySet::NET_ADMIN | CapabilitySet::SETUID | CapabilitySet::SETGID,
            ),
            (&[(Key::DryRun, "perhaps"), (Key::NetworkNamespace, "/run/netns/x")], CapabilitySet::SYS_ADMIN),
        ];
        for (given, wanted) in cases {
            assert_eq!(of(given), wanted, "{given:?}");
        }
    }
}
