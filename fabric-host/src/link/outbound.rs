//! A link that this plane dialled, for its owner: what is to be done goes into a queue of the link,
//! or straight into the ring that the peer reads.

use super::HostLinkKind;
use super::segment::{ShmRing, ShmSegment};
use crate::copy::{CopyBuffers, CopyFault, CopySlice, copy};
use crate::doorbell::{HeardBell, PeerBell, WorkerHandle};
use crate::memory::{HostMemoryAccess, HostRegion, MemfdMapping};
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, HostRegionInfo, PART_MAX,
    push_slices,
};
use crate::ring::{Consumer, Ordering as RingOrdering, Producer};
use crate::shared::HostCloseReason;
use kvferry_fabric_common::lock;
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The remote region of a session on this host, for reading.
#[derive(Debug)]
pub(crate) struct HostReadSource {
    pub(crate) reach: HostMemoryAccess,
    /// Bytes that `reach` covers.
    pub(crate) len: u64,
    pub(crate) token: u64,
    pub(crate) place: usize,
    pub(crate) registration_table: Arc<MemfdMapping>,
    pub(crate) segment: ShmSegment,
    /// Set when the session is closed.
    pub(crate) cancelled: AtomicBool,
}

impl HostReadSource {
    /// True as long as the peer lets us in and the region is registered there.
    pub(crate) fn is_permitted(&self) -> bool {
        let lives =
            self.registration_table.words()[self.place].load(RingOrdering::SeqCst) == self.token;
        lives && self.segment.is_open()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Copies ranges, at most a chunk, of an operation of so many bytes into a region of ours.
    ///
    /// # Safety
    /// The ranges are inside the `len` bytes of this and inside the region.
    pub(crate) unsafe fn read(
        &self,
        chunk: (&[CopySlice], u64),
        into: &HostRegion,
        scratch: &mut CopyBuffers,
    ) -> HostCopyStatus {
        if self.is_cancelled() || !self.is_permitted() {
            return HostCopyStatus::Refused;
        }
        let Some(_registered) = into.hold() else { return HostCopyStatus::Destination };
        // SAFETY: The ranges are the caller's promise. What is read is kept by `self`, what is
        // written is registered as long as it is held.
        match unsafe { copy(chunk, &self.reach, &into.reach, scratch) } {
            Err(CopyFault::Source) => HostCopyStatus::Source,
            Err(CopyFault::Destination) => HostCopyStatus::Destination,
            // What was read of a region that is gone may be anything.
            Ok(()) if !self.is_permitted() => HostCopyStatus::Source,
            Ok(()) => HostCopyStatus::Done,
        }
    }
}

/// What the thread of a local link does itself.
#[derive(Debug)]
pub(crate) enum HostReadJob {
    /// Copies into a region of ours.
    Copy {
        op: u64,
        source: Arc<HostReadSource>,
        region: Arc<HostRegion>,
        slices: Vec<CopySlice>,
        bytes: u64,
    },
    /// Says that all reads of a session that came ahead of it are over.
    Barrier { session: u32 },
}

/// Queues of a link. Operations in flight bound them all.
#[derive(Debug, Default)]
pub(crate) struct OutboundQueues {
    /// Where records go at once if there is room; the rest waits in `records`.
    pub(super) ring: Option<Producer<ShmRing>>,
    pub(super) records: VecDeque<QueuedRecord>,
    pub(super) controls: VecDeque<(HostControlMessage, Option<Arc<HostRegion>>)>,
    pub(super) reads: VecDeque<HostReadJob>,
    /// Operations that the peer will answer.
    pub(super) awaited: BTreeSet<u64>,
    /// The peer broke the ring.
    pub(super) broken: bool,
}

/// A record, and by TCP the memory that it goes from or to.
#[derive(Debug)]
pub(crate) struct QueuedRecord {
    pub(super) words: Vec<u64>,
    /// Where a write or read by TCP has its bytes on this side.
    pub(super) memory: Option<(Arc<HostRegion>, Vec<CopySlice>)>,
}

/// What a peer answers by its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostLinkEvent {
    Done { op: u64, status: HostCopyStatus },
    Closed { session: u32, link: u64 },
}

