//! Notes that the router keeps against instances until they serve again.

use super::{RegisteredInstance, Registry};

impl RegisteredInstance {
    /// Number of notes against it and its pairs, each until a success.
    fn failures(&self) -> usize {
        let own = [
            self.health.has_failed(),
            self.room.pauses() > 0,
            self.unproven,
            self.hostless.is_some(),
        ];
        let pairs = self.failing.values().filter(|health| health.has_failed()).count();
        let told = self.troubles.len() + self.registration.troubles.len();
        own.into_iter().filter(|is_kept| *is_kept).count() + pairs + told
    }
}

impl Registry {
    /// Number of notes against instances that are registered, and their pairs.
    pub(in crate::core::router) fn failures(&self) -> usize {
        let there = self.instances.values().filter(|instance| !instance.lost && !instance.switched);
        there.map(RegisteredInstance::failures).sum()
    }
}
