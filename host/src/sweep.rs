//! `sweep`: one scenario, many seeds, several at a time.

use crate::attempt::{Again, Setup, quiet_panics};
use crate::cli::{SweepArgs, complain};
use crate::exit::{Exit, Stop};
use crate::files::Source;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::table::{columns, grouped, trouble};
use scenarios::{FaultKind, Scenario};
use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Instant;

/// Every so many seeds one is run twice to compare the traces.
const REPEATED: u64 = 50;

/// Failing seeds that are shown in full.
const SHOWN: usize = 20;

/// How a seed ended.
type Ended = Result<Outcome, Stop>;

/// What a sweep adds up.
#[derive(Debug, Default)]
struct Sum {
    runs: u64,
    worst: Exit,
    failing: Vec<Outcome>,
    finished: u64,
    failed: u64,
    unknown: u64,
    recomputed: u64,
    events: u64,
    /// Seeds in which a fault kind hit, and how often it hit.
    faults: BTreeMap<&'static str, (u64, u64)>,
}

/// Runs the seeds and prints those that fail.
///
/// # Errors
/// A scenario that cannot be used, or a result that cannot be written. A seed with which it cannot
/// be used is told on stderr, and the others are run.
pub(crate) fn command(args: &SweepArgs, out: &mut dyn Write) -> Result<Exit, Stop> {
    let source = Source::File(args.file.clone());
    let setup = Setup { source, trace: None, actors: false, record: false };
    let scenario = setup.load()?;
    let Some(end) = args.base.checked_add(args.seeds).filter(|end| *end > args.base) else {
        let text = format!("no seeds from {} on in number {}", args.base, args.seeds);
        return Err(Stop::Input(format!("{text}; give --seeds at least 1")));
    };
    quiet_panics();
    let cores = || thread::available_parallelism().map_or(1, |cores| cores.get());
    let jobs = args.jobs.map_or_else(cores, |jobs| jobs.get());
    let started = Instant::now();
    let work = Work {
        setup: &setup,
        scenario: &scenario,
        seeds: args.base..end,
        next: AtomicU64::new(args.base),
        stop: AtomicBool::new(false),
    };
    let sum = thread::scope(|scope| {
        let (give, take) = sync_channel(jobs);
        for _ in 0..jobs {
            let give = give.clone();
            scope.spawn(|| work.run(give));
        }
        drop(give);
        let sum = collect(args, &take, out);
        // Nobody takes the rest; threads that wait to give see that.
        work.stop.store(true, Ordering::Relaxed);
        drop(take);
        sum
    })?;
    if !args.json {
        print(&sum, started.elapsed().as_secs_f64(), out)?;
    }
    Ok(sum.worst)
}

/// Seeds to run, shared by the threads.
struct Work<'a> {
    setup: &'a Setup,
    scenario: &'a Scenario,
    seeds: Range<u64>,
    next: AtomicU64,
    stop: AtomicBool,
}

impl Work<'_> {
    fn run(&self, give: SyncSender<(u64, Ended)>) {
        while !self.stop.load(Ordering::Relaxed) {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if !self.seeds.contains(&seed) {
                return;
            }
            let nth = seed - self.seeds.start;
            let again = if nth.is_multiple_of(REPEATED) { Again::Always } else { Again::Never };
            let result = self.setup.attempt(self.scenario, seed, again);
            if give.send((seed, result.map(|(outcome, _)| outcome))).is_err() {
                return;
            }
        }
    }
}

/// Takes results as they come and handles them by seed.
fn collect(
    args: &SweepArgs,
    take: &Receiver<(u64, Ended)>,
    out: &mut dyn Write,
) -> Result<Sum, Stop> {
    let progress = Progress::new(args.seeds);
    let mut early = BTreeMap::new();
    let mut sum = Sum::default();
    let mut seed = args.base;
    for (ended, result) in take {
        early.insert(ended, result);
        while let Some(result) = early.remove(&seed) {
            match result {
                Ok(outcome) => {
                    if args.json {
                        progress.pause(|| writeln!(out, "{}", outcome.json()))?;
                    }
                    sum.add(outcome);
                }
                Err(Stop::Input(text)) => {
                    sum.runs += 1;
                    sum.worst = sum.worst.max(Exit::Invalid);
                    progress.pause(|| {
                        complain(&format!("seed {seed}: {text}"));
                        Ok(())
                    })?;
                }
                Err(stop) => return Err(stop),
            }
            seed += 1;
        }
        progress.set(sum.runs);
        progress.say(format!("{} failing", sum.failing.len()));
    }
    Ok(sum)
}

impl Sum {
    fn add(&mut self, outcome: Outcome) {
        self.runs += 1;
        self.worst = self.worst.max(outcome.exit);
        self.finished += outcome.finished;
        self.failed += outcome.failed;
        self.unknown += outcome.unknown;
        self.recomputed += outcome.recomputed;
        self.events += outcome.events;
        for (kind, hits) in &outcome.faults {
            let (seeds, all) = self.faults.entry(kind).or_default();
            *seeds += 1;
            *all += hits;
        }
        if outcome.exit != Exit::Held {
            self.failing.push(outcome);
        }
    }
}

fn print(sum: &Sum, seconds: f64, out: &mut dyn Write) -> Result<(), Stop> {
    if !sum.faults.is_empty() {
        let mut rows = vec![["fault", "seeds", "hits"].map(String::from).to_vec()];
        let counts = |kind: &&FaultKind| sum.faults.get(kind.name()).map_or((0, 0), |at| *at);
        for kind in FaultKind::ALL {
            let (seeds, hits) = counts(&kind);
            rows.push(vec![kind.name().into(), grouped(seeds), grouped(hits)]);
        }
        writeln!(out, "{}\n", columns(&rows))?;
    }
    for outcome in sum.failing.iter().take(SHOWN) {
        write!(out, "{}", trouble(outcome))?;
    }
    if let Some(more) = sum.failing.get(SHOWN..).filter(|more| !more.is_empty()) {
        let seeds: Vec<_> = more.iter().map(|outcome| outcome.seed.to_string()).collect();
        writeln!(out, "also failing: seeds {}", seeds.join(", "))?;
    }
    let Sum { finished, failed, unknown, recomputed, .. } = sum;
    writeln!(
        out,
        "requests: {finished} finished ({recomputed} recomputed), {failed} failed, \
         {unknown} unknown"
    )?;
    writeln!(
        out,
        "{} of {} seeds failed; {} events in {seconds:.1} s",
        sum.failing.len(),
        sum.runs,
        grouped(sum.events)
    )?;
    Ok(())
}
