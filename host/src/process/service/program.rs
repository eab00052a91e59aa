//! How this program starts processes of itself.

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;
use std::{env, io};

static INTERPRETER: OnceLock<Vec<OsString>> = OnceLock::new();

/// Names the interpreter that runs this program, and what it is told before the program's own
/// arguments: the binary of the process is not `kvferry` then. To be called before
/// [`crate::main`]; the first call counts.
pub fn interpreted_by(command: impl IntoIterator<Item = OsString>) {
    let _ = INTERPRETER.set(command.into_iter().collect());
}

/// Starts this program again, given its arguments.
///
/// # Errors
/// The path of its binary is not known.
pub(crate) fn this_program() -> io::Result<Command> {
    let interpreter = INTERPRETER.get().and_then(|command| command.split_first());
    let Some((interpreter, before)) = interpreter else {
        return env::current_exe().map(Command::new);
    };
    let mut command = Command::new(interpreter);
    command.args(before);
    Ok(command)
}
