//! I12: remote input never panics, and a peer is accused of breaking the protocol only if it did.

use super::{Found, Invariant, Now};
use crate::observe::{Kind, Observation, Part, Who};
use scenarios::lists::InvariantId;
use std::collections::BTreeMap;

/// No fault forges or damages frames, so every violation that a machine counts is a mistake of its
/// own or of its peer.
#[derive(Debug, Default)]
pub(super) struct NoPanic {
    counted: BTreeMap<(Who, Part), u32>,
}

impl Invariant for NoPanic {
    fn id(&self) -> InvariantId {
        InvariantId::NoPanic
    }

    fn wants(&self) -> &'static [Kind] {
        &[Kind::Panicked, Kind::Gauges]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Panicked { who, text } => found.report(self.id(), now.at, || {
                format!("{} panicked: {text}", now.state.name(who.instance))
            }),
            Observation::Gauges { who, part, gauges, .. } => {
                let before = self.counted.insert((*who, *part), gauges.violations).unwrap_or(0);
                if gauges.violations > before {
                    found.report(self.id(), now.at, || {
                        let name = now.state.name(who.instance);
                        let count = gauges.violations - before;
                        format!("the {part} of {name} counted {count} violations by honest peers")
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
    use crate::invariants::testing::{Bench, D0};
    use engine::core::machine::Gauges;

    #[test]
    fn panics_and_violations_are_reported_once() {
        let mut bench = Bench::new(InvariantId::NoPanic);
        let see = |bench: &mut Bench, violations| {
            let gauges = Gauges { violations, ..Gauges::default() };
            let limits = Gauges::default();
            bench.see(Observation::Gauges { who: D0, part: Part::Core, gauges, limits });
        };
        see(&mut bench, 0);
        bench.holds();
        see(&mut bench, 2);
        see(&mut bench, 2);
        bench.fails("the core of d0 counted 2 violations");
        let mut bench = Bench::new(InvariantId::NoPanic);
        bench.see(Observation::Panicked { who: D0, text: "index out of bounds" });
        bench.fails("d0 panicked: index out of bounds");
    }
}
