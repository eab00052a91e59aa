//! Drives the planes of a fixture.

use crate::core::time::Nanos;
use crate::fabric::{
    Completion, DataEvent, DataPlane, Direction, FenceScope, Memory, NextPoll, OpId, PeerId,
    Placement, QuiesceTicket, Refused, RegionDesc, RegionId, SessionId, Submit,
};

/// Bytes of memory that each plane of a fixture has.
pub(super) const MEMORY: usize = 1 << 14;

/// Rounds of [`DataFixture::advance`] after which an event is considered missing.
pub(super) const PATIENCE: usize = 20_000_000;

/// Two data planes that can reach each other.
pub trait DataFixture {
    /// Plane 0 or 1.
    fn plane(&mut self, index: usize) -> &mut dyn DataPlane;

    /// Memory of 16 KiB that belongs to a plane, the same each time; not registered yet.
    fn memory(&mut self, index: usize) -> Memory;

    /// Copies out of that memory.
    fn peek(&mut self, index: usize, offset: u64, into: &mut [u8]);

    /// Copies into that memory.
    fn poke(&mut self, index: usize, offset: u64, bytes: &[u8]);

    /// Lets the planes make some progress; called up to 20,000,000 times for one event.
    fn advance(&mut self);

    /// Rounds of [`DataFixture::advance`] in which something that must not happen is waited for.
    fn suspicion(&self) -> usize {
        2_000
    }

    /// The time that planes are polled with.
    fn now(&mut self) -> Nanos;

    /// True if operations go on between two calls of [`DataFixture::advance`], so that some may
    /// have succeeded before [`DataFixture::kill`].
    fn runs_by_itself(&self) -> bool {
        false
    }

    /// What a fence of plane 0 by plane 1 revokes; less than what the plane can revoke at most where
    /// that depends on the peer.
    fn fence_scope(&mut self) -> FenceScope {
        self.plane(1).caps().fence
    }

    /// Takes the backend of plane 0 away, as when its port goes down, or lets it have a new one;
    /// false if it has none that could go.
    fn backend(&mut self, there: bool) -> bool {
        let _unused = there;
        false
    }

    /// Kills the process of plane 1; false if that cannot be done.
    fn kill(&mut self) -> bool {
        false
    }
}

/// A fixture with the events seen so far.
pub(super) struct DataHarness<'a> {
    pub(super) fixture: &'a mut dyn DataFixture,
    /// Events per plane, in order.
    pub(super) seen: [Vec<DataEvent>; 2],
    ops: u64,
}

pub(super) const REGION: RegionId = RegionId(3);
pub(super) const PEER: PeerId = PeerId(5);
pub(super) const SESSION: SessionId = SessionId(7);
pub(super) const FENCE_KEY: u64 = 11;

