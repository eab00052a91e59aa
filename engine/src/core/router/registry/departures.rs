//! Removal of instances that left, and upkeep of those of which only streams are left.

use super::{EngineId, InstanceId, InstancePresence, Registry};
use crate::core::router::abandon_queue::AbandonQueue;
use crate::core::router::prefixes::PrefixMemory;

impl Registry {
    /// Remembers the name of an instance that left.
    pub(super) fn leave(&mut self, engine: EngineId) {
        if let Some(oldest) = self.left.insert(engine) {
            self.known.remove(&oldest);
        }
    }

    /// Removes an instance whose legs have ended; its name is remembered.
    pub(in crate::core::router) fn remove(&mut self, instance_id: InstanceId) {
        self.forget_pairs(instance_id);
        for other in self.instances.values_mut() {
            other.follows.take_if(|former| *former == instance_id);
        }
        let Some(instance) = self.instances.remove(&instance_id) else { return };
        assert!(instance.legs.is_empty() && instance.tokens == 0, "legs left on {instance_id:?}");
        let engine = instance.registration.engine;
        let place = InstancePresence::Live(instance_id);
        if let Some(known) = self.known.get_mut(&engine).filter(|known| known.place == place) {
            known.place = InstancePresence::Left;
            self.leave(engine);
        }
    }

    /// Drops what is known only for the sake of new legs, of an instance that gets none any more.
    pub(in crate::core::router) fn strip(&mut self, instance_id: InstanceId) {
        self.forget_pairs(instance_id);
        let instance = self.instance_mut(instance_id);
        instance.prefixes = PrefixMemory::new(0);
        instance.abandoned = AbandonQueue::default();
        instance.registration.troubles.clear();
        instance.paired.clear();
        instance.failing.clear();
        instance.misfits.clear();
        instance.troubles.clear();
    }

    fn forget_pairs(&mut self, instance_id: InstanceId) {
        for other in self.instances.values_mut() {
            other.paired.remove(&instance_id);
            other.failing.remove(&instance_id);
            other.misfits.remove(&instance_id);
            other.troubles.remove(&instance_id);
            other.beside.take_if(|beside| *beside == instance_id);
        }
    }
}
