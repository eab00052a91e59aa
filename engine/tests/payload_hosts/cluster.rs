//! Hosts with their payload, prefill and decode cores and the transfer machines of both, joined by
//! planes that lose, repeat and delay frames, and that move whole pages late.

use crate::plane::{FlyingRead, OpenedSession};

use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::config::{CoreConfig, CoreSettings};
use kvferry_engine::core::decode::DecodeEffect;
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::instance::{Instance, InstanceEffect, InstanceInput};
use kvferry_engine::core::message::{DecodeHook, Mode, Role};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::prefill::PrefillEffect;
use kvferry_engine::core::transfer::{TransferConfig, TransferSettings};
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::*;
use std::collections::{BTreeMap, VecDeque};

pub(crate) const PAGE: u64 = 4096;

/// A machine of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HostPart {
    Payload,
    Prefill,
    Decode,
}

#[derive(Debug)]
pub(crate) enum ClusterInput {
    Payload(PayloadInput),
    Instance(InstanceInput),
    /// The pages of an operation move.
    Move(OpId),
}

pub(crate) struct ClusterHost {
    /// Counts the times that it began; none while it is down.
    pub(crate) life: u32,
    pub(crate) is_up: bool,
    /// Until when its process stands still.
    pub(crate) stands: Nanos,
    pub(crate) payload: PayloadCore,
    prefill: Instance,
    decode: Instance,
    /// Who wrote each page last.
    pub(crate) memory: Vec<u64>,
    pub(crate) reads: BTreeMap<OpId, FlyingRead>,
    pub(crate) sessions: BTreeMap<SessionId, OpenedSession>,
    pub(crate) tickets: Vec<(SessionId, QuiesceTicket)>,
    pub(crate) fences: Vec<PeerId>,
    /// Which host a peer of the decode's plane is.
    pub(crate) peers: BTreeMap<PeerId, usize>,
}

/// What all hosts are set to.
#[derive(Clone, Debug)]
pub(crate) struct HostSettings {
    pub(crate) payload: PayloadConfig,
    pub(crate) core: CoreSettings,
    /// Messages for one peer that it has not acknowledged.
    pub(crate) queue_max: u32,
    pub(crate) operations_max: u32,
}

impl HostSettings {
    pub(crate) fn new(payload: PayloadConfig, core: CoreSettings) -> HostSettings {
        HostSettings {
            payload,
            core,
            queue_max: ChannelConfig::default().queue_max,
            operations_max: TransferSettings::default().operations_max,
        }
    }
}

/// How bad the way between hosts is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WayFaults {
    /// Of a hundred frames.
    pub(crate) lost: u8,
    pub(crate) repeated: u8,
    /// What is damaged may cost its connection.
    pub(crate) damaged: u8,
    /// Of a hundred reads.
    pub(crate) failed: u8,
    /// Most milliseconds that something takes.
    pub(crate) late: u8,
}

type LinkEnd = (usize, HostPart, LinkId);

pub(crate) struct Cluster {
    pub(crate) now: Nanos,
    pub(crate) hosts: Vec<ClusterHost>,
    pub(crate) faults: WayFaults,
    /// The next so many reads fail.
    pub(crate) reads_to_fail: u32,
    /// Frames that nobody gets, between these hosts.
    pub(crate) cut: Vec<(usize, usize)>,
    settings: HostSettings,
    queue: BTreeMap<(Nanos, u64), (usize, u32, HostPart, ClusterInput)>,
    /// When the last thing gets to a machine: what its own host tells it comes in order.
    inboxes: BTreeMap<(usize, HostPart), Nanos>,
    links: BTreeMap<LinkEnd, LinkEnd>,
    last_link: u32,
    sequence: u64,
    random: u64,
    pub(crate) answers: Vec<(usize, PayloadClient, PayloadAnswer)>,
    pub(crate) misuses: u32,
    /// Frames that were damaged.
    damaged: u64,
    /// Bytes that moved between hosts.
    pub(crate) moved: u64,
    /// What payload cores told other hosts, and had their decode cores fetch.
    pub(crate) notes: u64,
    /// The want that each host was told last.
    pub(crate) last_wants: BTreeMap<EngineId, u64>,
    pub(crate) fetches: u64,
}

pub(crate) fn prefill_name(host: usize) -> EngineId {
    format!("payload-{host}-p").as_str().into()
}

pub(crate) fn decode_name(host: usize) -> EngineId {
    format!("payload-{host}-d").as_str().into()
}

fn control(host: usize) -> Endpoint {
    format!("host-{host}").as_str().into()
}

fn caps() -> Caps {
    Caps {
        read: true,
        write: false,
        slices_max: 64,
        per_peer: Credits::UNLIMITED,
        in_all: Credits::UNLIMITED,
        placement: Placement::OnQuiet,
        fence: FenceScope::Peer,
        patience: PlaneTimeouts::default(),
    }
}

