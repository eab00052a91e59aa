//! I1: every block that a decode uses has the bytes of its (request, layer, rank, position).

use super::{Found, Invariant, Now};
use crate::observe::{Kind, Observation};
use scenarios::lists::InvariantId;

/// The comparison itself is made where the memory is, see [`crate::memory::Store::check`].
#[derive(Debug)]
pub(super) struct NoForeignBytes;

impl Invariant for NoForeignBytes {
    fn id(&self) -> InvariantId {
        InvariantId::NoForeignBytes
    }

    fn wants(&self) -> &'static [Kind] {
        &[Kind::Used]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        if let Observation::Used { at, request, wrong: Some(wrong), .. } = seen {
            found.report(self.id(), now.at, || {
                let name = now.state.name(at.who.instance);
                format!("{name} rank {} uses {wrong} for request {request}", at.rank)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{Bench, D0, request};
    use crate::memory::{BlockTokens, Found, Wrong};
    use crate::observe::Rank;

    #[test]
    fn wrong_bytes_in_use_are_reported() {
        let mut bench = Bench::new(InvariantId::NoForeignBytes);
        let (at, request) = (Rank { who: D0, rank: 1 }, &request("r"));
        bench.see(Observation::Used { at, request, tokens: 20, wrong: None });
        bench.holds();
        let tokens = BlockTokens { group: 0, block: 5, first: 16, tokens: 0..4 };
        let wrong = &Wrong { at: tokens, layer: 1, position: 17, found: Found::Foreign };
        bench.see(Observation::Used { at, request, tokens: 20, wrong: Some(wrong) });
        bench.fails("d0 rank 1 uses foreign bytes in group 0 block 5");
    }
}
