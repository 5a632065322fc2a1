//! Any command line and environment of istio-iptables or istio-validation: what to print, errors that can be printed, or a plan that
//! every renderer writes as it is.
//!
//! Words are lines; behind the first zero byte, each line is a variable. A first line `v` means istio-validation.

#![no_main]

use libfuzzer_sys::fuzz_target;
use redirect_core::Redirect;
use redirect_core_fuzz::{parts, plan, text};
use settings_cli::{IPTABLES, Pages, ParsedCommand, Program, RunOptions, VALIDATION};
use std::ffi::OsString;

const PAGES: Pages = Pages { examples: &[], exit_status: &[], files: &[], see_also: &[] };

fuzz_target!(|input: &str| {
    let (words, variables) = parts::halves(input);
    let (name, statuses, words) = match words.strip_prefix("v\n") {
        Some(words) => ("istio-validation", VALIDATION, words),
        None => ("istio-iptables", IPTABLES, words),
    };
    let program = Program { name, about: "", version: "0", pages: PAGES, statuses };
    let words = words.lines().map(OsString::from);
    let variables = variables
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.into(), value.into()));
    let input = match program.read(words, variables) {
        Err(usage) => return text::is_safe(&usage),
        Ok(ParsedCommand::Print(page)) => return assert!(!page.is_empty()),
        Ok(ParsedCommand::Run(input)) => input,
    };
    input.misspelt.iter().for_each(|misspelt| text::is_one_safe_line(&misspelt.to_string()));
    input.not_in_force.iter().for_each(|notice| text::is_one_safe_line(&notice.to_string()));
    match RunOptions::parse(&input.settings) {
        Err(errors) => text::are_told(&errors),
        Ok(options) => {
            assert_eq!(
                input.settings.refused().iter().count(),
                0,
                "something is refused, and the run goes on"
            );
            options
                .notices(&input.settings)
                .iter()
                .for_each(|notice| text::is_one_safe_line(&notice.to_string()));
        }
    }
    let addresses = parts::addresses();
    match Redirect::parse(&input.settings, &parts::facts(&addresses)) {
        Err(errors) => text::are_told(&errors),
        Ok(redirect) => {
            redirect.notices().iter().for_each(|notice| text::is_one_safe_line(&notice.to_string()));
            plan::check(&redirect);
        }
    }
});
