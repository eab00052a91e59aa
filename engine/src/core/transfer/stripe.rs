//! What is moved: layers that travel together, and token ranges of them.

use crate::core::layout::{Footprint, Geometry, GroupKind, Mismatch, Route, Slices, TokenSpan};
use crate::fabric::Credits;

/// Layers of one group that travel together between this rank and one rank of a peer.
#[derive(Debug)]
pub(super) struct Stripe {
    pub(super) session: usize,
    pub(super) group: usize,
    /// The layer that is computed last.
    pub(super) last_layer: u16,
    route: usize,
    layers: Vec<u16>,
    kind: GroupKind,
    /// Tokens are sent in multiples of the larger block size of the two sides.
    align: u32,
    /// The smaller block size of the two sides.
    unit: u32,
    /// Tokens of which only all have a meaning.
    whole: u32,
    /// Of all its layers.
    footprint: Footprint,
}

impl Stripe {
    /// Of `layers` of a group, on the route of this index, whose bytes go through `session`. `own`
    /// and `theirs` are the two sides.
    pub(super) fn new(
        session: usize,
        group: usize,
        (index, route): (usize, &Route),
        layers: &[u16],
        (own, theirs): (&Geometry, &Geometry),
    ) -> Stripe {
        let spec = &own.groups[group];
        Stripe {
            session,
            group,
            last_layer: layers.iter().copied().max().unwrap_or(0),
            route: index,
            layers: layers.to_vec(),
            kind: spec.kind,
            align: own.alignment(theirs, group),
            unit: route.unit_tokens(group),
            whole: if own.packed { spec.block_tokens.max(1) } else { 1 },
            footprint: footprint(route, layers),
        }
    }

    /// Its route, group and layers, for who digests it.
    pub(super) fn digested(&self) -> (usize, usize, Vec<u16>) {
        (self.route, self.group, self.layers.clone())
    }

    /// Of `ready` tokens, those that may be sent now.
    pub(super) fn sendable(&self, ready: u32, tokens: u32) -> u32 {
        if ready >= tokens {
            tokens
        } else if self.kind == GroupKind::State {
            0
        } else {
            ready / self.align * self.align
        }
    }

    /// First token from `from` on that is moved of a prompt of `tokens` tokens; what is outside a
    /// sliding window is left out.
    fn first(&self, from: u32, tokens: u32) -> u32 {
        let from = self.kind.handed_over_from(from, tokens, self.unit);
        from - from % self.whole
    }

    /// How far one operation gets with a piece of a prompt of `tokens` tokens: to the end of a
    /// block, one at least.
    pub(super) fn cut(&self, piece: &StripeRange, tokens: u32, most: &Credits) -> u32 {
        if piece.is_part() || self.kind == GroupKind::State {
            return piece.to;
        }
        let of = |most: u64, each: u64| most / each.max(1);
        let blocks = of(most.bytes, self.footprint.block_bytes)
            .min(of(most.ranges, self.footprint.block_ranges));
        let first = u64::from(self.first(piece.from, tokens));
        let align = u64::from(self.align.max(1));
        let end = first.saturating_add(blocks.saturating_mul(self.footprint.block_tokens));
        let end = (end / align * align).max((first / align + 1) * align);
        u32::try_from(end).map_or(piece.to, |end| end.min(piece.to))
    }

    /// No less than the operation for these tokens takes of a plane's credit.
    pub(super) fn bound(&self, (from, to): (u32, u32), tokens: u32) -> Credits {
        let Footprint { block_tokens, block_bytes, block_ranges, token_ranges } = self.footprint;
        let (first, end) = match self.kind {
            GroupKind::State => (0, 1),
            _ => (u64::from(self.first(from, tokens)), u64::from(to)),
        };
        let blocks = end.div_ceil(block_tokens).saturating_sub(first / block_tokens);
        let over = (block_tokens - first % block_tokens) % block_tokens;
        Credits {
            operations: 1,
            ranges: (blocks * block_ranges + over * token_ranges).max(1),
            bytes: blocks * block_bytes,
        }
    }

    /// Plans a span of a prompt of `tokens` tokens.
    pub(super) fn plan(
        &self,
        routes: &[Route],
        mut span: TokenSpan<'_>,
        tokens: u32,
        out: &mut Slices,
    ) -> Result<(), Mismatch> {
        match self.kind {
            GroupKind::State => (span.from, span.to) = (0, 1),
            GroupKind::Full | GroupKind::Window { .. } => {
                span.from = self.first(span.from, tokens);
            }
        }
        if span.from >= span.to {
            return Ok(());
        }
        routes[self.route].plan(&self.layers, &span, out)
    }
}

/// Tokens of a unit that have to be moved.
#[derive(Clone, Debug)]
pub(super) struct StripeRange {
    pub(super) stripe: usize,
    pub(super) from: u32,
    pub(super) to: u32,
    /// The bytes of its plan that it stands for, if other operations have the rest: a single block
    /// was more than one may have.
    pub(super) part: Option<(u64, u64)>,
    /// Operations that were submitted for it and failed.
    pub(super) tries: u32,
}

impl StripeRange {
    pub(super) fn new(unit: usize, from: u32, to: u32) -> StripeRange {
        StripeRange { stripe: unit, from, to, part: None, tries: 0 }
    }

    /// True if it is less than what its tokens stand for.
    pub(super) fn is_part(&self) -> bool {
        self.part.is_some()
    }
}

/// Of several layers of a route, in one group.
fn footprint(route: &Route, layers: &[u16]) -> Footprint {
    let mut all = Footprint { block_tokens: 1, block_bytes: 0, block_ranges: 0, token_ranges: 0 };
    for layer in layers {
        let each = route.footprint(*layer);
        all = Footprint {
            block_tokens: each.block_tokens,
            block_bytes: all.block_bytes + each.block_bytes,
            block_ranges: all.block_ranges + each.block_ranges,
            token_ranges: all.token_ranges + each.token_ranges,
        };
    }
    all
}
