//! `run`: scenarios one after another.

use crate::attempt::{Again, Setup, quiet_panics};
use crate::cli::{Fabric, RunArgs, complain};
use crate::exit::{Exit, Stop};
use crate::files::{Source, find};
use crate::fleet::Job;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::serve::FabricArg;
use crate::table;
use engine::core::Nanos;
use fabric_sim::world::Recording;
use std::io::Write;
use std::path::Path;

/// Seed of scenarios that leave it open.
pub(crate) const SEED: u64 = 1;

/// Runs what is named and prints what came out.
///
/// # Errors
/// Nothing to run, or a result that cannot be written. A scenario that cannot be used is told on
/// stderr, and the others are run.
pub(crate) fn command(args: &RunArgs, out: &mut dyn Write) -> Result<Exit, Stop> {
    let sources = find(&args.paths)?;
    if args.record.is_some() && sources.len() != 1 {
        let text = format!("--record keeps one run, but there are {} scenarios", sources.len());
        return Err(Stop::Input(format!("{text}; name one file")));
    }
    quiet_panics();
    let mut worst = Exit::Held;
    let mut outcomes = Vec::new();
    let progress = Progress::new(sources.len() as u64);
    for (done, source) in sources.iter().enumerate() {
        progress.set(done as u64);
        progress.say(source.name());
        let mut watch = |now: Nanos, last: Nanos| progress.set_part(done as u64, now.0, last.0);
        match one(args, source, &mut watch) {
            Ok(outcome) => {
                worst = worst.max(outcome.exit);
                if args.json {
                    progress.pause(|| {
                        writeln!(out, "{}", outcome.json())?;
                        out.flush()
                    })?;
                }
                outcomes.push(outcome);
            }
            Err(Stop::Input(text)) => {
                worst = worst.max(Exit::Invalid);
                progress.pause(|| {
                    complain(&text);
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
    source: &Source,
    watch: &mut dyn FnMut(Nanos, Nanos),
) -> Result<Outcome, Stop> {
    let setup = Setup {
        source: source.clone(),
        trace: args.workload_trace.clone(),
        actors: args.actors,
        record: args.record.is_some(),
    };
    let scenario = setup.load()?;
    let seed = args.seed.or(scenario.seed()).unwrap_or(SEED);
    let processes = match args.fabric {
        Fabric::Sim => None,
        Fabric::Host => Some(FabricArg::Host),
        Fabric::Mori => Some(FabricArg::Mori),
    };
    if let Some(fabric) = processes {
        let trace = args.workload_trace.as_deref();
        return Job { source, scenario: &scenario, seed, trace, fabric }.run();
    }
    let again = if args.actors { Again::Always } else { Again::IfCheap };
    let (outcome, recording) = setup.attempt(&scenario, seed, again, watch)?;
    if let (Some(path), Some(recording)) = (&args.record, recording) {
        keep(path, &recording)?;
    }
    Ok(outcome)
}

fn keep(path: &Path, recording: &Recording) -> Result<(), Stop> {
    std::fs::write(path, &recording.0).map_err(|why| {
        let text = format!("{}: cannot write the recording: {why}", path.display());
        Stop::Input(format!("{text}; name a file that can be written"))
    })
}

fn print(outcomes: &[Outcome], out: &mut dyn Write) -> Result<(), Stop> {
    match outcomes {
        [] => {}
        [outcome] => writeln!(out, "{}", table::one(outcome))?,
        outcomes => {
            writeln!(out, "{}", table::many(outcomes))?;
            let held = outcomes.iter().filter(|outcome| outcome.exit == Exit::Held).count();
            writeln!(out, "{held} of {} scenarios came out as expected", outcomes.len())?;
        }
    }
    for outcome in outcomes {
        write!(out, "{}", table::skipped(outcome))?;
        write!(out, "{}", table::trouble(outcome, usize::MAX))?;
    }
    Ok(())
}
