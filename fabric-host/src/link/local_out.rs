//! The side of a local link that initiates: it reads from the peer, and hears how its writes went.

use super::local_in::Ends;
use super::out::{Heard, OutLink, Read, Source};
use super::{End, Station, socket};
use crate::config::Path;
use crate::copy::Cursor;
use crate::hub::{Lane, Notice};
use crate::memory::Map;
use crate::path::reach;
use crate::proto::{Control, Denial, Side, Status};
use crate::worker::{Cx, SHORT_MAX};
use engine::fabric::SessionId;
use rustix::event::epoll::EventFlags;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The initiating side.
pub(super) struct LocalOut {
    ends: Ends,
    link: Arc<OutLink>,
    roll: Arc<Map>,
    heard: Vec<Heard>,
    /// Tokens of the regions that sessions are being opened to.
    opening: BTreeMap<u32, u64>,
    read: Option<(Read, Cursor)>,
    /// Short reads are what this link does of late: more of them are looked for.
    reads: bool,
    readable: bool,
    /// The socket takes a message, as far as is known.
    writable: bool,
    ended: bool,
}

impl LocalOut {
    pub(super) fn new(ends: Ends, link: Arc<OutLink>, roll: Map) -> LocalOut {
        LocalOut {
            ends,
            heard: Vec::new(),
            link,
            roll: Arc::new(roll),
            opening: BTreeMap::new(),
            read: None,
            reads: false,
            readable: true,
            writable: true,
            ended: false,
        }
    }

    fn controls(&mut self, cx: &mut Cx) -> Result<bool, End> {
        let mut worked = false;
        while self.writable {
            let next = self.link.lock().controls.pop_front();
            let Some((message, region)) = next else { break };
            let file = region.as_ref().and_then(|region| region.file.as_ref());
            let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
            if !socket::send(self.ends.socket.as_fd(), &message, &fds)? {
                self.link.lock().controls.push_front((message, region));
                self.writable = false;
                break;
            }
            worked = true;
            if let Control::Open { session, token, .. } = message {
                self.opening.insert(session, token);
            }
        }
        while self.readable {
            match socket::receive(self.ends.socket.as_fd(), self.ends.later)? {
                None => self.readable = false,
                Some((Control::Opened { session, result }, mut fds)) => {
                    let token = self.opening.remove(&session).ok_or(End::Corrupt)?;
                    let result = result.and_then(|answer| {
                        let lane = self.lane(cx, token, answer, fds.pop());
                        if lane.is_err() {
                            self.link.close(session);
                        }
                        lane
                    });
                    let session = SessionId(session);
                    cx.hub.notify(Notice::Opened { session, link: self.link.id, result });
                    worked = true;
                }
                // The next step goes on: a peer that says nothing else must not keep the thread.
                Some((Control::Unknown, _)) => {
                    worked = true;
                    break;
                }
                Some(_) => return Err(End::Corrupt),
            }
        }
        Ok(worked)
    }

    fn lane(
        &self,
        cx: &Cx,
        token: u64,
        (write, side, place): (Path, Side, u32),
        file: Option<OwnedFd>,
    ) -> Result<Lane, Denial> {
        let rules = cx.hub.rules();
        let process = self.ends.process.as_ref();
        let (read, reach) = reach(&side, file, process, [&rules, &self.ends.rules])?;
        let place = place as usize;
        if place >= crate::memory::ROLL_MAX {
            return Err(Denial { why: format!("place {place} in a roll"), tcp: false });
        }
        let source = Source {
            reach,
            len: side.len,
            token,
            place,
            roll: self.roll.clone(),
            segment: self.ends.segment.clone(),
            cancelled: AtomicBool::new(false),
        };
        Ok(Lane { write, read, source: Some(Arc::new(source)) })
    }

    fn hear(&mut self, cx: &mut Cx) -> Result<bool, End> {
        let result = self.link.hear(&mut self.heard);
        for heard in self.heard.drain(..) {
            match heard {
                Heard::Done { op, status } => cx.complete(op, status),
                Heard::Closed { session } => {
                    let session = SessionId(session);
                    cx.hub.notify(Notice::Closed { session, local: false });
                }
            }
        }
        result
    }

    /// One chunk of a read.
    fn copy(&mut self, cx: &mut Cx) -> bool {
        if self.read.is_none() {
            let next = self.link.lock().reads.pop_front();
            self.read = next.map(|read| (read, Cursor::default()));
        }
        let (op, status) = match &mut self.read {
            None => return false,
            Some((Read::Barrier { session }, _)) => {
                let session = SessionId(*session);
                cx.hub.notify(Notice::Closed { session, local: true });
                self.read = None;
                return true;
            }
            Some((Read::Copy { op, source, region, slices, bytes }, cursor)) => {
                let chunk = cursor.chunk(slices, &mut cx.chunk);
                let status = source.read((chunk, *bytes), region, &mut cx.scratch);
                if status == Status::Done && !cursor.is_at_end(slices) {
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

impl std::fmt::Debug for LocalOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalOut").field("link", &self.link).finish_non_exhaustive()
    }
}

impl Station for LocalOut {
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        self.ends.fds()
    }

    fn ready(&mut self, index: usize) {
        match index {
            0 => (self.readable, self.writable) = (true, true),
            _ => self.ended = true,
        }
    }

    fn step(&mut self, cx: &mut Cx) -> Result<bool, End> {
        if self.ended {
            return Err(End::Closed);
        }
        let mut worked = self.hear(cx)?;
        self.reads &= !worked;
        if self.readable || !self.link.is_idle() {
            worked |= self.controls(cx)?;
        }
        worked |= self.link.flush_ring()?;
        Ok(worked | self.copy(cx))
    }

    fn spins(&self) -> bool {
        // What the peer answers, the owner looks for.
        self.reads
    }

    fn doze(&mut self) -> bool {
        let empty = self.link.sleep();
        let told = self.link.is_idle() || (!self.writable && self.link.only_controls());
        empty && told && self.read.is_none() && !self.readable
    }

    fn end(self: Box<Self>, cx: &mut Cx, why: End) {
        if why == End::Corrupt {
            cx.hub.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        }
        let proven = why == End::Closed;
        cx.hub.notify(Notice::LinkDown { link: self.link.id, proven });
    }
}
