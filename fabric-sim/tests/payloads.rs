//! Payloads between hosts over the simulated planes: the payload, prefill, decode and transfer machines,
//! the bytes of the pools, processes that stand still, and operations that never end.

use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::decode::DecodeEffect;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::instance::{Instance, InstanceEffect, InstanceInput};
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::prefill::PrefillEffect;
use kvferry_engine::core::transfer::TransferConfig;
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::effects::{perform_control, perform_data};
use kvferry_engine::fabric::*;
use kvferry_scenarios::decide::{below, mix};
use kvferry_sim::dma::*;
use kvferry_sim::memory::RankStore;
use kvferry_sim::net::*;
use kvferry_sim::queue::{EventQueue, StepContext};
use std::collections::VecDeque;

const PAGE: u64 = 4096;
const POOL: u64 = 64 * PAGE;
const LEASE: Nanos = Nanos::from_secs(2);

/// Client of each host.
const CLIENT: PayloadClient = PayloadClient(0);

/// What becomes of frames and operations.
#[derive(Clone, Copy, Debug, Default)]
struct PlaneFaults {
    seed: u64,
    /// Of a hundred.
    frames: u64,
    operations: u64,
    /// The operations of this plane never end.
    stuck: Option<DataPlaneIx>,
}

impl NetHooks for PlaneFaults {
    fn decide_frame(&mut self, _now: Nanos, frame: &FrameInfo<'_>) -> FrameDecision {
        let draw = mix(mix(self.seed, u64::from(frame.from.0)), frame.nth);
        let fine = FrameDecision::default();
        if below(draw, 100) >= self.frames {
            return fine;
        }
        match mix(draw, 1) % 4 {
            0 => FrameDecision { drop: true, ..fine },
            1 => FrameDecision { duplicate: Some(Nanos::from_ms(3)), ..fine },
            2 => FrameDecision { delay: Nanos::from_ms(20), ..fine },
            _ => FrameDecision { reorder: true, delay: Nanos::from_ms(5), ..fine },
        }
    }
}

impl DmaHooks for PlaneFaults {
    fn decide_op(&mut self, _now: Nanos, op: &OpInfo<'_>) -> OpDecision {
        if self.stuck == Some(op.plane) {
            return OpDecision { ack: CompletionDecision::Never, ..OpDecision::default() };
        }
        let draw = mix(mix(self.seed, u64::from(op.plane.0) + 1_000), op.nth);
        // Some bytes come long after the operation is done, or was said to have failed.
        let bytes = match below(draw, 100) < self.operations {
            true => BytesDecision::Fails {
                cause: FabricError::AckTimeout,
                landed: Landed::Unknown,
                late: Some(Nanos::from_ms(2)),
            },
            false => BytesDecision::Overtaken { by: Nanos::from_us(below(mix(draw, 2), 900)) },
        };
        OpDecision { bytes, ..OpDecision::default() }
    }
}

struct PayloadSimCore {
    instance: Instance,
    control: SimControlPlane,
    data: SimDataPlane,
    inputs: VecDeque<InstanceInput>,
}

struct PayloadSimHost {
    life: u64,
    is_paused: bool,
    payload: PayloadCore,
    inputs: VecDeque<PayloadInput>,
    /// Prefill and decode.
    cores: [PayloadSimCore; 2],
}

struct PayloadSim {
    now: Nanos,
    faults: PlaneFaults,
    dma: Dma,
    net: ControlNetwork,
    dma_queue: EventQueue<DmaEvent>,
    net_queue: EventQueue<NetEvent>,
    nics: Vec<(NicIx, NicIx)>,
    hosts: Vec<PayloadSimHost>,
    told: Vec<(usize, PayloadAnswer)>,
    /// Counts what was put: its bytes are made of it.
    stamp: u64,
}

fn name(host: usize) -> String {
    format!("host-{host}")
}

fn chunk(index: u64) -> PayloadKey {
    PayloadStream::new("0", "1", "request").chunk(index)
}

