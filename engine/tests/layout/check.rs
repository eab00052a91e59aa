//! What `check` refuses, and that it survives what a peer may send.

use crate::case::{Case, CaseDraw, CaseSide, plain};
use kvferry_engine::core::layout::*;
use proptest::prelude::*;

/// A change to an engine, and what the refusal has to say.
type ExpectedRefusal = (fn(&mut CaseSide), &'static str);

/// The refusal of a source after `change`, or of a changed receiver.
fn refusal(change: fn(&mut CaseSide), receiver_too: bool) -> String {
    let mut changed = plain(4, false, 2);
    let other = plain(4, false, 2);
    change(&mut changed);
    let (source, receiver) = if receiver_too { (&other, &changed) } else { (&changed, &other) };
    check(source.view(), receiver.view()).expect_err("has to be refused").to_string()
}

fn all_layers(side: &mut CaseSide, change: fn(&mut LayerLayout)) {
    side.ranks.iter_mut().flat_map(|rank| &mut rank.layers).for_each(change);
}

const ONE_SIDED: &[ExpectedRefusal] = &[
    (|s| s.geometry.tp = 0, "source tensor parallel size: 0, not 1..=64"),
    (|s| s.geometry.tp = 65, "source tensor parallel size: 65, not 1..=64"),
    (|s| s.geometry.tp = 3, "source KV heads: 4 do not divide over 3 ranks"),
    (|s| s.geometry.kv_heads = 0, "source KV heads: 0 do not divide over 2 ranks"),
    (|s| s.geometry.latent = true, "source KV heads: 4 of a latent model, not 1"),
    (|s| s.geometry.layers = 0, "source layers: 0, not 1..=512"),
    (|s| s.geometry.layers = 513, "source layers: 513, not 1..=512"),
    (|s| s.geometry.model = "m".repeat(257).into(), "source model: 257 bytes, at most 256"),
    (|s| s.geometry.layers = 4, "source layer 3: in no group"),
    (|s| s.geometry.layers = 2, "source group 0: layer 2 of a model with 2"),
    (|s| s.geometry.groups[0].layers = vec![0, 2, 1], "source group 0: layer 1 after 2"),
    (|s| s.geometry.groups[0].layers.clear(), "source group 0: 0 layers"),
    (|s| s.geometry.groups[0].block_tokens = 0, "source group 0: 0 tokens per block"),
    (
        |s| s.geometry.groups[0].kind = GroupKind::Window { tokens: 0 },
        "source group 0: window of 0 tokens",
    ),
    (|s| s.geometry.groups.push(s.geometry.groups[0].clone()), "source layer 0: in two groups"),
    (
        |s| s.geometry.groups = vec![s.geometry.groups[0].clone(); 65],
        "source groups: 65, at most 64",
    ),
    (|s| s.ranks.truncate(1), "source ranks: 1 layouts for 2 ranks"),
    (|s| s.ranks.clear(), "source ranks: 0 layouts for 2 ranks"),
    (|s| s.ranks[1].rank = 0, "source rank 0: two layouts"),
    (|s| s.ranks[1].rank = 9, "source rank 9: of 2"),
    (|s| s.ranks[1].layers.truncate(2), "source rank 1: 2 layer layouts for 3"),
    (|s| s.ranks[1].regions[0].1 = 0, "source rank 1 region 0: 0 bytes"),
    (|s| s.ranks[1].regions.clear(), "source rank 1 layer 0: in region 0 of 0"),
    (|s| s.ranks[1].layers[2].region = 1, "source rank 1 layer 2: in region 1 of 1"),
    (|s| s.ranks[1].regions[0].1 -= 1, "source rank 1 layer 2: ends at 24576 of 24575 bytes"),
    (
        |s| s.ranks[1].layers[2].base = u64::MAX,
        "source rank 1 layer 2: ends beyond 2^64 of 24576 bytes",
    ),
    (
        |s| s.ranks[1].layers[1].stride[0] = u64::MAX,
        "source rank 1 layer 1: ends beyond 2^64 of 24576 bytes",
    ),
    (
        |s| s.ranks[1].layers[1].shape[1] = 0,
        "source rank 1 layer 1: shape [64, 0, 4, 8] of 2 byte elements",
    ),
    (
        |s| s.ranks[1].layers[1].element = 0,
        "source rank 1 layer 1: shape [64, 2, 4, 8] of 0 byte elements",
    ),
    (|s| s.ranks[1].layers[1].stride[3] = 2, "source rank 1 layer 1: last stride is 2, not 1"),
    (
        |s| s.ranks[1].layers[0].stride[0] = 63,
        "source rank 1 layer 0: strides [63, 32, 8, 1] let parts of shape [64, 2, 4, 8] overlap",
    ),
    (|s| s.ranks[1].layers[1].base -= 2, "source rank 1: layers 0 and 1 overlap"),
    (
        |s| s.ranks[1].layers[1].slots = HeadSlots::Split,
        "source rank 1 layer 1: ([64, 2, 4, 8], 2, Split), but ([64, 2, 4, 8], 2, Fused) on rank 0",
    ),
    (
        |s| all_layers(s, |layer| layer.slots = HeadSlots::Split),
        "source layer 0: 2 head slots, not 4 for 2 heads (Split)",
    ),
    (|s| s.geometry.kv_heads = 2, "KV heads: source has 2, receiver has 4"),
    (
        |s| all_layers(s, |layer| layer.shape[2] = 3),
        "source layer 0: 3 tokens per block, its group has 4",
    ),
    (
        |s| s.ranks.iter_mut().for_each(|rank| rank.layers[1].shape[0] = 63),
        "source blocks: 64 in layer 0, 63 in layer 1 of the same group",
    ),
];

const TWO_SIDED: &[ExpectedRefusal] = &[
    (|s| s.geometry.model = "other".into(), "model: source has \"other\", receiver has \"model\""),
    (
        |s| {
            s.geometry.layers = 2;
            s.geometry.groups[0].layers.pop();
        },
        "layers: source has 2, receiver has 3",
    ),
    (
        |s| {
            s.geometry.latent = true;
            s.geometry.kv_heads = 1;
        },
        "latent attention: source has true, receiver has false",
    ),
    (|s| s.geometry.packed = true, "packed blocks: source has true, receiver has false"),
    (
        |s| s.geometry.groups[0].kind = GroupKind::Window { tokens: 9 },
        "kind of group 0: source has Window { tokens: 9 }, receiver has Full",
    ),
    (
        |s| {
            let layers = vec![s.geometry.groups[0].layers.pop().unwrap()];
            s.geometry.groups.push(KvGroup { layers, ..s.geometry.groups[0].clone() });
        },
        "number of groups: source has 2, receiver has 1",
    ),
    (
        |s| s.geometry.groups[0].block_tokens = 6,
        "block size of group 0: source has 6 tokens, receiver has 4, and neither divides the other",
    ),
    (
        |s| all_layers(s, |layer| layer.element = 1),
        "element size of layer 0: source has 1, receiver has 2",
    ),
    (
        |s| all_layers(s, |layer| layer.shape[3] = 7),
        "elements per token and head of layer 0: source has 7, receiver has 8",
    ),
];

#[test]
fn packed_blocks_have_one_size() {
    let [mut one, mut other] = [1, 1].map(|tp| plain(4, false, tp));
    (one.geometry.packed, other.geometry.packed) = (true, true);
    assert_eq!(check(one.view(), other.view()), Ok(()));
    other.geometry.groups[0].block_tokens *= 2;
    let text = check(one.view(), other.view()).expect_err("blocks of two sizes").to_string();
    let expected = "block size of group 0, with packed blocks: source has 4, receiver has 8";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn check_names_the_property_that_does_not_fit_and_both_values() {
    for (change, expected) in ONE_SIDED.iter().chain(TWO_SIDED) {
        let text = refusal(*change, false);
        assert!(text.starts_with(expected), "{text:?} instead of {expected:?}");
    }
    for (change, expected) in ONE_SIDED.iter().filter(|(_, text)| text.starts_with("source ")) {
        let text = refusal(*change, true);
        let expected = expected.replacen("source", "receiver", 1);
        assert!(text.starts_with(&expected), "{text:?} instead of {expected:?}");
    }
}

/// A plain engine whose layer 1 is in a group of its own kind.
fn two_groups(tp: u16, kind: GroupKind) -> CaseSide {
    let mut side = plain(4, false, tp);
    side.geometry.groups[0].layers = vec![0, 2];
    side.geometry.groups.push(KvGroup { kind, block_tokens: 4, layers: vec![1] });
    side
}

#[test]
fn check_compares_groups_and_keeps_states_on_their_rank() {
    let state = |tp| two_groups(tp, GroupKind::State);
    let refused = |source: &CaseSide, receiver: &CaseSide| {
        check(source.view(), receiver.view()).expect_err("has to be refused").to_string()
    };
    assert_eq!(check(state(2).view(), state(2).view()), Ok(()));
    assert_eq!(
        refused(&state(2), &state(4)),
        "tensor parallel size, with states in group 1: source has 2, receiver has 4"
    );
    let mut other = state(2);
    all_layers(&mut other, |layer| layer.slots = HeadSlots::Split);
    assert_eq!(
        refused(&state(2), &other),
        "receiver layer 0: 2 head slots, not 4 for 2 heads (Split)"
    );
    let mut other = state(2);
    other.ranks.iter_mut().for_each(|rank| rank.layers[1].slots = HeadSlots::Split);
    assert_eq!(
        refused(&state(2), &other),
        "receiver layer 1: a latent or a state has no K and V to split"
    );
    let mut other = state(2);
    other.ranks.iter_mut().for_each(|rank| rank.layers[1].shape[2] = 3);
    assert_eq!(
        refused(&state(2), &other),
        "state shape of layer 1: source has [2, 4], receiver has [2, 3]"
    );
    let (one, mut other) = (two_groups(2, GroupKind::Full), two_groups(2, GroupKind::Full));
    other.geometry.groups[0].layers = vec![0, 1];
    other.geometry.groups[1].layers = vec![2];
    assert_eq!(refused(&one, &other), "layers in group 0: source has 2, receiver has 1");
}

#[test]
fn fingerprint_is_the_same_everywhere_and_covers_every_field() {
    let side = two_groups(2, GroupKind::Window { tokens: 9 });
    let geometry = side.geometry;
    assert_eq!(geometry.fingerprint(), GOLDEN);
    let changes: &[fn(&mut Geometry)] = &[
        |g| g.model = "other".into(),
        |g| g.tp = 4,
        |g| g.kv_heads = 8,
        |g| g.latent = true,
        |g| g.layers = 4,
        |g| g.groups.truncate(1),
        |g| g.groups[0].block_tokens = 8,
        |g| g.groups[0].layers = vec![0, 1],
        |g| g.groups[0].kind = GroupKind::State,
        |g| g.groups[1].kind = GroupKind::Full,
        |g| g.groups[1].kind = GroupKind::Window { tokens: 8 },
        |g| g.groups.swap(0, 1),
    ];
    let mut seen = vec![geometry.fingerprint()];
    for change in changes {
        let mut changed = geometry.clone();
        change(&mut changed);
        assert!(!seen.contains(&changed.fingerprint()), "{changed:?}");
        seen.push(changed.fingerprint());
    }
}

/// FNV-1a of the fields above, computed apart from this code.
const GOLDEN: u64 = 0x0cc1_4116_08f7_b182;

#[test]
fn chunks_align_to_the_larger_block() {
    let mut one = two_groups(2, GroupKind::Window { tokens: 9 }).geometry;
    let mut other = one.clone();
    other.groups[0].block_tokens = 32;
    assert_eq!((one.alignment(&other, 0), other.alignment(&one, 0)), (32, 32));
    assert_eq!((one.group_of(1), one.group_of(2), one.group_of(3)), (Some(1), Some(0), None));
    one.groups[1].kind = GroupKind::State;
    assert_eq!(one.alignment(&other, 1), 1);
}

#[test]
fn windows_need_blocks_that_the_source_keeps_whole() {
    let sized = |tokens| {
        let mut side = two_groups(2, GroupKind::Window { tokens: 9 });
        side.geometry.groups[1].block_tokens = tokens;
        side.ranks.iter_mut().for_each(|rank| rank.layers[1].shape[2] = tokens);
        side
    };
    let (small, large) = (sized(8), sized(16));
    let refused = check(small.view(), large.view()).unwrap_err().to_string();
    assert!(
        refused.starts_with("block size of group 1: the source frees blocks of 8 tokens"),
        "{refused}"
    );
    let shapes = check(large.view(), small.view());
    assert!(!matches!(&shapes, Err(why) if why.to_string().contains("block size")), "{shapes:?}");
}

#[test]
fn the_window_of_a_hand_over_is_that_of_the_last_token() {
    let window = GroupKind::Window { tokens: 9 };
    // Token 99 reads 91..100; the block of 4 tokens that begins with 88 is moved as a whole.
    assert_eq!((window.read_from(99), window.read_from(100)), (91, 92));
    assert_eq!([1, 4].map(|unit| window.handed_over_from(0, 100, unit)), [91, 88]);
    assert_eq!([95, 40].map(|from| window.handed_over_from(from, 100, 4)), [95, 88]);
    assert_eq!([0, 1, 9].map(|tokens| window.handed_over_from(0, tokens, 4)), [0; 3]);
    for kind in [GroupKind::Full, GroupKind::State] {
        assert_eq!((kind.read_from(99), kind.handed_over_from(5, 100, 4)), (0, 5));
    }
}

/// Numbers at which arithmetic breaks, and near ones.
fn number(draw: &mut CaseDraw<'_>, now: u64) -> u64 {
    match draw.below(12) {
        0 => 0,
        1 => 1,
        2 => now.wrapping_add(1),
        3 => now.wrapping_sub(1),
        4 => now.wrapping_mul(2),
        5 => u64::MAX,
        6 => u64::from(u32::MAX),
        7 => u64::from(u16::MAX),
        8 => 1 << 63,
        9 => 1 << draw.below(64),
        _ => u64::from(draw.below(70)),
    }
}

/// Changes one field to something that a peer might send.
fn damage(draw: &mut CaseDraw<'_>, side: &mut CaseSide) {
    let rank = draw.below(side.ranks.len().max(1) as u32) as usize;
    let layer = draw.below(side.geometry.layers.clamp(1, 4).into()) as usize;
    let group = draw.below(side.geometry.groups.len().max(1) as u32) as usize;
    let geometry = &mut side.geometry;
    let which = draw
        .one_of(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 9, 12, 13, 14, 12, 13, 14]);
    match which {
        0 => geometry.tp = number(draw, geometry.tp.into()) as u16,
        1 => geometry.kv_heads = number(draw, geometry.kv_heads.into()) as u16,
        2 => geometry.latent = !geometry.latent,
        3 => geometry.layers = number(draw, geometry.layers.into()) as u16,
        _ => {}
    }
    if let Some(group) = geometry.groups.get_mut(group) {
        match which {
            4 => group.block_tokens = number(draw, group.block_tokens.into()) as u32,
            5 => group.kind = GroupKind::Window { tokens: number(draw, 9) as u32 },
            6 => group.layers.push(number(draw, 3) as u16),
            7 => drop(group.layers.pop()),
            _ => {}
        }
    }
    let Some(at) = side.ranks.get_mut(rank) else { return };
    match which {
        8 => at.rank = number(draw, at.rank.into()) as u16,
        9 => at.regions.iter_mut().for_each(|(_, bytes)| *bytes = number(draw, *bytes)),
        10 => at.layers.truncate(layer),
        _ => {}
    }
    let axis = draw.below(4) as usize;
    if let Some(layer) = at.layers.get_mut(layer) {
        match which {
            11 => layer.region = number(draw, layer.region.into()) as u16,
            12 => layer.base = number(draw, layer.base),
            13 => layer.shape[axis] = number(draw, layer.shape[axis].into()) as u32,
            14 => layer.stride[axis] = number(draw, layer.stride[axis]),
            15 => layer.element = number(draw, layer.element.into()) as u32,
            _ => {}
        }
    }
}

/// Plans the first and the last blocks of every pool, and looks at the ranges.
fn plan_at_the_edges(source: &CaseSide, receiver: &CaseSide) -> Result<(), TestCaseError> {
    for rank in 0..source.geometry.tp {
        let own = source.ranks.iter().find(|at| at.rank == rank).unwrap();
        for route in routes(true, source.rank(rank), receiver.view()).unwrap() {
            let peer = receiver.ranks.iter().find(|at| at.rank == route.remote_rank).unwrap();
            for layer in 0..source.geometry.layers {
                let group = source.geometry.group_of(layer).unwrap();
                let state = source.geometry.groups[group].kind == GroupKind::State;
                let list = |at: &RankLayout| {
                    let last = at.layers[usize::from(layer)].shape[0] - 1;
                    BlockList::new(if state { vec![last] } else { vec![last, 0] })
                };
                let (local, remote) = (list(own), list(peer));
                let tokens = |side: &CaseSide| side.geometry.groups[group].block_tokens;
                let to = tokens(source).min(tokens(receiver)).saturating_mul(2).max(1);
                let span = TokenSpan { group, from: 0, to, local: &local, remote: &remote };
                let mut out = Slices::default();
                prop_assert_eq!(route.plan(&[layer], &span, &mut out), Ok(()));
                let regions = route.regions(layer);
                for (offsets, at, region) in
                    [(&out.local, own, regions.0), (&out.remote, peer, regions.1)]
                {
                    let bytes = at.regions[usize::from(region)].1;
                    for (offset, len) in offsets.iter().zip(&out.len) {
                        prop_assert!(offset.checked_add(*len).is_some_and(|end| end <= bytes));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn strides_of_axes_with_one_entry_are_of_no_meaning() {
    for axis in 0..3 {
        let mut side = plain(1, false, 1);
        if axis == 2 {
            side.geometry.groups[0].block_tokens = 1;
        }
        all_layers(&mut side, |layer| layer.shape[0] = 1);
        for layer in &mut side.ranks[0].layers {
            layer.shape[axis] = 1;
            layer.stride[axis] = u64::MAX;
        }
        plan_at_the_edges(&side, &side).unwrap();
    }
}

/// A rank knows no other ranks of its engine, so it may find routes where `check` refuses.
fn routes_survive(source: &CaseSide, receiver: &CaseSide) {
    for rank in &source.ranks {
        let _ = routes(true, (&source.geometry, rank), receiver.view());
    }
    for rank in &receiver.ranks {
        let _ = routes(false, (&receiver.geometry, rank), source.view());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8000, ..ProptestConfig::default() })]

    #[test]
    fn check_survives_any_peer_and_what_it_accepts_can_be_planned(
        values in prop::collection::vec(any::<u16>(), 250),
        changes in prop::collection::vec(any::<u16>(), 40),
        count in 0usize..4,
    ) {
        let Case { mut source, mut receiver, .. } = Case::new(&mut CaseDraw::new(&values));
        let mut draw = CaseDraw::new(&changes);
        for _ in 0..count {
            let side = if draw.chance() { &mut source } else { &mut receiver };
            damage(&mut draw, side);
        }
        let verdict = check(source.view(), receiver.view());
        prop_assert!(count > 0 || verdict.is_ok(), "{:?}", verdict);
        let _ = (senders(&source.geometry, &receiver.geometry), source.geometry.fingerprint());
        let _ = receivers(&source.geometry, &receiver.geometry);
        match verdict {
            Ok(()) => plan_at_the_edges(&source, &receiver)?,
            Err(_) => routes_survive(&source, &receiver),
        }
    }

    #[test]
    fn check_finds_every_shared_byte(
        shape in prop::array::uniform4(1u32..4),
        order in Just([0usize, 1, 2]).prop_shuffle(),
        gaps in prop::array::uniform3(-1i64..3),
        distance in 0u64..200,
    ) {
        let mut stride = [0, 0, 0, 1u64];
        let mut extent = i64::from(shape[3]);
        for axis in order {
            stride[axis] = (extent + gaps[axis]).max(0) as u64;
            extent += (i64::from(shape[axis]) - 1) * stride[axis] as i64;
        }
        let mut side = plain(1, false, 1);
        side.geometry.groups[0] = KvGroup { kind: GroupKind::State, block_tokens: 0, layers: vec![0, 1] };
        side.geometry.layers = 2;
        side.ranks[0].layers.truncate(2);
        for (index, layer) in side.ranks[0].layers.iter_mut().enumerate() {
            (layer.base, layer.shape, layer.stride) = (index as u64 * distance, shape, stride);
        }
        let mut seen = std::collections::BTreeSet::new();
        let mut all = |layer: &LayerLayout| {
            let elements = (0..shape.iter().product::<u32>()).map(|at| {
                let [_, h, n, c] = shape;
                CaseSide::offset(layer, [at / c / n / h, at / c / n % h, at / c % n, at % c])
            });
            elements.flat_map(|at| [at, at + 1]).all(|byte| seen.insert(byte))
        };
        let apart = side.ranks[0].layers.iter().all(&mut all);
        let verdict = check(side.view(), side.view());
        let nested = gaps.iter().all(|gap| *gap >= 0);
        prop_assert!(verdict.is_err() || apart, "{:?}", side.ranks);
        prop_assert!(verdict.is_ok() || !(apart && nested), "{:?} {:?}", verdict, side.ranks);
    }
}
