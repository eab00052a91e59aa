//! The simulated planes do what every plane has to do.

use kvferry_engine::conformance::{
    ControlFixture, DataFixture, control_plane, data_plane, data_plane_limits,
};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Caps, ControlPlane, Credits, DataPlane, Endpoint, FenceScope, Memory, Placement, PlaneTimeouts,
};
use kvferry_scenarios::decide::{below, mix};
use kvferry_sim::dma::{
    BytesDecision, DataPlaneIx, Dma, DmaCalls, DmaConfig, DmaEvent, DmaHooks, DmaOutput,
    OpDecision, OpInfo, PlaneSpec, SimDataPlane,
};
use kvferry_sim::memory::RankStore;
use kvferry_sim::net::{
    ControlNetwork, NetCalls, NetConfig, NetEvent, NetHooks, NetOutput, SimControlPlane,
};
use kvferry_sim::queue::{EventQueue, StepContext};

const MEMORY: u64 = 1 << 14;

struct NoFrameFaults;

impl NetHooks for NoFrameFaults {}

/// Completions overtake one another, and every operation may complete long before some of its slices
/// land.
struct Overtaking(bool);

impl DmaHooks for Overtaking {
    fn decide_op(&mut self, _now: Nanos, op: &OpInfo<'_>) -> OpDecision {
        let ack_delay = Nanos(below(mix(u64::from(op.plane.0), op.nth), 20_001));
        let by = Nanos::from_us(500);
        let bytes = if self.0 { BytesDecision::Overtaken { by } } else { BytesDecision::Whole };
        OpDecision { bytes, ack_delay, ..OpDecision::default() }
    }
}

struct SimDataFixture {
    dma: Dma,
    planes: [SimDataPlane; 2],
    hooks: Overtaking,
    queue: EventQueue<DmaEvent>,
    calls: DmaCalls,
    out: Vec<DmaOutput>,
}

impl SimDataFixture {
    fn new(seed: u64, nodes: [u32; 2], overtaking: bool) -> SimDataFixture {
        let limits = (128, Credits::UNLIMITED, Credits::of_operations(32));
        SimDataFixture::limited(seed, nodes, overtaking, limits)
    }

    /// Planes whose operations have as many ranges, and which have credit per peer and in all.
    fn limited(
        seed: u64,
        nodes: [u32; 2],
        overtaking: bool,
        (slices_max, per_peer, in_all): (u32, Credits, Credits),
    ) -> SimDataFixture {
        let mut dma = Dma::new(DmaConfig { seed, ..DmaConfig::default() });
        let placement = if overtaking { Placement::OnQuiet } else { Placement::OnCompletion };
        let caps = Caps {
            read: true,
            write: true,
            slices_max,
            per_peer,
            in_all,
            placement,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        };
        let planes = nodes.map(|node| {
            let (nic, nic_local) = (dma.add_nic(50_000_000_000), dma.add_nic(100_000_000_000));
            dma.add_plane(PlaneSpec {
                node,
                nic,
                nic_local,
                caps,
                store: RankStore::plain(&[MEMORY]),
            })
        });
        let (queue, calls, out) = (EventQueue::new(), DmaCalls::default(), Vec::new());
        SimDataFixture { dma, planes, hooks: Overtaking(overtaking), queue, calls, out }
    }

    fn bytes(&mut self, index: usize) -> &mut [u8] {
        let store = self.dma.store_mut(DataPlaneIx(index as u32)).expect("the plane lives");
        store.bytes_mut(0).expect("a store of bytes")
    }
}

impl DataFixture for SimDataFixture {
    fn plane(&mut self, index: usize) -> &mut dyn DataPlane {
        &mut self.planes[index]
    }

    fn memory(&mut self, index: usize) -> Memory {
        self.dma.store(DataPlaneIx(index as u32)).expect("the plane lives").memory(0, 0)
    }

    fn peek(&mut self, index: usize, offset: u64, into: &mut [u8]) {
        let offset = offset as usize;
        into.copy_from_slice(&self.bytes(index)[offset..offset + into.len()]);
    }

