//! A plane that does what the test says.

use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::moriio::descriptor::{
    DescLayout, MoriEngineDesc, MoriMemoryDesc,
};
use kvferry_engine::fabric::*;
use kvferry_mori_compat::{CompatPlane, SessionPaths};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) ops: Vec<(OpId, SessionId, Vec<u64>)>,
    pub(crate) tickets: Vec<(SessionId, QuiesceTicket)>,
    pub(crate) closed: Vec<SessionId>,
    pub(crate) credits: Option<usize>,
    /// Answers a quiesce by itself, without a word to the waker.
    pub(crate) quiet_at_once: bool,
    pub(crate) refuse_open: Option<FabricError>,
    /// Every session that was asked for, and its peer.
    pub(crate) opened: Vec<(SessionId, PeerId)>,
    /// Own operations use the memory.
    pub(crate) busy: bool,
    /// How often it was to be deregistered, and which is.
    pub(crate) asked: usize,
    pub(crate) deregistered: Vec<RegionId>,
    events: Vec<DataEvent>,
    waker: Option<Waker>,
}

/// The test's hand on the plane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hand(Arc<Mutex<Seen>>);

impl Hand {
    pub(crate) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().expect("no test holds it while it fails")
    }

    pub(crate) fn tell(&self, event: DataEvent) {
        let mut seen = self.seen();
        seen.events.push(event);
        let waker = seen.waker.clone();
        drop(seen);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn complete(&self, op: OpId, outcome: Completion) {
        self.tell(DataEvent::Completed { op, outcome });
    }

    pub(crate) fn op(&self, nth: usize) -> OpId {
        until(|| self.seen().ops.len() > nth);
        self.seen().ops[nth].0
    }
}

/// Waits for a condition; there is a limit, so that a bug ends in a failure.
#[track_caller]
pub(crate) fn until(mut condition: impl FnMut() -> bool) {
    let late = Instant::now() + Duration::from_secs(300);
    while !condition() {
        assert!(Instant::now() < late, "waited for 300 s");
        std::thread::yield_now();
    }
}

pub(crate) struct Fake {
    key: &'static str,
    hand: Hand,
}

impl Fake {
    pub(crate) fn boxed(key: &'static str) -> (Box<Fake>, Hand) {
        let hand = Hand::default();
        (Box::new(Fake { key, hand: hand.clone() }), hand)
    }
}

/// The address of an engine at a port.
pub(crate) fn address(key: &str, port: i32) -> Vec<u8> {
    let desc =
        MoriEngineDesc { key: key.into(), host: "127.0.0.1".into(), port, ..Default::default() };
    desc.encode(DescLayout::V1_2_2)
}

/// A region of an engine.
pub(crate) fn region(key: &str, data: u64, size: u64) -> Vec<u8> {
    let desc = MoriMemoryDesc { engine_key: key.into(), data, size, ..MoriMemoryDesc::default() };
    desc.encode(DescLayout::V1_2_2)
}

impl DataPlane for Fake {
    fn caps(&self) -> Caps {
        Caps {
            read: true,
            write: true,
            slices_max: 2,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(8),
            placement: Placement::OnCompletion,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        }
    }

    fn address(&self) -> Address {
        Address(address(self.key, 1).into())
    }

    fn register(&mut self, id: RegionId, memory: Memory) -> Result<(), Refused> {
        let Memory::Own(range) = memory else {
            return Err(Refused::Unsupported("memory".into()));
        };
        let result = Ok(RegionDesc(region(self.key, range.base(), range.len()).into()));
        self.hand.tell(DataEvent::Registered { region: id, result });
        Ok(())
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        let mut seen = self.hand.seen();
        seen.asked += 1;
        if seen.busy {
            return Err(Refused::Busy);
        }
        seen.deregistered.push(region);
        Ok(())
    }

    fn connect(&mut self, _peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        assert_eq!(fence_key, 0, "MoRIIO's peers have no pass");
        match MoriEngineDesc::decode(&address.0) {
            Ok(desc) if desc.port > 0 => Ok(()),
            _ => Err(Refused::Invalid("another kind of plane".into())),
        }
    }

    fn disconnect(&mut self, _peer: PeerId) {}

    fn open(
        &mut self,
        session: SessionId,
        _local: RegionId,
        peer: PeerId,
        _remote: &RegionDesc,
    ) -> Result<(), Refused> {
        self.hand.seen().opened.push((session, peer));
        let result = self.hand.seen().refuse_open.clone().map_or(Ok(()), Err);
        self.hand.tell(DataEvent::Opened { session, result });
        Ok(())
    }

    fn close(&mut self, session: SessionId) {
        self.hand.seen().closed.push(session);
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        let mut seen = self.hand.seen();
        match &mut seen.credits {
            Some(0) => return Err(Refused::Busy),
            Some(left) => *left -= 1,
            None => {}
        }
        seen.ops.push((batch.op, batch.session, batch.local.to_vec()));
        Ok(())
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        let mut seen = self.hand.seen();
        seen.tickets.push((session, ticket));
        if seen.quiet_at_once {
            seen.events.push(DataEvent::Quiet { session, ticket });
        }
    }

    fn fence(&mut self, _peer: PeerId) {}

    fn set_waker(&mut self, waker: Waker) {
        self.hand.seen().waker = Some(waker);
    }

    fn poll(&mut self, _now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        out.append(&mut self.hand.seen().events);
        NextPoll::External
    }
}

impl CompatPlane for Fake {
    fn paths(&self, _session: SessionId) -> Option<SessionPaths> {
        None
    }
}
