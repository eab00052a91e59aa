//! `sweep`: one scenario, many seeds, several at a time.

use crate::process::{CliProgress, CommandError, print_error};
use crate::simulator::outcome::RunOutcome;
use crate::simulator::products::{self, ProductFilter, ProductsArg};
use crate::simulator::scenario_files::ScenarioSource;
use crate::simulator::seed_run::{RerunPolicy, RunSetup, quiet_panics, quoted};
use crate::simulator::table::{columns, grouped, trouble};
use clap::Args;
use kvferry_scenarios::{FaultKind, Scenario};
use kvferry_sim::faults::CoveragePhase;
use kvferry_sim::world::{ReceiverTotals, RunVerdict};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Instant;

/// Every so many seeds one is run twice to compare the traces.
const REPEATED: u64 = 50;

/// Failing seeds that are shown in full.
const SHOWN: usize = 20;

/// Violations that are shown of each.
const VIOLATIONS: usize = 3;

/// Arguments of `sweep`.
#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// Scenario file
    #[arg(required_unless_present = "products")]
    pub(crate) file: Option<PathBuf>,
    /// Number of seeds
    #[arg(long, value_name = "N", required_unless_present = "products")]
    pub(crate) seeds: Option<u64>,
    /// In place of seeds of a file: events before and after every input of a request, for all of which
    /// the scenarios are generated
    #[arg(long, value_name = "EVENTS", num_args = 0..=1, require_equals = true,
        default_missing_value = "singles",
        conflicts_with_all = ["file", "seeds", "base", "failed_max", "recomputed_max", "full_links_min"])]
    pub(crate) products: Option<ProductsArg>,
    #[command(flatten)]
    pub(crate) filter: ProductFilter,
    /// Folder for the scenarios of products that fail
    #[arg(long, value_name = "FOLDER", default_value = ".", conflicts_with = "seeds")]
    pub(crate) out: PathBuf,
    /// First seed; drawn at random if not given, so that every sweep looks at other seeds
    #[arg(long, value_name = "N", default_value_t = rand::random_range(0..1 << 32),
        hide_default_value = true)]
    pub(crate) base: u64,
    /// Runs at a time; as many as there are cores if not given
    #[arg(long, value_name = "N")]
    pub(crate) jobs: Option<NonZeroUsize>,
    /// Print one JSON object per seed, or cell of a product, and line
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) budget: Budget,
}

/// How a seed ended.
type SeedResult = Result<RunOutcome, CommandError>;

/// What all seeds together may come to. A share outside is told, and the exit code is at least 3.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct Budget {
    /// Requests that may fail, in percent of those that finished or failed
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    failed_max: Option<f64>,
    /// Requests that may be recomputed, in percent of those that finished
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    recomputed_max: Option<f64>,
    /// Seeds in which a link has to be above 80 % for a second or more, in percent
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    full_links_min: Option<f64>,
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=100.0).contains(number));
    number.ok_or_else(|| "a percentage is a number from 0 to 100".to_string())
}

/// So many of all, in percent.
fn share(some: u64, all: u64) -> f64 {
    100.0 * some as f64 / all.max(1) as f64
}

impl Budget {
    /// What is outside, a line each.
    fn broken(&self, sum: &SweepTotals) -> Vec<String> {
        let ended = sum.finished + sum.failed;
        let shares = [
            ("failed requests", share(sum.failed, ended), self.failed_max, "most"),
            (
                "recomputed requests",
                share(sum.recomputed, sum.finished),
                self.recomputed_max,
                "most",
            ),
            ("seeds with a full link", share(sum.full, sum.runs), self.full_links_min, "least"),
        ];
        let outside = |(what, measured, limit, side): (&str, f64, Option<f64>, &str)| {
            let limit = limit?;
            let broken = if side == "most" { measured > limit } else { measured < limit };
            broken.then(|| format!("{what}: {measured:.2} %, at {side} {limit} % are allowed"))
        };
        shares.into_iter().filter_map(outside).collect()
    }
}

