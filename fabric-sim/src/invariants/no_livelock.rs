//! L3: retries per request and reconnects per peer stay under their limits while nothing
//! progresses.

use super::{Found, Invariant, Limits, Now};
use crate::observe::{Kind, Observation, Rank};
use engine::core::dialect::native::Frame;
use engine::core::ids::ClientId;
use engine::core::router::LegBody;
use engine::core::time::Nanos;
use engine::fabric::Outcome;
use scenarios::lists::InvariantId;
use std::collections::BTreeMap;

/// Dials of one instance to another in [`DIAL_SPAN`] without an answer.
const DIALS_MAX: u32 = 200;

/// See [`DIALS_MAX`].
const DIAL_SPAN: Nanos = Nanos::from_secs(10);

/// Failed operations of one rank in a row, per operation that it may have in flight.
const FAILURES_MAX: u32 = 64;

/// A part of a request that is dispatched again when it fails: prompt, and sample of a decode leg.
type Part = (u32, Option<u32>);

#[derive(Clone, Copy, Debug, Default)]
struct Dials {
    since: Nanos,
    count: u32,
}

/// Counts dispatches per prompt and sample, dials per pair and failures per rank.
#[derive(Debug)]
pub(super) struct NoLivelock {
    limits: Limits,
    dispatches: BTreeMap<ClientId, BTreeMap<Part, u32>>,
    dials: BTreeMap<(u16, u16), Dials>,
    /// Failures since the last success, and the largest credits seen.
    failures: BTreeMap<Rank, u32>,
}

impl NoLivelock {
    pub(super) fn new(limits: Limits) -> NoLivelock {
        let (dispatches, dials) = (BTreeMap::new(), BTreeMap::new());
        NoLivelock { limits, dispatches, dials, failures: BTreeMap::new() }
    }

    /// Counts a dispatch; the limit if it is exceeded.
    fn dispatched(&mut self, client: ClientId, body: &LegBody) -> Option<(u32, u32)> {
        let parts = self.dispatches.entry(client).or_default();
        let part = match body {
            LegBody::Prefill { prompt, .. } => (*prompt, None),
            LegBody::Decode { prompt, sample, .. } => (*prompt, Some(*sample)),
        };
        let count = parts.entry(part).or_default();
        *count += 1;
        let count = *count;
        // Each sample of a prompt that is tried again needs the prompt again.
        let samples = parts.keys().filter(|other| other.0 == part.0 && other.1.is_some()).count();
        let times = if part.1.is_none() { samples.max(1) as u32 } else { 1 };
        let limit = 1 + self.limits.retries * times;
        (count > limit).then_some((count, limit))
    }

    fn dialled(&mut self, now: Nanos, from: u16, to: u16) -> bool {
        let dials = self.dials.entry((from, to)).or_default();
        if now > dials.since + DIAL_SPAN {
            *dials = Dials { since: now, count: 0 };
        }
        dials.count += 1;
        dials.count == DIALS_MAX + 1
    }
}

impl Invariant for NoLivelock {
    fn id(&self) -> InvariantId {
        InvariantId::NoLivelock
    }

    fn wants(&self) -> &'static [Kind] {
        &[
            Kind::Dispatched,
            Kind::Answered,
            Kind::ClientGone,
            Kind::Dialled,
            Kind::FrameArrived,
            Kind::Completed,
        ]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Dispatched { client, body, .. } => {
                if let Some((count, limit)) = self.dispatched(*client, body) {
                    found.report(self.id(), now.at, || {
                        format!("a leg of client {client} was dispatched {count} times, at most {limit} are allowed")
                    });
                }
            }
            Observation::Answered { client, .. } | Observation::ClientGone { client } => {
                self.dispatches.remove(client);
            }
            Observation::Dialled { from, to: Some(to) }
                if self.dialled(now.at, from.instance, *to) =>
            {
                found.report(self.id(), now.at, || {
                    let (from, to) = (now.state.name(from.instance), now.state.name(*to));
                    format!("{from} dialled {to} more than {DIALS_MAX} times in 10 s in vain")
                });
            }
            Observation::FrameArrived { from, to, frame: Frame::Welcome(_) } => {
                self.dials.remove(&(to.instance, from.instance));
            }
            Observation::Completed { from, outcome, .. } => {
                self.completed(now, *from, outcome, found)
            }
            _ => {}
        }
    }
}

impl NoLivelock {
    fn completed(&mut self, now: Now<'_>, from: Rank, outcome: &Outcome, found: &mut Found) {
        if *outcome == Outcome::Done {
            if !self.failures.is_empty() {
                self.failures.remove(&from);
            }
            return;
        }
        let count = self.failures.entry(from).or_default();
        *count += 1;
        let limit = FAILURES_MAX * 1_024;
        if *count == limit + 1 {
            found.report(self.id(), now.at, || {
                let name = now.state.name(from.who.instance);
                format!("{limit} operations of {name} rank {} failed in a row", from.rank)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{Bench, D0, P0, decode_body, finished_answer, prefill_body};

    fn bench() -> Bench {
        Bench::new(InvariantId::NoLivelock)
    }

    #[test]
    fn dispatches_are_limited() {
        let mut bench = bench();
        for leg in 0..3 {
            bench.dispatched(1, leg, P0, &prefill_body("r"));
            bench.dispatched(1, 10 + leg, D0, &decode_body("r"));
        }
        bench.holds();
        bench.dispatched(1, 20, D0, &decode_body("r"));
        bench.fails("dispatched 4 times, at most 3");
        let mut bench = self::bench();
        for leg in 0..9 {
            bench.dispatched(1, leg, D0, &decode_body("r"));
            bench.answered(1, &finished_answer(false));
        }
        bench.holds();
    }

    #[test]
    fn dials_in_vain_are_limited() {
        let mut bench = bench();
        let dial = |bench: &mut Bench, count, pause| {
            for _ in 0..count {
                bench.now = bench.now + pause;
                bench.see(Observation::Dialled { from: D0, to: Some(P0.instance) });
            }
        };
        dial(&mut bench, 500, Nanos::from_ms(100));
        bench.holds();
        dial(&mut bench, 500, Nanos::from_ms(1));
        bench.fails("d0 dialled p0 more than 200 times");
    }
}
