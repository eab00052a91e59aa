//! Products of events: in every fleet each event happens at every input of a request.

use kvferry_engine::core::message::Mode;
use kvferry_scenarios::products::{Company, EventPlace, PlacedEvent, ProductEvent, ProductWorld};
use kvferry_sim::products::{
    CellOutcome, CellResult, ProductCell, ProductPlan, ProductScope, ProductTable, play,
};
use kvferry_sim::world::{self, InputPlace, SimOptions};
use std::path::Path;
use std::time::Duration;

/// Failing cells that are shown.
const SHOWN: usize = 5;

/// Plays cells of a fleet, all of which have to hold.
#[track_caller]
fn table(
    mode: Mode,
    company: Company,
    events: &[ProductEvent],
    scope: ProductScope,
) -> ProductTable {
    let mut table = ProductTable::default();
    let worlds = vec![ProductWorld { mode, company }];
    let plan = ProductPlan { worlds, events: events.to_vec(), scope, jobs: 1 };
    play(&plan, &|| Duration::ZERO, &mut |result| table.add(result));
    let shown = |CellResult { cell, outcome, .. }: &CellResult| {
        let CellOutcome::Failed { text, .. } = outcome else { return String::new() };
        format!("{cell}: {text}\n{}\n", cell.scenario())
    };
    let failing: String = table.failing.iter().take(SHOWN).map(shown).collect();
    let (failed, cells) = (table.all.failed, table.all.cells);
    assert_eq!(failed, 0, "{failed} of {cells} cells failed, of which some are\n{failing}");
    table
}

/// Events that give blocks back before their time, which is what full pools are there for; all events take three
/// times as long, and `kvferry sweep --products` plays them.
const FREEING: [ProductEvent; 7] = [
    ProductEvent::Abort,
    ProductEvent::CutPrefill,
    ProductEvent::CutDecode,
    ProductEvent::PreemptPrefill,
    ProductEvent::PreemptDecode,
    ProductEvent::RestartPrefill,
    ProductEvent::RestartDecode,
];

#[track_caller]
fn holds(mode: Mode, company: Company) {
    let events = if company == Company::Full { &FREEING } else { ProductEvent::ALL };
    let table = table(mode, company, events, ProductScope::Singles);
    let absent: Vec<_> = table.absent().map(|(_, event)| event).collect();
    assert_eq!(absent, [], "nothing came of these, wherever they happened");
    let (held, cells) = (table.all.held(), table.all.cells);
    assert!(cells > 1_000 && 2 * held > cells, "only {held} of {cells} cells are not empty");
}

#[test]
fn preemption_holds_at_every_input_after_a_sibling_was_cancelled() {
    let events = [ProductEvent::CutDecode, ProductEvent::PreemptPrefill];
    for mode in [Mode::Push, Mode::Pull] {
        let table = table(mode, Company::Samples, &events, ProductScope::Pairs);
        let row = table.pairs.iter().find(|((_, first, second), _)| [*first, *second] == events);
        let held = row.map_or(0, |(_, row)| row.held());
        assert!(held > 10, "only {held} cells have both: {table:?}");
    }
}

#[test]
fn push_alone() {
    holds(Mode::Push, Company::Alone);
}

#[test]
fn push_with_two_samples() {
    holds(Mode::Push, Company::Samples);
}

#[test]
fn push_with_a_shared_prefix() {
    holds(Mode::Push, Company::Prefix);
}

#[test]
fn pull_alone() {
    holds(Mode::Pull, Company::Alone);
}

#[test]
fn pull_with_two_samples() {
    holds(Mode::Pull, Company::Samples);
}

#[test]
fn pull_with_a_shared_prefix() {
    holds(Mode::Pull, Company::Prefix);
}

#[test]
fn push_with_full_pools() {
    holds(Mode::Push, Company::Full);
}

#[test]
fn pull_with_full_pools() {
    holds(Mode::Pull, Company::Full);
}

#[test]
fn scenario_of_a_cell_says_where_its_events_are() {
    let place = EventPlace { is_after: true, ..EventPlace::before(7) };
    let event = PlacedEvent { event: ProductEvent::RestartDecode, place };
    let world = ProductWorld { mode: Mode::Push, company: Company::Alone };
    let cell = ProductCell { world, events: vec![event] };
    let scenario = kvferry_scenarios::parse("cell", &cell.scenario(), Path::new(""), None);
    let run = scenario.and_then(|scenario| scenario.draw(1)).unwrap_or_else(|why| panic!("{why}"));
    let [fault] = &run.faults[..] else { panic!("{:?}", run.faults) };
    assert!(fault.trigger.is_input() && fault.target.as_deref() == Some("d0"), "{fault:?}");
    assert_eq!(cell.slug(), "push-alone-restart-decode-after-7");
}

/// Runs a cell and lists its inputs.
fn inputs(event: ProductEvent, place: EventPlace) -> Vec<InputPlace> {
    let world = ProductWorld { mode: Mode::Pull, company: Company::Alone };
    let cell = ProductCell { world, events: vec![PlacedEvent { event, place }] };
    let scenario = kvferry_scenarios::parse("cell", &cell.scenario(), Path::new(""), None);
    let run = scenario.and_then(|scenario| scenario.draw(1)).unwrap_or_else(|why| panic!("{why}"));
    world::run(&run, SimOptions { inputs: true, ..SimOptions::default() }).inputs
}

#[test]
fn fault_before_an_input_comes_before_it_is_handled_and_one_after_it_not() {
    let quiet = inputs(ProductEvent::Abort, EventPlace::before(1 << 29));
    let of_request = || quiet.iter().filter(|input| input.at >= ProductWorld::START);
    let of = |instance| of_request().filter(move |input| input.instance == instance);
    let (decode, instance) = if of(2).count() > 0 { ("d0", 2) } else { ("d1", 3) };
    assert!(of(instance).count() > 10, "{quiet:#?}");
    for input in of(instance) {
        let handled = input.handled.expect("nothing happens in this run");
        for (nth, is_after) in [(input.due, false), (handled, true)] {
            let decode = decode.to_string();
            let place = EventPlace { is_after, decode, ..EventPlace::before(nth) };
            let seen = inputs(ProductEvent::RestartDecode, place);
            let (before, place) = (&seen[..input.due as usize - 1], &seen[input.due as usize - 1]);
            assert_eq!(before, &quiet[..before.len()], "before input {}", input.due);
            assert_eq!(place.handled.is_some(), is_after, "{input:?} {place:?}");
        }
    }
}
