//! The serving engines: what they compute, and what they and their cores tell each other.

use super::content::each_piece;
use super::event::{SimEnvelope, SimEvent};
use super::process::ForwardPass;
use super::{LOCAL, MachineInput, ReadyStep, Simulation};
use crate::memory::{BlockTokens, ContentMismatch, MemoryFidelity, MismatchKind};
use crate::observation::{Observation, SimRankId};
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::ids::RequestId;
use kvferry_engine::core::layout::{BlockList, GroupKind, KvGroup};
use kvferry_engine::core::machine::Machine;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::transfer::TransferInput;
use kvferry_scenarios::decide::{kind, mix};
use kvferry_scenarios::engine::{EngineEffect, EngineInput, PromptContent, StepPlan};
use kvferry_scenarios::geometry::geometry;
use std::ops::Range;

/// Content of blocks whose owner has written nothing that matters.
const NOISE: u64 = kind("noise");

impl Simulation {
    /// Gives an engine an input and does what it wants.
    pub(super) fn engine_input(&mut self, instance: u16, input: EngineInput) {
        let (who, now) = (self.who(instance), self.now);
        let Some(process) = &mut self.instances[instance as usize].process else { return };
        let Some(engine) = &mut process.engine else { return };
        let leg = match &input {
            EngineInput::Leg { leg, .. } => Some(*leg),
            _ => None,
        };
        let mut out = std::mem::take(&mut process.out);
        engine.handle(now, input, &mut out);
        if let Some(leg) = leg
            && let Some(request) = engine.request_of(leg)
        {
            self.observer.observe(now, &Observation::LegTaken { who, leg, request });
        }
        for effect in out.drain() {
            self.engine_effect(instance, effect);
        }
        if let Some(process) = &mut self.instances[instance as usize].process {
            process.out = out;
        }
        if self.instances[instance as usize].switch.is_some() {
            self.look_at_switch(instance);
        }
    }

    fn engine_effect(&mut self, instance: u16, effect: EngineEffect) {
        let who = self.who(instance);
        let now = self.now;
        match effect {
            EngineEffect::Prefill(hook) => {
                self.observer.observe(now, &Observation::PrefillHook { who, hook: &hook });
                self.stats.prefill_hook(now, instance, &hook);
                self.hook(instance, PrefillInput::Hook(hook).into());
            }
            EngineEffect::Decode(hook) => {
                self.observer.observe(now, &Observation::DecodeHook { who, hook: &hook });
                self.stats.decode_hook(now, instance, &hook);
                self.hook(instance, DecodeInput::Hook(hook).into());
            }
            EngineEffect::Step(plan) => self.begin_step(instance, plan),
            EngineEffect::Leg { leg, event } => self.leg_event(instance, leg, event),
            EngineEffect::Taken { request, blocks } => {
                let seen = Observation::Taken { who, request: &request, blocks: &blocks };
                self.observer.observe(now, &seen);
                self.poison_blocks(instance, &blocks);
            }
            EngineEffect::Freed { request, blocks } => {
                let seen = Observation::Freed { who, request: &request, blocks: &blocks };
                self.observer.observe(now, &seen);
            }
            EngineEffect::Use { request, content, tokens, next, blocks } => {
                self.compare(instance, &request, &content, (tokens, next), &blocks);
            }
            EngineEffect::Fault(text) => {
                self.observer.observe(now, &Observation::EngineFault { who, text: &text });
            }
        }
    }

    pub(super) fn hook(&mut self, instance: u16, input: MachineInput) {
        let (slot, incarnation) =
            (self.core_slot(instance), self.instances[instance as usize].incarnation);
        self.post(LOCAL, SimEnvelope::Machine { slot, incarnation, input, cause: 0 });
    }

    fn begin_step(&mut self, instance: u16, plan: StepPlan) {
        self.observer.step_started(self.now, instance);
        for growth in &plan.grown {
            let mut blocks = vec![Vec::new(); usize::from(growth.group)];
            blocks.push(vec![growth.block]);
            let (who, request) = (self.who(instance), &growth.request);
            let seen = Observation::Taken { who, request, blocks: &blocks };
            self.observer.observe(self.now, &seen);
            self.poison_blocks(instance, &blocks);
        }
        let (started, layers, next) = (self.now, 0, 0);
        let Some(process) = &mut self.instances[instance as usize].process else { return };
        process.step = Some(ForwardPass { plan, started, layers, next });
        self.plan_layers(instance);
    }

    /// Schedules the end of the next layers of a step.
    fn plan_layers(&mut self, instance: u16) {
        let all = self.run.model.layers;
        let spec = &self.instances[instance as usize].spec;
        let group = if self.pushes(instance) { spec.protocol.transfer.layers_per_op } else { all };
        let incarnation = self.instances[instance as usize].incarnation;
        let Some(process) = &mut self.instances[instance as usize].process else { return };
        let Some(step) = &mut process.step else { return };
        let group = if step.plan.computes.is_empty() { all } else { group };
        step.next = step.layers.saturating_add(group).min(all);
        let at = step.started + step.plan.layers_after(step.next, all);
        self.queue.push(at, SimEvent::Layers { instance, incarnation });
    }

    /// True if the transfer actors of an instance send what its engine computes.
    fn pushes(&self, instance: u16) -> bool {
        let spec = &self.instances[instance as usize].spec;
        spec.role == Role::Prefill && spec.mode == Mode::Push
    }

