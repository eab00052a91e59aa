//! `shrink`: the smallest scenario that fails as a seed does.

mod cause;
mod edits;
mod search;

use crate::process::{CliProgress, CommandError, Overwrite, print_error};
use crate::simulator::scenario_files::ScenarioSource;
use crate::simulator::seed_run::{RerunPolicy, RunSetup, quiet_panics};
use crate::simulator::table::{columns, grouped};
use crate::simulator::timeline::{EventKind, read};
use crate::simulator::{page, time};
use cause::FailureCause;
use clap::Args;
use kvferry_engine::core::Nanos;
use kvferry_scenarios::run::Served;
use kvferry_scenarios::{drawn, explicit, written};
use kvferry_sim::world::{Recording, RunVerdict};
use search::{FailingScenario, Search, Trial};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use toml::{Table, Value};

/// Longest text of a violation in `about`, in characters.
const ABOUT_MAX: usize = 200;

/// Arguments of `shrink`.
#[derive(Debug, Args)]
pub(crate) struct ShrinkArgs {
    /// Scenario file
    pub(crate) file: PathBuf,
    /// Seed that fails; the one in the file if not given
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// File for the smaller scenario; FILE-N.toml in this folder if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Page of its run; the file of --out with .html if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
    /// Time after which the smallest scenario so far is written
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(crate) within: Nanos,
    /// Runs at a time; as many as there are cores if not given
    #[arg(long, value_name = "N")]
    pub(crate) jobs: Option<NonZeroUsize>,
}

/// Shrinks a seed and writes what is left.
///
/// # Errors
/// A scenario that cannot be used, a seed that does not fail, or a file that cannot be written.
pub(crate) fn command(args: &ShrinkArgs, out: &mut dyn Write) -> Result<RunVerdict, CommandError> {
    let started = Instant::now();
    let deadline = started + Duration::from_nanos(args.within.0);
    let seed = seed(args)?;
    let stem = args.file.file_stem().unwrap_or_default().to_string_lossy();
    let path = args.out.clone().unwrap_or_else(|| format!("{stem}-{seed}.toml").into());
    let html = args.html.clone().unwrap_or_else(|| path.with_extension("html"));
    if html == path {
        let path = path.display();
        return Err(CommandError::Input(format!(
            "--html {path}: this is the file of the scenario; name another file with --html"
        )));
    }
    args.overwrite.check("--out", &path)?;
    args.overwrite.check("--html", &html)?;
    quiet_panics();
    let text = drawn(&args.file, seed)?;
    let mut search = start(&args.file, &text, seed, (args.jobs, deadline))?;
    let before = Measures::of(&search.best);
    let progress = CliProgress::new(1);
    progress.say(format!("shrinking {}", search.cause.id()));
    search.shrink();
    drop(progress);
    describe(&mut search, &args.file.display().to_string(), seed);
    args.overwrite.write("--out", &path, written(&search.best.file))?;
    let rows = [before.row("before"), Measures::of(&search.best).row("after")];
    let table: Vec<_> = [Measures::head()].into_iter().chain(rows).collect();
    writeln!(out, "{}\n\n{}", columns(&table, 1), told(&search))?;
    let (runs, took) = (grouped(search.runs), started.elapsed().as_secs_f64());
    let end = if search.is_over() { ", when the time was over" } else { "" };
    writeln!(out, "{runs} candidates in {took:.1} s{end}")?;
    writeln!(out, "`kvferry run {}` plays it", path.display())?;
    if write_page(args, &path, &html)? {
        writeln!(out, "{}: a browser opens it", html.display())?;
    }
    Ok(RunVerdict::Held)
}

/// The seed that is shrunk.
fn seed(args: &ShrinkArgs) -> Result<u64, CommandError> {
    let scenario = ScenarioSource::File(args.file.clone()).load(None)?;
    args.seed.or(scenario.seed()).ok_or_else(|| {
        let file = args.file.display();
        CommandError::Input(format!(
            "{file}: the file is for any seed; give the one that fails with --seed, \
             `kvferry sweep {file} --seeds N` finds some"
        ))
    })
}

