//! The KV memory of one TP rank of one engine process.
//!
//! With [`MemoryFidelity::Bytes`] it is made of real buffers, and the content of every 8-byte word says
//! what it is (stamp, layer, head, K or V, position, offset), so that a byte in a wrong place is
//! seen. With [`MemoryFidelity::Cells`] it is one 16-byte cell per piece of a block, with a stamp and
//! the set of layers that have it, for workloads whose bytes would not fit.
//!
//! A *stamp* names the content of a token range independent of request and engine: the caller
//! derives it from the prompt prefix, so that equal prefixes have equal KV.
//!
//! ```
//! use kvferry_sim::memory::RankStore;
//!
//! let mut store = RankStore::plain(&[64, 128]);
//! store.bytes_mut(1).unwrap()[5] = 7;
//! assert_eq!((store.segments(), store.bytes(1).unwrap()[5]), (2, 7));
//! // What is registered is no address of this process: nothing but the simulator gets at it.
//! assert_eq!(store.memory(1, 0).len(), 128);
//! ```

mod bytes;
mod cells;
mod shape;

pub use kvferry_scenarios::run::MemoryFidelity;
pub use shape::{MemoryShape, PieceSize, ShapeError};

use cells::{CellStore, PartialRow};
use kvferry_engine::fabric::{Memory, OwnMemory};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Part of an operation: `len` bytes between two regions, offsets as in
/// [`kvferry_engine::fabric::Submit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpSlice {
    /// Offset into the initiator's region.
    pub local: u64,
    /// Offset into the other region.
    pub remote: u64,
    /// Bytes.
    pub len: u64,
}

/// A KV block of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRef {
    /// KV cache group.
    pub group: u16,
    pub block: u32,
}

impl BlockRef {
    /// The blocks of lists per group.
    pub(crate) fn all(lists: &[Vec<u32>]) -> impl Iterator<Item = BlockRef> + '_ {
        (0..)
            .zip(lists)
            .flat_map(|(group, ids)| ids.iter().map(move |block| BlockRef { group, block: *block }))
    }
}

impl fmt::Display for BlockRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group {} block {}", self.group, self.block)
    }
}

/// Tokens `tokens` of block `block`, whose token 0 is token `first` of its prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTokens {
    /// Index of the KV cache group.
    pub group: usize,
    pub block: u32,
    /// Position in the prompt of the block's token 0.
    pub first: u32,
    /// Tokens within the block.
    pub tokens: Range<u32>,
}

/// Memory that does not hold what it should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentMismatch {
    pub at: BlockTokens,
    /// First layer in which it is wrong.
    pub layer: u16,
    /// Position in the prompt of the first wrong token.
    pub position: u32,
    /// What is there instead.
    pub found: MismatchKind,
}

/// What was found in place of the right content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MismatchKind {
    /// Content of something else, or nothing at all.
    Foreign,
    /// Right content in other layers, none in this one.
    Missing,
}

impl fmt::Display for ContentMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = match self.found {
            MismatchKind::Foreign => "foreign bytes",
            MismatchKind::Missing => "no bytes",
        };
        let BlockTokens { group, block, .. } = self.at;
        let (layer, position) = (self.layer, self.position);
        write!(f, "{found} in group {group} block {block} layer {layer} at token {position}")
    }
}

/// Bytes at an offset of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentOffset {
    pub(crate) segment: usize,
    /// Byte offset that slices are relative to.
    pub(crate) base: u64,
}

/// The KV memory of one rank.
#[derive(Clone, Debug)]
pub struct RankStore {
    shape: Arc<MemoryShape>,
    data: StoreData,
}

#[derive(Clone, Debug)]
enum StoreData {
    /// One buffer per segment.
    Bytes(Vec<Vec<u8>>),
    Cells(CellStore),
}

/// Reusable memory of [`land`].
#[derive(Debug, Default)]
pub(crate) struct LandingScratch {
    partial: Vec<PartialRow>,
}

impl RankStore {
    /// Empty memory.
    ///
    /// # Errors
    /// With [`MemoryFidelity::Cells`] for shapes that cells cannot express.
    pub fn new(shape: Arc<MemoryShape>, fidelity: MemoryFidelity) -> Result<RankStore, ShapeError> {
        let data = match fidelity {
            MemoryFidelity::Bytes => {
                StoreData::Bytes(shape.segments.iter().map(|s| vec![0; s.len as usize]).collect())
            }
            MemoryFidelity::Cells => {
                shape.cells_fit()?;
                StoreData::Cells(CellStore::new(&shape))
            }
        };
        Ok(RankStore { shape, data })
    }

    /// Plain buffers without KV structure, for tests of data planes.
    pub fn plain(lens: &[u64]) -> RankStore {
        let shape = Arc::new(MemoryShape::plain(lens));
        RankStore {
            shape,
            data: StoreData::Bytes(lens.iter().map(|len| vec![0; *len as usize]).collect()),
        }
    }

    /// What to register for a segment (index into the regions of the rank's layout).
    pub fn memory(&self, segment: usize, device: u32) -> Memory {
        let len = self.shape.segments[segment].len;
        Memory::Device { range: OwnMemory::unproven(segment_base(segment), len), device }
    }