    /// Some more layers of a step are complete.
    pub(super) fn layers_computed(&mut self, instance: u16, incarnation: u32) {
        if !self.instances[instance as usize].is_current(incarnation) {
            return;
        }
        let pushes = self.pushes(instance);
        let tp = self.instances[instance as usize].spec.tp;
        let Some(process) = &mut self.instances[instance as usize].process else { return };
        let Some(mut step) = process.step.take() else { return };
        self.fill(instance, &step.plan, step.layers..step.next);
        step.layers = step.next;
        let number = step.plan.step;
        if pushes && !step.plan.computes.is_empty() {
            for rank in 0..tp {
                let input = TransferInput::Layers { step: number, layers: step.layers };
                self.tell_rank(instance, rank, incarnation, input.into(), 0);
            }
        }
        if step.layers < self.run.model.layers {
            if let Some(process) = &mut self.instances[instance as usize].process {
                process.step = Some(step);
            }
            return self.plan_layers(instance);
        }
        self.quiescence.progressed(self.now);
        self.engine_input(instance, EngineInput::StepDone { step: number });
        self.observer.observe(self.now, &Observation::Stepped { who: self.who(instance) });
        let groups = self.run.model.groups.len();
        self.stats.pools(groups, self.instances[instance as usize].process.as_ref());
    }

    /// Tokens that share a stamp; their last one names it.
    fn grain(&self) -> u32 {
        match self.run.memory {
            MemoryFidelity::Bytes => 1,
            MemoryFidelity::Cells => self.unit.tokens,
        }
    }

    /// Writes what a step computed in some layers.
    fn fill(&mut self, instance: u16, plan: &StepPlan, layers: Range<u16>) {
        if plan.computes.is_empty() {
            return;
        }
        let grain = self.grain();
        let Some(process) = &self.instances[instance as usize].process else { return };
        let geometry = geometry(&self.run.model, &self.instances[instance as usize].spec);
        for rank in &process.ranks {
            let Some(store) = self.dma.store_mut(rank.ix()) else { continue };
            for compute in &plan.computes {
                for ((index, group), blocks) in
                    geometry.groups.iter().enumerate().zip(&compute.blocks)
                {
                    let tokens = compute.from..compute.to;
                    let place = (index, group);
                    each_piece(&compute.content, tokens, place, blocks, grain, |at, stamp| {
                        store.fill(at, layers.clone(), stamp);
                    });
                }
            }
        }
    }

    /// Overwrites the ends of blocks that got a new owner, so that what was there before is not
    /// taken for what should have come.
    fn poison_blocks(&mut self, instance: u16, blocks: &[Vec<u32>]) {
        let spec = &self.instances[instance as usize].spec;
        if spec.role == Role::Prefill {
            return;
        }
        let size = spec.block_tokens;
        let layers = 0..self.run.model.layers;
        let Some(process) = &self.instances[instance as usize].process else { return };
        for rank in &process.ranks {
            let Some(store) = self.dma.store_mut(rank.ix()) else { continue };
            for (group, blocks) in blocks.iter().enumerate() {
                let state = self.run.model.groups[group].kind == GroupKind::State;
                let ends = if state { [0..1, 0..0] } else { [0..1, size - 1..size] };
                for block in blocks {
                    let (block, stamp) = (*block, mix(NOISE, u64::from(*block)));
                    for tokens in ends.iter().filter(|tokens| !tokens.is_empty()).cloned() {
                        let at = BlockTokens { group, block, first: 0, tokens };
                        store.fill(&at, layers.clone(), stamp);
                    }
                }
            }
        }
    }

    /// Compares the memory of all ranks with what a request is about to read of tokens `..tokens` to
    /// compute `next`.
    fn compare(
        &mut self,
        instance: u16,
        request: &RequestId,
        content: &PromptContent,
        (tokens, next): (u32, u32),
        blocks: &[BlockList],
    ) {
        let (grain, who, now) = (self.grain(), self.who(instance), self.now);
        let geometry = geometry(&self.run.model, &self.instances[instance as usize].spec);
        let Some(process) = &self.instances[instance as usize].process else { return };
        for (rank, plane) in (0..).zip(&process.ranks) {
            let Some(store) = self.dma.store(plane.ix()) else { continue };
            let mut wrong: Option<ContentMismatch> = None;
            for ((index, group), blocks) in geometry.groups.iter().enumerate().zip(blocks) {
                let from = group.kind.read_from(next);
                wrong = wrong.or_else(|| unlisted((index, group), from..tokens, blocks));
                each_piece(content, from..tokens, (index, group), blocks, grain, |at, stamp| {
                    if wrong.is_none() {
                        wrong = store.check(at, stamp).err();
                    }
                });
            }
            let (at, wrong) = (SimRankId { who, rank }, wrong.as_ref());
            self.stats.compared(wrong);
            self.observer.observe(now, &Observation::Used { at, request, tokens, wrong });
        }
    }

    /// Hands an input to a machine of an instance at once.
    pub(super) fn tell(&mut self, slot: u32, input: MachineInput) {
        let incarnation = self.machines[slot as usize].incarnation;
        self.ready.push_back(ReadyStep::Input { slot, incarnation, input, cause: 0 });
    }
}

/// The first token of a group that is to be read and has no block.
fn unlisted(
    (index, group): (usize, &KvGroup),
    tokens: Range<u32>,
    blocks: &BlockList,
) -> Option<ContentMismatch> {
    if group.kind == GroupKind::State || tokens.is_empty() {
        return None;
    }
    let size = group.block_tokens;
    let mut needed = tokens.start / size..tokens.end.div_ceil(size);
    let logical = needed.find(|logical| blocks.get(*logical).is_none())?;
    let first = logical * size;
    Some(ContentMismatch {
        // The null block, as vLLM has it.
        at: BlockTokens { group: index, block: 0, first, tokens: 0..size },
        layer: group.layers[0],
        position: first.max(tokens.start),
        found: MismatchKind::Missing,
    })
}