/// A search that begins with what a seed draws of a file, with a table for each instance, host,
/// stream and request as far as the run then fails alike.
///
/// # Errors
/// The seed does not fail.
fn start(
    path: &Path,
    text: &str,
    seed: u64,
    (jobs, deadline): (Option<NonZeroUsize>, Instant),
) -> Result<Search, CommandError> {
    let name = path.display().to_string();
    let folder = path.parent().unwrap_or(Path::new(""));
    let table = |text: String| text.parse::<Table>().expect("a scenario is TOML");
    let cores = || thread::available_parallelism().map_or(1, |cores| cores.get());
    let jobs = jobs.map_or_else(cores, |jobs| jobs.get());
    for again in [RerunPolicy::Never, RerunPolicy::Always] {
        let mut trial = Trial { name: name.clone(), folder: folder.into(), again, deadline: None };
        let first = trial.run(table(text.into()), text);
        let cause = first.as_ref().and_then(|first| FailureCause::of(&first.outcome));
        let (Some(first), Some(cause)) = (first, cause) else { continue };
        trial.deadline = Some(deadline);
        let mut search = Search::new(trial, cause, first, jobs);
        search.first(vec![table(explicit((&name, text), folder, seed)?)]);
        return Ok(search);
    }
    Err(CommandError::Input(format!(
        "{name} seed {seed}: it came out as expected, so there is nothing to shrink; \
         `kvferry sweep {name} --seeds N` finds seeds that fail"
    )))
}

/// Text of the first violation of the scenario.
fn told(search: &Search) -> &str {
    search.best.outcome.violations.first().map_or("", String::as_str)
}

/// Says what the scenario shows, and leaves out counts that a run without the bug need not meet.
fn describe(search: &mut Search, name: &str, seed: u64) {
    let told: String = told(search).chars().take(ABOUT_MAX).collect();
    let about = format!("Seed {seed} of {name}: {told}");
    search.best.file.insert("about".into(), Value::String(about));
    let is_kept = search.cause.is_of_expectation();
    let expect = search.best.file.get_mut("expect").and_then(Value::as_table_mut);
    if let Some(expect) = expect.filter(|_| !is_kept) {
        for key in ["requests", "receivers", "operations", "first_tokens"] {
            expect.remove(key);
        }
        if expect.is_empty() {
            search.best.file.remove("expect");
        }
    }
}

/// Size of a scenario.
struct Measures {
    instances: usize,
    requests: usize,
    faults: usize,
    /// Entries of the queue; none of a run that panicked.
    events: Option<u64>,
    seconds: f64,
}

impl Measures {
    /// Names of the columns.
    fn head() -> Vec<String> {
        ["", "instances", "requests", "faults", "events", "seconds"].map(String::from).to_vec()
    }

    fn of(scenario: &FailingScenario) -> Measures {
        let FailingScenario { run, outcome, .. } = scenario;
        let (instances, requests) = match run.served {
            Served::Requests => (run.instances.len(), run.requests.len()),
            Served::Payloads => (run.hosts.len(), run.streams.len()),
        };
        Measures {
            instances,
            requests,
            faults: run.faults.len() + run.shaped.len(),
            events: Some(outcome.events).filter(|events| *events > 0),
            seconds: outcome.wall_seconds,
        }
    }

    fn row(&self, name: &str) -> Vec<String> {
        let counts =
            [self.instances, self.requests, self.faults].map(|count| grouped(count as u64));
        let events = self.events.map_or("-".into(), grouped);
        let seconds = format!("{:.3}", self.seconds);
        [name.to_string()].into_iter().chain(counts).chain([events, seconds]).collect()
    }
}

/// Writes the page of the scenario, which begins at its first fault; false if there can be none.
fn write_page(args: &ShrinkArgs, path: &Path, html: &Path) -> Result<bool, CommandError> {
    let source = ScenarioSource::File(path.into());
    let setup = RunSetup { record: true, ..RunSetup::plain(source) };
    let scenario = setup.load()?;
    let seed = scenario.seed().unwrap_or_default();
    let (_, recording) = setup.run_seed(&scenario, seed, RerunPolicy::Never, &mut |_, _| {})?;
    let Some(recording) = recording else {
        print_error("the run panicked, so there is no page of it");
        return Ok(false);
    };
    page::write(&recording, html, first_fault(&recording), args.overwrite)?;
    Ok(true)
}

/// Time of the first fault; none if nothing hit.
fn first_fault(recording: &Recording) -> Option<Nanos> {
    let timeline = read(recording).ok()?;
    timeline.events.iter().find(|event| event.kind == EventKind::Fault).map(|event| event.at)
}

#[cfg(test)]
mod tests;