/// Answers taken at a time.
const BURST: usize = 64;

/// What the owner of a local link has of it.
#[derive(Debug)]
pub(crate) struct LocalOutbound {
    pub(super) segment: ShmSegment,
    /// Doorbell of the thread that serves us.
    pub(super) bell: PeerBell,
    /// By what the peer rings the owner for its answers. If there is none it rings our thread, who
    /// tells the owner.
    pub(super) heard: Option<HeardBell>,
    /// Both sides take memory files.
    pub(super) files: bool,
}

/// The ring of answers. The owner looks itself while it waits, so that an answer takes no way round
/// by our thread; else who is rung does.
#[derive(Debug)]
struct HostCompletionRing {
    ring: Consumer<ShmRing>,
    record: Vec<u64>,
    heard: Option<HeardBell>,
    /// The owner has announced that it sleeps, and not yet looked whether it was rung.
    announced: bool,
    /// The owner was rung, and has not yet heard that.
    rung: bool,
    /// One ring was heard as a stray, and is not to be heard again.
    heard_one: bool,
    attended: bool,
}

impl HostCompletionRing {
    /// Announces that who takes the answers goes to sleep; false if there is one.
    fn sleep(&mut self) -> bool {
        self.announced = true;
        self.ring.sleep()
    }

    /// Who takes the answers looks by itself.
    fn attend(&mut self) {
        self.rung |= self.ring.attend() && self.announced;
        self.announced = false;
    }

    /// Hears what the owner was rung for, so that what it watches is not readable for that.
    fn hear(&mut self) {
        if self.announced && self.ring.is_rung() {
            self.rung = true;
        }
        let heard_one = std::mem::take(&mut self.heard_one);
        if std::mem::take(&mut self.rung)
            && !heard_one
            && let Some(bell) = &self.heard
        {
            bell.hear();
        }
    }

    fn are_the_owners(&self) -> bool {
        self.attended || self.heard.is_some()
    }
}

#[derive(Debug)]
pub(crate) struct HostOutboundLink {
    pub(crate) id: u64,
    pub(crate) kind: HostLinkKind,
    /// Both sides take memory files.
    files: bool,
    worker: Arc<WorkerHandle>,
    /// Doorbell of the thread that serves us.
    bell: Option<PeerBell>,
    out: Mutex<OutboundQueues>,
    answers: Option<Mutex<HostCompletionRing>>,
}

impl HostOutboundLink {
    pub(crate) fn new(
        id: u64,
        kind: HostLinkKind,
        worker: Arc<WorkerHandle>,
        local: Option<LocalOutbound>,
    ) -> HostOutboundLink {
        let ring = local.as_ref().map(|local| Producer::new(local.segment.requests()));
        let files = local.as_ref().is_some_and(|local| local.files);
        let (bell, answers) = local
            .map(|LocalOutbound { segment, bell, heard, .. }| {
                let ring = Consumer::new(segment.answers());
                let ring = HostCompletionRing {
                    ring,
                    record: Vec::new(),
                    heard,
                    announced: false,
                    rung: false,
                    heard_one: false,
                    attended: false,
                };
                (bell, Mutex::new(ring))
            })
            .unzip();
        let out = OutboundQueues { ring, ..OutboundQueues::default() };
        HostOutboundLink { id, kind, files, worker, bell, out: Mutex::new(out), answers }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, OutboundQueues> {
        lock(&self.out)
    }

    fn answers(&self) -> Option<MutexGuard<'_, HostCompletionRing>> {
        Some(lock(self.answers.as_ref()?))
    }

    /// Takes answers; true if there were any.
    fn take(
        &self,
        answers: &mut HostCompletionRing,
        heard: &mut Vec<HostLinkEvent>,
    ) -> Result<bool, HostCloseReason> {
        for taken in 0..BURST {
            if !answers.ring.pop(&mut answers.record).map_err(|_| HostCloseReason::Corrupt)? {
                return Ok(taken > 0);
            }
            if answers.ring.made_room() {
                self.ring_peer();
            }
            heard.push(match HostRecord::decode(&answers.record) {
                Some((HostRecord::Done { op, status }, [])) => {
                    if !self.lock().awaited.remove(&op) {
                        return Err(HostCloseReason::Corrupt);
                    }
                    HostLinkEvent::Done { op, status }
                }
                Some((HostRecord::Closed { session }, [])) => {
                    HostLinkEvent::Closed { session, link: self.id }
                }
                _ => return Err(HostCloseReason::Corrupt),
            });
        }
        Ok(true)
    }

