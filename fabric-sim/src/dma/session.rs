//! Sessions: opening, quiet, teardown.

use super::call::{DataPlaneIx, DmaContext, DmaEvent, DmaMessage, SimRegionDesc};
use super::{Dma, backend, draw};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, FabricError, Landed, PeerId, QuiesceTicket, RegionId, SessionId,
};
use std::collections::BTreeMap;

/// A session of one plane. Its slot is never reused; its id may be, once it is closed.
#[derive(Debug)]
pub(super) struct DmaSession {
    pub(super) plane: DataPlaneIx,
    pub(super) id: SessionId,
    pub(super) peer: PeerId,
    /// Serial of the local region.
    pub(super) local: u32,
    pub(super) remote: SimRegionDesc,
    /// The pass when it was opened.
    pub(super) fence_key: u64,
    pub(super) state: DmaSessionState,
    /// Operations accepted so far.
    pub(super) accepted: u64,
    /// Operations that may still land or have to be reported, by order of acceptance.
    pub(super) unsettled: BTreeMap<u64, u32>,
    tickets: Vec<PendingQuiesce>,
    /// The answer to `open` until it is given.
    pub(super) opened: Option<Result<(), FabricError>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DmaSessionState {
    Open,
    /// Takes nothing more; what was accepted has failed or will.
    Dead,
    Closing,
    Closed,
}

#[derive(Clone, Copy, Debug)]
struct PendingQuiesce {
    ticket: QuiesceTicket,
    /// Operations accepted before.
    before: u64,
    /// Nothing of those that have failed can land any more.
    passed: bool,
}

impl Dma {
    pub(super) fn open(
        &mut self,
        plane: DataPlaneIx,
        (id, local, peer, remote): (SessionId, RegionId, PeerId, SimRegionDesc),
        cx: &mut DmaContext<'_>,
    ) {
        let me = &self.planes[plane.0 as usize];
        let serial = me.regions.get(&local).copied().unwrap_or(0);
        let fence_key = me.peers.get(&peer).map_or(0, |(_, fence_key)| *fence_key);
        let result = self.openable(plane, serial, remote);
        let slot = self.sessions.len() as u32;
        self.sessions.push(DmaSession {
            plane,
            id,
            peer,
            local: serial,
            remote,
            fence_key,
            state: if result.is_ok() { DmaSessionState::Open } else { DmaSessionState::Dead },
            accepted: 0,
            unsettled: BTreeMap::new(),
            tickets: Vec::new(),
            opened: Some(result.clone()),
        });
        self.planes[plane.0 as usize].sessions.insert(id, slot);
        let unanswered = matches!(result, Err(FabricError::Unreachable));
        let span = self.draw_span(plane, self.config.open);
        let at = cx.now + if unanswered { self.config.ack_timeout } else { span };
        cx.queue.at(at, DmaEvent::Opened { session: slot });
    }

    /// Tells the owner of a session whether it can be used, unless it was closed meanwhile.
    pub(super) fn opened(&mut self, slot: u32, cx: &mut DmaContext<'_>) {
        let session = &mut self.sessions[slot as usize];
        let (plane, id) = (session.plane, session.id);
        if matches!(session.state, DmaSessionState::Open | DmaSessionState::Dead)
            && let Some(result) = session.opened.take()
        {
            let event = DataEvent::Opened { session: id, result };
            self.hand_over(plane, DmaMessage::Event(event), cx);
        }
    }

    fn openable(
        &self,
        plane: DataPlaneIx,
        serial: u32,
        remote: SimRegionDesc,
    ) -> Result<(), FabricError> {
        let Some(other) = self.planes.get(remote.plane.0 as usize) else {
            return Err(FabricError::Unreachable);
        };
        let cut = self.cut_between(plane, remote.plane) || self.cut_between(remote.plane, plane);
        if self.planes[plane.0 as usize].lost {
            return Err(backend::none());
        }
        if !other.alive || other.lost || cut {
            return Err(FabricError::Unreachable);
        }
        if !self.planes[plane.0 as usize].places.contains_key(&serial) {
            return Err(FabricError::LocalAccess);
        }
        let fits = other.places.get(&remote.serial).is_some_and(|(_, len)| *len == remote.len);
        if fits { Ok(()) } else { Err(FabricError::RemoteAccess) }
    }

    /// Fails the operations of a session one by one. Bytes of those that started go on landing.
    pub(super) fn fail_all(&mut self, slot: u32, cause: &FabricError, cx: &mut DmaContext<'_>) {
        let window = self.config.teardown.0;
        for (n, op) in &self.sessions[slot as usize].unsettled {
            let state = &mut self.ops[*op as usize];
            if state.reported {
                continue;
            }
            let landed = if state.started { Landed::Unknown } else { Landed::None };
            if !state.started {
                state.ended = true;
            }
            state.outcome = Some(Completion::Failed { cause: cause.clone(), landed });
            let after = self.keyed.below(draw::TEARDOWN, u64::from(slot), *n, window);
            cx.after(Nanos(after), DmaEvent::Report(state.slot));
        }
    }

    /// The session takes nothing more; false if it did not before.
    pub(super) fn mark_dead(&mut self, slot: u32, cx: &mut DmaContext<'_>) -> bool {
        let session = &mut self.sessions[slot as usize];
        if session.state != DmaSessionState::Open {
            return false;
        }
        session.state = DmaSessionState::Dead;
        let (plane, id) = (session.plane, session.id);
        self.hand_over(plane, DmaMessage::SessionDead(id), cx);
        true
    }

    /// Sessions of living planes that died and that nobody has closed.
    pub fn dead_sessions(&self) -> usize {
        let living = self.planes.iter().filter(|plane| plane.alive);
        let slots = living.flat_map(|plane| plane.sessions.values());
        slots.filter(|slot| self.sessions[**slot as usize].state == DmaSessionState::Dead).count()
    }

