//! The kvferry command line.

use std::process::ExitCode;

/// The router allocates for every request; with glibc's allocator that is a sixth of its time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ExitCode::from(kvferry::main(std::env::args_os()))
}
