//! What HTTP is to the protocol actor of an instance, and it to HTTP: the stand-in engine, whose
//! steps it plays.

use super::kv_content::InstanceKv as Memory;
use super::metrics::{CauseLabels, InstanceMetrics};
use super::openai;
use crate::instance::{FailureNotice, TransferLog, log_refusal, log_router, log_violation};
use actix::{Addr, Context, Handler, Message};
use kvferry_engine::actors::{
    Clock, EffectHandler, InputQueue, InstanceBuilder, InstanceDriver, MailboxSender,
};
use kvferry_engine::core::decode::VerifyCounters;
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::{EngineId, LegId, RequestId, StepId};
use kvferry_engine::core::instance::{Instance, InstanceInput};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, FinishReason, PrefillAnswer, PrefillHook, RouterEvent, TransferJob,
    TransferReport,
};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::router::{LegBody, LegEvent, LegFailure};
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_scenarios::engine::{EngineEffect, EngineInput, PromptContent, SimEngine, StepPlan};
use opentelemetry::trace::SpanContext;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::Sender;

/// What the caller of a leg is told; at most [`NEWS_MAX`] each.
#[derive(Debug)]
pub(super) enum LegReply {
    /// A decode has its first token.
    First(openai::KvReport),
    /// The leg ended well. A prefill says which blocks have the KV.
    Done(openai::KvReport, Vec<BlockList>),
    Failed(LegFailure),
}

/// Room for all news of a leg.
pub(super) const NEWS_MAX: usize = 4;

/// The actor: the machines of the instance, their planes, and the server.
pub(super) type InstanceActor = InstanceDriver<InstanceServer>;

/// Legs that may wait for the actor; further ones are refused as busy.
pub(super) const MAILBOX: usize = 1_024;

/// A leg arrived by HTTP.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct StartLeg {
    pub(super) leg: LegId,
    pub(super) request: RequestId,
    pub(super) prompt: PromptContent,
    /// Hash of the prompt's token ids.
    pub(super) prompt_hash: PromptHash,
    pub(super) body: LegBody,
    /// The span that its transfer is part of.
    pub(super) parent: Option<SpanContext>,
    pub(super) replies: Sender<LegReply>,
}

/// The caller of a leg went away.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct CancelLeg(pub(super) LegId);

/// The next layer of a step can be computed.
#[derive(Message)]
#[rtype(result = "()")]
struct NextLayer(StepPlan, u16);

/// A step is over.
#[derive(Message)]
#[rtype(result = "()")]
struct StepFinished(StepId);

/// Registers as draining from now on.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct DrainInstance;

struct ServedLeg {
    content: PromptContent,
    prompt_hash: PromptHash,
    replies: Sender<LegReply>,
    request: Option<RequestId>,
    blocks: Vec<BlockList>,
    /// Of the prompt's KV as a prefill computes it; made when it is first wanted.
    expected: Option<String>,
    /// Of what was found, if it was transferred.
    digest: Option<String>,
    /// Of a decode: who has its KV.
    peer: Option<EngineId>,
}

impl ServedLeg {
    fn expected(&mut self, memory: &Memory) -> &String {
        let make = || memory.expected(&self.content, self.content.tokens);
        self.expected.get_or_insert_with(make)
    }

    fn kv(&mut self, memory: &Memory, failure: Option<&Failure>) -> openai::KvReport {
        let failed = failure.map(|failure| FailureNotice::new(failure, self.peer.as_ref()));
        let expected = self.expected(memory).clone();
        let (digest, source) = match &self.digest {
            Some(digest) => (digest.clone(), "transferred"),
            None => (expected.clone(), "computed"),
        };
        openai::KvReport { digest, expected, source, failed }
    }
}

/// What a server is started with.
pub(super) struct ServerParts {
    pub(super) engine: SimEngine,
    pub(super) memory: Memory,
    pub(super) clock: Clock,
    pub(super) layers: u16,
    pub(super) ranks: u16,
    pub(super) metrics: InstanceMetrics,
    /// If transfers are traced.
    pub(super) transfers: Option<TransferLog>,
}

/// The server. It sends itself one message per step under way, and each leg one when its caller
/// goes.
pub(super) struct InstanceServer {
    parts: ServerParts,
    own: Addr<InstanceActor>,
    legs: BTreeMap<LegId, ServedLeg>,
    requests: BTreeMap<RequestId, LegId>,
    out: Outbox<EngineEffect>,
}

