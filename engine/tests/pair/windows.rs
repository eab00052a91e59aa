//! Sliding windows at every length of a prompt: an engine that allocates and frees blocks as vLLM does
//! gets every byte that it reads, and none is read that the prefill has freed.

use super::*;
use kvferry_engine::core::layout::{Geometry, GroupKind, KvGroup, LayerLayout, Slices};
use kvferry_engine::core::verify::Verify;
use std::collections::BTreeMap;
use std::ops::Range;

const LENGTHS: u32 = 600;
const WINDOWS: [u32; 4] = [64, 128, 256, 257];
const BLOCKS: [u32; 4] = [16, 32, 64, 128];
/// Blocks of each group, more than a prompt and its lookahead has.
const POOL: u32 = 257;
const ROW: u64 = 4;
/// Tokens that vLLM keeps below the window, as the connector asks for.
const EXTRA: i64 = 1;

/// A group of a request, as vLLM's managers of KV cache groups keep it. Block ids are drawn from
/// the logical index, so that no two are neighbours by chance.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    /// Window, or 0 for full attention.
    pub(crate) window: u32,
    pub(crate) size: u32,
    pub(crate) ids: Vec<u32>,
    /// Blocks of the group.
    pub(crate) pool: u32,
    /// What the id of the first block is drawn from.
    pub(crate) first: u32,
}

impl Table {
    fn new(window: u32, size: u32) -> Table {
        Table { window, size, ids: Vec::new(), pool: POOL, first: 11 }
    }

    /// vLLM's `get_num_skipped_tokens`.
    fn skipped(&self, computed: u32) -> u32 {
        let window = i64::from(if self.window == 0 { u32::MAX } else { self.window });
        u32::try_from((i64::from(computed) - window + 1 - EXTRA).max(0)).unwrap()
    }

    /// vLLM's `remove_skipped_blocks`.
    pub(crate) fn free(&mut self, computed: u32) {
        let gone = (self.skipped(computed) / self.size) as usize;
        self.ids.iter_mut().take(gone).for_each(|id| *id = 0);
    }

    /// Takes the blocks of a prefix hit, of a window as many as vLLM's `find_longest_cache_hit` looks for.
    pub(crate) fn hit(&mut self, tokens: u32) {
        self.grow(tokens);
        if self.window > 0 {
            let gone =
                self.ids.len().saturating_sub((self.window - 1).div_ceil(self.size) as usize);
            self.ids[..gone].fill(0);
        }
    }

    /// Adds blocks for tokens `..to`; returns which.
    pub(crate) fn grow(&mut self, to: u32) -> (u32, Vec<u32>) {
        let first = self.ids.len() as u32;
        let id = |at| 1 + (at * 37 + self.first) % (self.pool - 1);
        let added: Vec<u32> = (first..to.div_ceil(self.size)).map(id).collect();
        self.ids.extend(&added);
        (first, added)
    }

    /// The same, of which the leading null blocks are not named, as the connector does it.
    pub(crate) fn listed((first, ids): (u32, Vec<u32>)) -> BlockList {
        let gone = ids.iter().take_while(|id| **id == 0).count();
        BlockList { first: first + gone as u32, ids: ids[gone..].to_vec() }
    }

    /// Block and row of a token, if it is there.
    pub(crate) fn place(&self, token: u32) -> Option<(u32, u32)> {
        let id = *self.ids.get((token / self.size) as usize)?;
        (id != 0).then_some((id, token % self.size))
    }
}

/// A prompt between two engines.
#[derive(Clone, Copy, Debug)]
struct WindowCase {
    mode: Mode,
    window: u32,
    /// Tokens per block of the prefill and of the decode.
    sizes: [u32; 2],
    tokens: u32,
    /// Tokens that are prefix hits on both sides.
    hits: [u32; 2],
}

fn kv(window: u32, size: u32) -> (Geometry, Vec<LayerLayout>) {
    let windowed =
        KvGroup { kind: GroupKind::Window { tokens: window }, ..KvGroup::full(size, [1]) };
    let geometry = Geometry::new("windows", 1, vec![KvGroup::full(size, [0]), windowed]);
    let bytes = u64::from(POOL) * u64::from(size) * ROW;
    let layer = |at| LayerLayout::contiguous(at * bytes, [POOL, 1, size, ROW as u32 / 2], 2);
    (geometry, (0..2).map(layer).collect())
}