/// What a sweep adds up.
#[derive(Debug, Default)]
struct SweepTotals {
    runs: u64,
    worst: RunVerdict,
    failing: Vec<RunOutcome>,
    finished: u64,
    failed: u64,
    unknown: u64,
    recomputed: u64,
    receivers: ReceiverTotals,
    events: u64,
    /// Seeds in which a link was above 80 % for a second or more.
    full: u64,
    /// Faults of the world's shape that some seed has.
    shaped: BTreeSet<FaultKind>,
    /// How often tables of faults hit that some seed has, by line and kind.
    tables: BTreeMap<(u32, FaultKind), u64>,
    /// Seeds in which a fault kind hit.
    seeds: BTreeMap<FaultKind, u64>,
    /// How often it hit, by phase of the transfers concerned.
    hits: BTreeMap<(FaultKind, CoveragePhase), u64>,
}

/// Runs the seeds and prints those that fail.
///
/// # Errors
/// A scenario that cannot be used, or a result that cannot be written. A seed with which it cannot
/// be used is told on stderr, and the others are run.
pub(crate) fn command(args: &SweepArgs, out: &mut dyn Write) -> Result<RunVerdict, CommandError> {
    let cores = || thread::available_parallelism().map_or(1, |cores| cores.get());
    let jobs = args.jobs.map_or_else(cores, |jobs| jobs.get());
    if let Some(products) = args.products {
        let cells = (products, &args.filter);
        return products::command(cells, jobs, (&args.out, args.json), out);
    }
    let (file, count) = (args.file.clone().unwrap_or_default(), args.seeds.unwrap_or_default());
    let source = ScenarioSource::File(file);
    let setup = RunSetup { outputs: args.json, ..RunSetup::plain(source) };
    let scenario = setup.load()?;
    let Some(end) = args.base.checked_add(count).filter(|end| *end > args.base) else {
        let text = format!("no seeds from {} on in number {count}", args.base);
        return Err(CommandError::Input(format!("{text}; give --seeds at least 1")));
    };
    quiet_panics();
    let started = Instant::now();
    let work = SeedQueue {
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
        print(&sum, args.base, started.elapsed().as_secs_f64(), out)?;
    }
    let broken = args.budget.broken(&sum);
    broken.iter().for_each(|line| print_error(line));
    Ok(if broken.is_empty() { sum.worst } else { sum.worst.max(RunVerdict::Liveness) })
}

/// Seeds to run, shared by the threads.
struct SeedQueue<'a> {
    setup: &'a RunSetup,
    scenario: &'a Scenario,
    seeds: Range<u64>,
    next: AtomicU64,
    stop: AtomicBool,
}

impl SeedQueue<'_> {
    fn run(&self, give: SyncSender<(u64, SeedResult)>) {
        while !self.stop.load(Ordering::Relaxed) {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if !self.seeds.contains(&seed) {
                return;
            }
            let nth = seed - self.seeds.start;
            let again =
                if nth.is_multiple_of(REPEATED) { RerunPolicy::Always } else { RerunPolicy::Never };
            let result = self.setup.run_seed(self.scenario, seed, again, &mut |_, _| {});
            if give.send((seed, result.map(|(outcome, _)| outcome))).is_err() {
                return;
            }
        }
    }
}

