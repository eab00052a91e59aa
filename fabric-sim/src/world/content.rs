//! What the KV of a prompt is, block by block.

use crate::memory::BlockTokens;
use kvferry_engine::core::layout::{BlockList, GroupKind, KvGroup};
use kvferry_scenarios::decide::mix;
use kvferry_scenarios::engine::PromptContent;
use std::ops::Range;

/// Names the content of tokens that lie in the same run of a prompt; see
/// [`PromptContent::prefix`].
fn run_stamp(content: &PromptContent, token: u32) -> u64 {
    let run = (token / content.prefix_tokens.max(1)) as usize;
    match content.prefix.get(run) {
        Some(hash) => *hash,
        None => mix(content.tail, content.prefix.last().copied().unwrap_or(0)),
    }
}

/// Calls `each(place, stamp)` for the tokens `tokens` of a prompt in the blocks of one group.
/// `grain` tokens share a stamp; those of blocks that are not listed are left out.
pub(super) fn each_piece(
    content: &PromptContent,
    tokens: Range<u32>,
    (index, group): (usize, &KvGroup),
    blocks: &BlockList,
    grain: u32,
    mut each: impl FnMut(&BlockTokens, u64),
) {
    if tokens.is_empty() {
        return;
    }
    if group.kind == GroupKind::State {
        let Some(block) = blocks.ids.last().copied() else { return };
        let stamp = mix(run_stamp(content, tokens.end - 1), u64::from(tokens.end));
        return each(&BlockTokens { group: index, block, first: 0, tokens: 0..1 }, stamp);
    }
    let size = group.block_tokens;
    for logical in tokens.start / size..tokens.end.div_ceil(size) {
        let Some(block) = blocks.get(logical) else { continue };
        let first = logical * size;
        let mut at = tokens.start.max(first);
        let end = tokens.end.min(first + size);
        while at < end {
            let upto = piece_end(content, at, grain).min(end);
            let stamp = run_stamp(content, upto - 1);
            each(
                &BlockTokens { group: index, block, first, tokens: at - first..upto - first },
                stamp,
            );
            at = upto;
        }
    }
}

/// First token behind `at` whose stamp may differ. A piece that lies in two runs is named by the
/// second, so each piece stands alone.
fn piece_end(content: &PromptContent, at: u32, grain: u32) -> u32 {
    let run = content.prefix_tokens.max(1);
    if (at / run) as usize >= content.prefix.len() {
        return u32::MAX;
    }
    let step = if run.is_multiple_of(grain) { run } else { grain };
    (at / step + 1).saturating_mul(step)
}