/// What a payload has at a place.
fn content(stamp: u64, at: u64) -> u8 {
    mix(stamp, at / 8) as u8
}

impl PayloadSim {
    fn new(hosts: usize, faults: PlaneFaults) -> PayloadSim {
        let seed = faults.seed;
        let mut dma = Dma::new(DmaConfig { seed, ..DmaConfig::default() });
        let net = ControlNetwork::new(NetConfig { seed, ..NetConfig::default() });
        let nics = (0..hosts)
            .map(|_| (dma.add_nic(10_000_000_000), dma.add_nic(10_000_000_000)))
            .collect();
        let mut sim = PayloadSim {
            now: Nanos::ZERO,
            faults,
            dma,
            net,
            dma_queue: EventQueue::new(),
            net_queue: EventQueue::new(),
            nics,
            hosts: Vec::new(),
            told: Vec::new(),
            stamp: 0,
        };
        for host in 0..hosts {
            let begun = sim.begin(host, 1);
            sim.hosts.push(begun);
        }
        (0..hosts).for_each(|host| sim.join(host));
        sim
    }

    fn core(&mut self, host: usize, role: Role, life: u64) -> PayloadSimCore {
        let (nic, nic_local) = self.nics[host];
        let caps = Caps {
            read: true,
            write: false,
            slices_max: 32,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(8),
            placement: Placement::OnQuiet,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        };
        let (node, store) = (host as u32, RankStore::plain(&[POOL]));
        let memory = vec![store.memory(0, 0)];
        let data = self.dma.add_plane(PlaneSpec { node, nic, nic_local, caps, store });
        let mut control = self.net.add_plane(&format!("{}-{role}", name(host)), node);
        control.listen(LinkKind::Handshake).expect("a new plane listens to nothing");
        let to = format!("sim://{}-{role}", name(host));
        let geometry = pool_geometry();
        let mut config = CoreConfig::new(
            role,
            format!("{}-{role}", name(host)).as_str(),
            Incarnation(life),
            geometry,
            to.as_str().into(),
        );
        (config.mode, config.payloads, config.settings.lease) = (Mode::Pull, true, LEASE);
        let plane = (data.address(), data.caps());
        let rank = TransferConfig::new(&config, 0, plane, memory, vec![pool_layout(POOL)]);
        let mut instance = Instance::default();
        instance.add_core(config);
        instance.add_rank(rank);
        PayloadSimCore { instance, control, data, inputs: [InstanceInput::Start(0)].into() }
    }

    fn begin(&mut self, host: usize, life: u64) -> PayloadSimHost {
        let config = PayloadConfig { pool: POOL, hold: Nanos::ZERO, ..PayloadConfig::default() };
        let engine = format!("{}-prefill", name(host)).as_str().into();
        let cores = [Role::Prefill, Role::Decode].map(|role| self.core(host, role, life));
        let payload = PayloadCore::with_peers(config, engine, Incarnation(life));
        PayloadSimHost { life, is_paused: false, payload, inputs: VecDeque::new(), cores }
    }

    fn join(&mut self, host: usize) {
        let named = |other: usize| PayloadHost {
            engine: format!("{}-prefill", name(other)).as_str().into(),
            control: format!("sim://{}-prefill", name(other)).as_str().into(),
        };
        let others = (0..self.nics.len()).filter(|other| *other != host).map(named).collect();
        self.hosts[host].inputs.push_back(PayloadInput::Hosts(others));
        let stage = if host == 0 { "0" } else { "1" };
        self.tell(host, PayloadHook::Joined { deployment: "a".into(), stage: stage.into() });
    }

    /// A host is gone with all its bytes, and begins anew.
    fn restart(&mut self, host: usize) {
        for at in 0..2 {
            let core = &self.hosts[host].cores[at];
            let (data, control, told) =
                (core.data.ix(), core.control.ix(), Some(Nanos::from_ms(1)));
            let (mut moved, mut heard) = (Vec::new(), Vec::new());
            let cx = &mut StepContext::new(self.now, &mut self.dma_queue, &mut moved);
            self.dma.crash(data, (Nanos::from_us(10), told), cx);
            let cx = &mut StepContext::new(self.now, &mut self.net_queue, &mut heard);
            self.net.crash(control, told, cx);
            self.moved(moved);
            self.heard(heard);
        }
        let life = self.hosts[host].life + 1;
        self.hosts[host] = self.begin(host, life);
        self.join(host);
    }

