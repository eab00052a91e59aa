//! The side of a TCP link that initiates: it sends what it pushes, and places what it reads.

use super::out::{Out, OutLink, Outgoing, Read};
use super::stream::{Frame, Landing, Sent, Stream, pack, pack_control, unpack_control};
use super::{End, Station};
use crate::config::Path;
use crate::copy::{Cursor, Slice};
use crate::hub::{Lane, Notice};
use crate::memory::Region;
use crate::proto::{Control, Part, Record, Status};
use crate::worker::Cx;
use engine::fabric::SessionId;
use rustix::event::epoll::EventFlags;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Records that are taken from the owner's queue ahead of the socket.
const AHEAD: usize = 16;

/// Records taken in one step.
const BURST: usize = 64;

/// A part of a read that was asked for.
struct Asked {
    part: Part,
    region: Option<Arc<Region>>,
    slices: Vec<Slice>,
}

/// The initiating side.
pub(super) struct TcpOut {
    stream: Stream,
    /// The peer may say more than this plane knows.
    later: bool,
    link: Arc<OutLink>,
    opening: BTreeSet<u32>,
    /// Parts of reads in the order of their answers.
    asked: VecDeque<Asked>,
    landing: Option<(Part, Landing)>,
    /// What we know of operations that the peer does not.
    failed: BTreeMap<u64, Status>,
    sent: Vec<Sent>,
}

impl TcpOut {
    pub(super) fn new(socket: OwnedFd, link: Arc<OutLink>, later: bool) -> TcpOut {
        TcpOut {
            stream: Stream::new(socket),
            later,
            link,
            opening: BTreeSet::new(),
            asked: VecDeque::new(),
            landing: None,
            failed: BTreeMap::new(),
            sent: Vec::new(),
        }
    }

    /// Takes over what the owner posted.
    fn load(&mut self, cx: &Cx) -> bool {
        let link = self.link.clone();
        let mut out = link.lock();
        let Out { controls, reads, records, .. } = &mut *out;
        let mut worked = false;
        for (message, _) in controls.drain(..) {
            if let Control::Open { session, .. } = message {
                self.opening.insert(session);
            }
            self.stream.queue(Frame::plain(pack_control(&message)));
            worked = true;
        }
        for read in reads.drain(..) {
            // Reads of a session on this host do not come by this link.
            let Read::Barrier { session } = read else { continue };
            let asked = self.asked.iter_mut().filter(|asked| asked.part.session == session);
            asked.for_each(|asked| asked.region = None);
            if let Some((part, landing)) = &mut self.landing
                && part.session == session
            {
                landing.region = None;
            }
            // Those that the peer was not asked for yet.
            for record in records.iter_mut() {
                if let Some((Record::Read(part), _)) = Record::decode(&record.words)
                    && part.session == session
                {
                    record.memory = None;
                }
            }
            let session = SessionId(session);
            cx.hub.notify(Notice::Closed { session, local: true });
            worked = true;
        }
        while self.stream.queued() < AHEAD
            && let Some(Outgoing { words, memory }) = records.pop_front()
        {
            worked = true;
            let head = pack(&words);
            self.stream.queue(match Record::decode(&words) {
                Some((Record::Write(part), _)) => Frame::part(head, (part.op, part.last), memory),
                Some((Record::Read(part), _)) => {
                    let (region, slices) = memory.unzip();
                    let slices = slices.unwrap_or_default();
                    self.asked.push_back(Asked { part, region, slices });
                    Frame::plain(head)
                }
                _ => Frame::plain(head),
            });
        }
        worked
    }

    fn take(&mut self, cx: &mut Cx) -> Result<bool, End> {
        if !self.stream.record(&mut cx.record)? {
            return Ok(false);
        }
        let (record, rest) = Record::decode(&cx.record).ok_or(End::Corrupt)?;
        match record {
            Record::Done { op, status } => {
                if !self.link.lock().awaited.remove(&op) {
                    return Err(End::Corrupt);
                }
                let known = self.failed.remove(&op);
                let status = if status == Status::Done { known.unwrap_or(status) } else { status };
                cx.complete(op, status);
            }
            Record::Bytes { op, status } => {
                let Asked { part, region, slices } =
                    self.asked.pop_front().filter(|a| a.part.op == op).ok_or(End::Corrupt)?;
                if status == Status::Done {
                    let left = slices.iter().map(|slice| slice.len).sum();
                    let cursor = Cursor::default();
                    self.landing = Some((part, Landing { region, slices, cursor, left }));
                } else {
                    self.failed.insert(op, Status::Refused);
                }
            }
            Record::Closed { session } => {
                let session = SessionId(session);
                cx.hub.notify(Notice::Closed { session, local: false });
            }
            Record::Control { bytes } => {
                let (session, result) = match unpack_control(bytes, rest, self.later) {
                    Some(Control::Opened { session, result }) => (session, result),
                    Some(Control::Unknown) => return Ok(true),
                    _ => return Err(End::Corrupt),
                };
                if !self.opening.remove(&session) {
                    return Err(End::Corrupt);
                }
                let lane = Lane { write: Path::Tcp, read: Path::Tcp, source: None };
                let (session, link) = (SessionId(session), self.link.id);
                let result = result.map(|_| lane);
                cx.hub.notify(Notice::Opened { session, link, result });
            }
            _ => return Err(End::Corrupt),
        }
        Ok(true)
    }

    fn land(&mut self, cx: &mut Cx) -> Result<bool, End> {
        let Some((part, landing)) = &mut self.landing else { return Ok(false) };
        let region = landing.region.clone();
        let held = region.as_ref().and_then(|region| region.hold());
        let mut failed = held.is_none();
        if failed {
            landing.region = None;
        }
        let moved = landing.left == 0 || self.stream.land(landing, cx, &mut failed)?;
        if failed {
            self.failed.insert(part.op, Status::Destination);
        }
        if landing.left == 0 {
            self.landing = None;
        }
        Ok(moved)
    }
}

impl std::fmt::Debug for TcpOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpOut").field("link", &self.link).finish_non_exhaustive()
    }
}

impl Station for TcpOut {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.stream.fds()
    }

    fn ready(&mut self, _index: usize) {
        self.stream.ready();
    }

    fn step(&mut self, cx: &mut Cx) -> Result<bool, End> {
        let mut worked = !self.link.is_idle() && self.load(cx);
        let mut sent = std::mem::take(&mut self.sent);
        worked |= self.stream.send(cx, &mut sent)?;
        for Sent { op, failed, .. } in sent.drain(..) {
            if failed {
                self.failed.insert(op, Status::Source);
            }
        }
        self.sent = sent;
        for _ in 0..BURST {
            let one = if self.landing.is_some() { self.land(cx)? } else { self.take(cx)? };
            worked |= one;
            if !one {
                break;
            }
        }
        Ok(worked)
    }

    fn is_by_socket(&self) -> bool {
        true
    }

    fn doze(&mut self) -> bool {
        // With a full queue the socket is what is waited for.
        let idle =
            self.link.is_idle() || (self.link.only_records() && self.stream.queued() >= AHEAD);
        idle && self.stream.is_idle()
    }

    fn end(self: Box<Self>, cx: &mut Cx, why: End) {
        if why == End::Corrupt {
            cx.hub.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        }
        let proven = why == End::Closed;
        cx.hub.notify(Notice::LinkDown { link: self.link.id, proven });
    }
}
