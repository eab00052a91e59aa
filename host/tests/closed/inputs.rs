//! What the simulator can give to a state machine, its shell in a deployment has to produce: fleets of
//! real processes are driven until all kinds of input were seen, as the processes count them, but for
//! those that are listed with the reason.

use crate::fleet::{Fleet, Heart, PATIENCE, PATIENT, registration};
use crate::process::{Process, post};
use engine::core::decode::DecodeInput;
use engine::core::dialect::moriio::address::ZmqAddress;
use engine::core::dialect::moriio::registration::Heartbeat;
use engine::core::kinds::Kinds;
use engine::core::message::{Mode, Role};
use engine::core::prefill::PrefillInput;
use engine::core::router::RouterInput;
use engine::core::transfer::TransferInput;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::thread;
use std::time::Instant;

/// Kinds that no run here has to show.
const EXCEPTIONS: [(&str, &str, &str); 17] = [
    ("router", "Register", "there are no instances but those that register by frames"),
    ("router", "Drain", "the page is closed by then; `fn sigterm_lets_requests_finish`"),
    ("prefill", "Preempted", "of the engine: the scenario `preempt-prefill` and test_hooks.py"),
    ("prefill", "RankUnusable", "memory that the plane refuses: fabric-host's own tests"),
    ("prefill", "PeerFailed", "a data plane that fails while the peer's process lives"),
    ("prefill", "FlowMoving", "only of flows that take longer than 1 s"),
    ("prefill", "FlowFailing", "of a rank that fails while others go on"),
    ("prefill", "FlowFailed", "a race with the end of the peer: fabric-host/tests/stopped.rs"),
    ("prefill", "Fenced", "the same"),
    ("decode", "RankUnusable", "memory that the plane refuses: fabric-host's own tests"),
    ("decode", "PeerFailed", "a data plane that fails while the peer's process lives"),
    ("decode", "FlowMoving", "only of flows that take longer than 1 s"),
    ("decode", "FlowFailing", "of a rank that fails while others go on"),
    ("decode", "FlowFailed", "a race with the end of the peer: fabric-host/tests/stopped.rs"),
    ("decode", "Fenced", "the same"),
    ("transfer", "Refused", "the planes refuse nothing that the core asks for"),
    ("transfer", "Tick", "only of flows that wait for a deadline"),
];

type Seen = BTreeSet<(String, String)>;

fn read(seen: &mut Seen, process: &Process) {
    for line in process.get("/metrics").lines() {
        let Some((_, labels)) = line.split_once("_inputs_total{machine=\"") else { continue };
        let mut parts = labels.split('"');
        let (machine, kind) = (parts.next(), parts.nth(1));
        let known = machine.zip(kind).unwrap_or_else(|| panic!("no kind in {line}"));
        seen.insert((known.0.into(), known.1.into()));
    }
}

/// An instance that answers every request so, once it was asked whether it is well.
fn answers(status: u16, body: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let at = listener.local_addr().expect("bound").to_string();
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut asked = Vec::new();
                let mut part = [0; 4096];
                while let Ok(count @ 1..) = client.read(&mut part) {
                    asked.extend_from_slice(&part[..count]);
                    let is_probe = asked.starts_with(b"GET");
                    if !(is_probe && asked.ends_with(b"\r\n\r\n") || asked.ends_with(b"}")) {
                        continue;
                    }
                    let (status, body) = if is_probe { (200, "{}") } else { (status, body) };
                    let len = body.len();
                    let answer = format!(
                        "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n\
                         content-length: {len}\r\n\r\n{body}"
                    );
                    asked.clear();
                    if client.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    at
}

/// Streams, whole answers, requests that are wrong, clients that leave, and the ends of processes.
fn native(seen: &mut Seen, mode: &str) {
    let fleet = Fleet::new(&[]);
    let p = fleet.serve("prefill", mode, &["--set", PATIENT]);
    let mut d = fleet.serve("decode", mode, &["--set", PATIENT]);
    fleet.ready(2);
    assert_eq!(fleet.ask(1, &[]).0, 200);
    assert_eq!(fleet.ask(2, &[("stream", json!(true))]).0, 200);
    let many: Vec<u32> = (0..100_000).map(|at| at % 251).collect();
    assert_eq!(fleet.ask(3, &[("prompt", json!(many))]).0, 400);
    leave(&fleet);
    // Of the beacon, if of nothing else.
    until(seen, ("prefill", "Tick"), &p);
    until(seen, ("decode", "Tick"), &d);
    read(seen, &fleet.router);
    drains(seen, &fleet, &d);
    d.signal("KILL");
    d.wait();
    fleet.until("the link is down", |_| seen_now(&fleet, "LinkDown"));
    read(seen, &fleet.router);
    // The prefill hears that the decode has ended.
    until(seen, ("prefill", "LinkDown"), &p);
    drains(seen, &fleet, &p);
}

/// Reads a process until its machine had such an input.
fn until(seen: &mut Seen, (machine, kind): (&str, &str), process: &Process) {
    let start = Instant::now();
    let input = (machine.to_owned(), kind.to_owned());
    loop {
        read(seen, process);
        if seen.contains(&input) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "the {machine} had no {kind}");
    }
}

