//! How the bytes of one block lie on both sides, as nested loops over contiguous runs.

use super::geometry::{HeadSlots, LayerLayout};
use super::slices::Slices;

/// One value for each side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LocalRemote {
    pub(super) local: u64,
    pub(super) remote: u64,
}

impl LocalRemote {
    /// Offsets wrap instead of being checked: the far end of every layer was checked to fit its
    /// region when the peer was, and block ids are checked before.
    #[inline]
    pub(super) fn plus(self, other: LocalRemote) -> LocalRemote {
        LocalRemote {
            local: self.local.wrapping_add(other.local),
            remote: self.remote.wrapping_add(other.remote),
        }
    }

    /// `self * factor` on both sides, see [`LocalRemote::plus`].
    #[inline]
    pub(super) fn times(self, factor: u64) -> LocalRemote {
        LocalRemote {
            local: self.local.wrapping_mul(factor),
            remote: self.remote.wrapping_mul(factor),
        }
    }
}

/// A loop: `count` steps of `stride` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    count: u64,
    stride: LocalRemote,
}

impl Axis {
    const ONE: Axis = Axis { count: 1, stride: LocalRemote { local: 0, remote: 0 } };
}

/// Up to three loops, the outermost first, filled up with [`Axis::ONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loops([Axis; 3]);

impl Loops {
    fn new(axes: &[Axis]) -> Loops {
        let mut loops = [Axis::ONE; 3];
        loops[..axes.len()].copy_from_slice(axes);
        Loops(loops)
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|axis| axis.count).product()
    }

    fn is_one(&self) -> bool {
        self.0[0].count == 1
    }

    #[inline]
    fn each(&self, mut body: impl FnMut(LocalRemote)) {
        let [a, b, c] = self.0;
        for i in 0..a.count {
            for j in 0..b.count {
                let start = a.stride.times(i).plus(b.stride.times(j));
                for k in 0..c.count {
                    body(start.plus(c.stride.times(k)));
                }
            }
        }
    }
}

/// Contiguous runs of some tokens of a block: `outer`, then the blocks, then `inner`. The order is
/// that of the local offsets, so what is contiguous on both sides comes one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LoopNest {
    outer: Loops,
    inner: Loops,
    len: u64,
}

/// How a layer of one rank maps to the same layer of a peer's rank, without where it starts.
/// Layers of equal form differ in nothing but a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerMapping {
    /// Bytes from block to block.
    block: LocalRemote,
    /// Bytes from unit to unit inside a block.
    unit: LocalRemote,
    /// Bytes from token to token.
    token: LocalRemote,
    /// Loops over K and V, and over heads.
    parts: [Axis; 2],
    /// Bytes that belong together per token.
    row: u64,
    /// Tokens of a unit.
    tokens: u64,
    whole: LoopNest,
}

/// KV heads to map: the first slots of both sides, and how many.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadRange {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) count: u64,
}

/// Bytes from K to V of the same head.
fn kv_distance(layer: &LayerLayout, head: u64, row: u64) -> u64 {
    match layer.slots {
        HeadSlots::Fused => row,
        HeadSlots::Split => u64::from(layer.shape[1] / 2) * head,
    }
}

impl LayerMapping {
    /// The form of two checked layers and where it starts on both sides. A unit of `tokens` tokens
    /// is what a block of either side is a multiple of.
    pub(super) fn new(
        local: &LayerLayout,
        remote: &LayerLayout,
        heads: HeadRange,
        tokens: u64,
    ) -> (LayerMapping, LocalRemote) {
        let ([block_l, head_l, token_l], [block_r, head_r, token_r]) =
            (local.byte_strides(), remote.byte_strides());
        let row = local.row_bytes().min(remote.row_bytes());
        let head = LocalRemote { local: head_l, remote: head_r };
        let kv = LocalRemote {
            local: kv_distance(local, head_l, row),
            remote: kv_distance(remote, head_r, row),
        };
        let fused = local.slots == HeadSlots::Fused && remote.slots == HeadSlots::Fused;
        let token = LocalRemote { local: token_l, remote: token_r };
        let mut form = LayerMapping {
            block: LocalRemote { local: block_l, remote: block_r },
            unit: token.times(tokens),
            token,
            parts: [
                if fused { Axis::ONE } else { Axis { count: 2, stride: kv } },
                Axis { count: heads.count, stride: head },
            ],
            row,
            tokens,
            whole: LoopNest { outer: Loops::new(&[]), inner: Loops::new(&[]), len: 0 },
        };
        form.whole = form.nest(tokens);
        let start = LocalRemote {
            local: local.base + heads.local * head_l,
            remote: remote.base + heads.remote * head_r,
        };
        (form, start)
    }

    /// Tokens of a unit; of a state its rows.
    pub(super) fn unit_rows(&self) -> u64 {
        self.tokens
    }

