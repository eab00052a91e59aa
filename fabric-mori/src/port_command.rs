//! The command that takes a network card's port down and up, for tests and `kvferry run --fabric mori`.

use std::ffi::OsString;
use std::process::{Command, Stdio};

/// Variable that names the command.
const PORT_COMMAND: &str = "KVFERRY_PORT_COMMAND";

/// Tells the command whose port it is, where processes have ports of their own: those over the
/// stand-in for MoRI do.
const PORT_PROCESS: &str = "KVFERRY_PORT_PROCESS";

/// A command line for `sh`, such as `ip link set eth1`, which is run with `down` or `up` behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortCommand(OsString);

impl PortCommand {
    /// The command that `KVFERRY_PORT_COMMAND` names, if it is set.
    #[must_use]
    pub fn of_environment() -> Option<PortCommand> {
        let line = std::env::var_os(PORT_COMMAND).filter(|line| !line.is_empty());
        line.map(PortCommand)
    }

    /// Runs the command to its end. `process` is the process that the port is to fail for; a card
    /// has one port for all.
    ///
    /// # Errors
    /// The command does not run, or ends with an error: the line and what it printed.
    pub fn set(&self, process: u32, up: bool) -> Result<(), String> {
        let mut line = self.0.clone();
        line.push(if up { " up" } else { " down" });
        let failed = |why: String| format!("{PORT_COMMAND}: `{}`: {why}", line.display());
        let mut command = Command::new("sh");
        command.arg("-c").arg(&line).env(PORT_PROCESS, process.to_string()).stdin(Stdio::null());
        let output = command.output().map_err(|why| failed(why.to_string()))?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr);
        Err(failed(format!("{}: {}", output.status, text.trim())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_run_with_the_state_and_the_process() {
        let command = |line: &str| PortCommand(line.into());
        let check = command("set -- x$KVFERRY_PORT_PROCESS; test $1 = x7 && test down =");
        assert_eq!(check.set(7, false), Ok(()));
        let why = check.set(7, true).expect_err("up is another word");
        assert!(why.contains("test down = up`: exit status: 1"), "{why}");
        let why = command("echo no such card >&2; exit 3;").set(7, false).expect_err("it fails");
        assert!(
            why.starts_with("KVFERRY_PORT_COMMAND: `") && why.ends_with("no such card"),
            "{why}"
        );
    }
}
