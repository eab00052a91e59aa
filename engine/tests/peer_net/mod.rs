//! The `Peers` of a prefill and a decode core, joined by a network that loses, repeats, delays,
//! reorders, cuts and mutes, in virtual time and decided by a seed.
#![allow(dead_code, reason = "every test file uses a part of it")]

use kvferry_engine::core::Nanos;
use kvferry_engine::core::channel::{ChannelConfig, capability};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::*;
use kvferry_engine::core::layout::*;
use kvferry_engine::core::message::{AttemptTag, Message, Role};
use kvferry_engine::core::peers::{LocalEngine, PeerEvent, PeerTurn, Peers};
use kvferry_engine::fabric::{Address, ControlEvent, Endpoint, LinkId, LinkKind, RegionDesc};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Chances are per thousand frames, unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestFaults {
    pub(crate) seed: u64,
    pub(crate) loss: u64,
    pub(crate) duplicate: u64,
    /// Longest delay of a frame in microseconds.
    pub(crate) delay: u64,
    /// The link dies, and both sides learn it.
    pub(crate) cut: u64,
    /// From this frame on nothing passes this way, and nobody learns it.
    pub(crate) mute: u64,
    /// The frame is cut short.
    pub(crate) truncate: u64,
    /// Chance that a dial is refused.
    pub(crate) refuse: u64,
    /// No faults from here on, but what is muted stays so.
    pub(crate) until: Nanos,
}

impl TestFaults {
    pub(crate) const NONE: TestFaults = TestFaults {
        seed: 0,
        loss: 0,
        duplicate: 0,
        delay: 30,
        cut: 0,
        mute: 0,
        truncate: 0,
        refuse: 0,
        until: Nanos::ZERO,
    };
}

pub(crate) const PREFILL: usize = 0;
pub(crate) const DECODE: usize = 1;

pub(crate) struct TestCore {
    pub(crate) peers: Peers,
    pub(crate) incarnation: u64,
    commands: Vec<ControlCommand>,
    fresh: Vec<PeerEvent>,
    /// All events of this incarnation.
    pub(crate) events: Vec<PeerEvent>,
    /// Messages accepted for sending, per connection.
    pub(crate) sent: BTreeMap<ConnectionId, u32>,
    pub(crate) down: bool,
}

#[derive(Debug)]
enum Happening {
    Control(usize, u64, ControlEvent),
    Tick(usize),
}

struct TestLink {
    ends: [(usize, LinkId); 2],
    open: bool,
    muted: [bool; 2],
}

pub(crate) struct TestNet {
    pub(crate) now: Nanos,
    pub(crate) cores: [TestCore; 2],
    pub(crate) faults: TestFaults,
    pub(crate) dials: u32,
    pub(crate) frames: u32,
    /// What happens to a core before this time happens then.
    paused: [Nanos; 2],
    queue: BTreeMap<(Nanos, u64), Happening>,
    wires: Vec<TestLink>,
    sequence: u64,
    /// Frames of the prefill, on links of whomever.
    pub(crate) said_by_prefill: Vec<Vec<u8>>,
}

/// Geometry and ranks of a small engine with `layers` layers.
pub(crate) fn shape(layers: u16) -> (Geometry, Vec<RankLayout>) {
    let groups = vec![KvGroup::full(4, 0..layers)];
    let geometry = Geometry::new("m", 1, groups);
    let layer = |index: u16| LayerLayout {
        region: 0,
        base: u64::from(index) * 1024,
        shape: [16, 1, 4, 8],
        stride: [32, 32, 8, 1],
        element: 2,
        slots: HeadSlots::Fused,
    };
    let rank = RankLayout {
        rank: 0,
        address: Address(b"a".as_slice().into()),
        regions: vec![(RegionDesc(b"r".as_slice().into()), u64::from(layers) * 1024)],
        layers: (0..layers).map(layer).collect(),
    };
    (geometry, vec![rank])
}

pub(crate) fn me(index: usize, incarnation: u64, layers: u16) -> LocalEngine {
    let (engine, role) = if index == PREFILL { ("p", Role::Prefill) } else { ("d", Role::Decode) };
    LocalEngine {
        engine: engine.into(),
        incarnation: Incarnation(incarnation),
        role,
        geometry: Arc::new(shape(layers).0),
        capabilities: capability::PUSH | capability::PULL,
    }
}

