//! Host planes at the sizes at which they split what they move, and at the limits of their tables.

mod common;

use common::remote::{HostTestPlane, HostTestSetup, serve_if_child, start};
use common::{TestWay, config, next};
use kvferry_engine::conformance::{DataPlanePair, PlaneUnderTest, SecondPlane, data_plane_limits};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, Direction, FabricError, OpId, PeerId, RegionDesc, RegionId,
    SessionId, Submit,
};
use kvferry_fabric_host::DataPath;
use rustix::process::{Pid, Signal, kill_process};

/// The other process: this test, executed again by another.
#[test]
fn child() {
    serve_if_child();
}

const REGION: RegionId = RegionId(1);
const PEER: PeerId = PeerId(1);
const DIRECTIONS: [Direction; 2] = [Direction::Write, Direction::Read];

/// Bytes around a range that have to stay as they are.
const MARGIN: u64 = 64;

/// Two planes of this process that are connected.
struct EdgeWorld {
    planes: [Box<dyn PlaneUnderTest>; 2],
    operations: u64,
}

impl EdgeWorld {
    fn new(way: TestWay, memory: u64, inline_max: Option<u32>) -> EdgeWorld {
        let mut config = config(way);
        config.inline_max = inline_max.unwrap_or(config.inline_max);
        let file = way.path == DataPath::SharedMemory;
        let setup = HostTestSetup { config, memory, file };
        let plane = || Box::new(HostTestPlane::new(setup.clone()));
        let mut world = EdgeWorld { planes: [plane(), plane()], operations: 0 };
        world.connect(PEER);
        world
    }

    fn connect(&mut self, peer: PeerId) {
        let addresses = [0, 1].map(|plane| self.plane(plane).address());
        for (plane, address) in addresses.iter().rev().enumerate() {
            self.plane(plane).connect(peer, address, 7).expect("a peer connects");
        }
    }

    fn plane(&mut self, plane: usize) -> &mut dyn DataPlane {
        self.planes[plane].plane()
    }

