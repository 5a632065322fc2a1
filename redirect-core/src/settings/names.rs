//! Misspelt names of variables and annotations: which one of ours is meant.

use super::{Key, SETTINGS};
use alloc::{borrow::ToOwned, string::String, vec::Vec};
use core::fmt;

/// How many letters a misspelt name may be off.
const NEAR: usize = 2;
/// Names shorter than this are near to too many others.
const LEAST_LENGTH: usize = 6;
/// Names shorter than this may be one letter off.
const SHORT: usize = 10;
/// The longest piece of a name shown.
const SHOWN: usize = 80;
/// Annotations that begin so are ours alone.
const OUR_ANNOTATIONS: &str = "traffic.sidecar.istio.io/";
/// Annotations that end in this before their slash are of the same project.
const OUR_DOMAIN: &str = "istio.io";

/// Where a misspelt name was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum NamePlace {
    /// The environment of the program.
    Environment,
    /// The pod's annotations.
    Annotations,
    /// The environment of the pod's proxy container.
    ProxyEnvironment,
}

/// A name that looks like one of ours and is none: it has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Misspelt {
    /// Where it was found.
    pub place: NamePlace,
    /// The name.
    pub given: String,
    /// The name that is probably meant.
    pub meant: Option<&'static str>,
}

impl fmt::Display for Misspelt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Escaped and cut, because the name may come from a pod.
        let shown: String = self.given.chars().take(SHOWN).collect();
        let shown = shown.escape_debug();
        match self.place {
            NamePlace::Environment => write!(f, "environment variable {shown}")?,
            NamePlace::Annotations => write!(f, "annotation {shown}")?,
            NamePlace::ProxyEnvironment => write!(f, "variable {shown} of container istio-proxy")?,
        }
        f.write_str(" is no setting and is ignored")?;
        self.meant.map_or(Ok(()), |meant| write!(f, "; is {meant} meant?"))
    }
}

/// The names of a program's environment that look like variables of ours and are none. As with
/// [`RawSettings::read_environment`], `wanted` chooses the settings that the program reads there.
///
/// [`RawSettings::read_environment`]: super::RawSettings::read_environment
///
/// ```
/// use redirect_core::settings::misspelt_variables;
///
/// let told: Vec<_> = misspelt_variables(["ISTIO_INBOUND_PORT", "PATH"], |_| true);
/// assert_eq!(told.len(), 1);
/// assert_eq!(told[0].meant, Some("ISTIO_INBOUND_PORTS"));
/// ```
pub fn misspelt_variables<'a>(
    environment: impl IntoIterator<Item = &'a str>,
    wanted: impl Fn(Key) -> bool,
) -> Vec<Misspelt> {
    // An environment has hundreds of variables where a pod sees many services.
    let settings = SETTINGS.iter().filter(|setting| wanted(setting.key));
    let names: Vec<Name<'static>> =
        settings.flat_map(|setting| setting.env.iter().copied()).map(Name::new).collect();
    let misspelt = |given: &'a str| {
        let meant = nearest(given, names.iter().copied())?;
        Some(Misspelt { place: NamePlace::Environment, given: given.to_owned(), meant: Some(meant) })
    };
    environment.into_iter().filter_map(misspelt).collect()
}

/// The variables of a pod's proxy container that look like those we read there and are not.
pub(crate) fn misspelt_proxy_variable(given: &str) -> Option<Misspelt> {
    // The proxy has variables of its own, so one that is ours elsewhere is not misspelt here.
    let is_ours = SETTINGS.iter().any(|setting| setting.env.contains(&given));
    let meant = meant(given, SETTINGS.iter().filter_map(|setting| setting.proxy_env)).filter(|_| !is_ours)?;
    Some(Misspelt { place: NamePlace::ProxyEnvironment, given: given.to_owned(), meant: Some(meant) })
}

