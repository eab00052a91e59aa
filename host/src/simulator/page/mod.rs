//! Page of a recorded run, in one file: an overview of requests and links, and a sequence diagram
//! with filters, causes and the state of the KV blocks.

mod overview;

use crate::process::{CommandError, Overwrite};
use crate::simulator::timeline::{
    BlockUse, EventKind, Lane, Timeline, TimelineEvent, meaning, read,
};
use kvferry_engine::core::Nanos;
use kvferry_sim::world::Recording;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

const TEMPLATE: &str = include_str!("page.html");

/// Most events that a page has.
pub(crate) const EVENTS_MAX: usize = 10_000;

const KINDS: [(EventKind, &str); 8] = [
    (EventKind::Input, "input"),
    (EventKind::Effect, "effect"),
    (EventKind::Landing, "landing"),
    (EventKind::Fault, "fault"),
    (EventKind::Process, "process"),
    (EventKind::Blocks, "blocks"),
    (EventKind::Violation, "violation"),
    (EventKind::Phase, "phase"),
];

const STATES: [BlockUse; 6] = [
    BlockUse::Free,
    BlockUse::Taken,
    BlockUse::Landed,
    BlockUse::Moved,
    BlockUse::Used,
    BlockUse::Held,
];

/// What a page shows: what stands for an event that it does not.
const OUTSIDE: i64 = -2;
const NONE: i64 = -1;

/// Writes the page of a recording. It opens with the overview, or at the given time. Its sequence
/// begins at the first violation, else at the first fault or transfer.
///
/// # Errors
/// The recording cannot be read, or the page exists or cannot be written.
pub(crate) fn write(
    recording: &Recording,
    path: &Path,
    at: Option<Nanos>,
    overwrite: Overwrite,
) -> Result<(), CommandError> {
    let timeline = read(recording).map_err(|why| CommandError::Input(why.to_string()))?;
    overwrite.write("--html", path, page(&timeline, at))
}

/// The text of a page.
pub(crate) fn page(timeline: &Timeline, at: Option<Nanos>) -> String {
    // A page has one line of data, in which nothing ends the element that it stands in.
    let data = data(timeline, at).to_string().replace('<', "\\u003c");
    TEMPLATE.replacen("@DATA@", &data, 1)
}

/// The events that a page has: as many as it may have around the one at which it opens.
fn window(events: usize, focus: usize) -> Range<usize> {
    let first = focus.saturating_sub(EVENTS_MAX / 2).min(events.saturating_sub(EVENTS_MAX));
    first..events.min(first + EVENTS_MAX)
}

fn data(timeline: &Timeline, at: Option<Nanos>) -> Value {
    let last = timeline.events.len().saturating_sub(1);
    let focus = at.map_or_else(|| timeline.focus(), |at| timeline.first_at(at)).min(last);
    let shown = window(timeline.events.len(), focus);
    let mut labels = LabelTable::default();
    let events: Vec<Value> = timeline.events[shown.clone()]
        .iter()
        .map(|event| event_data(timeline, event, &shown, &mut labels))
        .collect();
    let (base, changes) = block_data(timeline, &shown);
    let of = |kind| timeline.events.iter().filter(|event| event.kind == kind).count();
    json!({
        "scenario": timeline.scenario,
        "seed": timeline.seed.to_string(),
        "verdict": timeline.verdict,
        "total": timeline.events.len(),
        "faults": of(EventKind::Fault),
        "violations": of(EventKind::Violation),
        "left": left_out(timeline, &shown),
        "focus": focus - shown.start,
        "opens": if at.is_some() { "sequence" } else { "overview" },
        "overview": overview::data(timeline, &shown),
        "kinds": KINDS.map(|(_, name)| name),
        "states": STATES,
        "lanes": timeline.lanes.iter().map(|(_, name)| name).collect::<Vec<_>>(),
        "folds": folds(timeline),
        "transfers": timeline.transfers,
        "meanings": labels.list.iter().map(|label| meaning(label)).collect::<Vec<_>>(),
        "labels": labels.list,
        "events": events,
        "pools": timeline.pools,
        "base": base,
        "changes": changes,
    })
}

