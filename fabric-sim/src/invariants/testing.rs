//! Short sequences of observations for unit tests: p0, p1 are instances 0 and 1, d0, d1 are 2 and
//! 3; all blocks are of group 0 and of rank 0.

use super::Invariants;
use crate::observation::{
    BlockRef, MemoryRange, Observation, ObservedLanding, SimProcessId, SimRankId, Submission,
};
use crate::testing::{run, two_and_two};
use kvferry_engine::core::dialect::native::{ConnectionHeader, Frame, VERSION};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{Attempt, ClientId, Incarnation, LegId, RequestId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    AttemptTag, DecodeAnswer, DecodeHook, DecodeLeg, Message, Mode, PrefillLeg, Registration, Role,
    ServedModels,
};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::router::{ClientAnswer, LegBody, LegEvent, PrefixEstimate};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, Direction, FabricError, Landed, OpId, Placement, QuiesceTicket, SessionId,
};
pub(super) use kvferry_scenarios::lists::InvariantId;
use kvferry_scenarios::run::{InstanceSettings, Run, WorkloadRequest};
use std::sync::Arc;

/// Hash of the prompt of all requests.
pub(super) const HASH: PromptHash = PromptHash([7, 7]);

pub(super) const P0: SimProcessId = SimProcessId { instance: 0, incarnation: 0 };
pub(super) const P1: SimProcessId = SimProcessId { instance: 1, incarnation: 0 };
pub(super) const D0: SimProcessId = SimProcessId { instance: 2, incarnation: 0 };
pub(super) const D1: SimProcessId = SimProcessId { instance: 3, incarnation: 0 };

/// Bytes of a block on a rank.
pub(super) const BLOCK: u64 = 1_024;

pub(super) fn request(name: &str) -> RequestId {
    name.into()
}

pub(super) fn key(name: &str) -> TransferKey {
    TransferKey { id: name.into(), prompt: 0 }
}

pub(super) fn tag(name: &str) -> AttemptTag {
    AttemptTag { key: key(name), sibling: 0, attempt: Attempt(1) }
}

pub(super) fn rank(who: SimProcessId) -> SimRankId {
    SimRankId { who, rank: 0 }
}

pub(super) fn refs(ids: &[u32]) -> Vec<BlockRef> {
    ids.iter().map(|block| BlockRef { group: 0, block: *block }).collect()
}

pub(super) fn done() -> Completion {
    Completion::Done
}

pub(super) fn failed(landed: Landed) -> Completion {
    Completion::Failed { cause: FabricError::AckTimeout, landed }
}

pub(super) fn recomputed() -> LegEvent {
    let reason = kvferry_engine::core::message::FinishReason::Length;
    LegEvent::Done { reason, recomputed: Some(Failure::PeerSilent) }
}

pub(super) fn finished() -> LegEvent {
    let reason = kvferry_engine::core::message::FinishReason::Length;
    LegEvent::Done { reason, recomputed: None }
}

pub(super) fn prefill_leg(name: &str, mode: Mode) -> PrefillLeg {
    PrefillLeg::new(key(name), mode)
}

pub(super) fn decode_leg(name: &str) -> DecodeLeg {
    let prefill = "p0".into();
    DecodeLeg {
        key: key(name),
        sibling: 0,
        mode: Mode::Push,
        prefill,
        control: "sim://p0".into(),
        incarnation: None,
        moriio: None,
    }
}

fn frame(seq: u64, message: Message) -> Frame {
    let (from, to) = (Incarnation(1), Incarnation(1));
    Frame::Data {
        envelope: ConnectionHeader { version: VERSION, from, to, session: 1 },
        seq,
        message,
    }
}

/// An instance's models: one.
pub(super) fn serves(model: &str) -> Option<Arc<ServedModels>> {
    Some(Arc::new(ServedModels { names: vec![model.into()], adapters: Vec::new() }))
}

