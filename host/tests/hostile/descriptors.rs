//! S11: a process without descriptors waits for some, and says so once.

use crate::limit_files;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(300);

/// A host with few descriptors, and the path of its socket. Its log is in a file beside that.
struct PoorHost {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl PoorHost {
    fn start(name: &str) -> PoorHost {
        let name = format!("kvferry-hostile-{}-{name}", std::process::id());
        let socket = std::env::temp_dir().join(format!("{name}.sock"));
        let log = std::env::temp_dir().join(format!("{name}.log"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        command.args(["host", "--metrics", "127.0.0.1:0", "--socket"]).arg(&socket);
        limit_files(&mut command, 40, true);
        command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).expect("a log"));
        let child = command.spawn().expect("the program starts");
        let host = PoorHost { child, socket, log };
        host.until("metrics=");
        let start = Instant::now();
        while UnixStream::connect(&host.socket).is_err() {
            assert!(start.elapsed() < PATIENCE, "it does not listen");
            thread::yield_now();
        }
        host
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("a log")
    }

    fn until(&self, said: &str) -> String {
        let start = Instant::now();
        loop {
            let log = self.log();
            if log.contains(said) {
                return log;
            }
            assert!(start.elapsed() < PATIENCE, "it does not say {said:?}: {log}");
            thread::yield_now();
        }
    }
}

impl Drop for PoorHost {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.log);
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// How often it says that what is listened for waits: its other socket may say so, too.
fn lines(log: &str, what: &str) -> usize {
    let of = format!("what=\"{what}\"");
    log.lines().filter(|line| line.contains("cannot accept") && line.contains(&of)).count()
}

#[test]
fn a_socket_without_descriptors_waits_and_says_so_once() {
    let mut host = PoorHost::start("socket");
    let crowd: Vec<_> =
        (0..60).map(|_| UnixStream::connect(&host.socket).expect("a place")).collect();
    let log = host.until("cannot accept");
    assert!(log.contains("ulimit -n"), "{log}");
    drop(crowd);
    // It goes on when there are some: who says nothing of use is closed.
    let mut late = UnixStream::connect(&host.socket).expect("a place");
    late.write_all(&[0xff; 8]).expect("it is heard");
    let _ = late.read(&mut [0]);
    host.child.kill().expect("it lives");
    let log = host.log();
    assert_eq!(lines(&log, "the engine"), 1, "{}", &log[..log.len().min(4000)]);
}

#[test]
fn metrics_without_descriptors_wait_and_say_so_once() {
    let mut host = PoorHost::start("metrics");
    let log = host.until("metrics=");
    let at = log.split_once("http://").expect("an address").1.split_once("/metrics").expect("it").0;
    let crowd: Vec<_> = (0..60).map(|_| TcpStream::connect(at).expect("a place")).collect();
    let told = host.until("cannot accept");
    assert!(told.contains("ulimit -n"), "{told}");
    drop(crowd);
    let mut late = TcpStream::connect(at).expect("a place");
    late.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .expect("heard");
    let mut page = String::new();
    late.read_to_string(&mut page).expect("an answer");
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    host.child.kill().expect("it lives");
    assert_eq!(lines(&host.log(), "metrics"), 1);
}