impl TestCore {
    fn new(me: LocalEngine) -> TestCore {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let incarnation = me.incarnation.0;
        TestCore {
            peers: Peers::new(ChannelConfig::default(), me, false),
            incarnation,
            commands: Vec::new(),
            fresh: Vec::new(),
            events: Vec::new(),
            sent: BTreeMap::new(),
            down: false,
        }
    }

    /// Connections that came up and were not reported down.
    pub(crate) fn up(&self) -> Vec<ConnectionId> {
        let mut up = Vec::new();
        for event in &self.events {
            match event {
                PeerEvent::Up { connection: slot } => up.push(*slot),
                PeerEvent::Down { connection: slot, .. } => up.retain(|other| other != slot),
                _ => {}
            }
        }
        up
    }

    pub(crate) fn failures(&self) -> Vec<Failure> {
        let failure = |event: &PeerEvent| match event {
            PeerEvent::Down { failure, .. } => Some(failure.clone()),
            _ => None,
        };
        self.events.iter().filter_map(failure).collect()
    }

    /// The numbers of the messages that came by a connection, with the sender's incarnation and
    /// connection.
    pub(crate) fn received(&self, from: ConnectionId) -> Vec<(u32, u32, u32)> {
        let number = |event: &PeerEvent| match event {
            PeerEvent::Message { connection: slot, message } if *slot == from => {
                let tag = message.tag()?;
                Some((tag.key.prompt, tag.sibling, tag.attempt.0))
            }
            _ => None,
        };
        self.events.iter().filter_map(number).collect()
    }
}

impl TestNet {
    pub(crate) fn new(prefill: LocalEngine, decode: LocalEngine, faults: TestFaults) -> TestNet {
        TestNet {
            now: Nanos::ZERO,
            cores: [TestCore::new(prefill), TestCore::new(decode)],
            faults,
            dials: 0,
            frames: 0,
            paused: [Nanos::ZERO; 2],
            queue: BTreeMap::new(),
            wires: Vec::new(),
            sequence: 0,
            said_by_prefill: Vec::new(),
        }
    }

    /// Both cores know their ranks.
    pub(crate) fn ready(faults: TestFaults) -> TestNet {
        let mut net = TestNet::new(me(PREFILL, 1, 2), me(DECODE, 1, 2), faults);
        net.set_ranks(PREFILL, shape(2).1);
        net.set_ranks(DECODE, shape(2).1);
        net
    }

    pub(crate) fn set_ranks(&mut self, core: usize, ranks: Vec<RankLayout>) {
        let TestCore { peers, commands, fresh: events, .. } = &mut self.cores[core];
        let turn = &mut PeerTurn { now: self.now, commands, events };
        peers.set_ranks(ranks, turn);
        self.perform(core);
    }

    pub(crate) fn reach(&mut self) -> ConnectionId {
        self.reach_incarnation(None)
    }

    pub(crate) fn reach_incarnation(&mut self, incarnation: Option<Incarnation>) -> ConnectionId {
        let TestCore { peers, commands, fresh: events, .. } = &mut self.cores[DECODE];
        let turn = &mut PeerTurn { now: self.now, commands, events };
        let slot = peers.reach(&"p".into(), &Endpoint::from("tcp://p"), incarnation, turn);
        peers.watch(slot, true, turn);
        self.perform(DECODE);
        slot
    }

    /// Sends the next numbered message to a connection, one that the peer waits for.
    pub(crate) fn send(&mut self, core: usize, slot: ConnectionId) -> Result<(), Failure> {
        self.send_next(core, slot, |tag| Message::Cancel { tag })
    }

    /// The same with one that asks for something.
    pub(crate) fn ask(&mut self, core: usize, slot: ConnectionId) -> Result<(), Failure> {
        self.send_next(core, slot, |tag| Message::Renew { tag, count: 1 })
    }

    fn send_next(
        &mut self,
        core: usize,
        slot: ConnectionId,
        message: fn(AttemptTag) -> Message,
    ) -> Result<(), Failure> {
        let TestCore { peers, commands, fresh: events, sent, incarnation, .. } =
            &mut self.cores[core];
        let turn = &mut PeerTurn { now: self.now, commands, events };
        let number = sent.get(&slot).copied().unwrap_or(0);
        let key = TransferKey { id: "t".into(), prompt: *incarnation as u32 };
        let tag = AttemptTag { key, sibling: slot.0, attempt: Attempt(number) };
        peers.send(slot, message(tag), turn)?;
        sent.insert(slot, number + 1);
        self.perform(core);
        Ok(())
    }

