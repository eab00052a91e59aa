//! The machines in the actors that are deployed, on planes of this process and real time: one prompt
//! goes from prefill to decode, byte for byte.

mod doorbell;
mod planes;

use actix::{Addr, Context, Handler, Message, System};
use engine::actors::*;
use engine::core::channel::ChannelConfig;
use engine::core::ids::{Incarnation, RequestId, StepId, TransferKey};
use engine::core::instance::{Instance, InstanceInput};
use engine::core::layout::{BlockList, Geometry, Group, GroupKind, HeadSlots, LayerLayout};
use engine::core::message::*;
use engine::core::station::{CoreConfig, CoreSettings};
use engine::core::transfer::{TransferConfig, TransferSettings};
use engine::core::{Machine, Nanos, Outbox};
use engine::fabric::*;
use planes::{Loopback, Side, Store, Wire};
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
    CoreConfig {
        engine: role.to_string().into(),
        incarnation: Incarnation(1),
        role,
        mode,
        geometry: Arc::new(geometry()),
        http: "none".into(),
        control: "loopback".into(),
        dp: (0, 1),
        router: None,
        settings: CoreSettings::default(),
        channel: ChannelConfig::default(),
        moriio: None,
    }
}

fn geometry() -> Geometry {
    Geometry {
        model: "actors".into(),
        tp: TP,
        kv_heads: 4,
        latent: false,
        packed: false,
        layers: 1,
        groups: vec![Group { kind: GroupKind::Full, block_tokens: BLOCK, layers: vec![0] }],
    }
}

fn transfer(role: Role, mode: Mode, rank: u16, plane: &Loopback) -> TransferConfig {
    TransferConfig {
        rank,
        role,
        mode,
        geometry: Arc::new(geometry()),
        address: plane.address(),
        caps: plane.caps(),
        memory: vec![Memory::Own { base: 0, len: u64::from(BLOCKS) * BLOCK_BYTES }],
        layers: vec![LayerLayout {
            region: 0,
            base: 0,
            shape: [BLOCKS, 2, BLOCK, 8],
            stride: [2 * 16 * 8, 16 * 8, 8, 1],
            element: 1,
            slots: HeadSlots::Fused,
        }],
        settings: TransferSettings::default(),
    }
}

/// What a core may tell its engine.
#[derive(Debug)]
enum Told {
    Ready,
    Freed,
    Loaded,
}

/// The engine's side; a core with ranks elsewhere reaches them by the addresses.
struct Desk {
    told: mpsc::UnboundedSender<Told>,
    away: Vec<Addr<Ranks>>,
}

impl Outlet for Desk {
    fn prefill(&mut self, answer: PrefillAnswer, _: &mut Inputs<Instance>) {
        if matches!(answer, PrefillAnswer::SourceFree { failure: None, .. }) {
            self.told.send(Told::Freed).unwrap();
        }
    }

    fn decode(&mut self, answer: DecodeAnswer, _: &mut Inputs<Instance>) {
        if matches!(answer, DecodeAnswer::Loaded { .. }) {
            self.told.send(Told::Loaded).unwrap();
        }
    }

    fn job(&mut self, job: &Job) {
        for (rank, away) in (0..).zip(&self.away) {
            away.do_send(Give(InstanceInput::Job { rank, job: job.clone() }));
        }
    }

    fn report(&mut self, _: u16, report: &Report) {
        if matches!(report, Report::Ready { .. }) {
            self.told.send(Told::Ready).unwrap();
        }
    }
}

/// Where the reports of a rank go that is not beside its core.
struct Away(Addr<Host>, mpsc::UnboundedSender<Told>);

impl Outlet for Away {
    fn report(&mut self, rank: u16, report: &Report) {
        let report = report.clone();
        if matches!(report, Report::Ready { .. }) {
            self.1.send(Told::Ready).unwrap();
        }
        self.0.do_send(Give(InstanceInput::Report { rank, report }));
    }
}

