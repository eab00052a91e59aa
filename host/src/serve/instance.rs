//! The actor between HTTP and the protocol: it owns the stand-in engine and plays its steps.

use super::content::Kv as Memory;
use super::metrics::Metrics;
use super::openai;
use crate::cores::{Cores, log_violation};
use actix::fut::{ActorFutureExt, wrap_future};
use actix::{Actor, AsyncContext, Context, Handler, Message};
use engine::actors::{Clock, Foreign, RankReport};
use engine::core::decode::DecodeEffect;
use engine::core::ids::{LegId, RequestId, StepId};
use engine::core::layout::BlockList;
use engine::core::message::{FinishReason, Job, PrefillHook};
use engine::core::prefill::PrefillEffect;
use engine::core::router::{LegBody, LegEvent, LegFailure};
use engine::core::{Machine, Outbox};
use scenarios::engine::{Engine, EngineEffect, EngineInput, PromptContent, StepPlan};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc::Sender;

/// What the caller of a leg is told; at most [`NEWS_MAX`] each.
#[derive(Debug)]
pub(super) enum News {
    /// A decode has its first token.
    First(openai::Kv),
    /// The leg ended well. A prefill says which blocks have the KV.
    Done(openai::Kv, Vec<BlockList>),
    /// It did not.
    Failed(LegFailure),
}

/// Room for all news of a leg.
pub(super) const NEWS_MAX: usize = 4;

/// A leg arrived by HTTP.
#[derive(Message)]
#[rtype(result = "LegId")]
pub(super) struct Start {
    pub(super) request: RequestId,
    pub(super) prompt: PromptContent,
    pub(super) body: LegBody,
    pub(super) news: Sender<News>,
}

/// The caller of a leg went away.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Cancel(pub(super) LegId);

/// A step is over.
#[derive(Message)]
#[rtype(result = "()")]
struct StepOver(StepId);

/// Registers as draining from now on.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Drain;

struct Leg {
    content: PromptContent,
    news: Sender<News>,
    request: Option<RequestId>,
    blocks: Vec<BlockList>,
    /// Of the prompt's KV as a prefill computes it; made when it is first wanted.
    expected: Option<String>,
    /// Of what was found, if it was transferred.
    digest: Option<String>,
}

impl Leg {
    fn expected(&mut self, memory: &Memory) -> &String {
        let make = || memory.expected(&self.content, self.content.tokens);
        self.expected.get_or_insert_with(make)
    }

    fn kv(&mut self, memory: &Memory, failure: Option<String>) -> openai::Kv {
        let expected = self.expected(memory).clone();
        let (digest, source) = match &self.digest {
            Some(digest) => (digest.clone(), "transferred"),
            None => (expected.clone(), "computed"),
        };
        openai::Kv { digest, expected, source, failure }
    }
}

/// What an instance is started with.
pub(super) struct Parts {
    pub(super) engine: Engine,
    pub(super) memory: Memory,
    pub(super) cores: Cores,
    pub(super) clock: Clock,
    pub(super) layers: u16,
    pub(super) metrics: Metrics,
}

/// The instance.
pub(super) struct Instance {
    parts: Parts,
    legs: BTreeMap<LegId, Leg>,
    requests: BTreeMap<RequestId, LegId>,
    next: u64,
    out: Outbox<EngineEffect>,
}

impl Instance {
    pub(super) fn new(parts: Parts) -> Instance {
        let (legs, requests) = (BTreeMap::new(), BTreeMap::new());
        Instance { parts, legs, requests, next: 0, out: Outbox::new() }
    }

