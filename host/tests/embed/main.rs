//! `kvferry host` beside two engines that this test plays: their schedulers, workers and memory.

#[path = "../spans/collector.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod collector;
mod device;
mod observed;
mod rig;
mod settings;
#[path = "../sidecar_process/mod.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod sidecar_process;
mod spans;
mod versions;

use kvferry::sidecar::SidecarClient;
use kvferry::sidecar::proto::{ClientIdentity, ConnectorHello, FromHost, OLDEST, ToHost, VERSION};
use kvferry::sidecar::record::{TransferOutcome, TransferSummary};
use kvferry::sidecar::settings::TransferPlacement;
use kvferry::sidecar::spec::ServingEngine;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::message::{DecodeAnswer, Mode, Role};
use kvferry_fabric_host::{HugePages, MemfdPool};
use observed::events;
use rig::*;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

fn hand_over(mode: Mode, [at_p, at_d]: [TransferPlacement; 2]) {
    let hosts =
        ["p", "d"].map(|name| SidecarProcess::start(&format!("{mode}-{at_p}-{at_d}-{name}")));
    let mut p = SidecarFixture::start_with(&hosts[0], Role::Prefill, mode, at_p);
    let mut d = SidecarFixture::start_with(&hosts[1], Role::Decode, mode, at_d);
    transfer(&mut p, &mut d, mode);
    drop((p, d));
    for mut host in hosts {
        // It ends with its engine, and nothing is left.
        assert!(host.child.wait().expect("a child").success());
        assert!(!host.socket.exists());
    }
}

#[test]
fn a_pushed_prompt_is_handed_over() {
    hand_over(Mode::Push, [Sidecar, Sidecar]);
}

#[test]
fn a_pulled_prompt_is_handed_over() {
    hand_over(Mode::Pull, [Sidecar, Sidecar]);
}

#[test]
fn transfer_actors_in_workers_push() {
    hand_over(Mode::Push, [InWorker, InWorker]);
    hand_over(Mode::Push, [Sidecar, InWorker]);
    // What a plane in a worker has to say reaches somebody.
    assert!(tracing::dispatcher::has_been_set());
}

#[test]
fn transfer_actors_in_workers_pull() {
    hand_over(Mode::Pull, [InWorker, InWorker]);
    hand_over(Mode::Pull, [InWorker, Sidecar]);
}

/// The first layer has a window that begins within the first block.
#[test]
fn packed_blocks_are_moved_whole() {
    for mode in [Mode::Push, Mode::Pull] {
        let windowed = |role| {
            let mut engine = engine(role, mode, Sidecar);
            let mut all = engine.groups[0].clone();
            engine.groups[0].window = Some(16);
            all.layers = engine.groups[0].layers.split_off(1);
            engine.groups.push(all);
            engine
        };
        let hosts = ["p", "d"].map(|name| SidecarProcess::start(&format!("packed-{mode}-{name}")));
        let mut p = SidecarFixture::of(&hosts[0], windowed(Role::Prefill));
        let mut d = SidecarFixture::of(&hosts[1], windowed(Role::Decode));
        transfer(&mut p, &mut d, mode);
    }
}

#[test]
fn packed_blocks_of_two_sizes_are_a_failure_that_says_so() {
    for mode in [Mode::Push, Mode::Pull] {
        let hosts = ["p", "d"].map(|name| SidecarProcess::start(&format!("sizes-{mode}-{name}")));
        let mut p = SidecarFixture::start(&hosts[0], Role::Prefill, mode);
        let mut of_d = engine(Role::Decode, mode, Sidecar);
        of_d.groups[0].block_tokens = 64;
        let mut d = SidecarFixture::of(&hosts[1], of_d);
        arrive(&mut p, &mut d, mode);
        let answer = next(&mut d.scheduler, |message| is_stats(message, &mut Vec::new()));
        let FromHost::Decode(DecodeAnswer::Rejected { failure, .. }) = answer else {
            panic!("{answer:?}")
        };
        let why = failure.to_string();
        assert!(why.contains("block size of group 0, with packed blocks"), "{why}");
    }
}

