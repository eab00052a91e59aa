//! What a step computes, and what follows from it.

use super::groups::GroupBlockIds;
use super::io::{BlockGrowth, ComputeChunk, EngineEffect, StepPlan};
use super::machine::{EngineOutbox, SimEngine};
use super::request::{RunningRequest, SimRequest, SimRequestPhase};
use crate::cost::StepWork;
use kvferry_engine::core::ids::StepId;
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{Chunk, DecodeHook, PrefillHook, Role};
use kvferry_engine::core::router::LegEvent;
use kvferry_engine::core::time::Nanos;

/// A step in the making.
struct StepDraft {
    plan: StepPlan,
    chunks: Vec<Chunk>,
    work: StepWork,
    /// Tokens that may still be added.
    budget: u32,
    /// A request had to give way.
    preempted: bool,
}

impl StepDraft {
    fn add_decode(&mut self, runner: &mut RunningRequest) {
        runner.planned = 1;
        self.budget -= 1;
        self.plan.decoding += 1;
        self.plan.context += u64::from(runner.computed);
    }
}

impl SimEngine {
    /// Starts the next step if there is something to compute, and lets decode requests wait for
    /// their KV if there are blocks.
    pub(super) fn schedule(&mut self, out: &mut EngineOutbox) {
        for _ in 0..std::mem::take(&mut self.preempt) {
            self.preempt_last(out);
        }
        let mut draft = StepDraft {
            plan: StepPlan {
                step: StepId(self.last_step.0 + 1),
                duration: Nanos::ZERO,
                computes: Vec::new(),
                grown: Vec::new(),
                decoding: 0,
                context: 0,
            },
            chunks: Vec::new(),
            work: StepWork::default(),
            budget: self.config.max_batched_tokens,
            preempted: false,
        };
        self.plan_running(&mut draft, out);
        if !draft.preempted || self.running.is_empty() {
            self.admit(&mut draft, out);
        }
        if draft.budget == self.config.max_batched_tokens {
            return;
        }
        self.stepping = true;
        self.last_step = draft.plan.step;
        draft.work.tokens += u64::from(draft.plan.decoding);
        draft.work.context += draft.plan.context;
        draft.plan.duration = self.config.cost.time(&draft.work);
        if self.config.role == Role::Prefill {
            let (step, chunks) = (draft.plan.step, draft.chunks);
            out.push(PrefillHook::Scheduled { step, chunks });
        }
        out.push(EngineEffect::Step(draft.plan));
    }

    /// Gives every running request its tokens, oldest first.
    fn plan_running(&mut self, draft: &mut StepDraft, out: &mut EngineOutbox) {
        let mut at = 0;
        while at < self.running.len() && draft.budget > 0 {
            let runner = &mut self.running[at];
            if runner.computed >= runner.prompt && runner.computed + 1 == runner.known {
                if runner.computed < runner.room {
                    draft.add_decode(runner);
                } else {
                    self.grow_decode(at, draft, out);
                }
            } else {
                self.plan_chunk(at, draft, out);
            }
            at += 1;
        }
    }

    /// The next token of a decoding request needs a block.
    fn grow_decode(&mut self, at: usize, draft: &mut StepDraft, out: &mut EngineOutbox) {
        let to = self.running[at].computed + 1;
        if !self.make_room(at, to, draft, out) {
            return;
        }
        let runner = &mut self.running[at];
        let request = self.requests.get_mut(runner.slot);
        let id = &request.id;
        let grown = &mut draft.plan.grown;
        self.groups.grow_each(&mut request.tables, to, |group, logical, block| {
            grown.push(BlockGrowth { request: id.clone(), group, logical, block });
        });
        runner.room = self.groups.room(&request.tables);
        draft.add_decode(runner);
    }

    /// The next tokens of a prompt, or of one that is computed again.
    fn plan_chunk(&mut self, at: usize, draft: &mut StepDraft, out: &mut EngineOutbox) {
        let runner = self.running[at];
        let planned = (runner.known - runner.computed).min(draft.budget);
        let to = runner.computed + planned;
        if to <= runner.room {
            let none = vec![Vec::new(); self.config.groups.len()];
            return self.add_chunk(at, to, none, draft);
        }
        if !self.make_room(at, to, draft, out) {
            return;
        }
        let request = self.requests.get_mut(runner.slot);
        let taken = self.groups.grow(&mut request.tables, to).expect("room was made");
        self.running[at].room = self.groups.room(&request.tables);
        out.push(EngineEffect::Taken { request: request.id.clone(), blocks: taken.clone() });
        self.add_chunk(at, to, taken, draft);
    }

