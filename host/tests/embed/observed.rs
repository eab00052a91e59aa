//! What hosts tell of their transfers: metrics and traces.

use crate::rig::*;
use kvferry::sidecar::proto::{ClientIdentity, FromHost, ToHost};
use kvferry::sidecar::record::{TransferOutcome, TransferSummary};
use kvferry::sidecar::settings::TransferPlacement;
use kvferry_engine::core::ids::{StepId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{Chunk, Mode, PrefillAnswer, PrefillHook, PrefillLeg, Role};
use kvferry_fabric_host::{HugePages, MemfdPool};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

fn export(sockets: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.arg("export");
    for socket in sockets {
        command.arg("--live").arg(socket);
    }
    command.output().expect("the binary runs")
}

/// The events of the trace that live hosts give.
pub(crate) fn events(sockets: &[&PathBuf]) -> Vec<Value> {
    let sockets: Vec<_> = sockets.iter().map(|socket| socket.as_path()).collect();
    let output = export(&sockets);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let trace: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    trace["traceEvents"].as_array().expect("events").clone()
}

/// Bytes of a prompt: blocks are moved whole.
const BYTES: u64 = 2 * LAYERS.len() as u64 * BLOCK;

/// Slices of a process of a trace: name, and all arguments.
fn slices(events: &[Value], process: u32) -> Vec<(&str, &Value)> {
    let of_process = events.iter().filter(|event| event["pid"] == process && event["ph"] == "X");
    of_process.map(|event| (event["name"].as_str().expect("a name"), &event["args"])).collect()
}

fn observe(mode: Mode, place: TransferPlacement) {
    let (p_host, p_metrics) =
        SidecarProcess::with_metrics(&format!("observed-{mode}-{place}-p"), &[]);
    let (d_host, d_metrics) =
        SidecarProcess::with_metrics(&format!("observed-{mode}-{place}-d"), &[]);
    assert!(scrape(p_metrics).contains("# EOF"), "an empty page without an engine");
    let mut p = SidecarFixture::start_with(&p_host, Role::Prefill, mode, place);
    let mut d = SidecarFixture::start_with(&d_host, Role::Decode, mode, place);
    let sockets = [&p_host.socket, &d_host.socket];
    // Who looks on is no part of the engine: its host goes on.
    assert_eq!(slices(&events(&sockets), 1), []);
    let (of_p, of_d) = transfer(&mut p, &mut d, mode);
    let moved = |ended: &[TransferSummary]| -> u64 {
        assert_eq!(ended.len(), 1, "{ended:?}");
        assert_eq!(ended[0].outcome, TransferOutcome::Done);
        ended[0].bytes.iter().map(|(_, bytes)| bytes).sum()
    };
    let is_push = mode == Mode::Push;
    assert_eq!((moved(&of_p), moved(&of_d)), (if is_push { BYTES } else { 0 }, BYTES));

    let events = events(&sockets);
    let (p_slices, d_slices) = (slices(&events, 1), slices(&events, 2));
    for process in [1, 2] {
        let of_process = events.iter().filter(|event| event["pid"] == process);
        let lane = of_process.filter(|event| event["name"] == "thread_name" && event["tid"] == 0);
        let lanes: Vec<_> = lane.map(|event| &event["args"]["name"]).collect();
        assert_eq!(lanes, ["transfers 0"]);
    }
    let names = |slices: &[(&str, &Value)]| -> Vec<String> {
        slices.iter().map(|(name, _)| (*name).to_owned()).collect()
    };
    assert_eq!(
        names(&p_slices),
        if is_push { ["queued", "transfer"] } else { ["compute", "held"] }
    );
    assert_eq!(names(&d_slices), ["queued", "transfer"]);
    let (mover, other) = if is_push { (&p_slices, &d_slices) } else { (&d_slices, &p_slices) };
    for (_, args) in mover.iter().chain(other) {
        assert_eq!((&args["transfer"], &args["outcome"]), (&"tx-1/0".into(), &"done".into()));
        assert_eq!((&args["tokens"], &args["blocks"]), (&40.into(), &2.into()));
    }
    assert_eq!((&mover[1].1["bytes"], &other[1].1["bytes"]), (&BYTES.into(), &Value::Null));
    assert_eq!(d_slices[1].1["peer"], *p.address.engine().0);

    for (role, page, timed) in
        [("prefill", scrape(p_metrics), is_push), ("decode", scrape(d_metrics), true)]
    {
        let done = format!(r#"role="{role}",mode="{mode}",outcome="done"}} 1"#);
        series(&page, &format!("kvferry_transfers_total{{{done}"));
        series(&page, &format!("kvferry_transfer_duration_seconds_count {}", u8::from(timed)));
        series(&page, &format!("kvferry_transfer_queue_seconds_count {}", u8::from(timed)));
        let side = if (role == "prefill") == is_push { "initiated" } else { "served" };
        let bytes = if side == "initiated" || is_push { BYTES } else { 0 };
        let path = format!(r#"side="{side}",path="shared-memory"}} {bytes}"#);
        series(&page, &format!("kvferry_transfer_bytes_total{{{path}"));
        series(&page, "kvferry_blocks_held 0");
        series(&page, "kvferry_failures_remembered 0");
        let version = env!("CARGO_PKG_VERSION");
        let how = format!(r#"transfer="{place}",memory="memory files",version="{version}"}} 1"#);
        series(&page, &format!(r#"kvferry_info{{backend="host",{how}"#));
    }
}

#[test]
fn a_pushed_prompt_is_seen_in_metrics_and_traces() {
    observe(Mode::Push, Sidecar);
}

#[test]
fn a_pulled_prompt_is_seen_in_metrics_and_traces() {
    observe(Mode::Pull, Sidecar);
}

#[test]
fn what_transfer_actors_in_workers_move_is_seen_in_metrics_and_traces() {
    observe(Mode::Pull, InWorker);
}

#[test]
fn an_export_from_what_is_no_host_says_what_to_do() {
    let socket = place("no-host");
    let _ = std::fs::remove_file(&socket);
    let complain = || {
        let output = export(&[&socket]);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    let none = complain();
    let listener = UnixListener::bind(&socket).expect("a socket");
    let answers: [&[u8]; 2] = [b"", &[0, 0, 0, 1, 0xc1]];
    let server = std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().expect("a connection");
            // The hello is read, so that the end is no reset.
            let mut hello = [0; 4];
            stream.read_exact(&mut hello).expect("a hello");
            let mut hello = vec![0; u32::from_be_bytes(hello) as usize];
            stream.read_exact(&mut hello).expect("a hello");
            stream.write_all(answer).expect("who asked is there");
        }
    });
    let (silent, garbage) = (complain(), complain());
    server.join().expect("it served both");
    let gone = complain();
    std::fs::remove_file(&socket).expect("it is there");
    for (said, expected) in [
        (none, "there is no socket; give the one"),
        (silent, "closed without an answer: no `kvferry host` of this version"),
        (garbage, "use the kvferry of the server"),
        (gone, "nobody listens there; give the socket"),
    ] {
        let begin = format!("error: --live {}: ", socket.display());
        assert!(said.starts_with(&begin) && said.contains(expected), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_preempted_prompt_is_seen_in_metrics() {
    let (host, metrics) = SidecarProcess::with_metrics("preempted", &[]);
    let mut p = SidecarFixture::start(&host, Role::Prefill, Mode::Push);
    let key = TransferKey { id: "tx-1".into(), prompt: 0 };
    let leg = PrefillLeg::new(key, Mode::Push);
    p.tell(&arrived("p-1", "do_remote_decode", &leg));
    let blocks = vec![BlockList::new(vec![3]); p.groups];
    let chunk = Chunk { request: "p-1".into(), from: 0, to: 32, blocks };
    p.tell(&ToHost::Prefill(PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] }));
    p.tell(&ToHost::Prefill(PrefillHook::Preempted { request: "p-1".into() }));
    let safe = next(&mut p.worker, |_| false);
    assert!(matches!(safe, FromHost::Prefill(PrefillAnswer::PreemptionSafe { .. })), "{safe:?}");
    let input = r#"kvferry_inputs_total{machine="prefill",kind="Preempted"} 1"#;
    series(&scrape(metrics), input);
}

#[test]
fn memory_that_is_not_there_is_seen_in_metrics() {
    for (role, machine) in [(Role::Prefill, "prefill"), (Role::Decode, "decode")] {
        let (host, metrics) = SidecarProcess::with_metrics(&format!("unusable-{machine}"), &[]);
        let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
        let mut worker = worker(&pool, 32);
        drop(pool);
        worker.regions[0].file = None;
        let _worker = host.connect(ClientIdentity::Worker(Box::new(worker)));
        let _scheduler = host.connect(ClientIdentity::Scheduler(Box::new(engine(
            role,
            Mode::Push,
            TransferPlacement::Sidecar,
        ))));
        let inputs = [(machine, "RankUnusable"), ("transfer", "Unregistered")].map(|(of, kind)| {
            format!("kvferry_inputs_total{{machine=\"{of}\",kind=\"{kind}\"}} 1\n")
        });
        let start = Instant::now();
        let mut page = scrape(metrics);
        while !inputs.iter().all(|input| page.contains(input)) {
            assert!(start.elapsed() < PATIENCE, "not {inputs:?} but\n{page}");
            std::thread::yield_now();
            page = scrape(metrics);
        }
    }
}
