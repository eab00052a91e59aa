//! Operations, from when a plane accepted them until nothing of them can land and they completed.

use super::TrackedInstance;
use crate::observation::{BlockRef, MemoryRange, SimProcessId, SimRankId, Submission};
use kvferry_engine::fabric::{Direction, Placement, QuiesceTicket, SessionId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What an operation moves: what it has in common with other tries to move the same bytes, and with
/// nothing else that its plane does at that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpExtent {
    target: SimRankId,
    reach: MemoryRange,
    remote_at: u64,
    bytes: u64,
}

impl OpExtent {
    /// True if the other may be this, or a part of it: it lies in the same memory.
    pub(crate) fn may_have(&self, other: &OpExtent) -> bool {
        let (own, others) = (self.reach, other.reach);
        self.target == other.target
            && own.segment == others.segment
            && own.from <= others.from
            && others.to <= own.to
            && other.bytes <= self.bytes
    }
}

#[derive(Debug)]
pub(crate) struct TrackedOp {
    id: u64,
    /// Sequence number at which it was accepted.
    pub(crate) seq: u64,
    from: SimRankId,
    session: SessionId,
    /// The pass of its session.
    fence_key: u64,
    /// Whose memory it writes.
    pub(crate) target: SimRankId,
    awaits_quiet: bool,
    /// It was reported as complete.
    pub(crate) completed: bool,
    /// Nothing of it can land any more, and its initiator knows.
    pub(crate) settled: bool,
    reach: MemoryRange,
    remote_at: u64,
    bytes: u64,
    reads: Vec<BlockRef>,
    writes: Vec<BlockRef>,
}

impl TrackedOp {
    pub(crate) fn work(&self) -> OpExtent {
        OpExtent {
            target: self.target,
            reach: self.reach,
            remote_at: self.remote_at,
            bytes: self.bytes,
        }
    }

    /// What tells it from others of its plane, but for its layers: the target, and the first and
    /// the last block that it writes, or that it reads if it reaches nothing that could be written.
    pub(crate) fn range(&self) -> (SimRankId, Option<BlockRef>, Option<BlockRef>) {
        let blocks = if self.writes.is_empty() { &self.reads } else { &self.writes };
        (self.target, blocks.first().copied(), blocks.last().copied())
    }
}

/// The operations of one data plane, by id.
#[derive(Debug)]
struct PlaneOps {
    at: SimRankId,
    ops: VecDeque<TrackedOp>,
    /// Targets that have fenced it, and the fence keys that are void there: what is submitted under
    /// them reaches nothing. A fence ends one connection, and the next one may have begun before.
    void: BTreeSet<(SimRankId, u64)>,
}

impl PlaneOps {
    #[inline]
    fn find(&self, id: u64) -> Option<usize> {
        let at = self.ops.partition_point(|op| op.id < id);
        (self.ops.get(at)?.id == id).then_some(at)
    }

    fn trim(&mut self) -> Option<TrackedOp> {
        let over = self.ops.front().is_some_and(|op| op.completed && op.settled);
        if over { self.ops.pop_front() } else { None }
    }
}

#[derive(Debug)]
pub(crate) struct TrackedOps {
    planes: Vec<PlaneOps>,
    /// Plane of each rank of each instance in the newest incarnation that submitted something.
    newest: Vec<Vec<Option<u32>>>,
    /// Planes of older incarnations.
    older: BTreeMap<SimRankId, u32>,
    tickets: BTreeMap<(SimRankId, SessionId, QuiesceTicket), u64>,
    /// Memory to be used again.
    spare: Vec<Vec<BlockRef>>,
}

impl TrackedOps {
    pub(super) fn new(instances: usize) -> TrackedOps {
        TrackedOps {
            planes: Vec::new(),
            newest: vec![Vec::new(); instances],
            older: BTreeMap::new(),
            tickets: BTreeMap::new(),
            spare: Vec::new(),
        }
    }

    /// Where the plane of a rank is.
    #[inline]
    fn number(&self, at: SimRankId) -> Option<usize> {
        let newest = self.newest.get(usize::from(at.who.instance))?;
        let newest = newest.get(usize::from(at.rank)).copied().flatten();
        let found = newest.filter(|plane| self.planes[*plane as usize].at == at);
        found.or_else(|| self.older.get(&at).copied()).map(|plane| plane as usize)
    }

    fn plane_mut(&mut self, at: SimRankId) -> Option<&mut PlaneOps> {
        let number = self.number(at)?;
        Some(&mut self.planes[number])
    }

    fn make_plane(&mut self, at: SimRankId) {
        let Some(ranks) = self.newest.get_mut(usize::from(at.who.instance)) else { return };
        let rank = usize::from(at.rank);
        if ranks.len() <= rank {
            ranks.resize(rank + 1, None);
        }
        let number = self.planes.len() as u32;
        if let Some(old) = ranks[rank].replace(number) {
            self.older.insert(self.planes[old as usize].at, old);
        }
        let (ops, void) = (VecDeque::new(), BTreeSet::new());
        self.planes.push(PlaneOps { at, ops, void });
    }

    fn plane_or_new(&mut self, at: SimRankId) -> Option<&mut PlaneOps> {
        if self.number(at).is_none() {
            self.make_plane(at);
        }
        self.plane_mut(at)
    }

