//! `kvferry host` as a process of its own.

use kvferry::sidecar::SidecarClient;
use kvferry::sidecar::proto::ClientIdentity;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// A host, ended with the test.
pub(crate) struct SidecarProcess {
    pub(crate) child: Child,
    pub(crate) socket: PathBuf,
}

/// A path for a socket of a test.
pub(crate) fn place(name: &str) -> PathBuf {
    let socket = format!("kvferry-test-{}-{name}.sock", std::process::id());
    std::env::temp_dir().join(socket)
}

pub(crate) fn host(socket: &Path, set: Option<(&str, &str)>, more: &[&str]) -> Command {
    let mut host = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    host.args(["host", "--log-level", "warn", "--socket"]).arg(socket).args(more).envs(set);
    host.stdin(Stdio::null());
    host
}

pub(crate) fn spawn(socket: &Path, set: Option<(&str, &str)>, more: &[&str]) -> Child {
    host(socket, set, more).spawn().expect("the binary runs")
}

impl SidecarProcess {
    pub(crate) fn start(name: &str) -> SidecarProcess {
        SidecarProcess::with(name, None)
    }

    pub(crate) fn with(name: &str, set: Option<(&str, &str)>) -> SidecarProcess {
        let socket = place(name);
        let _ = std::fs::remove_file(&socket);
        SidecarProcess::listening(spawn(&socket, set, &[]), socket)
    }

    /// One with these arguments beside.
    pub(crate) fn with_args(name: &str, more: &[&str]) -> SidecarProcess {
        let socket = place(name);
        let _ = std::fs::remove_file(&socket);
        SidecarProcess::listening(spawn(&socket, None, more), socket)
    }

    /// One with an endpoint for its metrics and these arguments, and where that is.
    pub(crate) fn with_metrics(name: &str, more: &[&str]) -> (SidecarProcess, SocketAddr) {
        let socket = place(name);
        let _ = std::fs::remove_file(&socket);
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(["host", "--metrics", "127.0.0.1:0", "--socket"])
            .arg(&socket)
            .args(more)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut log = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut line = String::new();
        while !line.contains("metrics=") {
            line.clear();
            assert_ne!(log.read_line(&mut line).expect("a log"), 0, "it serves no metrics");
        }
        let (_, at) = line.split_once("http://").expect("an address");
        let at = at.trim_end().trim_end_matches("/metrics").parse().expect("host and port");
        // Its log is to have somewhere to go.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        (SidecarProcess::listening(child, socket), at)
    }

    pub(crate) fn listening(mut child: Child, socket: PathBuf) -> SidecarProcess {
        let start = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            let ended = child.try_wait().expect("a child");
            assert!(ended.is_none(), "the host ended: {ended:?}");
            assert!(start.elapsed() < PATIENCE, "no host");
            std::thread::yield_now();
        }
        SidecarProcess { child, socket }
    }

    pub(crate) fn connect(&self, who: ClientIdentity) -> SidecarClient {
        SidecarClient::connect(&self.socket, who).expect("the host listens")
    }
}

impl Drop for SidecarProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The page with the metrics.
pub(crate) fn scrape(at: SocketAddr) -> String {
    let mut stream = TcpStream::connect(at).expect("the host serves metrics");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("the host reads");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("a page");
    assert!(page.starts_with("HTTP/1.1 200 OK"), "{page}");
    page
}

/// The page has this line.
pub(crate) fn series(page: &str, line: &str) {
    assert!(page.lines().any(|have| have == line), "no line {line} in\n{page}");
}
