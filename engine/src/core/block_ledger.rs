//! Which KV blocks of one engine are written into, for whom, and in which of them bytes may still
//! land.
//!
//! ```
//! use kvferry_engine::core::block_ledger::{BlockLedger, BlockOwner};
//! use kvferry_engine::core::layout::BlockList;
//!
//! let (mut ledger, blocks) = (BlockLedger::default(), BlockList::new(vec![7, 8]));
//! ledger.claim_destination(BlockOwner(1), 0, &blocks)?;
//! // Its owner gave up, but a write may be under way: nobody else gets the blocks yet.
//! ledger.quarantine(BlockOwner(1));
//! assert!(ledger.claim_destination(BlockOwner(2), 0, &blocks).is_err());
//! ledger.release(BlockOwner(1));
//! ledger.claim_destination(BlockOwner(2), 0, &blocks)?;
//! # Ok::<(), kvferry_engine::core::block_ledger::BlockConflict>(())
//! ```

use super::layout::BlockList;
use std::collections::BTreeMap;
use std::fmt;

/// Whoever claims blocks, as the user of the ledger numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockOwner(pub u64);

/// A claim that the ledger refused, because somebody has the block already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockConflict {
    pub block: u32,
    pub group: usize,
    pub owner: BlockOwner,
}

impl fmt::Display for BlockConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} of group {} is in use by {}", self.block, self.group, self.owner.0)
    }
}

impl std::error::Error for BlockConflict {}

/// What a block is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Free,
    /// It is written into on behalf of its owner.
    Destination(BlockOwner),
    /// Its owner gave it up, but bytes may still land.
    Quarantined(BlockOwner),
}

const PAGE: usize = 1024;

/// Cells of one group, in pages so that a few high block ids do not cost a whole pool. A cell is 0
/// or, for a block that somebody has, one more than the place of the owner's claims.
#[derive(Clone, Debug, Default)]
struct PagedCells {
    pages: Vec<Option<Box<[u32; PAGE]>>>,
}

impl PagedCells {
    fn get(&self, block: u32) -> u32 {
        let page = self.pages.get(block as usize / PAGE).and_then(Option::as_ref);
        page.map_or(0, |cells| cells[block as usize % PAGE])
    }

    fn cell(&mut self, block: u32) -> &mut u32 {
        let page = block as usize / PAGE;
        if page >= self.pages.len() {
            self.pages.resize(page + 1, None);
        }
        &mut self.pages[page].get_or_insert_with(|| Box::new([0; PAGE]))[block as usize % PAGE]
    }
}

/// What one owner has, as (group, block).
#[derive(Clone, Debug, Default)]
struct BlockClaims {
    owner: Option<BlockOwner>,
    destinations: Vec<(u32, u32)>,
    quarantined: bool,
}

/// The blocks of one engine that transfers use; every call takes time in proportion to the blocks
/// it is about.
#[derive(Clone, Debug, Default)]
pub struct BlockLedger {
    groups: Vec<PagedCells>,
    claims: Vec<BlockClaims>,
    spare: Vec<u32>,
    owners: BTreeMap<BlockOwner, u32>,
    receiving: u32,
    quarantined: u32,
}

impl BlockLedger {
    /// Owners that have claims.
    pub fn owners(&self) -> usize {
        self.owners.len()
    }

    /// Places for claims: as many as there were owners at one time.
    pub fn places(&self) -> usize {
        self.claims.len()
    }

    /// Claims blocks to be written into, for one owner alone.
    ///
    /// # Errors
    /// Names a block that anybody has, or that is listed twice; nothing is claimed then.
    ///
    /// # Panics
    /// If the owner is quarantined.
    pub fn claim_destination(
        &mut self,
        owner: BlockOwner,
        group: usize,
        blocks: &BlockList,
    ) -> Result<(), BlockConflict> {
        if blocks.ids.is_empty() {
            return Ok(());
        }
        if group >= self.groups.len() {
            self.groups.resize_with(group + 1, PagedCells::default);
        }
        let index = self.index(owner);
        assert!(!self.claims[index as usize].quarantined, "owner {} is quarantined", owner.0);
        for (at, &block) in blocks.ids.iter().enumerate() {
            let cell = self.groups[group].cell(block);
            if *cell != 0 {
                let conflict = self.conflict(group, block);
                for &block in &blocks.ids[..at] {
                    *self.groups[group].cell(block) = 0;
                }
                if self.claims[index as usize].destinations.is_empty() {
                    self.release(owner);
                }
                return Err(conflict);
            }
            *cell = index + 1;
        }
        self.receiving += blocks.ids.len() as u32;
        let claims = &mut self.claims[index as usize];
        claims.destinations.extend(blocks.ids.iter().map(|block| (group as u32, *block)));
        Ok(())
    }

    /// Marks all destinations of an owner as quarantined: bytes may land until
    /// [`BlockLedger::release`]. Returns how many there are.
    pub fn quarantine(&mut self, owner: BlockOwner) -> u32 {
        let Some(index) = self.owners.get(&owner) else { return 0 };
        let claims = &mut self.claims[*index as usize];
        let count = claims.destinations.len() as u32;
        if !claims.quarantined {
            claims.quarantined = true;
            self.receiving -= count;
            self.quarantined += count;
        }
        count
    }

    /// Gives up everything an owner has. Returns how many claims there were.
    pub fn release(&mut self, owner: BlockOwner) -> u32 {
        let Some(index) = self.owners.get(&owner).copied() else { return 0 };
        let claims = std::mem::take(&mut self.claims[index as usize]);
        for &(group, block) in &claims.destinations {
            *self.groups[group as usize].cell(block) = 0;
        }
        let destinations = claims.destinations.len() as u32;
        match claims.quarantined {
            true => self.quarantined -= destinations,
            false => self.receiving -= destinations,
        }
        self.owners.remove(&owner);
        self.spare.push(index);
        destinations
    }

    /// What a block is used for.
    pub fn state(&self, group: usize, block: u32) -> BlockState {
        match self.groups.get(group).map_or(0, |table| table.get(block)) {
            0 => BlockState::Free,
            cell => {
                let claims = &self.claims[cell as usize - 1];
                let owner = claims.owner.expect("a cell names a live owner");
                match claims.quarantined {
                    true => BlockState::Quarantined(owner),
                    false => BlockState::Destination(owner),
                }
            }
        }
    }

    /// Blocks that are somebody's destination, quarantined ones not counted.
    pub fn receiving(&self) -> u32 {
        self.receiving
    }

    /// Blocks that are quarantined.
    pub fn quarantined(&self) -> u32 {
        self.quarantined
    }

    /// True if nobody has a block.
    pub fn is_empty(&self) -> bool {
        self.receiving + self.quarantined == 0
    }

    /// Where the claims of an owner are.
    fn index(&mut self, owner: BlockOwner) -> u32 {
        if let Some(index) = self.owners.get(&owner) {
            return *index;
        }
        let index = self.spare.pop().unwrap_or_else(|| {
            self.claims.push(BlockClaims::default());
            self.claims.len() as u32 - 1
        });
        self.claims[index as usize].owner = Some(owner);
        self.owners.insert(owner, index);
        index
    }

    fn conflict(&self, group: usize, block: u32) -> BlockConflict {
        match self.state(group, block) {
            BlockState::Destination(owner) | BlockState::Quarantined(owner) => {
                BlockConflict { block, group, owner }
            }
            BlockState::Free => unreachable!("a block in use has an owner"),
        }
    }
}
