//! L4: a fault on pair (p, d) makes no request of another pair end failed.

use super::{Found, Invariant, Now};
use crate::observe::{Kind, Observation};
use engine::core::error::Failure;
use engine::core::ids::ClientId;
use engine::core::router::{Answer, LegFailure};
use scenarios::lists::InvariantId;
use std::collections::{BTreeMap, BTreeSet};

/// A request may fail only if some fault concerned the router, an instance that served it, or a
/// pair of such. That no instance was left needs a fault of some instance.
#[derive(Debug, Default)]
pub(super) struct Isolation {
    served: BTreeMap<ClientId, BTreeSet<u16>>,
    instances: BTreeSet<u16>,
    pairs: BTreeSet<(u16, u16)>,
    /// A fault concerned the router, or everybody.
    general: bool,
}

impl Isolation {
    fn excused(&self, served: &BTreeSet<u16>) -> bool {
        let pair = |(a, b): &(u16, u16)| served.contains(a) && served.contains(b);
        self.general
            || served.iter().any(|instance| self.instances.contains(instance))
            || self.pairs.iter().any(pair)
    }
}

impl Invariant for Isolation {
    fn id(&self) -> InvariantId {
        InvariantId::Isolation
    }

    fn wants(&self) -> &'static [Kind] {
        &[Kind::Dispatched, Kind::Answered, Kind::ClientGone, Kind::Faulted]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Faulted { from, to, .. } => match (from, to) {
                (Some(u16::MAX), Some(one)) | (Some(one), Some(u16::MAX)) => {
                    self.instances.insert(*one);
                }
                (None | Some(u16::MAX), _) => self.general = true,
                (Some(from), Some(to)) => {
                    self.pairs.insert((*from, *to));
                }
                (Some(from), None) => {
                    self.instances.insert(*from);
                }
            },
            Observation::Dispatched { client, instance, .. } => {
                self.served.entry(*client).or_default().insert(*instance);
            }
            Observation::ClientGone { client } => {
                self.served.remove(client);
            }
            Observation::Answered { client, answer } => {
                let served = self.served.remove(client).unwrap_or_default();
                let excused = match answer {
                    Answer::Finished { .. } => true,
                    Answer::Failed(LegFailure::Request(_) | LegFailure::Busy) => true,
                    // Engines that do not fit each other are no fault.
                    Answer::Failed(LegFailure::Instance(
                        Failure::Mismatch(_) | Failure::HelloRefused(_),
                    )) => true,
                    Answer::Failed(_) => self.excused(&served),
                    Answer::NoInstance => {
                        self.general || !self.instances.is_empty() || !self.pairs.is_empty()
                    }
                };
                if !excused {
                    found.report(self.id(), now.at, || {
                        let names: Vec<_> = served.iter().map(|one| now.state.name(*one)).collect();
                        let names = names.join(" and ");
                        format!(
                            "client {client}, served by {names}, failed though no fault concerned \
                             them: {answer:?}"
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
    use crate::invariants::testing::{
        Bench, D0, D1, P0, P1, decode_body, finished_answer, prefill_body,
    };
    use crate::observe::Who;
    use scenarios::lists::FaultKind;

    fn bench() -> Bench {
        let mut bench = Bench::new(InvariantId::Isolation);
        let (from, to) = (Some(P0.instance), Some(D0.instance));
        bench.see(Observation::Faulted { kind: FaultKind::QpError, from, to });
        bench
    }

    fn fail(bench: &mut Bench, client: u64, p: Who, d: Who) {
        bench.dispatched(client, 2 * client, p, &prefill_body("r"));
        bench.dispatched(client, 2 * client + 1, d, &decode_body("r"));
        bench.answered(client, &Answer::Failed(LegFailure::Connection));
    }

    #[test]
    fn a_request_of_the_same_pair_may_fail() {
        let mut bench = bench();
        fail(&mut bench, 1, P0, D0);
        bench.dispatched(2, 9, P1, &prefill_body("s"));
        bench.answered(2, &finished_answer(true));
        bench.holds();
    }

    #[test]
    fn a_request_of_another_pair_may_not() {
        let mut bench = bench();
        fail(&mut bench, 1, P0, D1);
        bench.fails("client 1, served by p0 and d1, failed");
    }

    #[test]
    fn a_crash_concerns_everything_at_its_instance() {
        let mut bench = Bench::new(InvariantId::Isolation);
        let from = Some(P1.instance);
        bench.see(Observation::Faulted { kind: FaultKind::Crash, from, to: None });
        fail(&mut bench, 1, P1, D1);
        bench.holds();
        fail(&mut bench, 2, P0, D1);
        bench.fails("client 2");
    }
}