impl WindowCase {
    fn tables(&self, side: usize) -> [Table; 2] {
        [0, self.window].map(|window| Table::new(window, self.sizes[side]))
    }

    /// The prefill computes the prompt in two steps behind its prefix hits. Returns what it still has.
    fn prefill(&self, pair: &mut PairWorld, request: &RequestId, step: &mut u64) -> [Table; 2] {
        let mut tables = self.tables(0);
        let hits = self.hits[0];
        let mid = hits + (self.tokens - hits).div_ceil(2);
        for (computed, to) in [(hits, mid), (mid, self.tokens)] {
            if computed == to {
                continue;
            }
            let is_first = computed == hits;
            let added = tables.each_mut().map(|table| {
                if is_first {
                    table.hit(computed);
                }
                table.free(computed);
                let added = table.grow(to);
                if is_first { (0, table.ids.clone()) } else { added }
            });
            *step += 1;
            let blocks = added.map(Table::listed).to_vec();
            let from = if is_first { 0 } else { computed };
            let chunk = Chunk { request: request.clone(), from, to, blocks };
            let step = StepId(*step);
            pair.prefill(PrefillInput::Hook(PrefillHook::Scheduled { step, chunks: vec![chunk] }));
            pair.compute(step.0, 2);
        }
        // vLLM's `_connector_finished`.
        tables.iter_mut().for_each(|table| table.free(self.tokens));
        let hook = PrefillHook::Finished { request: request.clone(), reason: FinishReason::Length };
        pair.prefill(PrefillInput::Hook(hook));
        tables
    }

    /// The decode's blocks for all tokens; those of prefix hits are there, the others are to come.
    fn decode(&self) -> [Table; 2] {
        let mut tables = self.tables(1);
        for table in &mut tables {
            table.hit(self.hits[1]);
            table.grow(self.tokens);
            table.free(self.tokens);
        }
        tables
    }

    fn hand_over(&self, pair: &mut PairWorld, step: &mut u64) {
        let name = format!("{}-{:?}", self.tokens, self.hits);
        let key = TransferKey { id: name.as_str().into(), prompt: 0 };
        let [prefill, decode] = ["p", "d"].map(|side| RequestId::from(format!("{side}-{name}")));
        let leg =
            DecodeLeg::new(key.clone(), self.mode, "prefill".into(), "prefill-control".into());
        let hook = DecodeHook::Arrived {
            request: decode.clone(),
            leg,
            tokens: self.tokens,
            prompt_hash: HASH,
        };
        pair.decode(DecodeInput::Hook(hook));
        let leg = PrefillLeg::new(key, self.mode);
        let hook = PrefillHook::Arrived {
            request: prefill.clone(),
            leg,
            tokens: self.tokens,
            prompt_hash: HASH,
        };
        pair.prefill(PrefillInput::Hook(hook));
        let tables = self.decode();
        let blocks = tables.clone().map(|table| Table::listed((0, table.ids))).to_vec();
        let hook =
            DecodeHook::Allocated { request: decode.clone(), computed: self.hits[1], blocks };
        pair.decode(DecodeInput::Hook(hook));
        let kept = self.prefill(pair, &prefill, step);
        pair.run(pair.now + Nanos::from_ms(20));
        let done = std::mem::take(&mut pair.decode_said);
        assert_eq!(done.last(), Some(&loaded(&decode)), "{self:?}");
        self.check(&kept, &tables, &std::mem::take(&mut pair.moved));
        self.check_grants(pair, &kept);
        (pair.prefill_said, pair.posted) = (Vec::new(), BTreeMap::new());
    }

    /// Every row that is read is where the decode reads it, from where the prefill has it.
    fn check(&self, source: &[Table; 2], receiver: &[Table; 2], moved: &[Slices]) {
        let rows = self.rows(moved);
        for (group, (source, receiver)) in source.iter().zip(receiver).enumerate() {
            let mut token_of = BTreeMap::new();
            for token in 0..self.tokens {
                receiver.place(token).map(|at| token_of.insert((group, at), token));
            }
            for ((_, to), from) in rows.iter().filter(|((of, _), _)| *of == group) {
                // Rows behind the prompt go with their block.
                let Some(token) = token_of.get(&(group, *to)) else { continue };
                let at = source.place(*token);
                assert_eq!(at, Some(*from), "{self:?}: token {token} is read where it is not");
                assert!(*token >= self.hits[1], "{self:?}: token {token} is a prefix hit");
            }
            for token in self.read(receiver) {
                let at = receiver.place(token);
                let at = at.unwrap_or_else(|| panic!("{self:?}: token {token} has no block"));
                let is_there = token < self.hits[1] || rows.contains_key(&(group, at));
                assert!(is_there, "{self:?}: token {token} of group {group} did not come");
            }
        }
    }

