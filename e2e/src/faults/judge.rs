//! Judges the state after a fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::kind::Kind;

/// The traces of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// What is all there or not there at all, such as the rules of a namespace.
    pub together: BTreeSet<String>,
    /// What is each as it was or as it is wanted, such as files.
    pub each: BTreeMap<String, String>,
    /// What must never be, at no moment: a configuration that the runtime cannot load, foreign bytes that changed, a process or a mount left over.
    pub broken: Vec<String>,
}

impl Facts {
    /// How these differ from others, a line each.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let lost = other.together.difference(&self.together).map(|line| format!("- {line}"));
        let more = self.together.difference(&other.together).map(|line| format!("+ {line}"));
        let keys: BTreeSet<&String> = self.each.keys().chain(other.each.keys()).collect();
        let unlike = keys.into_iter().filter(|key| self.each.get(*key) != other.each.get(*key)).map(|key| {
            let shown =
                |facts: &Self| facts.each.get(key).map_or("absent", |value| value.as_str()).to_owned();
            format!("{key}: {} where {} was wanted", few(&shown(self)), few(&shown(other)))
        });
        lost.chain(more).chain(unlike).collect()
    }
}

/// The beginning of a text.
fn few(text: &str) -> String {
    let short: String = text.chars().take(160).collect();
    format!("{short:?}")
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// Not at all, in all the time it was given.
    Never,
}

/// All that is known of one injection.
#[derive(Clone, Debug)]
pub struct Evidence<'a> {
    /// The kind of fault.
    pub kind: Kind,
    /// Words of which a message about the cause has one, in lower case. If empty, any message will do.
    pub causes: &'a [String],
    /// Whether its output was lost.
    pub is_mute: bool,
    /// What must not be said.
    pub secrets: &'a [String],
    /// The exit code without a fault.
    pub expected: i32,
    /// How the program ended.
    pub ending: Ending,
    /// All it said.
    pub said: &'a str,
    /// What is wrong with what it said on standard output, if anything.
    pub bad_answer: Option<String>,
    /// The state before.
    pub before: &'a Facts,
    /// The state on success.
    pub wanted: &'a Facts,
    /// The state now.
    pub after: &'a Facts,
    /// How the same operation ended without a fault after that, and the state then.
    pub again: (Ending, &'a Facts),
}

/// What becomes of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultResult {
    /// It went as if there had been no fault.
    Wanted,
    /// It failed, said why, and left nothing half-done.
    Refused,
    /// It failed and named what it could not undo.
    Told,
    /// It died, and the next run repaired what it left.
    Mended,
    /// This is wrong.
    Red(String),
}

impl fmt::Display for FaultResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wanted => write!(f, "as wanted"),
            Self::Refused => write!(f, "refused"),
            Self::Told => write!(f, "told"),
            Self::Mended => write!(f, "mended"),
            Self::Red(why) => write!(f, "RED: {why}"),
        }
    }
}

/// The invariants of ARCHITECTURE.md, for whatever happened.
pub fn judge(evidence: &Evidence<'_>) -> FaultResult {
    judged(evidence).unwrap_or_else(FaultResult::Red)
}

fn judged(evidence: &Evidence<'_>) -> Result<FaultResult, String> {
    let Evidence { after, said, again, .. } = evidence;
    if let Some(secret) = evidence.secrets.iter().find(|secret| said.contains(&***secret)) {
        return Err(format!("a secret is reported ({} bytes): {}", secret.len(), tail(said)));
    }
    if let Some(broken) = after.broken.first() {
        return Err(format!("{broken}; it said {}", tail(said)));
    }
    let verdict = first_run(evidence)?;
    let (ending, facts) = again;
    if let Some(broken) = facts.broken.first() {
        return Err(format!("after the next run: {broken}"));
    }
    if *ending != Ending::Code(evidence.expected) {
        return Err(format!("the next run ends with {ending:?}; the first said {}", tail(said)));
    }
    let differs = facts.differences(evidence.wanted);
    if !differs.is_empty() {
        return Err(format!("the next run leaves {}", shown(&differs)));
    }
    Ok(verdict)
}