    /// Makes the pool have blocks for tokens `..to` of a running request: those that its windows
    /// have passed, else those of requests admitted after it. False if it had to give way itself.
    fn make_room(
        &mut self,
        at: usize,
        to: u32,
        draft: &mut StepDraft,
        out: &mut EngineOutbox,
    ) -> bool {
        let RunningRequest { slot, computed, .. } = self.running[at];
        self.slide(slot, computed, out);
        loop {
            let tables = &self.requests.get(slot).tables;
            if self.groups.has_room(tables, to) {
                return true;
            }
            let itself = self.running.len() == at + 1;
            draft.preempted = true;
            self.preempt_last(out);
            if itself {
                return false;
            }
        }
    }

    /// Frees what the windows of a request have passed.
    fn slide(&mut self, slot: u32, computed: u32, out: &mut EngineOutbox) {
        let request = self.requests.get_mut(slot);
        if let Some(blocks) = self.groups.slide(&mut request.tables, computed) {
            out.push(EngineEffect::Freed { request: request.id.clone(), blocks });
        }
    }

    /// Adds tokens `..to` of a running request to the step; `taken` are the blocks added for it.
    fn add_chunk(&mut self, at: usize, to: u32, taken: GroupBlockIds, draft: &mut StepDraft) {
        let runner = &mut self.running[at];
        let from = runner.computed;
        runner.planned = to - from;
        draft.budget -= to - from;
        let request = self.requests.get(runner.slot);
        if to - from == 1 && self.config.role == Role::Decode {
            draft.work.decode(from);
        } else {
            draft.work.prefill(from, to);
        }
        // The last token of a prompt that is shared as a whole is computed, but not written.
        if request.shared < to {
            draft.plan.computes.push(ComputeChunk {
                request: request.id.clone(),
                content: request.content.clone(),
                from,
                to,
                blocks: self.groups.holding(&request.tables, from, to),
            });
        }
        if self.config.role == Role::Prefill {
            let blocks = added(&request.tables, taken);
            draft.chunks.push(Chunk { request: request.id.clone(), from, to, blocks });
        }
    }

    /// Lets requests in: first those whose KV has arrived, then by age.
    fn admit(&mut self, draft: &mut StepDraft, out: &mut EngineOutbox) {
        while self.running.len() < self.config.max_running as usize && draft.budget > 0 {
            if let Some((_, slot)) = self.ready.pop_first() {
                self.start_loaded(slot, draft, out);
                continue;
            }
            let Some((order, slot)) = self.waiting.first_key_value().map(|(o, s)| (*o, *s)) else {
                break;
            };
            let state = (order, self.groups.released());
            if self.blocked == Some(state) {
                break;
            }
            let admitted = if self.requests.get(slot).external {
                self.start_load(slot, out)
            } else {
                self.start_local(slot, draft, out)
            };
            if !admitted {
                self.blocked = Some(state);
                break;
            }
            self.waiting.remove(&order);
        }
    }

    /// Allocates the blocks of a decode request; false if there are too few. One whose prefix hits
    /// are gone again asks for its KV, and waits for the prefill unless most blocks are free.
    fn start_load(&mut self, slot: u32, out: &mut EngineOutbox) -> bool {
        let request = self.requests.get_mut(slot);
        let tokens = request.content.tokens;
        let computed = self.groups.hits(&request.content, tokens);
        let early = self.groups.would_leave_free(self.config.early_percent, tokens);
        if computed < tokens && !request.blocks_wanted && !early {
            request.phase = SimRequestPhase::Asked;
            return true;
        }
        let Some((tables, taken)) = self.groups.allocate(
            &request.content,
            (computed, tokens.saturating_sub(1), tokens),
            (tokens, tokens),
        ) else {
            return false;
        };
        request.phase = SimRequestPhase::Remote;
        request.shared = computed;
        request.tables = tables;
        let (id, blocks) = (request.id.clone(), request.tables.clone());
        if taken.iter().any(|ids| !ids.is_empty()) {
            out.push(EngineEffect::Taken { request: id.clone(), blocks: taken });
        }
        out.push(DecodeHook::Allocated { request: id, computed, blocks });
        true
    }

