//! One cell per piece of a block: which content it has, and in which layers.

use super::shape::{Grid, Shape, Spot};
use super::{BlockTokens, Found, Wrong};
use scenarios::decide::mix;
use scenarios::run::CELL_LAYERS_MAX;
use std::ops::Range;

/// Layers that the mask of a cell can tell apart.
pub(super) const LAYERS_MAX: usize = CELL_LAYERS_MAX as usize;

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
    grid: &Grid,
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

/// Gives the pieces that `at` touches the content `stamp` in some layers.
pub(super) fn fill(
    shape: &Shape,
    data: &mut [Vec<Cell>],
    at: &BlockTokens,
    layers: Range<u16>,
    stamp: u64,
) {
    let (grid, members) = (&shape.grids[at.group], &shape.groups[at.group]);
    let first = members.partition_point(|layer| *layer < layers.start);
    let last = members.partition_point(|layer| *layer < layers.end);
    let layers = grid.prefix[last.max(first)] & !grid.prefix[first];
    pieces(grid, at, stamp, |cell, _, stamp| {
        data[at.group][cell].add(stamp, layers);
        true
    });
}

/// Checks the pieces that `at` touches in all layers of the group.
pub(super) fn check(
    shape: &Shape,
    data: &[Vec<Cell>],
    at: &BlockTokens,
    stamp: u64,
) -> Result<(), Wrong> {
    let grid = &shape.grids[at.group];
    let all = *grid.prefix.last().unwrap_or(&0);
    let mut wrong = None;
    pieces(grid, at, stamp, |cell, position, stamp| {
        let cell = data[at.group][cell];
        let same = cell.stamp() == stamp;
        let missing = if same { all & !cell.0 } else { all };
        if missing != 0 {
            let found = if same { Found::Missing } else { Found::Foreign };
            wrong = Some((missing.trailing_zeros() as u16, position, found));
        }
        missing == 0
    });
    let Some((tensor, position, found)) = wrong else { return Ok(()) };
    let in_group = |layer: &&u16| shape.layers[**layer as usize].tensor == tensor;
    let layer = shape.groups[at.group].iter().find(in_group).copied().unwrap_or(0);
    Err(Wrong { at: at.clone(), layer, position, found })
}

/// Rows of one piece that one operation moves in several slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Partial {
    /// Tensor, group and cell of the target.
    target: (u16, u16, usize),
    /// Tensor, group and cell of the source; none if the rows do not correspond.
    source: Option<(u16, u16, usize)>,
}

/// One operation that lands.
pub(super) struct Copy<'a> {
    pub(super) target: (&'a Shape, &'a mut [Vec<Cell>]),
    pub(super) source: (&'a Shape, &'a [Vec<Cell>]),
    pub(super) partial: &'a mut Vec<Partial>,
    /// Where the tensors of source and target were found last.
    pub(super) near: [usize; 2],
}

impl Copy<'_> {
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
    fn run(&mut self, source: Spot, target: Spot, len: u64) -> u64 {
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
        let left = |tensor: &super::shape::Tensor, spot: &Spot| {
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
        let cells = &mut self.target.1[to_grid][write..write + count];
        let sources = &self.source.1[from_grid][read..read + count];
        for (cell, source) in cells.iter_mut().zip(sources) {
            cell.take(to_bit, if same_layer { *source } else { Cell::default() }, from_bit);
        }
        count as u64 * piece
    }

    /// Notes one row; returns its bytes.
    fn row(&mut self, source: Option<Spot>, target: Spot, len: u64) -> u64 {
        let to = Row::of(self.target.0, target);
        let from = source.map(|spot| Row::of(self.source.0, spot));
        let fits =
            from.filter(|from| (from.layer, from.piece, from.rest) == (to.layer, to.piece, 0));
        let source = fits.filter(|_| to.rest == 0 && len >= to.bytes).map(|from| from.cell);
        self.partial.push(Partial { target: to.cell, source });
        to.bytes.saturating_sub(to.rest).max(1)
    }

    /// Lands the pieces of which all rows arrived; the layer of an incomplete one is lost.
    pub(super) fn finish(self) {
        self.partial.sort_unstable();
        for rows in self.partial.chunk_by(|a, b| a.target == b.target) {
            let (tensor, group, cell) = rows[0].target;
            let grid = &self.target.0.grids[group as usize];
            let whole = rows.len() as u32 == grid.unit.tokens * grid.unit.slots
                && rows.iter().all(|row| row.source == rows[0].source);
            let (source, bit) = match rows[0].source.filter(|_| whole) {
                Some((bit, group, cell)) => (self.source.1[group as usize][cell], bit),
                None => (Cell::default(), 0),
            };
            self.target.1[group as usize][cell].take(tensor, source, bit);
        }
        self.partial.clear();
    }
}

/// One token of one head slot.
struct Row {
    layer: u16,
    /// Tensor, group and cell.
    cell: (u16, u16, usize),
    /// Slot and token within the piece.
    piece: (u32, u32),
    /// Bytes before the offset.
    rest: u64,
    bytes: u64,
}

impl Row {
    fn of(shape: &Shape, spot: Spot) -> Row {
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
        Row {
            layer: layer_index,
            cell: (spot.tensor, layer.group, cell),
            piece: (slot % grid.unit.slots, token % grid.unit.tokens),
            rest,
            bytes: layer.row,
        }
    }
}
