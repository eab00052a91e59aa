//! `kvferry host` beside two engines that this test plays: their schedulers, workers and memory.

use engine::core::dialect::moriio::address::ZmqAddress;
use engine::core::ids::{StepId, TransferKey};
use engine::core::layout::BlockList;
use engine::core::message::{
    Chunk, DecodeAnswer, DecodeHook, DecodeLeg, FinishReason, Mode, PrefillAnswer, PrefillHook,
    PrefillLeg, Role,
};
use engine::fabric::{Endpoint, Memory};
use fabric_host::{HugePages, Pool};
use kvferry::embed::proto::{FromHost, Hello, ToHost, VERSION, Who};
use kvferry::embed::record::{Ended, Outcome};
use kvferry::embed::settings::{Settings, TransferPlace};
use kvferry::embed::spec::{Engine, LayerGroup, Region, Tensor, Worker};
use kvferry::embed::{Link, Transfers};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use TransferPlace::{Sidecar, Worker as InWorker};

const PATIENCE: Duration = Duration::from_secs(30);
const BLOCKS: u64 = 16;
/// Bytes of a block in a layer: 2 heads, 32 tokens, 8 elements of 4 bytes.
const BLOCK: u64 = 2 * 32 * 8 * 4;
const LAYERS: [&str; 2] = ["layers.0.attn", "layers.1.attn"];

/// A host, ended with the test.
struct Host {
    child: Child,
    socket: PathBuf,
}

/// A path for a socket of a test.
fn place(name: &str) -> PathBuf {
    let socket = format!("kvferry-test-{}-{name}.sock", std::process::id());
    std::env::temp_dir().join(socket)
}

fn spawn(socket: &Path, set: Option<(&str, &str)>) -> Child {
    Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["host", "--log-level", "warn", "--socket"])
        .arg(socket)
        .envs(set)
        .stdin(Stdio::null())
        .spawn()
        .expect("the binary runs")
}

impl Host {
    fn start(name: &str) -> Host {
        Host::with(name, None)
    }

    fn with(name: &str, set: Option<(&str, &str)>) -> Host {
        let socket = place(name);
        let _ = std::fs::remove_file(&socket);
        Host::listening(spawn(&socket, set), socket)
    }

    /// One with an endpoint for its metrics, and where that is.
    fn with_metrics(name: &str) -> (Host, SocketAddr) {
        let socket = place(name);
        let _ = std::fs::remove_file(&socket);
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(["host", "--metrics", "127.0.0.1:0", "--socket"])
            .arg(&socket)
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
        (Host::listening(child, socket), at)
    }