type Host = Driver<Site<Planes, Desk>>;
type Ranks = Driver<Site<Planes, Away>>;

/// An instance with its actors.
struct Served {
    core: Addr<Host>,
    /// Of ranks in actors of their own.
    away: Vec<Addr<Ranks>>,
    news: mpsc::UnboundedReceiver<Told>,
}

impl Served {
    /// Core and ranks in one actor, or each in its own, as in several processes.
    async fn start(role: Role, mode: Mode, side: Side, store: &Store, together: bool) -> Served {
        #[allow(clippy::disallowed_types)] // A driver's clock is where time enters.
        let started = std::time::Instant::now();
        // So slowly that no limit of the machines passes, whatever else runs here.
        let clock: Clock = Arc::new(move || Nanos(started.elapsed().as_micros() as u64));
        let (told, news) = mpsc::unbounded_channel();
        let (mut instance, mut fabric) = (Instance::default(), Planes::new());
        instance.add_core(core_config(role, mode));
        fabric.set_control(Box::new(side));
        let plane = |rank: u16| Loopback::new(rank as u8 + 8 * role as u8, store.clone());
        if together {
            for rank in 0..TP {
                let plane = plane(rank);
                instance.add_rank(transfer(role, mode, rank, &plane));
                fabric.add_rank(rank, Box::new(plane));
            }
        }
        let first = (0..TP).filter(|_| together).map(InstanceInput::Start);
        let site = Site { fabric, outlet: Desk { told: told.clone(), away: Vec::new() } };
        let core = Driver::start(|_| site, instance, first, clock.clone());
        let ranks = (0..TP).filter(|_| !together).map(|rank| {
            let (mut instance, mut fabric, plane) =
                (Instance::default(), Planes::new(), plane(rank));
            instance.add_rank(transfer(role, mode, rank, &plane));
            fabric.add_rank(rank, Box::new(plane));
            let site = Site { fabric, outlet: Away(core.clone(), told.clone()) };
            Driver::start(|_| site, instance, [InstanceInput::Start(rank)], clock.clone())
        });
        let away: Vec<_> = ranks.collect();
        core.send(Apart(away.clone())).await.unwrap();
        let mut served = Served { core, away, news };
        for _ in 0..TP {
            assert!(matches!(served.news.recv().await, Some(Told::Ready)));
        }
        served
    }

    async fn give(&self, input: InstanceInput) {
        self.core.send(Give(input)).await.unwrap();
    }

    async fn layers(&self, step: StepId, layers: u16) {
        for rank in 0..TP {
            let input = InstanceInput::Layers { rank, step, layers };
            match self.away.get(usize::from(rank)) {
                Some(away) => away.send(Give(input)).await.unwrap(),
                None => self.give(input).await,
            }
        }
    }
}

/// The ranks that are elsewhere.
#[derive(Message)]
#[rtype(result = "()")]
struct Apart(Vec<Addr<Ranks>>);

impl Handler<Apart> for Host {
    type Result = ();
    fn handle(&mut self, Apart(away): Apart, context: &mut Context<Self>) {
        self.tell(context, |site, _| site.outlet.away = away);
    }
}

fn fill(store: &Store) {
    for ((plane, _), bytes) in store.lock().unwrap().iter_mut().filter(|(key, _)| key.0 < 8) {
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add(plane + 1);
        }
    }
}