/// A request without prompts that names a model.
pub(super) fn asks_for(model: &str) -> WorkloadRequest {
    WorkloadRequest {
        arrival: Nanos::ZERO,
        prompts: Vec::new(),
        samples: 1,
        output: 1,
        abort: None,
        stop: false,
        model: Some(model.into()),
        decode_rendering: None,
    }
}

/// One invariant and a clock.
pub(super) struct InvariantBench {
    invariants: Invariants,
    pub(super) now: Nanos,
    seq: u64,
    /// Of what is submitted.
    pub(super) session: SessionId,
    pub(super) fence_key: u64,
}

impl InvariantBench {
    pub(super) fn new(id: InvariantId) -> InvariantBench {
        InvariantBench::with(id, |_| ())
    }

    pub(super) fn with(id: InvariantId, change: impl Fn(&mut Run)) -> InvariantBench {
        let mut run = run(two_and_two(), Vec::new());
        run.expect.hold = vec![id];
        change(&mut run);
        let mut bench = InvariantBench {
            invariants: Invariants::new(&run),
            now: Nanos(1),
            seq: 0,
            session: SessionId(1),
            fence_key: 1,
        };
        for who in [P0, P1, D0, D1] {
            bench.start(who);
        }
        bench
    }

    pub(super) fn see(&mut self, seen: Observation<'_>) {
        self.now = self.now + Nanos(1);
        self.invariants.observe(self.now, &seen);
    }

    pub(super) fn pass(&mut self, span: Nanos) {
        self.now = self.now + span;
    }

    pub(super) fn finish(&mut self) {
        self.invariants.finish(self.now, true);
    }

    #[track_caller]
    pub(super) fn holds(&self) {
        assert_eq!(self.invariants.violations(), []);
    }

    #[track_caller]
    pub(super) fn fails(&self, part: &str) {
        let texts: Vec<_> = self.invariants.violations().into_iter().map(|v| v.text).collect();
        assert!(texts.len() == 1 && texts[0].contains(part), "{texts:?}");
    }

    /// Nothing is wrong, or this is.
    #[track_caller]
    pub(super) fn judges(&self, is_held: bool, part: &str) {
        match is_held {
            true => self.holds(),
            false => self.fails(part),
        }
    }

    pub(super) fn start(&mut self, who: SimProcessId) {
        self.start_as(who, |_| {});
    }

    /// With another shape than the instance had at first.
    pub(super) fn start_as(
        &mut self,
        who: SimProcessId,
        shape: impl FnOnce(&mut InstanceSettings),
    ) {
        let mut spec = two_and_two().swap_remove(usize::from(who.instance));
        spec.tp = 1;
        shape(&mut spec);
        self.see(Observation::Started { who, spec: &spec });
    }

    pub(super) fn crash(&mut self, who: SimProcessId) {
        self.see(Observation::Crashed { who });
    }

    pub(super) fn arrived(&mut self, who: SimProcessId, name: &str, tokens: u32) {
        let hook = &DecodeHook::Arrived {
            request: request(name),
            leg: decode_leg(name),
            tokens,
            prompt_hash: HASH,
        };
        self.see(Observation::DecodeHook { who, hook });
    }

    pub(super) fn taken(&mut self, who: SimProcessId, name: &str, ids: &[u32]) {
        let blocks = &[ids.to_vec()];
        self.see(Observation::Taken { who, request: &request(name), blocks });
    }

    pub(super) fn freed(&mut self, who: SimProcessId, name: &str, ids: &[u32]) {
        let blocks = &[ids.to_vec()];
        self.see(Observation::Freed { who, request: &request(name), blocks });
    }

    /// A decode request arrives, takes blocks and waits for them.
    pub(super) fn allocated(&mut self, who: SimProcessId, name: &str, tokens: u32, ids: &[u32]) {
        self.arrived(who, name, tokens);
        self.taken(who, name, ids);
        let blocks = vec![BlockList::new(ids.to_vec())];
        let hook = &DecodeHook::Allocated { request: request(name), computed: 0, blocks };
        self.see(Observation::DecodeHook { who, hook });
    }

