//! I21: until the first fault no leg passes by an idle instance, nor among idle ones who was given more
//! of its prompt.

use super::{CheckContext, Invariant, leading, models};
use crate::observation::{Observation, ObservationKind};
use kvferry_engine::core::ids::{ClientId, LegId};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{LegBody, LegEvent};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::run::{Run, WorkloadPrompt};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Prefix hashes of prompts, by client and prompt.
type Prefixes = Vec<Vec<Arc<[u64]>>>;

/// A leg goes where least is to be done, less what a known prefix saves; so do those of further samples,
/// one after another. So an instance with work is chosen before an idle one only for a prefix that it was
/// given with another prompt, and of idle ones none that was given less. Not judged are fleets in which some
/// pair does not fit or modes differ, what servers say of their load, and what comes after a fault or a
/// leg that failed. An instance counts as idle once the router has heard of the end of its last leg: one
/// that has just registered may not take any yet.
#[derive(Debug, Default)]
pub(super) struct LegChoices {
    is_over: bool,
    /// Instances are preferred for their prefixes, and the router has room for all of them.
    knows_all: bool,
    /// A prefix saves no more than a leg that has it is work.
    spreads: bool,
    models: Vec<Option<Arc<str>>>,
    prefixes: Prefixes,
    /// Prefixes of prompts that an instance was given.
    given: BTreeMap<u16, BTreeSet<u64>>,
    /// Legs that have not ended: where each is, and of which prompt.
    legs: BTreeMap<LegId, (u16, ClientId, u32)>,
    /// Longest time that the end of a leg is on its way to the router.
    latency: Nanos,
    /// When each instance ended a leg last.
    ended: BTreeMap<u16, Nanos>,
}

impl LegChoices {
    pub(super) fn new(run: &Run) -> LegChoices {
        let prefix = |prompt: &WorkloadPrompt| prompt.prefix.clone();
        let of = |prompts: &[WorkloadPrompt]| prompts.iter().map(prefix).collect();
        let prefixes: Prefixes = run.requests.iter().map(|request| of(&request.prompts)).collect();
        let config = &run.router.config;
        let hashes: usize = prefixes.iter().flatten().map(|prefix| prefix.len()).sum();
        let modes: BTreeSet<_> = run.instances.iter().map(|one| one.mode).collect();
        LegChoices {
            is_over: modes.len() > 1 || config.load_period.is_some(),
            spreads: config.affinity_percent <= 100,
            latency: run.network.control_latency.max,
            knows_all: config.affinity_percent > 0 && hashes <= config.prefixes_max as usize,
            models: models(run),
            prefixes,
            ..LegChoices::default()
        }
    }

    /// Number of leading hashes of a prompt that an instance was given before.
    fn known(&self, instance: u16, prefix: &[u64]) -> usize {
        leading(prefix, self.given.get(&instance))
    }

    fn has_work(&self, instance: u16) -> bool {
        self.legs.values().any(|(at, ..)| *at == instance)
    }

    /// The idle instance that a leg should have gone to, if it went to another one.
    fn passed_by(
        &self,
        now: CheckContext<'_>,
        (client, prompt, prefix): (ClientId, u32, &[u64]),
        (to, role): (u16, Role),
    ) -> Option<u16> {
        let model = self.models.get(client.0 as usize)?.as_deref();
        let (busy, known) = (self.has_work(to), self.known(to, prefix));
        let place = (to, client, prompt);
        let has_sibling = || self.spreads && self.legs.values().any(|leg| *leg == place);
        let is_better = |one: &u16| match (busy, self.known(*one, prefix)) {
            (true, _) => known == 0 || has_sibling(),
            (false, more) => self.knows_all && more > known,
        };
        let may_take =
            |one: &u16| now.state.role(*one) == Some(role) && now.state.serves(*one, model);
        let is_idle = |one: &u16| !self.has_work(*one) && self.ended[one] + self.latency < now.at;
        let mut idle = self.ended.keys().copied().filter(is_idle);
        let passed = idle.find(|one| is_better(one) && may_take(one))?;
        (!now.state.has_misfit(&now.state.instances().collect())).then_some(passed)
    }

    fn dispatched(
        &mut self,
        now: CheckContext<'_>,
        (leg, client): (LegId, ClientId),
        (to, body): (u16, &LegBody),
    ) {
        let (LegBody::Prefill { prompt, .. } | LegBody::Decode { prompt, .. }) = body;
        // Requests of the simulator's own name the pair that is to serve them.
        let prompts = self.prefixes.get(client.0 as usize);
        if let Some(prefix) = prompts.and_then(|them| them.get(*prompt as usize)).cloned() {
            let role = body.role();
            if let Some(idle) = self.passed_by(now, (client, *prompt, &prefix), (to, role)) {
                let (name, idle) = (now.name(to), now.name(idle));
                now.report(|| {
                    format!(
                        "client {client} has {role} leg {leg} at {name}, which passes by {idle}"
                    )
                });
            }
            self.given.entry(to).or_default().extend(prefix.iter());
        }
        self.legs.insert(leg, (to, client, *prompt));
    }
}