    /// Bytes and ranges of a whole unit, and ranges per token of one that is not whole.
    pub(super) fn footprint(&self) -> (u64, u64, u64) {
        let ranges = self.whole.outer.count() * self.whole.inner.count();
        (ranges * self.whole.len, ranges, self.parts[0].count * self.parts[1].count)
    }

    /// Runs of `tokens` tokens of one block.
    fn nest(&self, tokens: u64) -> LoopNest {
        let mut axes = [self.parts[0], self.parts[1], Axis { count: tokens, stride: self.token }];
        axes.sort_unstable_by_key(|axis| std::cmp::Reverse(axis.stride.local));
        let mut kept = [Axis::ONE; 3];
        let mut count = 0;
        for axis in axes.into_iter().filter(|axis| axis.count > 1) {
            kept[count] = axis;
            count += 1;
        }
        let mut len = self.row;
        while count > 0 && kept[count - 1].stride == (LocalRemote { local: len, remote: len }) {
            count -= 1;
            len *= kept[count].count;
        }
        let outer = kept[..count].partition_point(|axis| axis.stride.local >= self.block.local);
        LoopNest { outer: Loops::new(&kept[..outer]), inner: Loops::new(&kept[outer..count]), len }
    }

    /// Calls `each(offset, length)` for the ranges that tokens `rows` of a unit have on one side, in
    /// the order of the local side. The unit begins at `origin` there, which `of` says.
    pub(super) fn ranges(
        &self,
        (origin, of): (u64, fn(LocalRemote) -> u64),
        rows: std::ops::Range<u64>,
        mut each: impl FnMut(u64, u64),
    ) {
        let nest = self.nest(rows.end - rows.start);
        let origin = origin.wrapping_add(of(self.token.times(rows.start)));
        let outer = match planted!("digests-stay-inside-of-blocks") {
            true => Loops::new(&[]),
            false => nest.outer,
        };
        outer.each(|outer| {
            nest.inner.each(|inner| each(origin.wrapping_add(of(outer.plus(inner))), nest.len));
        });
    }

    /// Where a unit of a block lies on one side, relative to the layer.
    pub(super) fn unit_at(&self, block: u32, unit: u64, of: fn(LocalRemote) -> u64) -> u64 {
        let block = of(self.block).wrapping_mul(u64::from(block));
        block.wrapping_add(of(self.unit).wrapping_mul(unit))
    }

    /// Appends the last `rows` tokens of the first unit of `places`, which has `tokens` tokens.
    pub(super) fn emit_rows(
        &self,
        start: LocalRemote,
        places: BlockPairs<'_>,
        (rows, tokens): (u64, u64),
        out: &mut Slices,
    ) {
        let nest = self.nest(rows);
        let skipped = self.token.times(tokens - rows);
        let mut tail = OpenRange::open(out);
        BlockPairs { units: 1, ..places }.each(self, |unit| {
            let origin = start.plus(unit).plus(skipped);
            nest.outer.each(|outer| {
                nest.inner.each(|inner| tail.push(origin.plus(outer).plus(inner), nest.len));
            });
        });
        tail.close();
    }

    /// Appends all units of `places`.
    pub(super) fn emit(&self, start: LocalRemote, places: BlockPairs<'_>, out: &mut Slices) {
        let nest = &self.whole;
        let mut tail = OpenRange::open(out);
        nest.outer.each(|outer| {
            let origin = start.plus(outer);
            if nest.inner.is_one() {
                places.each(self, |unit| tail.push(origin.plus(unit), nest.len));
            } else {
                places.each(self, |unit| {
                    let origin = origin.plus(unit);
                    nest.inner.each(|inner| tail.push(origin.plus(inner), nest.len));
                });
            }
        });
        tail.close();
    }
}

/// Units of one side in logical order.
#[derive(Clone, Copy, Debug)]
pub(super) struct SideBlocks<'a> {
    /// Block ids, each below the pool size.
    pub(super) ids: &'a [u32],
    /// First unit, counted in the first block.
    pub(super) skip: u64,
    /// Units per block.
    pub(super) per: u64,
}

impl SideBlocks<'_> {
    fn after_first(self) -> Self {
        match self.skip + 1 == self.per {
            true => SideBlocks { ids: &self.ids[1..], skip: 0, per: self.per },
            false => SideBlocks { skip: self.skip + 1, ..self },
        }
    }

    /// The offset of each unit; `block` and `unit` are the distances in bytes.
    #[inline]
    fn offsets(&self, block: u64, unit: u64) -> impl Iterator<Item = u64> {
        let per = self.per;
        let mut within = self.skip;
        let mut ids = self.ids.iter();
        let mut base = ids.next().map_or(0, |id| u64::from(*id).wrapping_mul(block));
        std::iter::from_fn(move || {
            if within == per {
                base = u64::from(*ids.next()?).wrapping_mul(block);
                within = 0;
            }
            let offset = base.wrapping_add(within.wrapping_mul(unit));
            within += 1;
            Some(offset)
        })
    }
}

