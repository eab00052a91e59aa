//! One of each message, with values in all fields.

use super::super::proto::{ClientIdentity, FromHost, ToHost, VersionRange};
use super::super::rank::RankPlan;
use super::super::record::{
    SpokenDialect, TransferOutcome, TransferRecord, TransferSummary, TransferTrace,
};
use super::super::settings::{
    ConnectorSettings, HostStart, KvMemory, TransferBackend, TransferPlacement,
};
use super::super::spec::{KvTensor, LayerGroup, ServingEngine, ServingWorker, WorkerRegion};
use crate::instance::{
    BackendCounts, PATHS, PlaneConfig, PlaneCounters, PrefillOffer, ProtocolLimits,
};
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{ConnectionId, FlowId, Incarnation, SourceId, StepId, TransferKey};
use kvferry_engine::core::layout::{
    BlockList, Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout, RankLayout,
};
use kvferry_engine::core::message::{
    Chunk, DecodeAnswer, DecodeHook, FinishReason, FlowState, Mode, PrefillAnswer, PrefillHook,
    Role, TransferJob, TransferReport,
};
use kvferry_engine::core::payload::{
    ClaimId, FormerUse, PayloadAnswer, PayloadClient, PayloadFailure, PayloadHook, PayloadKey,
    PayloadStream, SlotId,
};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::verify::{DigestPlan, KvDigest, Verify};
use kvferry_engine::fabric::{Address, Endpoint, Memory, OwnMemory, RegionDesc};
use kvferry_fabric_host::{HostConfig, PathCount};
use kvferry_fabric_mori::MoriConfig;
use serde_json::json;
use std::sync::Arc;

const PROMPT_HASH: PromptHash = PromptHash([1 << 60, 7]);

fn geometry() -> Geometry {
    let group = |window, layers| KvGroup { kind: window, block_tokens: 32, layers };
    Geometry {
        model: "m".into(),
        tp: 2,
        kv_heads: 4,
        latent: false,
        packed: true,
        layers: 2,
        groups: vec![
            group(GroupKind::Full, vec![0]),
            group(GroupKind::Window { tokens: 64 }, vec![1]),
        ],
    }
}

fn layer() -> LayerLayout {
    LayerLayout {
        region: 1,
        base: 64,
        shape: [9, 2, 32, 16],
        stride: [1024, 512, 16, 1],
        element: 2,
        slots: HeadSlots::Fused,
    }
}

fn rank() -> RankLayout {
    RankLayout {
        rank: 1,
        address: Address(b"at".as_slice().into()),
        regions: vec![(RegionDesc(b"desc".as_slice().into()), 4096)],
        layers: vec![layer()],
    }
}

fn blocks() -> Vec<BlockList> {
    vec![BlockList { first: 2, ids: vec![7, 1, 70_000] }, BlockList { first: 0, ids: vec![] }]
}

fn counters() -> PlaneCounters {
    let count = |at: usize| PathCount { operations: at as u64, bytes: at as u64 * 4096 };
    let counts = std::array::from_fn::<_, { PATHS.len() }, _>(count);
    let backend = BackendCounts { rebuilds: 3, resets: 2, missing: 1, dead_queue_pairs: 4 };
    PlaneCounters { initiated: counts, served: counts, backend }
}

fn engine() -> ServingEngine {
    ServingEngine {
        role: Role::Decode,
        model: "m".into(),
        tp: 2,
        dp: (1, 2),
        kv_heads: 4,
        latent: false,
        packed: true,
        groups: vec![LayerGroup {
            window: Some(64),
            block_tokens: 32,
            layers: vec!["l.0".into(), "l.1".into()],
        }],
        settings: ConnectorSettings {
            read_mode: true,
            host_ip: "10.0.0.1".into(),
            proxy_ip: "10.0.0.9".into(),
            proxy_ping_port: 36_367,
            http_port: 8_100,
            handshake_port: 6_301,
            notify_port: 61_005,
            backend: Some(TransferBackend::Host),
            num_workers: 2,
            qp_per_transfer: Some(4),
            post_batch_size: Some(-1),
            kv_memory: KvMemory::Private,
            transfer: Some(TransferPlacement::Worker),
            host: HostStart::Connect,
            socket: "/run/s".into(),
            mori: MoriConfig { operation_ms: 5_000, ..MoriConfig::default() },
            ..ConnectorSettings::default()
        },
        last_incarnation: Some(Incarnation(9)), // since 6
    }
}

