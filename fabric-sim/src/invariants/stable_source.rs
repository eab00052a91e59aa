//! I4: a source block is neither freed nor rewritten while a transfer that may be used reads it.

use super::{Found, Invariant, Now};
use crate::observe::{BlockRef, Kind, Observation};
use engine::core::message::DecodeAnswer;
use scenarios::lists::InvariantId;

/// A push keeps its source until it is quiet. A pull may lose it at the end of its lease, but then
/// what it read must not be used.
#[derive(Debug)]
pub(super) struct StableSource;

impl Invariant for StableSource {
    fn id(&self) -> InvariantId {
        InvariantId::StableSource
    }

    fn wants(&self) -> &'static [Kind] {
        &[Kind::Freed, Kind::Taken, Kind::DecodeAnswer]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Freed { who, request, blocks }
            | Observation::Taken { who, request, blocks } => {
                for (group, ids) in blocks.iter().enumerate() {
                    let at = |block: &u32| BlockRef { group: group as u16, block: *block };
                    let read = |id: &&u32| now.state.block(who.instance, at(id)).reads > 0;
                    let Some(block) = ids.iter().find(read) else { continue };
                    return found.report(self.id(), now.at, || {
                        let name = now.state.name(who.instance);
                        format!(
                            "group {group} block {block} of request {request} on {name} went to \
                             another owner while a write reads it"
                        )
                    });
                }
            }
            Observation::DecodeAnswer { who, answer: DecodeAnswer::Loaded { request } } => {
                let load = now.state.load(who.instance, request);
                let Some(torn) = load.and_then(|load| load.torn) else { return };
                found.report(self.id(), now.at, || {
                    let BlockRef { group, block } = torn.block;
                    format!(
                        "{} uses request {request}, part of which was read from group {group} \
                         block {block} of {} after that block went to another owner",
                        now.state.name(who.instance),
                        now.state.name(torn.source)
                    )
                });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{Bench, D0, P0, done, failed, tag};
    use engine::core::message::Message;
    use engine::core::time::Nanos;
    use engine::fabric::{Direction, Landed, SessionId, Ticket};

    fn bench() -> Bench {
        let mut bench = Bench::new(InvariantId::StableSource);
        bench.taken(P0, "p", &[7]);
        bench
    }

    #[test]
    fn a_push_keeps_its_source_until_it_is_quiet() {
        let mut bench = bench();
        bench.submit((P0, D0), 1, Direction::Write, (&[7], &[4]));
        bench.complete(P0, 1, &failed(Landed::Unknown));
        bench.quiet(P0, SessionId(1), Ticket(1));
        bench.freed(P0, "p", &[7]);
        bench.holds();
        let mut bench = self::bench();
        bench.submit((P0, D0), 1, Direction::Write, (&[7], &[4]));
        bench.freed(P0, "p", &[7]);
        bench.fails("block 7 of request p on p0");
    }

    #[test]
    fn a_push_towards_a_dead_peer_lets_go_of_its_source() {
        let mut bench = bench();
        bench.submit((P0, D0), 1, Direction::Write, (&[7], &[4]));
        bench.crash(D0);
        bench.freed(P0, "p", &[7]);
        bench.holds();
    }

    fn granted() -> Bench {
        let mut bench = bench();
        bench.allocated(D0, "r", 16, &[4]);
        bench.send(D0, P0, Message::Pull { tag: tag("r"), tokens: 16 });
        let (blocks, lease) = (Vec::new(), Nanos::from_secs(1));
        bench.send(P0, D0, Message::Grant { tag: tag("r"), tokens: 16, blocks, lease });
        bench.submit((D0, P0), 1, Direction::Read, (&[4], &[7]));
        bench
    }

    #[test]
    fn a_pull_may_lose_its_source_if_it_is_not_used() {
        let mut bench = granted();
        bench.freed(P0, "p", &[7]);
        bench.land_read(D0, P0, 1, &[7], &[4]);
        bench.complete(D0, 1, &done());
        bench.load_failed(D0, "r");
        bench.holds();
    }

    #[test]
    fn a_pull_that_lost_its_source_must_not_be_used() {
        let mut bench = granted();
        bench.land_read(D0, P0, 1, &[7], &[4]);
        bench.holds();
        bench.freed(P0, "p", &[7]);
        bench.land_read(D0, P0, 1, &[7], &[4]);
        bench.loaded(D0, "r");
        bench.fails("d0 uses request r");
    }
}