    fn run(&mut self, input: EngineInput, starting: Option<LegId>, context: &mut Context<Self>) {
        let now = (self.parts.clock)();
        self.parts.engine.handle(now, input, &mut self.out);
        for effect in self.out.take() {
            match effect {
                EngineEffect::Prefill(hook) => self.prefill(hook, starting),
                EngineEffect::Decode(hook) => {
                    if let (Some(leg), engine::core::message::DecodeHook::Arrived { request, .. }) =
                        (starting, &hook)
                    {
                        self.named(leg, request);
                    }
                    self.parts.cores.decode(hook);
                }
                EngineEffect::Step(plan) => self.layer(plan, 0, context),
                EngineEffect::Leg { leg, event } => self.leg(leg, event),
                EngineEffect::Use { request, tokens, blocks, .. } => {
                    self.used(&request, tokens, &blocks);
                }
                EngineEffect::Fault(text) => {
                    self.parts.metrics.faults.inc();
                    tracing::error!(fault = text, "the protocol core broke a promise");
                }
                EngineEffect::Taken { .. } | EngineEffect::Freed { .. } => {}
            }
        }
        let gauges = self.parts.engine.gauges();
        let held = i64::from(gauges.held) + i64::from(gauges.quarantined);
        self.parts.metrics.held.set(held);
    }

    fn named(&mut self, leg: LegId, request: &RequestId) {
        self.requests.insert(request.clone(), leg);
        if let Some(leg) = self.legs.get_mut(&leg) {
            leg.request = Some(request.clone());
        }
    }

    fn prefill(&mut self, hook: PrefillHook, starting: Option<LegId>) {
        match (&hook, starting) {
            (PrefillHook::Arrived { request, .. }, Some(leg)) => self.named(leg, request),
            (PrefillHook::Scheduled { chunks, .. }, _) => {
                for chunk in chunks {
                    let leg = self.requests.get(&chunk.request);
                    let Some(leg) = leg.and_then(|leg| self.legs.get_mut(leg)) else { continue };
                    append(&mut leg.blocks, &chunk.blocks);
                }
            }
            (PrefillHook::Preempted { request }, _) => {
                let leg = self.requests.get(request).and_then(|leg| self.legs.get_mut(leg));
                if let Some(leg) = leg {
                    leg.blocks.clear();
                }
            }
            _ => {}
        }
        self.parts.cores.prefill(hook);
    }

    /// Computes a layer, and the next one after the other actors of this thread had their turn:
    /// they move this one.
    fn layer(&mut self, plan: StepPlan, layer: u16, context: &mut Context<Self>) {
        if layer == self.parts.layers {
            let wait = Duration::from_nanos(plan.duration.0);
            context.notify_later(StepOver(plan.step), wait);
            return;
        }
        for compute in &plan.computes {
            let range = compute.from..compute.to.min(compute.content.tokens);
            self.parts.memory.compute(layer, &compute.content, range, &compute.blocks);
        }
        let layers = layer + 1;
        self.parts.cores.layers(None, plan.step, layers);
        let others = wrap_future::<_, Self>(tokio::task::yield_now());
        context.spawn(others.map(move |(), own, context| own.layer(plan, layers, context)));
    }

    /// A decode is about to read what was transferred.
    fn used(&mut self, request: &RequestId, tokens: u32, blocks: &[BlockList]) {
        let Some(leg) = self.requests.get(request).and_then(|leg| self.legs.get_mut(leg)) else {
            return;
        };
        // A request that was preempted has generated tokens behind its prompt.
        let tokens = tokens.min(leg.content.tokens);
        let memory = &mut self.parts.memory;
        let found = memory.digest(tokens, blocks);
        // What is found of a part (prefix hits) answers for the whole only if it is right.
        let right = tokens < leg.content.tokens && found == memory.expected(&leg.content, tokens);
        leg.digest = Some(if right { leg.expected(memory).clone() } else { found });
    }

