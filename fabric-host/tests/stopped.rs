//! Quiet and fences while the other process is stopped, or killed, in the middle of a copy.

mod common;

use common::remote::{HostTestMemory, HostTestSetup, serve_if_child, start};
use common::{TestWay, config};
use kvferry_engine::conformance::{PlaneUnderTest, RemotePlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, Direction, FabricError, Memory, OpId, PeerId, QuiesceTicket,
    RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_fabric_host::{DataPath, HostConfig, HostPlane};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const REGION: RegionId = RegionId(1);
const PEER: PeerId = PeerId(2);
const SESSION: SessionId = SessionId(3);
const OP: OpId = OpId(4);
const PASS: u64 = 5;

/// HostTestMemory of each side's memory: few, so that whatever lands late hits what is looked at.
const LEN: u64 = 64 << 10;

/// How often one operation copies them: it takes long enough to be caught in the middle.
fn times(way: TestWay) -> usize {
    if way.path == DataPath::Tcp { 1 << 16 } else { 1 << 18 }
}

/// Rounds in which something that must not happen is waited for.
const SUSPICION: usize = 400;

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
const PATIENCE: Duration = Duration::from_secs(300);

/// The other process: this test, executed again by the others.
#[test]
fn child() {
    serve_if_child();
}

/// A plane of this process and one of another, with a session between them.
struct StoppedTestWorld {
    way: TestWay,
    near: HostPlane,
    bytes: HostTestMemory,
    far: RemotePlane,
    seen: [Vec<DataEvent>; 2],
    /// Who opened the session.
    initiator: usize,
}

impl StoppedTestWorld {
    fn new(way: TestWay, initiator: usize) -> StoppedTestWorld {
        StoppedTestWorld::with(way, config(way), initiator)
    }

    fn with(way: TestWay, config: HostConfig, initiator: usize) -> StoppedTestWorld {
        let config = HostConfig { slices_max: 1 << 18, ..config };
        let file = way.path == DataPath::SharedMemory;
        let setup = HostTestSetup { config: config.clone(), memory: LEN, file };
        let far = start(&setup);
        let near = HostPlane::new(config).expect("a plane");
        let mut bytes = HostTestMemory::new(LEN, file);
        let own = bytes.memory();
        let mut world =
            StoppedTestWorld { way, near, bytes, far, seen: Default::default(), initiator };
        world.near.connect(PEER, &world.far.address(), PASS).expect("a peer");
        world.far.connect(PEER, &world.near.address(), PASS).expect("a peer");
        let theirs = world.far.memory();
        let descs = [world.register(0, own), world.register(1, theirs)];
        let remote = descs[1 - initiator].clone();
        world.plane(initiator).open(SESSION, REGION, PEER, &remote).expect("an open is taken");
        let opened = DataEvent::Opened { session: SESSION, result: Ok(()) };
        world.until("Opened", |world| world.seen[initiator].contains(&opened));
        world
    }

    fn plane(&mut self, index: usize) -> &mut dyn DataPlane {
        if index == 0 { &mut self.near } else { &mut self.far }
    }

    fn register(&mut self, index: usize, memory: Memory) -> RegionDesc {
        self.plane(index).register(REGION, memory).expect("memory is taken");
        self.until("Registered", |world| {
            world.seen[index].iter().any(|e| matches!(e, DataEvent::Registered { .. }))
        });
        self.seen[index]
            .iter()
            .find_map(|event| match event {
                DataEvent::Registered { result, .. } => Some(result.clone().expect("registered")),
                _ => None,
            })
            .expect("just seen")
    }

    /// Polls the near plane, and the far one if it runs.
    fn pump(&mut self, far: bool) {
        std::thread::yield_now();
        // Last, so that what it says is looked at before anything more can happen.
        if far {
            self.far.poll(Nanos::ZERO, &mut self.seen[1]);
        }
        self.near.poll(Nanos::ZERO, &mut self.seen[0]);
    }

    fn until(&mut self, what: &str, done: impl Fn(&StoppedTestWorld) -> bool) {
        self.wait(what, true, done);
    }

    fn wait(&mut self, what: &str, far: bool, done: impl Fn(&StoppedTestWorld) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "no {what}; seen: {:?}", self.seen);
            self.pump(far);
        }
    }

    /// Submits one operation over all memory, many times.
    fn submit(&mut self, direction: Direction) {
        let offsets = vec![0; times(self.way)];
        let len = vec![LEN; offsets.len()];
        let (local, remote, len) = (&offsets[..], &offsets[..], &len[..]);
        let batch = Submit { op: OP, session: SESSION, direction, local, remote, len };
        self.plane(self.initiator).submit(batch).expect("a batch is taken");
    }

    /// The first word of our memory, which an operation writes first.
    fn front(&mut self) -> &AtomicU64 {
        // SAFETY: Inside the memory and aligned.
        unsafe { AtomicU64::from_ptr(self.bytes.start().cast()) }
    }

    /// Waits until the first bytes of an operation have landed in our memory.
    fn until_landing(&mut self) {
        let start = Instant::now();
        while self.front().load(Ordering::Relaxed) == 0 {
            assert!(start.elapsed() < PATIENCE, "nothing lands");
            std::thread::yield_now();
        }
    }

    fn fill_far(&mut self, byte: u8) {
        self.far.poke(0, &vec![byte; LEN as usize]);
    }

    /// The far plane is in the middle of a push to us.
    fn written_to(way: TestWay) -> StoppedTestWorld {
        let mut world = StoppedTestWorld::new(way, 1);
        world.fill_far(7);
        world.submit(Direction::Write);
        world.until_landing();
        world
    }

    /// Begins an operation, the first bytes of which are those of our memory and have landed in
    /// that of the far plane.
    fn begin_towards_far(&mut self, direction: Direction) {
        self.bytes.poke(0, &vec![9; LEN as usize]);
        self.submit(direction);
        let mut first = [0];
        while first[0] != 9 {
            self.far.peek(0, &mut first);
        }
    }

    fn until_peer_is_down(&mut self) {
        let down = DataEvent::PeerDown { peer: PEER };
        self.wait("PeerDown", false, |world| world.seen[0].contains(&down));
    }

    /// Overwrites the memory of the far plane and sees that nothing lands in it any more.
    fn assert_far_untouched(&mut self) {
        self.fill_far(0x5a);
        (0..SUSPICION).for_each(|_| self.pump(true));
        let mut now = vec![0; LEN as usize];
        self.far.peek(0, &mut now);
        assert!(now.iter().all(|byte| *byte == 0x5a), "bytes landed after Quiet");
    }

    /// Overwrites our memory and sees that nothing lands in it any more.
    fn assert_untouched(&mut self, far: bool) {
        let marker = vec![0xa5; LEN as usize];
        self.bytes.poke(0, &marker);
        (0..SUSPICION).for_each(|_| self.pump(far));
        std::thread::park_timeout(Duration::from_millis(20));
        let mut now = vec![0; LEN as usize];
        self.bytes.peek(0, &mut now);
        assert!(now == marker, "bytes landed that must not");
    }

    fn outcome(&self, plane: usize) -> Option<&Completion> {
        self.seen[plane].iter().find_map(|event| match event {
            DataEvent::Completed { op, outcome } if *op == OP => Some(outcome),
            _ => None,
        })
    }

    fn is_quiet(&self, plane: usize) -> bool {
        self.seen[plane].contains(&DataEvent::Quiet { session: SESSION, ticket: QuiesceTicket(1) })
    }

    fn served(&self) -> u64 {
        self.near.counters().served[self.way.path as usize].operations
    }
}

