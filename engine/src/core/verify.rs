//! Bytes that prove themselves: both sides of a transfer digest what was to be moved, each where
//! its bytes lie, and the decode compares before the first token.
//!
//! A digest is of the part of a block and a layer that one rank gives another. Its seed is bound to
//! the transfer, the prompt's hash, the prefill's incarnation, the block's place in the prompt,
//! the layer and both ranks, so that the right bytes in a wrong place do not pass. What is told is a
//! sum for each block and one for each layer: they name a single bad block of a layer.
//!
//! ```
//! use kvferry_engine::core::ids::{Incarnation, TransferKey};
//! use kvferry_engine::core::prompt_hash::PromptHash;
//! use kvferry_engine::core::verify::{DigestPlan, KvDigest, Verify};
//!
//! let key = TransferKey { id: "t".into(), prompt: 0 };
//! let prompt = PromptHash::of_tokens(&[1, 2, 3]);
//! let plan = DigestPlan::new(Verify::All, (&key, Incarnation(1)), prompt);
//! let other = DigestPlan::new(Verify::All, (&key, Incarnation(2)), prompt);
//! assert_ne!(plan.seed(0, 16, (0, 0)), other.seed(0, 16, (0, 0)));
//!
//! // Two blocks in two layers; one block of one layer differs.
//! let (mut sent, mut found) = (KvDigest::new(2, 2), KvDigest::new(2, 2));
//! for (block, layer, sum) in [(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 4)] {
//!     sent.add(block, layer, sum);
//!     found.add(block, layer, if (block, layer) == (1, 0) { 9 } else { sum });
//! }
//! let wrong = sent.difference(&found, 0, true).unwrap();
//! assert_eq!((wrong.blocks, wrong.layers), (vec![1], vec![0]));
//! ```

use super::ids::{Incarnation, TransferKey, hash};
use super::layout::{Geometry, GroupKind};
use super::prompt_hash::PromptHash;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How much of what was moved is verified.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    #[default]
    Off,
    /// Every sixteenth block of each layer, another choice for each prompt, and the last one.
    Sample,
    /// Every block of every layer.
    All,
}

impl Verify {
    /// All levels, by their names.
    pub const NAMES: [(&str, Verify); 3] =
        [("off", Verify::Off), ("sample", Verify::Sample), ("all", Verify::All)];

    pub const fn is_off(&self) -> bool {
        matches!(self, Verify::Off)
    }

    /// Level that the decode requests from a prefill; `None` if nothing is verified.
    pub(super) fn asked(self) -> Option<Verify> {
        (!self.is_off()).then_some(self)
    }
}

impl fmt::Display for Verify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Verify::NAMES.iter().find(|(_, level)| level == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

/// One block of a layer in this many is in a sample.
const SAMPLE: u64 = 16;

/// What is digested of a transfer, and with which seeds; equal on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DigestPlan {
    level: Verify,
    seed: u64,
    /// What chooses a sample: the prompt, whatever its transfer is named by whoever's clock.
    choice: u64,
}

impl DigestPlan {
    /// Of a transfer from a prefill in this incarnation, of a prompt with this hash.
    pub fn new(
        level: Verify,
        (key, incarnation): (&TransferKey, Incarnation),
        prompt: PromptHash,
    ) -> DigestPlan {
        let PromptHash([high, low]) = prompt;
        let numbers = [u64::from(key.prompt), incarnation.0, high, low];
        let numbers = numbers.into_iter().flat_map(u64::to_le_bytes);
        let seed = hash(key.id.0.bytes().chain([0]).chain(numbers));
        DigestPlan { level, seed, choice: low }
    }

    /// The seed of the digest of what rank `ranks.0` of the prefill gives rank `ranks.1` of the
    /// decode, of a block whose first token is `token`.
    pub fn seed(&self, layer: u16, token: u32, ranks: (u16, u16)) -> u64 {
        let ranks = u64::from(ranks.0) << 16 | u64::from(ranks.1);
        let place = u64::from(layer) << 32 | u64::from(token);
        let place = if planted!("digests-are-bound-to-no-place") { 0 } else { place };
        mix(mix(self.seed ^ place) ^ ranks)
    }