    fn leg(&mut self, id: LegId, event: LegEvent) {
        let metrics = self.parts.metrics.clone();
        let memory = &self.parts.memory;
        let Some(leg) = self.legs.get_mut(&id) else { return };
        let news = match event {
            LegEvent::FirstToken => News::First(leg.kv(memory, None)),
            // Only a router that relays a prefill's answer says so.
            LegEvent::Prefilled { .. } => return,
            LegEvent::Done { reason: FinishReason::Length | FinishReason::Stop, recomputed } => {
                let failure = recomputed.map(|failure| failure.to_string());
                metrics.recomputed.inc_by(u64::from(failure.is_some()));
                let transferred = leg.digest.is_some();
                let which = if transferred { &metrics.transferred } else { &metrics.computed };
                which.inc();
                metrics.finished.inc();
                News::Done(leg.kv(memory, failure), leg.blocks.clone())
            }
            LegEvent::Done { reason, .. } => {
                metrics.failed.inc();
                News::Failed(LegFailure::Request(format!("ended: {reason:?}").into()))
            }
            LegEvent::Failed(failure) => {
                metrics.failed.inc();
                tracing::warn!(request = leg.request.as_ref().map(|id| &*id.0), %failure, "leg");
                News::Failed(failure)
            }
        };
        let last = !matches!(news, News::First(_));
        // There is room for all; who does not listen has gone.
        let _ = leg.news.try_send(news);
        if last {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: LegId) {
        let Some(leg) = self.legs.remove(&id) else { return };
        self.parts.metrics.open.dec();
        if let Some(request) = leg.request {
            self.requests.remove(&request);
        }
    }

    fn job(&self, job: Job) {
        if matches!(job, Job::Write { .. } | Job::Read { .. }) {
            self.parts.metrics.flows.inc();
        }
        self.parts.cores.job(&job);
    }

    fn violation(&self, violation: &engine::core::error::PeerViolation) {
        self.parts.metrics.violations.inc();
        log_violation(violation);
    }
}

/// Adds the blocks of a chunk to those of its request.
fn append(have: &mut Vec<BlockList>, more: &[BlockList]) {
    have.resize_with(more.len().max(have.len()), BlockList::default);
    for (have, more) in have.iter_mut().zip(more) {
        if have.ids.is_empty() {
            have.first = more.first;
        }
        have.ids.extend_from_slice(&more.ids);
    }
}

impl Actor for Instance {
    type Context = Context<Self>;
}

impl Handler<Start> for Instance {
    type Result = actix::MessageResult<Start>;

    fn handle(&mut self, start: Start, context: &mut Self::Context) -> Self::Result {
        self.next += 1;
        let leg = LegId(self.next);
        let Start { request, prompt, body, news } = start;
        let (content, blocks) = (prompt.clone(), Vec::new());
        let entry = Leg { content, news, request: None, blocks, expected: None, digest: None };
        self.legs.insert(leg, entry);
        self.parts.metrics.legs.inc();
        self.parts.metrics.open.inc();
        let input = EngineInput::Leg { leg, request, prompt, body, stop: false };
        self.run(input, Some(leg), context);
        actix::MessageResult(leg)
    }
}

impl Handler<Cancel> for Instance {
    type Result = ();

    fn handle(&mut self, Cancel(leg): Cancel, context: &mut Self::Context) {
        if self.legs.contains_key(&leg) {
            self.run(EngineInput::CancelLeg { leg }, None, context);
            self.forget(leg);
        }
    }
}

impl Handler<StepOver> for Instance {
    type Result = ();

    fn handle(&mut self, StepOver(step): StepOver, context: &mut Self::Context) {
        self.run(EngineInput::StepDone { step }, None, context);
    }
}

impl Handler<Drain> for Instance {
    type Result = ();

    fn handle(&mut self, _: Drain, _: &mut Self::Context) {
        self.parts.cores.drain();
    }
}

impl Handler<RankReport> for Instance {
    type Result = ();

    fn handle(&mut self, RankReport { rank, report }: RankReport, _: &mut Self::Context) {
        self.parts.cores.report(rank, report);
    }
}

impl Handler<Foreign<PrefillEffect>> for Instance {
    type Result = ();

    fn handle(&mut self, Foreign(effect): Foreign<PrefillEffect>, context: &mut Self::Context) {
        match effect {
            PrefillEffect::Job(job) => self.job(job),
            PrefillEffect::Answer(answer) => {
                self.run(EngineInput::Prefill(answer), None, context);
            }
            PrefillEffect::Violation(violation) => self.violation(&violation),
            PrefillEffect::Control(_) => {}
        }
    }
}

impl Handler<Foreign<DecodeEffect>> for Instance {
    type Result = ();

    fn handle(&mut self, Foreign(effect): Foreign<DecodeEffect>, context: &mut Self::Context) {
        match effect {
            DecodeEffect::Job(job) => self.job(job),
            DecodeEffect::Answer(answer) => {
                self.run(EngineInput::Decode(answer), None, context);
            }
            DecodeEffect::Violation(violation) => self.violation(&violation),
            DecodeEffect::Control(_) => {}
        }
    }
}
