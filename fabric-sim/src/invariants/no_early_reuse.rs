//! I2: no byte lands in a block whose owner changed after the operation was accepted, and blocks
//! that something may still land in are not handed out again.

use super::{CheckContext, Invariant};
use crate::observation::{BlockRef, Observation, ObservationKind, ObservedLanding, SimProcessId};
use kvferry_engine::core::message::DecodeAnswer;

/// A block belongs to a load from the time that decode allocated it until it was answered; only
/// operations accepted in between may write into it.
#[derive(Debug)]
pub(super) struct NoEarlyReuse;

impl NoEarlyReuse {
    fn landed(&self, now: CheckContext<'_>, seen: &ObservedLanding<'_>) {
        let state = now.state;
        // The memory of an incarnation that ended is nobody's.
        if !state.is_current(seen.target.who) {
            return;
        }
        let op = state.op(seen.from, seen.op.0);
        let settled = op.is_none_or(|op| op.settled);
        let accepted = op.map_or(0, |op| op.seq);
        for at in seen.written {
            let block = state.block(seen.target.who.instance, *at);
            let since = state.load_of(&block).map(|load| load.since);
            if !settled && since.is_some_and(|since| accepted >= since) {
                continue;
            }
            let why = match since {
                _ if settled => "after it was quiet or fenced",
                None => "though no transfer owns the block",
                Some(_) => "though the block has another owner since",
            };
            let (from, target) = (now.rank(seen.from), now.rank(seen.target));
            return now.report(|| {
                format!("operation {} of {from} landed in {at} of {target} {why}", seen.op)
            });
        }
    }

    /// These blocks get a new owner or a new purpose.
    fn released<'a>(
        &self,
        now: CheckContext<'_>,
        who: SimProcessId,
        blocks: impl Iterator<Item = BlockRef> + 'a,
        what: &str,
    ) {
        for at in blocks {
            let writes = now.state.block(who.instance, at).writes;
            if writes > 0 {
                let (name, BlockRef { group, block }) = (now.name(who.instance), at);
                return now.report(|| {
                    format!(
                        "group {group} block {block} of {name} was {what} while {writes} \
                         operations may land in it"
                    )
                });
            }
        }
    }
}

impl Invariant for NoEarlyReuse {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Landed, Taken, Freed, DecodeAnswer]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Landed(landing) => self.landed(now, landing),
            Observation::Taken { who, blocks, .. } => {
                self.released(now, *who, BlockRef::all(blocks), "handed out");
            }
            Observation::Freed { who, blocks, .. } => {
                self.released(now, *who, BlockRef::all(blocks), "freed");
            }
            Observation::DecodeAnswer { who, answer } => {
                let (what, request) = match answer {
                    DecodeAnswer::Loaded { request } => ("reported as loaded", request),
                    DecodeAnswer::LoadFailed { request, .. } => ("given back", request),
                    DecodeAnswer::Allocate { .. } | DecodeAnswer::Rejected { .. } => return,
                };
                if let Some(load) = now.state.load(who.instance, request) {
                    self.released(now, *who, load.blocks.iter().copied(), what);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0, P1, done, failed, rank};
    use kvferry_engine::fabric::{Landed, QuiesceTicket, SessionId};

    fn bench() -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::NoEarlyReuse);
        bench.allocated(D0, "r", 32, &[4, 5]);
        bench.announced(D0, P0, "r");
        bench
    }

    #[test]
    fn a_clean_push_is_fine() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4, 5]);
        bench.land(P0, D0, 1, &[4]);
        bench.land(P0, D0, 1, &[5]);
        bench.complete(P0, 1, &done());
        bench.loaded(D0, "r");
        bench.freed(D0, "r", &[4, 5]);
        bench.holds();
    }

    #[test]
    fn landing_in_a_block_of_somebody_else_is_reported() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4, 5]);
        bench.complete(P0, 1, &failed(Landed::None));
        bench.load_failed(D0, "r");
        bench.freed(D0, "r", &[4, 5]);
        bench.holds();
        bench.allocated(D0, "s", 16, &[5]);
        bench.land(P0, D0, 1, &[5]);
        bench.fails("landed in group 0 block 5 of d0");
    }

    #[test]
    fn an_unknown_landing_quarantines_until_quiet() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4, 5]);
        bench.complete(P0, 1, &failed(Landed::Unknown));
        bench.load_failed(D0, "r");
        bench.fails("given back while 1 operations may land in it");
        let mut bench = self::bench();
        bench.write(P0, D0, 1, &[4, 5]);
        bench.complete(P0, 1, &failed(Landed::Unknown));
        bench.quiet(P0, SessionId(1), QuiesceTicket(1));
        bench.load_failed(D0, "r");
        bench.freed(D0, "r", &[4, 5]);
        bench.taken(D0, "s", &[5]);
        bench.holds();
    }

    #[test]
    fn a_barrier_covers_only_what_was_accepted_before() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.quiesce(P0, SessionId(1), QuiesceTicket(1));
        bench.write(P0, D0, 2, &[5]);
        bench.quiet_now(P0, SessionId(1), QuiesceTicket(1));
        bench.land(P0, D0, 2, &[5]);
        bench.holds();
        bench.land(P0, D0, 1, &[4]);
        bench.fails("after it was quiet");
    }

    #[test]
    fn a_fence_ends_what_a_dead_peer_may_write() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.crash(P0);
        bench.fence(D0, P0);
        bench.load_failed(D0, "r");
        bench.freed(D0, "r", &[4, 5]);
        bench.holds();
        let mut bench = self::bench();
        bench.write(P0, D0, 1, &[4]);
        bench.crash(P0);
        bench.freed(D0, "r", &[4, 5]);
        bench.fails("freed while");
    }

    #[test]
    fn what_a_fenced_peer_submits_reaches_nothing() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.fence(D0, P0);
        bench.write(P0, D0, 2, &[4]);
        bench.load_failed(D0, "r");
        bench.holds();
        bench.land(P0, D0, 2, &[4]);
        bench.fails("after it was quiet or fenced");
    }

    #[test]
    fn a_fence_of_an_earlier_conversation_ends_nothing_of_a_later_one() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        (bench.session, bench.fence_key) = (SessionId(2), 2);
        bench.write(P0, D0, 2, &[5]);
        bench.see(Observation::Fenced { at: rank(D0), peer: rank(P1), fence_key: 2 });
        bench.see(Observation::Fenced { at: rank(D0), peer: rank(P0), fence_key: 1 });
        bench.land(P0, D0, 2, &[5]);
        bench.write(P0, D0, 3, &[5]);
        bench.land(P0, D0, 3, &[5]);
        bench.holds();
        bench.land(P0, D0, 1, &[4]);
        bench.fails("after it was quiet or fenced");
    }

    #[test]
    fn what_a_later_conversation_writes_holds_its_blocks_after_a_fence_of_an_earlier_one() {
        let mut bench = bench();
        (bench.session, bench.fence_key) = (SessionId(2), 2);
        bench.write(P0, D0, 1, &[4]);
        bench.see(Observation::Fenced { at: rank(D0), peer: rank(P0), fence_key: 1 });
        bench.freed(D0, "r", &[4, 5]);
        bench.fails("freed while 1 operations may land in it");
    }

    #[test]
    fn a_landing_that_nobody_asked_for_is_reported() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[9]);
        bench.land(P0, D0, 1, &[9]);
        bench.fails("no transfer owns the block");
    }
}
