//! What a proof of the fleet's secret costs where two sides meet: the greeting of host planes by
//! path, until a session is open, and the native hello over ZeroMQ, until it is answered. Without
//! and with a secret in turns, in one process.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::{Geometry, KvGroup};
use kvferry_engine::core::message::{Hello, Role};
use kvferry_engine::fabric::{
    ControlEvent, ControlPlane, DataEvent, DataPlane, Endpoint, LinkId, LinkKind, PeerId,
    RegionDesc, RegionId, SessionId,
};
use kvferry_fabric_host::{DataPath, HostConfig, HostPlane, HugePages, MemfdPool, PeerTrust};
use kvferry_trust::FleetProof;
use kvferry_wire::{ProvenPlane, WireConfig, ZmqPlane};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const ROUNDS: usize = 300;
const REGION: RegionId = RegionId(1);

/// A host plane with memory that is registered.
struct GreetingSide {
    plane: HostPlane,
    desc: RegionDesc,
    _pool: MemfdPool,
}

fn event(plane: &mut HostPlane) -> DataEvent {
    let mut events = Vec::new();
    while events.is_empty() {
        plane.poll(Nanos::ZERO, &mut events);
        std::thread::yield_now();
    }
    events.remove(0)
}

impl GreetingSide {
    fn new(path: DataPath, secret_file: Option<PathBuf>) -> GreetingSide {
        let trust = PeerTrust { secret_file, ..PeerTrust::default() };
        let config =
            HostConfig { paths: vec![path], open_door: true, trust, ..HostConfig::default() };
        let mut plane = HostPlane::new(config).expect("a plane at loopback");
        let pool = MemfdPool::new(1 << 16, HugePages::No).expect("memory");
        plane.register(REGION, pool.memory()).expect("memory is taken");
        match event(&mut plane) {
            DataEvent::Registered { result: Ok(desc), .. } => {
                GreetingSide { plane, desc, _pool: pool }
            }
            other => panic!("{other:?}"),
        }
    }

    /// From naming a peer to the open session with it.
    fn greet(&mut self, far: &GreetingSide) -> Duration {
        let begin = Instant::now();
        self.plane.connect(PeerId(2), &far.plane.address(), 0).expect("a peer");
        self.plane.open(SessionId(1), REGION, PeerId(2), &far.desc).expect("an open is taken");
        match event(&mut self.plane) {
            DataEvent::Opened { result: Ok(()), .. } => begin.elapsed(),
            other => panic!("{other:?}"),
        }
    }
}

/// The control plane of a process.
struct HelloSide {
    plane: ProvenPlane<ZmqPlane>,
    events: Vec<ControlEvent>,
}

impl HelloSide {
    fn new(secret_file: Option<&Path>) -> HelloSide {
        let proof = FleetProof::open(secret_file).expect("a secret");
        let plane = ZmqPlane::new(WireConfig::default()).expect("a plane at loopback");
        HelloSide { plane: ProvenPlane::new(plane, proof, "bench".into()), events: Vec::new() }
    }

    /// The link and the frame that came last, if one came.
    fn heard(&mut self) -> Option<(LinkId, Vec<u8>)> {
        self.plane.poll(Nanos::ZERO, &mut self.events);
        self.events.drain(..).find_map(|event| match event {
            ControlEvent::Frame { link, mut parts } => Some((link, parts.remove(0))),
            _ => None,
        })
    }

    /// From the dial to the answer.
    fn greet(&mut self, far: &mut HelloSide, endpoint: &Endpoint, link: LinkId) -> Duration {
        let said = hello();
        let begin = Instant::now();
        self.plane.dial(link, endpoint, LinkKind::Handshake).expect("a link");
        self.plane.send(link, &[&said]).expect("a hello");
        loop {
            if let Some((link, heard)) = far.heard() {
                let Ok(Frame::Hello(hello)) = native::decode(&heard) else { panic!("no hello") };
                far.plane.send(link, &[&native::encode(&Frame::Welcome(hello))]).expect("sent");
            }
            if let Some((_, heard)) = self.heard() {
                let taken = begin.elapsed();
                assert!(matches!(native::decode(&heard), Ok(Frame::Welcome(_))));
                self.plane.hang_up(link);
                return taken;
            }
            std::thread::yield_now();
        }
    }
}

fn hello() -> Vec<u8> {
    let geometry = Geometry::new("bench", 1, vec![KvGroup::full(16, [0])]);
    native::encode(&Frame::Hello(Box::new(Hello {
        version: native::VERSION,
        version_min: native::VERSION_MIN,
        engine: "decode".into(),
        incarnation: Incarnation(5),
        session: 9,
        expects: "prefill".into(),
        role: Role::Decode,
        capabilities: 3,
        fingerprint: geometry.fingerprint(),
        geometry,
        ranks: Vec::new(),
    })))
}

fn print(name: &str, mut taken: [Vec<Duration>; 2]) {
    taken.iter_mut().for_each(|taken| taken.sort_unstable());
    let at = |which: usize, percent: usize| {
        taken[which][taken[which].len() * percent / 100].as_secs_f64() * 1e6
    };
    println!(
        "{name:16} without: p50 {:7.1} us, p90 {:7.1} us   with a secret: p50 {:7.1} us, p90 {:7.1} \
         us   more: p50 {:6.1} us",
        at(0, 50),
        at(0, 90),
        at(1, 50),
        at(1, 90),
        at(1, 50) - at(0, 50),
    );
}

fn main() {
    let secret = std::env::temp_dir().join(format!("kvferry-bench-secret-{}", std::process::id()));
    fs::write(&secret, "0123456789abcdef0123456789abcdef").expect("a file");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o400)).expect("its mode");
    for path in DataPath::ALL {
        let of = |which: usize| (which == 1).then(|| secret.clone());
        let far = [0, 1].map(|which| GreetingSide::new(path, of(which)));
        let mut taken = [Vec::new(), Vec::new()];
        for round in 0..2 * ROUNDS {
            let which = round % 2;
            taken[which].push(GreetingSide::new(path, of(which)).greet(&far[which]));
        }
        print(&path.to_string(), taken);
    }
    let sides = [None, Some(&*secret)];
    let mut near = sides.map(HelloSide::new);
    let mut far = sides.map(HelloSide::new);
    let listen = |side: &mut HelloSide| side.plane.listen(LinkKind::Handshake).expect("a port");
    let endpoints = [listen(&mut far[0]), listen(&mut far[1])];
    let mut taken = [Vec::new(), Vec::new()];
    for round in 0..2 * ROUNDS {
        let (which, link) = (round % 2, LinkId(round as u32));
        let [near, far] = [&mut near[which], &mut far[which]];
        taken[which].push(near.greet(far, &endpoints[which], link));
    }
    print("native hello", taken);
    let _gone = fs::remove_file(secret);
}
