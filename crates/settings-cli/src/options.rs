//! How a run is carried out: what to do with the plan, by which means, and whether to validate.

use redirect_core::{
    options::{BackendChoice, NativeForm, Variant},
    settings::{InputErrors, Key, Notice, RawSettings},
    values::{Port, Problem, parse_bool, parse_word},
};
use settings_table::parse_duration;
use std::time::Duration;

/// What a run does with the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Put it in force; do nothing where it is.
    Apply,
    /// Put it in force, writing it again even where it is.
    ForceApply,
    /// Remove everything an earlier run programmed.
    Cleanup,
    /// Leave the rules alone.
    Nothing,
}

/// The traffic check that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValidationOptions {
    /// The port it connects to.
    pub probe_port: Port,
    /// How long it may take.
    pub timeout: Duration,
}

/// How a run is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOptions {
    /// What to do with the plan.
    pub action: Action,
    /// Only print it.
    pub dry_run: bool,
    /// Where a dry run appends it as well.
    pub dry_run_file: Option<String>,
    /// What programs the rules.
    pub backend: BackendChoice,
    /// How native nftables rules are written.
    pub native_form: NativeForm,
    /// The traffic check that follows, if any.
    pub validation: Option<ValidationOptions>,
    /// The file that gets the verdict of the traffic check.
    pub termination_log: Option<String>,
}

impl RunOptions {
    /// Reads the options from settings.
    ///
    /// # Errors
    /// Everything wrong with them, together; first what was refused while the settings were gathered.
    pub fn parse(raw: &RawSettings) -> Result<Self, InputErrors> {
        let mut errors = raw.refused().clone();
        let mut switch = |key| raw.read(key, &mut errors, parse_bool).unwrap_or_default();
        let action = match (switch(Key::CleanupOnly), switch(Key::SkipRuleApply), switch(Key::ForceApply)) {
            (true, _, _) => Action::Cleanup,
            (false, true, _) => Action::Nothing,
            (false, false, true) => Action::ForceApply,
            (false, false, false) => Action::Apply,
        };
        // Read for its errors: replacing another configuration is what every run does.
        switch(Key::Reconcile);
        // Likewise: no lock of the node is ever taken.
        switch(Key::CniMode);
        let dry_run = switch(Key::DryRun);
        let native_form = if switch(Key::NftSets) { NativeForm::Sets } else { NativeForm::Plain };
        let (native, validate) = (switch(Key::NativeNftables), switch(Key::RunValidation));
        let backend = backend(raw, native, &mut errors);
        let validation = validation(raw, &mut errors);
        let path = |key| Some(raw.get(key).0).filter(|path| !path.is_empty()).map(String::from);
        errors.into_result(Self {
            action,
            dry_run,
            dry_run_file: path(Key::DryRunFile),
            backend,
            native_form,
            validation: validation.filter(|_| validate),
            termination_log: path(Key::TerminationLog),
        })
    }

    /// What is worth saying about how a run is carried out.
    #[must_use]
    pub fn notices(&self, raw: &RawSettings) -> Vec<Notice> {
        let native = self.backend == BackendChoice::NativeNft;
        let without_native = "only native nftables rules have sets; add --native-nftables";
        let with_native = "with --native-nftables no iptables rules are programmed";
        let cases = [
            (Key::NftSets, !native && self.native_form == NativeForm::Sets, without_native),
            (Key::Backend, native && raw.get(Key::Backend).0 != "auto", with_native),
            (
                Key::ForceIptablesBinary,
                native && !raw.get(Key::ForceIptablesBinary).0.is_empty(),
                with_native,
            ),
        ];
        let silent = cases.into_iter().filter(|(_, ineffective, _)| *ineffective);
        silent.map(|(key, _, because)| Notice::NoEffect { said: raw.get(key).1, because }).collect()
    }
}

fn backend(raw: &RawSettings, native: bool, errors: &mut InputErrors) -> BackendChoice {
    let variants = [("", None), ("legacy", Some(Variant::Legacy)), ("nft", Some(Variant::Nft))];
    let variant = |text: &str| parse_word(text, &variants, "legacy, nft");
    let forced = raw.read(Key::ForceIptablesBinary, errors, variant).flatten();
    let words = [
        ("auto", BackendChoice::Auto),
        ("netlink", BackendChoice::Netlink),
        ("restore", BackendChoice::Restore(None)),
    ];
    let asked = |text: &str| parse_word(text, &words, "auto, netlink, restore");
    let asked = raw.read(Key::Backend, errors, asked);
    let backend = match (asked.unwrap_or(BackendChoice::Auto), forced) {
        (asked, None) => asked,
        (BackendChoice::Netlink, Some(_)) => {
            let contradiction = "runs no iptables program, and --force-iptables-binary names one; leave out one of the two, or write --backend restore";
            let (text, source) = raw.get(Key::Backend);
            errors.push_for(Key::Backend, source, text, Problem::Contradiction(contradiction));
            BackendChoice::Netlink
        }
        // A forced variant means its programs.
        (_, forced) => BackendChoice::Restore(forced),
    };
    if native { BackendChoice::NativeNft } else { backend }
}

