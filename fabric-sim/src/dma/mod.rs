//! The data network: [`SimDataPlane`] for processes, [`Dma`] for the world.
//!
//! The world takes the calls of a plane and gives them to [`Dma::perform`], gives the entries that
//! this schedules back to [`Dma::step`], and hands what comes out to the planes. What goes wrong
//! is decided by the world, per call ([`DmaHooks`]) or by switch.
//!
//! Bytes are copied from source to target at the moment in which a slice lands, so a source that
//! is rewritten before tears a read as well as a write. A landing checks that both regions exist
//! and that the other side still lets the initiator in.

mod access;
mod backend;
mod call;
mod meter;
mod nic;
mod operation;
mod plane;
mod session;

pub use call::{
    BytesDecision, CompletionDecision, DataPlaneIx, DmaCalls, DmaConfig, DmaContext, DmaEvent,
    DmaHooks, DmaLanding, DmaMessage, DmaOutput, NicIx, OpDecision, OpInfo, PlaneSpec,
};
pub use plane::SimDataPlane;

use crate::keyed_rng::{InclusiveRange, KeyedRng};
use crate::memory::{LandingScratch, OpSlice, RankStore, SegmentOffset};
use crate::slab::Slab;
use call::{DmaCall, SimRegionDesc};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Caps, DataEvent, DigestBatch, FabricError, Memory, PeerId, RegionId, SessionId, digest_of,
};
use nic::Nics;
use operation::DmaOp;
use session::DmaSession;
use std::collections::{BTreeMap, BTreeSet};

/// How fast memory is digested.
const DIGEST_BYTES_PER_NS: u64 = 10;

/// The data network and the memory of all planes.
#[derive(Debug)]
pub struct Dma {
    config: DmaConfig,
    keyed: KeyedRng,
    planes: Vec<DmaPlane>,
    /// None once it is gone.
    stores: Vec<Option<RankStore>>,
    /// Which of them each plane has.
    store_of: Vec<u32>,
    nics: Nics,
    sessions: Vec<DmaSession>,
    ops: Vec<DmaOp>,
    free_ops: Vec<u32>,
    /// Operations that wait for a partition to end.
    stalled: BTreeSet<u32>,
    /// News on their way; none in a slot whose news are void.
    mail: Slab<Option<(DataPlaneIx, DmaMessage)>>,
    /// Ordered pairs of nodes between which nothing passes.
    cut: BTreeSet<(u32, u32)>,
    /// Servers of links slower than the ports.
    slow: BTreeMap<(u32, u32), u32>,
    scratch: LandingScratch,
}

#[derive(Debug)]
struct DmaPlane {
    node: u32,
    nic: NicIx,
    nic_local: NicIx,
    caps: Caps,
    alive: bool,
    /// Backends that it has had before.
    backend_generation: u32,
    lost: bool,
    paused: bool,
    /// News that came while it was paused.
    held: Vec<DmaMessage>,
    /// Serials of registered memory.
    regions: BTreeMap<RegionId, u32>,
    /// Registered memory by serial.
    places: BTreeMap<u32, (SegmentOffset, u64)>,
    peers: BTreeMap<PeerId, (DataPlaneIx, u64)>,
    /// Planes and passes that may reach in.
    admitted: BTreeSet<(DataPlaneIx, u64)>,
    /// Those that may never again.
    fenced: BTreeSet<(DataPlaneIx, u64)>,
    sessions: BTreeMap<SessionId, u32>,
    /// Grows when something that was allowed no longer is.
    epoch: u32,
    submitted: u64,
    drawn: u64,
}

mod draw {
    use kvferry_scenarios::decide::kind;

    pub(super) const LATENCY: u64 = kind("dma.latency");
    pub(super) const ACK: u64 = kind("dma.ack");
    pub(super) const SHUFFLE: u64 = kind("dma.shuffle");
    pub(super) const STOP: u64 = kind("dma.stop");
    pub(super) const TEARDOWN: u64 = kind("dma.teardown");
    pub(super) const ANSWER: u64 = kind("dma.answer");
}

