//! Products of events, played: every event of [`ProductEvent::ALL`] before and after every input of a
//! request, and pairs of them.
//!
//! The run of a [`ProductWorld`] in which nothing happens lists the inputs, which are the places of the first
//! event; the run with the first event lists those of the second one. A cell whose trace is the one
//! without its last event is empty: nothing came of that event.

mod cell;
mod places;
mod table;

pub use cell::{CellOutcome, CellResult, ProductCell};
pub use table::{ProductTable, TableRow};

use crate::world::{FreshFleet, RunReport};
use cell::CellPlayer;
use kvferry_scenarios::products::{EventPlace, PlacedEvent, ProductEvent, ProductWorld};
use places::InputPlaces;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// How many events a cell has, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProductScope {
    /// One event.
    Singles,
    /// Also two at one input.
    SameInput,
    /// Also two at any inputs, the second one not before the first.
    Pairs,
}

/// Which cells are played.
#[derive(Clone, Debug)]
pub struct ProductPlan {
    pub worlds: Vec<ProductWorld>,
    pub events: Vec<ProductEvent>,
    pub scope: ProductScope,
    /// Runs at a time.
    pub jobs: usize,
}

impl ProductPlan {
    /// All events in all worlds.
    pub fn all(scope: ProductScope, jobs: usize) -> ProductPlan {
        let (worlds, events) = (ProductWorld::ALL.to_vec(), ProductEvent::ALL.to_vec());
        ProductPlan { worlds, events, scope, jobs }
    }
}

/// More inputs than any of these runs has.
const NEVER: u32 = 1 << 29;

/// Every so many cells of one event are run twice to compare the traces.
const REPEATED: usize = 50;

/// Time of a caller since some moment.
pub type WallTime<'a> = &'a (dyn Fn() -> Duration + Sync);

/// Nobody takes results any more.
struct Stopped;

/// A world in which nothing happens.
struct Quiet {
    world: ProductWorld,
    trace_hash: u64,
    places: InputPlaces,
}

impl Quiet {
    fn of(world: ProductWorld) -> Quiet {
        let event = ProductEvent::Abort;
        let never = PlacedEvent { event, place: EventPlace::before(NEVER) };
        let cell = ProductCell { world, events: vec![never] };
        let report = cell.run(true, &mut FreshFleet::default());
        let report = report.unwrap_or_else(|text| panic!("{world} without events: {text}"));
        let places = InputPlaces::new(&report.inputs, None);
        Quiet { world, trace_hash: report.trace_hash, places }
    }
}

/// The cells that begin with one event at one place.
struct CellGroup<'a> {
    quiet: &'a Quiet,
    /// Those that can follow.
    events: &'a [ProductEvent],
    first: PlacedEvent,
    is_repeated: bool,
}

impl CellGroup<'_> {
    fn play(
        &self,
        scope: ProductScope,
        player: &mut CellPlayer<'_>,
        give: &SyncSender<CellResult>,
    ) -> Result<(), Stopped> {
        let send = |result| give.send(result).map_err(|_| Stopped);
        let cell = ProductCell { world: self.quiet.world, events: vec![self.first.clone()] };
        let mode = self.quiet.world.mode;
        let has_pairs = scope > ProductScope::Singles
            && !self.first.place.is_after
            && self.first.is_where_it_acts(mode);
        let (result, report) = cell.judge(self.quiet.trace_hash, has_pairs, player);
        let trace_hash = report.as_ref().map(|report| report.trace_hash);
        let has_pairs = has_pairs && result.outcome == CellOutcome::Held;
        send(match self.is_repeated {
            true => cell.compared(result, trace_hash, player),
            false => result,
        })?;
        let Some(report) = report.filter(|_| has_pairs) else { return Ok(()) };
        for place in self.second_places(scope, &report) {
            for event in self.events {
                let second = PlacedEvent { event: *event, place: place.clone() };
                if !second.is_where_it_acts(mode) {
                    continue;
                }
                let events = vec![self.first.clone(), second];
                let cell = ProductCell { world: self.quiet.world, events };
                send(cell.judge(report.trace_hash, false, player).0)?;
            }
        }
        Ok(())
    }

    /// Places of a second event, given what the run with the first one was.
    fn second_places(&self, scope: ProductScope, report: &RunReport) -> Vec<EventPlace> {
        let lead = self.quiet.places.lead();
        let places = InputPlaces::new(&report.inputs, Some(lead)).before();
        // The first event may be placed by time, and then be at no input.
        let from = |place: &EventPlace| match self.first.event {
            ProductEvent::Announce => place.at >= self.first.place.at,
            _ => place.nth >= self.first.place.nth,
        };
        let most = if scope == ProductScope::Pairs { usize::MAX } else { 1 };
        places.into_iter().filter(from).take(most).collect()
    }
}

/// Plays the cells of a plan; `each` is told every result, in no order. The `clock` is that of the caller,
/// for the time that cells take.
pub fn play(plan: &ProductPlan, clock: WallTime<'_>, each: &mut dyn FnMut(CellResult)) {
    let (events, scope, jobs) = (&plan.events, plan.scope, plan.jobs);
    let quiet: Vec<Quiet> = plan.worlds.iter().map(|world| Quiet::of(*world)).collect();
    let mut groups = Vec::new();
    for quiet in &quiet {
        let places = quiet.places.before().into_iter().chain(quiet.places.after());
        for (place, event) in places.flat_map(|at| events.iter().map(move |it| (at.clone(), *it))) {
            let is_repeated = groups.len().is_multiple_of(REPEATED);
            let first = PlacedEvent { event, place };
            groups.push(CellGroup { quiet, events, first, is_repeated });
        }
    }
    let next = AtomicUsize::new(0);
    thread::scope(|threads| {
        let (give, take) = sync_channel(jobs);
        for _ in 0..jobs {
            let (give, next, groups) = (give.clone(), &next, &groups);
            threads.spawn(move || {
                let mut player = CellPlayer { clock, fleet: FreshFleet::default() };
                while let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if group.play(scope, &mut player, &give).is_err() {
                        return;
                    }
                }
            });
        }
        drop(give);
        take.into_iter().for_each(each);
    });
}
