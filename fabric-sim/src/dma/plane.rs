//! The half of the data network that a process owns.

use super::call::{DataPlaneIx, DmaCall, DmaCalls, DmaMessage, SimRegionDesc};
use crate::memory::OpSlice;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, Credits, DataEvent, DataPlane, DigestBatch, Direction, Memory, NextPoll, OpId,
    PeerId, QuiesceTicket, Refused, RegionDesc, RegionId, SessionId, Submit,
};
use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;

/// A data plane whose calls are checked here and performed by [`super::Dma`]: the world takes them
/// with [`SimDataPlane::take_calls`] and answers with [`SimDataPlane::deliver`].
#[derive(Debug)]
pub struct SimDataPlane {
    ix: DataPlaneIx,
    address: Address,
    caps: Caps,
    /// Operations in flight at most; less than the capability while the queue is full.
    credits: u32,
    regions: BTreeMap<RegionId, SimRegion>,
    registrations: u32,
    peers: BTreeMap<PeerId, DataPlaneIx>,
    sessions: BTreeMap<SessionId, SimSession>,
    /// Operations in flight: their region, peer and credit.
    operations: BTreeMap<OpId, (RegionId, PeerId, Credits)>,
    used: Credits,
    used_by: BTreeMap<PeerId, Credits>,
    calls: DmaCalls,
    inbox: VecDeque<DataEvent>,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct SimRegion {
    memory: Memory,
    operations: u32,
}

#[derive(Debug)]
struct SimSession {
    local: RegionId,
    local_len: u64,
    peer: PeerId,
    remote_len: u64,
    open: bool,
}

impl SimDataPlane {
    pub(super) fn new(ix: DataPlaneIx, caps: Caps) -> SimDataPlane {
        SimDataPlane {
            ix,
            address: ix.address(0),
            caps,
            credits: caps.in_all.operations,
            used: Credits::default(),
            used_by: BTreeMap::new(),
            regions: BTreeMap::new(),
            registrations: 0,
            peers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            operations: BTreeMap::new(),
            calls: DmaCalls::default(),
            inbox: VecDeque::new(),
            waker: None,
        }
    }

    /// Which plane this is.
    pub fn ix(&self) -> DataPlaneIx {
        self.ix
    }

    /// Moves the calls made since the last time into `into`, whose memory is reused.
    pub fn take_calls(&mut self, into: &mut DmaCalls) {
        into.clear();
        std::mem::swap(&mut self.calls, into);
    }

    /// True if there are calls to take.
    pub fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Takes in what the data network tells.
    pub fn deliver(&mut self, news: DmaMessage) {
        match news {
            DmaMessage::Credits(credits) => self.credits = credits,
            DmaMessage::SessionDead(session) => {
                self.sessions.entry(session).and_modify(|session| session.open = false);
            }
            DmaMessage::Event(event) => {
                self.note(&event);
                // Of two resets between polls the later stands for both.
                if matches!(event, DataEvent::Reset { .. }) {
                    self.inbox.retain(|earlier| !matches!(earlier, DataEvent::Reset { .. }));
                }
                self.inbox.push_back(event);
                if let Some(waker) = &self.waker {
                    waker.wake_by_ref();
                }
            }
        }
    }

    fn note(&mut self, event: &DataEvent) {
        match event {
            DataEvent::Opened { session, result } => {
                let open = result.is_ok();
                self.sessions.entry(*session).and_modify(|session| session.open = open);
            }
            DataEvent::Completed { op, .. } => {
                let Some((region, peer, used)) = self.operations.remove(op) else { return };
                if let Some(region) = self.regions.get_mut(&region) {
                    region.operations -= 1;
                }
                self.used.remove(&used);
                let by_peer = self.used_by.entry(peer).or_default();
                by_peer.remove(&used);
                if by_peer.operations == 0 {
                    self.used_by.remove(&peer);
                }
            }
            DataEvent::Reset { address } => {
                self.address = address.clone();
                self.regions.clear();
                self.peers.clear();
                self.sessions.clear();
                self.operations.clear();
                self.used = Credits::default();
                self.used_by.clear();
            }
            _ => {}
        }
    }

    /// Operations accepted and not completed.
    pub fn in_flight(&self) -> usize {
        self.operations.len()
    }