    /// Takes answers for the thread, unless the owner looks.
    pub(super) fn poll_completions(
        &self,
        heard: &mut Vec<HostLinkEvent>,
    ) -> Result<bool, HostCloseReason> {
        match self.answers() {
            Some(mut answers) if !answers.are_the_owners() => self.take(&mut answers, heard),
            _ => Ok(false),
        }
    }

    /// Announces that the thread goes to sleep; false if there is an answer that is its to take.
    pub(super) fn sleep(&self) -> bool {
        self.answers().is_none_or(|answers| answers.are_the_owners() || answers.ring.sleep())
    }

    /// Takes answers for the owner, and goes on with what had no room if it is who was rung for
    /// that.
    pub(crate) fn poll_completions_as_owner(&self, heard: &mut Vec<HostLinkEvent>) {
        let Some(mut answers) = self.answers().filter(|answers| answers.are_the_owners()) else {
            return;
        };
        let mut is_broken = self.take(&mut answers, heard).is_err();
        if answers.heard.is_some() {
            match self.flush_ring() {
                // It was rung for the room, too.
                Ok(worked) => answers.rung |= worked,
                Err(_) => is_broken = true,
            }
        }
        if is_broken {
            self.lock().broken = true;
            self.worker.wake();
        }
    }

    /// The owner was rung by the peer, for whatever; it looks for that afterwards.
    pub(crate) fn hear_bell(&self) {
        if let Some(mut answers) = self.answers()
            && let Some(bell) = &answers.heard
        {
            bell.hear();
            // If it was no stray, the next ring is for what comes after.
            answers.heard_one = true;
        }
    }

    /// Announces that the owner goes to sleep; false if there is an answer that is its to take.
    pub(crate) fn sleep_of_owner(&self) -> bool {
        self.answers().is_none_or(|mut answers| {
            answers.heard.is_none() || {
                answers.hear();
                answers.sleep()
            }
        })
    }

    /// The owner looks from now on, or no more; false if there is something to look at.
    pub(crate) fn set_busy_polling(&self, attended: bool) -> bool {
        let Some(mut answers) = self.answers() else { return true };
        answers.attended = attended;
        if attended {
            // A bell of before is for who slept, which leaves the record to us.
            answers.attend();
            return true;
        }
        answers.sleep()
    }

    /// Asks for a session.
    pub(crate) fn open(&self, session: u32, claim: (u32, u64), region: Arc<HostRegion>) {
        let local = HostRegionInfo::of(&region, self.files);
        let message = HostControlMessage::Open { session, region: claim.0, token: claim.1, local };
        self.lock().controls.push_back((message, Some(region)));
        self.worker.wake();
    }

    /// Posts an operation of a kind that the peer answers.
    pub(crate) fn post(
        &self,
        kind: fn(HostOperationPart) -> HostRecord,
        (op, session): (u64, u32),
        region: &Arc<HostRegion>,
        slices: &[CopySlice],
    ) {
        let mut out = self.lock();
        out.awaited.insert(op);
        let mut parts = slices.chunks(PART_MAX).peekable();
        while let Some(part) = parts.next() {
            let mut words = Vec::with_capacity(3 + part.len());
            kind(HostOperationPart { session, op, last: parts.peek().is_none() })
                .encode(&mut words);
            push_slices(part, &mut words);
            let memory = (self.kind == HostLinkKind::Tcp).then(|| (region.clone(), part.to_vec()));
            self.push(&mut out, QueuedRecord { words, memory });
        }
        self.rouse(&out);
    }

    /// Posts a read that our own thread does.
    pub(crate) fn read(&self, job: HostReadJob) {
        self.lock().reads.push_back(job);
        self.worker.wake();
    }

