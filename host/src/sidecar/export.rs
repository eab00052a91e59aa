//! `kvferry export`: the last transfers of live hosts, in the format of Chrome's traces, which
//! Perfetto opens.

use crate::process::{CommandError, Exit, Overwrite};
use crate::sidecar::SidecarClient;
use crate::sidecar::proto::{ClientIdentity, FromHost, VERSION};
use crate::sidecar::record::{TransferOutcome, TransferRecord, TransferTrace};
use clap::Args;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use serde_json::{Value, json};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a host.
const PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Socket of the `kvferry host` of a server; several are put on one timeline
    #[cfg_attr(feature = "simulator", arg(required_unless_present = "recording"))]
    #[cfg_attr(not(feature = "simulator"), arg(required = true))]
    #[arg(long, value_name = "SOCKET")]
    pub(crate) live: Vec<PathBuf>,
    /// File for the trace; standard output if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// In place of live servers: what `kvferry run --record` wrote, for --html
    #[cfg(feature = "simulator")]
    #[arg(requires = "html", conflicts_with_all = ["live", "out"])]
    pub(crate) recording: Option<PathBuf>,
    /// File for a page of the recording: an overview of its requests, and all messages in sequence
    #[cfg(feature = "simulator")]
    #[arg(long, value_name = "FILE", requires = "recording")]
    pub(crate) html: Option<PathBuf>,
    /// The time at which the page opens, such as 12.5ms; without it it begins with the overview
    #[cfg(feature = "simulator")]
    #[arg(long, value_name = "TIME", requires = "html", value_parser = crate::simulator::time)]
    pub(crate) at: Option<Nanos>,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
}

/// Writes the transfers of all hosts that were named.
pub(crate) fn command(args: &ExportArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    #[cfg(feature = "simulator")]
    if let (Some(recording), Some(html)) = (&args.recording, &args.html) {
        return crate::simulator::export_page(recording, html, args.at, args.overwrite, out);
    }
    if let Some(path) = &args.out {
        args.overwrite.check("--out", path)?;
    }
    let traces = args.live.iter().map(|path| {
        let fail = |why| CommandError::Input(format!("--live {}: {why}", path.display()));
        fetch(path).map_err(fail)
    });
    let traces = traces.collect::<Result<Vec<_>, CommandError>>()?;
    let file = chrome(&traces);
    let Some(path) = &args.out else {
        serde_json::to_writer(&mut *out, &file).map_err(|why| CommandError::Output(why.into()))?;
        writeln!(out)?;
        return Ok(Exit::HELD);
    };
    args.overwrite.write("--out", path, file.to_string())?;
    let transfers: usize = traces.iter().map(|trace| trace.records.len()).sum();
    let path = path.display();
    writeln!(out, "{transfers} transfers in {path}; https://ui.perfetto.dev opens it")?;
    Ok(Exit::HELD)
}

/// Asks a host for its last transfers.
fn fetch(path: &Path) -> Result<TransferTrace, String> {
    let mut link =
        SidecarClient::connect(path, ClientIdentity::Observer).map_err(|why| match why.kind() {
            ErrorKind::NotFound => {
                "there is no socket; give the one that the log of the server names after \
             \"waiting for an engine\", while the server runs"
                    .into()
            }
            ErrorKind::ConnectionRefused => {
                "nobody listens there; give the socket of a `kvferry host` that runs".into()
            }
            _ => format!("cannot connect: {why}; run it as the user of the server"),
        })?;
    let mut heard = Vec::new();
    let other = format!("no `kvferry host` of this version ({VERSION} of its messages)");
    link.wait(PATIENCE, &mut heard).map_err(|why| match why.kind() {
        ErrorKind::TimedOut => format!("silent for {} s: {other}", PATIENCE.as_secs()),
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            format!("closed without an answer: {other}; use the kvferry of the server")
        }
        _ => format!("{other} answers: {why}; use the kvferry of the server"),
    })?;
    match heard.into_iter().next() {
        Some(FromHost::Trace(trace)) => Ok(*trace),
        Some(FromHost::Refused { why }) => Err(why),
        _ => Err(format!("{other} answers")),
    }
}

