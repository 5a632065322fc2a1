//! Misspelt names of variables and annotations: which one of ours is meant.

use super::{Key, Setting};
use alloc::{borrow::ToOwned, string::String, vec::Vec};
use core::{fmt, str::Chars};

/// How many letters a misspelt name may be off.
const NEAR: u32 = 2;
/// How much longer or shorter that makes it at most.
const LONGER: usize = NEAR as usize;
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
pub(crate) enum NamePlace {
    /// The environment of the program.
    Environment,
    /// The pod's annotations.
    Annotations,
    /// The environment of the pod's proxy container.
    ProxyEnvironment,
}

/// A name that resembles one of ours but is not one: it has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Misspelt {
    /// Where it was found.
    pub(crate) place: NamePlace,
    /// The name.
    pub given: String,
    /// The name probably intended.
    pub meant: Option<&'static str>,
}

impl Misspelt {
    /// The names of a program's environment that look like variables of ours and are none. As with
    /// [`RawSettings::read_environment`], `wanted` chooses the settings that the program reads there.
    ///
    /// [`RawSettings::read_environment`]: super::RawSettings::read_environment
    ///
    /// ```
    /// use redirect_core::settings::Misspelt;
    ///
    /// let found: Vec<_> = Misspelt::variables(["ISTIO_INBOUND_PORT", "PATH"], |_| true);
    /// assert_eq!(found.len(), 1);
    /// assert_eq!(found[0].meant, Some("ISTIO_INBOUND_PORTS"));
    /// ```
    pub fn variables<'a>(
        environment: impl IntoIterator<Item = &'a str>,
        wanted: impl Fn(Key) -> bool,
    ) -> Vec<Self> {
        // An environment has hundreds of variables where a pod sees many services.
        let settings = Setting::ALL.iter().filter(|setting| wanted(setting.key));
        let mut names: Vec<Name<'static>> =
            settings.flat_map(|setting| setting.env.iter().copied()).map(Name::new).collect();
        names.sort_unstable_by_key(|name| name.length);
        let misspelt = |given: &'a str| {
            let length = given.chars().count();
            let first = names.partition_point(|name| name.length.saturating_add(LONGER) < length);
            let end = names.partition_point(|name| name.length <= length.saturating_add(LONGER));
            let meant = nearest(given, names.get(first..end).unwrap_or_default().iter().copied())?;
            Some(Self { place: NamePlace::Environment, given: given.to_owned(), meant: Some(meant) })
        };
        environment.into_iter().filter_map(misspelt).collect()
    }

    /// The name probably intended by a misspelt one: the nearest of these, if it is at most two letters off (of a short
    /// name, one). Capitals, dashes, dots and underscores count as the same. None for a name that is among them.
    pub fn nearest<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
        nearest(given, names.into_iter().map(Name::new))
    }
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
        f.write_str(" is not a setting and is ignored")?;
        self.meant.map_or(Ok(()), |meant| write!(f, "; did you mean {meant}?"))
    }
}

/// The variables of a pod's proxy container that look like those we read there and are not.
pub(crate) fn misspelt_proxy_variable(given: &str) -> Option<Misspelt> {
    // The proxy has variables of its own, so one that is ours elsewhere is not misspelt here.
    let is_ours = Setting::ALL.iter().any(|setting| setting.env.contains(&given));
    let meant = Misspelt::nearest(given, Setting::ALL.iter().filter_map(|setting| setting.proxy_env))
        .filter(|_| !is_ours)?;
    Some(Misspelt { place: NamePlace::ProxyEnvironment, given: given.to_owned(), meant: Some(meant) })
}

/// An annotation that resembles one of ours but is not one.
pub(crate) fn misspelt_annotation(given: &str) -> Option<Misspelt> {
    let names = || Setting::ALL.iter().flat_map(|setting| setting.annotations.iter().copied());
    if names().any(|name| name == given) {
        return None;
    }
    let own = |name: &str| name.rsplit_once('/').map(|(_, own)| own.to_ascii_lowercase());
    let of_the_project = given.split_once('/').is_some_and(|(domain, _)| domain.ends_with(OUR_DOMAIN));
    let elsewhere = || names().find(|name| of_the_project && own(name) == own(given));
    let meant = Misspelt::nearest(given, names()).or_else(elsewhere);
    let is_ours = given.starts_with(OUR_ANNOTATIONS);
    (meant.is_some() || is_ours).then(|| Misspelt {
        place: NamePlace::Annotations,
        given: given.to_owned(),
        meant,
    })
}

/// A name, with how many letters it has and which.
#[derive(Debug, Clone, Copy)]
struct Name<'a> {
    text: &'a str,
    length: usize,
    letters: u32,
}

impl<'a> Name<'a> {
    fn new(text: &'a str) -> Self {
        // Dashes, dots and underscores count as the same; capitals and small letters differ in a bit that does not count
        // here. What else falls together does no harm.
        let bit = |byte: u8| 1_u32.wrapping_shl(u32::from(byte & 31));
        let counts = |byte: &u8| *byte >= b'0' && *byte != b'_' && byte.is_ascii();
        let letters = text.bytes().filter(counts).fold(0, |all, byte| all | bit(byte));
        Self { text, length: text.chars().count(), letters }
    }

    /// Whether this alone shows that two names are further from each other: a change brings in at most one letter.
    fn is_far_from(&self, other: &Self, limit: u32) -> bool {
        more_bits(self.letters & !other.letters, limit) || more_bits(other.letters & !self.letters, limit)
    }
}

