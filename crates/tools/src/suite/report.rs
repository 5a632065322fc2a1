//! What is printed: each test when it ends, failures with what they printed, the sums, and what took most.

#![allow(clippy::print_stdout, reason = "what is printed is what it is run for")]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::job::Ended;

/// How many tests are named that took most.
const MOST: usize = 15;

/// All that ended so far.
#[derive(Debug, Default)]
pub struct Report {
    ended: Vec<Ended>,
    /// Where something is mounted that was not before.
    pub left_mounted: Vec<String>,
}

impl Report {
    /// Takes up what ended, and prints it.
    pub fn add(&mut self, ended: Ended) {
        let word = if ended.failed == 0 { "ok" } else { "FAILED" };
        println!("{word:6} {}  {}", cost(&ended), ended.name);
        if ended.failed != 0 {
            println!("---- {}\n{}----", ended.name, ended.output);
        }
        self.ended.push(ended);
    }

    /// Whether a test failed, or left something.
    pub fn has_failed(&self) -> bool {
        !self.left_mounted.is_empty() || self.ended.iter().any(|ended| ended.failed != 0)
    }

    /// Prints the end, and writes what each took for the next time.
    pub fn close(&self, record: Option<&Path>) -> Result<()> {
        print!("{}", self.end());
        let Some(record) = record else { return Ok(()) };
        let mut text = String::new();
        for ended in &self.ended {
            let (wall, processor) = (ended.cost.wall.as_secs_f64(), ended.cost.processor.as_secs_f64());
            writeln!(text, "{wall:.3}\t{processor:.2}\t{}", ended.name)?;
        }
        fs::write(record, text).with_context(|| format!("cannot write {}", record.display()))
    }

    fn end(&self) -> String {
        let mut most: Vec<&Ended> = self.ended.iter().collect();
        most.sort_by_key(|ended| std::cmp::Reverse(ended.cost.processor));
        let all: f64 = most.iter().map(|ended| ended.cost.processor.as_secs_f64()).sum();
        let mut text = format!("\nthe {MOST} that took most, of {all:.0} processor seconds:\n");
        for ended in most.iter().take(MOST) {
            text += &format!("  {}  {}\n", cost(ended), ended.name);
        }
        let failed: Vec<&str> =
            self.ended.iter().filter(|ended| ended.failed != 0).map(|ended| &*ended.name).collect();
        if !failed.is_empty() {
            text += &format!("failed:\n  {}\n", failed.join("\n  "));
        }
        if !self.left_mounted.is_empty() {
            text += &format!("tests left something mounted:\n  {}\n", self.left_mounted.join("\n  "));
        }
        let sum = |of: fn(&Ended) -> usize| self.ended.iter().map(of).sum::<usize>();
        text + &format!("{} passed, {} failed\n", sum(|ended| ended.passed), sum(|ended| ended.failed))
    }
}

/// `12.3 s, 4.5 of a processor`, in columns.
fn cost(ended: &Ended) -> String {
    let (wall, processor) = (ended.cost.wall.as_secs_f64(), ended.cost.processor.as_secs_f64());
    format!("{wall:6.1} s {processor:6.2} cpu")
}

#[cfg(test)]
mod tests {
    use super::super::cost::Cost;
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_end_names_what_failed_and_counts_the_rest() {
        let ended = |name: &str, passed, failed, seconds| Ended {
            name: name.to_owned(),
            passed,
            failed,
            cost: Cost { wall: Duration::from_secs(seconds), processor: Duration::from_secs(seconds) },
            output: String::new(),
        };
        let ended = vec![ended("small", 3, 0, 1), ended("large", 0, 1, 9)];
        let mut report = Report { ended, ..Report::default() };
        let end = report.end();
        assert!(end.ends_with("failed:\n  large\n3 passed, 1 failed\n"), "{end}");
        let (large, small) = (end.find("  large").expect("is named"), end.find("  small").expect("is named"));
        assert!(large < small, "{end}");
        assert!(report.has_failed());

        report.ended.pop();
        assert!(!report.has_failed());
        report.left_mounted.push("/run".to_owned());
        assert!(report.has_failed() && report.end().contains("mounted:\n  /run\n"), "{}", report.end());
    }
}
