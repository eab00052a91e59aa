//! The machines in the actors that are deployed, on planes of this process and real time: one
//! prompt goes from prefill to decode, byte for byte.

mod deadlines;
mod doorbell;
mod planes;

use actix::{Addr, Context, Handler, Message, System};
use kvferry_engine::actors::*;
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::ids::{Incarnation, RequestId, StepId, TransferKey};
use kvferry_engine::core::instance::{Instance, InstanceInput};
use kvferry_engine::core::layout::{BlockList, Geometry, KvGroup, LayerLayout};
use kvferry_engine::core::message::*;
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::*;
use planes::{Loopback, LoopbackMemory, LoopbackSide, LoopbackWire};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use tokio::sync::mpsc;

const TP: u16 = 2;
const TOKENS: u32 = 64;
const BLOCK: u32 = 16;
const BLOCKS: u32 = 32;
/// Bytes of one block of the one layer on one rank.
const BLOCK_BYTES: u64 = 2 * 16 * 8;

fn core_config(role: Role, mode: Mode) -> CoreConfig {
    let groups = vec![KvGroup::full(BLOCK, [0])];
    let geometry = Geometry { tp: TP, ..Geometry::new("actors", 4, groups) };
    let (engine, incarnation) = (role.to_string(), Incarnation(1));
    CoreConfig { mode, ..CoreConfig::new(role, engine, incarnation, geometry, "loopback".into()) }
}

/// Where the KV of a rank lies.
fn kv() -> (Vec<Memory>, Vec<LayerLayout>) {
    let memory = Memory::Own(OwnMemory::unproven(0, u64::from(BLOCKS) * BLOCK_BYTES));
    (vec![memory], vec![LayerLayout::contiguous(0, [BLOCKS, 2, BLOCK, 8], 1)])
}

/// What a core may tell its engine.
#[derive(Debug)]
enum EngineNotice {
    Ready,
    Freed,
    Loaded,
}

/// The engine's side; a core with ranks elsewhere reaches them by the addresses.
struct TestOutlet {
    told: mpsc::UnboundedSender<EngineNotice>,
    away: Vec<Addr<TestRanks>>,
}

impl EffectHandler for TestOutlet {
    fn prefill(&mut self, answer: PrefillAnswer, _: &mut InputQueue<Instance>) {
        if matches!(answer, PrefillAnswer::SourceFree { failure: None, .. }) {
            self.told.send(EngineNotice::Freed).unwrap();
        }
    }

    fn decode(&mut self, answer: DecodeAnswer, _: &mut InputQueue<Instance>) {
        if matches!(answer, DecodeAnswer::Loaded { .. }) {
            self.told.send(EngineNotice::Loaded).unwrap();
        }
    }

    fn job(&mut self, job: &TransferJob) {
        for (rank, away) in (0..).zip(&self.away) {
            away.do_send(Input(InstanceInput::Job { rank, job: job.clone() }));
        }
    }

    fn report(&mut self, _: u16, report: &TransferReport) {
        if matches!(report, TransferReport::Ready { .. }) {
            self.told.send(EngineNotice::Ready).unwrap();
        }
    }
}

/// Where the reports of a rank go that is not beside its core.
struct Away(Addr<TestHost>, mpsc::UnboundedSender<EngineNotice>);

impl EffectHandler for Away {
    fn report(&mut self, rank: u16, report: &TransferReport) {
        let report = report.clone();
        if matches!(report, TransferReport::Ready { .. }) {
            self.1.send(EngineNotice::Ready).unwrap();
        }
        self.0.do_send(Input(InstanceInput::Report { rank, report }));
    }
}

type TestHost = InstanceDriver<TestOutlet>;
type TestRanks = InstanceDriver<Away>;

/// An instance with its actors.
struct TestInstance {
    core: Addr<TestHost>,
    /// Of ranks in actors of their own.
    away: Vec<Addr<TestRanks>>,
    news: mpsc::UnboundedReceiver<EngineNotice>,
}

