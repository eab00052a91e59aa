//! Ports with bandwidth that concurrent transfers share equally.
//!
//! A transfer uses the sender's way out, the receiver's way in, and the link between the nodes if
//! that is slower. It ends when the slowest of them has served it; each serves its transfers by
//! processor sharing, independent of the others. This never gives more than a port's bandwidth,
//! and differs from max-min fairness only in that a port does not hand on the share of a transfer
//! that is held up elsewhere.
//!
//! Whole operations are served in virtual time (Parekh, Gallager 1993): a transfer of s bytes that
//! comes at virtual time V is served at V + s, where V advances by rate / transfers, so that an
//! arrival or end costs O(log n). Operations that move slice by slice look up the current share
//! for each slice instead.

use super::call::{DmaEvent, NicIx};
use crate::queue::Schedule;
use engine::core::time::Nanos;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Fixed point of virtual time and of nanoseconds per byte.
const POINT: u32 = 20;

/// One direction of a port.
#[derive(Debug)]
pub(super) struct Server {
    bytes_per_sec: u64,
    /// Virtual bytes per nanosecond.
    rate: u64,
    /// Nanoseconds per byte.
    pace: u64,
    virtual_now: u64,
    updated: Nanos,
    waiting: BinaryHeap<Reverse<(u64, u64, u32, u32)>>,
    arrivals: u64,
    /// Transfers that move slice by slice.
    sliced: u64,
    /// When the next `Serve` is due, and which one counts.
    due: Nanos,
    turn: u32,
    bytes: u64,
}

/// A port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nic {
    pub(super) out: u32,
    pub(super) into: u32,
}

/// All ports and slow links.
#[derive(Debug, Default)]
pub(super) struct Nics {
    pub(super) servers: Vec<Server>,
    nics: Vec<Nic>,
}

impl Nics {
    pub(super) fn add(&mut self, bytes_per_sec: u64) -> NicIx {
        let out = self.server(bytes_per_sec);
        let into = self.server(bytes_per_sec);
        self.nics.push(Nic { out, into });
        NicIx(self.nics.len() as u32 - 1)
    }

    pub(super) fn server(&mut self, bytes_per_sec: u64) -> u32 {
        self.servers.push(Server::new(bytes_per_sec));
        self.servers.len() as u32 - 1
    }

    pub(super) fn get(&self, nic: NicIx) -> Nic {
        self.nics[nic.0 as usize]
    }
}

impl Server {
    fn new(bytes_per_sec: u64) -> Server {
        let mut server = Server {
            bytes_per_sec: 0,
            rate: 0,
            pace: 0,
            virtual_now: 0,
            updated: Nanos::ZERO,
            waiting: BinaryHeap::new(),
            arrivals: 0,
            sliced: 0,
            due: Nanos::MAX,
            turn: 0,
            bytes: 0,
        };
        server.set(bytes_per_sec);
        server
    }

    fn set(&mut self, bytes_per_sec: u64) {
        let bytes_per_sec = bytes_per_sec.clamp(1_000, 1_000_000_000_000);
        self.bytes_per_sec = bytes_per_sec;
        self.rate = scale(bytes_per_sec, 1 << POINT, 1_000_000_000);
        self.pace = scale(1_000_000_000, 1 << POINT, bytes_per_sec);
    }

    /// Bytes per second.
    pub(super) fn bytes_per_sec(&self) -> u64 {
        self.bytes_per_sec
    }

    /// Bytes that were served or are waiting.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn advance(&mut self, now: Nanos) {
        let span = (now - self.updated).0;
        self.updated = now;
        let transfers = self.waiting.len() as u64;
        if transfers > 0 {
            self.virtual_now += scale(span, self.rate, transfers);
        }
    }

    /// Adds a whole operation.
    pub(super) fn arrive<S: Schedule<DmaEvent>>(
        &mut self,
        (me, now): (u32, Nanos),
        (op, turn): (u32, u32),
        bytes: u64,
        queue: &mut S,
    ) {
        self.advance(now);
        if self.waiting.is_empty() {
            self.virtual_now = 0;
        }
        self.arrivals += 1;
        self.bytes += bytes;
        let end = self.virtual_now + (bytes << POINT);
        self.waiting.push(Reverse((end, self.arrivals, op, turn)));
        self.plan(me, queue);
    }

    /// Takes out an operation that is served; call until none is. `turn` names the event.
    pub(super) fn serve(&mut self, now: Nanos) -> Option<(u32, u32)> {
        self.advance(now);
        let Reverse((end, ..)) = self.waiting.peek()?;
        if *end > self.virtual_now {
            return None;
        }
        let Reverse((_, _, op, turn)) = self.waiting.pop()?;
        Some((op, turn))
    }

    /// True if this event is the one planned last.
    pub(super) fn is_due(&mut self, turn: u32) -> bool {
        if self.turn == turn {
            self.due = Nanos::MAX;
        }
        self.turn == turn
    }

    /// Schedules the next service unless it is scheduled early enough.
    pub(super) fn plan<S: Schedule<DmaEvent>>(&mut self, me: u32, queue: &mut S) {
        let Some(Reverse((end, ..))) = self.waiting.peek() else { return };
        let left = end.saturating_sub(self.virtual_now);
        let transfers = self.waiting.len() as u64;
        let at = self.updated + Nanos(scale_up(left, transfers, self.rate));
        if at < self.due {
            self.due = at;
            self.turn = self.turn.wrapping_add(1);
            queue.at(at, DmaEvent::Serve { server: me, turn: self.turn });
        }
    }

    /// Changes the bandwidth from now on.
    pub(super) fn set_rate<S: Schedule<DmaEvent>>(
        &mut self,
        (me, now): (u32, Nanos),
        bytes_per_sec: u64,
        queue: &mut S,
    ) {
        self.advance(now);
        self.set(bytes_per_sec);
        self.plan(me, queue);
    }

    /// Counts an operation that moves slice by slice.
    pub(super) fn enter(&mut self, bytes: u64) {
        self.sliced += 1;
        self.bytes += bytes;
    }

    /// The operation has moved.
    pub(super) fn leave(&mut self) {
        self.sliced -= 1;
    }

    /// Time per byte of each operation that moves slice by slice, fixed point.
    #[inline]
    pub(super) fn share(&self) -> u64 {
        self.sliced * self.pace
    }
}

/// The whole nanoseconds of `bytes` at `share`; `rest` keeps the fraction for the next slice.
#[inline]
pub(super) fn span(bytes: u64, share: u64, rest: &mut u64) -> Nanos {
    match bytes.checked_mul(share).and_then(|time| time.checked_add(*rest)) {
        Some(time) => {
            *rest = time & ((1 << POINT) - 1);
            Nanos(time >> POINT)
        }
        None => Nanos(scale(bytes, share, 1 << POINT)),
    }
}

/// `a * b / c`, rounded down.
#[inline]
fn scale(a: u64, b: u64, c: u64) -> u64 {
    match a.checked_mul(b) {
        Some(product) => product / c,
        None => (u128::from(a) * u128::from(b) / u128::from(c)) as u64,
    }
}

/// `a * b / c`, rounded up.
fn scale_up(a: u64, b: u64, c: u64) -> u64 {
    (u128::from(a) * u128::from(b)).div_ceil(u128::from(c)) as u64
}
