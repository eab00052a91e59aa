//! How the flows of a rank share its link to one peer engine: start-time fair queuing by bytes
//! (Goyal, Vin and Cheng, SIGCOMM 1996), in which a flow that has just got something to move goes
//! first, as in FQ-CoDel (RFC 8290, section 4), so that a short prompt does not wait for the long
//! ones before it.

use super::TransferSettings;
use super::rate_estimator::{RateEstimator, RateSample};
use crate::core::ids::FlowId;
use crate::core::time::Nanos;
use crate::fabric::Credits;
use std::collections::{BTreeSet, VecDeque};

/// An operation counts at least as a quantum over this: it costs something, however short it is.
const SHORTEST: u64 = 128;

/// Quanta that fresh flows may move while old ones wait. Where a few come at once, an old one
/// hardly has its turn again before each of them has had one; where they do not stop coming, half
/// is left.
const AHEAD: u64 = 3;

/// A ceiling as high as this is none.
const CEILING: u32 = 256;

/// The link between this rank and a peer engine, all of whose ranks are on the other side of it.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    /// Flows that had nothing to move until now.
    fresh: VecDeque<FlowId>,
    /// Flows that have had their quantum, by what each has had; equal ones in the order of their
    /// turns.
    old: BTreeSet<(u64, u64, FlowId)>,
    /// What the old flow had that posted last: nobody who comes later has had less.
    clock: u64,
    next_turn: u64,
    /// Flows that wait for a session.
    parked: Vec<FlowId>,
    /// Bytes that fresh flows have moved more than old ones while these waited.
    ahead: u64,
    pub(super) in_flight: Credits,
    pub(super) pace: RateEstimator,
    /// The plane refused an operation; nothing is posted before one completes, or for a while.
    pub(super) refused: bool,
    /// Operations that it took before it refused one, and those that completed since then.
    ceiling: Option<(u32, u32)>,
    /// It is among the links on which something may be posted.
    pub(super) listed: bool,
}

/// What a flow has of the link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FlowShare {
    /// Bytes that it has had, counted from what the others had when it came.
    had: u64,
    /// It is fresh until it has had as many.
    quantum_end: u64,
    /// Which turn it waits for.
    turn: u64,
    /// It is in one of the lists of its link.
    listed: bool,
}

impl FlowShare {
    /// The flow is in none of the lists any more.
    pub(super) fn unlisted(&mut self) {
        self.listed = false;
    }
}

impl FairQueue {
    /// True if a flow has something to post.
    pub(super) fn has_flows(&self) -> bool {
        !(self.fresh.is_empty() && self.old.is_empty())
    }

    /// Flows in its lists.
    pub(super) fn flows(&self) -> usize {
        self.fresh.len() + self.old.len() + self.parked.len()
    }

    fn quantum(&self, settings: &TransferSettings) -> u64 {
        self.pace.operation_bytes(settings)
    }

    /// A flow has something to post.
    pub(super) fn list(
        &mut self,
        flow: FlowId,
        share: &mut FlowShare,
        settings: &TransferSettings,
    ) {
        if std::mem::replace(&mut share.listed, true) {
            return;
        }
        if share.had <= self.clock {
            share.had = self.clock;
            share.quantum_end = self.clock.saturating_add(self.quantum(settings));
        }
        if share.had < share.quantum_end {
            self.fresh.push_back(flow);
        } else {
            self.queue(flow, share);
        }
    }

    /// A flow waits among the old ones.
    fn queue(&mut self, flow: FlowId, share: &mut FlowShare) {
        self.next_turn += 1;
        share.turn = self.next_turn;
        self.old.insert((share.had, share.turn, flow));
    }

    /// True if the next operation is that of a fresh flow. They go first as long as the old ones
    /// are not a quantum behind for each that is fresh, up to [`AHEAD`].
    fn is_fresh_next(&self, settings: &TransferSettings) -> bool {
        let most = self.quantum(settings).saturating_mul(AHEAD.min(self.fresh.len() as u64));
        let turn = self.ahead < most && !planted!("new-flows-wait-for-all-others");
        !self.fresh.is_empty() && (self.old.is_empty() || turn)
    }

