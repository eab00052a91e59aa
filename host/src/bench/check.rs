//! Whether the bytes that a plane moves are the right ones.

use super::line::{Answer, Ask};
use super::measure::{Kind, Lane};
use super::shape::Ranges;
use super::side::SESSION;
use crate::exit::Stop;
use engine::fabric::{DataEvent, Direction, Ticket};

/// Moves one batch of known bytes. What is wrong with them at their destination, if anything is.
///
/// # Errors
/// They could not be moved or looked at.
pub(super) fn check(lane: &mut Lane<'_>, kind: Kind, seed: u64) -> Result<Option<String>, Stop> {
    let ranges = kind.shape.ranges(0);
    let wrong = match kind.direction {
        Direction::Write => written(lane, kind, &ranges, seed)?,
        Direction::Read => read(lane, kind, &ranges, seed)?,
    };
    Ok(wrong.map(|at| {
        let whose = if kind.direction == Direction::Write { "the other" } else { "this" };
        format!("{kind}: wrong bytes arrived, the first at {at} of the memory of {whose} side")
    }))
}

/// The first byte of the other side's memory that is wrong.
fn written(
    lane: &mut Lane<'_>,
    kind: Kind,
    ranges: &Ranges,
    seed: u64,
) -> Result<Option<u64>, Stop> {
    let size = kind.shape.size;
    let places = ranges.local.iter().map(|at| (*at, *at));
    lane.side.bytes.fill(places, size, seed).map_err(|why| unreadable(kind, &why))?;
    // Nothing that is there by chance is taken for what arrived.
    ask(lane, kind, &Ask::Fill(kind.shape, !seed))?;
    lane.one(kind, ranges)?;
    let ticket = Ticket(lane.operations);
    lane.side.plane.quiesce(SESSION, ticket);
    let quiet = DataEvent::Quiet { session: SESSION, ticket };
    let what = format!("{kind}: its end (quiesce)");
    lane.side.wait(Some(lane.line), &what, |event| (*event == quiet).then_some(()))?;
    ask(lane, kind, &Ask::Compare(kind.shape, seed))
}

/// The first byte of this side's memory that is wrong.
fn read(lane: &mut Lane<'_>, kind: Kind, ranges: &Ranges, seed: u64) -> Result<Option<u64>, Stop> {
    let size = kind.shape.size;
    ask(lane, kind, &Ask::Fill(kind.shape, seed))?;
    let places = ranges.local.iter().map(|at| (*at, *at));
    lane.side.bytes.fill(places, size, !seed).map_err(|why| unreadable(kind, &why))?;
    lane.one(kind, ranges)?;
    let places = ranges.local.iter().copied().zip(ranges.remote.iter().copied());
    lane.side.bytes.wrong(places, size, seed).map_err(|why| unreadable(kind, &why))
}

fn ask(lane: &mut Lane<'_>, kind: Kind, ask: &Ask) -> Result<Option<u64>, Stop> {
    lane.line.tell(ask)?;
    let what = format!("{kind}: the other side's look at its memory");
    let answer = lane.side.hear(lane.line, &what)?;
    match serde_json::from_str(&answer) {
        Ok(Answer::Done) => Ok(None),
        Ok(Answer::Wrong(at)) => Ok(Some(at)),
        Ok(Answer::Failed(why)) => Err(Stop::Input(format!("{what}: {why}"))),
        Err(why) => Err(Stop::Input(format!("{what}: {why}"))),
    }
}

fn unreadable(kind: Kind, why: &std::io::Error) -> Stop {
    Stop::Input(format!("{kind}: memory of this side: {why}"))
}
