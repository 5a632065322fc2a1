//! What the agent reports of its node's pods in ambient mode, and others read: a line with their number, and one for each that is pending.

use std::fmt;

/// How many pending pods have a line.
const MOST_PENDING: usize = 10;
/// What follows the numbers.
const HEADLINE: &str = " ambient pods enrolled, verified";
/// How the line of a pending pod begins.
const INDENT: &str = "  ";

/// How many pods are enrolled, of how many that are to be.
#[must_use]
pub fn headline(enrolled: usize, wanted: usize) -> String {
    format!("{enrolled} of {wanted}{HEADLINE}")
}

/// The node's pods in ambient mode.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EnrolmentReport {
    /// Pods that are to be enrolled.
    pub wanted: usize,
    /// Those of them of which everything is verified.
    pub enrolled: usize,
    /// Names of pods that are not as wanted, `NAMESPACE/NAME`, and why.
    pub pending: Vec<(String, String)>,
}

impl EnrolmentReport {
    /// The report in a longer text, if that has one; of pending pods those that have a line.
    #[must_use]
    pub fn find(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let (enrolled, wanted) = lines.by_ref().find_map(|line| {
            let (enrolled, wanted) = line.strip_suffix(HEADLINE)?.split_once(" of ")?;
            Some((enrolled.parse().ok()?, wanted.parse().ok()?))
        })?;
        let of_pods = lines.map_while(|line| line.strip_prefix(INDENT));
        let pending = of_pods.filter_map(|line| {
            let (name, why) = line.split_once(": ")?;
            name.contains('/').then(|| (name.to_owned(), why.to_owned()))
        });
        Some(Self { wanted, enrolled, pending: pending.collect() })
    }

    /// Why a pod is pending, if it is.
    #[must_use]
    pub fn reason(&self, name: &str) -> Option<&str> {
        self.pending.iter().find(|(pending, _)| pending == name).map(|(_, why)| why.as_str())
    }
}

impl fmt::Display for EnrolmentReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&headline(self.enrolled, self.wanted))?;
        f.write_str(&reasons(&self.pending))
    }
}

/// A line for each of the first pods that are not as wanted, by name, with the reason; then the number of the others.
#[must_use]
pub fn reasons(pods: &[(String, String)]) -> String {
    let first = pods.iter().take(MOST_PENDING);
    let mut lines: String =
        first.map(|(name, why)| format!("\n{INDENT}{name}: {}", why.replace(['\n', '\r'], " "))).collect();
    let more = pods.len().saturating_sub(MOST_PENDING);
    if more > 0 {
        lines += &format!("\n{INDENT}and {more} more");
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_pending_pods_have_a_line_and_the_others_are_counted() {
        let pending = (0..12).map(|number| (format!("shop/cart-{number:02}"), "no answer:\nnone".to_owned()));
        let report = EnrolmentReport { wanted: 14, enrolled: 2, pending: pending.collect() };
        let text = report.to_string();
        assert!(
            text.starts_with("2 of 14 ambient pods enrolled, verified\n  shop/cart-00: no answer: none\n")
        );
        assert!(text.ends_with("\n  shop/cart-09: no answer: none\n  and 2 more"), "{text}");
        let found = EnrolmentReport::find(&format!("ready\n5 of 5 meshed pods verified\n{text}\n"));
        let found = found.expect("a report");
        assert_eq!((found.wanted, found.enrolled, found.pending.len()), (14, 2, 10));
        assert_eq!(found.reason("shop/cart-09"), Some("no answer: none"));
        assert_eq!((found.reason("shop/cart-10"), found.reason("and 2 more")), (None, None));
        assert_eq!(EnrolmentReport::find("ready\n5 of 5 meshed pods verified\n"), None);
    }

    proptest! {
        #[test]
        fn what_was_written_is_found(
            enrolled: usize,
            wanted: usize,
            pending in prop::collection::vec(("[a-z]{1,3}/[a-z.-]{1,3}", "[ -~]{0,20}"), 0..=MOST_PENDING),
            before in "[ -~]{0,20}",
        ) {
            let report = EnrolmentReport { wanted, enrolled, pending };
            prop_assert_eq!(EnrolmentReport::find(&format!("{before}\n{report}\n")), Some(report));
        }

        #[test]
        fn any_text_may_hold_no_report(text in "(.|\n){0,200}") {
            let _ = EnrolmentReport::find(&text);
        }
    }
}