    /// The flow whose operation is next.
    pub(super) fn next(&self, settings: &TransferSettings) -> Option<FlowId> {
        match self.is_fresh_next(settings) {
            true => self.fresh.front().copied(),
            false => self.old.first().map(|(_, _, flow)| *flow),
        }
    }

    /// The next flow has nothing to post, or has ended.
    pub(super) fn unlist(&mut self, settings: &TransferSettings) {
        if self.is_fresh_next(settings) {
            self.fresh.pop_front();
        } else {
            self.old.pop_first();
        }
    }

    /// A flow has ended.
    pub(super) fn forget(&mut self, flow: FlowId, share: &FlowShare) {
        if share.listed && !self.old.remove(&(share.had, share.turn, flow)) {
            self.fresh.retain(|other| *other != flow);
            self.parked.retain(|other| *other != flow);
        }
    }

    /// The next flow waits for a session.
    pub(super) fn park(&mut self, settings: &TransferSettings) {
        self.parked.extend(self.next(settings));
        self.unlist(settings);
    }

    /// Flows that wait for a session, which may be open now.
    pub(super) fn unpark(&mut self) -> Vec<FlowId> {
        std::mem::take(&mut self.parked)
    }

    /// True if another operation is of use now.
    pub(super) fn has_room(&self, bytes: u64, settings: &TransferSettings) -> bool {
        !self.refused
            && self.ceiling.is_none_or(|(most, _)| self.in_flight.operations < most)
            && self.pace.has_room(&self.in_flight, bytes, settings)
    }

    /// The plane had no room for an operation, which is off the books again: no more than now are
    /// tried at a time.
    pub(super) fn refuse(&mut self) {
        self.refused = true;
        self.ceiling = Some((self.in_flight.operations.max(1), 0));
    }

    /// An operation is over. After as many as may be in flight one more may.
    pub(super) fn ended(&mut self, operation: &Credits) {
        self.in_flight.remove(operation);
        self.refused = false;
        self.ceiling = match self.ceiling {
            Some((most, ended)) if ended + 1 < most => Some((most, ended + 1)),
            Some((most, _)) if most < CEILING => Some((most + 1, 0)),
            _ => None,
        };
    }

    /// The next flow has posted an operation.
    pub(super) fn posted(
        &mut self,
        now: Nanos,
        share: &mut FlowShare,
        operation: &Credits,
        settings: &TransferSettings,
    ) -> RateSample {
        let submitted = self.pace.posted(now, self.in_flight.operations == 0);
        self.in_flight.add(operation);
        self.charge(share, operation, settings);
        submitted
    }