/// The lane that stands for each where the ranks of an instance are one.
fn folds(timeline: &Timeline) -> Vec<usize> {
    let lanes = timeline.lanes.iter().map(|(lane, _)| *lane);
    let first =
        |lane: Lane| timeline.lanes.partition_point(|(known, _)| *known < lane.first_rank());
    lanes.map(first).collect()
}

/// In words, what of a run is not on its page.
fn left_out(timeline: &Timeline, shown: &Range<usize>) -> String {
    let all = timeline.events.len();
    if shown.len() == all {
        return String::new();
    }
    let (first, last) = (timeline.events[shown.start].at, timeline.events[shown.end - 1].at);
    format!(
        "This page has {} of {all} events, those from {first} to {last}: {} before and {} after are \
         left out. `kvferry export REC --html FILE --at TIME` makes a page around another time, \
         `kvferry show REC` reads them all.",
        shown.len(),
        shown.start,
        all - shown.end
    )
}

/// Labels, each once.
#[derive(Debug, Default)]
struct LabelTable {
    list: Vec<String>,
    known: BTreeMap<String, usize>,
}

impl LabelTable {
    fn index(&mut self, label: &str) -> usize {
        if let Some(index) = self.known.get(label) {
            return *index;
        }
        self.known.insert(label.into(), self.list.len());
        self.list.push(label.into());
        self.list.len() - 1
    }
}

/// An event as the page has it: time in nanoseconds, lane, kind, cause, the event before, whence
/// bytes came, whom a frame was for, flags, transfers, label and detail; indices throughout.
fn event_data(
    timeline: &Timeline,
    event: &TimelineEvent,
    shown: &Range<usize>,
    labels: &mut LabelTable,
) -> Value {
    let lane = |lane: Option<Lane>| {
        let found = lane
            .and_then(|lane| timeline.lanes.binary_search_by_key(&lane, |(known, _)| *known).ok());
        found.map_or(NONE, |at| at as i64)
    };
    let other = |other: Option<u32>| match other.map(|other| other as usize) {
        None => NONE,
        Some(other) if shown.contains(&other) => (other - shown.start) as i64,
        Some(_) => OUTSIDE,
    };
    let kind = KINDS.iter().position(|(kind, _)| *kind == event.kind);
    let flags = u8::from(event.is_lost) | u8::from(event.is_minor) << 1;
    json!([
        event.at.0,
        lane(event.lane),
        kind,
        other(event.cause),
        other(event.before),
        lane(event.from),
        lane(event.to),
        flags,
        event.transfers,
        labels.index(&event.label),
        event.detail,
    ])
}

/// The blocks that are not free where the page begins, and what changes on it: event, pool, group,
/// block, state and transfer.
fn block_data(timeline: &Timeline, shown: &Range<usize>) -> (Vec<Value>, Vec<Value>) {
    let pool_of: BTreeMap<u16, usize> =
        timeline.pools.iter().enumerate().map(|(at, pool)| (pool.instance, at)).collect();
    let mut base = BTreeMap::new();
    let mut changes = Vec::new();
    for change in &timeline.changes {
        let (Some(pool), at) = (pool_of.get(&change.instance), change.event as usize) else {
            continue;
        };
        let place = (*pool, change.group, change.block);
        let state = STATES.iter().position(|state| *state == change.state).unwrap_or_default();
        let transfer = change.transfer.map_or(NONE, i64::from);
        if at >= shown.end {
            break;
        } else if at >= shown.start {
            let at = at - shown.start;
            changes.push(json!([at, place.0, place.1, place.2, state, transfer]));
        } else if change.state == BlockUse::Free {
            base.remove(&place);
        } else {
            base.insert(place, (state, transfer));
        }
    }
    let base = base.into_iter().map(|((pool, group, block), (state, transfer))| {
        json!([pool, group, block, state, transfer])
    });
    (base.collect(), changes)
}
