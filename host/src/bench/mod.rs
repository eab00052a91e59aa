//! `kvferry bench`: bandwidth and latency of a data plane by size of ranges, between two processes.
//!
//! One side measures and one waits; `connection` is that by which they agree. Both drive their
//! planes directly (`harness`), without the protocol's actors.

mod args;
mod batch;
mod check;
mod child;
mod connection;
mod harness;
mod measure;
mod memory;
mod published;
mod report;
mod server;
#[cfg(test)]
mod tests;

pub(crate) use args::BenchArgs;

use crate::process::{
    CliProgress, CommandError, Exit, LINES_MAX, dial, follow_parent, print_error,
};
use args::{BenchPlan, brief};
use batch::BatchShape;
use child::BenchChild;
use connection::{BenchConnection, BenchHello};
use harness::{PEER, PlaneHarness};
use kvferry_engine::fabric::Direction;
use kvferry_engine::text::printable_lines;
use measure::{BenchCase, BenchSession};
use report::BenchRow;
use std::io::Write;
use std::sync::Arc;

/// Measures, or is the other side.
///
/// # Errors
/// Arguments that cannot be, what a side cannot have, and batches that fail.
pub(crate) fn command(args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    if args.child {
        follow_parent().map_err(|why| CommandError::Input(format!("--child: {why}")))?;
    }
    let plan = args.plan()?;
    if args.serve.is_some() {
        return server::serve(args, &plan, out);
    }
    if let Some(to) = &args.to {
        return measure(args, &plan, to, out);
    }
    let mut other = BenchChild::start(args)?;
    let to = other.address.clone();
    measure(args, &plan, &to, out).map_err(|stop| match (stop, other.end()) {
        (CommandError::Input(why), Some(status)) => {
            CommandError::Input(format!("{why}; the other side's process: {status}, why is above"))
        }
        (stop, _) => stop,
    })
}

/// Measures with the side that waits at `to`.
fn measure(
    args: &BenchArgs,
    plan: &BenchPlan,
    to: &str,
    out: &mut dyn Write,
) -> Result<Exit, CommandError> {
    let stream = dial(to, plan.patience).map_err(|why| {
        CommandError::Input(format!(
            "--to {to}: cannot connect: {why}; start `kvferry bench --serve ADDR:PORT` there, and give its address"
        ))
    })?;
    let host = args.host(stream.local_addr()?.ip())?;
    let line = BenchConnection::new(stream)
        .map_err(|why| CommandError::Input(format!("--to {to}: {why}")))?;
    let mut side = PlaneHarness::start(plan, &host, Arc::default())?;
    let theirs = handshake(&mut side, &line)?;
    let wanted = CaseSelection::new(args, &side, &theirs);
    if wanted.kinds.is_empty() {
        return Err(CommandError::Input(format!(
            "there is no row: {}",
            wanted.left_out.join("; ")
        )));
    }
    let mut lane = BenchSession { side: &mut side, line: &line, operations: 0 };
    let mut rows = Vec::with_capacity(wanted.kinds.len());
    let measured = measure_all(args, &mut lane, (&wanted.kinds, &theirs), &mut rows, out);
    // What was measured is told also if something fails after that.
    if !args.json && !rows.is_empty() {
        writeln!(out, "{}", report::table(&rows))?;
    }
    out.flush()?;
    for text in &wanted.left_out {
        note(args, out, text)?;
    }
    measured?;
    check_bytes(args, &mut lane, &wanted.kinds, theirs.of_host, out)
}

/// Agrees with the other side, and opens the session to its memory.
fn handshake(side: &mut PlaneHarness, line: &BenchConnection) -> Result<BenchHello, CommandError> {
    let region = side.register()?;
    let fence_key = rand::random();
    line.send(&side.hello(&region, fence_key))?;
    let peer = line.peer;
    let what = format!("an answer of {peer}, which may be serving another one");
    let theirs = BenchHello::of_other(&side.recv_line(line, &what)?, side.backend());
    let theirs =
        theirs.map_err(|why| CommandError::Input(format!("the other side, {peer}, {why}")))?;
    let refused = side.plane.connect(PEER, &theirs.address, fence_key);
    refused.map_err(|why| CommandError::Input(format!("a session to {peer}: {why}")))?;
    side.open(line, &theirs.region)?;
    Ok(theirs)
}

/// The rows that there are to be.
struct CaseSelection {
    kinds: Vec<BenchCase>,
    /// Which are left out, and why.
    left_out: Vec<String>,
}

