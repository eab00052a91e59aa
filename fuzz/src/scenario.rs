//! Scenario files: any text is a scenario or one clear error, and a scenario is the same run for
//! the same seed, or one clear error.

use kvferry_scenarios::ScenarioError;
use std::path::Path;
use toml::{Table, Value};

/// Runs of equal tokens that the prompts of a scenario may have together; beyond, it is parsed but
/// not drawn.
const WORK_MAX: u64 = 1 << 16;

/// Takes the bytes after the first as a scenario and draws it with the first as seed.
///
/// # Panics
/// If an error does not say what and where, or two draws with one seed differ.
pub fn run(data: &[u8]) {
    let Some((seed, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let scenario = match kvferry_scenarios::parse("fuzz.toml", text, Path::new(""), None) {
        Ok(scenario) => scenario,
        Err(why) => return clear(&why, text),
    };
    // What a trace names is a file of this machine.
    if scenario.trace().is_some() || work(text) > WORK_MAX {
        return;
    }
    match scenario.draw(u64::from(*seed)) {
        Ok(run) => assert_eq!(scenario.draw(u64::from(*seed)).ok(), Some(run)),
        Err(why) => clear(&why, text),
    }
}

fn clear(why: &ScenarioError, text: &str) {
    assert!(!why.what.is_empty() && !why.remedy.is_empty(), "{why:?}");
    let lines = text.bytes().filter(|byte| *byte == b'\n').count() + 1;
    assert!(why.line as usize <= lines, "{why:?} of {lines} lines");
}

/// Most runs of tokens that drawing the workload makes.
fn work(text: &str) -> u64 {
    let table: Table = text.parse().unwrap_or_default();
    let workload = table.get("workload").and_then(Value::as_table);
    let most = |key, default| {
        let value = workload.and_then(|workload| workload.get(key));
        value.map_or(default, |value| largest(&value.to_string()))
    };
    let prompts = most("requests", 8).max(1).saturating_mul(most("prompts", 1).max(1));
    prompts.saturating_mul(most("prompt_tokens", 256).max(1))
}

/// The largest number in a value, which may be a range or a choice.
fn largest(value: &str) -> u64 {
    let digits = value.replace('_', "");
    let numbers = digits.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(u64::MAX)).max().unwrap_or(0)
}
