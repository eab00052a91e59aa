//! `sweep --products`: events at every input of a request.

use crate::process::{CliProgress, CommandError};
use crate::simulator::seed_run::quoted;
use crate::simulator::table::{columns, grouped};
use clap::{Args, ValueEnum};
use kvferry_scenarios::products::{ProductEvent, ProductWorld};
use kvferry_sim::products::{
    CellOutcome, CellResult, ProductPlan, ProductScope, ProductTable, TableRow, play,
};
use kvferry_sim::world::RunVerdict;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Failing cells that are shown and written.
const SHOWN: usize = 20;

/// Which cells are played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProductsArg {
    /// One event before and after each input
    Singles,
    /// Also two events at one input
    SameInput,
    /// Also two events at any two inputs
    Pairs,
}

impl ProductsArg {
    const fn scope(self) -> ProductScope {
        match self {
            ProductsArg::Singles => ProductScope::Singles,
            ProductsArg::SameInput => ProductScope::SameInput,
            ProductsArg::Pairs => ProductScope::Pairs,
        }
    }
}

/// Which part of the table is played.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ProductFilter {
    /// Fleet of the products; all of them if none is given
    #[arg(long = "fleet", value_name = "FLEET", conflicts_with = "seeds", value_parser = fleet)]
    fleets: Vec<ProductWorld>,
    /// Event of the products; all of them if none is given
    #[arg(long = "event", value_name = "EVENT", conflicts_with = "seeds", value_parser = event)]
    events: Vec<ProductEvent>,
}

impl ProductFilter {
    fn plan(&self, arg: ProductsArg, jobs: usize) -> ProductPlan {
        let mut plan = ProductPlan::all(arg.scope(), jobs);
        plan.worlds.retain(|world| self.fleets.is_empty() || self.fleets.contains(world));
        plan.events.retain(|event| self.events.is_empty() || self.events.contains(event));
        plan
    }
}

fn fleet(given: &str) -> Result<ProductWorld, String> {
    by_name(ProductWorld::ALL.iter().map(|world| (world.slug(), *world)), given)
}

fn event(given: &str) -> Result<ProductEvent, String> {
    by_name(ProductEvent::ALL.iter().map(|event| (event.to_string(), *event)), given)
}

/// The one of this name.
///
/// # Errors
/// The names that there are.
fn by_name<T>(known: impl Iterator<Item = (String, T)>, given: &str) -> Result<T, String> {
    let mut names = Vec::new();
    for (name, one) in known {
        if name == given {
            return Ok(one);
        }
        names.push(name);
    }
    Err(format!("not known; possible values: {}", names.join(", ")))
}

/// Plays the cells, so many at a time, and prints what they came to; those that fail are written to a folder.
///
/// # Errors
/// A result that cannot be written.
pub(crate) fn command(
    (arg, filter): (ProductsArg, &ProductFilter),
    jobs: usize,
    (folder, is_json): (&Path, bool),
    out: &mut dyn Write,
) -> Result<RunVerdict, CommandError> {
    let started = Instant::now();
    let progress = CliProgress::new(1);
    let mut table = ProductTable::default();
    let mut written = Ok(());
    let plan = filter.plan(arg, jobs);
    play(&plan, &|| started.elapsed(), &mut |result| {
        if is_json && written.is_ok() {
            written = progress.pause(|| writeln!(out, "{}", json(&result)));
        }
        table.add(result);
        if table.all.cells.is_multiple_of(1_000) {
            let TableRow { cells, failed, .. } = table.all;
            progress.say(format!("{} cells, {failed} failing", grouped(cells)));
        }
    });
    drop(progress);
    written?;
    if !is_json {
        print(&table, started.elapsed().as_secs_f64(), out)?;
        failing(&table, folder, out)?;
    }
    Ok(table.verdict)
}

/// A cell as JSON.
fn json(result: &CellResult) -> serde_json::Value {
    let (outcome, text) = match &result.outcome {
        CellOutcome::Held => ("held", None),
        CellOutcome::Empty => ("empty", None),
        CellOutcome::Failed { text, .. } => ("failed", Some(text)),
    };
    let seconds = result.took.as_secs_f64();
    json!({ "cell": result.cell.to_string(), "outcome": outcome, "text": text, "seconds": seconds })
}

fn row(name: String, row: &TableRow) -> Vec<String> {
    let TableRow { cells, empty, failed, took, .. } = row;
    let counts = [*cells, row.held(), *empty, *failed].map(grouped);
    let seconds = format!("{:.1}", took.as_secs_f64());
    [name].into_iter().chain(counts).chain([seconds]).collect()
}

/// Counts by what is counted.
fn counts(what: &str, rows: &BTreeMap<String, TableRow>) -> String {
    let head = [what, "cells", "held", "empty", "failed", "s"].map(String::from).to_vec();
    let rows = rows.iter().map(|(name, counts)| row(name.clone(), counts));
    columns(&[head].into_iter().chain(rows).collect::<Vec<_>>(), 1)
}

fn print(table: &ProductTable, seconds: f64, out: &mut dyn Write) -> Result<(), CommandError> {
    let [mut worlds, mut events, mut pairs] = [const { BTreeMap::<String, TableRow>::new() }; 3];
    for ((world, event), counts) in &table.singles {
        worlds.entry(world.to_string()).or_default().join(counts);
        events.entry(event.to_string()).or_default().join(counts);
    }
    for ((world, first, _), counts) in &table.pairs {
        worlds.entry(world.to_string()).or_default().join(counts);
        pairs.entry(first.to_string()).or_default().join(counts);
    }
    writeln!(out, "{}\n\n{}\n", counts("fleet", &worlds), counts("event", &events))?;
    if !pairs.is_empty() {
        writeln!(out, "{}\n", counts("first of two events", &pairs))?;
    }
    let absent: Vec<String> =
        table.absent().map(|(world, event)| format!("{event} ({world})")).collect();
    if !absent.is_empty() {
        writeln!(out, "never happened: {}\n", absent.join(", "))?;
    }
    let TableRow { cells, empty, failed, .. } = table.all;
    writeln!(
        out,
        "In each cell that is not empty its events happened, every invariant holds, each request has one\n\
         outcome, nothing is held at the end, and requests afterwards get their KV from a prefill.\n\
         {} of {} cells failed, {} are empty; {seconds:.1} s",
        grouped(failed),
        grouped(cells),
        grouped(empty)
    )?;
    Ok(())
}

/// Writes the scenarios of cells that failed, and says how they are run.
fn failing(table: &ProductTable, folder: &Path, out: &mut dyn Write) -> Result<(), CommandError> {
    for CellResult { cell, outcome, .. } in table.failing.iter().take(SHOWN) {
        let CellOutcome::Failed { text, .. } = outcome else { continue };
        let path = folder.join(format!("{}.toml", cell.slug()));
        std::fs::write(&path, cell.scenario())?;
        let path = quoted(&path.display().to_string());
        writeln!(
            out,
            "{cell}\n  {text}\n  repeat with: kvferry run {path}\n  shrink with: kvferry shrink {path}"
        )?;
    }
    if let Some(more) = table.failing.get(SHOWN..).filter(|more| !more.is_empty()) {
        writeln!(out, "and {} more; --json names all", more.len())?;
    }
    Ok(())
}
