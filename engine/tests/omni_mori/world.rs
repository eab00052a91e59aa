//! The machine between a payload core and peers, and what has to hold.

mod planes;

use crate::steps::{REGION, WireStep, caller, engine_desc, id, key, memory_desc};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::omni_mori::{
    ConnectorCall, PullAnswer, PullRequest, QueryAnswer,
};
use kvferry_engine::core::omni_mori::{
    ForeignPayload, OmniMori, OmniMoriConfig, OmniMoriEffect, OmniMoriInput, OmniMoriSettings,
    PREAMBLE_BYTES,
};
use kvferry_engine::core::payload::{
    PayloadAnswer, PayloadClient, PayloadConfig, PayloadCore, PayloadEffect, PayloadHook,
    PayloadInput, PayloadKey,
};
use kvferry_engine::core::{Gauges, Machine, Nanos, Outbox};
use kvferry_engine::fabric::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

const POOL: u64 = 24 * 4096;

const PRODUCER: PayloadClient = PayloadClient(1);
const CONSUMER: PayloadClient = PayloadClient(2);
const WIRE: PayloadClient = PayloadClient(3);

/// A write that was posted and has not completed.
#[derive(Clone, Debug)]
struct PostedWrite {
    op: OpId,
    session: SessionId,
    engine: u8,
    from: u64,
    to: u64,
    len: u64,
    /// Its session is closed: it fails, and its bytes may land before that.
    is_lost: bool,
}

/// A range of a receiver's region into which it asked for a payload.
#[derive(Clone, Debug)]
struct OfferedRange {
    engine: u8,
    key: PayloadKey,
    dst: u64,
    len: u64,
}

pub(crate) struct OmniMoriWorld {
    core: PayloadCore,
    stages: OmniMori,
    now: Nanos,
    pool: Vec<u8>,
    /// What the preamble of a slot says.
    preambles: BTreeMap<u64, Result<ForeignPayload, Arc<str>>>,
    /// All that was ever put, or is with a sender, under a key.
    contents: BTreeMap<PayloadKey, Vec<Vec<u8>>>,
    at_senders: BTreeMap<PayloadKey, Vec<u8>>,
    memories: Vec<Vec<u8>>,
    /// Of receivers, with what they asked for.
    callers: BTreeMap<LinkId, Option<Option<OfferedRange>>>,
    offered: Vec<OfferedRange>,
    /// Engine and state of each session.
    sessions: BTreeMap<SessionId, u8>,
    opens: VecDeque<SessionId>,
    writes: Vec<PostedWrite>,
    /// Those that failed, and whose bytes may land until their session is quiet.
    failed: Vec<PostedWrite>,
    quiesced: Vec<(SessionId, QuiesceTicket)>,
    events: VecDeque<DataEvent>,
    busy: bool,
    /// Parts of the pool that senders may write.
    regions: BTreeMap<RegionId, (u64, u64)>,
    /// Those with a payload that its sender means: it does not spoil it.
    whole: BTreeSet<RegionId>,
    /// Links to senders: up or not, and what was asked.
    dialled: BTreeMap<LinkId, (bool, Option<ConnectorCall>)>,
    inputs: VecDeque<OmniMoriInput>,
    /// Answers of the payload core that are on their way.
    answers: VecDeque<OmniMoriInput>,
    delay: bool,
    /// The engine that was told that it has a payload, by the payload.
    delivered: BTreeMap<Vec<u8>, u8>,
    stamp: u8,
    next: u64,
    pub(crate) pulled: u32,
    pub(crate) refused: Vec<String>,
    /// What processes of this host were told does not come.
    pub(crate) missing: Vec<String>,
}

impl OmniMoriWorld {
    pub(crate) fn new() -> OmniMoriWorld {
        // Two and more operations for the longer payloads.
        OmniMoriWorld::with(OmniMoriSettings {
            operation_bytes_max: 5_000,
            ..OmniMoriSettings::default()
        })
    }