async fn carry(mode: Mode, together: bool) {
    let store = Store::default();
    let wire = Arc::new(Mutex::new(Wire::default()));
    let side = |side| Side { side, wire: wire.clone() };
    let mut prefill = Served::start(Role::Prefill, mode, side(1), &store, together).await;
    let mut decode = Served::start(Role::Decode, mode, side(0), &store, together).await;
    fill(&store);

    let key = TransferKey { id: "t".into(), prompt: 0 };
    let leg = DecodeLeg {
        key: key.clone(),
        sibling: 0,
        mode,
        prefill: "prefill".into(),
        control: "loopback".into(),
        life: None,
        moriio: None,
    };
    let request = RequestId::from("d");
    let arrived = DecodeHook::Arrived { request: request.clone(), leg, tokens: TOKENS };
    decode.give(InstanceInput::Decode(arrived)).await;
    let blocks = vec![BlockList::new((20..24).collect())];
    let allocated = DecodeHook::Allocated { request, computed: 0, blocks };
    decode.give(InstanceInput::Decode(allocated)).await;

    let request = RequestId::from("p");
    let leg = PrefillLeg { key, siblings: 1, mode, life: None, moriio: None };
    let arrived = PrefillHook::Arrived { request: request.clone(), leg, tokens: TOKENS };
    prefill.give(InstanceInput::Prefill(arrived)).await;
    let blocks = vec![BlockList::new((3..7).collect())];
    let chunk = Chunk { request: request.clone(), from: 0, to: TOKENS, blocks };
    let scheduled = PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] };
    prefill.give(InstanceInput::Prefill(scheduled)).await;
    prefill.layers(StepId(1), 1).await;
    let finished = PrefillHook::Finished { request, reason: FinishReason::Length };
    prefill.give(InstanceInput::Prefill(finished)).await;

    assert!(matches!(decode.news.recv().await, Some(Told::Loaded)));
    assert!(matches!(prefill.news.recv().await, Some(Told::Freed)));
    let store = store.lock().unwrap();
    for rank in 0..TP as u8 {
        let (source, sink) = (&store[&(rank, 0)], &store[&(rank + 8, 0)]);
        let range = |first: u64| {
            let bytes = 4 * BLOCK_BYTES as usize;
            let from = (first * BLOCK_BYTES) as usize;
            from..from + bytes
        };
        assert_eq!(source[range(3)], sink[range(20)], "{mode}, rank {rank}");
        assert!(sink[..range(20).start].iter().all(|byte| *byte == 0), "{mode}, rank {rank}");
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
    fn gauges(&self) -> engine::core::Gauges {
        Default::default()
    }
}

/// A seat over nothing.
struct Nothing(Vec<u32>);

impl Seat for Nothing {
    type Machine = Echo;

    fn poll(&mut self, _: Nanos, _: &mut Inputs<Echo>) -> Wake {
        Wake::External
    }

    fn perform(&mut self, _: &Echo, effect: u32, _: &mut Inputs<Echo>) {
        self.0.push(effect);
    }

    fn ticks(&self, _: &Echo, _: Nanos, _: &mut Inputs<Echo>) {}

    fn set_waker(&mut self, _: Waker) {}
}

#[derive(Message)]
#[rtype(result = "Vec<u32>")]
struct Heard;

impl Handler<Heard> for Driver<Nothing> {
    type Result = Vec<u32>;
    fn handle(&mut self, _: Heard, _: &mut Context<Self>) -> Vec<u32> {
        self.look().0.0.clone()
    }
}

#[test]
fn a_full_mailbox_refuses_what_is_new_and_loses_nothing_of_what_was_begun() {
    System::new().block_on(async {
        let driver = Driver::start(|_| Nothing(Vec::new()), Echo, None, Arc::new(|| Nanos::ZERO));
        let port = Port::new(driver, 8);
        // The actor has no turn as long as nobody waits.
        let mut sent = 0;
        while let Some(place) = port.reserve() {
            port.post(Give(sent), place);
            sent += 1;
        }
        assert_eq!((sent, port.free(), port.has_room()), (6, 2, false), "a quarter is kept");
        while let Some(place) = port.try_wait() {
            port.post(Give(sent), place);
            sent += 1;
        }
        assert_eq!((sent, port.free()), (8, 0));
        // What waits gets its place when something was handled, and is not overtaken.
        let place = port.wait().await;
        port.post(Give(sent), place);
        let heard = port.address().send(Heard).await.unwrap();
        assert_eq!(heard, (0..=sent).collect::<Vec<_>>());
        assert_eq!((port.free(), port.has_room()), (8, true));
    });
}
