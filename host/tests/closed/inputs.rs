//! What the simulator can give to a state machine, its shell in a deployment has to produce: fleets
//! of real processes are driven until all kinds of input were seen, as the processes count them,
//! but for those that are listed with the reason.

use crate::fleet::{FleetHeartbeat, PATIENT, TestCluster, registration};
use crate::played;
use crate::process::{ServeProcess, post};
use crate::seen::{SeenInputs, read, seen_now, until};
use crate::slow::{self, send};
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::registration::MoriioRegistration;
use kvferry_engine::core::input_kinds::InputKinds;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::router::RouterInput;
use kvferry_engine::core::transfer::TransferInput;
use serde_json::{Value, json};
use std::num::NonZeroU16;
use std::path::Path;

/// A kind that no run here has to show, why not, and the test that shows it or what it is made of;
/// none where no shell can produce it.
struct Exception {
    machine: &'static str,
    kind: &'static str,
    why: &'static str,
    shown: Option<(&'static str, &'static str)>,
}

macro_rules! exceptions {
    ($($machine:literal $kind:literal $why:literal $shown:expr,)+) => {
        [$(Exception { machine: $machine, kind: $kind, why: $why, shown: $shown }),+]
    };
}

const SIGNED: &str = "host/tests/hostile/signed.rs";

const OBSERVED: &str = "host/tests/embed/observed.rs";

const HOSTS: &str = "engine/tests/payload_hosts/cases.rs";

const EXCEPTIONS: [Exception; 18] = exceptions! {
    "router" "Register"
        "no shell makes one: instances register by frames"
        None,
    "router" "Static"
        "the instances here register"
        Some(("host/tests/router/static_instances.rs", "static_pairs_get_the_legs_of_nixl")),
    "router" "ProofSigned"
        "the fleets here have no secret"
        Some((SIGNED, "a_fleet_that_signs_is_served_and_others_are_named")),
    "router" "ProofWrong"
        "as above"
        Some((SIGNED, "who_knows_another_secret_or_none_is_refused_on_both_sides")),
    "router" "Release"
        "the routers here end without a delay"
        Some(("host/tests/closed/handover.rs", "no_request_is_lost_when_a_router_takes_the_place_of_another")),
    "router" "Drain"
        "nobody can scrape a router that drains; what it does then is seen"
        Some(("host/tests/router/ends.rs", "a_request_that_is_not_whole_at_sigterm_is_refused")),
    "prefill" "Preempted"
        "the stand-in engine admits only prompts that fit whole; `kvferry host` takes it from vLLM"
        Some((OBSERVED, "a_preempted_prompt_is_seen_in_metrics")),
    "prefill" "RankUnusable"
        "the memory of `kvferry serve` is its own; `kvferry host` is told of memory"
        Some((OBSERVED, "memory_that_is_not_there_is_seen_in_metrics")),
    "decode" "RankUnusable"
        "as at a prefill"
        Some((OBSERVED, "memory_that_is_not_there_is_seen_in_metrics")),
    "decode" "FlowMoving"
        "a read that lasts 1 s is one of gigabytes: all that it reads is there when it begins. The same \
         report of writes is seen here, at a prefill"
        None,
    "prefill" "Directory"
        "these instances have no payloads"
        Some((HOSTS, "a_payload_goes_to_the_host_that_wants_it")),
    "prefill" "Payload"
        "as above"
        Some((HOSTS, "a_payload_goes_to_the_host_that_wants_it")),
    "decode" "Directory"
        "as above"
        Some((HOSTS, "a_payload_goes_to_the_host_that_wants_it")),
    "decode" "Payload"
        "as above"
        Some((HOSTS, "a_payload_goes_to_the_host_that_wants_it")),
    "transfer" "Unregistered"
        "as RankUnusable, which follows"
        Some((OBSERVED, "memory_that_is_not_there_is_seen_in_metrics")),
    "transfer" "Unmoved"
        "a process has to die within the microseconds of an operation"
        Some(("fabric-host/tests/stopped.rs", "a_push_ends_with_its_target")),
    "transfer" "Reset"
        "of MoRI alone, whose stand-in fails by calls within its process"
        Some(("fabric-mori/tests/faults.rs", "peers_inside_are_told_of_a_rebuild")),
    "transfer" "Refused"
        "the core keeps to the credits that planes tell, so that a session has to end as it posts"
        Some(("engine/src/conformance/data_shutdown.rs", "peer_death_fails_operations")),
};

