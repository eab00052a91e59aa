//! The command line.

use crate::bench::{self, BenchArgs};
use crate::doctor::{self, DoctorArgs, DoctorPeerArgs};
use crate::exit::{CommandError, Exit};
use crate::router::{self, RouterArgs};
use crate::serve::{self, ServeArgs};
use crate::sidecar::{self, HostArgs};
use crate::stdout::StdoutGuard;
use crate::{export, lists, replay, run, sweep};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;

const AFTER: &str = "Exit codes: 0 everything held, 1 a check of doctor failed, 2 input invalid, 3 liveness, 4 correctness, \
    5 not deterministic, 6 panic or assertion; over several scenarios the worst one.";

#[derive(Debug, Parser)]
#[command(name = "kvferry", version, about = "KV cache transfer in a simulated world")]
#[command(after_help = AFTER)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run scenarios and show what came out
    Run(RunArgs),
    /// Run one scenario with many seeds
    Sweep(SweepArgs),
    /// Play a recording to the protocol again and compare
    Replay(ReplayArgs),
    /// Print what scenario files can say
    List(ListArgs),
    /// Route requests to prefill and decode instances
    Router(Box<RouterArgs>),
    /// Move the KV of a serving engine that runs beside it
    Host(Box<HostArgs>),
    /// Check what a deployment needs of this machine, and say what to do
    Doctor(Box<DoctorArgs>),
    /// A process that `doctor` starts
    #[command(hide = true)]
    DoctorPeer(DoctorPeerArgs),
    /// Measure bandwidth and latency of a data plane, within this host or between two
    Bench(Box<BenchArgs>),
    /// Write the last transfers of live servers as a trace that Perfetto opens
    Export(ExportArgs),
    /// Serve as a prefill or decode instance without a model
    Serve(Box<ServeArgs>),
}

/// Where scenarios are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RunFabricArg {
    Sim,
    Host,
    Mori,
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
    #[arg(long, default_value = "sim", conflicts_with_all = ["actors", "record"])]
    pub(crate) fabric: RunFabricArg,
}

/// A factor of bandwidths.
fn scale(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (1e-6..=1e6).contains(factor));
    factor.ok_or_else(|| "give a number from 0.000001 to 1000000".into())
}

/// Arguments of `sweep`.
#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// Scenario file
    pub(crate) file: PathBuf,
    /// Number of seeds
    #[arg(long, value_name = "N")]
    pub(crate) seeds: u64,
    /// First seed; drawn at random if not given, so that every sweep looks at other seeds
    #[arg(long, value_name = "N", default_value_t = rand::random_range(0..1 << 32),
        hide_default_value = true)]
    pub(crate) base: u64,
    /// Runs at a time; as many as there are cores if not given
    #[arg(long, value_name = "N")]
    pub(crate) jobs: Option<NonZeroUsize>,
    /// Print one JSON object per seed and line
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) budget: sweep::Budget,
}

/// Arguments of `replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// What `run --record` wrote
    pub(crate) recording: PathBuf,
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Which list
    pub(crate) what: lists::ListTopic,
    /// Where to look for scenarios
    #[arg(value_name = "DIR", default_value = "scenarios")]
    pub(crate) folder: PathBuf,
}

/// Arguments of `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Socket of the `kvferry host` of a server; several are put on one timeline
    #[arg(long, value_name = "SOCKET", required = true)]
    pub(crate) live: Vec<PathBuf>,
    /// File for the trace; standard output if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// Runs the program with its arguments, the first being its name; returns the exit code.
pub fn main(args: impl IntoIterator<Item = OsString>) -> u8 {
    #[cfg(feature = "planted")]
    kvferry_engine::planted::plant_from_environment();
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(why) => {
            // Nothing can be done about a closed terminal.
            let _ = why.print();
            return why.exit_code() as u8;
        }
    };
    let mut out = io::BufWriter::new(StdoutGuard::take());
    let ended = match cli.command {
        CliCommand::Run(args) => run::command(&args, &mut out).map(Exit::code),
        CliCommand::Sweep(args) => sweep::command(&args, &mut out).map(Exit::code),
        CliCommand::Replay(args) => replay::command(&args, &mut out).map(Exit::code),
        CliCommand::List(args) => lists::command(&args, &mut out).map(Exit::code),
        CliCommand::Router(args) => router::command(&args, &mut out).map(Exit::code),
        CliCommand::Host(args) => sidecar::command(&args).map(Exit::code),
        CliCommand::Doctor(args) => doctor::command(&args, &mut out),
        CliCommand::DoctorPeer(args) => doctor::peer_command(&args, &mut out).map(Exit::code),
        CliCommand::Bench(args) => bench::command(&args, &mut out).map(Exit::code),
        CliCommand::Export(args) => export::command(&args, &mut out).map(Exit::code),
        CliCommand::Serve(args) => serve::command(&args, &mut out).map(Exit::code),
    };
    let ended = ended.and_then(|code| Ok(out.flush().map(|()| code)?));
    match ended {
        Ok(code) => code,
        // Who reads the output has seen enough.
        Err(CommandError::Output(why)) if why.kind() == io::ErrorKind::BrokenPipe => {
            Exit::Held.code()
        }
        Err(why) => {
            print_error(&why.to_string());
            Exit::Invalid.code()
        }
    }
}

/// Tells the user on stderr what is wrong.
pub(crate) fn print_error(text: &str) {
    let _ = writeln!(io::stderr(), "error: {text}");
}