/// The same units on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockPairs<'a> {
    pub(super) local: SideBlocks<'a>,
    pub(super) remote: SideBlocks<'a>,
    pub(super) units: usize,
}

impl BlockPairs<'_> {
    /// All but the first unit.
    pub(super) fn after_first(self) -> Self {
        BlockPairs {
            local: self.local.after_first(),
            remote: self.remote.after_first(),
            units: self.units - 1,
        }
    }

    #[inline]
    fn each(&self, form: &LayerMapping, mut body: impl FnMut(LocalRemote)) {
        let LocalRemote { local, remote } = form.block;
        if self.local.per == 1 && self.remote.per == 1 {
            let pairs = self.local.ids.iter().zip(self.remote.ids).take(self.units);
            for (l, r) in pairs {
                body(LocalRemote {
                    local: u64::from(*l).wrapping_mul(local),
                    remote: u64::from(*r).wrapping_mul(remote),
                });
            }
        } else {
            let locals = self.local.offsets(local, form.unit.local);
            let remotes = self.remote.offsets(remote, form.unit.remote);
            for (local, remote) in locals.zip(remotes).take(self.units) {
                body(LocalRemote { local, remote });
            }
        }
    }
}

/// The last range of a list while it may still grow; the same as [`Slices::push`] for each range,
/// with the range kept out of memory.
struct OpenRange<'a> {
    out: &'a mut Slices,
    at: LocalRemote,
    len: u64,
}

impl OpenRange<'_> {
    fn open(out: &mut Slices) -> OpenRange<'_> {
        let at = LocalRemote {
            local: out.local.pop().unwrap_or_default(),
            remote: out.remote.pop().unwrap_or_default(),
        };
        let len = out.len.pop().unwrap_or_default();
        OpenRange { out, at, len }
    }

    #[inline]
    fn push(&mut self, at: LocalRemote, len: u64) {
        let end = LocalRemote {
            local: self.at.local.wrapping_add(self.len),
            remote: self.at.remote.wrapping_add(self.len),
        };
        if end == at {
            self.len += len;
        } else {
            self.close_range();
            self.at = at;
            self.len = len;
        }
    }

    #[inline]
    fn close_range(&mut self) {
        if self.len > 0 {
            self.out.local.push(self.at.local);
            self.out.remote.push(self.at.remote);
            self.out.len.push(self.len);
        }
    }

    fn close(mut self) {
        self.close_range();
    }
}

/// The ranges of one layer, to be repeated for layers of the same form elsewhere.
pub(super) struct RangeTemplate {
    /// Where the layer starts.
    start: LocalRemote,
    first: LocalRemote,
    first_len: u64,
    /// The ranges after the first one, in the list they were recorded in.
    rest: std::ops::Range<usize>,
    /// Length of the last of them: a next layer may extend it in the list.
    last_len: u64,
}

impl RangeTemplate {
    /// Appends what `emit` appends, which is at least one range, and remembers it.
    pub(super) fn record(
        start: LocalRemote,
        out: &mut Slices,
        emit: impl FnOnce(&mut Slices),
    ) -> RangeTemplate {
        let before = out.count();
        let tail_len = out.len.last().copied().unwrap_or_default();
        emit(out);
        let merged = before > 0 && out.len[before - 1] != tail_len;
        let index = if merged { before - 1 } else { before };
        let skipped = if merged { tail_len } else { 0 };
        RangeTemplate {
            start,
            first: LocalRemote {
                local: out.local[index] + skipped,
                remote: out.remote[index] + skipped,
            },
            first_len: out.len[index] - skipped,
            rest: index + 1..out.count(),
            last_len: out.len[out.count() - 1],
        }
    }

    pub(super) fn count(&self) -> usize {
        1 + self.rest.len()
    }

    /// Appends the ranges for a layer that starts at `start`.
    pub(super) fn repeat(&self, start: LocalRemote, out: &mut Slices) {
        let by = LocalRemote {
            local: start.local.wrapping_sub(self.start.local),
            remote: start.remote.wrapping_sub(self.start.remote),
        };
        let first = self.first.plus(by);
        out.push(first.local, first.remote, self.first_len);
        if !self.rest.is_empty() {
            shifted(&mut out.local, self.rest.clone(), by.local);
            shifted(&mut out.remote, self.rest.clone(), by.remote);
            out.len.extend_from_within(self.rest.clone());
            let last = out.len.len() - 1;
            out.len[last] = self.last_len;
        }
    }
}

/// Appends a part of a list with `by` added to each entry.
fn shifted(list: &mut Vec<u64>, part: std::ops::Range<usize>, by: u64) {
    let at = list.len();
    list.extend_from_within(part);
    list[at..].iter_mut().for_each(|entry| *entry = entry.wrapping_add(by));
}