/// Streams, whole answers, requests that are wrong, clients that leave, and the ends of processes, where KV is
/// verified.
fn native(seen: &mut SeenInputs, mode: &str) {
    let fleet = TestCluster::new(&["--scrape-load", "0.2"]);
    let p = fleet.serve("prefill", mode, &["--set", PATIENT, "--verify", "all"]);
    let mut d = fleet.serve("decode", mode, &["--set", PATIENT, "--verify", "all"]);
    fleet.ready(2);
    assert_eq!(fleet.ask(1, &[]).0, 200);
    assert_eq!(fleet.ask(2, &[("stream", json!(true))]).0, 200);
    let many: Vec<u32> = (0..100_000).map(|at| at % 251).collect();
    assert_eq!(fleet.ask(3, &[("prompt", json!(many))]).0, 400);
    leave(&fleet);
    until(seen, &fleet.router, "router", &["Load"]);
    // Of the beacon, if of nothing else.
    until(seen, &p, "prefill", &["Tick"]);
    until(seen, &d, "decode", &["Tick"]);
    read(seen, &fleet.router);
    drains(seen, &fleet, &d);
    d.signal("KILL");
    d.wait();
    fleet.until("the link is down", |_| seen_now(&fleet, "LinkDown"));
    read(seen, &fleet.router);
    // The prefill hears that the decode has ended.
    until(seen, &p, "prefill", &["LinkDown"]);
    drains(seen, &fleet, &p);
}

/// An instance is told to end, which it does some seconds later.
fn drains(seen: &mut SeenInputs, fleet: &TestCluster, process: &ServeProcess) {
    process.signal("TERM");
    let is_draining = |it: &Value| it["http"] == process.text("http") && it["state"] != "ready";
    fleet.until("draining", |all| {
        !all.iter().any(|it| it["http"] == process.text("http")) || all.iter().any(is_draining)
    });
    read(seen, process);
}

