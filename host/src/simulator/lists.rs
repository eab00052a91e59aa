//! `list`: the closed lists of the scenario language, and scenario files.

use crate::process::{CommandError, print_error};
use crate::simulator::scenario_files::{ScenarioSource, find};
use crate::simulator::table::columns;
use clap::{Args, ValueEnum};
use kvferry_scenarios::{FaultKind, InvariantId, MessageName, TriggerEvent};
use kvferry_sim::world::RunVerdict;
use std::io::Write;
use std::path::PathBuf;

/// What can be listed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ListTopic {
    /// Scenario files and what they show
    Scenarios,
    /// Kinds of `[[fault]]`
    Faults,
    /// What a fault can wait for with `on`
    Events,
    /// Control messages for `match`
    Messages,
    /// What `[expect] hold` can name
    Invariants,
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Which list
    pub(crate) what: ListTopic,
    /// Where to look for scenarios
    #[arg(value_name = "DIR", default_value = "scenarios")]
    pub(crate) folder: PathBuf,
}

/// Prints a list.
///
/// # Errors
/// A folder without scenarios, or output that cannot be written.
pub(crate) fn command(args: &ListArgs, out: &mut dyn Write) -> Result<RunVerdict, CommandError> {
    let mut exit = RunVerdict::Held;
    let rows: Vec<Vec<String>> = match args.what {
        ListTopic::Scenarios => scenarios(args, &mut exit)?,
        ListTopic::Faults => entries(FaultKind::ALL, |it| [it.id(), it.name(), it.about()]),
        ListTopic::Events => entries(TriggerEvent::ALL, |it| [it.name(), it.about()]),
        ListTopic::Messages => entries(MessageName::ALL, |it| [it.name(), it.about()]),
        ListTopic::Invariants => entries(InvariantId::ALL, |it| [it.id(), it.name(), it.about()]),
    };
    writeln!(out, "{}", columns(&rows, usize::MAX))?;
    Ok(exit)
}

fn entries<T: Copy, const N: usize>(
    all: &[T],
    row: impl Fn(T) -> [&'static str; N],
) -> Vec<Vec<String>> {
    all.iter().map(|entry| row(*entry).map(String::from).to_vec()).collect()
}

/// The bundled scenario, and the files of the folder; without one, the bundled scenario alone.
fn scenarios(args: &ListArgs, exit: &mut RunVerdict) -> Result<Vec<Vec<String>>, CommandError> {
    let mut sources = vec![ScenarioSource::Bundled];
    if args.folder.is_dir() {
        sources.extend(find(std::slice::from_ref(&args.folder))?);
    } else if args.folder.as_os_str() != "scenarios" {
        let text = format!("{}: not a directory; name one with scenarios", args.folder.display());
        return Err(CommandError::Input(text));
    }
    let mut rows = Vec::new();
    for source in sources {
        match source.load(None) {
            Ok(scenario) => rows.push(vec![scenario.name().into(), scenario.about().into()]),
            Err(why) => {
                print_error(&why.to_string());
                *exit = RunVerdict::Invalid;
            }
        }
    }
    Ok(rows)
}
