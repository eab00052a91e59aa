//! Two things of one instant, in a drawn order.

use super::Simulation;
use super::event::{SimEnvelope, SimEvent};
use kvferry_engine::core::time::Nanos;

/// A lease that ends in the instant in which its reader is told that it has read.
#[derive(Debug)]
pub(super) struct LeaseRace {
    slot: u32,
    at: Nanos,
    /// The core is told of the read before its timer.
    done_first: bool,
    /// Entries that have let others go first.
    put_back: Vec<SimEvent>,
}

impl Simulation {
    pub(super) fn race(&mut self, instance: u16, at: Nanos, done_first: bool) {
        let (slot, now) = (self.core_slot(instance), self.now);
        self.races.retain(|race| race.at >= now);
        if !self.races.iter().any(|race| (race.slot, race.at) == (slot, at)) {
            self.races.push(LeaseRace { slot, at, done_first, put_back: Vec::new() });
        }
    }

    /// Puts an entry behind the others of this instant, once, if it is not the first by the draw;
    /// true if it did.
    pub(super) fn defer_for_race(&mut self, entry: SimEvent) -> bool {
        if self.races.is_empty() {
            return false;
        }
        let (to, is_timer) = match entry {
            SimEvent::Tick { slot, .. } => (slot, true),
            SimEvent::Envelope(envelope) => match self.envelopes.get(envelope) {
                Some(SimEnvelope::Machine { slot, .. }) => (*slot, false),
                _ => return false,
            },
            _ => return false,
        };
        let now = self.now;
        let mut races = self.races.iter_mut();
        let Some(race) = races.find(|race| (race.slot, race.at) == (to, now)) else { return false };
        if race.done_first != is_timer || race.put_back.contains(&entry) {
            return false;
        }
        race.put_back.push(entry);
        self.queue.push(now, entry);
        true
    }
}
