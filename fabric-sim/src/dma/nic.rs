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

use super::call::{DmaEvent, NicIx, OpSlot};
use super::meter::UtilizationMeter;
use crate::queue::Schedule;
use kvferry_engine::core::time::Nanos;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Fixed point of virtual time and of nanoseconds per byte.
const POINT: u32 = 20;

/// One direction of a port.
#[derive(Debug)]
pub(super) struct PortServer {
    bytes_per_sec: u64,
    /// Virtual bytes per nanosecond.
    rate: u64,
    /// Nanoseconds per byte.
    pace: u64,
    virtual_now: u64,
    updated: Nanos,
    waiting: BinaryHeap<Reverse<(u64, u64, OpSlot)>>,
    arrivals: u64,
    /// Transfers that move slice by slice.
    sliced: u64,
    /// When the next `Serve` is due, and which one counts.
    due: Nanos,
    generation: u32,
    bytes: u64,
    meter: UtilizationMeter,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Nic {
    pub(super) out: u32,
    pub(super) into: u32,
}

/// All ports and slow links.
#[derive(Debug, Default)]
pub(super) struct Nics {
    pub(super) servers: Vec<PortServer>,
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
        self.servers.push(PortServer::new(bytes_per_sec));
        self.servers.len() as u32 - 1
    }

    pub(super) fn get(&self, nic: NicIx) -> Nic {
        self.nics[nic.0 as usize]
    }
}

