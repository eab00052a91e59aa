//! Records and the bytes that go with them by TCP. Bytes go from memory to the socket and from the
//! socket to memory without a stop, in large batches of ranges.

use super::tcp_socket::TcpLinkSocket;
use crate::copy::{CopySlice, SliceCursor};
use crate::memory::{HostMemoryAccess, HostRegion};
use crate::proto::{CONTROL_MAX, HostControlMessage, HostRecord, RECORD_MAX};
use crate::shared::{HostCloseReason, WorkerContext};
use crate::sys::{self, range};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Bytes read ahead of knowing what they are.
const INPUT: usize = 64 << 10;

/// Bytes that stop over in a buffer, for memory that a socket cannot reach.
const BOUNCE: u64 = 256 << 10;

/// Bytes sent in one step.
const SEND_MAX: u64 = 4 << 20;

/// A record with its length ahead, as bytes.
pub(super) fn pack(words: &[u64]) -> Vec<u8> {
    let all = std::iter::once(words.len() as u64).chain(words.iter().copied());
    all.flat_map(u64::to_le_bytes).collect()
}

/// The words of whole ones.
pub(super) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word))
}

/// A control message as a record.
pub(super) fn pack_control(message: &HostControlMessage) -> Vec<u8> {
    pack_message(message.encode())
}

/// The bytes of a control message as a record.
pub(super) fn pack_message(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut words = HostRecord::Control { bytes: bytes.len() as u32 }.words();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    words.extend(words_of(&bytes));
    pack(&words)
}

/// The message of a control record of so many bytes; see [`HostControlMessage::decode`] for
/// `later`.
pub(super) fn unpack_control(bytes: u32, words: &[u64], later: bool) -> Option<HostControlMessage> {
    let all: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    if bytes as usize > CONTROL_MAX {
        return None;
    }
    HostControlMessage::decode(all.get(..bytes as usize)?, later)
}

/// What is to be sent.
#[derive(Debug)]
pub(super) struct TcpFrame {
    head: Vec<u8>,
    sent: usize,
    payload: Option<Payload>,
    /// Operation and whether this is its last part: told when it was sent.
    part: Option<(u64, bool)>,
}

#[derive(Debug)]
struct Payload {
    region: Arc<HostRegion>,
    slices: Vec<CopySlice>,
    cursor: SliceCursor,
    /// The memory is gone: what is sent instead is worthless.
    failed: bool,
}

impl TcpFrame {
    pub(super) fn plain(head: Vec<u8>) -> TcpFrame {
        TcpFrame { head, sent: 0, payload: None, part: None }
    }

    /// A part of an operation, and the memory that follows it.
    pub(super) fn part(
        head: Vec<u8>,
        part: (u64, bool),
        memory: Option<(Arc<HostRegion>, Vec<CopySlice>)>,
    ) -> TcpFrame {
        let payload = memory.map(|(region, slices)| Payload {
            region,
            slices,
            cursor: SliceCursor::default(),
            failed: false,
        });
        TcpFrame { head, sent: 0, payload, part: Some(part) }
    }

    fn is_sent(&self) -> bool {
        let paid = |payload: &Payload| payload.cursor.is_at_end(&payload.slices);
        self.sent == self.head.len() && self.payload.as_ref().is_none_or(paid)
    }
}

/// A part that was sent.
#[derive(Debug)]
pub(super) struct SentPart {
    pub(super) op: u64,
    pub(super) last: bool,
    /// Not all of it was what it should be.
    pub(super) failed: bool,
}

/// Bytes that are coming in for some ranges.
#[derive(Debug)]
pub(super) struct ScatterReceive {
    /// None: they are dropped.
    pub(super) region: Option<Arc<HostRegion>>,
    pub(super) slices: Vec<CopySlice>,
    pub(super) cursor: SliceCursor,
    pub(super) left: u64,
}

#[derive(Debug)]
pub(super) struct RecordStream {
    socket: TcpLinkSocket,
    pub(super) readable: bool,
    writable: bool,
    sending: VecDeque<TcpFrame>,
    input: Vec<u8>,
    /// What of `input` is there and not used.
    unread: std::ops::Range<usize>,
}

impl RecordStream {
    pub(super) fn new(socket: TcpLinkSocket) -> RecordStream {
        let (sending, input) = (VecDeque::new(), vec![0; INPUT]);
        RecordStream { socket, readable: true, writable: true, sending, input, unread: 0..0 }
    }

