//! The products: what is varied, and the damage of each case.

use super::engine::GroupCase;
use super::*;

const MODES: [Mode; 2] = [Mode::Push, Mode::Pull];

fn full(sizes: [u32; 2], layers: Range<u16>) -> GroupCase {
    GroupCase { kind: GroupKind::Full, sizes, layers: layers.collect() }
}

fn window(tokens: u32, sizes: [u32; 2], layers: Range<u16>) -> GroupCase {
    GroupCase { kind: GroupKind::Window { tokens }, ..full(sizes, layers) }
}

fn state(layers: Range<u16>) -> GroupCase {
    GroupCase { kind: GroupKind::State, ..full([0, 0], layers) }
}

fn model(heads: u16, groups: Vec<GroupCase>) -> ModelCase {
    ModelCase { heads, latent: false, packed: false, groups }
}

/// Damage to one byte of each row of each block of the decode, in what has arrived and in what the
/// prefill has digested. The byte and the head are drawn.
fn damages(world: &IntegrityWorld, prompt: &Prompt) -> Vec<(KvRow, Damage)> {
    let tables = [world.source(prompt), world.tables(prompt)];
    let [source, engine] = &world.engines;
    let mut damages = Vec::new();
    for layer in 0..engine.geometry.layers {
        let rows = engine.rows_of(layer);
        let end = match engine.group(layer).1.kind {
            GroupKind::State => rows,
            _ => prompt.tokens.next_multiple_of(rows),
        };
        for (token, rank) in
            (0..end).flat_map(|token| engine.ranks().map(move |rank| (token, rank)))
        {
            let draw = |salt| drawn([layer.into(), token, prompt.hit, rank.into(), salt]);
            let (byte, heads) = (u32::from(draw(3)) % ROW, engine.heads_of(layer, rank));
            let head = heads.start + u16::from(draw(4)) % heads.len() as u16;
            let row = KvRow { layer, head, token };
            let Some(at) = engine.at(&tables[1], row, rank, byte) else { continue };
            let places = vec![(engine.id(rank), at)];
            damages.push((row, Damage { moment: Moment::Arrived, places }));
            let places = source.places(&tables[0], row).into_iter();
            let places = places.map(|(rank, at)| (rank, at[byte as usize])).collect();
            damages.push((row, Damage { moment: Moment::Digested, places }));
        }
    }
    damages
}

/// Hands a prompt over as it is, and with each damage. Returns how often damage was found.
fn each_damage(world: &mut IntegrityWorld, prompt: &Prompt) -> usize {
    world.assert_arrives(prompt);
    let damages = damages(world, prompt);
    let damages = damages.into_iter();
    damages.filter(|(row, damage)| world.assert_found(prompt, *row, damage.clone())).count()
}

/// Everything but the prompts of some cases.
#[derive(Clone, Debug)]
struct Pairing {
    model: ModelCase,
    tp: [u16; 2],
    placements: [KvPlacement; 2],
}

impl Pairing {
    fn new(model: ModelCase) -> Pairing {
        Pairing { model, tp: [1, 1], placements: [KvPlacement::Apart; 2] }
    }

    /// Hands prompts over in both modes, each with every damage.
    fn check(&self, prompts: &[Prompt]) {
        for mode in MODES {
            let mut world = IntegrityWorld::new(mode, &self.model, self.tp, self.placements);
            let found: usize = prompts.iter().map(|prompt| each_damage(&mut world, prompt)).sum();
            assert!(found > 0, "{self:?}");
        }
    }
}

/// Prompts of these lengths behind hits that end at each of some tokens; every other one is late.
fn prompts(tokens: &[u32], hits: &[u32]) -> Vec<Prompt> {
    let mut prompts = Vec::new();
    for tokens in tokens {
        for hit in hits.iter().filter(|hit| *hit < tokens) {
            let is_late = prompts.len() % 2 == 1;
            prompts.push(Prompt { tokens: *tokens, cached: 0, hit: *hit, is_late });
        }
    }
    prompts
}

#[test]
fn damage_is_found_between_unequal_blocks() {
    for sizes in [[4, 4], [4, 16], [16, 4], [4, 12], [12, 4]] {
        let pairing = Pairing::new(model(2, vec![full(sizes, 0..2)]));
        pairing.check(&prompts(&[23, 24], &[0, 3, 4, 6, 12, 16, 17, 22]));
    }
}