    fn charge(&mut self, share: &mut FlowShare, operation: &Credits, settings: &TransferSettings) {
        let cost = operation.bytes.max(self.quantum(settings) / SHORTEST).max(1);
        if self.is_fresh_next(settings) {
            self.ahead = match self.old.is_empty() {
                true => 0,
                false => self.ahead.saturating_add(cost),
            };
            share.had = share.had.saturating_add(cost);
            if share.had >= share.quantum_end
                && let Some(flow) = self.fresh.pop_front()
            {
                self.queue(flow, share);
            }
        } else if let Some((had, _, flow)) = self.old.pop_first() {
            // What was moved at a faster time is not owed for longer than at this one.
            let most = self.quantum(settings).saturating_mul(AHEAD);
            self.ahead = self.ahead.min(most).saturating_sub(cost);
            self.clock = self.clock.max(had);
            if !planted!("one-flow-keeps-the-link") {
                share.had = had.saturating_add(cost);
            }
            self.queue(flow, share);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Posts `count` operations of flows that have endless ones of the given sizes.
    fn posts(
        link: &mut FairQueue,
        flows: &mut BTreeMap<u64, (u64, FlowShare)>,
        count: usize,
    ) -> Vec<u64> {
        let settings = TransferSettings::default();
        let mut posted = Vec::new();
        for _ in 0..count {
            let flow = link.next(&settings).expect("they are endless");
            let (bytes, share) = flows.get_mut(&flow.0).expect("it is one of them");
            let operation = Credits { operations: 1, ranges: 1, bytes: *bytes };
            link.posted(Nanos::ZERO, share, &operation, &settings);
            posted.push(flow.0);
        }
        posted
    }

    fn listed(link: &mut FairQueue, sizes: &[u64]) -> BTreeMap<u64, (u64, FlowShare)> {
        let mut flows = BTreeMap::new();
        for (id, bytes) in (0..).zip(sizes) {
            let mut share = FlowShare::default();
            link.list(FlowId(id), &mut share, &TransferSettings::default());
            flows.insert(id, (*bytes, share));
        }
        flows
    }

    #[test]
    fn a_flow_is_counted_in_whichever_list_it_is() {
        let settings = TransferSettings::default();
        let mut link = FairQueue::default();
        let mut flows = listed(&mut link, &[256 << 10; 3]);
        posts(&mut link, &mut flows, 1);
        assert_eq!((link.fresh.len(), link.old.len(), link.flows()), (2, 1, 3));
        link.park(&settings);
        assert_eq!((link.parked.len(), link.flows()), (1, 3));
        for (id, (_, share)) in &flows {
            link.forget(FlowId(*id), share);
        }
        assert_eq!(link.flows(), 0);
    }

    #[test]
    fn flows_get_equal_bytes_whatever_the_size_of_their_operations() {
        let mut link = FairQueue::default();
        let mut flows = listed(&mut link, &[256 << 10, 100_000, 40_000, 200_000]);
        let mut moved = BTreeMap::new();
        for flow in posts(&mut link, &mut flows, 10_000) {
            *moved.entry(flow).or_insert(0) += flows[&flow].0;
        }
        let (least, most) = (moved.values().min().unwrap(), moved.values().max().unwrap());
        // Each has had as many quanta of 256 KiB as the others, give or take one and an operation.
        assert!(moved.len() == 4 && most - least <= 2 * (256 << 10), "{moved:?}");
    }

    #[test]
    fn flows_get_equal_bytes_while_the_rate_swings_and_others_come_and_go() {
        let settings = TransferSettings::default();
        let (mut link, mut moved) = (FairQueue::default(), BTreeMap::new());
        let mut flows = listed(&mut link, &[0; 5]);
        for step in 0..20_000_u64 {
            // What the link carries changes a hundredfold and back, and a flow that is there or not
            // moves the beginning of each round.
            let rate = if step % 70 < 35 { 10_000_000 } else { 1_000_000_000 };
            link.pace.forget(Nanos(step));
            let submitted = link.pace.posted(Nanos(step), true);
            link.pace.done(Nanos(step + 1_000_000), submitted, rate / 1_000, 0, &settings);
            if step % 110 == 0 {
                let (_, share) = flows.get_mut(&4).unwrap();
                if share.listed {
                    link.forget(FlowId(4), share);
                    share.unlisted();
                } else {
                    link.list(FlowId(4), share, &settings);
                }
            }
            let bytes = link.pace.operation_bytes(&settings);
            flows.values_mut().for_each(|(size, _)| *size = bytes);
            let flow = posts(&mut link, &mut flows, 1)[0];
            *moved.entry(flow).or_insert(0) += bytes;
            moved.remove(&4);
            let (least, most) = (moved.values().min(), moved.values().max());
            let apart = most.zip(least).map_or(0, |(most, least)| most - least);
            assert!(apart <= 2 * settings.operation_bytes_max, "{moved:?} at {step}");
        }
        assert_eq!(moved.len(), 4);
    }

    #[test]
    fn a_flow_that_comes_late_goes_first_once() {
        let mut link = FairQueue::default();
        let mut flows = listed(&mut link, &[256 << 10; 3]);
        posts(&mut link, &mut flows, 30);
        let mut share = FlowShare::default();
        link.list(FlowId(3), &mut share, &TransferSettings::default());
        flows.insert(3, (16 << 10, share));
        let posted = posts(&mut link, &mut flows, 16 + 3);
        assert_eq!(posted[..16], [3; 16], "its quantum");
        assert!(!posted[16..].contains(&3), "then it is one of four");
    }

    #[test]
    fn many_that_come_at_once_hardly_wait_for_one_that_was_there() {
        for (many, most) in [(2, 1), (3, 1), (5, 1), (20, 3), (100, 5)] {
            let mut link = FairQueue::default();
            let mut flows = listed(&mut link, &[256 << 10]);
            posts(&mut link, &mut flows, 30);
            for id in 1..=many {
                let mut share = FlowShare::default();
                link.list(FlowId(id), &mut share, &TransferSettings::default());
                flows.insert(id, (256 << 10, share));
            }
            let mut old = 0;
            loop {
                match posts(&mut link, &mut flows, 1)[0] {
                    0 => old += 1,
                    last if last == many => break,
                    _ => {}
                }
            }
            assert!(old <= most, "one got {old} operations before the last of {many} had one");
        }
    }

    #[test]
    fn what_fresh_flows_moved_at_a_faster_time_or_alone_holds_no_later_one_up() {
        let settings = TransferSettings::default();
        for alone in [false, true] {
            let mut link = FairQueue::default();
            let submitted = link.pace.posted(Nanos::ZERO, true);
            link.pace.done(Nanos::from_ms(1), submitted, 1 << 30, 0, &settings);
            let quantum = link.quantum(&settings);
            let mut flows = listed(&mut link, &[quantum; 4]);
            assert_eq!(posts(&mut link, &mut flows, 3), [0, 1, 2], "two while one is old");
            link.forget(FlowId(3), &flows.remove(&3).expect("it is fresh").1);
            if alone {
                let gone = |(id, (_, share)): (&u64, &mut (u64, FlowShare))| {
                    link.forget(FlowId(*id), share);
                };
                flows.iter_mut().for_each(gone);
                flows = listed(&mut link, &[quantum]);
                posts(&mut link, &mut flows, 1);
            } else {
                link.pace.forget(Nanos::from_ms(2));
            }
            let bytes = link.quantum(&settings);
            flows.values_mut().for_each(|(size, _)| *size = bytes);
            let mut share = FlowShare::default();
            link.list(FlowId(9), &mut share, &settings);
            flows.insert(9, (bytes, share));
            let posted = posts(&mut link, &mut flows, 4);
            let waits = posted.iter().position(|flow| *flow == 9);
            let most = if alone { 0 } else { AHEAD as usize };
            assert!(waits.is_some_and(|waits| waits <= most), "{posted:?}, alone: {alone}");
        }
    }

    #[test]
    fn flows_that_come_again_and_again_leave_the_others_their_share() {
        let settings = TransferSettings::default();
        // Of so many operations the others bring a new flow with two; what one that was there
        // before has at least of 4,000. At one they bring more than all that the link carries.
        for (every, least) in [(4, 1_900), (3, 1_900), (1, 1_900)] {
            let mut link = FairQueue::default();
            let mut flows = listed(&mut link, &[64 << 10]);
            let mut left = BTreeMap::new();
            let mut old = 0;
            for id in 1..=4_000 {
                if id % every == 0 {
                    let mut share = FlowShare::default();
                    link.list(FlowId(id), &mut share, &settings);
                    flows.insert(id, (64 << 10, share));
                    left.insert(id, 2);
                }
                while let Some(flow) = link.next(&settings)
                    && left.get(&flow.0) == Some(&0)
                {
                    link.unlist(&settings);
                }
                let posted = posts(&mut link, &mut flows, 1)[0];
                old += u32::from(posted == 0);
                left.entry(posted).and_modify(|left| *left -= 1);
            }
            assert!(old >= least, "one that was there before got {old} of 4,000 at one in {every}");
        }
    }
}
