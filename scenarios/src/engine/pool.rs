//! The blocks of one KV cache group.

use super::io::PoolGauges;
use crate::run::AllocationOrder;
use kvferry_engine::core::hash_index::HashIndex;

/// Blocks with reference counts, a queue of unused ones, and a prefix cache.
///
/// As in vLLM an unused block keeps its content, and so may become a prefix hit, until it is
/// handed out again. Block 0 is the null block and never handed out.
#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<PoolBlock>,
    prefixes: HashIndex,
    allocator: AllocationOrder,
    gauges: PoolGauges,
    released: u64,
}

/// One block; a node of the list of unused blocks if nobody has it. The null block is the list's
/// anchor.
#[derive(Clone, Copy, Debug, Default)]
struct PoolBlock {
    /// Prefix hash of its content, 0 if it has none.
    key: u64,
    /// Requests that own or share it.
    refs: u32,
    /// Requests that gave it up while transfers may still touch it.
    quarantines: u32,
    before: u32,
    behind: u32,
}

const ANCHOR: u32 = 0;

impl BlockPool {
    pub(super) fn new(blocks: u32, allocator: AllocationOrder) -> BlockPool {
        let mut pool = BlockPool {
            blocks: vec![PoolBlock::default(); blocks as usize],
            prefixes: HashIndex::new(blocks),
            allocator,
            gauges: PoolGauges { total: blocks - 1, free: blocks - 1, ..PoolGauges::default() },
            released: 0,
        };
        for block in 1..blocks {
            pool.link(block, false);
        }
        pool
    }

    pub(super) fn gauges(&self) -> PoolGauges {
        self.gauges
    }

    /// Blocks that can be handed out.
    pub(super) fn available(&self) -> u32 {
        self.gauges.free + self.gauges.cached
    }

    /// Grows whenever a block becomes available.
    pub(super) fn released(&self) -> u64 {
        self.released
    }

    /// Hands out an unused block, whose content is lost.
    pub(super) fn take(&mut self) -> Option<u32> {
        let block = self.blocks[ANCHOR as usize].behind;
        if block == ANCHOR {
            return None;
        }
        self.unlink(block);
        let key = std::mem::take(&mut self.blocks[block as usize].key);
        match key {
            0 => self.gauges.free -= 1,
            _ => {
                self.gauges.cached -= 1;
                self.prefixes.remove(key);
            }
        }
        self.gauges.held += 1;
        self.blocks[block as usize].refs = 1;
        Some(block)
    }

    /// The block with the KV of a prefix, unless it is quarantined.
    pub(super) fn find(&self, key: u64) -> Option<u32> {
        let block = self.prefixes.get(key)?;
        let PoolBlock { refs, quarantines, .. } = self.blocks[block as usize];
        (refs > 0 || quarantines == 0).then_some(block)
    }

    /// True if nobody has the block.
    pub(super) fn is_unused(&self, block: u32) -> bool {
        let PoolBlock { refs, quarantines, .. } = self.blocks[block as usize];
        refs == 0 && quarantines == 0
    }

    /// Adds a user to a block that [`BlockPool::find`] found.
    pub(super) fn share(&mut self, block: u32) {
        if self.is_unused(block) {
            self.unlink(block);
            self.gauges.cached -= 1;
            self.gauges.held += 1;
        }
        self.blocks[block as usize].refs += 1;
    }

    /// Makes a block's content a prefix hit, unless another block has it already.
    pub(super) fn publish(&mut self, block: u32, key: u64) {
        if self.blocks[block as usize].key == 0 && self.prefixes.insert(key, block) {
            self.blocks[block as usize].key = key;
        }
    }

    /// Removes a user of a block; true if it became available.
    pub(super) fn free(&mut self, block: u32) -> bool {
        self.blocks[block as usize].refs -= 1;
        if self.blocks[block as usize].refs > 0 {
            return false;
        }
        self.gauges.held -= 1;
        self.settle(block)
    }

    /// Removes a user of a block, which transfers may still touch.
    pub(super) fn quarantine(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        entry.refs -= 1;
        entry.quarantines += 1;
        if entry.refs == 0 {
            self.gauges.held -= 1;
            self.gauges.quarantined += 1;
        }
    }

    /// Ends one quarantine of a block; true if it became available.
    pub(super) fn end_quarantine(&mut self, block: u32) -> bool {
        let entry = &mut self.blocks[block as usize];
        entry.quarantines -= 1;
        if entry.refs > 0 || entry.quarantines > 0 {
            return false;
        }
        self.gauges.quarantined -= 1;
        self.settle(block)
    }

    /// Puts a block without users where it belongs; true if that is the list of unused ones.
    fn settle(&mut self, block: u32) -> bool {
        let PoolBlock { key, quarantines, .. } = self.blocks[block as usize];
        if quarantines > 0 {
            self.gauges.quarantined += 1;
            return false;
        }
        match key {
            0 => self.gauges.free += 1,
            _ => self.gauges.cached += 1,
        }
        self.released += 1;
        self.link(block, self.allocator == AllocationOrder::Lifo);
        true
    }

    fn link(&mut self, block: u32, first: bool) {
        let (before, behind) = if first {
            (ANCHOR, self.blocks[ANCHOR as usize].behind)
        } else {
            (self.blocks[ANCHOR as usize].before, ANCHOR)
        };
        self.blocks[block as usize].before = before;
        self.blocks[block as usize].behind = behind;
        self.blocks[before as usize].behind = block;
        self.blocks[behind as usize].before = block;
    }

    fn unlink(&mut self, block: u32) {
        let PoolBlock { before, behind, .. } = self.blocks[block as usize];
        self.blocks[before as usize].behind = behind;
        self.blocks[behind as usize].before = before;
    }
}
