//! Instances as processes, and HTTP to them.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process that ends with the test.
pub(crate) struct ServeProcess {
    pub(crate) child: Child,
    /// What it said when it was ready.
    pub(crate) ready: Value,
}

impl ServeProcess {
    /// Starts `kvferry serve` and waits until it serves.
    pub(crate) fn serve(args: &[&str]) -> ServeProcess {
        ServeProcess::run("serve", args)
    }

    /// The same with another command that says in a line of JSON that it is ready.
    pub(crate) fn run(command: &str, args: &[&str]) -> ServeProcess {
        ServeProcess::run_in(&[], command, args)
    }

    /// The same in an environment with these variables.
    pub(crate) fn run_in(variables: &[(&str, &str)], command: &str, args: &[&str]) -> ServeProcess {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .arg(command)
            .args(args)
            .envs(variables.iter().copied())
            // For those over MoRI: its stand-in.
            .env("KVFERRY_MORI_SHIM", mori_double::INSTALLS[1].shim)
            .env("KVFERRY_MORI_WITHOUT_DEVICES", "1")
            .args(["--log-level", "error"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut line = String::new();
        let out = child.stdout.take().expect("a pipe");
        BufReader::new(out).read_line(&mut line).expect("a pipe can be read");
        let ready = serde_json::from_str(&line).unwrap_or_else(|why| panic!("{why}: {line:?}"));
        ServeProcess { child, ready }
    }

    pub(crate) fn text(&self, key: &str) -> &str {
        self.ready[key].as_str().unwrap_or_else(|| panic!("no {key} in {}", self.ready))
    }

    fn port(&self, key: &str) -> &str {
        self.text(key).rsplit_once(':').expect("a port").1
    }

    /// Its address as registrations say it; with the part that says that it speaks the native
    /// dialect, or without.
    pub(crate) fn address(&self, native: bool) -> String {
        let (handshake, notify) = (self.port("handshake"), self.port("notify"));
        let plain = format!("host:127.0.0.1,handshake:{handshake},notify:{notify}");
        let incarnation = self.ready["incarnation"].as_u64().expect("a number");
        if native { format!("{plain},kvferry:{incarnation:x}") } else { plain }
    }

    pub(crate) fn post(&self, path: &str, request: &str, body: &Value) -> (u16, String) {
        post(self.text("http"), path, request, body)
    }

    /// Where operators ask a router, else where clients do.
    pub(crate) fn get(&self, path: &str) -> String {
        let at = if self.ready["admin"].is_string() { "admin" } else { "http" };
        let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        exchange(self.text(at), head.as_bytes()).1
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let done = Command::new("kill").args(["-s", name, &pid]).status().expect("kill runs");
        assert!(done.success());
    }

    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("a child").code()
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status and body of a POST.
pub(crate) fn post(to: &str, path: &str, request: &str, body: &Value) -> (u16, String) {
    post_with(to, path, &format!("x-request-id: {request}"), body)
}

/// The same with this line in the header.
pub(crate) fn post_with(to: &str, path: &str, line: &str, body: &Value) -> (u16, String) {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{line}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    exchange(to, head.as_bytes())
}

/// Sends these bytes; returns the status and the body of the answer.
pub(crate) fn exchange(to: &str, request: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(to).expect("the instance listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout above zero");
    stream.write_all(request).expect("the instance reads");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer in time");
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    (status, if chunked { unchunked(body) } else { body.to_string() })
}

fn unchunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a chunk size");
        if size == 0 {
            break;
        }
        whole += &rest[..size];
        body = &rest[size + 2..];
    }
    whole
}
