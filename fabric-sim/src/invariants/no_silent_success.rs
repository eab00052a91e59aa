//! I6: finished means that all ranks and layers had the right bytes; a prompt that decode computed
//! itself is reported and counted with its cause.

use super::{CheckContext, Invariant, ViolationLog};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::ids::{ClientId, LegId, RankSet, RequestId};
use kvferry_engine::core::message::{DecodeAnswer, Role};
use kvferry_engine::core::router::{ClientAnswer, LegBody, LegEvent};
use kvferry_scenarios::lists::InvariantId;
use std::collections::BTreeMap;

/// A sample of a request: its prompt, and which one.
type SampleId = (u32, u32);

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
    requests: BTreeMap<(SimProcessId, RequestId), KvStatus>,
    legs: BTreeMap<LegId, (SimProcessId, RequestId)>,
    /// Whose decode leg it is, and of which prompt and sample.
    samples: BTreeMap<LegId, (ClientId, SampleId)>,
    /// The newest leg of each sample, and whether it computed its prompt itself. What an earlier
    /// one did is of no use to the client.
    clients: BTreeMap<ClientId, BTreeMap<SampleId, (LegId, bool)>>,
}

impl NoSilentSuccess {
    fn kv(&mut self, who: SimProcessId, request: &RequestId) -> &mut KvStatus {
        self.requests.entry((who, request.clone())).or_default()
    }

    /// A leg is over.
    fn ended(
        &mut self,
        now: CheckContext<'_>,
        who: SimProcessId,
        leg: LegId,
        event: &LegEvent,
        found: &mut ViolationLog,
    ) {
        let sample = self.samples.remove(&leg);
        let Some(key) = self.legs.remove(&leg) else { return };
        let kv = self.requests.remove(&key).unwrap_or_default();
        let LegEvent::Done { recomputed, .. } = event else { return };
        if recomputed.is_some() {
            let newest = sample.and_then(|(client, part)| {
                self.clients.get_mut(&client)?.get_mut(&part).filter(|newest| newest.0 == leg)
            });
            if let Some((_, recomputed)) = newest {
                *recomputed = true;
            }
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
        found.report(self.id(), now.at, || {
            let name = now.state.name(who.instance);
            format!("request {} of {name} ended well, but {wrong}: {kv:?}", key.1)
        });
    }
}

impl Invariant for NoSilentSuccess {
    fn id(&self) -> InvariantId {
        InvariantId::NoSilentSuccess
    }

    fn wants(&self) -> &'static [ObservationKind] {
        &[
            ObservationKind::Dispatched,
            ObservationKind::LegTaken,
            ObservationKind::Leg,
            ObservationKind::DecodeAnswer,
            ObservationKind::Used,
            ObservationKind::Answered,
            ObservationKind::ClientGone,
            ObservationKind::Crashed,
        ]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>, found: &mut ViolationLog) {
        match seen {
            Observation::Dispatched {
                leg,
                client,
                body: LegBody::Decode { prompt, sample, .. },
                ..
            } => {
                let part = (*prompt, *sample);
                self.samples.insert(*leg, (*client, part));
                self.clients.entry(*client).or_default().insert(part, (*leg, false));
            }
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
                self.ended(now, *who, *leg, event, found);
            }
            Observation::Answered { client, answer } => {
                let legs = self.clients.remove(client).unwrap_or_default();
                let recomputed = legs.values().any(|(_, recomputed)| *recomputed);
                if let (ClientAnswer::Finished { recomputed: None }, true) = (answer, recomputed) {
                    found.report(self.id(), now.at, || {
                        format!("client {client} is told of no recompute, but a leg of it was one")
                    });
                }
            }
            Observation::ClientGone { client } => drop(self.clients.remove(client)),
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
        D0, InvariantBench, decode_body, finished, finished_answer, rank, recomputed, request,
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
