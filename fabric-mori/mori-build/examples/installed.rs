//! Says which MoRI is installed, for `./test --mori`; status 3 if nobody asked for one and none is
//! there.

// That is what it is for.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // Those that say where.
    let asked =
        kvferry_mori_build::WATCHED[..4].iter().any(|name| std::env::var_os(name).is_some());
    match kvferry_mori_build::search(&|name| std::env::var_os(name)) {
        Ok(found) => {
            println!("{found}");
            ExitCode::SUCCESS
        }
        Err(why) if !asked && why.is_nowhere() => {
            println!(
                "Skipped: no MoRI; MORI_HOME can name one, or MORI_PYTHON a Python that has it"
            );
            ExitCode::from(3)
        }
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}