    pub(crate) fn close(&mut self, core: usize, slot: ConnectionId) {
        let TestCore { peers, commands, fresh: events, .. } = &mut self.cores[core];
        let turn = &mut PeerTurn { now: self.now, commands, events };
        peers.close(slot, turn);
        self.perform(core);
    }

    /// The core's process dies; its links die with it unless `silently`.
    pub(crate) fn crash(&mut self, core: usize, silently: bool) {
        self.cores[core].down = true;
        for wire in 0..self.wires.len() {
            if silently {
                self.wires[wire].open = false;
            } else {
                self.cut(wire);
            }
        }
    }

    /// A new incarnation, with a geometry of `layers` layers.
    pub(crate) fn restart(&mut self, core: usize, layers: u16) {
        self.restart_as(core, self.cores[core].incarnation + 1, layers);
    }

    /// The same, in an incarnation that its clock says.
    pub(crate) fn restart_as(&mut self, core: usize, incarnation: u64, layers: u16) {
        self.cores[core] = TestCore::new(me(core, incarnation, layers));
        self.set_ranks(core, shape(layers).1);
    }

    /// Nothing passes in one direction of any link that is open.
    pub(crate) fn mute(&mut self, from: usize) {
        for wire in &mut self.wires {
            wire.muted[usize::from(wire.ends[0].0 != from)] = true;
        }
    }

    pub(crate) fn cut_all(&mut self) {
        (0..self.wires.len()).for_each(|wire| self.cut(wire));
    }

    /// Brings bytes to the prefill by a link that says nothing else.
    pub(crate) fn stranger(&mut self, link: u32, parts: Option<Vec<Vec<u8>>>) {
        let link = LinkId(LinkId::INBOUND | link);
        let incarnation = self.cores[PREFILL].incarnation;
        let event = match parts {
            Some(parts) => ControlEvent::Frame { link, parts },
            None => ControlEvent::LinkUp { link, channel: LinkKind::Handshake, from: None },
        };
        self.happen(self.now, Happening::Control(PREFILL, incarnation, event));
    }

    /// Brings a frame by the link that is open.
    pub(crate) fn forge(&mut self, to: usize, frame: &Frame) {
        let wire = self.wires.iter().rfind(|wire| wire.open).expect("a link");
        let (core, link) = wire.ends[usize::from(wire.ends[0].0 != to)];
        let event = ControlEvent::Frame { link, parts: vec![native::encode(frame)] };
        self.happen(self.now, Happening::Control(core, self.cores[core].incarnation, event));
    }

    /// Links that nobody closed.
    pub(crate) fn open(&self) -> usize {
        self.wires.iter().filter(|wire| wire.open).count()
    }

    /// The core stands still.
    pub(crate) fn pause(&mut self, core: usize, span: Nanos) {
        self.paused[core] = self.now + span;
    }

    pub(crate) fn run(&mut self, span: Nanos) {
        let end = self.now + span;
        while let Some(entry) = self.queue.first_entry().filter(|entry| entry.key().0 <= end) {
            let ((at, _), happening) = entry.remove_entry();
            self.now = at;
            let (Happening::Control(core, ..) | Happening::Tick(core)) = &happening;
            if at < self.paused[*core] {
                self.happen(self.paused[*core], happening);
                continue;
            }
            let (core, event) = match happening {
                Happening::Control(core, incarnation, event)
                    if self.cores[core].incarnation == incarnation =>
                {
                    (core, Some(event))
                }
                Happening::Control(..) => continue,
                Happening::Tick(core) => (core, None),
            };
            let TestCore { peers, commands, fresh: events, down, .. } = &mut self.cores[core];
            let turn = &mut PeerTurn { now: at, commands, events };
            match event {
                _ if *down => continue,
                Some(event) => {
                    peers.control(event, turn);
                }
                None if peers.deadline().is_some_and(|due| due <= at) => {
                    peers.tick(turn);
                    assert!(peers.deadline().is_none_or(|due| due > at), "stays due");
                }
                None => continue,
            }
            self.perform(core);
        }
        self.now = end;
    }