impl Cluster {
    pub(crate) fn new(hosts: usize, settings: HostSettings, seed: u64) -> Cluster {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let mut cluster = Cluster {
            now: Nanos::ZERO,
            hosts: Vec::new(),
            faults: WayFaults::default(),
            reads_to_fail: 0,
            cut: Vec::new(),
            settings,
            queue: BTreeMap::new(),
            inboxes: BTreeMap::new(),
            links: BTreeMap::new(),
            last_link: 0,
            sequence: 0,
            random: seed,
            answers: Vec::new(),
            misuses: 0,
            damaged: 0,
            moved: 0,
            notes: 0,
            last_wants: BTreeMap::new(),
            fetches: 0,
        };
        for host in 0..hosts {
            let begun = cluster.begin(host, 1);
            cluster.hosts.push(begun);
        }
        for host in 0..hosts {
            cluster.start(host, hosts);
        }
        cluster.run(Nanos::from_ms(10));
        cluster
    }

    fn instance(&self, host: usize, role: Role, life: u32) -> Instance {
        let name = match role {
            Role::Prefill => prefill_name(host),
            Role::Decode => decode_name(host),
        };
        let incarnation = Incarnation(life.into());
        let mut config = CoreConfig::new(role, name, incarnation, pool_geometry(), control(host));
        (config.mode, config.payloads) = (Mode::Pull, true);
        config.settings = self.settings.core.clone();
        config.channel.queue_max = self.settings.queue_max;
        let address = Address(vec![host as u8, life as u8].into());
        let memory = vec![Memory::Own(OwnMemory::unproven(0, self.settings.payload.pool))];
        let layers = vec![pool_layout(self.settings.payload.pool)];
        let mut rank = TransferConfig::new(&config, 0, (address, caps()), memory, layers);
        rank.settings.operations_max = self.settings.operations_max;
        let mut instance = Instance::default();
        instance.add_core(config);
        instance.add_rank(rank);
        instance
    }

    fn begin(&self, host: usize, life: u32) -> ClusterHost {
        let incarnation = Incarnation(life.into());
        ClusterHost {
            life,
            is_up: true,
            stands: Nanos::ZERO,
            payload: PayloadCore::with_peers(
                self.settings.payload.clone(),
                prefill_name(host),
                incarnation,
            ),
            prefill: self.instance(host, Role::Prefill, life),
            decode: self.instance(host, Role::Decode, life),
            memory: vec![0; (self.settings.payload.pool / PAGE) as usize],
            reads: BTreeMap::new(),
            sessions: BTreeMap::new(),
            tickets: Vec::new(),
            fences: Vec::new(),
            peers: BTreeMap::new(),
        }
    }

    /// Everybody else is a host that is named, and one more that nobody is.
    fn start(&mut self, host: usize, hosts: usize) {
        for part in [HostPart::Prefill, HostPart::Decode] {
            self.post(0, host, part, ClusterInput::Instance(InstanceInput::Start(0)));
        }
        self.name_others(host, (0..hosts).collect());
    }

    /// Tells a host which other ones there are.
    pub(crate) fn name_others(&mut self, host: usize, mut others: Vec<usize>) {
        others.retain(|other| *other != host);
        let named = |other| PayloadHost { engine: prefill_name(other), control: control(other) };
        self.payload(host, PayloadInput::Hosts(others.into_iter().map(named).collect()));
    }

    pub(crate) fn crash(&mut self, host: usize, is_told: bool) {
        self.hosts[host].is_up = false;
        self.hosts[host].stands = Nanos::ZERO;
        let ends: Vec<_> = self.links.keys().filter(|(of, ..)| *of == host).copied().collect();
        for end in ends {
            let Some(other) = self.links.remove(&end) else { continue };
            if is_told {
                self.links.remove(&other);
                self.link_event(other, ControlEvent::LinkDown { link: other.2 });
            }
        }
    }

    pub(crate) fn restart(&mut self, host: usize) {
        let life = self.hosts[host].life + 1;
        self.hosts[host] = self.begin(host, life);
        self.start(host, self.hosts.len());
    }