    pub(super) fn send(&mut self, from: SimProcessId, to: SimProcessId, message: Message) {
        self.seq += 1;
        let frame = &frame(self.seq, message);
        self.see(Observation::FrameSent { from, to, frame });
    }

    /// D0 asks P0 for a prompt that D0 will read.
    pub(super) fn pull(&mut self, tag: AttemptTag, tokens: u32) {
        self.send(D0, P0, Message::Pull { tag, tokens, prompt_hash: HASH, verify: None });
    }

    pub(super) fn arrive(&mut self, from: SimProcessId, to: SimProcessId, message: Message) {
        let frame = &frame(1, message);
        self.see(Observation::FrameArrived { from, to, frame });
    }

    /// The router hears a registration.
    pub(super) fn hear(&mut self, from: SimProcessId, role: Role, incarnation: u64) {
        let name = format!("i{}", from.instance);
        let at = || name.as_str().into();
        let (incarnation, engine) = (Incarnation(incarnation), name.as_str().into());
        let said = Registration::new(engine, incarnation, role, Mode::Push, at(), at());
        let frame = &Frame::Register(said);
        let to = SimProcessId::ROUTER;
        self.see(Observation::FrameSent { from, to, frame });
        self.see(Observation::FrameArrived { from, to, frame });
    }

    pub(super) fn announced(&mut self, from: SimProcessId, to: SimProcessId, name: &str) {
        let blocks = Vec::new();
        self.send(
            from,
            to,
            Message::Announce { tag: tag(name), tokens: 32, from: 0, blocks, verify: None },
        );
    }

    pub(super) fn write(&mut self, from: SimProcessId, to: SimProcessId, op: u64, ids: &[u32]) {
        self.submit((from, to), op, Direction::Write, (ids, ids));
    }

    /// Local and remote blocks.
    pub(super) fn submit(
        &mut self,
        (from, to): (SimProcessId, SimProcessId),
        op: u64,
        direction: Direction,
        (local, remote): (&[u32], &[u32]),
    ) {
        let offset = |block: Option<&u32>| u64::from(block.copied().unwrap_or(0)) * BLOCK;
        let (begin, end) = (offset(local.iter().min()), offset(local.iter().max()) + BLOCK);
        self.see(Observation::Submitted(Submission {
            reach: MemoryRange { segment: 0, from: begin, to: end },
            remote_at: offset(remote.first()),
            bytes: local.len() as u64 * BLOCK,
            from: rank(from),
            peer: rank(to),
            op: OpId(op),
            session: self.session,
            fence_key: self.fence_key,
            direction,
            placement: Placement::OnCompletion,
            credits: 3,
            local: &refs(local),
            remote: &refs(remote),
        }));
    }

    pub(super) fn land(&mut self, from: SimProcessId, to: SimProcessId, op: u64, ids: &[u32]) {
        self.see(Observation::Landed(ObservedLanding {
            from: rank(from),
            op: OpId(op),
            source: rank(from),
            read: &refs(ids),
            target: rank(to),
            written: &refs(ids),
        }));
    }

    pub(super) fn land_read(
        &mut self,
        at: SimProcessId,
        of: SimProcessId,
        op: u64,
        remote: &[u32],
        own: &[u32],
    ) {
        self.see(Observation::Landed(ObservedLanding {
            from: rank(at),
            op: OpId(op),
            source: rank(of),
            read: &refs(remote),
            target: rank(at),
            written: &refs(own),
        }));
    }

    pub(super) fn complete(&mut self, from: SimProcessId, op: u64, outcome: &Completion) {
        self.see(Observation::Completed { from: rank(from), op: OpId(op), outcome });
    }