fn fence_amid_a_push(way: TestWay) -> bool {
    let mut world = StoppedTestWorld::written_to(way);
    world.far.stop();
    world.near.fence(PEER);
    if world.served() != 0 {
        return false;
    }
    // What a chunk takes is long enough to be seen only if nobody waits in between.
    world.near.poll(Nanos::ZERO, &mut world.seen[0]);
    let fenced = DataEvent::Fenced { peer: PEER };
    assert!(world.seen[0].contains(&fenced), "fenced by ourselves, so at once");
    world.assert_untouched(false);
    world.far.go_on();
    world.until("the end of the operation", |world| world.outcome(1).is_some());
    assert!(world.outcome(1) != Some(&Completion::Done), "a fenced push succeeded");
    world.assert_untouched(true);
    true
}

fn deregister_amid_a_push(way: TestWay) -> bool {
    let mut world = StoppedTestWorld::written_to(way);
    world.far.stop();
    world.near.deregister(REGION).expect("only own operations keep a region");
    if world.served() != 0 {
        return false;
    }
    world.assert_untouched(false);
    world.far.go_on();
    world.until("the end of the operation", |world| world.outcome(1).is_some());
    assert!(world.outcome(1) != Some(&Completion::Done), "the push succeeded");
    true
}

fn kill_amid_a_push(way: TestWay) -> bool {
    let mut world = StoppedTestWorld::written_to(way);
    world.far.kill();
    world.near.fence(PEER);
    world.assert_untouched(false);
    world.served() == 0
}

fn close_amid_a_read(way: TestWay) -> bool {
    let mut world = StoppedTestWorld::new(way, 0);
    world.fill_far(7);
    world.submit(Direction::Read);
    world.until_landing();
    world.far.stop();
    world.near.quiesce(SESSION, QuiesceTicket(1));
    world.near.close(SESSION);
    world.wait("Quiet", false, |world| world.is_quiet(0));
    if world.outcome(0) == Some(&Completion::Done) {
        return false;
    }
    let failed =
        matches!(world.outcome(0), Some(Completion::Failed { cause: FabricError::Closed, .. }));
    assert!(failed, "got {:?}", world.outcome(0));
    world.assert_untouched(false);
    world.near.deregister(REGION).expect("nothing uses it");
    world.far.go_on();
    world.assert_untouched(true);
    true
}