    fn listening(child: Child, socket: PathBuf) -> Host {
        let start = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(start.elapsed() < PATIENCE, "no host");
            std::thread::yield_now();
        }
        Host { child, socket }
    }

    fn connect(&self, who: Who) -> Link {
        Link::connect(&self.socket, who).expect("the host listens")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An engine with one worker.
struct Rig {
    scheduler: Link,
    worker: Link,
    /// The transfer actor, if it is in the worker.
    transfers: Option<Transfers>,
    groups: usize,
    pool: Pool,
    address: ZmqAddress,
}

fn engine(role: Role, mode: Mode, transfer: TransferPlace) -> Engine {
    let layers = LAYERS.iter().map(|name| (*name).into()).collect();
    Engine {
        role,
        model: "m".into(),
        tp: 1,
        dp: (0, 1),
        kv_heads: 2,
        latent: false,
        packed: true,
        groups: vec![LayerGroup { window: None, block_tokens: 32, layers }],
        settings: Settings { read_mode: mode == Mode::Pull, transfer, ..Settings::default() },
    }
}

/// Its blocks have `rows` tokens.
fn worker(pool: &Pool, rows: u64) -> Worker {
    let Memory::MemFd { fd, len } = pool.memory() else { panic!("pools are memory files") };
    let base = pool.start() as u64;
    let tensor = |(n, name): (u64, &&str)| Tensor {
        layer: (**name).into(),
        start: base + n * BLOCKS * BLOCK,
        shape: vec![BLOCKS * 32 / rows, 2, rows, 8],
        stride: vec![2 * rows * 8, rows * 8, 8, 1],
        element: 4,
    };
    Worker {
        rank: 0,
        pid: std::process::id(),
        regions: vec![Region { base, len, file: Some(fd) }],
        tensors: (0..).zip(&LAYERS).map(tensor).collect(),
    }
}

/// The next thing that the host says, unless `skip` says that it does not matter.
fn next(link: &mut Link, mut skip: impl FnMut(&FromHost) -> bool) -> FromHost {
    let mut heard = Vec::new();
    loop {
        link.wait(PATIENCE, &mut heard).expect("the host says something");
        heard.retain(|message| !skip(message));
        if !heard.is_empty() {
            assert_eq!(heard.len(), 1, "{heard:?}");
            return heard.remove(0);
        }
    }
}

impl Rig {
    fn start(host: &Host, role: Role, mode: Mode) -> Rig {
        Rig::start_with(host, role, mode, Sidecar)
    }

    fn start_with(host: &Host, role: Role, mode: Mode, transfer: TransferPlace) -> Rig {
        Rig::of(host, engine(role, mode, transfer))
    }

    fn of(host: &Host, engine: Engine) -> Rig {
        let (transfer, groups) = (engine.settings.transfer, engine.groups.len());
        let pool = Pool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
        let rows = engine.groups[0].block_tokens.into();
        let mut worker = host.connect(Who::Worker(Box::new(worker(&pool, rows))));
        let mut scheduler = host.connect(Who::Scheduler(Box::new(engine)));
        let transfers = (transfer == InWorker)
            .then(|| Transfers::start(host.socket.clone(), 0).expect("a thread"));
        let FromHost::Ready { address, .. } = next(&mut scheduler, |_| false) else { panic!() };
        assert!(matches!(next(&mut worker, |_| false), FromHost::Ready { .. }));
        Rig { scheduler, worker, transfers, groups, pool, address }
    }

    fn block(&mut self, layer: u64, block: u32) -> &mut [u8] {
        let at = layer * BLOCKS * BLOCK + u64::from(block) * BLOCK;
        // SAFETY: Inside the pool; the test looks when nothing is under way.
        unsafe {
            std::slice::from_raw_parts_mut(self.pool.start().add(at as usize), BLOCK as usize)
        }
    }

    fn tell(&mut self, message: &ToHost) {
        self.scheduler.send(message).expect("the host hears");
    }
}

fn arrived(request: &str, wanted: &str, leg: &impl serde::Serialize) -> ToHost {
    let params = serde_json::json!({ wanted: true, "kvferry": leg });
    ToHost::Arrived { request: request.into(), params: params.to_string().into(), tokens: 40 }
}

/// True for what is only told for metrics; transfers that ended are kept.
fn is_stats(message: &FromHost, ended: &mut Vec<Ended>) -> bool {
    if let FromHost::Ended(one) = message {
        ended.push(one.clone());
    }
    matches!(message, FromHost::Ended(_) | FromHost::Kept { .. } | FromHost::Moved(_))
}

/// A prompt of 40 tokens in two blocks is to go from one engine to the other; what the decode is told
/// of it.
fn load(p: &mut Rig, d: &mut Rig, mode: Mode, ended: &mut Vec<Ended>) -> FromHost {
    arrive(p, d, mode);
    let allocate = next(&mut d.scheduler, |message| is_stats(message, ended));
    assert!(matches!(allocate, FromHost::Decode(DecodeAnswer::Allocate { .. })), "{allocate:?}");
    let blocks = vec![BlockList::new(vec![7, 1]); d.groups];
    let request = "d-1".into();
    d.tell(&ToHost::Decode(DecodeHook::Allocated { request, computed: 0, blocks }));
    next(&mut d.scheduler, |message| is_stats(message, ended))
}

/// The prefill computes it, and the decode has no blocks yet.
fn arrive(p: &mut Rig, d: &mut Rig, mode: Mode) {
    let key = TransferKey { id: "tx-1".into(), prompt: 0 };
    let leg = PrefillLeg { key: key.clone(), siblings: 1, mode, life: None, moriio: None };
    p.tell(&arrived("p-1", "do_remote_decode", &leg));
    let control = Endpoint::tcp(&p.address.host, p.address.handshake as u16);
    let prefill = p.address.engine();
    let leg = DecodeLeg { key, sibling: 0, mode, prefill, control, life: None, moriio: None };
    d.tell(&arrived("d-1", "do_remote_prefill", &leg));
    let blocks = vec![BlockList::new(vec![3, 5]); p.groups];
    let chunk = Chunk { request: "p-1".into(), from: 0, to: 40, blocks };
    p.tell(&ToHost::Prefill(PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] }));
    for (layer, block) in [(0, 3), (0, 5), (1, 3), (1, 5)] {
        p.block(layer, block).fill(layer as u8 * 16 + block as u8);
    }
    for layers in [1, 2] {
        match &p.transfers {
            Some(transfers) => transfers.layers(StepId(1), layers),
            None => {
                let message = ToHost::Layers { step: StepId(1), layers };
                p.worker.send(&message).expect("the host hears");
            }
        }
    }
    let (request, reason) = ("p-1".into(), FinishReason::Length);
    p.tell(&ToHost::Prefill(PrefillHook::Finished { request, reason }));
}