/// Whether more than `limit` bits are set: that many are taken away, the last first.
fn more_bits(bits: u32, limit: u32) -> bool {
    (0..limit).fold(bits, |bits, _| bits & bits.wrapping_sub(1)) != 0
}

fn nearest<'a>(given: &str, names: impl Iterator<Item = Name<'a>>) -> Option<&'a str> {
    let given = Name::new(given);
    let mut nearest: Option<(u32, &str)> = None;
    for name in names {
        if name.text == given.text {
            return None;
        }
        let limit = match name.length {
            0..LEAST_LENGTH => continue,
            LEAST_LENGTH..SHORT => NEAR / 2,
            _ => NEAR,
        };
        // Most of an environment is distinguished by its letters alone.
        if given.is_far_from(&name, limit) {
            continue;
        }
        let Some(distance) = distance(given.text.chars(), name.text.chars(), limit) else { continue };
        let found = (distance, name.text);
        nearest = Some(nearest.map_or(found, |best| best.min(found)));
    }
    nearest.map(|(_, name)| name)
}

/// How many letters have to be added, left out, replaced or exchanged with their neighbour (optimal string alignment); none
/// where it is more than `limit`, which is small: every change is tried in every way.
fn distance(a: Chars<'_>, b: Chars<'_>, limit: u32) -> Option<u32> {
    let (mut a, mut b) = (a, b);
    let (mut behind_a, mut behind_b) = (a.clone(), b.clone());
    let (first, other) = loop {
        match (behind_a.next().map(folded), behind_b.next().map(folded)) {
            (None, None) => return Some(0),
            (first, other) if first == other => (a, b) = (behind_a.clone(), behind_b.clone()),
            differing => break differing,
        }
    };
    let limit = limit.checked_sub(1)?;
    // Where one has ended, this is what adding or leaving out comes to.
    let replaced = distance(behind_a.clone(), behind_b.clone(), limit);
    let left_out = first.and_then(|_| distance(behind_a.clone(), b, limit));
    let added = other.and_then(|_| distance(a, behind_b.clone(), limit));
    let (second, other_second) = (behind_a.next().map(folded), behind_b.next().map(folded));
    let are_exchanged = second.is_some() && second == other && first == other_second;
    let exchanged = are_exchanged.then(|| distance(behind_a, behind_b, limit)).flatten();
    let best = [replaced, left_out, added, exchanged].into_iter().flatten().min()?;
    Some(best.saturating_add(1))
}

fn folded(letter: char) -> char {
    if matches!(letter, '-' | '.') { '_' } else { letter.to_ascii_lowercase() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_distance_counts_letters() {
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
            for limit in 0..6 {
                assert_eq!(
                    distance(a.chars(), b.chars(), limit),
                    Some(wanted).filter(|it| *it <= limit),
                    "{a} {b} {limit}"
                );
            }
        }
    }

    #[test]
    fn a_variable_may_be_two_letters_longer_or_shorter_than_the_one_that_is_meant() {
        let meant =
            |given: &'static str| Misspelt::variables([given], |_| true).first().and_then(|one| one.meant);
        for given in
            ["ISTIO_INBOUND_PORTSXY", "ISTIO_INBOUND_PORTSX", "ISTIO_INBOUND_PORT", "ISTIO_INBOUND_POR"]
        {
            assert_eq!(meant(given), Some("ISTIO_INBOUND_PORTS"), "{given}");
        }
        for given in ["ISTIO_INBOUND_PORTSXYZ", "ISTIO_INBOUND_PO", "ISTIO_INBOUND_PORTS"] {
            assert_eq!(meant(given), None, "{given}");
        }
        for name in Setting::ALL.iter().flat_map(|setting| setting.env).filter(|name| name.len() >= SHORT) {
            let longer = alloc::format!("{name}XY");
            let told = Misspelt::variables([longer.as_str()], |_| true);
            assert_eq!(told.first().and_then(|one| one.meant), Some(*name), "{longer}");
        }
    }

    #[test]
    fn of_a_short_name_fewer_letters_may_differ() {
        let meant = |given, name| nearest(given, core::iter::once(Name::new(name)));
        assert_eq!(meant("dry-rnu", "dry-run"), Some("dry-run"));
        assert_eq!(meant("dry-nur", "dry-run"), None);
        assert_eq!((meant("prot", "port"), meant("prots", "ports")), (None, None));
        assert_eq!(meant("inbuond-prots", "inbound-ports"), Some("inbound-ports"));
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
            for limit in 0..5 {
                let is_far = Name::new(a).is_far_from(&Name::new(b), limit);
                let distance = distance(a.chars(), b.chars(), limit);
                assert!(!is_far || distance.is_none(), "{a} {b} {limit} {distance:?}");
            }
        }
        assert!(Name::new("abc").is_far_from(&Name::new("xyz"), 2));
    }

    #[test]
    fn misspelt_variables_name_what_is_meant() {
        let meant =
            |given| Misspelt::variables([given], |_| true).first().and_then(|misspelt| misspelt.meant);
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
            assert_eq!(Misspelt::variables([right], |_| true), [], "{right}");
        }
        for setting in Setting::ALL {
            assert_eq!(Misspelt::variables(setting.env.iter().copied(), |_| true), [], "{:?}", setting.key);
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
        for setting in Setting::ALL {
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
