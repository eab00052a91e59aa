//! A prefill and a decode engine with their transfer actors, joined by planes that move no bytes:
//! just enough world to see what the machines say to each other and to their engines.

mod counts;
mod planes;
mod setup;

use counts::WorldCounts;
pub(crate) use planes::{Damage, Moment, PlaneBytes, RankId};
use setup::KvCache;
pub(crate) use setup::{BLOCK, HASH, LAYERS, actor, caps, core_config, layers};

use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::command::{ControlCommand, DataRefusal};
use kvferry_engine::core::config::{CoreConfig, CoreSettings};
use kvferry_engine::core::decode::{Decode, DecodeEffect, DecodeInput, VerifyCounters};
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::{EngineId, Incarnation, StepId};
use kvferry_engine::core::layout::Slices;
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::message::{
    DecodeAnswer, Mode, PrefillAnswer, Role, TransferJob, TransferReport,
};
use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use kvferry_engine::core::transfer::{Transfer, TransferEffect, TransferInput, TransferSettings};
use kvferry_engine::core::verify::Verify;
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::*;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Speaker {
    Prefill,
    Decode,
    Rank(Role, u16),
}

#[derive(Clone, Debug)]
enum PairInput {
    Prefill(PrefillInput),
    Decode(DecodeInput),
    Transfer(TransferInput),
    /// What a recorded peer says once the other has said this many messages.
    Recorded(usize, Vec<u8>),
}

/// What becomes of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OpResult {
    Done,
    Fails(FabricError, Landed),
    Silent,
}

type DigestScript = Box<dyn FnMut(Role, u64) -> Result<u64, FabricError>>;
type OpScript = Box<dyn FnMut(u64) -> OpResult>;
type FrameFilter = Box<dyn FnMut(Speaker) -> bool>;
/// What arrives of a frame that somebody sent.
type Alter = Box<dyn FnMut(Speaker, Vec<u8>) -> Vec<Vec<u8>>>;

pub(crate) struct PairWorld {
    pub(crate) now: Nanos,
    prefill: Option<Prefill>,
    decode: Option<Decode>,
    caps: Caps,
    settings: TransferSettings,
    /// Regions are described in MoRI's words, which peers that speak MoRIIO need.
    describes: bool,
    /// KV caches, of engines that do not have the usual one.
    kv: BTreeMap<Role, KvCache>,
    ranks: BTreeMap<(Role, u16), Transfer>,
    queue: BTreeMap<(Nanos, u64), (Speaker, PairInput)>,
    sequence: u64,
    /// Per rank: operations in flight by session, and tickets that wait for them.
    flying: BTreeMap<(Role, u16, SessionId), Vec<OpId>>,
    tickets: Vec<(Role, u16, SessionId, QuiesceTicket)>,
    /// Per rank: what is in flight; and of it, each operation.
    used: BTreeMap<(Role, u16), Credits>,
    credits: BTreeMap<(Role, u16, OpId), Credits>,
    counts: WorldCounts,
    links: BTreeMap<LinkId, LinkId>,
    pub(crate) op_fate: OpScript,
    /// Microseconds that an operation takes beside what its rank has in flight.
    pub(crate) op_us: Box<dyn FnMut(Credits, Credits) -> u64>,
    /// Microseconds until a session is open, and how many were opened.
    pub(crate) opens: (u64, u64),
    /// Microseconds from the last operation of a session to its `Quiet`.
    pub(crate) quiet_us: u64,
    /// Operations that the planes take at a time, whatever their capabilities say.
    pub(crate) credit: usize,
    /// Memory, in tests that look at bytes.
    pub(crate) bytes: PlaneBytes,
    /// What a plane without memory makes of the seed of a digest: bytes are the same everywhere.
    pub(crate) digests: DigestScript,
    /// Microseconds that a digest takes.
    pub(crate) digest_us: u64,
    pub(crate) frame_passes: FrameFilter,
    pub(crate) alter: Alter,
    /// All frames that were sent, and when.
    pub(crate) frames: Vec<(Nanos, Speaker, Vec<u8>)>,
    /// Frames that broke the protocol, where a test expects any.
    pub(crate) violations: Option<Vec<PeerViolation>>,
    /// Hellos that the prefill refused.
    pub(crate) turned_away: Vec<(EngineId, Failure)>,
    pub(crate) ops: u64,
    /// How many of them were refused.
    pub(crate) refused: u64,
    /// How often the operation was posted that begins at this offset of its initiator's region.
    pub(crate) posted: BTreeMap<u64, u32>,
    /// Ranges of all operations.
    pub(crate) moved: Vec<Slices>,
    pub(crate) prefill_said: Vec<PrefillAnswer>,
    pub(crate) decode_said: Vec<DecodeAnswer>,
}

