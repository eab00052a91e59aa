//! Hosts, and engines with one worker that the tests play.

use kvferry::instance::Overrides;
use kvferry::sidecar::proto::{ClientIdentity, FromHost, ToHost};
use kvferry::sidecar::record::TransferSummary;
use kvferry::sidecar::settings::{ConnectorSettings, TransferBackend, TransferPlacement};
use kvferry::sidecar::spec::{KvTensor, LayerGroup, ServingEngine, ServingWorker, WorkerRegion};
use kvferry::sidecar::{DeviceEvent, SidecarClient, TransferAgent};
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::ids::{StepId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    Chunk, DecodeAnswer, DecodeHook, DecodeLeg, FinishReason, Mode, PrefillAnswer, PrefillHook,
    PrefillLeg, Role,
};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::fabric::{Endpoint, Memory};
use kvferry_fabric_host::{HugePages, MemfdPool};

pub(crate) use crate::sidecar_process::{PATIENCE, SidecarProcess, place, scrape, series, spawn};
pub(crate) use TransferPlacement::{Sidecar, Worker as InWorker};

pub(crate) const BLOCKS: u64 = 16;
/// Bytes of a block in a layer: 2 heads, 32 tokens, 8 elements of 4 bytes.
pub(crate) const BLOCK: u64 = 2 * 32 * 8 * 4;
pub(crate) const LAYERS: [&str; 2] = ["layers.0.attn", "layers.1.attn"];

/// An engine with one worker.
pub(crate) struct SidecarFixture {
    pub(crate) scheduler: SidecarClient,
    pub(crate) worker: SidecarClient,
    /// The transfer actor, if it is in the worker.
    pub(crate) transfers: Option<TransferAgent>,
    /// What a GPU does when its layers are computed, if the KV is in its memory.
    pub(crate) events: [Option<u64>; 2],
    pub(crate) groups: usize,
    pub(crate) pool: MemfdPool,
    pub(crate) address: ZmqAddress,
}

/// Times of the protocol that no busy machine passes.
fn patient() -> Overrides {
    let mut limits = Overrides::default();
    let times = "channel.hello_ms=600000,channel.silent_ms=600000,protocol.lease_ms=600000,\
        protocol.orphan_ms=600000,protocol.resume_ms=600000,operations.stall_ms=600000,\
        operations.open_ms=600000,operations.quiet_ms=600000";
    limits.assign(times).expect("they are known");
    limits
}

pub(crate) fn engine(role: Role, mode: Mode, transfer: TransferPlacement) -> ServingEngine {
    let layers = LAYERS.iter().map(|name| (*name).into()).collect();
    ServingEngine {
        role,
        model: "m".into(),
        tp: 1,
        dp: (0, 1),
        kv_heads: 2,
        latent: false,
        packed: true,
        groups: vec![LayerGroup { window: None, block_tokens: 32, layers }],
        settings: ConnectorSettings {
            read_mode: mode == Mode::Pull,
            transfer: Some(transfer),
            limits: patient(),
            ..ConnectorSettings::default()
        },
        last_incarnation: None,
    }
}

/// Its blocks have `rows` tokens.
pub(crate) fn worker(pool: &MemfdPool, rows: u64) -> ServingWorker {
    worker_at(pool, rows, None)
}

/// The same, with its KV in the memory of a GPU.
fn worker_at(pool: &MemfdPool, rows: u64, device: Option<u32>) -> ServingWorker {
    let Memory::MemFd { fd, len } = pool.memory() else { panic!("pools are memory files") };
    let base = pool.start() as u64;
    let tensor = |(n, name): (u64, &&str)| KvTensor {
        layer: (**name).into(),
        start: base + n * BLOCKS * BLOCK,
        shape: vec![BLOCKS * 32 / rows, 2, rows, 8],
        stride: vec![2 * rows * 8, rows * 8, 8, 1],
        element: 4,
    };
    ServingWorker {
        rank: 0,
        pid: std::process::id(),
        regions: vec![WorkerRegion { base, len, file: Some(fd), device }],
        tensors: (0..).zip(&LAYERS).map(tensor).collect(),
        attention: None,
    }
}

