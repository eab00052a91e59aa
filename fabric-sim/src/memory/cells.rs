//! One cell per piece of a block: which content it has, and in which layers.

use super::shape::{CellGrid, MemoryShape, TensorOffset};
use super::{BlockTokens, ContentMismatch, MismatchKind};
use kvferry_scenarios::decide::mix;
use kvferry_scenarios::run::CELL_LAYERS_MAX;
use std::collections::BTreeMap;
use std::ops::Range;

/// Layers that the mask of a cell can tell apart.
const LAYERS_MAX: usize = CELL_LAYERS_MAX as usize;

/// 32 bits of stamp above 96 bits of layers: 16 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cell(u128);

const LAYERS: u128 = (1 << LAYERS_MAX) - 1;

impl Cell {
    #[inline]
    fn new(stamp: u32, layers: u128) -> Cell {
        Cell(u128::from(stamp) << LAYERS_MAX | layers)
    }

    #[inline]
    fn stamp(self) -> u32 {
        (self.0 >> LAYERS_MAX) as u32
    }

    /// Gives `layers` the content `stamp`; layers with other content have it no more.
    #[inline]
    fn add(&mut self, stamp: u32, layers: u128) {
        let kept = if self.stamp() == stamp { self.0 & LAYERS } else { 0 };
        *self = Cell::new(stamp, kept | layers);
    }

    /// Takes over one layer of `source`, or the lack of it.
    #[inline]
    fn take(&mut self, to: u16, source: Cell, from: u16) {
        if source.0 >> from & 1 == 1 {
            self.add(source.stamp(), 1 << to);
        } else {
            self.0 &= !(1 << to);
        }
    }
}

/// The stamp of one piece: content, position, tokens computed, head. Never 0, the empty cell.
#[inline]
fn piece_stamp(stamp: u64, position: u32, tokens: u32, label: u32) -> u32 {
    let place = u64::from(position) << 32 | u64::from(tokens) << 20 | u64::from(label);
    mix(stamp, place) as u32 | 1
}

/// Calls `each(index of a cell, its position, its stamp)` for the pieces that `at` touches.
#[inline]
fn pieces(
    grid: &CellGrid,
    at: &BlockTokens,
    stamp: u64,
    mut each: impl FnMut(usize, u32, u32) -> bool,
) {
    let (Range { start, end }, unit) = (at.tokens.clone(), grid.unit.tokens);
    let base = at.block as usize * grid.per_block();
    for piece in start / unit..end.div_ceil(unit) {
        let position = at.first + piece * unit;
        let tokens = (end - piece * unit).min(unit);
        for (slot, label) in grid.labels.iter().enumerate() {
            let cell = base + slot * grid.token_pieces as usize + piece as usize;
            if !each(cell, position, piece_stamp(stamp, position, tokens, *label)) {
                return;
            }
        }
    }
}

/// What arrived of a layer of a piece with some operations, while others are to bring the rest.
#[derive(Clone, Debug)]
struct PartialPiece {
    stamp: u32,
    /// Start and end of its bytes, counted row after row; apart from one another.
    bytes: BTreeMap<u64, u64>,
}

impl PartialPiece {
    fn add(&mut self, (mut start, mut end): (u64, u64)) {
        let touching = self.bytes.range(..=end).filter(|(_, until)| **until >= start);
        let over: Vec<(u64, u64)> = touching.map(|(from, until)| (*from, *until)).collect();
        for (from, until) in over {
            self.bytes.remove(&from);
            (start, end) = (start.min(from), end.max(until));
        }
        self.bytes.insert(start, end);
    }
}

/// The cells of a store.
#[derive(Clone, Debug)]
pub(super) struct CellStore {
    /// One array per grid of the shape.
    grids: Vec<Vec<Cell>>,
    /// By group, cell and tensor; what is written otherwise in between ends it.
    pending: BTreeMap<(u16, usize, u16), PartialPiece>,
}

impl CellStore {
    pub(super) fn new(shape: &MemoryShape) -> CellStore {
        let grids = shape.grids.iter().map(|grid| vec![Cell::default(); grid.cells()]).collect();
        CellStore { grids, pending: BTreeMap::new() }
    }

    /// A piece gets other content in all its layers.
    #[inline]
    fn overwrite(&mut self, group: usize, cell: usize) {
        if !self.pending.is_empty() {
            let place = (group as u16, cell, 0)..=(group as u16, cell, u16::MAX);
            let over: Vec<_> = self.pending.range(place).map(|(key, _)| *key).collect();
            over.iter().for_each(|key| drop(self.pending.remove(key)));
        }
    }