impl PairWorld {
    pub(crate) fn new(mode: Mode, prefill_tp: u16, decode_tp: u16) -> PairWorld {
        PairWorld::with(mode, prefill_tp, decode_tp, &CoreSettings::default())
    }

    /// One rank each, over planes that can do `caps`.
    pub(crate) fn over(caps: Caps, mode: Mode, settings: TransferSettings) -> PairWorld {
        PairWorld::build(mode, (1, 1), &CoreSettings::default(), caps, settings)
    }

    pub(crate) fn with(
        mode: Mode,
        prefill_tp: u16,
        decode_tp: u16,
        settings: &CoreSettings,
    ) -> PairWorld {
        let tp = (prefill_tp, decode_tp);
        PairWorld::build(mode, tp, settings, caps(), TransferSettings::default())
    }

    fn build(
        mode: Mode,
        (prefill_tp, decode_tp): (u16, u16),
        core: &CoreSettings,
        caps: Caps,
        settings: TransferSettings,
    ) -> PairWorld {
        let core = |role, tp| core_config(role, mode, tp, core);
        let (prefill, decode) = (core(Role::Prefill, prefill_tp), core(Role::Decode, decode_tp));
        PairWorld::of(prefill, decode, caps, settings)
    }

    /// A prefill and a decode that verify as much of the KV as they are told.
    pub(crate) fn verifying(
        mode: Mode,
        (prefill_tp, decode_tp): (u16, u16),
        (prefill, decode): (Verify, Verify),
    ) -> PairWorld {
        let core = |role, tp, verify| CoreConfig {
            verify,
            ..core_config(role, mode, tp, &CoreSettings::default())
        };
        let (prefill, decode) =
            (core(Role::Prefill, prefill_tp, prefill), core(Role::Decode, decode_tp, decode));
        PairWorld::of(prefill, decode, caps(), TransferSettings::default())
    }

    /// Two engines of one rank each that are set up differently.
    pub(crate) fn unequal(
        mode: Mode,
        prefill: (&CoreSettings, &ChannelConfig),
        decode: (&CoreSettings, &ChannelConfig),
    ) -> PairWorld {
        let core = |role, (settings, channel): (_, &ChannelConfig)| CoreConfig {
            channel: channel.clone(),
            ..core_config(role, mode, 1, settings)
        };
        let (prefill, decode) = (core(Role::Prefill, prefill), core(Role::Decode, decode));
        PairWorld::of(prefill, decode, caps(), TransferSettings::default())
    }

    fn of(
        prefill: CoreConfig,
        decode: CoreConfig,
        caps: Caps,
        settings: TransferSettings,
    ) -> PairWorld {
        PairWorld::start((prefill, decode), caps, settings, BTreeMap::new())
    }

    fn start(
        (prefill, decode): (CoreConfig, CoreConfig),
        caps: Caps,
        settings: TransferSettings,
        kv: BTreeMap<Role, KvCache>,
    ) -> PairWorld {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let (mode, describes) = (prefill.mode, prefill.moriio.is_some());
        let (prefill_tp, decode_tp) = (prefill.geometry.tp, decode.geometry.tp);
        let mut pair = PairWorld {
            now: Nanos::ZERO,
            prefill: Some(Prefill::new(prefill)),
            decode: Some(Decode::new(decode)),
            caps,
            settings,
            describes,
            kv,
            ranks: BTreeMap::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            flying: BTreeMap::new(),
            tickets: Vec::new(),
            links: BTreeMap::new(),
            op_fate: Box::new(|_| OpResult::Done),
            op_us: Box::new(|_, _| 20),
            opens: (500, 0),
            quiet_us: 10,
            credit: usize::MAX,
            bytes: PlaneBytes::default(),
            digests: Box::new(|_, seed| Ok(seed)),
            digest_us: 5,
            frame_passes: Box::new(|_| true),
            alter: Box::new(|_, frame| vec![frame]),
            frames: Vec::new(),
            violations: None,
            turned_away: Vec::new(),
            ops: 0,
            refused: 0,
            used: BTreeMap::new(),
            credits: BTreeMap::new(),
            counts: WorldCounts::default(),
            posted: BTreeMap::new(),
            moved: Vec::new(),
            prefill_said: Vec::new(),
            decode_said: Vec::new(),
        };
        pair.start_ranks(Role::Prefill, mode, prefill_tp);
        pair.start_ranks(Role::Decode, mode, decode_tp);
        pair.run(Nanos::from_ms(1));
        pair
    }