    fn pause(&mut self, host: usize, is_paused: bool) {
        self.hosts[host].is_paused = is_paused;
        for at in 0..2 {
            let core = &self.hosts[host].cores[at];
            let (data, control) = (core.data.ix(), core.control.ix());
            let mut out = Vec::new();
            let cx = &mut StepContext::new(self.now, &mut self.dma_queue, &mut out);
            self.dma.set_paused(data, is_paused, cx);
            self.moved(out);
            let mut out = Vec::new();
            let cx = &mut StepContext::new(self.now, &mut self.net_queue, &mut out);
            self.net.set_paused(control, is_paused, cx);
            self.heard(out);
        }
    }

    fn tell(&mut self, host: usize, hook: PayloadHook) {
        self.hosts[host].inputs.push_back(PayloadInput::Hook { client: CLIENT, hook });
        self.settle();
    }

    fn moved(&mut self, out: Vec<DmaOutput>) {
        for output in out {
            if let DmaOutput::Deliver { plane, message } = output {
                let cores = self.hosts.iter_mut().flat_map(|host| &mut host.cores);
                cores.filter(|core| core.data.ix() == plane).for_each(|core| {
                    core.data.deliver(message.clone());
                });
            }
        }
    }

    fn heard(&mut self, out: Vec<NetOutput>) {
        for NetOutput::Deliver { plane, message, .. } in out {
            let cores = self.hosts.iter_mut().flat_map(|host| &mut host.cores);
            cores.filter(|core| core.control.ix() == plane).for_each(|core| {
                core.control.deliver(message.clone());
            });
        }
    }

    /// Hosts that do not stand still do what they can.
    fn settle(&mut self) {
        while let Some(host) = self.hosts.iter().position(|host| {
            let is_busy = |core: &PayloadSimCore| !core.inputs.is_empty();
            !host.is_paused && (!host.inputs.is_empty() || host.cores.iter().any(is_busy))
        }) {
            if let Some(input) = self.hosts[host].inputs.pop_front() {
                self.payload(host, input);
            }
            for at in 0..2 {
                if let Some(input) = self.hosts[host].cores[at].inputs.pop_front() {
                    self.instance(host, at, input);
                }
            }
        }
    }

    fn payload(&mut self, host: usize, input: PayloadInput) {
        let mut out = Outbox::new();
        self.hosts[host].payload.handle(self.now, input, &mut out);
        for effect in out.take() {
            let (at, input) = match effect {
                PayloadEffect::Answer { answer, .. } => {
                    if !answer.is_receipt() {
                        self.told.push((host, answer));
                    }
                    continue;
                }
                PayloadEffect::Prefill(hook) => (0, InstanceInput::Prefill(hook)),
                PayloadEffect::PrefillPeer(call) => (0, InstanceInput::Directory(call)),
                PayloadEffect::Decode(hook) => (1, InstanceInput::Decode(hook)),
                PayloadEffect::DecodePeer(call) => (1, InstanceInput::Directory(call)),
                PayloadEffect::FetchFailed { .. } => continue,
                effect => panic!("{effect:?}"),
            };
            self.hosts[host].cores[at].inputs.push_back(input);
        }
    }

