//! The side of a local link that initiates: it reads from the peer, and hears how its writes went.

use super::local_link::LocalLinkHandles;
use super::outbound::{HostLinkEvent, HostOutboundLink, HostReadJob, HostReadSource};
use crate::config::DataPath;
use crate::copy::SliceCursor;
use crate::memory::MemfdMapping;
use crate::path::reach;
use crate::proto::{HostControlMessage, HostCopyStatus, HostRegionInfo, SessionDenial};
use crate::shared::{
    HostCloseReason, HostLinkDriver, HostWorkerEvent, NegotiatedPaths, SHORT_MAX, WorkerContext,
};
use kvferry_engine::fabric::SessionId;
use rustix::event::epoll::EventFlags;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(Debug)]
pub(super) struct LocalInitiator {
    ends: LocalLinkHandles,
    link: Arc<HostOutboundLink>,
    registration_table: Arc<MemfdMapping>,
    heard: Vec<HostLinkEvent>,
    /// Tokens of the regions that sessions are being opened to.
    opening: BTreeMap<u32, u64>,
    read: Option<(HostReadJob, SliceCursor)>,
    /// Short reads are what this link does of late: more of them are looked for.
    reads: bool,
}

impl LocalInitiator {
    pub(super) fn new(
        ends: LocalLinkHandles,
        link: Arc<HostOutboundLink>,
        table: MemfdMapping,
    ) -> LocalInitiator {
        LocalInitiator {
            ends,
            heard: Vec::new(),
            link,
            registration_table: Arc::new(table),
            opening: BTreeMap::new(),
            read: None,
            reads: false,
        }
    }

    fn controls(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let mut worked = false;
        while self.ends.writable {
            let next = self.link.lock().controls.pop_front();
            let Some((message, region)) = next else { break };
            if !self.ends.send(&message, region.as_ref())? {
                self.link.lock().controls.push_front((message, region));
                break;
            }
            worked = true;
            if let HostControlMessage::Open { session, token, .. } = message {
                self.opening.insert(session, token);
            }
        }
        while let Some((message, file)) = self.ends.receive()? {
            worked = true;
            match message {
                HostControlMessage::Opened { session, result } => {
                    let token = self.opening.remove(&session).ok_or(HostCloseReason::Corrupt)?;
                    let result = result.and_then(|answer| {
                        let lane = self.lane(cx, token, answer, file);
                        if lane.is_err() {
                            self.link.close(session);
                        }
                        lane
                    });
                    let session = SessionId(session);
                    cx.hub.notify(HostWorkerEvent::Opened { session, link: self.link.id, result });
                }
                // The next step goes on: a peer that says nothing else must not keep the thread.
                HostControlMessage::Unknown => break,
                _ => return Err(HostCloseReason::Corrupt),
            }
        }
        Ok(worked)
    }

    fn lane(
        &self,
        cx: &WorkerContext,
        token: u64,
        (write, side, place): (DataPath, HostRegionInfo, u32),
        file: Option<OwnedFd>,
    ) -> Result<NegotiatedPaths, SessionDenial> {
        let rules = cx.hub.rules();
        let (read, reach) = reach(&side, file, &self.ends.peer, [&rules, &self.ends.rules])?;
        let place = place as usize;
        if place >= crate::memory::ROWS_MAX {
            return Err(SessionDenial {
                why: format!("place {place} in a registration table"),
                tcp: false,
            });
        }
        let source = HostReadSource {
            reach,
            len: side.len,
            token,
            place,
            registration_table: self.registration_table.clone(),
            segment: self.ends.segment.clone(),
            cancelled: AtomicBool::new(false),
        };
        Ok(NegotiatedPaths { write, read, source: Some(Arc::new(source)) })
    }

    fn poll_completions(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        let result = self.link.poll_completions(&mut self.heard);
        for heard in self.heard.drain(..) {
            match heard {
                HostLinkEvent::Done { op, status } => cx.complete(op, status),
                HostLinkEvent::Closed { session, link } => {
                    let session = SessionId(session);
                    cx.hub.notify(HostWorkerEvent::Closed { session, link, local: false });
                }
            }
        }
        result
    }

    /// One chunk of a read.
    fn copy(&mut self, cx: &mut WorkerContext) -> bool {
        if self.read.is_none() {
            let next = self.link.lock().reads.pop_front();
            self.read = next.map(|read| (read, SliceCursor::default()));
        }
        let (op, status) = match &mut self.read {
            None => return false,
            Some((HostReadJob::Barrier { session }, _)) => {
                let (session, link) = (SessionId(*session), self.link.id);
                cx.hub.notify(HostWorkerEvent::Closed { session, link, local: true });
                self.read = None;
                return true;
            }
            Some((HostReadJob::Copy { op, source, region, slices, bytes }, cursor)) => {
                let chunk = cursor.chunk(slices, &mut cx.chunk);
                let copied = (chunk, *bytes);
                // SAFETY: `HostPlane::post` takes no slices that are not inside both regions, and no
                // session whose source is shorter than it says.
                let status = unsafe { source.read(copied, region, &mut cx.scratch) };
                if status == HostCopyStatus::Done && !cursor.is_at_end(slices) {
                    return true;
                }
                self.reads = *bytes <= SHORT_MAX;
                (*op, status)
            }
        };
        self.read = None;
        cx.complete(op, status);
        true
    }
}

impl HostLinkDriver for LocalInitiator {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.ends.fds()
    }

    fn ready(&mut self, index: usize) {
        self.ends.ready(index);
    }

    fn step(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason> {
        if self.ends.ended {
            return Err(HostCloseReason::Closed);
        }
        let mut worked = self.poll_completions(cx)?;
        self.reads &= !worked;
        if self.ends.readable || !self.link.is_idle() {
            worked |= self.controls(cx)?;
        }
        worked |= self.link.flush_ring()?;
        Ok(worked | self.copy(cx))
    }

    fn spins(&self) -> bool {
        // What the peer answers, the owner looks for.
        self.reads
    }

    fn prepare_sleep(&mut self) -> bool {
        let empty = self.link.sleep();
        let told = self.link.is_idle() || (!self.ends.writable && self.link.only_controls());
        empty && told && self.read.is_none() && !self.ends.readable
    }

    fn end(self: Box<Self>, cx: &mut WorkerContext, why: HostCloseReason) {
        cx.link_down(self.link.id, why);
    }
}