    pub(super) fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        vec![(self.socket.as_fd(), EventFlags::IN | EventFlags::OUT | EventFlags::ET)]
    }

    pub(super) fn ready(&mut self) {
        (self.readable, self.writable) = (true, true);
    }

    pub(super) fn queue(&mut self, frame: TcpFrame) {
        self.sending.push_back(frame);
    }

    /// Frames that were not sent yet.
    pub(super) fn queued(&self) -> usize {
        self.sending.len()
    }

    /// True if there is nothing that could be done now.
    pub(super) fn is_idle(&self) -> bool {
        !self.readable && (!self.writable || !self.is_sending())
    }

    fn is_sending(&self) -> bool {
        !self.sending.is_empty() || self.socket.is_unsent()
    }

    /// True if there is something to send that the socket does not take.
    pub(super) fn is_stuck(&self) -> bool {
        !self.writable && self.is_sending()
    }

    /// Sends what the socket takes; true if it took something.
    pub(super) fn send(
        &mut self,
        cx: &mut WorkerContext,
        done: &mut Vec<SentPart>,
    ) -> Result<bool, HostCloseReason> {
        let mut budget = SEND_MAX;
        while self.writable
            && budget > 0
            && let Some(frame) = self.sending.front_mut()
        {
            match frame.send(&mut self.socket, cx) {
                Ok(sent) => budget = budget.saturating_sub(sent.max(1)),
                Err(Errno::AGAIN) => self.writable = false,
                Err(Errno::INTR) => {}
                // A reset says nothing of what the peer still copies out of its buffers.
                Err(_) => return Err(HostCloseReason::Lost),
            }
            if frame.is_sent()
                && let Some(TcpFrame { part, payload, .. }) = self.sending.pop_front()
                && let Some((op, last)) = part
            {
                let failed = payload.is_some_and(|payload| payload.failed);
                done.push(SentPart { op, last, failed });
            }
        }
        if self.writable && self.socket.is_unsent() {
            match self.socket.flush() {
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(_) => return Err(HostCloseReason::Lost),
            }
        }
        Ok(budget < SEND_MAX)
    }

    /// # Safety
    /// As for [`sys::receive_ranges`].
    unsafe fn receive(&mut self, ranges: &[libc::iovec]) -> Result<u64, Errno> {
        loop {
            // SAFETY: The caller promises it.
            match unsafe { self.socket.receive_ranges(ranges) } {
                Err(Errno::INTR) => {}
                other => return other,
            }
        }
    }

    /// The next record; false if it is not all there yet.
    pub(super) fn record(&mut self, into: &mut Vec<u64>) -> Result<bool, HostCloseReason> {
        loop {
            let (words, _) = self.input[self.unread.clone()].as_chunks::<8>();
            if let Some((len, rest)) = words.split_first() {
                let len = u64::from_le_bytes(*len);
                if len == 0 || len > RECORD_MAX as u64 {
                    return Err(HostCloseReason::Corrupt);
                }
                let len = len as usize;
                if let Some(record) = rest.get(..len) {
                    into.clear();
                    into.extend(record.iter().map(|word| u64::from_le_bytes(*word)));
                    self.unread.start += 8 + 8 * len;
                    return Ok(true);
                }
            }
            if !self.readable {
                return Ok(false);
            }
            self.input.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
            let space = &mut self.input[self.unread.end..];
            let space = [range(space.as_mut_ptr() as u64, space.len() as u64)];
            // SAFETY: The one range is what is left of a buffer of this stream.
            match unsafe { self.receive(&space) } {
                Ok(0) => return Err(HostCloseReason::Closed),
                Ok(count) => self.unread.end += count as usize,
                Err(Errno::AGAIN) => self.readable = false,
                Err(why) => return Err(broken(why)),
            }
        }
    }

    /// Puts bytes where they belong; false if none are there. The caller holds the region.
    ///
    /// # Errors
    /// The connection ended. A destination that cannot be written is `Ok` with `failed` set; what
    /// is left is to be dropped.
    pub(super) fn land(
        &mut self,
        landing: &mut ScatterReceive,
        cx: &mut WorkerContext,
        failed: &mut bool,
    ) -> Result<bool, HostCloseReason> {
        let moved = if self.unread.is_empty() {
            match self.land_fresh(landing, cx) {
                Ok(Some(moved)) => moved,
                Ok(None) => return Ok(false),
                Err(Some(end)) => return Err(end),
                Err(None) => {
                    (*failed, landing.region) = (true, None);
                    return Ok(true);
                }
            }
        } else {
            let bytes = &self.input[self.unread.clone()];
            let count = bytes.len().min(landing.left as usize);
            if !landing.place(&bytes[..count], cx) {
                (*failed, landing.region) = (true, None);
            }
            self.unread.start += count;
            count as u64
        };
        landing.cursor.advance(&landing.slices, moved);
        landing.left -= moved;
        Ok(true)
    }

    /// Straight from the socket. `Err(None)`: the destination refused.
    fn land_fresh(
        &mut self,
        landing: &ScatterReceive,
        cx: &mut WorkerContext,
    ) -> Result<Option<u64>, Option<HostCloseReason>> {
        if !self.readable {
            return Ok(None);
        }
        let direct = match landing.region.as_deref() {
            Some(HostRegion { reach: HostMemoryAccess::Here { base, .. }, .. }) => Some(*base),
            _ => None,
        };
        let mut bounce = std::mem::take(&mut cx.bounce);
        let ranges: Vec<libc::iovec> = match direct {
            Some(base) => {
                let most = self.socket.step();
                landing.cursor.clone().next(&landing.slices, &mut cx.chunk, most);
                cx.chunk.iter().map(|slice| range(base + slice.to, slice.len)).collect()
            }
            None => {
                bounce.resize(BOUNCE as usize, 0);
                vec![range(bounce.as_mut_ptr() as u64, landing.left.min(BOUNCE))]
            }
        };
        // SAFETY: The ranges are in the buffer, or inside the region, as whoever made the landing
        // has seen to; the caller holds that, and who registered it promises that it may be written.
        let got = unsafe { self.receive(&ranges) };
        let placed = match got {
            Ok(count) if direct.is_none() => landing.place(&bounce[..count as usize], cx),
            _ => true,
        };
        cx.bounce = bounce;
        match got {
            Ok(0) => Err(Some(HostCloseReason::Closed)),
            // The bytes are gone either way.
            Ok(_) if !placed => Err(None),
            Ok(count) => Ok(Some(count)),
            Err(Errno::AGAIN) => {
                self.readable = false;
                Ok(None)
            }
            Err(Errno::FAULT) => Err(None),
            Err(why) => Err(Some(broken(why))),
        }
    }
}

