//! `run`: scenarios one after another.

#[cfg(feature = "full")]
use crate::instance::FabricArg;
use crate::process::{CliProgress, CommandError, Overwrite, print_error};
#[cfg(feature = "full")]
use crate::simulator::local_cluster::ClusterRun;
use crate::simulator::outcome::RunOutcome;
use crate::simulator::page;
use crate::simulator::scenario_files::{ScenarioSource, find};
use crate::simulator::seed_run::{RerunPolicy, RunSetup, quiet_panics};
use crate::simulator::table;
use clap::{Args, ValueEnum};
use kvferry_engine::core::Nanos;
use kvferry_sim::world::{Recording, RunVerdict};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;

/// Where scenarios are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RunFabricArg {
    Sim,
    Host,
    Mori,
}

#[cfg(feature = "full")]
impl RunFabricArg {
    /// Returns the data plane between processes; none in the simulator.
    fn processes(self) -> Option<FabricArg> {
        match self {
            RunFabricArg::Sim => None,
            RunFabricArg::Host => Some(FabricArg::Host),
            RunFabricArg::Mori => Some(FabricArg::Mori),
        }
    }
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Scenario files, or directories whose *.toml files are run by name; without any, the
    /// bundled scenario on the bundled trace
    #[arg(value_name = "FILE|DIR")]
    pub(crate) paths: Vec<PathBuf>,
    /// Seed in place of the one in the file; 1 if the file has "any"
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Request trace in place of the one that the file names
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) workload_trace: Option<PathBuf>,
    /// Keep every input and effect of the one scenario in this file, for `replay`
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Write a page of the one scenario: an overview of its requests, and all messages in sequence
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
    /// Print one JSON object per scenario and line
    #[arg(long)]
    pub(crate) json: bool,
    /// Run the protocol in its actors; the second run is without them
    #[arg(long)]
    pub(crate) actors: bool,
    /// Multiply the bandwidth of every simulated link, to see the same requests on fuller links
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = scale)]
    pub(crate) link_scale: f64,
    /// Where: in the simulator, or as processes of this machine that move host memory by themselves
    /// or by ROCm's MoRI-IO
    #[arg(long, default_value = "sim", conflicts_with_all = ["actors", "record", "html"])]
    pub(crate) fabric: RunFabricArg,
    /// Folder for the logs of the processes; without it one among temporary files, which is kept
    /// and named if a request failed or was recomputed
    #[arg(long, value_name = "DIR")]
    pub(crate) logs: Option<PathBuf>,
}

/// A factor of bandwidths.
fn scale(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (1e-6..=1e6).contains(factor));
    factor.ok_or_else(|| "give a number from 0.000001 to 1000000".into())
}

/// Runs what is named and prints what came out.
///
/// # Errors
/// Nothing to run, or a result that cannot be written. A scenario that cannot be used is told on
/// stderr, and the others are run.
pub(crate) fn command(args: &RunArgs, out: &mut dyn Write) -> Result<RunVerdict, CommandError> {
    #[cfg(not(feature = "full"))]
    if args.actors || args.fabric != RunFabricArg::Sim {
        let what = if args.actors { "run --actors" } else { "run --fabric" };
        return Err(crate::process::without(what, "full"));
    }
    let sources = find(&args.paths)?;
    for (file, option) in [(&args.record, "--record"), (&args.html, "--html")] {
        if file.is_some() && sources.len() != 1 {
            let text = format!("{option} keeps one run, but there are {} scenarios", sources.len());
            return Err(CommandError::Input(format!("{text}; name one file")));
        }
        if let Some(path) = file {
            args.overwrite.check(option, path)?;
        }
    }
    quiet_panics();
    let mut worst = RunVerdict::Held;
    let mut outcomes = Vec::new();
    let progress = CliProgress::new(sources.len() as u64);
    for (done, source) in sources.iter().enumerate() {
        progress.set(done as u64);
        progress.say(source.name());
        let mut watch = |now: Nanos, last: Nanos| progress.set_part(done as u64, now.0, last.0);
        match one(args, source, &mut watch) {
            Ok(seeds) => {
                for outcome in seeds {
                    worst = worst.max(outcome.exit);
                    if args.json {
                        progress.pause(|| {
                            writeln!(out, "{}", outcome.json())?;
                            out.flush()
                        })?;
                    }
                    outcomes.push(outcome);
                }
            }
            Err(CommandError::Input(text)) => {
                worst = worst.max(RunVerdict::Invalid);
                progress.pause(|| {
                    print_error(&text);
                    Ok(())
                })?;
            }
            Err(stop) => return Err(stop),
        }
    }
    drop(progress);
    if !args.json {
        print(&outcomes, out)?;
    }
    Ok(worst)
}

