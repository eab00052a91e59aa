//! The stand-in serving engine: what vLLM is to the protocol cores, without a model.
//!
//! One [`SimEngine`] is one engine core (one DP rank): a scheduler with continuous batching and
//! chunked prefill, a block pool with a prefix cache, preemption, and a compute cost. It is a state
//! machine like the protocol cores and knows as little: it tells them what vLLM's scheduler-side
//! hooks would tell ([`PrefillHook`](kvferry_engine::core::message::PrefillHook),
//! [`DecodeHook`](kvferry_engine::core::message::DecodeHook)) and obeys their answers. The shell
//! plays the forward passes ([`StepPlan`]) and gives back [`EngineInput::StepDone`].
//!
//! Not modelled: empty steps (an engine without work is simply not stepped), sampling, and prefix
//! hits on generated tokens.

mod config;
mod content;
mod groups;
mod io;
mod kv_pattern;
mod machine;
mod pool;
mod request;
mod steps;
mod termination;

pub use self::config::{EngineConfig, EngineConfigError, GroupConfig};
pub use self::content::PromptContent;
pub use self::io::{BlockGrowth, ComputeChunk, EngineEffect, EngineInput, PoolGauges, StepPlan};
pub use self::kv_pattern::{WORD_STEP, write_words};
pub use self::machine::SimEngine;