    pub fn segments(&self) -> usize {
        self.shape.segments.len()
    }

    /// The place that a registration names; none if it leaves its segment.
    pub(crate) fn place(&self, memory: &Memory) -> Option<SegmentOffset> {
        let (Memory::Device { range, .. } | Memory::Own(range)) = memory else { return None };
        let (base, len) = (range.base(), range.len());
        let segment = (base / segment_base(0)).checked_sub(1)? as usize;
        let base = base % segment_base(0);
        let fits = base.checked_add(len)? <= self.shape.segments.get(segment)?.len;
        fits.then_some(SegmentOffset { segment, base })
    }

    /// The bytes of a segment; none with cells.
    pub fn bytes(&self, segment: usize) -> Option<&[u8]> {
        match &self.data {
            StoreData::Bytes(bytes) => bytes.get(segment).map(Vec::as_slice),
            StoreData::Cells(_) => None,
        }
    }

    /// The bytes of a segment; none with cells.
    pub fn bytes_mut(&mut self, segment: usize) -> Option<&mut [u8]> {
        match &mut self.data {
            StoreData::Bytes(bytes) => bytes.get_mut(segment).map(Vec::as_mut_slice),
            StoreData::Cells(_) => None,
        }
    }

    /// The engine computed (or its owner overwrote) these tokens in those of `layers` that belong
    /// to the group.
    ///
    /// With cells, a piece remembers how many of its tokens were computed, so that a piece which
    /// is sent before its last token is seen.
    pub fn fill(&mut self, at: &BlockTokens, layers: Range<u16>, stamp: u64) {
        match &mut self.data {
            StoreData::Bytes(data) => bytes::fill(&self.shape, data, at, layers, stamp),
            StoreData::Cells(data) => cells::fill(&self.shape, data, at, layers, stamp),
        }
    }

    /// Whether these tokens have the content `stamp` in all layers of the group.
    ///
    /// # Errors
    /// Where the first difference is.
    pub fn check(&self, at: &BlockTokens, stamp: u64) -> Result<(), ContentMismatch> {
        match &self.data {
            StoreData::Bytes(data) => bytes::check(&self.shape, data, at, stamp),
            StoreData::Cells(data) => cells::check(&self.shape, data, at, stamp),
        }
    }
}

/// Base address of a segment in the rank's address space: 1 TiB apart.
const fn segment_base(segment: usize) -> u64 {
    (segment as u64 + 1) << 40
}

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopySide {
    /// Index into the stores.
    pub(crate) store: usize,
    pub(crate) place: SegmentOffset,
}

/// Copies slices between two stores (or within one), in order. `local_is_source` says which of the
/// offsets of a slice belongs to `from`. Ranges were checked when the operation was accepted.
#[inline]
pub(crate) fn land(
    stores: &mut [Option<RankStore>],
    (from, to): (CopySide, CopySide),
    local_is_source: bool,
    slices: &[OpSlice],
    scratch: &mut LandingScratch,
) {
    if from.store == to.store {
        let Some(store) = &mut stores[to.store] else { return };
        let source = match &mut store.data {
            StoreData::Bytes(bytes) if from.place.segment == to.place.segment => {
                return bytes::land_within(
                    &mut bytes[to.place.segment],
                    (from.place.base, to.place.base),
                    local_is_source,
                    slices,
                );
            }
            data => RankStore { shape: store.shape.clone(), data: data.clone() },
        };
        return land_between(
            store,
            &source,
            (from.place, to.place),
            local_is_source,
            slices,
            scratch,
        );
    }
    let Ok([Some(source), Some(target)]) = stores.get_disjoint_mut([from.store, to.store]) else {
        return;
    };
    land_between(target, source, (from.place, to.place), local_is_source, slices, scratch);
}

#[inline]
fn land_between(
    target: &mut RankStore,
    source: &RankStore,
    (from, to): (SegmentOffset, SegmentOffset),
    local_is_source: bool,
    slices: &[OpSlice],
    scratch: &mut LandingScratch,
) {
    match (&mut target.data, &source.data) {
        (StoreData::Bytes(target), StoreData::Bytes(source)) => {
            let (target, source) = (&mut target[to.segment], &source[from.segment]);
            for slice in slices {
                let (read, write) = sides(slice, local_is_source);
                let (read, write) = ((from.base + read) as usize, (to.base + write) as usize);
                let len = slice.len as usize;
                target[write..write + len].copy_from_slice(&source[read..read + len]);
            }
        }
        (StoreData::Cells(data), StoreData::Cells(cells)) => {
            let mut copy = cells::CellCopy {
                target: (&target.shape, data),
                source: (&source.shape, cells),
                partial: &mut scratch.partial,
                near: [0; 2],
            };
            for slice in slices {
                let (read, write) = sides(slice, local_is_source);
                copy.slice(
                    (from.segment, from.base + read),
                    (to.segment, to.base + write),
                    slice.len,
                );
            }
            copy.finish();
        }
        _ => panic!("all stores of a simulation have the same fidelity"),
    }
}

/// Offsets `(source, target)` of a slice.
#[inline]
const fn sides(slice: &OpSlice, local_is_source: bool) -> (u64, u64) {
    if local_is_source { (slice.local, slice.remote) } else { (slice.remote, slice.local) }
}
