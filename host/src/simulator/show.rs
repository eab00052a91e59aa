//! `show`: what a recording says, as text.

use crate::process::CommandError;
use crate::simulator::recording_file;
use crate::simulator::table::{columns, grouped};
use crate::simulator::timeline::{EventKind, Timeline, TimelineEvent, read};
use clap::Args;
use kvferry_engine::core::Nanos;
use kvferry_faults::value::ScenarioValue;
use kvferry_sim::world::RunVerdict;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// What `run --record` wrote
    pub(crate) recording: PathBuf,
    /// The time to look at, such as 12.5ms; without it and --transfer what is in the recording
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) at: Option<Nanos>,
    /// How far before and after that time
    #[arg(long, value_name = "SPAN", default_value = "1ms", value_parser = time, requires = "at")]
    pub(crate) around: Nanos,
    /// Only what is of this transfer, ID/PROMPT or ID
    #[arg(long, value_name = "TRANSFER")]
    pub(crate) transfer: Option<String>,
    /// Deadlines, acknowledgements, heartbeats and changes of blocks, too
    #[arg(long)]
    pub(crate) all: bool,
    /// Print what is known of each event
    #[arg(long)]
    pub(crate) detail: bool,
    /// Most events to print
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub(crate) most: usize,
}

/// A time of an argument.
pub(crate) fn time(text: &str) -> Result<Nanos, String> {
    Nanos::parse(text).ok_or_else(|| format!("write {}", Nanos::form()))
}

/// Prints what was asked for.
///
/// # Errors
/// A file that is no recording, a transfer that it does not have, or output that cannot be written.
pub(crate) fn command(args: &ShowArgs, out: &mut dyn Write) -> Result<RunVerdict, CommandError> {
    let name = args.recording.display();
    let recording = recording_file(&args.recording)?;
    let timeline = read(&recording).map_err(|why| CommandError::Input(format!("{name}: {why}")))?;
    if args.at.is_none() && args.transfer.is_none() {
        return overview(&timeline, args, out).map(|()| RunVerdict::Held);
    }
    let transfers = match &args.transfer {
        Some(text) => Some(named(&timeline, text, args)?),
        None => None,
    };
    let span =
        args.at.map(|at| at.0.saturating_sub(args.around.0)..=at.0.saturating_add(args.around.0));
    let wanted = |event: &&TimelineEvent| {
        let near = span.as_ref().is_none_or(|span| span.contains(&event.at.0));
        let own = transfers.as_ref().is_none_or(|transfers| {
            event.transfers.iter().any(|transfer| transfers.contains(transfer))
        });
        near && own && (args.all || !event.is_minor)
    };
    let found: Vec<_> = timeline.events.iter().filter(wanted).collect();
    if found.is_empty() {
        writeln!(out, "nothing: {}", remedy(&timeline, args))?;
        return Ok(RunVerdict::Held);
    }
    print(&timeline, &found, args, out)?;
    Ok(RunVerdict::Held)
}

/// What to ask for when there is nothing to show.
fn remedy(timeline: &Timeline, args: &ShowArgs) -> String {
    let end = timeline.events.last().map_or(Nanos::ZERO, |event| event.at);
    let all = if args.all { "" } else { ", or --all" };
    format!("the run ends at {end}; give another --at, a longer --around{all}")
}

/// The transfers that a name means.
fn named(timeline: &Timeline, text: &str, args: &ShowArgs) -> Result<Vec<u32>, CommandError> {
    let is_meant =
        |key: &str| key == text || key.rsplit_once('/').is_some_and(|(id, _)| id == text);
    let keys = (0..).zip(&timeline.transfers);
    let found: Vec<u32> = keys.filter(|(_, key)| is_meant(key)).map(|(at, _)| at).collect();
    if found.is_empty() {
        let name = args.recording.display();
        return Err(CommandError::Input(format!(
            "--transfer {text}: {name} has no such transfer; `kvferry show {name}` lists them"
        )));
    }
    Ok(found)
}

/// What an event says, in a row.
fn row(timeline: &Timeline, event: &TimelineEvent, with_detail: bool) -> Vec<String> {
    let lane = event.lane.map_or("", |lane| timeline.name(lane));
    let what = match (event.kind, event.to, event.from) {
        (EventKind::Fault, Some(to), _) => {
            format!("fault {} (to {})", event.label, timeline.name(to))
        }
        (EventKind::Fault, ..) => format!("fault {}", event.label),
        (EventKind::Violation, ..) => format!("violation {}: {}", event.label, event.detail),
        (_, Some(to), _) if event.is_lost => {
            format!("{} to {}, never arrives", event.label, timeline.name(to))
        }
        (_, Some(to), _) => format!("{} to {}", event.label, timeline.name(to)),
        (_, _, Some(from)) => format!("{} from {}", event.label, timeline.name(from)),
        _ => event.label.clone(),
    };
    let keys: Vec<_> =
        event.transfers.iter().map(|at| timeline.transfers[*at as usize].as_str()).collect();
    let mut row = vec![format!("{:.6} ms", event.at.0 as f64 / 1e6), lane.into(), what];
    row.push(keys.join(" "));
    if with_detail && event.kind != EventKind::Violation {
        row.push(event.detail.clone());
    }
    row
}

fn print(
    timeline: &Timeline,
    events: &[&TimelineEvent],
    args: &ShowArgs,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let shown = &events[..events.len().min(args.most)];
    let rows: Vec<_> = shown.iter().map(|event| row(timeline, event, args.detail)).collect();
    writeln!(out, "{}", columns(&rows, usize::MAX))?;
    if let Some(more) = events.len().checked_sub(shown.len()).filter(|more| *more > 0) {
        let more = grouped(more as u64);
        writeln!(out, "and {more} more; ask for less time, or for more with --most")?;
    }
    Ok(())
}

/// What there is in a recording, and where to look.
fn overview(timeline: &Timeline, args: &ShowArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let end = timeline.events.last().map_or(Nanos::ZERO, |event| event.at);
    let (scenario, seed) = (&timeline.scenario, timeline.seed);
    let verdict = timeline.verdict.as_deref().unwrap_or("without an end");
    let (events, transfers) = (timeline.events.len() as u64, timeline.transfers.len() as u64);
    let (events, transfers) = (grouped(events), grouped(transfers));
    writeln!(
        out,
        "{scenario} seed {seed}: {verdict}, {events} events in {end}, {transfers} transfers"
    )?;
    let told = [EventKind::Fault, EventKind::Violation, EventKind::Phase];
    let is_told = |event: &&TimelineEvent| told.contains(&event.kind);
    let found: Vec<_> = timeline.events.iter().filter(is_told).collect();
    if !found.is_empty() {
        print(timeline, &found, args, out)?;
    }
    let keys = timeline.transfers.iter().take(args.most);
    writeln!(out, "transfers: {}", keys.cloned().collect::<Vec<_>>().join(" "))?;
    let name = args.recording.display();
    writeln!(out, "`kvferry show {name} --at TIME` or `--transfer ID` shows what happened")?;
    Ok(())
}
