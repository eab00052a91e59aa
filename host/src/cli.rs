//! The command line.

#[cfg(feature = "full")]
use crate::bench::{self, BenchArgs};
#[cfg(feature = "full")]
use crate::doctor::{self, DoctorArgs, DoctorPeerArgs};
#[cfg(feature = "full")]
use crate::health::{self, HealthArgs};
use crate::process::{CommandError, Exit, StdoutGuard, exit_on_panic, print_error};
#[cfg(feature = "full")]
use crate::router::{self, RouterArgs};
#[cfg(feature = "full")]
use crate::secret::{self, SecretArgs};
#[cfg(all(feature = "full", feature = "simulator"))]
use crate::serve::{self, ServeArgs};
#[cfg(feature = "full")]
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
    #[cfg(feature = "full")]
    #[command(flatten)]
    Full(FullCommand),
    #[cfg(not(all(feature = "full", feature = "simulator")))]
    #[command(flatten)]
    Absent(absent::AbsentCommand),
}

/// The commands of the feature `full`.
#[cfg(feature = "full")]
#[derive(Debug, Subcommand)]
enum FullCommand {
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
}

/// The commands that this build is without.
#[cfg(not(all(feature = "full", feature = "simulator")))]
mod absent {
    use crate::process::{CommandError, Exit, without};
    use clap::{Args, Subcommand};
    use std::ffi::OsString;

    /// Declares the commands by the features that have them.
    macro_rules! absent {
        ($($absent:meta, $feature:literal: $($name:literal $command:ident),*;)*) => {
            #[derive(Debug, Subcommand)]
            #[command(hide = true)]
            pub(super) enum AbsentCommand {
                $($(
                    #[cfg($absent)]
                    $command(AnyArgs),
                )*)*
            }

            /// Names the build that has the command.
            pub(super) fn command(command: &AbsentCommand) -> Result<Exit, CommandError> {
                let (name, feature) = match command {
                    $($(
                        #[cfg($absent)]
                        AbsentCommand::$command(_) => ($name, $feature),
                    )*)*
                };
                Err(without(name, feature))
            }
        };
    }

    absent! {
        not(feature = "simulator"), "simulator":
            "run" Run, "sweep" Sweep, "replay" Replay, "show" Show, "draw" Draw, "shrink" Shrink, "list" List;
        not(feature = "full"), "full":
            "router" Router, "host" Host, "doctor" Doctor, "health" Health, "secret" Secret, "bench" Bench,
            "export" Export, "serve" Serve;
        all(feature = "full", not(feature = "simulator")), "simulator": "serve" Serve;
    }

    /// Whatever the command is told where there is one.
    #[derive(Debug, Args)]
    #[command(hide = true, disable_help_flag = true)]
    pub(super) struct AnyArgs {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        _any: Vec<OsString>,
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
        #[cfg(feature = "full")]
        CliCommand::Full(command) => full(&command, &mut out),
        #[cfg(not(all(feature = "full", feature = "simulator")))]
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

/// Does what a command of the feature `full` is told.
#[cfg(feature = "full")]
fn full(command: &FullCommand, out: &mut dyn Write) -> Result<Exit, CommandError> {
    match command {
        FullCommand::Router(args) => router::command(args, out),
        FullCommand::Host(args) => sidecar::command(args),
        FullCommand::Doctor(args) => doctor::command(args, out),
        FullCommand::DoctorPeer(args) => doctor::peer_command(args, out),
        FullCommand::Health(args) => health::command(args, out),
        FullCommand::Secret(args) => secret::command(args, out),
        FullCommand::Bench(args) => bench::command(args, out),
        FullCommand::Export(args) => sidecar::export_command(args, out),
        #[cfg(feature = "simulator")]
        FullCommand::Serve(args) => serve::command(args, out),
    }
}

#[cfg(all(test, not(all(feature = "full", feature = "simulator"))))]
mod tests {
    use super::*;

    fn told(args: &[&str]) -> String {
        let cli = Cli::try_parse_from([&["kvferry"], args].concat());
        let CliCommand::Absent(command) = cli.expect("whatever it is told").command else {
            panic!("{args:?} is in the build")
        };
        let told = absent::command(&command).expect_err("it cannot").to_string();
        assert!(told.starts_with(args[0]), "{told}");
        told
    }

    #[cfg(not(feature = "simulator"))]
    #[test]
    fn a_command_of_the_simulator_names_the_build_that_has_it() {
        for args in [&["run", "scenarios", "--json"][..], &["list"]] {
            assert!(told(args).contains("without its feature `simulator`"));
        }
    }

    #[cfg(not(feature = "full"))]
    #[test]
    fn a_command_that_moves_bytes_names_the_build_that_has_it() {
        for args in [&["router", "--listen", "0.0.0.0:8000"][..], &["serve", "--role", "decode"]] {
            assert!(told(args).contains("--features full"));
        }
    }
}
