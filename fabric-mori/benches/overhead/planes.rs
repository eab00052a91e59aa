//! Two planes, one of which writes.

use crate::{BenchRanges, Poster};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, Direction, Memory, NextPoll, OpId, OwnMemory, PeerId,
    RegionId, SessionId, Submit,
};
use kvferry_fabric_mori::{MoriConfig, MoriPlane, Shim};
use mori_sys::ShimSearchPath;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Waker;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

const REGION: RegionId = RegionId(1);
const PEER: PeerId = PeerId(1);
const SESSION: SessionId = SessionId(1);
const PASS: u64 = 7;

/// Wakes the thread that polls.
struct UnparkWaker(Thread);

impl std::task::Wake for UnparkWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

pub(crate) struct PlanePoster<'a> {
    near: MoriPlane,
    far: MoriPlane,
    ranges: &'a BenchRanges,
    begun: Instant,
    /// Posts so far, those that were waited for, and those beyond that have ended.
    posted: u64,
    waited: u64,
    ended: BTreeSet<u64>,
    _memory: [Vec<u8>; 2],
}

impl PlanePoster<'_> {
    pub(crate) fn new(ranges: &BenchRanges) -> PlanePoster<'_> {
        let asked = Some(mori_double::INSTALLS[1].shim.into());
        let shim =
            Shim::load(&ShimSearchPath { asked, ..ShimSearchPath::default() }).expect("it loads");
        let plane = |key: &str| {
            let config = MoriConfig { key: key.into(), devices: false, ..MoriConfig::default() };
            let mut plane = MoriPlane::with_shim(shim.clone(), config).expect("a plane");
            plane.set_waker(Waker::from(Arc::new(UnparkWaker(thread::current()))));
            plane
        };
        let (near, far) = (plane("near"), plane("far"));
        let bytes = ranges.len.iter().sum::<u64>();
        let memory = [vec![1_u8; bytes as usize], vec![0; bytes as usize]];
        let mut planes = PlanePoster {
            near,
            far,
            ranges,
            begun: Instant::now(),
            posted: 0,
            waited: 0,
            ended: BTreeSet::new(),
            _memory: memory,
        };
        planes.meet(bytes);
        planes
    }

    fn meet(&mut self, bytes: u64) {
        let PlanePoster { near, far, _memory: memory, .. } = self;
        for (plane, memory) in [(&mut *near, &memory[0]), (&mut *far, &memory[1])] {
            // SAFETY: The poster keeps the memory as long as both planes, and looks at none of it.
            let memory = Memory::Own(unsafe { OwnMemory::new(memory.as_ptr() as u64, bytes) });
            plane.register(REGION, memory).expect("memory");
        }
        let [near_at, far_at] = [near.address(), far.address()];
        near.connect(PEER, &far_at, PASS).expect("an address");
        far.connect(PEER, &near_at, PASS).expect("an address");
        let mut descs = [None, None];
        while descs.iter().any(Option::is_none) {
            for (desc, event) in self.look() {
                if let DataEvent::Registered { result, .. } = event {
                    descs[desc] = Some(result.expect("it is registered"));
                }
            }
        }
        let [_, Some(remote)] = descs else { unreachable!("both are there") };
        self.near.open(SESSION, REGION, PEER, &remote).expect("a session");
        while !self.look().iter().any(|(_, event)| matches!(event, DataEvent::Opened { .. })) {}
    }

    /// What either plane, by its number, has to say; waits for it.
    fn look(&mut self) -> Vec<(usize, DataEvent)> {
        loop {
            let now = Nanos(self.begun.elapsed().as_nanos() as u64);
            let (mut near, mut far) = (Vec::new(), Vec::new());
            let wake = self.near.poll(now, &mut near);
            self.far.poll(now, &mut far);
            if !near.is_empty() || !far.is_empty() {
                let near = near.into_iter().map(|event| (0, event));
                return near.chain(far.into_iter().map(|event| (1, event))).collect();
            }
            match wake {
                NextPoll::Ready => {}
                NextPoll::At(at) => thread::park_timeout(Duration::from_nanos(at.0 - now.0)),
                NextPoll::External => thread::park(),
            }
        }
    }
}

impl Poster for PlanePoster<'_> {
    fn post(&mut self) {
        let BenchRanges { local, remote, len } = self.ranges;
        let (op, session, direction) = (OpId(self.posted), SESSION, Direction::Write);
        let batch = Submit { op, session, direction, local, remote, len };
        self.near.submit(batch).expect("there is room");
        self.posted += 1;
    }

    fn wait(&mut self) {
        while !self.ended.remove(&self.waited) {
            for (_, event) in self.look() {
                if let DataEvent::Completed { op, outcome } = event {
                    assert_eq!(outcome, Completion::Done, "a transfer failed");
                    self.ended.insert(op.0);
                }
            }
        }
        self.waited += 1;
    }
}