fn one(
    args: &RunArgs,
    source: &ScenarioSource,
    watch: &mut dyn FnMut(Nanos, Nanos),
) -> Result<Vec<RunOutcome>, CommandError> {
    let is_kept = args.record.is_some() || args.html.is_some();
    let setup = RunSetup {
        source: source.clone(),
        trace: args.workload_trace.clone(),
        link_scale: args.link_scale,
        actors: args.actors,
        record: is_kept,
        outputs: args.json,
    };
    let scenario = setup.load()?;
    let first = scenario.seeds().next();
    let seeds: Vec<u64> = match args.seed.or(first.filter(|_| is_kept)) {
        Some(seed) => vec![seed],
        None => scenario.seeds().collect(),
    };
    #[cfg(feature = "full")]
    if let Some(fabric) = args.fabric.processes() {
        let trace = args.workload_trace.as_deref();
        let seed = seeds[0];
        let logs = args.logs.as_deref();
        let run = ClusterRun { source, scenario: &scenario, seed, trace, fabric, logs };
        return Ok(vec![run.run()?]);
    }
    let again = if args.actors { RerunPolicy::Always } else { RerunPolicy::IfCheap };
    let mut outcomes = Vec::with_capacity(seeds.len());
    for seed in seeds {
        let (outcome, recording) = setup.run_seed(&scenario, seed, again, watch)?;
        if is_kept {
            keep(args, recording.as_ref())?;
        }
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// Writes what is to be kept of a run.
fn keep(args: &RunArgs, recording: Option<&Recording>) -> Result<(), CommandError> {
    let Some(recording) = recording else {
        print_error("the run panicked, so there is no recording and no page of it");
        return Ok(());
    };
    if let Some(path) = &args.record {
        args.overwrite.write("--record", path, &recording.0)?;
    }
    match &args.html {
        Some(path) => page::write(recording, path, None, args.overwrite),
        None => Ok(()),
    }
}

/// Of each scenario the first run, and all that did not come out as expected.
fn shown(outcomes: &[RunOutcome]) -> Vec<RunOutcome> {
    let mut names = BTreeSet::new();
    let mut shown = Vec::new();
    for one in outcomes {
        if names.insert(&one.scenario) || one.exit != RunVerdict::Held {
            shown.push(one.clone());
        }
    }
    shown
}

fn print(outcomes: &[RunOutcome], out: &mut dyn Write) -> Result<(), CommandError> {
    match outcomes {
        [] => {}
        [outcome] => writeln!(out, "{}", table::one(outcome))?,
        outcomes => {
            writeln!(out, "{}", table::many(&shown(outcomes)))?;
            let names: BTreeSet<&str> = outcomes.iter().map(|one| one.scenario.as_str()).collect();
            let failed = outcomes.iter().filter(|outcome| outcome.exit != RunVerdict::Held);
            let failed: BTreeSet<&str> = failed.map(|one| one.scenario.as_str()).collect();
            let (held, all, runs) = (names.len() - failed.len(), names.len(), outcomes.len());
            let runs = if runs > all { format!(", {runs} runs") } else { String::new() };
            writeln!(out, "{held} of {all} scenarios came out as expected{runs}")?;
        }
    }
    for outcome in outcomes {
        write!(out, "{}", table::skipped(outcome))?;
        write!(out, "{}", table::logs(outcome))?;
        write!(out, "{}", table::trouble(outcome, usize::MAX))?;
    }
    if outcomes.len() > 1 {
        write!(out, "{}", table::never_hit(outcomes))?;
    }
    Ok(())
}