    /// True if a block of a layer is digested; `behind` counts the blocks of the prompt after it.
    pub fn has(&self, layer: u16, behind: u32) -> bool {
        match self.level {
            Verify::Off => false,
            Verify::Sample => {
                let chosen = mix(self.choice ^ u64::from(layer)) % SAMPLE;
                behind == 0 || u64::from(behind) % SAMPLE == chosen
            }
            Verify::All => true,
        }
    }
}

/// The finalizer of splitmix64: every bit of the result depends on every bit of the number.
const fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// Sums of digests, which parts of a transfer add to in whatever order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvDigest {
    /// A sum for the tokens of each block, see [`block_tokens`].
    pub blocks: Vec<u64>,
    /// A sum for each layer.
    pub layers: Vec<u64>,
    /// Digests in the sums.
    pub count: u64,
}

/// Where two sides differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DigestDifference {
    /// Which blocks of the prompt.
    pub blocks: Vec<usize>,
    /// In which layers; empty if that cannot be told.
    pub layers: Vec<usize>,
}

impl KvDigest {
    /// Without any digest.
    pub fn new(blocks: usize, layers: usize) -> KvDigest {
        KvDigest { blocks: vec![0; blocks], layers: vec![0; layers], count: 0 }
    }

    /// Adds the digest of a block in a layer.
    pub fn add(&mut self, block: usize, layer: usize, digest: u64) {
        for (sums, at) in [(&mut self.blocks, block), (&mut self.layers, layer)] {
            if let Some(sum) = sums.get_mut(at) {
                *sum = sum.wrapping_add(digest);
            }
        }
        self.count += 1;
    }

    /// Adds what another part of the transfer has.
    pub fn merge(&mut self, other: &KvDigest) {
        let grow = |own: &mut Vec<u64>, other: &Vec<u64>| {
            own.resize(own.len().max(other.len()), 0);
            own.iter_mut().zip(other).for_each(|(own, other)| *own = own.wrapping_add(*other));
        };
        grow(&mut self.blocks, &other.blocks);
        grow(&mut self.layers, &other.layers);
        self.count += other.count;
    }

    /// Where this is not the same from block `from` on. `is_whole` says that both have the same
    /// blocks, so that the layers can be compared, too.
    pub fn difference(
        &self,
        other: &KvDigest,
        from: usize,
        is_whole: bool,
    ) -> Option<DigestDifference> {
        let differ = |one: &[u64], other: &[u64], from: usize| -> Vec<usize> {
            let most = one.len().max(other.len());
            (from..most).filter(|at| one.get(*at) != other.get(*at)).collect()
        };
        let blocks = differ(&self.blocks, &other.blocks, from);
        let layers = if is_whole { differ(&self.layers, &other.layers, 0) } else { Vec::new() };
        let same = blocks.is_empty() && layers.is_empty();
        (!same).then_some(DigestDifference { blocks, layers })
    }
}

impl fmt::Display for DigestDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told = |f: &mut fmt::Formatter<'_>, what: &str, list: &[usize]| match list {
            [] => Ok(()),
            [one] => write!(f, "{what} {one}"),
            [first, .., last] => {
                write!(f, "{} {what}s from {first} to {last}", list.len())
            }
        };
        told(f, "block", &self.blocks)?;
        if !self.blocks.is_empty() && !self.layers.is_empty() {
            f.write_str(" in ")?;
        }
        told(f, "layer", &self.layers)
    }
}

/// Tokens for which a [`KvDigest`] has one sum: the largest block that both sides have in common.
pub fn block_tokens(one: &Geometry, other: &Geometry) -> u32 {
    let groups = one.groups.iter().zip(&other.groups);
    let kept = groups.filter(|(group, _)| group.kind != GroupKind::State);
    kept.map(|(one, other)| one.block_tokens.min(other.block_tokens)).max().unwrap_or(0).max(1)
}

/// An empty digest of a prompt of `tokens` tokens that moves between these.
pub(super) fn empty(one: &Geometry, other: &Geometry, tokens: u32) -> KvDigest {
    let largest = |at: &Geometry| at.groups.iter().map(|group| group.block_tokens).max();
    let block = match planted!("sums-are-of-the-larger-block") {
        true => largest(one).max(largest(other)).unwrap_or(1),
        false => block_tokens(one, other),
    };
    let blocks = tokens.div_ceil(block);
    KvDigest::new(blocks as usize, usize::from(one.layers))
}
