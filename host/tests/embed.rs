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
use kvferry::embed::Link;
use kvferry::embed::proto::{FromHost, Hello, ToHost, VERSION, Who};
use kvferry::embed::settings::Settings;
use kvferry::embed::spec::{Engine, LayerGroup, Region, Tensor, Worker};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
        let socket = format!("kvferry-test-{}-{name}.sock", std::process::id());
        let socket = std::env::temp_dir().join(socket);
        let _ = std::fs::remove_file(&socket);
        let child = spawn(&socket, set);
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
    pool: Pool,
    address: ZmqAddress,
}

fn engine(role: Role, mode: Mode) -> Engine {
    let layers = LAYERS.iter().map(|name| (*name).into()).collect();
    Engine {
        role,
        model: "m".into(),
        tp: 1,
        dp: (0, 1),
        kv_heads: 2,
        latent: false,
        groups: vec![LayerGroup { window: None, block_tokens: 32, layers }],
        settings: Settings { read_mode: mode == Mode::Pull, ..Settings::default() },
    }
}

fn worker(pool: &Pool) -> Worker {
    let Memory::MemFd { fd, len } = pool.memory() else { panic!("pools are memory files") };
    let base = pool.start() as u64;
    let tensor = |(n, name): (u64, &&str)| Tensor {
        layer: (**name).into(),
        start: base + n * BLOCKS * BLOCK,
        shape: vec![BLOCKS, 2, 32, 8],
        stride: vec![BLOCK / 4, 32 * 8, 8, 1],
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
fn next(link: &mut Link, skip: impl Fn(&FromHost) -> bool) -> FromHost {
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
        let pool = Pool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
        let mut worker = host.connect(Who::Worker(Box::new(worker(&pool))));
        let mut scheduler = host.connect(Who::Scheduler(Box::new(engine(role, mode))));
        let FromHost::Ready { address, .. } = next(&mut scheduler, |_| false) else { panic!() };
        assert!(matches!(next(&mut worker, |_| false), FromHost::Ready { .. }));
        Rig { scheduler, worker, pool, address }
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

/// A prompt of 40 tokens in two blocks is to go from one engine to the other; with what the decode
/// is told of it.
fn load(hosts: &[Host; 2], mode: Mode) -> (Rig, Rig, FromHost) {
    let mut p = Rig::start(&hosts[0], Role::Prefill, mode);
    let mut d = Rig::start(&hosts[1], Role::Decode, mode);
    let key = TransferKey { id: "tx-1".into(), prompt: 0 };
    let leg = PrefillLeg { key: key.clone(), siblings: 1, mode, life: None, moriio: None };
    p.tell(&arrived("p-1", "do_remote_decode", &leg));
    let control = Endpoint::tcp(&p.address.host, p.address.handshake as u16);
    let prefill = p.address.engine();
    let leg = DecodeLeg { key, sibling: 0, mode, prefill, control, life: None, moriio: None };
    d.tell(&arrived("d-1", "do_remote_prefill", &leg));
    let blocks = vec![BlockList::new(vec![3, 5])];
    let chunk = Chunk { request: "p-1".into(), from: 0, to: 40, blocks };
    p.tell(&ToHost::Prefill(PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] }));
    for (layer, block) in [(0, 3), (0, 5), (1, 3), (1, 5)] {
        p.block(layer, block).fill(layer as u8 * 16 + block as u8);
    }
    p.worker.send(&ToHost::Layers { step: StepId(1), layers: 1 }).expect("the host hears");
    p.worker.send(&ToHost::Layers { step: StepId(1), layers: 2 }).expect("the host hears");
    let (request, reason) = ("p-1".into(), FinishReason::Length);
    p.tell(&ToHost::Prefill(PrefillHook::Finished { request, reason }));
    let allocate = next(&mut d.scheduler, |_| false);
    assert!(matches!(allocate, FromHost::Decode(DecodeAnswer::Allocate { .. })), "{allocate:?}");
    let blocks = vec![BlockList::new(vec![7, 1])];
    let request = "d-1".into();
    d.tell(&ToHost::Decode(DecodeHook::Allocated { request, computed: 0, blocks }));
    let loaded = next(&mut d.scheduler, |_| false);
    (p, d, loaded)
}

fn hand_over(mode: Mode) {
    let hosts = ["p", "d"].map(|name| Host::start(&format!("{mode}-{name}")));
    let (mut p, mut d, loaded) = load(&hosts, mode);
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
    let free = next(&mut p.scheduler, |_| false);
    let FromHost::Prefill(PrefillAnswer::SourceFree { failure: None, .. }) = free else {
        panic!("{free:?}")
    };
    let (request, reason) = ("d-1".into(), FinishReason::Length);
    d.tell(&ToHost::Decode(DecodeHook::Finished { request, reason }));
    drop((p, d));
    for mut host in hosts {
        // It ends with its engine, and nothing is left.
        assert!(host.child.wait().expect("a child").success());
        assert!(!host.socket.exists());
    }
}

#[test]
fn a_pushed_prompt_is_handed_over() {
    hand_over(Mode::Push);
}

#[test]
fn a_pulled_prompt_is_handed_over() {
    hand_over(Mode::Pull);
}

#[test]
fn the_paths_of_the_configuration_are_those_of_the_planes() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host.toml");
    std::fs::write(&file, "paths = [\"shared-memory\"]").expect("a file can be written");
    let hosts = [
        Host::with("paths-p", Some(("KVFERRY_HOST_PATHS", "tcp"))),
        Host::with("paths-d", Some(("KVFERRY_HOST_CONFIG", file.to_str().expect("UTF-8")))),
    ];
    let (_p, _d, answer) = load(&hosts, Mode::Pull);
    let told = format!("{answer:?}");
    assert!(told.contains("both sides allow only []"), "{told}");
}

#[test]
fn parameters_that_cannot_be_used_cost_their_request_only() {
    let host = Host::start("params");
    let mut rig = Rig::start(&host, Role::Decode, Mode::Push);
    let (request, params) = ("r".into(), r#"{"do_remote_prefill": true}"#.into());
    rig.tell(&ToHost::Arrived { request, params, tokens: 1 });
    let answer = next(&mut rig.scheduler, |_| false);
    let FromHost::Unusable { request, why } = answer else { panic!("{answer:?}") };
    assert!(&*request.0 == "r" && !why.is_empty(), "{why}");
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
    let mut spec = worker(&pool);
    spec.tensors.pop();
    let mut worker = host.connect(Who::Worker(Box::new(spec)));
    let engine = engine(Role::Prefill, Mode::Push);
    let mut scheduler = host.connect(Who::Scheduler(Box::new(engine)));
    let why = refusal(&mut scheduler);
    assert!(why.contains("layers.1.attn"), "{why}");
    assert_eq!(refusal(&mut worker), why);
}

#[test]
fn a_second_scheduler_and_another_version_are_refused() {
    let host = Host::start("second");
    let rig = Rig::start(&host, Role::Prefill, Mode::Push);
    let other = engine(Role::Prefill, Mode::Push);
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
