//! Whether the bytes that a plane moves are the right ones.

use super::batch::BatchRanges;
use super::connection::{BenchRequest, BenchResponse};
use super::harness::SESSION;
use super::measure::{BenchCase, BenchSession};
use crate::process::CommandError;
use kvferry_engine::fabric::{DataEvent, Direction, QuiesceTicket};

/// Moves one batch of known bytes. What is wrong with them at their destination, if anything is.
///
/// # Errors
/// They could not be moved or looked at.
pub(super) fn check(
    lane: &mut BenchSession<'_>,
    kind: BenchCase,
    seed: u64,
) -> Result<Option<String>, CommandError> {
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
    lane: &mut BenchSession<'_>,
    kind: BenchCase,
    ranges: &BatchRanges,
    seed: u64,
) -> Result<Option<u64>, CommandError> {
    let size = kind.shape.size;
    let places = ranges.local.iter().map(|at| (*at, *at));
    lane.side.bytes.fill(places, size, seed).map_err(|why| unreadable(kind, &why))?;
    // Nothing that is there by chance is taken for what arrived.
    ask(lane, kind, &BenchRequest::Fill(kind.shape, !seed))?;
    lane.run_batch(kind, ranges)?;
    let ticket = QuiesceTicket(lane.operations);
    lane.side.plane.quiesce(SESSION, ticket);
    let quiet = DataEvent::Quiet { session: SESSION, ticket };
    let what = format!("{kind}: its end (quiesce)");
    lane.side.wait(Some(lane.line), &what, |event| (*event == quiet).then_some(()))?;
    ask(lane, kind, &BenchRequest::Compare(kind.shape, seed))
}

/// The first byte of this side's memory that is wrong.
fn read(
    lane: &mut BenchSession<'_>,
    kind: BenchCase,
    ranges: &BatchRanges,
    seed: u64,
) -> Result<Option<u64>, CommandError> {
    let size = kind.shape.size;
    ask(lane, kind, &BenchRequest::Fill(kind.shape, seed))?;
    let places = ranges.local.iter().map(|at| (*at, *at));
    lane.side.bytes.fill(places, size, !seed).map_err(|why| unreadable(kind, &why))?;
    lane.run_batch(kind, ranges)?;
    let places = ranges.local.iter().copied().zip(ranges.remote.iter().copied());
    lane.side.bytes.first_mismatch(places, size, seed).map_err(|why| unreadable(kind, &why))
}

fn ask(
    lane: &mut BenchSession<'_>,
    kind: BenchCase,
    ask: &BenchRequest,
) -> Result<Option<u64>, CommandError> {
    lane.line.send(ask)?;
    let what = format!("{kind}: the other side's look at its memory");
    let answer = lane.side.recv_line(lane.line, &what)?;
    match serde_json::from_str(&answer) {
        Ok(BenchResponse::Done) => Ok(None),
        Ok(BenchResponse::Wrong(at)) => Ok(Some(at)),
        Ok(BenchResponse::Failed(why)) => Err(CommandError::Input(format!("{what}: {why}"))),
        Err(why) => Err(CommandError::Input(format!("{what}: {why}"))),
    }
}

fn unreadable(kind: BenchCase, why: &std::io::Error) -> CommandError {
    CommandError::Input(format!("{kind}: memory of this side: {why}"))
}