    fn poke(&mut self, index: usize, offset: u64, bytes: &[u8]) {
        let offset = offset as usize;
        self.bytes(index)[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn advance(&mut self) {
        let now = self.queue.now();
        for plane in &mut self.planes {
            plane.take_calls(&mut self.calls);
            let cx = &mut StepContext::new(now, &mut self.queue, &mut self.out);
            self.dma.perform(plane.ix(), &mut self.calls, &mut self.hooks, cx);
        }
        if let Some((now, event)) = self.queue.pop() {
            self.dma.step(event, &mut StepContext::new(now, &mut self.queue, &mut self.out));
        }
        for output in self.out.drain(..) {
            if let DmaOutput::Deliver { plane, message: news } = output {
                self.planes[plane.0 as usize].deliver(news);
            }
        }
    }

    fn now(&mut self) -> Nanos {
        self.queue.now()
    }

    fn backend(&mut self, there: bool) -> bool {
        let plane = DataPlaneIx(0);
        let cx = &mut StepContext::new(self.queue.now(), &mut self.queue, &mut self.out);
        match there {
            true => self.dma.gain_backend(plane, cx),
            false => self.dma.lose_backend(plane, cx),
        }
        true
    }

    fn kill(&mut self) -> bool {
        let now = self.queue.now();
        let times = (Nanos::ZERO, Some(Nanos::from_ms(1)));
        let out = &mut Vec::new();
        self.dma.crash(DataPlaneIx(1), times, &mut StepContext::new(now, &mut self.queue, out));
        true
    }
}

#[test]
fn data_plane_between_nodes() {
    for seed in 0..10 {
        data_plane(&mut || Box::new(SimDataFixture::new(seed, [0, 1], false)));
    }
}

#[test]
fn data_plane_within_a_node() {
    for seed in 0..10 {
        data_plane(&mut || Box::new(SimDataFixture::new(seed, [0, 0], false)));
    }
}

#[test]
fn data_plane_whose_completions_overtake_bytes() {
    for seed in 0..10 {
        data_plane(&mut || Box::new(SimDataFixture::new(seed, [0, 1], true)));
    }
}

#[test]
fn data_plane_of_little_credit() {
    let few = Credits { operations: 40, ranges: 70, bytes: 40_000 };
    let least = Credits { operations: 12, ranges: 48, bytes: 16_384 };
    let one = Credits { operations: 1, ..few };
    let all = Credits::UNLIMITED;
    for (seed, credits) in
        (0..).zip([(few, all), (all, few), (least, few), (few, least), (one, few), (few, one)])
    {
        for slices_max in [1, 8, 9, 48] {
            let limits = (slices_max, credits.0, credits.1);
            data_plane_limits(&mut || {
                Box::new(SimDataFixture::limited(seed, [0, 1], false, limits))
            });
        }
    }
}

struct SimControlFixture {
    net: ControlNetwork,
    planes: [SimControlPlane; 2],
    queue: EventQueue<NetEvent>,
    calls: NetCalls,
    out: Vec<NetOutput>,
}

impl ControlFixture for SimControlFixture {
    fn plane(&mut self, index: usize) -> &mut dyn ControlPlane {
        &mut self.planes[index]
    }

    fn nowhere(&mut self) -> Endpoint {
        Endpoint::from("sim://nobody")
    }

    fn advance(&mut self) {
        let now = self.queue.now();
        for plane in &mut self.planes {
            plane.take_calls(&mut self.calls);
            let ix = plane.ix();
            let cx = &mut StepContext::new(now, &mut self.queue, &mut self.out);
            self.net.perform(ix, &mut self.calls, &mut NoFrameFaults, cx);
        }
        if let Some((now, event)) = self.queue.pop() {
            self.net.step(event, &mut StepContext::new(now, &mut self.queue, &mut self.out));
        }
        for NetOutput::Deliver { plane, message: news, .. } in self.out.drain(..) {
            self.planes[plane.0 as usize].deliver(news);
        }
    }

    fn now(&mut self) -> Nanos {
        self.queue.now()
    }
}

#[test]
fn control_plane_conforms() {
    for seed in 0..10 {
        control_plane(&mut || {
            let mut net = ControlNetwork::new(NetConfig { seed, ..NetConfig::default() });
            let planes = [net.add_plane("a", 0), net.add_plane("b", 1)];
            let (queue, calls, out) = (EventQueue::new(), NetCalls::default(), Vec::new());
            Box::new(SimControlFixture { net, planes, queue, calls, out })
        });
    }
}
