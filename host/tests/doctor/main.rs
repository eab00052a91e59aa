//! `kvferry doctor`: of this machine, over MoRI's stand-in, and between two machines.

mod machine;
mod mori;
mod pair;

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// `kvferry doctor` with these arguments.
fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["doctor", "--json"]).args(args);
    command
}

/// The exit code, and the checks by line.
fn doctor(mut command: Command) -> (i32, Vec<Value>) {
    let output = command.output().expect("the program starts");
    let text = String::from_utf8(output.stdout).expect("output is UTF-8");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("an object per line"));
    (output.status.code().expect("it ends by itself"), lines.collect())
}

fn check<'a>(checks: &'a [Value], name: &str) -> &'a Value {
    checks.iter().find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name}"))
}

/// Checks that one has this status, and says this.
fn expect(checks: &[Value], name: &str, status: &str, found: &str, remedy: Option<&str>) {
    let check = check(checks, name);
    assert_eq!(check["status"], status, "{check}");
    let says = |key: &str, text: &str| check[key].as_str().is_some_and(|said| said.contains(text));
    assert!(says("found", found), "{found}: {check}");
    match remedy {
        Some(remedy) => assert!(says("remedy", remedy), "{remedy}: {check}"),
        None => assert!(check["remedy"].is_null(), "{check}"),
    }
}

/// A doctor that waits for the one of another machine; killed with the test.
struct WaitingDoctor {
    child: Child,
    address: String,
    /// Line that it prints while it waits.
    notes: Receiver<String>,
}

impl WaitingDoctor {
    /// One that has `--serve` among its arguments.
    fn start(mut command: Command) -> WaitingDoctor {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        let mut err = BufReader::new(child.stderr.take().expect("a pipe"));
        err.read_line(&mut line).expect("a pipe can be read");
        // Its further output is read on, so that it does not block.
        let (sender, notes) = channel();
        std::thread::spawn(move || {
            let lines = err.lines().map_while(Result::ok);
            lines.for_each(|line| drop(sender.send(line)));
        });
        let address = line.split_once("--peer ").and_then(|(_, rest)| rest.split_once('`'));
        let address = address.unwrap_or_else(|| panic!("{line:?}")).0.into();
        WaitingDoctor { child, address, notes }
    }

    /// What it found, when it has ended.
    fn end(mut self) -> Vec<Value> {
        let out = BufReader::new(self.child.stdout.take().expect("a pipe"));
        let line = |line: Result<String, _>| line.expect("a pipe can be read");
        out.lines().map(|text| serde_json::from_str(&line(text)).expect("an object")).collect()
    }
}

impl Drop for WaitingDoctor {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
