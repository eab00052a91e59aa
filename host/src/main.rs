//! The kvferry command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(kvferry::main(std::env::args_os()))
}