/// The next thing that the host says, unless `skip` says that it does not matter.
pub(crate) fn next(link: &mut SidecarClient, mut skip: impl FnMut(&FromHost) -> bool) -> FromHost {
    let mut heard = Vec::new();
    loop {
        link.wait(PATIENCE, &mut heard).expect("the host says something");
        heard.retain(|message| !skip(message));
        if !heard.is_empty() {
            assert_eq!(heard.len(), 1, "{heard:?}");
            return heard.remove(0);
        }
    }
}

impl SidecarFixture {
    pub(crate) fn start(host: &SidecarProcess, role: Role, mode: Mode) -> SidecarFixture {
        SidecarFixture::start_with(host, role, mode, Sidecar)
    }

    pub(crate) fn start_with(
        host: &SidecarProcess,
        role: Role,
        mode: Mode,
        transfer: TransferPlacement,
    ) -> SidecarFixture {
        SidecarFixture::of(host, engine(role, mode, transfer))
    }

    pub(crate) fn of(host: &SidecarProcess, engine: ServingEngine) -> SidecarFixture {
        let (transfer, groups) = (engine.settings.transfer(), engine.groups.len());
        let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
        let rows = engine.groups[0].block_tokens.into();
        // The stand-in takes it for that of a GPU, which both of these need.
        let of_gpu = [TransferBackend::MoriXgmi, TransferBackend::Mori];
        let device = of_gpu.contains(&engine.settings.backend()).then_some(0);
        let worker = worker_at(&pool, rows, device);
        let mut worker = host.connect(ClientIdentity::Worker(Box::new(worker)));
        let mut scheduler = host.connect(ClientIdentity::Scheduler(Box::new(engine)));
        let transfers = (transfer == InWorker)
            // SAFETY: The pool is dropped after it, and only it is told of.
            .then(|| unsafe { TransferAgent::start(host.socket.clone(), 0) }.expect("a thread"));
        let FromHost::Ready { address, .. } = next(&mut scheduler, |_| false) else { panic!() };
        assert!(matches!(next(&mut worker, |_| false), FromHost::Ready { .. }));
        SidecarFixture { scheduler, worker, transfers, events: [None; 2], groups, pool, address }
    }

    pub(crate) fn block(&mut self, layer: u64, block: u32) -> &mut [u8] {
        let at = layer * BLOCKS * BLOCK + u64::from(block) * BLOCK;
        // SAFETY: Inside the pool; the test looks when nothing is under way.
        unsafe {
            std::slice::from_raw_parts_mut(self.pool.start().add(at as usize), BLOCK as usize)
        }
    }

    pub(crate) fn tell(&mut self, message: &ToHost) {
        self.scheduler.send(message).expect("the host hears");
    }
}

/// Below which span the transfers of a request are.
pub(crate) const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

pub(crate) fn arrived(request: &str, wanted: &str, leg: &impl serde::Serialize) -> ToHost {
    let params = serde_json::json!({ wanted: true, "kvferry": leg, "traceparent": PARENT });
    ToHost::Arrived {
        request: request.into(),
        params: params.to_string().into(),
        tokens: 40,
        prompt_hash: Some(PromptHash::default()),
    }
}

/// True for what is only told for metrics; transfers that ended are kept.
pub(crate) fn is_stats(message: &FromHost, ended: &mut Vec<TransferSummary>) -> bool {
    if let FromHost::Ended(one) = message {
        ended.push(one.clone());
    }
    matches!(message, FromHost::Ended(_) | FromHost::Kept { .. })
}

/// A prompt of 40 tokens in two blocks is to go from one engine to the other; what the decode is
/// told of it.
pub(crate) fn load(
    p: &mut SidecarFixture,
    d: &mut SidecarFixture,
    mode: Mode,
    ended: &mut Vec<TransferSummary>,
) -> FromHost {
    allocate(p, d, mode, ended);
    next(&mut d.scheduler, |message| is_stats(message, ended))
}

