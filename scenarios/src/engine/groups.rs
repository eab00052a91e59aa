//! The block tables of requests, over all KV cache groups.

use super::config::{EngineConfig, GroupConfig};
use super::content::PromptContent;
use super::io::PoolGauges;
use super::pool::BlockPool;
use kvferry_engine::core::layout::{BlockList, GroupKind};

/// Block ids per group.
pub(super) type GroupBlockIds = Vec<Vec<u32>>;

/// The KV cache groups of an engine with their pools.
#[derive(Debug)]
pub(super) struct CacheGroups {
    groups: Vec<CacheGroup>,
    /// Prefix hits are multiples of this many tokens; 0 if there are none.
    align: u32,
}

#[derive(Debug)]
struct CacheGroup {
    kind: GroupKind,
    block_tokens: u32,
    pool: BlockPool,
}

impl CacheGroup {
    /// First logical block that is read to compute `token`.
    fn first_read(&self, token: u32) -> u32 {
        self.kind.read_from(token) / self.block_tokens.max(1)
    }

    /// One past the last logical block for tokens `..to`.
    fn end(&self, to: u32) -> u32 {
        match self.kind {
            GroupKind::State => 1,
            GroupKind::Full | GroupKind::Window { .. } => to.div_ceil(self.block_tokens),
        }
    }

    /// Prefix hash of a logical block.
    fn key(&self, content: &PromptContent, logical: u32) -> u64 {
        content.stamp((logical + 1) * self.block_tokens - 1)
    }

    /// Blocks that a request alone may need at a time for `tokens` tokens, computed in chunks.
    fn most(&self, tokens: u32, chunk: u32) -> u32 {
        match self.kind {
            GroupKind::Window { tokens: window } => {
                let span = window.saturating_add(chunk).div_ceil(self.block_tokens);
                self.end(tokens).min(span.saturating_add(1))
            }
            GroupKind::Full | GroupKind::State => self.end(tokens),
        }
    }
}

