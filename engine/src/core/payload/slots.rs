//! Who owns which range of the pool, and who waits for one.

use super::io::{PayloadClient, PayloadFailure, SlotId};
use super::note::ScopedKey;
use super::pool::{PAGE, PayloadPool, PoolRange};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A stage of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScopedStage {
    pub(super) deployment: Arc<str>,
    pub(super) stage: Arc<str>,
}

impl ScopedStage {
    /// The one whose processes put a payload.
    pub(super) fn that_puts(place: &ScopedKey) -> ScopedStage {
        let stage = place.key.stream.from.clone();
        ScopedStage { deployment: place.deployment.clone(), stage }
    }
}

/// Those who have a share of the pool together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PoolShare {
    /// Who puts.
    pub(super) stage: ScopedStage,
    /// What the stage puts on other hosts is apart: else two hosts that are full of what the other one
    /// wants would wait for each other.
    pub(super) is_fetched: bool,
}

#[derive(Debug)]
struct PoolSlot {
    range: PoolRange,
    owners: u32,
    /// Whose share of the pool it is of.
    share: PoolShare,
}

/// What those of a share have of the pool.
#[derive(Clone, Copy, Debug, Default)]
struct ShareUse {
    /// Bytes, in whole pages.
    bytes: u64,
    slots: usize,
}

/// The part of a share that counts as nothing beside a slot that is longer than the share.
const NEXT_TO_NOTHING: u64 = 16;

/// Bytes in whole pages.
fn whole(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE)
}

/// Who waits for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReservationOwner {
    /// A client, with its ticket.
    Client(PayloadClient, u64),
    /// A payload that comes from another host.
    Fetch(u64),
}

#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) owner: ReservationOwner,
    bytes: u64,
    /// Counts the reservations.
    number: u64,
}

/// The slots of the pool, and the reservations that wait for one.
///
/// Each stage has an equal share of the pool, and what it has put counts until it is released. One
/// that has its share waits, so that it cannot take the room that the stages behind it need to get on
/// with what it put. Beyond that all are served in the order in which they came: a long reservation is
/// not passed over for ever by shorter ones.
#[derive(Debug)]
pub(super) struct SlotTable {
    pool: PayloadPool,
    slots: BTreeMap<SlotId, PoolSlot>,
    slots_max: usize,
    used: BTreeMap<PoolShare, ShareUse>,
    waiting: BTreeMap<PoolShare, VecDeque<Reservation>>,
    reservations: u64,
    next: u64,
}

impl SlotTable {
    pub(super) fn new(bytes: u64, slots_max: u32) -> SlotTable {
        SlotTable {
            pool: PayloadPool::new(bytes),
            slots: BTreeMap::new(),
            slots_max: slots_max as usize,
            used: BTreeMap::new(),
            waiting: BTreeMap::new(),
            reservations: 0,
            next: 0,
        }
    }

    /// Whether so much could be had if all were free.
    pub(super) fn check(&self, bytes: u64) -> Result<(), PayloadFailure> {
        let pool = self.pool.bytes();
        if bytes > pool { Err(PayloadFailure::TooLong { bytes, pool }) } else { Ok(()) }
    }

    /// Why there was no room for so much in a share; `stages` share the pool.
    pub(super) fn full(&self, share: &PoolShare, bytes: u64, stages: usize) -> PayloadFailure {
        let (most, used) = (self.share(stages).slots, self.used.get(share));
        let of_share = used.map_or(0, |used| used.slots);
        let is_out = self.slots.len() >= self.slots_max || of_share >= most;
        if is_out && !planted!("a-full-table-is-a-full-pool") {
            let all = self.slots_max;
            let what = format!(
                "payloads in the pool, which has {all} slots, {most} for a stage: release what was \
                 got, or put fewer and larger ones; a larger pool has no more of them"
            );
            return PayloadFailure::Overload(what.into());
        }
        let (free, largest) = (self.pool.free_bytes(), self.pool.largest());
        PayloadFailure::PoolFull { bytes, free, largest, share: self.share(stages).bytes }
    }

    /// What each of the stages may have.
    fn share(&self, stages: usize) -> ShareUse {
        let stages = stages.max(1);
        let slots = (self.slots_max / stages).max(1);
        ShareUse { bytes: self.pool.bytes() / stages as u64, slots }
    }