/// The same, all of it; what both schedulers are told for metrics.
fn transfer(p: &mut Rig, d: &mut Rig, mode: Mode) -> (Vec<Ended>, Vec<Ended>) {
    let (mut of_p, mut of_d) = (Vec::new(), Vec::new());
    let loaded = load(p, d, mode, &mut of_d);
    assert!(matches!(loaded, FromHost::Decode(DecodeAnswer::Loaded { .. })), "{loaded:?}");
    for (layer, block, from) in [(0, 7, 3), (0, 1, 5), (1, 7, 3), (1, 1, 5)] {
        let (moved, rest) = d.block(layer, block).split_at(32);
        // All tokens of the first block, 8 of the second: those are in the first rows of each head.
        assert!(
            moved.iter().all(|byte| *byte == layer as u8 * 16 + from),
            "{mode} {layer} {block}"
        );
        assert!(block != 7 || rest.iter().all(|byte| *byte == layer as u8 * 16 + from));
    }
    let free = next(&mut p.scheduler, |message| is_stats(message, &mut of_p));
    let FromHost::Prefill(PrefillAnswer::SourceFree { failure: None, .. }) = free else {
        panic!("{free:?}")
    };
    let (request, reason) = ("d-1".into(), FinishReason::Length);
    d.tell(&ToHost::Decode(DecodeHook::Finished { request, reason }));
    (of_p, of_d)
}

fn hand_over(mode: Mode, [at_p, at_d]: [TransferPlace; 2]) {
    let hosts = ["p", "d"].map(|name| Host::start(&format!("{mode}-{at_p}-{at_d}-{name}")));
    let mut p = Rig::start_with(&hosts[0], Role::Prefill, mode, at_p);
    let mut d = Rig::start_with(&hosts[1], Role::Decode, mode, at_d);
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
        let hosts = ["p", "d"].map(|name| Host::start(&format!("packed-{mode}-{name}")));
        let mut p = Rig::of(&hosts[0], windowed(Role::Prefill));
        let mut d = Rig::of(&hosts[1], windowed(Role::Decode));
        transfer(&mut p, &mut d, mode);
    }
}

#[test]
fn packed_blocks_of_two_sizes_are_a_failure_that_says_so() {
    for mode in [Mode::Push, Mode::Pull] {
        let hosts = ["p", "d"].map(|name| Host::start(&format!("sizes-{mode}-{name}")));
        let mut p = Rig::start(&hosts[0], Role::Prefill, mode);
        let mut of_d = engine(Role::Decode, mode, Sidecar);
        of_d.groups[0].block_tokens = 64;
        let mut d = Rig::of(&hosts[1], of_d);
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
        Host::with("paths-p", Some(("KVFERRY_HOST_PATHS", "tcp"))),
        Host::with("paths-d", Some(("KVFERRY_HOST_CONFIG", file.to_str().expect("UTF-8")))),
    ];
    let mut p = Rig::start(&hosts[0], Role::Prefill, Mode::Pull);
    let mut d = Rig::start(&hosts[1], Role::Decode, Mode::Pull);
    let answer = load(&mut p, &mut d, Mode::Pull, &mut Vec::new());
    let told = format!("{answer:?}");
    assert!(told.contains("both sides allow only []"), "{told}");
}