    fn instance(&mut self, host: usize, at: usize, input: InstanceInput) {
        let (mut out, host_of) = (Outbox::new(), &mut self.hosts[host]);
        let core = &mut host_of.cores[at];
        core.instance.handle(self.now, input, &mut out);
        for effect in out.take() {
            core.instance.follow(&effect, &mut core.inputs);
            match effect {
                InstanceEffect::Prefill(PrefillEffect::Control(command))
                | InstanceEffect::Decode(DecodeEffect::Control(command)) => {
                    let refused = perform_control(&mut core.control, command);
                    core.inputs.extend(refused.map(InstanceInput::Control));
                }
                InstanceEffect::Data { rank, command } => {
                    let refused = perform_data(&mut core.data, command);
                    let refused = refused.map(|refusal| InstanceInput::Refused { rank, refusal });
                    core.inputs.extend(refused);
                }
                InstanceEffect::Prefill(PrefillEffect::Answer(answer)) => {
                    host_of.inputs.push_back(PayloadInput::Prefill(answer));
                }
                InstanceEffect::Prefill(PrefillEffect::Directory(news)) => {
                    host_of.inputs.push_back(PayloadInput::PrefillPeer(news));
                }
                InstanceEffect::Decode(DecodeEffect::Answer(answer)) => {
                    host_of.inputs.push_back(PayloadInput::Decode(answer));
                }
                InstanceEffect::Decode(DecodeEffect::Directory(news)) => {
                    host_of.inputs.push_back(PayloadInput::DecodePeer(news));
                }
                InstanceEffect::Prefill(PrefillEffect::Violation(why))
                | InstanceEffect::Decode(DecodeEffect::Violation(why)) => panic!("{why}"),
                _ => {}
            }
        }
        self.flush(host, at);
    }

    /// Gives the calls of the planes to the networks.
    fn flush(&mut self, host: usize, at: usize) {
        let (mut moved, mut heard) = (Vec::new(), Vec::new());
        let core = &mut self.hosts[host].cores[at];
        let mut calls = DmaCalls::default();
        core.data.take_calls(&mut calls);
        let cx = &mut StepContext::new(self.now, &mut self.dma_queue, &mut moved);
        self.dma.perform(core.data.ix(), &mut calls, &mut self.faults, cx);
        let mut calls = NetCalls::default();
        core.control.take_calls(&mut calls);
        let cx = &mut StepContext::new(self.now, &mut self.net_queue, &mut heard);
        self.net.perform(core.control.ix(), &mut calls, &mut self.faults, cx);
        self.moved(moved);
        self.heard(heard);
    }

    /// One thing that happens, no later than at `until`; false if there is none.
    fn step(&mut self, until: Nanos) -> bool {
        let running = self.hosts.iter().filter(|host| !host.is_paused);
        let machines = running.flat_map(|host| {
            let [prefill, decode] = host.cores.each_ref().map(|core| core.instance.deadline());
            [host.payload.deadline(), prefill, decode]
        });
        let deadline = machines.flatten().min().map(|at| at.max(self.now));
        let (dma, net) = (self.dma_queue.next_at(), self.net_queue.next_at());
        let Some(next) = [deadline, dma, net].into_iter().flatten().min() else { return false };
        if next > until {
            return false;
        }
        self.now = self.now.max(next);
        if dma == Some(next) {
            let (_, event) = self.dma_queue.pop().expect("it is due");
            let mut out = Vec::new();
            self.dma.step(event, &mut StepContext::new(self.now, &mut self.dma_queue, &mut out));
            self.moved(out);
        } else if net == Some(next) {
            let (_, event) = self.net_queue.pop().expect("it is due");
            let mut out = Vec::new();
            self.net.step(event, &mut StepContext::new(self.now, &mut self.net_queue, &mut out));
            self.heard(out);
        }
        let now = self.now;
        for host in self.hosts.iter_mut().filter(|host| !host.is_paused) {
            if host.payload.deadline().is_some_and(|at| at <= now) {
                host.inputs.push_back(PayloadInput::Tick);
            }
            for core in &mut host.cores {
                let (mut control, mut data) = (Vec::new(), Vec::new());
                core.control.poll(now, &mut control);
                core.data.poll(now, &mut data);
                core.inputs.extend(control.into_iter().map(InstanceInput::Control));
                let data = data.into_iter().map(|event| InstanceInput::Data { rank: 0, event });
                core.inputs.extend(data);
                core.instance.ticks(now, &mut core.inputs);
            }
        }
        self.settle();
        true
    }

