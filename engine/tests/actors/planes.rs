//! Planes within one process: bytes are copied at submit, frames are queued for the other side.

use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::*;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::task::Waker;

/// All memory, by plane and region.
pub(crate) type LoopbackMemory = Arc<Mutex<BTreeMap<(u8, u32), Vec<u8>>>>;

/// A data plane named by one byte.
pub(crate) struct Loopback {
    pub(crate) name: u8,
    pub(crate) store: LoopbackMemory,
    peers: BTreeMap<PeerId, u8>,
    sessions: BTreeMap<SessionId, (u32, u8, u32)>,
    events: VecDeque<DataEvent>,
}

impl Loopback {
    pub(crate) fn new(name: u8, store: LoopbackMemory) -> Loopback {
        Loopback {
            name,
            store,
            peers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            events: VecDeque::new(),
        }
    }
}

impl DataPlane for Loopback {
    fn caps(&self) -> Caps {
        Caps {
            read: true,
            write: true,
            slices_max: 1024,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(64),
            placement: Placement::OnCompletion,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        }
    }

    fn address(&self) -> Address {
        Address([self.name].into())
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        self.store.lock().unwrap().insert((self.name, region.0), vec![0; memory.len() as usize]);
        let result = Ok(RegionDesc([self.name, region.0 as u8].into()));
        self.events.push_back(DataEvent::Registered { region, result });
        Ok(())
    }

    fn deregister(&mut self, _: RegionId) -> Result<(), Refused> {
        Ok(())
    }

    fn connect(&mut self, peer: PeerId, address: &Address, _: u64) -> Result<(), Refused> {
        self.peers.insert(peer, address.0[0]);
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        let there = *self.peers.get(&peer).ok_or(Refused::Gone)?;
        self.sessions.insert(session, (local.0, there, u32::from(remote.0[1])));
        self.events.push_back(DataEvent::Opened { session, result: Ok(()) });
        Ok(())
    }

    fn close(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        let &(local, there, remote) = self.sessions.get(&batch.session).ok_or(Refused::Gone)?;
        let mut store = self.store.lock().unwrap();
        for index in 0..batch.len.len() {
            let (near, far) = (batch.local[index] as usize, batch.remote[index] as usize);
            let len = batch.len[index] as usize;
            let (from, to, source, receiver) = match batch.direction {
                Direction::Write => (near, far, (self.name, local), (there, remote)),
                Direction::Read => (far, near, (there, remote), (self.name, local)),
            };
            let bytes = store[&source][from..from + len].to_vec();
            store.get_mut(&receiver).unwrap()[to..to + len].copy_from_slice(&bytes);
        }
        self.events.push_back(DataEvent::Completed { op: batch.op, outcome: Completion::Done });
        Ok(())
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        self.events.push_back(DataEvent::Quiet { session, ticket });
    }

    fn fence(&mut self, peer: PeerId) {
        self.events.push_back(DataEvent::Fenced { peer });
    }

    fn set_waker(&mut self, _: Waker) {}

    fn poll(&mut self, _: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        out.extend(self.events.drain(..));
        NextPoll::External
    }
}

/// What two control planes share: an inbox and a waker each.
#[derive(Default)]
pub(crate) struct LoopbackWire {
    inbox: [VecDeque<ControlEvent>; 2],
    wakers: [Option<Waker>; 2],
}

/// One of two control planes; side 0 dials.
pub(crate) struct LoopbackSide {
    pub(crate) side: usize,
    pub(crate) wire: Arc<Mutex<LoopbackWire>>,
}

impl LoopbackSide {
    fn tell(&self, side: usize, event: ControlEvent) {
        let mut wire = self.wire.lock().unwrap();
        wire.inbox[side].push_back(event);
        let waker = wire.wakers[side].clone();
        drop(wire);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl ControlPlane for LoopbackSide {
    fn listen(&mut self, _: LinkKind) -> Result<Endpoint, Refused> {
        Ok("loopback".into())
    }

    fn dial(&mut self, link: LinkId, _: &Endpoint, channel: LinkKind) -> Result<(), Refused> {
        self.tell(self.side, ControlEvent::LinkUp { link, channel, from: None });
        let link = LinkId(link.0 ^ LinkId::INBOUND);
        self.tell(1 - self.side, ControlEvent::LinkUp { link, channel, from: None });
        Ok(())
    }

    fn send(&mut self, link: LinkId, parts: &[&[u8]]) -> Result<(), Refused> {
        let parts = parts.iter().map(|part| part.to_vec()).collect();
        let link = LinkId(link.0 ^ LinkId::INBOUND);
        self.tell(1 - self.side, ControlEvent::Frame { link, parts });
        Ok(())
    }

    fn hang_up(&mut self, link: LinkId) {
        let link = LinkId(link.0 ^ LinkId::INBOUND);
        self.tell(1 - self.side, ControlEvent::LinkDown { link });
    }

    fn set_waker(&mut self, waker: Waker) {
        self.wire.lock().unwrap().wakers[self.side] = Some(waker);
    }

    fn poll(&mut self, _: Nanos, out: &mut Vec<ControlEvent>) -> NextPoll {
        out.extend(self.wire.lock().unwrap().inbox[self.side].drain(..));
        NextPoll::External
    }
}
