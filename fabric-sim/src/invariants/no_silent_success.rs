//! I6: finished means that all ranks and layers had the right bytes; a prompt that decode computed
//! itself is reported and counted with its cause.

use super::state::{RequestAt, TrackedClient};
use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::ids::{LegId, RankSet, RequestId};
use kvferry_engine::core::message::{DecodeAnswer, Role};
use kvferry_engine::core::router::{ClientAnswer, LegEvent};
use std::collections::{BTreeMap, BTreeSet};

/// What became of the KV of a decode request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KvStatus {
    loaded: bool,
    failed: bool,
    /// Ranks whose memory was compared and found right.
    checked: RankSet,
}

/// Brings what happened to the KV of a request together with what its leg and its client are told.
#[derive(Debug, Default)]
pub(super) struct NoSilentSuccess {
    requests: BTreeMap<RequestAt, KvStatus>,
    legs: BTreeMap<LegId, RequestAt>,
    /// Legs whose decode computed the prompt itself.
    recomputed: BTreeSet<LegId>,
}

impl NoSilentSuccess {
    fn kv(&mut self, who: SimProcessId, request: &RequestId) -> &mut KvStatus {
        self.requests.entry((who, request.clone())).or_default()
    }

    /// A leg is over.
    fn ended(&mut self, now: CheckContext<'_>, who: SimProcessId, leg: LegId, event: &LegEvent) {
        let Some(key) = self.legs.remove(&leg) else { return };
        let kv = self.requests.remove(&key).unwrap_or_default();
        let LegEvent::Done { recomputed, .. } = event else { return };
        if recomputed.is_some() {
            self.recomputed.insert(leg);
            return;
        }
        let place = now.state.place(who.instance);
        if place.is_none_or(|place| place.role != Role::Decode) {
            return;
        }
        let all = RankSet::first(place.map_or(1, |place| place.tp));
        let wrong = if kv.failed {
            "its transfer failed and nothing is said of a recompute"
        } else if kv.loaded && !kv.checked.covers(all) {
            "not all ranks had the right bytes"
        } else {
            return;
        };
        let name = now.name(who.instance);
        now.report(|| format!("request {} of {name} ended well, but {wrong}: {kv:?}", key.1));
    }
}

impl Invariant for NoSilentSuccess {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[LegTaken, Leg, DecodeAnswer, Used, Answered, Crashed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::LegTaken { who, leg, request } => {
                self.legs.insert(*leg, (*who, (*request).clone()));
            }
            Observation::DecodeAnswer { who, answer } => match answer {
                DecodeAnswer::Allocate { .. } => {}
                DecodeAnswer::Loaded { request } => self.kv(*who, request).loaded = true,
                DecodeAnswer::LoadFailed { request, .. }
                | DecodeAnswer::Rejected { request, .. } => self.kv(*who, request).failed = true,
            },
            Observation::Used { at, request, wrong: None, .. } => {
                self.kv(at.who, request).checked.insert(at.rank);
            }
            Observation::Leg {
                who,
                leg,
                event: event @ (LegEvent::Done { .. } | LegEvent::Failed(_)),
            } => {
                self.ended(now, *who, *leg, event);
            }
            Observation::Answered { client, answer } => {
                // What an earlier leg of a sample did is of no use to the client.
                let mut legs =
                    now.state.client(*client).into_iter().flat_map(TrackedClient::newest);
                let recomputed = legs.any(|newest| self.recomputed.contains(&newest.leg));
                if let (ClientAnswer::Finished { recomputed: None }, true) = (answer, recomputed) {
                    now.report(|| {
                        format!("client {client} is told of no recompute, but a leg of it was one")
                    });
                }
            }
            Observation::Crashed { who } => {
                self.requests.retain(|key, _| key.0 != *who);
                self.legs.retain(|_, key| key.0 != *who);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, InvariantBench, InvariantId, decode_body, finished, finished_answer, rank, recomputed,
        request,
    };

    fn bench() -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::NoSilentSuccess);
        bench.dispatched(1, 9, D0, &decode_body("r"));
        bench.leg_taken(D0, 9, "r");
        bench.allocated(D0, "r", 16, &[4]);
        bench
    }

    fn used(bench: &mut InvariantBench) {
        let (at, request) = (rank(D0), &request("r"));
        bench.see(Observation::Used { at, request, tokens: 16, wrong: None });
    }

    #[test]
    fn a_load_that_was_checked_on_all_ranks_is_a_success() {
        let mut bench = bench();
        bench.loaded(D0, "r");
        used(&mut bench);
        bench.leg(D0, 9, &finished());
        bench.answered(1, &finished_answer(false));
        bench.holds();
    }

    #[test]
    fn a_load_that_was_not_checked_is_none() {
        let mut bench = bench();
        bench.loaded(D0, "r");
        bench.leg(D0, 9, &finished());
        bench.fails("not all ranks had the right bytes");
    }

    #[test]
    fn a_recompute_has_to_be_told() {
        let mut bench = bench();
        bench.load_failed(D0, "r");
        bench.leg(D0, 9, &recomputed());
        bench.answered(1, &finished_answer(true));
        bench.holds();
        let mut bench = self::bench();
        bench.load_failed(D0, "r");
        bench.leg(D0, 9, &finished());
        bench.fails("nothing is said of a recompute");
        let mut bench = self::bench();
        bench.load_failed(D0, "r");
        bench.leg(D0, 9, &recomputed());
        bench.answered(1, &finished_answer(false));
        bench.fails("client 1 is told of no recompute");
    }
}