impl Dma {
    /// A network without ports and planes.
    pub fn new(config: DmaConfig) -> Dma {
        Dma {
            keyed: KeyedRng::new(config.seed),
            config,
            planes: Vec::new(),
            stores: Vec::new(),
            store_of: Vec::new(),
            nics: Nics::default(),
            sessions: Vec::new(),
            ops: Vec::new(),
            free_ops: Vec::new(),
            stalled: BTreeSet::new(),
            mail: Slab::default(),
            cut: BTreeSet::new(),
            slow: BTreeMap::new(),
            scratch: LandingScratch::default(),
        }
    }

    pub fn add_nic(&mut self, bytes_per_sec: u64) -> NicIx {
        self.nics.add(bytes_per_sec)
    }

    /// Bytes that a port was given to send and to receive.
    pub fn nic_bytes(&self, nic: NicIx) -> (u64, u64) {
        let nic = self.nics.get(nic);
        let bytes = |server: u32| self.nics.servers[server as usize].bytes();
        (bytes(nic.out), bytes(nic.into))
    }

    /// For how long a port was used above 80 %, out and in, as averaged over tenths of a second.
    pub fn nic_full(&self, nic: NicIx) -> (Nanos, Nanos) {
        let nic = self.nics.get(nic);
        let full = |server: u32| self.nics.servers[server as usize].full();
        (full(nic.out), full(nic.into))
    }

    /// Bandwidth of a port.
    pub fn nic_rate(&self, nic: NicIx) -> u64 {
        self.nics.servers[self.nics.get(nic).out as usize].bytes_per_sec()
    }

    /// Adds a plane; for a restarted process too.
    pub fn add_plane(&mut self, spec: PlaneSpec) -> SimDataPlane {
        let ix = DataPlaneIx(self.planes.len() as u32);
        self.store_of.push(self.stores.len() as u32);
        self.stores.push(Some(spec.store));
        self.planes.push(DmaPlane {
            node: spec.node,
            nic: spec.nic,
            nic_local: spec.nic_local,
            caps: spec.caps,
            alive: true,
            backend_generation: 0,
            lost: false,
            paused: false,
            held: Vec::new(),
            regions: BTreeMap::new(),
            places: BTreeMap::new(),
            peers: BTreeMap::new(),
            admitted: BTreeSet::new(),
            fenced: BTreeSet::new(),
            sessions: BTreeMap::new(),
            epoch: 0,
            submitted: 0,
            drawn: 0,
        });
        SimDataPlane::new(ix, spec.caps)
    }

    /// From now on a plane has the memory of another one of its process, in place of its own.
    pub fn share_store(&mut self, plane: DataPlaneIx, with: DataPlaneIx) {
        let own = self.store_ix(plane);
        self.stores[own] = None;
        self.store_of[plane.0 as usize] = self.store_of[with.0 as usize];
    }

    fn store_ix(&self, plane: DataPlaneIx) -> usize {
        self.store_of[plane.0 as usize] as usize
    }

    /// The memory of a plane; none once it is gone.
    pub fn store(&self, plane: DataPlaneIx) -> Option<&RankStore> {
        self.stores[self.store_ix(plane)].as_ref()
    }

    /// The memory of a plane; none once it is gone.
    pub fn store_mut(&mut self, plane: DataPlaneIx) -> Option<&mut RankStore> {
        let ix = self.store_ix(plane);
        self.stores[ix].as_mut()
    }

    /// The ranges of a landing; valid until the next [`Dma::step`] or [`Dma::perform`].
    pub fn slices(&self, landing: &DmaLanding) -> &[OpSlice] {
        let first = landing.first as usize;
        &self.ops[landing.slot as usize].slices[first..first + landing.count as usize]
    }

    /// Operations whose bytes may still land or whose completion is due.
    pub fn unsettled(&self) -> usize {
        self.ops.len() - self.free_ops.len()
    }

    /// The same without those that these planes submitted.
    pub fn unsettled_but_of(&self, planes: &[DataPlaneIx]) -> usize {
        if planes.is_empty() {
            return self.unsettled();
        }
        let free: BTreeSet<u32> = self.free_ops.iter().copied().collect();
        let ops = (0..).zip(&self.ops).filter(|(key, _)| !free.contains(key));
        ops.filter(|(_, op)| !planes.contains(&op.plane)).count()
    }

