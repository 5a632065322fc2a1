//! Any settings: either errors that can be printed, or a plan that every renderer writes as it is.

#![no_main]

use libfuzzer_sys::fuzz_target;
use redirect_core::{Redirect, settings::RawSettings};
use redirect_core_fuzz::{parts, plan, text};

fuzz_target!(|input: &str| {
    let (raw, addresses) = (parts::settings(input), parts::addresses());
    let facts = parts::facts(&addresses);
    let said = serde_json::to_value(&raw).expect("nothing was refused");
    let again: RawSettings = serde_json::from_value(said).expect("what was written can be read");
    assert_eq!(Redirect::parse(&raw, &facts), Redirect::parse(&again, &facts));
    match Redirect::parse(&raw, &facts) {
        Err(errors) => text::are_told(&errors),
        Ok(redirect) => {
            redirect.notices().iter().for_each(|notice| text::is_one_safe_line(&notice.to_string()));
            plan::check(&redirect);
        }
    }
});