fn validation(raw: &RawSettings, errors: &mut InputErrors) -> Option<ValidationOptions> {
    let probe_port = raw.read(Key::ProbePort, errors, str::parse);
    let timeout = raw.read(Key::ProbeTimeout, errors, parse_duration);
    Some(ValidationOptions { probe_port: probe_port?, timeout: timeout? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::settings::{Setting, Source};

    fn parse(pairs: &[(Key, &'static str)]) -> Result<RunOptions, InputErrors> {
        let mut raw = RawSettings::new();
        for (key, text) in pairs {
            raw.set(*key, *text, Source::Flag("x"));
        }
        RunOptions::parse(&raw)
    }

    #[test]
    fn cleanup_beats_everything_else() {
        let options =
            parse(&[(Key::CleanupOnly, "true"), (Key::SkipRuleApply, "true"), (Key::ForceApply, "true")]);
        assert_eq!(options.map(|options| options.action), Ok(Action::Cleanup));
    }

    #[test]
    fn a_forced_variant_means_restore() {
        let options = parse(&[(Key::ForceIptablesBinary, "legacy")]).unwrap();
        assert_eq!(options.backend, BackendChoice::Restore(Some(Variant::Legacy)));
    }

    #[test]
    fn a_forced_variant_and_netlink_contradict_each_other() {
        let errors = parse(&[(Key::ForceIptablesBinary, "legacy"), (Key::Backend, "netlink")]).unwrap_err();
        let text = errors.to_string();
        assert!(
            text.contains("\"netlink\" runs no iptables program") && text.contains("leave out one"),
            "{text}"
        );
        assert_eq!(errors.iter().count(), 1);
    }

    #[test]
    fn words_in_other_letters_are_told_how_to_be_written() {
        let text = parse(&[(Key::Backend, "Netlink")]).unwrap_err().to_string();
        assert!(text.ends_with("\"Netlink\" is not one of auto, netlink, restore; write netlink"), "{text}");
    }

    #[test]
    fn what_was_refused_before_is_told_with_the_rest() {
        let mut raw = RawSettings::new();
        raw.refuse(Source::CommandLine, "--frob", Problem::Usage("is not a flag".into()));
        raw.set(Key::DryRun, "yes", Source::Flag("dry-run"));
        let told = RunOptions::parse(&raw).unwrap_err().to_string();
        assert_eq!(
            told,
            "command line: \"--frob\" is not a flag; flag --dry-run: \"yes\" is neither true nor false; write true or false"
        );
    }

    #[test]
    fn errors_are_collected() {
        let errors = parse(&[
            (Key::ForceIptablesBinary, "ebpf"),
            (Key::Backend, "x"),
            (Key::ProbeTimeout, "5"),
            (Key::ProbePort, "0"),
            (Key::DryRun, "yes"),
        ]);
        assert_eq!(errors.unwrap_err().iter().count(), 5);
    }

    #[test]
    fn what_has_no_effect_is_told() {
        let native = ("native-nftables", "true");
        for (flags, wanted) in [
            (
                vec![("nft-sets", "true")],
                "flag --nft-sets has no effect: only native nftables rules have sets; add --native-nftables",
            ),
            (
                vec![native, ("backend", "restore")],
                "flag --backend has no effect: with --native-nftables no iptables rules are programmed",
            ),
            (
                vec![native, ("force-iptables-binary", "nft")],
                "flag --force-iptables-binary has no effect: with --native-nftables no iptables rules are programmed",
            ),
        ] {
            let mut raw = RawSettings::new();
            for (name, text) in flags {
                let setting = Setting::ALL.iter().find(|setting| setting.flag == Some(name)).unwrap();
                raw.set(setting.key, text, Source::Flag(name));
            }
            let told = RunOptions::parse(&raw).unwrap().notices(&raw);
            assert_eq!(told.iter().map(ToString::to_string).collect::<Vec<_>>(), [wanted]);
        }
    }

    #[test]
    fn no_text_makes_the_reader_panic() {
        for text in ["", "\u{1b}[2J\n", "99999999999999999999s", "1.5.2s", "::", "-1", "é", "*,*", "0x", "\0"]
        {
            let mut raw = RawSettings::new();
            Setting::ALL.iter().for_each(|setting| raw.set(setting.key, text, Source::Flag("x")));
            let errors = RunOptions::parse(&raw).unwrap_err();
            assert!(errors.iter().all(|error| !error.to_string().chars().any(char::is_control)), "{errors}");
        }
    }
}