fn worker() -> ServingWorker {
    ServingWorker {
        rank: 1,
        pid: 4_711,
        regions: vec![WorkerRegion { base: 4_096, len: 8_192, file: Some(5), device: None }],
        tensors: vec![KvTensor {
            layer: "l.0".into(),
            start: 4_160,
            shape: vec![9, 2, 32, 16],
            stride: vec![1024, 512, 16, 1],
            element: 2,
        }],
        attention: Some("CPU_ATTN".into()),
    }
}

pub(super) fn parts() -> Vec<ClientIdentity> {
    vec![
        ClientIdentity::Scheduler(Box::new(engine())),
        ClientIdentity::Worker(Box::new(worker())),
        ClientIdentity::Transfer { rank: 1, last_error: Some(6) },
        ClientIdentity::Observer,
        ClientIdentity::Stage { deployment: "d".into(), stage: "1".into(), pool: Some(1 << 30) }, // since 8
    ]
}

/// What a connector tells.
pub(super) fn to_host() -> Vec<ToHost> {
    let request = || "r".into();
    let chunk = Chunk { request: request(), from: 3, to: 40, blocks: blocks() };
    let flow = |state| TransferReport::Flow { flow: FlowId(3), state };
    let prefill = [
        PrefillHook::Scheduled { step: StepId(8), chunks: vec![chunk] },
        PrefillHook::Finished { request: request(), reason: FinishReason::Length },
        PrefillHook::Preempted { request: request() },
    ];
    let decode = [
        DecodeHook::Allocated { request: request(), computed: 32, blocks: blocks() },
        DecodeHook::Finished { request: request(), reason: FinishReason::Aborted },
    ];
    let reports = [
        TransferReport::Ready { layout: rank() },
        TransferReport::Unusable { failure: Failure::EngineGone },
        TransferReport::PeerReady { peer: ConnectionId(4) },
        TransferReport::PeerFailed { peer: ConnectionId(4), failure: Failure::PeerSilent },
        TransferReport::Fenced { peer: ConnectionId(4) },
        flow(FlowState::Moving),
        flow(FlowState::Failing(Failure::Stalled)),
        flow(FlowState::Done { bytes: 1 << 40 }),
        flow(FlowState::Failed(Failure::Cancelled)),
    ];
    let mut all = vec![ToHost::Arrived {
        request: request(),
        params: "{}".into(),
        tokens: 100_000,
        prompt_hash: None,
    }];
    all.extend(prefill.map(ToHost::Prefill));
    all.extend(decode.map(ToHost::Decode));
    all.push(ToHost::Layers { step: StepId(8), layers: 2 });
    all.extend(reports.map(|report| ToHost::Report { report, moved: counters() }));
    all.push(ToHost::Moved(counters()));
    all.push(ToHost::Unable { why: "no".into() });
    all.extend(payload_hooks().map(ToHost::Payload)); // since 8
    let [key, _] = payload_keys();
    all.push(ToHost::Fetch { key, sender: "tcp://10.0.0.1:50051".into() });
    // Since 10.
    let prompt_hash = Some(PROMPT_HASH);
    all.push(ToHost::Arrived { request: request(), params: "{}".into(), tokens: 7, prompt_hash });
    all.push(ToHost::Report { report: flow(FlowState::Digested(digest())), moved: counters() });
    all
}

fn payload_keys() -> [PayloadKey; 2] {
    let stream = PayloadStream::new("0", "1", "r");
    [stream.chunk(7), stream.whole()]
}

fn payload_hooks() -> [PayloadHook; 13] {
    let [chunk, whole] = payload_keys();
    let stream = chunk.stream.clone();
    let (given_up, dropped) = (chunk.clone(), whole.clone());
    [
        PayloadHook::Reserve { ticket: 3, bytes: 1 << 33, wait: Nanos::from_ms(10) },
        PayloadHook::Put { slot: SlotId(4), key: chunk.clone(), receivers: 2, is_chunk: true },
        PayloadHook::Return { slot: SlotId(4) },
        PayloadHook::Want { key: whole.clone(), producer: Some(PayloadClient(5)) },
        PayloadHook::Want { key: chunk, producer: None },
        PayloadHook::Abandon { key: whole },
        PayloadHook::Take { claim: ClaimId(6) },
        PayloadHook::Release { claim: ClaimId(6) },
        PayloadHook::GiveUp { key: given_up, is_chunk: true, failure: "why".into() },
        PayloadHook::Drop { key: dropped },
        PayloadHook::End { stream: stream.clone(), failure: Some("why".into()), is_own: false },
        PayloadHook::End { stream: stream.clone(), failure: None, is_own: false },
        PayloadHook::CleanUp { stream, is_own: false },
    ]
}