    fn pass(&mut self, span: Nanos) {
        let until = self.now + span;
        for steps in 0.. {
            assert!(steps < 1_000_000, "somebody has no rest");
            if !self.step(until) {
                break;
            }
        }
        self.now = self.now.max(until);
    }

    /// The bytes of a slot in the memory that both instances of a host register.
    fn write(&mut self, host: usize, (offset, bytes): (u64, u64), stamp: u64) {
        for at in 0..2 {
            let plane = self.hosts[host].cores[at].data.ix();
            let store = self.dma.store_mut(plane).expect("it lives");
            let pool = store.bytes_mut(0).expect("a store of bytes");
            let slot = &mut pool[offset as usize..(offset + bytes) as usize];
            (0..).zip(slot).for_each(|(at, byte)| *byte = content(stamp, at));
        }
    }

    fn has(&self, host: usize, (offset, bytes): (u64, u64), stamp: u64) -> bool {
        let store = self.dma.store(self.hosts[host].cores[1].data.ix()).expect("it lives");
        let pool = store.bytes(0).expect("a store of bytes");
        let slot = &pool[offset as usize..(offset + bytes) as usize];
        (0..).zip(slot).all(|(at, byte)| *byte == content(stamp, at))
    }

    /// Puts a payload, and says what its bytes are made of.
    fn put(&mut self, host: usize, key: PayloadKey, bytes: u64) -> u64 {
        // What was lent before may be in its place for a lease.
        let wait = LEASE.scale(4, 1);
        self.tell(host, PayloadHook::Reserve { ticket: 1, bytes, wait });
        let is_it = |(_, answer): &(usize, PayloadAnswer)| {
            matches!(answer, PayloadAnswer::Reserved { .. } | PayloadAnswer::NotReserved { .. })
        };
        let at = loop {
            match self.told.iter().position(is_it) {
                Some(at) => break at,
                None => assert!(self.step(self.now + wait)),
            }
        };
        let (_, PayloadAnswer::Reserved { slot, offset, .. }) = self.told.remove(at) else {
            panic!("no room in time");
        };
        self.stamp += 1;
        let stamp = self.stamp;
        self.write(host, (offset, bytes), stamp);
        self.tell(host, PayloadHook::Put { slot, key, receivers: 1, is_chunk: true });
        stamp
    }

    fn want(&mut self, host: usize, key: PayloadKey) {
        self.tell(host, PayloadHook::Want { key, producer: None });
    }

    /// Waits for the next answer, whose bytes are those of this stamp, and lets it go.
    fn arrives(&mut self, host: usize, stamp: u64) {
        let until = self.now + Nanos::from_secs(60);
        while self.told.is_empty() && self.step(until) {}
        let told = std::mem::take(&mut self.told);
        let [(at, PayloadAnswer::Arrived { claim, offset, bytes, .. })] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!(*at, host);
        assert!(self.has(host, (*offset, *bytes), stamp), "{stamp} at {offset}");
        // It stays as long as somebody reads it.
        self.pass(Nanos::from_ms(5));
        assert!(self.has(host, (*offset, *bytes), stamp), "{stamp} at {offset}");
        self.tell(host, PayloadHook::Release { claim: *claim });
    }

    /// Nothing is left of anything.
    fn at_rest(&mut self) {
        self.faults = PlaneFaults::default();
        self.pass(Nanos::from_secs(30));
        for (at, host) in self.hosts.iter().enumerate() {
            assert_eq!(host.payload.free_bytes(), POOL, "host {at}: {:?}", host.payload.gauges());
            assert_eq!(host.payload.gauges().entries, 0, "host {at}: {:?}", host.payload.gauges());
            for core in &host.cores {
                let gauges = core.instance.gauges();
                let work = [gauges.transfers, gauges.held, gauges.quarantined, gauges.entries];
                assert_eq!(work, [0; 4], "host {at}: {gauges:?}");
            }
        }
        assert_eq!(self.dma.unsettled(), 0);
    }
}

