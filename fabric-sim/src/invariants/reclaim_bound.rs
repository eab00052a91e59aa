//! L5: blocks held for a dead peer return within the lease bound (sources) or the fence bound
//! (destinations).

use super::{Found, Invariant, Limits, Now};
use crate::observe::{Kind, Observation, Who};
use engine::core::ids::RequestId;
use engine::core::message::{PrefillAnswer, PrefillHook};
use engine::core::time::Nanos;
use scenarios::lists::InvariantId;
use std::collections::BTreeMap;

/// A destination whose writer died is given back within silence + fence + 1 s. A source is given
/// back within a lease and that time after its request finished or anything was read or written
/// here, whoever is or is not there to fetch it.
#[derive(Debug)]
pub(super) struct ReclaimBound {
    limits: Limits,
    /// When each life ended.
    died: BTreeMap<Who, Nanos>,
    /// Finished prefills whose blocks are not free, and since when.
    held: BTreeMap<(Who, RequestId), Nanos>,
    /// When an instance sent or completed anything last.
    active: BTreeMap<u16, Nanos>,
    /// Loads that were reported, by request.
    told: BTreeMap<(Who, RequestId), Nanos>,
}

impl ReclaimBound {
    pub(super) fn new(limits: Limits) -> ReclaimBound {
        ReclaimBound {
            limits,
            died: BTreeMap::new(),
            held: BTreeMap::new(),
            active: BTreeMap::new(),
            told: BTreeMap::new(),
        }
    }

    fn check_loads(&mut self, now: Now<'_>, found: &mut Found) {
        if self.died.is_empty() {
            return;
        }
        let bound = self.limits.end();
        for load in now.state.loads().filter(|load| now.state.acts(load.who)) {
            let Some(peer) = load.peer else { continue };
            let Some(died) = self.died.get(&peer) else { continue };
            let key = (load.who, load.request.clone());
            // A peer that is itself disturbed notices a death only after the last fault.
            let from = (*died).max(load.begun).max(now.state.last_hit);
            if now.at <= from + bound || self.told.contains_key(&key) {
                continue;
            }
            self.told.insert(key, now.at);
            found.report(self.id(), now.at, || {
                let (name, peer) =
                    (now.state.name(load.who.instance), now.state.name(peer.instance));
                let (died, request) = (died.as_secs_f64(), &load.request);
                format!(
                    "{name} still holds the blocks of request {request} for {peer}, which died at \
                     {died:.6} s"
                )
            });
        }
    }

    fn check_sources(&mut self, now: Now<'_>, found: &mut Found) {
        let bound = self.limits.lease + self.limits.end();
        let (id, active) = (self.id(), &self.active);
        self.held.retain(|(who, request), since| {
            if !now.state.acts(*who) {
                return false;
            }
            let moved = active.get(&who.instance).copied().unwrap_or(Nanos::ZERO);
            let from = (*since).max(moved).max(now.state.last_hit);
            let late = now.at > from + bound;
            if late {
                found.report(id, now.at, || {
                    let (name, since) = (now.state.name(who.instance), since.as_secs_f64());
                    format!(
                        "{name} still holds the blocks of request {request}, which finished at \
                         {since:.6} s"
                    )
                });
            }
            !late
        });
    }
}

impl Invariant for ReclaimBound {
    fn id(&self) -> InvariantId {
        InvariantId::ReclaimBound
    }

    fn wants(&self) -> &'static [Kind] {
        &[Kind::Crashed, Kind::PrefillHook, Kind::PrefillAnswer, Kind::Completed]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Crashed { who } => {
                self.died.insert(*who, now.at);
                self.held.retain(|key, _| key.0 != *who);
            }
            Observation::PrefillHook { who, hook: PrefillHook::Finished { request, .. } } => {
                self.held.insert((*who, request.clone()), now.at);
            }
            Observation::PrefillAnswer {
                who,
                answer:
                    PrefillAnswer::SourceFree { request, .. } | PrefillAnswer::Rejected { request, .. },
            } => {
                self.check_sources(now, found);
                self.held.remove(&(*who, request.clone()));
            }
            Observation::Completed { from, .. } => {
                self.active.insert(from.who.instance, now.at);
            }
            _ => {}
        }
    }

    fn audit(&mut self, now: Now<'_>, found: &mut Found) {
        self.check_loads(now, found);
        self.check_sources(now, found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{Bench, D0, P0, request};
    use engine::core::message::FinishReason;

    #[test]
    fn destinations_return_within_the_fence_bound() {
        let mut bench = Bench::new(InvariantId::ReclaimBound);
        bench.allocated(D0, "r", 16, &[4]);
        bench.announced(D0, P0, "r");
        bench.crash(P0);
        bench.now = bench.now + Nanos::from_secs(9);
        bench.finish();
        bench.holds();
        bench.now = bench.now + Nanos::from_secs(2);
        bench.finish();
        bench.fails("d0 still holds the blocks of request r for p0");
    }

    #[test]
    fn sources_return_within_the_lease_bound() {
        let mut bench = Bench::new(InvariantId::ReclaimBound);
        let reason = FinishReason::Length;
        let finish = |bench: &mut Bench, name| {
            let hook = &PrefillHook::Finished { request: request(name), reason };
            bench.see(Observation::PrefillHook { who: P0, hook });
        };
        finish(&mut bench, "r");
        bench.now = bench.now + Nanos::from_secs(39);
        let answer = &PrefillAnswer::SourceFree { request: request("r"), failure: None };
        bench.see(Observation::PrefillAnswer { who: P0, answer });
        finish(&mut bench, "s");
        bench.finish();
        bench.holds();
        bench.now = bench.now + Nanos::from_secs(41);
        bench.finish();
        bench.fails("p0 still holds the blocks of request s");
    }
}
