//! The scenario that is part of the program, so that it runs without any file.

use crate::ScenarioError;
use crate::parse::{Scenario, parse_bundled};
use std::path::Path;

/// Name of the bundled scenario in results.
pub const BUNDLED: &str = "bundled:trace/push.toml";

/// `trace/push.toml` on `traces/chat.jsonl`, or on another trace in its place.
///
/// # Errors
/// A replacement that cannot be read.
pub fn bundled(trace: Option<&Path>) -> Result<Scenario, ScenarioError> {
    let text = include_str!("../trace/push.toml");
    parse_bundled(BUNDLED, text, include_str!("../traces/chat.jsonl"), trace)
}
