//! Results as text.

use crate::process::ruled;
use crate::simulator::outcome::{LatencyPercentiles, RunOutcome};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use kvferry_sim::world::{OperationTotals, ReceiverTotals, RunVerdict};
use std::collections::BTreeMap;

/// Rows in aligned columns without lines; from column `numbers` on aligned to the right.
pub(crate) fn columns(rows: &[Vec<String>], numbers: usize) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    for row in rows {
        table.add_row(row);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if index >= numbers {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Everything about one run.
pub(crate) fn one(outcome: &RunOutcome) -> String {
    let mut table = ruled(vec![outcome.scenario.clone(), verdict(outcome)]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_string(), value]);
    };
    row("seed", outcome.seed.to_string());
    if !outcome.faults.is_empty() {
        row("liveness core", core(outcome));
    }
    let RunOutcome { finished, failed, unknown, .. } = outcome;
    row("requests", format!("{finished} finished, {failed} failed, {unknown} unknown"));
    let ReceiverTotals { finished, failed, gone } = outcome.receivers;
    if finished + failed + gone > 0 {
        row("receivers", format!("{finished} finished, {failed} failed, {gone} gone"));
    }
    row("failed", caused(outcome.failed, &outcome.failed_causes));
    row("recomputed", caused(outcome.recomputed, &outcome.recomputed_causes));
    // Processes do not tell how often faults hit.
    if !outcome.trace_hash.is_empty() {
        fault_rows(outcome).into_iter().for_each(|(name, hits)| row(&name, hits));
    }
    row("bytes moved", bytes(outcome.bytes_moved));
    row("wall time", format!("{:.3} s", outcome.wall_seconds));
    // Only the simulator sees the rest.
    if !outcome.trace_hash.is_empty() {
        row("time to first token", spread(outcome.ttft.as_ref()));
        row("transfer time", spread(outcome.transfer.as_ref()));
        row("link utilisation", format!("{:.2} %", 100.0 * outcome.link_utilisation));
        row("links above 80 %", full_links(outcome));
        row("operations", operations(outcome));
        row("peak blocks held", grouped(outcome.peak_blocks));
        row("peak blocks in quarantine", grouped(outcome.peak_quarantined));
        row("events", rate(outcome));
        row("simulated time", format!("{:.3} s", outcome.sim_seconds));
        row("trace hash", outcome.trace_hash.clone());
    }
    table.trim_fmt()
}

