//! The side of a local link that serves: it copies what the peer pushes.

use super::segment::{ShmRing, ShmSegment};
use super::{HostCloseReason, HostInboundLink, HostLinkDriver, socket};
use crate::config::DataPath;
use crate::copy::{CopyFault, CopySlice, SliceCursor, copy};
use crate::memory::{HostMemoryAccess, HostRegion, PidfdProcess};
use crate::path::reach;
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, HostRegionInfo, PathPolicy,
    SessionDenial, bytes_inside, take_slices,
};
use crate::ring::{Consumer, Producer};
use crate::worker::{SHORT_MAX, WorkerContext, ring};
use rustix::event::epoll::EventFlags;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Sessions that one peer may have open.
const SESSIONS_MAX: usize = 16_384;

/// Answers that wait for room in the ring before requests are left where they are.
const ANSWERS_MAX: usize = 1_024;

/// Records taken in one step.
const BURST: usize = 64;

/// Bytes that are copied at most before a sleeping peer hears of answers while there is more to
/// copy: it would take the very core that copies.
const QUIET_MAX: u64 = 8 << 20;

/// A session of the peer: from its region to ours.
struct LocalTargetSession {
    region: Arc<HostRegion>,
    source: HostMemoryAccess,
    source_len: u64,
    path: DataPath,
}

/// The part that is being copied.
struct PartCopy {
    part: HostOperationPart,
    cursor: SliceCursor,
    bytes: u64,
}

/// What the peer of a local link is reached by.
pub(super) struct LocalLinkHandles {
    pub(super) socket: OwnedFd,
    /// Readable when the process has ended; none for a process of another namespace.
    pub(super) watch: Option<OwnedFd>,
    pub(super) process: Option<Arc<PidfdProcess>>,
    pub(super) bell: OwnedFd,
    pub(super) segment: ShmSegment,
    pub(super) rules: PathPolicy,
    /// The peer may say more than this plane knows.
    pub(super) later: bool,
}

impl LocalLinkHandles {
    pub(super) fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        let socket = (self.socket.as_fd(), EventFlags::IN | EventFlags::OUT | EventFlags::ET);
        let watch = self.watch.as_ref().map(|fd| (fd.as_fd(), EventFlags::IN));
        std::iter::once(socket).chain(watch).collect()
    }
}

/// The serving side.
pub(super) struct LocalTarget {
    ends: LocalLinkHandles,
    inbound: Arc<HostInboundLink>,
    requests: Consumer<ShmRing>,
    answers: Producer<ShmRing>,
    waiting: VecDeque<Vec<u64>>,
    /// Bytes that were copied since answers were put into the ring that the peer may not know of.
    unannounced_bytes: Option<u64>,
    replies: VecDeque<(HostControlMessage, Option<Arc<HostRegion>>)>,
    sessions: BTreeMap<u32, LocalTargetSession>,
    slices: Vec<CopySlice>,
    work: Option<PartCopy>,
    /// How the operation goes whose parts are coming in, and its bytes so far.
    running: (HostCopyStatus, u64),
    /// The operation that ended last was long.
    long: bool,
    readable: bool,
    /// The socket takes a message, as far as is known.
    writable: bool,
    ended: bool,
}

impl LocalTarget {
    pub(super) fn new(ends: LocalLinkHandles, inbound: Arc<HostInboundLink>) -> LocalTarget {
        LocalTarget {
            inbound,
            requests: Consumer::new(ends.segment.requests()),
            answers: Producer::new(ends.segment.answers()),
            ends,
            waiting: VecDeque::new(),
            unannounced_bytes: None,
            replies: VecDeque::new(),
            sessions: BTreeMap::new(),
            slices: Vec::new(),
            work: None,
            running: (HostCopyStatus::Done, 0),
            long: false,
            readable: true,
            writable: true,
            ended: false,
        }
    }

    fn controls(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let mut worked = false;
        while let Some((reply, region)) = self.replies.front() {
            let file = region.as_ref().and_then(|region| region.file.as_ref());
            let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
            if !socket::send(self.ends.socket.as_fd(), reply, &fds)? {
                // No more is taken from a peer that does not hear the answers.
                self.writable = false;
                return Ok(worked);
            }
            self.replies.pop_front();
            worked = true;
        }
        if self.readable {
            match socket::receive(self.ends.socket.as_fd(), self.ends.later)? {
                None => self.readable = false,
                Some((HostControlMessage::Open { session, region, token, local }, mut fds)) => {
                    let answer = self.open(cx, session, (region, token), &local, fds.pop());
                    let (result, region) = match answer {
                        Ok((answer, region)) => (Ok(answer), Some(region)),
                        Err(denial) => (Err(denial), None),
                    };
                    self.replies
                        .push_back((HostControlMessage::Opened { session, result }, region));
                    worked = true;
                }
                Some((HostControlMessage::Unknown, _)) => worked = true,
                Some(_) => return Err(HostCloseReason::Corrupt),
            }
        }
        Ok(worked)
    }

