//! The side of a TCP link that serves: it places what the peer pushes, and sends what it reads.

use super::stream::{
    RecordStream, ScatterReceive, SentPart, TcpFrame, pack, pack_control, unpack_control,
};
use super::{HostCloseReason, HostInboundLink, HostLinkDriver};
use crate::config::DataPath;
use crate::copy::{CopySlice, SliceCursor};
use crate::memory::HostRegion;
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, HostRegionInfo,
    SessionDenial, bytes_inside, take_slices,
};
use crate::worker::WorkerContext;
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

struct TcpTargetSession {
    region: Arc<HostRegion>,
    peer_len: u64,
}

/// The serving side.
pub(super) struct TcpTarget {
    stream: RecordStream,
    /// The peer may say more than this plane knows.
    later: bool,
    inbound: Arc<HostInboundLink>,
    sessions: BTreeMap<u32, TcpTargetSession>,
    work: Option<(HostOperationPart, ScatterReceive)>,
    /// How the write goes whose parts are coming in, and its bytes so far.
    running: (HostCopyStatus, u64),
    /// A part of the read that is being sent was refused or failed.
    reading: HostCopyStatus,
    sent: Vec<SentPart>,
}

impl TcpTarget {
    pub(super) fn new(socket: OwnedFd, inbound: Arc<HostInboundLink>, later: bool) -> TcpTarget {
        TcpTarget {
            stream: RecordStream::new(socket),
            later,
            inbound,
            sessions: BTreeMap::new(),
            work: None,
            running: (HostCopyStatus::Done, 0),
            reading: HostCopyStatus::Done,
            sent: Vec::new(),
        }
    }

    fn answer(&mut self, record: HostRecord) {
        let mut words = Vec::new();
        record.encode(&mut words);
        self.stream.queue(TcpFrame::plain(pack(&words)));
    }

    fn open(
        &mut self,
        cx: &WorkerContext,
        session: u32,
        (region, token): (u32, u64),
        local: &HostRegionInfo,
    ) -> Result<(DataPath, HostRegionInfo, u32), SessionDenial> {
        let deny = |why: &str| SessionDenial { why: why.into(), tcp: false };
        if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(&session) {
            return Err(deny("session in use, or too many of them"));
        }
        let (region, place) =
            cx.hub.region(region, token).ok_or_else(|| deny("the region is not registered"))?;
        let side = HostRegionInfo::of(&region, false);
        self.sessions.insert(session, TcpTargetSession { region, peer_len: local.len });
        Ok((DataPath::Tcp, side, place))
    }

    fn take(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if self.stream.queued() >= ANSWERS_MAX || !self.stream.record(&mut cx.record)? {
            return Ok(false);
        }
        let (record, rest) = HostRecord::decode(&cx.record).ok_or(HostCloseReason::Corrupt)?;
        let mut slices = Vec::new();
        match record {
            HostRecord::Write(part) => {
                if !take_slices(rest, &mut slices) {
                    return Err(HostCloseReason::Corrupt);
                }
                self.expect(part, slices)?;
            }
            HostRecord::Read(part) => {
                if !take_slices(rest, &mut slices) {
                    return Err(HostCloseReason::Corrupt);
                }
                self.fetch(part, slices)?;
            }
            HostRecord::Close { session } => {
                self.sessions.remove(&session);
                self.answer(HostRecord::Closed { session });
            }
            HostRecord::Control { bytes } => match unpack_control(bytes, rest, self.later) {
                Some(HostControlMessage::Open { session, region, token, local }) => {
                    let result = self.open(cx, session, (region, token), &local);
                    let answer = HostControlMessage::Opened { session, result };
                    self.stream.queue(TcpFrame::plain(pack_control(&answer)));
                }
                Some(HostControlMessage::Unknown) => {}
                _ => return Err(HostCloseReason::Corrupt),
            },
            _ => return Err(HostCloseReason::Corrupt),
        }
        Ok(true)
    }

