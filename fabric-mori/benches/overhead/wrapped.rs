//! What the plane does with a batch on the thread that posts, without the plane.

use crate::config::{MoriBackend, MoriConfig};
use crate::job::MoriBatch;
use crate::mori::{
    MoriEngineHandle, MoriMemoryHandle, MoriSessionHandle, MoriStatusCode, MoriTransferStatus,
};
use crate::{BenchRanges, Poster};
use kvferry_engine::fabric::{Direction, Memory, OpId, OwnMemory, SessionId, Submit};
use mori_sys::{Shim, ShimSearchPath};
use std::collections::VecDeque;

/// Sessions go before regions, and both before the engines.
pub(crate) struct WrappedPoster<'a> {
    flying: VecDeque<MoriTransferStatus>,
    session: MoriSessionHandle,
    _regions: [MoriMemoryHandle; 2],
    engine: MoriEngineHandle,
    _far: MoriEngineHandle,
    job: MoriBatch,
    ranges: &'a BenchRanges,
    bytes: u64,
    _memory: [Vec<u8>; 2],
}

impl WrappedPoster<'_> {
    pub(crate) fn new(ranges: &BenchRanges) -> WrappedPoster<'_> {
        let asked = Some(mori_double::INSTALLS[1].shim.into());
        let shim =
            Shim::load(&ShimSearchPath { asked, ..ShimSearchPath::default() }).expect("it loads");
        let config = MoriConfig { backend: MoriBackend::Rdma, ..MoriConfig::default() };
        let bytes = ranges.len.iter().sum::<u64>();
        let memory = [vec![1_u8; bytes as usize], vec![0; bytes as usize]];
        let engines = ["near", "far"]
            .map(|key| MoriEngineHandle::new(&shim, &config, key).expect("an engine"));
        let [engine, far] = engines;
        engine.add_peer(&far.desc().expect("a descriptor")).expect("it is understood");
        // SAFETY: The poster keeps the memory as long as both regions, and looks at none of it.
        let own = |memory: &Vec<u8>| unsafe {
            Memory::Own(OwnMemory::new(memory.as_ptr() as u64, bytes))
        };
        let local = engine.register(own(&memory[0])).expect("memory");
        let remote = far.register(own(&memory[1])).expect("memory");
        let session =
            engine.session(&local, &remote.desc().expect("a descriptor")).expect("a session");
        WrappedPoster {
            flying: VecDeque::new(),
            session,
            _regions: [local, remote],
            engine,
            _far: far,
            job: MoriBatch::default(),
            ranges,
            bytes,
            _memory: memory,
        }
    }
}

impl Poster for WrappedPoster<'_> {
    fn post(&mut self) {
        let BenchRanges { local, remote, len } = self.ranges;
        let (op, session, direction) = (OpId(1), SessionId(1), Direction::Write);
        let batch = Submit { op, session, direction, local, remote, len };
        self.job.fill(&batch, [self.bytes; 2]).expect("inside");
        let status = self.session.status().expect("a status");
        self.session.post(&self.job, &status).expect("it is posted");
        self.flying.push_back(status);
    }

    fn wait(&mut self) {
        let status = self.flying.pop_front().expect("one is under way");
        loop {
            match status.poll() {
                MoriStatusCode::Success => return,
                MoriStatusCode::InProgress => std::thread::yield_now(),
                other => panic!("{other:?}: {}", status.text()),
            }
        }
    }
}
