//! Planned ranges against the oracle, pairing of ranks, merging.

use crate::case::{Case, CaseDraw, CaseRequest, CaseSide, plain};
use kvferry_engine::core::ids::RankSet;
use kvferry_engine::core::layout::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Rank and region index.
type BytePlace = (u16, u16);

/// What `plan` said of a case.
struct Planned {
    /// Local place, remote place, ranges.
    ops: Vec<(BytePlace, BytePlace, Slices)>,
    /// Local ranks with a route.
    local: RankSet,
}

/// Plans a whole case; layers of equal regions share a list, and so do the two parts of a span.
fn plan(case: &Case, local_is_source: bool) -> Planned {
    let (local, remote) = match local_is_source {
        true => (&case.source, &case.receiver),
        false => (&case.receiver, &case.source),
    };
    let mut planned = Planned { ops: Vec::new(), local: RankSet::EMPTY };
    for rank in 0..local.geometry.tp {
        let routes = routes(local_is_source, local.rank(rank), remote.view()).unwrap();
        for route in &routes {
            planned.local.insert(rank);
            for (group, request) in case.requests.iter().enumerate() {
                for (regions, layers) in by_region(route, &local.geometry.groups[group].layers) {
                    let mut out = Slices::default();
                    for span in spans(group, request, local_is_source, &local.geometry) {
                        route.plan(&layers, &span, &mut out).unwrap();
                    }
                    let remote = (route.remote_rank, regions.1);
                    planned.ops.push(((rank, regions.0), remote, out));
                }
            }
        }
    }
    planned
}

fn by_region(route: &Route, layers: &[u16]) -> BTreeMap<(u16, u16), Vec<u16>> {
    let mut lots: BTreeMap<(u16, u16), Vec<u16>> = BTreeMap::new();
    for layer in layers {
        lots.entry(route.regions(*layer)).or_default().push(*layer);
    }
    lots
}

/// The span of a request in two parts; a state moves once.
fn spans<'a>(
    group: usize,
    request: &'a CaseRequest,
    local_is_source: bool,
    geometry: &Geometry,
) -> Vec<TokenSpan<'a>> {
    let (local, remote) = match local_is_source {
        true => (&request.source, &request.receiver),
        false => (&request.receiver, &request.source),
    };
    let mid = request.mid.clamp(request.from, request.to.max(request.from));
    let parts = match geometry.groups[group].kind == GroupKind::State || mid == request.to {
        true => vec![(request.from, request.to)],
        false => vec![(request.from, mid), (mid, request.to)],
    };
    parts.into_iter().map(|(from, to)| TokenSpan { group, from, to, local, remote }).collect()
}

/// Copies what was planned and returns the receiver; fails on a range outside its region or a byte
/// that is written twice.
fn copy(case: &Case, planned: &Planned, local_is_source: bool) -> Result<CaseSide, TestCaseError> {
    let mut receiver = case.receiver.clone();
    let mut written: Vec<Vec<Vec<bool>>> = receiver
        .memory
        .iter()
        .map(|regions| regions.iter().map(|bytes| vec![false; bytes.len()]).collect())
        .collect();
    for (local, remote, slices) in &planned.ops {
        let (from, to, from_at, to_at) = match local_is_source {
            true => (local, remote, &slices.local, &slices.remote),
            false => (remote, local, &slices.remote, &slices.local),
        };
        let source = &case.source.memory[usize::from(from.0)][usize::from(from.1)];
        let target = &mut receiver.memory[usize::from(to.0)][usize::from(to.1)];
        let marks = &mut written[usize::from(to.0)][usize::from(to.1)];
        for ((from, to), len) in from_at.iter().zip(to_at).zip(&slices.len) {
            let (from, to, len) = (*from as usize, *to as usize, *len as usize);
            prop_assert!(len > 0 && from + len <= source.len() && to + len <= target.len());
            target[to..to + len].copy_from_slice(&source[from..from + len]);
            for mark in &mut marks[to..to + len] {
                prop_assert!(!std::mem::replace(mark, true), "byte written twice");
            }
        }
    }
    Ok(receiver)
}

