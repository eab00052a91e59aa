//! I3: free + cached + held + quarantined = total at all times; at rest nothing is held or
//! quarantined, and no transfer, session, timer or lease is left.

use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::machine::Gauges;
use kvferry_scenarios::engine::PoolGauges;
use std::collections::BTreeMap;

/// Remembers the newest gauges of pools; those told last are those at rest.
#[derive(Debug, Default)]
pub(super) struct NoLeak {
    pools: BTreeMap<(SimProcessId, u16), PoolGauges>,
}

fn is_left(gauges: &Gauges) -> bool {
    let Gauges { transfers, operations, held, quarantined, queued, .. } = *gauges;
    [transfers, operations, held, quarantined, queued].iter().any(|count| *count > 0)
}

impl Invariant for NoLeak {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Pool, Crashed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Pool { who, group, pool } => {
                let PoolGauges { total, free, cached, held, quarantined } = *pool;
                if free + cached + held + quarantined != total {
                    let name = now.name(who.instance);
                    now.report(|| {
                        format!("the blocks of group {group} of {name} do not add up: {pool:?}")
                    });
                }
                self.pools.insert((*who, *group), *pool);
            }
            Observation::Crashed { who } => self.pools.retain(|key, _| key.0 != *who),
            _ => {}
        }
    }

    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool) {
        // What never makes a step again gives nothing back.
        self.pools.retain(|(who, _), _| !now.state.is_frozen(who.instance));
        for ((who, group), pool) in &self.pools {
            if pool.held > 0 || pool.quarantined > 0 {
                let name = now.name(who.instance);
                now.report(|| {
                    format!("blocks of group {group} of {name} are not given back: {pool:?}")
                });
            }
        }
        for (who, part, gauges) in now.state.gauges_at_rest().filter(|(.., one)| is_left(one)) {
            let name = now.name(who.instance);
            now.report(|| format!("the {part} of {name} is not idle: {gauges:?}"));
        }
        for load in now.state.loads().filter(|load| now.state.acts(load.who)) {
            let (name, request) = (now.name(load.who.instance), &load.request);
            now.report(|| format!("the load of request {request} of {name} has not ended"));
        }
        let mut open = now.state.ops().filter(|(from, _)| now.state.acts(from.who));
        if let Some((from, op)) = open.find(|(_, op)| now.state.is_current(op.target.who)) {
            let name = now.name(from.who.instance);
            now.report(|| format!("an operation of {name} is not settled: {op:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0, done};
    use crate::observation::InstanceMachine;

    fn pool(bench: &mut InvariantBench, held: u32, quarantined: u32) {
        let pool = PoolGauges { total: 10, free: 7, cached: 1, held, quarantined };
        bench.see(Observation::Pool { who: D0, group: 0, pool });
    }

    #[test]
    fn blocks_have_to_add_up() {
        let mut bench = InvariantBench::new(InvariantId::NoLeak);
        pool(&mut bench, 1, 1);
        bench.holds();
        pool(&mut bench, 1, 0);
        bench.fails("do not add up");
    }

    #[test]
    fn everything_is_given_back_at_rest() {
        let mut bench = InvariantBench::new(InvariantId::NoLeak);
        pool(&mut bench, 1, 1);
        let done_pool = PoolGauges { total: 10, free: 9, cached: 1, ..PoolGauges::default() };
        bench.see(Observation::Pool { who: D0, group: 0, pool: done_pool });
        bench.write(P0, D0, 1, &[4]);
        bench.complete(P0, 1, &done());
        bench.finish();
        bench.holds();
        pool(&mut bench, 2, 0);
        bench.finish();
        bench.fails("are not given back");
    }

    #[test]
    fn what_never_makes_a_step_again_gives_nothing_back() {
        let mut bench = InvariantBench::new(InvariantId::NoLeak);
        pool(&mut bench, 2, 0);
        bench.allocated(D0, "r", 16, &[4]);
        bench.write(D0, P0, 1, &[4]);
        let frozen = &[D0.instance];
        bench.see(Observation::Settled { core: &[], frozen, broken: &[] });
        bench.finish();
        bench.holds();
    }

    #[test]
    fn machines_are_idle_at_rest() {
        let mut bench = InvariantBench::new(InvariantId::NoLeak);
        let gauges = Gauges { peers: 3, tombstones: 9, ..Gauges::default() };
        let limits = Gauges::default();
        bench.see(Observation::Gauges { who: D0, part: InstanceMachine::Core, gauges, limits });
        bench.finish();
        bench.holds();
        let gauges = Gauges { transfers: 1, ..gauges };
        bench.see(Observation::Gauges { who: D0, part: InstanceMachine::Core, gauges, limits });
        bench.finish();
        bench.fails("the core of d0 is not idle");
    }

    #[test]
    fn operations_and_loads_have_ended_at_rest() {
        let mut bench = InvariantBench::new(InvariantId::NoLeak);
        bench.write(P0, D0, 1, &[4]);
        bench.finish();
        bench.fails("an operation of p0 is not settled");
        let mut bench = InvariantBench::new(InvariantId::NoLeak);
        bench.allocated(D0, "r", 16, &[4]);
        bench.finish();
        bench.fails("the load of request r of d0 has not ended");
    }
}
