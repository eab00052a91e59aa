//! An engine with a core that answers when told to, and a memory that shows who wrote what.

use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{LegId, RequestId};
use kvferry_engine::core::layout::{BlockList, GroupKind};
use kvferry_engine::core::machine::{Machine, Outbox};
use kvferry_engine::core::message::{
    Chunk, DecodeAnswer, DecodeHook, DecodeLeg, Mode, PrefillAnswer, PrefillHook, PrefillLeg, Role,
};
use kvferry_engine::core::router::{LegBody, LegEvent};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Endpoint;
use kvferry_scenarios::engine::*;
use std::collections::{BTreeMap, BTreeSet};

/// What the core has been told of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BenchEvent {
    Arrived,
    Scheduled,
    Preempted,
    Allocated,
    Finished,
}

/// The core's view of a request.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) told: BenchEvent,
    pub(crate) content: PromptContent,
    /// The core will say, or has said, `Rejected`, and listens no more.
    pub(crate) rejected: bool,
    /// Blocks that transfers may touch.
    pub(crate) blocks: Vec<BlockList>,
    /// Prefill: tokens in the blocks. Decode: tokens that are not to be loaded.
    pub(crate) computed: u32,
}

/// An answer that the core owes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BenchDeadline {
    Allocate,
    Reject,
    Safe,
    Free,
    Load,
}

pub(crate) struct EngineBench {
    pub(crate) engine: SimEngine,
    pub(crate) views: BTreeMap<RequestId, View>,
    pub(crate) due: Vec<(RequestId, BenchDeadline)>,
    pub(crate) step: Option<StepPlan>,
    pub(crate) open: BTreeSet<LegId>,
    /// The core says `Allocate` at once.
    pub(crate) eager: bool,
    /// All effects, oldest first.
    pub(crate) log: Vec<EngineEffect>,
    contents: BTreeMap<LegId, PromptContent>,
    /// Stamps by group, block and token within the block.
    memory: BTreeMap<(usize, u32, u32), u64>,
    used: BTreeSet<(usize, u32)>,
    writers: BTreeMap<(usize, u32), RequestId>,
    next_leg: u64,
    garbage: u64,
}

impl EngineBench {
    pub(crate) fn new(config: EngineConfig) -> EngineBench {
        EngineBench {
            engine: SimEngine::new(config).expect("a good configuration"),
            views: BTreeMap::new(),
            due: Vec::new(),
            step: None,
            open: BTreeSet::new(),
            eager: true,
            log: Vec::new(),
            contents: BTreeMap::new(),
            memory: BTreeMap::new(),
            used: BTreeSet::new(),
            writers: BTreeMap::new(),
            next_leg: 0,
            garbage: 1 << 60,
        }
    }

    pub(crate) fn leg(&mut self, prompt: PromptContent, output: u32, stop: bool) -> LegId {
        self.next_leg += 1;
        let leg = LegId(self.next_leg);
        let key =
            kvferry_engine::core::ids::TransferKey { id: format!("x{leg}").into(), prompt: 0 };
        let body = match self.engine.config().role {
            Role::Prefill => {
                LegBody::Prefill { transfer: PrefillLeg::new(key, Mode::Push), prompt: 0 }
            }
            Role::Decode => LegBody::Decode {
                transfer: DecodeLeg::new(key, Mode::Push, "p0".into(), Endpoint("p0:1".into())),
                prompt: 0,
                sample: 0,
                output,
                params: None,
            },
        };
        self.open.insert(leg);
        self.contents.insert(leg, prompt.clone());
        // Without a suffix an id is only unique while it is in use.
        let name = self.engine.config().id_seed.map_or(leg.0, |_| 0);
        let request = format!("r{name}").into();
        self.input(EngineInput::Leg { leg, request, prompt, body, stop });
        let allocate = self.due.iter().position(|(_, due)| *due == BenchDeadline::Allocate);
        if let Some(at) = allocate.filter(|_| self.eager) {
            self.answer(at, true);
        }
        leg
    }

    pub(crate) fn cancel(&mut self, leg: LegId) {
        self.open.remove(&leg);
        self.input(EngineInput::CancelLeg { leg });
    }

    pub(crate) fn step_done(&mut self) {
        if let Some(plan) = self.step.take() {
            self.input(EngineInput::StepDone { step: plan.step });
        }
    }

