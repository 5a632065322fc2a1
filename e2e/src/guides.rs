//! The commands that the documents show: fenced blocks of `sh` and `console`.
//!
//! The word behind the language names who runs them: ```` ```sh machine ````. Readers do not see it.

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};
use regex::Regex;
use std::fs;
use std::sync::LazyLock;
use std::time::Duration;
use test_support::project;

pub mod worlds;

/// The words of a paragraph before a block that no test runs.
pub const NOT_RUN: &str = "Not run in our tests";

/// The rows of the table of breakages in docs/tasks/troubleshooting.md whose first line begins like this.
///
/// # Errors
/// The page has no such table.
pub fn breakages(head: &str) -> Result<Vec<Vec<String>>> {
    table("docs/tasks/troubleshooting.md", head)
}

/// The rows of a document's table whose first line begins like this: the texts of their cells, without backticks.
///
/// # Errors
/// The document has no such table.
pub fn table(document: &str, head: &str) -> Result<Vec<Vec<String>>> {
    let page = fs::read_to_string(project::file(document))?;
    let mut lines = page.lines().skip_while(|line| !line.starts_with(head));
    ensure!(lines.next().is_some(), "{document} has no table that begins with {head}");
    let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    Ok(rows.map(cells).collect())
}

/// Writes the two last cells of the rows that begin with these words: who was the first, and after how many seconds.
///
/// # Errors
/// The page cannot be read or written.
pub fn record_breakages(head: &str, rows: &[(String, &str, Duration)]) -> Result<()> {
    let path = project::file("docs/tasks/troubleshooting.md");
    let page = fs::read_to_string(&path)?;
    let (mut written, mut is_in_table) = (String::new(), false);
    for line in page.lines() {
        is_in_table = line.starts_with(head) || (is_in_table && line.starts_with('|'));
        let measured = rows.iter().find(|(what, ..)| is_in_table && line.starts_with(&format!("| {what} |")));
        let mut cells: Vec<String> = line.split('|').map(str::to_owned).collect();
        if let (Some((_, first, after)), Some(at)) = (measured, cells.len().checked_sub(3)) {
            cells[at] = format!(" {first} ");
            cells[at + 1] = format!(" {:.1} ", after.as_secs_f64());
        }
        written.push_str(&cells.join("|"));
        written.push('\n');
    }
    Ok(fs::write(path, written)?)
}

/// A fenced block of commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The document, from the project's folder.
    pub document: String,
    /// The line that the block begins with.
    pub line: usize,
    /// Whether it shows a terminal, with prompts and output. Otherwise it is input for a shell.
    pub is_console: bool,
    /// Who runs it: a test of this name. Empty if unset.
    pub world: String,
    /// The paragraph before it.
    pub before: String,
    /// What is in it.
    pub text: String,
}

/// A command of a console, and what it is said to print.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuideStep {
    /// The command.
    pub command: String,
    /// The lines below it.
    pub output: Vec<String>,
}

impl Block {
    /// Where it is, for messages.
    pub fn place(&self) -> String {
        format!("{}:{}", self.document, self.line)
    }

    /// The commands of a console, which follow a prompt, each with its output.
    pub fn steps(&self) -> Vec<GuideStep> {
        let mut steps: Vec<GuideStep> = Vec::new();
        for line in self.text.lines() {
            if let Some(command) = line.strip_prefix("# ").or_else(|| line.strip_prefix("$ ")) {
                steps.push(GuideStep { command: command.to_owned(), output: Vec::new() });
            } else if let Some(step) = steps.last_mut() {
                step.output.push(line.to_owned());
            }
        }
        steps
    }

    /// The command lines of a shell's input: without comments and empty lines; one that goes on in the next is one, and so is a loop.
    pub fn commands(&self) -> Vec<String> {
        let mut commands: Vec<String> = Vec::new();
        let mut is_open = false;
        for line in self.text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match commands.last_mut().filter(|_| is_open) {
                Some(last) => last.push_str(&format!("\n{line}")),
                None => commands.push(line.to_owned()),
            }
            let last = commands.last().map_or("", String::as_str);
            is_open = last.ends_with('\\') || (last.starts_with("for ") && !last.ends_with("\ndone"));
        }
        commands
    }
}

/// The commands of all documents that belong to the project.
///
/// # Errors
/// A document cannot be read.
pub fn blocks() -> Result<Vec<Block>> {
    let mut all = Vec::new();
    for name in project::names(&["*.md"])? {
        let text = fs::read_to_string(project::file(&name)).with_context(|| name.clone())?;
        all.extend(blocks_of(&name, &text));
    }
    Ok(all)
}

