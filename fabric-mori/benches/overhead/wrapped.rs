//! What the plane does with a batch on the thread that posts, without the plane.

use crate::config::{Backend, MoriConfig};
use crate::job::Job;
use crate::mori::{Code, Engine, Region, Session, Status};
use crate::{Poster, Ranges};
use engine::fabric::{Direction, Memory, OpId, SessionId, Submit};
use mori_sys::{Places, Shim};
use std::collections::VecDeque;

/// Sessions go before regions, and both before the engines.
pub(crate) struct Wrapped<'a> {
    flying: VecDeque<Status>,
    session: Session,
    _regions: [Region; 2],
    engine: Engine,
    _far: Engine,
    job: Job,
    ranges: &'a Ranges,
    bytes: u64,
    _memory: [Vec<u8>; 2],
}

impl Wrapped<'_> {
    pub(crate) fn new(ranges: &Ranges) -> Wrapped<'_> {
        let asked = Some(mori_double::INSTALLS[1].shim.into());
        let shim = Shim::load(&Places { asked, ..Places::default() }).expect("it loads");
        let config = MoriConfig { backend: Backend::Rdma, ..MoriConfig::default() };
        let bytes = ranges.len.iter().sum::<u64>();
        let memory = [vec![1_u8; bytes as usize], vec![0; bytes as usize]];
        let engines =
            ["near", "far"].map(|key| Engine::new(&shim, &config, key).expect("an engine"));
        let [engine, far] = engines;
        engine.add_peer(&far.desc().expect("a descriptor")).expect("it is understood");
        let own = |memory: &Vec<u8>| Memory::Own { base: memory.as_ptr() as u64, len: bytes };
        let local = engine.register(own(&memory[0])).expect("memory");
        let remote = far.register(own(&memory[1])).expect("memory");
        let session =
            engine.session(&local, &remote.desc().expect("a descriptor")).expect("a session");
        Wrapped {
            flying: VecDeque::new(),
            session,
            _regions: [local, remote],
            engine,
            _far: far,
            job: Job::default(),
            ranges,
            bytes,
            _memory: memory,
        }
    }
}

impl Poster for Wrapped<'_> {
    fn post(&mut self) {
        let Ranges { local, remote, len } = self.ranges;
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
                Code::Success => return,
                Code::InProgress => std::thread::yield_now(),
                other => panic!("{other:?}: {}", status.text()),
            }
        }
    }
}