    fn start_ranks(&mut self, role: Role, mode: Mode, tp: u16) {
        for rank in 0..tp {
            let mut config = actor(role, mode, tp, rank, self.caps);
            config.settings = self.settings.clone();
            if let Some((geometry, layers)) = self.kv.get(&role).cloned() {
                (config.geometry, config.layers) = (geometry.into(), layers);
            }
            let transfer = Transfer::new(config);
            self.ranks.insert((role, rank), transfer);
            self.after(0, Speaker::Rank(role, rank), PairInput::Transfer(TransferInput::Start));
        }
    }

    fn after(&mut self, us: u64, who: Speaker, input: PairInput) {
        self.sequence += 1;
        self.queue.insert((self.now + Nanos::from_us(us), self.sequence), (who, input));
    }

    pub(crate) fn prefill(&mut self, input: PrefillInput) {
        self.after(0, Speaker::Prefill, PairInput::Prefill(input));
        self.run(self.now);
    }

    pub(crate) fn decode(&mut self, input: DecodeInput) {
        self.after(0, Speaker::Decode, PairInput::Decode(input));
        self.run(self.now);
    }

    /// The prefill's worker computes the first `layers` layers of a step.
    pub(crate) fn compute(&mut self, step: u64, layers: u16) {
        let ranks: Vec<_> =
            self.ranks.keys().filter(|(role, _)| *role == Role::Prefill).copied().collect();
        for (role, rank) in ranks {
            let input = TransferInput::Layers { step: StepId(step), layers };
            self.after(0, Speaker::Rank(role, rank), PairInput::Transfer(input));
        }
        self.run(self.now);
    }

    /// The engine, its ranks and its links are gone.
    pub(crate) fn kill(&mut self, role: Role) {
        match role {
            Role::Prefill => self.prefill = None,
            Role::Decode => self.decode = None,
        }
        self.ranks.retain(|(of, _), _| *of != role);
    }

    /// The prefill is in its second incarnation.
    pub(crate) fn restart_prefill(&mut self, mode: Mode, tp: u16) {
        self.kill(Role::Prefill);
        for link in std::mem::take(&mut self.links).into_keys().filter(|link| !link.is_inbound()) {
            self.link_event(Speaker::Decode, ControlEvent::LinkDown { link });
        }
        let config = core_config(Role::Prefill, mode, tp, &CoreSettings::default());
        self.prefill = Some(Prefill::new(CoreConfig { incarnation: Incarnation(2), ..config }));
        self.start_ranks(Role::Prefill, mode, tp);
        self.run(self.now + Nanos::from_ms(1));
    }

    /// Takes the place of an engine with what it once said: each frame not before its time, nor
    /// before the other engine has said as many messages as it had then.
    pub(crate) fn play(&mut self, role: Role, frames: Vec<(Nanos, usize, Vec<u8>)>) {
        self.kill(role);
        let who = if role == Role::Prefill { Speaker::Prefill } else { Speaker::Decode };
        for (at, after, frame) in frames {
            self.sequence += 1;
            self.queue.insert((at, self.sequence), (who, PairInput::Recorded(after, frame)));
        }
    }

    fn recorded(&mut self, who: Speaker, after: usize, frame: Vec<u8>) {
        let other = if who == Speaker::Prefill { Speaker::Decode } else { Speaker::Prefill };
        if crate::versions::messages(&self.frames, other).len() < after {
            return self.after(10_000, who, PairInput::Recorded(after, frame));
        }
        if who == Speaker::Decode && self.links.is_empty() {
            let (link, to) = (LinkId(1), "prefill-control".into());
            self.control(who, ControlCommand::Dial { link, to, channel: LinkKind::Handshake });
        }
        let inbound = other == Speaker::Prefill;
        if let Some(link) = self.links.keys().copied().find(|link| link.is_inbound() == inbound) {
            self.link_event(other, ControlEvent::Frame { link, parts: vec![frame] });
        }
    }