/// Greatest common divisor, by Euclid.
fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl CacheGroups {
    pub(super) fn new(config: &EngineConfig) -> CacheGroups {
        let stateful = config.groups.iter().any(|group| group.kind == GroupKind::State);
        let common = config.groups.iter().fold(1, |common: u64, group| {
            let tokens = u64::from(group.block_tokens.max(1));
            (common / gcd(common, tokens)).saturating_mul(tokens)
        });
        // A state exists for the end of a prompt only, so no shorter prefix can be continued.
        let align = if stateful || !config.prefix_cache { 0 } else { common };
        let group = |group: &GroupConfig| CacheGroup {
            kind: group.kind,
            block_tokens: group.block_tokens,
            pool: BlockPool::new(group.blocks, config.allocator),
        };
        CacheGroups {
            groups: config.groups.iter().map(group).collect(),
            align: u32::try_from(align).unwrap_or(0),
        }
    }

    pub(super) fn gauges(&self, group: usize) -> PoolGauges {
        self.groups[group].pool.gauges()
    }

    /// Sums of blocks held and quarantined.
    pub(super) fn in_use(&self) -> (u32, u32) {
        let gauges = self.groups.iter().map(|group| group.pool.gauges());
        gauges.fold((0, 0), |(held, quarantined), pool| {
            (held + pool.held, quarantined + pool.quarantined)
        })
    }

    /// Grows whenever a block becomes available.
    pub(super) fn released(&self) -> u64 {
        self.groups.iter().map(|group| group.pool.released()).sum()
    }

    /// The first group that is too small for a request of `tokens` tokens, with the blocks needed
    /// and there.
    pub(super) fn too_small(&self, tokens: u32, chunk: u32) -> Option<(usize, u32, u32)> {
        self.groups.iter().enumerate().find_map(|(at, group)| {
            let (need, total) = (group.most(tokens, chunk), group.pool.gauges().total);
            (need > total).then_some((at, need, total))
        })
    }

    /// Length of the longest cached prefix of at most `max` tokens, the prompt's length or less.
    pub(super) fn hits(&self, content: &PromptContent, max: u32) -> u32 {
        if self.align == 0 {
            return 0;
        }
        let floor = |tokens: u32| tokens - tokens % self.align;
        let mut len = floor(max.min(content.tokens));
        for group in self.groups.iter().filter(|group| group.kind == GroupKind::Full) {
            let blocks = 0..len / group.block_tokens;
            let miss = { blocks }.find(|at| group.pool.find(group.key(content, *at)).is_none());
            len = miss.map_or(len, |at| floor(at * group.block_tokens));
        }
        // A window must be cached as a whole; below a missing block the search goes on.
        while let Some(miss) = self.window_miss(content, len) {
            len = floor(miss);
        }
        len
    }

    /// First token of the last block that the windows of `content` need at `len` and that is not
    /// cached.
    fn window_miss(&self, content: &PromptContent, len: u32) -> Option<u32> {
        // Of a prompt that is cached as a whole the last token is computed again.
        let next = len.min(content.tokens.saturating_sub(1));
        self.groups.iter().filter(|group| group.kind != GroupKind::Full).find_map(|group| {
            let mut needed = (group.first_read(next)..len / group.block_tokens).rev();
            let miss = needed.find(|at| group.pool.find(group.key(content, *at)).is_none());
            miss.map(|at| at * group.block_tokens)
        })
    }

    /// True if all but so many percent of the blocks would be free with a prompt of so many tokens.
    pub(super) fn would_leave_free(&self, percent: u32, tokens: u32) -> bool {
        let mut groups = self.groups.iter();
        percent > 0
            && groups.all(|group| {
                let (all, free) = (group.pool.gauges().total, group.pool.available());
                let left = free.saturating_sub(group.end(tokens));
                u64::from(left) * 100 >= u64::from(all) * u64::from(100 - percent)
            })
    }

    /// Allocates tables for tokens `..to`: prefix hits for tokens `..hits` are shared, the rest is
    /// taken. Of a window only what is read to compute token `next`. `None` if there are
    /// too few blocks, for those tokens or for `whole` tokens in chunks of `chunk`: a request that
    /// has to give way before its end has computed for nothing (vLLM's
    /// `scheduler_reserve_full_isl`). Returns the tables and the taken blocks.
    pub(super) fn allocate(
        &mut self,
        content: &PromptContent,
        (hits, next, to): (u32, u32, u32),
        (whole, chunk): (u32, u32),
    ) -> Option<(Vec<BlockList>, GroupBlockIds)> {
        let mut tables = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let first = group.first_read(next);
            let shared = match group.kind {
                GroupKind::State => 0..0,
                GroupKind::Full | GroupKind::Window { .. } => first..hits / group.block_tokens,
            };
            let mut ids = Vec::with_capacity(group.end(to).saturating_sub(first) as usize);
            ids.extend(shared.filter_map(|at| group.pool.find(group.key(content, at))));
            let unused = ids.iter().filter(|id| group.pool.is_unused(**id)).count() as u32;
            let most = group.most(whole, chunk).min(group.end(whole) - first);
            let fresh = most.max(group.end(to) - first).saturating_sub(ids.len() as u32);
            if fresh + unused > group.pool.available() {
                return None;
            }
            tables.push(BlockList { first, ids });
        }
        for (group, table) in self.groups.iter_mut().zip(&tables) {
            table.ids.iter().for_each(|id| group.pool.share(*id));
        }
        let taken = self.extend(&mut tables, to);
        Some((tables, taken))
    }

    /// Takes the blocks that tables lack for tokens `..to`; there are enough.
    fn extend(&mut self, tables: &mut [BlockList], to: u32) -> GroupBlockIds {
        let groups = self.groups.iter_mut().zip(tables);
        let extend = |(group, table): (&mut CacheGroup, &mut BlockList)| {
            let missing = group.end(to).saturating_sub(table.first + table.ids.len() as u32);
            let start = table.ids.len();
            for _ in 0..missing {
                table.ids.push(group.pool.take().expect("availability was checked"));
            }
            table.ids[start..].to_vec()
        };
        groups.map(extend).collect()
    }

    /// Adds blocks to tables for tokens `..to`, or none if there are too few. Returns the taken
    /// blocks, which follow those that were there.
    pub(super) fn grow(&mut self, tables: &mut [BlockList], to: u32) -> Option<GroupBlockIds> {
        self.has_room(tables, to).then(|| self.extend(tables, to))
    }

    /// As [`CacheGroups::grow`] without a list of blocks; `on_taken` gets group, logical index and
    /// block.
    pub(super) fn grow_each(
        &mut self,
        tables: &mut [BlockList],
        to: u32,
        mut on_taken: impl FnMut(u16, u32, u32),
    ) -> bool {
        if !self.has_room(tables, to) {
            return false;
        }
        for (at, (group, table)) in self.groups.iter_mut().zip(tables).enumerate() {
            let start = table.first + table.ids.len() as u32;
            for logical in start..group.end(to) {
                let block = group.pool.take().expect("availability was checked");
                table.ids.push(block);
                on_taken(at as u16, logical, block);
            }
        }
        true
    }

    /// True if the pools have what tables lack for tokens `..to`.
    pub(super) fn has_room(&self, tables: &[BlockList], to: u32) -> bool {
        self.groups.iter().zip(tables).all(|(group, table)| {
            let missing = group.end(to).saturating_sub(table.first + table.ids.len() as u32);
            missing <= group.pool.available()
        })
    }

    /// Tokens for which tables have blocks.
    pub(super) fn room(&self, tables: &[BlockList]) -> u32 {
        let room = |(group, table): (&CacheGroup, &BlockList)| match group.kind {
            GroupKind::State => u32::MAX,
            GroupKind::Full | GroupKind::Window { .. } => {
                (table.first + table.ids.len() as u32).saturating_mul(group.block_tokens)
            }
        };
        self.groups.iter().zip(tables).map(room).min().unwrap_or(0)
    }

    /// Frees the blocks that windows have passed once tokens `..computed` are there, as vLLM does, which
    /// the connector has keep what the last of them reads: a decode computes it again. Returns those that
    /// became available, if any did.
    pub(super) fn slide(
        &mut self,
        tables: &mut [BlockList],
        computed: u32,
    ) -> Option<GroupBlockIds> {
        let mut freed: Option<GroupBlockIds> = None;
        let count = self.groups.len();
        for (at, (group, table)) in self.groups.iter_mut().zip(tables).enumerate() {
            let kept = group.first_read(computed.saturating_sub(1));
            let passed = kept.saturating_sub(table.first).min(table.ids.len() as u32);
            if passed == 0 {
                continue;
            }
            table.first += passed;
            for id in table.ids.drain(..passed as usize).rev() {
                if group.pool.free(id) {
                    freed.get_or_insert_with(|| vec![Vec::new(); count])[at].push(id);
                }
            }
        }
        freed
    }

    /// Gives up tables. Returns the blocks that became available.
    pub(super) fn free(&mut self, tables: Vec<BlockList>) -> GroupBlockIds {
        self.drop_all(tables, BlockPool::free)
    }

    /// Gives up tables that were quarantined. Returns the blocks that became available.
    pub(super) fn end_quarantine(&mut self, tables: Vec<BlockList>) -> GroupBlockIds {
        self.drop_all(tables, BlockPool::end_quarantine)
    }

    /// The last block goes first, as in vLLM: it is the least likely prefix hit.
    fn drop_all(
        &mut self,
        tables: Vec<BlockList>,
        drop: impl Fn(&mut BlockPool, u32) -> bool,
    ) -> GroupBlockIds {
        let groups = self.groups.iter_mut().zip(tables);
        let ids = groups.map(|(group, mut table)| {
            table.ids.reverse();
            table.ids.retain(|id| drop(&mut group.pool, *id));
            table.ids
        });
        ids.collect()
    }

    /// Keeps the blocks of tables from reuse although their request has no use for them.
    pub(super) fn quarantine(&mut self, tables: &[BlockList]) {
        for (group, table) in self.groups.iter_mut().zip(tables) {
            table.ids.iter().for_each(|id| group.pool.quarantine(*id));
        }
    }

    /// Makes the full blocks that were completed by tokens `from..to` prefix hits, as vLLM does, whether
    /// they were computed or loaded.
    pub(super) fn publish(
        &mut self,
        content: &PromptContent,
        tables: &[BlockList],
        (from, to): (u32, u32),
    ) {
        if self.align == 0 {
            return;
        }
        let to = to.min(content.tokens);
        for (group, table) in self.groups.iter_mut().zip(tables) {
            let full = from / group.block_tokens..to / group.block_tokens;
            for logical in full {
                if let Some(block) = table.get(logical) {
                    let key = group.key(content, logical);
                    group.pool.publish(block, key);
                }
            }
        }
    }

    /// The part of tables that holds tokens `from..to`; of a state group the one block.
    pub(super) fn holding(&self, tables: &[BlockList], from: u32, to: u32) -> Vec<BlockList> {
        let part = |(group, table): (&CacheGroup, &BlockList)| {
            let first = match group.kind {
                GroupKind::State => 0,
                GroupKind::Full | GroupKind::Window { .. } => from / group.block_tokens,
            };
            let start = (first.max(table.first) - table.first) as usize;
            let end = group.end(to).saturating_sub(table.first) as usize;
            let ids = table.ids.get(start..end).unwrap_or_default().to_vec();
            BlockList { first: table.first + start as u32, ids }
        };
        self.groups.iter().zip(tables).map(part).collect()
    }
}
