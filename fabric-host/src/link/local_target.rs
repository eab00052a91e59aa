//! The side of a local link that serves: it copies what the peer pushes.

use super::HostInboundLink;
use super::local_link::LocalLinkHandles;
use super::segment::ShmRing;
use super::target::{ANSWERS_MAX, TargetState, share_files};
use crate::copy::{CopyFault, CopySlice, SliceCursor, copy};
use crate::memory::HostRegion;
use crate::path::reach;
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, bytes_inside, take_slices,
};
use crate::ring::{Consumer, Producer};
use crate::shared::{HostCloseReason, HostLinkDriver, SHORT_MAX, WorkerContext};
use rustix::event::epoll::EventFlags;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Records taken in one step.
const BURST: usize = 64;

/// Bytes that are copied at most before a sleeping peer hears of answers while there is more to
/// copy: it would take the very core that copies.
const QUIET_MAX: u64 = 8 << 20;

/// The part that is being copied.
#[derive(Debug)]
struct PartCopy {
    part: HostOperationPart,
    cursor: SliceCursor,
    bytes: u64,
}

#[derive(Debug)]
pub(super) struct LocalTarget {
    ends: LocalLinkHandles,
    state: TargetState,
    requests: Consumer<ShmRing>,
    answers: Producer<ShmRing>,
    waiting: VecDeque<Vec<u64>>,
    /// Bytes that were copied since answers were put into the ring that the peer may not know of.
    unannounced_bytes: Option<u64>,
    replies: VecDeque<(HostControlMessage, Option<Arc<HostRegion>>)>,
    slices: Vec<CopySlice>,
    work: Option<PartCopy>,
    /// The operation that ended last was long.
    long: bool,
}

impl LocalTarget {
    pub(super) fn new(ends: LocalLinkHandles, inbound: Arc<HostInboundLink>) -> LocalTarget {
        LocalTarget {
            state: TargetState::new(inbound),
            requests: Consumer::new(ends.segment.requests()),
            answers: Producer::new(ends.segment.answers()),
            ends,
            waiting: VecDeque::new(),
            unannounced_bytes: None,
            replies: VecDeque::new(),
            slices: Vec::new(),
            work: None,
            long: false,
        }
    }

    fn controls(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let mut worked = false;
        while let Some((reply, region)) = self.replies.front() {
            if !self.ends.send(reply, region.as_ref())? {
                // No more is taken from a peer that does not hear the answers.
                return Ok(worked);
            }
            self.replies.pop_front();
            worked = true;
        }
        match self.ends.receive()? {
            None => return Ok(worked),
            Some((HostControlMessage::Open { session, region, token, local }, file)) => {
                let LocalLinkHandles { peer, rules, .. } = &self.ends;
                let files = share_files([&cx.hub.rules(), rules]);
                self.replies.push_back(self.state.open(
                    cx,
                    session,
                    (region, token),
                    (&local, files),
                    |ours| {
                        let found = reach(&local, file, peer, [ours, rules]);
                        found.map(|(path, source)| (path, Some(source)))
                    },
                ));
            }
            Some((HostControlMessage::Unknown, _)) => {}
            Some(_) => return Err(HostCloseReason::Corrupt),
        }
        Ok(true)
    }

    fn answer(&mut self, record: HostRecord) -> Result<(), HostCloseReason> {
        self.waiting.push_back(record.words());
        self.flush().map(|_| ())
    }

    fn flush(&mut self) -> Result<bool, HostCloseReason> {
        let mut worked = false;
        while let Some(words) = self.waiting.front() {
            if !self.answers.push(words).map_err(|_| HostCloseReason::Corrupt)? {
                break;
            }
            self.waiting.pop_front();
            worked = true;
        }
        if worked {
            self.unannounced_bytes.get_or_insert(0);
        }
        Ok(worked)
    }

    /// Wakes the peer for its answers, unless there is more to do first.
    fn tell(&mut self, idle: bool) {
        if self.unannounced_bytes.is_some_and(|bytes| idle || bytes >= QUIET_MAX) {
            self.unannounced_bytes = None;
            if self.answers.must_wake() {
                self.ends.bell.ring();
            }
        }
    }

