//! L6: a failure that a success ended is forgotten.

use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::ids::ClientId;
use kvferry_engine::core::message::{DecodeAnswer, Role};
use kvferry_engine::core::router::ClientAnswer;
use kvferry_scenarios::lists::FaultKind;
use std::collections::{BTreeMap, BTreeSet};

/// A machine that served a request with each instance of the other role after the faults has no
/// strike, pause, trouble or dead session left, as one that never saw a failure. The router has
/// none when every pair has served one. What concerns an instance that is gone, or a pair that does
/// not fit, may stay: no request can end it. So may what failed after the last request, such as a leg
/// that came twice and waited for a prompt that is forgotten.
#[derive(Debug, Default)]
pub(super) struct ForgetsFailures {
    /// Probes without an answer, with the prefill and the decode that alone may serve them.
    open: BTreeMap<ClientId, (u16, u16)>,
    /// Pairs that took the fast path after the faults, and of whose decode nothing failed since.
    served: BTreeSet<(u16, u16)>,
    /// An instance was in another role before.
    switched: bool,
}

impl ForgetsFailures {
    /// True if an instance has served a request with each instance of the other role.
    fn is_served(&self, now: CheckContext<'_>, instance: u16) -> bool {
        let Some(role) = now.state.role(instance) else { return false };
        let mut others = now.state.instances().filter(|one| now.state.role(*one) != Some(role));
        others.all(|other| {
            let pair = if role == Role::Prefill { (instance, other) } else { (other, instance) };
            self.served.contains(&pair)
        })
    }

    /// True if whatever failed at a machine was followed by a success.
    fn is_judged(&self, now: CheckContext<'_>, who: SimProcessId) -> bool {
        if self.served.is_empty() || self.switched {
            return false;
        }
        match who == SimProcessId::ROUTER {
            true => now.state.instances().all(|one| self.is_served(now, one)),
            false => now.state.is_current(who) && self.is_served(now, who.instance),
        }
    }
}

impl Invariant for ForgetsFailures {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Faulted, Probed, Answered, DecodeAnswer]
    }

    fn observe(&mut self, _now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Faulted { kind: FaultKind::RoleSwitch, .. } => self.switched = true,
            Observation::DecodeAnswer {
                who,
                answer: DecodeAnswer::LoadFailed { .. } | DecodeAnswer::Rejected { .. },
            } => self.served.retain(|(_, decode)| *decode != who.instance),
            Observation::Probed { client, pair: Some(pair) } => {
                self.open.insert(*client, *pair);
            }
            Observation::Answered { client, answer } => {
                let Some(pair) = self.open.remove(client) else { return };
                if matches!(answer, ClientAnswer::Finished { recomputed: None }) {
                    self.served.insert(pair);
                }
            }
            _ => {}
        }
    }

    fn finish(&mut self, now: CheckContext<'_>, at_rest: bool) {
        for (who, part, gauges) in now.state.gauges_at_rest() {
            if at_rest && gauges.failures > 0 && self.is_judged(now, who) {
                let (name, failures) = (now.name(who.instance), gauges.failures);
                now.report(|| {
                    format!(
                        "the {part} of {name} remembers {failures} failures, though every pair has \
                         served a request since: {gauges:?}"
                    )
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::invariants::testing::{
        D0, D1, InvariantBench, InvariantId, P0, P1, finished_answer,
    };
    use crate::observation::{InstanceMachine, Observation, SimProcessId};
    use kvferry_engine::core::machine::Gauges;
    use kvferry_scenarios::lists::FaultKind;

    /// Each of these pairs serves a probe, and then a machine says that it remembers a failure.
    fn remembered(
        pairs: &[(SimProcessId, SimProcessId, bool)],
        who: SimProcessId,
    ) -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::Forgets);
        for ((prefill, decode, recomputed), client) in pairs.iter().zip(0..) {
            bench.probed_at(client, *prefill, *decode);
            bench.answered(client, &finished_answer(*recomputed));
        }
        let gauges = Gauges { failures: 1, ..Gauges::default() };
        let (part, limits) = (InstanceMachine::Core, Gauges::default());
        bench.see(Observation::Gauges { who, part, gauges, limits });
        bench
    }

    #[test]
    fn what_a_request_with_every_peer_could_end_is_forgotten() {
        let all = [(P0, D0, false), (P0, D1, false), (P1, D0, false), (P1, D1, false)];
        let slow = [(P0, D0, false), (P0, D1, false), (P1, D0, true), (P1, D1, false)];
        for (pairs, who, holds) in [
            (&all[..], SimProcessId::ROUTER, false),
            (&all[..], D0, false),
            (&all[..2], P0, false),
            (&all[..2], P1, true),
            (&all[..2], D0, true),
            (&all[..3], SimProcessId::ROUTER, true),
            (&slow[..], P1, true),
            (&slow[..], D1, false),
            (&slow[..], SimProcessId::ROUTER, true),
            (&[], D0, true),
        ] {
            let mut bench = remembered(pairs, who);
            bench.finish();
            bench.judges(holds, "remembers 1 failures");
        }
    }

    #[test]
    fn what_concerns_another_role_or_incarnation_or_came_later_may_stay() {
        let pairs = [(P0, D0, false), (P0, D1, false)];
        let mut bench = remembered(&pairs, P0);
        let kind = FaultKind::RoleSwitch;
        bench.see(Observation::Faulted { kind, from: Some(D0.instance), to: None });
        bench.finish();
        bench.holds();
        let mut bench = remembered(&pairs, P0);
        bench.load_failed(D1, "late");
        bench.finish();
        bench.holds();
        let mut bench = remembered(&pairs, P0);
        bench.crash(P0);
        bench.finish();
        bench.holds();
    }
}
