//! I7: no frame, notification or completion changes a transfer of another request, peer, rank or
//! incarnation.

use super::{Found, Invariant, Now};
use crate::observe::{BlockRef, Kind, Landing, Observation, Rank};
use engine::core::message::DecodeHook;
use scenarios::lists::InvariantId;
use std::collections::BTreeSet;

/// Bytes may come only from the prefill that was asked, and not from a peer that is fenced. A core may answer only for requests that it knows in this life.
#[derive(Debug, Default)]
pub(super) struct RightRecipient {
    /// Who is kept out of whose memory.
    fenced: BTreeSet<(Rank, Rank)>,
}

impl RightRecipient {
    fn landed(&self, now: Now<'_>, seen: &Landing<'_>, found: &mut Found) {
        let state = now.state;
        let (from, target) = (seen.from, seen.target);
        let stray = |why: &str| {
            let (sender, receiver) =
                (state.name(from.who.instance), state.name(target.who.instance));
            format!(
                "operation {} of {sender} rank {} landed at {receiver} rank {}, {why}",
                seen.op, from.rank, target.rank
            )
        };
        // The memory of a life that ended is nobody's.
        if !state.is_current(target.who) {
            return;
        }
        if from != target && !self.fenced.is_empty() && self.fenced.contains(&(target, from)) {
            return found.report(self.id(), now.at, || stray("which has fenced it"));
        }
        for at in seen.written {
            let block = state.block(target.who.instance, *at);
            let Some(load) = state.load_of(&block) else { continue };
            if load.writer.is_none_or(|writer| writer == from.who.instance) {
                continue;
            }
            return found.report(self.id(), now.at, || {
                let BlockRef { group, block } = at;
                let asked = load.peer.map_or("nobody", |peer| state.name(peer.instance));
                let request = &load.request;
                stray(&format!(
                    "in group {group} block {block} of request {request}, which asked {asked}"
                ))
            });
        }
    }
}

impl Invariant for RightRecipient {
    fn id(&self) -> InvariantId {
        InvariantId::RightRecipient
    }

    fn wants(&self) -> &'static [Kind] {
        &[Kind::Landed, Kind::Fenced, Kind::Started, Kind::DecodeHook, Kind::DecodeAnswer]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Landed(landing) => self.landed(now, landing, found),
            // A live peer may connect again under a new pass, with operations of its own.
            Observation::Fenced { at, peer, .. } if !now.state.is_current(peer.who) => {
                self.fenced.insert((*at, *peer));
            }
            Observation::Started { who, .. } => {
                self.fenced.retain(|(at, _)| at.who.instance != who.instance);
            }
            Observation::DecodeHook { who, hook } => {
                let (DecodeHook::Arrived { request, .. }
                | DecodeHook::Allocated { request, .. }
                | DecodeHook::Finished { request, .. }) = hook;
                self.check_life(now, *who, request, "told of", found);
            }
            Observation::DecodeAnswer { who, answer } => {
                self.check_life(now, *who, answer.request(), "answers for", found);
            }
            _ => {}
        }
    }
}

impl RightRecipient {
    fn check_life(
        &self,
        now: Now<'_>,
        who: crate::observe::Who,
        request: &engine::core::ids::RequestId,
        what: &str,
        found: &mut Found,
    ) {
        if !now.state.is_current(who) {
            found.report(self.id(), now.at, || {
                let name = now.state.name(who.instance);
                format!("life {} of {name} {what} request {request} after it ended", who.life)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{Bench, D0, P0, P1};
    use crate::observe::Who;

    fn bench() -> Bench {
        let mut bench = Bench::new(InvariantId::RightRecipient);
        bench.allocated(D0, "r", 32, &[4, 5]);
        bench.announced(D0, P0, "r");
        bench
    }

    #[test]
    fn only_the_prefill_that_was_asked_may_write() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.land(P0, D0, 1, &[4]);
        bench.holds();
        bench.write(P1, D0, 1, &[5]);
        bench.land(P1, D0, 1, &[5]);
        bench.fails("block 5 of request r, which asked p0");
    }

    #[test]
    fn a_core_answers_in_its_own_life_only() {
        let mut bench = bench();
        bench.loaded(D0, "r");
        bench.crash(D0);
        bench.start(Who { life: 1, ..D0 });
        bench.holds();
        bench.loaded(D0, "r");
        bench.fails("life 0 of d0 answers for request r after it ended");
    }

    #[test]
    fn a_fenced_life_lands_nothing() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.crash(P0);
        bench.land(P0, D0, 1, &[4]);
        bench.holds();
        bench.fence(D0, P0);
        bench.land(P0, D0, 1, &[4]);
        bench.fails("which has fenced it");
    }
}
