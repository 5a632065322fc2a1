//! Settings as text: which exist ([`Setting::ALL`], [`Setting::AMBIENT`]), what was set, and where ([`RawSettings`]).
//!
//! Precedence: default < environment < flag; for a pod: default < the plugin's environment < annotation.

pub(crate) mod errors;
mod facts;
mod names;
mod notice;
mod source;
mod table;

use crate::values::{InterfaceName, Problem, parse_bool};
use alloc::{borrow::Cow, collections::BTreeMap, string::String, vec::Vec};

pub use errors::{InputError, InputErrors};
pub use facts::{NameLookup, NamespaceFacts, NoNames, id_in_passwd, nameservers};
pub use names::Misspelt;
pub(crate) use names::{misspelt_annotation, misspelt_proxy_variable};
pub use notice::{IdentityCollision, Notice};
pub use source::Source;
pub(crate) use source::{Provenance, Sources};
pub use table::{Key, Part, Setting, SettingKind, Star};

/// How many elements a list of a pod may have: who may create a pod may write a quarter of a megabyte of them, and the node's programs make
/// rules of each.
const MOST_IN_POD: usize = 16_384;

/// The value of each setting that was set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawSettings {
    values: BTreeMap<Key, (Cow<'static, str>, Source)>,
    /// Whether the settings of a pod are meant: the table's `pod_default`s hold.
    pod: bool,
    /// What was said and is not a setting's.
    refused: InputErrors,
}

impl RawSettings {
    /// Nothing said: the table's defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Nothing said about a pod: the table's defaults for pods.
    #[must_use]
    pub fn for_pod() -> Self {
        Self { pod: true, ..Self::default() }
    }

    /// Whether the settings of a pod are meant.
    #[must_use]
    pub const fn is_pod(&self) -> bool {
        self.pod
    }

    /// Takes what the environment says of the settings that `wanted` chooses; `read` answers what a variable holds.
    ///
    /// An empty variable is ignored, except for lists, where empty means none.
    pub fn read_environment(
        &mut self,
        wanted: impl Fn(Key) -> bool,
        mut read: impl FnMut(&'static str) -> Option<String>,
    ) {
        for setting in Setting::ALL.iter().filter(|setting| wanted(setting.key)) {
            for name in setting.env {
                match read(name) {
                    Some(text) if !text.is_empty() || setting.kind.empty_means_none() => {
                        self.set(setting.key, text, Source::Environment(name));
                    }
                    Some(_) | None => {}
                }
            }
        }
    }

    /// Takes what annotations say of these settings, over whatever was said before. Of a setting's annotations an earlier one wins.
    pub(crate) fn read_annotations<'a>(
        &mut self,
        settings: impl Iterator<Item = &'static Setting>,
        annotation: impl Fn(&'static str) -> Option<&'a str>,
    ) {
        for setting in settings {
            let said = setting.annotations.iter().find_map(|name| Some((*name, annotation(name)?)));
            if let Some((name, text)) = said {
                self.set(setting.key, String::from(text), Source::Annotation(name));
            }
        }
    }

    /// Says something about a setting, over whatever was said before.
    pub fn set(&mut self, key: Key, text: impl Into<Cow<'static, str>>, source: Source) {
        self.values.insert(key, (text.into(), source));
    }

    /// What was said, setting by setting.
    pub fn said(&self) -> impl Iterator<Item = (Key, &str, Source)> {
        self.values.iter().map(|(key, (text, source))| (*key, text.as_ref(), *source))
    }

    /// Notes something that was said and is not a setting's, such as an unknown flag, to be reported together with everything
    /// else that is wrong.
    pub fn refuse(&mut self, source: Source, value: &str, problem: Problem) {
        self.refused.push(source, value, problem);
    }

    /// What was noted so.
    #[must_use]
    pub const fn refused(&self) -> &InputErrors {
        &self.refused
    }

    /// Reads what holds for a setting; what is wrong with it is noted, with who said it.
    ///
    /// ```
    /// use redirect_core::{settings::{InputErrors, Key, RawSettings, Source}, values::Port};
    ///
    /// let mut raw = RawSettings::new();
    /// raw.set(Key::ProxyPort, "http", Source::Flag("envoy-port"));
    /// let mut errors = InputErrors::default();
    /// assert_eq!(raw.read(Key::ProxyPort, &mut errors, str::parse::<Port>), None);
    /// assert_eq!(errors.to_string(), "flag --envoy-port: \"http\" is not a whole number");
    /// ```
    pub fn read<T>(
        &self,
        key: Key,
        errors: &mut InputErrors,
        parse: impl FnOnce(&str) -> Result<T, Problem>,
    ) -> Option<T> {
        let (text, source) = self.get(key);
        errors.keep(key, source, text, parse(text))
    }

    /// Reads a list separated by commas. An empty list is empty. Empty elements are skipped, as the reference does,
    /// except in annotations, which it reads strictly; `parse` receives which it is.
    pub(crate) fn read_list<T>(
        &self,
        key: Key,
        errors: &mut InputErrors,
        parse: impl Fn(&str, bool) -> Result<T, Problem>,
    ) -> Option<Vec<T>> {
        let (text, source) = self.get(key);
        let strict = source.is_annotation();
        if text.is_empty() {
            return Some(Vec::new());
        }
        let elements = text.split(',').filter(|element| strict || !element.trim().is_empty());
        let found = if self.pod { elements.clone().count() } else { 0 };
        if found > MOST_IN_POD {
            errors.push_for(key, source, text, Problem::TooMany { found, most: MOST_IN_POD });
            return None;
        }
        let mut good = true;
        let values = elements
            .filter_map(|element| {
                let value = errors.keep(key, source, element, parse(element, strict));
                good &= value.is_some();
                value
            })
            .collect();
        good.then_some(values)
    }

    /// Reads a list of interfaces.
    pub(crate) fn read_interfaces(&self, key: Key, errors: &mut InputErrors) -> Option<Vec<InterfaceName>> {
        self.read_list(key, errors, |text, is_annotation| match text.trim() {
            "" => Err(Problem::EmptyElement),
            text if is_annotation => InterfaceName::parse_exact(text),
            text => text.parse(),
        })
    }

    /// Who said what holds for each setting.
    pub(crate) fn sources(&self) -> Sources {
        Sources::in_order(self.values.iter().map(|(key, (_, source))| (*key, *source)))
    }

    /// Whether the servers of `/etc/resolv.conf` matter to a plan: DNS capture is asked for and limited to them.
    #[must_use]
    pub fn needs_nameservers(&self) -> bool {
        let on = |key| parse_bool(self.get(key).0) == Ok(true);
        on(Key::RedirectDns) && !on(Key::CaptureAllDns) && !self.pod
    }

    /// What holds for a setting, and who said it.
    #[must_use]
    pub fn get(&self, key: Key) -> (&str, Source) {
        self.values.get(&key).map_or_else(
            || {
                let setting = key.setting();
                let default = if self.pod { setting.pod_default } else { None };
                (default.unwrap_or(setting.default), Source::Default)
            },
            |(text, source)| (text.as_ref(), *source),
        )
    }
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{string::ToString, vec};

    #[test]
    fn errors_of_the_input_alone_are_those_that_are_not_the_namespaces() {
        let mut raw = RawSettings::new();
        raw.set(Key::ProxyPort, "http", Source::Flag("envoy-port"));
        // No address at all: the network namespace is wrong, too.
        let errors = crate::Redirect::parse(&raw, &crate::settings::NamespaceFacts::new(&[])).unwrap_err();
        assert_eq!(errors.iter().count(), 2);
        let alone = errors.without_namespace();
        assert!(alone.iter().map(|error| error.source).eq([Source::Flag("envoy-port")]));
    }

    #[test]
    fn what_is_no_settings_is_noted_in_order() {
        let mut raw = RawSettings::new();
        assert_eq!(raw.refused(), &InputErrors::default());
        let mut noted = InputErrors::default();
        for (flag, problem) in [("unheard-of", Problem::NotANumber), ("another", Problem::LeadingZero)] {
            raw.refuse(Source::Flag(flag), "1", problem.clone());
            noted.push(Source::Flag(flag), "1", problem);
        }
        assert_eq!(raw.refused(), &noted);
        let sources = raw.refused().into_iter().map(|error| error.source);
        assert!(sources.eq(["unheard-of", "another"].map(Source::Flag)));
    }

    fn environment(pairs: &[(&str, &str)]) -> RawSettings {
        let mut raw = RawSettings::new();
        raw.read_environment(
            |_| true,
            |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into()),
        );
        raw
    }

