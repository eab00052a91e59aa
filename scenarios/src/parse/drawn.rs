//! The run that a seed draws, as a scenario file.

use super::{Scenario, parse};
use crate::ScenarioError;
use crate::run::Run;
use kvferry_faults::draw_log::{LoggedDraw, logged};
use kvferry_faults::file::text_of;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::path::Path;
use toml::de::DeTable;

/// Another text in place of some bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Replacement {
    bytes: Range<usize>,
    text: String,
}

/// The file at `path` with what `seed` draws in place of ranges and choices, without the faults that
/// the seed does not have. It is the same run; what differs from one instance, request or use to the
/// next stays as it is, and the seed draws it again.
///
/// # Errors
/// As [`super::load`] and [`Scenario::draw`].
pub fn drawn(path: impl AsRef<Path>, seed: u64) -> Result<String, ScenarioError> {
    let path = path.as_ref();
    let remedy = "name a scenario file, see `kvferry list scenarios`";
    let text = text_of(path, "scenario", remedy)?;
    drawn_text((&path.display().to_string(), &text), path.parent().unwrap_or(Path::new("")), seed)
}

/// As [`drawn`], of a file with this name and text whose trace is looked for in `folder`.
///
/// # Errors
/// As [`drawn`].
pub fn drawn_text(
    (name, text): (&str, &str),
    folder: &Path,
    seed: u64,
) -> Result<String, ScenarioError> {
    let scenario = parse(name, text, folder, None)?;
    let (run, log) = logged(|| scenario.draw(seed));
    let run = run?;
    let fixed = seed_and_trace(&scenario, text, seed);
    let is_same = |text: &str| {
        let scenario = parse(name, text, folder, None).ok();
        let again = scenario.and_then(|scenario| scenario.draw(seed).ok());
        again.is_some_and(|again| without_places(again) == without_places(run.clone()))
    };
    let (values, faults) = (values(text, log), faults(&scenario, text, seed));
    let all = |more: &[Replacement]| applied(text, [fixed.as_slice(), more].concat());
    let mut kept = [values.as_slice(), &faults].concat();
    if !is_same(&all(&kept)) {
        // A value that others are made from, such as a number of instances that come before others.
        kept.clear();
        for one in faults.into_iter().chain(values) {
            kept.push(one);
            if !is_same(&all(&kept)) {
                kept.pop();
            }
        }
    }
    Ok(format!("{}{}", heading(&run, name), all(&kept)))
}

/// A run without what says where in its file something stands.
fn without_places(mut run: Run) -> Run {
    run.faults.iter_mut().for_each(|fault| fault.line = 0);
    run
}

/// The one seed, and the trace by a path that holds anywhere.
fn seed_and_trace(scenario: &Scenario, text: &str, seed: u64) -> Vec<Replacement> {
    let Ok(table) = DeTable::parse(text) else { return Vec::new() };
    let table = table.get_ref();
    let mut found = Vec::new();
    match table.get("seed") {
        Some(value) => found.push(Replacement { bytes: value.span(), text: seed.to_string() }),
        None => found.push(Replacement { bytes: 0..0, text: format!("seed = {seed}\n") }),
    }
    if let Some(seeds) = table.get("seeds") {
        found.push(Replacement { bytes: seeds.span(), text: "1".into() });
    }
    let trace = table.get("workload").and_then(|workload| workload.get_ref().get("trace"));
    if let (Some(value), Some(path)) = (trace, scenario.trace())
        && let Ok(path) = std::fs::canonicalize(path)
    {
        let text = toml::Value::String(path.display().to_string()).to_string();
        found.push(Replacement { bytes: value.span(), text });
    }
    found
}

/// Values of which all that was drawn is the same.
fn values(text: &str, log: Vec<LoggedDraw>) -> Vec<Replacement> {
    let mut drawn: BTreeMap<(usize, usize), Vec<String>> = BTreeMap::new();
    for LoggedDraw { bytes, text } in log {
        let texts = drawn.entry((bytes.start, bytes.end)).or_default();
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    let one = |((start, end), texts): ((usize, usize), Vec<String>)| {
        let old = &text[start..end];
        let [new] = <[String; 1]>::try_from(texts).ok()?;
        let is_bare = new == "true" || new == "false" || new.parse::<f64>().is_ok();
        let new = if is_bare { new } else { format!("\"{new}\"") };
        (new != old && old.trim_matches('"') != new.trim_matches('"'))
            .then_some(Replacement { bytes: start..end, text: new })
    };
    drawn.into_iter().filter_map(one).collect()
}

/// Faults that the seed has keep their decisions, the others go.
fn faults(scenario: &Scenario, text: &str, seed: u64) -> Vec<Replacement> {
    let mut found = Vec::new();
    for fault in &scenario.fault {
        let (at, kind) = (fault.kind_bytes.clone(), &text[fault.kind_bytes.clone()]);
        if !fault.is_on(seed) {
            found.extend(
                table_around(text, at.start)
                    .map(|bytes| Replacement { bytes, text: String::new() }),
            );
        } else if let Some(key) = fault.decisions_to_add() {
            let behind = text[at.end..].trim_start_matches([' ', '\t']);
            let is_line = behind.is_empty() || behind.starts_with(['\n', '\r', '#']);
            let between = if is_line { "\n" } else { ", " };
            let text = format!("{kind}{between}decisions = \"{key}\"");
            found.push(Replacement { bytes: at, text });
        }
    }
    found
}

/// The `[[fault]]` table that has these bytes, to the next table or the end.
fn table_around(text: &str, at: usize) -> Option<Range<usize>> {
    let start = text[..at].rfind("[[fault]]")?;
    if text[start..at].matches("\n[").count() > 0 {
        return None;
    }
    let end = text[at..].find("\n[").map_or(text.len(), |next| at + next + 1);
    Some(start..end)
}

/// The text with other texts in it; of two that are about the same bytes the larger one holds.
fn applied(text: &str, mut replacements: Vec<Replacement>) -> String {
    replacements.sort_by_key(|one| (one.bytes.start, usize::MAX - one.bytes.end));
    let (mut made, mut at) = (String::new(), 0);
    for Replacement { bytes, text: new } in replacements {
        if bytes.start >= at {
            made.push_str(&text[at..bytes.start]);
            made.push_str(&new);
            at = bytes.end;
        }
    }
    made.push_str(&text[at..]);
    made
}

/// What the run is, as comments.
fn heading(run: &Run, name: &str) -> String {
    let mut text = format!("# What seed {} draws of {name:?}.\n", run.seed);
    for host in &run.hosts {
        let _ = writeln!(text, "# {}: host, pool of {} bytes", host.name, host.config.pool);
    }
    for one in run.instances.iter().filter(|one| !one.is_pool) {
        let (layout, tp, blocks) = (one.layout, one.tp, one.blocks);
        let tokens = one.block_tokens;
        let _ = writeln!(
            text,
            "# {}: {}, TP {tp}, {blocks} blocks of {tokens} tokens, {layout:?}, {}",
            one.name, one.role, one.mode
        );
    }
    let _ = writeln!(text, "# {} requests, {} streams", run.requests.len(), run.streams.len());
    text
}
