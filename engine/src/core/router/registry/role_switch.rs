//! Instances that register anew in another role.
//!
//! The name of an engine is where its host listens: that the same name comes again as a later
//! incarnation in another role is a switch, and so is a new name at an HTTP address and rank where
//! the engine of the other role has said that it drains. Two names at one address of which neither
//! drains are one server with both roles, a host each.
//!
//! What an engine was before takes nothing more and finishes its legs, for
//! [`RouterConfig::drain_max`] at most, as if it had said that it drains; until then it gets none in
//! its new role.

use super::{InstanceId, Registration, Registry, RouterConfig};

impl Registry {
    /// Takes what a registration replaces out of traffic, but for what has legs to finish in another
    /// role, if there is room for both.
    pub(super) fn retire(
        &mut self,
        new: &Registration,
        replaced: &mut Vec<InstanceId>,
        displaced: Option<InstanceId>,
        config: &RouterConfig,
    ) -> Option<InstanceId> {
        let room = self.len() + 1 - replaced.len() < config.instances_max as usize;
        let former = replaced.iter().copied().filter(|_| room && !new.draining).find(|id| {
            let old = &self.instances[id];
            let before = &old.registration;
            let is_other = before.engine == new.engine && before.role != new.role;
            is_other && !old.lost && !old.legs.is_empty() && !planted!("a-switch-ends-the-legs")
        });
        replaced.retain(|instance_id| former != Some(*instance_id));
        for instance_id in replaced {
            let instance = self.instance_mut(*instance_id);
            (instance.lost, instance.replaced) = (true, displaced != Some(*instance_id));
        }
        if let Some(former) = former {
            self.instance_mut(former).switched = true;
        }
        former
    }

    /// Looks whether an instance has to wait for legs that its server has in another role.
    pub(super) fn find_former(&mut self, instance_id: InstanceId) {
        let new = &self.instances[&instance_id].registration;
        let former = self.instances.iter().find(|(_, other)| {
            let place = &other.registration;
            let is_same = (other.switched || other.replaced) && place.engine == new.engine;
            let is_here =
                place.draining && (place.dp_rank, &place.http) == (new.dp_rank, &new.http);
            let has_legs = (!other.lost || other.replaced) && !other.legs.is_empty();
            place.role != new.role && has_legs && (is_same || is_here)
        });
        let former = former.map(|(former, _)| *former);
        self.instance_mut(instance_id).follows = former;
    }
}