fn first_run(evidence: &Evidence<'_>) -> Result<FaultResult, String> {
    let Evidence { ending, said, after, wanted, .. } = evidence;
    if let Some(bad) = &evidence.bad_answer {
        return Err(format!("answers badly: {bad}"));
    }
    match *ending {
        Ending::Never => Err(format!("does not end; it said {}", tail(said))),
        Ending::Signal(_) if evidence.kind.may_kill() => Ok(FaultResult::Mended),
        Ending::Signal(signal) => Err(format!("dies of signal {signal}: {}", tail(said))),
        Ending::Code(code) if code == evidence.expected => {
            let differs = after.differences(wanted);
            if differs.is_empty() {
                return Ok(FaultResult::Wanted);
            }
            Err(format!("reports success: {}; it said {}", shown(&differs), tail(said)))
        }
        Ending::Code(0) => Err(format!("reports success instead of a failure: {}", tail(said))),
        Ending::Code(101) => Err(format!("panics: {}", tail(said))),
        Ending::Code(_) => {
            let lower = said.to_lowercase();
            let is_named =
                evidence.causes.is_empty() || evidence.causes.iter().any(|cause| lower.contains(cause));
            if said.trim().is_empty() && !evidence.is_mute {
                return Err("fails without a word".to_owned());
            }
            if !is_named {
                return Err(format!(
                    "does not name the cause ({}): {}",
                    evidence.causes.join(", "),
                    tail(said)
                ));
            }
            half_done(evidence)
        }
    }
}

/// What a failed run may leave: all as before, or all as wanted, or, where the fault lasts, what it names; of files, each as before or as wanted.
fn half_done(evidence: &Evidence<'_>) -> Result<FaultResult, String> {
    let Evidence { before, wanted, after, said, .. } = evidence;
    let keys: BTreeSet<&String> =
        before.each.keys().chain(after.each.keys()).chain(wanted.each.keys()).collect();
    for key in keys {
        let now = after.each.get(key);
        if now != before.each.get(key) && now != wanted.each.get(key) {
            let now = now.map_or("absent", |value| value.as_str());
            return Err(format!(
                "{key} is neither as before nor as wanted: {}; it said {}",
                few(now),
                tail(said)
            ));
        }
    }
    if after.together == before.together || after.together == wanted.together {
        return Ok(FaultResult::Refused);
    }
    let differs: Vec<&String> = after.together.symmetric_difference(&before.together).collect();
    let is_silent = |line: &&&String| {
        let (section, rest) = line.split_once(": ").unwrap_or(("", line));
        !is_named(section, rest, said)
    };
    let silent: Vec<String> = differs.iter().filter(is_silent).map(|line| (*line).clone()).collect();
    if silent.is_empty() && evidence.kind.strikes_once() {
        let left = differs.into_iter().cloned().collect::<Vec<_>>();
        return Err(format!("nothing kept it from undoing {}; it said {}", shown(&left), tail(said)));
    }
    if silent.is_empty() {
        return Ok(FaultResult::Told);
    }
    Err(format!("half-done and not named: {}; it said {}", shown(&silent), tail(said)))
}

/// Whether a message names what a line of a [section](test_support::netns::SnapshotDiff::section) is about: a rule by its table
/// (`nat -A OUTPUT ...`, `table inet istio-proxy-nat / ...`), everything else by what it is.
pub fn is_named(section: &str, line: &str, message: &str) -> bool {
    match section {
        "ip -4 rule" | "ip -6 rule" => message.contains("policy rule"),
        "ip -4 route" | "ip -6 route" => message.contains("route") || message.contains("::6"),
        "lo" => message.contains("::6"),
        _ => {
            let words = line
                .strip_prefix("table ")
                .map_or(line, |rest| rest.split_once(' ').map_or(rest, |(_, name)| name));
            words.split(' ').next().is_some_and(|table| message.contains(table))
        }
    }
}

fn shown(lines: &[String]) -> String {
    let first: Vec<&str> = lines.iter().take(3).map(String::as_str).collect();
    format!("{} differences: {}", lines.len(), first.join("; "))
}