    /// Gives the answer that is due, with or without success.
    pub(crate) fn answer(&mut self, at: usize, well: bool) {
        // Blocks of a preempted request are safe before those of its end are free.
        let safe = (self.due[at].0.clone(), BenchDeadline::Safe);
        let at = self.due.iter().position(|due| *due == safe).unwrap_or(at);
        let (request, due) = self.due.remove(at);
        let view = self.views[&request].clone();
        let failure = Failure::Stalled;
        if due == BenchDeadline::Reject {
            self.due.retain(|due| *due != (request.clone(), BenchDeadline::Allocate));
        }
        match due {
            BenchDeadline::Allocate => {
                self.input(EngineInput::Decode(DecodeAnswer::Allocate { request }));
            }
            BenchDeadline::Reject if self.engine.config().role == Role::Prefill => {
                self.input(EngineInput::Prefill(PrefillAnswer::Rejected { request, failure }));
            }
            BenchDeadline::Reject => {
                self.input(EngineInput::Decode(DecodeAnswer::Rejected { request, failure }));
            }
            BenchDeadline::Safe => {
                self.check(&view.content, &view.blocks, (view.computed, view.computed));
                self.input(EngineInput::Prefill(PrefillAnswer::PreemptionSafe { request }));
            }
            BenchDeadline::Free => {
                // A decode computes the last token again.
                let next = view.computed.saturating_sub(1);
                self.check(&view.content, &view.blocks, (view.computed, next));
                let failure = (!well).then_some(failure);
                self.input(EngineInput::Prefill(PrefillAnswer::SourceFree { request, failure }));
            }
            BenchDeadline::Load => {
                self.land(&view, well);
                let answer = match well {
                    true => DecodeAnswer::Loaded { request },
                    false => DecodeAnswer::LoadFailed { request, failure },
                };
                self.input(EngineInput::Decode(answer));
            }
        }
    }

    /// The bytes of a transfer land: the right ones, or others.
    fn land(&mut self, view: &View, well: bool) {
        self.garbage += 1;
        for (group, list) in view.blocks.iter().enumerate() {
            let tokens = self.block_tokens(group);
            for (at, block) in list.ids.iter().enumerate() {
                for offset in 0..tokens {
                    let token = (list.first + at as u32) * tokens + offset;
                    if self.is_state(group) {
                        let last = view.content.stamp(view.content.tokens - 1);
                        self.memory.insert((group, *block, 0), if well { last } else { 1 });
                    } else if token >= view.computed {
                        let stamp = if well { view.content.stamp(token) } else { self.garbage };
                        self.memory.insert((group, *block, offset), stamp);
                    }
                }
            }
        }
    }

    pub(crate) fn input(&mut self, input: EngineInput) {
        let mut out = Outbox::new();
        self.engine.handle(Nanos::ZERO, input, &mut out);
        let effects: Vec<_> = out.drain().collect();
        for effect in effects {
            self.log.push(effect.clone());
            self.effect(effect);
        }
        for group in 0..self.engine.config().groups.len() {
            let pool = self.engine.pool(group);
            let sum = pool.free + pool.cached + pool.held + pool.quarantined;
            assert_eq!(sum, pool.total, "{pool:?}");
            let used = self.used.iter().filter(|(at, _)| *at == group).count();
            assert_eq!((pool.held + pool.quarantined) as usize, used, "{pool:?}");
        }
    }

    fn effect(&mut self, effect: EngineEffect) {
        match effect {
            EngineEffect::Prefill(hook) => self.prefill_hook(hook),
            EngineEffect::Decode(hook) => self.decode_hook(hook),
            EngineEffect::Step(plan) => self.start(plan),
            EngineEffect::Leg { leg, event } => {
                assert!(self.open.contains(&leg), "{event:?} after the end of leg {leg}");
                if event != LegEvent::FirstToken {
                    self.open.remove(&leg);
                }
            }
            EngineEffect::Taken { request, blocks } => {
                for (group, ids) in blocks.into_iter().enumerate() {
                    ids.into_iter().for_each(|block| self.take(group, block, &request));
                }
            }
            EngineEffect::Freed { blocks, .. } => {
                for (group, ids) in blocks.into_iter().enumerate() {
                    for block in ids {
                        assert!(self.used.remove(&(group, block)), "{block} freed twice");
                        self.writers.remove(&(group, block));
                    }
                }
            }
            EngineEffect::Use { content, tokens, next, blocks, .. } => {
                self.share(&blocks);
                self.check(&content, &blocks, (tokens, next));
            }
            EngineEffect::Fault(why) => panic!("{why}"),
        }
    }

