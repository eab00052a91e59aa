//! A link that this plane dialled, for its owner: what is to be done goes into a queue of the link,
//! or straight into the ring that the peer reads.

use super::segment::{RingWords, Segment};
use super::{End, Kind};
use crate::copy::{Fault, Scratch, Slice, copy};
use crate::memory::{Map, Reach, Region};
use crate::proto::{Control, PART_MAX, Part, Record, Side, Status, push_slices};
use crate::ring::{Consumer, Producer};
use crate::sync::{Ordering as RingOrdering, lock};
use crate::worker::{WorkerHandle, ring};
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The remote region of a session on this host, for reading.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) reach: Reach,
    /// Bytes that `reach` covers.
    pub(crate) len: u64,
    pub(crate) token: u64,
    pub(crate) place: usize,
    pub(crate) roll: Arc<Map>,
    pub(crate) segment: Segment,
    /// Set when the session is closed.
    pub(crate) cancelled: AtomicBool,
}

impl Source {
    /// True as long as the peer lets us in and the region is registered there.
    pub(crate) fn is_permitted(&self) -> bool {
        let lives = self.roll.words()[self.place].load(RingOrdering::SeqCst) == self.token;
        lives && self.segment.is_open()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Copies ranges, at most a chunk, of an operation of so many bytes into a region of ours.
    pub(crate) fn read(
        &self,
        chunk: (&[Slice], u64),
        into: &Region,
        scratch: &mut Scratch,
    ) -> Status {
        if self.is_cancelled() || !self.is_permitted() {
            return Status::Refused;
        }
        let Some(_registered) = into.hold() else { return Status::Destination };
        match copy(chunk, &self.reach, &into.reach, scratch) {
            Err(Fault::Source) => Status::Source,
            Err(Fault::Destination) => Status::Destination,
            // What was read of a region that is gone may be anything.
            Ok(()) if !self.is_permitted() => Status::Source,
            Ok(()) => Status::Done,
        }
    }
}

/// What the thread of a local link does itself.
#[derive(Debug)]
pub(crate) enum Read {
    /// Copies into a region of ours.
    Copy { op: u64, source: Arc<Source>, region: Arc<Region>, slices: Vec<Slice>, bytes: u64 },
    /// Says that all reads of a session that came ahead of it are over.
    Barrier { session: u32 },
}

/// Queues of a link. Operations in flight bound them all.
#[derive(Debug)]
pub(crate) struct Out {
    /// Where records go at once if there is room; the rest waits in `records`.
    pub(super) ring: Option<Producer<RingWords>>,
    pub(super) records: VecDeque<Outgoing>,
    pub(super) controls: VecDeque<(Control, Option<Arc<Region>>)>,
    pub(super) reads: VecDeque<Read>,
    /// Operations that the peer will answer.
    pub(super) awaited: BTreeSet<u64>,
    /// The peer broke the ring.
    pub(super) broken: bool,
}

/// A record, and by TCP the memory that it goes from or to.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(super) words: Vec<u64>,
    /// Where a write or read by TCP has its bytes on this side.
    pub(super) memory: Option<(Arc<Region>, Vec<Slice>)>,
}

/// What a peer answers by its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Done { op: u64, status: Status },
    Closed { session: u32 },
}

/// Answers taken at a time.
const BURST: usize = 64;

/// Whom the peer rings for its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeardBy {
    /// Our thread, who tells the owner.
    Thread,
    /// The owner, by the descriptor that it watches.
    Owner,
}

/// The ring of answers. The owner looks itself while it waits, so that an answer takes no way round
/// by our thread; else who is rung does.
#[derive(Debug)]
struct Answers {
    ring: Consumer<RingWords>,
    record: Vec<u64>,
    heard_by: HeardBy,
    /// The owner looks.
    attended: bool,
}

impl Answers {
    fn are_the_owners(&self) -> bool {
        self.attended || self.heard_by == HeardBy::Owner
    }
}

/// The link.
#[derive(Debug)]
pub(crate) struct OutLink {
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    worker: Arc<WorkerHandle>,
    /// Doorbell of the thread that serves us.
    bell: Option<OwnedFd>,
    out: Mutex<Out>,
    answers: Option<Mutex<Answers>>,
}

impl OutLink {
    pub(crate) fn new(
        id: u64,
        kind: Kind,
        worker: Arc<WorkerHandle>,
        local: Option<(&Segment, OwnedFd, HeardBy)>,
    ) -> OutLink {
        let ring = local.as_ref().map(|(segment, ..)| Producer::new(segment.requests()));
        let answers = local.as_ref().map(|&(segment, _, heard_by)| {
            let ring = Consumer::new(segment.answers());
            Mutex::new(Answers { ring, record: Vec::new(), heard_by, attended: false })
        });
        let bell = local.map(|(_, bell, _)| bell);
        let out = Out {
            ring,
            records: VecDeque::new(),
            controls: VecDeque::new(),
            reads: VecDeque::new(),
            awaited: BTreeSet::new(),
            broken: false,
        };
        OutLink { id, kind, worker, bell, out: Mutex::new(out), answers }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Out> {
        lock(&self.out)
    }

    fn answers(&self) -> Option<MutexGuard<'_, Answers>> {
        Some(lock(self.answers.as_ref()?))
    }

    /// Takes answers; true if there were any.
    fn take(&self, answers: &mut Answers, heard: &mut Vec<Heard>) -> Result<bool, End> {
        for taken in 0..BURST {
            if !answers.ring.pop(&mut answers.record).map_err(|_| End::Corrupt)? {
                return Ok(taken > 0);
            }
            if answers.ring.made_room() {
                self.ring_peer();
            }
            heard.push(match Record::decode(&answers.record) {
                Some((Record::Done { op, status }, [])) => {
                    if !self.lock().awaited.remove(&op) {
                        return Err(End::Corrupt);
                    }
                    Heard::Done { op, status }
                }
                Some((Record::Closed { session }, [])) => Heard::Closed { session },
                _ => return Err(End::Corrupt),
            });
        }
        Ok(true)
    }