    #[test]
    fn defaults_yield_to_the_environment_and_that_to_flags() {
        let mut raw = environment(&[("PROXY_UID", "7")]);
        assert_eq!(raw.get(Key::TproxyMark), ("1337", Source::Default));
        assert_eq!(raw.get(Key::ProxyUid), ("7", Source::Environment("PROXY_UID")));
        raw.set(Key::ProxyUid, "8", Source::Flag("proxy-uid"));
        assert_eq!(raw.get(Key::ProxyUid), ("8", Source::Flag("proxy-uid")));
    }

    #[test]
    fn a_pods_lists_are_limited_and_others_are_not() {
        let list = |count: usize| vec!["80"; count].join(",");
        let read = |mut raw: RawSettings, count: usize| {
            raw.set(Key::OutboundExcludePorts, list(count), Source::Annotation("a/b"));
            let there = ["10.1.0.2".parse().unwrap()];
            crate::Redirect::parse(&raw, &NamespaceFacts::new(&there)).map_err(|errors| errors.to_string())
        };
        assert!(read(RawSettings::for_pod(), MOST_IN_POD).is_ok());
        assert!(read(RawSettings::new(), MOST_IN_POD + 1).is_ok());
        let told = read(RawSettings::for_pod(), MOST_IN_POD + 1).unwrap_err();
        assert!(told.starts_with("annotation a/b: \"80,80,"), "{told}");
        assert!(told.ends_with("… are 16385 values; at most 16384 are possible"), "{told}");
    }

    #[test]
    fn only_limited_dns_capture_needs_the_servers() {
        let needs = |pairs: &[(&str, &str)]| environment(pairs).needs_nameservers();
        assert!(needs(&[("REDIRECT_DNS", "true")]));
        assert!(!needs(&[]) && !needs(&[("REDIRECT_DNS", "true"), ("CAPTURE_ALL_DNS", "true")]));
    }

    #[test]
    fn a_later_variable_of_a_setting_wins() {
        let raw = environment(&[("DROP_INVALID", "false"), ("INVALID_DROP", "true")]);
        assert_eq!(raw.get(Key::DropInvalid), ("true", Source::Environment("INVALID_DROP")));
    }

    #[test]
    fn an_empty_variable_is_a_value_for_lists_only() {
        let raw = environment(&[("ISTIO_OUTBOUND_OWNER_GROUPS", ""), ("INBOUND_CAPTURE_PORT", "")]);
        assert_eq!(raw.get(Key::OwnerGroups).0, "");
        assert_eq!(raw.get(Key::InboundCapturePort), ("15006", Source::Default));
    }

    #[test]
    fn a_pod_has_its_own_defaults() {
        assert_eq!(RawSettings::new().get(Key::OutboundExcludePorts).0, "");
        assert_eq!(RawSettings::for_pod().get(Key::OutboundExcludePorts).0, "15020");
    }
}