    /// Lets time pass until `until`, ticking every machine when it wants.
    pub(crate) fn run(&mut self, until: Nanos) {
        for step in 0.. {
            assert!(step < 100_000, "the machines do not come to rest");
            let event = self.queue.first_key_value().map(|((at, _), _)| *at);
            let tick = self.deadlines().into_iter().min();
            let Some(next) = [event, tick.map(|(at, _)| at)].into_iter().flatten().min() else {
                break;
            };
            if next > until {
                break;
            }
            self.now = self.now.max(next);
            if event == Some(next) {
                let (_, (who, input)) = self.queue.pop_first().unwrap();
                self.step(who, input);
            } else if let Some((_, who)) = tick {
                let input = match who {
                    Speaker::Prefill => PairInput::Prefill(PrefillInput::Tick),
                    Speaker::Decode => PairInput::Decode(DecodeInput::Tick),
                    Speaker::Rank(..) => PairInput::Transfer(TransferInput::Tick),
                };
                self.step(who, input);
            }
        }
        self.now = self.now.max(until);
    }

    fn deadlines(&self) -> Vec<(Nanos, Speaker)> {
        let core = [
            (self.prefill.as_ref().and_then(Machine::deadline), Speaker::Prefill),
            (self.decode.as_ref().and_then(Machine::deadline), Speaker::Decode),
        ];
        let ranks =
            self.ranks.iter().map(|(&(role, rank), t)| (t.deadline(), Speaker::Rank(role, rank)));
        core.into_iter().chain(ranks).filter_map(|(at, who)| Some((at?, who))).collect()
    }

    fn step(&mut self, who: Speaker, input: PairInput) {
        match (who, input) {
            (Speaker::Prefill, PairInput::Prefill(input)) => {
                let Some(machine) = &mut self.prefill else { return };
                let mut out = Outbox::new();
                self.counts.prefill_hears(&input);
                machine.handle(self.now, input, &mut out);
                let gauges = machine.gauges();
                for effect in out.take() {
                    match effect {
                        PrefillEffect::Control(command) => self.control(who, command),
                        PrefillEffect::Job(job) => self.job(Role::Prefill, job),
                        PrefillEffect::Answer(answer) => {
                            self.counts.prefill_says(&answer);
                            self.prefill_said.push(answer);
                        }
                        PrefillEffect::Router(_) | PrefillEffect::Directory(_) => {}
                        PrefillEffect::Violation(violation) => self.violated(violation),
                        PrefillEffect::SpeaksMoriio { request } => panic!("{request} by MoRIIO"),
                        PrefillEffect::Refused { peer, failure } => {
                            self.turned_away.push((peer, failure));
                        }
                    }
                }
                self.counts.judge_prefill(gauges);
            }
            (Speaker::Decode, PairInput::Decode(input)) => {
                let Some(machine) = &mut self.decode else { return };
                let mut out = Outbox::new();
                machine.handle(self.now, input, &mut out);
                for effect in out.take() {
                    match effect {
                        DecodeEffect::Control(command) => self.control(who, command),
                        DecodeEffect::Job(job) => self.job(Role::Decode, job),
                        DecodeEffect::Answer(answer) => self.decode_said.push(answer),
                        DecodeEffect::Router(_) | DecodeEffect::Directory(_) => {}
                        DecodeEffect::Violation(violation) => self.violated(violation),
                        DecodeEffect::Refused { peer, .. } => panic!("{peer} dialled a decode"),
                        DecodeEffect::SpeaksMoriio { request } => panic!("{request} by MoRIIO"),
                    }
                }
            }
            (Speaker::Rank(role, rank), PairInput::Transfer(input)) => {
                self.transfer(role, rank, input);
            }
            (who, PairInput::Recorded(after, frame)) => self.recorded(who, after, frame),
            (who, input) => panic!("{who:?} cannot take {input:?}"),
        }
    }

    fn violated(&mut self, violation: PeerViolation) {
        match &mut self.violations {
            Some(violations) => violations.push(violation),
            None => panic!("{violation}"),
        }
    }