    pub(crate) fn with(settings: OmniMoriSettings) -> OmniMoriWorld {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let payloads =
            PayloadConfig { pool: POOL, hold: Nanos::from_secs(120), ..PayloadConfig::default() };
        let caps = Caps {
            read: true,
            write: true,
            slices_max: 16,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(64),
            placement: Placement::OnCompletion,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        };
        let config = OmniMoriConfig {
            deployment: "a".into(),
            address: Address(engine_desc(99)),
            caps,
            pool: POOL,
            settings,
        };
        let mut world = OmniMoriWorld {
            core: PayloadCore::new(payloads),
            stages: OmniMori::new(config),
            now: Nanos::ZERO,
            pool: vec![0; POOL as usize],
            preambles: BTreeMap::new(),
            contents: BTreeMap::new(),
            at_senders: BTreeMap::new(),
            memories: vec![vec![0; REGION as usize]; 3],
            callers: BTreeMap::new(),
            offered: Vec::new(),
            sessions: BTreeMap::new(),
            opens: VecDeque::new(),
            writes: Vec::new(),
            failed: Vec::new(),
            quiesced: Vec::new(),
            events: VecDeque::new(),
            busy: false,
            regions: BTreeMap::new(),
            whole: BTreeSet::new(),
            dialled: BTreeMap::new(),
            inputs: VecDeque::new(),
            answers: VecDeque::new(),
            delay: false,
            delivered: BTreeMap::new(),
            stamp: 0,
            next: 0,
            pulled: 0,
            refused: Vec::new(),
            missing: Vec::new(),
        };
        for (client, stage) in [(PRODUCER, "0"), (CONSUMER, "1")] {
            let hook = PayloadHook::Joined { deployment: "a".into(), stage: stage.into() };
            world.hook(client, hook);
        }
        for key in (0..3).map(key) {
            let content = world.content(12_000);
            world.contents.entry(key.clone()).or_default().push(content.clone());
            world.at_senders.insert(key, content);
        }
        world.tell(OmniMoriInput::Start);
        world.step(WireStep::Deliver);
        world
    }

    /// Bytes that nothing else has.
    fn content(&mut self, bytes: u64) -> Vec<u8> {
        self.stamp = self.stamp.wrapping_add(1);
        let byte = |at: u64| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ self.stamp;
        (0..bytes).map(byte).collect()
    }

    pub(crate) fn gauges(&self) -> Gauges {
        self.stages.gauges()
    }

    fn tell(&mut self, input: OmniMoriInput) {
        self.inputs.push_back(input);
        let mut out = Outbox::new();
        loop {
            let answer = if self.delay { None } else { self.answers.pop_front() };
            let Some(input) = answer.or_else(|| self.inputs.pop_front()) else { break };
            self.stages.handle(self.now, input, &mut out);
            for effect in out.take() {
                self.perform(effect);
            }
        }
    }

    fn hook(&mut self, client: PayloadClient, hook: PayloadHook) {
        let mut out = Outbox::new();
        self.core.handle(self.now, PayloadInput::Hook { client, hook }, &mut out);
        self.core_effects(out.take());
    }

    fn core_effects(&mut self, effects: Vec<PayloadEffect>) {
        for effect in effects {
            match effect {
                PayloadEffect::Answer { client: WIRE, answer } => match answer {
                    PayloadAnswer::Arrived { key, claim, offset, .. } => {
                        let found = self.preambles[&offset].clone();
                        self.answers.push_back(OmniMoriInput::Arrived { key, claim, found });
                    }
                    answer => self.answers.push_back(OmniMoriInput::Answer(answer)),
                },
                PayloadEffect::Answer { client, answer } => self.local(client, answer),
                effect => panic!("{effect:?}"),
            }
        }
    }

