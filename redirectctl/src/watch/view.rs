//! What rules counted, as text.

use std::time::Duration;

use netfilter_state::ruleset::Counter;

use super::{CounterSnapshot, WatchedRule};
use crate::printable::Printable;
use crate::text_writer::{TextLayout, TextStyle, TextWriter};

/// How many lines of a screen are not rules: the subject, the heading, and what is left out.
const FRAME: usize = 4;
/// Clears a line before drawing it: behind a line as wide as the terminal, it would take its last character.
const ERASE: &str = "\u{1b}[K";
/// Said below totals, because it surprises.
const OF_NAT: &str =
    "only the first packet of a connection meets rules in nat tables: their packet counts are connections";

/// All rules with their totals.
#[must_use]
pub fn totals(subject: &str, look: &CounterSnapshot, layout: TextLayout) -> Printable {
    let mut paper = TextWriter::new(layout);
    paper.heading(subject);
    if look.rules.is_empty() {
        paper.line(2, "no rule of the mesh is in force");
        return paper.into_text();
    }
    let mut chain = None;
    for rule in &look.rules {
        let of = (&rule.place.table, &rule.place.chain);
        if chain != Some(of) {
            paper.heading(&format!("{} {}", of.0, of.1));
            paper.line(2, &format!("{:>9} {:>12}", "packets", "bytes"));
            chain = Some(of);
        }
        let number = rule.place.rule.unwrap_or_default();
        paper.labelled(2, &format!("{}  {number}: ", numbers(rule.counter)), &rule.text);
        for origin in &rule.origins {
            paper.labelled(
                27,
                "# ",
                &format!("{} [{}]", origin.purpose, origin.setting.said_by(origin.source)),
            );
        }
    }
    if look.without_counter() > 0 {
        paper.line(0, &silent(look));
    }
    paper.line(0, OF_NAT);
    paper.into_text()
}

fn silent(look: &CounterSnapshot) -> String {
    let (some, all) = (look.without_counter(), look.rules.len());
    format!("{some} of {all} rules do not count: they were created without counters")
}

fn numbers(counter: Option<Counter>) -> String {
    match counter {
        Some(counter) => format!("{:>9} {:>12}", counter.packets, counter.bytes),
        None => format!("{:>9} {:>12}", "-", "-"),
    }
}

/// The line that says what is watched from now on.
#[must_use]
pub fn started(time: &str, subject: &str, look: &CounterSnapshot, layout: TextLayout) -> Printable {
    let mut text = clipped(&format!("{time} {} rules of {subject}", look.rules.len()), layout.width);
    if look.without_counter() > 0 {
        text.push(&clipped(&silent(look), layout.width));
    }
    text
}

/// The line of a rule that counted.
#[must_use]
pub fn counted(time: &str, rule: &WatchedRule, added: Counter, layout: TextLayout) -> Printable {
    clipped(&format!("{time} +{} {}", added.packets, named(rule)), layout.width)
}

fn named(rule: &WatchedRule) -> String {
    let number = rule.place.rule.unwrap_or_default();
    format!("{} {} {number}: {}", rule.place.table, rule.place.chain, rule.text)
}

/// One line, cut where the terminal ends.
fn clipped(text: &str, width: usize) -> Printable {
    [Printable::of(text).clipped(width), Printable::own("\n")].into_iter().collect()
}

/// A terminal that shows all rules and is drawn again with every look.
#[derive(Debug, Clone, Copy)]
pub struct Screen<'a> {
    /// Whose rules they are.
    pub subject: &'a str,
    /// The rules.
    pub look: &'a CounterSnapshot,
    /// What they counted since the look before, by their index.
    pub added: &'a [(usize, Counter)],
    /// How long ago that was.
    pub since: Duration,
}

