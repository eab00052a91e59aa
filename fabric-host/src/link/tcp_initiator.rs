//! The side of a TCP link that initiates: it sends what it pushes, and places what it reads.

use super::outbound::{HostOutboundLink, HostReadJob, OutboundQueues, QueuedRecord};
use super::stream::{
    RecordStream, ScatterReceive, SentPart, TcpFrame, pack, pack_control, unpack_control,
};
use super::tcp_socket::TcpLinkSocket;
use crate::config::DataPath;
use crate::copy::{CopySlice, SliceCursor};
use crate::memory::HostRegion;
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, take_slices,
};
use crate::shared::{
    HostCloseReason, HostLinkDriver, HostWorkerEvent, NegotiatedPaths, WorkerContext,
};
use kvferry_engine::fabric::SessionId;
use rustix::event::epoll::EventFlags;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Records that are taken from the owner's queue ahead of the socket.
const AHEAD: usize = 16;

/// Records taken in one step.
const BURST: usize = 64;

/// A part of a read that was asked for.
#[derive(Debug)]
struct PendingRead {
    part: HostOperationPart,
    region: Option<Arc<HostRegion>>,
    slices: Vec<CopySlice>,
}

#[derive(Debug)]
pub(super) struct TcpInitiator {
    stream: RecordStream,
    /// The peer may say more than this plane knows.
    later: bool,
    link: Arc<HostOutboundLink>,
    opening: BTreeSet<u32>,
    /// Parts of reads in the order of their answers.
    asked: VecDeque<PendingRead>,
    landing: Option<(HostOperationPart, ScatterReceive)>,
    /// What we know of operations that the peer does not.
    failed: BTreeMap<u64, HostCopyStatus>,
    sent: Vec<SentPart>,
}

impl TcpInitiator {
    pub(super) fn new(
        socket: TcpLinkSocket,
        link: Arc<HostOutboundLink>,
        later: bool,
    ) -> TcpInitiator {
        TcpInitiator {
            stream: RecordStream::new(socket),
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
    fn load(&mut self, cx: &WorkerContext) -> bool {
        let link = self.link.clone();
        let mut out = link.lock();
        let OutboundQueues { controls, reads, records, .. } = &mut *out;
        let mut worked = false;
        for (message, _) in controls.drain(..) {
            if let HostControlMessage::Open { session, .. } = message {
                self.opening.insert(session);
            }
            self.stream.queue(TcpFrame::plain(pack_control(&message)));
            worked = true;
        }
        for read in reads.drain(..) {
            // Reads of a session on this host do not come by this link.
            let HostReadJob::Barrier { session } = read else { continue };
            let asked = self.asked.iter_mut().filter(|asked| asked.part.session == session);
            asked.for_each(|asked| asked.region = None);
            if let Some((part, landing)) = &mut self.landing
                && part.session == session
            {
                landing.region = None;
            }
            // Those that the peer was not asked for yet.
            for record in records.iter_mut() {
                if let Some((HostRecord::Read(part), _)) = HostRecord::decode(&record.words)
                    && part.session == session
                {
                    record.memory = None;
                }
            }
            let session = SessionId(session);
            cx.hub.notify(HostWorkerEvent::Closed { session, link: link.id, local: true });
            worked = true;
        }
        while self.stream.queued() < AHEAD
            && let Some(QueuedRecord { words, memory }) = records.pop_front()
        {
            worked = true;
            let head = pack(&words);
            self.stream.queue(match HostRecord::decode(&words) {
                Some((HostRecord::Write(part), _)) => {
                    TcpFrame::part(head, (part.op, part.last), memory)
                }
                Some((HostRecord::Read(part), asked)) => {
                    let (region, slices) = memory.unzip();
                    // The peer sends the bytes though the session has ended here, and they have to be
                    // passed over.
                    let slices = slices.unwrap_or_else(|| {
                        let mut slices = Vec::new();
                        take_slices(asked, &mut slices);
                        slices
                    });
                    self.asked.push_back(PendingRead { part, region, slices });
                    TcpFrame::plain(head)
                }
                _ => TcpFrame::plain(head),
            });
        }
        worked
    }

    fn take(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if !self.stream.record(&mut cx.record)? {
            return Ok(false);
        }
        let (record, rest) = HostRecord::decode(&cx.record).ok_or(HostCloseReason::Corrupt)?;
        match record {
            HostRecord::Done { op, status } => {
                if !self.link.lock().awaited.remove(&op) {
                    return Err(HostCloseReason::Corrupt);
                }
                let known = self.failed.remove(&op);
                let status =
                    if status == HostCopyStatus::Done { known.unwrap_or(status) } else { status };
                cx.complete(op, status);
            }
            HostRecord::Bytes { op, status } => {
                let PendingRead { part, region, slices } = self
                    .asked
                    .pop_front()
                    .filter(|a| a.part.op == op)
                    .ok_or(HostCloseReason::Corrupt)?;
                if status == HostCopyStatus::Done {
                    let left = slices.iter().map(|slice| slice.len).sum();
                    let cursor = SliceCursor::default();
                    self.landing = Some((part, ScatterReceive { region, slices, cursor, left }));
                } else {
                    self.failed.insert(op, HostCopyStatus::Refused);
                }
            }
            HostRecord::Closed { session } => {
                let (session, link) = (SessionId(session), self.link.id);
                cx.hub.notify(HostWorkerEvent::Closed { session, link, local: false });
            }
            HostRecord::Control { bytes } => {
                let (session, result) = match unpack_control(bytes, rest, self.later) {
                    Some(HostControlMessage::Opened { session, result }) => (session, result),
                    Some(HostControlMessage::Unknown) => return Ok(true),
                    _ => return Err(HostCloseReason::Corrupt),
                };
                if !self.opening.remove(&session) {
                    return Err(HostCloseReason::Corrupt);
                }
                let lane =
                    NegotiatedPaths { write: DataPath::Tcp, read: DataPath::Tcp, source: None };
                let (session, link) = (SessionId(session), self.link.id);
                let result = result.map(|_| lane);
                cx.hub.notify(HostWorkerEvent::Opened { session, link, result });
            }
            _ => return Err(HostCloseReason::Corrupt),
        }
        Ok(true)
    }

    fn land(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let Some((part, landing)) = &mut self.landing else { return Ok(false) };
        let region = landing.region.clone();
        let held = region.as_ref().and_then(|region| region.hold());
        let mut failed = held.is_none();
        if failed {
            landing.region = None;
        }
        let moved = landing.left == 0 || self.stream.land(landing, cx, &mut failed)?;
        if failed {
            self.failed.insert(part.op, HostCopyStatus::Destination);
        }
        if landing.left == 0 {
            self.landing = None;
        }
        Ok(moved)
    }
}

impl HostLinkDriver for TcpInitiator {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.stream.fds()
    }

    fn ready(&mut self, _index: usize) {
        self.stream.ready();
    }

    fn step(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let mut worked = !self.link.is_idle() && self.load(cx);
        let mut sent = std::mem::take(&mut self.sent);
        worked |= self.stream.send(cx, &mut sent)?;
        for SentPart { op, failed, .. } in sent.drain(..) {
            if failed {
                self.failed.insert(op, HostCopyStatus::Source);
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

    fn prepare_sleep(&mut self) -> bool {
        // With a full queue the socket is what is waited for.
        let idle =
            self.link.is_idle() || (self.link.only_records() && self.stream.queued() >= AHEAD);
        idle && self.stream.is_idle()
    }

    fn end(self: Box<Self>, cx: &mut WorkerContext, why: HostCloseReason) {
        cx.link_down(self.link.id, why);
    }
}
