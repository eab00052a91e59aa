//! Where the KV of one rank lies, prepared for looking up offsets.

use super::BlockRef;
use kvferry_engine::core::layout::{Geometry, HeadSlots, LayerLayout};
use kvferry_scenarios::run::CELL_LAYERS_MAX;
use std::fmt;
use std::ops::Range;

/// The piece of a block that one cell stands for: tokens times head slots. It has to divide what
/// any two engines of a simulation exchange, so it is the greatest common divisor of their block
/// sizes and of their head slots per rank; with one block size and one TP it is the whole block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceSize {
    pub tokens: u32,
    /// Head slots. With [`HeadSlots::Split`] and more than one TP a piece may not hold K and V.
    pub slots: u32,
}

/// A layout that the memory cannot have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeError(String);

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ShapeError {}

/// The layout of one rank's KV memory.
#[derive(Clone, Debug)]
pub struct MemoryShape {
    pub(super) segments: Vec<MemorySegment>,
    pub(super) layers: Vec<LayerShape>,
    pub(super) groups: Vec<Vec<u16>>,
    /// One per group.
    pub(super) grids: Vec<CellGrid>,
    pub(super) tensors: Vec<TensorShape>,
}

/// One registered buffer and the tensors in it.
#[derive(Clone, Debug, Default)]
pub(super) struct MemorySegment {
    pub(super) len: u64,
    /// Indices of its tensors, by base.
    tensors: Vec<u16>,
    /// Bases of the same.
    bases: Vec<u64>,
    /// Distance between blocks if the tensors are interleaved block by block.
    period: Option<u64>,
}

/// One layer, all strides in bytes.
#[derive(Clone, Debug)]
pub(super) struct LayerShape {
    pub(super) group: u16,
    pub(super) segment: u16,
    pub(super) tensor: u16,
    pub(super) base: u64,
    pub(super) blocks: u32,
    pub(super) slots: u32,
    pub(super) tokens: u32,
    /// Bytes per token and slot.
    pub(super) row: u64,
    /// Strides of block, slot and token.
    pub(super) stride: [u64; 3],
    pub(super) split: bool,
    /// K and V share a row.
    pub(super) fused: bool,
    pub(super) first_head: u32,
}

/// The memory of one layer, or of several whose groups share it.
#[derive(Clone, Debug)]
pub(super) struct TensorShape {
    /// The first layer in it, whose strides hold.
    pub(super) layer: u16,
    pub(super) base: u64,
    /// Bytes from the first to one past the last of a block.
    pub(super) block_bytes: u64,
    pub(super) stride: u64,
    pub(super) blocks: u32,
    /// Bytes of a piece if the pieces of a block follow one another in the order of its cells.
    pub(super) piece_bytes: Option<u64>,
}

/// The cells of a group: `[block][slot piece][token piece]`.
#[derive(Clone, Debug)]
pub(super) struct CellGrid {
    pub(super) blocks: u32,
    pub(super) unit: PieceSize,
    pub(super) slot_pieces: u32,
    pub(super) token_pieces: u32,
    /// What a slot piece holds: K or V and first head.
    pub(super) labels: Vec<u32>,
    /// Tensors of the group's first n layers, as bits, for each n.
    pub(super) prefix: Vec<u128>,
}

impl CellGrid {
    pub(super) fn per_block(&self) -> usize {
        (self.slot_pieces * self.token_pieces) as usize
    }

    pub(super) fn cells(&self) -> usize {
        self.blocks as usize * self.per_block()
    }
}

/// An offset taken apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorOffset {
    pub(super) tensor: u16,
    pub(super) block: u64,
    /// Offset within the block.
    pub(super) within: u64,
}

impl MemoryShape {
    /// The shape of rank `rank`, whose segments have the lengths `regions`; `unit` is used with
    /// cells only.
    ///
    /// # Errors
    /// A layer outside the geometry, its region or the groups.
    pub fn new(
        geometry: &Geometry,
        rank: u16,
        layers: &[LayerLayout],
        regions: &[u64],
        unit: PieceSize,
    ) -> Result<MemoryShape, ShapeError> {
        let mut shape = MemoryShape::plain(regions);
        shape.groups = geometry.groups.iter().map(|group| group.layers.clone()).collect();
        for (index, layout) in layers.iter().enumerate() {
            let layer = LayerShape::new(geometry, rank, index, layout)?;
            shape.add(index, layer)?;
        }
        for group in &geometry.groups {
            let grid = shape.grid(&group.layers, unit)?;
            shape.grids.push(grid);
        }
        for index in 0..shape.tensors.len() {
            shape.tensors[index].piece_bytes = shape.piece_bytes(index);
        }
        for segment in &mut shape.segments {
            segment.sort(&shape.tensors);
        }
        Ok(shape)
    }

