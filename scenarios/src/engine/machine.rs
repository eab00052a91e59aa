//! The engine core: legs and answers. Steps are in [`super::steps`], ends in
//! [`super::termination`].

use super::config::{EngineConfig, EngineConfigError};
use super::content::PromptContent;
use super::groups::{CacheGroups, GroupBlockIds};
use super::io::{EngineEffect, EngineInput, PoolGauges};
use super::request::{DeferredEnd, RunningRequest, SimRequest, SimRequestPhase, SimRequests};
use crate::run::LoadFailurePolicy;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{LegId, RequestId, StepId};
use kvferry_engine::core::machine::{Gauges, Machine, Outbox};
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, FinishReason, PrefillAnswer, PrefillHook, Role,
};
use kvferry_engine::core::router::{LegBody, LegEvent, LegFailure};
use kvferry_engine::core::time::Nanos;
use std::collections::BTreeMap;
use std::fmt::Display;

pub(super) type EngineOutbox = Outbox<EngineEffect>;

/// One engine core. A restarted engine is a new one.
#[derive(Debug)]
pub struct SimEngine {
    pub(super) config: EngineConfig,
    pub(super) groups: CacheGroups,
    pub(super) requests: SimRequests,
    pub(super) ids: BTreeMap<RequestId, u32>,
    /// Legs that have not ended.
    pub(super) legs: BTreeMap<LegId, u32>,
    /// Requests that wait, oldest first; preempted ones before all others.
    pub(super) waiting: BTreeMap<i64, u32>,
    /// Requests whose KV has arrived, by their age.
    pub(super) ready: BTreeMap<i64, u32>,
    /// Requests in the steps, in the order of their admission.
    pub(super) running: Vec<RunningRequest>,
    arrivals: u32,
    /// Place in the queue of the request that was preempted last.
    pub(super) front: i64,
    pub(super) last_step: StepId,
    pub(super) stepping: bool,
    /// Requests to preempt before the next step.
    pub(super) preempt: u32,
    /// The request at the head of the queue that found too few blocks, and what
    /// [`CacheGroups::released`] said.
    pub(super) blocked: Option<(i64, u64)>,
}

impl SimEngine {
    /// An engine without requests.
    ///
    /// # Errors
    /// Settings with which no request could run.
    pub fn new(config: EngineConfig) -> Result<SimEngine, EngineConfigError> {
        config.check()?;
        Ok(SimEngine {
            groups: CacheGroups::new(&config),
            config,
            requests: SimRequests::default(),
            ids: BTreeMap::new(),
            legs: BTreeMap::new(),
            waiting: BTreeMap::new(),
            ready: BTreeMap::new(),
            running: Vec::new(),
            arrivals: 0,
            front: 0,
            last_step: StepId(0),
            stepping: false,
            preempt: 0,
            blocked: None,
        })
    }

    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// How the blocks of a group's pool are used.
    pub fn pool(&self, group: usize) -> PoolGauges {
        self.groups.gauges(group)
    }

    /// The engine's own id of the request behind a leg, until the leg ends.
    pub fn request_of(&self, leg: LegId) -> Option<&RequestId> {
        Some(&self.requests.get(*self.legs.get(&leg)?).id)
    }

    fn leg(
        &mut self,
        leg: LegId,
        request: &RequestId,
        content: PromptContent,
        (body, stop): (LegBody, bool),
        out: &mut EngineOutbox,
    ) {
        assert!(!self.legs.contains_key(&leg), "leg {leg} arrived twice");
        let (prompt, output) = match &body {
            LegBody::Prefill { prompt, .. } => (*prompt, 1),
            LegBody::Decode { prompt, output, .. } => (*prompt, *output),
        };
        if let Err(failure) = self.accept(&content, &body, output) {
            out.push(EngineEffect::Leg { leg, event: LegEvent::Failed(failure) });
            return;
        }
        self.arrivals += 1;
        let id = self.name(request, prompt);
        let (tokens, prompt_hash) = (content.tokens, content.hash());
        let order = i64::from(self.arrivals);
        let external = self.config.role == Role::Decode;
        let asks = external && self.groups.hits(&content, tokens) < tokens;
        let slot = self.requests.insert(SimRequest {
            id: id.clone(),
            leg,
            content,
            output,
            reason: if stop { FinishReason::Stop } else { FinishReason::Length },
            phase: if asks { SimRequestPhase::Asked } else { SimRequestPhase::Waiting },
            order,
            known: tokens,
            shared: 0,
            tables: Vec::new(),
            parked: Vec::new(),
            external,
            blocks_wanted: false,
            streamed: false,
            safe_due: false,
            failure: None,
            verdict: None,
        });
        self.ids.insert(id.clone(), slot);
        self.legs.insert(leg, slot);
        if !asks {
            self.waiting.insert(order, slot);
        }
        out.push(match body {
            LegBody::Prefill { transfer: leg, .. } => {
                let hook = PrefillHook::Arrived { request: id, leg, tokens, prompt_hash };
                EngineEffect::Prefill(hook)
            }
            LegBody::Decode { transfer: leg, .. } => {
                let hook = DecodeHook::Arrived { request: id, leg, tokens, prompt_hash };
                EngineEffect::Decode(hook)
            }
        });
    }

