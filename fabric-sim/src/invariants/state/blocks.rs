//! The blocks of one instance in its present incarnation.

use crate::observation::BlockRef;

/// What is known of a block, all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TrackedBlock {
    /// Sequence number at which its owner changed last.
    pub(crate) since: u64,
    /// Number of the load that writes into it; 0 for none.
    pub(crate) load: u32,
    /// Operations that may still write into it.
    pub(crate) writes: u32,
    /// Operations of its own instance that may still read from it.
    pub(crate) reads: u32,
}

/// The blocks of all groups; grows with the ids that are seen.
#[derive(Debug, Default)]
pub(crate) struct TrackedBlocks {
    groups: Vec<Vec<TrackedBlock>>,
}

impl TrackedBlocks {
    #[inline]
    pub(super) fn get(&self, at: BlockRef) -> TrackedBlock {
        let group = self.groups.get(usize::from(at.group));
        group.and_then(|group| group.get(at.block as usize)).copied().unwrap_or_default()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: BlockRef) -> &mut TrackedBlock {
        let (group, block) = (usize::from(at.group), at.block as usize);
        if self.groups.len() <= group {
            self.groups.resize_with(group + 1, Vec::new);
        }
        let group = &mut self.groups[group];
        if group.len() <= block {
            group.resize(block + 1, TrackedBlock::default());
        }
        &mut group[block]
    }
}