    /// All open sessions of a plane with another die, as if their queue pairs went to the error
    /// state.
    pub fn kill_sessions(
        &mut self,
        (plane, peer): (DataPlaneIx, DataPlaneIx),
        cx: &mut DmaContext<'_>,
    ) {
        let with_peer = |slot: &u32| self.sessions[*slot as usize].remote.plane == peer;
        let slots = self.planes[plane.0 as usize].sessions.values().copied();
        let slots: Vec<u32> = slots.filter(with_peer).collect();
        for slot in slots {
            if self.mark_dead(slot, cx) {
                self.fail_all(slot, &FabricError::QueuePair, cx);
            }
        }
    }

    pub(super) fn close(&mut self, plane: DataPlaneIx, id: SessionId, cx: &mut DmaContext<'_>) {
        let Some(slot) = self.planes[plane.0 as usize].sessions.get(&id).copied() else { return };
        let session = &mut self.sessions[slot as usize];
        if matches!(session.state, DmaSessionState::Closing | DmaSessionState::Closed) {
            return;
        }
        session.state = DmaSessionState::Closing;
        self.fail_all(slot, &FabricError::Closed, cx);
        cx.after(self.config.teardown, DmaEvent::Closed { session: slot });
    }

    /// The teardown of a session is over.
    pub(super) fn closed(&mut self, slot: u32, cx: &mut DmaContext<'_>) {
        let session = &mut self.sessions[slot as usize];
        session.state = DmaSessionState::Closed;
        let (plane, id) = (session.plane, session.id);
        let unsettled = std::mem::take(&mut session.unsettled);
        for op in unsettled.into_values() {
            self.finish_report(op, cx);
            self.flush(op, cx);
            self.discard(op);
        }
        let sessions = &mut self.planes[plane.0 as usize].sessions;
        if sessions.get(&id) == Some(&slot) {
            sessions.remove(&id);
        }
        for asked in std::mem::take(&mut self.sessions[slot as usize].tickets) {
            self.tell_quiet(plane, (id, asked.ticket), cx);
        }
    }

    pub(super) fn quiesce(
        &mut self,
        plane: DataPlaneIx,
        (id, ticket): (SessionId, QuiesceTicket),
        cx: &mut DmaContext<'_>,
    ) {
        let at = cx.now + self.draw_span(plane, self.config.barrier);
        let slot = self.planes[plane.0 as usize].sessions.get(&id).copied();
        let Some(slot) = slot else {
            return self.mail_at(at, plane, DataEvent::Quiet { session: id, ticket }, cx);
        };
        let session = &mut self.sessions[slot as usize];
        let before = session.accepted;
        session.tickets.push(PendingQuiesce { ticket, before, passed: false });
        cx.queue.at(at, DmaEvent::Barrier { session: slot, ticket });
    }

    /// From here on nothing of a failed operation lands that was accepted before the ticket.
    pub(super) fn barrier(
        &mut self,
        (slot, ticket): (u32, QuiesceTicket),
        cx: &mut DmaContext<'_>,
    ) {
        let session = &mut self.sessions[slot as usize];
        let asked =
            session.tickets.iter_mut().find(|asked| asked.ticket == ticket && !asked.passed);
        let Some(asked) = asked else { return };
        asked.passed = true;
        let before = asked.before;
        let failed: Vec<u64> = session
            .unsettled
            .range(..before)
            .filter(|(_, op)| self.ops[**op as usize].failed())
            .map(|(n, _)| *n)
            .collect();
        for n in failed {
            let op = self.sessions[slot as usize].unsettled.remove(&n);
            self.discard(op.expect("it was listed"));
        }
        self.answer_tickets(slot, cx);
    }

    /// Answers the tickets that wait for nothing any more.
    pub(super) fn answer_tickets(&mut self, slot: u32, cx: &mut DmaContext<'_>) {
        let session = &mut self.sessions[slot as usize];
        if session.tickets.is_empty() || session.state == DmaSessionState::Closing {
            return;
        }
        let oldest = session.unsettled.first_key_value().map_or(u64::MAX, |(n, _)| *n);
        let (plane, id) = (session.plane, session.id);
        let quiet = |asked: &PendingQuiesce| asked.passed && asked.before <= oldest;
        let answered: Vec<_> = session.tickets.extract_if(.., |asked| quiet(asked)).collect();
        for asked in answered {
            self.tell_quiet(plane, (id, asked.ticket), cx);
        }
    }

    fn tell_quiet(
        &mut self,
        plane: DataPlaneIx,
        id: (SessionId, QuiesceTicket),
        cx: &mut DmaContext<'_>,
    ) {
        let (session, ticket) = id;
        self.hand_over(plane, DmaMessage::Event(DataEvent::Quiet { session, ticket }), cx);
    }

    /// A crashed plane has no memory and no operations any more.
    pub(super) fn gone(&mut self, plane: DataPlaneIx, cx: &mut DmaContext<'_>) {
        let store = self.store_ix(plane);
        self.stores[store] = None;
        self.forget(plane, cx);
    }

    /// Nothing of a plane is known any more: what it had in flight ends, and nobody is told of
    /// quiet.
    pub(super) fn forget(&mut self, plane: DataPlaneIx, cx: &mut DmaContext<'_>) {
        let me = &mut self.planes[plane.0 as usize];
        me.epoch += 1;
        me.regions.clear();
        me.places.clear();
        for slot in std::mem::take(&mut me.sessions).into_values() {
            self.sessions[slot as usize].tickets.clear();
            self.closed(slot, cx);
        }
    }
}