    pub(crate) fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below.max(1)
    }

    pub(crate) fn chance(&mut self, percent: u8) -> bool {
        self.random(100) < percent.into()
    }

    pub(crate) fn delay(&mut self) -> u64 {
        5 + self.random(1_000 * u64::from(self.faults.late) + 20)
    }

    pub(crate) fn post(&mut self, us: u64, host: usize, part: HostPart, input: ClusterInput) {
        self.sequence += 1;
        let life = self.hosts.get(host).map_or(1, |host| host.life);
        let at = (self.now + Nanos::from_us(us), self.sequence);
        self.queue.insert(at, (host, life, part, input));
    }

    /// Tells a machine of the same host, behind what it was told before.
    fn tell(&mut self, host: usize, part: HostPart, input: ClusterInput) {
        let us = self.random(1_000 * u64::from(self.faults.late) / 10 + 5);
        let inbox = self.inboxes.entry((host, part)).or_default();
        *inbox = (*inbox).max(self.now + Nanos::from_us(us));
        let us = inbox.0.saturating_sub(self.now.0) / 1_000;
        self.post(us, host, part, input);
    }

    /// The payload core of a host takes an input at once.
    pub(crate) fn payload(&mut self, host: usize, input: PayloadInput) {
        let mut out = Outbox::new();
        self.hosts[host].payload.handle(self.now, input, &mut out);
        for effect in out.take() {
            match &effect {
                PayloadEffect::PrefillPeer(DirectoryCall::Tell { peer, note, .. })
                | PayloadEffect::DecodePeer(DirectoryCall::Tell { peer, note, .. }) => {
                    self.notes += 1;
                    if let PayloadNote::Want { want, .. } = note {
                        self.last_wants.insert(peer.clone(), *want);
                    }
                }
                PayloadEffect::Decode(DecodeHook::Arrived { .. }) => self.fetches += 1,
                _ => {}
            }
            let (part, input) = match effect {
                PayloadEffect::Answer { client, answer } => {
                    if !answer.is_receipt() {
                        self.answers.push((host, client, answer));
                    }
                    continue;
                }
                PayloadEffect::Misuse { .. } | PayloadEffect::PeerMisuse { .. } => {
                    self.misuses += 1;
                    continue;
                }
                PayloadEffect::FetchFailed { .. } => continue,
                PayloadEffect::Prefill(hook) => (HostPart::Prefill, InstanceInput::Prefill(hook)),
                PayloadEffect::Decode(hook) => (HostPart::Decode, InstanceInput::Decode(hook)),
                PayloadEffect::PrefillPeer(call) => {
                    (HostPart::Prefill, InstanceInput::Directory(call))
                }
                PayloadEffect::DecodePeer(call) => {
                    (HostPart::Decode, InstanceInput::Directory(call))
                }
            };
            self.tell(host, part, ClusterInput::Instance(input));
        }
    }

    fn instance_mut(&mut self, host: usize, part: HostPart) -> &mut Instance {
        match part {
            HostPart::Prefill => &mut self.hosts[host].prefill,
            _ => &mut self.hosts[host].decode,
        }
    }

    fn handle(&mut self, host: usize, part: HostPart, input: InstanceInput) {
        let (now, mut out) = (self.now, Outbox::new());
        self.instance_mut(host, part).handle(now, input, &mut out);
        for effect in out.take() {
            let mut next = VecDeque::new();
            self.instance_mut(host, part).follow(&effect, &mut next);
            for input in next {
                self.tell(host, part, ClusterInput::Instance(input));
            }
            self.perform(host, part, effect);
        }
    }

    fn perform(&mut self, host: usize, part: HostPart, effect: InstanceEffect) {
        let told = match effect {
            InstanceEffect::Prefill(PrefillEffect::Answer(answer)) => PayloadInput::Prefill(answer),
            InstanceEffect::Decode(DecodeEffect::Answer(answer)) => PayloadInput::Decode(answer),
            InstanceEffect::Prefill(PrefillEffect::Directory(news)) => {
                PayloadInput::PrefillPeer(news)
            }
            InstanceEffect::Decode(DecodeEffect::Directory(news)) => PayloadInput::DecodePeer(news),
            InstanceEffect::Prefill(PrefillEffect::Control(command))
            | InstanceEffect::Decode(DecodeEffect::Control(command)) => {
                return self.control((host, part), command);
            }
            InstanceEffect::Data { command, .. } => return self.data(host, part, command),
            InstanceEffect::Prefill(PrefillEffect::Violation(violation))
            | InstanceEffect::Decode(DecodeEffect::Violation(violation)) => {
                assert!(self.damaged > 0, "{violation}");
                return;
            }
            _ => return,
        };
        self.tell(host, HostPart::Payload, ClusterInput::Payload(told));
    }

    fn control(&mut self, (host, part): (usize, HostPart), command: ControlCommand) {
        match command {
            ControlCommand::Dial { link, channel, to } => {
                let end = (host, part, link);
                let there = (0..self.hosts.len()).find(|other| control(*other) == to);
                let Some(there) =
                    there.filter(|there| self.hosts[*there].is_up && !self.is_cut(host, *there))
                else {
                    return self.link_event(end, ControlEvent::LinkDown { link });
                };
                self.last_link += 1;
                let inbound = LinkId(self.last_link | LinkId::INBOUND);
                let other = (there, HostPart::Prefill, inbound);
                self.links.insert(end, other);
                self.links.insert(other, end);
                self.link_event(end, ControlEvent::LinkUp { link, channel, from: None });
                let up = ControlEvent::LinkUp { link: inbound, channel, from: None };
                self.link_event(other, up);
            }
            ControlCommand::Send { link, frame } => {
                let Some(&other) = self.links.get(&(host, part, link)) else { return };
                if self.is_cut(host, other.0) || self.chance(self.faults.lost) {
                    return;
                }
                let copies = if self.chance(self.faults.repeated) { 2 } else { 1 };
                for _ in 0..copies {
                    let mut parts = vec![frame.clone()];
                    if self.chance(self.faults.damaged) {
                        let at = self.random(frame.len() as u64) as usize;
                        parts[0].truncate(at);
                        self.damaged += 1;
                    }
                    self.link_event(other, ControlEvent::Frame { link: other.2, parts });
                }
            }
            ControlCommand::Reply { .. } => panic!("nobody speaks MoRIIO here"),
            ControlCommand::HangUp { link } => {
                if let Some(other) = self.links.remove(&(host, part, link)) {
                    self.links.remove(&other);
                    self.link_event(other, ControlEvent::LinkDown { link: other.2 });
                }
            }
        }
    }

    pub(crate) fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cut.contains(&(a, b)) || self.cut.contains(&(b, a))
    }

    fn link_event(&mut self, (host, part, _): LinkEnd, event: ControlEvent) {
        let us = self.delay();
        self.post(us, host, part, ClusterInput::Instance(InstanceInput::Control(event)));
    }

    fn deadline(&self) -> Option<Nanos> {
        let up = self.hosts.iter().filter(|host| host.is_up);
        let next = up.filter_map(|host| {
            let of = [host.payload.deadline(), host.prefill.deadline(), host.decode.deadline()];
            of.into_iter().flatten().min().map(|at| at.max(host.stands))
        });
        next.min()
    }

    fn tick(&mut self) {
        for host in 0..self.hosts.len() {
            if !self.hosts[host].is_up || self.now < self.hosts[host].stands {
                continue;
            }
            if self.hosts[host].payload.deadline().is_some_and(|at| at <= self.now) {
                self.payload(host, PayloadInput::Tick);
            }
            for part in [HostPart::Prefill, HostPart::Decode] {
                let (now, mut due) = (self.now, VecDeque::new());
                self.instance_mut(host, part).ticks(now, &mut due);
                for input in due {
                    self.handle(host, part, input);
                }
            }
        }
    }

    /// One thing that happens, no later than at `until`; false if there is none.
    pub(crate) fn step(&mut self, until: Nanos) -> bool {
        let event = self.queue.first_key_value().map(|((at, _), _)| *at);
        let Some(next) = [event, self.deadline()].into_iter().flatten().min() else {
            return false;
        };
        if next > until {
            return false;
        }
        self.now = self.now.max(next);
        if event != Some(next) {
            self.tick();
            return true;
        }
        let Some(((_, sequence), (host, life, part, input))) = self.queue.pop_first() else {
            return false;
        };
        let ClusterHost { is_up, life: current, stands, .. } = self.hosts[host];
        if !is_up || current != life {
            return true;
        }
        // What the plane has begun moves on while the process stands still.
        if self.now < stands && !matches!(input, ClusterInput::Move(_)) {
            self.queue.insert((stands, sequence), (host, life, part, input));
            return true;
        }
        match input {
            ClusterInput::Payload(input) => self.payload(host, input),
            ClusterInput::Instance(input) => self.handle(host, part, input),
            ClusterInput::Move(op) => self.moves(host, op),
        }
        true
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, until: Nanos) {
        let mut steps = 0;
        while self.step(until) {
            steps += 1;
            assert!(steps < 1_000_000, "the machines do not come to rest");
        }
        self.now = self.now.max(until);
    }

    pub(crate) fn is_reading(&self, host: usize) -> bool {
        !self.hosts[host].reads.is_empty()
    }

    /// Entries and messages of the prefill and the decode core of a host.
    pub(crate) fn rest(&self, host: usize) -> [u32; 4] {
        let [prefill, decode] =
            [self.hosts[host].prefill.gauges(), self.hosts[host].decode.gauges()];
        [prefill.entries, prefill.queued, decode.entries, decode.queued]
    }

    /// What the prefill and the decode core of a host still have to do.
    pub(crate) fn at_work(&self, host: usize) -> [u32; 4] {
        let [prefill, decode] =
            [self.hosts[host].prefill.gauges(), self.hosts[host].decode.gauges()];
        [prefill.transfers, prefill.held, decode.transfers, decode.quarantined]
    }
}