    /// Waits for a slot.
    pub(super) fn wait(&mut self, share: &PoolShare, owner: ReservationOwner, bytes: u64) {
        self.reservations += 1;
        let reservation = Reservation { owner, bytes, number: self.reservations };
        self.waiting.entry(share.clone()).or_default().push_back(reservation);
    }

    /// Serves who waited longest of those whose stage has less than its share, if there is room: with
    /// one owner. `stages` share the pool.
    pub(super) fn serve(&mut self, stages: usize) -> Option<(Reservation, SlotId, u64)> {
        if self.slots.len() >= self.slots_max {
            return None;
        }
        let most = self.share(stages);
        let is_served = |share: &PoolShare, bytes: u64| {
            let used = self.used.get(share).copied().unwrap_or_default();
            // What is longer than a share has to fit as well, once the stage has next to nothing: its
            // processes may keep some slots for small payloads.
            let is_long = whole(bytes) > most.bytes;
            let may_be_long = is_long && used.bytes <= most.bytes / NEXT_TO_NOTHING;
            let fits = bytes == 0 || may_be_long || used.bytes + whole(bytes) <= most.bytes;
            fits && used.slots < most.slots || planted!("a-stage-may-fill-the-pool")
        };
        let heads = self.waiting.iter().filter_map(|(share, all)| Some((share, all.front()?)));
        let (share, head) = heads
            .filter(|(share, head)| is_served(share, head.bytes))
            .min_by_key(|(_, head)| head.number)?;
        let range = self.pool.allocate(head.bytes).ok()?;
        let share = share.clone();
        let waiting = self.waiting.get_mut(&share)?;
        let reservation = waiting.pop_front()?;
        if waiting.is_empty() {
            self.waiting.remove(&share);
        }
        self.next += 1;
        let (slot, offset) = (SlotId(self.next), range.offset());
        let used = self.used.entry(share.clone()).or_default();
        used.bytes += whole(range.bytes());
        used.slots += 1;
        self.slots.insert(slot, PoolSlot { range, owners: 1, share });
        Some((reservation, slot, offset))
    }

    /// Takes one reservation out, and says how long it was to be.
    pub(super) fn stop_waiting(
        &mut self,
        share: &PoolShare,
        owner: ReservationOwner,
    ) -> Option<u64> {
        let waiting = self.waiting.get_mut(share)?;
        let place = waiting.iter().position(|waits| waits.owner == owner)?;
        let bytes = waiting.remove(place).map(|waits| waits.bytes);
        if waiting.is_empty() {
            self.waiting.remove(share);
        }
        bytes
    }

    /// Takes all reservations out.
    pub(super) fn drain_waiting(&mut self) -> impl Iterator<Item = Reservation> + use<> {
        std::mem::take(&mut self.waiting).into_values().flatten()
    }

    /// Where a slot begins, and how many bytes were asked for.
    pub(super) fn place(&self, slot: SlotId) -> (u64, u64) {
        self.slots.get(&slot).map_or((0, 0), |slot| (slot.range.offset(), slot.range.bytes()))
    }

    /// One more owns the slot.
    pub(super) fn add_owner(&mut self, slot: SlotId) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.owners += 1;
        }
    }

    /// One owner less; the last one frees it.
    pub(super) fn let_go(&mut self, slot: SlotId) {
        let Some(found) = self.slots.get_mut(&slot) else { return };
        found.owners -= 1;
        if found.owners > 0 && !planted!("a-slot-has-one-owner") {
            return;
        }
        let Some(PoolSlot { range, share, .. }) = self.slots.remove(&slot) else { return };
        let freed = self.pool.free(range);
        debug_assert!(freed.is_ok(), "{freed:?}");
        if let Some(used) = self.used.get_mut(&share) {
            used.bytes -= whole(range.bytes());
            used.slots -= 1;
            if used.slots == 0 {
                self.used.remove(&share);
            }
        }
    }

    /// Shares that have slots or wait for some, beside those of these stages.
    pub(super) fn shares_beside<T>(&self, stages: &BTreeMap<ScopedStage, T>) -> usize {
        let waiting = self.waiting.keys().filter(|share| !self.used.contains_key(share));
        let beside = |share: &&PoolShare| share.is_fetched || !stages.contains_key(&share.stage);
        self.used.keys().chain(waiting).filter(beside).count()
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.pool.free_bytes()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn pending_len(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }

    /// Shares that have slots or wait for some.
    pub(super) fn entries(&self) -> usize {
        self.used.len() + self.waiting.len()
    }
}
