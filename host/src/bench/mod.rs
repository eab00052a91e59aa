//! `kvferry bench`: bandwidth and latency of a data plane by size of ranges, between two processes.
//!
//! One side measures and one waits; `line` is the connection by which they agree. Both drive their
//! planes directly (`side`), without the protocol's actors.

mod args;
mod check;
mod child;
mod line;
mod measure;
mod memory;
mod published;
mod report;
mod serve;
mod shape;
mod side;
#[cfg(test)]
mod tests;

pub(crate) use args::{BenchArgs, name, seconds, settings};

use crate::cli::complain;
use crate::exit::{Exit, Stop};
use crate::progress::Progress;
use crate::signals::follow_parent;
use args::Plan;
use child::Other;
use engine::fabric::Direction;
use line::{Hello, Line};
use measure::{Kind, Lane};
use report::{Row, brief};
use shape::Shape;
use side::{PEER, Side};
use std::fmt::Display;
use std::io::Write;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// Measures, or is the other side.
///
/// # Errors
/// Arguments that cannot be, what a side cannot have, and batches that fail.
pub(crate) fn command(args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, Stop> {
    if args.child {
        follow_parent().map_err(|why| Stop::Input(format!("--child: {why}")))?;
    }
    let plan = args.plan()?;
    if args.serve.is_some() {
        return serve::serve(args, &plan, out);
    }
    if let Some(to) = &args.to {
        return measure(args, &plan, to, out);
    }
    let mut other = Other::start(args)?;
    let to = other.address.clone();
    measure(args, &plan, &to, out).map_err(|stop| match (stop, other.end()) {
        (Stop::Input(why), Some(status)) => {
            Stop::Input(format!("{why}; the other side's process: {status}, why is above"))
        }
        (stop, _) => stop,
    })
}

/// Measures with the side that waits at `to`.
fn measure(args: &BenchArgs, plan: &Plan, to: &str, out: &mut dyn Write) -> Result<Exit, Stop> {
    let stream = dial(to, plan.patience)?;
    let host = args.host(stream.local_addr()?.ip())?;
    let line = Line::new(stream).map_err(|why| Stop::Input(format!("--to {to}: {why}")))?;
    let mut side = Side::start(plan, &host, Arc::default())?;
    let theirs = meet(&mut side, &line)?;
    let wanted = Wanted::new(args, &side, &theirs);
    if wanted.kinds.is_empty() {
        return Err(Stop::Input(format!("there is no row: {}", wanted.left_out.join("; "))));
    }
    let mut lane = Lane { side: &mut side, line: &line, operations: 0 };
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

/// Connects to the side that waits.
fn dial(to: &str, patience: Duration) -> Result<TcpStream, Stop> {
    let failed = |why: &dyn Display| {
        Stop::Input(format!(
            "--to {to}: cannot connect: {why}; start `kvferry bench --serve ADDR:PORT` there, and give its address"
        ))
    };
    let addresses: Vec<SocketAddr> = to.to_socket_addrs().map_err(|why| failed(&why))?.collect();
    let mut last = failed(&"the name has no address");
    for address in &addresses {
        match TcpStream::connect_timeout(address, patience) {
            Ok(stream) => return Ok(stream),
            Err(why) => last = failed(&why),
        }
    }
    Err(last)
}

/// Agrees with the other side, and opens the session to its memory.
fn meet(side: &mut Side, line: &Line) -> Result<Hello, Stop> {
    let region = side.register()?;
    let pass = rand::random();
    line.tell(&side.hello(&region, pass))?;
    let peer = line.peer;
    let what = format!("an answer of {peer}, which may be serving another one");
    let theirs = Hello::of_other(&side.hear(line, &what)?, side.backend());
    let theirs = theirs.map_err(|why| Stop::Input(format!("the other side, {peer}, {why}")))?;
    let refused = side.plane.connect(PEER, &theirs.address, pass);
    refused.map_err(|why| Stop::Input(format!("a session to {peer}: {why}")))?;
    side.open(line, &theirs.region)?;
    Ok(theirs)
}

/// The rows that there are to be.
struct Wanted {
    kinds: Vec<Kind>,
    /// Which are left out, and why.
    left_out: Vec<String>,
}

impl Wanted {
    fn new(args: &BenchArgs, side: &Side, theirs: &Hello) -> Wanted {
        let caps = side.plane.caps();
        let memory = side.len.min(theirs.len);
        let (mut kinds, mut large, mut long) = (Vec::new(), Vec::new(), Vec::new());
        for batch in &args.batches {
            if *batch > caps.slices_max {
                long.push(batch.to_string());
                continue;
            }
            for size in &args.sizes {
                match Shape::new(*size, *batch, memory) {
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
        let of = |direction: Direction| kinds.iter().map(move |&shape| Kind { direction, shape });
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
        Wanted { kinds, left_out }
    }
}

/// Measures row by row; those that were measured are in `rows` whatever happens then. A row that
/// fails is told, and the next one is measured over a new session.
///
/// # Errors
/// All rows that failed, or why there can be no other.
fn measure_all(
    args: &BenchArgs,
    lane: &mut Lane<'_>,
    (kinds, theirs): (&[Kind], &Hello),
    rows: &mut Vec<Row>,
    out: &mut dyn Write,
) -> Result<(), Stop> {
    let progress = Progress::new(kinds.len() as u64);
    let backend = lane.side.backend();
    let mut failed = Vec::new();
    for (done, kind) in kinds.iter().enumerate() {
        progress.set(done as u64);
        progress.say(kind.to_string());
        let figures = match lane.row(*kind, args.seconds, args.inflight) {
            Ok(figures) => figures,
            Err(Stop::Input(why)) => {
                if args.json {
                    report::failure(backend, *kind, &why, out)?;
                }
                failed.push(why);
                if let Err(Stop::Input(why)) = lane.side.reopen(lane.line, &theirs.region) {
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
        let row = Row::new(backend, *kind, figures, published.flatten());
        if args.json {
            row.json(out)?;
        }
        rows.push(row);
    }
    if failed.is_empty() { Ok(()) } else { Err(Stop::Input(failed.join("\n"))) }
}

/// Moves known bytes once more in each direction, and has them compared.
fn check_bytes(
    args: &BenchArgs,
    lane: &mut Lane<'_>,
    kinds: &[Kind],
    other_of_host: bool,
    out: &mut dyn Write,
) -> Result<Exit, Stop> {
    if !lane.side.bytes.is_of_host() || !other_of_host {
        note(args, out, "bytes were not compared, as memory of a GPU is not looked at")?;
        return Ok(Exit::Held);
    }
    let mut exit = Exit::Held;
    for direction in args.directions() {
        let its = kinds.iter().filter(|kind| kind.direction == *direction);
        let Some(kind) = its.max_by_key(|kind| (kind.shape.batch, kind.shape.size)) else {
            continue;
        };
        match check::check(lane, *kind, rand::random())? {
            None => note(args, out, &format!("compared the bytes of one more {kind}: right"))?,
            Some(wrong) => {
                exit = Exit::Correctness;
                complain(&wrong);
            }
        }
    }
    Ok(exit)
}

/// What there is to say beside the rows.
fn note(args: &BenchArgs, out: &mut dyn Write, text: &str) -> Result<(), Stop> {
    match args.json {
        true => writeln!(std::io::stderr(), "note: {text}")?,
        false => writeln!(out, "{text}")?,
    }
    Ok(())
}
