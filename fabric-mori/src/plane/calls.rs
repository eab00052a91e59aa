//! The calls of the trait.

use super::{Held, MoriPlane, Peer, Phase, Session};
use crate::address::{Claim, Identity, Location};
use crate::desk::Order;
use crate::door::{Dial, Grant, Line, Said};
use crate::news::News;
use crate::{Backend, preflight};
use engine::core::time::Nanos;
use engine::fabric::{
    Address, Caps, Cause, Credits, DataEvent, DataPlane, FenceScope, Memory, PeerId, Placement,
    Refused, RegionDesc, RegionId, SessionId, Submit, Ticket, Wake,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, mpsc};
use std::task::Waker;
use std::time::{Duration, Instant};

fn invalid<T>(why: impl Into<String>) -> Result<T, Refused> {
    Err(Refused::Invalid(why.into().into()))
}

impl Peer {
    pub(super) fn who(&self) -> Option<&Identity> {
        self.location.door.as_ref().map(|door| &door.who)
    }
}

impl MoriPlane {
    /// Has a session's descriptors told by the peer's door, or opens it without.
    pub(super) fn seek(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        let claim = session.claim.clone();
        let Some(peer) = self.peers.get_mut(&session.peer) else { return };
        let Some(door) = &peer.location.door else {
            let (engine, memory) = (peer.location.engine.clone(), claim.memory);
            return self.told(id, Ok(Grant { region: RegionId(u32::MAX), engine, memory }));
        };
        peer.line.take_if(|line| line.is_over());
        let line = peer.line.get_or_insert_with(|| {
            self.lines += 1;
            let config = &self.common.config;
            let dial = Dial {
                peer: session.peer,
                id: self.lines,
                who: self.common.who(),
                pass: peer.pass,
                patience: Duration::from_millis(config.open_ms.into()),
                dead: Duration::from_millis(config.dead_ms.into()),
            };
            let (board, orders) = (self.common.board.clone(), self.orders.clone());
            Line::dial(dial, &peer.location, door, move |said| match (said, &orders) {
                // At once: the peer may be waiting for it in a call.
                (Said::Leave(line, region), Some(orders)) => {
                    drop(orders.send(Order::Leave(line, region)));
                }
                (said, _) => board.tell(News::Line(said)),
            })
        });
        line.ask(id, claim.name);
    }

    /// Why MoRI would end the process, now or later that of a peer, over this memory.
    fn cannot_pin(&self, memory: Memory) -> Option<Arc<str>> {
        let pins = self.common.config.backend == Backend::Rdma
            && self.common.config.devices
            && matches!(memory, Memory::Own { .. });
        let limit = preflight::memlock_limit().filter(|_| pins)?;
        let all = self.regions.values().map(|held| held.len).sum::<u64>() + memory.len();
        let todo = preflight::MEMLOCK;
        (all > limit).then(|| {
            format!("{all} bytes of KV cannot be pinned, the limit is {limit}; to do: {todo}")
                .into()
        })
    }

    /// Whether a peer's MoRI can be spoken to.
    fn check_peer(&self, location: &Location) -> Result<(), Refused> {
        let ours = self.common.shim.info.layout;
        match &location.door {
            None if !self.common.config.open_door => {
                invalid("address of a plane that is not kvferry's; open_door lets such in")
            }
            Some(door) if door.layout != ours => {
                let theirs = door.layout;
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
                Backend::Rdma => FenceScope::Backend,
                Backend::Xgmi => FenceScope::Peer,
            },
            patience: self.common.config.patience(),
        }
    }

    fn address(&self) -> Address {
        self.common.address()
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        if self.regions.contains_key(&region) {
            return invalid(format!("region {region} is registered already"));
        }
        let base = match memory {
            Memory::Own { base, .. } | Memory::Device { base, .. } => base,
            other => return Err(Refused::Unsupported(format!("memory {other:?}").into())),
        };
        if memory.is_empty() || base.checked_add(memory.len()).is_none() {
            return invalid(format!("region {region} of {} bytes at {base:#x}", memory.len()));
        }
        let lacking = self.cannot_pin(memory);
        self.regions.insert(region, Held { len: memory.len(), operations: 0 });
        match lacking {
            // All is registered anew after the reset that ends this.
            None if self.broken.is_some() => {}
            None => self.tell(Order::Register { region, memory }),
            Some(why) => {
                let result = Err(Cause::Backend(why));
                self.events.push_back(DataEvent::Registered { region, result });
            }
        }
        Ok(())
    }