    /// Some bytes of a layer of a piece arrive from `source`, of `all` that it has; true once all
    /// have, from one operation or several.
    fn arrive(
        &mut self,
        key: (u16, usize, u16),
        source: Cell,
        rows: &[PartialRow],
        all: u64,
    ) -> bool {
        let stamp = source.stamp();
        let fresh = || PartialPiece { stamp, bytes: BTreeMap::new() };
        let pending = self.pending.entry(key).or_insert_with(fresh);
        if pending.stamp != stamp {
            *pending = fresh();
        }
        // They are sorted: what follows one another is one.
        let mut part = rows[0].bytes;
        for row in rows {
            if row.bytes.0 > part.1 {
                pending.add(part);
                part = row.bytes;
            }
            part.1 = part.1.max(row.bytes.1);
        }
        pending.add(part);
        let whole = pending.bytes.get(&0) == Some(&all);
        if whole {
            self.pending.remove(&key);
        }
        whole
    }
}

/// Gives the pieces that `at` touches the content `stamp` in some layers.
pub(super) fn fill(
    shape: &MemoryShape,
    data: &mut CellStore,
    at: &BlockTokens,
    layers: Range<u16>,
    stamp: u64,
) {
    let (grid, members) = (&shape.grids[at.group], &shape.groups[at.group]);
    let first = members.partition_point(|layer| *layer < layers.start);
    let last = members.partition_point(|layer| *layer < layers.end);
    let layers = grid.prefix[last.max(first)] & !grid.prefix[first];
    pieces(grid, at, stamp, |cell, _, stamp| {
        data.overwrite(at.group, cell);
        data.grids[at.group][cell].add(stamp, layers);
        true
    });
}

/// Checks the pieces that `at` touches in all layers of the group.
pub(super) fn check(
    shape: &MemoryShape,
    data: &CellStore,
    at: &BlockTokens,
    stamp: u64,
) -> Result<(), ContentMismatch> {
    let grid = &shape.grids[at.group];
    let all = *grid.prefix.last().unwrap_or(&0);
    let mut wrong = None;
    pieces(grid, at, stamp, |cell, position, stamp| {
        let cell = data.grids[at.group][cell];
        let same = cell.stamp() == stamp;
        let missing = if same { all & !cell.0 } else { all };
        if missing != 0 {
            let found = if same { MismatchKind::Missing } else { MismatchKind::Foreign };
            wrong = Some((missing.trailing_zeros() as u16, position, found));
        }
        missing == 0
    });
    let Some((tensor, position, found)) = wrong else { return Ok(()) };
    let in_group = |layer: &&u16| shape.layers[**layer as usize].tensor == tensor;
    let layer = shape.groups[at.group].iter().find(in_group).copied().unwrap_or(0);
    Err(ContentMismatch { at: at.clone(), layer, position, found })
}

/// A row of a piece, or some of its bytes, that an operation moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PartialRow {
    /// Tensor, group and cell of the target.
    target: (u16, u16, usize),
    /// Tensor, group and cell of the source; none if the rows do not correspond.
    source: Option<(u16, u16, usize)>,
    /// Start and end of its bytes, counted row after row of the piece.
    bytes: (u64, u64),
    /// Bytes of a row.
    row: u64,
}

/// One operation that lands.
pub(super) struct CellCopy<'a> {
    pub(super) target: (&'a MemoryShape, &'a mut CellStore),
    pub(super) source: (&'a MemoryShape, &'a CellStore),
    pub(super) partial: &'a mut Vec<PartialRow>,
    /// Where the tensors of source and target were found last.
    pub(super) near: [usize; 2],
}