#[test]
fn payloads_arrive_as_they_were_put_whatever_frames_and_operations_do() {
    for seed in 0..24 {
        let faults = PlaneFaults { seed, frames: seed % 40, operations: seed % 30, stuck: None };
        let mut sim = PayloadSim::new(3, faults);
        for index in 0..12 {
            let host = 1 + (index % 2) as usize;
            let bytes = 1 + below(mix(seed, index), 40 * PAGE);
            if index % 3 == 0 {
                sim.want(host, chunk(index));
                sim.pass(Nanos::from_ms(2));
            }
            let stamp = sim.put(0, chunk(index), bytes);
            sim.want(host, chunk(index));
            sim.arrives(host, stamp);
        }
        sim.at_rest();
    }
}

/// Lets the read of a host begin, and stop before it ends.
fn amid_a_read(sim: &mut PayloadSim) {
    while sim.dma.unsettled() == 0 {
        assert!(sim.step(sim.now + Nanos::from_secs(9)));
    }
}

#[test]
fn who_stood_still_beyond_its_lease_uses_nothing_of_what_it_read() {
    let mut sim = PayloadSim::new(2, PlaneFaults::default());
    sim.want(1, chunk(0));
    sim.put(0, chunk(0), 30 * PAGE);
    amid_a_read(&mut sim);
    sim.pause(1, true);
    // The source is free after the lease, and its slot is another one's.
    sim.tell(0, PayloadHook::CleanUp { stream: chunk(0).stream, is_own: false });
    sim.pass(LEASE.scale(3, 1));
    assert_eq!(sim.hosts[0].payload.free_bytes(), POOL);
    let stamp = sim.put(0, chunk(0), 30 * PAGE);
    sim.pause(1, false);
    sim.pass(Nanos::from_ms(1));
    // It was told that the host is gone, or gets what is there now.
    sim.pass(Nanos::from_secs(5));
    if let [(1, PayloadAnswer::Missing { .. })] = sim.told[..] {
        sim.told.clear();
        sim.want(1, chunk(0));
    }
    sim.arrives(1, stamp);
    sim.at_rest();
}

#[test]
fn an_operation_that_never_ends_keeps_up_nobody_else() {
    let mut sim = PayloadSim::new(3, PlaneFaults::default());
    sim.faults.stuck = Some(sim.hosts[1].cores[1].data.ix());
    let stamp = sim.put(0, chunk(0), 20 * PAGE);
    sim.want(1, chunk(0));
    amid_a_read(&mut sim);
    let other = sim.put(0, chunk(1), 20 * PAGE);
    let begun = sim.now;
    sim.want(2, chunk(1));
    sim.arrives(2, other);
    assert!(sim.now - begun < Nanos::from_ms(100), "{}", sim.now - begun);
    // When operations end again, what was stuck is had; its slots were nobody else's meanwhile.
    assert!(sim.hosts[1].payload.free_bytes() < POOL);
    sim.faults.stuck = None;
    let until = sim.now + Nanos::from_secs(60);
    while sim.told.is_empty() && sim.step(until) {}
    if let [(1, PayloadAnswer::Missing { .. })] = sim.told[..] {
        sim.told.clear();
        sim.want(1, chunk(0));
    }
    sim.arrives(1, stamp);
    sim.at_rest();
}

#[test]
fn a_host_that_begins_anew_in_the_middle_leaves_nothing_behind() {
    for restarted in [0, 1] {
        let mut sim = PayloadSim::new(2, PlaneFaults::default());
        sim.want(1, chunk(0));
        sim.put(0, chunk(0), 30 * PAGE);
        amid_a_read(&mut sim);
        sim.restart(restarted);
        sim.pass(Nanos::from_secs(10));
        sim.told.clear();
        // What was on its way to a host that is gone went with it.
        let stamp = sim.put(0, chunk(1), 30 * PAGE);
        sim.want(1, chunk(1));
        sim.arrives(1, stamp);
        sim.at_rest();
    }
}