impl TestInstance {
    /// Core and ranks in one actor, or each in its own, as in several processes.
    async fn start(
        role: Role,
        mode: Mode,
        side: LoopbackSide,
        store: &LoopbackMemory,
        together: bool,
    ) -> TestInstance {
        #[allow(clippy::disallowed_types)] // A driver's clock is where time enters.
        let started = std::time::Instant::now();
        // So slowly that no limit of the machines passes, whatever else runs here.
        let clock: Clock = Arc::new(move || Nanos(started.elapsed().as_micros() as u64));
        let (told, news) = mpsc::unbounded_channel();
        let instance = || InstanceBuilder::new(core_config(role, mode)).with_clock(clock.clone());
        let with_rank = |instance: InstanceBuilder, rank: u16| {
            let plane = Loopback::new(rank as u8 + 8 * role as u8, store.clone());
            instance.with_rank(rank, Box::new(plane), kv(), TransferSettings::default())
        };
        let beside = (0..TP).filter(|_| together);
        let core = beside.fold(instance().with_core(Box::new(side)), with_rank);
        let core = core.start(|_| TestOutlet { told: told.clone(), away: Vec::new() });
        let ranks = (0..TP)
            .filter(|_| !together)
            .map(|rank| with_rank(instance(), rank).start(|_| Away(core.clone(), told.clone())));
        let away: Vec<_> = ranks.collect();
        core.send(Apart(away.clone())).await.unwrap();
        let mut served = TestInstance { core, away, news };
        for _ in 0..TP {
            assert!(matches!(served.news.recv().await, Some(EngineNotice::Ready)));
        }
        served
    }

    async fn give(&self, input: InstanceInput) {
        self.core.send(Input(input)).await.unwrap();
    }

    async fn layers(&self, step: StepId, layers: u16) {
        for rank in 0..TP {
            let input = InstanceInput::Layers { rank, step, layers };
            match self.away.get(usize::from(rank)) {
                Some(away) => away.send(Input(input)).await.unwrap(),
                None => self.give(input).await,
            }
        }
    }
}

/// The ranks that are elsewhere.
#[derive(Message)]
#[rtype(result = "()")]
struct Apart(Vec<Addr<TestRanks>>);

impl Handler<Apart> for TestHost {
    type Result = ();
    fn handle(&mut self, Apart(away): Apart, context: &mut Context<Self>) {
        self.with_adapter(context, |site, _| site.outlet.away = away);
    }
}

fn fill(store: &LoopbackMemory) {
    for ((plane, _), bytes) in store.lock().unwrap().iter_mut().filter(|(key, _)| key.0 < 8) {
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add(plane + 1);
        }
    }
}

async fn carry(mode: Mode, together: bool) {
    let store = LoopbackMemory::default();
    let wire = Arc::new(Mutex::new(LoopbackWire::default()));
    let side = |side| LoopbackSide { side, wire: wire.clone() };
    let mut prefill = TestInstance::start(Role::Prefill, mode, side(1), &store, together).await;
    let mut decode = TestInstance::start(Role::Decode, mode, side(0), &store, together).await;
    fill(&store);

    let key = TransferKey { id: "t".into(), prompt: 0 };
    let leg = DecodeLeg::new(key.clone(), mode, "prefill".into(), "loopback".into());
    let request = RequestId::from("d");
    let arrived = DecodeHook::Arrived {
        request: request.clone(),
        leg,
        tokens: TOKENS,
        prompt_hash: PromptHash::default(),
    };
    decode.give(InstanceInput::Decode(arrived)).await;
    let blocks = vec![BlockList::new((20..24).collect())];
    let allocated = DecodeHook::Allocated { request, computed: 0, blocks };
    decode.give(InstanceInput::Decode(allocated)).await;

    let request = RequestId::from("p");
    let leg = PrefillLeg::new(key, mode);
    let arrived = PrefillHook::Arrived {
        request: request.clone(),
        leg,
        tokens: TOKENS,
        prompt_hash: PromptHash::default(),
    };
    prefill.give(InstanceInput::Prefill(arrived)).await;
    let blocks = vec![BlockList::new((3..7).collect())];
    let chunk = Chunk { request: request.clone(), from: 0, to: TOKENS, blocks };
    let scheduled = PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] };
    prefill.give(InstanceInput::Prefill(scheduled)).await;
    prefill.layers(StepId(1), 1).await;
    let finished = PrefillHook::Finished { request, reason: FinishReason::Length };
    prefill.give(InstanceInput::Prefill(finished)).await;

    assert!(matches!(decode.news.recv().await, Some(EngineNotice::Loaded)));
    assert!(matches!(prefill.news.recv().await, Some(EngineNotice::Freed)));
    let store = store.lock().unwrap();
    for rank in 0..TP as u8 {
        let (source, receiver) = (&store[&(rank, 0)], &store[&(rank + 8, 0)]);
        let range = |first: u64| {
            let bytes = 4 * BLOCK_BYTES as usize;
            let from = (first * BLOCK_BYTES) as usize;
            from..from + bytes
        };
        assert_eq!(source[range(3)], receiver[range(20)], "{mode}, rank {rank}");
        assert!(receiver[..range(20).start].iter().all(|byte| *byte == 0), "{mode}, rank {rank}");
    }
}