    fn take(&mut self, group: usize, block: u32, request: &RequestId) {
        assert_ne!(block, 0, "the null block was handed out");
        assert!(self.used.insert((group, block)), "block {block} was handed out while in use");
        self.writers.insert((group, block), request.clone());
        self.garbage += 1;
        for offset in 0..self.block_tokens(group) {
            self.memory.insert((group, block, offset), self.garbage);
        }
    }

    fn share(&mut self, blocks: &[BlockList]) {
        for (group, list) in blocks.iter().enumerate() {
            self.used.extend(list.ids.iter().map(|block| (group, *block)));
        }
    }

    /// Runs a step: writes what it computes.
    fn start(&mut self, plan: StepPlan) {
        assert!(self.step.is_none(), "two steps at a time");
        let config = self.engine.config().clone();
        let computed: u32 = plan.computes.iter().map(|compute| compute.to - compute.from).sum();
        assert!(computed + plan.decoding <= config.max_batched_tokens);
        assert!(plan.computes.len() as u32 + plan.decoding <= config.max_running);
        for compute in &plan.computes {
            self.compute(compute);
        }
        for growth in &plan.grown {
            self.take(usize::from(growth.group), growth.block, &growth.request);
        }
        self.step = Some(plan);
    }

    fn compute(&mut self, compute: &ComputeChunk) {
        for (group, list) in compute.blocks.iter().enumerate() {
            for block in &list.ids {
                assert_eq!(self.writers.get(&(group, *block)), Some(&compute.request));
            }
            if self.is_state(group) {
                let stamp = compute.content.stamp(compute.to - 1);
                self.memory.insert((group, list.ids[0], 0), stamp);
                continue;
            }
            let tokens = self.block_tokens(group);
            for token in compute.from..compute.to {
                let block = list.get(token / tokens).expect("a block for each token");
                let stamp = compute.content.stamp(token);
                self.memory.insert((group, block, token % tokens), stamp);
            }
        }
    }

    /// The blocks hold the KV of tokens `..tokens`, as far as windows need it to compute `next`.
    fn check(&self, content: &PromptContent, blocks: &[BlockList], (tokens, next): (u32, u32)) {
        for (group, list) in blocks.iter().enumerate() {
            let seen = match self.engine.config().groups[group].kind {
                GroupKind::Full => 0,
                GroupKind::Window { tokens: window } => (next + 1).saturating_sub(window),
                GroupKind::State if tokens == 0 => 0,
                GroupKind::State => {
                    let state = self.memory.get(&(group, list.ids[0], 0));
                    assert_eq!(state, Some(&content.stamp(tokens - 1)));
                    continue;
                }
            };
            let per_block = self.block_tokens(group);
            for token in seen..tokens {
                let block = list.get(token / per_block).expect("a block for each token");
                let found = self.memory.get(&(group, block, token % per_block));
                assert_eq!(found, Some(&content.stamp(token)), "group {group} token {token}");
            }
        }
    }

    fn prefill_hook(&mut self, hook: PrefillHook) {
        match hook {
            PrefillHook::Arrived { request, leg, .. } => self.arrived(request, &leg.key.id.0),
            PrefillHook::Scheduled { chunks, .. } => {
                assert!(!chunks.is_empty());
                chunks.into_iter().for_each(|chunk| self.chunk(chunk));
            }
            PrefillHook::Preempted { request } => {
                let view = self.view(&request);
                assert_eq!(view.told, BenchEvent::Scheduled);
                view.told = BenchEvent::Preempted;
                if !view.rejected {
                    self.due.push((request, BenchDeadline::Safe));
                }
            }
            PrefillHook::Finished { request, .. } => {
                let view = self.view(&request);
                assert_ne!(view.told, BenchEvent::Finished);
                if view.told == BenchEvent::Preempted {
                    view.blocks.clear();
                }
                view.told = BenchEvent::Finished;
                if !view.rejected {
                    self.due.push((request, BenchDeadline::Free));
                }
            }
        }
    }