    pub(super) fn plain(lens: &[u64]) -> MemoryShape {
        let segment = |len: &u64| MemorySegment { len: *len, ..MemorySegment::default() };
        MemoryShape {
            segments: lens.iter().map(segment).collect(),
            layers: Vec::new(),
            groups: Vec::new(),
            grids: Vec::new(),
            tensors: Vec::new(),
        }
    }

    fn add(&mut self, index: usize, mut layer: LayerShape) -> Result<(), ShapeError> {
        let what = |why: &str| ShapeError(format!("layer {index}: {why}"));
        let block_bytes = layer.stride[1] * u64::from(layer.slots - 1)
            + layer.stride[2] * u64::from(layer.tokens - 1)
            + layer.row;
        let end = layer.base + layer.stride[0] * u64::from(layer.blocks - 1) + block_bytes;
        let number = layer.segment;
        let segment =
            self.segments.get_mut(number as usize).ok_or_else(|| what("no such region"))?;
        if end > segment.len {
            return Err(what("ends outside its region"));
        }
        let same = |t: &&u16| self.tensors[**t as usize].base == layer.base;
        layer.tensor = match segment.tensors.iter().find(same) {
            Some(tensor) => *tensor,
            None => {
                let tensor = self.tensors.len() as u16;
                segment.tensors.push(tensor);
                self.tensors.push(TensorShape {
                    layer: index as u16,
                    base: layer.base,
                    block_bytes,
                    stride: layer.stride[0],
                    blocks: layer.blocks,
                    piece_bytes: None,
                });
                tensor
            }
        };
        self.layers.push(layer);
        Ok(())
    }

    fn grid(&self, layers: &[u16], unit: PieceSize) -> Result<CellGrid, ShapeError> {
        let first = layers.first().and_then(|layer| self.layers.get(*layer as usize));
        let Some(first) = first else { return Err(ShapeError("a group without layers".into())) };
        let unit =
            PieceSize { tokens: unit.tokens.min(first.tokens), slots: unit.slots.min(first.slots) };
        if unit.tokens == 0 || unit.slots == 0 {
            return Err(ShapeError("the piece of a block has no tokens or no head slots".into()));
        }
        if first.tokens % unit.tokens != 0 || first.slots % unit.slots != 0 {
            return Err(ShapeError(format!(
                "pieces of {} tokens and {} head slots do not divide a block of {} and {}",
                unit.tokens, unit.slots, first.tokens, first.slots
            )));
        }
        let slot_pieces = first.slots / unit.slots;
        let mut prefix = vec![0];
        for layer in layers {
            let tensor = self.layers[*layer as usize].tensor;
            let bit = 1u128.checked_shl(u32::from(tensor)).unwrap_or(0);
            prefix.push(prefix.last().unwrap_or(&0) | bit);
        }
        Ok(CellGrid {
            blocks: first.blocks,
            unit,
            slot_pieces,
            token_pieces: first.tokens / unit.tokens,
            labels: (0..slot_pieces).map(|piece| first.label(piece * unit.slots)).collect(),
            prefix,
        })
    }

    fn piece_bytes(&self, tensor: usize) -> Option<u64> {
        let tensor = &self.tensors[tensor];
        let layer = &self.layers[tensor.layer as usize];
        let grid = &self.grids[layer.group as usize];
        let PieceSize { tokens, slots } = grid.unit;
        let (row, [_, slot, token]) = (layer.row, layer.stride);
        let slot_major = token == row && slot == row * u64::from(layer.tokens);
        let token_major = slot == row && token == row * u64::from(layer.slots);
        let linear = slot_major && (slots == 1 || tokens == layer.tokens)
            || token_major && slots == layer.slots;
        linear.then(|| row * u64::from(tokens) * u64::from(slots))
    }

    /// Appends the blocks that slices touch. Layers that share a block table have the same blocks,
    /// so of each group only the layer that comes first is looked at; neighbours may repeat.
    pub(crate) fn blocks(
        &self,
        (segment, base): (u32, u64),
        slices: &[super::OpSlice],
        side: impl Fn(&super::OpSlice) -> (u64, u64),
        into: &mut Vec<BlockRef>,
    ) {
        let mut first: Option<(u16, Range<u64>)> = None;
        let mut near = 0;
        let alone = self.groups.len() == 1 && self.segments[segment as usize].period.is_none();
        for slice in slices {
            let (offset, len) = side(slice);
            let mut at = base + offset;
            if let Some((_, range)) = &first
                && alone
                && !range.contains(&at)
            {
                continue;
            }
            let end = at + len;
            while at < end {
                let Some(spot) = self.spot(segment as usize, at, &mut near) else { break };
                let tensor = &self.tensors[spot.tensor as usize];
                let group = self.layers[tensor.layer as usize].group;
                let far = tensor.base + tensor.stride * u64::from(tensor.blocks);
                let (seen, _) = first.get_or_insert((spot.tensor, tensor.base..far));
                if alone && *seen != spot.tensor {
                    break;
                }
                let block = BlockRef { group, block: spot.block as u32 };
                if into.last() != Some(&block) {
                    into.push(block);
                }
                at += tensor.block_bytes - spot.within;
            }
        }
    }

