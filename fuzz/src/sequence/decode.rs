//! A decode engine that keeps to the contract of the hooks.

use super::frames;
use super::world::{FuzzCoreEffect, FuzzCoreInput, FuzzEngine, moriio_peer};
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use kvferry_engine::core::ids::{Incarnation, RequestId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, DecodeLeg, FinishReason, Mode, Role,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FuzzRequestPhase {
    Waiting,
    /// Has blocks, and an answer is due.
    Loading,
    Loaded,
}

#[derive(Debug)]
struct FuzzDecodeRequest {
    id: RequestId,
    tokens: u32,
    blocks: Vec<u32>,
    phase: FuzzRequestPhase,
    /// It was told to allocate.
    told: bool,
    finished: bool,
}

/// Requests by arrival, and blocks that nobody has.
#[derive(Debug)]
pub(super) struct DecodeEngine {
    requests: Vec<FuzzDecodeRequest>,
    free: Vec<u32>,
    arrived: u32,
}

impl Default for DecodeEngine {
    fn default() -> Self {
        DecodeEngine { requests: Vec::new(), free: (0..frames::BLOCKS).collect(), arrived: 0 }
    }
}

const REQUESTS_MAX: usize = 10;

impl DecodeEngine {
    fn arrive(&mut self, mode: Mode, which: u8, size: u8) -> Option<DecodeHook> {
        if self.requests.len() >= REQUESTS_MAX {
            return None;
        }
        self.arrived += 1;
        let id = RequestId::from(format!("d{}", self.arrived));
        let tokens = u32::from(size % 128) + 1;
        let all = (0..tokens.div_ceil(frames::BLOCK_TOKENS)).collect();
        let blocks = if mode == Mode::Pull { vec![BlockList::new(all)] } else { Vec::new() };
        let leg = DecodeLeg {
            key: TransferKey { id: frames::transfer(which), prompt: 0 },
            sibling: u32::from(size % 2),
            mode,
            prefill: if which % 16 == 15 { "peer-1" } else { "peer-0" }.into(),
            control: "tcp://10.0.0.9:6301".into(),
            incarnation: [None, Some(Incarnation(7)), Some(Incarnation(4))]
                [usize::from(which / 32 % 3)],
            moriio: (which >= 128).then(|| moriio_peer(true, blocks)),
        };
        self.requests.push(FuzzDecodeRequest {
            id: id.clone(),
            tokens,
            blocks: Vec::new(),
            phase: FuzzRequestPhase::Waiting,
            told: false,
            finished: false,
        });
        Some(DecodeHook::Arrived { request: id, leg, tokens, prompt_hash: frames::PROMPT_HASH })
    }

    /// One of the requests that are not finished and `fit`.
    fn live(&mut self, which: u8, fit: impl Fn(&FuzzDecodeRequest) -> bool) -> Option<usize> {
        let live = self.requests.iter().enumerate();
        let live: Vec<_> = live.filter(|(_, one)| !one.finished && fit(one)).collect();
        live.get(usize::from(which) % live.len().max(1)).map(|(at, _)| *at)
    }

    fn allocate(&mut self, which: u8, size: u8) -> Option<DecodeHook> {
        let at = self.live(which, |one| one.phase == FuzzRequestPhase::Waiting)?;
        let request = &mut self.requests[at];
        let count = request.tokens.div_ceil(frames::BLOCK_TOKENS) as usize;
        let rest = self.free.len().checked_sub(count)?;
        request.blocks = self.free.split_off(rest);
        request.phase = FuzzRequestPhase::Loading;
        let hits = u32::from(size % 16).saturating_sub(7) * frames::BLOCK_TOKENS;
        Some(DecodeHook::Allocated {
            request: request.id.clone(),
            computed: hits.min(request.tokens),
            blocks: vec![BlockList::new(request.blocks.clone())],
        })
    }

    fn end(&mut self, which: u8) -> Option<DecodeHook> {
        let at = self.live(which, |_| true)?;
        let request = &mut self.requests[at];
        request.finished = true;
        let id = request.id.clone();
        // Only who loads is owed an answer.
        if request.phase != FuzzRequestPhase::Loading {
            self.remove(at);
        }
        Some(DecodeHook::Finished { request: id, reason: FinishReason::Aborted })
    }

    fn remove(&mut self, at: usize) {
        let request = self.requests.remove(at);
        self.free.extend(request.blocks);
    }
}

impl FuzzEngine for DecodeEngine {
    type Core = Decode;
    type Hook = DecodeHook;
    type Answer = DecodeAnswer;
    const ROLE: Role = Role::Decode;

    fn core(config: CoreConfig) -> Decode {
        Decode::new(config)
    }

    fn input(told: FuzzCoreInput<DecodeHook>) -> DecodeInput {
        match told {
            FuzzCoreInput::Control(event) => DecodeInput::Control(event),
            FuzzCoreInput::Report(report) => DecodeInput::Report { rank: 0, report },
            FuzzCoreInput::Hook(hook) => DecodeInput::Hook(hook),
            FuzzCoreInput::Drain => DecodeInput::Drain,
            FuzzCoreInput::Tick => DecodeInput::Tick,
        }
    }

    fn want(effect: DecodeEffect) -> FuzzCoreEffect<DecodeAnswer> {
        match effect {
            DecodeEffect::Control(command) => FuzzCoreEffect::Control(command),
            DecodeEffect::Job(job) => FuzzCoreEffect::Job(job),
            DecodeEffect::Answer(answer) => FuzzCoreEffect::Answer(answer),
            DecodeEffect::Violation(_)
            | DecodeEffect::Refused { .. }
            | DecodeEffect::SpeaksMoriio { .. }
            | DecodeEffect::Directory(_)
            | DecodeEffect::Router(_) => FuzzCoreEffect::Nothing,
        }
    }

    fn hook(&mut self, mode: Mode, what: u8, which: u8, size: u8) -> Option<DecodeHook> {
        match what % 5 {
            0 | 1 => self.arrive(mode, which, size),
            2 | 3 => self.allocate(which, size),
            _ => self.end(which),
        }
    }

    fn hear(&mut self, answer: DecodeAnswer) {
        let found = self.requests.iter().position(|one| one.id == *answer.request());
        let Some(at) = found else { panic!("{answer:?}, which has all of its answers") };
        let one = &mut self.requests[at];
        let right = match &answer {
            DecodeAnswer::Allocate { .. } => !std::mem::replace(&mut one.told, true),
            DecodeAnswer::Loaded { .. } | DecodeAnswer::LoadFailed { .. } => {
                one.phase == FuzzRequestPhase::Loading
            }
            DecodeAnswer::Rejected { .. } => one.phase != FuzzRequestPhase::Loaded,
        };
        assert!(right, "{answer:?} to {one:?}");
        match answer {
            DecodeAnswer::Allocate { .. } => {}
            DecodeAnswer::Loaded { .. } if !one.finished => one.phase = FuzzRequestPhase::Loaded,
            _ => self.remove(at),
        }
    }

    fn finish(&mut self) -> Option<DecodeHook> {
        self.end(0)
    }

    fn check_settled(&self) {
        assert!(self.requests.is_empty(), "wait for an answer: {:?}", self.requests);
    }
}
