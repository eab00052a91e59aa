//! L5: blocks held for a dead peer return within the lease bound (sources) or the fence bound
//! (destinations).

use super::{Found, Invariant, Limits, Now};
use crate::observe::{Kind, Observation, Who};
use engine::core::ids::{RequestId, TransferKey};
use engine::core::message::{DecodeHook, PrefillAnswer, PrefillHook};
use engine::core::time::Nanos;
use scenarios::lists::InvariantId;
use std::collections::BTreeMap;

/// A destination whose writer died is given back within silence + fence + 1 s. A source is given
/// back within a lease and that time after its request finished, anything was read or written here,
/// or the last decode that lives and waits for it was done with it.
#[derive(Debug)]
pub(super) struct ReclaimBound {
    limits: Limits,
    /// When each life ended.
    died: BTreeMap<Who, Nanos>,
    /// Prefills by request.
    sources: BTreeMap<(Who, RequestId), TransferKey>,
    /// Decode requests that have not ended, or whose load has not.
    wants: BTreeMap<(Who, RequestId), TransferKey>,
    /// Their number by transfer, and when it changed last.
    wanted: BTreeMap<TransferKey, (u32, Nanos)>,
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
            sources: BTreeMap::new(),
            wants: BTreeMap::new(),
            wanted: BTreeMap::new(),
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
        let (id, active, wanted) = (self.id(), &self.active, &self.wanted);
        self.held.retain(|(who, request), since| {
            if !now.state.acts(*who) {
                return false;
            }
            let key = self.sources.get(&(*who, request.clone()));
            let (receivers, changed) =
                key.and_then(|key| wanted.get(key)).copied().unwrap_or_default();
            if receivers > 0 {
                return true;
            }
            let moved = active.get(&who.instance).copied().unwrap_or(Nanos::ZERO);
            let from = (*since).max(moved).max(changed).max(now.state.last_hit);
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

    /// A decode request waits for a transfer.
    fn want(&mut self, now: Now<'_>, who: Who, request: &RequestId, key: &TransferKey) {
        self.wants.insert((who, request.clone()), key.clone());
        let wanted = self.wanted.entry(key.clone()).or_default();
        *wanted = (wanted.0 + 1, now.at);
    }

    /// A decode request is done with its transfer.
    fn done(&mut self, now: Now<'_>, who: Who, request: &RequestId) {
        if let Some(key) = self.wants.remove(&(who, request.clone()))
            && let Some(wanted) = self.wanted.get_mut(&key)
        {
            *wanted = (wanted.0 - 1, now.at);
        }
    }

    fn crashed(&mut self, now: Now<'_>, who: Who) {
        self.died.insert(who, now.at);
        self.held.retain(|key, _| key.0 != who);
        self.sources.retain(|key, _| key.0 != who);
        let lost: Vec<_> =
            self.wants.keys().filter(|key| key.0 == who).map(|key| key.1.clone()).collect();
        lost.iter().for_each(|request| self.done(now, who, request));
    }

    fn decode_hook(&mut self, now: Now<'_>, who: Who, hook: &DecodeHook) {
        match hook {
            DecodeHook::Arrived { request, leg, .. } => self.want(now, who, request, &leg.key),
            // Until its answer it waits for its blocks.
            DecodeHook::Finished { request, .. }
                if now.state.load(who.instance, request).is_none() =>
            {
                self.done(now, who, request);
            }
            DecodeHook::Finished { .. } | DecodeHook::Allocated { .. } => {}
        }
    }
}

impl Invariant for ReclaimBound {
    fn id(&self) -> InvariantId {
        InvariantId::ReclaimBound
    }

    fn wants(&self) -> &'static [Kind] {
        &[
            Kind::Crashed,
            Kind::PrefillHook,
            Kind::PrefillAnswer,
            Kind::DecodeHook,
            Kind::DecodeAnswer,
            Kind::Completed,
        ]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Crashed { who } => self.crashed(now, *who),
            Observation::DecodeHook { who, hook } => self.decode_hook(now, *who, hook),
            Observation::DecodeAnswer { who, answer } if answer.is_last() => {
                self.done(now, *who, answer.request());
            }
            Observation::PrefillHook { who, hook: PrefillHook::Arrived { request, leg, .. } } => {
                self.sources.insert((*who, request.clone()), leg.key.clone());
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
                self.sources.remove(&(*who, request.clone()));
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
    use crate::invariants::testing::{Bench, D0, P0, decode_leg, key, request};
    use engine::core::message::{FinishReason, Mode, PrefillLeg};

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

    #[test]
    fn a_source_stays_while_a_living_decode_waits_for_it() {
        let mut bench = Bench::new(InvariantId::ReclaimBound);
        let leg = PrefillLeg { key: key("r"), siblings: 1, mode: Mode::Push };
        let hook = &PrefillHook::Arrived { request: request("p"), leg, tokens: 16 };
        bench.see(Observation::PrefillHook { who: P0, hook });
        let hook = &DecodeHook::Arrived { request: request("r"), leg: decode_leg("r"), tokens: 16 };
        bench.see(Observation::DecodeHook { who: D0, hook });
        let hook = &PrefillHook::Finished { request: request("p"), reason: FinishReason::Length };
        bench.see(Observation::PrefillHook { who: P0, hook });
        bench.now = bench.now + Nanos::from_secs(100);
        bench.finish();
        bench.holds();
        bench.crash(D0);
        bench.now = bench.now + Nanos::from_secs(41);
        bench.finish();
        bench.fails("p0 still holds the blocks of request p");
    }
}