    /// Waits for the thread that posts, which may be held up by a full send queue; and over xGMI for
    /// all peers to leave, which is refused as `Busy` if one of them does not.
    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        match self.regions.get(&region) {
            None => return invalid(format!("region {region} is not registered")),
            Some(held) if held.operations > 0 => return Err(Refused::Busy),
            Some(_) => {}
        }
        self.common.gate.remove_region(region);
        let patience = Duration::from_millis(self.common.config.operation_ms.into());
        if !self.common.gate.clear_out(region, patience) {
            return Err(Refused::Busy);
        }
        self.regions.remove(&region);
        let (done, ended) = mpsc::sync_channel(1);
        self.tell(Order::Deregister { region, done });
        let _gone = ended.recv();
        for session in self.sessions.values_mut().filter(|session| session.local == region) {
            if !matches!(session.phase, Phase::Closing) {
                session.phase = Phase::Dead;
            }
        }
        Ok(())
    }

    fn connect(&mut self, peer: PeerId, address: &Address, pass: u64) -> Result<(), Refused> {
        if self.peers.contains_key(&peer) {
            return invalid(format!("peer {peer} is connected already"));
        }
        let Some(location) = Location::decode(address) else {
            return invalid("address of another kind of plane");
        };
        self.check_peer(&location)?;
        let named = Peer { location, pass, line: None, ranges: 0 };
        if let Some(who) = named.who() {
            self.common.gate.invite(who, pass);
        }
        self.peers.insert(peer, named);
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        let its: Vec<_> =
            self.sessions.iter().filter(|(_, s)| s.peer == peer).map(|(id, _)| *id).collect();
        for session in its {
            self.close(session);
        }
        let Some(gone) = self.peers.remove(&peer) else { return };
        if let Some(who) = gone.who() {
            self.common.gate.uninvite(who, gone.pass);
        }
        match (gone.line, self.common.config.backend) {
            (Some(line), Backend::Rdma) => line.hang_up(),
            // The peer may take the end of the line for the end of what is under way.
            (Some(line), Backend::Xgmi) => self.tell(Order::Leave(line, None)),
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
        if self.sessions.contains_key(&session) {
            return invalid(format!("session {session} is open already"));
        }
        let Some(held) = self.regions.get(&local) else {
            return invalid(format!("region {local} is not registered"));
        };
        if !self.peers.contains_key(&peer) {
            return invalid(format!("peer {peer} is not connected"));
        }
        let Some(claim) = Claim::decode(&remote.0) else {
            return invalid("descriptor of another kind of plane");
        };
        let patience = Duration::from_millis(self.common.config.open_ms.into());
        let until = Instant::now() + patience;
        let entry = Session {
            local,
            peer,
            lens: [held.len, claim.len],
            claim,
            phase: Phase::Opening(until),
            reopening: None,
            line: None,
            wire: BTreeMap::new(),
            tainted: false,
            tickets: VecDeque::new(),
        };
        self.sessions.insert(session, entry);
        self.check_by(until);
        match &self.broken {
            None => self.seek(session),
            Some(why) => {
                let result = Err(Cause::Backend(Arc::clone(why)));
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

    fn quiesce(&mut self, session: SessionId, ticket: Ticket) {
        match self.sessions.get_mut(&session) {
            None => self.events.push_back(DataEvent::Quiet { session, ticket }),
            Some(known) => {
                known.tickets.push_back((ticket, self.order));
                self.settle(session);
            }
        }
    }

    fn fence(&mut self, peer: PeerId) {
        let known = self.peers.get(&peer);
        let who = known.and_then(|known| Some((known.who()?.clone(), known.pass)));
        let inside = match who {
            Some((who, pass)) => self.common.gate.fence(&who, pass),
            // Who has no door asks for nothing: it may be inside if it is known at all.
            None => known.is_some(),
        };
        match self.common.config.backend {
            _ if !inside => self.events.push_back(DataEvent::Fenced { peer }),
            // Nobody has keys of a backend that is gone.
            Backend::Rdma if self.broken.is_some() => {
                self.events.push_back(DataEvent::Fenced { peer });
            }
            Backend::Rdma => {
                self.fences.insert(peer);
                self.mend();
            }
            Backend::Xgmi => {
                self.fences.insert(peer);
            }
        }
    }

    fn set_waker(&mut self, waker: Waker) {
        self.common.board.set_waker(waker);
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> Wake {
        self.take_news();
        self.keep_time();
        out.extend(self.events.drain(..));
        match self.check_at {
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                Wake::At(now + Nanos(left.as_nanos() as u64))
            }
            None => Wake::External,
        }
    }
}
