//! What one rank exchanges with one rank of a peer, precomputed at the hello.

use super::check::{Mismatch, check_rank, refuse};
use super::geometry::{BlockList, Geometry, GroupKind, LayerLayout, RankLayout};
use super::heads::share;
use super::mapping::{BlockPairs, HeadRange, LayerMapping, LocalRemote, RangeTemplate, SideBlocks};
use super::slices::Slices;

/// The part of the KV that one local and one remote rank exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The peer's rank.
    pub remote_rank: u16,
    layers: Vec<RouteLayer>,
    groups: Vec<RouteGroup>,
    /// The different forms of its layers, mostly one.
    forms: Vec<LayerMapping>,
}

/// One layer of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RouteLayer {
    group: usize,
    regions: (u16, u16),
    /// Byte offsets of block 0.
    start: LocalRemote,
    /// Index into [`Route::forms`].
    form: usize,
}

/// One group of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RouteGroup {
    state: bool,
    /// Tokens of the smaller block.
    unit: u64,
    local: PoolShape,
    remote: PoolShape,
}

/// The blocks of a group on one side.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolShape {
    blocks: u32,
    /// Tokens per block; of no meaning for a state.
    tokens: u64,
}

/// Tokens of one request in one group, with the blocks of both sides.
#[derive(Clone, Copy, Debug)]
pub struct TokenSpan<'a> {
    pub group: usize,
    /// First token, exact: rows before it are left alone.
    pub from: u32,
    /// One past the last token; rounded up to the smaller block size when planned. A span with
    /// `from >= to` is empty.
    pub to: u32,
    /// Blocks of the local side.
    pub local: &'a BlockList,
    /// Blocks of the remote side.
    pub remote: &'a BlockList,
}

/// What moving a layer takes, in multiples of the smaller of both sides' blocks; a state is one
/// block of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Tokens of such a block.
    pub block_tokens: u64,
    pub block_bytes: u64,
    /// Ranges of a whole block, at most.
    pub block_ranges: u64,
    /// Ranges of each token of a block that is not moved whole, at most.
    pub token_ranges: u64,
}

impl Route {
    /// The regions `(local, remote)` that a layer of the route touches; layers with equal regions
    /// can share an operation.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn regions(&self, layer: u16) -> (u16, u16) {
        self.layers[usize::from(layer)].regions
    }

    /// What moving some tokens of a layer takes.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn footprint(&self, layer: u16) -> Footprint {
        let layer = &self.layers[usize::from(layer)];
        let (block_bytes, block_ranges, token_ranges) = self.forms[layer.form].footprint();
        let group = &self.groups[layer.group];
        let block_tokens = if group.state { 1 } else { group.unit };
        Footprint { block_tokens, block_bytes, block_ranges, token_ranges }
    }

    /// Appends the byte ranges of `span` for each of `layers` (all in the span's group), layer by
    /// layer, merged where both sides are contiguous. Of a `State` group the one block moves
    /// whole, whatever tokens the span names. Allocates only if `out` has to grow.
    ///
    /// # Errors
    /// A block list that does not cover the span or names a block outside the pool; nothing is
    /// appended then. So with block ids of a peer, an error is the peer's violation.
    ///
    /// # Panics
    /// If the layers are not all in the span's group or not all between the same two regions.
    pub fn plan(
        &self,
        layers: &[u16],
        span: &TokenSpan<'_>,
        out: &mut Slices,
    ) -> Result<(), Mismatch> {
        let group = &self.groups[span.group];
        let Some(head) = layers.first() else { return Ok(()) };
        for layer in layers {
            let at = &self.layers[usize::from(*layer)];
            assert_eq!(at.group, span.group, "layer {layer} is in another group than the span");
            assert_eq!(
                at.regions,
                self.regions(*head),
                "layers {head} and {layer} in one operation"
            );
        }
        if span.from >= span.to {
            return Ok(());
        }
        let (places, rows) = group.places(span)?;
        let mut template: Option<(usize, RangeTemplate)> = None;
        for (done, layer) in layers.iter().enumerate() {
            let at = &self.layers[usize::from(*layer)];
            if let Some((form, template)) = &template
                && *form == at.form
            {
                template.repeat(at.start, out);
                continue;
            }
            let form = &self.forms[at.form];
            let made = RangeTemplate::record(at.start, out, |out| match rows {
                None => form.emit(at.start, places, out),
                Some(rows) => {
                    form.emit_rows(at.start, places, (rows, group.unit), out);
                    form.emit(at.start, places.after_first(), out);
                }
            });
            out.reserve(made.count() * (layers.len() - done - 1));
            template = Some((at.form, made));
        }
        Ok(())
    }
}

