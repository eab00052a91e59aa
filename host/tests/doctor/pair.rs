//! Two doctors that try together what is between their machines, which are one here.

use super::{WaitingDoctor, doctor, expect, program};
use kvferry_engine::text::is_printable;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread;

/// A file with this secret, which others cannot read.
fn secret(name: &str, text: &str) -> String {
    let file: PathBuf = [env!("CARGO_TARGET_TMPDIR"), name].iter().collect();
    // One that is there from a run before may be read and not written.
    let _old = std::fs::remove_file(&file);
    std::fs::write(&file, text).expect("a file");
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o400)).expect("its mode");
    file.to_str().expect("UTF-8").into()
}

fn waiting(args: &[&str]) -> WaitingDoctor {
    WaitingDoctor::start(program(&[&["--serve", "127.0.0.1:0"], args].concat()))
}

fn asking(address: &str, args: &[&str]) -> Vec<Value> {
    doctor(program(&[&["--peer", address], args].concat())).1
}

#[test]
fn a_pair_is_measured() {
    let file = secret("doctor-pair", "0123456789abcdef0123456789abcdef");
    let args = ["--secret-file", &file, "--notify-port", "0"];
    let waiting = waiting(&args);
    let checks = asking(&waiting.address, &args);
    let to = &waiting.address;
    for (name, found) in [
        ("peer-reach", "takes connections"),
        ("peer-version", "both are kvferry "),
        ("peer-node", "one machine: bytes go by shared memory"),
        ("peer-secret", "both sides have proven the same one"),
        ("peer-latency", "32 round trips of "),
        ("peer-clock", "the other's clock is 0."),
        ("peer-network", "1 MiB there and back in "),
    ] {
        expect(&checks, name, "ok", found, None);
    }
    expect(&checks, "peer-ports", "ok", "notify-port at 127.0.0.1:", None);
    expect(&checks, "peer-ports", "ok", " from here", None);
    expect(&checks, "peer-ports", "ok", " from there", None);
    let rates: Vec<_> = checks.iter().filter(|check| check["check"] == "peer-rate").collect();
    let says = |rate: &Value, text: &str| rate["found"].as_str().expect("a text").contains(text);
    assert_eq!(rates.len(), 2, "{rates:?}");
    for (rate, way) in rates.into_iter().zip(["shared memory: written at ", "TCP: written at "]) {
        assert!(rate["status"] == "ok" && says(rate, way), "{rate}");
        assert!(says(rate, " GB/s") && says(rate, "every byte compared"), "{rate}");
        assert!(says(rate, &format!("between this machine and {to}")), "{rate}");
    }
    expect(&waiting.end(), "peer-served", "ok", "127.0.0.1 came and went", None);
}

#[test]
fn who_has_another_secret_is_told_and_gets_nothing() {
    let ours = secret("doctor-ours", "0123456789abcdef0123456789abcdef");
    let other = secret("doctor-other", "fedcba9876543210fedcba9876543210");
    let waiting = waiting(&["--secret-file", &ours]);
    let remedy = Some("the same file as secret_file");
    for (args, found) in [
        (&["--secret-file", &other][..], "different secrets"),
        (&[], "the other side: a proof of the fleet's secret is demanded here"),
    ] {
        let checks = asking(&waiting.address, args);
        expect(&checks, "peer-secret", "fail", found, remedy);
        for name in ["peer-latency", "peer-network", "peer-rate"] {
            assert!(!checks.iter().any(|check| check["check"] == name), "{checks:?}");
        }
    }
    // It still waits, for who has it.
    let checks = asking(&waiting.address, &["--secret-file", &ours]);
    expect(&checks, "peer-secret", "ok", "the same one", None);
    expect(&waiting.end(), "peer-served", "ok", "came and went", None);
    let open = self::waiting(&[]);
    let checks = asking(&open.address, &["--secret-file", &ours]);
    expect(&checks, "peer-secret", "fail", "the other side: ", remedy);
}

#[test]
fn strangers_do_not_end_the_wait() {
    let waiting = waiting(&[]);
    for said in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[b'x'; 100_000]] {
        let mut stream = TcpStream::connect(&waiting.address).expect("it waits");
        // It may end the connection before all is said.
        let _ = stream.write_all(said);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let mut stream = TcpStream::connect(&waiting.address).expect("it waits");
    stream.write_all(b"{\"hello\": {\"kvferry_doctor\": \"9.9.9\"}}\n").expect("it reads");
    stream.read_to_end(&mut Vec::new()).expect("it ends the connection");
    let checks = asking(&waiting.address, &[]);
    expect(&checks, "peer-secret", "ok", "neither side has one", None);
    expect(&waiting.end(), "peer-served", "ok", "came and went", None);
}

/// Sets the terminal's title, clears the screen, and reverses the text.
const ESCAPES: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{202e}\u{9b}31m";

fn assert_printable(text: &str) {
    let odd = text.chars().find(|c| !is_printable(*c) && *c != '\n');
    assert_eq!(odd, None, "{text:?}");
    assert!(text.contains("owned"), "it is not shown at all: {text:?}");
}