impl InstanceServer {
    /// Starts the actor of an instance.
    pub(super) fn start(
        parts: ServerParts,
        instance: InstanceBuilder,
    ) -> MailboxSender<InstanceActor> {
        let instance = instance.with_clock(parts.clock.clone());
        let actor = instance.start(|own| {
            let (legs, requests) = (BTreeMap::new(), BTreeMap::new());
            InstanceServer { parts, own, legs, requests, out: Outbox::new() }
        });
        MailboxSender::new(actor, MAILBOX)
    }

    fn trace(&mut self, watch: impl FnOnce(&mut TransferLog, Nanos)) {
        if let Some(transfers) = &mut self.parts.transfers {
            watch(transfers, (self.parts.clock)());
        }
    }

    fn run(&mut self, input: EngineInput, starting: Option<LegId>, out: &mut InputQueue<Instance>) {
        let now = (self.parts.clock)();
        self.parts.engine.handle(now, input, &mut self.out);
        for effect in self.out.take() {
            match effect {
                EngineEffect::Prefill(hook) => self.on_prefill(hook, starting, out),
                EngineEffect::Decode(mut hook) => {
                    self.trace(|transfers, now| _ = transfers.decode(now, &hook));
                    if let (Some(leg), DecodeHook::Arrived { request, prompt_hash, .. }) =
                        (starting, &mut hook)
                    {
                        self.named(leg, request, prompt_hash);
                    }
                    out.push_back(InstanceInput::Decode(hook));
                }
                EngineEffect::Step(plan) => self.layer(plan, 0, out),
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
        self.parts.metrics.remembered.set(gauges.failures.into());
    }

    /// The stand-in engine has named the request of a leg. The engine knows no token ids, so the
    /// hash in the leg's state replaces the one that it sent.
    fn named(&mut self, leg: LegId, request: &RequestId, prompt_hash: &mut PromptHash) {
        self.requests.insert(request.clone(), leg);
        if let Some(leg) = self.legs.get_mut(&leg) {
            leg.request = Some(request.clone());
            *prompt_hash = leg.prompt_hash;
        }
    }

    fn on_prefill(
        &mut self,
        mut hook: PrefillHook,
        starting: Option<LegId>,
        out: &mut InputQueue<Instance>,
    ) {
        self.trace(|transfers, now| transfers.prefill(now, &hook));
        match (&mut hook, starting) {
            (PrefillHook::Arrived { request, prompt_hash, .. }, Some(leg)) => {
                self.named(leg, request, prompt_hash);
            }
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
        out.push_back(InstanceInput::Prefill(hook));
    }

    /// Computes a layer, and the next one after the machines had their turn: they move this one.
    fn layer(&mut self, plan: StepPlan, layer: u16, out: &mut InputQueue<Instance>) {
        let own = self.own.clone();
        if layer == self.parts.layers {
            let (step, wait) = (plan.step, Duration::from_nanos(plan.duration.0));
            let _detached = actix::spawn(async move {
                tokio::time::sleep(wait).await;
                own.do_send(StepFinished(step));
            });
            return;
        }
        for compute in &plan.computes {
            let range = compute.from..compute.to.min(compute.content.tokens);
            self.parts.memory.compute(layer, &compute.content, range, &compute.blocks);
        }
        let (step, layers) = (plan.step, layer + 1);
        let computed = |rank| InstanceInput::Layers { rank, step, layers };
        out.extend((0..self.parts.ranks).map(computed));
        own.do_send(NextLayer(plan, layers));
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
            LegEvent::FirstToken => LegReply::First(leg.kv(memory, None)),
            // Only a router that relays a prefill's answer says so.
            LegEvent::Prefilled { .. } => return,
            LegEvent::Done { reason: FinishReason::Length | FinishReason::Stop, recomputed } => {
                if let Some(failure) = &recomputed {
                    let cause = failure.kind();
                    metrics.recomputed.get_or_create(&CauseLabels { cause }).inc();
                }
                let transferred = leg.digest.is_some();
                let which = if transferred { &metrics.transferred } else { &metrics.computed };
                which.inc();
                metrics.finished.inc();
                LegReply::Done(leg.kv(memory, recomputed.as_ref()), leg.blocks.clone())
            }
            LegEvent::Done { reason, .. } => {
                metrics.failed.inc();
                LegReply::Failed(LegFailure::Request(format!("ended: {reason:?}").into()))
            }
            LegEvent::Failed(failure) => {
                metrics.failed.inc();
                tracing::warn!(request = leg.request.as_ref().map(|id| &*id.0), %failure, "leg");
                LegReply::Failed(failure)
            }
        };
        let last = !matches!(news, LegReply::First(_));
        // There is room for all; who does not listen has gone.
        let _ = leg.replies.try_send(news);
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
}

/// Whose KV a leg is to get.
pub(super) fn peer(body: &LegBody) -> Option<EngineId> {
    match body {
        LegBody::Prefill { .. } => None,
        LegBody::Decode { transfer, .. } => Some(transfer.prefill.clone()),
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

impl EffectHandler for InstanceServer {
    fn prefill(&mut self, answer: PrefillAnswer, out: &mut InputQueue<Instance>) {
        self.trace(|transfers, now| _ = transfers.prefill_answer(now, &answer));
        self.run(EngineInput::Prefill(answer), None, out);
    }

    fn decode(&mut self, answer: DecodeAnswer, out: &mut InputQueue<Instance>) {
        self.trace(|transfers, now| _ = transfers.decode_answer(now, &answer));
        self.run(EngineInput::Decode(answer), None, out);
    }

    fn job(&mut self, job: &TransferJob) {
        self.trace(|transfers, now| transfers.job(now, job));
        if matches!(job, TransferJob::Write { .. } | TransferJob::Read { .. }) {
            self.parts.metrics.flows.inc();
        }
    }

    fn report(&mut self, _: u16, report: &TransferReport) {
        self.trace(|transfers, now| transfers.report(now, report));
    }

    fn speaks_moriio(&mut self, request: &RequestId) {
        self.trace(|transfers, _| transfers.speaks_moriio(request));
    }

    fn router(&mut self, news: &RouterEvent) {
        let is_there = matches!(news, RouterEvent::Registered { .. });
        self.parts.metrics.registered.set(i64::from(is_there));
        log_router(news);
    }

    fn ended(&mut self, instance: &Instance) {
        let VerifyCounters { blocks, mismatches } = instance.verified();
        self.parts.metrics.verified.inner().store(blocks, Ordering::Relaxed);
        self.parts.metrics.mismatches.inner().store(mismatches, Ordering::Relaxed);
    }

    fn violation(&mut self, violation: &PeerViolation) {
        self.parts.metrics.violations.inc();
        log_violation(violation);
    }

    fn refused(&mut self, peer: &EngineId, failure: &Failure) {
        log_refusal(peer, failure);
    }
}

impl Handler<StartLeg> for InstanceActor {
    type Result = ();

    fn handle(&mut self, start: StartLeg, context: &mut Context<Self>) {
        let StartLeg { leg, request, prompt, prompt_hash, body, parent, replies: news } = start;
        let (content, blocks) = (prompt.clone(), Vec::new());
        let peer = peer(&body);
        let (expected, digest) = (None, None);
        let entry = ServedLeg {
            content,
            prompt_hash,
            replies: news,
            request: None,
            blocks,
            expected,
            digest,
            peer,
        };
        self.with_adapter(context, |site, out| {
            let server = &mut site.outlet;
            server.legs.insert(leg, entry);
            server.parts.metrics.legs.inc();
            server.parts.metrics.open.inc();
            server.trace(|transfers, _| transfers.set_parent(|| parent));
            let input = EngineInput::Leg { leg, request, prompt, body, stop: false };
            server.run(input, Some(leg), out);
        });
    }
}

impl Handler<CancelLeg> for InstanceActor {
    type Result = ();

    fn handle(&mut self, CancelLeg(leg): CancelLeg, context: &mut Context<Self>) {
        self.with_adapter(context, |site, out| {
            if site.outlet.legs.contains_key(&leg) {
                site.outlet.run(EngineInput::CancelLeg { leg }, None, out);
                site.outlet.forget(leg);
            }
        });
    }
}

impl Handler<NextLayer> for InstanceActor {
    type Result = ();

    fn handle(&mut self, NextLayer(plan, layer): NextLayer, context: &mut Context<Self>) {
        self.with_adapter(context, |site, out| site.outlet.layer(plan, layer, out));
    }
}

impl Handler<StepFinished> for InstanceActor {
    type Result = ();

    fn handle(&mut self, StepFinished(step): StepFinished, context: &mut Context<Self>) {
        self.with_adapter(context, |site, out| {
            site.outlet.run(EngineInput::StepDone { step }, None, out)
        });
    }
}

impl Handler<DrainInstance> for InstanceActor {
    type Result = ();

    fn handle(&mut self, _: DrainInstance, context: &mut Context<Self>) {
        self.with_adapter(context, |_, out| out.push_back(InstanceInput::Drain));
    }
}