/// A row per run.
pub(crate) fn many(outcomes: &[RunOutcome]) -> String {
    let mut table = ruled(vec![
        "scenario",
        "seed",
        "verdict",
        "fin/fail/unk",
        "recomp",
        "TTFT p50/90/99",
        "transfer p50/90/99",
        "moved",
        "link %",
        "blocks",
        "events",
        "wall",
    ]);
    for outcome in outcomes {
        let RunOutcome { finished, failed, unknown, .. } = outcome;
        table.add_row([
            outcome.scenario.clone(),
            outcome.seed.to_string(),
            verdict(outcome),
            format!("{finished}/{failed}/{unknown}"),
            outcome.recomputed.to_string(),
            brief(outcome.ttft.as_ref()),
            brief(outcome.transfer.as_ref()),
            bytes(outcome.bytes_moved),
            format!("{:.1}", 100.0 * outcome.link_utilisation),
            grouped(outcome.peak_blocks),
            grouped(outcome.events),
            format!("{:.2} s", outcome.wall_seconds),
        ]);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if ![0, 2].contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// What the fabric could not do of a scenario; empty if it could all.
pub(crate) fn skipped(outcome: &RunOutcome) -> String {
    let lines = outcome.skipped.iter();
    lines.map(|what| format!("{}: skipped: {what}\n", outcome.scenario)).collect()
}

/// Where the logs of the processes are, and what they explain; empty if there are none.
pub(crate) fn logs(outcome: &RunOutcome) -> String {
    let Some(folder) = &outcome.logs else { return String::new() };
    let recomputed = caused(outcome.recomputed, &outcome.recomputed_causes);
    let RunOutcome { scenario, failed, .. } = outcome;
    let folder = folder.display();
    format!(
        "{scenario}: failed {failed}, recomputed {recomputed}; logs of the processes: {folder}\n"
    )
}

/// What went wrong in a run, in at most `most` lines, and how to see it again; empty if nothing
/// did.
pub(crate) fn trouble(outcome: &RunOutcome, most: usize) -> String {
    let mut text = String::new();
    if outcome.exit == RunVerdict::Held {
        return text;
    }
    text.push_str(&format!("{} seed {}: {}\n", outcome.scenario, outcome.seed, verdict(outcome)));
    for violation in outcome.violations.iter().take(most) {
        text.push_str(&format!("  {violation}\n"));
    }
    let shown = outcome.violations.len().min(most) as u64;
    if let Some(more) = outcome.violation_count.checked_sub(shown)
        && more > 0
    {
        text.push_str(&format!("  and {more} more\n"));
    }
    if !outcome.faults.is_empty() {
        text.push_str(&format!("  faults that hit: {}\n", hits(outcome)));
    }
    if let Some(left) = &outcome.left {
        text.push_str(&format!("  left at the end: {left}\n"));
    }
    if !outcome.core.is_empty() {
        text.push_str(&format!("  healed for liveness: {}\n", core(outcome)));
    }
    text.push_str(&format!("  repeat with: {}\n", outcome.repeat));
    text
}

/// A row for each table of faults that the run has, with how often it hit, and for each kind that
/// drawing has worked into the run.
fn fault_rows(outcome: &RunOutcome) -> Vec<(String, String)> {
    let tables = outcome.tables.iter().map(|((line, kind), hits)| {
        let hits = match hits {
            0 => "never hit".into(),
            1 => "hit once".into(),
            hits => format!("hit {} times", grouped(*hits)),
        };
        (format!("{kind}, line {line}"), hits)
    });
    let shaped = outcome.shaped.iter().map(|kind| (kind.to_string(), "for the whole run".into()));
    tables.chain(shaped).collect()
}

/// How often each kind of fault hit.
fn hits(outcome: &RunOutcome) -> String {
    let hits: Vec<_> = outcome.faults.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    hits.join(", ")
}

/// Most ranges of seeds in a line.
const SEED_RANGES_MAX: usize = 12;

/// Faults of the runs that never hit: one line per fault with its seeds; empty if all hit.
pub(crate) fn never_hit(outcomes: &[RunOutcome]) -> String {
    let mut seeds: BTreeMap<(&str, &str), Vec<u64>> = BTreeMap::new();
    let mut runs: BTreeMap<&str, usize> = BTreeMap::new();
    for outcome in outcomes {
        *runs.entry(&outcome.scenario).or_default() += 1;
        for fault in &outcome.never_hit {
            seeds.entry((&outcome.scenario, fault)).or_default().push(outcome.seed);
        }
    }
    let line = |((scenario, fault), seeds): ((&str, &str), Vec<u64>)| {
        let among = match (seeds.len(), runs[scenario]) {
            (_, 1) => format!("seed {}", seeds[0]),
            (never, all) => format!("{never} of {all} seeds: {}", ranges(&seeds)),
        };
        format!("{scenario}: never hit: {fault} ({among})\n")
    };
    seeds.into_iter().map(line).collect()
}

/// Ascending numbers, with consecutive ones as a range.
fn ranges(numbers: &[u64]) -> String {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*number) => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let more = if ranges.len() > SEED_RANGES_MAX { ", ..." } else { "" };
    let shown = ranges.iter().take(SEED_RANGES_MAX);
    let words = shown.map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    words.collect::<Vec<_>>().join(", ") + more
}

/// Who was healed for the liveness phase.
fn core(outcome: &RunOutcome) -> String {
    let names = outcome.core.iter().map(String::as_str);
    std::iter::once("router").chain(names).collect::<Vec<_>>().join(", ")
}

fn verdict(outcome: &RunOutcome) -> String {
    match (outcome.exit, outcome.verdict) {
        (RunVerdict::Held, RunVerdict::Held) => "held".into(),
        (RunVerdict::Held, verdict) => format!("{verdict}, as expected"),
        (_, RunVerdict::Held) => "held, against expectation".into(),
        (_, RunVerdict::Correctness) if outcome.unmet => "an expectation is not met".into(),
        (_, verdict) => verdict.to_string(),
    }
}

fn caused(count: u64, causes: &BTreeMap<String, u64>) -> String {
    let list: Vec<_> = causes.iter().map(|(cause, count)| format!("{count} {cause}")).collect();
    match list.is_empty() {
        true => grouped(count),
        false => format!("{} ({})", grouped(count), list.join(", ")),
    }
}

fn spread(spread: Option<&LatencyPercentiles>) -> String {
    spread.map_or("none".into(), |LatencyPercentiles { p50, p90, p99 }| {
        let [p50, p90, p99] = [p50, p90, p99].map(|seconds| duration(*seconds));
        format!("p50 {p50}, p90 {p90}, p99 {p99}")
    })
}

/// The link that was full for the longest time, and how many were.
fn full_links(outcome: &RunOutcome) -> String {
    let Some(first) = outcome.full_links.first() else { return "none".into() };
    let (time, share) = (duration(first.full.as_secs_f64()), first.full_ppm as f64 / 1e4);
    let all = format!("{} for {time} ({share:.1} % of the time)", first.link);
    match outcome.full_links.len() - 1 {
        0 => all,
        more => format!("{all}, {more} more"),
    }
}

fn operations(outcome: &RunOutcome) -> String {
    let OperationTotals { posted, refused, failed } = outcome.operations;
    let [posted, refused, failed] = [posted, refused, failed].map(grouped);
    format!("{posted} posted, {refused} refused as busy, {failed} failed")
}

fn brief(spread: Option<&LatencyPercentiles>) -> String {
    spread.map_or("-".into(), |LatencyPercentiles { p50, p90, p99 }| {
        [p50, p90, p99].map(|seconds| duration(*seconds).replace(' ', "")).join("/")
    })
}

fn rate(outcome: &RunOutcome) -> String {
    let events = grouped(outcome.events);
    match outcome.events as f64 / outcome.wall_seconds {
        rate if rate.is_finite() => format!("{events} ({:.2} million/s)", rate / 1e6),
        _ => events,
    }
}

/// Seconds in the unit that suits them.
fn duration(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "us"),
    };
    format!("{value:.*} {unit}", if value < 10.0 { 2 } else { 1 })
}

/// Bytes in the decimal unit that suits them.
fn bytes(count: u64) -> String {
    const UNITS: &[&str] = &["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let step = (count.max(1).ilog10() / 3) as usize;
    match step {
        0 => format!("{count} B"),
        step => format!("{:.2} {}", count as f64 / 1000f64.powi(step as i32), UNITS[step]),
    }
}

/// A number with its thousands apart.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_listed_as_ranges() {
        assert_eq!(ranges(&[7]), "7");
        assert_eq!(ranges(&[1, 2, 3, 9, 11, 12]), "1-3, 9, 11-12");
        let odd: Vec<u64> = (0..40).map(|nth| 2 * nth + 1).collect();
        assert!(ranges(&odd).ends_with("21, 23, ..."), "{}", ranges(&odd));
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_500), "1.50 kB");
        assert_eq!(bytes(u64::MAX), "18.45 EB");
        assert_eq!(duration(0.000_002_5), "2.50 us");
        assert_eq!(duration(0.012_34), "12.3 ms");
        assert_eq!(duration(75.0), "75.0 s");
    }
}