    /// Performs the calls that a plane took; they are used up.
    pub fn perform(
        &mut self,
        plane: DataPlaneIx,
        calls: &mut DmaCalls,
        hooks: &mut dyn DmaHooks,
        cx: &mut DmaContext<'_>,
    ) {
        if self.planes[plane.0 as usize].alive {
            for call in calls.list.drain(..) {
                match call {
                    DmaCall::Submit { op, session, direction, slices } => {
                        let slices = &calls.slices[slices.0 as usize..slices.1 as usize];
                        let info = (op, session, direction);
                        self.accept(plane, info, slices, hooks, cx);
                    }
                    call => self.set_up(plane, call, hooks, cx),
                }
            }
        }
        calls.clear();
    }

    fn set_up(
        &mut self,
        plane: DataPlaneIx,
        call: DmaCall,
        hooks: &mut dyn DmaHooks,
        cx: &mut DmaContext<'_>,
    ) {
        let me = &mut self.planes[plane.0 as usize];
        match call {
            // All is registered anew after the reset.
            DmaCall::Register { .. } if me.lost => {}
            DmaCall::Register { region, serial, memory } => {
                let refused = hooks.register(cx.now, plane);
                self.register(plane, (region, serial, memory), refused, cx);
            }
            DmaCall::Deregister { region } => {
                if let Some(serial) = me.regions.remove(&region) {
                    me.places.remove(&serial);
                    me.epoch += 1;
                }
            }
            DmaCall::Connect { peer, plane: other, fence_key } => {
                me.peers.insert(peer, (other, fence_key));
                if !me.fenced.contains(&(other, fence_key)) {
                    me.admitted.insert((other, fence_key));
                }
            }
            DmaCall::Disconnect { peer } => self.disconnect(plane, peer, cx),
            DmaCall::Open { session, local, peer, remote } => {
                self.open(plane, (session, local, peer, remote), cx);
            }
            DmaCall::Close { session } => self.close(plane, session, cx),
            DmaCall::Quiesce { session, ticket } => self.quiesce(plane, (session, ticket), cx),
            DmaCall::Fence { peer } => {
                if let Some(pair) = me.peers.get(&peer) {
                    me.admitted.remove(pair);
                    me.fenced.insert(*pair);
                    me.epoch += 1;
                }
                let at = cx.now + self.draw_span(plane, self.config.fence);
                self.mail_at(at, plane, DataEvent::Fenced { peer }, cx);
            }
            DmaCall::Digest { batch, memory } => self.digest(plane, (&batch, &memory), cx),
            DmaCall::Submit { .. } => unreachable!("submits are accepted apart"),
        }
    }

    fn register(
        &mut self,
        plane: DataPlaneIx,
        (region, serial, memory): (RegionId, u32, Memory),
        refused: Option<FabricError>,
        cx: &mut DmaContext<'_>,
    ) {
        let place = self.store(plane).and_then(|store| store.place(&memory));
        let len = memory.len();
        let me = &mut self.planes[plane.0 as usize];
        let result = match (refused, place) {
            (Some(cause), _) => Err(cause),
            (None, None) => Err(FabricError::LocalAccess),
            (None, Some(place)) => {
                me.places.insert(serial, (place, len));
                Ok(SimRegionDesc { plane, serial, len }.encode())
            }
        };
        me.regions.insert(region, serial);
        let at = cx.now + self.draw_span(plane, self.config.register);
        self.mail_at(at, plane, DataEvent::Registered { region, result }, cx);
    }

