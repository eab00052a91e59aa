//! Places of the table that a new instance may have, so that some are left for others.
//!
//! One address cannot register more instances than places are left, so that there is always room
//! for another address. If instances can sign, [`RouterConfig::signed_min`] places are reserved for
//! those that do. If the table is full, a signed instance takes the place of an unsigned one:
//! unsigned registrations, which anybody can send, keep out no instance that knows the secret.

use super::{InstanceId, RegisteredInstance, Registry, RejectReason, RouterConfig};
use crate::source::PeerSource;
use std::collections::BTreeMap;

/// A new instance that wants a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewPlace<'a> {
    pub(super) signed: bool,
    /// True if the operator named it (a static instance).
    pub(super) is_static: bool,
    pub(super) source: Option<PeerSource>,
    /// Instances that it replaces in any case.
    pub(super) replaced: &'a [InstanceId],
}

impl RegisteredInstance {
    /// True if anybody could have registered it.
    fn is_anybodys(&self) -> bool {
        !self.signed && !self.dialects().is_static()
    }
}

impl Registry {
    /// Returns the instance that has to leave for a new one, if any.
    ///
    /// # Errors
    /// There is no place for the new one.
    pub(super) fn make_place(
        &self,
        new: NewPlace<'_>,
        config: &RouterConfig,
    ) -> Result<Option<InstanceId>, RejectReason> {
        let max = config.instances_max as usize;
        let there = || {
            let there = self.instances.iter().filter(|(_, it)| !it.replaced);
            there.filter(|(instance_id, _)| !new.replaced.contains(instance_id))
        };
        let anybodys = there().filter(|(_, it)| it.is_anybodys()).count();
        let live = there().count();
        let displaces = new.signed && !planted!("signed-does-not-displace");
        let left = match displaces {
            true => max.saturating_sub(live - anybodys),
            false if new.signed || new.is_static => max.saturating_sub(live),
            false => {
                let theirs = max.saturating_sub(config.signed_min as usize);
                max.saturating_sub(live).min(theirs.saturating_sub(anybodys))
            }
        };
        if left == 0 {
            return Err(RejectReason::Full);
        }
        let own = there().filter(|(_, it)| it.source == new.source && it.signed == new.signed);
        if new.source.is_some() && own.count() >= left {
            return Err(RejectReason::Share);
        }
        Ok((live >= max).then(|| self.oldest_of_most(new.replaced)).flatten())
    }

    /// Returns the oldest unsigned instance of the address that has most of them.
    fn oldest_of_most(&self, replaced: &[InstanceId]) -> Option<InstanceId> {
        let mut by_source: BTreeMap<Option<PeerSource>, (usize, InstanceId)> = BTreeMap::new();
        let there = self.instances.iter().filter(|(_, it)| it.is_anybodys() && !it.replaced);
        let there = there.filter(|(id, _)| !replaced.contains(id));
        for (instance_id, instance) in there {
            by_source.entry(instance.source).or_insert((0, *instance_id)).0 += 1;
        }
        let most =
            by_source.into_values().min_by_key(|(count, oldest)| (usize::MAX - count, *oldest));
        most.map(|(_, oldest)| oldest)
    }
}