    fn take(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if self.waiting.len() >= ANSWERS_MAX {
            return Ok(false);
        }
        if !self.requests.pop(&mut cx.record).map_err(|_| HostCloseReason::Corrupt)? {
            return Ok(false);
        }
        if self.requests.made_room() {
            self.ends.bell.ring();
        }
        let (record, rest) = HostRecord::decode(&cx.record).ok_or(HostCloseReason::Corrupt)?;
        match record {
            HostRecord::Write(part) => {
                if !take_slices(rest, &mut self.slices) {
                    return Err(HostCloseReason::Corrupt);
                }
                let bytes = match self.state.sessions.get(&part.session) {
                    Some(session) => {
                        bytes_inside(&self.slices, session.peer_len, session.region.len)
                            .ok_or(HostCloseReason::Corrupt)?
                    }
                    None => {
                        self.state.refuse();
                        0
                    }
                };
                self.work = Some(PartCopy { part, cursor: SliceCursor::default(), bytes });
            }
            HostRecord::Close { session } => {
                self.state.sessions.remove(&session);
                self.answer(HostRecord::Closed { session })?;
            }
            _ => return Err(HostCloseReason::Corrupt),
        }
        Ok(true)
    }

    /// One chunk of the part at hand, and its end.
    fn copy(&mut self, cx: &mut WorkerContext) -> Result<(), HostCloseReason> {
        let Some(work) = &mut self.work else { return Ok(()) };
        let state = &mut self.state;
        if state.status == HostCopyStatus::Done && !work.cursor.is_at_end(&self.slices) {
            let session = &state.sessions[&work.part.session];
            // All sessions of this link have one.
            let Some(source) = &session.source else { return Err(HostCloseReason::Corrupt) };
            let chunk = work.cursor.chunk(&self.slices, &mut cx.chunk);
            if let Some(untold) = &mut self.unannounced_bytes {
                *untold += chunk.iter().map(|slice| slice.len).sum::<u64>();
            }
            let Some(_in) = state.inbound.hold() else {
                return Err(HostCloseReason::LocallyClosed);
            };
            state.status = match session.region.hold() {
                None => HostCopyStatus::Refused,
                Some(_registered) => {
                    let to = &session.region.reach;
                    // SAFETY: `take` has found all slices inside both regions. The source is kept
                    // by the session, the destination is registered as long as it is held, and who
                    // registered it promises that it may be written.
                    match unsafe { copy((chunk, work.bytes), source, to, &mut cx.scratch) } {
                        Ok(()) => HostCopyStatus::Done,
                        Err(CopyFault::Source) => HostCopyStatus::Source,
                        Err(CopyFault::Destination) => HostCopyStatus::Destination,
                    }
                }
            };
        }
        if state.status != HostCopyStatus::Done || work.cursor.is_at_end(&self.slices) {
            let sum = state.bytes.checked_add(work.bytes);
            state.bytes = sum.ok_or(HostCloseReason::Corrupt)?;
            let ended = state.finish(cx, work.part);
            self.work = None;
            if let Some((answer, bytes)) = ended {
                self.long = bytes > SHORT_MAX;
                self.answer(answer)?;
            }
        }
        Ok(())
    }
}

impl HostLinkDriver for LocalTarget {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.ends.fds()
    }

    fn ready(&mut self, index: usize) {
        self.ends.ready(index);
    }

    fn step(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if self.state.inbound.is_shut() {
            return Err(HostCloseReason::LocallyClosed);
        }
        if self.ends.ended {
            return Err(HostCloseReason::Closed);
        }
        let mut worked = false;
        if self.ends.writable && (self.ends.readable || !self.replies.is_empty()) {
            worked |= self.controls(cx)?;
        }
        if !self.waiting.is_empty() {
            worked |= self.flush()?;
        }
        let mut idle = false;
        for _ in 0..BURST {
            if self.work.is_none() && !self.take(cx)? {
                idle = true;
                break;
            }
            worked = true;
            let chunked = self.work.as_ref().is_some_and(|work| work.bytes > 1 << 16);
            self.copy(cx)?;
            if chunked {
                break;
            }
        }
        self.tell(idle);
        Ok(worked)
    }

    fn spins(&self) -> bool {
        !self.long
    }

    fn prepare_sleep(&mut self) -> bool {
        let stuck = self.waiting.len() >= ANSWERS_MAX;
        let empty = self.requests.sleep() || stuck;
        let heard = !self.ends.writable || (!self.ends.readable && self.replies.is_empty());
        empty && heard && self.work.is_none() && !self.state.inbound.is_shut()
    }

    fn end(self: Box<Self>, cx: &mut WorkerContext, why: HostCloseReason) {
        self.state.end(cx, why);
    }
}