impl Invariant for LegChoices {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Faulted, Dispatched, Leg, LegClosed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        if self.is_over {
            return;
        }
        match seen {
            Observation::Faulted { .. } | Observation::Leg { event: LegEvent::Failed(_), .. } => {
                self.is_over = true;
            }
            Observation::Dispatched { leg, client, instance, body, .. } => {
                self.dispatched(now, (*leg, *client), (*instance, body));
            }
            Observation::Leg { event: LegEvent::FirstToken, .. } => {}
            Observation::Leg { leg, .. } | Observation::LegClosed { leg } => {
                if let Some((instance, ..)) = self.legs.remove(leg) {
                    self.ended.insert(instance, now.at);
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
        D0, D1, InvariantBench, InvariantId, P0, asks_for, decode_body, finished, prefill_body,
        serves,
    };
    use kvferry_engine::core::router::LegFailure;
    use kvferry_scenarios::lists::FaultKind;

    /// Time after which the router has heard what an instance said.
    const HEARD: Nanos = Nanos::from_us(60);

    /// Requests with prompts that begin with these.
    fn bench(begun: [u64; 4]) -> InvariantBench {
        let mut bench = InvariantBench::with(InvariantId::LegChoices, |run| {
            run.requests = begun.iter().map(|_| asks_for("m")).collect();
            for (request, begun) in run.requests.iter_mut().zip(begun) {
                request.prompts =
                    vec![WorkloadPrompt { tokens: 40, prefix: [begun].into(), tail: begun }];
            }
        });
        for who in [D0, D1] {
            bench.start(who);
            // A request of the simulator's own.
            bench.dispatched(9, 10 + u64::from(who.instance), who, &decode_body("old"));
            bench.leg(who, 10 + u64::from(who.instance), &finished());
        }
        bench.pass(HEARD);
        bench
    }

    fn passes_by(bench: &mut InvariantBench, held: bool) {
        bench.dispatched(1, 1, D0, &decode_body("r"));
        bench.dispatched(2, 2, D0, &decode_body("s"));
        bench.judges(held, "client 2 has decode leg 2 at d0, which passes by d1");
    }

    #[test]
    fn an_idle_instance_is_not_passed_by() {
        passes_by(&mut bench([1, 2, 3, 4]), false);
    }

    #[test]
    fn samples_of_a_prompt_are_spread() {
        for (second, held) in [(D0, false), (D1, true)] {
            let mut bench = bench([1, 2, 3, 4]);
            bench.dispatched(1, 1, D0, &decode_body("r"));
            bench.dispatched(1, 2, second, &decode_body("r"));
            bench.judges(held, "client 1 has decode leg 2 at d0, which passes by d1");
        }
    }

    #[test]
    fn who_was_given_a_prefix_may_have_the_leg_beside_others() {
        passes_by(&mut bench([1, 2, 2, 4]), true);
    }

    #[test]
    fn of_idle_instances_who_was_given_the_prefix_has_the_leg() {
        for (to, name, held) in [(D0, "d0", true), (D1, "d1", false)] {
            let mut bench = bench([1, 2, 2, 4]);
            bench.dispatched(1, 1, D0, &decode_body("r"));
            bench.leg(D0, 1, &finished());
            bench.pass(HEARD);
            bench.dispatched(2, 2, to, &decode_body("s"));
            bench.judges(held, &format!("client 2 has decode leg 2 at {name}, which passes by d0"));
        }
    }

    #[test]
    fn an_instance_is_idle_when_the_router_has_heard_that_its_legs_ended() {
        for (ended, heard, held) in [(false, true, true), (true, false, true), (true, true, false)]
        {
            let mut bench = bench([1, 2, 3, 4]);
            bench.dispatched(3, 3, D1, &decode_body("q"));
            let event = if ended { finished() } else { LegEvent::FirstToken };
            bench.leg(D1, 3, &event);
            if heard {
                bench.pass(HEARD);
            }
            passes_by(&mut bench, held);
        }
    }

    #[test]
    fn legs_after_a_fault_or_a_failure_are_not_judged() {
        let mut faulted = bench([1, 2, 3, 4]);
        faulted.see(Observation::Faulted { kind: FaultKind::Abort, from: Some(2), to: None });
        passes_by(&mut faulted, true);
        let mut failed = bench([1, 2, 3, 4]);
        failed.dispatched(3, 3, P0, &prefill_body("q"));
        failed.leg(P0, 3, &LegEvent::Failed(LegFailure::Connection));
        passes_by(&mut failed, true);
    }

    #[test]
    fn who_serves_another_model_is_not_idle_for_this_one() {
        let mut bench = bench([1, 2, 3, 4]);
        bench.start_as(D1, |spec| spec.models = serves("n"));
        passes_by(&mut bench, true);
    }
}