    pub(super) fn quiesce(
        &mut self,
        from: SimProcessId,
        session: SessionId,
        ticket: QuiesceTicket,
    ) {
        self.see(Observation::Quiesced { from: rank(from), session, ticket });
    }

    pub(super) fn quiet_now(
        &mut self,
        from: SimProcessId,
        session: SessionId,
        ticket: QuiesceTicket,
    ) {
        self.see(Observation::Quiet { from: rank(from), session, ticket });
    }

    pub(super) fn quiet(&mut self, from: SimProcessId, session: SessionId, ticket: QuiesceTicket) {
        self.quiesce(from, session, ticket);
        self.quiet_now(from, session, ticket);
    }

    pub(super) fn fence(&mut self, at: SimProcessId, peer: SimProcessId) {
        let fence_key = self.fence_key;
        self.see(Observation::Fenced { at: rank(at), peer: rank(peer), fence_key });
    }

    pub(super) fn loaded(&mut self, who: SimProcessId, name: &str) {
        let answer = &DecodeAnswer::Loaded { request: request(name) };
        self.see(Observation::DecodeAnswer { who, answer });
    }

    pub(super) fn load_failed(&mut self, who: SimProcessId, name: &str) {
        self.load_failed_by(who, name, Failure::PeerSilent);
    }

    pub(super) fn load_failed_by(&mut self, who: SimProcessId, name: &str, failure: Failure) {
        let answer = &DecodeAnswer::LoadFailed { request: request(name), failure };
        self.see(Observation::DecodeAnswer { who, answer });
    }

    pub(super) fn asked(&mut self, client: u64) {
        self.see(Observation::Asked { client: ClientId(client) });
    }

    pub(super) fn probed(&mut self, client: u64) {
        self.see(Observation::Probed { client: ClientId(client), pair: None });
    }

    /// Like [`InvariantBench::probed`], for one prefill and one decode.
    pub(super) fn probed_at(&mut self, client: u64, prefill: SimProcessId, decode: SimProcessId) {
        let pair = Some((prefill.instance, decode.instance));
        self.see(Observation::Probed { client: ClientId(client), pair });
    }

    pub(super) fn answered(&mut self, client: u64, answer: &ClientAnswer) {
        self.see(Observation::Answered { client: ClientId(client), answer });
    }

    pub(super) fn dispatched(&mut self, client: u64, leg: u64, who: SimProcessId, body: &LegBody) {
        self.dispatched_expecting((client, leg), who, body, 0);
    }

    /// A leg to the first life of an instance, of whose prompt so many tokens are expected to hit.
    pub(super) fn dispatched_expecting(
        &mut self,
        (client, leg): (u64, u64),
        who: SimProcessId,
        body: &LegBody,
        tokens: u32,
    ) {
        let (leg, client, instance) = (LegId(leg), ClientId(client), who.instance);
        let incarnation = Incarnation(u64::from(who.incarnation));
        let expected = PrefixEstimate { incarnation, tokens };
        self.see(Observation::Dispatched { leg, client, instance, body, expected });
    }

    pub(super) fn leg_taken(&mut self, who: SimProcessId, leg: u64, name: &str) {
        self.see(Observation::LegTaken { who, leg: LegId(leg), request: &request(name) });
    }

    pub(super) fn leg(&mut self, who: SimProcessId, leg: u64, event: &LegEvent) {
        self.see(Observation::Leg { who, leg: LegId(leg), event });
    }
}

pub(super) fn decode_body(name: &str) -> LegBody {
    LegBody::Decode { transfer: decode_leg(name), prompt: 0, sample: 0, output: 4, params: None }
}

pub(super) fn prefill_body(name: &str) -> LegBody {
    LegBody::Prefill { transfer: prefill_leg(name, Mode::Push), prompt: 0 }
}

pub(super) fn finished_answer(recomputed: bool) -> ClientAnswer {
    ClientAnswer::Finished { recomputed: recomputed.then_some(Failure::PeerSilent) }
}