impl RouteGroup {
    /// The units of a span, and how many tokens of the first one it has if not all.
    fn places<'a>(&self, span: &TokenSpan<'a>) -> Result<(BlockPairs<'a>, Option<u64>), Mismatch> {
        if self.state {
            let local = self.local.state("local", span.local)?;
            let remote = self.remote.state("remote", span.remote)?;
            return Ok((BlockPairs { local, remote, units: 1 }, None));
        }
        let first = u64::from(span.from) / self.unit;
        let end = u64::from(span.to).div_ceil(self.unit);
        let places = BlockPairs {
            local: self.local.cover("local", span.local, first..end, self.unit)?,
            remote: self.remote.cover("remote", span.remote, first..end, self.unit)?,
            units: (end - first) as usize,
        };
        let over = u64::from(span.from) % self.unit;
        Ok((places, (over > 0 && !planted!("first-block-is-whole")).then(|| self.unit - over)))
    }
}

impl PoolShape {
    /// The one block of a state.
    fn state<'a>(&self, side: &str, list: &'a BlockList) -> Result<SideBlocks<'a>, Mismatch> {
        if list.ids.len() != 1 {
            return refuse(format_args!("{side} state: {} blocks instead of 1", list.ids.len()));
        }
        self.inside(side, &list.ids)?;
        Ok(SideBlocks { ids: &list.ids, skip: 0, per: 1 })
    }

    /// The blocks that hold `units`, of `unit` tokens each.
    fn cover<'a>(
        &self,
        side: &str,
        list: &'a BlockList,
        units: std::ops::Range<u64>,
        unit: u64,
    ) -> Result<SideBlocks<'a>, Mismatch> {
        let per = self.tokens / unit;
        let (from, to) = (units.start / per, units.end.div_ceil(per));
        let first = u64::from(list.first);
        let end = first + list.ids.len() as u64;
        if from < first || to > end {
            return refuse(format_args!(
                "{side} blocks: the span is in blocks {from}..{to}, listed are {first}..{end}"
            ));
        }
        let ids = &list.ids[(from - first) as usize..(to - first) as usize];
        self.inside(side, ids)?;
        Ok(SideBlocks { ids, skip: units.start % per, per })
    }

    /// Refuses ids outside the pool.
    fn inside(&self, side: &str, ids: &[u32]) -> Result<(), Mismatch> {
        match ids.iter().max() {
            Some(id) if *id >= self.blocks => refuse(format_args!(
                "{side} blocks: block {id} is outside the pool of {} blocks",
                self.blocks
            )),
            _ => Ok(()),
        }
    }
}

/// One side of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteSide {
    Local,
    Remote,
}

impl Route {
    /// The region of a layer on one side.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn region_on(&self, side: RouteSide, layer: u16) -> u16 {
        let (local, remote) = self.regions(layer);
        if side == RouteSide::Local { local } else { remote }
    }

    /// Tokens of the smaller block of both sides in a group; 1 for a state.
    pub fn unit_tokens(&self, group: usize) -> u32 {
        let group = &self.groups[group];
        if group.state { 1 } else { group.unit as u32 }
    }

    /// Calls `each(offset, length)` for the byte ranges on one side of tokens `rows` of the unit with
    /// this number, counted in the prompt, in an order that is the same on both sides. Of a state
    /// the one unit is whole.
    ///
    /// # Errors
    /// The block list does not have the unit, or names a block outside the pool.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn unit_ranges(
        &self,
        (side, list): (RouteSide, &BlockList),
        layer: u16,
        unit: u32,
        rows: std::ops::Range<u32>,
        each: impl FnMut(u64, u64),
    ) -> Result<(), Mismatch> {
        let at = &self.layers[usize::from(layer)];
        let (group, form) = (&self.groups[at.group], &self.forms[at.form]);
        let (name, pool, of): (_, _, fn(LocalRemote) -> u64) = match side {
            RouteSide::Local => ("local", &group.local, |both| both.local),
            RouteSide::Remote => ("remote", &group.remote, |both| both.remote),
        };
        let unit = u64::from(unit);
        let (places, rows) = match group.state {
            true => (pool.state(name, list)?, 0..form.unit_rows()),
            false => {
                let places = pool.cover(name, list, unit..unit + 1, group.unit)?;
                (places, u64::from(rows.start)..u64::from(rows.end))
            }
        };
        let origin = form.unit_at(places.ids[0], places.skip, of).wrapping_add(of(at.start));
        form.ranges((origin, of), rows, each);
        Ok(())
    }
}

