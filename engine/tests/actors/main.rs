//! The machines as actors with drivers of their own, on planes of this process and real time: one
//! prompt goes from prefill to decode, byte for byte.

mod doorbell;
mod planes;

use actix::{Actor, Addr, AsyncContext, Context, Handler, Message, System};
use engine::actors::*;
use engine::core::channel::ChannelConfig;
use engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use engine::core::ids::{Incarnation, RequestId, StepId, TransferKey};
use engine::core::layout::{BlockList, Geometry, Group, GroupKind, HeadSlots, LayerLayout};
use engine::core::message::*;
use engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use engine::core::station::{CoreConfig, CoreSettings};
use engine::core::transfer::{Transfer, TransferConfig, TransferInput, TransferSettings};
use engine::core::{Machine, Nanos, Outbox};
use engine::fabric::*;
use planes::{Loopback, Side, Store, Wire};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

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

fn transfer(role: Role, mode: Mode, rank: u16, address: Address) -> Transfer {
    Transfer::new(TransferConfig {
        rank,
        role,
        mode,
        geometry: Arc::new(geometry()),
        address,
        placement: Placement::OnCompletion,
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
    })
}

/// What joins a core with its ranks, and keeps its answers; a host does this in a deployment.
struct Desk<M: CoreMachine + Unpin + 'static> {
    core: Addr<Driver<ControlSeat<M>>>,
    ranks: Vec<Addr<Driver<DataSeat>>>,
    ready: usize,
    done: Option<oneshot::Sender<()>>,
}

impl<M: CoreMachine + Unpin + 'static> Actor for Desk<M> {
    type Context = Context<Self>;
}

trait Core: CoreMachine {
    fn report(rank: u16, report: Report) -> Self::Input;
    fn job(effect: &Self::Effect) -> Option<&Job>;
    fn ends(effect: &Self::Effect) -> bool;
}

impl Core for Prefill {
    fn report(rank: u16, report: Report) -> PrefillInput {
        PrefillInput::Report { rank, report }
    }
    fn job(effect: &PrefillEffect) -> Option<&Job> {
        if let PrefillEffect::Job(job) = effect { Some(job) } else { None }
    }
    fn ends(effect: &PrefillEffect) -> bool {
        let free = |failure: &Option<_>| failure.is_none();
        matches!(effect, PrefillEffect::Answer(PrefillAnswer::SourceFree { failure, .. })
            if free(failure))
    }
}

impl Core for Decode {
    fn report(rank: u16, report: Report) -> DecodeInput {
        DecodeInput::Report { rank, report }
    }
    fn job(effect: &DecodeEffect) -> Option<&Job> {
        if let DecodeEffect::Job(job) = effect { Some(job) } else { None }
    }
    fn ends(effect: &DecodeEffect) -> bool {
        matches!(effect, DecodeEffect::Answer(DecodeAnswer::Loaded { .. }))
    }
}

impl<M: Core + Unpin + 'static> Handler<RankReport> for Desk<M> {
    type Result = ();
    fn handle(&mut self, news: RankReport, _: &mut Self::Context) {
        self.ready += usize::from(matches!(news.report, Report::Ready { .. }));
        self.core.do_send(Give(M::report(news.rank, news.report)));
    }
}

impl<M: Core + Unpin + 'static> Handler<Foreign<M::Effect>> for Desk<M> {
    type Result = ();
    fn handle(&mut self, effect: Foreign<M::Effect>, _: &mut Self::Context) {
        if let Some(job) = M::job(&effect.0) {
            for rank in &self.ranks {
                rank.do_send(Give(TransferInput::Job(job.clone())));
            }
        } else if M::ends(&effect.0)
            && let Some(done) = self.done.take()
        {
            done.send(()).unwrap();
        }
    }
}

#[derive(Message)]
#[rtype(result = "Vec<Addr<Driver<DataSeat>>>")]
struct Ranks;

impl<M: Core + Unpin + 'static> Handler<Ranks> for Desk<M> {
    type Result = Vec<Addr<Driver<DataSeat>>>;
    fn handle(&mut self, _: Ranks, _: &mut Self::Context) -> Self::Result {
        self.ranks.clone()
    }
}