    fn chunk(&mut self, chunk: Chunk) {
        let groups = self.engine.config().groups.len();
        let view = self.view(&chunk.request);
        assert_ne!(view.told, BenchEvent::Finished);
        if view.told != BenchEvent::Scheduled {
            view.blocks = vec![BlockList::default(); groups];
            view.computed = chunk.from;
        }
        view.told = BenchEvent::Scheduled;
        assert_eq!(view.computed, chunk.from, "chunks follow each other");
        view.computed = chunk.to;
        for (have, new) in view.blocks.iter_mut().zip(chunk.blocks) {
            if have.ids.is_empty() {
                have.first = new.first;
            }
            assert_eq!(have.first + have.ids.len() as u32, new.first);
            have.ids.extend(new.ids);
        }
    }

    fn decode_hook(&mut self, hook: DecodeHook) {
        match hook {
            DecodeHook::Arrived { request, leg, .. } => {
                self.due.push((request.clone(), BenchDeadline::Allocate));
                self.arrived(request, &leg.key.id.0);
            }
            DecodeHook::Allocated { request, computed, blocks } => {
                self.share(&blocks);
                let view = self.view(&request);
                assert_eq!(view.told, BenchEvent::Arrived, "allocated once, after the arrival");
                view.told = BenchEvent::Allocated;
                let early = self.due.contains(&(request.clone(), BenchDeadline::Allocate));
                let view = self.view(&request);
                assert!(!early || computed == view.content.tokens, "allocated before it was told");
                view.computed = computed;
                view.blocks = blocks.clone();
                let (content, rejected) = (view.content.clone(), view.rejected);
                self.check(&content, &self.hits(&blocks, computed), (computed, computed));
                if !rejected {
                    self.due.push((request, BenchDeadline::Load));
                }
            }
            DecodeHook::Finished { request, .. } => {
                let view = self.view(&request);
                assert_ne!(view.told, BenchEvent::Finished);
                view.told = BenchEvent::Finished;
            }
        }
    }

    /// The part of full-attention groups that prefix hits fill.
    fn hits(&self, blocks: &[BlockList], computed: u32) -> Vec<BlockList> {
        let keep =
            |(group, list): (usize, &BlockList)| match self.engine.config().groups[group].kind {
                GroupKind::Full if computed > 0 => list.clone(),
                _ => BlockList::default(),
            };
        let full = |group: &GroupConfig| group.kind == GroupKind::Full;
        match self.engine.config().groups.iter().all(full) {
            true => blocks.iter().enumerate().map(keep).collect(),
            false => Vec::new(),
        }
    }

    fn arrived(&mut self, request: RequestId, transfer: &str) {
        let leg = LegId(transfer[1..].parse().expect("made by this bench"));
        let view = View {
            told: BenchEvent::Arrived,
            content: self.contents[&leg].clone(),
            rejected: false,
            blocks: Vec::new(),
            computed: 0,
        };
        assert!(self.views.insert(request, view).is_none(), "a request id occurred twice");
    }

    /// Lets the core reject the request that arrived last, before it hears anything else of it.
    pub(crate) fn reject_next(&mut self, leg: LegId) {
        let Some(request) = self.engine.request_of(leg).cloned() else { return };
        self.view(&request).rejected = true;
        self.due.retain(|(id, due)| *id != request || *due == BenchDeadline::Allocate);
        self.due.push((request, BenchDeadline::Reject));
    }

    fn view(&mut self, request: &RequestId) -> &mut View {
        self.views.get_mut(request).expect("the first hook is Arrived")
    }

    fn is_state(&self, group: usize) -> bool {
        self.engine.config().groups[group].kind == GroupKind::State
    }

    fn block_tokens(&self, group: usize) -> u32 {
        self.engine.config().groups[group].block_tokens.max(1)
    }

    /// Runs until nothing is left to do; every answer is a good one.
    pub(crate) fn settle(&mut self) {
        for _ in 0..20_000 {
            self.step_done();
            if !self.due.is_empty() {
                self.answer(0, true);
            } else if self.step.is_none() {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }
}
