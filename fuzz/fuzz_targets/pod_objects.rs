//! Any manifest, YAML or JSON: errors that can be printed, a reason to leave the pod alone, or a plan that every renderer writes as
//! it is. The plugin and redirectctl read the same from it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use redirect_core::pod::{Decision, PodFacts};
use redirect_core_fuzz::{parts, plan, text};
use redirectctl::error::PodInputError;
use redirectctl::input::pods_of_text;

fuzz_target!(|manifest: &str| {
    for document in cni_core::yaml::documents(manifest).into_iter().flatten() {
        match PodFacts::from_json(&document) {
            Err(errors) => text::is_one_safe_line(&errors.to_string()),
            Ok(facts) => decide(&facts),
        }
    }
    match pods_of_text(manifest) {
        Err(PodInputError(all)) => assert!(!all.is_empty()),
        Ok(pods) => pods.iter().for_each(|pod| decide(&pod.facts)),
    }
});

fn decide(facts: &PodFacts) {
    let addresses = parts::addresses();
    facts.notices().for_each(|notice| text::is_one_safe_line(&notice.to_string()));
    let decision = facts.decide(&parts::facts(&addresses));
    assert_eq!(
        facts.skip_reason().is_some(),
        matches!(decision, Ok(Decision::Skip(_))) && facts.skip_reason().is_some()
    );
    match decision {
        Err(errors) => text::are_told(&errors),
        Ok(Decision::Redirect(redirect)) => plan::check(&redirect),
        Ok(_) => {}
    }
}