    /// A process of this host is told.
    fn local(&mut self, client: PayloadClient, answer: PayloadAnswer) {
        match answer {
            PayloadAnswer::Reserved { slot, offset, .. } => {
                for (region, (at, bytes)) in &self.regions {
                    let is_apart = at + bytes <= offset || offset + 4_096 <= *at;
                    assert!(is_apart || region.0 == 0, "a sender may write what {client} has");
                }
                self.hook(client, PayloadHook::Return { slot });
            }
            PayloadAnswer::Arrived { key, claim, offset, .. } => {
                if let Some(Ok(foreign)) = self.preambles.get(&offset) {
                    let (at, end) = (foreign.at as usize, (foreign.at + foreign.bytes) as usize);
                    let got = &self.pool[at..end];
                    assert!(
                        self.contents[&key].iter().any(|it| it == got),
                        "{key} has other bytes"
                    );
                }
                self.hook(client, PayloadHook::Release { claim });
            }
            PayloadAnswer::Missing { key, failure, .. } => {
                self.missing.push(failure.to_string());
                self.inputs.push_back(OmniMoriInput::Stop { key });
            }
            PayloadAnswer::NotReserved { .. }
            | PayloadAnswer::Stored { .. }
            | PayloadAnswer::Waits { .. }
            | PayloadAnswer::Abandoned { .. } => {}
        }
    }

    fn perform(&mut self, effect: OmniMoriEffect) {
        match effect {
            OmniMoriEffect::Hook(hook) => {
                self.hook(WIRE, hook);
            }
            OmniMoriEffect::Preamble(foreign) => {
                assert!(self.regions.values().all(|(at, _)| *at == 0 || *at != foreign.at));
                self.preambles.insert(foreign.at - PREAMBLE_BYTES, Ok(foreign));
            }
            OmniMoriEffect::Register { region, at, bytes } => {
                assert!(at + bytes <= POOL);
                self.regions.insert(region, (at, bytes));
                let result = Ok(RegionDesc(region.0.to_be_bytes()[..].into()));
                self.events.push_back(DataEvent::Registered { region, result });
            }
            OmniMoriEffect::Deregister { region } => {
                // Now and then the plane is at it.
                self.next += 1;
                let is_done = !self.next.is_multiple_of(7);
                if is_done {
                    self.regions.remove(&region);
                }
                self.inputs.push_back(OmniMoriInput::Deregistered { region, is_done });
            }
            OmniMoriEffect::Control(command) => self.control(command),
            OmniMoriEffect::Data(command) => self.data(command),
            OmniMoriEffect::Report(_) => {}
        }
    }

    fn control(&mut self, command: ControlCommand) {
        match command {
            ControlCommand::Reply { link, frame } if link.is_inbound() => {
                let Some(asked) = self.callers.get_mut(&link) else { return };
                let range = asked.take().expect("who did not ask is not answered");
                if frame.starts_with(b"trans_error") {
                    self.refused.push(String::from_utf8_lossy(&frame).into());
                } else if let Some(range) = range {
                    let answer = PullAnswer::decode(&[vec![], frame]);
                    assert_eq!(answer, Ok(PullAnswer::Done));
                    self.pulled += 1;
                    let (at, end) = (range.dst as usize, (range.dst + range.len) as usize);
                    let got = &self.memories[usize::from(range.engine)][at..end];
                    assert!(self.contents[&range.key].iter().any(|it| it == got), "other bytes");
                    // Shorter ones may be alike.
                    if got.len() > 16 {
                        let had = self.delivered.insert(got.to_vec(), range.engine);
                        assert!(had.is_none_or(|by| by == range.engine), "two have it");
                    }
                } else {
                    QueryAnswer::decode(&[vec![], frame]).expect("an answer");
                }
            }
            ControlCommand::Reply { link, frame } => {
                let (up, asked) = self.dialled.get_mut(&link).expect("a link");
                assert!(*up && asked.is_none(), "two calls at a time");
                *asked = Some(ConnectorCall::decode(&[vec![], frame]).expect("a call"));
            }
            ControlCommand::Dial { link, .. } => _ = self.dialled.insert(link, (false, None)),
            ControlCommand::HangUp { link } => {
                self.callers.remove(&link);
                self.dialled.remove(&link);
            }
            ControlCommand::Send { .. } => panic!("0.30.0 has an empty part ahead"),
        }
    }

