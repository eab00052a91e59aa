//! Who uses which KV block of one engine, and which of them bytes may still land in.

use super::layout::BlockList;
use std::fmt;

/// Whoever claims blocks, as the owner of the ledger numbers it (e.g. a source or a flow).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

/// A claim that the ledger refused, because somebody else has the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conflict {
    /// The block.
    pub block: u32,
    /// Its group.
    pub group: usize,
    /// Who has it; if several share it, any of them.
    pub owner: Owner,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} of group {} is in use by {}", self.block, self.group, self.owner.0)
    }
}

impl std::error::Error for Conflict {}

/// The blocks of one engine that transfers use.
#[derive(Clone, Debug, Default)]
pub struct Ledger {}

impl Ledger {
    /// Claims blocks to be read from. Blocks may be shared with other sources and claimed again.
    ///
    /// # Errors
    /// Names a block that is a destination or quarantined; nothing is claimed then.
    pub fn claim_source(
        &mut self,
        _owner: Owner,
        _group: usize,
        _blocks: &BlockList,
    ) -> Result<(), Conflict> {
        Ok(())
    }

    /// Claims blocks to be written into, for one owner alone.
    ///
    /// # Errors
    /// Names a block that anybody has, or that is listed twice; nothing is claimed then.
    pub fn claim_destination(
        &mut self,
        _owner: Owner,
        _group: usize,
        _blocks: &BlockList,
    ) -> Result<(), Conflict> {
        Ok(())
    }

    /// Marks all destinations of an owner as quarantined: bytes may land until
    /// [`Ledger::release`]. Returns how many there are.
    pub fn quarantine(&mut self, _owner: Owner) -> u32 {
        0
    }

    /// Gives up everything an owner has. Returns how many claims there were.
    pub fn release(&mut self, _owner: Owner) -> u32 {
        0
    }

    /// Blocks that are somebody's source.
    pub fn held(&self) -> u32 {
        0
    }

    /// Blocks that are somebody's destination, quarantined ones not counted.
    pub fn receiving(&self) -> u32 {
        0
    }

    /// Blocks that are quarantined.
    pub fn quarantined(&self) -> u32 {
        0
    }

    /// True if nobody has a block.
    pub fn is_empty(&self) -> bool {
        true
    }
}