/// The commands of one document.
#[allow(clippy::wildcard_enum_match_arm, reason = "most of Markdown is neither a paragraph nor a block")]
pub fn blocks_of(document: &str, text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let (mut paragraph, mut is_paragraph) = (String::new(), false);
    let mut open: Option<Block> = None;
    for (event, range) in Parser::new(text).into_offset_iter() {
        match event {
            Event::Start(Tag::Paragraph) => (paragraph, is_paragraph) = (String::new(), true),
            Event::End(TagEnd::Paragraph) => is_paragraph = false,
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => {
                let mut words = info.split_whitespace();
                let language = words.next().unwrap_or_default();
                open = ["sh", "bash", "shell", "console"].contains(&language).then(|| Block {
                    document: document.to_owned(),
                    line: text[..range.start].matches('\n').count() + 1,
                    is_console: language == "console",
                    world: words.next().unwrap_or_default().to_owned(),
                    before: paragraph.clone(),
                    text: String::new(),
                });
            }
            Event::End(TagEnd::CodeBlock) => blocks.extend(open.take()),
            Event::Text(text) | Event::Code(text) => match &mut open {
                Some(block) => block.text.push_str(&text),
                None if is_paragraph => paragraph.push_str(&text),
                None => {}
            },
            Event::SoftBreak if is_paragraph => paragraph.push(' '),
            _ => {}
        }
    }
    blocks
}

/// What differs from one run to the next: times, how long something took, generated names.
static CHANGING: LazyLock<[(Regex, &str); 3]> = LazyLock::new(|| {
    [
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
        (r"\b\d+(\.\d+)? ?(ms|s|minutes?)\b", "A-WHILE"),
        (r"\s+", " "),
    ]
    .map(|(pattern, word)| (Regex::new(pattern).expect("a regular expression"), word))
});

/// Compares what a command printed with what a document says, but for what changes from run to run. `…` stands for anything up to the end of the line;
/// as the last line, for all lines that follow.
///
/// # Errors
/// They differ.
pub fn compare(said: &[String], printed: &str) -> Result<()> {
    let mut printed: Vec<&str> = printed.lines().collect();
    let said = match said.split_last() {
        Some((last, said)) if last == "…" => {
            printed.truncate(said.len());
            said
        }
        _ => said,
    };
    let same = said.len() == printed.len()
        && said.iter().zip(&printed).all(|(said, printed)| is_same(said, printed));
    ensure!(same, "it is said to print\n{}\nand printed\n{}", said.join("\n"), printed.join("\n"));
    Ok(())
}

fn is_same(said: &str, printed: &str) -> bool {
    let (said, printed) = (stable(said), stable(printed));
    match said.split_once('…') {
        Some((start, _)) => printed.starts_with(start),
        None => said == printed,
    }
}

fn stable(line: &str) -> String {
    CHANGING.iter().fold(line.trim_end().to_owned(), |line, (pattern, word)| {
        pattern.replace_all(&line, *word).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Words\nand `more`.\n\n```sh machine\n# why\nfor x in a b; do\n  echo $x\ndone\nls \\\n  -l\n```\n\n- in a list\n\n  ```console\n  # date\n  2026-11-21T18:37:31.619987Z took 3 ms …\n  $ true\n  ```\n\n```yaml\nno: command\n```\n";

    #[test]
    fn commands_are_found_with_who_runs_them_and_what_they_print() {
        let [script, console] = &blocks_of("a.md", TEXT)[..] else { panic!("{:?}", blocks_of("a.md", TEXT)) };
        assert_eq!((script.place(), script.world.as_str()), ("a.md:4".to_owned(), "machine"));
        assert_eq!(script.before, "Words and more.");
        assert_eq!(script.commands(), ["for x in a b; do\n  echo $x\ndone", "ls \\\n  -l"]);
        assert_eq!((console.is_console, console.world.as_str()), (true, ""));
        let steps = console.steps();
        assert_eq!((steps[0].command.as_str(), steps[1].output.len()), ("date", 0));
        compare(&steps[0].output, "2027-01-01T00:00:00Z took 12 ms and more\n").expect("the same");
        compare(&steps[0].output, "2027-01-01T00:00:00Z took long").expect_err("another");
        compare(&steps[0].output, "").expect_err("nothing");
        let first = ["one".to_owned(), "…".to_owned()];
        compare(&first, "one\ntwo\nthree\n").expect("the first line");
        compare(&first, "two\nthree\n").expect_err("another first line");
    }
}
