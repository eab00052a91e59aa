//! I14: at rest every table of every machine is empty, but those that are declared to remember:
//! tombstones, peers, links, and what [`Gauges::remembered`] counts.

use super::{CheckContext, Invariant, ViolationLog};
use crate::observation::{InstanceMachine, Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::machine::Gauges;
use kvferry_scenarios::lists::InvariantId;
use std::collections::BTreeMap;

/// Remembers the newest count of each machine; those told last are those at rest. What transfers,
/// operations, blocks and queues leave behind is I3's.
#[derive(Debug, Default)]
pub(super) struct NoGrowth {
    machines: BTreeMap<(SimProcessId, InstanceMachine), Gauges>,
}

impl Invariant for NoGrowth {
    fn id(&self) -> InvariantId {
        InvariantId::NoGrowth
    }

    fn wants(&self) -> &'static [ObservationKind] {
        &[ObservationKind::Gauges, ObservationKind::Crashed]
    }

    fn observe(
        &mut self,
        _now: CheckContext<'_>,
        seen: &Observation<'_>,
        _found: &mut ViolationLog,
    ) {
        match seen {
            Observation::Gauges { who, part, gauges, .. } => {
                self.machines.insert((*who, *part), *gauges);
            }
            Observation::Crashed { who } => self.machines.retain(|key, _| key.0 != *who),
            _ => {}
        }
    }

    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool, found: &mut ViolationLog) {
        for ((who, part), gauges) in &self.machines {
            // What never makes a step again gives nothing back.
            let frozen = now.state.place(who.instance).is_some_and(|place| place.frozen);
            if gauges.entries > 0 && !frozen {
                found.report(self.id(), now.at, || {
                    let (name, entries) = (now.state.name(who.instance), gauges.entries);
                    format!("the {part} of {name} has {entries} entries about nothing: {gauges:?}")
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench};

    #[test]
    fn what_is_left_in_a_table_is_reported() {
        for (entries, remembered) in [(0, 7), (1, 0)] {
            let mut bench = InvariantBench::new(InvariantId::NoGrowth);
            for entries in [40, entries] {
                let gauges = Gauges { entries, remembered, ..Gauges::default() };
                let (part, limits) = (InstanceMachine::Core, Gauges::default());
                bench.see(Observation::Gauges { who: D0, part, gauges, limits });
            }
            bench.finish();
            match entries {
                0 => bench.holds(),
                _ => bench.fails("the core of d0 has 1 entries about nothing"),
            }
        }
    }
}
