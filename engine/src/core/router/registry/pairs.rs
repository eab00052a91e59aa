//! Which instances of the two roles go together.

use super::{InstanceId, Registry};
use crate::core::layout::Mismatch;
use crate::core::message::Role;

impl Registry {
    /// Looks whether an instance is one of two roles of a server.
    pub(super) fn find_beside(&mut self, instance_id: InstanceId) {
        let new = &self.instances[&instance_id].registration;
        let beside = self.instances.iter().rev().find(|(_, other)| {
            let other = &other.registration;
            other.role != new.role && other.dp_rank == new.dp_rank && other.http == new.http
        });
        let Some(beside) = beside.map(|(beside, _)| *beside) else { return };
        self.instance_mut(beside).beside = Some(instance_id);
        self.instance_mut(instance_id).beside = Some(beside);
    }

    /// Compares an instance with all that it could be paired with.
    pub(super) fn compare(&mut self, instance_id: InstanceId) {
        let new = &self.instances[&instance_id];
        let (Some(fit), role) = (new.registration.fit.clone(), new.registration.role) else {
            return;
        };
        let mut found = Vec::new();
        for (other, instance) in &self.instances {
            let theirs = &instance.registration;
            let Some(their_fit) = theirs.fit.as_ref().filter(|_| theirs.role != role) else {
                continue;
            };
            let (source, receiver, pair) = match role {
                Role::Prefill => (&fit, their_fit, (instance_id, *other)),
                Role::Decode => (their_fit, &fit, (*other, instance_id)),
            };
            found.extend(source.check(receiver).err().map(|why| (pair, why)));
        }
        for ((prefill, decode), why) in found {
            self.instance_mut(prefill).misfits.insert(decode, why);
        }
    }

    /// Why no pair is made for a model, if prefills and decodes that serve it could talk and none of
    /// them fit.
    pub(in crate::core::router) fn only_misfits(&self, model: Option<&str>) -> Option<&Mismatch> {
        let of = |role| self.of_role(role).filter(move |(_, instance)| instance.serves(model));
        let mut why = None;
        for (_, prefill) in of(Role::Prefill) {
            for (instance_id, decode) in of(Role::Decode) {
                let mode = prefill.registration.mode == decode.registration.mode;
                if !mode || !decode.understands(prefill) {
                    continue;
                }
                match prefill.misfits.get(&instance_id) {
                    Some(misfit) => why = Some(misfit),
                    None => return None,
                }
            }
        }
        why
    }
}