/// No range continues the one before on both sides.
fn is_merged(slices: &Slices) -> bool {
    (1..slices.count()).all(|at| {
        let len = slices.len[at - 1];
        slices.local[at - 1] + len != slices.local[at]
            || slices.remote[at - 1] + len != slices.remote[at]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn planned_ranges_move_every_element_once_and_nothing_else(
        values in prop::collection::vec(any::<u16>(), 250)
    ) {
        let case = Case::new(&mut CaseDraw::new(&values));
        let expected = case.expected();
        for local_is_source in [true, false] {
            let planned = plan(&case, local_is_source);
            let receiver = copy(&case, &planned, local_is_source)?;
            prop_assert!(receiver.memory == expected.memory, "local_is_source {}", local_is_source);
            for (_, _, slices) in &planned.ops {
                prop_assert!(is_merged(slices), "{:?}", slices);
            }
            let ranks = match local_is_source {
                true => senders(&case.source.geometry, &case.receiver.geometry),
                false => receivers(&case.source.geometry, &case.receiver.geometry),
            };
            prop_assert_eq!(planned.local, ranks);
        }
    }
}

proptest! {
    #[test]
    fn ranges_of_ascending_blocks_cannot_be_fewer(
        values in prop::collection::vec(any::<u16>(), 250)
    ) {
        let Case { source, receiver, requests } = Case::new(&mut CaseDraw::new(&values));
        let routes = routes(true, source.rank(0), receiver.view()).unwrap();
        for (route, (group, request)) in
            routes.iter().flat_map(|route| requests.iter().enumerate().map(move |at| (route, at)))
        {
            let model = [&source, &receiver].map(|side| &side.geometry.groups[group]);
            if model[0].block_tokens != model[1].block_tokens {
                continue;
            }
            let mut lists = [request.source.clone(), request.receiver.clone()];
            lists.iter_mut().for_each(|list| list.ids.sort_unstable());
            let from = request.from.next_multiple_of(model[0].block_tokens);
            let [local, remote] = &lists;
            let span = TokenSpan { group, from, to: request.to, local, remote };
            for layer in &model[0].layers {
                let (mut out, mut sorted) = (Slices::default(), Slices::default());
                route.plan(&[*layer], &span, &mut out).unwrap();
                let mut order: Vec<usize> = (0..out.count()).collect();
                order.sort_unstable_by_key(|at| out.local[*at]);
                order.iter().for_each(|at| sorted.push(out.local[*at], out.remote[*at], out.len[*at]));
                prop_assert_eq!(sorted, out);
            }
        }
    }
}

/// Which source rank serves which receiver ranks.
fn served(source: &CaseSide, receiver: &CaseSide) -> Vec<Vec<u16>> {
    (0..source.geometry.tp)
        .map(|rank| {
            let routes = routes(true, source.rank(rank), receiver.view()).unwrap();
            routes.iter().map(|route| route.remote_rank).collect()
        })
        .collect()
}

#[test]
fn replicas_of_a_head_share_the_receiver_ranks_evenly() {
    for (kv_heads, latent) in [(1, false), (2, false), (4, false), (8, false), (1, true)] {
        let sizes = (1..=16u16).filter(|tp| kv_heads % tp == 0 || tp % kv_heads == 0);
        for (from, to) in sizes.clone().flat_map(|from| sizes.clone().map(move |to| (from, to))) {
            let [source, receiver] = [from, to].map(|tp| plain(kv_heads, latent, tp));
            let served = served(&source, &receiver);
            let replicas = usize::from(if latent { from } else { (from / kv_heads).max(1) });
            for group in served.chunks(replicas) {
                let loads = group.iter().map(Vec::len);
                let spread = loads.clone().max().unwrap() - loads.min().unwrap();
                assert!(spread <= 1, "{kv_heads} heads, {from} to {to}: {served:?}");
            }
            if from == to {
                let own: Vec<Vec<u16>> = (0..from).map(|rank| vec![rank]).collect();
                assert_eq!(served, own, "equal sizes pair equal ranks");
            }
            if latent {
                let turns = |rank: u16| (0..to).filter(move |receiver| receiver % from == rank);
                let expected: Vec<Vec<u16>> = (0..from).map(|rank| turns(rank).collect()).collect();
                assert_eq!(served, expected);
            }
        }
    }
}

/// Ranges of a plan over all layers of a plain engine (pool of 64 blocks of 4 tokens).
fn ranges(source: &[u32], receiver: &[u32], before: Slices) -> Slices {
    let side = plain(2, false, 1);
    let [local, remote] = [source, receiver].map(|ids| BlockList::new(ids.to_vec()));
    let to = 4 * source.len() as u32;
    let span = TokenSpan { group: 0, from: 0, to, local: &local, remote: &remote };
    let mut out = before;
    let route = routes(true, side.rank(0), side.view()).unwrap().remove(0);
    route.plan(&side.geometry.groups[0].layers, &span, &mut out).unwrap();
    out
}

#[test]
fn neighbours_on_both_sides_become_one_range() {
    let layers = usize::from(plain(2, false, 1).geometry.layers);
    let count =
        |source: &[u32], receiver: &[u32]| ranges(source, receiver, Slices::default()).count();
    assert_eq!(count(&[1, 2, 3, 4], &[5, 6, 7, 8]), layers);
    assert_eq!(count(&[1, 2, 3, 4], &[5, 6, 9, 10]), 2 * layers);
    assert_eq!(count(&[1, 3, 5, 7], &[1, 3, 5, 7]), 4 * layers);
    let pool: Vec<u32> = (0..64).collect();
    assert_eq!(count(&pool, &pool), 1, "layers follow each other without a gap");
    assert_eq!(count(&[0, 2, 63], &[0, 2, 63]), 1 + 2 * layers, "63 continues in the next layer");
}

#[test]
fn plan_extends_the_last_range_of_the_list() {
    let one = ranges(&[4], &[4], Slices::default());
    let mut before = Slices::default();
    before.push(0, 0, one.local[0]);
    assert_eq!(
        ranges(&[4, 9], &[4, 9], before).count(),
        2 * usize::from(plain(2, false, 1).geometry.layers)
    );
}

#[test]
fn plan_refuses_blocks_that_are_missing_or_not_of_the_pool() {
    let side = plain(2, false, 1);
    let route = routes(true, side.rank(0), side.view()).unwrap().remove(0);
    let good = BlockList::new(vec![1, 63]);
    let refused = |from, to, local: &BlockList, remote: &BlockList| {
        let span = TokenSpan { group: 0, from, to, local, remote };
        let mut out = Slices::default();
        let error = route.plan(&[0, 1], &span, &mut out).unwrap_err().to_string();
        assert!(out.is_empty());
        error
    };
    let text = refused(0, 8, &good, &BlockList::new(vec![0, 64]));
    assert_eq!(text, "remote blocks: block 64 is outside the pool of 64 blocks");
    let text = refused(0, 8, &BlockList::new(vec![u32::MAX, 1]), &good);
    assert_eq!(text, format!("local blocks: block {} is outside the pool of 64 blocks", u32::MAX));
    let text = refused(4, 9, &good, &good);
    assert_eq!(text, "local blocks: the span is in blocks 1..3, listed are 0..2");
    let late = BlockList { first: 1, ids: vec![1, 2] };
    let text = refused(3, 8, &good, &late);
    assert_eq!(text, "remote blocks: the span is in blocks 0..2, listed are 1..3");
    refused(u32::MAX - 1, u32::MAX, &good, &good);
    refused(0, 1, &good, &BlockList { first: u32::MAX, ids: vec![1, 2] });
}

#[test]
#[should_panic(expected = "layers 0 and 1 in one operation")]
fn plan_of_layers_in_different_regions_is_a_bug_of_the_caller() {
    let mut side = plain(2, false, 1);
    let region = side.ranks[0].regions[0].clone();
    side.ranks[0].regions.push(region);
    side.ranks[0].layers[1].region = 1;
    let route = routes(true, side.rank(0), side.view()).unwrap().remove(0);
    assert_eq!((route.regions(0), route.regions(1)), ((0, 0), (1, 1)));
    let blocks = BlockList::new(vec![0]);
    let span = TokenSpan { group: 0, from: 0, to: 4, local: &blocks, remote: &blocks };
    let _ = route.plan(&[0, 1], &span, &mut Slices::default());
}
