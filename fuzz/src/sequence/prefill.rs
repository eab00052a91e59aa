//! A prefill engine that keeps to the contract of the hooks.

use super::frames;
use super::world::{FuzzCoreEffect, FuzzCoreInput, FuzzEngine, moriio_peer};
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::ids::{Incarnation, RequestId, StepId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    Chunk, FinishReason, Mode, PrefillAnswer, PrefillHook, PrefillLeg, Role,
};
use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};

#[derive(Debug)]
struct FuzzPrefillRequest {
    id: RequestId,
    tokens: u32,
    /// Tokens that are computed.
    to: u32,
    finished: bool,
    freed: bool,
    /// Preemptions that are not safe yet.
    unsafe_yet: u32,
}

/// Requests by arrival.
#[derive(Debug, Default)]
pub(super) struct PrefillEngine {
    requests: Vec<FuzzPrefillRequest>,
    arrived: u32,
    steps: u64,
}

const REQUESTS_MAX: usize = 10;

impl PrefillEngine {
    fn arrive(&mut self, mode: Mode, which: u8, size: u8) -> Option<PrefillHook> {
        if self.requests.len() >= REQUESTS_MAX {
            return None;
        }
        self.arrived += 1;
        let id = RequestId::from(format!("p{}", self.arrived));
        let tokens = u32::from(size % 128) + 1;
        let leg = PrefillLeg {
            key: TransferKey { id: frames::transfer(which), prompt: 0 },
            siblings: 1 + u32::from(size % 3),
            mode,
            incarnation: [None, Some(frames::OWN.1), Some(Incarnation(4))]
                [usize::from(which / 32 % 3)],
            moriio: (which >= 128).then(|| moriio_peer(mode == Mode::Push, Vec::new())),
        };
        let request = FuzzPrefillRequest {
            id: id.clone(),
            tokens,
            to: 0,
            finished: false,
            freed: false,
            unsafe_yet: 0,
        };
        self.requests.push(request);
        Some(PrefillHook::Arrived { request: id, leg, tokens, prompt_hash: frames::PROMPT_HASH })
    }

    /// One of the requests that are not finished.
    fn live(&mut self, which: u8) -> Option<&mut FuzzPrefillRequest> {
        let mut live: Vec<_> = self.requests.iter_mut().filter(|one| !one.finished).collect();
        let at = usize::from(which) % live.len().max(1);
        (at < live.len()).then(|| live.swap_remove(at))
    }

    fn schedule(&mut self, which: u8, size: u8) -> Option<PrefillHook> {
        let step = StepId(self.steps + 1);
        let request = self.live(which)?;
        let from = request.to;
        let to = request.tokens.min(from + u32::from(size) + 1);
        if from == to {
            return None;
        }
        request.to = to;
        let [have, need] = [from, to].map(|tokens| tokens.div_ceil(frames::BLOCK_TOKENS));
        let blocks = vec![BlockList { first: have, ids: (have..need).collect() }];
        let chunk = Chunk { request: request.id.clone(), from, to, blocks };
        self.steps += 1;
        Some(PrefillHook::Scheduled { step, chunks: vec![chunk] })
    }

    fn settle(&mut self, id: &RequestId) {
        self.requests.retain(|one| one.id != *id || !one.freed || one.unsafe_yet > 0);
    }

    fn named(&mut self, id: &RequestId) -> &mut FuzzPrefillRequest {
        let found = self.requests.iter_mut().find(|one| one.id == *id);
        found.unwrap_or_else(|| panic!("an answer for {id}, which has all of its answers"))
    }
}

impl FuzzEngine for PrefillEngine {
    type Core = Prefill;
    type Hook = PrefillHook;
    type Answer = PrefillAnswer;
    const ROLE: Role = Role::Prefill;

    fn core(config: CoreConfig) -> Prefill {
        Prefill::new(config)
    }

    fn input(told: FuzzCoreInput<PrefillHook>) -> PrefillInput {
        match told {
            FuzzCoreInput::Control(event) => PrefillInput::Control(event),
            FuzzCoreInput::Report(report) => PrefillInput::Report { rank: 0, report },
            FuzzCoreInput::Hook(hook) => PrefillInput::Hook(hook),
            FuzzCoreInput::Drain => PrefillInput::Drain,
            FuzzCoreInput::Tick => PrefillInput::Tick,
        }
    }

    fn want(effect: PrefillEffect) -> FuzzCoreEffect<PrefillAnswer> {
        match effect {
            PrefillEffect::Control(command) => FuzzCoreEffect::Control(command),
            PrefillEffect::Job(job) => FuzzCoreEffect::Job(job),
            PrefillEffect::Answer(answer) => FuzzCoreEffect::Answer(answer),
            PrefillEffect::Violation(_)
            | PrefillEffect::Refused { .. }
            | PrefillEffect::SpeaksMoriio { .. }
            | PrefillEffect::Directory(_)
            | PrefillEffect::Router(_) => FuzzCoreEffect::Nothing,
        }
    }

    fn hook(&mut self, mode: Mode, what: u8, which: u8, size: u8) -> Option<PrefillHook> {
        match what % 5 {
            0 => self.arrive(mode, which, size),
            1 | 2 => self.schedule(which, size),
            3 => {
                let request = self.live(which)?;
                request.finished = true;
                let whole = request.to == request.tokens && size < 224;
                let reason = if whole { FinishReason::Length } else { FinishReason::Aborted };
                Some(PrefillHook::Finished { request: request.id.clone(), reason })
            }
            _ => {
                let request = self.live(which).filter(|one| one.to > 0)?;
                request.to = 0;
                request.unsafe_yet += 1;
                Some(PrefillHook::Preempted { request: request.id.clone() })
            }
        }
    }

    fn hear(&mut self, answer: PrefillAnswer) {
        match answer {
            PrefillAnswer::SourceFree { request, .. } => {
                let one = self.named(&request);
                assert!(one.finished && !one.freed, "{one:?} is free");
                one.freed = true;
                self.settle(&request);
            }
            PrefillAnswer::PreemptionSafe { request } => {
                let one = self.named(&request);
                assert!(one.unsafe_yet > 0, "{one:?} is safe");
                one.unsafe_yet -= 1;
                self.settle(&request);
            }
            PrefillAnswer::Rejected { request, .. } => {
                let one = self.named(&request);
                assert!(!one.freed && one.unsafe_yet == 0, "{one:?} is rejected");
                self.requests.retain(|one| one.id != request);
            }
        }
    }

    fn finish(&mut self) -> Option<PrefillHook> {
        self.hook(Mode::Push, 3, 0, 255)
    }

    fn check_settled(&self) {
        assert!(self.requests.is_empty(), "wait for an answer: {:?}", self.requests);
    }
}
