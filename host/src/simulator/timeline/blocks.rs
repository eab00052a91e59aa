//! Who has which KV blocks.

use serde::Serialize;
use std::collections::BTreeMap;

/// What is known of a KV block of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BlockUse {
    Free,
    /// A request owns it.
    Taken,
    /// KV of a transfer landed in it.
    Landed,
    /// KV of it was read by a transfer, or sent.
    Moved,
    /// Its request uses what landed.
    Used,
    /// Its request has ended and it is kept, because a transfer may touch it.
    Held,
}

/// A block changes its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockChange {
    /// Index of the event with which it does.
    pub(crate) event: u32,
    pub(crate) instance: u16,
    /// KV cache group.
    pub(crate) group: u16,
    pub(crate) block: u32,
    pub(crate) state: BlockUse,
    /// The transfer that it is for, if that is known.
    pub(crate) transfer: Option<u32>,
}

/// A block: instance, KV cache group, id.
type BlockPlace = (u16, u16, u32);

/// The blocks that are not free.
#[derive(Debug, Default)]
pub(super) struct BlockOwners {
    states: BTreeMap<BlockPlace, (BlockUse, String)>,
    /// Blocks of each request of an instance.
    owned: BTreeMap<(u16, String), Vec<(u16, u32)>>,
    pub(super) changes: Vec<BlockChange>,
}

impl BlockOwners {
    /// The request that has a block.
    pub(super) fn owner(&self, instance: u16, (group, block): (u16, u32)) -> Option<&str> {
        self.states.get(&(instance, group, block)).map(|(_, request)| request.as_str())
    }

    fn change(
        &mut self,
        (event, transfer): (u32, Option<u32>),
        instance: u16,
        (group, block): (u16, u32),
        state: BlockUse,
    ) {
        self.changes.push(BlockChange { event, instance, group, block, state, transfer });
    }

    pub(super) fn taken(
        &mut self,
        by: (u32, Option<u32>),
        (instance, request): (u16, &str),
        blocks: &[Vec<u32>],
    ) {
        for place in each(blocks) {
            let entry = (BlockUse::Taken, request.to_owned());
            self.states.insert((instance, place.0, place.1), entry);
            self.owned.entry((instance, request.into())).or_default().push(place);
            self.change(by, instance, place, BlockUse::Taken);
        }
    }

    pub(super) fn freed(
        &mut self,
        by: (u32, Option<u32>),
        (instance, request): (u16, &str),
        blocks: &[Vec<u32>],
    ) {
        for place in each(blocks) {
            self.states.remove(&(instance, place.0, place.1));
            self.change(by, instance, place, BlockUse::Free);
        }
        if let Some(owned) = self.owned.get_mut(&(instance, request.to_owned())) {
            owned.retain(|(group, block)| self.states.contains_key(&(instance, *group, *block)));
        }
    }

    /// Blocks that are not free get a state; what is free stays so, whoever touches it.
    pub(super) fn mark(
        &mut self,
        by: (u32, Option<u32>),
        instance: u16,
        blocks: &[(u16, u32)],
        state: BlockUse,
    ) {
        for place in blocks {
            let Some((now, _)) = self.states.get_mut(&(instance, place.0, place.1)) else {
                continue;
            };
            if *now != state {
                *now = state;
                self.change(by, instance, *place, state);
            }
        }
    }

    /// All blocks of a request get a state.
    pub(super) fn mark_owned(
        &mut self,
        by: (u32, Option<u32>),
        (instance, request): (u16, &str),
        state: BlockUse,
    ) {
        let owned = self.owned.get(&(instance, request.to_owned())).cloned().unwrap_or_default();
        let still = |place: &&(u16, u32)| self.owner(instance, **place) == Some(request);
        let owned: Vec<_> = owned.iter().filter(still).copied().collect();
        self.mark(by, instance, &owned, state);
    }

    /// An instance lost all its blocks.
    pub(super) fn lost(&mut self, event: u32, instance: u16) {
        let range = (instance, 0, 0)..=(instance, u16::MAX, u32::MAX);
        let gone: Vec<_> = self.states.range(range).map(|(place, _)| *place).collect();
        for (_, group, block) in gone {
            self.states.remove(&(instance, group, block));
            self.change((event, None), instance, (group, block), BlockUse::Free);
        }
        self.owned.retain(|(owner, _), _| *owner != instance);
    }
}

/// Blocks of ids per group.
fn each(blocks: &[Vec<u32>]) -> impl Iterator<Item = (u16, u32)> + '_ {
    (0..).zip(blocks).flat_map(|(group, ids)| ids.iter().map(move |block| (group, *block)))
}