/// An annotation that looks like one of ours and is none.
pub(crate) fn misspelt_annotation(given: &str) -> Option<Misspelt> {
    let names = || SETTINGS.iter().flat_map(|setting| setting.annotations.iter().copied());
    if names().any(|name| name == given) {
        return None;
    }
    let own = |name: &str| name.rsplit_once('/').map(|(_, own)| own.to_ascii_lowercase());
    let of_the_project = given.split_once('/').is_some_and(|(domain, _)| domain.ends_with(OUR_DOMAIN));
    let elsewhere = || names().find(|name| of_the_project && own(name) == own(given));
    let meant = meant(given, names()).or_else(elsewhere);
    let is_ours = given.starts_with(OUR_ANNOTATIONS);
    (meant.is_some() || is_ours).then(|| Misspelt {
        place: NamePlace::Annotations,
        given: given.to_owned(),
        meant,
    })
}

/// The name that somebody meant who wrote another: the nearest of these, if it is at most two letters off (of a short
/// name, one). Capitals, dashes, dots and underscores count as the same. None for a name that is among them.
pub fn meant<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest(given, names.into_iter().map(Name::new))
}

/// A name, with which letters it has.
#[derive(Debug, Clone, Copy)]
struct Name<'a> {
    text: &'a str,
    letters: u32,
}

impl<'a> Name<'a> {
    fn new(text: &'a str) -> Self {
        // Capitals and small letters differ in a bit that does not count here; what else falls together does no harm.
        let letters =
            text.bytes().fold(0, |letters, byte| letters | 1_u32.wrapping_shl(u32::from(byte & 31)));
        Self { text, letters }
    }

    /// A lower bound of the distance to another name: a change brings in at most one letter that was not there. Dashes,
    /// dots and underscores, which count as the same, may bring in one each.
    fn is_far_from(&self, other: &Self, limit: usize) -> bool {
        let punctuation = [b'-', b'.', b'_'].into_iter().fold(0, |bits, byte| bits | 1_u32 << (byte & 31));
        let missing = self.letters & !other.letters & !punctuation;
        usize::try_from(missing.count_ones()).unwrap_or(usize::MAX) > limit
    }
}

fn nearest<'a>(given: &str, names: impl Iterator<Item = Name<'a>>) -> Option<&'a str> {
    let given_name = Name::new(given);
    let given_letters = folded(given);
    let mut nearest: Option<(usize, &str)> = None;
    for name in names {
        if name.text == given {
            return None;
        }
        let limit = match name.text.len() {
            0..LEAST_LENGTH => continue,
            LEAST_LENGTH..SHORT => NEAR / 2,
            _ => NEAR,
        };
        // Most of an environment is told apart by this alone.
        if given_letters.len().abs_diff(name.text.len()) > limit
            || given_name.is_far_from(&name, limit)
            || name.is_far_from(&given_name, limit)
        {
            continue;
        }
        let distance = distance(&given_letters, &folded(name.text));
        if distance <= limit && nearest.is_none_or(|best| (distance, name.text) < best) {
            nearest = Some((distance, name.text));
        }
    }
    nearest.map(|(_, name)| name)
}

fn folded(name: &str) -> Vec<char> {
    let fold = |c: char| if matches!(c, '-' | '.') { '_' } else { c.to_ascii_lowercase() };
    name.chars().map(fold).collect()
}

