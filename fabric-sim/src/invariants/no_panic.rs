//! I12: remote input never panics, and a peer is accused of breaking the protocol only if it did.

use super::{CheckContext, Invariant};
use crate::observation::{InstanceMachine, Observation, ObservationKind, SimProcessId};
use std::collections::BTreeMap;

/// A core may count one violation for each frame that was damaged or forged on its way to it; every
/// other is a mistake of its own or of its peer.
#[derive(Debug, Default)]
pub(super) struct NoPanic {
    /// Frames that may count as violations and have not.
    forged: BTreeMap<SimProcessId, u32>,
}

impl Invariant for NoPanic {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Panicked, Gauges, Stray]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Panicked { who, text } => {
                now.report(|| format!("{} panicked: {text}", now.name(who.instance)));
            }
            Observation::Gauges { who, part, gauges, .. } => {
                let before = now.state.gauges(*who, *part).violations;
                let count = gauges.violations.saturating_sub(before);
                let forged = match part {
                    InstanceMachine::Core => self.forged.entry(*who).or_default(),
                    InstanceMachine::Transfer(_)
                    | InstanceMachine::Engine
                    | InstanceMachine::Payload => &mut 0,
                };
                let excused = count.min(*forged);
                *forged -= excused;
                if count > excused {
                    let (name, count) = (now.name(who.instance), count - excused);
                    now.report(|| {
                        format!("the {part} of {name} counted {count} violations by honest peers")
                    });
                }
            }
            Observation::Stray { to, .. } => *self.forged.entry(*to).or_default() += 1,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId};
    use kvferry_engine::core::machine::Gauges;

    #[test]
    fn panics_and_violations_are_reported_once() {
        let mut bench = InvariantBench::new(InvariantId::NoPanic);
        let see = |bench: &mut InvariantBench, violations| {
            let gauges = Gauges { violations, ..Gauges::default() };
            let limits = Gauges::default();
            bench.see(Observation::Gauges { who: D0, part: InstanceMachine::Core, gauges, limits });
        };
        see(&mut bench, 0);
        bench.holds();
        bench.see(Observation::Stray { to: D0, frame: None });
        see(&mut bench, 1);
        bench.holds();
        see(&mut bench, 3);
        see(&mut bench, 3);
        bench.fails("the core of d0 counted 2 violations");
        let mut bench = InvariantBench::new(InvariantId::NoPanic);
        bench.see(Observation::Panicked { who: D0, text: "index out of bounds" });
        bench.fails("d0 panicked: index out of bounds");
    }
}