impl Screen<'_> {
    /// As it is drawn: over the previous frame, so that nothing flickers. If the terminal has too few lines, rules that
    /// counted come before others.
    #[must_use]
    pub fn text(&self, layout: TextLayout, height: usize) -> Printable {
        let room = height.saturating_sub(FRAME).max(1);
        let shown = self.shown(room);
        let mut lines = vec![(self.subject.to_owned(), Some(TextStyle::Bold))];
        lines.push((format!("{:>9} {:>7}  RULE", "PACKETS", "PER S"), Some(TextStyle::Dim)));
        for index in &shown {
            let Some(rule) = self.look.rules.get(*index) else { continue };
            let added = self.added_to(*index);
            let packets = rule.counter.map_or("-".to_owned(), |counter| counter.packets.to_string());
            let ink = (added.packets > 0).then_some(TextStyle::Green);
            lines.push((format!("{packets:>9} {:>7}  {}", self.rate(added), named(rule)), ink));
        }
        if self.look.rules.is_empty() {
            lines.push(("no rule of the mesh is in force".to_owned(), None));
        }
        let hidden = self.look.rules.len().saturating_sub(shown.len());
        if hidden > 0 {
            lines.push((format!("{hidden} more rules; --once shows all"), Some(TextStyle::Dim)));
        }
        let mut text = Printable::own("\u{1b}[H");
        for (line, ink) in lines {
            let line = Printable::of(&line).clipped(layout.width);
            text.push(&Printable::own(ERASE));
            text.push(&ink.filter(|_| layout.colour).map_or(line.clone(), |ink| ink.ink(&line)));
            text.push(&Printable::own("\r\n"));
        }
        text.push(&Printable::own("\u{1b}[J"));
        text
    }

    /// The rules to show, in their order.
    fn shown(&self, room: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.look.rules.len()).collect();
        let packets = |index: &usize| {
            self.look.rules.get(*index).and_then(|rule| rule.counter).map_or(0, |counter| counter.packets)
        };
        all.sort_by_key(|index| std::cmp::Reverse((self.added_to(*index).packets > 0, packets(index) > 0)));
        all.truncate(room);
        all.sort_unstable();
        all
    }

    fn added_to(&self, index: usize) -> Counter {
        self.added.iter().find(|(of, _)| *of == index).map_or_else(Counter::default, |(_, added)| *added)
    }

    /// Packets in a second, in tenths if few.
    fn rate(&self, added: Counter) -> String {
        let millis = u64::try_from(self.since.as_millis()).unwrap_or(u64::MAX);
        if added.packets == 0 || millis == 0 {
            return String::new();
        }
        let tenths = added.packets.saturating_mul(10_000) / millis;
        if tenths < 100 { format!("{}.{}", tenths / 10, tenths % 10) } else { (tenths / 10).to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::look;
    use super::*;

    #[test]
    fn a_screen_shows_what_counts_first_and_never_more_than_there_is_room_for() {
        let all: Vec<Option<u64>> = (0..50).map(|number| Some(u64::from(number % 7 == 6))).collect();
        let look = look(&all);
        let added = [(48, Counter { packets: 25, bytes: 1500 })];
        let screen =
            Screen { subject: "pod a/b", look: &look, added: &added, since: Duration::from_secs(10) };
        for height in [1, 5, 8, 24, 100] {
            let text = screen.text(TextLayout { width: 60, colour: false }, height);
            let plain = text.replace("\u{1b}[H", "").replace("\u{1b}[K", "").replace("\u{1b}[J", "");
            assert!(plain.lines().count() < height.max(5), "{height}: {plain}");
            assert!(plain.lines().all(|line| line.chars().count() <= 60), "{plain}");
            assert!(
                text.lines()
                    .all(|line| line.rfind(ERASE).is_none_or(|at| line[..at].ends_with('H') || at == 0)),
                "nothing is erased behind what was drawn: {text:?}"
            );
            assert!(
                plain.contains("ISTIO_OUTPUT 49: ") && plain.contains("    2.5  ip nat"),
                "{height}: {plain}"
            );
        }
    }

    #[test]
    fn lines_are_one_line_each_and_say_which_rules_do_not_count() {
        let layout = TextLayout::default();
        let mut look = look(&[Some(3), None]);
        look.rules[0].text = format!("-p tcp -m comment --comment \u{1b}[31m\n{}", "x".repeat(200));
        let line = counted("12:00:00", &look.rules[0], Counter { packets: 2, bytes: 9 }, layout);
        assert!(line.starts_with("12:00:00 +2 ip nat ISTIO_OUTPUT 1: -p tcp"), "{line}");
        assert!(
            line.ends_with("…\n") && line.matches('\n').count() == 1 && !line.contains('\u{1b}'),
            "{line}"
        );
        assert_eq!(line.trim_end().chars().count(), layout.width);
        assert!(started("12:00:00", "pod a/b", &look, layout).contains("1 of 2 rules do not count"));
        let text = totals("pod a/b", &look, layout);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("        3          180  1: -p tcp"), "{text}");
        assert!(
            totals("pod a/b", &CounterSnapshot::default(), layout)
                .contains("no rule of the mesh is in force")
        );
    }
}
