//! The calls of the trait.

use super::{MoriPeer, MoriPlane, MoriSession};
use crate::address::{MoriPlaneAddress, MoriRegionDescriptor};
use crate::engine_thread::MoriEngineCommand;
use crate::event_queue::MoriWorkerEvent;
use crate::link::{MoriDialRequest, MoriLinkEvent, MoriOutboundLink, MoriRegionGrant};
use crate::{MoriBackend, preflight};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, Credits, DataEvent, DataPlane, FabricError, FenceScope, Memory, NextPoll,
    PeerId, Placement, QuiesceTicket, Refused, RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_fabric_common::{LedgerRegion, LedgerSession, PlaneIdentity, invalid, next_poll};
use std::sync::{Arc, mpsc};
use std::task::Waker;
use std::time::{Duration, Instant};

impl MoriPeer {
    pub(super) fn who(&self) -> Option<&PlaneIdentity> {
        self.location.acceptor.as_ref().map(|acceptor| &acceptor.who)
    }
}

impl MoriPlane {
    /// Has a session's descriptors told by the peer's acceptor, or opens it without.
    pub(super) fn start_opening(&mut self, id: SessionId) {
        let Some(session) = self.ledger.sessions.get(&id) else { return };
        let claim = session.own.claim.clone();
        let Some(peer) = self.ledger.peers.get_mut(&session.peer) else { return };
        let Some(acceptor) = &peer.location.acceptor else {
            let (engine, memory) = (peer.location.engine.clone(), claim.memory);
            let grant = MoriRegionGrant { region: RegionId(u32::MAX), engine, memory };
            return self.grant_received(id, Ok(grant));
        };
        peer.link.take_if(|line| line.is_over());
        let line = peer.link.get_or_insert_with(|| {
            self.lines += 1;
            let config = &self.common.config;
            let dial = MoriDialRequest {
                peer: session.peer,
                id: self.lines,
                host: peer.location.host.clone(),
                port: acceptor.port,
                to: acceptor.who.incarnation,
                who: self.common.who(),
                fence_key: peer.fence_key,
                patience: Duration::from_millis(config.open_ms.into()),
                dead_ms: config.dead_ms,
                secret: self.common.access_control.proof.secret(),
            };
            let (board, orders) = (self.common.board.clone(), self.orders.clone());
            MoriOutboundLink::dial(dial, move |said| match (said, &orders) {
                // At once: the peer may be waiting for it in a call.
                (MoriLinkEvent::Leave(line, region), Some(orders)) => {
                    drop(orders.send(MoriEngineCommand::Leave(line, region)));
                }
                (said, _) => board.tell(MoriWorkerEvent::Line(said)),
            })
        });
        line.ask(id, claim.name);
    }

    /// Whether memory can be registered, as far as is known ahead.
    ///
    /// # Errors
    /// As [`DataPlane::register`].
    pub(crate) fn check_register(&self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        let base = match memory {
            Memory::Own(range) | Memory::Device { range, .. } => range.base(),
            other => return Err(Refused::Unsupported(format!("memory {other:?}").into())),
        };
        self.ledger.check_register(region, memory, base)
    }

    /// Why MoRI would end the process, now or later that of a peer, over this memory.
    fn cannot_pin(&self, memory: Memory) -> Option<Arc<str>> {
        let pins = self.common.config.backend == MoriBackend::Rdma
            && self.common.config.devices
            && matches!(memory, Memory::Own(_));
        let limit = preflight::memlock_limit().filter(|_| pins)?;
        let all = self.ledger.regions.values().map(|held| held.len).sum::<u64>() + memory.len();
        let todo = preflight::MEMLOCK;
        (all > limit).then(|| {
            format!("{all} bytes of KV cannot be pinned, the limit is {limit}; to do: {todo}")
                .into()
        })
    }

    /// Whether a peer's MoRI can be spoken to.
    fn check_peer(&self, location: &MoriPlaneAddress) -> Result<(), Refused> {
        let ours = self.common.shim.info.layout;
        match &location.acceptor {
            None if !self.common.config.open_door => {
                invalid("address of a plane that is not kvferry's; open_door lets such in")
            }
            Some(acceptor) if acceptor.layout != ours => {
                let theirs = acceptor.layout;
                invalid(format!(
                    "the peer's MoRI describes memory by {theirs} fields, ours by {ours}: install one version of MoRI on both sides"
                ))
            }
            _ => Ok(()),
        }
    }
}

