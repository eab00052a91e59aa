//! Overview of a run: stages of its requests, use of its links, faults, and times to first token.

use super::{NONE, OUTSIDE};
use crate::simulator::timeline::{EventKind, LinkBytes, RequestSpan, Timeline, TimelineEvent};
use kvferry_engine::core::Nanos;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most requests that have a bar.
const REQUESTS_MAX: usize = 2_000;

/// Intervals over which the use of links is averaged.
const BINS: usize = 150;

/// Most links that have a row.
const LINKS_MAX: usize = 12;

/// Most faults and violations that are marked.
const MARKS_MAX: usize = 500;

/// Data of the overview; `shown` are the events on the page.
pub(super) fn data(timeline: &Timeline, shown: &Range<usize>) -> Value {
    // Later requests are the simulator's own, which check that the system works again.
    let settled = timeline.settled().unwrap_or(Nanos::MAX);
    let own = timeline.requests.partition_point(|span| span.asked < settled);
    let (spans, own) = timeline.requests.split_at(own);
    let asked = spans.iter().map(|span| span.asked);
    let ended = spans.iter().filter_map(|span| span.ended.or(span.loaded));
    let marked = |(_, event): &(usize, &TimelineEvent)| {
        matches!(event.kind, EventKind::Fault | EventKind::Violation)
    };
    let landed = &timeline.landed[..timeline.landed.partition_point(|it| it.at < settled)];
    let landed_at = || landed.iter().map(|it| it.at);
    let marks: Vec<_> = (0..).zip(&timeline.events).filter(marked).collect();
    let times = || marks.iter().map(|(_, event)| event.at);
    let from = asked.chain(landed_at()).chain(times()).min().unwrap_or(Nanos::ZERO);
    let to = ended.chain(landed_at()).chain(times()).max().unwrap_or(from).max(Nanos(from.0 + 1));
    let index = |event: usize| match shown.contains(&event) {
        true => (event - shown.start) as i64,
        false => OUTSIDE,
    };
    let requests =
        spans.iter().take(REQUESTS_MAX).map(|span| request(span, index(span.event as usize)));
    let marks = marks.iter().take(MARKS_MAX).map(|(at, event)| {
        let is_violation = event.kind == EventKind::Violation;
        json!([event.at.0, event.label, is_violation, index(*at)])
    });
    let mut waits: Vec<u64> = spans.iter().filter_map(first_token).collect();
    waits.sort_unstable();
    json!({
        "from": from.0,
        "to": to.0,
        "requests": requests.collect::<Vec<_>>(),
        "requests_left": spans.len().saturating_sub(REQUESTS_MAX),
        "own_requests": own.len(),
        "marks": marks.collect::<Vec<_>>(),
        "marks_left": times().count().saturating_sub(MARKS_MAX),
        "links": links(timeline, landed, from..to),
        "ttft": waits,
    })
}

/// Time to the first token, in nanoseconds.
fn first_token(span: &RequestSpan) -> Option<u64> {
    span.first_token.map(|at| (at - span.asked).0)
}

/// A request as the page has it: client, times of its stages in nanoseconds, whether it was answered
/// well, its event and its transfer.
fn request(span: &RequestSpan, event: i64) -> Value {
    let at = |time: Option<Nanos>| time.map_or(NONE, |time| time.0 as i64);
    json!([
        span.client,
        span.asked.0,
        at(span.begun),
        at(span.computed),
        at(span.loaded),
        at(span.first_token),
        at(span.ended),
        span.is_answered,
        event,
        span.transfer.map_or(NONE, i64::from),
    ])
}

/// The links with most bytes first: names, bytes in all, and bytes in each interval.
fn links(timeline: &Timeline, landed: &[LinkBytes], time: Range<Nanos>) -> Value {
    let mut found: BTreeMap<(u16, u16), (u64, Vec<u64>)> = BTreeMap::new();
    let span = (time.end.0 - time.start.0).max(1);
    for it in landed {
        let bin = u128::from(it.at.0 - time.start.0) * BINS as u128 / u128::from(span);
        let (sum, bins) = found.entry((it.from, it.to)).or_insert_with(|| (0, vec![0; BINS]));
        *sum += it.bytes;
        bins[(bin as usize).min(BINS - 1)] += it.bytes;
    }
    let name = |instance: u16| {
        let pool = timeline.pools.iter().find(|pool| pool.instance == instance);
        pool.map_or_else(|| format!("instance {instance}"), |pool| pool.name.clone())
    };
    let mut links: Vec<_> = found.into_iter().collect();
    links.sort_by_key(|((from, to), (sum, _))| (u64::MAX - sum, *from, *to));
    let left = links.len().saturating_sub(LINKS_MAX);
    let rows = links.into_iter().take(LINKS_MAX).map(|((from, to), (sum, bins))| {
        json!({ "from": name(from), "to": name(to), "bytes": sum, "bins": bins })
    });
    json!({ "rows": rows.collect::<Vec<_>>(), "left": left })
}