impl CellCopy<'_> {
    /// Lands `len` bytes from `from` to `to`, each `(segment, offset)`.
    #[inline]
    pub(super) fn slice(
        &mut self,
        (from_segment, mut from): (usize, u64),
        (to_segment, mut to): (usize, u64),
        mut len: u64,
    ) {
        while len > 0 {
            let [from_near, to_near] = &mut self.near;
            let source = self.source.0.spot(from_segment, from, from_near);
            let Some(target) = self.target.0.spot(to_segment, to, to_near) else { return };
            let step = match source {
                Some(source) => self.run(source, target, len).min(len),
                None => self.row(None, target, len).min(len),
            };
            from += step;
            to += step;
            len -= step;
        }
    }

    /// Lands a run of whole pieces if there is one, else one row; returns its bytes.
    fn run(&mut self, source: TensorOffset, target: TensorOffset, len: u64) -> u64 {
        let from = &self.source.0.tensors[source.tensor as usize];
        let to = &self.target.0.tensors[target.tensor as usize];
        let (Some(piece), true) = (to.piece_bytes, from.piece_bytes == to.piece_bytes) else {
            return self.row(Some(source), target, len);
        };
        let (read, write) = (source.within / piece, target.within / piece);
        if len < piece
            || !source.within.is_multiple_of(piece)
            || !target.within.is_multiple_of(piece)
        {
            return self.row(Some(source), target, len);
        }
        let left = |tensor: &super::shape::TensorShape, spot: &TensorOffset| {
            if tensor.stride == tensor.block_bytes {
                (u64::from(tensor.blocks) - spot.block) * tensor.stride - spot.within
            } else {
                tensor.block_bytes - spot.within
            }
        };
        let count = (len.min(left(from, &source)).min(left(to, &target)) / piece) as usize;
        let from_layer = &self.source.0.layers[from.layer as usize];
        let to_layer = &self.target.0.layers[to.layer as usize];
        let (from_grid, to_grid) = (from_layer.group as usize, to_layer.group as usize);
        let read =
            source.block as usize * self.source.0.grids[from_grid].per_block() + read as usize;
        let write =
            target.block as usize * self.target.0.grids[to_grid].per_block() + write as usize;
        let same_layer = from.layer == to.layer;
        let (from_bit, to_bit) = (source.tensor, target.tensor);
        if !self.target.1.pending.is_empty() {
            let over = (write..write + count).map(|cell| (to_grid as u16, cell, to_bit));
            over.for_each(|key| drop(self.target.1.pending.remove(&key)));
        }
        let cells = &mut self.target.1.grids[to_grid][write..write + count];
        let sources = &self.source.1.grids[from_grid][read..read + count];
        for (cell, source) in cells.iter_mut().zip(sources) {
            cell.take(to_bit, if same_layer { *source } else { Cell::default() }, from_bit);
        }
        count as u64 * piece
    }

    /// Notes one row, or what the slice has of it; returns its bytes.
    fn row(&mut self, source: Option<TensorOffset>, target: TensorOffset, len: u64) -> u64 {
        let to = CellRow::of(self.target.0, target);
        let from = source.map(|spot| CellRow::of(self.source.0, spot));
        let place = |row: &CellRow| (row.layer, row.piece, row.rest);
        let source = from.filter(|from| place(from) == place(&to)).map(|from| from.cell);
        let unit = self.target.0.grids[to.cell.1 as usize].unit;
        let row = u64::from(to.piece.0 * unit.tokens + to.piece.1);
        let count = to.bytes.saturating_sub(to.rest).clamp(1, len);
        let start = row * to.bytes + to.rest;
        let bytes = (start, start + count);
        self.partial.push(PartialRow { target: to.cell, source, bytes, row: to.bytes });
        count
    }

    /// Lands the pieces of which all rows have arrived; the layer of an incomplete one is lost,
    /// until other operations have brought the rest.
    pub(super) fn finish(self) {
        self.partial.sort_unstable();
        for rows in self.partial.chunk_by(|a, b| a.target == b.target) {
            let (tensor, group, cell) = rows[0].target;
            let unit = self.target.0.grids[group as usize].unit;
            let key = (group, cell, tensor);
            let target = &mut *self.target.1;
            let alike = rows.iter().all(|row| row.source == rows[0].source);
            let source = rows[0].source.filter(|_| alike).and_then(|(bit, group, cell)| {
                let source = self.source.1.grids[group as usize][cell];
                (source.0 >> bit & 1 == 1).then_some((source, bit))
            });
            let (source, bit) = match source {
                Some((source, bit)) => {
                    let old = target.grids[group as usize][cell];
                    let same = old.stamp() == source.stamp() && old.0 >> tensor & 1 == 1;
                    let all = u64::from(unit.tokens * unit.slots) * rows[0].row;
                    match same || target.arrive(key, source, rows, all) {
                        true => (source, bit),
                        false => (Cell::default(), 0),
                    }
                }
                None => {
                    target.pending.remove(&key);
                    (Cell::default(), 0)
                }
            };
            target.grids[group as usize][cell].take(tensor, source, bit);
        }
        self.partial.clear();
    }
}

/// One token of one head slot.
struct CellRow {
    layer: u16,
    /// Tensor, group and cell.
    cell: (u16, u16, usize),
    /// Slot and token within the piece.
    piece: (u32, u32),
    /// Bytes before the offset.
    rest: u64,
    bytes: u64,
}

impl CellRow {
    fn of(shape: &MemoryShape, spot: TensorOffset) -> CellRow {
        let layer_index = shape.tensors[spot.tensor as usize].layer;
        let layer = &shape.layers[layer_index as usize];
        let grid = &shape.grids[layer.group as usize];
        let [_, by_slot, by_token] = layer.stride;
        let (slot, token, rest) = if by_slot > by_token {
            let rest = spot.within % by_slot;
            (spot.within / by_slot, rest / by_token, rest % by_token)
        } else {
            let rest = spot.within % by_token;
            (rest / by_slot, spot.within / by_token, rest % by_slot)
        };
        let (slot, token) = (slot as u32, token as u32);
        let piece = slot / grid.unit.slots * grid.token_pieces + token / grid.unit.tokens;
        let cell = spot.block as usize * grid.per_block() + piece as usize;
        CellRow {
            layer: layer_index,
            cell: (spot.tensor, layer.group, cell),
            piece: (slot % grid.unit.slots, token % grid.unit.tokens),
            rest,
            bytes: layer.row,
        }
    }
}
