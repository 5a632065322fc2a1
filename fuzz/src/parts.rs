//! An input cut into parts. Lines and zero bytes, because a fuzzer keeps those where they are when it changes the rest.

use redirect_core::settings::{NamespaceFacts, RawSettings, Setting, Source};
use std::net::IpAddr;

/// The part before the first zero byte, and the rest.
#[must_use]
pub fn halves(input: &str) -> (&str, &str) {
    input.split_once('\0').unwrap_or((input, ""))
}

/// Settings from lines: the first one says whether they are a pod's (`p`), each other one is a letter that chooses a
/// setting, and its value.
#[must_use]
pub fn settings(text: &str) -> RawSettings {
    let mut lines = text.lines();
    let is_pod = lines.next().is_some_and(|line| line.starts_with('p'));
    let mut raw = if is_pod { RawSettings::for_pod() } else { RawSettings::new() };
    for line in lines {
        let mut letters = line.chars();
        let Some(choice) = letters.next() else { continue };
        let Some(setting) = Setting::ALL.get(choice as usize % Setting::ALL.len()) else { continue };
        let annotation = setting.annotations.first().copied().map(Source::Annotation);
        let flag = setting.flag.map(Source::Flag).or(setting.env.first().copied().map(Source::Environment));
        let source = if is_pod { annotation.or(flag) } else { flag.or(annotation) };
        let Some(source) = source else { continue };
        raw.set(setting.key, letters.as_str().to_owned(), source);
    }
    raw
}

/// The addresses of a pod of both families.
#[must_use]
pub fn addresses() -> [IpAddr; 2] {
    ["10.1.0.2", "fd00::2"].map(|text| text.parse().expect("an address"))
}

/// The facts of a pod with these addresses, which are also those of its name servers.
#[must_use]
pub fn facts(addresses: &[IpAddr; 2]) -> NamespaceFacts<'_> {
    NamespaceFacts::new(addresses).with_nameservers(addresses)
}