    /// Digests what is there now, and says so when it has been read. That takes no backend.
    fn digest(
        &mut self,
        plane: DataPlaneIx,
        (batch, memory): (&DigestBatch, &Memory),
        cx: &mut DmaContext<'_>,
    ) {
        let bytes = self.store(plane).and_then(|store| {
            let at = store.place(memory)?;
            store.bytes(at.segment).zip(Some(at.base))
        });
        let Some((bytes, base)) = bytes else {
            let event = DataEvent::Digested { id: batch.id, result: Err(FabricError::LocalAccess) };
            return self.mail_at(cx.now, plane, event, cx);
        };
        let (mut read, mut part) = (0, Vec::new());
        let digest = |number: usize| {
            part.clear();
            for (from, len) in batch.parts.ranges(number) {
                let from = (base + from) as usize;
                part.extend_from_slice(&bytes[from..from + len as usize]);
                read += len;
            }
            digest_of(batch.parts.seed(number), &part)
        };
        let digests = (0..batch.parts.count()).map(digest).collect();
        let event = DataEvent::Digested { id: batch.id, result: Ok(digests) };
        self.mail_at(cx.now + Nanos(1_000 + read / DIGEST_BYTES_PER_NS), plane, event, cx);
    }

    fn disconnect(&mut self, plane: DataPlaneIx, peer: PeerId, cx: &mut DmaContext<'_>) {
        let me = &mut self.planes[plane.0 as usize];
        let Some(pair) = me.peers.remove(&peer) else { return };
        if !me.peers.values().any(|other| *other == pair) && me.admitted.remove(&pair) {
            me.epoch += 1;
        }
        let mine = |(id, slot): (&SessionId, &u32)| {
            (self.sessions[*slot as usize].peer == peer).then_some(*id)
        };
        let sessions: Vec<_> = me.sessions.iter().filter_map(mine).collect();
        for session in sessions {
            self.close(plane, session, cx);
        }
    }

    /// Handles an entry of the queue and appends what it did.
    pub fn step(&mut self, event: DmaEvent, cx: &mut DmaContext<'_>) {
        match event {
            DmaEvent::Land(slot)
            | DmaEvent::Start(slot)
            | DmaEvent::Report(slot)
            | DmaEvent::Timeout(slot)
                if self.ops[slot.key as usize].slot != slot => {}
            DmaEvent::Land(slot) => self.land(slot.key, cx),
            DmaEvent::Start(slot) => self.start(slot.key, cx),
            DmaEvent::Report(slot) => self.report(slot.key, cx),
            DmaEvent::Timeout(slot) => self.time_out(slot.key, cx),
            DmaEvent::Serve { server, generation: turn } => self.serve((server, turn), cx),
            DmaEvent::Deliver { slot } => {
                if let Some((plane, news)) = self.mail.take(slot) {
                    self.hand_over(plane, news, cx);
                }
            }
            DmaEvent::Opened { session } => self.opened(session, cx),
            DmaEvent::Barrier { session, ticket } => self.barrier((session, ticket), cx),
            DmaEvent::Closed { session } => self.closed(session, cx),
            DmaEvent::Gone { plane } => self.gone(plane, cx),
        }
    }

    /// A process died: nothing reaches its plane or its memory any more. Bytes that it sent may
    /// land for another `linger`; those of operations that are done land now. With `told` its peers
    /// get `PeerDown` after that time.
    pub fn crash(
        &mut self,
        plane: DataPlaneIx,
        (linger, told): (Nanos, Option<Nanos>),
        cx: &mut DmaContext<'_>,
    ) {
        if !self.planes[plane.0 as usize].alive {
            return;
        }
        self.flush_all_of(plane, cx);
        let me = &mut self.planes[plane.0 as usize];
        me.alive = false;
        me.epoch += 1;
        me.held.clear();
        cx.after(linger, DmaEvent::Gone { plane });
        if let Some(told) = told {
            self.tell_peers(cx.now + told, plane, cx);
        }
    }

    /// What is done but has not landed lands: operations of a plane and those into its memory.
    fn flush_all_of(&mut self, plane: DataPlaneIx, cx: &mut DmaContext<'_>) {
        for key in 0..self.ops.len() as u32 {
            let op = &self.ops[key as usize];
            if op.plane == plane || op.peer == plane {
                self.flush(key, cx);
            }
        }
    }