    /// Refuses what could never run, or not now.
    fn accept(
        &self,
        content: &PromptContent,
        body: &LegBody,
        output: u32,
    ) -> Result<(), LegFailure> {
        let role = body.role();
        let bad = |why: String| Err(LegFailure::Request(why.into()));
        if role != self.config.role {
            return bad(format!("a {role} leg for a {} engine", self.config.role));
        }
        if content.tokens == 0 {
            return bad("the prompt is empty".into());
        }
        if output == 0 {
            return bad("no token is to be generated".into());
        }
        let tokens = content.tokens.saturating_add(output - 1);
        let too_small = self.groups.too_small(tokens, self.config.max_batched_tokens);
        if let Some((group, need, total)) = too_small {
            return bad(format!(
                "{} prompt tokens and {output} to generate need {need} blocks of KV cache group \
                 {group}, which has {total}",
                content.tokens
            ));
        }
        let idle = self.requests.len() - self.running.len();
        match idle >= self.config.max_waiting as usize {
            true => Err(LegFailure::Busy { retry_after: None }),
            false => Ok(()),
        }
    }

    /// The engine's own id of a request, as vLLM makes it from `X-Request-Id`.
    fn name(&self, request: &RequestId, prompt: u32) -> RequestId {
        let Some(seed) = self.config.id_seed else {
            let plain = RequestId::from(format!("cmpl-{request}-{prompt}"));
            let taken = self.ids.contains_key(&plain);
            return if taken { format!("{plain}-{}", self.arrivals).into() } else { plain };
        };
        // An odd multiplier (Knuth's) and an exclusive or are bijections: no suffix occurs twice.
        let suffix = self.arrivals.wrapping_mul(0x9e37_79b1) ^ (seed ^ seed >> 32) as u32;
        format!("cmpl-{request}-{prompt}-{suffix:08x}").into()
    }

    fn cancel(&mut self, leg: LegId, out: &mut EngineOutbox) {
        let Some(slot) = self.legs.get(&leg).copied() else { return };
        if self.must_wait(slot) {
            self.legs.remove(&leg);
            self.end_after_step(slot, DeferredEnd::Cancelled);
        } else {
            self.abort(slot, out);
        }
    }

    /// True if the running step computes the request.
    fn must_wait(&self, slot: u32) -> bool {
        self.stepping && self.requests.get(slot).phase == SimRequestPhase::Running
    }

    /// Lets the end of the running step end the request. A rejection counts more than a cancel: no
    /// answer follows it.
    fn end_after_step(&mut self, slot: u32, verdict: DeferredEnd) {
        let held = &mut self.requests.get_mut(slot).verdict;
        if !matches!(held, Some(DeferredEnd::Rejected(_))) {
            *held = Some(verdict);
        }
        if let Some(runner) = self.running.iter_mut().find(|runner| runner.slot == slot) {
            runner.ends_after_step = true;
        }
    }

    fn prefill_answer(&mut self, answer: PrefillAnswer, out: &mut EngineOutbox) {
        let (PrefillAnswer::SourceFree { request: id, .. }
        | PrefillAnswer::PreemptionSafe { request: id }
        | PrefillAnswer::Rejected { request: id, .. }) = &answer;
        let found = self.ids.get(id).copied().filter(|_| self.config.role == Role::Prefill);
        let Some(slot) = found else {
            // This one may cross with a rejection.
            let crosses = matches!(answer, PrefillAnswer::PreemptionSafe { .. });
            if self.config.role == Role::Prefill && crosses {
                return;
            }
            return Self::fault(&answer, "no such request", out);
        };
        let (phase, safe_due) = {
            let request = self.requests.get(slot);
            (request.phase, request.safe_due)
        };
        match answer {
            PrefillAnswer::SourceFree { .. } if phase == SimRequestPhase::Ended && !safe_due => {
                self.forget(slot, out);
            }
            PrefillAnswer::PreemptionSafe { .. } if safe_due => self.preemption_safe(slot, out),
            PrefillAnswer::Rejected { failure, .. } => {
                if self.must_wait(slot) {
                    self.end_after_step(slot, DeferredEnd::Rejected(failure));
                } else {
                    self.reject(slot, failure, out);
                }
            }
            answer => Self::fault(&answer, "not due", out),
        }
    }