    fn call(&mut self, link: u8, range: Option<OfferedRange>, frame: Vec<u8>) {
        let link = caller(link);
        let Some(asked) = self.callers.get_mut(&link) else { return };
        if asked.is_none() {
            *asked = Some(range);
        }
        self.tell(OmniMoriInput::Control(ControlEvent::Frame { link, parts: vec![vec![], frame] }));
    }

    fn pull(&mut self, (link, to, engine): (u8, u8, u8), dst: u64, lie: u8) {
        let key = key(to);
        let len = self.contents[&key].last().map_or(0, |content| content.len() as u64);
        let (dst, len) = match lie {
            1 => (dst, len + 1),
            2 => (REGION - len + 1, len),
            3 => (1 << 40, len),
            4 => (u64::MAX, len),
            _ => (dst, len),
        };
        let memory = memory_desc(if lie == 5 { (engine + 1) % 3 } else { engine });
        let engine_bytes = if lie == 6 { b"engine"[..].into() } else { engine_desc(engine) };
        let range = OfferedRange { engine, key: key.clone(), dst, len };
        if lie == 0 || lie > 6 {
            self.offered.push(range.clone());
        }
        let (request_id, length) = (id(&key), len);
        let pull =
            PullRequest { request_id, engine: engine_bytes, memory, dst_offset: dst, length };
        self.call(link, Some(range), ConnectorCall::Pull(pull).encode());
    }

    pub(crate) fn step(&mut self, step: WireStep) {
        match step {
            WireStep::Put { key: to, bytes, usable } => self.put(&key(to), bytes, usable),
            WireStep::CleanUp { key: of } => {
                self.hook(PRODUCER, PayloadHook::CleanUp { stream: key(of).stream, is_own: false });
            }
            WireStep::LinkUp { link } if !self.callers.contains_key(&caller(link)) => {
                self.connects(caller(link));
            }
            WireStep::LinkUp { .. } => {}
            WireStep::LinkDown { link } => {
                if self.callers.remove(&caller(link)).is_some() {
                    let event = ControlEvent::LinkDown { link: caller(link) };
                    self.tell(OmniMoriInput::Control(event));
                }
            }
            WireStep::Query { link, key: of } => {
                let query = ConnectorCall::Query { request_id: id(&key(of)) };
                self.call(link, None, query.encode());
            }
            WireStep::Pull { link, key, engine, dst, lie } => {
                self.pull((link, key, engine), dst.min(REGION - 13_000), lie);
            }
            WireStep::Garbage { link, bytes } => self.call(link, None, bytes),
            WireStep::Busy { busy } => self.busy = busy,
            WireStep::Delay { delay } => self.delay = delay,
            WireStep::Reset => self.reset(),
            WireStep::Fetch { key: of, sender } => {
                self.hook(CONSUMER, PayloadHook::Want { key: key(of), producer: None });
                let sender = Endpoint::tcp("sender", 1 + u16::from(sender));
                self.tell(OmniMoriInput::Fetch { key: key(of), sender });
            }
            WireStep::Stop { key: of } => {
                self.hook(CONSUMER, PayloadHook::Abandon { key: key(of) });
                self.tell(OmniMoriInput::Stop { key: key(of) });
            }
            WireStep::Wait { ms } => self.wait(Nanos::from_ms(ms)),
            WireStep::Opens { .. }
            | WireStep::Completes { .. }
            | WireStep::Deliver
            | WireStep::Dialled { .. }
            | WireStep::SenderSays { .. }
            | WireStep::LateWrite { .. } => self.elsewhere(step),
        }
        // What a process of this host was told may be of interest to the machine.
        self.tell(OmniMoriInput::Tick);
    }

