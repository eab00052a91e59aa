//! A plane of the mesh, in this process or in one of its own.

use crate::common::world::faults;
use crate::common::{MoriTestPlane, MoriTestSetup, config, start};
use kvferry_engine::conformance::{PlaneUnderTest, RemotePlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, DataEvent, DataPlane, Direction, OpId, PeerId, QuiesceTicket, Refused, RegionDesc,
    RegionId, SessionId, Submit,
};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use std::fs;
use std::path::PathBuf;

const REGION: RegionId = RegionId(1);

enum SoakProcess {
    Here(Box<MoriTestPlane>),
    There(Box<RemotePlane>),
}

/// What others have to know of a plane.
#[derive(Clone)]
pub(crate) struct SoakNodeInfo {
    /// Counts its starts and resets.
    pub(crate) incarnation: u64,
    pub(crate) address: Address,
    pub(crate) desc: RegionDesc,
}

pub(crate) struct SoakNode {
    place: SoakProcess,
    ports: PathBuf,
    memory: u64,
    address: Address,
    incarnation: u64,
    /// None until its memory is registered.
    pub(crate) known: Option<SoakNodeInfo>,
    pub(crate) stopped: bool,
}

/// Limits that are short beside the troubles, and long beside what an operation takes.
fn settings() -> MoriConfig {
    MoriConfig {
        operation_ms: 500,
        drain_ms: 100,
        open_ms: 2_000,
        dead_ms: 2_000,
        ..config(MoriBackend::Rdma)
    }
}

impl SoakNode {
    fn new(place: SoakProcess, memory: u64, ports: PathBuf) -> SoakNode {
        let address = match &place {
            SoakProcess::Here(local) => local.address(),
            SoakProcess::There(remote) => remote.address(),
        };
        let (known, stopped) = (None, false);
        let mut node = SoakNode { place, ports, memory, address, incarnation: 0, known, stopped };
        node.register();
        node
    }

    pub(crate) fn here(memory: u64, ports: PathBuf) -> SoakNode {
        let setup = MoriTestSetup { memory, ..MoriTestSetup::of(settings()) };
        SoakNode::new(SoakProcess::Here(Box::new(MoriTestPlane::new(&setup))), memory, ports)
    }

    /// `spec` is what MoRI does wrong there.
    pub(crate) fn there(memory: u64, ports: PathBuf, spec: String) -> SoakNode {
        let setup = MoriTestSetup { memory, faults: Some(spec), ..MoriTestSetup::of(settings()) };
        SoakNode::new(SoakProcess::There(Box::new(start(&setup))), memory, ports)
    }

    fn served(&mut self) -> &mut dyn PlaneUnderTest {
        match &mut self.place {
            SoakProcess::Here(local) => &mut **local,
            SoakProcess::There(remote) => &mut **remote,
        }
    }

    pub(crate) fn plane(&mut self) -> &mut dyn DataPlane {
        self.served().plane()
    }

    fn register(&mut self) {
        let memory = self.served().memory();
        self.plane().register(REGION, memory).expect("memory is taken");
    }

    /// What the plane says, but for what is of the node alone.
    pub(crate) fn poll(&mut self, now: Nanos) -> Vec<DataEvent> {
        let mut events = Vec::new();
        self.plane().poll(now, &mut events);
        for event in &events {
            match event {
                DataEvent::Registered { result, .. } => {
                    let desc = result.clone().expect("its memory can be used");
                    self.incarnation += 1;
                    let (incarnation, address) = (self.incarnation, self.address.clone());
                    self.known = Some(SoakNodeInfo { incarnation, address, desc });
                }
                DataEvent::Reset { address } => {
                    self.known = None;
                    self.address = address.clone();
                    self.register();
                }
                _ => {}
            }
        }
        events
    }

    pub(crate) fn open(&mut self, session: SessionId, peer: PeerId, remote: &RegionDesc) {
        self.plane().open(session, REGION, peer, remote).expect("an open is taken");
    }

    pub(crate) fn write(
        &mut self,
        op: OpId,
        session: SessionId,
        (from, to): (u64, u64),
        len: u64,
    ) -> Result<(), Refused> {
        let half = len / 2;
        let (local, remote) = (&[from + half, from][..], &[to + half, to][..]);
        let (direction, len) = (Direction::Write, &[half, half][..]);
        self.plane().submit(Submit { op, session, direction, local, remote, len })
    }

    pub(crate) fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        self.plane().quiesce(session, ticket);
    }

    pub(crate) fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.served().poke(offset, bytes);
    }

    pub(crate) fn peek(&mut self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.served().peek(offset, &mut bytes);
        bytes
    }

    fn pid(&self) -> u32 {
        match &self.place {
            SoakProcess::Here(_) => std::process::id(),
            SoakProcess::There(remote) => remote.pid(),
        }
    }

    /// The process, if it is another one.
    fn remote(&mut self) -> &mut RemotePlane {
        let SoakProcess::There(remote) = &mut self.place else { panic!("not this process") };
        remote
    }

    pub(crate) fn stop(&mut self) {
        self.remote().stop();
        self.stopped = true;
    }

    pub(crate) fn go_on(&mut self) {
        self.remote().go_on();
        self.stopped = false;
    }

    /// Takes its network port down, or up again.
    pub(crate) fn port(&self, up: bool) {
        let file = self.ports.join(self.pid().to_string());
        match up {
            true => fs::remove_file(file).expect("it was down"),
            false => fs::write(file, "").expect("a file"),
        }
    }

    /// Ends its process, and starts another one.
    pub(crate) fn kill(&mut self, spec: String) {
        self.remote().kill();
        let incarnation = self.incarnation + 1;
        *self = SoakNode::there(self.memory, self.ports.clone(), spec);
        self.incarnation = incarnation;
    }

    /// What MoRI does wrong in this process.
    pub(crate) fn faults(&self, spec: &str) {
        if let SoakProcess::Here(_) = self.place {
            faults(spec);
        }
    }

    pub(crate) fn is_here(&self) -> bool {
        matches!(self.place, SoakProcess::Here(_))
    }
}
