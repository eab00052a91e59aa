//! A plane of the mesh, in this process or in one of its own.

use crate::common::world::faults;
use crate::common::{Local, Setup, config, start};
use engine::conformance::{Remote, Served};
use engine::core::time::Nanos;
use engine::fabric::{
    Address, DataEvent, DataPlane, Direction, OpId, PeerId, Refused, RegionDesc, RegionId,
    SessionId, Submit, Ticket,
};
use fabric_mori::{Backend, MoriConfig};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::fs;
use std::path::PathBuf;

const REGION: RegionId = RegionId(1);

enum Place {
    Here(Box<Local>),
    There(Box<Remote>),
}

/// What others have to know of a plane.
#[derive(Clone)]
pub(crate) struct Known {
    /// Counts its starts and resets.
    pub(crate) life: u64,
    pub(crate) address: Address,
    pub(crate) desc: RegionDesc,
}

pub(crate) struct Node {
    place: Place,
    ports: PathBuf,
    memory: u64,
    address: Address,
    life: u64,
    /// None until its memory is registered.
    pub(crate) known: Option<Known>,
    pub(crate) stopped: bool,
}

/// Limits that are short beside the troubles, and long beside what an operation takes.
fn settings() -> MoriConfig {
    MoriConfig {
        operation_ms: 500,
        drain_ms: 100,
        open_ms: 2_000,
        dead_ms: 2_000,
        ..config(Backend::Rdma)
    }
}

impl Node {
    fn new(place: Place, memory: u64, ports: PathBuf) -> Node {
        let address = match &place {
            Place::Here(local) => local.plane.address(),
            Place::There(remote) => remote.address(),
        };
        let (known, stopped) = (None, false);
        let mut node = Node { place, ports, memory, address, life: 0, known, stopped };
        node.register();
        node
    }

    pub(crate) fn here(memory: u64, ports: PathBuf) -> Node {
        let setup = Setup { config: settings(), memory, faults: None };
        Node::new(Place::Here(Box::new(Local::new(&setup))), memory, ports)
    }

    /// `spec` is what MoRI does wrong there.
    pub(crate) fn there(memory: u64, ports: PathBuf, spec: String) -> Node {
        let setup = Setup { config: settings(), memory, faults: Some(spec) };
        Node::new(Place::There(Box::new(start(&setup))), memory, ports)
    }

    fn served(&mut self) -> &mut dyn Served {
        match &mut self.place {
            Place::Here(local) => &mut **local,
            Place::There(remote) => &mut **remote,
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
                    self.life += 1;
                    let (life, address) = (self.life, self.address.clone());
                    self.known = Some(Known { life, address, desc });
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

    pub(crate) fn quiesce(&mut self, session: SessionId, ticket: Ticket) {
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
            Place::Here(_) => std::process::id(),
            Place::There(remote) => remote.pid(),
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).expect("a process");
        kill_process(pid, signal).expect("our child");
        if signal == Signal::STOP {
            waitpid(Some(pid), WaitOptions::UNTRACED).expect("it stops");
        }
    }

    pub(crate) fn stop(&mut self) {
        self.signal(Signal::STOP);
        self.stopped = true;
    }

    pub(crate) fn go_on(&mut self) {
        self.signal(Signal::CONT);
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
        let Place::There(remote) = &mut self.place else { panic!("not this process") };
        remote.kill();
        let life = self.life + 1;
        *self = Node::there(self.memory, self.ports.clone(), spec);
        self.life = life;
    }

    /// What MoRI does wrong in this process.
    pub(crate) fn faults(&self, spec: &str) {
        if let Place::Here(_) = self.place {
            faults(spec);
        }
    }

    pub(crate) fn is_here(&self) -> bool {
        matches!(self.place, Place::Here(_))
    }
}