impl CaseSelection {
    fn new(args: &BenchArgs, side: &PlaneHarness, theirs: &BenchHello) -> CaseSelection {
        let caps = side.plane.caps();
        let memory = side.len.min(theirs.len);
        let (mut kinds, mut large, mut long) = (Vec::new(), Vec::new(), Vec::new());
        for batch in &args.batches {
            if *batch > caps.slices_max {
                long.push(batch.to_string());
                continue;
            }
            for size in &args.sizes {
                match BatchShape::new(*size, *batch, memory) {
                    Some(shape) => kinds.push(shape),
                    None => large.push(format!("{batch} x {}", brief(*size))),
                }
            }
        }
        let able = |direction: &&Direction| match direction {
            Direction::Write => caps.write,
            Direction::Read => caps.read,
        };
        let (able, unable): (Vec<_>, Vec<_>) = args.directions().iter().partition(able);
        let of =
            |direction: Direction| kinds.iter().map(move |&shape| BenchCase { direction, shape });
        let kinds = able.into_iter().flat_map(|direction: &Direction| of(*direction)).collect();
        let mut left_out = Vec::new();
        if !large.is_empty() {
            let (rows, memory) = (large.join(", "), brief(memory));
            left_out
                .push(format!("left out, as both sides need more --memory than {memory}: {rows}"));
        }
        if !long.is_empty() {
            let (rows, most) = (long.join(", "), caps.slices_max);
            left_out.push(format!(
                "left out, as the plane takes {most} ranges at most: batches of {rows}"
            ));
        }
        if !unable.is_empty() {
            left_out.push(format!("left out, as the plane cannot: {unable:?}"));
        }
        CaseSelection { kinds, left_out }
    }
}

/// Measures row by row; those that were measured are in `rows` whatever happens then. A row that
/// fails is told, and the next one is measured over a new session.
///
/// # Errors
/// All rows that failed, or why there can be no other.
fn measure_all(
    args: &BenchArgs,
    lane: &mut BenchSession<'_>,
    (kinds, theirs): (&[BenchCase], &BenchHello),
    rows: &mut Vec<BenchRow>,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let progress = CliProgress::new(kinds.len() as u64);
    let backend = lane.side.backend();
    let mut failed = Vec::new();
    for (done, kind) in kinds.iter().enumerate() {
        progress.set(done as u64);
        progress.say(kind.to_string());
        let figures = match lane.row(*kind, args.seconds, args.inflight) {
            Ok(figures) => figures,
            Err(CommandError::Input(why)) => {
                if args.json {
                    report::failure(backend, *kind, &why, out)?;
                }
                failed.push(why);
                if let Err(CommandError::Input(why)) = lane.side.reopen(lane.line, &theirs.region) {
                    failed.push(why);
                    break;
                }
                continue;
            }
            Err(stop) => return Err(stop),
        };
        // MoRI's tables are those of network cards.
        let published = (backend == "mori-rdma")
            .then(|| published::published(kind.direction, kind.shape.size, kind.shape.batch));
        let row = BenchRow::new(backend, *kind, figures, published.flatten());
        if args.json {
            row.json(out)?;
        }
        rows.push(row);
    }
    if failed.is_empty() { Ok(()) } else { Err(CommandError::Input(failed.join("\n"))) }
}

/// Moves known bytes once more in each direction, and has them compared.
fn check_bytes(
    args: &BenchArgs,
    lane: &mut BenchSession<'_>,
    kinds: &[BenchCase],
    other_of_host: bool,
    out: &mut dyn Write,
) -> Result<Exit, CommandError> {
    if !lane.side.bytes.is_of_host() || !other_of_host {
        note(args, out, "bytes were not compared, as memory of a GPU is not looked at")?;
        return Ok(Exit::HELD);
    }
    let mut exit = Exit::HELD;
    for direction in args.directions() {
        let its = kinds.iter().filter(|kind| kind.direction == *direction);
        let Some(kind) = its.max_by_key(|kind| (kind.shape.batch, kind.shape.size)) else {
            continue;
        };
        match check::check(lane, *kind, rand::random())? {
            None => note(args, out, &format!("compared the bytes of one more {kind}: right"))?,
            Some(wrong) => {
                exit = Exit::CORRECTNESS;
                print_error(&wrong);
            }
        }
    }
    Ok(exit)
}

/// What there is to say beside the rows.
fn note(args: &BenchArgs, out: &mut dyn Write, text: &str) -> Result<(), CommandError> {
    let text = printable_lines(text, LINES_MAX);
    match args.json {
        true => writeln!(std::io::stderr(), "note: {text}")?,
        false => writeln!(out, "{text}")?,
    }
    Ok(())
}
