//! One of four pairs is cut off: p1 registers with the address of a relay, and the relay lets all
//! but one decode through.

use crate::fleet::{FleetHeartbeat, KEEN, PATIENT, TestCluster, metric, registration};
use crate::process::ServeProcess;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// Passes on what comes until the caller names itself as `barred`; the address.
fn relay(to: &str, barred: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let at = format!("tcp://{}", listener.local_addr().expect("bound"));
    let (to, barred) = (to.to_owned(), barred.to_owned());
    thread::spawn(move || {
        for caller in listener.incoming().map_while(Result::ok) {
            let Ok(callee) = TcpStream::connect(&to) else { continue };
            let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor is left");
            let (back, there) = (clone(&callee), clone(&caller));
            thread::spawn(move || forward(&back, &there, None));
            let barred = barred.clone();
            thread::spawn(move || forward(&caller, &callee, Some(&barred)));
        }
    });
    at
}

fn forward(mut from: &TcpStream, mut to: &TcpStream, barred: Option<&str>) {
    let mut said = Vec::new();
    let mut part = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut part) {
        if let Some(barred) = barred {
            said.extend_from_slice(&part[..count]);
            if memchr::memmem::find(&said, barred.as_bytes()).is_some() {
                break;
            }
        }
        if to.write_all(&part[..count]).is_err() {
            break;
        }
    }
    for stream in [from, to] {
        // The other thread may have done it.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Two prefills and two decodes, of which the second cannot reach the first prefill.
struct PartitionedCluster {
    fleet: TestCluster,
    _p1: ServeProcess,
    _p2: ServeProcess,
    _d1: ServeProcess,
    d2: ServeProcess,
    _heart: FleetHeartbeat,
}

impl PartitionedCluster {
    fn new(policy: &str) -> PartitionedCluster {
        let fleet = TestCluster::new(&[]);
        let times = |times| ["--on-load-failure", policy, "--set", times];
        let p1 = ServeProcess::serve(&["--role", "prefill", "--mode", "push", "--set", PATIENT]);
        let p2 = fleet.serve("prefill", "push", &["--set", PATIENT]);
        let d1 = fleet.serve("decode", "push", &times(PATIENT));
        // Its hello to the first prefill has to end before the test does.
        let d2 = fleet.serve("decode", "push", &times(KEEN));
        let name = |of: &ServeProcess| of.text("handshake").trim_start_matches("tcp://").to_owned();
        let control = relay(&name(&p1), &name(&d2));
        let told = registration(&p1, Role::Prefill, Mode::Push, &control);
        let heart = FleetHeartbeat::beat(fleet.discovery(), told);
        fleet.ready(4);
        PartitionedCluster { fleet, _p1: p1, _p2: p2, _d1: d1, d2, _heart: heart }
    }

    fn is_suspect(&self, worker: &Value) -> bool {
        worker["http"] == self.d2.text("http") && worker["state"] != "ready"
    }
}

/// Prompts that were computed by the decode, of so many.
fn recomputed(cut: &PartitionedCluster, count: u32, more: &[(&str, Value)]) -> u32 {
    let answers = (0..count).map(|seed| cut.fleet.ask(seed, more));
    let judged = answers.map(|(status, body)| {
        assert_eq!(status, 200, "{body}");
        u32::from(body.contains("\"failed\""))
    });
    judged.sum()
}

#[test]
fn with_recompute_the_pair_is_passed_over() {
    let cut = PartitionedCluster::new("recompute");
    let heard = |kind| format!("kvferry_router_inputs_total{{machine=\"router\",kind=\"{kind}\"}}");
    // Before it is known, and once more if it is tried again.
    let count = recomputed(&cut, 40, &[]);
    assert!((1..=2).contains(&count), "{count} of 40 went without their KV");
    assert_eq!(cut.fleet.metric(&heard("LegRecomputedApart")), u64::from(count));
    assert_eq!(
        metric(&cut.d2, "kvferry_kv_recomputed_total{cause=\"unreachable\"}"),
        u64::from(count)
    );
    assert!(!cut.fleet.workers().iter().any(|it| cut.is_suspect(it)));
}

#[test]
fn a_stream_tells_of_it_as_well() {
    let cut = PartitionedCluster::new("recompute");
    let count = recomputed(&cut, 40, &[("stream", json!(true))]);
    assert!((1..=2).contains(&count), "{count} of 40 went without their KV");
}

#[test]
fn with_fail_the_decode_is_not_blamed() {
    let cut = PartitionedCluster::new("fail");
    assert_eq!(recomputed(&cut, 40, &[]), 0);
    let failed = "kvferry_router_legs_total{role=\"decode\",outcome=\"failed\"}";
    assert!((1..=2).contains(&cut.fleet.metric(failed)), "each was tried with another pair");
    assert_eq!(cut.fleet.metric("kvferry_router_suspicions_total"), 0);
    assert!(!cut.fleet.workers().iter().any(|it| cut.is_suspect(it)));
}