impl DataPlane for MoriPlane {
    fn caps(&self) -> Caps {
        Caps {
            read: true,
            write: true,
            slices_max: self.common.config.slices_max,
            per_peer: Credits { ranges: self.common.config.ranges_max(), ..Credits::UNLIMITED },
            in_all: Credits::of_operations(self.common.config.operations_max),
            placement: Placement::OnCompletion,
            fence: match self.common.config.backend {
                MoriBackend::Rdma => FenceScope::Backend,
                MoriBackend::Xgmi => FenceScope::Peer,
            },
            patience: self.common.config.patience(),
        }
    }

    fn address(&self) -> Address {
        self.common.address()
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        self.check_register(region, memory)?;
        let lacking = self.cannot_pin(memory);
        self.ledger.regions.insert(region, LedgerRegion::new(memory.len(), ()));
        match lacking {
            // All is registered anew after the reset that ends this.
            None if self.broken.is_some() => {}
            None => self.tell(MoriEngineCommand::Register { region, memory }),
            Some(why) => {
                let result = Err(FabricError::Backend(why));
                self.ledger.events.push_back(DataEvent::Registered { region, result });
            }
        }
        Ok(())
    }

    /// Waits for the thread that posts, which may be held up by a full send queue; and over xGMI
    /// for all peers to leave, which is refused as `Busy` if one of them does not.
    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        self.ledger.check_deregister(region)?;
        self.common.access_control.remove_region(region);
        let patience = Duration::from_millis(self.common.config.operation_ms.into());
        if !self.common.access_control.drain_region(region, patience) {
            return Err(Refused::Busy);
        }
        self.ledger.regions.remove(&region);
        let (done, ended) = mpsc::sync_channel(1);
        self.tell(MoriEngineCommand::Deregister { region, done });
        let _gone = ended.recv();
        for session in self.ledger.sessions.values_mut().filter(|session| session.local == region) {
            session.phase.end();
        }
        Ok(())
    }

    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        self.ledger.check_connect(peer)?;
        let Some(location) = MoriPlaneAddress::decode(address) else {
            return invalid("address of another kind of plane");
        };
        self.check_peer(&location)?;
        let named = MoriPeer { location, fence_key, link: None, ranges: 0 };
        if let Some(who) = named.who() {
            self.common.access_control.grant_access(who, peer, fence_key);
        }
        self.ledger.peers.insert(peer, named);
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        for session in self.ledger.sessions_where(|session| session.peer == peer) {
            self.close(session);
        }
        let Some(gone) = self.ledger.peers.remove(&peer) else { return };
        if let Some(who) = gone.who() {
            self.common.access_control.revoke_access(who, peer);
        }
        match (gone.link, self.common.config.backend) {
            (Some(line), MoriBackend::Rdma) => line.hang_up(),
            // The peer may take the end of the line for the end of what is under way.
            (Some(line), MoriBackend::Xgmi) => self.tell(MoriEngineCommand::Leave(line, None)),
            (None, _) => {}
        }
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        let (held, _) = self.ledger.check_open(session, local, peer)?;
        let Some(claim) = MoriRegionDescriptor::decode(&remote.0) else {
            return invalid("descriptor of another kind of plane");
        };
        let until = Instant::now() + Duration::from_millis(self.common.config.open_ms.into());
        let lens = [held.len, claim.len];
        let own = MoriSession { claim, reopening: None, link: None, tainted: false };
        let entry = LedgerSession::new((local, peer), lens, ((), until), own);
        self.ledger.sessions.insert(session, entry);
        self.check_by(until);
        match &self.broken {
            None => self.start_opening(session),
            Some(why) => {
                let result = Err(FabricError::Backend(Arc::clone(why)));
                self.opened(session, result);
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
        self.ledger.quiesce(session, ticket);
        self.settle(session);
    }

    fn fence(&mut self, peer: PeerId) {
        let known = self.ledger.peers.get(&peer);
        let who = known.and_then(|known| Some((known.who()?.clone(), known.fence_key)));
        let inside = match who {
            Some((who, fence_key)) => self.common.access_control.fence(&who, fence_key),
            // Who has no acceptor asks for nothing: it may be inside if it is known at all.
            None => known.is_some(),
        };
        match self.common.config.backend {
            _ if !inside => self.ledger.events.push_back(DataEvent::Fenced { peer }),
            // Nobody has keys of a backend that is gone.
            MoriBackend::Rdma if self.broken.is_some() => {
                self.ledger.events.push_back(DataEvent::Fenced { peer });
            }
            MoriBackend::Rdma => {
                self.fences.insert(peer);
                self.start_recovery();
            }
            MoriBackend::Xgmi => {
                self.fences.insert(peer);
            }
        }
    }

    fn set_waker(&mut self, waker: Waker) {
        self.common.board.set_waker(waker);
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        self.take_worker_events();
        self.check_deadlines();
        out.extend(self.ledger.events.drain(..));
        next_poll(now, self.check_at)
    }
}