#[test]
fn words_of_a_doctor_that_asks_are_printed_without_escapes() {
    let waiting = waiting(&[]);
    let version = serde_json::json!({"hello": {"kvferry_doctor": ESCAPES}});
    let long = serde_json::json!({"hello": {"kvferry_doctor": ESCAPES.repeat(500)}});
    for said in [version, long] {
        let mut stream = TcpStream::connect(&waiting.address).expect("it waits");
        stream.write_all(format!("{said}\n").as_bytes()).expect("it reads");
        // It ends the connection, in one way or another.
        let _ = stream.read_to_end(&mut Vec::new());
        let note = waiting.notes.recv().expect("a note");
        assert_printable(&note);
        assert!(note.chars().count() < 5_000, "{} characters", note.chars().count());
    }
}

#[test]
fn words_of_a_doctor_that_waits_are_printed_without_escapes() {
    for form in [&["--json"][..], &[]] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = listener.local_addr().expect("bound").to_string();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the doctor connects");
            let mut greeting = String::new();
            let mut reader = BufReader::new(stream.try_clone().expect("a handle"));
            reader.read_line(&mut greeting).expect("a greeting");
            let greeting: Value = serde_json::from_str(&greeting).expect("JSON");
            let mut hello = greeting["hello"].clone();
            hello["kvferry_doctor"] = ESCAPES.into();
            let answer = serde_json::json!({"hello": hello, "proof": {"refused": ESCAPES}});
            stream.write_all(format!("{answer}\n").as_bytes()).expect("it reads");
            reader.read_line(&mut String::new()).expect("it ends the connection");
        });
        let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_kvferry"));
        program.arg("doctor").args(form).args(["--peer", &address]);
        let output = program.output().expect("it runs");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let said: Vec<_> = text.lines().filter(|line| line.contains("peer-")).collect();
        assert_printable(&said.join("\n"));
    }
}

/// Hands on what is said between a doctor that asks and `to`, whose answers go through `change`.
fn relay(to: &str, change: impl Fn(&str) -> Option<String> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound").to_string();
    let to = TcpStream::connect(to).expect("it waits");
    thread::spawn(move || {
        let (from, _) = listener.accept().expect("the doctor connects");
        let (mut up, down) =
            (to.try_clone().expect("a handle"), from.try_clone().expect("a handle"));
        thread::spawn(move || std::io::copy(&mut &down, &mut up));
        let (mut reader, mut line) = (BufReader::new(to), String::new());
        while reader.read_line(&mut line).is_ok_and(|len| len > 0) {
            let Some(changed) = change(&line) else { return thread::park() };
            // Behind this come bytes.
            let bytes = if line.contains("given") { 1 << 20 } else { 0 };
            let sent = (&from).write_all(changed.as_bytes());
            if sent
                .and_then(|()| std::io::copy(&mut (&mut reader).take(bytes), &mut &from))
                .is_err()
            {
                return;
            }
            line.clear();
        }
    });
    address
}

#[test]
fn what_is_between_is_told_with_its_remedy() {
    type Change = fn(&str) -> Option<String>;
    let cases: [(Change, &str, &str, &str, &str); 5] = [
        (
            |line| Some(line.replace("\"kvferry_doctor\":\"", "\"kvferry_doctor\":\"9")),
            "peer-version",
            "warn",
            "the other 9",
            "install the same on both",
        ),
        (
            |line| Some(line.replace("\"mtu\":", "\"mtu\":1")),
            "peer-network",
            "warn",
            "takes less than the larger MTU",
            "one MTU",
        ),
        (
            // The hundredth second of a clock that goes wrong.
            |line| Some(line.replace("\"clock\":1", "\"clock\":2")),
            "peer-clock",
            "warn",
            " ms ahead",
            "chrony",
        ),
        (
            // Small messages come, and then nothing: what a smaller MTU on the way does.
            |line| (!line.contains("took")).then(|| line.into()),
            "peer-network",
            "fail",
            "small messages get through, and 1048576 bytes at a time did not",
            "ping -M do",
        ),
        (
            |line| Some(line.replace("\"failure\":null", "\"failure\":\"silent\"")),
            "peer-ports",
            "fail",
            "from there: nothing answers",
            "a firewall drops it",
        ),
    ];
    for (change, name, status, found, remedy) in cases {
        let waiting = waiting(&[]);
        let address = relay(&waiting.address, change);
        let checks = asking(&address, &["--handshake-port", "0"]);
        expect(&checks, name, status, found, Some(remedy));
    }
}

#[test]
fn nobody_there_is_told_with_what_to_start() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound").to_string();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the doctor connects");
        stream.write_all(b"220 mail\n").expect("it reads");
    });
    let checks = asking(&address, &[]);
    let found = format!("{address} is no `kvferry doctor --serve`");
    expect(&checks, "peer-version", "fail", &found, Some("start one there"));
    let (code, checks) = doctor(program(&["--peer", "127.0.0.1:1"]));
    expect(&checks, "peer-reach", "fail", "nobody listens", Some("start `kvferry doctor --serve"));
    assert_eq!(code, 1);
}