    /// Refuses what cells cannot express.
    pub(super) fn cells_fit(&self) -> Result<(), ShapeError> {
        let (count, most) = (self.tensors.len(), CELL_LAYERS_MAX as usize);
        if count > most {
            return Err(ShapeError(format!("{count} layers, cells can tell at most {most} apart")));
        }
        for layer in &self.layers {
            let owner = &self.layers[self.tensors[layer.tensor as usize].layer as usize];
            if (owner.blocks, owner.slots, owner.tokens)
                != (layer.blocks, layer.slots, layer.tokens)
            {
                return Err(ShapeError("layers of different shape share memory".into()));
            }
        }
        Ok(())
    }

    /// Takes an offset of a segment apart; none for bytes that belong to no block. `near` is where
    /// the tensor was found last, and is kept up to date: most offsets lie close together.
    #[inline]
    pub(super) fn spot(
        &self,
        segment: usize,
        offset: u64,
        near: &mut usize,
    ) -> Option<TensorOffset> {
        let segment = &self.segments[segment];
        let first = *segment.bases.first()?;
        let (turn, offset) = match segment.period {
            Some(period) => {
                ((offset.checked_sub(first)?) / period, first + (offset - first) % period)
            }
            None => (0, offset),
        };
        let bases = &segment.bases;
        let found = bases.get(*near).is_some_and(|base| *base <= offset)
            && bases.get(*near + 1).is_none_or(|base| offset < *base);
        if !found {
            *near = bases.partition_point(|base| *base <= offset).checked_sub(1)?;
        }
        let number = segment.tensors[*near];
        let tensor = &self.tensors[number as usize];
        let rest = offset - tensor.base;
        let (block, within) = match segment.period {
            Some(_) => (turn, rest),
            None => {
                let block = rest / tensor.stride;
                (block, rest - block * tensor.stride)
            }
        };
        let inside = block < u64::from(tensor.blocks) && within < tensor.block_bytes;
        inside.then_some(TensorOffset { tensor: number, block, within })
    }
}

impl MemorySegment {
    fn sort(&mut self, tensors: &[TensorShape]) {
        self.tensors.sort_by_key(|t| tensors[*t as usize].base);
        self.bases = self.tensors.iter().map(|t| tensors[*t as usize].base).collect();
        let overlaps = self.tensors.windows(2).any(|pair| {
            let (a, b) = (&tensors[pair[0] as usize], &tensors[pair[1] as usize]);
            b.base < a.base + a.stride * u64::from(a.blocks - 1) + a.block_bytes
        });
        self.period = overlaps.then(|| tensors[self.tensors[0] as usize].stride);
    }
}

impl LayerShape {
    fn new(
        geometry: &Geometry,
        rank: u16,
        index: usize,
        layout: &LayerLayout,
    ) -> Result<LayerShape, ShapeError> {
        let what = |why: &str| ShapeError(format!("layer {index}: {why}"));
        let group = geometry.groups.iter().position(|g| g.layers.contains(&(index as u16)));
        let group = group.ok_or_else(|| what("in no group"))? as u16;
        let [blocks, slots, tokens, elements] = layout.shape;
        if layout.shape.contains(&0) || layout.element == 0 || geometry.tp == 0 {
            return Err(what("empty"));
        }
        let element = u64::from(layout.element);
        let head = u32::from(rank) * u32::from(geometry.kv_heads) / u32::from(geometry.tp);
        Ok(LayerShape {
            group,
            segment: layout.region,
            tensor: 0,
            base: layout.base,
            blocks,
            slots,
            tokens,
            row: u64::from(elements) * element,
            stride: [0, 1, 2].map(|axis| layout.stride[axis] * element),
            split: layout.slots == HeadSlots::Split,
            fused: layout.slots == HeadSlots::Fused && !geometry.latent && elements % 2 == 0,
            first_head: if geometry.latent { 0 } else { head },
        })
    }

    /// What a slot holds: twice the logical head, plus one for V.
    pub(super) fn label(&self, slot: u32) -> u32 {
        if !self.split {
            return 2 * (self.first_head + slot);
        }
        let heads = (self.slots / 2).max(1);
        2 * (self.first_head + slot % heads) + slot / heads
    }

    /// Byte offset of a row in its segment.
    #[inline]
    pub(super) fn row_at(&self, block: u32, slot: u32, token: u32) -> usize {
        let [b, h, n] = self.stride;
        (self.base + b * u64::from(block) + h * u64::from(slot) + n * u64::from(token)) as usize
    }
}