    /// Bytes of a write follow.
    fn expect(
        &mut self,
        part: HostOperationPart,
        slices: Vec<CopySlice>,
    ) -> Result<(), HostCloseReason> {
        let session = self.sessions.get(&part.session);
        let (from, to) = session.map_or((u64::MAX, u64::MAX), |s| (s.peer_len, s.region.len));
        let left = bytes_inside(&slices, from, to).ok_or(HostCloseReason::Corrupt)?;
        let region = session.map(|session| session.region.clone());
        if region.is_none() && self.running.0 == HostCopyStatus::Done {
            self.running.0 = HostCopyStatus::Refused;
        }
        self.running.1 = self.running.1.saturating_add(left);
        self.work =
            Some((part, ScatterReceive { region, slices, cursor: SliceCursor::default(), left }));
        Ok(())
    }

    /// The peer asks for bytes.
    fn fetch(
        &mut self,
        part: HostOperationPart,
        slices: Vec<CopySlice>,
    ) -> Result<(), HostCloseReason> {
        let session = self.sessions.get(&part.session);
        let memory = match session {
            Some(s) => {
                bytes_inside(&slices, s.region.len, s.peer_len).ok_or(HostCloseReason::Corrupt)?;
                let alive = s.region.hold().is_some();
                alive.then(|| (s.region.clone(), slices))
            }
            None => None,
        };
        let status = if memory.is_some() { HostCopyStatus::Done } else { HostCopyStatus::Refused };
        let mut words = Vec::new();
        HostRecord::Bytes { op: part.op, status }.encode(&mut words);
        self.stream.queue(TcpFrame::part(pack(&words), (part.op, part.last), memory));
        Ok(())
    }

    fn land(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let Some((part, landing)) = &mut self.work else { return Ok(false) };
        let part = *part;
        if landing.left > 0 {
            let Some(_in) = self.inbound.hold() else { return Err(HostCloseReason::LocallyClosed) };
            let region = landing.region.clone();
            let held = region.as_ref().and_then(|region| region.hold());
            if held.is_none() && region.is_some() {
                landing.region = None;
                self.running.0 = HostCopyStatus::Refused;
            }
            let mut failed = false;
            let moved = self.stream.land(landing, cx, &mut failed)?;
            if failed {
                self.running.0 = HostCopyStatus::Destination;
            }
            if !moved || landing.left > 0 {
                return Ok(moved);
            }
        }
        self.work = None;
        if part.last {
            let (status, bytes) = std::mem::replace(&mut self.running, (HostCopyStatus::Done, 0));
            if status == HostCopyStatus::Done {
                cx.hub.counts.served[DataPath::Tcp as usize].add(bytes);
            }
            self.answer(HostRecord::Done { op: part.op, status });
        }
        Ok(true)
    }
}

impl std::fmt::Debug for TcpTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpTarget").field("inbound", &self.inbound).finish_non_exhaustive()
    }
}

impl HostLinkDriver for TcpTarget {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.stream.fds()
    }

    fn ready(&mut self, _index: usize) {
        self.stream.ready();
    }

    fn step(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if self.inbound.is_shut() {
            return Err(HostCloseReason::LocallyClosed);
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
        for SentPart { op, last, failed } in sent.drain(..) {
            if failed {
                self.reading = HostCopyStatus::Source;
            }
            if last {
                let status = std::mem::replace(&mut self.reading, HostCopyStatus::Done);
                self.answer(HostRecord::Done { op, status });
            }
        }
        self.sent = sent;
        Ok(worked)
    }

    fn is_by_socket(&self) -> bool {
        true
    }

    fn prepare_sleep(&mut self) -> bool {
        let stuck = self.stream.queued() >= ANSWERS_MAX && self.stream.is_stuck();
        (self.stream.is_idle() || stuck) && !self.inbound.is_shut()
    }

    fn end(self: Box<Self>, cx: &mut WorkerContext, why: HostCloseReason) {
        cx.hub.dismiss(self.inbound.id);
        if why == HostCloseReason::Corrupt {
            cx.hub.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        }
        self.inbound.shut();
    }
}
