//! `run`: scenarios one after another.

use crate::cli::{RunArgs, RunFabricArg, print_error};
use crate::exit::{CommandError, Exit};
use crate::local_cluster::ClusterRun;
use crate::outcome::RunOutcome;
use crate::progress::CliProgress;
use crate::scenario_files::{ScenarioSource, find};
use crate::seed_run::{RerunPolicy, RunSetup, quiet_panics};
use crate::serve::FabricArg;
use crate::table;
use kvferry_engine::core::Nanos;
use kvferry_sim::world::Recording;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

/// Runs what is named and prints what came out.
///
/// # Errors
/// Nothing to run, or a result that cannot be written. A scenario that cannot be used is told on
/// stderr, and the others are run.
pub(crate) fn command(args: &RunArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let sources = find(&args.paths)?;
    if args.record.is_some() && sources.len() != 1 {
        let text = format!("--record keeps one run, but there are {} scenarios", sources.len());
        return Err(CommandError::Input(format!("{text}; name one file")));
    }
    quiet_panics();
    let mut worst = Exit::Held;
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
                worst = worst.max(Exit::Invalid);
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
    let setup = RunSetup {
        source: source.clone(),
        trace: args.workload_trace.clone(),
        link_scale: args.link_scale,
        actors: args.actors,
        record: args.record.is_some(),
    };
    let scenario = setup.load()?;
    let first = scenario.seeds().next();
    let seeds: Vec<u64> = match args.seed.or(first.filter(|_| args.record.is_some())) {
        Some(seed) => vec![seed],
        None => scenario.seeds().collect(),
    };
    let processes = match args.fabric {
        RunFabricArg::Sim => None,
        RunFabricArg::Host => Some(FabricArg::Host),
        RunFabricArg::Mori => Some(FabricArg::Mori),
    };
    if let Some(fabric) = processes {
        let trace = args.workload_trace.as_deref();
        let seed = seeds[0];
        return Ok(vec![ClusterRun { source, scenario: &scenario, seed, trace, fabric }.run()?]);
    }
    let again = if args.actors { RerunPolicy::Always } else { RerunPolicy::IfCheap };
    let mut outcomes = Vec::with_capacity(seeds.len());
    for seed in seeds {
        let (outcome, recording) = setup.run_seed(&scenario, seed, again, watch)?;
        if let (Some(path), Some(recording)) = (&args.record, recording) {
            keep(path, &recording)?;
        }
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

fn keep(path: &Path, recording: &Recording) -> Result<(), CommandError> {
    std::fs::write(path, &recording.0).map_err(|why| {
        let text = format!("{}: cannot write the recording: {why}", path.display());
        CommandError::Input(format!("{text}; name a file that can be written"))
    })
}

/// Of each scenario the first run, and all that did not come out as expected.
fn shown(outcomes: &[RunOutcome]) -> Vec<RunOutcome> {
    let mut names = BTreeSet::new();
    let mut shown = Vec::new();
    for one in outcomes {
        if names.insert(&one.scenario) || one.exit != Exit::Held {
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
            let failed = outcomes.iter().filter(|outcome| outcome.exit != Exit::Held);
            let failed: BTreeSet<&str> = failed.map(|one| one.scenario.as_str()).collect();
            let (held, all, runs) = (names.len() - failed.len(), names.len(), outcomes.len());
            let runs = if runs > all { format!(", {runs} runs") } else { String::new() };
            writeln!(out, "{held} of {all} scenarios came out as expected{runs}")?;
        }
    }
    for outcome in outcomes {
        write!(out, "{}", table::skipped(outcome))?;
        if outcomes.len() > 1 {
            write!(out, "{}", table::never_hit(outcome))?;
        }
        write!(out, "{}", table::trouble(outcome, usize::MAX))?;
    }
    Ok(())
}