    /// Takes answers for the thread, unless the owner looks.
    pub(super) fn hear(&self, heard: &mut Vec<Heard>) -> Result<bool, End> {
        match self.answers() {
            Some(mut answers) if !answers.are_the_owners() => self.take(&mut answers, heard),
            _ => Ok(false),
        }
    }

    /// Announces that the thread goes to sleep; false if there is an answer that is its to take.
    pub(super) fn sleep(&self) -> bool {
        self.answers().is_none_or(|answers| answers.are_the_owners() || answers.ring.sleep())
    }

    /// Takes answers for the owner, and goes on with what had no room if it is who was rung for that.
    pub(crate) fn look(&self, heard: &mut Vec<Heard>) {
        let Some(mut answers) = self.answers().filter(|answers| answers.are_the_owners()) else {
            return;
        };
        let rung = answers.heard_by == HeardBy::Owner;
        if self.take(&mut answers, heard).is_err() || rung && self.flush_ring().is_err() {
            self.lock().broken = true;
            self.worker.wake();
        }
    }

    /// Announces that the owner goes to sleep; false if there is an answer that is its to take.
    pub(crate) fn sleep_of_owner(&self) -> bool {
        self.answers()
            .is_none_or(|answers| answers.heard_by == HeardBy::Thread || answers.ring.sleep())
    }

    /// The owner looks from now on, or no more; false if there is something to look at.
    pub(crate) fn attend(&self, attended: bool) -> bool {
        let Some(mut answers) = self.answers() else { return true };
        answers.attended = attended;
        if attended {
            // A bell of before is for the thread, which leaves the record to us.
            let _rung = answers.ring.attend();
            return true;
        }
        answers.ring.sleep()
    }

    /// Asks for a session.
    pub(crate) fn open(&self, session: u32, claim: (u32, u64), region: Arc<Region>) {
        let local = Side::of(&region, self.kind == Kind::Local);
        let message = Control::Open { session, region: claim.0, token: claim.1, local };
        self.lock().controls.push_back((message, Some(region)));
        self.worker.wake();
    }

    /// Posts a write.
    pub(crate) fn write(&self, op: u64, session: u32, region: &Arc<Region>, slices: &[Slice]) {
        let mut out = self.lock();
        out.awaited.insert(op);
        self.parts(&mut out, Record::Write, (op, session), region, slices);
    }

    /// Posts a read that the peer answers.
    pub(crate) fn fetch(&self, op: u64, session: u32, region: &Arc<Region>, slices: &[Slice]) {
        let mut out = self.lock();
        out.awaited.insert(op);
        self.parts(&mut out, Record::Read, (op, session), region, slices);
    }

    fn parts(
        &self,
        out: &mut Out,
        kind: fn(Part) -> Record,
        (op, session): (u64, u32),
        region: &Arc<Region>,
        slices: &[Slice],
    ) {
        let mut parts = slices.chunks(PART_MAX).peekable();
        while let Some(part) = parts.next() {
            let mut words = Vec::with_capacity(3 + part.len());
            kind(Part { session, op, last: parts.peek().is_none() }).encode(&mut words);
            push_slices(part, &mut words);
            let memory = (self.kind == Kind::Tcp).then(|| (region.clone(), part.to_vec()));
            self.push(out, Outgoing { words, memory });
        }
        self.rouse(out);
    }

    /// Posts a read that our own thread does.
    pub(crate) fn read(&self, job: Read) {
        self.lock().reads.push_back(job);
        self.worker.wake();
    }

    /// Ends a session at the peer, who answers.
    pub(crate) fn close(&self, session: u32) {
        let mut out = self.lock();
        let mut words = Vec::new();
        Record::Close { session }.encode(&mut words);
        self.push(&mut out, Outgoing { words, memory: None });
        self.rouse(&mut out);
    }

    fn push(&self, out: &mut Out, record: Outgoing) {
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
    fn rouse(&self, out: &mut Out) {
        match (&out.ring, &self.bell) {
            (Some(producer), Some(bell)) => {
                if producer.must_wake() {
                    ring(bell.as_fd());
                }
                if out.broken {
                    self.worker.wake();
                }
            }
            _ => self.worker.wake(),
        }
    }

    /// Goes on with the records that had no room in the ring; true if there were any.
    pub(super) fn flush_ring(&self) -> Result<bool, End> {
        let mut out = self.lock();
        let out = &mut *out;
        if out.broken {
            return Err(End::Corrupt);
        }
        let Some(producer) = &mut out.ring else { return Ok(false) };
        let mut worked = false;
        while let Some(record) = out.records.front() {
            if !producer.push(&record.words).map_err(|_| End::Corrupt)? {
                break;
            }
            worked = true;
            out.records.pop_front();
        }
        if worked
            && producer.must_wake()
            && let Some(bell) = &self.bell
        {
            ring(bell.as_fd());
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
            ring(bell.as_fd());
        }
    }
}

impl Side {
    /// What a peer is told of a region.
    pub(crate) fn of(region: &Region, local: bool) -> Side {
        let process = match &region.reach {
            Reach::There { process, .. } => Some((process.pid, process.started)),
            Reach::Here { .. } => None,
        };
        let file = local && region.file.is_some();
        Side { base: region.reach.base(), len: region.len, process, file }
    }
}
