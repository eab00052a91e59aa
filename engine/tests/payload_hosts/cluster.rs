//! Hosts with their payload, prefill and decode cores and the transfer machines of both, joined by
//! planes that lose, repeat and delay frames, and that move whole pages late.

use kvferry_engine::core::command::{ControlCommand, DataCommand};
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::decode::DecodeEffect;
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::instance::{Instance, InstanceEffect, InstanceInput};
use kvferry_engine::core::layout::Slices;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::prefill::PrefillEffect;
use kvferry_engine::core::transfer::TransferConfig;
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
enum ClusterInput {
    Payload(PayloadInput),
    Instance(InstanceInput),
    /// The pages of an operation move.
    Move(OpId),
}

/// A read of the decode's plane.
#[derive(Debug)]
struct FlyingRead {
    session: SessionId,
    slices: Slices,
    has_moved: bool,
    has_completed: bool,
}

/// What a plane knows of a session: the other host, in one life.
type OpenedSession = (usize, u32);

pub(crate) struct ClusterHost {
    /// Counts the times that it began; none while it is down.
    pub(crate) life: u32,
    pub(crate) is_up: bool,
    pub(crate) payload: PayloadCore,
    prefill: Instance,
    decode: Instance,
    /// Who wrote each page last.
    pub(crate) memory: Vec<u64>,
    reads: BTreeMap<OpId, FlyingRead>,
    sessions: BTreeMap<SessionId, OpenedSession>,
    tickets: Vec<(SessionId, QuiesceTicket)>,
    fences: Vec<PeerId>,
    /// Which host a peer of the decode's plane is.
    peers: BTreeMap<PeerId, usize>,
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
    /// Frames that nobody gets, between these hosts.
    pub(crate) cut: Option<(usize, usize)>,
    config: PayloadConfig,
    tune: fn(&mut CoreConfig),
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
    pub(crate) fn new(
        hosts: usize,
        config: PayloadConfig,
        seed: u64,
        tune: fn(&mut CoreConfig),
    ) -> Cluster {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let mut cluster = Cluster {
            now: Nanos::ZERO,
            hosts: Vec::new(),
            faults: WayFaults::default(),
            cut: None,
            config,
            tune,
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
        (self.tune)(&mut config);
        let address = Address(vec![host as u8, life as u8].into());
        let memory = vec![Memory::Own(OwnMemory::unproven(0, self.config.pool))];
        let layers = vec![pool_layout(self.config.pool)];
        let rank = TransferConfig::new(&config, 0, (address, caps()), memory, layers);
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
            payload: PayloadCore::with_peers(self.config.clone(), prefill_name(host), incarnation),
            prefill: self.instance(host, Role::Prefill, life),
            decode: self.instance(host, Role::Decode, life),
            memory: vec![0; (self.config.pool / PAGE) as usize],
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
        let others = (0..hosts).filter(|other| *other != host);
        let named = |other| PayloadHost { engine: prefill_name(other), control: control(other) };
        let hosts = PayloadInput::Hosts(others.map(named).collect());
        self.payload(host, hosts);
    }

    pub(crate) fn crash(&mut self, host: usize, is_told: bool) {
        self.hosts[host].is_up = false;
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

    fn chance(&mut self, percent: u8) -> bool {
        self.random(100) < percent.into()
    }

    fn delay(&mut self) -> u64 {
        5 + self.random(1_000 * u64::from(self.faults.late) + 20)
    }

    fn post(&mut self, us: u64, host: usize, part: HostPart, input: ClusterInput) {
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
            let (part, input) = match effect {
                PayloadEffect::Answer { client, answer } => {
                    self.answers.push((host, client, answer));
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

    fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cut == Some((a, b)) || self.cut == Some((b, a))
    }

    fn link_event(&mut self, (host, part, _): LinkEnd, event: ControlEvent) {
        let us = self.delay();
        self.post(us, host, part, ClusterInput::Instance(InstanceInput::Control(event)));
    }

    fn event(&mut self, us: u64, host: usize, part: HostPart, event: DataEvent) {
        let input = InstanceInput::Data { rank: 0, event };
        self.post(us, host, part, ClusterInput::Instance(input));
    }

    fn data(&mut self, host: usize, part: HostPart, command: DataCommand) {
        match command {
            DataCommand::Register { region, .. } => {
                let here = vec![host as u8, self.hosts[host].life as u8];
                let result = Ok(RegionDesc(here.into()));
                self.event(10, host, part, DataEvent::Registered { region, result });
            }
            DataCommand::Connect { peer, address, .. } => {
                self.hosts[host].peers.insert(peer, address.0[0].into());
            }
            DataCommand::Disconnect { .. } => {}
            DataCommand::Open { session, remote, .. } => {
                let there = (usize::from(remote.0[0]), u32::from(remote.0[1]));
                self.hosts[host].sessions.insert(session, there);
                let us = 50 + self.delay();
                self.event(us, host, part, DataEvent::Opened { session, result: Ok(()) });
            }
            DataCommand::Submit { op, session, slices, direction } => {
                assert_eq!((part, direction), (HostPart::Decode, Direction::Read));
                self.submit(host, op, session, slices);
            }
            DataCommand::Close { session } => {
                let its = self.hosts[host].reads.iter();
                let its = its.filter(|(_, read)| read.session == session && !read.has_completed);
                for op in its.map(|(op, _)| *op).collect::<Vec<_>>() {
                    self.complete(5, host, op, Some(FabricError::Closed));
                }
            }
            DataCommand::Quiesce { session, ticket } => {
                self.hosts[host].tickets.push((session, ticket));
                self.quiet(host);
            }
            DataCommand::Fence { peer } => {
                if part == HostPart::Decode {
                    self.hosts[host].fences.push(peer);
                    self.quiet(host);
                } else {
                    self.event(20, host, part, DataEvent::Fenced { peer });
                }
            }
        }
    }

    /// A read that takes its time, or fails, and whose pages may move after it was said to have
    /// failed.
    fn submit(&mut self, host: usize, op: OpId, session: SessionId, slices: Slices) {
        let (moves, fails) = (self.delay() + 20, self.chance(self.faults.failed));
        let read = FlyingRead { session, slices, has_moved: false, has_completed: false };
        self.hosts[host].reads.insert(op, read);
        self.post(moves, host, HostPart::Decode, ClusterInput::Move(op));
        if fails {
            let us = self.delay();
            self.complete(us, host, op, Some(FabricError::AckTimeout));
        }
    }

    fn complete(&mut self, us: u64, host: usize, op: OpId, cause: Option<FabricError>) {
        let Some(read) = self.hosts[host].reads.get_mut(&op) else { return };
        if std::mem::replace(&mut read.has_completed, true) {
            return;
        }
        let outcome = match cause {
            None => Completion::Done,
            Some(cause) => Completion::Failed { cause, landed: Landed::Unknown },
        };
        self.event(us, host, HostPart::Decode, DataEvent::Completed { op, outcome });
    }

    fn moves(&mut self, host: usize, op: OpId) {
        let Some(read) = self.hosts[host].reads.get_mut(&op) else { return };
        read.has_moved = true;
        let session = read.session;
        let (there, life) = self.hosts[host].sessions[&session];
        let other = &self.hosts[there];
        let reaches = other.is_up && other.life == life && !self.is_cut(host, there);
        if reaches {
            let slices = self.hosts[host].reads[&op].slices.clone();
            for index in 0..slices.count() {
                let [local, remote, len] =
                    [slices.local[index], slices.remote[index], slices.len[index]];
                assert_eq!([local % PAGE, remote % PAGE, len % PAGE], [0; 3]);
                self.moved += len;
                for page in 0..len / PAGE {
                    let from = self.hosts[there].memory[(remote / PAGE + page) as usize];
                    self.hosts[host].memory[(local / PAGE + page) as usize] = from;
                }
            }
        }
        self.complete(1, host, op, (!reaches).then_some(FabricError::PeerGone));
        self.quiet(host);
    }

    /// Says what is quiet, and who is fenced.
    fn quiet(&mut self, host: usize) {
        let of = &mut self.hosts[host];
        of.reads.retain(|_, read| !read.has_moved || !read.has_completed);
        let moving: Vec<SessionId> = of.reads.values().map(|read| read.session).collect();
        let sessions = &of.sessions;
        let is_busy = |peer: &PeerId, of: &BTreeMap<PeerId, usize>| {
            moving.iter().any(|session| sessions.get(session).map(|at| &at.0) == of.get(peer))
        };
        let fenced: Vec<PeerId> =
            of.fences.iter().filter(|peer| !is_busy(peer, &of.peers)).copied().collect();
        of.fences.retain(|peer| !fenced.contains(peer));
        let (waits, quiet): (Vec<_>, Vec<_>) =
            of.tickets.drain(..).partition(|(session, _)| moving.contains(session));
        of.tickets = waits;
        for peer in fenced {
            self.event(20, host, HostPart::Decode, DataEvent::Fenced { peer });
        }
        for (session, ticket) in quiet {
            self.event(5, host, HostPart::Decode, DataEvent::Quiet { session, ticket });
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        let up = self.hosts.iter().filter(|host| host.is_up);
        up.flat_map(|host| {
            [host.payload.deadline(), host.prefill.deadline(), host.decode.deadline()]
        })
        .flatten()
        .min()
    }

    fn tick(&mut self) {
        for host in 0..self.hosts.len() {
            if !self.hosts[host].is_up {
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
        let Some((_, (host, life, part, input))) = self.queue.pop_first() else { return false };
        if !self.hosts[host].is_up || self.hosts[host].life != life {
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

    /// What the prefill and the decode core of a host still have to do.
    pub(crate) fn at_work(&self, host: usize) -> [u32; 4] {
        let [prefill, decode] =
            [self.hosts[host].prefill.gauges(), self.hosts[host].decode.gauges()];
        [prefill.transfers, prefill.held, decode.transfers, decode.quarantined]
    }
}
