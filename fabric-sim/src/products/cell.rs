//! One cell: its scenario, its run, and what has to hold.

use super::WallTime;
use crate::world::{FreshFleet, RunReport, RunVerdict, SimOptions, run_beside};
use kvferry_scenarios::Run;
use kvferry_scenarios::products::{PlacedEvent, ProductEvent, ProductWorld};
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::time::Duration;

/// Events at their places in a world, in the order in which they happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductCell {
    pub world: ProductWorld,
    pub events: Vec<PlacedEvent>,
}

/// What came of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CellOutcome {
    /// All of its events happened, and all that has to hold does.
    Held,
    /// Nothing came of its last event.
    Empty,
    /// What does not hold.
    Failed { verdict: RunVerdict, text: String },
}

/// A cell that was played.
#[derive(Clone, Debug)]
pub struct CellResult {
    pub cell: ProductCell,
    pub outcome: CellOutcome,
    /// Time of its run.
    pub took: Duration,
}

/// State that the cells of one thread share.
pub(super) struct CellPlayer<'a> {
    pub(super) clock: WallTime<'a>,
    /// Cells of a world are judged beside the same fleet, unless they add requests.
    pub(super) fleet: FreshFleet,
}

impl ProductCell {
    /// Text of the scenario that plays it.
    pub fn scenario(&self) -> String {
        self.world.scenario(&self.to_string(), &self.events)
    }

    fn draw(&self) -> Run {
        let scenario = kvferry_scenarios::parse("cell", &self.scenario(), Path::new(""), None);
        let run = scenario.and_then(|scenario| scenario.draw(scenario.seed().unwrap_or_default()));
        run.unwrap_or_else(|why| panic!("{self}: {why}"))
    }

    /// Events that are faults.
    fn faults(&self) -> usize {
        let is_fault = |placed: &&PlacedEvent| placed.event != ProductEvent::Announce;
        self.events.iter().filter(is_fault).count()
    }

    /// Runs it; what it said if it panicked.
    pub(super) fn run(&self, inputs: bool, fleet: &mut FreshFleet) -> Result<RunReport, String> {
        let drawn = self.draw();
        let options = SimOptions { inputs, ..SimOptions::default() };
        let report = panic::catch_unwind(AssertUnwindSafe(|| run_beside(&drawn, options, fleet)));
        report.map_err(|why| {
            let text = why.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| why.downcast_ref::<&str>().copied());
            format!("panic: {}", text.unwrap_or("without a text"))
        })
    }

    /// Runs it and judges the run; `without` is the trace without its last event. The report lists
    /// the `inputs` if they are wanted.
    pub(super) fn judge(
        &self,
        without: u64,
        inputs: bool,
        player: &mut CellPlayer<'_>,
    ) -> (CellResult, Option<RunReport>) {
        let started = (player.clock)();
        let report = self.run(inputs, &mut player.fleet);
        let took = (player.clock)().saturating_sub(started);
        let outcome = match &report {
            Err(text) => CellOutcome::Failed { verdict: RunVerdict::Panic, text: text.clone() },
            Ok(report) => self.outcome(report, without),
        };
        (CellResult { cell: self.clone(), outcome, took }, report.ok())
    }

    /// The same result, if a second run has the same trace.
    pub(super) fn compared(
        &self,
        result: CellResult,
        trace_hash: Option<u64>,
        player: &mut CellPlayer<'_>,
    ) -> CellResult {
        let again = self.run(false, &mut player.fleet).map(|report| report.trace_hash).ok();
        let outcome = match again == trace_hash {
            true => result.outcome,
            false => CellOutcome::Failed {
                verdict: RunVerdict::NotDeterministic,
                text: "a second run has another trace".into(),
            },
        };
        CellResult { outcome, ..result }
    }
}

impl ProductCell {
    /// Judges a run that came to its end.
    fn outcome(&self, report: &RunReport, without: u64) -> CellOutcome {
        let failed = |verdict, text| CellOutcome::Failed { verdict, text };
        if let Some(violation) = report.violations.first() {
            return failed(report.verdict, violation.to_string());
        }
        if report.verdict != RunVerdict::Held {
            return failed(report.verdict, report.unmet.join("; "));
        }
        if let Some(left) = &report.left {
            return failed(RunVerdict::Liveness, format!("it did not come to rest: {left}"));
        }
        if report.probes_fast == 0 && self.leaves_both_roles() {
            let text = "no request afterwards got its KV from a prefill";
            return failed(RunVerdict::Liveness, text.into());
        }
        let hit = report.fault_tables.values().filter(|hits| **hits > 0).count();
        match hit < self.faults() || report.trace_hash == without {
            true => CellOutcome::Empty,
            false => CellOutcome::Held,
        }
    }

    /// True unless both instances of a role have switched to the other one.
    fn leaves_both_roles(&self) -> bool {
        use ProductEvent::{SwitchDecode, SwitchPrefill};
        let switches = |event| self.events.iter().filter(|placed| placed.event == event).count();
        switches(SwitchPrefill) < 2 && switches(SwitchDecode) < 2
    }

    /// A name for its file.
    pub fn slug(&self) -> String {
        let mut name = self.world.slug();
        for PlacedEvent { event, place } in &self.events {
            let side = if place.is_after { "after" } else { "before" };
            name.push_str(&format!("-{event}-{side}-{}", place.nth));
        }
        name
    }
}

impl fmt::Display for ProductCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.world)?;
        for (n, PlacedEvent { event, place }) in self.events.iter().enumerate() {
            let side = if place.is_after { "after" } else { "before" };
            let join = if n == 0 { ":" } else { ", then" };
            write!(f, "{join} {event} {side} input {} ({})", place.nth, place.what)?;
        }
        Ok(())
    }
}
