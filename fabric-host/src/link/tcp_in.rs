//! The side of a TCP link that serves: it places what the peer pushes, and sends what it reads.

use super::stream::{Frame, Landing, Sent, Stream, pack, pack_control, unpack_control};
use super::{End, Inbound, Station};
use crate::config::Path;
use crate::copy::{Cursor, Slice};
use crate::memory::Region;
use crate::proto::{Control, Denial, Part, Record, Side, Status, bytes_inside, take_slices};
use crate::worker::Cx;
use rustix::event::epoll::EventFlags;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Sessions that one peer may have open.
const SESSIONS_MAX: usize = 16_384;

/// Answers that wait for the socket before requests are left where they are.
const ANSWERS_MAX: usize = 1_024;

/// Records taken in one step.
const BURST: usize = 64;

struct Session {
    region: Arc<Region>,
    peer_len: u64,
}

/// The serving side.
pub(super) struct TcpIn {
    stream: Stream,
    /// The peer may say more than this plane knows.
    later: bool,
    inbound: Arc<Inbound>,
    sessions: BTreeMap<u32, Session>,
    work: Option<(Part, Landing)>,
    /// How the write goes whose parts are coming in, and its bytes so far.
    running: (Status, u64),
    /// A part of the read that is being sent was refused or failed.
    reading: Status,
    sent: Vec<Sent>,
}

impl TcpIn {
    pub(super) fn new(socket: OwnedFd, inbound: Arc<Inbound>, later: bool) -> TcpIn {
        TcpIn {
            stream: Stream::new(socket),
            later,
            inbound,
            sessions: BTreeMap::new(),
            work: None,
            running: (Status::Done, 0),
            reading: Status::Done,
            sent: Vec::new(),
        }
    }

    fn answer(&mut self, record: Record) {
        let mut words = Vec::new();
        record.encode(&mut words);
        self.stream.queue(Frame::plain(pack(&words)));
    }

    fn open(
        &mut self,
        cx: &Cx,
        session: u32,
        (region, token): (u32, u64),
        local: &Side,
    ) -> Result<(Path, Side, u32), Denial> {
        let deny = |why: &str| Denial { why: why.into(), tcp: false };
        if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(&session) {
            return Err(deny("session in use, or too many of them"));
        }
        let (region, place) =
            cx.hub.region(region, token).ok_or_else(|| deny("the region is not registered"))?;
        let side = Side::of(&region, false);
        self.sessions.insert(session, Session { region, peer_len: local.len });
        Ok((Path::Tcp, side, place))
    }

    fn take(&mut self, cx: &mut Cx) -> Result<bool, End> {
        if self.stream.queued() >= ANSWERS_MAX || !self.stream.record(&mut cx.record)? {
            return Ok(false);
        }
        let (record, rest) = Record::decode(&cx.record).ok_or(End::Corrupt)?;
        let mut slices = Vec::new();
        match record {
            Record::Write(part) => {
                if !take_slices(rest, &mut slices) {
                    return Err(End::Corrupt);
                }
                self.expect(part, slices)?;
            }
            Record::Read(part) => {
                if !take_slices(rest, &mut slices) {
                    return Err(End::Corrupt);
                }
                self.fetch(part, slices)?;
            }
            Record::Close { session } => {
                self.sessions.remove(&session);
                self.answer(Record::Closed { session });
            }
            Record::Control { bytes } => match unpack_control(bytes, rest, self.later) {
                Some(Control::Open { session, region, token, local }) => {
                    let result = self.open(cx, session, (region, token), &local);
                    let answer = Control::Opened { session, result };
                    self.stream.queue(Frame::plain(pack_control(&answer)));
                }
                Some(Control::Unknown) => {}
                _ => return Err(End::Corrupt),
            },
            _ => return Err(End::Corrupt),
        }
        Ok(true)
    }

