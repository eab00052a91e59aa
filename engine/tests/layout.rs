//! Planning against an oracle that moves single elements, and what `check` refuses.

mod layout_case;

use engine::core::ids::RankSet;
use engine::core::layout::*;
use layout_case::{Case, Draw, Request, Side};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Rank and region index.
type Place = (u16, u16);

/// What `plan` said of a case.
struct Planned {
    /// Local place, remote place, ranges.
    ops: Vec<(Place, Place, Slices)>,
    /// Local ranks with a route.
    local: RankSet,
}

/// Plans a whole case; layers of equal regions share a list, and so do the two parts of a span.
fn plan(case: &Case, local_is_source: bool) -> Planned {
    let (local, remote) = match local_is_source {
        true => (&case.source, &case.sink),
        false => (&case.sink, &case.source),
    };
    let mut planned = Planned { ops: Vec::new(), local: RankSet::EMPTY };
    for rank in 0..local.geometry.tp {
        let routes = routes(
            local_is_source,
            (local.view().0, &local.view().1[usize::from(rank)]),
            remote.view(),
        )
        .unwrap();
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
    request: &'a Request,
    local_is_source: bool,
    geometry: &Geometry,
) -> Vec<Span<'a>> {
    let (local, remote) = match local_is_source {
        true => (&request.source, &request.sink),
        false => (&request.sink, &request.source),
    };
    let mid = request.mid.clamp(request.from, request.to.max(request.from));
    let parts = match geometry.groups[group].kind == GroupKind::State || mid == request.to {
        true => vec![(request.from, request.to)],
        false => vec![(request.from, mid), (mid, request.to)],
    };
    parts.into_iter().map(|(from, to)| Span { group, from, to, local, remote }).collect()
}

/// Copies what was planned and returns the sink; fails on a range outside its region or a byte
/// that is written twice.
fn copy(case: &Case, planned: &Planned, local_is_source: bool) -> Result<Side, TestCaseError> {
    let mut sink = case.sink.clone();
    let mut written: Vec<Vec<Vec<bool>>> = sink
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
        let target = &mut sink.memory[usize::from(to.0)][usize::from(to.1)];
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
    Ok(sink)
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
        let case = Case::new(&mut Draw::new(&values));
        let expected = case.expected();
        for local_is_source in [true, false] {
            let planned = plan(&case, local_is_source);
            let sink = copy(&case, &planned, local_is_source)?;
            prop_assert!(sink.memory == expected.memory, "local_is_source {}", local_is_source);
            for (_, _, slices) in &planned.ops {
                prop_assert!(is_merged(slices), "{:?}", slices);
            }
            let ranks = match local_is_source {
                true => senders(&case.source.geometry, &case.sink.geometry),
                false => receivers(&case.source.geometry, &case.sink.geometry),
            };
            prop_assert_eq!(planned.local, ranks);
        }
    }
}