fn payload_answers() -> Vec<PayloadAnswer> {
    let [key, whole] = payload_keys();
    let failures = [
        PayloadFailure::Ended,
        PayloadFailure::GivenUp("why".into()),
        PayloadFailure::ProducerGone,
        PayloadFailure::Taken,
        PayloadFailure::Expired,
        PayloadFailure::CleanedUp,
        PayloadFailure::Superseded,
        PayloadFailure::Overload("keys".into()),
        PayloadFailure::Closed,
    ];
    let full = PayloadFailure::PoolFull { bytes: 1, free: 2, largest: 3, share: 4 };
    let mut all = vec![
        PayloadAnswer::Reserved { ticket: 3, slot: SlotId(4), offset: 1 << 33 },
        PayloadAnswer::NotReserved { ticket: 3, failure: full },
        PayloadAnswer::NotReserved {
            ticket: 3,
            failure: PayloadFailure::TooLong { bytes: 9, pool: 8 },
        },
        PayloadAnswer::Arrived {
            key: key.clone(),
            claim: ClaimId(6),
            offset: 4_096,
            bytes: 3_305,
            generation: 7,
        },
    ];
    let missing =
        |failure| PayloadAnswer::Missing { key: whole.clone(), failure, former: FormerUse::No };
    all.extend(failures.map(missing));
    all.push(PayloadAnswer::Missing {
        key: key.clone(),
        failure: PayloadFailure::Taken,
        former: FormerUse::Yes,
    });
    all.push(PayloadAnswer::Stored { slot: SlotId(4), failure: None });
    all.push(PayloadAnswer::Waits { key: key.clone() });
    all.push(PayloadAnswer::Abandoned { key });
    all
}

fn plan() -> RankPlan {
    let (incarnation, control) = (Incarnation(1 << 50), "tcp://10.0.0.1:6301".into());
    let core = CoreConfig {
        mode: Mode::Pull,
        http: Endpoint("10.0.0.1:8100".into()),
        dp: (1, 2),
        router: Some(Endpoint("tcp://10.0.0.9:36367".into())),
        ..CoreConfig::new(Role::Prefill, "e", incarnation, geometry(), control)
    };
    RankPlan {
        core,
        rank: 1,
        host: "10.0.0.1".into(),
        plane: PlaneConfig::Host(HostConfig::default()),
        memory: vec![Memory::MemFd { fd: 5, len: 8_192 }, Memory::Own(OwnMemory::unproven(1, 2))],
        layers: vec![layer()],
        operations: ProtocolLimits::default().operations, // since 6
    }
}

fn trace() -> TransferTrace {
    let record = TransferRecord {
        request: "r".into(),
        transfer: Some(TransferKey { id: "t".into(), prompt: 1 }),
        peer: Some("p".into()),
        arrived: Nanos(1),
        begun: Some(Nanos(2)),
        moved: Some(Nanos(3)),
        finished: None,
        ended: Some((
            Nanos(4),
            TransferOutcome::Failed { cause: "stalled".into(), why: "s".into() },
        )),
        tokens: 40,
        computed: 32,
        blocks: 2,
        bytes: Some(4_096),
        dialect: Some(SpokenDialect::Native), // since 9
        parent: None,
    };
    TransferTrace {
        program: "0.1.0".into(),
        engine: Some(("e".into(), Role::Prefill, Mode::Push)),
        pid: 12,
        started_unix_us: 1 << 50,
        now: Nanos(9),
        records: vec![record],
    }
}

fn digest() -> Box<KvDigest> {
    Box::new(KvDigest { blocks: vec![1 << 60, 7], layers: vec![300, 5], count: 4 })
}

/// Those that verify KV.
fn verifying_jobs() -> [TransferJob; 2] {
    let key = TransferKey { id: "t".into(), prompt: 1 };
    let plan = DigestPlan::new(Verify::Sample, (&key, Incarnation(9)), PROMPT_HASH);
    let (peer, source, flow) = (ConnectionId(4), SourceId(5), FlowId(6));
    [
        TransferJob::Write {
            flow,
            source,
            peer,
            from: 32,
            tokens: 50,
            blocks: Arc::new(blocks()),
            request: "of-flow".into(),
            reader: None,
            verify: Some(plan),
        },
        TransferJob::Digest { flow, peer, from: 32, tokens: 50, blocks: Arc::new(blocks()), plan },
    ]
}