#[test]
fn damage_is_found_in_all_that_a_window_leaves() {
    let windows = [3, 4, 8, 9];
    for (tokens, sizes) in
        windows.into_iter().flat_map(|w| [[4, 4], [8, 4], [12, 4]].map(|s| (w, s)))
    {
        let alone = model(1, vec![window(tokens, sizes, 0..2)]);
        let beside = model(1, vec![full([4, 8], 0..1), window(tokens, sizes, 1..2)]);
        for model in [alone, beside] {
            Pairing::new(model).check(&prompts(&[9, 16, 17, 30], &[0, 4, 7, 8, 16, 25]));
        }
    }
}

#[test]
fn damage_is_found_behind_prefix_hits_of_both_engines_with_windows() {
    for sizes in [[4, 4], [8, 4]] {
        let groups = vec![full(sizes, 0..1), window(7, sizes, 1..2), window(12, sizes, 2..3)];
        let hits = [[8, 0], [8, 8], [8, 16], [16, 4], [24, 0], [24, 20]];
        let prompt =
            |[cached, hit]: [u32; 2]| Prompt { tokens: 27, cached, hit, is_late: cached > 8 };
        Pairing::new(model(1, groups)).check(&hits.map(prompt));
    }
}

#[test]
fn damage_is_found_wherever_heads_and_layers_lie() {
    for (from, to) in
        KvPlacement::ALL.into_iter().flat_map(|from| KvPlacement::ALL.map(|to| (from, to)))
    {
        for sizes in [[4, 4], [4, 8], [8, 4]] {
            let model = model(2, vec![full(sizes, 0..3)]);
            Pairing { placements: [from, to], ..Pairing::new(model) }
                .check(&prompts(&[11], &[0, 5]));
        }
    }
}

#[test]
fn damage_is_found_between_unequal_ranks() {
    let sizes =
        [(4, [1, 2]), (4, [4, 2]), (2, [1, 4]), (2, [4, 2]), (2, [2, 4]), (1, [2, 4]), (1, [4, 1])];
    for (at, (heads, tp)) in sizes.into_iter().enumerate() {
        for (latent, blocks) in [(false, [4, 8]), (false, [8, 4]), (true, [4, 8])] {
            if latent && heads > 1 {
                continue;
            }
            let model = ModelCase {
                latent,
                ..model(heads, vec![full(blocks, 0..1), window(6, [8, 4], 1..2)])
            };
            let placement = |at: usize| KvPlacement::ALL[at % KvPlacement::ALL.len()];
            let pairing = Pairing { model, tp, placements: [placement(at), placement(2 * at + 1)] };
            pairing.check(&prompts(&[11], &[0, 4, 9]));
        }
    }
}

#[test]
fn damage_is_found_in_states_and_packed_blocks() {
    for (heads, tp) in [(2, [1, 1]), (2, [2, 2]), (1, [2, 2])] {
        let groups = vec![full([4, 8], 0..1), state(1..3)];
        Pairing { tp, ..Pairing::new(model(heads, groups)) }.check(&prompts(&[11], &[0, 4, 9]));
    }
    for tp in [[1, 1], [2, 1], [1, 2]] {
        for placements in [[KvPlacement::Apart; 2], [KvPlacement::Split, KvPlacement::HeadsApart]] {
            let groups = vec![full([4, 4], 0..1), window(5, [4, 4], 1..2)];
            let model = ModelCase { packed: true, ..model(2, groups) };
            Pairing { model, tp, placements }.check(&prompts(&[11, 12], &[0, 4, 6, 8]));
        }
    }
}

#[test]
fn damage_is_found_in_groups_with_blocks_of_different_sizes() {
    // Hits end where blocks of all groups do, as those of vLLM.
    for sizes in [[4, 4], [16, 8], [4, 8]] {
        let model = model(1, vec![full(sizes, 0..1), full([8, 8], 1..2), window(9, [16, 8], 2..3)]);
        Pairing::new(model).check(&prompts(&[23], &[0, 8, 16]));
    }
}

#[test]
fn hits_that_end_anywhere_raise_no_alarm() {
    let equal = vec![full([4, 8], 0..1), window(9, [8, 4], 1..2)];
    let unlike = vec![full([4, 4], 0..1), full([16, 8], 1..2)];
    for (groups, mode) in
        [equal, unlike].into_iter().flat_map(|groups| MODES.map(|mode| (groups.clone(), mode)))
    {
        let mut world =
            IntegrityWorld::new(mode, &model(1, groups), [1, 1], [KvPlacement::Apart; 2]);
        for prompt in prompts(&[23], &(0..23).collect::<Vec<_>>()) {
            world.assert_arrives(&prompt);
        }
    }
}
