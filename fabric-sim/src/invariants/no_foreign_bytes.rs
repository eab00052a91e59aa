//! I1: every block that a decode uses has the bytes of its (request, layer, rank, position).

use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind};

/// The comparison itself is made where the memory is, see [`crate::memory::RankStore::check`].
#[derive(Debug)]
pub(super) struct NoForeignBytes;

impl Invariant for NoForeignBytes {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Used]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        if let Observation::Used { at, request, wrong: Some(wrong), .. } = seen {
            now.report(|| format!("{} uses {wrong} for request {request}", now.rank(*at)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, request};
    use crate::memory::{BlockTokens, ContentMismatch, MismatchKind};
    use crate::observation::SimRankId;

    #[test]
    fn wrong_bytes_in_use_are_reported() {
        let mut bench = InvariantBench::new(InvariantId::NoForeignBytes);
        let (at, request) = (SimRankId { who: D0, rank: 1 }, &request("r"));
        bench.see(Observation::Used { at, request, tokens: 20, wrong: None });
        bench.holds();
        let tokens = BlockTokens { group: 0, block: 5, first: 16, tokens: 0..4 };
        let wrong =
            &ContentMismatch { at: tokens, layer: 1, position: 17, found: MismatchKind::Foreign };
        bench.see(Observation::Used { at, request, tokens: 20, wrong: Some(wrong) });
        bench.fails("d0 rank 1 uses foreign bytes in group 0 block 5");
    }
}