    #[inline]
    pub(super) fn get(&self, from: SimRankId, id: u64) -> Option<&TrackedOp> {
        let plane = &self.planes[self.number(from)?];
        plane.find(id).map(|at| &plane.ops[at])
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SimRankId, &TrackedOp)> {
        self.planes.iter().flat_map(|plane| plane.ops.iter().map(|op| (plane.at, op)))
    }

    pub(super) fn submitted(
        &mut self,
        seen: &Submission<'_>,
        seq: u64,
        places: &mut [TrackedInstance],
    ) {
        // A reader does not keep its source from being freed: that is what leases are for.
        let (target, read, written) = match seen.direction {
            Direction::Write => (seen.peer, seen.local, seen.remote),
            Direction::Read => (seen.from, &[][..], seen.local),
        };
        let mut keep = |from: &[BlockRef]| {
            let mut list = self.spare.pop().unwrap_or_default();
            list.clear();
            list.extend_from_slice(from);
            list.dedup();
            list
        };
        let (reads, writes) = (keep(read), keep(written));
        let Some(plane) = self.plane_or_new(seen.from) else { return };
        let op = TrackedOp {
            id: seen.op.0,
            seq,
            from: seen.from,
            session: seen.session,
            fence_key: seen.fence_key,
            target,
            awaits_quiet: seen.placement == Placement::OnQuiet,
            completed: false,
            settled: plane.void.contains(&(target, seen.fence_key)),
            reach: seen.reach,
            remote_at: seen.remote_at,
            bytes: seen.bytes,
            reads,
            writes,
        };
        if !op.settled {
            count(&op, places, |count| count + 1);
        }
        let at = plane.ops.partition_point(|other| other.id < op.id);
        plane.ops.insert(at, op);
    }

    /// It completed; `landed` says for a failed one whether it is known what landed.
    pub(super) fn completed(
        &mut self,
        from: SimRankId,
        id: u64,
        landed: Option<bool>,
        places: &mut [TrackedInstance],
    ) {
        let Some(plane) = self.plane_mut(from) else { return };
        let Some(at) = plane.find(id) else { return };
        let op = &mut plane.ops[at];
        if std::mem::replace(&mut op.completed, true) {
            return;
        }
        if landed.unwrap_or(!op.awaits_quiet) {
            settle(op, places);
        }
        self.trim(from);
    }

    fn trim(&mut self, from: SimRankId) {
        while let Some(op) = self.plane_mut(from).and_then(PlaneOps::trim) {
            self.spare.extend([op.reads, op.writes]);
        }
    }

    pub(super) fn quiesced(
        &mut self,
        from: SimRankId,
        session: SessionId,
        ticket: QuiesceTicket,
        seq: u64,
    ) {
        self.tickets.insert((from, session, ticket), seq);
    }

    pub(super) fn quiet(
        &mut self,
        from: SimRankId,
        session: SessionId,
        ticket: QuiesceTicket,
        places: &mut [TrackedInstance],
    ) {
        let Some(asked) = self.tickets.remove(&(from, session, ticket)) else { return };
        let Some(plane) = self.plane_mut(from) else { return };
        for op in &mut plane.ops {
            if op.session == session && op.seq <= asked {
                settle(op, places);
            }
        }
        self.trim(from);
    }

    pub(super) fn fenced(
        &mut self,
        at: SimRankId,
        peer: SimRankId,
        fence_key: u64,
        places: &mut [TrackedInstance],
    ) {
        let Some(plane) = self.plane_or_new(peer) else { return };
        plane.void.insert((at, fence_key));
        for op in plane.ops.iter_mut().filter(|op| op.target == at && op.fence_key == fence_key) {
            settle(op, places);
        }
        self.trim(peer);
    }

    /// What a rank submitted lands nowhere any more, and nothing that was submitted lands in its
    /// memory.
    pub(super) fn void(&mut self, at: SimRankId, places: &mut [TrackedInstance]) {
        for plane in &mut self.planes {
            let own = plane.at == at;
            for op in plane.ops.iter_mut().filter(|op| own || op.target == at) {
                settle(op, places);
            }
            while let Some(op) = plane.trim() {
                self.spare.extend([op.reads, op.writes]);
            }
        }
    }

    /// Forgets what can reach no memory any more: what the instance read, and what was to be
    /// written into it. What it wrote into others may still land.
    pub(super) fn crashed(&mut self, who: SimProcessId, places: &mut [TrackedInstance]) {
        for plane in &mut self.planes {
            if plane.at.who == who {
                plane.ops.retain(|op| op.target.who != who);
                plane.ops.iter_mut().for_each(|op| op.completed = true);
            }
            for op in plane.ops.iter_mut().filter(|op| op.target.who == who) {
                settle(op, places);
            }
        }
    }
}

/// Nothing of the operation can land any more.
fn settle(op: &mut TrackedOp, places: &mut [TrackedInstance]) {
    if !std::mem::replace(&mut op.settled, true) {
        count(op, places, |count| count.saturating_sub(1));
    }
}

#[inline]
fn count(op: &TrackedOp, places: &mut [TrackedInstance], change: impl Fn(u32) -> u32) {
    let sides = [(op.target, &op.writes, true), (op.from, &op.reads, false)];
    for (at, blocks, writes) in sides {
        let Some(place) = places.get_mut(usize::from(at.who.instance)) else { continue };
        if !place.alive || place.incarnation != Some(at.who.incarnation) {
            continue;
        }
        for block in blocks {
            let block = place.blocks.get_mut(*block);
            let field = if writes { &mut block.writes } else { &mut block.reads };
            *field = change(*field);
        }
    }
}
