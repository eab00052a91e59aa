//! The prefills that a decode says are out of reach.

use super::{InstanceId, InstancePresence, InstanceRecord, RegisteredInstance, Registry};
use crate::core::error::Failure;
use crate::core::message::{Role, TROUBLES_MAX};
use std::collections::BTreeMap;

impl Registry {
    /// A decode said which prefills are out of reach: those of which it says something new, each
    /// with the reason, and those that are not any more.
    pub(in crate::core::router) fn troubles(
        &mut self,
        instance_id: InstanceId,
    ) -> (Vec<(InstanceId, Failure)>, Vec<InstanceId>) {
        let decode = |instance: &&RegisteredInstance| instance.registration.role == Role::Decode;
        let Some(decode) = self.instances.get(&instance_id).filter(decode) else {
            return Default::default();
        };
        let mut told = BTreeMap::new();
        let mut news = Vec::new();
        for trouble in &decode.registration.troubles {
            let Some(&InstanceRecord {
                place: InstancePresence::Live(prefill), incarnation, ..
            }) = self.known.get(&trouble.engine)
            else {
                continue;
            };
            let role = self.instances.get(&prefill).map(|instance| instance.registration.role);
            if role != Some(Role::Prefill)
                || trouble.incarnation.is_some_and(|named| named != incarnation)
            {
                continue;
            }
            let before = decode.troubles.get(&prefill).copied().unwrap_or(0);
            if trouble.number > before {
                news.push((prefill, trouble.failure.clone()));
            }
            told.insert(prefill, trouble.number);
        }
        // A full list leaves some out that are not over.
        if decode.registration.troubles.len() >= TROUBLES_MAX {
            for (prefill, number) in &decode.troubles {
                told.entry(*prefill).or_insert(*number);
            }
        }
        let over = decode.troubles.keys().filter(|prefill| !told.contains_key(prefill));
        let over = over.copied().collect();
        self.instance_mut(instance_id).troubles = told;
        (news, over)
    }
}
