//! What a host plane does beyond what every data plane has to do.

mod common;

use common::remote::{HostTestMemory, HostTestSetup, serve_if_child, start};
use common::{TestWay, next, patient};
use kvferry_engine::conformance::PlaneUnderTest;
use kvferry_engine::core::dialect::moriio::descriptor::{
    DescLayout, MoriEngineDesc, MoriMemoryDesc,
};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Completion, DataEvent, DataPlane, Direction, FabricError, Landed, Memory, OpId,
    OwnMemory, PeerId, QuiesceTicket, RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_fabric_host::{
    DataPath, HostConfig, HostError, HostPlane, HugePages, MemfdPool, PeerTrust,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

const REGION: RegionId = RegionId(1);
const PEER: PeerId = PeerId(2);
const SESSION: SessionId = SessionId(3);
const LEN: u64 = 8_192;

#[test]
fn child() {
    serve_if_child();
}

fn plane(config: HostConfig) -> HostPlane {
    HostPlane::new(config).expect("a plane at loopback")
}

fn door() -> HostConfig {
    HostConfig { open_door: true, ..patient() }
}

fn register(plane: &mut dyn DataPlane, memory: Memory) -> RegionDesc {
    plane.register(REGION, memory).expect("memory is taken");
    match next(plane) {
        DataEvent::Registered { result: Ok(desc), .. } => desc,
        other => panic!("{other:?}"),
    }
}

fn open(plane: &mut HostPlane, to: &Address, desc: &RegionDesc) -> Result<(), FabricError> {
    plane.connect(PEER, to, 0).expect("a peer");
    plane.open(SESSION, REGION, PEER, desc).expect("an open is taken");
    match next(plane) {
        DataEvent::Opened { result, .. } => result,
        other => panic!("{other:?}"),
    }
}

fn submit(plane: &mut HostPlane, direction: Direction, op: u64) {
    let (op, session) = (OpId(op), SESSION);
    let (local, remote, len) = (&[0, 64][..], &[64, 128][..], &[64, 64][..]);
    plane.submit(Submit { op, session, direction, local, remote, len }).expect("taken");
}

fn run(plane: &mut HostPlane, direction: Direction, op: u64) -> Completion {
    submit(plane, direction, op);
    match next(plane) {
        DataEvent::Completed { outcome, .. } => outcome,
        other => panic!("{other:?}"),
    }
}

fn fill(bytes: &mut HostTestMemory, with: u8) {
    bytes.poke(0, &[with; LEN as usize]);
}

fn at(bytes: &mut HostTestMemory, offset: u64) -> u8 {
    let mut byte = [0];
    bytes.peek(offset, &mut byte);
    byte[0]
}

#[test]
fn a_taken_port_is_an_error_that_names_it() {
    let first = plane(HostConfig::default());
    let config = HostConfig { port: first.port(), ..HostConfig::default() };
    let error = HostPlane::new(config).expect_err("the port is taken");
    let named = error.to_string().contains(&format!("127.0.0.1:{}", first.port()));
    assert!(matches!(error, HostError::Listen(_)) && named, "{error}");
}

#[test]
fn settings_that_cannot_be_are_named() {
    let zero = HostConfig { workers: 0, ..HostConfig::default() };
    let none = HostConfig { paths: Vec::new(), ..HostConfig::default() };
    let open = HostConfig { host: "0.0.0.0".into(), ..HostConfig::default() };
    let trust = PeerTrust { insecure_network: true, ..PeerTrust::default() };
    let wild = HostConfig { trust, ..open.clone() };
    let tried = [(zero, "workers"), (none, "paths"), (open, "secret_file"), (wild, "advertised")];
    for (config, name) in tried {
        let error = HostPlane::new(config).expect_err("a setting that cannot be").to_string();
        assert!(error.contains(name), "{error}");
    }
    let unknown = toml::from_str::<HostConfig>("wrokers = 2").expect_err("no such setting");
    assert!(unknown.to_string().contains("wrokers"), "{unknown}");
    let config: HostConfig = toml::from_str("paths = [\"tcp\"]\nslower = true").expect("settings");
    assert_eq!(config.paths, [DataPath::Tcp]);
}

#[test]
fn addresses_and_regions_are_descriptors_of_mori() {
    let mut plane = plane(HostConfig { key: "consumer:h:1:tp0:dp0".into(), ..door() });
    let engine = MoriEngineDesc::decode(&plane.address().0).expect("an engine descriptor");
    assert_eq!((&*engine.key, &*engine.host), ("consumer:h:1:tp0:dp0", "127.0.0.1"));
    assert_eq!(engine.port, i32::from(plane.port()));
    assert_eq!(engine.pid, std::process::id() as i32);
    let mut bytes = HostTestMemory::new(LEN, false);
    let memory = bytes.memory();
    let desc = register(&mut plane, memory);
    let (layout, region) = MoriMemoryDesc::decode(&desc.0).expect("a memory descriptor");
    assert_eq!(layout, DescLayout::V1_2_2);
    assert_eq!((region.data, region.size), (bytes.start() as u64, LEN));
    assert_eq!((region.id, region.loc, region.device_id), (1, MoriMemoryDesc::LOC_CPU, -1));
    assert_eq!(&*region.engine_key, "consumer:h:1:tp0:dp0");
}

#[test]
fn a_short_read_is_over_when_it_is_submitted() {
    for file in [true, false] {
        let mut near = plane(HostConfig { inline_max: 128, ..door() });
        let mut far = plane(door());
        let (mut ours, mut theirs) =
            (HostTestMemory::new(LEN, file), HostTestMemory::new(LEN, file));
        register(&mut near, ours.memory());
        let desc = register(&mut far, theirs.memory());
        assert_eq!(open(&mut near, &far.address(), &desc), Ok(()));
        fill(&mut theirs, 9);
        submit(&mut near, Direction::Read, 1);
        assert_eq!((at(&mut ours, 0), at(&mut ours, 127), at(&mut ours, 128)), (9, 9, 0));
        let done = DataEvent::Completed { op: OpId(1), outcome: Completion::Done };
        assert_eq!(next(&mut near), done);
        // Each turn anew.
        fill(&mut theirs, 7);
        submit(&mut near, Direction::Read, 2);
        assert_eq!(at(&mut ours, 0), 7);
    }
}

#[test]
fn the_path_that_is_taken_can_be_seen_and_is_counted() {
    for (path, file) in [
        (DataPath::SharedMemory, true),
        (DataPath::CrossMemory, false),
        (DataPath::CrossMemory, true),
        (DataPath::Tcp, true),
    ] {
        // All paths, or one that is slower than what the memory calls for.
        let natural = if file { DataPath::SharedMemory } else { DataPath::CrossMemory };
        let paths = if path == natural { DataPath::ALL.into() } else { vec![path] };
        let mut near = plane(HostConfig { paths: paths.clone(), ..door() });
        let mut far = plane(HostConfig { paths, ..door() });
        let (mut ours, mut theirs) =
            (HostTestMemory::new(LEN, file), HostTestMemory::new(LEN, file));
        let (own, other) = (ours.memory(), theirs.memory());
        register(&mut near, own);
        let desc = register(&mut far, other);
        assert_eq!(open(&mut near, &far.address(), &desc), Ok(()));
        fill(&mut ours, 7);
        fill(&mut theirs, 9);
        assert_eq!(run(&mut near, Direction::Write, 1), Completion::Done);
        assert_eq!((at(&mut theirs, 63), at(&mut theirs, 64), at(&mut theirs, 192)), (9, 7, 9));
        fill(&mut theirs, 11);
        assert_eq!(run(&mut near, Direction::Read, 2), Completion::Done);
        assert_eq!((at(&mut ours, 0), at(&mut ours, 128)), (11, 7));
        let paths = near.paths(SESSION).expect("it is open");
        assert_eq!((paths.write, paths.read), (path, path));
        assert_eq!(near.paths_of(PEER), [(SESSION, paths)]);
        let (near, far) = (near.counters(), far.counters());
        for (n, (initiated, served)) in near.initiated.iter().zip(&far.served).enumerate() {
            let its = n == path as usize;
            assert_eq!(
                (initiated.operations, initiated.bytes),
                if its { (2, 256) } else { (0, 0) }
            );
            assert_eq!((served.operations, served.bytes), if its { (1, 128) } else { (0, 0) });
        }
    }
}

#[test]
fn read_that_lands_survives_the_end_of_another_session() {
    const LONG: u64 = 48 << 20;
    const OTHER: SessionId = SessionId(4);
    let by_tcp = || HostConfig { paths: vec![DataPath::Tcp], streams: 1, ..door() };
    let (mut near, mut far) = (plane(by_tcp()), plane(by_tcp()));
    let len = LONG + LEN;
    let (mut ours, mut theirs) = (HostTestMemory::new(len, true), HostTestMemory::new(len, true));
    register(&mut near, ours.memory());
    let desc = register(&mut far, theirs.memory());
    assert_eq!(open(&mut near, &far.address(), &desc), Ok(()));
    near.open(OTHER, REGION, PEER, &desc).expect("an open is taken");
    assert_eq!(next(&mut near), DataEvent::Opened { session: OTHER, result: Ok(()) });
    theirs.poke(0, &vec![9; LONG as usize]);
    for (op, session, to, len) in [(1, SESSION, 0, LONG), (2, OTHER, LONG, LEN)] {
        let (op, direction) = (OpId(op), Direction::Read);
        let (local, remote, len) = (&[to][..], &[0][..], &[len][..]);
        near.submit(Submit { op, session, direction, local, remote, len }).expect("taken");
    }
    // It lands from now on, and the read of the other session waits behind it.
    while at(&mut ours, 0) != 9 {
        std::thread::yield_now();
    }
    near.close(OTHER);
    let outcome = loop {
        match next(&mut near) {
            DataEvent::Completed { op: OpId(1), outcome } => break outcome,
            DataEvent::Completed { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((outcome, at(&mut ours, LONG - 1)), (Completion::Done, 9));
}

#[test]
fn a_slower_path_than_configured_fails_unless_it_is_allowed() {
    for slower in [false, true] {
        let config =
            HostConfig { paths: vec![DataPath::SharedMemory, DataPath::Tcp], slower, ..door() };
        let (mut near, mut far) = (plane(config.clone()), plane(config));
        let (mut ours, mut theirs) =
            (HostTestMemory::new(LEN, false), HostTestMemory::new(LEN, false));
        let (own, other) = (ours.memory(), theirs.memory());
        register(&mut near, own);
        let desc = register(&mut far, other);
        let opened = open(&mut near, &far.address(), &desc);
        if slower {
            assert_eq!(opened, Ok(()));
            assert_eq!(near.paths(SESSION).expect("it is open").write, DataPath::Tcp);
            assert_eq!(run(&mut near, Direction::Write, 1), Completion::Done);
        } else {
            let Err(FabricError::Backend(why)) = opened else { panic!("{opened:?}") };
            assert!(why.contains("slower = true"), "{why}");
        }
    }
}

#[test]
fn a_fence_shuts_a_stranger_out_for_good_until_another_pass() {
    let (mut near, mut far) = (plane(patient()), plane(door()));
    let (mut ours, mut theirs) = (HostTestMemory::new(LEN, false), HostTestMemory::new(LEN, false));
    let (own, other) = (ours.memory(), theirs.memory());
    register(&mut near, own);
    let desc = register(&mut far, other);
    // `far` never connected to `near`.
    assert_eq!(open(&mut near, &far.address(), &desc), Ok(()));
    assert_eq!(run(&mut near, Direction::Write, 1), Completion::Done);
    far.connect(PEER, &near.address(), 0).expect("a peer");
    far.fence(PEER);
    assert_eq!(next(&mut far), DataEvent::Fenced { peer: PEER });
    assert_eq!(next(&mut near), DataEvent::PeerDown { peer: PEER });
    for connected in [true, false] {
        if !connected {
            far.disconnect(PEER);
        }
        near.close(SESSION);
        near.open(SESSION, REGION, PEER, &desc).expect("an open is taken");
        let refused = next(&mut near);
        let DataEvent::Opened { result: Err(FabricError::Backend(why)), .. } = &refused else {
            panic!("{refused:?}")
        };
        assert!(why.contains("fenced"), "{why}");
    }
    near.disconnect(PEER);
    far.connect(PEER, &near.address(), 8).expect("a peer");
    near.connect(PEER, &far.address(), 8).expect("a peer");
    near.open(SESSION, REGION, PEER, &desc).expect("an open is taken");
    assert_eq!(next(&mut near), DataEvent::Opened { session: SESSION, result: Ok(()) });
}

#[test]
fn without_a_door_strangers_stay_outside() {
    let (mut near, mut far) = (plane(door()), plane(patient()));
    let (mut ours, mut theirs) = (HostTestMemory::new(LEN, false), HostTestMemory::new(LEN, false));
    let (own, other) = (ours.memory(), theirs.memory());
    register(&mut near, own);
    let desc = register(&mut far, other);
    let refused = open(&mut near, &far.address(), &desc);
    let Err(FabricError::Backend(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("not connected"), "{why}");
    assert_eq!(far.counters().refused, 1);
}

#[test]
fn another_incarnation_at_the_same_port_is_refused() {
    for way in TestWay::all() {
        let config = way.of(door());
        let mut near = plane(config.clone());
        let mut far = plane(config.clone());
        let file = way.path == DataPath::SharedMemory;
        let (mut ours, mut theirs) =
            (HostTestMemory::new(LEN, file), HostTestMemory::new(LEN, file));
        let (own, other) = (ours.memory(), theirs.memory());
        register(&mut near, own);
        let desc = register(&mut far, other);
        let (address, port) = (far.address(), far.port());
        assert_eq!(open(&mut near, &address, &desc), Ok(()));
        drop(far);
        assert_eq!(next(&mut near), DataEvent::PeerDown { peer: PEER });
        let mut again = plane(HostConfig { port, ..config });
        let desc_again = register(&mut again, other);
        assert!(again.address() != address && desc_again != desc);
        near.close(SESSION);
        near.open(SESSION, REGION, PEER, &desc).expect("an open is taken");
        let refused = next(&mut near);
        let failed = matches!(refused, DataEvent::Opened { result: Err(_), .. });
        assert!(failed, "{refused:?}");
    }
}

#[test]
fn a_plane_registers_memory_of_another_process() {
    let setup = HostTestSetup { config: door(), memory: LEN, file: false };
    let mut owner = start(&setup);
    let Memory::Own(range) = owner.memory() else { panic!("own memory") };
    let (base, len) = (range.base(), range.len());
    let memory = Memory::OtherProcess { pid: owner.pid(), base, len };
    // The path that memory calls for, and by TCP.
    for (way, file) in [
        (None, true),
        (None, false),
        (Some(DataPath::Tcp.into()), false),
        (Some(TestWay::ENCRYPTED), false),
    ] {
        let config = way.map_or_else(door, |way| way.of(door()));
        let mut side = plane(config.clone());
        let desc = register(&mut side, memory);
        let mut near = plane(config);
        let mut ours = HostTestMemory::new(LEN, file);
        let own = ours.memory();
        register(&mut near, own);
        assert_eq!(open(&mut near, &side.address(), &desc), Ok(()));
        owner.poke(0, &[3; LEN as usize]);
        fill(&mut ours, 7);
        assert_eq!(run(&mut near, Direction::Write, 1), Completion::Done);
        let mut seen = [0; 256];
        owner.peek(0, &mut seen);
        assert!(seen[64..192] == [7; 128] && seen[..64] == [3; 64] && seen[192..] == [3; 64]);
        owner.poke(0, &[5; 256]);
        assert_eq!(run(&mut near, Direction::Read, 2), Completion::Done);
        assert_eq!((at(&mut ours, 127), at(&mut ours, 128)), (5, 7), "{way:?} {file}");
    }
}

#[test]
fn memory_of_a_process_that_has_ended_fails_the_operation() {
    let setup = HostTestSetup { config: door(), memory: LEN, file: false };
    let mut owner = start(&setup);
    let Memory::Own(range) = owner.memory() else { panic!("own memory") };
    let (base, len) = (range.base(), range.len());
    let mut side = plane(door());
    let desc = register(&mut side, Memory::OtherProcess { pid: owner.pid(), base, len });
    let mut near = plane(door());
    let mut ours = HostTestMemory::new(LEN, false);
    let own = ours.memory();
    register(&mut near, own);
    assert_eq!(open(&mut near, &side.address(), &desc), Ok(()));
    owner.kill();
    for (op, direction) in [(1, Direction::Write), (2, Direction::Read)] {
        let cause = FabricError::RemoteAccess;
        let failed = Completion::Failed { cause, landed: Landed::Unknown };
        assert_eq!(run(&mut near, direction, op), failed);
    }
}

#[test]
fn memory_that_is_not_there_is_not_registered() {
    let mut plane = plane(door());
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING);
    let unsealed = unsealed.expect("a memory file");
    rustix::fs::ftruncate(&unsealed, LEN).expect("a length");
    let fd = std::os::fd::AsRawFd::as_raw_fd(&unsealed);
    for (n, memory) in [
        // SAFETY: Nothing is mapped there, which is what is found out.
        Memory::Own(unsafe { OwnMemory::new(4_096, LEN) }),
        Memory::OtherProcess { pid: std::process::id(), base: 4_096, len: LEN },
        Memory::OtherProcess { pid: u32::MAX, base: 4_096, len: LEN },
        Memory::MemFd { fd, len: LEN },
        Memory::MemFd { fd: 9_999, len: LEN },
    ]
    .into_iter()
    .enumerate()
    {
        plane.register(RegionId(n as u32), memory).expect("the answer is an event");
        let answer = next(&mut plane);
        let failed = matches!(answer, DataEvent::Registered { result: Err(_), .. });
        assert!(failed, "{memory:?}: {answer:?}");
    }
    let device = Memory::Device { range: OwnMemory::unproven(4_096, LEN), device: 0 };
    assert!(matches!(
        plane.register(REGION, device),
        Err(kvferry_engine::fabric::Refused::Unsupported(_))
    ));
}

#[test]
fn a_pool_says_what_pages_it_got() {
    let pool = MemfdPool::new(3 << 20, HugePages::No).expect("a pool");
    assert_eq!((pool.len(), pool.huge()), (3 << 20, 0));
    let pool = MemfdPool::new(3 << 20, HugePages::Try).expect("a pool");
    assert!(pool.len() >= 3 << 20 && pool.huge() <= pool.len());
    match MemfdPool::new(3 << 20, HugePages::Reserved) {
        Ok(pool) => assert_eq!((pool.len(), pool.huge()), (4 << 20, 4 << 20)),
        Err(why) => assert!(why.contains("nr_hugepages"), "{why}"),
    }
    assert!(MemfdPool::new(0, HugePages::No).is_err());
}

/// A waker that has nobody to wake.
struct Never;

impl Wake for Never {
    fn wake(self: Arc<Self>) {
        panic!("woken beside the doorbell");
    }
}

struct Flag(std::sync::mpsc::Sender<()>);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        // The test may have seen enough.
        let _ = self.0.send(());
    }
}

/// Polls a plane only when it was woken, from opening a session to its end, with single short
/// operations and with more long ones at a time than the ring of a link has room for.
fn goes_through(near: &mut HostPlane, way: TestWay, mut woken: impl FnMut(&mut HostPlane)) {
    const LONG: u64 = 1 << 18;
    let mut far = plane(way.of(door()));
    let file = way.path == DataPath::SharedMemory;
    let (mut ours, mut theirs) = (HostTestMemory::new(LONG, file), HostTestMemory::new(LONG, file));
    let (own, other) = (ours.memory(), theirs.memory());
    register(near, own);
    let desc = register(&mut far, other);
    near.connect(PEER, &far.address(), 0).expect("a peer");
    near.open(SESSION, REGION, PEER, &desc).expect("an open is taken");
    let mut wait = |near: &mut HostPlane, count: usize| {
        let mut events = Vec::new();
        while near.poll(Nanos::ZERO, &mut events) == kvferry_engine::fabric::NextPoll::Ready {}
        while events.len() < count {
            woken(near);
            while near.poll(Nanos::ZERO, &mut events) == kvferry_engine::fabric::NextPoll::Ready {}
        }
        events
    };
    assert_eq!(wait(near, 1), [DataEvent::Opened { session: SESSION, result: Ok(()) }]);
    let done = |op| DataEvent::Completed { op, outcome: Completion::Done };
    for op in (1..200).map(OpId) {
        let direction = if op.0 % 2 == 0 { Direction::Read } else { Direction::Write };
        let (session, local, remote, len) = (SESSION, &[0][..], &[0][..], &[64][..]);
        near.submit(Submit { op, session, direction, local, remote, len }).expect("taken");
        assert_eq!(wait(near, 1), [done(op)]);
    }
    let at: Vec<u64> = (0..512).map(|n| 512 * n).collect();
    let ops: Vec<OpId> = (200..400).map(OpId).collect();
    for &op in &ops {
        let (session, direction) = (SESSION, Direction::Write);
        let (local, remote, len) = (&at[..], &at[..], &[256; 512][..]);
        near.submit(Submit { op, session, direction, local, remote, len }).expect("taken");
    }
    // Those by TCP go by several connections, and overtake each other.
    let mut seen = wait(near, ops.len());
    seen.sort_by_key(|event| match event {
        DataEvent::Completed { op, .. } => op.0,
        _ => 0,
    });
    assert_eq!(seen, ops.iter().map(|op| done(*op)).collect::<Vec<_>>());
    near.quiesce(SESSION, QuiesceTicket(1));
    assert_eq!(wait(near, 1), [DataEvent::Quiet { session: SESSION, ticket: QuiesceTicket(1) }]);
}

#[test]
fn the_waker_is_enough() {
    for way in TestWay::all() {
        let (bell, rung) = std::sync::mpsc::channel();
        let mut near = plane(way.of(door()));
        near.set_waker(Waker::from(Arc::new(Flag(bell))));
        goes_through(&mut near, way, |_| {
            rung.recv_timeout(Duration::from_secs(300)).expect("woken");
        });
    }
}

#[test]
fn the_doorbell_is_enough() {
    for way in TestWay::all() {
        let mut near = plane(way.of(door()));
        near.set_waker(Waker::from(Arc::new(Never)));
        near.doorbell().expect("a descriptor");
        goes_through(&mut near, way, |near| {
            let bell = near.doorbell().expect("a descriptor");
            let time = Timespec::try_from(Duration::from_secs(300)).expect("five minutes");
            let rung = poll(&mut [PollFd::new(&bell, PollFlags::IN)], Some(&time));
            assert_eq!(rung, Ok(1), "not rung");
        });
    }
}