impl PortServer {
    fn new(bytes_per_sec: u64) -> PortServer {
        let mut server = PortServer {
            bytes_per_sec: 0,
            rate: 0,
            pace: 0,
            virtual_now: 0,
            updated: Nanos::ZERO,
            waiting: BinaryHeap::new(),
            arrivals: 0,
            sliced: 0,
            due: Nanos::MAX,
            generation: 0,
            bytes: 0,
            meter: UtilizationMeter::default(),
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

    pub(super) fn bytes_per_sec(&self) -> u64 {
        self.bytes_per_sec
    }

    /// Bytes that were served or are waiting.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Time for which it was used above 80 %.
    pub(super) fn full(&self) -> Nanos {
        self.meter.full()
    }

    fn advance(&mut self, now: Nanos) {
        let span = (now - self.updated).0;
        let before = std::mem::replace(&mut self.updated, now);
        let transfers = self.waiting.len() as u64;
        if transfers > 0 {
            self.meter.add((before, now), span);
            self.virtual_now += scale(span, self.rate, transfers);
        }
    }

    /// Adds a whole operation.
    pub(super) fn arrive(
        &mut self,
        (me, now): (u32, Nanos),
        op: OpSlot,
        bytes: u64,
        queue: &mut dyn Schedule<DmaEvent>,
    ) {
        self.advance(now);
        if self.waiting.is_empty() {
            self.virtual_now = 0;
        }
        self.arrivals += 1;
        self.bytes += bytes;
        let end = self.virtual_now + (bytes << POINT);
        self.waiting.push(Reverse((end, self.arrivals, op)));
        self.plan(me, queue);
    }

    /// Takes out an operation that is served; call until none is. `turn` names the event.
    pub(super) fn serve(&mut self, now: Nanos) -> Option<OpSlot> {
        self.advance(now);
        let Reverse((end, ..)) = self.waiting.peek()?;
        if *end > self.virtual_now {
            return None;
        }
        self.waiting.pop().map(|Reverse((_, _, op))| op)
    }

    /// True if this event is the one planned last.
    pub(super) fn is_due(&mut self, turn: u32) -> bool {
        if self.generation == turn {
            self.due = Nanos::MAX;
        }
        self.generation == turn
    }

    /// Schedules the next service unless it is scheduled early enough.
    pub(super) fn plan(&mut self, me: u32, queue: &mut dyn Schedule<DmaEvent>) {
        let Some(Reverse((end, ..))) = self.waiting.peek() else { return };
        let left = end.saturating_sub(self.virtual_now);
        let transfers = self.waiting.len() as u64;
        let at = self.updated + Nanos(scale_up(left, transfers, self.rate));
        if at < self.due {
            self.due = at;
            self.generation = self.generation.wrapping_add(1);
            queue.at(at, DmaEvent::Serve { server: me, generation: self.generation });
        }
    }

    /// Changes the bandwidth from now on.
    pub(super) fn set_rate(
        &mut self,
        (me, now): (u32, Nanos),
        bytes_per_sec: u64,
        queue: &mut dyn Schedule<DmaEvent>,
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

    /// An operation that moved slice by slice took this span.
    pub(super) fn used(&mut self, span: (Nanos, Nanos), bytes: u64) {
        self.meter.add(span, scale(bytes, self.pace, 1 << POINT));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// When which `Serve` is due.
    #[derive(Default)]
    struct ServeTimes(BTreeSet<(Nanos, u32)>);

    impl Schedule<DmaEvent> for ServeTimes {
        fn at(&mut self, at: Nanos, entry: DmaEvent) {
            let DmaEvent::Serve { generation: turn, .. } = entry else { panic!("{entry:?}") };
            self.0.insert((at, turn));
        }
    }

    enum LoadChange {
        /// An operation of so many bytes comes.
        Comes(u32, u64),
        Rate(u64),
    }

    /// The ends of operations on a port of one byte per nanosecond.
    fn ends(changes: Vec<(u64, LoadChange)>) -> BTreeMap<u32, u64> {
        let (mut server, mut plan) = (PortServer::new(1_000_000_000), ServeTimes::default());
        let mut ends = BTreeMap::new();
        let mut serve_until = |server: &mut PortServer, plan: &mut ServeTimes, until: u64| {
            while let Some((now, turn)) = plan.0.first().copied().filter(|(at, _)| at.0 <= until) {
                plan.0.pop_first();
                if server.is_due(turn) {
                    while let Some(op) = server.serve(now) {
                        assert_eq!(ends.insert(op.key, now.0), None);
                    }
                    server.plan(0, plan);
                }
            }
        };
        for (at, change) in changes {
            serve_until(&mut server, &mut plan, at);
            let place = (0, Nanos(at));
            match change {
                LoadChange::Comes(op, bytes) => {
                    server.arrive(place, OpSlot { key: op, generation: 0 }, bytes, &mut plan)
                }
                LoadChange::Rate(rate) => server.set_rate(place, rate, &mut plan),
            }
        }
        serve_until(&mut server, &mut plan, u64::MAX);
        ends
    }

    #[track_caller]
    fn check(changes: Vec<(u64, LoadChange)>, expected: &[u64]) {
        let ends: Vec<u64> = ends(changes).into_values().collect();
        let near = |(a, b): (&u64, &u64)| a.abs_diff(*b) <= 2;
        let same = ends.len() == expected.len() && ends.iter().zip(expected).all(near);
        assert!(same, "{ends:?}, expected {expected:?}");
    }

    #[test]
    fn whole_operations_share_a_port_equally() {
        use LoadChange::Comes;
        check(vec![(0, Comes(0, 1_000))], &[1_000]);
        check(vec![(0, Comes(0, 1_000)), (0, Comes(1, 1_000))], &[2_000, 2_000]);
        check(vec![(0, Comes(0, 1_000)), (0, Comes(1, 3_000))], &[2_000, 4_000]);
        // The later one has half of the port until the first is done, then all of it.
        check(vec![(0, Comes(0, 1_000)), (500, Comes(1, 1_000))], &[1_500, 2_000]);
        // After a pause nothing is left of what was before.
        check(vec![(0, Comes(0, 1_000)), (5_000, Comes(1, 1_000))], &[1_000, 6_000]);
        let three = (0..3).map(|op| (u64::from(op) * 100, Comes(op, 300))).collect();
        // 100, then 50, then what is left by threes.
        check(three, &[650, 850, 900]);
    }

    #[test]
    fn another_bandwidth_holds_for_what_is_left() {
        use LoadChange::{Comes, Rate};
        let slower = Rate(500_000_000);
        check(vec![(0, Comes(0, 1_000)), (500, slower)], &[1_500]);
        let slower = Rate(500_000_000);
        let changes = vec![(0, Comes(0, 1_000)), (0, Comes(1, 1_000)), (1_000, slower)];
        check(changes, &[3_000, 3_000]);
    }
}