    /// Begins to generate from KV that has arrived.
    fn start_loaded(&mut self, slot: u32, draft: &mut StepDraft, out: &mut EngineOutbox) {
        let request = self.requests.get_mut(slot);
        let tokens = request.content.tokens;
        let next = tokens - 1;
        out.push(use_of(request, (tokens, next), request.tables.clone()));
        let at = self.run(slot, next);
        let none = vec![Vec::new(); self.config.groups.len()];
        self.add_chunk(at, tokens, none, draft);
    }

    /// Begins to compute a prompt behind its prefix hits; false if there are too few blocks.
    fn start_local(&mut self, slot: u32, draft: &mut StepDraft, out: &mut EngineOutbox) -> bool {
        let request = self.requests.get_mut(slot);
        let hits = self.groups.hits(&request.content, request.known - 1);
        let to = hits + (request.known - hits).min(draft.budget);
        let whole = (request.known, self.config.max_batched_tokens);
        let range = (hits, hits, to);
        let Some((tables, taken)) = self.groups.allocate(&request.content, range, whole) else {
            return false;
        };
        request.shared = hits;
        request.tables = tables;
        out.push(EngineEffect::Taken { request: request.id.clone(), blocks: taken });
        if hits > 0 {
            let blocks = self.groups.holding(&request.tables, 0, hits);
            out.push(use_of(request, (hits, hits), blocks));
        }
        // The core learns of the hits, too.
        let all = request.tables.iter().map(|table| table.ids.clone()).collect();
        let at = self.run(slot, hits);
        self.add_chunk(at, to, all, draft);
        true
    }

    /// Gives a request a place in the steps; says which.
    fn run(&mut self, slot: u32, computed: u32) -> usize {
        let request = self.requests.get_mut(slot);
        request.phase = SimRequestPhase::Running;
        self.running.push(RunningRequest {
            slot,
            prompt: request.content.tokens,
            computed,
            known: request.known,
            limit: request.limit(),
            room: self.groups.room(&request.tables),
            planned: 0,
            ends_after_step: false,
        });
        self.running.len() - 1
    }

    pub(super) fn step_done(&mut self, step: StepId, out: &mut EngineOutbox) {
        assert!(self.stepping && step == self.last_step, "step {step} does not run");
        self.stepping = false;
        let mut runners = std::mem::take(&mut self.running);
        runners.retain_mut(|runner| self.advance(runner, out));
        self.running = runners;
    }

    /// What a step did to one request; false if that was its end.
    #[inline]
    fn advance(&mut self, runner: &mut RunningRequest, out: &mut EngineOutbox) -> bool {
        if runner.ends_after_step {
            self.execute(runner.slot, out);
            return false;
        }
        let from = runner.computed;
        runner.computed += std::mem::take(&mut runner.planned);
        if from < runner.prompt {
            let request = self.requests.get(runner.slot);
            let range = (from, runner.computed);
            self.groups.publish(&request.content, &request.tables, range);
        }
        if runner.computed < runner.known {
            return true;
        }
        runner.known += 1;
        if from < runner.prompt {
            self.first_token(runner.slot, out);
        }
        if runner.known < runner.limit {
            return true;
        }
        self.slide(runner.slot, runner.computed, out);
        self.finish(runner.slot, out);
        false
    }

    /// A prompt is complete. If it was computed again, its first token is old news.
    fn first_token(&mut self, slot: u32, out: &mut EngineOutbox) {
        let request = self.requests.get_mut(slot);
        if self.config.role == Role::Decode && !std::mem::replace(&mut request.streamed, true) {
            out.push(EngineEffect::Leg { leg: request.leg, event: LegEvent::FirstToken });
        }
    }
}

fn use_of(
    request: &SimRequest,
    (tokens, next): (u32, u32),
    blocks: Vec<BlockList>,
) -> EngineEffect {
    let (request, content) = (request.id.clone(), request.content.clone());
    EngineEffect::Use { request, content, tokens, next, blocks }
}

/// The last blocks of tables, with their places.
fn added(tables: &[BlockList], taken: GroupBlockIds) -> Vec<BlockList> {
    let place = |(table, ids): (&BlockList, Vec<u32>)| BlockList {
        first: table.first + (table.ids.len() - ids.len()) as u32,
        ids,
    };
    tables.iter().zip(taken).map(place).collect()
}
