//! The side of a TCP link that serves: it places what the peer pushes, and sends what it reads.

use super::HostInboundLink;
use super::stream::{
    RecordStream, ScatterReceive, SentPart, TcpFrame, pack, pack_control, unpack_control,
};
use super::target::{ANSWERS_MAX, TargetState};
use super::tcp_socket::TcpLinkSocket;
use crate::config::DataPath;
use crate::copy::{CopySlice, SliceCursor};
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, bytes_inside, take_slices,
};
use crate::shared::{HostCloseReason, HostLinkDriver, WorkerContext};
use rustix::event::epoll::EventFlags;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Records taken in one step.
const BURST: usize = 64;

#[derive(Debug)]
pub(super) struct TcpTarget {
    stream: RecordStream,
    /// The peer may say more than this plane knows.
    later: bool,
    state: TargetState,
    work: Option<(HostOperationPart, ScatterReceive)>,
    /// A part of the read that is being sent was refused or failed.
    reading: HostCopyStatus,
    sent: Vec<SentPart>,
}

impl TcpTarget {
    pub(super) fn new(
        socket: TcpLinkSocket,
        inbound: Arc<HostInboundLink>,
        later: bool,
    ) -> TcpTarget {
        TcpTarget {
            stream: RecordStream::new(socket),
            later,
            state: TargetState::new(inbound),
            work: None,
            reading: HostCopyStatus::Done,
            sent: Vec::new(),
        }
    }

    fn answer(&mut self, record: HostRecord) {
        self.stream.queue(TcpFrame::plain(pack(&record.words())));
    }

    fn take(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if self.stream.queued() >= ANSWERS_MAX || !self.stream.record(&mut cx.record)? {
            return Ok(false);
        }
        let (record, rest) = HostRecord::decode(&cx.record).ok_or(HostCloseReason::Corrupt)?;
        match record {
            HostRecord::Write(part) | HostRecord::Read(part) => {
                let mut slices = Vec::new();
                if !take_slices(rest, &mut slices) {
                    return Err(HostCloseReason::Corrupt);
                }
                match record {
                    HostRecord::Write(_) => self.expect(part, slices)?,
                    _ => self.fetch(part, slices)?,
                }
            }
            HostRecord::Close { session } => {
                self.state.sessions.remove(&session);
                self.answer(HostRecord::Closed { session });
            }
            HostRecord::Control { bytes } => match unpack_control(bytes, rest, self.later) {
                Some(HostControlMessage::Open { session, region, token, local }) => {
                    let by_tcp = |_: &_| Ok((DataPath::Tcp, None));
                    let (answer, _) =
                        self.state.open(cx, session, (region, token), (&local, false), by_tcp);
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
        let session = self.state.sessions.get(&part.session);
        let (from, to) = session.map_or((u64::MAX, u64::MAX), |s| (s.peer_len, s.region.len));
        let left = bytes_inside(&slices, from, to).ok_or(HostCloseReason::Corrupt)?;
        let region = session.map(|session| session.region.clone());
        if region.is_none() {
            self.state.refuse();
        }
        self.state.bytes = self.state.bytes.checked_add(left).ok_or(HostCloseReason::Corrupt)?;
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
        let session = self.state.sessions.get(&part.session);
        let memory = match session {
            Some(s) => {
                bytes_inside(&slices, s.region.len, s.peer_len).ok_or(HostCloseReason::Corrupt)?;
                let alive = s.region.hold().is_some();
                alive.then(|| (s.region.clone(), slices))
            }
            None => None,
        };
        let status = if memory.is_some() { HostCopyStatus::Done } else { HostCopyStatus::Refused };
        let head = pack(&HostRecord::Bytes { op: part.op, status }.words());
        self.stream.queue(TcpFrame::part(head, (part.op, part.last), memory));
        Ok(())
    }

    fn land(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let Some((part, landing)) = &mut self.work else { return Ok(false) };
        let part = *part;
        if landing.left > 0 {
            let Some(_in) = self.state.inbound.hold() else {
                return Err(HostCloseReason::LocallyClosed);
            };
            let region = landing.region.clone();
            let held = region.as_ref().and_then(|region| region.hold());
            if held.is_none() && region.is_some() {
                landing.region = None;
                self.state.status = HostCopyStatus::Refused;
            }
            let mut failed = false;
            let moved = self.stream.land(landing, cx, &mut failed)?;
            if failed {
                self.state.status = HostCopyStatus::Destination;
            }
            if !moved || landing.left > 0 {
                return Ok(moved);
            }
        }
        self.work = None;
        if let Some((answer, _)) = self.state.finish(cx, part) {
            self.answer(answer);
        }
        Ok(true)
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
        if self.state.inbound.is_shut() {
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
        (self.stream.is_idle() || stuck) && !self.state.inbound.is_shut()
    }

    fn end(self: Box<Self>, cx: &mut WorkerContext, why: HostCloseReason) {
        self.state.end(cx, why);
    }
}
