//! What is listened at where strangers could come.

use crate::program::{ProgramFolder, kvferry};
use kvferry_engine::core::dialect::moriio::handshake::{AgentMetadata, REQUEST};
use serde_json::Value;
use std::fs::{Permissions, set_permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

const SERVE: [&str; 6] = ["serve", "--role", "decode", "--mode", "push", "--host"];

/// An address of this machine that others may reach, if it has one; nothing is sent.
pub(crate) fn reached_by_others() -> Option<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let own = socket.local_addr().ok()?.ip();
    (!own.is_loopback() && !own.is_unspecified()).then(|| own.to_string())
}

#[test]
fn an_instance_without_a_secret_is_not_started_where_others_reach_it() {
    // Kept for documentation: no machine has it.
    let ended = kvferry([&SERVE[..], &["192.0.2.1"]].concat());
    assert_eq!(ended.code, 2, "{}", ended.err);
    assert!(ended.err.contains("--host = 192.0.2.1: others reach this address"), "{}", ended.err);
    for remedy in ["--secret-file", "KVFERRY_SECRET_FILE", "--insecure-network", "127.0.0.1"] {
        assert!(ended.err.contains(remedy), "{remedy}: {}", ended.err);
    }
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
}

/// An instance that serves, all that it logged until it did, and each line since.
pub(crate) struct LoggedInstance(Child, String, pub(crate) Receiver<String>);

impl Drop for LoggedInstance {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(host: &str, more: &[&str]) -> LoggedInstance {
    serve_as("decode", host, more)
}

pub(crate) fn serve_as(role: &str, host: &str, more: &[&str]) -> LoggedInstance {
    let mut program = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    program.args(["serve", "--role", role, "--mode", "push", "--host", host]).args(more);
    program.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn().expect("the program starts");
    let mut log = BufReader::new(child.stderr.take().expect("it is piped"));
    let (mut said, mut line) = (String::new(), String::new());
    while !line.contains(" serving ") {
        line.clear();
        assert_ne!(log.read_line(&mut line).expect("a log"), 0, "it ended: {said}");
        said += &line;
    }
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        // The test may have ended.
        log.lines().map_while(Result::ok).try_for_each(|line| sender.send(line).map_err(drop))
    });
    LoggedInstance(child, said, lines)
}

impl LoggedInstance {
    /// What it says when it is ready; once.
    fn ready(&mut self) -> Value {
        let mut line = String::new();
        let out = self.0.stdout.take().expect("it is piped");
        BufReader::new(out).read_line(&mut line).expect("a line");
        serde_json::from_str(&line).expect("JSON")
    }

    fn metrics(&self, ready: &Value) -> String {
        let at = ready["http"].as_str().expect("an address");
        let mut stream = TcpStream::connect(at).expect("it listens");
        let get = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        stream.write_all(get.as_bytes()).expect("it reads");
        let mut page = String::new();
        stream.read_to_string(&mut page).expect("text");
        page
    }
}

#[test]
fn what_is_between_the_network_and_an_instance_is_logged_once_and_measured() {
    let folder = ProgramFolder::new("hostile-network");
    let secret = folder.write("secret", "0123456789abcdef0123456789abcdef");
    set_permissions(&secret, Permissions::from_mode(0o400)).expect("its mode");
    let mut cases = vec![("127.0.0.1", vec![], "loopback")];
    let own = reached_by_others();
    if let Some(own) = &own {
        cases.push((own, vec!["--secret-file", &secret], "secret"));
        cases.push((own, vec!["--insecure-network"], "insecure"));
    }
    for (host, more, network) in cases {
        let mut instance = serve(host, &more);
        let warned = instance.1.matches("insecure network").count();
        assert_eq!(warned, usize::from(network == "insecure"), "{network}: {}", instance.1);
        let page = {
            let ready = instance.ready();
            instance.metrics(&ready)
        };
        let series = format!("kvferry_trust{{network=\"{network}\",");
        assert!(page.contains(&series), "{series}: {page}");
    }
}

/// What an instance answers to the handshake of a stock vLLM, which anybody can say.
fn moriio_handshake(endpoint: &str) -> AgentMetadata {
    let context = zmq::Context::new();
    let socket = context.socket(zmq::DEALER).expect("a socket");
    socket.set_linger(0).expect("an option");
    socket.connect(endpoint).expect("an endpoint");
    socket.send(REQUEST, 0).expect("it is queued");
    AgentMetadata::decode(&socket.recv_multipart(0).expect("an answer")).expect("metadata")
}

#[test]
fn a_stranger_who_speaks_moriio_learns_nothing_where_there_are_no_such_peers() {
    let folder = ProgramFolder::new("hostile-moriio");
    let secret = folder.write("secret", "0123456789abcdef0123456789abcdef");
    set_permissions(&secret, Permissions::from_mode(0o400)).expect("its mode");
    let own = reached_by_others();
    let proven = vec!["--secret-file", &*secret];
    let mut cases = vec![
        ("127.0.0.1", vec![], true),
        ("127.0.0.1", proven.clone(), true),
        ("127.0.0.1", vec!["--moriio-peers=false"], false),
    ];
    if let Some(own) = &own {
        cases.push((own, proven.clone(), false));
        cases.push((own, [&proven[..], &["--moriio-peers"]].concat(), true));
        cases.push((own, vec!["--insecure-network"], true));
    }
    for (host, more, is_open) in cases {
        let mut instance = serve(host, &more);
        let opened = instance.1.matches("peers that speak MoRIIO may connect").count();
        assert_eq!(opened, usize::from(is_open), "{host} {more:?}: {}", instance.1);
        let ready = instance.ready();
        let told = moriio_handshake(ready["handshake"].as_str().expect("an endpoint"));
        let why = String::from_utf8_lossy(&told.engine).into_owned();
        assert_eq!(told.base_addrs.is_empty(), !is_open, "{host} {more:?}: {told:?}");
        assert_eq!(why.contains("moriio_peers"), !is_open, "{host} {more:?}: {why}");
        let page = instance.metrics(&ready);
        assert!(page.contains(&format!("moriio_peers=\"{is_open}\"")), "{page}");
        // The caller has hung up.
        if !is_open {
            let line = instance.2.recv().expect("a line");
            assert!(line.contains("a connection was refused"), "{line}");
            assert!(line.contains("a peer that speaks MoRIIO only"), "{line}");
        }
    }
}
