//! What the user sees. Everything here takes [`Printable`] text, and nothing else in this program writes.

use std::io::{self, ErrorKind, IsTerminal as _, Write as _};

use presentation::Printable;
use presentation::text_writer::{ColorChoice, TextLayout};

use crate::CommandFailure;

/// Writes the answer. A reader that ends early has enough of it.
pub(crate) fn print(text: &Printable) -> Result<(), CommandFailure> {
    pass(text).map(drop)
}

/// Writes a part of the answer; whether its reader takes more.
pub(crate) fn pass(text: &Printable) -> Result<bool, CommandFailure> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(CommandFailure(format!("cannot write to standard output: {error}"))),
        Ok(()) => Ok(true),
    }
}

/// Writes beside the answer.
pub(crate) fn note(text: &Printable) {
    // Nothing is left to report to.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Reports why a command cannot be carried out.
pub(crate) fn complain(failure: &CommandFailure) {
    note(&Printable::line(&format!("kubectl-redirect: {failure}")));
}

/// How text on standard output is laid out.
pub(crate) fn layout() -> TextLayout {
    let terminal = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    TextLayout::new(io::stdout().is_terminal(), terminal, ColorChoice::Auto, |name| std::env::var(name).ok())
}

/// How far it is, on a terminal.
pub(crate) struct Progress {
    all: usize,
    done: usize,
    is_shown: bool,
}

impl Progress {
    pub(crate) fn new(all: usize) -> Self {
        let progress = Self { all, done: 0, is_shown: io::stderr().is_terminal() };
        progress.show(&Printable::of(&format!("0 of {all} nodes")));
        progress
    }

    pub(crate) fn step(&mut self) {
        self.done += 1;
        self.show(&Printable::of(&format!("{} of {} nodes", self.done, self.all)));
    }

    fn show(&self, words: &Printable) {
        if self.is_shown {
            note(&[Printable::own("\r\u{1b}[K"), words.clone()].into_iter().collect());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.show(&Printable::default());
    }
}

/// How many names of a kind text shows.
const MOST_NAMES: usize = 5;

/// The first of them, and how many more.
pub(crate) fn names<'a>(all: impl IntoIterator<Item = &'a String, IntoIter: ExactSizeIterator>) -> String {
    let mut all = all.into_iter();
    let text = all.by_ref().take(MOST_NAMES).cloned().collect::<Vec<_>>().join(", ");
    match all.len() {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// Such as `1 node` and `7 pods`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