/// The routes by which one rank of a receiver gets its part, ascending by the source's rank. Unlike
/// those of [`routes`] their local side is the source, so that what is planned by them comes in the
/// same order on both sides.
///
/// # Errors
/// As [`super::check()`].
pub fn routes_from(
    source: (&Geometry, &[RankLayout]),
    receiver: (&Geometry, &RankLayout),
) -> Result<Vec<Route>, Mismatch> {
    check_rank(receiver, source)?;
    let mut ranks: Vec<&RankLayout> = source.1.iter().collect();
    ranks.sort_unstable_by_key(|rank| rank.rank);
    let route = |rank: &&RankLayout| {
        let share = share(source.0, receiver.0, rank.rank, receiver.1.rank)?;
        let heads = HeadRange {
            local: u64::from(share.source),
            remote: u64::from(share.receiver),
            count: u64::from(share.heads),
        };
        let route = build((source.0, rank), receiver, heads);
        Some(Route { remote_rank: rank.rank, ..route })
    };
    Ok(ranks.iter().filter_map(route).collect())
}

/// The routes of one rank of the local engine to the ranks of the peer, ascending;
/// `local_is_source` says who has the KV. Every head that a receiver rank needs comes from exactly
/// one source rank.
///
/// # Errors
/// As [`super::check()`].
pub fn routes(
    local_is_source: bool,
    local: (&Geometry, &RankLayout),
    remote: (&Geometry, &[RankLayout]),
) -> Result<Vec<Route>, Mismatch> {
    check_rank(local, remote)?;
    let (source, receiver) =
        if local_is_source { (local.0, remote.0) } else { (remote.0, local.0) };
    let (own, rank) = (local.1, local.1.rank);
    let mut peers: Vec<&RankLayout> = remote.1.iter().collect();
    peers.sort_unstable_by_key(|peer| peer.rank);
    let route = |peer: &&RankLayout| {
        let (from, to) = if local_is_source { (rank, peer.rank) } else { (peer.rank, rank) };
        let share = share(source, receiver, from, to)?;
        let (own_head, peer_head) = if local_is_source {
            (share.source, share.receiver)
        } else {
            (share.receiver, share.source)
        };
        let heads = HeadRange {
            local: u64::from(own_head),
            remote: u64::from(peer_head),
            count: u64::from(share.heads),
        };
        Some(build((local.0, own), (remote.0, peer), heads))
    };
    Ok(peers.iter().filter_map(route).collect())
}

/// The route between two ranks that exchange `heads`.
fn build(
    local: (&Geometry, &RankLayout),
    remote: (&Geometry, &RankLayout),
    heads: HeadRange,
) -> Route {
    let pool = |side: (&Geometry, &RankLayout), group: usize| {
        let group = &side.0.groups[group];
        PoolShape {
            blocks: side.1.layers[usize::from(group.layers[0])].shape[0],
            tokens: u64::from(group.block_tokens),
        }
    };
    let groups: Vec<RouteGroup> = (0..local.0.groups.len())
        .map(|group| {
            let (own, peer) = (pool(local, group), pool(remote, group));
            RouteGroup {
                state: local.0.groups[group].kind == GroupKind::State,
                unit: own.tokens.min(peer.tokens),
                local: own,
                remote: peer,
            }
        })
        .collect();
    let mut route =
        Route { remote_rank: remote.1.rank, layers: Vec::new(), groups, forms: Vec::new() };
    let mut group_of = vec![0; usize::from(local.0.layers)];
    for (index, group) in local.0.groups.iter().enumerate() {
        group.layers.iter().for_each(|layer| group_of[usize::from(*layer)] = index);
    }
    for ((own, peer), group) in local.1.layers.iter().zip(&remote.1.layers).zip(group_of) {
        route.add(own, peer, group, heads);
    }
    route
}

impl Route {
    /// Adds the next layer.
    fn add(&mut self, own: &LayerLayout, peer: &LayerLayout, group: usize, heads: HeadRange) {
        let at = &self.groups[group];
        let (form, start) = if at.state {
            let [_, slots, rows, _] = own.shape.map(u64::from);
            LayerMapping::new(own, peer, HeadRange { local: 0, remote: 0, count: slots }, rows)
        } else {
            LayerMapping::new(own, peer, heads, at.unit)
        };
        let known = self.forms.iter().rposition(|known| *known == form);
        let form = known.unwrap_or_else(|| {
            self.forms.push(form);
            self.forms.len() - 1
        });
        self.layers.push(RouteLayer { group, regions: (own.region, peer.region), start, form });
    }
}