impl<'a> DataHarness<'a> {
    pub(super) fn new(fixture: &'a mut dyn DataFixture) -> DataHarness<'a> {
        for plane in 0..2 {
            let bytes: Vec<u8> = (0..MEMORY).map(|at| pattern(plane, at)).collect();
            fixture.poke(plane, 0, &bytes);
        }
        DataHarness { fixture, seen: [Vec::new(), Vec::new()], ops: 0 }
    }

    /// Both planes registered and connected, [`SESSION`] open from plane 0 to plane 1.
    pub(super) fn connected(fixture: &'a mut dyn DataFixture) -> DataHarness<'a> {
        let mut rig = DataHarness::new(fixture);
        rig.register(0, REGION);
        let remote = rig.register(1, REGION);
        rig.connect(PEER, FENCE_KEY);
        rig.open(SESSION, PEER, &remote).expect("the session opens");
        rig
    }

    pub(super) fn plane(&mut self, index: usize) -> &mut dyn DataPlane {
        self.fixture.plane(index)
    }

    /// Lets both planes progress once.
    pub(super) fn pump(&mut self) {
        self.fixture.advance();
        let now = self.fixture.now();
        for index in 0..2 {
            self.poll(index, now);
        }
    }

    /// Polls a plane, which reports one [`DataEvent::Reset`] at most.
    pub(super) fn poll(&mut self, index: usize, now: Nanos) -> NextPoll {
        let before = self.seen[index].len();
        let next = self.fixture.plane(index).poll(now, &mut self.seen[index]);
        let is_reset = |event: &&DataEvent| matches!(event, DataEvent::Reset { .. });
        let resets = self.seen[index][before..].iter().filter(is_reset).count();
        assert!(resets <= 1, "{resets} resets in one poll");
        next
    }

    /// Waits for something that must come.
    pub(super) fn until(&mut self, what: &str, done: impl Fn(&DataHarness<'_>) -> bool) {
        for _ in 0..PATIENCE {
            if done(self) {
                return;
            }
            self.pump();
        }
        panic!("no {what}; seen: {:?}", self.seen);
    }

    /// Waits for what must not come.
    pub(super) fn idle(&mut self) {
        for _ in 0..self.fixture.suspicion() {
            self.pump();
        }
    }

    /// Registers the memory of a plane.
    pub(super) fn register(&mut self, index: usize, region: RegionId) -> RegionDesc {
        let memory = self.fixture.memory(index);
        self.plane(index).register(region, memory).expect("memory registers");
        let registered = |event: &DataEvent| match event {
            DataEvent::Registered { region: id, result } if *id == region => Some(result.clone()),
            _ => None,
        };
        self.answer(index, "Registered", registered).expect("the region can be used")
    }

    /// Waits for the next event of a plane that is of a kind.
    fn answer<T>(&mut self, index: usize, what: &str, of: impl Fn(&DataEvent) -> Option<T>) -> T {
        let before = self.seen[index].len();
        self.until(what, |rig| rig.seen[index][before..].iter().any(|event| of(event).is_some()));
        self.seen[index][before..].iter().find_map(of).expect("just seen")
    }

    /// Connects both planes under one fence key.
    pub(super) fn connect(&mut self, peer: PeerId, fence_key: u64) {
        self.connect_with(peer, [fence_key, fence_key]);
    }

    /// Connects both planes, each with its own idea of the fence key.
    pub(super) fn connect_with(&mut self, peer: PeerId, fence_key: [u64; 2]) {
        for (index, fence_key) in fence_key.into_iter().enumerate() {
            let address = self.plane(1 - index).address();
            self.plane(index).connect(peer, &address, fence_key).expect("a peer connects");
        }
    }

    /// Opens a session from plane 0 and waits for the answer.
    pub(super) fn open(
        &mut self,
        session: SessionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), crate::fabric::FabricError> {
        self.plane(0).open(session, REGION, peer, remote).expect("an open is taken");
        let opened = |event: &DataEvent| match event {
            DataEvent::Opened { session: id, result } if *id == session => Some(result.clone()),
            _ => None,
        };
        self.answer(0, "Opened", opened)
    }

    /// Submits on plane 0: `ranges` are (local, remote, length).
    pub(super) fn submit(
        &mut self,
        session: SessionId,
        direction: Direction,
        ranges: &[(u64, u64, u64)],
    ) -> Result<OpId, Refused> {
        let local: Vec<_> = ranges.iter().map(|range| range.0).collect();
        let remote: Vec<_> = ranges.iter().map(|range| range.1).collect();
        let len: Vec<_> = ranges.iter().map(|range| range.2).collect();
        let op = self.next_op();
        let (local, remote, len) = (&local, &remote, &len);
        self.plane(0).submit(Submit { op, session, direction, local, remote, len })?;
        Ok(op)
    }

    /// Directions in which plane 0 moves bytes.
    pub(super) fn directions(&mut self) -> Vec<Direction> {
        let caps = self.plane(0).caps();
        let is_able = |direction: &Direction| match direction {
            Direction::Write => caps.write,
            Direction::Read => caps.read,
        };
        [Direction::Write, Direction::Read].into_iter().filter(is_able).collect()
    }

    /// Submits writes of 64 bytes in four ranges, at most as many as may be in flight.
    pub(super) fn writes(&mut self, session: SessionId, count: u64) -> Vec<OpId> {
        let count = count.min(u64::from(self.plane(0).caps().in_all.operations));
        let ranges =
            |n: u64| [0, 1, 2, 3].map(|slice| (n * 64 + slice * 16, n * 64 + slice * 16, 16));
        let write =
            |n| self.submit(session, Direction::Write, &ranges(n)).expect("a write is taken");
        (0..count).map(write).collect()
    }

    /// Submits as soon as there is room.
    fn submit_in_time(
        &mut self,
        session: SessionId,
        direction: Direction,
        ranges: &[(u64, u64, u64)],
    ) -> OpId {
        for _ in 0..PATIENCE {
            match self.submit(session, direction, ranges) {
                Err(Refused::Busy) => self.pump(),
                taken => return taken.expect("a good batch is taken"),
            }
        }
        panic!("no room for {} ranges; seen: {:?}", ranges.len(), self.seen);
    }

    /// Waits until no byte of a session lands any more.
    pub(super) fn settle(&mut self, session: SessionId) {
        let ticket = QuiesceTicket(self.next_op().0);
        self.quiesce(session, ticket);
    }

    /// Moves ranges of bytes that were not there before, and compares all bytes of both sides as soon
    /// as the plane says that they are visible.
    pub(super) fn assert_moves(
        &mut self,
        session: SessionId,
        direction: Direction,
        ranges: &[(u64, u64, u64)],
    ) {
        let (source, target) = if direction == Direction::Write { (0, 1) } else { (1, 0) };
        let salt = self.next_op().0;
        let byte = |at: u64| ((at + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        let from: Vec<u8> = (0..MEMORY as u64).map(byte).collect();
        let mut expected = vec![!salt as u8; MEMORY];
        self.fixture.poke(source, 0, &from);
        self.fixture.poke(target, 0, &expected);
        for (local, remote, len) in ranges {
            let (read, write) = if source == 0 { (*local, *remote) } else { (*remote, *local) };
            let [read, write, len] = [read, write, *len].map(|it| it as usize);
            expected[write..write + len].copy_from_slice(&from[read..read + len]);
        }
        let op = self.submit_in_time(session, direction, ranges);
        let what =
            format!("{direction:?} of {} ranges, the first of {}", ranges.len(), ranges[0].2);
        assert_eq!(self.finish(op), Completion::Done, "{what}");
        if self.plane(0).caps().placement == Placement::OnQuiet {
            self.settle(session);
        }
        assert!(self.bytes(target) == expected, "{what} moved other bytes");
        self.settle(session);
        assert!(self.bytes(target) == expected, "{what} moved bytes after its end");
        assert!(self.bytes(source) == from, "{what} changed its source");
    }

    pub(super) fn next_op(&mut self) -> OpId {
        self.ops += 1;
        OpId(self.ops)
    }

    /// How often an operation completed.
    pub(super) fn completions(&self, op: OpId) -> usize {
        let mine = |e: &&DataEvent| matches!(e, DataEvent::Completed { op: id, .. } if *id == op);
        self.seen[0].iter().filter(mine).count()
    }

    /// How an operation ended, once it did.
    pub(super) fn outcome(&self, op: OpId) -> Option<&Completion> {
        self.seen[0].iter().find_map(|event| match event {
            DataEvent::Completed { op: id, outcome } if *id == op => Some(outcome),
            _ => None,
        })
    }

    /// Waits for the end of an operation.
    pub(super) fn finish(&mut self, op: OpId) -> Completion {
        self.until("Completed", |rig| rig.completions(op) > 0);
        self.outcome(op).expect("just seen").clone()
    }

    /// How often a ticket was answered.
    pub(super) fn quiets(&self, session: SessionId, ticket: QuiesceTicket) -> usize {
        let answer = DataEvent::Quiet { session, ticket };
        self.seen[0].iter().filter(|event| **event == answer).count()
    }

    /// Asks for quiet and waits for the answer.
    pub(super) fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        self.plane(0).quiesce(session, ticket);
        self.until("Quiet", |rig| rig.quiets(session, ticket) > 0);
    }

    /// Bytes of a plane.
    pub(super) fn bytes(&mut self, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY];
        self.fixture.peek(index, 0, &mut bytes);
        bytes
    }

    /// Overwrites the memory of a plane and sees to it that nothing changes it any more.
    pub(super) fn assert_untouched(&mut self, index: usize) {
        let marker = vec![0xa5; MEMORY];
        self.fixture.poke(index, 0, &marker);
        self.idle();
        assert!(self.bytes(index) == marker, "bytes landed in plane {index} that must not");
    }

    /// Submits on plane 0 and sees that it reaches nothing: refused, or failed.
    pub(super) fn assert_shut_out(&mut self, session: SessionId) {
        for (direction, target) in [(Direction::Write, 1), (Direction::Read, 0)] {
            let marker = vec![0x5a; MEMORY];
            self.fixture.poke(target, 0, &marker);
            let ranges: Vec<_> = (0..8).map(|n| (n * 256, n * 256, 256)).collect();
            match self.submit(session, direction, &ranges) {
                Err(Refused::Gone | Refused::Unsupported(_)) => {}
                Err(other) => panic!("expected Gone, got {other:?}"),
                Ok(op) => {
                    let outcome = self.finish(op);
                    assert!(
                        outcome != Completion::Done,
                        "{direction:?} of a peer that is kept out"
                    );
                }
            }
            self.idle();
            assert!(self.bytes(target) == marker, "{direction:?} moved bytes past a fence");
        }
    }
}

/// Initial content of a plane.
pub(super) fn pattern(plane: usize, at: usize) -> u8 {
    (at * 31 + at / 256 * 7 + plane * 101) as u8
}