/// Takes results as they come and handles them by seed.
fn collect(
    args: &SweepArgs,
    take: &Receiver<(u64, SeedResult)>,
    out: &mut dyn Write,
) -> Result<SweepTotals, CommandError> {
    let progress = CliProgress::new(args.seeds.unwrap_or_default());
    let mut early = BTreeMap::new();
    let mut sum = SweepTotals::default();
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
                Err(CommandError::Input(text)) => {
                    sum.runs += 1;
                    sum.worst = sum.worst.max(RunVerdict::Invalid);
                    progress.pause(|| {
                        print_error(&format!("seed {seed}: {text}"));
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

impl SweepTotals {
    fn add(&mut self, outcome: RunOutcome) {
        self.runs += 1;
        self.worst = self.worst.max(outcome.exit);
        self.finished += outcome.finished;
        self.failed += outcome.failed;
        self.unknown += outcome.unknown;
        self.recomputed += outcome.recomputed;
        self.receivers.finished += outcome.receivers.finished;
        self.receivers.failed += outcome.receivers.failed;
        self.receivers.gone += outcome.receivers.gone;
        self.events += outcome.events;
        self.full += u64::from(outcome.has_full_link());
        self.shaped.extend(&outcome.shaped);
        for (table, hits) in &outcome.tables {
            *self.tables.entry(*table).or_default() += hits;
        }
        let kinds: BTreeSet<_> = outcome.coverage.keys().map(|(kind, _)| *kind).collect();
        for kind in kinds {
            *self.seeds.entry(kind).or_default() += 1;
        }
        for (place, hits) in &outcome.coverage {
            *self.hits.entry(*place).or_default() += hits;
        }
        if outcome.exit != RunVerdict::Held {
            self.failing.push(outcome);
        }
    }

    /// Fault kinds that some seed has, whether they hit or not.
    fn kinds(&self) -> BTreeSet<FaultKind> {
        self.tables.keys().map(|(_, kind)| *kind).chain(self.shaped.iter().copied()).collect()
    }
}

/// In how many seeds each kind of fault hit, and how often in each phase.
fn coverage(sum: &SweepTotals) -> String {
    let mut head = vec!["fault hits by phase".to_string(), "seeds".into()];
    head.extend(CoveragePhase::ALL.iter().map(|phase| phase.name().to_string()));
    let mut rows = vec![head];
    for kind in sum.kinds() {
        let mut row = vec![kind.name().into()];
        row.push(grouped(sum.seeds.get(&kind).copied().unwrap_or(0)));
        let hits = |phase: &CoveragePhase| sum.hits.get(&(kind, *phase)).copied();
        row.extend(CoveragePhase::ALL.iter().map(|phase| grouped(hits(phase).unwrap_or(0))));
        rows.push(row);
    }
    columns(&rows, 1)
}

/// Faults that seeds have but that never hit; empty if all did.
fn never_hit(sum: &SweepTotals) -> String {
    let never = crate::simulator::outcome::never_hit(&sum.tables);
    match never.is_empty() {
        true => String::new(),
        false => format!("never hit: {}\n\n", never.join(", ")),
    }
}

fn print(
    sum: &SweepTotals,
    base: u64,
    seconds: f64,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    if !sum.kinds().is_empty() {
        write!(out, "{}\n\n{}", coverage(sum), never_hit(sum))?;
    }
    for outcome in sum.failing.iter().take(SHOWN) {
        write!(out, "{}", trouble(outcome, VIOLATIONS))?;
        let file = quoted(&outcome.scenario);
        writeln!(out, "  shrink with: kvferry shrink {file} --seed {}", outcome.seed)?;
    }
    if let Some(more) = sum.failing.get(SHOWN..).filter(|more| !more.is_empty()) {
        let seeds: Vec<_> = more.iter().map(|outcome| outcome.seed.to_string()).collect();
        writeln!(out, "also failing: seeds {}", seeds.join(", "))?;
    }
    let mut firsts: BTreeMap<&str, u64> = BTreeMap::new();
    for outcome in &sum.failing {
        let first = outcome.violations.first().and_then(|text| text.split([' ', ':']).next());
        let first = first.filter(|_| !outcome.unmet).unwrap_or(match outcome.unmet {
            true => "an expectation",
            false => outcome.verdict.name(),
        });
        *firsts.entry(first).or_default() += 1;
    }
    for (first, seeds) in firsts {
        writeln!(out, "{seeds} seeds failed first with {first}")?;
    }
    let SweepTotals { finished, failed, unknown, recomputed, .. } = sum;
    writeln!(
        out,
        "requests: {finished} finished ({recomputed} recomputed), {failed} failed, \
         {unknown} unknown"
    )?;
    let ReceiverTotals { finished, failed, gone } = sum.receivers;
    if finished + failed + gone > 0 {
        writeln!(out, "receivers: {finished} finished, {failed} failed, {gone} gone")?;
    }
    let share = share(sum.full, sum.runs);
    writeln!(out, "a link above 80 % for 1 s or more: {} seeds, {share:.1} %", sum.full)?;
    writeln!(
        out,
        "{} of {} seeds from {base} on failed; {} events in {seconds:.1} s, {:.1} seeds per second",
        sum.failing.len(),
        sum.runs,
        grouped(sum.events),
        sum.runs as f64 / seconds
    )?;
    Ok(())
}
