//! I14: at rest every table of every machine is empty, but those that are declared to remember:
//! tombstones, peers, links, and what [`Gauges::remembered`] counts. Who has a fault of its own to the
//! end has a timer for the next try.

use super::{CheckContext, Invariant};

/// What transfers, operations, blocks and queues leave behind is I3's.
#[derive(Debug)]
pub(super) struct NoGrowth;

impl Invariant for NoGrowth {
    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool) {
        for (who, part, gauges) in now.state.gauges_at_rest() {
            if gauges.entries > 0 && !now.state.has_lasting_fault(who.instance) {
                let (name, entries) = (now.name(who.instance), gauges.entries);
                now.report(|| {
                    format!("the {part} of {name} has {entries} entries about nothing: {gauges:?}")
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {

    use crate::invariants::testing::{D0, InvariantBench, InvariantId};
    use crate::observation::{InstanceMachine, Observation};
    use kvferry_engine::core::machine::Gauges;

    #[test]
    fn who_has_a_fault_to_the_end_is_never_at_rest() {
        for (broken, holds) in [(D0.instance, true), (D0.instance + 1, false)] {
            let mut bench = InvariantBench::new(InvariantId::NoGrowth);
            let (entries, part, limits) = (1, InstanceMachine::Core, Gauges::default());
            let gauges = Gauges { entries, ..Gauges::default() };
            bench.see(Observation::Gauges { who: D0, part, gauges, limits });
            let broken = &[(broken, None)];
            bench.see(Observation::Settled { core: &[], frozen: &[], broken });
            bench.finish();
            match holds {
                true => bench.holds(),
                false => bench.fails("the core of d0 has 1 entries about nothing"),
            }
        }
    }

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