fn jobs() -> [TransferJob; 7] {
    let (peer, source, flow) = (ConnectionId(4), SourceId(5), FlowId(6));
    [
        TransferJob::Peer {
            peer,
            geometry: Arc::new(geometry()),
            ranks: Arc::new(vec![rank()]),
            fence_key: u64::MAX,
        },
        TransferJob::Fence { peer },
        TransferJob::Source {
            source,
            step: StepId(8),
            ready: 3,
            to: 40,
            tokens: 50,
            blocks: Arc::new(blocks()),
        },
        TransferJob::Forget { source },
        TransferJob::Write {
            flow,
            source,
            peer,
            from: 32,
            tokens: 50,
            blocks: Arc::new(blocks()),
            request: "of-flow".into(),
            reader: Some("reader".into()),
            verify: None,
        },
        TransferJob::Read {
            flow,
            peer,
            from: 32,
            tokens: 50,
            remote: Arc::new(blocks()),
            local: Arc::new(blocks()),
            request: "of-flow".into(),
        },
        TransferJob::Stop { flow },
    ]
}

/// Of an engine with a secret.
pub(super) fn offer() -> PrefillOffer {
    let (id, key) = (vec![1; 8], vec![2; 32]);
    let seal = json!({"id": id, "key": key});
    let native = json!({"mode": "Pull", "control": "tcp://10.0.0.1:6301", "life": 1_u64 << 50, "seal": seal});
    let address = json!({"host": "10.0.0.1", "handshake": 6_301, "notify": 61_005});
    let offer = json!({"address": address, "tp": 2, "moriio": true, "native": native});
    serde_json::from_value(offer).expect("an offer")
}

/// What a host tells.
pub(super) fn from_host() -> Vec<FromHost> {
    let request = || "r".into();
    let address = ZmqAddress { host: "10.0.0.1".into(), handshake: 6_301, notify: 61_005 };
    let mut all = vec![
        FromHost::Ready {
            address,
            lease_ms: 30_000,
            incarnation: Incarnation(1 << 50),
            versions: VersionRange { oldest: 5, newest: 10 }, // since 6
            offer: Some(Box::new(offer())),                   // since 9
        },
        FromHost::Refused { why: "no".into() },
        FromHost::Unusable { request: request(), why: "no".into() },
        FromHost::Begin(Box::new(plan())),
    ];
    all.extend(jobs().map(FromHost::Job));
    let prefill = [
        PrefillAnswer::SourceFree { request: request(), failure: Some(Failure::NotFetched) },
        PrefillAnswer::PreemptionSafe { request: request() },
        PrefillAnswer::Rejected { request: request(), failure: Failure::DuplicateKey },
    ];
    let decode = [
        DecodeAnswer::Allocate { request: request() },
        DecodeAnswer::Loaded { request: request() },
        DecodeAnswer::LoadFailed { request: request(), failure: Failure::LeaseExpired },
        DecodeAnswer::Rejected { request: request(), failure: Failure::Unreachable },
    ];
    all.extend(prefill.map(FromHost::Prefill));
    all.extend(decode.map(FromHost::Decode));
    let ended = |outcome, queued, duration| TransferSummary {
        outcome,
        queued,
        duration,
        bytes: vec![("tcp".into(), 1 << 33)],
        dialect: Some(SpokenDialect::Moriio), // since 9
    };
    let failed = TransferOutcome::Failed { cause: "stalled".into(), why: "s".into() };
    all.push(FromHost::Ended(ended(TransferOutcome::Done, Some(Nanos(1)), Some(Nanos(2)))));
    all.push(FromHost::Ended(ended(TransferOutcome::Local, None, None)));
    all.push(FromHost::Ended(ended(failed, None, None)));
    all.push(FromHost::Kept { held: 3, quarantined: 4 });
    all.push(FromHost::Trace(Box::new(trace())));
    // Since 8.
    all.push(FromHost::Pool {
        client: PayloadClient(5),
        bytes: 1 << 30,
        descriptor: 0,
        engine: Some("10.0.0.1:7000".into()),
        incarnation: Incarnation(1 << 50),
        versions: VersionRange { oldest: 5, newest: 10 },
    });
    all.extend(payload_answers().into_iter().map(FromHost::Payload));
    all.push(FromHost::Offer(Box::new(offer()))); // since 9
    // Since 10.
    all.extend(verifying_jobs().map(FromHost::Job));
    let failure = Failure::Corrupt("block 4 in layer 5".into());
    all.push(FromHost::Decode(DecodeAnswer::LoadFailed { request: request(), failure }));
    all
}