    /// The peers of a plane learn that it is gone.
    fn tell_peers(&mut self, at: Nanos, plane: DataPlaneIx, cx: &mut DmaContext<'_>) {
        for other in 0..self.planes.len() {
            let peers = self.planes[other].peers.iter();
            let peers: Vec<_> =
                peers.filter(|(_, (ix, _))| *ix == plane).map(|(p, _)| *p).collect();
            for peer in peers {
                let event = DataEvent::PeerDown { peer };
                self.mail_at(at, DataPlaneIx(other as u32), event, cx);
            }
        }
    }

    /// Stops or resumes a process: while stopped its plane is told nothing. Remote access to its
    /// memory and what it posted go on.
    pub fn set_paused(&mut self, plane: DataPlaneIx, paused: bool, cx: &mut DmaContext<'_>) {
        let me = &mut self.planes[plane.0 as usize];
        me.paused = paused;
        if !paused {
            let held = std::mem::take(&mut me.held);
            cx.out.extend(held.into_iter().map(|news| DmaOutput::Deliver { plane, message: news }));
        }
    }

    /// Makes the queue of a plane full, or ends that. A full queue still takes one operation when
    /// it is empty, because a plane that says `Busy` owes an event.
    pub fn set_queue_full(&mut self, plane: DataPlaneIx, full: bool, cx: &mut DmaContext<'_>) {
        let credits = if full { 1 } else { self.planes[plane.0 as usize].caps.in_all.operations };
        self.hand_over(plane, DmaMessage::Credits(credits), cx);
    }

    /// Limits what moves from one node to another to this many bytes per second; None: to the
    /// ports' bandwidth. Operations that started before keep the link that they started on.
    pub fn set_link_rate(
        &mut self,
        (from, to): (u32, u32),
        bytes_per_sec: Option<u64>,
        cx: &mut DmaContext<'_>,
    ) {
        match (bytes_per_sec, self.slow.get(&(from, to)).copied()) {
            (None, None) => {}
            (Some(rate), None) => {
                let server = self.nics.server(rate);
                self.slow.insert((from, to), server);
            }
            (rate, Some(server)) => {
                let rate = rate.unwrap_or(u64::MAX);
                self.nics.servers[server as usize].set_rate((server, cx.now), rate, cx.queue);
                if rate == u64::MAX {
                    self.slow.remove(&(from, to));
                }
            }
        }
    }

    /// Cuts or heals the way from one node to another. Operations stall; those that are not
    /// acknowledged for [`DmaConfig::ack_timeout`] fail.
    pub fn set_cut(&mut self, (from, to): (u32, u32), cut: bool, cx: &mut DmaContext<'_>) {
        if cut {
            self.cut.insert((from, to));
        } else if self.cut.remove(&(from, to)) {
            self.resume(cx);
        }
    }

    fn cut_between(&self, from: DataPlaneIx, to: DataPlaneIx) -> bool {
        let node = |plane: DataPlaneIx| self.planes[plane.0 as usize].node;
        !self.cut.is_empty() && self.cut.contains(&(node(from), node(to)))
    }

    fn draw_span(&mut self, plane: DataPlaneIx, span: InclusiveRange) -> Nanos {
        let me = &mut self.planes[plane.0 as usize];
        me.drawn += 1;
        Nanos(span.pick(self.keyed.draw(draw::ANSWER, u64::from(plane.0), me.drawn)))
    }

    fn mail_at(
        &mut self,
        at: Nanos,
        plane: DataPlaneIx,
        event: DataEvent,
        cx: &mut DmaContext<'_>,
    ) {
        let slot = self.mail.add(Some((plane, DmaMessage::Event(event))));
        cx.queue.at(at, DmaEvent::Deliver { slot });
    }

    /// Tells a plane, now.
    fn hand_over(&mut self, plane: DataPlaneIx, news: DmaMessage, cx: &mut DmaContext<'_>) {
        let me = &mut self.planes[plane.0 as usize];
        if !me.alive {
            return;
        }
        if let DmaMessage::Event(DataEvent::Fenced { peer: id }) = &news
            && let Some((peer, fence_key)) = me.peers.get(id)
        {
            cx.out.push(DmaOutput::Fenced { plane, peer: *peer, fence_key: *fence_key });
        }
        if me.paused {
            me.held.push(news);
        } else {
            cx.out.push(DmaOutput::Deliver { plane, message: news });
        }
    }
}
