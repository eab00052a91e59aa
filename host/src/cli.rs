//! The command line.

use crate::bench::{self, BenchArgs};
use crate::doctor::{self, DoctorArgs, DoctorPeerArgs};
use crate::health::{self, HealthArgs};
use crate::process::{CommandError, Exit, StdoutGuard, exit_on_panic, print_error};
use crate::router::{self, RouterArgs};
use crate::secret::{self, SecretArgs};
#[cfg(feature = "simulator")]
use crate::serve::{self, ServeArgs};
use crate::sidecar::{self, ExportArgs, HostArgs};
#[cfg(feature = "simulator")]
use crate::simulator::{self, SimulatorCommand};
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::io::{self, Write};

const AFTER: &str = "Exit codes: 0 everything held, 1 a check of doctor or health failed, 2 input invalid, 3 liveness, 4 correctness, \
    5 not deterministic, 6 panic or assertion; over several scenarios the worst one.";

#[derive(Debug, Parser)]
#[command(
    name = "kvferry",
    version,
    about = "Moves the KV cache from prefill to decode servers of LLMs, and simulates that"
)]
#[command(after_help = AFTER)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    #[cfg(feature = "simulator")]
    #[command(flatten)]
    Simulator(SimulatorCommand),
    /// Route requests to prefill and decode instances
    Router(Box<RouterArgs>),
    /// Move the KV of a serving engine that runs beside it
    Host(Box<HostArgs>),
    /// Check what a deployment needs of this machine, and say what to do
    Doctor(Box<DoctorArgs>),
    /// A process that `doctor` starts
    #[command(hide = true)]
    DoctorPeer(DoctorPeerArgs),
    /// Ask a server once whether it is well, as health checks of containers do: exit code 0 or 1
    Health(HealthArgs),
    /// Make a secret for a fleet: print it, or write it into a file that nobody else can read
    Secret(SecretArgs),
    /// Measure bandwidth and latency of a data plane, within this host or between two
    Bench(Box<BenchArgs>),
    /// Write the last transfers of live servers as a trace that Perfetto opens, or a recording as a page
    Export(ExportArgs),
    /// Serve as a prefill or decode instance without a model
    #[cfg(feature = "simulator")]
    Serve(Box<ServeArgs>),
    #[cfg(not(feature = "simulator"))]
    #[command(flatten)]
    Absent(absent::AbsentCommand),
}

/// The commands that this build is without.
#[cfg(not(feature = "simulator"))]
mod absent {
    use crate::process::{CommandError, Exit};
    use clap::{Args, Subcommand};
    use std::ffi::OsString;

    #[derive(Debug, Subcommand)]
    #[command(hide = true)]
    pub(super) enum AbsentCommand {
        Run(AnyArgs),
        Sweep(AnyArgs),
        Replay(AnyArgs),
        Show(AnyArgs),
        Draw(AnyArgs),
        Shrink(AnyArgs),
        List(AnyArgs),
        Serve(AnyArgs),
    }

    /// Whatever the command is told where there is one.
    #[derive(Debug, Args)]
    #[command(hide = true, disable_help_flag = true)]
    pub(super) struct AnyArgs {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        _any: Vec<OsString>,
    }

    /// Names the build that has it.
    pub(super) fn command(command: &AbsentCommand) -> Result<Exit, CommandError> {
        let name = match command {
            AbsentCommand::Run(_) => "run",
            AbsentCommand::Sweep(_) => "sweep",
            AbsentCommand::Replay(_) => "replay",
            AbsentCommand::Show(_) => "show",
            AbsentCommand::Draw(_) => "draw",
            AbsentCommand::Shrink(_) => "shrink",
            AbsentCommand::List(_) => "list",
            AbsentCommand::Serve(_) => "serve",
        };
        Err(CommandError::Input(format!(
            "{name}: this kvferry was built without the simulator; use one that was built with its \
             default features (`cargo build -p kvferry`), which has it"
        )))
    }
}

/// The standard library's words for numbers that cannot be read, and what they mean.
const NUMBER_ERRORS: [(&str, &str); 4] = [
    ("invalid digit found in string", "not a whole number"),
    ("cannot parse integer from empty string", "not a whole number"),
    ("number too large to fit in target type", "larger than any number that is taken"),
    ("invalid float literal", "not a number"),
];

/// Prints what clap has to say of arguments: help, or what is wrong.
fn print_usage(why: &clap::Error) {
    let text = why.render().to_string();
    // Nothing can be done about a closed terminal.
    let _ = match NUMBER_ERRORS.iter().find(|(words, _)| text.contains(words)) {
        Some((words, meaning)) => write!(io::stderr(), "{}", text.replace(words, meaning)),
        None => why.print(),
    };
}

/// Runs the program with its arguments, the first being its name; returns the exit code.
pub fn main(args: impl IntoIterator<Item = OsString>) -> u8 {
    #[cfg(feature = "planted")]
    kvferry_engine::planted::plant_from_environment();
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(why) => {
            print_usage(&why);
            return why.exit_code() as u8;
        }
    };
    exit_on_panic();
    let mut out = io::BufWriter::new(StdoutGuard::take());
    let ended = match cli.command {
        #[cfg(feature = "simulator")]
        CliCommand::Simulator(command) => simulator::command(&command, &mut out),
        CliCommand::Router(args) => router::command(&args, &mut out),
        CliCommand::Host(args) => sidecar::command(&args),
        CliCommand::Doctor(args) => doctor::command(&args, &mut out),
        CliCommand::DoctorPeer(args) => doctor::peer_command(&args, &mut out),
        CliCommand::Health(args) => health::command(&args, &mut out),
        CliCommand::Secret(args) => secret::command(&args, &mut out),
        CliCommand::Bench(args) => bench::command(&args, &mut out),
        CliCommand::Export(args) => sidecar::export_command(&args, &mut out),
        #[cfg(feature = "simulator")]
        CliCommand::Serve(args) => serve::command(&args, &mut out),
        #[cfg(not(feature = "simulator"))]
        CliCommand::Absent(command) => absent::command(&command),
    };
    let ended = ended.and_then(|exit| Ok(out.flush().map(|()| exit)?));
    let exit = match ended {
        Ok(exit) => exit,
        // Who reads the output has seen enough.
        Err(CommandError::Output(why)) if why.kind() == io::ErrorKind::BrokenPipe => Exit::HELD,
        Err(why) => {
            print_error(&why.to_string());
            Exit::INVALID
        }
    };
    exit.0
}

#[cfg(all(test, not(feature = "simulator")))]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_not_in_the_build_names_the_build_that_has_it() {
        for args in [&["run", "scenarios", "--json"][..], &["serve", "--role", "decode"], &["list"]]
        {
            let cli = Cli::try_parse_from([&["kvferry"], args].concat());
            let CliCommand::Absent(command) = cli.expect("whatever it is told").command else {
                panic!("{args:?} is in the build")
            };
            let told = absent::command(&command).expect_err("it cannot").to_string();
            assert!(told.starts_with(args[0]) && told.contains("default features"), "{told}");
        }
    }
}