    /// Bytes of a write follow.
    fn expect(&mut self, part: Part, slices: Vec<Slice>) -> Result<(), End> {
        let session = self.sessions.get(&part.session);
        let (from, to) = session.map_or((u64::MAX, u64::MAX), |s| (s.peer_len, s.region.len));
        let left = bytes_inside(&slices, from, to).ok_or(End::Corrupt)?;
        let region = session.map(|session| session.region.clone());
        if region.is_none() && self.running.0 == Status::Done {
            self.running.0 = Status::Refused;
        }
        self.running.1 = self.running.1.saturating_add(left);
        self.work = Some((part, Landing { region, slices, cursor: Cursor::default(), left }));
        Ok(())
    }

    /// The peer asks for bytes.
    fn fetch(&mut self, part: Part, slices: Vec<Slice>) -> Result<(), End> {
        let session = self.sessions.get(&part.session);
        let memory = match session {
            Some(s) => {
                bytes_inside(&slices, s.region.len, s.peer_len).ok_or(End::Corrupt)?;
                let alive = s.region.hold().is_some();
                alive.then(|| (s.region.clone(), slices))
            }
            None => None,
        };
        let status = if memory.is_some() { Status::Done } else { Status::Refused };
        let mut words = Vec::new();
        Record::Bytes { op: part.op, status }.encode(&mut words);
        self.stream.queue(Frame::part(pack(&words), (part.op, part.last), memory));
        Ok(())
    }

    fn land(&mut self, cx: &mut Cx) -> Result<bool, End> {
        let Some((part, landing)) = &mut self.work else { return Ok(false) };
        let part = *part;
        if landing.left > 0 {
            let Some(_in) = self.inbound.hold() else { return Err(End::Ours) };
            let region = landing.region.clone();
            let held = region.as_ref().and_then(|region| region.hold());
            if held.is_none() && region.is_some() {
                landing.region = None;
                self.running.0 = Status::Refused;
            }
            let mut failed = false;
            let moved = self.stream.land(landing, cx, &mut failed)?;
            if failed {
                self.running.0 = Status::Destination;
            }
            if !moved || landing.left > 0 {
                return Ok(moved);
            }
        }
        self.work = None;
        if part.last {
            let (status, bytes) = std::mem::replace(&mut self.running, (Status::Done, 0));
            if status == Status::Done {
                cx.hub.counts.served[Path::Tcp as usize].add(bytes);
            }
            self.answer(Record::Done { op: part.op, status });
        }
        Ok(true)
    }
}

impl std::fmt::Debug for TcpIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpIn").field("inbound", &self.inbound).finish_non_exhaustive()
    }
}

impl Station for TcpIn {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.stream.fds()
    }

    fn ready(&mut self, _index: usize) {
        self.stream.ready();
    }

    fn step(&mut self, cx: &mut Cx) -> Result<bool, End> {
        if self.inbound.is_shut() {
            return Err(End::Ours);
        }
        let mut worked = false;
        for _ in 0..BURST {
            let one = if self.work.is_some() { self.land(cx)? } else { self.take(cx)? };
            worked |= one;
            if !one {
                break;
            }
        }
        let mut sent = std::mem::take(&mut self.sent);
        worked |= self.stream.send(cx, &mut sent)?;
        for Sent { op, last, failed } in sent.drain(..) {
            if failed {
                self.reading = Status::Source;
            }
            if last {
                let status = std::mem::replace(&mut self.reading, Status::Done);
                self.answer(Record::Done { op, status });
            }
        }
        self.sent = sent;
        Ok(worked)
    }

    fn is_by_socket(&self) -> bool {
        true
    }

    fn doze(&mut self) -> bool {
        let stuck = self.stream.queued() >= ANSWERS_MAX && self.stream.is_stuck();
        (self.stream.is_idle() || stuck) && !self.inbound.is_shut()
    }

    fn end(self: Box<Self>, cx: &mut Cx, why: End) {
        cx.hub.dismiss(self.inbound.id);
        if why == End::Corrupt {
            cx.hub.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        }
        self.inbound.shut();
    }
}
