//! Faults of the data network do what they say, and no more.

use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Caps, Completion, Credits, DataEvent, DataPlane, Direction, FabricError, FenceScope, Landed,
    OpId, PeerId, Placement, PlaneTimeouts, QuiesceTicket, Refused, RegionId, SessionId, Submit,
};
use kvferry_sim::dma::{
    BytesDecision, CompletionDecision, DataPlaneIx, Dma, DmaCalls, DmaConfig, DmaContext, DmaEvent,
    DmaHooks, DmaOutput, NicIx, OpDecision, OpInfo, PlaneSpec, SimDataPlane,
};
use kvferry_sim::keyed_rng::InclusiveRange;
use kvferry_sim::memory::{MemoryFidelity, RankStore};
use kvferry_sim::queue::{EventQueue, StepContext};
use proptest::prelude::*;
use std::collections::BTreeMap;

const MEMORY: u64 = 1 << 16;
const SESSION: SessionId = SessionId(0);
const BYTES_PER_SEC: u64 = 10_000_000_000;

/// Fates by operation id.
#[derive(Default)]
struct ScriptedOps(BTreeMap<OpId, OpDecision>);

impl DmaHooks for ScriptedOps {
    fn decide_op(&mut self, _now: Nanos, op: &OpInfo<'_>) -> OpDecision {
        self.0.get(&op.op).cloned().unwrap_or_default()
    }
}

/// Planes 0 and 1 on nodes 0 and 1, a session from 0 to 1.
struct DmaBench {
    dma: Dma,
    planes: Vec<SimDataPlane>,
    queue: EventQueue<DmaEvent>,
    fates: ScriptedOps,
    /// What plane 0 polled, and when.
    seen: Vec<(Nanos, DataEvent)>,
    /// When slices landed, of which operation.
    landed: Vec<(Nanos, OpId)>,
    ops: u64,
}

impl DmaBench {
    fn new() -> DmaBench {
        let config = DmaConfig { latency: InclusiveRange::exactly(1_000), ..DmaConfig::default() };
        let mut dma = Dma::new(config);
        let caps = Caps {
            read: true,
            write: true,
            slices_max: 64,
            per_peer: Credits::UNLIMITED,
            in_all: Credits::of_operations(8),
            placement: Placement::OnCompletion,
            fence: FenceScope::Peer,
            patience: PlaneTimeouts::default(),
        };
        let spec = |dma: &mut Dma, node| {
            let nic = dma.add_nic(BYTES_PER_SEC);
            PlaneSpec { node, nic, nic_local: nic, caps, store: RankStore::plain(&[MEMORY]) }
        };
        let specs = [spec(&mut dma, 0), spec(&mut dma, 1)];
        let mut planes: Vec<_> = specs.into_iter().map(|spec| dma.add_plane(spec)).collect();
        let addresses = [planes[0].address(), planes[1].address()];
        for (index, plane) in planes.iter_mut().enumerate() {
            let memory = dma.store(plane.ix()).expect("it lives").memory(0, 0);
            plane.register(RegionId(0), memory).expect("memory registers");
            plane.connect(PeerId(0), &addresses[1 - index], 1).expect("a peer connects");
        }
        let (seen, landed) = (Vec::new(), Vec::new());
        let (queue, fates) = (EventQueue::new(), ScriptedOps::default());
        let mut pair = DmaBench { dma, planes, queue, fates, seen, landed, ops: 0 };
        pair.run();
        let mut events = Vec::new();
        pair.planes[1].poll(Nanos::ZERO, &mut events);
        let Some(DataEvent::Registered { result: Ok(desc), .. }) = events.pop() else {
            panic!("the region was not registered")
        };
        pair.planes[0].open(SESSION, RegionId(0), PeerId(0), &desc).expect("it opens");
        pair.run();
        pair.dma.store_mut(DataPlaneIx(0)).unwrap().bytes_mut(0).unwrap().fill(0xee);
        pair
    }

