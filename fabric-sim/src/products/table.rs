//! Counts of cells by world and first event.

use super::{CellOutcome, CellResult};
use crate::world::RunVerdict;
use kvferry_scenarios::products::{ProductEvent, ProductWorld};
use std::collections::BTreeMap;
use std::time::Duration;

/// Failing cells that are kept; all are counted.
const KEPT: usize = 10_000;

/// Cells of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRow {
    pub cells: u64,
    /// Cells in which nothing came of the last event.
    pub empty: u64,
    pub failed: u64,
    /// Time of their runs.
    pub took: Duration,
}

impl TableRow {
    fn add(&mut self, result: &CellResult) {
        self.cells += 1;
        self.empty += u64::from(result.outcome == CellOutcome::Empty);
        self.failed += u64::from(matches!(result.outcome, CellOutcome::Failed { .. }));
        self.took += result.took;
    }

    /// Adds the counts of another row.
    pub fn join(&mut self, other: &TableRow) {
        self.cells += other.cells;
        self.empty += other.empty;
        self.failed += other.failed;
        self.took += other.took;
    }

    pub fn held(&self) -> u64 {
        self.cells - self.empty - self.failed
    }
}

/// What cells came to.
#[derive(Clone, Debug, Default)]
pub struct ProductTable {
    /// Cells of one event.
    pub singles: BTreeMap<(ProductWorld, ProductEvent), TableRow>,
    /// Cells of two, by both.
    pub pairs: BTreeMap<(ProductWorld, ProductEvent, ProductEvent), TableRow>,
    pub all: TableRow,
    /// The worst verdict of a cell.
    pub verdict: RunVerdict,
    /// Cells that failed, the first few.
    pub failing: Vec<CellResult>,
}

impl ProductTable {
    /// Events that nothing came of at any place of a world.
    pub fn absent(&self) -> impl Iterator<Item = (ProductWorld, ProductEvent)> {
        let absent = self.singles.iter().filter(|(_, row)| row.empty == row.cells);
        absent.map(|(place, _)| *place)
    }

    pub fn add(&mut self, result: CellResult) {
        let world = result.cell.world;
        let row = match &result.cell.events[..] {
            [one] => self.singles.entry((world, one.event)).or_default(),
            [first, second, ..] => {
                self.pairs.entry((world, first.event, second.event)).or_default()
            }
            [] => return,
        };
        row.add(&result);
        self.all.add(&result);
        if let CellOutcome::Failed { verdict, .. } = result.outcome {
            self.verdict = self.verdict.max(verdict);
            if self.failing.len() < KEPT {
                self.failing.push(result);
            }
        }
    }
}
