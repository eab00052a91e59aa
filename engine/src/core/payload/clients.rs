//! The processes that put and get, and what each has.

use super::io::{ClaimId, PayloadKey, SlotId};
use super::slots::ScopedStage;
use std::collections::{BTreeMap, BTreeSet};

/// What one process has; gone with it.
#[derive(Debug)]
pub(super) struct PayloadClientState {
    pub(super) stage: ScopedStage,
    /// Slots that it writes.
    pub(super) reserved: BTreeSet<SlotId>,
    /// Tickets of slots that it waits for.
    pub(super) tickets: BTreeSet<u64>,
    pub(super) wants: BTreeSet<PayloadKey>,
    /// What arrived and was neither abandoned nor released.
    pub(super) claims: BTreeSet<ClaimId>,
    /// Of these, by their keys, those that it was not said to have taken.
    pub(super) arrived: BTreeMap<PayloadKey, ClaimId>,
}

impl PayloadClientState {
    pub(super) fn new(stage: ScopedStage) -> PayloadClientState {
        PayloadClientState {
            stage,
            reserved: BTreeSet::new(),
            tickets: BTreeSet::new(),
            wants: BTreeSet::new(),
            claims: BTreeSet::new(),
            arrived: BTreeMap::new(),
        }
    }

    pub(super) fn entries(&self) -> usize {
        let slots = self.reserved.len() + self.tickets.len();
        slots + self.wants.len() + self.claims.len() + self.arrived.len()
    }
}
