//! Identity of a prompt: a hash of all that its KV depends on.
//!
//! The engines of both sides hash the prompt as they received it. The prefill compares the two
//! hashes before it announces, writes or grants anything. The hash covers the whole prompt. This
//! includes tokens whose KV the decode already has, and the last token, which a decode always
//! computes itself.
//!
//! The hash is the first 16 bytes of SHA-256 over the parts of the prompt, in order. A part is
//! encoded as its name, a zero byte, the length of its content in bytes (eight bytes,
//! little-endian) and the content. A part that a prompt does not have is left out.
//! `python/package/kvferry/vllm/prompt.py` lists the parts of vLLM's prompts.
//!
//! ```
//! use kvferry_engine::core::prompt_hash::{PromptHash, PromptHasher};
//!
//! let plain = PromptHash::of_tokens(&[1, 2, 3]);
//! assert_eq!(plain.to_string(), "8d532176f6f8da3862cb7b473d8d2df3");
//! assert_ne!(plain, PromptHash::of_tokens(&[1, 3, 2]));
//!
//! let mut hasher = PromptHasher::default();
//! hasher.tokens(&[1, 2, 3]);
//! hasher.part("salt", b"tenant-7");
//! assert_ne!(plain, hasher.finish());
//! ```

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;

/// Hash of a prompt and of all else that its KV depends on: two big-endian words.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct PromptHash(pub [u64; 2]);

/// Name of the part that holds the token ids, four little-endian bytes each.
pub const TOKENS: &str = "tokens";

impl PromptHash {
    /// Hash of a prompt that consists of token ids only.
    pub fn of_tokens(ids: &[u32]) -> PromptHash {
        let mut hasher = PromptHasher::default();
        hasher.tokens(ids);
        hasher.finish()
    }

    pub const fn from_bytes(bytes: [u8; 16]) -> PromptHash {
        let number = u128::from_be_bytes(bytes);
        PromptHash([(number >> 64) as u64, number as u64])
    }

    pub const fn to_bytes(self) -> [u8; 16] {
        ((self.0[0] as u128) << 64 | self.0[1] as u128).to_be_bytes()
    }
}

impl fmt::Display for PromptHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[0], self.0[1])
    }
}

/// Hasher of a prompt, part by part.
#[derive(Clone, Debug, Default)]
pub struct PromptHasher(Sha256);

impl PromptHasher {
    /// Adds a part; the order of parts matters.
    pub fn part(&mut self, name: &str, content: &[u8]) {
        self.begin(name, content.len());
        self.0.update(content);
    }

    /// Adds the token ids.
    pub fn tokens(&mut self, ids: &[u32]) {
        self.begin(TOKENS, 4 * ids.len());
        let mut bytes = [0; 1024];
        for ids in ids.chunks(bytes.len() / 4) {
            for (into, id) in bytes.chunks_exact_mut(4).zip(ids) {
                into.copy_from_slice(&id.to_le_bytes());
            }
            self.0.update(&bytes[..4 * ids.len()]);
        }
    }

    fn begin(&mut self, name: &str, len: usize) {
        self.0.update(name.as_bytes());
        self.0.update([0]);
        self.0.update((len as u64).to_le_bytes());
    }

    pub fn finish(self) -> PromptHash {
        let digest = self.0.finalize();
        let first = digest.first_chunk().expect("SHA-256 has 32 bytes");
        PromptHash::from_bytes(*first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_parts(parts: &[(&str, &[u8])]) -> PromptHash {
        let mut hasher = PromptHasher::default();
        parts.iter().for_each(|(name, content)| hasher.part(name, content));
        hasher.finish()
    }

    #[test]
    fn token_ids_are_hashed_as_their_little_endian_bytes() {
        let ids: Vec<u32> = (0..1000).map(|id| id * 70_001).collect();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(PromptHash::of_tokens(&ids), of_parts(&[(TOKENS, &bytes)]));
    }

    #[test]
    fn content_that_moves_between_parts_changes_the_hash() {
        let hashes = [
            of_parts(&[("a", b"bc"), ("d", b"")]),
            of_parts(&[("a", b"b"), ("cd", b"")]),
            of_parts(&[("a", b""), ("d", b"bc")]),
            of_parts(&[("d", b""), ("a", b"bc")]),
            of_parts(&[("a", b"bc")]),
            of_parts(&[]),
        ];
        for (at, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..at].contains(hash), "{at}");
        }
    }

    #[test]
    fn bytes_and_text_are_in_the_order_of_the_digest() {
        let bytes: [u8; 16] = std::array::from_fn(|at| at as u8 + 1);
        let hash = PromptHash::from_bytes(bytes);
        assert_eq!(hash.to_bytes(), bytes);
        assert_eq!(hash.to_string(), "0102030405060708090a0b0c0d0e0f10");
    }
}