    /// Something happens at the data plane, or at a sender.
    fn elsewhere(&mut self, step: WireStep) {
        match step {
            WireStep::Opens { ok } => {
                if let Some(session) = self.opens.pop_front() {
                    let result = if ok { Ok(()) } else { Err(FabricError::Unreachable) };
                    self.events.push_back(DataEvent::Opened { session, result });
                }
            }
            WireStep::Completes { op, how } if self.writes.is_empty() => {
                if self.failed.is_empty() {
                    return;
                }
                let write = self.failed.remove(usize::from(op) % self.failed.len());
                if how.is_multiple_of(2) {
                    self.lands(&write);
                    self.failed.push(write);
                }
                self.hush();
            }
            WireStep::Completes { op, how } => {
                let write = self.writes.remove(usize::from(op) % self.writes.len());
                let how = if write.is_lost { 3 } else { how };
                if how != 4 {
                    self.lands(&write);
                }
                self.ends(write.op, how);
                if how == 3 {
                    self.failed.push(write);
                }
                self.hush();
            }
            WireStep::Deliver => {
                if let Some(event) = self.events.pop_front() {
                    self.tell(OmniMoriInput::Data(event));
                }
            }
            WireStep::Dialled { link, up } => {
                let down = self.dialled.iter().filter(|(_, (is_up, _))| !is_up);
                let down: Vec<_> = down.map(|(link, _)| *link).collect();
                if let Some(link) = down.get(usize::from(link) % down.len().max(1)).copied() {
                    self.dialled(link, up);
                }
            }
            WireStep::SenderSays { link, how } => {
                let asked: Vec<_> = self.dialled.iter().filter(|(_, (up, _))| *up).collect();
                let chosen = asked.get(usize::from(link) % asked.len().max(1));
                if let Some((link, (_, call))) = chosen {
                    let (link, call) = (**link, call.clone());
                    self.sender_says(link, call, how);
                }
            }
            WireStep::LateWrite { region } => {
                let is_spoilt = |region: &RegionId| region.0 != 0 && !self.whole.contains(region);
                let there: Vec<_> =
                    self.regions.iter().filter(|(region, _)| is_spoilt(region)).collect();
                if let Some((_, (at, bytes))) = there.get(usize::from(region) % there.len().max(1))
                {
                    self.pool[*at as usize..(*at + *bytes) as usize].fill(0xee);
                }
            }
            _ => {}
        }
    }

    fn connects(&mut self, link: LinkId) {
        self.callers.insert(link, None);
        let (channel, from) = (LinkKind::Handshake, None);
        self.tell(OmniMoriInput::Control(ControlEvent::LinkUp { link, channel, from }));
    }

    fn dialled(&mut self, link: LinkId, up: bool) {
        let event = if up {
            self.dialled.insert(link, (true, None));
            ControlEvent::LinkUp { link, channel: LinkKind::Handshake, from: None }
        } else {
            self.dialled.remove(&link);
            ControlEvent::LinkDown { link }
        };
        self.tell(OmniMoriInput::Control(event));
    }

