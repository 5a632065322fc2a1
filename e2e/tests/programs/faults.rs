//! The fault matrix: every kind of fault into every operation, one at a time; afterwards the invariants of ARCHITECTURE.md hold, the message names the
//! cause, nothing is left over, and the same operation without the fault ends as wanted.
//!
//! `make test` takes one injection of each cell of some rows, `make faults` (FAULTS=all) all, and prints the table. FAULTS=2 takes two of each cell;
//! FAULTS_ONLY the rows that have one of its words in their names, and the columns it names, such as `ADD,EIO`.

use std::sync::Mutex;

use crate::faults_support::{Fault, Operation, Story, operations};
use anyhow::{Result, anyhow, ensure};
use e2e::faults::{FaultResult, KINDS, Kind, Table};
use test_support::parallel::in_threads;

const THREADS: usize = 3;

/// What is taken of the matrix.
struct Choice {
    /// The most injections of a cell, where somebody said so.
    most: Option<usize>,
    takes_all: bool,
    only: Vec<String>,
}

impl Choice {
    fn new() -> Self {
        let set = |name| std::env::var(name).unwrap_or_default();
        let only = set("FAULTS_ONLY").split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect();
        let takes_all = set("FAULTS") == "all";
        Self { most: set("FAULTS").parse().ok(), takes_all, only }
    }

    fn is_whole(&self) -> bool {
        self.takes_all && self.only.is_empty()
    }

    fn takes(&self, operation: &dyn Operation) -> bool {
        let names = |word: &String| operation.name().contains(&**word);
        let rows = self.only.iter().any(|word| !KINDS.iter().any(|kind| kind.name() == word));
        if rows {
            self.only.iter().any(names)
        } else {
            self.takes_all
                || self.most.is_some()
                || !self.only.is_empty()
                || SAMPLED.contains(&operation.name())
        }
    }

    fn takes_kind(&self, kind: Kind) -> bool {
        let mut kinds =
            self.only.iter().filter(|word| KINDS.iter().any(|kind| kind.name() == *word)).peekable();
        kinds.peek().is_none() || kinds.any(|word| word == kind.name())
    }

    /// The most injections of a cell. What goes on takes seconds for each.
    fn most(&self, operation: &dyn Operation) -> usize {
        let of_all = if operation.goes_on() { 2 } else { 4 };
        self.most.unwrap_or(if self.takes_all { of_all } else { 1 })
    }
}

/// The rows of which `make test` takes a part.
const SAMPLED: [&str; 5] = ["apply", "ADD, API", "CHECK, a rule lost", "install --once", "uninstall"];

#[test]
fn whatever_fails_in_whichever_operation_nothing_is_half_done() -> Result<()> {
    let choice = Choice::new();
    let taken: Vec<Box<dyn Operation>> =
        operations().into_iter().filter(|operation| choice.takes(&**operation)).collect();
    let stories =
        in_threads(THREADS, taken.into_iter().map(|operation| move || Story::of(operation)).collect());
    let stories = stories.into_iter().collect::<Result<Vec<_>>>()?;
    let names: Vec<&str> = stories.iter().map(|story| story.operation.name()).collect();
    let table = Mutex::new(Table::new(&names));
    let faults = planned(&choice, &stories, &table)?;
    println!("{} injections into {} operations", faults.len(), stories.len());
    let work = faults.iter().map(|(row, fault)| {
        let (story, table) = (&stories[*row], &table);
        move || {
            let verdict = story.play(fault);
            let verdict =
                verdict.unwrap_or_else(|error| FaultResult::Red(format!("cannot be judged: {error:#}")));
            if let Ok(mut table) = table.lock() {
                table.add(*row, fault.kind(), &verdict);
            }
            match verdict {
                FaultResult::Red(why) => {
                    let name = story.operation.name();
                    let line =
                        format!("{name} x {}: {fault}: {}", fault.kind().name(), why.replace('\n', " | "));
                    println!("RED {line}");
                    Some(line)
                }
                FaultResult::Wanted | FaultResult::Refused | FaultResult::Told | FaultResult::Mended => None,
            }
        }
    });
    let red: Vec<String> = in_threads(THREADS, work.collect()).into_iter().flatten().collect();
    let table = table.into_inner()?;
    println!("{table}");
    ensure!(red.is_empty(), "{} red:\n{}", red.len(), red.join("\n"));
    if choice.is_whole() {
        ensure!(table.cells() >= 200, "only {} cells", table.cells());
        ensure!(table.holes().is_empty(), "neither tried nor explained: {:?}", table.holes());
    }
    Ok(())
}

/// Every injection, with its row; the cells that have none are noted with the reason.
fn planned(choice: &Choice, stories: &[Story], table: &Mutex<Table>) -> Result<Vec<(usize, Fault)>> {
    let mut all = Vec::new();
    for (row, story) in stories.iter().enumerate() {
        for kind in KINDS.into_iter().filter(|kind| choice.takes_kind(*kind)) {
            match story.faults(kind, choice.most(&*story.operation)) {
                Ok(faults) => all.extend(faults.into_iter().map(|fault| (row, fault))),
                Err(why) => table.lock().map_err(|_| anyhow!("a thread panicked"))?.exempt(row, kind, why),
            }
        }
    }
    Ok(all)
}