    /// The region, the peer and the credit that a batch takes.
    fn check(&self, batch: &Submit<'_>) -> Result<(RegionId, PeerId, Credits), Refused> {
        let Some(session) = self.sessions.get(&batch.session).filter(|session| session.open) else {
            return Err(Refused::Gone);
        };
        let able = match batch.direction {
            Direction::Read => self.caps.read,
            Direction::Write => self.caps.write,
        };
        if !able {
            return Err(Refused::Unsupported(format!("{:?}", batch.direction).into()));
        }
        let count = batch.len.len();
        if batch.local.len() != count || batch.remote.len() != count {
            return invalid("lists of different length");
        }
        if count > self.caps.slices_max as usize {
            return invalid("more slices than an operation can have");
        }
        if self.operations.contains_key(&batch.op) {
            return invalid("operation id in use");
        }
        let inside =
            |from: u64, len: u64, end: u64| from.checked_add(len).is_some_and(|to| to <= end);
        for ((local, remote), len) in batch.local.iter().zip(batch.remote).zip(batch.len) {
            if !inside(*local, *len, session.local_len) {
                return Err(Refused::Invalid(format!("local range {local}+{len}").into()));
            }
            if !inside(*remote, *len, session.remote_len) {
                return Err(Refused::Invalid(format!("remote range {remote}+{len}").into()));
            }
        }
        let more = Credits { operations: 1, ranges: count as u64, bytes: batch.len.iter().sum() };
        let in_all = Credits { operations: self.credits, ..self.caps.in_all };
        let used_by = self.used_by.get(&session.peer).copied().unwrap_or_default();
        if !in_all.fits(&self.used, &more) || !self.caps.per_peer.fits(&used_by, &more) {
            return Err(Refused::Busy);
        }
        Ok((session.local, session.peer, more))
    }
}

fn invalid<T>(why: &str) -> Result<T, Refused> {
    Err(Refused::Invalid(why.into()))
}

impl DataPlane for SimDataPlane {
    fn caps(&self) -> Caps {
        self.caps
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        if self.regions.contains_key(&region) {
            return invalid("region id in use");
        }
        if memory.is_empty() {
            return invalid("empty region");
        }
        if !matches!(memory, Memory::Own(_) | Memory::Device { .. }) {
            return Err(Refused::Unsupported("memory of another process".into()));
        }
        self.registrations += 1;
        let serial = self.registrations;
        self.regions.insert(region, SimRegion { memory, operations: 0 });
        self.calls.list.push(DmaCall::Register { region, serial, memory });
        Ok(())
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        match self.regions.get(&region) {
            None => return invalid("no such region"),
            Some(used) if used.operations > 0 => return Err(Refused::Busy),
            Some(_) => {}
        }
        self.regions.remove(&region);
        for session in self.sessions.values_mut().filter(|session| session.local == region) {
            session.open = false;
        }
        self.calls.list.push(DmaCall::Deregister { region });
        Ok(())
    }

    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        if self.peers.contains_key(&peer) {
            return invalid("peer id in use");
        }
        let Some(plane) = DataPlaneIx::of(address) else {
            return invalid("address of another kind of plane");
        };
        self.peers.insert(peer, plane);
        self.calls.list.push(DmaCall::Connect { peer, plane, fence_key });
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        if self.peers.remove(&peer).is_none() {
            return;
        }
        self.sessions.retain(|_, session| session.peer != peer);
        self.calls.list.push(DmaCall::Disconnect { peer });
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        if self.sessions.contains_key(&session) {
            return invalid("session id in use");
        }
        let Some(region) = self.regions.get(&local) else { return invalid("no such region") };
        let Some(plane) = self.peers.get(&peer) else { return invalid("no such peer") };
        let Some(remote) = SimRegionDesc::decode(remote).filter(|remote| remote.plane == *plane)
        else {
            return invalid("descriptor of another plane");
        };
        let (local_len, remote_len) = (region.memory.len(), remote.len);
        let entry = SimSession { local, local_len, peer, remote_len, open: false };
        self.sessions.insert(session, entry);
        self.calls.list.push(DmaCall::Open { session, local, peer, remote });
        Ok(())
    }

    fn close(&mut self, session: SessionId) {
        if self.sessions.remove(&session).is_some() {
            self.calls.list.push(DmaCall::Close { session });
        }
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        let (local, peer, more) = self.check(&batch)?;
        self.operations.insert(batch.op, (local, peer, more));
        self.used.add(&more);
        self.used_by.entry(peer).or_default().add(&more);
        if let Some(region) = self.regions.get_mut(&local) {
            region.operations += 1;
        }
        let first = self.calls.slices.len() as u32;
        let ranges = batch.local.iter().zip(batch.remote).zip(batch.len);
        let slice = |((local, remote), len): ((&u64, &u64), &u64)| OpSlice {
            local: *local,
            remote: *remote,
            len: *len,
        };
        self.calls.slices.extend(ranges.map(slice));
        let Submit { op, session, direction, .. } = batch;
        let slices = (first, self.calls.slices.len() as u32);
        self.calls.list.push(DmaCall::Submit { op, session, direction, slices });
        Ok(())
    }

    fn digests(&self) -> bool {
        true
    }

    fn digest(&mut self, batch: DigestBatch) -> Result<(), Refused> {
        let Some(SimRegion { memory, .. }) = self.regions.get(&batch.region) else {
            return invalid("no such region");
        };
        batch.check(memory.len())?;
        let memory = *memory;
        self.calls.list.push(DmaCall::Digest { batch, memory });
        Ok(())
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        self.calls.list.push(DmaCall::Quiesce { session, ticket });
    }

    fn fence(&mut self, peer: PeerId) {
        self.calls.list.push(DmaCall::Fence { peer });
    }

    fn set_waker(&mut self, waker: Waker) {
        self.waker = Some(waker);
    }

    fn poll(&mut self, _now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        out.extend(self.inbox.drain(..));
        NextPoll::External
    }
}