    /// Ends a session at the peer, who answers.
    pub(crate) fn close(&self, session: u32) {
        let mut out = self.lock();
        let words = HostRecord::Close { session }.words();
        self.push(&mut out, QueuedRecord { words, memory: None });
        self.rouse(&out);
    }

    fn push(&self, out: &mut OutboundQueues, record: QueuedRecord) {
        if out.records.is_empty()
            && let Some(ring) = &mut out.ring
        {
            match ring.push(&record.words) {
                Ok(true) => return,
                Ok(false) => {}
                Err(_) => out.broken = true,
            }
        }
        out.records.push_back(record);
    }

    /// Wakes who has to go on with what was pushed.
    fn rouse(&self, out: &OutboundQueues) {
        match (&out.ring, &self.bell) {
            (Some(producer), Some(bell)) => {
                if producer.must_wake() {
                    bell.ring();
                }
                if out.broken {
                    self.worker.wake();
                }
            }
            _ => self.worker.wake(),
        }
    }

    /// Goes on with the records that had no room in the ring; true if there were any.
    pub(super) fn flush_ring(&self) -> Result<bool, HostCloseReason> {
        let mut out = self.lock();
        let out = &mut *out;
        if out.broken {
            return Err(HostCloseReason::Corrupt);
        }
        let Some(producer) = &mut out.ring else { return Ok(false) };
        let mut worked = false;
        while let Some(record) = out.records.front() {
            if !producer.push(&record.words).map_err(|_| HostCloseReason::Corrupt)? {
                break;
            }
            worked = true;
            out.records.pop_front();
        }
        if worked
            && producer.must_wake()
            && let Some(bell) = &self.bell
        {
            bell.ring();
        }
        Ok(worked)
    }

    /// True if the thread of the link has nothing to do for it. Records that wait for room in a
    /// ring are rung for by the peer.
    pub(super) fn is_idle(&self) -> bool {
        let out = self.lock();
        let records = out.ring.is_some() || out.records.is_empty();
        records && out.controls.is_empty() && out.reads.is_empty() && !out.broken
    }

    /// True if there is nothing to do but to send control messages.
    pub(super) fn only_controls(&self) -> bool {
        let out = self.lock();
        out.reads.is_empty() && !out.broken
    }

    /// True if there is nothing in the queues but records.
    pub(super) fn only_records(&self) -> bool {
        let out = self.lock();
        out.controls.is_empty() && out.reads.is_empty()
    }

    /// Wakes the peer's thread.
    pub(super) fn ring_peer(&self) {
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }
}

impl HostRegionInfo {
    /// What a peer is told of a region, whose memory file it gets if both sides take files.
    pub(crate) fn of(region: &HostRegion, files: bool) -> HostRegionInfo {
        let process = match &region.reach {
            HostMemoryAccess::There { process, .. } => Some((process.pid, process.started)),
            HostMemoryAccess::Here { .. } => None,
        };
        let file = files && region.file.is_some();
        HostRegionInfo { base: region.reach.base(), len: region.len, process, file }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    #[test]
    fn a_ring_that_comes_late_costs_no_other_one() {
        let (segment, _file) = ShmSegment::create().unwrap();
        let (heard, rung) = HeardBell::pair().unwrap();
        let watched = heard.fd().try_clone_to_owned().unwrap();
        let (bell, peer) = (PeerBell::new(rung).unwrap(), Producer::new(segment.answers()));
        let local = LocalOutbound { segment, bell: bell.clone(), heard: Some(heard), files: false };
        let worker = Arc::new(WorkerHandle::new().unwrap());
        let link = HostOutboundLink::new(1, HostLinkKind::Local, worker, Some(local));
        assert!(link.sleep_of_owner() && peer.must_wake());
        // The peer has said that it rings, and not yet rung.
        assert!(link.sleep_of_owner());
        bell.ring();
        link.hear_bell();
        assert!(link.sleep_of_owner() && peer.must_wake());
        bell.ring();
        assert!(link.sleep_of_owner());
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let readable = poll(&mut [PollFd::new(&watched, PollFlags::IN)], Some(&now)).unwrap();
        assert_eq!(readable, 0, "it was heard");
    }
}