    fn decode_answer(&mut self, answer: DecodeAnswer, out: &mut EngineOutbox) {
        let found =
            self.ids.get(answer.request()).copied().filter(|_| self.config.role == Role::Decode);
        let Some(slot) = found else {
            // These may cross with the end of the request.
            let crosses =
                matches!(answer, DecodeAnswer::Allocate { .. } | DecodeAnswer::Rejected { .. });
            if self.config.role == Role::Decode && crosses {
                return;
            }
            return Self::fault(&answer, "no such request", out);
        };
        let request = self.requests.get(slot);
        let (phase, external) = (request.phase, request.external);
        match answer {
            DecodeAnswer::Allocate { .. } => self.want_blocks(slot),
            DecodeAnswer::Loaded { .. } if phase == SimRequestPhase::Remote => self.loaded(slot),
            // A core that rejects before it knows of the blocks has given them to nobody.
            DecodeAnswer::LoadFailed { failure, .. } | DecodeAnswer::Rejected { failure, .. }
                if phase == SimRequestPhase::Remote =>
            {
                let request = self.requests.get_mut(slot);
                request.phase = SimRequestPhase::Waiting;
                let tables = std::mem::take(&mut request.tables);
                let freed = self.groups.free(tables);
                self.freed(slot, freed, out);
                self.not_loaded(slot, failure, out);
            }
            DecodeAnswer::Rejected { failure, .. }
                if matches!(phase, SimRequestPhase::Asked | SimRequestPhase::Waiting)
                    && external =>
            {
                self.requests.get_mut(slot).phase = SimRequestPhase::Waiting;
                self.not_loaded(slot, failure, out);
            }
            _ if phase == SimRequestPhase::Ended => self.forget(slot, out),
            answer => Self::fault(&answer, "not due", out),
        }
    }

    /// The prefill is ready for a decode request's blocks.
    fn want_blocks(&mut self, slot: u32) {
        let request = self.requests.get_mut(slot);
        request.blocks_wanted = true;
        if request.phase == SimRequestPhase::Asked {
            request.phase = SimRequestPhase::Waiting;
            self.waiting.insert(request.order, slot);
        }
    }

    /// The KV of a decode request has arrived. The last token of the prompt is computed again, for
    /// its logits.
    fn loaded(&mut self, slot: u32) {
        let request = self.requests.get_mut(slot);
        let tokens = request.content.tokens;
        request.phase = SimRequestPhase::Ready;
        request.external = false;
        let range = (request.shared, tokens - 1);
        self.groups.publish(&request.content, &request.tables, range);
        self.ready.insert(request.order, slot);
    }

    /// The KV of a decode request, which has no blocks, will not arrive.
    fn not_loaded(&mut self, slot: u32, failure: Failure, out: &mut EngineOutbox) {
        match self.config.load_failure {
            LoadFailurePolicy::Fail => self.fail(slot, failure, out),
            LoadFailurePolicy::Recompute => {
                let request = self.requests.get_mut(slot);
                request.failure = Some(failure);
                request.external = false;
                self.waiting.insert(request.order, slot);
                self.blocked = None;
            }
        }
    }

    pub(super) fn freed(&self, slot: u32, blocks: GroupBlockIds, out: &mut EngineOutbox) {
        if blocks.iter().any(|ids| !ids.is_empty()) {
            out.push(EngineEffect::Freed { request: self.requests.get(slot).id.clone(), blocks });
        }
    }

    fn fault(answer: &impl std::fmt::Debug, why: impl Display, out: &mut EngineOutbox) {
        out.push(EngineEffect::Fault(format!("{why}: {answer:?}")));
    }
}

impl Machine for SimEngine {
    type Input = EngineInput;
    type Effect = EngineEffect;

    /// # Panics
    /// If the shell breaks the order: a leg arrives twice, or a step ends that does not run.
    fn handle(&mut self, _now: Nanos, input: EngineInput, out: &mut Outbox<EngineEffect>) {
        match input {
            EngineInput::Leg { leg, request, prompt, body, stop } => {
                self.leg(leg, &request, prompt, (body, stop), out);
            }
            EngineInput::CancelLeg { leg } => self.cancel(leg, out),
            EngineInput::Prefill(answer) => self.prefill_answer(answer, out),
            EngineInput::Decode(answer) => self.decode_answer(answer, out),
            EngineInput::StepDone { step } => self.step_done(step, out),
            EngineInput::PreemptOne => self.preempt += u32::from(!self.running.is_empty()),
        }
        if !self.stepping {
            self.schedule(out);
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }

    fn gauges(&self) -> Gauges {
        let (held, quarantined) = self.groups.in_use();
        Gauges {
            transfers: self.requests.len() as u32,
            queued: (self.waiting.len() + self.ready.len()) as u32,
            held,
            quarantined,
            ..Gauges::default()
        }
    }
}