fn leave_a_peer_that_reads(way: TestWay) -> bool {
    let mut world = StoppedTestWorld::new(way, 1);
    world.begin_towards_far(Direction::Read);
    world.far.stop();
    world.near.deregister(REGION).expect("only own operations keep a region");
    world.near.fence(PEER);
    let fenced = DataEvent::Fenced { peer: PEER };
    world.wait("Fenced", false, |world| world.seen[0].contains(&fenced));
    world.far.go_on();
    world.until("the end of the operation", |world| world.outcome(1).is_some());
    // A read of what is gone does not succeed.
    world.outcome(1) != Some(&Completion::Done)
}

/// The peer copies what we push: while it is stopped nobody can say that it is quiet.
fn close_amid_a_push(way: TestWay) -> bool {
    let mut world = StoppedTestWorld::new(way, 0);
    world.begin_towards_far(Direction::Write);
    world.far.stop();
    world.near.close(SESSION);
    world.near.quiesce(SESSION, QuiesceTicket(1));
    world.near.poll(Nanos::ZERO, &mut { Vec::new() });
    (0..SUSPICION).for_each(|_| world.pump(false));
    if world.is_quiet(0) {
        // All had landed, or it is wrong every time.
        return false;
    }
    world.far.go_on();
    world.until("Quiet", |world| world.is_quiet(0));
    world.assert_far_untouched();
    true
}

fn kill_the_target_of_a_push(way: TestWay) -> bool {
    let mut world = StoppedTestWorld::new(way, 0);
    world.begin_towards_far(Direction::Write);
    world.far.stop();
    world.near.quiesce(SESSION, QuiesceTicket(1));
    (0..SUSPICION).for_each(|_| world.pump(false));
    if world.is_quiet(0) || world.outcome(0).is_some() {
        return false;
    }
    world.far.kill();
    world.until_peer_is_down();
    world.wait("Quiet", false, |world| world.is_quiet(0));
    let failed =
        matches!(world.outcome(0), Some(Completion::Failed { cause: FabricError::PeerGone, .. }));
    assert!(failed, "got {:?}", world.outcome(0));
    true
}

/// A host that is silent is given up, but what it had received may land when it wakes up.
fn lose_the_target_of_a_push(way: TestWay) -> bool {
    let config = HostConfig { dead_ms: 10_000, ..config(way) };
    let mut world = StoppedTestWorld::with(way, config, 0);
    world.begin_towards_far(Direction::Write);
    world.far.stop();
    world.near.poll(Nanos::ZERO, &mut world.seen[0]);
    if !world.seen[0]
        .iter()
        .all(|event| matches!(event, DataEvent::Registered { .. } | DataEvent::Opened { .. }))
    {
        // It was over, or silent for too long while it ran.
        return false;
    }
    world.near.quiesce(SESSION, QuiesceTicket(1));
    world.until_peer_is_down();
    assert!(matches!(
        world.outcome(0),
        Some(Completion::Failed { cause: FabricError::PeerGone, .. })
    ));
    (0..SUSPICION).for_each(|_| world.pump(false));
    assert!(!world.is_quiet(0), "quiet though the peer has bytes that it will write");
    world.far.go_on();
    world.wait("Quiet", false, |world| world.is_quiet(0));
    world.assert_far_untouched();
    true
}

/// Repeats a check until the operation was caught in the middle: on a busy machine it may be over
/// before somebody looks. What is wrong is so every time.
fn caught(way: TestWay, check: fn(TestWay) -> bool) {
    let start = Instant::now();
    while !check(way) {
        let goes_on = start.elapsed() < PATIENCE;
        assert!(goes_on, "{way:?}: never in the middle, or it ended too well");
    }
}

fn each_way(check: fn(TestWay) -> bool) {
    TestWay::all().for_each(|way| caught(way, check));
}

#[test]
fn a_fence_holds_while_the_initiator_is_stopped_amid_a_push() {
    each_way(fence_amid_a_push);
}

#[test]
fn deregistering_holds_while_the_initiator_is_stopped_amid_a_push() {
    each_way(deregister_amid_a_push);
}

#[test]
fn a_fence_holds_when_the_initiator_was_killed_amid_a_push() {
    each_way(kill_amid_a_push);
}

#[test]
fn a_read_is_quiet_while_the_peer_is_stopped() {
    each_way(close_amid_a_read);
}

#[test]
fn a_peer_that_was_stopped_while_it_reads_delays_nobody() {
    each_way(leave_a_peer_that_reads);
}

#[test]
fn a_push_is_not_quiet_before_its_target_says_so() {
    each_way(close_amid_a_push);
}

#[test]
fn a_connection_that_broke_is_not_quiet_before_its_peer_was_heard() {
    for way in [DataPath::Tcp.into(), TestWay::ENCRYPTED] {
        caught(way, lose_the_target_of_a_push);
    }
}

#[test]
fn a_push_ends_with_its_target() {
    each_way(kill_the_target_of_a_push);
}
