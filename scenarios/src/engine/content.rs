//! What a prompt says, as far as KV is concerned.

use crate::decide::mix;
use crate::run::WorkloadPrompt;
use kvferry_engine::core::prompt_hash::PromptHash;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The content of a prompt, by hashes instead of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PromptContent {
    pub tokens: u32,
    /// One hash per leading full run of `prefix_tokens` tokens; equal hashes at one index mean
    /// that the prompts are equal up to the end of that run.
    pub prefix: Arc<[u64]>,
    /// Tokens per entry of `prefix`, at least 1.
    pub prefix_tokens: u32,
    /// Identifies what follows the last full run; equal prompts have equal tails.
    pub tail: u64,
}

impl PromptContent {
    /// The content of a prompt of a run with this [`crate::Run::prefix_tokens`].
    pub fn new(prompt: &WorkloadPrompt, prefix_tokens: u32) -> PromptContent {
        let WorkloadPrompt { tokens, prefix, tail } = prompt;
        PromptContent { tokens: *tokens, prefix: prefix.clone(), prefix_tokens, tail: *tail }
    }

    /// The same prompt as rendered by an engine that gets other tokens from some place on.
    pub fn rendered(self, word: u64) -> PromptContent {
        let from = (word % self.prefix.len().max(1) as u64) as usize;
        // Equal hashes say that all before is equal, too.
        let own = self.prefix[from..].iter().map(|run| mix(mix(word, from as u64), *run));
        let prefix = self.prefix[..from].iter().copied().chain(own).collect();
        PromptContent { prefix, tail: mix(word, self.tail), ..self }
    }

    /// Stand-in for the hash of the tokens.
    pub fn hash(&self) -> PromptHash {
        let last = self.stamp(self.tokens.saturating_sub(1));
        PromptHash([last, mix(last, u64::from(self.tokens))])
    }

    /// Stands for the KV at a position, 0 to any length (generated tokens continue the tail):
    /// equal stamps are equal KV, up to collisions of 64-bit hashes. As KV depends on all tokens
    /// before, an equal stamp at one position implies equal stamps before. Never 0.
    pub fn stamp(&self, token: u32) -> u64 {
        let run = (token / self.prefix_tokens.max(1)) as usize;
        let base = match self.prefix.get(run) {
            Some(hash) => *hash,
            None => mix(self.tail, self.prefix.last().copied().unwrap_or(0)),
        };
        mix(base, u64::from(token)).max(1)
    }
}
