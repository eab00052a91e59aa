//! The calls of the trait.

use super::{
    HostPeer, HostPeerLink, HostPlane, HostQuiescePending, HostRegionEntry, HostSession,
    HostSessionPhase,
};
use crate::DataPath;
use crate::descriptor::{HostPlaneAddress, HostRegionDescriptor};
use crate::link::{HostDialRequest, HostLinkKind, dial};
use crate::memory::HostRegion;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, Credits, DataEvent, DataPlane, FenceScope, Memory, NextPoll, PeerId, Placement,
    PlaneTimeouts, QuiesceTicket, Refused, RegionDesc, RegionId, SessionId, Submit,
};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

pub(super) fn invalid<T>(why: impl Into<String>) -> Result<T, Refused> {
    Err(Refused::Invalid(why.into().into()))
}

impl HostPlane {
    /// Has a session opened by a link of some kind, which is dialled if there is none.
    pub(super) fn start_opening(&mut self, id: SessionId, kind: HostLinkKind) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(peer) = self.peers.get_mut(&session.peer) else { return };
        match peer.links.get(&kind) {
            Some(HostPeerLink::Up(link)) => {
                let claim = (session.claim.region.0, session.claim.token);
                link.open(id.0, claim, session.region.clone());
                session.link = Some(link.id);
                session.phase = HostSessionPhase::Opening(link.clone());
                return;
            }
            Some(HostPeerLink::Dialling) => {}
            None => {
                let number = self.hub.fresh();
                let to = (*peer.location).clone();
                dial(
                    &self.hub,
                    HostDialRequest {
                        id: number,
                        to,
                        fence_key: peer.fence_key,
                        kind,
                        ends: Vec::new(),
                    },
                );
                self.dials.insert(number, (session.peer, kind));
                peer.links.insert(kind, HostPeerLink::Dialling);
            }
        }
        session.phase = HostSessionPhase::Waiting(kind);
    }
}

impl DataPlane for HostPlane {
    fn caps(&self) -> Caps {
        Caps {
            read: true,
            write: true,
            slices_max: self.hub.config.slices_max,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(self.hub.config.operations_max),
            placement: Placement::OnCompletion,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        }
    }

    fn address(&self) -> Address {
        self.hub.location.encode()
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        if self.regions.contains_key(&region) {
            return invalid(format!("region {region} is registered already"));
        }
        let base = match memory {
            Memory::Own { base, .. } | Memory::OtherProcess { base, .. } => base,
            Memory::MemFd { fd, .. } if fd >= 0 => 0,
            Memory::MemFd { fd, .. } => return invalid(format!("descriptor {fd}")),
            other => return Err(Refused::Unsupported(format!("memory {other:?}").into())),
        };
        if memory.is_empty() || base.checked_add(memory.len()).is_none() {
            return invalid(format!("region {region} of {} bytes at {base:#x}", memory.len()));
        }
        let made = HostRegion::new(region, self.hub.next_token(), memory).and_then(|made| {
            let made = Arc::new(made);
            self.hub.add_region(&made).map(|()| made)
        });
        let result = made.map(|made| {
            let claim = HostRegionDescriptor {
                owner: self.hub.location.who.clone(),
                region,
                token: made.token,
                base: made.reach.base(),
                len: made.len,
            };
            self.regions.insert(region, HostRegionEntry { region: made, operations: 0 });
            claim.encode()
        });
        self.events.push_back(DataEvent::Registered { region, result });
        Ok(())
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        match self.regions.get(&region) {
            None => return invalid(format!("region {region} is not registered")),
            Some(held) if held.operations > 0 => return Err(Refused::Busy),
            Some(_) => {}
        }
        self.regions.remove(&region);
        self.hub.remove_region(region);
        let users = self.sessions.iter().filter(|(_, session)| session.local == region);
        let users: Vec<_> = users.map(|(id, _)| *id).collect();
        for id in users {
            self.kill(id);
        }
        Ok(())
    }

    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        if self.peers.contains_key(&peer) {
            return invalid(format!("peer {peer} is connected already"));
        }
        let Some(location) = HostPlaneAddress::decode(address) else {
            return invalid("address of another kind of plane");
        };
        self.hub.grant_access(&location.who, peer, fence_key);
        let location = Arc::new(location);
        self.peers.insert(peer, HostPeer { location, fence_key, links: BTreeMap::new() });
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        let Some(gone) = self.peers.remove(&peer) else { return };
        self.hub.revoke_access(&gone.location.who, peer);
        let its: Vec<_> =
            self.sessions.iter().filter(|(_, s)| s.peer == peer).map(|(id, _)| *id).collect();
        for session in its {
            self.close(session);
        }
        self.dials.retain(|_, (whose, _)| *whose != peer);
        self.reap();
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        if self.sessions.contains_key(&session) {
            return invalid(format!("session {session} is open already"));
        }
        let Some(held) = self.regions.get(&local) else {
            return invalid(format!("region {local} is not registered"));
        };
        let Some(named) = self.peers.get(&peer) else {
            return invalid(format!("peer {peer} is not connected"));
        };
        let claim =
            HostRegionDescriptor::decode(remote).filter(|claim| claim.owner == named.location.who);
        let Some(claim) = claim else { return invalid("descriptor of another plane") };
        let route = self.hub.route(&named.location);
        let entry = HostSession {
            local,
            region: held.region.clone(),
            peer,
            location: named.location.clone(),
            fence_key: named.fence_key,
            claim,
            phase: HostSessionPhase::Dead,
            deadline: Instant::now() + Duration::from_millis(self.hub.config.open_ms.into()),
            link: None,
            operations: BTreeMap::new(),
            tickets: VecDeque::new(),
            awaits: HostQuiescePending::default(),
        };
        self.sessions.insert(session, entry);
        match route {
            Ok(kind) => self.start_opening(session, kind),
            Err(why) => {
                self.opened(session, Err(kvferry_engine::fabric::FabricError::Backend(why.into())))
            }
        }
        Ok(())
    }

    fn close(&mut self, session: SessionId) {
        self.shut(session);
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        self.post(&batch)
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        match self.sessions.get_mut(&session) {
            None => self.events.push_back(DataEvent::Quiet { session, ticket }),
            Some(known) => {
                known.tickets.push_back((ticket, self.order));
                self.settle(session);
            }
        }
    }

    fn fence(&mut self, peer: PeerId) {
        if let Some(known) = self.peers.get(&peer) {
            self.hub.fence(&known.location.who, known.fence_key);
        }
        self.events.push_back(DataEvent::Fenced { peer });
    }

    fn set_waker(&mut self, waker: Waker) {
        self.hub.set_waker(waker);
    }

    fn doorbell(&mut self) -> Option<BorrowedFd<'_>> {
        self.hub.make_bell()
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        self.inline_copier.rest();
        self.take_worker_events();
        let news = !self.events.is_empty();
        out.extend(self.events.drain(..));
        if self.keep_busy_polling(news) {
            return NextPoll::Ready;
        }
        let told = self.outcomes.iter().all(|ring| ring.sleep());
        if !told || !self.links.values().all(|link| link.sleep_of_owner()) {
            return NextPoll::Ready;
        }
        match self.next_deadline() {
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                NextPoll::At(now + Nanos(left.as_nanos() as u64))
            }
            None => NextPoll::External,
        }
    }
}

impl HostPlane {
    /// Operations and bytes that succeeded.
    pub(super) fn count(&self, path: DataPath, bytes: u64) {
        self.hub.counts.initiated[path as usize].add(bytes);
    }
}
