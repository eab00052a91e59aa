//! The bundled trace: chat sessions whose prompts grow from turn to turn.
//!
//! ```
//! use kvferry_scenarios::trace::generate::{TraceSpec, generate, to_jsonl};
//!
//! let spec = TraceSpec { seed: 1, sessions: 2, span_ms: 1_000 };
//! let records = generate(&spec);
//! assert!(records.is_sorted_by_key(|record| record.timestamp));
//! assert_eq!(to_jsonl(&records).lines().count(), records.len());
//! ```

use super::{TOKENS_PER_HASH, TraceRecord};
use crate::decide::{DecisionKey, below, within};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceSpec {
    /// Names the trace; another seed gives another.
    pub seed: u64,
    pub sessions: u64,
    /// Milliseconds in which they start and end.
    pub span_ms: u64,
}

/// The trace in `scenarios/traces/chat.jsonl`.
pub const CHAT: TraceSpec = TraceSpec { seed: 1, sessions: 176, span_ms: 120_000 };

/// Longest prompt of a session.
const PROMPT_MAX: u64 = 120_000;

/// Makes the records of a trace by timestamp.
///
/// Each session starts with a system prompt shared by all and a first message; each further turn
/// appends the last answer and a new message, so its prompt starts with the one before. Lengths
/// are products of two uniform draws: many short ones and a long tail.
pub fn generate(spec: &TraceSpec) -> Vec<TraceRecord> {
    let mut turns = Vec::new();
    for session in 0..spec.sessions {
        let key = |name: &str| DecisionKey::new(spec.seed, name).actor(session);
        let mut at = below(key("start").get(), spec.span_ms);
        // One session in six is about a long document.
        let longest = if below(key("document").get(), 6) == 0 { 120_000 } else { 26_000 };
        let mut input = 880 + skewed(&key("first"), longest);
        for turn in 0..=below(key("turns").get(), 5).saturating_sub(1) {
            let key = |name: &str| key(name).nth(turn);
            let output = 1 + skewed(&key("output"), 1_350);
            if at >= spec.span_ms || input > PROMPT_MAX {
                break;
            }
            turns.push((at, session, input, output));
            at += output * 25 + within(key("think").get(), 2_000, 30_000);
            input += output + 20 + skewed(&key("message"), 3_000);
        }
    }
    turns.sort_unstable();
    number(&turns)
}

/// `0..max`, small values more likely: the product of two uniform draws.
fn skewed(key: &DecisionKey, max: u64) -> u64 {
    below(key.part("other").get(), below(key.get(), max))
}

/// Gives ids to runs in the order in which they first appear.
fn number(turns: &[(u64, u64, u64, u64)]) -> Vec<TraceRecord> {
    let mut ids = BTreeMap::new();
    let mut records = Vec::new();
    for &(timestamp, session, input, output) in turns {
        let runs = input.div_ceil(u64::from(TOKENS_PER_HASH));
        let rest = input % u64::from(TOKENS_PER_HASH);
        let hash_ids = (0..runs).map(|run| {
            // The first run is the system prompt. A run that is not full differs from turn to turn.
            let owner = if run == 0 { u64::MAX } else { session };
            let length = if run + 1 == runs { rest } else { 0 };
            let next = ids.len() as u64;
            *ids.entry((owner, run, length)).or_insert(next)
        });
        records.push(TraceRecord {
            timestamp,
            input_length: input as u32,
            output_length: output as u32,
            hash_ids: hash_ids.collect(),
        });
    }
    records
}

/// The records as lines of JSON.
pub fn to_jsonl(records: &[TraceRecord]) -> String {
    let mut text = String::new();
    for record in records {
        text.push_str(&serde_json::to_string(record).expect("a record is plain data"));
        text.push('\n');
    }
    text
}