/// Why a link ends that nothing more is received by.
fn broken(why: Errno) -> HostCloseReason {
    match why {
        Errno::BADMSG => HostCloseReason::Corrupt,
        _ => HostCloseReason::Lost,
    }
}

impl ScatterReceive {
    /// Copies bytes to the next ranges; false if the destination cannot be written.
    fn place(&self, bytes: &[u8], cx: &mut WorkerContext) -> bool {
        let Some(region) = &self.region else { return true };
        let mut cursor = self.cursor;
        let mut at = 0_u64;
        while at < bytes.len() as u64 {
            cursor.next(&self.slices, &mut cx.chunk, u64::MAX);
            for slice in &mut cx.chunk {
                slice.len = slice.len.min(bytes.len() as u64 - at);
                slice.from = at;
                at += slice.len;
            }
            let here = HostMemoryAccess::Here { base: bytes.as_ptr() as u64, map: None };
            // SAFETY: The chunk was cut to what is in `bytes`; its ranges are inside the region, as
            // above, which the caller of `land` holds.
            let copied =
                unsafe { crate::copy::copy((&cx.chunk, 0), &here, &region.reach, &mut cx.scratch) };
            if copied.is_err() {
                return false;
            }
        }
        true
    }
}

impl TcpFrame {
    fn send(&mut self, socket: &mut TcpLinkSocket, cx: &mut WorkerContext) -> Result<u64, Errno> {
        let head = &self.head[self.sent..];
        let mut ranges = vec![range(head.as_ptr() as u64, head.len() as u64)];
        let mut bounce = std::mem::take(&mut cx.bounce);
        let held = self.payload.as_ref().map(|payload| payload.region.clone());
        let held = held.as_ref().and_then(|region| region.hold());
        if let Some(payload) = &mut self.payload {
            payload.failed |= held.is_none();
            payload.gather(&mut ranges, &mut bounce, socket.step(), cx);
        }
        // SAFETY: The head and the bounce buffer are of this call, and the holder of a region keeps it
        // mapped, which whoever registered it vouched for.
        let sent = unsafe { socket.send_ranges(&ranges) };
        cx.bounce = bounce;
        let sent = match (sent, &mut self.payload) {
            // The ranges of the memory, not the head.
            (Err(Errno::FAULT), Some(payload)) if !payload.failed => {
                payload.failed = true;
                return Ok(0);
            }
            (sent, _) => sent?,
        };
        let of_head = sent.min(head.len() as u64);
        self.sent += of_head as usize;
        if let Some(payload) = &mut self.payload {
            payload.cursor.advance(&payload.slices, sent - of_head);
        }
        Ok(sent)
    }
}

impl Payload {
    /// Appends the next ranges, of `most` bytes at most; all of them end up in this process.
    fn gather(
        &mut self,
        ranges: &mut Vec<libc::iovec>,
        bounce: &mut Vec<u8>,
        most: u64,
        cx: &mut WorkerContext,
    ) {
        let mut cursor = self.cursor;
        cursor.next(&self.slices, &mut cx.chunk, most);
        // One range is the head.
        cx.chunk.truncate(sys::RANGES_MAX - 1);
        if let (false, HostMemoryAccess::Here { base, .. }) = (self.failed, &self.region.reach) {
            ranges.extend(cx.chunk.iter().map(|slice| range(base + slice.from, slice.len)));
            return;
        }
        let mut room = BOUNCE;
        for slice in &mut cx.chunk {
            (slice.len, slice.to) = (slice.len.min(room), BOUNCE - room);
            room -= slice.len;
        }
        bounce.resize(BOUNCE as usize, 0);
        if !self.failed {
            cx.chunk.retain(|slice| slice.len > 0);
            let here = HostMemoryAccess::Here { base: bounce.as_mut_ptr() as u64, map: None };
            let reach = &self.region.reach;
            // SAFETY: The chunk was cut to the length of the buffer, and its ranges are inside the
            // region, which the caller holds.
            let copied =
                unsafe { crate::copy::copy((&cx.chunk, 0), reach, &here, &mut cx.scratch) };
            self.failed = copied.is_err();
        }
        if self.failed {
            bounce.fill(0);
        }
        ranges.push(range(bounce.as_ptr() as u64, BOUNCE - room));
    }
}
