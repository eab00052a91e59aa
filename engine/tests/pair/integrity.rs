//! Bytes that are verified, in every kind of KV cache: KV that arrives is right, and damage to a byte that the
//! decode needs is found, wherever it is; damage to other bytes changes no answer.

mod engine;
mod products;

use super::*;
use crate::windows::Table;
use crate::world::{Damage, Moment};
use engine::{KvEngine, KvPlacement, KvRow, ModelCase, ROW, drawn, value};
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::verify::{Verify, block_tokens};
use std::ops::Range;

/// A prompt between the two engines.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    tokens: u32,
    /// Tokens that the prefill has from the beginning.
    cached: u32,
    /// Tokens that the decode has from the beginning.
    hit: u32,
    /// True if the decode gets its blocks after the prompt is computed.
    is_late: bool,
}

/// Two engines with bytes, between which prompts move.
struct IntegrityWorld {
    mode: Mode,
    engines: [KvEngine; 2],
    pair: PairWorld,
    prompts: u64,
    steps: u64,
}

impl IntegrityWorld {
    fn new(
        mode: Mode,
        model: &ModelCase,
        tp: [u16; 2],
        placements: [KvPlacement; 2],
    ) -> IntegrityWorld {
        let roles = [Role::Prefill, Role::Decode];
        let engines = [0, 1].map(|at| KvEngine::new(roles[at], model, tp[at], placements[at]));
        let kv = engines.clone().map(|engine| (engine.geometry, engine.layers));
        let pair = PairWorld::with_kv(mode, kv, Verify::All);
        let mut world = IntegrityWorld { mode, engines, pair, prompts: 0, steps: 0 };
        world.engines.iter().for_each(|engine| engine.scrub(&mut world.pair.bytes));
        world
    }

    /// The prefill computes a prompt in two steps; what it frees meanwhile becomes noise.
    fn compute(&mut self, request: &RequestId, prompt: &Prompt) {
        let [engine, _] = &self.engines;
        let (mut tables, cached) = (engine.tables(), prompt.cached);
        let mid = cached + (prompt.tokens - cached).div_ceil(2);
        for (computed, to) in [(cached, mid), (mid, prompt.tokens)] {
            if computed == to {
                continue;
            }
            let is_first = computed == cached;
            let grow = |table: &mut Table| {
                if is_first {
                    table.hit(computed);
                }
                table.free(computed);
                let added = table.grow(to);
                Table::listed(if is_first { (0, table.ids.clone()) } else { added })
            };
            let blocks = tables.iter_mut().map(grow).collect();
            self.steps += 1;
            let (step, from) = (StepId(self.steps), if is_first { 0 } else { computed });
            let chunks = vec![Chunk { request: request.clone(), from, to, blocks }];
            self.pair.prefill(PrefillInput::Hook(PrefillHook::Scheduled { step, chunks }));
            engine.scrub(&mut self.pair.bytes);
            engine.compute(&mut self.pair.bytes, &tables, 0..to);
            self.pair.compute(step.0, engine.geometry.layers);
        }
        let (request, reason) = (request.clone(), FinishReason::Length);
        self.pair.prefill(PrefillInput::Hook(PrefillHook::Finished { request, reason }));
    }

    /// Hands a prompt over, with this damage to it.
    fn hand_over(&mut self, prompt: &Prompt, damage: Option<Damage>) -> DecodeAnswer {
        self.prompts += 1;
        let key = TransferKey { id: format!("t{}", self.prompts).into(), prompt: 0 };
        let [prefill, decode] =
            ["p", "d"].map(|side| RequestId::from(format!("{side}-{}", self.prompts)));
        self.engines.iter().for_each(|engine| engine.scrub(&mut self.pair.bytes));
        self.pair.bytes.damage = damage;
        let (tokens, mode) = (prompt.tokens, self.mode);
        let leg = DecodeLeg::new(key.clone(), mode, "prefill".into(), "prefill-control".into());
        let request = decode.clone();
        let hook = DecodeHook::Arrived { request, leg, tokens, prompt_hash: HASH };
        self.pair.decode(DecodeInput::Hook(hook));
        let (leg, request) = (PrefillLeg::new(key, mode), prefill.clone());
        let hook = PrefillHook::Arrived { request, leg, tokens, prompt_hash: HASH };
        self.pair.prefill(PrefillInput::Hook(hook));
        if prompt.is_late {
            self.compute(&prefill, prompt);
        }
        let blocks = KvEngine::listed(&self.tables(prompt));
        let hook = DecodeHook::Allocated { request: decode, computed: prompt.hit, blocks };
        self.pair.decode(DecodeInput::Hook(hook));
        if !prompt.is_late {
            self.pair.run(self.pair.now + Nanos::from_ms(5));
            self.compute(&prefill, prompt);
        }
        self.pair.run(self.pair.now + Nanos::from_ms(20));
        let said = std::mem::take(&mut self.pair.decode_said);
        let last: Vec<_> = said.into_iter().filter(DecodeAnswer::is_last).collect();
        let [answer] = &last[..] else { panic!("{prompt:?} has answers {last:?}") };
        assert!(self.pair.at_rest(), "{prompt:?}");
        (self.pair.prefill_said, self.pair.frames) = (Vec::new(), Vec::new());
        self.pair.moved.clear();
        answer.clone()
    }