/// How many letters have to be added, left out, replaced or exchanged with their neighbour (optimal string alignment).
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (row, from) in a.iter().enumerate() {
        let mut next = Vec::with_capacity(last.len());
        next.push(row.saturating_add(1));
        for (column, to) in b.iter().enumerate() {
            let at = |line: &[usize], column: usize| line.get(column).copied().unwrap_or(usize::MAX);
            let replaced = at(&last, column).saturating_add(usize::from(from != to));
            let left_out = at(&last, column.saturating_add(1)).saturating_add(1);
            let added = at(&next, column).saturating_add(1);
            let mut best = replaced.min(left_out).min(added);
            if let (Some(row), Some(column)) = (row.checked_sub(1), column.checked_sub(1))
                && a.get(row) == Some(to)
                && b.get(column) == Some(from)
            {
                best = best.min(at(&before, column).saturating_add(1));
            }
            next.push(best);
        }
        before = core::mem::replace(&mut last, next);
    }
    last.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_distance_counts_letters() {
        let distance =
            |a: &str, b: &str| distance(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>());
        for (a, b, wanted) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("abc", "abc", 0),
            ("abc", "ab", 1),
            ("abc", "abcd", 1),
            ("abc", "axc", 1),
            ("abc", "acb", 1),
            ("abcd", "badc", 2),
            ("ca", "abc", 3),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(a, b), wanted, "{a} {b}");
        }
    }

    #[test]
    fn only_what_is_far_is_told_apart_by_its_letters() {
        let words = [
            "",
            "abc",
            "acb",
            "abcd",
            "INBOUND_PORT",
            "inbound-ports",
            "OUTBOUND.PORTS",
            "kitten",
            "sitting",
        ];
        for (a, b) in words.iter().flat_map(|a| words.map(|b| (*a, b))) {
            let distance = distance(&folded(a), &folded(b));
            for limit in 0..8 {
                let is_far = Name::new(a).is_far_from(&Name::new(b), limit);
                assert!(!is_far || distance > limit, "{a} {b} {limit} {distance}");
            }
        }
        assert!(Name::new("abc").is_far_from(&Name::new("xyz"), 2));
    }

    #[test]
    fn misspelt_variables_name_what_is_meant() {
        let meant = |given| misspelt_variables([given], |_| true).first().and_then(|misspelt| misspelt.meant);
        assert_eq!(meant("ISTIO_INBOUND_PORT"), Some("ISTIO_INBOUND_PORTS"));
        assert_eq!(meant("istio_service_cidr"), Some("ISTIO_SERVICE_CIDR"));
        assert_eq!(meant("ISTIO_DUAL_STAKC"), Some("ISTIO_DUAL_STACK"));
        assert_eq!(meant("DRY-RUN"), Some("DRY_RUN"));
        // Right ones, the proxy's own and other people's.
        for right in [
            "ISTIO_INBOUND_PORTS",
            "DRY_RUN",
            "ISTIO_META_CLUSTER_ID",
            "PROXY_CONFIG",
            "BACKEND_PORT",
            "PATH",
            "",
        ] {
            assert_eq!(misspelt_variables([right], |_| true), [], "{right}");
        }
        for setting in SETTINGS {
            assert_eq!(misspelt_variables(setting.env.iter().copied(), |_| true), [], "{:?}", setting.key);
        }
    }

    #[test]
    fn misspelt_annotations_name_what_is_meant() {
        let meant = |given| misspelt_annotation(given).map(|misspelt| misspelt.meant);
        let excluded = Some(Some("traffic.sidecar.istio.io/excludeOutboundPorts"));
        assert_eq!(meant("traffic.sidecar.istio.io/excludeOutboundPort"), excluded);
        assert_eq!(meant("traffic.sidecar.istio.io/excludeoutboundports"), excluded);
        assert_eq!(meant("sidecar.istio.io/excludeOutboundPorts"), excluded);
        assert_eq!(meant("traffic.sidecar.istio.io/somethingElse"), Some(None));
        for right in
            ["sidecar.istio.io/inject", "sidecar.istio.io/status", "example.com/excludeOutboundPorts", ""]
        {
            assert_eq!(meant(right), None, "{right}");
        }
        for setting in SETTINGS {
            assert!(setting.annotations.iter().all(|name| meant(name).is_none()), "{:?}", setting.key);
        }
    }

    #[test]
    fn hostile_names_are_shown_escaped_and_cut() {
        let given = "traffic.sidecar.istio.io/".to_owned() + &"\u{1b}[2J\n".repeat(100);
        let text = misspelt_annotation(&given).unwrap().to_string();
        assert!(!text.contains(['\n', '\u{1b}']) && text.len() < 600, "{text}");
    }
}