    #[allow(clippy::type_complexity, reason = "the answer and whose file goes with it")]
    fn open(
        &mut self,
        cx: &WorkerContext,
        session: u32,
        (region, token): (u32, u64),
        local: &HostRegionInfo,
        file: Option<OwnedFd>,
    ) -> Result<((DataPath, HostRegionInfo, u32), Arc<HostRegion>), SessionDenial> {
        let deny = |why: &str| SessionDenial { why: why.into(), tcp: false };
        if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(&session) {
            return Err(deny("session in use, or too many of them"));
        }
        let (region, place) =
            cx.hub.region(region, token).ok_or_else(|| deny("the region is not registered"))?;
        let rules = cx.hub.rules();
        let process = self.ends.process.as_ref();
        let (path, source) = reach(local, file, process, [&rules, &self.ends.rules])?;
        let entry =
            LocalTargetSession { region: region.clone(), source, source_len: local.len, path };
        self.sessions.insert(session, entry);
        Ok(((path, HostRegionInfo::of(&region, true), place), region))
    }

    fn answer(&mut self, record: HostRecord) -> Result<(), HostCloseReason> {
        let mut words = Vec::new();
        record.encode(&mut words);
        self.waiting.push_back(words);
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
                ring(self.ends.bell.as_fd());
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
            ring(self.ends.bell.as_fd());
        }
        let (record, rest) = HostRecord::decode(&cx.record).ok_or(HostCloseReason::Corrupt)?;
        match record {
            HostRecord::Write(part) => {
                if !take_slices(rest, &mut self.slices) {
                    return Err(HostCloseReason::Corrupt);
                }
                let lens = self.sessions.get(&part.session).map(|s| (s.source_len, s.region.len));
                let bytes = match lens {
                    Some((from, to)) => {
                        Some(bytes_inside(&self.slices, from, to).ok_or(HostCloseReason::Corrupt)?)
                    }
                    None => None,
                };
                if bytes.is_none() && self.running.0 == HostCopyStatus::Done {
                    self.running.0 = HostCopyStatus::Refused;
                }
                self.work = Some(PartCopy {
                    part,
                    cursor: SliceCursor::default(),
                    bytes: bytes.unwrap_or(0),
                });
            }
            HostRecord::Close { session } => {
                self.sessions.remove(&session);
                self.answer(HostRecord::Closed { session })?;
            }
            _ => return Err(HostCloseReason::Corrupt),
        }
        Ok(true)
    }

    /// One chunk of the part at hand, and its end.
    fn copy(&mut self, cx: &mut WorkerContext) -> Result<(), HostCloseReason> {
        let Some(work) = &mut self.work else { return Ok(()) };
        if self.running.0 == HostCopyStatus::Done && !work.cursor.is_at_end(&self.slices) {
            let session = &self.sessions[&work.part.session];
            let chunk = work.cursor.chunk(&self.slices, &mut cx.chunk);
            if let Some(untold) = &mut self.unannounced_bytes {
                *untold += chunk.iter().map(|slice| slice.len).sum::<u64>();
            }
            let Some(_in) = self.inbound.hold() else { return Err(HostCloseReason::LocallyClosed) };
            self.running.0 = match session.region.hold() {
                None => HostCopyStatus::Refused,
                Some(_registered) => {
                    let to = &session.region.reach;
                    match copy((chunk, work.bytes), &session.source, to, &mut cx.scratch) {
                        Ok(()) => HostCopyStatus::Done,
                        Err(CopyFault::Source) => HostCopyStatus::Source,
                        Err(CopyFault::Destination) => HostCopyStatus::Destination,
                    }
                }
            };
        }
        if self.running.0 != HostCopyStatus::Done || work.cursor.is_at_end(&self.slices) {
            let (part, bytes) = (work.part, work.bytes);
            self.running.1 += bytes;
            self.work = None;
            if part.last {
                let (status, bytes) =
                    std::mem::replace(&mut self.running, (HostCopyStatus::Done, 0));
                self.long = bytes > SHORT_MAX;
                if status == HostCopyStatus::Done
                    && let Some(session) = self.sessions.get(&part.session)
                {
                    cx.hub.counts.served[session.path as usize].add(bytes);
                }
                self.answer(HostRecord::Done { op: part.op, status })?;
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for LocalTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalTarget").field("inbound", &self.inbound).finish_non_exhaustive()
    }
}

impl HostLinkDriver for LocalTarget {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.ends.fds()
    }

    fn ready(&mut self, index: usize) {
        match index {
            0 => (self.readable, self.writable) = (true, true),
            _ => self.ended = true,
        }
    }

    fn step(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if self.inbound.is_shut() {
            return Err(HostCloseReason::LocallyClosed);
        }
        if self.ended {
            return Err(HostCloseReason::Closed);
        }
        let mut worked = false;
        if self.writable && (self.readable || !self.replies.is_empty()) {
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
        let heard = !self.writable || (!self.readable && self.replies.is_empty());
        empty && heard && self.work.is_none() && !self.inbound.is_shut()
    }

    fn end(self: Box<Self>, cx: &mut WorkerContext, why: HostCloseReason) {
        cx.hub.dismiss(self.inbound.id);
        if why == HostCloseReason::Corrupt {
            cx.hub.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        }
        // Reads of the peer end, too.
        self.inbound.shut();
    }
}
