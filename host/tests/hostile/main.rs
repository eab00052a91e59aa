//! What a stranger can do to the program from outside, played with real sockets and processes.

#[path = "../router/backend.rs"]
#[allow(dead_code, reason = "the tests of the router use the rest")]
mod backend;
#[path = "../router/certificates.rs"]
#[allow(dead_code, reason = "the tests of the router use the rest")]
mod certificates;
mod descriptors;
mod flood;
mod key;
mod legs;
mod loopback;
mod memory;
mod network;
mod outside_clients;
mod panics;
#[path = "../serve/process.rs"]
#[allow(dead_code, reason = "the tests of `serve` use the rest")]
mod process;
#[path = "../program/mod.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod program;
#[path = "../router/raw_instance.rs"]
#[allow(dead_code, reason = "the tests of the router use the rest")]
mod raw_instance;
#[path = "../router/rig.rs"]
#[allow(dead_code, reason = "the tests of the router use the rest")]
mod rig;
#[path = "../sidecar_process/mod.rs"]
#[allow(dead_code, reason = "the tests of hosts use the rest")]
mod sidecar_process;
#[path = "../embed/rig.rs"]
#[allow(dead_code, unused_imports, reason = "the tests of hosts use the rest")]
mod sidecar_rig;
mod signed;
mod socket_folder;
mod tls;

use std::process::{Command, Stdio};

/// The same command with at most so many open files; where `hard` is false it may raise that.
pub(crate) fn limit_files(command: &mut Command, files: u32, hard: bool) {
    let kind = if hard { "" } else { "-S" };
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit {kind} -n {files} && exec \"$0\" \"$@\"")]);
    limited.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    *command = limited;
}