    fn transfer(&mut self, role: Role, rank: u16, input: TransferInput) {
        let of = (role, rank);
        if let TransferInput::Refused(DataRefusal::Submit { .. }) = &input {
            self.counts.refusal_heard(of);
        }
        if let TransferInput::Data(DataEvent::Completed { op, outcome }) = &input {
            // It failed when its session was closed.
            let Some(less) = self.credits.remove(&(role, rank, *op)) else { return };
            if *outcome == Completion::Done {
                self.counts.completed(of, less.bytes);
            }
            self.used.entry((role, rank)).or_default().remove(&less);
            for ops in self.flying.values_mut() {
                ops.retain(|other| other != op);
            }
        }
        let Some(machine) = self.ranks.get_mut(&of) else { return };
        let mut out = Outbox::new();
        machine.handle(self.now, input, &mut out);
        let gauges = machine.gauges();
        for effect in out.take() {
            match effect {
                TransferEffect::Data(command) => self.data(role, rank, command),
                TransferEffect::Report(report) => {
                    self.counts.reported(of, &report);
                    self.report(role, rank, report);
                }
            }
        }
        let in_flight = self.used.get(&of).map_or(0, |used| used.operations);
        self.counts.judge_rank(of, in_flight, gauges);
        self.answer_tickets();
    }

    fn report(&mut self, role: Role, rank: u16, report: TransferReport) {
        match role {
            Role::Prefill => {
                self.after(
                    1,
                    Speaker::Prefill,
                    PairInput::Prefill(PrefillInput::Report { rank, report }),
                );
            }
            Role::Decode => {
                self.after(
                    1,
                    Speaker::Decode,
                    PairInput::Decode(DecodeInput::Report { rank, report }),
                );
            }
        }
    }

    fn job(&mut self, role: Role, job: TransferJob) {
        let ranks: Vec<_> = self.ranks.keys().filter(|(of, _)| *of == role).copied().collect();
        for (role, rank) in ranks {
            let input = PairInput::Transfer(TransferInput::Job(job.clone()));
            self.after(1, Speaker::Rank(role, rank), input);
        }
    }

    fn control(&mut self, from: Speaker, command: ControlCommand) {
        let other = if from == Speaker::Prefill { Speaker::Decode } else { Speaker::Prefill };
        match command {
            ControlCommand::Dial { link, channel: LinkKind::Discovery, .. } => {
                let channel = LinkKind::Discovery;
                self.link_event(from, ControlEvent::LinkUp { link, channel, from: None });
            }
            ControlCommand::Dial { link, channel, .. } => {
                let inbound = LinkId(link.0 | LinkId::INBOUND);
                self.links.insert(link, inbound);
                self.links.insert(inbound, link);
                self.link_event(from, ControlEvent::LinkUp { link, channel, from: None });
                self.link_event(other, ControlEvent::LinkUp { link: inbound, channel, from: None });
            }
            ControlCommand::Send { link, frame } => {
                self.frames.push((self.now, from, frame.clone()));
                if let Some(&link) = self.links.get(&link)
                    && (self.frame_passes)(from)
                {
                    for frame in (self.alter)(from, frame) {
                        self.link_event(other, ControlEvent::Frame { link, parts: vec![frame] });
                    }
                }
            }
            ControlCommand::Reply { .. } => panic!("nobody speaks MoRIIO here"),
            ControlCommand::HangUp { link } => {
                if let Some(there) = self.links.remove(&link) {
                    self.links.remove(&there);
                    self.link_event(other, ControlEvent::LinkDown { link: there });
                }
            }
        }
    }

    fn link_event(&mut self, to: Speaker, event: ControlEvent) {
        let input = match to {
            Speaker::Prefill => PairInput::Prefill(PrefillInput::Control(event)),
            _ => PairInput::Decode(DecodeInput::Control(event)),
        };
        self.after(5, to, input);
    }

    /// What became of what the decode verified.
    pub(crate) fn verified(&self) -> VerifyCounters {
        self.decode.as_ref().map(Decode::verified).unwrap_or_default()
    }

    /// What the prefill holds.
    pub(crate) fn prefill_gauges(&self) -> Gauges {
        self.prefill.as_ref().map(Machine::gauges).unwrap_or_default()
    }

    /// Nothing is under way on any machine that lives.
    pub(crate) fn at_rest(&self) -> bool {
        let core =
            [self.prefill.as_ref().map(Machine::gauges), self.decode.as_ref().map(Machine::gauges)];
        let ranks = self.ranks.values().map(|rank| Some(rank.gauges()));
        core.into_iter().chain(ranks).flatten().all(|gauges| {
            gauges.transfers == 0
                && gauges.operations == 0
                && gauges.held == 0
                && gauges.quarantined == 0
                && gauges.queued == 0
                && (gauges.violations == 0 || self.violations.is_some())
        })
    }
}
