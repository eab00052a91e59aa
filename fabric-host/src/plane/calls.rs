//! The calls of the trait.

use super::{HostOpening, HostPeer, HostPeerLink, HostPlane, HostQuiescePending, HostSession};
use crate::descriptor::{HostPlaneAddress, HostRegionDescriptor};
use crate::doorbell::OwnerBell;
use crate::link::{HostDialRequest, HostLinkKind, dial};
use crate::memory::HostRegion;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, Credits, DataEvent, DataPlane, DigestBatch, FabricError, FenceScope, Memory,
    NextPoll, PeerId, Placement, PlaneTimeouts, QuiesceTicket, Refused, RegionDesc, RegionId,
    SessionId, Submit,
};
use kvferry_fabric_common::{LedgerRegion, LedgerSession, SessionPhase, invalid, next_poll};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Polls without news between two looks for peers that rang for nothing.
const STRAYS_EVERY: u32 = 8;

impl HostPlane {
    /// Has a session opened by links of some kind, which are dialled if there are none.
    pub(super) fn start_opening(&mut self, id: SessionId, kind: HostLinkKind) {
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        let Some(peer) = self.ledger.peers.get_mut(&session.peer) else { return };
        match peer.links.get(&kind) {
            Some(HostPeerLink::Up(links)) => {
                let claim = (session.own.claim.region.0, session.own.claim.token);
                links.iter().for_each(|link| link.open(id.0, claim, session.own.region.clone()));
                let missing = links.iter().map(|link| link.id).collect();
                session.own.links = Some(links.clone());
                let answers = HostOpening::Answers { links: links.clone(), missing };
                session.phase = SessionPhase::Opening(answers);
                return;
            }
            Some(HostPeerLink::Dialling) => {}
            None => {
                let (id, to) = (self.hub.fresh(), (*peer.location).clone());
                let (fence_key, streams) = (peer.fence_key, self.hub.config.streams);
                let request =
                    HostDialRequest { id, to, fence_key, kind, streams, ends: Vec::new() };
                dial(&self.hub, request);
                self.dials.insert(id, (session.peer, kind));
                peer.links.insert(kind, HostPeerLink::Dialling);
            }
        }
        session.phase = SessionPhase::Opening(HostOpening::Link(kind));
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
        let base = match memory {
            Memory::Own(range) => range.base(),
            Memory::OtherProcess { base, .. } => base,
            Memory::MemFd { fd, .. } if fd >= 0 => 0,
            Memory::MemFd { fd, .. } => return invalid(format!("descriptor {fd}")),
            other => return Err(Refused::Unsupported(format!("memory {other:?}").into())),
        };
        self.ledger.check_register(region, memory, base)?;
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
            self.ledger.regions.insert(region, LedgerRegion::new(made.len, made));
            claim.encode()
        });
        self.ledger.events.push_back(DataEvent::Registered { region, result });
        Ok(())
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        self.ledger.check_deregister(region)?;
        self.ledger.regions.remove(&region);
        self.hub.remove_region(region);
        for id in self.ledger.sessions_where(|session| session.local == region) {
            self.kill(id, &FabricError::Closed);
        }
        Ok(())
    }

    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        self.ledger.check_connect(peer)?;
        let Some(location) = HostPlaneAddress::decode(address) else {
            return invalid("address of another kind of plane");
        };
        self.hub.grant_access(&location.who, peer, fence_key);
        let location = Arc::new(location);
        self.ledger.peers.insert(peer, HostPeer { location, fence_key, links: BTreeMap::new() });
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        let Some(gone) = self.ledger.peers.remove(&peer) else { return };
        self.hub.revoke_access(&gone.location.who, peer);
        for session in self.ledger.sessions_where(|session| session.peer == peer) {
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
        let (held, named) = self.ledger.check_open(session, local, peer)?;
        let claim =
            HostRegionDescriptor::decode(remote).filter(|claim| claim.owner == named.location.who);
        let Some(claim) = claim else { return invalid("descriptor of another plane") };
        let route = self.hub.route(&named.location);
        let until = Instant::now() + Duration::from_millis(self.hub.config.open_ms.into());
        let opening = (HostOpening::Link(HostLinkKind::Tcp), until);
        let lens = [held.len, claim.len];
        let own = HostSession {
            region: held.own.clone(),
            location: named.location.clone(),
            fence_key: named.fence_key,
            claim,
            links: None,
            awaits: HostQuiescePending::default(),
        };
        let entry = LedgerSession::new((local, peer), lens, opening, own);
        self.ledger.sessions.insert(session, entry);
        match route {
            Ok(kind) => self.start_opening(session, kind),
            Err(why) => _ = self.ledger.opened(session, Err(FabricError::Backend(why.into()))),
        }
        Ok(())
    }

    fn close(&mut self, session: SessionId) {
        self.shut(session);
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        self.post(&batch)
    }

    fn digests(&self) -> bool {
        true
    }

    fn digest(&mut self, batch: DigestBatch) -> Result<(), Refused> {
        let Some(region) = self.ledger.regions.get(&batch.region) else {
            return invalid("no such region");
        };
        batch.check(region.len)?;
        self.digests.push(&region.own, batch);
        self.digests.work(&mut self.ledger.events);
        Ok(())
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        self.ledger.quiesce(session, ticket);
        self.settle(session);
    }

    fn fence(&mut self, peer: PeerId) {
        if let Some(known) = self.ledger.peers.get(&peer) {
            self.hub.fence(&known.location.who, known.fence_key);
        }
        self.ledger.events.push_back(DataEvent::Fenced { peer });
    }

    fn set_waker(&mut self, waker: Waker) {
        self.hub.news.set_waker(waker);
    }

    fn doorbell(&mut self) -> Option<BorrowedFd<'_>> {
        self.hub.make_bell().map(OwnerBell::fd)
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        self.inline_copier.rest();
        if let Some(bell) = self.hub.bell() {
            bell.hear();
        }
        if self.idle_polls >= STRAYS_EVERY {
            // Ahead of looking: what is heard may be no stray.
            self.idle_polls = 0;
            self.hear_strays();
        }
        self.take_worker_events();
        let has_more = self.digests.rest(&mut self.ledger.events);
        let news = !self.ledger.events.is_empty();
        out.extend(self.ledger.events.drain(..));
        if self.keep_busy_polling(news) || has_more {
            return NextPoll::Ready;
        }
        let told = self.outcomes.iter().all(|ring| ring.sleep());
        if !told || !self.links.values().all(|link| link.sleep_of_owner()) {
            return NextPoll::Ready;
        }
        // Now and then strays are looked for: it takes a system call, and fewer fill no bell.
        self.idle_polls += u32::from(!news);
        next_poll(now, self.next_deadline())
    }
}
