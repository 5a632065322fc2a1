//! The table of all cells.

use std::collections::BTreeMap;
use std::fmt;

use super::judge::FaultResult;
use super::kind::{KINDS, Kind};

/// Operations by kinds of fault: how many injections each cell has, and how many of them were red; or why it has none.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<String>,
    cells: BTreeMap<(usize, Kind), Cell>,
    exempt: BTreeMap<(usize, Kind), &'static str>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    injections: usize,
    red: usize,
    refused: usize,
    told: usize,
    repaired: usize,
}

impl Table {
    /// With these operations.
    pub fn new(rows: &[&str]) -> Self {
        Self { rows: rows.iter().map(|row| (*row).to_owned()).collect(), ..Self::default() }
    }

    /// Notes what became of an injection.
    pub fn add(&mut self, row: usize, kind: Kind, verdict: &FaultResult) {
        let cell = self.cells.entry((row, kind)).or_default();
        cell.injections += 1;
        match verdict {
            FaultResult::Wanted => {}
            FaultResult::Refused => cell.refused += 1,
            FaultResult::Told => cell.told += 1,
            FaultResult::Mended => cell.repaired += 1,
            FaultResult::Red(_) => cell.red += 1,
        }
    }

    /// Explains an empty cell.
    pub fn exempt(&mut self, row: usize, kind: Kind, why: &'static str) {
        self.exempt.insert((row, kind), why);
    }

    /// How many cells have an injection.
    pub fn cells(&self) -> usize {
        self.cells.len()
    }

    /// Number of injections.
    pub fn injections(&self) -> usize {
        self.cells.values().map(|cell| cell.injections).sum()
    }

    /// How many cells are red.
    pub fn red(&self) -> usize {
        self.cells.values().filter(|cell| cell.red > 0).count()
    }

    /// Cells that have neither an injection nor a reason why not: each is a hole in the matrix.
    pub fn holes(&self) -> Vec<String> {
        let all = (0..self.rows.len()).flat_map(|row| KINDS.map(|kind| (row, kind)));
        let empty = all.filter(|at| !self.cells.contains_key(at) && !self.exempt.contains_key(at));
        empty.map(|(row, kind)| format!("{} x {}", self.rows[row], kind.name())).collect()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads: Vec<&str> = KINDS.iter().map(|kind| kind.name()).collect();
        writeln!(f, "| operation | {} |", heads.join(" | "))?;
        writeln!(f, "|---|{}", "---:|".repeat(KINDS.len()))?;
        for (row, name) in self.rows.iter().enumerate() {
            let cell = |kind: &Kind| match self.cells.get(&(row, *kind)) {
                Some(Cell { injections, red: 0, .. }) => injections.to_string(),
                Some(Cell { injections, red, .. }) => format!("**{red} RED of {injections}**"),
                None => "–".to_owned(),
            };
            writeln!(f, "| {name} | {} |", KINDS.iter().map(cell).collect::<Vec<_>>().join(" | "))?;
        }
        writeln!(f)?;
        for why in self.exempt.values().copied().collect::<std::collections::BTreeSet<_>>() {
            let cells = self.exempt.iter().filter(|(_, reason)| **reason == why);
            let cells: Vec<String> =
                cells.map(|((row, kind), _)| format!("{} x {}", self.rows[*row], kind.name())).collect();
            writeln!(f, "– {why}: {}", cells.join(", "))?;
        }
        let sum = |of: fn(&Cell) -> usize| self.cells.values().map(of).sum::<usize>();
        let (all, red) = (self.injections(), sum(|cell| cell.red));
        let (refused, told, repaired) =
            (sum(|cell| cell.refused), sum(|cell| cell.told), sum(|cell| cell.repaired));
        writeln!(
            f,
            "{} cells, {} red; {all} injections: {} times as wanted, {refused} times refused with the cause, {told} times what is left was named, {repaired} \
             times repaired by the next run, {red} red",
            self.cells(),
            self.red(),
            all - refused - told - repaired - red
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_red_cell_shows_and_an_empty_one_is_a_hole_or_has_its_reason() {
        let mut table = Table::new(&["apply"]);
        table.add(0, Kind::Busy, &FaultResult::Wanted);
        table.add(0, Kind::Api, &FaultResult::Red("half-done".to_owned()));
        table.add(0, Kind::Api, &FaultResult::Refused);
        table.exempt(0, Kind::Clock, "no clock");
        assert_eq!((table.cells(), table.injections(), table.red()), (2, 3, 1));
        assert_eq!(table.holes().len(), KINDS.len() - 3);
        let text = table.to_string();
        assert!(text.contains("**1 RED of 2**") && text.contains("– no clock: apply x clock"), "{text}");
        assert!(text.contains("2 cells, 1 red; 3 injections: 1 times as wanted, 1 times refused"), "{text}");
    }
}
