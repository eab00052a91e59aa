//! Who gets legs: instances that serve the model of a request, in the role in which they registered
//! last, and not before their legs of another role have ended.

use super::{CheckContext, models};
use crate::observation::{Observation, SimProcessId};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::{ClientId, Incarnation, LegId};
use kvferry_engine::core::message::{Registration, Role};
use kvferry_engine::core::router::LegEvent;
use kvferry_scenarios::Run;
use kvferry_scenarios::lists::FaultKind;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The router ends legs of a role that is over by its own bound, so that an instance never has legs of
/// two. An instance whose clock went back may be taken for its own past.
#[derive(Debug, Default)]
pub(super) struct LegRecipients {
    models: Vec<Option<Arc<str>>>,
    /// Roles in which instances registered, from the newest incarnation on that the router has heard.
    roles: BTreeMap<u16, BTreeMap<Incarnation, Role>>,
    /// Instances whose clock went back.
    back: BTreeSet<u16>,
    /// Legs that have not ended.
    legs: BTreeMap<LegId, (u16, Role)>,
}

impl LegRecipients {
    pub(super) fn new(run: &Run) -> LegRecipients {
        LegRecipients { models: models(run), ..LegRecipients::default() }
    }

    pub(super) fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Faulted { kind: FaultKind::ClockBack, from, .. } => {
                self.back.extend(*from);
            }
            Observation::FrameSent { from, frame: Frame::Register(said), .. } => {
                let Registration { incarnation, role, .. } = said;
                let roles = self.roles.entry(from.instance).or_default();
                if roles.first_key_value().is_none_or(|(heard, _)| heard <= incarnation) {
                    roles.insert(*incarnation, *role);
                }
            }
            Observation::FrameArrived {
                from,
                to: SimProcessId::ROUTER,
                frame: Frame::Register(heard),
            } => {
                if let Some(roles) = self.roles.get_mut(&from.instance) {
                    *roles = roles.split_off(&heard.incarnation);
                }
            }
            Observation::Dispatched { leg, client, instance, body, .. } => {
                let to = (*instance, body.role());
                self.dispatched(now, *client, to);
                self.legs.insert(*leg, to);
            }
            Observation::Leg { event: LegEvent::FirstToken, .. } => {}
            Observation::Leg { leg, .. } | Observation::LegClosed { leg } => {
                self.legs.remove(leg);
            }
            _ => {}
        }
    }

    fn dispatched(&self, now: CheckContext<'_>, client: ClientId, (to, role): (u16, Role)) {
        let model = self.models.get(client.0 as usize).and_then(|model| model.as_deref());
        if let Some(model) = model.filter(|model| !now.state.serves(to, Some(model))) {
            let name = now.name(to);
            now.report(|| {
                format!("client {client} asks for {model}, and {name} does not serve that")
            });
        }
        let is_said = |roles: &BTreeMap<_, Role>| roles.values().any(|said| *said == role);
        if !self.back.contains(&to) && !self.roles.get(&to).is_some_and(is_said) {
            let name = now.name(to);
            now.report(|| {
                format!("client {client} has a {role} leg at {name}, which is none by its word")
            });
        }
        let other = self.legs.iter().find(|(_, (at, other))| *at == to && *other != role);
        if let Some((leg, (_, other))) = other {
            let name = now.name(to);
            now.report(|| {
                format!("client {client} has a {role} leg at {name} beside {other} leg {leg}")
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, InvariantBench, InvariantId, P0, asks_for, decode_body, finished, prefill_body, serves,
    };

    fn bench() -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::RightRecipient);
        bench.hear(P0, Role::Prefill, 1);
        bench.hear(D0, Role::Decode, 1);
        bench
    }

    #[test]
    fn a_leg_is_of_the_role_that_was_registered_last() {
        for (is_late, held) in [(false, true), (true, false)] {
            let mut bench = bench();
            bench.dispatched(1, 1, D0, &decode_body("r"));
            bench.leg(D0, 1, &finished());
            bench.hear(D0, Role::Prefill, 2);
            // An older registration that comes late changes nothing.
            bench.hear(D0, Role::Decode, 1);
            let body = if is_late { decode_body("s") } else { prefill_body("s") };
            bench.dispatched(2, 2, D0, &body);
            bench.judges(held, "client 2 has a decode leg at d0, which is none by its word");
        }
    }

    #[test]
    fn who_has_not_registered_gets_no_leg() {
        let mut bench = InvariantBench::new(InvariantId::RightRecipient);
        bench.dispatched(1, 1, P0, &prefill_body("r"));
        bench.fails("client 1 has a prefill leg at p0, which is none by its word");
    }

    #[test]
    fn legs_of_the_former_role_end_first() {
        for held in [true, false] {
            let mut bench = bench();
            bench.dispatched(1, 1, D0, &decode_body("r"));
            bench.leg(D0, 1, &LegEvent::FirstToken);
            bench.hear(D0, Role::Prefill, 2);
            if held {
                bench.leg(D0, 1, &finished());
            }
            bench.dispatched(2, 2, D0, &prefill_body("s"));
            bench.judges(held, "client 2 has a prefill leg at d0 beside decode leg 1");
        }
    }

    #[test]
    fn a_leg_goes_to_who_serves_its_model() {
        let rows = [("a", Some("a"), true), ("b", Some("a"), false), ("b", None, true)];
        for (asked, served, held) in rows {
            let mut bench = InvariantBench::with(InvariantId::RightRecipient, |run| {
                run.requests = vec![asks_for(asked)];
            });
            bench.hear(P0, Role::Prefill, 1);
            bench.start_as(P0, |spec| spec.models = served.and_then(serves));
            bench.dispatched(0, 1, P0, &prefill_body("r"));
            // Requests of the simulator's own name none.
            bench.dispatched(1, 2, P0, &prefill_body("s"));
            bench.judges(held, "client 0 asks for b, and p0 does not serve that");
        }
    }
}