    /// Has the network do something; what it did.
    fn act(
        &mut self,
        now: Nanos,
        act: impl FnOnce(&mut Dma, &mut DmaContext<'_>),
    ) -> Vec<DmaOutput> {
        let mut out = Vec::new();
        act(&mut self.dma, &mut StepContext::new(now, &mut self.queue, &mut out));
        out
    }

    fn perform(&mut self) {
        let (mut calls, now) = (DmaCalls::default(), self.queue.now());
        for plane in &mut self.planes {
            plane.take_calls(&mut calls);
            let mut out = Vec::new();
            let cx = &mut StepContext::new(now, &mut self.queue, &mut out);
            self.dma.perform(plane.ix(), &mut calls, &mut self.fates, cx);
        }
    }

    fn take(&mut self, out: Vec<DmaOutput>) {
        let now = self.queue.now();
        for output in out {
            match output {
                DmaOutput::Deliver { plane, message: news } => {
                    self.planes[plane.0 as usize].deliver(news)
                }
                DmaOutput::Landed(landing) => {
                    let slices = self.dma.slices(&landing).iter();
                    self.landed.extend(slices.map(|_| (now, landing.op)));
                }
                _ => {}
            }
        }
        let mut events = Vec::new();
        self.planes[0].poll(now, &mut events);
        self.seen.extend(events.into_iter().map(|event| (now, event)));
    }

    /// Runs up to the time `end`.
    fn run_until(&mut self, end: Nanos) {
        self.perform();
        while self.queue.next_at().is_some_and(|at| at <= end) {
            let (now, event) = self.queue.pop().expect("there is an entry");
            let out = self.act(now, |dma, cx| dma.step(event, cx));
            self.take(out);
            self.perform();
        }
    }

    fn run(&mut self) {
        self.run_until(Nanos::MAX);
    }

    /// A write of `slices` slices of 256 bytes.
    fn write(&mut self, slices: u64, fate: OpDecision) -> Result<OpId, Refused> {
        self.submit(Direction::Write, slices, fate)
    }

    fn submit(
        &mut self,
        direction: Direction,
        slices: u64,
        fate: OpDecision,
    ) -> Result<OpId, Refused> {
        self.ops += 1;
        let op = OpId(self.ops);
        self.fates.0.insert(op, fate);
        let offsets: Vec<u64> = (0..slices).map(|n| n * 512).collect();
        let len = vec![256; slices as usize];
        let session = SESSION;
        let (local, remote, len) = (&offsets, &offsets, &len);
        self.planes[0].submit(Submit { op, session, direction, local, remote, len })?;
        self.perform();
        Ok(op)
    }

    fn outcome(&self, op: OpId) -> Option<(Nanos, Completion)> {
        self.seen.iter().find_map(|(at, event)| match event {
            DataEvent::Completed { op: id, outcome } if *id == op => Some((*at, outcome.clone())),
            _ => None,
        })
    }

    fn quiet(&self, ticket: u64) -> Option<Nanos> {
        let answer = DataEvent::Quiet { session: SESSION, ticket: QuiesceTicket(ticket) };
        self.seen.iter().find(|(_, event)| *event == answer).map(|(at, _)| *at)
    }

    fn slices(&self, op: OpId) -> usize {
        self.landed.iter().filter(|(_, id)| *id == op).count()
    }
}

fn failed(cause: FabricError, landed: Landed) -> Completion {
    Completion::Failed { cause, landed }
}

fn fails(landed: Landed, late: Option<Nanos>) -> OpDecision {
    let bytes = BytesDecision::Fails { cause: FabricError::QueuePair, landed, late };
    OpDecision { bytes, ..OpDecision::default() }
}

#[test]
fn a_lost_ack_fails_an_operation_that_landed() {
    let mut pair = DmaBench::new();
    let op = pair
        .write(8, OpDecision { ack: CompletionDecision::Lost, ..OpDecision::default() })
        .unwrap();
    pair.run();
    assert_eq!(pair.slices(op), 8);
    let (at, outcome) = pair.outcome(op).unwrap();
    assert_eq!(outcome, failed(FabricError::AckTimeout, Landed::Unknown));
    assert!(at >= DmaConfig::default().ack_timeout);
    assert_eq!(pair.dma.unsettled(), 0);
}

#[test]
fn a_completion_that_never_comes_is_ended_by_close() {
    let mut pair = DmaBench::new();
    let op = pair
        .write(8, OpDecision { ack: CompletionDecision::Never, ..OpDecision::default() })
        .unwrap();
    pair.planes[0].quiesce(SESSION, QuiesceTicket(1));
    pair.run();
    assert_eq!((pair.slices(op), pair.outcome(op), pair.quiet(1)), (8, None, None));
    pair.planes[0].close(SESSION);
    pair.run();
    assert_eq!(pair.outcome(op).unwrap().1, failed(FabricError::Closed, Landed::Unknown));
    assert!(pair.quiet(1).is_some());
    assert_eq!(pair.dma.unsettled(), 0);
}

#[test]
fn a_dead_session_fails_the_others_and_is_gone() {
    let mut pair = DmaBench::new();
    let fate = OpDecision { kill_session: true, ..fails(Landed::None, None) };
    let first = pair.write(1, fate).unwrap();
    let second = pair.write(60, OpDecision::default()).unwrap();
    pair.run();
    assert_eq!(pair.outcome(first).unwrap().1, failed(FabricError::QueuePair, Landed::None));
    assert_eq!(pair.slices(first), 0);
    assert_eq!(pair.outcome(second).unwrap().1, failed(FabricError::QueuePair, Landed::Unknown));
    assert_eq!(pair.write(1, OpDecision::default()), Err(Refused::Gone));
    pair.planes[0].quiesce(SESSION, QuiesceTicket(1));
    pair.run();
    assert!(pair.quiet(1).is_some());
}

#[test]
fn a_full_queue_takes_one_operation() {
    let mut pair = DmaBench::new();
    let mut out = Vec::new();
    out.extend(pair.act(Nanos::ZERO, |dma, cx| dma.set_queue_full(DataPlaneIx(0), true, cx)));
    pair.take(out);
    pair.write(1, OpDecision::default()).expect("an empty queue takes one");
    assert_eq!(pair.write(1, OpDecision::default()), Err(Refused::Busy));
    let mut out = Vec::new();
    out.extend(pair.act(Nanos::ZERO, |dma, cx| dma.set_queue_full(DataPlaneIx(0), false, cx)));
    pair.take(out);
    pair.write(1, OpDecision::default()).expect("the queue has room again");
}

#[test]
fn a_short_partition_delays_and_a_long_one_fails() {
    for (heals, ok) in [(Nanos::from_ms(100), true), (Nanos::from_ms(900), false)] {
        let mut pair = DmaBench::new();
        let start = pair.queue.now();
        pair.act(start, |dma, cx| dma.set_cut((0, 1), true, cx));
        let op = pair.write(4, OpDecision::default()).unwrap();
        pair.run_until(start + heals);
        assert_eq!(pair.slices(op), 0);
        pair.act(start + heals, |dma, cx| dma.set_cut((0, 1), false, cx));
        pair.run();
        let expected =
            if ok { Completion::Done } else { failed(FabricError::AckTimeout, Landed::None) };
        assert_eq!(pair.outcome(op).unwrap().1, expected);
        assert_eq!(pair.slices(op), if ok { 4 } else { 0 });
    }
}

#[test]
fn a_cut_way_back_loses_the_ack_only() {
    let mut pair = DmaBench::new();
    let start = pair.queue.now();
    pair.act(start, |dma, cx| dma.set_cut((1, 0), true, cx));
    let op = pair.write(4, OpDecision::default()).unwrap();
    pair.run();
    assert_eq!(pair.slices(op), 4);
    assert_eq!(pair.outcome(op).unwrap().1, failed(FabricError::AckTimeout, Landed::Unknown));
}

#[test]
fn a_paused_process_is_written_to_and_told_later() {
    let mut pair = DmaBench::new();
    let op = pair.write(4, OpDecision::default()).unwrap();
    for plane in [DataPlaneIx(0), DataPlaneIx(1)] {
        pair.act(Nanos::ZERO, |dma, cx| dma.set_paused(plane, true, cx));
    }
    pair.run();
    assert_eq!((pair.slices(op), pair.outcome(op)), (4, None));
    let mut out = Vec::new();
    out.extend(pair.act(Nanos::ZERO, |dma, cx| dma.set_paused(DataPlaneIx(0), false, cx)));
    pair.take(out);
    assert_eq!(pair.outcome(op).unwrap().1, Completion::Done);
}

#[test]
fn bytes_of_a_crashed_process_land_for_the_linger_only() {
    for (linger, all) in [(Nanos::from_us(50), true), (Nanos(1_300), false)] {
        let mut pair = DmaBench::new();
        let op = pair.write(60, OpDecision::default()).unwrap();
        let now = pair.queue.now();
        pair.act(now, |dma, cx| dma.crash(DataPlaneIx(0), (linger, None), cx));
        pair.run();
        assert_eq!(pair.slices(op) == 60, all, "{} slices landed", pair.slices(op));
        assert!(pair.landed.iter().all(|(at, _)| *at <= now + linger));
        assert_eq!((pair.outcome(op), pair.dma.unsettled()), (None, 0));
        assert!(pair.dma.store(DataPlaneIx(0)).is_none());
    }
}

/// Time from submit to completion of two equal operations together.
fn duration(pair: &mut DmaBench, fidelity: MemoryFidelity, count: u64) -> u64 {
    assert_eq!(fidelity, MemoryFidelity::Bytes);
    let start = pair.queue.now();
    let ops: Vec<_> = (0..count).map(|_| pair.write(64, OpDecision::default()).unwrap()).collect();
    pair.run();
    let end = ops.iter().map(|op| pair.outcome(*op).unwrap().0).max().unwrap();
    (end - start).0 - 2_000
}

#[test]
fn concurrent_transfers_share_the_port_and_a_slow_link_slows() {
    let alone = 64 * 256 * 1_000_000_000 / BYTES_PER_SEC;
    let near = |time: u64, expected: u64| time.abs_diff(expected) <= expected / 50 + 2;
    let mut pair = DmaBench::new();
    let time = duration(&mut pair, MemoryFidelity::Bytes, 1);
    assert!(near(time, alone), "{time} instead of {alone}");
    let time = duration(&mut pair, MemoryFidelity::Bytes, 4);
    assert!(near(time, 4 * alone), "{time} instead of {}", 4 * alone);
    let now = pair.queue.now();
    pair.act(now, |dma, cx| dma.set_link_rate((0, 1), Some(BYTES_PER_SEC / 10), cx));
    let time = duration(&mut pair, MemoryFidelity::Bytes, 1);
    assert!(near(time, 10 * alone), "{time} instead of {}", 10 * alone);
    pair.act(now, |dma, cx| dma.set_link_rate((1, 0), Some(1_000), cx));
    pair.act(now, |dma, cx| dma.set_link_rate((0, 1), None, cx));
    let time = duration(&mut pair, MemoryFidelity::Bytes, 1);
    assert!(near(time, alone), "{time} instead of {alone}");
    assert_eq!(pair.dma.nic_bytes(NicIx(0)), (7 * 64 * 256, 0));
}

fn any_fate() -> impl Strategy<Value = OpDecision> {
    let landed = prop::sample::select(&[Landed::None, Landed::Unknown, Landed::All][..]);
    let late = prop::option::of((0..200_000u64).prop_map(Nanos));
    let bytes = prop_oneof![
        4 => Just(BytesDecision::Whole),
        3 => (landed, late).prop_map(|(landed, late)| BytesDecision::Fails {
            cause: FabricError::QueuePair,
            landed,
            late
        }),
        1 => (0..1_000_000u64).prop_map(|by| BytesDecision::Overtaken { by: Nanos(by) }),
    ];
    let ack = prop_oneof![4 => Just(CompletionDecision::Given), 1 => Just(CompletionDecision::Lost), 1 => Just(CompletionDecision::Never)];
    let kill = prop::bool::weighted(0.1);
    (bytes, ack, kill, 0..50_000u64).prop_map(|(bytes, ack, kill_session, delay)| OpDecision {
        delay: Nanos(delay),
        ack_delay: Nanos::ZERO,
        bytes,
        ack,
        not_before: Nanos::ZERO,
        kill_session,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever becomes of operations: each completes once, what is told of their bytes is true,
    /// and nothing lands after a Quiet that covers it.
    #[test]
    fn nothing_lands_after_quiet(
        steps in prop::collection::vec((any_fate(), 0u64..20, 0u64..100_000, any::<bool>()), 1..20),
        close in 0u64..300_000,
    ) {
        let mut pair = DmaBench::new();
        let (mut ops, mut tickets) = (Vec::new(), Vec::new());
        for (fate, slices, wait, ask) in steps {
            if let Ok(op) = pair.write(slices, fate.clone()) {
                ops.push((op, slices, fate));
            }
            if ask {
                tickets.push((QuiesceTicket(tickets.len() as u64), ops.len()));
                pair.planes[0].quiesce(SESSION, tickets.last().unwrap().0);
            }
            pair.run_until(pair.queue.now() + Nanos(wait));
        }
        pair.run_until(pair.queue.now() + Nanos(close));
        tickets.push((QuiesceTicket(tickets.len() as u64), ops.len()));
        pair.planes[0].quiesce(SESSION, tickets.last().unwrap().0);
        pair.planes[0].close(SESSION);
        pair.run();
        for (op, slices, _) in &ops {
            let mine = |e: &&(Nanos, DataEvent)| {
                matches!(&e.1, DataEvent::Completed { op: id, .. } if id == op)
            };
            prop_assert_eq!(pair.seen.iter().filter(mine).count(), 1);
            match pair.outcome(*op).unwrap().1 {
                Completion::Failed { landed: Landed::None, .. } => prop_assert_eq!(pair.slices(*op), 0),
                Completion::Done | Completion::Failed { landed: Landed::All, .. } => {
                    prop_assert_eq!(pair.slices(*op) as u64, *slices);
                }
                Completion::Failed { landed: Landed::Unknown, .. } => {}
            }
        }
        for (ticket, before) in tickets {
            let quiet = pair.quiet(ticket.0);
            prop_assert!(quiet.is_some(), "ticket {} has no answer", ticket);
            for (op, ..) in &ops[..before] {
                prop_assert!(pair.outcome(*op).unwrap().0 <= quiet.unwrap());
                let late = pair.landed.iter().any(|(at, id)| id == op && *at > quiet.unwrap());
                prop_assert!(!late, "{} landed after ticket {}", op, ticket);
            }
        }
        prop_assert_eq!(pair.dma.unsettled(), 0);
    }
}

#[test]
fn what_was_done_lands_before_a_close_is_over() {
    let mut pair = DmaBench::new();
    let by = Nanos::from_ms(1);
    let fate = OpDecision { bytes: BytesDecision::Overtaken { by }, ..OpDecision::default() };
    let op = pair.write(64, fate).unwrap();
    pair.run_until(pair.queue.now() + Nanos::from_us(20));
    assert_eq!(pair.outcome(op).unwrap().1, Completion::Done);
    assert!(pair.slices(op) < 64);
    pair.planes[0].quiesce(SESSION, QuiesceTicket(1));
    pair.planes[0].close(SESSION);
    pair.run();
    assert_eq!(pair.slices(op), 64);
    assert!(pair.quiet(1).is_some());
}

#[test]
fn what_was_read_is_not_lost_by_what_becomes_of_the_source() {
    for ill in 0..4 {
        let mut pair = DmaBench::new();
        let fate = OpDecision {
            bytes: BytesDecision::Overtaken { by: Nanos::from_ms(1) },
            ..OpDecision::default()
        };
        let op = pair.submit(Direction::Read, 64, fate).unwrap();
        pair.run_until(pair.queue.now() + Nanos::from_us(20));
        assert_eq!(pair.outcome(op).unwrap().1, Completion::Done);
        assert!(pair.slices(op) < 64);
        let now = pair.queue.now();
        match ill {
            0 => pair.planes[1].fence(PeerId(0)),
            1 => pair.planes[1].deregister(RegionId(0)).unwrap(),
            2 => drop(pair.act(now, |dma, cx| dma.set_cut((1, 0), true, cx))),
            _ => {
                let (linger, mut out) = ((Nanos::from_us(1), None), Vec::new());
                out.extend(pair.act(now, |dma, cx| dma.crash(DataPlaneIx(1), linger, cx)));
                pair.take(out);
            }
        }
        pair.planes[0].quiesce(SESSION, QuiesceTicket(1));
        pair.run();
        assert_eq!(pair.slices(op), 64, "{ill}");
        assert!(pair.quiet(1).is_some());
    }
}