/// An instance is told to end, which it does some seconds later.
fn drains(seen: &mut Seen, fleet: &Fleet, process: &Process) {
    process.signal("TERM");
    let is_draining = |it: &Value| it["http"] == process.text("http") && it["state"] != "ready";
    fleet.until("draining", |all| {
        !all.iter().any(|it| it["http"] == process.text("http")) || all.iter().any(is_draining)
    });
    read(seen, process);
}

fn seen_now(fleet: &Fleet, kind: &str) -> bool {
    let mut seen = Seen::new();
    read(&mut seen, &fleet.router);
    seen.contains(&("router".into(), kind.into()))
}

/// A client closes its connection before the answer.
fn leave(fleet: &Fleet) {
    let body = json!({"model": "m", "prompt": vec![7; 5000], "max_tokens": 8000}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    for _ in 0..3 {
        let mut client = TcpStream::connect(fleet.router.text("http")).expect("it listens");
        client.write_all((head.clone() + &body).as_bytes()).expect("it reads");
        fleet.until("a leg", |all| all.iter().any(|it| it["in_flight_legs"] != 0));
        drop(client);
        fleet.until("no leg", |all| all.iter().all(|it| it["in_flight_legs"] == 0));
        if seen_now(fleet, "Gone") {
            return;
        }
    }
    panic!("no client left before its answer");
}

/// Instances that speak MoRIIO only, as far as the router knows.
fn moriio_reads(seen: &mut Seen) {
    let fleet = Fleet::new(&[]);
    let p = Process::serve(&["--role", "prefill", "--mode", "pull", "--set", PATIENT]);
    let d = Process::serve(&["--role", "decode", "--mode", "pull", "--set", PATIENT]);
    let one = NonZeroU16::MIN;
    let hearts = [(&p, Role::Prefill), (&d, Role::Decode)].map(|(process, role)| {
        let zmq = ZmqAddress::parse(&process.address(false)).expect("an address");
        let http = process.text("http").into();
        let beat = Heartbeat::new(role, http, zmq, one, one, Mode::Pull).expect("an instance");
        Heart::send(fleet.discovery(), move || beat.encode())
    });
    fleet.ready(2);
    assert_eq!(fleet.ask(1, &[]).0, 200);
    for process in [&p, &d, &fleet.router] {
        read(seen, process);
    }
    drop(hearts);
}

/// Prefills that fail each in its way, beside a decode that waits for them.
fn failing(seen: &mut Seen) {
    const ERROR: &str = r#"{"error": {"message": "m", "type": "t", "code": 500}}"#;
    for http in [answers(500, ERROR), answers(503, ERROR)] {
        let fleet = Fleet::new(&["--retries", "0", "--queue-timeout", "0.001"]);
        let d = fleet.serve("decode", "push", &[]);
        let p = Process::serve(&["--role", "prefill", "--mode", "push"]);
        let mut told = registration(&p, Role::Prefill, Mode::Push, p.text("handshake"));
        told.http = (&*http).into();
        let _heart = Heart::beat(fleet.discovery(), told);
        fleet.ready(2);
        assert!(fleet.ask(1, &[]).0 >= 500);
        read(seen, &d);
        read(seen, &fleet.router);
    }
    // One that takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let fleet = Fleet::new(&[]);
    let p = Process::serve(&["--role", "prefill", "--mode", "push"]);
    let mut told = registration(&p, Role::Prefill, Mode::Push, p.text("handshake"));
    told.http = silent.local_addr().expect("bound").to_string().as_str().into();
    let _heart = Heart::beat(fleet.discovery(), told);
    fleet.until("it does not answer", |_| seen_now(&fleet, "ProbeLost"));
    // It is asked again.
    fleet.until("a timer", |_| seen_now(&fleet, "Tick"));
    read(seen, &fleet.router);
}

/// A prefill that is killed in the middle of its registrations.
fn killed(seen: &mut Seen) {
    let fleet = Fleet::new(&["--retries", "0"]);
    let d = fleet.serve("decode", "push", &["--on-load-failure", "recompute"]);
    let mut p = Process::serve(&["--role", "prefill", "--mode", "push"]);
    let told = registration(&p, Role::Prefill, Mode::Push, p.text("handshake"));
    let (http, control) = (told.http.clone(), told.control.clone());
    let _heart = Heart::beat(fleet.discovery(), told);
    fleet.ready(2);
    // A decode leg alone: its KV never comes.
    let alone = json!({"prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": {"kvferry": {
        "key": {"id": "t", "prompt": 0}, "sibling": 0, "mode": "Push", "prefill": "nobody:1",
        "control": "tcp://127.0.0.1:1", "life": null}}});
    let (status, body) = post(d.text("http"), "/v1/completions", "r", &alone);
    assert!(status == 200 && body.contains("\"failed\""), "{status} {body}");
    assert_eq!(fleet.ask(1, &[]).0, 200);
    p.signal("KILL");
    p.wait();
    let (status, body) = fleet.ask(2, &[]);
    assert!(status == 502 && body.contains(&*http.0), "{control}: {status} {body}");
    until(seen, ("decode", "LinkDown"), &d);
    read(seen, &fleet.router);
}

/// A leg that fails for the life that it names, and a decode that goes without its KV.
fn told(seen: &mut Seen) {
    for is_old in [false, true] {
        let fleet = Fleet::new(&["--retries", "0"]);
        let policy = if is_old { "fail" } else { "recompute" };
        let d = fleet.serve("decode", "push", &["--on-load-failure", policy]);
        let p = Process::serve(&["--role", "prefill", "--mode", "push"]);
        let control = if is_old { p.text("handshake") } else { "tcp://127.0.0.1:1" };
        let mut told = registration(&p, Role::Prefill, Mode::Push, control);
        told.incarnation.0 -= u64::from(is_old);
        let _heart = Heart::beat(fleet.discovery(), told);
        fleet.ready(2);
        assert_eq!(fleet.ask(1, &[]).0, if is_old { 500 } else { 200 });
        read(seen, &d);
        read(seen, &fleet.router);
    }
}

fn kinds<I: Kinds>() -> impl Iterator<Item = (String, String)> {
    I::KINDS.iter().map(|kind| (I::MACHINE.to_owned(), (*kind).to_owned()))
}

#[test]
fn every_kind_of_input_is_produced_by_what_is_deployed() {
    let mut seen = Seen::new();
    native(&mut seen, "push");
    native(&mut seen, "pull");
    moriio_reads(&mut seen);
    failing(&mut seen);
    killed(&mut seen);
    told(&mut seen);
    let all = kinds::<RouterInput>().chain(kinds::<PrefillInput>());
    let all: Seen = all.chain(kinds::<DecodeInput>()).chain(kinds::<TransferInput>()).collect();
    let excepted: Seen =
        EXCEPTIONS.iter().map(|(machine, kind, _)| ((*machine).into(), (*kind).into())).collect();
    assert!(excepted.is_subset(&all), "an exception for what there is not");
    let missing: Vec<_> = all.difference(&seen).filter(|kind| !excepted.contains(kind)).collect();
    assert!(missing.is_empty(), "never produced: {missing:?}");
    assert!(seen.is_subset(&all), "counted, but not known: {seen:?}");
}