#[test]
fn parameters_that_cannot_be_used_cost_their_request_only() {
    let host = Host::start("params");
    let mut rig = Rig::start(&host, Role::Decode, Mode::Push);
    let (request, params) = ("r".into(), r#"{"do_remote_prefill": true}"#.into());
    rig.tell(&ToHost::Arrived { request, params, tokens: 1 });
    let mut ended = Vec::new();
    let answer = next(&mut rig.scheduler, |message| is_stats(message, &mut ended));
    let FromHost::Unusable { request, why } = answer else { panic!("{answer:?}") };
    assert!(&*request.0 == "r" && !why.is_empty(), "{why}");
    let [Ended { outcome: Outcome::Failed { cause, .. }, .. }] = &ended[..] else {
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

fn refusal(link: &mut Link) -> String {
    match next(link, |_| false) {
        FromHost::Refused { why } => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_engine_that_cannot_be_served_is_told_why() {
    let host = Host::start("refused");
    let pool = Pool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
    let mut spec = worker(&pool, 32);
    spec.tensors.pop();
    let mut worker = host.connect(Who::Worker(Box::new(spec)));
    let engine = engine(Role::Prefill, Mode::Push, Sidecar);
    let mut scheduler = host.connect(Who::Scheduler(Box::new(engine)));
    let why = refusal(&mut scheduler);
    assert!(why.contains("layers.1.attn"), "{why}");
    assert_eq!(refusal(&mut worker), why);
}

#[test]
fn a_second_scheduler_and_another_version_are_refused() {
    let host = Host::start("second");
    let rig = Rig::start(&host, Role::Prefill, Mode::Push);
    let other = engine(Role::Prefill, Mode::Push, Sidecar);
    let mut second = host.connect(Who::Scheduler(Box::new(other.clone())));
    assert!(refusal(&mut second).contains("give each engine its own"));
    let mut stream = UnixStream::connect(&host.socket).expect("the host listens");
    let hello = Hello { version: VERSION + 1, who: Who::Scheduler(Box::new(other)) };
    let bytes = rmp_serde::to_vec(&hello).expect("it encodes");
    stream.write_all(&(bytes.len() as u32).to_be_bytes()).expect("the host reads");
    stream.write_all(&bytes).expect("the host reads");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer and the end");
    let Ok(FromHost::Refused { why }) = rmp_serde::from_slice(&answer[4..]) else { panic!() };
    assert!(why.contains(&format!("version {}", VERSION + 1)), "{why}");
    drop(rig);
}

/// All parts of an engine may start a host when theirs was killed.
#[test]
fn of_many_hosts_one_takes_over_a_path_that_a_killed_one_left() {
    let mut first = Host::start("left");
    first.child.kill().expect("it runs");
    first.child.wait().expect("it ends");
    assert!(first.socket.exists());
    let start = || Host { child: spawn(&first.socket, None), socket: first.socket.clone() };
    let mut hosts: Vec<Host> = (0..8).map(|_| start()).collect();
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

fn export(sockets: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.arg("export");
    for socket in sockets {
        command.arg("--live").arg(socket);
    }
    command.output().expect("the binary runs")
}

/// The events of the trace that live hosts give.
fn events(sockets: &[&PathBuf]) -> Vec<Value> {
    let sockets: Vec<_> = sockets.iter().map(|socket| socket.as_path()).collect();
    let output = export(&sockets);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let trace: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    trace["traceEvents"].as_array().expect("events").clone()
}

/// The page with the metrics.
fn scrape(at: SocketAddr) -> String {
    let mut stream = TcpStream::connect(at).expect("the host serves metrics");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    let request = "GET /metrics HTTP/1.1\r\nHost: kvferry\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("the host reads");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("a page");
    assert!(page.starts_with("HTTP/1.1 200 OK"), "{page}");
    page
}

fn series(page: &str, line: &str) {
    assert!(page.lines().any(|have| have == line), "no line {line} in\n{page}");
}

/// Bytes of a prompt: blocks are moved whole.
const BYTES: u64 = 2 * LAYERS.len() as u64 * BLOCK;

/// Slices of a process of a trace: name, and all arguments.
fn slices(events: &[Value], process: u32) -> Vec<(&str, &Value)> {
    let of_process = events.iter().filter(|event| event["pid"] == process && event["ph"] == "X");
    of_process.map(|event| (event["name"].as_str().expect("a name"), &event["args"])).collect()
}

fn observe(mode: Mode, place: TransferPlace) {
    let (p_host, p_metrics) = Host::with_metrics(&format!("observed-{mode}-{place}-p"));
    let (d_host, d_metrics) = Host::with_metrics(&format!("observed-{mode}-{place}-d"));
    assert!(scrape(p_metrics).contains("# EOF"), "an empty page without an engine");
    let mut p = Rig::start_with(&p_host, Role::Prefill, mode, place);
    let mut d = Rig::start_with(&d_host, Role::Decode, mode, place);
    let sockets = [&p_host.socket, &d_host.socket];
    // Who looks on is no part of the engine: its host goes on.
    assert_eq!(slices(&events(&sockets), 1), []);
    let (of_p, of_d) = transfer(&mut p, &mut d, mode);
    let moved = |ended: &[Ended]| -> u64 {
        assert_eq!(ended.len(), 1, "{ended:?}");
        assert_eq!(ended[0].outcome, Outcome::Done);
        ended[0].bytes.iter().map(|(_, bytes)| bytes).sum()
    };
    let is_push = mode == Mode::Push;
    assert_eq!((moved(&of_p), moved(&of_d)), (if is_push { BYTES } else { 0 }, BYTES));

    let events = events(&sockets);
    let (p_slices, d_slices) = (slices(&events, 1), slices(&events, 2));
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