    /// Tokens whose KV a decode reads: of the window before the last token, which it computes again,
    /// and of all blocks that are full, which vLLM shares with later prompts.
    fn read(&self, table: &Table) -> impl Iterator<Item = u32> {
        let window = if table.window == 0 { u32::MAX } else { table.window };
        let first = self.tokens.saturating_sub(window);
        let full = self.tokens / table.size * table.size;
        let table = table.clone();
        let shared = (0..full).filter(move |token| table.place(*token).is_some());
        shared.chain(first..self.tokens - 1)
    }

    /// Per group, block and row of the decode: block and row of the prefill.
    fn rows(&self, moved: &[Slices]) -> BTreeMap<(usize, (u32, u32)), (u32, u32)> {
        let mut rows = BTreeMap::new();
        let place = |at: u64, side: usize| {
            let (row, size) = ((at / ROW) as u32, self.sizes[side]);
            let (group, row) = (row / (POOL * size), row % (POOL * size));
            (group as usize, (row / size, row % size))
        };
        for slices in moved {
            let (from, to) = match self.mode {
                Mode::Push => (&slices.local, &slices.remote),
                Mode::Pull => (&slices.remote, &slices.local),
            };
            for ((from, to), len) in from.iter().zip(to).zip(&slices.len) {
                let bytes: Range<u64> = 0..*len;
                for row in bytes.step_by(ROW as usize) {
                    let (source, receiver) = (place(from + row, 0), place(to + row, 1));
                    assert_eq!(source.0, receiver.0);
                    let before = rows.insert(receiver, source.1);
                    assert_eq!(before, None, "{self:?}: {receiver:?} is written twice");
                }
            }
        }
        rows
    }

    /// A prefill lists no block that it has freed.
    fn check_grants(&self, pair: &mut PairWorld, kept: &[Table; 2]) {
        use kvferry_engine::core::dialect::native::{Frame, decode as read};
        for (_, _, frame) in std::mem::take(&mut pair.frames) {
            let Ok(Frame::Data { message: Message::Grant { blocks, .. }, .. }) = read(&frame)
            else {
                continue;
            };
            for (list, table) in blocks.iter().zip(kept) {
                for (at, id) in (list.first..).zip(&list.ids) {
                    assert_eq!(table.ids[at as usize], *id, "{self:?}: block {at} is freed");
                }
            }
        }
    }
}

/// Prefix hits of both sides: of neither, of one as much as there can be, and of both.
fn prefix_hits(tokens: u32, sizes: [u32; 2]) -> [[u32; 2]; 4] {
    let most = sizes.map(|size| (tokens - 1) / size * size);
    let some = sizes.map(|size| tokens / 2 / size * size);
    [[0, 0], [most[0], 0], [0, most[1]], some]
}

fn every_length(mode: Mode, sizes: impl Fn(u32) -> [u32; 2]) {
    for (window, size) in WINDOWS.into_iter().flat_map(|window| BLOCKS.map(|size| (window, size))) {
        let sizes = sizes(size);
        let mut pair = PairWorld::with_kv(mode, sizes.map(|size| kv(window, size)), Verify::Off);
        let mut step = 0;
        for tokens in 1..=LENGTHS {
            let mut done = Vec::new();
            for hits in prefix_hits(tokens, sizes) {
                if !done.contains(&hits) {
                    WindowCase { mode, window, sizes, tokens, hits }
                        .hand_over(&mut pair, &mut step);
                    done.push(hits);
                }
            }
        }
        assert!(pair.at_rest());
    }
}

#[test]
fn windows_are_pushed_at_every_length() {
    every_length(Mode::Push, |size| [size, size]);
}

#[test]
fn windows_are_pulled_at_every_length() {
    every_length(Mode::Pull, |size| [size, size]);
}

#[test]
fn windows_are_pushed_into_smaller_blocks_at_every_length() {
    every_length(Mode::Push, |size| [size, size / 4]);
}

#[test]
fn windows_are_pulled_into_smaller_blocks_at_every_length() {
    every_length(Mode::Pull, |size| [size, size / 4]);
}