/// Traces as one: a process per engine; times in microseconds since the start of the host that
/// started first.
fn chrome(traces: &[TransferTrace]) -> Value {
    let first = traces.iter().map(|trace| trace.started_unix_us).min().unwrap_or(0);
    let mut events = Vec::new();
    for (process, trace) in (1..).zip(traces) {
        let late = Nanos::from_us(trace.started_unix_us - first);
        EngineTrace { process, late, trace, role: trace.engine.as_ref().map(|(_, role, _)| *role) }
            .write(&mut events);
    }
    json!({
        "displayTimeUnit": "ms",
        "otherData": { "started_unix_us": first, "version": env!("CARGO_PKG_VERSION") },
        "traceEvents": events,
    })
}

/// The events of one engine.
struct EngineTrace<'a> {
    process: u32,
    /// How much later than the first host its host started.
    late: Nanos,
    trace: &'a TransferTrace,
    role: Option<Role>,
}

impl EngineTrace<'_> {
    fn write(&self, events: &mut Vec<Value>) {
        let name = match &self.trace.engine {
            Some((name, role, mode)) => format!("{role} {name} ({mode})"),
            None => "no engine yet".into(),
        };
        events.push(self.name("process_name", 0, &name));
        // When each lane is free: what overlaps is not shown in one.
        let mut lanes: Vec<Nanos> = Vec::new();
        for record in &self.trace.records {
            let free = lanes.iter().position(|free| *free <= record.arrived);
            let lane = free.unwrap_or(lanes.len());
            if lane == lanes.len() {
                lanes.push(Nanos::ZERO);
                events.push(self.name("thread_name", lane, &format!("transfers {lane}")));
            }
            lanes[lane] = self.transfer(record, lane, events);
        }
    }

    fn name(&self, what: &str, lane: usize, name: &str) -> Value {
        let args = json!({ "name": name });
        json!({ "ph": "M", "name": what, "pid": self.process, "tid": lane, "args": args })
    }

    /// Writes what is known of a transfer; when its lane is free again.
    fn transfer(&self, record: &TransferRecord, lane: usize, events: &mut Vec<Value>) -> Nanos {
        let end = record.ended.as_ref().map_or(self.trace.now, |(at, _)| *at).max(record.arrived);
        let args = args(record);
        let mut slice = |name: &str, from: Nanos, to: Nanos| {
            events.push(json!({
                "ph": "X", "cat": "kvferry", "name": name, "pid": self.process, "tid": lane,
                "ts": self.us(from), "dur": us(to - from), "args": args,
            }));
        };
        match (record.begun, record.finished) {
            (Some(begun), _) => {
                slice("queued", record.arrived, begun);
                slice("transfer", begun, record.moved.unwrap_or(end));
            }
            // What is read is not seen: its blocks are held for it.
            (None, Some(finished)) if self.role == Some(Role::Prefill) => {
                slice("compute", record.arrived, finished);
                slice("held", finished, end);
            }
            (None, _) => slice("queued", record.arrived, end),
        }
        if let Some((at, TransferOutcome::Failed { cause, .. })) = &record.ended {
            events.push(json!({
                "ph": "i", "s": "t", "cat": "kvferry", "name": format!("failed: {cause}"),
                "pid": self.process, "tid": lane, "ts": self.us(*at), "args": args,
            }));
        }
        end
    }

    fn us(&self, at: Nanos) -> f64 {
        us(self.late + at)
    }
}

fn us(span: Nanos) -> f64 {
    span.0 as f64 / 1e3
}

fn args(record: &TransferRecord) -> Value {
    let (outcome, why) = match &record.ended {
        None => ("open", None),
        Some((_, TransferOutcome::Failed { why, .. })) => ("failed", Some(why)),
        Some((_, outcome)) => (outcome.name(), None),
    };
    json!({
        "request": record.request,
        "transfer": record.transfer.as_ref().map(ToString::to_string),
        "peer": record.peer,
        "outcome": outcome,
        "why": why,
        "tokens": record.tokens,
        "computed": record.computed,
        "blocks": record.blocks,
        "bytes": record.bytes,
    })
}