/// A client closes its connection before the answer.
fn leave(fleet: &TestCluster) {
    let body = json!({"model": "m", "prompt": vec![7; 5000], "max_tokens": 8000});
    for _ in 0..3 {
        let client = send(fleet.router.text("http"), &body);
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
fn moriio(seen: &mut SeenInputs, mode: Mode) {
    let fleet = TestCluster::new(&[]);
    let name = mode.to_string();
    let [p, d] = ["prefill", "decode"]
        .map(|role| ["--role", role, "--mode", &name, "--set", PATIENT, "--moriio-only"])
        .map(|args| ServeProcess::serve(&args));
    let one = NonZeroU16::MIN;
    let hearts = [(&p, Role::Prefill), (&d, Role::Decode)].map(|(process, role)| {
        let zmq = ZmqAddress::parse(&process.address(false)).expect("an address");
        let http = process.text("http").into();
        let beat = MoriioRegistration::new(role, http, zmq, one, one, mode).expect("an instance");
        FleetHeartbeat::send(fleet.discovery(), move || beat.encode())
    });
    fleet.ready(2);
    assert_eq!(fleet.ask(1, &[]).0, 200);
    if mode == Mode::Pull {
        // It comes by itself.
        until(seen, &p, "prefill", &["MoriioRelease"]);
    }
    for process in [&p, &d, &fleet.router] {
        read(seen, process);
    }
    drop(hearts);
}

/// A prefill that is killed in the middle of its registrations.
fn killed(seen: &mut SeenInputs) {
    let fleet = TestCluster::new(&["--retries", "0"]);
    let d = fleet.serve("decode", "push", &["--on-load-failure", "recompute"]);
    let mut p = ServeProcess::serve(&["--role", "prefill", "--mode", "push"]);
    let told = registration(&p, Role::Prefill, Mode::Push, p.text("handshake"));
    let (http, control) = (told.http.clone(), told.control.clone());
    let _heart = FleetHeartbeat::beat(fleet.discovery(), told);
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
    let (is_told, is_hidden) = (body.contains("cannot connect"), !body.contains(&*http.0));
    assert!(status == 502 && is_told && is_hidden, "{control}: {status} {body}");
    until(seen, &d, "decode", &["LinkDown", "Fenced"]);
    read(seen, &fleet.router);
}

/// A leg that fails for the incarnation that it names, and a decode that goes without its KV.
fn told(seen: &mut SeenInputs) {
    for is_old in [false, true] {
        let fleet = TestCluster::new(&["--retries", "0"]);
        let policy = if is_old { "fail" } else { "recompute" };
        let d = fleet.serve("decode", "push", &["--on-load-failure", policy]);
        let p = ServeProcess::serve(&["--role", "prefill", "--mode", "push"]);
        let control = if is_old { p.text("handshake") } else { "tcp://127.0.0.1:1" };
        let mut told = registration(&p, Role::Prefill, Mode::Push, control);
        told.incarnation.0 -= u64::from(is_old);
        let _heart = FleetHeartbeat::beat(fleet.discovery(), told);
        fleet.ready(2);
        assert_eq!(fleet.ask(1, &[]).0, if is_old { 500 } else { 200 });
        if !is_old {
            // The decode says so with its next registration.
            until(seen, &fleet.router, "router", &["FrameTroubles"]);
        }
        read(seen, &d);
        read(seen, &fleet.router);
    }
}

fn kinds<I: InputKinds>() -> impl Iterator<Item = (String, String)> {
    I::KINDS.iter().map(|kind| (I::MACHINE.to_owned(), (*kind).to_owned()))
}

#[test]
fn every_kind_of_input_is_produced_by_what_is_deployed() {
    let mut seen = SeenInputs::new();
    native(&mut seen, "push");
    native(&mut seen, "pull");
    moriio(&mut seen, Mode::Push);
    moriio(&mut seen, Mode::Pull);
    played::failing(&mut seen);
    played::abandoned(&mut seen);
    played::silent(&mut seen);
    played::strangers(&mut seen);
    slow::amid_writes(&mut seen);
    slow::amid_reads(&mut seen);
    slow::moving(&mut seen);
    slow::goodbyes(&mut seen);
    slow::renewed(&mut seen);
    slow::refused(&mut seen);
    killed(&mut seen);
    told(&mut seen);
    let all = kinds::<RouterInput>().chain(kinds::<PrefillInput>());
    let all: SeenInputs =
        all.chain(kinds::<DecodeInput>()).chain(kinds::<TransferInput>()).collect();
    let excepted = EXCEPTIONS.iter().map(|it| (it.machine.to_owned(), it.kind.to_owned()));
    let excepted: SeenInputs = excepted.collect();
    assert!(excepted.is_subset(&all), "an exception for what there is not");
    let missing: Vec<_> = all.difference(&seen).filter(|kind| !excepted.contains(kind)).collect();
    assert!(missing.is_empty(), "never produced: {missing:?}");
    assert!(seen.is_subset(&all), "counted, but not known: {seen:?}");
}

#[test]
fn what_shows_the_exceptions_is_there() {
    for Exception { machine, kind, why, shown } in &EXCEPTIONS {
        assert!(!why.is_empty());
        let Some((file, test)) = shown else { continue };
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
        let text = std::fs::read_to_string(path).expect("a file of the repository");
        assert!(text.contains(&format!("fn {test}(")), "{machine} {kind}: no {test} in {file}");
    }
}