    /// Blocks that the decode has for a prompt: those of its prefix hit have KV of its own.
    fn tables(&self, prompt: &Prompt) -> Vec<Table> {
        let mut tables = self.engines[1].tables();
        for table in &mut tables {
            table.hit(prompt.hit);
            table.grow(prompt.tokens);
            table.free(prompt.tokens);
        }
        tables
    }

    /// Blocks that the prefill has when it has computed a prompt.
    fn source(&self, prompt: &Prompt) -> Vec<Table> {
        let mut tables = self.engines[0].tables();
        for table in &mut tables {
            table.hit(prompt.cached);
            table.grow(prompt.tokens);
            table.free(prompt.tokens);
        }
        tables
    }

    /// Tokens of the largest block that both engines have in common.
    fn common_block(&self) -> u32 {
        let [own, theirs] = &self.engines;
        block_tokens(&own.geometry, &theirs.geometry)
    }

    /// First token that the decode takes from the prefill: one that reads takes whole blocks.
    fn first(&self, prompt: &Prompt) -> u32 {
        let [own, theirs] = self.engines.each_ref().map(|engine| &engine.geometry.groups);
        let block = self.common_block();
        let sizes = own.iter().zip(theirs).filter(|(own, _)| own.kind != GroupKind::State);
        let mut sizes = sizes.map(|(own, theirs)| own.block_tokens.min(theirs.block_tokens));
        match self.mode == Mode::Pull && sizes.all(|size| size == block) {
            true => prompt.hit - prompt.hit % block,
            false => prompt.hit,
        }
    }

    /// True if the decode is to have a row from the prefill.
    fn is_needed(&self, prompt: &Prompt, row: KvRow) -> bool {
        let (_, group) = self.engines[1].group(row.layer);
        let (size, token) = (group.block_tokens, row.token);
        match (group.kind, self.engines[1].geometry.packed) {
            (GroupKind::State, _) => true,
            (_, false) => (self.first(prompt)..prompt.tokens).contains(&token),
            // Tokens lie anywhere in their block.
            (_, true) => {
                (prompt.hit / size..prompt.tokens.div_ceil(size)).contains(&(token / size))
            }
        }
    }

    /// Every row that the decode needs is in its blocks, of all ranks.
    fn assert_right(&self, prompt: &Prompt, what: &dyn Fn() -> String) {
        let (engine, tables) = (&self.engines[1], self.tables(prompt));
        for row in
            engine.all_rows(0..prompt.tokens).into_iter().filter(|row| self.is_needed(prompt, *row))
        {
            for (rank, places) in engine.places(&tables, row) {
                for (byte, at) in (0..).zip(places) {
                    let found = self.pair.bytes.memory[&rank][at];
                    assert_eq!(found, value(row, byte), "{row:?} on {rank:?}: {}", what());
                }
            }
        }
    }

    /// Hands a prompt over as it is: it arrives, and nothing else is written.
    fn assert_arrives(&mut self, prompt: &Prompt) {
        let (mode, answer) = (self.mode, self.hand_over(prompt, None));
        let what = || format!("{mode}, {prompt:?}");
        assert!(matches!(answer, DecodeAnswer::Loaded { .. }), "{}: {answer:?}", what());
        self.assert_right(prompt, &what);
        let (engine, first) = (&self.engines[1], self.first(prompt));
        let is_taken = |row: KvRow| {
            let (_, group) = engine.group(row.layer);
            let from = if engine.geometry.packed {
                first / group.block_tokens * group.block_tokens
            } else {
                first
            };
            group.kind == GroupKind::State || row.token >= from
        };
        engine.assert_nothing_else(&self.pair.bytes, &self.tables(prompt), is_taken);
    }

    /// Hands a prompt over with damage to a row: it is found and named if the decode needs the row,
    /// and changes nothing if not. True if it was found.
    fn assert_found(&mut self, prompt: &Prompt, row: KvRow, damage: Damage) -> bool {
        let (mode, is_needed) = (self.mode, self.is_needed(prompt, row));
        let place = damage.clone();
        let what = || format!("{mode}, {prompt:?}: damage to {row:?}, {place:?}");
        let answer = self.hand_over(prompt, Some(damage));
        let DecodeAnswer::LoadFailed { failure: Failure::Corrupt(why), .. } = &answer else {
            assert!(!is_needed, "{}: {answer:?}", what());
            assert!(matches!(answer, DecodeAnswer::Loaded { .. }), "{}: {answer:?}", what());
            self.assert_right(prompt, &what);
            return false;
        };
        assert!(is_needed, "{}: {why}", what());
        let is_state = self.engines[1].group(row.layer).1.kind == GroupKind::State;
        let token = if is_state { prompt.tokens - 1 } else { row.token };
        let block = token / self.common_block();
        assert!(why.starts_with(&format!("block {block}")), "{}: {why}", what());
        let is_layer_known = mode == Mode::Push || self.first(prompt) == 0;
        let layer = format!(" in layer {},", row.layer);
        assert!(!is_layer_known || why.contains(&layer), "{}: {why}", what());
        true
    }
}