    fn happen(&mut self, at: Nanos, happening: Happening) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), happening);
    }

    /// A number below `end`, the same for the same seed and place in the run.
    fn draw(&mut self, end: u64) -> u64 {
        self.sequence += 1;
        let mut z = self.faults.seed ^ self.sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    fn strikes(&mut self, chance: u64) -> bool {
        self.now < self.faults.until && self.draw(1000) < chance
    }

    fn delay(&mut self) -> Nanos {
        let most = if self.now < self.faults.until { self.faults.delay } else { 30 };
        Nanos::from_us(1 + self.draw(most))
    }

    fn perform(&mut self, core: usize) {
        let commands = std::mem::take(&mut self.cores[core].commands);
        let events = std::mem::take(&mut self.cores[core].fresh);
        self.cores[core].events.extend(events);
        for command in commands {
            match command {
                ControlCommand::Dial { link, .. } => self.connect(core, link),
                ControlCommand::Send { link, frame } => {
                    if core == PREFILL {
                        self.said_by_prefill.push(frame.clone());
                    }
                    self.carry(core, link, frame);
                }
                ControlCommand::Reply { .. } => panic!("nobody speaks MoRIIO here"),
                ControlCommand::HangUp { link } => self.hang_up(core, link),
            }
        }
        if let Some(due) = self.cores[core].peers.deadline() {
            self.happen(due.max(self.now), Happening::Tick(core));
        }
    }

    fn event(&mut self, (core, link): (usize, LinkId), delay: Nanos, up: bool) {
        let incarnation = self.cores[core].incarnation;
        let event = match up {
            true => ControlEvent::LinkUp { link, channel: LinkKind::Handshake, from: None },
            false => ControlEvent::LinkDown { link },
        };
        self.happen(self.now + delay, Happening::Control(core, incarnation, event));
    }

    fn connect(&mut self, dialer: usize, link: LinkId) {
        self.dials += 1;
        let acceptor = 1 - dialer;
        let delay = self.delay();
        let refused = self.strikes(self.faults.refuse) || self.cores[acceptor].down;
        if refused {
            return self.event((dialer, link), delay, false);
        }
        let inbound = LinkId(LinkId::INBOUND | self.wires.len() as u32);
        let ends = [(dialer, link), (acceptor, inbound)];
        self.wires.push(TestLink { ends, open: true, muted: [false; 2] });
        self.event(ends[1], Nanos(1), true);
        self.event(ends[0], delay, true);
    }

    fn wire(&self, end: (usize, LinkId)) -> Option<(usize, usize)> {
        let at = self.wires.iter().position(|wire| wire.ends.contains(&end) && wire.open)?;
        Some((at, usize::from(self.wires[at].ends[0] != end)))
    }

    fn carry(&mut self, core: usize, link: LinkId, mut frame: Vec<u8>) {
        self.frames += 1;
        let Some((wire, side)) = self.wire((core, link)) else { return };
        if self.strikes(self.faults.mute) {
            self.wires[wire].muted[side] = true;
        }
        let muted = self.wires[wire].muted[side];
        if !muted && !self.strikes(self.faults.loss) {
            let copies = 1 + u64::from(self.strikes(self.faults.duplicate));
            if self.strikes(self.faults.truncate) {
                let length = self.draw(frame.len() as u64);
                frame.truncate(length as usize);
            }
            let (to, link) = self.wires[wire].ends[1 - side];
            let incarnation = self.cores[to].incarnation;
            for _ in 0..copies {
                let at = self.now + self.delay();
                let event = ControlEvent::Frame { link, parts: vec![frame.clone()] };
                self.happen(at, Happening::Control(to, incarnation, event));
            }
        }
        if self.strikes(self.faults.cut) {
            self.cut(wire);
        }
    }

    fn cut(&mut self, wire: usize) {
        if std::mem::take(&mut self.wires[wire].open) {
            for end in self.wires[wire].ends {
                let delay = self.delay();
                self.event(end, delay, false);
            }
        }
    }

    fn hang_up(&mut self, core: usize, link: LinkId) {
        let Some((wire, side)) = self.wire((core, link)) else { return };
        self.wires[wire].open = false;
        if !self.wires[wire].muted[side] {
            let delay = self.delay();
            self.event(self.wires[wire].ends[1 - side], delay, false);
        }
    }
}
