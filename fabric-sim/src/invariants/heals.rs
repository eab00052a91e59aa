//! L2: after the faults stopped, new requests take the fast path again.

use super::{Found, Invariant, Limits, Now};
use crate::observe::{Kind, Observation};
use engine::core::error::Failure;
use engine::core::ids::ClientId;
use engine::core::router::{Answer, LegFailure};
use scenarios::lists::{FaultKind, InvariantId};
use std::collections::{BTreeMap, BTreeSet};

/// A request that comes when everything transient is over, and peers and breakers have had their
/// time, is neither recomputed nor failed, unless it went to a pair that is cut for good or found
/// no live instance.
#[derive(Debug)]
pub(super) struct Heals {
    limits: Limits,
    /// Requests that came late enough, and the instances that served them.
    fresh: BTreeMap<ClientId, BTreeSet<u16>>,
    /// Pairs that are cut for good.
    broken: BTreeSet<(u16, u16)>,
}

impl Heals {
    pub(super) fn new(limits: Limits) -> Heals {
        Heals { limits, fresh: BTreeMap::new(), broken: BTreeSet::new() }
    }

    fn excused(&self, now: Now<'_>, served: &BTreeSet<u16>) -> bool {
        let cut = self.broken.iter().any(|(a, b)| served.contains(a) && served.contains(b));
        let alive = |instance: &u16| now.state.place(*instance).is_some_and(|place| place.alive);
        cut || !served.iter().all(alive)
    }
}

impl Invariant for Heals {
    fn id(&self) -> InvariantId {
        InvariantId::Heals
    }

    fn wants(&self) -> &'static [Kind] {
        &[Kind::Asked, Kind::Dispatched, Kind::Answered, Kind::ClientGone, Kind::Faulted]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Faulted { kind: FaultKind::OneWayPermanent, from, to } => {
                self.broken.extend(from.zip(*to));
            }
            Observation::Asked { client } => {
                let grace = self.limits.end() + self.limits.breaker;
                if now.state.healed.is_some_and(|healed| now.at > healed + grace) {
                    self.fresh.insert(*client, BTreeSet::new());
                }
            }
            Observation::Dispatched { client, instance, .. } => {
                if let Some(served) = self.fresh.get_mut(client) {
                    served.insert(*instance);
                }
            }
            Observation::ClientGone { client } => {
                self.fresh.remove(client);
            }
            Observation::Answered { client, answer } => {
                let Some(served) = self.fresh.remove(client) else { return };
                let slow = match answer {
                    Answer::Finished { recomputed: Some(why) }
                    | Answer::Failed(LegFailure::Instance(why)) => {
                        // Engines that do not fit each other never had a fast path.
                        !matches!(why, Failure::Mismatch(_) | Failure::HelloRefused(_))
                    }
                    Answer::Finished { recomputed: None } => false,
                    Answer::Failed(why) => !matches!(why, LegFailure::Request(_)),
                    Answer::NoInstance => !served.is_empty(),
                };
                if slow && !self.excused(now, &served) {
                    found.report(self.id(), now.at, || {
                        let names: Vec<_> = served.iter().map(|one| now.state.name(*one)).collect();
                        format!(
                            "client {client} came after the faults and was served by {}, but ended \
                             with {answer:?}",
                            names.join(" and ")
                        )
                    });
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{Bench, D0, P0, decode_body, finished_answer, prefill_body};
    use engine::core::time::Nanos;

    fn serve(bench: &mut Bench, client: u64, recomputed: bool) {
        bench.asked(client);
        bench.dispatched(client, 2 * client, P0, &prefill_body("r"));
        bench.dispatched(client, 2 * client + 1, D0, &decode_body("r"));
        bench.answered(client, &finished_answer(recomputed));
    }

    #[test]
    fn a_recompute_long_after_the_faults_is_reported() {
        let mut bench = Bench::new(InvariantId::Heals);
        serve(&mut bench, 1, true);
        bench.see(Observation::Healed);
        serve(&mut bench, 2, true);
        bench.now = bench.now + Nanos::from_secs(40);
        serve(&mut bench, 3, false);
        bench.holds();
        serve(&mut bench, 4, true);
        bench.fails("client 4 came after the faults and was served by p0 and d0");
    }

    #[test]
    fn a_pair_that_is_cut_for_good_is_excused() {
        let mut bench = Bench::new(InvariantId::Heals);
        let (from, to) = (Some(P0.instance), Some(D0.instance));
        bench.see(Observation::Faulted { kind: FaultKind::OneWayPermanent, from, to });
        bench.see(Observation::Healed);
        bench.now = bench.now + Nanos::from_secs(40);
        serve(&mut bench, 1, true);
        bench.holds();
    }
}
