//! I8: queues, tables, operations in flight and retries never exceed their declared limits.

use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind};
use kvferry_engine::core::machine::Gauges;

/// Compares the gauges of every machine with its limits.
#[derive(Debug)]
pub(super) struct BoundedTables;

/// Every gauge with its name.
fn named(gauges: &Gauges) -> [(&'static str, u32); 11] {
    [
        ("transfers", gauges.transfers),
        ("operations", gauges.operations),
        ("held blocks", gauges.held),
        ("quarantined blocks", gauges.quarantined),
        ("queued frames or jobs", gauges.queued),
        ("tombstones", gauges.tombstones),
        ("peers", gauges.peers),
        ("links", gauges.links),
        ("other entries", gauges.entries),
        ("entries that outlast transfers", gauges.remembered),
        ("remembered failures", gauges.failures),
    ]
}

impl Invariant for BoundedTables {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Gauges]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        let Observation::Gauges { who, part, gauges, limits } = seen else { return };
        for ((what, size), (_, limit)) in named(gauges).into_iter().zip(named(limits)) {
            if size > limit {
                let name = now.name(who.instance);
                now.report(|| {
                    format!("the {part} of {name} has {size} {what}, its limit is {limit}")
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId};
    use crate::observation::InstanceMachine;

    #[test]
    fn a_table_above_its_limit_is_reported() {
        let mut bench = InvariantBench::new(InvariantId::Bounded);
        let limits = Gauges { queued: 4, transfers: u32::MAX, ..Gauges::default() };
        let part = InstanceMachine::Core;
        let gauges = Gauges { queued: 4, transfers: 1_000, ..Gauges::default() };
        bench.see(Observation::Gauges { who: D0, part, gauges, limits });
        bench.holds();
        let gauges = Gauges { queued: 5, ..Gauges::default() };
        bench.see(Observation::Gauges { who: D0, part, gauges, limits });
        bench.fails("the core of d0 has 5 queued frames or jobs, its limit is 4");
    }
}