/// The last lines, where the cause is.
fn tail(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    let text = lines[lines.len().saturating_sub(4)..].join(" | ");
    text.chars().take(900).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(together: &[&str], each: &[(&str, &str)]) -> Facts {
        Facts {
            together: together.iter().map(|line| (*line).to_owned()).collect(),
            each: each.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            broken: Vec::new(),
        }
    }

    /// An operation that adds two rules and changes two files, whatever became of it.
    struct Case {
        ending: Ending,
        said: &'static str,
        after: Facts,
        again: (Ending, Facts),
        kind: Kind,
        expected: i32,
    }

    fn before() -> Facts {
        facts(&["ip -4 rule: other"], &[("conflist", "old"), ("binary", "old")])
    }

    fn wanted() -> Facts {
        facts(
            &["ip -4 rule: other", "iptables-nft: nat -A OUTPUT x", "ip -4 rule: ours"],
            &[("conflist", "new"), ("binary", "new")],
        )
    }

    impl Case {
        fn failed(said: &'static str, after: Facts) -> Self {
            let again = (Ending::Code(0), wanted());
            Self { ending: Ending::Code(1), said, after, again, kind: Kind::InputOutput, expected: 0 }
        }

        fn verdict(&self) -> FaultResult {
            judge(&Evidence {
                kind: self.kind,
                causes: &["input/output error".to_owned()],
                is_mute: false,
                secrets: &["SECRET".to_owned()],
                expected: self.expected,
                ending: self.ending,
                said: self.said,
                bad_answer: None,
                before: &before(),
                wanted: &wanted(),
                after: &self.after,
                again: (self.again.0, &self.again.1),
            })
        }

        #[track_caller]
        fn is_red(&self, because: &str) {
            let verdict = self.verdict();
            assert!(
                matches!(&verdict, FaultResult::Red(why) if why.contains(because)),
                "{because}: {verdict}"
            );
        }
    }

    const CAUSE: &str = "error: Input/output error (os error 5)";

    #[test]
    fn what_is_as_before_or_as_wanted_or_named_is_green() {
        assert_eq!(Case::failed(CAUSE, before()).verdict(), FaultResult::Refused);
        let done = Case { ending: Ending::Code(0), ..Case::failed("", wanted()) };
        assert_eq!(done.verdict(), FaultResult::Wanted);
        let mut half = before();
        half.together.insert("ip -4 rule: ours".to_owned());
        let words = "Input/output error; a policy rule could not be removed";
        let named = Case { kind: Kind::FileLimit, ..Case::failed(words, half.clone()) };
        assert_eq!(named.verdict(), FaultResult::Told);
        Case::failed(words, half).is_red("nothing kept it from undoing");
        let mut one_file = before();
        one_file.each.insert("binary".to_owned(), "new".to_owned());
        assert_eq!(Case::failed(CAUSE, one_file).verdict(), FaultResult::Refused);
        let died = Case { ending: Ending::Signal(9), kind: Kind::Killed, ..Case::failed("", before()) };
        assert_eq!(died.verdict(), FaultResult::Mended);
    }

    #[test]
    fn every_half_done_state_is_red() {
        for line in ["iptables-nft: nat -A OUTPUT x", "ip -4 rule: ours"] {
            let mut half = before();
            half.together.insert(line.to_owned());
            Case::failed(CAUSE, half).is_red("half-done and not named");
        }
        let mut lost = before();
        lost.together.clear();
        Case::failed(CAUSE, lost).is_red("half-done and not named");
        for (file, value) in [("conflist", "ne"), ("conflist.tmp", "new")] {
            let mut torn = before();
            torn.each.insert(file.to_owned(), value.to_owned());
            Case::failed(CAUSE, torn).is_red("neither as before nor as wanted");
        }
        let mut gone = before();
        gone.each.remove("conflist");
        Case::failed(CAUSE, gone).is_red("absent");
    }

    #[test]
    fn what_must_never_be_is_red_also_where_the_program_was_killed() {
        let mut after = before();
        after.broken.push("the runtime cannot load 10-calico.conflist".to_owned());
        let case = Case { ending: Ending::Signal(9), kind: Kind::Killed, ..Case::failed("", after) };
        case.is_red("cannot load");
    }

    #[test]
    fn endings_and_words_are_judged() {
        Case { ending: Ending::Never, ..Case::failed(CAUSE, before()) }.is_red("does not end");
        Case { ending: Ending::Signal(11), ..Case::failed(CAUSE, before()) }.is_red("dies of signal 11");
        Case { ending: Ending::Code(101), ..Case::failed(CAUSE, before()) }.is_red("panics");
        Case { ending: Ending::Code(0), ..Case::failed(CAUSE, before()) }.is_red("reports success");
        Case { ending: Ending::Code(0), expected: 1, ..Case::failed(CAUSE, before()) }
            .is_red("instead of a failure");
        Case::failed("", before()).is_red("without a word");
        Case::failed("it failed", before()).is_red("does not name the cause");
        Case::failed("Input/output error of SECRET", before()).is_red("secret");
    }

    #[test]
    fn the_next_run_is_judged() {
        let case = Case { again: (Ending::Code(1), before()), ..Case::failed(CAUSE, before()) };
        case.is_red("the next run ends with Code(1)");
        let mut left = wanted();
        left.each.insert("conflist.tmp".to_owned(), "torn".to_owned());
        Case { again: (Ending::Code(0), left), ..Case::failed(CAUSE, before()) }
            .is_red("the next run leaves");
    }
}