#[test]
fn actors_with_drivers_carry_a_prompt_byte_for_byte() {
    for (mode, together) in
        [(Mode::Push, true), (Mode::Pull, true), (Mode::Push, false), (Mode::Pull, false)]
    {
        System::new().block_on(carry(mode, together));
    }
}

/// Answers each input with itself.
struct Echo;

impl Machine for Echo {
    type Input = u32;
    type Effect = u32;
    fn handle(&mut self, _: Nanos, input: u32, out: &mut Outbox<u32>) {
        out.push(input);
    }
    fn deadline(&self) -> Option<Nanos> {
        None
    }
    fn gauges(&self) -> kvferry_engine::core::Gauges {
        Default::default()
    }
}

/// An adapter over nothing.
struct Nothing(Vec<u32>);

impl PlaneAdapter for Nothing {
    type Machine = Echo;

    fn poll(&mut self, _: Nanos, _: &mut InputQueue<Echo>) -> NextPoll {
        NextPoll::External
    }

    fn perform(&mut self, _: &Echo, effect: u32, _: &mut InputQueue<Echo>) {
        self.0.push(effect);
    }

    fn ticks(&self, _: &Echo, _: Nanos, _: &mut InputQueue<Echo>) {}

    fn set_waker(&mut self, _: Waker) {}
}

#[derive(Message)]
#[rtype(result = "Vec<u32>")]
struct AskReceived;

impl Handler<AskReceived> for Driver<Nothing> {
    type Result = Vec<u32>;
    fn handle(&mut self, _: AskReceived, _: &mut Context<Self>) -> Vec<u32> {
        self.adapter_and_machine().0.0.clone()
    }
}

#[test]
fn a_full_mailbox_refuses_what_is_new_and_loses_nothing_of_what_was_begun() {
    System::new().block_on(async {
        let driver = Driver::start(|_| Nothing(Vec::new()), Echo, None, Arc::new(|| Nanos::ZERO));
        let port = MailboxSender::new(driver, 8);
        // The actor has no turn as long as nobody waits.
        let mut sent = 0;
        while let Some(place) = port.reserve() {
            port.post(Input(sent), place);
            sent += 1;
        }
        assert_eq!((sent, port.free(), port.has_room()), (6, 2, false), "a quarter is kept");
        while let Some(place) = port.try_wait() {
            port.post(Input(sent), place);
            sent += 1;
        }
        assert_eq!((sent, port.free()), (8, 0));
        // What waits gets its place when something was handled, and is not overtaken.
        let place = port.wait().await;
        port.post(Input(sent), place);
        let heard = port.address().send(AskReceived).await.unwrap();
        assert_eq!(heard, (0..=sent).collect::<Vec<_>>());
        assert_eq!((port.free(), port.has_room()), (8, true));
    });
}