    fn put(&mut self, key: &PayloadKey, bytes: u64, usable: bool) {
        let mut out = Outbox::new();
        self.next += 1;
        let (ticket, wait) = (self.next, Nanos::ZERO);
        let hook = PayloadHook::Reserve { ticket, bytes: bytes + PREAMBLE_BYTES, wait };
        self.core.handle(self.now, PayloadInput::Hook { client: PRODUCER, hook }, &mut out);
        let mut reserved = None;
        let mut others = Vec::new();
        for effect in out.take() {
            match effect {
                PayloadEffect::Answer {
                    client: PRODUCER,
                    answer: PayloadAnswer::Reserved { slot, offset, .. },
                } => reserved = Some((slot, offset)),
                other => others.push(other),
            }
        }
        self.core_effects(others);
        let Some((slot, offset)) = reserved else { return };
        let end = offset + bytes + PREAMBLE_BYTES;
        for (at, len) in self.regions.values().filter(|(at, _)| *at != 0) {
            assert!(at + len <= offset || end <= *at, "a sender may write what the producer has");
        }
        let content = self.content(bytes);
        let at = offset + PREAMBLE_BYTES;
        self.pool[at as usize..(at + bytes) as usize].copy_from_slice(&content);
        self.contents.entry(key.clone()).or_default().push(content);
        let foreign = ForeignPayload { at, bytes, is_fast_path: true };
        let found = if usable { Ok(foreign) } else { Err("of another form".into()) };
        self.preambles.insert(offset, found);
        self.hook(
            PRODUCER,
            PayloadHook::Put { slot, key: key.clone(), receivers: 1, is_chunk: false },
        );
    }

    fn reset(&mut self) {
        self.sessions.clear();
        self.opens.clear();
        self.writes.clear();
        self.failed.clear();
        self.quiesced.clear();
        self.events.clear();
        self.regions.clear();
        self.tell(OmniMoriInput::Data(DataEvent::Reset { address: Address(engine_desc(98)) }));
    }

    fn wait(&mut self, time: Nanos) {
        let until = self.now + time;
        loop {
            let next = [self.core.deadline(), self.stages.deadline()].into_iter().flatten().min();
            let Some(at) = next.filter(|at| *at <= until) else { break };
            self.now = self.now.max(at);
            self.ticks();
        }
        self.now = until;
        self.ticks();
    }

    fn ticks(&mut self) {
        let mut out = Outbox::new();
        self.core.handle(self.now, PayloadInput::Tick, &mut out);
        self.core_effects(out.take());
        self.tell(OmniMoriInput::Tick);
    }

    /// So many connect, and ask for so many keys.
    pub(crate) fn strangers(&mut self, links: u32, keys: u32) {
        for link in 100..100 + links {
            self.connects(LinkId(LinkId::INBOUND | link));
        }
        let there: Vec<_> = self.callers.keys().copied().collect();
        for (number, link) in (0..keys).zip(there.into_iter().cycle()) {
            let query = ConnectorCall::Query { request_id: format!("r{number}@0_1").into() };
            let parts = vec![vec![], query.encode()];
            self.callers.insert(link, Some(None));
            self.tell(OmniMoriInput::Control(ControlEvent::Frame { link, parts }));
        }
    }

    /// When all are gone, and the fabric has said all, nothing is left.
    pub(crate) fn finish(&mut self) {
        (self.busy, self.delay) = (false, false);
        for link in std::mem::take(&mut self.callers).into_keys() {
            self.tell(OmniMoriInput::Control(ControlEvent::LinkDown { link }));
        }
        for _ in 0..200 {
            while !self.opens.is_empty() {
                self.step(WireStep::Opens { ok: true });
            }
            // What hangs does so until its session is closed.
            while let Some(lost) = self.writes.iter().position(|write| write.is_lost) {
                self.step(WireStep::Completes { op: lost as u8, how: 3 });
            }
            self.failed.clear();
            self.hush();
            while !self.events.is_empty() {
                self.step(WireStep::Deliver);
            }
            for link in self.dialled.keys().copied().collect::<Vec<_>>() {
                self.dialled(link, false);
            }
            self.wait(Nanos::from_secs(10));
        }
        let Gauges { transfers, operations, queued, peers, links, entries, remembered, .. } =
            self.stages.gauges();
        assert_eq!([transfers, operations, queued, peers, links, entries, remembered], [0; 7]);
        assert!(self.writes.is_empty() && self.sessions.is_empty() && self.dialled.is_empty());
        assert!(self.regions.keys().all(|region| region.0 == 0), "{:?}", self.regions);
        assert_eq!(self.core.free_bytes(), POOL);
    }
}