    fn register(&mut self, plane: usize, region: RegionId) -> Result<RegionDesc, FabricError> {
        let memory = self.planes[plane].memory();
        self.plane(plane).register(region, memory).expect("memory is taken");
        match next(self.plane(plane)) {
            DataEvent::Registered { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    fn open(&mut self, session: SessionId, remote: &RegionDesc) -> Result<(), FabricError> {
        self.open_to(PEER, session, remote)
    }

    fn open_to(
        &mut self,
        peer: PeerId,
        session: SessionId,
        remote: &RegionDesc,
    ) -> Result<(), FabricError> {
        self.plane(0).open(session, REGION, peer, remote).expect("an open is taken");
        match next(self.plane(0)) {
            DataEvent::Opened { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    /// Writes to a process that is dying, until its end is seen and every write has ended.
    fn write_to_the_end(&mut self, session: SessionId) {
        let (mut events, mut taken) = (Vec::new(), 0);
        let is_down = |event: &DataEvent| matches!(event, DataEvent::PeerDown { .. });
        while !events.iter().any(is_down) || events.len() < taken + 1 {
            self.operations += 1;
            let (op, direction) = (OpId(self.operations), Direction::Write);
            let (local, remote, len) = (&[0][..], &[0][..], &[64][..]);
            let batch = Submit { op, session, direction, local, remote, len };
            taken += usize::from(self.plane(0).submit(batch).is_ok());
            self.plane(0).poll(Nanos::ZERO, &mut events);
            std::thread::yield_now();
        }
    }

    /// Moves ranges `(local, remote, length)`, and looks at them and the bytes around them.
    fn assert_moves(
        &mut self,
        session: SessionId,
        direction: Direction,
        ranges: &[(u64, u64, u64)],
    ) {
        let (source, target) = if direction == Direction::Write { (0, 1) } else { (1, 0) };
        self.operations += 1;
        let salt = self.operations;
        let byte = |at: u64| ((at + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        let ends = |(local, remote, _): (u64, u64, u64)| match source {
            0 => (local, remote),
            _ => (remote, local),
        };
        for range in ranges {
            let (from, to) = ends(*range);
            let bytes: Vec<u8> = (from..from + range.2).map(byte).collect();
            self.planes[source].poke(from, &bytes);
            let bytes: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
            self.planes[target].poke(to, &bytes);
            self.planes[target].poke(to - MARGIN, &[0xa5; MARGIN as usize]);
            self.planes[target].poke(to + range.2, &[0xa5; MARGIN as usize]);
        }
        let [local, remote, len]: [Vec<u64>; 3] = [
            ranges.iter().map(|range| range.0).collect(),
            ranges.iter().map(|range| range.1).collect(),
            ranges.iter().map(|range| range.2).collect(),
        ];
        let (op, local, remote, len) = (OpId(self.operations), &local, &remote, &len);
        let batch = Submit { op, session, direction, local, remote, len };
        self.plane(0).submit(batch).expect("a good batch is taken");
        let done = DataEvent::Completed { op, outcome: Completion::Done };
        assert_eq!(next(self.plane(0)), done, "{direction:?} of {ranges:?}");
        for range in ranges {
            let (from, to) = ends(*range);
            let mut found = vec![0; (range.2 + 2 * MARGIN) as usize];
            self.planes[target].peek(to - MARGIN, &mut found);
            let margin = std::iter::repeat_n(0xa5, MARGIN as usize);
            let moved = (from..from + range.2).map(byte);
            let expected = margin.clone().chain(moved).chain(margin);
            assert!(found.iter().copied().eq(expected), "{direction:?} of {ranges:?}");
        }
    }
}

/// Sizes at which something is split or taken another way: records of TLS, what is short, pieces of a copy,
/// shares of a connection (and of two), chunks of a socket and of a copy, reads that are copied at once.
const SIZES: [u64; 7] = [16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 8 << 20];

/// One range, and the same bytes in three.
fn moves_sizes(way: TestWay, inline_max: Option<u32>) {
    let mut world = EdgeWorld::new(way, (8 << 20) + (64 << 10), inline_max);
    world.register(0, REGION).expect("memory");
    let remote = world.register(1, REGION).expect("memory");
    world.open(SessionId(1), &remote).expect("the session opens");
    for size in SIZES.into_iter().flat_map(|size| [size - 1, size, size + 1]) {
        for direction in DIRECTIONS {
            world.assert_moves(SessionId(1), direction, &[(4_096, 1_000, size)]);
            // The margins of neighbours do not touch, on neither side.
            let (one, two, gap) = (size / 3, size / 2, 2 * MARGIN);
            let ranges = [
                (gap, 64, one),
                (2 * gap + one + 1, 64 + gap + one, two - one),
                (3 * gap + two + 9, 65 + 2 * gap + two, size - two),
            ];
            world.assert_moves(SessionId(1), direction, &ranges);
        }
    }
}

#[test]
fn sizes_at_which_planes_split_are_moved() {
    for way in TestWay::all() {
        moves_sizes(way, None);
    }
}

#[test]
fn sizes_at_which_threads_split_reads_are_moved() {
    for path in [DataPath::SharedMemory, DataPath::CrossMemory] {
        moves_sizes(path.into(), Some(0));
    }
}

/// Sessions that a plane serves on one connection.
const SESSIONS: u32 = 16_384;

#[test]
fn sessions_are_opened_up_to_the_limit_and_again_below_it() {
    for way in TestWay::all() {
        let mut world = EdgeWorld::new(way, 16 << 10, None);
        world.register(0, REGION).expect("memory");
        let remote = world.register(1, REGION).expect("memory");
        for session in 0..SESSIONS {
            let opened = world.open(SessionId(session), &remote);
            assert_eq!(opened, Ok(()), "{way:?}: session {session}");
        }
        for round in 1..4 {
            let more = SessionId(SESSIONS + round);
            assert!(world.open(more, &remote).is_err(), "{way:?}: more sessions than the limit");
            // Those that there are move bytes, and so does one in the place of another.
            for direction in DIRECTIONS {
                world.assert_moves(SessionId(SESSIONS - round), direction, &[(64, 640, 1_000)]);
            }
            world.plane(0).close(SessionId(round));
            // The peer may receive the request to open before the one to close.
            let ids = (0..TRIES).map(|n| SessionId(SESSIONS * (round + 1) + n));
            let again = ids.into_iter().find(|session| world.open(*session, &remote).is_ok());
            let again = again.unwrap_or_else(|| panic!("{way:?}: below the limit again"));
            for direction in DIRECTIONS {
                world.assert_moves(again, direction, &[(64, 640, 1_000)]);
            }
        }
    }
}

/// Times that a session is opened after another one was closed.
const TRIES: u32 = 1_000;

/// Regions that a plane has at a time.
const REGIONS: u32 = 4_096;

#[test]
fn regions_are_registered_up_to_the_limit_and_again_below_it() {
    for way in TestWay::all() {
        let mut world = EdgeWorld::new(way, 16 << 10, None);
        world.register(0, REGION).expect("memory");
        for region in 0..REGIONS {
            assert!(world.register(1, RegionId(region)).is_ok(), "{way:?}: region {region}");
        }
        for round in 0..3 {
            let more = RegionId(REGIONS + round);
            assert!(world.register(1, more).is_err(), "{way:?}: more regions than the limit");
            world.plane(1).deregister(RegionId(round)).expect("nothing uses it");
            let remote = world.register(1, more).expect("below the limit again");
            world.open(SessionId(round), &remote).expect("the session opens");
            for direction in DIRECTIONS {
                world.assert_moves(SessionId(round), direction, &[(64, 640, 1_000)]);
            }
        }
    }
}

/// Processes that die one after the other.
const DEATHS: u32 = 3;

#[test]
fn next_peer_moves_bytes_after_one_died() {
    for way in TestWay::all() {
        let mut world = EdgeWorld::new(way, 16 << 10, None);
        world.register(0, REGION).expect("memory");
        let file = way.path == DataPath::SharedMemory;
        let setup = HostTestSetup { config: config(way), memory: 16 << 10, file };
        for round in 0..DEATHS {
            let (peer, session) = (PeerId(10 + round), SessionId(round));
            let process = start(&setup);
            let pid = Pid::from_raw(process.pid() as i32).expect("a process");
            world.planes[1] = Box::new(process);
            world.connect(peer);
            let remote = world.register(1, REGION).expect("memory");
            world.open_to(peer, session, &remote).expect("a session with the next process opens");
            for direction in DIRECTIONS {
                world.assert_moves(session, direction, &[(64, 640, 1_000), (2_000, 4_096, 9_000)]);
            }
            kill_process(pid, Signal::KILL).expect("it lives");
            world.write_to_the_end(session);
            world.plane(0).disconnect(peer);
        }
    }
}

/// Operations and ranges of one that planes are limited to.
const LIMITS: [(u32, u32); 4] = [(1, 1), (2, 1_023), (3, 1_024), (2, 1_025)];

#[test]
fn planes_take_what_their_settings_allow_and_no_more() {
    let cases = TestWay::all().flat_map(|way| LIMITS.map(|limits| (way, limits)));
    for (way, (operations, slices)) in cases {
        let file = way.path == DataPath::SharedMemory;
        let mut config = config(way);
        (config.operations_max, config.slices_max, config.inline_max) = (operations, slices, 0);
        let setup = HostTestSetup { config, memory: 16 << 10, file };
        let plane = || Box::new(HostTestPlane::new(setup.clone()));
        data_plane_limits(&mut || {
            Box::new(DataPlanePair::new(plane(), SecondPlane::Here(plane())))
        });
    }
}
