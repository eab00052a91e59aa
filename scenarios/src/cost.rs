//! How long a step of an engine takes: integer formulas, no floating point.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_scenarios::cost::{StepCost, StepWork};
//!
//! let cost = StepCost {
//!     step: Nanos::from_us(100),
//!     weights: Nanos::from_ms(1),
//!     token_fs: 1_000_000_000,
//!     pair_fs: 0,
//!     context_fs: 0,
//! };
//! // Few tokens wait for the weights, many for the computation: here a microsecond each.
//! let time = |tokens| {
//!     let mut work = StepWork::default();
//!     work.prefill(0, tokens);
//!     cost.time(&work)
//! };
//! assert_eq!((time(10), time(5_000)), (Nanos::from_us(1_100), Nanos::from_us(5_100)));
//! ```

use kvferry_engine::core::Nanos;
use serde::{Deserialize, Serialize};

/// Cost of a forward pass on one instance (all its TP ranks together). Femtoseconds (1e-15 s)
/// where a nanosecond is too coarse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepCost {
    /// Launching, scheduling and collectives of a step.
    pub step: Nanos,
    /// Reading the weights once; a step takes at least this.
    pub weights: Nanos,
    /// Linear layers, per computed token.
    pub token_fs: u64,
    /// Attention, per pair of a computed token and a token up to it.
    pub pair_fs: u64,
    /// Reading the KV cache, per token of context of each running request.
    pub context_fs: u64,
}

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Computed tokens: prompt tokens of all chunks and one per decoding request.
    pub tokens: u64,
    /// Pairs of a computed prompt token and a token up to it.
    pub pairs: u64,
    /// Sum over the decoding requests of their context lengths.
    pub context: u64,
}

impl StepWork {
    /// Adds the tokens `from..to` of a prompt.
    pub const fn prefill(&mut self, from: u32, to: u32) {
        let (from, to) = (from as u64, to as u64);
        self.tokens += to - from;
        self.pairs += (to - from) * (from + to + 1) / 2;
    }

    /// Adds one generated token behind `context` others.
    pub const fn decode(&mut self, context: u32) {
        self.tokens += 1;
        self.context += context as u64;
    }
}

impl StepCost {
    /// `step + max(weights, tokens * token) + pairs * pair + context * context`; rounded down to
    /// nanoseconds, and at least one.
    pub const fn time(&self, work: &StepWork) -> Nanos {
        let linear = work.tokens as u128 * self.token_fs as u128;
        let weights = self.weights.0 as u128 * FS_PER_NS;
        let compute = if linear > weights { linear } else { weights };
        let total = self.step.0 as u128 * FS_PER_NS
            + compute
            + work.pairs as u128 * self.pair_fs as u128
            + work.context as u128 * self.context_fs as u128;
        let nanos = total / FS_PER_NS;
        Nanos(if nanos == 0 { 1 } else { nanos as u64 })
    }
}

const FS_PER_NS: u128 = 1_000_000;
