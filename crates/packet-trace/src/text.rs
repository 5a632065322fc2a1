//! A trace for people, at most 80 columns wide where words allow a break.

use super::{Interface, Outcome, Packet, PacketEdit, RuleOrigin, Sender, Trace, TraceEvent};
use netfilter_state::ruleset::Plain;
use redirect_core::{rule::Hook, settings::Source};

/// How much of a trace to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Detail {
    /// The rules that match the packet, or may.
    Met,
    /// Every rule it meets, and why it does not match the packet.
    Every,
}

/// Columns of a terminal.
const WIDTH: usize = 80;

impl Trace {
    /// The trace in plain text.
    ///
    /// ```
    /// use packet_trace::{Detail, Packet, TraceRules};
    /// use redirect_core::{Families, Family, Redirect};
    ///
    /// let plan = Redirect::sidecar(Families::V4).build()?.plan();
    /// let packet = Packet::from_outside("192.0.2.1:40000".parse()?, "10.1.0.2:8080".parse()?).by("eth0");
    /// let trace = TraceRules::of_plan(&plan, Family::V4).trace(&packet);
    /// assert!(trace.text(Detail::Met).contains("ends at: proxy, inbound listener (port 15006)"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn text(&self, detail: Detail) -> String {
        let mut text = Text(String::new());
        text.line(0, &self.packet.to_string());
        for (number, step) in self.steps.iter().enumerate() {
            text.step(step, detail, self.decided == Some(number));
        }
        text.line(0, &format!("ends at: {}", self.fate()));
        if self.may.len() > 1 {
            for fate in &self.may {
                text.line(1, &format!("may be: {fate}"));
            }
            for unknown in &self.unknown {
                text.line(1, &format!("not known: {unknown}"));
            }
        }
        match self.deciding() {
            Some(TraceEvent::Rule { origin: Some(origin), .. }) => {
                text.line(0, &format!("because of {}: {}", said(origin), origin.purpose));
            }
            Some(TraceEvent::Rule { is_own: false, place, .. }) => {
                text.line(0, &format!("because of another program's rule in table {}", place.table));
            }
            Some(TraceEvent::Route { .. }) => text.line(0, "because of the namespace's routing"),
            Some(_) => {}
            None => text.line(0, "no rule matches it"),
        }
        text.0
    }
}

/// The setting, and its source; a program that made it without a name for it names it by its own words alone.
fn said(origin: &RuleOrigin) -> String {
    let name = origin.setting.setting().name();
    if let Source::Caller(words) = origin.source {
        words.to_owned()
    } else if origin.source == Source::Default {
        format!("{name} (default)")
    } else if origin.source.to_string() == name {
        name.to_string()
    } else {
        format!("{name} ({})", origin.source)
    }
}

struct Text(String);

impl Text {
    fn step(&mut self, step: &TraceEvent, detail: Detail, decides: bool) {
        match step {
            TraceEvent::Hook { hook, interface } => {
                let name = hook.name().to_ascii_lowercase();
                let by = interface.as_ref().map(|by| match hook {
                    Hook::Output | Hook::Postrouting => format!(", out by {by}"),
                    Hook::Prerouting | Hook::Input | Hook::Forward => format!(", in by {by}"),
                });
                self.line(0, &format!("{name}{}", by.unwrap_or_default()));
            }
            TraceEvent::Chain { place, priority } => {
                self.line(
                    1,
                    &format!("table {} chain {} (priority {priority})", place.table, Plain(&place.chain)),
                );
            }
            TraceEvent::Rule { place, depth, rule, outcome, origin, .. } => {
                let words = match outcome {
                    Outcome::Matched => String::new(),
                    Outcome::Unmatched(_) if detail == Detail::Met => return,
                    Outcome::Unmatched(condition) => format!("  [not: {condition}]"),
                    Outcome::Unknown(condition) => format!("  [unknown: {condition}]"),
                };
                let sign = if decides { '>' } else { ' ' };
                let number = place.rule.unwrap_or_default();
                let indent = depth.saturating_add(2);
                self.line(indent, &format!("{sign}{} {number}: {rule}{words}", Plain(&place.chain)));
                if let (Some(origin), Outcome::Matched) = (origin, outcome) {
                    self.line(indent.saturating_add(2), &format!("# {} [{}]", origin.purpose, said(origin)));
                }
            }
            TraceEvent::Policy { place } => {
                self.line(2, &format!(">policy of {}: drop", Plain(&place.chain)));
            }
            TraceEvent::Route { decides: words } => {
                self.line(2, &format!("{}{words}", if decides { ">" } else { "" }));
            }
            TraceEvent::Changed(change) => self.line(2, &format!("= {}", words(change))),
        }
    }

    /// A line, broken between words; what follows the first is indented.
    fn line(&mut self, indent: usize, text: &str) {
        // A name may have a line break; what follows must not pass for a line of the trace.
        let text = one_line(text);
        let mut start = indent.saturating_mul(2);
        let mut line = " ".repeat(start);
        let mut is_first = true;
        for word in text.split(' ') {
            let length = line.chars().count().saturating_add(word.chars().count()).saturating_add(1);
            if !is_first && length > WIDTH {
                self.put(&line);
                start = indent.saturating_add(3).saturating_mul(2);
                line = " ".repeat(start);
                is_first = true;
            }
            if !is_first {
                line.push(' ');
            }
            line.push_str(word);
            is_first = false;
        }
        self.put(&line);
    }

    fn put(&mut self, line: &str) {
        self.0.push_str(line.trim_end());
        self.0.push('\n');
    }
}

/// The same with control characters written out.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

fn words(change: &PacketEdit) -> String {
    let mark = |mark: &Option<u32>| mark.map_or_else(|| "unknown".to_string(), |mark| format!("{mark:#x}"));
    match change {
        PacketEdit::Mark { mark: value } => format!("mark {}", mark(value)),
        PacketEdit::ConnectionMark { mark: value } => format!("connection mark {}", mark(value)),
        PacketEdit::Destination { destination } => format!("destination {destination}"),
        PacketEdit::Zone { zone } => format!("conntrack zone {zone}"),
        PacketEdit::Rerouted { interface: Some(by) } => format!("routed by {by}"),
        PacketEdit::Rerouted { interface: None } => "routed by another interface".into(),
    }
}

/// `TCP 10.1.0.2:40000 to 192.0.2.1:80 by eth0, of user 1000 and group 1000`.
impl std::fmt::Display for Packet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut words: Vec<String> = Vec::new();
        words.push(self.protocol.name().to_ascii_uppercase());
        match (self.source, self.source_port) {
            (Some(source), Some(port)) => words.push(std::net::SocketAddr::new(source, port).to_string()),
            (Some(source), None) => words.push(source.to_string()),
            (None, _) => {}
        }
        words.push(format!("to {}", self.destination));
        match &self.interface {
            Interface::Named(name) => words.push(format!("by {name}")),
            Interface::Elsewhere => {}
        }
        match self.sender {
            Sender::Outside => words.push("from outside".into()),
            Sender::Local { uid, gid } => words.push(format!("of user {uid} and group {gid}")),
        }
        if self.mark != 0 {
            words.push(format!("with mark {:#x}", self.mark));
        }
        f.write_str(&words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_line_break_forges_no_line() {
        let mut text = Text(String::new());
        text.line(1, "table nat chain X\nends at: proxy\u{1b}[2J\u{9b}");
        assert_eq!(text.0, "  table nat chain X\\nends at: proxy\\u{1b}[2J\\u{9b}\n");
    }
}