#[test]
fn the_paths_of_the_configuration_are_those_of_the_planes() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host.toml");
    std::fs::write(&file, "paths = [\"shared-memory\"]").expect("a file can be written");
    let hosts = [
        SidecarProcess::with("paths-p", Some(("KVFERRY_HOST_PATHS", "tcp"))),
        SidecarProcess::with(
            "paths-d",
            Some(("KVFERRY_HOST_CONFIG", file.to_str().expect("UTF-8"))),
        ),
    ];
    let mut p = SidecarFixture::start(&hosts[0], Role::Prefill, Mode::Pull);
    let mut d = SidecarFixture::start(&hosts[1], Role::Decode, Mode::Pull);
    let answer = load(&mut p, &mut d, Mode::Pull, &mut Vec::new());
    let told = format!("{answer:?}");
    assert!(told.contains("both sides allow only []"), "{told}");
}

#[test]
fn parameters_that_cannot_be_used_cost_their_request_only() {
    let host = SidecarProcess::start("params");
    let mut rig = SidecarFixture::start(&host, Role::Decode, Mode::Push);
    let (request, params) = ("r".into(), r#"{"do_remote_prefill": true}"#.into());
    rig.tell(&ToHost::Arrived { request, params, tokens: 1, prompt_hash: None });
    let mut ended = Vec::new();
    let answer = next(&mut rig.scheduler, |message| is_stats(message, &mut ended));
    let FromHost::Unusable { request, why } = answer else { panic!("{answer:?}") };
    assert!(&*request.0 == "r" && !why.is_empty(), "{why}");
    let [TransferSummary { outcome: TransferOutcome::Failed { cause, .. }, .. }] = &ended[..]
    else {
        panic!("{ended:?}")
    };
    assert_eq!(&**cause, "unusable-params");
    let events = events(&[&host.socket]);
    let failed = events.iter().find(|event| event["ph"] == "i").expect("a failure");
    assert_eq!(
        (&failed["name"], &failed["args"]["why"]),
        (&"failed: unusable-params".into(), &why.into())
    );
}

fn refusal(link: &mut SidecarClient) -> String {
    match next(link, |_| false) {
        FromHost::Refused { why } => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_engine_that_cannot_be_served_is_told_why() {
    let host = SidecarProcess::start("refused");
    let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
    let mut spec = worker(&pool, 32);
    spec.tensors.pop();
    let mut worker = host.connect(ClientIdentity::Worker(Box::new(spec)));
    let engine = engine(Role::Prefill, Mode::Push, Sidecar);
    let mut scheduler = host.connect(ClientIdentity::Scheduler(Box::new(engine)));
    let why = refusal(&mut scheduler);
    assert!(why.contains("layers.1.attn"), "{why}");
    assert_eq!(refusal(&mut worker), why);
}

/// Its transfer actor cannot have its plane.
#[test]
fn an_engine_whose_worker_cannot_begin_is_told_why() {
    let host = SidecarProcess::start("unable");
    let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
    let mut worker = host.connect(ClientIdentity::Worker(Box::new(worker(&pool, 32))));
    let mut scheduler = host.connect(ClientIdentity::Scheduler(Box::new(engine(
        Role::Prefill,
        Mode::Push,
        TransferPlacement::Worker,
    ))));
    let mut transfer = host.connect(ClientIdentity::Transfer { rank: 0, last_error: None });
    assert!(matches!(next(&mut transfer, |_| false), FromHost::Begin(_)));
    let why = "rank 0: no plane".to_owned();
    transfer.send(&ToHost::Unable { why: why.clone() }).expect("the host hears");
    // It is not said to be served before.
    assert_eq!([refusal(&mut scheduler), refusal(&mut worker)], [why.clone(), why]);
}

#[test]
fn a_second_scheduler_and_another_version_are_refused() {
    let host = SidecarProcess::start("second");
    let rig = SidecarFixture::start(&host, Role::Prefill, Mode::Push);
    let other = engine(Role::Prefill, Mode::Push, Sidecar);
    let mut second = host.connect(ClientIdentity::Scheduler(Box::new(other.clone())));
    assert!(refusal(&mut second).contains("give each engine its own"));
    let mut stream = UnixStream::connect(&host.socket).expect("the host listens");
    let who = ClientIdentity::Scheduler(Box::new(other));
    let hello = ConnectorHello { version: VERSION + 1, who, newest: Some(VERSION + 3) };
    let bytes = rmp_serde::to_vec(&hello).expect("it encodes");
    stream.write_all(&(bytes.len() as u32).to_be_bytes()).expect("the host reads");
    stream.write_all(&bytes).expect("the host reads");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer and the end");
    let Ok(FromHost::Refused { why }) = rmp_serde::from_slice(&answer[4..]) else { panic!() };
    let ranges = [(VERSION + 1, VERSION + 3), (OLDEST, VERSION)];
    for (oldest, newest) in ranges {
        assert!(why.contains(&format!("{oldest} to {newest}")), "{why}");
    }
    assert!(why.contains("install one version"), "{why}");
    drop(rig);
}

/// All parts of an engine may start a host when theirs was killed.
#[test]
fn of_many_hosts_one_takes_over_a_path_that_a_killed_one_left() {
    let mut first = SidecarProcess::start("left");
    first.child.kill().expect("it runs");
    first.child.wait().expect("it ends");
    assert!(first.socket.exists());
    let start =
        || SidecarProcess { child: spawn(&first.socket, None, &[]), socket: first.socket.clone() };
    let mut hosts: Vec<SidecarProcess> = (0..8).map(|_| start()).collect();
    let begun = Instant::now();
    while hosts.len() > 1 || UnixStream::connect(&first.socket).is_err() {
        assert!(begun.elapsed() < PATIENCE, "{} hosts", hosts.len());
        hosts.retain_mut(|host| match host.child.try_wait().expect("a child") {
            Some(status) => {
                assert_eq!(status.code(), Some(2));
                false
            }
            None => true,
        });
        assert!(!hosts.is_empty(), "nobody took it over");
        std::thread::yield_now();
    }
}

/// A router that listens and does nothing, and an engine that registers with it.
fn routed() -> (zmq::Socket, ServingEngine) {
    let router = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
    router.set_rcvtimeo(PATIENCE.as_millis() as i32).expect("an option of sockets");
    router.bind("tcp://127.0.0.1:*").expect("a free port");
    let at = router.get_last_endpoint().expect("it is bound").expect("UTF-8");
    let mut engine = engine(Role::Decode, Mode::Push, Sidecar);
    engine.settings.proxy_ip = "127.0.0.1".into();
    engine.settings.proxy_ping_port =
        at.rsplit_once(':').expect("a port").1.parse().expect("a port");
    engine.settings.http_port = 1;
    (router, engine)
}

#[test]
fn a_host_tells_whether_its_router_is_there() {
    let (router, engine) = routed();
    let (host, metrics) = SidecarProcess::with_metrics("routed", &[]);
    let _engine = SidecarFixture::of(&host, engine);
    let is = |value: u8| {
        let (line, start) = (format!("kvferry_router_registered {value}"), Instant::now());
        while !scrape(metrics).lines().any(|have| have == line) {
            assert!(start.elapsed() < PATIENCE, "it does not come to {line}");
            std::thread::yield_now();
        }
    };
    is(1);
    drop(router);
    is(0);
}

#[test]
fn a_router_is_told_that_a_host_ends() {
    let (router, engine) = routed();
    let mut host = SidecarProcess::start("drains");
    let _engine = SidecarFixture::of(&host, engine);
    let drains = || {
        let parts = router.recv_multipart(0).expect("it registers");
        matches!(native::decode(&parts[1]), Ok(Frame::Register(told)) if told.draining)
    };
    assert!(!drains());
    let pid = host.child.id().to_string();
    assert!(Command::new("kill").arg(pid).status().expect("kill runs").success());
    while !drains() {}
    assert_eq!(host.child.wait().expect("a child").code(), Some(0));
}

#[test]
fn an_engine_without_one_of_its_ranks_is_told_which() {
    let host = SidecarProcess::start("late-rank");
    let mut engine = engine(Role::Prefill, Mode::Push, Sidecar);
    engine.tp = 2;
    engine.settings.start_timeout = Some(kvferry_engine::core::Nanos(50_000_000));
    let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
    let _worker = host.connect(ClientIdentity::Worker(Box::new(worker(&pool, 32))));
    let mut scheduler = host.connect(ClientIdentity::Scheduler(Box::new(engine)));
    let FromHost::Refused { why } = next(&mut scheduler, |_| false) else { panic!() };
    assert!(why.contains("TP rank 1: vLLM has told of no KV cache yet"), "{why}");
    assert!(why.contains("start_timeout"), "{why}");
}
