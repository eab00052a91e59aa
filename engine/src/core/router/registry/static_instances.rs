//! Instances that the operator names.

use super::Registry;
use crate::core::router::discovery::{RegistrationEntry, static_name};
use crate::core::router::io::StaticInstance;
use std::collections::BTreeSet;

impl Registry {
    /// An entry for each instance that is named, and one that drains for each that was before and is
    /// not any more.
    pub(in crate::core::router) fn static_entries(
        &self,
        named: &[StaticInstance],
    ) -> Vec<RegistrationEntry> {
        let mut names = BTreeSet::new();
        let mut entries = Vec::with_capacity(named.len());
        for it in named {
            let name = static_name(it);
            let sequence =
                self.known.get(&name).map_or(1, |known| known.sequence.saturating_add(1));
            if names.insert(name) {
                entries.push(RegistrationEntry::of_static(it, sequence));
            }
        }
        let gone = self.instances.values().filter(|it| {
            let registration = &it.registration;
            it.dialects().is_static()
                && !it.lost
                && !registration.draining
                && !names.contains(&registration.engine)
        });
        let gone = gone.map(|it| {
            let mut entry = it.entry();
            entry.registration.sequence = entry.registration.sequence.saturating_add(1);
            entry.registration.draining = true;
            entry
        });
        entries.extend(gone);
        entries
    }
}