/// The same, until the decode has blocks for it.
pub(crate) fn allocate(
    p: &mut SidecarFixture,
    d: &mut SidecarFixture,
    mode: Mode,
    ended: &mut Vec<TransferSummary>,
) {
    arrive(p, d, mode);
    let allocate = next(&mut d.scheduler, |message| is_stats(message, ended));
    assert!(matches!(allocate, FromHost::Decode(DecodeAnswer::Allocate { .. })), "{allocate:?}");
    let blocks = vec![BlockList::new(vec![7, 1]); d.groups];
    let request = "d-1".into();
    d.tell(&ToHost::Decode(DecodeHook::Allocated { request, computed: 0, blocks }));
}

/// The prefill computes it, and the decode has no blocks yet.
pub(crate) fn arrive(p: &mut SidecarFixture, d: &mut SidecarFixture, mode: Mode) {
    let key = TransferKey { id: "tx-1".into(), prompt: 0 };
    let leg = PrefillLeg::new(key.clone(), mode);
    p.tell(&arrived("p-1", "do_remote_decode", &leg));
    let control = Endpoint::tcp(&p.address.host, p.address.handshake as u16);
    let prefill = p.address.engine();
    let leg = DecodeLeg::new(key, mode, prefill, control);
    d.tell(&arrived("d-1", "do_remote_prefill", &leg));
    let blocks = vec![BlockList::new(vec![3, 5]); p.groups];
    let chunk = Chunk { request: "p-1".into(), from: 0, to: 40, blocks };
    p.tell(&ToHost::Prefill(PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] }));
    for (layer, block) in [(0, 3), (0, 5), (1, 3), (1, 5)] {
        p.block(layer, block).fill(layer as u8 * 16 + block as u8);
    }
    for (layers, event) in [(1, p.events[0]), (2, p.events[1])] {
        match &p.transfers {
            Some(transfers) => {
                // SAFETY: The test frees its events when they are seen.
                let event = event.map(|event| unsafe { DeviceEvent::new(event) });
                transfers.layers(StepId(1), layers, event);
            }
            None => {
                let message = ToHost::Layers { step: StepId(1), layers };
                p.worker.send(&message).expect("the host hears");
            }
        }
    }
    let (request, reason) = ("p-1".into(), FinishReason::Length);
    p.tell(&ToHost::Prefill(PrefillHook::Finished { request, reason }));
}

/// The same, all of it; what both schedulers are told for metrics.
pub(crate) fn transfer(
    p: &mut SidecarFixture,
    d: &mut SidecarFixture,
    mode: Mode,
) -> (Vec<TransferSummary>, Vec<TransferSummary>) {
    let (mut of_p, mut of_d) = (Vec::new(), Vec::new());
    let loaded = load(p, d, mode, &mut of_d);
    assert!(matches!(loaded, FromHost::Decode(DecodeAnswer::Loaded { .. })), "{loaded:?}");
    for (layer, block, from) in [(0, 7, 3), (0, 1, 5), (1, 7, 3), (1, 1, 5)] {
        let (moved, rest) = d.block(layer, block).split_at(32);
        // All tokens of the first block, 8 of the second: those are in the first rows of each head.
        assert!(
            moved.iter().all(|byte| *byte == layer as u8 * 16 + from),
            "{mode} {layer} {block}"
        );
        assert!(block != 7 || rest.iter().all(|byte| *byte == layer as u8 * 16 + from));
    }
    let free = next(&mut p.scheduler, |message| is_stats(message, &mut of_p));
    let FromHost::Prefill(PrefillAnswer::SourceFree { failure: None, .. }) = free else {
        panic!("{free:?}")
    };
    let (request, reason) = ("d-1".into(), FinishReason::Length);
    d.tell(&ToHost::Decode(DecodeHook::Finished { request, reason }));
    (of_p, of_d)
}