/// Starts an engine: core, ranks and desk.
fn engine<M: Core + Unpin + 'static>(
    machine: M,
    role: Role,
    mode: Mode,
    side: Side,
    store: &Store,
    done: oneshot::Sender<()>,
) -> (Addr<Driver<ControlSeat<M>>>, Addr<Desk<M>>) {
    #[allow(clippy::disallowed_types)] // A driver's clock is where time enters.
    let started = std::time::Instant::now();
    let clock: Clock = Arc::new(move || Nanos(started.elapsed().as_nanos() as u64));
    let mut core = None;
    let desk = Desk::create(|context: &mut Context<Desk<M>>| {
        let seat = ControlSeat { plane: Box::new(side), outlet: context.address().recipient() };
        let driver = Driver::start(|_| seat, machine, None, clock.clone());
        core = Some(driver.clone());
        let ranks = (0..TP)
            .map(|rank| {
                let plane = Loopback::new(rank as u8 + 8 * role as u8, store.clone());
                let machine = transfer(role, mode, rank, plane.address());
                let core = context.address().recipient();
                let seat = DataSeat { rank, plane: Box::new(plane), core };
                Driver::start(|_| seat, machine, Some(TransferInput::Start), clock.clone())
            })
            .collect();
        Desk { core: driver, ranks, ready: 0, done: Some(done) }
    });
    (core.unwrap(), desk)
}

fn fill(store: &Store) {
    for ((plane, _), bytes) in store.lock().unwrap().iter_mut().filter(|(key, _)| key.0 < 8) {
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add(plane + 1);
        }
    }
}

async fn carry(mode: Mode) {
    let store = Store::default();
    let wire = Arc::new(Mutex::new(Wire::default()));
    let (prefill_done, freed) = oneshot::channel();
    let (decode_done, loaded) = oneshot::channel();
    let prefill = Prefill::new(core_config(Role::Prefill, mode));
    let decode = Decode::new(core_config(Role::Decode, mode));
    let side = |side| Side { side, wire: wire.clone() };
    let (prefill, desk) = engine(prefill, Role::Prefill, mode, side(1), &store, prefill_done);
    let (decode, _desk) = engine(decode, Role::Decode, mode, side(0), &store, decode_done);
    let ranks = desk.send(Ranks).await.unwrap();

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
    decode.send(Give(DecodeInput::Hook(arrived))).await.unwrap();
    let blocks = vec![BlockList::new((20..24).collect())];
    let allocated = DecodeHook::Allocated { request, computed: 0, blocks };
    decode.send(Give(DecodeInput::Hook(allocated))).await.unwrap();

    let request = RequestId::from("p");
    let leg = PrefillLeg { key, siblings: 1, mode, life: None, moriio: None };
    let arrived = PrefillHook::Arrived { request: request.clone(), leg, tokens: TOKENS };
    prefill.send(Give(PrefillInput::Hook(arrived))).await.unwrap();
    while store.lock().unwrap().len() < 2 * usize::from(TP) {
        tokio::task::yield_now().await;
    }
    fill(&store);
    let blocks = vec![BlockList::new((3..7).collect())];
    let chunk = Chunk { request: request.clone(), from: 0, to: TOKENS, blocks };
    let scheduled = PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] };
    prefill.send(Give(PrefillInput::Hook(scheduled))).await.unwrap();
    for rank in &ranks {
        let input = TransferInput::Layers { step: StepId(1), layers: 1 };
        rank.send(Give(input)).await.unwrap();
    }
    let finished = PrefillHook::Finished { request, reason: FinishReason::Length };
    prefill.send(Give(PrefillInput::Hook(finished))).await.unwrap();

    loaded.await.expect("decode has the KV");
    freed.await.expect("prefill has its blocks back");
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
    for mode in [Mode::Push, Mode::Pull] {
        System::new().block_on(carry(mode));
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

/// Keeps the effects, and with them the credits.
#[derive(Default)]
struct Keeper(Vec<Effects<u32>>);

impl Actor for Keeper {
    type Context = Context<Self>;
}

impl Handler<Effects<u32>> for Keeper {
    type Result = ();
    fn handle(&mut self, effects: Effects<u32>, _: &mut Self::Context) {
        self.0.push(effects);
    }
}

#[derive(Message)]
#[rtype(result = "Vec<u32>")]
struct Forget;

impl Handler<Forget> for Keeper {
    type Result = Vec<u32>;
    fn handle(&mut self, _: Forget, _: &mut Self::Context) -> Vec<u32> {
        self.0.drain(..).flat_map(|turn| turn.effects).collect()
    }
}

#[test]
fn a_mailbox_takes_no_more_than_its_credits_until_effects_are_performed() {
    System::new().block_on(async {
        let keeper = Keeper::default().start();
        let port = Shell::start(0, Echo, keeper.clone().recipient(), 3);
        for input in 0..3 {
            port.send(Nanos::ZERO, input).unwrap();
        }
        assert_eq!(port.send(Nanos::ZERO, 3).unwrap_err().0, 3);
        // The effects are out but not performed: the places stay taken.
        while keeper.send(Forget).await.unwrap() != [0, 1, 2] {
            assert_eq!(port.credits(), 0);
        }
        assert_eq!(port.credits(), 3);
        port.send(Nanos::ZERO, 3).unwrap();
    });
}
